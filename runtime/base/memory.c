/* SPDX-License-Identifier: Apache-2.0 */
#include "base/memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/array.h"
#include "base/cgroup.h"

/* The number behind `prefix` at the start of a line. 0 if there is none. */
static uint64_t number_in(const char *text, const char *prefix)
{
    unsigned long long value;
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, prefix, strlen(prefix)) == 0 && sscanf(line + strlen(prefix), "%llu", &value) == 1)
            return value;
    }
    return 0;
}

static uint64_t number_in_file(const char *folder, const char *name, const char *prefix)
{
    char text[8192];
    return hsri_cgroup_text(folder, name, text, sizeof text) ? number_in(text, prefix) : 0;
}

static uint64_t limit_of(const char *folder, int version)
{
    long long limit;
    const bool known = hsri_cgroup_number(folder, version == 2 ? "memory.max" : "memory.limit_in_bytes", &limit);
    return known && limit > 0 ? (uint64_t)limit : HSRI_NO_LIMIT;
}

/* What is cached of files counts as used, but is given up when memory is wanted. */
static uint64_t left_of(const char *folder, int version)
{
    const uint64_t limit = limit_of(folder, version);
    long long used;
    if (limit == HSRI_NO_LIMIT || !hsri_cgroup_number(folder, version == 2 ? "memory.current" : "memory.usage_in_bytes", &used))
        return limit;
    const uint64_t cached = number_in_file(folder, "memory.stat", version == 2 ? "inactive_file " : "total_inactive_file ")
                          + number_in_file(folder, "memory.stat", version == 2 ? "active_file " : "total_active_file ");
    const uint64_t held = (uint64_t)used - hsri_min(cached, (uint64_t)used);
    return limit - hsri_min(held, limit);
}

uint64_t hsri_memory_limit(const char *membership, const char *root, bool left)
{
    return hsri_cgroup_least(membership, root, "memory", left ? left_of : limit_of);
}

/* Of the address space, which a process may be limited in. */
static uint64_t address_space_left(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return HSRI_NO_LIMIT;
    return limit.rlim_cur - hsri_min(number_in_file("/proc/self", "status", "VmSize:") * 1024, limit.rlim_cur);
}

uint64_t hsri_memory_total(void)
{
    const uint64_t system = number_in_file("/proc", "meminfo", "MemTotal:") * 1024;
    return hsri_min(system, hsri_memory_limit("/proc/self/cgroup", "/sys/fs/cgroup", false));
}

uint64_t hsri_memory_available(void)
{
    const uint64_t system = number_in_file("/proc", "meminfo", "MemAvailable:") * 1024;
    return hsri_min(hsri_min(system, hsri_memory_limit("/proc/self/cgroup", "/sys/fs/cgroup", true)), address_space_left());
}
