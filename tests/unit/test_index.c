/* SPDX-License-Identifier: Apache-2.0 */
/* The index's kernels, on every instruction-set level, against plain computations in double precision; and choosing the best of many. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cpu.h"
#include "check.h"
#include "device/cpu/kernels.h"
#include "device/cpu/sparse_select.h"
#include "index_oracle.h"

/* ---- the best of many ---- */

static void test_top(const hsri_sparse_kernels *kernels)
{
    enum { N = 3000 };
    static float    values[N];
    static uint32_t work[N];

    for (uint32_t round = 0; round < 60; round++) {
        uint32_t n = round < 4 ? round : 1 + (uint32_t)(hsri_rng_u64(round, 0) % N), competing = 0, taken = 0, want;
        hsri_top top;
        bool     good = true;
        static uint32_t list[N];
        uint32_t n_list;
        float    least = INFINITY, most_left = -1;

        for (uint32_t i = 0; i < n; i++) {
            uint64_t kind = hsri_rng_u64(round + 100, i);
            /* many ties, zeros of both signs, denormals, what never competes */
            values[i] = kind % 16 == 0 ? NAN : kind % 16 == 1 ? HSRI_NO_WORTH : kind % 16 == 2 ? -0.0f : kind % 16 == 3 ? 1e-42f
                        : ldexpf((float)(kind >> 40 & (round % 3 ? 7 : 0xffff)), (int)(kind >> 32 & 15) * (round % 2) - 40);
            competing += values[i] >= 0.0f;
        }
        want = round % 7 == 0 ? n + 1 : round % 7 == 1 ? 0 : round % 7 == 2 ? 1 + round % 3 : (uint32_t)(hsri_rng_u64(round, 1) % (n + 1));
        top = hsri_top_of(kernels, values, n, want, work);
        n_list = hsri_top_list(kernels, top, values, n, list);
        for (uint32_t i = 0; i < n; i++) {
            if (hsri_top_takes(&top, values[i])) {
                good &= taken < n_list && list[taken] == i;
                taken++;
                good &= values[i] >= 0.0f;
                least = fminf(least, values[i]);
                /* nobody who is equal was passed over before */
                good &= !(most_left >= 0.0f && most_left == values[i]);
            } else if (values[i] >= 0.0f) {
                most_left = fmaxf(most_left, values[i]);
            }
        }
        CHECK(good);
        CHECK(taken == (want < competing ? want : competing) && n_list == taken);
        CHECK(taken == 0 || most_left <= least);
    }
}

/* ---- encoding ---- */

static const struct { uint32_t kind, d, n_4bit, n_2bit; } index_cases[] = {
    { HSRI_INDEX_SKETCH, 64, 24, 0 },   { HSRI_INDEX_SKETCH, 64, 8, 16 },  { HSRI_INDEX_SKETCH, 64, 16, 48 }, { HSRI_INDEX_SKETCH, 128, 32,
                                                                                                                32 },
    { HSRI_INDEX_SKETCH, 32, 0, 32 },   { HSRI_INDEX_SKETCH, 16, 16, 0 },  { HSRI_INDEX_SKETCH, 80, 40, 16 }, { HSRI_INDEX_MINMAX, 64, 0,
                                                                                                                0 },
    { HSRI_INDEX_MINMAX, 20, 0, 0 },    { HSRI_INDEX_MINMAX, 128, 0, 0 },  { HSRI_INDEX_GAUSSIAN, 64, 0, 0 }, { HSRI_INDEX_GAUSSIAN, 100,
                                                                                                                0, 0 },
};
#define N_INDEX_CASES (sizeof index_cases / sizeof *index_cases)

static void check_sketch(const hsri_index_shape *s, const uint8_t *entry, const uint8_t *codes, const float *calibration, const float *k)
{
    uint32_t d = s->head_dim;
    bool     close = true, mild = true;

    for (uint32_t c = 0; c < s->n_4bit + s->n_2bit; c++) {
        double z[64], most = 0, error = 0, plain_error = 0, step, last = c < s->n_4bit ? 15 : 3;
        int    code;

        for (uint32_t t = 0; t < 64; t++) {
            z[t] = 0;
            for (uint32_t i = 0; i < d; i++) {
                double mean = 0;

                for (uint32_t u = 0; u < 64; u++)
                    mean += (double)k[u * d + i] / 64;
                z[t] += (double)calibration[i * d + c] * ((double)k[t * d + i] - mean);
            }
            most = fmax(most, fabs(z[t]));
        }
        for (uint32_t t = 0; t < 64; t++) {
            double got = sketch_value(s, entry, codes, c, t, &step, &code), wide = 2 * most / (last + 1), level = floor(z[t] / wide);

            /* nearest level, or the outermost ones */
            close &= fabs(got - z[t]) <= 0.501 * step + 1e-5 || ((code == 0 || code == (int)last) && fabs(z[t]) > fabs(got));
            error += (got - z[t]) * (got - z[t]);
            level = fmin(fmax(level, -(last + 1) / 2), (last - 1) / 2) + 0.5;
            plain_error += (level * wide - z[t]) * (level * wide - z[t]);
        }
        mild &= error <= plain_error * 1.002 + 1e-9;
    }
    CHECK(close);
    CHECK(mild);       /* never worse than the scale that holds all values */
}

static void check_others(const hsri_index_shape *s, const uint8_t *entry, const float *k)
{
    uint32_t d = s->head_dim;
    double   scale = float_at(entry + 8 + 2 * d);
    bool     good = true;

    for (uint32_t t = 0; t < 64 && s->kind == HSRI_INDEX_MINMAX; t++) {
        for (uint32_t j = 0; j < d; j++) {
            const int8_t *low = (const int8_t *)entry + 12 + 2 * d + t / 16 * 2 * d;

            good &= (double)k[t * d + j] >= scale * low[j] - 1e-5 && (double)k[t * d + j] <= scale * low[d + j] + 1e-5;
            good &= scale * (low[d + j] - low[j]) < 4.1;
        }
    }
    for (uint32_t j = 0; j < d && s->kind == HSRI_INDEX_GAUSSIAN; j++) {
        double mean = 0, variance = 0;

        for (uint32_t t = 0; t < 64; t++)
            mean += (double)k[t * d + j] / 64;
        for (uint32_t t = 0; t < 64; t++)
            variance += ((double)k[t * d + j] - mean) * ((double)k[t * d + j] - mean) / 64;
        good &= fabs(scale * entry[12 + 2 * d + j] - variance) <= 0.501 * scale + 1e-5;
    }
    CHECK(good);
}

/* Every level makes the bytes of the reference. */
static void check_bytes(const hsri_index_shape *s, const hsri_calibration_record *calibration, const float *k, const float *v,
                        const uint8_t *entry, const uint8_t *codes, float *scratch)
{
    uint8_t     *plain_entry = hsri_new_aligned(1, s->entry_bytes), *plain_codes = hsri_new_aligned(1, s->code_bytes);
    hsri_kernels plain;

    hsri_kernels_fill(&plain, HSR_ISA_REFERENCE);
    plain.sparse.encode(s, calibration, k, v, plain_entry, plain_codes, scratch);
    CHECK(memcmp(entry, plain_entry, s->entry_bytes) == 0 && memcmp(codes, plain_codes, s->code_bytes) == 0);
    free(plain_entry);
    free(plain_codes);
}

static void test_encode(const hsri_kernels *kernels)
{
    static float record[2 * 128 * 128 + 2 * 128], k[64 * 128], v[64 * 128], scratch[2 * 64 * 128 + 4 * 128];

    for (size_t i = 0; i < N_INDEX_CASES; i++) {
        hsri_index_shape        s = shape_of(index_cases[i].kind, index_cases[i].d, index_cases[i].n_4bit, index_cases[i].n_2bit);
        hsri_calibration_record calibration = hsri_calibration_at(record, 1, 0, 0, s.head_dim);
        uint8_t                *entry = hsri_new_aligned(1, s.entry_bytes), *codes = hsri_new_aligned(1, s.code_bytes);
        double                  error_k = 0, error_v = 0;
        uint32_t                d = s.head_dim;

        fill_calibration(record, d, 10 + i);
        fill_noise(k, 64 * d, 20 + i, 2.0f);
        fill_noise(v, 64 * d, 30 + i, 2.0f);
        kernels->sparse.encode(&s, &calibration, k, v, entry, codes, scratch);
        check_bytes(&s, &calibration, k, v, entry, codes, scratch);
        for (uint32_t j = 0; j < d; j++) {
            double mean_k = 0, mean_v = 0;

            for (uint32_t t = 0; t < 64; t++) {
                mean_k += (double)k[t * d + j] / 64;
                mean_v += (double)v[t * d + j] / 64;
            }
            error_k = fmax(error_k, fabs(mean_key(&s, entry, calibration.mean_k, j) - mean_k));
            error_v = fmax(error_v, fabs(mean_value(&s, entry, calibration.mean_v, j) - mean_v));
        }
        CHECK(error_k <= 0.501 * float_at(entry) + 1e-6 && error_v <= 0.501 * float_at(entry + 4) + 1e-6);
        if (s.kind == HSRI_INDEX_SKETCH)
            check_sketch(&s, entry, codes, record, k);
        else
            check_others(&s, entry, k);
        /* equal keys: no spread at all; a lost number: marked */
        for (uint32_t j = 0; j < 64 * d; j++)
            k[j] = 1.5f;
        kernels->sparse.encode(&s, &calibration, k, v, entry, codes, scratch);
        CHECK(isfinite(float_at(entry)));
        k[17] = i % 2 ? NAN : INFINITY;
        kernels->sparse.encode(&s, &calibration, k, v, entry, codes, scratch);
        CHECK(isnan(float_at(entry)) && isfinite(float_at(entry + 4)));
        free(entry);
        free(codes);
    }
}

/* ---- scoring, on every level ---- */

enum { PAGES = HSRI_SCORE_PAGES, MOST_HEADS = 19, MOST_D = 128, STRIDE = PAGES * UNITS + 3 };

/* Pages of one shape, the heads that look at them, and what a kernel makes of these. */
typedef struct scored {
    hsri_index_shape shape;
    uint32_t         n_pages, n_heads, selector;
    double           scale;
    hsri_score_fn    score;
    hsri_score_args  args;
    uint8_t         *slots, *code_slots;
    const uint8_t   *entries[PAGES], *codes[PAGES];
    float            record[2 * MOST_D * MOST_D + 2 * MOST_D], queries[MOST_HEADS * MOST_D], rotated[MOST_HEADS * MOST_D];
    float            references[MOST_HEADS], mass[MOST_HEADS * STRIDE];
} scored;

static hsri_score_fn scoring_of(const hsri_kernels *kernels, uint32_t selector)
{
    return selector == HSRI_SELECT_SKETCH ? kernels->sparse.score_sketch
           : selector == HSRI_SELECT_MINMAX ? kernels->sparse.score_minmax
           : selector == HSRI_SELECT_GAUSSIAN ? kernels->sparse.score_gaussian
                                              : kernels->sparse.score_mean;
}

static void fill_pages(scored *c, const hsri_kernels *kernels, const hsri_calibration_record *calibration, size_t i)
{
    static float   k[64 * MOST_D], v[64 * MOST_D], scratch[2 * 64 * MOST_D + 4 * MOST_D];
    const uint32_t d = c->shape.head_dim;

    for (uint32_t p = 0; p < c->n_pages; p++) {
        uint8_t *entry = c->slots + (uint64_t)p * c->shape.entry_bytes, *codes = c->code_slots + (uint64_t)p * c->shape.code_bytes;

        c->entries[p] = entry;
        c->codes[p] = codes;
        fill_noise(k, 64 * d, 60 + i * PAGES + p, p % 5 == 4 ? 0.2f : 2.0f);
        fill_noise(v, 64 * d, 70, 1.0f);
        kernels->sparse.encode(&c->shape, calibration, k, v, entry, codes, scratch);
    }
}

/* Every case twice: with its own selector, and with the means that all of them have. */
static scored *scored_new(const hsri_kernels *kernels, size_t i)
{
    static const uint32_t selectors[] = { [HSRI_INDEX_SKETCH] = HSRI_SELECT_SKETCH, [HSRI_INDEX_MINMAX] = HSRI_SELECT_MINMAX,
                                          [HSRI_INDEX_GAUSSIAN] = HSRI_SELECT_GAUSSIAN };
    scored *c = calloc(1, sizeof *c);

    c->shape = shape_of(index_cases[i / 2].kind, index_cases[i / 2].d, index_cases[i / 2].n_4bit, index_cases[i / 2].n_2bit);
    c->n_pages = i % 3 == 0 ? PAGES : 1 + (uint32_t)i % 7;
    c->n_heads = i % 4 == 3 ? MOST_HEADS : 1 + (uint32_t)i % 9;
    c->selector = i % 2 ? HSRI_SELECT_MEAN : selectors[c->shape.kind];
    c->scale = 1 / sqrt(c->shape.head_dim);
    c->score = scoring_of(kernels, c->selector);
    c->slots = hsri_new_aligned(PAGES, c->shape.entry_bytes);
    c->code_slots = hsri_new_aligned(PAGES, c->shape.code_bytes);

    const uint32_t d = c->shape.head_dim;
    const hsri_calibration_record calibration = hsri_calibration_at(c->record, 1, 0, 0, d);
    fill_calibration(c->record, d, 40 + i);
    fill_noise(c->queries, c->n_heads * d, 50 + i, 4.0f);
    for (uint32_t h = 0; h < c->n_heads; h++) {
        kernels->sparse.rotate(calibration.b, c->queries + h * d, d, c->rotated + h * d);
        c->references[h] = h % 3 == 0 ? 5.0f : -3.5f * (float)h;
    }
    fill_pages(c, kernels, &calibration, i);
    c->args = (hsri_score_args){ .entries = c->entries, .codes = c->codes, .n_pages = c->n_pages, .n_heads = c->n_heads, .shape = &c->shape,
                                 .scale = (float)c->scale, .queries = c->queries, .rotated = c->rotated, .reference = c->references,
                                 .mean_k = c->shape.kind == HSRI_INDEX_SKETCH ? calibration.mean_k : NULL,
                                 .mass = c->mass, .mass_stride = STRIDE };
    return c;
}

static void scored_free(scored *c)
{
    free(c->slots);
    free(c->code_slots);
    free(c);
}

/* How far the log of a mass may be off. The sketch's weights may be eight bits of the largest of a call, at worst a step for each code. */
static double score_limit(const scored *c, uint32_t head)
{
    const hsri_index_shape *s = &c->shape;
    double most = 0, sum = 0;

    if (c->selector != HSRI_SELECT_SKETCH)
        return 2e-4;
    for (uint32_t i = 0; i < s->n_4bit + s->n_2bit; i++) {
        double step = 0;

        for (uint32_t p = 0; p < c->n_pages; p++)
            step = fmax(step, half_at(c->entries[p] + 8 + 2 * s->head_dim + 2 * i));
        most = fmax(most, fabs((double)c->rotated[head * s->head_dim + i]) * step * c->scale);
        sum += i < s->n_4bit ? 7.5 : 1.5;
    }
    return 2e-3 + most / 127 * sum;
}

static bool check_masses(const scored *c, size_t i, double *worst)
{
    const uint32_t d = c->shape.head_dim;

    for (uint32_t h = 0; h < c->n_heads; h++) {
        double limit = score_limit(c, h);

        for (uint32_t u = 0; u < c->n_pages * UNITS; u++) {
            double want = unit_log_mass(&c->shape, c->entries[u / UNITS], c->codes[u / UNITS], c->record, c->selector, u % UNITS,
                                        c->queries + h * d, c->rotated + h * d, c->scale);
            double error = fabs(log((double)c->mass[h * STRIDE + u]) - (want - (double)c->references[h]));

            *worst = fmax(*worst, error / limit);
            if (!CHECK(error <= limit)) {
                fprintf(stderr, "case %zu head %u unit %u: off by %g, allowed %g\n", i, h, u, error, limit);
                return false;
            }
        }
    }
    return true;
}

/* A head alone has the bits it has in company. */
static void check_heads_alone(const scored *c)
{
    float alone[PAGES * UNITS];

    for (uint32_t h = 0; h < c->n_heads; h++) {
        hsri_score_args one = c->args;

        one.queries += (uint64_t)h * c->shape.head_dim;
        one.rotated += (uint64_t)h * c->shape.head_dim;
        one.reference += h;
        one.n_heads = 1;
        one.mass = alone;
        c->score(&one);
        CHECK(memcmp(alone, c->mass + h * STRIDE, c->n_pages * UNITS * sizeof *alone) == 0);
    }
}

/* A head that is not a number in the calibrated basis alone has no mass. */
static void check_lost_rotation(scored *c, uint32_t head)
{
    float *first = c->rotated + (uint64_t)head * c->shape.head_dim, kept = *first;

    *first = NAN;
    c->score(&c->args);
    for (uint32_t u = 0; u < c->n_pages * UNITS; u++)
        CHECK(c->mass[head * STRIDE + u] == 0.0f);
    *first = kept;
}

/* Not a number: no mass. Out of range: the most there is. Nothing else changes. */
static void check_no_numbers(scored *c, size_t i)
{
    const float    lost = NAN;
    const bool     many = c->n_heads > 1;
    const uint32_t last = many ? c->n_heads - 1 : 0, n_units = c->n_pages * UNITS;
    float          before[PAGES * UNITS], *of_last = c->mass + last * STRIDE;

    memcpy(before, of_last, sizeof before);
    c->queries[3] = NAN;
    c->rotated[0] = many && i % 3 ? INFINITY : NAN;
    memcpy(c->slots, &lost, sizeof lost);                           /* scale of page 0's mean key, and of its bounds */
    if (c->shape.kind != HSRI_INDEX_SKETCH)
        memcpy(c->slots + 8 + 2 * c->shape.head_dim, &lost, sizeof lost);
    c->score(&c->args);
    for (uint32_t u = 0; u < n_units; u++)
        CHECK(c->mass[u] == 0.0f);
    for (uint32_t u = 0; u < UNITS; u++)
        CHECK(of_last[u] == 0.0f);
    if (many)
        CHECK(memcmp(before + UNITS, of_last + UNITS, (n_units - UNITS) * sizeof *before) == 0);

    if (many && c->selector == HSRI_SELECT_SKETCH)
        check_lost_rotation(c, last);
    c->references[last] = -300.0f;
    c->score(&c->args);
    for (uint32_t u = UNITS; u < n_units && many; u++)
        CHECK(of_last[u] == HSRI_MASS_MAX);
    c->references[last] = NAN;
    c->score(&c->args);
    for (uint32_t u = 0; u < n_units; u++)
        CHECK(of_last[u] == 0.0f);
}

static void test_scores(const hsri_kernels *kernels)
{
    double worst = 0;

    for (size_t i = 0; i < 2 * N_INDEX_CASES; i++) {
        scored *c = scored_new(kernels, i);

        c->score(&c->args);
        if (check_masses(c, i, &worst)) {
            check_heads_alone(c);
            check_no_numbers(c, i);
        }
        scored_free(c);
    }
    printf("  scores: worst error %.0f%% of the limit\n", 100 * worst);
}

static void test_level(const hsri_kernels *kernels, const char *name)
{
    printf("%s\n", name);
    test_top(&kernels->sparse);
    test_encode(kernels);
    test_scores(kernels);
}

/* Processors without VNNI score to the same bits. */
static void test_plain(const hsri_kernels *plain)
{
    hsri_kernels kernels;

    hsri_kernels_fill(&kernels, HSR_ISA_AVX512);
    for (size_t i = 0; i < 2 * N_INDEX_CASES; i++) {
        scored *c = scored_new(&kernels, i);
        float   want[sizeof c->mass / sizeof *c->mass];

        c->score(&c->args);
        memcpy(want, c->mass, sizeof want);
        memset(c->mass, 0, sizeof c->mass);
        scoring_of(plain, c->selector)(&c->args);
        CHECK(memcmp(want, c->mass, sizeof want) == 0);
        scored_free(c);
    }
}

int main(void)
{
    hsri_kernels kernels;

    for (int32_t isa = HSR_ISA_REFERENCE; isa <= hsri_cpu_isa(); isa++) {
        if (isa == HSR_ISA_AMX && !hsri_cpu_allow_amx())
            continue;
        hsri_kernels_fill(&kernels, isa);
        test_level(&kernels, hsri_isa_name(isa));
    }
    if (hsri_cpu_isa() >= HSR_ISA_AVX512) {
        hsri_sparse_kernels_fill_plain(&kernels.sparse, HSR_ISA_AVX512);
        test_level(&kernels, "avx512 without VNNI");
        test_plain(&kernels);
    }
    return CHECK_REPORT();
}
