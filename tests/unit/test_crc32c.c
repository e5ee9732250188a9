/* SPDX-License-Identifier: Apache-2.0 */
/* CRC32C: published values, the division by the polynomial done bit by bit, and every way of cutting the data. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/rng.h"
#include "check.h"

typedef uint32_t crc_fn(uint32_t crc, const void *data, size_t n);

/* The definition. */
static uint32_t by_bits(uint32_t crc, const void *data, size_t n)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    return ~crc;
}

/* The check value, and the examples of RFC 3720, B.4. */
static void test_published(crc_fn *crc)
{
    uint8_t zeros[32] = { 0 }, ones[32], up[32], down[32];
    memset(ones, 0xFF, sizeof ones);
    for (uint8_t i = 0; i < 32; i++) {
        up[i] = i;
        down[i] = 31 - i;
    }
    CHECK(crc(0, "123456789", 9) == 0xE3069283u);
    CHECK(crc(0, zeros, 32) == 0x8A9136AAu);
    CHECK(crc(0, ones, 32) == 0x62A8AB43u);
    CHECK(crc(0, up, 32) == 0x46DD794Eu);
    CHECK(crc(0, down, 32) == 0x113FDB5Cu);
    CHECK(crc(0, NULL, 0) == 0 && crc(0x1234, NULL, 0) == 0x1234);
}

/* Sizes around the three lanes, starts that are not aligned, checksums that go on. */
static void test_sizes(crc_fn *crc, const uint8_t *data, size_t size)
{
    static const size_t sizes[] = { 1, 7, 8, 9, 63, 64, 1343, 1344, 1345, 2688, 4031, 4032, 4033, 4096, 8063, 8064, 8065, 12096, 65536 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t start = 0; start < 9; start++) {
            CHECK(start + sizes[i] <= size);
            CHECK(crc(0, data + start, sizes[i]) == by_bits(0, data + start, sizes[i]));
            CHECK(crc(0xDEADBEEF, data + start, sizes[i]) == by_bits(0xDEADBEEF, data + start, sizes[i]));
        }
}

static void test_cuts(crc_fn *crc, const uint8_t *data, size_t size)
{
    uint32_t whole = crc(0, data, size);
    for (uint64_t i = 0; i < 200; i++) {
        size_t a = hsri_rng_u64(1, i) % (size + 1), b = a + hsri_rng_u64(2, i) % (size + 1 - a);
        CHECK(crc(crc(crc(0, data, a), data + a, b - a), data + b, size - b) == whole);
    }
}

/* What it is for: no flipped bit of a page goes unseen. */
static void test_flips(crc_fn *crc, uint8_t *data)
{
    uint32_t whole = crc(0, data, 4096);
    for (uint32_t bit = 0; bit < 8 * 4096; bit += 7) {
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(crc(0, data, 4096) != whole);
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

int main(void)
{
    enum { SIZE = 65536 + 16 };
    static crc_fn *const versions[] = { hsri_crc32c, hsri_crc32c_portable, by_bits };
    uint8_t *data = malloc(SIZE);
    if (!CHECK(data))
        return CHECK_REPORT();
    for (size_t i = 0; i < SIZE; i++)
        data[i] = (uint8_t)hsri_rng_u64(7, i);
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        test_published(versions[i]);
        test_sizes(versions[i], data, SIZE);
        test_cuts(versions[i], data, 9000);
        test_flips(versions[i], data);
    }
    free(data);
    return CHECK_REPORT();
}
