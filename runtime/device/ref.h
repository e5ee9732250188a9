/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HSRI_REF_H
#define HSRI_REF_H

#include <stdint.h>

/* A place in device memory. buf 0 is no buffer: an absent optional argument. */
typedef struct hsri_ref {
    uint32_t buf;
    uint32_t reserved;
    uint64_t offset;   /* bytes */
} hsri_ref;

static inline hsri_ref hsri_at(hsri_ref r, uint64_t bytes) { r.offset += bytes; return r; }

/* Cut the next `bytes` off an arena, in whole cache lines. */
static inline hsri_ref hsri_carve(hsri_ref *next, uint64_t bytes)
{
    hsri_ref at = *next;
    *next = hsri_at(*next, (bytes + 63) / 64 * 64);
    return at;
}

#endif
