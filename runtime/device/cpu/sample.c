/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/sample.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/rng.h"

#define MAX_LOGPROBS ((int32_t)(sizeof((hsri_sampled *)0)->logprobs / sizeof(hsr_logprob)))

/* Half a unit in the last place of a float near 1: shares are compared to single precision. */
#define SLACK 0x1p-24

/* A rank key is looked at in three digits of 12, 10 and 10 bits. */
#define N_BINS 4096u
static const struct { uint32_t shift, n_bins; } digits[] = { { 20, 4096 }, { 10, 1024 }, { 0, 1024 } };

/* Results stay finite floats, however large logits and penalties are. */
static float held_finite(double y) { return (float)fmin(fmax(y, -FLT_MAX), FLT_MAX); }

/* ---- the raw distribution ---- */

/* The largest of n finite floats, for which four are looked at at a time, and the first place where it is. */
static void find_largest(const float *x, uint32_t n, hsri_sample_part *out)
{
    float    most[4] = { -INFINITY, -INFINITY, -INFINITY, -INFINITY };
    uint32_t i = 0;

    for (; i + 4 <= n; i += 4)
        for (uint32_t j = 0; j < 4; j++)
            most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
    for (; i < n; i++)
        most[0] = x[i] > most[0] ? x[i] : most[0];
    for (uint32_t j = 0; j < 4; j++)
        out->max = most[j] > out->max ? most[j] : out->max;
    while (x[out->argmax] != out->max)
        out->argmax++;
}

/* The same where some are not finite. */
static void find_largest_finite(const float *x, uint32_t n, hsri_sample_part *out)
{
    out->argmax = -1;
    for (uint32_t i = 0; i < n; i++) {
        if (!(x[i] <= FLT_MAX))
            out->nonfinite = true;
        else if (x[i] > out->max) {
            out->max = x[i];
            out->argmax = (int32_t)i;
        }
    }
}

void hsri_sample_scan(const hsri_kernels *kernels, const float *logits, uint32_t n_tokens, uint32_t part, hsri_sample_part *out)
{
    uint32_t first = part * HSRI_SAMPLE_CHUNK;
    uint32_t n = (uint32_t)hsri_min(n_tokens - first, HSRI_SAMPLE_CHUNK);

    *out = (hsri_sample_part){ .max = -INFINITY };
    if (kernels->nonfinite(logits + first, n))
        find_largest_finite(logits + first, n, out);
    else
        find_largest(logits + first, n, out);
    if (out->nonfinite || out->argmax < 0)
        return;
    out->argmax += (int32_t)first;
    out->sum = kernels->sum_exp(logits + first, n, out->max);
}

/* All parts as one; the order of the additions is that of the parts, whoever computed them. */
static hsri_sample_part fold_parts(const hsri_sample_part *parts, uint32_t n_parts)
{
    hsri_sample_part row = { .max = -INFINITY, .argmax = -1 };

    for (uint32_t i = 0; i < n_parts; i++) {
        row.nonfinite |= parts[i].nonfinite;
        if (parts[i].max > row.max) {
            row.max = parts[i].max;
            row.argmax = parts[i].argmax;
        }
    }
    for (uint32_t i = 0; i < n_parts && row.argmax >= 0; i++)
        row.sum += parts[i].sum * exp((double)parts[i].max - row.max);
    return row;
}

/* The n most likely tokens, most likely first, equal ones by id. */
static int32_t top_logprobs(const float *logits, uint32_t n_tokens, double log_total, int32_t n, hsr_logprob *top)
{
    float   lowest = -INFINITY;   /* logit that a token must pass: the last of a full list */
    int32_t held = 0;

    for (uint32_t i = 0; i < n_tokens; i++) {
        int32_t at;

        if (!(logits[i] > lowest))
            continue;
        at = held < n ? held++ : n - 1;
        for (; at > 0 && top[at - 1].logprob < logits[i]; at--)
            top[at] = top[at - 1];
        top[at] = (hsr_logprob){ (int32_t)i, logits[i] };
        if (held == n)
            lowest = top[n - 1].logprob;
    }
    for (int32_t i = 0; i < held; i++)
        top[i].logprob = held_finite(top[i].logprob - log_total);
    return held;
}

/* ---- penalties and bias ---- */

static void penalise(float *y, uint32_t n_tokens, const hsri_sample_params *p, const hsri_seen *seen)
{
    for (uint32_t i = 0; i < p->n_seen; i++) {
        double v;

        if ((uint32_t)seen[i].token >= n_tokens || y[seen[i].token] == -INFINITY)
            continue;
        v = y[seen[i].token];
        if (seen[i].in_window)
            v = v > 0 ? v / p->repetition_penalty : v * p->repetition_penalty;
        if (seen[i].n_output)
            v -= (double)p->frequency_penalty * seen[i].n_output + p->presence_penalty;
        y[seen[i].token] = held_finite(v);
    }
}

/* A token once banned stays so, whatever else is added to it. */
static void add_bias(float *y, uint32_t n_tokens, const hsr_token_bias *bias, uint32_t n_bias)
{
    for (uint32_t i = 0; i < n_bias; i++) {
        if ((uint32_t)bias[i].token >= n_tokens)
            continue;
        if (bias[i].bias == -INFINITY)
            y[bias[i].token] = -INFINITY;
        else if (y[bias[i].token] != -INFINITY)
            y[bias[i].token] = held_finite((double)y[bias[i].token] + bias[i].bias);
    }
}

static int32_t arg_max(const float *y, uint32_t n_tokens)
{
    float   max = -INFINITY;
    int32_t id = -1;

    for (uint32_t i = 0; i < n_tokens; i++) {
        if (y[i] > max) {
            max = y[i];
            id = (int32_t)i;
        }
    }
    return id;
}

/* ---- filters ---- */

/* Unsigned keys in the order of the floats; both zeros have one key. */
static uint32_t rank_key(float y)
{
    uint32_t u;

    y += 0.0f;
    memcpy(&u, &y, sizeof u);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The last token of a prefix of the ranking. */
typedef struct cut { uint32_t key, id; } cut;

static uint32_t digit_of(uint32_t key, uint32_t level) { return key >> digits[level].shift & (digits[level].n_bins - 1); }

/* Which bin of a level holds the point where the mass, *above included, reaches `need`; *above becomes the mass above that bin.
 * If rounding hides the point, the lowest bin that is not empty. */
static uint32_t bin_of_cut(const double *bins, uint32_t n_bins, double need, double *above)
{
    uint32_t last = 0;
    double   above_last = *above, mass = *above;

    for (uint32_t b = n_bins; b-- > 0;) {
        if (bins[b] == 0)
            continue;
        last = b;
        above_last = mass;
        mass += bins[b];
        if (mass >= need)
            break;
    }
    *above = above_last;
    return last;
}

/* The shortest prefix of the n candidates' ranking whose mass reaches `need`: a radix selection that follows, digit by digit, the
 * one bin in which the cut lies. weights NULL: every candidate weighs 1. */
static cut rank_cut(hsri_sample_work *work, const float *y, uint32_t n, const float *weights, double need)
{
    uint32_t n_tied = n;     /* candidates (places in work->ids) that share the digits followed so far */
    double   above = 0;
    uint32_t i, m;

    for (uint32_t level = 0; level < 3; level++) {
        uint32_t bin;

        memset(work->bins, 0, digits[level].n_bins * sizeof *work->bins);
        for (i = 0; i < n_tied; i++) {
            uint32_t c = level ? work->tied[i] : i;

            work->bins[digit_of(rank_key(y[work->ids[c]]), level)] += weights ? weights[c] : 1;
        }
        bin = bin_of_cut(work->bins, digits[level].n_bins, need, &above);
        for (i = m = 0; i < n_tied; i++) {
            uint32_t c = level ? work->tied[i] : i;

            if (digit_of(rank_key(y[work->ids[c]]), level) == bin)
                work->tied[m++] = c;
        }
        n_tied = m;
    }
    for (i = 0; i + 1 < n_tied; i++) {
        above += weights ? weights[work->tied[i]] : 1;
        if (above >= need)
            break;
    }
    return (cut){ rank_key(y[work->ids[work->tied[i]]]), work->ids[work->tied[i]] };
}

/* Keep the candidates down to the cut, in their order; returns how many. */
static uint32_t keep(hsri_sample_work *work, const float *y, uint32_t n, float *weights, cut c)
{
    uint32_t m = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = work->ids[i], key = rank_key(y[id]);

        if (key < c.key || (key == c.key && id > c.id))
            continue;
        if (weights)
            weights[m] = weights[i];
        work->ids[m++] = id;
    }
    return m;
}

/* Candidates that are not banned and pass min_p. That filter looks at the first token only, which top_k never removes, so the two
 * may change places: this way nothing is computed for the many tokens that min_p excludes. */
static uint32_t collect(hsri_sample_work *work, const float *y, uint32_t n_tokens, float max, const hsri_sample_params *p)
{
    double   floor = -FLT_MAX;
    uint32_t m = 0;

    if (p->min_p > 0)
        floor = fmax(floor, max + (double)p->temperature * (log(p->min_p) - SLACK));
    for (uint32_t i = 0; i < n_tokens; i++) {
        work->ids[m] = i;
        m += y[i] >= floor;
    }
    return m;
}

static double total_weight(const float *weights, uint32_t n)
{
    double total = 0;

    for (uint32_t i = 0; i < n; i++)
        total += weights[i];
    return total;
}

static int32_t draw(const hsri_sample_work *work, uint32_t n, double target)
{
    double   sum = 0;
    uint32_t last = 0;   /* last one that can be drawn, should rounding keep the sum below the target */

    for (uint32_t i = 0; i < n; i++) {
        sum += work->weights[i];
        if (sum > target)
            return (int32_t)work->ids[i];
        if (work->weights[i] > 0)
            last = i;
    }
    return (int32_t)work->ids[last];
}

static int32_t draw_filtered(hsri_sample_work *work, const float *y, uint32_t n_tokens, float max, const hsri_sample_params *p)
{
    uint32_t n = collect(work, y, n_tokens, max, p);
    double   total;

    if (p->top_k > 0 && (uint32_t)p->top_k < n)
        n = keep(work, y, n, NULL, rank_cut(work, y, n, NULL, p->top_k));
    for (uint32_t i = 0; i < n; i++)
        work->weights[i] = (float)exp(((double)y[work->ids[i]] - max) / p->temperature);
    total = total_weight(work->weights, n);
    if (p->top_p < 1) {
        n = keep(work, y, n, work->weights, rank_cut(work, y, n, work->weights, total * p->top_p * (1 - SLACK)));
        total = total_weight(work->weights, n);
    }
    return draw(work, n, total * hsri_rng_unit(p->seed, p->draw));
}

/* ---- one row ---- */

static int32_t pick(const float *logits, uint32_t n_tokens, int32_t raw_best, const hsri_sample_params *p, const hsr_token_bias *bias,
                    const hsri_seen *seen, hsri_sample_work *work)
{
    bool    penalties = p->n_seen && (p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0);
    int32_t best = raw_best;
    float   max;

    if (penalties || p->n_bias) {
        memcpy(work->logits, logits, n_tokens * sizeof *logits);
        if (penalties)
            penalise(work->logits, n_tokens, p, seen);
        add_bias(work->logits, n_tokens, bias, p->n_bias);
        logits = work->logits;
        best = arg_max(logits, n_tokens);
    }
    if (best < 0)
        return -1;
    max = logits[best];
    if (p->temperature == 0 || p->top_k == 1 || !(fabsf(max) / p->temperature <= FLT_MAX))
        return best;
    return draw_filtered(work, logits, n_tokens, max, p);
}

void hsri_sample_row(const float *logits, uint32_t n_tokens, const hsri_sample_part *parts, const hsri_sample_params *p,
                     const hsr_token_bias *bias, const hsri_seen *seen, hsri_sample_work *work, hsri_sampled *out)
{
    hsri_sample_part row = fold_parts(parts, hsri_sample_n_parts(n_tokens));
    double           log_total;

    memset(out, 0, sizeof *out);
    out->token = -1;
    if (row.nonfinite || row.argmax < 0) {
        out->status = HSR_E_NONFINITE;
        return;
    }
    out->token = pick(logits, n_tokens, row.argmax, p, bias, seen, work);
    if (out->token < 0) {
        out->status = HSR_E_INVALID;
        return;
    }
    log_total = row.max + log(row.sum);
    out->logprob = held_finite(logits[out->token] - log_total);
    if (p->n_logprobs > 0)
        out->n_logprobs = top_logprobs(logits, n_tokens, log_total, p->n_logprobs < MAX_LOGPROBS ? p->n_logprobs : MAX_LOGPROBS,
                                       out->logprobs);
}

/* ---- scratch ---- */

bool hsri_sample_work_grow(hsri_sample_work *work, uint32_t n_tokens)
{
    if (work->n_tokens >= n_tokens && work->bins)
        return true;
    hsri_sample_work_free(work);
    work->logits = hsri_new_array(n_tokens, sizeof *work->logits);
    work->ids = hsri_new_array(n_tokens, sizeof *work->ids);
    work->weights = hsri_new_array(n_tokens, sizeof *work->weights);
    work->tied = hsri_new_array(n_tokens, sizeof *work->tied);
    work->bins = hsri_new_array(N_BINS, sizeof *work->bins);
    if (!work->logits || !work->ids || !work->weights || !work->tied || !work->bins) {
        hsri_sample_work_free(work);
        return false;
    }
    work->n_tokens = n_tokens;
    return true;
}

void hsri_sample_work_free(hsri_sample_work *work)
{
    free(work->logits);
    free(work->ids);
    free(work->weights);
    free(work->tied);
    free(work->bins);
    *work = (hsri_sample_work){ 0 };
}
