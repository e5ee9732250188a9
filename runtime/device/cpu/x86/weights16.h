/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax weights as bf16, made in whole numbers of 16 bits, 32 at a time. */
#ifndef HSRI_CPU_X86_WEIGHTS16_H
#define HSRI_CPU_X86_WEIGHTS16_H

#include <immintrin.h>

/* A weight 2^-t is made of a depth: how far t is below 2^WEIGHT_TOP, in steps of 2^(1/128). */
#define WEIGHT_STEPS 128.0f
#define WEIGHT_TOP 8.0f

/* Two times 16 depths as whole numbers, in the order that packing makes. What is negative, NaN or beyond 2^31 becomes 0. */
static inline __attribute__((always_inline)) __m512i whole_depths(__m512 low, __m512 high)
{
    return _mm512_packus_epi32(_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high));
}

/* What making weights needs, in registers: compilers would rather make constants anew, with instructions of the ports that are busiest. */
typedef struct weight_maker {
    __m512i top, rest, order, upper;
    __mmask64 even_bytes;
} weight_maker;

static inline __attribute__((always_inline)) weight_maker weight_maker_new(void)
{
    weight_maker m = {
        .top = _mm512_set1_epi8(0x43),
        .rest = _mm512_set_epi8(-128, 127, 126, 126, 125, 125, 124, 124, 123, 123, 122, 122, 121, 121, 121, 120,
                                 120, 120, 119, 119, 119, 119, 118, 118, 118, 118, 118, 117, 117, 117, 117, 117,
                                 117, 117, 117, 117, 117, 117, 117, 117, 117, 118, 118, 118, 118, 119, 119, 119,
                                 119, 120, 120, 121, 121, 122, 122, 123, 123, 124, 124, 125, 126, 126, 127, -128),
        .order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
        .upper = _mm512_set1_epi32((int)0xffff0000u),
        .even_bytes = 0x5555555555555555u,
    };
    __asm__("" : "+v"(m.top), "+v"(m.rest), "+v"(m.order), "+v"(m.upper), "+k"(m.even_bytes));
    return m;
}

/* Weights in the order of tokens. A bf16 with exponent e and fraction f has the bits e, f, for 2^e (1 + f): linear between powers of 2. So
 * the bits are those of 2^WEIGHT_TOP less the depth, less what 1 + f is above 2^f, which is looked up by 6 bits of the depth. */
static inline __attribute__((always_inline)) __m512i weights_of(const weight_maker *m, __m512i depths)
{
    __m512i from = _mm512_mask_permutexvar_epi8(m->top, m->even_bytes, _mm512_srli_epi16(depths, 1), m->rest);
    return _mm512_permutexvar_epi64(m->order, _mm512_subs_epu16(from, depths));
}

/* The 32 weights as floats. */
static inline __attribute__((always_inline)) __m512 even_weights(__m512i weights)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16));
}

static inline __attribute__((always_inline)) __m512 odd_weights(const weight_maker *m, __m512i weights)
{
    return _mm512_castsi512_ps(_mm512_and_si512(weights, m->upper));
}

#endif
