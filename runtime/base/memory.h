/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HSRI_MEMORY_H
#define HSRI_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes this process could still take without swapping: the system's estimate, cut by what its control groups and its limit of address
 * space leave. 0: unknown, or nothing. */
uint64_t hsri_memory_available(void);

/* Bytes of memory this process could have if it were alone: the machine's, cut by the control groups' limits. 0: unknown. */
uint64_t hsri_memory_total(void);

/* What the control groups allow, as hsri_cgroup_least looks for it; left: less what is used and is not cached files. UINT64_MAX: any. */
uint64_t hsri_memory_limit(const char *membership, const char *root, bool left);

#endif
