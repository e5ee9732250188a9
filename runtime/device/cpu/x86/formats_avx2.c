/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2 and FMA: the words that formats_body.h is written in, for 8 floats. */
#include <immintrin.h>
#include <stdint.h>

#include "device/cpu/formats_encode.h"

#define WIDTH 8u
/* Registers: even and odd chains of 3 x 2, or sums of 3 x 4, are 12 of 16. */
#define TILE_ROWS 3u
#define TILE_UNITS 1u
#define TILE_STRIPS 4u

#define INLINE static inline __attribute__((always_inline))

typedef __m256  vec;
typedef __m256i ivec;

/* All ones in the first n lanes. */
static inline __m256i lanes(uint32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n > WIDTH ? (int)WIDTH : (int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vec vec_zero(void) { return _mm256_setzero_ps(); }
static inline vec vec_set(float f) { return _mm256_set1_ps(f); }
static inline vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
static inline vec vec_load_n(const float *p, uint32_t n) { return _mm256_maskload_ps(p, lanes(n)); }
static inline void vec_store(float *p, vec v) { _mm256_storeu_ps(p, v); }
static inline void vec_store_n(float *p, vec v, uint32_t n) { _mm256_maskstore_ps(p, lanes(n), v); }
static inline vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec vec_fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
/* b if either is NaN */
static inline vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec vec_round(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* a * 2^n for whole n in -252..254, gradually down to zero: in two steps, since 2^n itself need not be a normal number. */
static inline vec vec_scale2(vec a, vec n)
{
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    __m256i rest = _mm256_sub_epi32(whole, half);
    __m256i bias = _mm256_set1_epi32(127);
    __m256 s0 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 s1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(a, s0), s1);
}

static inline ivec ivec_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline ivec ivec_load_u16(const uint8_t *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline ivec ivec_and(ivec v, uint32_t bits) { return _mm256_and_si256(v, _mm256_set1_epi32((int)bits)); }
static inline ivec ivec_or(ivec a, ivec b) { return _mm256_or_si256(a, b); }
static inline ivec ivec_srl(ivec v, uint32_t n) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128((int)n)); }
static inline ivec ivec_sll(ivec v, uint32_t n) { return _mm256_sll_epi32(v, _mm_cvtsi32_si128((int)n)); }
static inline vec vec_from_int(ivec v) { return _mm256_cvtepi32_ps(v); }

static inline vec vec_int8(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }

static inline vec vec_int8_n(const uint8_t *p, uint32_t n)
{
    uint8_t bytes[WIDTH] = { 0 };
    memcpy(bytes, p, n < WIDTH ? n : WIDTH);
    return vec_int8(bytes);
}

/* What scale bytes stand for. */
static inline vec vec_scale_bytes(const uint8_t *p)
{
    __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(v, HSRI_SCALE_SHIFT), _mm256_set1_epi32((int)HSRI_SCALE_BIAS)));
}

INLINE ivec to_bit_0(ivec v, uint32_t shift)
{
    switch (shift) {
    case 2:  return _mm256_srli_epi32(v, 2);
    case 4:  return _mm256_srli_epi32(v, 4);
    case 6:  return _mm256_srli_epi32(v, 6);
    case 8:  return _mm256_srli_epi32(v, 8);
    case 10: return _mm256_srli_epi32(v, 10);
    case 12: return _mm256_srli_epi32(v, 12);
    case 14: return _mm256_srli_epi32(v, 14);
    case 16: return _mm256_srli_epi32(v, 16);
    case 20: return _mm256_srli_epi32(v, 20);
    case 24: return _mm256_srli_epi32(v, 24);
    case 28: return _mm256_srli_epi32(v, 28);
    default: return v;
    }
}

/* Nibble number i of each dword, 0 .. 15 */
INLINE vec vec_nibble(ivec v, uint32_t i)
{
    return _mm256_cvtepi32_ps(_mm256_and_si256(to_bit_0(v, hsri_nibble_shift(i)), _mm256_set1_epi32(15)));
}

INLINE vec vec_nibble_about_0(ivec v, uint32_t i) { return _mm256_sub_ps(vec_nibble(v, i), _mm256_set1_ps(7.5f)); }

/* Indices of a permutation have three bits: the table has every number twice. */
INLINE vec pair_numbers(ivec v)
{
    const __m256 numbers = _mm256_setr_ps(-1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f);
    return _mm256_permutevar8x32_ps(numbers, v);
}

/* Pair of bits number i of each dword */
INLINE vec vec_pair_about_0(ivec v, uint32_t i) { return pair_numbers(to_bit_0(v, 2 * i)); }

/* The pairs of bits of tokens 8 i to 8 i + 7 */
INLINE vec vec_low_plane(const uint8_t *p, uint32_t i)
{
    const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    uint16_t bits;
    memcpy(&bits, p + 2 * i, sizeof bits);
    return pair_numbers(_mm256_srlv_epi32(_mm256_set1_epi32(bits), shifts));
}

/* Two registers of sums in, one number out: halves are added to halves, in a fixed order. */
static inline float vec_sum2(vec a, vec b)
{
    __m256 h = _mm256_add_ps(a, b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

static inline float vec_largest(vec v)
{
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

#include "device/cpu/x86/formats_body.h"

void hsri_page_kernels_fill_avx2(hsri_page_kernels *k)
{
    fill(k);
    fill_encoders(k);
}
