/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2: bytes of centres are multiplied as words, since a centre's times a point's may not fit a word. */
#include <immintrin.h>

#include "device/cpu/cluster_lanes.h"
#include "device/cpu/x86/lanes256.h"
#include "device/cpu/x86/cluster_score_avx2.h"

#define POINTS 2u               /* that share a pass over the centres */

/* Components 0 and 2, or 1 and 3, of a point's quad in every lane. */
static inline __m256i pair_of(const int8_t *quad)
{
    return _mm256_set1_epi32((int32_t)((uint16_t)quad[0] | (uint32_t)(uint16_t)quad[2] << 16));
}

INLINE void assign_points(const hsri_assign_args *a, uint32_t first, uint32_t n_quads)
{
    const int8_t *point = a->points + (uint64_t)first * n_quads * 4;
    const __m256i low = _mm256_set1_epi16(0xff);
    const uint32_t n_vectors = a->n_centres / 8;
    __m256i       best[POINTS], where[POINTS], even[POINTS][HSRI_CLUSTER_COMPONENTS / 4], odd[POINTS][HSRI_CLUSTER_COMPONENTS / 4];
    __m256i       at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

    for (uint32_t p = 0; p < POINTS; p++) {
        best[p] = _mm256_set1_epi32(INT32_MIN);
        where[p] = at;
        for (uint32_t q = 0; q < n_quads; q++) {
            even[p][q] = pair_of(point + (p * n_quads + q) * 4);
            odd[p][q] = pair_of(point + (p * n_quads + q) * 4 + 1);
        }
    }
    for (uint32_t v = 0; v < n_vectors; v++, at = _mm256_add_epi32(at, _mm256_set1_epi32(8))) {
        __m256i sums[POINTS];

        for (uint32_t p = 0; p < POINTS; p++)
            sums[p] = _mm256_loadu_si256((const __m256i *)(a->bias + 8 * v));
        for (uint32_t q = 0; q < n_quads; q++) {
            __m256i bytes = _mm256_load_si256((const __m256i *)(a->centres + ((uint64_t)q * n_vectors + v) * 32));
            __m256i evens = _mm256_and_si256(bytes, low), odds = _mm256_srli_epi16(bytes, 8);

            for (uint32_t p = 0; p < POINTS; p++)
                sums[p] = _mm256_add_epi32(sums[p], _mm256_add_epi32(_mm256_madd_epi16(evens, even[p][q]),
                                                                     _mm256_madd_epi16(odds, odd[p][q])));
        }
        for (uint32_t p = 0; p < POINTS; p++) {
            where[p] = _mm256_blendv_epi8(where[p], at, _mm256_cmpgt_epi32(sums[p], best[p]));
            best[p] = _mm256_max_epi32(best[p], sums[p]);
        }
    }
    for (uint32_t p = 0; p < POINTS; p++) {
        int32_t  values[8];
        uint32_t indices[8], lane = 0;

        _mm256_storeu_si256((__m256i *)values, best[p]);
        _mm256_storeu_si256((__m256i *)indices, where[p]);
        for (uint32_t i = 1; i < 8; i++)
            lane = values[i] > values[lane] || (values[i] == values[lane] && indices[i] < indices[lane]) ? i : lane;
        a->nearest[first + p] = (uint16_t)indices[lane];
    }
}

static void assign_256(const hsri_assign_args *a)
{
    for (uint32_t first = 0; first < a->n_points; first += POINTS) {
        switch (a->n_quads) {
        case 2:  assign_points(a, first, 2); break;
        case 4:  assign_points(a, first, 4); break;
        default: assign_points(a, first, 6); break;
        }
    }
}

void hsri_cluster_kernels_fill_avx2(hsri_cluster_kernels *k)
{
    *k = (hsri_cluster_kernels){ assign_256, score_clusters_256, score_families_256, score_members_256, score_votes_256 };
}
