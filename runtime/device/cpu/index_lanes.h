/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the index that plain C says well enough (lanes.h). */
#ifndef HSRI_CPU_INDEX_LANES_H
#define HSRI_CPU_INDEX_LANES_H

#include <stdbool.h>

#include "device/cpu/kernels.h"
#include "device/cpu/lanes.h"

INLINE float load_float(const uint8_t *p)
{
    float f;

    memcpy(&f, p, sizeof f);
    return f;
}

/* sum_j q[j] codes[j] */
INLINE float dot_int8(const float *q, const int8_t *codes, uint32_t d)
{
    float    acc[LANES] = { 0 };
    uint32_t j = 0;

    for (; j + LANES <= d; j += LANES)
        for (uint32_t i = 0; i < LANES; i++)
            acc[i] += q[j + i] * (float)codes[j + i];
    for (uint32_t i = 0; j + i < d; i++)
        acc[i] += q[j + i] * (float)codes[j + i];
    return lanes_sum(acc);
}

/* The product of one head with the mean key of a page. */
INLINE float dot_mean(const hsri_score_args *a, const hsri_index_layout *at, const float *q, const uint8_t *entry)
{
    uint32_t d = a->shape->head_dim;
    float    about = a->mean_k ? dot_float(q, a->mean_k, d) : 0.0f;

    return about + load_float(entry) * dot_int8(q, (const int8_t *)entry + at->mean_k, d);
}

/* All tokens of a unit at the same logit. */
INLINE float even_mass(float logit, float reference) { return as_mass((float)HSRI_UNIT_TOKENS * expf(logit - reference)); }

INLINE void store_page_mass(const hsri_score_args *a, uint32_t head, uint32_t page, float mass)
{
    for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++)
        a->mass[head * a->mass_stride + page * HSRI_PAGE_UNITS + u] = mass;
}

static void score_mean(const hsri_score_args *a)
{
    hsri_index_layout at = hsri_index_layout_of(a->shape);

    for (uint32_t h = 0; h < a->n_heads; h++)
        for (uint32_t p = 0; p < a->n_pages; p++)
            store_page_mass(a, h, p, even_mass(a->scale * dot_mean(a, &at, a->queries + h * a->shape->head_dim, a->entries[p]),
                                               a->reference[h]));
}

/* A quarter of the variance of the page's logits, not the half that a normal distribution would have: the half overshoots. */
static void score_gaussian(const hsri_score_args *a)
{
    hsri_index_layout at = hsri_index_layout_of(a->shape);
    uint32_t          d = a->shape->head_dim;

    for (uint32_t h = 0; h < a->n_heads; h++) {
        const float *q = a->queries + (uint64_t)h * d;

        for (uint32_t p = 0; p < a->n_pages; p++) {
            const uint8_t *codes = a->entries[p] + at.codes;
            float          acc[LANES] = { 0 };

            for (uint32_t j = 0; j < d; j++)
                acc[j % LANES] += q[j] * q[j] * (float)codes[j];
            store_page_mass(a, h, p, even_mass(a->scale * dot_mean(a, &at, q, a->entries[p]) +
                                               0.25f * a->scale * a->scale * load_float(a->entries[p] + at.scales) * lanes_sum(acc),
                                               a->reference[h]));
        }
    }
}

/* sum_j max(q[j] low[j], q[j] high[j]) */
INLINE float dot_bounds(const float *q, const int8_t *low, const int8_t *high, uint32_t d)
{
    float    acc[LANES] = { 0 };
    uint32_t j = 0;

    for (; j + LANES <= d; j += LANES)
        for (uint32_t i = 0; i < LANES; i++)
            acc[i] += q[j + i] * (float)(q[j + i] < 0.0f ? low[j + i] : high[j + i]);
    for (uint32_t i = 0; j + i < d; i++)
        acc[i] += q[j + i] * (float)(q[j + i] < 0.0f ? low[j + i] : high[j + i]);
    return lanes_sum(acc);
}

static void score_minmax(const hsri_score_args *a)
{
    hsri_index_layout at = hsri_index_layout_of(a->shape);
    uint32_t          d = a->shape->head_dim;

    for (uint32_t h = 0; h < a->n_heads; h++) {
        const float *q = a->queries + (uint64_t)h * d;

        for (uint32_t u = 0; u < a->n_pages * HSRI_PAGE_UNITS; u++) {
            const uint8_t *entry = a->entries[u / HSRI_PAGE_UNITS];
            const int8_t  *low = (const int8_t *)entry + at.codes + u % HSRI_PAGE_UNITS * 2 * d;

            a->mass[h * a->mass_stride + u] = even_mass(a->scale * load_float(entry + at.scales) * dot_bounds(q, low, low + d, d),
                                                        a->reference[h]);
        }
    }
}

static void score_keys(const hsri_score_args *a, const float *const *keys)
{
    uint32_t d = a->shape->head_dim;

    for (uint32_t h = 0; h < a->n_heads; h++) {
        const float *q = a->queries + (uint64_t)h * d;

        for (uint32_t u = 0; u < a->n_pages * HSRI_PAGE_UNITS; u++) {
            const float *k = keys[u / HSRI_PAGE_UNITS] + (uint64_t)(u % HSRI_PAGE_UNITS) * HSRI_UNIT_TOKENS * d;
            float        sum = 0.0f;

            for (uint32_t t = 0; t < HSRI_UNIT_TOKENS; t++)
                sum += expf(a->scale * dot_float(q, k + (uint64_t)t * d, d) - a->reference[h]);
            a->mass[h * a->mass_stride + u] = as_mass(sum);
        }
    }
}

static void rotate(const float *matrix, const float *q, uint32_t d, float *out)
{
    uint32_t j = 0;

    for (; j + LANES <= d; j += LANES) {
        float acc[LANES] = { 0 };

        for (uint32_t i = 0; i < d; i++)
            for (uint32_t l = 0; l < LANES; l++)
                acc[l] += q[i] * matrix[(uint64_t)i * d + j + l];
        memcpy(out + j, acc, sizeof acc);
    }
    for (; j < d; j++) {
        out[j] = 0.0f;
        for (uint32_t i = 0; i < d; i++)
            out[j] += q[i] * matrix[(uint64_t)i * d + j];
    }
}

static float sum_floats(const float *x, uint64_t n)
{
    float    acc[LANES] = { 0 };
    uint64_t j = 0;

    for (; j + LANES <= n; j += LANES)
        for (uint32_t i = 0; i < LANES; i++)
            acc[i] += x[j + i];
    for (uint32_t i = 0; j + i < n; i++)
        acc[i] += x[j + i];
    return lanes_sum(acc);
}

static uint32_t reach(const float *x, uint32_t n, float least, uint32_t *out)
{
    uint32_t n_out = 0;

    for (uint32_t i = 0; i < n; i++) {
        out[n_out] = i;
        n_out += x[i] >= least;
    }
    return n_out;
}

/* A set is one lane of 16 lines. */
static void maxima(const float *x, float *out)
{
    float most[LANES] = { 0 };

    for (uint32_t line = 0; line < 16; line++)
        for (uint32_t i = 0; i < LANES; i++)
            most[i] = x[line * LANES + i] > most[i] ? x[line * LANES + i] : most[i];
    memcpy(out, most, sizeof most);
}

static void add_scaled(float *out, float weight, const float *x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] += weight * x[i];
}

/* Weights of one head's pages: the masses of their units. Returns their sum. */
INLINE float page_weights_of(const float *mass, uint32_t n_pages, float factor, float *weights)
{
    float all = 0.0f;

    for (uint32_t p = 0; p < n_pages; p++)
        weights[p] = factor * ((mass[4 * p] + mass[4 * p + 1]) + (mass[4 * p + 2] + mass[4 * p + 3]));
    for (uint32_t p = 0; p < n_pages; p++)
        all += weights[p];
    return all;
}

static void add_means(const uint8_t *const *entries, uint32_t n_pages, const hsri_index_shape *shape, uint32_t n_heads, const float *mass,
                      uint64_t mass_stride, const float *factors, float *out)
{
    hsri_index_layout at = hsri_index_layout_of(shape);
    uint32_t          d = shape->head_dim;
    float             weights[HSRI_SCORE_PAGES];

    for (uint32_t h = 0; h < n_heads; h++) {
        float *o = out + (uint64_t)h * (1 + d);

        o[0] += page_weights_of(mass + h * mass_stride, n_pages, factors[h], weights);
        for (uint32_t p = 0; p < n_pages; p++) {
            const int8_t *codes = (const int8_t *)entries[p] + at.mean_v;
            float         scaled = weights[p] * load_float(entries[p] + sizeof(float));

            if (weights[p] == 0.0f)
                continue;
            for (uint32_t j = 0; j < d; j++)
                o[1 + j] += scaled * (float)codes[j];
        }
    }
}

/* ---- the sketch ---- */

#define SKETCH_HEADS 16u
#define SKETCH_BLOCK 16u    /* components at a time */

/* Components [c0, c0 + n) of all tokens of a page, in the order of the codes: line by line. */
static void unpack_components(const hsri_index_shape *s, const uint8_t *codes, uint32_t c0, uint32_t n, float (*out)[HSRI_PAGE_TOKENS])
{
    for (uint32_t i = 0; i < n; i++) {
        bool           wide = c0 + i < s->n_4bit;
        uint32_t       c = wide ? c0 + i : c0 + i - s->n_4bit, bits = wide ? 4 : 2, per_set = 32 / bits, shift = c % per_set / 4 * bits;
        const uint8_t *line = codes + (wide ? 0 : HSRI_PAGE_TOKENS * s->n_4bit / 2) + (uint64_t)(c / per_set) * 256;
        float          middle = wide ? 7.5f : 1.5f;

        for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++) {
            uint32_t dword;

            memcpy(&dword, line + t * 4, sizeof dword);
            out[i][t] = (float)(int32_t)(dword >> (c % 4 * 8 + shift) & ((1u << bits) - 1)) - middle;
        }
    }
}

/* logits[h][64] += products of the heads' queries with components [c0, c0 + n) */
static void add_components(const hsri_score_args *a, uint32_t h0, uint32_t n_heads, const uint8_t *scales, uint32_t c0, uint32_t n,
                           float (*components)[HSRI_PAGE_TOKENS], float (*logits)[HSRI_PAGE_TOKENS])
{
    for (uint32_t h = 0; h < n_heads; h++) {
        for (uint32_t i = 0; i < n; i++) {
            uint16_t half;
            float    weight;

            memcpy(&half, scales + (c0 + i) * sizeof half, sizeof half);
            weight = a->rotated[(uint64_t)(h0 + h) * a->shape->head_dim + c0 + i] * hsri_f16_to_f32(half);
            for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++)
                logits[h][t] += weight * components[i][t];
        }
    }
}

/* sums[i] += exp(scale logits[i] + mean) of 16 tokens */
static inline void add_exps(const float *logits, float scale, float mean, float *sums)
{
    for (uint32_t i = 0; i < LANES; i++)
        sums[i] += expf(scale * logits[i] + mean);
}

static void score_page_sketch(const hsri_score_args *a, const hsri_index_layout *at, uint32_t h0, uint32_t n_heads, uint32_t page)
{
    const uint8_t *entry = a->entries[page];
    uint32_t       n = a->shape->n_4bit + a->shape->n_2bit;
    float          logits[SKETCH_HEADS][HSRI_PAGE_TOKENS], components[SKETCH_BLOCK][HSRI_PAGE_TOKENS];

    memset(logits, 0, n_heads * sizeof *logits);
    for (uint32_t c = 0; c < n; c += SKETCH_BLOCK) {
        uint32_t n_block = n - c < SKETCH_BLOCK ? n - c : SKETCH_BLOCK;

        unpack_components(a->shape, a->codes[page], c, n_block, components);
        add_components(a, h0, n_heads, entry + at->scales, c, n_block, components, logits);
    }
    for (uint32_t h = 0; h < n_heads; h++) {
        float *mass = a->mass + (h0 + h) * a->mass_stride + page * HSRI_PAGE_UNITS, sums[LANES] = { 0 };

        float  mean = a->scale * dot_mean(a, at, a->queries + (uint64_t)(h0 + h) * a->shape->head_dim, entry) - a->reference[h0 + h];

        for (uint32_t line = 0; line < HSRI_PAGE_TOKENS; line += LANES)
            add_exps(logits[h] + line, a->scale, mean, sums);
        for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++)
            mass[u] = as_mass((sums[4 * u] + sums[4 * u + 1]) + (sums[4 * u + 2] + sums[4 * u + 3]));
    }
}

static void score_sketch_lanes(const hsri_score_args *a)
{
    hsri_index_layout at = hsri_index_layout_of(a->shape);

    for (uint32_t h = 0; h < a->n_heads; h += SKETCH_HEADS)
        for (uint32_t p = 0; p < a->n_pages; p++)
            score_page_sketch(a, &at, h, a->n_heads - h < SKETCH_HEADS ? a->n_heads - h : SKETCH_HEADS, p);
}

/* What this header has, into a level's table. */
static void fill_lanes(hsri_sparse_kernels *k)
{
    k->score_sketch = score_sketch_lanes;
    k->score_minmax = score_minmax;
    k->score_gaussian = score_gaussian;
    k->score_mean = score_mean;
    k->score_keys = score_keys;
    k->rotate = rotate;
    k->sum = sum_floats;
    k->reach = reach;
    k->maxima = maxima;
    k->add_scaled = add_scaled;
    k->add_means = add_means;
}

#endif
