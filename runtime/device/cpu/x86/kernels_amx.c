/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: packed weights and bf16 pages, multiplied in tiles. Inputs (and queries, and softmax weights) are rounded to bf16.
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

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* ---- tiles ---- */

#define TILE_ROWS 16u
#define TILE_BYTES 1024u

/* Written out, because not every compiler's intrinsics say that they read memory. Tile numbers are literals. */
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_LOAD(tile, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(at), "r"((size_t)(stride)) : "memory")
#define TILE_STORE(tile, at, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(at), "r"((size_t)(stride)) : "memory")
/* sums += inputs * weights */
#define TILE_MULTIPLY(sums, inputs, weights) \
    __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #sums : :)

/* The operand of LDTILECFG. */
typedef struct tile_config {
    uint8_t  palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t  n_rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "a tile configuration has its size");

/* All kernels divide the eight tiles in the same way: sums are tiles 0 to 3 and inputs 4 and 5, of `rows` rows; weights 6 and 7. */
static void tiles_configure(uint32_t rows)
{
    tile_config config = { .palette = 1 };
    for (uint32_t i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = i < 6 ? (uint8_t)rows : TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

static void tiles_release(void) { __asm__ volatile("tilerelease" : :); }

static inline __mmask16 lanes(uint32_t n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1u); }

/* ---- inputs of linear ---- */

/* Sum of the 32 inputs of a run as a tree of halves. */
static inline float run_input_sum(__m512 low, __m512 high)
{
    __m512 v = _mm512_add_ps(low, high);
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

static inline __m512 from_bf16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

/* A prepared row: n_runs lines of 32 bf16 inputs, zeros behind the last; then the sum of each run's inputs, for q4. */
static void prepare(const float *x, uint64_t x_stride, uint32_t n_rows, uint32_t k, float *prepared)
{
    uint32_t n_runs = (uint32_t)hsri_div_up(k, HSRI_RUN);
    uint64_t stride = hsri_prepared_stride(k);
    for (uint32_t i = 0; i < n_rows; i++, x += x_stride, prepared += stride) {
        for (uint32_t run = 0; run < n_runs; run++) {
            uint32_t n = k - run * HSRI_RUN;
            __m512 low = _mm512_maskz_loadu_ps(lanes(n), x + run * HSRI_RUN);
            __m512 high = _mm512_maskz_loadu_ps(n > 16 ? lanes(n - 16) : 0, x + run * HSRI_RUN + (n > 16 ? 16 : 0));
            __m256i bf16_low = (__m256i)_mm512_cvtneps_pbh(low), bf16_high = (__m256i)_mm512_cvtneps_pbh(high);
            float *line = prepared + run * (HSRI_RUN / 2);
            _mm256_storeu_si256((__m256i *)line, bf16_low);
            _mm256_storeu_si256((__m256i *)(line + 8), bf16_high);
            prepared[(size_t)n_runs * (HSRI_RUN / 2) + run] = run_input_sum(from_bf16(bf16_low), from_bf16(bf16_high));
        }
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

/* The largest power of two that fits. */
static uint32_t rows_of_tile(uint32_t n_rows)
{
    return n_rows >= TILE_ROWS ? TILE_ROWS : 1u << (31 - (uint32_t)__builtin_clz(n_rows));
}

/* ---- linear, bf16 weights ---- */

/* How far ahead weights are fetched when they are used once. */
#define FETCH_AHEAD 4096u

INLINE void fetch(const uint8_t *at, uint32_t bytes)
{
    for (uint32_t b = 0; b < bytes; b += 64) {
        _mm_prefetch((const char *)((uintptr_t)at + FETCH_AHEAD + b), _MM_HINT_T0);
    }
}

static void store_sums(const linear_job *job, uint32_t tile, uint32_t panel, const float *sums)
{
    uint32_t n = panel * HSRI_PANEL;
    __mmask16 columns = lanes(job->w->n - n);
    __m512 bias = job->bias != NULL ? _mm512_maskz_loadu_ps(columns, job->bias + n) : _mm512_setzero_ps();
    float *out = job->out + tile_row0(job, tile) * job->out_stride + n;
    for (uint32_t r = 0; r < job->tile_rows; r++) {
        __m512 v = _mm512_load_ps(sums + r * HSRI_PANEL);
        _mm512_mask_storeu_ps(out + r * job->out_stride, columns, job->bias != NULL ? _mm512_add_ps(v, bias) : v);
    }
}

/* n_tiles x n_panels tiles of sums, 1 or 2 each. */
INLINE void multiply_bf16(const linear_job *job, uint32_t tile, uint32_t n_tiles, uint32_t panel, uint32_t n_panels, bool once)
{
    _Alignas(64) float sums[TILE_ROWS * HSRI_PANEL];
    uint32_t n_runs = job->w->n_runs;
    size_t stride = job->x_stride * sizeof(float), panel_bytes = (size_t)n_runs * TILE_BYTES;
    const uint8_t *codes = job->w->codes + panel * panel_bytes;
    const float *x0 = job->x + tile_row0(job, tile) * job->x_stride;
    const float *x1 = job->x + tile_row0(job, tile + n_tiles - 1) * job->x_stride;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (uint32_t run = 0; run < n_runs; run++) {
        if (once) {
            fetch(codes, TILE_BYTES);
        }
        TILE_LOAD(6, codes, 64);
        TILE_LOAD(4, x0, stride);
        TILE_MULTIPLY(0, 4, 6);
        if (n_panels == 2) {
            if (once) {
                fetch(codes + panel_bytes, TILE_BYTES);
            }
            TILE_LOAD(7, codes + panel_bytes, 64);
            TILE_MULTIPLY(1, 4, 7);
        }
        if (n_tiles == 2) {
            TILE_LOAD(5, x1, stride);
            TILE_MULTIPLY(2, 5, 6);
            if (n_panels == 2) {
                TILE_MULTIPLY(3, 5, 7);
            }
        }
        codes += TILE_BYTES;
        x0 += HSRI_RUN / 2;
        x1 += HSRI_RUN / 2;
    }
    TILE_STORE(0, sums, 64);
    store_sums(job, tile, panel, sums);
    if (n_panels == 2) {
        TILE_STORE(1, sums, 64);
        store_sums(job, tile, panel + 1, sums);
    }
    if (n_tiles == 2) {
        TILE_STORE(2, sums, 64);
        store_sums(job, tile + 1, panel, sums);
        if (n_panels == 2) {
            TILE_STORE(3, sums, 64);
            store_sums(job, tile + 1, panel + 1, sums);
        }
    }
}

static void linear_bf16_panels(const linear_job *job, uint32_t panel, uint32_t n_panels)
{
    for (uint32_t tile = 0; tile < job->n_tiles; tile += 2) {
        bool pair = tile + 1 < job->n_tiles, once = job->n_tiles <= 2;
        if (pair && n_panels == 2) {
            multiply_bf16(job, tile, 2, panel, 2, once);
        } else if (pair) {
            multiply_bf16(job, tile, 2, panel, 1, once);
        } else if (n_panels == 2) {
            multiply_bf16(job, tile, 1, panel, 2, once);
        } else {
            multiply_bf16(job, tile, 1, panel, 1, once);
        }
    }
}

/* ---- linear, q8 and q4: codes become bf16 in memory; the sums of each run leave their tile to be scaled ---- */

/* Runs whose unpacked codes stay in the first-level cache while all rows use them. For few rows the codes are what is waited for:
 * short chunks keep memory busy while the tiles work. */
#define CHUNK_RUNS 32u
#define CHUNK_RUNS_FEW 4u

/* The codes of q8 times 2^24: a byte at the top of a dword is converted as it is. Scales are divided by the same power, so that
 * results are those of the codes themselves, as long as inputs are below 2^90. */
INLINE void unpack_run_q8(const uint8_t *codes, uint8_t *out)
{
    const __m512i byte1 = _mm512_set4_epi32(0x0dffffff, 0x09ffffff, 0x05ffffff, 0x01ffffff);
    const __m512i byte2 = _mm512_set4_epi32(0x0effffff, 0x0affffff, 0x06ffffff, 0x02ffffff);
    UNROLL
    for (uint32_t line = 0; line < 8; line++, codes += 64, out += 128) {
        __m512i v = _mm512_loadu_si512(codes);
        __m512i c0 = (__m512i)_mm512_cvtepi32_ps(_mm512_slli_epi32(v, 24));
        __m512i c1 = (__m512i)_mm512_cvtepi32_ps(_mm512_shuffle_epi8(v, byte1));
        __m512i c2 = (__m512i)_mm512_cvtepi32_ps(_mm512_shuffle_epi8(v, byte2));
        __m512i c3 = (__m512i)_mm512_cvtepi32_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xff000000u)));
        _mm512_store_si512(out, _mm512_or_si512(_mm512_srli_epi32(c0, 16), c1));
        _mm512_store_si512(out + 64, _mm512_or_si512(_mm512_srli_epi32(c2, 16), c3));
    }
}

/* The codes of q4. The table has them twice: a look-up takes five bits, and the fifth is another nibble's. */
INLINE void unpack_run_q4(const uint8_t *codes, uint8_t *out)
{
    static const _Alignas(64) uint16_t numbers[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    };
    const __m512i table = _mm512_load_si512(numbers);
    const __m512i bytes01 = _mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000);
    const __m512i bytes23 = _mm512_set4_epi32(0x0f0f0e0e, 0x0b0b0a0a, 0x07070606, 0x03030202);
    UNROLL
    for (uint32_t line = 0; line < 4; line++, codes += 64, out += 256) {
        __m512i v = _mm512_loadu_si512(codes);
        __m512i v01 = _mm512_shuffle_epi8(v, bytes01), v23 = _mm512_shuffle_epi8(v, bytes23);
        _mm512_store_si512(out, _mm512_permutexvar_epi16(v01, table));
        _mm512_store_si512(out + 64, _mm512_permutexvar_epi16(v23, table));
        _mm512_store_si512(out + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(v01, 4), table));
        _mm512_store_si512(out + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(v23, 4), table));
    }
}

INLINE uint32_t run_bytes(hsri_dtype dtype) { return dtype == HSRI_DTYPE_Q8 ? 512 : 256; }
/* Bytes of scales (and minimums) of one run of a panel. */
INLINE uint32_t scale_bytes(hsri_dtype dtype) { return dtype == HSRI_DTYPE_Q8 ? HSRI_PANEL * 2 : HSRI_PANEL * 4; }

/* Up to CHUNK_RUNS runs of a panel. */
typedef struct chunk {
    const uint8_t *weights;   /* unpacked, TILE_BYTES each */
    const uint8_t *scales;    /* of the first run */
    uint32_t run0, n_runs;
} chunk;

INLINE __m512 load_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

INLINE void add_run(hsri_dtype dtype, uint32_t rows, const float *sums, const uint8_t *scales, const float *input_sums, uint64_t x_stride,
                    __m512 acc[TILE_ROWS])
{
    __m512 scale = load_f16(scales);
    if (dtype == HSRI_DTYPE_Q8) {
        scale = _mm512_mul_ps(scale, _mm512_set1_ps(0x1p-24f));
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        acc[r] = _mm512_fmadd_ps(scale, _mm512_load_ps(sums + r * HSRI_PANEL), acc[r]);
    }
    if (dtype == HSRI_DTYPE_Q4) {
        __m512 minimum = load_f16(scales + HSRI_PANEL * 2);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            acc[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(input_sums[r * x_stride]), acc[r]);
        }
    }
}

/* Run number `run` of the pipeline in multiply_chunk: sums of run - 4 leave tile t, which then starts on this run; sums of run - 5,
 * which have arrived in memory, are added up. A tile needs some 50 cycles from the multiplication to the store, and a tile in use
 * cannot be started anew, so four runs are under way at a time. */
#define STEP(t, inputs, codes, run) \
    if ((run) >= 4 && (run) - 4 < n_runs) { \
        TILE_STORE(t, sums[t], 64); \
    } \
    if ((run) < n_runs) { \
        TILE_ZERO(t); \
        TILE_LOAD(inputs, x + (run) * (HSRI_RUN / 2), stride); \
        TILE_LOAD(codes, c->weights + (run) * TILE_BYTES, 64); \
        TILE_MULTIPLY(t, inputs, codes); \
    } \
    if ((run) >= 5 && (run) - 5 < n_runs) { \
        add_run(dtype, rows, sums[(t + 3) % 4], c->scales + ((run) - 5) * scale_bytes(dtype), input_sums + (run) - 5, job->x_stride, acc); \
    }

/* One tile of rows and a chunk. */
INLINE void multiply_chunk(uint32_t rows, hsri_dtype dtype, const linear_job *job, uint32_t tile, uint32_t panel, const chunk *c)
{
    _Alignas(64) float sums[4][TILE_ROWS * HSRI_PANEL];
    uint32_t row0 = tile_row0(job, tile), done = tile * job->tile_rows - row0, n = panel * HSRI_PANEL, n_runs = c->n_runs;
    size_t stride = job->x_stride * sizeof(float);
    const float *row = job->x + row0 * job->x_stride, *x = row + c->run0 * (HSRI_RUN / 2);
    const float *input_sums = row + (size_t)job->w->n_runs * (HSRI_RUN / 2) + c->run0;
    float *out = job->out + row0 * job->out_stride + n;
    __mmask16 columns = lanes(job->w->n - n);
    __m512 acc[TILE_ROWS];
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        acc[r] = c->run0 == 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(columns, out + r * job->out_stride);
    }
    for (uint32_t run = 0; run < n_runs + 5; run += 4) {
        STEP(0, 4, 6, run)
        STEP(1, 5, 7, run + 1)
        STEP(2, 4, 6, run + 2)
        STEP(3, 5, 7, run + 3)
    }
    bool add_bias = job->bias != NULL && c->run0 + n_runs == job->w->n_runs;
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        /* what the tile before has stored is no longer the sum of earlier chunks, and must not be taken for it */
        if (r >= done) {
            __m512 v = add_bias ? _mm512_add_ps(acc[r], _mm512_maskz_loadu_ps(columns, job->bias + n)) : acc[r];
            _mm512_mask_storeu_ps(out + r * job->out_stride, columns, v);
        }
    }
}

INLINE void multiply_chunk_rows(hsri_dtype dtype, const linear_job *job, uint32_t tile, uint32_t panel, const chunk *c)
{
    switch (job->tile_rows) {
    case 1:  multiply_chunk(1, dtype, job, tile, panel, c); break;
    case 2:  multiply_chunk(2, dtype, job, tile, panel, c); break;
    case 4:  multiply_chunk(4, dtype, job, tile, panel, c); break;
    case 8:  multiply_chunk(8, dtype, job, tile, panel, c); break;
    default: multiply_chunk(16, dtype, job, tile, panel, c); break;
    }
}

INLINE void unpack(hsri_dtype dtype, const uint8_t *codes, uint32_t n_runs, uint8_t *out)
{
    for (uint32_t i = 0; i < n_runs; i++, codes += run_bytes(dtype), out += TILE_BYTES) {
        fetch(codes, run_bytes(dtype));
        if (dtype == HSRI_DTYPE_Q8) {
            unpack_run_q8(codes, out);
        } else {
            unpack_run_q4(codes, out);
        }
    }
}

INLINE void linear_codes_panel(hsri_dtype dtype, const linear_job *job, uint32_t panel)
{
    _Alignas(64) uint8_t unpacked[CHUNK_RUNS * TILE_BYTES];
    uint32_t n_runs = job->w->n_runs, chunk_runs = job->n_tiles == 1 ? CHUNK_RUNS_FEW : CHUNK_RUNS;
    for (uint32_t run = 0; run < n_runs; run += chunk_runs) {
        uint64_t at = (uint64_t)panel * n_runs + run;
        chunk c = { unpacked, job->w->tail + at * scale_bytes(dtype), run, (uint32_t)hsri_min(chunk_runs, n_runs - run) };
        unpack(dtype, job->w->codes + at * run_bytes(dtype), c.n_runs, unpacked);
        for (uint32_t tile = 0; tile < job->n_tiles; tile++) {
            multiply_chunk_rows(dtype, job, tile, panel, &c);
        }
    }
}

INLINE void linear_any(hsri_dtype dtype, const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride,
                       uint32_t n_rows, const float *bias, float *out, uint64_t out_stride)
{
    if (n_rows == 0) {
        return;
    }
    linear_job job = { w, x, x_stride, bias, out, out_stride, n_rows, rows_of_tile(n_rows), 0 };
    job.n_tiles = (uint32_t)hsri_div_up(n_rows, job.tile_rows);
    tiles_configure(job.tile_rows);
    for (uint32_t panel = panel0, n_panels; panel < panel1; panel += n_panels) {
        n_panels = dtype == HSRI_DTYPE_BF16 ? (uint32_t)hsri_min(2, panel1 - panel) : 1;
        if (dtype == HSRI_DTYPE_BF16) {
            linear_bf16_panels(&job, panel, n_panels);
        } else {
            linear_codes_panel(dtype, &job, panel);
        }
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

/* Scores of a tile of queries and 32 tokens, in tiles c0 and c1 of sums. What was in them is stored first: the multiplications of
 * one pair of tiles run while the other pair is stored. */
#define SCORE_STEP(c0, c1, pending, query, scores, keys, token) \
    do { \
        if (pending != NULL) { \
            TILE_STORE(c0, pending, HSRI_RUN * sizeof(float)); \
            TILE_STORE(c1, pending + 16, HSRI_RUN * sizeof(float)); \
        } \
        TILE_ZERO(c0); \
        TILE_ZERO(c1); \
        for (uint32_t j_ = 0; j_ < a->head_dim; j_ += HSRI_RUN) { \
            weight_tile w0_ = keys_at(keys, j_, token), w1_ = keys_at(keys, j_, (token) + 16); \
            TILE_LOAD(4, query + j_, QUERY_STRIDE(a->head_dim) * sizeof(uint16_t)); \
            TILE_LOAD(6, w0_.at, w0_.stride); \
            TILE_MULTIPLY(c0, 4, 6); \
            TILE_LOAD(7, w1_.at, w1_.stride); \
            TILE_MULTIPLY(c1, 4, 7); \
        } \
        pending = scores; \
    } while (0)

/* Unscaled scores of all queries and the first `most` tokens. Those of hidden tokens are garbage. */
static void score_queries(const hsri_attend_args *a, const query_tiles *q, uint32_t most)
{
    _Alignas(64) uint8_t rest[TILE_ROWS][HSRI_PAGE_TOKENS * 4];
    const uint16_t *queries = round_queries(a);
    float *pending0 = NULL, *pending1 = NULL;
    page_keys keys = { NULL, rest[0], a->head_dim / HSRI_RUN * HSRI_RUN };
    memset(rest, 0, sizeof rest);
    for (uint32_t t = 0, step = 0; t < most; t += HSRI_RUN) {
        uint32_t token = t % HSRI_PAGE_TOKENS;
        if (token == 0) {
            keys.at = a->pages[t / HSRI_PAGE_TOKENS] + HSRI_PAGE_HEADER_BYTES;
            memcpy(rest, keys.at + keys.whole / 2 * sizeof rest[0], (a->head_dim - keys.whole) / 2 * sizeof rest[0]);
        }
        for (uint32_t tile = 0; tile < q->n_tiles; tile++, step++) {
            const uint16_t *query = queries + query0(q, tile) * QUERY_STRIDE(a->head_dim);
            float *scores = a->scratch + tile * N_SCORES + t / HSRI_RUN * SCORE_RUN(q->rows);
            if (step % 2 == 0) {
                SCORE_STEP(0, 1, pending0, query, scores, &keys, token);
            } else {
                SCORE_STEP(2, 3, pending1, query, scores, &keys, token);
            }
        }
    }
    if (pending0 != NULL) {
        TILE_STORE(0, pending0, HSRI_RUN * sizeof(float));
        TILE_STORE(1, pending0 + 16, HSRI_RUN * sizeof(float));
    }
    if (pending1 != NULL) {
        TILE_STORE(2, pending1, HSRI_RUN * sizeof(float));
        TILE_STORE(3, pending1 + 16, HSRI_RUN * sizeof(float));
    }
}

/* 2^t: 2^floor(t) times a polynomial of the fraction, right to 3e-6. NaN stays NaN. */
INLINE __m512 exp2_near(__m512 t)
{
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0x1.bb0b0ap-7f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.aa4a66p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ee718ap-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62d1c4p-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.00002ap+0f));
    return _mm512_scalef_ps(p, t);
}

/* Chains of maxima and of sums that run side by side. */
#define SOFTMAX_STEP 4u

/* Scores of one query of a tile: those of token t are at + t % 32 + t / 32 * step. */
typedef struct score_row {
    float   *at;
    uint16_t *weights;
    uint32_t step;
} score_row;

INLINE __m512 scores_at(const score_row *row, uint32_t t) { return _mm512_load_ps(row->at + t / HSRI_RUN * row->step + t % HSRI_RUN); }

INLINE void store_weights(const score_row *row, uint32_t t, __m256i weights)
{
    _mm256_store_si256((__m256i *)(row->weights + t / HSRI_RUN * (2 * row->step) + t % HSRI_RUN), weights);
}

static float largest_score(const score_row *row, float scale, uint32_t visible)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(scale);
    __m512 largest[SOFTMAX_STEP] = { lowest, lowest, lowest, lowest };
    uint32_t t = 0;
    for (; t + SOFTMAX_STEP * 16 <= visible; t += SOFTMAX_STEP * 16) {
        UNROLL
        for (uint32_t i = 0; i < SOFTMAX_STEP; i++) {
            /* the second operand is taken where the first is NaN */
            largest[i] = _mm512_max_ps(_mm512_mul_ps(scores_at(row, t + i * 16), factor), largest[i]);
        }
    }
    for (; t < visible; t += 16) {
        __m512 v = _mm512_mul_ps(scores_at(row, t), factor);
        largest[0] = _mm512_max_ps(_mm512_mask_mov_ps(lowest, lanes(visible - t), v), largest[0]);
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3])));
}

/* Scores of one query into bf16 weights exp(scale score - max), in place, with zeros up to n_tokens; gives max and the sum of the
 * rounded weights, so that rounding does not move the mean of the values. A NaN score never becomes the maximum, but its weight is
 * NaN, and so are the sum and the output. */
static void softmax(const score_row *row, float scale, uint32_t visible, uint32_t n_tokens, float *max, float *sum)
{
    *max = largest_score(row, scale, visible);
    const __m512 log2e = _mm512_set1_ps(0x1.715476p+0f);
    const __m512 slope = _mm512_mul_ps(_mm512_set1_ps(scale), log2e), top = _mm512_mul_ps(_mm512_set1_ps(*max), log2e);
    __m512 total[SOFTMAX_STEP] = { _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps() };
    uint32_t t = 0;
    for (; t + SOFTMAX_STEP * 16 <= visible; t += SOFTMAX_STEP * 16) {
        UNROLL
        for (uint32_t i = 0; i < SOFTMAX_STEP; i++) {
            __m512 p = exp2_near(_mm512_fmsub_ps(scores_at(row, t + i * 16), slope, top));
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh(p);
            store_weights(row, t + i * 16, rounded);
            total[i] = _mm512_add_ps(total[i], from_bf16(rounded));
        }
    }
    for (; t < visible; t += 16) {
        __m512 p = exp2_near(_mm512_fmsub_ps(scores_at(row, t), slope, top));
        __m256i rounded = (__m256i)_mm512_maskz_cvtneps_pbh(lanes(visible - t), p);
        store_weights(row, t, rounded);
        total[0] = _mm512_add_ps(total[0], from_bf16(rounded));
    }
    for (; t < n_tokens; t += 16) {
        store_weights(row, t, _mm256_setzero_si256());
    }
    *sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(total[0], total[1]), _mm512_add_ps(total[2], total[3])));
}

/* Softmax of each query of a tile, in order: the weights of query r lie over the scores of queries before it, or its own. */
static void softmax_tile(const hsri_attend_args *a, const query_tiles *q, uint32_t tile, uint32_t n_tokens)
{
    uint32_t first = query0(q, tile);
    for (uint32_t r = 0; r < q->rows; r++) {
        float *scores = a->scratch + tile * N_SCORES;
        score_row row = { scores + r * HSRI_RUN, (uint16_t *)scores + r * HSRI_RUN, SCORE_RUN(q->rows) };
        float *partial = a->partials[first + r];
        softmax(&row, a->scale, a->visible[first + r], n_tokens, &partial[0], &partial[1]);
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
    tiles_configure(1);
    for (uint32_t i = 0; i < n_tiles * q->rows; i++) {
        uint32_t one[2] = { query[i / q->rows] + i % q->rows };
        const float *of_one[2] = { weights[i / q->rows] + i % q->rows * (HSRI_RUN / 2), NULL };
        add_values(1, a, one, 1, of_one, SCORE_RUN(q->rows), a->visible[one[0]]);
    }
    tiles_configure(q->rows);
}

static void attend_bf16(const hsri_attend_args *a)
{
    query_tiles q = query_tiles_of(a->n_queries);
    uint32_t most = most_of(a->visible, a->n_queries), n_tokens = (uint32_t)hsri_round_up(most, HSRI_RUN);
    tiles_configure(q.rows);
    score_queries(a, &q, most);
    for (uint32_t tile = 0; tile < q.n_tiles; tile++) {
        softmax_tile(a, &q, tile, n_tokens);
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
