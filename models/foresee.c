/* SPDX-License-Identifier: Apache-2.0 */
/* What the next layer will read, guessed before this one is done. The residual stream changes little from layer to layer, so that the next
 * layer's norm and query projection, put on it early, give a query much like the one to come; among the pages that the layer found probable
 * for the last token, it tells which ones will be selected. Those that are not in memory travel while this layer's network is computed.
 *
 * Only rows that come one at a time, in spans where pages may have to come from elsewhere. */
#include "model.h"

#include "base/array.h"

static void foresee_span(const hsri_forward *f, const hsri_span *span, uint32_t layer)
{
    const hsri_ops     *op = &f->dev->ops;
    const hsri_layer   *l = &f->w->layers[layer];
    const hsri_hparams *hp = f->hp;
    const hsri_residency *r = f->residency;
    const uint64_t      row = span->row, at = row * hp->n_heads * hp->head_dim * sizeof(float);
    const hsri_ref      x = hsri_at(f->s->x, row * hp->hidden * sizeof(float)), queries = hsri_at(f->s->queries, at);
    const hsri_ref      rotated = f->rotate ? hsri_at(f->s->rotated, at) : (hsri_ref){ 0 };
    const hsri_rope     rope = { hsri_at(f->rope.cos_sin, row * hp->rotary_dim * sizeof(float)), hp->rotary_dim };
    const hsri_batch    batch = { hsri_at(f->batch.rows, row * sizeof(hsri_row)), f->batch.seqs, span->n_rows, f->batch.n_seqs };
    const hsri_lists    lists = { .units = f->room->units, .counts = f->room->counts, .stride = span->max_units, .n_picks = span->n_picks,
                                .group_units = HSRI_LIST_GROUP_UNITS };

    /* The keys and values that come with the queries are written over by the layer itself, before anything reads them. */
    op->qkv_rope_append(f->queue, &batch, f->kv, layer, hp->n_heads, x, l->attn_norm, hp->rms_norm_eps, &l->qkv, l->qkv_bias, l->q_norm,
                        l->k_norm, &rope, f->s->compound, queries);
    if (f->rotate)
        op->rotate(f->queue, f->kv, layer, hp->n_heads, span->n_rows, queries, rotated);
    op->foresee(f->queue, &batch, f->kv, layer, hp->n_heads, hp->attention_scale, queries, rotated,
                hsri_at(f->sparse[0], (uint64_t)layer * f->batch.n_seqs * sizeof(hsri_sparse)),
                hsri_at(f->picks, span->first_pick * sizeof(hsri_pick)), f->room->scratch, &lists);
    r->span(r->self, span->row, span->n_rows, span->first_pick);
    *f->status = r->expect(r->self, layer, &lists, f->err);
}

void hsri_forward_foresee(const hsri_forward *f, uint32_t layer)
{
    if (!f->residency || !f->residency->expect || layer >= f->hp->n_layers)
        return;
    for (uint32_t i = 0; i < f->n_spans && *f->status >= 0; i++)
        if (f->spans[i].foreseen && !hsri_layer_in(&f->spans[i].dense_layers, layer))
            foresee_span(f, &f->spans[i], layer);
}
