/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of the operations of sparse attention. A sparse row attends, in this order of groups (device.h):
 *   fixed groups   sink pages in runs of 16 pages; then one bridge group, empty except in the second page of a prompt run (hsri_pick
 *                  of 128 rows; position / 64 is odd): page q - W, which just left the window and which the run's selection, made
 *                  for its first page, does not know, read in the session's format; then the window's pages in runs of 16 pages
 *   list groups    8 units each of its pick's list, 32 in a prompt run, in position order
 *   virtual        one group: everything that was not selected, as estimated
 * q = row position / 64, W = window_pages: the window is pages max(sink, q - W + 1) .. q, read plain. */
#ifndef HSRI_SPARSE_OPS_H
#define HSRI_SPARSE_OPS_H

#include "device/kv_format.h"
#include "device/ref.h"

#define HSRI_LIST_GROUP_UNITS 8u    /* units per list group: 128 tokens */
#define HSRI_RUN_GROUP_UNITS 32u    /* of a prompt run: at most so many pages, which is what two dense groups have */
#define HSRI_PICK_ROWS 128u         /* positions of a prefill run that share a selection; runs start at multiples of it */
#define HSRI_PICK_STRIDE 8u         /* of these, every 8th query votes */

typedef enum hsri_selector {
    HSRI_SELECT_SKETCH,    /* index SKETCH */
    HSRI_SELECT_MEAN,      /* any index: q.mean of the page + ln(tokens) */
    HSRI_SELECT_CLASSIC,   /* any index: coarse blocks by their mean, then fine blocks inside the best of them */
    HSRI_SELECT_MINMAX,    /* index MINMAX: the bound sum_i max(q_i min_i, q_i max_i) */
    HSRI_SELECT_GAUSSIAN,  /* index GAUSSIAN: q.mean + 0.25 sum_i q_i^2 var_i, half of what Gaussian keys would ask for */
    HSRI_SELECT_CLUSTER,   /* index SKETCH with clusters: centroids first, then sketches of the best */
    HSRI_SELECT_HISTORY,   /* the forced pages alone, which are those that got most attention so far */
    HSRI_SELECT_RANDOM,    /* seeded; for comparison */
    HSRI_SELECT_ORACLE     /* exact scores from the pages themselves; for measuring */
} hsri_selector;

#define HSRI_SPARSE_VIRTUAL 1u      /* unselected units count as virtual tokens */
#define HSRI_SPARSE_ESTIMATE 2u     /* so do, with that, selected ones whose pages are not in memory */

/* Settings of one sequence; device array parallel to the batch's seqs. */
typedef struct hsri_sparse {
    uint32_t selector;
    uint32_t flags;
    uint32_t budget_units;          /* units to select, at most; >= 1 */
    float    ratio;                 /* > 0: at most max(budget_units, ceil(ratio * selectable units)) instead */
    uint32_t slice_units;           /* 1, 2 or 4: units chosen together, aligned */
    uint32_t candidates;            /* CLUSTER: tokens whose sketches are scored; 0: as many as the budget asks for */
    uint32_t coarse_pages, fine_units, top_coarse, top_fine;   /* CLASSIC: block sizes in pages and units, how many are kept */
    uint32_t n_forced;              /* pages kept beside the budget, per (layer, kv head) */
    uint64_t seed;                  /* RANDOM */
    hsri_ref forced;                /* uint32[n_layers][n_kv_heads][n_forced], ascending pages, UINT32_MAX: none */
    uint32_t scan_pages;            /* 0: no scan is noted */
    hsri_ref scan;                  /* of scan_pages pages: `select` writes what it found for a decode row, `foresee` reads it */
} hsri_sparse;

/* A scan: of each layer, for each kv head how many pages, and the pages, those with the most probable units, ascending; and for each head
 * the log of the mass that it read exactly, by which the estimates are measured. All words of 32 bits; all 0: nothing was noted yet. */
static inline uint64_t hsri_scan_words(uint32_t n_layers, uint32_t n_kv_heads, uint32_t n_heads, uint32_t scan_pages)
{
    return n_layers * (n_kv_heads * (1ull + scan_pages) + n_heads);
}

static inline uint64_t hsri_scan_at(uint32_t n_kv_heads, uint32_t n_heads, uint32_t scan_pages, uint32_t layer, uint32_t kv_head)
{
    return layer * (n_kv_heads * (1ull + scan_pages) + n_heads) + kv_head * (1ull + scan_pages);
}

/* Rows that share a selection: [row, row + n_rows) of the batch, all of one sequence. n_rows 1: a decode row. Otherwise the 128
 * rows of one whole run; rows row, row + 8, ... vote. Selectable are the sealed pages sink .. (page of the first row) - W. */
typedef struct hsri_pick {
    uint32_t row, n_rows;
} hsri_pick;

/* In a list: the unit was selected, but is to count as if it had not been (`set_aside`). */
#define HSRI_UNIT_AWAY (1u << 31)

/* What `select` writes. Lists hold unit numbers (position / 16) in ascending order. */
typedef struct hsri_lists {
    hsri_ref units;                 /* uint32[n_picks][n_kv_heads][stride] */
    hsri_ref counts;                /* uint32[n_picks][n_kv_heads] */
    hsri_ref virtual_part;          /* float[n_rows][n_heads]{ m, l, o[d] }, of a row that does not vote the last vote's in proportion to
                                     * what it reads exactly; empty (m -inf, l 0) where off */
    hsri_ref covered;               /* float[n_rows][n_heads]: estimated share of the mass that is attended; NaN for rows that
                                     * did not vote */
    uint32_t stride;                /* >= the budget with its ratio + 4 * n_forced, of every pick */
    uint32_t n_picks;
    uint32_t group_units;           /* HSRI_LIST_GROUP_UNITS, or HSRI_RUN_GROUP_UNITS if all picks are prompt runs */
} hsri_lists;

/* ---- how much attention pages got ----
 * The mass table of a sequence holds, for each (layer, kv head, page), the probabilities that the queries of the head's group gave the
 * page's tokens, normalised by the row's total and summed over those rows that were asked to add theirs. Pages lie in runs, so that a
 * table grows at its end. */

#define HSRI_MASS_RUN 64u           /* pages: float[runs][n_layers][n_kv_heads][HSRI_MASS_RUN] */

static inline uint64_t hsri_mass_at(uint32_t n_layers, uint32_t n_kv_heads, uint32_t layer, uint32_t kv_head, uint32_t page)
{
    return (((uint64_t)(page / HSRI_MASS_RUN) * n_layers + layer) * n_kv_heads + kv_head) * HSRI_MASS_RUN + page % HSRI_MASS_RUN;
}

/* A row that adds what it attended; device array. Pages from n_known on have no mass yet, whatever their place in the table holds. */
typedef struct hsri_mass_row {
    uint32_t row, n_known;
} hsri_mass_row;

typedef enum hsri_parts_of { HSRI_PARTS_DENSE, HSRI_PARTS_FIXED, HSRI_PARTS_LISTS } hsri_parts_of;

/* Parts of pages: { m, l } as of groups, of what a row attended of a page. Those of a dense row are made group by group, those of a
 * sparse one first of the fixed groups, which forgets what was there, then of the lists. */
typedef struct hsri_page_parts {
    hsri_parts_of of;
    uint32_t   g0, g1;              /* DENSE, LISTS: groups */
    int        runs;                /* FIXED: as in attend_fixed */
    hsri_ref   pick_of;             /* LISTS: as in attend_list */
    hsri_lists lists;
    hsri_ref   rows;                /* hsri_mass_row[n_rows], of the batch, ascending */
    hsri_ref   parts;               /* float[n_rows][n_heads][n_pages]{ m, l } */
    hsri_ref   tables;              /* hsri_ref[n_seqs]: each sequence's mass table; used for those of the rows */
    uint32_t   n_rows, n_pages;
} hsri_page_parts;

/* Pages [first_page, end_page) of a mass table, of which those from n_known on have no mass yet. */
typedef struct hsri_mass_range {
    hsri_ref table;
    uint32_t n_known, first_page, end_page;
} hsri_mass_range;

#endif
