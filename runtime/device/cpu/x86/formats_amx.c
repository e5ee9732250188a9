/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: attention over int8 pages in tiles. Codes are whole numbers that bf16 holds exactly; queries, scaled by the page's key scales, and
 * softmax weights are rounded to bf16, as for bf16 pages. Means stay in float: the page's mean key is what sums of scores start from, its
 * mean value is added once for all its tokens.
 *
 * A page's codes become tiles: of 16 pairs of components x 16 tokens for keys, of 16 pairs of tokens x 16 components for values. A row's
 * sums do not depend on the other rows of its tile. Tiles are set up and released inside each call. */
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"
#include "device/cpu/x86/lanes512.h"
#include "device/cpu/x86/tiles.h"
#include "device/formats.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* ---- tiles ---- */

/* Sums are tiles 0 to 3 and inputs tile 4; codes are tiles 5 and 6. */
#define INPUT_TILES 5u

/* sums[i] += inputs * codes + step i, for the first n of four */
#define MULTIPLY_FOUR(n, codes, step) \
    do { \
        TILE_LOAD(5, codes, 64); \
        TILE_MULTIPLY(0, 4, 5); \
        if ((n) > 1) { \
            TILE_LOAD(6, (codes) + (step), 64); \
            TILE_MULTIPLY(1, 4, 6); \
        } \
        if ((n) > 2) { \
            TILE_LOAD(5, (codes) + 2 * (step), 64); \
            TILE_MULTIPLY(2, 4, 5); \
        } \
        if ((n) > 3) { \
            TILE_LOAD(6, (codes) + 3 * (step), 64); \
            TILE_MULTIPLY(3, 4, 6); \
        } \
    } while (0)

#define STORE_FOUR(n, at, step) \
    do { \
        TILE_STORE(0, at, 64); \
        if ((n) > 1) { \
            TILE_STORE(1, (at) + (step), 64); \
        } \
        if ((n) > 2) { \
            TILE_STORE(2, (at) + 2 * (step), 64); \
        } \
        if ((n) > 3) { \
            TILE_STORE(3, (at) + 3 * (step), 64); \
        } \
    } while (0)

static inline __m512 from_bf16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

/* ---- a call ---- */

/* Units of one page that are attended together. */
typedef struct page_run {
    const uint8_t *slot, *units;
    uint32_t first, n;
} page_run;

/* One page in the form that tiles take. A tile load waits for the stores that made its rows, so a page is prepared while the one
 * before it is multiplied. */
typedef struct prepared {
    page_run run;
    uint8_t *codes;                    /* tiles */
    float   *scale, *mean;
    uint16_t *scaled;                  /* keys: [queries][n_steps * 32], queries times key scales */
    float   *start;                    /* keys: [queries][16], what the mean key adds to all scores */
} prepared;

/* Queries go in tiles of `rows`; the last tile may overlap the one before, with the same results. */
typedef struct work {
    const hsri_units_args *a;
    uint32_t rows, n_tiles, n_steps;   /* n_steps: 32 components each */
    size_t   unit_stride;              /* floats between the scores of units */
    float   *scores;                   /* [units]: [queries][16 tokens] */
    float   *weights;                  /* [pairs of units of a run]: bf16 [queries][32 tokens], as far apart as scores */
    float   *sums;                     /* [runs][queries]: of weights */
    prepared pages[2];
} work;

static uint32_t query0(const work *w, uint32_t tile) { return (uint32_t)hsri_min((uint64_t)tile * w->rows, w->a->n_queries - w->rows); }

#define UNIT_STRIDE (HSRI_ATTEND_MAX_QUERIES * 16 + 16)
#define CODE_FLOATS(d) (4 * hsri_div_up(d, 32) * TILE_BYTES / 4)
#define PAGE_FLOATS(d) \
    (CODE_FLOATS(d) + 2 * hsri_round_up(d, 16) + HSRI_ATTEND_MAX_QUERIES * (hsri_round_up(d, 32) / 2 + 16))

static prepared prepared_at(float *at, uint32_t d)
{
    prepared p = { .codes = (uint8_t *)at, .scale = at + CODE_FLOATS(d) };
    p.mean = p.scale + hsri_round_up(d, 16);
    p.start = p.mean + hsri_round_up(d, 16);
    p.scaled = (uint16_t *)(p.start + HSRI_ATTEND_MAX_QUERIES * 16);
    return p;
}

static work work_of(const hsri_units_args *a)
{
    uint32_t n_tiles = (uint32_t)hsri_div_up(a->n_queries, TILE_ROWS), d = a->head_dim;
    work w = { .a = a, .rows = (uint32_t)hsri_div_up(a->n_queries, n_tiles), .n_tiles = n_tiles, .n_steps = (uint32_t)hsri_div_up(d, 32),
               .unit_stride = a->n_queries * 16 + 16, .scores = a->scratch };
    float *pages = w.scores + (2 * UNIT_STRIDE + HSRI_ATTEND_MAX_QUERIES) * HSRI_UNITS_MAX;
    w.weights = w.scores + HSRI_UNITS_MAX * UNIT_STRIDE;
    w.sums = w.weights + HSRI_UNITS_MAX * UNIT_STRIDE;
    w.pages[0] = prepared_at(pages, d);
    w.pages[1] = prepared_at(pages + PAGE_FLOATS(d), d);
    assert((2 * UNIT_STRIDE + HSRI_ATTEND_MAX_QUERIES) * HSRI_UNITS_MAX + 2 * PAGE_FLOATS(d) <= HSRI_UNITS_SCRATCH);
    return w;
}

static page_run run_at(const hsri_units_args *a, uint32_t first)
{
    uint32_t n = 1;
    while (first + n < a->n_units && a->slots[first + n] == a->slots[first] && n < HSRI_PAGE_UNITS) {
        n++;
    }
    return (page_run) { a->slots[first], a->units + first, first, n };
}

static void fetch(const uint8_t *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64) {
        _mm_prefetch((const char *)at + i, _MM_HINT_T0);
    }
}

/* What the next run will read: pages are too short for the hardware to find out in time. */
static void fetch_run(const hsri_units_args *a, uint32_t first, bool values)
{
    const uint32_t d = a->head_dim;
    if (first >= a->n_units) {
        return;
    }
    page_run run = run_at(a, first);
    fetch(run.slot, HSRI_PAGE_HEADER_BYTES + 16 * d);
    if (!values) {
        fetch(hsri_int8_keys(run.slot, d), HSRI_PAGE_TOKENS * d);
        return;
    }
    for (uint32_t u = 0; u < run.n; u++) {
        fetch(hsri_int8_values(run.slot, d) + run.units[u] * HSRI_UNIT_TOKENS * d, HSRI_UNIT_TOKENS * d);
    }
}

/* ---- codes as bf16 ---- */

/* Where a row of components (2 pair, 2 pair + 1) is in the tiles of a unit. */
INLINE uint8_t *key_row(uint8_t *tiles, uint32_t pair) { return tiles + pair / 16 * (4 * TILE_BYTES) + pair % 16 * 64; }

/* Bytes of two rows side by side as bf16 */
INLINE __m512i int8_row(__m128i even, __m128i odd)
{
    __m512i c0 = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(even)));
    __m512i c1 = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(odd)));
    return _mm512_or_si512(_mm512_srli_epi32(c0, 16), c1);   /* the low halves are zeros */
}

static void unpack_keys(const uint8_t *slot, uint32_t d, uint32_t unit, uint8_t *tiles)
{
    const uint8_t *keys = hsri_int8_keys(slot, d) + unit * HSRI_UNIT_TOKENS;
    for (uint32_t j = 0; j < d; j += 2) {
        const uint8_t *at = keys + j * HSRI_PAGE_TOKENS;
        __m128i odd = j + 1 < d ? _mm_loadu_si128((const __m128i *)(at + HSRI_PAGE_TOKENS)) : _mm_setzero_si128();
        _mm512_store_si512(key_row(tiles, j / 2), int8_row(_mm_loadu_si128((const __m128i *)at), odd));
    }
}

static void unpack_values(const uint8_t *slot, uint32_t d, uint32_t unit, uint8_t *tiles)
{
    const uint8_t *values = hsri_int8_values(slot, d) + unit * HSRI_UNIT_TOKENS * d;
    for (uint32_t t = 0; t < HSRI_UNIT_TOKENS; t += 2) {
        for (uint32_t j = 0; j < d; j += 16) {
            __m128i even = _mm_maskz_loadu_epi8(lanes(d - j), values + t * d + j);
            __m128i odd = _mm_maskz_loadu_epi8(lanes(d - j), values + (t + 1) * d + j);
            _mm512_store_si512(tiles + j / 16 * TILE_BYTES + t / 2 * 64, int8_row(even, odd));
        }
    }
}

/* ---- scales and means ---- */

static void read_scales(const work *w, const prepared *p, bool values)
{
    const uint32_t d = w->a->head_dim;
    const uint8_t *mean = hsri_int8_array(p->run.slot, d, values ? HSRI_INT8_V_MEAN : HSRI_INT8_K_MEAN);
    const uint8_t *scale = hsri_int8_array(p->run.slot, d, values ? HSRI_INT8_V_SCALE : HSRI_INT8_K_SCALE);
    for (uint32_t j = 0; j < d; j += 16) {
        _mm512_storeu_ps(p->mean + j, _mm512_maskz_loadu_ps(lanes(d - j), mean + 4 * j));
        _mm512_storeu_ps(p->scale + j, _mm512_maskz_loadu_ps(lanes(d - j), scale + 4 * j));
    }
}

/* ---- scores ---- */

static void scale_query(const work *w, const prepared *p, uint32_t query)
{
    const uint32_t d = w->a->head_dim, stride = w->n_steps * 32;
    const float *q = w->a->queries[query];
    __m512 sum = _mm512_setzero_ps();
    for (uint32_t j = 0; j < stride; j += 16) {
        __mmask16 m = j < d ? lanes(d - j) : 0;
        __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, q + j), _mm512_maskz_loadu_ps(m, p->scale + j));
        _mm256_storeu_si256((__m256i *)(p->scaled + query * stride + j), (__m256i)_mm512_cvtneps_pbh(scaled));
        sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m, q + j), _mm512_maskz_loadu_ps(m, p->mean + j), sum);
    }
    _mm512_store_ps(p->start + query * 16, _mm512_set1_ps(_mm512_reduce_add_ps(sum)));
}

static void prepare_keys(const work *w, prepared *p, uint32_t first)
{
    p->run = run_at(w->a, first);
    fetch_run(w->a, first + p->run.n, false);
    read_scales(w, p, false);
    for (uint32_t i = 0; i < w->a->n_queries; i++) {
        scale_query(w, p, i);
    }
    for (uint32_t u = 0; u < p->run.n; u++) {
        unpack_keys(p->run.slot, w->a->head_dim, p->run.units[u], p->codes + u * TILE_BYTES);
    }
}

static void score_page(const work *w, const prepared *p)
{
    const uint32_t n = p->run.n;
    for (uint32_t tile = 0; tile < w->n_tiles; tile++) {
        uint32_t first = query0(w, tile);
        float *scores = w->scores + p->run.first * w->unit_stride + first * 16;
        const float *start = p->start + first * 16;
        const uint16_t *scaled = p->scaled + first * w->n_steps * 32;
        TILE_LOAD(0, start, 64);
        TILE_LOAD(1, start, 64);
        TILE_LOAD(2, start, 64);
        TILE_LOAD(3, start, 64);
        for (uint32_t step = 0; step < w->n_steps; step++) {
            const uint8_t *codes = p->codes + (size_t)step * 4 * TILE_BYTES;
            TILE_LOAD(4, scaled + step * 32, w->n_steps * 64);
            MULTIPLY_FOUR(n, codes, TILE_BYTES);
        }
        STORE_FOUR(n, scores, w->unit_stride);
    }
}

/* ---- softmax ---- */

/* 2^t: 2^floor(t) times a polynomial of the fraction, right to 3e-6. NaN stays NaN. */
INLINE __m512 exp2_close(__m512 t)
{
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0x1.bb0b0ap-7f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.aa4a66p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ee718ap-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62d1c4p-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.00002ap+0f));
    return _mm512_scalef_ps(p, t);
}

/* Weights of one query, rounded to bf16, and their sums by run; gives max and the sum of all. A NaN score never becomes the maximum,
 * but its weight is NaN, and so are the sums. */
static void softmax(const work *w, uint32_t query, float *max, float *sum)
{
    const hsri_units_args *a = w->a;
    const float *scores = w->scores + query * 16;
    const __m512 scale = _mm512_set1_ps(a->scale), log2e = _mm512_set1_ps(0x1.715476p+0f);
    __m512 largest[2] = { _mm512_set1_ps(-INFINITY), _mm512_set1_ps(-INFINITY) };
    for (uint32_t u = 0; u < a->n_units; u++) {
        largest[u % 2] = _mm512_max_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + u * w->unit_stride), scale), largest[u % 2]);
    }
    *max = _mm512_reduce_max_ps(_mm512_max_ps(largest[0], largest[1]));
    *sum = 0;
    __m512 slope = _mm512_mul_ps(scale, log2e), top = _mm512_mul_ps(_mm512_set1_ps(*max), log2e);
    uint32_t step = 0, n_runs = 0;
    for (uint32_t u = 0; u < a->n_units; n_runs++) {
        page_run run = run_at(a, u);
        __m512 total = _mm512_setzero_ps();
        for (uint32_t i = 0; i < hsri_round_up(run.n, 2); i++) {
            uint16_t *weights = (uint16_t *)(w->weights + (step + i / 2) * w->unit_stride + query * 16) + i % 2 * 16;
            __m256i rounded = _mm256_setzero_si256();
            if (i < run.n) {
                __m512 score = _mm512_loadu_ps(scores + (u + i) * w->unit_stride);
                rounded = (__m256i)_mm512_cvtneps_pbh(exp2_close(_mm512_fmsub_ps(score, slope, top)));
                total = _mm512_add_ps(total, from_bf16(rounded));
            }
            _mm256_storeu_si256((__m256i *)weights, rounded);
        }
        w->sums[n_runs * HSRI_ATTEND_MAX_QUERIES + query] = _mm512_reduce_add_ps(total);
        *sum += w->sums[n_runs * HSRI_ATTEND_MAX_QUERIES + query];
        step += (run.n + 1) / 2;
        u += run.n;
    }
}

/* ---- output ---- */

/* A product of weights and values on its way to the output: added when the next one is under way. */
typedef struct product {
    const prepared *page;
    const float *sums, *values;        /* values: [strips] tiles */
    uint32_t first, from, j, strips;   /* queries [from, first + rows), since an overlapping tile has added some already */
} product;

/* o += scale * product + mean * (sum of weights) */
static void add_product(const work *w, const product *x)
{
    for (uint32_t r = x->from - x->first; r < w->rows; r++) {
        float *o = w->a->partials[x->first + r] + 2 + x->j;
        __m512 sum = _mm512_set1_ps(x->sums[x->first + r]);
        for (uint32_t s = 0; s < x->strips; s++) {
            __mmask16 m = lanes(w->a->head_dim - x->j - s * 16);
            __m512 v = _mm512_fmadd_ps(_mm512_loadu_ps(x->page->mean + x->j + s * 16), sum, _mm512_maskz_loadu_ps(m, o + s * 16));
            __m512 values = _mm512_load_ps(x->values + s * (TILE_BYTES / 4) + r * 16);
            v = _mm512_fmadd_ps(_mm512_loadu_ps(x->page->scale + x->j + s * 16), values, v);
            _mm512_mask_storeu_ps(o + s * 16, m, v);
        }
    }
}

static void prepare_values(const work *w, prepared *p, uint32_t first)
{
    const uint32_t d = w->a->head_dim, n_strips = (uint32_t)hsri_div_up(d, 16);
    const size_t step_bytes = (size_t)n_strips * TILE_BYTES;
    p->run = run_at(w->a, first);
    fetch_run(w->a, first + p->run.n, true);
    read_scales(w, p, true);
    for (uint32_t u = 0; u < p->run.n; u++) {
        unpack_values(p->run.slot, d, p->run.units[u], p->codes + u / 2 * step_bytes + u % 2 * (TILE_BYTES / 2));
    }
    for (uint32_t s = 0; p->run.n % 2 == 1 && s < n_strips; s++) {
        memset(p->codes + p->run.n / 2 * step_bytes + s * TILE_BYTES + TILE_BYTES / 2, 0, TILE_BYTES / 2);
    }
}

/* `step`: the run's first pair of units among all. */
static void value_page(const work *w, const prepared *p, uint32_t step, const float *sums)
{
    _Alignas(64) float values[2][4 * TILE_BYTES / 4];
    const uint32_t n_strips = (uint32_t)hsri_div_up(w->a->head_dim, 16), n_steps = (p->run.n + 1) / 2;
    const size_t step_bytes = (size_t)n_strips * TILE_BYTES;
    product pending[2];
    uint32_t n = 0;
    for (uint32_t tile = 0; tile < w->n_tiles; tile++) {
        uint32_t first = query0(w, tile);
        for (uint32_t s = 0; s < n_strips; s += 4, n++) {
            uint32_t strips = (uint32_t)hsri_min(4, n_strips - s);
            TILE_ZERO(0);
            TILE_ZERO(1);
            TILE_ZERO(2);
            TILE_ZERO(3);
            for (uint32_t i = 0; i < n_steps; i++) {
                const uint8_t *codes = p->codes + i * step_bytes + s * TILE_BYTES;
                TILE_LOAD(4, w->weights + (step + i) * w->unit_stride + first * 16, 64);
                MULTIPLY_FOUR(strips, codes, TILE_BYTES);
            }
            STORE_FOUR(strips, values[n % 2], TILE_BYTES / 4);
            pending[n % 2] = (product) { p, sums, values[n % 2], first, tile * w->rows, s * 16, strips };
            if (n > 0) {
                add_product(w, &pending[(n - 1) % 2]);
            }
        }
    }
    add_product(w, &pending[(n - 1) % 2]);
}

/* ---- calls ---- */

static void score_all(work *w)
{
    prepare_keys(w, &w->pages[0], 0);
    for (uint32_t i = 0, which = 0; i < w->a->n_units; which ^= 1) {
        i += w->pages[which].run.n;
        if (i < w->a->n_units) {
            prepare_keys(w, &w->pages[which ^ 1], i);
        }
        score_page(w, &w->pages[which]);
    }
}

static void value_all(work *w)
{
    uint32_t step = 0;
    const float *sums = w->sums;
    prepare_values(w, &w->pages[0], 0);
    for (uint32_t i = 0, which = 0; i < w->a->n_units; which ^= 1) {
        const prepared *p = &w->pages[which];
        i += p->run.n;
        if (i < w->a->n_units) {
            prepare_values(w, &w->pages[which ^ 1], i);
        }
        value_page(w, p, step, sums);
        step += (p->run.n + 1) / 2;
        sums += HSRI_ATTEND_MAX_QUERIES;
    }
}

/* n_units > 0 */
static void attend_int8(const hsri_units_args *a)
{
    work w = work_of(a);
    tiles_configure(INPUT_TILES, w.rows);
    /* components behind d: nothing else may be in their place */
    for (uint32_t pair = (a->head_dim + 1) / 2; pair < w.n_steps * 16; pair++) {
        for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++) {
            memset(key_row(w.pages[0].codes + u * TILE_BYTES, pair), 0, 64);
            memset(key_row(w.pages[1].codes + u * TILE_BYTES, pair), 0, 64);
        }
    }
    score_all(&w);
    for (uint32_t i = 0; i < a->n_queries; i++) {
        float *partial = a->partials[i];
        softmax(&w, i, &partial[0], &partial[1]);
        memset(partial + 2, 0, a->head_dim * sizeof *partial);
    }
    value_all(&w);
    tiles_release();
}

void hsri_page_kernels_fill_amx(hsri_page_kernels *k)
{
    k->attend[HSRI_KV_TYPE_INT8] = attend_int8;
    k->attend[HSRI_KV_TYPE_COMPACT] = hsri_attend_compact_amx;
    k->lay_out[HSRI_KV_TYPE_COMPACT] = hsri_lay_out_compact_amx;
}
