/* SPDX-License-Identifier: Apache-2.0 */
/* CRC32C (Castagnoli): the checksum of pages on disk and of saved sessions. */
#ifndef HSRI_CRC32C_H
#define HSRI_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Checksum of n more bytes after those whose checksum is `crc`; 0 to begin. The checksum of "123456789" is 0xE3069283. */
uint32_t hsri_crc32c(uint32_t crc, const void *data, size_t n);

/* The same without special instructions: what hsri_crc32c does on a processor that has none, and what tests compare it with. */
uint32_t hsri_crc32c_portable(uint32_t crc, const void *data, size_t n);

#endif
