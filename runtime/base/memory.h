/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HSRI_MEMORY_H
#define HSRI_MEMORY_H

#include <stdint.h>

/* Bytes this process could still take without swapping: the system's estimate, cut by the control group's limit. 0: unknown. */
uint64_t hsri_memory_available(void);

/* Bytes of memory this process could have if it were alone: the machine's, cut by the control group's limit. 0: unknown. */
uint64_t hsri_memory_total(void);

#endif
