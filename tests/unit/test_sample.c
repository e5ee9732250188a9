/* SPDX-License-Identifier: Apache-2.0 */
/* The sampler against a straightforward one that sorts the whole vocabulary, on border values, and by counting draws. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/rng.h"
#include "check.h"
#include "device/cpu/sample.h"

enum { MAX_TOKENS = 20000, MAX_PARTS = 8 };

typedef struct request {
    hsri_sample_params    p;
    const hsr_token_bias *bias;
    const hsri_seen      *seen;
} request;

static const hsri_sample_params plain = { .temperature = 1, .top_p = 1, .repetition_penalty = 1 };

static hsri_sampled sample(const float *logits, uint32_t n_tokens, const request *r)
{
    static hsri_sample_work work;
    static hsri_kernels kernels;
    hsri_sample_part parts[MAX_PARTS];
    hsri_sampled     out;

    if (!logits) {
        hsri_sample_work_free(&work);
        return (hsri_sampled){ 0 };
    }
    hsri_kernels_fill(&kernels, hsri_cpu_isa() < HSR_ISA_AVX512 ? hsri_cpu_isa() : HSR_ISA_AVX512);
    CHECK(hsri_sample_work_grow(&work, n_tokens));
    for (uint32_t i = 0; i < hsri_sample_n_parts(n_tokens); i++)
        hsri_sample_scan(&kernels, logits, n_tokens, i, &parts[i]);
    memset(&out, 0xEE, sizeof out);
    hsri_sample_row(logits, n_tokens, parts, &r->p, r->bias, r->seen, &work, &out);
    return out;
}

/* ---- the straightforward sampler ---- */

typedef struct candidate { float y; uint32_t id; double p; } candidate;

static int by_rank(const void *a, const void *b)
{
    const candidate *x = a, *y = b;

    if (x->y != y->y)
        return x->y > y->y ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static void normalise(candidate *c, uint32_t n, double temperature)
{
    double sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += c[i].p = exp(((double)c[i].y - c[0].y) / temperature);
    for (uint32_t i = 0; i < n; i++)
        c[i].p /= sum;
}

static void modify(const float *logits, uint32_t n_tokens, const request *r, float *y)
{
    memcpy(y, logits, n_tokens * sizeof *y);
    for (uint32_t i = 0; i < r->p.n_seen; i++) {
        float *at = &y[r->seen[i].token];

        if (r->seen[i].in_window)
            *at = *at > 0 ? *at / r->p.repetition_penalty : *at * r->p.repetition_penalty;
        if (r->seen[i].n_output)
            *at = (float)(*at - r->p.presence_penalty - (double)r->p.frequency_penalty * r->seen[i].n_output);
    }
    for (uint32_t i = 0; i < r->p.n_bias; i++)
        y[r->bias[i].token] += r->bias[i].bias;
}

/* The distribution that the filters leave, sorted by rank; returns how many tokens. */
static uint32_t reference(const float *logits, uint32_t n_tokens, const request *r, candidate *c)
{
    static float y[MAX_TOKENS];
    uint32_t n = 0, keep = 0;
    double   mass = 0;

    modify(logits, n_tokens, r, y);
    for (uint32_t i = 0; i < n_tokens; i++)
        if (y[i] > -INFINITY)
            c[n++] = (candidate){ y[i], i, 0 };
    qsort(c, n, sizeof *c, by_rank);
    if (r->p.top_k > 0 && (uint32_t)r->p.top_k < n)
        n = (uint32_t)r->p.top_k;
    normalise(c, n, r->p.temperature);
    while (keep < n && (float)(c[keep].p / c[0].p) >= r->p.min_p)
        keep++;
    normalise(c, n = keep, r->p.temperature);
    for (keep = 0; keep < n && r->p.top_p < 1;) {
        mass += c[keep++].p;
        if ((float)mass >= r->p.top_p)
            n = keep;
    }
    normalise(c, n, r->p.temperature);
    return n;
}

static int by_id(const void *a, const void *b)
{
    const candidate *x = a, *y = b;

    return x->id < y->id ? -1 : 1;
}

/* The same token for the same random number, for many of them; numbers within rounding of a border are let pass. */
static void check_same_draws(const float *logits, uint32_t n_tokens, request r, uint32_t n_draws)
{
    static candidate c[MAX_TOKENS];
    uint32_t n = reference(logits, n_tokens, &r, c), wrong = 0;

    qsort(c, n, sizeof *c, by_id);
    for (r.p.draw = 0; r.p.draw < n_draws; r.p.draw++) {
        double       u = hsri_rng_unit(r.p.seed, r.p.draw), sum = 0;
        hsri_sampled got = sample(logits, n_tokens, &r);
        bool         ok = false;

        for (uint32_t i = 0; i < n; i++) {
            ok |= got.token == (int32_t)c[i].id && u >= sum - 1e-6 && u <= sum + c[i].p + 1e-6;
            sum += c[i].p;
        }
        wrong += !(ok && got.status == HSR_OK);
    }
    if (!CHECK(wrong == 0))
        fprintf(stderr, "%u of %u draws; temperature %g top_k %d top_p %g min_p %g, %u candidates\n", wrong, n_draws, r.p.temperature,
                r.p.top_k, r.p.top_p, r.p.min_p, n);
}

/* ---- tests ---- */

static void make_logits(float *x, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++) {   /* roughly normal, as real ones are, rounded so that ties are common */
        double sum = 0;

        for (uint32_t j = 0; j < 6; j++)
            sum += hsri_rng_unit(seed, i * 6 + j) - 0.5;
        x[i] = (float)(round(sum * 200) / 40);
    }
}

static void test_filters_against_reference(void)
{
    static const struct { float temperature, top_p, min_p; int32_t top_k; } table[] = {
        { 1, 1, 0, 0 }, { 0.7f, 1, 0, 0 }, { 1.5f, 0.9f, 0, 0 }, { 1, 0.5f, 0, 0 }, { 1, 1e-9f, 0, 0 }, { 1, 0.9999999f, 0, 0 },
            { 1, 1, 0.1f, 0 },
        { 1, 1, 1, 0 }, { 1, 1, 0, 2 }, { 1, 1, 0, 50 }, { 1, 1, 0, 700 }, { 1, 1, 0, 19999 }, { 0.8f, 0.95f, 0.05f, 40 },
            { 3, 0.3f, 0.01f, 1000 },
        { 50, 0.99f, 0, 0 }, { 1e6f, 0.5f, 0, 0 }, { 0.01f, 0.9f, 0.5f, 3 }, { 1e-3f, 1, 0, 0 }, { 1, 0.95f, 1e-30f, 0 },
    };
    static float logits[MAX_TOKENS];

    for (uint32_t n = 3; n <= MAX_TOKENS; n = n < 1000 ? n * 17 : MAX_TOKENS + (n == MAX_TOKENS)) {
        make_logits(logits, n, n);
        for (uint32_t i = 0; i < sizeof table / sizeof *table; i++) {
            request r = { .p = plain };

            r.p.temperature = table[i].temperature;
            r.p.top_p = table[i].top_p;
            r.p.min_p = table[i].min_p;
            r.p.top_k = table[i].top_k;
            r.p.seed = i;
            check_same_draws(logits, n, r, n == MAX_TOKENS ? 12 : 200);
        }
    }
}

/* Case: equal tokens, where only the rule for ties decides. */
static void test_ties(void)
{
    float   logits[10];
    request r = { .p = plain };

    for (int i = 0; i < 10; i++)
        logits[i] = i % 2 ? 0.0f : -0.0f;
    r.p.temperature = 0;
    CHECK(sample(logits, 10, &r).token == 0);
    r.p.temperature = 1;
    for (r.p.draw = 0; r.p.draw < 50; r.p.draw++) {
        r.p.top_k = 3;
        CHECK(sample(logits, 10, &r).token < 3);
        r.p.top_k = 1;
        CHECK(sample(logits, 10, &r).token == 0);
        r.p.top_k = 0;
        r.p.top_p = 0.1f;
        CHECK(sample(logits, 10, &r).token == 0);
        r.p.top_p = 0.4f;
        CHECK(sample(logits, 10, &r).token < 4);
        r.p.top_p = 1;
        r.p.min_p = 1;
        CHECK(sample(logits, 10, &r).token < 10);
        r.p.min_p = 0;
    }
}

/* Case C55: all pairs of the border values that a request may hold. At least one token is left, never NaN. */
static void test_borders(void)
{
    static const float temperatures[] = { 0, 1e-45f, 1e-38f, 1e-6f, 1, 1e6f, FLT_MAX }, top_ps[] = { 1e-9f, 0.5f, 1 },
        min_ps[] = { 0, 1e-45f, 1 };
    static const int32_t top_ks[] = { 0, 1, 7, 8, INT32_MAX };
    static const float rows[][7] = { { 1, 1, 1, 1, 1, 1, 1 }, { 0, 0, 0, 0, 0, 0, 0 }, { 3, -2, 9, 9, 0, 1, -50 },
                                     { -9, -8, -7, -6, -5, -4, -3 }, { FLT_MAX, -FLT_MAX, 0, 1, 2, 3, FLT_MAX },
                                         { -INFINITY, -INFINITY, 5, -INFINITY, 1, 2, 3 } };
    static const int32_t best[] = { 0, 0, 2, 6, 0, 2 };

    for (uint32_t i = 0; i < 7 * 3 * 3 * 5 * 6; i++) {
        const float *row = rows[i / 315];
        request      r = { .p = plain };
        hsri_sampled got;

        r.p.temperature = temperatures[i % 7];
        r.p.top_p = top_ps[i / 7 % 3];
        r.p.min_p = min_ps[i / 21 % 3];
        r.p.top_k = top_ks[i / 63 % 5];
        r.p.n_logprobs = 20;
        r.p.draw = i;
        got = sample(row, 7, &r);
        CHECK(got.status == HSR_OK && got.token >= 0 && got.token < 7 && row[got.token] > -INFINITY);
        CHECK(got.logprob <= 0 && got.n_logprobs == (i / 315 == 5 ? 4 : 7));
        for (int j = 0; j < got.n_logprobs; j++)
            CHECK(got.logprobs[j].logprob <= 0 && (j == 0 || got.logprobs[j].logprob <= got.logprobs[j - 1].logprob));
        if (r.p.temperature == 0 || r.p.top_k == 1)
            CHECK(got.token == best[i / 315]);
    }
}

static void test_tiny_temperature(void)
{
    static const float row[4] = { 5, 9, 9, 1 };
    request r = { .p = plain };
    bool    seen[4] = { false };

    for (r.p.draw = 0; r.p.draw < 100; r.p.draw++) {
        r.p.temperature = 1e-38f;   /* 9e38 is no float: arg-max */
        CHECK(sample(row, 4, &r).token == 1);
        r.p.temperature = 1e-6f;    /* divides: the equal ones share */
        seen[sample(row, 4, &r).token] = true;
    }
    CHECK(!seen[0] && seen[1] && seen[2] && !seen[3]);
}

/* ---- case C57: penalties and bias ---- */

static int32_t greedy(const float *row, uint32_t n, request r)
{
    r.p.temperature = 0;
    return sample(row, n, &r).token;
}

static void test_penalties(void)
{
    static const float positive[3] = { 3, 2.5f, 1 }, negative[3] = { -1, -1.2f, -5 };
    static const hsri_seen in_prompt = { 0, 1, 0 }, five_times = { 0, 1, 5 }, outside = { 0, 0, 5 }, padding = { 3, 1, 1 };
    request r = { .p = plain };

    r.p.n_seen = 1;
    r.p.repetition_penalty = 1.5f;
    r.seen = &in_prompt;
    CHECK(greedy(positive, 3, r) == 1);   /* 3 / 1.5 */
    CHECK(greedy(negative, 3, r) == 1);   /* -1 * 1.5 */
    r.seen = &five_times;                 /* once per token, not per occurrence: 2 stays above 1.9 */
    CHECK(greedy((float[3]){ 3, 1.9f, 1 }, 3, r) == 0);
    r.seen = &outside;
    CHECK(greedy(positive, 3, r) == 0);
    r.seen = &padding;                    /* behind the vocabulary: nothing is touched */
    CHECK(greedy(positive, 3, r) == 0);
    r.seen = &(hsri_seen){ INT32_MAX, 1, 1 };
    CHECK(greedy(positive, 3, r) == 0);
    r.p.repetition_penalty = 0.5f;        /* makes repeats likelier, on both sides of zero */
    r.seen = &(hsri_seen){ 1, 1, 1 };
    CHECK(greedy(positive, 3, r) == 1 && greedy(negative, 3, r) == 1);
    r.p.repetition_penalty = 1;
    r.p.presence_penalty = 0.4f;
    r.seen = &five_times;
    CHECK(greedy(positive, 3, r) == 0);
    r.p.presence_penalty = 0.6f;
    CHECK(greedy(positive, 3, r) == 1);
    r.seen = &in_prompt;                  /* looks at the output only */
    CHECK(greedy(positive, 3, r) == 0);
    r.p.presence_penalty = 0;
    r.p.frequency_penalty = 0.09f;        /* 5 * 0.09 < 0.5 */
    r.seen = &five_times;
    CHECK(greedy(positive, 3, r) == 0);
    r.p.frequency_penalty = 0.11f;
    CHECK(greedy(positive, 3, r) == 1);
    r.p.frequency_penalty = -1;
    r.seen = &(hsri_seen){ 2, 1, 5 };
    CHECK(greedy(positive, 3, r) == 2);
}

/* Penalties that leave the float range neither ban nor win as NaN. */
static void test_penalty_overflow(void)
{
    static const float row[2] = { -1e30f, 1e30f };
    static const hsri_seen seen[2] = { { 0, 1, 1 }, { 1, 1, 1 } };
    request      r = { .p = plain, .seen = seen };
    hsri_sampled got;

    r.p.n_seen = 2;
    r.p.repetition_penalty = FLT_MAX;
    CHECK(greedy(row, 2, r) == 1);
    r.p.repetition_penalty = 1e-38f;
    got = sample(row, 2, &r);
    CHECK(got.status == HSR_OK && got.token == 1);
}

static void test_bias(void)
{
    static const float row[4] = { 4, 3, 2, 1 };
    static const hsr_token_bias ban_best[] = { { 0, -INFINITY } }, twice[] = { { 2, 1.5f }, { 2, 1 } };
    static const hsr_token_bias ban_then_add[] = { { 0, -INFINITY }, { 0, 100 } }, add_then_ban[] = { { 0, 100 }, { 0, -INFINITY } };
    static const hsr_token_bias outside[] = { { -1, 100 }, { 4, 100 }, { INT32_MIN, 100 }, { INT32_MAX, 100 } };
    static const hsr_token_bias all[] = { { 0, -INFINITY }, { 1, -INFINITY }, { 2, -INFINITY }, { 3, -INFINITY }, { 1, 100 } };
    request r = { .p = plain };

#define WITH(b) (r.bias = (b), r.p.n_bias = sizeof(b) / sizeof *(b), r)
    CHECK(greedy(row, 4, WITH(ban_best)) == 1);
    CHECK(greedy(row, 4, WITH(twice)) == 2);
    CHECK(greedy(row, 4, WITH(ban_then_add)) == 1);
    CHECK(greedy(row, 4, WITH(add_then_ban)) == 1);
    CHECK(greedy(row, 4, WITH(outside)) == 0);
    for (float t = 0; t < 1e7f; t = t * 10 + 0.01f) {   /* a banned id appears at no temperature */
        r.bias = all;
        r.p.n_bias = 3;
        r.p.temperature = t;
        for (r.p.draw = 0; r.p.draw < 20; r.p.draw++)
            CHECK(sample(row, 4, &r).token == 3);
        for (r.p.n_bias = 4; r.p.n_bias <= 5; r.p.n_bias++)   /* what is banned stays so */
            CHECK(sample(row, 4, &r).status == HSR_E_INVALID && sample(row, 4, &r).token == -1);
    }
#undef WITH
}

/* ---- raw logits and log-probabilities ---- */

static void test_nonfinite(void)
{
    static float row[MAX_TOKENS];
    request      r = { .p = plain };
    hsri_sampled got;

    for (uint32_t at = 0; at < MAX_TOKENS; at += 6661) {
        static const float bad[] = { NAN, -NAN, INFINITY };

        for (uint32_t i = 0; i < 3; i++) {
            row[at] = bad[i];
            got = sample(row, MAX_TOKENS, &r);
            CHECK(got.status == HSR_E_NONFINITE && got.token == -1 && got.n_logprobs == 0);
        }
        row[at] = 0;
    }
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        row[i] = -INFINITY;
    CHECK(sample(row, MAX_TOKENS, &r).status == HSR_E_NONFINITE);
    row[17777] = -3;   /* a ban beside a finite logit is a ban */
    got = sample(row, MAX_TOKENS, &r);
    CHECK(got.status == HSR_OK && got.token == 17777 && got.logprob == 0);
}

/* Of the raw distribution, whatever changes the choice; most likely first, equal ones by id. */
static void test_logprobs(void)
{
    static float row[MAX_TOKENS];
    static candidate c[MAX_TOKENS];
    request      r = { .p = plain };
    hsri_sampled got;
    double       log_sum = 0;

    make_logits(row, MAX_TOKENS, 99);
    r.p.temperature = 1;
    reference(row, MAX_TOKENS, &r, c);
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        log_sum += exp(row[i]);
    log_sum = log(log_sum);
    r.p.temperature = 1.7f;
    r.p.top_k = 300;
    r.bias = &(hsr_token_bias){ (int32_t)c[0].id, -INFINITY };
    r.p.n_bias = 1;
    for (int32_t n = 0; n <= 20; n += 5) {
        r.p.n_logprobs = n;
        r.p.draw = (uint64_t)n;
        got = sample(row, MAX_TOKENS, &r);
        CHECK(got.n_logprobs == n && got.token != (int32_t)c[0].id);
        CHECK(fabs(got.logprob - (row[got.token] - log_sum)) < 1e-6);
        for (int32_t i = 0; i < n; i++)
            CHECK(got.logprobs[i].token == (int32_t)c[i].id && fabs(got.logprobs[i].logprob - log(c[i].p)) < 1e-6);
    }
}

/* ---- randomness ---- */

/* Counts of many draws against the distribution: a fixed seed, so no flake; 5 standard deviations would be rare anyway. */
static void test_statistics(void)
{
    static const float row[6] = { 2, 1, 0.5f, 0, -1, -2 };
    enum { N = 20000 };
    uint32_t  count[6] = { 0 };
    candidate c[6];
    request   r = { .p = plain };
    uint32_t  n;

    r.p.temperature = 0.8f;
    r.p.top_p = 0.95f;
    r.p.seed = 5;
    n = reference(row, 6, &r, c);
    CHECK(n >= 3 && n < 6);
    for (r.p.draw = 0; r.p.draw < N; r.p.draw++)
        count[sample(row, 6, &r).token]++;
    for (uint32_t i = 0; i < 6; i++) {
        double p = i < n ? c[i].p : 0;   /* the row is sorted */

        CHECK(fabs(count[i] - N * p) <= 5 * sqrt(N * p * (1 - p)));
    }
}

/* A draw is a function of the row, the parameters, seed and index alone; seeds and indices are unrelated streams. */
static void test_seeds(void)
{
    static float row[1000], other[MAX_TOKENS];
    enum { N = 400 };
    int32_t  first[N];
    uint32_t by_seed = 0, by_draw = 0;
    request  r = { .p = plain };

    make_logits(row, 1000, 3);
    make_logits(other, MAX_TOKENS, 4);
    r.p.temperature = 5;   /* flat, so that equal tokens are rare */
    for (uint32_t i = 0; i < N; i++) {
        r.p.seed = 42;
        r.p.draw = i;
        first[i] = sample(row, 1000, &r).token;
    }
    for (uint32_t i = N; i-- > 0;) {
        r.p.draw = i;
        sample(other, MAX_TOKENS, &r);
        CHECK(sample(row, 1000, &r).token == first[i]);
        r.p.seed = 43;
        by_seed += sample(row, 1000, &r).token == first[i];
        r.p.seed = 42;
        by_draw += i > 0 && first[i] == first[i - 1];
    }
    CHECK(by_seed < N / 10 && by_draw < N / 10);
}

int main(void)
{
    test_filters_against_reference();
    test_ties();
    test_borders();
    test_tiny_temperature();
    test_penalties();
    test_penalty_overflow();
    test_bias();
    test_nonfinite();
    test_logprobs();
    test_statistics();
    test_seeds();
    sample(NULL, 0, NULL);   /* frees its scratch */
    return CHECK_REPORT();
}
