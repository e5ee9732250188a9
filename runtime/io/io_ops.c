/* SPDX-License-Identifier: Apache-2.0 */
/* From waiting jobs to ops and back: neighbours are joined, short transfers continued, refused ones repeated, and an op that
 * fails for several jobs is taken apart, so that a bad block costs only the job it belongs to. */
#define _GNU_SOURCE 1
#include "io/io_internal.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/array.h"
#include "base/clock.h"

/* How far behind the first waiting job its neighbours are looked for. */
#define NEIGHBOUR_WINDOW 64u
#define MAX_STALLS       16u
#define FIRST_PAUSE_NS   1000000u
#define MAX_PAUSE_SHIFT  6u
#define FLIPPED_BIT      0x10u

/* ---- forming ops ---- */

/* Jobs are taken into an op at either end. */
static void take_job(hsri_op *op, hsri_job *job, bool in_front)
{
    hsri_link_remove(&job->place);
    hsri_link_before(in_front ? op->jobs.next : &op->jobs, &job->place);
    job->state = HSRI_JOB_STARTED;
    op->n_jobs++;
    op->bytes += job->request.bytes;
    if (in_front)
        op->offset = job->request.offset;
}

static bool fits(const hsri_op *op, const hsri_job *job)
{
    return job->request.file == op->file && job->request.write == op->write && !job->alone &&
           op->bytes + job->request.bytes <= HSRI_IO_MAX_BYTES;
}

/* The first waiting job that continues the op at one of its ends. */
static hsri_job *find_neighbour(const hsri_io *io, const hsri_op *op, bool *in_front)
{
    const hsri_link *link = io->waiting.next;
    for (uint32_t i = 0; i < NEIGHBOUR_WINDOW && link != &io->waiting; i++, link = link->next) {
        hsri_job *job = HSRI_MEMBER(link, hsri_job, place);
        if (!fits(op, job))
            continue;
        *in_front = job->request.offset + job->request.bytes == op->offset;
        if (*in_front || job->request.offset == op->offset + op->bytes)
            return job;
    }
    return NULL;
}

static void form(hsri_io *io, hsri_op *op)
{
    hsri_job *job = HSRI_MEMBER(io->waiting.next, hsri_job, place);
    hsri_link_remove(&op->place);
    op->file = job->request.file;
    op->write = job->request.write;
    op->offset = job->request.offset;
    op->bytes = op->done = op->n_jobs = op->stalls = 0;
    op->relaunch = false;
    take_job(op, job, false);
    bool alone = job->alone, in_front;
    while (!alone && op->bytes < HSRI_IO_MAX_BYTES && (job = find_neighbour(io, op, &in_front)))
        take_job(op, job, in_front);
    io->stats.coalesced += op->n_jobs - 1;
    io->stats.waiting -= op->n_jobs;
    if (++io->stats.depth > io->stats.peak_depth)
        io->stats.peak_depth = io->stats.depth;
}

/* Memory of the next call: `most` bytes of what is left at most. Memory that follows on becomes one entry. */
static void fill_iov(hsri_op *op, uint32_t most)
{
    uint32_t skip = op->done, left = (uint32_t)hsri_min(most, op->bytes - op->done);
    op->n_iov = 0;
    for (hsri_link *link = op->jobs.next; left > 0; link = link->next) {
        const hsri_io_request *r = &HSRI_MEMBER(link, hsri_job, place)->request;
        if (skip >= r->bytes) {
            skip -= r->bytes;
            continue;
        }
        char *memory = (char *)r->memory + skip;
        uint32_t n = (uint32_t)hsri_min(r->bytes - skip, left);
        struct iovec *last = op->n_iov ? &op->iov[op->n_iov - 1] : NULL;
        if (last && (char *)last->iov_base + last->iov_len == memory)
            last->iov_len += n;
        else
            op->iov[op->n_iov++] = (struct iovec){ memory, n };
        skip = 0;
        left -= n;
    }
}

/* ---- starting ---- */

static void delay(hsri_io *io, hsri_op *op, uint64_t due_ns)
{
    op->due_ns = due_ns;
    hsri_link_before(&io->delayed, &op->place);
}

static void end_at_once(hsri_io *io, hsri_op *op, int32_t result)
{
    op->result = result;
    hsri_link_before(&io->ended, &op->place);
}

/* The next call of an op. Direct calls stay whole blocks: a limit inside one is applied to the result instead. */
static void launch(hsri_io *io, hsri_op *op)
{
    io->stats.operations++;
    uint32_t most = UINT32_MAX;
    if (io->opts.faults) {
        hsri_io_ask_fault(io, op->write ? HSRI_IO_WRITE : HSRI_IO_READ, &op->fault);
        if (op->fault.error || (op->fault.limited && op->fault.limit == 0)) {
            end_at_once(io, op, -op->fault.error);
            return;
        }
        if (op->fault.limited)
            most = (uint32_t)hsri_round_up(op->fault.limit, HSRI_IO_ALIGN);
    }
    fill_iov(op, most);
    if (op->write && !hsri_io_size_allowed(op->offset + op->bytes))
        end_at_once(io, op, -EFBIG);
    else if (op->fault.delay_ms)
        delay(io, op, op->fault.delay_ms == UINT32_MAX ? UINT64_MAX : hsri_now_ns() + op->fault.delay_ms * UINT64_C(1000000));
    else
        io->engine->start(io->engine, op);
}

void hsri_io_start_waiting(hsri_io *io)
{
    while (!hsri_link_empty(&io->waiting) && !hsri_link_empty(&io->free_ops)) {
        hsri_op *op = HSRI_MEMBER(io->free_ops.next, hsri_op, place);
        form(io, op);
        launch(io, op);
    }
}

void hsri_io_start_due(hsri_io *io, uint64_t now_ns)
{
    for (hsri_link *link = io->delayed.next, *next; link != &io->delayed; link = next) {
        hsri_op *op = HSRI_MEMBER(link, hsri_op, place);
        next = link->next;
        if (op->due_ns > now_ns)
            continue;
        hsri_link_remove(link);
        if (op->relaunch) {
            op->relaunch = false;
            launch(io, op);
        } else {
            io->engine->start(io->engine, op);
        }
    }
}

/* ---- ending ---- */

static void count_read(hsri_io_stats *stats, uint64_t ns)
{
    uint64_t us = ns / 1000;
    uint32_t bucket = us ? 64 - (uint32_t)__builtin_clzll(us) : 0;
    stats->read_latency[hsri_min(bucket, HSRI_IO_BUCKETS - 1)]++;
}

static void count_end(hsri_io *io, const hsri_job *job)
{
    hsri_io_stats *stats = &io->stats;
    if (job->status == HSR_E_CANCELLED) {
        stats->cancelled++;
    } else if (job->status < 0) {
        stats->errors += !job->timed_out;
    } else if (job->request.write) {
        stats->writes++;
        stats->write_bytes += job->request.bytes;
    } else {
        stats->reads++;
        stats->read_bytes += job->request.bytes;
        count_read(stats, hsri_now_ns() - job->since_ns);
    }
}

void hsri_io_end_job(hsri_io *io, hsri_job *job, hsr_status status, int sys_code)
{
    job->state = HSRI_JOB_ENDED;
    job->status = status;
    job->sys_code = sys_code;
    hsri_link_remove(&job->place);
    hsri_link_remove(&job->age);
    hsri_link_remove(&job->report);          /* the time-out was not told yet: the end says more */
    hsri_link_before(&io->reports, &job->report);
    count_end(io, job);
}

/* A job whose op failed for several: first in the queue again, and by itself. One that is given up already ends here. */
static void try_alone(hsri_io *io, hsri_job *job, hsr_status status, int sys_code)
{
    if (job->timed_out || job->request.file->closing) {
        hsri_io_end_job(io, job, status, sys_code);
        return;
    }
    job->alone = true;
    job->state = HSRI_JOB_WAITING;
    hsri_link_remove(&job->place);
    hsri_link_before(io->waiting.next, &job->place);
    io->stats.waiting++;
}

/* The op goes no further: jobs within what was transferred are well, the others have this status. */
static void end_op(hsri_io *io, hsri_op *op, hsr_status status, int sys_code)
{
    uint64_t reached = op->offset + op->done;
    bool shared = op->n_jobs > 1;
    while (!hsri_link_empty(&op->jobs)) {
        hsri_job *job = HSRI_MEMBER(op->jobs.prev, hsri_job, place);
        if (job->request.offset + job->request.bytes <= reached)
            hsri_io_end_job(io, job, HSR_OK, 0);
        else if (shared)
            try_alone(io, job, status, sys_code);
        else
            hsri_io_end_job(io, job, status, sys_code);
    }
    hsri_link_before(&io->free_ops, &op->place);
    io->stats.depth--;
}

/* Nothing came. A file that is at its end stays so; other reasons pass, or are believed after some tries. */
static void stall(hsri_io *io, hsri_op *op)
{
    op->stalls++;
    bool busy = op->result == -EAGAIN;
    if (op->result == 0 || (op->stalls > MAX_STALLS && op->result > 0)) {
        /* For a write this is no known state of a file: the call has no reason to give. */
        end_op(io, op, op->write ? HSR_E_IO : HSR_E_FORMAT, op->write ? EIO : 0);
    } else if (op->stalls > MAX_STALLS) {
        end_op(io, op, HSR_E_IO, -op->result);
    } else if (busy) {
        op->relaunch = true;
        delay(io, op, hsri_now_ns() + ((uint64_t)FIRST_PAUSE_NS << hsri_min(op->stalls - 1, MAX_PAUSE_SHIFT)));
    } else {
        launch(io, op);
    }
}

static void apply_fault(hsri_op *op)
{
    if (op->fault.limited && op->result > (int32_t)op->fault.limit)
        op->result = (int32_t)op->fault.limit;
    if (op->fault.corrupt && !op->write && op->result > 0) {
        uint32_t at = op->fault.corrupt_at % (uint32_t)op->result;
        uint32_t i = 0;
        for (; at >= op->iov[i].iov_len; i++)
            at -= (uint32_t)op->iov[i].iov_len;
        ((uint8_t *)op->iov[i].iov_base)[at] ^= FLIPPED_BIT;
    }
}

static void finish(hsri_io *io, hsri_op *op)
{
    if (io->opts.faults)
        apply_fault(op);
    if (op->result < 0 && op->result != -EINTR && op->result != -EAGAIN) {
        end_op(io, op, HSR_E_IO, -op->result);
        return;
    }
    uint32_t came = op->result > 0 ? (uint32_t)op->result : 0;
    /* The rest of a block cannot be asked for directly: it is transferred again. */
    uint32_t reached = op->done + came;
    if (op->file->direct && reached < op->bytes)
        reached = reached / HSRI_IO_ALIGN * HSRI_IO_ALIGN;
    bool moved = reached > op->done;
    op->done = reached;
    assert(op->done <= op->bytes);
    if (op->done == op->bytes) {
        end_op(io, op, HSR_OK, 0);
    } else if (moved) {
        op->stalls = 0;
        launch(io, op);
    } else {
        stall(io, op);
    }
}

/* What is launched from here may end at once and come back into the list. */
void hsri_io_finish_ended(hsri_io *io)
{
    while (!hsri_link_empty(&io->ended)) {
        hsri_op *op = HSRI_MEMBER(io->ended.next, hsri_op, place);
        hsri_link_remove(&op->place);
        finish(io, op);
    }
}
