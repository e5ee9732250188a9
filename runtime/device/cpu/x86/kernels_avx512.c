/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 F/BW/DQ/VL: the words that kernels_body.h is written in, for 16 floats. */
#include <immintrin.h>
#include <stdint.h>

#define WIDTH 16u
/* Registers: 6 x 2 tiles of even and odd chains are 24 of 32. */
#define TILE_ROWS 6u
#define TILE_STRIPS 2u
/* Most rows that are multiplied with codes unpacked in registers, one panel at a time. */
#define FEW_ROWS 8u

typedef __m512  vec;
typedef __m512i ivec;
typedef __m512d dvec;

static inline __mmask16 lanes(uint32_t n) { return n >= WIDTH ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1u); }

static inline vec vec_zero(void) { return _mm512_setzero_ps(); }
static inline vec vec_set(float f) { return _mm512_set1_ps(f); }
static inline vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
static inline vec vec_load_n(const float *p, uint32_t n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
static inline void vec_store(float *p, vec v) { _mm512_storeu_ps(p, v); }
static inline void vec_store_n(float *p, vec v, uint32_t n) { _mm512_mask_storeu_ps(p, lanes(n), v); }
static inline vec vec_load_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec vec_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
static inline vec vec_fms(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); }
/* b if either is NaN */
static inline vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec vec_round(vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* a * 2^n for whole n, gradually down to zero */
static inline vec vec_scale2(vec a, vec n) { return _mm512_scalef_ps(a, n); }
/* the first n lanes of a, the others of b */
static inline vec vec_first_n(vec a, vec b, uint32_t n) { return _mm512_mask_mov_ps(b, lanes(n), a); }

static inline uint32_t vec_any_nonfinite(vec v)
{
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(v), exponent), exponent) != 0;
}

static inline ivec ivec_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline ivec ivec_load_n(const uint8_t *p, uint32_t n) { return _mm512_maskz_loadu_epi32(lanes(n), p); }
static inline vec vec_from_bits(ivec v) { return _mm512_castsi512_ps(v); }
static inline vec vec_low_bf16(ivec v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
static inline vec vec_high_bf16(ivec v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000u))); }

static inline vec vec_byte(ivec v, uint32_t j)
{
    switch (j) {
    case 0:  v = _mm512_slli_epi32(v, 24); break;
    case 1:  v = _mm512_slli_epi32(v, 16); break;
    case 2:  v = _mm512_slli_epi32(v, 8); break;
    default: break;
    }
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 24));
}

/* A permutation looks at the low four bits of an index only, so it masks and converts a nibble in one step. */
static inline vec vec_nibble(ivec v, uint32_t j)
{
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    switch (j) {
    case 1: v = _mm512_srli_epi32(v, 4); break;
    case 2: v = _mm512_srli_epi32(v, 8); break;
    case 3: v = _mm512_srli_epi32(v, 12); break;
    case 4: v = _mm512_srli_epi32(v, 16); break;
    case 5: v = _mm512_srli_epi32(v, 20); break;
    case 6: v = _mm512_srli_epi32(v, 24); break;
    case 7: v = _mm512_srli_epi32(v, 28); break;
    default: break;
    }
    return _mm512_permutexvar_ps(v, numbers);
}

/* As bfloat16, nearest even; a NaN keeps its top bits and gets its quiet bit. */
static inline __m512i bf16_bits(vec v)
{
    __m512i u = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __m512i nan = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), nan);
}

static inline void vec_store_bf16(uint16_t *p, vec v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(bf16_bits(v)));
}

/* n numbers as the lower or upper halves of dwords */
static inline void vec_store_bf16_half(uint8_t *p, uint32_t half, vec v, uint32_t n)
{
    __m512i bits = bf16_bits(v);
    __mmask32 used = (__mmask32)((1ull << (2 * n)) - 1u);
    if (half == 0) {
        _mm512_mask_storeu_epi16(p, used & 0x55555555u, bits);
    } else {
        _mm512_mask_storeu_epi16(p, used & 0xaaaaaaaau, _mm512_slli_epi32(bits, 16));
    }
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

static inline dvec dvec_zero(void) { return _mm512_setzero_pd(); }
static inline dvec dvec_low(vec v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
static inline dvec dvec_high(vec v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
static inline dvec dvec_fma(dvec a, dvec b, dvec c) { return _mm512_fmadd_pd(a, b, c); }

static inline double dvec_sum2(dvec a, dvec b)
{
    __m512d v = _mm512_add_pd(a, b);
    __m256d h = _mm256_add_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1));
    __m128d q = _mm_add_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_add_sd(q, _mm_unpackhi_pd(q, q)));
}

#include "device/cpu/x86/kernels_body.h"
#include "device/cpu/x86/attend_runs.h"

void hsri_kernels_fill_avx512(hsri_kernels *k)
{
    fill(k);
    k->attend[HSRI_KV_TYPE_F32] = attend_f32;
    k->attend[HSRI_KV_TYPE_BF16] = attend_bf16;
}
