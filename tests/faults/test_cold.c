/* SPDX-License-Identifier: Apache-2.0 */
/* Whole engines with a cold tier, through the public interface, on a disk and a system that refuse: a status with a text, the session's
 * tokens are kept and computed again give what they would have given, other sessions do not notice, and every counter is back. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdatomic.h>

#include "cold_host.h"

#define MIB (1ull << 20)

static hsr_model *model;
static char folder[64];
static hsr_error err = HSR_ERROR_INIT;

static hsr_engine *new_engine(uint64_t hot_mib, bool cold)
{
    hsr_engine_opts o;
    hsr_engine *e = NULL;
    host_opts(&o);
    o.hot_bytes = hot_mib * MIB;
    o.chunk_tokens = 64;
    o.max_batch = 256;
    o.cold_dir = cold ? folder : NULL;
    o.cold_bytes = cold ? 64 * MIB : 0;
    if (!CHECK(hsr_engine_create(model, &o, &e, &err) == HSR_OK))
        fprintf(stderr, "  %s\n", err.message);
    return e;
}

static hsr_session *new_session_of(hsr_engine *e, int32_t kv, int32_t window)
{
    hsr_session_opts o;
    hsr_session *s = NULL;
    hsr_session_opts_init(&o, sizeof o);
    o.kv_format = kv;
    o.window_size = window;
    o.sink_size = o.rollback_tokens = 64;
    CHECK(hsr_session_create(e, &o, &s, &err) == HSR_OK);
    return s;
}

static hsr_session *new_session(hsr_engine *e, int32_t kv) { return new_session_of(e, kv, 64); }

static int32_t *prompt_of(uint64_t n, uint32_t seed)
{
    int32_t *ids = malloc(n * sizeof *ids);
    for (uint64_t i = 0; ids && i < n; i++)
        ids[i] = (int32_t)((uint32_t)(i + 7919 * seed) * 2654435761u >> 9) % (TINY_VOCAB - 1);
    return ids;
}

static hsr_status append(hsr_session *s, uint64_t n, uint32_t seed)
{
    int32_t *ids = prompt_of(n, seed);
    const hsr_status st = hsr_session_append(s, ids, n, &err);
    free(ids);
    return st;
}

static hsr_engine_stats stats(hsr_engine *e)
{
    hsr_engine_stats st = { .struct_size = sizeof st };
    CHECK(hsr_engine_get_stats(e, &st, NULL) == HSR_OK);
    return st;
}

static void end_engine(hsr_engine *e)
{
    const hsr_engine_stats st = stats(e);
    CHECK(st.n_sessions == 0 && st.hot_blocks_used == 0 && st.hot_blocks_reserved == 0 && st.hot_slots_used == 0);
    CHECK(st.cold_pages == 0 && st.cold_bytes_used == 0);
    CHECK(hsr_engine_destroy(&e, &err) == HSR_OK);
    CHECK(host_count(folder) == 2);
}

/* ---- reading pages back ----------------------------------------------------------------------------------------- */

static float *observe_all(hsr_session *s, uint64_t n)
{
    const uint64_t width = TINY_KV_HEADS * TINY_HEAD_DIM, layer = 2 * n * width;
    float *all = calloc(TINY_LAYERS * layer, sizeof *all);
    for (int32_t i = 0; all && i < 2 * TINY_LAYERS; i++)
        CHECK(hsr_session_observe(s, 1 + i % 2, i / 2, 0, n, all + (uint64_t)i * n * width, n * width, &err) == HSR_OK);
    return all;
}

/* What is read back and what is sampled from it are the same wherever pages are, and whatever the tables on the device say. */
static void test_observe(int32_t kv, uint64_t hot_mib)
{
    enum { FIRST = 700, FILLED = 5000, MORE = 10 };
    float *seen[2];
    for (int squeezed = 0; squeezed < 2; squeezed++) {
        hsr_engine *e = new_engine(squeezed ? hot_mib : 128, squeezed);
        hsr_session *s = new_session(e, kv);
        CHECK(append(s, FIRST, 1) == HSR_OK && hsr_session_prefill(s, NULL, NULL, &err) == HSR_OK);
        CHECK(hsr_session_fill(s, FILLED, 3, &err) == HSR_OK);
        CHECK(append(s, MORE, 2) == HSR_OK && hsr_session_prefill(s, NULL, NULL, &err) == HSR_OK);
        CHECK(!squeezed || stats(e).cold_pages > 0);
        seen[squeezed] = observe_all(s, FIRST + FILLED + MORE);
        CHECK(hsr_session_destroy(&s, &err) == HSR_OK);
        end_engine(e);
    }
    CHECK(memcmp(seen[0], seen[1], 2ull * TINY_LAYERS * TINY_KV_HEADS * TINY_HEAD_DIM * (FIRST + FILLED + MORE) * sizeof(float)) == 0);
    free(seen[0]);
    free(seen[1]);
}

/* At the end of a page, and in a fork, some pages are not encoded yet that the next query will read so. */
static void test_observe_fork(int32_t kv, bool cold)
{
    enum { N = 6 * 64 };
    hsr_engine *e = new_engine(32, cold);
    hsr_session *s = new_session(e, kv), *fork = NULL;
    CHECK(append(s, N, 1) == HSR_OK && hsr_session_prefill(s, NULL, NULL, &err) == HSR_OK);
    CHECK(hsr_session_fork(s, &fork, &err) == HSR_OK);
    float *seen = observe_all(s, N), *again = observe_all(fork, N);
    const float most = kv == HSR_KV_BF16 ? 0 : 0.1f;
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < 2ull * TINY_LAYERS * TINY_KV_HEADS * TINY_HEAD_DIM * N; i++)
        wrong += !(fabsf(seen[i] - again[i]) <= most);
    CHECK(wrong == 0);
    free(seen);
    free(again);
    CHECK(hsr_session_destroy(&s, &err) == HSR_OK && hsr_session_destroy(&fork, &err) == HSR_OK);
    end_engine(e);
}

/* ---- a disk that fails ------------------------------------------------------------------------------------------- */

/* Operations of the chosen kinds, counted from `from` on for `count` of them, are disturbed. */
static struct {
    hsri_io_fault fault;
    unsigned      kinds;            /* bits of hsri_io_action */
    atomic_ulong  from, count, seen;
} disk;

static void before_io(void *user, hsri_io_action action, uint64_t index, hsri_io_fault *fault)
{
    (void)user;
    (void)index;
    if (!(disk.kinds >> action & 1))
        return;
    const unsigned long n = disk.seen++;
    if (n >= disk.from && n - disk.from < disk.count)
        *fault = disk.fault;
}

static const hsri_io_faults hook = { before_io, NULL };

static void set_disk(hsri_io_fault fault, unsigned kinds, unsigned long from, unsigned long count)
{
    disk.count = disk.seen = 0;
    disk.fault = fault;
    disk.kinds = kinds;
    disk.from = from;
    disk.count = count;
    cold_faults = &hook;
}

#define READS  (1u << HSRI_IO_READ)
#define WRITES (1u << HSRI_IO_WRITE)

static hsr_session_stats stats_of(hsr_session *s)
{
    hsr_session_stats st = { .struct_size = sizeof st };
    CHECK(hsr_session_get_stats(s, &st, NULL) == HSR_OK);
    return st;
}

/* One session's failure puts off a step that another had prepared for. If that one is cancelled then, it is whole. */
static void test_left_out(void)
{
    char path[80];
    hsr_request r;
    hsr_event ev = { .struct_size = sizeof ev };
    set_disk((hsri_io_fault){ .error = EIO }, WRITES, 0, ULONG_MAX);
    hsr_engine *e = new_engine(13, true);
    hsr_session *a = new_session_of(e, HSR_KV_BF16, 2048), *b = new_session(e, HSR_KV_BF16);
    hsr_status st = HSR_OK;

    hsr_request_init(&r, sizeof r);
    r.max_tokens = 1000;
    r.ignore_eos = 1;
    CHECK(append(a, 64, 1) == HSR_OK && hsr_session_generate(a, &r, &err) == HSR_OK);
    for (uint32_t i = 0; st == HSR_OK && i < 400; i++) {
        for (int k = 0; k < 2; k++)     /* a is not to pause */
            CHECK(hsr_session_next(a, &ev, &err) == HSR_OK && ev.kind == HSR_EVENT_TOKEN);
        st = append(b, 64, i) == HSR_OK ? hsr_session_prefill(b, NULL, NULL, &err) : HSR_AGAIN;
    }
    CHECK(st == HSR_E_IO && err.message[0] && stats_of(b).n_computed < stats_of(b).n_tokens && stats_of(a).running);
    CHECK(hsr_session_cancel(a, &err) == HSR_OK);
    snprintf(path, sizeof path, "%s.save", folder);
    if (!CHECK(hsr_session_save(a, path, NULL, NULL, &err) == HSR_OK))
        fprintf(stderr, "  %s\n", err.message);
    unlink(path);
    CHECK(hsr_session_destroy(&a, &err) == HSR_OK && hsr_session_destroy(&b, &err) == HSR_OK);
    end_engine(e);
    cold_faults = NULL;
}

/* Work that fails in a step of others is told by the next call that would have waited for it, once. */
static void test_untold(void)
{
    set_disk((hsri_io_fault){ .error = EIO }, WRITES, 0, ULONG_MAX);
    hsr_engine *e = new_engine(13, true);
    hsr_session *a = new_session_of(e, HSR_KV_BF16, 2048), *b = new_session(e, HSR_KV_BF16);
    CHECK(append(a, 64, 1) == HSR_OK && append(b, 8000, 2) == HSR_OK);
    for (uint32_t i = 0; i < 300 && stats_of(b).n_computed < 8000; i++) {
        const uint64_t before = stats_of(b).n_computed;
        CHECK(hsr_session_logits(a, (const int32_t[]){ 5 }, 1, (float[TINY_VOCAB]){ 0 }, TINY_VOCAB, &err) == HSR_OK);
        if (stats_of(b).n_computed == before)
            break;
    }
    CHECK(stats_of(b).n_computed < 8000 && stats_of(b).n_tokens == 8000);
    CHECK(hsr_session_prefill(b, NULL, NULL, &err) == HSR_E_IO && err.message[0]);
    CHECK(hsr_session_prefill(b, NULL, NULL, &err) == HSR_OK && stats_of(b).n_tokens == 8000);
    CHECK(hsr_session_destroy(&a, &err) == HSR_OK && hsr_session_destroy(&b, &err) == HSR_OK);
    end_engine(e);
    cold_faults = NULL;
}

int main(void)
{
    snprintf(folder, sizeof folder, "/tmp/hisparse_cold_XXXXXX");
    if (!CHECK(mkdtemp(folder) != NULL) || !CHECK((model = cold_model()) != NULL))
        return CHECK_REPORT();
    test_observe(HSR_KV_BF16, 9);
    test_observe(HSR_KV_COMPACT, 3);
    for (int cold = 0; cold < 2; cold++) {
        test_observe_fork(HSR_KV_BF16, cold);
        test_observe_fork(HSR_KV_INT8, cold);
    }
    test_left_out();
    test_untold();
    hsr_model_close(&model);
    CHECK(rmdir(folder) == 0);
    return CHECK_REPORT();
}
