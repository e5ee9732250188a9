/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of the kernels on the shapes of real models: best of several passes, on 1 or more threads. */
/* clock_gettime */
#define _DEFAULT_SOURCE

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/array.h"
#include "base/clock.h"
#include "kernel_test.h"

/* Weights are cycled through this much memory, so that decoding reads them from memory as a model does. */
#define ARENA_BYTES (384ull << 20)
#define MAX_THREADS 16u

/* Nanoseconds. With one thread its own processor time, so that other programs disturb less. */
static uint64_t now(uint32_t n_threads)
{
    struct timespec t;
    if (n_threads > 1 || clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) != 0) {
        return hsri_now_ns();
    }
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

typedef struct linear_work {
    const hsri_kernels *kernels;
    hsri_dtype dtype;
    uint32_t n, k, m;
    const uint8_t *arena;
    uint64_t copy_bytes;
    uint32_t copy0, copy1;   /* copies of the weights to go through */
    const float *x;          /* prepared, if the level wants that; its time is in bench_rows */
    uint64_t x_stride;
    float *out;
    uint32_t thread, n_threads;
    pthread_t id;
} linear_work;

static void *run_linear(void *arg)
{
    const linear_work *w = arg;
    uint32_t n_panels = (w->n + 15) / 16;
    uint32_t p0 = (uint32_t)((uint64_t)n_panels * w->thread / w->n_threads);
    uint32_t p1 = (uint32_t)((uint64_t)n_panels * (w->thread + 1) / w->n_threads);
    for (uint32_t c = w->copy0; c < w->copy1; c++) {
        hsri_packed packed = hsri_packed_at(w->arena + c * w->copy_bytes, w->dtype, w->n, w->k);
        w->kernels->linear[w->dtype](&packed, p0, p1, w->x, w->x_stride, w->m, NULL, w->out, w->n);
    }
    return NULL;
}

/* Nanoseconds of the products with copies [copy0, copy1). */
static double time_copies(linear_work w)
{
    linear_work parts[MAX_THREADS];
    uint64_t start = now(w.n_threads);
    for (uint32_t t = 0; t < w.n_threads; t++) {
        parts[t] = w;
        parts[t].thread = t;
        if (t > 0 && pthread_create(&parts[t].id, NULL, run_linear, &parts[t]) != 0) {
            exit(2);
        }
    }
    run_linear(&parts[0]);
    for (uint32_t t = 1; t < w.n_threads; t++) {
        pthread_join(parts[t].id, NULL);
    }
    return (double)(now(w.n_threads) - start);
}

/* Seconds of one product: the best of many windows, each short enough to be left alone by other programs now and then. */
static double time_linear(linear_work w, uint32_t n_copies)
{
    uint64_t product_bytes = w.copy_bytes + (uint64_t)w.m * w.n * w.k / 8;
    uint32_t window = (uint32_t)hsri_min(n_copies, 1 + (w.n_threads > 1 ? 160ull << 20 : 16ull << 20) / product_bytes);
    double best = 1e30;
    for (int pass = 0; pass < 3; pass++) {
        for (w.copy0 = 0; w.copy0 + window <= n_copies; w.copy0 = w.copy1) {
            w.copy1 = w.copy0 + window;
            double seconds = time_copies(w) * 1e-9 / window;
            best = seconds < best ? seconds : best;
        }
    }
    return best;
}

/* Whether the line that starts with these words is wanted. */
static bool wanted(const char *only, const char *what, const char *type, const char *shape)
{
    char line[80];
    snprintf(line, sizeof line, "%s %s %s", what, type, shape);
    return only == NULL || strstr(line, only) != NULL;
}

static void bench_linear(const char *name, const hsri_kernels *kernels, const uint8_t *arena, uint32_t n_threads, const char *only)
{
    static const struct { const char *what; uint32_t n, k; } shapes[] = {
        { "SmolLM2-135M qkv", 960, 576 }, { "SmolLM2-135M gate_up", 3072, 576 }, { "SmolLM2-135M down", 576, 1536 },
        { "SmolLM2-135M head", 49152, 576 }, { "Qwen2.5-0.5B gate_up", 9728, 896 }, { "Qwen2.5-0.5B down", 896, 4864 },
    };
    static const uint32_t row_counts[] = { 1, 4, 8, 64, 512 };
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        uint32_t n = shapes[s].n, k = shapes[s].k;
        float *x = hsri_new_aligned((size_t)512 * k, sizeof *x), *out = hsri_new_aligned((size_t)512 * n, sizeof *out);
        float *prepared = hsri_new_aligned(512 * hsri_prepared_stride(k), sizeof *prepared);
        if (x == NULL || out == NULL || prepared == NULL) {
            exit(2);
        }
        fill_values(x, (size_t)512 * k, VALUES_UNIT);
        for (int dtype = 0; dtype < HSRI_N_DTYPES; dtype++) {
            if (!wanted(only, "linear", dtype_names[dtype], shapes[s].what)) {
                continue;
            }
            printf("%-10s linear %-4s %-20s", name, dtype_names[dtype], shapes[s].what);
            bool prepares = kernels->prepare[dtype] != NULL;
            if (prepares) {
                kernels->prepare[dtype](x, k, 512, k, prepared);
            }
            for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
                uint32_t m = row_counts[i];
                if (m == 512 && n > 10000) {
                    continue;
                }
                uint64_t bytes = hsri_round_up(hsri_packed_bytes((hsri_dtype)dtype, n, k), 4096);
                /* enough work to time, and for few rows enough memory to be out of the caches */
                uint64_t most = ARENA_BYTES / bytes, enough = 1 + (uint64_t)6e9 / (2ull * n * k * m);
                uint32_t copies = (uint32_t)(m <= 8 ? most : hsri_min(most, enough));
                linear_work w = { .kernels = kernels, .dtype = (hsri_dtype)dtype, .n = n, .k = k, .m = m, .arena = arena,
                                  .copy_bytes = bytes, .x = prepares ? prepared : x,
                                  .x_stride = prepares ? hsri_prepared_stride(k) : k, .out = out, .n_threads = n_threads };
                double seconds = time_linear(w, copies);
                printf("  M=%-3u %6.1f GF/s %5.1f GB/s", m, 2e-9 * n * k * m / seconds, (double)bytes * 1e-9 / seconds);
                fflush(stdout);
            }
            printf("\n");
        }
        free(x);
        free(prepared);
        free(out);
    }
}

/* Seconds of a dense group: the best of many, with its pages in memory (n_groups large) or in the caches. */
static double time_attend(const hsri_kernels *kernels, hsri_kv_type type, hsri_attend_args a, const uint8_t *slots, uint64_t slot,
                          uint32_t n_groups)
{
    double best = 1e30;
    for (uint32_t g = 0; g < 400; g++) {
        const uint8_t *pages[16];
        for (uint32_t p = 0; p < 16; p++) {
            pages[p] = slots + (g % n_groups * 16ull + p) * slot;
        }
        a.pages = pages;
        uint64_t start = now(1);
        kernels->attend[type](&a);
        double seconds = (double)(now(1) - start) * 1e-9;
        best = seconds < best ? seconds : best;
    }
    return best;
}

static void bench_attend(const char *name, const hsri_kernels *kernels, const char *only)
{
    static const uint32_t head_dims[] = { 64, 128 }, query_counts[] = { 1, 3, 8, 16, 63 };
    for (int type = 0; type < HSRI_N_KV_TYPES; type++) {
        for (size_t h = 0; h < 2; h++) {
            uint32_t d = head_dims[h];
            if (!wanted(only, "attend", type == 0 ? "f32" : "bf16", d == 64 ? "d=64" : "d=128")) {
                continue;
            }
            uint64_t slot = hsri_round_up(hsri_plain_page_bytes((hsri_kv_type)type, d), 4096);
            uint32_t n_groups = (uint32_t)((128ull << 20) / (slot * 16));
            uint8_t *slots = hsri_new_aligned(n_groups * 16ull, slot);
            float *queries = hsri_new_aligned(64, d * 4), *partials = hsri_new_aligned(64, (d + 2) * 4);
            float *scratch = hsri_new_aligned(HSRI_ATTEND_SCRATCH, 4);
            const float *q[64];
            float *o[64];
            uint32_t visible[64];
            if (slots == NULL || queries == NULL || partials == NULL || scratch == NULL) {
                exit(2);
            }
            fill_values(queries, 64ull * d, VALUES_UNIT);
            for (uint32_t t = 0; t < HSRI_PAGE_TOKENS; t++) {
                kernels->page_put[type](slots, d, t, queries + t * d, queries + (HSRI_PAGE_TOKENS - 1 - t) * d);
            }
            for (uint32_t i = 1; i < n_groups * 16; i++) {
                memcpy(slots + i * slot, slots, slot);
            }
            fill_values(queries, 64ull * d, VALUES_UNIT);
            for (uint32_t i = 0; i < 64; i++) {
                q[i] = queries + i * d;
                o[i] = partials + i * (d + 2);
                visible[i] = HSRI_GROUP_TOKENS;
            }
            printf("%-10s attend %-7s d=%-15u", name, type == 0 ? "f32" : "bf16", d);
            for (size_t c = 0; c < sizeof query_counts / sizeof *query_counts; c++) {
                hsri_attend_args a = { .n_pages = 16, .head_dim = d, .scale = 0.125f, .n_queries = query_counts[c], .queries = q,
                                       .visible = visible, .partials = o, .scratch = scratch };
                double near = time_attend(kernels, (hsri_kv_type)type, a, slots, slot, 1);
                double far = time_attend(kernels, (hsri_kv_type)type, a, slots, slot, n_groups);
                printf("  Q=%-2u %5.0f %5.0f ns/page", query_counts[c], near * 1e9 / 16, far * 1e9 / 16);
            }
            printf("\n");
            free(slots);
            free(queries);
            free(partials);
            free(scratch);
        }
    }
}

/* A page of noise, encoded, with a basis that leaves keys as they are. */
static void encode_noise(const hsri_kernels *kernels, hsri_kv_type format, uint32_t d, float *calibration, uint8_t *slot)
{
    float *k = malloc(2ull * HSRI_PAGE_TOKENS * d * sizeof *k), *scratch = malloc(hsri_encode_scratch(d) * sizeof *scratch);
    hsri_page_header header = { .magic = HSRI_PAGE_MAGIC, .format = (uint16_t)format, .head_dim = (uint16_t)d };
    if (k == NULL || scratch == NULL) {
        exit(2);
    }
    memset(calibration, 0, hsri_calibration_floats(d) * sizeof *calibration);
    for (uint32_t i = 0; i < d; i++) {
        calibration[i * d + i] = calibration[d * d + i * d + i] = 1;
    }
    hsri_calibration_record record = hsri_calibration_at(calibration, 1, 0, 0, d);
    fill_values(k, 2ull * HSRI_PAGE_TOKENS * d, VALUES_UNIT);
    kernels->page.encode[format](slot, &header, d, k, k + HSRI_PAGE_TOKENS * d, &record, scratch);
    memcpy(slot, &header, sizeof header);
    free(k);
    free(scratch);
}

/* Slots of pages that follow each other in a sequence are this far apart: those of other layers and heads lie between. */
#define SLOT_STEP 91u

/* Seconds of a group of `n_queries`: the best of many, with its pages in memory (n_slots large) or in the caches. */
static double time_units(const hsri_kernels *kernels, hsri_kv_type format, hsri_units_args a, const uint8_t *slots, uint64_t slot,
                         uint32_t n_slots)
{
    static const uint8_t units[4] = { 0, 1, 2, 3 };
    uint8_t unit_of[HSRI_UNITS_MAX];
    const uint8_t *slot_of[HSRI_UNITS_MAX];
    double best = 1e30;
    uint32_t at = 0;
    a.slots = slot_of;
    a.units = unit_of;
    a.n_units = HSRI_UNITS_MAX;
    for (uint32_t g = 0; g < 6000; g++) {
        for (uint32_t i = 0; i < HSRI_UNITS_MAX; i++) {
            unit_of[i] = units[i % 4];
            slot_of[i] = slots + at * slot;
            at = i % 4 == 3 ? (at + SLOT_STEP) % n_slots : at;
        }
        uint64_t start = now(1);
        kernels->page.attend[format](&a);
        double seconds = (double)(now(1) - start) * 1e-9;
        best = seconds < best ? seconds : best;
    }
    return best;
}

static void bench_formats(const char *name, const hsri_kernels *kernels, const char *only)
{
    static const char *const formats[HSRI_N_KV_FORMATS] = { "f32", "bf16", "int8", "compact", "vtq" };
    static const uint32_t head_dims[] = { 64, 128 }, query_counts[] = { 1, 3, 7, 16, 63 };
    for (int format = HSRI_N_KV_TYPES; format < HSRI_N_KV_FORMATS; format++) {
        for (size_t h = 0; h < 2; h++) {
            uint32_t d = head_dims[h];
            if (!wanted(only, "attend", formats[format], d == 64 ? "d=64" : "d=128")) {
                continue;
            }
            uint64_t slot = hsri_round_up(hsri_page_bytes((hsri_kv_type)format, d), 4096);
            uint32_t n_slots = (uint32_t)((128ull << 20) / slot);
            uint8_t *slots = hsri_new_aligned(n_slots, slot);
            float *queries = hsri_new_aligned(64, d * 4), *partials = hsri_new_aligned(64, (d + 2) * 4);
            float *scratch = hsri_new_aligned(HSRI_UNITS_SCRATCH, 4), *calibration = hsri_new_aligned(hsri_calibration_floats(d), 4);
            const float *q[64];
            float *o[64];
            if (slots == NULL || queries == NULL || partials == NULL || scratch == NULL || calibration == NULL) {
                exit(2);
            }
            encode_noise(kernels, (hsri_kv_type)format, d, calibration, slots);
            for (uint32_t i = 1; i < n_slots; i++) {
                memcpy(slots + i * slot, slots, slot);
            }
            fill_values(queries, 64ull * d, VALUES_UNIT);
            for (uint32_t i = 0; i < 64; i++) {
                q[i] = queries + i * d;
                o[i] = partials + i * (d + 2);
            }
            printf("%-10s attend %-7s d=%-15u", name, formats[format], d);
            for (size_t c = 0; c < sizeof query_counts / sizeof *query_counts; c++) {
                hsri_units_args a = { .head_dim = d, .scale = 0.125f, .n_queries = query_counts[c], .queries = q, .rotated = q,
                                      .partials = o, .scratch = scratch, .calibration = hsri_calibration_at(calibration, 1, 0, 0, d) };
                double near = time_units(kernels, (hsri_kv_type)format, a, slots, slot, 17);
                double far = time_units(kernels, (hsri_kv_type)format, a, slots, slot, n_slots);
                printf("  Q=%-2u %5.0f %5.0f ns/page", query_counts[c], near * 1e9 / 16, far * 1e9 / 16);
            }
            printf("\n");
            free(slots);
            free(queries);
            free(partials);
            free(scratch);
            free(calibration);
        }
    }
}

static void bench_rows(const char *name, const hsri_kernels *kernels)
{
    enum { N = 1536, REPEATS = 20000 };
    static float in[2 * N], gain[N], out[N];
    fill_values(in, 2 * N, VALUES_UNIT);
    fill_values(gain, N, VALUES_UNIT);
    uint64_t start = now(1);
    for (int i = 0; i < REPEATS; i++) {
        kernels->silu_mul(in, N, out);
    }
    double silu = (double)(now(1) - start) / REPEATS / N;
    start = now(1);
    for (int i = 0; i < REPEATS; i++) {
        kernels->rms_norm(in, gain, 1e-5f, N, out);
    }
    double norm = (double)(now(1) - start) / REPEATS / N;
    uint8_t *slot = hsri_new_aligned(1, hsri_plain_page_bytes(HSRI_KV_TYPE_F32, 64));
    if (slot == NULL) {
        exit(2);
    }
    double put[HSRI_N_KV_TYPES];
    for (int type = 0; type < HSRI_N_KV_TYPES; type++) {
        start = now(1);
        for (uint32_t i = 0; i < REPEATS; i++) {
            kernels->page_put[type](slot, 64, i % 64, in, gain);
        }
        put[type] = (double)(now(1) - start) / REPEATS;
    }
    free(slot);
    printf("%-10s silu_mul %.2f ns/element  rms_norm %.2f ns/element  page_put d=64: f32 %.0f ns, bf16 %.0f ns\n", name,
           silu, norm, put[0], put[1]);
    if (kernels->prepare[HSRI_DTYPE_Q8] != NULL) {
        static float prepared[2 * N];
        start = now(1);
        for (int i = 0; i < REPEATS; i++) {
            kernels->prepare[HSRI_DTYPE_Q8](in, N, 1, N, prepared);
        }
        double prepare = (double)(now(1) - start) / REPEATS / N;
        start = now(1);
        for (int i = 0; i < REPEATS; i++) {
            kernels->silu_prepare[HSRI_DTYPE_Q8](in, 2 * N, 1, N, prepared, N);
        }
        printf("%-10s prepare %.2f ns/element  silu_prepare %.2f ns/element\n", name, prepare, (double)(now(1) - start) / REPEATS / N);
    }
}

void bench_level(const char *name, const hsri_kernels *kernels, uint32_t n_threads, const char *only)
{
    n_threads = n_threads > MAX_THREADS ? MAX_THREADS : n_threads;
    uint8_t *arena = hsri_new_aligned(1, ARENA_BYTES);
    if (arena == NULL) {
        exit(2);
    }
    /* small finite numbers in every dtype */
    memset(arena, 0x11, ARENA_BYTES);
    bench_linear(name, kernels, arena, n_threads, only);
    bench_attend(name, kernels, only);
    bench_formats(name, kernels, only);
    if (only == NULL) {
        bench_rows(name, kernels);
    }
    free(arena);
}
