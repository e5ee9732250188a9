/* SPDX-License-Identifier: Apache-2.0 */
#include "base/memory.h"

#include <stdio.h>
#include <string.h>

/* Read the first line of a file that starts with `prefix` (may be "") as prefix + number. 0 if there is none. */
static uint64_t read_number(const char *path, const char *prefix)
{
    char line[128];
    unsigned long long value = 0;
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    while (fgets(line, sizeof line, f))
        if (strncmp(line, prefix, strlen(prefix)) == 0 && sscanf(line + strlen(prefix), "%llu", &value) == 1)
            break;
    fclose(f);
    return value;
}

uint64_t hsri_memory_total(void)
{
    uint64_t total = read_number("/proc/meminfo", "MemTotal:") * 1024, limit = read_number("/sys/fs/cgroup/memory.max", "");
    return limit && limit < total ? limit : total;
}

uint64_t hsri_memory_available(void)
{
    uint64_t available = read_number("/proc/meminfo", "MemAvailable:") * 1024;
    /* Inside a container the control group's own directory is mounted here; outside, the root has no such files. */
    uint64_t limit = read_number("/sys/fs/cgroup/memory.max", ""), used = read_number("/sys/fs/cgroup/memory.current", "");
    if (limit > used && limit - used < available)
        available = limit - used;
    return available;
}
