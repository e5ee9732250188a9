/* SPDX-License-Identifier: Apache-2.0 */
/* Encoding: the work of a queue, in prepare, as early as a query needs it. Sealing: what the cache may do with a page once no
 * query can come to read it plain; by commit, when the encoding is known to be done. */
#include "kv/cache_internal.h"

hsr_status hsri_move_page(hsri_cache *cache, uint64_t page, hsri_page_event event, hsr_error *err)
{
    uint8_t *states = cache->states + page * cache->per_page;
    for (uint64_t i = 0; i < cache->per_page; i++) {
        uint8_t to = states[i];
        HSRI_TRY(hsri_page_move(&to, event, err));
    }
    for (uint64_t i = 0; i < cache->per_page; i++) {
        cache->n_in_state[states[i]]--;
        hsri_page_move(&states[i], event, NULL);
        cache->n_in_state[states[i]]++;
    }
    return HSR_OK;
}

/* ---- encoding ---- */

static hsr_status take_rows(hsri_cache *cache, hsri_store *store, uint64_t n_rows, hsr_error *err)
{
    while (hsri_store_exists(store) && store->n_rows < n_rows)
        HSRI_TRY(hsri_store_take(cache, store, err));
    return HSR_OK;
}

/* Pages that are encoded may have moved since their entries were noted. */
static void refresh_entries(hsri_cache *cache, uint64_t end)
{
    hsri_store *store = &cache->stores[HSRI_STORE_ENCODED];
    for (uint64_t i = cache->encoded.done * cache->per_page; cache->family && i < end * cache->per_page; i++) {
        uint32_t entry = hsri_body_entry(cache->opts.tiers, cache->bodies[i]);
        if (entry != store->entries[i])
            store->sent.done = hsri_min(store->sent.done, i / cache->per_page);
        store->entries[i] = entry;
    }
}

static hsr_status take_records(hsri_cache *cache, uint64_t n_segments, hsr_error *err)
{
    uint64_t n = (hsri_max(n_segments, cache->clustered.done) - cache->clustered.done) * cache->per_page;
    if (!hsri_grow((void **)&cache->clusters, &cache->clusters_cap, n, sizeof *cache->clusters))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a list of %llu segments to cluster", (unsigned long long)n);
    return take_rows(cache, &cache->stores[HSRI_STORE_CLUSTERS], n_segments, err);
}

hsr_status hsri_encode_take(hsri_cache *cache, uint64_t end, hsr_error *err)
{
    uint64_t n = (end - cache->encoded.done) * cache->per_page;
    if (!hsri_grow((void **)&cache->seals, &cache->seals_cap, n, sizeof *cache->seals))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a list of %llu pages to encode", (unsigned long long)n);
    HSRI_TRY(take_rows(cache, &cache->stores[HSRI_STORE_ENCODED], end, err));
    refresh_entries(cache, end);
    HSRI_TRY(take_rows(cache, &cache->stores[HSRI_STORE_INDEX], hsri_index_rows(&cache->opts, end), err));
    HSRI_TRY(take_rows(cache, &cache->stores[HSRI_STORE_STRIPS], hsri_strip_rows(&cache->opts, end), err));
    return take_records(cache, hsri_cluster_rows(&cache->opts, end), err);
}

static hsri_seal describe(hsri_cache *cache, uint64_t page, uint64_t i)
{
    const hsri_store *index = &cache->stores[HSRI_STORE_INDEX], *strips = &cache->stores[HSRI_STORE_STRIPS];
    const uint64_t at = page - cache->opts.sink_pages;
    uint32_t n_kv_heads = cache->shape->n_kv_heads;
    return (hsri_seal){
        .lineage = cache->opts.lineage,
        .entry = hsri_store_row(cache, &cache->stores[HSRI_STORE_PLAIN], page)[i],
        .sealed = hsri_store_row(cache, hsri_sealed_store(cache), page)[i],
        .slab = hsri_store_exists(index) ? hsri_store_row(cache, index, page / cache->opts.index.per_slab)[i] : 0,
        .strip = hsri_store_exists(strips) ? hsri_store_row(cache, strips, at / HSRI_STRIP_PAGES)[i] : 0,
        .in_strip = at % HSRI_STRIP_PAGES,
        .page = (uint32_t)page,
        .layer = (uint16_t)(i / n_kv_heads),
        .head = (uint16_t)(i % n_kv_heads),
        .kv_type = (uint16_t)cache->opts.type,
        .format = (uint16_t)cache->opts.format,
        .index_shape = cache->opts.index,
    };
}

/* A plain page with a slot of its own for its sealed form is copied there, and gets its header there. */
static void copy_plain(hsri_cache *cache, hsri_queue *q, hsri_seal *seal)
{
    const hsri_store *from = &cache->stores[HSRI_STORE_PLAIN], *to = hsri_sealed_store(cache);
    if (seal->entry != seal->sealed && hsri_kv_is_plain(cache->opts.format))
        cache->dev->copy(q, hsri_store_slot(cache, to, seal->sealed), hsri_store_slot(cache, from, seal->entry), to->slot_bytes);
    if (hsri_kv_is_plain(cache->opts.format))
        seal->entry = seal->sealed;
}

static void enqueue_clusters(hsri_cache *cache, hsri_queue *q, uint64_t n_segments)
{
    const hsri_store *store = &cache->stores[HSRI_STORE_CLUSTERS];
    uint32_t n_kv_heads = cache->shape->n_kv_heads;
    const uint64_t segment_bytes = HSRI_SEGMENT_STRIPS * cache->per_page * sizeof(uint32_t);
    size_t n = 0;
    for (uint64_t segment = cache->clustered.done; segment < n_segments; segment++)
        for (uint64_t i = 0; i < cache->per_page; i++)
            cache->clusters[n++] = (hsri_cluster){
                .index = { .buf = cache->stores[HSRI_STORE_INDEX].buf },
                .strips = { .buf = cache->stores[HSRI_STORE_STRIPS].buf, .offset = segment * segment_bytes },
                .record = hsri_store_row(cache, store, segment)[i],
                .first_page = (uint32_t)(cache->opts.sink_pages + segment * HSRI_SEGMENT_PAGES), .layer = (uint16_t)(i / n_kv_heads),
                .head = (uint16_t)(i % n_kv_heads), .index_shape = cache->opts.index,
            };
    hsri_ref list = { .buf = cache->seals_buf };
    for (size_t i = 0; i < n; i += HSRI_SEAL_ROUND) {
        uint32_t round = (uint32_t)hsri_min(n - i, HSRI_SEAL_ROUND);
        cache->dev->copy_in(q, list, cache->clusters + i, round * sizeof *cache->clusters);
        cache->dev->ops.cluster(q, &cache->shape->view, list, round);
    }
    cache->clustered.queued = hsri_max(cache->clustered.done, n_segments);
}

void hsri_encode_enqueue(hsri_cache *cache, hsri_queue *q, uint64_t end)
{
    size_t n = 0;
    /* Pages of one layer and head are neighbours: what encodes them stays in the cache. */
    for (uint64_t i = 0; i < cache->per_page; i++)
        for (uint64_t page = cache->encoded.done; page < end; page++) {
            cache->seals[n] = describe(cache, page, i);
            copy_plain(cache, q, &cache->seals[n++]);
        }
    hsri_ref list = { .buf = cache->seals_buf };
    for (size_t i = 0; i < n; i += HSRI_SEAL_ROUND) {
        uint32_t round = (uint32_t)hsri_min(n - i, HSRI_SEAL_ROUND);
        cache->dev->copy_in(q, list, cache->seals + i, round * sizeof *cache->seals);
        cache->dev->ops.seal(q, &cache->shape->view, list, round);
    }
    cache->encoded.queued = end;
    enqueue_clusters(cache, q, hsri_cluster_rows(&cache->opts, end));
}

void hsri_encode_shrink(hsri_cache *cache, uint64_t end)
{
    cache->encoded.queued = hsri_min(cache->encoded.queued, end);
    cache->encoded.done = hsri_min(cache->encoded.done, end);
    if (hsri_store_exists(&cache->stores[HSRI_STORE_ENCODED]))
        hsri_store_shrink(cache, &cache->stores[HSRI_STORE_ENCODED], end);
    if (hsri_store_exists(&cache->stores[HSRI_STORE_INDEX]))
        hsri_store_shrink(cache, &cache->stores[HSRI_STORE_INDEX], hsri_index_rows(&cache->opts, end));
    if (hsri_store_exists(&cache->stores[HSRI_STORE_STRIPS]))
        hsri_store_shrink(cache, &cache->stores[HSRI_STORE_STRIPS], hsri_strip_rows(&cache->opts, end));
    uint64_t n_segments = hsri_cluster_rows(&cache->opts, end);
    cache->clustered.queued = hsri_min(cache->clustered.queued, n_segments);
    cache->clustered.done = hsri_min(cache->clustered.done, n_segments);
    if (hsri_store_exists(&cache->stores[HSRI_STORE_CLUSTERS]))
        hsri_store_shrink(cache, &cache->stores[HSRI_STORE_CLUSTERS], n_segments);
}

/* ---- sealing ---- */

/* The plain copy goes. In a plain format the one table of all pages names the sealed copy from now on. */
static hsr_status seal_apart(hsri_cache *cache, uint64_t page, hsr_error *err)
{
    hsri_store *plain = &cache->stores[HSRI_STORE_PLAIN];
    for (uint64_t i = page * cache->per_page; cache->family && i < (page + 1) * cache->per_page; i++)
        HSRI_TRY(hsri_body_seal(cache->opts.tiers, cache->bodies[i], err));
    hsri_store_drop(cache, plain, page);
    if (hsri_read_store(&cache->opts) == HSRI_STORE_PLAIN) {
        for (uint64_t i = page * cache->per_page; i < (page + 1) * cache->per_page; i++)
            plain->entries[i] = hsri_body_entry(cache->opts.tiers, cache->bodies[i]);
        plain->sent.done = hsri_min(plain->sent.done, page);
    }
    return HSR_OK;
}

/* The window reaches back from the last position, not from the next one: after a truncate as far back as allowed, a request computes the
 * position before once more. */
hsr_status hsri_seal_pages(hsri_cache *cache, hsr_error *err)
{
    const uint64_t q = cache->committed > 0 ? (cache->committed - 1) / HSRI_PAGE_TOKENS : 0;
    uint64_t end = hsri_encoded_end(&cache->opts, q, hsri_seal_window(&cache->opts));
    for (end = hsri_min(end, cache->encoded.done); cache->sealed < end; cache->sealed++) {
        HSRI_TRY(hsri_move_page(cache, cache->sealed, HSRI_PAGE_EV_SEAL, err));
        if (hsri_seals_apart(&cache->opts))
            HSRI_TRY(seal_apart(cache, cache->sealed, err));
    }
    return HSR_OK;
}

void hsri_give_up_strips(hsri_cache *cache)
{
    const uint64_t segments = hsri_min(cache->clustered.done, hsri_cluster_rows(&cache->opts, cache->sealed));
    hsri_store_give_up(cache, &cache->stores[HSRI_STORE_STRIPS], segments * HSRI_SEGMENT_STRIPS);
}

bool hsri_strips_are_gone(const hsri_cache *cache, uint64_t page)
{
    return page - cache->opts.sink_pages < cache->stores[HSRI_STORE_STRIPS].first_row * HSRI_STRIP_PAGES;
}

hsr_status hsri_unseal_pages(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    uint64_t end = hsri_encoded_end(&cache->opts, n_tokens / HSRI_PAGE_TOKENS, cache->opts.window_pages);
    end = hsri_min(end, cache->sealed);
    if (hsri_strips_are_gone(cache, end))
        end -= (end - cache->opts.sink_pages) % HSRI_SEGMENT_PAGES;
    uint64_t n_pages = hsri_pages_of(cache->prepared);
    for (; cache->sealed > end; cache->sealed--)
        if (cache->sealed <= n_pages)
            HSRI_TRY(hsri_move_page(cache, cache->sealed - 1, HSRI_PAGE_EV_UNSEAL, err));
    return HSR_OK;
}
