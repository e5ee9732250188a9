/* SPDX-License-Identifier: Apache-2.0 */
/* Writing a session to a file. The file gets its name when it is whole and on disk. Until then it has none, so that it is gone with the
 * process; where the file system needs one it is a temporary one beside it, which is removed whatever goes wrong. A process that is killed
 * cannot: the next one that saves there does. Who lives holds a lock on his. */
#define _GNU_SOURCE 1
#include "engine/persist.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/fd.h"
#include "base/status.h"

/* Six more letters follow. */
#define TEMPORARY ".hisparse-save-"

typedef struct writer {
    hsr_session     *session;
    const char      *path;                 /* as the caller spells it, for texts */
    char             target[PATH_MAX];     /* where it leads to */
    char             temporary[PATH_MAX + 32];   /* "" while there is none */
    int              fd;
    hsri_save_header header;
    hsri_image       image;
    uint32_t        *checks;
    uint8_t         *batch;
    uint64_t         done;                 /* bytes of the image */
    int32_t        (*progress)(void *, uint64_t, uint64_t);
    void            *user;
    hsr_error       *err;
} writer;

/* ---- the file ---- */

static hsr_status refused(const writer *w, const char *what)
{
    return hsri_fail_sys(w->err, HSR_E_IO, errno, "%.200s: %s", w->path, what);
}

/* A link stays a link: what it leads to is replaced. A device or a pipe is not to be replaced by a file. */
static hsr_status find_target(writer *w)
{
    struct stat st;
    const size_t length = strlen(w->path);
    if (length >= sizeof w->target)
        return hsri_fail_sys(w->err, HSR_E_IO, ENAMETOOLONG, "%.200s...: cannot be written", w->path);
    memcpy(w->target, w->path, length + 1);
    if (lstat(w->path, &st) < 0)
        return HSR_OK;
    if (S_ISLNK(st.st_mode) && (!realpath(w->path, w->target) || stat(w->target, &st) < 0))
        return refused(w, "the link leads nowhere");
    if (!S_ISREG(st.st_mode))
        return hsri_fail(w->err, HSR_E_INVALID, "%.200s: %s, and would be replaced by a file", w->path,
                         S_ISDIR(st.st_mode) ? "is a folder" : "is not a regular file");
    return HSR_OK;
}

/* Length of the folder's name with its slash; 0: the current one. */
static size_t folder_length(const writer *w)
{
    const char *slash = strrchr(w->target, '/');
    return slash ? (size_t)(slash - w->target) + 1 : 0;
}

static const char *name_folder(const writer *w, char *name)
{
    const size_t length = folder_length(w);
    memcpy(name, length ? w->target : ".", length ? length : 1);
    name[length ? length : 1] = 0;
    return name;
}

/* The name under which a file without name can be given one. */
static const char *name_fd(int fd, char name[64])
{
    snprintf(name, 64, "/proc/self/fd/%d", fd);
    return name;
}

/* False where the file system, or a missing /proc, does not let a file be made without a name and get one later. */
static bool create_nameless(writer *w)
{
    char folder[sizeof w->target], name[64];
    struct stat st;
    w->fd = hsri_raise_fd(open(name_folder(w, folder), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (w->fd < 0)
        return false;
    if (stat(name_fd(w->fd, name), &st) == 0 && S_ISREG(st.st_mode))
        return true;
    close(w->fd);
    w->fd = -1;
    return false;
}

static bool leads_to(int folder, const char *name, int fd)
{
    struct stat named, open;
    return fstatat(folder, name, &named, AT_SYMLINK_NOFOLLOW) == 0 && fstat(fd, &open) == 0 && S_ISREG(open.st_mode) &&
           named.st_dev == open.st_dev && named.st_ino == open.st_ino;
}

/* Where a file system has no locks, no file is ever taken for an orphan. */
static void lock(int fd)
{
    while (flock(fd, LOCK_EX) < 0 && errno == EINTR)
        ;
}

/* Files of processes that are gone. */
static void remove_orphans(const writer *w)
{
    char name[sizeof w->target];
    DIR *folder = opendir(name_folder(w, name));
    if (!folder)
        return;
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        const char *file = entry->d_name;
        if (strncmp(file, TEMPORARY, sizeof TEMPORARY - 1) != 0 || strlen(file) != sizeof TEMPORARY - 1 + 6)
            continue;
        const int fd = hsri_raise_fd(openat(dirfd(folder), file, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
        if (fd < 0)
            continue;
        if (flock(fd, LOCK_EX | LOCK_NB) == 0 && leads_to(dirfd(folder), file, fd))
            unlinkat(dirfd(folder), file, 0);
        close(fd);
    }
    closedir(folder);
}

static hsr_status create_named(writer *w)
{
    char name[sizeof w->temporary];
    do {
        if (w->fd >= 0)
            close(w->fd);
        w->temporary[0] = 0;
        snprintf(name, sizeof name, "%.*s" TEMPORARY "XXXXXX", (int)folder_length(w), w->target);
        w->fd = mkostemp(name, O_CLOEXEC);
        if (w->fd < 0)
            return refused(w, "no file can be made in its folder");
        memcpy(w->temporary, name, sizeof name);
        w->fd = hsri_raise_fd(w->fd);
        if (w->fd < 0)
            return refused(w, "the new file cannot be used");
        lock(w->fd);
    } while (access(name, F_OK) < 0 && errno == ENOENT);   /* taken for an orphan before it was locked */
    return HSR_OK;
}

static hsr_status create(writer *w)
{
    remove_orphans(w);
    if (create_nameless(w))
        lock(w->fd);          /* it will have such a name for a moment, too */
    else
        HSRI_TRY(create_named(w));
    return fchmod(w->fd, 0600) < 0 ? refused(w, "the new file cannot be used") : HSR_OK;
}

/* A name that a rename can take away again: nothing else can replace a file. */
static hsr_status give_name(writer *w)
{
    char name[sizeof w->temporary], own[64];
    for (uint32_t i = 0; ; i++) {
        snprintf(name, sizeof name, "%.*s" TEMPORARY "%06x", (int)folder_length(w), w->target, (uint32_t)(hsri_now_ns() + i) & 0xffffff);
        if (linkat(AT_FDCWD, name_fd(w->fd, own), AT_FDCWD, name, AT_SYMLINK_FOLLOW) == 0)
            break;
        if (errno != EEXIST || i == 100)
            return refused(w, "the new file cannot be named");
    }
    memcpy(w->temporary, name, sizeof name);
    return HSR_OK;
}

/* All of its room at once: a full disk is told before anything was written. */
static hsr_status take_room(const writer *w)
{
    struct rlimit limit;
    const uint64_t bytes = w->header.file_bytes;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur)
        return hsri_fail_sys(w->err, HSR_E_IO, EFBIG, "%.200s: %llu bytes are more than this process may write to a file", w->path,
                             (unsigned long long)bytes);
    if (fallocate(w->fd, 0, 0, (off_t)bytes) < 0 && (errno == ENOSPC || errno == EDQUOT))
        return hsri_fail_sys(w->err, HSR_E_IO, errno, "%.200s: %llu bytes are needed", w->path, (unsigned long long)bytes);
    return HSR_OK;
}

static hsr_status write_at(const writer *w, uint64_t offset, const void *data, uint64_t n)
{
    const char *from = data;
    while (n > 0) {
        const ssize_t written = pwrite(w->fd, from, n, (off_t)offset);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return refused(w, "cannot be written");
        from += written;
        offset += (uint64_t)written;
        n -= (uint64_t)written;
    }
    return HSR_OK;
}

static hsr_status publish(writer *w)
{
    if (fsync(w->fd) < 0)
        return refused(w, "cannot be brought to disk");
    if (!w->temporary[0])
        HSRI_TRY(give_name(w));
    if (rename(w->temporary, w->target) < 0)
        return refused(w, "cannot take the place of the old file");
    w->temporary[0] = 0;
    char name[sizeof w->target];
    const int folder = open(name_folder(w, name), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
        fsync(folder);      /* some file systems refuse; the file itself is there */
        close(folder);
    }
    return HSR_OK;
}

/* ---- its content ---- */

static hsr_status check_idle(const hsr_session *s, hsr_error *err)
{
    if (s->status < 0)
        return hsri_fail(err, HSR_E_STATE, "save: the session failed earlier (%s); truncate or rebuild it first", s->error.message);
    if (s->request.active)
        return hsri_fail(err, HSR_E_STATE, "save: a request is running");
    if (hsri_session_has_work(s))
        return hsri_fail(err, HSR_E_STATE, "save: %llu appended tokens are not computed yet",
                         (unsigned long long)(s->target - s->n_computed));
    return HSR_OK;
}

/* The session has no work, so that nothing of this changes while it is written. */
static hsr_status describe(writer *w)
{
    uint32_t chunk;
    hsri_engine_enter(w->session->engine);
    hsr_status st = check_idle(w->session, w->err);
    if (st == HSR_OK)
        st = hsri_cache_describe_image(w->session->cache, &w->image, &chunk, w->err);
    if (st == HSR_OK)
        hsri_save_describe(w->session, &w->image, chunk, &w->header);
    hsri_engine_leave(w->session->engine);
    return st;
}

static hsr_status read_rows(writer *w, hsri_image_part part, uint64_t row, uint64_t n)
{
    hsr_session *s = w->session;
    const uint64_t bytes = w->image.per_row * w->image.slot_bytes[part];
    hsr_status st = HSR_OK;
    hsri_engine_enter(s->engine);
    for (uint64_t i = 0; i < n && st >= 0; i++)
        st = hsri_cache_read_image(s->cache, s->engine->queue, &w->image, part, row + i, w->batch + i * bytes, w->err);
    hsri_engine_leave(s->engine);
    return st;
}

static hsr_status tell(const writer *w)
{
    if (w->progress && w->progress(w->user, w->done, hsri_image_bytes(&w->image)))
        return hsri_fail(w->err, HSR_E_CANCELLED, "stopped by the progress callback");
    return HSR_OK;
}

static hsr_status write_part(writer *w, hsri_image_part part, uint32_t *checks)
{
    const uint64_t slot = w->image.slot_bytes[part], row_bytes = w->image.per_row * slot, batch = hsri_save_batch_rows(&w->image, part);
    for (uint64_t row = 0, n; row < w->image.rows[part]; row += n) {
        n = hsri_min(batch, w->image.rows[part] - row);
        HSRI_TRY(tell(w));
        HSRI_TRY(read_rows(w, part, row, n));
        for (uint64_t i = 0; i < n * w->image.per_row; i++)
            *checks++ = hsri_crc32c(0, w->batch + i * slot, slot);
        HSRI_TRY(write_at(w, w->header.parts[part] + row * row_bytes, w->batch, n * row_bytes));
        w->done += n * row_bytes;
    }
    return HSR_OK;
}

static hsr_status write_all(writer *w)
{
    hsri_save_header *h = &w->header;
    uint32_t *checks = w->checks;
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++) {
        HSRI_TRY(write_part(w, (hsri_image_part)part, checks));
        checks += w->image.rows[part] * w->image.per_row;
    }
    h->tokens.crc32c = hsri_crc32c(0, w->session->ids, h->tokens.bytes);
    h->checks.crc32c = hsri_crc32c(0, w->checks, h->checks.bytes);
    h->crc32c = hsri_save_header_crc(h);
    HSRI_TRY(write_at(w, h->tokens.offset, w->session->ids, h->tokens.bytes));
    HSRI_TRY(write_at(w, h->checks.offset, w->checks, h->checks.bytes));
    HSRI_TRY(write_at(w, 0, h, sizeof *h));
    if (ftruncate(w->fd, (off_t)h->file_bytes) < 0)     /* also where nothing is behind the tokens */
        return refused(w, "cannot be written");
    return tell(w);
}

static hsr_status save(writer *w)
{
    HSRI_TRY(describe(w));
    w->checks = hsri_new_array(hsri_max(hsri_image_slots(&w->image), 1), sizeof *w->checks);
    w->batch = hsri_new_aligned(hsri_save_batch_bytes(&w->image), 1);
    if (!w->checks || !w->batch)
        return hsri_fail(w->err, HSR_E_NOMEM, "no memory to save a session");
    HSRI_TRY(find_target(w));
    HSRI_TRY(create(w));
    HSRI_TRY(take_room(w));
    HSRI_TRY(write_all(w));
    return publish(w);
}

hsr_status hsri_session_save(hsr_session *s, const char *path, int32_t (*progress)(void *, uint64_t, uint64_t), void *user, hsr_error *err)
{
    writer *w = hsri_new_array(1, sizeof *w);
    if (!w)
        return hsri_fail(err, HSR_E_NOMEM, "no memory to save a session");
    w->session = s;
    w->path = path;
    w->fd = -1;
    w->progress = progress;
    w->user = user;
    w->err = err;
    const hsr_status st = save(w);
    if (w->fd >= 0)
        close(w->fd);
    if (w->temporary[0])
        unlink(w->temporary);
    free(w->checks);
    free(w->batch);
    free(w);
    return st;
}
