/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/cache_internal.h"

#include <stdlib.h>
#include <string.h>

/* Positions are 32-bit on the device. */
#define MAX_TOKENS (1ull << 32)

/* ---- the lineage ---- */

static void join_lineage(hsri_cache *cache, hsri_cache *member)
{
    cache->next = member->next;
    cache->prev = member;
    member->next->prev = cache;
    member->next = cache;
}

static void leave_lineage(hsri_cache *cache)
{
    cache->next->prev = cache->prev;
    cache->prev->next = cache->next;
    cache->next = cache->prev = cache;
}

/* ---- creation ---- */

static hsr_status check_opts(const hsri_kv_shape *shape, const hsri_cache_opts *opts, hsr_error *err)
{
    bool encodes = hsri_seals_apart(opts);
    if (encodes && hsri_kv_slot_bytes(opts->format, shape->head_dim) == 0)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "the KV format does not exist at head size %u: it must be a multiple of 16",
                         shape->head_dim);
    if (hsri_kv_slots_per_block(opts->type, shape->head_dim) == 0 || hsri_kv_slots_per_block(opts->format, shape->head_dim) == 0)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "a KV page of head size %u is larger than a block of 1 MiB", shape->head_dim);
    if ((encodes || opts->index.per_slab) && opts->window_pages == 0)
        return hsri_fail(err, HSR_E_INVALID, "an encoded KV format or an index needs a window of at least %u tokens", HSRI_PAGE_TOKENS);
    if ((encodes || opts->index.clusters) && opts->chunk_tokens == 0)
        return hsri_fail(err, HSR_E_INVALID, "an encoded KV format or an index with clusters needs to know the longest step");
    return HSR_OK;
}

static hsr_status init_stores(hsri_cache *cache, hsr_error *err)
{
    const hsri_cache_opts *opts = &cache->opts;
    uint32_t d = cache->shape->head_dim;
    HSRI_TRY(hsri_store_init(cache, HSRI_STORE_PLAIN, hsri_kv_slot_bytes(opts->type, d), 0, err));
    if (hsri_seals_apart(opts))
        HSRI_TRY(hsri_store_init(cache, HSRI_STORE_ENCODED, hsri_kv_slot_bytes(opts->format, d), opts->sink_pages, err));
    if (opts->index.per_slab)
        HSRI_TRY(hsri_store_init(cache, HSRI_STORE_INDEX, HSRI_SLAB_BYTES, 0, err));
    if (opts->index.code_bytes)
        HSRI_TRY(hsri_store_init(cache, HSRI_STORE_STRIPS, hsri_strip_slot_bytes(&opts->index), 0, err));
    if (hsri_cluster_slot_bytes(&opts->index))
        HSRI_TRY(hsri_store_init(cache, HSRI_STORE_CLUSTERS, hsri_cluster_slot_bytes(&opts->index), 0, err));
    return HSR_OK;
}

#ifndef NDEBUG
static uint32_t largest_slot(const hsri_cache *cache)
{
    uint32_t bytes = 0;
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        bytes = (uint32_t)hsri_max(bytes, cache->stores[kind].slot_bytes);
    return bytes;
}
#endif

/* A member of `parent`'s lineage, or the first of a new one. */
static hsr_status join_family(hsri_cache *cache, hsri_cache *parent, hsr_error *err)
{
    hsri_tiers *tiers = cache->opts.tiers;
    if (parent)
        join_lineage(cache, parent);
    if (!tiers)
        return HSR_OK;
    if (!parent)
        return hsri_family_create(tiers, cache->opts.format, cache->opts.lineage, hsri_kv_working_set(cache->shape, &cache->opts),
                                  &cache->family, err);
    HSRI_TRY(hsri_family_join(parent->family, err));
    cache->family = parent->family;
    return HSR_OK;
}

static hsr_status create(hsri_device *dev, hsri_pool *pool, const hsri_kv_shape *shape, const hsri_cache_opts *given, hsri_cache *parent,
                         hsri_cache **out, hsr_error *err)
{
    *out = NULL;
    hsri_cache_opts opts = *given;
    if (hsri_kv_is_plain(opts.format))
        opts.format = opts.type;
    HSRI_TRY(check_opts(shape, &opts, err));

    hsri_cache *cache = hsri_new_array(1, sizeof *cache);
    if (!cache)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a KV cache");
    cache->dev = dev;
    cache->pool = pool;
    cache->shape = shape;
    cache->opts = opts;
    cache->per_page = (uint64_t)shape->n_layers * shape->n_kv_heads;
    cache->sealed = opts.sink_pages;
    cache->encoded = (hsri_progress){ opts.sink_pages, opts.sink_pages };
    cache->next = cache->prev = cache;

    hsr_status status = init_stores(cache, err);
    if (status == HSR_OK)
        status = join_family(cache, parent, err);
    if (status == HSR_OK)
        status = dev->alloc(dev, HSRI_SEAL_ROUND * HSRI_SEAL_BYTES, &cache->seals_buf, err);
#ifndef NDEBUG
    if (status == HSR_OK)
        status = dev->alloc(dev, largest_slot(cache), &cache->poison_buf, err);
#endif
    if (status < 0) {
        hsri_cache_destroy(cache);
        return status;
    }
    *out = cache;
    return HSR_OK;
}

hsr_status hsri_cache_create(hsri_device *dev, hsri_pool *pool, const hsri_kv_shape *shape, const hsri_cache_opts *opts,
                             hsri_cache **cache, hsr_error *err)
{
    return create(dev, pool, shape, opts, NULL, cache, err);
}

hsr_status hsri_cache_create_member(hsri_cache *parent, hsri_cache **cache, hsr_error *err)
{
    return create(parent->dev, parent->pool, parent->shape, &parent->opts, parent, cache, err);
}

static void free_buf(hsri_device *dev, uint32_t buf)
{
    if (buf)
        dev->free(dev, buf);
}

static void leave_family(hsri_cache *cache)
{
    hsri_store *sealed = &cache->stores[HSRI_STORE_ENCODED];
    if (!cache->family)
        return;
    hsri_store_shrink(cache, sealed, hsri_min(sealed->n_rows, cache->opts.sink_pages));
    hsri_family_promise(cache->family, cache->bodies_promised, 0, NULL);
    hsri_tiers *tiers = cache->opts.tiers;
    hsri_family_leave(cache->family);
    hsri_tiers_drain(tiers);
}

void hsri_cache_destroy(hsri_cache *cache)
{
    if (!cache)
        return;
    leave_family(cache);
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        if (hsri_store_exists(&cache->stores[kind]))
            hsri_slots_clear(&cache->stores[kind].slots, hsri_give_to_single, cache);
    hsri_cache *sibling = cache->next;
    leave_lineage(cache);
    if (sibling != cache)
        hsri_settle(sibling);
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        hsri_store_free(cache, &cache->stores[kind]);
    free_buf(cache->dev, cache->seals_buf);
#ifndef NDEBUG
    free_buf(cache->dev, cache->poison_buf);
#endif
    free(cache->states);
    free(cache->bodies);
    free(cache->seals);
    free(cache->clusters);
    free(cache);
}

/* ---- admission ---- */

hsr_status hsri_cache_grow_tables(hsri_cache *cache, uint64_t n_pages, uint64_t encoded_end, hsr_error *err)
{
    hsri_store *stores = cache->stores;
    uint64_t need = n_pages * cache->per_page;
    if (!hsri_grow((void **)&cache->states, &cache->states_cap, need, sizeof *cache->states))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the states of %llu pages", (unsigned long long)need);
    if (cache->family && !hsri_grow((void **)&cache->bodies, &cache->bodies_cap,
                                    hsri_max(n_pages, cache->opts.sink_pages) * cache->per_page, sizeof *cache->bodies))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the states of %llu pages", (unsigned long long)need);
    HSRI_TRY(hsri_store_grow(cache, &stores[HSRI_STORE_PLAIN], n_pages, err));
    if (hsri_store_exists(&stores[HSRI_STORE_ENCODED]))
        HSRI_TRY(hsri_store_grow(cache, &stores[HSRI_STORE_ENCODED], hsri_max(n_pages, cache->opts.sink_pages), err));
    if (hsri_store_exists(&stores[HSRI_STORE_INDEX]))
        HSRI_TRY(hsri_store_grow(cache, &stores[HSRI_STORE_INDEX], hsri_index_rows(&cache->opts, encoded_end), err));
    if (hsri_store_exists(&stores[HSRI_STORE_STRIPS]))
        HSRI_TRY(hsri_store_grow(cache, &stores[HSRI_STORE_STRIPS], hsri_strip_rows(&cache->opts, encoded_end), err));
    if (hsri_store_exists(&stores[HSRI_STORE_CLUSTERS]))
        HSRI_TRY(hsri_store_grow(cache, &stores[HSRI_STORE_CLUSTERS], hsri_cluster_rows(&cache->opts, encoded_end), err));
    return HSR_OK;
}

hsr_status hsri_cache_admit(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    if (n_tokens > MAX_TOKENS)
        return hsri_fail(err, HSR_E_CONTEXT, "%llu tokens: positions are 32-bit numbers", (unsigned long long)n_tokens);
    if (n_tokens <= cache->reserved)
        return HSR_OK;
    HSRI_TRY(hsri_promise(cache, n_tokens, err));
    hsr_status status = hsri_cache_grow_tables(cache, hsri_pages_of(n_tokens), hsri_encoded_end_of(&cache->opts, n_tokens), err);
    if (status < 0) {
        hsri_settle(cache);
        return status;
    }
    cache->reserved = n_tokens;
    return HSR_OK;
}

void hsri_cache_unadmit(hsri_cache *cache, uint64_t n_tokens)
{
    cache->reserved = hsri_min(cache->reserved, hsri_max(n_tokens, cache->prepared));
    hsri_settle(cache);
}

/* ---- steps ---- */

uint64_t hsri_cache_step_limit(const hsri_cache *cache)
{
    const hsri_cache_opts *opts = &cache->opts;
    uint64_t limit = UINT64_MAX;
    if (hsri_seals_apart(opts) || opts->index.per_slab)
        limit = (cache->committed / HSRI_PAGE_TOKENS + opts->window_pages) * HSRI_PAGE_TOKENS - cache->committed;
    return hsri_seals_apart(opts) || opts->index.clusters ? hsri_min(limit, opts->chunk_tokens) : limit;
}

/* A page of its own for every position below n_tokens. */
static hsr_status open_pages(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    hsri_store *plain = &cache->stores[HSRI_STORE_PLAIN];
    while (plain->n_rows < hsri_pages_of(n_tokens)) {
        HSRI_TRY(hsri_store_take(cache, plain, err));
        HSRI_TRY(hsri_move_page(cache, plain->n_rows - 1, HSRI_PAGE_EV_OPEN, err));
        cache->prepared = plain->n_rows * HSRI_PAGE_TOKENS;
    }
    cache->prepared = n_tokens;
    return HSR_OK;
}

/* Give up the pages of positions from n_tokens on. Sealed pages of an encoded format have no plain slots. */
static hsr_status close_pages(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    hsri_store *plain = &cache->stores[HSRI_STORE_PLAIN];
    while (plain->n_rows > hsri_pages_of(n_tokens)) {
        uint64_t page = plain->n_rows - 1;
        HSRI_TRY(hsri_move_page(cache, page, HSRI_PAGE_EV_DROP, err));
        if (!hsri_seals_apart(&cache->opts) || page < cache->opts.sink_pages || page >= cache->sealed)
            hsri_store_drop(cache, plain, page);
        plain->n_rows = page;
        cache->prepared = page * HSRI_PAGE_TOKENS;
    }
    cache->prepared = n_tokens;
    hsri_store_shrink(cache, plain, plain->n_rows);
    return HSR_OK;
}

#ifndef NDEBUG
/* Fill new rows with NaN, so that a read of what was not written, or of the slot's former content, shows. */
static void poison(hsri_cache *cache, hsri_queue *q, const hsri_store *store, uint64_t first_row)
{
    static const uint32_t nans[HSRI_SLOT_ALIGNMENT / 4] = { [0 ... HSRI_SLOT_ALIGNMENT / 4 - 1] = UINT32_MAX };
    hsri_ref source = { .buf = cache->poison_buf };
    for (uint32_t at = 0; !cache->poison_made && at < largest_slot(cache); at += HSRI_SLOT_ALIGNMENT)
        cache->dev->copy_in(q, hsri_at(source, at), nans, HSRI_SLOT_ALIGNMENT);
    cache->poison_made = true;
    for (uint64_t i = first_row * cache->per_page; i < store->n_rows * cache->per_page; i++)
        cache->dev->copy(q, hsri_store_slot(cache, store, store->entries[i]), source, store->slot_bytes);
}
#endif

/* What prepare found, to go back to. */
typedef struct before {
    uint64_t       prepared, encoded, rows[HSRI_N_STORES];
    hsri_cow_stage cow[HSRI_N_STORES];
} before;

static before remember(const hsri_cache *cache)
{
    before b = { .prepared = cache->prepared, .encoded = cache->encoded.queued };
    for (int kind = 0; kind < HSRI_N_STORES; kind++) {
        b.rows[kind] = cache->stores[kind].n_rows;
        b.cow[kind] = cache->stores[kind].cow.stage;
    }
    return b;
}

/* Slots for everything the step writes, and lists long enough: the part of prepare that may fail. */
static hsr_status take_slots(hsri_cache *cache, uint64_t n_tokens, uint64_t encoded_end, hsr_error *err)
{
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        if (cache->stores[kind].cow.stage == HSRI_COW_DUE && n_tokens > cache->committed)
            HSRI_TRY(hsri_cow_take(cache, &cache->stores[kind], err));
    HSRI_TRY(open_pages(cache, n_tokens, err));
    return hsri_encode_take(cache, encoded_end, err);
}

static void undo(hsri_cache *cache, const before *b)
{
    close_pages(cache, b->prepared, NULL);
    hsri_encode_shrink(cache, b->encoded);
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        if (b->cow[kind] == HSRI_COW_DUE)
            hsri_cow_undo(cache, &cache->stores[kind]);
    hsri_settle(cache);
}

static void enqueue(hsri_cache *cache, hsri_queue *q, const before *b, uint64_t encoded_end)
{
    for (int kind = 0; kind < HSRI_N_STORES; kind++) {
        hsri_store *store = &cache->stores[kind];
        if (b->cow[kind] == HSRI_COW_DUE && store->cow.stage == HSRI_COW_QUEUED)
            hsri_cow_enqueue(cache, store, q);
#ifndef NDEBUG
        if (hsri_store_exists(store))
            poison(cache, q, store, b->rows[kind]);
#endif
        hsri_store_send(cache, store, q);
    }
    hsri_encode_enqueue(cache, q, encoded_end);
}

hsr_status hsri_cache_prepare(hsri_cache *cache, hsri_queue *q, uint64_t n_tokens, hsr_error *err)
{
    if (n_tokens > cache->reserved)
        return hsri_fail(err, HSR_E_INTERNAL, "%llu positions were prepared, but only %llu admitted", (unsigned long long)n_tokens,
                         (unsigned long long)cache->reserved);
    n_tokens = hsri_max(n_tokens, cache->prepared);
    if (n_tokens - cache->committed > hsri_cache_step_limit(cache))
        return hsri_fail(err, HSR_E_INTERNAL, "%llu positions in one step, but only %llu may be",
                         (unsigned long long)(n_tokens - cache->committed), (unsigned long long)hsri_cache_step_limit(cache));
    uint64_t encoded_end = cache->encoded.queued;
    if (n_tokens > cache->committed)
        encoded_end = hsri_max(encoded_end, hsri_min(hsri_encoded_end_of(&cache->opts, n_tokens),
                                                     hsri_max(cache->committed / HSRI_PAGE_TOKENS, cache->opts.sink_pages)));
    before b = remember(cache);

    hsr_status status = take_slots(cache, n_tokens, encoded_end, err);
    if (status < 0) {
        undo(cache, &b);
        return status;
    }
    enqueue(cache, q, &b, encoded_end);
    return HSR_OK;
}

hsr_status hsri_cache_commit(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    if (n_tokens < cache->committed || n_tokens > cache->prepared)
        return hsri_fail(err, HSR_E_INTERNAL, "%llu positions were committed, outside %llu..%llu", (unsigned long long)n_tokens,
                         (unsigned long long)cache->committed, (unsigned long long)cache->prepared);
    for (uint64_t page = cache->committed / HSRI_PAGE_TOKENS; page < n_tokens / HSRI_PAGE_TOKENS; page++) {
        HSRI_TRY(hsri_move_page(cache, page, HSRI_PAGE_EV_FILL, err));
        cache->committed = (page + 1) * HSRI_PAGE_TOKENS;
    }
    cache->committed = n_tokens;
    for (int kind = 0; kind < HSRI_N_STORES; kind++) {
        hsri_cow_finish(cache, &cache->stores[kind]);
        cache->stores[kind].sent.done = cache->stores[kind].sent.queued;
    }
    cache->encoded.done = cache->encoded.queued;
    cache->clustered.done = cache->clustered.queued;
    HSRI_TRY(hsri_seal_pages(cache, err));
    hsri_give_up_strips(cache);
    hsri_settle(cache);
    if (cache->family) {
        hsri_family_tick(cache->family, n_tokens);
        hsri_tiers_poll(cache->opts.tiers);
    }
    return HSR_OK;
}

/* ---- truncate ---- */

/* A query at position n_tokens, or the cut page, would need a plain copy that was given up; or its index would. */
bool hsri_cache_truncates_too_far(const hsri_cache *cache, uint64_t n_tokens)
{
    uint64_t plain_from = hsri_encoded_end(&cache->opts, n_tokens / HSRI_PAGE_TOKENS, cache->opts.window_pages);
    bool unindexed = plain_from > cache->opts.sink_pages && hsri_strips_are_gone(cache, hsri_min(plain_from, cache->sealed));
    return hsri_seals_apart(&cache->opts) && (plain_from < hsri_min(cache->sealed, hsri_pages_of(n_tokens)) || unindexed);
}

/* The page that a truncate to n_tokens cuts is written again, and so are the slab and the strip of the next page to be encoded. */
static hsr_status reopen_cut_page(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    hsri_store *plain = &cache->stores[HSRI_STORE_PLAIN];
    uint64_t page = n_tokens / HSRI_PAGE_TOKENS;
    bool was_full = page < cache->committed / HSRI_PAGE_TOKENS;
    cache->committed = n_tokens;
    plain->cow.stage = HSRI_COW_NONE;
    if (n_tokens % HSRI_PAGE_TOKENS == 0)
        return HSR_OK;
    if (was_full)
        HSRI_TRY(hsri_move_page(cache, page, HSRI_PAGE_EV_REOPEN, err));
    hsri_cow_mark(cache, plain, page);
    return HSR_OK;
}

static void mark_cut_row(hsri_cache *cache, hsri_store *store, uint64_t row)
{
    store->cow.stage = HSRI_COW_NONE;
    if (row < store->n_rows)
        hsri_cow_mark(cache, store, row);
}

static void mark_cut_index(hsri_cache *cache)
{
    const uint64_t page = cache->encoded.done;
    if (hsri_store_exists(&cache->stores[HSRI_STORE_INDEX]))
        mark_cut_row(cache, &cache->stores[HSRI_STORE_INDEX], page / cache->opts.index.per_slab);
    if (hsri_store_exists(&cache->stores[HSRI_STORE_STRIPS]))
        mark_cut_row(cache, &cache->stores[HSRI_STORE_STRIPS], (page - cache->opts.sink_pages) / HSRI_STRIP_PAGES);
}

hsr_status hsri_cache_truncate(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    if (n_tokens > cache->prepared)
        return hsri_fail(err, HSR_E_INVALID, "truncate to %llu tokens: there are %llu", (unsigned long long)n_tokens,
                         (unsigned long long)cache->prepared);
    if (hsri_cache_truncates_too_far(cache, n_tokens))
        return hsri_fail(err, HSR_E_STATE, "truncate from %llu to %llu tokens: at most %llu (rollback_tokens) can be taken back",
                         (unsigned long long)cache->committed, (unsigned long long)n_tokens,
                         (unsigned long long)cache->opts.rollback_tokens);
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        hsri_cow_undo(cache, &cache->stores[kind]);
    HSRI_TRY(close_pages(cache, n_tokens, err));
    cache->reserved = n_tokens;
    uint64_t committed = hsri_min(n_tokens, cache->committed);
    HSRI_TRY(hsri_unseal_pages(cache, committed, err));
    uint64_t end = hsri_min(cache->encoded.done, hsri_max(committed / HSRI_PAGE_TOKENS, cache->opts.sink_pages));
    hsri_encode_shrink(cache, hsri_strips_are_gone(cache, cache->sealed) ? cache->sealed : end);
    if (n_tokens < cache->committed) {
        HSRI_TRY(reopen_cut_page(cache, n_tokens, err));
        mark_cut_index(cache);
    }
    if (cache->family) {
        /* Entries that were corrected during a step that failed may not have arrived. */
        cache->stores[hsri_read_store(&cache->opts)].sent = (hsri_progress){ 0 };
        hsri_tiers_drain(cache->opts.tiers);
    }
    hsri_settle(cache);
    return HSR_OK;
}

/* ---- what others see ---- */

void hsri_cache_fill_seq(const hsri_cache *cache, hsri_seq *seq)
{
    const hsri_store *stores = cache->stores;
    seq->table = (hsri_ref){ .buf = stores[HSRI_STORE_PLAIN].buf };
    seq->sealed = (hsri_ref){ .buf = stores[hsri_read_store(&cache->opts)].buf };
    seq->index = (hsri_ref){ .buf = stores[HSRI_STORE_INDEX].buf };
    seq->strips = (hsri_ref){ .buf = stores[HSRI_STORE_STRIPS].buf };
    seq->clusters = (hsri_ref){ .buf = stores[HSRI_STORE_CLUSTERS].buf };
    seq->kv_type = (uint32_t)cache->opts.type;
    seq->format = (uint32_t)cache->opts.format;
    seq->sink_pages = cache->opts.sink_pages;
    seq->window_pages = cache->opts.window_pages;
    seq->index_shape = cache->opts.index;
}

uint64_t hsri_cache_committed(const hsri_cache *cache)
{
    return cache->committed;
}

uint64_t hsri_cache_reserved(const hsri_cache *cache)
{
    return cache->reserved;
}

hsri_ref hsri_cache_table(const hsri_cache *cache)
{
    return (hsri_ref){ .buf = cache->stores[HSRI_STORE_PLAIN].buf };
}

uint64_t hsri_cache_encoded_pages(const hsri_cache *cache)
{
    return cache->encoded.queued;
}

uint32_t hsri_cache_body(const hsri_cache *cache, uint32_t page, uint32_t layer, uint32_t head)
{
    if (!cache->family || page < cache->opts.sink_pages || page >= cache->encoded.queued)
        return HSRI_NO_BODY;
    return cache->bodies[page * cache->per_page + (uint64_t)layer * cache->shape->n_kv_heads + head];
}

hsri_page_state hsri_cache_page_state(const hsri_cache *cache, uint32_t page, uint32_t layer, uint32_t head)
{
    if (page >= hsri_pages_of(cache->prepared))
        return HSRI_PAGE_NONE;
    uint8_t state = cache->states[page * cache->per_page + (uint64_t)layer * cache->shape->n_kv_heads + head];
    if (state == HSRI_PAGE_HOT && cache->family)
        return hsri_body_state(cache->opts.tiers, hsri_cache_body(cache, page, layer, head));
    return (hsri_page_state)state;
}

static void add_store(const hsri_store *store, hsri_cache_stats *stats, hsri_store_stats *out)
{
    *out = (hsri_store_stats){
        .blocks = store->slots.n_blocks, .used = store->slots.n_used, .wasted = store->slots.n_free,
        .reserved_blocks = store->slots.n_reserved,
    };
    stats->blocks += out->blocks;
    stats->reserved_blocks += out->reserved_blocks;
}

void hsri_cache_get_stats(const hsri_cache *cache, hsri_cache_stats *stats)
{
    *stats = (hsri_cache_stats){ .pages_open = cache->n_in_state[HSRI_PAGE_OPEN], .pages_full = cache->n_in_state[HSRI_PAGE_FULL],
                                .n_estimated = cache->n_estimated };
    for (int state = HSRI_PAGE_HOT; state < HSRI_N_PAGE_STATES; state++)
        stats->pages_sealed += cache->n_in_state[state];
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        add_store(&cache->stores[kind], stats, &stats->stores[kind]);
    if (cache->family)      /* wherever they are */
        stats->stores[HSRI_STORE_ENCODED].used = (cache->stores[HSRI_STORE_ENCODED].n_rows - cache->opts.sink_pages) * cache->per_page;
    const hsri_store_stats *plain = &stats->stores[HSRI_STORE_PLAIN], *encoded = &stats->stores[HSRI_STORE_ENCODED];
    stats->slots_used = plain->used + encoded->used;
    stats->slots_wasted = plain->wasted + encoded->wasted;
    stats->bytes = plain->used * cache->stores[HSRI_STORE_PLAIN].slot_bytes + encoded->used * cache->stores[HSRI_STORE_ENCODED].slot_bytes;
    for (int kind = HSRI_STORE_INDEX; kind <= HSRI_STORE_CLUSTERS; kind++)
        stats->index_bytes += stats->stores[kind].used * cache->stores[kind].slot_bytes;
    stats->pages_plain = plain->used;
    stats->pages_encoded = encoded->used;
}
