/* SPDX-License-Identifier: Apache-2.0 */
/* The simple operations of the CPU back end: find the arguments in memory, cut the work into tasks, call kernels.
 *
 * Each operation is a number of items (rows, elements, pieces of a product) and a function that computes a run of them. How the
 * items are cut into runs never changes a result: an item computes whole output elements, with kernels whose rows do not depend
 * on each other. A parallel loop costs about two microseconds, so operations estimate their time and small ones stay on the
 * calling thread. */
#include "device/cpu/backend.h"
#include "device/cpu/pages.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"

#define CHUNK 4096u                    /* elements of an item of an elementwise operation */

/* Estimates for one thread. */
#define INLINE_NS 5000u                /* operations below it do not start a parallel loop */
#define TASK_NS 4000u                  /* tasks are not cut smaller */
#define TASKS_PER_THREAD 8u            /* nor into more: enough for a thread that was held up to cost little */
#define MACS_PER_NS 16u                /* of a matrix product bound by arithmetic */
#define PREPARED_MACS_PER_NS 450u       /* the same with prepared inputs */
#define BYTES_PER_NS 10u               /* of one bound by memory */

/* Pieces of a large matrix product: weights that stay in a core's cache while blocks of rows pass, and such a block. */
#define WEIGHT_BYTES (512u << 10)
#define INPUT_BYTES (1u << 20)
/* Most rows of a block; and least of prepared inputs, whatever their bytes: kernels want many rows, to unpack weights for, and go through a
 * part of the inputs of all of them at a time. */
#define BLOCK_ROWS 512u
#define LEAST_ROWS 256u
/* Panels of an item whose inputs are more than INPUT_BYTES: those come from a slower cache, part by part, for the panels of each item. */
#define LONG_PANELS 16u
/* Sums that are something's input are kept by the worker until they are: as many as stay in its core's cache. */
#define KEPT_SUMS (64u << 10)
/* They are finished by multiples of these panels: gate and up of a run of the next product. */
#define FINISH_PANELS (2u * HSRI_RUN / HSRI_PANEL)

_Static_assert(KEPT_SUMS + BLOCK_ROWS * HSRI_PANEL <= HSRI_CPU_SCRATCH, "a worker's scratch holds the sums it keeps");

static hsri_cpu_device *cpu_of(hsri_queue *q) { return (hsri_cpu_device *)q->dev; }

/* The first failure of a queue stays until the next wait. */
static void queue_fail(hsri_queue *q, const char *what)
{
    hsri_cpu_queue *queue = (hsri_cpu_queue *)q;

    if (queue->error.status == HSR_OK)
        hsri_fail(&queue->error, HSR_E_NOMEM, "no memory for %s", what);
}

/* ---- cutting work ---- */

/* Tasks are cut into as many ranges as there are threads, and each thread begins with the range that has its number. Items are ordered by
 * rows where they can be, so most of what an operation reads was written by the same thread, and is in its core's cache. A thread whose
 * range is done helps with others. */
#define MOST_RANGES 64u

typedef struct split {
    hsri_cpu_run_fn fn;
    const void *job;
    uint64_t    n_items, per_task;
    uint32_t    n_tasks, n_ranges;
    _Atomic uint32_t claimed[MOST_RANGES];   /* of the tasks of a range */
} split;

/* There are as many calls as tasks: when a call finds a range empty, there is a task for it in one of those behind. */
static uint32_t claim_task(split *s, uint32_t worker)
{
    for (uint32_t i = worker % s->n_ranges;; i = (i + 1) % s->n_ranges) {
        uint32_t first = (uint32_t)((uint64_t)s->n_tasks * i / s->n_ranges), end = (uint32_t)((uint64_t)s->n_tasks * (i + 1) / s->n_ranges);

        if (atomic_load_explicit(&s->claimed[i], memory_order_relaxed) >= end - first)
            continue;
        uint32_t task = first + atomic_fetch_add_explicit(&s->claimed[i], 1, memory_order_relaxed);
        if (task < end)
            return task;
    }
}

static void split_task(void *arg, uint32_t task, uint32_t worker)
{
    split   *s = arg;
    uint64_t first = claim_task(s, worker) * s->per_task;

    (void)task;
    s->fn(s->job, first, hsri_min(first + s->per_task, s->n_items), worker);
}

static uint64_t items_per_task(const hsri_cpu_device *dev, uint64_t n_items, uint64_t cost_ns)
{
    uint64_t most = (uint64_t)hsri_threads_count(dev->threads) * TASKS_PER_THREAD;

    return hsri_max(hsri_div_up(n_items, hsri_min(cost_ns / TASK_NS + 1, most)), 1);
}

void hsri_cpu_run_items(hsri_cpu_device *dev, uint64_t n_items, uint64_t cost_ns, hsri_cpu_run_fn fn, const void *job)
{
    split s;

    if (n_items == 0)
        return;
    if (cost_ns < INLINE_NS) {
        fn(job, 0, n_items, 0);
        return;
    }
    s.fn = fn;
    s.job = job;
    s.n_items = n_items;
    s.per_task = items_per_task(dev, n_items, cost_ns);
    s.n_tasks = (uint32_t)hsri_div_up(n_items, s.per_task);
    s.n_ranges = (uint32_t)hsri_min((uint64_t)hsri_threads_count(dev->threads), MOST_RANGES);
    for (uint32_t i = 0; i < s.n_ranges; i++)
        atomic_init(&s.claimed[i], 0);
    hsri_parallel(dev->threads, s.n_tasks, split_task, &s);
}

/* ---- rows of tables ---- */

typedef struct embed_job {
    const hsri_kernels *kernels;
    hsri_packed    table;
    hsri_dtype     dtype;
    const int32_t *ids;
    float         *out;
} embed_job;

static void embed_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const embed_job *job = arg;

    (void)worker;
    for (uint64_t i = first; i < end; i++) {
        assert((uint32_t)job->ids[i] < job->table.n);
        job->kernels->unpack_row[job->dtype](&job->table, (uint32_t)job->ids[i], job->out + i * job->table.k);
    }
}

static hsri_packed packed_of(const hsri_cpu_device *dev, const hsri_matrix *w)
{
    return hsri_packed_at(hsri_cpu_at(dev, w->data, hsri_packed_bytes(w->dtype, w->n, w->k)), w->dtype, w->n, w->k);
}

static void cpu_embed(hsri_queue *q, const hsri_matrix *table, hsri_ref ids, uint32_t n_ids, hsri_ref out)
{
    hsri_cpu_device *dev = cpu_of(q);
    embed_job        job = { &dev->kernels, packed_of(dev, table), table->dtype, hsri_cpu_at(dev, ids, n_ids * sizeof(int32_t)),
                             hsri_cpu_floats(dev, out, (uint64_t)n_ids * table->k) };

    hsri_cpu_run_items(dev, n_ids, (uint64_t)n_ids * table->k, embed_run, &job);
}

typedef struct gather_job {
    const float    *in;
    const uint32_t *index;
    float          *out;
    uint64_t        width;
} gather_job;

static void gather_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const gather_job *job = arg;

    (void)worker;
    for (uint64_t i = first; i < end; i++)
        memcpy(job->out + i * job->width, job->in + job->index[i] * job->width, job->width * sizeof(float));
}

static void cpu_gather_rows(hsri_queue *q, hsri_ref in, uint32_t width, hsri_ref index, uint32_t n, hsri_ref out)
{
    hsri_cpu_device *dev = cpu_of(q);
    gather_job       job = { hsri_cpu_floats(dev, in, 0), hsri_cpu_at(dev, index, n * sizeof(uint32_t)),
                             hsri_cpu_floats(dev, out, (uint64_t)n * width), width };

    hsri_cpu_run_items(dev, n, (uint64_t)n * width / 4, gather_run, &job);
}

/* ---- rotary table ---- */

typedef struct rope_table_job {
    const hsri_row *rows;
    const hsri_seq *seqs;
    const float    *inv_freq;
    float          *out;
    uint32_t        half;
    float           factor;
} rope_table_job;

static void rope_table_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const rope_table_job *job = arg;

    (void)worker;
    for (uint64_t i = first; i < end; i++) {
        const float *inv_freq = job->inv_freq + (uint64_t)job->seqs[job->rows[i].seq].rope_table * job->half;
        float       *cosines = job->out + i * 2 * job->half, *sines = cosines + job->half;

        for (uint32_t j = 0; j < job->half; j++) {
            double angle = (double)job->rows[i].pos * inv_freq[j];

            cosines[j] = (float)(cos(angle) * job->factor);
            sines[j] = (float)(sin(angle) * job->factor);
        }
    }
}

static const hsri_row *rows_of(const hsri_cpu_device *dev, const hsri_batch *batch)
{
    return hsri_cpu_at(dev, batch->rows, batch->n_rows * sizeof(hsri_row));
}

static const hsri_seq *seqs_of(const hsri_cpu_device *dev, const hsri_batch *batch)
{
    return hsri_cpu_at(dev, batch->seqs, batch->n_seqs * sizeof(hsri_seq));
}

static void cpu_rope_table(hsri_queue *q, const hsri_batch *batch, hsri_ref inv_freq, uint32_t rotary_dim, float attention_factor,
                           hsri_ref out)
{
    hsri_cpu_device *dev = cpu_of(q);
    rope_table_job   job = { rows_of(dev, batch), seqs_of(dev, batch), hsri_cpu_floats(dev, inv_freq, rotary_dim / 2),
                             hsri_cpu_floats(dev, out, (uint64_t)batch->n_rows * rotary_dim), rotary_dim / 2, attention_factor };

    hsri_cpu_run_items(dev, batch->n_rows, (uint64_t)batch->n_rows * rotary_dim * 20, rope_table_run, &job);
}

/* ---- norm and elementwise operations ---- */

typedef struct rows_job {
    const hsri_kernels *kernels;
    const float *in, *gain;
    void        *out;
    uint64_t     n;              /* elements of a row of out */
    uint64_t     in_stride, n_chunks;
    float        eps;
} rows_job;

static void rms_norm_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const rows_job *job = arg;

    (void)worker;
    for (uint64_t i = first; i < end; i++)
        job->kernels->rms_norm(job->in + i * job->n, job->gain, job->eps, (uint32_t)job->n, (float *)job->out + i * job->n);
}

static void cpu_rms_norm(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, uint32_t n_rows, uint32_t width, hsri_ref out)
{
    hsri_cpu_device *dev = cpu_of(q);
    uint64_t         n = (uint64_t)n_rows * width;
    rows_job         job = { .kernels = &dev->kernels, .in = hsri_cpu_floats(dev, in, n), .gain = hsri_cpu_floats(dev, gain, width),
                             .out = hsri_cpu_floats(dev, out, n), .n = width, .eps = eps };

    hsri_cpu_run_items(dev, n_rows, n / 2, rms_norm_run, &job);
}

static void add_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const rows_job *job = arg;
    uint64_t        at = first * CHUNK;

    (void)worker;
    job->kernels->add((float *)job->out + at, job->in + at, hsri_min(end * CHUNK, job->n) - at);
}

static void cpu_add(hsri_queue *q, hsri_ref x, hsri_ref y, uint32_t n_rows, uint32_t n)
{
    hsri_cpu_device *dev = cpu_of(q);
    uint64_t         all = (uint64_t)n_rows * n;
    rows_job         job = { .kernels = &dev->kernels, .in = hsri_cpu_floats(dev, y, all), .out = hsri_cpu_floats(dev, x, all), .n = all };

    hsri_cpu_run_items(dev, hsri_div_up(all, CHUNK), all / 4, add_run, &job);
}

/* An item is a chunk of a row; chunks begin at panels. */
static void silu_mul_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const rows_job *job = arg;

    (void)worker;
    for (uint64_t i = first; i < end; i++) {
        uint64_t row = i / job->n_chunks, at = i % job->n_chunks * CHUNK;

        job->kernels->silu_mul(job->in + row * job->in_stride + 2 * at, (uint32_t)hsri_min(CHUNK, job->n - at),
                               (float *)job->out + row * job->n + at);
    }
}

static void cpu_silu_mul(hsri_queue *q, hsri_ref in, uint32_t n_rows, uint32_t n, hsri_ref out)
{
    hsri_cpu_device *dev = cpu_of(q);
    uint64_t         stride = 2 * hsri_round_up(n, HSRI_PANEL), all = (uint64_t)n_rows * n;
    rows_job         job = { .kernels = &dev->kernels, .in = hsri_cpu_floats(dev, in, n_rows * stride),
                             .out = hsri_cpu_floats(dev, out, all), .n = n, .in_stride = stride, .n_chunks = hsri_div_up(n, CHUNK) };

    hsri_cpu_run_items(dev, n_rows * job.n_chunks, all * 2, silu_mul_run, &job);
}

static void check_finite_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const rows_job *job = arg;

    (void)worker;
    for (uint64_t i = first; i < end; i++)
        ((uint32_t *)job->out)[i] = job->kernels->nonfinite(job->in + i * job->n, job->n);
}

static void cpu_check_finite(hsri_queue *q, hsri_ref in, uint32_t n_rows, uint32_t n, hsri_ref flags)
{
    hsri_cpu_device *dev = cpu_of(q);
    uint64_t         all = (uint64_t)n_rows * n;
    rows_job         job = { .kernels = &dev->kernels, .in = hsri_cpu_floats(dev, in, all),
                             .out = hsri_cpu_at(dev, flags, n_rows * sizeof(uint32_t)), .n = n };

    hsri_cpu_run_items(dev, n_rows, all / 8, check_finite_run, &job);
}

/* ---- linear ---- */

typedef struct prepare_job {
    void       (*kernel)(const float *x, uint64_t x_stride, uint32_t n_rows, uint32_t k, float *prepared);
    const float *in;
    float       *prepared;
    uint64_t     stride;
    uint32_t     k;
    /* norm_linear: rows are normalised before */
    const hsri_cpu_device *dev;
    const float *gain;
    float        eps;
} prepare_job;

/* An item is a row. */
static void prepare_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const prepare_job *job = arg;

    if (!job->gain) {
        job->kernel(job->in + first * job->k, job->k, (uint32_t)(end - first), job->k, job->prepared + first * job->stride);
        return;
    }
    for (uint64_t i = first; i < end; i++) {
        float *row = hsri_cpu_scratch(job->dev, worker);

        job->dev->kernels.rms_norm(job->in + i * job->k, job->gain, job->eps, job->k, row);
        job->kernel(row, job->k, 1, job->k, job->prepared + i * job->stride);
    }
}

typedef struct linear_job linear_job;

/* An item is a run of panels times a block of rows. Neighbours share their panels; with prepared inputs, which do not stay in a near cache
 * while all panels pass if rows change in between, they share the rows. */
struct linear_job {
    void       (*kernel)(const hsri_packed *w, uint32_t panel0, uint32_t panel1, const float *x, uint64_t x_stride, uint32_t n_rows,
                         const float *bias, float *out, uint64_t out_stride);
    /* NULL: the sums are the output. Else it makes output of sums[n_rows][stride], which begin at `row` and `panel`. */
    void       (*finish)(const linear_job *job, uint32_t row, uint32_t n_rows, uint32_t panel, uint32_t n_panels, const float *sums,
                         uint64_t stride);
    const hsri_cpu_device *dev;
    hsri_packed  w;
    hsri_dtype   dtype;
    const float *bias, *in;
    float       *out;
    uint64_t     in_stride, out_stride;
    uint32_t     n_rows, n_panels, n_out;                  /* n_out: numbers in a row of out */
    uint32_t     together;                                 /* panels that `finish` needs together: FINISH_PANELS is a multiple */
    uint32_t     item_rows, item_panels, n_row_blocks, n_panel_items;
    bool         by_rows;
};

/* x += sums */
static void finish_add(const linear_job *job, uint32_t row, uint32_t n_rows, uint32_t panel, uint32_t n_panels, const float *sums,
                       uint64_t stride)
{
    uint32_t column = panel * HSRI_PANEL, n = (uint32_t)hsri_min(job->n_out - column, n_panels * HSRI_PANEL);
    float   *out = job->out + row * job->out_stride + column;

    for (uint32_t i = 0; i < n_rows; i++)
        job->dev->kernels.add(out + i * job->out_stride, sums + i * stride, n);
}

/* out = silu(gate) up; gate and up take turns as panels */
static void finish_silu(const linear_job *job, uint32_t row, uint32_t n_rows, uint32_t panel, uint32_t n_panels, const float *sums,
                        uint64_t stride)
{
    uint32_t column = panel / 2 * HSRI_PANEL, n = (uint32_t)hsri_min(job->n_out - column, n_panels / 2 * HSRI_PANEL);
    float   *out = job->out + row * job->out_stride + column;

    for (uint32_t i = 0; i < n_rows; i++)
        job->dev->kernels.silu_mul(sums + i * stride, n, out + i * job->out_stride);
}

/* The same, prepared to be the input of the next product. The panels make whole runs. */
static void finish_silu_prepared(const linear_job *job, uint32_t row, uint32_t n_rows, uint32_t panel, uint32_t n_panels, const float *sums,
                                 uint64_t stride)
{
    uint32_t column = panel / 2 * HSRI_PANEL, n = (uint32_t)hsri_min(job->n_out - column, n_panels / 2 * HSRI_PANEL);

    job->dev->kernels.silu_prepare[job->dtype](sums, stride, n_rows, n, job->out + row * job->out_stride + column / 2, job->out_stride);
}

/* Some panels of an item, as a matrix of their own, so that their sums begin at its first column. */
static void linear_keep(const linear_job *job, uint32_t row, uint32_t n_rows, uint32_t panel, uint32_t n_panels, float *sums)
{
    /* rows of sums an odd number of cache lines apart: columns should not share a cache set */
    uint64_t    stride = (n_panels | 1) * HSRI_PANEL;
    hsri_packed w = hsri_packed_panels(&job->w, job->dtype, panel, n_panels);

    job->kernel(&w, 0, n_panels, job->in + row * job->in_stride, job->in_stride, n_rows,
                job->bias ? job->bias + panel * HSRI_PANEL : NULL, sums, stride);
    job->finish(job, row, n_rows, panel, n_panels, sums, stride);
}

static void linear_item(const linear_job *job, uint32_t row, uint32_t n_rows, uint32_t panel, uint32_t panel_end, uint32_t worker)
{
    uint32_t most = (uint32_t)hsri_max(KEPT_SUMS / HSRI_PANEL / n_rows / FINISH_PANELS, 1) * FINISH_PANELS;

    if (!job->finish) {
        job->kernel(&job->w, panel, panel_end, job->in + row * job->in_stride, job->in_stride, n_rows, job->bias,
                    job->out + row * job->out_stride, job->out_stride);
        return;
    }
    for (uint32_t n; panel < panel_end; panel += n) {
        n = (uint32_t)hsri_min(most, panel_end - panel);
        linear_keep(job, row, n_rows, panel, n, hsri_cpu_scratch(job->dev, worker));
    }
}

static void linear_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const linear_job *job = arg;

    for (uint64_t i = first; i < end; i++) {
        uint64_t block = job->by_rows ? i / job->n_panel_items : i % job->n_row_blocks;
        uint64_t item = job->by_rows ? i % job->n_panel_items : i / job->n_row_blocks;
        uint32_t row = (uint32_t)block * job->item_rows, panel = (uint32_t)item * job->item_panels;

        linear_item(job, row, (uint32_t)hsri_min(job->item_rows, job->n_rows - row), panel,
                    (uint32_t)hsri_min(panel + job->item_panels, job->n_panels), worker);
    }
}

/* Panels of an item, a multiple of `step`, for at most `most` items of a block of rows: so many that the busiest thread has the least to
 * do. If that leaves a choice, small items, for a thread that was held up. */
static uint32_t even_panels(const linear_job *job, uint32_t step, uint64_t most, uint32_t n_threads)
{
    uint64_t best = job->n_panels, least = UINT64_MAX;

    for (uint64_t n = 1; n <= hsri_max(most, 1); n++) {
        uint64_t panels = hsri_round_up(hsri_div_up(job->n_panels, n), step);
        uint64_t busiest = hsri_div_up(hsri_div_up(job->n_panels, panels) * job->n_row_blocks, n_threads) * panels;

        if (busiest <= least) {
            least = busiest;
            best = panels;
        }
    }
    return (uint32_t)best;
}

/* Panels of an item, if the product takes one thread cost_ns. */
static uint32_t panels_of_item(const hsri_cpu_device *dev, const linear_job *job, uint64_t bytes, uint64_t cost_ns)
{
    uint32_t n_threads = (uint32_t)hsri_threads_count(dev->threads);
    /* kernels take panels in pairs if there are rows to use them on */
    uint32_t step = (uint32_t)hsri_max(job->together, job->n_rows > HSRI_PANEL ? 2 : 1);
    uint64_t most = hsri_min(cost_ns / TASK_NS + 1, (uint64_t)n_threads * TASKS_PER_THREAD) / job->n_row_blocks, n;

    if (!dev->kernels.prepare[job->dtype]) {
        n = items_per_task(dev, job->n_panels, cost_ns / job->n_row_blocks);
        return (uint32_t)hsri_round_up(hsri_min(n, hsri_max(WEIGHT_BYTES * (uint64_t)job->n_panels / bytes, 1)), step);
    }
    if (job->item_rows * job->in_stride * sizeof(float) > INPUT_BYTES)
        most = hsri_min(most, hsri_round_up(hsri_div_up(job->n_panels, LONG_PANELS), n_threads));
    return even_panels(job, step, most, n_threads);
}

/* Cut the product into items and compute it. */
static void linear_all(hsri_cpu_device *dev, linear_job *job, uint32_t macs_per_ns, uint32_t block_rows)
{
    uint64_t bytes = hsri_packed_bytes(job->dtype, job->w.n, job->w.k);
    uint64_t cost = hsri_max((uint64_t)job->w.n * job->w.k * job->n_rows / macs_per_ns, bytes / BYTES_PER_NS);

    /* blocks of equal size, as few as fit */
    job->n_row_blocks = (uint32_t)hsri_div_up(job->n_rows, block_rows);
    job->item_rows = (uint32_t)hsri_round_up(hsri_div_up(job->n_rows, job->n_row_blocks), 16);
    job->n_row_blocks = (uint32_t)hsri_div_up(job->n_rows, job->item_rows);
    job->item_panels = panels_of_item(dev, job, bytes, cost);
    job->n_panel_items = (uint32_t)hsri_div_up(job->n_panels, job->item_panels);
    job->by_rows = dev->kernels.prepare[job->dtype] != NULL;
    hsri_cpu_run_items(dev, (uint64_t)job->n_panel_items * job->n_row_blocks, cost, linear_run, job);
}

/* Rows of a block of prepared inputs: a thread's share, if it is large enough. */
static uint32_t prepared_block(const hsri_cpu_device *dev, uint32_t n_rows, uint64_t stride)
{
    uint64_t share = hsri_div_up(n_rows, (uint64_t)hsri_threads_count(dev->threads));

    return (uint32_t)hsri_max(LEAST_ROWS, hsri_min(share, hsri_min(INPUT_BYTES / (stride * sizeof(float)), BLOCK_ROWS)));
}

/* A level that prepares inputs does so once for all panels, for as many rows at a time as there is room for. gain: of a norm before. */
static void linear_prepared(hsri_cpu_device *dev, linear_job job, const float *gain, float eps)
{
    uint64_t    stride = hsri_prepared_stride(job.w.k), room = HSRI_CPU_PREPARED_BYTES / (stride * sizeof(float));
    prepare_job prepare = { dev->kernels.prepare[job.dtype], job.in, hsri_cpu_at(dev, (hsri_ref){ .buf = dev->prepared }, 0), stride,
                            job.w.k, dev, gain, eps };
    uint32_t    n_rows = job.n_rows;

    assert(room > 0 && (!gain || job.w.k <= HSRI_CPU_SCRATCH));
    job.in = prepare.prepared;
    job.in_stride = stride;
    for (uint32_t row = 0; row < n_rows; row += job.n_rows) {
        job.n_rows = (uint32_t)hsri_min(room, n_rows - row);
        hsri_cpu_run_items(dev, job.n_rows, (uint64_t)job.n_rows * job.w.k / 8, prepare_run, &prepare);
        linear_all(dev, &job, PREPARED_MACS_PER_NS, prepared_block(dev, job.n_rows, stride));
        prepare.in += (uint64_t)job.n_rows * job.w.k;
        job.out += job.n_rows * job.out_stride;
    }
}

/* The product of n_rows rows, `n_out` wide when it is finished. */
static linear_job linear_of(hsri_cpu_device *dev, const hsri_matrix *w, hsri_ref bias, hsri_ref in, uint32_t n_rows, hsri_ref out,
                            uint32_t n_out)
{
    return (linear_job){ .kernel = dev->kernels.linear[w->dtype], .dev = dev, .w = packed_of(dev, w), .dtype = w->dtype,
                         .bias = hsri_cpu_floats(dev, bias, w->n), .in = hsri_cpu_floats(dev, in, (uint64_t)n_rows * w->k),
                         .in_stride = w->k, .out = hsri_cpu_floats(dev, out, (uint64_t)n_rows * n_out), .n_rows = n_rows,
                         .n_panels = (uint32_t)hsri_div_up(w->n, HSRI_PANEL), .n_out = n_out, .out_stride = n_out };
}

static void run_linear(hsri_cpu_device *dev, linear_job *job)
{
    if (job->n_rows == 0)
        return;
    if (dev->kernels.prepare[job->dtype])
        linear_prepared(dev, *job, NULL, 0.0f);
    else
        linear_all(dev, job, MACS_PER_NS, (uint32_t)hsri_max(hsri_min(INPUT_BYTES / (job->in_stride * sizeof(float)), BLOCK_ROWS), 1));
}

/* Where inputs are prepared, normalised rows are prepared at once and go nowhere else. */
static void run_norm_linear(hsri_queue *q, linear_job *job, hsri_ref in, hsri_ref gain, float eps, hsri_ref scratch)
{
    hsri_cpu_device *dev = cpu_of(q);
    uint64_t         n = (uint64_t)job->n_rows * job->w.k;

    if (!dev->kernels.prepare[job->dtype]) {
        q->dev->ops.rms_norm(q, in, gain, eps, job->n_rows, job->w.k, scratch);
        job->in = hsri_cpu_floats(dev, scratch, n);
        run_linear(dev, job);
    } else if (job->n_rows > 0) {
        linear_prepared(dev, *job, hsri_cpu_floats(dev, gain, job->w.k), eps);
    }
}

static void cpu_linear(hsri_queue *q, const hsri_matrix *w, hsri_ref bias, hsri_ref in, uint32_t n_rows, hsri_ref out)
{
    linear_job job = linear_of(cpu_of(q), w, bias, in, n_rows, out, w->n);

    run_linear(cpu_of(q), &job);
}

static void cpu_linear_add(hsri_queue *q, const hsri_matrix *w, hsri_ref bias, hsri_ref in, uint32_t n_rows, hsri_ref scratch, hsri_ref x)
{
    linear_job job = linear_of(cpu_of(q), w, bias, in, n_rows, x, w->n);

    (void)scratch;
    job.finish = finish_add;
    run_linear(cpu_of(q), &job);
}

static void cpu_norm_linear(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, uint32_t n_rows,
                            hsri_ref scratch, hsri_ref out)
{
    linear_job job = linear_of(cpu_of(q), w, bias, in, n_rows, out, w->n);

    run_norm_linear(q, &job, in, gain, eps, scratch);
}

static void cpu_gate_up_silu(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, uint32_t n_rows,
                             uint32_t n, hsri_ref scratch, hsri_ref out)
{
    linear_job job = linear_of(cpu_of(q), w, bias, in, n_rows, out, n);

    assert(w->n == 2 * hsri_round_up(n, HSRI_PANEL));
    job.finish = finish_silu;
    job.together = 2;
    run_norm_linear(q, &job, in, gain, eps, scratch);
}

/* Between the two products, rows are what the level makes of inputs, if that fits the place. */
static void cpu_mlp_add(hsri_queue *q, hsri_ref x, hsri_ref gain, float eps, const hsri_matrix *gate_up, hsri_ref gate_up_bias,
                        const hsri_matrix *down, hsri_ref down_bias, uint32_t n_rows, hsri_ref scratch, hsri_ref ffn)
{
    hsri_cpu_device *dev = cpu_of(q);
    uint64_t         stride = hsri_prepared_stride(down->k);
    linear_job       first, second;

    if (!dev->kernels.prepare[gate_up->dtype] || dev->kernels.prepare[gate_up->dtype] != dev->kernels.prepare[down->dtype] ||
        stride > down->k || n_rows == 0) {
        cpu_gate_up_silu(q, x, gain, eps, gate_up, gate_up_bias, n_rows, down->k, scratch, ffn);
        cpu_linear_add(q, down, down_bias, ffn, n_rows, scratch, x);
        return;
    }
    first = linear_of(dev, gate_up, gate_up_bias, x, n_rows, ffn, down->k);
    first.finish = finish_silu_prepared;
    first.together = FINISH_PANELS;
    first.out_stride = stride;
    run_norm_linear(q, &first, x, gain, eps, scratch);
    second = linear_of(dev, down, down_bias, ffn, n_rows, x, down->n);
    second.finish = finish_add;
    second.in_stride = stride;
    linear_all(dev, &second, PREPARED_MACS_PER_NS, prepared_block(dev, n_rows, stride));
}

/* ---- rope and append ---- */

/* Tokens whose values one thread writes: in every plain page order they fill whole cache lines, and no two threads share a word. */
#define APPEND_TOKENS 16u

typedef struct append_job {
    const hsri_cpu_device *dev;
    const hsri_row     *rows;
    const hsri_seq     *seqs;
    const hsri_kv_view *kv;
    const float        *qkv, *q_norm, *k_norm, *cos_sin;
    float              *q_out;
    uint32_t            n_rows, layer, n_heads, rotary_dim;
    float               eps;
} append_job;

/* Item i owns the rows from the first one at or behind row 16 i that starts a page's run of 16 tokens or a sequence. */
static uint32_t append_row0(const append_job *job, uint64_t item)
{
    uint64_t row = hsri_min(item * APPEND_TOKENS, job->n_rows);

    while (row > 0 && row < job->n_rows && job->rows[row].pos % APPEND_TOKENS != 0 && job->rows[row].seq == job->rows[row - 1].seq)
        row++;
    return (uint32_t)row;
}

static void norm_rope(const append_job *job, const float *in, const float *gain, const float *cos_sin, float *out)
{
    const hsri_kernels *kernels = &job->dev->kernels;
    uint32_t            d = job->kv->head_dim;

    if (gain) {
        kernels->rms_norm(in, gain, job->eps, d, out);
        in = out;
    } else {
        memcpy(out + job->rotary_dim, in + job->rotary_dim, (d - job->rotary_dim) * sizeof *out);
    }
    kernels->rope(in, cos_sin, job->rotary_dim, out);
}

static void append_row(const append_job *job, uint32_t row, float *key)
{
    uint32_t        d = job->kv->head_dim, n_kv = job->kv->n_kv_heads, pos = job->rows[row].pos;
    const hsri_seq *seq = &job->seqs[job->rows[row].seq];
    const float    *q = job->qkv + (uint64_t)row * (job->n_heads + 2 * n_kv) * d;
    const float    *k = q + (uint64_t)job->n_heads * d, *v = k + (uint64_t)n_kv * d;
    const float    *cos_sin = job->cos_sin + (uint64_t)row * job->rotary_dim;

    for (uint32_t h = 0; h < job->n_heads; h++)
        norm_rope(job, q + h * d, job->q_norm, cos_sin, job->q_out + ((uint64_t)row * job->n_heads + h) * d);
    for (uint32_t h = 0; h < n_kv; h++) {
        hsri_page_table pages = hsri_plain_pages(job->dev, job->kv, seq, job->layer, h);

        norm_rope(job, k + h * d, job->k_norm, cos_sin, key);
        job->dev->kernels.page_put[seq->kv_type](hsri_page_at(&pages, pos / HSRI_PAGE_TOKENS), d, pos % HSRI_PAGE_TOKENS, key, v + h * d);
    }
}

static void append_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const append_job *job = arg;
    float            *key = hsri_cpu_scratch(job->dev, worker);
    uint32_t          row_end = append_row0(job, end);

    for (uint32_t row = append_row0(job, first); row < row_end; row++)
        append_row(job, row, key);
}

static void cpu_rope_append(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, hsri_ref qkv,
                            hsri_ref q_norm, hsri_ref k_norm, float eps, const hsri_rope *rope, hsri_ref q_out)
{
    hsri_cpu_device *dev = cpu_of(q);
    uint64_t         n = batch->n_rows, width = (uint64_t)(n_heads + 2 * kv->n_kv_heads) * kv->head_dim;
    append_job       job = { dev, rows_of(dev, batch), seqs_of(dev, batch), kv, hsri_cpu_floats(dev, qkv, n * width),
                             hsri_cpu_floats(dev, q_norm, kv->head_dim), hsri_cpu_floats(dev, k_norm, kv->head_dim),
                             hsri_cpu_floats(dev, rope->cos_sin, n * rope->rotary_dim),
                             hsri_cpu_floats(dev, q_out, n * n_heads * kv->head_dim),
                             batch->n_rows, layer, n_heads, rope->rotary_dim, eps };

    assert(kv->head_dim <= HSRI_ATTEND_SCRATCH);
    hsri_cpu_run_items(dev, hsri_div_up(n, APPEND_TOKENS), n * width, append_run, &job);
}

/* ---- sampling ---- */

typedef struct sample_job {
    const hsri_cpu_device *dev;
    const float        *logits;
    const hsri_sample_params *params;
    hsri_sampled       *out;
    uint32_t            n_vocab, n_tokens, n_parts;
} sample_job;

/* An item is one part of one row. */
static void sample_scan_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const sample_job *job = arg;

    (void)worker;
    for (uint64_t i = first; i < end; i++)
        hsri_sample_scan(&job->dev->kernels, job->logits + i / job->n_parts * job->n_vocab, job->n_tokens, (uint32_t)(i % job->n_parts),
                         &job->dev->sample_parts[i]);
}

static void sample_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const sample_job *job = arg;

    for (uint64_t i = first; i < end; i++) {
        const hsri_sample_params *p = &job->params[i];
        const hsr_token_bias     *bias = hsri_cpu_at(job->dev, p->bias, p->n_bias * sizeof *bias);
        const hsri_seen          *seen = hsri_cpu_at(job->dev, p->seen, p->n_seen * sizeof *seen);

        hsri_sample_row(job->logits + i * job->n_vocab, job->n_tokens, job->dev->sample_parts + i * job->n_parts, p, bias, seen,
                        &job->dev->sample_work[worker], &job->out[i]);
    }
}

/* Both grow with the largest call so far and stay, so that calls of a size once seen or reserved allocate nothing. */
static bool sample_room(hsri_cpu_device *dev, uint32_t n_rows, uint32_t n_tokens)
{
    uint32_t n_workers = n_rows > 1 ? (uint32_t)hsri_threads_count(dev->threads) : 1;
    uint64_t n_parts = (uint64_t)n_rows * hsri_sample_n_parts(n_tokens);

    for (uint32_t i = 0; i < n_workers; i++)
        if (!hsri_sample_work_grow(&dev->sample_work[i], n_tokens))
            return false;
    return hsri_grow((void **)&dev->sample_parts, &dev->n_sample_parts, n_parts, sizeof *dev->sample_parts);
}

hsr_status hsri_cpu_reserve_sampling(hsri_device *dev, uint32_t n_rows, uint32_t n_tokens, hsr_error *err)
{
    if (sample_room((hsri_cpu_device *)dev, n_rows, n_tokens))
        return HSR_OK;
    return hsri_fail(err, HSR_E_NOMEM, "no memory to sample from %u rows of %u tokens", n_rows, n_tokens);
}

static void cpu_sample(hsri_queue *q, hsri_ref logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_tokens, hsri_ref params, hsri_ref out)
{
    hsri_cpu_device *dev = cpu_of(q);
    sample_job       job = { dev, hsri_cpu_floats(dev, logits, (uint64_t)n_rows * n_vocab),
                             hsri_cpu_at(dev, params, n_rows * sizeof *job.params), hsri_cpu_at(dev, out, n_rows * sizeof *job.out),
                             n_vocab, n_tokens, hsri_sample_n_parts(n_tokens) };
    uint64_t         n_parts = (uint64_t)n_rows * job.n_parts, n = (uint64_t)n_rows * n_tokens;

    if (!sample_room(dev, n_rows, n_tokens)) {
        queue_fail(q, "the sampler's scratch");
        return;
    }
    hsri_cpu_run_items(dev, n_parts, n, sample_scan_run, &job);
    /* Less work for one row than handing it over; with more, whole rows are the items. */
    hsri_cpu_run_items(dev, n_rows, n_rows > 1 ? n * 2 : 0, sample_run, &job);
}

void hsri_cpu_ops_fill(hsri_ops *ops)
{
    ops->embed = cpu_embed;
    ops->gather_rows = cpu_gather_rows;
    ops->rope_table = cpu_rope_table;
    ops->rms_norm = cpu_rms_norm;
    ops->linear = cpu_linear;
    ops->norm_linear = cpu_norm_linear;
    ops->gate_up_silu = cpu_gate_up_silu;
    ops->linear_add = cpu_linear_add;
    ops->mlp_add = cpu_mlp_add;
    ops->add = cpu_add;
    ops->silu_mul = cpu_silu_mul;
    ops->rope_append = cpu_rope_append;
    ops->sample = cpu_sample;
    ops->check_finite = cpu_check_finite;
    hsri_cpu_attend_fill(ops);
    hsri_cpu_pages_fill(ops);
    hsri_cpu_page_mass_fill(ops);
    hsri_cpu_sparse_fill(ops);
    hsri_cpu_cluster_fill(ops);
}
