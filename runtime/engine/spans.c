/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/spans.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"

/* Votes that one span holds at least: those of a prompt run, or as many decode rows. */
#define SPAN_VOTES (HSRI_PICK_ROWS / HSRI_PICK_STRIDE)

/* How a row attends, and how many rows from it on do so together: 128 for a prompt run, else 1. */
typedef struct row_mode {
    bool           sparse, prefill;
    uint32_t       n_rows;
    uint32_t       units;          /* the largest budget over layers */
    hsri_layer_set dense_layers;
} row_mode;

/* ---- modes ---------------------------------------------------------------------------------------------------- */

static uint32_t window_pages(const hsr_session *s) { return (uint32_t)s->opts.window_size / HSRI_PAGE_TOKENS; }
static uint32_t sink_pages(const hsr_session *s) { return (uint32_t)s->opts.sink_size / HSRI_PAGE_TOKENS; }

/* Is the 128-token run that holds pos whole inside one append? The last token of an append never counts: a request may compute it
 * again alone, and then it must attend as before. */
static bool in_run(const hsr_session *s, uint64_t pos)
{
    const uint64_t run = pos / HSRI_PICK_ROWS * HSRI_PICK_ROWS;
    uint64_t start = s->appended_first;

    for (size_t i = 0; i < s->n_appended; start = s->appended[i++])
        if (pos < s->appended[i])
            return run >= start && run + HSRI_PICK_ROWS < s->appended[i];
    return false;
}

/* Sparse in the layers where something would be left out; a list of everything is dense attention. */
static void choose_layers(const hsr_session *s, uint64_t pos, row_mode *m)
{
    const hsri_profile *p = s->profile;
    const uint64_t selectable = hsri_selectable_units(pos / HSRI_PAGE_TOKENS, sink_pages(s), window_pages(s));

    m->dense_layers = p->dense_layers;
    for (uint32_t i = 0; i < p->n_layers; i++) {
        const uint32_t budget = hsri_profile_selects(p, i, m->prefill, selectable);
        if (budget >= selectable)
            hsri_layer_add(&m->dense_layers, i);
        if (hsri_layer_in(&m->dense_layers, i))
            continue;
        m->sparse = true;
        m->units = (uint32_t)hsri_max(m->units, budget);
    }
}

static row_mode mode_of(const hsr_session *s, uint64_t pos)
{
    const hsri_profile *p = s->profile;
    row_mode m = { .n_rows = 1 };

    if (!p->sparse)
        return m;
    m.prefill = window_pages(s) > 1 && in_run(s, pos);
    if (m.prefill ? p->prefill_units == 0 || pos < hsri_round_up(p->prefill_dense_below, HSRI_PICK_ROWS) : pos < p->dense_below)
        return m;
    choose_layers(s, m.prefill ? pos / HSRI_PICK_ROWS * HSRI_PICK_ROWS : pos, &m);
    m.n_rows = m.sparse && m.prefill ? HSRI_PICK_ROWS : 1;
    return m;
}

uint32_t hsri_spans_rows(const hsr_session *s, uint64_t n, uint32_t room)
{
    n = hsri_min(hsri_min(n, room), hsri_masses_stop(s) - s->n_computed);
    if (!s->profile->sparse || s->profile->prefill_units == 0 || n == 0)
        return (uint32_t)n;
    const uint64_t end = s->n_computed + n;
    if (end == s->target || end % HSRI_PICK_ROWS == 0 || mode_of(s, end).n_rows == 1)
        return (uint32_t)n;
    const uint64_t run = end / HSRI_PICK_ROWS * HSRI_PICK_ROWS;
    if (run > s->n_computed)
        return (uint32_t)(run - s->n_computed);
    return room >= HSRI_PICK_ROWS ? HSRI_PICK_ROWS : 0;
}

/* ---- spans ---------------------------------------------------------------------------------------------------- */

/* What the span would need with one more pick fits the room. */
static bool fits(const hsr_engine *e, const hsri_span *span, const row_mode *m)
{
    const hsri_hparams *hp = &e->model->hp;
    const uint32_t n_rows = span->n_rows + m->n_rows, n_picks = span->n_picks + 1, n_votes = m->prefill ? n_picks * SPAN_VOTES : n_picks;
    const uint32_t units = (uint32_t)hsri_max(span->max_units, m->units);

    /* One bridge page at a time: it may have to be brought back. */
    if (e->tiers && m->prefill && span->n_picks > 0)
        return false;
    return (uint64_t)n_picks * hp->n_kv_heads * units <= e->room.n_units &&
           (uint64_t)n_rows * span->n_fixed * hp->n_heads * (hp->head_dim + 2) <= e->scratch.part_floats &&
           hsri_select_scratch(n_votes, n_picks, hp->n_heads, hp->n_kv_heads, hp->head_dim, span->max_pos / HSRI_PAGE_TOKENS + 1,
                               e->room.clusters) <=
               e->room.scratch_bytes;
}

/* Rows among those of the mode, from pos on, that add to the mass table. */
static uint32_t count_votes(const hsr_session *s, const row_mode *m, uint64_t pos)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_rows; i++)
        n += hsri_masses_votes(s, pos + i);
    return n;
}

static bool hears(const hsr_engine *e, const hsri_span *last, uint64_t max_pos, uint32_t n_votes)
{
    const uint64_t pages = hsri_max(last->mass_pages, max_pos / HSRI_PAGE_TOKENS + 1);
    return n_votes == 0 || ((uint64_t)last->n_mass_rows + n_votes) * e->model->hp.n_heads * pages <= e->room.n_parts;
}

static bool joins(const hsr_engine *e, const hsri_span *last, const row_mode *m, uint64_t pos, uint32_t n_fixed, uint32_t n_votes)
{
    if (last->sparse != m->sparse || !hears(e, last, pos + m->n_rows - 1, n_votes))
        return false;
    if (!m->sparse)
        return true;
    hsri_span grown = *last;
    grown.max_pos = (uint32_t)hsri_max(grown.max_pos, pos + m->n_rows - 1);
    grown.n_fixed = (uint32_t)hsri_max(grown.n_fixed, n_fixed);
    return last->prefill == m->prefill && memcmp(&last->dense_layers, &m->dense_layers, sizeof m->dense_layers) == 0 && fits(e, &grown, m);
}

static uint32_t fixed_groups(const hsr_session *s)
{
    const uint32_t run = HSRI_GROUP_TOKENS / HSRI_PAGE_TOKENS;
    return (uint32_t)(hsri_div_up(sink_pages(s), run) + 1 + hsri_div_up(window_pages(s), run));
}

/* Rows [row, row + m->n_rows) of the step, at positions from pos on. */
static void add_rows(hsr_engine *e, hsr_session *s, const row_mode *m, uint32_t row, uint64_t pos)
{
    hsri_spans *t = &e->spans;
    const uint32_t n_votes = count_votes(s, m, pos);
    const uint32_t n_fixed = m->sparse ? fixed_groups(s) : 0;

    if (t->n_spans == 0 || !joins(e, &t->spans[t->n_spans - 1], m, pos, n_fixed, n_votes))
        t->spans[t->n_spans++] = (hsri_span){
            .row = row, .sparse = m->sparse, .prefill = m->sparse && m->prefill, .observed = m->sparse && !m->prefill,
            .first_pick = t->n_picks, .first_mass_row = t->n_mass_rows, .dense_layers = m->dense_layers,
        };
    hsri_span *span = &t->spans[t->n_spans - 1];
    span->max_pos = (uint32_t)hsri_max(span->max_pos, pos + m->n_rows - 1);
    if (m->sparse) {
        t->picks[t->n_picks++] = (hsri_pick){ span->n_rows, m->n_rows };
        for (uint32_t i = 0; i < m->n_rows; i++)
            t->pick_of[row + i] = span->n_picks;
        span->n_picks++;
        span->bridge_page = m->prefill ? (uint32_t)(pos / HSRI_PAGE_TOKENS) + 1 - window_pages(s) : 0;
        span->n_fixed = (uint32_t)hsri_max(span->n_fixed, n_fixed);
        span->max_units = (uint32_t)hsri_max(span->max_units, m->units);
    }
    for (uint32_t i = 0; i < m->n_rows && n_votes; i++)
        if (hsri_masses_votes(s, pos + i))
            t->mass_rows[t->n_mass_rows++] = hsri_masses_vote(&s->masses, span->n_rows + i, pos + i);
    span->n_mass_rows += n_votes;
    if (n_votes)
        span->mass_pages = (uint32_t)hsri_max(span->mass_pages, (pos + m->n_rows - 1) / HSRI_PAGE_TOKENS + 1);
    span->n_rows += m->n_rows;
}

/* A token by itself: sampled, or the only one of its append. Rows of a prompt always wait for their pages. */
static bool alone(const hsri_part *part)
{
    const hsr_session *s = part->session;
    return part->n_rows == 1 && (s->n_appended == 0 || s->appended[0] - s->appended_first == 1);
}

/* Does its row note what it finds, and guess by what the last one noted? As long as everything is in memory there is no use in that. */
static bool foresees(const hsr_engine *e, const hsri_part *part)
{
    return part->session->scan_buf && alone(part) && hsri_tiers_must_hold(e->tiers);
}

/* Settings of every part in every layer, of decode rows and of prompt runs. */
static void fill_settings(hsr_engine *e)
{
    const hsri_calibration *c = e->model->calibration;
    const uint32_t n_layers = e->model->hp.n_layers, n_parts = e->step.n_parts;

    for (int prefill = 0; prefill < 2; prefill++)
        for (uint32_t layer = 0; layer < n_layers; layer++)
            for (uint32_t i = 0; i < n_parts; i++) {
                const hsri_part *part = &e->step.parts[i];
                const hsr_session *s = part->session;
                const hsri_profile *p = s->profile;
                hsri_sparse *to = &e->spans.settings[(prefill * n_layers + layer) * n_parts + i];
                *to = (hsri_sparse){ 0 };
                if (p->sparse)
                    hsri_profile_fill(p, layer, prefill, !c || c->virtual_helps[layer], to);
                if (hsri_profile_remembers(p) && !prefill) {
                    to->n_forced = s->masses.stride;
                    to->forced = hsri_masses_list(s);
                }
                if (!alone(part))
                    to->flags &= ~HSRI_SPARSE_ESTIMATE;
                if (!prefill && foresees(e, part)) {
                    to->scan_pages = s->scan_pages;
                    to->scan = (hsri_ref){ .buf = s->scan_buf };
                }
            }
}

void hsri_spans_build(hsr_engine *e)
{
    hsri_spans *t = &e->spans;
    t->n_spans = t->n_picks = t->n_mass_rows = 0;
    t->any_sparse = false;
    for (uint32_t i = 0; i < e->step.n_parts; i++) {
        const hsri_part *part = &e->step.parts[i];
        hsr_session *s = part->session;
        hsri_masses_plan(s, part->n_rows);
        t->mass_tables[i] = hsri_masses_table(&s->masses);
        for (uint32_t row = 0; row < part->n_rows; ) {
            const row_mode m = mode_of(s, s->n_computed + row);
            add_rows(e, s, &m, part->first_row + row, s->n_computed + row);
            t->any_sparse |= m.sparse;
            row += m.n_rows;
        }
    }
    if (!t->any_sparse)
        return;
    fill_settings(e);
    for (uint32_t i = 0; i < t->n_spans; i++) {
        hsri_span *span = &t->spans[i];
        for (uint32_t row = span->row; row < span->row + span->n_rows && span->observed; row++)
            span->foreseen |= foresees(e, &e->step.parts[e->step.rows[row].seq]);
    }
}

void hsri_spans_enqueue(hsr_engine *e)
{
    hsri_spans *t = &e->spans;
    const hsri_step *step = &e->step;
    for (uint32_t i = 0; i < step->n_parts; i++)
        hsri_masses_enqueue(step->parts[i].session);
    if (t->n_mass_rows) {
        e->dev->copy_in(e->queue, t->d_mass_rows, t->mass_rows, t->n_mass_rows * sizeof *t->mass_rows);
        e->dev->copy_in(e->queue, t->d_mass_tables, t->mass_tables, step->n_parts * sizeof *t->mass_tables);
    }
    if (!t->any_sparse)
        return;
    e->dev->copy_in(e->queue, t->d_picks, t->picks, t->n_picks * sizeof *t->picks);
    e->dev->copy_in(e->queue, t->d_pick_of, t->pick_of, step->n_rows * sizeof *t->pick_of);
    e->dev->copy_in(e->queue, t->d_settings, t->settings, 2ull * e->model->hp.n_layers * step->n_parts * sizeof *t->settings);
}

/* ---- what was covered ----------------------------------------------------------------------------------------- */

void hsri_spans_collect(hsr_engine *e)
{
    hsri_spans *t = &e->spans;
    const hsri_hparams *hp = &e->model->hp;
    t->observed = false;
    for (uint32_t i = 0; i < t->n_spans; i++)
        t->observed |= t->spans[i].observed;
    if (!t->observed)
        return;
    const uint64_t rows = (uint64_t)hp->n_layers * e->step.n_rows;
    e->dev->copy_out(e->queue, t->covered, e->room.covered, rows * hp->n_heads * sizeof *t->covered);
    e->dev->copy_out(e->queue, t->attended, e->room.attended, rows * hp->n_kv_heads * sizeof *t->attended);
}

/* Mean over the layers in which the row was sparse. */
static void settle_row(hsr_engine *e, const hsri_span *span, uint32_t row)
{
    const hsri_hparams *hp = &e->model->hp;
    hsr_session *s = e->step.parts[e->step.rows[row].seq].session;
    double covered = 0, attended = 0;
    uint32_t n_layers = 0;

    for (uint32_t layer = 0; layer < hp->n_layers; layer++) {
        if (hsri_layer_in(&span->dense_layers, layer))
            continue;
        const uint64_t at = (uint64_t)layer * e->step.n_rows + row;
        for (uint32_t h = 0; h < hp->n_heads; h++)
            covered += (double)e->spans.covered[at * hp->n_heads + h] / hp->n_heads;
        for (uint32_t h = 0; h < hp->n_kv_heads; h++)
            attended += (double)e->spans.attended[at * hp->n_kv_heads + h] * HSRI_UNIT_TOKENS / hp->n_kv_heads;
        n_layers++;
    }
    const uint64_t pos = e->step.rows[row].pos, q = pos / HSRI_PAGE_TOKENS;
    const uint64_t fixed = pos + 1 - hsri_selectable_units(q, sink_pages(s), window_pages(s)) * HSRI_UNIT_TOKENS;
    s->covered = covered / n_layers;
    s->covered_sum += s->covered;
    s->attended = attended / n_layers + (double)fixed;
    s->sparse_rows++;
}

void hsri_spans_settle(hsr_engine *e)
{
    for (uint32_t i = 0; i < e->spans.n_spans && e->spans.observed; i++) {
        const hsri_span *span = &e->spans.spans[i];
        for (uint32_t row = span->row; row < span->row + span->n_rows && span->observed; row++)
            settle_row(e, span, row);
    }
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

/* Arrays whose size the engine's options fix. */
static void lay_out(hsr_engine *e, uint64_t rows, uint64_t parts, hsri_ref *next)
{
    const hsri_hparams *hp = &e->model->hp;
    hsri_spans *t = &e->spans;
    t->d_picks           = hsri_carve(next, rows * sizeof *t->picks);
    t->d_pick_of         = hsri_carve(next, rows * sizeof *t->pick_of);
    t->d_settings        = hsri_carve(next, 2 * hp->n_layers * parts * sizeof *t->settings);
    t->d_mass_rows       = hsri_carve(next, rows * sizeof *t->mass_rows);
    t->d_mass_tables     = hsri_carve(next, parts * sizeof *t->mass_tables);
    e->room.counts       = hsri_carve(next, rows * hp->n_kv_heads * sizeof(uint32_t));
    e->room.virtual_part = hsri_carve(next, rows * hp->n_heads * (hp->head_dim + 2ull) * sizeof(float));
    e->room.covered      = hsri_carve(next, hp->n_layers * rows * hp->n_heads * sizeof(float));
    e->room.attended     = hsri_carve(next, hp->n_layers * rows * hp->n_kv_heads * sizeof(uint32_t));
}

hsr_status hsri_spans_create(hsr_engine *e, hsr_error *err)
{
    const hsri_hparams *hp = &e->model->hp;
    hsri_spans *t = &e->spans;
    const uint64_t rows = (uint64_t)e->opts.max_batch, parts = hsri_min(rows, (uint64_t)e->opts.max_sessions);

    t->spans    = hsri_new_array(rows, sizeof *t->spans);
    t->picks    = hsri_new_array(rows, sizeof *t->picks);
    t->pick_of  = hsri_new_array(rows, sizeof *t->pick_of);
    t->settings = hsri_new_array(2 * hp->n_layers * parts, sizeof *t->settings);
    t->covered  = hsri_new_array(hp->n_layers * rows * hp->n_heads, sizeof *t->covered);
    t->attended = hsri_new_array(hp->n_layers * rows * hp->n_kv_heads, sizeof *t->attended);
    t->mass_rows   = hsri_new_array(rows, sizeof *t->mass_rows);
    t->mass_tables = hsri_new_array(parts, sizeof *t->mass_tables);
    if (!t->spans || !t->picks || !t->pick_of || !t->settings || !t->covered || !t->attended || !t->mass_rows || !t->mass_tables)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for the selections of %llu rows", (unsigned long long)rows);
    return HSR_OK;
}

/* The device's side of them, once the first sparse profile asks for it. */
static hsr_status create_arrays(hsr_engine *e, hsr_error *err)
{
    const uint64_t rows = (uint64_t)e->opts.max_batch, parts = hsri_min(rows, (uint64_t)e->opts.max_sessions);
    hsri_ref end = { 0 };
    uint32_t buf;

    if (e->spans.buf)
        return HSR_OK;
    lay_out(e, rows, parts, &end);
    HSRI_TRY(e->dev->alloc(e->dev, end.offset, &buf, err));
    hsri_ref start = { .buf = buf };
    lay_out(e, rows, parts, &start);
    e->spans.buf = buf;
    return HSR_OK;
}

void hsri_spans_destroy(hsr_engine *e)
{
    hsri_spans *t = &e->spans;
    free(t->spans);
    free(t->picks);
    free(t->pick_of);
    free(t->settings);
    free(t->covered);
    free(t->attended);
    free(t->mass_rows);
    free(t->mass_tables);
}

/* A larger buffer in place of *ref. */
static hsr_status enlarge(hsr_engine *e, hsri_ref *ref, uint64_t *have, uint64_t need, uint64_t size, hsr_error *err)
{
    uint32_t buf;
    if (need <= *have)
        return HSR_OK;
    HSRI_TRY(e->dev->alloc(e->dev, need * size, &buf, err));
    if (ref->buf)
        e->dev->free(e->dev, ref->buf);
    *ref = (hsri_ref){ .buf = buf };
    *have = need;
    return HSR_OK;
}

/* Where the session's rows note their scans, if they are to. What was noted for another profile is forgotten. */
static hsr_status reserve_scan(hsr_engine *e, const hsri_profile *p, hsr_session *s, hsr_error *err)
{
    const hsri_hparams *hp = &e->model->hp;
    const bool guesses = e->tiers && e->opts.prefetch_sources & HSR_PREFETCH_QUERY && e->opts.prefetch_depth > 0;
    const uint32_t n_pages = guesses ? hsri_profile_scan(p) : 0;
    uint32_t buf = 0;
    if (n_pages == s->scan_pages)
        return HSR_OK;
    if (n_pages)
        HSRI_TRY(e->dev->alloc(e->dev, hsri_scan_words(hp->n_layers, hp->n_kv_heads, hp->n_heads, n_pages) * sizeof(uint32_t), &buf, err));
    hsri_spans_forget(s);
    s->scan_buf = buf;
    s->scan_pages = n_pages;
    return HSR_OK;
}

void hsri_spans_forget(hsr_session *s)
{
    if (s->scan_buf)
        s->engine->dev->free(s->engine->dev, s->scan_buf);
    s->scan_buf = s->scan_pages = 0;
}

hsr_status hsri_spans_reserve(hsr_engine *e, const hsri_profile *p, hsr_session *s, uint64_t n_tokens, hsr_error *err)
{
    const hsri_hparams *hp = &e->model->hp;
    if (!p->sparse)
        return HSR_OK;
    HSRI_TRY(reserve_scan(e, p, s, err));
    /* In powers of two, so that a growing session reserves seldom. */
    uint64_t pages = 64;
    while (pages * HSRI_PAGE_TOKENS < n_tokens)
        pages *= 2;
    const uint64_t selectable = hsri_selectable_units(pages, sink_pages(s), window_pages(s));
    uint64_t units = p->prefill_units;
    for (uint32_t i = 0; i < p->n_layers; i++)
        units = hsri_max(units, hsri_profile_selects(p, i, false, selectable));
    units = hsri_min(units, pages * HSRI_PAGE_UNITS);
    e->room.clusters |= s->index_shape.clusters != 0;
    const uint64_t bytes = hsri_select_scratch(SPAN_VOTES, SPAN_VOTES, hp->n_heads, hp->n_kv_heads, hp->head_dim, (uint32_t)pages,
                                                   e->room.clusters);

    HSRI_TRY(create_arrays(e, err));
    HSRI_TRY(enlarge(e, &e->room.scratch, &e->room.scratch_bytes, bytes, 1, err));
    if (hsri_profile_remembers(p))
        HSRI_TRY(enlarge(e, &e->room.parts, &e->room.n_parts, SPAN_VOTES * hp->n_heads * pages, 2 * sizeof(float), err));
    return enlarge(e, &e->room.units, &e->room.n_units, SPAN_VOTES * hp->n_kv_heads * units, sizeof(uint32_t), err);
}
