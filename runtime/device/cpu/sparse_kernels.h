/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the index: the member `sparse` of hsri_kernels. index_ref.c fills every entry; x86/index_*.c overwrite what their level
 * does better. docs/sparse-attention.md has the layouts and the formulas. The rules of kernels.h hold here, too: what comes out
 * for one head and one page does not depend on the other heads of the call.
 *
 * Masses. The worth of a unit to a head is the sum over its tokens of exp(logit - reference), where the head's reference is the
 * natural log of the mass that it reads exactly (sink and window): in this measure the exact mass is 1. Masses are plain floats,
 * never negative, never NaN and never above HSRI_MASS_MAX, so sums need no further care; less than e^-87 may be 0. A page or a head
 * that holds a NaN has mass 0. */
#ifndef HSRI_CPU_SPARSE_KERNELS_H
#define HSRI_CPU_SPARSE_KERNELS_H

#include <stdint.h>

#include "device/cpu/cluster_kernels.h"
#include "device/kv_format.h"

/* Pages of one call of a scoring kernel, at most. Callers cut at multiples of it, since levels may look at all pages of a call for
 * the sake of one. */
#define HSRI_SCORE_PAGES 32u
#define HSRI_MASS_MAX 0x1p100f

/* What the scoring kernels read and write. Heads are the query heads of one kv head. */
typedef struct hsri_score_args {
    const uint8_t *const *entries;  /* [n_pages] index entries, 64-byte aligned */
    const uint8_t *const *codes;    /* [n_pages] components, 64-byte aligned: the sketch alone */
    uint32_t        n_pages;        /* at most HSRI_SCORE_PAGES */
    uint32_t        n_heads;
    const hsri_index_shape *shape;
    float           scale;          /* of logits */
    const float    *queries;        /* [n_heads][d] */
    const float    *rotated;        /* [n_heads][d], in the calibrated basis: the sketch alone */
    const float    *reference;      /* [n_heads] */
    const float    *mean_k;         /* [d]: what the sketch's mean keys are told about */
    float          *mass;           /* [n_heads] rows of 4 n_pages units */
    uint64_t        mass_stride;    /* floats between rows */
} hsri_score_args;

typedef void (*hsri_score_fn)(const hsri_score_args *a);

/* Where the parts of an index entry are. */
typedef struct hsri_index_layout {
    uint32_t mean_k, mean_v;        /* int8[d] */
    uint32_t scales;                /* SKETCH: float16[n_4bit + n_2bit]. Others: one float */
    uint32_t codes;                 /* MINMAX: int8[4 units][2][d]. GAUSSIAN: uint8[d]. SKETCH has its own apart */
} hsri_index_layout;

static inline hsri_index_layout hsri_index_layout_of(const hsri_index_shape *s)
{
    uint32_t d = s->head_dim, means = 2 * (uint32_t)sizeof(float), rest = means + 2 * d;

    return (hsri_index_layout){ means, means + d, rest, rest + (uint32_t)sizeof(float) };
}

/* The token of a page whose codes are in dword `lane` of line `line` of a set, both below 4 and 16: tokens of one unit lie in four
 * neighbouring lanes of all four lines, so that sums over units need no crossing of lanes before the end. */
static inline uint32_t hsri_sketch_token(uint32_t line, uint32_t lane)
{
    return lane / 4 * HSRI_UNIT_TOKENS + line * 4 + lane % 4;
}

typedef struct hsri_sparse_kernels {
    /* entry of a page of keys k[64][d] and values v[64][d]; the sketch needs the calibration and has codes. Every level has the same
     * bits. */
    void (*encode)(const hsri_index_shape *shape, const hsri_calibration_record *calibration, const float *k, const float *v,
                   uint8_t *entry, uint8_t *codes, float *scratch /* hsri_index_scratch floats */);
    /* masses of the units of some pages, by what the entry says */
    hsri_score_fn score_sketch, score_minmax, score_gaussian, score_mean;
    /* masses from the keys themselves, k[64][d] of each page */
    void (*score_keys)(const hsri_score_args *a, const float *const *keys);
    /* out[d] = sum_i q[i] matrix[i][d] */
    void (*rotate)(const float *matrix, const float *q, uint32_t d, float *out);
    /* sum of n floats */
    float (*sum)(const float *x, uint64_t n);
    /* the numbers, ascending, of those of n that are at least so large; returns how many they are. No NaN is. */
    uint32_t (*reach)(const float *x, uint32_t n, float least, uint32_t *out);
    /* the largest of each of 16 sets of 16, of 256 together; NaN and what is below 0 is 0 */
    void (*maxima)(const float *x, float *out);
    /* out[i] += weight x[i] */
    void (*add_scaled)(float *out, float weight, const float *x, uint64_t n);
    /* Of each head, with the mass of a page's units as its weight: out[head][0] += factors[head] sum of the weights, out[head][1 + j] +=
     * factors[head] sum of weight times component j of the mean value, as its code says. Pages of weight 0 are passed over. Rows of `mass`
     * are mass_stride floats apart; n_pages is at most HSRI_SCORE_PAGES. */
    void (*add_means)(const uint8_t *const *entries, uint32_t n_pages, const hsri_index_shape *shape, uint32_t n_heads, const float *mass,
                      uint64_t mass_stride, const float *factors, float *out);
    hsri_cluster_kernels cluster;
} hsri_sparse_kernels;

/* Floats of work space of `encode`. */
static inline uint64_t hsri_index_scratch(uint32_t d) { return 2ull * HSRI_PAGE_TOKENS * d + 4ull * d; }

void hsri_sparse_kernels_fill(hsri_sparse_kernels *k, int32_t isa);

/* Without VNNI on a processor that has it: what others run, and the same bits. */
void hsri_sparse_kernels_fill_plain(hsri_sparse_kernels *k, int32_t isa);

void hsri_sparse_kernels_fill_ref(hsri_sparse_kernels *k);
void hsri_sparse_kernels_fill_avx2(hsri_sparse_kernels *k);         /* x86/index_avx2.c */
void hsri_sparse_kernels_fill_avx512(hsri_sparse_kernels *k);       /* x86/index_avx512.c */
void hsri_sparse_kernels_fill_avx512vnni(hsri_sparse_kernels *k);   /* x86/index_avx512vnni.c: the same bits */

#endif
