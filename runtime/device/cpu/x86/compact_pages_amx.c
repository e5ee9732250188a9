/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: units of compact pages as bf16 pages, for queries so many that codes are better unpacked once for all of them than by each call.
 * Scales and means are folded in: a component is base + scale * code, rounded to bf16. Keys stay in the calibrated basis, where the
 * page's mean goes, too, less the calibration's mean: what many models have in a few channels all the time would cost the rest its bits. */
#include <assert.h>
#include <immintrin.h>
#include <string.h>

#include "device/cpu/kernels.h"
#include "device/cpu/x86/lanes512.h"
#include "device/formats.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

/* Of a page: component = base + scale * code. */
typedef struct channels {
    _Alignas(64) float k_scale[HSRI_ATTEND_MAX_HEAD_DIM], k_base[HSRI_ATTEND_MAX_HEAD_DIM];
    _Alignas(64) float v_scale[HSRI_ATTEND_MAX_HEAD_DIM], v_base[HSRI_ATTEND_MAX_HEAD_DIM];
} channels;

INLINE __m512 scales_at(const uint8_t *bytes, float unit)
{
    return _mm512_mul_ps(scales_of(_mm_loadu_si128((const __m128i *)bytes)), _mm512_set1_ps(unit));
}

INLINE float key_middle(uint32_t d, uint32_t j) { return j >= d / 2 ? 1.5f : j < hsri_n6(d) ? 31.5f : 7.5f; }

/* The mean key in the calibrated basis, about the calibration's. */
INLINE void rotate_mean(const hsri_lay_out_args *a, uint32_t d, const uint8_t *slot, float step, float *out)
{
    const int8_t *codes = (const int8_t *)hsri_key_means(slot, d);
    for (uint32_t j = 0; j < d; j += 16) {
        __m512 sum = _mm512_setzero_ps();
        for (uint32_t i = 0; i < d; i++) {
            sum = _mm512_fmadd_ps(_mm512_set1_ps((float)codes[i] * step), _mm512_loadu_ps(a->calibration.a + (size_t)i * d + j), sum);
        }
        _mm512_store_ps(out + j, sum);
    }
}

INLINE void read_channels(const hsri_lay_out_args *a, uint32_t d, const uint8_t *slot, channels *c)
{
    hsri_page_header h;
    memcpy(&h, slot, sizeof h);
    rotate_mean(a, d, slot, h.k_scale, c->k_base);
    for (uint32_t j = 0; j < d; j += 16) {
        _mm512_store_ps(c->k_scale + j, scales_at(hsri_key_scales(slot) + j, h.k_unit));
        __m512 scale = scales_at(hsri_value_scales(slot, d) + j, h.v_unit);
        __m512 mean = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(hsri_value_means(slot, d) + j))));
        mean = _mm512_fmadd_ps(mean, _mm512_set1_ps(h.v_scale), _mm512_loadu_ps(a->calibration.mean_v + j));
        _mm512_store_ps(c->v_scale + j, scale);
        _mm512_store_ps(c->v_base + j, _mm512_fnmadd_ps(scale, _mm512_set1_ps(7.5f), mean));
    }
    for (uint32_t j = 0; j < d; j++) {
        c->k_base[j] -= c->k_scale[j] * key_middle(d, j);
    }
}

/* Component j of a unit's 16 tokens. */
INLINE __m512i key_codes(const uint8_t *slot, uint32_t d, uint32_t unit, uint32_t j)
{
    const __m512i token = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    if (j >= d / 2) {
        uint32_t k = j - d / 2;
        __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(hsri_key_pairs(slot, d, unit) + k / 8 * 32)));
        return _mm512_and_si512(_mm512_srli_epi32(words, 2 * (k % 8)), _mm512_set1_epi32(3));
    }
    __m512i high = _mm512_loadu_si512(hsri_key_nibbles(slot, d, unit) + j / 8 * 64);
    high = _mm512_and_si512(_mm512_srli_epi32(high, hsri_nibble_shift(j % 8)), _mm512_set1_epi32(15));
    if (j >= hsri_n6(d)) {
        return high;
    }
    int32_t plane;
    memcpy(&plane, hsri_key_lows(slot, d, unit) + 4 * j, sizeof plane);
    __m512i low = _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(plane), token), _mm512_set1_epi32(3));
    return _mm512_or_si512(_mm512_slli_epi32(high, 2), low);
}

/* Dwords of { first, second } in bf16. */
INLINE __m512i pairs_of(__m512 first, __m512 second)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

INLINE __m512 key_of(const channels *c, const uint8_t *slot, uint32_t d, uint32_t unit, uint32_t j)
{
    __m512 codes = _mm512_cvtepi32_ps(key_codes(slot, d, unit, j));
    return _mm512_fmadd_ps(codes, _mm512_set1_ps(c->k_scale[j]), _mm512_set1_ps(c->k_base[j]));
}

INLINE __m512 value_of(__m512i dwords, uint32_t token, __m512 scale, __m512 base)
{
    __m512i codes = _mm512_and_si512(_mm512_srli_epi32(dwords, hsri_nibble_shift(token)), _mm512_set1_epi32(15));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), scale, base);
}

/* Unit `unit` of a slot into unit `to` of a bf16 page. */
INLINE void lay_out_unit(const channels *c, const uint8_t *slot, uint32_t d, uint32_t unit, uint8_t *page, uint32_t to)
{
    uint8_t *keys = page + HSRI_PAGE_HEADER_BYTES, *values = keys + (size_t)d / 2 * HSRI_PAGE_TOKENS * 4;
    UNROLL
    for (uint32_t j = 0; j < d; j += 2) {
        __m512i pair = pairs_of(key_of(c, slot, d, unit, j), key_of(c, slot, d, unit, j + 1));
        _mm512_storeu_si512(keys + (size_t)j / 2 * HSRI_PAGE_TOKENS * 4 + to * 64, pair);
    }
    const uint8_t *codes = hsri_value_unit(HSRI_KV_TYPE_COMPACT, slot, d, unit);
    for (uint32_t j = 0; j < d; j += 16) {
        __m512 scale = _mm512_load_ps(c->v_scale + j), base = _mm512_load_ps(c->v_base + j);
        UNROLL
        for (uint32_t octet = 0; octet < 2; octet++) {
            __m512i dwords = _mm512_loadu_si512(codes + 4 * ((size_t)octet * d + j));
            UNROLL
            for (uint32_t t = 0; t < 8; t += 2) {
                size_t line = to * (HSRI_UNIT_TOKENS / 2) + 4 * octet + t / 2;
                _mm512_storeu_si512(values + (line * d + j) * 4, pairs_of(value_of(dwords, t, scale, base),
                                                                          value_of(dwords, t + 1, scale, base)));
            }
        }
    }
}

/* The slot of unit i > 0, if there is one and it is not that of the unit before. */
static void fetch_slot(const hsri_lay_out_args *a, uint32_t i, uint64_t bytes)
{
    for (uint64_t at = 0; i < a->n_units && a->slots[i] != a->slots[i - 1] && at < bytes; at += 64) {
        __builtin_prefetch(a->slots[i] + at);
    }
}

INLINE void lay_out(const hsri_lay_out_args *a, uint32_t d)
{
    channels c;
    for (uint32_t i = 0; i < a->n_units; i++) {
        fetch_slot(a, i + 1, 64 * d);
        if (i == 0 || a->slots[i] != a->slots[i - 1]) {
            read_channels(a, d, a->slots[i], &c);
        }
        lay_out_unit(&c, a->slots[i], d, a->units[i], a->pages + i / HSRI_PAGE_UNITS * a->page_bytes, i % HSRI_PAGE_UNITS);
    }
}

/* The common head size is compiled in. */
void hsri_lay_out_compact_amx(const hsri_lay_out_args *a)
{
    assert(a->head_dim % 16 == 0 && a->head_dim <= HSRI_ATTEND_MAX_HEAD_DIM);
    if (a->head_dim == 64) {
        lay_out(a, 64);
    } else {
        lay_out(a, a->head_dim);
    }
}
