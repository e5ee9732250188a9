/* SPDX-License-Identifier: Apache-2.0 */
/* base/: statuses, arrays, random numbers, log, processors, threads. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/threads.h"
#include "check.h"

/* Sanitizers reserve more address space than a limit could leave them. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif

/* ---- statuses ---- */

static bool says(const hsr_error *err, const char *text)
{
    bool same = strcmp(err->message, text) == 0;
    if (!same)
        fprintf(stderr, "message is \"%s\", expected \"%s\"\n", err->message, text);
    return same;
}

static void test_fail(void)
{
    hsr_error err = HSR_ERROR_INIT;
    CHECK(hsri_fail(&err, HSR_E_FORMAT, "tensor '%s' has %d dims", "a.weight", 9) == HSR_E_FORMAT);
    CHECK(err.status == HSR_E_FORMAT && err.sys_code == 0);
    CHECK(says(&err, "tensor 'a.weight' has 9 dims"));

    CHECK(hsri_fail(&err, HSR_E_INVALID, "outer: %s", err.message) == HSR_E_INVALID);
    CHECK(says(&err, "outer: tensor 'a.weight' has 9 dims"));

    CHECK(hsri_fail_sys(&err, HSR_E_IO, ENOENT, "%s: cannot open", "m.hsr") == HSR_E_IO);
    CHECK(err.status == HSR_E_IO && err.sys_code == ENOENT);
    CHECK(says(&err, "m.hsr: cannot open: No such file or directory"));

    hsri_clear(&err);
    CHECK(err.status == HSR_OK && err.sys_code == 0 && err.message[0] == '\0');
    CHECK(hsri_fail(NULL, HSR_E_NOMEM, "nobody listens") == HSR_E_NOMEM);
    hsri_clear(NULL);
}

static void test_text_is_utf8(void)
{
    static const struct { const char *given, *made; } cases[] = {
        { "plain", "plain" },
        { "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80" },  /* 2, 3 and 4 bytes */
        { "a\xFF" "b", "a?b" },
        { "\xC0\xAF", "??" },                       /* overlong */
        { "\xE0\x80\xAF", "???" },
        { "\xED\xA0\x80", "???" },                  /* surrogate */
        { "\xF4\x90\x80\x80", "????" },             /* above U+10FFFF */
        { "\xE2\x82", "??" },                       /* ends too early, but was not cut by us */
        { "\xE2\x82\xC3\xA9", "??\xC3\xA9" },
        { "line\nbreak\x1B[31m\x7F", "line?break?[31m?" },
        { "\xF4\x8F\xBF\xBF\xED\x9F\xBF\xEE\x80\x80", "\xF4\x8F\xBF\xBF\xED\x9F\xBF\xEE\x80\x80" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        hsr_error err = HSR_ERROR_INIT;
        hsri_fail(&err, HSR_E_FORMAT, "%s", cases[i].given);
        CHECK(says(&err, cases[i].made));
    }
}

/* A text that does not fit ends with a whole character, wherever the cut falls. */
static void test_text_is_cut(void)
{
    static const char *const characters[] = { "x", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80" };
    char text[700];
    for (size_t c = 0; c < 4; c++) {
        size_t width = strlen(characters[c]);
        for (size_t lead = 0; lead < 4; lead++) {
            hsr_error err = HSR_ERROR_INIT;
            size_t n = 0;
            while (n < lead)
                text[n++] = '-';
            for (; n + width < sizeof(text); n += width)
                memcpy(text + n, characters[c], width);
            text[n] = '\0';
            hsri_fail(&err, HSR_E_FORMAT, "%s", text);
            size_t length = strlen(err.message), fits = sizeof(err.message) - 1;
            CHECK(length == lead + (fits - lead) / width * width);
            CHECK(memcmp(err.message, text, length) == 0);
        }
    }
    hsr_error err = HSR_ERROR_INIT;
    memset(text, 'x', 498);
    text[498] = '\0';
    hsri_fail_sys(&err, HSR_E_IO, EIO, "%s", text);
    CHECK(strlen(err.message) == 499 && err.message[498] == ':');
    hsri_fail_sys(&err, HSR_E_IO, EIO, "%0700d", 1);
    CHECK(strlen(err.message) == 499 && err.message[498] == '0');
}

/* Nothing is written beyond the size the caller states. */
static void test_short_error(void)
{
    for (uint32_t size = 0; size <= sizeof(hsr_error); size++) {
        hsr_error err, before;
        memset(&err, 0x55, sizeof(err));
        err.struct_size = size;
        before = err;
        hsri_fail(&err, HSR_E_FORMAT, "%0600d", 7);
        CHECK(memcmp((char *)&err + hsri_max(size, 4), (char *)&before + hsri_max(size, 4), sizeof(err) - hsri_max(size, 4)) == 0);
        if (size > 12)
            CHECK(err.status == HSR_E_FORMAT && memchr(err.message, 0, size - 12));
    }
}

/* ---- arrays ---- */

static void test_arrays(void)
{
    unsigned char *a = hsri_new_array(100, 3);
    CHECK(a && a[0] == 0 && a[299] == 0);
    free(a);
    CHECK((a = hsri_new_array(0, 8)) != NULL);
    free(a);
    CHECK(hsri_new_array(SIZE_MAX / 4 + 2, 4) == NULL);   /* wraps to 4 bytes */
    CHECK(hsri_new_array(SIZE_MAX / 2, 3) == NULL);
    CHECK(hsri_new_array(SIZE_MAX, 1) == NULL);
    CHECK((a = hsri_new_aligned(3, 7)) && (uintptr_t)a % 64 == 0 && a[20] == 0);
    free(a);
    CHECK(hsri_new_aligned(SIZE_MAX, 1) == NULL);
    CHECK(hsri_new_aligned(SIZE_MAX / 4 + 2, 4) == NULL);
}

static void test_grow(void)
{
    uint32_t *a = NULL;
    size_t capacity = 0, last = 0, moves = 0;
    for (size_t n = 1; n <= 1000; n++) {
        if (!CHECK(hsri_grow((void **)&a, &capacity, n, sizeof(*a))))
            break;
        moves += capacity != last;
        last = capacity;
        CHECK(capacity >= n && a[n - 1] == 0);
        a[n - 1] = (uint32_t)n;
    }
    CHECK(moves <= 11);
    CHECK(a[0] == 1 && a[999] == 1000);
    uint32_t *before = a;
    CHECK(!hsri_grow((void **)&a, &capacity, SIZE_MAX / 4 + 2, sizeof(*a)));
    CHECK(a == before && capacity == last && a[999] == 1000);
    free(a);
}

/* ---- random numbers ---- */

static void test_rng(void)
{
    /* Known answer published with the algorithm, for counter 0 and key 0. */
    CHECK(hsri_rng_u64(0, 0) == 0xCA00A0459843D731u);
    CHECK(hsri_rng_u64(1, 0) != hsri_rng_u64(0, 1));
    double sum = 0, least = 1, most = 0;
    enum { N = 100000 };
    for (uint64_t i = 0; i < N; i++) {
        double x = hsri_rng_unit(42, i);
        sum += x;
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    CHECK(least >= 0 && most < 1 && least < 0.001 && most > 0.999);
    CHECK(sum / N > 0.495 && sum / N < 0.505);
}

/* ---- log ---- */

typedef struct lines {
    int     n;
    int32_t level;
    size_t  length;
    char    last[2048];
} lines;

static void keep_line(void *user, int32_t level, const char *message, size_t length)
{
    lines *l = user;
    l->n++;
    l->level = level;
    l->length = length;
    memcpy(l->last, message, length + 1);
}

static void test_log(void)
{
    lines seen = { 0 };
    hsri_log log;
    char text[1500];
    if (!CHECK(hsri_log_init(&log, keep_line, &seen, HSR_LOG_INFO, NULL) == HSR_OK))
        return;
    hsri_log_write(&log, HSR_LOG_DEBUG, "not wanted");
    CHECK(seen.n == 0);
    hsri_log_write(&log, HSR_LOG_INFO, "%d of %s", 3, "m\xFF");
    CHECK(seen.n == 1 && seen.level == HSR_LOG_INFO && seen.length == 7 && strcmp(seen.last, "3 of m?") == 0);
    memset(text, 'y', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    hsri_log_write(&log, HSR_LOG_ERROR, "%s", text);
    CHECK(seen.n == 2 && seen.length == 1023 && strlen(seen.last) == 1023);
    hsri_log_destroy(&log);

    CHECK(hsri_log_init(&log, NULL, NULL, HSR_LOG_DEBUG, NULL) == HSR_OK);
    hsri_log_write(&log, HSR_LOG_ERROR, "silent");
    hsri_log_destroy(&log);
}

/* ---- processors ---- */

static char folder[] = "/tmp/hsr-test-XXXXXX";

static void write_file(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    for (char *slash = path + strlen(folder) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    if (!CHECK(file != NULL))
        return;
    fputs(text, file);
    fclose(file);
}

static int32_t quota(const char *membership)
{
    char path[256];
    write_file("membership", membership);
    snprintf(path, sizeof(path), "%s/membership", folder);
    return hsri_cpu_quota(path, folder);
}

static void test_quota(void)
{
    CHECK(quota("") == INT32_MAX);
    CHECK(quota("nonsense\n:::\n0::\n") == INT32_MAX);
    write_file("a/b/cpu.max", "350000 100000\n");
    CHECK(quota("0::/a/b\n") == 3);
    CHECK(quota("0::/a/b") == 3);
    CHECK(quota("0::/a/b/gone/deeper\n") == 3);
    CHECK(quota("0::/elsewhere\n") == INT32_MAX);
    CHECK(quota("5:memory:/a/b\n") == INT32_MAX);
    write_file("a/cpu.max", "50000 100000\n");
    CHECK(quota("0::/a/b\n") == 1);
    write_file("a/cpu.max", "max 100000\n");
    CHECK(quota("0::/a/b\n") == 3);
    write_file("cpu.max", "200000 100000\n");
    CHECK(quota("0::/a/b\n") == 2);
    CHECK(quota("0::/../other\n") == 2);
    write_file("cpu.max", "0 0\n");
    CHECK(quota("0::/a/b\n") == 3);
    write_file("cpu/x/cpu.cfs_quota_us", "400000\n");
    write_file("cpu/x/cpu.cfs_period_us", "100000\n");
    CHECK(quota("4:cpuset:/\n3:cpuacct,cpu:/x\n") == 4);
    CHECK(quota("3:cpu:/x\n0::/a/b\n") == 3);
    write_file("cpu/cpu.cfs_quota_us", "-1\n");
    write_file("cpu/cpu.cfs_period_us", "100000\n");
    CHECK(quota("3:cpu:/\n") == INT32_MAX);
    CHECK(quota("3:cpu:/x\n") == 4);
}

static uint64_t memory(const char *membership, bool left)
{
    char path[256];
    write_file("membership", membership);
    snprintf(path, sizeof(path), "%s/membership", folder);
    return hsri_memory_limit(path, folder, left);
}

/* A service, or a container that sees the host's tree, in a group below the root. */
static void test_memory_limit(void)
{
    CHECK(memory("", false) == UINT64_MAX && memory("0::/a/b\n", true) == UINT64_MAX);
    write_file("a/b/memory.max", "max\n");
    CHECK(memory("0::/a/b\n", false) == UINT64_MAX);
    write_file("a/memory.max", "5000000\n");
    write_file("a/memory.current", "4000000\n");
    CHECK(memory("0::/a/b\n", false) == 5000000 && memory("0::/a/b\n", true) == 1000000);
    write_file("a/memory.stat", "anon 500000\nfile 3600000\nworkingset_refault_file 7\ninactive_file 2500000\nactive_file 1000000\n");
    CHECK(memory("0::/a/b\n", true) == 4500000);
    write_file("a/b/memory.max", "100\n");
    write_file("a/b/memory.current", "200\n");
    CHECK(memory("0::/a/b\n", true) == 0 && memory("0::/a\n", true) == 4500000 && memory("0::/elsewhere\n", true) == UINT64_MAX);
    write_file("memory/x/memory.limit_in_bytes", "3000000\n");
    write_file("memory/x/memory.usage_in_bytes", "2000000\n");
    write_file("memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 500000\ntotal_active_file 500000\n");
    CHECK(memory("5:cpu:/x\n3:memory:/x/gone\n", false) == 3000000 && memory("3:memory:/x\n0::/a\n", true) == 2000000);
    write_file("memory/x/memory.limit_in_bytes", "9223372036854771712\n");
    CHECK(memory("3:memory:/x\n", false) > 1ull << 62);
    CHECK(hsri_memory_available() <= hsri_memory_total() && hsri_memory_available() > 0);
}

/* Half of what is available must be had. */
static void test_address_space(void)
{
#ifndef SANITIZED
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        const struct rlimit limit = { 1ull << 60, RLIM_INFINITY };
        const uint64_t all = hsri_memory_available();
        setrlimit(RLIMIT_AS, &limit);
        const uint64_t same = hsri_memory_available();
        setrlimit(RLIMIT_AS, &(struct rlimit){ 300ull << 20, RLIM_INFINITY });
        _exit(!(same > all / 2 && hsri_memory_available() < 300ull << 20));
    }
    int status = 0;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

/* Does the kernel, which lists only what programs may use, name the flag? */
static bool kernel_names(const char *flag)
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[8192], padded[64];
    bool found = false;
    if (!file)
        return false;
    snprintf(padded, sizeof(padded), " %s ", flag);
    while (!found && fgets(line, sizeof(line), file)) {
        line[strcspn(line, "\n")] = ' ';
        found = strncmp(line, "flags", 5) == 0 && strstr(line, padded) != NULL;
    }
    fclose(file);
    return found;
}

/* The compiler's own look at the processor knows no tiles. An emulated processor is not the one the kernel tells of. */
static void test_tiles(int32_t isa)
{
    static const char *const needed[] = { "amx_tile", "amx_int8", "amx_bf16", "avx512_bf16", "avx512vbmi", "avx512_vbmi2", "avx512_vnni" };
    bool all = true;
    for (size_t i = 0; i < sizeof(needed) / sizeof(*needed); i++)
        all = all && kernel_names(needed[i]);
    if (isa >= HSR_ISA_AVX512)
        CHECK((isa == HSR_ISA_AMX) == all);
    CHECK(isa == HSR_ISA_AMX || !hsri_cpu_allow_amx());
}

static void test_cpu(void)
{
    int32_t isa = hsri_cpu_isa();
    CHECK(isa >= HSR_ISA_REFERENCE && isa <= HSR_ISA_AMX);
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    CHECK((isa >= HSR_ISA_AVX2) == avx2);
    CHECK((isa >= HSR_ISA_AVX512) == (avx2 && avx512 && __builtin_cpu_supports("avx512dq")));
#endif
    test_tiles(isa);
    CHECK(strcmp(hsri_isa_name(HSR_ISA_AVX2), "avx2") == 0);
    CHECK(strcmp(hsri_isa_name(99), "unknown") == 0);
    cpu_set_t before, one;
    if (sched_getaffinity(0, sizeof(before), &before) != 0)
        return;
    int32_t granted = hsri_cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    CHECK(hsri_cpu_count() >= 1 && hsri_cpu_count() == (granted < CPU_COUNT(&before) ? granted : CPU_COUNT(&before)));
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++) {
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &one);
    }
    CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
    CHECK(hsri_cpu_count() == 1);
    CHECK(sched_setaffinity(0, sizeof(before), &before) == 0);
}

static void test_clock(void)
{
    uint64_t start = hsri_now_ns();
    usleep(2000);
    uint64_t passed = hsri_now_ns() - start;
    CHECK(passed >= 2000000 && passed < 60000000000u);
}

/* ---- threads ---- */

typedef struct tally {
    uint32_t *runs;           /* per task, not atomic: each must be run once and be visible afterwards */
    uint32_t  n_workers;
    _Atomic uint32_t inside[64], bad_worker;
} tally;

static void count_run(void *arg, uint32_t task, uint32_t worker)
{
    tally *t = arg;
    if (worker >= t->n_workers || atomic_fetch_add(&t->inside[worker], 1))
        atomic_fetch_add(&t->bad_worker, 1);
    t->runs[task]++;
    if (worker < t->n_workers)
        atomic_fetch_sub(&t->inside[worker], 1);
}

static void test_parallel(int32_t n_threads)
{
    enum { MOST = 300 };
    static uint32_t runs[MOST];
    hsri_threads *threads;
    if (!CHECK(hsri_threads_create(n_threads, &threads, NULL) == HSR_OK))
        return;
    CHECK(hsri_threads_count(threads) == n_threads);
    tally t = { .runs = runs, .n_workers = (uint32_t)n_threads };
    for (uint32_t loop = 0; loop < 3000; loop++) {
        uint32_t n = loop * 7 % (loop % 50 == 0 ? MOST : 6);
        memset(runs, 0, sizeof(runs));
        hsri_parallel(threads, n, count_run, &t);
        for (uint32_t i = 0; i < MOST; i++) {
            if (!CHECK(runs[i] == (i < n)))
                loop = 3000;
        }
        if (loop % 500 == 0)
            usleep(300);   /* long enough for workers to sleep */
    }
    CHECK(atomic_load(&t.bad_worker) == 0);
    hsri_threads_destroy(threads);
}

static void slow_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    if (task == 0)
        usleep(3000);   /* the others wait for this one, asleep */
    atomic_fetch_add((_Atomic uint32_t *)arg, 1);
}

static void test_slow_tasks(void)
{
    hsri_threads *threads;
    if (!CHECK(hsri_threads_create(3, &threads, NULL) == HSR_OK))
        return;
    for (int i = 0; i < 20; i++) {
        _Atomic uint32_t n = 0;
        hsri_parallel(threads, 4, slow_task, &n);
        CHECK(atomic_load(&n) == 4);
    }
    hsri_threads_destroy(threads);
}

typedef struct look {
    pthread_mutex_t lock;
    char            name[16];
    sigset_t        mask;
    bool            seen;
} look;

/* One of two tasks falls to a worker, as the other is held until a worker has looked. */
static void look_at_worker(void *arg, uint32_t task, uint32_t worker)
{
    look *l = arg;
    (void)task;
    for (int tries = 0; tries < 5000; tries++) {
        pthread_mutex_lock(&l->lock);
        if (worker != 0 && !l->seen) {
            pthread_getname_np(pthread_self(), l->name, sizeof(l->name));
            pthread_sigmask(SIG_SETMASK, NULL, &l->mask);
            l->seen = true;
        }
        bool seen = l->seen;
        pthread_mutex_unlock(&l->lock);
        if (seen)
            return;
        usleep(1000);
    }
}

static void test_worker_manners(void)
{
    hsri_threads *threads;
    look l = { .lock = PTHREAD_MUTEX_INITIALIZER };
    sigset_t after;
    if (!CHECK(hsri_threads_create(2, &threads, NULL) == HSR_OK))
        return;
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    CHECK(!sigismember(&after, SIGINT) && !sigismember(&after, SIGTERM));
    hsri_parallel(threads, 2, look_at_worker, &l);
    CHECK(l.seen);
    CHECK(strcmp(l.name, "hsr-worker") == 0);
    CHECK(sigismember(&l.mask, SIGINT) && sigismember(&l.mask, SIGTERM) && sigismember(&l.mask, SIGUSR1) && sigismember(&l.mask, SIGPROF));
    hsri_threads_destroy(threads);
}

static uint64_t cpu_ns(void)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
}

static void nothing(void *arg, uint32_t task, uint32_t worker) { (void)arg; (void)task; (void)worker; }

static void test_idle_threads_sleep(void)
{
    hsri_threads *threads;
    if (!CHECK(hsri_threads_create(2, &threads, NULL) == HSR_OK))
        return;
    hsri_parallel(threads, 2, nothing, NULL);
    usleep(20000);
    uint64_t before = cpu_ns();
    usleep(100000);
    CHECK(cpu_ns() - before < 20000000);
    hsri_threads_destroy(threads);
}

static void test_threads_refusals(void)
{
    static const int32_t wrong[] = { 0, -1, INT32_MIN, 1025, INT32_MAX };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        hsr_error err = HSR_ERROR_INIT;
        hsri_threads *threads = (hsri_threads *)&err;
        CHECK(hsri_threads_create(wrong[i], &threads, &err) == HSR_E_INVALID);
        CHECK(threads == NULL && strstr(err.message, "n_threads"));
    }
    hsri_threads_destroy(NULL);
    hsri_threads_forget(NULL);
}

/* A forked child has no workers to join; it frees the memory and ends. */
static void test_forget(void)
{
    hsri_threads *threads;
    if (!CHECK(hsri_threads_create(3, &threads, NULL) == HSR_OK))
        return;
    pid_t child = fork();
    if (child == 0) {
        hsri_threads_forget(threads);
        _exit(0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    hsri_parallel(threads, 3, nothing, NULL);
    hsri_threads_destroy(threads);
}

/* With no address space for all the stacks, the threads that did start end again. Returns 0 if so, in a child. */
__attribute__((unused)) static int create_too_many(void)
{
    hsr_error err = HSR_ERROR_INIT;
    hsri_threads *threads;
    char line[256];
    long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    bool known = statm && fgets(line, sizeof(line), statm) && sscanf(line, "%ld", &pages) == 1;
    if (statm)
        fclose(statm);
    rlim_t limit = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + (1u << 28);
    if (!known || setrlimit(RLIMIT_AS, &(struct rlimit){ limit, limit }) != 0)
        return 0;
    if (hsri_threads_create(1024, &threads, &err) != HSR_E_NOMEM || threads || !strstr(err.message, "of 1024"))
        return 1;
    struct stat st;
    return stat("/proc/self/task", &st) == 0 && st.st_nlink == 3 ? 0 : 2;   /* ".", ".." and one thread */
}

static void test_partly_started(void)
{
#ifndef SANITIZED
    pid_t child = fork();
    if (child == 0)
        _exit(create_too_many());
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
#endif
}

/* Not a check: the cost of an empty loop, on request. */
static void measure_loops(int32_t n_threads)
{
    enum { LOOPS = 20000 };
    hsri_threads *threads;
    if (!CHECK(hsri_threads_create(n_threads, &threads, NULL) == HSR_OK))
        return;
    uint64_t best = UINT64_MAX;
    for (int round = 0; round < 10; round++) {
        uint64_t start = hsri_now_ns();
        for (int i = 0; i < LOOPS; i++)
            hsri_parallel(threads, (uint32_t)n_threads, nothing, NULL);
        best = hsri_min(best, hsri_now_ns() - start);
    }
    printf("%d threads: %.0f ns per loop\n", n_threads, (double)best / LOOPS);
    hsri_threads_destroy(threads);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        measure_loops(1);
        measure_loops(2);
        measure_loops(4);
        return CHECK_REPORT();
    }
    test_fail();
    test_text_is_utf8();
    test_text_is_cut();
    test_short_error();
    test_arrays();
    test_grow();
    test_rng();
    test_log();
    if (CHECK(mkdtemp(folder) != NULL)) {
        char command[128];
        test_quota();
        test_memory_limit();
        snprintf(command, sizeof(command), "rm -rf '%s'", folder);
        CHECK(system(command) == 0);
    }
    test_cpu();
    test_address_space();
    test_clock();
    test_parallel(1);
    test_parallel(2);
    test_parallel(7);
    test_slow_tasks();
    test_worker_manners();
    test_idle_threads_sleep();
    test_threads_refusals();
    test_forget();
    test_partly_started();
    return CHECK_REPORT();
}
