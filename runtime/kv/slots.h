/* SPDX-License-Identifier: Apache-2.0 */
/* The slots of one session: the pool blocks it holds, carved into equal slots, and its promise of more. A slot is named by
 * its page table entry, block << 8 | slot.
 *
 * New slots are taken only in blocks that nobody else holds. A block that a fork shares takes no new pages from either side; a
 * slot in it that both sides see is shared and is not written. When one holder is left, the block is its own again: free slots
 * that were lost to sharing are regained.
 *
 * Reservation: with M slots promised and F slots free in own blocks, exactly ceil((M - F) / slots per block) blocks are
 * reserved in the pool. Taking a slot keeps that equation, so a promised slot is never refused for want of budget. */
#ifndef HSRI_SLOTS_H
#define HSRI_SLOTS_H

#include "kv/pool.h"

#define HSRI_MAX_SLOTS 256u                           /* per block: blocks of slots of 4096 bytes */
#define HSRI_SLOT_WORDS (HSRI_MAX_SLOTS / 64u)

static inline uint32_t hsri_entry_block(uint32_t entry) { return entry >> 8; }
static inline uint32_t hsri_entry_slot(uint32_t entry) { return entry & 255u; }

/* One block as this session sees it. */
typedef struct hsri_held_block {
    uint32_t block;
    uint32_t n_used;
    uint64_t used[HSRI_SLOT_WORDS];      /* slots that hold a page of this session */
    uint64_t shared[HSRI_SLOT_WORDS];    /* of these: seen by others too, while the block has other holders */
} hsri_held_block;

typedef struct hsri_slots {
    hsri_pool       *pool;
    uint32_t         per_block;
    hsri_held_block *blocks;             /* by ascending block index */
    size_t           n_blocks, blocks_cap;
    size_t           last;               /* where the last look-up ended: neighbours are usually asked for next */
    size_t           first_free;         /* no own block before this one has a free slot */
    uint64_t         n_used;
    uint64_t         n_free;             /* in own blocks */
    uint64_t         n_promised;
    uint64_t         n_reserved;         /* blocks, in the pool */
} hsri_slots;

void hsri_slots_init(hsri_slots *slots, hsri_pool *pool, uint32_t per_block);

/* Return every block and the reservation. The blocks that are left with a single holder are reported one by one. */
void hsri_slots_clear(hsri_slots *slots, void (*single)(void *arg, uint32_t block), void *arg);

/* Blocks that a promise of n_promised slots would reserve. */
uint64_t hsri_slots_blocks_for(const hsri_slots *slots, uint64_t n_promised);

/* Set the number of slots promised. False, and nothing changed, if the pool has too few free blocks. */
bool hsri_slots_promise(hsri_slots *slots, uint64_t n_promised);

/* Take a promised slot. HSR_E_NOMEM if the system refuses memory: nothing has changed then. */
hsr_status hsri_slots_take(hsri_slots *slots, uint32_t *entry, hsr_error *err);

/* The same, in block *near if it has a free slot, else in a new block if the pool has one to spare, else anywhere. *near becomes the
 * slot's block. What is taken so lies together. */
hsr_status hsri_slots_take_near(hsri_slots *slots, uint32_t *near, uint32_t *entry, hsr_error *err);

/* Give a slot up; a block without pages returns to the pool. The promise is not changed: call hsri_slots_promise when done.
 * Returns the block if this leaves it with one other holder, else HSRI_NO_BLOCK. */
uint32_t hsri_slots_drop(hsri_slots *slots, uint32_t entry);

/* The block as it is held here; NULL: it is not. Until the next call. */
const hsri_held_block *hsri_slots_held(hsri_slots *slots, uint32_t block);

/* A slot in another own block than that of `entry`, for what is in `entry`, which the caller copies and then drops: with its last slot
 * a block may leave memory. False if no other block has a free slot. Promises are not changed: call hsri_slots_promise when done. */
bool hsri_slots_take_elsewhere(hsri_slots *slots, uint32_t entry, uint32_t *to);

/* Let `to` see a slot of `from`. HSR_E_NOMEM: nothing has changed. The reservation of `from` may now be short of its promise. */
hsr_status hsri_slots_share(hsri_slots *from, hsri_slots *to, uint32_t entry, hsr_error *err);

/* May others see this slot? Then it is not written. */
bool hsri_slots_is_shared(hsri_slots *slots, uint32_t entry);

/* Another holder let go of the block: if it is held here, it is now this session's own. */
bool hsri_slots_regain(hsri_slots *slots, uint32_t block);

#endif
