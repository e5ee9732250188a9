/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences with an index, made by a description, on devices; and what `select` and the operations beside it make of them. */
#ifndef HSR_TESTS_SELECT_WORLD_H
#define HSR_TESTS_SELECT_WORLD_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cpu.h"
#include "check.h"
#include "device/cpu/backend.h"
#include "index_oracle.h"
#include "open_device.h"

#define LAYERS 2u
#define LAYER 1u
#define KV_HEADS 2u
#define MOST_SEQS 4u
#define MOST_FORCED 4u
#define MOST_SEGMENTS 2u
#define SLABS (HSRI_BLOCK_BYTES / HSRI_SLAB_BYTES)
#define NO_PAGE UINT32_MAX

typedef struct rig {
    hsri_device *dev;
    hsri_queue  *q;
    uint32_t     buffers[64];
    uint32_t     n_buffers, n_kept;   /* the first of them stay from run to run */
    hsri_ref     pool, calibration;   /* of the world that was loaded */
} rig;

static inline rig rig_open(int32_t n_threads, int32_t isa, bool async)
{
    rig r = { 0 };

    open_device(n_threads, isa, async, &r.dev, &r.q);
    return r;
}

/* Free what came after the kept buffers. */
static inline void rig_clear(rig *r)
{
    while (r->n_buffers > r->n_kept)
        r->dev->free(r->dev, r->buffers[--r->n_buffers]);
}

static inline void rig_close(rig *r)
{
    r->n_kept = 0;
    rig_clear(r);
    r->dev->queue_destroy(r->q);
    r->dev->destroy(r->dev);
}

static inline hsri_ref room(rig *r, uint64_t bytes)
{
    hsri_ref ref = { 0 };

    CHECK(r->dev->alloc(r->dev, bytes, &ref.buf, NULL) == HSR_OK);
    r->buffers[r->n_buffers++] = ref.buf;
    return ref;
}

static inline hsri_ref upload(rig *r, const void *data, uint64_t bytes)
{
    hsri_ref ref = room(r, bytes);

    r->dev->copy_in(r->q, ref, data, bytes);
    CHECK(r->dev->wait(r->q, NULL) == HSR_OK);
    return ref;
}

/* ---- sequences with an index ---- */

typedef struct world {
    uint32_t d, n_heads, n_seqs, n_rows, n_picks, sink, window, n_forced, most_pages, stride;
    float    scale, reach;
    bool     aside;                /* select, then set aside what is_away says */
    uint32_t scan_pages;           /* not 0: select, then foresee: lists are those of the latter */
    const float *guess;            /* its queries */
    uint32_t cut;                  /* pages by which sequences were cut in between */
    hsri_index_shape shape;
    uint8_t *pool;
    uint64_t pool_bytes;
    uint32_t more_blocks;          /* after a block of slabs and one of strips for each sequence: cluster records, or pages */
    uint32_t *slabs[MOST_SEQS], *strips[MOST_SEQS], *pages[MOST_SEQS];
    uint32_t  records[MOST_SEQS][MOST_SEGMENTS * LAYERS * KV_HEADS];
    float    *calibration, *queries, *rotated, *acc;
    hsri_row  rows[HSRI_PICK_ROWS];
    hsri_pick picks[MOST_SEQS];
    hsri_sparse settings[MOST_SEQS];
    uint32_t  forced[MOST_SEQS][LAYERS * KV_HEADS * MOST_FORCED];
} world;

static inline uint32_t group_of(const world *w) { return w->n_heads / KV_HEADS; }

static inline const float *record_of(const world *w,
                              uint32_t kv_head) { return w->calibration + (LAYER * KV_HEADS + kv_head) * hsri_calibration_floats(w->d); }

static inline uint32_t sealed_pages(const world *w, uint32_t pos)
{
    uint32_t page = pos / HSRI_PAGE_TOKENS;

    return page + 1 > w->window ? page + 1 - w->window : 0;
}

static inline const uint8_t *entry_of(const world *w, uint32_t seq, uint32_t kv_head, uint32_t page)
{
    uint32_t slab = w->slabs[seq][(page / w->shape.per_slab * LAYERS + LAYER) * KV_HEADS + kv_head];

    return w->pool + (uint64_t)(slab >> 8) * HSRI_BLOCK_BYTES + (slab & 255) * HSRI_SLAB_BYTES +
           page % w->shape.per_slab * w->shape.entry_bytes;
}

static inline uint32_t strips_of(const world *w, uint32_t n_pages)
{
    return n_pages > w->sink ? (n_pages - w->sink + HSRI_STRIP_PAGES - 1) / HSRI_STRIP_PAGES : 0;
}

static inline const uint8_t *codes_of(const world *w, uint32_t seq, uint32_t kv_head, uint32_t page)
{
    uint32_t at = page - w->sink, strip;

    if (!w->shape.code_bytes || page < w->sink)
        return NULL;
    strip = w->strips[seq][(at / HSRI_STRIP_PAGES * LAYERS + LAYER) * KV_HEADS + kv_head];
    return w->pool + (uint64_t)(strip >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(strip & 255) * hsri_strip_slot_bytes(&w->shape) +
           at % HSRI_STRIP_PAGES * w->shape.code_bytes;
}

static inline float *key_values(const world *w, uint32_t seq, uint32_t kv_head, uint32_t page, float *v)
{
    float *k = malloc(64 * w->d * sizeof *k);

    fill_noise(k, 64 * w->d, 1000 + (seq * 5000 + page) * KV_HEADS + kv_head, 2.0f);
    fill_noise(v, 64 * w->d, 900000 + (seq * 5000 + page) * KV_HEADS + kv_head, 2.0f);
    return k;
}

/* Entries and, for the oracle, bf16-free plain pages of `n` pages of a sequence. */
static inline void fill_sequence(world *w, const hsri_kernels *kernels, uint32_t seq, uint32_t n, bool with_pages)
{
    uint32_t n_slabs = n / w->shape.per_slab + 1, n_strips = strips_of(w, n), d = w->d;
    uint64_t page_bytes = hsri_round_up(hsri_plain_page_bytes(HSRI_KV_TYPE_F32, d), 4096), per_block = HSRI_BLOCK_BYTES / page_bytes;
    float   *v = malloc(64 * d * sizeof *v), *scratch = malloc(hsri_index_scratch(d) * sizeof *scratch);

    w->slabs[seq] = calloc(n_slabs * LAYERS * KV_HEADS, sizeof(uint32_t));
    w->pages[seq] = calloc(n * LAYERS * KV_HEADS, sizeof(uint32_t));
    w->strips[seq] = calloc(n_strips * LAYERS * KV_HEADS + 1, sizeof(uint32_t));
    /* Each sequence has a block of slabs and one of strips, in falling order. */
    for (uint32_t i = 0; i < n_slabs * LAYERS * KV_HEADS; i++)
        w->slabs[seq][i] = (seq * 2) << 8 | (SLABS - 1 - i);
    for (uint32_t i = 0; i < n_strips * LAYERS * KV_HEADS && w->shape.code_bytes; i++)
        w->strips[seq][i] = (seq * 2 + 1) << 8 | (HSRI_BLOCK_BYTES / hsri_strip_slot_bytes(&w->shape) - 1 - i);
    for (uint32_t kv_head = 0; kv_head < KV_HEADS; kv_head++) {
        hsri_calibration_record record = hsri_calibration_at(w->calibration, KV_HEADS, LAYER, kv_head, d);

        for (uint32_t page = 0; page < n; page++) {
            float   *k = key_values(w, seq, kv_head, page, v);
            uint32_t at = (page * LAYERS + LAYER) * KV_HEADS + kv_head, slot = page * KV_HEADS + kv_head;

            if (page >= w->sink)
                kernels->sparse.encode(&w->shape, &record, k, v, (uint8_t *)(uintptr_t)entry_of(w, seq, kv_head, page),
                                       (uint8_t *)(uintptr_t)codes_of(w, seq, kv_head, page), scratch);
            w->pages[seq][at] = !with_pages ? 0 : (uint32_t)((w->more_blocks + seq * 4 + slot / per_block) << 8 | slot % per_block);
            uint8_t *page_slot = w->pool + (uint64_t)(w->pages[seq][at] >> 8) * HSRI_BLOCK_BYTES + (w->pages[seq][at] & 255) * page_bytes;

            for (uint32_t t = 0; t < 64 && with_pages; t++)
                kernels->page_put[HSRI_KV_TYPE_F32](page_slot, d, t, k + t * d, v + t * d);
            free(k);
        }
    }
    free(v);
    free(scratch);
}

typedef struct scenario {
    const char *name;
    uint32_t kind, d, n_4bit, n_2bit, n_heads, sink, window, selector, slice_units, budget, n_forced, flags, run;
    uint32_t pos[MOST_SEQS];   /* of the last token of each sequence, 0: no more sequences; `run`: of the first of 128 */
    float    ratio, reach;     /* reach: size of queries */
    uint32_t candidates;       /* 0: no clusters */
} scenario;

static inline world *world_new(const scenario *s, const hsri_kernels *kernels)
{
    world   *w = calloc(1, sizeof *w);
    uint32_t n_seqs = 0;

    *w = (world){ .d = s->d, .n_heads = s->n_heads, .sink = s->sink, .window = s->window, .reach = s->reach, .n_forced = s->n_forced,
                  .scale = 1 / sqrtf((float)s->d), .shape = shape_of(s->kind, s->d, s->n_4bit, s->n_2bit) };
    w->shape.clusters = s->candidates > 0;
    while (n_seqs < MOST_SEQS && s->pos[n_seqs])
        n_seqs++;
    w->more_blocks = 2 * n_seqs;
    w->pool_bytes = n_seqs * (s->selector == HSRI_SELECT_ORACLE ? 6ull : s->candidates > 0 ? 3ull : 2ull) * HSRI_BLOCK_BYTES;
    w->pool = hsri_new_aligned(w->pool_bytes, 1);
    w->calibration = malloc(LAYERS * KV_HEADS * hsri_calibration_floats(w->d) * sizeof(float));
    for (uint32_t i = 0; i < LAYERS * KV_HEADS; i++)
        fill_calibration(w->calibration + i * hsri_calibration_floats(w->d), w->d, 7 * i);
    for (uint32_t seq = 0; seq < n_seqs; seq++, w->n_seqs++) {
        uint32_t n_rows = s->run ? HSRI_PICK_ROWS : 1, n = sealed_pages(w, s->pos[seq]);

        w->picks[w->n_picks++] = (hsri_pick){ w->n_rows, n_rows };
        for (uint32_t i = 0; i < n_rows; i++)
            w->rows[w->n_rows++] = (hsri_row){ seq, s->pos[seq] + i };
        w->most_pages = (uint32_t)hsri_max(w->most_pages, n);
        w->settings[seq] = (hsri_sparse){ .selector = s->selector, .flags = s->flags, .budget_units = s->budget,
                                          .slice_units = s->slice_units,
                                          .ratio = s->ratio, .coarse_pages = 4, .fine_units = 4, .top_coarse = 5, .top_fine = 6,
                                          .candidates = s->candidates, .n_forced = s->n_forced, .seed = 77 };
        for (uint32_t i = 0; i < LAYERS * KV_HEADS * MOST_FORCED; i++)
            w->forced[seq][i] = NO_PAGE;
        /* selectable ones, one of the sink, one of the window */
        for (uint32_t i = 0; i < LAYERS * KV_HEADS && s->n_forced == MOST_FORCED; i++)
            memcpy(&w->forced[seq][i * MOST_FORCED], (uint32_t[]){ 0, s->sink + i % 2, s->sink + n / 2, n },
                   MOST_FORCED * sizeof(uint32_t));
        fill_sequence(w, kernels, seq, n ? n : 1, s->selector == HSRI_SELECT_ORACLE);
    }
    w->stride = (uint32_t)hsri_max(s->budget, (uint64_t)ceil((double)s->ratio * w->most_pages * 4)) + 4 * s->n_forced;
    w->queries = malloc(w->n_rows * w->n_heads * w->d * sizeof(float));
    w->rotated = malloc(w->n_rows * w->n_heads * w->d * sizeof(float));
    w->acc = malloc(w->n_rows * w->n_heads * (w->d + 2) * sizeof(float));
    fill_noise(w->queries, w->n_rows * w->n_heads * w->d, 5, s->reach);
    fill_noise(w->acc, w->n_rows * w->n_heads * (w->d + 2), 6, 3.0f);
    for (uint32_t i = 0; i < w->n_rows * w->n_heads; i++)
        w->acc[i * (w->d + 2) + 1] = 1.5f + (float)(i % 5);
    return w;
}

/* Nobody may read them any more. */
static inline void spoil_strips(world *w, uint32_t seq, uint32_t n_segments)
{
    const uint32_t bytes = hsri_strip_slot_bytes(&w->shape);

    for (uint32_t i = 0; i < n_segments * HSRI_SEGMENT_STRIPS * LAYERS * KV_HEADS; i++)
        memset(w->pool + (uint64_t)(w->strips[seq][i] >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(w->strips[seq][i] & 255) * bytes, 0xa5, bytes);
}

/* What every run reads, and none writes, goes to the device once. */
static inline void load_world(rig *r, const world *w)
{
    r->pool = upload(r, w->pool, w->pool_bytes);
    r->calibration = upload(r, w->calibration, LAYERS * KV_HEADS * hsri_calibration_floats(w->d) * sizeof(float));
    r->n_kept = r->n_buffers;
}

static inline hsri_kv_view view_of(const rig *r, const world *w)
{
    return (hsri_kv_view){ .pool_buf = r->pool.buf, .n_layers = LAYERS, .n_kv_heads = KV_HEADS, .head_dim = w->d,
                           .calibration = r->calibration };
}

/* Cluster records of all whole segments: one block for each sequence. The components that they were made of are gone then. */
static inline void make_clusters(world *w, int32_t isa)
{
    rig          one = rig_open(1, isa, false), *r = &one;
    hsri_kv_view kv;

    load_world(r, w);
    kv = view_of(r, w);
    for (uint32_t seq = 0; seq < w->n_seqs; seq++) {
        uint32_t n_pages = sealed_pages(w, w->rows[w->picks[seq].row].pos), n_segments = (uint32_t)hsri_segments(n_pages, w->sink);
        hsri_ref index = upload(r, w->slabs[seq], (n_pages / w->shape.per_slab + 1) * LAYERS * KV_HEADS * 4);
        hsri_ref strips = upload(r, w->strips[seq], (strips_of(w, n_pages) * LAYERS * KV_HEADS + 1) * 4);

        CHECK(n_segments <= MOST_SEGMENTS);
        for (uint32_t i = 0; i < n_segments * LAYERS * KV_HEADS; i++)
            w->records[seq][i] = (w->more_blocks + seq) << 8 | i;
        for (uint32_t i = 0; i < n_segments * KV_HEADS; i++) {
            hsri_cluster one = { .index = index,
                                 .strips = hsri_at(strips, i / KV_HEADS * HSRI_SEGMENT_STRIPS * LAYERS * KV_HEADS * 4),
                                 .first_page = w->sink + i / KV_HEADS * HSRI_SEGMENT_PAGES,
                                 .layer = LAYER, .head = (uint16_t)(i % KV_HEADS),
                                 .record = w->records[seq][(i / KV_HEADS * LAYERS + LAYER) * KV_HEADS + i % KV_HEADS],
                                 .index_shape = w->shape };

            r->dev->ops.cluster(r->q, &kv, upload(r, &one, sizeof one), 1);
        }
    }
    r->dev->copy_out(r->q, w->pool, r->pool, w->pool_bytes);
    CHECK(r->dev->wait(r->q, NULL) == HSR_OK);
    rig_close(r);
    for (uint32_t seq = 0; seq < w->n_seqs; seq++)
        spoil_strips(w, seq, (uint32_t)hsri_segments(sealed_pages(w, w->rows[w->picks[seq].row].pos), w->sink));
}

static inline void world_free(world *w)
{
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        free(w->slabs[i]);
        free(w->strips[i]);
        free(w->pages[i]);
    }
    free(w->pool);
    free(w->calibration);
    free(w->queries);
    free(w->rotated);
    free(w->acc);
    free(w);
}

/* ---- running ---- */

static inline bool is_away(uint32_t list, uint32_t unit)
{
    return (unit / HSRI_PAGE_UNITS + list) % 3 == 0 || list == KV_HEADS;    /* of one list nothing is left */
}

typedef struct result {
    uint32_t *units, *counts;
    float    *virtual_part, *covered, *rotated;
    uint32_t *scans;               /* [n_seqs][words of a scan] */
} result;

static inline void result_free(result *r)
{
    free(r->units);
    free(r->counts);
    free(r->virtual_part);
    free(r->covered);
    free(r->rotated);
    free(r->scans);
}

/* Mark the units of some pages of every list, differently in each. */
static inline void mark_units(rig *r, const hsri_lists *lists, uint32_t pick0)
{
    const uint64_t n_lists = lists->n_picks * KV_HEADS;
    uint32_t      *units = calloc(n_lists * lists->stride + 1, 4), *counts = calloc(n_lists, 4);

    r->dev->copy_out(r->q, units, lists->units, n_lists * lists->stride * 4);
    r->dev->copy_out(r->q, counts, lists->counts, n_lists * 4);
    CHECK(r->dev->wait(r->q, NULL) == HSR_OK);
    for (uint32_t i = 0; i < n_lists; i++)
        for (uint32_t u = 0; u < counts[i]; u++)
            units[i * lists->stride + u] |= is_away(pick0 * KV_HEADS + i, units[i * lists->stride + u]) ? HSRI_UNIT_AWAY : 0;
    r->dev->copy_in(r->q, lists->units, units, n_lists * lists->stride * 4);
    CHECK(r->dev->wait(r->q, NULL) == HSR_OK);
    free(units);
    free(counts);
}

static inline uint64_t scan_words(const world *w) { return hsri_scan_words(LAYERS, KV_HEADS, w->n_heads, w->scan_pages); }

/* Rows of the batch again, with other queries and maybe nearer to the start. */
static inline void run_foresee(rig *r, const world *w, uint32_t row0, const hsri_batch *batch, const hsri_kv_view *kv, hsri_ref settings,
                        hsri_ref picks, hsri_ref scratch, const hsri_lists *lists)
{
    const uint64_t n = (uint64_t)batch->n_rows * w->n_heads * w->d;
    hsri_row   rows[HSRI_PICK_ROWS];
    hsri_ref   queries = upload(r, w->guess + row0 * w->n_heads * w->d, n * sizeof(float)), rotated = room(r, n * sizeof(float));
    hsri_batch again = *batch;

    for (uint32_t i = 0; i < batch->n_rows; i++)
        rows[i] = (hsri_row){ w->rows[row0 + i].seq, w->rows[row0 + i].pos - w->cut * HSRI_PAGE_TOKENS };
    again.rows = upload(r, rows, batch->n_rows * sizeof *rows);
    r->dev->ops.rotate(r->q, kv, LAYER, w->n_heads, batch->n_rows, queries, rotated);
    r->dev->ops.foresee(r->q, &again, kv, LAYER, w->n_heads, w->scale, queries, rotated, settings, picks, scratch, lists);
}

/* The tables of a sequence, as long as its pages ask for and no longer. */
static inline hsri_seq put_sequence(rig *r, const world *w, uint32_t seq)
{
    const uint64_t n_pages = sealed_pages(w, w->rows[w->picks[seq].row].pos), row = LAYERS * KV_HEADS * sizeof(uint32_t);

    return (hsri_seq){ .sealed = upload(r, w->pages[seq], n_pages * row),
                       .index = upload(r, w->slabs[seq], (n_pages / w->shape.per_slab + 1) * row),
                       .strips = upload(r, w->strips[seq], strips_of(w, (uint32_t)n_pages) * row + sizeof(uint32_t)),
                       .clusters = upload(r, w->records[seq], sizeof w->records[seq]),
                       .sink_pages = w->sink, .window_pages = w->window, .index_shape = w->shape };
}

/* Rows [row0, row0 + n_rows) of picks [pick0, pick0 + n_picks). */
static inline result run_select(rig *r, const world *w, uint32_t pick0, uint32_t n_picks)
{
    uint32_t  row0 = w->picks[pick0].row, d = w->d;
    uint32_t  n_rows = w->picks[pick0 + n_picks - 1].row + w->picks[pick0 + n_picks - 1].n_rows - row0;
    uint64_t  n_lists = n_picks * KV_HEADS, n = n_rows * w->n_heads;
    hsri_seq  seqs[MOST_SEQS] = { 0 };
    hsri_pick picks[MOST_SEQS];
    hsri_sparse settings[MOST_SEQS];
    hsri_kv_view kv = view_of(r, w);
    hsri_batch batch = { .n_rows = n_rows, .n_seqs = w->n_seqs };
    hsri_ref   queries = upload(r, w->queries + row0 * w->n_heads * d, n * d * sizeof(float)), rotated = room(r, n * d * sizeof(float));
    hsri_ref   acc = upload(r, w->acc + row0 * w->n_heads * (d + 2), n * (d + 2) * sizeof(float)), scratch, d_settings, d_picks;
    hsri_lists lists = { .stride = w->stride, .n_picks = n_picks };
    uint32_t   n_votes = 0;
    result     out;

    kv.slot_bytes[HSRI_KV_TYPE_F32] = (uint32_t)hsri_round_up(hsri_plain_page_bytes(HSRI_KV_TYPE_F32, d), 4096);
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        seqs[i] = put_sequence(r, w, i);
        settings[i] = w->settings[i];
        settings[i].forced = upload(r, w->forced[i], sizeof w->forced[i]);
        settings[i].scan_pages = w->scan_pages;
        settings[i].scan = w->scan_pages ? room(r, scan_words(w) * 4) : (hsri_ref){ 0 };
    }
    for (uint32_t i = 0; i < n_picks; i++) {
        picks[i] = (hsri_pick){ w->picks[pick0 + i].row - row0, w->picks[pick0 + i].n_rows };
        n_votes += (picks[i].n_rows + HSRI_PICK_STRIDE - 1) / HSRI_PICK_STRIDE;
    }
    batch.rows = upload(r, w->rows + row0, n_rows * sizeof *w->rows);
    batch.seqs = upload(r, seqs, w->n_seqs * sizeof *seqs);
    d_settings = upload(r, settings, sizeof settings);
    d_picks = upload(r, picks, sizeof picks);
    scratch = room(r, hsri_select_scratch(n_votes, n_picks, w->n_heads, KV_HEADS, d, w->most_pages, w->shape.clusters));
    lists.units = room(r, n_lists * w->stride * 4);
    lists.counts = room(r, n_lists * 4);
    lists.virtual_part = room(r, n * (d + 2) * 4);
    lists.covered = room(r, n * 4);
    r->dev->ops.rotate(r->q, &kv, LAYER, w->n_heads, n_rows, queries, rotated);
    r->dev->ops.select(r->q, &batch, &kv, LAYER, w->n_heads, w->scale, queries, rotated, acc, d_settings, d_picks, scratch, &lists);
    if (w->aside) {
        mark_units(r, &lists, pick0);
        r->dev->ops.set_aside(r->q, &batch, &kv, LAYER, w->n_heads, w->scale, queries, rotated, acc, d_settings, d_picks, &lists);
    }
    if (w->scan_pages)
        run_foresee(r, w, row0, &batch, &kv, d_settings, d_picks, scratch, &lists);
    out = (result){ calloc(n_lists * w->stride + 1, 4), calloc(n_lists, 4), calloc(n * (d + 2), 4), calloc(n, 4), calloc(n * d, 4),
                    calloc(w->n_seqs * scan_words(w) + 1, 4) };
    for (uint32_t i = 0; i < w->n_seqs && w->scan_pages; i++)
        r->dev->copy_out(r->q, out.scans + i * scan_words(w), settings[i].scan, scan_words(w) * 4);
    r->dev->copy_out(r->q, out.units, lists.units, n_lists * w->stride * 4);
    r->dev->copy_out(r->q, out.counts, lists.counts, n_lists * 4);
    r->dev->copy_out(r->q, out.virtual_part, lists.virtual_part, n * (d + 2) * 4);
    r->dev->copy_out(r->q, out.covered, lists.covered, n * 4);
    r->dev->copy_out(r->q, out.rotated, rotated, n * d * 4);
    CHECK(r->dev->wait(r->q, NULL) == HSR_OK);
    rig_clear(r);
    return out;
}

#endif
