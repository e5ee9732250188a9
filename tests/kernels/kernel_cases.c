/* SPDX-License-Identifier: Apache-2.0 */
/* The cases: what each kernel is given, and how far its result may be from the exact one. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_test.h"

/* Limits in units of 2^-24 (half an ulp) of the magnitude. What is checked against the reference gets the limit twice, since
 * both may be off. Results below the normal range are good to a few times 2^-149. */
static const limit limits[] = {
    { "linear", 26, 1e-42, "chains of 16, adds over the runs; magnitude: sum of |w x|, and of |minimum x| for q4; 4 more per 8 runs" },
    { "unpack_row", 2, 1e-44, "a product and a sum of float16 and a code; magnitude: |scale code| + |minimum|" },
    { "rms_norm", 5, 1e-44, "the inverse is rounded once, two products follow; the sum of squares is in double" },
    { "rope", 4, 1e-44, "two products and a sum; magnitude: |x cos| + |y sin|" },
    { "silu_mul", 16, 2e-36, "exp, a sum, a division, a product; below -88 exp(-gate) overflows and the result is 0" },
    { "exp", 3, 1e-44, "softmax weights of exactly representable scores" },
    { "scores", 12, 1e-44, "as linear, over a head; magnitude: scale * sum of |q k|" },
    { "attend", 24, 1e-44, "sums of weights over 1024 tokens; weights carry the error of their scores; magnitude: sum of p |v|" },
    { "sum_exp", 6, 1e-44, "exp and a sum in double precision; magnitude: the sum" },
    { "merge", 8, 1e-44, "two exps, two products, a sum; magnitude: the absolute terms" },
};

static const limit *limit_of(const char *kernel)
{
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        if (strcmp(limits[i].kernel, kernel) == 0) {
            return &limits[i];
        }
    }
    fprintf(stderr, "no limit for %s\n", kernel);
    exit(2);
}

static limit times(const limit *l, double factor)
{
    return (limit) { l->kernel, l->ulps * factor, l->absolute * factor, l->reason };
}

static void report(const char *level, const char *kernel, unsigned failed_before)
{
    printf("%-10s %-16s %s, worst error %.0f%% of the limit\n", level, kernel, n_failed == failed_before ? "ok" : "FAILED",
           worst_share() * 100);
    fflush(stdout);
}

static float *floats(size_t n, values kind)
{
    float *p = guard_new(n * sizeof *p);
    fill_values(p, n, kind);
    return p;
}

/* ---- conversions ---- */

void test_conversions(void)
{
    unsigned before = n_failed;
    test_begin("any", "conversions");
    for (uint32_t h = 0; h < 0x10000; h++) {
        int exponent = h >> 10 & 31, fraction = h & 1023;
        double want = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
        float got = hsri_f16_to_f32((uint16_t)h);
        bool ok = exponent < 31 ? (double)fabsf(got) == want : fraction == 0 ? isinf(got) : isnan(got);
        if (!ok || !signbit(got) != !(h & 0x8000)) {
            test_fail("float16 %04x became %g", h, (double)got);
        }
    }
    for (uint32_t i = 0; i < 300000; i++) {
        static const uint32_t edges[] = { 0, 1, 0x7fff, 0x8000, 0x8001, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff,
                                          0x7f800000, 0x7f800001, 0x7fffffff };
        const uint32_t n_edges = sizeof edges / sizeof *edges;
        uint32_t u = i < 2 * n_edges ? edges[i / 2] | i % 2 << 31 : random_u32();
        float f;
        memcpy(&f, &u, 4);
        uint16_t b = hsri_f32_to_bf16(f);
        if (isnan(f) ? !isnan(hsri_bf16_to_f32(b)) : false) {
            test_fail("bfloat16 lost NaN %08x", u);
        } else if (!isnan(f)) {
            /* The right neighbour is the one whose distance is least; of two, the even one. Neighbours differ by one in the bits. */
            uint32_t low = u >> 16, rest = u & 0xffff;
            uint32_t want = rest > 0x8000 || (rest == 0x8000 && low % 2 == 1) ? low + 1 : low;
            if (b != want) {
                test_fail("%08x became bfloat16 %04x, should be %04x", u, b, want);
            }
        }
    }
    static const struct { uint32_t n, k; uint64_t bytes[HSRI_N_DTYPES]; } sizes[] = {
        { 1, 1, { 2048, 1024, 512 + 32, 256 + 64 } },
        { 17, 33, { 8192, 4096, 2048 + 128, 1024 + 256 } },
        { 49152, 576, { 113246208, 56623104, 30081024, 17694720 } },
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int dtype = 0; dtype < HSRI_N_DTYPES; dtype++) {
            uint64_t got = hsri_packed_bytes((hsri_dtype)dtype, sizes[i].n, sizes[i].k);
            if (got != sizes[i].bytes[dtype]) {
                test_fail("%s %ux%u takes %llu bytes", dtype_names[dtype], sizes[i].n, sizes[i].k, (unsigned long long)got);
            }
        }
    }
    report("any", "conversions", before);
}

/* ---- linear ---- */

/* One product: inputs in rows further apart than needed, so are the outputs; the gaps must stay as they were. */
typedef struct product {
    packed_test p;
    float *x, *bias, *out, *reference;
    uint32_t m, x_stride, out_stride;
} product;

/* Whether a level rounds inputs, and the weights that q8 and q4 stand for, to bf16. */
static bool rounds_inputs(const hsri_kernels *kernels, hsri_dtype dtype)
{
    return kernels->prepare[dtype] != NULL;
}

static void round_to_bf16(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = hsri_bf16_to_f32(hsri_f32_to_bf16(x[i]));
    }
}

/* kernels->linear, with prepared inputs if the level wants them. */
static void multiply(const hsri_kernels *kernels, hsri_dtype dtype, const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x,
                     uint64_t x_stride, uint32_t m, const float *bias, float *out, uint64_t out_stride)
{
    if (kernels->prepare[dtype] == NULL) {
        kernels->linear[dtype](w, panel0, panel1, x, x_stride, m, bias, out, out_stride);
        return;
    }
    uint64_t stride = hsri_prepared_stride(w->k);
    float *prepared = guard_new(m * stride * sizeof *prepared);
    kernels->prepare[dtype](x, x_stride, m, w->k, prepared);
    check_guard(prepared);
    kernels->linear[dtype](w, panel0, panel1, prepared, stride, m, bias, out, out_stride);
    guard_free(prepared);
}

static product product_new(hsri_dtype dtype, uint32_t n, uint32_t k, uint32_t m, values weights, values inputs)
{
    product t = { .m = m, .x_stride = k + random_below(3), .out_stride = n + random_below(3) };
    float *plain = malloc((size_t)n * k * sizeof *plain);
    fill_values(plain, (size_t)n * k, weights);
    t.p = pack(dtype, n, k, plain);
    free(plain);
    /* the last row has no gap behind it */
    t.x = guard_new(((size_t)(m - 1) * t.x_stride + k) * sizeof *t.x);
    for (uint32_t i = 0; i < m; i++) {
        fill_values(t.x + (size_t)i * t.x_stride, k, inputs);
    }
    t.bias = floats(n, inputs);
    t.out = guard_new(((size_t)(m - 1) * t.out_stride + n) * sizeof *t.out);
    t.reference = guard_new(((size_t)(m - 1) * t.out_stride + n) * sizeof *t.reference);
    return t;
}

static void product_free(product *t)
{
    packed_free(&t->p);
    guard_free(t->x);
    guard_free(t->bias);
    guard_free(t->out);
    guard_free(t->reference);
}

/* p: the weights that the product should be of. flushed: numbers below the normal range may count as zero, which changes each
 * product (weights are below 1 here) and the sums it goes through by less than 2^-126. */
static void product_check(const product *t, const packed_test *p, hsri_dtype dtype, const float *bias, bool flushed)
{
    const hsri_packed *w = &p->w;
    limit exact = times(limit_of("linear"), 1.0);
    exact.ulps += 4.0 * (w->n_runs / 8);
    exact.absolute += flushed ? 3.0 * w->k * 0x1p-126 : 0.0;
    limit twice = times(&exact, 2.0);
    for (uint32_t i = 0; i < t->m; i++) {
        for (uint32_t n = 0; n < w->n; n++) {
            double sum = 0.0, magnitude = 0.0;
            for (uint32_t k = 0; k < w->k; k++) {
                double weight = p->decoded[(size_t)n * w->k + k], x = t->x[(size_t)i * t->x_stride + k];
                sum += weight * x;
                magnitude += fabs(weight * x);
                if (dtype == HSRI_DTYPE_Q4) {
                    /* scale * code and minimum are summed apart; both are at most twice the largest weight */
                    magnitude += 3.0 * fabs(x);
                }
            }
            sum += bias != NULL ? bias[n] : 0.0;
            magnitude += bias != NULL ? fabs((double)bias[n]) : 0.0;
            size_t at = (size_t)i * t->out_stride + n;
            check_close(&exact, "exact", at, t->out[at], sum, magnitude);
            check_close(&twice, "reference", at, t->out[at], t->reference[at], magnitude);
        }
        /* NaN bytes of the gap behind the row */
        for (uint32_t n = w->n; n < t->out_stride && i + 1 < t->m; n++) {
            if (!isnan(t->out[(size_t)i * t->out_stride + n])) {
                test_fail("wrote behind row %u", i);
            }
        }
    }
    check_guard(t->out);
}

static void test_linear_values(const hsri_kernels *kernels, const hsri_kernels *reference, hsri_dtype dtype)
{
    static const struct { uint32_t n, k; } shapes[] = {
        { 1, 1 }, { 1, 2 }, { 3, 5 }, { 16, 32 }, { 17, 33 }, { 15, 31 }, { 32, 63 }, { 33, 64 }, { 47, 96 },
        { 64, 100 }, { 80, 576 }, { 5, 1100 },
    };
    static const uint32_t row_counts[] = { 1, 2, 3, 4, 5, 6, 7, 8, 13, 33 };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (size_t c = 0; c < sizeof row_counts / sizeof *row_counts; c++) {
            for (int kind = 0; kind < N_VALUES; kind++) {
                uint32_t n = shapes[s].n, k = shapes[s].k, m = row_counts[c];
                if (kind != VALUES_UNIT && m > 7) {
                    continue;
                }
                test_case("n=%u k=%u rows=%u values=%d", n, k, m, kind);
                values weights = dtype == HSRI_DTYPE_F32 && kind == VALUES_DENORMAL ? VALUES_DENORMAL : VALUES_UNIT;
                product t = product_new(dtype, n, k, m, weights, (values)kind);
                const float *bias = c % 2 == 0 ? t.bias : NULL;
                uint32_t panels = (n + 15) / 16;
                bool rounds = rounds_inputs(kernels, dtype);
                if (rounds) {
                    round_to_bf16(t.x, (size_t)(m - 1) * t.x_stride + k);
                }
                multiply(kernels, dtype, &t.p.w, 0, panels, t.x, t.x_stride, m, bias, t.out, t.out_stride);
                if (rounds && dtype != HSRI_DTYPE_BF16) {
                    /* the weights are then those of a bf16 matrix, and so are the bits */
                    packed_test as_bf16 = pack(HSRI_DTYPE_BF16, n, k, t.p.rounded);
                    multiply(kernels, HSRI_DTYPE_BF16, &as_bf16.w, 0, panels, t.x, t.x_stride, m, bias, t.reference, t.out_stride);
                    check_same("output", t.out, t.reference, ((size_t)(m - 1) * t.out_stride + n) * sizeof(float));
                    multiply(reference, HSRI_DTYPE_BF16, &as_bf16.w, 0, panels, t.x, t.x_stride, m, bias, t.reference, t.out_stride);
                    product_check(&t, &as_bf16, HSRI_DTYPE_BF16, bias, true);
                    packed_free(&as_bf16);
                } else {
                    multiply(reference, dtype, &t.p.w, 0, panels, t.x, t.x_stride, m, bias, t.reference, t.out_stride);
                    product_check(&t, &t.p, dtype, bias, rounds);
                }
                product_free(&t);
            }
        }
    }
}

/* A row has the same bits for any number of rows and for any cut of the panels. */
static void test_linear_bits(const hsri_kernels *kernels, hsri_dtype dtype)
{
    static const struct { uint32_t n, k, m; } shapes[] = { { 83, 160, 33 }, { 33, 77, 33 }, { 20, 1100, 33 }, { 35, 1100, 125 },
                                                           { 17, 4000, 33 }, { 17, 3900, 125 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        uint32_t n = shapes[s].n, k = shapes[s].k, most = shapes[s].m, panels = (n + 15) / 16;
        product t = product_new(dtype, n, k, most, VALUES_UNIT, s % 2 == 0 ? VALUES_UNIT : VALUES_WIDE);
        for (uint32_t i = 0; i < most; i++) {
            multiply(kernels, dtype, &t.p.w, 0, panels, t.x + (size_t)i * t.x_stride, t.x_stride, 1, t.bias,
                     t.reference + (size_t)i * t.out_stride, t.out_stride);
        }
        for (uint32_t m = most > 33 ? most : 1; m <= most; m++) {
            size_t bytes = ((size_t)(m - 1) * t.out_stride + n) * sizeof(float);
            test_case("n=%u k=%u: 1 row against %u", n, k, m);
            memset(t.out, 0xff, bytes);
            multiply(kernels, dtype, &t.p.w, 0, panels, t.x, t.x_stride, m, t.bias, t.out, t.out_stride);
            check_same("output", t.out, t.reference, bytes);
            test_case("n=%u k=%u rows=%u: panels cut", n, k, m);
            memset(t.out, 0xff, bytes);
            for (uint32_t p = 0, next; p < panels; p = next) {
                next = p + 1 + random_below(panels - p);
                multiply(kernels, dtype, &t.p.w, p, next, t.x, t.x_stride, m, t.bias, t.out, t.out_stride);
            }
            check_same("output", t.out, t.reference, bytes);
        }
        check_guard(t.out);
        product_free(&t);
    }
}

/* Inputs of full precision give the bits of inputs that were rounded before, to the nearest, ties to even. */
static void test_linear_rounding(const hsri_kernels *kernels, hsri_dtype dtype)
{
    if (!rounds_inputs(kernels, dtype)) {
        return;
    }
    for (uint32_t m = 1; m <= 40; m += 13) {
        product t = product_new(dtype, 40, 301, m, VALUES_UNIT, VALUES_UNIT);
        size_t n_inputs = (size_t)(m - 1) * t.x_stride + 301, bytes = ((size_t)(m - 1) * t.out_stride + 40) * sizeof(float);
        test_case("rows=%u", m);
        t.x[0] = 0x1.010000p0f;   /* ties */
        t.x[1] = 0x1.030000p0f;
        multiply(kernels, dtype, &t.p.w, 0, 3, t.x, t.x_stride, m, NULL, t.out, t.out_stride);
        round_to_bf16(t.x, n_inputs);
        multiply(kernels, dtype, &t.p.w, 0, 3, t.x, t.x_stride, m, NULL, t.reference, t.out_stride);
        check_same("output", t.out, t.reference, bytes);
        product_free(&t);
    }
}

/* A bad input reaches every output of its row, and no other row. */
static void test_linear_nan(const hsri_kernels *kernels, hsri_dtype dtype)
{
    product t = product_new(dtype, 33, 70, 9, VALUES_UNIT, VALUES_UNIT);
    for (uint32_t k = 0; k < 70; k += 23) {
        test_case("NaN in input %u", k);
        t.x[4 * t.x_stride + k] = NAN;
        multiply(kernels, dtype, &t.p.w, 0, 3, t.x, t.x_stride, 9, NULL, t.out, t.out_stride);
        for (uint32_t i = 0; i < 9; i++) {
            for (uint32_t n = 0; n < 33; n++) {
                if (!isnan(t.out[i * t.out_stride + n]) != (i != 4)) {
                    test_fail("row %u output %u is %g", i, n, (double)t.out[i * t.out_stride + n]);
                }
            }
        }
        t.x[4 * t.x_stride + k] = 1.0f;
    }
    product_free(&t);
}

static void test_unpack_row(const hsri_kernels *kernels, hsri_dtype dtype)
{
    const limit *l = limit_of("unpack_row");
    static const struct { uint32_t n, k; } shapes[] = { { 1, 1 }, { 37, 70 }, { 16, 64 } };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        uint32_t n = shapes[s].n, k = shapes[s].k;
        product t = product_new(dtype, n, k, 1, VALUES_UNIT, VALUES_UNIT);
        float *out = guard_new(k * sizeof *out);
        for (uint32_t row = 0; row < n; row++) {
            test_case("n=%u k=%u row=%u", n, k, row);
            kernels->unpack_row[dtype](&t.p.w, row, out);
            for (uint32_t i = 0; i < k; i++) {
                double want = t.p.decoded[(size_t)row * k + i];
                /* all but q4 are exact: scale * code has few bits */
                check_close(l, "exact", i, out[i], want, dtype == HSRI_DTYPE_Q4 ? 3.0 : 0.0);
            }
        }
        check_guard(out);
        guard_free(out);
        product_free(&t);
    }
}

/* ---- rows ---- */

static const uint32_t widths[] = { 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 576, 1001 };
#define N_WIDTHS (sizeof widths / sizeof *widths)

static void test_rms_norm(const hsri_kernels *kernels, const hsri_kernels *reference)
{
    const limit *l = limit_of("rms_norm");
    limit twice = times(l, 2.0);
    for (size_t w = 0; w < N_WIDTHS; w++) {
        for (int kind = 0; kind < N_VALUES; kind++) {
            for (int in_place = 0; in_place < 2; in_place++) {
                uint32_t n = widths[w];
                test_case("width=%u values=%d in_place=%d", n, kind, in_place);
                float *in = floats(n, (values)kind), *gain = floats(n, VALUES_UNIT), *ref = floats(n, VALUES_ZERO);
                float *out = in_place ? in : guard_new(n * sizeof *out);
                double sum = 0.0;
                for (uint32_t i = 0; i < n; i++) {
                    sum += (double)in[i] * in[i];
                }
                double inverse = 1.0 / sqrt(sum / n + (double)1e-5f);
                double *want = malloc(n * sizeof *want);
                for (uint32_t i = 0; i < n; i++) {
                    want[i] = gain[i] * (in[i] * inverse);
                }
                reference->rms_norm(in, gain, 1e-5f, n, ref);
                kernels->rms_norm(in, gain, 1e-5f, n, out);
                for (uint32_t i = 0; i < n; i++) {
                    check_close(l, "exact", i, out[i], want[i], fabs(want[i]));
                    check_close(&twice, "reference", i, out[i], ref[i], fabs(want[i]));
                }
                check_guard(out);
                free(want);
                guard_free(in);
                guard_free(gain);
                guard_free(ref);
                if (!in_place) {
                    guard_free(out);
                }
            }
        }
    }
}

static void test_rope(const hsri_kernels *kernels, const hsri_kernels *reference)
{
    const limit *l = limit_of("rope");
    limit twice = times(l, 2.0);
    for (size_t w = 0; w < N_WIDTHS; w++) {
        uint32_t half = widths[w], r = 2 * half;
        if (r > 256) {
            continue;
        }
        test_case("rotary_dim=%u", r);
        /* Components behind the rotating ones stay. */
        float *x = floats(r + 5, VALUES_UNIT), *ref = floats(r + 5, VALUES_ZERO), *old = floats(r + 5, VALUES_ZERO);
        float *cos_sin = guard_new(r * sizeof *cos_sin);
        for (uint32_t j = 0; j < half; j++) {
            cos_sin[j] = cosf((float)j);
            cos_sin[half + j] = sinf((float)j);
        }
        memcpy(ref, x, (r + 5) * sizeof *x);
        memcpy(old, x, (r + 5) * sizeof *x);
        reference->rope(ref, cos_sin, r, ref);
        float *apart = floats(r, VALUES_ZERO);
        kernels->rope(x, cos_sin, r, apart);
        kernels->rope(x, cos_sin, r, x);
        check_same("the result elsewhere", apart, x, r * sizeof *x);
        check_guard(apart);
        guard_free(apart);
        for (uint32_t j = 0; j < half; j++) {
            double c = cos_sin[j], s = cos_sin[half + j], a = old[j], b = old[half + j];
            check_close(l, "exact", j, x[j], a * c - b * s, fabs(a * c) + fabs(b * s));
            check_close(l, "exact", half + j, x[half + j], b * c + a * s, fabs(b * c) + fabs(a * s));
            check_close(&twice, "reference", j, x[j], ref[j], fabs(a * c) + fabs(b * s));
            check_close(&twice, "reference", half + j, x[half + j], ref[half + j], fabs(b * c) + fabs(a * s));
        }
        check_same("components behind rotary_dim", x + r, old + r, 5 * sizeof *x);
        check_guard(x);
        guard_free(x);
        guard_free(ref);
        guard_free(old);
        guard_free(cos_sin);
    }
}

static void test_silu_mul(const hsri_kernels *kernels, const hsri_kernels *reference)
{
    const limit *l = limit_of("silu_mul");
    limit twice = times(l, 2.0);
    for (size_t w = 0; w < N_WIDTHS; w++) {
        uint32_t n = widths[w];
        size_t n_in = (n + 15) / 16 * 32;
        test_case("n=%u", n);
        float *in = floats(n_in, VALUES_UNIT), *out = guard_new(n * sizeof *out), *ref = guard_new(n * sizeof *ref);
        for (uint32_t i = 0; i < n; i++) {
            float *gate = in + i / 16 * 32 + i % 16;
            static const float scales[] = { 1e-30f, 1e-3f, 1.0f, 10.0f, 100.0f, 1e4f, 1e30f };
            *gate *= scales[random_below(7)];
        }
        reference->silu_mul(in, n, ref);
        kernels->silu_mul(in, n, out);
        for (uint32_t i = 0; i < n; i++) {
            const float *gate = in + i / 16 * 32 + i % 16;
            double g = gate[0], want = g / (1.0 + exp(-g)) * gate[16];
            check_close(l, "exact", i, out[i], want, fabs(want));
            check_close(&twice, "reference", i, out[i], ref[i], fabs(want));
        }
        test_case("n=%u NaN", n);
        in[(n - 1) / 16 * 32 + (n - 1) % 16] = NAN;
        kernels->silu_mul(in, n, out);
        if (!isnan(out[n - 1])) {
            test_fail("NaN became %g", (double)out[n - 1]);
        }
        check_guard(out);
        guard_free(in);
        guard_free(out);
        guard_free(ref);
    }
}

/* The matrix that changes nothing, as bf16. */
static uint8_t *identity(uint32_t n)
{
    uint64_t bytes = hsri_packed_bytes(HSRI_DTYPE_BF16, n, n);
    uint8_t *data = guard_new(bytes);
    memset(data, 0, bytes);
    for (uint32_t i = 0; i < n; i++) {
        uint16_t one = 0x3f80;
        memcpy(data + ((uint64_t)(i / 16) * ((n + 31) / 32) + i / 32) * 1024 + i % 32 / 2 * 64 + i % 16 * 4 + i % 2 * 2, &one, sizeof one);
    }
    return data;
}

/* What comes out of the identity is what has gone in: a number that is rounded once to 8 bits, and moved by a sixteenth of that before.
 * As in silu_mul, what is below 2e-36 may be 0. */
static void test_silu_prepare(const hsri_kernels *kernels)
{
    enum { ROWS = 3 };
    for (size_t w = 0; w < N_WIDTHS && kernels->silu_prepare[HSRI_DTYPE_BF16] != NULL; w++) {
        uint32_t n = widths[w];
        size_t n_in = (n + 15) / 16 * 32, stride = hsri_prepared_stride(n);
        uint8_t *data = identity(n);
        hsri_packed one = hsri_packed_at(data, HSRI_DTYPE_BF16, n, n);
        float *in = floats(ROWS * n_in, VALUES_UNIT), *out = guard_new(ROWS * n * sizeof *out);
        float *prepared = guard_new(ROWS * stride * sizeof *prepared), *alone = guard_new(stride * sizeof *alone);
        test_case("n=%u", n);
        for (size_t i = 0; i < ROWS * n_in; i++) {
            static const float scales[] = { 1e-30f, 1e-3f, 1.0f, 10.0f, 100.0f, 1e4f, 1e30f };
            in[i] *= i / 16 % 2 == 0 ? scales[random_below(7)] : 1.0f;
        }
        memset(prepared, 0, ROWS * stride * sizeof *prepared);
        memset(alone, 0, stride * sizeof *alone);
        kernels->silu_prepare[HSRI_DTYPE_BF16](in, n_in, ROWS, n, prepared, stride);
        kernels->linear[HSRI_DTYPE_BF16](&one, 0, (n + 15) / 16, prepared, stride, ROWS, NULL, out, n);
        for (uint32_t i = 0; i < ROWS * n; i++) {
            const float *gate = in + i / n * n_in + i % n / 16 * 32 + i % n % 16;
            double g = gate[0], want = g / (1.0 + exp(-g)) * gate[16];
            if (!(fabs(out[i] - want) <= fabs(want) * 0x1.1p-8 + 2e-36)) {
                test_fail("silu(%g) * %g became %.9g in place of %.9g", g, (double)gate[16], (double)out[i], want);
            }
        }
        for (uint32_t i = 0; i < ROWS; i++) {
            kernels->silu_prepare[HSRI_DTYPE_BF16](in + i * n_in, n_in, 1, n, alone, stride);
            check_same("row", prepared + i * stride, alone, stride * sizeof *alone);
        }
        for (int dtype = HSRI_DTYPE_Q8; dtype < HSRI_N_DTYPES; dtype++) {
            kernels->silu_prepare[dtype](in, n_in, 1, n, alone, stride);
            check_same("dtype", prepared, alone, kernels->prepare[dtype] == kernels->prepare[HSRI_DTYPE_BF16] ? stride * sizeof *alone : 0);
        }
        in[(n - 1) / 16 * 32 + (n - 1) % 16] = NAN;
        kernels->silu_prepare[HSRI_DTYPE_BF16](in, n_in, 1, n, alone, stride);
        kernels->linear[HSRI_DTYPE_BF16](&one, 0, (n + 15) / 16, alone, stride, 1, NULL, out, n);
        if (!isnan(out[n - 1])) {
            test_fail("NaN became %g", (double)out[n - 1]);
        }
        check_guard(prepared);
        check_guard(alone);
        guard_free(data);
        guard_free(in);
        guard_free(out);
        guard_free(prepared);
        guard_free(alone);
    }
}

static void test_add(const hsri_kernels *kernels)
{
    for (size_t w = 0; w < N_WIDTHS; w++) {
        uint32_t n = widths[w];
        test_case("n=%u", n);
        float *x = floats(n, VALUES_WIDE), *y = floats(n, VALUES_WIDE), *want = guard_new(n * sizeof *want);
        for (uint32_t i = 0; i < n; i++) {
            want[i] = x[i] + y[i];
        }
        kernels->add(x, y, n);
        check_same("sum", x, want, n * sizeof *x);
        check_guard(x);
        guard_free(x);
        guard_free(y);
        guard_free(want);
    }
}

static void test_sum_exp(const hsri_kernels *kernels)
{
    const limit *l = limit_of("sum_exp");
    for (size_t w = 0; w < N_WIDTHS; w++) {
        for (int banned = 0; banned < 2; banned++) {
            uint32_t n = widths[w], at = random_below(n);
            test_case("n=%u banned=%d", n, banned);
            float *x = floats(n, VALUES_UNIT), max = -INFINITY;
            double want = 0.0;
            for (uint32_t i = 0; i < n; i++) {
                x[i] = banned && i != at && i % 3 == 0 ? -INFINITY : 40.0f * x[i];
                max = x[i] > max ? x[i] : max;
            }
            for (uint32_t i = 0; i < n; i++) {
                want += exp((double)(x[i] - max));
            }
            check_close(l, "exact", 0, (float)kernels->sum_exp(x, n, max), want, want);
            guard_free(x);
        }
    }
}

static void test_nonfinite(const hsri_kernels *kernels)
{
    static const float bad[] = { NAN, -NAN, INFINITY, -INFINITY };
    for (size_t w = 0; w < N_WIDTHS; w++) {
        uint32_t n = widths[w];
        float *x = floats(n, VALUES_WIDE);
        x[random_below(n)] = FLT_MAX;
        x[random_below(n)] = -FLT_TRUE_MIN;
        test_case("n=%u", n);
        if (kernels->nonfinite(x, n) != 0) {
            test_fail("finite numbers reported");
        }
        for (uint32_t i = 0; i < n; i++) {
            float old = x[i];
            x[i] = bad[i % 4];
            if (kernels->nonfinite(x, n) != 1) {
                test_fail("%g at %u missed", (double)x[i], i);
            }
            x[i] = old;
        }
        guard_free(x);
    }
    if (kernels->nonfinite(NULL, 0) != 0) {
        test_fail("nothing reported");
    }
}

/* ---- pages ---- */

static const uint32_t head_dims[] = { 2, 6, 16, 24, 30, 32, 48, 62, 64, 66, 80, 96, 100, 128, 256 };
#define N_HEAD_DIMS (sizeof head_dims / sizeof *head_dims)

/* Offsets of key and value component j of token t in a slot, spelled out from the layout in device.h. */
static size_t key_offset(hsri_kv_type type, uint32_t d, uint32_t t, uint32_t j)
{
    (void)d;
    return 64 + (type == HSRI_KV_TYPE_F32 ? (j * 64 + t) * 4 : (j / 2 * 128 + t * 2 + j % 2) * 2);
}

static size_t value_offset(hsri_kv_type type, uint32_t d, uint32_t t, uint32_t j)
{
    return 64 + (type == HSRI_KV_TYPE_F32 ? d * 256 + (t * d + j) * 4 : d * 128 + (t / 2 * d * 2 + j * 2 + t % 2) * 2);
}

static void store_element(hsri_kv_type type, uint8_t *at, float f)
{
    uint16_t b = hsri_f32_to_bf16(f);
    memcpy(at, type == HSRI_KV_TYPE_F32 ? (const void *)&f : &b, type == HSRI_KV_TYPE_F32 ? 4 : 2);
}

static double load_element(hsri_kv_type type, const uint8_t *at)
{
    float f;
    uint16_t b;
    memcpy(&f, at, type == HSRI_KV_TYPE_F32 ? 4 : 2);
    memcpy(&b, at, 2);
    return type == HSRI_KV_TYPE_F32 ? f : hsri_bf16_to_f32(b);
}

static void test_page_put(const hsri_kernels *kernels, hsri_kv_type type)
{
    for (size_t h = 0; h < N_HEAD_DIMS; h++) {
        uint32_t d = head_dims[h];
        size_t bytes = hsri_plain_page_bytes(type, d);
        uint8_t *slot = guard_new(bytes), *want = guard_new(bytes);
        float *k = floats(d, VALUES_WIDE), *v = floats(d, VALUES_WIDE);
        k[d / 2] = NAN;
        v[d - 1] = INFINITY;
        for (uint32_t n = 0; n < 20; n++) {
            uint32_t t = n == 0 ? 0 : n == 1 ? 63 : random_below(64);
            test_case("d=%u t=%u", d, t);
            k[n % d] = random_unit();
            v[n % d] = random_unit();
            kernels->page_put[type](slot, d, t, k, v);
            for (uint32_t j = 0; j < d; j++) {
                store_element(type, want + key_offset(type, d, t, j), k[j]);
                store_element(type, want + value_offset(type, d, t, j), v[j]);
            }
            check_same("slot", slot, want, bytes);
        }
        check_guard(slot);
        guard_free(slot);
        guard_free(want);
        guard_free(k);
        guard_free(v);
    }
}

/* ---- attention ---- */

typedef struct attention {
    hsri_kv_type type;
    uint32_t d, n_tokens, n_queries;
    uint8_t *slots[16];
    float *queries, *partials, *scratch;
    uint32_t visible[HSRI_ATTEND_MAX_QUERIES];
} attention;

/* Tokens behind n_tokens stay NaN. */
static attention attention_new(hsri_kv_type type, uint32_t d, uint32_t n_tokens, uint32_t n_queries)
{
    attention t = { .type = type, .d = d, .n_tokens = n_tokens, .n_queries = n_queries };
    for (uint32_t p = 0; p < (n_tokens + 63) / 64; p++) {
        t.slots[p] = guard_new(hsri_plain_page_bytes(type, d));
    }
    for (uint32_t i = 0; i < n_tokens; i++) {
        for (uint32_t j = 0; j < d; j++) {
            store_element(type, t.slots[i / 64] + key_offset(type, d, i % 64, j), random_unit());
            store_element(type, t.slots[i / 64] + value_offset(type, d, i % 64, j), random_unit());
        }
    }
    t.queries = floats((size_t)n_queries * d, VALUES_UNIT);
    t.partials = guard_new((size_t)n_queries * (d + 2) * sizeof(float));
    t.scratch = guard_new(HSRI_ATTEND_SCRATCH * sizeof(float));
    return t;
}

static void attention_free(attention *t)
{
    for (uint32_t p = 0; p < 16 && t->slots[p] != NULL; p++) {
        guard_free(t->slots[p]);
    }
    guard_free(t->queries);
    guard_free(t->partials);
    guard_free(t->scratch);
}

/* Run queries [first, first + n). */
static void attention_run(const attention *t, const hsri_kernels *kernels, uint32_t first, uint32_t n)
{
    const float *queries[HSRI_ATTEND_MAX_QUERIES];
    float *partials[HSRI_ATTEND_MAX_QUERIES];
    for (uint32_t i = 0; i < n; i++) {
        queries[i] = t->queries + (size_t)(first + i) * t->d;
        partials[i] = t->partials + (size_t)(first + i) * (t->d + 2);
    }
    hsri_attend_args a = {
        .pages = (const uint8_t *const *)t->slots, .n_pages = (t->n_tokens + 63) / 64, .head_dim = t->d, .scale = 0.7f, .n_queries = n,
        .queries = queries, .visible = t->visible + first, .partials = partials, .scratch = t->scratch,
    };
    kernels->attend[t->type](&a);
}

/* Whether a level rounds queries and softmax weights to bf16 where pages are bf16. */
static bool rounds_attention(const hsri_kernels *kernels, hsri_kv_type type)
{
    return type == HSRI_KV_TYPE_BF16 && rounds_inputs(kernels, HSRI_DTYPE_BF16);
}

/* Each weight is off by at most this share of itself (test_weights); below 2^-126 it is 0. */
#define WEIGHT_ERROR 0.0075

static limit sums_of_rounded(const limit *sums)
{
    return (limit) { sums->kernel, sums->ulps + WEIGHT_ERROR * 0x1p24, sums->absolute + HSRI_GROUP_TOKENS * 0x1p-126, sums->reason };
}

static void attention_check(const attention *t, const float *reference, bool rounds)
{
    double *score = malloc((t->n_tokens + 1) * sizeof *score);
    for (uint32_t i = 0; i < t->n_queries; i++) {
        const float *got = t->partials + (size_t)i * (t->d + 2), *ref = reference + (size_t)i * (t->d + 2);
        double max = -INFINITY, magnitude = 0.0, l = 0.0;
        for (uint32_t n = 0; n < t->visible[i]; n++) {
            double sum = 0.0, size = 0.0;
            for (uint32_t j = 0; j < t->d; j++) {
                double key = load_element(t->type, t->slots[n / 64] + key_offset(t->type, t->d, n % 64, j));
                double term = 0.7f * key * t->queries[(size_t)i * t->d + j];
                sum += term;
                size += fabs(term);
            }
            score[n] = sum;
            max = fmax(max, sum);
            magnitude = fmax(magnitude, size);
        }
        const limit *scores = limit_of("scores");
        /* A level that rounds weights takes a number near the maximum for it, so that it need not know the maximum before. */
        double m = max, rebase = 1.0;
        if (rounds && t->visible[i] > 0) {
            m = got[0];
            rebase = exp(ref[0] - m);
            if (!(m > max - 6.0 && m < max + 6.5)) {
                test_fail("query %u has m %g, exact (m) says %g", i, m, max);
            }
        } else {
            check_close(scores, "exact (m)", i, got[0], max, magnitude);
        }
        /* An error of a score is the same relative error of its weight. */
        limit sums = times(limit_of("attend"), 1.0);
        sums.ulps += 2 * scores->ulps * magnitude;
        if (rounds) {
            sums = sums_of_rounded(&sums);
        }
        limit twice = times(&sums, 2.0);
        for (uint32_t n = 0; n < t->visible[i]; n++) {
            score[n] = exp(score[n] - m);
            l += score[n];
        }
        check_close(&sums, "exact (l)", i, got[1], l, l);
        check_close(&twice, "reference (l)", i, got[1], ref[1] * rebase, l);
        for (uint32_t j = 0; j < t->d; j++) {
            double o = 0.0, size = 0.0;
            for (uint32_t n = 0; n < t->visible[i]; n++) {
                double term = score[n] * load_element(t->type, t->slots[n / 64] + value_offset(t->type, t->d, n % 64, j));
                o += term;
                size += fabs(term);
            }
            check_close(&sums, "exact (o)", j, got[2 + j], o, size);
            check_close(&twice, "reference (o)", j, got[2 + j], ref[2 + j] * rebase, size);
        }
        if (t->visible[i] == 0 && (got[0] != -INFINITY || got[1] != 0.0f)) {
            test_fail("query %u sees nothing but has m %g, l %g", i, (double)got[0], (double)got[1]);
        }
    }
    free(score);
}

static void set_visible(attention *t, uint32_t pattern)
{
    for (uint32_t i = 0; i < t->n_queries; i++) {
        switch (pattern) {
        case 0:  t->visible[i] = t->n_tokens; break;
        /* rows of a chunk, two heads each, the last of which sees all */
        case 1:  t->visible[i] = t->n_tokens > (t->n_queries - 1 - i) / 2 ? t->n_tokens - (t->n_queries - 1 - i) / 2 : 0; break;
        default: t->visible[i] = random_below(t->n_tokens + 1); break;
        }
    }
}

/* All queries together against exact results and the reference, and each alone against all together. */
static void attention_case(attention *t, const hsri_kernels *kernels, const hsri_kernels *reference)
{
    bool rounds = rounds_attention(kernels, t->type);
    if (rounds) {
        round_to_bf16(t->queries, (size_t)t->n_queries * t->d);
    }
    size_t bytes = (size_t)t->n_queries * (t->d + 2) * sizeof(float);
    float *ref = malloc(bytes);
    attention_run(t, reference, 0, t->n_queries);
    memcpy(ref, t->partials, bytes);
    memset(t->partials, 0xff, bytes);
    attention_run(t, kernels, 0, t->n_queries);
    attention_check(t, ref, rounds);
    check_guard(t->partials);
    check_guard(t->scratch);
    memcpy(ref, t->partials, bytes);
    memset(t->partials, 0xff, bytes);
    for (uint32_t i = 0; i < t->n_queries; i++) {
        attention_run(t, kernels, i, 1);
    }
    check_same("queries one by one", t->partials, ref, bytes);
    free(ref);
}

static void test_attend_values(const hsri_kernels *kernels, const hsri_kernels *reference, hsri_kv_type type)
{
    static const uint32_t token_counts[] = { 1, 2, 33, 64, 65, 127, 300, 1024 }, query_counts[] = { 1, 2, 3, 7, 13, 33, 64 };
    for (size_t h = 0; h < N_HEAD_DIMS; h++) {
        for (size_t n = 0; n < sizeof token_counts / sizeof *token_counts; n++) {
            for (size_t c = 0; c < sizeof query_counts / sizeof *query_counts; c++) {
                uint32_t d = head_dims[h], n_tokens = token_counts[n], n_queries = query_counts[c], pattern = (uint32_t)(h + n + c) % 3;
                if ((uint64_t)d * n_tokens * n_queries > 500000) {
                    continue;
                }
                test_case("d=%u tokens=%u queries=%u pattern=%u", d, n_tokens, n_queries, pattern);
                attention t = attention_new(type, d, n_tokens, n_queries);
                set_visible(&t, pattern);
                attention_case(&t, kernels, reference);
                attention_free(&t);
            }
        }
    }
}

/* Scores that rise or fall a long way, gently or in leaps: what was added up has to be scaled again, or what follows is next to nothing. */
static void test_attend_slopes(const hsri_kernels *kernels, const hsri_kernels *reference, hsri_kv_type type)
{
    static const uint32_t query_counts[] = { 1, 5, 41 };
    for (uint32_t i = 0; i < 12; i++) {
        uint32_t n_queries = query_counts[i % 3], leap = i % 4 < 2 ? 1 : 150;
        float slope = i % 2 == 0 ? 0.05f : 0.5f;
        test_case("slope %g, leaps of %u, queries=%u", (double)slope, leap, n_queries);
        attention t = attention_new(type, 32, 1000, n_queries);
        for (uint32_t n = 0; n < t.n_tokens; n++) {
            store_element(type, t.slots[n / 64] + key_offset(type, t.d, n % 64, 3), slope * (float)(n / leap * leap));
        }
        set_visible(&t, i % 3);
        attention_case(&t, kernels, reference);
        attention_free(&t);
    }
}

/* Tokens with a score of -infinity are like hidden ones, whether others come before them or behind them. */
static void test_attend_minus_infinity(const hsri_kernels *kernels, hsri_kv_type type)
{
    enum { D = 32, N_TOKENS = 400, ROW = D + 2 };
    static const struct { uint32_t first, end; } parts[] = { { 300, 400 }, { 10, 300 }, { 0, 200 } };
    const limit near = { "attend", 1e3, 1e-6, "" };
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
        attention t = attention_new(type, D, N_TOKENS, 1);
        double want[ROW] = { 0 }, weights = 0.0;
        test_case("tokens [%u, %u) have scores of -infinity", parts[p].first, parts[p].end);
        t.queries[0] = 1.0f;
        t.visible[0] = N_TOKENS;
        for (uint32_t n = 0; n < N_TOKENS; n++) {
            bool without = n >= parts[p].first && n < parts[p].end;
            for (uint32_t j = 0; j < D; j++) {
                double key = without && j == 0 ? -INFINITY : 0.0;
                store_element(type, t.slots[n / 64] + key_offset(type, D, n % 64, j), (float)key);
                want[2 + j] += without ? 0.0 : load_element(type, t.slots[n / 64] + value_offset(type, D, n % 64, j));
            }
            weights += without ? 0.0 : 1.0;
        }
        attention_run(&t, kernels, 0, 1);
        for (uint32_t j = 0; j < D; j++) {
            check_close(&near, "exact", j, t.partials[2 + j] / t.partials[1], want[2 + j] / weights, 1.0);
        }
        attention_free(&t);
    }
}

/* What a query may not see does not change a bit of its result, whatever it is; what it sees does. */
static void test_attend_hidden(const hsri_kernels *kernels, hsri_kv_type type)
{
    enum { D = 24, N_TOKENS = 200, N_QUERIES = 14 };
    static const float bad[] = { NAN, INFINITY, -INFINITY, 3e38f };
    attention t = attention_new(type, D, N_TOKENS, N_QUERIES);
    for (uint32_t i = 0; i < N_QUERIES; i++) {
        t.visible[i] = i * 14;
    }
    size_t bytes = (size_t)N_QUERIES * (D + 2) * sizeof(float);
    float *before = malloc(bytes);
    attention_run(&t, kernels, 0, N_QUERIES);
    memcpy(before, t.partials, bytes);
    for (uint32_t token = 0; token < N_TOKENS; token += 3) {
        for (uint32_t what = 0; what < 2; what++) {
            size_t at = what == 0 ? key_offset(type, D, token % 64, token % D) : value_offset(type, D, token % 64, token % D);
            uint8_t *place = t.slots[token / 64] + at, old[4];
            size_t n_bytes = type == HSRI_KV_TYPE_F32 ? 4 : 2;
            memcpy(old, place, n_bytes);
            float poison = bad[token / 3 % 4];
            store_element(type, place, poison);
            test_case("token %u has %s %g", token, what == 0 ? "key" : "value", (double)poison);
            attention_run(&t, kernels, 0, N_QUERIES);
            for (uint32_t i = 0; i < N_QUERIES; i++) {
                const float *got = t.partials + i * (D + 2);
                if (t.visible[i] <= token) {
                    check_same("result of a query that does not see it", got, before + i * (D + 2), (D + 2) * sizeof *got);
                } else if (isnan(poison) && !isnan(got[2 + (what == 0 ? 0 : token % D)])) {
                    test_fail("query %u does not show the NaN", i);
                } else if (isnan(poison) && what == 0 && !isnan(got[1])) {
                    test_fail("query %u has a NaN score but l is %g", i, (double)got[1]);
                }
            }
            memcpy(place, old, n_bytes);
        }
    }
    free(before);
    attention_free(&t);
}

/* Token 0 has score 0, token t > 0 score s(t) and the unit vector t - 1 as value: o holds exp(s). */
static void test_attend_exp(const hsri_kernels *kernels)
{
    const limit *l = limit_of("exp");
    for (uint32_t round = 0; round < 400; round++) {
        attention t = attention_new(HSRI_KV_TYPE_F32, 64, 64, 1);
        memset(t.slots[0] + 64, 0, hsri_plain_page_bytes(HSRI_KV_TYPE_F32, 64) - 64);
        memset(t.queries, 0, 64 * sizeof(float));
        t.queries[0] = 1.0f;
        t.visible[0] = 64;
        float s[64];
        for (uint32_t n = 1; n < 64; n++) {
            float step = ldexpf(1.0f, (int)random_below(4));
            s[n] = round == 0 && n < 4 ? (n == 1 ? -INFINITY : n == 2 ? -1e30f : -0.0f) : -fabsf(random_unit()) * 14.0f * step;
            store_element(HSRI_KV_TYPE_F32, t.slots[0] + key_offset(HSRI_KV_TYPE_F32, 64, n, 0), s[n]);
            store_element(HSRI_KV_TYPE_F32, t.slots[0] + value_offset(HSRI_KV_TYPE_F32, 64, n, n - 1), 1.0f);
        }
        const float *query = t.queries;
        float *partial = t.partials;
        hsri_attend_args a = { (const uint8_t *const *)t.slots, 1, 64, 1.0f, 1, &query, t.visible, &partial, t.scratch, NULL };
        kernels->attend[HSRI_KV_TYPE_F32](&a);
        for (uint32_t n = 1; n < 64; n++) {
            test_case("exp(%.9g)", (double)s[n]);
            check_close(l, "exact", n, partial[1 + n], exp(s[n]), exp(s[n]));
        }
        attention_free(&t);
    }
}

/* Rounded softmax weights, one by one: token 0 has score 0, token t > 0 one of all fractions of a power of 2, with half steps between, and
 * the unit vector t - 1 as value, so that o holds its weight. */
static void test_weights(const hsri_kernels *kernels)
{
    enum { D = 64, PARTS = 512, ROUNDS = 16 * PARTS / 63 + 1 };
    double sum = 0.0, squares = 0.0, n_weights = 0.0;
    attention t = attention_new(HSRI_KV_TYPE_BF16, D, 64, 1);
    memset(t.slots[0] + 64, 0, hsri_plain_page_bytes(HSRI_KV_TYPE_BF16, D) - 64);
    memset(t.queries, 0, D * sizeof(float));
    t.queries[0] = 1.0f;
    t.queries[1] = 0.5f;
    t.queries[2] = 1.0f / PARTS;
    t.visible[0] = 64;
    for (uint32_t n = 1; n < 64; n++) {
        store_element(HSRI_KV_TYPE_BF16, t.slots[0] + value_offset(HSRI_KV_TYPE_BF16, D, n, n - 1), 1.0f);
    }
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t n = 1; n < 64; n++) {
            uint32_t at = round * 63 + n;
            store_element(HSRI_KV_TYPE_BF16, t.slots[0] + key_offset(HSRI_KV_TYPE_BF16, D, n, 0), -(float)(at / PARTS));
            store_element(HSRI_KV_TYPE_BF16, t.slots[0] + key_offset(HSRI_KV_TYPE_BF16, D, n, 1), -(float)(at / (PARTS / 2) % 2));
            store_element(HSRI_KV_TYPE_BF16, t.slots[0] + key_offset(HSRI_KV_TYPE_BF16, D, n, 2), -(float)(at % (PARTS / 2)));
        }
        const float *query = t.queries;
        float *partial = t.partials;
        hsri_attend_args a = { (const uint8_t *const *)t.slots, 1, D, 0x1.62e430p-1f, 1, &query, t.visible, &partial, t.scratch, NULL };
        kernels->attend[HSRI_KV_TYPE_BF16](&a);
        for (uint32_t n = 1; n < 64; n++) {
            uint32_t at = round * 63 + n;
            double exponent = -(double)at / PARTS;
            double error = partial[1 + n] / exp(exponent * 0x1.62e430p-1 - partial[0]) - 1.0;
            test_case("weight 2^%g", exponent);
            if (!(fabs(error) < WEIGHT_ERROR)) {
                test_fail("off by %g", error);
            }
            sum += error;
            squares += error * error;
            n_weights += 1.0;
        }
    }
    test_case("weights");
    if (!(fabs(sum / n_weights) < 2e-4 && sqrt(squares / n_weights) < 0.0025)) {
        test_fail("off by %g on average, %g in the root mean square", sum / n_weights, sqrt(squares / n_weights));
    }
    attention_free(&t);
}

static void merge_one(const hsri_kernels *kernels, float *acc, float *part, uint32_t d) { kernels->merge(&acc, &part, 1, d); }

/* Many at a time have the bits that each has by itself. */
static void test_merge_many(const hsri_kernels *kernels)
{
    enum { N = 37, D = 40, FLOATS = N * (D + 2) };
    float *many = floats(FLOATS, VALUES_UNIT), *single = floats(FLOATS, VALUES_UNIT), *part = floats(FLOATS, VALUES_UNIT);
    float *accs[N], *parts[N];
    for (uint32_t i = 0; i < N; i++) {
        accs[i] = many + i * (D + 2);
        parts[i] = part + i * (D + 2);
        parts[i][0] *= 30.0f;
        parts[i][1] = i % 5 == 0 ? 0.0f : parts[i][1];
        accs[i][1] = i % 7 == 0 ? 0.0f : accs[i][1];
    }
    memcpy(single, many, FLOATS * sizeof *many);
    kernels->merge(accs, parts, N, D);
    for (uint32_t i = 0; i < N; i++) {
        merge_one(kernels, single + i * (D + 2), parts[i], D);
    }
    test_case("%u at a time", N);
    check_same("acc", many, single, FLOATS * sizeof *many);
    guard_free(many);
    guard_free(single);
    guard_free(part);
}

static void test_merge(const hsri_kernels *kernels, const hsri_kernels *reference)
{
    const limit *l = limit_of("merge");
    limit twice = times(l, 2.0);
    for (size_t h = 0; h < N_HEAD_DIMS; h++) {
        uint32_t n = head_dims[h] + 2;
        float *acc = floats(n, VALUES_UNIT), *part = floats(n, VALUES_UNIT);
        float *old = guard_new(n * sizeof *old), *ref = guard_new(n * sizeof *ref);
        for (uint32_t round = 0; round < 20; round++) {
            test_case("d=%u", n - 2);
            fill_values(acc, n, VALUES_UNIT);
            fill_values(part, n, VALUES_UNIT);
            acc[0] *= 30.0f;
            part[0] *= 30.0f;
            memcpy(old, acc, n * sizeof *acc);
            memcpy(ref, acc, n * sizeof *acc);
            merge_one(reference, ref, part, n - 2);
            merge_one(kernels, acc, part, n - 2);
            double max = fmax(old[0], part[0]);
            /* the difference of the maxima is rounded before its exp is taken */
            double wa = exp((float)(old[0] - max)), wp = exp((float)(part[0] - max));
            if (acc[0] != (float)max) {
                test_fail("m is %g", (double)acc[0]);
            }
            for (uint32_t i = 1; i < n; i++) {
                double a = old[i] * wa, b = part[i] * wp;
                check_close(l, "exact", i, acc[i], a + b, fabs(a) + fabs(b));
                check_close(&twice, "reference", i, acc[i], ref[i], fabs(a) + fabs(b));
            }
            test_case("d=%u empty part", n - 2);
            acc[n - 1] = -0.0f;
            memcpy(old, acc, n * sizeof *acc);
            memset(part, 0, n * sizeof *part);
            part[0] = -INFINITY;
            merge_one(kernels, acc, part, n - 2);
            check_same("acc", acc, old, n * sizeof *acc);
            test_case("d=%u empty part into the empty state", n - 2);
            memcpy(ref, part, n * sizeof *part);
            merge_one(kernels, part, ref, n - 2);
            check_same("acc", part, ref, n * sizeof *acc);
            test_case("d=%u into the empty state", n - 2);
            old[n - 1] = 0.0f;
            merge_one(kernels, part, old, n - 2);
            check_same("acc", part, old, n * sizeof *acc);
            test_case("d=%u NaN", n - 2);
            old[1] = NAN;
            merge_one(kernels, acc, old, n - 2);
            if (!isnan(acc[1])) {
                test_fail("NaN became %g", (double)acc[1]);
            }
        }
        check_guard(acc);
        guard_free(acc);
        guard_free(part);
        guard_free(old);
        guard_free(ref);
    }
}

/* ---- all of a level ---- */

void test_level(const char *name, const hsri_kernels *kernels, const hsri_kernels *reference)
{
    char kernel[32];
#define RUN(...) \
    do { \
        unsigned before = n_failed; \
        test_begin(name, kernel); \
        __VA_ARGS__; \
        report(name, kernel, before); \
    } while (0)
    for (int i = 0; i < HSRI_N_DTYPES; i++) {
        hsri_dtype dtype = (hsri_dtype)i;
        snprintf(kernel, sizeof kernel, "linear %s", dtype_names[i]);
        RUN(test_linear_values(kernels, reference, dtype); test_linear_bits(kernels, dtype); test_linear_nan(kernels, dtype);
            test_linear_rounding(kernels, dtype));
        snprintf(kernel, sizeof kernel, "unpack_row %s", dtype_names[i]);
        RUN(test_unpack_row(kernels, dtype));
    }
    for (int i = 0; i < HSRI_N_KV_TYPES; i++) {
        hsri_kv_type type = (hsri_kv_type)i;
        snprintf(kernel, sizeof kernel, "page_put %s", dtype_names[i]);
        RUN(test_page_put(kernels, type));
        snprintf(kernel, sizeof kernel, "attend %s", dtype_names[i]);
        RUN(test_attend_values(kernels, reference, type); test_attend_slopes(kernels, reference, type);
            test_attend_minus_infinity(kernels, type); test_attend_hidden(kernels, type);
            if (rounds_attention(kernels, type)) { test_weights(kernels); });
    }
    for (int i = HSRI_N_KV_TYPES; i < HSRI_N_KV_FORMATS; i++) {
        static const char *const formats[] = { "int8", "compact", "vtq" };
        snprintf(kernel, sizeof kernel, "pages %s", formats[i - HSRI_N_KV_TYPES]);
        RUN(test_format(kernels, reference, (hsri_kv_type)i, i != HSRI_KV_TYPE_VTQ && rounds_inputs(kernels, HSRI_DTYPE_BF16)));
    }
    snprintf(kernel, sizeof kernel, "attend exp");
    RUN(test_attend_exp(kernels));
    snprintf(kernel, sizeof kernel, "rms_norm");
    RUN(test_rms_norm(kernels, reference));
    snprintf(kernel, sizeof kernel, "rope");
    RUN(test_rope(kernels, reference));
    snprintf(kernel, sizeof kernel, "silu_mul");
    RUN(test_silu_mul(kernels, reference));
    snprintf(kernel, sizeof kernel, "silu_prepare");
    RUN(test_silu_prepare(kernels));
    snprintf(kernel, sizeof kernel, "add");
    RUN(test_add(kernels));
    snprintf(kernel, sizeof kernel, "merge");
    RUN(test_merge(kernels, reference));
    RUN(test_merge_many(kernels));
    snprintf(kernel, sizeof kernel, "sum_exp");
    RUN(test_sum_exp(kernels));
    snprintf(kernel, sizeof kernel, "nonfinite");
    RUN(test_nonfinite(kernels));
#undef RUN
}
