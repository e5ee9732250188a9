/* SPDX-License-Identifier: Apache-2.0 */
/* Page slots of sequences: where they are, and pages as numbers. */
#ifndef HSRI_CPU_PAGES_H
#define HSRI_CPU_PAGES_H

#include "device/cpu/backend.h"

/* Where the page slots of one layer and kv head of a sequence are. */
typedef struct hsri_page_table {
    uint8_t        *pool;
    const uint32_t *entries;     /* of page 0 */
    uint64_t        stride;      /* entries between pages */
    uint32_t        slot_bytes;
} hsri_page_table;

static inline uint8_t *hsri_slot_at(uint8_t *pool, uint32_t entry, uint32_t slot_bytes)
{
    return pool + (uint64_t)(entry >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(entry & 0xFF) * slot_bytes;
}

static inline hsri_page_table hsri_pages_of(const hsri_cpu_device *dev, const hsri_kv_view *kv, hsri_ref table, uint32_t format,
                                            uint32_t layer, uint32_t head)
{
    return (hsri_page_table){ hsri_cpu_at(dev, (hsri_ref){ .buf = kv->pool_buf }, 0),
                              (const uint32_t *)hsri_cpu_at(dev, table, 0) + (uint64_t)layer * kv->n_kv_heads + head,
                              (uint64_t)kv->n_layers * kv->n_kv_heads, kv->slot_bytes[format] };
}

/* Pages that queries read plain, and those that they read in the sequence's format. */
static inline hsri_page_table hsri_plain_pages(const hsri_cpu_device *dev, const hsri_kv_view *kv, const hsri_seq *seq, uint32_t layer,
                                               uint32_t head)
{
    return hsri_pages_of(dev, kv, seq->table, seq->kv_type, layer, head);
}

static inline hsri_page_table hsri_sealed_pages(const hsri_cpu_device *dev, const hsri_kv_view *kv, const hsri_seq *seq, uint32_t layer,
                                                uint32_t head)
{
    return hsri_pages_of(dev, kv, seq->sealed, seq->format, layer, head);
}

static inline uint8_t *hsri_page_at(const hsri_page_table *t, uint32_t page)
{
    return hsri_slot_at(t->pool, t->entries[page * t->stride], t->slot_bytes);
}

/* Calibration of one layer and kv head; all NULL if there is none. */
hsri_calibration_record hsri_cpu_calibration(const hsri_cpu_device *dev, const hsri_kv_view *kv, uint32_t layer, uint32_t head);

/* hsri_page_decode with the record of hsri_cpu_calibration. */
static inline void hsri_cpu_page_decode(const hsri_kernels *kernels, uint32_t format, const uint8_t *slot, uint32_t head_dim,
                                        const hsri_calibration_record *calibration, float *k, float *v)
{
    (void)kernels;
    hsri_page_decode((hsri_kv_type)format, head_dim, slot, calibration ? calibration->a : NULL, k, v);
}

#endif
