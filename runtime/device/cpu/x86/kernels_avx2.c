/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2, FMA and F16C: the words that kernels_body.h is written in, for 8 floats. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "device/cpu/kernels.h"

#define WIDTH 8u
/* Registers: 3 x 2 tiles of even and odd chains are 12 of 16. */
#define TILE_ROWS 3u
#define TILE_STRIPS 2u
/* Most rows that are multiplied with codes unpacked in registers, one panel at a time. */
#define FEW_ROWS 3u

typedef __m256  vec;
typedef __m256i ivec;
typedef __m256d dvec;

/* All ones in the first n lanes. */
static inline __m256i lanes(uint32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n > WIDTH ? (int)WIDTH : (int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vec vec_zero(void) { return _mm256_setzero_ps(); }
static inline vec vec_set(float f) { return _mm256_set1_ps(f); }
static inline vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
/* Masked stores are slow here, and whole registers are the rule. */
static inline vec vec_load_n(const float *p, uint32_t n) { return n >= WIDTH ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, lanes(n)); }
static inline void vec_store(float *p, vec v) { _mm256_storeu_ps(p, v); }

static inline void vec_store_n(float *p, vec v, uint32_t n)
{
    if (n >= WIDTH)
        _mm256_storeu_ps(p, v);
    else
        _mm256_maskstore_ps(p, lanes(n), v);
}

static inline vec vec_load_f16(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec vec_fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
static inline vec vec_fms(vec a, vec b, vec c) { return _mm256_fmsub_ps(a, b, c); }
/* b if either is NaN */
static inline vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec vec_round(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* the first n lanes of a, the others of b */
static inline vec vec_first_n(vec a, vec b, uint32_t n) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(lanes(n))); }

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

static inline uint32_t vec_any_nonfinite(vec v)
{
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(v), exponent), exponent)) != 0;
}

static inline ivec ivec_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline ivec ivec_load_n(const uint8_t *p, uint32_t n) { return _mm256_maskload_epi32((const int *)p, lanes(n)); }
static inline vec vec_from_bits(ivec v) { return _mm256_castsi256_ps(v); }
static inline vec vec_low_bf16(ivec v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
static inline vec vec_high_bf16(ivec v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000u))); }

static inline vec vec_byte(ivec v, uint32_t j)
{
    switch (j) {
    case 0:  v = _mm256_slli_epi32(v, 24); break;
    case 1:  v = _mm256_slli_epi32(v, 16); break;
    case 2:  v = _mm256_slli_epi32(v, 8); break;
    default: break;
    }
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 24));
}

static inline vec vec_nibble(ivec v, uint32_t j)
{
    switch (j) {
    case 1: v = _mm256_srli_epi32(v, 4); break;
    case 2: v = _mm256_srli_epi32(v, 8); break;
    case 3: v = _mm256_srli_epi32(v, 12); break;
    case 4: v = _mm256_srli_epi32(v, 16); break;
    case 5: v = _mm256_srli_epi32(v, 20); break;
    case 6: v = _mm256_srli_epi32(v, 24); break;
    case 7: return _mm256_cvtepi32_ps(_mm256_srli_epi32(v, 28));
    default: break;
    }
    return _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32(15)));
}

/* As bfloat16, nearest even; a NaN keeps its top bits and gets its quiet bit. */
static inline __m256i bf16_bits(vec v)
{
    __m256i u = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}

static inline void vec_store_bf16(uint16_t *p, vec v)
{
    __m256i bits = bf16_bits(v);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}

/* n numbers as the lower or upper halves of dwords */
static inline void vec_store_bf16_half(uint8_t *p, uint32_t half, vec v, uint32_t n)
{
    uint16_t bits[WIDTH];
    vec_store_bf16(bits, v);
    for (uint32_t i = 0; i < n; i++) {
        memcpy(p + i * 4 + half * 2, bits + i, 2);
    }
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

static inline dvec dvec_zero(void) { return _mm256_setzero_pd(); }
static inline dvec dvec_low(vec v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
static inline dvec dvec_high(vec v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
static inline dvec dvec_fma(dvec a, dvec b, dvec c) { return _mm256_fmadd_pd(a, b, c); }

static inline double dvec_sum2(dvec a, dvec b)
{
    __m256d h = _mm256_add_pd(a, b);
    __m128d q = _mm_add_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_add_sd(q, _mm_unpackhi_pd(q, q)));
}

#include "device/cpu/x86/kernels_body.h"
#include "device/cpu/x86/attend_avx2.h"

void hsri_kernels_fill_avx2(hsri_kernels *k)
{
    fill(k);
    k->attend[HSRI_KV_TYPE_F32] = attend_f32;
    k->attend[HSRI_KV_TYPE_BF16] = attend_bf16;
}
