/* SPDX-License-Identifier: Apache-2.0 */
/* Encoded pages in portable C: making them, and attention over them. */
#include <math.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"
#include "device/formats.h"

#define INLINE static inline __attribute__((always_inline))
#define TOKENS HSRI_PAGE_TOKENS
#define LANES 16u   /* channels or terms taken side by side, so that compilers use vectors */

static void page_mean(const float *x, uint32_t d, float *mean)
{
    for (uint32_t j = 0; j < d; j++)
        mean[j] = 0;
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t j = 0; j < d; j++)
            mean[j] += x[(size_t)t * d + j];
    for (uint32_t j = 0; j < d; j++)
        mean[j] *= 1.0f / TOKENS;
}

static bool all_finite(const float *x, size_t n)
{
    float sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += x[i] * 0.0f;
    return sum == 0.0f;
}

/* x as a code in 0 .. top, where x = 0 lies at `zero` (a multiple of 1/2). NaN gives some code. */
static inline int32_t code_of(float x, float zero, float top)
{
    float c = x + (zero + 0.5f);

    c = c > 0 ? c : 0;
    c = c < top ? c : top;
    return (int32_t)c;
}

static double squares(const float *x, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sum;
}

/* |x - decoded| / |x| over keys and values; a page of zeros has none. */
static float relative_error(double error, const float *k, const float *v, size_t n)
{
    double size = squares(k, n) + squares(v, n);

    return size > 0 || size != size ? (float)sqrt(error / size) : 0.0f;
}

/* ---- int8 ---- */

static void int8_channels(const float *x, uint32_t d, float *mean, float *scale)
{
    page_mean(x, d, mean);
    for (uint32_t j = 0; j < d; j++)
        scale[j] = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t j = 0; j < d; j++) {
            float a = fabsf(x[(size_t)t * d + j] - mean[j]);

            scale[j] = a <= scale[j] ? scale[j] : a;   /* a NaN stays */
        }
    }
    for (uint32_t j = 0; j < d; j++)
        scale[j] *= 1.0f / 127.0f;
}

static double int8_codes(const float *x, uint32_t d, const float *mean, const float *scale, int8_t *codes, uint32_t token_step,
                         uint32_t channel_step)
{
    double error = 0;

    for (uint32_t j = 0; j < d; j++) {
        float inverse = scale[j] > 0 ? 1.0f / scale[j] : 0.0f;

        for (uint32_t t = 0; t < TOKENS; t++) {
            float   r = x[(size_t)t * d + j] - mean[j];
            int32_t code = code_of(r * inverse, 127.0f, 254.0f) - 127;
            float   rest = r - (float)code * scale[j];

            codes[(size_t)t * token_step + (size_t)j * channel_step] = (int8_t)code;
            error += (double)rest * rest;
        }
    }
    return error;
}

static void encode_int8(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                        const hsri_calibration_record *calibration, float *scratch)
{
    float *k_mean = scratch, *k_scale = k_mean + d, *v_mean = k_scale + d, *v_scale = v_mean + d;
    double error;

    (void)calibration;
    int8_channels(k, d, k_mean, k_scale);
    int8_channels(v, d, v_mean, v_scale);
    error = int8_codes(k, d, k_mean, k_scale, (int8_t *)(slot + (hsri_int8_keys(slot, d) - slot)), 1, TOKENS);
    error += int8_codes(v, d, v_mean, v_scale, (int8_t *)(slot + (hsri_int8_values(slot, d) - slot)), d, 1);
    memcpy(slot + HSRI_PAGE_HEADER_BYTES, scratch, 4 * (size_t)d * sizeof *scratch);
    header->error = relative_error(error, k, v, (size_t)TOKENS * d);
}

/* ---- sums ---- */

/* d is a multiple of LANES */
static float dot(const float *a, const float *b, uint32_t d)
{
    float sum[LANES] = { 0 };

    for (uint32_t j = 0; j < d; j += LANES)
        for (uint32_t i = 0; i < LANES; i++)
            sum[i] += a[j + i] * b[j + i];
    for (uint32_t half = LANES / 2; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            sum[i] += sum[i + half];
    return sum[0];
}

/* z[64][d] = A^T (k - mean) of each token */
static void rotate_keys(const float *k, const float *mean, const float *a, uint32_t d, float *z)
{
    for (uint32_t t = 0; t < TOKENS; t++) {
        float *out = z + (size_t)t * d;

        memset(out, 0, d * sizeof *out);
        for (uint32_t i = 0; i < d; i++) {
            float x = k[(size_t)t * d + i] - mean[i];

            for (uint32_t j = 0; j < d; j++)
                out[j] += x * a[(size_t)i * d + j];
        }
    }
}

/* ---- compact and vtq: scales ---- */

/* The means as int8 about the calibration's; mean becomes what they decode to. */
static float encode_means(float *mean, const float *about, uint32_t d, uint8_t *codes)
{
    float most = 0, scale, inverse;

    for (uint32_t j = 0; j < d; j++) {
        float a = fabsf(mean[j] - about[j]);

        most = a > most ? a : most;
    }
    scale = most / 127.0f;
    inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (uint32_t j = 0; j < d; j++) {
        int32_t code = code_of((mean[j] - about[j]) * inverse, 127.0f, 254.0f) - 127;

        codes[j] = (uint8_t)code;
        mean[j] = about[j] + scale * (float)code;
    }
    return scale;
}

/* Largest |x| of each channel. */
static void most_of(const float *x, uint32_t d, float *most)
{
    memset(most, 0, d * sizeof *most);
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t j = 0; j < d; j++) {
            float a = fabsf(x[(size_t)t * d + j]);

            most[j] = a > most[j] ? a : most[j];
        }
    }
}

/* The smallest scale byte that stands for at least x units. */
static uint8_t scale_byte(float x)
{
    uint32_t bits, least = HSRI_SCALE_BIAS, step = 1u << HSRI_SCALE_SHIFT;

    memcpy(&bits, &x, sizeof bits);
    if (!(x > 0) || bits <= least)
        return 0;
    return (uint8_t)hsri_min((bits - least + step - 1) / step, 255);
}

/* How far below the largest value's scale byte to look, and in which steps: with few bits, cutting the largest values off pays. */
typedef struct search {
    uint8_t n, step;
} search;

INLINE search search_of(uint32_t bits) { return bits == 2 ? (search){ 9, 2 } : bits == 4 ? (search){ 6, 1 } : (search){ 3, 1 }; }

/* Squared error of LANES channels at scales of their own. */
INLINE void errors_at(const float *x, uint32_t d, const float *scale, float top, float *error)
{
    float inverse[LANES];

    for (uint32_t i = 0; i < LANES; i++) {
        inverse[i] = scale[i] > 0 ? 1.0f / scale[i] : 0.0f;
        error[i] = 0;
    }
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t i = 0; i < LANES; i++) {
            float a = x[(size_t)t * d + i], c = a * inverse[i] + (top + 1) * 0.5f, rest;

            c = c > 0 ? c : 0;
            c = c < top ? c : top;
            rest = a - ((float)(int32_t)c - top * 0.5f) * scale[i];
            error[i] += rest * rest;
        }
    }
}

/* Scale bytes of LANES channels from j on, of `bits` bits each: those of the smallest error among a few. */
INLINE void choose_scales(const float *x, uint32_t d, uint32_t bits, float unit, const float *most, uint8_t *bytes)
{
    const search look = search_of(bits);
    const float  top = (float)((1u << bits) - 1);
    float        best[LANES], error[LANES], scale[LANES];
    uint8_t      first[LANES];

    for (uint32_t i = 0; i < LANES; i++) {
        bytes[i] = first[i] = scale_byte(unit > 0 ? most[i] / (top * 0.5f * unit) : 0);
        best[i] = INFINITY;
    }
    for (uint32_t n = 0; n < look.n; n++) {
        for (uint32_t i = 0; i < LANES; i++)
            scale[i] = unit * hsri_scale_of(first[i] > n * look.step ? (uint8_t)(first[i] - n * look.step) : 0);
        errors_at(x, d, scale, top, error);
        for (uint32_t i = 0; i < LANES; i++) {
            if (error[i] < best[i]) {
                best[i] = error[i];
                bytes[i] = first[i] > n * look.step ? (uint8_t)(first[i] - n * look.step) : 0;
            }
        }
    }
}

static uint32_t key_bits(uint32_t d, uint32_t j) { return j < hsri_n6(d) ? 6 : j < d / 2 ? 4 : 2; }

/* ---- compact and vtq: keys ---- */

/* A block of LANES channels may hold components of two widths: each width is searched, and a component takes its own. */
static void key_scales(const float *z, uint32_t d, float unit, const float *most, uint8_t *bytes)
{
    for (uint32_t j = 0; j < d; j += LANES) {
        uint8_t of[LANES];

        for (uint32_t bits = 2; bits <= 6; bits += 2) {
            bool wanted = false;

            for (uint32_t i = 0; i < LANES; i++)
                wanted |= key_bits(d, j + i) == bits;
            if (!wanted)
                continue;
            if (bits == 2)
                choose_scales(z + j, d, 2, unit, most + j, of);
            else if (bits == 4)
                choose_scales(z + j, d, 4, unit, most + j, of);
            else
                choose_scales(z + j, d, 6, unit, most + j, of);
            for (uint32_t i = 0; i < LANES; i++) {
                if (key_bits(d, j + i) == bits)
                    bytes[j + i] = of[i];
            }
        }
    }
}

/* at: a place in the slot */
static inline void or_bits(uint8_t *slot, const uint8_t *at, uint32_t shift, uint32_t bits)
{
    slot[at - slot + shift / 8] |= (uint8_t)(bits << shift % 8);
}

/* Key codes of a slot whose planes are zero; z becomes what they leave. */
static void put_keys(uint8_t *slot, uint32_t d, float unit, float *z)
{
    for (uint32_t j = 0; j < d; j++) {
        uint32_t bits = key_bits(d, j);
        float    top = (float)((1u << bits) - 1), scale = unit * hsri_scale_of(hsri_key_scales(slot)[j]);
        float    inverse = scale > 0 ? 1.0f / scale : 0.0f;

        for (uint32_t token = 0; token < TOKENS; token++) {
            uint32_t t = token % HSRI_UNIT_TOKENS, unit_of = token / HSRI_UNIT_TOKENS;
            uint32_t code = (uint32_t)code_of(z[(size_t)token * d + j] * inverse, top * 0.5f, top);

            z[(size_t)token * d + j] -= ((float)code - top * 0.5f) * scale;
            if (bits == 2) {
                or_bits(slot, hsri_key_pairs(slot, d, unit_of) + (j - d / 2) / 8 * 32 + 2 * t, 2 * (j % 8), code);
                continue;
            }
            or_bits(slot, hsri_key_nibbles(slot, d, unit_of) + j / 8 * 64 + 4 * t, hsri_nibble_shift(j % 8), bits == 6 ? code >> 2 : code);
            if (bits == 6)
                or_bits(slot, hsri_key_lows(slot, d, unit_of) + 4 * j, 2 * t, code & 3);
        }
    }
}

/* Keys into a slot of zeros; returns the squared error. */
static double encode_keys(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const hsri_calibration_record *c, float *scratch)
{
    float *z = scratch, *mean = z + (size_t)TOKENS * d, *most = mean + d, unit = 0;
    double error = 0;

    page_mean(k, d, mean);
    header->k_scale = encode_means(mean, c->mean_k, d, slot + (hsri_key_means(slot, d) - slot));
    rotate_keys(k, mean, c->a, d, z);
    most_of(z, d, most);
    for (uint32_t j = 0; j < d; j++) {
        float scale = most[j] / ((float)((1u << key_bits(d, j)) - 1) * 0.5f);

        unit = scale > unit ? scale : unit;
    }
    header->k_unit = unit / HSRI_SCALE_MAX;
    key_scales(z, d, header->k_unit, most, slot + (hsri_key_scales(slot) - slot));
    put_keys(slot, d, header->k_unit, z);
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t i = 0; i < d; i++) {
            float rest = dot(c->b + (size_t)i * d, z + (size_t)t * d, d);

            error += (double)rest * rest;
        }
    }
    if (!all_finite(k, (size_t)TOKENS * d))
        header->k_unit = NAN;
    return error;
}

/* ---- compact and vtq: values ---- */

static void center_values(const float *v, const float *mean, uint32_t d, float *out)
{
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t j = 0; j < d; j++)
            out[(size_t)t * d + j] = v[(size_t)t * d + j] - mean[j];
}

/* Half of each unit, the tokens of larger norm. */
static uint64_t larger_half(const float *norms)
{
    uint64_t wide = 0;

    for (uint32_t t = 0; t < TOKENS; t++) {
        uint32_t larger = 0, first = t / HSRI_UNIT_TOKENS * HSRI_UNIT_TOKENS;

        for (uint32_t i = first; i < first + HSRI_UNIT_TOKENS; i++)
            larger += norms[i] > norms[t] || (norms[i] == norms[t] && i < t);
        wide |= (uint64_t)(larger < HSRI_UNIT_TOKENS / 2) << t;
    }
    return wide;
}

/* How far apart the norms of the two classes are, beyond their own spread, relative to the mean of all. */
#define BIMODAL 0.15

/* The tokens of 6 bits if the page's values are of two kinds, else none. */
static uint64_t two_kinds(const float *x, uint32_t d)
{
    float    norms[TOKENS];
    uint64_t wide;
    double   sum[2] = { 0, 0 }, square[2] = { 0, 0 }, mean[2], spread = 0;

    for (uint32_t t = 0; t < TOKENS; t++)
        norms[t] = sqrtf(dot(x + (size_t)t * d, x + (size_t)t * d, d));
    wide = larger_half(norms);
    for (uint32_t t = 0; t < TOKENS; t++) {
        uint32_t kind = (uint32_t)(wide >> t & 1);

        sum[kind] += norms[t];
        square[kind] += (double)norms[t] * norms[t];
    }
    for (uint32_t kind = 0; kind < 2; kind++) {
        double variance;

        mean[kind] = sum[kind] / (TOKENS / 2);
        variance = square[kind] / (TOKENS / 2) - mean[kind] * mean[kind];
        spread += variance > 0 ? sqrt(variance) : 0;
    }
    return mean[1] - mean[0] - spread > BIMODAL * (mean[0] + mean[1]) / 2 ? wide : 0;
}

/* Multiply the narrow tokens' values, so that one set of scales serves both kinds: their largest share of the wide ones' range. */
static float narrow_ratio(const float *x, uint32_t d, uint64_t wide)
{
    double sum[2] = { 0, 0 };

    for (uint32_t t = 0; t < TOKENS; t++)
        sum[wide >> t & 1] += squares(x + (size_t)t * d, d);
    return sum[0] < sum[1] ? (float)sqrt(sum[0] / sum[1]) : 1.0f;
}

static uint32_t value_bits(const hsri_page_header *h, hsri_kv_type format, uint32_t token)
{
    return format == HSRI_KV_TYPE_COMPACT ? 4 : h->wide == 0 ? 5 : h->wide >> token & 1 ? 6 : 4;
}

static double put_values(uint8_t *slot, const hsri_page_header *h, hsri_kv_type format, uint32_t d, const float *x)
{
    double error = 0;

    for (uint32_t token = 0; token < TOKENS; token++) {
        const uint8_t *u = hsri_value_unit(format, slot, d, token / HSRI_UNIT_TOKENS);
        uint32_t t = token % HSRI_UNIT_TOKENS, bits = value_bits(h, format, token), n_low = bits - 4;
        uint32_t low_shift = format == HSRI_KV_TYPE_VTQ ? hsri_vtq_low_shift(h, token) : 0;
        float    top = (float)((1u << bits) - 1), fine = 1.0f / (float)(1u << n_low);

        if (bits == 4 && format == HSRI_KV_TYPE_VTQ)
            fine = h->narrow;
        for (uint32_t j = 0; j < d; j++) {
            float    scale = h->v_unit * hsri_scale_of(hsri_value_scales(slot, d)[j]) * fine, a = x[(size_t)token * d + j], rest;
            uint32_t code = (uint32_t)code_of(scale > 0 ? a / scale : 0.0f, top * 0.5f, top);

            rest = a - ((float)code - top * 0.5f) * scale;
            error += (double)rest * rest;
            or_bits(slot, u + 4 * ((size_t)t / 8 * d + j), hsri_nibble_shift(t % 8), code >> n_low);
            if (n_low > 0)
                or_bits(slot, u + 8 * (size_t)d + 2 * (size_t)j, low_shift, code & ((1u << n_low) - 1));
        }
    }
    return error;
}

/* Values into a slot of zeros; returns the squared error. */
static double encode_values(uint8_t *slot, hsri_page_header *header, hsri_kv_type format, uint32_t d, const float *v,
                            const hsri_calibration_record *c, float *scratch)
{
    float   *x = scratch, *mean = x + (size_t)TOKENS * d, *most = mean + d, unit = 0, top = 15.0f;
    double   error;
    uint8_t *bytes = slot + (hsri_value_scales(slot, d) - slot);

    page_mean(v, d, mean);
    header->v_scale = encode_means(mean, c->mean_v, d, slot + (hsri_value_means(slot, d) - slot));
    center_values(v, mean, d, x);
    header->narrow = 1.0f;
    if (format == HSRI_KV_TYPE_VTQ) {
        header->wide = two_kinds(x, d);
        header->narrow = header->wide ? narrow_ratio(x, d, header->wide) : 1.0f;
        top = header->wide ? 63.0f / 4 : 31.0f / 2;
    }
    most_of(x, d, most);
    for (uint32_t j = 0; j < d; j++)
        unit = most[j] > unit ? most[j] : unit;
    header->v_unit = unit / (top * 0.5f * HSRI_SCALE_MAX);
    for (uint32_t j = 0; j < d; j += LANES) {
        if (format == HSRI_KV_TYPE_COMPACT)
            choose_scales(x + j, d, 4, header->v_unit, most + j, bytes + j);
        for (uint32_t i = 0; format == HSRI_KV_TYPE_VTQ && i < LANES; i++)
            bytes[j + i] = scale_byte(header->v_unit > 0 ? most[j + i] / (top * 0.5f * header->v_unit) : 0);
    }
    error = put_values(slot, header, format, d, x);
    if (!all_finite(v, (size_t)TOKENS * d))
        header->v_unit = NAN;
    return error;
}

static void encode_rotated(hsri_kv_type format, uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                           const hsri_calibration_record *calibration, float *scratch)
{
    double error;

    memset(slot, 0, hsri_page_bytes(format, d));
    error = encode_keys(slot, header, d, k, calibration, scratch);
    error += encode_values(slot, header, format, d, v, calibration, scratch);
    header->error = relative_error(error, k, v, (size_t)TOKENS * d);
}

static void encode_compact(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                           const hsri_calibration_record *calibration, float *scratch)
{
    encode_rotated(HSRI_KV_TYPE_COMPACT, slot, header, d, k, v, calibration, scratch);
}

static void encode_vtq(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                       const hsri_calibration_record *calibration, float *scratch)
{
    encode_rotated(HSRI_KV_TYPE_VTQ, slot, header, d, k, v, calibration, scratch);
}

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
        .encode = { [HSRI_KV_TYPE_INT8] = encode_int8, [HSRI_KV_TYPE_COMPACT] = encode_compact, [HSRI_KV_TYPE_VTQ] = encode_vtq },
        .attend = { [HSRI_KV_TYPE_INT8] = attend_int8, [HSRI_KV_TYPE_COMPACT] = attend_compact, [HSRI_KV_TYPE_VTQ] = attend_vtq },
    };
}
