/* SPDX-License-Identifier: Apache-2.0 */
/* Compound operations made of the simple ones of the same table, for back ends that have nothing better:
 *
 *   norm_linear      scratch = rms_norm(in);                out = linear(scratch)
 *   qkv_rope_append  scratch = norm_linear(in);             rope_append
 *   gate_up_silu     scratch = norm_linear(in);             out = silu_mul
 *   linear_add       scratch = linear(in);                  x += scratch
 *   mlp_add          ffn = gate_up_silu(x);                 x = linear_add(ffn)
 *
 * A back end whose linear layers round their inputs may compute what is between the products of mlp_add to a sixteenth of that.
 *
 * A back end that has one of its own sets it before hsri_compound_fill; its norm_linear serves the others, too.
 *
 * Scratch holds the normalised rows, then, behind them on a whole 64 bytes, the rows of the linear layer. */
#include "device/device.h"

#include "base/array.h"

#define ALIGN_FLOATS 16u

static hsri_ref behind(hsri_ref scratch, uint64_t n_floats)
{
    return hsri_at(scratch, hsri_round_up(n_floats, ALIGN_FLOATS) * sizeof(float));
}

static void norm_linear(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, uint32_t n_rows,
                        hsri_ref scratch, hsri_ref out)
{
    q->dev->ops.rms_norm(q, in, gain, eps, n_rows, w->k, scratch);
    q->dev->ops.linear(q, w, bias, scratch, n_rows, out);
}

static void qkv_rope_append(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, hsri_ref in,
                            hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, hsri_ref q_norm, hsri_ref k_norm,
                            const hsri_rope *rope, hsri_ref scratch, hsri_ref q_out)
{
    hsri_ref qkv = behind(scratch, (uint64_t)batch->n_rows * w->k);

    q->dev->ops.norm_linear(q, in, gain, eps, w, bias, batch->n_rows, scratch, qkv);
    q->dev->ops.rope_append(q, batch, kv, layer, n_heads, qkv, q_norm, k_norm, eps, rope, q_out);
}

static void gate_up_silu(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, uint32_t n_rows,
                         uint32_t n, hsri_ref scratch, hsri_ref out)
{
    hsri_ref gate_up = behind(scratch, (uint64_t)n_rows * w->k);

    q->dev->ops.norm_linear(q, in, gain, eps, w, bias, n_rows, scratch, gate_up);
    q->dev->ops.silu_mul(q, gate_up, n_rows, n, out);
}

static void linear_add(hsri_queue *q, const hsri_matrix *w, hsri_ref bias, hsri_ref in, uint32_t n_rows, hsri_ref scratch, hsri_ref x)
{
    q->dev->ops.linear(q, w, bias, in, n_rows, scratch);
    q->dev->ops.add(q, x, scratch, n_rows, w->n);
}

static void mlp_add(hsri_queue *q, hsri_ref x, hsri_ref gain, float eps, const hsri_matrix *gate_up, hsri_ref gate_up_bias,
                    const hsri_matrix *down, hsri_ref down_bias, uint32_t n_rows, hsri_ref scratch, hsri_ref ffn)
{
    q->dev->ops.gate_up_silu(q, x, gain, eps, gate_up, gate_up_bias, n_rows, down->k, scratch, ffn);
    q->dev->ops.linear_add(q, down, down_bias, ffn, n_rows, scratch, x);
}

uint64_t hsri_compound_scratch(uint32_t n_rows, uint32_t hidden, uint32_t widest)
{
    return hsri_round_up((uint64_t)n_rows * hidden, ALIGN_FLOATS) + (uint64_t)n_rows * hsri_max(hidden, widest);
}

void hsri_compound_fill(hsri_ops *ops)
{
    if (!ops->norm_linear)
        ops->norm_linear = norm_linear;
    if (!ops->qkv_rope_append)
        ops->qkv_rope_append = qkv_rope_append;
    if (!ops->gate_up_silu)
        ops->gate_up_silu = gate_up_silu;
    if (!ops->linear_add)
        ops->linear_add = linear_add;
    if (!ops->mlp_add)
        ops->mlp_add = mlp_add;
}
