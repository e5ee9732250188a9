/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HSRI_CLOCK_H
#define HSRI_CLOCK_H

#include <stdint.h>

/* Monotonic time, nanoseconds from an arbitrary start. */
uint64_t hsri_now_ns(void);

/* A wait that is to end by a deadline lasts no longer than this at a time, so that it can tell a process that was stopped. */
#define HSRI_WATCH_NS 1000000000ull

/* How much longer than `wait_ns` a wait that began at `began_ns` took because the process did not run: it was stopped and continued, or its
 * machine was. Deadlines do not count that. 0 for what a busy machine explains. */
uint64_t hsri_stopped_ns(uint64_t began_ns, uint64_t wait_ns);

#endif
