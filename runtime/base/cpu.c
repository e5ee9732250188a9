/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "base/cpu.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/array.h"
#include "base/cgroup.h"
#include "hisparse_rt/hisparse_rt.h"

/* ---- instruction sets ---- */

#if defined(__x86_64__)
#include <cpuid.h>

#define LEAF1_ECX_NEEDED  (bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C)
#define LEAF7_EBX_AVX512  (bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL)
#define XCR0_YMM          0x06u   /* SSE and AVX state */
#define XCR0_ZMM          0xE6u   /* and mask, upper ZMM, high ZMM state */
#define XCR0_TILE         0x60000u /* tile configuration and data */
#define LEAF7_ECX_AMX     (1u << 1 | bit_AVX512VBMI2 | bit_AVX512VNNI)  /* bit 1: AVX512-VBMI */
#define LEAF7_EDX_AMX     (1u << 22 | 1u << 24 | 1u << 25)  /* AMX-BF16, AMX-TILE, AMX-INT8 */
#define LEAF7_1_EAX_BF16  (1u << 5)              /* AVX512-BF16 */

/* Which register files the operating system saves on a context switch. Valid only if cpuid reports OSXSAVE. */
static unsigned saved_state(void)
{
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

int32_t hsri_cpu_isa(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & LEAF1_ECX_NEEDED) != LEAF1_ECX_NEEDED)
        return HSR_ISA_REFERENCE;
    unsigned saved = saved_state();
    if ((saved & XCR0_YMM) != XCR0_YMM)
        return HSR_ISA_REFERENCE;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2))
        return HSR_ISA_REFERENCE;
    if ((b & LEAF7_EBX_AVX512) != LEAF7_EBX_AVX512 || (saved & XCR0_ZMM) != XCR0_ZMM)
        return HSR_ISA_AVX2;
    bool tiles = (d & LEAF7_EDX_AMX) == LEAF7_EDX_AMX && (c & LEAF7_ECX_AMX) == LEAF7_ECX_AMX && (saved & XCR0_TILE) == XCR0_TILE;
    bool bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & LEAF7_1_EAX_BF16);
    return tiles && bf16 ? HSR_ISA_AMX : HSR_ISA_AVX512;
}

bool hsri_cpu_allow_amx(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };   /* of arch_prctl; asking twice is harmless */
    return hsri_cpu_isa() == HSR_ISA_AMX && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else

int32_t hsri_cpu_isa(void)
{
    return HSR_ISA_REFERENCE;
}

bool hsri_cpu_allow_amx(void)
{
    return false;
}

#endif

const char *hsri_isa_name(int32_t isa)
{
    switch (isa) {
    case HSR_ISA_AUTO:      return "auto";
    case HSR_ISA_REFERENCE: return "reference";
    case HSR_ISA_AVX2:      return "avx2";
    case HSR_ISA_AVX512:    return "avx512";
    case HSR_ISA_AMX:       return "amx";
    default:                return "unknown";
    }
}

/* ---- processors ---- */

#define MOST_CPUS  (1u << 20)
#define WORD_CPUS  (8 * sizeof(unsigned long))

/* The kernel refuses a mask smaller than its own, whose size it does not tell. */
static int32_t affinity_count(void)
{
    for (size_t cpus = 1024; cpus <= MOST_CPUS; cpus *= 2) {
        unsigned long *mask = hsri_new_array(cpus / WORD_CPUS, sizeof(*mask));
        if (!mask)
            return 0;
        size_t bytes = cpus / 8;
        bool too_small = false;
        int32_t count = 0;
        if (sched_getaffinity(0, bytes, (cpu_set_t *)mask) == 0)
            count = CPU_COUNT_S(bytes, (cpu_set_t *)mask);
        else
            too_small = errno == EINVAL;
        free(mask);
        if (!too_small)
            return count;
    }
    return 0;
}

/* Microseconds of processor time per period, as whole processors, rounded down. */
static uint64_t whole_cpus(long long quota, long long period)
{
    if (quota <= 0 || period <= 0)
        return HSRI_NO_LIMIT;
    return hsri_max((uint64_t)(quota / period), 1);
}

/* Of one group: "200000 100000" or "max 100000" (version 2), or a quota, -1 being none, and a period in files of their own. */
static uint64_t cpus_of(const char *folder, int version)
{
    long long quota, period;
    if (version == 2) {
        char text[64];
        if (!hsri_cgroup_text(folder, "cpu.max", text, sizeof text) || sscanf(text, "%lld %lld", &quota, &period) != 2)
            return HSRI_NO_LIMIT;
    } else if (!hsri_cgroup_number(folder, "cpu.cfs_quota_us", &quota) || !hsri_cgroup_number(folder, "cpu.cfs_period_us", &period)) {
        return HSRI_NO_LIMIT;
    }
    return whole_cpus(quota, period);
}

int32_t hsri_cpu_quota(const char *membership, const char *root)
{
    return (int32_t)hsri_min(hsri_cgroup_least(membership, root, "cpu", cpus_of), INT32_MAX);
}

int32_t hsri_cpu_count(void)
{
    int32_t count = affinity_count();
    if (count < 1)
        count = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    int32_t quota = hsri_cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    if (quota < count)
        count = quota;
    return count < 1 ? 1 : count;
}
