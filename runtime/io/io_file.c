/* SPDX-License-Identifier: Apache-2.0 */
/* Opening files, and finding out whether they can be read past the page cache: file systems accept O_DIRECT that then refuse
 * the first write, so only a real transfer tells. */
#define _GNU_SOURCE 1
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/fd.h"
#include "base/rng.h"
#include "base/status.h"
#include "io/io_internal.h"

#define SHOWN_PATH  120
#define NAME_BYTES  32u      /* of a name made by make_name, '/' and NUL included */
#define NAME_TRIES  16u

/* ---- common ---- */

bool hsri_io_size_allowed(uint64_t bytes)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

static hsr_status new_file(hsri_io *io, hsri_io_file **out, hsr_error *err)
{
    *out = NULL;
    if (getpid() != io->pid)
        return hsri_fail(err, HSR_E_FORKED, "cold files opened before fork() cannot be used in the child");
    hsri_io_file *file = hsri_new_array(1, sizeof *file);
    if (!file)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a cold file");
    file->io = io;
    file->fd = -1;
    hsri_link_before(&io->files, &file->place);
    *out = file;
    return HSR_OK;
}

void hsri_io_file_free(hsri_io_file *file)
{
    hsri_link_remove(&file->place);
    if (file->fd >= 0)
        close(file->fd);
    free(file);
}

static bool set_flags(int fd, int set, int clear)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, (flags | set) & ~clear) == 0;
}

static bool go_direct(hsri_io_file *file)
{
    return hsri_io_action_error(file->io, HSRI_IO_DIRECT) == 0 && set_flags(file->fd, O_DIRECT, 0);
}

/* One whole block each way or errno. EINTR is for the caller's signals only and means nothing here. */
static bool write_block(int fd, const void *block)
{
    ssize_t n;
    while ((n = pwrite(fd, block, HSRI_IO_ALIGN, 0)) < 0 && errno == EINTR)
        ;
    if (n >= 0 && n != HSRI_IO_ALIGN)
        errno = ENOSPC;
    return n == HSRI_IO_ALIGN;
}

static bool read_block(int fd, void *block)
{
    ssize_t n;
    while ((n = pread(fd, block, HSRI_IO_ALIGN, 0)) < 0 && errno == EINTR)
        ;
    if (n >= 0 && n != HSRI_IO_ALIGN)
        errno = EIO;
    return n == HSRI_IO_ALIGN;
}

/* ---- files without a name ---- */

static void make_name(char *name, uint64_t seed, uint32_t i)
{
    snprintf(name, NAME_BYTES, "/.hisparse-%016llx", (unsigned long long)hsri_rng_u64(seed, i));
}

/* For file systems without O_TMPFILE. The name exists for the moment between two calls. */
static int open_and_unlink(const char *directory, hsr_error *err, hsr_status *status)
{
    size_t length = strlen(directory);
    char *path = hsri_new_array(length + NAME_BYTES, 1);
    int fd = -1;
    if (!path) {
        *status = hsri_fail(err, HSR_E_NOMEM, "out of memory for the path of a cold file");
        return -1;
    }
    memcpy(path, directory, length);
    uint64_t seed = hsri_now_ns() ^ (uint64_t)getpid() << 40;
    for (uint32_t i = 0; i < NAME_TRIES && fd < 0; i++) {
        make_name(path + length, seed, i);
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0 && errno != EEXIST && errno != EINTR)
            break;
    }
    if (fd >= 0)
        unlink(path);
    free(path);
    return hsri_raise_fd(fd);
}

static hsr_status open_anonymous(hsri_io_file *file, const char *directory, hsr_error *err)
{
    hsr_status status = HSR_E_IO;
    int error = hsri_io_action_error(file->io, HSRI_IO_OPEN);
    errno = error;
    /* O_EXCL: the file can never be given a name. */
    if (!error)
        file->fd = hsri_raise_fd(open(directory, O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
    if (!error && file->fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL))
        file->fd = open_and_unlink(directory, err, &status);
    if (file->fd >= 0)
        return HSR_OK;
    if (status == HSR_E_NOMEM)
        return status;
    return hsri_fail_sys(err, HSR_E_IO, errno, "%s: cannot make a cold file in this directory", file->shown);
}

/* Can a block be written and read back with the flags the file has now? */
static bool probe(hsri_io_file *file, uint8_t *blocks)
{
    uint8_t *out = blocks, *in = blocks + HSRI_IO_ALIGN;
    for (uint32_t i = 0; i < HSRI_IO_ALIGN; i++)
        out[i] = (uint8_t)(i * 7 + 1);
    memset(in, 0, HSRI_IO_ALIGN);
    if (!write_block(file->fd, out) || !read_block(file->fd, in))
        return false;
    errno = EIO;
    return memcmp(in, out, HSRI_IO_ALIGN) == 0;
}

static hsr_status probe_both(hsri_io_file *file, hsr_error *err)
{
    if (!hsri_io_size_allowed(HSRI_IO_ALIGN))
        return hsri_fail_sys(err, HSR_E_IO, EFBIG, "%s: the process may not write files of %u bytes (RLIMIT_FSIZE)", file->shown,
            HSRI_IO_ALIGN);
    void *memory = hsri_new_array(3 * HSRI_IO_ALIGN, 1);
    if (!memory)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for probing a cold file");
    uint8_t *blocks = (uint8_t *)(uintptr_t)hsri_round_up((uintptr_t)memory, HSRI_IO_ALIGN);
    file->direct = go_direct(file) && probe(file, blocks);
    bool usable = file->direct || (set_flags(file->fd, 0, O_DIRECT) && probe(file, blocks));
    int error = errno;
    free(memory);
    if (!usable)
        return hsri_fail_sys(err, HSR_E_IO, error, "%s: a first block cannot be written and read back", file->shown);
    if (ftruncate(file->fd, 0) != 0)
        return hsri_fail_sys(err, HSR_E_IO, errno, "%s: cannot empty the file", file->shown);
    return HSR_OK;
}

static hsr_status finish_opening(hsri_io_file *file, hsr_status status, hsri_io_file **out)
{
    if (status < 0) {
        hsri_io_file_free(file);
        return status;
    }
    *out = file;
    return HSR_OK;
}

hsr_status hsri_io_create_file(hsri_io *io, const char *directory, hsri_io_file **out, hsr_error *err)
{
    hsri_io_file *file;
    *out = NULL;
    HSRI_TRY(new_file(io, &file, err));
    snprintf(file->shown, sizeof file->shown, "%.*s", SHOWN_PATH, directory);
    hsr_status status = open_anonymous(file, directory, err);
    if (status >= 0)
        status = probe_both(file, err);
    /* Slots are read at random: what lies beside them is not wanted. Advice only. */
    if (status >= 0 && !file->direct)
        posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
    return finish_opening(file, status, out);
}

/* ---- what a file is ---- */

bool hsri_io_is_direct(const hsri_io_file *file)
{
    return file->direct;
}

hsr_status hsri_io_size(const hsri_io_file *file, uint64_t *bytes, hsr_error *err)
{
    struct stat st;
    *bytes = 0;
    if (fstat(file->fd, &st) != 0)
        return hsri_fail_sys(err, HSR_E_IO, errno, "%s: cannot examine the file", file->shown);
    *bytes = (uint64_t)st.st_size;
    return HSR_OK;
}
