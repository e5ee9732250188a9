/* SPDX-License-Identifier: Apache-2.0 */
/* The vector kernels, written once over `vec`: WIDTH floats. An instruction set's file defines the words and includes this.
 *
 * Linear layers and both halves of attention are one computation, run_sums(): up to 32 inputs of a few rows against
 * TILE_STRIPS strips of WIDTH outputs, with one chain of FMAs over the even and one over the odd inputs. Each output lane
 * sees the same operations in the same order whatever the number of rows, so results do not depend on it. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* Call f(rows, ...) with rows, which is at most `most`, as a constant. */
#define CALL_WITH_ROWS(most, rows, f, ...) \
    switch (rows) { \
    case 1: f(1, __VA_ARGS__); break; \
    ROWS_CASE(most, 2, f, __VA_ARGS__) \
    ROWS_CASE(most, 3, f, __VA_ARGS__) \
    ROWS_CASE(most, 4, f, __VA_ARGS__) \
    ROWS_CASE(most, 5, f, __VA_ARGS__) \
    ROWS_CASE(most, 6, f, __VA_ARGS__) \
    ROWS_CASE(most, 7, f, __VA_ARGS__) \
    ROWS_CASE(most, 8, f, __VA_ARGS__) \
    }
#define ROWS_CASE(most, n, f, ...) \
    case n: \
        if (n <= (most)) { \
            f(n, __VA_ARGS__); \
        } \
        break;

#define MAX_ROWS (FEW_ROWS > TILE_ROWS ? FEW_ROWS : TILE_ROWS)

/* Size of the next part when `left` things are taken in parts of at most `most`: as even as possible, since a tile of one
 * row wastes most of its loads. */
static inline uint32_t next_part(uint32_t left, uint32_t most)
{
    uint32_t n_parts = (left + most - 1) / most;
    return (left + n_parts - 1) / n_parts;
}

/* Lanes that strip s has of n columns. */
static inline uint32_t strip_lanes(uint32_t n, uint32_t s)
{
    return n > s * WIDTH ? n - s * WIDTH : 0;
}

/* ---- sums of a run ---- */

INLINE uint32_t inputs_per_dword(hsri_dtype codes)
{
    return codes == HSRI_DTYPE_F32 ? 1 : codes == HSRI_DTYPE_BF16 ? 2 : codes == HSRI_DTYPE_Q8 ? 4 : 8;
}

/* Input j of each dword, as a number. */
INLINE vec unpack_dwords(hsri_dtype codes, ivec dwords, uint32_t j)
{
    switch (codes) {
    case HSRI_DTYPE_F32:  return vec_from_bits(dwords);
    case HSRI_DTYPE_BF16: return j == 0 ? vec_low_bf16(dwords) : vec_high_bf16(dwords);
    case HSRI_DTYPE_Q8:   return vec_byte(dwords, j);
    /* byte j holds input j in its low and input 4 + j in its high half */
    default:              return vec_nibble(dwords, j % 4 * 2 + j / 4);
    }
}

/* Where the codes of a run are: lines of dwords; a dword holds 1, 2, 4 or 8 inputs of one output. */
typedef struct run_codes {
    const uint8_t *at;
    size_t strip_step;   /* bytes between strips */
    size_t line_step;    /* bytes between lines */
    uint32_t n_columns;  /* what may be read of a line, if `masked` */
} run_codes;

/* chains[even, odd] += inputs [k, k + count) of a run; k even, count a constant. */
INLINE void add_inputs(hsri_dtype codes, uint32_t rows, uint32_t strips, bool masked, const run_codes *w, const float *const *x, uint32_t k,
                       uint32_t count, vec chains[2][MAX_ROWS][TILE_STRIPS])
{
    const uint32_t per = inputs_per_dword(codes);
    const uint32_t used = per < count ? per : count;   /* inputs of a dword */
    const uint8_t *line = w->at + k / per * w->line_step;
    UNROLL
    for (uint32_t i = 0; i < count; i += per) {
        ivec dwords[TILE_STRIPS];
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            const uint8_t *p = line + i / per * w->line_step + s * w->strip_step;
            dwords[s] = masked ? ivec_load_n(p, strip_lanes(w->n_columns, s)) : ivec_load(p);
        }
        UNROLL
        for (uint32_t j = 0; j < used; j++) {
            vec weights[TILE_STRIPS];
            UNROLL
            for (uint32_t s = 0; s < strips; s++) {
                weights[s] = unpack_dwords(codes, dwords[s], j);
            }
            UNROLL
            for (uint32_t r = 0; r < rows; r++) {
                vec input = vec_set(x[r][k + i + j]);
                UNROLL
                for (uint32_t s = 0; s < strips; s++) {
                    chains[(i + j) % 2][r][s] = vec_fma(weights[s], input, chains[(i + j) % 2][r][s]);
                }
            }
        }
    }
}

/* sums[row][strip] = sum over n_k inputs of code * x: even and odd chain, from zero, then added. */
INLINE void run_sums(hsri_dtype codes, uint32_t rows, uint32_t strips, bool masked, const run_codes *w, const float *const *x, uint32_t n_k,
                     vec sums[MAX_ROWS][TILE_STRIPS])
{
    const uint32_t step = codes == HSRI_DTYPE_Q4 ? 8 : 4;
    vec chains[2][MAX_ROWS][TILE_STRIPS];
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            chains[0][r][s] = chains[1][r][s] = vec_zero();
        }
    }
    uint32_t k = 0;
    for (; k + step <= n_k; k += step) {
        add_inputs(codes, rows, strips, masked, w, x, k, step, chains);
    }
    /* Only keys and values come in other numbers than 32. */
    if (codes == HSRI_DTYPE_F32 || codes == HSRI_DTYPE_BF16) {
        if (n_k - k >= 2) {
            add_inputs(codes, rows, strips, masked, w, x, k, 2, chains);
            k += 2;
        }
        if (k < n_k) {
            add_inputs(codes, rows, strips, masked, w, x, k, 1, chains);
        }
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            sums[r][s] = vec_add(chains[0][r][s], chains[1][r][s]);
        }
    }
}

INLINE void add_sums(uint32_t rows, uint32_t strips, vec acc[MAX_ROWS][TILE_STRIPS], vec sums[MAX_ROWS][TILE_STRIPS])
{
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            acc[r][s] = vec_add(acc[r][s], sums[r][s]);
        }
    }
}

/* ---- linear ---- */

#define TILE_PANELS (TILE_STRIPS * WIDTH / HSRI_PANEL)
/* Runs whose unpacked codes stay in the first-level cache while all rows use them. */
#define CHUNK_RUNS 8u
/* Rows that are taken through all panels together: their inputs stay in the second-level cache. */
#define ROW_BLOCK (20u * TILE_ROWS)
/* How far ahead codes are fetched when they are used once: the hardware alone does not keep up with one reader. */
#define FETCH_AHEAD 4096u
/* Sums of the runs' inputs kept for q4. */
#define N_INPUT_SUMS (32u * ROW_BLOCK)

INLINE uint32_t run_bytes(hsri_dtype dtype)
{
    return HSRI_RUN / inputs_per_dword(dtype) * HSRI_PANEL * 4;
}

/* Bytes of scales (and minimums) of one run of a panel. */
INLINE uint32_t scale_bytes(hsri_dtype dtype)
{
    return dtype == HSRI_DTYPE_Q8 ? HSRI_PANEL * 2 : dtype == HSRI_DTYPE_Q4 ? HSRI_PANEL * 4 : 0;
}

/* Consecutive runs of one tile. */
typedef struct tile {
    run_codes codes;       /* of the first run */
    size_t run_step;       /* bytes between the codes of runs */
    hsri_dtype dtype;      /* what the sums are scaled by; the codes themselves may be unpacked already */
    const uint8_t *scales; /* of the first run and strip */
    size_t scale_strip_step;
    const float *x;
    uint64_t x_stride;
    const float *input_sums; /* q4: [row][input_sum_stride], from the first run on */
    uint32_t input_sum_stride;
    uint32_t n_runs;
    uint32_t n_k;          /* inputs in these runs; the last run may be cut */
    bool first;            /* else out holds the sum of earlier runs */
    const float *bias;     /* with the last run only */
    float *out;
    uint64_t out_stride;
    uint32_t n_out;
} tile;

/* acc[row][strip] takes in the sums of one run. */
INLINE void scale_run(hsri_dtype dtype, uint32_t rows, uint32_t strips, const tile *t, uint32_t run, vec sums[MAX_ROWS][TILE_STRIPS],
                      vec acc[MAX_ROWS][TILE_STRIPS])
{
    if (dtype == HSRI_DTYPE_F32 || dtype == HSRI_DTYPE_BF16) {
        add_sums(rows, strips, acc, sums);
        return;
    }
    UNROLL
    for (uint32_t s = 0; s < strips; s++) {
        const uint8_t *scales = t->scales + s * t->scale_strip_step + (size_t)run * scale_bytes(dtype);
        vec scale = vec_load_f16(scales);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            acc[r][s] = vec_fma(scale, sums[r][s], acc[r][s]);
        }
        if (dtype == HSRI_DTYPE_Q4) {
            vec minimum = vec_load_f16(scales + HSRI_PANEL * 2);
            UNROLL
            for (uint32_t r = 0; r < rows; r++) {
                acc[r][s] = vec_fma(minimum, vec_set(t->input_sums[r * t->input_sum_stride + run]), acc[r][s]);
            }
        }
    }
}

INLINE void fetch_run(hsri_dtype codes, const uint8_t *at)
{
    for (uint32_t b = 0; b < run_bytes(codes); b += 64) {
        _mm_prefetch((const char *)((uintptr_t)at + FETCH_AHEAD + b), _MM_HINT_T0);
    }
}

/* codes: how the codes are stored here; fetch: they are used once. */
INLINE void multiply_tile(uint32_t rows, hsri_dtype codes, hsri_dtype dtype, uint32_t strips, bool fetch, const tile *t)
{
    vec acc[MAX_ROWS][TILE_STRIPS], sums[MAX_ROWS][TILE_STRIPS];
    float padded[MAX_ROWS][HSRI_RUN];
    const float *x[MAX_ROWS];
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        x[r] = t->x + r * t->x_stride;
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            acc[r][s] = t->first ? vec_zero() : vec_load_n(t->out + r * t->out_stride + s * WIDTH, strip_lanes(t->n_out, s));
        }
    }
    run_codes w = t->codes;
    for (uint32_t run = 0; run < t->n_runs; run++, w.at += t->run_step) {
        uint32_t n_k = t->n_k - run * HSRI_RUN;
        if (n_k < HSRI_RUN) {
            memset(padded, 0, sizeof padded);
            for (uint32_t r = 0; r < rows; r++) {
                x[r] = memcpy(padded[r], x[r], n_k * sizeof **x);
            }
        }
        if (fetch) {
            fetch_run(codes, w.at);
        }
        run_sums(codes, rows, strips, false, &w, x, HSRI_RUN, sums);
        scale_run(dtype, rows, strips, t, run, sums, acc);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            x[r] += HSRI_RUN;
        }
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            uint32_t n = strip_lanes(t->n_out, s);
            vec v = t->bias != NULL ? vec_add(acc[r][s], vec_load_n(t->bias + s * WIDTH, n)) : acc[r][s];
            vec_store_n(t->out + r * t->out_stride + s * WIDTH, v, n);
        }
    }
}

/* Codes of n_runs runs as floats, in the order of an f32 run. */
INLINE void unpack_runs(hsri_dtype dtype, const uint8_t *codes, uint32_t n_runs, float *out)
{
    const uint32_t per = inputs_per_dword(dtype);
    for (uint32_t line = 0; line < n_runs * HSRI_RUN / per; line++) {
        for (uint32_t n = 0; n < HSRI_PANEL; n += WIDTH) {
            ivec dwords = ivec_load(codes + (line * HSRI_PANEL + n) * 4);
            UNROLL
            for (uint32_t j = 0; j < per; j++) {
                vec_store(out + (line * per + j) * HSRI_PANEL + n, unpack_dwords(dtype, dwords, j));
            }
        }
    }
}

/* What one call of a linear kernel is about, and the part of it in hand: n_rows rows, runs [run0, run1). */
typedef struct linear_job {
    const hsri_packed *w;
    const float *x;
    uint64_t x_stride;
    const float *bias;
    float *out;
    uint64_t out_stride;
    uint32_t n_rows;
    uint32_t run0, run1;
    const float *input_sums;
} linear_job;

INLINE tile tile_at(hsri_dtype dtype, const linear_job *job, uint32_t panel, uint32_t run, uint32_t n_runs)
{
    const hsri_packed *w = job->w;
    uint64_t at = (uint64_t)panel * w->n_runs + run;
    tile t = {
        .codes = { w->codes + at * run_bytes(dtype), WIDTH * 4, HSRI_PANEL * 4, WIDTH },
        .run_step = run_bytes(dtype),
        .dtype = dtype,
        .scales = w->tail != NULL ? w->tail + at * scale_bytes(dtype) : NULL,
        .scale_strip_step = WIDTH * 2,
        .x = job->x + run * HSRI_RUN,
        .x_stride = job->x_stride,
        .input_sums = job->input_sums + (run - job->run0),
        .input_sum_stride = job->run1 - job->run0,
        .n_runs = n_runs,
        .n_k = w->k - run * HSRI_RUN,
        .first = run == 0,
        .bias = job->bias != NULL && run + n_runs == w->n_runs ? job->bias + panel * HSRI_PANEL : NULL,
        .out = job->out + panel * HSRI_PANEL,
        .out_stride = job->out_stride,
        .n_out = w->n - panel * HSRI_PANEL,
    };
    if (WIDTH == HSRI_PANEL) {
        /* a strip is a panel of its own */
        t.codes.strip_step = (size_t)w->n_runs * run_bytes(dtype);
        t.scale_strip_step = (size_t)w->n_runs * scale_bytes(dtype);
    }
    return t;
}

/* Few rows against one panel: codes are unpacked in registers, and memory is read in one stream. */
INLINE void linear_few_rows(hsri_dtype dtype, const linear_job *job, uint32_t panel)
{
    tile t = tile_at(dtype, job, panel, job->run0, job->run1 - job->run0);
    CALL_WITH_ROWS(FEW_ROWS, job->n_rows, multiply_tile, dtype, dtype, HSRI_PANEL / WIDTH, true, &t)
}

/* One tile of unpacked codes. The dtype is looked at once per run, which costs little and keeps the code small. */
static __attribute__((noinline)) void multiply_unpacked(const tile *t, uint32_t rows, uint32_t n_panels)
{
    if (n_panels == TILE_PANELS) {
        CALL_WITH_ROWS(TILE_ROWS, rows, multiply_tile, HSRI_DTYPE_F32, t->dtype, TILE_STRIPS, false, t)
    } else {
        CALL_WITH_ROWS(TILE_ROWS, rows, multiply_tile, HSRI_DTYPE_F32, t->dtype, HSRI_PANEL / WIDTH, false, t)
    }
}

/* Many rows against a tile's panels, chunk of runs by chunk: codes are unpacked into memory once, then used for all rows. */
INLINE void linear_many_rows(hsri_dtype dtype, const linear_job *job, uint32_t panel, uint32_t n_panels)
{
    _Alignas(64) float unpacked[TILE_PANELS][CHUNK_RUNS * HSRI_RUN * HSRI_PANEL];
    for (uint32_t run = job->run0; run < job->run1; run += CHUNK_RUNS) {
        uint32_t n_runs = (uint32_t)hsri_min(CHUNK_RUNS, job->run1 - run);
        tile t = tile_at(dtype, job, panel, run, n_runs);
        if (dtype != HSRI_DTYPE_F32) {
            for (uint32_t p = 0; p < n_panels; p++) {
                const uint8_t *codes = t.codes.at + (uint64_t)p * job->w->n_runs * run_bytes(dtype);
                unpack_runs(dtype, codes, n_runs, unpacked[p]);
            }
            t.codes.at = (const uint8_t *)unpacked;
            t.codes.strip_step = WIDTH == HSRI_PANEL ? sizeof unpacked[0] : WIDTH * 4;
            t.run_step = run_bytes(HSRI_DTYPE_F32);
        }
        for (uint32_t i = 0; i < job->n_rows;) {
            uint32_t rows = next_part(job->n_rows - i, TILE_ROWS);
            multiply_unpacked(&t, rows, n_panels);
            t.x += rows * t.x_stride;
            t.out += rows * t.out_stride;
            t.input_sums += rows * t.input_sum_stride;
            i += rows;
        }
    }
}

/* Sum of n <= 32 inputs of a run as a tree of halves; absent inputs are zeros. */
static inline float run_input_sum(const float *x, uint32_t n)
{
    vec v[HSRI_RUN / WIDTH];
    UNROLL
    for (uint32_t i = 0; i < HSRI_RUN / WIDTH; i++) {
        v[i] = vec_load_n(x + i * WIDTH, strip_lanes(n, i));
    }
    UNROLL
    for (uint32_t half = HSRI_RUN / WIDTH / 2; half > 1; half /= 2) {
        for (uint32_t i = 0; i < half; i++) {
            v[i] = vec_add(v[i], v[i + half]);
        }
    }
    return vec_sum2(v[0], v[1]);
}

static void fill_input_sums(const linear_job *job, float *sums)
{
    for (uint32_t i = 0; i < job->n_rows; i++) {
        for (uint32_t run = job->run0; run < job->run1; run++) {
            uint32_t k = run * HSRI_RUN;
            *sums++ = run_input_sum(job->x + i * job->x_stride + k, job->w->k - k);
        }
    }
}

INLINE void linear_any(hsri_dtype dtype, const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride,
                       uint32_t n_rows, const float *bias, float *out, uint64_t out_stride)
{
    float input_sums[N_INPUT_SUMS];
    for (uint32_t i = 0, rows; i < n_rows; i += rows) {
        rows = (uint32_t)hsri_min(n_rows - i, hsri_round_up(next_part(n_rows - i, ROW_BLOCK), TILE_ROWS));
        linear_job job = { w, x + i * x_stride, x_stride, bias, out + i * out_stride, out_stride, rows, 0, 0, input_sums };
        uint32_t block_runs = dtype == HSRI_DTYPE_Q4 ? N_INPUT_SUMS / rows : w->n_runs;
        for (; job.run0 < w->n_runs; job.run0 = job.run1) {
            job.run1 = (uint32_t)hsri_min(w->n_runs, (uint64_t)job.run0 + block_runs);
            if (dtype == HSRI_DTYPE_Q4) {
                fill_input_sums(&job, input_sums);
            }
            if (rows <= FEW_ROWS) {
                for (uint32_t panel = panel0; panel < panel1; panel++) {
                    linear_few_rows(dtype, &job, panel);
                }
            } else {
                for (uint32_t panel = panel0; panel < panel1; panel += TILE_PANELS) {
                    linear_many_rows(dtype, &job, panel, (uint32_t)hsri_min(TILE_PANELS, panel1 - panel));
                }
            }
        }
    }
}

#define LINEAR(name, dtype) \
    static void linear_##name(const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride, uint32_t n_rows, \
                              const float *bias, float *out, uint64_t out_stride) \
    { \
        linear_any(dtype, w, panel0, panel1, x, x_stride, n_rows, bias, out, out_stride); \
    }

LINEAR(f32, HSRI_DTYPE_F32)
LINEAR(bf16, HSRI_DTYPE_BF16)
LINEAR(q8, HSRI_DTYPE_Q8)
LINEAR(q4, HSRI_DTYPE_Q4)

/* ---- rows ---- */

/* e^r, where a = n ln(2) + r and |r| <= ln(2)/2, by its Taylor series, whose first missing term is below 6e-9. */
INLINE vec exp_less(vec a, vec n)
{
    /* ln(2) in two parts; n times the first is exact */
    vec r = vec_fnma(n, vec_set(0x1.62e400p-1f), a);
    r = vec_fnma(n, vec_set(0x1.7f7d1cp-20f), r);
    static const float inverse_factorial[] = { 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f };
    vec p = vec_set(1.0f / 5040);
    UNROLL
    for (uint32_t i = 0; i < 7; i++) {
        p = vec_fma(p, r, vec_set(inverse_factorial[i]));
    }
    return p;
}

/* e^a = 2^n e^r. NaN stays NaN. */
static inline vec vec_exp(vec a)
{
    /* Beyond these the result is 0 or infinity. The bound is the first operand, so that a NaN comes through. */
    a = vec_max(vec_set(-104.0f), vec_min(vec_set(89.0f), a));
    vec n = vec_round(vec_mul(a, vec_set(0x1.715476p+0f)));
    return vec_scale2(exp_less(a, n), n);
}

INLINE void add_squares(vec v, dvec *low, dvec *high)
{
    *low = dvec_fma(dvec_low(v), dvec_low(v), *low);
    *high = dvec_fma(dvec_high(v), dvec_high(v), *high);
}

static void rms_norm(const float *in, const float *gain, float eps, uint32_t width, float *out)
{
    dvec low = dvec_zero(), high = dvec_zero();
    uint32_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) {
        add_squares(vec_load(in + i), &low, &high);
    }
    if (i < width) {
        add_squares(vec_load_n(in + i, width - i), &low, &high);
    }
    vec inverse = vec_set((float)(1.0 / sqrt(dvec_sum2(low, high) / width + eps)));
    for (i = 0; i + WIDTH <= width; i += WIDTH) {
        vec_store(out + i, vec_mul(vec_load(gain + i), vec_mul(vec_load(in + i), inverse)));
    }
    if (i < width) {
        vec v = vec_mul(vec_load_n(in + i, width - i), inverse);
        vec_store_n(out + i, vec_mul(vec_load_n(gain + i, width - i), v), width - i);
    }
}

static void rope(const float *in, const float *cos_sin, uint32_t rotary_dim, float *out)
{
    uint32_t half = rotary_dim / 2;
    for (uint32_t j = 0; j < half; j += WIDTH) {
        uint32_t n = half - j;
        vec c = vec_load_n(cos_sin + j, n), s = vec_load_n(cos_sin + half + j, n);
        vec a = vec_load_n(in + j, n), b = vec_load_n(in + half + j, n);
        vec_store_n(out + j, vec_fms(a, c, vec_mul(b, s)), n);
        vec_store_n(out + half + j, vec_fma(b, c, vec_mul(a, s)), n);
    }
}

static void silu_mul(const float *in, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i += WIDTH) {
        const float *gate = in + i / HSRI_PANEL * (2 * HSRI_PANEL) + i % HSRI_PANEL;
        vec g = vec_load_n(gate, n - i), up = vec_load_n(gate + HSRI_PANEL, n - i);
        vec silu = vec_div(g, vec_add(vec_set(1.0f), vec_exp(vec_sub(vec_zero(), g))));
        vec_store_n(out + i, vec_mul(silu, up), n - i);
    }
}

static void add(float *x, const float *y, uint64_t n)
{
    uint64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vec_store(x + i, vec_add(vec_load(x + i), vec_load(y + i)));
    }
    for (; i < n; i++) {
        x[i] += y[i];
    }
}

static double sum_exp(const float *x, uint64_t n, float max)
{
    const dvec one = dvec_low(vec_set(1.0f));
    dvec low = dvec_zero(), high = dvec_zero();
    for (uint64_t i = 0; i < n; i += WIDTH) {
        uint32_t left = (uint32_t)hsri_min(n - i, WIDTH);
        vec e = vec_exp(vec_sub(vec_load_n(x + i, left), vec_set(max)));
        e = left < WIDTH ? vec_first_n(e, vec_zero(), left) : e;
        low = dvec_fma(dvec_low(e), one, low);
        high = dvec_fma(dvec_high(e), one, high);
    }
    return dvec_sum2(low, high);
}

static uint32_t nonfinite(const float *x, uint64_t n)
{
    uint64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        if (vec_any_nonfinite(vec_load(x + i))) {
            return 1;
        }
    }
    return i < n && vec_any_nonfinite(vec_load_n(x + i, (uint32_t)(n - i)));
}

/* ---- pages ---- */

static void page_put_bf16(uint8_t *slot, uint32_t head_dim, uint32_t t, const float *k, const float *v)
{
    uint8_t *keys = slot + HSRI_PAGE_HEADER_BYTES + t * 4;
    uint8_t *values = slot + HSRI_PAGE_HEADER_BYTES + (size_t)HSRI_PAGE_TOKENS * head_dim * 2 + (size_t)(t / 2) * head_dim * 4;
    for (uint32_t j = 0; j < head_dim; j += WIDTH) {
        uint32_t n = (uint32_t)hsri_min(WIDTH, head_dim - j);
        uint16_t key[WIDTH];
        vec_store_bf16(key, vec_load_n(k + j, n));
        for (uint32_t i = 0; i < n; i += 2) {
            memcpy(keys + (size_t)(j + i) / 2 * (HSRI_PAGE_TOKENS * 4), key + i, 4);
        }
        vec_store_bf16_half(values + (size_t)j * 4, t % 2, vec_load_n(v + j, n), n);
    }
}

/* ---- attention ---- */

static inline uint32_t most_visible(const uint32_t *visible, uint32_t n)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < n; i++) {
        most = visible[i] > most ? visible[i] : most;
    }
    return most;
}

static inline uint32_t least_visible(const uint32_t *visible, uint32_t n)
{
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < n; i++) {
        least = visible[i] < least ? visible[i] : least;
    }
    return least;
}

INLINE void merge_one(float *acc, const float *part, float old_weight, float new_weight, uint32_t head_dim)
{
    if (part[1] == 0.0f) {
        return;
    }
    if (acc[1] == 0.0f) {
        memcpy(acc, part, (head_dim + 2) * sizeof *acc);
        return;
    }
    acc[0] = part[0] > acc[0] ? part[0] : acc[0];
    for (uint32_t j = 1; j < head_dim + 2; j += WIDTH) {
        uint32_t n = head_dim + 2 - j;
        vec v = vec_fma(vec_load_n(part + j, n), vec_set(new_weight), vec_mul(vec_load_n(acc + j, n), vec_set(old_weight)));
        vec_store_n(acc + j, v, n);
    }
}

/* The exponentials of as many folds as a register holds are taken together. */
static void merge(float *const *acc, float *const *part, uint32_t n, uint32_t head_dim)
{
    for (uint32_t first = 0; first < n; first += WIDTH) {
        uint32_t end = (uint32_t)hsri_min(first + WIDTH, n);
        float old_weights[WIDTH] = { 0 }, new_weights[WIDTH] = { 0 };
        for (uint32_t i = first; i < end; i++) {
            float max = part[i][0] > acc[i][0] ? part[i][0] : acc[i][0];
            old_weights[i - first] = acc[i][0] - max;
            new_weights[i - first] = part[i][0] - max;
        }
        vec_store(old_weights, vec_exp(vec_load(old_weights)));
        vec_store(new_weights, vec_exp(vec_load(new_weights)));
        for (uint32_t i = first; i < end; i++) {
            merge_one(acc[i], part[i], old_weights[i - first], new_weights[i - first], head_dim);
        }
    }
}

static void fill(hsri_kernels *k)
{
    k->linear[HSRI_DTYPE_F32] = linear_f32;
    k->linear[HSRI_DTYPE_BF16] = linear_bf16;
    k->linear[HSRI_DTYPE_Q8] = linear_q8;
    k->linear[HSRI_DTYPE_Q4] = linear_q4;
    k->rms_norm = rms_norm;
    k->rope = rope;
    k->silu_mul = silu_mul;
    k->add = add;
    k->page_put[HSRI_KV_TYPE_BF16] = page_put_bf16;
    k->merge = merge;
    k->sum_exp = sum_exp;
    k->nonfinite = nonfinite;
}
