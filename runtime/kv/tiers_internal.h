/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the tiers share.
 *   tiers.c         creation, families and their promises, statistics
 *   bodies.c        the life of a body, and what becomes of transfers
 *   tiers_space.c   frames: taking, letting pages leave, cleaning, giving blocks back
 *   tiers_warm.c    warm memory that operations do not read */
#ifndef HSRI_TIERS_INTERNAL_H
#define HSRI_TIERS_INTERNAL_H

#include <stddef.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"
#include "kv/slots.h"
#include "kv/tiers.h"

/* Bits of the wait histogram: bucket i counts waits of 2^(i-1) to 2^i microseconds. */
#define HSRI_WAIT_BUCKETS 32u

#define HSRI_N_FRESH 256u

typedef struct hsri_body {
    hsri_family    *family;
    hsri_importance row;
    uint32_t        refs;        /* 0 and a family: dropped, but its transfer still runs; 0 and none: unused */
    uint32_t        entry;       /* its frame, or HSRI_NO_SLOT; of an unused body: the next unused one */
    uint32_t        home;        /* HSRI_NO_SLOT: none given yet. What it holds is only to be believed in states with a home */
    uint32_t        warm;        /* slot in warm memory, or HSRI_NO_SLOT */
    uint32_t        warm_place;  /* in tiers->warm, if it has one */
    uint32_t        move;        /* transfer under way, or HSRI_NO_MOVE */
    uint32_t        place;       /* in tiers->resident, or HSRI_NO_SLOT */
    uint32_t        page;
    uint16_t        layer, head;
    uint16_t        pins;
    uint8_t         state;       /* hsri_page_state */
    uint8_t         tries;       /* reads in a row that failed */
    uint8_t         fetched;     /* hsri_fetch: why it was read ahead, if it was and has not been held yet; else HSRI_FETCH_DEMAND */
    bool            hung;        /* its transfer is past its deadline */
} hsri_body;

struct hsri_family {
    hsri_tiers  *tiers;
    hsri_kv_type format;
    uint64_t     lineage;
    uint64_t     working_set;
    uint64_t     n_members, n_bodies;
    uint64_t     missing;        /* bodies promised to members and not created yet */
    uint64_t     n_tokens;
    bool         homed;
    hsri_family *next, *prev;    /* all there are */
};

#define HSRI_N_NEAR 256u

/* Frames and homes of one format. */
typedef struct hsri_shelf {
    uint32_t   slot_bytes, page_bytes;
    hsri_slots frames, homes, warm;
    uint64_t   frames_promised, homes_promised;
    uint32_t   near[HSRI_N_NEAR];/* of each layer (modulo): the extent that its homes are in, so that a layer is read in long runs */
} hsri_shelf;

struct hsri_tiers {
    hsri_tiers_opts opts;
    hsri_mover     *mover;
    hsri_device     paper;       /* the device of the home pool: blocks are extents of the cold file */
    hsri_pool      *home_pool;
    uint32_t       *free_moves;  /* per extent: the move that gives it back, or HSRI_NO_MOVE */
    hsri_shelf      shelves[HSRI_N_KV_FORMATS];
    hsri_family    *families;

    hsri_body      *bodies;
    size_t          bodies_cap, n_bodies;      /* n_bodies: used ever */
    uint32_t        first_unused;
    uint64_t        n_alive, n_absent, n_writing;
    uint64_t        n_dirty;     /* sealed, of families with homes, and neither at home nor on the way there */
    uint64_t        n_clean;     /* in memory and at home */
    uint64_t        stopped_ns;  /* of waits, in which the process did not run: no deadline counts it */
    uint64_t        n_zombies;   /* dropped, with a transfer that has not ended and is not past its deadline */
    uint64_t        n_homed;     /* families with homes */
    uint64_t        epoch;       /* pages that have changed their frame since there were none at all */
    uint32_t       *resident;    /* bodies with a frame, in no order */
    size_t          resident_cap, n_resident;
    size_t          hand;        /* in resident: where the next look for pages to leave begins */
    size_t          clean_hand;  /* likewise, for pages to write */
    size_t          read_hand;   /* in bodies: for pages to read ahead of need */
    uint32_t        fresh[HSRI_N_FRESH];   /* bodies that have become clean lately: where to look first when few are */
    uint32_t        n_fresh;     /* ever */
    uint32_t       *warm;        /* bodies in warm memory, in no order */
    size_t          n_warm, warm_hand;
    uint32_t       *frame_bodies;/* of each frame of the pool: body */
    uint64_t        n_moves;     /* transfers under way */

    hsr_error       last_error;  /* of a transfer */
    hsr_status      last_status;
    uint64_t        write_after_ns;   /* no background writes before: the last one failed */
    hsri_tiers_stats stats;
    uint64_t        wait_buckets[HSRI_WAIT_BUCKETS];
};

#define HSRI_CONTAINER(field_of, type, field) ((type *)((char *)(field_of) - offsetof(type, field)))

static inline bool hsri_body_in_memory(const hsri_body *b) { return hsri_page_readable((hsri_page_state)b->state); }

static inline uint32_t *hsri_frame_body(hsri_tiers *t, uint32_t entry)
{
    return &t->frame_bodies[(size_t)hsri_entry_block(entry) * HSRI_MAX_SLOTS + hsri_entry_slot(entry)];
}

static inline uint8_t *hsri_frame_memory(const hsri_tiers *t, const hsri_shelf *shelf, uint32_t entry)
{
    return t->opts.memory + (uint64_t)hsri_entry_block(entry) * HSRI_BLOCK_BYTES + (uint64_t)hsri_entry_slot(entry) * shelf->slot_bytes;
}

static inline hsri_shelf *hsri_shelf_of(hsri_tiers *t, const hsri_body *b) { return &t->shelves[b->family->format]; }

/* ---- tiers.c ---- */

/* Bring promises of a format in line with its counters. False: the pool has too few blocks; nothing has changed. */
bool hsri_shelf_settle_frames(hsri_shelf *shelf);
bool hsri_shelf_settle_homes(hsri_shelf *shelf);

/* Blocks of memory that the promise of frames is short of. */
uint64_t hsri_shelf_lacks(const hsri_shelf *shelf);

/* What the family's promises come to. */
uint64_t hsri_family_frames(const hsri_family *f);
uint64_t hsri_family_homes(const hsri_family *f);
void hsri_family_free_if_empty(hsri_family *f);

/* To be promised fewer frames. False: the cold file has no room for all its pages; nothing has changed. */
bool hsri_family_give_homes(hsri_family *f);

/* ---- bodies.c ---- */

/* Take in ends, waiting for one up to timeout_ms. Returns how many. */
uint32_t hsri_tiers_collect(hsri_tiers *t, uint64_t timeout_ms);

/* Start writing a body home. False: no home, no room in the mover's queue. */
bool hsri_body_write(hsri_tiers *t, uint32_t body, hsri_move_priority priority);

/* A family was given homes, or they were taken back: its dirty pages count, or not. */
void hsri_count_dirty(hsri_tiers *t, const hsri_family *f, bool homed);

/* The frame is another one now, or none. */
void hsri_body_set_frame(hsri_tiers *t, uint32_t body, uint32_t entry);

/* Give the frame up: an eviction if the body has a home. */
void hsri_body_drop_frame(hsri_tiers *t, uint32_t body);

/* ---- tiers_space.c ---- */

/* A frame for a body. HSR_AGAIN if there is none at once and `wait` is false. */
hsr_status hsri_frame_take(hsri_tiers *t, hsri_shelf *shelf, bool wait, uint32_t *entry, hsr_error *err);

/* Frames that can be had without waiting, of all formats. */
uint64_t hsri_frames_at_once(const hsri_tiers *t, const hsri_shelf *shelf);

/* Have n blocks available by letting pages leave and moving what must stay, without waiting for anything. */
bool hsri_tiers_reclaim(hsri_tiers *t, uint64_t n);

/* Blocks that would be available if pages held no more than their promises name; negative: promises name more than there are. */
int64_t hsri_blocks_in_reach(const hsri_tiers *t);

/* A shelf has promised more than it holds: have it. As hsri_tiers_make_available. */
hsr_status hsri_tiers_keep_promises(hsri_tiers *t, hsri_shelf *shelf, hsr_error *err);

/* Moves that nobody asked for: writing home, keeping frames free for demand, bringing back what has become important. */
void hsri_tiers_tidy(hsri_tiers *t);

float hsri_body_score(const hsri_tiers *t, const hsri_body *b);

/* ---- tiers_warm.c ---- */

/* A clean page is about to give up its frame: its bytes go to warm memory, if there is any, in place of a page that is worth less. */
void hsri_warm_keep(hsri_tiers *t, uint32_t body);

/* Move a page's bytes from warm memory into its frame. False: they are not there. */
bool hsri_warm_fetch(hsri_tiers *t, uint32_t body);

void hsri_warm_drop(hsri_tiers *t, uint32_t body);

#endif
