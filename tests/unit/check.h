/* SPDX-License-Identifier: Apache-2.0 */
/* The whole test framework of the C tests: a failing check prints its place and the test goes on; the exit code tells. */
#ifndef HSR_TESTS_CHECK_H
#define HSR_TESTS_CHECK_H

#include <stdbool.h>
#include <stdio.h>

#define CHECK_EXIT_SKIPPED 77

/* With a sanitizer everything takes ten times as long, so a test does less of what only repeats. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CHECK_SANITIZED = 1 };
#else
enum { CHECK_SANITIZED = 0 };
#endif

static int check_failures;

static inline bool check_one(bool ok, const char *text, const char *file, int line)
{
    if (!ok) {
        check_failures++;
        fprintf(stderr, "%s:%d: check failed: %s\n", file, line, text);
    }
    return ok;
}

/* Worth its condition, so that a test can stop where going on makes no sense: if (!CHECK(p)) return; */
#define CHECK(cond) check_one((cond), #cond, __FILE__, __LINE__)

/* The exit code of the program: `return CHECK_REPORT();` at the end of main. */
#define CHECK_REPORT() (check_failures ? (fprintf(stderr, "%d checks failed\n", check_failures), 1) : 0)

#endif
