/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of clusters with AVX2, eight at a time, straight from the nibbles of the record: cluster_body512.h in half the width. For
 * cluster_avx2.c. */

#define MAX_QUADS (HSRI_CLUSTER_COMPONENTS / 4u)
#define HEADS 4u                /* that share a pass over the codes */
#define AHEAD 8u                /* clusters that are fetched before their turn */

/* A head's weights of a segment. Log 2 of the mass of a token = product of weights and codes times step, plus base; of a token about its
 * centre, all times the cluster's spread. */
typedef struct cluster_head {
    int32_t quads[MAX_QUADS];
    float   step, base;
} cluster_head;

/* A head's weights of n components, its rotated query in the scales of a record, and their sum in *sum. False if one is not finite. */
static inline bool weigh_components(const float *rotated, const float *scales, uint32_t n, float factor, cluster_head *head, float *sum)
{
    __m256 weights[HSRI_CLUSTER_COMPONENTS / 8];
    float  step;

    for (uint32_t i = 0; i < n / 8; i++) {
        weights[i] = _mm256_mul_ps(_mm256_loadu_ps(rotated + 8 * i), _mm256_loadu_ps(scales + 8 * i));
        weights[i] = _mm256_mul_ps(weights[i], _mm256_set1_ps(factor));
    }
    step = weights_to_bytes(weights, n / 8, (int8_t *)head->quads);
    if (isnan(step))
        return false;
    head->step = step;
    *sum = sum_bytes((const int8_t *)head->quads, n);
    return true;
}

/* Products of the codes of 8 tokens or centres, those in `mask`, with the weights of n heads. Sets are `set_step` dwords apart. */
INLINE void code_sums(const int32_t *codes, uint64_t set_step, __m256i mask, const cluster_head *heads, uint32_t n, uint32_t n_sets,
                      __m256i *sums)
{
    const __m256i low4 = _mm256_set1_epi8(15);

    UNROLL for (uint32_t h = 0; h < n; h++)
        sums[h] = _mm256_setzero_si256();
    UNROLL for (uint32_t s = 0; s < n_sets; s++) {
        __m256i bytes = _mm256_maskload_epi32(codes + s * set_step, mask), low = _mm256_and_si256(bytes, low4);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low4);

        UNROLL for (uint32_t h = 0; h < n; h++) {
            sums[h] = dot_bytes(sums[h], low, _mm256_set1_epi32(heads[h].quads[2 * s]));
            sums[h] = dot_bytes(sums[h], high, _mm256_set1_epi32(heads[h].quads[2 * s + 1]));
        }
    }
}

/* ---- centres ---- */

/* Not a number becomes far below everything. */
static inline void prepare_head(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, uint32_t h, const float *scales,
                                cluster_head *head)
{
    const uint32_t d = a->shape->head_dim;
    const float   *mean = (const float *)(a->record + at->mean);
    float          factor = a->scale * LOG2E, base = factor * dot_float(a->queries + (uint64_t)h * d, mean, d) - a->reference[h] * LOG2E;
    float          sum;

    *head = (cluster_head){ .base = -1e30f };
    if (!weigh_components(a->rotated + (uint64_t)h * d, scales, at->n, factor, head, &sum))
        return;
    base -= 7.5f * head->step * sum;
    head->base = base > -1e30f ? (base < 1e30f ? base : 1e30f) : -1e30f;
}

/* Logs of 8 centres, number `first` and those behind it, of n heads. */
INLINE void centre_logs(const uint8_t *codes, uint32_t first, const cluster_head *heads, uint32_t n, uint32_t n_sets, __m256 *logs)
{
    const int32_t *at = (const int32_t *)codes + (uint64_t)(first / 16) * n_sets * 16 + first % 16;
    __m256i        sums[HEADS];

    code_sums(at, 16, _mm256_set1_epi32(-1), heads, n, n_sets, sums);
    UNROLL for (uint32_t h = 0; h < n; h++)
        logs[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[h]), _mm256_set1_ps(heads[h].step), _mm256_set1_ps(heads[h].base));
}

/* What 8 sets of tokens have, from starts[0..8]. */
INLINE __m256 tokens_of(const uint16_t *starts)
{
    __m128i from = _mm_loadu_si128((const __m128i *)starts), to = _mm_loadu_si128((const __m128i *)(starts + 1));

    return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_sub_epi16(to, from)));
}

/* Without tokens there is no mass, however large an exponential. */
INLINE __m256 mass_of(__m256 log, __m256 tokens)
{
    __m256 mass = _mm256_min_ps(_mm256_mul_ps(exp2_8(log), tokens), _mm256_set1_ps(HSRI_MASS_MAX));

    return _mm256_and_ps(mass, _mm256_cmp_ps(tokens, _mm256_setzero_ps(), _CMP_GT_OQ));
}

INLINE void score_vectors(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, const cluster_head *heads, uint32_t h0,
                          uint32_t n, uint32_t n_sets)
{
    const uint16_t *starts = (const uint16_t *)(a->record + at->starts), *firsts = (const uint16_t *)(a->record + at->firsts);
    float          *out = a->mass + h0 * a->mass_stride;
    __m256          all[HEADS];

    UNROLL for (uint32_t h = 0; h < n; h++)
        all[h] = _mm256_setzero_ps();
    for (hsri_cluster_run run = { 0 }; hsri_next_run(firsts, a->left_out, &run); ) {
        for (uint32_t v = run.first / 8; 8 * v < run.end; v++) {
            uint32_t before = run.first > 8 * v ? run.first - 8 * v : 0, part = run.end - 8 * v < 8 ? run.end - 8 * v : 8;
            __m256   logs[HEADS], tokens = _mm256_and_ps(tokens_of(starts + 8 * v), _mm256_castsi256_ps(lanes_in(before, part)));

            centre_logs(a->record + at->codes, 8 * v, heads, n, n_sets, logs);
            UNROLL for (uint32_t h = 0; h < n; h++) {
                _Alignas(32) float mass[8];
                __m256             of = mass_of(logs[h], tokens);

                all[h] = _mm256_add_ps(all[h], of);
                if (part - before == 8) {
                    _mm256_storeu_ps(out + h * a->mass_stride, of);
                } else {
                    _mm256_store_ps(mass, of);
                    memcpy(out + h * a->mass_stride, mass + before, (part - before) * sizeof *mass);
                }
            }
            out += part - before;
        }
    }
    UNROLL for (uint32_t h = 0; h < n; h++)
        a->sums[h0 + h] = sum8(all[h]);
}

/* As family_gain, in logs to the base of two. */
INLINE __m256 family_gain_256(__m256 off)
{
    __m256 most = _mm256_min_ps(off, _mm256_set1_ps(HSRI_FAMILY_GAIN));

    return _mm256_mul_ps(_mm256_mul_ps(most, _mm256_set1_ps(LOG2E)), _mm256_fnmadd_ps(most, _mm256_set1_ps(0.5f), off));
}

INLINE void family_vectors(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, const cluster_head *heads, uint32_t h0,
                           uint32_t n, uint32_t n_sets)
{
    const uint16_t *starts = (const uint16_t *)(a->record + at->family_starts);
    const uint8_t  *spreads = a->record + at->family_spreads;
    __m256          all[HEADS];
    float           steps[HEADS];

    UNROLL for (uint32_t h = 0; h < n; h++) {
        all[h] = _mm256_setzero_ps();
        steps[h] = family_step(a, at, h0 + h);
    }
    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f += 8) {
        __m256 logs[HEADS], tokens = tokens_of(starts + f);
        __m256 spread = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(spreads + f))));

        centre_logs(a->record + at->family_codes, f, heads, n, n_sets, logs);
        UNROLL for (uint32_t h = 0; h < n; h++) {
            __m256 mass = mass_of(_mm256_add_ps(logs[h], family_gain_256(_mm256_mul_ps(spread, _mm256_set1_ps(steps[h])))), tokens);

            all[h] = _mm256_add_ps(all[h], mass);
            _mm256_storeu_ps(a->mass + (h0 + h) * a->mass_stride + f, mass);
        }
    }
    UNROLL for (uint32_t h = 0; h < n; h++)
        a->sums[h0 + h] = sum8(all[h]);
}

/* ---- members ---- */

static inline void prepare_members(const hsri_member_score_args *a, const hsri_cluster_layout *at, uint32_t h, cluster_head *head)
{
    const float *scales = (const float *)(a->record + at->token_scales);
    float        sum;

    *head = (cluster_head){ .base = 0.0f };
    if (weigh_components(a->rotated + (uint64_t)h * a->shape->head_dim, scales, at->n, a->scale * LOG2E, head, &sum))
        head->base = -7.5f * head->step * sum;
}

static inline void fetch_members(const hsri_member_score_args *a, const hsri_cluster_layout *at, uint32_t i, uint32_t n_sets)
{
    if (i >= a->n_clusters)
        return;
    uint32_t first = ((const uint16_t *)(a->record + at->starts))[a->clusters[i] % HSRI_SEGMENT_CLUSTERS];

    _mm_prefetch((const char *)(a->record + at->positions + first * 2), _MM_HINT_T0);
    for (uint32_t s = 0; s < n_sets; s++)
        for (uint32_t line = 0; line < 2; line++)
            _mm_prefetch((const char *)(a->record + at->tokens + ((uint64_t)s * HSRI_SEGMENT_TOKENS + first) * 4 + 64 * line), _MM_HINT_T0);
}

/* The units of a page, of up to four heads side by side. */
typedef struct page_masses {
    _Alignas(64) __m128 units[HSRI_PAGE_UNITS];
} page_masses;

static void clear_marked(const uint32_t *marks, page_masses *pages)
{
    for (uint32_t i = 0; i < HSRI_MARK_WORDS; i++)
        for (uint32_t bits = marks[i]; bits; bits &= bits - 1)
            memset(&pages[32 * i + (uint32_t)__builtin_ctz(bits)], 0, sizeof *pages);
}

/* Rows of marked pages' units from units of heads. */
INLINE void store_marked(const hsri_member_score_args *a, const page_masses *pages, uint32_t h0, uint32_t n)
{
    float *mass = a->mass + h0 * a->mass_stride;

    for (uint32_t i = 0; i < HSRI_MARK_WORDS; i++)
        for (uint32_t bits = a->marks[i]; bits; bits &= bits - 1, mass += HSRI_PAGE_UNITS) {
            const page_masses *page = &pages[32 * i + (uint32_t)__builtin_ctz(bits)];
            __m128 heads[HEADS] = { page->units[0], page->units[1], page->units[2], page->units[3] };

            _MM_TRANSPOSE4_PS(heads[0], heads[1], heads[2], heads[3]);
            UNROLL for (uint32_t h = 0; h < n; h++)
                _mm_storeu_ps(mass + h * a->mass_stride, _mm_min_ps(heads[h], _mm_set1_ps(HSRI_MASS_MAX)));
        }
}

/* Four by four in each half: lane i of v[j] and lane j of v[i] change places. */
static inline void transpose4(__m256 *v)
{
    __m256d ab0 = _mm256_castps_pd(_mm256_unpacklo_ps(v[0], v[1])), ab1 = _mm256_castps_pd(_mm256_unpackhi_ps(v[0], v[1]));
    __m256d cd0 = _mm256_castps_pd(_mm256_unpacklo_ps(v[2], v[3])), cd1 = _mm256_castps_pd(_mm256_unpackhi_ps(v[2], v[3]));

    v[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab0, cd0));
    v[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab0, cd0));
    v[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab1, cd1));
    v[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab1, cd1));
}

/* Masses of 8 tokens, or of `part` of them, of n heads: token by token, its heads side by side. */
INLINE void member_masses(const int32_t *codes, uint32_t part, const cluster_head *heads, uint32_t n, uint32_t n_sets, float spread,
                          const float *each, __m128 *tokens)
{
    __m256i sums[HEADS];
    __m256  mass[HEADS] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };

    code_sums(codes, HSRI_SEGMENT_TOKENS, lanes_in(0, part), heads, n, n_sets, sums);
    UNROLL for (uint32_t h = 0; h < n; h++) {
        __m256 log = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[h]), _mm256_set1_ps(heads[h].step * spread),
                                     _mm256_set1_ps(heads[h].base * spread));

        /* Not infinite: the centre may have no mass. */
        mass[h] = _mm256_mul_ps(exp2_8(_mm256_min_ps(log, _mm256_set1_ps(126.0f))), _mm256_set1_ps(each[h]));
    }
    transpose4(mass);
    UNROLL for (uint32_t t = 0; t < 4; t++) {
        tokens[t] = _mm256_castps256_ps128(mass[t]);
        tokens[4 + t] = _mm256_extractf128_ps(mass[t], 1);
    }
}

INLINE void member_heads(const hsri_member_score_args *a, const hsri_cluster_layout *at, const cluster_head *heads, uint32_t h0, uint32_t n,
                         uint32_t n_sets)
{
    const uint16_t *starts = (const uint16_t *)(a->record + at->starts), *positions = (const uint16_t *)(a->record + at->positions);
    const int32_t  *codes = (const int32_t *)(a->record + at->tokens);
    page_masses     pages[HSRI_SEGMENT_PAGES];
    float           each[HEADS];

    for (uint32_t i = 0; i < AHEAD; i++)
        fetch_members(a, at, i, n_sets);
    clear_marked(a->marks, pages);
    for (uint32_t i = 0; i < a->n_clusters; i++) {
        uint32_t k = a->clusters[i] % HSRI_SEGMENT_CLUSTERS, end = starts[k + 1];
        float    share = 1.0f / (float)(end - starts[k]);

        fetch_members(a, at, i + AHEAD, n_sets);
        UNROLL for (uint32_t h = 0; h < n; h++)
            each[h] = a->cluster_mass[(h0 + h) * a->cluster_stride + a->places[i]] * share;
        for (uint32_t first = starts[k]; first < end; first += 8) {
            uint32_t part = end - first < 8 ? end - first : 8;
            __m128   tokens[8];

            member_masses(codes + first, part, heads, n, n_sets, (float)a->record[at->spreads + k], each, tokens);
            for (uint32_t t = 0; t < part; t++) {
                uint32_t u = positions[first + t] / HSRI_UNIT_TOKENS;
                __m128  *unit = &pages[u / HSRI_PAGE_UNITS].units[u % HSRI_PAGE_UNITS];

                *unit = _mm_add_ps(*unit, tokens[t]);
            }
        }
    }
    store_marked(a, pages, h0, n);
}

/* ---- calls: numbers of heads and sets become constants ---- */

#define CALL_WITH_SETS(n_sets, f, ...) \
    switch (n_sets) { \
    case 1:  f(__VA_ARGS__, 1); break; \
    case 2:  f(__VA_ARGS__, 2); break; \
    default: f(__VA_ARGS__, 3); break; \
    }
#define CALL_WITH_HEADS(n, n_sets, f, ...) \
    switch (n) { \
    case 1:  CALL_WITH_SETS(n_sets, f, __VA_ARGS__, 1) break; \
    case 2:  CALL_WITH_SETS(n_sets, f, __VA_ARGS__, 2) break; \
    case 3:  CALL_WITH_SETS(n_sets, f, __VA_ARGS__, 3) break; \
    default: CALL_WITH_SETS(n_sets, f, __VA_ARGS__, 4) break; \
    }

INLINE void score_centres(const hsri_cluster_score_args *a, bool families)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    const float        *scales = (const float *)(a->record + (families ? at.family_scales : at.scales));
    uint32_t            csr = _mm_getcsr();

    /* Masses below the normal range are 0. */
    _mm_setcsr(csr | _MM_FLUSH_ZERO_ON);
    for (uint32_t h0 = 0; h0 < a->n_heads; h0 += HEADS) {
        cluster_head heads[HEADS];
        uint32_t     n = a->n_heads - h0 < HEADS ? a->n_heads - h0 : HEADS;

        for (uint32_t h = 0; h < n; h++)
            prepare_head(a, &at, h0 + h, scales, &heads[h]);
        if (families) {
            CALL_WITH_HEADS(n, at.n / 8, family_vectors, a, &at, heads, h0)
        } else {
            CALL_WITH_HEADS(n, at.n / 8, score_vectors, a, &at, heads, h0)
        }
    }
    _mm_setcsr(csr);
}

static void score_clusters_256(const hsri_cluster_score_args *a) { score_centres(a, false); }
static void score_families_256(const hsri_cluster_score_args *a) { score_centres(a, true); }

static void score_members_256(const hsri_member_score_args *a)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    uint32_t            csr = _mm_getcsr();

    _mm_setcsr(csr | _MM_FLUSH_ZERO_ON);
    for (uint32_t h0 = 0; h0 < a->n_heads; h0 += HEADS) {
        cluster_head heads[HEADS];
        uint32_t     n = a->n_heads - h0 < HEADS ? a->n_heads - h0 : HEADS;

        for (uint32_t h = 0; h < n; h++)
            prepare_members(a, &at, h0 + h, &heads[h]);
        CALL_WITH_HEADS(n, at.n / 8, member_heads, a, &at, heads, h0)
    }
    _mm_setcsr(csr);
}

static void score_votes_256(const hsri_member_score_args *first, const hsri_member_votes *votes)
{
    score_each_vote(first, votes, score_members_256);
}
