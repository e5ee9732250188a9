/* SPDX-License-Identifier: Apache-2.0 */
/* The pre-norm decoder with grouped-query attention and a SwiGLU network, which LLaMA, Mistral, Qwen2 and Qwen3 share:
 *
 *   x += out( attend( rope(norm_heads(qkv(rms(x)))) ) )
 *   x += down( silu(gate(rms(x))) * up(rms(x)) )
 *
 * They differ in optional tensors only: biases (Qwen2: q, k, v; LLaMA: wherever the checkpoint has them) and per-head norms of
 * q and k before the rotation (Qwen3). */
#include "model.h"

#include "base/array.h"

static void bind_layer(hsri_binder *b, const hsri_hparams *hp, uint32_t i, hsri_layer *l)
{
    const uint64_t d = hp->head_dim, q_rows = hp->n_heads * d, qkv_rows = q_rows + 2 * hp->n_kv_heads * d;
    const uint64_t gate_up_rows = 2 * hsri_round_up(hp->intermediate, HSRI_PANEL);

    l->attn_norm    = hsri_bind_vector(b, hp->hidden, false, "blk.%u.attn_norm.weight", i);
    l->qkv          = hsri_bind_matrix(b, qkv_rows, hp->hidden, "blk.%u.attn_qkv.weight", i);
    l->qkv_bias     = hsri_bind_vector(b, qkv_rows, true, "blk.%u.attn_qkv.bias", i);
    l->q_norm       = hsri_bind_vector(b, d, true, "blk.%u.attn_q_norm.weight", i);
    l->k_norm       = hsri_bind_vector(b, d, l->q_norm.buf == 0, "blk.%u.attn_k_norm.weight", i);
    l->out          = hsri_bind_matrix(b, hp->hidden, q_rows, "blk.%u.attn_output.weight", i);
    l->out_bias     = hsri_bind_vector(b, hp->hidden, true, "blk.%u.attn_output.bias", i);
    l->ffn_norm     = hsri_bind_vector(b, hp->hidden, false, "blk.%u.ffn_norm.weight", i);
    l->gate_up      = hsri_bind_matrix(b, gate_up_rows, hp->hidden, "blk.%u.ffn_gate_up.weight", i);
    l->gate_up_bias = hsri_bind_vector(b, gate_up_rows, true, "blk.%u.ffn_gate_up.bias", i);
    l->down         = hsri_bind_matrix(b, hp->hidden, hp->intermediate, "blk.%u.ffn_down.weight", i);
    l->down_bias    = hsri_bind_vector(b, hp->hidden, true, "blk.%u.ffn_down.bias", i);
}

static void layer(const hsri_forward *f, uint32_t i)
{
    const hsri_ops     *op = &f->dev->ops;
    const hsri_layer   *l = &f->w->layers[i];
    const hsri_hparams *hp = f->hp;
    const hsri_scratch *s = f->s;
    const uint32_t      rows = f->batch.n_rows;

    op->qkv_rope_append(f->queue, &f->batch, f->kv, i, hp->n_heads, s->x, l->attn_norm, hp->rms_norm_eps, &l->qkv, l->qkv_bias,
                        l->q_norm, l->k_norm, &f->rope, s->compound, s->queries);
    hsri_forward_attend(f, i);
    op->linear_add(f->queue, &l->out, l->out_bias, s->attended, rows, s->compound, s->x);
    hsri_forward_foresee(f, i + 1);
    op->mlp_add(f->queue, s->x, l->ffn_norm, hp->rms_norm_eps, &l->gate_up, l->gate_up_bias, &l->down, l->down_bias, rows, s->compound,
                s->ffn);
}

const hsri_arch hsri_arch_llama   = { "llama",   bind_layer, layer };
const hsri_arch hsri_arch_mistral = { "mistral", bind_layer, layer };
const hsri_arch hsri_arch_qwen2   = { "qwen2",   bind_layer, layer };
const hsri_arch hsri_arch_qwen3   = { "qwen3",   bind_layer, layer };
