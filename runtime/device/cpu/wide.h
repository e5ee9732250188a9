/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors as wide as the level's registers, in plain C. For code whose numbers do not depend on how wide they are. Functions take pointers
 * to them: how values are passed depends on the level, too. */
#ifndef HSRI_CPU_WIDE_H
#define HSRI_CPU_WIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDE 16u
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define WIDE 8u
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define WIDE 4u
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#endif

typedef float   wide_float __attribute__((vector_size(4 * WIDE)));
typedef int32_t wide_int __attribute__((vector_size(4 * WIDE)));
typedef uint8_t wide_byte __attribute__((vector_size(WIDE)));

#define WIDE_UNROLL _Pragma("GCC unroll 16")
#define WIDE_INLINE static inline __attribute__((always_inline))

/* c is brought between 0 and most; not a number becomes 0. */
WIDE_INLINE void wide_limit(wide_float *c, const wide_float *most)
{
#if defined(__AVX512F__)    /* compilers do not see that these are an instruction each */
    *c = (wide_float)_mm512_min_ps(_mm512_max_ps((__m512)*c, _mm512_setzero_ps()), (__m512)*most);
#else
    wide_int below;

    *c = (wide_float)((wide_int)*c & (*c > 0));
    below = *c < *most;
    *c = (wide_float)(((wide_int)*c & below) | ((wide_int)*most & ~below));
#endif
}

/* x is what comparisons make. */
WIDE_INLINE bool wide_any(const wide_int *x)
{
    uint64_t part[sizeof *x / 8], all = 0;

    memcpy(part, x, sizeof part);
    for (uint32_t i = 0; i < sizeof part / sizeof *part; i++)
        all |= part[i];
    return all != 0;
}

/* to[j][i] = from[i][j] - minus[j], i and j below WIDE, of rows `from_stride` and `to_stride` apart; minus may be NULL. Rows i and
 * i + WIDE / 2 take turns, as often as their number has bits: each time, the last bit of a place's column becomes the first of its row. */
WIDE_INLINE void transpose_square(const float *from, size_t from_stride, const float *minus, float *to, size_t to_stride)
{
    wide_float row[WIDE], next[WIDE], less = { 0 };

    if (minus)
        memcpy(&less, minus, sizeof less);
    WIDE_UNROLL for (uint32_t i = 0; i < WIDE; i++) {
        memcpy(&row[i], from + i * from_stride, sizeof row[i]);
        if (minus)
            row[i] -= less;
    }
    WIDE_UNROLL for (uint32_t bit = 1; bit < WIDE; bit *= 2) {
        WIDE_UNROLL for (uint32_t i = 0; i < WIDE / 2; i++) {
            next[2 * i] = __builtin_shufflevector(row[i], row[i + WIDE / 2], FIRST_HALVES);
            next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + WIDE / 2], SECOND_HALVES);
        }
        WIDE_UNROLL for (uint32_t i = 0; i < WIDE; i++)
            row[i] = next[i];
    }
    WIDE_UNROLL for (uint32_t j = 0; j < WIDE; j++)
        memcpy(to + j * to_stride, &row[j], sizeof row[j]);
}

/* to[j][i] = from[i][j] - minus[j]; rows and columns are multiples of WIDE. */
static inline void transpose(const float *from, size_t from_stride, uint32_t n_rows, uint32_t n_columns, const float *minus, float *to,
                             size_t to_stride)
{
    for (uint32_t i = 0; i < n_rows; i += WIDE)
        for (uint32_t j = 0; j < n_columns; j += WIDE)
            transpose_square(from + i * from_stride + j, from_stride, minus ? minus + j : NULL, to + j * to_stride + i, to_stride);
}

#endif
