/* SPDX-License-Identifier: Apache-2.0 */
/* Synthetic context: keys and values sampled from what the session really computed, turned to new positions and appended through
 * the same pages, seals and tiers as computed ones. For measuring capacity and speed at lengths whose prefill would take hours;
 * what the model says afterwards means nothing. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/rng.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/spans.h"

/* Pages of tokens that are sampled from: enough that what is appended varies, few enough to keep in memory. */
#define SOURCE_PAGES 16u

typedef struct filler {
    hsr_session *session;
    uint64_t  seed;
    uint32_t  n_sources;
    uint32_t *sources;      /* positions, [n_sources] */
    float    *angles;       /* to undo the rotation at a source: cosines and sines, [n_sources][2][rotary_dim / 2] */
    float    *keys;         /* of one layer: [n_sources][n_kv_heads][d], not rotated */
    float    *values;
    uint32_t *picks;        /* [rows of a step]: source of each row */
    uint32_t  buf;          /* on the device: keys and values, as layers[n_layers][n_sources][2][n_kv_heads][d], then picks */
    hsri_ref  layers, d_picks;
} filler;

static uint64_t kv_floats(const hsri_hparams *hp) { return (uint64_t)hp->n_kv_heads * hp->head_dim; }

static hsri_ref sources_of(const filler *f, uint32_t layer)
{
    return hsri_at(f->layers, layer * f->n_sources * 2 * kv_floats(&f->session->engine->model->hp) * sizeof(float));
}

/* ---- sources -------------------------------------------------------------------------------------------------- */

/* Runs of whole pages, so that few pages are read. */
static uint64_t run_of(const filler *f) { return hsri_min(f->session->n_computed, HSRI_PAGE_TOKENS); }

static void choose_sources(filler *f)
{
    const uint64_t run = run_of(f);
    for (uint32_t i = 0; i < f->n_sources; i += (uint32_t)run) {
        const uint64_t first = hsri_rng_u64(f->seed, i) % (f->session->n_computed / run) * run;
        for (uint32_t j = 0; j < run; j++)
            f->sources[i + j] = (uint32_t)(first + j);
    }
}

static hsr_status find_angles(filler *f, hsr_error *err)
{
    hsr_session *s = f->session;
    hsr_engine *e = s->engine;
    const hsri_hparams *hp = &e->model->hp;
    const uint32_t half = hp->rotary_dim / 2;
    const double scale = 1.0 / (double)hp->rope_attention_factor;
    float *inv_freq = f->keys;      /* not needed yet */

    e->dev->copy_out(e->queue, inv_freq, (hsri_ref){ e->rope_buf, 0, s->rope_table * half * sizeof(float) }, half * sizeof(float));
    HSRI_TRY(e->dev->wait(e->queue, err));
    for (uint32_t i = 0; i < f->n_sources; i++)
        for (uint32_t j = 0; j < half; j++) {
            const double angle = (double)f->sources[i] * (double)inv_freq[j];
            f->angles[(2ull * i) * half + j] = (float)(cos(angle) * scale);
            f->angles[(2ull * i + 1) * half + j] = (float)(sin(angle) * scale);
        }
    return HSR_OK;
}

/* Undo the rotation of a key of source i. */
static void unrotate(const filler *f, uint32_t i, float *key)
{
    const uint32_t half = f->session->engine->model->hp.rotary_dim / 2;
    const float *cosines = f->angles + 2ull * i * half, *sines = cosines + half;
    for (uint32_t j = 0; j < half; j++) {
        const float a = key[j], b = key[j + half];
        key[j] = a * cosines[j] + b * sines[j];
        key[j + half] = b * cosines[j] - a * sines[j];
    }
}

static hsr_status read_sources(filler *f, uint32_t layer, hsr_error *err)
{
    hsr_session *s = f->session;
    hsr_engine *e = s->engine;
    const hsri_hparams *hp = &e->model->hp;
    const uint64_t width = kv_floats(hp), run = run_of(f), bytes = width * sizeof(float);
    const hsri_ref to = sources_of(f, layer);

    for (uint32_t i = 0; i < f->n_sources; i += (uint32_t)run)
        HSRI_TRY(hsri_session_read(s, layer, f->sources[i], run, f->keys + i * width, f->values + i * width, err));
    for (uint32_t i = 0; i < f->n_sources; i++) {
        for (uint32_t head = 0; head < hp->n_kv_heads; head++)
            unrotate(f, i, f->keys + i * width + (uint64_t)head * hp->head_dim);
        e->dev->copy_in(e->queue, hsri_at(to, 2 * i * bytes), f->keys + i * width, bytes);
        e->dev->copy_in(e->queue, hsri_at(to, (2 * i + 1) * bytes), f->values + i * width, bytes);
    }
    return e->dev->wait(e->queue, err);
}

/* ---- appending ------------------------------------------------------------------------------------------------ */

/* Rows without queries: nobody asks. */
static hsr_status append_rows(filler *f, uint32_t n_rows, hsr_error *err)
{
    hsr_session *s = f->session;
    hsr_engine *e = s->engine;
    hsri_step *t = &e->step;
    const hsri_hparams *hp = &e->model->hp;
    const hsri_batch batch = { t->d_rows, t->d_seqs, n_rows, 1 };
    const hsri_rope rope = { e->scratch.cos_sin, hp->rotary_dim };
    const hsri_ref none = { 0 }, rows = e->scratch.compound;

    hsri_cache_fill_seq(s->cache, &t->seqs[0]);
    t->seqs[0].rope_table = s->rope_table;
    e->dev->copy_in(e->queue, t->d_seqs, t->seqs, sizeof *t->seqs);
    e->dev->copy_in(e->queue, t->d_rows, t->rows, n_rows * sizeof *t->rows);
    e->dev->copy_in(e->queue, f->d_picks, f->picks, n_rows * sizeof *f->picks);
    e->dev->ops.rope_table(e->queue, &batch, (hsri_ref){ .buf = e->rope_buf }, hp->rotary_dim, hp->rope_attention_factor, rope.cos_sin);
    for (uint32_t layer = 0; layer < hp->n_layers; layer++) {
        e->dev->ops.gather_rows(e->queue, sources_of(f, layer), (uint32_t)(2 * kv_floats(hp)), f->d_picks, n_rows, rows);
        e->dev->ops.rope_append(e->queue, &batch, &e->shape.view, layer, 0, rows, none, none, hp->rms_norm_eps, &rope, e->scratch.queries);
    }
    return e->dev->wait(e->queue, err);
}

/* One chunk: a step that computes nothing. */
static hsr_status fill_chunk(filler *f, uint32_t n_rows, hsr_error *err)
{
    hsr_session *s = f->session;
    hsri_step *t = &s->engine->step;

    for (uint32_t i = 0; i < n_rows; i++) {
        f->picks[i] = (uint32_t)(hsri_rng_u64(f->seed ^ 0x5f696c6cu, s->n_computed + i) % f->n_sources);
        t->rows[i] = (hsri_row){ 0, (uint32_t)(s->n_computed + i) };
        s->ids[s->n_computed + i] = s->ids[f->sources[f->picks[i]]];
    }
    hsr_status st = hsri_cache_prepare(s->cache, s->engine->queue, s->n_computed + n_rows, err);
    if (st == HSR_OK)
        st = append_rows(f, n_rows, err);
    else
        s->engine->dev->wait(s->engine->queue, NULL);
    if (st == HSR_OK)
        st = hsri_cache_commit(s->cache, s->n_computed + n_rows, err);
    if (st < 0) {
        hsri_cache_truncate(s->cache, s->n_computed, NULL);
        return st;
    }
    s->n_computed += n_rows;
    s->n_tokens = s->target = s->n_computed;
    return HSR_OK;
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static hsr_status allocate(filler *f, hsr_error *err)
{
    const hsr_engine *e = f->session->engine;
    const hsri_hparams *hp = &e->model->hp;
    const uint64_t width = kv_floats(hp), rows = (uint64_t)e->opts.chunk_tokens;
    hsri_ref end = { 0 };

    f->sources = hsri_new_array(f->n_sources, sizeof *f->sources);
    f->angles = hsri_new_array((uint64_t)f->n_sources * hp->rotary_dim + 1, sizeof *f->angles);
    f->keys = hsri_new_array(hsri_max(f->n_sources * width, hp->rotary_dim), sizeof *f->keys);
    f->values = hsri_new_array(f->n_sources * width, sizeof *f->values);
    f->picks = hsri_new_array(rows, sizeof *f->picks);
    if (!f->sources || !f->angles || !f->keys || !f->values || !f->picks)
        return hsri_fail(err, HSR_E_NOMEM, "no memory to sample keys and values");
    f->layers = hsri_carve(&end, hp->n_layers * (uint64_t)f->n_sources * 2 * width * sizeof(float));
    f->d_picks = hsri_carve(&end, rows * sizeof *f->picks);
    HSRI_TRY(e->dev->alloc(e->dev, end.offset, &f->buf, err));
    f->layers.buf = f->d_picks.buf = f->buf;
    return HSR_OK;
}

static hsr_status run(filler *f, uint64_t n, hsr_error *err)
{
    hsr_session *s = f->session;
    hsr_engine *e = s->engine;
    const uint64_t end = s->n_computed + n;

    HSRI_TRY(allocate(f, err));
    choose_sources(f);
    HSRI_TRY(find_angles(f, err));
    for (uint32_t layer = 0; layer < e->model->hp.n_layers; layer++)
        HSRI_TRY(read_sources(f, layer, err));
    while (s->n_computed < end) {
        uint64_t rows = hsri_min(hsri_min(end - s->n_computed, (uint64_t)e->opts.chunk_tokens), (uint64_t)e->opts.max_batch);
        HSRI_TRY(fill_chunk(f, (uint32_t)hsri_min(rows, hsri_cache_step_limit(s->cache)), err));
    }
    return HSR_OK;
}

hsr_status hsri_session_fill(hsr_session *s, uint64_t n, uint64_t seed, hsr_error *err)
{
    filler f = { .session = s, .seed = seed, .n_sources = SOURCE_PAGES * HSRI_PAGE_TOKENS };
    if (s->n_computed < HSRI_PAGE_TOKENS)
        f.n_sources = (uint32_t)s->n_computed;
    fenv_t host;

    fegetenv(&host);
    fesetenv(FE_DFL_ENV);
    hsr_status st = run(&f, n, err);
    fesetenv(&host);
    if (f.buf != 0) {
        s->engine->dev->wait(s->engine->queue, NULL);   /* a failure may have left operations that read it */
        s->engine->dev->free(s->engine->dev, f.buf);
    }
    free(f.sources);
    free(f.angles);
    free(f.keys);
    free(f.values);
    free(f.picks);
    return st;
}
