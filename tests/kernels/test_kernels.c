/* SPDX-License-Identifier: Apache-2.0 */
/* Compares every kernel of every instruction-set level with the reference level and with a calculation in double precision.
 *
 *   test_kernels [--isa NAME] [--bench] [--only TEXT] [--threads N]
 *
 * --isa runs one level (77 if this machine lacks it); --bench prints a table of speeds instead of testing, with --only of lines
 * such as "linear q8 Qwen2.5-0.5B down" that contain TEXT. */
/* _exit */
#define _DEFAULT_SOURCE

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cpu.h"
#include "kernel_test.h"

static void on_crash(int signal_number)
{
    (void)signal_number;
    test_fail("crashed: it touched memory outside its arguments");
    _exit(1);
}

static int usage(void)
{
    fprintf(stderr, "usage: test_kernels [--isa NAME] [--bench] [--only TEXT] [--threads N]\nlevels:");
    for (int32_t isa = HSR_ISA_REFERENCE; isa <= HSR_ISA_AMX; isa++) {
        fprintf(stderr, " %s", hsri_isa_name(isa));
    }
    fprintf(stderr, "\n");
    return 2;
}

int main(int argc, char **argv)
{
    const char *only = NULL, *lines = NULL;
    bool bench = false;
    uint32_t n_threads = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--isa") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
            lines = argv[++i];
        } else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc && atoi(argv[i + 1]) > 0) {
            n_threads = (uint32_t)atoi(argv[++i]);
        } else if (strcmp(argv[i], "--bench") == 0) {
            bench = true;
        } else {
            return usage();
        }
    }
    signal(SIGSEGV, on_crash);
    signal(SIGBUS, on_crash);

    hsri_kernels reference;
    hsri_kernels_fill(&reference, HSR_ISA_REFERENCE);
    bool known = false, ran = false;
    if (!bench) {
        test_conversions();
    }
    for (int32_t isa = HSR_ISA_REFERENCE; isa <= HSR_ISA_AMX; isa++) {
        const char *name = hsri_isa_name(isa);
        if (only != NULL && strcmp(only, name) != 0) {
            continue;
        }
        known = true;
        if (isa > hsri_cpu_isa() || (isa == HSR_ISA_AMX && !hsri_cpu_allow_amx())) {
            printf("%-10s not on this machine\n", name);
            continue;
        }
        ran = true;
        hsri_kernels kernels;
        hsri_kernels_fill(&kernels, isa);
        if (bench) {
            bench_level(name, &kernels, n_threads, lines);
        } else {
            test_level(name, &kernels, &reference);
        }
    }
    if (!known) {
        return usage();
    }
    return n_failed > 0 ? 1 : ran ? 0 : 77;
}
