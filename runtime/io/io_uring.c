/* SPDX-License-Identifier: Apache-2.0 */
/* The io_uring engine: one ring, used by whoever uses the io. Everything it needs is tried when it is made, a real entry into
 * the kernel included, since sandboxes refuse io_uring's three system calls one by one. */
#define _GNU_SOURCE 1
#include <errno.h>

#include "base/status.h"
#include "io/io_internal.h"

#ifndef HSRI_HAVE_IO_URING

hsr_status hsri_uring_create(const hsri_io *io, hsri_io_engine **out, hsr_error *err)
{
    (void)io;
    *out = NULL;
    return hsri_fail(err, HSR_E_UNSUPPORTED, "this build has no io_uring");
}

#else

#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/array.h"
#include "base/fd.h"

#define SPARE_ENTRIES 2u     /* beside ops: the watch of the wake descriptor, a time-out of liburing's on old kernels */
#define NS_PER_S      UINT64_C(1000000000)

typedef struct uring_engine {
    hsri_io_engine  base;
    struct io_uring ring;
    int             wake_fd;
    int             dead;                    /* errno of a refusal that will not pass; 0: the ring works */
    bool            woken;
    hsri_op         watch;                   /* stands for the watch of wake_fd */
    hsri_link       unsent;                  /* prepared, not yet taken by the kernel, in order */
    uint32_t        n_unsent;
    hsri_link       refused;                 /* ended without the kernel */
    const char     *staging;                 /* registered memory, NULL if there is none */
    size_t          staging_bytes;
    const hsri_io_file *registered;          /* number 0 of the ring's files, NULL if there is none */
    bool            no_files;                /* registering them was refused */
} uring_engine;

/* ---- preparing entries ---- */

static void note_unsent(uring_engine *e, struct io_uring_sqe *sqe, hsri_op *op)
{
    io_uring_sqe_set_data(sqe, op);
    hsri_link_before(&e->unsent, &op->place);
    e->n_unsent++;
}

/* There is an entry for every op, so NULL cannot come while the ring is alive. */
static void watch_wake_fd(uring_engine *e)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&e->ring);
    if (!sqe)
        return;
    io_uring_prep_poll_add(sqe, e->wake_fd, POLLIN);
    note_unsent(e, sqe, &e->watch);
}

static bool in_staging(const uring_engine *e, const struct iovec *iov)
{
    const char *at = iov->iov_base;
    return e->staging && at >= e->staging && at + iov->iov_len <= e->staging + e->staging_bytes;
}

/* The first file in use, the cold file as a rule, spares the kernel a look-up for each operation. A convenience like the staging memory,
 * refused where that is. */
static bool is_registered(uring_engine *e, const hsri_io_file *file)
{
    if (!e->registered && !e->no_files) {
        if (io_uring_register_files(&e->ring, &file->fd, 1) == 0)
            e->registered = file;
        else
            e->no_files = true;
    }
    return e->registered == file;
}

/* The ring would keep it open, and with it what it takes of the disk. */
static void uring_forget(hsri_io_engine *base, const hsri_io_file *file)
{
    uring_engine *e = (uring_engine *)base;
    if (e->registered != file)
        return;
    e->no_files = io_uring_unregister_files(&e->ring) != 0;
    e->registered = NULL;
}

static void prepare(uring_engine *e, struct io_uring_sqe *sqe, const hsri_op *op)
{
    bool registered = is_registered(e, op->file);
    int fd = registered ? 0 : op->file->fd;
    uint64_t at = op->offset + op->done;
    void *memory = op->iov[0].iov_base;
    unsigned n = (unsigned)op->iov[0].iov_len;
    bool one = op->n_iov == 1, fixed = one && in_staging(e, op->iov);
    if (fixed && op->write)
        io_uring_prep_write_fixed(sqe, fd, memory, n, at, 0);
    else if (fixed)
        io_uring_prep_read_fixed(sqe, fd, memory, n, at, 0);
    else if (one && op->write)
        io_uring_prep_write(sqe, fd, memory, n, at);
    else if (one)
        io_uring_prep_read(sqe, fd, memory, n, at);
    else if (op->write)
        io_uring_prep_writev(sqe, fd, op->iov, op->n_iov, at);
    else
        io_uring_prep_readv(sqe, fd, op->iov, op->n_iov, at);
    if (registered)
        io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
}

static void refuse(uring_engine *e, hsri_op *op, int error)
{
    op->result = -error;
    hsri_link_before(&e->refused, &op->place);
}

static void uring_start(hsri_io_engine *base, hsri_op *op)
{
    uring_engine *e = (uring_engine *)base;
    struct io_uring_sqe *sqe = e->dead ? NULL : io_uring_get_sqe(&e->ring);
    if (!sqe) {
        refuse(e, op, e->dead ? e->dead : EAGAIN);
        return;
    }
    prepare(e, sqe, op);
    note_unsent(e, sqe, op);
}

/* ---- entering the kernel ---- */

static void forget_sent(uring_engine *e)
{
    for (uint32_t left = io_uring_sq_ready(&e->ring); e->n_unsent > left; e->n_unsent--)
        hsri_link_remove(e->unsent.next);
}

/* The kernel will take no more: what it has taken it still ends, the rest ends here. */
static void die(uring_engine *e, int error)
{
    e->dead = error;
    for (; e->n_unsent > 0; e->n_unsent--) {
        hsri_op *op = HSRI_MEMBER(e->unsent.next, hsri_op, place);
        hsri_link_remove(&op->place);
        if (op != &e->watch)
            refuse(e, op, error);
    }
}

static bool passes(int rc)
{
    return rc >= 0 || rc == -ETIME || rc == -EINTR || rc == -EAGAIN || rc == -EBUSY;
}

static struct timespec to_timespec(uint64_t ns)
{
    return (struct timespec){ .tv_sec = (time_t)hsri_min(ns / NS_PER_S, INT32_MAX), .tv_nsec = (long)(ns % NS_PER_S) };
}

/* Send, and sleep for one completion if asked to. */
static void enter(uring_engine *e, uint64_t timeout_ns)
{
    int rc = 0;
    if (timeout_ns == 0) {
        if (e->n_unsent > 0)
            rc = io_uring_submit(&e->ring);
    } else if (timeout_ns == HSRI_IO_FOREVER) {
        rc = io_uring_submit_and_wait(&e->ring, 1);
    } else {
        struct timespec ts = to_timespec(timeout_ns);
        struct __kernel_timespec kernel_ts = { .tv_sec = ts.tv_sec, .tv_nsec = ts.tv_nsec };
        struct io_uring_cqe *cqe;
        rc = io_uring_submit_and_wait_timeout(&e->ring, &cqe, 1, &kernel_ts, NULL);
    }
    forget_sent(e);
    if (!passes(rc))
        die(e, -rc);
}

static void drain_wake_fd(uring_engine *e)
{
    eventfd_t value;
    eventfd_read(e->wake_fd, &value);
    e->woken = true;
}

/* A dead ring still completes what it took; only sleeping needs another way. */
static void sleep_dead(uring_engine *e, uint64_t timeout_ns)
{
    struct pollfd fds[2] = { { .fd = e->ring.ring_fd, .events = POLLIN }, { .fd = e->wake_fd, .events = POLLIN } };
    struct timespec ts = to_timespec(timeout_ns);
    ppoll(fds, 2, timeout_ns == HSRI_IO_FOREVER ? NULL : &ts, NULL);
    drain_wake_fd(e);
}

static bool harvest(uring_engine *e, hsri_link *ended)
{
    struct io_uring_cqe *cqe;
    bool any = false, watch = false;
    while (io_uring_peek_cqe(&e->ring, &cqe) == 0) {
        hsri_op *op = cqe->user_data == LIBURING_UDATA_TIMEOUT ? NULL : io_uring_cqe_get_data(cqe);
        if (op == &e->watch) {
            watch = true;
        } else if (op) {
            op->result = cqe->res;
            hsri_link_before(ended, &op->place);
            any = true;
        }
        io_uring_cqe_seen(&e->ring, cqe);
    }
    if (watch) {
        drain_wake_fd(e);
        if (!e->dead)
            watch_wake_fd(e);
    }
    while (!hsri_link_empty(&e->refused)) {
        hsri_link *link = e->refused.next;
        hsri_link_remove(link);
        hsri_link_before(ended, link);
        any = true;
    }
    return any;
}

static void uring_collect(hsri_io_engine *base, uint64_t timeout_ns, hsri_link *ended)
{
    uring_engine *e = (uring_engine *)base;
    bool stay = !harvest(e, ended) && !e->woken;
    if (!e->dead)
        enter(e, stay ? timeout_ns : 0);
    else if (stay && timeout_ns > 0)
        sleep_dead(e, timeout_ns);
    harvest(e, ended);
    if (timeout_ns > 0)
        e->woken = false;
}

static void uring_wake(hsri_io_engine *base)
{
    uring_engine *e = (uring_engine *)base;
    eventfd_write(e->wake_fd, 1);
}

/* ---- life ---- */

/* What the kernel still holds it finishes by itself: it keeps the pages and the file of such an operation. */
static void uring_destroy(hsri_io_engine *base, hsri_io *io, uint32_t n_stuck)
{
    uring_engine *e = (uring_engine *)base;
    (void)n_stuck;
    io_uring_queue_exit(&e->ring);
    close(e->wake_fd);
    free(e);
    hsri_io_release(io);
}

static const char *remedy(int error)
{
    switch (error) {
    case EPERM:
    case EACCES: return " (a sandbox forbids it, or the sysctl kernel.io_uring_disabled)";
    case ENOMEM: return " (raise the limit of locked memory, ulimit -l)";
    case ENOSYS: return " (this kernel has none, or a sandbox hides it)";
    default:     return "";
    }
}

/* Without being interrupted for completions if the kernel knows how. */
static int open_ring(uring_engine *e, uint32_t entries)
{
    struct io_uring_params params = { .flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG };
    int rc = io_uring_queue_init_params(entries, &e->ring, &params);
    if (rc == -EINVAL) {
        params = (struct io_uring_params){ 0 };
        rc = io_uring_queue_init_params(entries, &e->ring, &params);
    }
    if (rc < 0)
        return rc;
    const int fd = hsri_raise_fd(e->ring.ring_fd), refusal = errno;
    e->ring.ring_fd = fd;
#ifdef HSRI_RING_HAS_ENTER_FD
    e->ring.enter_ring_fd = fd;
#endif
    if (fd >= 0)
        return 0;
    io_uring_queue_exit(&e->ring);
    return -refusal;
}

/* One operation there and back. Also refuses kernels before 5.6, which lack the plain read and write. */
static int try_ring(uring_engine *e)
{
    struct io_uring_cqe *cqe = NULL;
    if (!(e->ring.features & IORING_FEAT_RW_CUR_POS))
        return -ENOSYS;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&e->ring);
    if (!sqe)
        return -ENOSYS;
    io_uring_prep_nop(sqe);
    io_uring_sqe_set_data(sqe, NULL);
    int rc;
    while ((rc = io_uring_submit_and_wait(&e->ring, 1)) == -EINTR)
        ;
    if (rc >= 0)
        rc = io_uring_peek_cqe(&e->ring, &cqe);
    if (rc < 0)
        return rc;
    rc = cqe->res;
    io_uring_cqe_seen(&e->ring, cqe);
    return rc;
}

/* A convenience of the kernel's: refused, requests in the staging memory are like all others. */
static void register_staging(uring_engine *e, const hsri_io *io)
{
    if (!io->staging)
        return;
    struct iovec iov = { io->staging, io->opts.staging_bytes };
    int rc = io_uring_register_buffers(&e->ring, &iov, 1);
    if (rc < 0) {
        hsri_log_write(io->opts.log, HSR_LOG_INFO, "cold files: %zu bytes of staging memory are not registered with io_uring, error %d%s",
            io->opts.staging_bytes, -rc, remedy(-rc));
        return;
    }
    e->staging = io->staging;
    e->staging_bytes = io->opts.staging_bytes;
}

static hsr_status set_up(uring_engine *e, const hsri_io *io, hsr_error *err)
{
    int rc = open_ring(e, io->opts.queue_depth + SPARE_ENTRIES);
    if (rc < 0)
        return hsri_fail_sys(err, HSR_E_UNSUPPORTED, -rc, "io_uring is refused%s", remedy(-rc));
    rc = try_ring(e);
    if (rc < 0) {
        io_uring_queue_exit(&e->ring);
        return hsri_fail_sys(err, HSR_E_UNSUPPORTED, -rc, "io_uring does not work%s", remedy(-rc));
    }
    e->wake_fd = hsri_raise_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (e->wake_fd < 0) {
        rc = errno;
        io_uring_queue_exit(&e->ring);
        return hsri_fail_sys(err, HSR_E_IO, rc, "io_uring: cannot make an event descriptor");
    }
    return HSR_OK;
}

hsr_status hsri_uring_create(const hsri_io *io, hsri_io_engine **out, hsr_error *err)
{
    *out = NULL;
    uring_engine *e = hsri_new_array(1, sizeof *e);
    if (!e)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for io_uring");
    hsri_link_init(&e->unsent);
    hsri_link_init(&e->refused);
    hsri_link_init(&e->watch.place);
    hsr_status status = set_up(e, io, err);
    if (status < 0) {
        free(e);
        return status;
    }
    e->base = (hsri_io_engine){
        .name = "io_uring", .start = uring_start, .collect = uring_collect, .wake = uring_wake, .forget = uring_forget,
        .destroy = uring_destroy,
    };
    register_staging(e, io);
    watch_wake_fd(e);
    *out = &e->base;
    return HSR_OK;
}

#endif
