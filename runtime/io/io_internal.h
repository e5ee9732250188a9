/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of io/ share. A job is an accepted request; an op is one call to the system that serves one job or several
 * neighbours; an engine carries ops out. Jobs and ops are arrays made with the io and move between lists. */
#ifndef HSRI_IO_INTERNAL_H
#define HSRI_IO_INTERNAL_H

#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "io/io.h"

/* ---- lists ---- */

/* A ring of links through the members; the head is a link of its own. A member that is in no list points to itself. */
typedef struct hsri_link {
    struct hsri_link *prev, *next;
} hsri_link;

#define HSRI_MEMBER(link, type, field) ((type *)((char *)(link) - offsetof(type, field)))

static inline void hsri_link_init(hsri_link *link) { link->prev = link->next = link; }
static inline bool hsri_link_empty(const hsri_link *head) { return head->next == head; }

/* Put a link before `at`: with a head, at the end of its list. */
static inline void hsri_link_before(hsri_link *at, hsri_link *link)
{
    link->prev = at->prev;
    link->next = at;
    at->prev->next = link;
    at->prev = link;
}

static inline void hsri_link_remove(hsri_link *link)
{
    link->prev->next = link->next;
    link->next->prev = link->prev;
    hsri_link_init(link);
}

/* ---- jobs and ops ---- */

typedef enum hsri_job_state { HSRI_JOB_FREE, HSRI_JOB_WAITING, HSRI_JOB_STARTED, HSRI_JOB_ENDED } hsri_job_state;

typedef struct hsri_job {
    hsri_io_request request;
    hsri_job_state  state;
    bool            alone;                   /* once shared an op that failed: is tried by itself */
    bool            timed_out;
    hsr_status      status;
    int32_t         sys_code;
    uint64_t        since_ns;
    hsri_link       place;                   /* in io->free_jobs, io->waiting or op->jobs */
    hsri_link       age;                     /* in io->by_age: not ended and not timed out */
    hsri_link       report;                  /* in io->reports: has something to tell the caller */
} hsri_job;

typedef struct hsri_op {
    hsri_link       place;                   /* in io->free_ops, io->delayed or a list of the engine */
    hsri_link       jobs;                    /* in the order of the file */
    uint32_t        n_jobs;
    hsri_io_file   *file;
    bool            write;
    bool            relaunch;                /* delayed to be tried again, not by a fault */
    uint64_t        offset;
    uint32_t        bytes, done;             /* the whole; how much of it has been transferred */
    uint32_t        stalls;                  /* calls in a row that brought nothing */
    uint64_t        due_ns;                  /* of a delayed op */
    hsri_io_fault   fault;
    struct iovec   *iov;                     /* what the present call is to transfer, from offset + done */
    uint32_t        n_iov;
    int32_t         result;                  /* set by the engine: bytes, or a negative errno */
} hsri_op;

/* ---- engines ---- */

typedef struct hsri_io_engine hsri_io_engine;
struct hsri_io_engine {
    const char *name;
    /* Take an op over. What cannot be started ends with a result like any other. */
    void (*start)(hsri_io_engine *engine, hsri_op *op);
    /* Tell the system about started ops and append those that ended to `ended`, sleeping up to timeout_ns for one if there
     * is none (HSRI_IO_FOREVER: until one ends or the engine is woken). May return early. */
    void (*collect)(hsri_io_engine *engine, uint64_t timeout_ns, hsri_link *ended);
    void (*wake)(hsri_io_engine *engine);
    /* A file without ops is about to be closed. NULL: the engine keeps nothing of files. */
    void (*forget)(hsri_io_engine *engine, const hsri_io_file *file);
    /* End, with n_stuck ops not collected, and call hsri_io_release as soon as nothing uses ops and files any more. */
    void (*destroy)(hsri_io_engine *engine, hsri_io *io, uint32_t n_stuck);
};

hsr_status hsri_uring_create(const hsri_io *io, hsri_io_engine **engine, hsr_error *err);
hsr_status hsri_pread_create(const hsri_io *io, hsri_io_engine **engine, hsr_error *err);

/* ---- the io and its files ---- */

struct hsri_io_file {
    hsri_io  *io;
    hsri_link place;                         /* in io->files */
    int       fd;
    bool      direct, closing;
    uint32_t  n_jobs;                        /* accepted and not reported as retired */
    char      shown[160];                    /* what messages call it */
};

struct hsri_io {
    hsri_io_opts    opts;                    /* defaults filled in */
    hsri_io_engine *engine;
    pid_t           pid;
    hsri_log        silent;
    void           *staging_memory;
    void           *staging;
    hsri_link       files;
    hsri_job       *jobs;
    hsri_op        *ops;
    struct iovec   *iovs;
    hsri_link       free_jobs, waiting, by_age, reports;
    hsri_link       free_ops, delayed, ended;
    uint64_t        n_actions;               /* index of the next operation, for faults */
    atomic_bool     woken;
    hsri_io_stats   stats;
};

/* Ask the fault hook about one operation; *fault is all zero without one. */
void hsri_io_ask_fault(hsri_io *io, hsri_io_action action, hsri_io_fault *fault);

/* The errno with which an operation that is no read or write is to fail, 0 for none. */
int hsri_io_action_error(hsri_io *io, hsri_io_action action);

/* Free the memory and the files that are left, the engine being gone. */
void hsri_io_release(hsri_io *io);

/* Close the descriptor and forget the file. */
void hsri_io_file_free(hsri_io_file *file);

/* May this process write so far into a file? Asked each time, since the kernel's own answer is a signal that kills. */
bool hsri_io_size_allowed(uint64_t bytes);

/* ---- ops (io_ops.c) ---- */

/* Start waiting jobs while there are free ops. */
void hsri_io_start_waiting(hsri_io *io);
/* Start or repeat delayed ops whose time has come. */
void hsri_io_start_due(hsri_io *io, uint64_t now_ns);
/* Deal with the ops in io->ended: finish their jobs or go on with them. */
void hsri_io_finish_ended(hsri_io *io);
/* Give a job its end and queue the report. */
void hsri_io_end_job(hsri_io *io, hsri_job *job, hsr_status status, int sys_code);

#endif
