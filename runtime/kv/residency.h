/* SPDX-License-Identifier: Apache-2.0 */
/* What a forward pass asks of whoever places pages. Attention goes in waves of groups (device.h); before a wave its pages are held,
 * after it they are let go:
 *
 *     for (g0 = 0; g0 < n; g0 = g1) {
 *         g1 = min(n, g0 + what fits the partials);
 *         if (r) TRY(r->hold_dense(r->self, layer, g0, &g1, err));
 *         attend [g0, g1), folded;
 *         if (r) TRY(r->release(r->self, err));
 *     }
 *
 * and likewise with hold_lists around attend_list. The groups are fixed by the data, so a shorter wave changes no bit. NULL where
 * no session has pages that can leave memory: then nothing is asked and nothing is waited for.
 *
 * A failure ends the step. It is one session's: which one, the implementation says (hsri_holder.failed). The others have
 * computed nothing and are served again. */
#ifndef HSRI_RESIDENCY_H
#define HSRI_RESIDENCY_H

#include <stdbool.h>

#include "hisparse_rt/hisparse_rt.h"
#include "device/sparse_ops.h"

typedef struct hsri_residency {
    void *self;
    /* The calls that follow are about these rows of the step, and about these picks of it: lists of hold_lists begin with first_pick.
     * Until the first call, about all rows. */
    void (*span)(void *self, uint32_t first_row, uint32_t n_rows, uint32_t first_pick);
    /* Pages that the rows of the step read encoded in dense groups [g0, *g1) of this layer are in memory and stay there until
     * release. *g1 is lowered, to no less than g0 + 1, if they do not fit at a time. Waits for reads, with a deadline. */
    hsr_status (*hold_dense)(void *self, uint32_t layer, uint32_t g0, uint32_t *g1, hsr_error *err);
    /* The same for groups [g0, *g1) of what `select` put into lists. With g0 = 0 the lists are read back, which waits for the queue. */
    hsr_status (*hold_lists)(void *self, uint32_t layer, const hsri_lists *lists, uint32_t g0, uint32_t *g1, hsr_error *err);
    /* Before hold_lists, if there is to be no waiting (HSRI_SPARSE_ESTIMATE): units in lists of decode rows whose pages are not in
     * memory are marked HSRI_UNIT_AWAY there, and their pages asked for. *any: there are some, and `set_aside` must take them out.
     * Waits for the queue, if any pick's settings say so. */
    hsr_status (*put_off)(void *self, uint32_t layer, const hsri_lists *lists, bool *any, hsr_error *err);
    /* Of the span, in decode rows: lists that `foresee` guessed for a layer to come. Their pages that are not in memory are begun to be
     * read, if there is room, and stay until that layer's own lists are held. Waits for the queue. Nothing depends on it; a page that
     * cannot be had is passed over. NULL: there is no use for guesses. */
    hsr_status (*expect)(void *self, uint32_t layer, const hsri_lists *lists, hsr_error *err);
    /* All operations that read the held pages are enqueued. Waits for the queue, unless no page could have to leave. */
    hsr_status (*release)(void *self, hsr_error *err);
} hsri_residency;

#endif
