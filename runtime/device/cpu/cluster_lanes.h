/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of clusters in plain C, over all clusters side by side: compilers make vectors of it, of whatever width the including file
 * is built for. */
#ifndef HSRI_CPU_CLUSTER_LANES_H
#define HSRI_CPU_CLUSTER_LANES_H

#include "device/cpu/cluster_kernels.h"
#include "device/cpu/lanes.h"

static inline void assign(const hsri_assign_args *a)
{
    for (uint32_t p = 0; p < a->n_points; p++) {
        const int8_t *point = a->points + (uint64_t)p * a->n_quads * 4;
        int32_t       sums[HSRI_SEGMENT_CLUSTERS];
        uint32_t      best = 0;

        memcpy(sums, a->bias, a->n_centres * sizeof *sums);
        for (uint32_t q = 0; q < a->n_quads; q++) {
            const uint8_t *line = a->centres + (uint64_t)q * a->n_centres * 4;

            for (uint32_t i = 0; i < a->n_centres; i++) {
                const int8_t *x = point + 4 * q;

                sums[i] += x[0] * line[4 * i] + x[1] * line[4 * i + 1] + x[2] * line[4 * i + 2] + x[3] * line[4 * i + 3];
            }
        }
        for (uint32_t i = 1; i < a->n_centres; i++)
            best = sums[i] > sums[best] ? i : best;
        a->nearest[p] = (uint16_t)best;
    }
}

/* Logits of centres [first, end), and of those that share their lines. */
static inline void centre_logits(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, uint32_t h, uint32_t scales_at,
                                 uint32_t codes_at, uint32_t first, uint32_t end, float *logits)
{
    const float    *mean = (const float *)(a->record + at->mean), *scales = (const float *)(a->record + scales_at);
    const uint32_t *codes = (const uint32_t *)(a->record + codes_at);
    uint32_t        d = a->shape->head_dim;
    float           base = dot_float(a->queries + (uint64_t)h * d, mean, d), weights[HSRI_CLUSTER_COMPONENTS];

    for (uint32_t c = 0; c < at->n; c++)
        weights[c] = a->rotated[(uint64_t)h * d + c] * scales[c];
    for (uint32_t block = first / LANES; block * LANES < end; block++) {
        float *out = logits + block * LANES;

        for (uint32_t i = 0; i < LANES; i++)
            out[i] = base;
        for (uint32_t c = 0; c < at->n; c++) {
            const uint32_t *set = codes + ((uint64_t)block * (at->n / 8) + c / 8) * LANES;
            uint32_t        shift = c % 4 * 8 + c % 8 / 4 * 4;

            for (uint32_t i = 0; i < LANES; i++)
                out[i] += weights[c] * ((float)(int32_t)(set[i] >> shift & 15) - 7.5f);
        }
    }
}

static inline void score_clusters(const hsri_cluster_score_args *a)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    const uint16_t     *starts = (const uint16_t *)(a->record + at.starts), *firsts = (const uint16_t *)(a->record + at.firsts);

    for (uint32_t h = 0; h < a->n_heads; h++) {
        float logits[HSRI_SEGMENT_CLUSTERS], *mass = a->mass + h * a->mass_stride;

        a->sums[h] = 0.0f;
        for (hsri_cluster_run run = { 0 }; hsri_next_run(firsts, a->left_out, &run); mass += run.end - run.first) {
            centre_logits(a, &at, h, at.scales, at.codes, run.first, run.end, logits);
            for (uint32_t i = run.first; i < run.end; i++)
                mass[i - run.first] = starts[i + 1] == starts[i]
                    ? 0.0f : as_mass((float)(starts[i + 1] - starts[i]) * expf(a->scale * logits[i] - a->reference[h]));
            for (uint32_t i = 0; i < run.end - run.first; i++)
                a->sums[h] += mass[i];
        }
    }
}

/* Log of what clusters that are off their family's centre have more than if they were there. As if logits were spread by `off`, but no more
 * than in proportion to it: no cluster is farther than the farthest. */
INLINE float family_gain(float off)
{
    float most = off < HSRI_FAMILY_GAIN ? off : HSRI_FAMILY_GAIN;

    return most * (off - 0.5f * most);
}

/* How much the logit of a cluster that is one step of the families' spreads off its centre may differ. Not a number: nothing. */
static inline float family_step(const hsri_cluster_score_args *a, const hsri_cluster_layout *at, uint32_t h)
{
    const float *scales = (const float *)(a->record + at->family_scales), *rotated = a->rotated + (uint64_t)h * a->shape->head_dim;
    float        squares = 0.0f;

    for (uint32_t c = 0; c < at->n; c++)
        squares += rotated[c] * scales[c] * (rotated[c] * scales[c]);
    return squares < 1e30f ? sqrtf(squares) * fabsf(a->scale) / 16.0f : 0.0f;
}

static inline void score_families(const hsri_cluster_score_args *a)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    const uint16_t     *starts = (const uint16_t *)(a->record + at.family_starts);
    const uint8_t      *spreads = a->record + at.family_spreads;

    for (uint32_t h = 0; h < a->n_heads; h++) {
        float logits[HSRI_SEGMENT_FAMILIES], *mass = a->mass + h * a->mass_stride, step = family_step(a, &at, h);

        centre_logits(a, &at, h, at.family_scales, at.family_codes, 0, HSRI_SEGMENT_FAMILIES, logits);
        for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++)
            mass[f] = starts[f + 1] == starts[f] ? 0.0f
                          : as_mass((float)(starts[f + 1] - starts[f]) *
                                    expf(a->scale * logits[f] - a->reference[h] + family_gain(step * (float)spreads[f])));
        a->sums[h] = 0.0f;
        for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++)
            a->sums[h] += mass[f];
    }
}

/* The logit of a token about its centre, for all tokens of a cluster side by side. */
INLINE void member_logits(const hsri_cluster_layout *at, const uint32_t *codes, uint32_t n_tokens, const float *weights, float *logits)
{
    memset(logits, 0, n_tokens * sizeof *logits);
    for (uint32_t c = 0; c < at->n; c++) {
        const uint32_t *set = codes + (uint64_t)c / 8 * HSRI_SEGMENT_TOKENS;
        uint32_t        shift = c % 4 * 8 + c % 8 / 4 * 4;

        for (uint32_t i = 0; i < n_tokens; i++)
            logits[i] += weights[c] * ((float)(int32_t)(set[i] >> shift & 15) - 7.5f);
    }
}

/* Of a row of all units, those of marked pages. */
static inline void write_marked(const float *units, const uint32_t *marks, float *mass)
{
    for (uint32_t page = 0; page < HSRI_SEGMENT_PAGES; page++)
        for (uint32_t u = 0; u < HSRI_PAGE_UNITS && (marks[page / 32] >> page % 32 & 1); u++)
            *mass++ = as_mass(units[page * HSRI_PAGE_UNITS + u]);
}

static inline void score_members(const hsri_member_score_args *a)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    const float        *scales = (const float *)(a->record + at.token_scales);
    const uint16_t     *starts = (const uint16_t *)(a->record + at.starts), *positions = (const uint16_t *)(a->record + at.positions);
    const uint32_t     *codes = (const uint32_t *)(a->record + at.tokens);
    const uint8_t      *spreads = a->record + at.spreads;

    for (uint32_t h = 0; h < a->n_heads; h++) {
        float weights[HSRI_CLUSTER_COMPONENTS], logits[LANES], units[HSRI_SEGMENT_UNITS] = { 0 };

        for (uint32_t c = 0; c < at.n; c++)
            weights[c] = a->rotated[(uint64_t)h * a->shape->head_dim + c] * scales[c] * a->scale;
        for (uint32_t i = 0; i < a->n_clusters; i++) {
            uint32_t k = a->clusters[i] % HSRI_SEGMENT_CLUSTERS, n = starts[k + 1] - (uint32_t)starts[k];
            float    each = n ? a->cluster_mass[h * a->cluster_stride + a->places[i]] / (float)n : 0.0f;

            for (uint32_t first = starts[k]; first < starts[k + 1]; first += LANES) {
                uint32_t part = starts[k + 1] - first < LANES ? starts[k + 1] - first : LANES;

                member_logits(&at, codes + first, part, weights, logits);
                for (uint32_t j = 0; j < part; j++)
                    units[positions[first + j] / HSRI_UNIT_TOKENS] += as_mass(each * expf((float)spreads[k] * logits[j]));
            }
        }
        write_marked(units, a->marks, a->mass + h * a->mass_stride);
    }
}

/* Votes one after the other, by a level's kernel for one. */
INLINE void score_each_vote(const hsri_member_score_args *first, const hsri_member_votes *votes,
                            void (*score)(const hsri_member_score_args *a))
{
    hsri_member_score_args a = *first;

    for (uint32_t i = 0; i < votes->n; i++) {
        score(&a);
        a.rotated += votes->rotated;
        a.cluster_mass += votes->cluster_mass;
        a.mass += votes->mass;
    }
}

static inline void score_votes(const hsri_member_score_args *first, const hsri_member_votes *votes)
{
    score_each_vote(first, votes, score_members);
}

#endif
