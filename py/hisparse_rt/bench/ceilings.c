/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine can do, for "hisparse-rt bench": how fast it reads memory, and how fast it multiplies and adds. Prints one number,
 * of bytes or operations per second. A program of its own, so that it shares nothing with what it judges. */
#define _GNU_SOURCE

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAX_THREADS 1024
#define MAX_PASSES 4096
#define LINE 64
#define ROUNDS (1 << 16)   /* of the multiplying loops in one pass: about a millisecond */

typedef uint64_t line __attribute__((vector_size(LINE)));
typedef float lanes __attribute__((vector_size(16)));

typedef struct share {
    const line *lines;
    size_t n_lines;
} share;

/* A pass is one thread's share of the work. */
typedef uint64_t pass(const share *s);

typedef struct work {
    pass *pass;
    const share *shares;
    pthread_barrier_t *barrier;
    int thread;
    const volatile int *stop;
    uint64_t result;
} work;

/* ---- reading ---- */

static uint64_t read_lines(const share *s)
{
    line a = { 0 }, b = a, c = a, d = a;
    for (size_t i = 0; i + 4 <= s->n_lines; i += 4) {
        a += s->lines[i];
        b += s->lines[i + 1];
        c += s->lines[i + 2];
        d += s->lines[i + 3];
    }
    a += b + c + d;
    return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}

/* ---- multiplying: enough independent sums to hide the latency of one ---- */

enum { SUMS = 12 };

/* What a compiler makes of plain C for every processor: a product, then a sum. Nothing here can be taken out of the loop. */
static uint64_t multiply_reference(const share *s)
{
    lanes x, a, b, c, d, e, f, g, h;
    memcpy(&x, s->lines, sizeof x);
    a = b = c = d = e = f = g = h = x;
    for (int i = 0; i < ROUNDS; i++) {
        a = a * x + x;
        b = b * x + x;
        c = c * x + x;
        d = d * x + x;
        e = e * x + x;
        f = f * x + x;
        g = g * x + x;
        h = h * x + x;
    }
    a += b + c + d + e + f + g + h;
    return (uint64_t)a[0];
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static uint64_t multiply_avx2(const share *s)
{
    __m256 x = _mm256_loadu_ps((const float *)s->lines), sums[SUMS];
    for (int j = 0; j < SUMS; j++) {
        sums[j] = _mm256_setzero_ps();
    }
    for (int i = 0; i < ROUNDS; i++) {
        for (int j = 0; j < SUMS; j++) {
            sums[j] = _mm256_fmadd_ps(x, x, sums[j]);
        }
    }
    for (int j = 1; j < SUMS; j++) {
        sums[0] = _mm256_add_ps(sums[0], sums[j]);
    }
    return (uint64_t)_mm256_cvtss_f32(sums[0]);
}

__attribute__((target("avx512f"))) static uint64_t multiply_avx512(const share *s)
{
    __m512 x = _mm512_loadu_ps(s->lines), sums[SUMS];
    for (int j = 0; j < SUMS; j++) {
        sums[j] = _mm512_setzero_ps();
    }
    for (int i = 0; i < ROUNDS; i++) {
        for (int j = 0; j < SUMS; j++) {
            sums[j] = _mm512_fmadd_ps(x, x, sums[j]);
        }
    }
    for (int j = 1; j < SUMS; j++) {
        sums[0] = _mm512_add_ps(sums[0], sums[j]);
    }
    return (uint64_t)_mm512_cvtss_f32(sums[0]);
}

/* Four tiles of sums over two of rows and two of columns, as in a product of matrices, but nothing is loaded. */
__attribute__((target("amx-tile,amx-bf16"))) static uint64_t multiply_amx(const share *s)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = { .palette = 1 };
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, s->lines, LINE);
    _tile_loadd(5, s->lines, LINE);
    _tile_loadd(6, s->lines, LINE);
    _tile_loadd(7, s->lines, LINE);
    for (int i = 0; i < ROUNDS / 4; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float sums[16][16];
    _tile_stored(0, sums, LINE);
    _tile_release();
    return (uint64_t)sums[0][0];
}

static int allow_amx(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };   /* of arch_prctl */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

/* Operations of one pass; 0 for an unknown level, or one that the system refuses. The caller knows that the processor has it. */
static double choose(const char *level, pass **chosen)
{
    if (strcmp(level, "reference") == 0) {
        *chosen = multiply_reference;
        return 2.0 * 4 * 8 * ROUNDS;
    }
#if defined(__x86_64__)
    if (strcmp(level, "avx2") == 0) {
        *chosen = multiply_avx2;
        return 2.0 * 8 * SUMS * ROUNDS;
    }
    if (strcmp(level, "avx512") == 0) {
        *chosen = multiply_avx512;
        return 2.0 * 16 * SUMS * ROUNDS;
    }
    if (strcmp(level, "amx") == 0 && allow_amx()) {
        *chosen = multiply_amx;
        return 2.0 * 16 * 16 * 32 * ROUNDS;
    }
#endif
    return 0;
}

/* ---- passes on all threads ---- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *helper(void *arg)
{
    work *w = arg;
    for (;;) {
        pthread_barrier_wait(w->barrier);
        if (*w->stop) {
            return NULL;
        }
        w->result += w->pass(&w->shares[w->thread]);
        pthread_barrier_wait(w->barrier);
    }
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static volatile uint64_t kept;   /* results go here, so that they must be computed */

/* Seconds of a pass, or a negative number if threads cannot be started. It is what one pass in ten keeps within: a ceiling should not
 * fall because other programs run, nor rise with a single lucky pass. The first pass is not counted. */
static double time_pass(pass *p, const share *shares, int n_threads, double seconds)
{
    static work works[MAX_THREADS];
    static double times[MAX_PASSES];
    pthread_t threads[MAX_THREADS];
    pthread_barrier_t barrier;
    volatile int stop = 0;
    if (pthread_barrier_init(&barrier, NULL, (unsigned)n_threads) != 0) {
        return -1;
    }
    for (int t = 0; t < n_threads; t++) {
        works[t] = (work){ .pass = p, .shares = shares, .barrier = &barrier, .thread = t, .stop = &stop };
        if (t > 0 && pthread_create(&threads[t], NULL, helper, &works[t]) != 0) {
            return -1;   /* the process ends, and with it those that wait */
        }
    }
    int n = -1;
    for (double end = now() + seconds; n < 1 || (n < MAX_PASSES && now() < end); n++) {
        double start = now();
        pthread_barrier_wait(&barrier);
        kept += p(&shares[0]);
        pthread_barrier_wait(&barrier);
        if (n >= 0) {
            times[n] = now() - start;
        }
    }
    stop = 1;
    pthread_barrier_wait(&barrier);
    for (int t = 1; t < n_threads; t++) {
        pthread_join(threads[t], NULL);
        kept += works[t].result;
    }
    qsort(times, (size_t)n, sizeof *times, by_size);
    return times[n / 10];
}

/* Memory full of `value`. Large pages where they are to be had: page tables should not be what is measured. */
static void *filled(size_t bytes, float value)
{
    float *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        return NULL;
    }
#if defined(MADV_HUGEPAGE)
    (void)madvise(data, bytes, MADV_HUGEPAGE);
#endif
    for (size_t i = 0; i < bytes / sizeof *data; i++) {
        data[i] = value;
    }
    return data;
}

static int usage(void)
{
    fputs("usage: ceilings read BYTES THREADS SECONDS | ceilings multiply LEVEL THREADS SECONDS\n", stderr);
    return 2;
}

int main(int argc, char **argv)
{
    static share shares[MAX_THREADS];
    if (argc != 5) {
        return usage();
    }
    int n_threads = atoi(argv[3]), reads = strcmp(argv[1], "read") == 0;
    double seconds = atof(argv[4]);
    if (n_threads < 1 || n_threads > MAX_THREADS || !(seconds > 0) || (!reads && strcmp(argv[1], "multiply") != 0)) {
        return usage();
    }
    pass *p = read_lines;
    size_t share_lines = reads ? (size_t)strtoull(argv[2], NULL, 10) / LINE / (size_t)n_threads : 16;
    size_t total = (share_lines + 4) / 4 * 4 * (size_t)n_threads * LINE;
    double amount = reads ? (double)total : n_threads * choose(argv[2], &p);
    if (!(amount > 0)) {
        fprintf(stderr, "ceilings: %s is no level of this machine\n", argv[2]);
        return 1;
    }
    const line *lines = filled(total, 0.001f);
    if (lines == NULL) {
        fprintf(stderr, "ceilings: no memory for %zu bytes\n", total);
        return 1;
    }
    for (int t = 0; t < n_threads; t++) {
        shares[t].n_lines = total / LINE / (size_t)n_threads;
        shares[t].lines = lines + (size_t)t * shares[t].n_lines;
    }
    double pass_seconds = time_pass(p, shares, n_threads, seconds);
    if (!(pass_seconds > 0)) {
        fputs("ceilings: threads cannot be started\n", stderr);
        return 1;
    }
    printf("%.6g\n", amount / pass_seconds);
    return 0;
}
