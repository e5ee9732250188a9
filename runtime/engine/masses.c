/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/masses.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"
#include "engine/engine.h"

static bool remembers(const hsr_session *s) { return hsri_profile_remembers(s->profile); }

static uint64_t run_floats(const hsri_hparams *hp) { return (uint64_t)hp->n_layers * hp->n_kv_heads * HSRI_MASS_RUN; }
static uint64_t runs_of(uint64_t n_pages) { return hsri_div_up(n_pages, HSRI_MASS_RUN); }

uint64_t hsri_masses_bytes(const hsri_hparams *hp, uint64_t n_tokens)
{
    return 2 * runs_of(hsri_div_up(n_tokens, HSRI_PAGE_TOKENS)) * run_floats(hp) * sizeof(float);
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

/* Replace a table by a larger one; only the current one holds anything between steps. */
static hsr_status enlarge_table(hsr_session *s, uint32_t which, uint64_t n_runs, hsr_error *err)
{
    hsr_engine *e = s->engine;
    hsri_masses *m = &s->masses;
    const uint64_t bytes = run_floats(&s->engine->model->hp) * sizeof(float);
    uint32_t buf;

    HSRI_TRY(e->dev->alloc(e->dev, n_runs * bytes, &buf, err));
    hsr_status st = HSR_OK;
    if (which == m->current && m->n_known) {
        e->dev->copy(e->queue, (hsri_ref){ .buf = buf }, (hsri_ref){ .buf = m->tables[which] }, runs_of(m->n_known) * bytes);
        st = e->dev->wait(e->queue, err);
    }
    if (st < 0) {
        e->dev->free(e->dev, buf);
        return st;
    }
    if (m->tables[which])
        e->dev->free(e->dev, m->tables[which]);
    m->tables[which] = buf;
    return HSR_OK;
}

static hsr_status reserve_tables(hsr_session *s, uint64_t n_runs, hsr_error *err)
{
    if (n_runs <= s->masses.n_runs)
        return HSR_OK;
    HSRI_TRY(enlarge_table(s, 0, n_runs, err));
    HSRI_TRY(enlarge_table(s, 1, n_runs, err));
    s->masses.n_runs = n_runs;
    return HSR_OK;
}

/* A list that is in force moves along. */
static hsr_status reserve_list(hsr_session *s, uint64_t n_pages, hsr_error *err)
{
    hsr_engine *e = s->engine;
    hsri_masses *m = &s->masses;
    const hsri_hparams *hp = &e->model->hp;
    uint32_t buf;

    if (!m->wants)
        m->wants = hsri_new_array(hp->n_layers, sizeof *m->wants);
    if (!m->wants)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a history of attention");
    if (n_pages <= m->list_room)
        return HSR_OK;
    HSRI_TRY(e->dev->alloc(e->dev, hp->n_layers * (1 + n_pages * hp->n_kv_heads) * sizeof(uint32_t), &buf, err));
    if (m->list) {
        e->dev->copy(e->queue, (hsri_ref){ .buf = buf }, (hsri_ref){ .buf = m->list },
                     hp->n_layers * (1 + (uint64_t)m->stride * hp->n_kv_heads) * sizeof(uint32_t));
        hsr_status st = e->dev->wait(e->queue, err);
        e->dev->free(e->dev, st < 0 ? buf : m->list);
        HSRI_TRY(st);
    }
    m->list = buf;
    m->list_room = n_pages;
    return HSR_OK;
}

/* Pages of the longest list of any layer. */
static uint64_t most_forced(const hsr_session *s, const hsri_profile *p, uint64_t n_pages)
{
    const uint64_t selectable = hsri_selectable_units(n_pages, (uint32_t)s->opts.sink_size / HSRI_PAGE_TOKENS,
                                                      (uint32_t)s->opts.window_size / HSRI_PAGE_TOKENS);
    uint64_t most = 0;
    for (uint32_t i = 0; i < p->n_layers; i++)
        most = hsri_max(most, hsri_profile_forced(p, i, selectable));
    return most;
}

hsr_status hsri_masses_reserve(hsr_session *s, const hsri_profile *p, uint64_t n_tokens, hsr_error *err)
{
    uint64_t n_runs = 1;
    if (!hsri_profile_remembers(p))
        return HSR_OK;
    /* In powers of two, so that a growing session reserves seldom, but for no more than there can be. */
    while (n_runs * HSRI_MASS_RUN * HSRI_PAGE_TOKENS < n_tokens)
        n_runs *= 2;
    n_runs = hsri_min(n_runs, runs_of(hsri_div_up(s->context, HSRI_PAGE_TOKENS)));
    HSRI_TRY(reserve_tables(s, n_runs, err));
    return reserve_list(s, hsri_max(1, most_forced(s, p, n_runs * HSRI_MASS_RUN)), err);
}

void hsri_masses_destroy(hsr_session *s)
{
    hsri_device *dev = s->engine->dev;
    hsri_masses *m = &s->masses;
    for (uint32_t i = 0; i < 2; i++)
        if (m->tables[i])
            dev->free(dev, m->tables[i]);
    if (m->list)
        dev->free(dev, m->list);
    free(m->wants);
    *m = (hsri_masses){ 0 };
}

hsr_status hsri_masses_fork(const hsr_session *s, hsr_session *f, hsr_error *err)
{
    const hsri_masses *from = &s->masses;
    hsri_masses *to = &f->masses;
    hsr_engine *e = s->engine;
    const hsri_hparams *hp = &e->model->hp;

    if (from->n_runs == 0)
        return HSR_OK;
    HSRI_TRY(reserve_tables(f, from->n_runs, err));
    HSRI_TRY(reserve_list(f, from->list_room, err));
    e->dev->copy(e->queue, (hsri_ref){ .buf = to->tables[to->current] }, (hsri_ref){ .buf = from->tables[from->current] },
                 runs_of(from->n_known) * run_floats(&s->engine->model->hp) * sizeof(float));
    e->dev->copy(e->queue, (hsri_ref){ .buf = to->list }, (hsri_ref){ .buf = from->list },
                 hp->n_layers * (1 + (uint64_t)from->stride * hp->n_kv_heads) * sizeof(uint32_t));
    HSRI_TRY(e->dev->wait(e->queue, err));
    to->n_known = from->n_known;
    to->voted_end = from->voted_end;
    to->stride = from->stride;
    to->listed = from->listed;
    return HSR_OK;
}

void hsri_masses_cut(hsr_session *s, uint64_t n)
{
    hsri_masses *m = &s->masses;
    m->n_known = (uint32_t)hsri_min(m->n_known, hsri_div_up(n, HSRI_PAGE_TOKENS));
    m->voted_end = hsri_min(m->voted_end, n);
    m->listed = false;
}

hsr_status hsri_masses_read(const hsr_session *s, uint32_t layer, uint64_t first, uint64_t n, float *out, hsr_error *err)
{
    hsr_engine *e = s->engine;
    const hsri_masses *m = &s->masses;
    const hsri_hparams *hp = &e->model->hp;
    float run[HSRI_MASS_RUN];

    for (uint64_t page = first, end; page < first + n; page = end) {
        end = hsri_min(first + n, (page / HSRI_MASS_RUN + 1) * HSRI_MASS_RUN);
        for (uint32_t head = 0; head < hp->n_kv_heads; head++) {
            if (page < m->n_known) {
                const uint32_t start = (uint32_t)(page / HSRI_MASS_RUN * HSRI_MASS_RUN);
                const uint64_t at = hsri_mass_at(hp->n_layers, hp->n_kv_heads, layer, head, start);
                e->dev->copy_out(e->queue, run, (hsri_ref){ .buf = m->tables[m->current], .offset = at * sizeof *run }, sizeof run);
                HSRI_TRY(e->dev->wait(e->queue, err));
            }
            for (uint64_t p = page; p < end; p++)
                out[(p - first) * hp->n_kv_heads + head] = p < m->n_known ? run[p % HSRI_MASS_RUN] : 0.0f;
        }
    }
    return HSR_OK;
}

/* ---- which rows vote, and where lists are made ----------------------------------------------------------------- */

/* The append that holds pos; false: its token was sampled. */
static bool append_of(const hsr_session *s, uint64_t pos, uint64_t *first, uint64_t *end)
{
    *first = s->appended_first;
    for (size_t i = 0; i < s->n_appended; *first = s->appended[i++])
        if (pos < s->appended[i]) {
            *end = s->appended[i];
            return pos >= *first;
        }
    return false;
}

/* The first position of [pos, end) at which a list is made; end if there is none. */
static uint64_t next_list(const hsr_session *s, uint64_t pos, uint64_t first, uint64_t end)
{
    const uint64_t tail = hsri_max(first, (end - 1) / HSRI_PICK_ROWS * HSRI_PICK_ROWS);
    uint64_t next = pos >= end ? end : end - 1;

    if (pos <= tail)
        next = hsri_min(next, tail);
    if (s->opts.window_size <= (int32_t)HSRI_PAGE_TOKENS)
        next = hsri_min(next, hsri_round_up(pos, HSRI_PICK_ROWS));
    return pos == first ? pos : next;
}

uint64_t hsri_masses_stop(const hsr_session *s)
{
    uint64_t first, end;
    if (!remembers(s) || !append_of(s, s->n_computed, &first, &end))
        return UINT64_MAX;
    return hsri_min(end, next_list(s, s->n_computed + 1, first, end));
}

bool hsri_masses_votes(const hsr_session *s, uint64_t pos)
{
    uint64_t first, end;
    if (!remembers(s) || pos < s->masses.voted_end)
        return false;
    return !append_of(s, pos, &first, &end) || pos + 1 == end || pos % HSRI_PAGE_TOKENS == HSRI_PAGE_TOKENS - 1;
}

static bool makes_list(const hsr_session *s)
{
    uint64_t first, end;
    if (!s->masses.listed)
        return true;
    if (s->n_computed < s->masses.voted_end)
        return false;
    return !append_of(s, s->n_computed, &first, &end) || next_list(s, s->n_computed, first, end) == s->n_computed;
}

/* ---- steps ---------------------------------------------------------------------------------------------------- */

static void plan_list(hsr_session *s)
{
    const uint32_t sink = (uint32_t)s->opts.sink_size / HSRI_PAGE_TOKENS, window = (uint32_t)s->opts.window_size / HSRI_PAGE_TOKENS;
    const uint64_t selectable = hsri_selectable_units(s->n_computed / HSRI_PAGE_TOKENS, sink, window);
    hsri_masses *m = &s->masses;

    m->listed = false;
    m->stride = 0;
    for (uint32_t i = 0; i < s->profile->n_layers; i++) {
        m->wants[i] = hsri_profile_forced(s->profile, i, selectable);
        m->stride = (uint32_t)hsri_max(m->stride, m->wants[i]);
    }
    m->range = (hsri_mass_range){ { .buf = m->tables[m->current] }, m->n_known, sink, sink + (uint32_t)(selectable / HSRI_PAGE_UNITS) };
}

void hsri_masses_plan(hsr_session *s, uint32_t n_rows)
{
    hsri_masses *m = &s->masses;

    m->votes = m->lists = false;
    m->next_known = m->n_known;
    if (!remembers(s))
        return;
    for (uint32_t i = 0; i < n_rows && !m->votes; i++)
        m->votes = hsri_masses_votes(s, s->n_computed + i);
    m->lists = makes_list(s);
    if (m->lists)
        plan_list(s);
}

hsri_mass_row hsri_masses_vote(hsri_masses *m, uint32_t row, uint64_t pos)
{
    const hsri_mass_row vote = { row, m->next_known };
    m->next_known = (uint32_t)hsri_max(m->next_known, pos / HSRI_PAGE_TOKENS + 1);
    return vote;
}

hsri_ref hsri_masses_list(const hsr_session *s)
{
    return (hsri_ref){ .buf = s->masses.list, .offset = s->engine->model->hp.n_layers * sizeof(uint32_t) };
}

hsri_ref hsri_masses_table(const hsri_masses *m) { return (hsri_ref){ .buf = m->votes ? m->tables[1 - m->current] : 0 }; }

void hsri_masses_enqueue(hsr_session *s)
{
    hsr_engine *e = s->engine;
    hsri_masses *m = &s->masses;
    const hsri_ref wants = { .buf = m->list };

    if (m->lists && m->stride) {
        e->dev->copy_in(e->queue, wants, m->wants, e->model->hp.n_layers * sizeof *m->wants);
        e->dev->ops.top_pages(e->queue, &e->shape.view, &m->range, wants, m->stride, hsri_masses_list(s));
    }
    /* Rows add to a copy, which a step that fails leaves behind. */
    if (m->votes && m->n_known)
        e->dev->copy(e->queue, hsri_masses_table(m), (hsri_ref){ .buf = m->tables[m->current] },
                     runs_of(m->n_known) * run_floats(&s->engine->model->hp) * sizeof(float));
}

void hsri_masses_commit(hsr_session *s, uint64_t n)
{
    hsri_masses *m = &s->masses;

    if (!remembers(s))
        return;
    if (m->votes) {
        m->current = 1 - m->current;
        m->n_known = m->next_known;
    }
    m->listed = true;
    m->voted_end = hsri_max(m->voted_end, n);
}
