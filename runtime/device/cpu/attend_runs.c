/* SPDX-License-Identifier: Apache-2.0 */
/* List groups of prompt runs. All rows of a run attend the same units, which are put together to plain pages once for all of them; encoded
 * ones as well, where the level can: their keys in the calibrated basis, to be multiplied with rotated queries (page_kernels.h).
 *
 * An item is one (group, kv head, run, part of its queries). Where there are enough items without the groups, one has them all in turn and
 * folds what a group gives into the states of its queries, which stay in a core's cache. Kernels give a query the same bits in any company
 * and states are folded in the same order, so neither shows. */
#include "device/cpu/attend_job.h"

#include <string.h>

#include "base/array.h"

#define MACS_PER_NS 64u                /* of one thread, for estimates */
#define ITEMS_EACH 4u                  /* for each thread at least, if there are so many calls */
#define FOLDED_PARTS 2u                /* at most: each puts the units together, which takes as long as passing partials on */

typedef struct runs_job {
    const attend_job *attend;
    uint32_t n_picks, n_parts;
} runs_job;

/* Queries of one kv head that read one list group. They are numbered row by row. */
typedef struct run_group {
    const attend_job *job;
    const hsri_seq *seq;
    const uint32_t *chosen;
    uint32_t kv_head, g, first_row, n_rows, n_units;
    uint32_t first, end;               /* of the queries, whole calls but for the last */
    float   *scratch;
} run_group;

/* What is folded at once needs room for a call's partials only. */
static void fill_call(const run_group *r, uint32_t first, query_set *set)
{
    const attend_job *job = r->job;
    const uint64_t width = 2ull + job->kv->head_dim;
    uint32_t row = r->first_row + first / job->heads_per_kv, h = first % job->heads_per_kv;

    set->n = (uint32_t)hsri_min(HSRI_ATTEND_MAX_QUERIES, r->end - first);
    for (uint32_t i = 0; i < set->n; i++) {
        uint32_t head = r->kv_head * job->heads_per_kv + h;
        uint64_t at = ((uint64_t)row * job->n_heads + head) * job->kv->head_dim;

        set->queries[i] = job->queries + at;
        set->rotated[i] = job->rotated ? job->rotated + at : NULL;
        set->pos[i] = job->rows[row].pos;
        set->partials[i] = job->folds ? hsri_cpu_fold_scratch(r->scratch) + i * width : hsri_cpu_partial_at(job, row, head, r->g);
        if (++h == job->heads_per_kv) {
            h = 0;
            row++;
        }
    }
}

/* The first group of all is the state; after the last one, states have their outputs. */
static void fold_call(const run_group *r, const query_set *set)
{
    const attend_job *job = r->job;
    const uint32_t d = job->kv->head_dim;
    const bool begins = job->first && r->g == job->g0, ends = job->out && r->g + 1 == job->g0 + job->n_groups;
    uint64_t at[HSRI_ATTEND_MAX_QUERIES];
    float   *states[HSRI_ATTEND_MAX_QUERIES];

    for (uint32_t i = 0; i < set->n; i++) {
        at[i] = (uint64_t)(set->queries[i] - job->queries) / d;
        states[i] = job->states + at[i] * (2 + d);
        if (begins)
            memcpy(states[i], set->partials[i], (2 + d) * sizeof(float));
    }
    if (!begins)
        job->dev->kernels.merge(states, set->partials, set->n, d);
    for (uint32_t i = 0; ends && i < set->n; i++)
        hsri_cpu_finish_state(states[i], d, job->out + at[i] * d);
}

/* ---- pages put together ---- */

/* What the kernels of plain pages are to take. */
typedef struct gathered {
    hsri_kv_type type;
    bool     rotated;
    uint64_t page_bytes;
    uint32_t most_units;
} gathered;

static gathered how_to_gather(const attend_job *job, const hsri_seq *seq)
{
    gathered x = { .type = hsri_kv_is_plain(seq->format) ? seq->kv_type : HSRI_KV_TYPE_BF16, .rotated = !hsri_kv_is_plain(seq->format) };

    x.page_bytes = hsri_cpu_gathered_bytes(job, x.type);
    x.most_units = (uint32_t)(HSRI_CPU_GATHER_SCRATCH * sizeof(float) / x.page_bytes) * HSRI_PAGE_UNITS;
    return x;
}

static void gather(const run_group *r, const gathered *x, const uint8_t *const *slots, const uint8_t *units, uint32_t n)
{
    uint8_t *pages = hsri_cpu_gather_scratch(r->scratch);

    if (x->rotated)
        r->job->dev->kernels.page.lay_out[r->seq->format](&(hsri_lay_out_args){
            .slots = slots, .units = units, .n_units = n, .head_dim = r->job->kv->head_dim, .pages = pages, .page_bytes = x->page_bytes,
            .calibration = hsri_cpu_calibration(r->job->dev, r->job->kv, r->job->layer, r->kv_head) });
    else
        hsri_cpu_copy_units(x->type, r->job->kv->head_dim, slots, units, n, pages, x->page_bytes);
}

/* Keys that were laid out are about the calibration's mean. */
static void add_mean(const run_group *r, const query_set *set)
{
    hsri_calibration_record c = hsri_cpu_calibration(r->job->dev, r->job->kv, r->job->layer, r->kv_head);

    for (uint32_t i = 0; i < set->n; i++) {
        float sum = 0.0f;

        for (uint32_t j = 0; j < r->job->kv->head_dim; j++)
            sum += set->queries[i][j] * c.mean_k[j];
        set->partials[i][0] += sum * r->job->scale;
    }
}

/* Partials of all queries, in pieces as large as what can be put together. */
static void attend_gathered(const run_group *r)
{
    const gathered x = how_to_gather(r->job, r->seq);
    const uint8_t *slots[HSRI_RUN_GROUP_UNITS], *pages = hsri_cpu_gather_scratch(r->scratch);
    uint8_t        units[HSRI_RUN_GROUP_UNITS];

    hsri_cpu_find_units(r->job, r->seq, r->kv_head, r->chosen, r->n_units, slots, units);
    for (uint32_t at = 0, n; at < r->n_units; at += n) {
        n = (uint32_t)hsri_min(x.most_units, r->n_units - at);
        gather(r, &x, slots + at, units + at, n);
        for (uint32_t first = r->first; first < r->end; first += HSRI_ATTEND_MAX_QUERIES) {
            query_set set, piece;

            fill_call(r, first, &set);
            piece = at ? hsri_cpu_with_partials(&set, hsri_cpu_piece_scratch(r->scratch), r->job->kv->head_dim) : set;
            hsri_cpu_attend_gathered(r->job, x.type, pages, x.page_bytes, n, x.rotated ? piece.rotated : piece.queries, &piece, r->scratch);
            if (x.rotated)
                add_mean(r, &piece);
            if (at)
                r->job->dev->kernels.merge(set.partials, piece.partials, set.n, r->job->kv->head_dim);
            if (r->job->folds)
                fold_call(r, &set);
        }
    }
}

/* ---- the call ---- */

/* Each call by itself: of nothing, or of units that are read as they are. */
static void attend_apart(const run_group *r)
{
    for (uint32_t first = r->first; first < r->end; first += HSRI_ATTEND_MAX_QUERIES) {
        query_set set;

        fill_call(r, first, &set);
        if (r->n_units == 0)
            hsri_cpu_empty_partials(r->job, &set);
        else
            hsri_cpu_attend_units(r->job, r->seq, r->kv_head, r->chosen, r->n_units, &set, r->scratch);
        if (r->job->folds)
            fold_call(r, &set);
    }
}

static void find_rows(const runs_job *runs, uint32_t pick, run_group *r)
{
    const attend_job *job = runs->attend;

    while (r->first_row < job->n_rows && job->lists.pick_of[r->first_row] != pick)
        r->first_row++;
    while (r->first_row + r->n_rows < job->n_rows && job->lists.pick_of[r->first_row + r->n_rows] == pick)
        r->n_rows++;
}

static void attend_group(run_group *r)
{
    r->chosen = hsri_cpu_list_group(r->job, r->first_row, r->kv_head, r->g, &r->n_units);
    if (r->n_units && (hsri_kv_is_plain(r->seq->format) || r->job->dev->kernels.page.lay_out[r->seq->format]))
        attend_gathered(r);
    else
        attend_apart(r);
}

static void attend_item(const runs_job *runs, uint64_t item, uint32_t worker)
{
    const attend_job *job = runs->attend;
    uint32_t  part = (uint32_t)(item % runs->n_parts), pick = (uint32_t)(item / runs->n_parts % runs->n_picks);
    uint64_t  pair = item / runs->n_parts / runs->n_picks, n_calls;
    run_group r = { .job = job, .kv_head = (uint32_t)(pair % job->kv->n_kv_heads), .g = job->g0 + (uint32_t)(pair / job->kv->n_kv_heads),
                    .scratch = hsri_cpu_scratch(job->dev, worker) };
    uint32_t  end = job->folds ? r.g + job->n_groups : r.g + 1;

    find_rows(runs, pick, &r);
    if (r.n_rows == 0)
        return;
    n_calls = hsri_div_up((uint64_t)r.n_rows * job->heads_per_kv, HSRI_ATTEND_MAX_QUERIES);
    r.first = (uint32_t)(n_calls * part / runs->n_parts) * HSRI_ATTEND_MAX_QUERIES;
    r.end = (uint32_t)hsri_min(n_calls * (part + 1) / runs->n_parts * HSRI_ATTEND_MAX_QUERIES, (uint64_t)r.n_rows * job->heads_per_kv);
    r.seq = hsri_cpu_seq_of(job, r.first_row);
    for (; r.g < end; r.g++)
        attend_group(&r);
}

static void runs_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    for (uint64_t item = first; item < end; item++)
        attend_item(arg, item, worker);
}

/* So many parts that n items become enough for all threads. */
static uint32_t count_parts(const attend_job *job, uint64_t n)
{
    uint64_t calls = hsri_div_up((uint64_t)HSRI_PICK_ROWS * job->heads_per_kv, HSRI_ATTEND_MAX_QUERIES);
    uint64_t wanted = hsri_div_up((uint64_t)hsri_threads_count(job->dev->threads) * ITEMS_EACH, hsri_max(n, 1));

    return (uint32_t)hsri_min(wanted, calls);
}

/* Are there states to fold into, and is all of a group put together at once? */
static bool can_fold(const attend_job *job)
{
    for (uint32_t row = 0; job->states && row < job->n_rows; row++)
        if (how_to_gather(job, hsri_cpu_seq_of(job, row)).most_units < job->lists.group_units)
            return false;
    return job->states != NULL;
}

void hsri_cpu_attend_runs(hsri_cpu_device *dev, attend_job *job, uint32_t n_picks)
{
    uint64_t n = (uint64_t)n_picks * job->kv->n_kv_heads, pairs = (uint64_t)job->n_rows * job->n_groups;
    uint64_t cost = pairs * job->lists.group_units * HSRI_UNIT_TOKENS * job->n_heads * job->kv->head_dim * 2 / MACS_PER_NS;
    runs_job runs = { job, n_picks, count_parts(job, n) };

    job->folds = n && runs.n_parts <= FOLDED_PARTS && can_fold(job);
    if (!job->folds) {
        n *= job->n_groups;
        runs.n_parts = count_parts(job, n);
    }
    if (n && job->n_rows)
        hsri_cpu_run_items(dev, n * runs.n_parts, cost, runs_run, &runs);
}
