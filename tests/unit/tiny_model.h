/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a tiny random LLaMA of dtype f32 as a `.hsr` file, so that C tests need no converter. Its shapes need no padding: any
 * order of random weights is a valid packing. */
#ifndef HSR_TESTS_TINY_MODEL_H
#define HSR_TESTS_TINY_MODEL_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef TINY_SHAPE   /* a program may choose its own */
enum { TINY_LAYERS = 2, TINY_HEAD_DIM = 16, TINY_CONTEXT = 4096 };
#endif
enum { TINY_VOCAB = 64, TINY_HIDDEN = 32, TINY_INNER = 64, TINY_HEADS = 4, TINY_KV_HEADS = 2, TINY_EOS = 63,
       TINY_ROPE_ROOM = (TINY_HEAD_DIM / 2 + 15) / 16 * 16 };

typedef struct tiny_file {
    FILE    *out;
    uint64_t data_bytes;   /* of the tensors announced so far */
    uint32_t random;
} tiny_file;

static void tiny_u32(tiny_file *f, uint32_t v) { fwrite(&v, 4, 1, f->out); }
static void tiny_u64(tiny_file *f, uint64_t v) { fwrite(&v, 8, 1, f->out); }
static void tiny_text(tiny_file *f, const char *s) { tiny_u64(f, strlen(s)); fwrite(s, 1, strlen(s), f->out); }
static void tiny_key_u32(tiny_file *f, const char *key, uint32_t v) { tiny_text(f, key); tiny_u32(f, 4); tiny_u32(f, v); }
static void tiny_key_text(tiny_file *f, const char *key, const char *v) { tiny_text(f, key); tiny_u32(f, 8); tiny_text(f, v); }
static void tiny_key_f64(tiny_file *f, const char *key, double v) { tiny_text(f, key); tiny_u32(f, 12); fwrite(&v, 8, 1, f->out); }

static void tiny_tensor(tiny_file *f, const char *name, uint32_t n, uint32_t k)
{
    const uint64_t bytes = 4ull * (n ? n : 1) * k;
    tiny_text(f, name);
    tiny_u32(f, n ? 2 : 1);
    tiny_u64(f, k);
    if (n)
        tiny_u64(f, n);
    tiny_u32(f, 0);
    tiny_u64(f, f->data_bytes);
    f->data_bytes += (bytes + 63) / 64 * 64;
}

static void tiny_values(tiny_file *f, uint64_t n, float mean, float spread)
{
    for (uint64_t i = 0; i < (n + 15) / 16 * 16; i++) {
        f->random = f->random * 1664525u + 1013904223u;
        float v = mean + spread * ((float)(f->random >> 8) / (float)(1 << 24) - 0.5f);
        fwrite(&v, 4, 1, f->out);
    }
}

static void tiny_metadata(tiny_file *f)
{
    tiny_key_text(f, "general.architecture", "hisparse");
    tiny_key_u32(f, "general.alignment", 64);
    tiny_key_u32(f, "hisparse.format_version", 1);
    tiny_key_text(f, "hisparse.arch", "llama");
    tiny_key_text(f, "hisparse.weight_dtype", "f32");
    tiny_key_u32(f, "hisparse.vocab_size", TINY_VOCAB);
    tiny_key_u32(f, "hisparse.tokenizer_size", TINY_VOCAB);
    tiny_key_u32(f, "hisparse.hidden_size", TINY_HIDDEN);
    tiny_key_u32(f, "hisparse.intermediate_size", TINY_INNER);
    tiny_key_u32(f, "hisparse.layer_count", TINY_LAYERS);
    tiny_key_u32(f, "hisparse.head_count", TINY_HEADS);
    tiny_key_u32(f, "hisparse.kv_head_count", TINY_KV_HEADS);
    tiny_key_u32(f, "hisparse.head_dim", TINY_HEAD_DIM);
    tiny_key_u32(f, "hisparse.rotary_dim", TINY_HEAD_DIM);
    tiny_key_u32(f, "hisparse.context_length", TINY_CONTEXT);
    tiny_key_f64(f, "hisparse.rms_norm_eps", 1e-5);
    tiny_key_f64(f, "hisparse.attention_scale", 1.0 / sqrt(TINY_HEAD_DIM));
    tiny_key_text(f, "hisparse.rope.kind", "static");
    tiny_key_f64(f, "hisparse.rope.attention_factor", 1.0);
    tiny_text(f, "hisparse.eos_token_ids");
    tiny_u32(f, 9);
    tiny_u32(f, 4);
    tiny_u64(f, 1);
    tiny_u32(f, TINY_EOS);
}

/* One entry per tensor: announced in a first pass, filled in a second. */
static void tiny_tensors(tiny_file *f, int fill)
{
    static const struct { const char *name; uint32_t n, k; } layer[] = {
        { "attn_norm", 0, TINY_HIDDEN }, { "attn_qkv", (TINY_HEADS + 2 * TINY_KV_HEADS) * TINY_HEAD_DIM, TINY_HIDDEN },
        { "attn_output", TINY_HIDDEN, TINY_HEADS * TINY_HEAD_DIM }, { "ffn_norm", 0, TINY_HIDDEN },
        { "ffn_gate_up", 2 * TINY_INNER, TINY_HIDDEN }, { "ffn_down", TINY_HIDDEN, TINY_INNER },
    };
    char name[64];

    if (fill)
        tiny_values(f, (uint64_t)TINY_VOCAB * TINY_HIDDEN, 0, 2);
    else
        tiny_tensor(f, "token_embd.weight", TINY_VOCAB, TINY_HIDDEN);
    for (int i = 0; i < TINY_LAYERS; i++)
        for (size_t j = 0; j < sizeof layer / sizeof *layer; j++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", i, layer[j].name);
            if (!fill)
                tiny_tensor(f, name, layer[j].n, layer[j].k);
            else if (layer[j].n)
                tiny_values(f, (uint64_t)layer[j].n * layer[j].k, 0, 0.7f);
            else
                tiny_values(f, layer[j].k, 1, 0.4f);
        }
    if (fill) {
        tiny_values(f, TINY_HIDDEN, 1, 0.4f);
        for (int j = 0; j < TINY_ROPE_ROOM; j++) {
            float v = j < TINY_HEAD_DIM / 2 ? (float)pow(10000.0, -2.0 * j / TINY_HEAD_DIM) : 0;
            fwrite(&v, 4, 1, f->out);
        }
    } else {
        tiny_tensor(f, "output_norm.weight", 0, TINY_HIDDEN);
        tiny_tensor(f, "rope.inv_freq", 0, TINY_HEAD_DIM / 2);
    }
}

/* A new temporary file with the start of the format, its name in path. */
static int tiny_begin(tiny_file *f, char path[64], uint32_t seed, uint32_t n_tensors, uint32_t n_keys)
{
    snprintf(path, 64, "/tmp/hisparse_tiny_XXXXXX");
    const int fd = mkstemp(path);
    *f = (tiny_file){ .out = fd < 0 ? NULL : fdopen(fd, "wb"), .random = seed };
    if (!f->out)
        return 0;
    fwrite("GGUF", 1, 4, f->out);
    tiny_u32(f, 3);
    tiny_u64(f, n_tensors);
    tiny_u64(f, n_keys);
    return 1;
}

/* Writes the model to a new temporary file and puts its name into path. True on success. */
static int tiny_model_write(char path[64], uint32_t seed)
{
    tiny_file f;
    if (!tiny_begin(&f, path, seed, 3 + TINY_LAYERS * 6, 20))
        return 0;
    tiny_metadata(&f);
    tiny_tensors(&f, 0);
    while (ftell(f.out) % 64)
        fputc(0, f.out);
    tiny_tensors(&f, 1);
    return fclose(f.out) == 0;
}

/* Overwrite one weight of the output norm, which with the rope table ends the file: every logit becomes that NaN or infinity. */
static inline int tiny_model_poison(const char *path, float value)
{
    FILE *f = fopen(path, "r+b");
    if (!f)
        return 0;
    fseek(f, -(long)(TINY_ROPE_ROOM * 4 + TINY_HIDDEN * 4), SEEK_END);
    fwrite(&value, 4, 1, f);
    return fclose(f) == 0;
}

#endif
