/* SPDX-License-Identifier: Apache-2.0 */
/* What a model is to the rest of the runtime: hyper-parameters read from a `.hsr` file, weights as device handles, and one
 * forward pass over the rows of a step. An architecture is a row in hsri_archs[]: a name, a function that binds its tensors,
 * a function that enqueues one layer. */
#ifndef HSRI_MODEL_H
#define HSRI_MODEL_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/layers.h"
#include "calibration.h"
#include "container/container.h"
#include "device/device.h"
#include "kv/residency.h"

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
    hsri_calibration *calibration;  /* NULL: none */
    hsri_hparams     hp;
    const hsri_arch *arch;
    hsr_model_info   info;
    atomic_uint      holders;   /* the caller and every engine */
};

hsr_status hsri_model_open(const char *path, hsr_model **model, hsr_error *err);
void hsri_model_retain(hsr_model *model);
void hsri_model_release(hsr_model *model);

/* Read the model's calibration; once, before engines are made. */
hsr_status hsri_model_calibrate(hsr_model *model, const char *path, hsr_error *err);

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

uint64_t hsri_scratch_bytes(const hsri_hparams *hp, uint32_t max_rows);
hsr_status hsri_scratch_create(hsri_device *dev, const hsri_hparams *hp, uint32_t max_rows, hsri_scratch *s, hsr_error *err);

/* A run of rows that attend alike in every layer; spans cover a step's rows in order. Sparse ones are small enough for the room. */
typedef struct hsri_span {
    uint32_t row, n_rows;
    uint32_t max_pos;
    bool     sparse;            /* in the layers outside `dense_layers` */
    bool     prefill;           /* picks are whole runs: the settings of prompts apply */
    bool     observed;          /* every pick is one row: what they cover is reported */
    uint32_t n_fixed;           /* fixed groups, the most of any row */
    uint32_t bridge_page;       /* of a prompt run: the page that the second half of its rows reads encoded */
    uint32_t max_units;         /* list entries, the most of any pick: the lists' stride */
    uint32_t first_pick, n_picks;
    uint32_t first_mass_row, n_mass_rows;   /* rows that add to their sequence's mass table */
    uint32_t mass_pages;        /* pages that they read, the most of any */
    bool     foreseen;          /* some of its rows note what they found, for the next ones to guess by */
    hsri_layer_set dense_layers;
} hsri_span;

/* Device memory of selections, owned by the engine, sized for its sparse sessions. */
typedef struct hsri_sparse_room {
    hsri_ref scratch;           /* of select */
    uint64_t scratch_bytes;
    bool     clusters;          /* some session has them: the scratch has room for looking at them */
    hsri_ref units;             /* lists */
    uint64_t n_units;
    hsri_ref counts;            /* uint32[rows][kv heads] */
    hsri_ref virtual_part;      /* float[rows][heads][2 + d] */
    hsri_ref covered;           /* float[layers][rows][heads] */
    hsri_ref attended;          /* uint32[layers][rows][kv heads]: copies of counts of observed rows */
    hsri_ref parts;             /* float[mass rows of a span][heads][pages]{ m, l } */
    uint64_t n_parts;           /* pairs */
} hsri_sparse_room;

/* What a session captures of a step's rows (hsr_session_capture), on the host. */
typedef struct hsri_tap {
    uint32_t layer_first, layer_end;
    uint32_t n;                 /* rows */
    const uint32_t *rows;       /* of the step */
    const uint32_t *picks;      /* of these rows, relative to their span's first */
    const uint64_t *places;     /* of these rows in the arrays below, which have n_places for each layer */
    uint64_t n_places;
    float   *queries;           /* NULL: not wanted; [layers][places][n_heads][head_dim] */
    int32_t *n_slices;          /* the same; [layers][places][n_kv_heads] */
    int32_t *slices;            /* the same; [layers][places][n_kv_heads][max_slices] */
    uint32_t max_slices;
} hsri_tap;

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
    const hsri_span    *spans;
    uint32_t            n_spans;
    bool                rotate;       /* some sequence reads queries in the calibrated basis */
    bool                rotate_votes; /* only selections do: of a prompt run, rows that vote */
    hsri_ref            picks;        /* hsri_pick[], rows relative to their span */
    hsri_ref            pick_of;      /* uint32[n_rows]: pick of each row, relative to its span's first */
    hsri_ref            sparse[2];    /* hsri_sparse[n_layers][n_seqs]: of decode rows, of prompt runs */
    hsri_ref            mass_rows;    /* hsri_mass_row[], rows relative to their span */
    hsri_ref            mass_tables;  /* hsri_ref[n_seqs] */
    const hsri_sparse_room *room;
    const hsri_tap     *taps;
    uint32_t            n_taps;
    const hsri_residency *residency;  /* NULL: every page is in memory */
    hsr_status         *status;       /* first failure of the residency; nothing is enqueued after it */
    hsr_error          *err;
};

/* Enqueue everything up to the last layer: scratch.x then holds the residual stream of every row. */
void hsri_forward_layers(hsri_forward *f);

/* Enqueue the logits of n <= HSRI_LOGIT_ROWS rows, given by an array of row indices, into scratch.logits. */
void hsri_forward_logits(const hsri_forward *f, hsri_ref index /* uint32[n] */, uint32_t n);

/* Attention of the batch over its pages (attention.c): scratch.queries -> scratch.attended. */
void hsri_forward_attend(const hsri_forward *f, uint32_t layer);

/* While scratch.x is near to what it will be at `layer`: guess what rows will select there, so that its pages are on their way when they
 * are asked for (foresee.c). Nothing but time depends on it. Overwrites what the layer will: its new keys and
 * values, scratch.queries and scratch.rotated. */
void hsri_forward_foresee(const hsri_forward *f, uint32_t layer);

#endif
