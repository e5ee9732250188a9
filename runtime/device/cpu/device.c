/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "device/cpu/backend.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/array.h"
#include "base/cpu.h"
#include "base/status.h"

#define MIB (1u << 20)

static hsri_cpu_device *cpu_of(hsri_device *dev) { return (hsri_cpu_device *)dev; }

/* ---- the buffer table ---- */

/* Room for one more id; the caller holds the lock. */
static hsr_status table_grow(hsri_cpu_device *cpu, hsr_error *err)
{
    uint64_t held = 0;
    uint32_t c = 0;

    while (c < HSRI_CPU_N_CHUNKS && cpu->chunks[c])
        held += HSRI_CPU_FIRST_CHUNK << c++;
    if (cpu->n_ids < held)
        return HSR_OK;
    if (c < HSRI_CPU_N_CHUNKS)
        cpu->chunks[c] = hsri_new_array(HSRI_CPU_FIRST_CHUNK << c, sizeof *cpu->chunks[c]);
    if (c == HSRI_CPU_N_CHUNKS || !cpu->chunks[c])
        return hsri_fail(err, HSR_E_NOMEM, "no memory for device buffer number %llu", (unsigned long long)held + 1);
    return HSR_OK;
}

static hsr_status table_add(hsri_cpu_device *cpu, uint8_t *data, uint64_t bytes, hsri_cpu_memory memory, uint32_t *buf, hsr_error *err)
{
    hsr_status status = HSR_OK;
    uint32_t   id;

    pthread_mutex_lock(&cpu->lock);
    id = cpu->unused;
    if (id)
        cpu->unused = hsri_cpu_buffer_of(cpu, id)->next_unused;
    else if ((status = table_grow(cpu, err)) == HSR_OK)
        id = ++cpu->n_ids;
    pthread_mutex_unlock(&cpu->lock);
    if (status == HSR_OK)
        *hsri_cpu_buffer_of(cpu, id) = (hsri_cpu_buffer){ data, bytes, 0, memory };
    *buf = id;
    return status;
}

static void buffer_release(hsri_cpu_buffer *b)
{
    if (b->memory == HSRI_CPU_HEAP)
        free(b->data);
    else if (b->memory == HSRI_CPU_MAPPED || b->memory == HSRI_CPU_RESERVED)
        munmap(b->data, b->bytes);
    *b = (hsri_cpu_buffer){ 0 };
}

/* ---- memory ---- */

/* Large buffers are mapped, not cleared: scratch is sized for the largest step, and a host that never takes one shall neither wait
 * for all of it to be touched nor keep the memory. */
static uint8_t *new_buffer(uint64_t bytes, hsri_cpu_memory *memory)
{
    uint8_t *map;

    *memory = bytes < MIB ? HSRI_CPU_HEAP : HSRI_CPU_MAPPED;
    if (*memory == HSRI_CPU_HEAP)
        return hsri_new_aligned(bytes ? bytes : 1, 1);
    if (bytes > PTRDIFF_MAX)
        return NULL;
    map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return map == MAP_FAILED ? NULL : map;
}

static hsr_status cpu_alloc(hsri_device *dev, uint64_t bytes, uint32_t *buf, hsr_error *err)
{
    hsri_cpu_memory memory;
    uint8_t        *data = new_buffer(bytes, &memory);
    hsr_status      status;

    *buf = 0;
    if (!data)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a device buffer of %llu bytes", (unsigned long long)bytes);
    status = table_add(cpu_of(dev), data, bytes, memory, buf, err);
    if (status < 0)
        buffer_release(&(hsri_cpu_buffer){ data, bytes, 0, memory });
    return status;
}

/* The qualifier is dropped because one table serves all kinds; operations never have a view as their output. */
static hsr_status cpu_view(hsri_device *dev, const void *host, uint64_t bytes, uint32_t *buf, hsr_error *err)
{
    return table_add(cpu_of(dev), (uint8_t *)(uintptr_t)host, bytes, HSRI_CPU_VIEW, buf, err);
}

/* What selection reads is scattered over a pool: with pages of 4 KiB it would wait for page tables as long as for memory. So pools
 * consist of whole huge pages, if the system has any to give, and are committed by these. */
#define HUGE_PAGE (2 * MIB)

/* Address space on a whole huge page: the system gives page alignment only, so ask for one more and return the ends. */
static uint8_t *map_range(uint64_t bytes)
{
    uint8_t *map, *start;

    if (bytes > SIZE_MAX - HUGE_PAGE) {
        errno = ENOMEM;
        return NULL;
    }
    map = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    start = (uint8_t *)(uintptr_t)hsri_round_up((uintptr_t)map, HUGE_PAGE);
    if (start > map)
        munmap(map, (size_t)(start - map));
    if (start < map + HUGE_PAGE)
        munmap(start + bytes, (size_t)(map + HUGE_PAGE - start));
    madvise(start, bytes, MADV_HUGEPAGE);   /* refused where the system has none */
    return start;
}

static hsr_status cpu_reserve(hsri_device *dev, uint64_t bytes, uint32_t *buf, hsr_error *err)
{
    uint64_t   whole = hsri_round_up(hsri_max(bytes, 1), MIB);
    uint8_t   *data = whole >= bytes ? map_range(whole) : NULL;
    hsr_status status;

    *buf = 0;
    if (!data)
        return hsri_fail_sys(err, HSR_E_NOMEM, whole >= bytes ? errno : ENOMEM, "no address space for a pool of %llu bytes",
                             (unsigned long long)bytes);
    status = table_add(cpu_of(dev), data, whole, HSRI_CPU_RESERVED, buf, err);
    if (status < 0)
        munmap(data, whole);
    return status;
}

static uint8_t *cpu_host_range(hsri_device *dev, uint32_t buf)
{
    return hsri_cpu_at(cpu_of(dev), (hsri_ref){ .buf = buf }, 0);
}

static uint8_t *range_of(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes)
{
    assert(hsri_cpu_buffer_of(cpu_of(dev), buf)->memory == HSRI_CPU_RESERVED);
    assert(offset % MIB == 0 && bytes % MIB == 0);
    return hsri_cpu_at(cpu_of(dev), (hsri_ref){ .buf = buf, .offset = offset }, bytes);
}

static hsr_status cpu_commit(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes, hsr_error *err)
{
    uint8_t *data = range_of(dev, buf, offset, bytes);
    uint64_t first = offset / HUGE_PAGE * HUGE_PAGE;
    uint64_t end = hsri_min(hsri_round_up(offset + bytes, HUGE_PAGE), hsri_cpu_buffer_of(cpu_of(dev), buf)->bytes);

    if (mprotect(data - (offset - first), end - first, PROT_READ | PROT_WRITE) != 0)
        return hsri_fail_sys(err, HSR_E_NOMEM, errno, "no memory to commit %llu bytes of a pool", (unsigned long long)bytes);
#ifndef NDEBUG
    memset(data, 0xFF, bytes);   /* NaN in every float format: what is read before it was written shows */
#endif
    return HSR_OK;
}

/* Refused protection (too many mappings) is harmless: the memory itself is already given back. */
static void cpu_decommit(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes)
{
    uint8_t *data = range_of(dev, buf, offset, bytes);

    madvise(data, bytes, MADV_DONTNEED);
    mprotect(data, bytes, PROT_NONE);
}

static void cpu_free(hsri_device *dev, uint32_t buf)
{
    hsri_cpu_device *cpu = cpu_of(dev);
    hsri_cpu_buffer *b;

    if (buf == 0)
        return;
    b = hsri_cpu_buffer_of(cpu, buf);
    assert(b->memory != HSRI_CPU_UNUSED);
    buffer_release(b);
    pthread_mutex_lock(&cpu->lock);
    b->next_unused = cpu->unused;
    cpu->unused = buf;
    pthread_mutex_unlock(&cpu->lock);
}

/* ---- queues: everything runs at once ---- */

static hsr_status cpu_queue_create(hsri_device *dev, hsri_queue **q, hsr_error *err)
{
    hsri_cpu_queue *queue = hsri_new_array(1, sizeof *queue);

    *q = NULL;
    if (!queue)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a device queue");
    queue->base.dev = dev;
    queue->error.struct_size = (uint32_t)sizeof queue->error;
    *q = &queue->base;
    return HSR_OK;
}

static void cpu_queue_destroy(hsri_queue *q) { free(q); }

static void cpu_copy_in(hsri_queue *q, hsri_ref dst, const void *src, uint64_t bytes)
{
    if (bytes)
        memcpy(hsri_cpu_at(cpu_of(q->dev), dst, bytes), src, bytes);
}

static void cpu_copy_out(hsri_queue *q, void *dst, hsri_ref src, uint64_t bytes)
{
    if (bytes)
        memcpy(dst, hsri_cpu_at(cpu_of(q->dev), src, bytes), bytes);
}

static void cpu_copy(hsri_queue *q, hsri_ref dst, hsri_ref src, uint64_t bytes)
{
    if (bytes)
        memmove(hsri_cpu_at(cpu_of(q->dev), dst, bytes), hsri_cpu_at(cpu_of(q->dev), src, bytes), bytes);
}

static hsr_status cpu_wait(hsri_queue *q, hsr_error *err)
{
    hsri_cpu_queue *queue = (hsri_cpu_queue *)q;
    hsr_status      status = queue->error.status;

    queue->error.status = HSR_OK;
    return status < 0 ? hsri_fail(err, status, "%s", queue->error.message) : HSR_OK;
}

static hsri_spent cpu_spent(hsri_device *dev) { return cpu_of(dev)->spent; }

/* ---- life ---- */

static void cpu_destroy(hsri_device *dev)
{
    hsri_cpu_device *cpu = cpu_of(dev);
    int32_t          n_threads = cpu->threads ? hsri_threads_count(cpu->threads) : 0;

    if (getpid() == cpu->pid)
        hsri_threads_destroy(cpu->threads);
    else
        hsri_threads_forget(cpu->threads);   /* a forked child has no workers to stop */
    for (uint32_t id = 1; id <= cpu->n_ids; id++)
        buffer_release(hsri_cpu_buffer_of(cpu, id));
    for (uint32_t c = 0; c < HSRI_CPU_N_CHUNKS; c++)
        free(cpu->chunks[c]);
    for (int32_t i = 0; cpu->sample_work && i < n_threads; i++)
        hsri_sample_work_free(&cpu->sample_work[i]);
    free(cpu->sample_work);
    free(cpu->sample_parts);
    free(cpu->scratch);
    pthread_mutex_destroy(&cpu->lock);
    free(cpu);
}

static void table_fill(hsri_device *dev)
{
    hsri_cpu_ops_fill(&dev->ops);
    hsri_compound_fill(&dev->ops);
    dev->alloc = cpu_alloc;
    dev->view = cpu_view;
    dev->reserve = cpu_reserve;
    dev->host_range = cpu_host_range;
    dev->commit = cpu_commit;
    dev->decommit = cpu_decommit;
    dev->free = cpu_free;
    dev->reserve_sampling = hsri_cpu_reserve_sampling;
    dev->queue_create = cpu_queue_create;
    dev->queue_destroy = cpu_queue_destroy;
    dev->copy_in = cpu_copy_in;
    dev->copy_out = cpu_copy_out;
    dev->copy = cpu_copy;
    dev->wait = cpu_wait;
    dev->spent = cpu_spent;
    dev->destroy = cpu_destroy;
}

static hsr_status create_parts(hsri_cpu_device *cpu, int32_t n_threads, hsr_error *err)
{
    HSRI_TRY(hsri_threads_create(n_threads, &cpu->threads, err));
    cpu->scratch = hsri_new_aligned((size_t)n_threads * HSRI_CPU_SCRATCH, sizeof *cpu->scratch);
    cpu->sample_work = hsri_new_array((size_t)n_threads, sizeof *cpu->sample_work);
    if (!cpu->scratch || !cpu->sample_work)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for the scratch of %d compute threads", (int)n_threads);
    for (int i = 0; i < HSRI_N_DTYPES; i++)
        if (cpu->kernels.prepare[i])
            return cpu_alloc(&cpu->base, HSRI_CPU_PREPARED_BYTES, &cpu->prepared, err);
    return HSR_OK;
}

/* A wish as a level. AMX is the system's to give, and is asked for before there are threads. */
static hsr_status resolve_isa(int32_t wish, hsri_log *log, int32_t *isa, hsr_error *err)
{
    int32_t best = hsri_cpu_isa();

    *isa = wish == HSR_ISA_AUTO ? best : wish;
    if (*isa > best)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "instruction set '%s' is not available here; the best is '%s'", hsri_isa_name(*isa),
                         hsri_isa_name(best));
    if (*isa != HSR_ISA_AMX || hsri_cpu_allow_amx())
        return HSR_OK;
    if (wish == HSR_ISA_AMX)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "the system does not let this process use AMX registers");
    *isa = HSR_ISA_AVX512;
    if (log)
        hsri_log_write(log, HSR_LOG_INFO, "cpu device: the system does not let this process use AMX registers; going on with %s",
                       hsri_isa_name(*isa));
    return HSR_OK;
}

hsr_status hsri_cpu_device_create(int32_t n_threads, int32_t isa, hsri_log *log, hsri_device **dev, hsr_error *err)
{
    hsri_cpu_device *cpu;
    hsr_status       status;

    *dev = NULL;
    assert(n_threads >= 1);
    HSRI_TRY(resolve_isa(isa, log, &isa, err));
    cpu = hsri_new_array(1, sizeof *cpu);
    if (!cpu)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for the CPU device");
    if (pthread_mutex_init(&cpu->lock, NULL) != 0) {
        free(cpu);
        return hsri_fail(err, HSR_E_NOMEM, "the system refused a mutex for the CPU device");
    }
    cpu->pid = getpid();
    cpu->base.name = "cpu";
    cpu->base.isa = isa;
    table_fill(&cpu->base);
    hsri_kernels_fill(&cpu->kernels, isa);
    status = create_parts(cpu, n_threads, err);
    if (status < 0) {
        cpu_destroy(&cpu->base);
        return status;
    }
    if (log)
        hsri_log_write(log, HSR_LOG_DEBUG, "cpu device: %s kernels, %d threads", hsri_isa_name(isa), (int)n_threads);
    *dev = &cpu->base;
    return HSR_OK;
}
