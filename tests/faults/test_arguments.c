/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong, missing, huge and empty arguments to every exported function: a status and a text, and nothing changed. */
#include <math.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>

#include "host.h"

static hsr_error err = HSR_ERROR_INIT;
static char path[64];

/* The call is refused with this status, and says why. */
#define REFUSED(call, wanted) do { \
        memset(err.message, 0, sizeof err.message); \
        const hsr_status got_ = (call); \
        if (!CHECK(got_ == (wanted) && err.status == got_ && err.message[0])) \
            fprintf(stderr, "  %s: %s\n", hsr_status_name(got_), err.message); \
    } while (0)
#define INVALID(call) REFUSED(call, HSR_E_INVALID)
#define OK(call) do { if (!CHECK((call) == HSR_OK)) fprintf(stderr, "  %s\n", err.message); } while (0)

/* Sizes no struct has. */
static const uint32_t bad_sizes[] = { 0, 1, 4, 7, 65537, INT32_MAX, UINT32_MAX };

#define FOR_EACH(type, variable, array) \
    for (size_t i_ = 0; i_ < sizeof (array) / sizeof *(array); i_++) \
        for (type variable = (array)[i_], *once_ = &variable; once_; once_ = NULL)

static void test_library(void)
{
    static const hsr_status statuses[] = { INT32_MIN, -16, 2, INT32_MAX };
    CHECK(hsr_version() && hsr_abi_version() == HSR_ABI_VERSION);
    FOR_EACH(hsr_status, status, statuses)
        CHECK(strcmp(hsr_status_name(status), "HSR_E_UNKNOWN") == 0);
    for (hsr_status status = -15; status <= 1; status++)
        CHECK(strcmp(hsr_status_name(status), "HSR_E_UNKNOWN") != 0);
}

static void test_model(hsr_model *m)
{
    hsr_model *other = (hsr_model *)1;
    struct { hsr_model_info info; char room[64]; } i;
    char *endless = malloc(100001);
    const char *value = "";
    uint64_t size = 1;

    memset(endless, 'x', 100000);
    endless[100000] = 0;
    INVALID(hsr_model_open(path, NULL, &err));
    INVALID(hsr_model_open(NULL, &other, &err));
    INVALID(hsr_model_open("", &other, &err));
    REFUSED(hsr_model_open(endless, &other, &err), HSR_E_IO);
    REFUSED(hsr_model_open("/tmp", &other, &err), HSR_E_FORMAT);
    REFUSED(hsr_model_open("/dev/null", &other, &err), HSR_E_FORMAT);
    CHECK(other == NULL && hsr_model_open(NULL, NULL, NULL) == HSR_E_INVALID);
    free(endless);

    INVALID(hsr_model_get_info(NULL, &i.info, &err));
    INVALID(hsr_model_get_info(m, NULL, &err));
    FOR_EACH(uint32_t, bad, bad_sizes) {
        i.info.struct_size = bad;
        INVALID(hsr_model_get_info(m, &i.info, &err));
    }
    memset(&i, 0x55, sizeof i);
    i.info.struct_size = offsetof(hsr_model_info, vocab_size);   /* an older caller: nothing behind its fields is written */
    OK(hsr_model_get_info(m, &i.info, &err));
    CHECK(i.info.vocab_size == 0x55555555 && strcmp(i.info.arch, "llama") == 0);

    CHECK(hsr_model_metadata(NULL, "a", &value, &size) == HSR_E_INVALID);
    CHECK(hsr_model_metadata(m, NULL, &value, &size) == HSR_E_INVALID);
    CHECK(hsr_model_metadata(m, "a", NULL, &size) == HSR_E_INVALID);
    CHECK(hsr_model_metadata(m, "a", &value, NULL) == HSR_E_INVALID);
    CHECK(hsr_model_metadata(m, "", &value, &size) == HSR_AGAIN && !value && size == 0);
    CHECK(hsr_model_metadata(m, "hisparse.vocab_size", &value, &size) == HSR_AGAIN && !value && size == 0);
    hsr_model_close(NULL);
    hsr_model_close(&other);
}

static void refuse_engine(hsr_model *m, const hsr_engine_opts *o, hsr_status wanted, const char *field)
{
    hsr_engine *e = (hsr_engine *)1;
    REFUSED(hsr_engine_create(m, o, &e, &err), wanted);
    if (!CHECK(!e && strstr(err.message, field)))
        fprintf(stderr, "  %s: %s\n", field, err.message);
}

static void test_engine_options(hsr_model *m)
{
    hsr_engine *e = (hsr_engine *)1;
    hsr_engine_opts o;

    hsr_engine_opts_init(NULL, 0);
    hsr_session_opts_init(NULL, 0);
    hsr_request_init(NULL, 0);
    host_opts(&o);
    INVALID(hsr_engine_create(m, &o, NULL, &err));
    INVALID(hsr_engine_create(NULL, &o, &e, &err));
    CHECK(!e);
    FOR_EACH(uint32_t, bad, bad_sizes) {
        o.struct_size = bad;
        refuse_engine(m, &o, HSR_E_INVALID, "struct_size");
    }
#define REFUSE(field, value, wanted) do { host_opts(&o); o.field = value; refuse_engine(m, &o, wanted, #field); } while (0)
    REFUSE(n_threads, -1, HSR_E_INVALID);
    REFUSE(n_threads, 1025, HSR_E_INVALID);
    REFUSE(isa, -1, HSR_E_INVALID);
    REFUSE(isa, 5, HSR_E_INVALID);
    REFUSE(chunk_tokens, 0, HSR_E_INVALID);
    REFUSE(chunk_tokens, INT32_MIN, HSR_E_INVALID);
    REFUSE(chunk_tokens, 4097, HSR_E_INVALID);
    REFUSE(max_sessions, 0, HSR_E_INVALID);
    REFUSE(max_sessions, 65537, HSR_E_INVALID);
    REFUSE(max_batch, 0, HSR_E_INVALID);
    REFUSE(max_batch, INT32_MAX, HSR_E_INVALID);
    REFUSE(readable_tiers, -1, HSR_E_INVALID);
    REFUSE(readable_tiers, 2, HSR_E_INVALID);
    REFUSE(prefetch_sources, 8, HSR_E_INVALID);
    REFUSE(hot_bytes, 1, HSR_E_INVALID);
    REFUSE(hot_bytes, (1u << 20) - 1, HSR_E_INVALID);
    REFUSE(log_level, -1, HSR_E_INVALID);
    REFUSE(log_level, 4, HSR_E_INVALID);
    REFUSE(flags, 2, HSR_E_INVALID);
    REFUSE(flags, UINT32_MAX, HSR_E_INVALID);
#undef REFUSE
    static const uint64_t huge[] = { 1ull << 45, 1ull << 50, INT64_MAX, UINT64_MAX };   /* more than can be asked for, or had */
    FOR_EACH(uint64_t, bytes, huge) {
        host_opts(&o);
        o.hot_bytes = bytes;
        e = NULL;
        const hsr_status st = hsr_engine_create(m, &o, &e, &err);
        CHECK(st == HSR_OK || ((st == HSR_E_NOMEM || st == HSR_E_INVALID) && !e && err.message[0]));
        OK(hsr_engine_destroy(&e, &err));
    }
    OK(hsr_engine_destroy(&e, &err));
    OK(hsr_engine_destroy(NULL, &err));
}

/* The largest values that are allowed still work. */
static void test_engine_limits(hsr_model *m)
{
    hsr_engine *e = NULL;
    hsr_engine_opts o;
    int32_t want[HOST_OUTPUT], tokens[HOST_OUTPUT];

    host_opts(&o);
    OK(host_life(path, &o, 1, want));
    o.max_sessions = 65536;
    o.max_batch = 65536;
    o.chunk_tokens = 4096;
    OK(hsr_engine_create(m, &o, &e, &err));
    OK(host_generate(e, 1, tokens, &err));
    CHECK(host_same(tokens, want));
    OK(hsr_engine_destroy(&e, &err));
    host_opts(&o);
    o.max_sessions = o.max_batch = o.chunk_tokens = 1;
    OK(hsr_engine_create(m, &o, &e, &err));
    OK(host_generate(e, 1, tokens, &err));
    CHECK(host_same(tokens, want));
    OK(hsr_engine_destroy(&e, &err));
    CHECK(!e);
    OK(hsr_engine_destroy(&e, &err));
}

static void test_null_handles(void)
{
    hsr_session *none = NULL, *made = (hsr_session *)1;
    hsr_engine_stats es = { .struct_size = sizeof es };
    hsr_session_stats ss = { .struct_size = sizeof ss };
    hsr_event ev = { .struct_size = sizeof ev };
    hsr_request r;
    int32_t id = 1;
    float logits[TINY_VOCAB];
    uint64_t n = 1;
    uint32_t n_events = 0;

    hsr_request_init(&r, sizeof r);
    INVALID(hsr_engine_cancel(NULL, &err));
    INVALID(hsr_engine_get_stats(NULL, &es, &err));
    INVALID(hsr_engine_step(NULL, &ev, 1, &n_events, &err));
    INVALID(hsr_session_create(NULL, NULL, &made, &err));
    CHECK(!made);
    INVALID(hsr_session_append(NULL, &id, 1, &err));
    INVALID(hsr_session_generate(NULL, &r, &err));
    INVALID(hsr_session_next(NULL, &ev, &err));
    INVALID(hsr_session_logits(NULL, &id, 1, logits, TINY_VOCAB, &err));
    INVALID(hsr_session_prefill(NULL, NULL, NULL, &err));
    INVALID(hsr_session_cancel(NULL, &err));
    made = (hsr_session *)1;
    INVALID(hsr_session_fork(NULL, &made, &err));
    CHECK(!made);
    INVALID(hsr_session_truncate(NULL, 0, &err));
    INVALID(hsr_session_rebuild(NULL, &err));
    INVALID(hsr_session_get_stats(NULL, &ss, &err));
    INVALID(hsr_session_tokens(NULL, 0, &id, &n, &err));
    OK(hsr_session_destroy(NULL, &err));
    OK(hsr_session_destroy(&none, &err));
    CHECK(hsr_session_append(NULL, &id, 1, NULL) == HSR_E_INVALID);
}

static void test_session_options(hsr_engine *e)
{
    hsr_session *s = (hsr_session *)1;
    hsr_session_opts o;

    INVALID(hsr_session_create(e, NULL, NULL, &err));
#define REFUSE(field, value) do { \
        hsr_session_opts_init(&o, sizeof o); \
        o.field = value; \
        s = (hsr_session *)1; \
        INVALID(hsr_session_create(e, &o, &s, &err)); \
        CHECK(!s && strstr(err.message, #field)); \
    } while (0)
    FOR_EACH(uint32_t, bad, bad_sizes)
        REFUSE(struct_size, bad);
    REFUSE(kv_format, -1);
    REFUSE(kv_format, 6);
    REFUSE(kv_format, INT32_MAX);
    REFUSE(context, -1);
    REFUSE(context, INT64_MIN);
    REFUSE(context, INT64_MAX);
    REFUSE(context, 1ll << 32);
    REFUSE(window_size, 0);
    REFUSE(window_size, -64);
    REFUSE(window_size, 63);
    REFUSE(sink_size, -64);
    REFUSE(sink_size, 1);
    REFUSE(rollback_tokens, -1);
    REFUSE(profile, -1);
    REFUSE(profile, 99);
    REFUSE(index_kind, -1);
    REFUSE(index_kind, INT32_MAX);
    REFUSE(sketch_4bit, 4);
    REFUSE(sketch_4bit, -8);
    REFUSE(sketch_2bit, 8);
#undef REFUSE
    hsr_session_opts_init(&o, sizeof o);
    o.context = INT32_MAX;
    REFUSED(hsr_session_create(e, &o, &s, &err), HSR_E_CONTEXT);
    o.beyond_trained = INT32_MIN;
    o.window_size = o.sink_size = INT32_MAX - 63;
    o.rollback_tokens = INT32_MAX;
    o.user = &o;
    OK(hsr_session_create(e, &o, &s, &err));
    int32_t ids[200] = { 0 };
    OK(hsr_session_append(s, ids, 200, &err));
    OK(hsr_session_prefill(s, NULL, NULL, &err));
    OK(hsr_session_truncate(s, 3, &err));
    OK(hsr_session_destroy(&s, &err));
    CHECK(!s);
    OK(hsr_session_destroy(&s, &err));
}

/* Profiles, and the calls that measure: every field out of range is named, and nothing changes. */
static void test_sparse_arguments(hsr_engine *e)
{
    hsr_profile p;
    int32_t id = 7;
    hsr_session *s = NULL;
    int32_t ids[4] = { 1, 2, 3, 4 };
    float out[8];

#define REFUSE(field, value, name) do { \
        hsr_profile_init(&p, sizeof p); \
        p.field = value; \
        CHECK(hsr_profile_register(e, &p, &id, &err) < 0 && strstr(err.message, name)); \
    } while (0)
    REFUSE(budget, 0, "budget");
    REFUSE(budget, -1, "budget");
    REFUSE(selector, 10, "selector");
    REFUSE(selector, HSR_SELECT_SKETCH, "sketch");
    REFUSE(sparse_ratio, 1.5f, "sparse_ratio");
    REFUSE(sparse_ratio, (float)NAN, "sparse_ratio");
    REFUSE(slice_size, 48, "slice_size");
    REFUSE(slice_size, (p.budget = 48, 64), "budget is 48");
    REFUSE(forced_history, 65, "forced_history");
    REFUSE(forced_history, -1, "forced_history");
    REFUSE(candidates, -1, "candidates");
    REFUSE(dense_below, -1, "dense_below");
    REFUSE(prefill_budget, -1, "prefill_budget");
    REFUSE(block_size_coarse, 96, "block_size_coarse");
    REFUSE(block_size_fine, 0, "block_size_fine");
    REFUSE(top_k_coarse, 0, "top_k_coarse");
    REFUSE(n_dense_layers, 1, "dense_layers");
    REFUSE(n_layer_budgets, 1000, "layer_budgets");
#undef REFUSE
    hsr_profile_init(&p, sizeof p);
    INVALID(hsr_profile_register(e, &p, NULL, &err));
    INVALID(hsr_profile_register(NULL, &p, &id, &err));
    OK(hsr_profile_register(e, &p, &id, &err));
    CHECK(id > 0);

    OK(hsr_session_create(e, NULL, &s, &err));
    REFUSED(hsr_session_set_profile(s, id, &err), HSR_E_UNSUPPORTED);   /* the session has no index */
    INVALID(hsr_session_set_profile(s, id + 1, &err));
    REFUSED(hsr_session_fill(s, 10, 0, &err), HSR_E_STATE);
    OK(hsr_session_append(s, ids, 4, &err));
    OK(hsr_session_prefill(s, NULL, NULL, &err));
    INVALID(hsr_session_observe(s, 4, 0, 0, 1, out, 8, &err));
    INVALID(hsr_session_observe(s, HSR_OBSERVE_KEYS, 1000, 0, 1, out, 8, &err));
    INVALID(hsr_session_observe(s, HSR_OBSERVE_KEYS, 0, 4, 1, out, 8, &err));
    INVALID(hsr_session_observe(s, HSR_OBSERVE_KEYS, 0, 0, UINT64_MAX, out, 8, &err));
    INVALID(hsr_session_observe(s, HSR_OBSERVE_KEYS, 0, 0, 4, NULL, 8, &err));
    INVALID(hsr_session_observe(s, HSR_OBSERVE_MASSES, 0, 1, 1, out, 8, &err));
    hsr_capture c = { .struct_size = sizeof c, .layer_end = 1, .n = 4 };
    INVALID(hsr_session_capture(s, &c, &err));
    INVALID(hsr_session_capture(s, NULL, &err));
    REFUSED(hsr_session_fill(s, UINT64_MAX, 0, &err), HSR_E_CONTEXT);
    OK(hsr_session_destroy(&s, &err));
}

static void test_session_calls(hsr_engine *e)
{
    static const uint64_t huge[] = { TINY_CONTEXT + 1, UINT32_MAX, 1ull << 32, 1ull << 62, INT64_MAX, UINT64_MAX };
    hsr_session *s = NULL;
    hsr_session_stats before = { .struct_size = sizeof before }, after = { .struct_size = sizeof after };
    hsr_event ev = { .struct_size = sizeof ev };
    int32_t ids[4] = { 1, 2, 3, 4 }, out[4];
    float logits[TINY_VOCAB];
    uint64_t n = 4;

    OK(hsr_session_create(e, NULL, &s, &err));
    CHECK(hsr_session_next(s, &ev, &err) == HSR_AGAIN);
    OK(hsr_session_prefill(s, NULL, NULL, &err));
    OK(hsr_session_rebuild(s, &err));
    OK(hsr_session_truncate(s, 0, &err));
    OK(hsr_session_cancel(s, &err));
    REFUSED(hsr_session_generate(s, NULL, &err), HSR_E_STATE);
    OK(hsr_session_append(s, ids, 4, &err));
    OK(hsr_session_get_stats(s, &before, &err));

    INVALID(hsr_session_append(s, NULL, 4, &err));
    INVALID(hsr_session_append(s, ids, 0, &err));
    INVALID(hsr_session_logits(s, NULL, 1, logits, TINY_VOCAB, &err));
    INVALID(hsr_session_logits(s, ids, 0, logits, TINY_VOCAB, &err));
    INVALID(hsr_session_logits(s, ids, 1, NULL, TINY_VOCAB, &err));
    INVALID(hsr_session_logits(s, ids, 1, logits, TINY_VOCAB - 1, &err));
    INVALID(hsr_session_logits(s, ids, 2, logits, TINY_VOCAB, &err));
    FOR_EACH(uint64_t, many, huge) {
        REFUSED(hsr_session_append(s, ids, many, &err), HSR_E_CONTEXT);
        INVALID(hsr_session_logits(s, ids, many, logits, TINY_VOCAB, &err));
        INVALID(hsr_session_truncate(s, many, &err));
    }
    REFUSED(hsr_session_logits(s, ids, UINT64_MAX / TINY_VOCAB, logits, UINT64_MAX, &err), HSR_E_CONTEXT);
    INVALID(hsr_session_truncate(s, 5, &err));
    INVALID(hsr_session_fork(s, NULL, &err));
    INVALID(hsr_session_get_stats(s, NULL, &err));
    INVALID(hsr_session_tokens(s, 0, out, NULL, &err));
    INVALID(hsr_session_tokens(s, 0, NULL, &n, &err));
    INVALID(hsr_session_next(s, NULL, &err));
    FOR_EACH(uint32_t, bad, bad_sizes) {
        hsr_request r;
        hsr_request_init(&r, sizeof r);
        r.struct_size = ev.struct_size = after.struct_size = bad;
        INVALID(hsr_session_generate(s, &r, &err));
        INVALID(hsr_session_get_stats(s, &after, &err));
        INVALID(hsr_session_next(s, &ev, &err));
    }
    after.struct_size = sizeof after;
    OK(hsr_session_get_stats(s, &after, &err));
    CHECK(memcmp(&before, &after, sizeof before) == 0);

    n = UINT64_MAX;
    OK(hsr_session_tokens(s, 2, out, &n, &err));
    CHECK(n == 2 && out[0] == 3 && out[1] == 4);
    n = 4;
    OK(hsr_session_tokens(s, UINT64_MAX, out, &n, &err));
    CHECK(n == 0);
    OK(hsr_session_tokens(s, 0, NULL, &n, &err));
    CHECK(n == 4);
    OK(hsr_session_destroy(&s, &err));
}

/* A place for an event that is none costs no event. */
static void test_events(hsr_engine *e)
{
    hsr_session *s = NULL;
    hsr_request r;
    hsr_event ev[3];
    int32_t id = 1, got = 0;
    uint32_t n = 0;

    hsr_request_init(&r, sizeof r);
    r.max_tokens = 10;
    r.ignore_eos = 1;
    OK(hsr_session_create(e, NULL, &s, &err));
    OK(hsr_session_append(s, &id, 1, &err));
    OK(hsr_session_generate(s, &r, &err));
    for (hsr_status st = HSR_OK; st == HSR_OK; ) {
        FOR_EACH(uint32_t, bad, bad_sizes) {
            ev[0].struct_size = bad;
            INVALID(hsr_session_next(s, ev, &err));
            INVALID(hsr_engine_step(e, ev, 1, &n, &err));
            ev[0].struct_size = ev[1].struct_size = sizeof *ev;
            ev[2].struct_size = bad;
            INVALID(hsr_engine_step(e, ev, 3, &n, &err));
        }
        ev[2].struct_size = sizeof *ev - 8;
        INVALID(hsr_engine_step(e, ev, 3, &n, &err));
        INVALID(hsr_engine_step(e, NULL, 3, &n, &err));
        INVALID(hsr_engine_step(e, ev, 2, NULL, &err));
        OK(hsr_engine_step(e, NULL, 0, &n, &err));   /* computes, delivers nothing */
        CHECK(n == 0);
        st = hsr_session_next(s, ev, &err);
        got += st == HSR_OK && ev->kind == HSR_EVENT_TOKEN;
        if (got == 10)
            break;
    }
    CHECK(got == 10);
    OK(hsr_session_destroy(&s, &err));
}

/* Handles that were closed in another order than they were made. */
static void test_order(void)
{
    hsr_model *m = NULL;
    hsr_engine *e = NULL;
    hsr_session *s = NULL;
    hsr_engine_opts o;
    int32_t tokens[HOST_OUTPUT], want[HOST_OUTPUT];

    host_opts(&o);
    OK(host_life(path, &o, 2, want));
    OK(hsr_model_open(path, &m, &err));
    OK(hsr_engine_create(m, &o, &e, &err));
    hsr_model_close(&m);
    CHECK(!m);
    hsr_model_close(&m);
    OK(host_generate(e, 2, tokens, &err));
    CHECK(host_same(tokens, want));
    OK(hsr_session_create(e, NULL, &s, &err));
    REFUSED(hsr_engine_destroy(&e, &err), HSR_E_BUSY);
    OK(hsr_session_destroy(&s, &err));
    OK(hsr_session_destroy(&s, &err));
    OK(hsr_engine_destroy(&e, &err));
    OK(hsr_engine_destroy(&e, &err));
}

/* Many calls with arguments out of a small set of extremes, on a live session: no crash, every refusal has a text. */
static uint64_t draw(uint32_t n)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % n;
}

static void test_random_calls(hsr_engine *e)
{
    static const int32_t numbers[] = { 0, 1, -1, 2, 64, 63, TINY_VOCAB, 1024, INT32_MAX, INT32_MIN };
    static const float reals[] = { 0, 1, -1, 0.5f, 1e-38f, 3e38f, -3e38f, NAN, INFINITY };
    static const uint64_t sizes[] = { 0, 1, 2, 63, 64, 200, TINY_CONTEXT, 1ull << 32, UINT64_MAX };
#define ONE(array) (array)[draw(sizeof (array) / sizeof *(array))]
    static int32_t ids[TINY_CONTEXT];
    static float logits[200 * TINY_VOCAB];
    hsr_token_bias bias[3];
    hsr_session *s[3] = { NULL };
    uint64_t refused = 0, done = 0;

    for (int i = 0; i < 3000; i++) {
        hsr_session **at = &s[draw(3)];
        hsr_session_opts so;
        hsr_request r;
        hsr_event ev = { .struct_size = sizeof ev };
        hsr_engine_stats es = { .struct_size = sizeof es };
        uint64_t n = ONE(sizes);
        hsr_status st = HSR_OK;

        hsr_session_opts_init(&so, sizeof so);
        hsr_request_init(&r, sizeof r);
        switch (draw(12)) {
        case 0:
            so.kv_format = (int32_t)draw(4);
            so.context = ONE(numbers);
            so.window_size = draw(2) ? 64 : ONE(numbers);
            so.sink_size = draw(2) ? 0 : ONE(numbers);
            so.rollback_tokens = ONE(numbers);
            if (!*at)
                st = hsr_session_create(e, draw(2) ? &so : NULL, at, &err);
            break;
        case 1: case 2:
            st = hsr_session_append(*at, draw(9) ? ids : NULL, n, &err);
            break;
        case 3: case 4:
            r.max_tokens = draw(2) ? 3 : ONE(numbers);
            r.temperature = draw(2) ? 1 : ONE(reals);
            r.top_p = draw(2) ? 1 : ONE(reals);
            r.repetition_penalty = draw(2) ? 2 : ONE(reals);
            r.frequency_penalty = draw(3) ? 0 : ONE(reals);
            r.penalty_window = draw(2) ? -1 : ONE(numbers);
            r.top_k = draw(2) ? 0 : ONE(numbers);
            for (int j = 0; j < 3; j++)
                bias[j] = (hsr_token_bias){ draw(2) ? 1 : ONE(numbers), ONE(reals) };
            r.bias = draw(2) ? bias : NULL;
            r.n_bias = draw(2) ? 0 : (uint32_t)draw(4);
            r.stop = draw(2) ? ids : NULL;
            r.n_stop = draw(2) ? 0 : (uint32_t)ONE(numbers);
            r.n_logprobs = draw(2) ? 0 : ONE(numbers);
            st = hsr_session_generate(*at, &r, &err);
            break;
        case 5: case 6:
            st = hsr_session_next(*at, &ev, &err);
            break;
        case 7:
            st = hsr_session_logits(*at, ids, n, logits, draw(2) ? 200 * TINY_VOCAB : 0, &err);
            break;
        case 8:
            st = hsr_session_truncate(*at, n, &err);
            break;
        case 9:
            st = draw(2) ? hsr_session_rebuild(*at, &err) : hsr_session_cancel(*at, &err);
            break;
        case 10:
            if (*at && at != &s[0] && !s[0])
                st = hsr_session_fork(*at, &s[0], &err);
            break;
        default:
            if (draw(3) == 0)
                st = hsr_session_destroy(at, &err);
            else
                st = hsr_engine_step(e, &ev, (uint32_t)draw(2), &(uint32_t){ 0 }, &err);
        }
        refused += st < 0;
        done += st == HSR_OK;
        CHECK(st >= 0 ? st <= HSR_AGAIN : st >= HSR_E_INTERNAL && err.status == st && err.message[0]);
        CHECK(st != HSR_E_INTERNAL);
        OK(hsr_engine_get_stats(e, &es, &err));
        CHECK(es.hot_blocks_used + es.hot_blocks_reserved <= es.hot_blocks_total);
    }
    CHECK(refused > 300 && done > 300);
    hsr_engine_stats es = { .struct_size = sizeof es };
    for (int i = 0; i < 3; i++)
        OK(hsr_session_destroy(&s[i], &err));
    OK(hsr_engine_get_stats(e, &es, &err));
    CHECK(es.n_sessions == 0 && es.hot_blocks_used == 0 && es.hot_blocks_reserved == 0 && es.hot_slots_used == 0);
}

int main(void)
{
    hsr_model *m = NULL;
    hsr_engine *e = NULL;
    hsr_engine_opts o;

    if (!CHECK(tiny_model_write(path, 1)))
        return CHECK_REPORT();
    OK(hsr_model_open(path, &m, &err));
    host_opts(&o);
    OK(hsr_engine_create(m, &o, &e, &err));
    test_library();
    test_model(m);
    test_engine_options(m);
    test_engine_limits(m);
    test_null_handles();
    test_session_options(e);
    test_sparse_arguments(e);
    test_session_calls(e);
    test_events(e);
    test_order();
    test_random_calls(e);
    OK(hsr_engine_destroy(&e, &err));
    hsr_model_close(&m);
    unlink(path);
    return CHECK_REPORT();
}
