/* SPDX-License-Identifier: Apache-2.0 */
/* Rotating queries and choosing what they attend (docs/sparse-attention.md). `select` goes through its picks in batches that fit the
 * scratch, and each batch through these loops:
 *
 *   score    masses of all selectable units, for each voting row and head; items are chunks of HSRI_SCORE_PAGES pages, or segments
 *   choose   normalisers, worth of slices, the best of them, the list, the covered share; items are kv heads of picks
 *   weigh    masses and mean values of what was not chosen; items are spans of pages
 *   finish   their sums: the virtual tokens
 *
 * `foresee` does the first two with the pages that `select` noted for the row before.
 *
 * Chunks and spans begin at the first selectable page, whoever computes them, and their sums are added in order. So neither threads nor
 * what else is in the batch changes a bit. */
#include "device/cpu/sparse_job.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/rng.h"

#define SPAN_CHUNKS 4u
#define SPAN_PAGES (SPAN_CHUNKS * HSRI_SCORE_PAGES)

/* Estimates for one thread. */
#define UNIT_NS 5u                     /* to score a unit for one head */
#define CHOOSE_NS 3u                   /* to weigh a unit against the others */

static uint8_t *slab_at(uint8_t *pool, uint32_t slab)
{
    return pool + (uint64_t)(slab >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(slab & 0xFF) * HSRI_SLAB_BYTES;
}

/* ---- rotating ---- */

typedef struct rotate_job {
    const hsri_cpu_device *dev;
    const hsri_kv_view *kv;
    const float        *queries;
    float              *rotated;
    uint32_t            layer, n_heads;
} rotate_job;

/* An item is one (row, head). */
static void rotate_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const rotate_job *job = arg;
    uint32_t          d = job->kv->head_dim, heads_per_kv = job->n_heads / job->kv->n_kv_heads;

    (void)worker;
    for (uint64_t i = first; i < end; i++) {
        hsri_calibration_record record = hsri_cpu_calibration(job->dev, job->kv, job->layer, (uint32_t)(i % job->n_heads) / heads_per_kv);

        job->dev->kernels.sparse.rotate(record.b, job->queries + i * d, d, job->rotated + i * d);
    }
}

static void cpu_rotate(hsri_queue *q, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, uint32_t n_rows, hsri_ref queries,
                       hsri_ref rotated)
{
    HSRI_CPU_TIMED(q, select);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    uint64_t         n = (uint64_t)n_rows * n_heads;
    rotate_job       job = { dev, kv, hsri_cpu_floats(dev, queries, n * kv->head_dim), hsri_cpu_floats(dev, rotated, n * kv->head_dim),
                             layer,
                             n_heads };

    assert(kv->calibration.buf != 0);
    hsri_cpu_run_items(dev, n, n * kv->head_dim * kv->head_dim / 5, rotate_run, &job);
}

/* ---- indexing ---- */

void hsri_cpu_index_page(const hsri_cpu_device *dev, const hsri_kv_view *kv, const hsri_seal *seal, const float *k, const float *v,
                         float *scratch)
{
    const hsri_index_shape *shape = &seal->index_shape;
    hsri_calibration_record calibration = hsri_cpu_calibration(dev, kv, seal->layer, seal->head);
    uint8_t                *pool = hsri_cpu_at(dev, (hsri_ref){ .buf = kv->pool_buf }, 0);
    uint8_t                *entry = slab_at(pool, seal->slab) + (uint64_t)(seal->page % shape->per_slab) * shape->entry_bytes;
    uint8_t                *codes = NULL;

    assert(shape->kind != HSRI_INDEX_SKETCH || calibration.a);
    if (shape->kind == HSRI_INDEX_SKETCH)
        codes = hsri_slot_at(pool, seal->strip, hsri_strip_slot_bytes(shape)) + (uint64_t)seal->in_strip * shape->code_bytes;
    dev->kernels.sparse.encode(shape, &calibration, k, v, entry, codes, scratch);
}

/* ---- the scratch ---- */

static uint64_t scratch_floats(uint64_t n_votes, uint64_t n_heads, uint64_t n_kv_heads, uint64_t head_dim, uint64_t n_pages)
{
    uint64_t n_units = n_pages * HSRI_PAGE_UNITS, n_chunks = hsri_div_up(n_pages, HSRI_SCORE_PAGES), n_spans = hsri_div_up(n_pages,
                                                                                                                           SPAN_PAGES);

    return n_votes * (n_heads * (n_units + 2 * n_chunks + n_spans * (1 + head_dim)) + n_kv_heads * (2 * n_units + hsri_div_up(n_pages, 4)));
}

uint64_t hsri_select_scratch(uint32_t n_votes, uint32_t n_picks, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim, uint32_t n_pages,
                             bool clusters)
{
    const uint64_t votes = hsri_min(n_votes, BATCH_VOTES);

    (void)n_picks;
    uint64_t       n = scratch_floats(votes, n_heads, n_kv_heads, head_dim, n_pages);

    n += clusters ? hsri_cpu_cluster_floats(votes, n_heads, n_kv_heads, n_pages) : 0;
    return n * sizeof(float);
}

/* Cut the scratch for the batch's votes and its longest sequence. */
static void place_scratch(select_job *job, float *scratch, uint32_t n_votes, uint32_t max_pages, bool clusters)
{
    uint64_t rows = (uint64_t)n_votes * job->n_heads, lists = (uint64_t)n_votes * job->kv->n_kv_heads;

    job->max_units = (uint64_t)max_pages * HSRI_PAGE_UNITS;
    job->max_chunks = hsri_div_up(max_pages, HSRI_SCORE_PAGES);
    job->max_spans = hsri_div_up(max_pages, SPAN_PAGES);
    job->mass = scratch;
    job->sums = job->mass + rows * job->max_units;
    job->raised = job->sums + rows * job->max_chunks;
    job->means = job->raised + rows * job->max_chunks;
    job->worth = job->means + rows * job->max_spans * (1 + job->kv->head_dim);
    job->work = (uint32_t *)(job->worth + lists * job->max_units);
    job->chosen = (uint8_t *)(job->work + lists * job->max_units);
    job->max_segments = 0;
    if (clusters)
        hsri_cpu_cluster_place(job, scratch + scratch_floats(n_votes, job->n_heads, job->kv->n_kv_heads, job->kv->head_dim, max_pages),
                               n_votes);
}

static const uint8_t *entry_at(const select_job *job, const hsri_seq *seq, uint32_t kv_head, uint32_t page)
{
    const uint32_t *slabs = hsri_cpu_at(job->dev, seq->index, 0);
    uint64_t        row = (uint64_t)(page / seq->index_shape.per_slab) * job->kv->n_layers + job->layer;
    uint32_t        slab = slabs[row * job->kv->n_kv_heads + kv_head];

    return slab_at(hsri_cpu_at(job->dev, (hsri_ref){ .buf = job->kv->pool_buf }, 0), slab) +
           (uint64_t)(page % seq->index_shape.per_slab) * seq->index_shape.entry_bytes;
}

static const uint8_t *codes_at(const select_job *job, const hsri_seq *seq, uint32_t kv_head, uint32_t page)
{
    const uint32_t *strips = hsri_cpu_at(job->dev, seq->strips, 0), i = page - seq->sink_pages;
    uint64_t        row = (uint64_t)(i / HSRI_STRIP_PAGES) * job->kv->n_layers + job->layer;

    return hsri_slot_at(hsri_cpu_at(job->dev, (hsri_ref){ .buf = job->kv->pool_buf }, 0), strips[row * job->kv->n_kv_heads + kv_head],
                        hsri_strip_slot_bytes(&seq->index_shape)) + (uint64_t)(i % HSRI_STRIP_PAGES) * seq->index_shape.code_bytes;
}

void hsri_cpu_add_page(const select_job *job, chunk *c, uint32_t page)
{
    const hsri_seq *seq = c->pick->seq;
    const uint32_t  n = c->n_pages++;

    c->pages[n] = page - c->pick->first_page;
    if (seq->index_shape.kind != HSRI_INDEX_NONE)
        c->entries[n] = entry_at(job, seq, c->kv_head, page);
    if (c->pages[n] < c->pick->n_recorded)
        c->n_recorded++;
    else if (hsri_cpu_reads_codes(c->pick))
        c->codes[n] = codes_at(job, seq, c->kv_head, page);
}

/* Entries of n pages of a list from `first` on; without an index they stay unset. */
static void find_entries(const select_job *job, const pick_state *p, uint32_t kv_head, const page_list *l, uint32_t first, uint32_t n,
                         const uint8_t **entries)
{
    for (uint32_t i = 0; i < n && p->seq->index_shape.kind != HSRI_INDEX_NONE; i++)
        entries[i] = entry_at(job, p->seq, kv_head, page_at(l, first + i));
}

/* ---- score ---- */

/* What estimates the masses, whatever ranks the slices. */
static hsri_score_fn score_of(const hsri_sparse_kernels *kernels, uint32_t selector)
{
    switch (selector) {
    case HSRI_SELECT_SKETCH:
    case HSRI_SELECT_CLUSTER:  return kernels->score_sketch;
    case HSRI_SELECT_MINMAX:   return kernels->score_minmax;
    case HSRI_SELECT_GAUSSIAN: return kernels->score_gaussian;
    default:                   return kernels->score_mean;
    }
}

/* Page by page: there is room for the numbers of one. */
static void score_exactly(const select_job *job, const chunk *c, hsri_score_args a)
{
    const hsri_seq *seq = c->pick->seq;
    hsri_page_table pages = hsri_sealed_pages(job->dev, job->kv, seq, job->layer, c->kv_head);
    const float    *keys = c->scratch;
    float          *values = c->scratch + (uint64_t)HSRI_PAGE_TOKENS * job->kv->head_dim;

    a.n_pages = 1;
    for (uint32_t i = 0; i < c->n_pages; i++, a.mass += HSRI_PAGE_UNITS) {
        hsri_cpu_page_decode(&job->dev->kernels, seq->format, hsri_page_at(&pages, c->pick->first_page + c->pages[i]), job->kv->head_dim,
                             &c->calibration, c->scratch, values);
        job->dev->kernels.sparse.score_keys(&a, &keys);
    }
}

static void score_heads(const select_job *job, const chunk *c, const hsri_score_args *a)
{
    uint32_t        selector = c->pick->settings->selector;
    hsri_score_args behind = *a;

    if (selector == HSRI_SELECT_ORACLE) {
        score_exactly(job, c, *a);
        return;
    }
    hsri_cpu_score_recorded(job, c, a);
    behind.entries += c->n_recorded;
    behind.codes += c->n_recorded;
    behind.n_pages -= c->n_recorded;
    behind.mass += (uint64_t)c->n_recorded * HSRI_PAGE_UNITS;
    if (behind.n_pages)
        score_of(&job->dev->kernels.sparse, selector)(&behind);
}

/* Score one head again, and again, until its masses are within their range; returns by how much the reference was raised. *sum: of the
 * masses. */
static float score_raised(const select_job *job, const chunk *c, hsri_score_args a, uint32_t head, float *sum)
{
    const uint64_t n = (uint64_t)c->n_pages * HSRI_PAGE_UNITS;
    float          reference = a.reference[head], raised = 0.0f;

    a.queries += (uint64_t)head * job->kv->head_dim;
    a.rotated += a.rotated ? (uint64_t)head * job->kv->head_dim : 0;
    a.mass += head * a.mass_stride;
    a.n_heads = 1;
    a.reference = &reference;
    *sum = job->dev->kernels.sparse.sum(a.mass, n);
    for (uint32_t i = 0; i < MAX_RAISES && *sum >= HSRI_MASS_MAX; i++) {
        raised += RAISE;
        reference += RAISE;
        score_heads(job, c, &a);
        *sum = job->dev->kernels.sparse.sum(a.mass, n);
    }
    return raised;
}

void hsri_cpu_score_chunk(const select_job *job, const chunk *c, uint32_t row, uint32_t head, uint32_t n_heads, const chunk_masses *out)
{
    const pick_state *p = c->pick;
    const uint64_t    at = ((uint64_t)row * job->n_heads + head) * job->kv->head_dim;
    float             references[HSRI_ATTEND_MAX_QUERIES];
    hsri_score_args   a = { .entries = c->entries, .codes = c->codes, .n_pages = c->n_pages, .n_heads = n_heads,
                            .shape = &p->seq->index_shape, .scale = job->scale,
                            .queries = job->queries + at, .rotated = job->rotated ? job->rotated + at : NULL,
                            .reference = references, .mean_k = p->seq->index_shape.kind == HSRI_INDEX_SKETCH ? c->calibration.mean_k : NULL,
                            .mass = out->mass, .mass_stride = out->stride };

    for (uint32_t h = 0; h < n_heads; h++)
        references[h] = reference_of(job, p, row, head + h);
    score_heads(job, c, &a);
    for (uint32_t h = 0; h < n_heads; h++)
        out->raised[h * out->step] = score_raised(job, c, a, h, &out->sums[h * out->step]);
}

static void score_vote(const select_job *job, const chunk *c, uint32_t vote)
{
    const pick_state *p = c->pick;
    uint32_t          head = c->kv_head * job->heads_per_kv;
    uint64_t          mass = mass_at(job, p, vote, head) + c->at * HSRI_PAGE_UNITS, chunks = chunk_at(job, p, vote, head) + c->part;

    for (uint32_t h0 = 0; h0 < job->heads_per_kv; h0 += HSRI_ATTEND_MAX_QUERIES) {
        uint64_t           at = chunks + h0 * job->max_chunks;
        const chunk_masses out = { job->mass + mass + h0 * job->max_units, job->max_units, job->sums + at, job->raised + at,
                                   job->max_chunks };

        hsri_cpu_score_chunk(job, c, row_of_vote(p, vote), head + h0,
                             (uint32_t)hsri_min(HSRI_ATTEND_MAX_QUERIES, job->heads_per_kv - h0), &out);
    }
}

static uint32_t pages_of_chunk(uint32_t n_pages, uint32_t i)
{
    return (uint32_t)hsri_min(HSRI_SCORE_PAGES, n_pages - i * HSRI_SCORE_PAGES);
}

/* Of prompt runs, the heads of a segment are items of their own: there may be few segments, and all votes to score. */
static uint32_t items_of_segment(const select_job *job, const pick_state *p) { return p->n_votes > 1 ? job->heads_per_kv : 1; }

/* Of each kv head, segments whose clusters say what to score, then chunks of the pages behind them. */
static uint32_t head_items(const select_job *job, const pick_state *p)
{
    return p->n_segments * items_of_segment(job, p) + p->n_chunks - p->n_segments * SEGMENT_CHUNKS;
}

static uint64_t score_items(const select_job *job, const pick_state *p)
{
    return p->scored ? (uint64_t)job->kv->n_kv_heads * head_items(job, p) : 0;
}

/* Chunk i of the pages behind the segments; of foreseen ones, a head may have fewer chunks than others. */
static void score_pages(const select_job *job, chunk *c, uint32_t i)
{
    const pick_state *p = c->pick;
    const page_list   l = hsri_cpu_pages_of(job, p, c->kv_head);

    c->part = p->n_segments + i;
    c->at = l.n_clustered + i * HSRI_SCORE_PAGES;
    if (c->at >= l.n_pages)
        return;
    c->calibration = hsri_cpu_calibration(job->dev, job->kv, job->layer, c->kv_head);
    for (uint32_t page = c->at; page < hsri_min(c->at + HSRI_SCORE_PAGES, l.n_pages); page++)
        hsri_cpu_add_page(job, c, page_at(&l, page));
    for (uint32_t vote = 0; vote < c->pick->n_votes; vote++)
        score_vote(job, c, vote);
}

static void score_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const select_job *job = arg;

    for (uint64_t item = first; item < end; item++) {
        uint64_t i = item;
        chunk    c = { .pick = find_pick(job, &i, score_items), .scratch = hsri_cpu_scratch(job->dev, worker) };
        uint32_t part = (uint32_t)(i % head_items(job, c.pick)), each = items_of_segment(job, c.pick), n_scored = c.pick->n_segments * each;
        uint32_t n_heads = job->heads_per_kv / each;

        c.kv_head = (uint32_t)(i / head_items(job, c.pick));
        if (part < n_scored)
            hsri_cpu_score_segment(job, c.pick, c.kv_head, part / each, part % each * n_heads, n_heads);
        else
            score_pages(job, &c, part - n_scored);
    }
}

/* ---- choose ---- */

/* What one list is chosen from. Numbers of pages, units and slices are those in the page list. */
typedef struct choice {
    const select_job *job;
    const pick_state *p;
    uint32_t  kv_head;
    page_list pages;
    float    *worth;        /* [units] */
    uint32_t *work;         /* [units] */
    uint8_t  *chosen;       /* [pages], a bit for each unit */
} choice;

static measure measure_of(const choice *c, uint32_t vote, uint32_t head)
{
    const select_job *job = c->job;
    uint64_t          at = chunk_at(job, c->p, vote, head);

    return measure_chunks(job->mass + mass_at(job, c->p, vote, head), job->sums + at, job->raised + at, c->pages.n_chunks,
                          reference_of(job, c->p, row_of_vote(c->p, vote), head));
}

/* Worth of each unit: its probability, summed over the voting rows and the heads of the group. */
static void weigh_units(const choice *c)
{
    const select_job *job = c->job;
    float            *worth = c->worth;

    memset(worth, 0, (uint64_t)c->pages.n_pages * HSRI_PAGE_UNITS * sizeof *worth);
    for (uint32_t vote = 0; vote < c->p->n_votes && c->p->scored; vote++) {
        for (uint32_t h = 0; h < job->heads_per_kv; h++) {
            measure m = measure_of(c, vote, c->kv_head * job->heads_per_kv + h);

            for (uint32_t i = 0; i < c->pages.n_chunks && m.all > 0.0; i++) {
                uint64_t at = (uint64_t)i * CHUNK_UNITS, n = (uint64_t)pages_of_chunk(c->pages.n_pages, i) * HSRI_PAGE_UNITS;

                job->dev->kernels.sparse.add_scaled(worth + at, share_of(&m, i), m.mass + at, n);
            }
        }
    }
    /* Where clusters say what is looked at, units without such tokens do not compete. */
    for (uint32_t u = 0; u < c->pages.n_clustered * HSRI_PAGE_UNITS && !c->p->all_clusters; u++)
        worth[u] = worth[u] > 0.0f ? worth[u] : HSRI_NO_WORTH;
}

/* Pages [*first, *end) of coarse block b, among the selectable ones. Blocks lie at multiples of their size in the sequence. */
static uint32_t block_span(const pick_state *p, uint32_t size, uint32_t b, uint32_t *end)
{
    uint64_t first = (uint64_t)(p->first_page / size + b) * size;

    *end = (uint32_t)hsri_min(first + size - p->first_page, p->n_pages);
    return first > p->first_page ? (uint32_t)(first - p->first_page) : 0;
}

/* What all tokens of a block would be worth to a head at the block's mean logit. */
static float block_worth(const measure *m, uint32_t first, uint32_t end)
{
    float logs = 0.0f;

    for (uint32_t i = first; i < end; i++)
        logs += logf(m->mass[i * HSRI_PAGE_UNITS] * chunk_factor(m, i / HSRI_SCORE_PAGES));
    return m->all > 0.0 ? (float)((end - first) * HSRI_PAGE_UNITS * (exp((double)(logs / (float)(end - first))) / m->all)) : 0.0f;
}

/* The first of the classic rule's two steps: units outside the best coarse blocks lose their worth. */
static void keep_coarse(const choice *c)
{
    const select_job *job = c->job;
    const pick_state *p = c->p;
    uint32_t size = p->settings->coarse_pages ? p->settings->coarse_pages : 1, end;
    uint32_t n_blocks = (p->first_page + p->n_pages - 1) / size - p->first_page / size + 1;
    float   *blocks = (float *)c->work;
    hsri_top top;

    memset(blocks, 0, n_blocks * sizeof *blocks);
    for (uint32_t vote = 0; vote < p->n_votes; vote++) {
        for (uint32_t h = c->kv_head * job->heads_per_kv; h < (c->kv_head + 1) * job->heads_per_kv; h++) {
            measure m = measure_of(c, vote, h);

            for (uint32_t b = 0; b < n_blocks; b++) {
                uint32_t first = block_span(p, size, b, &end);

                blocks[b] += block_worth(&m, first, end);
            }
        }
    }
    top = hsri_top_of(&job->dev->kernels.sparse, blocks, n_blocks, p->settings->top_coarse, c->work + n_blocks);
    for (uint32_t b = 0; b < n_blocks; b++)
        if (!hsri_top_takes(&top, blocks[b]))
            for (uint32_t u = block_span(p, size, b, &end) * HSRI_PAGE_UNITS; u < end * HSRI_PAGE_UNITS; u++)
                c->worth[u] = HSRI_NO_WORTH;
}

/* The number of a page in the list, n_pages if it is not there. */
static uint32_t find_page(const page_list *l, uint32_t page)
{
    uint32_t low = 0, high = l->n_pages;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (page_at(l, middle) < page)
            low = middle + 1;
        else
            high = middle;
    }
    return low < l->n_pages && page_at(l, low) == page ? low : l->n_pages;
}

/* Forced pages are chosen whole, and units of them no longer compete. */
static void choose_forced(const choice *c)
{
    const hsri_sparse *s = c->p->settings;
    const uint32_t    *forced = s->n_forced ? hsri_cpu_at(c->job->dev, s->forced, 0) : NULL;

    memset(c->chosen, 0, c->pages.n_pages);
    for (uint32_t i = 0; i < s->n_forced; i++) {
        uint32_t page = find_page(&c->pages, forced[((uint64_t)c->job->layer * c->job->kv->n_kv_heads + c->kv_head) * s->n_forced + i]);

        if (page == c->pages.n_pages)
            continue;
        c->chosen[page] = (1u << HSRI_PAGE_UNITS) - 1;
        for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++)
            c->worth[page * HSRI_PAGE_UNITS + u] = HSRI_NO_WORTH;
    }
}

/* Units [*first, *end) of slice i. Slices lie at multiples of their size in the sequence; where not all pages are listed, slices are no
 * larger than pages. */
static uint32_t slice_span(const page_list *l, uint32_t size, uint32_t i, uint32_t *end)
{
    uint32_t unit0 = l->first_page * HSRI_PAGE_UNITS, n = l->n_pages * HSRI_PAGE_UNITS, slice0 = unit0 / size;
    uint64_t first = (uint64_t)(slice0 + i) * size, last = first + size;

    *end = (uint32_t)hsri_min(last - unit0, n);
    return first > unit0 ? (uint32_t)(first - unit0) : 0;
}

static uint32_t count_slices(const page_list *l, uint32_t size)
{
    uint32_t unit0 = l->first_page * HSRI_PAGE_UNITS, unit1 = unit0 + l->n_pages * HSRI_PAGE_UNITS;

    return (unit1 + size - 1) / size - unit0 / size;
}

/* Worth of slices in place of that of units, which it overwrites: a slice never lies behind its first unit. A slice is worth what those of
 * its units are that still compete; nothing if none does. */
static void weigh_slices(const choice *c, uint32_t size, uint32_t n_slices)
{
    float *worth = c->worth;

    for (uint32_t i = 0; i < n_slices && size > 1; i++) {
        uint32_t end, u = slice_span(&c->pages, size, i, &end);
        float    sum = HSRI_NO_WORTH;

        for (; u < end; u++)
            if (worth[u] >= 0.0f)
                sum = (sum >= 0.0f ? sum : 0.0f) + worth[u];
        worth[i] = sum;
    }
}

static void draw_slices(const choice *c, uint32_t n_slices)
{
    const select_job *job = c->job;
    uint64_t row = job->rows[c->p->row].pos, stream = (row * job->kv->n_layers + job->layer) * job->kv->n_kv_heads + c->kv_head;

    for (uint32_t i = 0; i < n_slices; i++)
        if (c->worth[i] >= 0.0f)
            c->worth[i] = (float)hsri_rng_unit(c->p->settings->seed, stream << 24 | i);
}

/* How many of all units may be chosen, and the size of the slices they come in. */
static uint32_t budget_of(const pick_state *p, uint32_t *size)
{
    const hsri_sparse *s = p->settings;
    uint64_t           budget = s->budget_units;

    *size = s->slice_units ? s->slice_units : 1;
    if (s->ratio > 0.0f)
        budget = hsri_max(budget, (uint64_t)ceil((double)s->ratio * p->n_pages * HSRI_PAGE_UNITS));
    if (s->selector == HSRI_SELECT_CLASSIC) {
        *size = s->fine_units ? s->fine_units : 1;
        budget = hsri_min(budget, (uint64_t)s->top_fine * *size);
    }
    return s->selector == HSRI_SELECT_HISTORY ? 0 : (uint32_t)hsri_min(budget, (uint64_t)p->n_pages * HSRI_PAGE_UNITS);
}

static void choose_slices(const choice *c)
{
    const hsri_sparse_kernels *kernels = &c->job->dev->kernels.sparse;
    uint32_t size = c->p->slice_units, n_slices = count_slices(&c->pages, size);
    bool     all = c->p->budget >= c->p->n_pages * HSRI_PAGE_UNITS;
    hsri_top top;

    if (c->p->settings->selector == HSRI_SELECT_CLASSIC && !all)
        keep_coarse(c);
    weigh_slices(c, size, n_slices);
    if (c->p->settings->selector == HSRI_SELECT_RANDOM)
        draw_slices(c, n_slices);
    top = hsri_top_of(kernels, c->worth, n_slices, all ? n_slices : c->p->budget / size, c->work);
    n_slices = hsri_top_list(kernels, top, c->worth, n_slices, c->work);
    for (uint32_t i = 0; i < n_slices; i++) {
        uint32_t end, u;

        for (u = slice_span(&c->pages, size, c->work[i], &end); u < end; u++)
            c->chosen[u / HSRI_PAGE_UNITS] |= (uint8_t)(1u << u % HSRI_PAGE_UNITS);
    }
}

/* The units chosen, and in c->work their numbers; returns how many. */
static uint32_t write_list(const choice *c, uint32_t *units)
{
    uint32_t n = 0;

    for (uint32_t page = 0; page < c->pages.n_pages; page++)
        for (uint32_t bits = c->chosen[page]; bits; bits &= bits - 1) {
            uint32_t of_page = (uint32_t)__builtin_ctz(bits);

            c->work[n] = page * HSRI_PAGE_UNITS + of_page;
            units[n++] = page_at(&c->pages, page) * HSRI_PAGE_UNITS + of_page;
        }
    return n;
}

/* Mass of the n units that were chosen, in the measure's own. */
static double chosen_mass(const choice *c, const measure *m, uint32_t n)
{
    double sum = 0.0;

    for (uint32_t i = 0; i < n; i++)
        sum += (double)(m->mass[c->work[i]] * chunk_factor(m, c->work[i] / CHUNK_UNITS));
    return sum;
}

/* Clusters that were not taken count with the mass of their centres. */
static double mass_of_rest(const choice *c, uint32_t vote, uint32_t head, const measure *m)
{
    const double *rest = c->p->n_segments ? c->job->rest + 2 * ((uint64_t)(c->p->first_vote + vote) * c->job->n_heads + head) : NULL;

    return rest && rest[0] > 0.0 ? rest[0] * exp(rest[1] - (double)m->top) : 0.0;
}

static void write_covered(const choice *c, uint32_t n)
{
    const select_job *job = c->job;

    for (uint32_t vote = 0; vote < c->p->n_votes; vote++) {
        for (uint32_t h = c->kv_head * job->heads_per_kv; h < (c->kv_head + 1) * job->heads_per_kv; h++) {
            float  *covered = job->covered + (uint64_t)row_of_vote(c->p, vote) * job->n_heads + h;
            measure m;

            *covered = n == c->p->n_pages * HSRI_PAGE_UNITS ? 1.0f : NAN;
            if (*covered == 1.0f || !c->p->scored)
                continue;
            m = measure_of(c, vote, h);
            *covered = (float)((m.exact + chosen_mass(c, &m, n)) / (m.all + mass_of_rest(c, vote, h, &m)));
        }
    }
}

/* What was chosen is attended; only the rest counts as virtual tokens. */
static void clear_chosen(const choice *c, uint32_t n)
{
    for (uint32_t vote = 0; vote < c->p->n_votes; vote++)
        for (uint32_t h = c->kv_head * c->job->heads_per_kv; h < (c->kv_head + 1) * c->job->heads_per_kv; h++) {
            float *mass = c->job->mass + mass_at(c->job, c->p, vote, h);

            for (uint32_t i = 0; i < n; i++)
                mass[c->work[i]] = 0.0f;
        }
}

static choice choice_of(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    uint64_t at = list_at(job, p, kv_head) * job->max_units;

    return (choice){ job, p, kv_head, hsri_cpu_pages_of(job, p, kv_head), job->worth + at, job->work + at,
                     job->chosen + at / HSRI_PAGE_UNITS };
}

/* Note the pages with the most probable units, before anything else changes what units are worth. */
static void note_scan(const choice *c)
{
    const hsri_sparse_kernels *kernels = &c->job->dev->kernels.sparse;
    const uint32_t first_head = c->kv_head * c->job->heads_per_kv, n_pages = c->pages.n_pages;
    uint32_t *scan = scan_of(c->p, c->kv_head), *found = c->work + n_pages;
    float    *best = (float *)c->work;
    hsri_top  top;

    for (uint32_t page = 0; page < n_pages; page++) {
        const float *unit = c->worth + (uint64_t)page * HSRI_PAGE_UNITS;

        best[page] = fmaxf(fmaxf(fmaxf(unit[0], unit[1]), fmaxf(unit[2], unit[3])), 0.0f);
    }
    top = hsri_top_of(kernels, best, n_pages, c->p->settings->scan_pages, found);
    scan[0] = hsri_top_list(kernels, top, best, n_pages, found);
    for (uint32_t i = 0; i < scan[0]; i++)
        scan[1 + i] = page_at(&c->pages, found[i]);
    for (uint32_t h = first_head; h < first_head + c->job->heads_per_kv; h++)
        scan_references(c->job, c->p)[h] = reference_of(c->job, c->p, c->p->row, h);
}

static uint64_t choose_items(const select_job *job, const pick_state *p) { (void)p; return job->kv->n_kv_heads; }

static void choose_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const select_job *job = arg;

    (void)worker;
    for (uint64_t item = first; item < end; item++) {
        uint64_t          i = item, list;
        const pick_state *p = find_pick(job, &i, choose_items);
        choice            c = choice_of(job, p, (uint32_t)i);

        list = (uint64_t)p->pick * job->kv->n_kv_heads + c.kv_head;
        if (p->n_segments)
            hsri_cpu_level_masses(job, p, c.kv_head);
        if (p->n_pages) {
            weigh_units(&c);
            if (p->scan)
                note_scan(&c);
            choose_forced(&c);
            choose_slices(&c);
        }
        job->counts[list] = write_list(&c, job->units + list * job->stride);
        assert(job->counts[list] <= job->stride);
        write_covered(&c, job->counts[list]);
        if (p->virtual_tokens)
            clear_chosen(&c, job->counts[list]);
    }
}

/* ---- weigh and finish: virtual tokens ---- */

/* Where few pages are listed, the last spans are empty. */
static uint32_t spans_of(uint32_t n_chunks) { return (uint32_t)hsri_div_up(n_chunks, SPAN_CHUNKS); }

static uint64_t weigh_items(const select_job *job, const pick_state *p)
{
    return p->virtual_tokens ? (uint64_t)job->kv->n_kv_heads * p->n_votes * spans_of(p->n_chunks) : 0;
}

/* Sums of a span of one head: { mass, value[d] }. Heads are neighbours. */
static float *means_at(const select_job *job, const pick_state *p, uint32_t vote, uint32_t head, uint32_t span)
{
    return job->means + (((uint64_t)(p->first_vote + vote) * job->max_spans + span) * job->n_heads + head) * (1 + job->kv->head_dim);
}

static void weigh_span(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t vote, uint32_t span)
{
    const page_list l = hsri_cpu_pages_of(job, p, kv_head);
    const uint32_t head = kv_head * job->heads_per_kv, d = job->kv->head_dim, n_chunks = l.n_chunks;
    const uint8_t *entries[HSRI_SCORE_PAGES];
    float          tops[HSRI_ATTEND_MAX_QUERIES], factors[HSRI_ATTEND_MAX_QUERIES];

    for (uint32_t h0 = 0; h0 < job->heads_per_kv; h0 += HSRI_ATTEND_MAX_QUERIES) {
        uint32_t n_heads = (uint32_t)hsri_min(HSRI_ATTEND_MAX_QUERIES, job->heads_per_kv - h0);

        memset(means_at(job, p, vote, head + h0, span), 0, (uint64_t)n_heads * (1 + d) * sizeof(float));
        for (uint32_t h = 0; h < n_heads; h++)
            tops[h] = highest(job->raised + chunk_at(job, p, vote, head + h0 + h), n_chunks);
        for (uint32_t i = span * SPAN_CHUNKS; i < hsri_min((span + 1) * SPAN_CHUNKS, n_chunks); i++) {
            uint32_t n = pages_of_chunk(l.n_pages, i);

            find_entries(job, p, kv_head, &l, i * HSRI_SCORE_PAGES, n, entries);
            for (uint32_t h = 0; h < n_heads; h++)
                factors[h] = factor_of(job->raised[chunk_at(job, p, vote, head + h0 + h) + i], tops[h]);
            job->dev->kernels.sparse.add_means(entries, n, &p->seq->index_shape, n_heads,
                                               job->mass + mass_at(job, p, vote,
                                                                   head + h0) + (uint64_t)i * CHUNK_UNITS, job->max_units, factors,
                                               means_at(job, p, vote, head + h0, span));
        }
    }
}

static void weigh_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const select_job *job = arg;

    (void)worker;
    for (uint64_t item = first; item < end; item++) {
        uint64_t          i = item;
        const pick_state *p = find_pick(job, &i, weigh_items);
        uint32_t          n_spans = spans_of(p->n_chunks);

        weigh_span(job, p, (uint32_t)(i / n_spans / p->n_votes), (uint32_t)(i / n_spans % p->n_votes), (uint32_t)(i % n_spans));
    }
}

/* What a head of a vote left over, as a mass of 1 with its mean value in part[1..]; returns the mass itself. */
static float sum_spans(const select_job *job, const pick_state *p, uint32_t vote, uint32_t head, float *part)
{
    const uint32_t d = job->kv->head_dim, kv_head = head / job->heads_per_kv;
    const uint32_t n_spans = spans_of(hsri_cpu_pages_of(job, p, kv_head).n_chunks);
    const float   *about = p->seq->index_shape.kind == HSRI_INDEX_SKETCH
                               ? hsri_cpu_calibration(job->dev, job->kv, job->layer, kv_head).mean_v : NULL;
    float          mass;

    memset(part, 0, (2 + d) * sizeof *part);
    for (uint32_t i = 0; i < n_spans; i++)
        job->dev->kernels.sparse.add_scaled(part + 1, 1.0f, means_at(job, p, vote, head, i), 1 + d);
    mass = part[1];
    part[1] = 1.0f;
    for (uint32_t j = 0; j < d && mass > 0.0f; j++)
        part[2 + j] = part[2 + j] / mass + (about ? about[j] : 0.0f);
    return mass;
}

/* Partials of mass exp(m), l = 1; empty if nothing was left over. Of a prompt run each row has the estimate that was made for the last
 * vote, about its own exact mass. */
static void finish_head(const select_job *job, const pick_state *p, uint32_t vote, uint32_t head)
{
    const uint64_t width = 2ull + job->kv->head_dim;
    const uint32_t first = row_of_vote(p, vote), end = (uint32_t)hsri_min(first + HSRI_PICK_STRIDE, p->row + p->n_rows);
    float         *part = job->virtual_part + ((uint64_t)first * job->n_heads + head) * width;
    const float    mass = sum_spans(job, p, vote, head, part), log_mass = logf(mass);
    const float    top = highest(job->raised + chunk_at(job, p, vote, head), hsri_cpu_pages_of(job, p, head / job->heads_per_kv).n_chunks);

    for (uint32_t row = first; row < end; row++) {
        float *of_row = job->virtual_part + ((uint64_t)row * job->n_heads + head) * width;

        if (!(mass > 0.0f)) {
            memset(of_row, 0, width * sizeof *of_row);
            of_row[0] = -INFINITY;
            continue;
        }
        if (row > first)
            memcpy(of_row + 1, part + 1, (width - 1) * sizeof *of_row);
        of_row[0] = reference_of(job, p, row, head) + log_mass + top;
    }
}

static uint64_t finish_items(const select_job *job, const pick_state *p)
{
    return p->virtual_tokens ? (uint64_t)job->n_heads * p->n_votes : 0;
}

static void finish_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const select_job *job = arg;

    (void)worker;
    for (uint64_t item = first; item < end; item++) {
        uint64_t          i = item;
        const pick_state *p = find_pick(job, &i, finish_items);

        finish_head(job, p, (uint32_t)i / job->n_heads, (uint32_t)i % job->n_heads);
    }
}

/* ---- picks in batches ---- */

/* Outputs of rows that nothing else writes: no virtual tokens, unknown cover. */
static void clear_rows(const select_job *job, const pick_state *p)
{
    uint32_t d = job->kv->head_dim;

    for (uint64_t i = (uint64_t)p->row * job->n_heads; i < (uint64_t)(p->row + p->n_rows) * job->n_heads; i++) {
        job->covered[i] = NAN;
        if (p->virtual_tokens)
            continue;
        memset(job->virtual_part + i * (2 + d), 0, (2 + d) * sizeof(float));
        job->virtual_part[i * (2 + d)] = -INFINITY;
    }
}

static pick_state describe_pick(const select_job *job, uint32_t i)
{
    hsri_pick  pick = job->all_picks[i];
    uint32_t   seq = job->rows[pick.row].seq, page = job->rows[pick.row].pos / HSRI_PAGE_TOKENS;
    pick_state p = { .seq = &job->seqs[seq], .settings = &job->settings[seq], .pick = i, .row = pick.row, .n_rows = pick.n_rows,
                     .n_votes = (uint32_t)hsri_div_up(pick.n_rows, HSRI_PICK_STRIDE) };
    bool       index = p.seq->index_shape.kind != HSRI_INDEX_NONE;

    p.first_page = p.seq->sink_pages;
    p.n_pages = page + 1 > p.seq->window_pages + p.first_page ? page + 1 - p.seq->window_pages - p.first_page : 0;
    p.n_chunks = (uint32_t)hsri_div_up(p.n_pages, HSRI_SCORE_PAGES);
    p.scored = index || p.settings->selector == HSRI_SELECT_ORACLE;
    /* Bounds are no estimates: virtual tokens would weigh far too much. */
    p.virtual_tokens = p.n_pages > 0 && index && (p.settings->flags & HSRI_SPARSE_VIRTUAL) &&
                       p.settings->selector != HSRI_SELECT_MINMAX;
    p.budget = budget_of(&p, &p.slice_units);
    p.n_recorded = hsri_cpu_recorded_pages(&p);
    p.n_segments = p.n_recorded / HSRI_SEGMENT_PAGES;
    p.all_clusters = hsri_cpu_takes_all_clusters(&p);
    p.all_families = hsri_cpu_takes_all_families(&p);
    if (p.settings->scan_pages && p.n_rows == 1 && p.n_pages > 0 && index)
        p.scan = (uint32_t *)hsri_cpu_at(job->dev, p.settings->scan, 0) +
                 hsri_scan_at(job->kv->n_kv_heads, job->n_heads, p.settings->scan_pages, job->layer, 0);
    return p;
}

static uint64_t score_cost(const select_job *job)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < job->n_picks; i++)
        n += job->picks[i].scored ? (uint64_t)job->picks[i].n_chunks * HSRI_SCORE_PAGES * HSRI_PAGE_UNITS * job->picks[i].n_votes : 0;
    return n * job->n_heads * UNIT_NS;
}

static uint64_t finish_cost(const select_job *job)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < job->n_picks; i++)
        n += job->picks[i].virtual_tokens ? (uint64_t)job->picks[i].n_votes * job->max_spans + job->picks[i].n_rows : 0;
    return n * job->n_heads * job->kv->head_dim / 4;
}

static void run_batch(hsri_cpu_device *dev, select_job *job)
{
    uint64_t n_units = job->max_units * job->n_picks, weighing;

    if (job->max_segments)
        hsri_cpu_cluster_list(dev, job);
    weighing = all_items(job, weigh_items);
    hsri_cpu_run_items(dev, all_items(job, score_items), score_cost(job), score_run, job);
    hsri_cpu_run_items(dev, all_items(job, choose_items), n_units * job->kv->n_kv_heads * CHOOSE_NS, choose_run, job);
    hsri_cpu_run_items(dev, weighing, weighing * job->heads_per_kv * SPAN_PAGES * job->kv->head_dim / 16, weigh_run, job);
    hsri_cpu_run_items(dev, all_items(job, finish_items), finish_cost(job), finish_run, job);
}

static select_job job_of(hsri_cpu_device *dev, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads,
                         float scale, hsri_ref queries, hsri_ref rotated, hsri_ref acc, hsri_ref sparse, hsri_ref picks,
                         const hsri_lists *lists)
{
    const uint64_t n = (uint64_t)batch->n_rows * n_heads, n_lists = (uint64_t)lists->n_picks * kv->n_kv_heads;

    return (select_job){
        .dev = dev, .rows = hsri_cpu_at(dev, batch->rows, batch->n_rows * sizeof(hsri_row)), .kv = kv, .layer = layer,
        .seqs = hsri_cpu_at(dev, batch->seqs, batch->n_seqs * sizeof(hsri_seq)),
        .settings = hsri_cpu_at(dev, sparse, batch->n_seqs * sizeof(hsri_sparse)),
        .all_picks = hsri_cpu_at(dev, picks, lists->n_picks * sizeof(hsri_pick)),
        .queries = hsri_cpu_floats(dev, queries, n * kv->head_dim), .rotated = hsri_cpu_floats(dev, rotated, n * kv->head_dim),
        .acc = hsri_cpu_floats(dev, acc, n * (2 + kv->head_dim)),
        .units = hsri_cpu_at(dev, lists->units, n_lists * lists->stride * sizeof(uint32_t)),
        .counts = hsri_cpu_at(dev, lists->counts, n_lists * sizeof(uint32_t)),
        .virtual_part = hsri_cpu_floats(dev, lists->virtual_part, n * (2 + kv->head_dim)),
        .covered = hsri_cpu_floats(dev, lists->covered, n),
        .n_heads = n_heads, .heads_per_kv = n_heads / kv->n_kv_heads, .stride = lists->stride, .scale = scale,
    };
}

static void cpu_select(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                       hsri_ref queries, hsri_ref rotated, hsri_ref acc, hsri_ref sparse, hsri_ref picks, hsri_ref scratch,
                       const hsri_lists *lists)
{
    HSRI_CPU_TIMED(q, select);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    select_job       job = job_of(dev, batch, kv, layer, n_heads, scale, queries, rotated, acc, sparse, picks, lists);

    for (uint32_t i = 0; i < lists->n_picks;) {
        uint32_t n_votes = 0, max_pages = 0;
        bool     clusters = false;

        for (job.n_picks = 0; i < lists->n_picks; i++) {
            pick_state p = describe_pick(&job, i);

            if (n_votes + p.n_votes > BATCH_VOTES)
                break;
            p.first_vote = n_votes;
            n_votes += p.n_votes;
            max_pages = (uint32_t)hsri_max(max_pages, p.n_pages);
            clusters |= p.n_segments > 0;
            job.picks[job.n_picks++] = p;
            clear_rows(&job, &p);
        }
        place_scratch(&job, hsri_cpu_at(dev, scratch,
                                        hsri_select_scratch(n_votes, 0, n_heads, kv->n_kv_heads, kv->head_dim, max_pages, clusters)),
                      n_votes, max_pages, clusters);
        run_batch(dev, &job);
    }
}

/* ---- what the next query may choose ---- */

/* The pick with the pages of its scan. False: there is none, or the sequence was cut since, and not all of them are selectable. */
static bool describe_foreseen(const select_job *job, uint32_t i, pick_state *p)
{
    uint32_t end, most = 0;

    *p = describe_pick(job, i);
    end = p->first_page + p->n_pages;
    for (uint32_t kv_head = 0; kv_head < job->kv->n_kv_heads && p->scan; kv_head++) {
        const uint32_t *scan = scan_of(p, kv_head);

        if (scan[0] == 0 || scan[scan[0]] >= end)
            return false;
        most = (uint32_t)hsri_max(most, scan[0]);
    }
    p->foreseen = p->scan != NULL;
    p->n_pages = most;
    p->n_chunks = (uint32_t)hsri_div_up(most, HSRI_SCORE_PAGES);
    p->n_segments = 0;
    return p->foreseen;
}

/* Items as in choose_run. */
static void foresee_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const select_job *job = arg;

    (void)worker;
    for (uint64_t item = first; item < end; item++) {
        uint64_t          i = item, list;
        const pick_state *p = find_pick(job, &i, choose_items);
        const choice      c = choice_of(job, p, (uint32_t)i);

        list = (uint64_t)p->pick * job->kv->n_kv_heads + c.kv_head;
        memset(c.chosen, 0, c.pages.n_pages);
        weigh_units(&c);
        choose_slices(&c);
        job->counts[list] = write_list(&c, job->units + list * job->stride);
    }
}

static void cpu_foresee(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                        hsri_ref queries, hsri_ref rotated, hsri_ref sparse, hsri_ref picks, hsri_ref scratch, const hsri_lists *lists)
{
    HSRI_CPU_TIMED(q, select);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    select_job       job = job_of(dev, batch, kv, layer, n_heads, scale, queries, rotated, (hsri_ref){ 0 }, sparse, picks, lists);

    memset(job.counts, 0, (uint64_t)lists->n_picks * kv->n_kv_heads * sizeof *job.counts);
    for (uint32_t i = 0; i < lists->n_picks;) {
        uint32_t max_pages = 0;

        for (job.n_picks = 0; i < lists->n_picks && job.n_picks < BATCH_VOTES; i++) {
            pick_state *p = &job.picks[job.n_picks];

            if (!describe_foreseen(&job, i, p))
                continue;
            p->first_vote = job.n_picks++;
            max_pages = (uint32_t)hsri_max(max_pages, p->n_pages);
        }
        place_scratch(&job, hsri_cpu_at(dev, scratch, hsri_select_scratch(job.n_picks, 0, n_heads, kv->n_kv_heads, kv->head_dim, max_pages,
                                                                          false)),
                      job.n_picks, max_pages, false);
        hsri_cpu_run_items(dev, all_items(&job, score_items), score_cost(&job), score_run, &job);
        hsri_cpu_run_items(dev, all_items(&job, choose_items), job.max_units * job.n_picks * kv->n_kv_heads * CHOOSE_NS, foresee_run, &job);
    }
}

static void cpu_set_aside(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                          hsri_ref queries, hsri_ref rotated, hsri_ref acc, hsri_ref sparse, hsri_ref picks, const hsri_lists *lists)
{
    HSRI_CPU_TIMED(q, select);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    select_job       job = job_of(dev, batch, kv, layer, n_heads, scale, queries, rotated, acc, sparse, picks, lists);

    for (uint32_t i = 0; i < lists->n_picks;) {
        for (job.n_picks = 0; i < lists->n_picks && job.n_picks < BATCH_VOTES; i++) {
            pick_state p = describe_pick(&job, i);

            if (p.virtual_tokens && p.n_rows == 1)
                job.picks[job.n_picks++] = p;
        }
        hsri_cpu_set_aside(dev, &job);
    }
}

void hsri_cpu_sparse_fill(hsri_ops *ops)
{
    ops->rotate = cpu_rotate;
    ops->select = cpu_select;
    ops->foresee = cpu_foresee;
    ops->set_aside = cpu_set_aside;
}
