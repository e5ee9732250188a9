/* SPDX-License-Identifier: Apache-2.0 */
#include "base/rng.h"

#define ROUNDS     10
#define MULTIPLIER 0xD2B74407B1CE6E93u
#define KEY_STEP   0x9E3779B97F4A7C15u   /* golden ratio */

__extension__ typedef unsigned __int128 wide;

/* The seed is the key; the index is the low word of the counter, whose high word stays 0. */
uint64_t hsri_rng_u64(uint64_t seed, uint64_t index)
{
    uint64_t low = index, high = 0, key = seed;
    for (int round = 0; round < ROUNDS; round++) {
        wide product = (wide)MULTIPLIER * low;
        low = (uint64_t)(product >> 64) ^ key ^ high;
        high = (uint64_t)product;
        key += KEY_STEP;
    }
    return low;
}

double hsri_rng_unit(uint64_t seed, uint64_t index)
{
    return (double)(hsri_rng_u64(seed, index) >> 11) * 0x1p-53;
}
