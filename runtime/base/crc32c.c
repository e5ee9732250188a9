/* SPDX-License-Identifier: Apache-2.0 */
/* The register of a CRC holds a polynomial over GF(2), lowest power in the highest bit. Appending k zero bytes multiplies it by
 * x^(8k) modulo the CRC's polynomial; that is how three independent parts of the data, whose instructions overlap in the processor, are put
 * together, and how the tables of the portable version are made. */
#include "base/crc32c.h"

#include <string.h>

#define POLYNOMIAL 0x82F63B78u   /* Castagnoli's, bits reversed */

/* ---- portable ---- */

/* A nibble at a time: 64 bytes of table instead of kilobytes, since every processor this is built for by default has the
 * instruction. Entry i is i shifted out bit by bit. */
static const uint32_t nibble_table[16] = {
    0x00000000, 0x105EC76F, 0x20BD8EDE, 0x30E349B1, 0x417B1DBC, 0x5125DAD3, 0x61C69362, 0x7198540D,
    0x82F63B78, 0x92A8FC17, 0xA24BB5A6, 0xB21572C9, 0xC38D26C4, 0xD3D3E1AB, 0xE330A81A, 0xF36E6F75,
};

uint32_t hsri_crc32c_portable(uint32_t crc, const void *data, size_t n)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= bytes[i];
        crc = crc >> 4 ^ nibble_table[crc & 15];
        crc = crc >> 4 ^ nibble_table[crc & 15];
    }
    return ~crc;
}

/* ---- with the instruction ---- */

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#define STEP1(crc, value) _mm_crc32_u8((uint32_t)(crc), value)
#define STEP8(crc, value) _mm_crc32_u64(crc, value)
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define STEP1(crc, value) __crc32cb((uint32_t)(crc), value)
#define STEP8(crc, value) __crc32cd((uint32_t)(crc), value)
#endif

#ifdef STEP8

/* Three lanes make 4032 bytes: a slot of 4096 without its header. */
#define LANE 1344u
#define X_LANE  0xD27285DBu   /* x^(8 * LANE) */
#define X_LANES 0x46BF959Eu   /* x^(16 * LANE) */

static uint64_t load8(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* a * x + b * y modulo the polynomial; the two products together, as each is one long chain. */
static uint32_t multiply_add(uint32_t a, uint32_t x, uint32_t b, uint32_t y)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 32; i++) {
        sum ^= (a & -(x >> 31)) ^ (b & -(y >> 31));
        x <<= 1;
        y <<= 1;
        a = a >> 1 ^ (POLYNOMIAL & -(a & 1));
        b = b >> 1 ^ (POLYNOMIAL & -(b & 1));
    }
    return sum;
}

static uint32_t three_lanes(uint32_t crc, const uint8_t *bytes)
{
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < LANE; i += 8) {
        a = STEP8(a, load8(bytes + i));
        b = STEP8(b, load8(bytes + LANE + i));
        c = STEP8(c, load8(bytes + 2 * LANE + i));
    }
    return multiply_add((uint32_t)a, X_LANES, (uint32_t)b, X_LANE) ^ (uint32_t)c;
}

uint32_t hsri_crc32c(uint32_t crc, const void *data, size_t n)
{
    const uint8_t *bytes = data;
    uint32_t sum = ~crc;
    for (; n >= 3 * LANE; n -= 3 * LANE, bytes += 3 * LANE)
        sum = three_lanes(sum, bytes);
    for (; n >= 8; n -= 8, bytes += 8)
        sum = (uint32_t)STEP8(sum, load8(bytes));
    for (; n > 0; n--, bytes++)
        sum = STEP1(sum, *bytes);
    return ~sum;
}

#else

uint32_t hsri_crc32c(uint32_t crc, const void *data, size_t n)
{
    return hsri_crc32c_portable(crc, data, n);
}

#endif
