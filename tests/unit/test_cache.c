/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache of sessions over a late, strict fake device. Every token of every session writes a number of its own into its
 * rows of all layers and heads; afterwards each session must find its own numbers through its page table on the device, and
 * the pool's counters must be what the sessions hold and were promised. */
#include <limits.h>
#include <malloc.h>

#include "base/array.h"
#include "base/rng.h"
#include "check.h"
#include "fake_device.h"
#include "kv/cache.h"
#include "kv/slots.h"

#define MAX_SESSIONS 40
#define MAX_TOKENS 12000u
#define MIB (1ull << 20)

/* ---- memory that fails on demand: these replace base/array.c, which the linker then leaves in the archive ---- */

static uint64_t n_allocations, failing_allocation;

static bool refuse_allocation(void)
{
    return ++n_allocations == failing_allocation;
}

void *hsri_new_array(size_t n, size_t size)
{
    return refuse_allocation() ? NULL : calloc(n ? n : 1, size);
}

void *hsri_new_aligned(size_t n, size_t size)
{
    return hsri_new_array(n, size);
}

/* Moves whenever it grows, so that a stale pointer is a use after free. */
bool hsri_grow(void **array, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity)
        return true;
    size_t next = need > 2 * *capacity ? need : 2 * *capacity;
    void *grown = refuse_allocation() ? NULL : calloc(next, size);
    if (!grown)
        return false;
    if (*array)
        memcpy(grown, *array, *capacity * size);
    free(*array);
    *array = grown;
    *capacity = next;
    return true;
}

/* ---- the world of a test ---- */

typedef struct session {
    hsri_cache *cache;
    uint64_t    committed, prepared, reserved;
    uint64_t    encoded_done, encoded, sealed;   /* pages, by the rules */
    uint32_t    value[MAX_TOKENS];   /* what the token at a position has written */
    bool        family;              /* has been part of a fork */
} session;

typedef struct world {
    fake_device   fake;
    fake_queue    queue;
    hsri_pool    *pool;
    hsri_kv_shape shape;
    hsri_cache_opts opts;
    session      *sessions;          /* MAX_SESSIONS */
    uint32_t      next_value;
    uint64_t      lineage;
} world;

typedef struct shape_case {
    hsri_kv_type type, format;
    uint32_t     n_layers, n_kv_heads, head_dim, slots_per_block;
    uint32_t     per_slab;           /* index entries; 0: no index */
} shape_case;

static const shape_case shapes[] = {
    { HSRI_KV_TYPE_F32, HSRI_KV_TYPE_F32, 2, 2, 512, 3, 0 },
    { HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_BF16, 3, 2, 64, 51, 0 },
    { HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_BF16, 2, 3, 8, 256, 0 },
    { HSRI_KV_TYPE_F32, HSRI_KV_TYPE_F32, 1, 1, 2000, 1, 0 },
    { HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_INT8, 2, 2, 64, 51, 4 },
    { HSRI_KV_TYPE_F32, HSRI_KV_TYPE_COMPACT, 1, 2, 512, 3, 0 },
    { HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_BF16, 2, 2, 128, 28, 3 },
};

static void world_init(world *w, const shape_case *sc, uint64_t blocks)
{
    *w = (world){ .next_value = 1 };
    fake_init(&w->fake);
    fake_queue_init(&w->queue, &w->fake);
    CHECK(hsri_pool_create(&w->fake.base, blocks * MIB, &w->pool, NULL) == HSR_OK);
    hsri_kv_shape_init(&w->shape, w->pool, sc->n_layers, sc->n_kv_heads, sc->head_dim);
    CHECK(hsri_kv_slots_per_block(sc->type, sc->head_dim) == sc->slots_per_block);
    w->opts = (hsri_cache_opts){
        .type = sc->type, .format = sc->format, .window_pages = 2, .sink_pages = 1, .rollback_tokens = 100, .chunk_tokens = 100,
    };
    if (sc->per_slab)
        w->opts.index = (hsri_index_shape){
            .kind = HSRI_INDEX_SKETCH, .head_dim = sc->head_dim, .per_slab = sc->per_slab,
            .entry_bytes = HSRI_SLAB_BYTES / sc->per_slab / 64 * 64, .code_bytes = 192,
        };
    w->sessions = calloc(MAX_SESSIONS, sizeof *w->sessions);
}

static bool encodes(const world *w) { return !hsri_kv_is_plain(w->opts.format); }

static hsri_pool_stats pool_stats(const world *w)
{
    hsri_pool_stats stats;
    hsri_pool_get_stats(w->pool, &stats);
    return stats;
}

static hsri_cache_stats cache_stats(const session *s)
{
    hsri_cache_stats stats;
    hsri_cache_get_stats(s->cache, &stats);
    return stats;
}

/* Everything is back: only the pool's own buffer is left. */
static void world_end(world *w)
{
    hsri_pool_stats stats = pool_stats(w);
    CHECK(stats.used == 0 && stats.reserved == 0);
    CHECK(w->fake.n_bufs == 1);
    hsri_pool_destroy(w->pool);
    fake_queue_end(&w->queue);
    free(w->sessions);
}

static uint64_t pages_of(uint64_t tokens) { return (tokens + 63) / 64; }

static uint64_t per_page(const world *w) { return (uint64_t)w->shape.n_layers * w->shape.n_kv_heads; }

static uint64_t slot_bytes(const world *w, int kind)
{
    if (kind == HSRI_STORE_STRIPS)
        return hsri_strip_slot_bytes(&w->opts.index);
    return kind == HSRI_STORE_INDEX ? HSRI_SLAB_BYTES : w->shape.view.slot_bytes[kind == HSRI_STORE_PLAIN ? w->opts.type : w->opts.format];
}

static uint64_t slots_per_block(const world *w, int kind) { return MIB / slot_bytes(w, kind); }

/* ---- the rules, page by page ---- */

static bool reads_plain(const world *w, uint64_t page, uint64_t q)
{
    return hsri_page_is_plain((uint32_t)page, (uint32_t)q, w->opts.sink_pages, w->opts.window_pages);
}

static bool stays_plain(const world *w, uint64_t page, uint64_t q)
{
    uint32_t window = w->opts.window_pages + (uint32_t)pages_of(w->opts.rollback_tokens);
    return hsri_page_is_plain((uint32_t)page, (uint32_t)q, w->opts.sink_pages, window);
}

static void model_create(const world *w, session *s)
{
    s->encoded_done = s->encoded = s->sealed = w->opts.sink_pages;
}

static void model_prepare(const world *w, session *s, uint64_t n)
{
    s->prepared = n > s->prepared ? n : s->prepared;
    while (s->prepared > s->committed && s->encoded < s->committed / 64 && !reads_plain(w, s->encoded, (s->prepared - 1) / 64))
        s->encoded++;
}

static void model_commit(const world *w, session *s, uint64_t n)
{
    s->committed = n;
    s->encoded_done = s->encoded;
    while (s->sealed < s->encoded_done && s->sealed < n / 64 && !stays_plain(w, s->sealed, n ? (n - 1) / 64 : 0))
        s->sealed++;
}

static void model_truncate(const world *w, session *s, uint64_t n)
{
    s->prepared = s->reserved = n;
    s->committed = n < s->committed ? n : s->committed;
    uint64_t q = s->committed / 64, most = q > w->opts.sink_pages ? q : w->opts.sink_pages;
    s->encoded_done = s->encoded = s->encoded_done < most ? s->encoded_done : most;
    while (s->sealed > w->opts.sink_pages && (s->sealed > q || reads_plain(w, s->sealed - 1, q)))
        s->sealed--;
}

/* May the session go back to n? Not if a page is read plain there whose plain copy is gone. */
static bool can_truncate(const world *w, const session *s, uint64_t n)
{
    for (uint64_t page = w->opts.sink_pages; page < s->sealed && page < pages_of(n); page++)
        if (encodes(w) && (reads_plain(w, page, n / 64) || page >= n / 64))
            return false;
    return true;
}

static bool has_plain(const world *w, const session *s, uint64_t page)
{
    return page < pages_of(s->prepared) && (!encodes(w) || page < w->opts.sink_pages || page >= s->sealed);
}

static bool has_encoded(const world *w, const session *s, uint64_t page)
{
    return page >= w->opts.sink_pages && page < s->encoded;
}

/* Does this row of a store have slots? */
static bool has_row(const world *w, const session *s, int kind, uint64_t row)
{
    if (kind == HSRI_STORE_PLAIN)
        return has_plain(w, s, row);
    if (kind == HSRI_STORE_ENCODED)
        return encodes(w) && has_encoded(w, s, row);
    if (kind == HSRI_STORE_STRIPS)
        return w->opts.index.code_bytes && w->opts.sink_pages + row * HSRI_STRIP_PAGES < s->encoded;
    return kind == HSRI_STORE_INDEX && w->opts.index.per_slab && s->encoded > w->opts.sink_pages &&
           row * w->opts.index.per_slab < s->encoded;
}

static uint64_t n_rows(const world *w, const session *s, int kind)
{
    uint64_t n = 0;
    for (uint64_t row = 0; row <= pages_of(s->prepared); row++)
        n += has_row(w, s, kind, row);
    return n;
}

/* ---- pages through the device's table ---- */

static hsri_ref table_of(const session *s, int kind)
{
    hsri_seq seq = { 0 };
    hsri_cache_fill_seq(s->cache, &seq);
    const hsri_ref tables[] = { [HSRI_STORE_PLAIN] = seq.table, [HSRI_STORE_ENCODED] = seq.sealed, [HSRI_STORE_INDEX] = seq.index,
                                [HSRI_STORE_STRIPS] = seq.strips };
    return tables[kind];
}

static uint32_t entry_of(world *w, const session *s, int kind, uint64_t row, uint64_t i)
{
    const uint32_t *entry = fake_at(&w->fake, hsri_at(table_of(s, kind), (row * per_page(w) + i) * 4), 4);
    return entry ? *entry : 0;
}

/* The slot of (row, layer, head), where the operations of a step would find it. */
static uint8_t *slot_in(world *w, const session *s, int kind, uint64_t row, uint64_t i)
{
    return fake_at(&w->fake, fake_slot(&w->shape.view, entry_of(w, s, kind, row, i), slot_bytes(w, kind)), slot_bytes(w, kind));
}

static uint8_t *slot_of(world *w, const session *s, uint64_t page, uint64_t i)
{
    return slot_in(w, s, HSRI_STORE_PLAIN, page, i);
}

static uint64_t row_value(uint32_t value, uint64_t pos, uint64_t i)
{
    return (uint64_t)value << 32 | pos << 8 | i;
}

/* What a step does: the rows of new positions are written. */
static void compute(world *w, session *s, uint64_t from, uint64_t to)
{
    for (uint64_t pos = from; pos < to; pos++) {
        s->value[pos] = w->next_value++;
        for (uint64_t i = 0; i < per_page(w); i++) {
            uint8_t *slot = slot_of(w, s, pos / 64, i);
            uint64_t value = row_value(s->value[pos], pos, i);
            if (slot)
                memcpy(slot + HSRI_PAGE_HEADER_BYTES + pos % 64 * 8, &value, 8);
        }
    }
}

static bool is_sealed(hsri_page_state state) { return state == HSRI_PAGE_HOT; }

static hsri_page_state expected_state(const world *w, const session *s, uint64_t page)
{
    if (page >= pages_of(s->prepared))
        return HSRI_PAGE_NONE;
    if (page >= s->committed / 64)
        return HSRI_PAGE_OPEN;
    return page >= w->opts.sink_pages && page < s->sealed ? HSRI_PAGE_HOT : HSRI_PAGE_FULL;
}

static bool header_fits(const world *w, const uint8_t *slot, uint64_t page, uint64_t i)
{
    hsri_page_header header;
    memcpy(&header, slot, sizeof header);
    return header.magic == HSRI_PAGE_MAGIC && header.page == page && header.layer == i / w->shape.n_kv_heads &&
           header.head == i % w->shape.n_kv_heads && header.format == (uint16_t)w->opts.format && header.head_dim == w->shape.head_dim;
}

/* The committed rows of a page in a slot, as written or as encoded. */
static bool rows_fit(const session *s, const uint8_t *slot, uint64_t page, uint64_t i, uint64_t encoding)
{
    for (uint64_t pos = page * 64; pos < page * 64 + 64 && pos < s->committed; pos++) {
        uint64_t value = row_value(s->value[pos], pos, i) ^ encoding;
        if (memcmp(slot + HSRI_PAGE_HEADER_BYTES + pos % 64 * 8, &value, 8) != 0)
            return false;
    }
    return true;
}

static bool entry_fits(const world *w, const session *s, const uint8_t *at, uint64_t page, uint64_t i)
{
    fake_entry entry;
    memcpy(&entry, at, sizeof entry);
    return entry.page == page && entry.layer == i / w->shape.n_kv_heads && entry.head == i % w->shape.n_kv_heads &&
           entry.first_row == row_value(s->value[page * 64], page * 64, i);
}

static bool index_fits(world *w, const session *s, uint64_t page, uint64_t i)
{
    const hsri_index_shape *shape = &w->opts.index;
    const uint64_t at = page - w->opts.sink_pages;
    const uint8_t *slab = slot_in(w, s, HSRI_STORE_INDEX, page / shape->per_slab, i);
    const uint8_t *strip = slot_in(w, s, HSRI_STORE_STRIPS, at / HSRI_STRIP_PAGES, i);
    return slab && strip && entry_fits(w, s, slab + page % shape->per_slab * shape->entry_bytes, page, i) &&
           entry_fits(w, s, strip + at % HSRI_STRIP_PAGES * shape->code_bytes, page, i);
}

static bool verify_page(world *w, const session *s, uint64_t page, uint64_t i)
{
    int before = check_failures;
    const uint8_t *plain = has_plain(w, s, page) ? slot_of(w, s, page, i) : NULL;
    CHECK(!plain || rows_fit(s, plain, page, i, 0));
    if (has_encoded(w, s, page)) {
        const uint8_t *encoded = encodes(w) ? slot_in(w, s, HSRI_STORE_ENCODED, page, i) : plain;
        CHECK(encoded && header_fits(w, encoded, page, i) && rows_fit(s, encoded, page, i, encodes(w) ? FAKE_ENCODING : 0));
        CHECK(!w->opts.index.per_slab || index_fits(w, s, page, i));
    }
    return check_failures == before;
}

/* Every query of the step finds every page before it in the form that the rule names. */
static void verify_rule(const world *w, const session *s)
{
    for (uint64_t q = s->committed / 64; s->prepared > s->committed && q <= (s->prepared - 1) / 64; q++)
        for (uint64_t page = 0; page <= q; page++)
            if (reads_plain(w, page, q))
                CHECK(has_plain(w, s, page));
            else if (encodes(w) || w->opts.index.per_slab)
                CHECK(has_encoded(w, s, page));
}

/* After prepare and wait: states, headers, index entries and every committed row. True if all is right. */
static bool verify_pages(world *w, const session *s)
{
    int before = check_failures;
    verify_rule(w, s);
    for (uint64_t page = 0; page <= pages_of(s->prepared); page++)
        for (uint64_t i = 0; i < per_page(w); i++) {
            uint32_t layer = (uint32_t)(i / w->shape.n_kv_heads), head = (uint32_t)(i % w->shape.n_kv_heads);
            CHECK(hsri_cache_page_state(s->cache, (uint32_t)page, layer, head) == expected_state(w, s, page));
            if (page < pages_of(s->prepared) && !verify_page(w, s, page, i))
                return false;
        }
    return check_failures == before;
}

/* ---- counters ---- */

static uint64_t blocks_missing(const world *w, const hsri_cache_stats *stats, int kind, uint64_t slots)
{
    uint64_t wasted = stats->stores[kind].wasted, per_block = slots_per_block(w, kind);
    return slots > wasted ? (slots - wasted + per_block - 1) / per_block : 0;
}

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Rows that the way to n positions still takes, without copies on write. */
static uint64_t rows_to(const world *w, const session *s, int kind, uint64_t n)
{
    session then = { .prepared = n, .encoded = w->opts.sink_pages, .sealed = w->opts.sink_pages };
    uint64_t have = n_rows(w, s, kind);
    while (n > s->committed && then.encoded < (n - 1) / 64 && !reads_plain(w, then.encoded, (n - 1) / 64))
        then.encoded++;
    uint64_t want = n > s->committed ? n_rows(w, &then, kind) : 0;
    if (kind != HSRI_STORE_PLAIN)
        return want > have ? want - have : 0;
    uint64_t more = pages_of(n) > pages_of(s->prepared) ? pages_of(n) - pages_of(s->prepared) : 0;
    /* The ring: sink, window, rollback, what a step spans, and one for a rollback of nothing. */
    uint64_t ring = w->opts.sink_pages + w->opts.window_pages + pages_of(w->opts.rollback_tokens) - (w->opts.rollback_tokens > 0) +
                    (w->opts.chunk_tokens + 127) / 64;
    return encodes(w) ? smaller(more, ring > have ? ring - have : 0) : more;
}

static bool has_store(const world *w, int kind)
{
    return kind == HSRI_STORE_PLAIN || (kind == HSRI_STORE_ENCODED && encodes(w)) ||
           ((kind == HSRI_STORE_INDEX || kind == HSRI_STORE_STRIPS) && w->opts.index.per_slab > 0);
}

static void verify_store_counters(const world *w, const session *s, const hsri_cache_stats *stats, int kind)
{
    const hsri_store_stats *store = &stats->stores[kind];
    uint64_t used = n_rows(w, s, kind) * per_page(w), missing = rows_to(w, s, kind, s->reserved) * per_page(w);
    /* Between prepare and commit, a cut row that a fork sees is held twice; before, a shared one may have to be copied. */
    CHECK(store->used >= used && store->used <= used + (s->family && s->prepared > s->committed ? per_page(w) : 0));
    uint64_t copies = s->family && s->reserved > s->committed ? per_page(w) : 0;
    CHECK(store->reserved_blocks >= blocks_missing(w, stats, kind, missing));
    CHECK(store->reserved_blocks <= blocks_missing(w, stats, kind, missing + copies));
}

static void verify_session_counters(const world *w, const session *s)
{
    hsri_cache_stats stats = cache_stats(s);
    uint64_t pages = pages_of(s->prepared) * per_page(w), blocks = 0, reserved = 0;
    CHECK(hsri_cache_committed(s->cache) == s->committed && hsri_cache_reserved(s->cache) == s->reserved);
    CHECK(hsri_cache_encoded_pages(s->cache) == s->encoded);
    CHECK(stats.pages_open + stats.pages_full + stats.pages_sealed == pages);
    CHECK(stats.pages_open == (pages_of(s->prepared) - s->committed / 64) * per_page(w));
    uint64_t kept = smaller(s->sealed, pages_of(s->prepared)), sink = smaller(w->opts.sink_pages, kept);
    CHECK(stats.pages_sealed == (kept - sink) * per_page(w));
    for (int kind = 0; kind < HSRI_N_STORES; kind++) {
        if (has_store(w, kind))
            verify_store_counters(w, s, &stats, kind);
        blocks += stats.stores[kind].blocks;
        reserved += stats.stores[kind].reserved_blocks;
    }
    CHECK(stats.blocks == blocks && stats.reserved_blocks == reserved);
    CHECK(stats.bytes == stats.pages_plain * slot_bytes(w, HSRI_STORE_PLAIN) + stats.pages_encoded * slot_bytes(w, HSRI_STORE_ENCODED));
    CHECK(stats.slots_used == stats.pages_plain + stats.pages_encoded);
    CHECK(stats.index_bytes == stats.stores[HSRI_STORE_INDEX].used * HSRI_SLAB_BYTES +
                                   stats.stores[HSRI_STORE_STRIPS].used * hsri_strip_slot_bytes(&w->opts.index));
}

static void verify_counters(const world *w)
{
    uint64_t held = 0, holders = 0, reserved = 0, used = 0;
    for (int k = 0; k < MAX_SESSIONS; k++)
        if (w->sessions[k].cache) {
            verify_session_counters(w, &w->sessions[k]);
            held += cache_stats(&w->sessions[k]).blocks;
            reserved += cache_stats(&w->sessions[k]).reserved_blocks;
        }
    hsri_pool_stats pool = pool_stats(w);
    for (uint32_t b = 0; b < pool.total; b++) {
        holders += hsri_pool_holders(w->pool, b);
        used += hsri_pool_holders(w->pool, b) > 0;
    }
    CHECK(held == holders && used == pool.used && reserved == pool.reserved);
}

/* Count by the device's tables the slots that are free in blocks that only this session holds. */
static void verify_slots(world *w, const session *s, int kind)
{
    uint64_t n_free = 0, n_blocks = 0;
    uint32_t used[300] = { 0 };
    for (uint64_t row = 0; row <= pages_of(s->prepared); row++)
        for (uint64_t i = 0; i < per_page(w) && has_row(w, s, kind, row); i++)
            used[entry_of(w, s, kind, row, i) >> 8]++;
    for (uint32_t b = 0; b < 300; b++)
        if (used[b]) {
            n_blocks++;
            n_free += hsri_pool_holders(w->pool, b) == 1 ? slots_per_block(w, kind) - used[b] : 0;
        }
    const hsri_cache_stats stats = cache_stats(s);
    CHECK(stats.stores[kind].blocks == n_blocks && stats.stores[kind].wasted == n_free);
}

/* Bring the device's tables up to date without computing, and look at every page. */
static bool verify(world *w, session *s)
{
    CHECK(hsri_cache_prepare(s->cache, &w->queue.base, s->committed, NULL) == HSR_OK);
    CHECK(fake_wait(&w->queue.base, NULL) == HSR_OK);
    bool right = verify_pages(w, s);
    CHECK(hsri_cache_commit(s->cache, s->committed, NULL) == HSR_OK);
    model_commit(w, s, s->committed);
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        if (has_store(w, kind))
            verify_slots(w, s, kind);
    return right;
}

/* ---- operations on both the cache and the model ---- */

static session *free_session(world *w)
{
    for (int k = 0; k < MAX_SESSIONS; k++)
        if (!w->sessions[k].cache)
            return &w->sessions[k];
    return NULL;
}

static hsr_status create(world *w, session **out)
{
    session *s = *out = free_session(w);
    w->opts.lineage = ++w->lineage;
    *s = (session){ 0 };
    model_create(w, s);
    return hsri_cache_create(&w->fake.base, w->pool, &w->shape, &w->opts, &s->cache, NULL);
}

static void destroy(session *s)
{
    hsri_cache_destroy(s->cache);
    s->cache = NULL;
}

static hsr_status admit(session *s, uint64_t n)
{
    HSRI_TRY(hsri_cache_admit(s->cache, n, NULL));
    s->reserved = n > s->reserved ? n : s->reserved;
    return HSR_OK;
}

static void truncate_to(const world *w, session *s, uint64_t n)
{
    bool possible = can_truncate(w, s, n);
    hsri_pool_stats before = pool_stats(w), after;
    CHECK(hsri_cache_truncate(s->cache, n, NULL) == (possible ? HSR_OK : HSR_E_STATE));
    after = pool_stats(w);
    CHECK(possible || memcmp(&before, &after, sizeof before) == 0);
    if (possible)
        model_truncate(w, s, n);
}

/* The last position that the next step may prepare. */
static uint64_t step_end(const session *s)
{
    uint64_t limit = hsri_cache_step_limit(s->cache);
    CHECK(limit > 0);
    return smaller(limit, UINT64_MAX - s->committed) + s->committed;
}

/* A step of positions up to n that completes up to `done`. If the device fails, the step is undone. */
static hsr_status step(world *w, session *s, uint64_t n, uint64_t done)
{
    uint64_t reserved = s->reserved;
    HSRI_TRY(hsri_cache_prepare(s->cache, &w->queue.base, n, NULL));
    model_prepare(w, s, n);
    verify_counters(w);
    hsr_status status = fake_wait(&w->queue.base, NULL);
    if (status < 0) {
        truncate_to(w, s, s->committed);
        CHECK(hsri_cache_commit(s->cache, s->committed, NULL) == HSR_OK);   /* of nothing: must not believe the failed queue */
        model_commit(w, s, s->committed);
        CHECK(admit(s, reserved) == HSR_OK);
        return status;
    }
    verify_pages(w, s);
    compute(w, s, s->committed, n);
    CHECK(hsri_cache_commit(s->cache, done, NULL) == HSR_OK);
    model_commit(w, s, done);
    return HSR_OK;
}

static hsr_status fork_session(world *w, session *s, session **out)
{
    session *f = free_session(w);
    *out = NULL;
    hsri_cache *cache;
    hsr_status status = hsri_cache_fork(s->cache, &w->queue.base, &cache, NULL);
    if (status < 0) {
        CHECK(cache == NULL);
        return status;
    }
    *f = *s;
    f->cache = cache;
    f->reserved = f->prepared = f->committed;
    f->encoded = f->encoded_done = f->sealed;
    f->family = s->family = true;
    *out = f;
    return HSR_OK;
}

/* Compute tokens up to n in steps of `chunk`. */
static void run_to(world *w, session *s, uint64_t n, uint64_t chunk)
{
    CHECK(admit(s, n) == HSR_OK);
    while (s->committed < n) {
        uint64_t next = smaller(smaller(s->committed + chunk, n), step_end(s));
        if (!CHECK(step(w, s, next, next) == HSR_OK))
            return;
    }
}

/* ---- sizes ---- */

static void test_sizes(void)
{
    CHECK(hsri_kv_slot_bytes(HSRI_KV_TYPE_BF16, 64) == 20480 && hsri_kv_slots_per_block(HSRI_KV_TYPE_BF16, 64) == 51);
    CHECK(hsri_kv_slot_bytes(HSRI_KV_TYPE_F32, 64) == 36864 && hsri_kv_slots_per_block(HSRI_KV_TYPE_F32, 64) == 28);
    CHECK(hsri_kv_slots_per_block(HSRI_KV_TYPE_BF16, 1) == 256);
    CHECK(hsri_kv_slots_per_block(HSRI_KV_TYPE_F32, 4096) == 0);
    CHECK(hsri_kv_slots_per_block(HSRI_KV_TYPE_F32, UINT32_MAX) == 0);

    world w;
    world_init(&w, &shapes[1], 4);
    CHECK(hsri_kv_blocks_for(&w.shape, &w.opts, 0) == 0);
    CHECK(hsri_kv_blocks_for(&w.shape, &w.opts, 1) == 1);
    CHECK(hsri_kv_blocks_for(&w.shape, &w.opts, 8 * 64) == 1);
    CHECK(hsri_kv_blocks_for(&w.shape, &w.opts, 8 * 64 + 1) == 2);
    uint64_t most = UINT64_MAX / 64 + 1;   /* pages, 6 slots each, 51 a block */
    CHECK(hsri_kv_blocks_for(&w.shape, &w.opts, UINT64_MAX) == (most * 6 + 50) / 51);
    hsri_kv_shape large = w.shape;
    large.head_dim = 4096;
    large.view.slot_bytes[HSRI_KV_TYPE_F32] = hsri_kv_slot_bytes(HSRI_KV_TYPE_F32, 4096);
    hsri_cache_opts opts = { .type = HSRI_KV_TYPE_F32 };
    CHECK(hsri_kv_blocks_for(&large, &opts, 1) == UINT64_MAX);
    hsri_cache *cache;
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &large, &opts, &cache, NULL) == HSR_E_UNSUPPORTED && !cache);
    opts = (hsri_cache_opts){ .type = HSRI_KV_TYPE_BF16, .format = HSRI_KV_TYPE_COMPACT, .window_pages = 1, .chunk_tokens = 64 };
    large.head_dim = 24;
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &large, &opts, &cache, NULL) == HSR_E_UNSUPPORTED && !cache);
    opts.window_pages = 0;
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &opts, &cache, NULL) == HSR_E_INVALID && !cache);
    opts = (hsri_cache_opts){ .type = HSRI_KV_TYPE_BF16, .format = HSRI_KV_TYPE_COMPACT, .window_pages = 1 };
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &opts, &cache, NULL) == HSR_E_INVALID && !cache);
    hsri_cache_destroy(NULL);
    world_end(&w);
}

static void ring_world(world *w, const shape_case *sc, uint64_t rollback, uint32_t chunk, uint64_t blocks)
{
    world_init(w, sc, blocks);
    w->opts.rollback_tokens = rollback;
    w->opts.chunk_tokens = chunk;
    w->opts.window_pages = 3;
}

/* Of encoded formats, the plain pages are a ring; a pool of what blocks_for says is enough for the whole way, and the ring is
 * used to its last page. */
static void test_ring(const shape_case *sc, uint64_t rollback, uint32_t chunk)
{
    world w;
    uint64_t n = 3000;
    ring_world(&w, sc, rollback, chunk, 1);
    uint64_t blocks = hsri_kv_blocks_for(&w.shape, &w.opts, n), most = 0;
    world_end(&w);

    ring_world(&w, sc, rollback, chunk, blocks);
    session *s;
    CHECK(create(&w, &s) == HSR_OK);
    CHECK(admit(s, n) == HSR_OK && cache_stats(s).reserved_blocks == blocks);
    for (uint64_t i = 0; s->committed < n; i++) {
        uint64_t next = smaller(i % 5 ? step_end(s) : s->committed + 1 + i % 64, n);
        CHECK(hsri_cache_prepare(s->cache, &w.queue.base, smaller(next, step_end(s)), NULL) == HSR_OK);
        most = cache_stats(s).pages_plain > most ? cache_stats(s).pages_plain : most;
        CHECK(fake_wait(&w.queue.base, NULL) == HSR_OK && hsri_cache_truncate(s->cache, s->committed, NULL) == HSR_OK);
        CHECK(hsri_cache_admit(s->cache, n, NULL) == HSR_OK);
        if (!CHECK(step(&w, s, smaller(next, step_end(s)), smaller(next, step_end(s))) == HSR_OK))
            break;
    }
    uint64_t ring = w.opts.sink_pages + 3 + pages_of(rollback) - (rollback > 0) + smaller((chunk + 127) / 64, 3);
    CHECK(most == ring * per_page(&w) || (rollback == 0 && most + per_page(&w) == ring * per_page(&w)));
    CHECK(verify(&w, s) && pool_stats(&w).peak_used <= blocks);
    destroy(s);
    world_end(&w);
}

/* ---- admission ---- */

static void test_admission(void)
{
    world w;
    world_init(&w, &shapes[0], 8);   /* 24 slots = 6 pages */
    session *a, *b;
    hsr_error err = HSR_ERROR_INIT;
    CHECK(create(&w, &a) == HSR_OK);
    CHECK(create(&w, &b) == HSR_OK);
    CHECK(admit(a, 6 * 64) == HSR_OK && cache_stats(a).reserved_blocks == 8);
    CHECK(hsri_cache_admit(a->cache, 6 * 64 + 1, &err) == HSR_E_NOSPACE);
    CHECK(strstr(err.message, "2 more") && strstr(err.message, "0 of 8"));
    CHECK(admit(b, 1) == HSR_E_NOSPACE);
    CHECK(hsri_cache_admit(b->cache, UINT64_MAX, NULL) == HSR_E_CONTEXT);
    verify_counters(&w);

    hsri_cache_unadmit(a->cache, 100);
    a->reserved = 100;
    CHECK(cache_stats(a).reserved_blocks == 3);
    CHECK(admit(b, 3 * 64) == HSR_OK && admit(b, 3 * 64 + 1) == HSR_E_NOSPACE);
    run_to(&w, b, 3 * 64, 50);
    run_to(&w, a, 100, 30);
    verify_counters(&w);

    /* One free slot is left in a's blocks, two pages need 8: three blocks, of which one is there. */
    CHECK(cache_stats(a).slots_wasted == 1 && pool_stats(&w).free == 1);
    CHECK(admit(a, 129) == HSR_OK && cache_stats(a).reserved_blocks == 1);
    CHECK(admit(a, 193) == HSR_E_NOSPACE);
    hsri_cache_unadmit(a->cache, 0);
    a->reserved = a->prepared;
    verify_counters(&w);
    CHECK(hsri_cache_prepare(a->cache, &w.queue.base, 101, NULL) == HSR_E_INTERNAL);
    CHECK(hsri_cache_commit(a->cache, 101, NULL) == HSR_E_INTERNAL);
    CHECK(hsri_cache_commit(a->cache, 99, NULL) == HSR_E_INTERNAL);
    CHECK(hsri_cache_truncate(a->cache, 101, NULL) == HSR_E_INVALID);
    verify(&w, a);
    verify(&w, b);
    destroy(a);
    destroy(b);
    world_end(&w);
}

/* ---- sealing ---- */

/* Window 2, sink 1, 100 tokens of rollback: page p is encoded before the step of the first query at page p + 2, and sealed when
 * a query at page p + 4 was the last. */
static void test_seal_rule(const shape_case *sc)
{
    world w;
    world_init(&w, sc, 100);
    session *s;
    CHECK(create(&w, &s) == HSR_OK);
    run_to(&w, s, 3 * 64, 64);
    CHECK(w.fake.n_seals == 0);
    run_to(&w, s, 3 * 64 + 1, 1);
    CHECK(w.fake.n_seals == per_page(&w) && hsri_cache_encoded_pages(s->cache) == 2 && cache_stats(s).pages_sealed == 0);
    run_to(&w, s, 5 * 64, 64);
    CHECK(cache_stats(s).pages_sealed == 0 && cache_stats(s).pages_plain == 5 * per_page(&w));
    run_to(&w, s, 5 * 64 + 1, 1);
    CHECK(cache_stats(s).pages_sealed == per_page(&w));
    CHECK(cache_stats(s).pages_plain == (encodes(&w) ? 5 : 6) * per_page(&w));
    CHECK(is_sealed(hsri_cache_page_state(s->cache, 1, 0, 0)) && !is_sealed(hsri_cache_page_state(s->cache, 0, 0, 0)));

    /* Back by the rollback: nothing is unsealed, and encoded pages stay encoded. Further: plain formats only. */
    run_to(&w, s, 10 * 64 + 10, 64);
    uint64_t sealed = cache_stats(s).pages_sealed, seals = w.fake.n_seals;
    CHECK(sealed == 6 * per_page(&w) && seals == 8 * per_page(&w));
    truncate_to(&w, s, 10 * 64 + 10 - 100);
    CHECK(cache_stats(s).pages_sealed == sealed && s->committed == 10 * 64 + 10 - 100);
    run_to(&w, s, 10 * 64 + 10, 64);
    CHECK(w.fake.n_seals == seals + per_page(&w));     /* page 8 was cut */
    truncate_to(&w, s, 5 * 64 + 3);
    CHECK(cache_stats(s).pages_sealed == (encodes(&w) ? 6 : 3) * per_page(&w));
    run_to(&w, s, 10 * 64 + 10, 64);
    CHECK(cache_stats(s).pages_sealed == sealed && verify(&w, s));
    verify_counters(&w);

    /* A failed step's seals are not believed: the next one writes them again. */
    CHECK(admit(s, 11 * 64 + 1) == HSR_OK && step(&w, s, 11 * 64, 11 * 64) == HSR_OK);
    w.fake.fail_at = w.fake.n_calls + 1;
    CHECK(step(&w, s, 11 * 64 + 1, 11 * 64 + 1) == HSR_E_NOMEM);
    CHECK(step(&w, s, 11 * 64 + 1, 11 * 64 + 1) == HSR_OK);
    verify(&w, s);

    /* The sink alone, or nothing, can always be kept. */
    truncate_to(&w, s, 40);
    CHECK(s->committed == 40 && cache_stats(s).pages_sealed == 0);
    run_to(&w, s, 8 * 64, 64);
    verify(&w, s);
    truncate_to(&w, s, 0);
    CHECK(s->committed == 0 && cache_stats(s).blocks == 0);
    destroy(s);
    world_end(&w);
}

/* A step may not compute a page that one of its own queries reads encoded. */
static void test_step_limit(void)
{
    world w;
    world_init(&w, &shapes[4], 100);
    w.opts.chunk_tokens = 1000;
    session *s;
    CHECK(create(&w, &s) == HSR_OK && admit(s, 2000) == HSR_OK);
    CHECK(hsri_cache_step_limit(s->cache) == 2 * 64);
    CHECK(hsri_cache_prepare(s->cache, &w.queue.base, 129, NULL) == HSR_E_INTERNAL);
    CHECK(step(&w, s, 100, 100) == HSR_OK && hsri_cache_step_limit(s->cache) == 3 * 64 - 100);
    run_to(&w, s, 2000, 1000);
    CHECK(verify(&w, s));
    destroy(s);
    w.opts.window_pages = 20;
    CHECK(create(&w, &s) == HSR_OK && hsri_cache_step_limit(s->cache) == 1000);
    destroy(s);
    w.opts.format = w.opts.type;
    CHECK(create(&w, &s) == HSR_OK && hsri_cache_step_limit(s->cache) == 20 * 64);
    destroy(s);
    w.opts.index = (hsri_index_shape){ 0 };
    CHECK(create(&w, &s) == HSR_OK && hsri_cache_step_limit(s->cache) == UINT64_MAX);
    destroy(s);
    world_end(&w);
}

/* More pages sealed in one step than one operation's list holds. */
static void test_many_seals(void)
{
    world w;
    world_init(&w, &shapes[2], 10);
    session *s;
    CHECK(create(&w, &s) == HSR_OK);
    run_to(&w, s, MAX_TOKENS - 1, MAX_TOKENS);
    run_to(&w, s, MAX_TOKENS, 1);
    verify(&w, s);
    CHECK(cache_stats(s).pages_sealed == (MAX_TOKENS / 64 - 4) * per_page(&w) && cache_stats(s).pages_sealed > 512);
    destroy(s);
    world_end(&w);
}

#ifndef NDEBUG
static void test_poison(void)
{
    world w;
    world_init(&w, &shapes[1], 4);
    session *s;
    CHECK(create(&w, &s) == HSR_OK && admit(s, 64) == HSR_OK);
    for (int round = 0; round < 2; round++) {
        CHECK(hsri_cache_prepare(s->cache, &w.queue.base, 10, NULL) == HSR_OK && fake_wait(&w.queue.base, NULL) == HSR_OK);
        const uint8_t *slot = slot_of(&w, s, 0, 1);
        for (uint64_t at = 0; at < w.shape.view.slot_bytes[w.opts.type]; at++)
            if (!CHECK(slot[at] == 0xFF))
                break;
        memset(slot_of(&w, s, 0, 1), 0, 100);
        CHECK(hsri_cache_truncate(s->cache, 0, NULL) == HSR_OK && hsri_cache_admit(s->cache, 64, NULL) == HSR_OK);
    }
    destroy(s);
    world_end(&w);
}
#endif

/* ---- forks ---- */

/* Both sides go on from a shared past; neither sees the other; the last one to go returns the blocks. */
static void test_fork_order(int first, int second)
{
    world w;
    world_init(&w, &shapes[0], 60);
    session *s[3];
    CHECK(create(&w, &s[0]) == HSR_OK);
    run_to(&w, s[0], 9 * 64 + 20, 100);
    CHECK(fork_session(&w, s[0], &s[1]) == HSR_OK);
    run_to(&w, s[1], 11 * 64, 100);
    CHECK(fork_session(&w, s[1], &s[2]) == HSR_OK);
    for (int k = 0; k < 3; k++)
        run_to(&w, s[k], 12 * 64 + (uint64_t)k, 70);
    verify_counters(&w);
    CHECK(pool_stats(&w).used < 3 * cache_stats(s[0]).blocks);

    static const int rest[3][3] = { { -1, 2, 1 }, { 2, -1, 0 }, { 1, 0, -1 } };
    int order[3] = { first, second, rest[first][second] };
    for (int k = 0; k < 3; k++) {
        destroy(s[order[k]]);
        verify_counters(&w);
        for (int j = k + 1; j < 3; j++) {
            CHECK(verify(&w, s[order[j]]));
            truncate_to(&w, s[order[j]], s[order[j]]->committed - 40);
            run_to(&w, s[order[j]], s[order[j]]->committed + 90, 64);
        }
        verify_counters(&w);
    }
    world_end(&w);
}

/* A truncate into a shared sealed page: the page is copied before it is written, and the sibling's slots, headers included, never
 * change. */
static void test_truncate_shared(void)
{
    world w;
    world_init(&w, &shapes[1], 20);
    session *a, *b;
    CHECK(create(&w, &a) == HSR_OK);
    run_to(&w, a, 12 * 64, 64);
    run_to(&w, a, 12 * 64 + 1, 1);
    CHECK(fork_session(&w, a, &b) == HSR_OK);
    verify(&w, b);
    uint64_t sealed = cache_stats(b).pages_sealed / per_page(&w);
    CHECK(sealed == 8);
    for (uint64_t page = 1; page <= sealed; page++)
        for (uint64_t i = 0; i < per_page(&w); i++)
            memset(slot_of(&w, b, page, i) + offsetof(hsri_page_header, crc32c), 0xCC, 4);   /* as if written home */

    hsri_pool_stats before = pool_stats(&w);
    truncate_to(&w, a, 3 * 64 + 5);
    CHECK(pool_stats(&w).reserved == before.reserved);
    verify(&w, a);
    run_to(&w, a, 12 * 64 + 1, 64);
    CHECK(verify(&w, a) && verify(&w, b));
    for (uint64_t page = 1; page <= sealed; page++)
        for (uint64_t i = 0; i < per_page(&w); i++) {
            uint32_t crc;
            memcpy(&crc, slot_of(&w, b, page, i) + offsetof(hsri_page_header, crc32c), 4);
            CHECK(crc == 0xCCCCCCCC);
        }
    verify_counters(&w);

    /* Truncated again, but now the sibling ends before the next write: nothing is left to copy. */
    truncate_to(&w, b, 3 * 64 + 5);
    truncate_to(&w, a, 2 * 64 + 5);
    CHECK(admit(a, 2 * 64 + 6) == HSR_OK);
    verify_counters(&w);
    destroy(b);
    CHECK(cache_stats(a).reserved_blocks == 0);
    verify_counters(&w);
    run_to(&w, a, 5 * 64, 64);
    verify(&w, a);
    destroy(a);
    world_end(&w);
}

/* A step that copies on write fails at one of its calls: the page stays what it was, for both sides, and a second try works. */
static hsr_status fail_copy_on_write(uint64_t fault)
{
    world w;
    world_init(&w, &shapes[0], 100);
    session *a, *b, *filler;
    CHECK(create(&w, &a) == HSR_OK);
    CHECK(create(&w, &filler) == HSR_OK);
    run_to(&w, a, 12 * 64 + 1, 64);
    CHECK(fork_session(&w, a, &b) == HSR_OK);
    truncate_to(&w, a, 3 * 64 + 5);
    run_to(&w, filler, 12 * 64, 64);   /* takes the blocks that are still committed: from here on each one is a call */
    CHECK(admit(a, 6 * 64) == HSR_OK);
    w.fake.fail_at = w.fake.n_calls + fault;
    hsr_status status = step(&w, a, 6 * 64, 6 * 64);
    w.fake.fail_at = 0;
    verify_counters(&w);
    CHECK(verify(&w, a) && verify(&w, b));
    if (status < 0)
        CHECK(step(&w, a, 6 * 64, 6 * 64) == HSR_OK);
    CHECK(verify(&w, a) && verify(&w, b));
    destroy(b);
    destroy(a);
    destroy(filler);
    world_end(&w);
    return status;
}

static void test_failed_copy_on_write(void)
{
    uint64_t fault = 1;
    while (fault < 100 && fail_copy_on_write(fault) == HSR_E_NOMEM)
        fault++;
    CHECK(fault >= 5 && fault < 100);   /* three blocks and the wait, at least */
}

/* What was shared once, before the block was regained, is not taken for shared when another slot of the block is. */
static void test_shared_again(void)
{
    world w;
    world_init(&w, &shapes[0], 4);
    hsri_slots parent, child;
    uint32_t entries[2];
    hsri_slots_init(&parent, w.pool, 3);
    hsri_slots_init(&child, w.pool, 3);
    CHECK(hsri_slots_take(&parent, &entries[0], NULL) == HSR_E_INTERNAL);
    CHECK(hsri_slots_promise(&parent, 2));
    for (int i = 0; i < 2; i++)
        CHECK(hsri_slots_take(&parent, &entries[i], NULL) == HSR_OK);
    CHECK(hsri_slots_share(&parent, &child, entries[0], NULL) == HSR_OK && parent.n_free == 0);
    CHECK(hsri_slots_is_shared(&parent, entries[0]) && hsri_slots_is_shared(&child, entries[0]));
    CHECK(!hsri_slots_is_shared(&parent, entries[1]));
    CHECK(hsri_slots_drop(&child, entries[0]) == hsri_entry_block(entries[0]));
    CHECK(hsri_slots_regain(&parent, hsri_entry_block(entries[0])) && parent.n_free == 1 && !hsri_slots_is_shared(&parent, entries[0]));
    CHECK(hsri_slots_share(&parent, &child, entries[1], NULL) == HSR_OK);
    CHECK(!hsri_slots_is_shared(&parent, entries[0]) && hsri_slots_is_shared(&parent, entries[1]));
    CHECK(hsri_slots_drop(&parent, entries[0]) == HSRI_NO_BLOCK && hsri_slots_drop(&parent, entries[1]) == hsri_entry_block(entries[1]));
    CHECK(hsri_slots_regain(&child, hsri_entry_block(entries[1])) && !hsri_slots_regain(&parent, hsri_entry_block(entries[1])));
    hsri_slots_clear(&parent, NULL, NULL);
    hsri_slots_clear(&child, NULL, NULL);
    world_end(&w);
}

/* Free slots on both sides of a shared block that has free slots, too: these are not for taking. */
static void test_shared_between(void)
{
    world w;
    world_init(&w, &shapes[0], 4);
    hsri_slots parent, child;
    uint32_t shared, own[5], entry;
    hsri_slots_init(&parent, w.pool, 3);
    hsri_slots_init(&child, w.pool, 3);
    CHECK(hsri_slots_promise(&child, 5) && hsri_slots_promise(&parent, 1));
    for (int i = 0; i < 3; i++)
        CHECK(hsri_slots_take(&child, &own[i], NULL) == HSR_OK && hsri_entry_block(own[i]) == 0);
    CHECK(hsri_slots_take(&parent, &shared, NULL) == HSR_OK && hsri_entry_block(shared) == 1);
    CHECK(hsri_slots_share(&parent, &child, shared, NULL) == HSR_OK);
    for (int i = 3; i < 5; i++)
        CHECK(hsri_slots_take(&child, &own[i], NULL) == HSR_OK && hsri_entry_block(own[i]) == 2);
    CHECK(hsri_slots_drop(&child, own[1]) == HSRI_NO_BLOCK && child.n_free == 2);
    CHECK(hsri_slots_promise(&child, 2) && child.n_reserved == 0);
    CHECK(hsri_slots_take(&child, &entry, NULL) == HSR_OK && entry == own[1]);
    CHECK(hsri_slots_take(&child, &entry, NULL) == HSR_OK && hsri_entry_block(entry) == 2);
    CHECK(hsri_slots_drop(&parent, shared) == 1 && hsri_slots_regain(&child, 1) && child.n_free == 2);
    hsri_slots_clear(&parent, NULL, NULL);
    hsri_slots_clear(&child, NULL, NULL);
    world_end(&w);
}

/* Slots taken near each other share a block, as long as the pool has blocks to spare; a slot moves to another block. */
static void test_near(void)
{
    world w;
    world_init(&w, &shapes[0], 3);
    hsri_slots slots;
    uint32_t near[2] = { HSRI_NO_BLOCK, HSRI_NO_BLOCK }, entries[9];
    hsri_slots_init(&slots, w.pool, 3);
    CHECK(hsri_slots_take_near(&slots, &near[0], &entries[0], NULL) == HSR_E_INTERNAL);
    CHECK(hsri_slots_promise(&slots, 6) && slots.n_reserved == 2);
    for (int i = 0; i < 4; i++)
        CHECK(hsri_slots_take_near(&slots, &near[i % 2], &entries[i], NULL) == HSR_OK && hsri_entry_block(entries[i]) == near[i % 2]);
    CHECK(near[0] != near[1] && slots.n_free == 2 && slots.n_promised == 2 && slots.n_reserved == 0 && hsri_pool_available(w.pool) == 1);
    CHECK(hsri_slots_promise(&slots, 5) && hsri_pool_available(w.pool) == 0);
    for (int i = 4; i < 9; i++)         /* what was promised is there, wherever it lies */
        CHECK(hsri_slots_take_near(&slots, &near[0], &entries[i], NULL) == HSR_OK);
    CHECK(slots.n_free == 0 && slots.n_promised == 0 && slots.n_used == 9);

    uint32_t to;
    CHECK(!hsri_slots_take_elsewhere(&slots, entries[0], &to));
    CHECK(hsri_slots_drop(&slots, entries[1]) == HSRI_NO_BLOCK && hsri_slots_take_elsewhere(&slots, entries[0], &to) && to == entries[1]);
    CHECK(slots.n_used == 9 && slots.n_free == 0 && hsri_slots_drop(&slots, entries[0]) == HSRI_NO_BLOCK);
    CHECK(slots.n_used == 8 && slots.n_free == 1 && slots.n_blocks == 3);
    CHECK(!hsri_slots_take_elsewhere(&slots, entries[2], &to));       /* only its own block has room */
    hsri_slots_clear(&slots, NULL, NULL);
    world_end(&w);
}

/* A fork does not share pages whose sealing may have failed. */
static void test_fork_in_doubt(void)
{
    world w;
    world_init(&w, &shapes[1], 20);
    session *a, *b;
    CHECK(create(&w, &a) == HSR_OK);
    run_to(&w, a, 8 * 64, 64);
    CHECK(hsri_cache_prepare(a->cache, &w.queue.base, a->committed, NULL) == HSR_OK);
    w.fake.fail_at = w.fake.n_calls + 1;
    CHECK(fake_wait(&w.queue.base, NULL) == HSR_E_NOMEM);
    CHECK(fork_session(&w, a, &b) == HSR_OK);
    CHECK(verify(&w, b) && verify(&w, a));
    destroy(a);
    destroy(b);
    world_end(&w);
}

/* A fork takes free slots away from its parent: the parent's reservation stays good, or the fork is refused and nothing changes. */
static void test_fork_keeps_reservation(void)
{
    world w;
    world_init(&w, &shapes[1], 7);   /* 51 slots a block, 6 a page */
    session *a, *b;
    CHECK(create(&w, &a) == HSR_OK);
    run_to(&w, a, 12 * 64 + 1, 64);             /* 13 pages: 78 slots, two blocks, 24 free */
    CHECK(admit(a, 17 * 64) == HSR_OK);         /* the free slots will do */
    hsri_pool_stats before = pool_stats(&w);
    CHECK(before.used == 2 && before.reserved == 0);
    CHECK(fork_session(&w, a, &b) == HSR_OK);
    CHECK(cache_stats(a).slots_wasted + cache_stats(a).reserved_blocks * 51 >= 24);
    verify_counters(&w);
    uint64_t during = pool_stats(&w).reserved;
    destroy(b);
    hsri_pool_stats after = pool_stats(&w);
    CHECK(after.used == before.used && after.reserved == before.reserved);
    verify_counters(&w);

    /* The copies alone would fit, the parent's loss with them does not. */
    session *filler;
    CHECK(create(&w, &filler) == HSR_OK);
    CHECK(during == 1 && admit(filler, 4 * 8 * 64) == HSR_OK);
    CHECK(pool_stats(&w).free - pool_stats(&w).reserved == 1);
    before = pool_stats(&w);
    CHECK(fork_session(&w, a, &b) == HSR_E_NOSPACE);
    after = pool_stats(&w);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    verify_counters(&w);
    hsri_cache_unadmit(filler->cache, 0);
    filler->reserved = 0;
    CHECK(fork_session(&w, a, &b) == HSR_OK);
    run_to(&w, a, 17 * 64, 64);
    verify(&w, a);
    verify(&w, b);
    CHECK(hsri_cache_admit(a->cache, 17 * 64 + 1, NULL) == HSR_OK);
    CHECK(hsri_cache_prepare(a->cache, &w.queue.base, 17 * 64 + 1, NULL) == HSR_OK);
    hsri_cache *none;
    CHECK(hsri_cache_fork(a->cache, &w.queue.base, &none, NULL) == HSR_E_STATE && !none);
    CHECK(fake_wait(&w.queue.base, NULL) == HSR_OK);
    destroy(a);
    destroy(b);
    destroy(filler);
    world_end(&w);
}

/* ---- fragmentation: half of the sessions end, and one that needs exactly the rest is admitted ---- */

static void test_fragmentation(void)
{
    world w;
    world_init(&w, &shapes[0], 300);
    session *s[32];
    for (int k = 0; k < 32; k++)
        CHECK(create(&w, &s[k]) == HSR_OK);
    for (uint64_t round = 0; round < 6; round++)    /* grown in turns, so that their blocks interleave */
        for (int k = 0; k < 32; k++)
            run_to(&w, s[k], s[k]->committed + 1 + hsri_rng_u64(7, round * 32 + (uint64_t)k) % 90, 64);
    for (int k = 0; k < 32; k += 2)
        destroy(s[k]);
    verify_counters(&w);
    hsri_pool_stats pool = pool_stats(&w);
    CHECK(pool.largest_free_run < pool.free);

    session *large;
    uint64_t pages = pool.free * slots_per_block(&w, HSRI_STORE_PLAIN) / per_page(&w);
    CHECK(create(&w, &large) == HSR_OK);
    CHECK(admit(large, pages * 64 + 1) == HSR_E_NOSPACE);
    run_to(&w, large, pages * 64, 512);
    CHECK(pool_stats(&w).free <= 1);                /* a page is larger than a block */
    for (int k = 1; k < 32; k += 2) {
        uint64_t room = pages_of(s[k]->committed) * 64;
        CHECK(verify(&w, s[k]));
        run_to(&w, s[k], room, 64);                 /* the open page still takes tokens */
    }
    CHECK(verify(&w, large));
    destroy(large);
    for (int k = 1; k < 32; k += 2)
        destroy(s[k]);
    world_end(&w);
}

/* ---- random operations ---- */

typedef struct draws {
    uint64_t seed, index;
} draws;

static uint64_t draw(draws *d, uint64_t below)
{
    return hsri_rng_u64(d->seed, d->index++) % below;
}

/* Blocks that admitting n needs, with as many copies on write as there may be. */
static uint64_t admit_blocks(const world *w, const session *s, uint64_t n, uint64_t copies)
{
    hsri_cache_stats mine = cache_stats(s);
    uint64_t blocks = 0;
    for (int kind = 0; kind < HSRI_N_STORES; kind++)
        if (has_store(w, kind))
            blocks += blocks_missing(w, &mine, kind, rows_to(w, s, kind, n) * per_page(w) + copies);
    return blocks;
}

static void random_admit(world *w, session *s, draws *d)
{
    uint64_t n = s->committed + draw(d, 700);
    if (n > MAX_TOKENS)
        return;
    hsri_pool_stats before = pool_stats(w), after;
    uint64_t available = before.free - before.reserved + cache_stats(s).reserved_blocks;
    uint64_t least = n > s->reserved ? admit_blocks(w, s, n, 0) : 0, most = admit_blocks(w, s, n, s->family ? per_page(w) : 0);
    hsr_status status = admit(s, n);
    after = pool_stats(w);
    if (status < 0) {
        CHECK(status == HSR_E_NOSPACE && memcmp(&before, &after, sizeof before) == 0);
        CHECK(most > available);
    } else {
        CHECK(n <= s->reserved && least <= available);
    }
}

static void random_step(world *w, session *s, draws *d)
{
    if (s->reserved == s->committed)
        return;
    uint64_t n = smaller(s->committed + 1 + draw(d, s->reserved - s->committed), step_end(s));
    if (draw(d, 4) == 0)
        n = s->committed + 1;
    n = n > s->prepared ? n : s->prepared;
    uint64_t done = draw(d, 4) ? n : s->committed + draw(d, n - s->committed + 1);
    if (draw(d, 6) == 0)
        w->fake.fail_at = w->fake.n_calls + 1 + draw(d, 12);
    hsr_status status = step(w, s, n, done);
    CHECK(status == HSR_OK || status == HSR_E_NOMEM);
    w->fake.fail_at = 0;
    if (status == HSR_OK && done < n && draw(d, 2)) {
        uint64_t reserved = s->reserved;
        truncate_to(w, s, done);
        CHECK(s->prepared == done && admit(s, reserved) == HSR_OK);
    }
}

static void random_fork(world *w, session *s, draws *d)
{
    if (!free_session(w))
        return;
    if (s->prepared != s->committed)
        truncate_to(w, s, s->committed);
    hsri_pool_stats before = pool_stats(w), after;
    session *fork;
    if (draw(d, 4) == 0)
        w->fake.fail_at = w->fake.n_calls + 1 + draw(d, 8);
    hsr_status status = fork_session(w, s, &fork);
    w->fake.fail_at = 0;
    after = pool_stats(w);
    if (status < 0) {
        CHECK(status == HSR_E_NOSPACE || status == HSR_E_NOMEM);
        CHECK(before.used == after.used && before.reserved == after.reserved);
    }
}

static void random_op(world *w, draws *d)
{
    session *s = &w->sessions[draw(d, 8)];
    if (!s->cache) {
        if (free_session(w) == s)
            CHECK(create(w, &s) == HSR_OK);
        return;
    }
    uint64_t op = draw(d, 100);
    if (op < 25) {
        random_admit(w, s, d);
    } else if (op < 65) {
        random_step(w, s, d);
    } else if (op < 80) {
        uint64_t near = s->prepared - draw(d, s->prepared < 200 ? s->prepared + 1 : 200);
        truncate_to(w, s, draw(d, 3) ? near : draw(d, 4) ? draw(d, s->prepared + 1) : 0);
    } else if (op < 88) {
        random_fork(w, s, d);
    } else if (op < 93) {
        uint64_t n = draw(d, s->reserved + 1);
        hsri_cache_unadmit(s->cache, n);
        n = n > s->prepared ? n : s->prepared;
        s->reserved = n < s->reserved ? n : s->reserved;
    } else if (op < 96) {
        destroy(s);
    } else if (s->prepared == s->committed) {
        verify(w, s);
    }
}

static void test_random(const shape_case *sc, uint64_t blocks, uint64_t seed, int n_ops)
{
    int failures = check_failures;
    world w;
    world_init(&w, sc, blocks);
    draws d = { .seed = seed };
    uint32_t least_window = encodes(&w) || w.opts.index.per_slab;
    w.opts.window_pages = least_window + (uint32_t)draw(&d, 4 - least_window);
    w.opts.sink_pages = (uint32_t)draw(&d, 3);
    w.opts.rollback_tokens = draw(&d, 2) * draw(&d, 200);
    w.opts.chunk_tokens = 1 + (uint32_t)draw(&d, 200);
    for (int i = 0; i < n_ops && check_failures < 20; i++) {
        random_op(&w, &d);
        verify_counters(&w);
    }
    for (int k = 0; k < MAX_SESSIONS; k++)
        if (w.sessions[k].cache) {
            truncate_to(&w, &w.sessions[k], w.sessions[k].committed);
            verify(&w, &w.sessions[k]);
        }
    for (int k = MAX_SESSIONS - 1; k >= 0; k--)
        if (w.sessions[k].cache) {
            destroy(&w.sessions[k]);
            verify_counters(&w);
        }
    world_end(&w);
    if (check_failures > failures)
        fprintf(stderr, "random operations with seed %llu failed\n", (unsigned long long)seed);
}

/* ---- every call of the device and of the allocator fails once ---- */

/* Do it; if it fails, the counters are as before and a second try succeeds. */
#define TWICE(w, call) do { \
        hsri_pool_stats before_ = pool_stats(w); \
        hsr_status status_ = (call); \
        verify_counters(w); \
        if (status_ < 0) { \
            hsri_pool_stats after_ = pool_stats(w); \
            CHECK(status_ == HSR_E_NOMEM && before_.used == after_.used && before_.reserved == after_.reserved); \
            CHECK((call) == HSR_OK); \
        } \
    } while (0)

static void run_scenario(world *w)
{
    session *a, *b, *c;
    TWICE(w, create(w, &a));
    for (uint64_t n = 150; n <= 1050; n += 150) {
        TWICE(w, admit(a, n));
        TWICE(w, step(w, a, n, n));
    }
    TWICE(w, fork_session(w, a, &b));
    uint64_t back = can_truncate(w, b, 3 * 64 + 9) ? 3 * 64 + 9 : b->committed - 90;
    truncate_to(w, b, back);
    TWICE(w, admit(b, back + 400));
    TWICE(w, step(w, b, back + 120, back + 120));
    TWICE(w, step(w, b, back + 320, back + 320));
    TWICE(w, fork_session(w, b, &c));
    TWICE(w, admit(a, 1150));
    TWICE(w, step(w, a, 1150, 1150));
    destroy(b);
    TWICE(w, admit(c, back + 440));
    TWICE(w, step(w, c, back + 440, back + 440));
    TWICE(w, step(w, c, back + 440, back + 440));
    CHECK(verify_pages(w, c));
    destroy(a);
    destroy(c);
}

static void test_failures(const shape_case *sc, bool of_device, uint64_t stride)
{
    bool failed = true;
    for (uint64_t n = 1; failed; n += stride) {
        world w;
        world_init(&w, sc, 200);
        w.opts.window_pages = w.opts.format == w.opts.type && !w.opts.index.per_slab ? 2 : 4;
        w.opts.chunk_tokens = 200;
        w.fake.fail_at = of_device ? w.fake.n_calls + n : 0;
        failing_allocation = of_device ? 0 : n_allocations + n;
        run_scenario(&w);
        failed = of_device ? w.fake.n_calls >= w.fake.fail_at : n_allocations >= failing_allocation;
        failing_allocation = 0;
        world_end(&w);
        if (!CHECK(check_failures == 0))
            return;
        CHECK(n > 10 || failed);
    }
}

int main(void)
{
    mallopt(M_MMAP_MAX, 0);                     /* Worlds of many MiB come and go: memory that the process keeps need not */
    mallopt(M_TRIM_THRESHOLD, INT_MAX);         /* be cleared by the system for each of them. */
    test_sizes();
    test_admission();
    test_seal_rule(&shapes[1]);
    test_seal_rule(&shapes[4]);
    test_seal_rule(&shapes[5]);
    test_seal_rule(&shapes[6]);
    test_step_limit();
    static const uint64_t rollbacks[] = { 0, 1, 64, 100 };
    for (int i = 0; i < 4; i++) {
        test_ring(&shapes[4], rollbacks[i], 100);
        test_ring(&shapes[5], rollbacks[i], 64);
        test_ring(&shapes[5], rollbacks[i], 1);
    }
    test_many_seals();
#ifndef NDEBUG
    test_poison();
#endif
    for (int first = 0; first < 3; first++)
        for (int second = 0; second < 3; second++)
            if (first != second)
                test_fork_order(first, second);
    test_truncate_shared();
    test_failed_copy_on_write();
    test_shared_again();
    test_shared_between();
    test_near();
    test_fork_in_doubt();
    test_fork_keeps_reservation();
    test_fragmentation();
    for (uint64_t seed = 0; seed < 20; seed++) {
        test_random(&shapes[0], 40, seed, 300);
        test_random(&shapes[1], 12, 100 + seed, 300);
        test_random(&shapes[2], 5, 200 + seed, 300);
        test_random(&shapes[3], 60, 300 + seed, 300);
        test_random(&shapes[4], 20, 400 + seed, 300);
        test_random(&shapes[5], 60, 500 + seed, 300);
        test_random(&shapes[6], 30, 600 + seed, 300);
    }
    test_failures(&shapes[1], true, 1);
    test_failures(&shapes[1], false, 1);
    test_failures(&shapes[4], true, 1);
    test_failures(&shapes[4], false, 1);
    test_failures(&shapes[6], true, 3);
    test_failures(&shapes[0], true, 11);   /* blocks of three slots: many more calls */
    test_failures(&shapes[0], false, 11);
    return CHECK_REPORT();
}
