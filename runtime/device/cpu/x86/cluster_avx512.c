/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 F/BW/DQ/VL: the word of cluster_body512.h in the instructions that every such processor has. */
#include <immintrin.h>

/* acc[i] + sum of the four products of bytes in dword i; codes are at most 15, so nothing saturates */
static inline __m512i dot_bytes(__m512i acc, __m512i codes, __m512i weights)
{
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, weights), _mm512_set1_epi16(1)));
}

#include "device/cpu/x86/cluster_body512.h"

void hsri_cluster_kernels_fill_avx512(hsri_cluster_kernels *k)
{
    k->score = score_clusters_512;
    k->score_families = score_families_512;
    k->score_members = score_members_512;
    k->score_votes = score_votes_512;
}
