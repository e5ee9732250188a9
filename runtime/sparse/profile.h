/* SPDX-License-Identifier: Apache-2.0 */
/* Profiles: the sparse settings of requests, checked once when they are registered, and what they mean for a row at a position. */
#ifndef HSRI_PROFILE_H
#define HSRI_PROFILE_H

#include <stdbool.h>

#include "base/layers.h"
#include "device/device.h"

/* No profile's fingerprint: that of tokens which were computed with different ones. */
#define HSRI_SEVERAL_PROFILES 0x80000000u

typedef struct hsri_profile {
    uint32_t       print;            /* fingerprint of all that follows; 0: dense */
    bool           sparse;
    hsri_selector  selector;
    bool           virtual_tokens;
    bool           estimate;         /* pages that are late become virtual tokens, too */
    float          ratio;
    uint32_t       slice_units;
    uint32_t       prefill_units;    /* budget of a prompt run; 0: prompts are dense */
    uint32_t       forced, candidates;
    uint64_t       dense_below, prefill_dense_below;
    uint32_t       coarse_pages, fine_units, top_coarse, top_fine;
    uint64_t       seed;
    hsri_layer_set dense_layers;
    uint32_t       n_layers;
    uint32_t       layer_units[];    /* [n_layers]: budget of a decode row */
} hsri_profile;

/* Check and resolve. HSR_E_INVALID and HSR_E_UNSUPPORTED name the field. Free with free(). */
hsr_status hsri_profile_create(const hsr_profile *in, uint32_t n_layers, bool calibrated, hsri_profile **profile, hsr_error *err);

/* The index that the profile's selector needs, HSRI_INDEX_NONE if none; and whether one it does not ask for would do, too. */
hsri_index_kind hsri_profile_index(const hsri_profile *profile);
bool hsri_profile_clusters(const hsri_profile *profile);    /* it wants clusters, too */
bool hsri_profile_can_read(const hsri_profile *profile, hsri_index_kind kind);

/* Units that outside sink and window are sealed and can be selected by queries of page q. */
static inline uint64_t hsri_selectable_units(uint64_t q, uint32_t sink_pages, uint32_t window_pages)
{
    uint64_t end = q + 1 > window_pages ? q + 1 - window_pages : 0;
    return end > sink_pages ? (end - sink_pages) * HSRI_PAGE_UNITS : 0;
}

/* Budget in units for a row that can select among `selectable` ones. */
uint32_t hsri_profile_budget(const hsri_profile *profile, uint32_t layer, bool prefill, uint64_t selectable);

/* Does it look at what was attended so far? */
bool hsri_profile_remembers(const hsri_profile *profile);

/* Pages that a decode row reads beside the budget because they were attended most; for selector history all that it reads. */
uint32_t hsri_profile_forced(const hsri_profile *profile, uint32_t layer, uint64_t selectable);

/* Units in all that a row may select. */
uint32_t hsri_profile_selects(const hsri_profile *profile, uint32_t layer, bool prefill, uint64_t selectable);

/* Pages of a scan that is worth noting for the layers' rows (hsri_sparse.scan): what they select, and as much again. 0: a scan would tell
 * nothing of the next one. */
uint32_t hsri_profile_scan(const hsri_profile *profile);

/* The settings as operations read them. */
void hsri_profile_fill(const hsri_profile *profile, uint32_t layer, bool prefill, bool virtual_helps, hsri_sparse *out);

#endif
