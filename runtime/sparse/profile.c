/* SPDX-License-Identifier: Apache-2.0 */
#include "sparse/profile.h"

#include <math.h>

#include "base/array.h"
#include "base/crc32c.h"
#include "base/status.h"

#define MAX_TOKENS 1000000000

/* ---- checking ------------------------------------------------------------------------------------------------- */

static hsr_status is_slice(const char *name, int32_t value, hsr_error *err)
{
    if (value == 16 || value == 32 || value == 64)
        return HSR_OK;
    return hsri_fail(err, HSR_E_INVALID, "%s is %d, allowed are 16, 32 and 64: slices divide pages of 64 tokens", name, value);
}

static hsr_status check_layers(const hsr_profile *p, uint32_t n_layers, hsr_error *err)
{
    if ((p->n_dense_layers && !p->dense_layers) || (p->n_layer_budgets && !p->layer_budgets))
        return hsri_fail(err, HSR_E_INVALID, "n_dense_layers or n_layer_budgets is given without its array");
    if (p->n_layer_budgets && p->n_layer_budgets != n_layers)
        return hsri_fail(err, HSR_E_INVALID, "layer_budgets has %u values, the model has %u layers", p->n_layer_budgets, n_layers);
    if (p->n_dense_layers > n_layers)
        return hsri_fail(err, HSR_E_INVALID, "dense_layers names %u layers, the model has %u", p->n_dense_layers, n_layers);
    for (uint32_t i = 0; i < p->n_dense_layers; i++)
        HSRI_TRY(hsri_in_range("a number in dense_layers", p->dense_layers[i], 0, (int32_t)n_layers - 1, err));
    for (uint32_t i = 0; i < p->n_layer_budgets; i++)
        if (p->layer_budgets[i])
            HSRI_TRY(hsri_in_range("a number in layer_budgets", p->layer_budgets[i], (int32_t)HSRI_UNIT_TOKENS, MAX_TOKENS, err));
    return HSR_OK;
}

static hsr_status check_classic(const hsr_profile *p, hsr_error *err)
{
    HSRI_TRY(hsri_in_range("block_size_coarse", p->block_size_coarse, 64, 1 << 20, err));
    if (p->block_size_coarse % 64)
        return hsri_fail(err, HSR_E_INVALID, "block_size_coarse is %d, allowed are multiples of 64", p->block_size_coarse);
    HSRI_TRY(is_slice("block_size_fine", p->block_size_fine, err));
    HSRI_TRY(hsri_in_range("top_k_coarse", p->top_k_coarse, 1, MAX_TOKENS, err));
    return hsri_in_range("top_k_fine", p->top_k_fine, 1, MAX_TOKENS, err);
}

/* With less than a slice nothing would be selected. */
static hsr_status holds_slice(const hsr_profile *p, const char *name, int32_t budget, hsr_error *err)
{
    const bool    classic = p->selector == HSR_SELECT_CLASSIC;
    const int32_t slice = classic ? p->block_size_fine : p->slice_size;
    if (budget == 0 || budget > slice - (int32_t)HSRI_UNIT_TOKENS)
        return HSR_OK;
    return hsri_fail(err, HSR_E_INVALID, "%s is %d, and nothing smaller than %s is selected, which is %d", name, budget,
                     classic ? "block_size_fine" : "slice_size", slice);
}

static hsr_status check_slices(const hsr_profile *p, hsr_error *err)
{
    HSRI_TRY(holds_slice(p, "budget", p->budget, err));
    HSRI_TRY(holds_slice(p, "prefill_budget", p->prefill_budget, err));
    for (uint32_t i = 0; i < p->n_layer_budgets; i++)
        HSRI_TRY(holds_slice(p, "a number in layer_budgets", p->layer_budgets[i], err));
    return HSR_OK;
}

static hsr_status check(const hsr_profile *p, uint32_t n_layers, bool calibrated, hsr_error *err)
{
    HSRI_TRY(hsri_in_range("selector", p->selector, HSR_SELECT_AUTO, HSR_SELECT_ORACLE, err));
    if ((p->selector == HSR_SELECT_SKETCH || p->selector == HSR_SELECT_CLUSTER) && !calibrated)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "selector %s needs the model's calibration, and none was loaded",
                         p->selector == HSR_SELECT_SKETCH ? "sketch" : "cluster");
    HSRI_TRY(hsri_in_range("budget", p->budget, (int32_t)HSRI_UNIT_TOKENS, MAX_TOKENS, err));
    if (!(p->sparse_ratio >= 0 && p->sparse_ratio <= 1))
        return hsri_fail(err, HSR_E_INVALID, "sparse_ratio is %g, allowed are 0 to 1", (double)p->sparse_ratio);
    HSRI_TRY(is_slice("slice_size", p->slice_size, err));
    HSRI_TRY(hsri_in_range("forced_history", p->forced_history, 0, 64, err));
    HSRI_TRY(hsri_in_range("candidates", p->candidates, 0, MAX_TOKENS, err));
    HSRI_TRY(hsri_in_range("dense_below", p->dense_below, 0, INT32_MAX, err));
    HSRI_TRY(hsri_in_range("prefill_dense_below", p->prefill_dense_below, 0, INT32_MAX, err));
    HSRI_TRY(hsri_in_range("prefill_budget", p->prefill_budget, 0, MAX_TOKENS, err));
    HSRI_TRY(hsri_in_range("late", p->late, HSR_LATE_WAIT, HSR_LATE_ESTIMATE, err));
    HSRI_TRY(check_classic(p, err));
    HSRI_TRY(check_layers(p, n_layers, err));
    return check_slices(p, err);
}

/* ---- making --------------------------------------------------------------------------------------------------- */

/* Auto costs least where contexts are long, and is as good; without a calibration, it is the best of what needs none. */
static hsri_selector selector_of(const hsr_profile *p, bool calibrated)
{
    if (p->selector == HSR_SELECT_AUTO)
        return calibrated ? HSRI_SELECT_CLUSTER : HSRI_SELECT_MINMAX;
    return (hsri_selector)(p->selector - HSR_SELECT_SKETCH);
}

static uint32_t units_of(int32_t tokens) { return (uint32_t)hsri_div_up((uint64_t)tokens, HSRI_UNIT_TOKENS); }

static void fill(const hsr_profile *in, uint32_t n_layers, bool calibrated, hsri_profile *p)
{
    p->sparse = in->sparse != 0;
    p->selector = selector_of(in, calibrated);
    /* Only the sketch's estimates are good enough to weigh what is not attended. */
    p->virtual_tokens = in->virtual_tokens && (p->selector == HSRI_SELECT_SKETCH || p->selector == HSRI_SELECT_CLUSTER);
    p->estimate = p->virtual_tokens && in->late == HSR_LATE_ESTIMATE;
    p->ratio = in->sparse_ratio;
    p->slice_units = (uint32_t)in->slice_size / HSRI_UNIT_TOKENS;
    /* What prompt runs attend must not depend on how steps cut the prompt, and a history grows with every step. */
    p->prefill_units = p->selector == HSRI_SELECT_HISTORY ? 0 : units_of(in->prefill_budget);
    p->forced = (uint32_t)in->forced_history;
    p->candidates = (uint32_t)in->candidates;
    p->dense_below = (uint64_t)in->dense_below;
    p->prefill_dense_below = (uint64_t)in->prefill_dense_below;
    p->coarse_pages = (uint32_t)in->block_size_coarse / HSRI_PAGE_TOKENS;
    p->fine_units = (uint32_t)in->block_size_fine / HSRI_UNIT_TOKENS;
    p->top_coarse = (uint32_t)in->top_k_coarse;
    p->top_fine = (uint32_t)in->top_k_fine;
    p->seed = in->seed;
    p->n_layers = n_layers;
    for (uint32_t i = 0; i < in->n_dense_layers; i++)
        hsri_layer_add(&p->dense_layers, (uint32_t)in->dense_layers[i]);
    for (uint32_t i = 0; i < n_layers; i++) {
        const bool own = in->n_layer_budgets && in->layer_budgets[i];
        p->layer_units[i] = units_of(own ? in->layer_budgets[i] : in->budget);
    }
}

hsr_status hsri_profile_create(const hsr_profile *in, uint32_t n_layers, bool calibrated, hsri_profile **out, hsr_error *err)
{
    if (in->sparse) {
        HSRI_TRY(check(in, n_layers, calibrated, err));
        if (n_layers > HSRI_MAX_LAYERS)
            return hsri_fail(err, HSR_E_UNSUPPORTED, "sparse attention over %u layers, at most %u are possible", n_layers, HSRI_MAX_LAYERS);
    }
    const size_t bytes = sizeof(hsri_profile) + n_layers * sizeof(uint32_t);
    hsri_profile *p = hsri_new_array(1, bytes);
    if (!p)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a profile");
    if (in->sparse) {
        fill(in, n_layers, calibrated, p);
        p->print = (uint32_t)hsri_max(hsri_crc32c(0, p, bytes) & ~HSRI_SEVERAL_PROFILES, 1);
    }
    *out = p;
    return HSR_OK;
}

/* ---- meaning -------------------------------------------------------------------------------------------------- */

hsri_index_kind hsri_profile_index(const hsri_profile *p)
{
    if (!p->sparse)
        return HSRI_INDEX_NONE;
    switch (p->selector) {
    case HSRI_SELECT_SKETCH:
    case HSRI_SELECT_CLUSTER:  return HSRI_INDEX_SKETCH;
    case HSRI_SELECT_GAUSSIAN: return HSRI_INDEX_GAUSSIAN;
    case HSRI_SELECT_MEAN:
    case HSRI_SELECT_CLASSIC:
    case HSRI_SELECT_MINMAX:   return HSRI_INDEX_MINMAX;
    default:                   return HSRI_INDEX_NONE;   /* history, random, oracle */
    }
}

bool hsri_profile_clusters(const hsri_profile *p) { return p->sparse && p->selector == HSRI_SELECT_CLUSTER; }

bool hsri_profile_can_read(const hsri_profile *p, hsri_index_kind kind)
{
    const hsri_index_kind need = hsri_profile_index(p);
    if (need == HSRI_INDEX_NONE || need == kind)
        return true;
    return (p->selector == HSRI_SELECT_MEAN || p->selector == HSRI_SELECT_CLASSIC) && kind != HSRI_INDEX_NONE;
}

uint32_t hsri_profile_budget(const hsri_profile *p, uint32_t layer, bool prefill, uint64_t selectable)
{
    if (prefill)
        return p->prefill_units;
    /* The same product as an operation makes of hsri_sparse.ratio, in the same precision: lists have room for so many. */
    const uint64_t share = p->ratio > 0 ? (uint64_t)ceil((double)p->ratio * (double)selectable) : 0;
    return (uint32_t)hsri_max(p->layer_units[layer], share);
}

bool hsri_profile_remembers(const hsri_profile *p) { return p->sparse && (p->forced > 0 || p->selector == HSRI_SELECT_HISTORY); }

uint32_t hsri_profile_forced(const hsri_profile *p, uint32_t layer, uint64_t selectable)
{
    uint64_t pages = p->forced;
    if (p->selector == HSRI_SELECT_HISTORY)
        pages += hsri_max(1, hsri_profile_budget(p, layer, false, selectable) / HSRI_PAGE_UNITS);
    return (uint32_t)hsri_min(pages, selectable / HSRI_PAGE_UNITS);
}

uint32_t hsri_profile_selects(const hsri_profile *p, uint32_t layer, bool prefill, uint64_t selectable)
{
    const uint64_t budget = hsri_profile_budget(p, layer, prefill, selectable);
    if (prefill || !hsri_profile_remembers(p))
        return (uint32_t)budget;
    return (uint32_t)((p->selector == HSRI_SELECT_HISTORY ? 0 : budget) +
                      (uint64_t)hsri_profile_forced(p, layer, selectable) * HSRI_PAGE_UNITS);
}

/* More would cost more than the pages are worth. */
#define MOST_SCAN_PAGES 512u

uint32_t hsri_profile_scan(const hsri_profile *p)
{
    uint32_t most = 0;
    if (!p->sparse)
        return 0;
    switch (p->selector) {
    case HSRI_SELECT_SKETCH:
    case HSRI_SELECT_CLUSTER:
    case HSRI_SELECT_MEAN:
    case HSRI_SELECT_MINMAX:
    case HSRI_SELECT_GAUSSIAN:
        for (uint32_t i = 0; i < p->n_layers; i++)
            most = (uint32_t)hsri_max(most, 2ull * p->layer_units[i]);
        return (uint32_t)hsri_min(most, MOST_SCAN_PAGES);
    default:
        return 0;       /* blocks of pages, or nothing that follows from the query */
    }
}

void hsri_profile_fill(const hsri_profile *p, uint32_t layer, bool prefill, bool virtual_helps, hsri_sparse *out)
{
    const uint32_t flags = HSRI_SPARSE_VIRTUAL | (p->estimate ? HSRI_SPARSE_ESTIMATE : 0);
    *out = (hsri_sparse){
        .selector = p->selector, .flags = p->virtual_tokens && virtual_helps ? (prefill ? HSRI_SPARSE_VIRTUAL : flags) : 0,
        .budget_units = prefill ? p->prefill_units : p->layer_units[layer], .ratio = prefill ? 0 : p->ratio, .slice_units = p->slice_units,
        .candidates = p->candidates, .coarse_pages = p->coarse_pages, .fine_units = p->fine_units, .top_coarse = p->top_coarse,
        .top_fine = p->top_fine, .seed = p->seed,
    };
}
