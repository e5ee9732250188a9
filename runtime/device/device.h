/* SPDX-License-Identifier: Apache-2.0 */
/* What a back end is: memory behind buffer ids, queues, and a table of operations.
 *
 * An operation takes a queue and device handles (buffer id + offset), enqueues itself and returns; it reads and writes only
 * device buffers. Only copies and hsri_device.wait cross to the host. Operations of one queue run in order. A failure inside
 * an operation sticks to the queue and is reported by the next wait; shapes and handles are the caller's duty (asserted in
 * debug builds). A step allocates nothing: scratch is sized beforehand.
 *
 * Simple operations are written by every back end. Compound ones have defaults made of the simple ones (compound.c), which
 * a back end replaces where fusing saves passes over memory. */
#ifndef HSRI_DEVICE_H
#define HSRI_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "hisparse_rt/hisparse_rt.h"
#include "base/log.h"
#include "device/kv_format.h"
#include "device/ref.h"
#include "device/sparse_ops.h"

/* Attention is computed in groups of tokens that the data alone fixes. Each gives a partial of its own, and partials are merged in order:
 * so threads, batches and late pages change when a group is computed, never a bit of the result. This many tokens are a dense group. */
#define HSRI_GROUP_TOKENS 1024u
/* The pool's unit: page table entries count in it. */
#define HSRI_BLOCK_BYTES (1u << 20)

/* Weight dtypes; the packing is described in docs/model-file.md. Values equal HSR_DTYPE_*. */
typedef enum hsri_dtype { HSRI_DTYPE_F32, HSRI_DTYPE_BF16, HSRI_DTYPE_Q8, HSRI_DTYPE_Q4, HSRI_N_DTYPES } hsri_dtype;

/* A packed matrix y[n] = sum_k w[n][k] x[k]. n and k are logical; padding is implied by the packing. */
typedef struct hsri_matrix {
    hsri_ref   data;
    hsri_dtype dtype;
    uint32_t   n;
    uint32_t   k;
} hsri_matrix;

#define HSRI_PANEL 16u   /* output rows per panel */
#define HSRI_RUN   32u   /* inputs per run */

/* One computed row of a step; device array. Rows of one sequence are neighbours with ascending positions. */
typedef struct hsri_row {
    uint32_t seq;      /* index into the step's hsri_seq array */
    uint32_t pos;      /* position in the sequence */
} hsri_row;

/* One sequence of a step; device array. Page table entry of (page, layer, kv head) is
 * table[(page * n_layers + layer) * n_kv_heads + head], a uint32: block index << 8 | slot inside the block.
 * Page p is read from `table`, plain, by queries of page q iff p < sink_pages or p + window_pages > q; else from `sealed`, in
 * `format`. In a session of a plain format both name the same slots. */
typedef struct hsri_seq {
    hsri_ref table;         /* uint32 entries of plain pages */
    hsri_ref sealed;        /* uint32 entries of encoded pages */
    hsri_ref index;         /* uint32 slabs: of slab k at [(k * n_layers + layer) * n_kv_heads + head], block << 8 |
                             * slab inside the block */
    hsri_ref strips;        /* uint32 strips: the same, slots of hsri_strip_slot_bytes */
    hsri_ref clusters;      /* uint32 records of segments: the same, slots of hsri_cluster_slot_bytes. A query may read those of the
                             * segments that its selectable pages fill; all of these exist */
    uint32_t rope_table;    /* which of the rope tables: index into the inv_freq buffer, [rope_table][r/2] */
    uint32_t kv_type;       /* hsri_kv_type of plain pages */
    uint32_t format;        /* hsri_kv_type of sealed pages */
    uint32_t sink_pages, window_pages;
    hsri_index_shape index_shape;
} hsri_seq;

/* The KV cache as operations see it. */
typedef struct hsri_kv_view {
    uint32_t pool_buf;      /* the pool: one contiguous buffer of 1 MiB blocks */
    uint32_t n_layers;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t slot_bytes[HSRI_N_KV_FORMATS]; /* stride of page slots inside a block, by format */
    hsri_ref calibration;   /* hsri_calibration_record of every (layer, kv head); buf 0: none */
} hsri_kv_view;

/* What becomes of partials: those of each (row, head) are folded, in order, into its running state acc[row][head] = { m, l, o[d] }; `first`
 * starts from the empty state; `out` (optional) receives o / l as [row][n_heads][d] after the fold. With both, acc is optional. */
typedef struct hsri_fold {
    int      first;
    hsri_ref acc, out;
} hsri_fold;

/* The rows of a step. */
typedef struct hsri_batch {
    hsri_ref rows;          /* hsri_row[n_rows] */
    hsri_ref seqs;          /* hsri_seq[n_seqs] */
    uint32_t n_rows;
    uint32_t n_seqs;
} hsri_batch;

/* Sampling parameters of one row; device array. Semantics: hsr_request. */
typedef struct hsri_sample_params {
    float    temperature, top_p, min_p;
    float    repetition_penalty, presence_penalty, frequency_penalty;
    int32_t  top_k;
    int32_t  n_logprobs;
    uint64_t seed;
    uint64_t draw;          /* index of this draw in the request's stream */
    hsri_ref bias;          /* hsr_token_bias[n_bias] */
    hsri_ref seen;          /* hsri_seen[n_seen]: distinct tokens that penalties look at, any order */
    uint32_t n_bias;
    uint32_t n_seen;
} hsri_sample_params;

typedef struct hsri_seen {
    int32_t  token;
    uint32_t in_window;     /* nonzero: repetition_penalty applies */
    uint32_t n_output;      /* occurrences in the output: presence and frequency penalties */
} hsri_seen;

typedef struct hsri_sampled {
    int32_t     status;     /* HSR_OK, HSR_E_NONFINITE, or HSR_E_INVALID: every token is banned */
    int32_t     token;
    float       logprob;    /* before penalties, bias, temperature and filters */
    int32_t     n_logprobs;
    hsr_logprob logprobs[20];
} hsri_sampled;

/* Rotary embedding of a step: half-split pairs (x[j], x[j + rotary_dim/2]) of the first rotary_dim components. */
typedef struct hsri_rope {
    hsri_ref cos_sin;       /* float[n_rows][rotary_dim]: r/2 cosines, then r/2 sines, attention_factor included */
    uint32_t rotary_dim;
} hsri_rope;

/* A page to be sealed: encoded and indexed, once, from its plain form; device array. */
typedef struct hsri_seal {
    uint64_t lineage;
    uint32_t entry;         /* plain page: table entry */
    uint32_t sealed;        /* where its encoded form goes; = entry in plain formats, where only the header is written */
    uint32_t slab;          /* index slab, block << 8 | slab; used if the index kind is not NONE */
    uint32_t strip, in_strip; /* of a sketch: strip, block << 8 | slot, and the number in it */
    uint32_t page;
    uint16_t layer, head;
    uint16_t kv_type, format; /* hsri_kv_type */
    hsri_index_shape index_shape;
} hsri_seal;

/* A segment whose clusters are to be made, once, from the index entries of its pages; device array. */
typedef struct hsri_cluster {
    hsri_ref index;         /* as in hsri_seq */
    hsri_ref strips;        /* likewise, from the segment's first one on */
    uint32_t record;        /* where it goes: block << 8 | slot inside the block */
    uint32_t first_page;
    uint16_t layer, head;
    hsri_index_shape index_shape;
} hsri_cluster;

typedef struct hsri_device hsri_device;
typedef struct hsri_queue  hsri_queue;

/* The operation table. All activations are float32, rows contiguous. [n] is n elements, n_rows the batch's. */
typedef struct hsri_ops {
    /* ---- simple ---- */
    /* out[n_ids][k of table] = rows `ids` of a packed matrix */
    void (*embed)(hsri_queue *q, const hsri_matrix *table, hsri_ref ids /* int32[n_ids] */, uint32_t n_ids, hsri_ref out);
    /* out[i][width] = in[index[i]][width] */
    void (*gather_rows)(hsri_queue *q, hsri_ref in, uint32_t width, hsri_ref index /* uint32[n] */, uint32_t n, hsri_ref out);
    /* cos and sin of the batch's positions: angle = pos * inv_freq in double precision; out as in hsri_rope.cos_sin */
    void (*rope_table)(hsri_queue *q, const hsri_batch *batch, hsri_ref inv_freq /* float[tables][r/2] */, uint32_t rotary_dim,
                       float attention_factor, hsri_ref out);
    /* out[row] = gain * in[row] / sqrt(mean(in[row]^2) + eps), n_rows rows of `width` */
    void (*rms_norm)(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, uint32_t n_rows, uint32_t width, hsri_ref out);
    /* out[row][w->n] = w in[row] + bias (optional), row stride of out = w->n floats */
    void (*linear)(hsri_queue *q, const hsri_matrix *w, hsri_ref bias, hsri_ref in, uint32_t n_rows, hsri_ref out);
    /* x[row][n] += y[row][n] */
    void (*add)(hsri_queue *q, hsri_ref x, hsri_ref y, uint32_t n_rows, uint32_t n);
    /* in rows hold gate and up in panels of 16, alternating (docs/model-file.md); out[row][n] = silu(gate) * up, n logical */
    void (*silu_mul)(hsri_queue *q, hsri_ref in, uint32_t n_rows, uint32_t n, hsri_ref out);
    /* qkv[row] = q heads, k heads, v heads. Optional per-head RMS norms of q and k, then rope on q and k; q goes to
     * q_out[row][n_heads][d]; k and v are written to their pages of `layer`. */
    void (*rope_append)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, hsri_ref qkv,
                        hsri_ref q_norm, hsri_ref k_norm, float eps, const hsri_rope *rope, hsri_ref q_out);
    /* encode and index n pages, and write their headers; list = hsri_seal[n] */
    void (*seal)(hsri_queue *q, const hsri_kv_view *kv, hsri_ref list, uint32_t n);
    /* make the cluster records of n segments of one layer and kv head each; list = hsri_cluster[n] */
    void (*cluster)(hsri_queue *q, const hsri_kv_view *kv, hsri_ref list, uint32_t n);
    /* Partial attention over dense groups [g0, g1) (runs of HSRI_GROUP_TOKENS positions), causal: partial of (row, head, group g) is
     * part[(row * n_heads + head) * (g1 - g0) + g - g0] = { m, l, o[d] } with l = sum of exp(s - m), o = sum of exp(s - m) v,
     * s = scale*q.k and m the largest s, or a number near it (by about 6). A group that starts beyond the row's position gives
     * m = -inf, l = 0, o = 0.
     * With a fold, here and in the other operations that make partials, these are merged at once, with the bits that `merge` would give:
     * `part` is only room for them, and its content is unspecified afterwards. */
    void (*attend)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                   hsri_ref queries, hsri_ref rotated /* may be absent if no format needs it */, uint32_t g0, uint32_t g1, hsri_ref part,
                   const hsri_fold *fold /* NULL: partials are wanted */);
    /* fold n_groups partials (at least one) of each (row, head) */
    void (*merge)(hsri_queue *q, uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, hsri_ref part, uint32_t n_groups,
                  const hsri_fold *fold);
    /* Sample each row of logits[n_rows][n_vocab]; ids >= n_tokens are never drawn. */
    void (*sample)(hsri_queue *q, hsri_ref logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_tokens,
                   hsri_ref params /* hsri_sample_params[] */, hsri_ref out /* hsri_sampled[] */);
    /* flags[row] (uint32) = 1 if the row of n floats holds a NaN or infinity, else 0 */
    void (*check_finite)(hsri_queue *q, hsri_ref in, uint32_t n_rows, uint32_t n, hsri_ref flags);

    /* ---- sparse attention (sparse_ops.h) ---- */
    /* rotated[row][n_heads][d] = B^T q of each query head, by the calibration of its kv head: what `select` and `attend` of
     * COMPACT and VTQ pages read beside q */
    void (*rotate)(hsri_queue *q, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, uint32_t n_rows,
                   hsri_ref queries, hsri_ref rotated);
    /* partials of the fixed groups: part[(row * n_heads + head) * n_fixed + g]; groups beyond a row's own are empty. `runs`: the rows
     * are whole prompt runs (hsri_pick of 128 rows), whose second pages have a bridge group; otherwise no row has one. */
    void (*attend_fixed)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                         hsri_ref queries, hsri_ref rotated, uint32_t n_fixed, int runs, hsri_ref part, const hsri_fold *fold);
    /* acc = merged state of the fixed groups, { m, l, o[d] } per (row, head): their mass is exact and part of the normaliser */
    void (*select)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                   hsri_ref queries, hsri_ref rotated, hsri_ref acc, hsri_ref sparse /* hsri_sparse[n_seqs] */,
                   hsri_ref picks /* hsri_pick[] */, hsri_ref scratch, const hsri_lists *lists);
    /* What `select` would choose for these queries among the pages that it noted for the layer when it last saw the sequence
     * (hsri_sparse.scan): units and counts of the lists; none for picks without a scan. The rest of the lists is not touched. Needs the
     * scratch of select. */
    void (*foresee)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                    hsri_ref queries, hsri_ref rotated, hsri_ref sparse, hsri_ref picks, hsri_ref scratch, const hsri_lists *lists);
    /* After select, with the same arguments and acc: units that are marked HSRI_UNIT_AWAY, in lists of decode rows with virtual tokens,
     * leave their lists; their estimated mass and mean values go into virtual_part, and their mass out of covered. */
    void (*set_aside)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                      hsri_ref queries, hsri_ref rotated, hsri_ref acc, hsri_ref sparse, hsri_ref picks, const hsri_lists *lists);
    /* partials of list groups [g0, g1) of every row: part[(row * n_heads + head) * (g1 - g0) + g - g0]; `pick_of` = uint32[n_rows] */
    void (*attend_list)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                        hsri_ref queries, hsri_ref rotated, hsri_ref pick_of, const hsri_lists *lists,
                        uint32_t g0, uint32_t g1, hsri_ref part, const hsri_fold *fold);

    /* Parts of the pages that the listed rows attend, of the groups that `what` names. */
    void (*page_parts)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                       hsri_ref queries, hsri_ref rotated, const hsri_page_parts *what);
    /* mass tables += the parts' share of their rows' totals, row by row; acc = the rows' state after the last merge */
    void (*add_masses)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, hsri_ref acc,
                       const hsri_page_parts *what);
    /* out[n_layers][n_kv_heads][stride] = the wants[layer] <= stride pages of the range with the highest mass, of equal ones the lower, in
     * ascending order; then UINT32_MAX */
    void (*top_pages)(hsri_queue *q, const hsri_kv_view *kv, const hsri_mass_range *range, hsri_ref wants /* uint32[n_layers] */,
                      uint32_t stride, hsri_ref out);

    /* ---- compound: see compound.c for what each is made of; scratch is at least compound_scratch() floats ---- */
    void (*norm_linear)(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, uint32_t n_rows,
                        hsri_ref scratch, hsri_ref out);
    void (*qkv_rope_append)(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, hsri_ref in,
                            hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, hsri_ref q_norm, hsri_ref k_norm,
                            const hsri_rope *rope, hsri_ref scratch, hsri_ref q_out);
    void (*gate_up_silu)(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias,
                         uint32_t n_rows, uint32_t n, hsri_ref scratch, hsri_ref out);
    void (*linear_add)(hsri_queue *q, const hsri_matrix *w, hsri_ref bias, hsri_ref in, uint32_t n_rows, hsri_ref scratch, hsri_ref x);
    /* Both, one after the other. What is between them stays the back end's own, in ffn: room for n_rows rows of down->k floats. */
    void (*mlp_add)(hsri_queue *q, hsri_ref x, hsri_ref gain, float eps, const hsri_matrix *gate_up, hsri_ref gate_up_bias,
                    const hsri_matrix *down, hsri_ref down_bias, uint32_t n_rows, hsri_ref scratch, hsri_ref ffn);
} hsri_ops;

/* Since the device was created. Where the time of operations went, in ns: of attending and merging, of rotating and choosing, of encoding
 * and indexing pages, and of making cluster records; other operations are not told apart. And what encoding lost: of pages whose keys and
 * values are finite, the relative errors of their headers. */
typedef struct hsri_spent {
    uint64_t attend, select, seal, cluster;
    uint64_t n_encoded;
    double   error_sum, error_max;
} hsri_spent;

/* A back end in use by one engine. */
struct hsri_device {
    const char *name;                 /* "cpu", "cpu-async" */
    hsri_ops    ops;
    int32_t     isa;                  /* HSR_ISA_* the kernels run at */

    /* Memory. Ids are never 0. `view` gives a device address range that stays the host's (mapped weights): a back end that
     * cannot read host memory uploads it. `reserve` gets address space only; commit/decommit make whole 1 MiB blocks of it
     * usable, with unspecified content, or give them back to the system. */
    hsr_status (*alloc)(hsri_device *dev, uint64_t bytes, uint32_t *buf, hsr_error *err);      /* zeroed */
    hsr_status (*view)(hsri_device *dev, const void *host, uint64_t bytes, uint32_t *buf, hsr_error *err);
    hsr_status (*reserve)(hsri_device *dev, uint64_t bytes, uint32_t *buf, hsr_error *err);
    hsr_status (*commit)(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes, hsr_error *err);
    void       (*decommit)(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes);
    /* Where the host can read and write a reserved range that no operation is using; NULL: it cannot. */
    uint8_t   *(*host_range)(hsri_device *dev, uint32_t buf);
    void       (*free)(hsri_device *dev, uint32_t buf);    /* after a wait on every queue that used it */
    /* The memory that `sample` works in: calls of up to n_rows rows with this n_tokens cannot fail afterwards. */
    hsr_status (*reserve_sampling)(hsri_device *dev, uint32_t n_rows, uint32_t n_tokens, hsr_error *err);

    /* Queues. Host memory given to copy_in must stay unchanged, and that of copy_out unread, until the next wait. */
    hsr_status (*queue_create)(hsri_device *dev, hsri_queue **q, hsr_error *err);
    void       (*queue_destroy)(hsri_queue *q);
    void       (*copy_in)(hsri_queue *q, hsri_ref dst, const void *src, uint64_t bytes);
    void       (*copy_out)(hsri_queue *q, void *dst, hsri_ref src, uint64_t bytes);
    void       (*copy)(hsri_queue *q, hsri_ref dst, hsri_ref src, uint64_t bytes);
    hsr_status (*wait)(hsri_queue *q, hsr_error *err);     /* everything enqueued is done; reports and clears the queue's failure */

    hsri_spent (*spent)(hsri_device *dev);                  /* no operation is under way */

    void       (*destroy)(hsri_device *dev);
};

struct hsri_queue { hsri_device *dev; };   /* back ends extend it */

/* Bytes of scratch that `select` needs for picks of n_votes voting rows in all, over sequences of at most n_pages pages. */
uint64_t hsri_select_scratch(uint32_t n_votes, uint32_t n_picks, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim, uint32_t n_pages,
                             bool clusters /* some of them may have clusters to look at */);

/* Floats of scratch that the default compound operations need for n_rows rows of a model: the widest intermediate. */
uint64_t hsri_compound_scratch(uint32_t n_rows, uint32_t hidden, uint32_t widest);

/* Fill the compound entries of ops with the defaults. */
void hsri_compound_fill(hsri_ops *ops);

/* The CPU back end at a level HSR_ISA_*, or the best there is; operations split over n_threads threads. HSR_E_UNSUPPORTED if the
 * machine, or for AMX the system, lacks the level. */
hsr_status hsri_cpu_device_create(int32_t n_threads, int32_t isa, hsri_log *log, hsri_device **dev, hsr_error *err);

/* A debugging back end over another one, which it owns from success on: operations run later, on a thread of their own; copy_out
 * targets hold poison until wait; copy_in sources are read late. Finds callers that depend on operations running at once. */
hsr_status hsri_async_device_create(hsri_device *inner, hsri_device **dev, hsr_error *err);

#endif
