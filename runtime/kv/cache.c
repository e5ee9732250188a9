/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/cache.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"
#include "kv/slots.h"

#define SLOT_ALIGNMENT 4096u
/* Seals per operation: what the device's list holds. Longer lists go in several rounds over it. */
#define SEAL_ROUND 512u
/* Positions are 32-bit on the device. */
#define MAX_TOKENS (1ull << 32)

/* Work that prepare hands to a queue page by page, in order: pages below `done` are known to be done, pages below `queued` are in
 * the queue. commit believes the queue; truncate, which follows a failed step, does not. */
typedef struct progress {
    uint64_t done, queued;
} progress;

/* Copy on write of the page that holds position `committed`. */
typedef enum cow_stage {
    COW_NONE,
    COW_DUE,       /* open again, but in slots that a fork sees: prepare copies it before the next write */
    COW_QUEUED     /* copies are in the queue; the old slots are kept until commit */
} cow_stage;

struct hsri_cache {
    hsri_device         *dev;
    hsri_pool           *pool;
    const hsri_kv_shape *shape;
    hsri_cache_opts      opts;
    uint64_t             per_page;      /* table entries of one page: layers * kv heads */
    uint64_t             seal_window;   /* pages: the window, and what truncate may go back over */

    uint64_t             reserved, prepared, committed;   /* positions */
    hsri_slots           slots;

    /* Of each (page, layer, head), in table order. The device copies from `entries`, so it moves only in admit. */
    uint32_t            *entries;
    size_t               entries_cap;
    uint8_t             *states;
    size_t               states_cap;
    uint64_t             n_in_state[HSRI_N_PAGE_STATES];

    uint32_t             table_buf;
    uint64_t             table_cap;     /* entries that fit in table_buf */
    progress             table;         /* pages whose entries are on the device */

    progress             sealed;        /* pages [sink_pages, queued) are in a sealed state */
    hsri_seal           *seals;         /* list of this step */
    size_t               seals_cap;
    uint32_t             seals_buf;     /* SEAL_ROUND of them */

    cow_stage            cow;
    uint32_t            *cow_old;       /* per_page entries: where the page was before COW_QUEUED */

    hsri_cache          *next, *prev;   /* ring of the lineage */
#ifndef NDEBUG
    uint32_t             poison_buf;    /* a slot of poison */
    bool                 poison_made;
#endif
};

/* ---- sizes ---- */

static uint64_t pages_of(uint64_t n_tokens)
{
    return n_tokens / HSRI_PAGE_TOKENS + (n_tokens % HSRI_PAGE_TOKENS != 0);
}

void hsri_kv_shape_init(hsri_kv_shape *shape, const hsri_pool *pool, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim)
{
    *shape = (hsri_kv_shape){
        .n_layers = n_layers,
        .n_kv_heads = n_kv_heads,
        .head_dim = head_dim,
        .view = {
            .pool_buf = hsri_pool_buf(pool),
            .n_layers = n_layers,
            .n_kv_heads = n_kv_heads,
            .head_dim = head_dim,
        },
    };
    for (int type = 0; type < HSRI_N_KV_TYPES; type++)
        shape->view.slot_bytes[type] = hsri_kv_slot_bytes((hsri_kv_type)type, head_dim);
}

uint32_t hsri_kv_slot_bytes(hsri_kv_type type, uint32_t head_dim)
{
    return (uint32_t)hsri_min(hsri_round_up(hsri_plain_page_bytes(type, head_dim), SLOT_ALIGNMENT), UINT32_MAX);
}

uint32_t hsri_kv_slots_per_block(hsri_kv_type type, uint32_t head_dim)
{
    return HSRI_BLOCK_BYTES / hsri_kv_slot_bytes(type, head_dim);
}

uint64_t hsri_kv_blocks_for(const hsri_kv_shape *shape, hsri_kv_type type, uint64_t n_tokens)
{
    uint32_t per_block = hsri_kv_slots_per_block(type, shape->head_dim);
    uint64_t slots;
    if (per_block == 0 || __builtin_mul_overflow(pages_of(n_tokens), (uint64_t)shape->n_layers * shape->n_kv_heads, &slots))
        return UINT64_MAX;
    return slots / per_block + (slots % per_block != 0);
}

static uint32_t slot_bytes(const hsri_cache *cache)
{
    return cache->shape->view.slot_bytes[cache->opts.type];
}

static hsri_ref slot_ref(const hsri_cache *cache, uint32_t entry)
{
    return (hsri_ref){
        .buf = cache->shape->view.pool_buf,
        .offset = (uint64_t)hsri_entry_block(entry) * HSRI_BLOCK_BYTES + (uint64_t)hsri_entry_slot(entry) * slot_bytes(cache),
    };
}

/* Queries at position n_tokens read all pages plain but [sink_pages, end): the end, if the window has `window` pages. Not below
 * sink_pages, and full pages only. hsri_page_is_plain says the same page by page. */
static uint64_t encoded_end(const hsri_cache *cache, uint64_t n_tokens, uint64_t window)
{
    uint64_t q = n_tokens / HSRI_PAGE_TOKENS;
    uint64_t end = q + 1 > window ? q + 1 - window : 0;
    return hsri_max(hsri_min(end, q), cache->opts.sink_pages);
}

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

/* A block has one holder left: find it. */
static void give_to_single(void *arg, uint32_t block)
{
    hsri_cache *cache = arg;
    for (hsri_cache *sibling = cache->next; sibling != cache; sibling = sibling->next)
        if (hsri_slots_regain(&sibling->slots, block))
            return;
}

static void drop_slot(hsri_cache *cache, uint32_t entry)
{
    uint32_t block = hsri_slots_drop(&cache->slots, entry);
    if (block != HSRI_NO_BLOCK)
        give_to_single(cache, block);
}

/* ---- reservation ---- */

/* Slots still to be taken before positions up to `reserved` can be written. */
static uint64_t slots_missing(hsri_cache *cache, uint64_t reserved)
{
    uint64_t missing = (pages_of(reserved) - pages_of(cache->prepared)) * cache->per_page;
    if (cache->cow == COW_DUE && reserved > cache->committed) {
        const uint32_t *entries = cache->entries + cache->committed / HSRI_PAGE_TOKENS * cache->per_page;
        for (uint64_t i = 0; i < cache->per_page; i++)
            missing += hsri_slots_is_shared(&cache->slots, entries[i]);
    }
    return missing;
}

/* Make the reservations what the marks ask for, here and at the siblings, which may have regained blocks. Undoing gives back at
 * least the blocks that it needs, and a regained block only lowers a need, so this cannot fail. */
static void settle(hsri_cache *cache)
{
    hsri_cache *member = cache;
    do {
        bool kept = hsri_slots_promise(&member->slots, slots_missing(member, member->reserved));
        assert(kept);
        (void)kept;
        member = member->next;
    } while (member != cache);
}

static hsr_status refuse(const hsri_cache *cache, uint64_t n_tokens, uint64_t blocks, hsr_error *err)
{
    hsri_pool_stats pool;
    hsri_pool_get_stats(cache->pool, &pool);
    return hsri_fail(err, HSR_E_NOSPACE, "%llu tokens need %llu more KV blocks of 1 MiB; %llu of %llu are available",
                     (unsigned long long)n_tokens, (unsigned long long)blocks, (unsigned long long)(pool.free - pool.reserved),
                     (unsigned long long)pool.total);
}

/* ---- tables ---- */

/* Space for the entries of n_pages, on the host and on the device. The device's copy is sent again by the next prepare. */
static hsr_status grow_tables(hsri_cache *cache, uint64_t n_pages, hsr_error *err)
{
    uint64_t need = n_pages * cache->per_page;
    if (!hsri_grow((void **)&cache->entries, &cache->entries_cap, need, sizeof *cache->entries) ||
        !hsri_grow((void **)&cache->states, &cache->states_cap, need, sizeof *cache->states))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a page table of %llu entries", (unsigned long long)need);
    if (need <= cache->table_cap)
        return HSR_OK;

    uint32_t buf;
    HSRI_TRY(cache->dev->alloc(cache->dev, cache->entries_cap * sizeof *cache->entries, &buf, err));
    if (cache->table_buf)
        cache->dev->free(cache->dev, cache->table_buf);
    cache->table_buf = buf;
    cache->table_cap = cache->entries_cap;
    cache->table = (progress){ 0 };
    return HSR_OK;
}

/* Move all layers and heads of a page, or none. */
static hsr_status move_page(hsri_cache *cache, uint64_t page, hsri_page_event event, hsr_error *err)
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

/* Give a page its slots: all or none. */
static hsr_status open_page(hsri_cache *cache, uint64_t page, hsr_error *err)
{
    uint32_t *entries = cache->entries + page * cache->per_page;
    for (uint64_t i = 0; i < cache->per_page; i++) {
        hsr_status status = hsri_slots_take(&cache->slots, &entries[i], err);
        if (status < 0) {
            while (i-- > 0)
                drop_slot(cache, entries[i]);
            return status;
        }
    }
    return move_page(cache, page, HSRI_PAGE_EV_OPEN, err);
}

static hsr_status close_page(hsri_cache *cache, uint64_t page, hsr_error *err)
{
    HSRI_TRY(move_page(cache, page, HSRI_PAGE_EV_DROP, err));
    for (uint64_t i = 0; i < cache->per_page; i++)
        drop_slot(cache, cache->entries[page * cache->per_page + i]);
    return HSR_OK;
}

/* Give up the pages of positions from n_tokens on. */
static hsr_status close_pages(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    for (uint64_t page = pages_of(cache->prepared); page > pages_of(n_tokens); page--) {
        HSRI_TRY(close_page(cache, page - 1, err));
        cache->prepared = (page - 1) * HSRI_PAGE_TOKENS;
    }
    cache->prepared = n_tokens;
    return HSR_OK;
}

/* ---- creation ---- */

hsr_status hsri_cache_create(hsri_device *dev, hsri_pool *pool, const hsri_kv_shape *shape, const hsri_cache_opts *opts,
                             hsri_cache **out, hsr_error *err)
{
    *out = NULL;
    uint32_t per_block = hsri_kv_slots_per_block(opts->type, shape->head_dim);
    if (per_block == 0)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "a KV page of head size %u is larger than a block of 1 MiB", shape->head_dim);

    hsri_cache *cache = hsri_new_array(1, sizeof *cache);
    if (!cache)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a KV cache");
    cache->dev = dev;
    cache->pool = pool;
    cache->shape = shape;
    cache->opts = *opts;
    cache->per_page = (uint64_t)shape->n_layers * shape->n_kv_heads;
    cache->seal_window = opts->window_pages + pages_of(opts->rollback_tokens);
    cache->sealed = (progress){ opts->sink_pages, opts->sink_pages };
    cache->next = cache->prev = cache;
    hsri_slots_init(&cache->slots, pool, per_block);

    hsr_status status = HSR_OK;
    cache->cow_old = hsri_new_array(cache->per_page, sizeof *cache->cow_old);
    if (!cache->cow_old)
        status = hsri_fail(err, HSR_E_NOMEM, "out of memory for a KV cache");
    if (status == HSR_OK)
        status = dev->alloc(dev, SEAL_ROUND * sizeof(hsri_seal), &cache->seals_buf, err);
#ifndef NDEBUG
    if (status == HSR_OK)
        status = dev->alloc(dev, slot_bytes(cache), &cache->poison_buf, err);
#endif
    if (status < 0) {
        hsri_cache_destroy(cache);
        return status;
    }
    *out = cache;
    return HSR_OK;
}

static void free_buf(hsri_device *dev, uint32_t buf)
{
    if (buf)
        dev->free(dev, buf);
}

void hsri_cache_destroy(hsri_cache *cache)
{
    if (!cache)
        return;
    hsri_slots_clear(&cache->slots, give_to_single, cache);
    hsri_cache *sibling = cache->next;
    leave_lineage(cache);
    if (sibling != cache)
        settle(sibling);
    free_buf(cache->dev, cache->table_buf);
    free_buf(cache->dev, cache->seals_buf);
#ifndef NDEBUG
    free_buf(cache->dev, cache->poison_buf);
#endif
    free(cache->entries);
    free(cache->states);
    free(cache->seals);
    free(cache->cow_old);
    free(cache);
}

/* ---- admission ---- */

hsr_status hsri_cache_admit(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    if (n_tokens > MAX_TOKENS)
        return hsri_fail(err, HSR_E_CONTEXT, "%llu tokens: positions are 32-bit numbers", (unsigned long long)n_tokens);
    if (n_tokens <= cache->reserved)
        return HSR_OK;
    uint64_t missing = slots_missing(cache, n_tokens);
    if (!hsri_slots_promise(&cache->slots, missing))
        return refuse(cache, n_tokens, hsri_slots_blocks_for(&cache->slots, missing) - cache->slots.n_reserved, err);
    hsr_status status = grow_tables(cache, pages_of(n_tokens), err);
    if (status < 0) {
        settle(cache);
        return status;
    }
    cache->reserved = n_tokens;
    return HSR_OK;
}

void hsri_cache_unadmit(hsri_cache *cache, uint64_t n_tokens)
{
    cache->reserved = hsri_min(cache->reserved, hsri_max(n_tokens, cache->prepared));
    settle(cache);
}

/* ---- copy on write ---- */

static uint32_t *cut_page(const hsri_cache *cache)
{
    return cache->entries + cache->committed / HSRI_PAGE_TOKENS * cache->per_page;
}

/* Give the cut page slots of its own where a fork sees it. cow_old says where it was. */
static hsr_status take_cow_slots(hsri_cache *cache, hsr_error *err)
{
    uint32_t *entries = cut_page(cache);
    memcpy(cache->cow_old, entries, cache->per_page * sizeof *entries);
    cache->cow = COW_QUEUED;
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (hsri_slots_is_shared(&cache->slots, entries[i]))
            HSRI_TRY(hsri_slots_take(&cache->slots, &entries[i], err));
    return HSR_OK;
}

static void enqueue_cow(hsri_cache *cache, hsri_queue *q)
{
    uint32_t *entries = cut_page(cache);
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (entries[i] != cache->cow_old[i])
            cache->dev->copy(q, slot_ref(cache, entries[i]), slot_ref(cache, cache->cow_old[i]), slot_bytes(cache));
    cache->table.done = hsri_min(cache->table.done, cache->committed / HSRI_PAGE_TOKENS);
}

/* The copies are not to be believed: the page is where it was. */
static void undo_cow(hsri_cache *cache)
{
    if (cache->cow != COW_QUEUED)
        return;
    uint32_t *entries = cut_page(cache);
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (entries[i] != cache->cow_old[i]) {
            drop_slot(cache, entries[i]);
            entries[i] = cache->cow_old[i];
        }
    cache->cow = COW_DUE;
}

static void finish_cow(hsri_cache *cache)
{
    if (cache->cow != COW_QUEUED)
        return;
    const uint32_t *entries = cut_page(cache);
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (entries[i] != cache->cow_old[i])
            drop_slot(cache, cache->cow_old[i]);
    cache->cow = COW_NONE;
}

/* ---- sealing ---- */

/* Space for the list of this step's seals: everything sealed and not known to be done. */
static hsr_status grow_seals(hsri_cache *cache, uint64_t end, hsr_error *err)
{
    uint64_t n = (end - cache->sealed.done) * cache->per_page;
    if (!hsri_grow((void **)&cache->seals, &cache->seals_cap, n, sizeof *cache->seals))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a list of %llu pages to seal", (unsigned long long)n);
    return HSR_OK;
}

static size_t list_seals(hsri_cache *cache, uint64_t end)
{
    uint32_t n_kv_heads = cache->shape->n_kv_heads;
    size_t n = 0;
    for (uint64_t page = cache->sealed.done; page < end; page++)
        for (uint64_t i = 0; i < cache->per_page; i++) {
            uint32_t entry = cache->entries[page * cache->per_page + i];
            /* Sealed before a fork and unsealed by a truncate: the header is there, and the slot is not ours to write. */
            if (hsri_slots_is_shared(&cache->slots, entry))
                continue;
            cache->seals[n++] = (hsri_seal){
                .lineage = cache->opts.lineage,
                .entry = entry,
                .page = (uint32_t)page,
                .layer = (uint16_t)(i / n_kv_heads),
                .head = (uint16_t)(i % n_kv_heads),
                .format = (uint16_t)cache->opts.type,
            };
        }
    return n;
}

static hsr_status seal_pages(hsri_cache *cache, hsri_queue *q, uint64_t end, hsr_error *err)
{
    for (; cache->sealed.queued < end; cache->sealed.queued++)
        HSRI_TRY(move_page(cache, cache->sealed.queued, HSRI_PAGE_EV_SEAL, err));

    hsri_ref list = { .buf = cache->seals_buf };
    size_t n = list_seals(cache, cache->sealed.queued);
    for (size_t i = 0; i < n; i += SEAL_ROUND) {
        uint32_t round = (uint32_t)hsri_min(n - i, SEAL_ROUND);
        cache->dev->copy_in(q, list, cache->seals + i, round * sizeof *cache->seals);
        cache->dev->ops.seal(q, &cache->shape->view, list, round);
    }
    return HSR_OK;
}

/* Pages whose seal is in doubt, and those that a window ending at n_tokens takes back. */
static hsr_status unseal_pages(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    uint64_t end = hsri_min(cache->sealed.done, encoded_end(cache, n_tokens, cache->opts.window_pages));
    uint64_t n_pages = pages_of(cache->prepared);
    for (; cache->sealed.queued > end; cache->sealed.queued--)
        if (cache->sealed.queued <= n_pages)
            HSRI_TRY(move_page(cache, cache->sealed.queued - 1, HSRI_PAGE_EV_UNSEAL, err));
    cache->sealed.done = end;
    return HSR_OK;
}

/* ---- steps ---- */

#ifndef NDEBUG
/* Fill a new slot with NaN, so that a read of rows that were not written, or of the slot's former page, shows. */
static void poison(hsri_cache *cache, hsri_queue *q, uint64_t first_page, uint64_t end_page)
{
    static const uint32_t nans[SLOT_ALIGNMENT / 4] = { [0 ... SLOT_ALIGNMENT / 4 - 1] = UINT32_MAX };
    hsri_ref source = { .buf = cache->poison_buf };
    for (uint32_t at = 0; !cache->poison_made && at < slot_bytes(cache); at += SLOT_ALIGNMENT)
        cache->dev->copy_in(q, hsri_at(source, at), nans, SLOT_ALIGNMENT);
    cache->poison_made = true;
    for (uint64_t i = first_page * cache->per_page; i < end_page * cache->per_page; i++)
        cache->dev->copy(q, slot_ref(cache, cache->entries[i]), source, slot_bytes(cache));
}
#endif

/* Slots for everything the step writes, and lists long enough: the part of prepare that may fail. */
static hsr_status take_slots(hsri_cache *cache, uint64_t n_tokens, uint64_t seal_end, hsr_error *err)
{
    HSRI_TRY(grow_seals(cache, seal_end, err));
    if (cache->cow == COW_DUE && n_tokens > cache->committed)
        HSRI_TRY(take_cow_slots(cache, err));
    for (uint64_t page = pages_of(cache->prepared); page < pages_of(n_tokens); page++) {
        HSRI_TRY(open_page(cache, page, err));
        cache->prepared = (page + 1) * HSRI_PAGE_TOKENS;
    }
    cache->prepared = n_tokens;
    return HSR_OK;
}

/* The entries of all pages that the device is not known to have: one run. */
static void send_table(hsri_cache *cache, hsri_queue *q, uint64_t n_pages)
{
    uint64_t first = cache->table.done * cache->per_page, n = n_pages * cache->per_page - first;
    hsri_ref to = { .buf = cache->table_buf, .offset = first * sizeof *cache->entries };
    if (n > 0)
        cache->dev->copy_in(q, to, cache->entries + first, n * sizeof *cache->entries);
    cache->table.queued = n_pages;
}

hsr_status hsri_cache_prepare(hsri_cache *cache, hsri_queue *q, uint64_t n_tokens, hsr_error *err)
{
    if (n_tokens > cache->reserved)
        return hsri_fail(err, HSR_E_INTERNAL, "%llu positions were prepared, but only %llu admitted", (unsigned long long)n_tokens,
                         (unsigned long long)cache->reserved);
    n_tokens = hsri_max(n_tokens, cache->prepared);
    uint64_t seal_end = hsri_max(cache->sealed.queued, encoded_end(cache, cache->committed, cache->seal_window));
    uint64_t before = cache->prepared, n_pages = pages_of(n_tokens);
    cow_stage cow_before = cache->cow;

    hsr_status status = take_slots(cache, n_tokens, seal_end, err);
    if (status < 0) {
        close_pages(cache, before, NULL);
        if (cow_before == COW_DUE)
            undo_cow(cache);
        settle(cache);
        return status;
    }

    if (cow_before == COW_DUE && cache->cow == COW_QUEUED)
        enqueue_cow(cache, q);
#ifndef NDEBUG
    poison(cache, q, pages_of(before), n_pages);
#endif
    send_table(cache, q, n_pages);
    return seal_pages(cache, q, seal_end, err);
}

hsr_status hsri_cache_commit(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    if (n_tokens < cache->committed || n_tokens > cache->prepared)
        return hsri_fail(err, HSR_E_INTERNAL, "%llu positions were committed, outside %llu..%llu", (unsigned long long)n_tokens,
                         (unsigned long long)cache->committed, (unsigned long long)cache->prepared);
    finish_cow(cache);
    for (uint64_t page = cache->committed / HSRI_PAGE_TOKENS; page < n_tokens / HSRI_PAGE_TOKENS; page++) {
        HSRI_TRY(move_page(cache, page, HSRI_PAGE_EV_FILL, err));
        cache->committed = (page + 1) * HSRI_PAGE_TOKENS;
    }
    cache->committed = n_tokens;
    cache->table.done = cache->table.queued;
    cache->sealed.done = cache->sealed.queued;
    settle(cache);
    return HSR_OK;
}

/* The page that a truncate to n_tokens cuts is written again. */
static hsr_status reopen_cut_page(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    uint64_t page = n_tokens / HSRI_PAGE_TOKENS;
    bool was_full = page < cache->committed / HSRI_PAGE_TOKENS;
    cache->committed = n_tokens;
    cache->cow = COW_NONE;
    if (n_tokens % HSRI_PAGE_TOKENS == 0)
        return HSR_OK;
    if (was_full)
        HSRI_TRY(move_page(cache, page, HSRI_PAGE_EV_REOPEN, err));
    for (uint64_t i = 0; i < cache->per_page; i++)
        if (hsri_slots_is_shared(&cache->slots, cut_page(cache)[i]))
            cache->cow = COW_DUE;
    return HSR_OK;
}

hsr_status hsri_cache_truncate(hsri_cache *cache, uint64_t n_tokens, hsr_error *err)
{
    if (n_tokens > cache->prepared)
        return hsri_fail(err, HSR_E_INVALID, "truncate to %llu tokens: there are %llu", (unsigned long long)n_tokens,
                         (unsigned long long)cache->prepared);
    undo_cow(cache);
    HSRI_TRY(close_pages(cache, n_tokens, err));
    cache->reserved = n_tokens;
    HSRI_TRY(unseal_pages(cache, hsri_min(n_tokens, cache->committed), err));
    if (n_tokens < cache->committed)
        HSRI_TRY(reopen_cut_page(cache, n_tokens, err));
    cache->table.done = hsri_min(cache->table.done, pages_of(n_tokens));
    cache->table.queued = cache->table.done;
    settle(cache);
    return HSR_OK;
}

/* ---- fork ---- */

/* Is the page shared by forks? Sealed, and the seal is known to be done. */
static bool is_shareable(const hsri_cache *cache, uint64_t page)
{
    return page >= cache->opts.sink_pages && page < cache->sealed.done;
}

static hsr_status share_page(hsri_cache *cache, hsri_cache *fork, uint64_t page, hsr_error *err)
{
    for (uint64_t i = page * cache->per_page; i < (page + 1) * cache->per_page; i++) {
        HSRI_TRY(hsri_slots_share(&cache->slots, &fork->slots, cache->entries[i], err));
        fork->entries[i] = cache->entries[i];
    }
    HSRI_TRY(move_page(fork, page, HSRI_PAGE_EV_OPEN, err));
    HSRI_TRY(move_page(fork, page, HSRI_PAGE_EV_FILL, err));
    return move_page(fork, page, HSRI_PAGE_EV_SEAL, err);
}

static hsr_status copy_page(hsri_cache *cache, hsri_cache *fork, hsri_queue *q, uint64_t page, hsr_error *err)
{
    HSRI_TRY(open_page(fork, page, err));
    for (uint64_t i = page * cache->per_page; i < (page + 1) * cache->per_page; i++)
        cache->dev->copy(q, slot_ref(fork, fork->entries[i]), slot_ref(cache, cache->entries[i]), slot_bytes(cache));
    return page < cache->committed / HSRI_PAGE_TOKENS ? move_page(fork, page, HSRI_PAGE_EV_FILL, err) : HSR_OK;
}

/* Sharing comes first: it takes the free slots of shared blocks from this cache, whose reservation must then grow. */
static hsr_status share_pages(hsri_cache *cache, hsri_cache *fork, hsr_error *err)
{
    uint64_t n_pages = pages_of(cache->committed), n_copied = 0;
    for (uint64_t page = 0; page < n_pages; page++) {
        if (is_shareable(cache, page))
            HSRI_TRY(share_page(cache, fork, page, err));
        else
            n_copied++;
    }
    uint64_t missing = slots_missing(cache, cache->reserved), copies = n_copied * fork->per_page;
    uint64_t blocks = hsri_slots_blocks_for(&cache->slots, missing) - cache->slots.n_reserved;
    blocks += hsri_slots_blocks_for(&fork->slots, copies);
    if (!hsri_slots_promise(&cache->slots, missing) || !hsri_slots_promise(&fork->slots, copies))
        return refuse(cache, cache->committed, blocks, err);
    return HSR_OK;
}

static hsr_status copy_pages(hsri_cache *cache, hsri_cache *fork, hsri_queue *q, hsr_error *err)
{
    hsr_status status = HSR_OK;
    for (uint64_t page = 0; page < pages_of(cache->committed) && status == HSR_OK; page++)
        if (!is_shareable(cache, page))
            status = copy_page(cache, fork, q, page, err);
    /* Waited on even after a failure: the copies write slots that are about to be given back. */
    hsr_status waited = cache->dev->wait(q, status == HSR_OK ? err : NULL);
    return status == HSR_OK ? waited : status;
}

hsr_status hsri_cache_fork(hsri_cache *cache, hsri_queue *q, hsri_cache **out, hsr_error *err)
{
    *out = NULL;
    if (cache->prepared != cache->committed)
        return hsri_fail(err, HSR_E_STATE, "a session cannot be forked inside a step");
    hsri_cache *fork;
    HSRI_TRY(hsri_cache_create(cache->dev, cache->pool, cache->shape, &cache->opts, &fork, err));
    join_lineage(fork, cache);

    hsr_status status = grow_tables(fork, pages_of(cache->committed), err);
    if (status == HSR_OK)
        status = share_pages(cache, fork, err);
    if (status == HSR_OK)
        status = copy_pages(cache, fork, q, err);
    if (status < 0) {
        hsri_cache_destroy(fork);
        return status;
    }
    fork->reserved = fork->prepared = fork->committed = cache->committed;
    fork->sealed = (progress){ cache->sealed.done, cache->sealed.done };
    *out = fork;
    return HSR_OK;
}

/* ---- what others see ---- */

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
    return (hsri_ref){ .buf = cache->table_buf };
}

hsri_kv_type hsri_cache_type(const hsri_cache *cache)
{
    return cache->opts.type;
}

hsri_page_state hsri_cache_page_state(const hsri_cache *cache, uint32_t page, uint32_t layer, uint32_t head)
{
    if (page >= pages_of(cache->prepared))
        return HSRI_PAGE_NONE;
    return (hsri_page_state)cache->states[page * cache->per_page + (uint64_t)layer * cache->shape->n_kv_heads + head];
}

void hsri_cache_get_stats(const hsri_cache *cache, hsri_cache_stats *stats)
{
    uint64_t n_sealed = 0;
    for (int state = HSRI_PAGE_HOT; state < HSRI_N_PAGE_STATES; state++)
        n_sealed += cache->n_in_state[state];
    *stats = (hsri_cache_stats){
        .blocks = cache->slots.n_blocks,
        .slots_used = cache->slots.n_used,
        .slots_wasted = cache->slots.n_free,
        .bytes = cache->slots.n_used * slot_bytes(cache),
        .pages_open = cache->n_in_state[HSRI_PAGE_OPEN],
        .pages_full = cache->n_in_state[HSRI_PAGE_FULL],
        .pages_sealed = n_sealed,
        .reserved_blocks = cache->slots.n_reserved,
    };
}
