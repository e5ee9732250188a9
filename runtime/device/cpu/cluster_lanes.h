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

        memcpy(sums, a->bias, sizeof sums);
        for (uint32_t q = 0; q < a->n_quads; q++) {
            const uint8_t *line = a->centres + (uint64_t)q * HSRI_SEGMENT_CLUSTERS * 4;

            for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++) {
                const int8_t *x = point + 4 * q;

                sums[i] += x[0] * line[4 * i] + x[1] * line[4 * i + 1] + x[2] * line[4 * i + 2] + x[3] * line[4 * i + 3];
            }
        }
        for (uint32_t i = 1; i < HSRI_SEGMENT_CLUSTERS; i++)
            best = sums[i] > sums[best] ? i : best;
        a->nearest[p] = (uint16_t)best;
    }
}

static inline void score_clusters(const hsri_cluster_score_args *a)
{
    hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    const float        *mean = (const float *)(a->record + at.mean), *scales = (const float *)(a->record + at.scales);
    const uint16_t     *starts = (const uint16_t *)(a->record + at.starts);
    const uint32_t     *codes = (const uint32_t *)(a->record + at.codes);
    uint32_t            d = a->shape->head_dim;

    for (uint32_t h = 0; h < a->n_heads; h++) {
        float logits[HSRI_SEGMENT_CLUSTERS], base = dot_float(a->queries + (uint64_t)h * d, mean, d), *mass = a->mass + h * a->mass_stride;

        for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++)
            logits[i] = base;
        for (uint32_t c = 0; c < at.n; c++) {
            const uint32_t *set = codes + (uint64_t)c / 8 * HSRI_SEGMENT_CLUSTERS;
            uint32_t        shift = c % 4 * 8 + c % 8 / 4 * 4;
            float           weight = a->rotated[(uint64_t)h * d + c] * scales[c];

            for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++)
                logits[i] += weight * ((float)(int32_t)(set[i] >> shift & 15) - 7.5f);
        }
        for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++)
            mass[i] = starts[i + 1] == starts[i]
                          ? 0.0f : as_mass((float)(starts[i + 1] - starts[i]) * expf(a->scale * logits[i] - a->reference[h]));
    }
}

#endif
