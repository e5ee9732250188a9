/* SPDX-License-Identifier: Apache-2.0 */
/* Holds the pages of a step's sequences for the waves of its forward pass (residency.h): pins them, waits for those that are on
 * their way or has them estimated, corrects the tables on the device, and reads ahead what the next waves will ask for. */
#ifndef HSRI_HOLDER_H
#define HSRI_HOLDER_H

#include "kv/cache.h"
#include "kv/residency.h"

#define HSRI_NO_SEQ UINT32_MAX

typedef struct hsri_holder hsri_holder;

/* A step, as its engine planned it; all host memory, unchanged until hsri_holder_end. */
typedef struct hsri_holder_step {
    hsri_cache *const *caches;      /* of each sequence, prepared */
    const hsri_row    *rows;
    const uint32_t    *pick_seqs;   /* sequence of each pick; NULL if nothing is sparse */
    const hsri_sparse *settings;    /* of decode rows, [n_layers][n_seqs]; likewise */
    uint32_t           n_seqs, n_rows;
} hsri_holder_step;

/* depth: groups read ahead; 0: none. sources: HSR_PREFETCH_*, of which these are the holder's: the next groups, and what is foreseen. */
hsr_status hsri_holder_create(hsri_device *dev, hsri_queue *q, hsri_tiers *tiers, uint32_t depth, uint32_t sources, hsri_holder **holder,
                              hsr_error *err);
void hsri_holder_destroy(hsri_holder *holder);

/* What the forward pass is to ask, or NULL if it need not: no page has ever had to leave. After all caches were prepared. */
const hsri_residency *hsri_holder_begin(hsri_holder *holder, const hsri_holder_step *step);

/* The step is over, well or not, and the queue was waited on: nothing is held any more. */
void hsri_holder_end(hsri_holder *holder);

/* The sequence whose page could not be had, if a hold failed for that reason; HSRI_NO_SEQ: it was no sequence's fault. */
uint32_t hsri_holder_failed(const hsri_holder *holder);

#endif
