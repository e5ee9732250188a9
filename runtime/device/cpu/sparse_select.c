/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/sparse_select.h"

/* Floats that are not negative order like their bits, which are looked at in three parts, the highest first: each pass counts the values
 * by one
 * part and keeps those whose part is that of the value sought. */
#define PASSES 3u
#define BINS 2048u

static const uint32_t shifts[PASSES] = { 20, 9, 0 }, bins[PASSES] = { 2048, 2048, 512 };

/* The bin of the want-th largest; *want becomes its rank within the bin. */
static uint32_t find_bin(const uint32_t *counts, uint32_t n_bins, uint32_t *want)
{
    uint32_t bin = n_bins - 1;

    while (counts[bin] < *want)
        *want -= counts[bin--];
    return bin;
}

/* Bits of all that compete. */
static uint32_t compete(const float *values, uint32_t n, uint32_t *out)
{
    uint32_t n_out = 0;

    for (uint32_t i = 0; i < n; i++) {
        float value = values[i] + 0.0f;

        memcpy(&out[n_out], &value, sizeof value);
        n_out += values[i] >= 0.0f;
    }
    return n_out;
}

hsri_top hsri_top_of(const float *values, uint32_t n, uint32_t want, uint32_t *work)
{
    uint32_t counts[BINS], left = compete(values, n, work), threshold = 0;

    if (want == 0)
        return (hsri_top){ UINT32_MAX, 0 };
    if (want >= left)
        return (hsri_top){ 0, UINT32_MAX };
    for (uint32_t pass = 0; pass < PASSES; pass++) {
        uint32_t kept = 0, bin;

        memset(counts, 0, sizeof counts);
        for (uint32_t i = 0; i < left; i++)
            counts[work[i] >> shifts[pass] & (bins[pass] - 1)]++;
        bin = find_bin(counts, bins[pass], &want);
        for (uint32_t i = 0; i < left; i++) {
            uint32_t bits = work[i];

            work[kept] = bits;
            kept += (bits >> shifts[pass] & (bins[pass] - 1)) == bin;
        }
        threshold |= bin << shifts[pass];
        left = kept;
    }
    return (hsri_top){ threshold, want };
}
