/* SPDX-License-Identifier: Apache-2.0 */
/* The index read by docs/sparse-attention.md in double precision, independently of the library's own code. */
#ifndef HSR_TESTS_INDEX_ORACLE_H
#define HSR_TESTS_INDEX_ORACLE_H

#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "device/kv_format.h"
#include "device/sparse_ops.h"

#define TOKENS HSRI_PAGE_TOKENS
#define UNITS HSRI_PAGE_UNITS

static inline float noise(uint64_t seed, uint64_t i) { return (float)(2 * hsri_rng_unit(seed, i) - 1); }

static inline void fill_noise(float *x, uint64_t n, uint64_t seed, float size)
{
    for (uint64_t i = 0; i < n; i++)
        x[i] = size * noise(seed, i);
}

static inline double half_at(const uint8_t *p)
{
    uint16_t h, exponent;

    memcpy(&h, p, 2);
    exponent = h >> 10 & 31;
    return exponent ? (1024 + (h & 1023)) * (double)(1u << exponent) / (1u << 25) : (h & 1023) / (double)(1u << 24);
}

static inline double float_at(const uint8_t *p)
{
    float f;

    memcpy(&f, p, 4);
    return (double)f;
}

static inline hsri_index_shape shape_of(uint32_t kind, uint32_t d, uint32_t n_4bit, uint32_t n_2bit)
{
    hsri_index_shape s = { .kind = kind, .head_dim = d, .n_4bit = n_4bit, .n_2bit = n_2bit };

    hsri_index_shape_fill(&s);
    return s;
}

/* A calibration with a b^T = 1: a reflection times a diagonal, and times its inverse. */
static inline void fill_calibration(float *record, uint32_t d, uint64_t seed)
{
    double u[512], norm = 0;

    for (uint32_t i = 0; i < d; i++) {
        u[i] = (double)noise(seed, i);
        norm += u[i] * u[i];
    }
    for (uint32_t i = 0; i < d; i++) {
        double stretch = exp((double)noise(seed + 1, i));

        for (uint32_t j = 0; j < d; j++) {
            double h = (i == j) - 2 * u[i] * u[j] / norm;

            record[i * d + j] = (float)(stretch * h);
            record[d * d + i * d + j] = (float)(h / stretch);
        }
    }
    fill_noise(record + 2 * d * d, 2 * d, seed + 2, 1.0f);
}

/* ---- what an entry says, by docs/sparse-attention.md ---- */

static inline double mean_key(const hsri_index_shape *s, const uint8_t *entry, const float *about, uint32_t j)
{
    return float_at(entry) * (int8_t)entry[8 + j] + (s->kind == HSRI_INDEX_SKETCH ? (double)about[j] : 0);
}

static inline double mean_value(const hsri_index_shape *s, const uint8_t *entry, const float *about, uint32_t j)
{
    return float_at(entry + 4) * (int8_t)entry[8 + s->head_dim + j] + (s->kind == HSRI_INDEX_SKETCH ? (double)about[j] : 0);
}

/* Component c of token t, and its step. */
static inline double sketch_value(const hsri_index_shape *s, const uint8_t *entry, const uint8_t *codes, uint32_t c, uint32_t t,
                                  double *step, int *code)
{
    uint32_t unit = t / 16, line = t % 16 / 4, lane = unit * 4 + t % 4;

    *step = half_at(entry + 8 + 2 * s->head_dim + 2 * c);
    if (c < s->n_4bit) {
        uint8_t byte = codes[(c / 8 * 4 + line) * 64 + lane * 4 + c % 4];

        *code = c % 8 < 4 ? byte & 15 : byte >> 4;
        return (*code - 7.5) * *step;
    }
    codes += TOKENS * s->n_4bit / 2;
    c -= s->n_4bit;
    *code = codes[(c / 16 * 4 + line) * 64 + lane * 4 + c % 4] >> c % 16 / 4 * 2 & 3;
    return (*code - 1.5) * *step;
}

/* Log of the sum over some of a unit's tokens of exp(logit), as the entry has it; `tokens` matters to the sketch alone. */
static inline double tokens_log_mass(const hsri_index_shape *s, const uint8_t *entry, const uint8_t *codes, const float *calibration,
                                     uint32_t selector, uint32_t unit, uint32_t tokens, const float *q, const float *rotated, double scale)
{
    uint32_t     d = s->head_dim;
    const float *about = calibration ? calibration + 2 * d * d : NULL;
    double       mean = 0, bound = 0, variance = 0, logits[16], most = -INFINITY, sum = 0;

    for (uint32_t j = 0; j < d; j++)
        mean += (double)q[j] * mean_key(s, entry, about, j);
    if (selector == HSRI_SELECT_SKETCH) {
        for (uint32_t t = 0; t < 16; t++) {
            logits[t] = mean;
            for (uint32_t c = 0; c < s->n_4bit + s->n_2bit; c++) {
                double step;
                int    code;

                logits[t] += (double)rotated[c] * sketch_value(s, entry, codes, c, unit * 16 + t, &step, &code);
            }
            logits[t] = tokens >> t & 1 ? logits[t] * scale : -INFINITY;
            most = fmax(most, logits[t]);
        }
        for (uint32_t t = 0; t < 16; t++)
            sum += tokens >> t & 1 ? exp(logits[t] - most) : 0;
        return most + log(sum);
    }
    for (uint32_t j = 0; j < d && selector == HSRI_SELECT_MINMAX; j++) {
        const int8_t *low = (const int8_t *)entry + 12 + 2 * d + unit * 2 * d;

        bound += float_at(entry + 8 + 2 * d) * fmax((double)q[j] * low[j], (double)q[j] * low[d + j]);
    }
    if (selector == HSRI_SELECT_MINMAX)
        return scale * bound + log(16);
    for (uint32_t j = 0; j < d && selector == HSRI_SELECT_GAUSSIAN; j++)
        variance += (double)q[j] * (double)q[j] * float_at(entry + 8 + 2 * d) * entry[12 + 2 * d + j];
    return scale * mean + 0.25 * scale * scale * variance + log(16);
}

static inline double unit_log_mass(const hsri_index_shape *s, const uint8_t *entry, const uint8_t *codes, const float *calibration,
                                   uint32_t selector, uint32_t unit, const float *q, const float *rotated, double scale)
{
    return tokens_log_mass(s, entry, codes, calibration, selector, unit, 0xffff, q, rotated, scale);
}

#endif
