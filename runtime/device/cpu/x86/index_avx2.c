/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2: the portable kernels built for 8 floats, and exponentials, which the C library has one at a time. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

/* e^x to 2e-5: 0 below -87, infinity above 88; NaN is NaN. */
static inline __m256 exp_8(__m256 x)
{
    const __m256 low = _mm256_set1_ps(-87.0f), high = _mm256_set1_ps(88.0f);
    __m256       n = _mm256_mul_ps(_mm256_min_ps(high, _mm256_max_ps(low, x)), _mm256_set1_ps(1.44269504f));
    __m256       whole = _mm256_round_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm256_sub_ps(n, whole);
    __m256       y = _mm256_fmadd_ps(_mm256_set1_ps(0.0013333558f), f, _mm256_set1_ps(0.0096181291f));
    __m256i      power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);

    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0.055504109f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0.24022651f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0.69314718f));
    y = _mm256_mul_ps(_mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0f)), _mm256_castsi256_ps(power));
    y = _mm256_and_ps(y, _mm256_cmp_ps(x, low, _CMP_NLE_UQ));
    return _mm256_blendv_ps(y, _mm256_add_ps(x, _mm256_set1_ps(INFINITY)), _mm256_cmp_ps(x, high, _CMP_NLE_UQ));
}

#define HSRI_ADD_EXPS
static inline void add_exps(const float *logits, float scale, float mean, float *sums)
{
    for (uint32_t i = 0; i < 16; i += 8) {
        __m256 x = _mm256_fmadd_ps(_mm256_loadu_ps(logits + i), _mm256_set1_ps(scale), _mm256_set1_ps(mean));

        _mm256_storeu_ps(sums + i, _mm256_add_ps(_mm256_loadu_ps(sums + i), exp_8(x)));
    }
}

#include "device/cpu/index_encode.h"
#include "device/cpu/index_lanes.h"

void hsri_sparse_kernels_fill_avx2(hsri_sparse_kernels *k)
{
    fill_lanes(k);
    k->encode = encode;
}
