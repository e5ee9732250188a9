/* SPDX-License-Identifier: Apache-2.0 */
/* A device of the CPU and a queue, as most tests begin. */
#ifndef HSR_TESTS_OPEN_DEVICE_H
#define HSR_TESTS_OPEN_DEVICE_H

#include "check.h"
#include "device/device.h"

/* `async`: behind the back end that runs what is queued later. */
static inline void open_device(int32_t n_threads, int32_t isa, bool async, hsri_device **dev, hsri_queue **q)
{
    CHECK(hsri_cpu_device_create(n_threads, isa, NULL, dev, NULL) == HSR_OK);
    if (async)
        CHECK(hsri_async_device_create(*dev, dev, NULL) == HSR_OK);
    CHECK((*dev)->queue_create(*dev, q, NULL) == HSR_OK);
}

#endif
