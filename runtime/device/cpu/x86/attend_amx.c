/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: attention over bf16 pages in tiles. Queries and softmax weights are rounded to bf16.
 *
 * A page holds keys as [d/2][64 tokens][2] and values as [32 token pairs][d][2]: 16 lines of either, 64 bytes wide, are a tile of weights.
 * So scores are queries times keys, 32 components at a time, and the output is softmax weights times values, 32 tokens at a time.
 *
 * Two tiles of queries go through a block of tokens from scores to output, so that scores and weights stay in the first-level cache, and
 * then through the next block. Blocks are steps of a pipeline: while tiles multiply the scores of one and the output of another, registers
 * make the weights of the one between, a row at a time, between products.
 *
 * A query's weights are about a reference of its own, which its scores alone decide, block by block; blocks begin at fixed tokens. So its
 * result does not depend on the other queries. Tiles are set up and released inside each call. */
#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"
#include "device/cpu/x86/lanes512.h"
#include "device/cpu/x86/tiles.h"
#include "device/cpu/x86/weights16.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* Sums are tiles 0 to 3 and inputs 4 and 5; keys and values 6 and 7. */
#define INPUT_TILES 6u
#define N_TILES (HSRI_ATTEND_MAX_QUERIES / TILE_ROWS)

#define BLOCK_TOKENS 128u
#define BLOCK_VECTORS (BLOCK_TOKENS / 16)
#define BLOCK_RUNS (BLOCK_TOKENS / HSRI_RUN)

#define QUERY_STRIDE(d) ((hsri_div_up(d, HSRI_RUN) | 1) * HSRI_RUN)
/* Strips of 16 components, in pairs. */
#define N_STRIPS(d) (2 * hsri_div_up(d, HSRI_RUN))

/* ---- a call ---- */

/* Queries go in tiles of `rows`: one tile, or an even number; the last tile may overlap the one before, with the same results. What is kept
 * of a query is kept by its place: places are the rows of all tiles. */
typedef struct work {
    const hsri_attend_args *a;
    uint32_t d, rows, n_tiles;
    uint32_t most;        /* tokens that any query sees */
    float    slope;       /* of scores, in steps of weights16.h */
    uint16_t *queries;    /* [queries][QUERY_STRIDE] */
    float    *scores[2];  /* of a step: [places of its tiles][BLOCK_TOKENS]; then weights, in the first half of each row */
    float    *outputs;    /* of the tiles that go together: [2][strips]: tiles; so few stay in the first-level cache */
    float    *sums;       /* [places][16]: of weights */
    float    *offsets;    /* [places]: the reference, as what scores are subtracted from for depths; infinite: none yet */
    float    *keep;       /* [places]: what the output so far is still to be multiplied with */
    uint32_t *raised;     /* [tiles]: whether some `keep` is not 1 */
    uint32_t *visible;    /* [places] */
} work;

static void *take(float **at, uint64_t n_floats)
{
    void *p = *at;
    *at += hsri_round_up(n_floats, 16);
    return p;
}

INLINE work work_of(const hsri_attend_args *a, uint32_t d)
{
    uint32_t n_tiles = a->n_queries <= TILE_ROWS ? 1 : 2 * (uint32_t)hsri_div_up(a->n_queries, 2 * TILE_ROWS);
    work w = { .a = a, .d = d, .rows = (uint32_t)hsri_div_up(a->n_queries, n_tiles), .n_tiles = n_tiles,
               .slope = a->scale * 0x1.715476p+0f * WEIGHT_STEPS };
    float *at = (float *)hsri_round_up((uintptr_t)a->scratch, 64);
    w.queries = take(&at, HSRI_ATTEND_MAX_QUERIES * QUERY_STRIDE(d) / 2);
    w.scores[0] = take(&at, 2 * TILE_ROWS * BLOCK_TOKENS);
    w.scores[1] = take(&at, 2 * TILE_ROWS * BLOCK_TOKENS);
    w.outputs = take(&at, 2 * N_STRIPS(d) * (TILE_BYTES / 4));
    w.sums = take(&at, HSRI_ATTEND_MAX_QUERIES * 16);
    w.offsets = take(&at, HSRI_ATTEND_MAX_QUERIES);
    w.keep = take(&at, HSRI_ATTEND_MAX_QUERIES);
    w.raised = take(&at, N_TILES);
    w.visible = take(&at, HSRI_ATTEND_MAX_QUERIES);
    return w;
}

_Static_assert(HSRI_ATTEND_MAX_QUERIES * (HSRI_ATTEND_MAX_HEAD_DIM + HSRI_RUN) / 2 + 4 * TILE_ROWS * BLOCK_TOKENS +
               2 * TILE_ROWS * HSRI_ATTEND_MAX_HEAD_DIM + HSRI_ATTEND_MAX_QUERIES * (16 + 3) + 32 <= HSRI_ATTEND_SCRATCH,
               "a call has its scratch");

INLINE uint32_t query0(const work *w, uint32_t tile)
{
    return (uint32_t)hsri_min((uint64_t)tile * w->rows, w->a->n_queries - w->rows);
}

INLINE float *output_at(const work *w, uint32_t tile, uint32_t strip)
{
    return w->outputs + ((uint64_t)tile % 2 * N_STRIPS(w->d) + strip) * (TILE_BYTES / 4);
}

/* Queries as bf16, with zeros behind the last component. */
INLINE void round_queries(const work *w)
{
    uint16_t *out = w->queries;
    for (uint32_t i = 0; i < w->a->n_queries; i++, out += QUERY_STRIDE(w->d)) {
        const float *q = w->a->queries[i];
        for (uint32_t j = 0; j < w->d; j += HSRI_RUN) {
            uint32_t left = w->d - j, rest = left > 16 ? left - 16 : 0;
            __m512 low = _mm512_maskz_loadu_ps(lanes(left), q + j);
            __m512 high = _mm512_maskz_loadu_ps(lanes(rest), q + (rest > 0 ? j + 16 : 0));
            _mm512_store_si512(out + j, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

static void start_places(work *w)
{
    memset(w->sums, 0, (size_t)w->n_tiles * w->rows * 64);
    memset(w->raised, 0, w->n_tiles * sizeof *w->raised);
    for (uint32_t tile = 0, place = 0; tile < w->n_tiles; tile++) {
        const uint32_t *visible = w->a->visible + query0(w, tile);
        for (uint32_t row = 0; row < w->rows; row++, place++) {
            w->offsets[place] = INFINITY;
            w->keep[place] = 1.0f;
            w->visible[place] = visible[row];
            w->most = visible[row] > w->most ? visible[row] : w->most;
        }
    }
}

/* ---- softmax ---- */

/* A reference gives the largest score so far this weight, as an exponent of 2, or half of it. */
#define FIRST_WEIGHT (-8.0f)
/* Weights of a block that add up to so much ask for another reference. One of 2^WEIGHT_TOP alone does, and so does a NaN. */
#define MOST_WEIGHT 256.0f
/* Scores whose exponents of 2 are not below this count as infinite. */
#define MOST_EXPONENT 0x1p22f
/* Depths of weights that are zero, and nothing that a whole number cannot hold. */
#define ZERO_DEPTH 1e6f

/* The reference for a largest score, given as an exponent of 2: what is to be subtracted from for depths. */
INLINE float offset_for(float exponent) { return (floorf(exponent) + 1.0f - FIRST_WEIGHT + WEIGHT_TOP) * WEIGHT_STEPS; }

/* The reference for a row that has none, if all of its scores are to be seen. */
INLINE void start_row(const work *w, uint32_t place, const float *scores)
{
    __m512 largest = _mm512_load_ps(scores);
    UNROLL
    for (uint32_t i = 1; i < BLOCK_VECTORS; i++) {
        largest = _mm512_max_ps(_mm512_load_ps(scores + 16 * i), largest);
    }
    float exponent = _mm512_reduce_max_ps(largest) * (w->slope / WEIGHT_STEPS);
    w->offsets[place] = fabsf(exponent) < MOST_EXPONENT ? offset_for(exponent) : INFINITY;
}

static void set_scores(float *scores, float value)
{
    for (uint32_t i = 0; i < BLOCK_VECTORS; i++) {
        _mm512_store_ps(scores + 16 * i, _mm512_set1_ps(value));
    }
}

/* A row whose scores are not what its reference is for, or not all to be seen: hides those it may not see, finds what is the matter, and
 * gives the row another reference if need be. Returns what to make depths with. A NaN or an infinite score makes the sum of weights NaN,
 * and thereby, in the end, the output. */
static __attribute__((noinline)) float settle_row(const work *w, uint32_t place, uint32_t visible, float *scores)
{
    float *offset = w->offsets + place, *sums = w->sums + place * 16;
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    __m512 largest = lowest;
    __mmask16 nan = 0;
    for (uint32_t i = 0; i < BLOCK_VECTORS; i++) {
        __m512 s = _mm512_load_ps(scores + 16 * i);
        s = _mm512_mask_mov_ps(lowest, visible > 16 * i ? lanes(visible - 16 * i) : 0, s);
        _mm512_store_ps(scores + 16 * i, s);
        nan |= _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q);
        largest = _mm512_max_ps(s, largest);
    }
    float exponent = _mm512_reduce_max_ps(largest) * (w->slope / WEIGHT_STEPS);
    bool bad = nan != 0 || !(exponent < MOST_EXPONENT), none = !(exponent > -MOST_EXPONENT);
    if (bad || none) {
        if (bad || exponent > -INFINITY) {
            _mm512_store_ps(sums, _mm512_set1_ps(NAN));
        }
        set_scores(scores, 0.0f);
        return ZERO_DEPTH;
    }
    float wanted = offset_for(exponent);
    if (*offset == INFINITY) {
        *offset = wanted;
    } else if (wanted - *offset > (WEIGHT_TOP - FIRST_WEIGHT - 4.0f) * WEIGHT_STEPS) {
        /* a power of 2: nothing is rounded */
        w->keep[place] = ldexpf(1.0f, (int)((*offset - wanted) / WEIGHT_STEPS));
        w->raised[place / w->rows] = 1;
        _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), _mm512_set1_ps(w->keep[place])));
        *offset = wanted;
    }
    const __m512 least = _mm512_set1_ps((*offset - ZERO_DEPTH) / w->slope);
    for (uint32_t i = 0; i < BLOCK_VECTORS; i++) {
        _mm512_store_ps(scores + 16 * i, _mm512_max_ps(_mm512_load_ps(scores + 16 * i), least));
    }
    return *offset;
}

/* What weighs rows, in registers. */
typedef struct weigher {
    weight_maker maker;
    __m512 slope, most;
} weigher;

INLINE weigher weigher_of(const work *w)
{
    weigher x = { weight_maker_new(), _mm512_set1_ps(w->slope), _mm512_set1_ps(MOST_WEIGHT) };
    __asm__("" : "+v"(x.slope), "+v"(x.most));
    return x;
}

/* Weights of a block, and their sum in each lane: of rounded weights, so that rounding does not move the mean of the values. */
INLINE __m512 weigh_block(const weigher *x, const float *scores, float offset, __m512i weights[BLOCK_RUNS])
{
    __m512 even = _mm512_setzero_ps(), odd = even, from = _mm512_set1_ps(offset);
    UNROLL
    for (uint32_t i = 0; i < BLOCK_RUNS; i++) {
        __m512 low = _mm512_fnmadd_ps(_mm512_load_ps(scores + 32 * i), x->slope, from);
        __m512 high = _mm512_fnmadd_ps(_mm512_load_ps(scores + 32 * i + 16), x->slope, from);
        weights[i] = weights_of(&x->maker, whole_depths(low, high));
        even = i == 0 ? even_weights(weights[0]) : _mm512_add_ps(even, even_weights(weights[i]));
        odd = i == 0 ? odd_weights(&x->maker, weights[0]) : _mm512_add_ps(odd, odd_weights(&x->maker, weights[i]));
    }
    return _mm512_add_ps(even, odd);
}

/* A row's scores of a block into weights, in place; `visible` counts from the block's first token. */
INLINE void weigh_row(const work *w, const weigher *x, bool first, uint32_t place, uint32_t visible, float *scores)
{
    float *sums = w->sums + place * 16;
    __m512i weights[BLOCK_RUNS];
    if (first && visible >= BLOCK_TOKENS) {
        start_row(w, place, scores);
    }
    __m512 sum = weigh_block(x, scores, w->offsets[place], weights);
    if (__builtin_expect(visible < BLOCK_TOKENS || _mm512_cmp_ps_mask(sum, x->most, _CMP_LT_OQ) != 0xffff, 0)) {
        sum = weigh_block(x, scores, settle_row(w, place, visible, scores), weights);
    }
    UNROLL
    for (uint32_t i = 0; i < BLOCK_RUNS; i++) {
        _mm512_store_si512(scores + 16 * i, weights[i]);
    }
    _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), sum));
}

/* ---- what is under way ---- */

/* A step takes one or two tiles of queries through a block of tokens. */
typedef struct step {
    uint32_t n, tile, t, n_runs;   /* n_runs 0: there is no such step */
    float *scores;
} step;

INLINE step step_at(const work *w, uint32_t n, uint32_t tile, uint32_t t)
{
    uint32_t n_runs = w->most > t ? (uint32_t)hsri_min(hsri_div_up(w->most - t, HSRI_RUN), BLOCK_RUNS) : 0;
    return (step) { n, tile, t, n_runs, w->scores[n % 2] };
}

/* All blocks for the first tiles, then for the others: outputs of all tiles would not fit the first-level cache. */
INLINE step next_step(const work *w, const step *s)
{
    bool last = s->t + BLOCK_TOKENS >= w->most && s->tile + 2 < w->n_tiles;
    return last ? step_at(w, s->n + 1, s->tile + 2, 0) : step_at(w, s->n + 1, s->tile, s->t + BLOCK_TOKENS);
}

/* Where the sums of tiles 0 to 3 come from or go to, 2 and 3 only where two tiles go together; nowhere: stride 0. */
typedef struct sums_place {
    float *at[4];
    size_t stride;
} sums_place;

/* Rows [row, end) of a step are still to be weighed. Sums have not left their tiles yet: a store waits for products, and keeps all that
 * is behind it waiting, so it is put off until the tile is needed again or the next step begins. */
typedef struct flow {
    const weigher *weigher;
    uint32_t place, end, t, rows_each;
    float *scores;
    sums_place sums;
} flow;

INLINE void weigh_rows(const work *w, flow *f, uint32_t n)
{
    for (; n > 0 && f->place < f->end; n--, f->place++, f->scores += BLOCK_TOKENS) {
        uint32_t visible = w->visible[f->place];
        weigh_row(w, f->weigher, f->t == 0, f->place, visible > f->t ? visible - f->t : 0, f->scores);
    }
}

/* ---- products ---- */

/* Where a tile of keys or values is. */
typedef struct weight_tile {
    const uint8_t *at;
    size_t stride;
} weight_tile;

typedef struct input_tiles {
    const void *at[2];
    size_t stride;
} input_tiles;

/* How the sums of a product begin. */
typedef enum beginning { GO_ON, FROM_ZERO, FROM_MEMORY } beginning;

#define STORE_SUM(i, f) \
    do { \
        if ((f)->sums.stride != 0) { \
            TILE_STORE(i, (f)->sums.at[i], (f)->sums.stride); \
        } \
    } while (0)

#define BEGIN_SUM(i, begin, from, f) \
    do { \
        if ((begin) != GO_ON) { \
            STORE_SUM(i, f); \
        } \
        if ((begin) == FROM_ZERO) { \
            TILE_ZERO(i); \
        } else if ((begin) == FROM_MEMORY) { \
            TILE_LOAD(i, (from)->at[i], (from)->stride); \
        } \
    } while (0)

/* n_tiles x 2 tiles of sums += a run: inputs are used twice, keys and values n_tiles times in a row. Those are loaded as what is not
 * used again soon. */
INLINE void multiply(const work *w, flow *f, uint32_t n_tiles, const input_tiles *inputs, weight_tile w0, weight_tile w1, beginning begin,
                     const sums_place *from)
{
    TILE_LOAD_ONCE(6, w0.at, w0.stride);
    TILE_LOAD(4, inputs->at[0], inputs->stride);
    BEGIN_SUM(0, begin, from, f);
    TILE_MULTIPLY(0, 4, 6);
    if (n_tiles == 2) {
        TILE_LOAD(5, inputs->at[1], inputs->stride);
        BEGIN_SUM(2, begin, from, f);
        TILE_MULTIPLY(2, 5, 6);
    }
    if (w->d <= 64) {
        weigh_rows(w, f, f->rows_each);
    }
    TILE_LOAD_ONCE(7, w1.at, w1.stride);
    BEGIN_SUM(1, begin, from, f);
    TILE_MULTIPLY(1, 4, 7);
    if (n_tiles == 2) {
        BEGIN_SUM(3, begin, from, f);
        TILE_MULTIPLY(3, 5, 7);
    }
    weigh_rows(w, f, f->rows_each);
}

INLINE void store_sums(flow *f, uint32_t n_tiles)
{
    STORE_SUM(0, f);
    STORE_SUM(1, f);
    if (n_tiles == 2) {
        STORE_SUM(2, f);
        STORE_SUM(3, f);
    }
    f->sums.stride = 0;
}

/* ---- scores ---- */

/* The keys of a page. The lines of a last run of fewer than 32 components are in `rest`, with zeros behind them: in the page they
 * are followed by the values. */
typedef struct page_keys {
    const uint8_t *at;
    uint32_t whole;   /* components in whole runs */
    uint8_t rest[TILE_ROWS][HSRI_PAGE_TOKENS * 4];
} page_keys;

INLINE void open_keys(const work *w, uint32_t page, page_keys *k)
{
    k->at = w->a->pages[page] + HSRI_PAGE_HEADER_BYTES;
    k->whole = w->d / HSRI_RUN * HSRI_RUN;
    if (k->whole < w->d) {
        size_t bytes = (w->d - k->whole) / 2 * sizeof k->rest[0];
        memcpy(k->rest, k->at + k->whole / 2 * sizeof k->rest[0], bytes);
        memset((uint8_t *)k->rest + bytes, 0, sizeof k->rest - bytes);
    }
}

INLINE weight_tile keys_at(const page_keys *k, uint32_t j, uint32_t token)
{
    const size_t line = HSRI_PAGE_TOKENS * 4;
    return (weight_tile) { (j < k->whole ? k->at + j / 2 * line : (const uint8_t *)k->rest) + token * 4, line };
}

/* Unscaled scores of a step. Those behind the last token are garbage. */
INLINE void score_step(const work *w, const step *s, flow *f, uint32_t n_tiles)
{
    const size_t stride = QUERY_STRIDE(w->d);
    const uint16_t *q0 = w->queries + query0(w, s->tile) * stride, *q1 = w->queries + query0(w, s->tile + n_tiles - 1) * stride;
    page_keys keys;
    for (uint32_t i = 0; i < s->n_runs; i++) {
        uint32_t t = s->t + i * HSRI_RUN, token = t % HSRI_PAGE_TOKENS;
        if (token == 0) {
            open_keys(w, t / HSRI_PAGE_TOKENS, &keys);
        }
        UNROLL
        for (uint32_t j = 0; j < w->d; j += HSRI_RUN) {
            input_tiles q = { { q0 + j, q1 + j }, stride * sizeof *q0 };
            multiply(w, f, n_tiles, &q, keys_at(&keys, j, token), keys_at(&keys, j, token + 16), j == 0 ? FROM_ZERO : GO_ON, NULL);
        }
        float *s0 = s->scores + i * HSRI_RUN, *s1 = s0 + w->rows * BLOCK_TOKENS;
        f->sums = (sums_place) { { s0, s0 + 16, s1, s1 + 16 }, BLOCK_TOKENS * sizeof(float) };
    }
}

/* ---- output ---- */

/* Whether the values of tokens [t0, t1) of a group are all finite. */
static bool values_finite(const hsri_attend_args *a, uint32_t t0, uint32_t t1)
{
    const size_t line = (size_t)a->head_dim * 4;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (uint32_t t = t0 & ~1u; t < t1; t += 2) {
        const uint8_t *page = a->pages[t / HSRI_PAGE_TOKENS] + HSRI_PAGE_HEADER_BYTES;
        const uint8_t *values = page + HSRI_PAGE_TOKENS / 2 * line + t % HSRI_PAGE_TOKENS / 2 * line;
        /* of a pair's line, only the even halves are the first token's */
        __m512i mask = t + 1 < t1 ? _mm512_set1_epi32(-1) : _mm512_set1_epi32(0xffff);
        for (uint32_t j = 0; j < a->head_dim; j += 16) {
            __m512i v = _mm512_and_si512(_mm512_maskz_loadu_epi32(lanes(a->head_dim - j), values + (size_t)j * 4), mask);
            if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent) != 0) {
                return false;
            }
        }
    }
    return true;
}

/* The values of the run of tokens from t and of components from j: in the page, or, if the run ends before its 32nd token or the
 * line before its 16th component, in `copy`, with zeros for what is not to be seen. */
INLINE weight_tile values_at(const work *w, uint32_t t, uint32_t j, uint8_t copy[TILE_BYTES])
{
    const size_t line = (size_t)w->d * 4;
    const uint8_t *page = w->a->pages[t / HSRI_PAGE_TOKENS] + HSRI_PAGE_HEADER_BYTES;
    const uint8_t *at = page + (HSRI_PAGE_TOKENS + t % HSRI_PAGE_TOKENS) / 2 * line + (size_t)j * 4;
    if (w->most - t >= HSRI_RUN && w->d >= j + 16) {
        return (weight_tile) { at, line };
    }
    __mmask16 columns = j < w->d ? lanes(w->d - j) : 0;
    for (uint32_t pair = 0; pair < 16; pair++) {
        uint32_t left = w->most - t > 2 * pair ? w->most - t - 2 * pair : 0;
        __m512i mask = _mm512_set1_epi32(left >= 2 ? -1 : left == 1 ? 0xffff : 0);
        __m512i v = _mm512_maskz_loadu_epi32(left > 0 ? columns : 0, at + pair * line);
        _mm512_store_si512(copy + (size_t)pair * 64, _mm512_and_si512(v, mask));
    }
    return (weight_tile) { copy, 64 };
}

/* Rows whose reference was raised. */
static __attribute__((noinline)) void rescale_tile(const work *w, uint32_t tile)
{
    for (uint32_t r = 0; r < w->rows; r++) {
        __m512 keep = _mm512_set1_ps(w->keep[tile * w->rows + r]);
        for (uint32_t s = 0; s < N_STRIPS(w->d); s++) {
            float *o = output_at(w, tile, s) + r * 16;
            _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), keep));
        }
        w->keep[tile * w->rows + r] = 1.0f;
    }
    w->raised[tile] = 0;
}

/* A step's output += weights times values. */
INLINE void value_step(const work *w, const step *s, flow *f, uint32_t n_tiles)
{
    _Alignas(64) uint8_t copies[2][TILE_BYTES];
    for (uint32_t i = 0; i < n_tiles && s->n_runs > 0; i++) {
        if (w->raised[s->tile + i]) {
            store_sums(f, n_tiles);
            rescale_tile(w, s->tile + i);
        }
    }
    for (uint32_t strip = 0; strip < N_STRIPS(w->d) && s->n_runs > 0; strip += 2) {
        float *o0 = output_at(w, s->tile, strip), *o1 = output_at(w, s->tile + n_tiles - 1, strip);
        sums_place sums = { { o0, o0 + TILE_BYTES / 4, o1, o1 + TILE_BYTES / 4 }, 64 };
        for (uint32_t i = 0; i < s->n_runs; i++) {
            uint32_t t = s->t + i * HSRI_RUN;
            const float *weights = s->scores + i * (HSRI_RUN / 2);
            input_tiles inputs = { { weights, weights + w->rows * BLOCK_TOKENS }, BLOCK_TOKENS * sizeof(float) };
            weight_tile v0 = values_at(w, t, 16 * strip, copies[0]), v1 = values_at(w, t, 16 * strip + 16, copies[1]);
            multiply(w, f, n_tiles, &inputs, v0, v1, i > 0 ? GO_ON : s->t > 0 ? FROM_MEMORY : FROM_ZERO, &sums);
        }
        f->sums = sums;
    }
}

/* ---- calls ---- */

INLINE void finish_place(const work *w, uint32_t tile, uint32_t row)
{
    uint32_t place = tile * w->rows + row;
    float *partial = w->a->partials[query0(w, tile) + row], offset = w->offsets[place];
    float sum = _mm512_reduce_add_ps(_mm512_load_ps(w->sums + place * 16));
    partial[0] = offset < INFINITY ? (offset / WEIGHT_STEPS - WEIGHT_TOP) * 0x1.62e430p-1f : -INFINITY;
    partial[1] = sum;
    for (uint32_t s = 0; 16 * s < w->d; s++) {
        /* NaN if the sum is; and a sum that was flushed to -0 becomes +0: whether more zeros were added to it must not show */
        __m512 v = _mm512_fmadd_ps(_mm512_set1_ps(sum), _mm512_setzero_ps(), _mm512_load_ps(output_at(w, tile, s) + row * 16));
        _mm512_mask_storeu_ps(partial + 2 + 16 * s, lanes(w->d - 16 * s), v);
    }
}

/* Tiles that went together. Their outputs make room for those of the next. */
INLINE void finish_tiles(const work *w, uint32_t tile, uint32_t n_tiles)
{
    for (uint32_t end = tile + n_tiles; tile < end; tile++) {
        for (uint32_t row = 0; row < w->rows; row++) {
            finish_place(w, tile, row);
        }
    }
}

/* Keys or values of a step's pages, if they have still to be made. */
INLINE void make_pages(const work *w, const step *s, bool values)
{
    const hsri_page_maker *maker = w->a->maker;
    if (maker && s->n_runs > 0) {
        uint32_t end = (uint32_t)hsri_div_up(s->t + s->n_runs * HSRI_RUN, HSRI_PAGE_TOKENS);
        (values ? maker->values : maker->keys)(maker->of, s->t / HSRI_PAGE_TOKENS, end);
    }
}

_Static_assert(BLOCK_TOKENS == HSRI_PAGES_MADE * HSRI_PAGE_TOKENS, "a block is what is made at a time");
_Static_assert(HSRI_QUERIES_ONCE == 2 * TILE_ROWS, "two tiles go through all blocks together");

/* Output of a step, weights of the next, scores of the one behind that, which go where the first step's weights are. */
INLINE void attend_steps(const work *w, const step *valued, const step *weighed, const step *scored, flow *f, uint32_t n_tiles)
{
    f->place = weighed->tile * w->rows;
    f->end = weighed->n_runs > 0 ? f->place + n_tiles * w->rows : f->place;
    f->t = weighed->t;
    f->scores = weighed->scores;
    /* the last scores to be weighed are still in their tiles */
    store_sums(f, n_tiles);
    make_pages(w, valued, true);
    value_step(w, valued, f, n_tiles);
    make_pages(w, scored, false);
    score_step(w, scored, f, n_tiles);
    weigh_rows(w, f, UINT32_MAX);
}

INLINE void attend_any(const hsri_attend_args *a, uint32_t d, uint32_t n_tiles)
{
    work w = work_of(a, d);
    start_places(&w);
    if (w.most == 0) {
        /* no step will begin the outputs */
        memset(w.outputs, 0, (size_t)2 * N_STRIPS(d) * TILE_BYTES);
        finish_tiles(&w, 0, w.n_tiles);
        return;
    }
    round_queries(&w);
    const weigher weigher = weigher_of(&w);
    /* of the two products of a step, each is 4 (at most 64 components: 8) chances for each run and 32 components to weigh some rows */
    const uint32_t chances = (uint32_t)(BLOCK_RUNS * N_STRIPS(d) * (d <= 64 ? 2 : 1));
    flow f = { .weigher = &weigher, .rows_each = (n_tiles * TILE_ROWS + chances - 1) / chances };
    step none = { 0 }, valued = none, weighed = none, scored = step_at(&w, 0, 0, 0);
    tiles_configure(INPUT_TILES, w.rows);
    while (scored.n_runs + weighed.n_runs + valued.n_runs > 0) {
        attend_steps(&w, &valued, &weighed, &scored, &f, n_tiles);
        if (valued.n_runs > 0 && valued.t + BLOCK_TOKENS >= w.most) {
            /* that was the last block; without another step, its sums are still in their tiles */
            store_sums(&f, n_tiles);
            finish_tiles(&w, valued.tile, n_tiles);
        }
        valued = weighed;
        weighed = scored;
        scored = next_step(&w, &scored);
    }
    tiles_release();
}

INLINE void attend_size(const hsri_attend_args *a, uint32_t d)
{
    if (a->n_queries <= TILE_ROWS) {
        attend_any(a, d, 1);
    } else {
        attend_any(a, d, 2);
    }
}

/* The common head size is compiled in, and how many tiles go together. */
static void attend_together(const hsri_attend_args *a)
{
    if (a->head_dim == 64) {
        attend_size(a, 64);
    } else {
        attend_size(a, a->head_dim);
    }
}

/* Where queries do not see the same tokens, those that see less have weights of zero for the rest, which changes nothing as long as
 * the values there are finite. If they are not, each query goes alone, and sees no value behind its last token. */
void hsri_attend_bf16_amx(const hsri_attend_args *a)
{
    uint32_t most = 0, least = UINT32_MAX;
    for (uint32_t i = 0; i < a->n_queries; i++) {
        most = a->visible[i] > most ? a->visible[i] : most;
        least = a->visible[i] < least ? a->visible[i] : least;
    }
    if (values_finite(a, least, most)) {
        attend_together(a);
        return;
    }
    for (uint32_t i = 0; i < a->n_queries; i++) {
        hsri_attend_args one = *a;
        one.n_queries = 1;
        one.queries += i;
        one.visible += i;
        one.partials += i;
        attend_together(&one);
    }
}
