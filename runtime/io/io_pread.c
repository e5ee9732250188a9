/* SPDX-License-Identifier: Apache-2.0 */
/* The thread engine: a few threads that call preadv and pwritev, started one by one as ops find no idle one. One op is one call.
 * A thread that hangs in a call when the io goes away is left to itself, with all it uses: the last of these cleans up. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "base/array.h"
#include "base/status.h"
#include "io/io_internal.h"

#define NS_PER_S UINT64_C(1000000000)

typedef struct pread_engine pread_engine;

typedef struct io_thread {
    pread_engine *engine;
    pthread_t     thread;
    bool          in_call;
} io_thread;

struct pread_engine {
    hsri_io_engine  base;
    pthread_mutex_t lock;
    pthread_cond_t  work, news;              /* for the threads; for the caller */
    hsri_link       queue, ended;
    uint32_t        n_queued, n_idle;
    uint32_t        n_threads, most_threads;
    uint32_t        n_left;                  /* threads that have outlived hsri_io_destroy */
    hsri_io        *io;                      /* theirs to release */
    bool            stop, woken;
    io_thread      *threads;
};

/* ---- the threads ---- */

static int32_t call(int fd, bool write, const struct iovec *iov, int n_iov, off_t offset)
{
    ssize_t n;
    do
        n = write ? pwritev(fd, iov, n_iov, offset) : preadv(fd, iov, n_iov, offset);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : (int32_t)n;
}

static void engine_free(pread_engine *e)
{
    pthread_cond_destroy(&e->news);
    pthread_cond_destroy(&e->work);
    pthread_mutex_destroy(&e->lock);
    free(e->threads);
    free(e);
}

/* The lock is held on entry and on return. */
static void run_one(pread_engine *e, io_thread *self)
{
    hsri_op *op = HSRI_MEMBER(e->queue.next, hsri_op, place);
    hsri_link_remove(&op->place);
    e->n_queued--;
    self->in_call = true;
    pthread_mutex_unlock(&e->lock);
    int32_t result = call(op->file->fd, op->write, op->iov, (int)op->n_iov, (off_t)(op->offset + op->done));
    pthread_mutex_lock(&e->lock);
    self->in_call = false;
    if (e->stop)
        return;   /* came back too late: the op is gone */
    op->result = result;
    hsri_link_before(&e->ended, &op->place);
    pthread_cond_signal(&e->news);
}

static void *thread_main(void *arg)
{
    io_thread *self = arg;
    pread_engine *e = self->engine;
    pthread_setname_np(pthread_self(), "hsr-io");
    pthread_mutex_lock(&e->lock);
    while (!e->stop) {
        if (!hsri_link_empty(&e->queue)) {
            run_one(e, self);
            continue;
        }
        e->n_idle++;
        pthread_cond_wait(&e->work, &e->lock);
        e->n_idle--;
    }
    bool last = e->n_left > 0 && --e->n_left == 0;
    pthread_mutex_unlock(&e->lock);
    if (last) {
        hsri_io *io = e->io;
        engine_free(e);
        hsri_io_release(io);
    }
    return NULL;
}

/* Signals are the host's; SIGXFSZ, too, which a write can raise. Faults stay deliverable, for its crash handler. */
static int start_thread(pread_engine *e)
{
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT };
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&all, faults[i]);
    io_thread *t = &e->threads[e->n_threads];
    t->engine = e;
    int rc = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc)
        return rc;
    rc = pthread_create(&t->thread, NULL, thread_main, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    e->n_threads += rc == 0;
    return rc;
}

/* ---- the engine ---- */

static void pread_start(hsri_io_engine *base, hsri_op *op)
{
    pread_engine *e = (pread_engine *)base;
    pthread_mutex_lock(&e->lock);
    int rc = e->n_queued >= e->n_idle && e->n_threads < e->most_threads ? start_thread(e) : 0;
    if (rc && e->n_threads == 0) {
        op->result = -rc;
        hsri_link_before(&e->ended, &op->place);
    } else {
        hsri_link_before(&e->queue, &op->place);
        e->n_queued++;
        pthread_cond_signal(&e->work);
    }
    pthread_mutex_unlock(&e->lock);
}

static void wait_for_news(pread_engine *e, uint64_t timeout_ns)
{
    struct timespec until;
    if (timeout_ns == HSRI_IO_FOREVER) {
        pthread_cond_wait(&e->news, &e->lock);
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + timeout_ns % NS_PER_S;
    until.tv_sec += (time_t)(hsri_min(timeout_ns / NS_PER_S, INT32_MAX) + ns / NS_PER_S);
    until.tv_nsec = (long)(ns % NS_PER_S);
    pthread_cond_timedwait(&e->news, &e->lock, &until);
}

static void pread_collect(hsri_io_engine *base, uint64_t timeout_ns, hsri_link *ended)
{
    pread_engine *e = (pread_engine *)base;
    pthread_mutex_lock(&e->lock);
    if (timeout_ns > 0 && hsri_link_empty(&e->ended) && !e->woken)
        wait_for_news(e, timeout_ns);
    if (timeout_ns > 0)
        e->woken = false;
    while (!hsri_link_empty(&e->ended)) {
        hsri_link *link = e->ended.next;
        hsri_link_remove(link);
        hsri_link_before(ended, link);
    }
    pthread_mutex_unlock(&e->lock);
}

static void pread_wake(hsri_io_engine *base)
{
    pread_engine *e = (pread_engine *)base;
    pthread_mutex_lock(&e->lock);
    e->woken = true;
    pthread_cond_signal(&e->news);
    pthread_mutex_unlock(&e->lock);
}

/* Threads in a call with a stuck op may never return. Then none is waited for: each goes when it can. */
static void pread_destroy(hsri_io_engine *base, hsri_io *io, uint32_t n_stuck)
{
    pread_engine *e = (pread_engine *)base;
    bool leave = false;
    pthread_mutex_lock(&e->lock);
    e->stop = true;
    for (uint32_t i = 0; n_stuck > 0 && i < e->n_threads; i++)
        leave |= e->threads[i].in_call;
    e->n_left = leave ? e->n_threads : 0;
    e->io = io;
    for (uint32_t i = 0; leave && i < e->n_threads; i++)
        pthread_detach(e->threads[i].thread);
    pthread_cond_broadcast(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (leave)
        return;
    for (uint32_t i = 0; i < e->n_threads; i++)
        pthread_join(e->threads[i].thread, NULL);
    engine_free(e);
    hsri_io_release(io);
}

/* One by one, since what was made has to be undone if the next is refused. */
static int make_locks(pread_engine *e)
{
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);
    if (rc)
        return rc;
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    rc = pthread_mutex_init(&e->lock, NULL);
    if (!rc && (rc = pthread_cond_init(&e->work, NULL)))
        pthread_mutex_destroy(&e->lock);
    if (!rc && (rc = pthread_cond_init(&e->news, &attr))) {
        pthread_cond_destroy(&e->work);
        pthread_mutex_destroy(&e->lock);
    }
    pthread_condattr_destroy(&attr);
    return rc;
}

hsr_status hsri_pread_create(const hsri_io *io, hsri_io_engine **out, hsr_error *err)
{
    pread_engine *e = hsri_new_array(1, sizeof *e);
    io_thread *threads = hsri_new_array(io->opts.n_threads, sizeof *threads);
    int rc = e && threads ? make_locks(e) : ENOMEM;
    if (rc) {
        free(e);
        free(threads);
        return hsri_fail_sys(err, HSR_E_NOMEM, rc, "cannot make the I/O threads of the cold files");
    }
    e->base = (hsri_io_engine){
        .name = "pread", .start = pread_start, .collect = pread_collect, .wake = pread_wake, .destroy = pread_destroy,
    };
    e->threads = threads;
    e->most_threads = io->opts.n_threads;
    hsri_link_init(&e->queue);
    hsri_link_init(&e->ended);
    *out = &e->base;
    return HSR_OK;
}
