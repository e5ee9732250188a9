/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "base/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/array.h"

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

bool hsri_cgroup_text(const char *folder, const char *name, char *text, size_t room)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/%s", folder, name);
    return n > 0 && (size_t)n < sizeof(path) && read_text(path, text, room);
}

bool hsri_cgroup_number(const char *folder, const char *name, long long *value)
{
    char text[64];
    return hsri_cgroup_text(folder, name, text, sizeof(text)) && sscanf(text, "%lld", value) == 1;
}

/* Least limit of a group and all that hold it. A path that does not exist below this mount (a container that sees the
 * host's path but only its own tree) is walked up all the same, until folders exist. */
static uint64_t least_up_to_root(const char *mount, const char *group, size_t group_length, int version, hsri_cgroup_limit limit_of)
{
    char folder[PATH_MAX];
    int n = snprintf(folder, sizeof(folder), "%s%.*s", mount, (int)group_length, group);
    if (n < 0 || (size_t)n >= sizeof(folder) || strstr(folder, "/.."))
        n = snprintf(folder, sizeof(folder), "%s", mount);
    uint64_t least = HSRI_NO_LIMIT;
    size_t root = strlen(mount);
    for (;;) {
        least = hsri_min(least, limit_of(folder, version));
        char *slash = strrchr(folder, '/');
        if (strlen(folder) <= root || !slash || (size_t)(slash - folder) < root)
            return least;
        *slash = '\0';
    }
}

/* Whether a comma-separated list holds a name. */
static bool names(const char *list, size_t length, const char *name)
{
    for (size_t i = 0; i < length; ) {
        size_t end = i;
        while (end < length && list[end] != ',')
            end++;
        if (end - i == strlen(name) && memcmp(list + i, name, end - i) == 0)
            return true;
        i = end + 1;
    }
    return false;
}

/* One line of /proc/self/cgroup, "0::/group" (version 2) or "N:controllers:/group" (version 1). A tree of version 1 is mounted under the
 * name of its controllers, or under one of them. */
static uint64_t least_of_line(const char *line, size_t length, const char *root, const char *controller, hsri_cgroup_limit limit_of)
{
    char mount[PATH_MAX];
    const char *end = line + length;
    const char *list = memchr(line, ':', length);
    const char *group = list ? memchr(list + 1, ':', (size_t)(end - list - 1)) : NULL;
    if (!group)
        return HSRI_NO_LIMIT;
    list++;
    const int list_length = (int)(group - list), version = list_length == 0 ? 2 : 1;
    group++;
    if (version == 1 && !names(list, (size_t)list_length, controller))
        return HSRI_NO_LIMIT;
    const char *const mounts[] = { version == 2 ? "unified" : controller, version == 2 ? "" : list };
    const int lengths[] = { (int)strlen(mounts[0]), list_length };
    uint64_t least = HSRI_NO_LIMIT;
    for (int i = 0; i < 2; i++) {
        int n = snprintf(mount, sizeof(mount), "%s%s%.*s", root, lengths[i] ? "/" : "", lengths[i], mounts[i]);
        if (n > 0 && (size_t)n < sizeof(mount))
            least = hsri_min(least, least_up_to_root(mount, group, (size_t)(end - group), version, limit_of));
    }
    return least;
}

uint64_t hsri_cgroup_least(const char *membership, const char *root, const char *controller, hsri_cgroup_limit limit_of)
{
    enum { MOST_TEXT = 64 * 1024 };
    char *text = hsri_new_array(MOST_TEXT, 1);
    uint64_t least = HSRI_NO_LIMIT;
    if (text && read_text(membership, text, MOST_TEXT)) {
        for (const char *line = text; *line; ) {
            size_t length = strcspn(line, "\n");
            least = hsri_min(least, least_of_line(line, length, root, controller, limit_of));
            line += length + (line[length] == '\n');
        }
    }
    free(text);
    return least;
}
