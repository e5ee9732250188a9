/* SPDX-License-Identifier: Apache-2.0 */
/* Making index entries: plain C, which each level compiles for its own vectors, with the same bits (lanes.h). To be included once by a file
 * of each level. */
#ifndef HSRI_CPU_INDEX_ENCODE_H
#define HSRI_CPU_INDEX_ENCODE_H

#include <stdbool.h>

#include "device/cpu/kernels.h"
#include "device/cpu/lanes.h"
#include "device/cpu/wide.h"

/* ---- numbers ---- */

/* Nearest float16 to a float that is not negative, at most the largest finite one. */
static uint16_t to_f16(float f)
{
    float    limited = f < 65504.0f ? f : 65504.0f, rounded;
    uint32_t u;

    if (limited < 0x1p-14f)
        return (uint16_t)lrintf(limited * 0x1p24f);
    memcpy(&u, &limited, sizeof u);
    u += 0xFFFu + (u >> 13 & 1u);      /* to nearest, ties to even */
    u &= ~0x1FFFu;
    memcpy(&rounded, &u, sizeof rounded);
    return rounded > 65504.0f ? 0x7BFF : (uint16_t)((u >> 13) - (112u << 10));
}

static float largest(const float *x, uint64_t n)
{
    float    most[LANES] = { 0 };
    uint64_t i = 0;

    for (; i + LANES <= n; i += LANES)
        for (uint32_t l = 0; l < LANES; l++)
            most[l] = fabsf(x[i + l]) > most[l] ? fabsf(x[i + l]) : most[l];
    for (; i < n; i++)
        most[0] = fabsf(x[i]) > most[0] ? fabsf(x[i]) : most[0];
    for (uint32_t l = 1; l < LANES; l++)
        most[0] = most[l] > most[0] ? most[l] : most[0];
    return most[0];
}

static int round_code(float x, int low, int high)
{
    float r = rintf(x);

    return r < (float)low ? low : r > (float)high ? high : (int)r;
}

/* ---- means ---- */

static void mean_of(const float *x, uint32_t d, float *mean)
{
    memset(mean, 0, d * sizeof *mean);
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++)
        for (uint32_t j = 0; j < d; j++)
            mean[j] += x[(uint64_t)t * d + j];
    for (uint32_t j = 0; j < d; j++)
        mean[j] *= 1.0f / HSRI_PAGE_TOKENS;
}

/* Codes of mean - about, whose scale is NaN if something is not finite: such a page has mass 0, and such values show. */
static void put_mean(const float *mean, const float *about, uint32_t d, float *work, int8_t *codes, uint8_t *scale_at)
{
    float scale;

    for (uint32_t j = 0; j < d; j++)
        work[j] = mean[j] - (about ? about[j] : 0.0f);
    scale = all_finite(work, d) ? largest(work, d) / 127.0f : NAN;
    memcpy(scale_at, &scale, sizeof scale);
    for (uint32_t j = 0; j < d && scale > 0.0f; j++)
        codes[j] = (int8_t)round_code(work[j] / scale, -127, 127);
}

/* ---- the sketch ---- */

/* z[64] = component c of the centred keys, which are [d][64]. All tokens at once: sums of one token alone would wait for each other. */
static void component(const float *a, uint32_t c, uint32_t d, const float *keys, float *z)
{
    float acc[HSRI_PAGE_TOKENS] = { 0 };

    for (uint32_t i = 0; i < d; i++) {
        const float weight = a[(uint64_t)i * d + c], *x = keys + (uint64_t)i * HSRI_PAGE_TOKENS;

        for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++)
            acc[t] += weight * x[t];
    }
    memcpy(z, acc, sizeof acc);
}

/* Levels are the odd multiples of half a scale: a code stands for (code - middle) scale, with middle 7.5 or 1.5. */
INLINE float level_of(float z, float inverse, float middle)
{
    float code = z * inverse + (middle + 0.5f);

    code = code > 0.0f ? code : 0.0f;
    code = code < 2.0f * middle ? code : 2.0f * middle;
    return (float)(int)code - middle;
}

/* Squared error of z at a scale; the scale that would be best for the same levels goes to *better. */
static float scale_error(const float *z, float scale, float middle, float *better)
{
    float error[LANES] = { 0 }, product[LANES] = { 0 }, square[LANES] = { 0 }, inverse = 1.0f / scale, squares;

    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t += LANES) {
        for (uint32_t l = 0; l < LANES; l++) {
            float level = level_of(z[t + l], inverse, middle), off = z[t + l] - level * scale;

            error[l] += off * off;
            product[l] += z[t + l] * level;
            square[l] += level * level;
        }
    }
    squares = lanes_sum(square);
    *better = lanes_sum(product) / squares;
    return lanes_sum(error);
}

/* The scale of one component: wide enough for all of z, or less, whatever gives the smallest error; outliers are cut off. */
static float choose_scale(const float *z, float middle)
{
    static const float shares[] = { 1.0f, 0.9f, 0.8f, 0.7f, 0.6f, 0.5f };
    float              widest = largest(z, HSRI_PAGE_TOKENS) / (middle + 0.5f), best = widest, least = INFINITY;

    if (!(widest > 1e-30f))
        return 0.0f;
    for (uint32_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        float better, error = scale_error(z, widest * shares[i], middle, &better);

        if (error < least && better > 0.0f) {
            least = error;
            best = better;
        }
    }
    return best;
}

/* A set of components (hsri_sketch_token): a word for each token of the page. */
typedef struct sketch_set {
    uint32_t words[HSRI_PAGE_TOKENS];
} sketch_set;

/* Codes of component c of the set; `bits` is 4 or 2. */
static void put_codes(const float *z, float scale, uint32_t c, uint32_t bits, sketch_set *set)
{
    const uint32_t shift = c % 4 * 8 + c / 4 * bits;
    const float    middle = bits == 4 ? 7.5f : 1.5f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;

    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++)
        set->words[t] |= (uint32_t)(int32_t)(level_of(z[t], inverse, middle) + middle) << shift;
}

/* Tokens in the order of lines and lanes: four neighbours at a time stay neighbours. */
static void put_set(const sketch_set *set, uint8_t *codes)
{
    for (uint32_t line = 0; line < HSRI_PAGE_UNITS; line++)
        for (uint32_t lane = 0; lane < 16; lane += 4, codes += 4 * sizeof *set->words)
            memcpy(codes, set->words + hsri_sketch_token(line, lane), 4 * sizeof *set->words);
}

/* keys[d][64] = k[64][d] - mean */
static void center_keys(const float *k, const float *mean, uint32_t d, float *keys)
{
    const uint32_t whole = d / WIDE * WIDE;

    transpose(k, d, HSRI_PAGE_TOKENS, whole, mean, keys, HSRI_PAGE_TOKENS);
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++)
        for (uint32_t i = whole; i < d; i++)
            keys[i * HSRI_PAGE_TOKENS + t] = k[(uint64_t)t * d + i] - mean[i];
}

/* scratch: keys[d][64], then one component */
static bool put_sketch(const hsri_index_shape *shape, const hsri_calibration_record *calibration, const float *k, const float *mean,
                       uint8_t *entry, uint8_t *codes, float *scratch)
{
    hsri_index_layout at = hsri_index_layout_of(shape);
    uint32_t          d = shape->head_dim, n = shape->n_4bit + shape->n_2bit;
    float            *keys = scratch, *z = keys + (uint64_t)HSRI_PAGE_TOKENS * d;
    sketch_set        set;

    center_keys(k, mean, d, keys);
    for (uint32_t c = 0, in_set = 0; c < n; c++) {
        const bool wide = c < shape->n_4bit;
        uint16_t   half;
        float      scale;

        component(calibration->a, c, d, keys, z);
        if (!all_finite(z, HSRI_PAGE_TOKENS))
            return false;
        half = to_f16(choose_scale(z, wide ? 7.5f : 1.5f));
        scale = hsri_f16_to_f32(half);
        memcpy(entry + at.scales + c * sizeof half, &half, sizeof half);
        if (in_set == 0)
            memset(&set, 0, sizeof set);
        put_codes(z, scale, in_set++, wide ? 4 : 2, &set);
        if (in_set == (wide ? 8 : 16)) {
            put_set(&set, codes);
            codes += sizeof set;
            in_set = 0;
        }
    }
    return true;
}

/* ---- the other kinds ---- */

/* Bounds are rounded outwards, so that they stay bounds. */
static void put_bounds(const hsri_index_shape *shape, const float *k, uint8_t *entry)
{
    hsri_index_layout at = hsri_index_layout_of(shape);
    uint32_t          d = shape->head_dim;
    float             scale = largest(k, (uint64_t)HSRI_PAGE_TOKENS * d) / 127.0f;

    memcpy(entry + at.scales, &scale, sizeof scale);
    for (uint32_t u = 0; u < HSRI_PAGE_UNITS && scale > 0.0f; u++) {
        int8_t *low = (int8_t *)entry + at.codes + u * 2 * d, *high = low + d;

        for (uint32_t j = 0; j < d; j++) {
            const float *x = k + (uint64_t)u * HSRI_UNIT_TOKENS * d + j;
            float        least = x[0], most = x[0];

            for (uint32_t t = 1; t < HSRI_UNIT_TOKENS; t++) {
                least = x[(uint64_t)t * d] < least ? x[(uint64_t)t * d] : least;
                most = x[(uint64_t)t * d] > most ? x[(uint64_t)t * d] : most;
            }
            low[j] = (int8_t)round_code(floorf(least / scale), -127, 127);
            high[j] = (int8_t)round_code(ceilf(most / scale), -127, 127);
        }
    }
}

static void put_variances(const hsri_index_shape *shape, const float *k, const float *mean, uint8_t *entry, float *variance)
{
    hsri_index_layout at = hsri_index_layout_of(shape);
    uint32_t          d = shape->head_dim;
    float             scale;

    memset(variance, 0, d * sizeof *variance);
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++)
        for (uint32_t j = 0; j < d; j++)
            variance[j] += (k[(uint64_t)t * d + j] - mean[j]) * (k[(uint64_t)t * d + j] - mean[j]) * (1.0f / HSRI_PAGE_TOKENS);
    scale = largest(variance, d) / 255.0f;
    memcpy(entry + at.scales, &scale, sizeof scale);
    for (uint32_t j = 0; j < d && scale > 0.0f && scale < INFINITY; j++)
        entry[at.codes + j] = (uint8_t)round_code(variance[j] / scale, 0, 255);
}

static void encode(const hsri_index_shape *shape, const hsri_calibration_record *calibration, const float *k, const float *v,
                   uint8_t *entry, uint8_t *codes, float *scratch)
{
    hsri_index_layout at = hsri_index_layout_of(shape);
    uint32_t          d = shape->head_dim;
    uint64_t          n = (uint64_t)HSRI_PAGE_TOKENS * d;
    bool              sketch = shape->kind == HSRI_INDEX_SKETCH, good = all_finite(k, n);
    float            *mean = scratch, *work = mean + d;
    const float       lost = NAN;

    memset(entry, 0, shape->entry_bytes);
    if (sketch)
        memset(codes, 0, shape->code_bytes);
    mean_of(v, d, mean);
    put_mean(mean, sketch ? calibration->mean_v : NULL, d, work, (int8_t *)entry + at.mean_v, entry + sizeof(float));
    mean_of(k, d, mean);
    put_mean(mean, sketch ? calibration->mean_k : NULL, d, work, (int8_t *)entry + at.mean_k, entry);
    if (good && sketch)
        good = put_sketch(shape, calibration, k, mean, entry, codes, work);
    else if (good && shape->kind == HSRI_INDEX_MINMAX)
        put_bounds(shape, k, entry);
    else if (good)
        put_variances(shape, k, mean, entry, work);
    if (!good) {
        memcpy(entry, &lost, sizeof lost);
        if (!sketch)
            memcpy(entry + at.scales, &lost, sizeof lost);
    }
}

#endif
