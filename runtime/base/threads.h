/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's compute threads: one parallel loop at a time, run by the caller and the workers together. */
#ifndef HSRI_THREADS_H
#define HSRI_THREADS_H

#include "hisparse_rt/hisparse_rt.h"

typedef struct hsri_threads hsri_threads;

/* n_threads counts the calling thread: 1 starts none. Workers have a name, block all signals, spin briefly after each
 * loop and then sleep. Partly started pools are undone on failure. */
hsr_status hsri_threads_create(int32_t n_threads, hsri_threads **threads, hsr_error *err);
void hsri_threads_destroy(hsri_threads *threads);
/* Free the memory only: for a child after fork(), which has the pool but not its threads. */
void hsri_threads_forget(hsri_threads *threads);
int32_t hsri_threads_count(const hsri_threads *threads);

/* Call fn(arg, task, worker) for every task in [0, n_tasks), in any order on any thread; returns when all are done.
 * worker in [0, hsri_threads_count) names the thread, for per-thread scratch. One caller at a time. */
void hsri_parallel(hsri_threads *threads, uint32_t n_tasks, void (*fn)(void *arg, uint32_t task, uint32_t worker), void *arg);

#endif
