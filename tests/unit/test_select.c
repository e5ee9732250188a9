/* SPDX-License-Identifier: Apache-2.0 */
/* The operations `rotate`, `select`, `set_aside` and `foresee` against a plain computation in double precision; and the same bytes from
 * every number of threads, from the lagging debug back end, and for rows alone or in company: test_select [SCENARIO]. */
#include "select_oracle.h"

/* ---- scenarios ---- */

#define SKETCH24 HSRI_INDEX_SKETCH, 64, 24, 0
#define VIRTUAL HSRI_SPARSE_VIRTUAL

static const scenario scenarios[] = {
    { "sketch", SKETCH24, 14, 1, 2, HSRI_SELECT_SKETCH, 1, 40, 0, VIRTUAL, 0, { 6500, 3000, 9001, 130 }, 0, 5, 0 },
    { "sketch, slices of 2, forced", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 2, 33, 4, VIRTUAL, 0, { 6500, 3000, 9001 }, 0, 3, 0 },
    { "sketch, whole pages, no sink", SKETCH24, 4, 0, 1, HSRI_SELECT_SKETCH, 4, 24, 4, VIRTUAL, 0, { 6463, 64, 127, 63 }, 0, 3, 0 },
    { "sketch, ratio", HSRI_INDEX_SKETCH, 128, 16, 48, 6, 2, 3, HSRI_SELECT_SKETCH, 1, 3, 0, VIRTUAL, 0, { 4000, 1 }, 0.1f, 3, 0 },
    { "sketch, everything", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 600, 4, VIRTUAL, 0, { 6500, 3000, 256, 255 }, 0, 3, 0 },
    { "sketch, far logits", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 40, 0, VIRTUAL, 0, { 6500, 3000 }, 0, 400, 0 },
    { "sketch, a prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 64, 4, VIRTUAL, 1, { 4096 }, 0, 3, 0 },
    { "cluster without clusters", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 3000 }, 0, 3, 0 },
    { "cluster, short", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 3000 }, 0, 3, 1000 },
    { "cluster", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 18000, 9000, 3000 }, 0, 3, 1000 },
    { "cluster, forced, slices of 2", HSRI_INDEX_SKETCH, 32, 8, 16, 14, 2, 3, HSRI_SELECT_CLUSTER, 2, 40, 4,
      VIRTUAL, 0, { 17500, 8200 }, 0, 3, 2000 },
    { "cluster, prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 1, { 128 * 80 }, 0, 3, 1500 },
    { "cluster, families", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 18000, 9000, 3000 }, 0, 3, 300 },
    { "cluster, few families, forced", HSRI_INDEX_SKETCH, 32, 8, 16, 14, 2, 3, HSRI_SELECT_CLUSTER, 2, 8, 4,
      VIRTUAL, 0, { 17500, 8300 }, 0, 3, 60 },
    { "cluster, families, prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 1, { 128 * 135 }, 0, 3, 200 },
    { "cluster, families, beyond range", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 18000 }, 0, 400, 500 },
    { "cluster, beyond range", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 12000 }, 0, 400, 1000 },
    { "cluster, beyond range, prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 1, { 128 * 80 }, 0, 400, 1500 },
    { "cluster, everything", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 600, 0, VIRTUAL, 0, { 9000 }, 0, 3, 1000 },
    { "sketch over clusters", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 40, 4, VIRTUAL, 0, { 18000, 9000, 3000 }, 0, 3, 1 },
    { "sketch over clusters, prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 40, 0, VIRTUAL, 1, { 128 * 80 }, 0, 3, 1 },
    { "mean", SKETCH24, 6, 1, 2, HSRI_SELECT_MEAN, 4, 40, 0, VIRTUAL, 0, { 6500 }, 0, 3, 0 },
    { "mean, ties", HSRI_INDEX_MINMAX, 20, 0, 0, 6, 1, 2, HSRI_SELECT_MEAN, 1, 42, 0, VIRTUAL, 0, { 3000 }, 0, 3, 0 },
    { "classic", HSRI_INDEX_GAUSSIAN, 64, 0, 0, 6, 1, 2, HSRI_SELECT_CLASSIC, 4, 40, 0, 0, 0, { 6500 }, 0, 3, 0 },
    { "minmax", HSRI_INDEX_MINMAX, 40, 0, 0, 4, 1, 2, HSRI_SELECT_MINMAX, 1, 40, 4, VIRTUAL, 0, { 6500, 200 }, 0, 3, 0 },
    { "gaussian", HSRI_INDEX_GAUSSIAN, 16, 0, 0, 2, 1, 2, HSRI_SELECT_GAUSSIAN, 4, 40, 4, VIRTUAL, 0, { 6500, 200 }, 0, 3, 0 },
    { "random", HSRI_INDEX_GAUSSIAN, 16, 0, 0, 2, 1, 2, HSRI_SELECT_RANDOM, 2, 40, 0, VIRTUAL, 0, { 6500, 700 }, 0, 3, 0 },
    { "history", HSRI_INDEX_GAUSSIAN, 16, 0, 0, 2, 1, 2, HSRI_SELECT_HISTORY, 1, 40, 4, VIRTUAL, 0, { 6500 }, 0, 3, 0 },
    { "oracle", HSRI_INDEX_SKETCH, 32, 16, 0, 4, 1, 2, HSRI_SELECT_ORACLE, 1, 40, 4, VIRTUAL, 0, { 3000, 200 }, 0, 3, 0 },
};

/* A scenario's world at one level of instructions, on devices with several threads and with none of their own, at once and later. */
typedef struct fixture {
    const scenario *s;
    world       *w;
    hsri_kernels kernels;
    double       tolerance;  /* of logs of masses and of shares: from AVX-512 on, kernels multiply sketches by weights of eight bits */
    rig          one, others[3];
    uint32_t     n_others;
    result       all;        /* what all rows together select */
} fixture;

static fixture fixture_open(const scenario *s, world *w, int32_t isa)
{
    const bool sketches = s->selector == HSRI_SELECT_SKETCH || s->selector == HSRI_SELECT_CLUSTER;
    fixture f = { s, w, .tolerance = sketches && isa >= HSR_ISA_AVX2 ? 0.05 : 2e-3,
                  .one = rig_open(1, isa, false), .others = { rig_open(3, isa, true) }, .n_others = 1 };

    hsri_kernels_fill(&f.kernels, isa);
    if (!CHECK_SANITIZED) {
        f.others[f.n_others++] = rig_open(4, isa, false);
        f.others[f.n_others++] = rig_open(1, isa, true);
    }
    load_world(&f.one, w);
    for (uint32_t i = 0; i < f.n_others; i++)
        load_world(&f.others[i], w);
    f.all = run_select(&f.one, w, 0, w->n_picks);
    memcpy(w->rotated, f.all.rotated, w->n_rows * w->n_heads * w->d * sizeof(float));
    return f;
}

static void fixture_close(fixture *f)
{
    result_free(&f->all);
    rig_close(&f->one);
    for (uint32_t i = 0; i < f->n_others; i++)
        rig_close(&f->others[i]);
}

/* Each pick alone gets what it got among all. */
static void check_alone(const world *w, rig *r, const result *all)
{
    for (uint32_t pick = 0; pick < w->n_picks; pick++) {
        result alone = run_select(r, w, pick, 1);

        if (!CHECK(same(w, all, pick, &alone, 1)))
            fprintf(stderr, "pick %u alone differs\n", pick);
        result_free(&alone);
    }
}

static void test_select(fixture *f)
{
    const world *w = f->w;

    check_rotated(w, &f->all);
    for (uint32_t i = 0; i < w->n_picks * KV_HEADS; i++)
        check_list(w, &f->kernels, &f->all, i / KV_HEADS, i % KV_HEADS, f->s->reach > 100 ? 0.5 : f->tolerance);
    check_alone(w, &f->one, &f->all);
    for (uint32_t i = 0; i < f->n_others; i++) {
        result again = run_select(&f->others[i], w, 0, w->n_picks);

        if (!CHECK(same(w, &f->all, 0, &again, w->n_picks)))
            fprintf(stderr, "device %u differs\n", i);
        result_free(&again);
    }
}

/* All clusters looked at, selector cluster is sketch to the bit: both read the records. */
static void test_all_candidates(fixture *f)
{
    world  w = *f->w;
    result all;

    for (uint32_t i = 0; i < w.n_seqs; i++) {
        w.settings[i].selector = HSRI_SELECT_CLUSTER;
        w.settings[i].candidates = MOST_SEGMENTS * HSRI_SEGMENT_TOKENS;
    }
    all = run_select(&f->one, &w, 0, w.n_picks);
    CHECK(same(&w, &f->all, 0, &all, w.n_picks));
    result_free(&all);
}

/* What is set aside leaves the lists, in order, and counts as if it had never been selected: the oracle is that of select. */
static void test_aside(fixture *f)
{
    world         w = *f->w;
    const result *before = &f->all;
    result        after, again;
    uint32_t      n_aside = 0;

    w.aside = true;
    after = run_select(&f->one, &w, 0, w.n_picks);
    again = run_select(&f->others[0], &w, 0, w.n_picks);
    CHECK(same(&w, &after, 0, &again, w.n_picks));
    for (uint32_t i = 0; i < w.n_picks * KV_HEADS; i++) {
        const uint32_t *had = before->units + i * w.stride, *has = after.units + i * w.stride;
        uint32_t        n = 0;

        for (uint32_t u = 0; u < before->counts[i]; u++)
            if (!is_away(i, had[u])) {
                CHECK(n < after.counts[i] && has[n] == had[u]);
                n++;
            }
        CHECK(n == after.counts[i]);
        n_aside += before->counts[i] - n;
        /* Far logits come out a little different in the company of other pages: the AVX-512 kernels share scales in a chunk. */
        check_list(&w, &f->kernels, &after, i / KV_HEADS, i % KV_HEADS, f->s->reach > 100 ? 1.0 : f->tolerance);
    }
    CHECK(n_aside > 0);
    check_alone(&w, &f->others[0], &after);
    result_free(&again);
    result_free(&after);
}

/* The scan of a list: how many pages, and which. */
static const uint32_t *scan_at(const world *w, const result *r, uint32_t list)
{
    return r->scans + list / KV_HEADS * scan_words(w) + hsri_scan_at(KV_HEADS, w->n_heads, w->scan_pages, LAYER, list % KV_HEADS);
}

static bool scan_has(const uint32_t *scan, uint32_t page)
{
    for (uint32_t i = 0; i < scan[0]; i++)
        if (scan[1 + i] == page)
            return true;
    return false;
}

static bool list_has(const uint32_t *units, uint32_t n, uint32_t page)
{
    for (uint32_t i = 0; i < n; i++)
        if (units[i] / HSRI_PAGE_UNITS == page)
            return true;
    return false;
}

/* With few pages the scan has the best ones: those of the list, or, of the list's, the most probable. */
static void check_scan(const world *w, const result *was, const result *r, uint32_t list)
{
    const uint32_t *scan = scan_at(w, r, list), *units = was->units + list * w->stride;
    bool            in_list = true, in_scan = true;

    for (uint32_t i = 0; i < scan[0]; i++) {
        CHECK(i == 0 || scan[1 + i] > scan[i]);
        in_list &= list_has(units, was->counts[list], scan[1 + i]);
    }
    for (uint32_t i = 0; i < was->counts[list]; i++)
        in_scan &= scan_has(scan, units[i] / HSRI_PAGE_UNITS);
    CHECK(in_list || in_scan);
}

/* Nor where so few clusters have masses within range that lists are filled up with units that have none. */
static bool can_foresee(const scenario *s)
{
    return (s->candidates != 500 || s->reach < 100) && !s->run && !s->n_forced && s->selector != HSRI_SELECT_CLASSIC &&
           s->selector != HSRI_SELECT_RANDOM;
}

/* Guessing the same query among all pages is selecting. */
static void check_foresee_same(fixture *f)
{
    world  w = *f->w;
    result now;

    w.guess = w.queries;
    w.scan_pages = w.most_pages;
    now = run_select(&f->one, &w, 0, w.n_picks);
    for (uint32_t i = 0; i < w.n_picks * KV_HEADS && !f->s->candidates; i++)
        CHECK(f->all.counts[i] == now.counts[i] &&
              memcmp(f->all.units + i * w.stride, now.units + i * w.stride, now.counts[i] * 4) == 0);
    result_free(&now);
}

/* Another query's choice is made among the pages of the scan. */
static void test_foresee(fixture *f)
{
    world   w = *f->w;
    float  *guess = malloc(w.n_rows * w.n_heads * w.d * sizeof *guess);
    result  now, again;

    check_foresee_same(f);
    fill_noise(guess, w.n_rows * w.n_heads * w.d, 55, f->s->reach);
    w.guess = guess;
    w.scan_pages = 12;
    now = run_select(&f->one, &w, 0, w.n_picks);
    again = run_select(&f->others[0], &w, 0, w.n_picks);
    CHECK(same(&w, &now, 0, &again, w.n_picks));
    result_free(&again);
    for (uint32_t i = 0; i < w.n_picks * KV_HEADS; i++) {
        const uint32_t *scan = scan_at(&w, &now, i), *units = now.units + i * w.stride;

        CHECK(now.counts[i] <= 4 * scan[0] && (now.counts[i] > 0) == (scan[0] > 0) && scan[0] <= 12);
        for (uint32_t u = 0; u < now.counts[i]; u++)
            CHECK((u == 0 || units[u] > units[u - 1]) && scan_has(scan, units[u] / HSRI_PAGE_UNITS));
        check_scan(&w, &f->all, &now, i);
    }
    check_alone(&w, &f->others[0], &now);
    result_free(&now);

    /* Of a sequence that was cut to less than the scan saw, nothing is guessed. */
    w.cut = sealed_pages(&w, w.rows[0].pos) - w.sink - 1;
    now = run_select(&f->one, &w, 0, 1);
    CHECK(now.counts[0] == 0 && now.counts[1] == 0);
    result_free(&now);
    free(guess);
}

/* A query that is not a number: its head counts for nothing, the list comes from the others, nothing crashes. */
static void test_nan(fixture *f)
{
    world         w = *f->w;
    const result *before = &f->all;
    result        after;

    w.queries = malloc(w.n_rows * w.n_heads * w.d * sizeof *w.queries);
    w.acc = malloc(w.n_rows * w.n_heads * (w.d + 2) * sizeof *w.acc);
    memcpy(w.queries, f->w->queries, w.n_rows * w.n_heads * w.d * sizeof *w.queries);
    memcpy(w.acc, f->w->acc, w.n_rows * w.n_heads * (w.d + 2) * sizeof *w.acc);
    for (uint32_t i = 0; i < w.d; i++)
        w.queries[i] = NAN;
    w.acc[0] = NAN;
    after = run_select(&f->one, &w, 0, w.n_picks);
    CHECK(after.counts[0] == before->counts[0] && isnan(after.covered[0]) && after.virtual_part[1] == 0.0f);
    CHECK(after.covered[1] >= 0.0f && after.covered[1] <= 1.0f);
    CHECK(memcmp(after.units + w.stride, before->units + w.stride, before->counts[1] * sizeof(uint32_t)) == 0);
    result_free(&after);

    for (uint32_t i = 0; i < w.n_heads * w.d; i++)
        w.queries[i] = NAN;
    after = run_select(&f->one, &w, 0, w.n_picks);
    CHECK(after.counts[0] == before->counts[0] && after.units[0] == w.sink * 4);   /* all alike: the first ones */
    result_free(&after);
    free(w.queries);
    free(w.acc);
}

static void test_at_level(const scenario *s, world *w, int32_t isa, bool nan)
{
    fixture f = fixture_open(s, w, isa);

    test_select(&f);
    if (s->selector == HSRI_SELECT_SKETCH && !s->run)
        test_aside(&f);
    if (s->selector == HSRI_SELECT_SKETCH && s->candidates)
        test_all_candidates(&f);
    if (can_foresee(s))
        test_foresee(&f);
    if (nan)
        test_nan(&f);
    fixture_close(&f);
}

/* Do both levels select with the same kernels? Which ones assign tokens to clusters does not matter. */
static bool select_alike(int32_t a, int32_t b)
{
    hsri_sparse_kernels of_a, of_b;

    hsri_sparse_kernels_fill(&of_a, a);
    hsri_sparse_kernels_fill(&of_b, b);
    of_a.cluster.assign = of_b.cluster.assign;
    return memcmp(&of_a, &of_b, sizeof of_a) == 0;
}

/* Entries and cluster records have the same bytes at every level (test_index.c, test_cluster.c), so the fastest makes them for all. */
static void test_scenario(const scenario *s, bool nan)
{
    const int32_t best = (int32_t)hsri_min((uint64_t)hsri_cpu_isa(), HSR_ISA_AVX512);
    hsri_kernels  kernels;
    world        *w;

    hsri_kernels_fill(&kernels, best);
    w = world_new(s, &kernels);
    if (s->candidates)
        make_clusters(w, best);
    for (int32_t isa = HSR_ISA_REFERENCE; isa <= hsri_cpu_isa(); isa++) {
        int before = check_failures;

        if (isa > HSR_ISA_REFERENCE && select_alike(isa, isa - 1))
            continue;
        test_at_level(s, w, isa, nan);
        if (check_failures > before)
            fprintf(stderr, "FAILED %s: %s\n", hsri_isa_name(isa), s->name);
    }
    world_free(w);
}

int main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : NULL;

    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        if (!only || strcmp(only, scenarios[i].name) == 0)
            test_scenario(&scenarios[i], i == 0);
    return CHECK_REPORT();
}
