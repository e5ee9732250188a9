/* SPDX-License-Identifier: Apache-2.0 */
/* How much attention pages got: { m, l } of single pages beside those of groups, their sum over what was attended so far, and the pages
 * that got the most. Rows are added in their order, and heads of a row in theirs, so that neither threads nor steps change a bit. */
#include <math.h>
#include <string.h>

#include "device/cpu/attend_job.h"

#define PAGE_NS 400u                   /* of one thread: a page attended by one head */
#define ADD_NS 8u                      /* its share added */
#define FEW 4u                         /* pages that are looked at together */
#define LOOK_NS 2u                     /* a page looked at for the most attended */

/* ---- single pages ---- */

typedef struct parts_job {
    attend_job attend;
    const hsri_page_parts *what;
    const hsri_mass_row *rows;
    float *parts;
} parts_job;

/* Of a page: { m, l }. */
static float *part_at(const parts_job *job, uint32_t i, uint32_t head, uint32_t page)
{
    return job->parts + (((uint64_t)i * job->attend.n_heads + head) * job->what->n_pages + page) * 2;
}

static void add_part(float *to, const float *part)
{
    float max = part[0] > to[0] ? part[0] : to[0];

    if (part[1] == 0.0f)
        return;
    to[1] = to[1] * expf(to[0] - max) + part[1] * expf(part[0] - max);
    to[0] = max;
}

/* Queries of some heads of a listed row, with results of their own. */
typedef struct listener {
    const parts_job *job;
    const hsri_seq  *seq;
    uint32_t   i, row, kv_head, head;   /* head: the first */
    query_set  set;
    float     *scratch;
} listener;

static void hear(const listener *l, uint32_t page)
{
    for (uint32_t h = 0; h < l->set.n; h++)
        add_part(part_at(l->job, l->i, l->head + h, page), l->set.partials[h]);
}

static void hear_pages(const listener *l, uint64_t first, uint64_t end)
{
    uint32_t q = hsri_cpu_page_of(&l->job->attend, l->row);

    for (uint32_t page = (uint32_t)first; page < end; page++) {
        hsri_cpu_attend_pages(&l->job->attend, l->seq, l->kv_head, hsri_cpu_reads_plain(l->seq, page, q), page, 1, &l->set, l->scratch);
        hear(l, page);
    }
}

/* Pages of dense group g, of none of which anything was heard yet. */
static void hear_dense(const listener *l, uint32_t g)
{
    uint32_t q = hsri_cpu_page_of(&l->job->attend, l->row);

    hear_pages(l, (uint64_t)g * GROUP_PAGES, hsri_min((g + 1ull) * GROUP_PAGES, q + 1ull));
}

/* Sink, bridge and window. */
static void hear_fixed(const listener *l)
{
    uint32_t q = hsri_cpu_page_of(&l->job->attend, l->row), sink = l->seq->sink_pages, w = l->seq->window_pages;
    uint64_t window = hsri_max(sink, q + 1ull > w ? q + 1ull - w : 0);

    hear_pages(l, 0, hsri_min(sink, q + 1ull));
    if (l->job->what->runs && q % 2 == 1 && q >= sink + w)
        hear_pages(l, q - w, q - w + 1ull);
    hear_pages(l, window, q + 1ull);
}

/* Groups are never taken together, though a page may begin in one and end in the next: waves may end there. */
static void hear_lists(const listener *l)
{
    for (uint32_t g = l->job->what->g0; g < l->job->what->g1; g++) {
        uint32_t        n, end;
        const uint32_t *units = hsri_cpu_list_group(&l->job->attend, l->row, l->kv_head, g, &n);

        for (uint32_t first = 0; first < n; first = end) {
            for (end = first + 1; end < n && units[end] / HSRI_PAGE_UNITS == units[first] / HSRI_PAGE_UNITS;)
                end++;
            hsri_cpu_attend_units(&l->job->attend, l->seq, l->kv_head, units + first, end - first, &l->set, l->scratch);
            hear(l, units[first] / HSRI_PAGE_UNITS);
        }
    }
}

/* Nothing was heard of pages [first, end) yet. */
static void forget_parts(const listener *l, uint64_t first, uint64_t end)
{
    for (uint32_t h = 0; h < l->set.n; h++) {
        float *part = part_at(l->job, l->i, l->head + h, 0);

        for (uint64_t page = first; page < end; page++) {
            part[2 * page] = -INFINITY;
            part[2 * page + 1] = 0.0f;
        }
    }
}

static void hear_heads(const listener *l, uint32_t g)
{
    uint32_t q = hsri_cpu_page_of(&l->job->attend, l->row);

    switch (l->job->what->of) {
    case HSRI_PARTS_DENSE:
        forget_parts(l, (uint64_t)g * GROUP_PAGES, hsri_min((g + 1ull) * GROUP_PAGES, q + 1ull));
        hear_dense(l, g);
        break;
    case HSRI_PARTS_FIXED:
        forget_parts(l, 0, q + 1ull);
        hear_fixed(l);
        break;
    case HSRI_PARTS_LISTS:
        hear_lists(l);
        break;
    }
}

/* An item is one (listed row, kv head), or of dense groups one (listed row, kv head, group). */
static uint32_t groups_of(const hsri_page_parts *what) { return what->of == HSRI_PARTS_DENSE ? what->g1 - what->g0 : 1; }

static void parts_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const parts_job  *job = arg;
    const attend_job *a = &job->attend;
    uint32_t          n_groups = groups_of(job->what), d = a->kv->head_dim;

    for (uint64_t item = first; item < end; item++) {
        uint64_t pair = item / n_groups;
        listener l = { .job = job, .i = (uint32_t)(pair / a->kv->n_kv_heads), .kv_head = (uint32_t)(pair % a->kv->n_kv_heads),
                       .scratch = hsri_cpu_scratch(a->dev, worker) };

        l.row = job->rows[l.i].row;
        l.seq = hsri_cpu_seq_of(a, l.row);
        for (uint32_t h = 0; h < a->heads_per_kv; h += HSRI_ATTEND_MAX_QUERIES) {
            l.head = l.kv_head * a->heads_per_kv + h;
            hsri_cpu_fill_queries(a, l.row, l.row + 1, l.head,
                                  l.head + (uint32_t)hsri_min(HSRI_ATTEND_MAX_QUERIES, a->heads_per_kv - h), &l.set);
            l.set = hsri_cpu_with_partials(&l.set, hsri_cpu_piece_scratch(l.scratch), d);
            hear_heads(&l, job->what->g0 + (uint32_t)(item % n_groups));
        }
    }
}

static const hsri_mass_row *rows_of(const hsri_cpu_device *dev, const hsri_page_parts *what)
{
    return hsri_cpu_at(dev, what->rows, what->n_rows * sizeof(hsri_mass_row));
}

static float *all_parts(const hsri_cpu_device *dev, const hsri_page_parts *what, uint32_t n_heads)
{
    return hsri_cpu_floats(dev, what->parts, 2ull * what->n_rows * n_heads * what->n_pages);
}

static void cpu_page_parts(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                           hsri_ref queries, hsri_ref rotated, const hsri_page_parts *what)
{
    HSRI_CPU_TIMED(q, attend);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    parts_job        job = { hsri_cpu_attend_job(dev, batch, kv, layer, n_heads, scale, queries, rotated, 0, 0, (hsri_ref){ 0 }), what,
                             rows_of(dev, what), all_parts(dev, what, n_heads) };
    uint64_t         n = (uint64_t)what->n_rows * kv->n_kv_heads * groups_of(what), pages = GROUP_PAGES;

    if (what->of == HSRI_PARTS_LISTS) {
        job.attend.lists = hsri_cpu_lists_of(dev, kv, batch->n_rows, what->pick_of, &what->lists);
        pages = (uint64_t)(what->g1 - what->g0) * what->lists.group_units / HSRI_PAGE_UNITS;
    }
    hsri_cpu_run_items(dev, n, n * pages * job.attend.heads_per_kv * PAGE_NS, parts_run, &job);
}

/* ---- sums ---- */

typedef struct add_job {
    const hsri_cpu_device *dev;
    const hsri_row     *rows;
    const hsri_kv_view *kv;
    const hsri_page_parts *what;
    const hsri_mass_row *listed;
    const hsri_ref     *tables;
    const float        *parts, *acc;
    uint32_t            layer, n_heads;
} add_job;

/* What a page got of the row, by all heads of the kv head. No number that is none. */
static float mass_of(const add_job *job, uint32_t i, uint32_t kv_head, uint32_t page)
{
    uint32_t heads_per_kv = job->n_heads / job->kv->n_kv_heads;
    float    sum = 0.0f;

    for (uint32_t h = kv_head * heads_per_kv; h < (kv_head + 1) * heads_per_kv; h++) {
        const float *part = job->parts + (((uint64_t)i * job->n_heads + h) * job->what->n_pages + page) * 2;
        const float *acc = job->acc + ((uint64_t)job->listed[i].row * job->n_heads + h) * (2 + job->kv->head_dim);

        if (part[1] != 0.0f)
            sum += part[1] * expf(part[0] - acc[0]) / acc[1];
    }
    return isfinite(sum) ? sum : 0.0f;
}

/* No head heard anything of pages [page, page + FEW): so it is with most of them, if the row was sparse. */
static bool is_silent(const add_job *job, uint32_t i, uint32_t kv_head, uint32_t page)
{
    static const float nothing[2] = { -INFINITY, 0.0f };
    uint32_t heads_per_kv = job->n_heads / job->kv->n_kv_heads;
    uint64_t empty, off = 0, parts[FEW];

    memcpy(&empty, nothing, sizeof empty);
    for (uint32_t h = kv_head * heads_per_kv; h < (kv_head + 1) * heads_per_kv; h++) {
        memcpy(parts, job->parts + (((uint64_t)i * job->n_heads + h) * job->what->n_pages + page) * 2, sizeof parts);
        for (uint32_t j = 0; j < FEW; j++)
            off |= parts[j] ^ empty;
    }
    return off == 0;
}

static void add_row(const add_job *job, uint32_t i, uint32_t kv_head)
{
    const hsri_row *row = &job->rows[job->listed[i].row];
    float          *table = hsri_cpu_at(job->dev, job->tables[row->seq], 0);
    uint32_t        n_known = job->listed[i].n_known, end = row->pos / HSRI_PAGE_TOKENS + 1;

    for (uint32_t page = 0; page < end; page++) {
        float *mass;

        if (page % FEW == 0 && page + FEW <= hsri_min(n_known, end) && is_silent(job, i, kv_head, page)) {
            page += FEW - 1;
            continue;
        }
        mass = &table[hsri_mass_at(job->kv->n_layers, job->kv->n_kv_heads, job->layer, kv_head, page)];
        *mass = (page < n_known ? *mass : 0.0f) + mass_of(job, i, kv_head, page);
    }
}

/* An item is one (listed row, kv head); the first row of a sequence takes the others along. */
static void add_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const add_job *job = arg;

    (void)worker;
    for (uint64_t item = first; item < end; item++) {
        uint32_t i = (uint32_t)(item / job->kv->n_kv_heads), kv_head = (uint32_t)(item % job->kv->n_kv_heads);
        uint32_t seq = job->rows[job->listed[i].row].seq;

        if (i > 0 && job->rows[job->listed[i - 1].row].seq == seq)
            continue;
        for (; i < job->what->n_rows && job->rows[job->listed[i].row].seq == seq; i++)
            add_row(job, i, kv_head);
    }
}

static void cpu_add_masses(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, hsri_ref acc,
                           const hsri_page_parts *what)
{
    HSRI_CPU_TIMED(q, attend);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    add_job          job = { dev, hsri_cpu_at(dev, batch->rows, batch->n_rows * sizeof(hsri_row)), kv, what, rows_of(dev, what),
                             hsri_cpu_at(dev, what->tables, batch->n_seqs * sizeof(hsri_ref)), all_parts(dev, what, n_heads),
                             hsri_cpu_floats(dev, acc, (uint64_t)batch->n_rows * n_heads * (2 + kv->head_dim)), layer, n_heads };

    hsri_cpu_run_items(dev, (uint64_t)what->n_rows * kv->n_kv_heads, (uint64_t)what->n_rows * n_heads * what->n_pages * ADD_NS, add_run,
                       &job);
}

/* ---- the most attended ---- */

typedef struct top_job {
    const hsri_kv_view   *kv;
    const hsri_mass_range *range;
    const float          *table;
    const uint32_t       *wants;
    uint32_t             *out;
    uint32_t              stride;
} top_job;

/* One (layer, kv head). */
typedef struct ranking {
    const top_job *job;
    uint32_t layer, kv_head;
} ranking;

static float mass_at(const ranking *r, uint32_t page)
{
    return page < r->job->range->n_known
               ? r->job->table[hsri_mass_at(r->job->kv->n_layers, r->job->kv->n_kv_heads, r->layer, r->kv_head, page)] : 0.0f;
}

/* Does page a come before b in a heap: is it attended less, or as much and farther back, or by position, later? */
static bool goes_first(const ranking *r, uint32_t a, uint32_t b, bool by_position)
{
    float ma = by_position ? 0.0f : mass_at(r, a), mb = by_position ? 0.0f : mass_at(r, b);

    return ma < mb || (ma == mb && a > b);
}

static void sift_down(const ranking *r, uint32_t *heap, uint32_t n, uint32_t i, bool by_position)
{
    for (uint32_t child; (child = 2 * i + 1) < n; i = child) {
        uint32_t page = heap[i];

        child += child + 1 < n && goes_first(r, heap[child + 1], heap[child], by_position);
        if (!goes_first(r, heap[child], page, by_position))
            return;
        heap[i] = heap[child];
        heap[child] = page;
    }
}

static void make_heap(const ranking *r, uint32_t *heap, uint32_t n, bool by_position)
{
    for (uint32_t i = n / 2; i-- > 0;)
        sift_down(r, heap, n, i, by_position);
}

/* Ascending. */
static void sort_pages(const ranking *r, uint32_t *pages, uint32_t n)
{
    make_heap(r, pages, n, true);
    for (uint32_t left = n; left > 1; left--) {
        uint32_t page = pages[0];

        pages[0] = pages[left - 1];
        pages[left - 1] = page;
        sift_down(r, pages, left - 1, 0, true);
    }
}

/* A heap of the best so far, the worst of them on top; what sorts last in the list comes first in either heap. */
static void choose_top(const ranking *r, uint32_t want, uint32_t *out)
{
    uint32_t page = r->job->range->first_page, n = 0;

    for (; page < r->job->range->end_page && n < want; page++)
        out[n++] = page;
    make_heap(r, out, n, false);
    /* Those that follow have to be attended more: of equals, the earlier are taken, and what is not known is 0. */
    for (uint32_t end = (uint32_t)hsri_min(r->job->range->end_page, r->job->range->n_known); n > 0 && page < end;) {
        uint32_t     run = page / HSRI_MASS_RUN * HSRI_MASS_RUN, stop = (uint32_t)hsri_min(end, run + HSRI_MASS_RUN);
        const float *masses = &r->job->table[hsri_mass_at(r->job->kv->n_layers, r->job->kv->n_kv_heads, r->layer, r->kv_head, run)];

        for (float least = mass_at(r, out[0]); page < stop; page++) {
            if (!(masses[page - run] > least))
                continue;
            out[0] = page;
            sift_down(r, out, n, 0, false);
            least = mass_at(r, out[0]);
        }
    }
    sort_pages(r, out, n);
    while (n < r->job->stride)
        out[n++] = UINT32_MAX;
}

static void top_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const top_job *job = arg;

    (void)worker;
    for (uint64_t item = first; item < end; item++) {
        ranking r = { job, (uint32_t)(item / job->kv->n_kv_heads), (uint32_t)(item % job->kv->n_kv_heads) };

        choose_top(&r, (uint32_t)hsri_min(job->wants[r.layer], job->stride), job->out + item * job->stride);
    }
}

static void cpu_top_pages(hsri_queue *q, const hsri_kv_view *kv, const hsri_mass_range *range, hsri_ref wants, uint32_t stride,
                          hsri_ref out)
{
    HSRI_CPU_TIMED(q, select);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    uint64_t         n = (uint64_t)kv->n_layers * kv->n_kv_heads;
    top_job          job = { kv, range, hsri_cpu_at(dev, range->table, 0), hsri_cpu_at(dev, wants, kv->n_layers * sizeof(uint32_t)),
                             hsri_cpu_at(dev, out, n * stride * sizeof(uint32_t)), stride };
    uint64_t         n_pages = range->end_page > range->first_page ? range->end_page - range->first_page : 0;

    hsri_cpu_run_items(dev, n, n * (n_pages + stride * 8ull) * LOOK_NS, top_run, &job);
}

void hsri_cpu_page_mass_fill(hsri_ops *ops)
{
    ops->page_parts = cpu_page_parts;
    ops->add_masses = cpu_add_masses;
    ops->top_pages = cpu_top_pages;
}
