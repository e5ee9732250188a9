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

/* So it is with strips below. With clusters these come and go, and what a cache gives up must be its own: a fork gets copies of all. */
static uint64_t shared_strips(const hsri_cache *cache)
{
    if (hsri_store_exists(&cache->stores[HSRI_STORE_CLUSTERS]))
        return cache->stores[HSRI_STORE_STRIPS].first_row;
    return cache->opts.index.code_bytes ? (cache->sealed - cache->opts.sink_pages) / HSRI_STRIP_PAGES : 0;
}

/* Records of segments whose pages are all sealed. */
static uint64_t shared_records(const hsri_cache *cache)
{
    return hsri_min(hsri_cluster_rows(&cache->opts, cache->sealed), cache->clustered.done);
}

static hsr_status share_rows(hsri_cache *cache, hsri_store *from, hsri_store *to, uint64_t row, uint64_t end, hsr_error *err)
{
    for (uint64_t i = row * cache->per_page; i < end * cache->per_page; i++) {
        HSRI_TRY(hsri_slots_share(&from->slots, &to->slots, from->entries[i], err));
        to->entries[i] = from->entries[i];
    }
    return HSR_OK;
}

/* The fork refers to the same bodies. */
static void share_bodies(hsri_cache *cache, hsri_cache *fork, uint64_t page)
{
    hsri_store *from = &cache->stores[hsri_read_store(&cache->opts)], *to = &fork->stores[hsri_read_store(&cache->opts)];
    for (uint64_t i = page * cache->per_page; i < (page + 1) * cache->per_page; i++) {
        hsri_body_ref(cache->opts.tiers, cache->bodies[i]);
        fork->bodies[i] = cache->bodies[i];
        to->entries[i] = from->entries[i];
    }
    fork->stores[HSRI_STORE_ENCODED].n_rows = page + 1;
}

static hsr_status share_page(hsri_cache *cache, hsri_cache *fork, uint64_t page, hsr_error *err)
{
    if (cache->family)
        share_bodies(cache, fork, page);
    else
        HSRI_TRY(share_rows(cache, hsri_sealed_store(cache), hsri_sealed_store(fork), page, page + 1, err));
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

/* What this cache has to be promised again, having lost the free slots of blocks that are shared now, and what the copies need. */
typedef struct promises {
    uint64_t mine[HSRI_N_STORES], copies[HSRI_N_STORES];
} promises;

static bool has_slots(const hsri_cache *cache, int kind)
{
    return hsri_store_exists(&cache->stores[kind]) && !(cache->family && kind == HSRI_STORE_ENCODED);
}

/* Blocks to be reserved for that. */
static uint64_t blocks_needed(hsri_cache *cache, hsri_cache *fork, promises *p)
{
    uint64_t need = 0;
    for (int kind = 0; kind < HSRI_N_STORES; kind++) {
        if (!has_slots(cache, kind))
            continue;
        hsri_slots *mine = &cache->stores[kind].slots;
        p->mine[kind] = hsri_slots_missing(cache, (hsri_store_kind)kind, cache->reserved);
        need += hsri_slots_blocks_for(mine, p->mine[kind]) - mine->n_reserved;
        need += hsri_slots_blocks_for(&fork->stores[kind].slots, p->copies[kind]);
    }
    return need;
}

static hsr_status promise_copies(hsri_cache *cache, hsri_cache *fork, promises *p, hsr_error *err)
{
    uint64_t need = blocks_needed(cache, fork, p), available = hsri_pool_available(cache->pool);
    hsr_status status = HSR_OK;
    if (need > available)
        status = cache->family ? hsri_tiers_make_available(cache->opts.tiers, need, err) : HSR_E_NOSPACE;
    if (status == HSR_E_NOSPACE)
        return hsri_fail(err, HSR_E_NOSPACE, "a fork at %llu tokens needs %llu more KV blocks of 1 MiB; %llu of %llu are available",
                         (unsigned long long)cache->committed, (unsigned long long)need, (unsigned long long)available,
                         (unsigned long long)hsri_pool_total(cache->pool));
    HSRI_TRY(status);
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        if (has_slots(cache, kind) && !(hsri_slots_promise(&cache->stores[kind].slots, p->mine[kind]) &&
                                        hsri_slots_promise(&fork->stores[kind].slots, p->copies[kind])))
            return hsri_fail(err, HSR_E_INTERNAL, "blocks that are there cannot be promised");
    return HSR_OK;
}

/* Sharing comes first: it takes the free slots of shared blocks from this cache, whose reservation must then grow. */
static hsr_status share_pages(hsri_cache *cache, hsri_cache *fork, hsr_error *err)
{
    promises p = { 0 };
    for (uint64_t page = 0; page < hsri_pages_of(cache->committed); page++) {
        if (is_sealed(cache, page))
            HSRI_TRY(share_page(cache, fork, page, err));
        else
            p.copies[HSRI_STORE_PLAIN] += cache->per_page;
    }
    hsri_store *from = cache->stores, *to = fork->stores;
    HSRI_TRY(share_rows(cache, &from[HSRI_STORE_INDEX], &to[HSRI_STORE_INDEX], 0, shared_slabs(cache), err));
    HSRI_TRY(share_rows(cache, &from[HSRI_STORE_STRIPS], &to[HSRI_STORE_STRIPS], from[HSRI_STORE_STRIPS].first_row,
                        shared_strips(cache), err));
    HSRI_TRY(share_rows(cache, &from[HSRI_STORE_CLUSTERS], &to[HSRI_STORE_CLUSTERS], 0, shared_records(cache), err));
    p.copies[HSRI_STORE_INDEX] = (hsri_index_rows(&cache->opts, cache->sealed) - shared_slabs(cache)) * cache->per_page;
    p.copies[HSRI_STORE_STRIPS] = (hsri_strip_rows(&cache->opts, cache->sealed) - shared_strips(cache)) * cache->per_page;
    return promise_copies(cache, fork, &p, err);
}

static hsr_status enqueue_copies(hsri_cache *cache, hsri_cache *fork, hsri_queue *q, hsr_error *err)
{
    for (uint64_t page = 0; page < hsri_pages_of(cache->committed); page++)
        if (!is_sealed(cache, page))
            HSRI_TRY(copy_page(cache, fork, q, page, err));
    for (uint64_t slab = shared_slabs(cache); slab < hsri_index_rows(&cache->opts, cache->sealed); slab++)
        HSRI_TRY(copy_row(cache, fork, HSRI_STORE_INDEX, q, slab, err));
    for (uint64_t strip = shared_strips(cache); strip < hsri_strip_rows(&cache->opts, cache->sealed); strip++)
        HSRI_TRY(copy_row(cache, fork, HSRI_STORE_STRIPS, q, strip, err));
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
    fork->stores[HSRI_STORE_STRIPS].n_rows = hsri_strip_rows(&cache->opts, cache->sealed);
    fork->stores[HSRI_STORE_STRIPS].first_row = cache->stores[HSRI_STORE_STRIPS].first_row;
    fork->clustered = (hsri_progress){ shared_records(cache), shared_records(cache) };
    fork->stores[HSRI_STORE_CLUSTERS].n_rows = shared_records(cache);
}

hsr_status hsri_cache_fork(hsri_cache *cache, hsri_queue *q, hsri_cache **out, hsr_error *err)
{
    *out = NULL;
    if (cache->prepared != cache->committed)
        return hsri_fail(err, HSR_E_STATE, "a session cannot be forked inside a step");
    hsri_cache *fork;
    HSRI_TRY(hsri_cache_create_member(cache, &fork, err));

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
