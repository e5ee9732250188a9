/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's log: one line at a time to the host's callback, silent without one. */
#ifndef HSRI_LOG_H
#define HSRI_LOG_H

#include <pthread.h>

#include "hisparse_rt/hisparse_rt.h"

typedef struct hsri_log {
    hsr_log_fn      fn;
    void           *user;
    int32_t         level;
    pthread_mutex_t lock;   /* lines of one engine never overlap */
} hsri_log;

hsr_status hsri_log_init(hsri_log *log, hsr_log_fn fn, void *user, int32_t level, hsr_error *err);
void hsri_log_destroy(hsri_log *log);

__attribute__((format(printf, 3, 4)))
void hsri_log_write(hsri_log *log, int32_t level, const char *format, ...);

#endif
