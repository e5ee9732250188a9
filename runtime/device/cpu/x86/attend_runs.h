/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over pages of plain keys and values where registers are many: both halves as runs, like linear layers. For a level's file,
 * behind kernels_body.h. */
/* A page is stored as bf16 or f32 lines, like the codes of a run. */
INLINE hsri_dtype page_codes(hsri_kv_type type)
{
    return type == HSRI_KV_TYPE_F32 ? HSRI_DTYPE_F32 : HSRI_DTYPE_BF16;
}

/* Scores of `rows` queries and one page. Lanes of tokens that nobody may see hold garbage, which softmax() ignores. */
INLINE void score_tile(uint32_t rows, hsri_kv_type type, const hsri_attend_args *a, uint32_t query, uint32_t page)
{
    const hsri_dtype codes = page_codes(type);
    const size_t line_step = HSRI_PAGE_TOKENS * 4;
    uint32_t first = page * HSRI_PAGE_TOKENS;
    uint32_t end = most_visible(a->visible + query, rows);
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS && first + t < end; t += TILE_STRIPS * WIDTH) {
        run_codes w = { a->pages[page] + HSRI_PAGE_HEADER_BYTES + t * 4, WIDTH * 4, line_step, WIDTH };
        vec acc[MAX_ROWS][TILE_STRIPS], sums[MAX_ROWS][TILE_STRIPS];
        const float *x[MAX_ROWS];
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            x[r] = a->queries[query + r];
            UNROLL
            for (uint32_t s = 0; s < TILE_STRIPS; s++) {
                acc[r][s] = vec_zero();
            }
        }
        for (uint32_t j = 0; j < a->head_dim; j += HSRI_RUN) {
            run_sums(codes, rows, TILE_STRIPS, false, &w, x, (uint32_t)hsri_min(HSRI_RUN, a->head_dim - j), sums);
            w.at += HSRI_RUN / inputs_per_dword(codes) * line_step;
            add_sums(rows, TILE_STRIPS, acc, sums);
            UNROLL
            for (uint32_t r = 0; r < rows; r++) {
                x[r] += HSRI_RUN;
            }
        }
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            float *scores = a->scratch + (query + r) * HSRI_GROUP_TOKENS + first + t;
            UNROLL
            for (uint32_t s = 0; s < TILE_STRIPS; s++) {
                vec_store(scores + s * WIDTH, vec_mul(acc[r][s], vec_set(a->scale)));
            }
        }
    }
}

/* Scores of one query into exp(score - max), in place; gives max and the sum. A NaN score never becomes the maximum, but
 * its exp is NaN, and so are the sum and the output. */
static void softmax(float *scores, uint32_t visible, float *max, float *sum)
{
    const vec lowest = vec_set(-INFINITY);
    vec largest = lowest;
    for (uint32_t t = 0; t < visible; t += WIDTH) {
        largest = vec_max(vec_first_n(vec_load(scores + t), lowest, visible - t), largest);
    }
    *max = vec_largest(largest);
    vec total[2] = { vec_zero(), vec_zero() };
    for (uint32_t t = 0; t < visible; t += WIDTH) {
        vec p = vec_exp(vec_sub(vec_load(scores + t), vec_set(*max)));
        p = vec_first_n(p, vec_zero(), visible - t);
        vec_store(scores + t, p);
        total[t / WIDTH % 2] = vec_add(total[t / WIDTH % 2], p);
    }
    *sum = vec_sum2(total[0], total[1]);
}

/* o[row] += sum of p * value over n_tokens <= 32 tokens of a page, from token t of it. */
INLINE void value_run(uint32_t rows, hsri_kv_type type, const hsri_attend_args *a, uint32_t query, uint32_t page, uint32_t t,
                      uint32_t n_tokens)
{
    const hsri_dtype codes = page_codes(type);
    const size_t line_step = (size_t)a->head_dim * 4;
    const uint8_t *values = a->pages[page] + HSRI_PAGE_HEADER_BYTES + HSRI_PAGE_TOKENS / inputs_per_dword(codes) * line_step;
    const float *p[MAX_ROWS];
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        p[r] = a->scratch + (query + r) * HSRI_GROUP_TOKENS + page * HSRI_PAGE_TOKENS + t;
    }
    for (uint32_t j = 0; j < a->head_dim; j += TILE_STRIPS * WIDTH) {
        run_codes w = { values + t / inputs_per_dword(codes) * line_step + (size_t)j * 4, WIDTH * 4, line_step, a->head_dim - j };
        vec sums[MAX_ROWS][TILE_STRIPS];
        run_sums(codes, rows, TILE_STRIPS, true, &w, p, n_tokens, sums);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (uint32_t s = 0; s < TILE_STRIPS; s++) {
                float *o = a->partials[query + r] + 2 + j + s * WIDTH;
                uint32_t n = strip_lanes(w.n_columns, s);
                vec_store_n(o, vec_add(vec_load_n(o, n), sums[r][s]), n);
            }
        }
    }
}

/* Where the queries of a tile do not all see all tokens of a run, each goes alone up to its last token: values behind it may
 * be garbage, which a zero p does not hide. */
INLINE void value_page(hsri_kv_type type, const hsri_attend_args *a, uint32_t query, uint32_t rows, uint32_t page)
{
    uint32_t least = least_visible(a->visible + query, rows);
    for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t += HSRI_RUN) {
        uint32_t position = page * HSRI_PAGE_TOKENS + t;
        if (position + HSRI_RUN <= least) {
            CALL_WITH_ROWS(TILE_ROWS, rows, value_run, type, a, query, page, t, HSRI_RUN)
            continue;
        }
        for (uint32_t r = 0; r < rows; r++) {
            if (a->visible[query + r] > position) {
                value_run(1, type, a, query + r, page, t, (uint32_t)hsri_min(HSRI_RUN, a->visible[query + r] - position));
            }
        }
    }
}

INLINE void attend_any(hsri_kv_type type, const hsri_attend_args *a)
{
    uint32_t n_pages = (uint32_t)hsri_div_up(most_visible(a->visible, a->n_queries), HSRI_PAGE_TOKENS);
    for (uint32_t page = 0; page < n_pages; page++) {
        for (uint32_t i = 0, rows; i < a->n_queries; i += rows) {
            rows = next_part(a->n_queries - i, TILE_ROWS);
            CALL_WITH_ROWS(TILE_ROWS, rows, score_tile, type, a, i, page)
        }
    }
    for (uint32_t i = 0; i < a->n_queries; i++) {
        float *partial = a->partials[i];
        softmax(a->scratch + i * HSRI_GROUP_TOKENS, a->visible[i], &partial[0], &partial[1]);
        memset(partial + 2, 0, a->head_dim * sizeof *partial);
    }
    for (uint32_t page = 0; page < n_pages; page++) {
        for (uint32_t i = 0, rows; i < a->n_queries; i += rows) {
            rows = next_part(a->n_queries - i, TILE_ROWS);
            value_page(type, a, i, rows, page);
        }
    }
}

static void attend_f32(const hsri_attend_args *a) { attend_any(HSRI_KV_TYPE_F32, a); }
static void attend_bf16(const hsri_attend_args *a) { attend_any(HSRI_KV_TYPE_BF16, a); }
