/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU kernel table: plain functions over raw pointers, no threads, no policy. kernels_ref.c fills every entry in portable C;
 * each instruction-set level then overwrites the entries it has (x86/). tests/kernels compares every entry of every level with
 * the reference.
 *
 * Rule of all kernels: the result of one output row (or one query row) does not depend on how many rows are computed in the
 * same call. */
#ifndef HSRI_CPU_KERNELS_H
#define HSRI_CPU_KERNELS_H

#include <stdint.h>

#include "device/cpu/page_kernels.h"
#include "device/cpu/sparse_kernels.h"
#include "device/device.h"

/* A packed matrix in memory. tail: scales (q8), scales and minimums (q4), else NULL. */
typedef struct hsri_packed {
    const uint8_t *codes;
    const uint8_t *tail;
    uint32_t       n, k;      /* logical */
    uint32_t       n_runs;    /* ceil(k / 32) */
} hsri_packed;

/* Pages that are made as they are needed: keys, and some time later values, of pages [first, end), a block of at most HSRI_PAGES_MADE
 * that begins at a multiple of that; blocks in order, each once. What is made of a block may go where that of the block before was. For
 * the AMX level's bf16 pages only, and at most HSRI_QUERIES_ONCE queries: more go through the pages more than once. */
typedef struct hsri_page_maker {
    void (*keys)(const void *of, uint32_t first, uint32_t end);
    void (*values)(const void *of, uint32_t first, uint32_t end);
    const void *of;
} hsri_page_maker;

#define HSRI_PAGES_MADE 2u
#define HSRI_QUERIES_ONCE 32u

/* One (query rows, kv head, group) piece of attention: tokens [t0, t0 + n_tokens) of one sequence, t0 a multiple of
 * HSRI_GROUP_TOKENS or of HSRI_PAGE_TOKENS; query i sees the first visible[i] of them (0: none). */
typedef struct hsri_attend_args {
    const uint8_t *const *pages;   /* page slots (header included) of the group's pages, in order */
    uint32_t        n_pages;
    uint32_t        head_dim;
    float           scale;
    uint32_t        n_queries;     /* rows times heads of the group that share these pages */
    const float    *const *queries;/* [n_queries] -> float[d] */
    const uint32_t *visible;       /* [n_queries] */
    float          *const *partials;/* [n_queries] -> { m, l, o[d] } (device.h, attend) */
    float          *scratch;       /* per thread: HSRI_ATTEND_SCRATCH floats */
    const hsri_page_maker *maker;  /* NULL: the pages are there */
} hsri_attend_args;

#define HSRI_ATTEND_MAX_QUERIES 64u   /* most queries of one call */
#define HSRI_ATTEND_MAX_HEAD_DIM 512u /* models have no more */
/* Scores of all queries, with gaps between runs, and room for the queries in 16 bits; or, of blocks of tokens, scores and outputs. */
#define HSRI_ATTEND_SCRATCH (HSRI_ATTEND_MAX_QUERIES * (HSRI_GROUP_TOKENS * 17 / 16 + HSRI_ATTEND_MAX_HEAD_DIM / 2 + HSRI_RUN / 2))

typedef struct hsri_kernels {
    /* NULL: linear of this dtype takes rows of inputs as they are. Else it takes what this makes of them, once for all panels:
     * n_rows rows of hsri_prepared_stride(k) floats, whose content is this level's own, but for this: what becomes of a run of inputs lies
     * HSRI_RUN / 2 floats behind that of the run before, so that a row can be prepared in pieces that begin with a run. Speed wants
     * `prepared` 64-byte aligned. */
    void (*prepare[HSRI_N_DTYPES])(const float *x, uint64_t x_stride, uint32_t n_rows, uint32_t k, float *prepared);
    /* Where there is a `prepare`: silu_mul of rows of n outputs and prepare in one, into rows `stride` floats apart. silu may be off by a
     * sixteenth of what preparing may move a number. */
    void (*silu_prepare[HSRI_N_DTYPES])(const float *in, uint64_t in_stride, uint32_t n_rows, uint32_t n, float *prepared, uint64_t stride);
    /* out[i * out_stride + c] for rows i < n_rows and outputs c of panels [panel0, panel1), only c < w->n written:
     * the product in the order of docs/model-file.md, plus bias[c] if bias is not NULL. x rows are x_stride floats apart;
     * exactly k floats of a row are read (of a prepared row, all of it). */
    void (*linear[HSRI_N_DTYPES])(const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride,
                                  uint32_t n_rows, const float *bias, float *out, uint64_t out_stride);
    /* out[0..k) = row n of w, decoded */
    void (*unpack_row[HSRI_N_DTYPES])(const hsri_packed *w, uint32_t n, float *out);
    void (*rms_norm)(const float *in, const float *gain, float eps, uint32_t width, float *out);
    /* out = the first r components of in, which may be out, rotated by cos_sin = r/2 cosines then r/2 sines */
    void (*rope)(const float *in, const float *cos_sin, uint32_t rotary_dim, float *out);
    /* in: panels of 16 gate, 16 up; out[n] */
    void (*silu_mul)(const float *in, uint32_t n, float *out);
    void (*add)(float *x, const float *y, uint64_t n);
    /* write k[d] and v[d] as token t of a page slot */
    void (*page_put[HSRI_N_KV_TYPES])(uint8_t *slot, uint32_t head_dim, uint32_t t, const float *k, const float *v);
    void (*attend[HSRI_N_KV_TYPES])(const hsri_attend_args *a);
    /* acc = fold(acc, part), n times: { m, l, o[d] } each; an empty part (l = 0) changes nothing, not even bits */
    void (*merge)(float *const *acc, float *const *part, uint32_t n, uint32_t head_dim);
    /* sum of exp(x[i] - max), where max is the largest and finite; x may be -infinity */
    double (*sum_exp)(const float *x, uint64_t n, float max);
    /* 1 if any of n floats is NaN or infinite */
    uint32_t (*nonfinite)(const float *x, uint64_t n);
    hsri_page_kernels page;
    hsri_sparse_kernels sparse;
} hsri_kernels;

/* Fill the table for a level: reference first, then every level up to isa. isa must be at or below hsri_cpu_isa(), and AMX only
 * after hsri_cpu_allow_amx(). */
void hsri_kernels_fill(hsri_kernels *k, int32_t isa);

void hsri_kernels_fill_ref(hsri_kernels *k);
void hsri_kernels_fill_avx2(hsri_kernels *k);    /* x86/kernels_avx2.c */
void hsri_kernels_fill_avx512(hsri_kernels *k);  /* x86/kernels_avx512.c */
void hsri_kernels_fill_amx(hsri_kernels *k);     /* x86/kernels_amx.c */
void hsri_attend_bf16_amx(const hsri_attend_args *a);   /* x86/attend_amx.c */

/* Floats of a prepared row: two bytes for each input of whole runs, and a float for each run, in an odd number of cache lines, so
 * that the rows of a tile fall into different sets of the cache. */
static inline uint64_t hsri_prepared_stride(uint32_t k)
{
    uint64_t n_runs = ((uint64_t)k + HSRI_RUN - 1) / HSRI_RUN;
    return ((n_runs + (n_runs + 15) / 16) | 1) * 16;
}

/* Where codes and tail of a packed matrix are. */
hsri_packed hsri_packed_at(const void *data, hsri_dtype dtype, uint32_t n, uint32_t k);
uint64_t hsri_packed_bytes(hsri_dtype dtype, uint32_t n, uint32_t k);
/* n_panels panels of a matrix, from `panel` on, as a matrix. */
hsri_packed hsri_packed_panels(const hsri_packed *w, hsri_dtype dtype, uint32_t panel, uint32_t n_panels);

static inline float hsri_bf16_to_f32(uint16_t b) { union { uint32_t u; float f; } v = { (uint32_t)b << 16 }; return v.f; }
/* Round to nearest even; NaN stays NaN. */
uint16_t hsri_f32_to_bf16(float f);
float hsri_f16_to_f32(uint16_t h);

#endif
