/* SPDX-License-Identifier: Apache-2.0 */
/* Where sealed pages are: in memory, on their way, or at home in the cold file. All sessions of an engine share one hsri_tiers.
 *
 * A body is one sealed page of one layer and head: its state (page.h), its frame (a slot of the pool, while it is in memory), its
 * home (a slot of the cold file), what is known of its importance, and how many sessions refer to it. Frames of one format
 * share blocks, whoever their pages belong to, so that a page that leaves makes room for any other.
 *
 * A family is a lineage as tiers see it. It starts without homes: all its pages are promised frames, nothing is written and
 * nothing leaves. When its growth is admitted and frames cannot be promised any more, it is given homes: every page it has or
 * may get is promised one, only its working set is still promised frames, and from then on its pages are written home and
 * leave under pressure. Promises are counters; what they promise is never refused for want of budget.
 *
 * All calls are the engine's, one at a time; transfers run on the mover's thread, and what became of them is taken in only
 * inside these calls. So a page changes its place only when the owner of the queues is there to see to it. */
#ifndef HSRI_TIERS_H
#define HSRI_TIERS_H

#include "kv/importance.h"
#include "kv/mover.h"
#include "kv/page.h"
#include "kv/pool.h"

#define HSRI_NO_BODY UINT32_MAX
#define HSRI_NO_SLOT UINT32_MAX

/* Why a page is read ahead of need: HSR_PREFETCH_* and the order of hsr_engine_stats.prefetch. */
typedef enum hsri_fetch {
    HSRI_FETCH_GROUPS, HSRI_FETCH_RISING, HSRI_FETCH_QUERY,
    HSRI_FETCH_WANTED,      /* it was not waited for */
    HSRI_FETCH_DEMAND,      /* not ahead: somebody waits */
} hsri_fetch;

typedef struct hsri_tiers hsri_tiers;
typedef struct hsri_family hsri_family;

typedef struct hsri_tiers_opts {
    hsri_pool           *pool;          /* frames come from here, beside everything else that is in it */
    uint8_t             *memory;        /* where the host sees the pool's range */
    hsri_pool           *warm;          /* memory that operations do not read, for pages that leave the pool; NULL: none */
    uint8_t             *warm_memory;
    uint32_t             head_dim;
    hsri_mover_opts      mover;         /* directory and bytes: the cold file */
    hsri_importance_opts importance;
    uint32_t             deadline_ms;   /* a transfer that takes longer is given up, and its page lost; 0: 30 s */
    bool                 rising;        /* bring back pages that have become important */
} hsri_tiers_opts;

typedef struct hsri_tiers_stats {
    uint64_t bodies;                    /* sealed pages, each counted once however many sessions share it */
    uint64_t resident, dirty, absent;   /* in memory; of these not yet at home; at home only */
    uint64_t frames_used, frames_promised, frame_blocks;
    uint64_t homes_used, homes_promised, home_extents, home_extents_total;
    uint64_t hits, misses;              /* pages that were held: there, or not */
    uint64_t late, waits, wait_ns, wait_ns_p99;     /* pages that were still on their way; holds that waited */
    uint64_t estimated;                 /* pages that were asked for and not waited for */
    hsr_prefetch_stats prefetch[HSR_N_PREFETCH];    /* by source */
    uint64_t read_bytes, written_bytes, reads, writes;
    uint64_t evictions, moved, max_moves;   /* in all; pages that left at least once; most of one page */
    uint64_t homes_free_run, homes_wasted;          /* extents; free slots inside extents in use */
    uint64_t warm_free_run, warm_wasted;            /* likewise blocks of warm memory */
    uint64_t warm;                      /* pages in warm memory */
    uint64_t warm_in, warm_out, warm_dropped;       /* that moved there, back into a frame, and out for want of room */
    uint64_t read_failures, write_failures, lost;
    hsri_mover_stats mover;
} hsri_tiers_stats;

hsr_status hsri_tiers_create(const hsri_tiers_opts *opts, hsri_tiers **tiers, hsr_error *err);

/* No family may be left, unless its transfers never ended. HSR_E_IO: the system may still write to the pool's memory, which must
 * then stay mapped and unused. NULL accepted. */
hsr_status hsri_tiers_destroy(hsri_tiers *tiers, uint64_t wait_ms, hsr_error *err);

/* Take in what has ended. */
void hsri_tiers_take_in(hsri_tiers *tiers);

/* The same, and keep cleaning ahead: between steps. */
void hsri_tiers_poll(hsri_tiers *tiers);

/* Some page has left its frame: tables may be stale, and pages that are read must be held. */
bool hsri_tiers_must_hold(const hsri_tiers *tiers);

/* Have n blocks available in the pool: pages leave, after having been written if need be, and those that must stay move. Families
 * are given homes for it, the largest first. HSR_E_NOSPACE: promises forbid it; else why pages cannot be written. It takes as long as
 * the disk does: only one on which nothing ends within the deadline is given up. No operation that reads or writes sealed pages may
 * be under way. */
hsr_status hsri_tiers_make_available(hsri_tiers *tiers, uint64_t n, hsr_error *err);

void hsri_tiers_get_stats(hsri_tiers *tiers, hsri_tiers_stats *stats);

/* ---- families ---- */

/* The family of a lineage, with one member. working_set: frames that a member needs at a time once the family has homes. */
hsr_status hsri_family_create(hsri_tiers *tiers, hsri_kv_type format, uint64_t lineage, uint64_t working_set, hsri_family **family,
                              hsr_error *err);

/* One member more: HSR_E_NOSPACE if its working set cannot be promised. */
hsr_status hsri_family_join(hsri_family *family, hsr_error *err);

/* One fewer, which has given up its promise and its bodies. */
void hsri_family_leave(hsri_family *family);

/* A member that was promised `before` more bodies is promised `after`. Growing may give the family homes, or be refused with
 * HSR_E_NOSPACE, which names the short number; nothing has changed then. Shrinking never fails. */
hsr_status hsri_family_promise(hsri_family *family, uint64_t before, uint64_t after, hsr_error *err);

/* The sequence has so many tokens: the clock of importance. */
void hsri_family_tick(hsri_family *family, uint64_t n_tokens);

/* ---- bodies ---- */

/* A promised body with a frame; not sealed. May have to wait for a page to leave. */
hsr_status hsri_body_create(hsri_family *family, uint32_t page, uint32_t layer, uint32_t head, uint32_t *body, hsr_error *err);
void hsri_body_ref(hsri_tiers *tiers, uint32_t body);

/* One reference fewer; without any the page is dropped, or as soon as its transfer has ended. */
void hsri_body_unref(hsri_tiers *tiers, uint32_t body);

/* Its bytes are final. Idempotent. */
hsr_status hsri_body_seal(hsri_tiers *tiers, uint32_t body, hsr_error *err);

uint32_t hsri_body_entry(const hsri_tiers *tiers, uint32_t body);     /* HSRI_NO_SLOT: not in memory */
hsri_page_state hsri_body_state(const hsri_tiers *tiers, uint32_t body);
void hsri_body_attended(hsri_tiers *tiers, uint32_t body, float mass);

/* Wait until no dropped page has a transfer under way, unless it is past its deadline. */
void hsri_tiers_drain(hsri_tiers *tiers);

/* ---- holding ---- */

/* Pin a body in memory, beginning to read it if it is absent. HSR_AGAIN, and not pinned, if that would have to wait for a frame
 * and `wait` is false. HSR_E_IO, HSR_E_FORMAT: it is lost. */
hsr_status hsri_body_pin(hsri_tiers *tiers, uint32_t body, hsri_fetch why, bool wait, hsr_error *err);
void hsri_body_unpin(hsri_tiers *tiers, uint32_t body);

/* Wanted, but not waited for: HSR_AGAIN if it is not in memory. It is being read then, as soon as that takes no waiting either.
 * HSR_E_IO, HSR_E_FORMAT: it is lost. */
hsr_status hsri_body_want(hsri_tiers *tiers, uint32_t body, hsr_error *err);

/* Wait until the pinned bodies are readable. On failure *lost is the index of one that is not. */
hsr_status hsri_bodies_await(hsri_tiers *tiers, const uint32_t *bodies, size_t n, size_t *lost, hsr_error *err);

/* Frames that may be pinned at a time without starving what must also be in memory. */
uint64_t hsri_tiers_pin_room(const hsri_tiers *tiers, hsri_kv_type format);

#endif
