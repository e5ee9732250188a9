/* SPDX-License-Identifier: Apache-2.0 */
/* Partials of one group, for queries that read the same tokens of it. A group is a run of positions (dense), one of the fixed ones (sink,
 * bridge, window), or some units of a list.
 *
 * A dense group of an encoded session may begin with plain pages (sink), go on with encoded ones and end with plain ones (window): pieces
 * of equal format are folded in order. */
#include "device/cpu/attend_job.h"

#include <math.h>
#include <string.h>

#include "base/array.h"

_Static_assert(GROUP_PAGES * HSRI_PAGE_UNITS <= HSRI_UNITS_MAX, "a dense group fits a call");
_Static_assert(HSRI_UNITS_SCRATCH <= HSRI_ATTEND_SCRATCH + HSRI_CPU_GATHER_SCRATCH, "kernels of encoded pages have their scratch");
_Static_assert(HSRI_LIST_GROUP_UNITS % HSRI_PAGE_UNITS == 0, "a list group fills whole pages");
_Static_assert(HSRI_RUN_GROUP_UNITS <= GROUP_PAGES * HSRI_PAGE_UNITS, "a group of a prompt run fits a call");
_Static_assert(HSRI_RUN_GROUP_UNITS <= 2 * GROUP_PAGES, "and what a sequence is promised to hold at a time");

/* ---- pieces ---- */

void hsri_cpu_empty_partials(const attend_job *job, const query_set *set)
{
    for (uint32_t i = 0; i < set->n; i++) {
        memset(set->partials[i], 0, (2 + job->kv->head_dim) * sizeof **set->partials);
        set->partials[i][0] = -INFINITY;
    }
}

/* Plain pages with neighbouring tokens, the first of them at position `first`: at most a dense group. */
static void attend_plain(const attend_job *job, const hsri_seq *seq, const hsri_page_table *table, uint32_t page, uint32_t n_pages,
                         const query_set *set, float *scratch)
{
    const uint8_t *pages[GROUP_PAGES];
    uint32_t       visible[HSRI_ATTEND_MAX_QUERIES];

    for (uint32_t p = 0; p < n_pages; p++)
        pages[p] = hsri_page_at(table, page + p);
    for (uint32_t i = 0; i < set->n; i++)
        visible[i] = hsri_cpu_visible_tokens(set->pos[i], (uint64_t)page * HSRI_PAGE_TOKENS, n_pages * HSRI_PAGE_TOKENS);
    job->dev->kernels.attend[seq->kv_type](&(hsri_attend_args){ pages, n_pages, job->kv->head_dim, job->scale, set->n, set->queries,
                                                                visible, set->partials, scratch, NULL });
}

static void attend_encoded(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, const uint8_t *const *slots, const uint8_t *units,
                           uint32_t n_units, const query_set *set, float *scratch)
{
    job->dev->kernels.page.attend[seq->format](&(hsri_units_args){
        .slots = slots, .units = units, .n_units = n_units, .head_dim = job->kv->head_dim, .scale = job->scale, .n_queries = set->n,
        .queries = set->queries, .rotated = set->rotated, .partials = set->partials, .scratch = scratch,
        .calibration = hsri_cpu_calibration(job->dev, job->kv, job->layer, kv_head) });
}

static void attend_encoded_pages(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, uint32_t page, uint32_t n_pages,
                                 const query_set *set, float *scratch)
{
    hsri_page_table table = hsri_sealed_pages(job->dev, job->kv, seq, job->layer, kv_head);
    const uint8_t  *slots[HSRI_UNITS_MAX];
    uint8_t         units[HSRI_UNITS_MAX];

    for (uint32_t i = 0; i < n_pages * HSRI_PAGE_UNITS; i++) {
        slots[i] = hsri_page_at(&table, page + i / HSRI_PAGE_UNITS);
        units[i] = (uint8_t)(i % HSRI_PAGE_UNITS);
    }
    attend_encoded(job, seq, kv_head, slots, units, n_pages * HSRI_PAGE_UNITS, set, scratch);
}

/* ---- dense groups ---- */

void hsri_cpu_attend_pages(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, bool plain, uint32_t page, uint32_t n_pages,
                           const query_set *set, float *scratch)
{
    hsri_page_table table = hsri_plain_pages(job->dev, job->kv, seq, job->layer, kv_head);

    if (plain)
        attend_plain(job, seq, &table, page, n_pages, set, scratch);
    else
        attend_encoded_pages(job, seq, kv_head, page, n_pages, set, scratch);
}

static void dense_group(const attend_job *job, uint32_t row, uint32_t kv_head, uint32_t g, const query_set *set, float *scratch)
{
    const hsri_seq *seq = hsri_cpu_seq_of(job, row);
    uint32_t        query_page = set->pos[set->n - 1] / HSRI_PAGE_TOKENS, d = job->kv->head_dim;
    uint32_t        page = g * GROUP_PAGES, end = (uint32_t)hsri_min(page + GROUP_PAGES, (uint64_t)query_page + 1), n;
    query_set       later;

    if (page >= end) {
        hsri_cpu_empty_partials(job, set);
        return;
    }
    for (bool first = true; page < end; page += n, first = false) {
        bool plain = hsri_cpu_reads_plain(seq, page, query_page);

        for (n = 1; page + n < end && hsri_cpu_reads_plain(seq, page + n, query_page) == plain;)
            n++;
        if (first) {
            hsri_cpu_attend_pages(job, seq, kv_head, plain, page, n, set, scratch);
            continue;
        }
        later = hsri_cpu_with_partials(set, hsri_cpu_piece_scratch(scratch), d);
        hsri_cpu_attend_pages(job, seq, kv_head, plain, page, n, &later, scratch);
        job->dev->kernels.merge(set->partials, later.partials, set->n, d);
    }
}

/* All queries of a call see the same split into plain and encoded pages: those of one page do. */
static uint32_t dense_run_end(const attend_job *job, uint32_t first, uint32_t end)
{
    bool     same_page = !hsri_kv_is_plain(hsri_cpu_seq_of(job, first)->format);
    uint32_t row = first + 1;

    while (row < end && job->rows[row].seq == job->rows[first].seq &&
           (!same_page || hsri_cpu_page_of(job, row) == hsri_cpu_page_of(job, first)))
        row++;
    return row;
}

const attend_groups hsri_cpu_groups_dense = { dense_run_end, dense_group };

/* ---- fixed groups ---- */

static uint32_t page_run_end(const attend_job *job, uint32_t first, uint32_t end)
{
    uint32_t row = first + 1;

    while (row < end && job->rows[row].seq == job->rows[first].seq && hsri_cpu_page_of(job, row) == hsri_cpu_page_of(job, first))
        row++;
    return row;
}

/* The page that left the window at the second page of a prompt run, for whose first page the selection was made. */
static void bridge_group(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, uint32_t q, const query_set *set, float *scratch)
{
    hsri_page_table table = hsri_plain_pages(job->dev, job->kv, seq, job->layer, kv_head);
    uint32_t        w = seq->window_pages;

    if (!job->prompt_runs || q % 2 == 0 || q < seq->sink_pages + w)
        hsri_cpu_empty_partials(job, set);
    else if (hsri_kv_is_plain(seq->format))
        attend_plain(job, seq, &table, q - w, 1, set, scratch);
    else
        attend_encoded_pages(job, seq, kv_head, q - w, 1, set, scratch);
}

/* Fixed group g of queries of page q: sink, bridge, window. */
static void fixed_group(const attend_job *job, uint32_t row, uint32_t kv_head, uint32_t g, const query_set *set, float *scratch)
{
    const hsri_seq *seq = hsri_cpu_seq_of(job, row);
    hsri_page_table table = hsri_plain_pages(job->dev, job->kv, seq, job->layer, kv_head);
    uint32_t        q = hsri_cpu_page_of(job, row), n_sink_groups = (uint32_t)hsri_div_up(seq->sink_pages, GROUP_PAGES);
    uint64_t        first = (uint64_t)g * GROUP_PAGES, end = hsri_min(seq->sink_pages, q + 1ull);

    if (g == n_sink_groups) {
        bridge_group(job, seq, kv_head, q, set, scratch);
        return;
    }
    if (g > n_sink_groups) {
        uint64_t window = q + 1ull > seq->window_pages ? q + 1 - seq->window_pages : 0;

        first = hsri_max(seq->sink_pages, window) + (g - n_sink_groups - 1ull) * GROUP_PAGES;
        end = q + 1ull;
    }
    if (first < end)
        attend_plain(job, seq, &table, (uint32_t)first, (uint32_t)hsri_min(GROUP_PAGES, end - first), set, scratch);
    else
        hsri_cpu_empty_partials(job, set);
}

const attend_groups hsri_cpu_groups_fixed = { page_run_end, fixed_group };

/* ---- list groups ---- */

static uint32_t pick_run_end(const attend_job *job, uint32_t first, uint32_t end)
{
    uint32_t row = first + 1;

    while (row < end && job->lists.pick_of[row] == job->lists.pick_of[first])
        row++;
    return row;
}

/* Copy unit `from` of a plain page to unit `to` of another: 64 bytes of each line of keys, and 16 tokens of values. */
static void copy_unit(hsri_kv_type type, uint32_t d, uint8_t *page, uint32_t to, const uint8_t *slot, uint32_t from)
{
    const size_t line = HSRI_PAGE_TOKENS * 4, part = HSRI_UNIT_TOKENS * 4;
    size_t       n_lines = type == HSRI_KV_TYPE_F32 ? d : d / 2, values = HSRI_PAGE_HEADER_BYTES + n_lines * line;

    for (size_t i = 0; i < n_lines; i++)
        memcpy(page + HSRI_PAGE_HEADER_BYTES + i * line + to * part, slot + HSRI_PAGE_HEADER_BYTES + i * line + from * part, part);
    memcpy(page + values + to * n_lines * part, slot + values + from * n_lines * part, n_lines * part);
}

void hsri_cpu_copy_units(hsri_kv_type type, uint32_t d, const uint8_t *const *slots, const uint8_t *units, uint32_t n_units, uint8_t *pages,
                         uint64_t page_bytes)
{
    for (uint32_t i = 0; i < n_units; i++)
        copy_unit(type, d, pages + i / HSRI_PAGE_UNITS * page_bytes, i % HSRI_PAGE_UNITS, slots[i], units[i]);
}

void hsri_cpu_attend_gathered(const attend_job *job, hsri_kv_type type, const uint8_t *gathered, uint64_t page_bytes, uint32_t n_units,
                              const float *const *queries, const query_set *set, float *scratch)
{
    const uint8_t *pages[GROUP_PAGES];
    uint32_t       visible[HSRI_ATTEND_MAX_QUERIES], n_pages = (uint32_t)hsri_div_up(n_units, HSRI_PAGE_UNITS);

    for (uint32_t p = 0; p < n_pages; p++)
        pages[p] = gathered + p * page_bytes;
    for (uint32_t i = 0; i < set->n; i++)
        visible[i] = n_units * HSRI_UNIT_TOKENS;
    job->dev->kernels.attend[type](&(hsri_attend_args){ pages, n_pages, job->kv->head_dim, job->scale, set->n, queries, visible,
                                                        set->partials, scratch, NULL });
}

/* Units of plain pages are put together to pages, so that the kernels of whole pages serve. */
static void attend_plain_units(const attend_job *job, const hsri_seq *seq, const uint8_t *const *slots, const uint8_t *units,
                               uint32_t n_units, const query_set *set, float *scratch)
{
    uint8_t       *pages = hsri_cpu_gather_scratch(scratch);
    const uint64_t page_bytes = hsri_cpu_gathered_bytes(job, seq->kv_type);

    hsri_cpu_copy_units(seq->kv_type, job->kv->head_dim, slots, units, n_units, pages, page_bytes);
    hsri_cpu_attend_gathered(job, seq->kv_type, pages, page_bytes, n_units, set->queries, set, scratch);
}

void hsri_cpu_find_units(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, const uint32_t *chosen, uint32_t n,
                         const uint8_t **slots, uint8_t *units)
{
    hsri_page_table table = hsri_sealed_pages(job->dev, job->kv, seq, job->layer, kv_head);

    for (uint32_t i = 0; i < n; i++) {
        slots[i] = hsri_page_at(&table, chosen[i] / HSRI_PAGE_UNITS);
        units[i] = (uint8_t)(chosen[i] % HSRI_PAGE_UNITS);
    }
}

void hsri_cpu_attend_units(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, const uint32_t *chosen, uint32_t n,
                           const query_set *set, float *scratch)
{
    const uint8_t *slots[HSRI_UNITS_MAX];
    uint8_t        units[HSRI_UNITS_MAX];

    hsri_cpu_find_units(job, seq, kv_head, chosen, n, slots, units);
    if (hsri_kv_is_plain(seq->format))
        attend_plain_units(job, seq, slots, units, n, set, scratch);
    else
        attend_encoded(job, seq, kv_head, slots, units, n, set, scratch);
}

static void list_group(const attend_job *job, uint32_t row, uint32_t kv_head, uint32_t g, const query_set *set, float *scratch)
{
    uint32_t        n;
    const uint32_t *chosen = hsri_cpu_list_group(job, row, kv_head, g, &n);

    if (n == 0)
        hsri_cpu_empty_partials(job, set);
    else
        hsri_cpu_attend_units(job, hsri_cpu_seq_of(job, row), kv_head, chosen, n, set, scratch);
}

const attend_groups hsri_cpu_groups_listed = { pick_run_end, list_group };
