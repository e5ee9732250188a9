/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of encoded pages, as docs/kv-formats.md describes them: what encoders, decoders and kernels share.
 *
 * All formats have the same shape: key component j of token t is k_mean[j] + k_scale[j] * code (in the calibrated basis for compact and
 * vtq, whose means are added in the plain one), value component j is v_mean[j] + v_scale[j] * code. */
#ifndef HSRI_FORMATS_H
#define HSRI_FORMATS_H

#include <string.h>

#include "device/kv_format.h"

/* Key components of compact and vtq by their bits: 6 up to n6(d), then 4 up to d / 2, then 2. */
static inline uint32_t hsri_n6(uint32_t d) { return 3 * d / 16; }

/* Nibbles come by eight in dwords: which bits number i has. */
static inline uint32_t hsri_nibble_shift(uint32_t i) { return i % 4 * 8 + i / 4 * 4; }

/* A unit's value codes: 2 x d dwords, each of one component and 8 tokens x 4 bits; vtq has d words of further bits behind them. */
static inline uint32_t hsri_value_unit_bytes(hsri_kv_type format, uint32_t d) { return format == HSRI_KV_TYPE_VTQ ? 10 * d : 8 * d; }

/* Parts of a slot of compact or vtq behind the header. */
static inline const uint8_t *hsri_key_scales(const uint8_t *slot) { return slot + HSRI_PAGE_HEADER_BYTES; }
static inline const uint8_t *hsri_value_scales(const uint8_t *slot, uint32_t d) { return hsri_key_scales(slot) + d; }
static inline const uint8_t *hsri_key_means(const uint8_t *slot, uint32_t d) { return hsri_key_scales(slot) + 2 * d; }
static inline const uint8_t *hsri_value_means(const uint8_t *slot, uint32_t d) { return hsri_key_scales(slot) + 3 * d; }

/* Key codes are three arrays of four units each.
 * Nibbles: the 4 bits, or the high 4 of 6, of the first d/2 components: d/16 blocks of 8 components, each 16 dwords, one a token.
 * Pairs: the d/2 components of 2 bits: d/16 blocks of 8 components, each 16 words, one a token.
 * Low planes: the low 2 bits of the components of 6: a dword each, of 16 tokens x 2 bits. */
static inline const uint8_t *hsri_key_nibbles(const uint8_t *slot, uint32_t d, uint32_t unit)
{
    return hsri_key_scales(slot) + 4 * d + 4 * d * unit;
}

static inline const uint8_t *hsri_key_pairs(const uint8_t *slot, uint32_t d, uint32_t unit)
{
    return hsri_key_scales(slot) + 20 * d + 2 * d * unit;
}

static inline const uint8_t *hsri_key_lows(const uint8_t *slot, uint32_t d, uint32_t unit)
{
    return hsri_key_scales(slot) + 28 * d + 3 * d / 4 * unit;
}

static inline const uint8_t *hsri_value_unit(hsri_kv_type format, const uint8_t *slot, uint32_t d, uint32_t unit)
{
    return hsri_key_scales(slot) + 31 * d + unit * hsri_value_unit_bytes(format, d);
}

/* A scale byte is a small float, 4 bits of exponent and 4 of fraction: it stands for HSRI_SCALE_MAX down to 2^-15 units. */
#define HSRI_SCALE_MAX 1.9375f
#define HSRI_SCALE_BIAS ((127u - 15u) << 23)
#define HSRI_SCALE_SHIFT 19

static inline float hsri_scale_of(uint8_t byte)
{
    uint32_t bits = ((uint32_t)byte << HSRI_SCALE_SHIFT) + HSRI_SCALE_BIAS;
    float    f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Factor of a vtq token's codes, by its class: codes are 2 or 4 times finer, or the scale is another. */
static inline float hsri_vtq_code(const hsri_page_header *h, uint32_t token, uint32_t high, uint32_t low)
{
    if (h->wide == 0)
        return (float)(2 * high + low) * 0.5f - 7.75f;
    return h->wide >> token & 1 ? (float)(4 * high + low) * 0.25f - 7.875f : ((float)high - 7.5f) * h->narrow;
}

/* Number of low bits of a token of vtq in its unit's words, and where they start. */
static inline uint32_t hsri_vtq_low_bits(const hsri_page_header *h, uint32_t token)
{
    return h->wide == 0 ? 1 : 2 * (uint32_t)(h->wide >> token & 1);
}

static inline uint32_t hsri_vtq_low_shift(const hsri_page_header *h, uint32_t token)
{
    uint32_t first = token / HSRI_UNIT_TOKENS * HSRI_UNIT_TOKENS;
    uint64_t before = (h->wide & ((1ull << token) - 1)) >> first;

    return h->wide == 0 ? token - first : 2 * (uint32_t)__builtin_popcountll(before);
}

/* The arrays of an int8 page. */
static inline const uint8_t *hsri_int8_array(const uint8_t *slot, uint32_t d, uint32_t which)
{
    return slot + HSRI_PAGE_HEADER_BYTES + which * d * sizeof(float);
}
#define HSRI_INT8_K_MEAN 0
#define HSRI_INT8_K_SCALE 1
#define HSRI_INT8_V_MEAN 2
#define HSRI_INT8_V_SCALE 3
static inline const uint8_t *hsri_int8_keys(const uint8_t *slot, uint32_t d) { return hsri_int8_array(slot, d, 4); }
static inline const uint8_t *hsri_int8_values(const uint8_t *slot, uint32_t d) { return hsri_int8_keys(slot, d) + HSRI_PAGE_TOKENS * d; }

/* ---- in portable C, without regard to speed (page_decode.c) ---- */

/* Scales and means of one page, [d] each; key scales are in the calibrated basis for compact and vtq, means never. */
typedef struct hsri_page_channels {
    float *k_scale, *k_mean, *v_scale, *v_mean;
} hsri_page_channels;

void hsri_page_channels_read(hsri_kv_type format, const uint8_t *slot, uint32_t d, const hsri_calibration_record *c,
                             const hsri_page_channels *out);
/* What multiplies the scale of component j of a token of the page. */
float hsri_key_code(hsri_kv_type format, const uint8_t *slot, uint32_t d, uint32_t token, uint32_t j);
float hsri_value_code(hsri_kv_type format, const uint8_t *slot, uint32_t d, uint32_t token, uint32_t j);

#endif
