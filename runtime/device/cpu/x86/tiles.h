/* SPDX-License-Identifier: Apache-2.0 */
/* AMX in words. A tile register holds 16 rows of 64 bytes; numbers of tiles are literals. */
#ifndef HSRI_CPU_X86_TILES_H
#define HSRI_CPU_X86_TILES_H

#include <stddef.h>
#include <stdint.h>

#define TILES 8u
#define TILE_ROWS 16u
#define TILE_BYTES 1024u

/* Written out, because not every compiler's intrinsics say that they read memory. */
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_LOAD(tile, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(at), "r"((size_t)(stride)) : "memory")
/* The same for what is read once: it shall not push what is used again out of the first-level cache. */
#define TILE_LOAD_ONCE(tile, at, stride) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile : : "r"(at), "r"((size_t)(stride)) : "memory")
#define TILE_STORE(tile, at, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(at), "r"((size_t)(stride)) : "memory")

/* sums += inputs * weights: of bf16; of bytes, the inputs with signs; of bytes without signs. */
#define TILE_MULTIPLY(sums, inputs, weights) TILE_PRODUCT("tdpbf16ps", sums, inputs, weights)
#define TILE_MULTIPLY_SU(sums, inputs, weights) TILE_PRODUCT("tdpbsud", sums, inputs, weights)
#define TILE_MULTIPLY_UU(sums, inputs, weights) TILE_PRODUCT("tdpbuud", sums, inputs, weights)
#define TILE_PRODUCT(what, sums, inputs, weights) __asm__ volatile(what " %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #sums : :)

/* The operand of LDTILECFG. */
typedef struct tile_config {
    uint8_t  palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t  n_rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "a tile configuration has its size");

/* The first tiles have `rows` rows: those of sums and inputs. The others have all: those of weights. */
static inline void tiles_configure(uint32_t n_of_rows, uint32_t rows)
{
    tile_config config = { .palette = 1 };
    for (uint32_t i = 0; i < TILES; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = i < n_of_rows ? (uint8_t)rows : TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

static inline void tiles_release(void) { __asm__ volatile("tilerelease" : :); }

#endif
