/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: assignment of points to centres in tiles of bytes. The same integers as everywhere.
 *
 * Points are rows as they lie in memory, and so are centres as the other operand: a quad of 16 centres is a row. Of each tile of 16 points
 * and 16 centres, the sums are kept with the number of their centre below them, so that one maximum finds both. */
#include <immintrin.h>
#include <string.h>

#include "device/cpu/cluster_kernels.h"
#include "device/cpu/x86/tiles.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define NUMBER_BITS 10u
#define NUMBER_MASK ((1u << NUMBER_BITS) - 1)

_Static_assert(HSRI_SEGMENT_CLUSTERS <= 1u << NUMBER_BITS, "the number of a centre has its bits");
_Static_assert(HSRI_CLUSTER_COMPONENTS * (255u * 128u + 128u * 128u / 2) < 1u << (31 - NUMBER_BITS), "a sum and a number fit in 32 bits");

/* Sums are tiles 0 and 1, points tile 2, centres tiles 3 and 4. */
static void configure(uint32_t n_quads)
{
    tile_config config = { .palette = 1 };

    for (uint32_t i = 0; i < 5; i++) {
        config.row_bytes[i] = i == 2 ? (uint16_t)(4 * n_quads) : 64;
        config.n_rows[i] = i < 3 ? TILE_ROWS : (uint8_t)n_quads;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/* What is higher, best[p] or the sum of point p; of equal sums, that of the lower number, whose complement is in `number`. */
INLINE void keep_best(const int32_t *sums, __m512i number, __m512i *best)
{
    UNROLL for (uint32_t p = 0; p < TILE_ROWS; p++)
        best[p] = _mm512_max_epi32(best[p], _mm512_shldi_epi32(_mm512_load_si512(sums + 16 * p), number, NUMBER_BITS));
}

/* Sums of two groups of centres, into `to`. */
INLINE void multiply(const hsri_assign_args *a, uint32_t group, int32_t to[2][TILE_ROWS * 16])
{
    const int32_t *bias = a->bias + 16 * group;
    const uint8_t *centres = a->centres + 64ull * group;

    TILE_LOAD(0, bias, 0);
    TILE_LOAD(1, bias + 16, 0);
    TILE_LOAD(3, centres, 4 * a->n_centres);
    TILE_LOAD(4, centres + 64, 4 * a->n_centres);
    TILE_MULTIPLY_SU(0, 2, 3);
    TILE_MULTIPLY_SU(1, 2, 4);
    TILE_STORE(0, to[0], 64);
    TILE_STORE(1, to[1], 64);
}

static void assign_points(const hsri_assign_args *a, uint32_t first)
{
    _Alignas(64) int32_t products[2][2][TILE_ROWS * 16];   /* of the groups whose turn it is, and of the next */
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i one_group = _mm512_set1_epi32(16 << (32 - NUMBER_BITS));
    __m512i       best[TILE_ROWS], number = _mm512_sub_epi32(_mm512_set1_epi32(NUMBER_MASK), lanes);
    const uint32_t n_groups = a->n_centres / 16;    /* of centres that are a tile */

    number = _mm512_slli_epi32(number, 32 - NUMBER_BITS);
    UNROLL for (uint32_t p = 0; p < TILE_ROWS; p++)
        best[p] = _mm512_set1_epi32(INT32_MIN);
    TILE_LOAD(2, a->points + 4ull * first * a->n_quads, 4 * a->n_quads);
    multiply(a, 0, products[0]);
    for (uint32_t group = 0; group < n_groups; group += 2) {
        int32_t (*now)[TILE_ROWS * 16] = products[group / 2 % 2];

        if (group + 2 < n_groups)
            multiply(a, group + 2, products[(group / 2 + 1) % 2]);
        keep_best(now[0], number, best);
        number = _mm512_sub_epi32(number, one_group);
        keep_best(now[1], number, best);
        number = _mm512_sub_epi32(number, one_group);
    }
    UNROLL for (uint32_t p = 0; p < TILE_ROWS; p++)
        a->nearest[first + p] = (uint16_t)(~(uint32_t)_mm512_reduce_max_epi32(best[p]) & NUMBER_MASK);
}

static void assign_tiles(const hsri_assign_args *a)
{
    configure(a->n_quads);
    for (uint32_t first = 0; first < a->n_points; first += TILE_ROWS)
        assign_points(a, first);
    tiles_release();
}

void hsri_cluster_kernels_fill_amx(hsri_cluster_kernels *k)
{
    k->assign = assign_tiles;
}
