/* SPDX-License-Identifier: Apache-2.0 */
/* The engine through the public interface, over a tiny model: same bits however the work is cut, shared or interrupted; counters
 * back where they were; every refusal named. */
#include <fenv.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hisparse_rt/hisparse_rt.h"
#include "check.h"
#include "tiny_model.h"

static hsr_error err = HSR_ERROR_INIT;

#define OK(call) CHECK((call) == HSR_OK)

static int32_t id_at(uint64_t i) { return (int32_t)((i * 2654435761u >> 7) % (TINY_VOCAB - 1)); }

static int32_t *some_ids(uint64_t n)
{
    int32_t *ids = malloc(n * sizeof *ids);
    for (uint64_t i = 0; i < n; i++)
        ids[i] = id_at(i);
    return ids;
}

static hsr_engine *engine_with(hsr_model *m, int32_t chunk, int32_t threads, uint32_t flags, uint64_t hot)
{
    hsr_engine_opts o;
    hsr_engine *e = NULL;
    hsr_engine_opts_init(&o, sizeof o);
    o.chunk_tokens = chunk;
    o.n_threads = threads;
    o.flags = flags;
    o.hot_bytes = hot;
    o.max_batch = 256;
    OK(hsr_engine_create(m, &o, &e, &err));
    return e;
}

static hsr_session *session_with(hsr_engine *e, int64_t context, int32_t kv_format)
{
    hsr_session_opts o;
    hsr_session *s = NULL;
    hsr_session_opts_init(&o, sizeof o);
    o.context = context;
    o.kv_format = kv_format;
    o.window_size = 64;
    o.rollback_tokens = 0;
    OK(hsr_session_create(e, &o, &s, &err));
    return s;
}

/* Everything given back, then the engine. */
static void end(hsr_engine *e)
{
    hsr_engine_stats st = { .struct_size = sizeof st };
    OK(hsr_engine_get_stats(e, &st, &err));
    CHECK(st.n_sessions == 0 && st.hot_blocks_used == 0 && st.hot_blocks_reserved == 0);
    CHECK(st.hot_slots_used == 0 && st.pages_open + st.pages_full + st.pages_sealed == 0);
    OK(hsr_engine_destroy(&e, &err));
    CHECK(e == NULL);
}

static float *logits_of(hsr_session *s, const int32_t *ids, uint64_t n)
{
    float *out = malloc(n * TINY_VOCAB * sizeof *out);
    OK(hsr_session_logits(s, ids, n, out, n * TINY_VOCAB, &err));
    return out;
}

typedef struct outcome {
    int32_t tokens[512];
    int     n, kind, reason, status;
} outcome;

static outcome drain(hsr_session *s)
{
    outcome o = { .n = 0 };
    hsr_event ev = { .struct_size = sizeof ev };
    while (hsr_session_next(s, &ev, &err) == HSR_OK)
        if (ev.kind == HSR_EVENT_TOKEN)
            o.tokens[o.n++] = ev.token;
        else {
            o.kind = ev.kind;
            o.reason = ev.reason;
            o.status = ev.status;
        }
    return o;
}

static hsr_request request_of(int32_t max_tokens, float temperature, uint64_t seed)
{
    hsr_request r;
    hsr_request_init(&r, sizeof r);
    r.max_tokens = max_tokens;
    r.temperature = temperature;
    r.seed = seed;
    r.ignore_eos = 1;
    return r;
}

static outcome run(hsr_engine *e, const int32_t *ids, uint64_t n, const hsr_request *r)
{
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO);
    OK(hsr_session_append(s, ids, n, &err));
    OK(hsr_session_generate(s, r, &err));
    outcome o = drain(s);
    OK(hsr_session_destroy(&s, &err));
    return o;
}

static bool same_tokens(const outcome *a, const outcome *b)
{
    return a->n == b->n && memcmp(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens) == 0;
}

/* ---- the same bits --------------------------------------------------------------------------------------------- */

/* Chunks, threads, neighbours, the asynchronous device, both KV types; long enough for two groups and sealed pages. */
static void test_same_bits(hsr_model *m, int32_t kv_format)
{
    enum { N = 1500 };
    static const struct { int32_t chunk, threads; uint32_t flags; bool neighbours; } ways[] = {
        { 512, 1, 0, false }, { 1, 2, 0, false }, { 7, 3, 0, true }, { 64, 2, HSR_ENGINE_ASYNC_DEBUG, true }, { 100, 2, 0, true },
    };
    int32_t *ids = some_ids(N);
    float *first = NULL;

    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        hsr_engine *e = engine_with(m, ways[i].chunk, ways[i].threads, ways[i].flags, 0);
        hsr_session *s = session_with(e, 0, kv_format), *other = NULL;
        if (ways[i].neighbours) {
            hsr_request r = request_of(300, 1, 7);
            other = session_with(e, 0, kv_format);
            OK(hsr_session_append(other, ids + 40, 333, &err));
            OK(hsr_session_generate(other, &r, &err));
        }
        float *out = logits_of(s, ids, N);
        hsr_session_stats st = { .struct_size = sizeof st };
        OK(hsr_session_get_stats(s, &st, &err));
        CHECK(st.pages_sealed > 0 && st.n_computed == N);
        if (first)
            CHECK(memcmp(first, out, (size_t)N * TINY_VOCAB * sizeof *out) == 0);
        else
            first = out;
        if (out != first)
            free(out);
        if (other)
            OK(hsr_session_destroy(&other, &err));
        OK(hsr_session_destroy(&s, &err));
        end(e);
    }
    free(first);
    free(ids);
}

static void test_seeds(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 16, 2, 0, 0);
    int32_t *ids = some_ids(100);
    outcome alone[8];
    hsr_session *s[8];

    for (int i = 0; i < 8; i++) {
        hsr_request r = request_of(40, i % 2 ? 1.5f : 0, (uint64_t)i);
        alone[i] = run(e, ids + i, 20 + (uint64_t)i, &r);
        CHECK(alone[i].n == 40 && alone[i].reason == HSR_FINISH_LENGTH);
    }
    for (int i = 0; i < 8; i++) {
        hsr_request r = request_of(40, i % 2 ? 1.5f : 0, (uint64_t)i);
        s[i] = session_with(e, 0, HSR_KV_AUTO);
        OK(hsr_session_append(s[i], ids + i, 20 + (uint64_t)i, &err));
        OK(hsr_session_generate(s[i], &r, &err));
    }
    for (int i = 0; i < 8; i++) {
        outcome o = drain(s[i]);
        CHECK(same_tokens(&o, &alone[i]));
        OK(hsr_session_destroy(&s[i], &err));
    }
    CHECK(!same_tokens(&alone[1], &alone[3]));
    free(ids);
    end(e);
}

/* The host's rounding mode shows neither in results nor in what it finds afterwards. */
static void test_rounding(hsr_model *m)
{
    enum { N = 200 };
    int32_t *ids = some_ids(N);
    float *out[2];

    for (int i = 0; i < 2; i++) {
        fesetround(i ? FE_UPWARD : FE_TONEAREST);
        hsr_engine *e = engine_with(m, 64, 2, 0, 0);
        hsr_session *s = session_with(e, 0, HSR_KV_AUTO);
        out[i] = logits_of(s, ids, N);
        OK(hsr_session_destroy(&s, &err));
        end(e);
        CHECK(fegetround() == (i ? FE_UPWARD : FE_TONEAREST));
    }
    fesetround(FE_TONEAREST);
    CHECK(memcmp(out[0], out[1], (size_t)N * TINY_VOCAB * sizeof *out[0]) == 0);
    free(out[0]), free(out[1]), free(ids);
}

/* fork, truncate and rebuild lead to the logits of a fresh session. */
static void test_history(hsr_model *m)
{
    enum { N = 300 };
    hsr_engine *e = engine_with(m, 64, 2, 0, 0);
    int32_t *ids = some_ids(N + 1);
    hsr_session *fresh = session_with(e, 0, HSR_KV_AUTO), *s = session_with(e, 0, HSR_KV_AUTO), *fork = NULL;
    float *want = logits_of(fresh, ids, N);
    const float *tail = want + 200 * TINY_VOCAB;
    const size_t tail_bytes = (N - 200) * TINY_VOCAB * sizeof *want;

    float *a = logits_of(s, ids, 250);
    OK(hsr_session_truncate(s, 200, &err));
    OK(hsr_session_fork(s, &fork, &err));
    float *b = logits_of(s, ids + 200, N - 200), *c = logits_of(fork, ids + 200, N - 200);
    CHECK(memcmp(b, tail, tail_bytes) == 0);
    CHECK(memcmp(c, tail, tail_bytes) == 0);

    OK(hsr_session_destroy(&s, &err));
    OK(hsr_session_rebuild(fork, &err));
    OK(hsr_session_prefill(fork, NULL, NULL, &err));
    float *d = logits_of(fork, ids + N, 1), *f = logits_of(fresh, ids + N, 1);
    CHECK(memcmp(d, f, TINY_VOCAB * sizeof *d) == 0);

    int32_t kept[N + 8];
    uint64_t n = N + 8;
    OK(hsr_session_tokens(fork, 0, kept, &n, &err));
    CHECK(n == N + 1 && memcmp(kept, ids, n * sizeof *ids) == 0);
    CHECK(hsr_session_truncate(fork, N + 2, &err) == HSR_E_INVALID);
    OK(hsr_session_destroy(&fork, &err));
    OK(hsr_session_destroy(&fresh, &err));
    free(a), free(b), free(c), free(d), free(f), free(want), free(ids);
    end(e);
}

/* Whatever length a session can be cut to, a request can go on from; and what is promised can be cut. */
static void test_cut_and_go_on(hsr_model *m, uint64_t n_tokens, int32_t rollback)
{
    hsr_engine *e = engine_with(m, 64, 2, 0, 0);
    hsr_session_opts so;
    hsr_session *s, *cut;
    hsr_request r = request_of(1, 0, 0);
    int32_t *ids = some_ids(n_tokens);
    int refused = 0;

    hsr_session_opts_init(&so, sizeof so);
    so.kv_format = HSR_KV_INT8;
    so.window_size = 192;
    so.rollback_tokens = rollback;
    OK(hsr_session_create(e, &so, &s, &err));
    OK(hsr_session_append(s, ids, n_tokens, &err));
    OK(hsr_session_prefill(s, NULL, NULL, &err));
    for (uint64_t n = 0; n < n_tokens; n++) {
        OK(hsr_session_fork(s, &cut, &err));
        const hsr_status st = hsr_session_truncate(cut, n, &err);
        CHECK(st == HSR_OK || (st == HSR_E_STATE && n > 0 && n + (uint64_t)rollback < n_tokens &&
                               strstr(err.message, "can be taken back")));
        refused += st == HSR_E_STATE;
        if (n > 0 && st == HSR_OK) {
            OK(hsr_session_generate(cut, &r, &err));
            CHECK(drain(cut).n == 1);
        }
        OK(hsr_session_destroy(&cut, &err));
    }
    CHECK(refused > 300);
    OK(hsr_session_destroy(&s, &err));
    free(ids);
    end(e);
}

/* A request that goes on from a computed prompt equals one that computes it. */
static void test_continue(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 64, 2, 0, 0);
    int32_t *ids = some_ids(128);
    hsr_request r = request_of(20, 0, 0);
    outcome want = run(e, ids, 128, &r);
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO);
    OK(hsr_session_append(s, ids, 128, &err));
    OK(hsr_session_prefill(s, NULL, NULL, &err));
    r.max_tokens = 12;
    OK(hsr_session_generate(s, &r, &err));
    outcome a = drain(s);
    r.max_tokens = 8;
    OK(hsr_session_generate(s, &r, &err));
    outcome b = drain(s);
    CHECK(a.n == 12 && b.n == 8);
    CHECK(memcmp(a.tokens, want.tokens, 12 * sizeof(int32_t)) == 0 && memcmp(b.tokens, want.tokens + 12, 8 * sizeof(int32_t)) == 0);
    OK(hsr_session_destroy(&s, &err));
    free(ids);
    end(e);
}

/* ---- borders and refusals --------------------------------------------------------------------------------------- */

static void test_context(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 64, 1, 0, 0);
    int32_t *ids = some_ids(300);
    hsr_request r = request_of(INT32_MAX, 0, 0);

    hsr_session *s = session_with(e, 256, HSR_KV_AUTO);
    CHECK(hsr_session_append(s, ids, 257, &err) == HSR_E_CONTEXT && strstr(err.message, "256"));
    CHECK(hsr_session_append(s, ids, 0, &err) == HSR_E_INVALID);
    CHECK(hsr_session_generate(s, &r, &err) == HSR_E_STATE);
    OK(hsr_session_append(s, ids, 255, &err));
    OK(hsr_session_generate(s, &r, &err));
    outcome o = drain(s);
    CHECK(o.n == 1 && o.kind == HSR_EVENT_FINISHED && o.reason == HSR_FINISH_LENGTH);
    CHECK(hsr_session_generate(s, &r, &err) == HSR_E_CONTEXT);
    CHECK(hsr_session_append(s, ids, 1, &err) == HSR_E_CONTEXT);
    OK(hsr_session_truncate(s, 10, &err));
    r.max_tokens = 0;
    OK(hsr_session_generate(s, &r, &err));
    o = drain(s);
    CHECK(o.n == 0 && o.kind == HSR_EVENT_FINISHED && o.reason == HSR_FINISH_LENGTH);
    OK(hsr_session_destroy(&s, &err));

    hsr_session_opts so;
    hsr_session_opts_init(&so, sizeof so);
    so.context = TINY_CONTEXT + 1;
    CHECK(hsr_session_create(e, &so, &s, &err) == HSR_E_CONTEXT && s == NULL);
    so.beyond_trained = 1;
    OK(hsr_session_create(e, &so, &s, &err));
    OK(hsr_session_destroy(&s, &err));
    so.window_size = 100;
    CHECK(hsr_session_create(e, &so, &s, &err) == HSR_E_INVALID && strstr(err.message, "window_size"));
    free(ids);
    end(e);
}

static void test_tokens(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 64, 1, 0, 0);
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO);
    int32_t bad[] = { 1, 2, TINY_VOCAB, 3 }, negative[] = { -1 };
    CHECK(hsr_session_append(s, bad, 4, &err) == HSR_E_TOKEN && strstr(err.message, "token 2 ") && strstr(err.message, "64"));
    CHECK(hsr_session_append(s, negative, 1, &err) == HSR_E_TOKEN);
    OK(hsr_session_destroy(&s, &err));
    end(e);
}

static void refuse_request(hsr_session *s, hsr_request r, const char *name)
{
    CHECK(hsr_session_generate(s, &r, &err) < 0);
    if (!CHECK(strstr(err.message, name)))
        fprintf(stderr, "  message: %s\n", err.message);
}

static void test_requests(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 64, 1, 0, 0);
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO);
    int32_t id = 5;
    hsr_token_bias bias = { TINY_VOCAB, 0 };
    OK(hsr_session_append(s, &id, 1, &err));

    hsr_request r = request_of(4, 0, 0);
#define REFUSE(field, value) do { hsr_request x = r; x.field = value; refuse_request(s, x, #field); } while (0)
    REFUSE(max_tokens, -1);
    REFUSE(temperature, -1.0f);
    REFUSE(temperature, NAN);
    REFUSE(temperature, INFINITY);
    REFUSE(top_k, -1);
    REFUSE(top_p, 0.0f);
    REFUSE(top_p, 1.0001f);
    REFUSE(top_p, NAN);
    REFUSE(min_p, 1.1f);
    REFUSE(repetition_penalty, 0.0f);
    REFUSE(repetition_penalty, NAN);
    REFUSE(presence_penalty, NAN);
    REFUSE(frequency_penalty, INFINITY);
    REFUSE(n_logprobs, 21);
    REFUSE(penalty_window, -2);
    REFUSE(n_stop, 33);
#undef REFUSE
    r.bias = &bias;
    r.n_bias = 1;
    refuse_request(s, r, "64");
    bias = (hsr_token_bias){ 3, NAN };
    refuse_request(s, r, "bias");

    hsr_token_bias all[TINY_VOCAB];
    for (int32_t i = 0; i < TINY_VOCAB; i++)
        all[i] = (hsr_token_bias){ i, -INFINITY };
    r.bias = all;
    r.n_bias = TINY_VOCAB;
    OK(hsr_session_generate(s, &r, &err));
    outcome o = drain(s);
    CHECK(o.n == 0 && o.kind == HSR_EVENT_FAILED && o.status == HSR_E_INVALID);
    r.n_bias = TINY_VOCAB - 1;
    OK(hsr_session_generate(s, &r, &err));
    o = drain(s);
    CHECK(o.n == 4 && o.tokens[0] == TINY_VOCAB - 1 && o.tokens[3] == TINY_VOCAB - 1);

    r = request_of(50, 0, 0);
    OK(hsr_session_truncate(s, 1, &err));
    OK(hsr_session_generate(s, &r, &err));
    CHECK(hsr_session_append(s, &id, 1, &err) == HSR_E_STATE);
    CHECK(hsr_session_generate(s, &r, &err) == HSR_E_STATE);
    o = drain(s);
    r.stop = &o.tokens[3];
    r.n_stop = 1;
    OK(hsr_session_truncate(s, 1, &err));
    OK(hsr_session_generate(s, &r, &err));
    outcome stopped = drain(s);
    CHECK(stopped.reason == HSR_FINISH_STOP && stopped.n >= 1 && stopped.tokens[stopped.n - 1] == o.tokens[3]);
    OK(hsr_session_destroy(&s, &err));
    end(e);
}

/* A request's profile is the session's from then on, as set_profile would make it. */
static void test_profile_of_request(hsr_model *m)
{
    enum { N = 700, BY_REQUEST, BY_CALL, DENSE };
    hsr_engine *e = engine_with(m, 128, 1, 0, 0);
    int32_t *ids = some_ids(N), id = 0;
    hsr_profile p;
    hsr_session_stats st = { .struct_size = sizeof st };
    outcome found[DENSE + 1];

    hsr_profile_init(&p, sizeof p);
    p.selector = HSR_SELECT_RANDOM;
    p.budget = 16;
    p.virtual_tokens = 0;
    OK(hsr_profile_register(e, &p, &id, &err));
    for (int way = BY_REQUEST; way <= DENSE; way++) {
        hsr_session *s = session_with(e, 0, HSR_KV_F32);
        hsr_request r = request_of(40, 1, 7);

        OK(hsr_session_append(s, ids, N, &err));
        if (way == BY_REQUEST) {
            r.profile = 77;
            refuse_request(s, r, "profile 77");
            r.profile = id;
        }
        if (way == BY_CALL)
            OK(hsr_session_set_profile(s, id, &err));
        OK(hsr_session_generate(s, &r, &err));
        found[way] = drain(s);
        OK(hsr_session_get_stats(s, &st, &err));
        CHECK(st.profile == (way == DENSE ? 0 : id) && (st.sparse_rows > 0) == (way != DENSE));
        OK(hsr_session_destroy(&s, &err));
    }
    CHECK(found[BY_REQUEST].n == 40 && same_tokens(&found[BY_REQUEST], &found[BY_CALL]) && !same_tokens(&found[BY_REQUEST], &found[DENSE]));
    free(ids);
    end(e);
}

static void test_struct_sizes(hsr_model *m)
{
    struct { hsr_engine_opts known; uint32_t newer; } o;
    hsr_engine *e = NULL;

    memset(&o, 0, sizeof o);
    hsr_engine_opts_init(&o.known, sizeof o.known);
    o.known.n_threads = 1;
    o.known.struct_size = 0;
    CHECK(hsr_engine_create(m, &o.known, &e, &err) == HSR_E_INVALID && e == NULL);
    o.known.struct_size = sizeof o;
    OK(hsr_engine_create(m, &o.known, &e, &err));
    OK(hsr_engine_destroy(&e, &err));
    o.newer = 1;
    CHECK(hsr_engine_create(m, &o.known, &e, &err) == HSR_E_INVALID && strstr(err.message, "does not know"));
    /* An older caller's struct: nothing behind it is written, and the fields it lacks have their defaults. */
    memset(&o, 0x5a, sizeof o);
    hsr_engine_opts_init(&o.known, offsetof(hsr_engine_opts, isa));
    CHECK(o.known.isa == 0x5a5a5a5a && o.known.struct_size == offsetof(hsr_engine_opts, isa));
    o.known.n_threads = 1;
    OK(hsr_engine_create(m, &o.known, &e, &err));

    struct { hsr_engine_stats known; uint64_t newer; } st;
    memset(&st, 0xff, sizeof st);
    st.known.struct_size = sizeof st;
    OK(hsr_engine_get_stats(e, &st.known, &err));
    CHECK(st.newer == 0 && st.known.struct_size == sizeof st && st.known.n_threads == 1);
    OK(hsr_engine_destroy(&e, &err));
    CHECK(hsr_engine_create(NULL, NULL, &e, &err) == HSR_E_INVALID);
    hsr_engine_opts_init(&o.known, sizeof o.known);
    o.known.hot_bytes = 1ull << 50;
    CHECK(hsr_engine_create(m, &o.known, &e, &err) == HSR_E_INVALID && strstr(err.message, "hot_bytes"));
    OK(hsr_engine_destroy(NULL, &err));
    OK(hsr_session_destroy(NULL, &err));
    hsr_model_close(NULL);
}

/* ---- budgets, failures, cancels ---------------------------------------------------------------------------------- */

static void test_admission(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 64, 1, 0, 2u << 20);
    int32_t *ids = some_ids(4096);
    hsr_session *a = session_with(e, 0, HSR_KV_F32), *b = session_with(e, 0, HSR_KV_F32);
    hsr_request r = request_of(100, 0, 0);
    hsr_engine_stats before = { .struct_size = sizeof before }, after = { .struct_size = sizeof after };

    outcome want = run(e, ids, 64, &r);
    OK(hsr_session_append(a, ids, 64, &err));
    OK(hsr_session_generate(a, &r, &err));
    OK(hsr_engine_get_stats(e, &before, &err));
    CHECK(hsr_session_append(b, ids, 4000, &err) == HSR_E_NOSPACE && strstr(err.message, "block"));
    OK(hsr_engine_get_stats(e, &after, &err));
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    outcome o = drain(a);
    CHECK(same_tokens(&o, &want));
    OK(hsr_session_destroy(&a, &err));
    OK(hsr_session_append(b, ids, 500, &err));
    OK(hsr_session_destroy(&b, &err));
    free(ids);
    end(e);
}

static void test_nonfinite(float value)
{
    char path[64];
    hsr_model *m = NULL;
    int32_t ids[] = { 1, 2, 3 };
    float logits[3 * TINY_VOCAB];
    hsr_request r = request_of(4, 0, 0);

    if (!CHECK(tiny_model_write(path, 1) && tiny_model_poison(path, value)))
        return;
    OK(hsr_model_open(path, &m, &err));
    hsr_engine *e = engine_with(m, 64, 1, 0, 0);
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO), *t = session_with(e, 0, HSR_KV_AUTO);
    OK(hsr_session_append(s, ids, 3, &err));
    OK(hsr_session_generate(s, &r, &err));
    outcome o = drain(s);
    CHECK(o.n == 0 && o.kind == HSR_EVENT_FAILED && o.status == HSR_E_NONFINITE);
    CHECK(hsr_session_append(s, ids, 1, &err) == HSR_E_STATE && strstr(err.message, "finite"));
    CHECK(hsr_session_logits(t, ids, 3, logits, 3 * TINY_VOCAB, &err) == HSR_E_NONFINITE && strstr(err.message, "position 0"));
    OK(hsr_session_destroy(&s, &err));
    OK(hsr_session_destroy(&t, &err));
    end(e);
    hsr_model_close(&m);
    unlink(path);
}

static int32_t stop_after_two(void *user, uint64_t done, uint64_t total)
{
    CHECK(total == 300 && done <= total);
    return ++*(int *)user > 2;
}

static void test_cancel(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 32, 2, 0, 0);
    int32_t *ids = some_ids(300);
    hsr_request r = request_of(200, 0, 0);
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO);
    hsr_session_stats st = { .struct_size = sizeof st };
    int calls = 0;

    OK(hsr_session_cancel(s, &err));   /* nothing to cancel: nothing happens, nothing is remembered */
    OK(hsr_session_append(s, ids, 300, &err));
    CHECK(hsr_session_prefill(s, stop_after_two, &calls, &err) == HSR_E_CANCELLED);
    OK(hsr_session_get_stats(s, &st, &err));
    CHECK(st.n_computed == 64 && st.n_tokens == 300);
    OK(hsr_session_cancel(s, &err));
    OK(hsr_session_get_stats(s, &st, &err));
    CHECK(st.n_computed == 64 && st.n_tokens == 64);

    /* Cancelled while nobody waits: whoever waits next is told, once. */
    float row[TINY_VOCAB];
    CHECK(hsr_session_prefill(s, NULL, NULL, &err) == HSR_E_CANCELLED && strstr(err.message, "cancelled"));
    OK(hsr_session_prefill(s, NULL, NULL, &err));
    OK(hsr_session_append(s, ids, 10, &err));
    OK(hsr_session_cancel(s, &err));
    OK(hsr_session_logits(s, ids, 1, row, TINY_VOCAB, &err));
    OK(hsr_session_truncate(s, 64, &err));

    OK(hsr_session_append(s, ids + 64, 236, &err));
    OK(hsr_session_generate(s, &r, &err));
    hsr_event ev = { .struct_size = sizeof ev };
    for (int i = 0; i < 5; i++)
        OK(hsr_session_next(s, &ev, &err));
    OK(hsr_session_cancel(s, &err));
    outcome o = drain(s);
    CHECK(o.kind == HSR_EVENT_FAILED && o.status == HSR_E_CANCELLED);
    OK(hsr_session_get_stats(s, &st, &err));
    CHECK(!st.running && st.n_tokens == 305);

    /* A request that has not begun: it would have computed the last token once more, which is kept. */
    OK(hsr_session_append(s, ids, 10, &err));
    OK(hsr_session_prefill(s, NULL, NULL, &err));
    OK(hsr_session_generate(s, &r, &err));
    OK(hsr_session_cancel(s, &err));
    OK(hsr_session_get_stats(s, &st, &err));
    CHECK(st.n_tokens == 315);

    OK(hsr_session_generate(s, &r, &err));   /* usable again; destroyed in the middle of a request */
    OK(hsr_session_next(s, &ev, &err));
    OK(hsr_session_destroy(&s, &err));
    free(ids);
    end(e);
}

static void *prefill_thread(void *arg)
{
    hsr_error e = HSR_ERROR_INIT;
    return (void *)(intptr_t)hsr_session_prefill(arg, NULL, NULL, &e);
}

/* A cancel that comes while other sessions are in a step ends what the session does then, and nothing that begins later. */
static void test_cancel_before_work(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 64, 1, 0, 0);
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO), *other = session_with(e, 0, HSR_KV_AUTO);
    int32_t *ids = some_ids(4000);
    pthread_t thread;
    void *st = NULL;

    OK(hsr_session_append(other, ids, 4000, &err));
    CHECK(pthread_create(&thread, NULL, prefill_thread, other) == 0);
    for (int i = 0; i < 20; i++) {
        usleep(1000);
        OK(hsr_session_cancel(s, &err));
        OK(hsr_session_append(s, ids, 1, &err));
        OK(hsr_session_prefill(s, NULL, NULL, &err));
    }
    pthread_join(thread, &st);
    CHECK((intptr_t)st == HSR_OK);
    OK(hsr_session_destroy(&s, &err));
    OK(hsr_session_destroy(&other, &err));
    free(ids);
    end(e);
}

static void test_step(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 16, 2, 0, 0);
    int32_t *ids = some_ids(64);
    hsr_request r = request_of(10, 0, 0);
    outcome want[3], got[3] = { { .n = 0 } };
    hsr_session *s[3];
    hsr_event events[2] = { { .struct_size = sizeof(hsr_event) }, { .struct_size = sizeof(hsr_event) } };
    uint32_t n = 0;

    CHECK(hsr_engine_step(e, events, 2, &n, &err) == HSR_AGAIN && n == 0);
    for (int i = 0; i < 3; i++)
        want[i] = run(e, ids + i, 20, &r);
    for (int i = 0; i < 3; i++) {
        s[i] = session_with(e, 0, HSR_KV_AUTO);
        OK(hsr_session_append(s[i], ids + i, 20, &err));
        OK(hsr_session_generate(s[i], &r, &err));
    }
    while (hsr_engine_step(e, events, 2, &n, &err) == HSR_OK)   /* room for two events of three: none may be lost */
        for (uint32_t k = 0; k < n; k++)
            for (int i = 0; i < 3; i++)
                if (events[k].session == s[i] && events[k].kind == HSR_EVENT_TOKEN)
                    got[i].tokens[got[i].n++] = events[k].token;
    for (int i = 0; i < 3; i++) {
        CHECK(same_tokens(&got[i], &want[i]));
        OK(hsr_session_destroy(&s[i], &err));
    }
    free(ids);
    end(e);
}

/* ---- threads and processes --------------------------------------------------------------------------------------- */

typedef struct job {
    hsr_engine *engine;
    int         number;
    outcome     got;
} job;

static void *run_job(void *arg)
{
    job *j = arg;
    hsr_error e = HSR_ERROR_INIT;
    hsr_request r = request_of(30, 1, (uint64_t)j->number);
    hsr_session *s = NULL;
    int32_t ids[40];
    for (int i = 0; i < 40; i++)
        ids[i] = id_at((uint64_t)(i + j->number));
    for (int round = 0; round < 3; round++) {
        hsr_event ev = { .struct_size = sizeof ev };
        j->got.n = 0;
        if (hsr_session_create(j->engine, NULL, &s, &e) < 0 || hsr_session_append(s, ids, 40, &e) < 0 ||
            hsr_session_generate(s, &r, &e) < 0)
            return NULL;
        while (hsr_session_next(s, &ev, &e) == HSR_OK)
            if (ev.kind == HSR_EVENT_TOKEN)
                j->got.tokens[j->got.n++] = ev.token;
        hsr_session_destroy(&s, &e);
    }
    return NULL;
}

static void test_threads(hsr_model *m)
{
    enum { THREADS = 8 };
    hsr_engine *e = engine_with(m, 16, 2, 0, 0);
    pthread_t thread[THREADS];
    job jobs[THREADS], alone;

    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (job){ .engine = e, .number = i };
        CHECK(pthread_create(&thread[i], NULL, run_job, &jobs[i]) == 0);
    }
    for (int i = 0; i < 200; i++) {
        hsr_engine_stats st = { .struct_size = sizeof st };
        OK(hsr_engine_get_stats(e, &st, &err));
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < THREADS; i++) {
        alone = (job){ .engine = e, .number = i };
        run_job(&alone);
        CHECK(jobs[i].got.n == 30 && same_tokens(&jobs[i].got, &alone.got));
    }
    end(e);
}

static void *cancel_soon(void *arg)
{
    usleep(20000);
    hsr_error e = HSR_ERROR_INIT;
    hsr_event ev = { .struct_size = sizeof ev };
    hsr_status second = hsr_session_next(arg, &ev, &e);
    hsr_session_cancel(arg, &e);
    return (void *)(intptr_t)second;
}

/* A second thread on a session is told so; cancelling from it ends a long wait. */
static void test_busy(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 8, 1, 0, 0);
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO);
    int32_t *ids = some_ids(4000);
    pthread_t thread;
    void *second = NULL;

    OK(hsr_session_append(s, ids, 4000, &err));
    CHECK(hsr_engine_destroy(&e, &err) == HSR_E_BUSY && e != NULL);
    CHECK(pthread_create(&thread, NULL, cancel_soon, s) == 0);
    CHECK(hsr_session_prefill(s, NULL, NULL, &err) == HSR_E_CANCELLED);
    pthread_join(thread, &second);
    CHECK((intptr_t)second == HSR_E_BUSY);
    OK(hsr_session_destroy(&s, &err));
    free(ids);
    end(e);
}

static void test_fork(hsr_model *m)
{
    hsr_engine *e = engine_with(m, 64, 2, 0, 0);
    hsr_session *s = session_with(e, 0, HSR_KV_AUTO);
    int32_t id = 1, status = 0;

    pid_t child = fork();
    if (child == 0) {
        bool ok = hsr_session_append(s, &id, 1, &err) == HSR_E_FORKED && strstr(err.message, "fork");
        ok = ok && hsr_session_create(e, NULL, &(hsr_session *){ NULL }, &err) == HSR_E_FORKED;
        ok = ok && hsr_session_destroy(&s, &err) == HSR_OK && s == NULL && hsr_engine_destroy(&e, &err) == HSR_OK && e == NULL;
        _exit(ok ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(hsr_session_append(s, &id, 1, &err));
    OK(hsr_session_destroy(&s, &err));
    end(e);
}

int main(void)
{
    char path[64];
    hsr_model *m = NULL;

    if (!CHECK(tiny_model_write(path, 1)))
        return CHECK_REPORT();
    if (!OK(hsr_model_open(path, &m, &err))) {
        fprintf(stderr, "%s\n", err.message);
        return CHECK_REPORT();
    }
    test_same_bits(m, HSR_KV_F32);
    test_same_bits(m, HSR_KV_BF16);
    test_seeds(m);
    test_rounding(m);
    test_history(m);
    test_cut_and_go_on(m, 909, 19);
    test_cut_and_go_on(m, 896, 64);
    test_continue(m);
    test_context(m);
    test_tokens(m);
    test_requests(m);
    test_profile_of_request(m);
    test_struct_sizes(m);
    test_admission(m);
    test_nonfinite(NAN);
    test_nonfinite(INFINITY);
    test_cancel(m);
    test_cancel_before_work(m);
    test_step(m);
    test_threads(m);
    test_busy(m);
    test_fork(m);
    hsr_model_close(&m);
    unlink(path);
    return CHECK_REPORT();
}
