/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "kv/tiers_internal.h"

/* Pages looked at to choose those that leave; all of them, if there are fewer. */
#define SAMPLE       256u
#define BATCH        32u
/* Blocks' worth of frames that are kept free while pages are worth less than the threshold. */
#define FREE_BLOCKS  2u
/* Writes that may be under way: ahead of need, of small pages more than of large ones, and begun when somebody waits. Reads that come then
 * are not to be delayed for long. */
#define MOST_WRITES   1024u
#define MOST_BYTES    (4u << 20)
#define URGENT_WRITES 256u
/* Blocks that are chosen at a time to be emptied. */
#define VICTIMS      64u

/* ---- which page leaves ---- */

/* Tokens behind the page. */
static uint64_t distance(const hsri_body *b)
{
    uint64_t end = (uint64_t)(b->page + 1) * HSRI_PAGE_TOKENS, n = b->family->n_tokens;
    return n > end ? n - end : 0;
}

float hsri_body_score(const hsri_tiers *t, const hsri_body *b)
{
    return hsri_importance_score(&t->opts.importance, &b->row, distance(b), (uint32_t)b->family->n_tokens);
}

static bool may_leave(const hsri_body *b) { return b->state == HSRI_PAGE_HOT_HOME && b->pins == 0 && b->move == HSRI_NO_MOVE; }

typedef struct candidate {
    float    score;
    uint32_t body;
} candidate;

static void consider(hsri_tiers *t, const hsri_shelf *shelf, uint32_t body, candidate *found, size_t *n)
{
    const hsri_body *b = &t->bodies[body];
    if (b->family && &t->shelves[b->family->format] == shelf && may_leave(b))
        found[(*n)++] = (candidate){ hsri_body_score(t, b), body };
}

/* Fewer than one in so many, and the hand would pass most of its time at pages that may not leave. */
#define CLEAN_SHARE  16u

/* Bodies of the shelf's format that may leave: from the hand on a sample, or, if there `must` be one, the first found behind it. Where few
 * are clean, those that have just become so are asked instead. */
static size_t find_candidates(hsri_tiers *t, const hsri_shelf *shelf, bool must, candidate *found)
{
    size_t n = 0;
    if (t->n_clean < HSRI_N_FRESH || t->n_clean * CLEAN_SHARE < t->n_resident) {
        for (uint32_t i = 0; i < hsri_min(t->n_fresh, HSRI_N_FRESH); i++)
            consider(t, shelf, t->fresh[i], found, &n);
        if (n > 0)
            return n;
    }
    for (size_t looked = 0; t->n_clean > 0 && looked < t->n_resident && n < SAMPLE && (looked < SAMPLE || (must && n == 0)); looked++) {
        t->hand = t->hand + 1 < t->n_resident ? t->hand + 1 : 0;
        consider(t, shelf, t->resident[t->hand], found, &n);
    }
    return n;
}

static int by_score(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->score != y->score)
        return x->score < y->score ? -1 : 1;
    return (x->body > y->body) - (x->body < y->body);
}

/* Candidates in the order in which they leave. A page listed twice is one. */
static size_t rank(hsri_tiers *t, const hsri_shelf *shelf, bool must, candidate *found)
{
    size_t n = find_candidates(t, shelf, must, found), distinct = 0;
    qsort(found, n, sizeof *found, by_score);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || found[i].body != found[i - 1].body)
            found[distinct++] = found[i];
    return distinct;
}

/* Let the lowest-scored leave, whatever their scores. */
static size_t evict_some(hsri_tiers *t, const hsri_shelf *shelf)
{
    candidate found[SAMPLE];
    size_t leave = hsri_min(BATCH, hsri_div_up(rank(t, shelf, true, found), 8));
    for (size_t i = 0; i < leave; i++)
        hsri_body_drop_frame(t, found[i].body);
    return leave;
}

/* ---- cleaning ---- */

typedef struct order {
    uint64_t by;        /* layer, page, head */
    uint32_t body;
} order;

static int by_order(const void *a, const void *b)
{
    const order *x = a, *y = b;
    return (x->by > y->by) - (x->by < y->by);
}

/* Must it be written before it can leave? */
static bool is_dirty(const hsri_body *b) { return b->state == HSRI_PAGE_HOT && b->move == HSRI_NO_MOVE && b->family->homed; }

static void note_dirty(const hsri_tiers *t, uint32_t body, order *found, size_t *n)
{
    const hsri_body *b = &t->bodies[body];
    if (is_dirty(b))
        found[(*n)++] = (order){ (uint64_t)b->layer << 48 | (uint64_t)b->page << 16 | b->head, body };
}

/* Start these writes, neighbours in a layer one after the other, to become neighbours at home. */
static void write_in_order(hsri_tiers *t, order *found, size_t n, hsri_move_priority priority)
{
    qsort(found, n, sizeof *found, by_order);
    for (size_t i = 0; i < n && hsri_body_write(t, found[i].body, priority); i++)
        continue;
}

/* Start up to `most` writes of dirty pages, from the hand on. */
static void write_some(hsri_tiers *t, uint64_t most, hsri_move_priority priority)
{
    order found[MOST_WRITES];
    size_t n = 0;
    for (size_t looked = 0; looked < t->n_resident && n < hsri_min(most, t->n_dirty); looked++) {
        t->clean_hand = t->clean_hand + 1 < t->n_resident ? t->clean_hand + 1 : 0;
        note_dirty(t, t->resident[t->clean_hand], found, &n);
    }
    write_in_order(t, found, n, priority);
}

static uint64_t most_writes(const hsri_tiers *t)
{
    uint64_t most = MOST_WRITES;
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++)
        if (t->shelves[format].frames.n_used > 0)
            most = hsri_min(most, hsri_max(MOST_BYTES / t->shelves[format].slot_bytes, URGENT_WRITES));
    return most;
}

/* Above half of the pool, pages are written home ahead of need, so that leaving is only a rebind. */
static void write_ahead(hsri_tiers *t)
{
    uint64_t total = hsri_pool_total(t->opts.pool), busy = total - hsri_pool_available(t->opts.pool), most = most_writes(t);
    if (t->n_dirty > 0 && 2 * busy > total && t->n_writing < most && hsri_now_ns() >= t->write_after_ns)
        write_some(t, most - t->n_writing, HSRI_MOVE_BACKGROUND);
}

/* Somebody waits for a frame: writes under way and new ones go first. */
static void write_urgently(hsri_tiers *t)
{
    hsri_mover_raise_writes(t->mover);
    if (t->n_dirty > 0 && t->n_writing < URGENT_WRITES / 2)
        write_some(t, URGENT_WRITES - t->n_writing, HSRI_MOVE_DEMAND);
}

/* ---- moves that nobody asked for ---- */

uint64_t hsri_frames_at_once(const hsri_tiers *t, const hsri_shelf *shelf)
{
    return shelf->frames.n_free + t->n_clean + hsri_pool_available(t->opts.pool) * shelf->frames.per_block;
}

static uint64_t free_frames(const hsri_tiers *t, const hsri_shelf *shelf)
{
    return shelf->frames.n_free + hsri_pool_available(t->opts.pool) * shelf->frames.per_block;
}

/* Keep frames free for demand, as far as pages have scores that say they are not worth theirs. */
static void leave_voluntarily(hsri_tiers *t, const hsri_shelf *shelf)
{
    candidate found[SAMPLE];
    size_t n = rank(t, shelf, false, found);
    for (size_t i = 0; i < n && i < BATCH && free_frames(t, shelf) < FREE_BLOCKS * shelf->frames.per_block; i++) {
        const hsri_body *b = &t->bodies[found[i].body];
        if (hsri_importance_leaves(&t->opts.importance, &b->row, found[i].score, (uint32_t)b->family->n_tokens))
            hsri_body_drop_frame(t, found[i].body);
    }
}

/* Is an absent page worth a frame that nobody uses? */
static bool may_enter(const hsri_tiers *t, const hsri_body *b)
{
    const hsri_importance_opts *o = &t->opts.importance;
    const uint32_t now = (uint32_t)b->family->n_tokens;
    return hsri_importance_enters(o, &b->row, hsri_importance_worth(o, &b->row, distance(b), now), now);
}

/* Bring back pages that were attended often, into frames that nobody uses. */
static void enter_voluntarily(hsri_tiers *t)
{
    uint32_t begun = 0;
    for (uint32_t i = 0; i < SAMPLE && i < t->n_bodies && begun < BATCH; i++) {
        t->read_hand = t->read_hand + 1 < t->n_bodies ? t->read_hand + 1 : 0;
        const hsri_body *b = &t->bodies[t->read_hand];
        if (!b->family || b->state != HSRI_PAGE_HOME || b->refs == 0)
            continue;
        const hsri_shelf *shelf = &t->shelves[b->family->format];
        if (free_frames(t, shelf) <= 2 * FREE_BLOCKS * shelf->frames.per_block || !may_enter(t, b))
            continue;
        if (hsri_body_pin(t, (uint32_t)t->read_hand, HSRI_FETCH_RISING, false, NULL) == HSR_OK)
            hsri_body_unpin(t, (uint32_t)t->read_hand);
        begun++;
    }
}

void hsri_tiers_tidy(hsri_tiers *t)
{
    if (t->n_homed == 0)
        return;
    write_ahead(t);
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++) {
        const hsri_shelf *shelf = &t->shelves[format];
        if (shelf->frames.n_used > 0 && t->n_clean > 0 && free_frames(t, shelf) < FREE_BLOCKS * shelf->frames.per_block)
            leave_voluntarily(t, shelf);
    }
    if (t->opts.rising && t->n_absent > 0)
        enter_voluntarily(t);
}

/* ---- frames that are waited for ---- */

static hsr_status no_frame(const hsri_tiers *t, hsr_error *err)
{
    if (t->last_status < 0 && hsri_now_ns() < t->write_after_ns)
        return hsri_fail(err, t->last_status, "no page can leave memory: %s", t->last_error.message);
    return hsri_fail(err, HSR_E_NOSPACE, "no page can leave memory: all of its KV pages are in use");
}

/* Wait for something that may free a frame. However long all of it takes, only a disk on which nothing ends is given up. */
static hsr_status wait_for_frame(hsri_tiers *t, hsr_error *err)
{
    uint64_t failures = t->stats.write_failures;
    write_urgently(t);
    if (t->n_moves == 0)
        return no_frame(t, err);
    if (hsri_tiers_collect(t, t->opts.deadline_ms) == 0)
        return hsri_fail(err, HSR_E_IO, "%s: no page has left memory for %u ms", t->opts.mover.directory, t->opts.deadline_ms);
    return t->stats.write_failures > failures && t->n_writing == 0 ? no_frame(t, err) : HSR_OK;
}

/* ---- blocks for others ---- */

/* What may be done to have blocks. */
typedef struct means {
    bool idle;          /* nothing reads or writes pages: full ones can move, too */
    bool wait;          /* what is not at home is written, and waited for */
} means;

typedef struct victim {
    float    cost;
    uint32_t block;
} victim;

static uint64_t blocks_promised(const hsri_shelf *shelf) { return hsri_div_up(shelf->frames_promised, shelf->frames.per_block); }

/* Blocks that the shelf holds beyond what was promised. */
static uint64_t excess(const hsri_shelf *shelf)
{
    return shelf->slot_bytes && shelf->frames.n_blocks > blocks_promised(shelf) ? shelf->frames.n_blocks - blocks_promised(shelf) : 0;
}

/* The next slot in use, from `slot` on; HSRI_MAX_SLOTS: none. */
static uint32_t next_used(const hsri_held_block *held, uint32_t slot)
{
    for (uint32_t word = slot / 64; word < HSRI_SLOT_WORDS; slot = ++word * 64) {
        uint64_t bits = held->used[word] >> slot % 64;
        if (bits)
            return slot + (uint32_t)__builtin_ctzll(bits);
    }
    return HSRI_MAX_SLOTS;
}

static uint32_t body_at(hsri_tiers *t, const hsri_held_block *held, uint32_t slot) { return *hsri_frame_body(t, held->block << 8 | slot); }

/* Does it leave when its block is emptied, now or once it is at home? Else it must move to another. */
static bool leaves(const hsri_body *b, means by) { return may_leave(b) || (by.wait && (b->state == HSRI_PAGE_HOT_WRITE || is_dirty(b))); }

static bool is_stuck(const hsri_body *b, means by)
{
    return b->pins > 0 || (b->move != HSRI_NO_MOVE && !leaves(b, by)) || (b->state == HSRI_PAGE_FULL && !by.idle);
}

/* What emptying a block costs: the scores of the pages that leave it, and 1 for each that must move, since another leaves for it then.
 * INFINITY: it cannot be emptied now, or the limit is reached. */
static float cost_of(hsri_tiers *t, const hsri_held_block *held, means by, float limit)
{
    float cost = 0;
    for (uint32_t slot = 0; (slot = next_used(held, slot)) < HSRI_MAX_SLOTS; slot++) {
        const hsri_body *b = &t->bodies[body_at(t, held, slot)];
        cost += leaves(b, by) ? hsri_body_score(t, b) : 1;
        if (is_stuck(b, by) || cost >= limit)
            return INFINITY;
    }
    return cost;
}

/* Up to n blocks, those that cost the least first. */
static uint32_t cheapest_blocks(hsri_tiers *t, const hsri_shelf *shelf, means by, uint32_t n, victim *found)
{
    uint32_t n_found = 0;
    for (size_t i = 0; i < shelf->frames.n_blocks; i++) {
        const hsri_held_block *held = &shelf->frames.blocks[i];
        float limit = n_found < n ? INFINITY : found[n - 1].cost, cost = cost_of(t, held, by, limit);
        if (cost >= limit)
            continue;
        uint32_t at = n_found < n ? n_found++ : n - 1;
        for (; at > 0 && found[at - 1].cost > cost; at--)
            found[at] = found[at - 1];
        found[at] = (victim){ cost, held->block };
    }
    return n_found;
}

/* Move a page to another block, where others leave for it if need be. */
static bool move_frame(hsri_tiers *t, hsri_shelf *shelf, uint32_t body)
{
    uint32_t from = t->bodies[body].entry, to;
    while (!hsri_slots_take_elsewhere(&shelf->frames, from, &to))
        if (evict_some(t, shelf) == 0)
            return false;
    memcpy(hsri_frame_memory(t, shelf, to), hsri_frame_memory(t, shelf, from), shelf->slot_bytes);
    hsri_slots_drop(&shelf->frames, from);
    hsri_body_set_frame(t, body, to);
    t->epoch++;
    return true;
}

/* What may leave the block does. */
static void let_leave(hsri_tiers *t, const hsri_held_block was)
{
    for (uint32_t slot = 0; (slot = next_used(&was, slot)) < HSRI_MAX_SLOTS; slot++) {
        uint32_t body = body_at(t, &was, slot);
        if (may_leave(&t->bodies[body]))
            hsri_body_drop_frame(t, body);
    }
}

/* What is left in it moves. False: something must wait, or has nowhere to go. */
static bool move_rest(hsri_tiers *t, hsri_shelf *shelf, means by, const hsri_held_block was)
{
    for (uint32_t slot = 0; (slot = next_used(&was, slot)) < HSRI_MAX_SLOTS; slot++) {
        const hsri_body *b = &t->bodies[body_at(t, &was, slot)];
        if (is_stuck(b, by) || leaves(b, by))
            return false;
    }
    for (uint32_t slot = 0; (slot = next_used(&was, slot)) < HSRI_MAX_SLOTS; slot++)
        if (!move_frame(t, shelf, body_at(t, &was, slot)))
            return false;
    return true;
}

/* Empty a block, which goes back to the pool with its last page. What leaves does so first: nothing that moves away makes it leave then. */
static bool empty_block(hsri_tiers *t, hsri_shelf *shelf, means by, uint32_t block)
{
    const hsri_held_block *held = hsri_slots_held(&shelf->frames, block);
    if (held)
        let_leave(t, *held);
    held = hsri_slots_held(&shelf->frames, block);
    return !held || move_rest(t, shelf, by, *held);
}

/* Begin to write what these blocks hold that is not at home. */
static void write_blocks(hsri_tiers *t, hsri_shelf *shelf, const victim *victims, uint32_t n)
{
    order found[MOST_WRITES];
    size_t n_found = 0, most = most_writes(t) - hsri_min(t->n_writing, most_writes(t));
    for (uint32_t i = 0; i < n; i++) {
        const hsri_held_block *held = hsri_slots_held(&shelf->frames, victims[i].block);
        for (uint32_t slot = 0; held && n_found < most && (slot = next_used(held, slot)) < HSRI_MAX_SLOTS; slot++)
            note_dirty(t, body_at(t, held, slot), found, &n_found);
    }
    write_in_order(t, found, n_found, HSRI_MOVE_DEMAND);
}

/* Is it still worth waiting for? Not if a transfer in it is past its deadline. */
static bool can_be_emptied(hsri_tiers *t, hsri_shelf *shelf, means by, uint32_t block)
{
    const hsri_held_block *held = hsri_slots_held(&shelf->frames, block);
    return !held || cost_of(t, held, by, INFINITY) < INFINITY;
}

static hsr_status empty_blocks(hsri_tiers *t, hsri_shelf *shelf, means by, const victim *victims, uint32_t n, uint32_t *n_empty,
                               hsr_error *err)
{
    for (uint32_t i = 0; i < n; i++) {
        bool empty;
        while (!(empty = empty_block(t, shelf, by, victims[i].block)) && by.wait && can_be_emptied(t, shelf, by, victims[i].block)) {
            write_blocks(t, shelf, victims + i, n - i);
            HSRI_TRY(wait_for_frame(t, err));
        }
        hsri_shelf_settle_frames(shelf);
        *n_empty += empty;
    }
    return HSR_OK;
}

/* Have n blocks available: shelves other than `except` give up what they hold in excess. HSR_AGAIN: that would mean waiting. */
static hsr_status gather(hsri_tiers *t, uint64_t n, means by, const hsri_shelf *except, hsr_error *err)
{
    while (hsri_pool_available(t->opts.pool) < n) {
        uint32_t n_empty = 0;
        for (int format = 0; format < HSRI_N_KV_FORMATS; format++) {
            hsri_shelf *shelf = &t->shelves[format];
            victim found[VICTIMS];
            uint64_t there = hsri_pool_available(t->opts.pool);
            if (shelf == except || there >= n || excess(shelf) == 0)
                continue;
            uint32_t want = (uint32_t)hsri_min(hsri_min(n - there, excess(shelf)), VICTIMS);
            uint32_t n_found = cheapest_blocks(t, shelf, by, want, found);
            HSRI_TRY(empty_blocks(t, shelf, by, found, n_found, &n_empty, err));
        }
        if (n_empty == 0 && !by.wait)
            return HSR_AGAIN;
        if (n_empty == 0)
            HSRI_TRY(wait_for_frame(t, err));
    }
    return HSR_OK;
}

bool hsri_tiers_reclaim(hsri_tiers *t, uint64_t n)
{
    return gather(t, n, (means){ .idle = true }, NULL, NULL) == HSR_OK;
}

/* ---- blocks that must be had ---- */

int64_t hsri_blocks_in_reach(const hsri_tiers *t)
{
    int64_t n = (int64_t)hsri_pool_available(t->opts.pool);
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++) {
        const hsri_shelf *shelf = &t->shelves[format];
        if (shelf->slot_bytes)
            n += (int64_t)(shelf->frames.n_blocks + shelf->frames.n_reserved) - (int64_t)blocks_promised(shelf);
    }
    return n;
}

/* The family without homes that is promised the most frames, of those with fewer than `below` that would need fewer with homes. */
static hsri_family *largest_without_homes(const hsri_tiers *t, uint64_t below)
{
    hsri_family *largest = NULL;
    for (hsri_family *f = t->families; f; f = f->next) {
        uint64_t frames = hsri_family_frames(f);
        if (!f->homed && frames < below && frames > f->n_members * f->working_set && (!largest || frames > hsri_family_frames(largest)))
            largest = f;
    }
    return largest;
}

/* Families are given homes until n blocks are in reach, the largest first: an idle session must not keep others out. */
static bool bring_into_reach(hsri_tiers *t, uint64_t n)
{
    uint64_t below = UINT64_MAX;
    while (hsri_blocks_in_reach(t) < (int64_t)n) {
        hsri_family *f = largest_without_homes(t, below);
        if (!f)
            return false;
        if (!hsri_family_give_homes(f))
            below = hsri_family_frames(f);
    }
    return true;
}

static hsr_status make_available(hsri_tiers *t, uint64_t n, hsr_error *err)
{
    return gather(t, n, (means){ .idle = true, .wait = true }, NULL, err);
}

hsr_status hsri_tiers_make_available(hsri_tiers *t, uint64_t n, hsr_error *err)
{
    return bring_into_reach(t, n) ? make_available(t, n, err) : HSR_E_NOSPACE;
}

hsr_status hsri_tiers_keep_promises(hsri_tiers *t, hsri_shelf *shelf, hsr_error *err)
{
    if (!bring_into_reach(t, 0))
        return HSR_E_NOSPACE;
    HSRI_TRY(make_available(t, hsri_shelf_lacks(shelf), err));
    return hsri_shelf_settle_frames(shelf) ? HSR_OK : HSR_E_NOSPACE;
}

/* ---- frames ---- */

/* A frame without anybody having to leave. */
static hsr_status take_free(hsri_shelf *shelf, uint32_t *entry, hsr_error *err)
{
    hsri_slots *frames = &shelf->frames;
    if (frames->n_promised == 0 && !hsri_slots_promise(frames, 1))
        return HSR_AGAIN;
    hsr_status status = hsri_slots_take(frames, entry, err);
    hsri_shelf_settle_frames(shelf);
    return status;
}

hsr_status hsri_frame_take(hsri_tiers *t, hsri_shelf *shelf, bool wait, uint32_t *entry, hsr_error *err)
{
    for (;;) {
        hsr_status status = take_free(shelf, entry, err);
        if (status != HSR_AGAIN)
            return status;
        if (evict_some(t, shelf) > 0 || hsri_tiers_collect(t, 0) > 0)
            continue;
        if (gather(t, 1, (means){ 0 }, shelf, NULL) == HSR_OK)
            continue;
        if (!wait)
            return HSR_AGAIN;
        HSRI_TRY(wait_for_frame(t, err));
    }
}

uint64_t hsri_tiers_pin_room(const hsri_tiers *t, hsri_kv_type format)
{
    const hsri_shelf *shelf = &t->shelves[format];
    return (shelf->frames.n_blocks + hsri_pool_available(t->opts.pool) + shelf->frames.n_reserved) * shelf->frames.per_block / 2;
}
