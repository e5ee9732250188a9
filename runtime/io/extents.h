/* SPDX-License-Identifier: Apache-2.0 */
/* The room in one cold file: extents of 1 MiB, allocated on disk when they are taken, up to a ceiling. Counts are kept as
 * in kv/pool.h: what is reserved is never refused for want of budget, only by the disk itself. Not thread-safe. */
#ifndef HSRI_EXTENTS_H
#define HSRI_EXTENTS_H

#include "io/io.h"

#define HSRI_EXTENT_BYTES (1u << 20)
#define HSRI_NO_EXTENT    UINT32_MAX

typedef struct hsri_extents hsri_extents;

/* All counts in extents. used + free = total; reserved ones are free but promised; on_disk ones occupy space. */
typedef struct hsri_extents_stats {
    uint64_t total, used, free, reserved, peak_used, on_disk, largest_free_run;
} hsri_extents_stats;

/* Of a file made by hsri_io_create_file, which stays the caller's and must outlive this. bytes is rounded down to whole extents;
 * at least one, at most 2^24. */
hsr_status hsri_extents_create(hsri_io_file *file, uint64_t bytes, hsri_extents **extents, hsr_error *err);
void hsri_extents_destroy(hsri_extents *extents);

bool hsri_extents_reserve(hsri_extents *extents, uint64_t n);
void hsri_extents_unreserve(hsri_extents *extents, uint64_t n);

/* Take the lowest free extent against a reservation; it begins at extent * HSRI_EXTENT_BYTES in the file. HSR_E_IO (disk full, file
 * size limit, names the directory): nothing has changed, the reservation included; it may work later. */
hsr_status hsri_extents_take(hsri_extents *extents, uint32_t *extent, hsr_error *err);

/* No request on it may be under way. A few free extents stay allocated on disk, the rest is given back. */
void hsri_extents_release(hsri_extents *extents, uint32_t extent);

void hsri_extents_get_stats(const hsri_extents *extents, hsri_extents_stats *stats);

#endif
