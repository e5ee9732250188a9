/* SPDX-License-Identifier: Apache-2.0 */
/* How a loop runs. The caller writes down fn, arg and n_tasks, then sets `left` to n_tasks, which opens the loop. Every
 * thread claims tasks by decrementing `left`; a positive old value is a claim. A claim holds the loop open, since the
 * caller does not return before `done` has counted all tasks, so what it wrote down may be read after a claim and never
 * without one. A worker that is late, even by several loops, therefore either claims a task of the loop open now or gets
 * nothing, and nobody has to wait for it. */
#define _GNU_SOURCE 1
#include "base/threads.h"

#include <linux/futex.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/status.h"

#define MOST_THREADS 1024
/* Longer than the serial gaps between the loops of one step, shorter than anyone's patience with idle spinning. */
#define SPIN_NS      30000u
#define LINE         64

typedef struct worker {
    hsri_threads *threads;
    pthread_t     thread;
    uint32_t      index;
} worker;

struct hsri_threads {
    /* Fixed after creation. */
    worker  *workers;     /* n_threads - 1 */
    int32_t  n_threads;
    uint32_t spin_ns;     /* 0: sleep at once, as spinning threads would keep working ones from running */

    /* Written by the caller while no loop is open. */
    _Alignas(LINE) void (*fn)(void *arg, uint32_t task, uint32_t worker);
    void    *arg;
    uint32_t n_tasks;

    _Alignas(LINE) _Atomic int64_t left;       /* tasks not claimed; below zero once idle threads have tried */
    _Alignas(LINE) _Atomic uint32_t done;      /* tasks finished; futex of the caller */
    _Atomic bool caller_sleeps;
    _Alignas(LINE) _Atomic uint32_t round;     /* changes when there is news for workers; their futex */
    _Atomic bool stop;
    _Alignas(LINE) _Atomic uint32_t n_sleeping; /* workers asleep or about to be */
};

static void cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, uint32_t n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Wait a short time for *word to differ from (or, with `reach`, to equal) value. False: time is up. */
static bool spin(const _Atomic uint32_t *word, uint32_t value, bool reach, uint32_t spin_ns)
{
    uint64_t start = 0;
    for (uint32_t i = 0;; i++) {
        if ((atomic_load_explicit(word, memory_order_acquire) == value) == reach)
            return true;
        if (!spin_ns)
            return false;
        cpu_pause();
        if (i % 32 == 0) {
            uint64_t now = hsri_now_ns();
            if (!start)
                start = now;
            else if (now - start > spin_ns)
                return false;
        }
    }
}

/* Run tasks until none is left to claim. */
static void run_tasks(hsri_threads *threads, uint32_t index)
{
    int64_t left = atomic_fetch_sub_explicit(&threads->left, 1, memory_order_acquire);
    if (left <= 0)
        return;
    void (*fn)(void *, uint32_t, uint32_t) = threads->fn;
    void *arg = threads->arg;
    uint32_t n_tasks = threads->n_tasks, n_run = 0;
    for (; left > 0; n_run++) {
        fn(arg, (uint32_t)(n_tasks - left), index);
        left = atomic_fetch_sub_explicit(&threads->left, 1, memory_order_acquire);
    }
    /* Tasks run but not counted hold the loop open, so all of them were of one loop. After the count the caller may go. */
    uint32_t before = atomic_fetch_add(&threads->done, n_run);
    if (before + n_run == n_tasks && atomic_load(&threads->caller_sleeps))
        futex_wake(&threads->done, 1);
}

/* Either this thread sees the new round, or open_loop sees it in n_sleeping: both sides write first and read after. */
static void wait_for_news(hsri_threads *threads, uint32_t seen)
{
    if (spin(&threads->round, seen, false, threads->spin_ns))
        return;
    atomic_fetch_add(&threads->n_sleeping, 1);
    while (atomic_load(&threads->round) == seen)
        futex_wait(&threads->round, seen);
    atomic_fetch_sub(&threads->n_sleeping, 1);
}

static void announce(hsri_threads *threads, uint32_t n_wanted)
{
    atomic_fetch_add(&threads->round, 1);
    if (atomic_load(&threads->n_sleeping))
        futex_wake(&threads->round, n_wanted);
}

static void wait_until_done(hsri_threads *threads, uint32_t n_tasks)
{
    if (spin(&threads->done, n_tasks, true, threads->spin_ns))
        return;
    atomic_store(&threads->caller_sleeps, true);
    for (uint32_t done; (done = atomic_load(&threads->done)) != n_tasks; )
        futex_wait(&threads->done, done);
    atomic_store(&threads->caller_sleeps, false);
}

static void *worker_main(void *arg)
{
    worker *self = arg;
    hsri_threads *threads = self->threads;
    pthread_setname_np(pthread_self(), "hsr-worker");
    fesetenv(FE_DFL_ENV);   /* not the rounding of the thread that created the engine */
    while (!atomic_load_explicit(&threads->stop, memory_order_acquire)) {
        /* Before the work, so that a loop opened during it is news. */
        uint32_t seen = atomic_load_explicit(&threads->round, memory_order_acquire);
        run_tasks(threads, self->index);
        if (!atomic_load_explicit(&threads->stop, memory_order_acquire))
            wait_for_news(threads, seen);
    }
    return NULL;
}

/* Start workers until one is refused; returns how many run and the refusal in *rc. They inherit the signal mask, so all
 * signals are blocked for the moment of starting and stay so in the workers: the host's handlers run on its threads. */
static int32_t start_workers(hsri_threads *threads, int *rc)
{
    sigset_t all, before;
    int32_t n = 0;
    /* Faults stay deliverable: a host's crash handler must hear of them on our threads, too. */
    sigfillset(&all);
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&all, faults[i]);
    *rc = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (*rc)
        return 0;
    for (; n < threads->n_threads - 1; n++) {
        worker *w = &threads->workers[n];
        w->threads = threads;
        w->index = (uint32_t)n + 1;
        *rc = pthread_create(&w->thread, NULL, worker_main, w);
        if (*rc)
            break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return n;
}

static void stop_workers(hsri_threads *threads, int32_t n_started)
{
    atomic_store(&threads->stop, true);
    announce(threads, MOST_THREADS);
    for (int32_t i = 0; i < n_started; i++)
        pthread_join(threads->workers[i].thread, NULL);
}

hsr_status hsri_threads_create(int32_t n_threads, hsri_threads **threads, hsr_error *err)
{
    *threads = NULL;
    if (n_threads < 1 || n_threads > MOST_THREADS)
        return hsri_fail(err, HSR_E_INVALID, "n_threads is %d, must be 1 to %d", n_threads, MOST_THREADS);
    hsri_threads *pool = hsri_new_aligned(1, sizeof(*pool));
    worker *workers = hsri_new_array((size_t)n_threads - 1, sizeof(*workers));
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a pool of %d threads", n_threads);
    }
    pool->workers = workers;
    pool->n_threads = n_threads;
    pool->spin_ns = n_threads > 1 && n_threads <= hsri_cpu_count() ? SPIN_NS : 0;
    int rc = 0;
    int32_t n_started = n_threads > 1 ? start_workers(pool, &rc) : 0;
    if (rc) {
        stop_workers(pool, n_started);
        hsri_threads_forget(pool);
        return hsri_fail_sys(err, HSR_E_NOMEM, rc, "cannot start compute thread %d of %d", n_started + 2, n_threads);
    }
    *threads = pool;
    return HSR_OK;
}

void hsri_threads_destroy(hsri_threads *threads)
{
    if (!threads)
        return;
    stop_workers(threads, threads->n_threads - 1);
    hsri_threads_forget(threads);
}

void hsri_threads_forget(hsri_threads *threads)
{
    if (!threads)
        return;
    free(threads->workers);
    free(threads);
}

int32_t hsri_threads_count(const hsri_threads *threads)
{
    return threads->n_threads;
}

void hsri_parallel(hsri_threads *threads, uint32_t n_tasks, void (*fn)(void *arg, uint32_t task, uint32_t worker), void *arg)
{
    if (n_tasks <= 1 || threads->n_threads == 1) {
        for (uint32_t task = 0; task < n_tasks; task++)
            fn(arg, task, 0);
        return;
    }
    threads->fn = fn;
    threads->arg = arg;
    threads->n_tasks = n_tasks;
    atomic_store_explicit(&threads->done, 0, memory_order_relaxed);
    atomic_store_explicit(&threads->left, n_tasks, memory_order_release);
    announce(threads, n_tasks - 1);
    run_tasks(threads, 0);
    wait_until_done(threads, n_tasks);
}
