/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels of the index in 256-bit registers share. */
#ifndef HSRI_CPU_X86_LANES256_H
#define HSRI_CPU_X86_LANES256_H

#include <immintrin.h>
#include <stdint.h>

#include "device/cpu/lanes.h"

#define LOG2E 1.44269504f
#define UNROLL _Pragma("GCC unroll 8")

/* All ones in the lanes from `first` on and before `end`. */
static inline __attribute__((always_inline)) __m256i lanes_in(uint32_t first, uint32_t end)
{
    const __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

    return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)first), at), _mm256_cmpgt_epi32(_mm256_set1_epi32((int)end), at));
}

static inline float sum8(__m256 v)
{
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

/* 2^x to 0.2 %: 0 below the normal range, above it more than any mass. */
static inline __attribute__((always_inline)) __m256 exp2_8(__m256 x)
{
    __m256  t = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-126.0f));
    __m256  whole = _mm256_floor_ps(t), f = _mm256_sub_ps(t, whole);
    __m256  y = _mm256_fmadd_ps(f, _mm256_set1_ps(0.33718944f), _mm256_set1_ps(0.65763628f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);

    y = _mm256_mul_ps(_mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0017247f)), _mm256_castsi256_ps(power));
    return _mm256_and_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_GE_OQ));
}

/* acc[i] + sum of the four products of bytes in dword i; codes are at most 15, so nothing saturates */
static inline __attribute__((always_inline)) __m256i dot_bytes(__m256i acc, __m256i codes, __m256i weights)
{
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, weights), _mm256_set1_epi16(1)));
}

/* Weights, 8 in a vector, as bytes of the largest. Returns what a step stands for; NaN if one is not finite, and bytes of 0. */
INLINE float weights_to_bytes(const __m256 *weights, uint32_t n, int8_t *bytes)
{
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256  most = _mm256_setzero_ps(), nothing = most, inverse;
    _Alignas(32) float each[8], largest = 0.0f;

    for (uint32_t i = 0; i < n; i++) {
        most = _mm256_max_ps(_mm256_and_ps(weights[i], no_sign), most);
        nothing = _mm256_fmadd_ps(weights[i], _mm256_setzero_ps(), nothing);
    }
    if (_mm256_movemask_ps(_mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q))) {
        memset(bytes, 0, 8 * n);
        return NAN;
    }
    _mm256_store_ps(each, most);
    for (uint32_t i = 0; i < 8; i++)
        largest = each[i] > largest ? each[i] : largest;
    inverse = _mm256_set1_ps(largest > 0x1p-100f ? 127.0f / largest : 0.0f);
    for (uint32_t i = 0; i < n; i++) {
        __m256i words = _mm256_cvtps_epi32(_mm256_mul_ps(weights[i], inverse));
        __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));

        _mm_storel_epi64((__m128i *)(bytes + 8 * i), _mm_packs_epi16(halves, halves));
    }
    return largest / 127.0f;
}

/* n a multiple of 8 */
INLINE float sum_bytes(const int8_t *bytes, uint32_t n)
{
    __m256i all = _mm256_setzero_si256();

    for (uint32_t i = 0; i < n; i += 8)
        all = _mm256_add_epi32(all, _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + i))));
    return sum8(_mm256_cvtepi32_ps(all));
}

#endif
