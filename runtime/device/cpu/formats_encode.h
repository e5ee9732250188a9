/* SPDX-License-Identifier: Apache-2.0 */
/* Making encoded pages: plain C, which each level compiles for its own vectors, with the same bits, since nothing here depends on how
 * wide they are. To be included once by a file of each level. */
#ifndef HSRI_CPU_FORMATS_ENCODE_H
#define HSRI_CPU_FORMATS_ENCODE_H

#include <string.h>

#include "base/array.h"
#include "device/cpu/lanes.h"
#include "device/cpu/page_kernels.h"
#include "device/cpu/wide.h"
#include "device/formats.h"

#define TOKENS HSRI_PAGE_TOKENS

static void page_mean(const float *x, uint32_t d, float *mean)
{
    for (uint32_t j = 0; j < d; j++)
        mean[j] = 0;
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t j = 0; j < d; j++)
            mean[j] += x[(size_t)t * d + j];
    for (uint32_t j = 0; j < d; j++)
        mean[j] *= 1.0f / TOKENS;
}

/* x as a code in 0 .. top, where x = 0 lies at `zero` (a multiple of 1/2). NaN gives some code. */
static inline int32_t code_of(float x, float zero, float top)
{
    float c = x + (zero + 0.5f);

    c = c > 0 ? c : 0;
    c = c < top ? c : top;
    return (int32_t)c;
}

typedef float  four_float __attribute__((vector_size(16)));
typedef double four_double __attribute__((vector_size(32)));

/* sums[k] += x[k][0], then x[k][1], and so on. */
WIDE_INLINE void add_in_order(const float x[4][LANES], four_double *sums)
{
    for (uint32_t l = 0; l < LANES; l += 4) {
        four_float row[4], low[2], high[2];

        for (uint32_t k = 0; k < 4; k++)
            memcpy(&row[k], x[k] + l, sizeof row[k]);
        for (uint32_t k = 0; k < 2; k++) {
            low[k] = __builtin_shufflevector(row[2 * k], row[2 * k + 1], 0, 4, 1, 5);
            high[k] = __builtin_shufflevector(row[2 * k], row[2 * k + 1], 2, 6, 3, 7);
        }
        *sums += __builtin_convertvector(__builtin_shufflevector(low[0], low[1], 0, 1, 4, 5), four_double);
        *sums += __builtin_convertvector(__builtin_shufflevector(low[0], low[1], 2, 3, 6, 7), four_double);
        *sums += __builtin_convertvector(__builtin_shufflevector(high[0], high[1], 0, 1, 4, 5), four_double);
        *sums += __builtin_convertvector(__builtin_shufflevector(high[0], high[1], 2, 3, 6, 7), four_double);
    }
}

/* Sums of the squares of four arrays of n numbers, n a multiple of 64. Each is one chain of additions, so four take as long as one. */
static void squares_of(const float *const x[4], size_t n, double sums[4])
{
    four_double all = { 0 };

    for (size_t i = 0; i < n; i += TOKENS) {
        float part[4][LANES];

        for (uint32_t k = 0; k < 4; k++)
            for (uint32_t first = 0; first < LANES; first += WIDE) {
                wide_float sum = { 0 }, some;

                for (uint32_t l = first; l < TOKENS; l += LANES) {
                    memcpy(&some, x[k] + i + l, sizeof some);
                    sum += some * some;
                }
                memcpy(part[k] + first, &sum, sizeof sum);
            }
        add_in_order(part, &all);
    }
    memcpy(sums, &all, sizeof all);
}

/* |x - decoded| / |x| over keys and values, of the sums of their squares; a page of zeros has none. */
static float relative_error(double error, double keys, double values)
{
    double size = keys + values;

    return size > 0 || size != size ? (float)sqrt(error / size) : 0.0f;
}

/* ---- plain pages ---- */

/* Dwords, two numbers each, as two vectors. */
WIDE_INLINE void halves(const wide_int *pairs, wide_float *low, wide_float *high)
{
    *low = (wide_float)(*pairs << 16);
    *high = (wide_float)(*pairs & (int32_t)0xffff0000);
}

/* Keys of WIDE tokens, of WIDE dwords each; dwords are two neighbours of a token, and lie [pair][token]. */
WIDE_INLINE void read_bf16_keys(const uint8_t *keys, uint32_t d, float *k)
{
    float dwords[WIDE][WIDE], turned[WIDE][WIDE];

    for (uint32_t i = 0; i < WIDE; i++)
        memcpy(dwords[i], keys + (size_t)i * TOKENS * 4, sizeof dwords[i]);
    transpose_square(dwords[0], WIDE, NULL, turned[0], WIDE);
    for (uint32_t t = 0; t < WIDE; t++) {
        wide_int   pairs;
        wide_float low, high, both;

        memcpy(&pairs, turned[t], sizeof pairs);
        halves(&pairs, &low, &high);
        both = __builtin_shufflevector(low, high, FIRST_HALVES);
        memcpy(k + (size_t)t * d, &both, sizeof both);
        both = __builtin_shufflevector(low, high, SECOND_HALVES);
        memcpy(k + (size_t)t * d + WIDE, &both, sizeof both);
    }
}

/* hsri_page_decode of bf16 */
static void read_bf16(const uint8_t *slot, uint32_t d, float *k, float *v)
{
    const uint8_t *keys = slot + HSRI_PAGE_HEADER_BYTES, *values = keys + (size_t)TOKENS * d * 2;

    if (d % (2 * WIDE) != 0) {
        hsri_page_decode(HSRI_KV_TYPE_BF16, d, slot, NULL, k, v);
        return;
    }
    for (uint32_t t = 0; t < TOKENS; t += WIDE)
        for (uint32_t j = 0; j < d; j += 2 * WIDE)
            read_bf16_keys(keys + ((size_t)j / 2 * TOKENS + t) * 4, d, k + (size_t)t * d + j);
    for (uint32_t t = 0; t < TOKENS; t += 2)
        for (uint32_t j = 0; j < d; j += WIDE) {
            wide_int   pairs;
            wide_float low, high;

            memcpy(&pairs, values + ((size_t)t / 2 * d + j) * 4, sizeof pairs);
            halves(&pairs, &low, &high);
            memcpy(v + (size_t)t * d + j, &low, sizeof low);
            memcpy(v + (size_t)(t + 1) * d + j, &high, sizeof high);
        }
}

static void read_f32(const uint8_t *slot, uint32_t d, float *k, float *v)
{
    hsri_page_decode(HSRI_KV_TYPE_F32, d, slot, NULL, k, v);
}

/* ---- int8 ---- */

static void int8_channels(const float *x, uint32_t d, float *mean, float *scale)
{
    page_mean(x, d, mean);
    for (uint32_t j = 0; j < d; j++)
        scale[j] = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t j = 0; j < d; j++) {
            float a = fabsf(x[(size_t)t * d + j] - mean[j]);

            scale[j] = a <= scale[j] ? scale[j] : a;   /* a NaN stays */
        }
    }
    for (uint32_t j = 0; j < d; j++)
        scale[j] *= 1.0f / 127.0f;
}

static double int8_codes(const float *x, uint32_t d, const float *mean, const float *scale, int8_t *codes, uint32_t token_step,
                         uint32_t channel_step)
{
    double error = 0;

    for (uint32_t j = 0; j < d; j++) {
        float inverse = scale[j] > 0 ? 1.0f / scale[j] : 0.0f;

        for (uint32_t t = 0; t < TOKENS; t++) {
            float   r = x[(size_t)t * d + j] - mean[j];
            int32_t code = code_of(r * inverse, 127.0f, 254.0f) - 127;
            float   rest = r - (float)code * scale[j];

            codes[(size_t)t * token_step + (size_t)j * channel_step] = (int8_t)code;
            error += (double)rest * rest;
        }
    }
    return error;
}

static void encode_int8(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                        const hsri_calibration_record *calibration, float *scratch)
{
    float *k_mean = scratch, *k_scale = k_mean + d, *v_mean = k_scale + d, *v_scale = v_mean + d;
    const float *const arrays[] = { k, v, k, v };
    double error, sums[4];

    (void)calibration;
    int8_channels(k, d, k_mean, k_scale);
    int8_channels(v, d, v_mean, v_scale);
    error = int8_codes(k, d, k_mean, k_scale, (int8_t *)(slot + (hsri_int8_keys(slot, d) - slot)), 1, TOKENS);
    error += int8_codes(v, d, v_mean, v_scale, (int8_t *)(slot + (hsri_int8_values(slot, d) - slot)), d, 1);
    memcpy(slot + HSRI_PAGE_HEADER_BYTES, scratch, 4 * (size_t)d * sizeof *scratch);
    squares_of(arrays, (size_t)TOKENS * d, sums);
    header->error = relative_error(error, sums[0], sums[1]);
}

/* ---- sums ---- */

/* d is a multiple of LANES */
static float dot(const float *a, const float *b, uint32_t d)
{
    float sum[LANES] = { 0 };

    for (uint32_t j = 0; j < d; j += LANES)
        for (uint32_t i = 0; i < LANES; i++)
            sum[i] += a[j + i] * b[j + i];
    return lanes_sum(sum);
}

/* Tokens side by side: their sums and a column are in registers. */
#define ABREAST 8u

/* out[64][WIDE of stride d] = x[64][d] m, m[d] rows of WIDE, m_stride apart: each number is one chain of sums. */
static void multiply_columns(const float *x, uint32_t d, const float *m, uint32_t m_stride, float *out)
{
    for (uint32_t t = 0; t < TOKENS; t += ABREAST) {
        const float *row = x + (size_t)t * d;
        wide_float   sum[ABREAST] = { { 0 } };

        for (uint32_t i = 0; i < d; i++) {
            wide_float column;

            memcpy(&column, m + (size_t)i * m_stride, sizeof column);
            for (uint32_t r = 0; r < ABREAST; r++)
                sum[r] += column * row[(size_t)r * d + i];
        }
        for (uint32_t r = 0; r < ABREAST; r++)
            memcpy(out + (size_t)(t + r) * d, &sum[r], sizeof sum[r]);
    }
}

/* z[64][d] = A^T x of each token */
static void rotate_keys(const float *x, const float *a, uint32_t d, float *z)
{
    for (uint32_t j = 0; j < d; j += WIDE)
        multiply_columns(x, d, a + j, d, z + j);
}

/* x[64][d] = B z of each token; block[d][WIDE] is work space. */
static void rotate_back(const float *z, const float *b, uint32_t d, float *block, float *x)
{
    for (uint32_t i = 0; i < d; i += WIDE) {
        transpose(b + (size_t)i * d, d, WIDE, d, NULL, block, WIDE);
        multiply_columns(z, d, block, WIDE, x + i);
    }
}

/* ---- compact and vtq: scales ---- */

/* The means as int8 about the calibration's; mean becomes what they decode to. */
static float encode_means(float *mean, const float *about, uint32_t d, uint8_t *codes)
{
    float most = 0, scale, inverse;

    for (uint32_t j = 0; j < d; j++) {
        float a = fabsf(mean[j] - about[j]);

        most = a > most ? a : most;
    }
    scale = most / 127.0f;
    inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (uint32_t j = 0; j < d; j++) {
        int32_t code = code_of((mean[j] - about[j]) * inverse, 127.0f, 254.0f) - 127;

        codes[j] = (uint8_t)code;
        mean[j] = about[j] + scale * (float)code;
    }
    return scale;
}

/* Largest |x| of each channel. */
static void most_of(const float *x, uint32_t d, float *most)
{
    memset(most, 0, d * sizeof *most);
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t j = 0; j < d; j++) {
            float a = fabsf(x[(size_t)t * d + j]);

            most[j] = a > most[j] ? a : most[j];
        }
    }
}

/* The smallest scale byte that stands for at least x units. */
static uint8_t scale_byte(float x)
{
    uint32_t bits, least = HSRI_SCALE_BIAS, step = 1u << HSRI_SCALE_SHIFT;

    memcpy(&bits, &x, sizeof bits);
    if (!(x > 0) || bits <= least)
        return 0;
    return (uint8_t)hsri_min((bits - least + step - 1) / step, 255);
}

/* How far below the largest value's scale byte to look, and in which steps: with few bits, cutting the largest values off pays. */
typedef struct search {
    uint8_t n, step;
} search;

static search search_of(uint32_t bits) { return bits == 2 ? (search){ 9, 2 } : bits == 4 ? (search){ 6, 1 } : (search){ 3, 1 }; }

/* Squared error of WIDE channels at scales of their own; as soon as no sum is below `enough`, those must do. */
WIDE_INLINE void errors_at(const float *x, uint32_t d, const wide_float *scale, float top, const wide_float *enough, wide_float *error)
{
    wide_float inverse = (wide_float)((wide_int)(1.0f / *scale) & (*scale > 0)), sum = { 0 }, most = (wide_float){ 0 } + top;
    wide_int   less = sum < *enough;

    for (uint32_t unit = 0; unit < TOKENS && wide_any(&less); unit += HSRI_UNIT_TOKENS) {
        for (uint32_t t = unit; t < unit + HSRI_UNIT_TOKENS; t++) {
            wide_float a, c, rest;

            memcpy(&a, x + (size_t)t * d, sizeof a);
            c = a * inverse + (top + 1) * 0.5f;
            wide_limit(&c, &most);
            rest = a - (__builtin_convertvector(__builtin_convertvector(c, wide_int), wide_float) - top * 0.5f) * *scale;
            sum += rest * rest;
        }
        less = sum < *enough;
    }
    *error = sum;
}

/* Scale bytes of WIDE channels, of `bits` bits each: those of the smallest error among a few. */
WIDE_INLINE void choose_wide(const float *x, uint32_t d, uint32_t bits, float unit, const float *most, uint8_t *bytes)
{
    const search look = search_of(bits);
    const float  top = (float)((1u << bits) - 1);
    wide_float   best = (wide_float){ 0 } + INFINITY;
    wide_int     first, chosen;
    wide_byte    out;

    for (uint32_t i = 0; i < WIDE; i++)
        first[i] = scale_byte(unit > 0 ? most[i] / (top * 0.5f * unit) : 0);
    chosen = first;
    for (int32_t n = 0; n < look.n; n++) {
        wide_int   byte = first - n * look.step, less;
        wide_float scale, error;

        byte &= byte > 0;
        scale = (wide_float)((byte << HSRI_SCALE_SHIFT) + (int32_t)HSRI_SCALE_BIAS) * unit;
        errors_at(x, d, &scale, top, &best, &error);
        less = error < best;
        best = (wide_float)(((wide_int)error & less) | ((wide_int)best & ~less));
        chosen = (byte & less) | (chosen & ~less);
    }
    out = __builtin_convertvector(chosen, wide_byte);
    memcpy(bytes, &out, sizeof out);
}

/* The same of LANES channels. */
static void choose_scales(const float *x, uint32_t d, uint32_t bits, float unit, const float *most, uint8_t *bytes)
{
    for (uint32_t j = 0; j < LANES; j += WIDE)
        choose_wide(x + j, d, bits, unit, most + j, bytes + j);
}

static uint32_t key_bits(uint32_t d, uint32_t j) { return j < hsri_n6(d) ? 6 : j < d / 2 ? 4 : 2; }

/* ---- compact and vtq: keys ---- */

/* A block of LANES channels may hold components of two widths: each width is searched, and a component takes its own. */
static void key_scales(const float *z, uint32_t d, float unit, const float *most, uint8_t *bytes)
{
    for (uint32_t j = 0; j < d; j += LANES) {
        uint8_t of[LANES];

        for (uint32_t bits = 2; bits <= 6; bits += 2) {
            bool wanted = false;

            for (uint32_t i = 0; i < LANES; i++)
                wanted |= key_bits(d, j + i) == bits;
            if (!wanted)
                continue;
            choose_scales(z + j, d, bits, unit, most + j, of);
            for (uint32_t i = 0; i < LANES; i++) {
                if (key_bits(d, j + i) == bits)
                    bytes[j + i] = of[i];
            }
        }
    }
}

/* How the channels of a page are coded: x = scale * (code - top / 2), code in 0 .. top. */
typedef struct coding {
    float *scale, *inverse, *top;   /* [d] */
} coding;

/* Codes of WIDE channels of x[64][d], which becomes what they leave. */
static void quantise_channels(float *x, uint32_t d, const coding *c, uint32_t j, uint8_t *codes)
{
    wide_float scale, inverse, top, zero;

    memcpy(&scale, c->scale + j, sizeof scale);
    memcpy(&inverse, c->inverse + j, sizeof inverse);
    memcpy(&top, c->top + j, sizeof top);
    zero = top * 0.5f;
    for (uint32_t t = 0; t < TOKENS; t++) {
        wide_float row, code;
        wide_int   whole;
        wide_byte  out;

        memcpy(&row, x + (size_t)t * d + j, sizeof row);
        code = row * inverse + (zero + 0.5f);
        wide_limit(&code, &top);
        whole = __builtin_convertvector(code, wide_int);
        out = __builtin_convertvector(whole, wide_byte);
        memcpy(codes + (size_t)t * d + j, &out, sizeof out);
        row -= (__builtin_convertvector(whole, wide_float) - zero) * scale;
        memcpy(x + (size_t)t * d + j, &row, sizeof row);
    }
}

/* Codes of all channels; their number is a multiple of WIDE. */
static void quantise(float *x, uint32_t d, const coding *c, uint8_t *codes)
{
    for (uint32_t j = 0; j < d; j += WIDE)
        quantise_channels(x, d, c, j, codes);
}

static void set_coding(const coding *c, uint32_t j, float scale, float top)
{
    c->scale[j] = scale;
    c->inverse[j] = scale > 0 ? 1.0f / scale : 0.0f;
    c->top[j] = top;
}

/* Eight codes of 4 bits, a byte each, as a dword of nibbles; of 2 bits, as a word. */
static inline uint32_t pack_nibbles(uint64_t codes) { return (uint32_t)codes | (uint32_t)(codes >> 32) << 4; }

static inline uint16_t pack_pairs(uint64_t codes)
{
    codes = (codes | codes >> 6) & 0x000f000f000f000full;
    codes = (codes | codes >> 12) & 0x000000ff000000ffull;
    return (uint16_t)(codes | codes >> 24);
}

/* The low planes of a unit: a dword of each component, of 16 tokens. */
static void pack_key_lows(const uint8_t *codes, uint32_t d, uint8_t *lows)
{
    for (uint32_t j = 0, n6 = hsri_n6(d); j < n6; j += WIDE) {
        wide_int words = { 0 };

        for (uint32_t t = 0; t < HSRI_UNIT_TOKENS; t++) {
            wide_byte row;

            memcpy(&row, codes + (size_t)t * d + j, sizeof row);
            words |= __builtin_convertvector(row & 3, wide_int) << (int32_t)(2 * t);
        }
        memcpy(lows + 4 * (size_t)j, &words, 4 * (size_t)hsri_min(n6 - j, WIDE));
    }
}

/* Codes of components with 6 bits are narrowed to the upper 4. */
static void pack_keys(uint8_t *slot, uint32_t d, uint8_t *codes)
{
    uint32_t n6 = hsri_n6(d);

    for (uint32_t unit = 0; unit < HSRI_PAGE_UNITS; unit++)
        pack_key_lows(codes + (size_t)unit * HSRI_UNIT_TOKENS * d, d, slot + (hsri_key_lows(slot, d, unit) - slot));
    for (uint32_t token = 0; token < TOKENS; token++, codes += d) {
        uint32_t unit = token / HSRI_UNIT_TOKENS, t = token % HSRI_UNIT_TOKENS;
        uint8_t *nibbles = slot + (hsri_key_nibbles(slot, d, unit) - slot) + 4 * t;
        uint8_t *pairs = slot + (hsri_key_pairs(slot, d, unit) - slot) + 2 * t;

        for (uint32_t j = 0; j < n6; j++)
            codes[j] >>= 2;
        for (uint32_t j = 0; j < d / 2; j += 8) {
            uint64_t eight;
            uint32_t dword;
            uint16_t word;

            memcpy(&eight, codes + j, sizeof eight);
            dword = pack_nibbles(eight);
            memcpy(nibbles + j * 8, &dword, sizeof dword);
            memcpy(&eight, codes + d / 2 + j, sizeof eight);
            word = pack_pairs(eight);
            memcpy(pairs + j * 4, &word, sizeof word);
        }
    }
}

/* Work space of an encoder. */
typedef struct workspace {
    float   *x, *product;                  /* [64][d] */
    float   *mean, *most, *block;          /* [d], [d], [d][LANES] */
    coding   c;
    uint8_t *codes;                        /* [64][d] */
} workspace;

static workspace workspace_at(float *scratch, uint32_t d)
{
    workspace w = { .x = scratch, .product = scratch + TOKENS * d, .mean = scratch + 2 * TOKENS * d };

    w.most = w.mean + d;
    w.c = (coding){ w.most + d, w.most + 2 * d, w.most + 3 * d };
    w.block = w.most + 4 * d;
    w.codes = (uint8_t *)(w.block + LANES * d);
    return w;
}

/* x = v - mean of all tokens */
static void center(const float *v, const float *mean, uint32_t d, float *x)
{
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t j = 0; j < d; j++)
            x[(size_t)t * d + j] = v[(size_t)t * d + j] - mean[j];
}

/* Keys into a slot of zeros. What the codes leave of them, in the plain basis, goes to w->product. */
static void encode_keys(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const hsri_calibration_record *c,
                          const workspace *w)
{
    float    unit = 0;
    uint8_t *bytes = slot + (hsri_key_scales(slot) - slot);

    page_mean(k, d, w->mean);
    header->k_scale = encode_means(w->mean, c->mean_k, d, slot + (hsri_key_means(slot, d) - slot));
    center(k, w->mean, d, w->product);
    rotate_keys(w->product, c->a, d, w->x);
    most_of(w->x, d, w->most);
    for (uint32_t j = 0; j < d; j++) {
        float scale = w->most[j] / ((float)((1u << key_bits(d, j)) - 1) * 0.5f);

        unit = scale > unit ? scale : unit;
    }
    header->k_unit = unit / HSRI_SCALE_MAX;
    key_scales(w->x, d, header->k_unit, w->most, bytes);
    for (uint32_t j = 0; j < d; j++)
        set_coding(&w->c, j, header->k_unit * hsri_scale_of(bytes[j]), (float)((1u << key_bits(d, j)) - 1));
    quantise(w->x, d, &w->c, w->codes);
    pack_keys(slot, d, w->codes);
    if (!all_finite(k, (size_t)TOKENS * d))
        header->k_unit = NAN;
    rotate_back(w->x, c->b, d, w->block, w->product);
}

/* ---- compact and vtq: values ---- */

/* Half of each unit, the tokens of larger norm. */
static uint64_t larger_half(const float *norms)
{
    uint64_t wide = 0;

    for (uint32_t t = 0; t < TOKENS; t++) {
        uint32_t larger = 0, first = t / HSRI_UNIT_TOKENS * HSRI_UNIT_TOKENS;

        for (uint32_t i = first; i < first + HSRI_UNIT_TOKENS; i++)
            larger += norms[i] > norms[t] || (norms[i] == norms[t] && i < t);
        wide |= (uint64_t)(larger < HSRI_UNIT_TOKENS / 2) << t;
    }
    return wide;
}

/* How far apart the norms of the two classes are, beyond their own spread, relative to the mean of all. */
#define BIMODAL 0.15

/* The tokens of 6 bits if the page's values are of two kinds, else none. */
static uint64_t two_kinds(const float *x, uint32_t d)
{
    float    norms[TOKENS];
    uint64_t wide;
    double   sum[2] = { 0, 0 }, square[2] = { 0, 0 }, mean[2], spread = 0;

    for (uint32_t t = 0; t < TOKENS; t++)
        norms[t] = sqrtf(dot(x + (size_t)t * d, x + (size_t)t * d, d));
    wide = larger_half(norms);
    for (uint32_t t = 0; t < TOKENS; t++) {
        uint32_t kind = (uint32_t)(wide >> t & 1);

        sum[kind] += norms[t];
        square[kind] += (double)norms[t] * norms[t];
    }
    for (uint32_t kind = 0; kind < 2; kind++) {
        double variance;

        mean[kind] = sum[kind] / (TOKENS / 2);
        variance = square[kind] / (TOKENS / 2) - mean[kind] * mean[kind];
        spread += variance > 0 ? sqrt(variance) : 0;
    }
    return mean[1] - mean[0] - spread > BIMODAL * (mean[0] + mean[1]) / 2 ? wide : 0;
}

/* Multiply the narrow tokens' values, so that one set of scales serves both kinds: their largest share of the wide ones' range. */
static float narrow_ratio(const float *x, uint32_t d, uint64_t wide)
{
    double sum[2] = { 0, 0 }, of_token[4];

    for (uint32_t t = 0; t < TOKENS; t += 4) {
        const float       *row = x + (size_t)t * d;
        const float *const rows[] = { row, row + d, row + 2 * (size_t)d, row + 3 * (size_t)d };

        squares_of(rows, d, of_token);
        for (uint32_t i = 0; i < 4; i++)
            sum[wide >> (t + i) & 1] += of_token[i];
    }
    return sum[0] < sum[1] ? (float)sqrt(sum[0] / sum[1]) : 1.0f;
}

/* Where the tokens of vtq differ in bits, so do their scales: one token at a time. */
static double quantise_vtq(const hsri_page_header *h, uint32_t d, const workspace *w)
{
    double error = 0;

    for (uint32_t token = 0; token < TOKENS; token++) {
        uint32_t bits = 4 + hsri_vtq_low_bits(h, token);
        float    top = (float)((1u << bits) - 1), fine = bits == 4 ? h->narrow : 1.0f / (float)(1u << (bits - 4));

        for (uint32_t j = 0; j < d; j++) {
            float   scale = w->c.scale[j] * fine, a = w->x[(size_t)token * d + j], rest;
            int32_t code = code_of(scale > 0 ? a / scale : 0.0f, top * 0.5f, top);

            rest = a - ((float)code - top * 0.5f) * scale;
            error += (double)rest * rest;
            w->codes[(size_t)token * d + j] = (uint8_t)code;
        }
    }
    return error;
}

/* The upper four bits of eight tokens of a channel are a word. */
static void pack_eight(const hsri_page_header *h, hsri_kv_type format, uint32_t d, uint32_t token, const uint8_t *codes, uint8_t *out)
{
    int32_t n_low[8];

    for (uint32_t t = 0; t < 8; t++)
        n_low[t] = format == HSRI_KV_TYPE_VTQ ? (int32_t)hsri_vtq_low_bits(h, token + t) : 0;
    for (uint32_t j = 0; j < d; j += WIDE) {
        wide_int words = { 0 };

        for (uint32_t t = 0; t < 8; t++) {
            wide_byte row;

            memcpy(&row, codes + (size_t)t * d + j, sizeof row);
            words |= __builtin_convertvector(row, wide_int) >> n_low[t] << (int32_t)hsri_nibble_shift(t);
        }
        memcpy(out + 4 * (size_t)j, &words, sizeof words);
    }
}

static void pack_lows(const hsri_page_header *h, uint32_t d, uint32_t token, const uint8_t *codes, uint8_t *lows)
{
    const uint32_t n_low = hsri_vtq_low_bits(h, token), shift = n_low ? hsri_vtq_low_shift(h, token) : 0;

    for (uint32_t j = 0; n_low && j < d; j++)
        lows[shift / 8 + 2 * j] |= (uint8_t)((codes[j] & ((1u << n_low) - 1)) << shift % 8);
}

static void pack_values(uint8_t *slot, const hsri_page_header *h, hsri_kv_type format, uint32_t d, const uint8_t *codes)
{
    for (uint32_t token = 0; token < TOKENS; token++) {
        uint8_t *u = slot + (hsri_value_unit(format, slot, d, token / HSRI_UNIT_TOKENS) - slot);

        if (token % 8 == 0)
            pack_eight(h, format, d, token, codes + (size_t)token * d, u + 4 * (size_t)(token % HSRI_UNIT_TOKENS / 8) * d);
        if (format == HSRI_KV_TYPE_VTQ)
            pack_lows(h, d, token, codes + (size_t)token * d, u + 8 * (size_t)d);
    }
}

/* Values into a slot of zeros. Of compact, what the codes leave of them goes to w->x; of vtq, its squares are returned. */
static double encode_values(uint8_t *slot, hsri_page_header *header, hsri_kv_type format, uint32_t d, const float *v,
                            const hsri_calibration_record *c, const workspace *w)
{
    bool     compact = format == HSRI_KV_TYPE_COMPACT;
    float    unit = 0, top = 15.0f;
    double   error = 0;
    uint8_t *bytes = slot + (hsri_value_scales(slot, d) - slot);

    page_mean(v, d, w->mean);
    header->v_scale = encode_means(w->mean, c->mean_v, d, slot + (hsri_value_means(slot, d) - slot));
    center(v, w->mean, d, w->x);
    header->narrow = 1.0f;
    if (!compact) {
        header->wide = two_kinds(w->x, d);
        header->narrow = header->wide ? narrow_ratio(w->x, d, header->wide) : 1.0f;
        top = header->wide ? 63.0f / 4 : 31.0f / 2;
    }
    most_of(w->x, d, w->most);
    for (uint32_t j = 0; j < d; j++)
        unit = w->most[j] > unit ? w->most[j] : unit;
    header->v_unit = unit / (top * 0.5f * HSRI_SCALE_MAX);
    for (uint32_t j = 0; j < d; j++)
        bytes[j] = scale_byte(header->v_unit > 0 ? w->most[j] / (top * 0.5f * header->v_unit) : 0);
    for (uint32_t j = 0; compact && j < d; j += LANES)
        choose_scales(w->x + j, d, 4, header->v_unit, w->most + j, bytes + j);
    for (uint32_t j = 0; j < d; j++)
        set_coding(&w->c, j, header->v_unit * hsri_scale_of(bytes[j]), 15.0f);
    if (compact)
        quantise(w->x, d, &w->c, w->codes);
    else
        error = quantise_vtq(header, d, w);
    pack_values(slot, header, format, d, w->codes);
    if (!all_finite(v, (size_t)TOKENS * d))
        header->v_unit = NAN;
    return error;
}

static void encode_rotated(hsri_kv_type format, uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                           const hsri_calibration_record *calibration, float *scratch)
{
    workspace w = workspace_at(scratch, d);
    const float *const arrays[] = { k, v, w.product, w.x };
    double    error, sums[4];

    memset(slot, 0, hsri_page_bytes(format, d));
    encode_keys(slot, header, d, k, calibration, &w);
    error = encode_values(slot, header, format, d, v, calibration, &w);
    squares_of(arrays, (size_t)TOKENS * d, sums);
    header->error = relative_error(sums[2] + (format == HSRI_KV_TYPE_COMPACT ? sums[3] : error), sums[0], sums[1]);
}

static void encode_compact(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                           const hsri_calibration_record *calibration, float *scratch)
{
    encode_rotated(HSRI_KV_TYPE_COMPACT, slot, header, d, k, v, calibration, scratch);
}

static void encode_vtq(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                       const hsri_calibration_record *calibration, float *scratch)
{
    encode_rotated(HSRI_KV_TYPE_VTQ, slot, header, d, k, v, calibration, scratch);
}

static void fill_encoders(hsri_page_kernels *k)
{
    k->read[HSRI_KV_TYPE_F32] = read_f32;
    k->read[HSRI_KV_TYPE_BF16] = read_bf16;
    k->encode[HSRI_KV_TYPE_INT8] = encode_int8;
    k->encode[HSRI_KV_TYPE_COMPACT] = encode_compact;
    k->encode[HSRI_KV_TYPE_VTQ] = encode_vtq;
}

#endif
