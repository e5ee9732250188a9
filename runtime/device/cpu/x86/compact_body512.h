/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over compact pages in whole numbers, in 512-bit registers. A file defines the word dot_bytes and includes this.
 *
 * A page's codes stay bytes, without signs. Queries, scaled by the page's key scales, are rounded to bytes of a scale of their own for each
 * page, and so are softmax weights, 255 being the largest of the page. Both products are then sums of whole numbers: exact, in any order,
 * so that a few queries multiply codes in registers, and many in tiles (formats_amx.c), with the same bits. What is not a product of
 * codes stays in float: the mean key's part of scores, the sum of weights, and the mean value's part of the output.
 *
 * Bytes that a product takes four at a time lie as packing leaves them. Of 16 components (a strip), or tokens (a unit), four dwords have
 * four each; of four strips or units, dword 4 i + s has quarter i of number s. */
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"
#include "device/cpu/x86/lanes512.h"
#include "device/formats.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* Queries whose sums stay in registers together, and those whose sums are added up across lanes together. */
#define MOST_ROWS 8u
#define FOUR 4u

/* A strip is 16 components of keys: of the first half (nibbles), then of the other (pairs of bits), each with zeros behind its last. Those
 * of the other half are in the order 0, 4, 8, 12, 1, 5, ..: that of a shift and a mask. */
typedef struct strips {
    uint32_t d, half, n_half, n;   /* n_half of n strips are nibbles */
    uint32_t n_packs;              /* four strips each */
} strips;

INLINE strips strips_of(uint32_t d)
{
    uint32_t n_half = (d / 2 + 15) / 16;
    return (strips) { d, d / 2, n_half, 2 * n_half, (2 * n_half + 3) / 4 };
}

INLINE uint32_t quarter(uint32_t strip, uint32_t i) { return strip / 4 * 16 + 4 * i + strip % 4; }

/* Units of one page that are attended together. */
typedef struct page_run {
    const uint8_t *slot, *units;
    uint32_t n;
} page_run;

/* The call's work space. */
typedef struct work {
    const hsri_units_args *a;
    float    slope;              /* scores are exponents of 2 */
    float   *queries;            /* [queries][strips * 16]: rotated */
    uint8_t *middles;            /* [packs * 64]: twice the middle of each component's codes */
    uint8_t *bytes;              /* [queries][packs * 64]: the same as bytes, for a page */
    int32_t *products;           /* [queries][max(64 tokens, d)]: of codes with queries, then with weights */
    uint8_t *weights;            /* [queries][64 tokens] */
    uint8_t *keys, *values;      /* tiles' codes */
    float   *scale, *mean;       /* [strips * 16], [d]: of a page's keys, then [d], [d]: of its values */
    /* of each query: score = start + factor * product; the largest so far and the sum of weights; then what becomes of the output */
    float   *start, *factor, *top, *sum;
    float   *keep, *weight, *mean_weight, *middle;
} work;

static void *take(float **at, uint64_t n_floats)
{
    void *p = *at;
    *at += hsri_round_up(n_floats, 16);
    return p;
}

INLINE work work_of(const hsri_units_args *a, const strips *x)
{
    const uint32_t n = HSRI_ATTEND_MAX_QUERIES;
    float *at = a->scratch;
    work w = { .a = a, .slope = a->scale * 0x1.715476p+0f };
    w.queries = take(&at, (uint64_t)n * x->n * 16);
    w.middles = take(&at, x->n_packs * 16);
    w.bytes = take(&at, (uint64_t)n * x->n_packs * 16);
    w.products = take(&at, (uint64_t)n * hsri_max(HSRI_PAGE_TOKENS, x->d));
    w.weights = take(&at, n * HSRI_PAGE_TOKENS / 4);
    w.keys = take(&at, (uint64_t)HSRI_PAGE_UNITS * x->n_packs * 256);
    w.values = take(&at, x->d / 16 * 256);
    w.scale = take(&at, x->n * 16);
    w.mean = take(&at, x->d);
    float **of_queries[] = { &w.start, &w.factor, &w.top, &w.sum, &w.keep, &w.weight, &w.mean_weight, &w.middle };
    for (uint32_t i = 0; i < 8; i++) {
        *of_queries[i] = take(&at, n);
    }
    assert(at - a->scratch <= HSRI_UNITS_SCRATCH);
    return w;
}

INLINE uint32_t product_stride(const strips *x) { return (uint32_t)hsri_max(HSRI_PAGE_TOKENS, x->d); }

static page_run run_at(const hsri_units_args *a, uint32_t first)
{
    uint32_t n = 1;
    while (first + n < a->n_units && a->slots[first + n] == a->slots[first] && n < HSRI_PAGE_UNITS) {
        n++;
    }
    return (page_run) { a->slots[first], a->units + first, n };
}

/* The whole slot of the run behind this one, a part at a time: pages are too short for the hardware to find out in time. */
INLINE void fetch_part(const uint8_t *slot, uint32_t part, uint32_t bytes)
{
    UNROLL
    for (uint32_t i = 0; i < bytes; i += 64) {
        _mm_prefetch((const char *)slot + part * bytes + i, _MM_HINT_T0);
    }
}

/* ---- across lanes ---- */

typedef struct four {
    __m512 v[FOUR];
} four;

/* Lane i: the sum (largest) of the lanes of v[i]. All four go the same way. */
#define ACROSS(name, op) \
    INLINE __m128 name(const four *x) \
    { \
        __m512 a = op##512(_mm512_unpacklo_ps(x->v[0], x->v[1]), _mm512_unpackhi_ps(x->v[0], x->v[1])); \
        __m512 b = op##512(_mm512_unpacklo_ps(x->v[2], x->v[3]), _mm512_unpackhi_ps(x->v[2], x->v[3])); \
        __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); \
        __m512 high = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); \
        __m512 c = op##512(low, high); \
        __m256 e = op##256(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1)); \
        return op##128(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1)); \
    }
#define add512 _mm512_add_ps
#define add256 _mm256_add_ps
#define add128 _mm_add_ps
#define max512 _mm512_max_ps
#define max256 _mm256_max_ps
#define max128 _mm_max_ps
ACROSS(sums_of, add)
ACROSS(largest_of, max)

/* The same, right to 3e-6. */
INLINE __m128 exp2_four(__m128 t)
{
    __m128 f = _mm_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m128 p = _mm_set1_ps(0x1.bb0b0ap-7f);
    p = _mm_fmadd_ps(p, f, _mm_set1_ps(0x1.aa4a66p-5f));
    p = _mm_fmadd_ps(p, f, _mm_set1_ps(0x1.ee718ap-3f));
    p = _mm_fmadd_ps(p, f, _mm_set1_ps(0x1.62d1c4p-1f));
    p = _mm_fmadd_ps(p, f, _mm_set1_ps(0x1.00002ap+0f));
    return _mm_scalef_ps(p, t);
}

/* ---- queries ---- */

/* Where strip s begins among components, and which of its lanes there are. */
INLINE uint32_t strip_start(const strips *x, uint32_t s) { return s < x->n_half ? 16 * s : x->half + 16 * (s - x->n_half); }
INLINE uint32_t strip_lanes(const strips *x, uint32_t s)
{
    uint32_t behind = x->half - 16 * (s < x->n_half ? s : s - x->n_half);
    return behind < 16 ? behind : 16;
}

static void order_queries(const work *w, const strips *x)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (uint32_t i = 0; i < w->a->n_queries; i++) {
        for (uint32_t s = 0; s < x->n; s++) {
            __m512 v = _mm512_maskz_loadu_ps(lanes(strip_lanes(x, s)), w->a->rotated[i] + strip_start(x, s));
            v = s < x->n_half ? v : _mm512_permutexvar_ps(order, v);
            _mm512_store_ps(w->queries + ((uint64_t)i * x->n + s) * 16, v);
        }
    }
    for (uint32_t s = 0; s < x->n; s++) {
        for (uint32_t i = 0; i < 16; i++) {
            uint32_t j = strip_start(x, s) + i;
            w->middles[4 * quarter(s, i / 4) + i % 4] = s >= x->n_half ? 3 : j < hsri_n6(x->d) ? 63 : 15;
        }
    }
}

/* What scale bytes stand for, but for their unit. */
INLINE __m512 scales_of(__m128i bytes)
{
    __m512i v = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), HSRI_SCALE_SHIFT);
    return _mm512_castsi512_ps(_mm512_add_epi32(v, _mm512_set1_epi32((int)HSRI_SCALE_BIAS)));
}

INLINE void read_means(const work *w, const strips *x, const uint8_t *codes, float step, const float *about)
{
    for (uint32_t j = 0; j < x->d; j += 16) {
        __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + j))));
        _mm512_store_ps(w->mean + j, _mm512_fmadd_ps(_mm512_set1_ps(step), code, _mm512_loadu_ps(about + j)));
    }
}

/* Bytes of 64 numbers that are near whole ones, in the order described above. */
INLINE __m512i pack_signed(const __m512i v[4])
{
    return _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
}

INLINE __m512i pack_unsigned(const __m512i v[4])
{
    return _mm512_packus_epi16(_mm512_packus_epi32(v[0], v[1]), _mm512_packus_epi32(v[2], v[3]));
}

/* Of n queries from `first` on: bytes for the page, and how its products become scores. */
INLINE void scale_queries(uint32_t n, const work *w, const strips *x, uint32_t first, float unit)
{
    four largest, start;
    float inverse[FOUR], factor[FOUR];
    UNROLL
    for (uint32_t i = 0; i < FOUR; i++) {
        const float *q = w->queries + (uint64_t)(first + (i < n ? i : n - 1)) * x->n * 16;
        largest.v[i] = _mm512_setzero_ps();
        UNROLL
        for (uint32_t s = 0; s < x->n; s++) {
            __m512 v = _mm512_mul_ps(_mm512_load_ps(q + 16 * s), _mm512_load_ps(w->scale + 16 * s));
            largest.v[i] = _mm512_range_ps(largest.v[i], v, 11);   /* the larger of absolute values */
        }
    }
    /* the second operand is taken where the first is NaN; zeros have zeros for bytes */
    __m128 top = _mm_max_ps(_mm_set1_ps(0x1p-100f), largest_of(&largest));
    __m128 step = _mm_mul_ps(_mm_mul_ps(top, _mm_set1_ps(1.0f / 127)), _mm_set1_ps(unit));
    _mm_storeu_ps(inverse, _mm_div_ps(_mm_set1_ps(127.0f), top));
    _mm_storeu_ps(factor, step);
    UNROLL
    for (uint32_t i = 0; i < FOUR; i++) {
        if (i >= n) {
            start.v[i] = start.v[n - 1];
            continue;
        }
        const float *q = w->queries + (uint64_t)(first + i) * x->n * 16, *plain = w->a->queries[first + i];
        __m512i middle = _mm512_setzero_si512();
        UNROLL
        for (uint32_t p = 0; p < x->n_packs; p++) {
            __m512i v[4];
            UNROLL
            for (uint32_t s = 4 * p; s < 4 * p + 4; s++) {
                v[s % 4] = _mm512_setzero_si512();
                if (s < x->n) {
                    __m512 scaled = _mm512_mul_ps(_mm512_load_ps(q + 16 * s), _mm512_load_ps(w->scale + 16 * s));
                    v[s % 4] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled, _mm512_set1_ps(inverse[i])));
                }
            }
            __m512i bytes = pack_signed(v);
            _mm512_store_si512(w->bytes + ((uint64_t)(first + i) * x->n_packs + p) * 64, bytes);
            middle = dot_bytes(middle, _mm512_load_si512(w->middles + 64 * p), bytes);
        }
        __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(middle), _mm512_set1_ps(-0.5f * factor[i]));
        UNROLL
        for (uint32_t j = 0; j < x->d; j += 16) {
            sum = _mm512_fmadd_ps(_mm512_loadu_ps(plain + j), _mm512_load_ps(w->mean + j), sum);
        }
        start.v[i] = sum;
    }
    __m128 slope = _mm_set1_ps(w->slope);
    _mm_storeu_ps(w->start + first, _mm_mul_ps(slope, sums_of(&start)));
    _mm_storeu_ps(w->factor + first, _mm_mul_ps(slope, step));
}

/* Scales and mean of a page's keys, and what follows from them for queries [first, end). */
INLINE void scale_all(const work *w, const strips *x, const uint8_t *slot, uint32_t first, uint32_t end)
{
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    hsri_page_header h;
    memcpy(&h, slot, sizeof h);
    const uint8_t *scales = hsri_key_scales(slot);
    UNROLL
    for (uint32_t s = 0; s < x->n; s++) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(scales + strip_start(x, s)));
        bytes = s < x->n_half ? bytes : _mm_shuffle_epi8(bytes, order);
        _mm512_store_ps(w->scale + 16 * s, scales_of(bytes));
    }
    read_means(w, x, hsri_key_means(slot, x->d), h.k_scale, w->a->calibration.mean_k);
    for (; end - first >= FOUR; first += FOUR) {
        scale_queries(FOUR, w, x, first, h.k_unit);
    }
    switch (end - first) {
    case 3: scale_queries(3, w, x, first, h.k_unit); break;
    case 2: scale_queries(2, w, x, first, h.k_unit); break;
    case 1: scale_queries(1, w, x, first, h.k_unit); break;
    }
}

/* ---- codes ---- */

/* Four components of 16 tokens, from a block's dwords: its first four, or the other four. */
INLINE __m512i four_bits(__m512i dwords, uint32_t other)
{
    return _mm512_and_si512(other ? _mm512_srli_epi16(dwords, 4) : dwords, _mm512_set1_epi8(15));
}

/* The same with 6 bits, of which the low ones lie in four planes: 16 tokens' pairs of bits of a component each. */
INLINE __m512i six_bits(__m512i dwords, uint32_t other, const uint8_t *planes)
{
    const __m512i byte = _mm512_set_epi32(0x0f0b0703, 0x0f0b0703, 0x0f0b0703, 0x0f0b0703, 0x0e0a0602, 0x0e0a0602, 0x0e0a0602, 0x0e0a0602,
                                          0x0d090501, 0x0d090501, 0x0d090501, 0x0d090501, 0x0c080400, 0x0c080400, 0x0c080400, 0x0c080400);
    const __m512i pair = _mm512_set4_epi32(6, 4, 2, 0);
    __m512i low = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)planes)), byte);
    __m512i high = other ? _mm512_srli_epi16(dwords, 2) : _mm512_slli_epi16(dwords, 2);
    low = _mm512_srlv_epi32(low, pair);
    low = _mm512_ternarylogic_epi32(high, low, _mm512_set1_epi8(0x3c), 0xe4);   /* the mask's bits of `high` */
    return _mm512_and_si512(low, _mm512_set1_epi8(0x3f));
}

/* Calls f(dword, codes, ...) for the codes of each four components of a unit; `dword` says which bytes of a query belong to them. */
#define FOR_KEYS(x, slot, unit, f, ...) \
    do { \
        const uint8_t *nibbles_ = hsri_key_nibbles(slot, (x)->d, unit), *pairs_ = hsri_key_pairs(slot, (x)->d, unit); \
        const uint8_t *lows_ = hsri_key_lows(slot, (x)->d, unit); \
        const uint32_t n6_ = hsri_n6((x)->d); \
        UNROLL \
        for (uint32_t j_ = 0; j_ < (x)->half; j_ += 8) { \
            __m512i dwords_ = _mm512_loadu_si512(nibbles_ + 8 * j_); \
            UNROLL \
            for (uint32_t i_ = 0; i_ < 2; i_++) { \
                const uint32_t c_ = j_ + 4 * i_; \
                __m512i codes_ = four_bits(dwords_, i_); \
                if (c_ + 4 <= n6_) { \
                    codes_ = six_bits(dwords_, i_, lows_ + 4 * c_); \
                } else if (c_ < n6_) { \
                    __mmask64 some_ = 0x1111111111111111u * ((1u << (n6_ - c_)) - 1); \
                    codes_ = _mm512_mask_mov_epi8(codes_, some_, six_bits(dwords_, i_, lows_ + 4 * c_)); \
                } \
                f(quarter(c_ / 16, c_ % 16 / 4), codes_, __VA_ARGS__); \
            } \
        } \
        UNROLL \
        for (uint32_t s_ = (x)->n_half; s_ < (x)->n; s_++) { \
            const __m512i words_ = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, \
                                                    23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0); \
            __m512i both_ = _mm512_maskz_loadu_epi32(lanes(strip_lanes(x, s_)), pairs_ + (s_ - (x)->n_half) * 64); \
            both_ = _mm512_permutexvar_epi16(words_, both_); \
            UNROLL \
            for (uint32_t i_ = 0; i_ < 4; i_++) { \
                f(quarter(s_, i_), _mm512_and_si512(_mm512_srli_epi16(both_, 2 * i_), _mm512_set1_epi8(3)), __VA_ARGS__); \
            } \
        } \
    } while (0)

/* ---- softmax ---- */

/* Weights of n queries from `first` on, of the page's n_units units: bytes, their sums, and what they make of the output so far. */
INLINE void softmax(uint32_t n, uint32_t n_units, const work *w, const strips *x, uint32_t first)
{
    const __m512i ones = _mm512_set1_epi8(1);
    __m512 t[FOUR][HSRI_PAGE_UNITS];
    four largest, sums, whole;
    float shift[FOUR];
    UNROLL
    for (uint32_t i = 0; i < n; i++) {
        const int32_t *products = w->products + (uint64_t)(first + i) * product_stride(x);
        __m512 start = _mm512_set1_ps(w->start[first + i]), factor = _mm512_set1_ps(w->factor[first + i]);
        largest.v[i] = _mm512_set1_ps(-INFINITY);
        UNROLL
        for (uint32_t u = 0; u < n_units; u++) {
            t[i][u] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(products + 16 * u)), factor, start);
            largest.v[i] = _mm512_max_ps(t[i][u], largest.v[i]);   /* a NaN is never the largest */
        }
    }
    UNROLL
    for (uint32_t i = n; i < FOUR; i++) {
        largest.v[i] = largest.v[n - 1];
    }
    __m128 here = largest_of(&largest), before = _mm_loadu_ps(w->top + first), top = _mm_max_ps(here, before);
    _mm_storeu_ps(shift, _mm_sub_ps(here, _mm_set1_ps(0x1.ffa37cp+2f)));   /* log2(255) */
    UNROLL
    for (uint32_t i = 0; i < n; i++) {
        __m512i v[4];
        __m512 largest_weight = _mm512_set1_ps(shift[i]);
        sums.v[i] = _mm512_setzero_ps();
        UNROLL
        for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++) {
            v[u] = _mm512_setzero_si512();
            if (u < n_units) {
                __m512 p = exp2_near(_mm512_sub_ps(t[i][u], largest_weight));
                sums.v[i] = _mm512_add_ps(sums.v[i], p);
                v[u] = _mm512_cvtps_epi32(p);
            }
        }
        __m512i bytes = pack_unsigned(v);
        _mm512_store_si512(w->weights + (uint64_t)(first + i) * HSRI_PAGE_TOKENS, bytes);
        whole.v[i] = _mm512_cvtepi32_ps(dot_bytes(_mm512_setzero_si512(), bytes, ones));
    }
    UNROLL
    for (uint32_t i = n; i < FOUR; i++) {
        sums.v[i] = sums.v[n - 1];
        whole.v[i] = whole.v[n - 1];
    }
    __m128 keep = exp2_four(_mm_sub_ps(before, top)), weight = exp2_four(_mm_sub_ps(here, top));
    weight = _mm_mul_ps(weight, _mm_set1_ps(1.0f / 255));
    __m128 mean_weight = _mm_mul_ps(weight, sums_of(&sums));
    _mm_storeu_ps(w->top + first, top);
    _mm_storeu_ps(w->sum + first, _mm_fmadd_ps(_mm_loadu_ps(w->sum + first), keep, mean_weight));
    _mm_storeu_ps(w->keep + first, keep);
    _mm_storeu_ps(w->weight + first, weight);
    _mm_storeu_ps(w->mean_weight + first, mean_weight);
    _mm_storeu_ps(w->middle + first, _mm_mul_ps(_mm_mul_ps(weight, _mm_set1_ps(-7.5f)), sums_of(&whole)));
}

INLINE void softmax_units(uint32_t n, uint32_t n_units, const work *w, const strips *x, uint32_t first)
{
    switch (n_units) {
    case 4: softmax(n, 4, w, x, first); break;
    case 3: softmax(n, 3, w, x, first); break;
    case 2: softmax(n, 2, w, x, first); break;
    case 1: softmax(n, 1, w, x, first); break;
    }
}

/* ---- output ---- */

INLINE void read_value_scales(const work *w, const strips *x, const uint8_t *slot)
{
    hsri_page_header h;
    memcpy(&h, slot, sizeof h);
    for (uint32_t j = 0; j < x->d; j += 16) {
        __m512 scale = scales_of(_mm_loadu_si128((const __m128i *)(hsri_value_scales(slot, x->d) + j)));
        _mm512_store_ps(w->scale + j, _mm512_mul_ps(_mm512_set1_ps(h.v_unit), scale));
    }
    read_means(w, x, hsri_value_means(slot, x->d), h.v_scale, w->a->calibration.mean_v);
}

/* Output of a query, components j to j + 15: what it was, the mean of the page, and its products. */
INLINE void fold(const work *w, uint32_t query, uint32_t j, __m512i product)
{
    float *o = w->a->partials[query] + 2 + j;
    __m512 v = _mm512_mul_ps(_mm512_loadu_ps(o), _mm512_set1_ps(w->keep[query]));
    v = _mm512_fmadd_ps(_mm512_load_ps(w->mean + j), _mm512_set1_ps(w->mean_weight[query]), v);
    __m512 codes = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), _mm512_set1_ps(w->weight[query]), _mm512_set1_ps(w->middle[query]));
    _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_load_ps(w->scale + j), codes, v));
}

static void start_queries(const work *w, const strips *x, uint32_t first, uint32_t end)
{
    for (uint32_t i = first; i < end; i++) {
        w->top[i] = -INFINITY;
        w->sum[i] = 0;
        memset(w->a->partials[i] + 2, 0, x->d * sizeof(float));
    }
}

static void finish_queries(const work *w, uint32_t first, uint32_t end)
{
    for (uint32_t i = first; i < end; i++) {
        w->a->partials[i][0] = w->top[i] * 0x1.62e430p-1f;
        w->a->partials[i][1] = w->sum[i];
    }
}

/* ---- a few queries ---- */

#define ADD_KEYS(dword, codes, rows, bytes, stride, sums) \
    do { \
        UNROLL \
        for (uint32_t r_ = 0; r_ < (rows); r_++) { \
            int32_t four_; \
            memcpy(&four_, (bytes) + r_ * (stride) + 4 * (dword), sizeof four_); \
            (sums)[r_] = dot_bytes((sums)[r_], codes, _mm512_set1_epi32(four_)); \
        } \
    } while (0)

INLINE void score_rows(uint32_t rows, const work *w, const strips *x, const page_run *run, const uint8_t *next, uint32_t first)
{
    const uint8_t *bytes = w->bytes + (uint64_t)first * x->n_packs * 64;
    int32_t *products = w->products + (uint64_t)first * product_stride(x);
    for (uint32_t u = 0; u < run->n; u++) {
        __m512i sums[MOST_ROWS];
        if (next) {
            fetch_part(next, u, 8 * x->d);
        }
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            sums[r] = _mm512_setzero_si512();
        }
        FOR_KEYS(x, run->slot, run->units[u], ADD_KEYS, rows, bytes, x->n_packs * 64, sums);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            _mm512_store_si512(products + r * product_stride(x) + 16 * u, sums[r]);
        }
    }
}

INLINE void value_strips(uint32_t rows, uint32_t n, const work *w, const strips *x, const page_run *run, const uint8_t *next,
                         uint32_t first, uint32_t j)
{
    __m512i sums[MOST_ROWS][4];
    const uint8_t *weights = w->weights + (uint64_t)first * HSRI_PAGE_TOKENS;
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < n; s++) {
            sums[r][s] = _mm512_setzero_si512();
        }
    }
    for (uint32_t u = 0; u < run->n; u++) {
        if (next) {
            fetch_part(next, 4 + u, 8 * x->d);
        }
        const uint8_t *codes = hsri_value_unit(HSRI_KV_TYPE_COMPACT, run->slot, x->d, run->units[u]) + 4 * j;
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            __m512i v[4];
            UNROLL
            for (uint32_t s = 0; s < n; s++) {
                v[s] = four_bits(_mm512_loadu_si512(codes + 4 * (i / 2 * x->d + 16 * s)), i % 2);
            }
            UNROLL
            for (uint32_t r = 0; r < rows; r++) {
                int32_t four_weights;
                memcpy(&four_weights, weights + r * HSRI_PAGE_TOKENS + 4 * (4 * i + u), sizeof four_weights);
                UNROLL
                for (uint32_t s = 0; s < n; s++) {
                    sums[r][s] = dot_bytes(sums[r][s], _mm512_set1_epi32(four_weights), v[s]);
                }
            }
        }
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < n; s++) {
            fold(w, first + r, j + 16 * s, sums[r][s]);
        }
    }
}

INLINE void attend_rows(uint32_t rows, const work *w, const strips *x, uint32_t first)
{
    const hsri_units_args *a = w->a;
    start_queries(w, x, first, first + rows);
    page_run run;
    for (uint32_t i = 0; i < a->n_units; i += run.n) {
        run = run_at(a, i);
        const uint8_t *next = i + run.n < a->n_units ? a->slots[i + run.n] : NULL;
        scale_all(w, x, run.slot, first, first + rows);
        score_rows(rows, w, x, &run, next, first);
        softmax_units(rows < FOUR ? rows : FOUR, run.n, w, x, first);
        if (rows > FOUR) {
            softmax_units(rows - FOUR, run.n, w, x, first + FOUR);
        }
        read_value_scales(w, x, run.slot);
        uint32_t j = 0;
        for (; rows <= 6 && j + 64 <= x->d; j += 64) {
            value_strips(rows, 4, w, x, &run, j ? NULL : next, first, j);
        }
        for (; j + 32 <= x->d; j += 32) {
            value_strips(rows, 2, w, x, &run, j ? NULL : next, first, j);
        }
        for (; j < x->d; j += 16) {
            value_strips(rows, 1, w, x, &run, j ? NULL : next, first, j);
        }
    }
    finish_queries(w, first, first + rows);
}
