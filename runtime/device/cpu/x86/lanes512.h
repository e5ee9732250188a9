/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels in 512-bit registers share. */
#ifndef HSRI_CPU_X86_LANES512_H
#define HSRI_CPU_X86_LANES512_H

#include <immintrin.h>
#include <stdint.h>

#include "device/formats.h"

/* The first n lanes, all if there are fewer lanes. */
static inline __mmask16 lanes(uint32_t n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1u); }

/* What scale bytes stand for, but for their unit. */
static inline __attribute__((always_inline)) __m512 scales_of(__m128i bytes)
{
    __m512i v = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), HSRI_SCALE_SHIFT);
    return _mm512_castsi512_ps(_mm512_add_epi32(v, _mm512_set1_epi32((int)HSRI_SCALE_BIAS)));
}

/* 2^t: 2^floor(t) times a polynomial of the fraction, right to 8e-5, a fiftieth of what rounding to bf16 may move it. NaN stays NaN. */
static inline __attribute__((always_inline)) __m512 exp2_near(__m512 t)
{
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0x1.3f96a4p-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.cefc4cp-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.64444cp-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.fff632p-1f));
    return _mm512_scalef_ps(p, t);
}

/* 2^x to 0.2 %: 0 below the normal range, infinity above. */
static inline __attribute__((always_inline)) __m512 exp2_16(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(0.33718944f), _mm512_set1_ps(0.65763628f));

    return _mm512_scalef_ps(_mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0017247f)), x);
}

#endif
