/* SPDX-License-Identifier: Apache-2.0 */
/* Cold files, with both engines: what comes back, in what order of events, and what happens when the system says no. */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/rng.h"
#include "check.h"
#include "io/extents.h"
#include "io/io.h"
#include "io/io_internal.h"

#if defined(__has_feature) && !defined(__SANITIZE_THREAD__)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

enum { BLOCK = HSRI_IO_ALIGN, MOST = 512, FOREVER_MS = 20000 };

static char folder[64];
static bool have_uring;   /* here and now; without it the tests of that engine cannot run */

/* ---- helpers ---- */

/* The linker sends the library's calls through these; 0: refuse none, n: the n-th from now. */
static uint32_t refuse_memory, refuse_threads;

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
int __real_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);

void *__wrap_calloc(size_t n, size_t size)
{
    return refuse_memory && --refuse_memory == 0 ? NULL : __real_calloc(n, size);
}

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    return refuse_threads && --refuse_threads == 0 ? EAGAIN : __real_pthread_create(t, attr, fn, arg);
}

/* A plan of faults: which operation does what. */
typedef struct fault_plan {
    hsri_io_faults faults;
    hsri_io_fault  at[MOST];
    bool           set[MOST];
    uint64_t       n_seen, n_hit;
    uint64_t       by_action[8];
    bool           no_direct;
    uint64_t       seed;             /* not 0: reads and writes get harmless troubles at random */
} fault_plan;

static void trouble(uint64_t r, hsri_io_fault *fault)
{
    switch (r % 8) {
    case 0: fault->error = EINTR; break;
    case 1: fault->error = r % 5 ? EINTR : EAGAIN; break;
    case 2: fault->limited = true; fault->limit = 1 + (uint32_t)(r >> 8) % 20000; break;
    case 3: fault->limited = true; fault->limit = BLOCK * (1 + (uint32_t)(r >> 8) % 4); break;
    case 4: fault->delay_ms = (r >> 8) % 64 == 0; break;
    default: break;
    }
}

static void plan_before(void *user, hsri_io_action action, uint64_t index, hsri_io_fault *fault)
{
    fault_plan *plan = user;
    CHECK(index == plan->n_seen);
    plan->n_seen++;
    plan->by_action[action]++;
    if (index < MOST && plan->set[index]) {
        *fault = plan->at[index];
        plan->n_hit++;
    } else if (action == HSRI_IO_DIRECT && plan->no_direct) {
        fault->error = EINVAL;
    } else if (plan->seed && (action == HSRI_IO_READ || action == HSRI_IO_WRITE)) {
        trouble(hsri_rng_u64(plan->seed, index), fault);
    }
}

static fault_plan *new_plan(void)
{
    fault_plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        abort();
    plan->faults = (hsri_io_faults){ plan_before, plan };
    return plan;
}

/* A fault of the n-th operation from now. */
static void plan_at(fault_plan *plan, uint64_t n, hsri_io_fault fault)
{
    plan->at[plan->n_seen + n] = fault;
    plan->set[plan->n_seen + n] = true;
}

static hsri_io *make_io_with(hsri_io_opts opts)
{
    hsr_error err = HSR_ERROR_INIT;
    hsri_io *io = NULL;
    if (!CHECK(hsri_io_create(&opts, &io, &err) == HSR_OK)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    return io;
}

static hsri_io *make_io(hsri_io_kind kind, fault_plan *plan)
{
    return make_io_with((hsri_io_opts){ .kind = kind, .queue_depth = 16, .max_requests = 256, .faults = plan ? &plan->faults : NULL });
}

static hsri_io_file *make_file(hsri_io *io)
{
    hsr_error err = HSR_ERROR_INIT;
    hsri_io_file *file = NULL;
    if (!CHECK(hsri_io_create_file(io, folder, &file, &err) == HSR_OK)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    return file;
}

static void end_io(hsri_io *io)
{
    CHECK(hsri_io_destroy(io, FOREVER_MS, NULL) == HSR_OK);
}

static uint8_t *new_memory(size_t bytes)
{
    uint8_t *memory = aligned_alloc(BLOCK, bytes);
    if (!memory)
        abort();
    memset(memory, 0xEE, bytes);
    return memory;
}

static void fill(uint8_t *memory, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t r = hsri_rng_u64(seed, i);
        memcpy(memory + i, &r, 8);
    }
}

static hsri_io_request ask(hsri_io_file *file, bool write, uint64_t offset, void *memory, uint32_t bytes, uint64_t tag)
{
    return (hsri_io_request){ .file = file, .write = write, .offset = offset, .memory = memory, .bytes = bytes, .tag = tag };
}

static void submit(hsri_io *io, const hsri_io_request *r, uint32_t n)
{
    hsr_error err = HSR_ERROR_INIT;
    uint32_t accepted = 0;
    if (!CHECK(hsri_io_submit(io, r, n, &accepted, &err) == HSR_OK && accepted == n))
        fprintf(stderr, "%s\n", err.message);
}

/* Collect n completions, or fail. */
static bool collect(hsri_io *io, hsri_io_done *done, uint32_t n)
{
    uint64_t start = hsri_now_ns();
    for (uint32_t got = 0; got < n; ) {
        got += hsri_io_wait(io, done + got, n - got, 100);
        if (!CHECK(hsri_now_ns() - start < FOREVER_MS * UINT64_C(1000000)))
            return false;
    }
    return true;
}

/* One request, from acceptance to its only completion. */
static hsri_io_done transfer(hsri_io *io, hsri_io_request r)
{
    hsri_io_done done = { .status = HSR_E_INTERNAL };
    submit(io, &r, 1);
    collect(io, &done, 1);
    CHECK(done.tag == r.tag && done.retired && done.write == r.write && done.offset == r.offset && done.bytes == r.bytes);
    return done;
}

static hsr_status transfer_status(hsri_io *io, hsri_io_request r)
{
    return transfer(io, r).status;
}

static hsri_io_stats stats_of(const hsri_io *io)
{
    hsri_io_stats stats;
    hsri_io_get_stats(io, &stats);
    return stats;
}

static int count_entries(const char *path)
{
    DIR *d = opendir(path);
    int n = -2;
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

static int count_threads(int expected)
{
    int n = 0;
    for (int i = 0; i < 1000 && (n = count_entries("/proc/self/task")) > expected; i++)
        usleep(1000);
    return n;
}

/* Run a test in a child, which may change its limits and rights. */
static void in_child(void (*fn)(void *arg), void *arg)
{
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0) {
        check_failures = 0;
        alarm(60);
        fn(arg);
        _exit(check_failures ? 1 : 0);
    }
    int status = 0;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- plain use ---- */

static void test_options(hsri_io_kind kind)
{
    static const hsri_io_opts bad[] = {
        { .kind = (hsri_io_kind)7 }, { .queue_depth = HSRI_IO_MAX_DEPTH + 1 }, { .max_requests = UINT32_MAX }, { .n_threads = 1000 },
        { .staging_bytes = HSRI_IO_MAX_STAGING + 1 },
    };
    hsr_error err = HSR_ERROR_INIT;
    hsri_io *io;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(hsri_io_create(&bad[i], &io, &err) == HSR_E_INVALID && io == NULL && err.message[0]);

    io = make_io_with((hsri_io_opts){ .kind = kind });
    CHECK(strcmp(hsri_io_engine_name(io), kind == HSRI_IO_PREAD ? "pread" : "io_uring") == 0);
    CHECK(hsri_io_staging(io) == NULL);
    end_io(io);
    end_io(make_io_with((hsri_io_opts){ .kind = kind, .queue_depth = HSRI_IO_MAX_DEPTH }));
    end_io(make_io_with((hsri_io_opts){ .kind = kind, .queue_depth = 1, .max_requests = 1 }));
    CHECK(hsri_io_destroy(NULL, 0, NULL) == HSR_OK);
    hsri_io_close(NULL);
}

static void test_file(hsri_io_kind kind)
{
    hsri_io *io = make_io(kind, NULL);
    hsri_io_file *file = make_file(io);
    struct stat st;
    uint64_t size = 1;
    CHECK(fstat(file->fd, &st) == 0 && st.st_nlink == 0 && (st.st_mode & 07777) == 0600 && S_ISREG(st.st_mode));
    CHECK(fcntl(file->fd, F_GETFD) & FD_CLOEXEC);
    CHECK(!!(fcntl(file->fd, F_GETFL) & O_DIRECT) == hsri_io_is_direct(file));
    CHECK(hsri_io_size(file, &size, NULL) == HSR_OK && size == 0);
    CHECK(count_entries(folder) == 0);

    hsr_error err = HSR_ERROR_INIT;
    hsri_io_file *none;
    CHECK(hsri_io_create_file(io, "no/such/folder", &none, &err) == HSR_E_IO && none == NULL && err.sys_code == ENOENT);
    CHECK(strstr(err.message, "no/such/folder"));
    hsri_io_close(file);
    end_io(io);
}

static void test_requests(hsri_io_kind kind)
{
    hsri_io *io = make_io(kind, NULL);
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(4 * BLOCK);
    const hsri_io_request bad[] = {
        ask(NULL, false, 0, m, BLOCK, 1), ask(file, false, 1, m, BLOCK, 1), ask(file, false, 0, m + 512, BLOCK, 1),
        ask(file, false, 0, m, 100, 1), ask(file, false, 0, m, 0, 1), ask(file, false, 0, NULL, BLOCK, 1),
        ask(file, false, 0, m, HSRI_IO_MAX_BYTES + BLOCK, 1), ask(file, false, UINT64_MAX - BLOCK + 1, m, BLOCK, 1),
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const hsri_io_request both[] = { ask(file, true, 0, m, BLOCK, 1), bad[i] };
        uint32_t accepted = 9;
        hsr_error err = HSR_ERROR_INIT;
        CHECK(hsri_io_submit(io, both, 2, &accepted, &err) == HSR_E_INVALID && accepted == 0 && err.message[0]);
    }
    hsri_io_done done;
    CHECK(hsri_io_wait(io, &done, 1, 0) == 0 && stats_of(io).operations == 0);

    /* Far behind what 32 bits can count. */
    uint64_t far = (UINT64_C(5) << 30) + BLOCK;
    fill(m, BLOCK, 1);
    CHECK(transfer_status(io, ask(file, true, far, m, BLOCK, 1)) == HSR_OK);
    CHECK(transfer_status(io, ask(file, false, far, m + BLOCK, BLOCK, UINT64_MAX)) == HSR_OK);
    CHECK(memcmp(m, m + BLOCK, BLOCK) == 0);
    hsri_io_close(file);
    end_io(io);
    free(m);
}

/* Is what stands in the file what the model says? One request per block at most is under way. */
typedef struct random_run {
    hsri_io      *io;
    hsri_io_file *file;
    uint8_t      *model, *buffers;
    bool          busy[256];
    hsri_io_request pending[64];
    bool          used[64];
} random_run;

enum { RUN_BLOCKS = 256, RUN_SLOTS = 64, RUN_MOST = 16 };

static bool run_pick(random_run *run, uint64_t r, uint32_t slot)
{
    uint32_t n = 1 + (uint32_t)(r >> 8) % RUN_MOST, first = (uint32_t)(r >> 16) % (RUN_BLOCKS - n + 1);
    for (uint32_t i = first; i < first + n; i++)
        if (run->busy[i])
            return false;
    memset(run->busy + first, 1, n);
    uint8_t *memory = run->buffers + (size_t)slot * RUN_MOST * BLOCK;
    bool write = r % 3 == 0;
    if (write)
        fill(memory, (size_t)n * BLOCK, r);
    else
        memset(memory, 0xEE, (size_t)n * BLOCK);
    run->pending[slot] = ask(run->file, write, (uint64_t)first * BLOCK, memory, n * BLOCK, slot);
    return run->used[slot] = true;
}

static uint32_t run_reap(random_run *run, uint64_t timeout_ms)
{
    hsri_io_done done[RUN_SLOTS];
    uint32_t n = hsri_io_wait(run->io, done, RUN_SLOTS, timeout_ms);
    for (uint32_t i = 0; i < n; i++) {
        if (!CHECK(done[i].tag < RUN_SLOTS && run->used[done[i].tag]))
            continue;
        const hsri_io_request *r = &run->pending[done[i].tag];
        CHECK(done[i].status == HSR_OK && done[i].retired);
        if (r->write)
            memcpy(run->model + r->offset, r->memory, r->bytes);
        else
            CHECK(memcmp(run->model + r->offset, r->memory, r->bytes) == 0);
        memset(run->busy + r->offset / BLOCK, 0, r->bytes / BLOCK);
        run->used[done[i].tag] = false;
    }
    return n;
}

static void test_random(hsri_io_kind kind, bool direct, uint64_t seed)
{
    enum { REQUESTS = 4000 };
    fault_plan *plan = new_plan();
    plan->no_direct = !direct;
    random_run run = { .io = make_io(kind, plan) };
    run.file = make_file(run.io);
    run.model = new_memory(RUN_BLOCKS * BLOCK);
    run.buffers = new_memory((size_t)RUN_SLOTS * RUN_MOST * BLOCK);
    CHECK(!hsri_io_is_direct(run.file) || direct);
    CHECK(transfer_status(run.io, ask(run.file, true, 0, run.model, RUN_BLOCKS * BLOCK, 0)) == HSR_OK);
    plan->seed = seed;
    uint64_t draws = 0, asked = 0, ended = 0;
    for (uint32_t round = 0; asked < REQUESTS; round++) {
        hsri_io_request batch[RUN_SLOTS];
        uint32_t n = 0, want = (uint32_t)(hsri_rng_u64(seed + 1, draws++) % 12), accepted;
        for (uint32_t slot = 0; slot < RUN_SLOTS && n < want; slot++)
            if (!run.used[slot] && run_pick(&run, hsri_rng_u64(seed + 1, draws++), slot))
                batch[n++] = run.pending[slot];
        CHECK(hsri_io_submit(run.io, batch, n, &accepted, NULL) == HSR_OK && accepted == n);
        asked += n;
        ended += run_reap(&run, round % 4 ? 0 : 1);
    }
    for (uint64_t start = hsri_now_ns(); ended < asked && CHECK(hsri_now_ns() - start < FOREVER_MS * UINT64_C(1000000)); )
        ended += run_reap(&run, 50);

    hsri_io_stats s = stats_of(run.io);
    uint64_t in_histogram = 0;
    for (uint32_t i = 0; i < HSRI_IO_BUCKETS; i++)
        in_histogram += s.read_latency[i];
    CHECK(s.reads + s.writes == asked + 1 && s.errors == 0 && s.depth == 0 && s.waiting == 0 && s.peak_depth > 1 && s.peak_depth <= 16);
    CHECK(in_histogram == s.reads && s.reads > REQUESTS / 2 && s.writes > REQUESTS / 5 && s.read_bytes > s.reads * BLOCK);
    CHECK(s.operations > s.reads + s.writes && s.coalesced > 10 && plan->n_seen >= s.operations);
    hsri_io_close(run.file);
    end_io(run.io);
    free(run.model);
    free(run.buffers);
    free(plan);
}

/* Neighbours in the file, in any order, into memory that follows on or does not. */
static void test_coalescing(hsri_io_kind kind)
{
    enum { N = 64 };
    hsri_io *io = make_io(kind, NULL);
    hsri_io_file *file = make_file(io);
    uint8_t *out = new_memory(N * BLOCK), *in = new_memory(2 * N * BLOCK);
    hsri_io_request r[N];
    hsri_io_done done[N];
    fill(out, N * BLOCK, 3);
    for (uint32_t i = 0; i < N; i++)
        r[i] = ask(file, true, i * BLOCK, out + i * BLOCK, BLOCK, i);
    submit(io, r, N);
    CHECK(collect(io, done, N));
    hsri_io_stats s = stats_of(io);
    CHECK(s.operations == 1 && s.coalesced == N - 1 && s.writes == N);

    for (uint32_t spread = 1; spread <= 2; spread++) {
        memset(in, 0, 2 * N * BLOCK);
        for (uint32_t i = 0; i < N; i++) {
            uint32_t block = i * 29 % N;
            r[i] = ask(file, false, block * BLOCK, in + (size_t)block * spread * BLOCK, BLOCK, i);
        }
        submit(io, r, N);
        CHECK(collect(io, done, N));
        for (uint32_t i = 0; i < N; i++)
            CHECK(done[i].status == HSR_OK && memcmp(in + (size_t)i * spread * BLOCK, out + i * BLOCK, BLOCK) == 0);
        CHECK(stats_of(io).operations == 1 + spread && stats_of(io).coalesced == (1 + spread) * (N - 1));
    }

    /* 1 MiB is the end of it, and other files and directions are no neighbours. */
    hsri_io_file *other = make_file(io);
    uint8_t *big = new_memory(3 * HSRI_IO_MAX_BYTES);
    const hsri_io_request mixed[] = {
        ask(file, true, 0, big, HSRI_IO_MAX_BYTES, 0), ask(file, true, HSRI_IO_MAX_BYTES, big, HSRI_IO_MAX_BYTES, 1),
        ask(other, true, 2 * HSRI_IO_MAX_BYTES, big, BLOCK, 2), ask(other, true, 2 * HSRI_IO_MAX_BYTES + BLOCK, big, BLOCK, 3),
    };
    submit(io, mixed, 4);
    CHECK(collect(io, done, 4));
    CHECK(stats_of(io).operations == 6);
    hsri_io_close(other);
    hsri_io_close(file);
    end_io(io);
    free(out);
    free(in);
    free(big);
}

static void test_staging(hsri_io_kind kind)
{
    hsri_io *io = make_io_with((hsri_io_opts){ .kind = kind, .staging_bytes = (1u << 20) - 100 });
    hsri_io_file *file = make_file(io);
    uint8_t *staging = hsri_io_staging(io), *own = new_memory(4 * BLOCK);
    CHECK(staging && (uintptr_t)staging % BLOCK == 0);
    fill(staging, 1u << 20, 5);
    CHECK(transfer_status(io, ask(file, true, 0, staging, 1u << 20, 0)) == HSR_OK);
    CHECK(transfer_status(io, ask(file, false, 16 * BLOCK, own, 4 * BLOCK, 0)) == HSR_OK);
    CHECK(memcmp(own, staging + 16 * BLOCK, 4 * BLOCK) == 0);
    CHECK(transfer_status(io, ask(file, false, 16 * BLOCK, staging + (1u << 20) - 4 * BLOCK, 4 * BLOCK, 0)) == HSR_OK);
    CHECK(memcmp(own, staging + (1u << 20) - 4 * BLOCK, 4 * BLOCK) == 0);
    hsri_io_close(file);
    end_io(io);
    free(own);
}

/* ---- the queue ---- */

static void test_back_pressure(hsri_io_kind kind)
{
    hsri_io *io = make_io_with((hsri_io_opts){ .kind = kind, .queue_depth = 2, .max_requests = 5 });
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(20 * BLOCK);
    hsri_io_request r[20];
    hsri_io_done done[20];
    uint32_t accepted, sent = 0;
    for (uint32_t i = 0; i < 20; i++)
        r[i] = ask(file, true, 2 * i * BLOCK, m + i * BLOCK, BLOCK, i);
    CHECK(hsri_io_submit(io, r, 20, &accepted, NULL) == HSR_OK && accepted == 5);
    CHECK(hsri_io_submit(io, r + 5, 15, &accepted, NULL) == HSR_OK && accepted == 0);
    CHECK(stats_of(io).depth <= 2 && stats_of(io).depth + stats_of(io).waiting <= 5);
    for (sent = 5; sent < 20; sent += accepted) {
        CHECK(collect(io, done, 1));
        CHECK(hsri_io_submit(io, r + sent, 20 - sent, &accepted, NULL) == HSR_OK && accepted == 1);
    }
    CHECK(collect(io, done, 5) && hsri_io_wait(io, done, 1, 0) == 0);
    CHECK(stats_of(io).writes == 20 && stats_of(io).peak_depth == 2);
    hsri_io_close(file);
    end_io(io);
    free(m);
}

static void *wake_later(void *arg)
{
    usleep(50000);
    hsri_io_wake(arg);
    return NULL;
}

static uint64_t ms_since(uint64_t start) { return (hsri_now_ns() - start) / 1000000; }

static void test_waiting(hsri_io_kind kind)
{
    fault_plan *plan = new_plan();
    hsri_io *io = make_io(kind, plan);
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(BLOCK);
    hsri_io_done done;
    uint64_t start = hsri_now_ns();
    CHECK(hsri_io_wait(io, &done, 1, 0) == 0);
    CHECK(hsri_io_wait(io, &done, 1, 30) == 0 && ms_since(start) >= 29);

    /* Woken before, and during, a sleep; each wake ends one. */
    for (uint32_t i = 0; i < 3; i++) {
        pthread_t thread;
        start = hsri_now_ns();
        hsri_io_wake(io);
        CHECK(hsri_io_wait(io, &done, 1, UINT64_MAX) == 0);
        CHECK(pthread_create(&thread, NULL, wake_later, io) == 0);
        CHECK(hsri_io_wait(io, &done, 1, UINT64_MAX) == 0 && ms_since(start) >= 45);
        pthread_join(thread, NULL);
        start = hsri_now_ns();
        CHECK(hsri_io_wait(io, &done, 1, 20) == 0 && ms_since(start) >= 19);
    }
    /* A sleep ends when a delayed operation does. */
    plan_at(plan, 0, (hsri_io_fault){ .delay_ms = 30 });
    hsri_io_request r = ask(file, true, 0, m, BLOCK, 1);
    start = hsri_now_ns();
    submit(io, &r, 1);
    CHECK(hsri_io_wait(io, &done, 1, FOREVER_MS) == 1 && done.status == HSR_OK && ms_since(start) >= 29 && ms_since(start) < FOREVER_MS);
    hsri_io_close(file);
    end_io(io);
    free(m);
    free(plan);
}

/* In a process of its own: a read that takes 1.2 s of at most 3. */
static int read_slowly(hsri_io_kind kind)
{
    fault_plan *plan = new_plan();
    hsri_io *io = make_io_with((hsri_io_opts){ .kind = kind, .queue_depth = 1, .deadline_ms = 3000, .faults = &plan->faults });
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(BLOCK);
    hsri_io_done done;
    if (transfer_status(io, ask(file, true, 0, m, BLOCK, 1)) != HSR_OK)
        return 2;
    plan_at(plan, 0, (hsri_io_fault){ .delay_ms = 1200 });
    const hsri_io_request r = ask(file, false, 0, m, BLOCK, 2);
    submit(io, &r, 1);
    return collect(io, &done, 1) && done.status == HSR_OK && done.retired && stats_of(io).timeouts == 0 ? 0 : 1;
}

/* Requests of a process that is stopped for longer than their deadline do not time out. */
static void test_stopped(void)
{
    const hsri_io_kind kinds[] = { HSRI_IO_PREAD, HSRI_IO_AUTO };
    pid_t pids[2];
    int status;
    for (int i = 0; i < 2; i++)
        if ((pids[i] = fork()) == 0)
            _exit(read_slowly(kinds[i]));
    usleep(400000);
    for (int i = 0; i < 2; i++)
        CHECK(kill(pids[i], SIGSTOP) == 0);
    usleep(5000000);
    for (int i = 0; i < 2; i++)
        CHECK(kill(pids[i], SIGCONT) == 0 && waitpid(pids[i], &status, 0) == pids[i] && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_deadline(hsri_io_kind kind)
{
    fault_plan *plan = new_plan();
    hsri_io *io = make_io_with((hsri_io_opts){ .kind = kind, .queue_depth = 1, .deadline_ms = 40, .faults = &plan->faults });
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(4 * BLOCK);
    hsri_io_done done[4];
    fill(m, BLOCK, 1);
    CHECK(transfer_status(io, ask(file, true, 0, m, BLOCK, 1)) == HSR_OK);

    plan_at(plan, 0, (hsri_io_fault){ .delay_ms = 600 });
    const hsri_io_request r[] = { ask(file, false, 0, m + BLOCK, BLOCK, 1), ask(file, false, 8 * BLOCK, m + 2 * BLOCK, BLOCK, 2) };
    uint64_t start = hsri_now_ns();
    submit(io, r, 2);
    CHECK(collect(io, done, 2));
    CHECK(ms_since(start) >= 39 && ms_since(start) < 590);
    for (int i = 0; i < 2; i++) {
        /* The one under way still owns its memory; the one that waited does not. */
        CHECK(done[i].status == HSR_E_IO && done[i].sys_code == ETIMEDOUT && done[i].retired == (done[i].tag == 2));
    }
    CHECK(stats_of(io).timeouts == 2 && stats_of(io).errors == 2 && stats_of(io).depth == 1);
    CHECK(collect(io, done, 1));
    CHECK(ms_since(start) >= 599 && done[0].tag == 1 && done[0].retired && done[0].status == HSR_OK);
    CHECK(memcmp(m, m + BLOCK, BLOCK) == 0);
    CHECK(transfer_status(io, ask(file, false, 0, m + BLOCK, BLOCK, 3)) == HSR_OK);

    /* Nobody asked between the deadline and the end: the end alone is told. */
    plan_at(plan, 0, (hsri_io_fault){ .delay_ms = 60 });
    submit(io, r, 1);
    usleep(100000);
    CHECK(collect(io, done, 1));
    if (!done[0].retired)
        CHECK(collect(io, done, 1));
    CHECK(done[0].retired && done[0].status == HSR_OK && hsri_io_wait(io, done, 1, 0) == 0);

    /* One that never ends does not keep the io from ending. */
    plan_at(plan, 0, (hsri_io_fault){ .delay_ms = UINT32_MAX });
    submit(io, r, 1);
    CHECK(collect(io, done, 1) && !done[0].retired);
    start = hsri_now_ns();
    end_io(io);
    CHECK(ms_since(start) < 5000);
    free(m);
    free(plan);
}

static void test_close_under_way(hsri_io_kind kind)
{
    fault_plan *plan = new_plan();
    hsri_io *io = make_io_with((hsri_io_opts){ .kind = kind, .queue_depth = 1, .faults = &plan->faults });
    hsri_io_file *file = make_file(io), *stays = make_file(io);
    uint8_t *m = new_memory(2 * BLOCK);
    hsri_io_done done[3];
    int n_open = count_entries("/proc/self/fd");
    plan_at(plan, 0, (hsri_io_fault){ .delay_ms = 30 });
    const hsri_io_request r[] = {
        ask(file, true, 0, m, BLOCK, 1), ask(file, true, 2 * BLOCK, m, BLOCK, 2), ask(stays, true, 0, m, BLOCK, 3),
    };
    submit(io, r, 3);
    hsri_io_close(file);
    CHECK(count_entries("/proc/self/fd") == n_open);
    CHECK(collect(io, done, 3));
    for (int i = 0; i < 3; i++)
        CHECK(done[i].status == (done[i].tag == 2 ? HSR_E_CANCELLED : HSR_OK) && done[i].file == (done[i].tag == 3 ? stays : NULL));
    CHECK(stats_of(io).cancelled == 1 && stats_of(io).errors == 0 && stats_of(io).operations == 2);
    CHECK(count_entries("/proc/self/fd") == n_open - 1);
    /* What was not closed, and not reaped, goes with the io. */
    submit(io, &r[2], 1);
    end_io(io);
    free(m);
    free(plan);
}

/* ---- what the system may answer ---- */

static void test_short(hsri_io_kind kind)
{
    static const uint32_t limits[] = { 1, 511, 512, 4095, 4096, 4097, 8192, 10000, 65535 };
    uint8_t *out = new_memory(16 * BLOCK), *in = new_memory(16 * BLOCK);
    fill(out, 16 * BLOCK, 4);
    for (size_t i = 0; i < 2 * sizeof limits / sizeof *limits; i++) {
        fault_plan *plan = new_plan();
        plan->no_direct = i % 2;
        hsri_io *io = make_io(kind, plan);
        hsri_io_file *file = make_file(io);
        hsri_io_fault fault = { .limited = true, .limit = limits[i / 2] };
        for (uint64_t n = 0; n < 3; n++)
            plan_at(plan, n, fault);
        CHECK(transfer_status(io, ask(file, true, BLOCK, out, 16 * BLOCK, 0)) == HSR_OK);
        for (uint64_t n = 0; n < 3; n++)
            plan_at(plan, n, fault);
        memset(in, 0, 16 * BLOCK);
        CHECK(transfer_status(io, ask(file, false, BLOCK, in, 16 * BLOCK, 0)) == HSR_OK);
        CHECK(memcmp(in, out, 16 * BLOCK) == 0);

        /* Never a whole block, for ever: an end, not a loop. */
        for (uint64_t n = 0; n < 100; n++)
            plan_at(plan, n, (hsri_io_fault){ .limited = true, .limit = 100 });
        hsri_io_done done = transfer(io, ask(file, false, BLOCK, in, BLOCK, 0));
        CHECK(done.status == (hsri_io_is_direct(file) ? HSR_E_FORMAT : HSR_OK));
        hsri_io_close(file);
        end_io(io);
        free(plan);
    }
    free(out);
    free(in);
}

static void test_errors(hsri_io_kind kind)
{
    fault_plan *plan = new_plan();
    hsri_io *io = make_io(kind, plan);
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(8 * BLOCK), *in = new_memory(8 * BLOCK);
    hsri_io_done done[8];
    fill(m, 8 * BLOCK, 4);
    CHECK(transfer_status(io, ask(file, true, 0, m, 8 * BLOCK, 0)) == HSR_OK);

    static const int codes[] = { EIO, ENOSPC, EFBIG, ENOMEM, EINVAL };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        plan_at(plan, 0, (hsri_io_fault){ .error = codes[i] });
        done[0] = transfer(io, ask(file, true, 3 * BLOCK, m + 3 * BLOCK, BLOCK, 0));
        CHECK(done[0].status == HSR_E_IO && done[0].sys_code == codes[i]);
    }
    /* These pass, if they do not last. */
    for (int i = 0; i < 2; i++) {
        for (uint64_t n = 0; n < 3; n++)
            plan_at(plan, n, (hsri_io_fault){ .error = i ? EAGAIN : EINTR });
        CHECK(transfer_status(io, ask(file, false, 0, in, BLOCK, 0)) == HSR_OK);
        for (uint64_t n = 0; n < 50; n++)
            plan_at(plan, n, (hsri_io_fault){ .error = i ? EAGAIN : EINTR });
        done[0] = transfer(io, ask(file, false, 0, in, BLOCK, 0));
        CHECK(done[0].status == HSR_E_IO && done[0].sys_code == (i ? EAGAIN : EINTR));
        memset(plan->set, 0, sizeof plan->set);
    }
    /* Corruption is for checksums to find: here only that the hook does it. */
    plan_at(plan, 0, (hsri_io_fault){ .corrupt = true, .corrupt_at = 4100 });
    CHECK(transfer_status(io, ask(file, false, 0, in, 8 * BLOCK, 0)) == HSR_OK);
    CHECK(in[4100] == (m[4100] ^ 0x10) && (in[4100] = m[4100], memcmp(in, m, 8 * BLOCK) == 0));

    /* An operation for eight requests fails, the fourth of them again when tried alone: it alone has failed. */
    plan_at(plan, 0, (hsri_io_fault){ .error = EIO });
    plan_at(plan, 4, (hsri_io_fault){ .error = EIO });
    hsri_io_request r[8];
    for (uint32_t i = 0; i < 8; i++)
        r[i] = ask(file, false, i * BLOCK, in + i * BLOCK, BLOCK, i);
    memset(in, 0, 8 * BLOCK);
    uint64_t errors = stats_of(io).errors;
    submit(io, r, 8);
    CHECK(collect(io, done, 8));
    for (uint32_t i = 0; i < 8; i++) {
        CHECK(done[i].status == (done[i].tag == 3 ? HSR_E_IO : HSR_OK));
        if (done[i].status == HSR_OK)
            CHECK(memcmp(in + done[i].offset, m + done[i].offset, BLOCK) == 0);
    }
    CHECK(stats_of(io).errors == errors + 1);
    /* A short one first: the requests it satisfied are not done again. */
    plan_at(plan, 0, (hsri_io_fault){ .limited = true, .limit = 5 * BLOCK });
    plan_at(plan, 1, (hsri_io_fault){ .error = EIO });
    uint64_t operations = stats_of(io).operations;
    submit(io, r, 8);
    CHECK(collect(io, done, 8));
    CHECK(stats_of(io).operations == operations + 2 + 3 && stats_of(io).errors == errors + 1);
    hsri_io_close(file);
    end_io(io);
    free(m);
    free(in);
    free(plan);
}

/* A little life of a cold file, in which the n-th operation fails, for every n. */
static bool sweep_once(hsri_io_kind kind, uint64_t n, int error)
{
    fault_plan *plan = new_plan();
    hsri_io *io = make_io(kind, plan);
    plan_at(plan, n, (hsri_io_fault){ .error = error });
    hsr_error err = HSR_ERROR_INIT;
    hsri_io_file *file = NULL;
    hsri_extents *x = NULL;
    uint8_t *m = new_memory(4 * BLOCK);
    uint32_t extent[10], failed = 0, reads_failed = 0;
    hsr_status status = hsri_io_create_file(io, folder, &file, &err);
    failed += status < 0;
    if (file && CHECK(hsri_extents_create(file, 16u << 20, &x, NULL) == HSR_OK && hsri_extents_reserve(x, 10))) {
        for (uint32_t i = 0; i < 10; i++) {
            while ((status = hsri_extents_take(x, &extent[i], &err)) < 0 && failed < 3)
                failed++;
            CHECK(status == HSR_OK);
            uint64_t at = (uint64_t)extent[i] * HSRI_EXTENT_BYTES;
            fill(m, BLOCK, i);
            failed += transfer_status(io, ask(file, true, at, m, BLOCK, 1)) < 0;
            reads_failed = transfer_status(io, ask(file, false, at, m + BLOCK, BLOCK, 2)) < 0;
            failed += reads_failed;
            if (!failed)
                CHECK(memcmp(m, m + BLOCK, BLOCK) == 0);
        }
        for (uint32_t i = 0; i < 10; i++)
            hsri_extents_release(x, extent[i]);
        hsri_extents_stats s;
        hsri_extents_get_stats(x, &s);
        CHECK(s.used == 0 && s.reserved == 0);
    }
    bool hit = plan->n_hit > 0;
    /* A refused punch and a refused O_DIRECT are nobody's failure. */
    CHECK(failed <= 1 && (hit || failed == 0) && (failed || !hit || plan->by_action[HSRI_IO_PUNCH] || plan->n_seen > 1));
    hsri_extents_destroy(x);
    hsri_io_close(file);
    end_io(io);
    free(m);
    free(plan);
    return hit;
}

static void test_sweep(hsri_io_kind kind)
{
    uint64_t n = 0;
    while (sweep_once(kind, n, n % 2 ? EIO : ENOSPC))
        n++;
    CHECK(n > 30 && count_entries(folder) == 0);
}

/* The n-th request for memory is refused, for every n. */
static void test_no_memory(hsri_io_kind kind)
{
    const hsri_io_opts opts = { .kind = kind, .staging_bytes = 1 };
    bool refused = true;
    uint32_t n = 0;
    while (refused && n < 100) {
        hsr_error err = HSR_ERROR_INIT;
        hsri_io *io = NULL;
        hsri_io_file *file = NULL;
        hsri_extents *x = NULL;
        refuse_memory = ++n;
        hsr_status status = hsri_io_create(&opts, &io, &err);
        if (status >= 0)
            status = hsri_io_create_file(io, folder, &file, &err);
        if (status >= 0)
            status = hsri_extents_create(file, 1u << 20, &x, &err);
        refused = refuse_memory == 0;
        refuse_memory = 0;
        CHECK(refused ? status == HSR_E_NOMEM && err.message[0] : status == HSR_OK);
        hsri_extents_destroy(x);
        hsri_io_close(file);
        end_io(io);
    }
    CHECK(n > 8 && n < 100 && count_entries(folder) == 0);
}

/* Somebody cuts the file short: what lies before its end is still read. */
static void test_cut_short(hsri_io_kind kind)
{
    hsri_io *io = make_io(kind, NULL);
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(64 * BLOCK), *expected = new_memory(64 * BLOCK);
    hsri_io_done done[2];
    fill(expected, 64 * BLOCK, 11);
    CHECK(transfer_status(io, ask(file, true, 0, expected, 64 * BLOCK, 1)) == HSR_OK);

    CHECK(ftruncate(file->fd, 32 * BLOCK) == 0);
    const hsri_io_request both[] = { ask(file, false, 31 * BLOCK, m, BLOCK, 1), ask(file, false, 32 * BLOCK, m + BLOCK, BLOCK, 2) };
    submit(io, both, 2);
    CHECK(collect(io, done, 2));
    for (int i = 0; i < 2; i++)
        CHECK(done[i].status == (done[i].tag == 1 ? HSR_OK : HSR_E_FORMAT));
    CHECK(memcmp(m, expected + 31 * BLOCK, BLOCK) == 0);

    /* Behind the last whole block, and behind the end. */
    CHECK(ftruncate(file->fd, 8 * BLOCK + 1904) == 0);
    CHECK(transfer_status(io, ask(file, false, 8 * BLOCK, m, BLOCK, 1)) == HSR_E_FORMAT);
    CHECK(transfer_status(io, ask(file, false, 80 * BLOCK, m, BLOCK, 1)) == HSR_E_FORMAT);
    CHECK(transfer_status(io, ask(file, false, 0, m, 8 * BLOCK, 1)) == HSR_OK && memcmp(m, expected, 8 * BLOCK) == 0);
    hsri_io_close(file);
    end_io(io);
    free(m);
    free(expected);
}

/* ---- extents ---- */

static uint64_t disk_bytes(const hsri_io_file *file)
{
    struct stat st;
    return fstat(file->fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

static void test_extents(hsri_io_kind kind)
{
    enum { N = 100 };
    hsri_io *io = make_io(kind, NULL);
    hsri_io_file *file = make_file(io);
    hsri_extents *x = NULL;
    hsri_extents_stats s;
    hsr_error err = HSR_ERROR_INIT;
    CHECK(hsri_extents_create(file, HSRI_EXTENT_BYTES - 1, &x, &err) == HSR_E_INVALID && x == NULL);
    CHECK(hsri_extents_create(file, UINT64_MAX, &x, &err) == HSR_E_INVALID && x == NULL);
    CHECK(hsri_extents_create(file, N * (uint64_t)HSRI_EXTENT_BYTES + 5, &x, &err) == HSR_OK);
    uint32_t e;
    CHECK(hsri_extents_take(x, &e, &err) == HSR_E_INTERNAL && e == HSRI_NO_EXTENT);
    CHECK(!hsri_extents_reserve(x, N + 1) && hsri_extents_reserve(x, N) && !hsri_extents_reserve(x, 1));
    for (uint32_t i = 0; i < 40; i++)
        CHECK(hsri_extents_take(x, &e, NULL) == HSR_OK && e == i);
    hsri_extents_get_stats(x, &s);
    CHECK(s.total == N && s.used == 40 && s.free == 60 && s.reserved == 60 && s.on_disk == 40 && s.largest_free_run == 60);
    uint64_t size;
    CHECK(hsri_io_size(file, &size, NULL) == HSR_OK && size == 40 * (uint64_t)HSRI_EXTENT_BYTES);
    uint64_t on_disk = disk_bytes(file);
    CHECK(on_disk >= 40 * (uint64_t)HSRI_EXTENT_BYTES);

    /* The lowest comes back first; a few stay on disk, the rest is given back. */
    hsri_extents_release(x, 20);
    hsri_extents_release(x, 3);
    CHECK(hsri_extents_take(x, &e, NULL) == HSR_OK && e == 3);
    for (uint32_t i = 0; i < 40; i++)
        if (i != 20)
            hsri_extents_release(x, i);
    hsri_extents_get_stats(x, &s);
    CHECK(s.used == 0 && s.free == N && s.on_disk == 8 && s.peak_used == 40 && s.largest_free_run == N && s.reserved == 59);
    CHECK(disk_bytes(file) <= on_disk / 4);
    CHECK(hsri_io_size(file, &size, NULL) == HSR_OK && size == 40 * (uint64_t)HSRI_EXTENT_BYTES);
    hsri_extents_unreserve(x, 59);

    /* A page written in an extent that went and came. */
    uint8_t *m = new_memory(2 * BLOCK);
    CHECK(hsri_extents_reserve(x, N));
    for (uint32_t i = 0; i < N; i++)
        CHECK(hsri_extents_take(x, &e, NULL) == HSR_OK && e == i);
    fill(m, BLOCK, 1);
    uint64_t at = 99 * (uint64_t)HSRI_EXTENT_BYTES + 255 * BLOCK;
    CHECK(transfer_status(io, ask(file, true, at, m, BLOCK, 0)) == HSR_OK);
    CHECK(transfer_status(io, ask(file, false, at, m + BLOCK, BLOCK, 0)) == HSR_OK && memcmp(m, m + BLOCK, BLOCK) == 0);
    for (uint32_t i = 0; i < N; i++)
        hsri_extents_release(x, i);
    hsri_extents_destroy(x);
    hsri_io_close(file);
    end_io(io);
    free(m);
}

static void test_extents_random(void)
{
    enum { N = 130 };
    hsri_io *io = make_io(HSRI_IO_PREAD, NULL);
    hsri_io_file *file = make_file(io);
    hsri_extents *x = NULL;
    hsri_extents_stats s;
    bool used[N] = { false };
    uint32_t n_used = 0;
    CHECK(hsri_extents_create(file, N * (uint64_t)HSRI_EXTENT_BYTES, &x, NULL) == HSR_OK);
    for (uint64_t i = 0; i < 1500; i++) {
        uint64_t r = hsri_rng_u64(9, i);
        uint32_t e = (uint32_t)(r >> 8) % N, lowest = 0, run = 0, longest = 0;
        bool grow = i / 300 % 2 == 0 ? r % 4 : !(r % 4);
        if (grow && hsri_extents_reserve(x, 1)) {
            while (used[lowest])
                lowest++;
            CHECK(hsri_extents_take(x, &e, NULL) == HSR_OK && e == lowest);
            used[e] = true;
            n_used++;
        } else if (used[e]) {
            hsri_extents_release(x, e);
            used[e] = false;
            n_used--;
        }
        for (uint32_t k = 0; k < N; k++) {
            run = used[k] ? 0 : run + 1;
            longest = run > longest ? run : longest;
        }
        hsri_extents_get_stats(x, &s);
        CHECK(s.used == n_used && s.free == N - n_used && s.largest_free_run == longest && s.on_disk >= n_used && s.on_disk <= n_used + 8);
    }
    hsri_extents_destroy(x);
    hsri_io_close(file);
    end_io(io);
}

/* ---- limits and full disks ---- */

/* The library must not let the signal of this limit reach its host: nothing is done about it here. */
static void child_size_limit(void *arg)
{
    hsri_io_kind kind = *(hsri_io_kind *)arg;
    hsri_io *io = make_io(kind, NULL);
    hsri_io_file *file = make_file(io), *none;
    hsri_extents *x = NULL;
    hsr_error err = HSR_ERROR_INIT;
    uint32_t e;
    CHECK(hsri_extents_create(file, 64u << 20, &x, NULL) == HSR_OK && hsri_extents_reserve(x, 64));
    struct rlimit limit = { 3u << 20, RLIM_INFINITY };
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    for (int i = 0; i < 3; i++)
        CHECK(hsri_extents_take(x, &e, &err) == HSR_OK);
    CHECK(hsri_extents_take(x, &e, &err) == HSR_E_IO && err.sys_code == EFBIG && strstr(err.message, folder));
    limit.rlim_cur = 100;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    CHECK(hsri_io_create_file(io, folder, &none, &err) == HSR_E_IO && err.sys_code == EFBIG && strstr(err.message, "RLIMIT_FSIZE"));

    /* The limit came after the extents: the writes find out. */
    uint8_t *m = new_memory(BLOCK);
    hsri_io_done done = transfer(io, ask(file, true, BLOCK, m, BLOCK, 0));
    CHECK(done.status == HSR_E_IO && done.sys_code == EFBIG);
    limit.rlim_cur = RLIM_INFINITY;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    CHECK(transfer_status(io, ask(file, true, BLOCK, m, BLOCK, 0)) == HSR_OK);
    CHECK(hsri_extents_take(x, &e, &err) == HSR_OK && e == 3);
    hsri_extents_destroy(x);
    hsri_io_close(file);
    end_io(io);
    free(m);
}

/* A small file system of our own, which only some systems allow. */
static void child_full_disk(void *arg)
{
    hsri_io_kind kind = *(hsri_io_kind *)arg;
    if ((unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount("small", folder, "tmpfs", 0, "size=8m") != 0) {
        fprintf(stderr, "no right to mount: a full disk is not tested\n");
        return;
    }
    hsri_io *io = make_io(kind, NULL);
    hsri_io_file *file = make_file(io);
    hsri_extents *x = NULL;
    hsr_error err = HSR_ERROR_INIT;
    uint32_t e, n = 0;
    CHECK(hsri_extents_create(file, 64u << 20, &x, NULL) == HSR_OK && hsri_extents_reserve(x, 64));
    while (hsri_extents_take(x, &e, &err) == HSR_OK)
        n++;
    CHECK(n >= 6 && n <= 8 && err.status == HSR_E_IO && err.sys_code == ENOSPC && strstr(err.message, folder));
    hsri_extents_stats s;
    hsri_extents_get_stats(x, &s);
    CHECK(s.used == n && s.reserved == 64 - n);

    /* A write where nothing was allocated; then space returns. */
    uint8_t *m = new_memory(64 * BLOCK);
    hsri_io_done done = transfer(io, ask(file, true, 20u << 20, m, 64 * BLOCK, 0));
    bool filled = false;
    for (uint32_t i = 1; i < 64 && !filled; i++)
        filled = (done = transfer(io, ask(file, true, (20u << 20) + i * (1u << 20), m, 64 * BLOCK, 0))).status < 0;
    CHECK(filled && done.status == HSR_E_IO && done.sys_code == ENOSPC);
    CHECK(ftruncate(file->fd, n * (off_t)HSRI_EXTENT_BYTES) == 0);
    hsri_extents_release(x, 0);
    CHECK(hsri_extents_take(x, &e, &err) == HSR_E_INTERNAL || e == 0);
    hsri_extents_destroy(x);
    hsri_io_close(file);
    end_io(io);
    free(m);
}

/* ---- what the ring has registered ---- */

/* Files that rings of this process hold, by what the kernel tells of each; -1: it does not. */
static int count_registered(void)
{
    int n = -1;
    for (int fd = 0; fd < 1024; fd++) {
        char path[64], line[256];
        int files;
        snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
        FILE *info = fopen(path, "re");
        while (info && fgets(line, sizeof line, info))
            if (sscanf(line, "UserFiles: %d", &files) == 1)
                n = (n < 0 ? 0 : n) + files;
        if (info)
            fclose(info);
    }
    return n;
}

static void child_closes(void *file) { hsri_io_close(file); }

/* One file at a time is, and none that was closed: its room on the disk would not come back. A child's closing is no affair of the ring. */
static void test_registered_file(void)
{
    hsri_io *io = make_io(HSRI_IO_URING, NULL);
    hsri_io_file *first = make_file(io), *second = make_file(io);
    uint8_t *m = new_memory(BLOCK);
    if (count_registered() < 0) {
        fprintf(stderr, "this kernel does not tell: registered files are not tested\n");
    } else {
        CHECK(count_registered() == 0);
        CHECK(transfer_status(io, ask(first, true, 0, m, BLOCK, 1)) == HSR_OK && count_registered() == 1);
        CHECK(transfer_status(io, ask(second, true, 0, m, BLOCK, 1)) == HSR_OK && count_registered() == 1);
        in_child(child_closes, first);
        CHECK(transfer_status(io, ask(first, false, 0, m, BLOCK, 1)) == HSR_OK && count_registered() == 1);
        hsri_io_close(first);
        CHECK(count_registered() == 0);
        CHECK(transfer_status(io, ask(second, false, 0, m, BLOCK, 1)) == HSR_OK && count_registered() == 1);
        first = make_file(io);
        submit(io, (hsri_io_request[]){ ask(second, false, 0, m, BLOCK, 1) }, 1);
        hsri_io_close(second);
        hsri_io_done done;
        CHECK(collect(io, &done, 1) && done.retired && count_registered() == 0);
        second = NULL;
    }
    hsri_io_close(first);
    hsri_io_close(second);
    end_io(io);
    free(m);
}

/* ---- io_uring refused ---- */

typedef struct log_lines {
    int  n, level;
    char last[400];
} log_lines;

static void take_line(void *user, int32_t level, const char *text, size_t length)
{
    log_lines *lines = user;
    lines->n++;
    lines->level = level;
    snprintf(lines->last, sizeof lines->last, "%.*s", (int)length, text);
}

static hsri_log *new_log(log_lines *lines)
{
    hsri_log *log = calloc(1, sizeof *log);
    if (!log || hsri_log_init(log, take_line, lines, HSR_LOG_DEBUG, NULL) != HSR_OK)
        abort();
    return log;
}

/* Refuse a system call, or only those that have `flag` in their third argument. */
static bool deny_flag(uint32_t number, uint32_t error, uint32_t flag)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        flag ? (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, flag, 0, 1) : (struct sock_filter)BPF_STMT(BPF_MISC | BPF_TAX, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = { sizeof code / sizeof *code, code };
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

static bool deny(uint32_t number, uint32_t error) { return deny_flag(number, error, 0); }

typedef struct denial {
    uint32_t call, error;
} denial;

static void use_a_little(hsri_io *io)
{
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(2 * BLOCK);
    fill(m, BLOCK, 8);
    CHECK(transfer_status(io, ask(file, true, 0, m, BLOCK, 1)) == HSR_OK);
    CHECK(transfer_status(io, ask(file, false, 0, m + BLOCK, BLOCK, 1)) == HSR_OK && memcmp(m, m + BLOCK, BLOCK) == 0);
    hsri_io_close(file);
    free(m);
}

static void child_denied(void *arg)
{
    const denial *d = arg;
    log_lines lines = { 0 };
    hsri_log *log = new_log(&lines);
    hsri_io_opts opts = { .staging_bytes = 1u << 16, .log = log };
    hsr_error err = HSR_ERROR_INIT;
    hsri_io *io = NULL;
    bool only_register = d->call == SYS_io_uring_register;
    if (!deny(d->call, d->error)) {
        fprintf(stderr, "no seccomp: refused io_uring is not tested\n");
        return;
    }
    CHECK(hsri_io_create(&opts, &io, &err) == HSR_OK);
    CHECK(strcmp(hsri_io_engine_name(io), only_register ? "io_uring" : "pread") == 0);
    CHECK(lines.n == 1 && lines.level == HSR_LOG_INFO && strstr(lines.last, "io_uring"));
    use_a_little(io);
    end_io(io);
    opts.kind = HSRI_IO_URING;
    hsr_status status = hsri_io_create(&opts, &io, &err);
    CHECK(status == (only_register ? HSR_OK : HSR_E_UNSUPPORTED));
    if (status < 0)
        CHECK(io == NULL && err.sys_code == (int)d->error && strstr(err.message, "io_uring"));
    else
        end_io(io);
    hsri_log_destroy(log);
    free(log);
}

/* A file system without O_TMPFILE. */
static void child_no_tmpfile(void *arg)
{
    (void)arg;
    if (!deny_flag(SYS_openat, EOPNOTSUPP, O_TMPFILE & ~O_DIRECTORY))
        return;
    CHECK(open(folder, O_TMPFILE | O_RDWR, 0600) < 0 && errno == EOPNOTSUPP);
    hsri_io *io = make_io(HSRI_IO_PREAD, NULL);
    hsri_io_file *file = make_file(io), *none;
    struct stat st;
    hsr_error err = HSR_ERROR_INIT;
    CHECK(fstat(file->fd, &st) == 0 && st.st_nlink == 0 && (st.st_mode & 07777) == 0600 && (fcntl(file->fd, F_GETFD) & FD_CLOEXEC));
    CHECK(count_entries(folder) == 0);
    use_a_little(io);
    CHECK(hsri_io_create_file(io, "no/such/folder", &none, &err) == HSR_E_IO && err.sys_code == ENOENT);
    hsri_io_close(file);
    end_io(io);
}

/* The host locks itself in while the ring is in use. */
static void child_denied_later(void *arg)
{
    (void)arg;
    hsri_io *io = make_io(HSRI_IO_URING, NULL);
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(8 * BLOCK);
    hsri_io_done done[3];
    CHECK(transfer_status(io, ask(file, true, 0, m, 8 * BLOCK, 1)) == HSR_OK);
    if (!deny(SYS_io_uring_enter, EPERM))
        return;
    for (int round = 0; round < 2; round++) {
        const hsri_io_request r[] = { ask(file, false, 0, m, BLOCK, 1), ask(file, false, 4 * BLOCK, m + 4 * BLOCK, BLOCK, 2) };
        submit(io, r, 2);
        CHECK(collect(io, done, 2));
        for (int i = 0; i < 2; i++)
            CHECK(done[i].status == HSR_E_IO && done[i].sys_code == EPERM && done[i].retired);
    }
    pthread_t thread;
    CHECK(hsri_io_wait(io, done, 1, 20) == 0);
    CHECK(pthread_create(&thread, NULL, wake_later, io) == 0);
    CHECK(hsri_io_wait(io, done, 1, UINT64_MAX) == 0);
    pthread_join(thread, NULL);
    hsri_io_close(file);
    end_io(io);
    free(m);
}

static void child_memlock(void *arg)
{
    hsri_io_kind kind = *(hsri_io_kind *)arg;
    struct rlimit none = { 0, 0 };
    log_lines lines = { 0 };
    hsri_log *log = new_log(&lines);
    CHECK(chmod(folder, 0777) == 0);
    CHECK(setrlimit(RLIMIT_MEMLOCK, &none) == 0);
    if (geteuid() == 0)
        CHECK(setresuid(65534, 65534, 65534) == 0);   /* nobody: without the right to lock more */
    const hsri_io_kind wanted = kind == HSRI_IO_PREAD ? kind : HSRI_IO_AUTO;
    hsri_io *io = make_io_with((hsri_io_opts){ .kind = wanted, .staging_bytes = 8u << 20, .log = log });
    if (kind != HSRI_IO_PREAD)
        CHECK(lines.n == 1 && lines.level == HSR_LOG_INFO && strstr(lines.last, "ulimit"));
    if (access(folder, W_OK) == 0)
        use_a_little(io);
    end_io(io);
    hsri_log_destroy(log);
    free(log);
}

static void test_refused(void)
{
    static const denial denials[] = {
        { SYS_io_uring_setup, EPERM }, { SYS_io_uring_setup, ENOSYS }, { SYS_io_uring_setup, ENOMEM }, { SYS_io_uring_setup, EINVAL },
        { SYS_io_uring_enter, EPERM }, { SYS_io_uring_enter, ENOSYS }, { SYS_io_uring_register, EPERM },
    };
    for (size_t i = 0; i < sizeof denials / sizeof *denials; i++)
        in_child(child_denied, (void *)&denials[i]);
    in_child(child_denied_later, NULL);
}

/* ---- processes ---- */

static void test_kill(hsri_io_kind kind)
{
    int ready[2];
    char byte;
    CHECK(pipe(ready) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        check_failures = 0;
        hsri_io *io = make_io(kind, NULL);
        hsri_io_file *file = make_file(io);
        hsri_extents *x;
        uint32_t e;
        uint8_t *m = new_memory(1u << 20);
        CHECK(hsri_extents_create(file, 64u << 20, &x, NULL) == HSR_OK && hsri_extents_reserve(x, 4));
        for (int i = 0; i < 4; i++)
            CHECK(hsri_extents_take(x, &e, NULL) == HSR_OK && transfer_status(io, ask(file, true, e << 20, m, 1u << 20, 0)) == HSR_OK);
        byte = check_failures == 0;
        if (write(ready[1], &byte, 1) == 1)
            for (;;)
                transfer(io, ask(file, true, 0, m, 1u << 20, 0));
        _exit(1);
    }
    CHECK(read(ready[0], &byte, 1) == 1 && byte == 1);
    usleep(3000);
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
    CHECK(count_entries(folder) == 0);
    close(ready[0]);
    close(ready[1]);
}

/* The child of a host that forks in mid-work: answers at once, breaks nothing. */
static void test_fork(hsri_io_kind kind)
{
    fault_plan *plan = new_plan();
    hsri_io *io = make_io(kind, plan);
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(4 * BLOCK);
    hsri_io_done done[4];
    fill(m, BLOCK, 1);
    CHECK(transfer_status(io, ask(file, true, 0, m, BLOCK, 1)) == HSR_OK);
    plan_at(plan, 0, (hsri_io_fault){ .delay_ms = 20 });
    const hsri_io_request r[] = { ask(file, false, 0, m + BLOCK, BLOCK, 1), ask(file, true, 2 * BLOCK, m, BLOCK, 2) };
    submit(io, r, 2);
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0) {
        uint32_t accepted = 1;
        hsr_error err = HSR_ERROR_INIT;
        hsri_io_file *none;
        check_failures = 0;
        alarm(20);
        CHECK(hsri_io_submit(io, r, 1, &accepted, &err) == HSR_E_FORKED && accepted == 0 && err.message[0]);
        CHECK(hsri_io_wait(io, done, 4, UINT64_MAX) == 0);
        CHECK(hsri_io_create_file(io, folder, &none, &err) == HSR_E_FORKED);
        int n_open = count_entries("/proc/self/fd");
        hsri_io_close(file);
        CHECK(count_entries("/proc/self/fd") == n_open - 1);
        CHECK(hsri_io_destroy(io, FOREVER_MS, &err) == HSR_OK);
#ifndef __SANITIZE_THREAD__   /* which cannot start threads here */
        hsri_io *own = make_io(kind, NULL);
        use_a_little(own);
        end_io(own);
#endif
        _exit(check_failures ? 1 : 0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(collect(io, done, 2) && done[0].status == HSR_OK && done[1].status == HSR_OK);
    CHECK(memcmp(m, m + BLOCK, BLOCK) == 0);
    hsri_io_close(file);
    end_io(io);
    free(m);
    free(plan);
}

static void test_threads(void)
{
    int before = count_threads(1);
    hsri_io *io = make_io_with((hsri_io_opts){ .kind = HSRI_IO_PREAD, .n_threads = 3 });
    hsri_io_file *file = make_file(io);
    uint8_t *m = new_memory(64 * BLOCK);
    hsri_io_request r[32];
    hsri_io_done done[32];
    CHECK(count_threads(before) == before);
    refuse_threads = 1;   /* the first is refused: tried again until one comes */
    CHECK(transfer_status(io, ask(file, true, 0, m, BLOCK, 0)) == HSR_OK && count_threads(before + 1) == before + 1);
    CHECK(refuse_threads == 0);
    for (uint32_t i = 0; i < 32; i++)
        r[i] = ask(file, true, 2 * i * BLOCK, m + 2 * i * BLOCK, BLOCK, i);
    submit(io, r, 32);
    CHECK(collect(io, done, 32) && count_threads(before + 3) <= before + 3);
    hsri_io_close(file);
    end_io(io);
    CHECK(count_threads(before) == before);
    free(m);
}

/* A read whose memory is not there yet and is not brought: the thread hangs in the kernel, for real. */
static void test_stuck_thread(void)
{
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = { .api = UFFD_API };
    uint8_t *m = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register reg = { .range = { (uintptr_t)m, BLOCK }, .mode = UFFDIO_REGISTER_MODE_MISSING };
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api) != 0 || m == MAP_FAILED || ioctl(fd, UFFDIO_REGISTER, &reg) != 0) {
        fprintf(stderr, "no userfaultfd: a thread that hangs is not tested\n");
        return;
    }
    int before = count_threads(1);
    hsri_io *io = make_io_with((hsri_io_opts){ .kind = HSRI_IO_PREAD, .n_threads = 2, .deadline_ms = 30 });
    hsri_io_file *file = make_file(io);
    uint8_t *own = new_memory(BLOCK);
    hsri_io_done done;
    hsr_error err = HSR_ERROR_INIT;
    CHECK(transfer_status(io, ask(file, true, 0, own, BLOCK, 0)) == HSR_OK);
    hsri_io_request r = ask(file, false, 0, m, BLOCK, 5);
    submit(io, &r, 1);
    CHECK(collect(io, &done, 1) && !done.retired && done.sys_code == ETIMEDOUT);
    CHECK(transfer_status(io, ask(file, false, 0, own, BLOCK, 6)) == HSR_OK);   /* the others go on */
    uint64_t start = hsri_now_ns();
    CHECK(hsri_io_destroy(io, 50, &err) == HSR_E_IO && err.message[0] && ms_since(start) < 5000);
    close(fd);   /* the memory comes, the call returns, the thread goes */
    CHECK(count_threads(before) == before);
    munmap(m, BLOCK);
    free(own);
}

/* ---- the whole ---- */

static void test_kind(hsri_io_kind kind)
{
    test_options(kind);
    test_file(kind);
    test_requests(kind);
    for (uint64_t seed = 1; seed <= 2; seed++) {
        test_random(kind, true, 100 * seed);
        test_random(kind, false, 1000 * seed);
    }
    test_coalescing(kind);
    test_staging(kind);
    test_back_pressure(kind);
    test_waiting(kind);
    test_deadline(kind);
    test_close_under_way(kind);
    test_short(kind);
    test_errors(kind);
    test_sweep(kind);
    test_no_memory(kind);
    test_cut_short(kind);
    test_extents(kind);
    test_kill(kind);
    test_fork(kind);
    in_child(child_size_limit, &kind);
    in_child(child_full_disk, &kind);
    in_child(child_memlock, &kind);
}

/* A directory in memory: other file system, other answers about O_DIRECT. */
static void test_in_memory(hsri_io_kind kind)
{
    char usual[sizeof folder];
    strcpy(usual, folder);
    strcpy(folder, "/dev/shm/hsr_test_io_XXXXXX");
    if (mkdtemp(folder)) {
        test_random(kind, true, 5);
        test_extents(kind);
        CHECK(rmdir(folder) == 0);
    }
    strcpy(folder, usual);
}

int main(void)
{
    strcpy(folder, "test_io_XXXXXX");
    if (!CHECK(mkdtemp(folder)))
        return CHECK_REPORT();
    hsri_io *io = NULL;
    have_uring = hsri_io_create(&(hsri_io_opts){ .kind = HSRI_IO_URING }, &io, NULL) == HSR_OK;
    hsri_io_destroy(io, 0, NULL);

    test_kind(HSRI_IO_PREAD);
    test_in_memory(HSRI_IO_PREAD);
    test_extents_random();
    test_threads();
    test_stuck_thread();
    test_stopped();
    in_child(child_no_tmpfile, NULL);
    if (have_uring) {
        test_kind(HSRI_IO_URING);
        test_in_memory(HSRI_IO_URING);
        test_registered_file();
        test_refused();
    } else {
        fprintf(stderr, "no io_uring here: that engine is not tested\n");
        io = make_io_with((hsri_io_opts){ .kind = HSRI_IO_AUTO });
        CHECK(strcmp(hsri_io_engine_name(io), "pread") == 0);
        end_io(io);
    }
    CHECK(rmdir(folder) == 0);
    return CHECK_REPORT();
}
