/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "base/clock.h"

#include <time.h>

uint64_t hsri_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#define BUSY_NS 2000000000ull

uint64_t hsri_stopped_ns(uint64_t began_ns, uint64_t wait_ns)
{
    const uint64_t took = hsri_now_ns() - began_ns;
    return took > wait_ns && took - wait_ns > BUSY_NS ? took - wait_ns : 0;
}
