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

/* How far the log of a mass may be off. The sketch's weights may be eight bits of the largest of a call, at worst one step for every code.
 * */
static double score_limit(const hsri_index_shape *s, const uint8_t *const *entries, uint32_t n_pages, uint32_t selector,
                          const float *rotated,
                          double scale)
{
    double most = 0, sum = 0;

    if (selector != HSRI_SELECT_SKETCH)
        return 2e-4;
    for (uint32_t c = 0; c < s->n_4bit + s->n_2bit; c++) {
        double step = 0;

        for (uint32_t p = 0; p < n_pages; p++)
            step = fmax(step, half_at(entries[p] + 8 + 2 * s->head_dim + 2 * c));
        most = fmax(most, fabs((double)rotated[c]) * step * scale);
        sum += c < s->n_4bit ? 7.5 : 1.5;
    }
    return 2e-3 + most / 127 * sum;
}

static void test_scores(const hsri_kernels *kernels)
{
    static const uint32_t selectors[] = { [HSRI_INDEX_SKETCH] = HSRI_SELECT_SKETCH, [HSRI_INDEX_MINMAX] = HSRI_SELECT_MINMAX,
                                          [HSRI_INDEX_GAUSSIAN] = HSRI_SELECT_GAUSSIAN };
    enum { PAGES = HSRI_SCORE_PAGES, MOST_HEADS = 19 };
    static float record[2 * 128 * 128 + 2 * 128], k[64 * 128], v[64 * 128], scratch[2 * 64 * 128 + 4 * 128], queries[MOST_HEADS * 128],
        rotated[MOST_HEADS * 128], references[MOST_HEADS], mass[MOST_HEADS * (PAGES * UNITS + 3)], alone[PAGES * UNITS];
    double worst = 0;

    for (size_t i = 0; i < 2 * N_INDEX_CASES; i++) {
        size_t                  at = i / 2;
        hsri_index_shape        s = shape_of(index_cases[at].kind, index_cases[at].d, index_cases[at].n_4bit, index_cases[at].n_2bit);
        hsri_calibration_record calibration = hsri_calibration_at(record, 1, 0, 0, s.head_dim);
        uint32_t                d = s.head_dim, n_pages = i % 3 == 0 ? PAGES : 1 + (uint32_t)i % 7;
        uint32_t                n_heads = i % 4 == 3 ? MOST_HEADS : 1 + (uint32_t)i % 9;
        uint32_t                selector = i % 2 ? HSRI_SELECT_MEAN : selectors[s.kind];
        double                  scale = 1 / sqrt(d);
        uint8_t                *slots = hsri_new_aligned(PAGES, s.entry_bytes), *code_slots = hsri_new_aligned(PAGES, s.code_bytes);
        const uint8_t          *entries[PAGES], *codes[PAGES];
        hsri_score_args         a = { .entries = entries, .codes = codes, .n_pages = n_pages, .n_heads = n_heads, .shape = &s,
                                      .scale = (float)scale, .queries = queries, .rotated = rotated, .reference = references,
                                      .mean_k = s.kind == HSRI_INDEX_SKETCH ? calibration.mean_k : NULL,
                                      .mass = mass, .mass_stride = PAGES * UNITS + 3 };
        hsri_score_fn           by_kind[] = { [HSRI_INDEX_SKETCH] = kernels->sparse.score_sketch,
                                              [HSRI_INDEX_MINMAX] = kernels->sparse.score_minmax,
                                              [HSRI_INDEX_GAUSSIAN] = kernels->sparse.score_gaussian };
        hsri_score_fn           score = selector == HSRI_SELECT_MEAN ? kernels->sparse.score_mean : by_kind[s.kind];

        fill_calibration(record, d, 40 + i);
        fill_noise(queries, n_heads * d, 50 + i, 4.0f);
        for (uint32_t h = 0; h < n_heads; h++) {
            kernels->sparse.rotate(calibration.b, queries + h * d, d, rotated + h * d);
            references[h] = h % 3 == 0 ? 5.0f : -3.5f * (float)h;
        }
        for (uint32_t p = 0; p < n_pages; p++) {
            entries[p] = slots + (uint64_t)p * s.entry_bytes;
            codes[p] = code_slots + (uint64_t)p * s.code_bytes;
            fill_noise(k, 64 * d, 60 + i * PAGES + p, p % 5 == 4 ? 0.2f : 2.0f);
            fill_noise(v, 64 * d, 70, 1.0f);
            kernels->sparse.encode(&s, &calibration, k, v, slots + (uint64_t)p * s.entry_bytes,
                                   code_slots + (uint64_t)p * s.code_bytes, scratch);
        }
        score(&a);
        for (uint32_t h = 0; h < n_heads; h++) {
            double limit = score_limit(&s, entries, n_pages, selector, rotated + h * d, scale);

            for (uint32_t u = 0; u < n_pages * UNITS; u++) {
                double want = unit_log_mass(&s, entries[u / UNITS], codes[u / UNITS], record, selector, u % UNITS, queries + h * d,
                                            rotated + h * d, scale);
                double error = fabs(log((double)mass[h * a.mass_stride + u]) - (want - (double)references[h]));

                worst = fmax(worst, error / limit);
                if (!(error <= limit)) {
                    fprintf(stderr, "case %zu head %u unit %u: off by %g, allowed %g\n", i, h, u, error, limit);
                    CHECK(false);
                    return;
                }
            }
        }
        /* A head alone has the bits it has in company. */
        for (uint32_t h = 0; h < n_heads; h++) {
            hsri_score_args one = a;

            one.queries += (uint64_t)h * d;
            one.rotated += (uint64_t)h * d;
            one.reference += h;
            one.n_heads = 1;
            one.mass = alone;
            score(&one);
            CHECK(memcmp(alone, mass + h * a.mass_stride, n_pages * UNITS * sizeof *alone) == 0);
        }
        /* Not a number: no mass. Out of range: the most there is. Nothing else changes. */
        memcpy(alone, mass + (n_heads - 1) * a.mass_stride, sizeof alone);
        queries[3] = NAN;
        rotated[0] = n_heads > 1 && i % 3 ? INFINITY : NAN;
        ((uint8_t *)slots)[0] = ((uint8_t *)slots)[1] = 0;   /* scale of page 0: NaN */
        slots[2] = 0xc0;
        slots[3] = 0x7f;
        memcpy(slots + 8 + 2 * d, slots, s.kind == HSRI_INDEX_SKETCH ? 0 : 4);
        score(&a);
        for (uint32_t u = 0; u < n_pages * UNITS; u++)
            CHECK(mass[u] == 0.0f);
        for (uint32_t u = 0; u < UNITS; u++)
            CHECK(mass[(n_heads - 1) * a.mass_stride + u] == 0.0f);
        if (n_heads > 1)
            CHECK(memcmp(alone + UNITS, mass + (n_heads - 1) * a.mass_stride + UNITS, (n_pages - 1) * UNITS * sizeof *alone) == 0);
        references[n_heads - 1] = -300.0f;
        score(&a);
        for (uint32_t u = UNITS; u < n_pages * UNITS && n_heads > 1; u++)
            CHECK(mass[(n_heads - 1) * a.mass_stride + u] == HSRI_MASS_MAX);
        references[n_heads - 1] = NAN;
        score(&a);
        for (uint32_t u = 0; u < n_pages * UNITS; u++)
            CHECK(mass[(n_heads - 1) * a.mass_stride + u] == 0.0f);
        free(slots);
        free(code_slots);
    }
    printf("  scores: worst error %.0f%% of the limit\n", 100 * worst);
}

int main(void)
{
    for (int32_t isa = HSR_ISA_REFERENCE; isa <= hsri_cpu_isa(); isa++) {
        hsri_kernels kernels;

        if (isa == HSR_ISA_AMX && !hsri_cpu_allow_amx())
            continue;
        printf("%s\n", hsri_isa_name(isa));
        hsri_kernels_fill(&kernels, isa);
        test_top(&kernels.sparse);
        test_encode(&kernels);
        test_scores(&kernels);
    }
    return CHECK_REPORT();
}
