/* SPDX-License-Identifier: Apache-2.0 */
/* A cache as rows of bytes, for saved sessions: docs/save-file.md.
 *
 * An image holds what a fork would get: plain pages, sealed pages, the index of the sealed ones. It is made of parts, and these
 * of rows; a row is one slot of each layer and kv head. Bytes that mean nothing (rows of the tail page that hold no token yet, the rest of
 * a slab) are zero, so that nothing of whoever had the slot before gets into a file, and equal sessions have equal images.
 *
 * The receiving cache is fresh: expect, begin, then every row of every part in order, then end. It then is as if it had computed the
 * tokens, except that the encoding of pages that are not sealed yet is done again. In between it may only be destroyed. */
#ifndef HSRI_CACHE_IMAGE_H
#define HSRI_CACHE_IMAGE_H

#include "kv/cache.h"

typedef enum hsri_image_part {
    HSRI_IMAGE_PLAIN,       /* pages outside [sink_pages, sealed) */
    HSRI_IMAGE_INDEX,       /* slabs */
    HSRI_IMAGE_STRIPS,      /* components of sketches; with clusters, those of the sealed pages behind the last whole segment */
    HSRI_IMAGE_CLUSTERS,    /* cluster records of segments whose pages are all sealed */
    HSRI_IMAGE_SEALED,      /* pages [sink_pages, sealed), in the session's format */
    HSRI_N_IMAGE_PARTS
} hsri_image_part;

typedef struct hsri_image {
    uint64_t n_tokens;      /* committed */
    uint64_t sealed;        /* as in the cache: not below sink_pages */
    uint64_t per_row;       /* slots */
    uint64_t rows[HSRI_N_IMAGE_PARTS];
    uint32_t slot_bytes[HSRI_N_IMAGE_PARTS];
} hsri_image;

/* Sizes of the image of a cache with these marks. HSR_E_FORMAT if no cache with these options can have them. */
hsr_status hsri_image_describe(const hsri_kv_shape *shape, const hsri_cache_opts *opts, uint64_t n_tokens, uint64_t sealed,
                               hsri_image *image, hsr_error *err);

/* Page of row `row` of a part of pages. */
uint64_t hsri_image_page(const hsri_cache_opts *opts, const hsri_image *image, hsri_image_part part, uint64_t row);

/* Of a cache that is not inside a step. chunk_tokens: what `expect` is to be told. */
hsr_status hsri_cache_describe_image(const hsri_cache *cache, hsri_image *image, uint32_t *chunk_tokens, hsr_error *err);

/* Copy a row to `out`; waits for the queue, and for pages that are not in memory. No other queue may be at work on the cache. */
hsr_status hsri_cache_read_image(hsri_cache *cache, hsri_queue *q, const hsri_image *image, hsri_image_part part, uint64_t row,
                                 uint8_t *out, hsr_error *err);

/* Copy one page of one layer and head to `out`, a whole slot of either form: as the next query reads it, if it exists so already.
 * Waits as above; the device's tables need not be up to date. */
hsr_status hsri_cache_read_page(hsri_cache *cache, hsri_queue *q, uint32_t page, uint32_t layer, uint32_t head, uint8_t *out,
                                hsri_kv_type *format, hsr_error *err);

/* What a fresh cache is to receive. chunk_tokens: of the cache that it comes from, whose plain ring may have been longer. */
hsr_status hsri_cache_expect_image(hsri_cache *cache, uint64_t n_tokens, uint64_t sealed, uint32_t chunk_tokens, hsri_image *image,
                                   hsr_error *err);

/* Admit it. HSR_E_NOSPACE: nothing has changed. */
hsr_status hsri_cache_begin_image(hsri_cache *cache, const hsri_image *image, hsr_error *err);

/* The next row; waits for the queue. Page headers in `bytes` are given the cache's lineage. */
hsr_status hsri_cache_write_image(hsri_cache *cache, hsri_queue *q, const hsri_image *image, hsri_image_part part, uint64_t row,
                                  uint8_t *bytes, hsr_error *err);
void hsri_cache_end_image(hsri_cache *cache, const hsri_image *image);

#endif
