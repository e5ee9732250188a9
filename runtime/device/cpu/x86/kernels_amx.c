/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: packed weights, multiplied in tiles. Inputs and q8 and q4 weights are rounded to bf16.
 *
 * A tile register holds 16 rows of 64 bytes. One instruction, TDPBF16PS, multiplies a tile of inputs [rows][32 k] with a tile of
 * weights [16 k/2][16 n][2 k], which is a run of a panel, and adds the product to a tile of sums [rows][16 n]: an even and an
 * odd chain of FMAs from zero, added, then added to what was there. This is the order of docs/model-file.md, with one
 * difference: numbers below 2^-126 count as zero, on the way in and on the way out. A row's sums do not depend on the other
 * rows of its tile, so one code serves every number of rows; it only takes tiles of fewer rows.
 *
 * Tiles are set up and released inside each kernel call: a thread that is not in one has no tile state to be saved. */
#include <immintrin.h>
#include <stdbool.h>

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
            _mm512_storeu_si512(prepared + run * (HSRI_RUN / 2), (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* silu(gate) up of the first n of a panel, right to 2^-13: rounding the result moves it by up to 2^-8. exp and division in full
 * cost more than all else here. */
INLINE __m512 silu_near(const float *gate, uint32_t n)
{
    __m512 g = _mm512_maskz_loadu_ps(lanes(n), gate), up = _mm512_maskz_loadu_ps(lanes(n), gate + HSRI_PANEL);
    __m512 e = exp2_near(_mm512_mul_ps(g, _mm512_set1_ps(-0x1.715476p+0f)));
    return _mm512_mul_ps(_mm512_mul_ps(g, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e))), up);
}

static void silu_prepare(const float *in, uint64_t in_stride, uint32_t n_rows, uint32_t n, float *prepared, uint64_t stride)
{
    for (uint32_t i = 0; i < n_rows; i++, in += in_stride, prepared += stride) {
        for (uint32_t at = 0; at < n; at += HSRI_RUN) {
            uint32_t left = n - at;
            const float *gate = in + 2 * at;
            __m512 low = silu_near(gate, left), high = left > 16 ? silu_near(gate + 2 * HSRI_PANEL, left - 16) : _mm512_setzero_ps();
            _mm512_storeu_si512(prepared + at / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
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

/* Runs [run0, run0 + n_runs) of one or two panels. */
typedef struct block {
    uint8_t *unpacked;       /* NULL: the codes are bf16 */
    const uint8_t *weights;  /* bf16 */
    size_t panel_bytes;      /* from one panel to the other */
    uint32_t panel, n_panels, run0, n_runs;
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

/* Most runs of two panels that are unpacked at a time and stay in the first-level cache while all rows use them. Fewer would make sums
 * leave their tiles more often. */
#define BLOCK_RUNS 20u
/* Runs are unpacked this many steps before they are multiplied. */
#define UNPACK_AHEAD 3u
#define RING 4u

INLINE void unpack_block_run(hsri_dtype dtype, const linear_job *job, const block *b, uint32_t panel, uint32_t run)
{
    uint64_t at = (uint64_t)(b->panel + panel) * job->w->n_runs + b->run0 + run;
    unpack_run(dtype, job->w, at, b->unpacked + panel * b->panel_bytes + (size_t)run * TILE_BYTES);
}

static __attribute__((noinline)) void unpack_block_run_q8(const linear_job *job, const block *b, uint32_t panel, uint32_t run)
{
    unpack_block_run(HSRI_DTYPE_Q8, job, b, panel, run);
}

static __attribute__((noinline)) void unpack_block_run_q4(const linear_job *job, const block *b, uint32_t panel, uint32_t run)
{
    unpack_block_run(HSRI_DTYPE_Q4, job, b, panel, run);
}

/* Unpacks a run of a block's panel, if there is such a run, and anything to be unpacked. */
INLINE void unpack_beside(hsri_dtype dtype, const linear_job *job, const block *b, uint32_t panel, uint32_t run)
{
    if (dtype == HSRI_DTYPE_BF16 || b == NULL || panel >= b->n_panels || run >= b->n_runs) {
        return;
    }
    if (dtype == HSRI_DTYPE_Q8) {
        unpack_block_run_q8(job, b, panel, run);
    } else {
        unpack_block_run_q4(job, b, panel, run);
    }
}

/* Asks for the lines that a row of sums will be stored to. */
INLINE void fetch_sums(const float *out, uint32_t n_panels)
{
    __asm__ volatile("prefetchw (%0)" : : "r"(out));
    if (n_panels == 2) {
        __asm__ volatile("prefetchw (%0)" : : "r"(out + HSRI_PANEL));
    }
}

/* n_tiles x n_panels tiles of sums, 1 or 2 each: every tile that is loaded is used up to twice.
 *
 * Four multiplications take 64 cycles, in which the rest of the core has little to do. Meanwhile codes are unpacked: with the block's
 * first rows its own second panel (`fresh`), with its last ones the first panel of the next block, into the place of runs that have had
 * their last use and so are in the first-level cache. And lines are asked for that sums will be stored to. */
INLINE void multiply_tiles(hsri_dtype dtype, const linear_job *job, uint32_t tile, uint32_t n_tiles, uint32_t n_panels, const block *b,
                           const block *fresh, const block *next)
{
    _Alignas(64) float sums[TILE_ROWS * HSRI_PANEL];
    size_t stride = job->x_stride * sizeof(float);
    const uint8_t *weights = b->weights;
    const float *x0 = job->x + tile_row0(job, tile) * job->x_stride + b->run0 * (HSRI_RUN / 2);
    const float *x1 = job->x + tile_row0(job, tile + n_tiles - 1) * job->x_stride + b->run0 * (HSRI_RUN / 2);
    const float *out0 = job->out + tile_row0(job, tile) * job->out_stride + b->panel * HSRI_PANEL;
    const float *out1 = job->out + tile_row0(job, tile + n_tiles - 1) * job->out_stride + b->panel * HSRI_PANEL;
    for (uint32_t run = 0; fresh != NULL && run < UNPACK_AHEAD; run++) {
        unpack_beside(dtype, job, fresh, 1, run);
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
        unpack_beside(dtype, job, fresh, 1, run + UNPACK_AHEAD);
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
        if (run < job->tile_rows) {
            fetch_sums(out0 + run * job->out_stride, n_panels);
            if (n_tiles == 2) {
                fetch_sums(out1 + run * job->out_stride, n_panels);
            }
        }
        unpack_beside(dtype, job, next, 0, run);
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

/* All rows with a block, whose first panel is unpacked; then so is that of the next block. */
INLINE void multiply_block(hsri_dtype dtype, const linear_job *job, const block *b, const block *next)
{
    for (uint32_t tile = 0; tile < job->n_tiles; tile += 2) {
        const block *fresh = tile == 0 ? b : NULL, *after = tile + 2 >= job->n_tiles ? next : NULL;
        bool pair = tile + 1 < job->n_tiles;
        if (pair && b->n_panels == 2) {
            multiply_tiles(dtype, job, tile, 2, 2, b, fresh, after);
        } else if (pair) {
            multiply_tiles(dtype, job, tile, 2, 1, b, fresh, after);
        } else if (b->n_panels == 2) {
            multiply_tiles(dtype, job, tile, 1, 2, b, fresh, after);
        } else {
            multiply_tiles(dtype, job, tile, 1, 1, b, fresh, after);
        }
    }
}

/* Size of the next part when `left` things are taken in parts of at most `most`: as even as possible. */
static uint32_t next_part(uint32_t left, uint32_t most)
{
    return (uint32_t)hsri_div_up(left, hsri_div_up(left, most));
}

/* From a block of panels [panel0, panel1) to the next, which has no more runs. The inputs of a block's runs serve all panels before those
 * of the next are touched, so that they stay in the second-level cache even where whole rows would not. False at the end. */
static bool to_next_block(const linear_job *job, uint32_t panel0, uint32_t panel1, block *b)
{
    uint32_t n_runs = job->w->n_runs;
    b->panel += b->n_panels;
    if (b->panel == panel1) {
        b->panel = panel0;
        b->run0 += b->n_runs;
        if (b->run0 == n_runs) {
            return false;
        }
        b->n_runs = next_part(n_runs - b->run0, BLOCK_RUNS);
    }
    b->n_panels = (uint32_t)hsri_min(2, panel1 - b->panel);
    b->first = b->run0 == 0;
    b->last = b->run0 + b->n_runs == n_runs;
    if (b->unpacked == NULL) {
        b->weights = job->w->codes + ((uint64_t)b->panel * n_runs + b->run0) * TILE_BYTES;
    }
    return true;
}

/* Many rows: blocks are unpacked once for all of them. */
INLINE void linear_many_rows(hsri_dtype dtype, const linear_job *job, uint32_t panel0, uint32_t panel1)
{
    _Alignas(64) uint8_t unpacked[2 * BLOCK_RUNS * TILE_BYTES];
    uint32_t n_runs = job->w->n_runs;
    bool codes = dtype != HSRI_DTYPE_BF16;
    block next = { .unpacked = codes ? unpacked : NULL, .weights = unpacked, .panel = panel0, .n_runs = next_part(n_runs, BLOCK_RUNS),
                   .panel_bytes = (codes ? BLOCK_RUNS : n_runs) * (size_t)TILE_BYTES, .once = !codes && job->n_tiles <= 2 };
    bool more = to_next_block(job, panel0, panel1, &next);
    for (uint32_t run = 0; more && run < next.n_runs; run++) {
        unpack_beside(dtype, job, &next, 0, run);
    }
    while (more) {
        block b = next;
        more = to_next_block(job, panel0, panel1, &next);
        multiply_block(dtype, job, &b, more ? &next : NULL);
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
    if (n_rows == 0 || panel0 == panel1) {
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

void hsri_kernels_fill_amx(hsri_kernels *k)
{
    k->linear[HSRI_DTYPE_BF16] = linear_bf16;
    k->linear[HSRI_DTYPE_Q8] = linear_q8;
    k->linear[HSRI_DTYPE_Q4] = linear_q4;
    k->prepare[HSRI_DTYPE_BF16] = prepare;
    k->silu_prepare[HSRI_DTYPE_BF16] = silu_prepare;
    k->prepare[HSRI_DTYPE_Q8] = prepare;
    k->silu_prepare[HSRI_DTYPE_Q8] = silu_prepare;
    k->prepare[HSRI_DTYPE_Q4] = prepare;
    k->silu_prepare[HSRI_DTYPE_Q4] = silu_prepare;
    k->attend[HSRI_KV_TYPE_BF16] = hsri_attend_bf16_amx;
}
