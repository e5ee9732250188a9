/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of clusters: the member `cluster` of hsri_sparse_kernels. cluster_ref.c fills all entries; x86/cluster_*.c overwrite them.
 * docs/sparse-attention.md says what they are for. */
#ifndef HSRI_CPU_CLUSTER_KERNELS_H
#define HSRI_CPU_CLUSTER_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "device/kv_format.h"

/* Points have components in int8, in quads of four; centres have theirs plus 128, as quad q of centre i in bytes 4i .. 4i+3 of line q. */
typedef struct hsri_assign_args {
    const int8_t  *points;      /* [n_points][n_quads][4] */
    uint32_t       n_points;    /* a multiple of 16 */
    uint32_t       n_quads;     /* at most HSRI_CLUSTER_COMPONENTS / 4 */
    const uint8_t *centres;     /* [n_quads][n_centres][4], 64-byte aligned */
    const int32_t *bias;        /* [n_centres] */
    uint32_t       n_centres;   /* a multiple of 32, at most HSRI_SEGMENT_CLUSTERS */
    uint16_t      *nearest;     /* [n_points]: the centre of largest product plus bias, the first of several */
} hsri_assign_args;

typedef struct hsri_cluster_score_args {
    const uint8_t *record;      /* 64-byte aligned */
    const hsri_index_shape *shape;
    uint32_t       n_heads;
    float          scale;       /* of logits */
    const float   *queries;     /* [n_heads][d] */
    const float   *rotated;     /* [n_heads][d] */
    const float   *reference;   /* [n_heads] */
    float         *mass;        /* [n_heads] rows: of the clusters that are scored, or of all families */
    uint64_t       mass_stride;
    float         *sums;        /* [n_heads], of the rows */
    uint64_t       left_out;    /* `score`: a bit for each family whose clusters are not scored */
} hsri_cluster_score_args;

_Static_assert(HSRI_SEGMENT_FAMILIES == 64, "families of a segment are bits of a word");

/* Clusters of families that follow each other, [first, end), none of which is left out. */
typedef struct hsri_cluster_run {
    uint32_t family, first, end;    /* the family behind it */
} hsri_cluster_run;

/* Go on to the next run; begin with { 0 }. Nobody but the kernels reads `firsts` of a record that has all its clusters scored. */
static inline bool hsri_next_run(const uint16_t *firsts, uint64_t left_out, hsri_cluster_run *run)
{
    uint64_t in = run->family < HSRI_SEGMENT_FAMILIES ? ~left_out >> run->family << run->family : 0, out;

    if (!in)
        return false;
    run->family = (uint32_t)__builtin_ctzll(in);
    out = left_out >> run->family << run->family;
    run->first = run->family ? firsts[run->family] : 0;
    run->family = out ? (uint32_t)__builtin_ctzll(out) : HSRI_SEGMENT_FAMILIES;
    run->end = out ? firsts[run->family] : HSRI_SEGMENT_CLUSTERS;
    return true;
}

/* Of families: up to so much, what clusters are off the centre in logits counts by its square, beyond in proportion. */
#define HSRI_FAMILY_GAIN 1.0f

/* Units of a segment. */
#define HSRI_SEGMENT_UNITS (HSRI_SEGMENT_TOKENS / HSRI_UNIT_TOKENS)

/* Words of a set of pages of a segment, a bit for each. */
#define HSRI_MARK_WORDS (HSRI_SEGMENT_PAGES / 32u)

/* Tokens of some clusters of a segment. A token's mass is what its cluster has for each of its tokens, times exp of the logit of what the
 * token is off the centre. */
typedef struct hsri_member_score_args {
    const uint8_t  *record;         /* 64-byte aligned */
    const hsri_index_shape *shape;
    const uint32_t *clusters;       /* [n_clusters], whose numbers are those below HSRI_SEGMENT_CLUSTERS they have modulo that */
    const uint32_t *places;         /* [n_clusters]: of their masses in a row */
    uint32_t        n_clusters, n_heads;
    float           scale;          /* of logits */
    const float    *rotated;        /* [n_heads][d] */
    const float    *cluster_mass;   /* [n_heads] rows */
    uint64_t        cluster_stride;
    const uint32_t *marks;          /* [HSRI_MARK_WORDS]: pages, among them all with a token of the clusters */
    float          *mass;           /* [n_heads] rows of the units of these pages: all of a unit's tokens that are in the clusters */
    uint64_t        mass_stride;
} hsri_member_score_args;

#define HSRI_MEMBER_VOTES 16u

/* Rows that vote together: so many of them, at most HSRI_MEMBER_VOTES, and how many floats are from what one has to what the next one
 * has. */
typedef struct hsri_member_votes {
    uint32_t n;
    uint64_t rotated, cluster_mass, mass;
} hsri_member_votes;

typedef struct hsri_cluster_kernels {
    /* every level has the same bits */
    void (*assign)(const hsri_assign_args *a);
    /* masses of clusters, by the measure of sparse_kernels.h: tokens times exp(logit of the centre - reference) */
    void (*score)(const hsri_cluster_score_args *a);
    /* of families: as much as their clusters may have together, by how far these are off the centre (docs/sparse-attention.md) */
    void (*score_families)(const hsri_cluster_score_args *a);
    /* masses of units, as of sparse_kernels.h */
    void (*score_members)(const hsri_member_score_args *a);
    /* the same bits for several votes, of which `a` has the first */
    void (*score_votes)(const hsri_member_score_args *a, const hsri_member_votes *votes);
} hsri_cluster_kernels;

void hsri_cluster_kernels_fill_ref(hsri_cluster_kernels *k);
void hsri_cluster_kernels_fill_avx2(hsri_cluster_kernels *k);         /* x86/cluster_avx2.c */
void hsri_cluster_kernels_fill_avx512(hsri_cluster_kernels *k);       /* x86/cluster_avx512.c */
void hsri_cluster_kernels_fill_avx512vnni(hsri_cluster_kernels *k);   /* x86/cluster_avx512vnni.c: the same bits */
void hsri_cluster_kernels_fill_amx(hsri_cluster_kernels *k);          /* x86/cluster_amx.c: likewise, assign alone */

#endif
