/* SPDX-License-Identifier: Apache-2.0 */
/* Every kernel in portable C: what the other levels are compared with, and what runs where there is no other level. */
#include <math.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"

#define INLINE static inline __attribute__((always_inline))

/* Rows that share one decoded run in linear. */
#define ROW_BLOCK 32u

/* Packed matrices and pages are bytes; memcpy reads them without aliasing trouble and costs nothing. */
static inline float load_f32(const uint8_t *p)
{
    float f;
    memcpy(&f, p, sizeof f);
    return f;
}

static inline uint16_t load_u16(const uint8_t *p)
{
    uint16_t u;
    memcpy(&u, p, sizeof u);
    return u;
}

/* ---- linear ---- */

INLINE uint32_t run_bytes(hsri_dtype dtype)
{
    switch (dtype) {
    case HSRI_DTYPE_F32:  return 2048;
    case HSRI_DTYPE_BF16: return 1024;
    case HSRI_DTYPE_Q8:   return 512;
    default:              return 256;
    }
}

/* The stored number for input k of output n of one run: the weight itself, or its code. */
INLINE float run_element(hsri_dtype dtype, const uint8_t *run, uint32_t k, uint32_t n)
{
    switch (dtype) {
    case HSRI_DTYPE_F32:  return load_f32(run + (k * HSRI_PANEL + n) * 4);
    case HSRI_DTYPE_BF16: return hsri_bf16_to_f32(load_u16(run + (k / 2 * HSRI_PANEL + n) * 4 + k % 2 * 2));
    case HSRI_DTYPE_Q8:   return (float)(int8_t)run[(k / 4 * HSRI_PANEL + n) * 4 + k % 4];
    default: {
        uint8_t pair = run[(k / 8 * HSRI_PANEL + n) * 4 + k % 4];
        return (float)(k % 8 < 4 ? pair & 15 : pair >> 4);
    }
    }
}

INLINE const uint8_t *run_at(hsri_dtype dtype, const hsri_packed *w, uint32_t panel, uint32_t run)
{
    return w->codes + ((uint64_t)panel * w->n_runs + run) * run_bytes(dtype);
}

/* q8 */
static inline float scale_at(const hsri_packed *w, uint32_t panel, uint32_t run, uint32_t n)
{
    return hsri_f16_to_f32(load_u16(w->tail + (((uint64_t)panel * w->n_runs + run) * HSRI_PANEL + n) * 2));
}

/* q4; which: 0 scale, 1 minimum */
static inline float scale_or_minimum_at(const hsri_packed *w, uint32_t panel, uint32_t run, uint32_t which, uint32_t n)
{
    return hsri_f16_to_f32(load_u16(w->tail + ((((uint64_t)panel * w->n_runs + run) * 2 + which) * HSRI_PANEL + n) * 2));
}

/* Sum of n <= 32 inputs of a run as a tree of halves; absent inputs are zeros. Every level adds in this order. */
static float run_input_sum(const float *x, uint32_t n)
{
    float t[HSRI_RUN] = { 0 };
    memcpy(t, x, n * sizeof *x);
    for (uint32_t half = HSRI_RUN / 2; half > 0; half /= 2) {
        for (uint32_t i = 0; i < half; i++) {
            t[i] += t[i + half];
        }
    }
    return t[0];
}

/* acc[n] takes in one run of one row: w is the decoded run, x its n_k inputs. */
INLINE void add_run(hsri_dtype dtype, const hsri_packed *w, uint32_t panel, uint32_t run, float codes[HSRI_RUN][HSRI_PANEL], const float *x,
                    uint32_t n_k, float *acc)
{
    float even[HSRI_PANEL] = { 0 }, odd[HSRI_PANEL] = { 0 };
    for (uint32_t k = 0; k < n_k; k++) {
        float *chain = k % 2 == 0 ? even : odd;
        for (uint32_t n = 0; n < HSRI_PANEL; n++) {
            chain[n] += codes[k][n] * x[k];
        }
    }
    float input_sum = dtype == HSRI_DTYPE_Q4 ? run_input_sum(x, n_k) : 0.0f;
    for (uint32_t n = 0; n < HSRI_PANEL; n++) {
        float sum = even[n] + odd[n];
        if (dtype == HSRI_DTYPE_Q8) {
            acc[n] += scale_at(w, panel, run, n) * sum;
        } else if (dtype == HSRI_DTYPE_Q4) {
            acc[n] += scale_or_minimum_at(w, panel, run, 0, n) * sum;
            acc[n] += scale_or_minimum_at(w, panel, run, 1, n) * input_sum;
        } else {
            acc[n] += sum;
        }
    }
}

/* One panel times up to ROW_BLOCK rows. */
INLINE void linear_block(hsri_dtype dtype, const hsri_packed *w, uint32_t panel, const float *x, uint64_t x_stride, uint32_t n_rows,
                         const float *bias, float *out, uint64_t out_stride)
{
    float acc[ROW_BLOCK][HSRI_PANEL] = { { 0 } };
    for (uint32_t run = 0; run < w->n_runs; run++) {
        const uint8_t *packed = run_at(dtype, w, panel, run);
        float codes[HSRI_RUN][HSRI_PANEL];
        for (uint32_t k = 0; k < HSRI_RUN; k++) {
            for (uint32_t n = 0; n < HSRI_PANEL; n++) {
                codes[k][n] = run_element(dtype, packed, k, n);
            }
        }
        uint32_t n_k = (uint32_t)hsri_min(HSRI_RUN, w->k - run * HSRI_RUN);
        for (uint32_t i = 0; i < n_rows; i++) {
            add_run(dtype, w, panel, run, codes, x + i * x_stride + run * HSRI_RUN, n_k, acc[i]);
        }
    }
    uint32_t first = panel * HSRI_PANEL;
    uint32_t last = (uint32_t)hsri_min(w->n, first + HSRI_PANEL);
    for (uint32_t i = 0; i < n_rows; i++) {
        for (uint32_t c = first; c < last; c++) {
            out[i * out_stride + c] = acc[i][c - first] + (bias != NULL ? bias[c] : 0.0f);
        }
    }
}

INLINE void linear_any(hsri_dtype dtype, const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride,
                       uint32_t n_rows, const float *bias, float *out, uint64_t out_stride)
{
    for (uint32_t panel = panel0; panel < panel1; panel++) {
        for (uint32_t i = 0; i < n_rows; i += ROW_BLOCK) {
            linear_block(dtype, w, panel, x + i * x_stride, x_stride, (uint32_t)hsri_min(ROW_BLOCK, n_rows - i), bias,
                         out + i * out_stride, out_stride);
        }
    }
}

INLINE void unpack_row_any(hsri_dtype dtype, const hsri_packed *w, uint32_t n, float *out)
{
    uint32_t panel = n / HSRI_PANEL, lane = n % HSRI_PANEL;
    for (uint32_t k = 0; k < w->k; k++) {
        uint32_t run = k / HSRI_RUN;
        float v = run_element(dtype, run_at(dtype, w, panel, run), k % HSRI_RUN, lane);
        if (dtype == HSRI_DTYPE_Q8) {
            v *= scale_at(w, panel, run, lane);
        } else if (dtype == HSRI_DTYPE_Q4) {
            v = v * scale_or_minimum_at(w, panel, run, 0, lane) + scale_or_minimum_at(w, panel, run, 1, lane);
        }
        out[k] = v;
    }
}

#define LINEAR(name, dtype) \
    static void linear_##name(const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride, uint32_t n_rows, \
                              const float *bias, float *out, uint64_t out_stride) \
    { \
        linear_any(dtype, w, panel0, panel1, x, x_stride, n_rows, bias, out, out_stride); \
    } \
    static void unpack_row_##name(const hsri_packed *w, uint32_t n, float *out) \
    { \
        unpack_row_any(dtype, w, n, out); \
    }

LINEAR(f32, HSRI_DTYPE_F32)
LINEAR(bf16, HSRI_DTYPE_BF16)
LINEAR(q8, HSRI_DTYPE_Q8)
LINEAR(q4, HSRI_DTYPE_Q4)

/* ---- rows ---- */

static void rms_norm(const float *in, const float *gain, float eps, uint32_t width, float *out)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < width; i++) {
        sum += (double)in[i] * in[i];
    }
    float inverse = (float)(1.0 / sqrt(sum / width + eps));
    for (uint32_t i = 0; i < width; i++) {
        out[i] = gain[i] * (in[i] * inverse);
    }
}

static void rope(const float *in, const float *cos_sin, uint32_t rotary_dim, float *out)
{
    uint32_t half = rotary_dim / 2;
    for (uint32_t j = 0; j < half; j++) {
        float c = cos_sin[j], s = cos_sin[half + j];
        float a = in[j], b = in[half + j];
        out[j] = a * c - b * s;
        out[half + j] = b * c + a * s;
    }
}

static void silu_mul(const float *in, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++) {
        const float *gate = in + i / HSRI_PANEL * (2 * HSRI_PANEL) + i % HSRI_PANEL;
        out[i] = gate[0] / (1.0f + expf(-gate[0])) * gate[HSRI_PANEL];
    }
}

static void add(float *x, const float *y, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        x[i] += y[i];
    }
}

static uint32_t nonfinite(const float *x, uint64_t n)
{
    uint32_t found = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, sizeof u);
        found |= (u & 0x7f800000u) == 0x7f800000u;
    }
    return found;
}

/* ---- pages ---- */

static inline uint64_t k_index(hsri_kv_type type, uint32_t t, uint32_t j)
{
    return type == HSRI_KV_TYPE_F32 ? (uint64_t)j * HSRI_PAGE_TOKENS + t : ((uint64_t)j / 2 * HSRI_PAGE_TOKENS + t) * 2 + j % 2;
}

static inline uint64_t v_index(hsri_kv_type type, uint32_t head_dim, uint32_t t, uint32_t j)
{
    return type == HSRI_KV_TYPE_F32 ? (uint64_t)t * head_dim + j : ((uint64_t)t / 2 * head_dim + j) * 2 + t % 2;
}

static void page_put_f32(uint8_t *slot, uint32_t head_dim, uint32_t t, const float *k, const float *v)
{
    uint8_t *keys = slot + HSRI_PAGE_HEADER_BYTES;
    uint8_t *values = keys + (uint64_t)HSRI_PAGE_TOKENS * head_dim * 4;
    for (uint32_t j = 0; j < head_dim; j++) {
        memcpy(keys + k_index(HSRI_KV_TYPE_F32, t, j) * 4, k + j, 4);
    }
    memcpy(values + v_index(HSRI_KV_TYPE_F32, head_dim, t, 0) * 4, v, head_dim * sizeof *v);
}

static void page_put_bf16(uint8_t *slot, uint32_t head_dim, uint32_t t, const float *k, const float *v)
{
    uint8_t *keys = slot + HSRI_PAGE_HEADER_BYTES;
    uint8_t *values = keys + (uint64_t)HSRI_PAGE_TOKENS * head_dim * 2;
    for (uint32_t j = 0; j < head_dim; j++) {
        uint16_t key = hsri_f32_to_bf16(k[j]), value = hsri_f32_to_bf16(v[j]);
        memcpy(keys + k_index(HSRI_KV_TYPE_BF16, t, j) * 2, &key, 2);
        memcpy(values + v_index(HSRI_KV_TYPE_BF16, head_dim, t, j) * 2, &value, 2);
    }
}

/* ---- attention ---- */

INLINE float page_element(hsri_kv_type type, const uint8_t *base, uint64_t index)
{
    return type == HSRI_KV_TYPE_F32 ? load_f32(base + index * 4) : hsri_bf16_to_f32(load_u16(base + index * 2));
}

INLINE float score(hsri_kv_type type, const uint8_t *page, uint32_t head_dim, uint32_t t, const float *query)
{
    const uint8_t *keys = page + HSRI_PAGE_HEADER_BYTES;
    float acc = 0.0f;
    for (uint32_t j0 = 0; j0 < head_dim; j0 += HSRI_RUN) {
        uint32_t j1 = (uint32_t)hsri_min(head_dim, j0 + HSRI_RUN);
        float even = 0.0f, odd = 0.0f;
        for (uint32_t j = j0; j < j1; j += 2) {
            even += page_element(type, keys, k_index(type, t, j)) * query[j];
            odd += page_element(type, keys, k_index(type, t, j + 1)) * query[j + 1];
        }
        acc += even + odd;
    }
    return acc;
}

/* Component j of sum(p v) over n_tokens of a page, added to acc run by run. */
INLINE float weighted_values(hsri_kv_type type, const uint8_t *page, uint32_t head_dim, uint32_t n_tokens, uint32_t j, const float *p,
                            float acc)
{
    const uint8_t *values = page + HSRI_PAGE_HEADER_BYTES + (uint64_t)HSRI_PAGE_TOKENS * head_dim * (type == HSRI_KV_TYPE_F32 ? 4 : 2);
    for (uint32_t t0 = 0; t0 < n_tokens; t0 += HSRI_RUN) {
        uint32_t t1 = (uint32_t)hsri_min(n_tokens, t0 + HSRI_RUN);
        float chain[2] = { 0.0f, 0.0f };
        for (uint32_t t = t0; t < t1; t++) {
            chain[t % 2] += p[t] * page_element(type, values, v_index(type, head_dim, t, j));
        }
        acc += chain[0] + chain[1];
    }
    return acc;
}

INLINE void attend_query(hsri_kv_type type, const hsri_attend_args *a, uint32_t i)
{
    uint32_t visible = a->visible[i];
    float *p = a->scratch;
    float *partial = a->partials[i];
    float max = -INFINITY, l = 0.0f;
    for (uint32_t t = 0; t < visible; t++) {
        p[t] = a->scale * score(type, a->pages[t / HSRI_PAGE_TOKENS], a->head_dim, t % HSRI_PAGE_TOKENS, a->queries[i]);
        max = p[t] > max ? p[t] : max;
    }
    /* A NaN score never becomes the maximum, but its exp is NaN, and so are l and o. */
    for (uint32_t t = 0; t < visible; t++) {
        p[t] = expf(p[t] - max);
        l += p[t];
    }
    partial[0] = max;
    partial[1] = l;
    for (uint32_t j = 0; j < a->head_dim; j++) {
        float o = 0.0f;
        for (uint32_t t = 0; t < visible; t += HSRI_PAGE_TOKENS) {
            uint32_t n_tokens = (uint32_t)hsri_min(HSRI_PAGE_TOKENS, visible - t);
            o = weighted_values(type, a->pages[t / HSRI_PAGE_TOKENS], a->head_dim, n_tokens, j, p + t, o);
        }
        partial[2 + j] = o;
    }
}

static void attend_f32(const hsri_attend_args *a)
{
    for (uint32_t i = 0; i < a->n_queries; i++) {
        attend_query(HSRI_KV_TYPE_F32, a, i);
    }
}

static void attend_bf16(const hsri_attend_args *a)
{
    for (uint32_t i = 0; i < a->n_queries; i++) {
        attend_query(HSRI_KV_TYPE_BF16, a, i);
    }
}

static void merge_one(float *acc, const float *part, uint32_t head_dim)
{
    if (part[1] == 0.0f) {
        return;
    }
    float max = part[0] > acc[0] ? part[0] : acc[0];
    float old_weight = expf(acc[0] - max);
    float new_weight = expf(part[0] - max);
    acc[0] = max;
    for (uint32_t j = 1; j < head_dim + 2; j++) {
        acc[j] = acc[j] * old_weight + part[j] * new_weight;
    }
}

static void merge(float *const *acc, float *const *part, uint32_t n, uint32_t head_dim)
{
    for (uint32_t i = 0; i < n; i++) {
        merge_one(acc[i], part[i], head_dim);
    }
}

static double sum_exp(const float *x, uint64_t n, float max)
{
    double sum = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        sum += exp((double)x[i] - max);
    }
    return sum;
}

void hsri_kernels_fill_ref(hsri_kernels *k)
{
    *k = (hsri_kernels) {
        .linear = { linear_f32, linear_bf16, linear_q8, linear_q4 },
        .unpack_row = { unpack_row_f32, unpack_row_bf16, unpack_row_q8, unpack_row_q4 },
        .rms_norm = rms_norm,
        .rope = rope,
        .silu_mul = silu_mul,
        .add = add,
        .page_put = { page_put_f32, page_put_bf16 },
        .attend = { attend_f32, attend_bf16 },
        .merge = merge,
        .sum_exp = sum_exp,
        .nonfinite = nonfinite,
    };
}
