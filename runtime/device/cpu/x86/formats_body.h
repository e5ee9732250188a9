/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over encoded pages, written once over `vec`: WIDTH floats. An instruction set's file defines the words and includes this.
 *
 * Codes of up to one page become floats in the first-level cache, once for all queries; scales do not touch them. For keys they are
 * multiplied into the queries, page by page; for values, into the page's sum. Lanes are tokens in scores and components in the output,
 * and each has its own chain of FMAs in an order that the list of units alone decides. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"
#include "device/formats.h"

#define UNROLL _Pragma("GCC unroll 16")

#define UNIT HSRI_UNIT_TOKENS
#define UNIT_VECS (UNIT / WIDTH)
#define GROUP (HSRI_UNITS_MAX * UNIT)

/* Call f(rows, ...) with rows, at most TILE_ROWS, as a constant. */
#define CALL_WITH_ROWS(rows, f, ...) \
    switch (rows) { \
    case 1: f(1, __VA_ARGS__); break; \
    case 2: f(2, __VA_ARGS__); break; \
    ROWS_CASE(3, f, __VA_ARGS__) \
    ROWS_CASE(4, f, __VA_ARGS__) \
    ROWS_CASE(5, f, __VA_ARGS__) \
    ROWS_CASE(6, f, __VA_ARGS__) \
    }
#define ROWS_CASE(n, f, ...) \
    case n: \
        if (n <= TILE_ROWS) { \
            f(n, __VA_ARGS__); \
        } \
        break;

/* Units of one page that are attended together, and the work space of a call. */
typedef struct page_run {
    const uint8_t *slot;
    const uint8_t *units;
    uint32_t first, n;      /* of the call's units */
} page_run;

typedef struct work {
    float *scores;          /* [queries][GROUP] */
    float *codes;           /* keys: [units][d][UNIT]; values: [tokens][stride] */
    float *scale, *mean;    /* [stride], zeros behind d */
    float *scaled;          /* [TILE_ROWS][stride]: queries times key scales */
    uint32_t stride;        /* d rounded up to 16 */
} work;

static work work_of(const hsri_units_args *a)
{
    uint32_t stride = (uint32_t)hsri_round_up(a->head_dim, 16);
    float *codes = a->scratch + HSRI_ATTEND_MAX_QUERIES * GROUP;
    float *scale = codes + HSRI_PAGE_TOKENS * stride;
    return (work) { a->scratch, codes, scale, scale + stride, scale + 2 * stride, stride };
}

_Static_assert(2 + TILE_ROWS <= 16, "scales, means and a tile's queries fit the scratch");

static page_run run_at(const hsri_units_args *a, uint32_t first)
{
    uint32_t n = 1;
    while (first + n < a->n_units && a->slots[first + n] == a->slots[first] && n < HSRI_PAGE_UNITS) {
        n++;
    }
    return (page_run) { a->slots[first], a->units + first, first, n };
}

static inline uint32_t next_part(uint32_t left, uint32_t most)
{
    uint32_t n_parts = (left + most - 1) / most;
    return (left + n_parts - 1) / n_parts;
}

/* ---- scales and means ---- */

/* Of keys or values. Calls for int8 come with any d, those for the other formats with multiples of 16. */
INLINE void read_scales(hsri_kv_type format, const hsri_units_args *a, const uint8_t *slot, bool values, const work *w)
{
    const uint32_t d = a->head_dim;
    if (format == HSRI_KV_TYPE_INT8) {
        const uint8_t *mean = hsri_int8_array(slot, d, values ? HSRI_INT8_V_MEAN : HSRI_INT8_K_MEAN);
        const uint8_t *scale = hsri_int8_array(slot, d, values ? HSRI_INT8_V_SCALE : HSRI_INT8_K_SCALE);
        memset(w->scale + w->stride - 16, 0, 16 * sizeof *w->scale);
        memset(w->mean + w->stride - 16, 0, 16 * sizeof *w->mean);
        memcpy(w->mean, mean, d * sizeof *w->mean);
        memcpy(w->scale, scale, d * sizeof *w->scale);
        return;
    }
    hsri_page_header h;
    memcpy(&h, slot, sizeof h);
    const uint8_t *bytes = values ? hsri_value_scales(slot, d) : hsri_key_scales(slot);
    const uint8_t *means = values ? hsri_value_means(slot, d) : hsri_key_means(slot, d);
    const float *about = values ? a->calibration.mean_v : a->calibration.mean_k;
    vec unit = vec_set(values ? h.v_unit : h.k_unit), step = vec_set(values ? h.v_scale : h.k_scale);
    for (uint32_t j = 0; j < d; j += WIDTH) {
        vec_store(w->scale + j, vec_mul(unit, vec_scale_bytes(bytes + j)));
        vec_store(w->mean + j, vec_fma(step, vec_int8(means + j), vec_load(about + j)));
    }
}

/* ---- scores ---- */

/* out[d][UNIT] */
INLINE void unpack_keys(hsri_kv_type format, const uint8_t *slot, uint32_t d, uint32_t unit, float *out)
{
    if (format == HSRI_KV_TYPE_INT8) {
        const uint8_t *keys = hsri_int8_keys(slot, d) + unit * UNIT;
        for (uint32_t j = 0; j < d; j++) {
            UNROLL
            for (uint32_t i = 0; i < UNIT_VECS; i++) {
                vec_store(out + j * UNIT + i * WIDTH, vec_int8(keys + j * HSRI_PAGE_TOKENS + i * WIDTH));
            }
        }
        return;
    }
    const uint8_t *nibbles = hsri_key_nibbles(slot, d, unit), *pairs = hsri_key_pairs(slot, d, unit), *lows = hsri_key_lows(slot, d, unit);
    const uint32_t n6 = hsri_n6(d), half = d / 2;
    for (uint32_t j = 0; j < half; j += 8) {
        UNROLL
        for (uint32_t i = 0; i < UNIT_VECS; i++) {
            ivec four = ivec_load(nibbles + j * 8 + i * WIDTH * 4), two = ivec_load_u16(pairs + j * 4 + i * WIDTH * 2);
            UNROLL
            for (uint32_t c = 0; c < 8; c++) {
                vec_store(out + (j + c) * UNIT + i * WIDTH, vec_nibble_about_0(four, c));
                vec_store(out + (half + j + c) * UNIT + i * WIDTH, vec_pair_about_0(two, c));
            }
        }
    }
    for (uint32_t j = 0; j < n6; j++) {
        UNROLL
        for (uint32_t i = 0; i < UNIT_VECS; i++) {
            float *at = out + j * UNIT + i * WIDTH;
            vec_store(at, vec_fma(vec_load(at), vec_set(4.0f), vec_low_plane(lows + 4 * j, i)));
        }
    }
}

/* Queries times scales, and what the page's mean key adds to all scores: rows of a tile. */
INLINE void scale_queries(hsri_kv_type format, uint32_t rows, const hsri_units_args *a, uint32_t query, const work *w,
                         float constant[TILE_ROWS])
{
    const uint32_t d = a->head_dim;
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const float *q = a->queries[query + r], *x = format == HSRI_KV_TYPE_INT8 ? q : a->rotated[query + r];
        vec sum[2] = { vec_zero(), vec_zero() };
        for (uint32_t j = 0; j < d; j += WIDTH) {
            uint32_t n = d - j;
            vec_store(w->scaled + r * w->stride + j, vec_mul(vec_load_n(x + j, n), vec_load(w->scale + j)));
            sum[j / WIDTH % 2] = vec_fma(vec_load_n(q + j, n), vec_load(w->mean + j), sum[j / WIDTH % 2]);
        }
        constant[r] = vec_sum2(sum[0], sum[1]);
    }
}

/* Scores of a tile of rows and `units` neighbouring units: an even and an odd chain over the components. */
INLINE void score_tile(uint32_t rows, uint32_t units, const hsri_units_args *a, uint32_t query, uint32_t unit, const float *codes,
                       const work *w, const float constant[TILE_ROWS])
{
    const uint32_t d = a->head_dim, vecs = units * UNIT_VECS;
    vec chains[2][TILE_ROWS][2 * UNIT_VECS];
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t i = 0; i < vecs; i++) {
            chains[0][r][i] = chains[1][r][i] = vec_zero();
        }
    }
    for (uint32_t j = 0; j + 2 <= d; j += 2) {
        UNROLL
        for (uint32_t c = 0; c < 2; c++) {
            vec key[2 * UNIT_VECS];
            UNROLL
            for (uint32_t i = 0; i < vecs; i++) {
                key[i] = vec_load(codes + (i / UNIT_VECS * d + j + c) * UNIT + i % UNIT_VECS * WIDTH);
            }
            UNROLL
            for (uint32_t r = 0; r < rows; r++) {
                vec q = vec_set(w->scaled[r * w->stride + j + c]);
                UNROLL
                for (uint32_t i = 0; i < vecs; i++) {
                    chains[c][r][i] = vec_fma(key[i], q, chains[c][r][i]);
                }
            }
        }
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        float *scores = w->scores + (query + r) * GROUP + unit * UNIT;
        UNROLL
        for (uint32_t i = 0; i < vecs; i++) {
            vec sum = vec_add(chains[0][r][i], chains[1][r][i]);
            vec_store(scores + i * WIDTH, vec_mul(vec_add(sum, vec_set(constant[r])), vec_set(a->scale)));
        }
    }
}

INLINE void score_rows(uint32_t rows, hsri_kv_type format, const hsri_units_args *a, uint32_t query, const page_run *run, const work *w)
{
    float constant[TILE_ROWS];
    uint32_t u = 0;
    scale_queries(format, rows, a, query, w, constant);
    for (; u + TILE_UNITS <= run->n; u += TILE_UNITS) {
        score_tile(rows, TILE_UNITS, a, query, run->first + u, w->codes + u * a->head_dim * UNIT, w, constant);
    }
    if (TILE_UNITS > 1 && u < run->n) {
        score_tile(rows, 1, a, query, run->first + u, w->codes + u * a->head_dim * UNIT, w, constant);
    }
}

INLINE void score_run(hsri_kv_type format, const hsri_units_args *a, const page_run *run, const work *w)
{
    read_scales(format, a, run->slot, false, w);
    for (uint32_t u = 0; u < run->n; u++) {
        unpack_keys(format, run->slot, a->head_dim, run->units[u], w->codes + u * a->head_dim * UNIT);
    }
    for (uint32_t i = 0, rows; i < a->n_queries; i += rows) {
        rows = next_part(a->n_queries - i, TILE_ROWS);
        CALL_WITH_ROWS(rows, score_rows, format, a, i, run, w)
    }
}

/* ---- softmax ---- */

/* e^a: 2^n e^r with |r| <= ln(2)/2, e^r by its Taylor series, whose first missing term is below 6e-9. NaN stays NaN. */
static inline vec vec_exp(vec a)
{
    static const float inverse_factorial[] = { 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f };
    a = vec_max(vec_set(-104.0f), vec_min(vec_set(89.0f), a));
    vec n = vec_round(vec_mul(a, vec_set(0x1.715476p+0f)));
    vec r = vec_fnma(n, vec_set(0x1.62e400p-1f), a);
    r = vec_fnma(n, vec_set(0x1.7f7d1cp-20f), r);
    vec p = vec_set(1.0f / 5040);
    UNROLL
    for (uint32_t i = 0; i < 7; i++) {
        p = vec_fma(p, r, vec_set(inverse_factorial[i]));
    }
    return vec_scale2(p, n);
}

/* Scores of one query into exp(score - max), in place. A NaN score never becomes the maximum, but its exp is NaN. */
static void softmax(float *scores, uint32_t n, float *max, float *sum)
{
    vec largest[2] = { vec_set(-INFINITY), vec_set(-INFINITY) }, total[2] = { vec_zero(), vec_zero() };
    for (uint32_t t = 0; t < n; t += WIDTH) {
        largest[t / WIDTH % 2] = vec_max(vec_load(scores + t), largest[t / WIDTH % 2]);
    }
    *max = vec_largest(vec_max(largest[0], largest[1]));
    for (uint32_t t = 0; t < n; t += WIDTH) {
        vec p = vec_exp(vec_sub(vec_load(scores + t), vec_set(*max)));
        vec_store(scores + t, p);
        total[t / WIDTH % 2] = vec_add(total[t / WIDTH % 2], p);
    }
    *sum = vec_sum2(total[0], total[1]);
}

/* ---- output ---- */

/* Further bits of vtq, token by token: out[UNIT][stride] */
INLINE void unpack_vtq_values(const uint8_t *slot, uint32_t d, uint32_t unit, float *out)
{
    const uint8_t *codes = hsri_value_unit(HSRI_KV_TYPE_VTQ, slot, d, unit), *words = codes + 8 * d;
    hsri_page_header h;
    memcpy(&h, slot, sizeof h);
    for (uint32_t t = 0; t < UNIT; t++) {
        uint32_t token = unit * UNIT + t, n_low = hsri_vtq_low_bits(&h, token), low_shift = hsri_vtq_low_shift(&h, token);
        /* a code is (high << n_low | low) * step + first */
        float step = h.wide == 0 ? 0.5f : n_low ? 0.25f : h.narrow, first = h.wide == 0 ? -7.75f : n_low ? -7.875f : -7.5f * h.narrow;
        for (uint32_t j = 0; j < d; j += WIDTH) {
            ivec high = ivec_and(ivec_srl(ivec_load(codes + (t / 8 * d + j) * 4), hsri_nibble_shift(t % 8)), 15);
            ivec low = ivec_and(ivec_srl(ivec_load_u16(words + j * 2), low_shift), (1u << n_low) - 1);
            vec code = vec_from_int(ivec_or(ivec_sll(high, n_low), low));
            vec_store(out + t * d + j, vec_fma(code, vec_set(step), vec_set(first)));
        }
    }
}

/* out[UNIT][stride] */
INLINE void unpack_values(hsri_kv_type format, const uint8_t *slot, uint32_t d, uint32_t unit, uint32_t stride, float *out)
{
    if (format == HSRI_KV_TYPE_INT8) {
        const uint8_t *values = hsri_int8_values(slot, d) + unit * UNIT * d;
        for (uint32_t t = 0; t < UNIT; t++) {
            for (uint32_t j = 0; j < d; j += WIDTH) {
                vec_store(out + t * stride + j, vec_int8_n(values + t * d + j, d - j));
            }
            for (uint32_t j = (uint32_t)hsri_round_up(d, WIDTH); j < stride; j += WIDTH) {
                vec_store(out + t * stride + j, vec_zero());
            }
        }
        return;
    }
    if (format == HSRI_KV_TYPE_VTQ) {
        unpack_vtq_values(slot, d, unit, out);
        return;
    }
    const uint8_t *codes = hsri_value_unit(format, slot, d, unit);
    for (uint32_t octet = 0; octet < UNIT / 8; octet++) {
        for (uint32_t j = 0; j < d; j += WIDTH) {
            ivec dwords = ivec_load(codes + (octet * d + j) * 4);
            UNROLL
            for (uint32_t t = 0; t < 8; t++) {
                vec_store(out + (octet * 8 + t) * d + j, vec_nibble(dwords, t));
            }
        }
    }
}

/* o += scale * (sum over tokens of p code) + mean * (sum of p), `strips` vectors of components from j on. */
INLINE void value_strips(uint32_t rows, uint32_t strips, const hsri_units_args *a, uint32_t query, const page_run *run, const work *w,
                         uint32_t j, const float weight[TILE_ROWS])
{
    vec acc[TILE_ROWS][TILE_STRIPS];
    const float *p[TILE_ROWS];
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        p[r] = w->scores + (query + r) * GROUP + run->first * UNIT;
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            acc[r][s] = vec_zero();
        }
    }
    const float *codes = w->codes + j;
    for (uint32_t t = 0; t < run->n * UNIT; t++, codes += w->stride) {
        vec value[TILE_STRIPS];
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            value[s] = vec_load(codes + s * WIDTH);
        }
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            vec weight_of = vec_set(p[r][t]);
            UNROLL
            for (uint32_t s = 0; s < strips; s++) {
                acc[r][s] = vec_fma(value[s], weight_of, acc[r][s]);
            }
        }
    }
    UNROLL
    for (uint32_t s = 0; s < strips; s++) {
        vec scale = vec_load(w->scale + j + s * WIDTH), mean = vec_load(w->mean + j + s * WIDTH);
        uint32_t n = a->head_dim > j + s * WIDTH ? a->head_dim - j - s * WIDTH : 0;
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            float *o = a->partials[query + r] + 2 + j + s * WIDTH;
            vec sum = vec_fma(mean, vec_set(weight[r]), vec_load_n(o, n));
            vec_store_n(o, vec_fma(scale, acc[r][s], sum), n);
        }
    }
}

INLINE void value_rows(uint32_t rows, const hsri_units_args *a, uint32_t query, const page_run *run, const work *w)
{
    float weight[TILE_ROWS];
    uint32_t j = 0;
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const float *p = w->scores + (query + r) * GROUP + run->first * UNIT;
        vec sum[2] = { vec_zero(), vec_zero() };
        for (uint32_t t = 0; t < run->n * UNIT; t += WIDTH) {
            sum[t / WIDTH % 2] = vec_add(sum[t / WIDTH % 2], vec_load(p + t));
        }
        weight[r] = vec_sum2(sum[0], sum[1]);
    }
    for (; j + TILE_STRIPS * WIDTH <= w->stride; j += TILE_STRIPS * WIDTH) {
        value_strips(rows, TILE_STRIPS, a, query, run, w, j, weight);
    }
    for (; j < w->stride; j += WIDTH) {
        value_strips(rows, 1, a, query, run, w, j, weight);
    }
}

/* Nibbles come as 0 .. 15; their middle goes into the mean. */
INLINE void center_nibbles(const work *w)
{
    for (uint32_t j = 0; j < w->stride; j += WIDTH) {
        vec_store(w->mean + j, vec_fnma(vec_set(7.5f), vec_load(w->scale + j), vec_load(w->mean + j)));
    }
}

INLINE void value_run(hsri_kv_type format, const hsri_units_args *a, const page_run *run, const work *w)
{
    read_scales(format, a, run->slot, true, w);
    if (format == HSRI_KV_TYPE_COMPACT) {
        center_nibbles(w);
    }
    for (uint32_t u = 0; u < run->n; u++) {
        unpack_values(format, run->slot, a->head_dim, run->units[u], w->stride, w->codes + u * UNIT * w->stride);
    }
    for (uint32_t i = 0, rows; i < a->n_queries; i += rows) {
        rows = next_part(a->n_queries - i, TILE_ROWS);
        CALL_WITH_ROWS(rows, value_rows, a, i, run, w)
    }
}

/* ---- calls ---- */

INLINE void attend_any(hsri_kv_type format, const hsri_units_args *a)
{
    work w = work_of(a);
    page_run run;
    for (uint32_t i = 0; i < a->n_units; i += run.n) {
        run = run_at(a, i);
        score_run(format, a, &run, &w);
    }
    for (uint32_t i = 0; i < a->n_queries; i++) {
        float *partial = a->partials[i];
        softmax(w.scores + i * GROUP, a->n_units * UNIT, &partial[0], &partial[1]);
        memset(partial + 2, 0, a->head_dim * sizeof *partial);
    }
    for (uint32_t i = 0; i < a->n_units; i += run.n) {
        run = run_at(a, i);
        value_run(format, a, &run, &w);
    }
}

static void attend_int8(const hsri_units_args *a) { attend_any(HSRI_KV_TYPE_INT8, a); }
static void attend_compact(const hsri_units_args *a) { attend_any(HSRI_KV_TYPE_COMPACT, a); }
static void attend_vtq(const hsri_units_args *a) { attend_any(HSRI_KV_TYPE_VTQ, a); }

static void fill(hsri_page_kernels *k)
{
    k->attend[HSRI_KV_TYPE_INT8] = attend_int8;
    k->attend[HSRI_KV_TYPE_COMPACT] = attend_compact;
    k->attend[HSRI_KV_TYPE_VTQ] = attend_vtq;
}
