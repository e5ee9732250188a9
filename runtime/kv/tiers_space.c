/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "base/clock.h"
#include "kv/tiers_internal.h"

/* Pages looked at to choose those that leave; all of them, if there are fewer. */
#define SAMPLE       256u
#define BATCH        32u
/* Blocks' worth of frames that are kept free while pages are worth less than the threshold. */
#define FREE_BLOCKS  2u
/* Writes ahead of need that may be under way. */
#define MOST_WRITES  256u

/* ---- which page leaves ---- */

float hsri_body_score(const hsri_tiers *t, const hsri_body *b)
{
    uint64_t end = (uint64_t)(b->page + 1) * HSRI_PAGE_TOKENS, n = b->family->n_tokens;
    return hsri_importance_score(&t->opts.importance, &b->row, n > end ? n - end : 0, (uint32_t)n);
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

/* Start up to `most` writes of dirty pages, from the hand on; neighbours in a layer one after the other, to become neighbours at home. */
static void write_some(hsri_tiers *t, uint64_t most, hsri_move_priority priority)
{
    order found[MOST_WRITES];
    size_t n = 0;
    for (size_t looked = 0; looked < t->n_resident && n < hsri_min(most, t->n_dirty); looked++) {
        t->clean_hand = t->clean_hand + 1 < t->n_resident ? t->clean_hand + 1 : 0;
        uint32_t body = t->resident[t->clean_hand];
        const hsri_body *b = &t->bodies[body];
        if (b->state == HSRI_PAGE_HOT && b->move == HSRI_NO_MOVE && b->family->homed)
            found[n++] = (order){ (uint64_t)b->layer << 48 | (uint64_t)b->page << 16 | b->head, body };
    }
    qsort(found, n, sizeof *found, by_order);
    for (size_t i = 0; i < n && hsri_body_write(t, found[i].body, priority); i++)
        continue;
}

/* Above half of the pool, pages are written home ahead of need, so that leaving is only a rebind. */
static void write_ahead(hsri_tiers *t)
{
    uint64_t total = hsri_pool_total(t->opts.pool), busy = total - hsri_pool_available(t->opts.pool);
    if (t->n_dirty > 0 && 2 * busy > total && t->n_writing < MOST_WRITES && hsri_now_ns() >= t->write_after_ns)
        write_some(t, MOST_WRITES - t->n_writing, HSRI_MOVE_BACKGROUND);
}

/* Somebody waits for a frame: writes under way and new ones go first. */
static void write_urgently(hsri_tiers *t)
{
    hsri_mover_raise_writes(t->mover);
    if (t->n_dirty > 0 && t->n_writing < BATCH)
        write_some(t, BATCH, HSRI_MOVE_DEMAND);
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

/* Bring back pages whose scores have risen, into frames that nobody uses. */
static void enter_voluntarily(hsri_tiers *t)
{
    uint32_t begun = 0;
    for (uint32_t i = 0; i < SAMPLE && i < t->n_bodies && begun < BATCH; i++) {
        t->read_hand = t->read_hand + 1 < t->n_bodies ? t->read_hand + 1 : 0;
        const hsri_body *b = &t->bodies[t->read_hand];
        if (!b->family || b->state != HSRI_PAGE_HOME || b->refs == 0)
            continue;
        const hsri_shelf *shelf = &t->shelves[b->family->format];
        if (free_frames(t, shelf) <= 2 * FREE_BLOCKS * shelf->frames.per_block ||
            !hsri_importance_enters(&t->opts.importance, &b->row, hsri_body_score(t, b), (uint32_t)b->family->n_tokens))
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

/* ---- blocks for others ---- */

/* Blocks that the shelf holds beyond what was promised. */
static uint64_t excess(const hsri_shelf *shelf)
{
    uint64_t promised = hsri_div_up(shelf->frames_promised, shelf->frames.per_block);
    return shelf->slot_bytes && shelf->frames.n_blocks > promised ? shelf->frames.n_blocks - promised : 0;
}

static bool in_use(const hsri_held_block *held, uint32_t slot) { return held->used[slot / 64] >> slot % 64 & 1; }

/* How much work emptying a block is: pages that must move to other frames; UINT32_MAX if one cannot. */
static uint32_t stuck(hsri_tiers *t, const hsri_shelf *shelf, const hsri_held_block *held, bool idle)
{
    uint32_t n = 0;
    for (uint32_t slot = 0; slot < shelf->frames.per_block; slot++) {
        if (!in_use(held, slot))
            continue;
        const hsri_body *b = &t->bodies[*hsri_frame_body(t, held->block << 8 | slot)];
        if (b->pins > 0 || b->move != HSRI_NO_MOVE || (b->state == HSRI_PAGE_FULL && !idle))
            return UINT32_MAX;
        n += !may_leave(b);
    }
    return n;
}

static uint32_t easiest_block(hsri_tiers *t, const hsri_shelf *shelf, bool idle)
{
    uint32_t best = HSRI_NO_BLOCK, least = UINT32_MAX;
    for (size_t i = 0; i < shelf->frames.n_blocks; i++) {
        uint32_t n = stuck(t, shelf, &shelf->frames.blocks[i], idle);
        if (n < least) {
            least = n;
            best = shelf->frames.blocks[i].block;
        }
    }
    return best;
}

/* Move a page to another block, making room there if need be. */
static bool move_frame(hsri_tiers *t, hsri_shelf *shelf, uint32_t body)
{
    uint32_t from = t->bodies[body].entry, to;
    t->bodies[body].pins++;         /* not the one to leave */
    bool room = hsri_slots_take_elsewhere(&shelf->frames, from, &to) ||
                (evict_some(t, shelf) > 0 && hsri_slots_take_elsewhere(&shelf->frames, from, &to));
    t->bodies[body].pins--;
    if (!room)
        return false;
    memcpy(hsri_frame_memory(t, shelf, to), hsri_frame_memory(t, shelf, from), shelf->slot_bytes);
    hsri_slots_drop(&shelf->frames, from);
    hsri_body_set_frame(t, body, to);
    t->epoch++;
    return true;
}

/* Empty one block, which goes back to the pool with its last page. */
static bool empty_block(hsri_tiers *t, hsri_shelf *shelf, uint32_t block)
{
    for (uint32_t slot = 0; slot < shelf->frames.per_block; slot++) {
        size_t i = 0;
        while (i < shelf->frames.n_blocks && shelf->frames.blocks[i].block != block)
            i++;
        if (i == shelf->frames.n_blocks)
            return true;
        if (!in_use(&shelf->frames.blocks[i], slot))
            continue;
        uint32_t body = *hsri_frame_body(t, block << 8 | slot);
        if (may_leave(&t->bodies[body]))
            hsri_body_drop_frame(t, body);
        else if (!move_frame(t, shelf, body))
            return false;
    }
    return true;
}

/* Free n blocks of shelves other than `except`. */
static bool reclaim(hsri_tiers *t, uint64_t n, bool idle, const hsri_shelf *except)
{
    uint64_t had = hsri_pool_available(t->opts.pool);
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++) {
        hsri_shelf *shelf = &t->shelves[format];
        while (shelf != except && hsri_pool_available(t->opts.pool) - had < n && excess(shelf) > 0) {
            uint32_t block = easiest_block(t, shelf, idle);
            if (block == HSRI_NO_BLOCK || !empty_block(t, shelf, block))
                break;
            hsri_shelf_settle_frames(shelf);
        }
    }
    return hsri_pool_available(t->opts.pool) - had >= n;
}


bool hsri_tiers_reclaim(hsri_tiers *t, uint64_t n)
{
    return reclaim(t, n, true, NULL);
}

/* ---- frames ---- */

/* A frame without anybody having to leave. */
static hsr_status take_free(hsri_tiers *t, hsri_shelf *shelf, uint32_t *entry, hsr_error *err)
{
    (void)t;
    hsri_slots *frames = &shelf->frames;
    if (frames->n_promised == 0 && !hsri_slots_promise(frames, 1))
        return HSR_AGAIN;
    hsr_status status = hsri_slots_take(frames, entry, err);
    hsri_shelf_settle_frames(shelf);
    return status;
}

static hsr_status no_frame(const hsri_tiers *t, hsr_error *err)
{
    if (t->last_status < 0 && hsri_now_ns() < t->write_after_ns)
        return hsri_fail(err, t->last_status, "no page can leave memory: %s", t->last_error.message);
    return hsri_fail(err, HSR_E_NOSPACE, "no page can leave memory: all of its KV pages are in use");
}

/* Wait for something that may free a frame. */
static hsr_status wait_for_frame(hsri_tiers *t, uint64_t end, hsr_error *err)
{
    uint64_t failures = t->stats.write_failures, left = hsri_tiers_ms_until(t, end);
    write_urgently(t);
    if (t->n_moves == 0)
        return no_frame(t, err);
    if (left == 0)
        return hsri_fail(err, HSR_E_IO, "%s: no page has left memory for %u ms", t->opts.mover.directory, t->opts.deadline_ms);
    hsri_tiers_collect(t, left);
    return t->stats.write_failures > failures && t->n_writing == 0 ? no_frame(t, err) : HSR_OK;
}

/* ---- blocks that must be had ---- */

/* Blocks that would be there once all writes have ended. */
static uint64_t blocks_in_reach(const hsri_tiers *t)
{
    uint64_t n = hsri_pool_available(t->opts.pool);
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++)
        n += excess(&t->shelves[format]);
    return n;
}

/* The family without homes that has the most pages, of those with fewer than `below`. Rare, so a walk will do. */
static hsri_family *largest_without_homes(const hsri_tiers *t, uint64_t below)
{
    hsri_family *largest = NULL;
    for (size_t i = 0; i < t->n_bodies; i++) {
        hsri_family *f = t->bodies[i].refs > 0 ? t->bodies[i].family : NULL;
        if (f && !f->homed && f->n_bodies < below && (!largest || f->n_bodies > largest->n_bodies))
            largest = f;
    }
    return largest;
}

/* Families are given homes until n blocks are in reach, the largest first: an idle session must not keep others out. */
static bool bring_into_reach(hsri_tiers *t, uint64_t n)
{
    uint64_t below = UINT64_MAX;
    while (blocks_in_reach(t) < n) {
        hsri_family *f = largest_without_homes(t, below);
        if (!f)
            return false;
        if (!hsri_family_give_homes(f))
            below = f->n_bodies;
    }
    return true;
}

bool hsri_tiers_make_available(hsri_tiers *t, uint64_t n)
{
    uint64_t end = hsri_tiers_deadline(t), there;
    if (!bring_into_reach(t, n))
        return false;
    while ((there = hsri_pool_available(t->opts.pool)) < n)
        if (!reclaim(t, n - there, true, NULL) && wait_for_frame(t, end, NULL) < 0)
            return false;
    return true;
}

/* ---- frames for pages ---- */

hsr_status hsri_frame_take(hsri_tiers *t, hsri_shelf *shelf, bool wait, uint32_t *entry, hsr_error *err)
{
    uint64_t end = hsri_tiers_deadline(t);
    for (;;) {
        hsr_status status = take_free(t, shelf, entry, err);
        if (status != HSR_AGAIN)
            return status;
        if (evict_some(t, shelf) > 0 || hsri_tiers_collect(t, 0) > 0 || reclaim(t, 1, false, shelf))
            continue;
        if (!wait)
            return HSR_AGAIN;
        HSRI_TRY(wait_for_frame(t, end, err));
    }
}

uint64_t hsri_tiers_pin_room(const hsri_tiers *t, hsri_kv_type format)
{
    const hsri_shelf *shelf = &t->shelves[format];
    return (shelf->frames.n_blocks + hsri_pool_available(t->opts.pool) + shelf->frames.n_reserved) * shelf->frames.per_block / 2;
}
