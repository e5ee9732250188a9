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
    float    *keys;         /* [n_layers][n_sources][n_kv_heads][d], not rotated */
    float    *values;
    float    *qkv;          /* staging of one layer and chunk: [rows][heads + 2 kv heads][d] */
    uint32_t *picks;        /* [rows]: source of each row */
    float    *inv_freq;
} filler;

static uint64_t kv_floats(const hsri_hparams *hp) { return (uint64_t)hp->n_kv_heads * hp->head_dim; }

/* ---- sources -------------------------------------------------------------------------------------------------- */

/* Undo the rotation of a key at `pos`. */
static void unrotate(const filler *f, float *key, uint64_t pos)
{
    const hsri_hparams *hp = &f->session->engine->model->hp;
    const uint32_t half = hp->rotary_dim / 2;
    for (uint32_t j = 0; j < half; j++) {
        const double angle = (double)pos * (double)f->inv_freq[j], scale = 1.0 / (double)hp->rope_attention_factor;
        const float c = (float)(cos(angle) * scale), s = (float)(sin(angle) * scale), a = key[j], b = key[j + half];
        key[j] = a * c + b * s;
        key[j + half] = b * c - a * s;
    }
}

static hsr_status read_sources(filler *f, hsr_error *err)
{
    hsr_session *s = f->session;
    hsr_engine *e = s->engine;
    const hsri_hparams *hp = &e->model->hp;
    const uint64_t width = kv_floats(hp);

    e->dev->copy_out(e->queue, f->inv_freq, (hsri_ref){ e->rope_buf, 0, s->rope_table * (hp->rotary_dim / 2) * sizeof(float) },
                     hp->rotary_dim / 2 * sizeof(float));
    HSRI_TRY(e->dev->wait(e->queue, err));
    const uint64_t run = hsri_min(s->n_computed, HSRI_PAGE_TOKENS);
    for (uint32_t i = 0; i < f->n_sources; i += (uint32_t)run) {
        const uint64_t first = hsri_rng_u64(f->seed, i) % (s->n_computed / run) * run;
        for (uint32_t j = 0; j < run; j++)
            f->sources[i + j] = (uint32_t)(first + j);
    }
    for (uint32_t layer = 0; layer < hp->n_layers; layer++)
        for (uint32_t i = 0; i < f->n_sources; i += (uint32_t)run) {
            const uint64_t at = (layer * (uint64_t)f->n_sources + i) * width;
            HSRI_TRY(hsri_session_observe(s, HSR_OBSERVE_KEYS, (int32_t)layer, f->sources[i], run, f->keys + at, err));
            HSRI_TRY(hsri_session_observe(s, HSR_OBSERVE_VALUES, (int32_t)layer, f->sources[i], run, f->values + at, err));
            for (uint64_t j = 0; j < run * hp->n_kv_heads; j++)
                unrotate(f, f->keys + at + j * hp->head_dim, f->sources[i + j / hp->n_kv_heads]);
        }
    return HSR_OK;
}

/* ---- appending ------------------------------------------------------------------------------------------------ */

/* Queries stay zero: nobody asks. */
static void stage_layer(filler *f, uint32_t layer, uint32_t n_rows)
{
    const hsri_hparams *hp = &f->session->engine->model->hp;
    const uint64_t width = kv_floats(hp), row_floats = (uint64_t)hp->n_heads * hp->head_dim + 2 * width;
    for (uint32_t row = 0; row < n_rows; row++) {
        float *to = f->qkv + row * row_floats + (uint64_t)hp->n_heads * hp->head_dim;
        const uint64_t from = (layer * (uint64_t)f->n_sources + f->picks[row]) * width;
        memcpy(to, f->keys + from, width * sizeof *to);
        memcpy(to + width, f->values + from, width * sizeof *to);
    }
}

static hsr_status append_rows(filler *f, uint32_t n_rows, hsr_error *err)
{
    hsr_session *s = f->session;
    hsr_engine *e = s->engine;
    hsri_step *t = &e->step;
    const hsri_hparams *hp = &e->model->hp;
    const uint64_t row_floats = (uint64_t)(hp->n_heads + 2 * hp->n_kv_heads) * hp->head_dim;
    const hsri_batch batch = { t->d_rows, t->d_seqs, n_rows, 1 };
    const hsri_rope rope = { e->scratch.cos_sin, hp->rotary_dim };
    const hsri_ref none = { 0 };

    hsri_cache_fill_seq(s->cache, &t->seqs[0]);
    t->seqs[0].rope_table = s->rope_table;
    e->dev->copy_in(e->queue, t->d_seqs, t->seqs, sizeof *t->seqs);
    e->dev->copy_in(e->queue, t->d_rows, t->rows, n_rows * sizeof *t->rows);
    e->dev->ops.rope_table(e->queue, &batch, (hsri_ref){ .buf = e->rope_buf }, hp->rotary_dim, hp->rope_attention_factor, rope.cos_sin);
    for (uint32_t layer = 0; layer < hp->n_layers; layer++) {
        stage_layer(f, layer, n_rows);
        e->dev->copy_in(e->queue, e->scratch.compound, f->qkv, n_rows * row_floats * sizeof *f->qkv);
        e->dev->ops.rope_append(e->queue, &batch, &e->shape.view, layer, hp->n_heads, e->scratch.compound, none, none, hp->rms_norm_eps,
                                &rope, e->scratch.queries);
        HSRI_TRY(e->dev->wait(e->queue, err));   /* the staging is used again */
    }
    return HSR_OK;
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

    f->sources = hsri_new_array(f->n_sources, sizeof *f->sources);
    f->keys = hsri_new_array(hp->n_layers * (uint64_t)f->n_sources * width, sizeof *f->keys);
    f->values = hsri_new_array(hp->n_layers * (uint64_t)f->n_sources * width, sizeof *f->values);
    f->qkv = hsri_new_array(rows * ((uint64_t)hp->n_heads * hp->head_dim + 2 * width), sizeof *f->qkv);
    f->picks = hsri_new_array(rows, sizeof *f->picks);
    f->inv_freq = hsri_new_array(hp->rotary_dim / 2 + 1, sizeof *f->inv_freq);
    if (!f->sources || !f->keys || !f->values || !f->qkv || !f->picks || !f->inv_freq)
        return hsri_fail(err, HSR_E_NOMEM, "no memory to sample keys and values");
    return HSR_OK;
}

static hsr_status run(filler *f, uint64_t n, hsr_error *err)
{
    hsr_session *s = f->session;
    hsr_engine *e = s->engine;
    const uint64_t end = s->n_computed + n;

    HSRI_TRY(allocate(f, err));
    HSRI_TRY(read_sources(f, err));
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
    free(f.sources);
    free(f.keys);
    free(f.values);
    free(f.qkv);
    free(f.picks);
    free(f.inv_freq);
    return st;
}
