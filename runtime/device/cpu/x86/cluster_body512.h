/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of clusters with AVX-512, sixteen at a time, straight from the nibbles of the record. The word dot_bytes is the including file's:
 * one instruction where VNNI exists, three otherwise, with the same integers. */
#include <immintrin.h>

#include "device/cpu/cluster_lanes.h"

#define LOG2E 1.44269504f
#define UNROLL _Pragma("GCC unroll 8")
#define MAX_QUADS (HSRI_CLUSTER_COMPONENTS / 4u)
#define VECTORS (HSRI_SEGMENT_CLUSTERS / 16u)
#define HEADS 4u                /* that share a pass over the codes */

/* A head's weights of a segment. Log 2 of the mass of a token of a cluster = product of weights and codes times step, plus base. */
typedef struct cluster_head {
    int32_t quads[MAX_QUADS];
    float   step, base;
} cluster_head;

/* Not a number becomes far below everything. */
static void prepare_head(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, uint32_t h, cluster_head *head)
{
    const float *mean = (const float *)(a->record + at->mean), *scales = (const float *)(a->record + at->scales);
    const float *rotated = a->rotated + (uint64_t)h * a->shape->head_dim;
    float        factor = a->scale * LOG2E, weights[HSRI_CLUSTER_COMPONENTS], largest = 0.0f, base;
    int8_t       bytes[HSRI_CLUSTER_COMPONENTS] = { 0 };
    int32_t      sum = 0;

    base = factor * dot_float(a->queries + (uint64_t)h * a->shape->head_dim, mean, a->shape->head_dim) - a->reference[h] * LOG2E;
    for (uint32_t c = 0; c < at->n; c++) {
        weights[c] = rotated[c] * scales[c] * factor;
        largest = fabsf(weights[c]) > largest ? fabsf(weights[c]) : largest;
        base += weights[c] * 0.0f;
    }
    for (uint32_t c = 0; c < at->n && largest > 0x1p-100f && largest < INFINITY; c++) {
        bytes[c] = (int8_t)lrintf(weights[c] == weights[c] ? weights[c] * (127.0f / largest) : 0.0f);
        sum += bytes[c];
    }
    memcpy(head->quads, bytes, sizeof bytes);
    head->step = largest < INFINITY ? largest / 127.0f : 0.0f;
    base -= 7.5f * head->step * (float)sum;
    head->base = base > -1e30f ? (base < 1e30f ? base : 1e30f) : -1e30f;
}

/* 2^x to 0.2 %: 0 below the normal range, infinity above. */
static inline __m512 exp2_16(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(0.33718944f), _mm512_set1_ps(0.65763628f));

    return _mm512_scalef_ps(_mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0017247f)), x);
}

INLINE void score_vectors(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, const cluster_head *heads, uint32_t h0, uint32_t n,
                          uint32_t n_sets)
{
    const __m512i   low4 = _mm512_set1_epi8(15);
    const uint8_t  *codes = a->record + at->codes;
    const uint16_t *starts = (const uint16_t *)(a->record + at->starts);

    for (uint32_t v = 0; v < VECTORS; v++) {
        __m256i from = _mm256_loadu_si256((const __m256i *)(starts + 16 * v)), to = _mm256_loadu_si256((const __m256i *)(starts + 16 * v + 1));
        __m512  tokens = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_sub_epi16(to, from)));
        __mmask16 some = _mm512_cmp_ps_mask(tokens, _mm512_setzero_ps(), _CMP_GT_OQ);
        __m512i sums[HEADS];

        UNROLL for (uint32_t h = 0; h < n; h++)
            sums[h] = _mm512_setzero_si512();
        UNROLL for (uint32_t s = 0; s < n_sets; s++) {
            __m512i bytes = _mm512_load_si512(codes + ((uint64_t)s * VECTORS + v) * 64), low = _mm512_and_si512(bytes, low4);
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low4);

            UNROLL for (uint32_t h = 0; h < n; h++) {
                sums[h] = dot_bytes(sums[h], low, _mm512_set1_epi32(heads[h].quads[2 * s]));
                sums[h] = dot_bytes(sums[h], high, _mm512_set1_epi32(heads[h].quads[2 * s + 1]));
            }
        }
        UNROLL for (uint32_t h = 0; h < n; h++) {
            __m512 logit = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[h]), _mm512_set1_ps(heads[h].step), _mm512_set1_ps(heads[h].base));
            __m512 mass = _mm512_min_ps(_mm512_mul_ps(exp2_16(logit), tokens), _mm512_set1_ps(HSRI_MASS_MAX));

            _mm512_storeu_ps(a->mass + (h0 + h) * a->mass_stride + 16 * v, _mm512_maskz_mov_ps(some, mass));
        }
    }
}

INLINE void score_heads(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, const cluster_head *heads, uint32_t h0, uint32_t n)
{
    switch (at->n / 8) {
    case 1:  score_vectors(a, at, heads, h0, n, 1); break;
    case 2:  score_vectors(a, at, heads, h0, n, 2); break;
    default: score_vectors(a, at, heads, h0, n, 3); break;
    }
}

static void score_clusters_512(const hsri_cluster_score_args *a)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    uint32_t            csr = _mm_getcsr();

    /* As in the sketch's kernel: masses below the normal range are 0. */
    _mm_setcsr(csr | _MM_FLUSH_ZERO_ON);
    for (uint32_t h0 = 0; h0 < a->n_heads; h0 += HEADS) {
        cluster_head heads[HEADS];
        uint32_t     n = a->n_heads - h0 < HEADS ? a->n_heads - h0 : HEADS;

        for (uint32_t h = 0; h < n; h++)
            prepare_head(a, &at, h0 + h, &heads[h]);
        switch (n) {
        case 1:  score_heads(a, &at, heads, h0, 1); break;
        case 2:  score_heads(a, &at, heads, h0, 2); break;
        case 3:  score_heads(a, &at, heads, h0, 3); break;
        default: score_heads(a, &at, heads, h0, 4); break;
        }
    }
    _mm_setcsr(csr);
}
