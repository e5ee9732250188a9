/* SPDX-License-Identifier: Apache-2.0 */
/* A calibration for the tiny model: a reflection as the basis of every head, which is its own inverse and mixes all channels. */
#ifndef HSR_TESTS_TINY_CALIBRATION_H
#define HSR_TESTS_TINY_CALIBRATION_H

#include "tiny_model.h"

static void tiny_basis(tiny_file *f, uint32_t seed)
{
    float v[TINY_HEAD_DIM], square = 0;
    for (int i = 0; i < TINY_HEAD_DIM; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = (float)(seed >> 8) / (float)(1 << 24) - 0.5f;
        square += v[i] * v[i];
    }
    for (int i = 0; i < TINY_HEAD_DIM; i++)
        for (int j = 0; j < TINY_HEAD_DIM; j++) {
            const float x = (i == j) - 2 * v[i] * v[j] / square;
            fwrite(&x, 4, 1, f->out);
        }
}

static void tiny_layer_calibration(tiny_file *f, uint32_t layer)
{
    for (int basis = 0; basis < 2; basis++)
        for (uint32_t head = 0; head < TINY_KV_HEADS; head++)
            tiny_basis(f, 1 + layer * TINY_KV_HEADS + head);
    for (int mean = 0; mean < 2; mean++)
        tiny_values(f, TINY_KV_HEADS * TINY_HEAD_DIM, 0, 0.1f);
}

static int tiny_calibration_write(char path[64])
{
    static const struct { const char *name; uint32_t n; } tensors[] = {
        { "basis_k", TINY_KV_HEADS * TINY_HEAD_DIM }, { "basis_q", TINY_KV_HEADS * TINY_HEAD_DIM },
        { "mean_k", TINY_KV_HEADS }, { "mean_v", TINY_KV_HEADS },
    };
    char name[64];
    tiny_file f;

    if (!tiny_begin(&f, path, 7, 4 * TINY_LAYERS, 7))
        return 0;
    tiny_key_text(&f, "general.architecture", "hisparse-calibration");
    tiny_key_u32(&f, "general.alignment", 64);
    tiny_key_u32(&f, "hisparse.cal.version", 1);
    tiny_key_u32(&f, "hisparse.cal.n_layers", TINY_LAYERS);
    tiny_key_u32(&f, "hisparse.cal.n_kv_heads", TINY_KV_HEADS);
    tiny_key_u32(&f, "hisparse.cal.head_dim", TINY_HEAD_DIM);
    tiny_text(&f, "hisparse.cal.virtual");
    tiny_u32(&f, 9);
    tiny_u32(&f, 4);
    tiny_u64(&f, TINY_LAYERS);
    for (int i = 0; i < TINY_LAYERS; i++)
        tiny_u32(&f, 1);
    for (int i = 0; i < TINY_LAYERS; i++)
        for (size_t j = 0; j < sizeof tensors / sizeof *tensors; j++) {
            snprintf(name, sizeof name, "cal.%d.%s", i, tensors[j].name);
            tiny_tensor(&f, name, tensors[j].n, TINY_HEAD_DIM);
        }
    while (ftell(f.out) % 64)
        fputc(0, f.out);
    for (uint32_t i = 0; i < TINY_LAYERS; i++)
        tiny_layer_calibration(&f, i);
    return fclose(f.out) == 0;
}

#endif
