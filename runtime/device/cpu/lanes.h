/* SPDX-License-Identifier: Apache-2.0 */
/* Sums in plain C as 16 lanes side by side, which compilers turn into vectors of whatever width the including file is built for. One order
 * of additions, so every level has the same bits. */
#ifndef HSRI_CPU_LANES_H
#define HSRI_CPU_LANES_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "device/cpu/sparse_kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16u

/* Lanes are added in halves. */
INLINE float lanes_sum(float *acc)
{
    for (uint32_t half = LANES / 2; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            acc[i] += acc[i + half];
    return acc[0];
}

INLINE float dot_float(const float *a, const float *b, uint32_t d)
{
    float    acc[LANES] = { 0 };
    uint32_t j = 0;

    for (; j + LANES <= d; j += LANES)
        for (uint32_t i = 0; i < LANES; i++)
            acc[i] += a[j + i] * b[j + i];
    for (uint32_t i = 0; j + i < d; i++)
        acc[i] += a[j + i] * b[j + i];
    return lanes_sum(acc);
}

/* A number times zero is zero; what is none, or infinite, is not. */
static inline bool all_finite(const float *x, uint64_t n)
{
    float    zero[4 * LANES] = { 0 };
    uint64_t i = 0;

    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (uint32_t l = 0; l < 4 * LANES; l++)
            zero[l] += x[i + l] * 0.0f;
    for (; i < n; i++)
        zero[0] += x[i] * 0.0f;
    for (uint32_t l = LANES; l < 4 * LANES; l++)
        zero[l % LANES] += zero[l];
    return lanes_sum(zero) == 0.0f;
}

/* A sum of exponentials as a mass: NaN is nothing, infinity the most. */
INLINE float as_mass(float sum) { return sum > 0.0f ? (sum < HSRI_MASS_MAX ? sum : HSRI_MASS_MAX) : 0.0f; }

#endif
