/* SPDX-License-Identifier: Apache-2.0 */
/* What the loops of `select` share: sparse.c has those over pages, sparse_cluster.c those over clusters; and sparse_aside.c, which takes
 * back some of what was selected. */
#ifndef HSRI_CPU_SPARSE_JOB_H
#define HSRI_CPU_SPARSE_JOB_H

#include <float.h>
#include <math.h>

#include "base/array.h"
#include "device/cpu/pages.h"
#include "device/cpu/sparse_select.h"

#define BATCH_VOTES (HSRI_PICK_ROWS / HSRI_PICK_STRIDE)   /* a whole prompt run, or as many decode rows */

/* Masses at their limit say that the head's reference is too low for this chunk. It is raised by less than the range of masses, so that
 * what was at the limit stays in sight; after so many times, logits are no numbers to attend by. */
#define RAISE 64.0f
#define MAX_RAISES 128u

typedef struct pick_state {
    const hsri_seq    *seq;
    const hsri_sparse *settings;
    uint32_t pick;                     /* index among all */
    uint32_t row, n_rows, n_votes;
    uint32_t first_page, n_pages;      /* selectable */
    uint32_t n_chunks;
    uint32_t first_vote;               /* within the batch */
    bool     scored;                   /* there are masses, exact or estimated */
    bool     virtual_tokens;
    uint32_t budget, slice_units;      /* units to choose, and the size of the slices they come in */
    uint32_t n_recorded;               /* of the selectable pages: the first ones, which are in segments that are read from records */
    uint32_t n_segments;               /* these, if clusters say which of their tokens are looked at */
    bool     all_clusters;             /* all are */
    bool     all_families;             /* the clusters of all families compete for it */
    uint32_t *scan;                    /* where the layer's scan is noted; NULL: nowhere */
    bool     foreseen;                 /* its pages are those of the scan */
} pick_state;

/* Of the masses that each segment has for a head of a vote. */
typedef struct measures {
    float *sums, *raised;              /* [vote][head][segments] */
    float *share;                      /* what a mass is worth */
} measures;

typedef struct select_job {
    const hsri_cpu_device *dev;
    const hsri_row    *rows;
    const hsri_seq    *seqs;
    const hsri_sparse *settings;    /* of each sequence */
    const hsri_pick   *all_picks;   /* of the call */
    const hsri_kv_view *kv;
    const float       *queries, *rotated, *acc;
    uint32_t          *units, *counts;
    float             *virtual_part, *covered;
    uint32_t           layer, n_heads, heads_per_kv, stride;
    float              scale;
    pick_state         picks[BATCH_VOTES];
    uint32_t           n_picks;
    /* The scratch, in steps of the longest sequence of the batch. */
    uint64_t           max_units, max_chunks, max_spans;
    float             *mass;           /* [vote][head][units] */
    float             *sums;           /* [vote][head][chunks] of the masses */
    float             *raised;         /* [vote][head][chunks]: by how much the reference was raised */
    float             *worth;          /* [pick][kv head][units] */
    uint32_t          *work;           /* [pick][kv head][units] */
    float             *means;          /* [vote][spans][head]{ mass, value[d] } */
    uint8_t           *chosen;         /* [pick][kv head][pages], a bit for each unit */
    /* For picks with clusters. */
    uint64_t           max_segments;   /* 0: there are none */
    float             *family_mass;    /* [vote][head][segments][families] */
    float             *family_worth;   /* [pick][kv head][segments][families]: for each token */
    uint32_t          *family_tokens, *family_clusters;   /* [pick][kv head][segments][families]: how many of them they have */
    uint32_t          *family_work;    /* [pick][kv head][4][segments][families] */
    uint64_t          *left_out;       /* [pick][kv head][segments]: a bit for each family that is */
    /* The clusters of the other ones lie side by side. */
    uint32_t          *first_surveyed; /* [pick][kv head][segments + 1]: where those of a segment begin */
    uint32_t          *cluster_number, *cluster_tokens;   /* [pick][kv head][clusters]: number among all, and how many tokens */
    float             *cluster_mass;   /* [vote][head][clusters] */
    float             *cluster_worth;  /* [pick][kv head][clusters] */
    uint32_t          *cluster_work;   /* [pick][kv head][4][clusters], of which the first become places of those that are taken among
                                        * those of their segment, ascending, and the last their numbers among all */
    measures           families, clusters;
    uint32_t          *first_taken;    /* [pick][kv head][segments + 1]: where those of a segment begin among those taken */
    uint32_t          *marks;          /* [pick][kv head][segments][HSRI_MARK_WORDS]: a bit for each page that is listed */
    uint32_t          *first_listed;   /* [pick][kv head][segments + 1]: where pages of a segment begin in the list */
    uint32_t          *listed;         /* [pick][kv head][pages]: the list */
    double            *rest;           /* [vote][head]{ mass of the clusters not taken, its measure as `raised` } */
} select_job;

static inline uint32_t row_of_vote(const pick_state *p, uint32_t vote) { return p->row + vote * HSRI_PICK_STRIDE; }

/* Where the masses of a head in a vote begin, and its chunks. */
static inline uint64_t mass_at(const select_job *job, const pick_state *p, uint32_t vote, uint32_t head)
{
    return ((uint64_t)(p->first_vote + vote) * job->n_heads + head) * job->max_units;
}

static inline uint64_t chunk_at(const select_job *job, const pick_state *p, uint32_t vote, uint32_t head)
{
    return ((uint64_t)(p->first_vote + vote) * job->n_heads + head) * job->max_chunks;
}

static inline uint64_t list_at(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    return (uint64_t)p->first_vote * job->kv->n_kv_heads + kv_head;
}

/* The scan of a kv head: how many pages it has, and the pages. And behind those of all heads, what their references were. */
static inline uint32_t *scan_of(const pick_state *p, uint32_t kv_head) { return p->scan + kv_head * (1ull + p->settings->scan_pages); }
static inline float *scan_references(const select_job *job, const pick_state *p) { return (float *)scan_of(p, job->kv->n_kv_heads); }

/* Log of the mass that a head reads exactly; NaN if there is none or it is not a number. */
static inline float reference_of(const select_job *job, const pick_state *p, uint32_t row, uint32_t head)
{
    if (p->foreseen)
        return scan_references(job, p)[head];

    const float *acc = job->acc + ((uint64_t)row * job->n_heads + head) * (2 + job->kv->head_dim);
    float        reference = acc[0] + logf(acc[1]);

    return isfinite(reference) ? reference : NAN;
}

/* Which pick item i belongs to, when each has `per_pick(p)` of them; i becomes the number within it. */
static inline const pick_state *find_pick(const select_job *job, uint64_t *i, uint64_t (*per_pick)(const select_job *, const pick_state *))
{
    const pick_state *p = job->picks;

    while (*i >= per_pick(job, p))
        *i -= per_pick(job, p++);
    return p;
}

static inline uint64_t all_items(const select_job *job, uint64_t (*per_pick)(const select_job *, const pick_state *))
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < job->n_picks; i++)
        n += per_pick(job, &job->picks[i]);
    return n;
}

/* How the masses of one head of a vote compare: those of chunk i times exp(raised[i] - top) are in one measure, in which all of them and
 * the exact mass are `all` together. A head that is not a number has all = NaN. */
typedef struct measure {
    const float *mass, *sums, *raised;
    float  top;
    double all, exact;
} measure;

static inline float factor_of(float raised, float top) { return raised == top ? 1.0f : expf(raised - top); }
static inline float chunk_factor(const measure *m, uint32_t i) { return factor_of(m->raised[i], m->top); }

/* What a mass of chunk i is of all; 0 if the head is not a number. Where there is next to no mass at all, as much as a float can hold: zero
 * times infinity would leave the other heads no worth either. */
static inline float share_of(const measure *m, uint32_t i)
{
    return m->all > 0.0 ? (float)fmin(chunk_factor(m, i) / m->all, FLT_MAX) : 0.0f;
}

static inline float highest(const float *raised, uint32_t n)
{
    float top = 0.0f;

    for (uint32_t i = 0; i < n; i++)
        top = raised[i] > top ? raised[i] : top;
    return top;
}

static inline measure measure_chunks(const float *mass, const float *sums, const float *raised, uint32_t n_chunks, float reference)
{
    measure m = { mass, sums, raised, highest(raised, n_chunks), 0.0, 0.0 };

    m.exact = isnan(reference) ? (double)NAN : exp(-(double)m.top);
    m.all = m.exact;
    for (uint32_t i = 0; i < n_chunks; i++)
        m.all += (double)(m.sums[i] * chunk_factor(&m, i));
    return m;
}

/* The pages of a kv head of a pick whose units compete, ascending: their masses lie side by side, and chunks are counted among them. With
 * clusters, those with a token that was looked at, forced ones, and all behind the segments. Foreseen, those of the scan. */
typedef struct page_list {
    const uint32_t *pages;      /* NULL: all selectable ones, from first_page on */
    uint32_t first_page, n_pages, n_chunks;
    uint32_t n_clustered;       /* how many of them, the first ones, are in segments whose clusters were looked at */
} page_list;

static inline uint32_t page_at(const page_list *l, uint32_t i) { return l->pages ? l->pages[i] : l->first_page + i; }

/* ---- sparse.c ---- */

#define SEGMENT_CHUNKS (HSRI_SEGMENT_PAGES / HSRI_SCORE_PAGES)
#define CHUNK_UNITS (HSRI_SCORE_PAGES * HSRI_PAGE_UNITS)

/* A chunk of pages, of which the first n_recorded ones are read from records. */
typedef struct chunk {
    const pick_state *pick;
    uint32_t kv_head, n_pages;
    uint32_t at, part;                  /* where its masses begin in the page list, and which of the parts is scored together it is */
    uint32_t n_recorded, pages[HSRI_SCORE_PAGES];   /* ascending, among the selectable pages */
    const uint8_t *entries[HSRI_SCORE_PAGES], *codes[HSRI_SCORE_PAGES];
    hsri_calibration_record calibration;
    float   *scratch;
} chunk;

/* Of several heads: the masses of the chunk's units, in rows of `stride` floats; their sums, and by how much each head's reference was
 * raised, `step` floats apart. */
typedef struct chunk_masses {
    float   *mass;
    uint64_t stride;
    float   *sums, *raised;
    uint64_t step;
} chunk_masses;

/* Score a chunk for n_heads <= HSRI_ATTEND_MAX_QUERIES heads of its kv head, from `head` on. */
void hsri_cpu_score_chunk(const select_job *job, const chunk *c, uint32_t row, uint32_t head, uint32_t n_heads, const chunk_masses *out);

/* One page more, behind those that the chunk has; without an index it has no entry. */
void hsri_cpu_add_page(const select_job *job, chunk *c, uint32_t page);

/* Are logits estimated from the components of sketches? */
static inline bool hsri_cpu_reads_codes(const pick_state *p)
{
    return p->seq->index_shape.kind == HSRI_INDEX_SKETCH &&
           (p->settings->selector == HSRI_SELECT_SKETCH || p->settings->selector == HSRI_SELECT_CLUSTER);
}

/* ---- sparse_aside.c ---- */

/* Marked units leave the lists of the job's picks, each of one row with virtual tokens, and become some. No scratch is needed. */
void hsri_cpu_set_aside(hsri_cpu_device *dev, const select_job *job);

/* ---- sparse_cluster.c ---- */

/* Floats of scratch for picks with clusters, and where they are; the scratch is 64-byte aligned. */
uint64_t hsri_cpu_cluster_floats(uint64_t n_votes, uint64_t n_heads, uint64_t n_kv_heads, uint64_t n_pages);
void hsri_cpu_cluster_place(select_job *job, float *scratch, uint32_t n_votes);

/* Pages of whole segments. Their own components are not read: they may be gone. */
uint32_t hsri_cpu_recorded_pages(const pick_state *p);

/* Are all their tokens to be looked at? And all their clusters? */
bool hsri_cpu_takes_all_clusters(const pick_state *p);
bool hsri_cpu_takes_all_families(const pick_state *p);

/* Which clusters of the segments of all picks are worth their tokens' scores. */
void hsri_cpu_cluster_list(hsri_cpu_device *dev, const select_job *job);

/* Score the units of a segment's pages in which tokens of clusters taken are, for n_heads of the kv head's heads from `first` on; the first
 * of all lists the pages. */
void hsri_cpu_score_segment(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment, uint32_t first,
                            uint32_t n_heads);

/* After all parts were scored: bring the masses of a kv head into one measure for each vote and head, as if they had been scored in chunks
 * of the list. */
void hsri_cpu_level_masses(const select_job *job, const pick_state *p, uint32_t kv_head);

/* The pages of a kv head of a pick; with clusters, once they are listed. */
page_list hsri_cpu_pages_of(const select_job *job, const pick_state *p, uint32_t kv_head);

/* What a scoring kernel does, of the first n_recorded pages of a chunk. */
void hsri_cpu_score_recorded(const select_job *job, const chunk *c, const hsri_score_args *a);

#endif
