/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over pages of plain keys and values where registers are few and memory is slow: for kernels_avx2.c, behind kernels_body.h.
 *
 * Sums are one chain of FMAs each, so that registers hold sums of more tokens: a score is a chain over the components, an output one over
 * the tokens of a page, which is then added to those of the pages before. Pages lie anywhere, and a tile reads a part of each line of
 * one; the hardware does not follow such steps, so each page fetches the next one. */

#include "device/cpu/x86/tile_avx2.h"

#define FETCH_BYTES 128u       /* of the next page, with each line of a tile */

/* Strips of a tile of so many queries: as many as there are registers for. */
INLINE uint32_t strips_of(uint32_t rows)
{
    return rows == 1 ? 2 * BLOCK_STRIPS : BLOCK_STRIPS;
}

#define MOST_STRIPS (2 * BLOCK_STRIPS)

/* Keys and values come as lines of dwords, which hold one f32 or a pair of bf16, of two components of a token or of two tokens. */
INLINE uint32_t per_dword(hsri_kv_type type)
{
    return type == HSRI_KV_TYPE_F32 ? 1 : 2;
}

static inline const uint8_t *keys_of(const hsri_attend_args *a, uint32_t page)
{
    return a->pages[page] + HSRI_PAGE_HEADER_BYTES;
}

INLINE const uint8_t *values_of(hsri_kv_type type, const hsri_attend_args *a, uint32_t page)
{
    return keys_of(a, page) + hsri_div_up(a->head_dim, per_dword(type)) * HSRI_PAGE_TOKENS * 4;
}

/* What is read after page's keys, or after its values: the same of the next page, or the first values, or nothing. */
INLINE const uint8_t *next_keys(hsri_kv_type type, const hsri_attend_args *a, uint32_t page, uint32_t n_pages)
{
    return page + 1 < n_pages ? keys_of(a, page + 1) : values_of(type, a, 0);
}

INLINE const uint8_t *next_values(hsri_kv_type type, const hsri_attend_args *a, uint32_t page, uint32_t n_pages)
{
    return page + 1 < n_pages ? values_of(type, a, page + 1) : NULL;
}

/* sums[row][strip] += input j of each dword of a line times x[row]. n_lanes: lanes of the line that may be read, if it is one strip. */
INLINE void add_line(uint32_t rows, uint32_t strips, hsri_kv_type type, const uint8_t *line, uint32_t n_lanes, uint32_t j,
                     const float *const *x, size_t at, vec sums[BLOCK_ROWS][MOST_STRIPS])
{
    const hsri_dtype codes = type == HSRI_KV_TYPE_F32 ? HSRI_DTYPE_F32 : HSRI_DTYPE_BF16;
    UNROLL
    for (uint32_t s = 0; s < strips; s++) {
        vec v = unpack_dwords(codes, strips == 1 ? ivec_load_n(line, n_lanes) : ivec_load(line + s * WIDTH * 4), j);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            sums[r][s] = vec_fma(v, vec_set(x[r][at]), sums[r][s]);
        }
    }
}

/* Lines of one tile: n inputs, line_step bytes apart, of a page; and of the page after it what is fetched meanwhile, NULL for nothing. */
typedef struct tile_lines {
    const uint8_t *at, *fetch;
    size_t line_step;
    uint32_t n_lanes;
    uint32_t n;
} tile_lines;

static inline void fetch_line(const uint8_t *fetch)
{
    _mm_prefetch((const char *)fetch, _MM_HINT_T0);
    _mm_prefetch((const char *)fetch + 64, _MM_HINT_T0);
}

/* A whole block. Nothing to fetch: the lines themselves, which are there. */
INLINE void sum_block(hsri_kv_type type, const tile_lines *lines, const float *const *x, block_sums *sums)
{
    const uint32_t per = per_dword(type);
    const uint8_t *line = lines->at, *fetch = lines->fetch != NULL ? lines->fetch : line;
    UNROLL
    for (uint32_t r = 0; r < BLOCK_ROWS; r++) {
        UNROLL
        for (uint32_t s = 0; s < BLOCK_STRIPS; s++) {
            sums->at[r][s] = vec_zero();
        }
    }
    for (uint32_t i = 0; i + per <= lines->n; i += per, line += lines->line_step, fetch += FETCH_BYTES) {
        fetch_line(fetch);
        if (type == HSRI_KV_TYPE_F32) {
            block_add_f32(sums, line, x, i);
        } else {
            block_add_bf16(sums, line, x, i);
        }
    }
}

/* sums[row][strip] = sum over the inputs of lines, in ascending order */
INLINE void sum_lines(uint32_t rows, uint32_t strips, hsri_kv_type type, const tile_lines *lines, const float *const *x,
                      vec sums[BLOCK_ROWS][MOST_STRIPS])
{
    const uint32_t per = per_dword(type);
    const uint8_t *line = lines->at, *fetch = lines->fetch;
    uint32_t i = 0;
    if (rows == BLOCK_ROWS && strips == BLOCK_STRIPS && lines->n % per == 0) {
        block_sums block;
        sum_block(type, lines, x, &block);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (uint32_t s = 0; s < strips; s++) {
                sums[r][s] = block.at[r][s];
            }
        }
        return;
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            sums[r][s] = vec_zero();
        }
    }
    for (; i + per <= lines->n; i += per, line += lines->line_step) {
        if (fetch != NULL) {
            fetch_line(fetch);
            fetch += FETCH_BYTES;
        }
        UNROLL
        for (uint32_t j = 0; j < per; j++) {
            add_line(rows, strips, type, line, lines->n_lanes, j, x, i + j, sums);
        }
    }
    if (i < lines->n) {
        add_line(rows, strips, type, line, lines->n_lanes, 0, x, i, sums);
    }
}

/* Strips of the next tile when `left` are left. */
INLINE uint32_t next_strips(uint32_t rows, uint32_t left)
{
    return left >= strips_of(rows) ? strips_of(rows) : left >= 2 ? 2 : 1;
}

#define CALL_WITH_STRIPS(strips, f, rows, ...) \
    switch (strips) { \
    case 1:  f(rows, 1, __VA_ARGS__); break; \
    case 2:  f(rows, 2, __VA_ARGS__); break; \
    default: f(rows, strips_of(rows), __VA_ARGS__); break; \
    }

/* What a page's tile fetches of the next one, in the order of memory until all of it is. */
static inline const uint8_t *fetch_of(const uint8_t *next, uint32_t tile, size_t n_lines, size_t line_step)
{
    return next != NULL && tile * FETCH_BYTES < line_step ? next + tile * n_lines * FETCH_BYTES : NULL;
}

INLINE void score_strips(uint32_t rows, uint32_t strips, hsri_kv_type type, const hsri_attend_args *a, uint32_t query,
                         const tile_lines *lines, uint32_t token)
{
    vec sums[BLOCK_ROWS][MOST_STRIPS];
    sum_lines(rows, strips, type, lines, a->queries + query, sums);
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            vec_store(a->scratch + (query + r) * HSRI_GROUP_TOKENS + token + s * WIDTH, vec_mul(sums[r][s], vec_set(a->scale)));
        }
    }
}

/* Scores of `rows` queries and one page. Lanes of tokens that nobody may see hold garbage, which weigh() ignores. */
INLINE void score_tile(uint32_t rows, hsri_kv_type type, const hsri_attend_args *a, uint32_t query, uint32_t page, const uint8_t *next)
{
    const uint32_t first = page * HSRI_PAGE_TOKENS, end = most_visible(a->visible + query, rows);
    const size_t line_step = HSRI_PAGE_TOKENS * 4, n_lines = hsri_div_up(a->head_dim, per_dword(type));
    uint32_t tile = 0;
    for (uint32_t t = 0, strips; t < HSRI_PAGE_TOKENS && first + t < end; t += strips * WIDTH, tile++) {
        strips = next_strips(rows, (HSRI_PAGE_TOKENS - t) / WIDTH);
        tile_lines lines = { keys_of(a, page) + t * 4, fetch_of(next, tile, n_lines, line_step), line_step, WIDTH, a->head_dim };
        CALL_WITH_STRIPS(strips, score_strips, rows, type, a, query, &lines, first + t)
    }
}

/* o[row][j ..] += sum of p * value over tokens of a page */
INLINE void value_strips(uint32_t rows, uint32_t strips, hsri_kv_type type, const hsri_attend_args *a, uint32_t query,
                         const tile_lines *lines, const float *const *p, uint32_t j)
{
    vec sums[BLOCK_ROWS][MOST_STRIPS];
    sum_lines(rows, strips, type, lines, p, sums);
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (uint32_t s = 0; s < strips; s++) {
            float *o = a->partials[query + r] + 2 + j + s * WIDTH;
            if (strips == 1) {
                vec_store_n(o, vec_add(vec_load_n(o, lines->n_lanes), sums[r][s]), lines->n_lanes);
            } else {
                vec_store(o, vec_add(vec_load(o), sums[r][s]));
            }
        }
    }
}

/* The first n tokens of a page. */
INLINE void value_tile(uint32_t rows, hsri_kv_type type, const hsri_attend_args *a, uint32_t query, uint32_t page, uint32_t n,
                       const uint8_t *next)
{
    const size_t line_step = (size_t)a->head_dim * 4, n_lines = HSRI_PAGE_TOKENS / per_dword(type);
    const float *p[BLOCK_ROWS];
    uint32_t tile = 0;
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        p[r] = a->scratch + (query + r) * HSRI_GROUP_TOKENS + page * HSRI_PAGE_TOKENS;
    }
    for (uint32_t j = 0, strips; j < a->head_dim; j += strips * WIDTH, tile++) {
        uint32_t left = a->head_dim - j;
        strips = next_strips(rows, left / WIDTH);
        tile_lines lines = { values_of(type, a, page) + (size_t)j * 4, fetch_of(next, tile, n_lines, line_step), line_step, left, n };
        CALL_WITH_STRIPS(strips, value_strips, rows, type, a, query, &lines, p, j)
    }
}

/* Where the queries of a tile do not all see all tokens of a page, each goes alone up to its last one: values behind it may be garbage,
 * which a zero p does not hide. */
INLINE void value_page(hsri_kv_type type, const hsri_attend_args *a, uint32_t query, uint32_t rows, uint32_t page, const uint8_t *next)
{
    const uint32_t first = page * HSRI_PAGE_TOKENS;
    if (first + HSRI_PAGE_TOKENS <= least_visible(a->visible + query, rows)) {
        CALL_WITH_ROWS(BLOCK_ROWS, rows, value_tile, type, a, query, page, HSRI_PAGE_TOKENS, next)
        return;
    }
    for (uint32_t r = 0; r < rows; r++) {
        if (a->visible[query + r] > first) {
            value_tile(1, type, a, query + r, page, (uint32_t)hsri_min(HSRI_PAGE_TOKENS, a->visible[query + r] - first), NULL);
        }
    }
}

/* e^a for a <= 0, as vec_exp. 2^n is made of the low bits of a sum, and 2^64 too large, so that it is a normal number. NaN stays NaN. */
INLINE vec exp_negative(vec a)
{
    const vec whole = vec_set(0x1.8p+23f);
    a = vec_max(vec_set(-104.0f), a);
    const vec shifted = vec_fma(a, vec_set(0x1.715476p+0f), whole);
    const vec n = vec_sub(shifted, whole);
    const vec p = exp_less(a, n);
    const __m256i exponent = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23), _mm256_set1_epi32((127 + 64) << 23));
    return vec_mul(vec_mul(p, _mm256_castsi256_ps(exponent)), vec_set(0x1p-64f));
}

/* The weights of 8 tokens, of which n are seen. */
INLINE vec weights_of(const float *scores, vec max, uint32_t n)
{
    vec p = exp_negative(vec_sub(vec_load(scores), max));
    return n < WIDTH ? vec_first_n(p, vec_zero(), n) : p;
}

/* Scores of one query into exp(score - max), in place; gives max and the sum. A NaN score never becomes the maximum, but its exp is NaN,
 * and so are the sum and the output. Four strips at a time, since an exponential is one long chain. */
static void weigh(float *scores, uint32_t visible, float *max, float *sum)
{
    enum { STRIPS = 4 };
    const vec lowest = vec_set(-INFINITY);
    const uint32_t whole = visible / (STRIPS * WIDTH) * (STRIPS * WIDTH);
    vec largest[STRIPS] = { lowest, lowest, lowest, lowest }, total[STRIPS] = { vec_zero(), vec_zero(), vec_zero(), vec_zero() };
    uint32_t t = 0;
    for (; t < whole; t += STRIPS * WIDTH) {
        UNROLL
        for (uint32_t s = 0; s < STRIPS; s++) {
            largest[s] = vec_max(vec_load(scores + t + s * WIDTH), largest[s]);
        }
    }
    for (; t < visible; t += WIDTH) {
        largest[0] = vec_max(vec_first_n(vec_load(scores + t), lowest, visible - t), largest[0]);
    }
    *max = vec_largest(vec_max(vec_max(largest[0], largest[1]), vec_max(largest[2], largest[3])));
    const vec reference = vec_set(*max);
    for (t = 0; t < whole; t += STRIPS * WIDTH) {
        UNROLL
        for (uint32_t s = 0; s < STRIPS; s++) {
            vec p = weights_of(scores + t + s * WIDTH, reference, WIDTH);
            vec_store(scores + t + s * WIDTH, p);
            total[s] = vec_add(total[s], p);
        }
    }
    for (uint32_t s = 0; t < visible; t += WIDTH, s++) {
        vec p = weights_of(scores + t, reference, visible - t);
        vec_store(scores + t, p);
        total[s] = vec_add(total[s], p);
    }
    *sum = vec_sum2(vec_add(total[0], total[2]), vec_add(total[1], total[3]));
}

INLINE void attend_any(hsri_kv_type type, const hsri_attend_args *a)
{
    uint32_t n_pages = (uint32_t)hsri_div_up(most_visible(a->visible, a->n_queries), HSRI_PAGE_TOKENS);
    for (uint32_t page = 0; page < n_pages; page++) {
        const uint8_t *next = next_keys(type, a, page, n_pages);
        for (uint32_t i = 0, rows; i < a->n_queries; i += rows, next = NULL) {
            rows = next_part(a->n_queries - i, BLOCK_ROWS);
            CALL_WITH_ROWS(BLOCK_ROWS, rows, score_tile, type, a, i, page, next)
        }
    }
    for (uint32_t i = 0; i < a->n_queries; i++) {
        float *partial = a->partials[i];
        weigh(a->scratch + i * HSRI_GROUP_TOKENS, a->visible[i], &partial[0], &partial[1]);
        memset(partial + 2, 0, a->head_dim * sizeof *partial);
    }
    for (uint32_t page = 0; page < n_pages; page++) {
        const uint8_t *next = next_values(type, a, page, n_pages);
        for (uint32_t i = 0, rows; i < a->n_queries; i += rows, next = NULL) {
            rows = next_part(a->n_queries - i, BLOCK_ROWS);
            value_page(type, a, i, rows, page, next);
        }
    }
}

static void attend_f32(const hsri_attend_args *a) { attend_any(HSRI_KV_TYPE_F32, a); }
static void attend_bf16(const hsri_attend_args *a) { attend_any(HSRI_KV_TYPE_BF16, a); }
