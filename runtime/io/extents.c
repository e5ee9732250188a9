/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "io/extents.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/array.h"
#include "base/status.h"
#include "io/io_internal.h"

#define MAX_EXTENTS (1u << 24)
/* Free extents that stay allocated, so that pages that come and go cost no work of the file system. */
#define MAX_SPARES  8u

struct hsri_extents {
    hsri_io_file *file;
    uint32_t      total, used, peak_used, n_on_disk;
    uint64_t      reserved;
    uint64_t      size;         /* of the file, as far as extents made it grow */
    uint32_t      n_words;
    uint32_t      first_word;   /* no word before this one has a free extent */
    uint64_t     *free_bits;    /* bits behind `total` are never set */
    uint64_t     *disk_bits;    /* occupies space */
};

static bool has_bit(const uint64_t *bits, uint32_t i) { return bits[i / 64] >> i % 64 & 1; }
static void set_bit(uint64_t *bits, uint32_t i) { bits[i / 64] |= 1ull << i % 64; }
static void clear_bit(uint64_t *bits, uint32_t i) { bits[i / 64] &= ~(1ull << i % 64); }

/* ---- creation ---- */

hsr_status hsri_extents_create(hsri_io_file *file, uint64_t bytes, hsri_extents **out, hsr_error *err)
{
    *out = NULL;
    uint64_t total = bytes / HSRI_EXTENT_BYTES;
    if (total < 1 || total > MAX_EXTENTS)
        return hsri_fail(err, HSR_E_INVALID, "%s: a cold file of %llu bytes: between 1 MiB and 16 TiB are possible", file->shown,
            (unsigned long long)bytes);
    hsri_extents *x = hsri_new_array(1, sizeof *x);
    if (!x)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the extents of a cold file");
    x->file = file;
    x->total = (uint32_t)total;
    x->n_words = (uint32_t)hsri_div_up(total, 64);
    x->free_bits = hsri_new_array(x->n_words, sizeof *x->free_bits);
    x->disk_bits = hsri_new_array(x->n_words, sizeof *x->disk_bits);
    if (!x->free_bits || !x->disk_bits) {
        hsri_extents_destroy(x);
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the table of %llu extents of a cold file", (unsigned long long)total);
    }
    for (uint32_t w = 0; w < x->n_words; w++)
        x->free_bits[w] = UINT64_MAX;
    if (total % 64)
        x->free_bits[x->n_words - 1] = (1ull << total % 64) - 1;
    *out = x;
    return HSR_OK;
}

void hsri_extents_destroy(hsri_extents *x)
{
    if (!x)
        return;
    free(x->free_bits);
    free(x->disk_bits);
    free(x);
}

/* ---- reservations ---- */

bool hsri_extents_reserve(hsri_extents *x, uint64_t n)
{
    if (n > x->total - x->used - x->reserved)
        return false;
    x->reserved += n;
    return true;
}

void hsri_extents_unreserve(hsri_extents *x, uint64_t n)
{
    assert(n <= x->reserved);
    x->reserved -= n;
}

/* ---- the disk ---- */

static int fallocate_again(int fd, int mode, uint64_t offset)
{
    int rc;
    while ((rc = fallocate(fd, mode, (off_t)offset, HSRI_EXTENT_BYTES)) != 0 && errno == EINTR)
        ;
    return rc ? errno : 0;
}

/* Where the file system cannot allocate ahead, the file only grows, and a full disk is found by the write. */
static int allocate(hsri_extents *x, uint64_t offset)
{
    int error = hsri_io_action_error(x->file->io, HSRI_IO_ALLOCATE);
    if (error)
        return error;
    if (!hsri_io_size_allowed(offset + HSRI_EXTENT_BYTES))
        return EFBIG;
    error = fallocate_again(x->file->fd, 0, offset);
    if (error != EOPNOTSUPP && error != ENOSYS)
        return error;
    if (x->size >= offset + HSRI_EXTENT_BYTES)
        return 0;
    return ftruncate(x->file->fd, (off_t)(offset + HSRI_EXTENT_BYTES)) == 0 ? 0 : errno;
}

/* Refused, the extent stays allocated, and is counted so. */
static void give_back(hsri_extents *x, uint32_t extent)
{
    if (hsri_io_action_error(x->file->io, HSRI_IO_PUNCH))
        return;
    if (fallocate_again(x->file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (uint64_t)extent * HSRI_EXTENT_BYTES) != 0)
        return;
    clear_bit(x->disk_bits, extent);
    x->n_on_disk--;
}

/* ---- extents ---- */

static uint32_t lowest_free(hsri_extents *x)
{
    while (x->free_bits[x->first_word] == 0)
        x->first_word++;
    return x->first_word * 64 + (uint32_t)__builtin_ctzll(x->free_bits[x->first_word]);
}

hsr_status hsri_extents_take(hsri_extents *x, uint32_t *out, hsr_error *err)
{
    *out = HSRI_NO_EXTENT;
    if (x->reserved == 0)
        return hsri_fail(err, HSR_E_INTERNAL, "an extent of a cold file was taken that nobody reserved");
    uint32_t extent = lowest_free(x);
    uint64_t offset = (uint64_t)extent * HSRI_EXTENT_BYTES;
    if (!has_bit(x->disk_bits, extent)) {
        int error = allocate(x, offset);
        if (error)
            return hsri_fail_sys(err, HSR_E_IO, error, "%s: cannot make room for 1 MiB of KV pages at offset %llu", x->file->shown,
                (unsigned long long)offset);
        set_bit(x->disk_bits, extent);
        x->n_on_disk++;
        x->size = hsri_max(x->size, offset + HSRI_EXTENT_BYTES);
    }
    clear_bit(x->free_bits, extent);
    x->reserved--;
    x->used++;
    x->peak_used = (uint32_t)hsri_max(x->peak_used, x->used);
    *out = extent;
    return HSR_OK;
}

/* The highest free extent that occupies space: the lowest are taken first. */
static uint32_t highest_spare(const hsri_extents *x)
{
    uint32_t w = x->n_words - 1;
    while (!(x->free_bits[w] & x->disk_bits[w]))
        w--;
    return w * 64 + 63 - (uint32_t)__builtin_clzll(x->free_bits[w] & x->disk_bits[w]);
}

void hsri_extents_release(hsri_extents *x, uint32_t extent)
{
    assert(extent < x->total && !has_bit(x->free_bits, extent));
    set_bit(x->free_bits, extent);
    x->first_word = (uint32_t)hsri_min(x->first_word, extent / 64);
    x->used--;
    if (x->n_on_disk - x->used > MAX_SPARES)
        give_back(x, highest_spare(x));
}

/* ---- statistics ---- */

static uint64_t largest_free_run(const hsri_extents *x)
{
    uint64_t longest = 0, run = 0;
    for (uint32_t i = 0; i < x->total; ) {
        uint64_t bits = x->free_bits[i / 64];
        if (i % 64 == 0 && (bits == 0 || bits == UINT64_MAX)) {
            run = bits ? run + 64 : 0;
            i += 64;
        } else {
            run = has_bit(x->free_bits, i++) ? run + 1 : 0;
        }
        longest = hsri_max(longest, run);
    }
    return longest;
}

void hsri_extents_get_stats(const hsri_extents *x, hsri_extents_stats *stats)
{
    *stats = (hsri_extents_stats){
        .total = x->total, .used = x->used, .free = x->total - x->used, .reserved = x->reserved,
        .peak_used = x->peak_used, .on_disk = x->n_on_disk, .largest_free_run = largest_free_run(x),
    };
}
