/* SPDX-License-Identifier: Apache-2.0 */
/* Limits of control groups, versions 1 and 2: of the group a process is in and of all that hold it. */
#ifndef HSRI_CGROUP_H
#define HSRI_CGROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HSRI_NO_LIMIT UINT64_MAX

/* What one group, a folder of a tree of version 1 or 2, allows. HSRI_NO_LIMIT: it says nothing. */
typedef uint64_t (*hsri_cgroup_limit)(const char *folder, int version);

/* The least over the groups named in the file `membership` (/proc/self/cgroup) that have the controller, and all above them, in the trees
 * below `root` (/sys/fs/cgroup). */
uint64_t hsri_cgroup_least(const char *membership, const char *root, const char *controller, hsri_cgroup_limit limit_of);

/* The whole of a small file of a group, NUL-terminated and cut to `room`; false if it cannot be read. */
bool hsri_cgroup_text(const char *folder, const char *name, char *text, size_t room);

/* The number that a file of a group begins with. False for "max". */
bool hsri_cgroup_number(const char *folder, const char *name, long long *value);

#endif
