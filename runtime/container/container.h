/* SPDX-License-Identifier: Apache-2.0 */
/* Bounds-checked reader of a GGUF v3 file through a read-only mapping. Knows the container, not what is in it. Every
 * number of the file is checked before it is used; opening costs time and memory in proportion to the file's real size,
 * never to what the file claims. */
#ifndef HSRI_CONTAINER_H
#define HSRI_CONTAINER_H

#include <stdbool.h>
#include <stdint.h>

#include "hisparse_rt/hisparse_rt.h"

typedef struct hsri_container hsri_container;

#define HSRI_GGUF_MAX_DIMS 4

typedef struct hsri_tensor_info {
    const char *name;           /* NUL-terminated, owned by the container */
    uint32_t    type;           /* ggml type number: 0 F32, 30 BF16, 8 Q8_0, 3 Q4_1, ... */
    uint32_t    n_dims;         /* 1..4 */
    uint64_t    dims[HSRI_GGUF_MAX_DIMS]; /* dims[0] contiguous (the input side); unused ones are 1 */
    const void *data;           /* into the mapping, aligned to general.alignment within the file */
    uint64_t    size;           /* bytes, by type and dims; inside the file */
    uint64_t    index;          /* its number in the file */
} hsri_tensor_info;

/* Refuses: not a regular file, wrong magic or byte order, version other than 3, general.alignment not a power of two in
 * [8, 1 MiB], a count, length, type or offset that does not fit the file, n_dims outside 1..4, zero dims, dims whose
 * product or byte size overflows, unknown tensor types, offsets not aligned, overlapping tensors, two tensors or two
 * keys with one name, nested arrays, strings with NUL in names. Messages name the file and the tensor or key. */
hsr_status hsri_container_open(const char *path, hsri_container **container, hsr_error *err);
void hsri_container_close(hsri_container *container);

const char *hsri_container_path(const hsri_container *container);   /* as given, for messages */
uint64_t hsri_container_size(const hsri_container *container);      /* bytes of the file */
const void *hsri_container_base(const hsri_container *container);   /* start of the mapping */

uint64_t hsri_container_n_tensors(const hsri_container *container);
const hsri_tensor_info *hsri_container_tensor_at(const hsri_container *container, uint64_t index);
const hsri_tensor_info *hsri_container_tensor(const hsri_container *container, const char *name); /* NULL: none. O(log n) */

/* Typed metadata. HSR_AGAIN: no such key. HSR_E_FORMAT: another type, or a value that does not fit. Integers of any width
 * are accepted where they fit; numbers accept f32 and f64 (and integers). */
hsr_status hsri_container_u32(const hsri_container *container, const char *key, uint32_t *value, hsr_error *err);
hsr_status hsri_container_f64(const hsri_container *container, const char *key, double *value, hsr_error *err);
hsr_status hsri_container_string(const hsri_container *container, const char *key, const char **value, uint64_t *size, hsr_error *err);
/* Integer array into out[cap]; *n receives the length, refused if above cap. */
hsr_status hsri_container_u32_array(const hsri_container *container, const char *key, uint32_t *out, uint64_t cap, uint64_t *n,
                                    hsr_error *err);

#endif
