/* SPDX-License-Identifier: Apache-2.0 */
/* Pages at the end of their open life: encoded, indexed and given a header, once; and pages as numbers again. */
#include "device/cpu/pages.h"

#include <math.h>
#include <string.h>

#include "base/array.h"

#define NS_PER_VALUE 20u               /* of one thread that encodes, for estimates */

hsri_calibration_record hsri_cpu_calibration(const hsri_cpu_device *dev, const hsri_kv_view *kv, uint32_t layer, uint32_t head)
{
    const float *floats = hsri_cpu_at(dev, kv->calibration, 0);

    return floats ? hsri_calibration_at(floats, kv->n_kv_heads, layer, head, kv->head_dim) : (hsri_calibration_record){ 0 };
}

/* ---- sealing ---- */

typedef struct seal_job {
    const hsri_cpu_device *dev;
    const hsri_kv_view *kv;
    const hsri_seal    *seals;
    uint8_t            *pool;
} seal_job;

static void seal_page(const seal_job *job, const hsri_seal *seal, float *scratch)
{
    uint32_t         d = job->kv->head_dim;
    uint64_t         n = (uint64_t)HSRI_PAGE_TOKENS * d;
    float           *k = scratch, *v = k + n, *work = v + n;
    bool             encoded = !hsri_kv_is_plain(seal->format), indexed = seal->index_shape.kind != HSRI_INDEX_NONE;
    uint8_t         *plain = hsri_slot_at(job->pool, seal->entry, job->kv->slot_bytes[encoded ? seal->kv_type : seal->format]);
    uint8_t         *slot = encoded ? hsri_slot_at(job->pool, seal->sealed, job->kv->slot_bytes[seal->format]) : plain;
    hsri_page_header header = { .magic = HSRI_PAGE_MAGIC, .lineage = seal->lineage, .page = seal->page, .layer = seal->layer,
                                .head = seal->head, .format = seal->format, .head_dim = (uint16_t)d };
    hsri_calibration_record calibration = hsri_cpu_calibration(job->dev, job->kv, seal->layer, seal->head);

    if (encoded || indexed)
        job->dev->kernels.page.read[encoded ? seal->kv_type : seal->format](plain, d, k, v);
    if (indexed)
        hsri_cpu_index_page(job->dev, job->kv, seal, k, v, work);
    if (encoded)
        job->dev->kernels.page.encode[seal->format](slot, &header, d, k, v, &calibration, work);
    memcpy(slot, &header, sizeof header);
}

static void seal_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const seal_job *job = arg;

    for (uint64_t i = first; i < end; i++)
        seal_page(job, &job->seals[i], hsri_cpu_scratch(job->dev, worker));
}

/* In the order of the list, whichever thread encoded what. */
static void count_errors(const seal_job *job, uint32_t n, hsri_spent *spent)
{
    for (uint32_t i = 0; i < n; i++) {
        const hsri_seal *seal = &job->seals[i];
        hsri_page_header header;

        if (hsri_kv_is_plain(seal->format))
            continue;
        memcpy(&header, hsri_slot_at(job->pool, seal->sealed, job->kv->slot_bytes[seal->format]), sizeof header);
        if (!isfinite(header.error))
            continue;
        spent->n_encoded++;
        spent->error_sum += (double)header.error;
        spent->error_max = fmax(spent->error_max, (double)header.error);
    }
}

static void cpu_seal(hsri_queue *q, const hsri_kv_view *kv, hsri_ref list, uint32_t n)
{
    HSRI_CPU_TIMED(q, seal);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    seal_job         job = { dev, kv, hsri_cpu_at(dev, list, n * sizeof *job.seals),
                             hsri_cpu_at(dev, (hsri_ref){ .buf = kv->pool_buf }, 0) };
    uint64_t         cost = 0;

    for (uint32_t i = 0; i < n; i++)
        cost += hsri_kv_is_plain(job.seals[i].format) && job.seals[i].index_shape.kind == HSRI_INDEX_NONE
                    ? 50 : (uint64_t)HSRI_PAGE_TOKENS * kv->head_dim * NS_PER_VALUE;
    hsri_cpu_run_items(dev, n, cost, seal_run, &job);
    count_errors(&job, n, &dev->spent);
}

void hsri_cpu_pages_fill(hsri_ops *ops)
{
    ops->seal = cpu_seal;
}
