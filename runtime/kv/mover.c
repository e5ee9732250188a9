/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "kv/mover.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "io/extents.h"

#define DEFAULT_MOVES    4096u
#define DEFAULT_STAGING  (4u << 20)
#define NONE             UINT32_MAX
#define BATCH            64u
#define END_WAITS        10u       /* the end is waited for in so many pieces: time in which the process is stopped counts as one */
#define NO_EXTENT        0u        /* places hold extent + 1 */

typedef enum job_state { JOB_FREE, JOB_QUEUED, JOB_RUNNING, JOB_ENDED } job_state;

typedef struct job {
    hsri_moved result;              /* the move, and later its end */
    job_state  state;
    uint8_t    priority;
    bool       late;                /* its deadline has passed, and that was reported */
    bool       listed;              /* in `ended` */
    uint32_t   next, prev;          /* in its list */
    uint32_t   staging;             /* piece of staging memory of a running write */
} job;

typedef struct list {
    uint32_t first, last;
} list;

struct hsri_mover {
    hsri_mover_opts opts;
    pthread_t       thread;
    bool            started;

    /* Under the lock. */
    pthread_mutex_t lock;
    pthread_cond_t  news;           /* something ended */
    job            *jobs;
    list            free, queued[HSRI_N_MOVE_PRIORITIES], ended;
    uint32_t        n_queued, n_running, n_alive, peak_queued;
    bool            stop;
    uint64_t        calls;          /* to make room on disk, or give it back, which have no deadline; odd: the thread is inside one */
    bool            abandoned;      /* it was for too long: the owner is gone, with the memory of moves, and all else is the thread's */
    bool            ended_itself;   /* the thread is behind its last use of the lock */
    bool            sleeping;       /* the thread has seen everything that is queued, and waits for news */
    hsri_mover_stats stats;

    /* The thread's own. */
    hsri_io        *io;
    hsri_io_file   *file;
    hsri_extents   *extents;
    uint32_t       *places;         /* of each extent of the owner: extent of the file + 1, or NO_EXTENT */
    uint8_t        *staging;
    uint32_t        staging_bytes;
    uint64_t       *staging_used;   /* bit per 4096 bytes */
    uint64_t        start_ns;
    uint64_t        bad_pages;
};

/* ---- lists ---- */

static void list_append(hsri_mover *m, list *l, uint32_t id)
{
    job *j = &m->jobs[id];
    j->next = NONE;
    j->prev = l->last;
    if (l->last == NONE)
        l->first = id;
    else
        m->jobs[l->last].next = id;
    l->last = id;
}

static void list_remove(hsri_mover *m, list *l, uint32_t id)
{
    job *j = &m->jobs[id];
    if (j->prev == NONE)
        l->first = j->next;
    else
        m->jobs[j->prev].next = j->next;
    if (j->next == NONE)
        l->last = j->prev;
    else
        m->jobs[j->next].prev = j->prev;
}

/* ---- ends (lock held) ---- */

/* Let the owner know. One that has not collected the passed deadline yet learns of the end instead. */
static void report(hsri_mover *m, uint32_t id)
{
    if (!m->jobs[id].listed)
        list_append(m, &m->ended, id);
    m->jobs[id].listed = true;
    pthread_cond_signal(&m->news);
}

static void end_job(hsri_mover *m, uint32_t id, hsr_status status, int32_t sys_code)
{
    job *j = &m->jobs[id];
    j->result.status = status;
    j->result.sys_code = sys_code;
    j->result.retired = true;
    j->state = JOB_ENDED;
    report(m, id);
}

/* The deadline has passed: tell once, without ending. */
static void report_late(hsri_mover *m, uint32_t id)
{
    job *j = &m->jobs[id];
    if (j->late)
        return;
    j->late = true;
    j->result.status = HSR_E_IO;
    j->result.sys_code = ETIMEDOUT;
    j->result.retired = false;
    report(m, id);
}

static void cancel_queued(hsri_mover *m, uint32_t id)
{
    list_remove(m, &m->queued[m->jobs[id].priority], id);
    m->n_queued--;
    end_job(m, id, HSR_E_CANCELLED, 0);
}

/* ---- staging (the thread's) ---- */

static bool staging_free(const hsri_mover *m, uint32_t first, uint32_t n)
{
    for (uint32_t i = first; i < first + n; i++)
        if (m->staging_used[i / 64] >> i % 64 & 1)
            return false;
    return true;
}

static void staging_mark(hsri_mover *m, uint32_t first, uint32_t n, bool used)
{
    for (uint32_t i = first; i < first + n; i++)
        m->staging_used[i / 64] = used ? m->staging_used[i / 64] | 1ull << i % 64 : m->staging_used[i / 64] & ~(1ull << i % 64);
}

/* First piece of n * 4096 bytes that is free, or NONE. Pieces of one size never straddle each other's grid. */
static uint32_t staging_take(hsri_mover *m, uint32_t bytes)
{
    uint32_t n = bytes / HSRI_IO_ALIGN, total = m->staging_bytes / HSRI_IO_ALIGN;
    for (uint32_t first = 0; first + n <= total; first += n)
        if (staging_free(m, first, n)) {
            staging_mark(m, first, n, true);
            return first;
        }
    return NONE;
}

static void staging_give(hsri_mover *m, job *j)
{
    if (j->staging != NONE)
        staging_mark(m, j->staging, j->result.move.slot_bytes / HSRI_IO_ALIGN, false);
    j->staging = NONE;
}

/* ---- pages ---- */

static uint32_t checksum(const uint8_t *slot, uint32_t page_bytes)
{
    const size_t skip = offsetof(hsri_page_header, crc32c) + sizeof(uint32_t);
    return hsri_crc32c(0, slot + skip, page_bytes - skip);
}

static bool page_is_right(const hsri_move *move)
{
    hsri_page_header header;
    memcpy(&header, move->memory, sizeof header);
    return header.magic == HSRI_PAGE_MAGIC && header.lineage == move->lineage && header.page == move->page && header.layer == move->layer &&
           header.head == move->head && header.crc32c == checksum(move->memory, move->page_bytes);
}

/* The page with its checksum, and nothing of what the slot held before behind it. */
static uint8_t *stage(hsri_mover *m, job *j)
{
    const hsri_move *move = &j->result.move;
    uint8_t *copy = m->staging + (size_t)j->staging * HSRI_IO_ALIGN;
    memcpy(copy, move->memory, move->page_bytes);
    memset(copy + move->page_bytes, 0, move->slot_bytes - move->page_bytes);
    uint32_t crc = checksum(copy, move->page_bytes);
    memcpy(copy + offsetof(hsri_page_header, crc32c), &crc, sizeof crc);
    return copy;
}

/* ---- starting jobs (the thread's, without the lock) ---- */

static hsr_status place_extent(hsri_mover *m, uint32_t extent, hsr_error *err)
{
    uint32_t place;
    if (!hsri_extents_reserve(m->extents, 1))
        return hsri_fail(err, HSR_E_INTERNAL, "more extents are in use than the cold file has");
    hsr_status status = hsri_extents_take(m->extents, &place, err);
    if (status < 0) {
        hsri_extents_unreserve(m->extents, 1);
        return status;
    }
    m->places[extent] = place + 1;
    return HSR_OK;
}

static void free_extent(hsri_mover *m, uint32_t extent)
{
    hsri_extents_release(m->extents, m->places[extent] - 1);
    m->places[extent] = NO_EXTENT;
}

static void enter_call(hsri_mover *m)
{
    pthread_mutex_lock(&m->lock);
    m->calls++;
    pthread_mutex_unlock(&m->lock);
}

/* Is the owner still there? */
static bool leave_call(hsri_mover *m)
{
    pthread_mutex_lock(&m->lock);
    m->calls++;
    const bool there = !m->abandoned;
    pthread_mutex_unlock(&m->lock);
    return there;
}

/* The part of a job that changes how much room the file has; HSR_E_CANCELLED: the owner is gone. */
static hsr_status change_room(hsri_mover *m, const hsri_move *move, hsr_error *err)
{
    const bool free = move->kind == HSRI_MOVE_FREE;
    hsr_status status = HSR_OK;
    if (free ? m->places[move->extent] == NO_EXTENT : move->kind != HSRI_MOVE_WRITE || m->places[move->extent] != NO_EXTENT)
        return HSR_OK;
    enter_call(m);
    if (free)
        free_extent(m, move->extent);
    else
        status = place_extent(m, move->extent, err);
    return leave_call(m) ? status : HSR_E_CANCELLED;
}

/* Make a request of a job, or its end. */
static bool make_request(hsri_mover *m, uint32_t id, hsri_io_request *request, hsr_status *status, int32_t *sys_code)
{
    job *j = &m->jobs[id];
    const hsri_move *move = &j->result.move;
    hsr_error err = HSR_ERROR_INIT;
    *sys_code = 0;
    *status = change_room(m, move, &err);
    *sys_code = err.sys_code;
    if (*status < 0 || move->kind == HSRI_MOVE_FREE)
        return false;
    *request = (hsri_io_request){
        .file = m->file, .offset = (uint64_t)(m->places[move->extent] - 1) * HSRI_EXTENT_BYTES + move->offset, .bytes = move->slot_bytes,
        .write = move->kind == HSRI_MOVE_WRITE, .tag = id, .memory = move->kind == HSRI_MOVE_WRITE ? stage(m, j) : move->memory,
    };
    return true;
}

/* The next job by priority that can start; a write needs staging memory. Lock held. */
static uint32_t next_job(hsri_mover *m)
{
    if (m->n_running >= m->opts.io.max_requests)
        return NONE;
    for (int p = 0; p < HSRI_N_MOVE_PRIORITIES; p++) {
        uint32_t id = m->queued[p].first;
        if (id == NONE)
            continue;
        job *j = &m->jobs[id];
        j->staging = NONE;
        if (j->result.move.kind == HSRI_MOVE_WRITE && (j->staging = staging_take(m, j->result.move.slot_bytes)) == NONE)
            continue;
        list_remove(m, &m->queued[p], id);
        m->n_queued--;
        m->n_running++;
        j->state = JOB_RUNNING;
        return id;
    }
    return NONE;
}

/* Lock held. */
static void finish(hsri_mover *m, uint32_t id, hsr_status status, int32_t sys_code)
{
    staging_give(m, &m->jobs[id]);
    m->n_running--;
    end_job(m, id, status, sys_code);
}

static uint32_t take_batch(hsri_mover *m, uint32_t *ids)
{
    uint32_t n = 0, id;
    while (n < BATCH && (id = next_job(m)) != NONE)
        ids[n++] = id;
    return n;
}

/* Start what is queued. Lock held at entry and exit. */
static void start_jobs(hsri_mover *m)
{
    uint32_t ids[BATCH], n;
    while (!m->stop && (n = take_batch(m, ids)) > 0) {
        hsri_io_request requests[BATCH];
        hsr_status status[BATCH];
        int32_t sys_code[BATCH];
        uint32_t n_requests = 0, accepted = 0;
        pthread_mutex_unlock(&m->lock);
        for (uint32_t i = 0; i < n; i++)
            if (make_request(m, ids[i], &requests[n_requests], &status[i], &sys_code[i])) {
                status[i] = HSR_AGAIN;
                n_requests++;
            } else if (status[i] == HSR_E_CANCELLED) {     /* memory of these moves may be gone */
                pthread_mutex_lock(&m->lock);
                return;
            }
        hsr_status submitted = n_requests ? hsri_io_submit(m->io, requests, n_requests, &accepted, NULL) : HSR_OK;
        pthread_mutex_lock(&m->lock);
        for (uint32_t i = 0, r = 0; i < n; i++) {
            if (status[i] != HSR_AGAIN)
                finish(m, ids[i], status[i], sys_code[i]);
            else if (r++ >= accepted)
                finish(m, ids[i], submitted < 0 ? submitted : HSR_E_INTERNAL, 0);
        }
    }
}

/* ---- completions ---- */

static void take_completion(hsri_mover *m, const hsri_io_done *done)
{
    uint32_t id = (uint32_t)done->tag;
    if (!done->retired) {
        report_late(m, id);
        return;
    }
    hsr_status status = done->status;
    if (status == HSR_OK && m->jobs[id].result.move.kind == HSRI_MOVE_READ) {
        pthread_mutex_unlock(&m->lock);
        bool right = page_is_right(&m->jobs[id].result.move);
        pthread_mutex_lock(&m->lock);
        status = right ? HSR_OK : HSR_E_FORMAT;
        m->bad_pages += !right;
    }
    finish(m, id, status, done->sys_code);
}

static uint64_t thread_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void publish(hsri_mover *m)
{
    hsri_extents_stats extents;
    hsri_extents_get_stats(m->extents, &extents);
    hsri_io_get_stats(m->io, &m->stats.io);
    m->stats.cpu_ns = thread_cpu_ns();
    m->stats.bad_pages = m->bad_pages;
    m->stats.extents_on_disk = extents.on_disk;
}

static void cancel_all(hsri_mover *m)
{
    for (int p = 0; p < HSRI_N_MOVE_PRIORITIES; p++)
        while (m->queued[p].first != NONE)
            cancel_queued(m, m->queued[p].first);
}

static void *run(void *arg)
{
    hsri_mover *m = arg;
    pthread_mutex_lock(&m->lock);
    while (!m->stop) {
        hsri_io_done done[BATCH];
        start_jobs(m);
        if (m->abandoned)
            break;
        publish(m);
        m->sleeping = true;
        pthread_mutex_unlock(&m->lock);
        uint32_t n = hsri_io_wait(m->io, done, BATCH, HSRI_IO_FOREVER);
        pthread_mutex_lock(&m->lock);
        m->sleeping = false;
        for (uint32_t i = 0; i < n; i++)
            take_completion(m, &done[i]);
    }
    if (!m->abandoned)
        cancel_all(m);
    m->ended_itself = true;
    pthread_cond_signal(&m->news);
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

/* ---- creation ---- */

static void release(hsri_mover *m)
{
    hsri_extents_destroy(m->extents);
    pthread_cond_destroy(&m->news);
    pthread_mutex_destroy(&m->lock);
    free(m->jobs);
    free(m->places);
    free(m->staging_used);
    free(m);
}

static hsr_status allocate(hsri_mover *m, hsr_error *err)
{
    uint64_t n_extents = m->opts.bytes / HSRI_EXTENT_BYTES;
    m->jobs = hsri_new_array(m->opts.max_moves, sizeof *m->jobs);
    m->places = hsri_new_array(n_extents, sizeof *m->places);
    m->staging_used = hsri_new_array(hsri_div_up(m->staging_bytes / HSRI_IO_ALIGN, 64), sizeof *m->staging_used);
    if (!m->jobs || !m->places || !m->staging_used)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the tables of %llu MiB of cold file", (unsigned long long)n_extents);
    m->free = m->ended = (list){ NONE, NONE };
    for (int p = 0; p < HSRI_N_MOVE_PRIORITIES; p++)
        m->queued[p] = (list){ NONE, NONE };
    for (uint32_t id = 0; id < m->opts.max_moves; id++)
        list_append(m, &m->free, id);
    return HSR_OK;
}

static hsr_status open_io(hsri_mover *m, hsr_error *err)
{
    HSRI_TRY(hsri_io_create(&m->opts.io, &m->io, err));
    m->staging = hsri_io_staging(m->io);
    strncpy(m->stats.engine, hsri_io_engine_name(m->io), sizeof m->stats.engine - 1);
    HSRI_TRY(hsri_io_create_file(m->io, m->opts.directory, &m->file, err));
    return hsri_extents_create(m->file, m->opts.bytes, &m->extents, err);
}

static hsr_status start_thread(hsri_mover *m, hsr_error *err)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    m->start_ns = hsri_now_ns();
    int refused = pthread_create(&m->thread, NULL, run, m);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (refused)
        return hsri_fail_sys(err, HSR_E_NOMEM, refused, "the mover's thread cannot be started");
    pthread_setname_np(m->thread, "hsr-mover");
    m->started = true;
    return HSR_OK;
}

hsr_status hsri_mover_create(const hsri_mover_opts *opts, hsri_mover **out, hsr_error *err)
{
    *out = NULL;
    hsri_mover *m = hsri_new_array(1, sizeof *m);
    if (!m)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the mover");
    m->opts = *opts;
    m->opts.max_moves = opts->max_moves ? opts->max_moves : DEFAULT_MOVES;
    m->opts.io.staging_bytes = opts->io.staging_bytes ? opts->io.staging_bytes : DEFAULT_STAGING;
    m->opts.io.queue_depth = opts->io.queue_depth ? opts->io.queue_depth : 64;
    m->opts.io.max_requests = opts->io.max_requests ? opts->io.max_requests : 4 * m->opts.io.queue_depth;
    m->staging_bytes = (uint32_t)(m->opts.io.staging_bytes / HSRI_IO_ALIGN * HSRI_IO_ALIGN);
    pthread_mutex_init(&m->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&m->news, &monotonic);
    pthread_condattr_destroy(&monotonic);

    hsr_status status = allocate(m, err);
    if (status == HSR_OK)
        status = open_io(m, err);
    if (status == HSR_OK)
        status = start_thread(m, err);
    if (status < 0) {
        hsri_mover_destroy(m, 0, NULL);
        return status;
    }
    *out = m;
    return HSR_OK;
}

static struct timespec after_ms(uint64_t ms)
{
    uint64_t ns = hsri_now_ns() + ms * 1000000u;
    return (struct timespec){ .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };
}

/* False: it hangs in a call that nothing ends, and is left alone with all of the mover; the system may end it at any time. */
static bool end_thread(hsri_mover *m, uint64_t wait_ms)
{
    uint64_t call = 0;
    pthread_mutex_lock(&m->lock);
    m->stop = true;
    pthread_mutex_unlock(&m->lock);
    hsri_io_wake(m->io);
    pthread_mutex_lock(&m->lock);
    for (uint32_t waits = 0; !m->ended_itself && waits < END_WAITS; waits = m->calls % 2 && m->calls == call ? waits + 1 : 0) {
        const struct timespec until = after_ms(hsri_div_up(wait_ms, END_WAITS));
        call = m->calls;
        pthread_cond_timedwait(&m->news, &m->lock, &until);
    }
    const bool hangs = m->abandoned = !m->ended_itself;
    pthread_mutex_unlock(&m->lock);
    if (hangs)
        pthread_detach(m->thread);
    else
        pthread_join(m->thread, NULL);
    return !hangs;
}

hsr_status hsri_mover_destroy(hsri_mover *m, uint64_t wait_ms, hsr_error *err)
{
    hsr_status status = HSR_OK;
    if (!m)
        return status;
    if (m->started && !end_thread(m, wait_ms))
        return hsri_fail(err, HSR_E_IO, "cold files: a change of the file's size did not end within %llu ms", (unsigned long long)wait_ms);
    if (m->io)
        status = hsri_io_destroy(m->io, wait_ms, err);
    release(m);
    return status;
}

/* ---- the owner's calls ---- */

/* Unlock, and wake the thread if it has not been woken since it fell asleep. */
static void unlock_and_wake(hsri_mover *m)
{
    bool wake = m->sleeping;
    m->sleeping = false;
    pthread_mutex_unlock(&m->lock);
    if (wake)
        hsri_io_wake(m->io);
}

uint32_t hsri_mover_submit(hsri_mover *m, const hsri_move *move, hsri_move_priority priority)
{
    pthread_mutex_lock(&m->lock);
    uint32_t id = m->free.first;
    if (id != NONE) {
        list_remove(m, &m->free, id);
        m->jobs[id] = (job){ .result = { .move = *move, .id = id }, .state = JOB_QUEUED, .priority = (uint8_t)priority, .staging = NONE };
        list_append(m, &m->queued[priority], id);
        m->n_alive++;
        m->n_queued++;
        m->peak_queued = (uint32_t)hsri_max(m->peak_queued, m->n_queued);
    }
    unlock_and_wake(m);
    return id == NONE ? HSRI_NO_MOVE : id;
}

static void raise_job(hsri_mover *m, uint32_t id, hsri_move_priority priority)
{
    job *j = &m->jobs[id];
    if (j->state != JOB_QUEUED || priority >= j->priority)
        return;
    list_remove(m, &m->queued[j->priority], id);
    j->priority = (uint8_t)priority;
    list_append(m, &m->queued[priority], id);
}

void hsri_mover_raise(hsri_mover *m, uint32_t id, hsri_move_priority priority)
{
    pthread_mutex_lock(&m->lock);
    raise_job(m, id, priority);
    pthread_mutex_unlock(&m->lock);
}

void hsri_mover_raise_writes(hsri_mover *m)
{
    pthread_mutex_lock(&m->lock);
    for (uint32_t id = m->queued[HSRI_MOVE_BACKGROUND].first, next; id != NONE; id = next) {
        next = m->jobs[id].next;
        if (m->jobs[id].result.move.kind == HSRI_MOVE_WRITE)
            raise_job(m, id, HSRI_MOVE_DEMAND);
    }
    pthread_mutex_unlock(&m->lock);
}

void hsri_mover_cancel(hsri_mover *m, uint32_t id)
{
    pthread_mutex_lock(&m->lock);
    if (m->jobs[id].state == JOB_QUEUED)
        cancel_queued(m, id);
    pthread_mutex_unlock(&m->lock);
}

uint32_t hsri_mover_collect(hsri_mover *m, hsri_moved *moved, uint32_t max, uint64_t timeout_ms)
{
    uint32_t n = 0;
    pthread_mutex_lock(&m->lock);
    if (m->ended.first == NONE && timeout_ms > 0 && m->n_alive > 0) {
        struct timespec until = after_ms(timeout_ms);
        while (m->ended.first == NONE && m->n_alive > 0 && pthread_cond_timedwait(&m->news, &m->lock, &until) == 0)
            continue;
    }
    while (n < max && m->ended.first != NONE) {
        uint32_t id = m->ended.first;
        list_remove(m, &m->ended, id);
        m->jobs[id].listed = false;
        moved[n++] = m->jobs[id].result;
        if (m->jobs[id].state == JOB_ENDED) {
            m->jobs[id].state = JOB_FREE;
            m->n_alive--;
            list_append(m, &m->free, id);
        }
    }
    pthread_mutex_unlock(&m->lock);
    return n;
}

void hsri_mover_get_stats(hsri_mover *m, hsri_mover_stats *stats)
{
    pthread_mutex_lock(&m->lock);
    *stats = m->stats;
    stats->queued = m->n_queued;
    stats->running = m->n_running;
    stats->peak_queued = m->peak_queued;
    stats->wall_ns = hsri_now_ns() - m->start_ns;
    pthread_mutex_unlock(&m->lock);
}
