/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of sketches with AVX2, eight tokens at a time, straight from the codes of a page: a page's scales go into the query's weights, and
 * these are multiplied as bytes. For index_avx2.c. */
#define HEADS 4u                /* that share a pass over the codes */
#define MAX_QUADS (HSRI_ATTEND_MAX_HEAD_DIM / 4u)

/* A head's weights of a page. Log 2 of the mass of a token = product of weights and codes times step, plus base. */
typedef struct sketch_head {
    _Alignas(32) int8_t weights[4 * MAX_QUADS];
    float step, base;
} sketch_head;

/* Of a page or query that is not finite, a base far below everything. `base` is that of a token at the page's mean key. Components are at 4
 * bits first, whose codes have their middle at 7.5, then at 2 bits, about 1.5. */
static void prepare_sketch(const hsri_score_args *a, uint32_t h, const uint8_t *scales, float base, sketch_head *head)
{
    const hsri_index_shape *s = a->shape;
    const float *rotated = a->rotated + (uint64_t)h * s->head_dim;
    uint32_t     n = s->n_4bit + s->n_2bit;
    __m256       weights[MAX_QUADS / 2];

    for (uint32_t i = 0; i < n / 8; i++) {
        weights[i] = _mm256_mul_ps(_mm256_loadu_ps(rotated + 8 * i), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + 16 * i))));
        weights[i] = _mm256_mul_ps(weights[i], _mm256_set1_ps(a->scale * LOG2E));
    }
    head->step = weights_to_bytes(weights, n / 8, head->weights);
    base -= head->step * (7.5f * sum_bytes(head->weights, s->n_4bit) + 1.5f * sum_bytes(head->weights + s->n_4bit, s->n_2bit));
    if (!(base > -1e30f)) {
        head->step = 0.0f;
        base = -1e30f;
    }
    head->base = base < 1e30f ? base : 1e30f;
}

static inline __m256i weights_of(const sketch_head *head, uint32_t quad)
{
    int32_t four;

    memcpy(&four, head->weights + 4 * quad, sizeof four);
    return _mm256_set1_epi32(four);
}

/* sums[h] += products of quad number `quad` */
INLINE void add_quad(__m256i codes, const sketch_head *heads, uint32_t n, uint32_t quad, __m256i *sums)
{
    UNROLL for (uint32_t h = 0; h < n; h++)
        sums[h] = dot_bytes(sums[h], codes, weights_of(&heads[h], quad));
}

/* Products of the codes of 8 tokens, from `codes` on in each line, with the weights of n heads. */
INLINE void token_sums(const hsri_index_shape *s, const uint8_t *codes, const sketch_head *heads, uint32_t n, __m256i *sums)
{
    const __m256i low4 = _mm256_set1_epi8(15), low2 = _mm256_set1_epi8(3);
    uint32_t      quad = 0;

    UNROLL for (uint32_t h = 0; h < n; h++)
        sums[h] = _mm256_setzero_si256();
    for (; quad < s->n_4bit / 4; quad += 2, codes += HSRI_PAGE_TOKENS * 4) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)codes);

        add_quad(_mm256_and_si256(bytes, low4), heads, n, quad, sums);
        add_quad(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), low4), heads, n, quad + 1, sums);
    }
    for (; quad < (s->n_4bit + s->n_2bit) / 4; quad += 4, codes += HSRI_PAGE_TOKENS * 4) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)codes);

        add_quad(_mm256_and_si256(bytes, low2), heads, n, quad, sums);
        add_quad(_mm256_and_si256(_mm256_srli_epi16(bytes, 2), low2), heads, n, quad + 1, sums);
        add_quad(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), low2), heads, n, quad + 2, sums);
        add_quad(_mm256_and_si256(_mm256_srli_epi16(bytes, 6), low2), heads, n, quad + 3, sums);
    }
}

/* Lanes are tokens of one unit in fours (hsri_sketch_token): lines of the first 8 lanes, then of the others. */
INLINE void score_sketch_heads(const hsri_score_args *a, const uint8_t *codes, uint32_t page, const sketch_head *heads, uint32_t h0,
                               uint32_t n)
{
    __m256 units[2][HEADS];

    for (uint32_t half = 0; half < 2; half++) {
        UNROLL for (uint32_t h = 0; h < n; h++)
            units[half][h] = _mm256_setzero_ps();
        for (uint32_t line = 0; line < HSRI_PAGE_TOKENS / LANES; line++) {
            __m256i sums[HEADS];

            token_sums(a->shape, codes + (line * LANES + half * 8) * 4, heads, n, sums);
            UNROLL for (uint32_t h = 0; h < n; h++)
                units[half][h] = _mm256_add_ps(units[half][h], exp2_8(_mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[h]),
                                               _mm256_set1_ps(heads[h].step), _mm256_set1_ps(heads[h].base))));
        }
    }
    UNROLL for (uint32_t h = 0; h < n; h++) {
        __m256 pairs = _mm256_hadd_ps(units[0][h], units[1][h]);     /* of units 0, 2, then 1, 3 */
        __m256 fours = _mm256_permutevar8x32_ps(_mm256_hadd_ps(pairs, pairs), _mm256_setr_epi32(0, 4, 1, 5, 2, 3, 6, 7));

        _mm_storeu_ps(a->mass + (h0 + h) * a->mass_stride + page * HSRI_PAGE_UNITS,
                      _mm_min_ps(_mm256_castps256_ps128(fours), _mm_set1_ps(HSRI_MASS_MAX)));
    }
}

static void score_sketch_page(const hsri_score_args *a, const hsri_index_layout *at, uint32_t h0, uint32_t n, const float *bases,
                              uint32_t page)
{
    const uint8_t *entry = a->entries[page];
    sketch_head    heads[HEADS];

    for (uint32_t h = 0; h < n; h++) {
        float mean = load_float(entry) * dot_int8(a->queries + (uint64_t)(h0 + h) * a->shape->head_dim, (const int8_t *)entry + at->mean_k,
                                                  a->shape->head_dim);

        prepare_sketch(a, h0 + h, entry + at->scales, (a->scale * mean + bases[h]) * LOG2E, &heads[h]);
    }
    switch (n) {
    case 1:  score_sketch_heads(a, a->codes[page], page, heads, h0, 1); break;
    case 2:  score_sketch_heads(a, a->codes[page], page, heads, h0, 2); break;
    case 3:  score_sketch_heads(a, a->codes[page], page, heads, h0, 3); break;
    default: score_sketch_heads(a, a->codes[page], page, heads, h0, 4); break;
    }
}

static void score_sketch_256(const hsri_score_args *a)
{
    hsri_index_layout at = hsri_index_layout_of(a->shape);
    uint32_t          d = a->shape->head_dim, csr = _mm_getcsr();

    /* Masses below the normal range are 0. */
    _mm_setcsr(csr | _MM_FLUSH_ZERO_ON);
    for (uint32_t h0 = 0; h0 < a->n_heads; h0 += HEADS) {
        uint32_t n = a->n_heads - h0 < HEADS ? a->n_heads - h0 : HEADS;
        float    bases[HEADS];

        for (uint32_t h = 0; h < n; h++)
            bases[h] = (a->mean_k ? a->scale * dot_float(a->queries + (uint64_t)(h0 + h) * d, a->mean_k, d) : 0.0f) - a->reference[h0 + h];
        for (uint32_t p = 0; p < a->n_pages; p++)
            score_sketch_page(a, &at, h0, n, bases, p);
    }
    _mm_setcsr(csr);
}
