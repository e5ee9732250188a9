/* SPDX-License-Identifier: Apache-2.0 */
/* Pages back to floats, in portable C. Those of bf16 are read each time a page is sealed; the others without regard to speed. */
#include <string.h>

#include "device/formats.h"

#define MAX_HEAD_DIM 512u

static void decode_f32(uint32_t d, const uint8_t *body, float *k, float *v)
{
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++)
        for (uint32_t i = 0; i < d; i++)
            memcpy(&k[t * d + i], body + (i * HSRI_PAGE_TOKENS + t) * sizeof *k, sizeof *k);
    memcpy(v, body + HSRI_PAGE_TOKENS * d * sizeof *v, HSRI_PAGE_TOKENS * d * sizeof *v);
}

/* A dword is two numbers, the first in its low half; a key's are neighbours, a value's are of neighbouring tokens. */
static void decode_bf16(uint32_t d, const uint8_t *restrict body, float *restrict k, float *restrict v)
{
    const uint8_t *values = body + HSRI_PAGE_TOKENS * d * 2;
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++)
        for (uint32_t i = 0; i < d; i += 2) {
            uint32_t pair;
            uint64_t both;

            memcpy(&pair, body + ((size_t)i / 2 * HSRI_PAGE_TOKENS + t) * 4, sizeof pair);
            both = (uint64_t)(pair & 0xffff0000u) << 32 | (uint32_t)(pair << 16);
            memcpy(k + (size_t)t * d + i, &both, sizeof both);
        }
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t += 2)
        for (uint32_t i = 0; i < d; i++) {
            uint32_t pair, low, high;

            memcpy(&pair, values + ((size_t)t / 2 * d + i) * 4, sizeof pair);
            low = pair << 16;
            high = pair & 0xffff0000u;
            memcpy(v + (size_t)t * d + i, &low, sizeof low);
            memcpy(v + (size_t)(t + 1) * d + i, &high, sizeof high);
        }
}

/* ---- scales and means of one page ---- */

void hsri_page_channels_read(hsri_kv_type format, const uint8_t *slot, uint32_t d, const hsri_calibration_record *c,
                             const hsri_page_channels *out)
{
    hsri_page_header h;

    if (format == HSRI_KV_TYPE_INT8) {
        memcpy(out->k_scale, hsri_int8_array(slot, d, HSRI_INT8_K_SCALE), d * sizeof(float));
        memcpy(out->k_mean, hsri_int8_array(slot, d, HSRI_INT8_K_MEAN), d * sizeof(float));
        memcpy(out->v_scale, hsri_int8_array(slot, d, HSRI_INT8_V_SCALE), d * sizeof(float));
        memcpy(out->v_mean, hsri_int8_array(slot, d, HSRI_INT8_V_MEAN), d * sizeof(float));
        return;
    }
    memcpy(&h, slot, sizeof h);
    for (uint32_t j = 0; j < d; j++) {
        out->k_scale[j] = h.k_unit * hsri_scale_of(hsri_key_scales(slot)[j]);
        out->v_scale[j] = h.v_unit * hsri_scale_of(hsri_value_scales(slot, d)[j]);
        out->k_mean[j] = c->mean_k[j] + h.k_scale * (float)(int8_t)hsri_key_means(slot, d)[j];
        out->v_mean[j] = c->mean_v[j] + h.v_scale * (float)(int8_t)hsri_value_means(slot, d)[j];
    }
}

/* ---- codes ---- */

static inline uint32_t bits_at(const uint8_t *p, uint32_t shift, uint32_t n)
{
    return (uint32_t)(p[shift / 8] >> shift % 8) & ((1u << n) - 1);
}

float hsri_key_code(hsri_kv_type format, const uint8_t *slot, uint32_t d, uint32_t token, uint32_t j)
{
    uint32_t t = token % HSRI_UNIT_TOKENS, unit, high;

    if (format == HSRI_KV_TYPE_INT8)
        return (float)(int8_t)hsri_int8_keys(slot, d)[(size_t)j * HSRI_PAGE_TOKENS + token];
    unit = token / HSRI_UNIT_TOKENS;
    if (j >= d / 2)
        return (float)bits_at(hsri_key_pairs(slot, d, unit) + (j - d / 2) / 8 * 32 + 2 * t, 2 * (j % 8), 2) - 1.5f;
    high = bits_at(hsri_key_nibbles(slot, d, unit) + j / 8 * 64 + 4 * t, hsri_nibble_shift(j % 8), 4);
    return j < hsri_n6(d) ? (float)(4 * high + bits_at(hsri_key_lows(slot, d, unit) + 4 * j, 2 * t, 2)) - 31.5f : (float)high - 7.5f;
}

float hsri_value_code(hsri_kv_type format, const uint8_t *slot, uint32_t d, uint32_t token, uint32_t j)
{
    const uint8_t   *unit;
    hsri_page_header h;
    uint32_t         t = token % HSRI_UNIT_TOKENS, high, shift, n_low;

    if (format == HSRI_KV_TYPE_INT8)
        return (float)(int8_t)hsri_int8_values(slot, d)[(size_t)token * d + j];
    unit = hsri_value_unit(format, slot, d, token / HSRI_UNIT_TOKENS);
    high = bits_at(unit + 4 * ((size_t)t / 8 * d + j), hsri_nibble_shift(t % 8), 4);
    if (format == HSRI_KV_TYPE_COMPACT)
        return (float)high - 7.5f;
    memcpy(&h, slot, sizeof h);
    n_low = hsri_vtq_low_bits(&h, token);
    shift = hsri_vtq_low_shift(&h, token);
    return hsri_vtq_code(&h, token, high, n_low ? bits_at(unit + 8 * (size_t)d + 2 * (size_t)j, shift, n_low) : 0);
}

/* ---- whole pages ---- */

static void decode_encoded(hsri_kv_type format, uint32_t d, const uint8_t *slot, const hsri_calibration_record *c, float *k, float *v)
{
    float              room[4 * MAX_HEAD_DIM], z[MAX_HEAD_DIM];
    hsri_page_channels ch = { room, room + d, room + 2 * d, room + 3 * d };

    hsri_page_channels_read(format, slot, d, c, &ch);
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++) {
        for (uint32_t j = 0; j < d; j++) {
            z[j] = ch.k_scale[j] * hsri_key_code(format, slot, d, t, j);
            v[(size_t)t * d + j] = ch.v_mean[j] + ch.v_scale[j] * hsri_value_code(format, slot, d, t, j);
        }
        for (uint32_t i = 0; i < d; i++) {
            float sum = format == HSRI_KV_TYPE_INT8 ? z[i] : 0;

            for (uint32_t j = 0; format != HSRI_KV_TYPE_INT8 && j < d; j++)
                sum += c->b[(size_t)i * d + j] * z[j];
            k[(size_t)t * d + i] = ch.k_mean[i] + sum;
        }
    }
}

void hsri_page_decode(hsri_kv_type format, uint32_t head_dim, const uint8_t *slot, const float *calibration, float *k, float *v)
{
    const uint8_t *body = slot + HSRI_PAGE_HEADER_BYTES;

    if (format == HSRI_KV_TYPE_F32)
        decode_f32(head_dim, body, k, v);
    else if (format == HSRI_KV_TYPE_BF16)
        decode_bf16(head_dim, body, k, v);
    else if (calibration) {
        hsri_calibration_record record = hsri_calibration_at(calibration, 1, 0, 0, head_dim);
        decode_encoded(format, head_dim, slot, &record, k, v);
    } else
        decode_encoded(format, head_dim, slot, NULL, k, v);
}
