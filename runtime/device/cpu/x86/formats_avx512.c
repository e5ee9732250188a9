/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 F/BW/DQ/VL: the words that formats_body.h is written in, for 16 floats. */
#include <immintrin.h>
#include <stdint.h>

#include "device/cpu/formats_encode.h"
#include "device/cpu/x86/lanes512.h"

#define WIDTH 16u
/* Registers: even and odd chains of 6 x 2, or sums of 6 x 4, are 24 of 32. */
#define TILE_ROWS 6u
#define TILE_UNITS 2u
#define TILE_STRIPS 4u

#define INLINE static inline __attribute__((always_inline))

typedef __m512  vec;
typedef __m512i ivec;

static inline vec vec_zero(void) { return _mm512_setzero_ps(); }
static inline vec vec_set(float f) { return _mm512_set1_ps(f); }
static inline vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
static inline vec vec_load_n(const float *p, uint32_t n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
static inline void vec_store(float *p, vec v) { _mm512_storeu_ps(p, v); }
static inline void vec_store_n(float *p, vec v, uint32_t n) { _mm512_mask_storeu_ps(p, lanes(n), v); }
static inline vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec vec_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
/* b if either is NaN */
static inline vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec vec_round(vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* a * 2^n for whole n, gradually down to zero */
static inline vec vec_scale2(vec a, vec n) { return _mm512_scalef_ps(a, n); }

static inline ivec ivec_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline ivec ivec_load_u16(const uint8_t *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
static inline ivec ivec_and(ivec v, uint32_t bits) { return _mm512_and_si512(v, _mm512_set1_epi32((int)bits)); }
static inline ivec ivec_or(ivec a, ivec b) { return _mm512_or_si512(a, b); }
static inline ivec ivec_srl(ivec v, uint32_t n) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128((int)n)); }
static inline ivec ivec_sll(ivec v, uint32_t n) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128((int)n)); }
static inline vec vec_from_int(ivec v) { return _mm512_cvtepi32_ps(v); }

static inline vec vec_int8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }

static inline vec vec_int8_n(const uint8_t *p, uint32_t n)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes(n), p)));
}

/* What scale bytes stand for. */
static inline vec vec_scale_bytes(const uint8_t *p) { return scales_of(_mm_loadu_si128((const __m128i *)p)); }

/* A permutation looks at the low four bits of an index only, so it masks a code and makes it a number in one step. Its table repeats
 * where codes are shorter. */
INLINE ivec to_bit_0(ivec v, uint32_t shift)
{
    switch (shift) {
    case 2:  return _mm512_srli_epi32(v, 2);
    case 4:  return _mm512_srli_epi32(v, 4);
    case 6:  return _mm512_srli_epi32(v, 6);
    case 8:  return _mm512_srli_epi32(v, 8);
    case 10: return _mm512_srli_epi32(v, 10);
    case 12: return _mm512_srli_epi32(v, 12);
    case 14: return _mm512_srli_epi32(v, 14);
    case 16: return _mm512_srli_epi32(v, 16);
    case 20: return _mm512_srli_epi32(v, 20);
    case 24: return _mm512_srli_epi32(v, 24);
    case 28: return _mm512_srli_epi32(v, 28);
    default: return v;
    }
}

/* Nibble number i of each dword, 0 .. 15 */
INLINE vec vec_nibble(ivec v, uint32_t i)
{
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(to_bit_0(v, hsri_nibble_shift(i)), numbers);
}

INLINE vec vec_nibble_about_0(ivec v, uint32_t i)
{
    const __m512 numbers = _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f,
                                          0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f);
    return _mm512_permutexvar_ps(to_bit_0(v, hsri_nibble_shift(i)), numbers);
}

INLINE __m512 numbers_of_pairs(void)
{
    return _mm512_setr_ps(-1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f);
}

/* Pair of bits number i of each dword */
INLINE vec vec_pair_about_0(ivec v, uint32_t i) { return _mm512_permutexvar_ps(to_bit_0(v, 2 * i), numbers_of_pairs()); }

/* The pairs of bits of 16 tokens */
INLINE vec vec_low_plane(const uint8_t *p, uint32_t i)
{
    const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    int32_t bits;
    (void)i;
    memcpy(&bits, p, sizeof bits);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32(bits), shifts), numbers_of_pairs());
}

/* Two registers of sums in, one number out: halves are added to halves, in a fixed order. */
static inline float vec_sum2(vec a, vec b)
{
    __m512 v = _mm512_add_ps(a, b);
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

static inline float vec_largest(vec v)
{
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

#include "device/cpu/x86/formats_body.h"

void hsri_page_kernels_fill_avx512(hsri_page_kernels *k)
{
    fill(k);
    fill_encoders(k);
}
