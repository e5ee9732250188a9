/* SPDX-License-Identifier: Apache-2.0 */
/* Clusters before tokens (docs/sparse-attention.md): which tokens of whole segments `select` looks at, and their masses, which come from
 * the segments' records alone. Loops:
 *
 *   families  masses of all families, for each voting row and head; items are segments of kv heads
 *   weigh     what they are worth for each token; items are segments of kv heads
 *   admit     the families whose clusters may be worth most, many times as many as the candidates allow; items are kv heads of picks
 *   survey    masses of their clusters, for each voting row and head; items are segments of kv heads
 *   weigh     what they are worth together; items are segments of kv heads
 *   list      the clusters worth most, as many as the candidates allow; items are kv heads of picks
 *   mark      the pages in which their tokens are; items are segments of kv heads
 *
 * The loops of sparse.c then go on with these pages alone and what lies behind the segments: what a token costs from there on does not
 * grow with the context. */
#include "device/cpu/sparse_job.h"

#include <string.h>

/* Estimates for one thread. */
#define FAMILIES_NS 300u        /* of a segment for one head */
#define WEIGH_FAMILIES_NS 50u   /* of a segment for one head */
#define SHARE_NS 5u             /* of a segment for one head */
#define ADMIT_NS 200u           /* for each segment */
#define SURVEY_NS 2000u         /* of a segment for one head */
#define WEIGH_NS 100u           /* of a segment for one head */
#define LIST_NS 4u              /* for each cluster that competes */
#define MARK_NS 100u            /* of a segment */
#define MARK_TOKEN_NS 4u        /* and of a candidate */

#define CLUSTERS HSRI_SEGMENT_CLUSTERS
#define FAMILIES HSRI_SEGMENT_FAMILIES

/* Tokens of the families that are admitted, for each candidate. A prompt run has as many votes to look at clusters with, and shares what it
 * selects among 128 rows. */
#define ADMITTED 32u
#define ADMITTED_BY_RUN 8u

uint32_t hsri_cpu_recorded_pages(const pick_state *p)
{
    return hsri_cpu_reads_codes(p) && p->seq->index_shape.clusters ? p->n_pages / HSRI_SEGMENT_PAGES * HSRI_SEGMENT_PAGES : 0;
}

/* By itself a budget has four times as many tokens to choose from, so that prompt runs and budgets by a ratio do, too. */
static uint32_t candidates_of(const pick_state *p)
{
    uint64_t by_budget = 4ull * p->budget * HSRI_UNIT_TOKENS;

    return p->settings->candidates ? p->settings->candidates : (uint32_t)hsri_min(hsri_max(4096, by_budget), UINT32_MAX);
}

bool hsri_cpu_takes_all_clusters(const pick_state *p)
{
    return p->settings->selector == HSRI_SELECT_SKETCH || p->budget >= p->n_pages * HSRI_PAGE_UNITS ||
           candidates_of(p) >= (uint64_t)p->n_segments * HSRI_SEGMENT_TOKENS;
}

/* Most tokens of families whose clusters compete. */
static uint64_t most_admitted(const pick_state *p)
{
    return (uint64_t)candidates_of(p) * (p->n_rows > 1 ? ADMITTED_BY_RUN : ADMITTED);
}

bool hsri_cpu_takes_all_families(const pick_state *p)
{
    return p->all_clusters || most_admitted(p) >= (uint64_t)p->n_segments * HSRI_SEGMENT_TOKENS;
}

/* ---- scratch ---- */

/* Take n words, of 64 bytes each so that what is behind is aligned. Without a scratch only *used counts. */
static void *take(float *scratch, uint64_t *used, uint64_t n)
{
    float *at = scratch ? scratch + *used : NULL;

    *used += hsri_round_up(n, 16);
    return at;
}

static void take_measures(measures *m, float *scratch, uint64_t *used, uint64_t n)
{
    m->sums = take(scratch, used, n);
    m->raised = take(scratch, used, n);
    m->share = take(scratch, used, n);
}

/* Of `rows` heads of votes and so many lists; returns how many floats they take. */
static uint64_t place(select_job *job, float *scratch, uint64_t rows, uint64_t lists, uint64_t segments, uint64_t n_pages)
{
    uint64_t used = 0;

    job->rest = take(scratch, &used, 4 * rows);
    job->left_out = take(scratch, &used, 2 * lists * segments);
    take_measures(&job->families, scratch, &used, rows * segments);
    take_measures(&job->clusters, scratch, &used, rows * segments);
    job->family_mass = take(scratch, &used, rows * segments * FAMILIES);
    job->family_worth = take(scratch, &used, lists * segments * FAMILIES);
    job->family_tokens = take(scratch, &used, lists * segments * FAMILIES);
    job->family_clusters = take(scratch, &used, lists * segments * FAMILIES);
    job->family_work = take(scratch, &used, 4 * lists * segments * FAMILIES);
    job->first_surveyed = take(scratch, &used, lists * (segments + 1));
    job->cluster_number = take(scratch, &used, lists * segments * CLUSTERS);
    job->cluster_tokens = take(scratch, &used, lists * segments * CLUSTERS);
    job->cluster_mass = take(scratch, &used, rows * segments * CLUSTERS);
    job->cluster_worth = take(scratch, &used, lists * segments * CLUSTERS);
    job->cluster_work = take(scratch, &used, 4 * lists * segments * CLUSTERS);
    job->first_taken = take(scratch, &used, lists * (segments + 1));
    job->first_listed = take(scratch, &used, lists * (segments + 1));
    job->marks = take(scratch, &used, lists * segments * HSRI_MARK_WORDS);
    job->listed = take(scratch, &used, lists * n_pages);
    return used;
}

uint64_t hsri_cpu_cluster_floats(uint64_t n_votes, uint64_t n_heads, uint64_t n_kv_heads, uint64_t n_pages)
{
    select_job none;

    return 16 + place(&none, NULL, n_votes * n_heads, n_votes * n_kv_heads, n_pages / HSRI_SEGMENT_PAGES, n_pages);
}

void hsri_cpu_cluster_place(select_job *job, float *scratch, uint32_t n_votes)
{
    float *aligned = (float *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);

    job->max_segments = job->max_units / HSRI_SEGMENT_UNITS;
    place(job, aligned, (uint64_t)n_votes * job->n_heads, (uint64_t)n_votes * job->kv->n_kv_heads, job->max_segments,
          job->max_units / HSRI_PAGE_UNITS);
}

/* Segments of a head in a vote begin here. */
static uint64_t segments_at(const select_job *job, const pick_state *p, uint32_t vote, uint32_t head)
{
    return ((uint64_t)(p->first_vote + vote) * job->n_heads + head) * job->max_segments;
}

static const uint8_t *record_at(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    const uint32_t *records = hsri_cpu_at(job->dev, p->seq->clusters, 0);
    uint32_t        record = records[((uint64_t)segment * job->kv->n_layers + job->layer) * job->kv->n_kv_heads + kv_head];

    return hsri_slot_at(hsri_cpu_at(job->dev, (hsri_ref){ .buf = job->kv->pool_buf }, 0), record,
                        hsri_cluster_slot_bytes(&p->seq->index_shape));
}

/* Segments of a kv head in a pick, and where they begin among those and one more for each list. */
static uint64_t list_segments_at(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    return list_at(job, p, kv_head) * job->max_segments;
}

static uint64_t firsts_at(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    return list_at(job, p, kv_head) * (job->max_segments + 1);
}

/* ---- masses of families, and of clusters ---- */

typedef void (*centre_score_fn)(const hsri_cluster_score_args *a);

static uint64_t survey_items(const select_job *job, const pick_state *p) { return (uint64_t)job->kv->n_kv_heads * p->n_segments; }
static uint64_t family_items(const select_job *job, const pick_state *p) { return p->all_families ? 0 : survey_items(job, p); }

/* As the masses of tokens: a head whose masses are at their limit is scored again by a higher reference, which is a.reference[h] and has
 * been raised by so much already. Returns by how much in the end. */
static float score_raised(const select_job *job, hsri_cluster_score_args a, centre_score_fn score, uint32_t h, float raised)
{
    float reference = a.reference[h];

    a.queries += (uint64_t)h * job->kv->head_dim;
    a.rotated += (uint64_t)h * job->kv->head_dim;
    a.mass += h * a.mass_stride;
    a.n_heads = 1;
    a.reference = &reference;
    a.sums += h;
    for (uint32_t i = 0; i < MAX_RAISES && *a.sums >= HSRI_MASS_MAX; i++) {
        raised += RAISE;
        reference += RAISE;
        score(&a);
    }
    return raised;
}

/* Centres of a segment for all heads of a vote. References are raised as `before` says; NULL: they are not. */
static void score_centres(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment, uint32_t vote,
                          centre_score_fn score, hsri_cluster_score_args a, const measures *before, const measures *m)
{
    uint32_t row = row_of_vote(p, vote), d = job->kv->head_dim;
    float    references[HSRI_ATTEND_MAX_QUERIES], sums[HSRI_ATTEND_MAX_QUERIES], *mass = a.mass;

    a.record = record_at(job, p, kv_head, segment);
    a.shape = &p->seq->index_shape;
    a.scale = job->scale;
    a.reference = references;
    a.sums = sums;
    for (uint32_t h0 = 0; h0 < job->heads_per_kv; h0 += HSRI_ATTEND_MAX_QUERIES) {
        uint32_t head = kv_head * job->heads_per_kv + h0;
        uint64_t query = ((uint64_t)row * job->n_heads + head) * d;

        a.n_heads = (uint32_t)hsri_min(HSRI_ATTEND_MAX_QUERIES, job->heads_per_kv - h0);
        a.queries = job->queries + query;
        a.rotated = job->rotated + query;
        a.mass = mass + h0 * a.mass_stride;
        for (uint32_t h = 0; h < a.n_heads; h++)
            references[h] = reference_of(job, p, row, head + h) +
                            (before ? before->raised[segments_at(job, p, vote, head + h) + segment] : 0.0f);
        score(&a);
        for (uint32_t h = 0; h < a.n_heads; h++) {
            uint64_t at = segments_at(job, p, vote, head + h) + segment;

            m->raised[at] = score_raised(job, a, score, h, before ? before->raised[at] : 0.0f);
            m->sums[at] = sums[h];
        }
    }
}

static measure measure_segments(const select_job *job, const pick_state *p, const measures *m, uint32_t vote, uint32_t head)
{
    uint64_t at = segments_at(job, p, vote, head);

    return measure_chunks(job->cluster_mass + at * CLUSTERS, m->sums + at, m->raised + at, p->n_segments,
                          reference_of(job, p, row_of_vote(p, vote), head));
}

/* Worth is probability, summed over the voting rows and the heads of the group. */
static void write_share(const select_job *job, const pick_state *p, const measures *of, uint32_t vote, uint32_t head)
{
    measure m = measure_segments(job, p, of, vote, head);
    float  *share = of->share + segments_at(job, p, vote, head);

    for (uint32_t i = 0; i < p->n_segments; i++)
        share[i] = share_of(&m, i);
}

/* Of n masses of a segment, in rows of `stride` for each head in a vote. */
static void weigh(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment, const measures *m, const float *mass,
                  uint64_t stride, uint64_t n, float *worth)
{
    memset(worth, 0, n * sizeof *worth);
    for (uint32_t vote = 0; vote < p->n_votes; vote++)
        for (uint32_t h = kv_head * job->heads_per_kv; h < (kv_head + 1) * job->heads_per_kv; h++) {
            float share = m->share[segments_at(job, p, vote, h) + segment];

            if (share > 0.0f)
                job->dev->kernels.sparse.add_scaled(worth, share, mass + segments_at(job, p, vote, h) / job->max_segments * stride, n);
        }
}

/* ---- what is read next ---- */

/* Parts of records lie far from each other, and no segment's record is near the next one's: nobody else would fetch them in time. */
static void fetch(const uint8_t *from, uint64_t bytes)
{
    const uint8_t *line = (const uint8_t *)((uintptr_t)from & ~(uintptr_t)63);

    for (; line < from + bytes; line += 64)
        __builtin_prefetch(line);
}

static void fetch_families(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    fetch(record_at(job, p, kv_head, segment), hsri_cluster_layout_of(&p->seq->index_shape).scales);
}

static void fetch_clusters(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    const hsri_cluster_layout at = hsri_cluster_layout_of(&p->seq->index_shape);
    const uint8_t *record = record_at(job, p, kv_head, segment);
    uint64_t       left_out = job->left_out[list_segments_at(job, p, kv_head) + segment];

    fetch(record + at.mean, job->kv->head_dim * sizeof(float));
    fetch(record + at.scales, at.token_scales - at.scales);
    for (hsri_cluster_run run = { 0 }; hsri_next_run((const uint16_t *)(record + at.firsts), left_out, &run); ) {
        fetch(record + at.starts + 2 * run.first, 2 * (run.end - run.first + 1));
        fetch(record + at.codes + hsri_centre_at(at.n, run.first, 0),
              hsri_centre_at(at.n, run.end - 1, at.n - 1) - hsri_centre_at(at.n, run.first, 0));
    }
}

/* What cluster k's tokens [first, end) are scored by, in the next loop. */
static void fetch_tokens(const uint8_t *record, const hsri_cluster_layout *at, uint32_t k, uint32_t first, uint32_t end)
{
    fetch(record + at->spreads + k, 1);
    for (uint32_t set = 0; set < at->n / 8 && first < end; set++)
        fetch(record + at->tokens + ((uint64_t)set * HSRI_SEGMENT_TOKENS + first) * 4, (end - first) * 4);
}

/* ---- items ---- */

typedef uint64_t items_fn(const select_job *job, const pick_state *p);
typedef void segment_fn(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment);

/* What items [first, end) stand for, of loops whose items are segments of kv heads. */
static void run_segments(const select_job *job, uint64_t first, uint64_t end, items_fn *items, segment_fn *run)
{
    for (uint64_t item = first; item < end; item++) {
        uint64_t          i = item;
        const pick_state *p = find_pick(job, &i, items);

        run(job, p, (uint32_t)(i / p->n_segments), (uint32_t)(i % p->n_segments));
    }
}

/* ---- shares ---- */

/* Of each pick, items are heads of votes. */
static uint64_t cluster_share_items(const select_job *job, const pick_state *p) { return p->n_segments ? p->n_votes * job->n_heads : 0; }
static uint64_t family_share_items(const select_job *job, const pick_state *p) { return p->all_families ? 0 : cluster_share_items(job, p); }

static void write_shares(const select_job *job, uint64_t first, uint64_t end, items_fn *items, const measures *of)
{
    for (uint64_t item = first; item < end; item++) {
        uint64_t          i = item;
        const pick_state *p = find_pick(job, &i, items);

        write_share(job, p, of, (uint32_t)(i / job->n_heads), (uint32_t)(i % job->n_heads));
    }
}

static void cluster_shares_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    (void)worker;
    write_shares(arg, first, end, cluster_share_items, &((const select_job *)arg)->clusters);
}

static void family_shares_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    (void)worker;
    write_shares(arg, first, end, family_share_items, &((const select_job *)arg)->families);
}

/* ---- families ---- */

static void count_families(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    const hsri_cluster_layout layout = hsri_cluster_layout_of(&p->seq->index_shape);
    const uint8_t  *record = record_at(job, p, kv_head, segment);
    const uint16_t *firsts = (const uint16_t *)(record + layout.firsts), *starts = (const uint16_t *)(record + layout.family_starts);
    uint64_t        at = (list_segments_at(job, p, kv_head) + segment) * FAMILIES;

    for (uint32_t f = 0; f < FAMILIES; f++) {
        job->family_tokens[at + f] = starts[f + 1] - (uint32_t)starts[f];
        job->family_clusters[at + f] = firsts[f + 1] - (uint32_t)firsts[f];
    }
}

static void score_families(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    if (segment + 2 < p->n_segments)
        fetch_families(job, p, kv_head, segment + 2);
    for (uint32_t vote = 0; vote < p->n_votes; vote++) {
        uint64_t                at = segments_at(job, p, vote, kv_head * job->heads_per_kv) + segment;
        hsri_cluster_score_args a = { .mass = job->family_mass + at * FAMILIES, .mass_stride = job->max_segments * FAMILIES };

        score_centres(job, p, kv_head, segment, vote, job->dev->kernels.sparse.cluster.score_families, a, NULL, &job->families);
    }
    count_families(job, p, kv_head, segment);
}

static void families_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    (void)worker;
    run_segments(arg, first, end, family_items, score_families);
}

/* ---- the best of many ---- */

#define BINS 2048u
#define BIN_WORDS (1u << 17)    /* 64 bins for each power of two, over 32 of these */

/* What may be among the best of a list: clusters, or families. */
typedef struct contest {
    const select_job *job;
    const pick_state *pick;
    uint32_t     kv_head, n_all, usual;         /* how many of them, with how many tokens on average */
    const float *worth;
    const uint32_t *tokens;
    uint32_t    *index, n;                      /* places of those that take part, at last of those that are taken */
    uint64_t    *rivals;                        /* for the last place: worth, as a word, above tokens */
    float       *best;                          /* the largest of sets, */
    uint32_t     n_sets;                        /* which a few behind the last one are not in */
} contest;

/* Of places among n_all, with scratch of four words for each of `most`, which is even. */
static contest contest_of(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t n_all, uint32_t usual, uint32_t *work,
                          uint64_t most)
{
    return (contest){ .job = job, .pick = p, .kv_head = kv_head, .n_all = n_all, .usual = usual, .index = work,
                      .rivals = (uint64_t *)(work + most), .best = (float *)(work + 3 * most) };
}

/* All that are worth at least so much take part. */
static void enter(contest *c, float least)
{
    c->n = c->job->dev->kernels.sparse.reach(c->worth, c->n_all, least, c->index);
}

static uint64_t tokens_of(const contest *c)
{
    uint64_t tokens = 0;

    for (uint32_t i = 0; i < c->n; i++)
        tokens += c->tokens[c->index[i]];
    return tokens;
}

/* First by a bar that as many reach as there would be of twice the usual size, since those are worth more: that leaves few. If they have
 * too few tokens, by a lower one, and then all enter. True: all of these may be taken. */
static bool enter_best(contest *c, uint64_t limit)
{
    c->n_sets = hsri_top_sets(&c->job->dev->kernels.sparse, c->worth, c->n_all, c->best);
    for (uint32_t size = 2 * c->usual; size > c->usual / 8 && limit / size + 1 < c->n_sets; size /= 2) {
        enter(c, hsri_top_bar(c->best, c->n_sets, (uint32_t)(limit / size + 1), c->index));
        if (tokens_of(c) > limit)
            return false;
    }
    enter(c, 0.0f);
    return tokens_of(c) <= limit;
}

/* The best bins together have no more than *left tokens, the next one down, which is returned, would have; *left: what it may have. */
static uint32_t find_bin(const uint32_t *tokens, uint32_t highest, uint64_t *left)
{
    uint32_t bin = highest;

    while (bin > 0 && tokens[bin] <= *left)
        *left -= tokens[bin--];
    return bin;
}

/* Worth as words in [*low, *high], in which the limit is passed. Bins are narrow: words lie close together, and a sum that many add to is
 * waited for. What is worth next to nothing is in the first one. */
static void find_range(const contest *c, uint32_t *low, uint32_t *high, uint64_t *left)
{
    float    highest = 0.0f;
    uint32_t tokens[BINS] = { 0 }, from, bin;

    for (uint32_t i = 0; i < c->n_sets; i++)
        highest = c->best[i] > highest ? c->best[i] : highest;
    for (uint32_t i = c->n_sets * HSRI_TOP_SET; i < c->n_all; i++)
        highest = c->worth[i] > highest ? c->worth[i] : highest;
    *high = hsri_word_of(highest);
    from = *high > BINS * BIN_WORDS ? *high - BINS * BIN_WORDS + 1 : 0;
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t word = hsri_word_of(c->worth[c->index[i]]);

        tokens[word > from ? (word - from) / BIN_WORDS : 0] += c->tokens[c->index[i]];
    }
    bin = find_bin(tokens, (*high - from) / BIN_WORDS, left);
    *low = bin ? from + bin * BIN_WORDS : 0;
    *high = (uint32_t)hsri_min(*high, from + (bin + 1) * BIN_WORDS - 1);
}

/* Of the n rivals with words in [low, high], which are used up, the word at which the limit is passed. */
static uint32_t find_bar(uint64_t *rivals, uint32_t n, uint32_t low, uint32_t high, uint64_t *left)
{
    uint32_t tokens[BINS];

    for (;;) {
        uint32_t shift = high - low < BINS ? 0 : (uint32_t)(__builtin_clz(BINS) + 1 - __builtin_clz(high - low));
        uint32_t bin = (high - low) >> shift, kept = 0;

        memset(tokens, 0, (bin + 1) * sizeof *tokens);
        for (uint32_t i = 0; i < n; i++)
            tokens[((uint32_t)(rivals[i] >> 32) - low) >> shift] += (uint32_t)rivals[i];
        bin = find_bin(tokens, bin, left);
        if (shift == 0)
            return low + bin;
        for (uint32_t i = 0; i < n; i++) {
            uint64_t rival = rivals[i];

            rivals[kept] = rival;
            kept += ((uint32_t)(rival >> 32) - low) >> shift == bin;
        }
        low += bin << shift;
        high = (uint32_t)hsri_min(high, low + ((1u << shift) - 1));
        n = kept;
    }
}

/* Take the best until the next one would have too many tokens; of equals, the first ones. */
static void take_best(contest *c, uint64_t limit)
{
    uint64_t left = limit;
    uint32_t low, high, n_rivals = 0, n = 0, bar = 0;
    bool     all = enter_best(c, limit);

    if (!all) {
        find_range(c, &low, &high, &left);
        enter(c, hsri_float_of(low));
        for (uint32_t i = 0; i < c->n; i++) {
            uint32_t word = hsri_word_of(c->worth[c->index[i]]);

            c->rivals[n_rivals] = (uint64_t)word << 32 | c->tokens[c->index[i]];
            n_rivals += word <= high;
        }
        bar = find_bar(c->rivals, n_rivals, low, high, &left);
    }
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t k = c->index[i], word = hsri_word_of(c->worth[k]);
        bool     equal = !all && word == bar, fits = c->tokens[k] <= left;

        if (equal)
            left = fits ? left - c->tokens[k] : 0;
        c->index[n] = k;
        n += c->tokens[k] > 0 && (all || (equal ? fits : word > bar));
    }
    c->n = n;
}

static void take_all(contest *c)
{
    for (uint32_t k = 0; k < c->n_all; k++)
        c->index[k] = k;
    c->n = c->n_all;
}

static uint64_t list_items(const select_job *job, const pick_state *p) { return p->n_segments ? job->kv->n_kv_heads : 0; }

/* ---- admit ---- */

static void weigh_families(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    uint64_t        at = (list_segments_at(job, p, kv_head) + segment) * FAMILIES;
    const uint32_t *tokens = job->family_tokens + at;
    float          *worth = job->family_worth + at;

    weigh(job, p, kv_head, segment, &job->families, job->family_mass + (uint64_t)segment * FAMILIES, job->max_segments * FAMILIES, FAMILIES,
          worth);
    for (uint32_t f = 0; f < FAMILIES; f++)
        worth[f] = tokens[f] ? worth[f] / (float)tokens[f] : HSRI_NO_WORTH;
}

static void weigh_families_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    (void)worker;
    run_segments(arg, first, end, family_items, weigh_families);
}

/* Families that are worth most for each token. */
static void admit_best(const select_job *job, const pick_state *p, uint32_t kv_head, uint64_t *left_out)
{
    uint64_t  at = list_segments_at(job, p, kv_head) * FAMILIES, most = job->max_segments * FAMILIES;
    contest   c = contest_of(job, p, kv_head, p->n_segments * FAMILIES, HSRI_SEGMENT_TOKENS / FAMILIES, job->family_work + 4 * at, most);

    c.worth = job->family_worth + at;
    c.tokens = job->family_tokens + at;
    take_best(&c, most_admitted(p));
    memset(left_out, 0xff, p->n_segments * sizeof *left_out);
    for (uint32_t i = 0; i < c.n; i++)
        left_out[c.index[i] / FAMILIES] &= ~(1ull << c.index[i] % FAMILIES);
}

static uint32_t clusters_in(const uint32_t *family_clusters, uint64_t left_out)
{
    uint32_t n = 0;

    for (uint64_t in = ~left_out; in; in &= in - 1)
        n += family_clusters[__builtin_ctzll(in)];
    return n;
}

static void admit_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const select_job *job = arg;

    (void)worker;
    for (uint64_t item = first; item < end; item++) {
        uint64_t          i = item;
        const pick_state *p = find_pick(job, &i, list_items);
        uint64_t          at = list_segments_at(job, p, (uint32_t)i), *left_out = job->left_out + at;
        uint32_t         *surveyed = job->first_surveyed + firsts_at(job, p, (uint32_t)i);

        if (p->all_families)
            memset(left_out, 0, p->n_segments * sizeof *left_out);
        else
            admit_best(job, p, (uint32_t)i, left_out);
        surveyed[0] = 0;
        for (uint32_t segment = 0; segment < p->n_segments; segment++)
            surveyed[segment + 1] = surveyed[segment] + (p->all_families ? CLUSTERS
                                        : clusters_in(job->family_clusters + (at + segment) * FAMILIES, left_out[segment]));
    }
}

/* ---- survey ---- */

/* Masses of the families that are left out, in the measure of the clusters. */
static void add_left_out(const select_job *job, const pick_state *p, uint32_t head, uint32_t segment, uint32_t vote, uint64_t left_out)
{
    uint64_t     at = segments_at(job, p, vote, head) + segment;
    const float *mass = job->family_mass + at * FAMILIES;
    double       rest = (double)job->families.sums[at];

    for (uint64_t in = ~left_out; in; in &= in - 1)
        rest -= (double)mass[__builtin_ctzll(in)];
    if (rest > 0.0 && left_out)
        job->clusters.sums[at] += (float)rest * factor_of(job->families.raised[at], job->clusters.raised[at]);
}

static void write_clusters(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment, uint64_t left_out)
{
    const hsri_cluster_layout layout = hsri_cluster_layout_of(&p->seq->index_shape);
    const uint8_t  *record = record_at(job, p, kv_head, segment);
    const uint16_t *starts = (const uint16_t *)(record + layout.starts);
    uint64_t        at = list_segments_at(job, p, kv_head) * CLUSTERS + job->first_surveyed[firsts_at(job, p, kv_head) + segment];
    uint32_t       *number = job->cluster_number + at, *tokens = job->cluster_tokens + at;

    for (hsri_cluster_run run = { 0 }; hsri_next_run((const uint16_t *)(record + layout.firsts), left_out, &run); ) {
        for (uint32_t k = run.first; k < run.end; k++)
            *number++ = segment * CLUSTERS + k;
        for (uint32_t k = run.first; k < run.end; k++)
            *tokens++ = starts[k + 1] - (uint32_t)starts[k];
    }
}

static void survey_segment(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    const uint32_t *surveyed = job->first_surveyed + firsts_at(job, p, kv_head) + segment;
    uint64_t        left_out = job->left_out[list_segments_at(job, p, kv_head) + segment];

    if (segment + 1 < p->n_segments && !p->all_families)
        fetch_clusters(job, p, kv_head, segment + 1);
    for (uint32_t vote = 0; vote < p->n_votes; vote++) {
        hsri_cluster_score_args a = { .mass_stride = job->max_segments * CLUSTERS, .left_out = left_out };

        a.mass = job->cluster_mass + segments_at(job, p, vote, kv_head * job->heads_per_kv) * CLUSTERS + surveyed[0];
        score_centres(job, p, kv_head, segment, vote, job->dev->kernels.sparse.cluster.score, a, p->all_families ? NULL : &job->families,
                      &job->clusters);
        for (uint32_t h = 0; h < job->heads_per_kv && left_out; h++)
            add_left_out(job, p, kv_head * job->heads_per_kv + h, segment, vote, left_out);
    }
    write_clusters(job, p, kv_head, segment, left_out);
}

static void survey_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    (void)worker;
    run_segments(arg, first, end, survey_items, survey_segment);
}

static void weigh_segment(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    const uint32_t *surveyed = job->first_surveyed + firsts_at(job, p, kv_head) + segment;
    uint64_t        most = job->max_segments * CLUSTERS;

    if (!p->all_clusters)
        weigh(job, p, kv_head, segment, &job->clusters, job->cluster_mass + surveyed[0], most, surveyed[1] - surveyed[0],
              job->cluster_worth + list_at(job, p, kv_head) * most + surveyed[0]);
}

static void weigh_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    (void)worker;
    run_segments(arg, first, end, survey_items, weigh_segment);
}

/* ---- lists ---- */

static uint64_t work_at(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    return 4 * list_segments_at(job, p, kv_head) * CLUSTERS;
}

/* The clusters taken, as numbers among all. */
static uint32_t *taken_at(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    return job->cluster_work + work_at(job, p, kv_head) + 3 * job->max_segments * CLUSTERS;
}

/* Mass of the clusters that are not taken: c->index has those that are, `taken` their numbers. */
static void write_rest(const contest *c, const uint32_t *taken, uint32_t vote, uint32_t head)
{
    double  *rest = c->job->rest + 2 * ((uint64_t)(c->pick->first_vote + vote) * c->job->n_heads + head), sum = 0.0;
    measure  m;

    rest[0] = rest[1] = 0.0;
    if (c->pick->all_clusters)
        return;
    m = measure_segments(c->job, c->pick, &c->job->clusters, vote, head);
    for (uint32_t i = 0; i < c->n; i++)
        sum += (double)(m.mass[c->index[i]] * chunk_factor(&m, taken[i] / CLUSTERS));
    rest[0] = m.all > 0.0 ? m.all - m.exact - sum : 0.0;
    rest[1] = (double)m.top;
}

/* Where the clusters of each segment begin among those taken; their places become those in their segment. */
static void write_firsts(const contest *c, const uint32_t *taken)
{
    uint64_t        at = firsts_at(c->job, c->pick, c->kv_head);
    const uint32_t *surveyed = c->job->first_surveyed + at;
    uint32_t       *first = c->job->first_taken + at, n = 0;

    for (uint32_t segment = 0; segment < c->pick->n_segments; segment++)
        for (first[segment] = n; n < c->n && taken[n] / CLUSTERS == segment; n++)
            c->index[n] -= surveyed[segment];
    first[c->pick->n_segments] = n;
}

static void list_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const select_job *job = arg;

    (void)worker;
    for (uint64_t item = first; item < end; item++) {
        uint64_t          i = item, most = job->max_segments * CLUSTERS;
        const pick_state *p = find_pick(job, &i, list_items);
        uint32_t          kv_head = (uint32_t)i, *work = job->cluster_work + work_at(job, p, kv_head), *taken = taken_at(job, p, kv_head);
        const uint32_t   *numbers = job->cluster_number + list_at(job, p, kv_head) * most;
        const uint32_t    n_all = job->first_surveyed[firsts_at(job, p, kv_head) + p->n_segments];
        contest           c = contest_of(job, p, kv_head, n_all, HSRI_SEGMENT_TOKENS / CLUSTERS, work, most);

        c.worth = job->cluster_worth + list_at(job, p, kv_head) * most;
        c.tokens = job->cluster_tokens + list_at(job, p, kv_head) * most;
        if (p->all_clusters)
            take_all(&c);
        else
            take_best(&c, candidates_of(p));
        for (uint32_t k = 0; k < c.n; k++)
            taken[k] = numbers[c.index[k]];
        for (uint32_t vote = 0; vote < p->n_votes; vote++)
            for (uint32_t h = kv_head * job->heads_per_kv; h < (kv_head + 1) * job->heads_per_kv; h++)
                write_rest(&c, taken, vote, h);
        write_firsts(&c, taken);
    }
}

/* ---- the pages of their tokens ---- */

static uint32_t *marks_at(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    return job->marks + (list_at(job, p, kv_head) * job->max_segments + segment) * HSRI_MARK_WORDS;
}

static uint32_t *listed_at(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    return job->listed + list_at(job, p, kv_head) * (job->max_units / HSRI_PAGE_UNITS);
}

static uint32_t *first_listed_at(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    return job->first_listed + firsts_at(job, p, kv_head);
}

/* Bits of bytes that are 0 or 1. */
static void write_marks(const uint8_t *pages, uint32_t *marks)
{
    memset(marks, 0, HSRI_MARK_WORDS * sizeof *marks);
    for (uint32_t i = 0; i < HSRI_SEGMENT_PAGES; i += 8) {
        uint64_t bytes;

        memcpy(&bytes, pages + i, sizeof bytes);
        marks[i / 32] |= (uint32_t)(bytes * 0x0102040810204080u >> 56) << i % 32;
    }
}

/* Clusters whose tokens' positions are fetched before their turn. */
#define MARK_AHEAD 8u

static void mark_segment(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment)
{
    const hsri_cluster_layout layout = hsri_cluster_layout_of(&p->seq->index_shape);
    const uint8_t  *record = record_at(job, p, kv_head, segment);
    const uint16_t *starts = (const uint16_t *)(record + layout.starts), *positions = (const uint16_t *)(record + layout.positions);
    const uint32_t *taken = job->first_taken + firsts_at(job, p, kv_head) + segment, *clusters = taken_at(job, p, kv_head);
    uint32_t       *marks = marks_at(job, p, kv_head, segment);
    uint8_t         pages[HSRI_SEGMENT_PAGES] = { 0 };  /* not bits: a word that many add to is waited for */

    if (p->all_clusters) {
        memset(marks, 0xff, HSRI_MARK_WORDS * sizeof *marks);
        return;
    }
    for (uint32_t i = taken[0]; i < taken[1]; i++) {
        uint32_t k = clusters[i] % CLUSTERS;

        if (i + MARK_AHEAD < taken[1])
            __builtin_prefetch(positions + starts[clusters[i + MARK_AHEAD] % CLUSTERS]);
        fetch_tokens(record, &layout, k, starts[k], starts[k + 1]);
        for (uint32_t t = starts[k]; t < starts[k + 1]; t++)
            pages[positions[t] / HSRI_PAGE_TOKENS] = 1;
    }
    write_marks(pages, marks);
}

static void mark_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    (void)worker;
    run_segments(arg, first, end, survey_items, mark_segment);
}

static void mark_forced(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    const hsri_sparse *s = p->settings;
    const uint32_t    *forced = s->n_forced ? hsri_cpu_at(job->dev, s->forced, 0) : NULL;

    for (uint32_t i = 0; i < s->n_forced; i++) {
        uint32_t at = forced[((uint64_t)job->layer * job->kv->n_kv_heads + kv_head) * s->n_forced + i] - p->first_page;

        if (at < p->n_segments * HSRI_SEGMENT_PAGES)
            marks_at(job, p, kv_head, at / HSRI_SEGMENT_PAGES)[at % HSRI_SEGMENT_PAGES / 32] |= 1u << at % 32;
    }
}

/* Where the pages of each segment begin in the list. */
static void count_marks(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    uint32_t *first = first_listed_at(job, p, kv_head), n = 0;

    for (uint32_t segment = 0; segment < p->n_segments; segment++) {
        const uint32_t *marks = marks_at(job, p, kv_head, segment);

        first[segment] = n;
        for (uint32_t i = 0; i < HSRI_MARK_WORDS; i++)
            n += (uint32_t)__builtin_popcount(marks[i]);
    }
    first[p->n_segments] = n;
}

page_list hsri_cpu_pages_of(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    page_list l = { .first_page = p->first_page, .n_pages = p->n_pages };

    if (p->n_segments) {
        l.pages = listed_at(job, p, kv_head);
        l.n_clustered = first_listed_at(job, p, kv_head)[p->n_segments];
        l.n_pages = l.n_clustered + p->n_pages - p->n_segments * HSRI_SEGMENT_PAGES;
    }
    if (p->foreseen) {
        l.pages = scan_of(p, kv_head) + 1;
        l.n_pages = scan_of(p, kv_head)[0];
    }
    l.n_chunks = (uint32_t)hsri_div_up(l.n_pages, HSRI_SCORE_PAGES);
    return l;
}

/* Pages behind the segments are all listed. */
static void list_pages(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    uint32_t *listed = listed_at(job, p, kv_head), first = p->n_segments * HSRI_SEGMENT_PAGES;

    mark_forced(job, p, kv_head);
    count_marks(job, p, kv_head);
    listed += first_listed_at(job, p, kv_head)[p->n_segments];
    for (uint32_t i = first; i < p->n_pages; i++)
        listed[i - first] = p->first_page + i;
}

/* For estimates: clusters that compete, and tokens of those that are taken. */
static uint64_t rival_items(const select_job *job, const pick_state *p)
{
    uint64_t n = 0;

    for (uint32_t kv_head = 0; kv_head < job->kv->n_kv_heads && p->n_segments; kv_head++)
        n += job->first_surveyed[firsts_at(job, p, kv_head) + p->n_segments];
    return n;
}

static uint64_t candidate_items(const select_job *job, const pick_state *p)
{
    return p->n_segments && !p->all_clusters ? (uint64_t)job->kv->n_kv_heads * candidates_of(p) : 0;
}

void hsri_cpu_cluster_list(hsri_cpu_device *dev, const select_job *job)
{
    uint64_t n_surveys = all_items(job, survey_items), n_families = all_items(job, family_items), n_lists = all_items(job, list_items);
    uint64_t n_heads = (job->n_picks ? job->picks[0].n_votes : 0) * (uint64_t)job->heads_per_kv;

    hsri_cpu_run_items(dev, n_families, n_families * n_heads * FAMILIES_NS, families_run, job);
    hsri_cpu_run_items(dev, all_items(job, family_share_items), n_families * n_heads * SHARE_NS, family_shares_run, job);
    hsri_cpu_run_items(dev, n_families, n_families * n_heads * WEIGH_FAMILIES_NS, weigh_families_run, job);
    hsri_cpu_run_items(dev, n_lists, n_families * ADMIT_NS, admit_run, job);
    hsri_cpu_run_items(dev, n_surveys, n_surveys * n_heads * SURVEY_NS, survey_run, job);
    hsri_cpu_run_items(dev, all_items(job, cluster_share_items), n_surveys * n_heads * SHARE_NS, cluster_shares_run, job);
    hsri_cpu_run_items(dev, n_surveys, n_surveys * n_heads * WEIGH_NS, weigh_run, job);
    hsri_cpu_run_items(dev, n_lists, all_items(job, rival_items) * LIST_NS, list_run, job);
    hsri_cpu_run_items(dev, n_surveys, n_surveys * MARK_NS + all_items(job, candidate_items) * MARK_TOKEN_NS, mark_run, job);
    for (uint32_t i = 0; i < job->n_picks; i++)
        for (uint32_t kv_head = 0; kv_head < job->kv->n_kv_heads && job->picks[i].n_segments; kv_head++)
            list_pages(job, &job->picks[i], kv_head);
}

/* ---- tokens of the clusters taken ---- */

/* Of one head and n units, from masses in n_places; returns how much the reference was raised. Its clusters have been scored by a reference
 * that may be higher than its own, `raised`, and tokens may need one that is higher still. */
static float members_raised(const select_job *job, hsri_member_score_args a, uint32_t n_places, uint64_t n, float raised)
{
    const hsri_sparse_kernels *kernels = &job->dev->kernels.sparse;
    float cluster_mass[CLUSTERS];

    for (uint32_t i = 0; i < MAX_RAISES && kernels->sum(a.mass, n) >= HSRI_MASS_MAX; i++) {
        raised += RAISE;
        for (uint32_t k = 0; k < n_places; k++)
            cluster_mass[k] = (i ? cluster_mass[k] : a.cluster_mass[k]) * expf(-RAISE);
        a.cluster_mass = cluster_mass;
        kernels->cluster.score_members(&a);
    }
    return raised;
}

_Static_assert(BATCH_VOTES <= HSRI_MEMBER_VOTES, "the votes of a prompt run fit a call");

/* Floats from one vote to the next. */
static hsri_member_votes votes_of(const select_job *job, const pick_state *p)
{
    return (hsri_member_votes){ p->n_votes, (uint64_t)HSRI_PICK_STRIDE * job->n_heads * job->kv->head_dim,
                                job->n_heads * job->max_segments * CLUSTERS, job->n_heads * job->max_units };
}

/* The call for head h of a vote alone. */
static hsri_member_score_args one_head(hsri_member_score_args a, const hsri_member_votes *votes, uint32_t d, uint32_t vote, uint32_t h)
{
    a.n_heads = 1;
    a.rotated += vote * votes->rotated + (uint64_t)h * d;
    a.cluster_mass += vote * votes->cluster_mass + h * a.cluster_stride;
    a.mass += vote * votes->mass + h * a.mass_stride;
    return a;
}

static void score_members(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment, uint32_t first, uint32_t n_heads)
{
    const uint32_t *taken = job->first_taken + firsts_at(job, p, kv_head) + segment;
    const uint32_t *surveyed = job->first_surveyed + firsts_at(job, p, kv_head) + segment;
    const uint32_t *listed = first_listed_at(job, p, kv_head) + segment;
    const uint32_t  head = kv_head * job->heads_per_kv + first;
    const hsri_member_votes votes = votes_of(job, p);
    hsri_member_score_args a = { .record = record_at(job, p, kv_head, segment), .shape = &p->seq->index_shape,
                                 .clusters = taken_at(job, p, kv_head) + taken[0], .n_clusters = taken[1] - taken[0],
                                 .places = job->cluster_work + work_at(job, p, kv_head) + taken[0],
                                 .scale = job->scale, .cluster_stride = job->max_segments * CLUSTERS,
                                 .marks = marks_at(job, p, kv_head, segment), .mass_stride = job->max_units };

    for (uint32_t h0 = 0; h0 < n_heads; h0 += HSRI_ATTEND_MAX_QUERIES) {
        a.n_heads = (uint32_t)hsri_min(HSRI_ATTEND_MAX_QUERIES, n_heads - h0);
        a.rotated = job->rotated + ((uint64_t)p->row * job->n_heads + head + h0) * job->kv->head_dim;
        a.cluster_mass = job->cluster_mass + segments_at(job, p, 0, head + h0) * CLUSTERS + surveyed[0];
        a.mass = job->mass + mass_at(job, p, 0, head + h0) + (uint64_t)listed[0] * HSRI_PAGE_UNITS;
        if (p->n_votes > 1)
            job->dev->kernels.sparse.cluster.score_votes(&a, &votes);
        else
            job->dev->kernels.sparse.cluster.score_members(&a);
        for (uint32_t vote = 0; vote < p->n_votes; vote++)
            for (uint32_t h = 0; h < a.n_heads; h++)
                job->raised[chunk_at(job, p, vote, head + h0 + h) + segment] =
                    members_raised(job, one_head(a, &votes, job->kv->head_dim, vote, h), surveyed[1] - surveyed[0],
                                   (uint64_t)(listed[1] - listed[0]) * HSRI_PAGE_UNITS,
                                   job->clusters.raised[segments_at(job, p, vote, head + h0 + h) + segment]);
    }
}

void hsri_cpu_score_segment(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t segment, uint32_t first,
                            uint32_t n_heads)
{
    const uint32_t *marks = marks_at(job, p, kv_head, segment), page = p->first_page + segment * HSRI_SEGMENT_PAGES;
    uint32_t       *listed = listed_at(job, p, kv_head) + first_listed_at(job, p, kv_head)[segment];

    for (uint32_t i = 0; i < HSRI_MARK_WORDS && first == 0; i++)
        for (uint32_t bits = marks[i]; bits; bits &= bits - 1)
            *listed++ = page + 32 * i + (uint32_t)__builtin_ctz(bits);
    score_members(job, p, kv_head, segment, first, n_heads);
}

/* ---- one measure ---- */

/* Where part i begins among the pages of the list: a segment, or a chunk of the pages behind them. */
static uint32_t part_at(const select_job *job, const pick_state *p, uint32_t kv_head, uint32_t i)
{
    const uint32_t *first = first_listed_at(job, p, kv_head);

    return i <= p->n_segments ? first[i] : first[p->n_segments] + (i - p->n_segments) * HSRI_SCORE_PAGES;
}

static void level_row(const select_job *job, const pick_state *p, uint32_t kv_head, const page_list *l, uint32_t vote, uint32_t head)
{
    float   *mass = job->mass + mass_at(job, p, vote, head), *sums = job->sums + chunk_at(job, p, vote, head);
    float   *raised = job->raised + chunk_at(job, p, vote, head);
    uint32_t n_parts = p->n_segments + p->n_chunks - p->n_segments * SEGMENT_CHUNKS;
    float    top = highest(raised, n_parts);

    for (uint32_t i = 0; i < n_parts; i++) {
        uint64_t end = hsri_min(part_at(job, p, kv_head, i + 1), l->n_pages) * HSRI_PAGE_UNITS;

        for (uint64_t u = part_at(job, p, kv_head, i) * (uint64_t)HSRI_PAGE_UNITS; u < end && raised[i] != top; u++)
            mass[u] *= expf(raised[i] - top);
    }
    for (uint32_t i = 0; i < l->n_chunks; i++) {
        uint64_t first = (uint64_t)i * CHUNK_UNITS;

        raised[i] = top;
        sums[i] = job->dev->kernels.sparse.sum(mass + first, hsri_min(CHUNK_UNITS, (uint64_t)l->n_pages * HSRI_PAGE_UNITS - first));
    }
}

void hsri_cpu_level_masses(const select_job *job, const pick_state *p, uint32_t kv_head)
{
    const page_list l = hsri_cpu_pages_of(job, p, kv_head);

    for (uint32_t vote = 0; vote < p->n_votes; vote++)
        for (uint32_t h = kv_head * job->heads_per_kv; h < (kv_head + 1) * job->heads_per_kv; h++)
            level_row(job, p, kv_head, &l, vote, h);
}

/* ---- tokens of some pages ---- */

/* Clusters that have tokens of these pages of the segment. */
static uint32_t clusters_of(const uint32_t *pages, uint32_t n_pages, const uint8_t *record, const hsri_cluster_layout *at,
                            uint32_t *clusters)
{
    const uint16_t *starts = (const uint16_t *)(record + at->starts), *positions = (const uint16_t *)(record + at->positions);
    bool            listed[HSRI_SEGMENT_PAGES] = { false };
    uint32_t        n = 0;

    for (uint32_t i = 0; i < n_pages; i++)
        listed[pages[i] % HSRI_SEGMENT_PAGES] = true;
    for (uint32_t k = 0; k < CLUSTERS; k++) {
        bool any = false;

        for (uint32_t i = starts[k]; i < starts[k + 1]; i++)
            any |= listed[positions[i] / HSRI_PAGE_TOKENS];
        clusters[n] = k;
        n += any;
    }
    return n;
}

/* Pages of one segment, for one head of the call. A centre whose mass is at the limit says nothing about its tokens: neither do they. */
static void score_pages_of(const select_job *job, const uint32_t *pages, uint32_t n_pages, const uint32_t *clusters, uint32_t n_clusters,
                           const hsri_cluster_score_args *centres, float *mass)
{
    static const uint32_t everywhere[HSRI_MARK_WORDS] = { [0 ... HSRI_MARK_WORDS - 1] = UINT32_MAX };
    float units[HSRI_SEGMENT_UNITS], most = 0.0f;
    const hsri_member_score_args members = { .record = centres->record, .shape = centres->shape, .clusters = clusters,
                                             .places = clusters, .n_clusters = n_clusters, .n_heads = 1, .scale = centres->scale,
                                             .rotated = centres->rotated, .cluster_mass = centres->mass, .marks = everywhere,
                                             .mass = units };

    job->dev->kernels.sparse.cluster.score(centres);
    job->dev->kernels.sparse.cluster.score_members(&members);
    for (uint32_t i = 0; i < n_clusters; i++)
        most = centres->mass[clusters[i]] > most ? centres->mass[clusters[i]] : most;
    for (uint32_t i = 0; i < n_pages * HSRI_PAGE_UNITS; i++)
        mass[i] = most < HSRI_MASS_MAX ? units[pages[i / HSRI_PAGE_UNITS] % HSRI_SEGMENT_PAGES * HSRI_PAGE_UNITS + i % HSRI_PAGE_UNITS]
                                       : HSRI_MASS_MAX;
}

void hsri_cpu_score_recorded(const select_job *job, const chunk *c, const hsri_score_args *a)
{
    const hsri_cluster_layout at = hsri_cluster_layout_of(a->shape);
    uint32_t                  clusters[CLUSTERS], n;
    float                     cluster_mass[CLUSTERS], sum;

    for (uint32_t i = 0, end; i < c->n_recorded; i = end) {
        const uint32_t segment = c->pages[i] / HSRI_SEGMENT_PAGES;
        const uint8_t *record = record_at(job, c->pick, c->kv_head, segment);

        for (end = i + 1; end < c->n_recorded && c->pages[end] / HSRI_SEGMENT_PAGES == segment; end++)
            ;
        n = clusters_of(c->pages + i, end - i, record, &at, clusters);
        for (uint32_t h = 0; h < a->n_heads; h++) {
            const uint64_t head = (uint64_t)h * a->shape->head_dim;
            const hsri_cluster_score_args centres = { .record = record, .shape = a->shape, .n_heads = 1, .scale = a->scale,
                                                      .queries = a->queries + head, .rotated = a->rotated + head,
                                                      .reference = a->reference + h, .mass = cluster_mass, .sums = &sum };

            score_pages_of(job, c->pages + i, end - i, clusters, n, &centres, a->mass + h * a->mass_stride + i * HSRI_PAGE_UNITS);
        }
    }
}
