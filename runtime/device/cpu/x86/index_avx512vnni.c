/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 with VNNI: the words of index_body512.h are one instruction each. */
#include <immintrin.h>

static inline __m512i dot_bytes(__m512i acc, __m512i codes, __m512i weights) { return _mm512_dpbusd_epi32(acc, codes, weights); }
static inline __m512i dot_words(__m512i acc, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(acc, a, b); }

#include "device/cpu/x86/index_body512.h"

void hsri_sparse_kernels_fill_avx512vnni(hsri_sparse_kernels *k)
{
    fill_512(k);
}
