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

#endif
