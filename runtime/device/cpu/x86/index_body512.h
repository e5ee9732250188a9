/* SPDX-License-Identifier: Apache-2.0 */
/* Scoring sketches with AVX-512. Codes and weights are multiplied as bytes, the codes straight from the nibbles of the index; the two words
 * that this needs, dot_bytes and dot_words, are the including file's: one instruction each where VNNI exists, three or two otherwise, with
 * the same integers.
 *
 * What makes it fast (docs/sparse-attention.md, "Speed"): the scales of a page's components go into the query's weights, so a product costs
 * one instruction for 16 tokens and 4 components; an exponential costs five for 16 tokens; and sums over the tokens of a unit stay
 * within 128-bit lanes. Logits are kept in units of log 2. */
#include <immintrin.h>

#include "base/array.h"
#include "device/cpu/index_lanes.h"
#include "device/cpu/x86/lanes512.h"

#define LOG2E 1.44269504f
#define UNROLL _Pragma("GCC unroll 8")

/* Heads that share a pass over a page: the codes stay in registers. */
#define HEADS 8u
/* 32-component blocks of weights. */
#define MAX_BLOCKS (HSRI_ATTEND_MAX_HEAD_DIM / 32u)

/* The sketch's components as the kernel sees them: blocks of 32 with scales, weights and products. Quad i of a block is components 4i ..
 * 4i+3. */
typedef struct sketch_shape {
    uint32_t d, n, n_blocks, n_means;      /* n_means: 32-component blocks of a mean key */
    uint32_t quads_4bit, quads_2bit;
    hsri_index_layout at;
} sketch_shape;

/* The heads of a pass. */
typedef struct sketch_heads {
    /* int16: the weight of a code at the largest scale of the call, 127 * 128 for the largest of all */
    __m512i weights[HEADS][MAX_BLOCKS];
    __m512i query[HEADS][MAX_BLOCKS];      /* int16, for mean keys */
    float   step[HEADS];                   /* log2 of a mass for a weight of 1 */
    float   query_step[HEADS];
    float   base[HEADS];                   /* log2 of the mass of a token at the calibration's mean key */
} sketch_heads;

static inline __mmask16 first16(uint32_t n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1u); }
static inline uint32_t left_of(uint32_t n, uint32_t used) { return n > used ? n - used : 0; }

/* Absolute largest of 16 floats; NaN wins nothing. */
static inline float largest16(__m512 v) { return _mm512_reduce_max_ps(v); }

/* 32 floats, rounded, as int16 in order. */
static inline __m512i to_words(__m512 low, __m512 high)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(low))),
                              _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(high)), 1);
}

/* Scales of components [c, c + 16), zero beyond the last. */
static inline __m512 load_scales(const sketch_shape *s, const uint8_t *entry, uint32_t c)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first16(left_of(s->n, c)), entry + s->at.scales + 2 * c));
}

/* The largest scale of each component over the pages of the call. float16 that is not negative orders like its bits. */
static void largest_scales(const sketch_shape *s, const hsri_score_args *a, float *most)
{
    for (uint32_t c = 0; c < s->n_blocks * 32; c += 16) {
        __mmask16 mask = first16(left_of(s->n, c));
        __m256i   bits = _mm256_setzero_si256();

        for (uint32_t p = 0; p < a->n_pages; p++)
            bits = _mm256_max_epu16(bits, _mm256_maskz_loadu_epi16(mask, a->entries[p] + s->at.scales + 2 * c));
        _mm512_storeu_ps(most + c, _mm512_cvtph_ps(bits));
    }
}

/* x[n], times `by`, as int16 of the largest; returns what a step stands for. Not finite: NaN. */
static float words_of(const float *x, const float *by, float factor, uint32_t n, uint32_t n_blocks, float top, __m512i *words)
{
    __m512 scaled[2 * MAX_BLOCKS], most = _mm512_setzero_ps(), nothing = _mm512_setzero_ps();
    float  largest;

    for (uint32_t i = 0; i < 2 * n_blocks; i++) {
        scaled[i] = _mm512_mul_ps(_mm512_maskz_loadu_ps(first16(left_of(n, 16 * i)), x + 16 * i), _mm512_set1_ps(factor));
        if (by)
            scaled[i] = _mm512_mul_ps(scaled[i], _mm512_loadu_ps(by + 16 * i));
        most = _mm512_max_ps(_mm512_abs_ps(scaled[i]), most);
        nothing = _mm512_fmadd_ps(scaled[i], _mm512_setzero_ps(), nothing);
    }
    largest = largest16(most);
    if (_mm512_cmp_ps_mask(nothing, nothing, _CMP_UNORD_Q)) {
        memset(words, 0, n_blocks * sizeof *words);
        return NAN;
    }
    for (uint32_t i = 0; i < n_blocks; i++) {
        __m512 inverse = _mm512_set1_ps(largest > 0x1p-100f ? top / largest : 0.0f);

        words[i] = to_words(_mm512_mul_ps(scaled[2 * i], inverse), _mm512_mul_ps(scaled[2 * i + 1], inverse));
    }
    return largest / top;
}

/* Fills a group of four. */
static void no_head(const sketch_shape *s, uint32_t i, sketch_heads *heads)
{
    memset(heads->weights[i], 0, s->n_blocks * sizeof *heads->weights[i]);
    memset(heads->query[i], 0, s->n_means * sizeof *heads->query[i]);
    heads->step[i] = heads->query_step[i] = heads->base[i] = 0.0f;
}

/* Head h of the call as head i of the pass. */
static void prepare_head(const sketch_shape *s, const hsri_score_args *a, uint32_t h, const float *most, uint32_t i, sketch_heads *heads)
{
    const float *q = a->queries + (uint64_t)h * s->d;
    float        factor = a->scale * LOG2E;

    /* A step is that of a byte: words have seven bits more. */
    heads->step[i] = words_of(a->rotated + (uint64_t)h * s->d, most, factor, s->n, s->n_blocks, 127.0f * 128.0f,
                              heads->weights[i]) * 128.0f;
    heads->query_step[i] = words_of(q, NULL, factor, s->d, s->n_means, 32767.0f, heads->query[i]);
    heads->base[i] = (a->mean_k ? factor * dot_float(q, a->mean_k, s->d) : 0.0f) - a->reference[h] * LOG2E;
}

/* ---- a page ---- */

/* Sums of the four groups of four lanes, for four vectors: lane 4g + i is the sum of group g of vector i. */
static inline __m512i sum_lanes_i(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));

    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

static inline __m512 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512  ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512  cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);

    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

/* All of four vectors: lane i is the sum of vector i. */
static inline __m128i sum_all(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i groups = sum_lanes_i(a, b, c, d);
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(groups), _mm512_extracti64x4_epi64(groups, 1));

    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* What a page's products need of up to HEADS heads. */
typedef struct page_work {
    __m512i weights[MAX_BLOCKS][HEADS / 2];    /* bytes of two heads, by turns of eight */
    float   base[HEADS];                       /* log2 of the mass of a token whose components are all zero */
    float   step[HEADS];
} page_work;

/* Where the weights of quads `quad` (even) and quad + 1 are: those of head h at [HEAD_AT(h)] and the next. */
static inline const int32_t *quads_at(const page_work *work, uint32_t quad)
{
    return (const int32_t *)work->weights[quad / 8] + quad % 8 / 2 * 4;
}

#define HEAD_AT(h) ((h) / 2 * 16 + (h) % 2 * 2)

/* The page's scales as shares of the largest ones, 256 for 1. */
static inline void page_shares(const sketch_shape *s, const uint8_t *entry, const float *inverse, __m512i *shares)
{
    for (uint32_t i = 0; i < s->n_blocks; i++)
        shares[i] = to_words(_mm512_mul_ps(load_scales(s, entry, 32 * i), _mm512_loadu_ps(inverse + 32 * i)),
                             _mm512_mul_ps(load_scales(s, entry, 32 * i + 16), _mm512_loadu_ps(inverse + 32 * i + 16)));
}

/* Bytes of the weights of four heads, and twice the sum of weights times the middle of their codes. */
static inline __m128i page_weights(const sketch_shape *s, const sketch_heads *heads, const __m512i *shares, const __m512i *middles,
                                   uint32_t h0,
                                   page_work *work)
{
    __m512i offsets[4] = { _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512() };

    for (uint32_t i = 0; i < s->n_blocks; i++) {
        __m512i words[4];

        UNROLL for (uint32_t h = 0; h < 4; h++) {
            words[h] = _mm512_mulhrs_epi16(heads->weights[h0 + h][i], shares[i]);
            offsets[h] = dot_words(offsets[h], words[h], middles[i]);
        }
        work->weights[i][h0 / 2] = _mm512_packs_epi16(words[0], words[1]);
        work->weights[i][h0 / 2 + 1] = _mm512_packs_epi16(words[2], words[3]);
    }
    return sum_all(offsets[0], offsets[1], offsets[2], offsets[3]);
}

/* Products of four heads with the page's mean key. */
static inline __m128i mean_products(const sketch_shape *s, const sketch_heads *heads, const uint8_t *entry, uint32_t h0)
{
    __m512i sums[4] = { _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512() };

    for (uint32_t i = 0; i < s->n_means; i++) {
        uint32_t  n = left_of(s->d, 32 * i);
        __mmask32 mask = n >= 32 ? 0xffffffffu : (1u << n) - 1u;
        __m512i   mean = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, entry + s->at.mean_k + 32 * i));

        UNROLL for (uint32_t h = 0; h < 4; h++)
            sums[h] = dot_words(sums[h], heads->query[h0 + h][i], mean);
    }
    return sum_all(sums[0], sums[1], sums[2], sums[3]);
}

/* base and step of four heads. Not a number becomes far below everything. */
static inline void page_bases(const sketch_heads *heads, const uint8_t *entry, __m128i means, __m128i offsets, uint32_t h0, page_work *work)
{
    const __m128 nowhere = _mm_set1_ps(-1e30f);
    __m128       step = _mm_loadu_ps(heads->step + h0), base = _mm_loadu_ps(heads->base + h0);
    __m128       query_step = _mm_mul_ps(_mm_loadu_ps(heads->query_step + h0), _mm_set1_ps(load_float(entry)));

    base = _mm_fmadd_ps(_mm_cvtepi32_ps(means), query_step, base);
    base = _mm_fmadd_ps(_mm_cvtepi32_ps(offsets), _mm_mul_ps(step, _mm_set1_ps(-0.5f)), base);
    base = _mm_min_ps(_mm_max_ps(base, nowhere), _mm_set1_ps(1e30f));   /* the second operand, if the first is NaN */
    step = _mm_max_ps(step, _mm_setzero_ps());
    _mm_storeu_ps(work->base + h0, base);
    _mm_storeu_ps(work->step + h0, step);
}

/* Sums over tokens of the masses of n heads; sums[h] lane 4u + i is a part of unit u's. */
INLINE void page_sums(const sketch_shape *s, const uint8_t *page_codes, const page_work *work, uint32_t n, __m512 *sums)
{
    const __m512i low4 = _mm512_set1_epi8(15), low2 = _mm512_set1_epi8(3);
    __m512        sum[HEADS];

    UNROLL for (uint32_t h = 0; h < n; h++)
        sum[h] = _mm512_setzero_ps();
    for (uint32_t line = 0; line < HSRI_PAGE_UNITS; line++) {
        const uint8_t *codes = page_codes + line * 64;
        __m512i        acc[HEADS];
        uint32_t       quad = 0;

        UNROLL for (uint32_t h = 0; h < n; h++)
            acc[h] = _mm512_setzero_si512();
        for (; quad < s->quads_4bit; quad += 2, codes += 256) {
            __m512i bytes = _mm512_load_si512(codes), low = _mm512_and_si512(bytes, low4);
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low4);
            const int32_t *w = quads_at(work, quad);

            UNROLL for (uint32_t h = 0; h < n; h++)
                acc[h] = dot_bytes(dot_bytes(acc[h], low, _mm512_set1_epi32(w[HEAD_AT(h)])), high, _mm512_set1_epi32(w[HEAD_AT(h) + 1]));
        }
        for (; quad < s->quads_4bit + s->quads_2bit; quad += 4, codes += 256) {
            __m512i bytes = _mm512_load_si512(codes);

            UNROLL for (uint32_t part = 0; part < 4; part++, bytes = _mm512_srli_epi16(bytes, 2)) {
                __m512i        two = _mm512_and_si512(bytes, low2);
                const int32_t *w = quads_at(work, quad + part / 2 * 2) + part % 2;

                UNROLL for (uint32_t h = 0; h < n; h++)
                    acc[h] = dot_bytes(acc[h], two, _mm512_set1_epi32(w[HEAD_AT(h)]));
            }
        }
        UNROLL for (uint32_t h = 0; h < n; h++)
            sum[h] = _mm512_add_ps(sum[h], exp2_16(_mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[h]), _mm512_set1_ps(work->step[h]),
                                                                   _mm512_set1_ps(work->base[h]))));
    }
    UNROLL for (uint32_t h = 0; h < n; h++)
        sums[h] = sum[h];
}

/* Unit masses of four heads from their sums; only the first n heads are stored. */
static inline void store_masses(const hsri_score_args *a, const __m512 *sums, uint32_t head, uint32_t n, uint32_t page)
{
    const __m512i transposed = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512        units = _mm512_min_ps(sum_lanes(sums[0], sums[1], sums[2], sums[3]), _mm512_set1_ps(HSRI_MASS_MAX));
    float        *mass = a->mass + head * a->mass_stride + page * HSRI_PAGE_UNITS;

    units = _mm512_permutexvar_ps(transposed, units);
    for (uint32_t i = 0; i < n; i++) {
        _mm_storeu_ps(mass + i * a->mass_stride, _mm512_castps512_ps128(units));
        units = _mm512_shuffle_f32x4(units, units, _MM_SHUFFLE(0, 3, 2, 1));
    }
}

#define SUMS_CASE(count) \
    case count: page_sums(s, a->codes[page], &work, count, sums); break;

/* Heads [h0, h0 + n) of the call, which are `heads`, and one page. */
static void score_page(const sketch_shape *s, const hsri_score_args *a, const sketch_heads *heads, uint32_t h0, uint32_t n, uint32_t page,
                       const float *inverse, const __m512i *middles)
{
    const uint8_t *entry = a->entries[page];
    __m512i        shares[MAX_BLOCKS];
    __m512         sums[HEADS];
    page_work      work;
    uint32_t       h = 0;

    page_shares(s, entry, inverse, shares);
    do
        page_bases(heads, entry, mean_products(s, heads, entry, h), page_weights(s, heads, shares, middles, h, &work), h, &work);
    while ((h += 4) < n);
    switch (n) {
    SUMS_CASE(1) SUMS_CASE(2) SUMS_CASE(3) SUMS_CASE(4) SUMS_CASE(5) SUMS_CASE(6) SUMS_CASE(7)
    default: page_sums(s, a->codes[page], &work, 8, sums); break;
    }
    for (h = n; h % 4; h++)
        sums[h] = _mm512_setzero_ps();
    for (h = 0; h < n; h += 4)
        store_masses(a, sums + h, h0 + h, (uint32_t)hsri_min(4, n - h), page);
}

/* Twice the middle of a component's codes. */
static void fill_middles(const hsri_index_shape *shape, const sketch_shape *s, __m512i *middles)
{
    int16_t twice[32 * MAX_BLOCKS];

    for (uint32_t c = 0; c < 32 * s->n_blocks; c++)
        twice[c] = c < shape->n_4bit ? 15 : 3;
    memcpy(middles, twice, s->n_blocks * sizeof *middles);
}

/* ---- mean values ---- */

/* Heads and lines of 16 components whose sums stay in registers. */
#define MEAN_HEADS 4u
#define MEAN_LINES 4u

/* Weights of the pages of a call for one head: the masses of their units. Returns their sum. */
static inline float mean_weights(const float *mass, uint32_t n_pages, float factor, float *weights)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512        all = _mm512_setzero_ps();

    for (uint32_t p = 0; p < n_pages; p += 16) {
        __m512 x[4], sums;

        for (uint32_t i = 0; i < 4; i++)
            x[i] = _mm512_maskz_loadu_ps(first16(left_of(4 * n_pages, 4 * p + 16 * i)), mass + 4 * p + 16 * i);
        sums = _mm512_mul_ps(_mm512_permutexvar_ps(order, sum_lanes(x[0], x[1], x[2], x[3])), _mm512_set1_ps(factor));
        _mm512_storeu_ps(weights + p, sums);
        all = _mm512_add_ps(all, sums);
    }
    return _mm512_reduce_add_ps(all);
}

/* A block of n heads and lines of components: out[h] += sum over pages of weights[h] times codes. */
INLINE void mean_block(const uint8_t *const *codes, uint32_t n_pages, uint32_t n, uint32_t n_lines, uint32_t left,
                       float (*weights)[HSRI_SCORE_PAGES], float *out, uint64_t out_stride)
{
    __m512 sums[MEAN_HEADS][MEAN_LINES];

    UNROLL for (uint32_t h = 0; h < n; h++)
        UNROLL for (uint32_t i = 0; i < n_lines; i++)
            sums[h][i] = _mm512_maskz_loadu_ps(first16(left_of(left, 16 * i)), out + h * out_stride + 16 * i);
    for (uint32_t p = 0; p < n_pages; p++) {
        __m512 line[MEAN_LINES];

        UNROLL for (uint32_t i = 0; i < n_lines; i++)
            line[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first16(left_of(left, 16 * i)), codes[p] + 16 * i)));
        UNROLL for (uint32_t h = 0; h < n; h++)
            UNROLL for (uint32_t i = 0; i < n_lines; i++)
                sums[h][i] = _mm512_fmadd_ps(_mm512_set1_ps(weights[h][p]), line[i], sums[h][i]);
    }
    UNROLL for (uint32_t h = 0; h < n; h++)
        UNROLL for (uint32_t i = 0; i < n_lines; i++)
            _mm512_mask_storeu_ps(out + h * out_stride + 16 * i, first16(left_of(left, 16 * i)), sums[h][i]);
}

static void mean_heads(const uint8_t *const *codes, uint32_t n_pages, uint32_t n, uint32_t d, float (*weights)[HSRI_SCORE_PAGES],
                       float *out)
{
    for (uint32_t j = 0; j < d; j += 16 * MEAN_LINES) {
        const uint8_t *at[HSRI_SCORE_PAGES];

        for (uint32_t p = 0; p < n_pages; p++)
            at[p] = codes[p] + j;
        switch (n) {
        case 1:  mean_block(at, n_pages, 1, MEAN_LINES, d - j, weights, out + j, 1 + d); break;
        case 2:  mean_block(at, n_pages, 2, MEAN_LINES, d - j, weights, out + j, 1 + d); break;
        case 3:  mean_block(at, n_pages, 3, MEAN_LINES, d - j, weights, out + j, 1 + d); break;
        default: mean_block(at, n_pages, 4, MEAN_LINES, d - j, weights, out + j, 1 + d); break;
        }
    }
}

/* Pages that weigh something move to the front, where their weights are those of codes; returns how many they are. Entries lie far apart:
 * they are fetched before the first is needed. */
static uint32_t weigh_pages(const uint8_t *const *entries, uint32_t mean_v, uint32_t d, uint32_t n_pages, uint32_t n_heads,
                            float (*weights)[HSRI_SCORE_PAGES], const uint8_t **codes)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < n_pages; p++) {
        bool any = false;

        for (uint32_t h = 0; h < n_heads; h++) {
            any |= weights[h][p] > 0.0f;
            weights[h][n] = weights[h][p] > 0.0f ? weights[h][p] : 0.0f;
        }
        codes[n] = entries[p];
        for (uint32_t at = 0; any && at < mean_v + d; at += 64)
            _mm_prefetch((const char *)(entries[p] + at), _MM_HINT_T0);
        n += any;
    }
    for (uint32_t p = 0; p < n; p++) {
        for (uint32_t h = 0; h < n_heads; h++)
            weights[h][p] = weights[h][p] > 0.0f ? weights[h][p] * load_float(codes[p] + sizeof(float)) : 0.0f;
        codes[p] += mean_v;
    }
    return n;
}

static void add_means_512(const uint8_t *const *entries, uint32_t n_pages, const hsri_index_shape *shape, uint32_t n_heads,
                          const float *mass,
                          uint64_t mass_stride, const float *factors, float *out)
{
    hsri_index_layout at = hsri_index_layout_of(shape);
    const uint8_t    *codes[HSRI_SCORE_PAGES];
    float             weights[MEAN_HEADS][HSRI_SCORE_PAGES];
    uint32_t          d = shape->head_dim;

    for (uint32_t h0 = 0; h0 < n_heads; h0 += MEAN_HEADS, out += MEAN_HEADS * (1 + d)) {
        uint32_t n = (uint32_t)hsri_min(MEAN_HEADS, n_heads - h0);

        for (uint32_t h = 0; h < n; h++)
            out[h * (1 + d)] += mean_weights(mass + (h0 + h) * mass_stride, n_pages, factors[h0 + h], weights[h]);
        mean_heads(codes, weigh_pages(entries, at.mean_v, d, n_pages, n, weights, codes), n, d, weights, out + 1);
    }
}

/* ---- the largest ---- */

static uint32_t reach_512(const float *x, uint32_t n, float least, uint32_t *out)
{
    __m512i  at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    uint32_t n_out = 0;

    for (uint32_t i = 0; i < n; i += 16, at = _mm512_add_epi32(at, _mm512_set1_epi32(16))) {
        __mmask16 in = _mm512_mask_cmp_ps_mask(first16(n - i), _mm512_maskz_loadu_ps(first16(n - i), x + i),
                                               _mm512_set1_ps(least), _CMP_GE_OQ);
        uint32_t  found = (uint32_t)__builtin_popcount(in);

        if (in)
            _mm512_mask_storeu_epi32(out + n_out, first16(found), _mm512_maskz_compress_epi32(in, at));
        n_out += found;
    }
    return n_out;
}

/* ---- scoring ---- */

static void score_sketch(const hsri_score_args *a)
{
    const hsri_index_shape *shape = a->shape;
    uint32_t                d = shape->head_dim, n = shape->n_4bit + shape->n_2bit, csr = _mm_getcsr();
    sketch_shape            s = { d, n, (n + 31) / 32, (d + 31) / 32, shape->n_4bit / 4, shape->n_2bit / 4, hsri_index_layout_of(shape) };
    float                   most[32 * MAX_BLOCKS], inverse[32 * MAX_BLOCKS];
    __m512i                 middles[MAX_BLOCKS];
    sketch_heads            heads;

    /* Masses below the normal range are 0: the processor would take a hundred cycles for each. */
    _mm_setcsr(csr | _MM_FLUSH_ZERO_ON);
    largest_scales(&s, a, most);
    for (uint32_t c = 0; c < 32 * s.n_blocks; c++)
        inverse[c] = most[c] > 0.0f ? 256.0f / most[c] : 0.0f;
    fill_middles(shape, &s, middles);
    for (uint32_t h0 = 0; h0 < a->n_heads; h0 += HEADS) {
        uint32_t part = (uint32_t)hsri_min(HEADS, a->n_heads - h0);

        for (uint32_t h = 0; h < part; h++)
            prepare_head(&s, a, h0 + h, most, h, &heads);
        for (uint32_t h = part; h % 4; h++)
            no_head(&s, h, &heads);
        for (uint32_t page = 0; page < a->n_pages; page++)
            score_page(&s, a, &heads, h0, part, page, inverse, middles);
    }
    _mm_setcsr(csr);
}

static void fill_512(hsri_sparse_kernels *k)
{
    fill_lanes(k);
    k->score_sketch = score_sketch;
    k->add_means = add_means_512;
    k->reach = reach_512;
}
