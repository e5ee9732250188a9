/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/pool.h"

#include <assert.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/status.h"

#define MAX_BLOCKS (1u << 24)
/* Free blocks that stay committed, so that a session that ends while another grows costs no system call. */
#define MAX_SPARES 8u

struct hsri_pool {
    hsri_device *dev;
    uint32_t     buf;
    uint32_t     total, used, peak_used;
    uint64_t     reserved;
    uint32_t     spares[MAX_SPARES];
    uint32_t     n_spares;
    uint32_t     n_words;
    uint32_t     first_word;   /* no word before this one has a free block */
    uint64_t    *free_bits;    /* bit set: block is free; bits behind `total` are never set */
    uint32_t    *holders;
};

/* ---- creation ---- */

static void pool_free(hsri_pool *pool)
{
    free(pool->free_bits);
    free(pool->holders);
    free(pool);
}

hsr_status hsri_pool_create(hsri_device *dev, uint64_t bytes, hsri_pool **out, hsr_error *err)
{
    *out = NULL;
    uint64_t total = bytes / HSRI_BLOCK_BYTES;
    if (total < 1 || total > MAX_BLOCKS)
        return hsri_fail(err, HSR_E_INVALID, "a KV pool of %llu bytes: between 1 MiB and 16 TiB are possible", (unsigned long long)bytes);

    hsri_pool *pool = hsri_new_array(1, sizeof *pool);
    if (!pool)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a KV pool");
    pool->dev = dev;
    pool->total = (uint32_t)total;
    pool->n_words = (uint32_t)hsri_div_up(total, 64);
    pool->free_bits = hsri_new_array(pool->n_words, sizeof *pool->free_bits);
    pool->holders = hsri_new_array(pool->total, sizeof *pool->holders);
    if (!pool->free_bits || !pool->holders) {
        pool_free(pool);
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the block tables of a KV pool of %llu blocks", (unsigned long long)total);
    }
    hsr_status status = dev->reserve(dev, total * HSRI_BLOCK_BYTES, &pool->buf, err);
    if (status < 0) {
        pool_free(pool);
        return status;
    }
    for (uint32_t w = 0; w < pool->n_words; w++)
        pool->free_bits[w] = UINT64_MAX;
    if (total % 64)
        pool->free_bits[pool->n_words - 1] = (1ull << total % 64) - 1;
    *out = pool;
    return HSR_OK;
}

void hsri_pool_destroy(hsri_pool *pool)
{
    if (!pool)
        return;
    assert(pool->used == 0 && pool->reserved == 0);
    pool->dev->free(pool->dev, pool->buf);
    pool_free(pool);
}

uint32_t hsri_pool_buf(const hsri_pool *pool)
{
    return pool->buf;
}

uint64_t hsri_pool_total(const hsri_pool *pool)
{
    return pool->total;
}

/* ---- reservations ---- */

uint64_t hsri_pool_available(const hsri_pool *pool)
{
    return pool->total - pool->used - pool->reserved;
}

bool hsri_pool_reserve(hsri_pool *pool, uint64_t n)
{
    if (n > hsri_pool_available(pool))
        return false;
    pool->reserved += n;
    return true;
}

void hsri_pool_unreserve(hsri_pool *pool, uint64_t n)
{
    assert(n <= pool->reserved);
    pool->reserved -= n;
}

/* ---- blocks ---- */

/* Which spare this block is, or n_spares. */
static uint32_t find_spare(const hsri_pool *pool, uint32_t block)
{
    uint32_t i = 0;
    while (i < pool->n_spares && pool->spares[i] != block)
        i++;
    return i;
}

static void remove_spare(hsri_pool *pool, uint32_t i)
{
    pool->spares[i] = pool->spares[--pool->n_spares];
}

static void decommit(hsri_pool *pool, uint32_t block)
{
    pool->dev->decommit(pool->dev, pool->buf, (uint64_t)block * HSRI_BLOCK_BYTES, HSRI_BLOCK_BYTES);
}

/* Keep a freed block committed. Too many: the highest goes back to the system, since the lowest is taken next. */
static void add_spare(hsri_pool *pool, uint32_t block)
{
    if (pool->n_spares < MAX_SPARES) {
        pool->spares[pool->n_spares++] = block;
        return;
    }
    uint32_t highest = 0;
    for (uint32_t i = 1; i < MAX_SPARES; i++)
        if (pool->spares[i] > pool->spares[highest])
            highest = i;
    if (block < pool->spares[highest]) {
        decommit(pool, pool->spares[highest]);
        pool->spares[highest] = block;
    } else {
        decommit(pool, block);
    }
}

static uint32_t lowest_free(hsri_pool *pool)
{
    while (pool->free_bits[pool->first_word] == 0)
        pool->first_word++;
    return pool->first_word * 64 + (uint32_t)__builtin_ctzll(pool->free_bits[pool->first_word]);
}

hsr_status hsri_pool_take(hsri_pool *pool, uint32_t *out, hsr_error *err)
{
    *out = HSRI_NO_BLOCK;
    if (pool->reserved == 0)
        return hsri_fail(err, HSR_E_INTERNAL, "a KV block was taken that nobody reserved");

    uint32_t block = lowest_free(pool);
    uint32_t spare = find_spare(pool, block);
    if (spare < pool->n_spares)
        remove_spare(pool, spare);
    else
        HSRI_TRY(pool->dev->commit(pool->dev, pool->buf, (uint64_t)block * HSRI_BLOCK_BYTES, HSRI_BLOCK_BYTES, err));

    pool->free_bits[block / 64] &= ~(1ull << block % 64);
    pool->holders[block] = 1;
    pool->reserved--;
    pool->used++;
    if (pool->used > pool->peak_used)
        pool->peak_used = pool->used;
    *out = block;
    return HSR_OK;
}

void hsri_pool_retain(hsri_pool *pool, uint32_t block)
{
    assert(block < pool->total && pool->holders[block] > 0);
    pool->holders[block]++;
}

void hsri_pool_release(hsri_pool *pool, uint32_t block)
{
    assert(block < pool->total && pool->holders[block] > 0);
    if (--pool->holders[block] > 0)
        return;
    pool->free_bits[block / 64] |= 1ull << block % 64;
    if (block / 64 < pool->first_word)
        pool->first_word = block / 64;
    pool->used--;
    add_spare(pool, block);
}

uint32_t hsri_pool_holders(const hsri_pool *pool, uint32_t block)
{
    assert(block < pool->total);
    return pool->holders[block];
}

/* ---- statistics ---- */

/* Words that are all free or all used are not looked into. */
static uint64_t largest_free_run(const hsri_pool *pool)
{
    uint64_t longest = 0, run = 0;
    for (uint32_t w = pool->first_word; w < pool->n_words; w++) {
        uint64_t bits = pool->free_bits[w];
        if (bits == 0 || bits == UINT64_MAX) {
            run = bits ? run + 64 : 0;
            longest = hsri_max(longest, run);
            continue;
        }
        for (uint32_t i = 0; i < 64; i++) {
            run = bits >> i & 1 ? run + 1 : 0;
            longest = hsri_max(longest, run);
        }
    }
    return longest;
}

void hsri_pool_get_stats(const hsri_pool *pool, hsri_pool_stats *stats)
{
    *stats = (hsri_pool_stats){
        .total = pool->total,
        .used = pool->used,
        .free = pool->total - pool->used,
        .reserved = pool->reserved,
        .peak_used = pool->peak_used,
        .committed = (uint64_t)pool->used + pool->n_spares,
        .largest_free_run = largest_free_run(pool),
    };
}
