/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/slots.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"

void hsri_slots_init(hsri_slots *slots, hsri_pool *pool, uint32_t per_block)
{
    assert(per_block >= 1 && per_block <= HSRI_MAX_SLOTS);
    *slots = (hsri_slots){ .pool = pool, .per_block = per_block };
}

/* ---- the blocks held ---- */

static bool is_own(const hsri_slots *slots, uint32_t block)
{
    return hsri_pool_holders(slots->pool, block) == 1;
}

/* Place of the block among those held, or where it belongs. */
static size_t find(hsri_slots *slots, uint32_t block)
{
    if (slots->last < slots->n_blocks && slots->blocks[slots->last].block == block)
        return slots->last;
    size_t low = 0, high = slots->n_blocks;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (slots->blocks[middle].block < block)
            low = middle + 1;
        else
            high = middle;
    }
    slots->last = low;
    return low;
}

static bool holds(const hsri_slots *slots, size_t at, uint32_t block)
{
    return at < slots->n_blocks && slots->blocks[at].block == block;
}

static hsri_held_block *find_held(hsri_slots *slots, uint32_t entry)
{
    size_t at = find(slots, hsri_entry_block(entry));
    assert(holds(slots, at, hsri_entry_block(entry)));
    return &slots->blocks[at];
}

const hsri_held_block *hsri_slots_held(hsri_slots *slots, uint32_t block)
{
    size_t at = find(slots, block);
    return holds(slots, at, block) ? &slots->blocks[at] : NULL;
}

static bool make_room(hsri_slots *slots)
{
    return hsri_grow((void **)&slots->blocks, &slots->blocks_cap, slots->n_blocks + 1, sizeof *slots->blocks);
}

static void insert(hsri_slots *slots, size_t at, uint32_t block)
{
    memmove(slots->blocks + at + 1, slots->blocks + at, (slots->n_blocks - at) * sizeof *slots->blocks);
    slots->blocks[at] = (hsri_held_block){ .block = block };
    slots->n_blocks++;
    if (at <= slots->first_free)
        slots->first_free = at;
}

static void erase(hsri_slots *slots, size_t at)
{
    slots->n_blocks--;
    memmove(slots->blocks + at, slots->blocks + at + 1, (slots->n_blocks - at) * sizeof *slots->blocks);
    if (at < slots->first_free)
        slots->first_free--;
}

/* Let go of a block: which block has a single holder now? */
static uint32_t release(hsri_slots *slots, uint32_t block)
{
    uint32_t holders = hsri_pool_holders(slots->pool, block);
    hsri_pool_release(slots->pool, block);
    return holders == 2 ? block : HSRI_NO_BLOCK;
}

void hsri_slots_clear(hsri_slots *slots, void (*single)(void *arg, uint32_t block), void *arg)
{
    for (size_t i = 0; i < slots->n_blocks; i++) {
        uint32_t block = release(slots, slots->blocks[i].block);
        if (block != HSRI_NO_BLOCK)
            single(arg, block);
    }
    hsri_pool_unreserve(slots->pool, slots->n_reserved);
    free(slots->blocks);
    hsri_slots_init(slots, slots->pool, slots->per_block);
}

/* ---- promises ---- */

uint64_t hsri_slots_blocks_for(const hsri_slots *slots, uint64_t n_promised)
{
    return n_promised > slots->n_free ? hsri_div_up(n_promised - slots->n_free, slots->per_block) : 0;
}

bool hsri_slots_promise(hsri_slots *slots, uint64_t n_promised)
{
    uint64_t blocks = hsri_slots_blocks_for(slots, n_promised);
    if (blocks > slots->n_reserved) {
        if (!hsri_pool_reserve(slots->pool, blocks - slots->n_reserved))
            return false;
    } else {
        hsri_pool_unreserve(slots->pool, slots->n_reserved - blocks);
    }
    slots->n_reserved = blocks;
    slots->n_promised = n_promised;
    return true;
}

/* ---- slots ---- */

static uint32_t take_bit(uint64_t *used)
{
    uint32_t word = 0;
    while (used[word] == UINT64_MAX)
        word++;
    uint32_t bit = (uint32_t)__builtin_ctzll(~used[word]);
    used[word] |= 1ull << bit;
    return word * 64 + bit;
}

static hsr_status take_block(hsri_slots *slots, hsr_error *err)
{
    if (!make_room(slots))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the block list of a session");
    uint32_t block;
    HSRI_TRY(hsri_pool_take(slots->pool, &block, err));
    slots->n_reserved--;
    size_t at = find(slots, block);
    insert(slots, at, block);
    slots->first_free = at;   /* nothing else is free */
    slots->n_free += slots->per_block;
    return HSR_OK;
}

/* The promised slot in an own block that has a free one. */
static uint32_t take_in(hsri_slots *slots, hsri_held_block *held)
{
    held->n_used++;
    slots->n_used++;
    slots->n_free--;
    slots->n_promised--;
    return held->block << 8 | take_bit(held->used);
}

static hsr_status not_promised(hsr_error *err)
{
    return hsri_fail(err, HSR_E_INTERNAL, "a page slot was taken that was not promised");
}

hsr_status hsri_slots_take(hsri_slots *slots, uint32_t *entry, hsr_error *err)
{
    if (slots->n_promised == 0)
        return not_promised(err);
    if (slots->n_free == 0)
        HSRI_TRY(take_block(slots, err));

    hsri_held_block *held = &slots->blocks[slots->first_free];
    while (held->n_used == slots->per_block || !is_own(slots, held->block))
        held++;
    slots->first_free = (size_t)(held - slots->blocks);
    *entry = take_in(slots, held);
    return HSR_OK;
}

static hsri_held_block *has_room(hsri_slots *slots, uint32_t block)
{
    size_t at = find(slots, block);
    return holds(slots, at, block) && slots->blocks[at].n_used < slots->per_block && is_own(slots, block) ? &slots->blocks[at] : NULL;
}

hsr_status hsri_slots_take_near(hsri_slots *slots, uint32_t *near, uint32_t *entry, hsr_error *err)
{
    if (slots->n_promised == 0)
        return not_promised(err);
    hsri_held_block *held = has_room(slots, *near);
    if (!held && hsri_pool_reserve(slots->pool, 1)) {
        size_t first_free = slots->first_free;
        slots->n_reserved++;
        HSRI_TRY(take_block(slots, err));
        held = &slots->blocks[slots->first_free];
        slots->first_free = hsri_min(first_free, slots->first_free);
    }
    if (held) {
        *entry = take_in(slots, held);
        hsri_slots_promise(slots, slots->n_promised);      /* a block taken early is one less to reserve */
    } else {
        HSRI_TRY(hsri_slots_take(slots, entry, err));
    }
    *near = hsri_entry_block(*entry);
    return HSR_OK;
}

uint32_t hsri_slots_drop(hsri_slots *slots, uint32_t entry)
{
    hsri_held_block *held = find_held(slots, entry);
    uint32_t slot = hsri_entry_slot(entry), block = held->block;
    size_t at = (size_t)(held - slots->blocks);
    assert(held->used[slot / 64] >> slot % 64 & 1);
    held->used[slot / 64] &= ~(1ull << slot % 64);
    held->shared[slot / 64] &= ~(1ull << slot % 64);
    held->n_used--;
    slots->n_used--;
    bool own = is_own(slots, block);
    if (own)
        slots->n_free++;
    if (held->n_used == 0) {
        if (own)
            slots->n_free -= slots->per_block;
        erase(slots, at);
        return release(slots, block);
    }
    if (own && at < slots->first_free)
        slots->first_free = at;
    return HSRI_NO_BLOCK;
}

bool hsri_slots_take_elsewhere(hsri_slots *slots, uint32_t entry, uint32_t *to)
{
    for (size_t i = slots->first_free; i < slots->n_blocks; i++) {
        hsri_held_block *held = &slots->blocks[i];
        if (held->block == hsri_entry_block(entry) || held->n_used == slots->per_block || !is_own(slots, held->block))
            continue;
        held->n_used++;
        *to = held->block << 8 | take_bit(held->used);
        slots->n_used++;
        slots->n_free--;
        return true;
    }
    return false;
}

/* ---- sharing ---- */

hsr_status hsri_slots_share(hsri_slots *from, hsri_slots *to, uint32_t entry, hsr_error *err)
{
    hsri_held_block *held = find_held(from, entry);
    uint32_t slot = hsri_entry_slot(entry), block = held->block;
    uint64_t bit = 1ull << slot % 64;
    size_t at = find(to, block);
    if (!holds(to, at, block)) {
        if (!make_room(to))
            return hsri_fail(err, HSR_E_NOMEM, "out of memory for the block list of a forked session");
        if (is_own(from, block))
            from->n_free -= from->per_block - held->n_used;
        hsri_pool_retain(from->pool, block);
        insert(to, at, block);
    }
    held->shared[slot / 64] |= bit;
    to->blocks[at].used[slot / 64] |= bit;
    to->blocks[at].shared[slot / 64] |= bit;
    to->blocks[at].n_used++;
    to->n_used++;
    return HSR_OK;
}

bool hsri_slots_is_shared(hsri_slots *slots, uint32_t entry)
{
    const hsri_held_block *held = find_held(slots, entry);
    uint32_t slot = hsri_entry_slot(entry);
    return (held->shared[slot / 64] >> slot % 64 & 1) && !is_own(slots, held->block);
}

bool hsri_slots_regain(hsri_slots *slots, uint32_t block)
{
    size_t at = find(slots, block);
    if (!holds(slots, at, block))
        return false;
    hsri_held_block *held = &slots->blocks[at];
    memset(held->shared, 0, sizeof held->shared);
    slots->n_free += slots->per_block - held->n_used;
    if (at < slots->first_free)
        slots->first_free = at;
    return true;
}
