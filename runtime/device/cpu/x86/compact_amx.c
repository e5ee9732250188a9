/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: attention over compact pages, up to eight queries in registers, more in tiles of bytes; both give the same bits (compact_body512.h).
 *
 * In tiles, queries and weights are rows of 64 bytes. A unit's keys are 16 rows of four components for every 64 components; a page's values
 * are 16 rows of four tokens for every 16 components. Tiles are set up and released inside each call. */
#include <immintrin.h>

static inline __m512i dot_bytes(__m512i acc, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(acc, a, b); }

#include "device/cpu/x86/compact_body512.h"
#include "device/cpu/x86/tiles.h"

/* ---- tiles ---- */

/* Sums are tiles 0 to 3 and inputs tile 4; codes are tiles 5 to 7. */
#define INPUT_TILES 5u

/* Queries go in n tiles of `rows`; the last may overlap the one before, with the same results. */
typedef struct tiles {
    uint32_t n_queries, rows, n;
} tiles;

static uint32_t tile_start(const tiles *t, uint32_t tile)
{
    uint32_t first = tile * t->rows;
    return first + t->rows <= t->n_queries ? first : t->n_queries - t->rows;
}

/* ---- codes ---- */

#define STORE_KEYS(dword, codes, at) _mm512_store_si512((at) + (dword) / 16 * TILE_BYTES + (dword) % 16 * 64, codes)

INLINE void unpack(const work *w, const strips *x, const page_run *run, const uint8_t *next)
{
    for (uint32_t u = 0; u < run->n; u++) {
        uint8_t *keys = w->keys + (size_t)u * x->n_packs * TILE_BYTES;
        if (next) {
            fetch_part(next, u, 16 * x->d);
        }
        FOR_KEYS(x, run->slot, run->units[u], STORE_KEYS, keys);
        const uint8_t *codes = hsri_value_unit(HSRI_KV_TYPE_COMPACT, run->slot, x->d, run->units[u]);
        for (uint32_t octet = 0; octet < 2; octet++) {
            UNROLL
            for (uint32_t j = 0; j < x->d; j += 16) {
                __m512i dwords = _mm512_loadu_si512(codes + 4 * (octet * x->d + j));
                uint8_t *at = w->values + j / 16 * TILE_BYTES + (8 * octet + u) * 64;
                _mm512_store_si512(at, four_bits(dwords, 0));
                _mm512_store_si512(at + 4 * 64, four_bits(dwords, 1));
            }
        }
    }
}

/* ---- products ---- */

/* sums[i] += inputs * codes + step i, for the first n of four */
#define MULTIPLY_FOUR(op, n, codes, step) \
    do { \
        TILE_LOAD(5, codes, 64); \
        op(0, 4, 5); \
        if ((n) > 1) { \
            TILE_LOAD(6, (codes) + (step), 64); \
            op(1, 4, 6); \
        } \
        if ((n) > 2) { \
            TILE_LOAD(7, (codes) + 2 * (step), 64); \
            op(2, 4, 7); \
        } \
        if ((n) > 3) { \
            TILE_LOAD(5, (codes) + 3 * (step), 64); \
            op(3, 4, 5); \
        } \
    } while (0)

#define ZERO_FOUR() do { TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3); } while (0)

/* Side by side, 16 numbers each. */
#define STORE_FOUR(n, at, stride) \
    do { \
        TILE_STORE(0, at, stride); \
        if ((n) > 1) { \
            TILE_STORE(1, (at) + 16, stride); \
        } \
        if ((n) > 2) { \
            TILE_STORE(2, (at) + 32, stride); \
        } \
        if ((n) > 3) { \
            TILE_STORE(3, (at) + 48, stride); \
        } \
    } while (0)

INLINE void score_tile(const work *w, const strips *x, const page_run *run, uint32_t first)
{
    const size_t stride = x->n_packs * 64;
    const uint8_t *bytes = w->bytes + first * stride;
    int32_t *products = w->products + (uint64_t)first * product_stride(x);
    ZERO_FOUR();
    for (uint32_t p = 0; p < x->n_packs; p++) {
        TILE_LOAD(4, bytes + 64 * p, stride);
        const uint8_t *keys = w->keys + p * TILE_BYTES;
        MULTIPLY_FOUR(TILE_MULTIPLY_SU, run->n, keys, x->n_packs * TILE_BYTES);
    }
    STORE_FOUR(run->n, products, product_stride(x) * sizeof *products);
}

INLINE void value_tile(const work *w, const strips *x, uint32_t first)
{
    int32_t *products = w->products + (uint64_t)first * product_stride(x);
    TILE_LOAD(4, w->weights + (size_t)first * HSRI_PAGE_TOKENS, HSRI_PAGE_TOKENS);
    for (uint32_t j = 0; j < x->d; j += 64) {
        uint32_t n = x->d - j >= 64 ? 4 : (x->d - j) / 16;
        const uint8_t *values = w->values + j / 16 * TILE_BYTES;
        ZERO_FOUR();
        MULTIPLY_FOUR(TILE_MULTIPLY_UU, n, values, TILE_BYTES);
        STORE_FOUR(n, products + j, product_stride(x) * sizeof *products);
    }
}

/* ---- calls ---- */

INLINE void attend_tiles(const work *w, const strips *x)
{
    const hsri_units_args *a = w->a;
    tiles t = { .n_queries = a->n_queries, .n = (a->n_queries + TILE_ROWS - 1) / TILE_ROWS };
    t.rows = (t.n_queries + t.n - 1) / t.n;
    tiles_configure(INPUT_TILES, t.rows);
    start_queries(w, x, 0, a->n_queries);
    page_run run;
    for (uint32_t i = 0; i < a->n_units; i += run.n) {
        run = run_at(a, i);
        unpack(w, x, &run, i + run.n < a->n_units ? a->slots[i + run.n] : NULL);
        scale_all(w, x, run.slot, 0, a->n_queries);
        for (uint32_t k = 0; k < t.n; k++) {
            score_tile(w, x, &run, tile_start(&t, k));
        }
        for (uint32_t q = 0; q < a->n_queries; q += FOUR) {
            switch (a->n_queries - q) {
            case 1: softmax_units(1, run.n, w, x, q); break;
            case 2: softmax_units(2, run.n, w, x, q); break;
            case 3: softmax_units(3, run.n, w, x, q); break;
            default: softmax_units(4, run.n, w, x, q); break;
            }
        }
        read_value_scales(w, x, run.slot);
        for (uint32_t k = 0; k < t.n; k++) {
            value_tile(w, x, tile_start(&t, k));
        }
        for (uint32_t q = 0; q < a->n_queries; q++) {
            const int32_t *products = w->products + (uint64_t)q * product_stride(x);
            UNROLL
            for (uint32_t j = 0; j < x->d; j += 16) {
                fold(w, q, j, _mm512_load_si512(products + j));
            }
        }
    }
    finish_queries(w, 0, a->n_queries);
    tiles_release();
}

INLINE void attend(const hsri_units_args *a, const strips *x)
{
    work w = work_of(a, x);
    order_queries(&w, x);
    switch (a->n_queries) {
    case 1: attend_rows(1, &w, x, 0); break;
    case 2: attend_rows(2, &w, x, 0); break;
    case 3: attend_rows(3, &w, x, 0); break;
    case 4: attend_rows(4, &w, x, 0); break;
    case 5: attend_rows(5, &w, x, 0); break;
    case 6: attend_rows(6, &w, x, 0); break;
    case 7: attend_rows(7, &w, x, 0); break;
    case 8: attend_rows(8, &w, x, 0); break;
    default: attend_tiles(&w, x); break;
    }
}

/* The common head size is compiled in. */
void hsri_attend_compact_amx(const hsri_units_args *a)
{
    if (a->head_dim == 64) {
        const strips x = strips_of(64);
        attend(a, &x);
    } else {
        const strips x = strips_of(a->head_dim);
        attend(a, &x);
    }
}
