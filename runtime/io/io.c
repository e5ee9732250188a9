/* SPDX-License-Identifier: Apache-2.0 */
/* The queue: accepting requests, deadlines, closing, reporting. */
#define _GNU_SOURCE 1
#include "io/io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/status.h"
#include "io/io_internal.h"

#define DEFAULT_DEPTH    64u
#define DEFAULT_THREADS  4u
#define MOST_THREADS     64u
#define MOST_REQUESTS    (1u << 20)
#define IOVS_PER_OP      (HSRI_IO_MAX_BYTES / HSRI_IO_ALIGN)
#define NS_PER_MS        UINT64_C(1000000)

/* ---- creation ---- */

static hsr_status check_opts(const hsri_io_opts *opts, hsr_error *err)
{
    if (opts->kind < HSRI_IO_AUTO || opts->kind > HSRI_IO_PREAD)
        return hsri_fail(err, HSR_E_INVALID, "cold files: no I/O engine has the number %d", (int)opts->kind);
    if (opts->queue_depth > HSRI_IO_MAX_DEPTH)
        return hsri_fail(err, HSR_E_INVALID, "cold files: a queue depth of %u; at most %u is possible", opts->queue_depth,
            HSRI_IO_MAX_DEPTH);
    if (opts->max_requests > MOST_REQUESTS)
        return hsri_fail(err, HSR_E_INVALID, "cold files: %u requests; at most %u are possible", opts->max_requests, MOST_REQUESTS);
    if (opts->n_threads > MOST_THREADS)
        return hsri_fail(err, HSR_E_INVALID, "cold files: %u threads; at most %u are possible", opts->n_threads, MOST_THREADS);
    if (opts->staging_bytes > HSRI_IO_MAX_STAGING)
        return hsri_fail(err, HSR_E_INVALID, "cold files: %zu bytes of staging memory; at most %zu are possible", opts->staging_bytes,
            HSRI_IO_MAX_STAGING);
    return HSR_OK;
}

static void fill_defaults(hsri_io *io, const hsri_io_opts *opts)
{
    io->opts = *opts;
    io->opts.queue_depth = opts->queue_depth ? opts->queue_depth : DEFAULT_DEPTH;
    io->opts.max_requests = opts->max_requests ? opts->max_requests : 4 * io->opts.queue_depth;
    io->opts.n_threads = opts->n_threads ? opts->n_threads : DEFAULT_THREADS;
    io->opts.staging_bytes = hsri_round_up(opts->staging_bytes, HSRI_IO_ALIGN);
    io->opts.log = opts->log ? opts->log : &io->silent;
}

void hsri_io_release(hsri_io *io)
{
    while (!hsri_link_empty(&io->files))
        hsri_io_file_free(HSRI_MEMBER(io->files.next, hsri_io_file, place));
    free(io->staging_memory);
    free(io->jobs);
    free(io->ops);
    free(io->iovs);
    free(io);
}

static void link_all(hsri_io *io)
{
    hsri_link *heads[] = { &io->free_jobs, &io->waiting, &io->by_age, &io->reports, &io->free_ops, &io->delayed, &io->ended };
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        hsri_link_init(heads[i]);
    for (uint32_t i = 0; i < io->opts.max_requests; i++) {
        hsri_link_init(&io->jobs[i].age);
        hsri_link_init(&io->jobs[i].report);
        hsri_link_before(&io->free_jobs, &io->jobs[i].place);
    }
    for (uint32_t i = 0; i < io->opts.queue_depth; i++) {
        hsri_link_init(&io->ops[i].jobs);
        io->ops[i].iov = io->iovs + (size_t)i * IOVS_PER_OP;
        hsri_link_before(&io->free_ops, &io->ops[i].place);
    }
}

static hsr_status allocate(hsri_io *io, hsr_error *err)
{
    const hsri_io_opts *o = &io->opts;
    io->jobs = hsri_new_array(o->max_requests, sizeof *io->jobs);
    io->ops = hsri_new_array(o->queue_depth, sizeof *io->ops);
    io->iovs = hsri_new_array((size_t)o->queue_depth * IOVS_PER_OP, sizeof *io->iovs);
    if (o->staging_bytes) {
        io->staging_memory = hsri_new_array(o->staging_bytes + HSRI_IO_ALIGN, 1);
        io->staging = (void *)(uintptr_t)hsri_round_up((uintptr_t)io->staging_memory, HSRI_IO_ALIGN);
    }
    if (!io->jobs || !io->ops || !io->iovs || (o->staging_bytes && !io->staging_memory))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the request queue of the cold files");
    link_all(io);
    return HSR_OK;
}

static hsr_status choose_engine(hsri_io *io, hsr_error *err)
{
    if (io->opts.kind == HSRI_IO_PREAD)
        return hsri_pread_create(io, &io->engine, err);
    hsr_error why = HSR_ERROR_INIT;
    hsr_status status = hsri_uring_create(io, &io->engine, io->opts.kind == HSRI_IO_URING ? err : &why);
    if (status >= 0 || io->opts.kind == HSRI_IO_URING)
        return status;
    HSRI_TRY(hsri_pread_create(io, &io->engine, err));
    hsri_log_write(io->opts.log, HSR_LOG_INFO, "cold files: %s; %u threads read and write instead", why.message, io->opts.n_threads);
    return HSR_OK;
}

hsr_status hsri_io_create(const hsri_io_opts *opts, hsri_io **out, hsr_error *err)
{
    *out = NULL;
    HSRI_TRY(check_opts(opts, err));
    hsri_io *io = hsri_new_array(1, sizeof *io);
    if (!io)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for cold files");
    fill_defaults(io, opts);
    hsri_link_init(&io->files);
    io->pid = getpid();
    hsr_status status = allocate(io, err);
    if (status >= 0)
        status = choose_engine(io, err);
    if (status < 0) {
        hsri_io_release(io);
        return status;
    }
    *out = io;
    return HSR_OK;
}

const char *hsri_io_engine_name(const hsri_io *io)
{
    return io->engine->name;
}

void *hsri_io_staging(const hsri_io *io)
{
    return io->staging;
}

void hsri_io_ask_fault(hsri_io *io, hsri_io_action action, hsri_io_fault *fault)
{
    *fault = (hsri_io_fault){ 0 };
    if (io->opts.faults)
        io->opts.faults->before(io->opts.faults->user, action, io->n_actions++, fault);
}

int hsri_io_action_error(hsri_io *io, hsri_io_action action)
{
    hsri_io_fault fault;
    hsri_io_ask_fault(io, action, &fault);
    for (uint32_t ms = 0; ms < fault.delay_ms; ms += fault.delay_ms != UINT32_MAX)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    return fault.error;
}

/* ---- accepting ---- */

static hsr_status check_request(const hsri_io *io, const hsri_io_request *r, hsr_error *err)
{
    const uint64_t mask = HSRI_IO_ALIGN - 1;
    if (!r->file || r->file->io != io || r->file->closing)
        return hsri_fail(err, HSR_E_INVALID, "cold files: a request names no open file");
    if (((r->offset | r->bytes | (uintptr_t)r->memory) & mask) || r->bytes == 0 || r->bytes > HSRI_IO_MAX_BYTES || !r->memory ||
        r->offset > INT64_MAX - HSRI_IO_MAX_BYTES)
        return hsri_fail(err, HSR_E_INVALID, "%s: a request for %u bytes at offset %llu with memory at %p; only whole blocks of %u "
            "are possible, 1 MiB at most", r->file->shown, r->bytes, (unsigned long long)r->offset, r->memory, HSRI_IO_ALIGN);
    return HSR_OK;
}

static bool forked(const hsri_io *io)
{
    return getpid() != io->pid;
}

static void accept_one(hsri_io *io, const hsri_io_request *r, uint64_t now)
{
    hsri_job *job = HSRI_MEMBER(io->free_jobs.next, hsri_job, place);
    hsri_link_remove(&job->place);
    job->request = *r;
    job->state = HSRI_JOB_WAITING;
    job->alone = job->timed_out = false;
    job->since_ns = now;
    hsri_link_before(&io->waiting, &job->place);
    hsri_link_before(&io->by_age, &job->age);
    r->file->n_jobs++;
    io->stats.waiting++;
}

hsr_status hsri_io_submit(hsri_io *io, const hsri_io_request *requests, uint32_t n, uint32_t *n_accepted, hsr_error *err)
{
    *n_accepted = 0;
    if (forked(io))
        return hsri_fail(err, HSR_E_FORKED, "cold files opened before fork() cannot be used in the child");
    for (uint32_t i = 0; i < n; i++)
        HSRI_TRY(check_request(io, &requests[i], err));
    uint64_t now = hsri_now_ns();
    while (*n_accepted < n && !hsri_link_empty(&io->free_jobs))
        accept_one(io, &requests[(*n_accepted)++], now);
    hsri_io_start_waiting(io);
    io->engine->collect(io->engine, 0, &io->ended);
    return HSR_OK;
}

/* ---- giving up ---- */

static hsri_job *oldest(const hsri_io *io)
{
    return hsri_link_empty(&io->by_age) ? NULL : HSRI_MEMBER(io->by_age.next, hsri_job, age);
}

/* A job the system works on is only reported: it stays until the system has let go of its memory. */
static void time_out(hsri_io *io, hsri_job *job)
{
    job->timed_out = true;
    io->stats.timeouts++;
    io->stats.errors++;
    if (job->state == HSRI_JOB_WAITING) {
        io->stats.waiting--;
        hsri_io_end_job(io, job, HSR_E_IO, ETIMEDOUT);
        return;
    }
    hsri_link_remove(&job->age);
    hsri_link_before(&io->reports, &job->report);
}

static void time_out_old(hsri_io *io, uint64_t now)
{
    hsri_job *job;
    while (io->opts.deadline_ms && (job = oldest(io)) && now - job->since_ns >= io->opts.deadline_ms * NS_PER_MS)
        time_out(io, job);
}

/* End the waiting jobs of a file. */
static void cancel_waiting(hsri_io *io, const hsri_io_file *file)
{
    for (hsri_link *link = io->waiting.next, *next; link != &io->waiting; link = next) {
        hsri_job *job = HSRI_MEMBER(link, hsri_job, place);
        next = link->next;
        if (job->request.file != file)
            continue;
        io->stats.waiting--;
        hsri_io_end_job(io, job, HSR_E_CANCELLED, 0);
    }
}

static void close_idle(hsri_io_file *file)
{
    hsri_io_engine *engine = file->io->engine;
    if (engine->forget)
        engine->forget(engine, file);
    hsri_io_file_free(file);
}

void hsri_io_close(hsri_io_file *file)
{
    if (!file)
        return;
    if (forked(file->io)) {
        hsri_io_file_free(file);    /* what the engine knows of it is the parent's */
        return;
    }
    cancel_waiting(file->io, file);
    if (file->n_jobs > 0)
        file->closing = true;
    else
        close_idle(file);
}

/* ---- reporting ---- */

/* The last report of a job gives its place, and perhaps its file, back. */
static void retire(hsri_io *io, hsri_job *job)
{
    hsri_io_file *file = job->request.file;
    job->state = HSRI_JOB_FREE;
    hsri_link_before(&io->free_jobs, &job->place);
    if (--file->n_jobs == 0 && file->closing)
        close_idle(file);
}

static uint32_t report(hsri_io *io, hsri_io_done *done, uint32_t max)
{
    uint32_t n = 0;
    for (; n < max && !hsri_link_empty(&io->reports); n++) {
        hsri_job *job = HSRI_MEMBER(io->reports.next, hsri_job, report);
        const hsri_io_request *r = &job->request;
        bool retired = job->state == HSRI_JOB_ENDED;
        hsri_link_remove(&job->report);
        done[n] = (hsri_io_done){
            .tag = r->tag, .status = retired ? job->status : HSR_E_IO, .sys_code = retired ? job->sys_code : ETIMEDOUT, .retired = retired,
            .write = r->write, .bytes = r->bytes, .offset = r->offset, .file = r->file->closing ? NULL : r->file,
        };
        if (retired)
            retire(io, job);
    }
    return n;
}

/* Time until something happens without the system's doing: a deadline, the end of a delay, the caller's own patience. */
static uint64_t sleep_ns(const hsri_io *io, uint64_t now, uint64_t until)
{
    const hsri_job *job = oldest(io);
    if (job && io->opts.deadline_ms)
        until = hsri_min(until, hsri_min(job->since_ns + io->opts.deadline_ms * NS_PER_MS, now + HSRI_WATCH_NS));
    for (const hsri_link *link = io->delayed.next; link != &io->delayed; link = link->next)
        until = hsri_min(until, HSRI_MEMBER(link, hsri_op, place)->due_ns);
    if (until == UINT64_MAX)
        return HSRI_IO_FOREVER;
    return until > now ? until - now : 0;
}

/* Everything that can be done now, without sleeping. */
static void advance(hsri_io *io, uint64_t now)
{
    hsri_io_finish_ended(io);
    time_out_old(io, now);
    hsri_io_start_due(io, now);
    hsri_io_start_waiting(io);
}

/* Sleep in the engine. Requests do not grow older while the process is stopped. */
static void collect(hsri_io *io, uint64_t now, uint64_t sleep)
{
    io->engine->collect(io->engine, sleep, &io->ended);
    const uint64_t stopped = hsri_stopped_ns(now, sleep);
    for (hsri_link *link = io->by_age.next; stopped > 0 && link != &io->by_age; link = link->next)
        HSRI_MEMBER(link, hsri_job, age)->since_ns += stopped;
}

uint32_t hsri_io_wait(hsri_io *io, hsri_io_done *done, uint32_t max, uint64_t timeout_ms)
{
    if (forked(io) || max == 0)
        return 0;
    uint64_t now = hsri_now_ns();
    uint64_t until = timeout_ms >= (UINT64_MAX - now) / NS_PER_MS ? UINT64_MAX : now + timeout_ms * NS_PER_MS;
    for (;; now = hsri_now_ns()) {
        advance(io, now);
        bool stay = hsri_link_empty(&io->reports) && hsri_link_empty(&io->ended) && !atomic_load(&io->woken) && now < until;
        collect(io, now, stay ? sleep_ns(io, now, until) : 0);
        if (!hsri_link_empty(&io->ended)) {
            advance(io, now);
            io->engine->collect(io->engine, 0, &io->ended);   /* the caller may be busy for a while: let the system start */
        }
        uint32_t n = report(io, done, max);
        if (atomic_exchange(&io->woken, false) || n || now >= until)
            return n;
    }
}

void hsri_io_wake(hsri_io *io)
{
    atomic_store(&io->woken, true);
    io->engine->wake(io->engine);
}

/* ---- the end ---- */

/* Ops that the system still holds when the time is up. */
static uint32_t settle(hsri_io *io, uint64_t wait_ms)
{
    uint64_t until = hsri_now_ns() + hsri_min(wait_ms, UINT64_MAX / 4 / NS_PER_MS) * NS_PER_MS;
    for (hsri_link *link; (link = io->delayed.next) != &io->delayed; ) {
        hsri_op *op = HSRI_MEMBER(link, hsri_op, place);
        hsri_link_remove(link);
        op->result = -ECANCELED;
        hsri_link_before(&io->ended, link);
    }
    for (uint64_t now; ; ) {
        /* Nothing is continued: an op that came back is done with. */
        while (!hsri_link_empty(&io->ended)) {
            hsri_link *link = io->ended.next;
            hsri_link_remove(link);
            hsri_link_before(&io->free_ops, link);
            io->stats.depth--;
        }
        if (io->stats.depth == 0 || (now = hsri_now_ns()) >= until)
            return io->stats.depth;
        io->engine->collect(io->engine, until - now, &io->ended);
    }
}

hsr_status hsri_io_destroy(hsri_io *io, uint64_t wait_ms, hsr_error *err)
{
    if (!io || forked(io))
        return HSR_OK;
    uint32_t n_stuck = settle(io, wait_ms);
    io->engine->destroy(io->engine, io, n_stuck);
    if (n_stuck)
        return hsri_fail(err, HSR_E_IO, "cold files: %u operations did not end within %llu ms", n_stuck, (unsigned long long)wait_ms);
    return HSR_OK;
}

void hsri_io_get_stats(const hsri_io *io, hsri_io_stats *stats)
{
    *stats = io->stats;
}
