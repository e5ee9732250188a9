/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/cache_image.h"

#include <stddef.h>
#include <string.h>

#include "kv/cache_internal.h"

/* ---- sizes ---- */

static uint32_t slot_bytes(const hsri_kv_shape *shape, const hsri_cache_opts *opts, hsri_image_part part)
{
    if (part == HSRI_IMAGE_INDEX)
        return HSRI_SLAB_BYTES;
    if (part == HSRI_IMAGE_STRIPS)
        return hsri_strip_slot_bytes(&opts->index);
    if (part == HSRI_IMAGE_CLUSTERS)
        return hsri_cluster_slot_bytes(&opts->index);
    return hsri_kv_slot_bytes(part == HSRI_IMAGE_PLAIN ? opts->type : opts->format, shape->head_dim);
}

/* Those before have been given up, or will be. */
static uint64_t first_strip(const hsri_cache_opts *opts, uint64_t sealed) { return hsri_cluster_rows(opts, sealed) * HSRI_SEGMENT_STRIPS; }

hsr_status hsri_image_describe(const hsri_kv_shape *shape, const hsri_cache_opts *opts, uint64_t n_tokens, uint64_t sealed,
                               hsri_image *image, hsr_error *err)
{
    const uint64_t full = n_tokens / HSRI_PAGE_TOKENS, sink = opts->sink_pages, n_sealed = sealed - sink;
    *image = (hsri_image){ .n_tokens = n_tokens, .sealed = sealed, .per_row = (uint64_t)shape->n_layers * shape->n_kv_heads };
    /* Nothing that the next query reads plain may be sealed, and the plain pages are at most the ring. */
    if (n_tokens > UINT32_MAX || sealed < sink || (n_sealed > 0 && sealed > hsri_encoded_end(opts, full, opts->window_pages)) ||
        hsri_pages_of(n_tokens) - n_sealed > hsri_ring_pages(opts))
        return hsri_fail(err, HSR_E_FORMAT, "%llu tokens cannot have %llu sealed pages with these options", (unsigned long long)n_tokens,
                         (unsigned long long)(sealed < sink ? sealed : n_sealed));
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++)
        image->slot_bytes[part] = slot_bytes(shape, opts, (hsri_image_part)part);
    image->rows[HSRI_IMAGE_PLAIN] = hsri_pages_of(n_tokens) - n_sealed;
    image->rows[HSRI_IMAGE_INDEX] = hsri_index_rows(opts, sealed);
    image->rows[HSRI_IMAGE_STRIPS] = hsri_strip_rows(opts, sealed) - first_strip(opts, sealed);
    image->rows[HSRI_IMAGE_CLUSTERS] = hsri_cluster_rows(opts, sealed);
    image->rows[HSRI_IMAGE_SEALED] = n_sealed;
    return HSR_OK;
}

uint64_t hsri_image_page(const hsri_cache_opts *opts, const hsri_image *image, hsri_image_part part, uint64_t row)
{
    if (part == HSRI_IMAGE_SEALED)
        return opts->sink_pages + row;
    return row < opts->sink_pages ? row : row + image->sealed - opts->sink_pages;
}

hsr_status hsri_cache_describe_image(const hsri_cache *cache, hsri_image *image, uint32_t *chunk_tokens, hsr_error *err)
{
    *chunk_tokens = cache->opts.chunk_tokens;
    if (cache->prepared != cache->committed)
        return hsri_fail(err, HSR_E_STATE, "a session cannot be saved inside a step");
    return hsri_image_describe(cache->shape, &cache->opts, cache->committed, cache->sealed, image, err);
}

static hsri_store *store_of(hsri_cache *cache, hsri_image_part part)
{
    static const hsri_store_kind kinds[] = { HSRI_STORE_PLAIN, HSRI_STORE_INDEX, HSRI_STORE_STRIPS, HSRI_STORE_CLUSTERS };
    return part == HSRI_IMAGE_SEALED ? hsri_sealed_store(cache) : &cache->stores[kinds[part]];
}

static bool is_of_index(hsri_image_part part) { return part >= HSRI_IMAGE_INDEX && part <= HSRI_IMAGE_CLUSTERS; }

static uint64_t store_row(const hsri_cache *cache, const hsri_image *image, hsri_image_part part, uint64_t row)
{
    if (part == HSRI_IMAGE_STRIPS)
        return first_strip(&cache->opts, image->sealed) + row;
    return is_of_index(part) ? row : hsri_image_page(&cache->opts, image, part, row);
}

/* ---- reading: bytes without meaning ---- */

/* Positions of the page from `n` on: K is [d/w][64][w] of numbers of 4 / w bytes, V [64/w][d][w]. */
static void clear_tail(hsri_kv_type type, uint32_t d, uint32_t n, uint8_t *slot)
{
    const uint32_t w = type == HSRI_KV_TYPE_F32 ? 1 : 2, size = 4 / w;
    uint8_t *k = slot + HSRI_PAGE_HEADER_BYTES, *v = k + (size_t)HSRI_PAGE_TOKENS * d * size;
    for (uint32_t i = 0; i < d / w; i++)
        memset(k + ((size_t)i * HSRI_PAGE_TOKENS + n) * 4, 0, (HSRI_PAGE_TOKENS - n) * 4);
    for (uint32_t i = 0; i < d && n % w; i++)
        memset(v + ((size_t)n / w * d + i) * 4 + n % w * size, 0, (w - n % w) * size);
    for (uint32_t t = n + n % w; t < HSRI_PAGE_TOKENS; t += w)
        memset(v + (size_t)t / w * d * 4, 0, (size_t)d * 4);
}

static void clear_plain(const hsri_cache *cache, uint64_t page, uint8_t *slot)
{
    const uint32_t d = cache->shape->head_dim;
    const uint64_t bytes = hsri_page_bytes(cache->opts.type, d);
    memset(slot, 0, HSRI_PAGE_HEADER_BYTES);    /* written when the page is sealed */
    memset(slot + bytes, 0, hsri_kv_slot_bytes(cache->opts.type, d) - bytes);
    if (page == cache->committed / HSRI_PAGE_TOKENS)
        clear_tail(cache->opts.type, d, (uint32_t)(cache->committed % HSRI_PAGE_TOKENS), slot);
}

/* Lineages count sessions of one engine; the checksum is of the bytes with the lineage. */
static void clear_sealed(const hsri_cache *cache, uint8_t *slot)
{
    const uint32_t d = cache->shape->head_dim;
    const uint64_t bytes = hsri_page_bytes(cache->opts.format, d);
    memset(slot + offsetof(hsri_page_header, crc32c), 0, sizeof(uint32_t));
    memset(slot + offsetof(hsri_page_header, lineage), 0, sizeof(uint64_t));
    memset(slot + bytes, 0, hsri_kv_slot_bytes(cache->opts.format, d) - bytes);
}

/* Entries of pages that are not sealed are made again. */
static void clear_slab(const hsri_cache *cache, uint64_t row, uint8_t *slab)
{
    const hsri_index_shape *index = &cache->opts.index;
    const uint64_t page = row * index->per_slab;
    const uint64_t first = hsri_min(cache->opts.sink_pages > page ? cache->opts.sink_pages - page : 0, index->per_slab);
    const uint64_t end = hsri_max(first, hsri_min(cache->sealed > page ? cache->sealed - page : 0, index->per_slab));
    memset(slab, 0, first * index->entry_bytes);
    memset(slab + end * index->entry_bytes, 0, HSRI_SLAB_BYTES - end * index->entry_bytes);
}

static void clear_strip(const hsri_cache *cache, uint64_t row, uint8_t *strip)
{
    const uint64_t page = cache->opts.sink_pages + row * HSRI_STRIP_PAGES;
    const uint64_t used = hsri_min(cache->sealed - page, HSRI_STRIP_PAGES) * cache->opts.index.code_bytes;
    memset(strip + used, 0, hsri_strip_slot_bytes(&cache->opts.index) - used);
}

static void clear_record(const hsri_cache *cache, uint8_t *record)
{
    const uint32_t used = hsri_cluster_layout_of(&cache->opts.index).bytes;
    memset(record + used, 0, hsri_cluster_slot_bytes(&cache->opts.index) - used);
}

static void clear_row(const hsri_cache *cache, const hsri_image *image, hsri_image_part part, uint64_t row, uint8_t *out)
{
    for (uint64_t i = 0; i < image->per_row; i++, out += image->slot_bytes[part]) {
        if (part == HSRI_IMAGE_PLAIN)
            clear_plain(cache, hsri_image_page(&cache->opts, image, part, row), out);
        else if (part == HSRI_IMAGE_SEALED)
            clear_sealed(cache, out);
        else if (part == HSRI_IMAGE_STRIPS)
            clear_strip(cache, store_row(cache, image, part, row), out);
        else if (part == HSRI_IMAGE_CLUSTERS)
            clear_record(cache, out);
        else
            clear_slab(cache, row, out);
    }
}

/* ---- reading ---- */

static hsr_status read_slots(hsri_cache *cache, hsri_queue *q, hsri_store *store, uint64_t row, uint8_t *out, hsr_error *err)
{
    const uint32_t *entries = hsri_store_row(cache, store, row);
    for (uint64_t i = 0; i < cache->per_page; i++)
        cache->dev->copy_out(q, out + i * store->slot_bytes, hsri_store_slot(cache, store, entries[i]), store->slot_bytes);
    return cache->dev->wait(q, err);
}

static hsr_status copy_bodies(hsri_cache *cache, hsri_queue *q, const uint32_t *bodies, uint64_t n, uint8_t *out, hsr_error *err)
{
    const hsri_store *store = &cache->stores[HSRI_STORE_ENCODED];
    size_t lost;
    HSRI_TRY(hsri_bodies_await(cache->opts.tiers, bodies, n, &lost, err));
    for (uint64_t i = 0; i < n; i++) {
        hsri_ref slot = hsri_store_slot(cache, store, hsri_body_entry(cache->opts.tiers, bodies[i]));
        cache->dev->copy_out(q, out + i * store->slot_bytes, slot, store->slot_bytes);
    }
    return cache->dev->wait(q, err);
}

/* Sealed pages that may have left memory: as many at a time as may be held. */
static hsr_status read_bodies(hsri_cache *cache, hsri_queue *q, const uint32_t *bodies, uint64_t count, uint8_t *out, hsr_error *err)
{
    hsri_tiers *tiers = cache->opts.tiers;
    hsr_status status = HSR_OK;
    for (uint64_t i = 0, n; i < count && status >= 0; i += n) {
        uint64_t pinned = 0;
        n = hsri_min(count - i, hsri_max(hsri_tiers_pin_room(tiers, cache->opts.format), 1));
        while (pinned < n && status >= 0) {
            status = hsri_body_pin(tiers, bodies[i + pinned], HSRI_FETCH_DEMAND, true, err);
            pinned += status >= 0;
        }
        if (status >= 0)
            status = copy_bodies(cache, q, bodies + i, n, out + i * cache->stores[HSRI_STORE_ENCODED].slot_bytes, err);
        while (pinned > 0)
            hsri_body_unpin(tiers, bodies[i + --pinned]);
    }
    return status;
}

hsr_status hsri_cache_read_page(hsri_cache *cache, hsri_queue *q, uint32_t page, uint32_t layer, uint32_t head, uint8_t *out,
                                hsri_kv_type *format, hsr_error *err)
{
    const hsri_cache_opts *opts = &cache->opts;
    const uint64_t at = (uint64_t)layer * cache->shape->n_kv_heads + head;
    const uint32_t next = (uint32_t)(cache->committed / HSRI_PAGE_TOKENS);
    /* At the end of a page and after a fork, pages that the next query reads encoded are so only in the next step. */
    const bool plain = !hsri_store_exists(&cache->stores[HSRI_STORE_ENCODED]) || page >= cache->encoded.done ||
                       hsri_page_is_plain(page, next, opts->sink_pages, opts->window_pages);
    const hsri_store *store = &cache->stores[plain ? HSRI_STORE_PLAIN : HSRI_STORE_ENCODED];
    *format = plain ? opts->type : opts->format;
    if (!plain && cache->family)
        return read_bodies(cache, q, cache->bodies + page * cache->per_page + at, 1, out, err);
    cache->dev->copy_out(q, out, hsri_store_slot(cache, store, hsri_store_row(cache, store, page)[at]), store->slot_bytes);
    return cache->dev->wait(q, err);
}

hsr_status hsri_cache_read_image(hsri_cache *cache, hsri_queue *q, const hsri_image *image, hsri_image_part part, uint64_t row,
                                 uint8_t *out, hsr_error *err)
{
    const uint64_t at = store_row(cache, image, part, row);
    if (part == HSRI_IMAGE_SEALED && cache->family)
        HSRI_TRY(read_bodies(cache, q, cache->bodies + at * cache->per_page, cache->per_page, out, err));
    else
        HSRI_TRY(read_slots(cache, q, store_of(cache, part), at, out, err));
    clear_row(cache, image, part, row, out);
    return HSR_OK;
}

/* ---- writing ---- */

hsr_status hsri_cache_expect_image(hsri_cache *cache, uint64_t n_tokens, uint64_t sealed, uint32_t chunk_tokens, hsri_image *image,
                                   hsr_error *err)
{
    cache->opts.chunk_tokens = (uint32_t)hsri_max(cache->opts.chunk_tokens, chunk_tokens);
    return hsri_image_describe(cache->shape, &cache->opts, n_tokens, sealed, image, err);
}

hsr_status hsri_cache_begin_image(hsri_cache *cache, const hsri_image *image, hsr_error *err)
{
    /* After a truncate to the end of a page, one page more is sealed than so many tokens ask for. */
    uint64_t n = image->n_tokens;
    n += image->sealed > cache->opts.sink_pages && hsri_encoded_end_of(&cache->opts, n) < image->sealed;
    return hsri_cache_admit(cache, n, err);
}

/* A row of slots that are the store's, in their place in the table. */
static hsr_status fill_row(hsri_cache *cache, hsri_queue *q, hsri_store *store, uint64_t row, const uint8_t *bytes, hsr_error *err)
{
    store->n_rows = row;
    HSRI_TRY(hsri_store_take(cache, store, err));
    const uint32_t *entries = hsri_store_row(cache, store, row);
    for (uint64_t i = 0; i < cache->per_page; i++)
        cache->dev->copy_in(q, hsri_store_slot(cache, store, entries[i]), bytes + i * store->slot_bytes, store->slot_bytes);
    return cache->dev->wait(q, err);
}

static hsr_status add_page(hsri_cache *cache, const hsri_image *image, uint64_t page, hsr_error *err)
{
    HSRI_TRY(hsri_move_page(cache, page, HSRI_PAGE_EV_OPEN, err));
    return page < image->n_tokens / HSRI_PAGE_TOKENS ? hsri_move_page(cache, page, HSRI_PAGE_EV_FILL, err) : HSR_OK;
}

/* From here on the pages may leave memory. */
static hsr_status seal_page(hsri_cache *cache, uint64_t page, hsr_error *err)
{
    hsri_store *plain = &cache->stores[HSRI_STORE_PLAIN], *sealed = hsri_sealed_store(cache);
    HSRI_TRY(hsri_move_page(cache, page, HSRI_PAGE_EV_SEAL, err));
    for (uint64_t i = page * cache->per_page; cache->family && i < (page + 1) * cache->per_page; i++)
        HSRI_TRY(hsri_body_seal(cache->opts.tiers, cache->bodies[i], err));
    if (sealed != plain && hsri_kv_is_plain(cache->opts.format))   /* one table names all pages */
        memcpy(hsri_store_row(cache, plain, page), hsri_store_row(cache, sealed, page), cache->per_page * sizeof(uint32_t));
    return HSR_OK;
}

/* Kernels take positions from records as they are. */
static hsr_status check_records(const hsri_cache *cache, const hsri_image *image, uint64_t row, const uint8_t *bytes, hsr_error *err)
{
    for (uint64_t i = 0; i < image->per_row; i++, bytes += image->slot_bytes[HSRI_IMAGE_CLUSTERS])
        if (!hsri_cluster_record_is_sound(&cache->opts.index, bytes))
            return hsri_fail(err, HSR_E_FORMAT, "the clusters of segment %llu name tokens that are not in it", (unsigned long long)row);
    return HSR_OK;
}

hsr_status hsri_cache_write_image(hsri_cache *cache, hsri_queue *q, const hsri_image *image, hsri_image_part part, uint64_t row,
                                  uint8_t *bytes, hsr_error *err)
{
    const uint64_t at = store_row(cache, image, part, row);
    for (uint64_t i = 0; i < image->per_row && part == HSRI_IMAGE_SEALED; i++)
        memcpy(bytes + i * image->slot_bytes[part] + offsetof(hsri_page_header, lineage), &cache->opts.lineage, sizeof cache->opts.lineage);
    if (part == HSRI_IMAGE_CLUSTERS)
        HSRI_TRY(check_records(cache, image, row, bytes, err));
    HSRI_TRY(fill_row(cache, q, store_of(cache, part), at, bytes, err));
    if (is_of_index(part))
        return HSR_OK;
    HSRI_TRY(add_page(cache, image, at, err));
    return part == HSRI_IMAGE_SEALED ? seal_page(cache, at, err) : HSR_OK;
}

void hsri_cache_end_image(hsri_cache *cache, const hsri_image *image)
{
    cache->reserved = cache->prepared = cache->committed = image->n_tokens;
    cache->sealed = image->sealed;
    cache->encoded = (hsri_progress){ image->sealed, image->sealed };
    cache->clustered = (hsri_progress){ image->rows[HSRI_IMAGE_CLUSTERS], image->rows[HSRI_IMAGE_CLUSTERS] };
    cache->stores[HSRI_STORE_PLAIN].n_rows = hsri_pages_of(image->n_tokens);
    cache->stores[HSRI_STORE_STRIPS].n_rows = hsri_strip_rows(&cache->opts, image->sealed);
    cache->stores[HSRI_STORE_STRIPS].first_row = first_strip(&cache->opts, image->sealed);
    if (hsri_store_exists(&cache->stores[HSRI_STORE_ENCODED]))
        cache->stores[HSRI_STORE_ENCODED].n_rows = image->sealed;
    if (cache->family)
        hsri_family_tick(cache->family, image->n_tokens);
    hsri_settle(cache);
}
