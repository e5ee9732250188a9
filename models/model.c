/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a `.hsr` file: metadata to hyper-parameters, names to tensors. docs/model-file.md is the specification. */
#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"

#define FORMAT_VERSION 1u

/* Sizes beyond these are not models but damage; they also keep every product below far from overflow. */
#define MAX_WIDTH  (1u << 20)
#define MAX_LAYERS 4096u
#define MAX_VOCAB  (1u << 24)
#define MAX_HEAD_DIM 512u

extern const hsri_arch hsri_arch_llama, hsri_arch_mistral, hsri_arch_qwen2, hsri_arch_qwen3;
const hsri_arch *const hsri_archs[] = { &hsri_arch_llama, &hsri_arch_mistral, &hsri_arch_qwen2, &hsri_arch_qwen3, NULL };

/* ---- metadata ------------------------------------------------------------------------------------------------- */

/* Reads required values one after another; the first failure sticks. */
typedef struct reader {
    const hsri_container *c;
    hsr_status status;
    hsr_error *err;
} reader;

static void missing(reader *r, const char *key)
{
    r->status = hsri_fail(r->err, HSR_E_FORMAT, "%s: metadata key '%s' is missing", hsri_container_path(r->c), key);
}

static uint32_t read_u32(reader *r, const char *key, uint32_t lo, uint32_t hi)
{
    uint32_t v = lo;
    if (r->status < 0)
        return v;
    hsr_status st = hsri_container_u32(r->c, key, &v, r->err);
    if (st == HSR_AGAIN)
        missing(r, key);
    else if (st < 0)
        r->status = st;
    else if (v < lo || v > hi)
        r->status = hsri_fail(r->err, HSR_E_FORMAT, "%s: %s is %u, allowed are %u to %u", hsri_container_path(r->c), key, v, lo, hi);
    return r->status < 0 ? lo : v;
}

static double read_positive(reader *r, const char *key)
{
    double v = 1;
    if (r->status < 0)
        return v;
    hsr_status st = hsri_container_f64(r->c, key, &v, r->err);
    if (st == HSR_AGAIN)
        missing(r, key);
    else if (st < 0)
        r->status = st;
    else if (!(v > 0 && v < 1e30))
        r->status = hsri_fail(r->err, HSR_E_FORMAT, "%s: %s is %g, it must be positive and finite", hsri_container_path(r->c), key, v);
    return v;
}

/* Copies a short string; longer ones than fit are damage. */
static void read_word(reader *r, const char *key, char *out, size_t cap)
{
    const char *s;
    uint64_t n;
    out[0] = 0;
    if (r->status < 0)
        return;
    hsr_status st = hsri_container_string(r->c, key, &s, &n, r->err);
    if (st == HSR_AGAIN)
        missing(r, key);
    else if (st < 0)
        r->status = st;
    else if (n >= cap || memchr(s, 0, n))
        r->status = hsri_fail(r->err, HSR_E_FORMAT, "%s: %s is not a short word", hsri_container_path(r->c), key);
    else {
        memcpy(out, s, n);
        out[n] = 0;
    }
}

static int index_of(const char *word, const char *const *words, int n)
{
    for (int i = 0; i < n; i++)
        if (strcmp(word, words[i]) == 0)
            return i;
    return -1;
}

static void read_rope(reader *r, hsri_hparams *hp)
{
    static const char *const kinds[] = { "static", "dynamic", "longrope" };
    char word[32];

    read_word(r, "hisparse.rope.kind", word, sizeof word);
    hp->rope_attention_factor = (float)read_positive(r, "hisparse.rope.attention_factor");
    if (r->status < 0)
        return;
    int kind = index_of(word, kinds, 3);
    if (kind < 0) {
        r->status = hsri_fail(r->err, HSR_E_UNSUPPORTED, "%s: rope kind '%s' is not known to this version",
                              hsri_container_path(r->c), word);
        return;
    }
    hp->rope_kind = (hsri_rope_kind)kind;
    if (hp->rope_kind != HSRI_ROPE_STATIC)
        hp->rope_original_context = read_u32(r, "hisparse.rope.original_context", 1, INT32_MAX);
    if (hp->rope_kind == HSRI_ROPE_DYNAMIC) {
        hp->rope_base = read_positive(r, "hisparse.rope.base");
        hp->rope_factor = read_positive(r, "hisparse.rope.factor");
    }
}

static void read_hparams(reader *r, hsri_hparams *hp)
{
    static const char *const dtypes[] = { "f32", "bf16", "q8", "q4" };
    char word[32];

    hp->vocab_size     = read_u32(r, "hisparse.vocab_size", 1, MAX_VOCAB);
    hp->tokenizer_size = read_u32(r, "hisparse.tokenizer_size", 1, hp->vocab_size);
    hp->hidden         = read_u32(r, "hisparse.hidden_size", 1, MAX_WIDTH);
    hp->intermediate   = read_u32(r, "hisparse.intermediate_size", 1, MAX_WIDTH);
    hp->n_layers       = read_u32(r, "hisparse.layer_count", 1, MAX_LAYERS);
    hp->n_heads        = read_u32(r, "hisparse.head_count", 1, MAX_LAYERS);
    hp->n_kv_heads     = read_u32(r, "hisparse.kv_head_count", 1, hp->n_heads);
    hp->head_dim       = read_u32(r, "hisparse.head_dim", 2, MAX_HEAD_DIM);
    hp->rotary_dim     = read_u32(r, "hisparse.rotary_dim", 2, hp->head_dim);
    hp->context_length = read_u32(r, "hisparse.context_length", 1, INT32_MAX);
    hp->rms_norm_eps    = (float)read_positive(r, "hisparse.rms_norm_eps");
    hp->attention_scale = (float)read_positive(r, "hisparse.attention_scale");
    read_word(r, "hisparse.weight_dtype", word, sizeof word);
    read_rope(r, hp);
    if (r->status < 0)
        return;

    int dtype = index_of(word, dtypes, 4);
    const char *path = hsri_container_path(r->c);
    if (dtype < 0)
        r->status = hsri_fail(r->err, HSR_E_UNSUPPORTED, "%s: weight dtype '%s' is not known to this version", path, word);
    else if (hp->n_heads % hp->n_kv_heads)
        r->status = hsri_fail(r->err, HSR_E_FORMAT, "%s: %u heads cannot share %u kv heads evenly", path, hp->n_heads, hp->n_kv_heads);
    else if (hp->head_dim % 2 || hp->rotary_dim % 2)
        r->status = hsri_fail(r->err, HSR_E_FORMAT, "%s: head_dim %u and rotary_dim %u must be even", path, hp->head_dim, hp->rotary_dim);
    else if (hp->rope_kind == HSRI_ROPE_DYNAMIC && hp->rotary_dim == 2)
        r->status = hsri_fail(r->err, HSR_E_FORMAT, "%s: dynamic rope needs a rotary_dim above 2", path);
    else if ((uint64_t)hp->n_heads * hp->head_dim > MAX_WIDTH)
        r->status = hsri_fail(r->err, HSR_E_FORMAT, "%s: %u heads of %u are too wide", path, hp->n_heads, hp->head_dim);
    else
        hp->weight_dtype = (hsri_dtype)dtype;
}

static hsr_status check_identity(const hsri_container *c, hsr_error *err)
{
    reader r = { c, HSR_OK, err };
    char word[64];
    uint32_t version = 0;

    read_word(&r, "general.architecture", word, sizeof word);
    if (r.status < 0)
        return r.status;
    if (strcmp(word, "hisparse-calibration") == 0)
        return hsri_fail(err, HSR_E_FORMAT, "%s: the calibration of a model, not a model", hsri_container_path(c));
    if (strcmp(word, "hisparse") != 0)
        return hsri_fail(err, HSR_E_FORMAT, "%s: a GGUF file of architecture '%s', not a converted model; run `hisparse-rt convert` on it",
                         hsri_container_path(c), word);
    version = read_u32(&r, "hisparse.format_version", 0, UINT32_MAX);
    if (r.status < 0)
        return r.status;
    if (version != FORMAT_VERSION)
        return hsri_fail(err, HSR_E_VERSION, "%s: format version %u, this library reads version %u; convert the model again",
                         hsri_container_path(c), version, FORMAT_VERSION);
    return HSR_OK;
}

static hsr_status find_arch(const hsri_container *c, const hsri_arch **arch, hsr_error *err)
{
    reader r = { c, HSR_OK, err };
    char word[32];

    read_word(&r, "hisparse.arch", word, sizeof word);
    if (r.status < 0)
        return r.status;
    for (int i = 0; hsri_archs[i]; i++)
        if (strcmp(hsri_archs[i]->name, word) == 0) {
            *arch = hsri_archs[i];
            return HSR_OK;
        }
    return hsri_fail(err, HSR_E_UNSUPPORTED, "%s: architecture '%s' is not known to this version", hsri_container_path(c), word);
}

/* ---- tensors -------------------------------------------------------------------------------------------------- */

/* Kernels read whole cache lines of packed data. */
#define TENSOR_ALIGN 64u

static const hsri_tensor_info *find(hsri_binder *b, const char *name, bool optional)
{
    const hsri_tensor_info *t = hsri_container_tensor(b->container, name);
    if (!t) {
        if (!optional)
            b->status = hsri_fail(b->err, HSR_E_FORMAT, "%s: tensor '%s' is missing", hsri_container_path(b->container), name);
        return NULL;
    }
    if ((uintptr_t)t->data % TENSOR_ALIGN) {
        b->status = hsri_fail(b->err, HSR_E_FORMAT, "%s: tensor '%s' is not aligned to %u bytes", hsri_container_path(b->container), name,
                              TENSOR_ALIGN);
        return NULL;
    }
    b->used[t->index] = 1;
    return t;
}

static hsri_ref ref_of(const hsri_binder *b, const hsri_tensor_info *t)
{
    return (hsri_ref){ .buf = b->buf, .offset = (uint64_t)((const char *)t->data - (const char *)hsri_container_base(b->container)) };
}

hsri_matrix hsri_bind_matrix(hsri_binder *b, uint64_t n, uint64_t k, const char *format, ...)
{
    static const uint32_t types[HSRI_N_DTYPES] = { 0, 30, 8, 3 };   /* GGUF numbers of f32, bf16, q8, q4 */
    hsri_matrix m = { .n = (uint32_t)n, .k = (uint32_t)k };
    char name[64];
    va_list args;

    if (b->status < 0)
        return m;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const hsri_tensor_info *t = find(b, name, false);
    if (!t)
        return m;
    const char *path = hsri_container_path(b->container);
    const uint64_t rows = hsri_round_up(n, HSRI_PANEL), cols = hsri_round_up(k, HSRI_RUN);
    if (t->n_dims != 2 || t->dims[0] != cols || t->dims[1] != rows) {
        b->status = hsri_fail(b->err, HSR_E_FORMAT, "%s: tensor '%s' has shape [%llu, %llu], expected [%llu, %llu]", path, name,
                              (unsigned long long)t->dims[1], (unsigned long long)t->dims[0],
                              (unsigned long long)rows, (unsigned long long)cols);
        return m;
    }
    int dtype = 0;
    while (dtype < HSRI_N_DTYPES && types[dtype] != t->type)
        dtype++;
    if (dtype == HSRI_N_DTYPES) {
        b->status = hsri_fail(b->err, HSR_E_FORMAT, "%s: tensor '%s' has GGUF type %u, which is no weight dtype", path, name, t->type);
        return m;
    }
    m.dtype = (hsri_dtype)dtype;
    m.data = ref_of(b, t);
    return m;
}

hsri_ref hsri_bind_vector(hsri_binder *b, uint64_t n, bool optional, const char *format, ...)
{
    char name[64];
    va_list args;

    if (b->status < 0)
        return (hsri_ref){ 0 };
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const hsri_tensor_info *t = find(b, name, optional);
    if (!t)
        return (hsri_ref){ 0 };
    if (t->type != 0 || t->n_dims != 1 || t->dims[0] != n) {
        b->status = hsri_fail(b->err, HSR_E_FORMAT, "%s: tensor '%s' has type %u and length %llu, expected F32 and %llu",
                              hsri_container_path(b->container), name, t->type, (unsigned long long)t->dims[0], (unsigned long long)n);
        return (hsri_ref){ 0 };
    }
    return ref_of(b, t);
}

static void bind_all(hsri_binder *b, const hsr_model *model, hsri_weights *w)
{
    const hsri_hparams *hp = &model->hp;

    w->embedding   = hsri_bind_matrix(b, hp->vocab_size, hp->hidden, "token_embd.weight");
    w->head        = w->embedding;
    if (hsri_container_tensor(b->container, "output.weight"))
        w->head    = hsri_bind_matrix(b, hp->vocab_size, hp->hidden, "output.weight");
    w->output_norm = hsri_bind_vector(b, hp->hidden, false, "output_norm.weight");
    w->inv_freq    = hsri_bind_vector(b, hp->rotary_dim / 2, false, "rope.inv_freq");
    if (hp->rope_kind == HSRI_ROPE_LONG)
        w->inv_freq_long = hsri_bind_vector(b, hp->rotary_dim / 2, false, "rope.inv_freq_long");
    for (uint32_t i = 0; i < hp->n_layers && b->status >= 0; i++)
        model->arch->bind_layer(b, hp, i, &w->layers[i]);
}

hsr_status hsri_weights_bind(const hsr_model *model, uint32_t buf, hsri_weights *w, hsr_error *err)
{
    const uint64_t n = hsri_container_n_tensors(model->container);
    hsri_binder b = { .container = model->container, .buf = buf, .err = err };

    *w = (hsri_weights){ .layers = hsri_new_array(model->hp.n_layers, sizeof(hsri_layer)) };
    b.used = hsri_new_array(n ? n : 1, 1);
    if (!w->layers || !b.used)
        b.status = hsri_fail(err, HSR_E_NOMEM, "no memory for the tensor table of %s", hsri_container_path(model->container));
    else
        bind_all(&b, model, w);
    for (uint64_t i = 0; i < n && b.status >= 0; i++)
        if (!b.used[i])
            b.status = hsri_fail(err, HSR_E_FORMAT, "%s: tensor '%s' does not belong to architecture '%s'",
                                 hsri_container_path(model->container),
                                 hsri_container_tensor_at(model->container, i)->name, model->arch->name);
    free(b.used);
    if (b.status < 0)
        hsri_weights_free(w);
    return b.status < 0 ? b.status : HSR_OK;
}

void hsri_weights_free(hsri_weights *w)
{
    free(w->layers);
    w->layers = NULL;
}

/* ---- the model ------------------------------------------------------------------------------------------------ */

static uint64_t matrix_params(const hsri_matrix *m) { return (uint64_t)m->n * m->k; }

static void count_params(const hsr_model *model, const hsri_weights *w, hsr_model_info *info)
{
    const hsri_hparams *hp = &model->hp;
    uint64_t n = matrix_params(&w->embedding) + hp->hidden;
    if (w->head.data.offset != w->embedding.data.offset)
        n += matrix_params(&w->head);
    for (uint32_t i = 0; i < hp->n_layers; i++) {
        const hsri_layer *l = &w->layers[i];
        n += matrix_params(&l->qkv) + matrix_params(&l->out) + matrix_params(&l->down) +
             2ull * hp->intermediate * hp->hidden + 2ull * hp->hidden;
        n += (l->qkv_bias.buf ? l->qkv.n : 0) + (l->out_bias.buf ? hp->hidden : 0) + (l->down_bias.buf ? hp->hidden : 0);
        n += (l->gate_up_bias.buf ? 2ull * hp->intermediate : 0) + (l->q_norm.buf ? hp->head_dim : 0) + (l->k_norm.buf ? hp->head_dim : 0);
    }
    info->n_params = n;
    for (uint64_t i = 0; i < hsri_container_n_tensors(model->container); i++)
        info->weight_bytes += hsri_container_tensor_at(model->container, i)->size;
}

static hsr_status read_tokens(const hsri_container *c, uint32_t vocab, hsr_model_info *info, hsr_error *err)
{
    uint32_t bos = 0, eos[16];
    uint64_t n = 0;

    hsr_status st = hsri_container_u32(c, "hisparse.bos_token_id", &bos, err);
    HSRI_TRY(st);
    info->bos_token = st == HSR_OK ? (int32_t)bos : -1;
    st = hsri_container_u32_array(c, "hisparse.eos_token_ids", eos, 16, &n, err);
    HSRI_TRY(st);
    if (st == HSR_AGAIN)
        n = 0;
    if (info->bos_token >= 0 && bos >= vocab)
        return hsri_fail(err, HSR_E_FORMAT, "%s: bos token %u is outside the vocabulary of %u", hsri_container_path(c), bos, vocab);
    for (uint64_t i = 0; i < n; i++) {
        if (eos[i] >= vocab)
            return hsri_fail(err, HSR_E_FORMAT, "%s: eos token %u is outside the vocabulary of %u", hsri_container_path(c), eos[i], vocab);
        info->eos_tokens[i] = (int32_t)eos[i];
    }
    info->n_eos_tokens = (int32_t)n;
    return HSR_OK;
}

static hsr_status fill_info(hsr_model *model, hsr_error *err)
{
    const hsri_hparams *hp = &model->hp;
    hsr_model_info *info = &model->info;

    *info = (hsr_model_info){
        .struct_size = sizeof *info, .weight_dtype = (int32_t)hp->weight_dtype, .vocab_size = (int32_t)hp->vocab_size,
        .tokenizer_size = (int32_t)hp->tokenizer_size, .hidden_size = (int32_t)hp->hidden, .n_layers = (int32_t)hp->n_layers,
        .n_heads = (int32_t)hp->n_heads, .n_kv_heads = (int32_t)hp->n_kv_heads, .head_dim = (int32_t)hp->head_dim,
        .context_length = (int32_t)hp->context_length, .intermediate_size = (int32_t)hp->intermediate,
        .rotary_dim = (int32_t)hp->rotary_dim,
    };
    snprintf(info->arch, sizeof info->arch, "%s", model->arch->name);
    return read_tokens(model->container, hp->vocab_size, info, err);
}

static hsr_status load(hsr_model *model, const char *path, hsr_error *err)
{
    HSRI_TRY(hsri_container_open(path, &model->container, err));
    HSRI_TRY(check_identity(model->container, err));
    HSRI_TRY(find_arch(model->container, &model->arch, err));
    reader r = { model->container, HSR_OK, err };
    read_hparams(&r, &model->hp);
    HSRI_TRY(r.status);
    HSRI_TRY(fill_info(model, err));

    /* Bind once to nothing: a file that opens is a file that runs. */
    hsri_weights w;
    HSRI_TRY(hsri_weights_bind(model, 1, &w, err));
    count_params(model, &w, &model->info);
    hsri_weights_free(&w);
    return HSR_OK;
}

hsr_status hsri_model_open(const char *path, hsr_model **out, hsr_error *err)
{
    hsr_model *model = hsri_new_array(1, sizeof *model);
    if (!model)
        return hsri_fail(err, HSR_E_NOMEM, "no memory to open %s", path);
    atomic_init(&model->holders, 1);
    hsr_status st = load(model, path, err);
    if (st < 0) {
        hsri_model_release(model);
        return st;
    }
    *out = model;
    return HSR_OK;
}

void hsri_model_retain(hsr_model *model) { atomic_fetch_add_explicit(&model->holders, 1, memory_order_relaxed); }

void hsri_model_release(hsr_model *model)
{
    if (atomic_fetch_sub_explicit(&model->holders, 1, memory_order_acq_rel) != 1)
        return;
    hsri_container_close(model->container);
    hsri_calibration_close(model->calibration);
    free(model);
}

hsr_status hsri_model_calibrate(hsr_model *model, const char *path, hsr_error *err)
{
    const hsri_hparams *hp = &model->hp;
    const char *mark = NULL;
    uint64_t size = 0;

    if (model->calibration)
        return hsri_fail(err, HSR_E_STATE, "%s: the model already has a calibration", path);
    HSRI_TRY(hsri_container_string(model->container, "hisparse.source", &mark, &size, err));
    return hsri_calibration_open(path, hp->n_layers, hp->n_kv_heads, hp->head_dim, mark, size, &model->calibration, err);
}

uint32_t hsri_rope_choose(const hsri_hparams *hp, uint64_t context, float *inv_freq)
{
    if (hp->rope_kind == HSRI_ROPE_STATIC || context <= hp->rope_original_context)
        return 0;
    if (hp->rope_kind == HSRI_ROPE_LONG)
        return 1;
    const double r = hp->rotary_dim, m = hp->rope_original_context, f = hp->rope_factor;
    const double base = hp->rope_base * pow(f * (double)context / m - (f - 1.0), r / (r - 2.0));
    for (uint32_t j = 0; j < hp->rotary_dim / 2; j++)
        inv_freq[j] = (float)pow(base, -2.0 * j / r);
    return 2;
}
