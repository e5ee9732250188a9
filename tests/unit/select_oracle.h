/* SPDX-License-Identifier: Apache-2.0 */
/* What a selection should be, computed in double precision from the index entries and cluster records. */
#ifndef HSR_TESTS_SELECT_ORACLE_H
#define HSR_TESTS_SELECT_ORACLE_H

#include "select_world.h"

static inline bool near(double got, double want, double tolerance)
{
    if (fabs(got - want) <= tolerance || (isnan(got) && isnan(want)) || got == want)
        return true;
    fprintf(stderr, "got %.9g, want %.9g within %.3g\n", got, want, tolerance);
    return false;
}

static inline double log_mass(const world *w, uint32_t seq, uint32_t kv_head, uint32_t unit, uint64_t query)
{
    uint32_t       d = w->d, selector = w->settings[seq].selector;
    const float   *q = w->queries + query * d;
    double         sum = 0;

    if (selector != HSRI_SELECT_ORACLE) {
        if (selector == HSRI_SELECT_CLUSTER)
            selector = HSRI_SELECT_SKETCH;
        if (selector != HSRI_SELECT_SKETCH && selector != HSRI_SELECT_MINMAX && selector != HSRI_SELECT_GAUSSIAN)
            selector = HSRI_SELECT_MEAN;
        return unit_log_mass(&w->shape, entry_of(w, seq, kv_head, unit / 4), codes_of(w, seq, kv_head, unit / 4), record_of(w, kv_head),
                             selector, unit % 4, q, w->rotated + query * d, (double)w->scale);
    }
    float *v = malloc(64 * d * sizeof *v), *k = key_values(w, seq, kv_head, unit / 4, v);

    for (uint32_t t = unit % 4 * 16; t < unit % 4 * 16 + 16; t++) {
        double logit = 0;

        for (uint32_t j = 0; j < d; j++)
            logit += (double)q[j] * (double)k[t * d + j];
        sum += exp((double)w->scale * logit);
    }
    free(k);
    free(v);
    return log(sum);
}

/* ---- clusters ---- */

/* What the clusters leave of a list: of each voting head the logs of the masses of the segments' units, of their tokens that are looked at,
 * and of the other clusters' centres. Masses of clusters are the kernel's own, which test_cluster.c looks at. */
typedef struct candidates {
    uint32_t  n_units;     /* of whole segments */
    double   *mass;        /* [votes][heads of the group][units] */
    double   *rest;        /* [votes][heads of the group] */
} candidates;

static const double *cluster_worth;

static inline int by_worth(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return cluster_worth[x] != cluster_worth[y] ? (cluster_worth[x] < cluster_worth[y] ? 1 : -1) : (x > y) - (x < y);
}

static inline const uint8_t *cluster_record(const world *w, uint32_t seq, uint32_t kv_head, uint32_t segment)
{
    uint32_t entry = w->records[seq][(segment * LAYERS + LAYER) * KV_HEADS + kv_head];

    return w->pool + (uint64_t)(entry >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(entry & 255) * hsri_cluster_slot_bytes(&w->shape);
}

/* Dot product of a query with a token of cluster k, as the record has it. */
static inline double member_logit(const world *w, const uint8_t *record, uint32_t k, uint32_t token, uint64_t query)
{
    const hsri_cluster_layout at = hsri_cluster_layout_of(&w->shape);
    const float *mean = (const float *)(record + at.mean), *scales = (const float *)(record + at.scales);
    const float *token_scales = (const float *)(record + at.token_scales);
    double       logit = 0;

    for (uint32_t j = 0; j < w->d; j++)
        logit += (double)w->queries[query * w->d + j] * (double)mean[j];
    for (uint32_t c = 0; c < at.n; c++) {
        uint32_t shift = c % 8 / 4 * 4, byte = c % 4;
        int      centre = record[at.codes + (k / 16 * (at.n / 8) + c / 8) * 64 + k % 16 * 4 + byte] >> shift & 15;
        int      off = record[at.tokens + (c / 8 * HSRI_SEGMENT_TOKENS + token) * 4 + byte] >> shift & 15;

        logit += (double)w->rotated[query * w->d + c] *
                 ((centre - 7.5) * (double)scales[c] + (off - 7.5) * (double)token_scales[c] * record[at.spreads + k]);
    }
    return logit;
}

static inline bool takes_all(const hsri_sparse *s, uint32_t n_pages)
{
    return s->selector == HSRI_SELECT_SKETCH || s->budget_units >= n_pages * HSRI_PAGE_UNITS ||
           s->candidates >= n_pages / HSRI_SEGMENT_PAGES * HSRI_SEGMENT_TOKENS;
}

/* How many tokens admitted families may have: 32 for each candidate, of prompt runs 8. */
static inline uint64_t most_admitted(const world *w, const hsri_pick *p)
{
    return (p->n_rows > 1 ? 8ull : 32ull) * w->settings[w->rows[p->row].seq].candidates;
}

static inline bool takes_all_families(const world *w, const hsri_pick *p, uint32_t n_pages)
{
    return takes_all(&w->settings[w->rows[p->row].seq], n_pages) ||
           most_admitted(w, p) >= n_pages / HSRI_SEGMENT_PAGES * HSRI_SEGMENT_TOKENS;
}

/* Which families are admitted: those that are worth most for each token. Of each head, *rest gets the masses of the others. */
static inline void find_families(const world *w, const hsri_kernels *kernels, uint32_t pick, uint32_t kv_head, uint32_t n_segments,
                                 bool *in, double *rest)
{
    const hsri_pick *p = &w->picks[pick];
    uint32_t   seq = w->rows[p->row].seq, g = group_of(w), d = w->d, n = n_segments * HSRI_SEGMENT_FAMILIES;
    uint64_t   left = most_admitted(w, p);
    hsri_cluster_layout at = hsri_cluster_layout_of(&w->shape);
    float     *mass = calloc((uint64_t)HSRI_PICK_ROWS * g * n, sizeof *mass);
    double    *worth = calloc(n, sizeof *worth);
    uint32_t  *order = malloc(n * sizeof *order), *tokens = malloc(n * sizeof *tokens);

    for (uint32_t f = 0; f < n; f++) {
        const uint16_t *starts = (const uint16_t *)(cluster_record(w, seq, kv_head, f / HSRI_SEGMENT_FAMILIES) + at.family_starts);

        tokens[f] = starts[f % HSRI_SEGMENT_FAMILIES + 1] - starts[f % HSRI_SEGMENT_FAMILIES];
        order[f] = f;
    }
    for (uint32_t i = 0; i < p->n_rows * g; i++) {
        uint64_t     query = (uint64_t)(p->row + i / g) * w->n_heads + kv_head * g + i % g;
        const float *acc = w->acc + query * (d + 2);
        float        reference = acc[0] + logf(acc[1]), sum;
        double       all = 1;

        for (uint32_t segment = 0; segment < n_segments && i / g % HSRI_PICK_STRIDE == 0; segment++)
            kernels->sparse.cluster.score_families(&(hsri_cluster_score_args){ cluster_record(w, seq, kv_head, segment), &w->shape, 1,
                                                       w->scale, w->queries + query * d, w->rotated + query * d, &reference,
                                                       mass + i * n + segment * HSRI_SEGMENT_FAMILIES, 0, &sum, 0 });
        for (uint32_t f = 0; f < n; f++)
            all += (double)mass[i * n + f];
        for (uint32_t f = 0; f < n; f++)
            worth[f] += tokens[f] ? (double)mass[i * n + f] / all / tokens[f] : 0;
    }
    cluster_worth = worth;
    qsort(order, n, sizeof *order, by_worth);
    for (uint32_t o = 0; o < n && tokens[order[o]] <= left; o++) {
        in[order[o]] = true;
        left -= tokens[order[o]];
    }
    for (uint32_t f = 0; f < n; f++)
        for (uint32_t i = 0; i < p->n_rows * g && !in[f]; i++)
            rest[i] += (double)mass[i * n + f];
    free(mass);
    free(worth);
    free(order);
    free(tokens);
}

/* Of a segment's families, a bit for each that is not admitted, if the candidates do not allow for all. */
static inline uint64_t left_out_of(const world *w, const hsri_pick *p, uint32_t n_pages, const bool *in, uint32_t segment)
{
    uint64_t bits = 0;

    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++)
        bits |= in[segment * HSRI_SEGMENT_FAMILIES + f] ? 0 : 1ull << f;
    return takes_all_families(w, p, n_pages) ? 0 : bits;
}

/* Masses of a segment's clusters, which are 0 where their families are left out. */
static inline void score_segment(const hsri_kernels *kernels, hsri_cluster_score_args a, const uint16_t *firsts, float *mass)
{
    float    some[HSRI_SEGMENT_CLUSTERS], sum;
    uint32_t n = 0;

    a.mass = some;
    a.sums = &sum;
    kernels->sparse.cluster.score(&a);
    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++)
        for (uint32_t k = firsts[f]; k < firsts[f + 1]; k++)
            mass[k] = a.left_out >> f & 1 ? 0.0f : some[n++];
}

static inline candidates find_candidates(const world *w, const hsri_kernels *kernels, uint32_t pick, uint32_t kv_head)
{
    const hsri_pick *p = &w->picks[pick];
    uint32_t   seq = w->rows[p->row].seq, n_pages = sealed_pages(w, w->rows[p->row].pos) - w->sink,
               n_segments = n_pages / HSRI_SEGMENT_PAGES;
    uint32_t   n = n_segments * HSRI_SEGMENT_CLUSTERS, g = group_of(w), d = w->d;
    uint32_t   left = takes_all(&w->settings[seq], n_pages) ? UINT32_MAX : w->settings[seq].candidates;
    hsri_cluster_layout at = hsri_cluster_layout_of(&w->shape);
    float     *mass = malloc(HSRI_PICK_ROWS * g * n * sizeof *mass);
    double    *worth = calloc(n, sizeof *worth), *all = calloc(HSRI_PICK_ROWS * g, sizeof *all);
    uint32_t  *order = malloc(n * sizeof *order);
    bool      *families = calloc(n_segments * HSRI_SEGMENT_FAMILIES, 1);
    uint32_t   n_units = n_segments * HSRI_SEGMENT_PAGES * HSRI_PAGE_UNITS;
    candidates c = { n_units, calloc((uint64_t)HSRI_PICK_ROWS * g * n_units, sizeof *c.mass), calloc(HSRI_PICK_ROWS * g, sizeof *c.rest) };

    if (!takes_all_families(w, p, n_pages))
        find_families(w, kernels, pick, kv_head, n_segments, families, all);
    for (uint32_t i = 0; i < p->n_rows * g; i++) {
        uint64_t     query = (uint64_t)(p->row + i / g) * w->n_heads + kv_head * g + i % g;
        const float *acc = w->acc + query * (d + 2);
        float        reference = acc[0] + logf(acc[1]);

        for (uint32_t segment = 0; segment < n_segments && i / g % HSRI_PICK_STRIDE == 0; segment++) {
            const uint8_t *record = cluster_record(w, seq, kv_head, segment);

            score_segment(kernels, (hsri_cluster_score_args){ .record = record, .shape = &w->shape, .n_heads = 1, .scale = w->scale,
                                                              .queries = w->queries + query * d, .rotated = w->rotated + query * d,
                                                              .reference = &reference,
                                                              .left_out = left_out_of(w, p, n_pages, families, segment) },
                          (const uint16_t *)(record + at.firsts), mass + i * n + segment * HSRI_SEGMENT_CLUSTERS);
        }
        all[i] += 1;
        for (uint32_t k = 0; k < n && i / g % HSRI_PICK_STRIDE == 0; k++)
            all[i] += (double)mass[i * n + k];
        for (uint32_t k = 0; k < n && i / g % HSRI_PICK_STRIDE == 0; k++)
            worth[k] += (double)mass[i * n + k] / all[i];
        c.rest[i] = all[i] - 1;
    }
    for (uint32_t k = 0; k < n; k++)
        order[k] = k;
    cluster_worth = worth;
    qsort(order, n, sizeof *order, by_worth);
    for (uint32_t o = 0; o < n; o++) {
        uint32_t        k = order[o], segment = k / HSRI_SEGMENT_CLUSTERS;
        const uint16_t *starts = (const uint16_t *)(cluster_record(w, seq, kv_head, segment) + at.starts) + k % HSRI_SEGMENT_CLUSTERS;
        const uint16_t *positions = (const uint16_t *)(cluster_record(w, seq, kv_head, segment) + at.positions);

        if ((uint32_t)(starts[1] - starts[0]) > left || (worth[k] <= 0 && left != UINT32_MAX))
            break;
        left -= (uint32_t)(starts[1] - starts[0]);
        for (uint32_t i = 0; i < p->n_rows * g; i++)
            for (uint32_t j = starts[0]; j < starts[1] && i / g % HSRI_PICK_STRIDE == 0; j++)
                c.mass[i * n_units + segment * HSRI_SEGMENT_TOKENS / 16 + positions[j] / 16] +=
                    exp((double)w->scale * member_logit(w, cluster_record(w, seq, kv_head, segment), k % HSRI_SEGMENT_CLUSTERS, j,
                                                        (uint64_t)(p->row + i / g) * w->n_heads + kv_head * g + i % g));
        for (uint32_t i = 0; i < p->n_rows * g; i++)
            c.rest[i] -= i / g % HSRI_PICK_STRIDE == 0 ? (double)mass[i * n + k] : 0;
    }
    for (uint32_t i = 0; i < p->n_rows * g; i++) {
        const float *acc = w->acc + ((uint64_t)(p->row + i / g) * w->n_heads + kv_head * g + i % g) * (d + 2);

        c.rest[i] = log(fmax(c.rest[i], 1e-300)) + (double)acc[0] + log((double)acc[1]);
        for (uint32_t u = 0; u < n_units; u++)
            c.mass[i * n_units + u] = log(c.mass[i * n_units + u]);
    }
    free(mass);
    free(worth);
    free(all);
    free(order);
    free(families);
    return c;
}

/* A list, and what it should be. Units are counted from the first page behind the sink. */
typedef struct listing {
    const hsri_pick   *pick;
    const hsri_sparse *settings;
    uint32_t   seq, kv_head, first, end, n_units, count, n_forced;
    bool      *chosen, *forced;    /* [n_units] */
    double    *mass;               /* [n_units], of the query that is looked at, relative to the largest */
    double    *worth;              /* [n_units], over all voting queries */
    candidates found;
} listing;

/* Which units were chosen; false if the list is no list of units in order. */
static inline bool read_list(const world *w, const uint32_t *units, listing *l)
{
    for (uint32_t i = 0; i < l->count; i++) {
        if (units[i] < l->first * 4 || units[i] >= l->end * 4 || (i > 0 && units[i] <= units[i - 1]))
            return false;
        l->chosen[units[i] - l->first * 4] = true;
    }
    return l->count <= w->stride;
}

static inline void check_forced(const world *w, listing *l)
{
    for (uint32_t i = 0; i < l->settings->n_forced; i++) {
        uint32_t page = w->forced[l->seq][(LAYER * KV_HEADS + l->kv_head) * l->settings->n_forced + i];

        for (uint32_t u = 0; u < 4 && page >= l->first && page < l->end; u++) {
            CHECK(l->chosen[(page - l->first) * 4 + u] || w->aside);
            l->n_forced += !l->forced[(page - l->first) * 4 + u];
            l->forced[(page - l->first) * 4 + u] = true;
        }
    }
}

/* The virtual part of a query: mass and mean value of what was not chosen. */
static inline void check_virtual(const world *w, const listing *l, const float *part, double left, double top, double tolerance)
{
    double *sum = calloc(w->d, sizeof *sum);

    for (uint32_t u = 0; u < l->n_units; u++) {
        const uint8_t *entry = entry_of(w, l->seq, l->kv_head, l->first + u / 4);

        for (uint32_t j = 0; j < w->d && !l->chosen[u]; j++)
            sum[j] += l->mass[u] * mean_value(&w->shape, entry, record_of(w, l->kv_head) + 2 * w->d * w->d + w->d, j);
    }
    for (uint32_t j = 0; j < w->d; j++)
        CHECK(near((double)part[2 + j] / (double)part[1], sum[j] / left, 4 * tolerance));
    free(sum);
    CHECK(near((double)part[0] + log((double)part[1]), top + log(left), 3 * tolerance));
}

/* Rows behind a vote have its virtual tokens, in proportion to what they read exactly. */
static inline void check_followers(const world *w, const result *r, const listing *l, uint32_t vote, uint32_t h)
{
    const uint64_t query = (uint64_t)(l->pick->row + vote) * w->n_heads + h, width = w->d + 2;
    const float   *part = r->virtual_part + query * width, *acc = w->acc + query * width;

    for (uint32_t i = 1; i < HSRI_PICK_STRIDE && vote + i < l->pick->n_rows; i++) {
        const float *next = part + i * w->n_heads * width, *exact = acc + i * w->n_heads * width;

        CHECK(near((double)(next[0] - exact[0]) - log((double)exact[1]), (double)(part[0] - acc[0]) - log((double)acc[1]), 1e-4));
        CHECK(memcmp(next + 1, part + 1, (width - 1) * sizeof *next) == 0);
    }
}

/* What head h of voting row `vote` makes of the list. */
static inline void check_query(const world *w, const result *r, listing *l, uint32_t vote, uint32_t h, double tolerance)
{
    const uint64_t    query = (uint64_t)(l->pick->row + vote) * w->n_heads + h;
    const uint32_t    g = group_of(w);
    const float      *acc = w->acc + query * (w->d + 2), *part = r->virtual_part + query * (w->d + 2);
    const candidates *found = &l->found;
    double            exact = (double)acc[0] + log((double)acc[1]), top = exact, all, seen, left = 0;

    for (uint32_t u = 0; u < l->n_units; u++) {
        l->mass[u] = u < found->n_units ? found->mass[(vote * g + h % g) * found->n_units + u]
                                        : log_mass(w, l->seq, l->kv_head, l->first * 4 + u, query);
        top = fmax(top, l->mass[u]);
    }
    all = seen = exp(exact - top);
    for (uint32_t u = 0; u < l->n_units; u++) {
        l->mass[u] = exp(l->mass[u] - top);
        all += l->mass[u];
        *(l->chosen[u] ? &seen : &left) += l->mass[u];
    }
    for (uint32_t u = 0; u < l->n_units; u++) {
        l->worth[u] += l->mass[u] / all;
        CHECK(!l->chosen[u] || l->forced[u] || l->mass[u] > 0 || u >= found->n_units || l->settings->slice_units > 1 || w->reach > 100);
    }
    if (found->rest)
        all += exp(found->rest[vote * g + h % g] - top);
    if (found->n_units && w->reach > 100) {
        /* Masses at their limit: which clusters are taken is not retold here. */
        CHECK(r->covered[query] >= 0.0f && r->covered[query] <= 1.0f);
        return;
    }
    CHECK(near((double)r->covered[query], seen / all, tolerance));
    if ((l->settings->flags & HSRI_SPARSE_VIRTUAL) && l->settings->selector != HSRI_SELECT_MINMAX && left > 1e-20 * all) {
        check_virtual(w, l, part, left, top, tolerance);
        check_followers(w, r, l, vote, h);
    } else if (left <= 0 || part[1] == 0.0f)
        CHECK(part[0] == -INFINITY && part[1] == 0.0f && part[2] == 0.0f);
}

static inline void check_count(const listing *l)
{
    const hsri_sparse *s = l->settings;
    uint64_t           budget = s->budget_units;

    if (s->ratio > 0)
        budget = hsri_max(budget, (uint64_t)ceil((double)s->ratio * l->n_units));
    if (s->selector == HSRI_SELECT_HISTORY)
        budget = 0;
    if (s->selector == HSRI_SELECT_CLASSIC)
        budget = hsri_min(budget, s->top_fine * s->fine_units);
    if (budget >= l->n_units)
        CHECK(l->count == l->n_units);
    else if (s->n_forced == 0)
        CHECK(l->count == budget / s->slice_units * s->slice_units);
    else
        CHECK(l->count <= budget + l->n_forced && l->count > l->n_forced - 1);
}

/* Slices are chosen whole, and none that was left is worth more than one that was chosen. */
static inline void check_choice(const world *w, const listing *l, double tolerance)
{
    double least = INFINITY, most = -1;

    for (uint32_t u = 0; u < l->n_units; u += l->settings->slice_units) {
        double slice = 0;

        for (uint32_t i = u; i < u + l->settings->slice_units; i++) {
            CHECK(l->chosen[i] == l->chosen[u]);
            slice += l->worth[i];
        }
        if (l->chosen[u] && !l->forced[u])
            least = fmin(least, slice);
        if (!l->chosen[u])
            most = fmax(most, slice);
    }
    CHECK(w->reach > 100 || most < 1e-20 || least > most * (1 - tolerance));
}

/* Worth of the coarse block of pages [from, to): what all its tokens would have at the mean of their pages' logits. */
static inline double coarse_worth(const world *w, const listing *l, uint32_t from, uint32_t to)
{
    double worth = 0;

    from = (uint32_t)hsri_max(from, l->first);
    to = (uint32_t)hsri_min(to, l->end);
    for (uint32_t h = l->kv_head * group_of(w); h < (l->kv_head + 1) * group_of(w); h++) {
        const uint64_t query = (uint64_t)l->pick->row * w->n_heads + h;
        const float   *acc = w->acc + query * (w->d + 2);
        const double   exact = (double)acc[0] + log((double)acc[1]);
        double         mean = 0, all = 1;

        for (uint32_t page = l->first; page < l->end; page++) {
            const double mass = log_mass(w, l->seq, l->kv_head, page * 4, query) - exact;

            all += 4 * exp(mass);
            mean += page >= from && page < to ? mass / (to - from) : 0;
        }
        worth += 4 * (to - from) * exp(mean) / all;
    }
    return worth;
}

/* The classic rule in its two steps: outside the best coarse blocks, which are counted from the sequence's first page, nothing has worth;
 * then check_choice. */
static inline void check_classic(const world *w, listing *l, double tolerance)
{
    const uint32_t size = l->settings->coarse_pages, first = l->first / size, n_blocks = (uint32_t)hsri_div_up(l->end, size) - first;
    double        *worth = calloc(n_blocks, sizeof *worth);

    for (uint32_t b = 0; b < n_blocks; b++)
        worth[b] = coarse_worth(w, l, (first + b) * size, (first + b + 1) * size);
    for (uint32_t u = 0; u < l->n_units; u++) {
        uint32_t n_better = 0;

        for (uint32_t b = 0; b < n_blocks; b++)
            n_better += worth[b] > worth[(l->first + u / 4) / size - first];
        if (n_better >= l->settings->top_coarse)
            l->worth[u] = 0;
    }
    free(worth);
    check_choice(w, l, tolerance);
}

/* Everything about one list. */
static inline void check_list(const world *w, const hsri_kernels *kernels, const result *r, uint32_t pick, uint32_t kv_head,
                              double tolerance)
{
    const hsri_pick *p = &w->picks[pick];
    const uint32_t   list = pick * KV_HEADS + kv_head, end = sealed_pages(w, w->rows[p->row].pos), seq = w->rows[p->row].seq;
    const uint32_t   n_pages = end > w->sink ? end - w->sink : 0, selector = w->settings[seq].selector;
    listing l = { .pick = p, .settings = &w->settings[seq], .seq = seq, .kv_head = kv_head, .first = w->sink, .end = end,
                  .n_units = n_pages * 4, .count = r->counts[list],
                  .chosen = calloc(n_pages * 4 + 1, 1), .forced = calloc(n_pages * 4 + 1, 1),
                  .mass = calloc(n_pages * 4 + 1, sizeof(double)), .worth = calloc(n_pages * 4 + 1, sizeof(double)) };

    if (CHECK(read_list(w, r->units + (uint64_t)list * w->stride, &l))) {
        check_forced(w, &l);
        if ((selector == HSRI_SELECT_CLUSTER || selector == HSRI_SELECT_SKETCH) && w->shape.clusters && n_pages >= HSRI_SEGMENT_PAGES)
            l.found = find_candidates(w, kernels, pick, kv_head);
        for (uint32_t vote = 0; vote < p->n_rows; vote += HSRI_PICK_STRIDE)
            for (uint32_t h = kv_head * group_of(w); h < (kv_head + 1) * group_of(w); h++)
                check_query(w, r, &l, vote, h, tolerance);
        if (!w->aside) {       /* which ones were chosen is the same without */
            check_count(&l);
            if (selector == HSRI_SELECT_CLASSIC)
                check_classic(w, &l, tolerance);
            else if (selector <= HSRI_SELECT_CLUSTER)
                check_choice(w, &l, tolerance);
        }
    }
    free(l.found.mass);
    free(l.found.rest);
    free(l.worth);
    free(l.mass);
    free(l.chosen);
    free(l.forced);
}

static inline void check_rotated(const world *w, const result *r)
{
    for (uint32_t i = 0; i < w->n_rows * w->n_heads; i++) {
        const float *b = record_of(w, i % w->n_heads / group_of(w)) + w->d * w->d;

        for (uint32_t c = 0; c < w->d; c++) {
            double want = 0;

            for (uint32_t j = 0; j < w->d; j++)
                want += (double)w->queries[i * w->d + j] * (double)b[j * w->d + c];
            if (!near((double)r->rotated[i * w->d + c], want, 1e-6 * w->d * fmax(1, (double)w->reach))) {
                CHECK(false);
                return;
            }
        }
    }
}

static inline bool same(const world *w, const result *a, uint32_t pick_a, const result *b, uint32_t n_picks)
{
    uint32_t row = w->picks[pick_a].row, n_rows = w->picks[pick_a + n_picks - 1].row + w->picks[pick_a + n_picks - 1].n_rows - row;
    bool     ok = true;

    for (uint32_t i = 0; i < n_picks * KV_HEADS; i++) {
        uint32_t list = pick_a * KV_HEADS + i;

        ok &= a->counts[list] == b->counts[i] && memcmp(a->units + list * w->stride, b->units + i * w->stride,
                                                        b->counts[i] * sizeof(uint32_t)) == 0;
    }
    ok &= memcmp(a->virtual_part + row * w->n_heads * (w->d + 2), b->virtual_part, n_rows * w->n_heads * (w->d + 2) * sizeof(float)) == 0;
    ok &= memcmp(a->covered + row * w->n_heads, b->covered, n_rows * w->n_heads * sizeof(float)) == 0;
    return ok && memcmp(a->rotated + row * w->n_heads * w->d, b->rotated, n_rows * w->n_heads * w->d * sizeof(float)) == 0;
}

#endif
