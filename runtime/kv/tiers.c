/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "base/clock.h"
#include "kv/tiers_internal.h"

#define DEFAULT_DEADLINE_MS 30000u

/* ---- the home pool's device: taking a block of it costs nothing, giving one back frees an extent of the cold file ---- */

static hsri_tiers *tiers_of(hsri_device *paper) { return HSRI_CONTAINER(paper, hsri_tiers, paper); }

static hsr_status paper_reserve(hsri_device *dev, uint64_t bytes, uint32_t *buf, hsr_error *err)
{
    (void)dev;
    (void)bytes;
    (void)err;
    *buf = 1;
    return HSR_OK;
}

static void paper_free(hsri_device *dev, uint32_t buf)
{
    (void)dev;
    (void)buf;
}

/* An extent that is still to be given back is kept instead. */
static hsr_status paper_commit(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes, hsr_error *err)
{
    hsri_tiers *t = tiers_of(dev);
    uint32_t move = t->free_moves[offset / HSRI_BLOCK_BYTES];
    (void)buf;
    (void)bytes;
    (void)err;
    if (move != HSRI_NO_MOVE)
        hsri_mover_cancel(t->mover, move);
    return HSR_OK;
}

/* If the queue is full the extent stays on disk, as the cold file's own spares do. */
static void paper_decommit(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes)
{
    hsri_tiers *t = tiers_of(dev);
    uint32_t extent = (uint32_t)(offset / HSRI_BLOCK_BYTES);
    (void)buf;
    (void)bytes;
    t->free_moves[extent] = hsri_mover_submit(t->mover, &(hsri_move){ .kind = HSRI_MOVE_FREE, .extent = extent }, HSRI_MOVE_BACKGROUND);
}

/* ---- creation ---- */

static void fill_shelves(hsri_tiers *t)
{
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++) {
        hsri_shelf *shelf = &t->shelves[format];
        uint64_t page_bytes = hsri_page_bytes((hsri_kv_type)format, t->opts.head_dim);
        if (page_bytes == 0 || page_bytes > HSRI_BLOCK_BYTES)
            continue;
        shelf->page_bytes = (uint32_t)page_bytes;
        shelf->slot_bytes = (uint32_t)hsri_round_up(page_bytes, HSRI_IO_ALIGN);
        hsri_slots_init(&shelf->frames, t->opts.pool, HSRI_BLOCK_BYTES / shelf->slot_bytes);
        hsri_slots_init(&shelf->homes, t->home_pool, HSRI_BLOCK_BYTES / shelf->slot_bytes);
        hsri_slots_init(&shelf->warm, t->opts.warm, HSRI_BLOCK_BYTES / shelf->slot_bytes);
        for (uint32_t layer = 0; layer < HSRI_N_NEAR; layer++)
            shelf->near[layer] = HSRI_NO_BLOCK;
    }
}

static hsr_status allocate(hsri_tiers *t, hsr_error *err)
{
    uint64_t n_extents = t->opts.mover.bytes / HSRI_BLOCK_BYTES;
    t->free_moves = hsri_new_array(n_extents, sizeof *t->free_moves);
    t->frame_bodies = hsri_new_array(hsri_pool_total(t->opts.pool) * HSRI_MAX_SLOTS, sizeof *t->frame_bodies);
    if (t->opts.warm)
        t->warm = hsri_new_array(hsri_pool_total(t->opts.warm) * HSRI_MAX_SLOTS, sizeof *t->warm);
    if (!t->free_moves || !t->frame_bodies || (t->opts.warm && !t->warm))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the tables of the tiers");
    for (uint64_t i = 0; i < n_extents; i++)
        t->free_moves[i] = HSRI_NO_MOVE;
    t->paper = (hsri_device){
        .name = "cold", .reserve = paper_reserve, .commit = paper_commit, .decommit = paper_decommit, .free = paper_free,
    };
    return hsri_pool_create(&t->paper, t->opts.mover.bytes, &t->home_pool, err);
}

hsr_status hsri_tiers_create(const hsri_tiers_opts *opts, hsri_tiers **out, hsr_error *err)
{
    *out = NULL;
    HSRI_TRY(hsri_importance_check(&opts->importance, err));
    if (opts->mover.bytes < HSRI_BLOCK_BYTES)
        return hsri_fail(err, HSR_E_INVALID, "a cold tier of %llu bytes: at least 1 MiB is needed", (unsigned long long)opts->mover.bytes);
    hsri_tiers *t = hsri_new_array(1, sizeof *t);
    if (!t)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the tiers");
    t->opts = *opts;
    t->opts.deadline_ms = opts->deadline_ms ? opts->deadline_ms : DEFAULT_DEADLINE_MS;
    t->first_unused = HSRI_NO_BODY;
    if (t->opts.mover.io.deadline_ms == 0)
        t->opts.mover.io.deadline_ms = t->opts.deadline_ms;

    hsr_status status = allocate(t, err);
    if (status == HSR_OK)
        status = hsri_mover_create(&t->opts.mover, &t->mover, err);
    if (status < 0) {
        hsri_tiers_destroy(t, 0, NULL);
        return status;
    }
    fill_shelves(t);
    *out = t;
    return HSR_OK;
}

/* Pages whose transfer never ended are left over when the last family is gone: their frames are given back by number only. */
static void drop_left_overs(hsri_tiers *t)
{
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++) {
        hsri_shelf *shelf = &t->shelves[format];
        if (shelf->slot_bytes == 0)
            continue;
        hsri_slots_clear(&shelf->frames, NULL, NULL);
        hsri_slots_clear(&shelf->homes, NULL, NULL);
        if (t->opts.warm)
            hsri_slots_clear(&shelf->warm, NULL, NULL);
    }
    for (size_t i = 0; i < t->n_bodies; i++) {
        hsri_family *f = t->bodies[i].family;
        if (f && --f->n_bodies == 0)
            free(f);
    }
}

hsr_status hsri_tiers_destroy(hsri_tiers *t, uint64_t wait_ms, hsr_error *err)
{
    hsr_status status = HSR_OK;
    if (!t)
        return status;
    if (t->mover) {
        hsri_tiers_drain(t);
        drop_left_overs(t);     /* before the mover goes: blocks of the home pool are given back to it */
        status = hsri_mover_destroy(t->mover, wait_ms, err);
    }
    t->mover = NULL;
    hsri_pool_destroy(t->home_pool);
    free(t->free_moves);
    free(t->frame_bodies);
    free(t->warm);
    free(t->bodies);
    free(t->resident);
    free(t);
    return status;
}

void hsri_tiers_take_in(hsri_tiers *t)
{
    hsri_tiers_collect(t, 0);
}

void hsri_tiers_poll(hsri_tiers *t)
{
    hsri_tiers_take_in(t);
    hsri_tiers_tidy(t);
}

bool hsri_tiers_must_hold(const hsri_tiers *t)
{
    return t->epoch > 0;
}

/* ---- promises ---- */

static bool settle(hsri_slots *slots, uint64_t promised)
{
    return hsri_slots_promise(slots, promised > slots->n_used ? promised - slots->n_used : 0);
}

bool hsri_shelf_settle_frames(hsri_shelf *shelf)
{
    return settle(&shelf->frames, shelf->frames_promised);
}

bool hsri_shelf_settle_homes(hsri_shelf *shelf)
{
    return settle(&shelf->homes, shelf->homes_promised);
}

uint64_t hsri_family_frames(const hsri_family *f)
{
    return f->homed ? f->n_members * f->working_set : f->n_bodies + f->missing;
}

uint64_t hsri_family_homes(const hsri_family *f)
{
    return f->homed ? f->n_bodies + f->missing : 0;
}

/* What a family is promised. */
typedef struct terms {
    uint64_t n_members, missing;
    bool     homed;
} terms;

static void set_terms(hsri_family *f, const terms *to)
{
    hsri_shelf *shelf = &f->tiers->shelves[f->format];
    shelf->frames_promised -= hsri_family_frames(f);
    shelf->homes_promised -= hsri_family_homes(f);
    f->tiers->n_homed += to->homed;
    f->tiers->n_homed -= f->homed;
    if (to->homed != f->homed)
        hsri_count_dirty(f->tiers, f, to->homed);
    f->n_members = to->n_members;
    f->missing = to->missing;
    f->homed = to->homed;
    shelf->frames_promised += hsri_family_frames(f);
    shelf->homes_promised += hsri_family_homes(f);
}

static terms terms_of(const hsri_family *f) { return (terms){ f->n_members, f->missing, f->homed }; }

static void go_back_to(hsri_family *f, const terms *from)
{
    hsri_shelf *shelf = &f->tiers->shelves[f->format];
    set_terms(f, from);
    hsri_shelf_settle_frames(shelf);
    hsri_shelf_settle_homes(shelf);
}

uint64_t hsri_shelf_lacks(const hsri_shelf *shelf)
{
    const hsri_slots *frames = &shelf->frames;
    uint64_t want = shelf->frames_promised > frames->n_used ? shelf->frames_promised - frames->n_used : 0;
    uint64_t blocks = hsri_slots_blocks_for(frames, want);
    return blocks > frames->n_reserved ? blocks - frames->n_reserved : 0;
}

/* Pages of others leave for it if that is enough. */
static bool settle_frames(hsri_tiers *t, hsri_shelf *shelf)
{
    if (hsri_shelf_lacks(shelf) > hsri_pool_available(t->opts.pool) && hsri_blocks_in_reach(t) >= 0)
        hsri_tiers_reclaim(t, hsri_shelf_lacks(shelf));
    return hsri_shelf_settle_frames(shelf);
}

/* New terms, if what they promise is there or can be had without waiting; else nothing has changed. */
static bool agree(hsri_family *f, const terms *to)
{
    hsri_shelf *shelf = &f->tiers->shelves[f->format];
    terms from = terms_of(f);
    set_terms(f, to);
    if (settle_frames(f->tiers, shelf) && hsri_shelf_settle_homes(shelf))
        return true;
    go_back_to(f, &from);
    return false;
}

static uint64_t mib(uint64_t slots, const hsri_shelf *shelf) { return hsri_div_up(slots, shelf->frames.per_block); }

static hsr_status refuse(const hsri_family *f, const terms *to, hsr_error *err)
{
    const hsri_tiers *t = f->tiers;
    const hsri_shelf *shelf = &t->shelves[f->format];
    uint64_t pages = f->n_bodies + to->missing, had = f->homed ? mib(f->n_bodies + f->missing, shelf) : 0;
    uint64_t cold = hsri_pool_available(t->home_pool) + had;
    uint64_t ram = hsri_pool_available(t->opts.pool);
    if (to->homed && cold < mib(pages, shelf))
        return hsri_fail(err, HSR_E_NOSPACE,
                         "%llu sealed pages need %llu MiB of cold storage; %llu of %llu MiB are available, and memory has %llu MiB",
                         (unsigned long long)pages, (unsigned long long)mib(pages, shelf), (unsigned long long)cold,
                         (unsigned long long)hsri_pool_total(t->home_pool), (unsigned long long)ram);
    return hsri_fail(err, HSR_E_NOSPACE, "sessions with pages in cold storage need %llu MiB of memory at a time; %llu MiB are available",
                     (unsigned long long)mib(to->homed ? to->n_members * f->working_set : pages, shelf), (unsigned long long)ram);
}

/* Frames that were promised and are not there stay short of as much, at most: others are asked next. */
bool hsri_family_give_homes(hsri_family *f)
{
    hsri_shelf *shelf = &f->tiers->shelves[f->format];
    terms from = terms_of(f), to = from;
    to.homed = true;
    set_terms(f, &to);
    if (!hsri_shelf_settle_homes(shelf)) {
        go_back_to(f, &from);
        return false;
    }
    hsri_shelf_settle_frames(shelf);
    return true;
}

/* As agree, but what is not at home is written for it, and others are given homes, too. */
static hsr_status agree_among_all(hsri_family *f, const terms *to, hsr_error *err)
{
    hsri_shelf *shelf = &f->tiers->shelves[f->format];
    terms from = terms_of(f);
    set_terms(f, to);
    hsr_status status = hsri_shelf_settle_homes(shelf) ? hsri_tiers_keep_promises(f->tiers, shelf, err) : HSR_E_NOSPACE;
    if (status == HSR_OK)
        return HSR_OK;
    go_back_to(f, &from);
    return status == HSR_E_NOSPACE ? refuse(f, to, err) : status;
}

/* All pages in memory, if that can be had at once; else with homes. A family that works with no fewer frames than it has gains nothing from
 * these. */
static hsr_status agree_somehow(hsri_family *f, terms *to, hsr_error *err)
{
    if (agree(f, to))
        return HSR_OK;
    to->homed |= to->n_members * f->working_set < f->n_bodies + to->missing;
    return agree_among_all(f, to, err);
}

hsr_status hsri_family_promise(hsri_family *f, uint64_t before, uint64_t after, hsr_error *err)
{
    terms to = terms_of(f);
    to.missing += after - before;
    return agree_somehow(f, &to, err);
}

/* ---- families ---- */

hsr_status hsri_family_create(hsri_tiers *t, hsri_kv_type format, uint64_t lineage, uint64_t working_set, hsri_family **out,
                              hsr_error *err)
{
    *out = hsri_new_array(1, sizeof **out);
    if (!*out)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a KV cache");
    **out = (hsri_family){
        .tiers = t, .format = format, .lineage = lineage, .working_set = working_set, .n_members = 1, .next = t->families,
    };
    if (t->families)
        t->families->prev = *out;
    t->families = *out;
    return HSR_OK;
}

void hsri_family_free_if_empty(hsri_family *f)
{
    hsri_tiers *t = f->tiers;
    if (f->n_members > 0 || f->n_bodies > 0)
        return;
    t->n_homed -= f->homed;
    if (t->n_alive == 0)
        t->epoch = 0;
    *(f->prev ? &f->prev->next : &t->families) = f->next;
    if (f->next)
        f->next->prev = f->prev;
    free(f);
}

hsr_status hsri_family_join(hsri_family *f, hsr_error *err)
{
    terms to = terms_of(f);
    to.n_members++;
    return agree_somehow(f, &to, err);
}

void hsri_family_leave(hsri_family *f)
{
    terms to = terms_of(f);
    to.n_members--;
    agree(f, &to);
    hsri_family_free_if_empty(f);
}

void hsri_family_tick(hsri_family *f, uint64_t n_tokens)
{
    f->n_tokens = hsri_max(f->n_tokens, n_tokens);
}

/* ---- statistics ---- */

static uint64_t wait_p99(const hsri_tiers *t)
{
    uint64_t seen = 0, want = t->stats.waits - t->stats.waits / 100;
    for (uint32_t i = 0; i < HSRI_WAIT_BUCKETS; i++) {
        seen += t->wait_buckets[i];
        if (seen >= want)
            return 1000ull << i;
    }
    return 0;
}

void hsri_tiers_get_stats(hsri_tiers *t, hsri_tiers_stats *stats)
{
    hsri_pool_stats homes, warm = { 0 };
    hsri_pool_get_stats(t->home_pool, &homes);
    if (t->opts.warm)
        hsri_pool_get_stats(t->opts.warm, &warm);
    *stats = t->stats;
    stats->bodies = t->n_alive;
    stats->resident = t->n_resident;
    stats->dirty = t->n_dirty;
    stats->absent = t->n_absent;
    stats->warm = t->n_warm;
    stats->home_extents = homes.used;
    stats->home_extents_total = homes.total;
    stats->homes_free_run = homes.largest_free_run;
    stats->warm_free_run = warm.largest_free_run;
    stats->wait_ns_p99 = t->stats.waits ? wait_p99(t) : 0;
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++) {
        const hsri_shelf *shelf = &t->shelves[format];
        stats->frames_used += shelf->frames.n_used;
        stats->frames_promised += shelf->frames_promised;
        stats->frame_blocks += shelf->frames.n_blocks;
        stats->homes_used += shelf->homes.n_used;
        stats->homes_promised += shelf->homes_promised;
        stats->homes_wasted += shelf->homes.n_free;
        stats->warm_wasted += t->opts.warm ? shelf->warm.n_free : 0;
    }
    hsri_mover_get_stats(t->mover, &stats->mover);
}
