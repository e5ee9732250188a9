/* SPDX-License-Identifier: Apache-2.0 */
#include "base/array.h"

#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 64u

/* An empty array still gets an address of its own, so that NULL always means refused. */
static bool array_bytes(size_t n, size_t size, size_t *bytes)
{
    if (__builtin_mul_overflow(n, size, bytes))
        return false;
    if (*bytes == 0)
        *bytes = 1;
    return *bytes <= PTRDIFF_MAX;
}

void *hsri_new_array(size_t n, size_t size)
{
    size_t bytes;
    return array_bytes(n, size, &bytes) ? calloc(1, bytes) : NULL;
}

void *hsri_new_aligned(size_t n, size_t size)
{
    size_t bytes;
    if (!array_bytes(n, size, &bytes))
        return NULL;
    bytes = hsri_round_up(bytes, ALIGNMENT);
    void *array = aligned_alloc(ALIGNMENT, bytes);
    if (array)
        memset(array, 0, bytes);
    return array;
}

bool hsri_grow(void **array, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity)
        return true;
    size_t next = *capacity <= SIZE_MAX / 2 ? (size_t)hsri_max(need, 2 * *capacity) : need;
    size_t bytes;
    if (!array_bytes(next, size, &bytes))
        return false;
    char *grown = realloc(*array, bytes);
    if (!grown)
        return false;
    memset(grown + *capacity * size, 0, bytes - *capacity * size);
    *array = grown;
    *capacity = next;
    return true;
}
