/* SPDX-License-Identifier: Apache-2.0 */
/* One forward pass: what every decoder does around and inside its layers. */
#include "model.h"

#include "base/array.h"
#include "base/status.h"

/* Attention partials of one wave may take this much; more rows or heads shorten the wave, never change the result. */
#define PART_BYTES (16u << 20)

static uint64_t state_floats(const hsri_hparams *hp) { return (uint64_t)hp->n_heads * (hp->head_dim + 2u); }

/* The widest intermediate that a compound operation of this model makes. */
static uint64_t widest(const hsri_hparams *hp)
{
    uint64_t qkv = (uint64_t)(hp->n_heads + 2u * hp->n_kv_heads) * hp->head_dim;
    uint64_t gate_up = 2 * hsri_round_up(hp->intermediate, HSRI_PANEL);
    return hsri_max(hsri_max(qkv, gate_up), hp->hidden);
}

static hsri_ref carve(hsri_ref *next, uint64_t floats) { return hsri_carve(next, floats * sizeof(float)); }

static void lay_out(hsri_scratch *s, const hsri_hparams *hp, hsri_ref *next)
{
    const uint64_t rows = s->max_rows, q_floats = (uint64_t)hp->n_heads * hp->head_dim;

    s->x        = carve(next, rows * hp->hidden);
    s->compound = carve(next, hsri_compound_scratch(s->max_rows, hp->hidden, (uint32_t)widest(hp)));
    s->queries  = carve(next, rows * q_floats);
    s->rotated  = carve(next, rows * q_floats);
    s->attended = carve(next, rows * q_floats);
    s->ffn      = carve(next, rows * hp->intermediate);
    s->part     = carve(next, s->part_floats);
    s->acc      = carve(next, rows * state_floats(hp));
    s->cos_sin  = carve(next, rows * hp->rotary_dim);
    s->picked   = carve(next, (uint64_t)HSRI_LOGIT_ROWS * hp->hidden);
    s->logits   = carve(next, (uint64_t)HSRI_LOGIT_ROWS * hp->vocab_size);
}

/* Everything but where it is. Returns its bytes. */
static uint64_t measure(hsri_scratch *s, const hsri_hparams *hp, uint32_t max_rows)
{
    hsri_ref end = { 0 };
    *s = (hsri_scratch){ .max_rows = max_rows < HSRI_LOGIT_ROWS ? HSRI_LOGIT_ROWS : max_rows };
    s->part_floats = hsri_max(PART_BYTES / sizeof(float), s->max_rows * state_floats(hp));
    lay_out(s, hp, &end);
    return end.offset;
}

uint64_t hsri_scratch_bytes(const hsri_hparams *hp, uint32_t max_rows)
{
    hsri_scratch s;
    return measure(&s, hp, max_rows);
}

hsr_status hsri_scratch_create(hsri_device *dev, const hsri_hparams *hp, uint32_t max_rows, hsri_scratch *s, hsr_error *err)
{
    const uint64_t bytes = measure(s, hp, max_rows);
    uint32_t buf;
    HSRI_TRY(dev->alloc(dev, bytes, &buf, err));
    hsri_ref start = { .buf = buf };
    lay_out(s, hp, &start);
    s->buf = buf;
    return HSR_OK;
}

void hsri_forward_layers(hsri_forward *f)
{
    const hsri_ops *op = &f->dev->ops;

    f->rope = (hsri_rope){ f->s->cos_sin, f->hp->rotary_dim };
    op->rope_table(f->queue, &f->batch, f->rope_tables, f->hp->rotary_dim, f->hp->rope_attention_factor, f->rope.cos_sin);
    op->embed(f->queue, &f->w->embedding, f->ids, f->batch.n_rows, f->s->x);
    for (uint32_t i = 0; i < f->hp->n_layers && *f->status >= 0; i++)
        f->arch->layer(f, i);
}

void hsri_forward_logits(const hsri_forward *f, hsri_ref index, uint32_t n)
{
    const hsri_ops *op = &f->dev->ops;

    op->gather_rows(f->queue, f->s->x, f->hp->hidden, index, n, f->s->picked);
    op->norm_linear(f->queue, f->s->picked, f->w->output_norm, f->hp->rms_norm_eps, &f->w->head, (hsri_ref){ 0 }, n, f->s->compound,
                    f->s->logits);
}
