/* SPDX-License-Identifier: Apache-2.0 */
/* Counter-based random numbers: draw `index` of stream `seed` is a pure function, so that a request's draws do not depend
 * on what else runs or ran. Philox 2x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011). */
#ifndef HSRI_RNG_H
#define HSRI_RNG_H

#include <stdint.h>

uint64_t hsri_rng_u64(uint64_t seed, uint64_t index);

/* Uniform in [0, 1), 53 random bits. */
double hsri_rng_unit(uint64_t seed, uint64_t index);

#endif
