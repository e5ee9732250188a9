/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of clusters with VNNI. */
#include <immintrin.h>

static inline __m512i dot_bytes(__m512i acc, __m512i codes, __m512i weights) { return _mm512_dpbusd_epi32(acc, codes, weights); }

#include "device/cpu/x86/cluster_body512.h"

#define POINTS 4u               /* that share a pass over the centres */

static inline uint16_t first_best(__m512i best, __m512i where)
{
    __mmask16 top = _mm512_cmpeq_epi32_mask(best, _mm512_set1_epi32(_mm512_reduce_max_epi32(best)));

    return (uint16_t)_mm512_mask_reduce_min_epu32(top, where);
}

INLINE void assign_points(const hsri_assign_args *a, uint32_t first, uint32_t n_quads)
{
    const int8_t *point = a->points + (uint64_t)first * n_quads * 4;
    const uint32_t n_vectors = a->n_centres / 16;
    __m512i       best[POINTS], where[POINTS], at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

    UNROLL for (uint32_t p = 0; p < POINTS; p++) {
        best[p] = _mm512_set1_epi32(INT32_MIN);
        where[p] = at;
    }
    for (uint32_t v = 0; v < n_vectors; v++, at = _mm512_add_epi32(at, _mm512_set1_epi32(16))) {
        __m512i sums[POINTS], bias = _mm512_loadu_si512(a->bias + 16 * v);

        UNROLL for (uint32_t p = 0; p < POINTS; p++)
            sums[p] = bias;
        UNROLL for (uint32_t q = 0; q < n_quads; q++) {
            __m512i centres = _mm512_load_si512(a->centres + ((uint64_t)q * n_vectors + v) * 64);

            UNROLL for (uint32_t p = 0; p < POINTS; p++) {
                int32_t quad;

                memcpy(&quad, point + (p * n_quads + q) * 4, sizeof quad);
                sums[p] = _mm512_dpbusd_epi32(sums[p], centres, _mm512_set1_epi32(quad));
            }
        }
        UNROLL for (uint32_t p = 0; p < POINTS; p++) {
            where[p] = _mm512_mask_mov_epi32(where[p], _mm512_cmpgt_epi32_mask(sums[p], best[p]), at);
            best[p] = _mm512_max_epi32(best[p], sums[p]);
        }
    }
    UNROLL for (uint32_t p = 0; p < POINTS; p++)
        a->nearest[first + p] = first_best(best[p], where[p]);
}

static void assign_512(const hsri_assign_args *a)
{
    for (uint32_t first = 0; first < a->n_points; first += POINTS) {
        switch (a->n_quads) {
        case 2:  assign_points(a, first, 2); break;
        case 4:  assign_points(a, first, 4); break;
        default: assign_points(a, first, 6); break;
        }
    }
}

void hsri_cluster_kernels_fill_avx512vnni(hsri_cluster_kernels *k)
{
    *k = (hsri_cluster_kernels){ assign_512, score_clusters_512, score_families_512, score_members_512, score_votes_512 };
}
