/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/cache_internal.h"

/* ---- what is shared, what is copied ---- */

static bool is_sealed(const hsri_cache *cache, uint64_t page)
{
    return page >= cache->opts.sink_pages && page < cache->sealed;
}

/* Slabs below are full of entries of sealed pages: nothing is written to them any more. */
static uint64_t shared_slabs(const hsri_cache *cache)
{
    return cache->opts.index.per_slab && cache->sealed > cache->opts.sink_pages ? cache->sealed / cache->opts.index.per_slab : 0;
}

static hsr_status share_row(hsri_cache *cache, hsri_store *from, hsri_store *to, uint64_t row, hsr_error *err)
{
    for (uint64_t i = row * cache->per_page; i < (row + 1) * cache->per_page; i++) {
        HSRI_TRY(hsri_slots_share(&from->slots, &to->slots, from->entries[i], err));
        to->entries[i] = from->entries[i];
    }
    return HSR_OK;
}

static hsr_status share_page(hsri_cache *cache, hsri_cache *fork, uint64_t page, hsr_error *err)
{
    HSRI_TRY(share_row(cache, hsri_sealed_store(cache), hsri_sealed_store(fork), page, err));
    HSRI_TRY(hsri_move_page(fork, page, HSRI_PAGE_EV_OPEN, err));
    HSRI_TRY(hsri_move_page(fork, page, HSRI_PAGE_EV_FILL, err));
    return hsri_move_page(fork, page, HSRI_PAGE_EV_SEAL, err);
}

/* The next row of a store of the fork is a copy. */
static hsr_status copy_row(hsri_cache *cache, hsri_cache *fork, hsri_store_kind kind, hsri_queue *q, uint64_t row, hsr_error *err)
{
    hsri_store *from = &cache->stores[kind], *to = &fork->stores[kind];
    to->n_rows = row;
    HSRI_TRY(hsri_store_take(fork, to, err));
    for (uint64_t i = row * cache->per_page; i < (row + 1) * cache->per_page; i++)
        cache->dev->copy(q, hsri_store_slot(fork, to, to->entries[i]), hsri_store_slot(cache, from, from->entries[i]), from->slot_bytes);
    return HSR_OK;
}

static hsr_status copy_page(hsri_cache *cache, hsri_cache *fork, hsri_queue *q, uint64_t page, hsr_error *err)
{
    HSRI_TRY(copy_row(cache, fork, HSRI_STORE_PLAIN, q, page, err));
    HSRI_TRY(hsri_move_page(fork, page, HSRI_PAGE_EV_OPEN, err));
    return page < cache->committed / HSRI_PAGE_TOKENS ? hsri_move_page(fork, page, HSRI_PAGE_EV_FILL, err) : HSR_OK;
}

/* ---- the steps of a fork ---- */

static hsr_status grow_tables(hsri_cache *fork, const hsri_cache *cache, hsr_error *err)
{
    uint64_t n_pages = hsri_pages_of(cache->committed);
    return hsri_cache_grow_tables(fork, n_pages, cache->encoded.done, err);
}

/* Promise the copies, and what this cache loses: the free slots of blocks that are shared now. */
static hsr_status promise_copies(hsri_cache *cache, hsri_cache *fork, const uint64_t *copies, hsr_error *err)
{
    uint64_t before = hsri_pool_available(cache->pool), need = 0;
    bool fits = true;
    for (int kind = 0; kind < HSRI_N_STORES; kind++) {
        hsri_store *mine = &cache->stores[kind], *theirs = &fork->stores[kind];
        if (!hsri_store_exists(mine))
            continue;
        uint64_t missing = hsri_slots_missing(cache, (hsri_store_kind)kind, cache->reserved);
        need += hsri_slots_blocks_for(&mine->slots, missing) - mine->slots.n_reserved;
        need += hsri_slots_blocks_for(&theirs->slots, copies[kind] * fork->per_page);
        fits = fits && hsri_slots_promise(&mine->slots, missing) && hsri_slots_promise(&theirs->slots, copies[kind] * fork->per_page);
    }
    if (fits)
        return HSR_OK;
    hsri_pool_stats pool;
    hsri_pool_get_stats(cache->pool, &pool);
    return hsri_fail(err, HSR_E_NOSPACE, "a fork at %llu tokens needs %llu more KV blocks of 1 MiB; %llu of %llu are available",
                     (unsigned long long)cache->committed, (unsigned long long)need, (unsigned long long)before,
                     (unsigned long long)pool.total);
}

/* Sharing comes first: it takes the free slots of shared blocks from this cache, whose reservation must then grow. */
static hsr_status share_pages(hsri_cache *cache, hsri_cache *fork, hsr_error *err)
{
    uint64_t copies[HSRI_N_STORES] = { 0 };
    for (uint64_t page = 0; page < hsri_pages_of(cache->committed); page++) {
        if (is_sealed(cache, page))
            HSRI_TRY(share_page(cache, fork, page, err));
        else
            copies[HSRI_STORE_PLAIN]++;
    }
    for (uint64_t slab = 0; slab < shared_slabs(cache); slab++)
        HSRI_TRY(share_row(cache, &cache->stores[HSRI_STORE_INDEX], &fork->stores[HSRI_STORE_INDEX], slab, err));
    copies[HSRI_STORE_INDEX] = hsri_index_rows(&cache->opts, cache->sealed) - shared_slabs(cache);
    return promise_copies(cache, fork, copies, err);
}

static hsr_status enqueue_copies(hsri_cache *cache, hsri_cache *fork, hsri_queue *q, hsr_error *err)
{
    for (uint64_t page = 0; page < hsri_pages_of(cache->committed); page++)
        if (!is_sealed(cache, page))
            HSRI_TRY(copy_page(cache, fork, q, page, err));
    for (uint64_t slab = shared_slabs(cache); slab < hsri_index_rows(&cache->opts, cache->sealed); slab++)
        HSRI_TRY(copy_row(cache, fork, HSRI_STORE_INDEX, q, slab, err));
    return HSR_OK;
}

static hsr_status copy_pages(hsri_cache *cache, hsri_cache *fork, hsri_queue *q, hsr_error *err)
{
    hsr_status status = enqueue_copies(cache, fork, q, err);
    /* Waited on even after a failure: the copies write slots that are about to be given back. */
    hsr_status waited = cache->dev->wait(q, status == HSR_OK ? err : NULL);
    return status == HSR_OK ? waited : status;
}

/* What is encoded and not sealed yet, the fork encodes again. */
static void set_marks(const hsri_cache *cache, hsri_cache *fork)
{
    fork->reserved = fork->prepared = fork->committed = cache->committed;
    fork->sealed = cache->sealed;
    fork->encoded = (hsri_progress){ cache->sealed, cache->sealed };
    fork->stores[HSRI_STORE_PLAIN].n_rows = hsri_pages_of(cache->committed);
    if (hsri_store_exists(&fork->stores[HSRI_STORE_ENCODED]))
        fork->stores[HSRI_STORE_ENCODED].n_rows = cache->sealed;
    if (hsri_store_exists(&fork->stores[HSRI_STORE_INDEX]))
        fork->stores[HSRI_STORE_INDEX].n_rows = hsri_index_rows(&cache->opts, cache->sealed);
}

hsr_status hsri_cache_fork(hsri_cache *cache, hsri_queue *q, hsri_cache **out, hsr_error *err)
{
    *out = NULL;
    if (cache->prepared != cache->committed)
        return hsri_fail(err, HSR_E_STATE, "a session cannot be forked inside a step");
    hsri_cache *fork;
    HSRI_TRY(hsri_cache_create(cache->dev, cache->pool, cache->shape, &cache->opts, &fork, err));
    hsri_lineage_join(fork, cache);

    hsr_status status = grow_tables(fork, cache, err);
    if (status == HSR_OK)
        status = share_pages(cache, fork, err);
    if (status == HSR_OK)
        status = copy_pages(cache, fork, q, err);
    if (status < 0) {
        hsri_cache_destroy(fork);
        return status;
    }
    set_marks(cache, fork);
    *out = fork;
    return HSR_OK;
}
