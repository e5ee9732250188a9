/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of one layer, span by span, as groups whose partials are merged in list order (device.h). Work goes in waves that fit the
 * partials' room and, where pages may be elsewhere, memory: how many groups a wave holds never changes a result. */
#include "model.h"

#include "base/array.h"

/* A span's rows in the arrays of the step. */
typedef struct part {
    const hsri_forward *f;
    const hsri_span    *span;
    uint32_t   layer;
    hsri_batch batch;
    hsri_ref   queries, rotated, attended, acc;
} part;

static part part_of(const hsri_forward *f, const hsri_span *span, uint32_t layer)
{
    const uint64_t q_bytes = (uint64_t)span->row * f->hp->n_heads * f->hp->head_dim * sizeof(float);
    const uint64_t acc_bytes = (uint64_t)span->row * f->hp->n_heads * (f->hp->head_dim + 2) * sizeof(float);
    return (part){
        .f = f, .span = span, .layer = layer,
        .batch = { hsri_at(f->batch.rows, span->row * sizeof(hsri_row)), f->batch.seqs, span->n_rows, f->batch.n_seqs },
        .queries = hsri_at(f->s->queries, q_bytes), .rotated = f->rotate ? hsri_at(f->s->rotated, q_bytes) : (hsri_ref){ 0 },
        .attended = hsri_at(f->s->attended, q_bytes), .acc = hsri_at(f->s->acc, acc_bytes),
    };
}

static uint32_t wave_groups(const part *p)
{
    return (uint32_t)(p->f->s->part_floats / ((uint64_t)p->span->n_rows * p->f->hp->n_heads * (p->f->hp->head_dim + 2)));
}

/* What one fold makes of all groups has a reader beside `attended` only if attention is remembered. */
static hsri_fold fold_of(const part *p, bool first, bool last)
{
    const bool forgotten = first && last && !p->span->n_mass_rows;
    return (hsri_fold){ first, forgotten ? (hsri_ref){ 0 } : p->acc, last ? p->attended : (hsri_ref){ 0 } };
}

/* Pages of groups [g0, *g1) are in memory until let_go. False after a failure. */
static bool hold_dense(const part *p, uint32_t g0, uint32_t *g1)
{
    const hsri_residency *r = p->f->residency;
    if (r)
        *p->f->status = r->hold_dense(r->self, p->layer, g0, g1, p->f->err);
    return !r || *p->f->status >= 0;
}

static bool hold_lists(const part *p, const hsri_lists *lists, uint32_t g0, uint32_t *g1)
{
    const hsri_residency *r = p->f->residency;
    if (r)
        *p->f->status = r->hold_lists(r->self, p->layer, lists, g0, g1, p->f->err);
    return !r || *p->f->status >= 0;
}

static bool let_go(const part *p)
{
    const hsri_residency *r = p->f->residency;
    if (r)
        *p->f->status = r->release(r->self, p->f->err);
    return !r || *p->f->status >= 0;
}

/* ---- how much attention pages get ---- */

static hsri_page_parts page_parts_of(const part *p, hsri_parts_of of, uint32_t g0, uint32_t g1)
{
    const hsri_forward *f = p->f;
    return (hsri_page_parts){
        .of = of, .g0 = g0, .g1 = g1, .runs = p->span->prefill,
        .rows = hsri_at(f->mass_rows, p->span->first_mass_row * sizeof(hsri_mass_row)),
        .parts = f->room->parts, .tables = f->mass_tables, .n_rows = p->span->n_mass_rows, .n_pages = p->span->mass_pages,
    };
}

/* Beside a wave's groups, while its pages are held. */
static void listen(const part *p, const hsri_page_parts *what)
{
    const hsri_forward *f = p->f;
    if (p->span->n_mass_rows)
        f->dev->ops.page_parts(f->queue, &p->batch, f->kv, p->layer, f->hp->n_heads, f->hp->attention_scale, p->queries, p->rotated, what);
}

static void remember(const part *p)
{
    const hsri_forward *f = p->f;
    const hsri_page_parts what = page_parts_of(p, HSRI_PARTS_DENSE, 0, 0);
    if (p->span->n_mass_rows)
        f->dev->ops.add_masses(f->queue, &p->batch, f->kv, p->layer, f->hp->n_heads, p->acc, &what);
}

/* ---- dense ---- */

static void attend_dense(const part *p)
{
    const hsri_forward *f = p->f;
    const hsri_hparams *hp = f->hp;
    const uint32_t n_groups = p->span->max_pos / HSRI_GROUP_TOKENS + 1, wave = wave_groups(p);

    for (uint32_t g0 = 0, g1; g0 < n_groups; g0 = g1) {
        g1 = (uint32_t)hsri_min(n_groups, (uint64_t)g0 + wave);
        if (!hold_dense(p, g0, &g1))
            return;
        const hsri_fold fold = fold_of(p, g0 == 0, g1 == n_groups);
        f->dev->ops.attend(f->queue, &p->batch, f->kv, p->layer, hp->n_heads, hp->attention_scale, p->queries, p->rotated,
                           g0, g1, f->s->part, &fold);
        const hsri_page_parts heard = page_parts_of(p, HSRI_PARTS_DENSE, g0, g1);
        listen(p, &heard);
        if (!let_go(p))
            return;
    }
    remember(p);
}

/* ---- sparse ---- */

/* Where the span's selections go. Observed rows report to places of their own layer. */
static hsri_lists lists_of(const part *p)
{
    const hsri_forward *f = p->f;
    const hsri_sparse_room *room = f->room;
    const uint64_t first = (uint64_t)p->layer * f->batch.n_rows + p->span->row;
    return (hsri_lists){
        .units = room->units,
        .counts = p->span->observed ? hsri_at(room->attended, first * f->hp->n_kv_heads * sizeof(uint32_t)) : room->counts,
        .virtual_part = room->virtual_part,
        .covered = hsri_at(room->covered, first * f->hp->n_heads * sizeof(float)),
        .stride = p->span->max_units, .n_picks = p->span->n_picks,
        .group_units = p->span->prefill ? HSRI_RUN_GROUP_UNITS : HSRI_LIST_GROUP_UNITS,
    };
}

/* Place of row j of a tap in its arrays, in this layer; false if nothing is wanted of it. */
static bool tap_place(const hsri_tap *t, uint32_t j, uint32_t layer, uint64_t *place)
{
    *place = (layer - t->layer_first) * t->n_places + t->places[j];
    return layer >= t->layer_first && layer < t->layer_end;
}

static void copy_lists_of_row(const part *p, const hsri_lists *lists, const hsri_tap *t, uint32_t pick, uint64_t place)
{
    const hsri_forward *f = p->f;
    const uint64_t n_kv = f->hp->n_kv_heads, list = pick * n_kv;

    if (t->n_slices)
        f->dev->copy_out(f->queue, t->n_slices + place * n_kv, hsri_at(lists->counts, list * sizeof(uint32_t)), n_kv * sizeof(uint32_t));
    for (uint64_t g = 0; g < n_kv && t->slices; g++)
        f->dev->copy_out(f->queue, t->slices + (place * n_kv + g) * t->max_slices,
                         hsri_at(lists->units, (list + g) * lists->stride * sizeof(uint32_t)),
                         hsri_min(lists->stride, t->max_slices) * sizeof(uint32_t));
}

/* Selections that somebody outside wants to see. */
static void copy_lists(const part *p, const hsri_lists *lists)
{
    for (uint32_t i = 0; i < p->f->n_taps; i++) {
        const hsri_tap *t = &p->f->taps[i];
        for (uint32_t j = 0; j < t->n; j++) {
            uint64_t place;
            if (t->rows[j] >= p->span->row && t->rows[j] < p->span->row + p->span->n_rows && tap_place(t, j, p->layer, &place))
                copy_lists_of_row(p, lists, t, t->picks[j], place);
        }
    }
}

/* Units that are not waited for, if the settings say so, become virtual tokens. */
static bool put_off(const part *p, hsri_ref sparse, hsri_ref picks, const hsri_lists *lists)
{
    const hsri_forward *f = p->f;
    const hsri_residency *r = f->residency;
    bool any = false;

    if (!r || p->span->prefill)
        return true;
    *f->status = r->put_off(r->self, p->layer, lists, &any, f->err);
    if (any)
        f->dev->ops.set_aside(f->queue, &p->batch, f->kv, p->layer, f->hp->n_heads, f->hp->attention_scale, p->queries, p->rotated,
                              p->acc, sparse, picks, lists);
    return *f->status >= 0;
}

static bool attend_lists(const part *p, const hsri_lists *lists)
{
    const hsri_forward *f = p->f;
    const hsri_hparams *hp = f->hp;
    const hsri_ref pick_of = hsri_at(f->pick_of, p->span->row * sizeof(uint32_t));
    const uint32_t n_groups = (uint32_t)hsri_div_up(p->span->max_units, lists->group_units), wave = wave_groups(p);
    const hsri_fold fold = fold_of(p, false, false);

    for (uint32_t g0 = 0, g1; g0 < n_groups; g0 = g1) {
        g1 = (uint32_t)hsri_min(n_groups, (uint64_t)g0 + wave);
        if (!hold_lists(p, lists, g0, &g1))
            return false;
        f->dev->ops.attend_list(f->queue, &p->batch, f->kv, p->layer, hp->n_heads, hp->attention_scale, p->queries, p->rotated,
                                pick_of, lists, g0, g1, f->s->part, &fold);
        hsri_page_parts heard = page_parts_of(p, HSRI_PARTS_LISTS, g0, g1);
        heard.pick_of = pick_of;
        heard.lists = *lists;
        listen(p, &heard);
        if (!let_go(p))
            return false;
    }
    return true;
}

/* Sink, window, and in a prompt run the bridge page, which is read encoded and may be elsewhere. */
static bool attend_fixed(const part *p)
{
    const hsri_forward *f = p->f;
    const hsri_span *span = p->span;
    const bool bridged = span->prefill && f->residency;
    const uint32_t g0 = span->bridge_page * HSRI_PAGE_TOKENS / HSRI_GROUP_TOKENS;
    const hsri_fold fold = fold_of(p, true, false);
    uint32_t g1 = g0 + 1;

    if (bridged && !hold_dense(p, g0, &g1))
        return false;
    f->dev->ops.attend_fixed(f->queue, &p->batch, f->kv, p->layer, f->hp->n_heads, f->hp->attention_scale, p->queries, p->rotated,
                             span->n_fixed, span->prefill, f->s->part, &fold);
    const hsri_page_parts heard = page_parts_of(p, HSRI_PARTS_FIXED, 0, 0);
    listen(p, &heard);
    return !bridged || let_go(p);
}

static void attend_sparse(const part *p)
{
    const hsri_forward *f = p->f;
    const hsri_ops *op = &f->dev->ops;
    const hsri_hparams *hp = f->hp;
    const hsri_span *span = p->span;
    const hsri_lists lists = lists_of(p);
    const hsri_fold fold = fold_of(p, false, true);
    const hsri_ref sparse = hsri_at(f->sparse[span->prefill], (uint64_t)p->layer * f->batch.n_seqs * sizeof(hsri_sparse));
    const hsri_ref picks = hsri_at(f->picks, span->first_pick * sizeof(hsri_pick));

    if (!attend_fixed(p))
        return;
    op->select(f->queue, &p->batch, f->kv, p->layer, hp->n_heads, hp->attention_scale, p->queries, p->rotated, p->acc, sparse, picks,
               f->room->scratch, &lists);
    if (!put_off(p, sparse, picks, &lists))
        return;
    copy_lists(p, &lists);
    if (!attend_lists(p, &lists))
        return;
    op->merge(f->queue, span->n_rows, hp->n_heads, hp->head_dim, lists.virtual_part, 1, &fold);
    remember(p);
}

/* Queries that somebody outside wants to see. */
static void copy_queries(const hsri_forward *f, uint32_t layer)
{
    const uint64_t width = (uint64_t)f->hp->n_heads * f->hp->head_dim, bytes = width * sizeof(float);
    for (uint32_t i = 0; i < f->n_taps; i++) {
        const hsri_tap *t = &f->taps[i];
        for (uint32_t j = 0; j < t->n && t->queries; j++) {
            uint64_t place;
            if (tap_place(t, j, layer, &place))
                f->dev->copy_out(f->queue, t->queries + place * width, hsri_at(f->s->queries, t->rows[j] * bytes), bytes);
        }
    }
}

static void rotate_rows(const hsri_forward *f, uint32_t layer, uint32_t row, uint32_t n_rows)
{
    const uint64_t at = (uint64_t)row * f->hp->n_heads * f->hp->head_dim * sizeof(float);
    f->dev->ops.rotate(f->queue, f->kv, layer, f->hp->n_heads, n_rows, hsri_at(f->s->queries, at), hsri_at(f->s->rotated, at));
}

/* Of a span that reads plain pages: what `select` asks with. */
static void rotate_votes(const hsri_forward *f, uint32_t layer, const hsri_span *span)
{
    if (!span->sparse || hsri_layer_in(&span->dense_layers, layer))
        return;
    if (!span->prefill)
        rotate_rows(f, layer, span->row, span->n_rows);
    for (uint32_t i = 0; span->prefill && i < span->n_rows; i += HSRI_PICK_STRIDE)
        rotate_rows(f, layer, span->row + i, 1);
}

static void rotate(const hsri_forward *f, uint32_t layer)
{
    if (!f->rotate_votes)
        rotate_rows(f, layer, 0, f->batch.n_rows);
    for (uint32_t i = 0; f->rotate_votes && i < f->n_spans; i++)
        rotate_votes(f, layer, &f->spans[i]);
}

void hsri_forward_attend(const hsri_forward *f, uint32_t layer)
{
    copy_queries(f, layer);
    if (f->rotate)
        rotate(f, layer);
    for (uint32_t i = 0; i < f->n_spans && *f->status >= 0; i++) {
        const part p = part_of(f, &f->spans[i], layer);
        if (f->residency)
            f->residency->span(f->residency->self, f->spans[i].row, f->spans[i].n_rows, f->spans[i].first_pick);
        if (f->spans[i].sparse && !hsri_layer_in(&f->spans[i].dense_layers, layer))
            attend_sparse(&p);
        else
            attend_dense(&p);
    }
}
