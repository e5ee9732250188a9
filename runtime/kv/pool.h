/* SPDX-License-Identifier: Apache-2.0 */
/* A pool: all 1 MiB blocks of one tier on one device, one contiguous address range, committed as blocks are taken. Owns block
 * allocation, reference counts, reservations and their counters; knows nothing of pages. Not thread-safe: the engine's lock
 * covers it. */
#ifndef HSRI_POOL_H
#define HSRI_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

#define HSRI_NO_BLOCK UINT32_MAX

typedef struct hsri_pool hsri_pool;

/* All counts in blocks. used + free = total; reserved blocks are free but promised. */
typedef struct hsri_pool_stats {
    uint64_t total, used, free, reserved, peak_used, committed, largest_free_run;
} hsri_pool_stats;

/* bytes is rounded down to whole blocks; at least one, at most 2^24. */
hsr_status hsri_pool_create(hsri_device *dev, uint64_t bytes, hsri_pool **pool, hsr_error *err);
void hsri_pool_destroy(hsri_pool *pool);
uint32_t hsri_pool_buf(const hsri_pool *pool);   /* the device buffer of the whole range */
uint64_t hsri_pool_total(const hsri_pool *pool); /* blocks */

/* Promise n blocks: true if free - reserved >= n. Taking a block consumes one promise of the taker. */
bool hsri_pool_reserve(hsri_pool *pool, uint64_t n);
uint64_t hsri_pool_available(const hsri_pool *pool);   /* blocks that can still be promised */
void hsri_pool_unreserve(hsri_pool *pool, uint64_t n);

/* Take a block against a reservation, lowest free index first, with one reference. HSR_E_NOMEM if the system refuses to commit
 * it: nothing has changed then, the reservation included. */
hsr_status hsri_pool_take(hsri_pool *pool, uint32_t *block, hsr_error *err);

/* One more or one fewer holder; the last release frees the block. A few free blocks stay committed to damp system calls,
 * the rest go back to the system. */
void hsri_pool_retain(hsri_pool *pool, uint32_t block);
void hsri_pool_release(hsri_pool *pool, uint32_t block);
uint32_t hsri_pool_holders(const hsri_pool *pool, uint32_t block);

void hsri_pool_get_stats(const hsri_pool *pool, hsri_pool_stats *stats);

#endif
