/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over compact pages in whole numbers, in 512-bit registers. A file defines the word dot_bytes and includes this.
 *
 * Keys are made bytes about 128, such that a byte's step is the same for all pages of a call: key component j of a page is its code times
 * the page's scale of j, over the largest scale of j in the call. So a query becomes bytes only once, scaled by these largest scales.
 * Softmax weights become bytes, too, 255 being the largest of the page. Both products are then sums of whole numbers: exact, in any order,
 * so that a few queries multiply codes in registers, and many in tiles (compact_amx.c), with the same bits. What is not a product of
 * codes stays in float: the sum of weights, and the mean value's part of the output. The mean key's part of scores is a product of its
 * codes with the query in 15 bits, and of what they are about with the query in float, which is the same for all tokens of a call.
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
/* Rows of a tile, and three that a group of four may be beyond them. */
#define TERMS 20u

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

/* What becomes of the output so far of some queries, and what a page adds to it. */
typedef struct terms {
    float keep[TERMS], weight[TERMS], mean_weight[TERMS], middle[TERMS];
} terms;

/* The call's work space. */
typedef struct work {
    const hsri_units_args *a;
    float    slope;              /* scores are exponents of 2 */
    float   *steps;              /* [strips * 16]: what a key's byte stands for */
    float   *to_ratio;           /* [strips * 16]: what makes ratios of a page's key scales */
    uint8_t *bytes;              /* [queries][packs * 64]: rotated and scaled by `steps` */
    uint8_t *planes;             /* [queries][2][means * 64]: 128 times the first and the other are the plain query, in steps of its own */
    float   *outputs;            /* [queries][d] */
    int32_t *scores;             /* products of codes with queries: [2][16 rows][64 tokens] */
    int32_t *products;           /* and with weights: [2][16 rows][d] */
    uint8_t *weights;            /* [2][16 rows][64 tokens] */
    terms   *terms;              /* [3] */
    uint8_t *keys, *values;      /* tiles' codes */
    uint8_t *of_four, *of_two;   /* of a page: tables of what codes of 4 bits stand for, [half / 4][64], and those of 2, [n_half][64] */
    uint32_t *times, *plus;      /* [n_half * 16]: what makes bytes of codes of 6 bits: of each four components, even ones, then odd ones */
    uint16_t *ratios;            /* [n_half * 16]: steps of 1/512 of a byte of half a code */
    float   *scale, *mean;       /* [d], [d]: of a page's values */
    /* of each query: score = start + factor * product, where starts are those of a page, of the one before, whose weights may still be
     * made, and of the next; then what a start is made of; and the largest score so far and the sum of weights */
    float   *start[3], *factor;
    float   *base, *about, *mean_step;
    int32_t *mean_base;
    float   *top, *sum;
} work;

static void *take(float **at, uint64_t n_floats)
{
    void *p = *at;
    *at += hsri_round_up(n_floats, 16);
    return p;
}

/* Lines of 64 that a page's mean codes take. */
INLINE uint32_t n_means(const strips *x) { return (x->d + 63) / 64; }

INLINE work work_of(const hsri_units_args *a, const strips *x)
{
    const uint32_t n = HSRI_ATTEND_MAX_QUERIES;
    float *at = a->scratch;
    work w = { .a = a, .slope = a->scale * 0x1.715476p+0f };
    w.steps = take(&at, x->n * 16);
    w.to_ratio = take(&at, x->n * 16);
    w.bytes = take(&at, (uint64_t)n * x->n_packs * 16);
    w.planes = take(&at, (uint64_t)n * n_means(x) * 32);
    w.outputs = take(&at, (uint64_t)n * x->d);
    w.scores = take(&at, 2 * 16 * HSRI_PAGE_TOKENS);
    w.products = take(&at, (uint64_t)2 * 16 * x->d);
    w.weights = take(&at, 2 * 16 * HSRI_PAGE_TOKENS / 4);
    w.terms = take(&at, 3 * sizeof *w.terms / sizeof *at);
    w.keys = take(&at, (uint64_t)HSRI_PAGE_UNITS * x->n_packs * 256);
    w.values = take(&at, x->d / 16 * 256);
    w.of_four = take(&at, x->half / 4 * 16);
    w.of_two = take(&at, x->n_half * 16);
    w.times = take(&at, x->n_half * 16);
    w.plus = take(&at, x->n_half * 16);
    w.ratios = take(&at, x->n_half * 8);
    w.scale = take(&at, x->d);
    w.mean = take(&at, x->d);
    w.mean_base = take(&at, n + 16);
    float **of_queries[] = { &w.start[0], &w.start[1], &w.start[2], &w.factor, &w.base, &w.about, &w.mean_step, &w.top, &w.sum };
    for (uint32_t i = 0; i < sizeof of_queries / sizeof *of_queries; i++) {
        *of_queries[i] = take(&at, n + 16);
    }
    assert(at - a->scratch <= HSRI_UNITS_SCRATCH);
    return w;
}

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

/* Lane i: the sum (largest) of the lanes of v[i]. All four go the same way. */
#define ACROSS_WHOLE(name, op) \
    INLINE __m128i name(const __m512i v[FOUR]) \
    { \
        __m512i a = _mm512_##op(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1])); \
        __m512i b = _mm512_##op(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3])); \
        __m512i c = _mm512_##op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)); \
        __m256i e = _mm256_##op(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1)); \
        return _mm_##op(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1)); \
    }
ACROSS_WHOLE(whole_sums_of, add_epi32)
ACROSS_WHOLE(whole_largest_of, max_epi32)

INLINE __m128 sums_of(const __m512 v[FOUR])
{
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    __m512 e = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    __m256 f = _mm256_add_ps(_mm512_castps512_ps256(e), _mm512_extractf32x8_ps(e, 1));
    return _mm_add_ps(_mm256_castps256_ps128(f), _mm256_extractf128_ps(f, 1));
}

/* 2^t, right to 3e-6. */
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

/* Strip s of a page's scale bytes. */
INLINE __m128i scale_bytes(const strips *x, const uint8_t *slot, uint32_t s)
{
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128i bytes = _mm_loadu_si128((const __m128i *)(hsri_key_scales(slot) + strip_start(x, s)));
    return s < x->n_half ? bytes : _mm_shuffle_epi8(bytes, order);
}

/* A byte of a key is 128 and (2 code - middle) times its component's ratio, over 256, where `middle` is twice the middle of its codes. The
 * largest ratios are such that the largest codes come to 127 of 6 bits, to 64 of 4 and to 32 of 2: the fewer bits, the less a byte's step
 * matters beside the code's, and the more it helps if the query's bytes are larger. */
#define MOST_RATIO_6 516.0f
#define MOST_RATIO_4 1092.0f
#define MOST_RATIO_2 2730.0f
#define BYTE_BASE 0x8080   /* 128, and what rounds */

INLINE __m512 most_ratio(const strips *x, uint32_t s)
{
    if (s >= x->n_half) {
        return _mm512_set1_ps(MOST_RATIO_2);
    }
    uint32_t n6 = hsri_n6(x->d) > 16 * s ? hsri_n6(x->d) - 16 * s : 0;
    return _mm512_mask_mov_ps(_mm512_set1_ps(MOST_RATIO_4), lanes(n6), _mm512_set1_ps(MOST_RATIO_6));
}

/* Steps of the call, by the largest key scales of its pages. A page whose unit is NaN shows that in its scores. */
INLINE void find_steps(const work *w, const strips *x)
{
    const hsri_units_args *a = w->a;
    float *largest = w->steps;
    for (uint32_t s = 0; s < x->n; s++) {
        _mm512_store_ps(largest + 16 * s, _mm512_set1_ps(0x1p-100f));
    }
    for (uint32_t i = 0; i < a->n_units; i++) {
        if (i > 0 && a->slots[i] == a->slots[i - 1]) {
            continue;
        }
        hsri_page_header h;
        memcpy(&h, a->slots[i], sizeof h);
        UNROLL
        for (uint32_t s = 0; s < x->n; s++) {
            __m512 scale = _mm512_mul_ps(_mm512_set1_ps(h.k_unit), scales_of(scale_bytes(x, a->slots[i], s)));
            _mm512_store_ps(largest + 16 * s, _mm512_max_ps(scale, _mm512_load_ps(largest + 16 * s)));
        }
    }
    for (uint32_t s = 0; s < x->n; s++) {
        __m512 to_ratio = _mm512_div_ps(most_ratio(x, s), _mm512_load_ps(largest + 16 * s));
        _mm512_store_ps(w->to_ratio + 16 * s, to_ratio);
        _mm512_store_ps(w->steps + 16 * s, _mm512_div_ps(_mm512_set1_ps(128.0f), to_ratio));
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

/* Strip s of a rotated query in the order of codes, times what a byte of a key stands for. */
INLINE __m512 scaled_strip(const work *w, const strips *x, uint32_t query, uint32_t s)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 v = _mm512_maskz_loadu_ps(lanes(strip_lanes(x, s)), w->a->rotated[query] + strip_start(x, s));
    v = s < x->n_half ? v : _mm512_permutexvar_ps(order, v);
    return _mm512_mul_ps(v, _mm512_load_ps(w->steps + 16 * s));
}

/* A query's bytes, and how products with them become scores. */
INLINE void quantize_rotated(const work *w, const strips *x, uint32_t query)
{
    const __m512i ones = _mm512_set1_epi8(1);
    __m512 largest = _mm512_setzero_ps();
    UNROLL
    for (uint32_t s = 0; s < x->n; s++) {
        largest = _mm512_range_ps(largest, scaled_strip(w, x, query, s), 11);   /* the larger of absolute values */
    }
    /* zeros have zeros for bytes */
    float top = fmaxf(0x1p-100f, _mm512_reduce_max_ps(largest));
    __m512i sum = _mm512_setzero_si512();
    UNROLL
    for (uint32_t p = 0; p < x->n_packs; p++) {
        __m512i v[4];
        UNROLL
        for (uint32_t s = 4 * p; s < 4 * p + 4; s++) {
            v[s % 4] = _mm512_setzero_si512();
            if (s < x->n) {
                v[s % 4] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled_strip(w, x, query, s), _mm512_set1_ps(127.0f / top)));
            }
        }
        __m512i bytes = pack_signed(v);
        _mm512_store_si512(w->bytes + ((uint64_t)query * x->n_packs + p) * 64, bytes);
        sum = dot_bytes(sum, ones, bytes);
    }
    w->factor[query] = w->slope * (top * (1.0f / 127));
    w->base[query] = -128.0f * w->factor[query] * (float)_mm512_reduce_add_epi32(sum);
}

/* The plain query as whole numbers of 15 bits, in two planes of bytes, and its product with what means are about. */
INLINE void quantize_plain(const work *w, const strips *x, uint32_t query)
{
    const float *q = w->a->queries[query], *about = w->a->calibration.mean_k;
    uint8_t *planes = w->planes + (uint64_t)query * n_means(x) * 128;
    __m512 largest = _mm512_setzero_ps(), sum = largest;
    UNROLL
    for (uint32_t j = 0; j < x->d; j += 16) {
        __m512 v = _mm512_loadu_ps(q + j);
        largest = _mm512_range_ps(largest, v, 11);
        sum = _mm512_fmadd_ps(v, _mm512_loadu_ps(about + j), sum);
    }
    float top = fmaxf(0x1p-100f, _mm512_reduce_max_ps(largest));
    __m512i total = _mm512_setzero_si512();
    memset(planes, 0, n_means(x) * 128);
    UNROLL
    for (uint32_t j = 0; j < x->d; j += 16) {
        __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(q + j), _mm512_set1_ps(127.0f * 128 / top)));
        __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(64)), 7);
        __m512i low = _mm512_sub_epi32(v, _mm512_slli_epi32(high, 7));
        _mm_store_si128((__m128i *)(planes + j), _mm512_cvtsepi32_epi8(high));
        _mm_store_si128((__m128i *)(planes + n_means(x) * 64 + j), _mm512_cvtsepi32_epi8(low));
        total = _mm512_add_epi32(total, v);
    }
    w->about[query] = w->slope * _mm512_reduce_add_ps(sum);
    w->mean_step[query] = w->slope * (top * (1.0f / (127 * 128)));
    w->mean_base[query] = (int32_t)(-128u * (uint32_t)_mm512_reduce_add_epi32(total));
    w->base[query] += 0 * w->about[query];   /* a NaN shows */
}

INLINE void start_queries(const work *w, const strips *x)
{
    find_steps(w, x);
    for (uint32_t i = 0; i < w->a->n_queries; i++) {
        quantize_rotated(w, x, i);
        quantize_plain(w, x, i);
        w->top[i] = -INFINITY;
        w->sum[i] = 0;
    }
    memset(w->outputs, 0, (size_t)w->a->n_queries * x->d * sizeof *w->outputs);
}

INLINE void finish_queries(const work *w, const strips *x)
{
    for (uint32_t i = 0; i < w->a->n_queries; i++) {
        w->a->partials[i][0] = (w->top[i] + w->about[i]) * 0x1.62e430p-1f;
        w->a->partials[i][1] = w->sum[i];
        for (uint32_t j = 0; j < x->d; j += 16) {
            _mm512_storeu_ps(w->a->partials[i] + 2 + j, _mm512_load_ps(w->outputs + (uint64_t)i * x->d + j));
        }
    }
}

/* ---- a page ---- */

/* (v * x + y) / 256 of bytes v, for even and odd ones; x and y are words of even ones, then of odd ones. */
INLINE __m512i scaled_bytes(__m512i v, const uint32_t *x, const uint32_t *y)
{
    __m512i even = _mm512_and_si512(v, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(v, 8);
    even = _mm512_add_epi16(_mm512_mullo_epi16(even, _mm512_set1_epi32((int)x[0])), _mm512_set1_epi32((int)y[0]));
    odd = _mm512_add_epi16(_mm512_mullo_epi16(odd, _mm512_set1_epi32((int)x[1])), _mm512_set1_epi32((int)y[1]));
    return _mm512_ternarylogic_epi32(_mm512_srli_epi16(even, 8), odd, _mm512_set1_epi16((short)0xff00), 0xd8);   /* odd where masked */
}

/* Ratios of strip s of a page. */
INLINE __m512i ratios_of(const work *w, const strips *x, const uint8_t *slot, __m512 unit, uint32_t s)
{
    __m512 scale = _mm512_mul_ps(unit, scales_of(scale_bytes(x, slot, s)));
    return _mm512_cvtps_epi32(_mm512_mul_ps(scale, _mm512_load_ps(w->to_ratio + 16 * s)));
}

/* How bytes are made of a page's key codes. */
INLINE void read_key_scales(const work *w, const strips *x, const uint8_t *slot)
{
    const __m512i base = _mm512_set1_epi16((short)BYTE_BASE);
    const __m512i of_lane = _mm512_set_epi64(0x0706070607060706, 0x0706070607060706, 0x0504050405040504, 0x0504050405040504,
                                             0x0302030203020302, 0x0302030203020302, 0x0100010001000100, 0x0100010001000100);
    const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi16(-15, -13, -11, -9, -7, -5, -3, -1));
    const __m512i second = _mm512_broadcast_i32x4(_mm_setr_epi16(1, 3, 5, 7, 9, 11, 13, 15));
    const uint32_t n6 = hsri_n6(x->d);
    hsri_page_header h;
    memcpy(&h, slot, sizeof h);
    const __m512 unit = _mm512_set1_ps(h.k_unit);
    UNROLL
    for (uint32_t s = 0; s < x->n_half; s++) {
        __m512i ratio = ratios_of(w, x, slot, unit, s);
        _mm256_store_si256((__m256i *)(w->ratios + 16 * s), _mm512_cvtepi32_epi16(ratio));
        if (16 * s < n6) {
            /* of components 0 to 3 of each four, words 0 and 2, then 1 and 3 */
            __mmask16 six = lanes(n6 - 16 * s);
            __m512i middle = _mm512_mask_mov_epi32(_mm512_set1_epi32(15), six, _mm512_set1_epi32(63));
            __m512i less = _mm512_mullo_epi32(ratio, middle);
            __m512i times = _mm512_or_si512(ratio, _mm512_slli_epi32(_mm512_shuffle_epi32(ratio, 0x0e), 16));
            less = _mm512_mask_blend_epi16(0xaaaaaaaau, less, _mm512_slli_epi32(_mm512_shuffle_epi32(less, 0x0e), 16));
            _mm512_store_si512(w->times + 16 * s, _mm512_add_epi16(times, times));
            _mm512_store_si512(w->plus + 16 * s, _mm512_sub_epi16(base, less));
        }
    }
    UNROLL
    for (uint32_t c = (n6 + 3) / 4 * 4; c < x->half; c += 4) {
        int64_t four;
        memcpy(&four, w->ratios + c, sizeof four);
        __m512i ratio = _mm512_shuffle_epi8(_mm512_set1_epi64(four), of_lane);
        __m512i low = _mm512_add_epi16(_mm512_mullo_epi16(ratio, first), base);
        __m512i high = _mm512_add_epi16(_mm512_mullo_epi16(ratio, second), base);
        _mm512_store_si512(w->of_four + 16 * c, _mm512_packus_epi16(_mm512_srli_epi16(low, 8), _mm512_srli_epi16(high, 8)));
    }
    UNROLL
    for (uint32_t s = x->n_half; s < x->n; s++) {
        __m512i ratio = ratios_of(w, x, slot, unit, s);
        ratio = _mm512_or_si512(ratio, _mm512_slli_epi32(ratio, 16));
        __m512i even = _mm512_add_epi16(_mm512_mullo_epi16(ratio, _mm512_set1_epi32(0x0001fffd)), base);   /* times -3 and 1 */
        __m512i odd = _mm512_add_epi16(_mm512_mullo_epi16(ratio, _mm512_set1_epi32(0x0003ffff)), base);    /* times -1 and 3 */
        even = _mm512_srli_epi16(even, 8);
        even = _mm512_ternarylogic_epi32(even, odd, _mm512_set1_epi16((short)0xff00), 0xd8);
        _mm512_store_si512(w->of_two + 64 * (s - x->n_half), even);
    }
}

/* What a page's mean key adds to the scores of n queries from `first` on, and what is the same for all its tokens. */
INLINE void start_scores(uint32_t n, const work *w, const strips *x, const uint8_t *slot, uint32_t first, float *start)
{
    const __m512i sign = _mm512_set1_epi8(-128);
    const uint8_t *means = hsri_key_means(slot, x->d);
    hsri_page_header h;
    memcpy(&h, slot, sizeof h);
    __m512i sums[FOUR];
    UNROLL
    for (uint32_t i = 0; i < FOUR; i++) {
        if (i >= n) {
            sums[i] = sums[n - 1];
            continue;
        }
        const uint8_t *planes = w->planes + (uint64_t)(first + i) * n_means(x) * 128;
        __m512i high = _mm512_setzero_si512(), low = high;
        UNROLL
        for (uint32_t p = 0; p < n_means(x); p++) {
            __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(means + 64 * p), sign);
            high = dot_bytes(high, codes, _mm512_load_si512(planes + 64 * p));
            low = dot_bytes(low, codes, _mm512_load_si512(planes + 64 * (n_means(x) + p)));
        }
        sums[i] = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    }
    __m128i sum = _mm_add_epi32(whole_sums_of(sums), _mm_loadu_si128((const __m128i *)(w->mean_base + first)));
    __m128 base = _mm_fmadd_ps(_mm_set1_ps(h.k_unit), _mm_setzero_ps(), _mm_load_ps(w->base + first));   /* a NaN shows */
    __m128 step = _mm_mul_ps(_mm_set1_ps(h.k_scale), _mm_load_ps(w->mean_step + first));
    _mm_store_ps(start + first, _mm_fmadd_ps(_mm_cvtepi32_ps(sum), step, base));
}

/* Makes ready for the scores of a page. */
INLINE void open_page(const work *w, const strips *x, const uint8_t *slot, uint32_t n_queries, float *start)
{
    read_key_scales(w, x, slot);
    uint32_t q = 0;
    for (; n_queries - q >= FOUR; q += FOUR) {
        start_scores(FOUR, w, x, slot, q, start);
    }
    switch (n_queries - q) {
    case 3: start_scores(3, w, x, slot, q, start); break;
    case 2: start_scores(2, w, x, slot, q, start); break;
    case 1: start_scores(1, w, x, slot, q, start); break;
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

/* Codes that are looked up have the number of their component, of four, above their own bits. */
#define NUMBERED(v, bits, numbers) _mm512_ternarylogic_epi32(v, _mm512_set1_epi8(bits), _mm512_set1_epi32(numbers), 0xea)

/* Calls f(dword, bytes, ...) for the keys of each four components of a unit; `dword` says which bytes of a query belong to them. */
#define FOR_KEYS(w, x, slot, unit, f, ...) \
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
                __m512i codes_; \
                if (c_ < n6_) { \
                    codes_ = six_bits(dwords_, i_, lows_ + 4 * c_); \
                    if (c_ + 4 > n6_) { \
                        __mmask64 some_ = 0x1111111111111111u * ((1u << (n6_ - c_)) - 1); \
                        codes_ = _mm512_mask_mov_epi8(four_bits(dwords_, i_), some_, codes_); \
                    } \
                    codes_ = scaled_bytes(codes_, (w)->times + c_, (w)->plus + c_); \
                } else { \
                    codes_ = NUMBERED(i_ ? _mm512_srli_epi16(dwords_, 4) : dwords_, 15, 0x30201000); \
                    codes_ = _mm512_permutexvar_epi8(codes_, _mm512_load_si512((w)->of_four + 16 * c_)); \
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
                __m512i codes_ = NUMBERED(_mm512_srli_epi16(both_, 2 * i_), 3, 0x0c080400); \
                const uint8_t *table_ = (w)->of_two + 64 * (s_ - (x)->n_half) + 16 * i_; \
                codes_ = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)table_)), codes_); \
                f(quarter(s_, i_), codes_, __VA_ARGS__); \
            } \
        } \
    } while (0)

/* ---- softmax ---- */

/* Rows of products with a page's keys on their way to weights, from some query on. */
typedef struct score_rows_at {
    const int32_t *scores;
    const float *start;
    uint8_t *weights;
    uint32_t query;
    terms *terms;
    uint32_t term;   /* of the first row */
} score_rows_at;

/* Weights of n queries, of the page's n_units units: bytes, their sums, and what they make of the output so far. */
INLINE void softmax(uint32_t n, uint32_t n_units, const work *w, const score_rows_at *rows)
{
    const __m512i ones = _mm512_set1_epi8(1);
    const __mmask8 present = (__mmask8)((1u << n) - 1);
    const uint32_t first = rows->query;
    __m512i largest[FOUR], whole[FOUR];
    __m512 sums[FOUR];
    float from[FOUR];
    UNROLL
    for (uint32_t i = 0; i < FOUR; i++) {
        const int32_t *scores = rows->scores + (i < n ? i : n - 1) * HSRI_PAGE_TOKENS;
        largest[i] = _mm512_load_si512(scores);
        UNROLL
        for (uint32_t u = 1; u < n_units; u++) {
            largest[i] = _mm512_max_epi32(largest[i], _mm512_load_si512(scores + 16 * u));
        }
    }
    __m128 most = _mm_cvtepi32_ps(whole_largest_of(largest)), factor = _mm_loadu_ps(w->factor + first);
    __m128 here = _mm_fmadd_ps(most, factor, _mm_loadu_ps(rows->start)), before = _mm_loadu_ps(w->top + first);
    __m128 top = _mm_max_ps(here, before);   /* a NaN is never the largest */
    _mm_storeu_ps(from, _mm_fnmadd_ps(most, factor, _mm_set1_ps(0x1.ffa37cp+2f)));   /* log2(255) */
    UNROLL
    for (uint32_t i = 0; i < FOUR; i++) {
        if (i >= n) {
            sums[i] = sums[n - 1];
            whole[i] = whole[n - 1];
            continue;
        }
        const __m512 slope = _mm512_set1_ps(w->factor[first + i]), shift = _mm512_set1_ps(from[i]);
        __m512i v[HSRI_PAGE_UNITS];
        UNROLL
        for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++) {
            v[u] = _mm512_setzero_si512();
            if (u < n_units) {
                __m512 product = _mm512_cvtepi32_ps(_mm512_load_si512(rows->scores + i * HSRI_PAGE_TOKENS + 16 * u));
                __m512 p = exp2_near(_mm512_fmadd_ps(product, slope, shift));
                sums[i] = u == 0 ? p : _mm512_add_ps(sums[i], p);
                v[u] = _mm512_cvtps_epi32(p);
            }
        }
        __m512i bytes = pack_unsigned(v);
        _mm512_store_si512(rows->weights + i * HSRI_PAGE_TOKENS, bytes);
        whole[i] = dot_bytes(_mm512_setzero_si512(), bytes, ones);
    }
    __m128 keep = exp2_four(_mm_sub_ps(before, top)), weight = exp2_four(_mm_sub_ps(here, top));
    weight = _mm_mul_ps(weight, _mm_set1_ps(1.0f / 255));
    __m128 mean_weight = _mm_mul_ps(weight, sums_of(sums));
    __m128 middle = _mm_mul_ps(_mm_mul_ps(weight, _mm_set1_ps(-7.5f)), _mm_cvtepi32_ps(whole_sums_of(whole)));
    _mm_mask_storeu_ps(w->top + first, present, top);
    _mm_mask_storeu_ps(w->sum + first, present, _mm_fmadd_ps(_mm_loadu_ps(w->sum + first), keep, mean_weight));
    _mm_storeu_ps(rows->terms->keep + rows->term, keep);
    _mm_storeu_ps(rows->terms->weight + rows->term, weight);
    _mm_storeu_ps(rows->terms->mean_weight + rows->term, mean_weight);
    _mm_storeu_ps(rows->terms->middle + rows->term, middle);
}

INLINE void softmax_units(uint32_t n, uint32_t n_units, const work *w, const score_rows_at *rows)
{
    switch (n_units) {
    case 4: softmax(n, 4, w, rows); break;
    case 3: softmax(n, 3, w, rows); break;
    case 2: softmax(n, 2, w, rows); break;
    case 1: softmax(n, 1, w, rows); break;
    }
}

/* ---- output ---- */

INLINE void read_value_scales(const work *w, const strips *x, const uint8_t *slot)
{
    const float *about = w->a->calibration.mean_v;
    hsri_page_header h;
    memcpy(&h, slot, sizeof h);
    UNROLL
    for (uint32_t j = 0; j < x->d; j += 16) {
        __m512 scale = scales_of(_mm_loadu_si128((const __m128i *)(hsri_value_scales(slot, x->d) + j)));
        __m128i codes = _mm_loadu_si128((const __m128i *)(hsri_value_means(slot, x->d) + j));
        __m512 mean = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
        _mm512_store_ps(w->scale + j, _mm512_mul_ps(_mm512_set1_ps(h.v_unit), scale));
        _mm512_store_ps(w->mean + j, _mm512_fmadd_ps(_mm512_set1_ps(h.v_scale), mean, _mm512_loadu_ps(about + j)));
    }
}

/* Components j to j + 15 of an output: what it was, the mean of the page, and its products; term i is the query's. */
INLINE void fold(float *o, const terms *t, uint32_t i, __m512 scale, __m512 mean, __m512i product)
{
    __m512 v = _mm512_mul_ps(_mm512_load_ps(o), _mm512_set1_ps(t->keep[i]));
    v = _mm512_fmadd_ps(mean, _mm512_set1_ps(t->mean_weight[i]), v);
    __m512 codes = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), _mm512_set1_ps(t->weight[i]), _mm512_set1_ps(t->middle[i]));
    _mm512_store_ps(o, _mm512_fmadd_ps(scale, codes, v));
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

INLINE void score_rows(uint32_t rows, const work *w, const strips *x, const page_run *run, const uint8_t *next)
{
    for (uint32_t u = 0; u < run->n; u++) {
        __m512i sums[MOST_ROWS];
        if (next) {
            fetch_part(next, u, 8 * x->d);
        }
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            sums[r] = _mm512_setzero_si512();
        }
        FOR_KEYS(w, x, run->slot, run->units[u], ADD_KEYS, rows, w->bytes, x->n_packs * 64, sums);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            _mm512_store_si512(w->scores + r * HSRI_PAGE_TOKENS + 16 * u, sums[r]);
        }
    }
}

INLINE void value_strips(uint32_t rows, uint32_t n, const work *w, const strips *x, const page_run *run, const uint8_t *next,
                         uint32_t j)
{
    __m512i sums[MOST_ROWS][4];
    const uint8_t *weights = w->weights;
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
    __m512 scale[4], mean[4];
    UNROLL
    for (uint32_t s = 0; s < n; s++) {
        scale[s] = _mm512_load_ps(w->scale + j + 16 * s);
        mean[s] = _mm512_load_ps(w->mean + j + 16 * s);
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < n; s++) {
            fold(w->outputs + r * x->d + j + 16 * s, w->terms, r, scale[s], mean[s], sums[r][s]);
        }
    }
}

/* What the next page's scores need is made while this page's are still on their way to weights: one chain of instructions alone would
 * leave the core waiting. */
INLINE void attend_rows(uint32_t rows, const work *w, const strips *x)
{
    const hsri_units_args *a = w->a;
    page_run run;
    open_page(w, x, a->slots[0], rows, w->start[0]);
    for (uint32_t i = 0, page = 0; i < a->n_units; i += run.n, page++) {
        run = run_at(a, i);
        const uint8_t *next = i + run.n < a->n_units ? a->slots[i + run.n] : NULL;
        const float *starts = w->start[page % 3];
        score_rows(rows, w, x, &run, next);
        if (next) {
            open_page(w, x, next, rows, w->start[(page + 1) % 3]);
        }
        read_value_scales(w, x, run.slot);
        softmax_units(rows < FOUR ? rows : FOUR, run.n, w, &(score_rows_at) { w->scores, starts, w->weights, 0, w->terms, 0 });
        if (rows > FOUR) {
            score_rows_at others = { w->scores + FOUR * HSRI_PAGE_TOKENS, starts + FOUR, w->weights + FOUR * HSRI_PAGE_TOKENS, FOUR,
                                     w->terms, FOUR };
            softmax_units(rows - FOUR, run.n, w, &others);
        }
        uint32_t j = 0;
        for (; rows <= 6 && j + 64 <= x->d; j += 64) {
            value_strips(rows, 4, w, x, &run, j ? NULL : next, j);
        }
        for (; j + 32 <= x->d; j += 32) {
            value_strips(rows, 2, w, x, &run, j ? NULL : next, j);
        }
        for (; j < x->d; j += 16) {
            value_strips(rows, 1, w, x, &run, j ? NULL : next, j);
        }
    }
}
