/* SPDX-License-Identifier: Apache-2.0 */
/* Overflow-checked heap arrays: the only way the library asks for heap memory. */
#ifndef HSRI_ARRAY_H
#define HSRI_ARRAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zeroed array of n elements of `size` bytes; NULL if refused or n * size overflows. Free with free(). */
void *hsri_new_array(size_t n, size_t size);

/* As above with a 64-byte aligned start, for data that vector code reads. Free with free(). */
void *hsri_new_aligned(size_t n, size_t size);

/* Make *array (NULL at first) hold at least `need` elements, doubling its capacity; new elements are zero.
 * False if refused: the array is then unchanged. */
bool hsri_grow(void **array, size_t *capacity, size_t need, size_t size);

static inline uint64_t hsri_round_up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }
static inline uint64_t hsri_div_up(uint64_t x, uint64_t by) { return (x + by - 1) / by; }
static inline uint64_t hsri_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t hsri_max(uint64_t a, uint64_t b) { return a > b ? a : b; }

#endif
