/* SPDX-License-Identifier: Apache-2.0 */
/* mmap and its flags */
#define _DEFAULT_SOURCE

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernel_test.h"

/* ---- random numbers ---- */

static uint64_t random_state = 1;

void seed(uint64_t s)
{
    random_state = s * 2 + 1;
}

uint32_t random_u32(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    uint32_t high = (uint32_t)(random_state >> 32);
    return high ^ high >> 15;
}

uint32_t random_below(uint32_t n)
{
    return (uint32_t)((uint64_t)random_u32() * n >> 32);
}

float random_unit(void)
{
    return ((float)(random_u32() >> 8) + 0.5f) * 0x1p-23f - 1.0f;
}

void fill_values(float *x, size_t n, values kind)
{
    for (size_t i = 0; i < n; i++) {
        switch (kind) {
        case VALUES_UNIT:     x[i] = random_unit(); break;
        /* far apart, but no sum of products overflows */
        case VALUES_WIDE:     x[i] = ldexpf(random_unit(), (int)random_below(80) - 40); break;
        case VALUES_DENORMAL: x[i] = ldexpf(random_unit(), -130); break;
        default:              x[i] = random_below(2) == 0 ? 0.0f : -0.0f; break;
        }
    }
}

/* ---- guarded memory ---- */

#define CANARY 0xa5
#define HEAD 256u

typedef struct guard {
    uint8_t *map;
    size_t   map_bytes;
    uint8_t *payload;
} guard;

/* Found by payload address; the tests hold few at a time. */
static guard guards[128];

static guard *guard_find(const void *p)
{
    for (size_t i = 0; i < sizeof guards / sizeof *guards; i++) {
        if (guards[i].payload == p) {
            return &guards[i];
        }
    }
    fprintf(stderr, "no guard for %p\n", p);
    exit(2);
}

void *guard_new(size_t n)
{
    guard *g = guard_find(NULL);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t usable = (n + HEAD + page - 1) / page * page;
    g->map_bytes = usable + page;
    g->map = mmap(NULL, g->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g->map == MAP_FAILED || mprotect(g->map + usable, page, PROT_NONE) != 0) {
        perror("mmap");
        exit(2);
    }
    g->payload = g->map + usable - n;
    memset(g->payload - HEAD, CANARY, HEAD);
    memset(g->payload, 0xff, n);
    return g->payload;
}

bool guard_intact(const void *p)
{
    const guard *g = guard_find(p);
    for (uint32_t i = 1; i <= HEAD; i++) {
        if (g->payload[-(ptrdiff_t)i] != CANARY) {
            return false;
        }
    }
    return true;
}

void guard_free(void *p)
{
    guard *g = guard_find(p);
    munmap(g->map, g->map_bytes);
    *g = (guard) { 0 };
}

/* ---- outcome ---- */

unsigned n_failed;
static unsigned n_failed_before, n_printed;
static double worst;
static const char *level_name = "", *kernel_name = "";
static char case_name[256];

void test_begin(const char *level, const char *kernel)
{
    level_name = level;
    kernel_name = kernel;
    n_failed_before = n_failed;
    n_printed = 0;
    worst = 0.0;
    case_name[0] = '\0';
    seed(1);
}

void test_case(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(case_name, sizeof case_name, format, args);
    va_end(args);
}

void test_fail(const char *format, ...)
{
    n_failed++;
    if (n_printed++ >= 5) {
        return;
    }
    va_list args;
    va_start(args, format);
    fprintf(stderr, "FAIL %s %s (%s): ", level_name, kernel_name, case_name);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
}

void check_close(const limit *l, const char *against, size_t index, double got, double want, double magnitude)
{
    if (!isfinite(want)) {
        if (isfinite(got)) {
            test_fail("[%zu] is %g, %s says %g", index, got, against, want);
        }
        return;
    }
    double allowed = l->ulps * 0x1p-24 * magnitude + l->absolute;
    double error = fabs(got - want);
    if (!(error <= allowed)) {
        test_fail("[%zu] is %.9g, %s says %.9g: off by %.3g, allowed %.3g", index, got, against, want, error, allowed);
        return;
    }
    if (allowed > 0.0 && error / allowed > worst) {
        worst = error / allowed;
    }
}

void check_same(const char *what, const void *got, const void *want, size_t n)
{
    const uint8_t *a = got, *b = want;
    for (size_t i = 0; i < n; i++) {
        if (a[i] != b[i]) {
            test_fail("%s: byte %zu of %zu differs", what, i, n);
            return;
        }
    }
}

void check_guard(const void *p)
{
    if (!guard_intact(p)) {
        test_fail("wrote before its output");
    }
}

double worst_share(void)
{
    return worst;
}

/* ---- packed matrices ---- */

const char *const dtype_names[HSRI_N_DTYPES] = { "f32", "bf16", "q8", "q4" };

static double f16_value(uint16_t h)
{
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double v = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return h & 0x8000 ? -v : v;
}

/* The nearest float16, for values well inside its range; which way a tie goes does not matter here. */
static uint16_t f16_from(double v)
{
    double a = fabs(v);
    uint32_t low = 0, high = 0x7bff;
    while (low < high) {
        uint32_t middle = (low + high + 1) / 2;
        if (f16_value((uint16_t)middle) <= a) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    if (low < 0x7bff && f16_value((uint16_t)(low + 1)) - a < a - f16_value((uint16_t)low)) {
        low++;
    }
    return (uint16_t)(low | (v < 0 ? 0x8000u : 0));
}

static int clamp_round(double v, int low, int high)
{
    v = nearbyint(v);
    return v < low ? low : v > high ? high : (int)v;
}

/* The bits of f plus `add`, cut to a bf16. */
static float cut_to_bf16(float f, uint32_t add)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    u = (u + add) & 0xffff0000u;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* The bf16 weights that levels with bf16 units make (docs/model-file.md). */
static float rounded_q8(double scale, int code)
{
    return cut_to_bf16((float)(scale * code), 0x8000);
}

static float rounded_q4(double scale, double minimum, int code)
{
    float s = (float)scale * 0x1.00b8p+0f, m = (float)minimum * 0x1.00b8p+0f;
    return cut_to_bf16(fmaf(s, (float)(16 + code), fmaf(-16.0f, s, m)), 0);
}

/* Pack inputs [k0, k0 + n_k) of output row n, n_k <= 32. */
static void pack_group(hsri_dtype dtype, uint8_t *data, const hsri_packed *w, uint32_t n, uint32_t k0, uint32_t n_k,
                       const float *plain, double *decoded, float *rounded)
{
    uint32_t lane = n % 16;
    uint64_t run = (uint64_t)(n / 16) * w->n_runs + k0 / 32;
    uint8_t *tail = data + (w->tail - w->codes);
    float least = plain[0], most = plain[0];
    for (uint32_t k = 1; k < n_k; k++) {
        least = fminf(least, plain[k]);
        most = fmaxf(most, plain[k]);
    }
    uint16_t scale = f16_from(dtype == HSRI_DTYPE_Q8 ? fmax(most, -least) / 127.0 : (most - least) / 15.0), minimum = f16_from(least);
    double s = f16_value(scale), m = f16_value(minimum), step = s > 0 ? s : 1;
    if (dtype == HSRI_DTYPE_Q8) {
        memcpy(tail + (run * 16 + lane) * 2, &scale, 2);
    } else if (dtype == HSRI_DTYPE_Q4) {
        memcpy(tail + (run * 32 + lane) * 2, &scale, 2);
        memcpy(tail + (run * 32 + 16 + lane) * 2, &minimum, 2);
    }
    for (uint32_t k = 0; k < n_k; k++) {
        if (dtype == HSRI_DTYPE_F32) {
            memcpy(data + run * 2048 + (k * 16 + lane) * 4, &plain[k], 4);
            decoded[k] = plain[k];
        } else if (dtype == HSRI_DTYPE_BF16) {
            uint16_t b = hsri_f32_to_bf16(plain[k]);
            memcpy(data + run * 1024 + ((k / 2 * 16 + lane) * 2 + k % 2) * 2, &b, 2);
            decoded[k] = hsri_bf16_to_f32(b);
        } else if (dtype == HSRI_DTYPE_Q8) {
            int code = clamp_round(plain[k] / step, -127, 127);
            data[run * 512 + (k / 4 * 16 + lane) * 4 + k % 4] = (uint8_t)code;
            decoded[k] = s * code;
            rounded[k] = rounded_q8(s, code);
        } else {
            int code = clamp_round((plain[k] - m) / step, 0, 15);
            data[run * 256 + (k / 8 * 16 + lane) * 4 + k % 4] |= (uint8_t)(k % 8 < 4 ? code : code << 4);
            decoded[k] = s * code + m;
            rounded[k] = rounded_q4(s, m, code);
        }
    }
}

packed_test pack(hsri_dtype dtype, uint32_t n, uint32_t k, const float *plain)
{
    uint64_t bytes = hsri_packed_bytes(dtype, n, k);
    packed_test p = { .data = guard_new(bytes), .decoded = calloc((size_t)n * k, sizeof(double)),
                      .rounded = calloc((size_t)n * k, sizeof(float)) };
    memset(p.data, 0, bytes);
    p.w = hsri_packed_at(p.data, dtype, n, k);
    for (uint32_t row = 0; row < n; row++) {
        for (uint32_t k0 = 0; k0 < k; k0 += 32) {
            size_t at = (size_t)row * k + k0;
            pack_group(dtype, p.data, &p.w, row, k0, k - k0 < 32 ? k - k0 : 32, plain + at, p.decoded + at,
                       p.rounded + at);
        }
    }
    return p;
}

void packed_free(packed_test *p)
{
    guard_free(p->data);
    free(p->decoded);
    free(p->rounded);
}
