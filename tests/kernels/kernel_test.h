/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the kernel tests: random numbers, guarded memory, comparing with a stated limit, a packer, a bench. */
#ifndef HSRI_KERNEL_TEST_H
#define HSRI_KERNEL_TEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/cpu/kernels.h"

/* ---- random numbers: the same in every run ---- */

void seed(uint64_t s);
uint32_t random_u32(void);
uint32_t random_below(uint32_t n);
/* Uniform in (-1, 1). */
float random_unit(void);

/* Kinds of inputs. */
typedef enum values { VALUES_UNIT, VALUES_WIDE, VALUES_DENORMAL, VALUES_ZERO, N_VALUES } values;
void fill_values(float *x, size_t n, values kind);

/* ---- guarded memory ---- */

/* n bytes that end where an unreadable memory page begins, with a canary before them: reading or writing behind them
 * crashes, writing before them is found by guard_check. Their content is 0xff: NaN in every float type. */
void *guard_new(size_t n);
bool guard_intact(const void *p);
void guard_free(void *p);

/* ---- outcome ---- */

extern unsigned n_failed;
/* What is being tested, for messages. */
void test_begin(const char *level, const char *kernel);
void test_case(const char *format, ...) __attribute__((format(printf, 1, 2)));
void test_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* How far a kernel may be from the exact result: ulps * 2^-24 * magnitude + absolute, where the magnitude is given by the
 * test: the sum of the absolute values of what was added up, or the result itself. */
typedef struct limit {
    const char *kernel;
    double      ulps;
    double      absolute;
    const char *reason;
} limit;

void check_close(const limit *l, const char *against, size_t index, double got, double want, double magnitude);
void check_same(const char *what, const void *got, const void *want, size_t n);
void check_guard(const void *p);
/* Largest error seen, as a share of the limit, since test_begin. */
double worst_share(void);

/* ---- packed matrices ---- */

typedef struct packed_test {
    hsri_packed w;
    void       *data;     /* guarded */
    double     *decoded;  /* [n][k]: what the packed bytes stand for */
    float      *rounded;  /* the same as bf16, of q8 and q4 */
} packed_test;

/* Pack plain[n][k] as docs/model-file.md says. */
packed_test pack(hsri_dtype dtype, uint32_t n, uint32_t k, const float *plain);
void packed_free(packed_test *p);

extern const char *const dtype_names[HSRI_N_DTYPES];

/* ---- tests and bench ---- */

void test_conversions(void);
/* format_cases.c; rounds: the level rounds queries and weights to bf16 */
void test_format(const hsri_kernels *kernels, const hsri_kernels *reference, hsri_kv_type format, bool rounds);
void test_level(const char *name, const hsri_kernels *kernels, const hsri_kernels *reference);
/* only: of the lines about linear and attend those that contain it; NULL: all lines. */
void bench_level(const char *name, const hsri_kernels *kernels, uint32_t n_threads, const char *only);

#endif
