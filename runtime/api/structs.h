/* SPDX-License-Identifier: Apache-2.0 */
/* The struct_size rule of the public header, in one place. */
#ifndef HSRI_STRUCTS_H
#define HSRI_STRUCTS_H

#include "base/status.h"

/* Refuse a struct of the caller that hsri_struct_in and hsri_struct_out would refuse for its size. */
hsr_status hsri_struct_check(const void *given, const char *name, hsr_error *err);

/* Copy the caller's option struct over *known, which holds the defaults and has known_size bytes. */
hsr_status hsri_struct_in(void *known, uint32_t known_size, const void *given, const char *name, hsr_error *err);

/* Copy a result into the caller's struct, as much of it as the caller knows; its struct_size stays. */
hsr_status hsri_struct_out(void *given, const void *known, uint32_t known_size, const char *name, hsr_error *err);

/* Fill the caller's option struct of `size` bytes with defaults; nothing happens if it is NULL or has no room for a field. */
void hsri_struct_fill(void *given, uint32_t size, const void *defaults, uint32_t known_size);

#endif
