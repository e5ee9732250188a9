/* SPDX-License-Identifier: Apache-2.0 */
/* The best n of many: by a threshold, not by sorting. */
#ifndef HSRI_CPU_SPARSE_SELECT_H
#define HSRI_CPU_SPARSE_SELECT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "device/cpu/sparse_kernels.h"

/* Less than anything that competes; so is NaN. */
#define HSRI_NO_WORTH (-1.0f)

/* The bits of a float: of those that are not negative, larger ones have larger words. And back. */
static inline uint32_t hsri_word_of(float value)
{
    uint32_t word;

    memcpy(&word, &value, sizeof word);
    return word;
}

static inline float hsri_float_of(uint32_t word)
{
    float value;

    memcpy(&value, &word, sizeof value);
    return value;
}

/* What belongs to the best: everything above the threshold, and of what equals it the first `ties`. */
typedef struct hsri_top {
    uint32_t threshold;     /* bits of a float */
    uint32_t ties;
} hsri_top;

/* The best `want` of n values, all of them if there are fewer. Values below zero and NaN are never taken. work: n words. */
hsri_top hsri_top_of(const hsri_sparse_kernels *kernels, const float *values, uint32_t n, uint32_t want, uint32_t *work);

#define HSRI_TOP_SET 16u
#define HSRI_TOP_BLOCK 256u

/* The largest of each set of HSRI_TOP_SET of n values; what does not fill a block is left out. Returns how many there are. */
uint32_t hsri_top_sets(const hsri_sparse_kernels *kernels, const float *values, uint32_t n, float *largest);

/* A value that at least `want` of the values reach, found with little work: the largest of sets are values, too. 0 if that finds none.
 * work: n_sets words. */
float hsri_top_bar(const float *largest, uint32_t n_sets, uint32_t want, uint32_t *work);

/* Whether the next value, in the order of positions, is taken. */
static inline bool hsri_top_takes(hsri_top *top, float value)
{
    uint32_t bits = hsri_word_of(value + 0.0f);     /* -0 is 0 */

    if (!(value >= 0.0f))
        return false;
    if (bits != top->threshold || top->ties == 0)
        return bits > top->threshold;
    top->ties--;
    return true;
}

/* Numbers of those of n that are taken, ascending. */
uint32_t hsri_top_list(const hsri_sparse_kernels *kernels, hsri_top top, const float *values, uint32_t n, uint32_t *out);

#endif
