/* SPDX-License-Identifier: Apache-2.0 */
/* Encoded pages: what encoding loses, the same bytes at every level, attention against a computation in double precision over the decoded
 * pages, each query alone, and pages that end where memory does. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_test.h"

enum { N_PAGES = 3, N_TOKENS = HSRI_PAGE_TOKENS, MAX_D = 256 };

static const char *const names[HSRI_N_KV_FORMATS] = { "f32", "bf16", "int8", "compact", "vtq" };

/* Largest relative error of pages of noise whose components fade, at any head size. */
static const double most_error[HSRI_N_KV_FORMATS] = { 0, 0, 0.006, 0.16, 0.15 };

typedef struct pages {
    hsri_kv_type format;
    uint32_t     d;
    float       *calibration;                  /* one record */
    hsri_calibration_record record;
    float       *k[N_PAGES], *v[N_PAGES];      /* decoded, once made */
    float       *k0[N_PAGES], *v0[N_PAGES];    /* as they were */
    uint8_t     *slots[N_PAGES];               /* guarded */
    float       *scratch;
} pages;

/* A = H diag(s) and B = H diag(1 / s), H a reflection: A B^T = I. */
static void fill_calibration(float *record, uint32_t d)
{
    float *a = record, *b = a + d * d, *mean = b + d * d, *u = malloc(d * sizeof *u), length = 0;
    for (uint32_t i = 0; i < d; i++) {
        u[i] = random_unit();
        length += u[i] * u[i];
    }
    for (uint32_t i = 0; i < d; i++) {
        for (uint32_t j = 0; j < d; j++) {
            float h = (i == j ? 1.0f : 0.0f) - 2 * u[i] * u[j] / length, s = 2.0f / (1.0f + 2.0f * (float)j / (float)d);
            a[i * d + j] = h * s;
            b[i * d + j] = h / s;
        }
        mean[i] = random_unit();
        mean[d + i] = random_unit();
    }
    free(u);
}

/* `kinds` 2: half of the tokens have values ten times smaller. */
static void fill_page(const pages *p, uint32_t page, uint32_t kinds)
{
    uint32_t d = p->d;
    float *z = malloc(d * sizeof *z);
    for (uint32_t t = 0; t < N_TOKENS; t++) {
        float size = kinds == 2 && t % 3 != 0 ? 0.1f : 1.0f;
        for (uint32_t j = 0; j < d; j++) {
            z[j] = random_unit() / (1.0f + 12.0f * (float)j / (float)d);
            p->v[page][t * d + j] = p->record.mean_v[j] + size * (random_unit() + random_unit());
        }
        for (uint32_t i = 0; i < d; i++) {
            float sum = p->record.mean_k[i] + 0.5f;
            for (uint32_t j = 0; j < d; j++) {
                sum += p->record.b[i * d + j] * z[j];
            }
            p->k[page][t * d + i] = sum;
        }
    }
    free(z);
}

static pages pages_new(hsri_kv_type format, uint32_t d)
{
    pages p = { .format = format, .d = d, .calibration = malloc(hsri_calibration_floats(d) * sizeof(float)) };
    fill_calibration(p.calibration, d);
    p.record = hsri_calibration_at(p.calibration, 1, 0, 0, d);
    p.scratch = aligned_alloc(64, (HSRI_UNITS_SCRATCH + hsri_encode_scratch(d)) / 16 * 64 + 64);
    for (uint32_t i = 0; i < N_PAGES; i++) {
        p.k[i] = malloc((size_t)N_TOKENS * d * sizeof(float));
        p.v[i] = malloc((size_t)N_TOKENS * d * sizeof(float));
        p.k0[i] = malloc((size_t)N_TOKENS * d * sizeof(float));
        p.v0[i] = malloc((size_t)N_TOKENS * d * sizeof(float));
        p.slots[i] = guard_new(hsri_page_bytes(format, d));
        fill_page(&p, i, i == 1 ? 2 : 1);
    }
    return p;
}

static void pages_free(pages *p)
{
    free(p->calibration);
    free(p->scratch);
    for (uint32_t i = 0; i < N_PAGES; i++) {
        free(p->k[i]);
        free(p->v[i]);
        free(p->k0[i]);
        free(p->v0[i]);
        check_guard(p->slots[i]);
        guard_free(p->slots[i]);
    }
}

static hsri_page_header encode(const pages *p, const hsri_kernels *kernels, uint32_t page, uint8_t *slot)
{
    hsri_page_header h = { .magic = HSRI_PAGE_MAGIC, .format = (uint16_t)p->format, .head_dim = (uint16_t)p->d };
    kernels->page.encode[p->format](slot, &h, p->d, p->k[page], p->v[page], &p->record, p->scratch);
    memcpy(slot, &h, sizeof h);
    return h;
}

/* Encodes all pages, and replaces their numbers by the decoded ones. */
static void check_round_trip(pages *p, const hsri_kernels *kernels, const hsri_kernels *reference)
{
    size_t n = (size_t)N_TOKENS * p->d, bytes = hsri_page_bytes(p->format, p->d);
    float *k = malloc(n * sizeof *k), *v = malloc(n * sizeof *v);
    uint8_t *other = malloc(bytes);
    for (uint32_t page = 0; page < N_PAGES; page++) {
        hsri_page_header h = encode(p, kernels, page, p->slots[page]);
        encode(p, reference, page, other);
        check_same("page against the reference's", p->slots[page], other, bytes);
        hsri_page_decode(p->format, p->d, p->slots[page], p->calibration, k, v);
        double error = 0, size = 0;
        for (size_t i = 0; i < n; i++) {
            error += pow(k[i] - p->k[page][i], 2) + pow(v[i] - p->v[page][i], 2);
            size += pow(p->k[page][i], 2) + pow(p->v[page][i], 2);
        }
        error = sqrt(error / size);
        if (!(error <= most_error[p->format]) || !(fabs(error - h.error) <= 0.01 * error)) {
            test_fail("page %u: error %g, its header says %g", page, error, (double)h.error);
        }
        if (p->format == HSRI_KV_TYPE_VTQ && (h.wide != 0) != (page == 1)) {
            test_fail("page %u: taken for %s kinds of values", page, h.wide ? "two" : "one");
        }
        memcpy(p->k0[page], p->k[page], n * sizeof *k);
        memcpy(p->v0[page], p->v[page], n * sizeof *v);
        memcpy(p->k[page], k, n * sizeof *k);
        memcpy(p->v[page], v, n * sizeof *v);
    }
    free(k);
    free(v);
    free(other);
}

/* ---- attention ---- */

typedef struct unit_list {
    uint32_t n;
    uint8_t  page[HSRI_UNITS_MAX], unit[HSRI_UNITS_MAX];
} unit_list;

static void attend(const pages *p, const hsri_kernels *kernels, const unit_list *list, const float *queries, const float *rotated,
                   uint32_t first, uint32_t n, float *out)
{
    const uint8_t *slots[HSRI_UNITS_MAX];
    const float *q[HSRI_ATTEND_MAX_QUERIES], *r[HSRI_ATTEND_MAX_QUERIES];
    float *partials[HSRI_ATTEND_MAX_QUERIES];
    for (uint32_t i = 0; i < list->n; i++) {
        slots[i] = p->slots[list->page[i]];
    }
    for (uint32_t i = 0; i < n; i++) {
        q[i] = queries + (first + i) * p->d;
        r[i] = rotated + (first + i) * p->d;
        partials[i] = out + (size_t)(first + i) * (p->d + 2);
    }
    hsri_units_args a = { .slots = slots, .units = list->unit, .n_units = list->n, .head_dim = p->d, .scale = 0.2f, .n_queries = n,
                          .queries = q, .rotated = r, .partials = partials, .scratch = p->scratch, .calibration = p->record };
    kernels->page.attend[p->format](&a);
}

/* Log of the sum of weights, and the output, of one query in double precision. */
static double attend_exactly(const pages *p, float *const *keys, float *const *values, const unit_list *list, const float *query,
                             double *o)
{
    uint32_t d = p->d, n = list->n * 16;
    double l = 0, score[HSRI_UNITS_MAX * 16], max = -INFINITY;
    for (uint32_t t = 0; t < n; t++) {
        const float *k = keys[list->page[t / 16]] + (list->unit[t / 16] * 16 + t % 16) * d;
        score[t] = 0;
        for (uint32_t j = 0; j < d; j++) {
            score[t] += 0.2 * query[j] * k[j];
        }
        max = fmax(max, score[t]);
    }
    memset(o, 0, d * sizeof *o);
    for (uint32_t t = 0; t < n; t++) {
        const float *v = values[list->page[t / 16]] + (list->unit[t / 16] * 16 + t % 16) * d;
        l += exp(score[t] - max);
        for (uint32_t j = 0; j < d; j++) {
            o[j] += exp(score[t] - max) * v[j];
        }
    }
    for (uint32_t j = 0; j < d; j++) {
        o[j] /= l;
    }
    return max + log(l);
}

/* What a level rounds has to vanish beside what encoding loses: of compact's loss, an eighth in the output, and a quarter in the logs of
 * sums over some queries. (What int8 loses is no more than what rounding to bf16 does.) */
static void check_attention(const pages *p, const unit_list *list, const float *queries, uint32_t n, const float *got, double tolerance)
{
    uint32_t d = p->d;
    double log_error = 0, log_loss = 0, error = 0, loss = 0, want[MAX_D], plain[MAX_D];
    for (uint32_t i = 0; i < n; i++, got += d + 2) {
        double log_l = attend_exactly(p, p->k, p->v, list, queries + i * d, want), got_l = got[0] + log(got[1]);
        log_loss += pow(attend_exactly(p, p->k0, p->v0, list, queries + i * d, plain) - log_l, 2);
        log_error += pow(got_l - log_l, 2);
        bool ok = fabs(got_l - log_l) <= tolerance;
        for (uint32_t j = 0; j < d; j++) {
            double o = got[2 + j] / got[1];
            ok = ok && fabs(o - want[j]) <= tolerance;
            error += pow(o - want[j], 2);
            loss += pow(plain[j] - want[j], 2);
        }
        if (!ok) {
            test_fail("query %u: m %g l %g, exact %g", i, (double)got[0], (double)got[1], log_l);
        }
    }
    if (p->format == HSRI_KV_TYPE_COMPACT && (error > loss / 64 || (n > 16 && log_error > log_loss / 16))) {
        test_fail("%u queries: rounding adds %g to a loss of %g, and %g to one of %g in logs of sums", n, sqrt(error), sqrt(loss),
                  sqrt(log_error), sqrt(log_loss));
    }
}

/* A whole dense group: the pages again and again. */
static unit_list long_list(void)
{
    unit_list list = { .n = HSRI_UNITS_MAX };
    for (uint32_t i = 0; i < list.n; i++) {
        list.page[i] = (uint8_t)(i / 4 % N_PAGES);
        list.unit[i] = (uint8_t)(i % 4);
    }
    return list;
}

static void test_attend(pages *p, const hsri_kernels *kernels, double tolerance)
{
    const unit_list lists[] = {
        { 1, { 2 }, { 3 } },
        { 3, { 0, 0, 1 }, { 1, 3, 0 } },
        { 8, { 0, 0, 0, 1, 1, 2, 2, 2 }, { 0, 1, 2, 0, 3, 1, 2, 3 } },
        { 12, { 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2 }, { 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3 } },
        long_list(),
    };
    static const uint32_t query_counts[] = { 1, 3, 7, 17, 64 };
    uint32_t d = p->d;
    size_t bytes = (size_t)64 * (d + 2) * sizeof(float);
    float *queries = malloc(64 * d * sizeof(float)), *rotated = calloc(64 * d, sizeof(float)), *out = malloc(bytes), *alone = malloc(bytes);
    fill_values(queries, 64 * d, VALUES_UNIT);
    for (uint32_t i = 0; i < 64 * d; i++) {
        for (uint32_t j = 0; j < d; j++) {
            rotated[i] += queries[i / d * d + j] * p->record.b[j * d + i % d];
        }
    }
    for (size_t l = 0; l < sizeof lists / sizeof *lists; l++) {
        for (size_t c = 0; c < sizeof query_counts / sizeof *query_counts; c++) {
            uint32_t n = query_counts[c];
            test_case("%s d=%u list=%zu queries=%u", names[p->format], d, l, n);
            memset(out, 0xff, bytes);
            memset(p->scratch, 0xff, HSRI_UNITS_SCRATCH * sizeof(float));   /* what is left there must not matter */
            attend(p, kernels, &lists[l], queries, rotated, 0, n, out);
            check_attention(p, &lists[l], queries, n, out, tolerance);
            for (uint32_t i = 0; i < n; i++) {
                attend(p, kernels, &lists[l], queries, rotated, i, 1, alone);
            }
            check_same("queries one by one", alone, out, n * (d + 2) * sizeof(float));
        }
    }
    free(queries);
    free(rotated);
    free(out);
    free(alone);
}

/* A NaN or infinity among keys or values shows in the result. */
static void test_bad_values(hsri_kv_type format, const hsri_kernels *kernels)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    const unit_list all = { 4, { 0 }, { 0, 1, 2, 3 } };
    float query[32], out[34];
    for (uint32_t i = 0; i < 6; i++) {
        pages p = pages_new(format, 32);
        test_case("%s with %g among its %s", names[format], (double)bad[i / 2], i % 2 ? "values" : "keys");
        (i % 2 ? p.v : p.k)[0][17 * 32 + 5] = bad[i / 2];
        hsri_page_header h = encode(&p, kernels, 0, p.slots[0]);
        fill_values(query, 32, VALUES_UNIT);
        attend(&p, kernels, &all, query, query, 0, 1, out);
        if (!isnan(h.error) || isfinite(i % 2 ? out[2 + 5] : out[1])) {
            test_fail("error %g, l %g, o %g", (double)h.error, (double)out[1], (double)out[2 + 5]);
        }
        pages_free(&p);
    }
}

/* Pages of equal numbers have scales of zero. */
static void test_constant(hsri_kv_type format, const hsri_kernels *kernels)
{
    pages p = pages_new(format, 32);
    float k[N_TOKENS * 32], v[N_TOKENS * 32];
    test_case("%s of zeros", names[format]);
    memset(p.calibration + 2 * 32 * 32, 0, 2 * 32 * sizeof(float));
    memset(p.k[0], 0, sizeof k);
    memset(p.v[0], 0, sizeof v);
    hsri_page_header h = encode(&p, kernels, 0, p.slots[0]);
    hsri_page_decode(format, 32, p.slots[0], p.calibration, k, v);
    if (h.error != 0) {
        test_fail("error %g", (double)h.error);
    }
    for (uint32_t i = 0; i < N_TOKENS * 32; i++) {
        if (k[i] != 0 || v[i] != 0) {
            test_fail("[%u] is %g, %g", i, (double)k[i], (double)v[i]);
        }
    }
    pages_free(&p);
}

void test_format(const hsri_kernels *kernels, const hsri_kernels *reference, hsri_kv_type format, bool rounds)
{
    static const uint32_t head_dims[] = { 16, 48, 64, 128, 256, 10, 24, 72 };
    for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++) {
        if (hsri_page_bytes(format, head_dims[i]) == 0) {
            continue;
        }
        test_case("%s d=%u", names[format], head_dims[i]);
        pages p = pages_new(format, head_dims[i]);
        check_round_trip(&p, kernels, reference);
        test_attend(&p, kernels, rounds ? 0.03 : 1e-4);
        pages_free(&p);
    }
    test_bad_values(format, kernels);
    test_constant(format, kernels);
}
