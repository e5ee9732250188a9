/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: partials of groups (device.h), and their merging.
 *
 * An item of work is (group, kv head, tile of rows); the tiles that read the same pages are neighbours. A tile makes a call for every
 * run of rows that read the same tokens: rows of one sequence, and where it has encoded pages, of one page, or of one pick. All query
 * heads of the kv head go together. Kernels give a query the same bits in any company, so how rows fall into calls does not show.
 *
 * Partials that nobody wants to see stay in a core's cache, if there are so many tiles that they keep all threads busy by themselves: then
 * blocks of tiles are the items. They take group after group, and fold what a group gives into the states of their rows.
 *
 * A group of an encoded session may begin with plain pages (sink), go on with encoded ones and end with plain ones (window): pieces of
 * equal format are folded in order. */
#include "device/cpu/attend_job.h"

#include <math.h>
#include <string.h>

#include "base/array.h"

#define MACS_PER_NS 16u                /* of one thread, for estimates */
/* Blocks of tiles: for each thread at least so many tiles; most bytes of states, for a core's second cache to hold beside a group's pages;
 * and how many tiles take as long as reading these pages from a slower one. */
#define TILES_EACH 4u
#define STATES_BYTES (512u << 10)
#define READING_TILES 2u

_Static_assert(GROUP_PAGES * HSRI_PAGE_UNITS <= HSRI_UNITS_MAX, "a dense group fits a call");
_Static_assert(HSRI_UNITS_SCRATCH <= HSRI_ATTEND_SCRATCH + HSRI_CPU_GATHER_SCRATCH, "kernels of encoded pages have their scratch");
_Static_assert(HSRI_LIST_GROUP_UNITS % HSRI_PAGE_UNITS == 0, "a list group fills whole pages");
_Static_assert(HSRI_RUN_GROUP_UNITS <= GROUP_PAGES * HSRI_PAGE_UNITS, "a group of a prompt run fits a call");
_Static_assert(HSRI_RUN_GROUP_UNITS <= 2 * GROUP_PAGES, "and what a sequence is promised to hold at a time");

/* ---- pieces ---- */

/* How many tokens a query at `pos` sees of those from `first` on, at most `most`. */
static uint32_t visible_tokens(uint32_t pos, uint64_t first, uint32_t most)
{
    return pos < first ? 0 : (uint32_t)hsri_min(pos + 1 - first, most);
}

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
        visible[i] = visible_tokens(set->pos[i], (uint64_t)page * HSRI_PAGE_TOKENS, n_pages * HSRI_PAGE_TOKENS);
    job->dev->kernels.attend[seq->kv_type](&(hsri_attend_args){ pages, n_pages, job->kv->head_dim, job->scale, set->n, set->queries,
                                                                visible, set->partials, scratch });
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
                                                        set->partials, scratch });
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

/* ---- merging ---- */

typedef struct merge_job {
    const hsri_cpu_device *dev;
    float       *part, *acc, *out;
    uint32_t     head_dim, n_groups;
    int          first;
} merge_job;

/* A state's output. A row that saw nothing has l = 0, and its NaN shows in the logits: it must not pass for a result. */
static void finish_state(const float *restrict state, uint32_t d, float *restrict out)
{
    float inverse = 1.0f / state[1];

    for (uint32_t j = 0; j < d; j++)
        out[j] = state[2 + j] * inverse;
}

/* States of items [first, first + n) after all groups. Those that nobody wants are made in the scratch. */
static void merge_items(const merge_job *job, uint64_t first, uint32_t n, float **states, float *scratch)
{
    uint64_t width = 2ull + job->head_dim;
    float   *parts[HSRI_ATTEND_MAX_QUERIES];

    for (uint32_t i = 0; i < n; i++)
        states[i] = job->acc ? job->acc + (first + i) * width : scratch + i * width;
    for (uint32_t g = 0; g < job->n_groups; g++) {
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
            finish_state(states[i], job->head_dim, job->out + (first + i) * job->head_dim);
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
        job->group(job, row, kv_head, g, states, scratch);
        return;
    }
    set = hsri_cpu_with_partials(states, hsri_cpu_fold_scratch(scratch), job->kv->head_dim);
    job->group(job, row, kv_head, g, &set, scratch);
    job->dev->kernels.merge(states->partials, set.partials, set.n, job->kv->head_dim);
}

static void attend_tile(const attend_job *job, uint32_t tile, uint32_t kv_head, uint32_t g, float *scratch)
{
    uint32_t  row = tile * job->tile_rows, tile_end = (uint32_t)hsri_min((uint64_t)row + job->tile_rows, job->n_rows), row_end;
    uint32_t  head0 = kv_head * job->heads_per_kv, head1 = head0 + job->heads_per_kv;
    query_set set;

    for (; row < tile_end; row = row_end) {
        row_end = job->run_end(job, row, tile_end);
        for (uint32_t h = head0; h < head1; h += HSRI_ATTEND_MAX_QUERIES) {
            fill_set(job, row, row_end, h, (uint32_t)hsri_min(h + HSRI_ATTEND_MAX_QUERIES, head1), g, &set);
            (job->folds ? fold_group : job->group)(job, row, kv_head, g, &set, scratch);
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
            finish_state(hsri_cpu_state_at(job, row, h), d, job->out + ((uint64_t)row * job->n_heads + h) * d);
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
            pairs += visible_tokens(job.rows[row].pos, (uint64_t)g * HSRI_GROUP_TOKENS, HSRI_GROUP_TOKENS);
    for (uint32_t i = 0; i < batch->n_seqs; i++)
        encoded = encoded || !hsri_kv_is_plain(job.seqs[i].format);
    set_fold(&job, fold);
    job.run_end = dense_run_end;
    job.group = dense_group;
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
    job.run_end = page_run_end;
    job.group = fixed_group;
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
    job.run_end = pick_run_end;
    job.group = list_group;
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
