/* SPDX-License-Identifier: Apache-2.0 */
/* A device of plain host memory for the tests of the KV cache. It is as late as a device may be: everything enqueued runs only
 * in wait, host sources are read then. It is strict: a transfer outside a buffer, or to a block that is not committed, is a
 * failed check. And it fails on demand: the call number `fail_at` of alloc, reserve, commit and wait is refused, once. */
#ifndef HSR_TESTS_FAKE_DEVICE_H
#define HSR_TESTS_FAKE_DEVICE_H

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "check.h"
#include "device/device.h"
#include "kv/page.h"

#define FAKE_BUFS 256u
#define FAKE_BLOCK (1u << 20)

typedef struct fake_buf {
    uint8_t *data;
    uint64_t bytes;
    uint8_t *committed;   /* per block of a reserved range, else NULL */
} fake_buf;

typedef struct fake_device {
    hsri_device base;
    fake_buf    bufs[FAKE_BUFS];   /* id - 1 */
    uint32_t    n_bufs;            /* alive */
    uint64_t    n_committed, n_commits, n_seals, n_clusters;
    uint64_t    n_calls, fail_at;
} fake_device;

typedef struct fake_op {
    enum { FAKE_COPY_IN, FAKE_COPY_OUT, FAKE_COPY, FAKE_SEAL, FAKE_CLUSTER } kind;
    hsri_ref            dst, src;
    const void         *host;
    void               *to_host;
    uint64_t            bytes;
    const hsri_kv_view *view;
} fake_op;

typedef struct fake_queue {
    hsri_queue base;
    fake_op   *ops;
    size_t     n, capacity;
} fake_queue;

static inline fake_device *fake_of(hsri_device *dev) { return (fake_device *)dev; }

static inline hsr_status fake_fault(fake_device *fake, const char *call, hsr_error *err)
{
    if (++fake->n_calls != fake->fail_at)
        return HSR_OK;
    return hsri_fail(err, HSR_E_NOMEM, "%s was told to fail", call);
}

/* Host address of `bytes` bytes of device memory, or NULL with a failed check. */
static inline void *fake_at(fake_device *fake, hsri_ref ref, uint64_t bytes)
{
    if (!CHECK(ref.buf >= 1 && ref.buf <= FAKE_BUFS))
        return NULL;
    fake_buf *buf = &fake->bufs[ref.buf - 1];
    if (!CHECK(buf->data != NULL) || !CHECK(ref.offset + bytes <= buf->bytes))
        return NULL;
    for (uint64_t b = ref.offset / FAKE_BLOCK; buf->committed && b <= (ref.offset + bytes - 1) / FAKE_BLOCK; b++)
        if (!CHECK(buf->committed[b]))
            return NULL;
    return buf->data + ref.offset;
}

/* ---- memory ---- */

static inline hsr_status fake_new_buf(fake_device *fake, uint64_t bytes, uint32_t *id)
{
    for (uint32_t i = 0; i < FAKE_BUFS; i++)
        if (!fake->bufs[i].data) {
            fake->bufs[i] = (fake_buf){ .data = calloc(1, bytes), .bytes = bytes };
            fake->n_bufs++;
            *id = i + 1;
            return HSR_OK;
        }
    return HSR_E_NOMEM;
}

static inline hsr_status fake_alloc(hsri_device *dev, uint64_t bytes, uint32_t *id, hsr_error *err)
{
    HSRI_TRY(fake_fault(fake_of(dev), "alloc", err));
    return fake_new_buf(fake_of(dev), bytes, id);
}

static inline hsr_status fake_reserve(hsri_device *dev, uint64_t bytes, uint32_t *id, hsr_error *err)
{
    HSRI_TRY(fake_fault(fake_of(dev), "reserve", err));
    HSRI_TRY(fake_new_buf(fake_of(dev), FAKE_BLOCK, id));
    free(fake_of(dev)->bufs[*id - 1].data);
    fake_of(dev)->bufs[*id - 1].data = aligned_alloc(4096, bytes);   /* page slots are read and written by direct access */
    fake_of(dev)->bufs[*id - 1].bytes = bytes;
    fake_of(dev)->bufs[*id - 1].committed = calloc(bytes / FAKE_BLOCK, 1);
    return HSR_OK;
}

static inline void fake_set_committed(fake_device *fake, uint32_t id, uint64_t offset, uint64_t bytes, bool on)
{
    fake_buf *buf = &fake->bufs[id - 1];
    CHECK(offset % FAKE_BLOCK == 0 && bytes % FAKE_BLOCK == 0 && offset + bytes <= buf->bytes);
    for (uint64_t b = offset / FAKE_BLOCK; b < (offset + bytes) / FAKE_BLOCK; b++) {
        CHECK(buf->committed[b] == !on);
        buf->committed[b] = on;
        fake->n_committed += on ? 1 : -1;
    }
    if (on)
        memset(buf->data + offset, 0xA5, bytes);
}

static inline hsr_status fake_commit(hsri_device *dev, uint32_t id, uint64_t offset, uint64_t bytes, hsr_error *err)
{
    HSRI_TRY(fake_fault(fake_of(dev), "commit", err));
    fake_set_committed(fake_of(dev), id, offset, bytes, true);
    fake_of(dev)->n_commits++;
    return HSR_OK;
}

static inline void fake_decommit(hsri_device *dev, uint32_t id, uint64_t offset, uint64_t bytes)
{
    fake_set_committed(fake_of(dev), id, offset, bytes, false);
}

static inline void fake_free(hsri_device *dev, uint32_t id)
{
    fake_buf *buf = &fake_of(dev)->bufs[id - 1];
    CHECK(buf->data != NULL);
    free(buf->data);
    free(buf->committed);
    *buf = (fake_buf){ 0 };
    fake_of(dev)->n_bufs--;
}

/* ---- queues ---- */

static inline void fake_enqueue(hsri_queue *q, fake_op op)
{
    fake_queue *queue = (fake_queue *)q;
    if (queue->n == queue->capacity) {
        queue->capacity = queue->capacity ? 2 * queue->capacity : 64;
        queue->ops = realloc(queue->ops, queue->capacity * sizeof *queue->ops);
    }
    queue->ops[queue->n++] = op;
}

static inline void fake_copy_in(hsri_queue *q, hsri_ref dst, const void *src, uint64_t bytes)
{
    fake_enqueue(q, (fake_op){ .kind = FAKE_COPY_IN, .dst = dst, .host = src, .bytes = bytes });
}

static inline void fake_copy_out(hsri_queue *q, void *dst, hsri_ref src, uint64_t bytes)
{
    fake_enqueue(q, (fake_op){ .kind = FAKE_COPY_OUT, .to_host = dst, .src = src, .bytes = bytes });
}

static inline void fake_copy(hsri_queue *q, hsri_ref dst, hsri_ref src, uint64_t bytes)
{
    fake_enqueue(q, (fake_op){ .kind = FAKE_COPY, .dst = dst, .src = src, .bytes = bytes });
}

static inline void fake_seal(hsri_queue *q, const hsri_kv_view *view, hsri_ref list, uint32_t n)
{
    fake_enqueue(q, (fake_op){ .kind = FAKE_SEAL, .src = list, .bytes = n * sizeof(hsri_seal), .view = view });
}

static inline void fake_cluster(hsri_queue *q, const hsri_kv_view *view, hsri_ref list, uint32_t n)
{
    fake_enqueue(q, (fake_op){ .kind = FAKE_CLUSTER, .src = list, .bytes = n * sizeof(hsri_cluster), .view = view });
}

/* What "encoding" does to a row here: it can be told from the plain row, and undone. */
#define FAKE_ENCODING 0x5A5A5A5A5A5A5A5Aull

/* What the fake writes as the index entry of a page. */
typedef struct fake_entry {
    uint64_t first_row;   /* of the page's plain rows */
    uint32_t page;
    uint16_t layer, head;
} fake_entry;

static inline hsri_ref fake_slot(const hsri_kv_view *view, uint32_t entry, uint64_t slot_bytes)
{
    return (hsri_ref){ view->pool_buf, 0, ((uint64_t)(entry >> 8) << 20) + (uint64_t)(entry & 255) * slot_bytes };
}

/* Rows of a page are 8 bytes each behind the header, whatever the format. */
static inline bool fake_seal_one(fake_device *fake, const hsri_kv_view *view, const hsri_seal *seal)
{
    uint8_t *plain = fake_at(fake, fake_slot(view, seal->entry, view->slot_bytes[seal->kv_type]), HSRI_PAGE_HEADER_BYTES + 512);
    uint8_t *sealed = fake_at(fake, fake_slot(view, seal->sealed, view->slot_bytes[seal->format]), HSRI_PAGE_HEADER_BYTES + 512);
    if (!plain || !sealed)
        return false;
    CHECK(hsri_kv_is_plain(seal->kv_type) && (plain == sealed) == hsri_kv_is_plain(seal->format));
    *(hsri_page_header *)sealed = (hsri_page_header){
        .magic = HSRI_PAGE_MAGIC, .lineage = seal->lineage, .page = seal->page, .layer = seal->layer, .head = seal->head,
        .format = seal->format, .head_dim = (uint16_t)view->head_dim,
    };
    const uint64_t *from = (const uint64_t *)(plain + HSRI_PAGE_HEADER_BYTES);
    uint64_t *to = (uint64_t *)(sealed + HSRI_PAGE_HEADER_BYTES);
    for (int i = 0; i < 64 && from != to; i++)
        to[i] = from[i] ^ FAKE_ENCODING;
    if (seal->index_shape.per_slab) {
        hsri_ref slab = fake_slot(view, seal->slab, HSRI_SLAB_BYTES);
        slab.offset += (uint64_t)seal->page % seal->index_shape.per_slab * seal->index_shape.entry_bytes;
        fake_entry *entry = fake_at(fake, slab, sizeof *entry);
        if (!entry)
            return false;
        *entry = (fake_entry){ from[0], seal->page, seal->layer, seal->head };
    }
    if (seal->index_shape.code_bytes) {
        hsri_ref codes = fake_slot(view, seal->strip, hsri_strip_slot_bytes(&seal->index_shape));
        codes.offset += (uint64_t)seal->in_strip * seal->index_shape.code_bytes;
        fake_entry *entry = fake_at(fake, codes, seal->index_shape.code_bytes);
        if (!entry)
            return false;
        memset(entry, 0, seal->index_shape.code_bytes);
        *entry = (fake_entry){ from[0], seal->page, seal->layer, seal->head };
    }
    fake->n_seals++;
    return true;
}

static inline void fake_run_seal(fake_device *fake, const fake_op *op)
{
    const hsri_seal *list = fake_at(fake, op->src, op->bytes);
    for (uint64_t i = 0; list && i < op->bytes / sizeof *list; i++)
        if (!fake_seal_one(fake, op->view, &list[i]))
            return;
}

/* What a table of rows names, at a number within the row. */
static inline const fake_entry *fake_entry_at(fake_device *fake, const hsri_kv_view *view, hsri_ref table, uint64_t row, uint64_t list,
                                              uint64_t slot_bytes, uint64_t offset)
{
    table.offset += (row * view->n_layers * view->n_kv_heads + list) * sizeof(uint32_t);
    const uint32_t *slot = fake_at(fake, table, sizeof *slot);
    hsri_ref at = fake_slot(view, slot ? *slot : 0, slot_bytes);
    at.offset += offset;
    return fake_at(fake, at, sizeof(fake_entry));
}

/* A record says which entries and which components it is made of: the first and the last of its segment. */
static inline void fake_run_cluster(fake_device *fake, const fake_op *op)
{
    const hsri_cluster *list = fake_at(fake, op->src, op->bytes);
    for (uint64_t i = 0; list && i < op->bytes / sizeof *list; i++) {
        const hsri_index_shape *shape = &list[i].index_shape;
        const uint64_t head = (uint64_t)list[i].layer * op->view->n_kv_heads + list[i].head;
        fake_entry *record = fake_at(fake, fake_slot(op->view, list[i].record, hsri_cluster_slot_bytes(shape)),
                                     hsri_cluster_layout_of(shape).bytes);
        if (record)
            memset(record, 0, hsri_cluster_slot_bytes(shape));
        for (uint32_t j = 0; record && j < 2; j++) {
            const uint32_t in_segment = j * (HSRI_SEGMENT_PAGES - 1), page = list[i].first_page + in_segment;
            const fake_entry *entry = fake_entry_at(fake, op->view, list[i].index, page / shape->per_slab, head, HSRI_SLAB_BYTES,
                                                    (uint64_t)page % shape->per_slab * shape->entry_bytes);
            const fake_entry *codes = fake_entry_at(fake, op->view, list[i].strips, in_segment / HSRI_STRIP_PAGES, head,
                                                    hsri_strip_slot_bytes(shape), in_segment % HSRI_STRIP_PAGES * shape->code_bytes);
            if (entry && codes) {
                record[j] = *entry;
                record[2 + j] = *codes;
            }
        }
        fake->n_clusters++;
    }
}

static inline void fake_run(fake_device *fake, const fake_op *op)
{
    if (op->kind == FAKE_CLUSTER) {
        fake_run_cluster(fake, op);
        return;
    }
    if (op->kind == FAKE_SEAL) {
        fake_run_seal(fake, op);
        return;
    }
    void *dst = op->kind == FAKE_COPY_OUT ? op->to_host : fake_at(fake, op->dst, op->bytes);
    const void *src = op->kind == FAKE_COPY_IN ? op->host : fake_at(fake, op->src, op->bytes);
    if (dst && src)
        memcpy(dst, src, op->bytes);
}

/* A queue that fails has run half of its work, or none. */
static inline hsr_status fake_wait(hsri_queue *q, hsr_error *err)
{
    fake_queue *queue = (fake_queue *)q;
    fake_device *fake = fake_of(q->dev);
    hsr_status status = fake_fault(fake, "wait", err);
    size_t n = status == HSR_OK ? queue->n : fake->fail_at % 2 ? queue->n / 2 : 0;
    for (size_t i = 0; i < n; i++)
        fake_run(fake, &queue->ops[i]);
    queue->n = 0;
    return status;
}

static inline void fake_init(fake_device *fake)
{
    *fake = (fake_device){
        .base = {
            .name = "fake", .ops = { .seal = fake_seal, .cluster = fake_cluster },
            .alloc = fake_alloc, .reserve = fake_reserve, .commit = fake_commit,
            .decommit = fake_decommit, .free = fake_free, .copy_in = fake_copy_in, .copy_out = fake_copy_out, .copy = fake_copy,
            .wait = fake_wait,
        },
    };
}

static inline void fake_queue_init(fake_queue *queue, fake_device *fake)
{
    *queue = (fake_queue){ .base = { &fake->base } };
}

static inline void fake_queue_end(fake_queue *queue)
{
    CHECK(queue->n == 0);
    free(queue->ops);
}

#endif
