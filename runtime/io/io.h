/* SPDX-License-Identifier: Apache-2.0 */
/* Cold files: asynchronous reads and writes of page slots, by io_uring or by a few threads that call preadv and pwritev.
 *
 * A request is accepted (hsri_io_submit), waits, is started together with its neighbours, and ends as a completion
 * (hsri_io_wait). From acceptance until the completion with `retired` its memory and its file range belong to the io.
 * Requests are not ordered: a range is read only after the write of it has retired, and written by one request at a time.
 *
 * Threads: an hsri_io with its files is used by one thread at a time; only hsri_io_wake may be called from any thread.
 * In a child after fork() hsri_io_submit answers HSR_E_FORKED, hsri_io_wait reports nothing and hsri_io_destroy touches
 * nothing, since rings and threads are the parent's; hsri_io_close gives the child's own descriptor back. */
#ifndef HSRI_IO_H
#define HSRI_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/log.h"
#include "hisparse_rt/hisparse_rt.h"

#define HSRI_IO_ALIGN       4096u            /* of offsets, sizes and memory of requests */
#define HSRI_IO_MAX_BYTES   (1u << 20)       /* of one request, and of neighbours that are joined to one operation */
#define HSRI_IO_MAX_STAGING ((size_t)16 << 20)
#define HSRI_IO_MAX_DEPTH   1024u
#define HSRI_IO_FOREVER     UINT64_MAX

typedef struct hsri_io hsri_io;
typedef struct hsri_io_file hsri_io_file;

/* ---- faults, for tests ---- */

typedef enum hsri_io_action {
    HSRI_IO_READ, HSRI_IO_WRITE,             /* one operation: neighbouring requests joined, or the rest after a short one */
    HSRI_IO_OPEN, HSRI_IO_ALLOCATE, HSRI_IO_PUNCH,
    HSRI_IO_DIRECT                           /* going past the page cache: an error only makes the file a buffered one */
} hsri_io_action;

/* What is to go wrong; all zero: nothing. `limited` and `corrupt` are for reads and writes only. */
typedef struct hsri_io_fault {
    int32_t  error;                          /* errno: the call is not made and fails so */
    uint32_t delay_ms;                       /* the operation hangs for this time; UINT32_MAX: until hsri_io_destroy,
                                                or, not a read or write, for good */
    bool     limited;                        /* a short operation of at most `limit` bytes; 0 looks like the end of the file */
    uint32_t limit;
    bool     corrupt;                        /* flip a bit of byte `corrupt_at` (modulo size) after the read */
    uint32_t corrupt_at;
} hsri_io_fault;

/* Called before each operation, on the thread that uses the io. index counts the operations of the io from 0. */
typedef struct hsri_io_faults {
    void (*before)(void *user, hsri_io_action action, uint64_t index, hsri_io_fault *fault);
    void  *user;
} hsri_io_faults;

/* ---- the io ---- */

typedef enum hsri_io_kind {
    HSRI_IO_AUTO,                            /* io_uring where the build, the kernel and the sandbox have it, else threads */
    HSRI_IO_URING,                           /* io_uring or an error */
    HSRI_IO_PREAD                            /* threads */
} hsri_io_kind;

typedef struct hsri_io_opts {
    hsri_io_kind          kind;
    uint32_t              queue_depth;       /* operations under way in the system at a time, 1 to HSRI_IO_MAX_DEPTH; 0: 64 */
    uint32_t              max_requests;      /* requests accepted and not retired; 0: 4 * queue_depth */
    uint32_t              n_threads;         /* of the thread engine, started as they are needed; 0: 4 */
    uint32_t              deadline_ms;       /* age at which a request is reported as timed out; 0: never */
    size_t                staging_bytes;     /* of memory that is registered with the kernel if it allows, see hsri_io_staging */
    hsri_log             *log;               /* NULL: silent */
    const hsri_io_faults *faults;            /* NULL outside of tests */
} hsri_io_opts;

/* HSR_E_UNSUPPORTED or HSR_E_IO if io_uring was demanded and is refused; HSR_E_NOMEM; HSR_E_INVALID. */
hsr_status hsri_io_create(const hsri_io_opts *opts, hsri_io **io, hsr_error *err);

/* Close every file that is still open, drop what waits and give what is under way wait_ms to end. HSR_E_IO if some of it did
 * not: the io is gone all the same, but the system may still write into the memory of those requests, which must therefore
 * stay mapped and unused; with the thread engine the threads concerned, and so this library, must stay as well. NULL accepted. */
hsr_status hsri_io_destroy(hsri_io *io, uint64_t wait_ms, hsr_error *err);

/* "io_uring" or "pread". */
const char *hsri_io_engine_name(const hsri_io *io);

/* Memory of opts.staging_bytes (rounded up to pages), aligned, for any use by the owner of the io; NULL if it was 0. Requests
 * whose memory lies here save the kernel a look-up where registering was allowed. */
void *hsri_io_staging(const hsri_io *io);

/* ---- files ---- */

/* A file without a name in the directory: readable by nobody else, gone with its last descriptor, kill -9 included. Empty;
 * hsri_extents makes room in it. Direct access (past the page cache) is used if a real write and read prove that it works.
 * HSR_E_IO names the directory. */
hsr_status hsri_io_create_file(hsri_io *io, const char *directory, hsri_io_file **file, hsr_error *err);

/* Requests that have not started end as HSR_E_CANCELLED; the descriptor is closed when the last one has retired. The handle
 * is invalid after the call, in later completions too (their `file` is NULL). NULL accepted. */
void hsri_io_close(hsri_io_file *file);

bool hsri_io_is_direct(const hsri_io_file *file);
hsr_status hsri_io_size(const hsri_io_file *file, uint64_t *bytes, hsr_error *err);

/* ---- requests ---- */

typedef struct hsri_io_request {
    hsri_io_file *file;
    uint64_t      offset;
    void         *memory;
    uint32_t      bytes;                     /* HSRI_IO_ALIGN to HSRI_IO_MAX_BYTES */
    bool          write;
    uint64_t      tag;                       /* the caller's; comes back in the completion */
} hsri_io_request;

/* One request gets exactly one completion with `retired`, its last. At most one comes before it: when its deadline passes while
 * the system works on it (HSR_E_IO, sys_code ETIMEDOUT, not retired). The retired one then tells how it really ended.
 *
 * status: HSR_OK: all bytes are there; HSR_E_IO: sys_code is errno; HSR_E_FORMAT: the file ends before the bytes asked for;
 * HSR_E_CANCELLED: its file was closed before it started. When a read fails, its memory holds anything. */
typedef struct hsri_io_done {
    uint64_t      tag;
    hsr_status    status;
    int32_t       sys_code;
    bool          retired;
    bool          write;
    uint32_t      bytes;
    uint64_t      offset;
    hsri_io_file *file;
} hsri_io_done;

/* Accept requests from the front of the array until one finds the queue full; *n_accepted tells how many, also when it is 0. They
 * are started before the call returns as far as queue_depth allows; it never waits for one to end. HSR_E_INVALID (a request
 * that is not aligned, a file that was closed) and HSR_E_FORKED accept nothing. */
hsr_status hsri_io_submit(hsri_io *io, const hsri_io_request *requests, uint32_t n, uint32_t *n_accepted, hsr_error *err);

/* Up to `max` completions, in any order; returns how many. With none to report it sleeps until there is one, hsri_io_wake is
 * called, or timeout_ms have passed (0: does not sleep). Also what starts the waiting requests: call it while any exist. */
uint32_t hsri_io_wait(hsri_io *io, hsri_io_done *done, uint32_t max, uint64_t timeout_ms);

/* Make the present or else the next hsri_io_wait return at once. Any thread, while the io exists. */
void hsri_io_wake(hsri_io *io);

/* ---- statistics ---- */

#define HSRI_IO_BUCKETS 32u

typedef struct hsri_io_stats {
    uint64_t reads, writes;                  /* requests that ended well */
    uint64_t read_bytes, write_bytes;
    uint64_t operations;                     /* given to the system, continued and repeated ones included */
    uint64_t coalesced;                      /* requests that shared an operation with one before them */
    uint64_t errors;                         /* requests that failed, timed out ones included, cancelled ones not */
    uint64_t timeouts;
    uint64_t cancelled;
    uint32_t depth, peak_depth;              /* operations under way */
    uint32_t waiting;                        /* requests accepted and not started */
    uint64_t read_latency[HSRI_IO_BUCKETS];  /* reads by time from acceptance to end: bucket i counts 2^(i-1) to 2^i microseconds */
} hsri_io_stats;

void hsri_io_get_stats(const hsri_io *io, hsri_io_stats *stats);

#endif
