/* SPDX-License-Identifier: Apache-2.0 */
/* Which tokens the penalties of a request look at. Kept incrementally, so that a step costs the same at any length. */
#include "engine/engine.h"

#include <stdlib.h>

#include "base/array.h"
#include "base/status.h"

static hsri_seen *entry_of(hsri_history *h, int32_t token)
{
    if (h->index[token] == 0) {
        h->seen[h->n_seen] = (hsri_seen){ .token = token };
        h->index[token] = ++h->n_seen;
    }
    return &h->seen[h->index[token] - 1];
}

/* ids[n - 1] enters the window, and what is now too far back leaves it. in_window counts occurrences. */
static hsri_seen *slide(hsri_history *h, const int32_t *ids, uint64_t n)
{
    hsri_seen *e = entry_of(h, ids[n - 1]);
    if (h->window == 0)
        return e;
    e->in_window++;
    if (n > h->window)
        entry_of(h, ids[n - 1 - h->window])->in_window--;
    return e;
}

hsr_status hsri_history_create(hsri_history *h, hsri_device *dev, uint32_t vocab, uint64_t max_tokens, int32_t window, const int32_t *ids,
                               uint64_t n, hsr_error *err)
{
    *h = (hsri_history){ .window = window < 0 ? UINT32_MAX : (uint32_t)window, .cap = (uint32_t)hsri_min(vocab, max_tokens) };
    h->seen = hsri_new_array(h->cap, sizeof *h->seen);
    h->index = hsri_new_array(vocab, sizeof *h->index);
    if (!h->seen || !h->index) {
        hsri_history_destroy(h, dev);
        return hsri_fail(err, HSR_E_NOMEM, "no memory for the penalty table of a request");
    }
    hsr_status st = dev->alloc(dev, h->cap * sizeof *h->seen, &h->buf, err);
    if (st < 0) {
        hsri_history_destroy(h, dev);
        return st;
    }
    for (uint64_t i = 1; i <= n; i++)
        slide(h, ids, i);
    return HSR_OK;
}

void hsri_history_destroy(hsri_history *h, hsri_device *dev)
{
    free(h->seen);
    free(h->index);
    if (h->buf)
        dev->free(dev, h->buf);
    *h = (hsri_history){ 0 };
}

void hsri_history_push(hsri_history *h, const int32_t *ids, uint64_t n)
{
    slide(h, ids, n)->n_output++;
}
