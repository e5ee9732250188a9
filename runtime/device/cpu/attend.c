/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: which partials of groups (device.h) are made by whom and when, and their merging.
 *
 * An item of work is (group, kv head, tile of rows); the tiles that read the same pages are neighbours. A tile makes a call for every
 * run of rows that read the same tokens: rows of one sequence, and where it has encoded pages, of one page, or of one pick. All query
 * heads of the kv head go together. Kernels give a query the same bits in any company, so how rows fall into calls does not show.
 *
 * Partials that nobody wants to see stay in a core's cache, if there are so many tiles that they keep all threads busy by themselves: then
 * blocks of tiles are the items. They take group after group, and fold what a group gives into the states of their rows. */
#include "device/cpu/attend_job.h"

#include <string.h>

#include "base/array.h"

#define MACS_PER_NS 16u                /* of one thread, for estimates */
/* Blocks of tiles: for each thread at least so many tiles; most bytes of states, for a core's second cache to hold beside a group's pages;
 * and how many tiles take as long as reading these pages from a slower one. */
#define TILES_EACH 4u
#define STATES_BYTES (512u << 10)
#define READING_TILES 2u

/* ---- merging ---- */

typedef struct merge_job {
    const hsri_cpu_device *dev;
    float       *part, *acc, *out;
    uint32_t     head_dim, n_groups;
    int          first;
} merge_job;

void hsri_cpu_finish_state(const float *restrict state, uint32_t d, float *restrict out)
{
    float inverse = 1.0f / state[1];

    for (uint32_t j = 0; j < d; j++)
        out[j] = state[2 + j] * inverse;
}

/* States of items [first, first + n) after all groups. Those that nobody wants are made in the scratch, or are the only group's. */
static void merge_items(const merge_job *job, uint64_t first, uint32_t n, float **states, float *scratch)
{
    uint64_t width = 2ull + job->head_dim;
    bool     alone = job->n_groups == 1 && !job->acc;
    float   *parts[HSRI_ATTEND_MAX_QUERIES];

    for (uint32_t i = 0; i < n; i++)
        states[i] = job->acc ? job->acc + (first + i) * width : alone ? job->part + (first + i) * width : scratch + i * width;
    for (uint32_t g = 0; g < job->n_groups && !alone; g++) {
        for (uint32_t i = 0; i < n; i++) {
            parts[i] = job->part + ((first + i) * job->n_groups + g) * width;
            if (job->first && g == 0)
                memcpy(states[i], parts[i], width * sizeof **states);
        }
        if (!job->first || g > 0)
            job->dev->kernels.merge(states, parts, n, job->head_dim);
    }
}

/* An item is one (row, head). Many go together, whose exponentials the kernel takes at once. */
static void merge_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const merge_job *job = arg;
    float           *states[HSRI_ATTEND_MAX_QUERIES];

    for (uint32_t n; first < end; first += n) {
        n = (uint32_t)hsri_min(end - first, HSRI_ATTEND_MAX_QUERIES);
        merge_items(job, first, n, states, hsri_cpu_piece_scratch(hsri_cpu_scratch(job->dev, worker)));
        for (uint32_t i = 0; job->out && i < n; i++)
            hsri_cpu_finish_state(states[i], job->head_dim, job->out + (first + i) * job->head_dim);
    }
}

static void merge_all(hsri_queue *q, uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, hsri_ref part, uint32_t n_groups,
                      const hsri_fold *fold)
{
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    uint64_t         n = (uint64_t)n_rows * n_heads;
    merge_job        job = { dev, hsri_cpu_floats(dev, part, n * n_groups * (2 + head_dim)),
                             hsri_cpu_floats(dev, fold->acc, n * (2 + head_dim)), hsri_cpu_floats(dev, fold->out, n * head_dim), head_dim,
                             n_groups, fold->first };

    assert(n_groups > 0 && (fold->acc.buf || (fold->first && fold->out.buf)));
    hsri_cpu_run_items(dev, n, n * head_dim * (n_groups + 1) / 4, merge_run, &job);
}

static void cpu_merge(hsri_queue *q, uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, hsri_ref part, uint32_t n_groups,
                      const hsri_fold *fold)
{
    HSRI_CPU_TIMED(q, attend);
    merge_all(q, n_rows, n_heads, head_dim, part, n_groups, fold);
}

/* ---- tiles ---- */

void hsri_cpu_fill_queries(const attend_job *job, uint32_t row, uint32_t row_end, uint32_t head, uint32_t head_end, query_set *set)
{
    uint32_t d = job->kv->head_dim;

    set->n = 0;
    for (uint32_t r = row; r < row_end; r++) {
        for (uint32_t h = head; h < head_end; h++, set->n++) {
            uint64_t at = (uint64_t)r * job->n_heads + h;

            set->queries[set->n] = job->queries + at * d;
            set->rotated[set->n] = job->rotated ? job->rotated + at * d : NULL;
            set->pos[set->n] = job->rows[r].pos;
        }
    }
}

static void fill_set(const attend_job *job, uint32_t row, uint32_t row_end, uint32_t head, uint32_t head_end, uint32_t g, query_set *set)
{
    uint32_t n = 0;

    hsri_cpu_fill_queries(job, row, row_end, head, head_end, set);
    for (uint32_t r = row; r < row_end; r++)
        for (uint32_t h = head; h < head_end; h++, n++)
            set->partials[n] = job->folds ? hsri_cpu_state_at(job, r, h) : hsri_cpu_partial_at(job, r, h, g);
}

/* The first group of all is the state. */
static void fold_group(const attend_job *job, uint32_t row, uint32_t kv_head, uint32_t g, const query_set *states, float *scratch)
{
    query_set set;

    if (job->first && g == job->g0) {
        job->groups->partials(job, row, kv_head, g, states, scratch);
        return;
    }
    set = hsri_cpu_with_partials(states, hsri_cpu_fold_scratch(scratch), job->kv->head_dim);
    job->groups->partials(job, row, kv_head, g, &set, scratch);
    job->dev->kernels.merge(states->partials, set.partials, set.n, job->kv->head_dim);
}

static void attend_tile(const attend_job *job, uint32_t tile, uint32_t kv_head, uint32_t g, float *scratch)
{
    uint32_t  row = tile * job->tile_rows, tile_end = (uint32_t)hsri_min((uint64_t)row + job->tile_rows, job->n_rows), row_end;
    uint32_t  head0 = kv_head * job->heads_per_kv, head1 = head0 + job->heads_per_kv;
    query_set set;

    for (; row < tile_end; row = row_end) {
        row_end = job->groups->run_end(job, row, tile_end);
        for (uint32_t h = head0; h < head1; h += HSRI_ATTEND_MAX_QUERIES) {
            fill_set(job, row, row_end, h, (uint32_t)hsri_min(h + HSRI_ATTEND_MAX_QUERIES, head1), g, &set);
            (job->folds ? fold_group : job->groups->partials)(job, row, kv_head, g, &set, scratch);
        }
    }
}

static void attend_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const attend_job *job = arg;

    for (uint64_t i = first; i < end; i++) {
        uint64_t pair = i / job->n_tiles;

        attend_tile(job, (uint32_t)(i % job->n_tiles), (uint32_t)(pair % job->kv->n_kv_heads),
                    job->g0 + (uint32_t)(pair / job->kv->n_kv_heads), hsri_cpu_scratch(job->dev, worker));
    }
}

static void finish_tile(const attend_job *job, uint32_t tile, uint32_t kv_head)
{
    uint32_t row = tile * job->tile_rows, end = (uint32_t)hsri_min((uint64_t)row + job->tile_rows, job->n_rows), d = job->kv->head_dim;

    for (; row < end; row++)
        for (uint32_t h = kv_head * job->heads_per_kv; h < (kv_head + 1) * job->heads_per_kv; h++)
            hsri_cpu_finish_state(hsri_cpu_state_at(job, row, h), d, job->out + ((uint64_t)row * job->n_heads + h) * d);
}

static void fold_block(const attend_job *job, uint32_t block, uint32_t kv_head, float *scratch)
{
    uint32_t first = (uint32_t)((uint64_t)job->n_tiles * block / job->n_blocks);
    uint32_t end = (uint32_t)((uint64_t)job->n_tiles * (block + 1) / job->n_blocks);

    for (uint32_t g = job->g0; g < job->g0 + job->n_groups; g++)
        for (uint32_t tile = first; tile < end; tile++)
            attend_tile(job, tile, kv_head, g, scratch);
    for (uint32_t tile = first; job->out && tile < end; tile++)
        finish_tile(job, tile, kv_head);
}

static void fold_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const attend_job *job = arg;

    for (uint64_t i = first; i < end; i++)
        fold_block(job, (uint32_t)(i % job->n_blocks), (uint32_t)(i / job->n_blocks), hsri_cpu_scratch(job->dev, worker));
}

/* How many blocks of a kv head give the busiest thread the least to do; 0: there are too few tiles. Each block reads all pages. */
static uint32_t fold_blocks(const attend_job *job, uint32_t n_threads)
{
    uint64_t bytes = (uint64_t)job->n_rows * job->heads_per_kv * (2 + job->kv->head_dim) * sizeof(float), least = UINT64_MAX;
    uint32_t best = 0;

    if (!job->states || job->tile_rows == 1 || (uint64_t)job->n_tiles * job->kv->n_kv_heads < (uint64_t)n_threads * TILES_EACH)
        return 0;
    for (uint32_t n = (uint32_t)hsri_div_up(bytes, STATES_BYTES); n <= job->n_tiles; n++) {
        uint64_t each = hsri_div_up((uint64_t)n * job->kv->n_kv_heads, n_threads);
        uint64_t busiest = each * (hsri_div_up(job->n_tiles, n) + READING_TILES);

        if (busiest < least) {
            least = busiest;
            best = n;
        }
    }
    return best;
}

attend_job hsri_cpu_attend_job(const hsri_cpu_device *dev, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer,
                               uint32_t n_heads, float scale, hsri_ref queries, hsri_ref rotated, uint32_t g0, uint32_t g1, hsri_ref part)
{
    uint64_t n = (uint64_t)batch->n_rows * n_heads;

    return (attend_job){ .dev = dev, .rows = hsri_cpu_at(dev, batch->rows, batch->n_rows * sizeof(hsri_row)),
                         .seqs = hsri_cpu_at(dev, batch->seqs, batch->n_seqs * sizeof(hsri_seq)), .kv = kv, .scale = scale,
                         .queries = hsri_cpu_floats(dev, queries, n * kv->head_dim),
                         .rotated = hsri_cpu_floats(dev, rotated, n * kv->head_dim),
                         .part = hsri_cpu_floats(dev, part, n * (g1 - g0) * (2 + kv->head_dim)),
                         .n_rows = batch->n_rows, .layer = layer, .n_heads = n_heads, .g0 = g0, .n_groups = g1 - g0,
                         .heads_per_kv = n_heads / kv->n_kv_heads };
}

/* Tiles of as many rows as fit a call, but no more than runs of rows have on average: single rows of many runs are items of their own.
 * Where runs end with pages, tiles are to end with them, too, or calls of a few rows were left. `pairs` are the (row, token) pairs to
 * attend. */
static void run_job(hsri_cpu_device *dev, attend_job *job, uint32_t n_runs, bool by_pages, uint64_t pairs)
{
    uint64_t cost = pairs * job->n_heads * job->kv->head_dim * 2 / MACS_PER_NS;

    if (job->n_rows == 0)
        return;
    job->tile_rows = (uint32_t)hsri_max(hsri_min(HSRI_ATTEND_MAX_QUERIES / job->heads_per_kv, job->n_rows / hsri_max(n_runs, 1)), 1);
    while (by_pages && HSRI_PAGE_TOKENS % job->tile_rows != 0)
        job->tile_rows--;
    job->n_tiles = (uint32_t)hsri_div_up(job->n_rows, job->tile_rows);
    job->n_blocks = fold_blocks(job, (uint32_t)hsri_threads_count(dev->threads));
    job->folds = job->n_blocks > 0;
    if (job->folds)
        hsri_cpu_run_items(dev, (uint64_t)job->n_blocks * job->kv->n_kv_heads, cost, fold_run, job);
    else
        hsri_cpu_run_items(dev, (uint64_t)job->n_tiles * job->kv->n_kv_heads * job->n_groups, cost, attend_run, job);
}

/* States that nobody wants are kept where there is room for partials. */
static void set_fold(attend_job *job, const hsri_fold *fold)
{
    uint64_t n = (uint64_t)job->n_rows * job->n_heads;
    float   *acc;

    if (!fold)
        return;
    acc = hsri_cpu_floats(job->dev, fold->acc, n * (2 + job->kv->head_dim));
    job->states = acc ? acc : job->part;
    job->out = hsri_cpu_floats(job->dev, fold->out, n * job->kv->head_dim);
    job->first = fold->first;
}

static void merge_rest(hsri_queue *q, const attend_job *job, hsri_ref part, const hsri_fold *fold)
{
    if (fold && !job->folds)
        merge_all(q, job->n_rows, job->n_heads, job->kv->head_dim, part, job->n_groups, fold);
}

static void cpu_attend(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                       hsri_ref queries, hsri_ref rotated, uint32_t g0, uint32_t g1, hsri_ref part, const hsri_fold *fold)
{
    HSRI_CPU_TIMED(q, attend);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    attend_job       job = hsri_cpu_attend_job(dev, batch, kv, layer, n_heads, scale, queries, rotated, g0, g1, part);
    uint64_t         pairs = 0;
    bool             encoded = false;

    for (uint32_t row = 0; row < job.n_rows; row++)
        for (uint32_t g = g0; g < g1; g++)
            pairs += hsri_cpu_visible_tokens(job.rows[row].pos, (uint64_t)g * HSRI_GROUP_TOKENS, HSRI_GROUP_TOKENS);
    for (uint32_t i = 0; i < batch->n_seqs; i++)
        encoded = encoded || !hsri_kv_is_plain(job.seqs[i].format);
    set_fold(&job, fold);
    job.groups = &hsri_cpu_groups_dense;
    run_job(dev, &job, batch->n_seqs, encoded, pairs);
    merge_rest(q, &job, part, fold);
}

static void cpu_attend_fixed(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                             hsri_ref queries, hsri_ref rotated, uint32_t n_fixed, int runs, hsri_ref part,
                             const hsri_fold *fold)
{
    HSRI_CPU_TIMED(q, attend);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    attend_job       job = hsri_cpu_attend_job(dev, batch, kv, layer, n_heads, scale, queries, rotated, 0, n_fixed, part);
    uint64_t         pairs = 0;

    for (uint32_t row = 0; row < job.n_rows; row++) {
        const hsri_seq *seq = hsri_cpu_seq_of(&job, row);

        pairs += hsri_min(job.rows[row].pos + 1ull, ((uint64_t)seq->sink_pages + seq->window_pages) * HSRI_PAGE_TOKENS);
    }
    set_fold(&job, fold);
    job.prompt_runs = runs;
    job.groups = &hsri_cpu_groups_fixed;
    run_job(dev, &job, batch->n_seqs, true, pairs);
    merge_rest(q, &job, part, fold);
}

static void cpu_attend_list(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                            hsri_ref queries, hsri_ref rotated, hsri_ref pick_of, const hsri_lists *lists, uint32_t g0, uint32_t g1,
                            hsri_ref part, const hsri_fold *fold)
{
    HSRI_CPU_TIMED(q, attend);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    attend_job       job = hsri_cpu_attend_job(dev, batch, kv, layer, n_heads, scale, queries, rotated, g0, g1, part);

    set_fold(&job, fold);
    job.lists = hsri_cpu_lists_of(dev, kv, batch->n_rows, pick_of, lists);
    job.groups = &hsri_cpu_groups_listed;
    if (lists->group_units > HSRI_LIST_GROUP_UNITS)
        hsri_cpu_attend_runs(dev, &job, lists->n_picks);
    else
        run_job(dev, &job, lists->n_picks, true, (uint64_t)batch->n_rows * (g1 - g0) * HSRI_LIST_GROUP_UNITS * HSRI_UNIT_TOKENS);
    merge_rest(q, &job, part, fold);
}

void hsri_cpu_attend_fill(hsri_ops *ops)
{
    ops->attend = cpu_attend;
    ops->attend_fixed = cpu_attend_fixed;
    ops->attend_list = cpu_attend_list;
    ops->merge = cpu_merge;
}
