/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the CPU back end share: the device with its buffer table, and how an operation finds its arguments. */
#ifndef HSRI_CPU_BACKEND_H
#define HSRI_CPU_BACKEND_H

#include <assert.h>
#include <pthread.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/threads.h"
#include "device/cpu/kernels.h"
#include "device/cpu/sample.h"
#include "device/device.h"

typedef enum hsri_cpu_memory { HSRI_CPU_UNUSED, HSRI_CPU_HEAP, HSRI_CPU_MAPPED, HSRI_CPU_VIEW, HSRI_CPU_RESERVED } hsri_cpu_memory;

typedef struct hsri_cpu_buffer {
    uint8_t        *data;
    uint64_t        bytes;
    uint32_t        next_unused;   /* id, 0 at the end: chain of ids that were freed */
    hsri_cpu_memory memory;
} hsri_cpu_buffer;

/* Room for at least one row of any model, and for a step's rows of a small one. */
#define HSRI_CPU_PREPARED_BYTES (8u << 20)

/* Floats of a worker's scratch: the kernels' part; pages put together from units, two of the largest or a group of small ones; partials
 * of a call, of pieces and of a whole group. Encoding a page takes less. */
#define HSRI_CPU_GATHER_SCRATCH (2u * (2u * HSRI_PAGE_TOKENS * HSRI_ATTEND_MAX_HEAD_DIM + HSRI_PAGE_HEADER_BYTES / 4u))
#define HSRI_CPU_CALL_SCRATCH (HSRI_ATTEND_MAX_QUERIES * (HSRI_ATTEND_MAX_HEAD_DIM + 2u))
#define HSRI_CPU_SCRATCH (HSRI_ATTEND_SCRATCH + HSRI_CPU_GATHER_SCRATCH + 2u * HSRI_CPU_CALL_SCRATCH)

/* Entries never move, so that looking up a live id needs no lock while others are added: chunk c holds
 * HSRI_CPU_FIRST_CHUNK << c entries. */
#define HSRI_CPU_FIRST_CHUNK 64u
#define HSRI_CPU_N_CHUNKS 24u

typedef struct hsri_cpu_device {
    hsri_device      base;
    pid_t            pid;           /* of the creator */
    hsri_threads    *threads;
    hsri_kernels     kernels;
    pthread_mutex_t  lock;          /* of the table's growth and of its unused ids */
    hsri_cpu_buffer *chunks[HSRI_CPU_N_CHUNKS];
    uint32_t         n_ids;         /* ids ever given: 1..n_ids */
    uint32_t         unused;        /* first freed id, 0: none */
    float           *scratch;       /* HSRI_CPU_SCRATCH floats per thread */
    hsri_spent       spent;
    uint32_t         prepared;      /* buffer of HSRI_CPU_PREPARED_BYTES for inputs of linear, if the level prepares them */
    /* Of the sampler; both grow at the first call of a size and stay. */
    hsri_sample_work *sample_work;  /* one per thread */
    hsri_sample_part *sample_parts;
    size_t            n_sample_parts;
} hsri_cpu_device;

typedef struct hsri_cpu_queue {
    hsri_queue base;
    hsr_error  error;               /* the first failure since the last wait; status HSR_OK: none */
} hsri_cpu_queue;

static inline hsri_cpu_buffer *hsri_cpu_buffer_of(const hsri_cpu_device *dev, uint32_t id)
{
    uint32_t i = id - 1 + HSRI_CPU_FIRST_CHUNK;
    uint32_t c = (uint32_t)__builtin_clz(HSRI_CPU_FIRST_CHUNK) - (uint32_t)__builtin_clz(i);

    return &dev->chunks[c][i - (HSRI_CPU_FIRST_CHUNK << c)];
}

/* Address of `bytes` bytes at r; NULL for an absent argument. */
static inline void *hsri_cpu_at(const hsri_cpu_device *dev, hsri_ref r, uint64_t bytes)
{
    const hsri_cpu_buffer *b;

    if (r.buf == 0)
        return NULL;
    b = hsri_cpu_buffer_of(dev, r.buf);
    assert(b->memory != HSRI_CPU_UNUSED);
    assert(r.offset <= b->bytes && bytes <= b->bytes - r.offset);
    (void)bytes;
    return b->data + r.offset;
}

static inline float *hsri_cpu_floats(const hsri_cpu_device *dev, hsri_ref r, uint64_t n) { return hsri_cpu_at(dev, r, n * sizeof(float)); }

/* An operation that begins with HSRI_CPU_TIMED(q, attend) adds the time until it returns to the device's `spent.attend`. */
typedef struct hsri_cpu_timer {
    uint64_t *spent, start;
} hsri_cpu_timer;

static inline hsri_cpu_timer hsri_cpu_timer_start(uint64_t *spent) { return (hsri_cpu_timer){ spent, hsri_now_ns() }; }
static inline void hsri_cpu_timer_end(const hsri_cpu_timer *t) { *t->spent += hsri_now_ns() - t->start; }

#define HSRI_CPU_TIMED(q, what) \
    __attribute__((cleanup(hsri_cpu_timer_end), unused)) const hsri_cpu_timer timer = \
        hsri_cpu_timer_start(&((hsri_cpu_device *)(q)->dev)->spent.what)

/* Compute items [first, end) on thread `worker`. */
typedef void (*hsri_cpu_run_fn)(const void *job, uint64_t first, uint64_t end, uint32_t worker);

/* Run all items, which take one thread about cost_ns together, on as many threads as that pays for (ops.c). */
void hsri_cpu_run_items(hsri_cpu_device *dev, uint64_t n_items, uint64_t cost_ns, hsri_cpu_run_fn fn, const void *job);

/* The operations of attention and merging (attend.c), and of sealing (pages.c). */
void hsri_cpu_attend_fill(hsri_ops *ops);
void hsri_cpu_pages_fill(hsri_ops *ops);
/* What pages got of the attention (page_mass.c). */
void hsri_cpu_page_mass_fill(hsri_ops *ops);
/* Rotating and choosing (sparse.c), and the index's part of sealing: the entry of a page k[64][d], v[64][d], into its slab. scratch:
 * hsri_index_scratch(d) floats. */
void hsri_cpu_sparse_fill(hsri_ops *ops);
void hsri_cpu_index_page(const hsri_cpu_device *dev, const hsri_kv_view *kv, const hsri_seal *seal, const float *k, const float *v,
                         float *scratch);

/* Cluster records (cluster.c). */
void hsri_cpu_cluster_fill(hsri_ops *ops);

static inline float *hsri_cpu_scratch(const hsri_cpu_device *dev, uint32_t worker)
{
    return dev->scratch + (uint64_t)worker * HSRI_CPU_SCRATCH;
}

/* The table of simple operations, and the scratch of one of them (ops.c). */
void hsri_cpu_ops_fill(hsri_ops *ops);
hsr_status hsri_cpu_reserve_sampling(hsri_device *dev, uint32_t n_rows, uint32_t n_tokens, hsr_error *err);

#endif
