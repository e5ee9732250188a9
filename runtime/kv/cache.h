/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache of one session: its pages, their states, its page table on the device, the slots it holds. The only writer of
 * that state; computing and scheduling are elsewhere. Not thread-safe: called under the engine's lock. That covers forks, too:
 * a cache that lets go of a shared block changes its siblings.
 *
 * Positions move in three marks: reserved >= prepared >= committed.
 *   admit   promises slots for positions up to `reserved`
 *   prepare gives slots and page table entries to the pages of positions below `prepared`, for a step about to run
 *   commit  says that the step computed them; pages fill and seal by committed tokens only
 * A failed or cancelled step is undone by truncating to the committed length. Whatever prepare enqueued is believed only when
 * commit says that the step completed; after a failed step, the next prepare enqueues it again.
 *
 * prepare is the only call that leaves copies from host memory in a queue. Between it and the next call on the same cache the
 * queue is waited on. */
#ifndef HSRI_CACHE_H
#define HSRI_CACHE_H

#include "kv/page.h"
#include "kv/pool.h"

/* What all sessions of an engine share. */
typedef struct hsri_kv_shape {
    uint32_t n_layers, n_kv_heads, head_dim;
    hsri_kv_view view;                  /* built by hsri_kv_shape_init */
} hsri_kv_shape;

void hsri_kv_shape_init(hsri_kv_shape *shape, const hsri_pool *pool, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim);

/* Page slots of one plain type: stride (page bytes rounded up to 4096), and slots per block; 0 if a page is larger than a block. */
uint32_t hsri_kv_slot_bytes(hsri_kv_type type, uint32_t head_dim);
uint32_t hsri_kv_slots_per_block(hsri_kv_type type, uint32_t head_dim);

/* Blocks that n_tokens of one session need when no slot is free in blocks it already holds; UINT64_MAX if no number would do. */
uint64_t hsri_kv_blocks_for(const hsri_kv_shape *shape, hsri_kv_type type, uint64_t n_tokens);

typedef struct hsri_cache hsri_cache;

typedef struct hsri_cache_opts {
    hsri_kv_type type;
    uint32_t     window_pages;
    uint32_t     sink_pages;
    uint64_t     rollback_tokens; /* keeps the window's pages plain for queries this far back */
    uint64_t     lineage;         /* unique per session family within the engine */
} hsri_cache_opts;

typedef struct hsri_cache_stats {
    uint64_t blocks;        /* blocks this session holds a reference to */
    uint64_t slots_used;    /* slots holding a page of this session, shared ones included */
    uint64_t slots_wasted;  /* slots without a page in blocks that only this session holds */
    uint64_t bytes;         /* slots_used * slot bytes */
    uint64_t pages_open, pages_full, pages_sealed; /* of (page, layer, head) */
    uint64_t reserved_blocks;
} hsri_cache_stats;

/* The shape is not copied. HSR_E_UNSUPPORTED if a page is larger than a block; HSR_E_NOMEM. */
hsr_status hsri_cache_create(hsri_device *dev, hsri_pool *pool, const hsri_kv_shape *shape, const hsri_cache_opts *opts,
                             hsri_cache **cache, hsr_error *err);

/* Return every block and reservation. All queues that used the cache must be idle. NULL accepted. */
void hsri_cache_destroy(hsri_cache *cache);

/* Reserve blocks and table space so that positions [0, n_tokens) can be prepared without failing for want of budget. Growing
 * only; HSR_E_NOSPACE names needed and available blocks and changes nothing; HSR_E_NOMEM likewise. The device table
 * may be reallocated here, so queues must be idle. */
hsr_status hsri_cache_admit(hsri_cache *cache, uint64_t n_tokens, hsr_error *err);

/* Give back reservations beyond position n_tokens (a request ended early). Pages that exist are kept. */
void hsri_cache_unadmit(hsri_cache *cache, uint64_t n_tokens);

/* Make pages exist for positions below n_tokens (already admitted) and enqueue the new page table entries. Also seals, before
 * the step reads them, the pages that the step's queries no longer see as plain, counting committed tokens only; and copies
 * a shared page that is about to be written again (after a truncate into it) to slots of its own. On failure, HSR_E_NOMEM,
 * nothing was enqueued or changed. */
hsr_status hsri_cache_prepare(hsri_cache *cache, hsri_queue *q, uint64_t n_tokens, hsr_error *err);

/* The step that computed positions below n_tokens has completed: its queue was waited on and reported no failure. */
hsr_status hsri_cache_commit(hsri_cache *cache, uint64_t n_tokens, hsr_error *err);

/* Forget positions from n_tokens on: pages go back, a cut page is open again. Any n_tokens up to the prepared length. Needs
 * no memory and no device. Reservations are kept up to n_tokens only: to go on with a request, admit again, which cannot
 * be refused as long as nothing else was admitted in between. */
hsr_status hsri_cache_truncate(hsri_cache *cache, uint64_t n_tokens, hsr_error *err);

/* A second cache of the same lineage with the same committed tokens and no reservation: sealed pages are shared, open and full
 * pages copied on queue q, which is waited on. Pages that share a block with a shared page stay where they are, but the block's
 * free slots are lost to both sides while both hold it; what this cache had reserved is kept whole. HSR_E_STATE between
 * prepare and commit; HSR_E_NOSPACE if the copies do not fit; HSR_E_NOMEM; or the queue's failure. Nothing has changed then. */
hsr_status hsri_cache_fork(hsri_cache *cache, hsri_queue *q, hsri_cache **fork, hsr_error *err);

uint64_t hsri_cache_committed(const hsri_cache *cache);
uint64_t hsri_cache_reserved(const hsri_cache *cache);
hsri_ref hsri_cache_table(const hsri_cache *cache);   /* on the device; as prepare left it */
hsri_kv_type hsri_cache_type(const hsri_cache *cache);
hsri_page_state hsri_cache_page_state(const hsri_cache *cache, uint32_t page, uint32_t layer, uint32_t head);
void hsri_cache_get_stats(const hsri_cache *cache, hsri_cache_stats *stats);

#endif
