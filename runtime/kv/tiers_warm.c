/* SPDX-License-Identifier: Apache-2.0 */
/* Warm memory: where pages go that leave hot memory, and from where they come back without a read of the cold file. It is there only
 * where operations cannot read it in place (hsri_tiers_opts.warm). Every page in it has a home, so that it may be dropped at any time:
 * promises do not count on it, and nothing ever waits for it. A page is in one kind of memory or in the other, never in both. */
#include "kv/tiers_internal.h"

/* Pages looked at to choose the one that makes room. */
#define SAMPLE 64u

static uint8_t *warm_memory(const hsri_tiers *t, const hsri_shelf *shelf, uint32_t entry)
{
    return t->opts.warm_memory + (uint64_t)hsri_entry_block(entry) * HSRI_BLOCK_BYTES +
           (uint64_t)hsri_entry_slot(entry) * shelf->slot_bytes;
}

void hsri_warm_drop(hsri_tiers *t, uint32_t body)
{
    hsri_body *b = &t->bodies[body];
    if (b->warm == HSRI_NO_SLOT)
        return;
    hsri_slots *slots = &hsri_shelf_of(t, b)->warm;
    hsri_slots_drop(slots, b->warm);
    hsri_slots_promise(slots, 0);
    uint32_t last = t->warm[--t->n_warm];
    t->warm[b->warm_place] = last;
    t->bodies[last].warm_place = b->warm_place;
    b->warm = HSRI_NO_SLOT;
}

/* The lowest-scored of some goes: of the shelf's own, whose slot is then free, or if it has none of all. */
static void make_room(hsri_tiers *t, const hsri_shelf *shelf)
{
    uint32_t worst = HSRI_NO_BODY;
    float least = 0;
    for (size_t looked = 0; looked < t->n_warm && (looked < SAMPLE || worst == HSRI_NO_BODY); looked++) {
        t->warm_hand = t->warm_hand + 1 < t->n_warm ? t->warm_hand + 1 : 0;
        uint32_t body = t->warm[t->warm_hand];
        const hsri_body *b = &t->bodies[body];
        if (shelf->warm.n_used > 0 && hsri_shelf_of(t, b) != shelf)
            continue;
        float score = hsri_body_score(t, b);
        if (worst != HSRI_NO_BODY && score >= least)
            continue;
        worst = body;
        least = score;
    }
    hsri_warm_drop(t, worst);
    t->stats.warm_dropped++;
}

void hsri_warm_keep(hsri_tiers *t, uint32_t body)
{
    hsri_body *b = &t->bodies[body];
    hsri_shelf *shelf = hsri_shelf_of(t, b);
    if (!t->opts.warm)
        return;
    while (!hsri_slots_promise(&shelf->warm, 1)) {
        if (t->n_warm == 0)
            return;
        make_room(t, shelf);
    }
    hsr_status status = hsri_slots_take(&shelf->warm, &b->warm, NULL);
    hsri_slots_promise(&shelf->warm, 0);
    if (status < 0) {               /* the system has no memory: the page has its home */
        b->warm = HSRI_NO_SLOT;
        return;
    }
    b->warm_place = (uint32_t)t->n_warm;
    t->warm[t->n_warm++] = body;
    memcpy(warm_memory(t, shelf, b->warm), hsri_frame_memory(t, shelf, b->entry), shelf->slot_bytes);
    t->stats.warm_in++;
}

bool hsri_warm_fetch(hsri_tiers *t, uint32_t body)
{
    const hsri_body *b = &t->bodies[body];
    const hsri_shelf *shelf = hsri_shelf_of(t, b);
    if (b->warm == HSRI_NO_SLOT)
        return false;
    memcpy(hsri_frame_memory(t, shelf, b->entry), warm_memory(t, shelf, b->warm), shelf->slot_bytes);
    hsri_warm_drop(t, body);
    t->stats.warm_out++;
    return true;
}
