/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the KV cache share.
 *   cache_sizes.c  the rules: how many pages of each kind n tokens have
 *   cache_store.c  slots, their tables on the device, copy on write, promises
 *   cache_seal.c   encoding and sealing
 *   cache_fork.c   forks
 *   holder.c       pages held for the time that operations read them
 *   cache.c        the calls of cache.h: creation, marks, accessors */
#ifndef HSRI_CACHE_INTERNAL_H
#define HSRI_CACHE_INTERNAL_H

#include "base/array.h"
#include "base/status.h"
#include "kv/cache.h"
#include "kv/slots.h"

/* Of slots, and of the poison that fills them in debug builds. */
#define HSRI_SLOT_ALIGNMENT 4096u
/* Seals per operation: what the device's list holds. Longer lists go in several rounds over it. */
#define HSRI_SEAL_ROUND 512u
#define HSRI_SEAL_BYTES (sizeof(hsri_seal) > sizeof(hsri_cluster) ? sizeof(hsri_seal) : sizeof(hsri_cluster))

/* Work that prepare hands to a queue row by row, in order: rows below `done` are known to be done, rows below `queued` are in the
 * queue. commit believes the queue; truncate, which follows a failed step, does not. */
typedef struct hsri_progress {
    uint64_t done, queued;
} hsri_progress;

typedef enum hsri_cow_stage {
    HSRI_COW_NONE,
    HSRI_COW_DUE,       /* will be written again, but a fork sees it: prepare copies it before the next write */
    HSRI_COW_QUEUED     /* copies are in the queue; the old slots are kept until commit */
} hsri_cow_stage;

/* Copy on write of one row. */
typedef struct hsri_cow {
    hsri_cow_stage stage;
    uint64_t       row;
    uint32_t      *old;          /* per_page entries: where the row was before HSRI_COW_QUEUED */
} hsri_cow;

/* The slots of one kind and their table: rows of per_page entries, one of each (layer, kv head). Row r is page r, or slab r,
 * and so on. */
typedef struct hsri_store {
    hsri_slots    slots;
    uint32_t      slot_bytes;    /* 0: this cache has no such store */
    uint64_t      n_rows;        /* one past the last row that has slots */
    uint64_t      first_row;     /* rows below have given theirs up: strips whose segments have their records */
    uint32_t     *entries;       /* the device copies from here, so it moves only in admit */
    size_t        entries_cap;
    uint32_t      buf;           /* on the device */
    uint64_t      buf_cap;       /* entries that fit in it */
    hsri_progress sent;          /* rows that are on the device */
    hsri_cow      cow;
} hsri_store;

struct hsri_cache {
    hsri_device         *dev;
    hsri_pool           *pool;
    const hsri_kv_shape *shape;
    hsri_cache_opts      opts;          /* format is `type` unless it is an encoded one */
    uint64_t             per_page;      /* entries of one row: layers * kv heads */

    uint64_t             reserved, prepared, committed;   /* positions */
    hsri_store           stores[HSRI_N_STORES];
    uint8_t             *states;        /* of each (page, layer, head), in table order */
    size_t               states_cap;
    uint64_t             n_in_state[HSRI_N_PAGE_STATES];

    /* With tiers: the members of a lineage are one family, and each sealed page is a body of it. */
    hsri_family         *family;
    uint32_t            *bodies;        /* as rows of the encoded store */
    size_t               bodies_cap;
    uint64_t             bodies_promised;
    uint64_t             n_estimated;   /* pages that attention did not wait for, each time */

    hsri_progress        encoded;       /* pages [sink_pages, queued) have their encoded form and index entry */
    uint64_t             sealed;        /* pages [sink_pages, sealed) are immutable, in a sealed state */
    hsri_progress        clustered;     /* segments [0, queued) have their cluster records */
    hsri_cluster        *clusters;      /* list of this step */
    size_t               clusters_cap;
    hsri_seal           *seals;         /* list of this step */
    size_t               seals_cap;
    uint32_t             seals_buf;     /* one round of either list */

    hsri_cache          *next, *prev;   /* ring of the lineage */
#ifndef NDEBUG
    uint32_t             poison_buf;    /* a slot of poison */
    bool                 poison_made;
#endif
};

static inline uint64_t hsri_pages_of(uint64_t n_tokens)
{
    return n_tokens / HSRI_PAGE_TOKENS + (n_tokens % HSRI_PAGE_TOKENS != 0);
}

/* Do sealed pages have slots of their own, beside a ring of plain pages? */
static inline bool hsri_seals_apart(const hsri_cache_opts *opts) { return !hsri_kv_is_plain(opts->format) || opts->tiers; }

static inline bool hsri_store_exists(const hsri_store *store) { return store->slot_bytes > 0; }

static inline uint32_t *hsri_store_row(const hsri_cache *cache, const hsri_store *store, uint64_t row)
{
    return store->entries + row * cache->per_page;
}

static inline hsri_ref hsri_store_slot(const hsri_cache *cache, const hsri_store *store, uint32_t entry)
{
    return (hsri_ref){
        .buf = cache->shape->view.pool_buf,
        .offset = (uint64_t)hsri_entry_block(entry) * HSRI_BLOCK_BYTES + (uint64_t)hsri_entry_slot(entry) * store->slot_bytes,
    };
}

/* Whose table operations read sealed pages from: in a plain format there is one table for all pages. */
static inline hsri_store_kind hsri_read_store(const hsri_cache_opts *opts)
{
    return hsri_kv_is_plain(opts->format) ? HSRI_STORE_PLAIN : HSRI_STORE_ENCODED;
}

/* Where sealed pages are. */
static inline hsri_store *hsri_sealed_store(hsri_cache *cache)
{
    return &cache->stores[hsri_seals_apart(&cache->opts) ? HSRI_STORE_ENCODED : HSRI_STORE_PLAIN];
}

/* ---- cache_sizes.c ---- */

/* Queries of page q read all pages plain but [sink_pages, end): the end, if the window has `window` pages. Not below sink_pages,
 * and pages before q only. hsri_page_is_plain says the same page by page. */
uint64_t hsri_encoded_end(const hsri_cache_opts *opts, uint64_t q, uint64_t window);

/* Pages that are encoded once positions below n_tokens were prepared. */
uint64_t hsri_encoded_end_of(const hsri_cache_opts *opts, uint64_t n_tokens);

/* Slabs that hold the index entries of encoded pages below `end`. */
uint64_t hsri_index_rows(const hsri_cache_opts *opts, uint64_t end);

/* Strips that hold the components of encoded pages below `end`; 0 without a sketch. */
uint64_t hsri_strip_rows(const hsri_cache_opts *opts, uint64_t end);

/* The most strips that exist at a time; UINT64_MAX where none is given up. */
uint64_t hsri_ring_strips(const hsri_cache_opts *opts);

/* Segments whose pages all lie below `end`; 0 without clusters. */
uint64_t hsri_cluster_rows(const hsri_cache_opts *opts, uint64_t end);

/* The most plain pages that exist at a time; UINT64_MAX where sealed pages are plain ones. */
uint64_t hsri_ring_pages(const hsri_cache_opts *opts);

/* Pages of the window, and what truncate may go back over. With tiers, one more at least: a query of a prompt run reads the page
 * that has just left its window without holding it. */
uint64_t hsri_seal_window(const hsri_cache_opts *opts);

/* ---- cache_store.c ---- */

hsr_status hsri_store_init(hsri_cache *cache, hsri_store_kind kind, uint32_t slot_bytes, uint64_t first_row, hsr_error *err);
void hsri_store_free(hsri_cache *cache, hsri_store *store);

/* Space for n_rows, on the host and on the device. The device's copy is sent again by the next prepare. */
hsr_status hsri_store_grow(hsri_cache *cache, hsri_store *store, uint64_t n_rows, hsr_error *err);

/* Give the next row its slots, with tiers its bodies: all or none. */
hsr_status hsri_store_take(hsri_cache *cache, hsri_store *store, hsr_error *err);
void hsri_store_drop(hsri_cache *cache, hsri_store *store, uint64_t row);
void hsri_store_drop_slot(hsri_cache *cache, hsri_store *store, uint32_t entry);

/* Drop rows from n_rows on. */
void hsri_store_shrink(hsri_cache *cache, hsri_store *store, uint64_t n_rows);

/* Drop rows below first_row, for good. */
void hsri_store_give_up(hsri_cache *cache, hsri_store *store, uint64_t first_row);

/* Enqueue the entries of all rows that the device is not known to have: one run. */
void hsri_store_send(hsri_cache *cache, hsri_store *store, hsri_queue *q);

/* Row `row` will be written again: is it to be copied first? */
void hsri_cow_mark(hsri_cache *cache, hsri_store *store, uint64_t row);
hsr_status hsri_cow_take(hsri_cache *cache, hsri_store *store, hsr_error *err);   /* slots; undo after a failure */
void hsri_cow_enqueue(hsri_cache *cache, hsri_store *store, hsri_queue *q);
void hsri_cow_undo(hsri_cache *cache, hsri_store *store);                        /* copies are not to be believed: as before */
void hsri_cow_finish(hsri_cache *cache, hsri_store *store);                      /* copies are done: the old slots go */

/* A block has one holder left in the lineage: let it know. arg is a cache that is not the one. */
void hsri_give_to_single(void *arg, uint32_t block);

/* Slots still to be taken before positions up to `reserved` can be written. */
uint64_t hsri_slots_missing(hsri_cache *cache, hsri_store_kind kind, uint64_t reserved);

/* Promise what is missing for `reserved` in all stores, or fail naming what is short and change nothing. */
hsr_status hsri_promise(hsri_cache *cache, uint64_t reserved, hsr_error *err);

/* Make the promises what the marks ask for, here and at the siblings, which may have regained blocks. Undoing gives back at least
 * the blocks that it needs, and a regained block only lowers a need, so this cannot fail. */
void hsri_settle(hsri_cache *cache);

/* HSR_E_NOSPACE: so many blocks are short. */
hsr_status hsri_refuse(const hsri_cache *cache, uint64_t n_tokens, uint64_t blocks, hsr_error *err);

/* ---- cache.c ---- */

/* A cache without tokens in the lineage of `parent`. */
hsr_status hsri_cache_create_member(hsri_cache *parent, hsri_cache **cache, hsr_error *err);

/* Table space for n_pages, of which pages below encoded_end are encoded. */
hsr_status hsri_cache_grow_tables(hsri_cache *cache, uint64_t n_pages, uint64_t encoded_end, hsr_error *err);

/* ---- cache_seal.c ---- */

/* Move all layers and heads of a page, or none. */
hsr_status hsri_move_page(hsri_cache *cache, uint64_t page, hsri_page_event event, hsr_error *err);

/* Slots for the encoded forms, index entries, components and cluster records of pages below `end`, and space for the lists: the part
 * that may fail. */
hsr_status hsri_encode_take(hsri_cache *cache, uint64_t end, hsr_error *err);

/* Enqueue the encoding of pages [encoded.done, end), and then the clusters of the segments that they fill. */
void hsri_encode_enqueue(hsri_cache *cache, hsri_queue *q, uint64_t end);

/* Give up what is encoded from page `end` on. */
void hsri_encode_shrink(hsri_cache *cache, uint64_t end);

/* Seal what the committed length allows. Encoded formats give the plain copies up. */
hsr_status hsri_seal_pages(hsri_cache *cache, hsr_error *err);

/* Strips of segments that have their records and that no truncate can cut into go. */
void hsri_give_up_strips(hsri_cache *cache);

/* Are pages from `page` on in a segment whose strips are gone? */
bool hsri_strips_are_gone(const hsri_cache *cache, uint64_t page);

/* Pages that a truncate to n_tokens takes back into the window; plain formats only. If it goes back into a segment whose strips are gone,
 * all of the segment is: it will be indexed again. */
hsr_status hsri_unseal_pages(hsri_cache *cache, uint64_t n_tokens, hsr_error *err);

#endif
