/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache of one session: its pages, their states, its tables on the device, the slots it holds. The only writer of that
 * state; computing and scheduling are elsewhere. Not thread-safe: called under the engine's lock. That covers forks, too: a
 * cache that lets go of a shared block changes its siblings. docs/kv-cache.md tells the life of a page.
 *
 * Positions move in three marks: reserved >= prepared >= committed.
 *   admit   promises slots for positions up to `reserved`
 *   prepare gives slots and table entries to the pages of positions below `prepared`, for a step about to run
 *   commit  says that the step computed them; pages fill, encode and seal by committed tokens only
 * A failed or cancelled step is undone by truncating to the committed length. Whatever prepare enqueued is believed only when
 * commit says that the step completed; after a failed step, the next prepare enqueues it again.
 *
 * Two marks follow the tokens: pages below `encoded` have their encoded form and index entry, because a query has come that
 * reads them so; pages below `sealed` are immutable, because no truncate that must work can make a query read them plain
 * again. Only then does an encoded format give the plain copy up, and only sealed pages are shared by forks.
 *
 * prepare is the only call that leaves copies from host memory in a queue. Between it and the next call on the same cache the
 * queue is waited on. */
#ifndef HSRI_CACHE_H
#define HSRI_CACHE_H

#include "kv/page.h"
#include "kv/pool.h"
#include "kv/tiers.h"

/* What all sessions of an engine share. */
typedef struct hsri_kv_shape {
    uint32_t n_layers, n_kv_heads, head_dim;
    hsri_kv_view view;                  /* built by hsri_kv_shape_init */
} hsri_kv_shape;

void hsri_kv_shape_init(hsri_kv_shape *shape, const hsri_pool *pool, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim);

/* Page slots of one format: stride (page bytes rounded up to 4096; 0 if the format does not exist at this head size), and slots
 * per block; 0 if a page is larger than a block. */
uint32_t hsri_kv_slot_bytes(hsri_kv_type format, uint32_t head_dim);
uint32_t hsri_kv_slots_per_block(hsri_kv_type format, uint32_t head_dim);

typedef struct hsri_cache_opts {
    hsri_kv_type type;            /* of plain pages */
    hsri_kv_type format;          /* of sealed pages; a plain one means `type` */
    hsri_index_shape index;       /* kind NONE: no index */
    uint32_t     window_pages;    /* with an encoded format or an index at least 1 */
    uint32_t     sink_pages;
    uint32_t     chunk_tokens;    /* positions that a step prepares at most; needed by encoded formats, whose plain pages are a ring */
    uint64_t     rollback_tokens; /* keeps the window's pages plain for queries this far back */
    uint64_t     lineage;         /* unique per session family within the engine */
    hsri_tiers  *tiers;           /* where sealed pages can leave memory, in plain formats too; NULL: they cannot */
} hsri_cache_opts;

/* Blocks that a session needs for n_tokens, from nothing to the last of them, all of it in memory; UINT64_MAX if no number would
 * do. Sealed pages have slots of their own if the format is an encoded one or there are tiers. */
uint64_t hsri_kv_blocks_for(const hsri_kv_shape *shape, const hsri_cache_opts *opts, uint64_t n_tokens);

/* Page slots that a session needs in memory at a time once its sealed pages may be elsewhere. */
uint64_t hsri_kv_working_set(const hsri_kv_shape *shape, const hsri_cache_opts *opts);

/* What is in these blocks: slots of pages as written, of sealed pages that have their own, of slabs, of strips, of cluster records. */
typedef struct hsri_kv_need {
    uint64_t plain, sealed, index, strips, clusters;
} hsri_kv_need;

hsri_kv_need hsri_kv_slots_for(const hsri_kv_shape *shape, const hsri_cache_opts *opts, uint64_t n_tokens);

/* Bytes of the slots of the index among them. */
uint64_t hsri_kv_index_bytes(const hsri_index_shape *index, const hsri_kv_need *need);

typedef struct hsri_cache hsri_cache;

/* Kinds of slots, each with blocks of its own. */
typedef enum hsri_store_kind {
    HSRI_STORE_PLAIN,       /* pages as written; in plain formats without tiers all there are */
    HSRI_STORE_ENCODED,     /* sealed pages, where they have slots of their own; with tiers these are the tiers' */
    HSRI_STORE_INDEX,       /* index slabs */
    HSRI_STORE_STRIPS,      /* components of sketches */
    HSRI_STORE_CLUSTERS,    /* cluster records of segments, if the index's shape asks for them */
    HSRI_N_STORES
} hsri_store_kind;

typedef struct hsri_store_stats {
    uint64_t blocks;        /* this session holds a reference to */
    uint64_t used;          /* slots in use, shared ones included */
    uint64_t wasted;        /* slots not in use in blocks that only this session holds */
    uint64_t reserved_blocks;
} hsri_store_stats;

typedef struct hsri_cache_stats {
    uint64_t blocks;        /* sums over the stores */
    uint64_t reserved_blocks;
    uint64_t slots_used;    /* page slots, plain and encoded */
    uint64_t slots_wasted;
    uint64_t bytes;         /* of the page slots used */
    uint64_t index_bytes;   /* of the slabs, strips and cluster records used */
    uint64_t pages_open, pages_full, pages_sealed; /* of (page, layer, head); their sum is all pages */
    uint64_t pages_plain, pages_encoded;           /* copies that exist in either form; a page may have both */
    uint64_t n_estimated;   /* pages that attention did not wait for, each time */
    hsri_store_stats stores[HSRI_N_STORES];
} hsri_cache_stats;

/* The shape is not copied. HSR_E_UNSUPPORTED if the format does not exist at this head size or a page is larger than a block;
 * HSR_E_INVALID if the window is missing that the format or the index needs; HSR_E_NOMEM. */
hsr_status hsri_cache_create(hsri_device *dev, hsri_pool *pool, const hsri_kv_shape *shape, const hsri_cache_opts *opts,
                             hsri_cache **cache, hsr_error *err);

/* Return every block and reservation. All queues that used the cache must be idle. NULL accepted. */
void hsri_cache_destroy(hsri_cache *cache);

/* Reserve blocks and table space so that positions [0, n_tokens) can be prepared without failing for want of budget. Growing
 * only; HSR_E_NOSPACE names needed and available blocks and changes nothing; HSR_E_NOMEM likewise. The device tables may be
 * reallocated here, and pages may leave memory or move in it, so queues must be idle. */
hsr_status hsri_cache_admit(hsri_cache *cache, uint64_t n_tokens, hsr_error *err);

/* Give back reservations beyond position n_tokens (a request ended early). Pages that exist are kept. */
void hsri_cache_unadmit(hsri_cache *cache, uint64_t n_tokens);

/* The most positions that the next step may prepare beyond the committed ones, at least 1; UINT64_MAX: any number. A page is
 * encoded before the step of the first query that reads it so, and must be full by then: a step ends before the query whose
 * encoded pages it would itself compute. */
uint64_t hsri_cache_step_limit(const hsri_cache *cache);

/* Make pages exist for positions below n_tokens (already admitted, within the step limit) and enqueue the new table entries. Also
 * encodes and indexes, before the step reads them, the pages that its queries no longer see as plain; and copies what is
 * shared and about to be written again (after a truncate into it) to slots of its own. On failure, HSR_E_NOMEM, nothing was
 * enqueued or changed. */
hsr_status hsri_cache_prepare(hsri_cache *cache, hsri_queue *q, uint64_t n_tokens, hsr_error *err);

/* The step that computed positions below n_tokens has completed: its queue was waited on and reported no failure. */
hsr_status hsri_cache_commit(hsri_cache *cache, uint64_t n_tokens, hsr_error *err);

/* Does truncating to n_tokens go further back than allowed? */
bool hsri_cache_truncates_too_far(const hsri_cache *cache, uint64_t n_tokens);

/* Forget positions from n_tokens on: pages go back, a cut page is open again. Needs no memory and no device. Any n_tokens up to
 * the prepared length with a plain format without tiers; otherwise within the rollback distance, or so far back that only the
 * sink is left (0 always works): HSR_E_STATE otherwise, and nothing has changed. Reservations are kept up to n_tokens
 * only: to go on with a request, admit again, which cannot be refused as long as nothing else was admitted in between, unless strips of
 * sketches had been given up that are made again. */
hsr_status hsri_cache_truncate(hsri_cache *cache, uint64_t n_tokens, hsr_error *err);

/* A second cache of the same lineage with the same committed tokens and no reservation: sealed pages and the index slabs that
 * only they fill are shared, the others copied on queue q, which is waited on. Pages that share a block with a shared page
 * stay where they are, but the block's free slots are lost to both sides while both hold it; what this cache had reserved is
 * kept whole. HSR_E_STATE between prepare and commit; HSR_E_NOSPACE if the copies do not fit; HSR_E_NOMEM; or the queue's
 * failure. Nothing has changed then. */
hsr_status hsri_cache_fork(hsri_cache *cache, hsri_queue *q, hsri_cache **fork, hsr_error *err);

/* Fill all of *seq but the rope table, as prepare left it. */
void hsri_cache_fill_seq(const hsri_cache *cache, hsri_seq *seq);

uint64_t hsri_cache_committed(const hsri_cache *cache);
uint64_t hsri_cache_reserved(const hsri_cache *cache);
hsri_ref hsri_cache_table(const hsri_cache *cache);   /* of plain pages, on the device; as prepare left it */
uint64_t hsri_cache_encoded_pages(const hsri_cache *cache);   /* one past the last page that is encoded and indexed */
uint32_t hsri_cache_body(const hsri_cache *cache, uint32_t page, uint32_t layer, uint32_t head);   /* HSRI_NO_BODY: none */
hsri_page_state hsri_cache_page_state(const hsri_cache *cache, uint32_t page, uint32_t layer, uint32_t head);
void hsri_cache_get_stats(const hsri_cache *cache, hsri_cache_stats *stats);

#endif
