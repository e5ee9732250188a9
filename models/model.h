/* SPDX-License-Identifier: Apache-2.0 */
/* What a model is to the rest of the runtime: hyper-parameters read from a `.hsr` file, weights as device handles, and one
 * forward pass over the rows of a step. An architecture is a row in hsri_archs[]: a name, a function that binds its tensors,
 * a function that enqueues one layer. */
#ifndef HSRI_MODEL_H
#define HSRI_MODEL_H

#include <stdatomic.h>
#include <stdbool.h>

#include "container/container.h"
#include "device/device.h"

/* How the rotary table depends on a session's length: docs/model-file.md. */
typedef enum hsri_rope_kind { HSRI_ROPE_STATIC, HSRI_ROPE_DYNAMIC, HSRI_ROPE_LONG } hsri_rope_kind;

typedef struct hsri_hparams {
    uint32_t vocab_size, tokenizer_size;
    uint32_t hidden, intermediate;
    uint32_t n_layers, n_heads, n_kv_heads, head_dim, rotary_dim;
    uint32_t context_length;
    float    rms_norm_eps;
    float    attention_scale;
    hsri_rope_kind rope_kind;
    float    rope_attention_factor;
    double   rope_base, rope_factor;   /* dynamic */
    uint32_t rope_original_context;    /* dynamic, longrope */
    hsri_dtype weight_dtype;
} hsri_hparams;

/* One layer of the pre-norm GQA + SwiGLU family. Absent optional tensors have buf 0. */
typedef struct hsri_layer {
    hsri_ref    attn_norm, qkv_bias, q_norm, k_norm, out_bias;
    hsri_ref    ffn_norm, gate_up_bias, down_bias;
    hsri_matrix qkv, out, gate_up, down;
} hsri_layer;

/* All weights as handles into one device buffer. */
typedef struct hsri_weights {
    hsri_matrix embedding, head;
    hsri_ref    output_norm, inv_freq, inv_freq_long;
    hsri_layer *layers;
} hsri_weights;

typedef struct hsri_binder  hsri_binder;
typedef struct hsri_forward hsri_forward;

typedef struct hsri_arch {
    const char *name;
    void (*bind_layer)(hsri_binder *b, const hsri_hparams *hp, uint32_t layer, hsri_layer *out);
    void (*layer)(const hsri_forward *f, uint32_t layer);
} hsri_arch;

extern const hsri_arch *const hsri_archs[];   /* NULL-terminated */

struct hsr_model {
    hsri_container  *container;
    hsri_hparams     hp;
    const hsri_arch *arch;
    hsr_model_info   info;
    atomic_uint      holders;   /* the caller and every engine */
};

hsr_status hsri_model_open(const char *path, hsr_model **model, hsr_error *err);
void hsri_model_retain(hsr_model *model);
void hsri_model_release(hsr_model *model);

/* Resolve every tensor to a handle into device buffer `buf`, which holds the whole file. HSR_E_FORMAT names a tensor that is
 * missing, left over, or of the wrong type or shape. Free with hsri_weights_free. */
hsr_status hsri_weights_bind(const hsr_model *model, uint32_t buf, hsri_weights *w, hsr_error *err);
void hsri_weights_free(hsri_weights *w);

/* The rotary frequencies of a session with this context ceiling: a table of the file (0 static or short, 1 long), or
 * rotary_dim / 2 numbers of its own in inv_freq (dynamic rope beyond the trained length; returns 2). */
uint32_t hsri_rope_choose(const hsri_hparams *hp, uint64_t context, float *inv_freq);

/* ---- binding, for architectures ---- */

struct hsri_binder {
    const hsri_container *container;
    uint32_t   buf;
    uint8_t   *used;      /* one flag per tensor of the file */
    hsr_status status;    /* first failure; later calls do nothing */
    hsr_error *err;
};

/* Names are printf-style with the layer number. Optional tensors that are absent give a ref of buf 0. */
hsri_matrix hsri_bind_matrix(hsri_binder *b, uint64_t n, uint64_t k, const char *format, ...) __attribute__((format(printf, 4, 5)));
hsri_ref hsri_bind_vector(hsri_binder *b, uint64_t n, bool optional, const char *format, ...) __attribute__((format(printf, 4, 5)));

/* ---- the forward pass ---- */

/* Device scratch of one engine, sized once for its largest step. */
typedef struct hsri_scratch {
    uint32_t buf;
    uint32_t max_rows;
    uint64_t part_floats;             /* room for attention partials */
    hsri_ref x;                       /* [rows][hidden]: the residual stream */
    hsri_ref compound;                /* for compound operations */
    hsri_ref queries;                 /* [rows][heads][d] */
    hsri_ref rotated;                 /* [rows][heads][d]: queries in the calibrated bases of their kv heads */
    hsri_ref attended;                /* [rows][heads][d] */
    hsri_ref ffn;                     /* [rows][intermediate] */
    hsri_ref part, acc;               /* attention partials and running states */
    hsri_ref cos_sin;                 /* [rows][rotary_dim] */
    hsri_ref picked;                  /* [HSRI_LOGIT_ROWS][hidden] */
    hsri_ref logits;                  /* [HSRI_LOGIT_ROWS][vocab] */
} hsri_scratch;

/* Rows of logits computed at a time: bounds memory, not results. */
#define HSRI_LOGIT_ROWS 64u

hsr_status hsri_scratch_create(hsri_device *dev, const hsri_hparams *hp, uint32_t max_rows, hsri_scratch *s, hsr_error *err);

/* One step. */
struct hsri_forward {
    hsri_device        *dev;
    hsri_queue         *queue;
    const hsri_arch    *arch;
    const hsri_hparams *hp;
    const hsri_weights *w;
    const hsri_scratch *s;
    const hsri_kv_view *kv;
    hsri_batch          batch;
    hsri_ref            ids;          /* int32[n_rows] */
    hsri_ref            rope_tables;  /* float[tables][rotary_dim / 2] */
    hsri_rope           rope;         /* filled by hsri_forward_layers */
    uint32_t            max_pos;      /* highest position in the batch */
};

/* Enqueue everything up to the last layer: scratch.x then holds the residual stream of every row. */
void hsri_forward_layers(hsri_forward *f);

/* Enqueue the logits of n <= HSRI_LOGIT_ROWS rows, given by an array of row indices, into scratch.logits. */
void hsri_forward_logits(const hsri_forward *f, hsri_ref index /* uint32[n] */, uint32_t n);

/* Dense attention of the batch over its pages, all groups in order, as waves that fit the partials' room (D5):
 * scratch.queries -> scratch.attended. */
void hsri_forward_attend(const hsri_forward *f, uint32_t layer);

#endif
