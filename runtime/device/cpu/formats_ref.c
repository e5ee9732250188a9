/* SPDX-License-Identifier: Apache-2.0 */
/* Encoded pages in portable C. */
#include <math.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/formats_encode.h"
#include "device/cpu/kernels.h"

/* ---- attention ---- */

static void attend_query(hsri_kv_type format, const hsri_units_args *a, uint32_t i)
{
    uint32_t      d = a->head_dim, n_tokens = a->n_units * HSRI_UNIT_TOKENS;
    float        *p = a->scratch, *partial = a->partials[i], max = -INFINITY;
    const float  *q = a->queries[i], *rotated = format == HSRI_KV_TYPE_INT8 ? q : a->rotated[i];
    float *channels = p + n_tokens;
    hsri_page_channels ch = { channels, channels + d, channels + 2 * d, channels + 3 * d };

    for (uint32_t n = 0; n < n_tokens; n++) {
        const uint8_t *slot = a->slots[n / HSRI_UNIT_TOKENS];
        uint32_t       token = a->units[n / HSRI_UNIT_TOKENS] * HSRI_UNIT_TOKENS + n % HSRI_UNIT_TOKENS;
        float          mean = 0, sum = 0;

        if (n % HSRI_UNIT_TOKENS == 0)
            hsri_page_channels_read(format, slot, d, &a->calibration, &ch);
        for (uint32_t j = 0; j < d; j++) {
            mean += q[j] * ch.k_mean[j];
            sum += rotated[j] * ch.k_scale[j] * hsri_key_code(format, slot, d, token, j);
        }
        p[n] = a->scale * (mean + sum);
        max = p[n] > max ? p[n] : max;
    }
    partial[0] = max;
    memset(partial + 1, 0, (1 + d) * sizeof *partial);
    for (uint32_t n = 0; n < n_tokens; n++) {
        const uint8_t *slot = a->slots[n / HSRI_UNIT_TOKENS];
        uint32_t       token = a->units[n / HSRI_UNIT_TOKENS] * HSRI_UNIT_TOKENS + n % HSRI_UNIT_TOKENS;
        float          weight = expf(p[n] - max);

        if (n % HSRI_UNIT_TOKENS == 0)
            hsri_page_channels_read(format, slot, d, &a->calibration, &ch);
        partial[1] += weight;
        for (uint32_t j = 0; j < d; j++)
            partial[2 + j] += weight * (ch.v_mean[j] + ch.v_scale[j] * hsri_value_code(format, slot, d, token, j));
    }
}

#define FORMAT(name, format) \
    static void attend_##name(const hsri_units_args *a) \
    { \
        for (uint32_t i = 0; i < a->n_queries; i++) { \
            attend_query(format, a, i); \
        } \
    }

FORMAT(int8, HSRI_KV_TYPE_INT8)
FORMAT(compact, HSRI_KV_TYPE_COMPACT)
FORMAT(vtq, HSRI_KV_TYPE_VTQ)

void hsri_page_kernels_fill_ref(hsri_page_kernels *k)
{
    *k = (hsri_page_kernels) {
        .attend = { [HSRI_KV_TYPE_INT8] = attend_int8, [HSRI_KV_TYPE_COMPACT] = attend_compact, [HSRI_KV_TYPE_VTQ] = attend_vtq },
    };
    fill_encoders(k);
}
