/* SPDX-License-Identifier: Apache-2.0 */
/* Whole engines with a cold tier, through the public interface, on a disk and a system that refuse: a status with a text, the session's
 * tokens are kept and computed again give what they would have given, other sessions do not notice, and every counter is back. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "cold_host.h"

#define MIB (1ull << 20)

/* Neighbours in a sweep fail the same way, so a part of them is enough: one that does not fall into step with layers, heads and pages of
 * a group. "test_cold sweep 1" fails every single one. */
enum { SWEEP_STRIDE = CHECK_SANITIZED ? 17 : 5 };

static hsr_model *model;
static char folder[64];
static hsr_error err = HSR_ERROR_INIT;

static hsr_engine_opts options(uint64_t hot_mib, bool cold)
{
    hsr_engine_opts o;
    host_opts(&o);
    o.hot_bytes = hot_mib * MIB;
    o.chunk_tokens = 64;
    o.max_batch = 256;
    o.cold_dir = cold ? folder : NULL;
    o.cold_bytes = cold ? 64 * MIB : 0;
    return o;
}

static hsr_engine *new_engine(uint64_t hot_mib, bool cold)
{
    const hsr_engine_opts o = options(hot_mib, cold);
    hsr_engine *e = NULL;
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

/* ---- two sessions, and what they would have said --------------------------------------------------------------- */

enum { LONG = 2200, SHORT = 200, OUTPUT = 6 };

typedef struct talk {
    hsr_engine  *engine;
    hsr_session *a, *b;             /* a is long; b has spoken before anything fails, and goes on afterwards */
    int32_t      said[3][OUTPUT];
    hsr_status   failed;            /* the last failure */
} talk;

static int32_t expected[3][OUTPUT];

#define HOT 6   /* MiB: a does not fit */

static hsr_status ask(hsr_session *s, int32_t *tokens)
{
    hsr_request r;
    hsr_event ev = { .struct_size = sizeof ev };
    int n = 0;
    hsr_request_init(&r, sizeof r);
    r.max_tokens = OUTPUT;
    r.ignore_eos = 1;
    r.temperature = 1;
    hsr_status st = hsr_session_generate(s, &r, &err);
    while (st == HSR_OK && (st = hsr_session_next(s, &ev, &err)) == HSR_OK) {
        if (ev.kind == HSR_EVENT_FAILED)
            return ev.status;
        if (ev.kind == HSR_EVENT_TOKEN && n < OUTPUT)
            tokens[n++] = ev.token;
    }
    return st == HSR_AGAIN ? HSR_OK : st;
}

/* Ask; if that fails there is a text, all tokens are kept, and when the disk is well again they are computed again and say the same. */
static void ask_whatever(talk *t, hsr_session *s, int which, uint64_t n_prompt)
{
    const hsr_status st = ask(s, t->said[which]);
    if (st >= 0)
        return;
    t->failed = st;
    CHECK(st == HSR_E_IO || st == HSR_E_FORMAT || st == HSR_E_NOSPACE);
    CHECK(err.status == st && err.message[0]);
    CHECK(stats_of(s).n_tokens >= n_prompt && !stats_of(s).running);
    disk.count = 0;
    usleep(1000 * disk.fault.delay_ms);     /* what hangs has ended then */
    CHECK(hsr_session_rebuild(s, &err) == HSR_OK && hsr_session_truncate(s, n_prompt, &err) == HSR_OK);
    if (!CHECK(ask(s, t->said[which]) == HSR_OK))
        fprintf(stderr, "  again: %s\n", err.message);
}

static void begin_talk(talk *t, hsr_engine *e)
{
    *t = (talk){ .engine = e, .a = new_session(e, HSR_KV_BF16), .b = new_session(e, HSR_KV_BF16) };
    CHECK(append(t->b, SHORT, 2) == HSR_OK && ask(t->b, t->said[0]) == HSR_OK);
    CHECK(append(t->a, LONG, 1) == HSR_OK);
}

static void drop_talk(talk *t)
{
    CHECK(hsr_session_destroy(&t->a, &err) == HSR_OK && hsr_session_destroy(&t->b, &err) == HSR_OK);
    end_engine(t->engine);
    cold_faults = NULL;
}

static void end_talk(talk *t)
{
    ask_whatever(t, t->a, 1, LONG);
    CHECK(append(t->b, SHORT, 3) == HSR_OK);
    ask_whatever(t, t->b, 2, 2 * SHORT + OUTPUT);
    drop_talk(t);
    CHECK(memcmp(t->said, expected, sizeof expected) == 0);
}

static void find_expected(void)
{
    talk t;
    begin_talk(&t, new_engine(128, false));
    CHECK(ask(t.a, t.said[1]) == HSR_OK && append(t.b, SHORT, 3) == HSR_OK && ask(t.b, t.said[2]) == HSR_OK);
    memcpy(expected, t.said, sizeof expected);
    drop_talk(&t);
}

#define ANY_OPERATION UINT_MAX
#define FOREVER       ULONG_MAX

/* Everything goes as ever, but for a disturbed disk. The failure, or HSR_OK if nobody noticed. */
static hsr_status disturbed_talk(hsri_io_fault fault, unsigned kinds, unsigned long from, unsigned long count)
{
    const hsr_engine_opts o = options(HOT, true);
    hsr_engine *e;
    talk t;
    set_disk(fault, kinds, from, count);
    const hsr_status st = hsr_engine_create(model, &o, &e, &err);
    if (st < 0) {
        CHECK(st == HSR_E_IO && err.message[0] && disk.seen > from);
        return st;
    }
    begin_talk(&t, e);
    end_talk(&t);
    return t.failed;
}

/* The n-th operation fails; alone, and, for some n, with those after it. */
static void test_sweep(unsigned long stride)
{
    unsigned long noticed = 0, tried = 0;
    CHECK(disturbed_talk((hsri_io_fault){ 0 }, ANY_OPERATION, 0, 0) == HSR_OK);
    const unsigned long total = disk.seen;
    CHECK(total > 50);
    for (unsigned long n = 0; n < total; n += stride) {
        noticed += disturbed_talk((hsri_io_fault){ .error = EIO }, ANY_OPERATION, n, 1) < 0;
        if (tried++ % 8 == 0)
            noticed += disturbed_talk((hsri_io_fault){ .error = EIO }, ANY_OPERATION, n, 40) < 0;
        if (check_failures) {
            fprintf(stderr, "while operation %lu of %lu failed\n", n, total);
            return;
        }
    }
    CHECK(noticed > 0);
}

static void test_full_disk(void)
{
    const hsri_io_fault full = { .error = ENOSPC };
    CHECK(disturbed_talk(full, WRITES | 1u << HSRI_IO_ALLOCATE, 4, FOREVER) < 0);
    CHECK(disturbed_talk(full, 1u << HSRI_IO_ALLOCATE, 0, FOREVER) < 0);
}

static void test_bad_reads(void)
{
    CHECK(disturbed_talk((hsri_io_fault){ .corrupt = true, .corrupt_at = 999 }, READS, 6, FOREVER) == HSR_E_FORMAT);
    CHECK(disturbed_talk((hsri_io_fault){ .corrupt = true, .corrupt_at = 999 }, READS, 6, 1) == HSR_OK);      /* it is read again */
    CHECK(disturbed_talk((hsri_io_fault){ .limited = true }, READS, 6, FOREVER) < 0);
    CHECK(disturbed_talk((hsri_io_fault){ .limited = true, .limit = 5000 }, READS | WRITES, 0, FOREVER) == HSR_OK);
}

/* ---- a file that is cut under the process ----------------------------------------------------------------------- */

/* The descriptor of the cold file, which has no name. */
static int cold_file(void)
{
    char link[64], to[256];
    for (int fd = 3; fd < 256; fd++) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        const ssize_t n = readlink(link, to, sizeof to - 1);
        if (n > 0 && strncmp(to, folder, strlen(folder)) == 0)
            return fd;
    }
    return -1;
}

static void test_cut_file(int32_t io_engine)
{
    hsr_engine_opts o = options(HOT, true);
    hsr_engine *e;
    talk t;
    set_disk((hsri_io_fault){ 0 }, 0, 0, 0);
    o.io_engine = io_engine;
    CHECK(hsr_engine_create(model, &o, &e, &err) == HSR_OK);
    begin_talk(&t, e);
    CHECK(hsr_session_prefill(t.a, NULL, NULL, &err) == HSR_OK && stats(e).cold_pages > 0);
    CHECK(ftruncate(cold_file(), 0) == 0);
    end_talk(&t);
    CHECK(t.failed == HSR_E_FORMAT || t.failed == HSR_E_IO);
}

/* ---- a disk that hangs ------------------------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

enum { HANG_MS = 3000 };       /* longer than a step, sanitizers included: what nobody waits for is no hang */

/* The session whose page does not come fails when the deadline has passed; what comes later does no harm. Making an engine tries the disk,
 * which must go well; many pages may leave with one write. */
static void test_hang(unsigned kinds, unsigned long from)
{
    hsr_engine_opts o = options(HOT, true);
    hsr_engine *e;
    talk t;
    const double start = seconds();
    set_disk((hsri_io_fault){ .delay_ms = HANG_MS }, kinds, from, FOREVER);
    o.io_deadline_ms = 150;
    CHECK(hsr_engine_create(model, &o, &e, &err) == HSR_OK);
    begin_talk(&t, e);
    ask_whatever(&t, t.a, 1, LONG);
    CHECK(t.failed == HSR_E_IO && seconds() - start < 60);
    usleep((HANG_MS + 100) * 1000);     /* all that hung has ended: counters can be back */
    CHECK(append(t.b, SHORT, 3) == HSR_OK);
    ask_whatever(&t, t.b, 2, 2 * SHORT + OUTPUT);
    drop_talk(&t);
    CHECK(memcmp(t.said, expected, sizeof expected) == 0);
}

/* ---- cancelled while pages are on their way ---------------------------------------------------------------------- */

static void *cancel_soon(void *arg)
{
    usleep(20000);
    CHECK(hsr_session_cancel(arg, NULL) == HSR_OK);
    return NULL;
}

static void test_cancel(void)
{
    pthread_t thread;
    talk t;
    set_disk((hsri_io_fault){ .delay_ms = 4 }, READS | WRITES, 0, FOREVER);
    begin_talk(&t, new_engine(HOT, true));
    CHECK(hsr_session_prefill(t.a, NULL, NULL, &err) == HSR_OK);
    for (int i = 0; i < 6; i++) {
        const uint64_t before = stats_of(t.a).n_tokens;
        CHECK(append(t.a, 1000, 4) == HSR_OK && pthread_create(&thread, NULL, cancel_soon, t.a) == 0);
        CHECK(hsr_session_prefill(t.a, NULL, NULL, &err) == HSR_E_CANCELLED);
        pthread_join(thread, NULL);
        const hsr_session_stats st = stats_of(t.a);
        CHECK(st.n_tokens == st.n_computed && st.n_tokens >= before && st.n_tokens < before + 1000 && st.status == HSR_OK);
    }
    disk.count = 0;
    CHECK(hsr_session_rebuild(t.a, &err) == HSR_OK && hsr_session_truncate(t.a, LONG, &err) == HSR_OK);
    end_talk(&t);
    CHECK(t.failed == HSR_OK);
}

/* ---- children, which may be refused things, and die -------------------------------------------------------------- */

static int in_child(void (*fn)(void))
{
    int status = 0;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        check_failures = 0;
        alarm(60);
        fn();
        _exit(check_failures ? 1 : 0);
    }
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    return status;
}

static bool deny(uint32_t number)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = { sizeof code / sizeof *code, code };
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

static int n_lines;

static void take_line(void *user, int32_t level, const char *text, size_t length)
{
    (void)user;
    (void)level;
    n_lines += memmem(text, length, "io_uring", 8) != NULL;
}

static void talk_with_log(hsr_engine_opts *o)
{
    hsr_engine *e;
    talk t;
    o->log = take_line;
    o->log_level = HSR_LOG_INFO;
    if (!CHECK(hsr_engine_create(model, o, &e, &err) == HSR_OK))
        return;
    begin_talk(&t, e);
    end_talk(&t);
    CHECK(t.failed == HSR_OK);
}

static void without_io_uring(void)
{
    hsr_engine_opts o = options(HOT, true);
    hsr_engine *e = NULL;
    if (!deny(SYS_io_uring_setup)) {
        fprintf(stderr, "no seccomp: io_uring refused is not tested\n");
        return;
    }
    CHECK(hsr_engine_create(model, &o, &e, &err) == HSR_OK && strcmp(stats(e).io_engine, "pread") == 0);
    CHECK(hsr_engine_destroy(&e, &err) == HSR_OK);
    talk_with_log(&o);
    CHECK(n_lines == 1);
    o.io_engine = HSR_IO_URING;
    CHECK(hsr_engine_create(model, &o, &e, &err) == HSR_E_UNSUPPORTED && strstr(err.message, "io_uring"));
}

static void without_memlock(void)
{
    const struct rlimit none = { 0, 0 };
    hsr_engine_opts o = options(HOT, true);
    CHECK(chmod(folder, 0777) == 0 && setrlimit(RLIMIT_MEMLOCK, &none) == 0);
    if (geteuid() == 0)
        CHECK(setresuid(65534, 65534, 65534) == 0);     /* nobody: without the right to lock more */
    if (access(folder, W_OK) == 0)
        talk_with_log(&o);
}

/* A host without standard streams: their numbers stay free, for what it prints must not land in a file of pages, nor must a stream that
 * it opens later take such a file's place. */
static void without_streams(void)
{
    static const int32_t engines[] = { HSR_IO_AUTO, HSR_IO_PREAD };
    char path[80];
    talk t;
    set_disk((hsri_io_fault){ 0 }, 0, 0, 0);
    snprintf(path, sizeof path, "%s.save", folder);
    for (int fd = 0; fd < 3; fd++)
        close(fd);
    for (int i = 0; i < 2; i++) {
        hsr_engine_opts o = options(HOT, true);
        hsr_engine *e;
        hsr_session *again = NULL;
        o.io_engine = engines[i];
        CHECK(hsr_engine_create(model, &o, &e, &err) == HSR_OK);
        begin_talk(&t, e);
        CHECK(hsr_session_prefill(t.a, NULL, NULL, &err) == HSR_OK && stats(e).cold_pages > 0);
        CHECK(hsr_session_save(t.b, path, NULL, NULL, &err) == HSR_OK && hsr_session_restore(e, path, NULL, &again, &err) == HSR_OK);
        for (int fd = 0; fd < 3; fd++)
            CHECK(fcntl(fd, F_GETFD) < 0);
        CHECK(hsr_session_destroy(&again, &err) == HSR_OK);
        end_talk(&t);
    }
    unlink(path);
}

/* Pages go and come until the process is killed. */
static void talk_forever(void)
{
    talk t;
    begin_talk(&t, new_engine(HOT, true));
    for (;;) {
        CHECK(hsr_session_prefill(t.a, NULL, NULL, &err) == HSR_OK);
        CHECK(hsr_session_rebuild(t.a, &err) == HSR_OK);
    }
}

/* Killed in the middle of a step: nothing is left, and the next one starts as the first. */
static void test_kill(void)
{
    cold_faults = NULL;
    for (int i = 0; i < 4; i++) {
        fflush(NULL);
        const pid_t pid = fork();
        if (pid == 0)
            talk_forever();
        usleep(150000 + 77000 * (useconds_t)i);
        int status = 0;
        CHECK(pid > 0 && kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
        CHECK(host_count(folder) == 2);
        CHECK(disturbed_talk((hsri_io_fault){ 0 }, 0, 0, 0) == HSR_OK);
    }
}

static bool new_folder(const char *where)
{
    snprintf(folder, sizeof folder, "%s/hisparse_cold_XXXXXX", where);
    return mkdtemp(folder) != NULL;
}

/* Many runs, whose disk need not be a real one. */
static void sweep(unsigned long stride)
{
    if (!CHECK(new_folder("/dev/shm") || new_folder("/tmp")))
        return;
    find_expected();
    test_sweep(stride);
    CHECK(rmdir(folder) == 0);
}

static void all_others(void)
{
    if (!CHECK(new_folder("/tmp")))
        return;
    test_observe(HSR_KV_BF16, 9);
    test_observe(HSR_KV_COMPACT, 3);
    for (int cold = 0; cold < 2; cold++) {
        test_observe_fork(HSR_KV_BF16, cold);
        test_observe_fork(HSR_KV_INT8, cold);
    }
    test_left_out();
    test_untold();
    find_expected();
    CHECK(in_child(without_io_uring) == 0);
    CHECK(in_child(without_memlock) == 0);
    CHECK(in_child(without_streams) == 0);
    test_kill();
    test_full_disk();
    test_bad_reads();
    test_cut_file(HSR_IO_AUTO);
    test_cut_file(HSR_IO_PREAD);
    test_hang(READS, 10);
    test_hang(WRITES, 4);
    test_cancel();
    CHECK(rmdir(folder) == 0);
}

int main(int argc, char **argv)
{
    if (!CHECK((model = cold_model()) != NULL))
        return CHECK_REPORT();
    if (argc > 1 && strcmp(argv[1], "sweep") == 0)
        sweep(argc > 2 ? strtoul(argv[2], NULL, 10) : SWEEP_STRIDE);
    else
        all_others();
    hsr_model_close(&model);
    return CHECK_REPORT();
}
