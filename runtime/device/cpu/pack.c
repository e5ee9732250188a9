/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"

static uint64_t padded_elements(uint32_t n, uint32_t k)
{
    return hsri_round_up(n, HSRI_PANEL) * hsri_round_up(k, HSRI_RUN);
}

static uint64_t code_bytes(hsri_dtype dtype, uint32_t n, uint32_t k)
{
    uint64_t elements = padded_elements(n, k);
    switch (dtype) {
    case HSRI_DTYPE_F32:  return elements * 4;
    case HSRI_DTYPE_BF16: return elements * 2;
    case HSRI_DTYPE_Q8:   return elements;
    case HSRI_DTYPE_Q4:   return elements / 2;
    default:              return 0;
    }
}

static uint64_t tail_bytes(hsri_dtype dtype, uint32_t n, uint32_t k)
{
    uint64_t groups = padded_elements(n, k) / HSRI_RUN;
    switch (dtype) {
    case HSRI_DTYPE_Q8: return groups * 2;
    case HSRI_DTYPE_Q4: return groups * 4;
    default:            return 0;
    }
}

uint64_t hsri_packed_bytes(hsri_dtype dtype, uint32_t n, uint32_t k)
{
    return code_bytes(dtype, n, k) + tail_bytes(dtype, n, k);
}

hsri_packed hsri_packed_at(const void *data, hsri_dtype dtype, uint32_t n, uint32_t k)
{
    hsri_packed w = { data, NULL, n, k, (uint32_t)hsri_div_up(k, HSRI_RUN) };
    if (tail_bytes(dtype, n, k) != 0) {
        w.tail = w.codes + code_bytes(dtype, n, k);
    }
    return w;
}

hsri_packed hsri_packed_panels(const hsri_packed *w, hsri_dtype dtype, uint32_t panel, uint32_t n_panels)
{
    uint32_t n0 = panel * HSRI_PANEL;
    hsri_packed part = *w;
    part.codes += code_bytes(dtype, n0, w->k);
    part.tail = w->tail != NULL ? w->tail + tail_bytes(dtype, n0, w->k) : NULL;
    part.n = (uint32_t)hsri_min(w->n - n0, n_panels * HSRI_PANEL);
    return part;
}

uint16_t hsri_f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    /* Rounding could carry a NaN into infinity, so a NaN keeps its top bits and gets its quiet bit. */
    uint32_t nan = u >> 16 | 0x40u;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

float hsri_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = h >> 10 & 0x1fu;
    uint32_t fraction = h & 0x3ffu;
    uint32_t u;
    if (exponent == 0) {
        /* Zero or subnormal: a small integer times 2^-24, exact in float. */
        float f = (float)fraction * 0x1p-24f;
        memcpy(&u, &f, sizeof u);
    } else if (exponent == 0x1fu) {
        u = 0x7f800000u | fraction << 13;
    } else {
        u = (exponent + 112u) << 23 | fraction << 13;
    }
    u |= sign;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
