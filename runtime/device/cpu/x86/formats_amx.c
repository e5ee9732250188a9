/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: attention over int8 pages, which are laid out as bf16 pages and attended as such (attend_amx.c).
 *
 * A component becomes its difference from the mean of the call's first page, base + scale * code, rounded: to within a quarter of a step of
 * 8 bits, an eighth for most, where pages have about the same mean. The first page's mean is put back at the end: a mean key adds the same
 * to all scores of a query, a mean value the same to all outputs. So what many tokens have in common costs the rest no bits.
 *
 * Few queries have their pages laid out as they are attended, block by block, in work space that a first-level cache holds. For many, which
 * go through the pages more than once, all are laid out before. */
#include <assert.h>
#include <immintrin.h>
#include <string.h>

#include "base/array.h"
#include "device/cpu/kernels.h"
#include "device/cpu/x86/lanes512.h"
#include "device/formats.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* ---- codes as numbers ---- */

/* How 16 numbers are made of bytes in floats (below): base + scale * float. Lanes are pairs: of one component of two tokens, or of two
 * components of a token. */
typedef struct maker {
    __m512 scale, base;
} maker;

/* A byte in bits 8 to 15 of a float with this exponent makes it 2^15 + byte, without a conversion. Codes are bytes less 128. */
#define BYTE_EXPONENT 0x47000000
#define BYTE_BASE (0x1p15f + 128.0f)

INLINE maker maker_of(__m512 scale, __m512 base)
{
    return (maker) { scale, _mm512_fnmadd_ps(scale, _mm512_set1_ps(BYTE_BASE), base) };
}

/* Two rows of 16 codes, side by side in bf16: dword i is { even[i], odd[i] }. */
INLINE __m512i line_of(__m128i even, __m128i odd, maker low, maker high)
{
    const __m512i exponent = _mm512_set1_epi32(BYTE_EXPONENT);
    const __m512i first = _mm512_set_epi32(0x1700, 0x700, 0x1600, 0x600, 0x1500, 0x500, 0x1400, 0x400,
                                           0x1300, 0x300, 0x1200, 0x200, 0x1100, 0x100, 0x1000, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(0x800));
    const __mmask64 byte = 0x2222222222222222u;
    __m256i both = _mm256_xor_si256(_mm256_inserti128_si256(_mm256_castsi128_si256(even), odd, 1), _mm256_set1_epi8(-128));
    __m512i codes = _mm512_castsi256_si512(both);
    __m512 a = _mm512_castsi512_ps(_mm512_mask_permutexvar_epi8(exponent, byte, first, codes));
    __m512 b = _mm512_castsi512_ps(_mm512_mask_permutexvar_epi8(exponent, byte, second, codes));
    a = _mm512_fmadd_ps(a, low.scale, low.base);
    b = _mm512_fmadd_ps(b, high.scale, high.base);
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

/* ---- pages ---- */

/* Units of one page that are neighbours in a list. */
typedef struct page_run {
    const uint8_t *slot, *units;
    uint32_t n;
} page_run;

static page_run run_at(const hsri_units_args *a, uint32_t first, uint32_t end)
{
    uint32_t n = 1;
    while (first + n < end && a->slots[first + n] == a->slots[first] && n < HSRI_PAGE_UNITS) {
        n++;
    }
    return (page_run) { a->slots[first], a->units + first, n };
}

INLINE __m512 floats_at(const uint8_t *slot, uint32_t d, uint32_t which, uint32_t j)
{
    return _mm512_maskz_loadu_ps(j < d ? lanes(d - j) : 0, hsri_int8_array(slot, d, which) + (j < d ? 4 * j : 0));
}

/* Where a line of keys is that unit `to` of a page has, and a line of values from component j on. Headers are not touched. */
INLINE uint8_t *key_line(uint8_t *page, uint32_t pair, uint32_t to)
{
    return page + HSRI_PAGE_HEADER_BYTES + pair * HSRI_PAGE_TOKENS * 4 + to * 64;
}

INLINE uint8_t *value_line(uint8_t *page, uint32_t d, uint32_t pair, uint32_t j)
{
    return page + HSRI_PAGE_HEADER_BYTES + (size_t)d * HSRI_PAGE_TOKENS * 2 + ((size_t)pair * d + j) * 4;
}

/* Where units go: `to` counts them through all pages. */
typedef struct places {
    uint8_t *const *pages;
    uint32_t to, d;
    const uint8_t *reference;   /* the page whose means are taken away */
} places;

/* Scales and bases of 16 components, of keys or values. */
INLINE void read_channels(const places *at, const uint8_t *slot, uint32_t which, uint32_t j, __m512 *scale, __m512 *base)
{
    *scale = floats_at(slot, at->d, which + HSRI_INT8_K_SCALE, j);
    *base = _mm512_sub_ps(floats_at(slot, at->d, which, j), floats_at(at->reference, at->d, which, j));
}

/* `next`: a page that will be read soon, or NULL: pages are too short for the hardware to find out in time. */
INLINE void fetch(const uint8_t *next, size_t at)
{
    if (next) {
        _mm_prefetch((const char *)next + at, _MM_HINT_T1);
        _mm_prefetch((const char *)next + at + 64, _MM_HINT_T1);
    }
}

/* Components j and j + 1. */
INLINE void lay_out_pair(const places *at, const page_run *run, uint32_t j, maker m)
{
    const uint8_t *keys = hsri_int8_keys(run->slot, at->d) + j * HSRI_PAGE_TOKENS;
    for (uint32_t u = 0; u < run->n; u++) {
        const uint8_t *from = keys + run->units[u] * HSRI_UNIT_TOKENS;
        const uint32_t to = at->to + u;
        __m128i even = _mm_loadu_si128((const __m128i *)from), odd = _mm_loadu_si128((const __m128i *)(from + HSRI_PAGE_TOKENS));
        _mm512_storeu_si512(key_line(at->pages[to / HSRI_PAGE_UNITS], j / 2, to % HSRI_PAGE_UNITS), line_of(even, odd, m, m));
    }
}

/* Two floats, again and again. */
INLINE __m512 repeated(const float *two)
{
    double both;
    memcpy(&both, two, sizeof both);
    return _mm512_castpd_ps(_mm512_set1_pd(both));
}

INLINE void lay_out_keys(const places *at, const page_run *run, const uint8_t *next)
{
    const size_t begin = (size_t)(hsri_int8_keys(run->slot, at->d) - run->slot);
    for (uint32_t first = 0; first < at->d; first += 16) {
        _Alignas(64) float scales[16], bases[16];
        __m512 scale, base;
        read_channels(at, run->slot, HSRI_INT8_K_MEAN, first, &scale, &base);
        maker all = maker_of(scale, base);
        _mm512_store_ps(scales, all.scale);
        _mm512_store_ps(bases, all.base);
        for (uint32_t i = 0; i < 16 && first + i < at->d; i += 2) {
            fetch(next, begin + (first + i) * HSRI_PAGE_TOKENS);
            lay_out_pair(at, run, first + i, (maker) { repeated(scales + i), repeated(bases + i) });
        }
    }
}

/* Lanes i / 2 (+ 8) of a register. */
INLINE __m512 doubled(__m512 v, int32_t first)
{
    const __m512i half = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(_mm512_add_epi32(half, _mm512_set1_epi32(first)), v);
}

INLINE void lay_out_values(const places *at, const page_run *run, const uint8_t *next)
{
    const uint8_t *values = hsri_int8_values(run->slot, at->d);
    const size_t begin = (size_t)(values - run->slot);
    for (uint32_t j = 0; j < at->d; j += 16) {
        const __mmask16 m = lanes(at->d - j);
        __m512 scale, base;
        read_channels(at, run->slot, HSRI_INT8_V_MEAN, j, &scale, &base);
        maker all = maker_of(scale, base), low = { doubled(all.scale, 0), doubled(all.base, 0) };
        maker high = { doubled(all.scale, 8), doubled(all.base, 8) };
        for (uint32_t u = 0; u < run->n; u++) {
            const uint8_t *from = values + run->units[u] * HSRI_UNIT_TOKENS * at->d + j;
            const uint32_t to = at->to + u;
            uint8_t *page = at->pages[to / HSRI_PAGE_UNITS];
            fetch(next, begin + (j * HSRI_PAGE_UNITS + u * 16) * HSRI_UNIT_TOKENS);
            fetch(next, begin + (j * HSRI_PAGE_UNITS + u * 16) * HSRI_UNIT_TOKENS + 128);
            UNROLL
            for (uint32_t t = 0; t < HSRI_UNIT_TOKENS; t += 2, from += 2 * at->d) {
                __m128i even = _mm_maskz_loadu_epi8(m, from), odd = _mm_maskz_loadu_epi8(m, from + at->d);
                uint32_t pair = (to % HSRI_PAGE_UNITS * HSRI_UNIT_TOKENS + t) / 2;
                _mm512_mask_storeu_epi32(value_line(page, at->d, pair, j), m, line_of(even, odd, low, high));
            }
        }
    }
}

/* Units [first, end) of the call. Meanwhile what the next as many will need is asked for. */
INLINE void lay_out(const hsri_units_args *a, uint8_t *const *pages, uint32_t d, uint32_t first, uint32_t end, bool values)
{
    page_run run;
    for (uint32_t i = first; i < end; i += run.n) {
        places at = { pages, i, d, a->slots[0] };
        run = run_at(a, i, end);
        const uint32_t behind = i + end - first;
        const uint8_t *next = behind < a->n_units ? a->slots[behind] : NULL;
        if (values) {
            lay_out_values(&at, &run, next);
        } else {
            lay_out_keys(&at, &run, next);
        }
    }
}

/* ---- a call ---- */

typedef struct call {
    const hsri_units_args *units;
    uint8_t *pages[HSRI_UNITS_MAX / HSRI_PAGE_UNITS];
} call;

/* From a page to the next, whose header nobody needs. */
INLINE size_t page_step(uint32_t d) { return (size_t)4 * HSRI_PAGE_TOKENS * d; }

/* Lays out pages [first, end) of a call; the common head size is compiled in. */
INLINE void make_pages(const call *c, uint32_t first, uint32_t end, bool values)
{
    const uint32_t n = (uint32_t)hsri_min(end * HSRI_PAGE_UNITS, c->units->n_units);
    if (c->units->head_dim == 64) {
        lay_out(c->units, c->pages, 64, first * HSRI_PAGE_UNITS, n, values);
    } else {
        lay_out(c->units, c->pages, c->units->head_dim, first * HSRI_PAGE_UNITS, n, values);
    }
}

static void make_keys(const void *of, uint32_t first, uint32_t end) { make_pages(of, first, end, false); }
static void make_values(const void *of, uint32_t first, uint32_t end) { make_pages(of, first, end, true); }

/* What the means of the first page add. */
static void add_means(const hsri_units_args *a)
{
    for (uint32_t i = 0; i < a->n_queries; i++) {
        float *partial = a->partials[i];
        const __m512 weight = _mm512_set1_ps(partial[1]);
        __m512 sum = _mm512_setzero_ps();
        for (uint32_t j = 0; j < a->head_dim; j += 16) {
            const __mmask16 m = lanes(a->head_dim - j);
            __m512 query = _mm512_maskz_loadu_ps(m, a->queries[i] + j), out = _mm512_maskz_loadu_ps(m, partial + 2 + j);
            sum = _mm512_fmadd_ps(query, floats_at(a->slots[0], a->head_dim, HSRI_INT8_K_MEAN, j), sum);
            out = _mm512_fmadd_ps(weight, floats_at(a->slots[0], a->head_dim, HSRI_INT8_V_MEAN, j), out);
            _mm512_mask_storeu_ps(partial + 2 + j, m, out);
        }
        partial[0] += a->scale * _mm512_reduce_add_ps(sum);
    }
}

static void attend_made(const hsri_units_args *a, uint8_t *const *pages, const hsri_page_maker *maker)
{
    uint32_t visible[HSRI_ATTEND_MAX_QUERIES];
    for (uint32_t i = 0; i < a->n_queries; i++) {
        visible[i] = a->n_units * HSRI_UNIT_TOKENS;
    }
    hsri_attend_bf16_amx(&(hsri_attend_args) {
        .pages = (const uint8_t *const *)pages, .n_pages = (uint32_t)hsri_div_up(a->n_units, HSRI_PAGE_UNITS), .head_dim = a->head_dim,
        .scale = a->scale, .n_queries = a->n_queries, .queries = a->queries, .visible = visible, .partials = a->partials,
        .scratch = a->scratch, .maker = maker });
    add_means(a);
}

/* Work space of the pages: what attend_amx.c leaves, where two pages fit at least. */
#define ROOM ((HSRI_UNITS_SCRATCH - HSRI_ATTEND_SCRATCH) * sizeof(float) - HSRI_PAGE_HEADER_BYTES)
_Static_assert(2 * 4 * HSRI_PAGE_TOKENS * HSRI_ATTEND_MAX_HEAD_DIM <= ROOM, "a block of pages fits");

static call call_of(const hsri_units_args *a, uint32_t n_pages)
{
    call c = { .units = a };
    for (uint32_t i = 0; i < HSRI_UNITS_MAX / HSRI_PAGE_UNITS; i++) {
        c.pages[i] = (uint8_t *)(a->scratch + HSRI_ATTEND_SCRATCH) + i % n_pages * page_step(a->head_dim);
    }
    return c;
}

/* Queries that go through pages once. */
static void attend_few(const hsri_units_args *a)
{
    call c = call_of(a, HSRI_PAGES_MADE);
    attend_made(a, c.pages, &(hsri_page_maker) { make_keys, make_values, &c });
}

/* n_units > 0 */
static void attend_int8(const hsri_units_args *a)
{
    const uint32_t n_pages = (uint32_t)hsri_div_up(a->n_units, HSRI_PAGE_UNITS);
    if (a->n_queries > HSRI_QUERIES_ONCE && n_pages * page_step(a->head_dim) <= ROOM) {
        call c = call_of(a, n_pages);
        make_keys(&c, 0, n_pages);
        make_values(&c, 0, n_pages);
        attend_made(a, c.pages, NULL);
        return;
    }
    for (uint32_t first = 0; first < a->n_queries; first += HSRI_QUERIES_ONCE) {
        hsri_units_args some = *a;
        some.n_queries = (uint32_t)hsri_min(HSRI_QUERIES_ONCE, a->n_queries - first);
        some.queries += first;
        some.partials += first;
        attend_few(&some);
    }
}

void hsri_page_kernels_fill_amx(hsri_page_kernels *k)
{
    k->attend[HSRI_KV_TYPE_INT8] = attend_int8;
    k->attend[HSRI_KV_TYPE_COMPACT] = hsri_attend_compact_amx;
    k->lay_out[HSRI_KV_TYPE_COMPACT] = hsri_lay_out_compact_amx;
}
