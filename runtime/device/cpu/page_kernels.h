/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of encoded pages (docs/kv-formats.md): the member `page` of hsri_kernels. formats_ref.c fills every entry; x86/formats_*.c
 * overwrite what their level does better. The rules of kernels.h hold here, too. */
#ifndef HSRI_CPU_PAGE_KERNELS_H
#define HSRI_CPU_PAGE_KERNELS_H

#include <stdint.h>

#include "device/kv_format.h"

/* Attention of some queries to the same units of encoded pages, all of them visible. Units of one page are neighbours, ascending. */
typedef struct hsri_units_args {
    const uint8_t *const *slots;    /* [n_units]: the page that unit i is part of */
    const uint8_t  *units;          /* [n_units]: which of its units, 0..3 */
    uint32_t        n_units;        /* at most HSRI_UNITS_MAX */
    uint32_t        head_dim;
    float           scale;
    uint32_t        n_queries;      /* at most HSRI_ATTEND_MAX_QUERIES */
    const float    *const *queries; /* [n_queries] -> float[d] */
    const float    *const *rotated; /* the same in the calibrated basis; int8 does not look at them */
    float          *const *partials;/* [n_queries] -> { m, l, o[d] } */
    float          *scratch;        /* HSRI_UNITS_SCRATCH floats, 64-byte aligned */
    hsri_calibration_record calibration;
} hsri_units_args;

/* Units of encoded pages that are to be as those of bf16 pages: unit i becomes unit i % 4 of page i / 4. Keys become those in the
 * calibrated basis, less the calibration's mean key: the product with a rotated query lacks that of the plain one with the mean. */
typedef struct hsri_lay_out_args {
    const uint8_t *const *slots;    /* as in hsri_units_args */
    const uint8_t  *units;
    uint32_t        n_units;        /* at most HSRI_UNITS_MAX */
    uint32_t        head_dim;
    uint8_t        *pages;          /* of page_bytes each, 64-byte aligned */
    uint64_t        page_bytes;
    hsri_calibration_record calibration;
} hsri_lay_out_args;

#define HSRI_UNITS_MAX 64u          /* a dense group */
/* What attention over plain pages takes, and bf16 pages without their headers: two of the largest, 16 of up to 128 components. */
#define HSRI_UNITS_SCRATCH (HSRI_ATTEND_SCRATCH + 2u * (2u * HSRI_PAGE_TOKENS * HSRI_ATTEND_MAX_HEAD_DIM + HSRI_PAGE_HEADER_BYTES / 4u))

/* Floats of work space of `encode`. */
static inline uint64_t hsri_encode_scratch(uint32_t d) { return (2ull * HSRI_PAGE_TOKENS + HSRI_PAGE_TOKENS / 4 + 24) * d; }

typedef struct hsri_page_kernels {
    /* hsri_page_decode of plain formats in little time: k[64][d] and v[64][d] of a page that is to be encoded */
    void (*read[HSRI_N_KV_FORMATS])(const uint8_t *slot, uint32_t d, float *k, float *v);
    /* slot's body, and what the header has about it (error, k_scale, v_scale and what follows), from k[64][d] and v[64][d] */
    void (*encode[HSRI_N_KV_FORMATS])(uint8_t *slot, hsri_page_header *header, uint32_t d, const float *k, const float *v,
                                      const hsri_calibration_record *calibration, float *scratch);
    void (*attend[HSRI_N_KV_FORMATS])(const hsri_units_args *a);
    /* pays where many queries attend the same units; NULL: it does not */
    void (*lay_out[HSRI_N_KV_FORMATS])(const hsri_lay_out_args *a);
} hsri_page_kernels;

/* Of plain formats, the entries but those of `read` stay NULL; of the others, those of `read`. */
void hsri_page_kernels_fill(hsri_page_kernels *k, int32_t isa);

void hsri_page_kernels_fill_ref(hsri_page_kernels *k);
void hsri_page_kernels_fill_avx2(hsri_page_kernels *k);    /* x86/formats_avx2.c */
void hsri_page_kernels_fill_avx512(hsri_page_kernels *k);  /* x86/formats_avx512.c */
void hsri_page_kernels_fill_amx(hsri_page_kernels *k);     /* x86/formats_amx.c */

void hsri_attend_compact_amx(const hsri_units_args *a);    /* x86/compact_amx.c */
void hsri_lay_out_compact_amx(const hsri_lay_out_args *a); /* x86/compact_pages_amx.c */

#endif
