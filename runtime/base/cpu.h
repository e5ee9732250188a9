/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine's processors can do and how many of them this process may use. */
#ifndef HSRI_CPU_H
#define HSRI_CPU_H

#include <stdbool.h>
#include <stdint.h>

/* Highest HSR_ISA_* level whose instructions the processor has (cpuid) and whose registers the system saves (xgetbv). HSR_ISA_AMX
 * needs hsri_cpu_allow_amx() as well. */
int32_t hsri_cpu_isa(void);

/* Ask the system for the AMX registers, which it gives to the whole process or not at all. Threads started before may use them
 * too. False if refused: an old kernel, a sandbox, or a thread whose alternate signal stack is too small. */
bool hsri_cpu_allow_amx(void);

/* Name of an HSR_ISA_* level, "reference", "avx2", ... */
const char *hsri_isa_name(int32_t isa);

/* Processors this process may use: the affinity mask, cut by the cgroup's cpu quota (rounded down), at least 1. */
int32_t hsri_cpu_count(void);

/* The quota alone, in whole processors, INT32_MAX if there is none: the least over the groups named in the file
 * `membership` (/proc/self/cgroup) and all above them, in the cgroup trees (versions 1 and 2) below `root`. */
int32_t hsri_cpu_quota(const char *membership, const char *root);

#endif
