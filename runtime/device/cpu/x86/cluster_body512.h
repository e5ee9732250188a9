/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of clusters with AVX-512, sixteen at a time, straight from the nibbles of the record. The word dot_bytes is the including file's:
 * one instruction where VNNI exists, three otherwise, with the same integers. */
#include <immintrin.h>

#include "device/cpu/cluster_lanes.h"
#include "device/cpu/x86/lanes512.h"

#define LOG2E 1.44269504f
#define UNROLL _Pragma("GCC unroll 8")
#define MAX_QUADS (HSRI_CLUSTER_COMPONENTS / 4u)
#define HEADS 4u                /* that share a pass over the codes */

/* A head's weights of a segment. Log 2 of the mass of a token of a cluster = product of weights and codes times step, plus base. */
typedef struct cluster_head {
    int32_t quads[MAX_QUADS];
    float   step, base;
} cluster_head;

/* A head's weights of n components: of its rotated query, in the scales of a record. False if one is not finite. */
static inline bool weigh_components(const float *rotated, const float *scales, uint32_t n, float factor, __m512 *weights)
{
    __mmask16 bad = 0;

    UNROLL for (uint32_t i = 0; i < 2; i++) {
        __mmask16 mask = n > 16 * i ? lanes(n - 16 * i) : 0;
        __m512    x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, rotated + 16 * i), _mm512_maskz_loadu_ps(mask, scales + 16 * i));

        weights[i] = _mm512_mul_ps(x, _mm512_set1_ps(factor));
        bad |= _mm512_fpclass_ps_mask(weights[i], 0x99);        /* NaN or infinite */
    }
    return bad == 0;
}

/* Weights as bytes of the largest, and the sum of those; returns what a step stands for. */
static inline float to_bytes(const __m512 *weights, int32_t *quads, int32_t *sum)
{
    _Alignas(32) int8_t bytes[32];
    __m512i words[2];
    float   largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(weights[0]), _mm512_abs_ps(weights[1])));
    __m512  by = _mm512_set1_ps(largest > 0x1p-100f ? 127.0f / largest : 0.0f);

    UNROLL for (uint32_t i = 0; i < 2; i++) {
        words[i] = _mm512_cvtps_epi32(_mm512_mul_ps(weights[i], by));
        _mm_store_si128((__m128i *)bytes + i, _mm512_cvtsepi32_epi8(words[i]));
    }
    *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(words[0], words[1]));
    memcpy(quads, bytes, HSRI_CLUSTER_COMPONENTS);
    return largest / 127.0f;
}

/* Not a number becomes far below everything. */
static inline void prepare_head(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, uint32_t h, const float *scales,
                                cluster_head *head)
{
    const uint32_t d = a->shape->head_dim;
    const float   *mean = (const float *)(a->record + at->mean);
    float          factor = a->scale * LOG2E, base = factor * dot_float(a->queries + (uint64_t)h * d, mean, d) - a->reference[h] * LOG2E;
    __m512         weights[2];
    int32_t        sum;

    *head = (cluster_head){ .base = -1e30f };
    if (!weigh_components(a->rotated + (uint64_t)h * d, scales, at->n, factor, weights))
        return;
    head->step = to_bytes(weights, head->quads, &sum);
    base -= 7.5f * head->step * (float)sum;
    head->base = base > -1e30f ? (base < 1e30f ? base : 1e30f) : -1e30f;
}

/* Logs of 16 centres of n heads. */
INLINE void centre_logs(const uint8_t *codes, const cluster_head *heads, uint32_t n, uint32_t n_sets, __m512 *logs)
{
    const __m512i low4 = _mm512_set1_epi8(15);
    __m512i       sums[HEADS];

    UNROLL for (uint32_t h = 0; h < n; h++)
        sums[h] = _mm512_setzero_si512();
    UNROLL for (uint32_t s = 0; s < n_sets; s++) {
        __m512i bytes = _mm512_load_si512(codes + 64 * s), low = _mm512_and_si512(bytes, low4);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low4);

        UNROLL for (uint32_t h = 0; h < n; h++) {
            sums[h] = dot_bytes(sums[h], low, _mm512_set1_epi32(heads[h].quads[2 * s]));
            sums[h] = dot_bytes(sums[h], high, _mm512_set1_epi32(heads[h].quads[2 * s + 1]));
        }
    }
    UNROLL for (uint32_t h = 0; h < n; h++)
        logs[h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[h]), _mm512_set1_ps(heads[h].step), _mm512_set1_ps(heads[h].base));
}

/* What 16 sets of tokens have, from starts[0..16]. */
INLINE __m512 tokens_of(const uint16_t *starts)
{
    __m256i from = _mm256_loadu_si256((const __m256i *)starts), to = _mm256_loadu_si256((const __m256i *)(starts + 1));

    return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_sub_epi16(to, from)));
}

/* Without tokens there is no mass, however large an exponential. */
INLINE __m512 mass_of(__m512 log, __m512 tokens)
{
    __mmask16 some = _mm512_cmp_ps_mask(tokens, _mm512_setzero_ps(), _CMP_GT_OQ);

    return _mm512_maskz_min_ps(some, _mm512_mul_ps(exp2_16(log), tokens), _mm512_set1_ps(HSRI_MASS_MAX));
}

INLINE void score_vectors(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, const cluster_head *heads, uint32_t h0,
                          uint32_t n, uint32_t n_sets)
{
    const uint16_t *starts = (const uint16_t *)(a->record + at->starts), *firsts = (const uint16_t *)(a->record + at->firsts);
    float          *out = a->mass + h0 * a->mass_stride;
    __m512          all[HEADS];

    UNROLL for (uint32_t h = 0; h < n; h++)
        all[h] = _mm512_setzero_ps();
    for (hsri_cluster_run run = { 0 }; hsri_next_run(firsts, a->left_out, &run); ) {
        for (uint32_t v = run.first / 16; 16 * v < run.end; v++) {
            uint32_t  before = run.first > 16 * v ? run.first - 16 * v : 0, part = run.end - 16 * v < 16 ? run.end - 16 * v : 16;
            __mmask16 mask = lanes(part) & (__mmask16)~lanes(before);
            __m512    logs[HEADS], tokens = _mm512_maskz_mov_ps(mask, tokens_of(starts + 16 * v));

            centre_logs(a->record + at->codes + (uint64_t)v * n_sets * 64, heads, n, n_sets, logs);
            UNROLL for (uint32_t h = 0; h < n; h++) {
                __m512 mass = mass_of(logs[h], tokens);

                all[h] = _mm512_add_ps(all[h], mass);
                _mm512_mask_storeu_ps(out + h * a->mass_stride, lanes(part - before), _mm512_maskz_compress_ps(mask, mass));
            }
            out += part - before;
        }
    }
    UNROLL for (uint32_t h = 0; h < n; h++)
        a->sums[h0 + h] = _mm512_reduce_add_ps(all[h]);
}

/* As family_gain, in logs to the base of two. */
INLINE __m512 family_gain_512(__m512 off)
{
    __m512 most = _mm512_min_ps(off, _mm512_set1_ps(HSRI_FAMILY_GAIN));

    return _mm512_mul_ps(_mm512_mul_ps(most, _mm512_set1_ps(LOG2E)), _mm512_fnmadd_ps(most, _mm512_set1_ps(0.5f), off));
}

INLINE void family_vectors(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, const cluster_head *heads, uint32_t h0,
                           uint32_t n, uint32_t n_sets)
{
    const uint16_t *starts = (const uint16_t *)(a->record + at->family_starts);
    const uint8_t  *spreads = a->record + at->family_spreads;
    __m512          all[HEADS];
    float           steps[HEADS];

    UNROLL for (uint32_t h = 0; h < n; h++) {
        all[h] = _mm512_setzero_ps();
        steps[h] = family_step(a, at, h0 + h);
    }
    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f += 16) {
        __m512 logs[HEADS], tokens = tokens_of(starts + f);
        __m512 spread = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(spreads + f))));

        centre_logs(a->record + at->family_codes + (uint64_t)f / 16 * n_sets * 64, heads, n, n_sets, logs);
        UNROLL for (uint32_t h = 0; h < n; h++) {
            __m512 mass = mass_of(_mm512_add_ps(logs[h], family_gain_512(_mm512_mul_ps(spread, _mm512_set1_ps(steps[h])))), tokens);

            all[h] = _mm512_add_ps(all[h], mass);
            _mm512_storeu_ps(a->mass + (h0 + h) * a->mass_stride + f, mass);
        }
    }
    UNROLL for (uint32_t h = 0; h < n; h++)
        a->sums[h0 + h] = _mm512_reduce_add_ps(all[h]);
}

INLINE void score_heads(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, bool families, const cluster_head *heads,
                        uint32_t h0, uint32_t n, uint32_t n_sets)
{
    if (families)
        family_vectors(a, at, heads, h0, n, n_sets);
    else
        score_vectors(a, at, heads, h0, n, n_sets);
}

INLINE void score_sets(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, bool families, const cluster_head *heads,
                       uint32_t h0, uint32_t n)
{
    switch (at->n / 8) {
    case 1:  score_heads(a, at, families, heads, h0, n, 1); break;
    case 2:  score_heads(a, at, families, heads, h0, n, 2); break;
    default: score_heads(a, at, families, heads, h0, n, 3); break;
    }
}

INLINE void score_centres(const hsri_cluster_score_args *a, bool families)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    const float        *scales = (const float *)(a->record + (families ? at.family_scales : at.scales));
    uint32_t            csr = _mm_getcsr();

    /* As in the sketch's kernel: masses below the normal range are 0. */
    _mm_setcsr(csr | _MM_FLUSH_ZERO_ON);
    for (uint32_t h0 = 0; h0 < a->n_heads; h0 += HEADS) {
        cluster_head heads[HEADS];
        uint32_t     n = a->n_heads - h0 < HEADS ? a->n_heads - h0 : HEADS;

        for (uint32_t h = 0; h < n; h++)
            prepare_head(a, &at, h0 + h, scales, &heads[h]);
        switch (n) {
        case 1:  score_sets(a, &at, families, heads, h0, 1); break;
        case 2:  score_sets(a, &at, families, heads, h0, 2); break;
        case 3:  score_sets(a, &at, families, heads, h0, 3); break;
        default: score_sets(a, &at, families, heads, h0, 4); break;
        }
    }
    _mm_setcsr(csr);
}

static void score_clusters_512(const hsri_cluster_score_args *a) { score_centres(a, false); }
static void score_families_512(const hsri_cluster_score_args *a) { score_centres(a, true); }

/* ---- members ---- */

#define AHEAD 8u                /* clusters that are fetched before their turn */

/* As cluster_head, of tokens: log 2 of what one has more than its centre = product times step, plus base, all times the
 * cluster's spread. */
static void prepare_members(const hsri_member_score_args *a, const hsri_cluster_layout *at, uint32_t h, cluster_head *head)
{
    const float *scales = (const float *)(a->record + at->token_scales), *rotated = a->rotated + (uint64_t)h * a->shape->head_dim;
    __m512       weights[2];
    int32_t      sum;

    *head = (cluster_head){ .base = 0.0f };
    if (!weigh_components(rotated, scales, at->n, a->scale * LOG2E, weights))
        return;
    head->step = to_bytes(weights, head->quads, &sum);
    head->base = -7.5f * head->step * (float)sum;
}

/* Four by four in each group of four lanes: lane 4g + i of v[j] and lane 4g + j of v[i] change places. */
static inline void transpose4(__m512 *v)
{
    __m512d ab0 = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1])), ab1 = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1]));
    __m512d cd0 = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3])), cd1 = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));

    v[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab0, cd0));
    v[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab0, cd0));
    v[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab1, cd1));
    v[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab1, cd1));
}

static inline void fetch_members(const hsri_member_score_args *a, const hsri_cluster_layout *at, uint32_t i, uint32_t n_sets)
{
    if (i < a->n_clusters) {
        uint32_t first = ((const uint16_t *)(a->record + at->starts))[a->clusters[i] % HSRI_SEGMENT_CLUSTERS];

        _mm_prefetch((const char *)(a->record + at->positions + first * 2), _MM_HINT_T0);
        for (uint32_t s = 0; s < n_sets; s++)
            for (uint32_t line = 0; line < 2; line++)
                _mm_prefetch((const char *)(a->record + at->tokens + ((uint64_t)s * HSRI_SEGMENT_TOKENS + first) * 4 + 64 * line),
                             _MM_HINT_T0);
    }
}

/* Masses of 16 tokens, or those in `mask`, of n heads. */
INLINE void member_masses(const int32_t *codes, __mmask16 mask, const cluster_head *heads, uint32_t n, uint32_t n_sets, float spread,
                          const float *each, __m512 *mass)
{
    const __m512i low4 = _mm512_set1_epi8(15);
    __m512i       sums[HEADS];

    UNROLL for (uint32_t h = 0; h < n; h++)
        sums[h] = _mm512_setzero_si512();
    UNROLL for (uint32_t s = 0; s < n_sets; s++) {
        __m512i bytes = _mm512_maskz_loadu_epi32(mask, codes + s * HSRI_SEGMENT_TOKENS), low = _mm512_and_si512(bytes, low4);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low4);

        UNROLL for (uint32_t h = 0; h < n; h++) {
            sums[h] = dot_bytes(sums[h], low, _mm512_set1_epi32(heads[h].quads[2 * s]));
            sums[h] = dot_bytes(sums[h], high, _mm512_set1_epi32(heads[h].quads[2 * s + 1]));
        }
    }
    UNROLL for (uint32_t h = 0; h < n; h++) {
        __m512 log = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[h]), _mm512_set1_ps(heads[h].step * spread),
                                     _mm512_set1_ps(heads[h].base * spread));

        /* Not infinite: the centre may have no mass. */
        mass[h] = _mm512_mul_ps(exp2_16(_mm512_min_ps(log, _mm512_set1_ps(126.0f))), _mm512_set1_ps(each[h]));
    }
}

/* The units of a page, of up to four heads side by side. */
typedef struct page_masses {
    _Alignas(64) float units[HSRI_PAGE_UNITS][HEADS];
} page_masses;

static void clear_marked(const uint32_t *marks, page_masses *pages)
{
    for (uint32_t i = 0; i < HSRI_MARK_WORDS; i++)
        for (uint32_t bits = marks[i]; bits; bits &= bits - 1)
            _mm512_store_ps(pages[32 * i + (uint32_t)__builtin_ctz(bits)].units, _mm512_setzero_ps());
}

/* Rows of marked pages' units from units of heads. */
INLINE void store_marked(const hsri_member_score_args *a, const page_masses *pages, uint32_t h0, uint32_t n)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    float        *mass = a->mass + h0 * a->mass_stride;

    for (uint32_t i = 0; i < HSRI_MARK_WORDS; i++)
        for (uint32_t bits = a->marks[i]; bits; bits &= bits - 1, mass += HSRI_PAGE_UNITS) {
            __m512 v = _mm512_load_ps(pages[32 * i + (uint32_t)__builtin_ctz(bits)].units);

            v = _mm512_min_ps(_mm512_permutexvar_ps(order, v), _mm512_set1_ps(HSRI_MASS_MAX));
            _mm_storeu_ps(mass, _mm512_castps512_ps128(v));
            if (n > 1)
                _mm_storeu_ps(mass + a->mass_stride, _mm512_extractf32x4_ps(v, 1));
            if (n > 2)
                _mm_storeu_ps(mass + 2 * a->mass_stride, _mm512_extractf32x4_ps(v, 2));
            if (n > 3)
                _mm_storeu_ps(mass + 3 * a->mass_stride, _mm512_extractf32x4_ps(v, 3));
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
        for (uint32_t first = starts[k]; first < end; first += 16) {
            uint32_t  part = end - first < 16 ? end - first : 16;
            __m512    mass[HEADS] = { _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps() };
            _Alignas(64) float tokens[4][16];

            member_masses(codes + first, (__mmask16)((1u << part) - 1), heads, n, n_sets, (float)a->record[at->spreads + k], each, mass);
            transpose4(mass);
            UNROLL for (uint32_t j = 0; j < 4; j++)
                _mm512_store_ps(tokens[j], mass[j]);
            for (uint32_t t = 0; t < part; t++) {
                uint32_t u = positions[first + t] / HSRI_UNIT_TOKENS;
                float   *unit = pages[u / HSRI_PAGE_UNITS].units[u % HSRI_PAGE_UNITS];

                _mm_store_ps(unit, _mm_add_ps(_mm_load_ps(unit), _mm_load_ps(tokens[t % 4] + t / 4 * 4)));
            }
        }
    }
    store_marked(a, pages, h0, n);
}

INLINE void member_sets(const hsri_member_score_args *a, const hsri_cluster_layout *at, const cluster_head *heads, uint32_t h0, uint32_t n)
{
    switch (at->n / 8) {
    case 1:  member_heads(a, at, heads, h0, n, 1); break;
    case 2:  member_heads(a, at, heads, h0, n, 2); break;
    default: member_heads(a, at, heads, h0, n, 3); break;
    }
}

static void score_members_512(const hsri_member_score_args *a)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    uint32_t            csr = _mm_getcsr();

    _mm_setcsr(csr | _MM_FLUSH_ZERO_ON);
    for (uint32_t h0 = 0; h0 < a->n_heads; h0 += HEADS) {
        cluster_head heads[HEADS];
        uint32_t     n = a->n_heads - h0 < HEADS ? a->n_heads - h0 : HEADS;

        for (uint32_t h = 0; h < n; h++)
            prepare_members(a, &at, h0 + h, &heads[h]);
        switch (n) {
        case 1:  member_sets(a, &at, heads, h0, 1); break;
        case 2:  member_sets(a, &at, heads, h0, 2); break;
        case 3:  member_sets(a, &at, heads, h0, 3); break;
        default: member_sets(a, &at, heads, h0, 4); break;
        }
    }
    _mm_setcsr(csr);
}

/* ---- members, for the votes of a prompt run ----
 * A lane is a vote: no lane is empty because a cluster has few tokens, and a token's masses are added to its unit's at once. */

_Static_assert(HSRI_MEMBER_VOTES == 16, "a vote is a lane");

/* Of one head, as cluster_head for each vote. */
typedef struct vote_weights {
    __m512i quads[MAX_QUADS];
    __m512  step, base;
} vote_weights;

static void prepare_votes(const hsri_member_score_args *a, const hsri_member_votes *votes, const hsri_cluster_layout *at, uint32_t h,
                          vote_weights *w)
{
    _Alignas(64) int32_t quads[MAX_QUADS][16] = { { 0 } };
    _Alignas(64) float   step[16] = { 0 }, base[16] = { 0 };
    hsri_member_score_args one = *a;

    for (uint32_t i = 0; i < votes->n; i++, one.rotated += votes->rotated) {
        cluster_head head;

        prepare_members(&one, at, h, &head);
        for (uint32_t q = 0; q < MAX_QUADS; q++)
            quads[q][i] = head.quads[q];
        step[i] = head.step;
        base[i] = head.base;
    }
    for (uint32_t q = 0; q < MAX_QUADS; q++)
        w->quads[q] = _mm512_load_si512(quads[q]);
    w->step = _mm512_load_ps(step);
    w->base = _mm512_load_ps(base);
}

/* Codes of up to 16 tokens as a byte each, quad by quad. */
INLINE void unpack_tokens(const int32_t *codes, __mmask16 mask, uint32_t n_sets, int32_t (*quads)[16])
{
    const __m512i low4 = _mm512_set1_epi8(15);

    UNROLL for (uint32_t s = 0; s < n_sets; s++) {
        __m512i bytes = _mm512_maskz_loadu_epi32(mask, codes + s * HSRI_SEGMENT_TOKENS);

        _mm512_store_si512(quads[2 * s], _mm512_and_si512(bytes, low4));
        _mm512_store_si512(quads[2 * s + 1], _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low4));
    }
}

/* Masses of all votes are added to the units of one head. */
INLINE void add_votes(const hsri_member_score_args *a, const hsri_member_votes *votes, const hsri_cluster_layout *at, uint32_t h,
                      const vote_weights *w, uint32_t n_sets, __m512 *units)
{
    const uint16_t *starts = (const uint16_t *)(a->record + at->starts), *positions = (const uint16_t *)(a->record + at->positions);
    const int32_t  *codes = (const int32_t *)(a->record + at->tokens);
    const float    *cluster_mass = a->cluster_mass + h * a->cluster_stride;
    const __m512i   rows = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32((int)votes->cluster_mass));
    _Alignas(64) int32_t quads[MAX_QUADS][16];

    for (uint32_t i = 0; i < a->n_clusters; i++) {
        uint32_t k = a->clusters[i] % HSRI_SEGMENT_CLUSTERS, end = starts[k + 1];
        __m512   spread = _mm512_set1_ps((float)a->record[at->spreads + k]), share = _mm512_set1_ps(1.0f / (float)(end - starts[k]));
        __m512   step = _mm512_mul_ps(w->step, spread), base = _mm512_mul_ps(w->base, spread);
        __m512   each = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes(votes->n), rows, cluster_mass + a->places[i], 4);

        fetch_members(a, at, i + AHEAD, n_sets);
        each = _mm512_mul_ps(each, share);
        for (uint32_t first = starts[k]; first < end; first += 16) {
            uint32_t part = end - first < 16 ? end - first : 16;

            unpack_tokens(codes + first, lanes(part), n_sets, quads);
            for (uint32_t t = 0; t < part; t++) {
                __m512i sum = _mm512_setzero_si512();
                __m512  log, *unit = units + positions[first + t] / HSRI_UNIT_TOKENS;

                UNROLL for (uint32_t q = 0; q < 2 * n_sets; q++)
                    sum = dot_bytes(sum, _mm512_set1_epi32(quads[q][t]), w->quads[q]);
                log = _mm512_min_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, base), _mm512_set1_ps(126.0f));
                *unit = _mm512_add_ps(*unit, _mm512_mul_ps(exp2_16(log), each));
            }
        }
    }
}

static void clear_units(const uint32_t *marks, __m512 *units)
{
    for (uint32_t i = 0; i < HSRI_MARK_WORDS; i++)
        for (uint32_t bits = marks[i]; bits; bits &= bits - 1)
            for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++)
                units[(32 * i + (uint32_t)__builtin_ctz(bits)) * HSRI_PAGE_UNITS + u] = _mm512_setzero_ps();
}

/* Rows of marked pages' units, one for each vote. */
static void store_votes(const hsri_member_score_args *a, const hsri_member_votes *votes, uint32_t h, const __m512 *units)
{
    float *mass = a->mass + h * a->mass_stride;

    for (uint32_t i = 0; i < HSRI_MARK_WORDS; i++)
        for (uint32_t bits = a->marks[i]; bits; bits &= bits - 1, mass += HSRI_PAGE_UNITS) {
            const __m512 *page = units + (32 * i + (uint32_t)__builtin_ctz(bits)) * HSRI_PAGE_UNITS;
            _Alignas(64) float of_votes[HSRI_PAGE_UNITS][16];
            __m512 v[HSRI_PAGE_UNITS];

            UNROLL for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++)
                v[u] = _mm512_min_ps(page[u], _mm512_set1_ps(HSRI_MASS_MAX));
            transpose4(v);
            UNROLL for (uint32_t u = 0; u < HSRI_PAGE_UNITS; u++)
                _mm512_store_ps(of_votes[u], v[u]);
            for (uint32_t vote = 0; vote < votes->n; vote++)
                _mm_storeu_ps(mass + vote * votes->mass, _mm_load_ps(of_votes[vote % 4] + vote / 4 * 4));
        }
}

static void score_votes_512(const hsri_member_score_args *a, const hsri_member_votes *votes)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    uint32_t            csr = _mm_getcsr();
    __m512              units[HSRI_SEGMENT_UNITS];
    vote_weights        w;

    _mm_setcsr(csr | _MM_FLUSH_ZERO_ON);
    for (uint32_t h = 0; h < a->n_heads; h++) {
        prepare_votes(a, votes, &at, h, &w);
        clear_units(a->marks, units);
        switch (at.n / 8) {
        case 1:  add_votes(a, votes, &at, h, &w, 1, units); break;
        case 2:  add_votes(a, votes, &at, h, &w, 2, units); break;
        default: add_votes(a, votes, &at, h, &w, 3, units); break;
        }
        store_votes(a, votes, h, units);
    }
    _mm_setcsr(csr);
}
