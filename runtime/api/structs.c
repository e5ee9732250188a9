/* SPDX-License-Identifier: Apache-2.0 */
#include "api/structs.h"

#include <string.h>

/* struct_size itself and at least one field. */
#define SMALLEST 8u

static hsr_status read_size(const void *given, uint32_t *size, const char *name, hsr_error *err)
{
    if (!given)
        return hsri_fail(err, HSR_E_INVALID, "%s is NULL", name);
    memcpy(size, given, sizeof *size);
    if (*size < SMALLEST || *size > (1u << 16))
        return hsri_fail(err, HSR_E_INVALID, "%s.struct_size is %u: it was not set", name, *size);
    return HSR_OK;
}

hsr_status hsri_struct_check(const void *given, const char *name, hsr_error *err)
{
    uint32_t size;
    return read_size(given, &size, name, err);
}

hsr_status hsri_struct_in(void *known, uint32_t known_size, const void *given, const char *name, hsr_error *err)
{
    uint32_t size = 0;
    HSRI_TRY(read_size(given, &size, name, err));
    for (uint32_t i = known_size; i < size; i++)
        if (((const unsigned char *)given)[i])
            return hsri_fail(err, HSR_E_INVALID, "%s sets a field, at byte %u, that this library (%s) does not know",
                             name, i, hsr_version());
    memcpy(known, given, size < known_size ? size : known_size);
    memcpy(known, &known_size, sizeof known_size);
    return HSR_OK;
}

hsr_status hsri_struct_out(void *given, const void *known, uint32_t known_size, const char *name, hsr_error *err)
{
    uint32_t size = 0;
    HSRI_TRY(read_size(given, &size, name, err));
    const uint32_t n = size < known_size ? size : known_size;
    memcpy((char *)given + sizeof size, (const char *)known + sizeof size, n - sizeof size);
    if (size > known_size)
        memset((char *)given + known_size, 0, size - known_size);
    return HSR_OK;
}

void hsri_struct_fill(void *given, uint32_t size, const void *defaults, uint32_t known_size)
{
    if (!given || size < SMALLEST)
        return;
    memset(given, 0, size);
    memcpy(given, defaults, size < known_size ? size : known_size);
    memcpy(given, &size, sizeof size);
}
