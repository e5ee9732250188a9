/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <string.h>

#include "base/clock.h"
#include "kv/tiers_internal.h"

/* Reads of one page that may fail in a row before it is given up. */
#define MAX_TRIES       2u
/* After a failed write, none is started ahead of need for so long: a full disk is not asked at every step. */
#define WRITE_PAUSE_NS  1000000000u
#define COLLECT         64u
/* Blocks whose frames only demand may take. */
#define KEPT_BLOCKS     2u

static void count(hsri_tiers *t, const hsri_body *b, uint64_t n)
{
    switch (b->state) {
    case HSRI_PAGE_HOT:
        t->n_dirty += b->family->homed ? n : 0;
        break;
    case HSRI_PAGE_HOT_WRITE:
        t->n_writing += n;
        break;
    case HSRI_PAGE_HOT_HOME:
        t->n_clean += n;
        break;
    case HSRI_PAGE_HOME:
    case HSRI_PAGE_HOME_READ:
    case HSRI_PAGE_LOST:
        t->n_absent += n;
        break;
    default:
        break;
    }
}

/* Every change of a state, and the counters that follow it. */
static void change(hsri_tiers *t, hsri_body *b, hsri_page_event event)
{
    count(t, b, UINT64_MAX);     /* one fewer */
    hsr_status allowed = hsri_page_move(&b->state, event, NULL);
    assert(allowed == HSR_OK);
    (void)allowed;
    count(t, b, 1);
}

void hsri_count_dirty(hsri_tiers *t, const hsri_family *f, bool homed)
{
    for (size_t i = 0; i < t->n_bodies; i++)
        if (t->bodies[i].family == f && t->bodies[i].state == HSRI_PAGE_HOT)
            t->n_dirty += homed ? 1 : UINT64_MAX;
}

/* ---- frames ---- */

static void list_resident(hsri_tiers *t, uint32_t body)
{
    t->bodies[body].place = (uint32_t)t->n_resident;
    t->resident[t->n_resident++] = body;
}

static void unlist_resident(hsri_tiers *t, uint32_t body)
{
    uint32_t place = t->bodies[body].place, last = t->resident[--t->n_resident];
    t->resident[place] = last;
    t->bodies[last].place = place;
    t->bodies[body].place = HSRI_NO_SLOT;
}

void hsri_body_set_frame(hsri_tiers *t, uint32_t body, uint32_t entry)
{
    hsri_body *b = &t->bodies[body];
    if (b->entry == HSRI_NO_SLOT && entry != HSRI_NO_SLOT)
        list_resident(t, body);
    if (b->entry != HSRI_NO_SLOT && entry == HSRI_NO_SLOT)
        unlist_resident(t, body);
    b->entry = entry;
    if (entry != HSRI_NO_SLOT)
        *hsri_frame_body(t, entry) = body;
}

/* The frame goes back to its shelf. */
static void free_frame(hsri_tiers *t, uint32_t body)
{
    hsri_body *b = &t->bodies[body];
    hsri_shelf *shelf = hsri_shelf_of(t, b);
    if (b->entry == HSRI_NO_SLOT)
        return;
#ifndef NDEBUG
    memset(hsri_frame_memory(t, shelf, b->entry), 0xFF, shelf->slot_bytes);
#endif
    hsri_slots_drop(&shelf->frames, b->entry);
    hsri_body_set_frame(t, body, HSRI_NO_SLOT);
    hsri_shelf_settle_frames(shelf);
}

/* It goes, and was read ahead for nobody. */
static void fetched_for_nothing(hsri_tiers *t, hsri_body *b)
{
    if (b->fetched != HSRI_FETCH_DEMAND) {
        t->stats.prefetch[b->fetched].wasted++;
        t->stats.prefetch[b->fetched].wasted_bytes += hsri_shelf_of(t, b)->slot_bytes;
    }
    b->fetched = HSRI_FETCH_DEMAND;
}

void hsri_body_drop_frame(hsri_tiers *t, uint32_t body)
{
    hsri_body *b = &t->bodies[body];
    change(t, b, HSRI_PAGE_EV_EVICT);
    t->stats.moved += b->row.moves == 0;
    hsri_importance_moved(&b->row, (uint32_t)b->family->n_tokens);
    t->stats.max_moves = hsri_max(t->stats.max_moves, b->row.moves);
    t->stats.evictions++;
    fetched_for_nothing(t, b);
    t->epoch++;
    hsri_warm_keep(t, body);
    free_frame(t, body);
}

/* ---- life ---- */

static hsr_status new_body(hsri_tiers *t, uint32_t *body, hsr_error *err)
{
    if (t->first_unused != HSRI_NO_BODY) {
        *body = t->first_unused;
        t->first_unused = t->bodies[*body].entry;
        return HSR_OK;
    }
    if (!hsri_grow((void **)&t->bodies, &t->bodies_cap, t->n_bodies + 1, sizeof *t->bodies) ||
        !hsri_grow((void **)&t->resident, &t->resident_cap, t->n_bodies + 1, sizeof *t->resident))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a table of %llu sealed pages", (unsigned long long)(t->n_bodies + 1));
    *body = (uint32_t)t->n_bodies++;
    return HSR_OK;
}

static void forget_body(hsri_tiers *t, uint32_t body)
{
    t->bodies[body] = (hsri_body){ .entry = t->first_unused };
    t->first_unused = body;
    t->n_alive--;
}

hsr_status hsri_body_create(hsri_family *f, uint32_t page, uint32_t layer, uint32_t head, uint32_t *out, hsr_error *err)
{
    hsri_tiers *t = f->tiers;
    uint32_t body = HSRI_NO_BODY, entry;
    *out = HSRI_NO_BODY;
    if (f->missing == 0)
        return hsri_fail(err, HSR_E_INTERNAL, "a page slot was taken that was not promised");
    HSRI_TRY(new_body(t, &body, err));
    t->n_alive++;
    hsr_status status = hsri_frame_take(t, &t->shelves[f->format], true, &entry, err);
    if (status < 0) {
        forget_body(t, body);
        return status;
    }
    t->bodies[body] = (hsri_body){
        .family = f, .refs = 1, .entry = HSRI_NO_SLOT, .home = HSRI_NO_SLOT, .move = HSRI_NO_MOVE, .place = HSRI_NO_SLOT,
        .warm = HSRI_NO_SLOT,
        .fetched = HSRI_FETCH_DEMAND, .page = page, .layer = (uint16_t)layer, .head = (uint16_t)head,
        .row = { .last_access = (uint32_t)f->n_tokens },
    };
    hsri_body_set_frame(t, body, entry);
    change(t, &t->bodies[body], HSRI_PAGE_EV_OPEN);
    change(t, &t->bodies[body], HSRI_PAGE_EV_FILL);
    f->missing--;
    f->n_bodies++;
    *out = body;
    return HSR_OK;
}

void hsri_body_ref(hsri_tiers *t, uint32_t body)
{
    t->bodies[body].refs++;
}

/* Nobody refers to it and nothing carries it: frame and home go back. */
static void drop_body(hsri_tiers *t, uint32_t body)
{
    hsri_body *b = &t->bodies[body];
    hsri_family *f = b->family;
    hsri_shelf *shelf = hsri_shelf_of(t, b);
    uint64_t frames = hsri_family_frames(f), homes = hsri_family_homes(f);
    change(t, b, HSRI_PAGE_EV_DROP);
    f->n_bodies--;
    shelf->frames_promised -= frames - hsri_family_frames(f);
    shelf->homes_promised -= homes - hsri_family_homes(f);
    fetched_for_nothing(t, b);
    free_frame(t, body);
    hsri_warm_drop(t, body);
    if (b->home != HSRI_NO_SLOT)
        hsri_slots_drop(&shelf->homes, b->home);
    hsri_shelf_settle_frames(shelf);
    hsri_shelf_settle_homes(shelf);
    forget_body(t, body);
    hsri_family_free_if_empty(f);
}

void hsri_body_unref(hsri_tiers *t, uint32_t body)
{
    hsri_body *b = &t->bodies[body];
    assert(b->refs > 0);
    if (--b->refs > 0)
        return;
    if (b->move == HSRI_NO_MOVE) {
        drop_body(t, body);
        return;
    }
    t->n_zombies += !b->hung;
    hsri_mover_cancel(t->mover, b->move);
}

hsr_status hsri_body_seal(hsri_tiers *t, uint32_t body, hsr_error *err)
{
    hsri_body *b = &t->bodies[body];
    if (b->state != HSRI_PAGE_FULL)
        return HSR_OK;
    uint8_t to = b->state;
    HSRI_TRY(hsri_page_move(&to, HSRI_PAGE_EV_SEAL, err));
    change(t, b, HSRI_PAGE_EV_SEAL);
    return HSR_OK;
}

/* ---- transfers ---- */

static hsri_move describe(hsri_tiers *t, uint32_t body, hsri_move_kind kind)
{
    const hsri_body *b = &t->bodies[body];
    const hsri_shelf *shelf = hsri_shelf_of(t, b);
    return (hsri_move){
        .kind = kind, .owner = body, .extent = hsri_entry_block(b->home), .offset = hsri_entry_slot(b->home) * shelf->slot_bytes,
        .memory = hsri_frame_memory(t, shelf, b->entry), .slot_bytes = shelf->slot_bytes, .page_bytes = shelf->page_bytes,
        .lineage = b->family->lineage, .page = b->page, .layer = b->layer, .head = b->head,
    };
}

static bool submit(hsri_tiers *t, uint32_t body, hsri_move_kind kind, hsri_move_priority priority)
{
    hsri_move move = describe(t, body, kind);
    uint32_t id = hsri_mover_submit(t->mover, &move, priority);
    if (id == HSRI_NO_MOVE)
        return false;
    t->bodies[body].move = id;
    t->n_moves++;
    return true;
}

bool hsri_body_write(hsri_tiers *t, uint32_t body, hsri_move_priority priority)
{
    hsri_body *b = &t->bodies[body];
    hsri_shelf *shelf = hsri_shelf_of(t, b);
    if (b->state != HSRI_PAGE_HOT || b->move != HSRI_NO_MOVE || !b->family->homed)
        return false;
    if (b->home == HSRI_NO_SLOT && hsri_slots_take_near(&shelf->homes, &shelf->near[b->layer % HSRI_N_NEAR], &b->home, NULL) < 0)
        return false;
    if (!submit(t, body, HSRI_MOVE_WRITE, priority))
        return false;
    change(t, b, HSRI_PAGE_EV_WRITE);
    return true;
}

static void note_failure(hsri_tiers *t, const hsri_moved *moved)
{
    static const char *const names[] = { [HSRI_MOVE_READ] = "read", [HSRI_MOVE_WRITE] = "written" };
    t->last_status = moved->status == HSR_E_FORMAT ? HSR_E_FORMAT : HSR_E_IO;
    t->last_error = (hsr_error)HSR_ERROR_INIT;
    if (moved->status == HSR_E_FORMAT)
        hsri_fail(&t->last_error, HSR_E_FORMAT, "%s: page %u of layer %u, head %u came back from the cold file with wrong bytes",
                  t->opts.mover.directory, moved->move.page, moved->move.layer, moved->move.head);
    else
        hsri_fail_sys(&t->last_error, HSR_E_IO, moved->sys_code, "%s: page %u of layer %u, head %u cannot be %s", t->opts.mover.directory,
                      moved->move.page, moved->move.layer, moved->move.head, names[moved->move.kind]);
}

static void came_back(hsri_tiers *t, hsri_body *b)
{
    change(t, b, HSRI_PAGE_EV_LOADED);
    hsri_importance_moved(&b->row, (uint32_t)b->family->n_tokens);
}

static void read_ended(hsri_tiers *t, uint32_t body, const hsri_moved *moved)
{
    hsri_body *b = &t->bodies[body];
    if (b->state == HSRI_PAGE_LOST) {       /* given up while it was under way */
        free_frame(t, body);
        return;
    }
    if (moved->status == HSR_OK) {
        b->tries = 0;
        came_back(t, b);
        t->stats.reads++;
        t->stats.read_bytes += moved->move.slot_bytes;
        return;
    }
    change(t, b, HSRI_PAGE_EV_READ_FAIL);
    b->fetched = HSRI_FETCH_DEMAND;
    free_frame(t, body);
    if (moved->status == HSR_E_CANCELLED)
        return;
    t->stats.read_failures++;
    note_failure(t, moved);
    if (++b->tries >= MAX_TRIES) {
        change(t, b, HSRI_PAGE_EV_LOSE);
        t->stats.lost++;
    }
}

static void write_ended(hsri_tiers *t, uint32_t body, const hsri_moved *moved)
{
    hsri_body *b = &t->bodies[body];
    if (b->state != HSRI_PAGE_HOT_WRITE)    /* given up while it was under way: written again when the time comes */
        return;
    if (moved->status == HSR_OK) {
        change(t, b, HSRI_PAGE_EV_DURABLE);
        t->fresh[t->n_fresh++ % HSRI_N_FRESH] = body;
        t->stats.writes++;
        t->stats.written_bytes += moved->move.slot_bytes;
        return;
    }
    change(t, b, HSRI_PAGE_EV_WRITE_FAIL);
    if (moved->status == HSR_E_CANCELLED)
        return;
    t->stats.write_failures++;
    t->write_after_ns = hsri_now_ns() + WRITE_PAUSE_NS;
    note_failure(t, moved);
}

/* The deadline of a transfer has passed. Its memory is still its own. */
static void gave_up(hsri_tiers *t, hsri_body *b, const hsri_moved *moved)
{
    note_failure(t, moved);
    b->hung = true;
    t->n_zombies -= b->refs == 0;
    if (b->state == HSRI_PAGE_HOME_READ) {
        t->stats.read_failures++;
        t->stats.lost++;
        change(t, b, HSRI_PAGE_EV_LOSE);
    } else if (b->state == HSRI_PAGE_HOT_WRITE) {
        t->stats.write_failures++;
        t->write_after_ns = hsri_now_ns() + WRITE_PAUSE_NS;
        change(t, b, HSRI_PAGE_EV_WRITE_FAIL);
    }
}

static void take_in(hsri_tiers *t, const hsri_moved *moved)
{
    if (moved->move.kind == HSRI_MOVE_FREE) {
        uint32_t *free_move = &t->free_moves[moved->move.extent];
        *free_move = *free_move == moved->id ? HSRI_NO_MOVE : *free_move;
        return;
    }
    uint32_t body = moved->move.owner;
    hsri_body *b = &t->bodies[body];
    if (!moved->retired) {
        gave_up(t, b, moved);
        return;
    }
    b->move = HSRI_NO_MOVE;
    t->n_moves--;
    if (moved->move.kind == HSRI_MOVE_READ)
        read_ended(t, body, moved);
    else
        write_ended(t, body, moved);
    bool hung = b->hung;
    b->hung = false;
    if (b->refs == 0) {
        t->n_zombies -= !hung;
        drop_body(t, body);
    }
}

static uint32_t collect_within(hsri_tiers *t, uint64_t timeout_ms)
{
    hsri_moved moved[COLLECT];
    uint32_t total = 0, n;
    while ((n = hsri_mover_collect(t->mover, moved, COLLECT, total ? 0 : timeout_ms)) > 0) {
        for (uint32_t i = 0; i < n; i++)
            take_in(t, &moved[i]);
        total += n;
    }
    return total;
}

/* Time in which the process was stopped does not count. */
static uint64_t running_ns(const hsri_tiers *t) { return hsri_now_ns() - t->stopped_ns; }

/* At least 1 until then. */
static uint64_t ms_until(const hsri_tiers *t, uint64_t end)
{
    uint64_t now = running_ns(t);
    return now < end ? (end - now) / 1000000u + 1 : 0;
}

uint32_t hsri_tiers_collect(hsri_tiers *t, uint64_t timeout_ms)
{
    const uint64_t end = running_ns(t) + timeout_ms * 1000000ull;
    for (;;) {
        const uint64_t began = hsri_now_ns(), left = timeout_ms ? ms_until(t, end) : 0;
        const uint64_t part = hsri_min(left, HSRI_WATCH_NS / 1000000u);
        const uint32_t n = collect_within(t, part);
        t->stopped_ns += hsri_stopped_ns(began, part * 1000000ull);
        if (n > 0 || left <= part)
            return n;
    }
}

void hsri_tiers_drain(hsri_tiers *t)
{
    while (t->n_zombies > 0 && hsri_tiers_collect(t, t->opts.deadline_ms) > 0)
        continue;
}

/* ---- holding ---- */

static hsr_status lost(const hsri_tiers *t, hsr_error *err)
{
    return hsri_fail(err, t->last_status < 0 ? t->last_status : HSR_E_IO, "%s", t->last_error.message);
}

/* A frame, and a read into it; from warm memory that is all there is to do. */
static hsr_status begin_read(hsri_tiers *t, uint32_t body, hsri_move_priority priority, bool wait, hsr_error *err)
{
    uint32_t entry;
    hsr_status status = hsri_frame_take(t, hsri_shelf_of(t, &t->bodies[body]), wait, &entry, err);
    if (status != HSR_OK)
        return status;
    hsri_body_set_frame(t, body, entry);
    if (hsri_warm_fetch(t, body)) {
        change(t, &t->bodies[body], HSRI_PAGE_EV_READ);
        came_back(t, &t->bodies[body]);
        return HSR_OK;
    }
    while (!submit(t, body, HSRI_MOVE_READ, priority)) {
        if (hsri_tiers_collect(t, wait ? t->opts.deadline_ms : 0) > 0)
            continue;
        free_frame(t, body);
        if (!wait)
            return HSR_AGAIN;
        return hsri_fail(err, HSR_E_IO, "%s: no transfer has ended for %u ms", t->opts.mover.directory, t->opts.deadline_ms);
    }
    change(t, &t->bodies[body], HSRI_PAGE_EV_READ);
    return HSR_OK;
}

/* Of what was asked for ahead twice, the first reason counts. */
static void note_fetch(hsri_tiers *t, hsri_body *b, hsri_fetch why)
{
    if (b->fetched != HSRI_FETCH_DEMAND)
        return;
    b->fetched = (uint8_t)why;
    t->stats.prefetch[why].pages++;
    t->stats.prefetch[why].bytes += hsri_shelf_of(t, b)->slot_bytes;
}

static void note_demand(hsri_tiers *t, hsri_body *b, bool there)
{
    t->stats.hits += there;
    t->stats.misses += !there;
    if (b->fetched != HSRI_FETCH_DEMAND)
        t->stats.prefetch[b->fetched].hits++;
    b->fetched = HSRI_FETCH_DEMAND;
    hsri_importance_seen(&b->row, (uint32_t)b->family->n_tokens);
}

hsr_status hsri_body_pin(hsri_tiers *t, uint32_t body, hsri_fetch why, bool wait, hsr_error *err)
{
    const hsri_move_priority priority = why == HSRI_FETCH_DEMAND ? HSRI_MOVE_DEMAND : HSRI_MOVE_PREFETCH;
    hsri_body *b = &t->bodies[body];
    if (b->state == HSRI_PAGE_LOST)
        return lost(t, err);
    bool there = hsri_body_in_memory(b) || b->warm != HSRI_NO_SLOT, home = b->state == HSRI_PAGE_HOME;
    if (home) {
        const hsri_shelf *shelf = hsri_shelf_of(t, b);
        if (priority != HSRI_MOVE_DEMAND && hsri_frames_at_once(t, shelf) < KEPT_BLOCKS * shelf->frames.per_block)
            return HSR_AGAIN;
        hsr_status status = begin_read(t, body, priority, wait, err);
        if (status != HSR_OK)
            return status;
    } else if (b->state == HSRI_PAGE_HOME_READ && priority == HSRI_MOVE_DEMAND) {
        hsri_mover_raise(t->mover, b->move, priority);
    }
    b->pins++;
    if (why == HSRI_FETCH_DEMAND)
        note_demand(t, b, there);
    else if (home && !there)
        note_fetch(t, b, why);
    return HSR_OK;
}

void hsri_body_unpin(hsri_tiers *t, uint32_t body)
{
    assert(t->bodies[body].pins > 0);
    t->bodies[body].pins--;
}

hsr_status hsri_body_want(hsri_tiers *t, uint32_t body, hsr_error *err)
{
    hsri_body *b = &t->bodies[body];
    if (b->state == HSRI_PAGE_LOST)
        return lost(t, err);
    if (hsri_body_in_memory(b))
        return HSR_OK;
    hsri_importance_seen(&b->row, (uint32_t)b->family->n_tokens);   /* when it has arrived, it is not the first to leave */
    bool begun = b->state == HSRI_PAGE_HOME && begin_read(t, body, HSRI_MOVE_PREFETCH, false, NULL) == HSR_OK;
    if (hsri_body_in_memory(b))     /* it was in warm memory */
        return HSR_OK;
    if (begun)
        note_fetch(t, b, HSRI_FETCH_WANTED);
    t->stats.estimated++;
    return HSR_AGAIN;
}

static void note_wait(hsri_tiers *t, uint64_t ns)
{
    uint32_t bucket = 0;
    for (uint64_t us = ns / 1000; us > 0 && bucket + 1 < HSRI_WAIT_BUCKETS; us /= 2)
        bucket++;
    t->wait_buckets[bucket]++;
    t->stats.waits++;
    t->stats.wait_ns += ns;
}

/* A read that failed once is begun again: the body is pinned, but at home. */
static hsr_status read_again(hsri_tiers *t, uint32_t body, hsr_error *err)
{
    HSRI_TRY(hsri_body_pin(t, body, HSRI_FETCH_DEMAND, true, err));
    hsri_body_unpin(t, body);
    return HSR_OK;
}

/* Its read has a deadline of its own, and ends by it one way or another. The time of all that must be read is the disk's. */
static hsr_status await_one(hsri_tiers *t, uint32_t body, hsr_error *err)
{
    while (!hsri_body_in_memory(&t->bodies[body])) {
        if (t->bodies[body].state == HSRI_PAGE_LOST)
            return lost(t, err);
        if (t->bodies[body].state == HSRI_PAGE_HOME)
            HSRI_TRY(read_again(t, body, err));
        if (hsri_tiers_collect(t, t->opts.deadline_ms) == 0 && !hsri_body_in_memory(&t->bodies[body]))
            return hsri_fail(err, HSR_E_IO, "%s: page %u of layer %u, head %u did not arrive, and nothing else did for %u ms",
                             t->opts.mover.directory, t->bodies[body].page, t->bodies[body].layer, t->bodies[body].head,
                             t->opts.deadline_ms);
    }
    return HSR_OK;
}

hsr_status hsri_bodies_await(hsri_tiers *t, const uint32_t *bodies, size_t n, size_t *lost_at, hsr_error *err)
{
    uint64_t start = hsri_now_ns();
    hsri_tiers_collect(t, 0);
    bool waited = false;
    for (size_t i = 0; i < n; i++) {
        if (hsri_body_in_memory(&t->bodies[bodies[i]]))
            continue;
        t->stats.late++;
        waited = true;
        hsr_status status = await_one(t, bodies[i], err);
        if (status < 0) {
            *lost_at = i;
            return status;
        }
    }
    if (waited)
        note_wait(t, hsri_now_ns() - start);
    return HSR_OK;
}

/* ---- what others see ---- */

uint32_t hsri_body_entry(const hsri_tiers *t, uint32_t body)
{
    const hsri_body *b = &t->bodies[body];
    return hsri_body_in_memory(b) ? b->entry : HSRI_NO_SLOT;
}

hsri_page_state hsri_body_state(const hsri_tiers *t, uint32_t body)
{
    return (hsri_page_state)t->bodies[body].state;
}

void hsri_body_attended(hsri_tiers *t, uint32_t body, float mass)
{
    hsri_body *b = &t->bodies[body];
    hsri_importance_touch(&t->opts.importance, &b->row, (uint32_t)b->family->n_tokens, mass);
}
