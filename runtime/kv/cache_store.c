/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/cache_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- creation ---- */

hsr_status hsri_store_init(hsri_cache *cache, hsri_store_kind kind, uint32_t slot_bytes, uint64_t first_row, hsr_error *err)
{
    hsri_store *store = &cache->stores[kind];
    store->slot_bytes = slot_bytes;
    store->n_rows = first_row;
    hsri_slots_init(&store->slots, cache->pool, HSRI_BLOCK_BYTES / slot_bytes);
    store->cow.old = hsri_new_array(cache->per_page, sizeof *store->cow.old);
    if (!store->cow.old)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a KV cache");
    return HSR_OK;
}

void hsri_store_free(hsri_cache *cache, hsri_store *store)
{
    if (store->buf)
        cache->dev->free(cache->dev, store->buf);
    free(store->entries);
    free(store->cow.old);
}

hsr_status hsri_store_grow(hsri_cache *cache, hsri_store *store, uint64_t n_rows, hsr_error *err)
{
    uint64_t need = n_rows * cache->per_page;
    if (!hsri_grow((void **)&store->entries, &store->entries_cap, need, sizeof *store->entries))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a page table of %llu entries", (unsigned long long)need);
    if (need <= store->buf_cap)
        return HSR_OK;

    uint32_t buf;
    HSRI_TRY(cache->dev->alloc(cache->dev, store->entries_cap * sizeof *store->entries, &buf, err));
    if (store->buf)
        cache->dev->free(cache->dev, store->buf);
    store->buf = buf;
    store->buf_cap = store->entries_cap;
    store->sent = (hsri_progress){ 0 };
    return HSR_OK;
}

/* ---- the lineage ---- */

void hsri_give_to_single(void *arg, uint32_t block)
{
    hsri_cache *cache = arg;
    for (hsri_cache *sibling = cache->next; sibling != cache; sibling = sibling->next)
        for (int kind = 0; kind < HSRI_N_STORES; kind++)
            if (hsri_store_exists(&sibling->stores[kind]) && hsri_slots_regain(&sibling->stores[kind].slots, block))
                return;
}

void hsri_store_drop_slot(hsri_cache *cache, hsri_store *store, uint32_t entry)
{
    uint32_t block = hsri_slots_drop(&store->slots, entry);
    if (block != HSRI_NO_BLOCK)
        hsri_give_to_single(cache, block);
}

/* ---- rows of bodies ---- */

static bool has_bodies(const hsri_cache *cache, const hsri_store *store)
{
    return cache->family && store == &cache->stores[HSRI_STORE_ENCODED];
}

static void drop_bodies(hsri_cache *cache, uint64_t row, uint64_t n)
{
    for (uint64_t i = row * cache->per_page; i < row * cache->per_page + n; i++) {
        hsri_body_unref(cache->opts.tiers, cache->bodies[i]);
        cache->bodies[i] = HSRI_NO_BODY;
    }
}

static hsr_status take_bodies(hsri_cache *cache, hsri_store *store, hsr_error *err)
{
    uint32_t *entries = hsri_store_row(cache, store, store->n_rows), *bodies = cache->bodies + store->n_rows * cache->per_page;
    uint32_t n_kv_heads = cache->shape->n_kv_heads;
    for (uint64_t i = 0; i < cache->per_page; i++) {
        hsr_status status = hsri_body_create(cache->family, (uint32_t)store->n_rows, (uint32_t)(i / n_kv_heads), (uint32_t)(i % n_kv_heads),
                                             &bodies[i], err);
        if (status < 0) {
            drop_bodies(cache, store->n_rows, i);
            return status;
        }
        cache->bodies_promised--;
        entries[i] = hsri_body_entry(cache->opts.tiers, bodies[i]);
    }
    store->n_rows++;
    return HSR_OK;
}

/* ---- rows of slots ---- */

hsr_status hsri_store_take(hsri_cache *cache, hsri_store *store, hsr_error *err)
{
    if (has_bodies(cache, store))
        return take_bodies(cache, store, err);
    uint32_t *entries = hsri_store_row(cache, store, store->n_rows);
    for (uint64_t i = 0; i < cache->per_page; i++) {
        hsr_status status = hsri_slots_take(&store->slots, &entries[i], err);
        if (status < 0) {
            while (i-- > 0)
                hsri_store_drop_slot(cache, store, entries[i]);
            return status;
        }
    }
    store->n_rows++;
    return HSR_OK;
}

void hsri_store_drop(hsri_cache *cache, hsri_store *store, uint64_t row)
{
    if (has_bodies(cache, store)) {
        drop_bodies(cache, row, cache->per_page);
        return;
    }
    const uint32_t *entries = hsri_store_row(cache, store, row);
    for (uint64_t i = 0; i < cache->per_page; i++)
        hsri_store_drop_slot(cache, store, entries[i]);
}

void hsri_store_shrink(hsri_cache *cache, hsri_store *store, uint64_t n_rows)
{
    for (; store->n_rows > n_rows; store->n_rows--)
        if (store->n_rows > store->first_row)
            hsri_store_drop(cache, store, store->n_rows - 1);
    store->first_row = hsri_min(store->first_row, n_rows);
    store->sent.done = hsri_min(store->sent.done, n_rows);
    store->sent.queued = store->sent.done;
}

/* Their entries name no slot from then on, so that a read of what is gone shows. */
void hsri_store_give_up(hsri_cache *cache, hsri_store *store, uint64_t first_row)
{
    if (store->first_row < first_row)
        store->sent.done = hsri_min(store->sent.done, store->first_row);
    for (; store->first_row < first_row; store->first_row++) {
        hsri_store_drop(cache, store, store->first_row);
        memset(hsri_store_row(cache, store, store->first_row), 0xff, cache->per_page * sizeof(uint32_t));
    }
}

void hsri_store_send(hsri_cache *cache, hsri_store *store, hsri_queue *q)
{
    uint64_t first = store->sent.done * cache->per_page, n = store->n_rows * cache->per_page;
    hsri_ref to = { .buf = store->buf, .offset = first * sizeof *store->entries };
    if (n > first && store->buf)
        cache->dev->copy_in(q, to, store->entries + first, (n - first) * sizeof *store->entries);
    store->sent.queued = hsri_max(store->n_rows, store->sent.done);
}

/* ---- copy on write ---- */

void hsri_cow_mark(hsri_cache *cache, hsri_store *store, uint64_t row)
{
    const uint32_t *entries = hsri_store_row(cache, store, row);
    store->cow.stage = HSRI_COW_NONE;
    store->cow.row = row;
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (hsri_slots_is_shared(&store->slots, entries[i]))
            store->cow.stage = HSRI_COW_DUE;
}

hsr_status hsri_cow_take(hsri_cache *cache, hsri_store *store, hsr_error *err)
{
    uint32_t *entries = hsri_store_row(cache, store, store->cow.row);
    memcpy(store->cow.old, entries, cache->per_page * sizeof *entries);
    store->cow.stage = HSRI_COW_QUEUED;
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (hsri_slots_is_shared(&store->slots, entries[i]))
            HSRI_TRY(hsri_slots_take(&store->slots, &entries[i], err));
    return HSR_OK;
}

void hsri_cow_enqueue(hsri_cache *cache, hsri_store *store, hsri_queue *q)
{
    const uint32_t *entries = hsri_store_row(cache, store, store->cow.row), *old = store->cow.old;
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (entries[i] != old[i])
            cache->dev->copy(q, hsri_store_slot(cache, store, entries[i]), hsri_store_slot(cache, store, old[i]), store->slot_bytes);
    store->sent.done = hsri_min(store->sent.done, store->cow.row);
}

void hsri_cow_undo(hsri_cache *cache, hsri_store *store)
{
    if (store->cow.stage != HSRI_COW_QUEUED)
        return;
    uint32_t *entries = hsri_store_row(cache, store, store->cow.row);
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (entries[i] != store->cow.old[i]) {
            hsri_store_drop_slot(cache, store, entries[i]);
            entries[i] = store->cow.old[i];
        }
    store->cow.stage = HSRI_COW_DUE;
}

void hsri_cow_finish(hsri_cache *cache, hsri_store *store)
{
    if (store->cow.stage != HSRI_COW_QUEUED)
        return;
    const uint32_t *entries = hsri_store_row(cache, store, store->cow.row);
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (entries[i] != store->cow.old[i])
            hsri_store_drop_slot(cache, store, store->cow.old[i]);
    store->cow.stage = HSRI_COW_NONE;
}

/* ---- promises ---- */

/* Of so many rows at a time, which may exist beside those that do? */
static uint64_t room_in_ring(uint64_t ring, uint64_t live) { return ring > live ? ring - live : 0; }

static uint64_t rows_missing(const hsri_cache *cache, hsri_store_kind kind, uint64_t reserved)
{
    const hsri_cache_opts *opts = &cache->opts;
    uint64_t have = cache->stores[kind].n_rows, want = 0, limit = UINT64_MAX;

    if (kind == HSRI_STORE_PLAIN) {
        want = hsri_pages_of(reserved);
        limit = room_in_ring(hsri_ring_pages(opts), have - (hsri_seals_apart(opts) ? cache->sealed - opts->sink_pages : 0));
    } else if (reserved > cache->committed) {
        want = hsri_encoded_end_of(opts, reserved);
        if (kind == HSRI_STORE_INDEX)
            want = hsri_index_rows(opts, want);
        if (kind == HSRI_STORE_STRIPS) {
            want = hsri_strip_rows(opts, want);
            limit = room_in_ring(hsri_ring_strips(opts), have - cache->stores[kind].first_row);
        }
        if (kind == HSRI_STORE_CLUSTERS)
            want = hsri_cluster_rows(opts, want);
    }
    return want > have ? hsri_min(want - have, limit) : 0;
}

uint64_t hsri_slots_missing(hsri_cache *cache, hsri_store_kind kind, uint64_t reserved)
{
    hsri_store *store = &cache->stores[kind];
    uint64_t missing = rows_missing(cache, kind, reserved) * cache->per_page;
    if (store->cow.stage == HSRI_COW_DUE && reserved > cache->committed) {
        const uint32_t *entries = hsri_store_row(cache, store, store->cow.row);
        for (uint64_t i = 0; i < cache->per_page; i++)
            missing += hsri_slots_is_shared(&store->slots, entries[i]);
    }
    return missing;
}

hsr_status hsri_refuse(const hsri_cache *cache, uint64_t n_tokens, uint64_t blocks, hsr_error *err)
{
    hsri_pool_stats pool;
    hsri_pool_get_stats(cache->pool, &pool);
    return hsri_fail(err, HSR_E_NOSPACE, "%llu tokens need %llu more KV blocks of 1 MiB; %llu of %llu are available",
                     (unsigned long long)n_tokens, (unsigned long long)blocks, (unsigned long long)(pool.free - pool.reserved),
                     (unsigned long long)pool.total);
}

/* Blocks of this cache's own stores. With tiers, those that pages hold in excess are asked for first. */
static hsr_status promise_slots(hsri_cache *cache, uint64_t reserved, hsr_error *err)
{
    uint64_t missing[HSRI_N_STORES] = { 0 }, need = 0, held = 0, available;
    bool kept = true;
    for (int kind = 0; kind < HSRI_N_STORES; kind++) {
        hsri_store *store = &cache->stores[kind];
        if (!hsri_store_exists(store) || has_bodies(cache, store))
            continue;
        missing[kind] = hsri_slots_missing(cache, (hsri_store_kind)kind, reserved);
        need += hsri_slots_blocks_for(&store->slots, missing[kind]);
        held += store->slots.n_reserved;
    }
    available = hsri_pool_available(cache->pool);
    if (need > held + available) {
        hsr_status status = cache->family ? hsri_tiers_make_available(cache->opts.tiers, need - held, err) : HSR_E_NOSPACE;
        if (status < 0)
            return status == HSR_E_NOSPACE ? hsri_refuse(cache, reserved, need - held, err) : status;
    }
    /* Those that shrink first, so that the others find their blocks. */
    for (int grow = 0; grow < 2; grow++)
        for (int kind = 0; kind < HSRI_N_STORES; kind++) {
            hsri_store *store = &cache->stores[kind];
            if (hsri_store_exists(store) && (hsri_slots_blocks_for(&store->slots, missing[kind]) > store->slots.n_reserved) == grow)
                kept &= hsri_slots_promise(&store->slots, missing[kind]);
        }
    assert(kept);
    (void)kept;
    return HSR_OK;
}

hsr_status hsri_promise(hsri_cache *cache, uint64_t reserved, hsr_error *err)
{
    HSRI_TRY(promise_slots(cache, reserved, err));
    if (!cache->family)
        return HSR_OK;
    uint64_t missing = hsri_slots_missing(cache, HSRI_STORE_ENCODED, reserved);
    hsr_status status = hsri_family_promise(cache->family, cache->bodies_promised, missing, err);
    if (status < 0) {
        promise_slots(cache, cache->reserved, NULL);
        return status;
    }
    cache->bodies_promised = missing;
    return HSR_OK;
}

void hsri_settle(hsri_cache *cache)
{
    hsri_cache *member = cache;
    do {
        hsr_status kept = hsri_promise(member, member->reserved, NULL);
        assert(kept == HSR_OK);
        (void)kept;
        member = member->next;
    } while (member != cache);
}
