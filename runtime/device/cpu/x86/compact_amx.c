/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: attention over compact pages, up to eight queries in registers, more in tiles of bytes; both give the same bits (compact_body512.h).
 *
 * In tiles, queries and weights are rows of 64 bytes. A unit's keys are 16 rows of four components for every 64 components; a page's values
 * are 16 rows of four tokens for every 16 components. A page is unpacked once for all queries of the call, keys before their first use
 * and values before theirs.
 *
 * A tile of queries and a page are a step of a pipeline: while tiles multiply the scores of one step and the output of another, registers
 * make the weights of the step between, and add up the output of the one before. Tiles are set up and released inside each call. */
#include <immintrin.h>
#include <stdbool.h>

static inline __m512i dot_bytes(__m512i acc, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(acc, a, b); }

#include "device/cpu/x86/compact_body512.h"
#include "device/cpu/x86/tiles.h"

/* Sums of scores are tiles 0 and 1, those of the output 2 and 3; queries are 4 and weights 5, keys 6 and values 7. */
#define INPUT_TILES 6u

/* Queries go in tiles of `rows`; the last may overlap the one before: those it repeats are multiplied, but not looked at. */
typedef struct tiles {
    uint32_t n_queries, rows, n;
} tiles;

/* ---- codes ---- */

#define STORE_KEYS(dword, codes, at) _mm512_store_si512((at) + (dword) / 16 * TILE_BYTES + (dword) % 16 * 64, codes)

INLINE void unpack_keys(const work *w, const strips *x, const page_run *run, const uint8_t *next)
{
    for (uint32_t u = 0; u < run->n; u++) {
        uint8_t *keys = w->keys + (size_t)u * x->n_packs * TILE_BYTES;
        if (next) {
            fetch_part(next, u, 16 * x->d);
        }
        FOR_KEYS(w, x, run->slot, run->units[u], STORE_KEYS, keys);
    }
}

INLINE void unpack_values(const work *w, const strips *x, const page_run *run)
{
    for (uint32_t u = 0; u < run->n; u++) {
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

/* ---- steps ---- */

typedef struct step {
    page_run run;            /* of no units: there is no such step */
    const uint8_t *next;     /* the page behind it, or NULL */
    uint32_t n, page, unit, tile;
    uint32_t first, begin;   /* the tile's first query, and its first row that no other tile has */
} step;

INLINE step step_at(const work *w, const tiles *t, uint32_t n, uint32_t page, uint32_t unit, uint32_t tile)
{
    const hsri_units_args *a = w->a;
    step s = { .n = n, .page = page, .unit = unit, .tile = tile };
    if (unit < a->n_units) {
        s.run = run_at(a, unit);
        s.next = unit + s.run.n < a->n_units ? a->slots[unit + s.run.n] : NULL;
        s.first = (uint32_t)hsri_min(tile * t->rows, t->n_queries - t->rows);
        s.begin = tile * t->rows - s.first;
    }
    return s;
}

INLINE step next_step(const work *w, const tiles *t, const step *s)
{
    bool last = s->tile + 1 == t->n;
    return step_at(w, t, s->n + 1, last ? s->page + 1 : s->page, last ? s->unit + s->run.n : s->unit, last ? 0 : s->tile + 1);
}

INLINE int32_t *scores_of(const work *w, const step *s) { return w->scores + s->n % 2 * 16 * HSRI_PAGE_TOKENS; }
INLINE uint8_t *weights_of(const work *w, const step *s) { return w->weights + s->n % 2 * 16 * HSRI_PAGE_TOKENS; }
INLINE int32_t *products_of(const work *w, const strips *x, const step *s) { return w->products + s->n % 2 * 16 * x->d; }
INLINE terms *terms_of(const work *w, const step *s) { return w->terms + s->n % 3; }

/* ---- products ---- */

/* Scores of units `unit` and the next. */
INLINE void score_pair(const work *w, const strips *x, const step *s, uint32_t unit)
{
    const size_t stride = x->n_packs * 64;
    const uint8_t *bytes = w->bytes + s->first * stride, *keys = w->keys + unit * x->n_packs * TILE_BYTES;
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (uint32_t p = 0; p < x->n_packs; p++) {
        if (unit == 0 || x->n_packs > 1) {
            TILE_LOAD(4, bytes + 64 * p, stride);
        }
        TILE_LOAD(6, keys + p * TILE_BYTES, 64);
        TILE_MULTIPLY_SU(0, 4, 6);
        if (unit + 1 < s->run.n) {
            TILE_LOAD(6, keys + (x->n_packs + p) * TILE_BYTES, 64);
            TILE_MULTIPLY_SU(1, 4, 6);
        }
    }
}

INLINE void store_scores(const work *w, const step *s, uint32_t unit)
{
    int32_t *at = scores_of(w, s) + 16 * unit;
    TILE_STORE(0, at, HSRI_PAGE_TOKENS * sizeof *at);
    TILE_STORE(1, at + 16, HSRI_PAGE_TOKENS * sizeof *at);
}

/* Output of components j to j + 31. */
INLINE void value_pair(const work *w, const strips *x, const step *s, uint32_t j)
{
    const uint8_t *values = w->values + j / 16 * TILE_BYTES;
    if (j == 0) {
        TILE_LOAD(5, weights_of(w, s), HSRI_PAGE_TOKENS);
    }
    TILE_ZERO(2);
    TILE_LOAD(7, values, 64);
    TILE_MULTIPLY_UU(2, 5, 7);
    if (j + 16 < x->d) {
        TILE_ZERO(3);
        TILE_LOAD(7, values + TILE_BYTES, 64);
        TILE_MULTIPLY_UU(3, 5, 7);
    }
}

INLINE void store_products(const work *w, const strips *x, const step *s, uint32_t j)
{
    int32_t *at = products_of(w, x, s) + j;
    TILE_STORE(2, at, x->d * sizeof *at);
    if (j + 16 < x->d) {
        TILE_STORE(3, at + 16, x->d * sizeof *at);
    }
}

/* ---- calls ---- */

/* Rows [row, end) of a step, at most four. */
INLINE void weigh_rows(const work *w, const step *s, uint32_t row, uint32_t end)
{
    score_rows_at rows = { scores_of(w, s) + row * HSRI_PAGE_TOKENS, w->start[s->page % 3] + s->first + row,
                           weights_of(w, s) + row * HSRI_PAGE_TOKENS, s->first + row, terms_of(w, s), row };
    switch (end - row) {
    case 1: softmax_units(1, s->run.n, w, &rows); break;
    case 2: softmax_units(2, s->run.n, w, &rows); break;
    case 3: softmax_units(3, s->run.n, w, &rows); break;
    case 4: softmax_units(4, s->run.n, w, &rows); break;
    }
}

INLINE void fold_rows(const work *w, const strips *x, const step *s, uint32_t row, uint32_t end)
{
    for (uint32_t r = row; r < end; r++) {
        const int32_t *products = products_of(w, x, s) + r * x->d;
        float *o = w->outputs + (s->first + r) * x->d;
        UNROLL
        for (uint32_t j = 0; j < x->d; j += 16) {
            fold(o + j, terms_of(w, s), r, _mm512_load_ps(w->scale + j), _mm512_load_ps(w->mean + j), _mm512_load_si512(products + j));
        }
    }
}

/* Where part g of four of a step's own rows begins. */
INLINE uint32_t part_of(const tiles *t, const step *s, uint32_t g) { return s->begin + (t->rows - s->begin) * g / 4; }

/* Before the first scores of a page. */
INLINE void unpack_page(const work *w, const strips *x, const tiles *t, const step *s)
{
    open_page(w, x, s->run.slot, t->n_queries, w->start[s->page % 3]);
    unpack_keys(w, x, &s->run, s->next);
}

/* Scores of one step, weights of the one before, the output of the one before that, and what that adds up to of a fourth; `coming` will be
 * scored next. A store of a tile waits for its products, and a load of one for what was just stored there, so there are rows between. */
INLINE void attend_steps(const work *w, const strips *x, const tiles *t, const step *coming, const step *scored, const step *weighed,
                         const step *valued, const step *folded)
{
    if (folded->run.n > 0 && folded->tile == 0) {
        read_value_scales(w, x, folded->run.slot);
    }
    const uint32_t half = (uint32_t)hsri_round_up(x->d / 2, 32);
    UNROLL
    for (uint32_t g = 0; g < 4; g++) {
        const bool scores = g % 2 == 0 && scored->run.n > g, values = g % 2 == 1 && valued->run.n > 0 && (g == 1 || half < x->d);
        const uint32_t end = g == 1 ? (uint32_t)hsri_min(half, x->d) : x->d;
        uint32_t j = g == 1 ? 0 : half;
        if (scores) {
            score_pair(w, x, scored, g);
        }
        for (; values && j + 32 < end; j += 32) {
            value_pair(w, x, valued, j);
            store_products(w, x, valued, j);
        }
        if (values) {
            value_pair(w, x, valued, j);
        }
        /* the last page's codes are all under way */
        if (g == 2 && coming->run.n > 0 && coming->tile == 0) {
            unpack_page(w, x, t, coming);
        }
        if (g == 3 && weighed->run.n > 0 && weighed->tile == 0) {
            unpack_values(w, x, &weighed->run);
        }
        if (weighed->run.n > 0) {
            weigh_rows(w, weighed, part_of(t, weighed, g), part_of(t, weighed, g + 1));
        }
        if (folded->run.n > 0) {
            fold_rows(w, x, folded, part_of(t, folded, g), part_of(t, folded, g + 1));
        }
        if (scores) {
            store_scores(w, scored, g);
        }
        if (values) {
            store_products(w, x, valued, j);
        }
    }
}

INLINE void attend_tiles(const work *w, const strips *x)
{
    tiles t = { .n_queries = w->a->n_queries, .n = (w->a->n_queries + TILE_ROWS - 1) / TILE_ROWS };
    t.rows = (t.n_queries + t.n - 1) / t.n;
    tiles_configure(INPUT_TILES, t.rows);
    step none = { 0 }, weighed = none, valued = none, folded = none, scored = step_at(w, &t, 0, 0, 0, 0);
    unpack_page(w, x, &t, &scored);
    while (scored.run.n + weighed.run.n + valued.run.n + folded.run.n > 0) {
        step coming = scored.run.n > 0 ? next_step(w, &t, &scored) : none;
        attend_steps(w, x, &t, &coming, &scored, &weighed, &valued, &folded);
        folded = valued;
        valued = weighed;
        weighed = scored;
        scored = coming;
    }
    tiles_release();
}

INLINE void attend(const hsri_units_args *a, const strips *x)
{
    work w = work_of(a, x);
    start_queries(&w, x);
    switch (a->n_queries) {
    case 1: attend_rows(1, &w, x); break;
    case 2: attend_rows(2, &w, x); break;
    case 3: attend_rows(3, &w, x); break;
    case 4: attend_rows(4, &w, x); break;
    case 5: attend_rows(5, &w, x); break;
    case 6: attend_rows(6, &w, x); break;
    case 7: attend_rows(7, &w, x); break;
    case 8: attend_rows(8, &w, x); break;
    default: attend_tiles(&w, x); break;
    }
    finish_queries(&w, x);
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
