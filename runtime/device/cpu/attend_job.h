/* SPDX-License-Identifier: Apache-2.0 */
/* What the loops over attended pages share: attend_groups.c makes partials of one group, attend.c has all groups of all rows made and
 * merged, attend_runs.c those of lists that many rows share, page_mass.c makes partials of single pages. */
#ifndef HSRI_CPU_ATTEND_JOB_H
#define HSRI_CPU_ATTEND_JOB_H

#include <stdbool.h>

#include "base/array.h"
#include "device/cpu/pages.h"

#define GROUP_PAGES (HSRI_GROUP_TOKENS / HSRI_PAGE_TOKENS)

/* Units of one layer and kv head, chosen for each pick. */
typedef struct unit_lists {
    const uint32_t *units, *counts, *pick_of;
    uint32_t        stride, group_units;
} unit_lists;

typedef struct attend_job attend_job;

/* The queries of a call. */
typedef struct query_set {
    const float *queries[HSRI_ATTEND_MAX_QUERIES];
    const float *rotated[HSRI_ATTEND_MAX_QUERIES];
    float       *partials[HSRI_ATTEND_MAX_QUERIES];
    uint32_t     pos[HSRI_ATTEND_MAX_QUERIES];
    uint32_t     n;
} query_set;

/* A kind of groups. */
typedef struct attend_groups {
    /* Rows [first, return value) up to `end` read the same tokens. */
    uint32_t (*run_end)(const attend_job *job, uint32_t first, uint32_t end);
    /* Partials of group g for rows that read the same as `row`. */
    void (*partials)(const attend_job *job, uint32_t row, uint32_t kv_head, uint32_t g, const query_set *set, float *scratch);
} attend_groups;

struct attend_job {
    const attend_groups *groups;
    const hsri_cpu_device *dev;
    const hsri_row     *rows;
    const hsri_seq     *seqs;
    const hsri_kv_view *kv;
    const float        *queries, *rotated;
    float              *part, *states, *out;   /* states, out: of a fold, as {m, l, o} and o / l */
    uint32_t            n_rows, layer, n_heads, g0, n_groups;
    uint32_t            heads_per_kv, tile_rows, n_tiles, n_blocks;
    float               scale;
    int                 prompt_runs; /* of fixed groups */
    int                 first;       /* of a fold */
    bool                folds;       /* partials become states at once, never to be seen in `part` */
    unit_lists          lists;
};

static inline const hsri_seq *hsri_cpu_seq_of(const attend_job *job, uint32_t row) { return &job->seqs[job->rows[row].seq]; }
static inline uint32_t hsri_cpu_page_of(const attend_job *job, uint32_t row) { return job->rows[row].pos / HSRI_PAGE_TOKENS; }

/* Where a worker's scratch has room for pages that are put together. */
static inline uint8_t *hsri_cpu_gather_scratch(float *scratch) { return (uint8_t *)(scratch + HSRI_ATTEND_SCRATCH); }

/* From one of them to the next. */
static inline uint64_t hsri_cpu_gathered_bytes(const attend_job *job, hsri_kv_type type)
{
    return hsri_round_up(hsri_plain_page_bytes(type, job->kv->head_dim), 64);
}

/* Where a worker's scratch has room for the partials of a call, beside the kernels' own part. */
static inline float *hsri_cpu_piece_scratch(float *scratch) { return scratch + HSRI_ATTEND_SCRATCH + HSRI_CPU_GATHER_SCRATCH; }

/* And for those of a group on their way into states. */
static inline float *hsri_cpu_fold_scratch(float *scratch) { return hsri_cpu_piece_scratch(scratch) + HSRI_CPU_CALL_SCRATCH; }

/* How many tokens a query at `pos` sees of those from `first` on, at most `most`. */
static inline uint32_t hsri_cpu_visible_tokens(uint32_t pos, uint64_t first, uint32_t most)
{
    return pos < first ? 0 : (uint32_t)hsri_min(pos + 1 - first, most);
}

static inline bool hsri_cpu_reads_plain(const hsri_seq *seq, uint32_t page, uint32_t query_page)
{
    return hsri_kv_is_plain(seq->format) || page < seq->sink_pages || page + seq->window_pages > query_page;
}

/* The set with other places for its results. */
static inline query_set hsri_cpu_with_partials(const query_set *set, float *partials, uint32_t head_dim)
{
    query_set other = *set;

    for (uint32_t i = 0; i < set->n; i++)
        other.partials[i] = partials + (uint64_t)i * (2 + head_dim);
    return other;
}

static inline unit_lists hsri_cpu_lists_of(const hsri_cpu_device *dev, const hsri_kv_view *kv, uint32_t n_rows, hsri_ref pick_of,
                                           const hsri_lists *lists)
{
    uint64_t n_lists = (uint64_t)lists->n_picks * kv->n_kv_heads;

    return (unit_lists){ hsri_cpu_at(dev, lists->units, n_lists * lists->stride * sizeof(uint32_t)),
                         hsri_cpu_at(dev, lists->counts, n_lists * sizeof(uint32_t)),
                         hsri_cpu_at(dev, pick_of, n_rows * sizeof(uint32_t)), lists->stride, lists->group_units };
}

static inline float *hsri_cpu_partial_at(const attend_job *job, uint32_t row, uint32_t head, uint32_t g)
{
    return job->part + (((uint64_t)row * job->n_heads + head) * job->n_groups + g - job->g0) * (2 + job->kv->head_dim);
}

static inline float *hsri_cpu_state_at(const attend_job *job, uint32_t row, uint32_t head)
{
    return job->states + ((uint64_t)row * job->n_heads + head) * (2 + job->kv->head_dim);
}

/* Units of list group g, and how many there are. */
static inline const uint32_t *hsri_cpu_list_group(const attend_job *job, uint32_t row, uint32_t kv_head, uint32_t g, uint32_t *n)
{
    uint64_t list = (uint64_t)job->lists.pick_of[row] * job->kv->n_kv_heads + kv_head;
    uint64_t begin = (uint64_t)g * job->lists.group_units, count = job->lists.counts[list];

    *n = begin < count ? (uint32_t)hsri_min(count - begin, job->lists.group_units) : 0;
    return job->lists.units + list * job->lists.stride + begin;
}

/* ---- attend.c ---- */

attend_job hsri_cpu_attend_job(const hsri_cpu_device *dev, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer,
                               uint32_t n_heads, float scale, hsri_ref queries, hsri_ref rotated, uint32_t g0, uint32_t g1, hsri_ref part);

/* A state's output. A row that saw nothing has l = 0, and its NaN shows in the logits: it must not pass for a result. */
void hsri_cpu_finish_state(const float *restrict state, uint32_t d, float *restrict out);

/* The queries of rows [row, row_end) of one sequence, heads [head, head_end); the set has no partials yet. */
void hsri_cpu_fill_queries(const attend_job *job, uint32_t row, uint32_t row_end, uint32_t head, uint32_t head_end, query_set *set);

/* ---- attend_groups.c ---- */

extern const attend_groups hsri_cpu_groups_dense, hsri_cpu_groups_fixed, hsri_cpu_groups_listed;

void hsri_cpu_empty_partials(const attend_job *job, const query_set *set);

/* Partials of at most a dense group of neighbouring pages, all plain or all in the sequence's format. */
void hsri_cpu_attend_pages(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, bool plain, uint32_t page, uint32_t n_pages,
                           const query_set *set, float *scratch);

/* Partials of at most a list group of sealed units. */
void hsri_cpu_attend_units(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, const uint32_t *chosen, uint32_t n,
                           const query_set *set, float *scratch);

/* Where sealed units are. */
void hsri_cpu_find_units(const attend_job *job, const hsri_seq *seq, uint32_t kv_head, const uint32_t *chosen, uint32_t n,
                         const uint8_t **slots, uint8_t *units);

/* Put units of plain pages together to pages; partials of such. */
void hsri_cpu_copy_units(hsri_kv_type type, uint32_t d, const uint8_t *const *slots, const uint8_t *units, uint32_t n_units, uint8_t *pages,
                         uint64_t page_bytes);
void hsri_cpu_attend_gathered(const attend_job *job, hsri_kv_type type, const uint8_t *gathered, uint64_t page_bytes, uint32_t n_units,
                              const float *const *queries, const query_set *set, float *scratch);

/* ---- attend_runs.c ---- */

/* attend_list for picks that are prompt runs; says in job->folds whether it has folded their partials. */
void hsri_cpu_attend_runs(hsri_cpu_device *dev, attend_job *job, uint32_t n_picks);

#endif
