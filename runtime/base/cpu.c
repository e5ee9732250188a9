/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "base/cpu.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/array.h"
#include "hisparse_rt/hisparse_rt.h"

/* ---- instruction sets ---- */

#if defined(__x86_64__)
#include <cpuid.h>

#define LEAF1_ECX_NEEDED  (bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C)
#define LEAF7_EBX_AVX512  (bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL)
#define XCR0_YMM          0x06u   /* SSE and AVX state */
#define XCR0_ZMM          0xE6u   /* and mask, upper ZMM, high ZMM state */
#define XCR0_TILE         0x60000u /* tile configuration and data */
#define LEAF7_EDX_AMX     (1u << 22 | 1u << 24)  /* AMX-BF16, AMX-TILE */
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
    bool tiles = (d & LEAF7_EDX_AMX) == LEAF7_EDX_AMX && (saved & XCR0_TILE) == XCR0_TILE;
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
#define NO_LIMIT   INT32_MAX

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

/* The whole of a small file, NUL-terminated; false if it cannot be read. */
static bool read_text(const char *path, char *text, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    size_t n = 0;
    ssize_t got = 0;
    while (n < room - 1 && ((got = read(fd, text + n, room - 1 - n)) > 0 || (got < 0 && errno == EINTR)))
        n += got > 0 ? (size_t)got : 0;
    close(fd);
    text[n] = '\0';
    return got >= 0;
}

/* Microseconds of processor time per period, as whole processors, rounded down. */
static int32_t whole_cpus(long long quota, long long period)
{
    if (quota <= 0 || period <= 0)
        return NO_LIMIT;
    long long cpus = quota / period;
    return cpus < 1 ? 1 : cpus > NO_LIMIT ? NO_LIMIT : (int32_t)cpus;
}

/* Limit of one version 2 group: "200000 100000" or "max 100000". */
static int32_t limit_v2(const char *folder)
{
    char path[PATH_MAX], text[64];
    long long quota, period;
    int n = snprintf(path, sizeof(path), "%s/cpu.max", folder);
    if (n < 0 || (size_t)n >= sizeof(path) || !read_text(path, text, sizeof(text)))
        return NO_LIMIT;
    return sscanf(text, "%lld %lld", &quota, &period) == 2 ? whole_cpus(quota, period) : NO_LIMIT;
}

static bool read_number(const char *folder, const char *name, long long *value)
{
    char path[PATH_MAX], text[64];
    int n = snprintf(path, sizeof(path), "%s/%s", folder, name);
    return n > 0 && (size_t)n < sizeof(path) && read_text(path, text, sizeof(text)) && sscanf(text, "%lld", value) == 1;
}

/* Limit of one version 1 group; a quota of -1 is none. */
static int32_t limit_v1(const char *folder)
{
    long long quota, period;
    if (!read_number(folder, "cpu.cfs_quota_us", &quota) || !read_number(folder, "cpu.cfs_period_us", &period))
        return NO_LIMIT;
    return whole_cpus(quota, period);
}

/* Least limit of a group and all that hold it. A path that does not exist below this mount (a container that sees the
 * host's path but only its own tree) is walked up all the same, until folders exist. */
static int32_t limit_up_to_root(const char *mount, const char *group, size_t group_length, int32_t (*limit_of)(const char *folder))
{
    char folder[PATH_MAX];
    int n = snprintf(folder, sizeof(folder), "%s%.*s", mount, (int)group_length, group);
    if (n < 0 || (size_t)n >= sizeof(folder) || strstr(folder, "/.."))
        n = snprintf(folder, sizeof(folder), "%s", mount);
    int32_t least = NO_LIMIT;
    size_t root = strlen(mount);
    for (;;) {
        least = (int32_t)hsri_min((uint64_t)least, (uint64_t)limit_of(folder));
        char *slash = strrchr(folder, '/');
        if (strlen(folder) <= root || !slash || (size_t)(slash - folder) < root)
            return least;
        *slash = '\0';
    }
}

/* Whether a comma-separated list holds "cpu". */
static bool names_cpu(const char *list, size_t length)
{
    for (size_t i = 0; i < length; ) {
        size_t end = i;
        while (end < length && list[end] != ',')
            end++;
        if (end - i == 3 && memcmp(list + i, "cpu", 3) == 0)
            return true;
        i = end + 1;
    }
    return false;
}

static int32_t limit_in_mounts(const char *root, const char *const *mounts, const char *group, size_t length,
                               int32_t (*limit_of)(const char *folder))
{
    char mount[PATH_MAX];
    int32_t least = NO_LIMIT;
    for (; *mounts; mounts++) {
        int n = snprintf(mount, sizeof(mount), "%s%s", root, *mounts);
        if (n > 0 && (size_t)n < sizeof(mount))
            least = (int32_t)hsri_min((uint64_t)least, (uint64_t)limit_up_to_root(mount, group, length, limit_of));
    }
    return least;
}

/* One line of /proc/self/cgroup, "0::/group" (version 2) or "N:controllers:/group" (version 1). */
static int32_t limit_of_line(const char *line, size_t length, const char *root)
{
    static const char *const mounts_v2[] = { "", "/unified", NULL };
    static const char *const mounts_v1[] = { "/cpu", "/cpu,cpuacct", "/cpuacct,cpu", NULL };
    const char *end = line + length;
    const char *list = memchr(line, ':', length);
    const char *group = list ? memchr(list + 1, ':', (size_t)(end - list - 1)) : NULL;
    if (!group)
        return NO_LIMIT;
    list++;
    size_t list_length = (size_t)(group - list);
    group++;
    size_t group_length = (size_t)(end - group);
    if (list_length == 0)
        return limit_in_mounts(root, mounts_v2, group, group_length, limit_v2);
    if (names_cpu(list, list_length))
        return limit_in_mounts(root, mounts_v1, group, group_length, limit_v1);
    return NO_LIMIT;
}

int32_t hsri_cpu_quota(const char *membership, const char *root)
{
    enum { MOST_TEXT = 64 * 1024 };
    char *text = hsri_new_array(MOST_TEXT, 1);
    int32_t least = NO_LIMIT;
    if (text && read_text(membership, text, MOST_TEXT)) {
        for (const char *line = text; *line; ) {
            size_t length = strcspn(line, "\n");
            least = (int32_t)hsri_min((uint64_t)least, (uint64_t)limit_of_line(line, length, root));
            line += length + (line[length] == '\n');
        }
    }
    free(text);
    return least;
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
