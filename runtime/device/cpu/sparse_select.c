/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/sparse_select.h"

/* Floats that are not negative order like their bits, which are looked at in three parts, the highest first: each pass counts the values
 * by one part and keeps those whose part is that of the value sought. */
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

/* The want-th largest of fewer than all, as bits, of which only some are left afterwards. *want becomes its rank among its equals. */
static uint32_t find_threshold(uint32_t *values, uint32_t n, uint32_t *want)
{
    uint32_t counts[BINS], threshold = 0;

    for (uint32_t pass = 0; pass < PASSES; pass++) {
        uint32_t kept = 0, bin;

        memset(counts, 0, bins[pass] * sizeof *counts);
        for (uint32_t i = 0; i < n; i++)
            counts[values[i] >> shifts[pass] & (bins[pass] - 1)]++;
        bin = find_bin(counts, bins[pass], want);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t bits = values[i];

            values[kept] = bits;
            kept += (bits >> shifts[pass] & (bins[pass] - 1)) == bin;
        }
        threshold |= bin << shifts[pass];
        n = kept;
    }
    return threshold;
}

uint32_t hsri_top_sets(const hsri_sparse_kernels *kernels, const float *values, uint32_t n, float *largest)
{
    uint32_t n_sets = n / HSRI_TOP_BLOCK * (HSRI_TOP_BLOCK / HSRI_TOP_SET);

    for (uint32_t i = 0; i < n_sets; i += HSRI_TOP_BLOCK / HSRI_TOP_SET)
        kernels->maxima(values + i * HSRI_TOP_SET, largest + i);
    return n_sets;
}

float hsri_top_bar(const float *largest, uint32_t n_sets, uint32_t want, uint32_t *work)
{
    if (want >= n_sets || want == 0)
        return 0.0f;
    memmove(work, largest, n_sets * sizeof *work);
    return hsri_float_of(find_threshold(work, n_sets, &want));
}

hsri_top hsri_top_of(const hsri_sparse_kernels *kernels, const float *values, uint32_t n, uint32_t want, uint32_t *work)
{
    float   *largest = (float *)work, bar = hsri_top_bar(largest, hsri_top_sets(kernels, values, n, largest), want, work);
    uint32_t left = kernels->reach(values, n, bar, work), threshold;

    if (want == 0)
        return (hsri_top){ UINT32_MAX, 0 };
    if (want >= left)
        return (hsri_top){ hsri_word_of(bar), UINT32_MAX };
    for (uint32_t i = 0; i < left; i++)
        work[i] = hsri_word_of(values[work[i]] + 0.0f);     /* -0 is 0 */
    threshold = find_threshold(work, left, &want);
    return (hsri_top){ threshold, want };
}

uint32_t hsri_top_list(const hsri_sparse_kernels *kernels, hsri_top top, const float *values, uint32_t n, uint32_t *out)
{
    uint32_t n_out = 0;

    n = kernels->reach(values, n, hsri_float_of(top.threshold), out);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t number = out[i];

        out[n_out] = number;
        n_out += hsri_top_takes(&top, values[number]);
    }
    return n_out;
}
