/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: packed weights and bf16 pages, multiplied in tiles. Inputs (and queries, softmax weights, q8 and q4 weights) are rounded to bf16.
 *
 * A tile register holds 16 rows of 64 bytes. One instruction, TDPBF16PS, multiplies a tile of inputs [rows][32 k] with a tile of
 * weights [16 k/2][16 n][2 k], which is a run of a panel, and adds the product to a tile of sums [rows][16 n]: an even and an
 * odd chain of FMAs from zero, added, then added to what was there. This is the order of docs/model-file.md, with one
 * difference: numbers below 2^-126 count as zero, on the way in and on the way out. A row's sums do not depend on the other
 * rows of its tile, so one code serves every number of rows; it only takes tiles of fewer rows.
 *
 * Tiles are set up and released inside each kernel call: a thread that is not in one has no tile state to be saved. */
#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"
#include "device/cpu/x86/lanes512.h"
#include "device/cpu/x86/tiles.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* All kernels divide the eight tiles in the same way: sums are tiles 0 to 3 and inputs 4 and 5; weights 6 and 7. */
#define INPUT_TILES 6u

/* ---- inputs of linear ---- */

/* A prepared row: n_runs lines of 32 bf16 inputs, zeros behind the last. */
static void prepare(const float *x, uint64_t x_stride, uint32_t n_rows, uint32_t k, float *prepared)
{
    uint32_t n_runs = (uint32_t)hsri_div_up(k, HSRI_RUN);
    uint64_t stride = hsri_prepared_stride(k);
    for (uint32_t i = 0; i < n_rows; i++, x += x_stride, prepared += stride) {
        for (uint32_t run = 0; run < n_runs; run++) {
            uint32_t n = k - run * HSRI_RUN;
            __m512 low = _mm512_maskz_loadu_ps(lanes(n), x + run * HSRI_RUN);
            __m512 high = _mm512_maskz_loadu_ps(n > 16 ? lanes(n - 16) : 0, x + run * HSRI_RUN + (n > 16 ? 16 : 0));
            float *line = prepared + run * (HSRI_RUN / 2);
            _mm256_storeu_si256((__m256i *)line, (__m256i)_mm512_cvtneps_pbh(low));
            _mm256_storeu_si256((__m256i *)(line + 8), (__m256i)_mm512_cvtneps_pbh(high));
        }
    }
}

/* ---- unpacking q8 and q4 into runs of bf16 ---- */

/* How far ahead codes are fetched: the hardware alone does not keep up with one reader. */
#define FETCH_AHEAD 4096u

INLINE void fetch(const uint8_t *at, uint32_t bytes)
{
    for (uint32_t b = 0; b < bytes; b += 64) {
        _mm_prefetch((const char *)((uintptr_t)at + FETCH_AHEAD + b), _MM_HINT_T0);
    }
}

INLINE __m512 load_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

/* Upper halves of an even and an odd weight, as a dword of two bf16. */
INLINE __m512i cut_pair(__m512 even, __m512 odd)
{
    const __m512i top_to_low = _mm512_set4_epi32(0x00000f0e, 0x00000b0a, 0x00000706, 0x00000302);
    return _mm512_mask_shuffle_epi8((__m512i)odd, 0x3333333333333333u, (__m512i)even, top_to_low);
}

/* The same, rounded to nearest, ties away from zero, which costs an addition. */
INLINE __m512i round_pair(__m512 even, __m512 odd)
{
    const __m512i half = _mm512_set1_epi32(0x8000);
    return cut_pair((__m512)_mm512_add_epi32((__m512i)even, half), (__m512)_mm512_add_epi32((__m512i)odd, half));
}

/* A byte in the mantissa of 128 makes a number without a conversion: of each dword of v, byte j on `at` of 128's bytes. */
INLINE __m512 byte_in_128(__m512i v, uint32_t j, uint32_t at)
{
    const __m512i of_128 = _mm512_set1_epi32(0x43000000);
    const int index = (int)(0x01010101u * j);
    const __m512i bytes = _mm512_add_epi8(_mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0), _mm512_set1_epi32(index));
    return (__m512)_mm512_mask_shuffle_epi8(of_128, 0x1111111111111111u << at, v, bytes);
}

/* weight = scale * code. 128 + (code + 128) / 256, times 256 scale, less 32896 scale: nothing of it is rounded. */
INLINE void unpack_run_q8(const uint8_t *codes, const uint8_t *scales, uint8_t *out)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    __m512 scale = load_f16(scales), factor = _mm512_mul_ps(scale, _mm512_set1_ps(256.0f));
    __m512 offset = _mm512_mul_ps(scale, _mm512_set1_ps(32896.0f));
    UNROLL
    for (uint32_t line = 0; line < 8; line++, codes += 64, out += 128) {
        __m512i v = _mm512_xor_si512(_mm512_loadu_si512(codes), sign);
        __m512 w[4];
        UNROLL
        for (uint32_t j = 0; j < 4; j++) {
            w[j] = _mm512_fmsub_ps(byte_in_128(v, j, 1), factor, offset);
        }
        _mm512_store_si512(out, round_pair(w[0], w[1]));
        _mm512_store_si512(out + 64, round_pair(w[2], w[3]));
    }
}

/* weight = fma(scale, 16 + code, minimum - 16 scale): a code in the top of its mantissa makes 128 + 8 code. Here reading is bound by
 * arithmetic, so weights are cut instead of rounded, and scale and minimum made larger by what cutting takes away on average. */
INLINE void unpack_run_q4(const uint8_t *codes, const uint8_t *scales, uint8_t *out)
{
    const __m512i code = _mm512_set1_epi8(0x78);
    const __m512 larger = _mm512_set1_ps(0x1.00b8p+0f);
    __m512 scale = _mm512_mul_ps(load_f16(scales), larger), minimum = _mm512_mul_ps(load_f16(scales + HSRI_PANEL * 2), larger);
    __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(0.125f)), offset = _mm512_fnmadd_ps(scale, _mm512_set1_ps(16.0f), minimum);
    UNROLL
    for (uint32_t line = 0; line < 4; line++, codes += 64, out += 256) {
        __m512i v = _mm512_loadu_si512(codes);
        /* byte j holds input j in its low and input 4 + j in its high half */
        __m512i half[2] = { _mm512_and_si512(_mm512_slli_epi32(v, 3), code), _mm512_and_si512(_mm512_srli_epi32(v, 1), code) };
        __m512 w[8];
        UNROLL
        for (uint32_t j = 0; j < 8; j++) {
            w[j] = _mm512_fmadd_ps(byte_in_128(half[j / 4], j % 4, 2), factor, offset);
        }
        UNROLL
        for (uint32_t j = 0; j < 4; j++) {
            _mm512_store_si512(out + j * 64, cut_pair(w[2 * j], w[2 * j + 1]));
        }
    }
}

INLINE uint32_t run_bytes(hsri_dtype dtype) { return dtype == HSRI_DTYPE_BF16 ? TILE_BYTES : dtype == HSRI_DTYPE_Q8 ? 512 : 256; }
/* Bytes of scales (and minimums) of one run of a panel. */
INLINE uint32_t scale_bytes(hsri_dtype dtype) { return dtype == HSRI_DTYPE_Q8 ? HSRI_PANEL * 2 : HSRI_PANEL * 4; }

/* Run number `run` of a matrix, counted through the panels. */
INLINE void unpack_run(hsri_dtype dtype, const hsri_packed *w, uint64_t run, uint8_t *out)
{
    const uint8_t *codes = w->codes + run * run_bytes(dtype), *scales = w->tail + run * scale_bytes(dtype);
    fetch(codes, run_bytes(dtype));
    if (dtype == HSRI_DTYPE_Q8) {
        unpack_run_q8(codes, scales, out);
    } else {
        unpack_run_q4(codes, scales, out);
    }
}

/* ---- linear ---- */

/* What one call is about. Rows are taken in tiles of `tile_rows` rows. Where that does not come out even, the last tile begins
 * earlier, and computes some rows of the one before it again. */
typedef struct linear_job {
    const hsri_packed *w;
    const float *x;        /* prepared */
    uint64_t x_stride;     /* floats */
    const float *bias;
    float *out;
    uint64_t out_stride;
    uint32_t n_rows, tile_rows, n_tiles;
} linear_job;

static uint32_t tile_row0(const linear_job *job, uint32_t tile)
{
    return (uint32_t)hsri_min((uint64_t)tile * job->tile_rows, job->n_rows - job->tile_rows);
}

#define FAR_BYTES 2048u

/* Runs [run0, run0 + n_runs) of one or two panels, as bf16. */
typedef struct block {
    const uint8_t *weights;
    size_t panel_bytes;      /* from one panel to the other */
    uint32_t panel, run0, n_runs;
    bool first, last;        /* of the blocks of these panels: sums begin, and are complete */
    bool once;               /* read from memory and not again */
} block;

/* Sums of a tile of rows and a panel in `out`, or in memory of their own where not all of them may be written: columns that do not
 * exist, rows that belong to the tile before (what that has stored is no longer the sum of earlier blocks), a bias to be added. */
typedef struct sums_place {
    float *out;
    uint32_t first_row;
    __mmask16 columns;
    bool direct;
} sums_place;

static sums_place sums_at(const linear_job *job, const block *b, uint32_t tile, uint32_t panel)
{
    uint32_t n = (b->panel + panel) * HSRI_PANEL, row0 = tile_row0(job, tile);
    sums_place s = { job->out + row0 * job->out_stride + n, tile * job->tile_rows - row0, lanes(job->w->n - n), false };
    s.direct = s.first_row == 0 && s.columns == 0xffff && (job->bias == NULL || !b->last);
    return s;
}

static void load_sums(const linear_job *job, const sums_place *s, float *sums)
{
    for (uint32_t r = 0; r < job->tile_rows; r++) {
        _mm512_store_ps(sums + r * HSRI_PANEL, _mm512_maskz_loadu_ps(s->columns, s->out + r * job->out_stride));
    }
}

static void store_sums(const linear_job *job, const sums_place *s, const float *sums, const float *bias)
{
    __m512 b = bias != NULL ? _mm512_maskz_loadu_ps(s->columns, bias) : _mm512_setzero_ps();
    for (uint32_t r = s->first_row; r < job->tile_rows; r++) {
        __m512 v = _mm512_load_ps(sums + r * HSRI_PANEL);
        _mm512_mask_storeu_ps(s->out + r * job->out_stride, s->columns, bias != NULL ? _mm512_add_ps(v, b) : v);
    }
}

/* Rows of sums so far apart are the output itself, and not in a near cache: ask for their lines now. */
INLINE void fetch_sums(const linear_job *job, const block *b, uint32_t tile, uint32_t n_panels)
{
    if (job->out_stride * sizeof(float) < FAR_BYTES) {
        return;
    }
    const float *out = job->out + tile_row0(job, tile) * job->out_stride + b->panel * HSRI_PANEL;
    for (uint32_t r = 0; r < job->tile_rows; r++, out += job->out_stride) {
        __builtin_prefetch(out, 1, 3);
        if (n_panels == 2) {
            __builtin_prefetch(out + HSRI_PANEL, 1, 3);
        }
    }
}

#define BEGIN_SUMS(t, tile, of_panel) \
    do { \
        if (b->first) { \
            TILE_ZERO(t); \
        } else { \
            sums_place s_ = sums_at(job, b, tile, of_panel); \
            if (s_.columns == 0xffff) { \
                TILE_LOAD(t, s_.out, job->out_stride * sizeof(float)); \
            } else { \
                load_sums(job, &s_, sums); \
                TILE_LOAD(t, sums, 64); \
            } \
        } \
    } while (0)

#define END_SUMS(t, tile, of_panel) \
    do { \
        sums_place s_ = sums_at(job, b, tile, of_panel); \
        if (s_.direct) { \
            TILE_STORE(t, s_.out, job->out_stride * sizeof(float)); \
        } else { \
            TILE_STORE(t, sums, 64); \
            store_sums(job, &s_, sums, job->bias != NULL && b->last ? job->bias + (b->panel + (of_panel)) * HSRI_PANEL : NULL); \
        } \
    } while (0)

/* n_tiles x n_panels tiles of sums, 1 or 2 each: every tile that is loaded is used up to twice. */
INLINE void multiply_tiles(const linear_job *job, uint32_t tile, uint32_t n_tiles, uint32_t n_panels, const block *b)
{
    _Alignas(64) float sums[TILE_ROWS * HSRI_PANEL];
    size_t stride = job->x_stride * sizeof(float);
    const uint8_t *weights = b->weights;
    const float *x0 = job->x + tile_row0(job, tile) * job->x_stride + b->run0 * (HSRI_RUN / 2);
    const float *x1 = job->x + tile_row0(job, tile + n_tiles - 1) * job->x_stride + b->run0 * (HSRI_RUN / 2);
    for (uint32_t i = 0; i < n_tiles; i++) {
        fetch_sums(job, b, tile + i, n_panels);
    }
    BEGIN_SUMS(0, tile, 0);
    if (n_panels == 2) {
        BEGIN_SUMS(1, tile, 1);
    }
    if (n_tiles == 2) {
        BEGIN_SUMS(2, tile + 1, 0);
        if (n_panels == 2) {
            BEGIN_SUMS(3, tile + 1, 1);
        }
    }
    for (uint32_t run = 0; run < b->n_runs; run++) {
        if (b->once) {
            fetch(weights, TILE_BYTES);
        }
        TILE_LOAD(6, weights, 64);
        if (b->once) {
            TILE_LOAD(4, x0, stride);
        } else {
            TILE_LOAD_ONCE(4, x0, stride);
        }
        TILE_MULTIPLY(0, 4, 6);
        if (n_panels == 2) {
            if (b->once) {
                fetch(weights + b->panel_bytes, TILE_BYTES);
            }
            TILE_LOAD(7, weights + b->panel_bytes, 64);
            TILE_MULTIPLY(1, 4, 7);
        }
        if (n_tiles == 2) {
            TILE_LOAD_ONCE(5, x1, stride);
            TILE_MULTIPLY(2, 5, 6);
            if (n_panels == 2) {
                TILE_MULTIPLY(3, 5, 7);
            }
        }
        weights += TILE_BYTES;
        x0 += HSRI_RUN / 2;
        x1 += HSRI_RUN / 2;
    }
    END_SUMS(0, tile, 0);
    if (n_panels == 2) {
        END_SUMS(1, tile, 1);
    }
    if (n_tiles == 2) {
        END_SUMS(2, tile + 1, 0);
        if (n_panels == 2) {
            END_SUMS(3, tile + 1, 1);
        }
    }
}

/* All rows with a block. */
static void multiply_block(const linear_job *job, uint32_t n_panels, const block *b)
{
    for (uint32_t tile = 0; tile < job->n_tiles; tile += 2) {
        bool pair = tile + 1 < job->n_tiles;
        if (pair && n_panels == 2) {
            multiply_tiles(job, tile, 2, 2, b);
        } else if (pair) {
            multiply_tiles(job, tile, 2, 1, b);
        } else if (n_panels == 2) {
            multiply_tiles(job, tile, 1, 2, b);
        } else {
            multiply_tiles(job, tile, 1, 1, b);
        }
    }
}

/* Runs of two panels that are unpacked at a time and stay in the first-level cache while all rows use them. Fewer would make sums leave
 * their tiles more often. */
#define BLOCK_RUNS 20u
/* Few rows: runs are unpacked this many steps before they are multiplied. */
#define UNPACK_AHEAD 3u
#define RING 4u

/* Size of the next part when `left` things are taken in parts of at most `most`: as even as possible. */
static uint32_t next_part(uint32_t left, uint32_t most)
{
    return (uint32_t)hsri_div_up(left, hsri_div_up(left, most));
}

/* Many rows: blocks are unpacked once for all of them. The inputs of a block's runs serve all panels before those of the next are touched,
 * so that they stay in the second-level cache even where whole rows would not. */
INLINE void linear_many_rows(hsri_dtype dtype, const linear_job *job, uint32_t panel0, uint32_t panel1)
{
    _Alignas(64) uint8_t unpacked[2 * BLOCK_RUNS * TILE_BYTES];
    uint32_t n_runs = job->w->n_runs;
    for (uint32_t run0 = 0, n; run0 < n_runs; run0 += n) {
        n = next_part(n_runs - run0, BLOCK_RUNS);
        for (uint32_t panel = panel0; panel < panel1; panel += 2) {
            uint32_t n_panels = (uint32_t)hsri_min(2, panel1 - panel);
            block b = { unpacked, n * TILE_BYTES, panel, run0, n, run0 == 0, run0 + n == n_runs, job->n_tiles <= 2 };
            uint64_t at = (uint64_t)panel * n_runs + run0;
            if (dtype == HSRI_DTYPE_BF16) {
                b.weights = job->w->codes + at * TILE_BYTES;
                b.panel_bytes = (size_t)n_runs * TILE_BYTES;
            } else {
                b.once = false;
                for (uint32_t i = 0; i < n_panels * n; i++) {
                    unpack_run(dtype, job->w, at + i / n * n_runs + i % n, unpacked + (size_t)i * TILE_BYTES);
                }
            }
            multiply_block(job, n_panels, &b);
        }
    }
}

/* One tile of rows: memory is read in one stream, through all panels, and unpacked for this one use. */
INLINE void linear_few_rows(hsri_dtype dtype, const linear_job *job, uint32_t panel0, uint32_t panel1)
{
    _Alignas(64) uint8_t ring[RING][TILE_BYTES];
    _Alignas(64) float sums[TILE_ROWS * HSRI_PANEL];
    const uint32_t n_runs = job->w->n_runs;
    const uint64_t end = (uint64_t)panel1 * n_runs;
    const size_t stride = job->x_stride * sizeof(float);
    uint64_t at = (uint64_t)panel0 * n_runs, ahead = at;
    for (; ahead < end && ahead < at + UNPACK_AHEAD; ahead++) {
        unpack_run(dtype, job->w, ahead, ring[ahead % RING]);
    }
    for (uint32_t panel = panel0; panel < panel1; panel++) {
        block of_panel = { .panel = panel, .last = true }, *b = &of_panel;
        TILE_ZERO(0);
        for (uint32_t run = 0; run < n_runs; run++, at++, ahead++) {
            if (ahead < end) {
                unpack_run(dtype, job->w, ahead, ring[ahead % RING]);
            }
            TILE_LOAD(6, ring[at % RING], 64);
            TILE_LOAD(4, job->x + run * (HSRI_RUN / 2), stride);
            TILE_MULTIPLY(0, 4, 6);
        }
        END_SUMS(0, 0, 0);
    }
}

INLINE void linear_any(hsri_dtype dtype, const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride,
                       uint32_t n_rows, const float *bias, float *out, uint64_t out_stride)
{
    if (n_rows == 0) {
        return;
    }
    linear_job job = { w, x, x_stride, bias, out, out_stride, n_rows, (uint32_t)hsri_min(n_rows, TILE_ROWS), 0 };
    job.n_tiles = (uint32_t)hsri_div_up(n_rows, job.tile_rows);
    tiles_configure(INPUT_TILES, job.tile_rows);
    if (dtype != HSRI_DTYPE_BF16 && job.n_tiles == 1) {
        linear_few_rows(dtype, &job, panel0, panel1);
    } else {
        linear_many_rows(dtype, &job, panel0, panel1);
    }
    tiles_release();
}

#define LINEAR(name, dtype) \
    static void linear_##name(const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride, uint32_t n_rows, \
                              const float *bias, float *out, uint64_t out_stride) \
    { \
        linear_any(dtype, w, panel0, panel1, x, x_stride, n_rows, bias, out, out_stride); \
    }

LINEAR(bf16, HSRI_DTYPE_BF16)
LINEAR(q8, HSRI_DTYPE_Q8)
LINEAR(q4, HSRI_DTYPE_Q4)

/* ---- attention over bf16 pages ----
 *
 * A page holds keys as [d/2][64 tokens][2] and values as [32 token pairs][d][2]: 16 lines of either, 64 bytes wide, are a tile of
 * weights. So scores are queries times keys, 32 components at a time, and the output is softmax weights times values, 32 tokens
 * at a time. */

/* Scores of a tile of queries: runs of 32 tokens, [rows][32] each, and a gap that keeps runs out of each other's cache sets.
 * Writing whole rows of 1024 instead would touch a memory page for every query. The weights of a run take its scores' place, as
 * the tile of inputs they will be. */
#define SCORE_RUN(rows) (((rows) + 1) * HSRI_RUN)
#define N_SCORES (SCORE_RUN(TILE_ROWS) * (HSRI_GROUP_TOKENS / HSRI_RUN))
#define QUERY_STRIDE(d) ((hsri_div_up(d, HSRI_RUN) | 1) * HSRI_RUN)
#define N_TILES (HSRI_ATTEND_MAX_QUERIES / TILE_ROWS)

_Static_assert(N_TILES * N_SCORES + HSRI_ATTEND_MAX_QUERIES * (HSRI_ATTEND_MAX_HEAD_DIM + HSRI_RUN) / 2 <= HSRI_ATTEND_SCRATCH,
               "the scratch holds the scores of all queries, and the queries as bf16");

static inline uint32_t most_of(const uint32_t *v, uint32_t n)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < n; i++) {
        most = v[i] > most ? v[i] : most;
    }
    return most;
}

static inline uint32_t least_of(const uint32_t *v, uint32_t n)
{
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < n; i++) {
        least = v[i] < least ? v[i] : least;
    }
    return least;
}

/* The queries of a call, in tiles of `rows` rows; the last tile may overlap the one before, with the same results. */
typedef struct query_tiles {
    uint32_t n, rows, n_tiles;
} query_tiles;

static query_tiles query_tiles_of(uint32_t n)
{
    uint32_t n_tiles = (uint32_t)hsri_div_up(n, TILE_ROWS);
    return (query_tiles) { n, (uint32_t)hsri_div_up(n, n_tiles), n_tiles };
}

static uint32_t query0(const query_tiles *q, uint32_t tile)
{
    return (uint32_t)hsri_min((uint64_t)tile * q->rows, q->n - q->rows);
}

/* Where a tile of keys or values is. */
typedef struct weight_tile {
    const uint8_t *at;
    size_t stride;
} weight_tile;

/* n_tiles x 2 tiles of sums += a run: each tile that is loaded is used twice. */
INLINE void multiply_run(uint32_t n_tiles, const void *input0, const void *input1, size_t input_stride, weight_tile w0, weight_tile w1)
{
    TILE_LOAD(6, w0.at, w0.stride);
    TILE_LOAD(4, input0, input_stride);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, w1.at, w1.stride);
    TILE_MULTIPLY(1, 4, 7);
    if (n_tiles == 2) {
        TILE_LOAD(5, input1, input_stride);
        TILE_MULTIPLY(2, 5, 6);
        TILE_MULTIPLY(3, 5, 7);
    }
}

INLINE void zero_sums(uint32_t n_tiles)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (n_tiles == 2) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
}

/* All queries as bf16, zeros behind the last component, where the scratch has no scores. */
static const uint16_t *round_queries(const hsri_attend_args *a)
{
    uint16_t *rounded = (uint16_t *)(a->scratch + N_TILES * N_SCORES), *out = rounded;
    for (uint32_t i = 0; i < a->n_queries; i++, out += QUERY_STRIDE(a->head_dim)) {
        for (uint32_t j = 0; j < hsri_round_up(a->head_dim, HSRI_RUN); j += 16) {
            uint32_t left = a->head_dim > j ? a->head_dim - j : 0;
            __m512 v = _mm512_maskz_loadu_ps(lanes(left), a->queries[i] + (left > 0 ? j : 0));
            _mm256_storeu_si256((__m256i *)(out + j), (__m256i)_mm512_cvtneps_pbh(v));
        }
    }
    return rounded;
}

/* The keys of a page. The lines of a last run of fewer than 32 components are in `rest`, with zeros behind them: in the page they
 * are followed by the values. */
typedef struct page_keys {
    const uint8_t *at, *rest;
    uint32_t whole;   /* components in whole runs */
} page_keys;

INLINE weight_tile keys_at(const page_keys *k, uint32_t j, uint32_t token)
{
    const size_t line = HSRI_PAGE_TOKENS * 4;
    return (weight_tile) { (j < k->whole ? k->at + j / 2 * line : k->rest) + token * 4, line };
}

/* What becomes of the scores of a query. */
typedef struct softmax_state {
    __m512 largest;   /* of each lane, unscaled */
    __m512 sum;       /* of weights, of each lane */
    float top;        /* maximum times log2(e) */
} softmax_state;

/* The largest of a tile's scores of 32 tokens from t on. A NaN never becomes the maximum. */
static void take_largest(const hsri_attend_args *a, uint32_t query, uint32_t rows, uint32_t t, const float *scores, softmax_state *states)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    for (uint32_t r = 0; r < rows; r++, scores += HSRI_RUN) {
        uint32_t visible = a->visible[query + r], left = visible > t ? visible - t : 0;
        __m512 low = _mm512_load_ps(scores), high = _mm512_load_ps(scores + 16);
        if (left < HSRI_RUN) {
            low = _mm512_mask_mov_ps(lowest, lanes(left), low);
            high = _mm512_mask_mov_ps(lowest, left > 16 ? lanes(left - 16) : 0, high);
        }
        /* the second operand is taken where the first is NaN */
        states[r].largest = _mm512_max_ps(high, _mm512_max_ps(low, states[r].largest));
    }
}

/* A tile's scores of 32 tokens into bf16 weights exp(scale score - max), zeros for hidden tokens, in place: the weights of row r lie
 * over the scores of rows before it, or its own. The sums are of rounded weights, so that rounding does not move the mean of
 * the values; pairs are added to them at a time. The weight of a NaN is NaN, and so are the sum and the output. */
static void take_weights(const hsri_attend_args *a, uint32_t query, uint32_t rows, uint32_t t, float *scores, softmax_state *states)
{
    const __m512 slope = _mm512_mul_ps(_mm512_set1_ps(a->scale), _mm512_set1_ps(0x1.715476p+0f));
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    float *weights = scores;
    for (uint32_t r = 0; r < rows; r++, scores += HSRI_RUN, weights += HSRI_RUN / 2) {
        uint32_t visible = a->visible[query + r], left = visible > t ? visible - t : 0;
        __m512 top = _mm512_set1_ps(states[r].top);
        __m512 low = exp2_near(_mm512_fmsub_ps(_mm512_load_ps(scores), slope, top));
        __m512 high = exp2_near(_mm512_fmsub_ps(_mm512_load_ps(scores + 16), slope, top));
        if (left < HSRI_RUN) {
            low = _mm512_maskz_mov_ps(lanes(left), low);
            high = _mm512_maskz_mov_ps(left > 16 ? lanes(left - 16) : 0, high);
        }
        __m512i w = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_store_si512(weights, w);
        __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), odd = _mm512_castsi512_ps(_mm512_and_si512(w, upper));
        states[r].sum = _mm512_add_ps(states[r].sum, _mm512_add_ps(even, odd));
    }
}

/* Scores of a tile of queries and 32 tokens, in tiles c0 and c1 of sums. */
#define SCORE(c0, c1, query) \
    do { \
        TILE_ZERO(c0); \
        TILE_ZERO(c1); \
        for (uint32_t j_ = 0; j_ < a->head_dim; j_ += HSRI_RUN) { \
            weight_tile w0_ = keys_at(&keys, j_, in.t % HSRI_PAGE_TOKENS), w1_ = keys_at(&keys, j_, in.t % HSRI_PAGE_TOKENS + 16); \
            TILE_LOAD(4, query + j_, QUERY_STRIDE(a->head_dim) * sizeof(uint16_t)); \
            TILE_LOAD(6, w0_.at, w0_.stride); \
            TILE_MULTIPLY(c0, 4, 6); \
            TILE_LOAD(7, w1_.at, w1_.stride); \
            TILE_MULTIPLY(c1, 4, 7); \
        } \
    } while (0)

/* A step scores a tile of queries and 32 tokens from t on. */
typedef struct score_step {
    uint32_t tile, t;
} score_step;

INLINE void next_step(const query_tiles *q, score_step *s)
{
    if (++s->tile == q->n_tiles) {
        s->tile = 0;
        s->t += HSRI_RUN;
    }
}

static float *scores_of(const hsri_attend_args *a, const query_tiles *q, const score_step *s)
{
    return a->scratch + s->tile * N_SCORES + s->t / HSRI_RUN * SCORE_RUN(q->rows);
}

/* One step of the pipeline in score_queries: behind a step's multiplications come the stores of the step before, whose sums are ready by
 * then, and behind them the maxima of the step before that, whose scores have arrived in memory. */
#define SCORE_STEP(c0, c1, d0, d1) \
    if (in.t < most) { \
        if (in.t % HSRI_PAGE_TOKENS == 0 && in.tile == 0) { \
            keys.at = a->pages[in.t / HSRI_PAGE_TOKENS] + HSRI_PAGE_HEADER_BYTES; \
            memcpy(rest, keys.at + keys.whole / 2 * sizeof rest[0], (a->head_dim - keys.whole) / 2 * sizeof rest[0]); \
        } \
        SCORE(c0, c1, queries + query0(q, in.tile) * QUERY_STRIDE(a->head_dim)); \
        next_step(q, &in); \
    } \
    if (step >= 1 && middle.t < most) { \
        float *scores = scores_of(a, q, &middle); \
        TILE_STORE(d0, scores, HSRI_RUN * sizeof(float)); \
        TILE_STORE(d1, scores + 16, HSRI_RUN * sizeof(float)); \
        next_step(q, &middle); \
    } \
    if (step >= 2) { \
        take_largest(a, query0(q, out.tile), q->rows, out.t, scores_of(a, q, &out), states + query0(q, out.tile)); \
        next_step(q, &out); \
        if (out.t >= most) { \
            return; \
        } \
    } \
    step++;

/* Unscaled scores of all queries and the first `most` tokens, at least one, and their maxima. Those of hidden tokens are garbage. */
static void score_queries(const hsri_attend_args *a, const query_tiles *q, uint32_t most, softmax_state *states)
{
    _Alignas(64) uint8_t rest[TILE_ROWS][HSRI_PAGE_TOKENS * 4];
    const uint16_t *queries = round_queries(a);
    page_keys keys = { NULL, rest[0], a->head_dim / HSRI_RUN * HSRI_RUN };
    score_step in = { 0, 0 }, middle = in, out = in;
    memset(rest, 0, sizeof rest);
    for (uint32_t step = 0;;) {
        SCORE_STEP(0, 1, 2, 3)
        SCORE_STEP(2, 3, 0, 1)
    }
}

/* Scores of a tile into weights; gives max and sum of each query. */
static void softmax_tile(const hsri_attend_args *a, const query_tiles *q, uint32_t tile, uint32_t most, const softmax_state *found)
{
    softmax_state states[TILE_ROWS];
    uint32_t query = query0(q, tile);
    for (uint32_t r = 0; r < q->rows; r++) {
        /* the factor, being positive, can wait until here */
        float max = _mm512_reduce_max_ps(found[query + r].largest) * a->scale;
        a->partials[query + r][0] = max;
        states[r] = (softmax_state) { .sum = _mm512_setzero_ps(), .top = max * 0x1.715476p+0f };
    }
    for (score_step s = { tile, 0 }; s.t < most; s.t += HSRI_RUN) {
        take_weights(a, query, q->rows, s.t, scores_of(a, q, &s), states);
    }
    for (uint32_t r = 0; r < q->rows; r++) {
        a->partials[query + r][1] = _mm512_reduce_add_ps(states[r].sum);
    }
}

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
static weight_tile values_at(const hsri_attend_args *a, uint32_t t, uint32_t most, uint32_t j, uint8_t copy[TILE_BYTES])
{
    const size_t line = (size_t)a->head_dim * 4;
    const uint8_t *page = a->pages[t / HSRI_PAGE_TOKENS] + HSRI_PAGE_HEADER_BYTES;
    const uint8_t *at = page + (HSRI_PAGE_TOKENS + t % HSRI_PAGE_TOKENS) / 2 * line + (size_t)j * 4;
    if (most - t >= HSRI_RUN && a->head_dim >= j + 16) {
        return (weight_tile) { at, line };
    }
    __mmask16 columns = j < a->head_dim ? lanes(a->head_dim - j) : 0;
    for (uint32_t pair = 0; pair < 16; pair++) {
        uint32_t left = most - t > 2 * pair ? most - t - 2 * pair : 0;
        __m512i mask = _mm512_set1_epi32(left >= 2 ? -1 : left == 1 ? 0xffff : 0);
        __m512i v = _mm512_maskz_loadu_epi32(left > 0 ? columns : 0, at + pair * line);
        _mm512_store_si512(copy + (size_t)pair * 64, _mm512_and_si512(v, mask));
    }
    return (weight_tile) { copy, 64 };
}

/* 16 components of the output of a tile's queries. */
static void store_output(const hsri_attend_args *a, uint32_t query, uint32_t rows, uint32_t j, const float *sums)
{
    if (j >= a->head_dim) {
        return;
    }
    for (uint32_t r = 0; r < rows; r++) {
        /* a sum that was flushed to -0 becomes +0: whether more zeros were added to it must not show */
        __m512 v = _mm512_add_ps(_mm512_load_ps(sums + r * 16), _mm512_setzero_ps());
        _mm512_mask_storeu_ps(a->partials[query + r] + 2 + j, lanes(a->head_dim - j), v);
    }
}

/* Output of one or two tiles of queries over the first `most` tokens. */
INLINE void add_values(uint32_t n_tiles, const hsri_attend_args *a, const uint32_t query[2], uint32_t rows, const float *const *weights,
                       size_t run_step, uint32_t most)
{
    _Alignas(64) uint8_t copies[2][TILE_BYTES];
    _Alignas(64) float sums[TILE_ROWS * 16];
    for (uint32_t j = 0; j < a->head_dim; j += 32) {
        zero_sums(n_tiles);
        for (uint32_t t = 0; t < most; t += HSRI_RUN) {
            size_t at = t / HSRI_RUN * run_step;
            weight_tile v0 = values_at(a, t, most, j, copies[0]), v1 = values_at(a, t, most, j + 16, copies[1]);
            multiply_run(n_tiles, weights[0] + at, n_tiles == 2 ? weights[1] + at : NULL, HSRI_RUN * 2, v0, v1);
        }
        TILE_STORE(0, sums, 64);
        store_output(a, query[0], rows, j, sums);
        TILE_STORE(1, sums, 64);
        store_output(a, query[0], rows, j + 16, sums);
        if (n_tiles == 2) {
            TILE_STORE(2, sums, 64);
            store_output(a, query[1], rows, j, sums);
            TILE_STORE(3, sums, 64);
            store_output(a, query[1], rows, j + 16, sums);
        }
    }
}

/* Where queries do not see the same tokens, those that see less have weights of zero for the rest, which changes nothing as long as
 * the values there are finite. If they are not, each query goes alone, and sees no value behind its last token. */
static void add_values_of_tiles(const hsri_attend_args *a, const query_tiles *q, uint32_t tile, uint32_t n_tiles)
{
    uint32_t query[2] = { query0(q, tile), query0(q, tile + n_tiles - 1) }, n = query[1] + q->rows - query[0];
    const float *weights[2] = { a->scratch + tile * N_SCORES, a->scratch + (tile + n_tiles - 1) * N_SCORES };
    uint32_t most = most_of(a->visible + query[0], n), least = least_of(a->visible + query[0], n);
    if (values_finite(a, least, most)) {
        if (n_tiles == 2) {
            add_values(2, a, query, q->rows, weights, SCORE_RUN(q->rows), most);
        } else {
            add_values(1, a, query, q->rows, weights, SCORE_RUN(q->rows), most);
        }
        return;
    }
    tiles_configure(INPUT_TILES, 1);
    for (uint32_t i = 0; i < n_tiles * q->rows; i++) {
        uint32_t one[2] = { query[i / q->rows] + i % q->rows };
        const float *of_one[2] = { weights[i / q->rows] + i % q->rows * (HSRI_RUN / 2), NULL };
        add_values(1, a, one, 1, of_one, SCORE_RUN(q->rows), a->visible[one[0]]);
    }
    tiles_configure(INPUT_TILES, q->rows);
}

static void attend_bf16(const hsri_attend_args *a)
{
    softmax_state states[HSRI_ATTEND_MAX_QUERIES];
    query_tiles q = query_tiles_of(a->n_queries);
    uint32_t most = most_of(a->visible, a->n_queries);
    for (uint32_t i = 0; i < a->n_queries; i++) {
        states[i].largest = _mm512_set1_ps(-INFINITY);
    }
    tiles_configure(INPUT_TILES, q.rows);
    if (most > 0) {
        score_queries(a, &q, most, states);
    }
    for (uint32_t tile = 0; tile < q.n_tiles; tile++) {
        softmax_tile(a, &q, tile, most, states);
    }
    for (uint32_t tile = 0; tile < q.n_tiles; tile += 2) {
        add_values_of_tiles(a, &q, tile, q.n_tiles - tile >= 2 ? 2 : 1);
    }
    tiles_release();
}

void hsri_kernels_fill_amx(hsri_kernels *k)
{
    k->linear[HSRI_DTYPE_BF16] = linear_bf16;
    k->linear[HSRI_DTYPE_Q8] = linear_q8;
    k->linear[HSRI_DTYPE_Q4] = linear_q4;
    k->prepare[HSRI_DTYPE_BF16] = prepare;
    k->prepare[HSRI_DTYPE_Q8] = prepare;
    k->prepare[HSRI_DTYPE_Q4] = prepare;
    k->attend[HSRI_KV_TYPE_BF16] = attend_bf16;
}
