/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/holder.h"

#include <stdlib.h>
#include <string.h>

#include "kv/cache_internal.h"

#define GROUP_PAGES (HSRI_GROUP_TOKENS / HSRI_PAGE_TOKENS)

/* Which page of whom. */
typedef struct place {
    uint32_t seq;
    uint64_t entry;         /* index in its table */
} place;

/* Pinned bodies. */
typedef struct pins {
    uint32_t *bodies;
    place    *places;
    size_t    n, bodies_cap, places_cap;
} pins;

struct hsri_holder {
    hsri_residency   iface;
    hsri_device     *dev;
    hsri_queue      *queue;
    hsri_tiers      *tiers;
    uint32_t         depth;         /* groups read ahead */
    uint32_t         reach;         /* pages read ahead of a list that is foreseen */
    hsri_holder_step step;
    uint32_t         first_row, n_rows, first_pick;
    bool             quiet;         /* nothing that was enqueued before the first wave is still under way */
    pins             held;          /* of this wave */
    pins             ahead;         /* of waves to come */
    hsri_fetch       why;           /* they are */
    uint32_t        *units, *counts;/* of the lists of this layer and span */
    uint32_t        *marked;        /* these lists, with marks */
    size_t           units_cap, counts_cap, marked_cap, n_marked;
    uint32_t         failed;
};

/* ---- pins ---- */

static void unpin_from(hsri_holder *h, pins *p, size_t n)
{
    while (p->n > n)
        hsri_body_unpin(h->tiers, p->bodies[--p->n]);
}

/* Without a list to put it in: HSR_AGAIN if the page is not in memory. */
static hsr_status pin(hsri_holder *h, pins *p, uint32_t seq, uint32_t page, uint32_t layer, uint32_t head, bool wait, hsr_error *err)
{
    const hsri_cache *cache = h->step.caches[seq];
    uint32_t body = hsri_cache_body(cache, page, layer, head);
    if (body == HSRI_NO_BODY)
        return HSR_OK;
    if (!p)
        return hsri_body_entry(h->tiers, body) == HSRI_NO_SLOT ? HSR_AGAIN : HSR_OK;
    if (!hsri_grow((void **)&p->bodies, &p->bodies_cap, p->n + 1, sizeof *p->bodies) ||
        !hsri_grow((void **)&p->places, &p->places_cap, p->n + 1, sizeof *p->places))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a list of %zu pages", p->n + 1);
    hsr_status status = hsri_body_pin(h->tiers, body, p == &h->held ? HSRI_FETCH_DEMAND : h->why, wait, err);
    if (status < 0)
        h->failed = seq;
    if (status != HSR_OK)
        return status;
    p->bodies[p->n] = body;
    p->places[p->n++] = (place){ seq, page * cache->per_page + (uint64_t)layer * cache->shape->n_kv_heads + head };
    return HSR_OK;
}

/* ---- tables ---- */

static void send(hsri_holder *h, uint32_t seq, uint64_t first, uint64_t n)
{
    const hsri_cache *cache = h->step.caches[seq];
    const hsri_store *store = &cache->stores[hsri_read_store(&cache->opts)];
    hsri_ref to = { .buf = store->buf, .offset = first * sizeof *store->entries };
    if (n > 0)
        h->dev->copy_in(h->queue, to, store->entries + first, n * sizeof *store->entries);
}

/* Entries of pages that came back to other frames than the device knows, in runs of neighbours. */
static void correct_tables(hsri_holder *h)
{
    uint32_t seq = HSRI_NO_SEQ;
    uint64_t first = 0, n = 0;
    for (size_t i = 0; i < h->held.n; i++) {
        const place *at = &h->held.places[i];
        hsri_cache *cache = h->step.caches[at->seq];
        uint32_t *entry = &cache->stores[hsri_read_store(&cache->opts)].entries[at->entry];
        uint32_t now = hsri_body_entry(h->tiers, h->held.bodies[i]);
        if (*entry == now)
            continue;
        *entry = now;
        if (at->seq == seq && at->entry == first + n) {
            n++;
            continue;
        }
        if (seq != HSRI_NO_SEQ)
            send(h, seq, first, n);
        seq = at->seq;
        first = at->entry;
        n = 1;
    }
    if (seq != HSRI_NO_SEQ)
        send(h, seq, first, n);
}

static hsr_status arrive(hsri_holder *h, hsr_error *err)
{
    size_t lost;
    hsr_status status = hsri_bodies_await(h->tiers, h->held.bodies, h->held.n, &lost, err);
    if (status < 0) {
        h->failed = h->held.places[lost].seq;
        return status;
    }
    correct_tables(h);
    return HSR_OK;
}

/* Pages may leave from here on, so what reads or writes them must be done: the step's own encoding, at first. Takes in what has
 * arrived meanwhile. */
static hsr_status be_quiet(hsri_holder *h, hsr_error *err)
{
    hsri_tiers_take_in(h->tiers);
    if (h->quiet)
        return HSR_OK;
    h->quiet = true;
    return h->dev->wait(h->queue, err);
}

/* ---- dense groups ---- */

/* Pages from here on are read from the ring, or not at all, by the rows of the span up to `pos`. */
static uint64_t sealed_end(const hsri_cache *cache, uint32_t pos)
{
    uint64_t end = hsri_encoded_end(&cache->opts, pos / HSRI_PAGE_TOKENS, cache->opts.window_pages);
    return hsri_min(end, hsri_read_store(&cache->opts) == HSRI_STORE_PLAIN ? cache->sealed : cache->encoded.queued);
}

/* Pin one sequence's pages of a group. *more: there is such a page. */
static hsr_status pin_group_of(hsri_holder *h, pins *p, uint32_t seq, uint32_t pos, uint32_t layer, uint32_t group, bool wait, bool *more,
                               hsr_error *err)
{
    const hsri_cache *cache = h->step.caches[seq];
    uint64_t first = hsri_max((uint64_t)group * GROUP_PAGES, cache->opts.sink_pages);
    uint64_t end = hsri_min((group + 1ull) * GROUP_PAGES, sealed_end(cache, pos));
    for (uint64_t page = first; page < end; page++)
        for (uint32_t head = 0; head < cache->shape->n_kv_heads; head++) {
            *more = true;
            hsr_status status = pin(h, p, seq, (uint32_t)page, layer, head, wait, err);
            if (status != HSR_OK)
                return status;
        }
    return HSR_OK;
}

/* Pin a group of all sequences of the span, or nothing. */
static hsr_status pin_group(hsri_holder *h, pins *p, uint32_t layer, uint32_t group, bool wait, bool *more, hsr_error *err)
{
    size_t before = p ? p->n : 0;
    for (uint32_t row = h->first_row, end = h->first_row + h->n_rows; row < end; row++) {
        const hsri_row *r = &h->step.rows[row];
        if (row + 1 < end && h->step.rows[row + 1].seq == r->seq)
            continue;               /* the last row of a sequence reads the most */
        hsr_status status = pin_group_of(h, p, r->seq, r->pos, layer, group, wait, more, err);
        if (status != HSR_OK && p)
            unpin_from(h, p, before);
        if (status != HSR_OK)
            return status;
    }
    return HSR_OK;
}

static uint64_t pin_room(const hsri_holder *h)
{
    return hsri_tiers_pin_room(h->tiers, h->step.caches[h->step.rows[h->first_row].seq]->opts.format);
}

/* Read ahead, two waves: the next groups of this layer, then the first of the next one. Only what fits without waiting. */
static void look_ahead(hsri_holder *h, uint32_t layer, uint32_t group)
{
    uint32_t n_layers = h->step.caches[0]->shape->n_layers;
    uint64_t room = pin_room(h) / 2;
    for (uint32_t i = 0; i < 2 * h->depth && h->ahead.n < room && layer < n_layers; i++) {
        bool more = false;
        if (pin_group(h, &h->ahead, layer, group++, false, &more, NULL) != HSR_OK)
            return;
        if (!more) {
            layer++;
            group = 0;
        }
    }
}

/* Does group g, which is or is not here, still belong to a wave that began at g0 with a group that was or was not? With reading ahead, what
 * is here is computed while the rest arrives; and where nothing is here, a few groups are waited for together. */
static bool in_wave(const hsri_holder *h, uint32_t g0, bool first_here, uint32_t g, bool here)
{
    if (g == g0 || h->depth == 0)
        return true;
    return first_here ? here : g - g0 < h->depth;
}

static hsr_status hold_dense(void *self, uint32_t layer, uint32_t g0, uint32_t *g1, hsr_error *err)
{
    hsri_holder *h = self;
    HSRI_TRY(be_quiet(h, err));
    uint64_t room = pin_room(h);
    bool more, first_here = pin_group(h, NULL, layer, g0, false, &more, NULL) == HSR_OK;
    for (uint32_t g = g0; g < *g1; g++) {
        hsr_status status = HSR_AGAIN;
        if (in_wave(h, g0, first_here, g, pin_group(h, NULL, layer, g, false, &more, NULL) == HSR_OK))
            status = pin_group(h, &h->held, layer, g, false, &more, err);
        if (status == HSR_AGAIN && g == g0) {
            unpin_from(h, &h->ahead, 0);    /* what is needed now goes first */
            status = pin_group(h, &h->held, layer, g, true, &more, err);
        }
        if (status < 0)
            return status;
        if (status == HSR_AGAIN || h->held.n > room)
            *g1 = status == HSR_AGAIN ? g : g + 1;
    }
    unpin_from(h, &h->ahead, 0);
    HSRI_TRY(arrive(h, err));
    look_ahead(h, layer, *g1);
    return HSR_OK;
}

/* ---- lists ---- */

static hsr_status read_lists(hsri_holder *h, const hsri_lists *lists, hsr_error *err)
{
    size_t n = (size_t)lists->n_picks * h->step.caches[0]->shape->n_kv_heads;
    if (!hsri_grow((void **)&h->counts, &h->counts_cap, n, sizeof *h->counts) ||
        !hsri_grow((void **)&h->units, &h->units_cap, n * lists->stride, sizeof *h->units))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the lists of %u selections", lists->n_picks);
    h->dev->copy_out(h->queue, h->counts, lists->counts, n * sizeof *h->counts);
    h->dev->copy_out(h->queue, h->units, lists->units, n * lists->stride * sizeof *h->units);
    return h->dev->wait(h->queue, err);
}

/* Pin one list group of one pick and head. */
static hsr_status pin_list(hsri_holder *h, pins *p, uint32_t layer, uint32_t seq, uint32_t head, const uint32_t *units, uint32_t n,
                           bool wait, hsr_error *err)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = units[i] / HSRI_PAGE_UNITS;
        if (i > 0 && units[i - 1] / HSRI_PAGE_UNITS == page)
            continue;
        if (page >= sealed_end(h->step.caches[seq], UINT32_MAX))
            continue;
        hsr_status status = pin(h, p, seq, page, layer, head, wait, err);
        if (status != HSR_OK)
            return status;
    }
    return HSR_OK;
}

static hsr_status pin_list_group(hsri_holder *h, pins *p, uint32_t layer, const hsri_lists *lists, uint32_t group, bool wait,
                                 hsr_error *err)
{
    uint32_t n_heads = h->step.caches[0]->shape->n_kv_heads, first = group * lists->group_units;
    size_t before = p ? p->n : 0;
    for (uint32_t i = 0; i < lists->n_picks * n_heads; i++) {
        uint32_t n = h->counts[i] > first ? (uint32_t)hsri_min(h->counts[i] - first, lists->group_units) : 0;
        uint32_t seq = h->step.pick_seqs[h->first_pick + i / n_heads];
        hsr_status status = pin_list(h, p, layer, seq, i % n_heads, h->units + (size_t)i * lists->stride + first, n, wait, err);
        if (status != HSR_OK && p)
            unpin_from(h, p, before);
        if (status != HSR_OK)
            return status;
    }
    return HSR_OK;
}

static hsr_status hold_lists(void *self, uint32_t layer, const hsri_lists *lists, uint32_t g0, uint32_t *g1, hsr_error *err)
{
    hsri_holder *h = self;
    HSRI_TRY(be_quiet(h, err));
    if (g0 == 0)
        HSRI_TRY(read_lists(h, lists, err));
    uint64_t room = pin_room(h);
    bool first_here = pin_list_group(h, NULL, layer, lists, g0, false, NULL) == HSR_OK;
    for (uint32_t g = g0; g < *g1; g++) {
        hsr_status status = HSR_AGAIN;
        if (in_wave(h, g0, first_here, g, pin_list_group(h, NULL, layer, lists, g, false, NULL) == HSR_OK))
            status = pin_list_group(h, &h->held, layer, lists, g, false, err);
        if (status == HSR_AGAIN && g == g0) {
            unpin_from(h, &h->ahead, 0);
            status = pin_list_group(h, &h->held, layer, lists, g, true, err);
        }
        if (status < 0)
            return status;
        if (status == HSR_AGAIN || h->held.n > room)
            *g1 = status == HSR_AGAIN ? g : g + 1;
    }
    unpin_from(h, &h->ahead, 0);
    /* Before the wait: nothing of this list was asked for yet, unlike that of a dense pass, which is two waves ahead. */
    for (uint32_t i = 0, more = *g1; i < h->depth && h->ahead.n < room / 2; i++)
        if (pin_list_group(h, &h->ahead, layer, lists, more++, false, NULL) != HSR_OK)
            break;
    HSRI_TRY(arrive(h, err));
    for (size_t i = 0; i < h->held.n; i++)      /* chosen by a query: that is what attention looks like from here */
        hsri_body_attended(h->tiers, h->held.bodies[i], 1);
    return HSR_OK;
}

/* ---- what is not waited for ---- */

static bool estimates(const hsri_holder *h, uint32_t layer, uint32_t seq)
{
    return h->step.settings && h->step.settings[(uint64_t)layer * h->step.n_seqs + seq].flags & HSRI_SPARSE_ESTIMATE;
}

/* Pin what is in memory, so that nothing of it leaves for what is not. */
static hsr_status pin_present(hsri_holder *h, uint32_t layer, uint32_t seq, uint32_t head, uint32_t *units, uint32_t n, hsr_error *err)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = units[i] / HSRI_PAGE_UNITS;
        if ((i == 0 || units[i - 1] / HSRI_PAGE_UNITS != page) && pin(h, NULL, seq, page, layer, head, false, NULL) == HSR_OK)
            HSRI_TRY(pin(h, &h->ahead, seq, page, layer, head, false, err));
    }
    return HSR_OK;
}

static hsr_status mark_absent(hsri_holder *h, uint32_t layer, uint32_t seq, uint32_t head, uint32_t *units, uint32_t n, hsr_error *err)
{
    hsri_cache *cache = h->step.caches[seq];
    hsr_status status = HSR_OK;
    for (uint32_t i = 0, last = UINT32_MAX; i < n; i++) {
        uint32_t page = units[i] / HSRI_PAGE_UNITS, body = hsri_cache_body(cache, page, layer, head);
        if (page != last)
            status = body == HSRI_NO_BODY ? HSR_OK : hsri_body_want(h->tiers, body, err);
        if (page != last && status == HSR_OK)   /* it may have come just now, and could leave again for the next one */
            status = pin(h, &h->ahead, seq, page, layer, head, false, err);
        cache->n_estimated += page != last && status == HSR_AGAIN;
        last = page;
        if (status < 0) {
            h->failed = seq;
            return status;
        }
        h->n_marked += status == HSR_AGAIN;
        units[i] |= status == HSR_AGAIN ? HSRI_UNIT_AWAY : 0;
    }
    return HSR_OK;
}

typedef hsr_status (*list_fn)(hsri_holder *h, uint32_t layer, uint32_t seq, uint32_t head, uint32_t *units, uint32_t n, hsr_error *err);

/* Of all lists that are not to be waited for. */
static hsr_status each_list(hsri_holder *h, uint32_t layer, const hsri_lists *lists, list_fn fn, hsr_error *err)
{
    uint32_t n_heads = h->step.caches[0]->shape->n_kv_heads;
    for (uint32_t i = 0; i < lists->n_picks * n_heads; i++) {
        uint32_t seq = h->step.pick_seqs[h->first_pick + i / n_heads];
        if (estimates(h, layer, seq))
            HSRI_TRY(fn(h, layer, seq, i % n_heads, h->units + (size_t)i * lists->stride, h->counts[i], err));
    }
    return HSR_OK;
}

static bool any_estimates(const hsri_holder *h, uint32_t layer, uint32_t n_picks)
{
    for (uint32_t i = 0; i < n_picks; i++)
        if (estimates(h, layer, h->step.pick_seqs[h->first_pick + i]))
            return true;
    return false;
}

/* The marked lists go to the device from memory of their own: hold_lists reads them back into the other. */
static hsr_status send_marked(hsri_holder *h, const hsri_lists *lists, hsr_error *err)
{
    size_t n = (size_t)lists->n_picks * h->step.caches[0]->shape->n_kv_heads * lists->stride;
    if (!hsri_grow((void **)&h->marked, &h->marked_cap, n, sizeof *h->marked))
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for the lists of %u selections", lists->n_picks);
    memcpy(h->marked, h->units, n * sizeof *h->marked);
    h->dev->copy_in(h->queue, lists->units, h->marked, n * sizeof *h->marked);
    return HSR_OK;
}

static hsr_status put_off(void *self, uint32_t layer, const hsri_lists *lists, bool *any, hsr_error *err)
{
    hsri_holder *h = self;
    *any = false;
    if (!any_estimates(h, layer, lists->n_picks))
        return HSR_OK;
    HSRI_TRY(be_quiet(h, err));
    HSRI_TRY(read_lists(h, lists, err));
    h->n_marked = 0;
    HSRI_TRY(each_list(h, layer, lists, pin_present, err));
    HSRI_TRY(each_list(h, layer, lists, mark_absent, err));
    *any = h->n_marked > 0;
    return *any ? send_marked(h, lists, err) : HSR_OK;
}

/* ---- what is foreseen ---- */

/* Pin what is absent of a list, up to `most` pages. HSR_AGAIN: there is no room for more. */
static hsr_status pin_absent(hsri_holder *h, uint32_t layer, uint32_t seq, uint32_t head, const uint32_t *units, uint32_t n, uint64_t most)
{
    for (uint32_t i = 0; i < n && most > 0; i++) {
        uint32_t page = units[i] / HSRI_PAGE_UNITS;
        if ((i > 0 && units[i - 1] / HSRI_PAGE_UNITS == page) || page >= sealed_end(h->step.caches[seq], UINT32_MAX) ||
            pin(h, NULL, seq, page, layer, head, false, NULL) == HSR_OK)
            continue;
        if (pin(h, &h->ahead, seq, page, layer, head, false, NULL) == HSR_AGAIN)
            return HSR_AGAIN;
        most--;
    }
    return HSR_OK;
}

static hsr_status expect(void *self, uint32_t layer, const hsri_lists *lists, hsr_error *err)
{
    hsri_holder *h = self;
    uint32_t n_heads = h->step.caches[0]->shape->n_kv_heads, failed = h->failed;
    uint64_t room = pin_room(h) / 2;
    HSRI_TRY(be_quiet(h, err));
    HSRI_TRY(read_lists(h, lists, err));
    h->why = HSRI_FETCH_QUERY;
    for (uint32_t i = 0; i < lists->n_picks * n_heads && h->ahead.n < room; i++) {
        uint32_t seq = h->step.pick_seqs[h->first_pick + i / n_heads];
        if (pin_absent(h, layer, seq, i % n_heads, h->units + (size_t)i * lists->stride, h->counts[i],
                       hsri_min(h->reach, room - h->ahead.n)) != HSR_OK)
            break;
    }
    h->why = HSRI_FETCH_GROUPS;
    h->failed = failed;     /* who needs a lost page learns of it when it does */
    return HSR_OK;
}

/* ---- spans and waves ---- */

static void set_span(void *self, uint32_t first_row, uint32_t n_rows, uint32_t first_pick)
{
    hsri_holder *h = self;
    h->first_row = first_row;
    h->n_rows = n_rows;
    h->first_pick = first_pick;
}

static hsr_status release(void *self, hsr_error *err)
{
    hsri_holder *h = self;
    if (h->held.n == 0)
        return HSR_OK;
    hsr_status status = h->dev->wait(h->queue, err);
    unpin_from(h, &h->held, 0);
    return status;
}

const hsri_residency *hsri_holder_begin(hsri_holder *h, const hsri_holder_step *step)
{
    h->step = *step;
    h->failed = HSRI_NO_SEQ;
    h->quiet = false;
    set_span(h, 0, step->n_rows, 0);
    return hsri_tiers_must_hold(h->tiers) ? &h->iface : NULL;
}

void hsri_holder_end(hsri_holder *h)
{
    unpin_from(h, &h->held, 0);
    unpin_from(h, &h->ahead, 0);
}

uint32_t hsri_holder_failed(const hsri_holder *h)
{
    return h->failed;
}

/* ---- creation ---- */

hsr_status hsri_holder_create(hsri_device *dev, hsri_queue *q, hsri_tiers *tiers, uint32_t depth, uint32_t sources, hsri_holder **out,
                              hsr_error *err)
{
    hsri_holder *h = *out = hsri_new_array(1, sizeof *h);
    if (!h)
        return hsri_fail(err, HSR_E_NOMEM, "out of memory for a KV cache");
    h->dev = dev;
    h->queue = q;
    h->tiers = tiers;
    h->depth = sources & HSR_PREFETCH_GROUPS ? depth : 0;
    h->reach = sources & HSR_PREFETCH_QUERY ? depth * HSRI_LIST_GROUP_UNITS : 0;
    h->why = HSRI_FETCH_GROUPS;
    h->failed = HSRI_NO_SEQ;
    h->iface = (hsri_residency){
        .self = h, .span = set_span, .hold_dense = hold_dense, .hold_lists = hold_lists, .put_off = put_off, .release = release,
        .expect = h->reach ? expect : NULL,
    };
    return HSR_OK;
}

void hsri_holder_destroy(hsri_holder *h)
{
    if (!h)
        return;
    hsri_holder_end(h);
    free(h->held.bodies);
    free(h->held.places);
    free(h->ahead.bodies);
    free(h->ahead.places);
    free(h->units);
    free(h->counts);
    free(h->marked);
    free(h);
}
