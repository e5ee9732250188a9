/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HSRI_CLOCK_H
#define HSRI_CLOCK_H

#include <stdint.h>

/* Monotonic time, nanoseconds from an arbitrary start. */
uint64_t hsri_now_ns(void);

#endif
