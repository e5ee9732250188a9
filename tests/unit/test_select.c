/* SPDX-License-Identifier: Apache-2.0 */
/* The operations `rotate`, `select`, `set_aside` and `foresee` against a plain computation in double precision; and the same bytes from
 * every number of threads, from the lagging debug back end, and for rows alone or in company. `--bench [threads [level]]` prints their
 * speed instead. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "check.h"
#include "device/cpu/backend.h"
#include "index_oracle.h"

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

static rig rig_open(int32_t n_threads, int32_t isa, bool async)
{
    rig r = { 0 };

    CHECK(hsri_cpu_device_create(n_threads, isa, NULL, &r.dev, NULL) == HSR_OK);
    if (async)
        CHECK(hsri_async_device_create(r.dev, &r.dev, NULL) == HSR_OK);
    CHECK(r.dev->queue_create(r.dev, &r.q, NULL) == HSR_OK);
    return r;
}

/* Free what came after the kept buffers. */
static void rig_clear(rig *r)
{
    while (r->n_buffers > r->n_kept)
        r->dev->free(r->dev, r->buffers[--r->n_buffers]);
}

static void rig_close(rig *r)
{
    r->n_kept = 0;
    rig_clear(r);
    r->dev->queue_destroy(r->q);
    r->dev->destroy(r->dev);
}

static hsri_ref room(rig *r, uint64_t bytes)
{
    hsri_ref ref = { 0 };

    CHECK(r->dev->alloc(r->dev, bytes, &ref.buf, NULL) == HSR_OK);
    r->buffers[r->n_buffers++] = ref.buf;
    return ref;
}

static hsri_ref upload(rig *r, const void *data, uint64_t bytes)
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

static uint32_t group_of(const world *w) { return w->n_heads / KV_HEADS; }

static const float *record_of(const world *w,
                              uint32_t kv_head) { return w->calibration + (LAYER * KV_HEADS + kv_head) * hsri_calibration_floats(w->d); }

static uint32_t sealed_pages(const world *w, uint32_t pos)
{
    uint32_t page = pos / HSRI_PAGE_TOKENS;

    return page + 1 > w->window ? page + 1 - w->window : 0;
}

static const uint8_t *entry_of(const world *w, uint32_t seq, uint32_t kv_head, uint32_t page)
{
    uint32_t slab = w->slabs[seq][(page / w->shape.per_slab * LAYERS + LAYER) * KV_HEADS + kv_head];

    return w->pool + (uint64_t)(slab >> 8) * HSRI_BLOCK_BYTES + (slab & 255) * HSRI_SLAB_BYTES +
           page % w->shape.per_slab * w->shape.entry_bytes;
}

static uint32_t strips_of(const world *w, uint32_t n_pages)
{
    return n_pages > w->sink ? (n_pages - w->sink + HSRI_STRIP_PAGES - 1) / HSRI_STRIP_PAGES : 0;
}

static const uint8_t *codes_of(const world *w, uint32_t seq, uint32_t kv_head, uint32_t page)
{
    uint32_t at = page - w->sink, strip;

    if (!w->shape.code_bytes || page < w->sink)
        return NULL;
    strip = w->strips[seq][(at / HSRI_STRIP_PAGES * LAYERS + LAYER) * KV_HEADS + kv_head];
    return w->pool + (uint64_t)(strip >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(strip & 255) * hsri_strip_slot_bytes(&w->shape) +
           at % HSRI_STRIP_PAGES * w->shape.code_bytes;
}

static float *key_values(const world *w, uint32_t seq, uint32_t kv_head, uint32_t page, float *v)
{
    float *k = malloc(64 * w->d * sizeof *k);

    fill_noise(k, 64 * w->d, 1000 + (seq * 5000 + page) * KV_HEADS + kv_head, 2.0f);
    fill_noise(v, 64 * w->d, 900000 + (seq * 5000 + page) * KV_HEADS + kv_head, 2.0f);
    return k;
}

/* Entries and, for the oracle, bf16-free plain pages of `n` pages of a sequence. */
static void fill_sequence(world *w, const hsri_kernels *kernels, uint32_t seq, uint32_t n, bool with_pages)
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

static world *world_new(const scenario *s, const hsri_kernels *kernels)
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
static void spoil_strips(world *w, uint32_t seq, uint32_t n_segments)
{
    const uint32_t bytes = hsri_strip_slot_bytes(&w->shape);

    for (uint32_t i = 0; i < n_segments * HSRI_SEGMENT_STRIPS * LAYERS * KV_HEADS; i++)
        memset(w->pool + (uint64_t)(w->strips[seq][i] >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(w->strips[seq][i] & 255) * bytes, 0xa5, bytes);
}

/* What every run reads, and none writes, goes to the device once. */
static void load_world(rig *r, const world *w)
{
    r->pool = upload(r, w->pool, w->pool_bytes);
    r->calibration = upload(r, w->calibration, LAYERS * KV_HEADS * hsri_calibration_floats(w->d) * sizeof(float));
    r->n_kept = r->n_buffers;
}

static hsri_kv_view view_of(const rig *r, const world *w)
{
    return (hsri_kv_view){ .pool_buf = r->pool.buf, .n_layers = LAYERS, .n_kv_heads = KV_HEADS, .head_dim = w->d,
                           .calibration = r->calibration };
}

/* Cluster records of all whole segments: one block for each sequence. The components that they were made of are gone then. */
static void make_clusters(world *w, int32_t isa)
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

static void world_free(world *w)
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

static bool is_away(uint32_t list, uint32_t unit)
{
    return (unit / HSRI_PAGE_UNITS + list) % 3 == 0 || list == KV_HEADS;    /* of one list nothing is left */
}

typedef struct result {
    uint32_t *units, *counts;
    float    *virtual_part, *covered, *rotated;
    uint32_t *scans;               /* [n_seqs][words of a scan] */
} result;

static void result_free(result *r)
{
    free(r->units);
    free(r->counts);
    free(r->virtual_part);
    free(r->covered);
    free(r->rotated);
    free(r->scans);
}

/* Mark the units of some pages of every list, differently in each. */
static void mark_units(rig *r, const hsri_lists *lists, uint32_t pick0)
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

static uint64_t scan_words(const world *w) { return hsri_scan_words(LAYERS, KV_HEADS, w->n_heads, w->scan_pages); }

/* Rows of the batch again, with other queries and maybe nearer to the start. */
static void run_foresee(rig *r, const world *w, uint32_t row0, const hsri_batch *batch, const hsri_kv_view *kv, hsri_ref settings,
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

/* Rows [row0, row0 + n_rows) of picks [pick0, pick0 + n_picks). */
static result run_select(rig *r, const world *w, uint32_t pick0, uint32_t n_picks)
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
        uint64_t n_slabs = (w->shape.per_slab ? w->most_pages / w->shape.per_slab : 0) + 1;

        seqs[i] = (hsri_seq){ .sealed = upload(r, w->pages[i], (sealed_pages(w,
                                                                             w->rows[w->picks[i].row].pos) + 0ull) * LAYERS * KV_HEADS * 4),
                              .index = upload(r, w->slabs[i], hsri_min(n_slabs,
                                                                       1 + sealed_pages(w,
                                                                                        w->rows[w->picks[i].row].pos) / w->shape.per_slab) *
                                              LAYERS * KV_HEADS * 4),
                              .strips = upload(r, w->strips[i], (strips_of(w, sealed_pages(w, w->rows[w->picks[i].row].pos)) *
                                                                 LAYERS * KV_HEADS + 1) * 4),
                              .clusters = upload(r, w->records[i], sizeof w->records[i]),
                              .sink_pages = w->sink, .window_pages = w->window, .index_shape = w->shape };
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

/* ---- what it should be ---- */

static bool near(double got, double want, double tolerance)
{
    if (fabs(got - want) <= tolerance || (isnan(got) && isnan(want)) || got == want)
        return true;
    fprintf(stderr, "got %.9g, want %.9g within %.3g\n", got, want, tolerance);
    return false;
}

static double log_mass(const world *w, uint32_t seq, uint32_t kv_head, uint32_t unit, uint64_t query)
{
    uint32_t       d = w->d, selector = w->settings[seq].selector;
    const float   *q = w->queries + query * d;
    double         sum = 0;

    if (selector != HSRI_SELECT_ORACLE) {
        if (selector == HSRI_SELECT_CLUSTER)
            selector = HSRI_SELECT_SKETCH;
        if (selector != HSRI_SELECT_SKETCH && selector != HSRI_SELECT_MINMAX && selector != HSRI_SELECT_GAUSSIAN)
            selector = HSRI_SELECT_MEAN;
        return unit_log_mass(&w->shape, entry_of(w, seq, kv_head, unit / 4), codes_of(w, seq, kv_head, unit / 4), record_of(w, kv_head),
                             selector, unit % 4, q, w->rotated + query * d, (double)w->scale);
    }
    float *v = malloc(64 * d * sizeof *v), *k = key_values(w, seq, kv_head, unit / 4, v);

    for (uint32_t t = unit % 4 * 16; t < unit % 4 * 16 + 16; t++) {
        double logit = 0;

        for (uint32_t j = 0; j < d; j++)
            logit += (double)q[j] * (double)k[t * d + j];
        sum += exp((double)w->scale * logit);
    }
    free(k);
    free(v);
    return log(sum);
}

/* ---- clusters ---- */

/* What the clusters leave of a list: of each voting head the logs of the masses of the segments' units, of their tokens that are looked at,
 * and of the other clusters' centres. Masses of clusters are the kernel's own, which test_cluster.c looks at. */
typedef struct candidates {
    uint32_t  n_units;     /* of whole segments */
    double   *mass;        /* [votes][heads of the group][units] */
    double   *rest;        /* [votes][heads of the group] */
} candidates;

static const double *cluster_worth;

static int by_worth(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return cluster_worth[x] != cluster_worth[y] ? (cluster_worth[x] < cluster_worth[y] ? 1 : -1) : (x > y) - (x < y);
}

static const uint8_t *cluster_record(const world *w, uint32_t seq, uint32_t kv_head, uint32_t segment)
{
    uint32_t entry = w->records[seq][(segment * LAYERS + LAYER) * KV_HEADS + kv_head];

    return w->pool + (uint64_t)(entry >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(entry & 255) * hsri_cluster_slot_bytes(&w->shape);
}

/* Dot product of a query with a token of cluster k, as the record has it. */
static double member_logit(const world *w, const uint8_t *record, uint32_t k, uint32_t token, uint64_t query)
{
    const hsri_cluster_layout at = hsri_cluster_layout_of(&w->shape);
    const float *mean = (const float *)(record + at.mean), *scales = (const float *)(record + at.scales);
    const float *token_scales = (const float *)(record + at.token_scales);
    double       logit = 0;

    for (uint32_t j = 0; j < w->d; j++)
        logit += (double)w->queries[query * w->d + j] * (double)mean[j];
    for (uint32_t c = 0; c < at.n; c++) {
        uint32_t shift = c % 8 / 4 * 4, byte = c % 4;
        int      centre = record[at.codes + (k / 16 * (at.n / 8) + c / 8) * 64 + k % 16 * 4 + byte] >> shift & 15;
        int      off = record[at.tokens + (c / 8 * HSRI_SEGMENT_TOKENS + token) * 4 + byte] >> shift & 15;

        logit += (double)w->rotated[query * w->d + c] *
                 ((centre - 7.5) * (double)scales[c] + (off - 7.5) * (double)token_scales[c] * record[at.spreads + k]);
    }
    return logit;
}

static bool takes_all(const hsri_sparse *s, uint32_t n_pages)
{
    return s->selector == HSRI_SELECT_SKETCH || s->budget_units >= n_pages * HSRI_PAGE_UNITS ||
           s->candidates >= n_pages / HSRI_SEGMENT_PAGES * HSRI_SEGMENT_TOKENS;
}

static bool takes_all_families(const hsri_sparse *s, uint32_t n_pages)
{
    return takes_all(s, n_pages) || 32ull * s->candidates >= n_pages / HSRI_SEGMENT_PAGES * HSRI_SEGMENT_TOKENS;
}

/* Which families are admitted: those that are worth most for each token, with up to 32 tokens for each candidate. Of each head, *rest gets
 * the masses of the others. */
static void find_families(const world *w, const hsri_kernels *kernels, uint32_t pick, uint32_t kv_head, uint32_t n_segments, bool *in,
                          double *rest)
{
    const hsri_pick *p = &w->picks[pick];
    uint32_t   seq = w->rows[p->row].seq, g = group_of(w), d = w->d, n = n_segments * HSRI_SEGMENT_FAMILIES;
    uint64_t   left = 32ull * w->settings[seq].candidates;
    hsri_cluster_layout at = hsri_cluster_layout_of(&w->shape);
    float     *mass = calloc((uint64_t)HSRI_PICK_ROWS * g * n, sizeof *mass);
    double    *worth = calloc(n, sizeof *worth);
    uint32_t  *order = malloc(n * sizeof *order), *tokens = malloc(n * sizeof *tokens);

    for (uint32_t f = 0; f < n; f++) {
        const uint16_t *starts = (const uint16_t *)(cluster_record(w, seq, kv_head, f / HSRI_SEGMENT_FAMILIES) + at.family_starts);

        tokens[f] = starts[f % HSRI_SEGMENT_FAMILIES + 1] - starts[f % HSRI_SEGMENT_FAMILIES];
        order[f] = f;
    }
    for (uint32_t i = 0; i < p->n_rows * g; i++) {
        uint64_t     query = (uint64_t)(p->row + i / g) * w->n_heads + kv_head * g + i % g;
        const float *acc = w->acc + query * (d + 2);
        float        reference = acc[0] + logf(acc[1]), sum;
        double       all = 1;

        for (uint32_t segment = 0; segment < n_segments && i / g % HSRI_PICK_STRIDE == 0; segment++)
            kernels->sparse.cluster.score_families(&(hsri_cluster_score_args){ cluster_record(w, seq, kv_head, segment), &w->shape, 1,
                                                       w->scale, w->queries + query * d, w->rotated + query * d, &reference,
                                                       mass + i * n + segment * HSRI_SEGMENT_FAMILIES, 0, &sum, 0 });
        for (uint32_t f = 0; f < n; f++)
            all += (double)mass[i * n + f];
        for (uint32_t f = 0; f < n; f++)
            worth[f] += tokens[f] ? (double)mass[i * n + f] / all / tokens[f] : 0;
    }
    cluster_worth = worth;
    qsort(order, n, sizeof *order, by_worth);
    for (uint32_t o = 0; o < n && tokens[order[o]] <= left; o++) {
        in[order[o]] = true;
        left -= tokens[order[o]];
    }
    for (uint32_t f = 0; f < n; f++)
        for (uint32_t i = 0; i < p->n_rows * g && !in[f]; i++)
            rest[i] += (double)mass[i * n + f];
    free(mass);
    free(worth);
    free(order);
    free(tokens);
}

/* Of a segment's families, a bit for each that is not admitted, if the candidates do not allow for all. */
static uint64_t left_out_of(const world *w, uint32_t seq, uint32_t n_pages, const bool *in, uint32_t segment)
{
    uint64_t bits = 0;

    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++)
        bits |= in[segment * HSRI_SEGMENT_FAMILIES + f] ? 0 : 1ull << f;
    return takes_all_families(&w->settings[seq], n_pages) ? 0 : bits;
}

/* Masses of a segment's clusters, which are 0 where their families are left out. */
static void score_segment(const hsri_kernels *kernels, hsri_cluster_score_args a, const uint16_t *firsts, float *mass)
{
    float    some[HSRI_SEGMENT_CLUSTERS], sum;
    uint32_t n = 0;

    a.mass = some;
    a.sums = &sum;
    kernels->sparse.cluster.score(&a);
    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++)
        for (uint32_t k = firsts[f]; k < firsts[f + 1]; k++)
            mass[k] = a.left_out >> f & 1 ? 0.0f : some[n++];
}

static candidates find_candidates(const world *w, const hsri_kernels *kernels, uint32_t pick, uint32_t kv_head)
{
    const hsri_pick *p = &w->picks[pick];
    uint32_t   seq = w->rows[p->row].seq, n_pages = sealed_pages(w, w->rows[p->row].pos) - w->sink,
               n_segments = n_pages / HSRI_SEGMENT_PAGES;
    uint32_t   n = n_segments * HSRI_SEGMENT_CLUSTERS, g = group_of(w), d = w->d;
    uint32_t   left = takes_all(&w->settings[seq], n_pages) ? UINT32_MAX : w->settings[seq].candidates;
    hsri_cluster_layout at = hsri_cluster_layout_of(&w->shape);
    float     *mass = malloc(HSRI_PICK_ROWS * g * n * sizeof *mass);
    double    *worth = calloc(n, sizeof *worth), *all = calloc(HSRI_PICK_ROWS * g, sizeof *all);
    uint32_t  *order = malloc(n * sizeof *order);
    bool      *families = calloc(n_segments * HSRI_SEGMENT_FAMILIES, 1);
    uint32_t   n_units = n_segments * HSRI_SEGMENT_PAGES * HSRI_PAGE_UNITS;
    candidates c = { n_units, calloc((uint64_t)HSRI_PICK_ROWS * g * n_units, sizeof *c.mass), calloc(HSRI_PICK_ROWS * g, sizeof *c.rest) };

    if (!takes_all_families(&w->settings[seq], n_pages))
        find_families(w, kernels, pick, kv_head, n_segments, families, all);
    for (uint32_t i = 0; i < p->n_rows * g; i++) {
        uint64_t     query = (uint64_t)(p->row + i / g) * w->n_heads + kv_head * g + i % g;
        const float *acc = w->acc + query * (d + 2);
        float        reference = acc[0] + logf(acc[1]);

        for (uint32_t segment = 0; segment < n_segments && i / g % HSRI_PICK_STRIDE == 0; segment++) {
            const uint8_t *record = cluster_record(w, seq, kv_head, segment);

            score_segment(kernels, (hsri_cluster_score_args){ .record = record, .shape = &w->shape, .n_heads = 1, .scale = w->scale,
                                                              .queries = w->queries + query * d, .rotated = w->rotated + query * d,
                                                              .reference = &reference,
                                                              .left_out = left_out_of(w, seq, n_pages, families, segment) },
                          (const uint16_t *)(record + at.firsts), mass + i * n + segment * HSRI_SEGMENT_CLUSTERS);
        }
        all[i] += 1;
        for (uint32_t k = 0; k < n && i / g % HSRI_PICK_STRIDE == 0; k++)
            all[i] += (double)mass[i * n + k];
        for (uint32_t k = 0; k < n && i / g % HSRI_PICK_STRIDE == 0; k++)
            worth[k] += (double)mass[i * n + k] / all[i];
        c.rest[i] = all[i] - 1;
    }
    for (uint32_t k = 0; k < n; k++)
        order[k] = k;
    cluster_worth = worth;
    qsort(order, n, sizeof *order, by_worth);
    for (uint32_t o = 0; o < n; o++) {
        uint32_t        k = order[o], segment = k / HSRI_SEGMENT_CLUSTERS;
        const uint16_t *starts = (const uint16_t *)(cluster_record(w, seq, kv_head, segment) + at.starts) + k % HSRI_SEGMENT_CLUSTERS;
        const uint16_t *positions = (const uint16_t *)(cluster_record(w, seq, kv_head, segment) + at.positions);

        if ((uint32_t)(starts[1] - starts[0]) > left || (worth[k] <= 0 && left != UINT32_MAX))
            break;
        left -= (uint32_t)(starts[1] - starts[0]);
        for (uint32_t i = 0; i < p->n_rows * g; i++)
            for (uint32_t j = starts[0]; j < starts[1] && i / g % HSRI_PICK_STRIDE == 0; j++)
                c.mass[i * n_units + segment * HSRI_SEGMENT_TOKENS / 16 + positions[j] / 16] +=
                    exp((double)w->scale * member_logit(w, cluster_record(w, seq, kv_head, segment), k % HSRI_SEGMENT_CLUSTERS, j,
                                                        (uint64_t)(p->row + i / g) * w->n_heads + kv_head * g + i % g));
        for (uint32_t i = 0; i < p->n_rows * g && i / g % HSRI_PICK_STRIDE == 0; i++)
            c.rest[i] -= (double)mass[i * n + k];
    }
    for (uint32_t i = 0; i < p->n_rows * g; i++) {
        const float *acc = w->acc + ((uint64_t)(p->row + i / g) * w->n_heads + kv_head * g + i % g) * (d + 2);

        c.rest[i] = log(fmax(c.rest[i], 1e-300)) + (double)acc[0] + log((double)acc[1]);
        for (uint32_t u = 0; u < n_units; u++)
            c.mass[i * n_units + u] = log(c.mass[i * n_units + u]);
    }
    free(mass);
    free(worth);
    free(all);
    free(order);
    free(families);
    return c;
}

/* A list, and what it should be. Units are counted from the first page behind the sink. */
typedef struct listing {
    const hsri_pick   *pick;
    const hsri_sparse *settings;
    uint32_t   seq, kv_head, first, end, n_units, count, n_forced;
    bool      *chosen, *forced;    /* [n_units] */
    double    *mass;               /* [n_units], of the query that is looked at, relative to the largest */
    double    *worth;              /* [n_units], over all voting queries */
    candidates found;
} listing;

/* Which units were chosen; false if the list is no list of units in order. */
static bool read_list(const world *w, const uint32_t *units, listing *l)
{
    for (uint32_t i = 0; i < l->count; i++) {
        if (units[i] < l->first * 4 || units[i] >= l->end * 4 || (i > 0 && units[i] <= units[i - 1]))
            return false;
        l->chosen[units[i] - l->first * 4] = true;
    }
    return l->count <= w->stride;
}

static void check_forced(const world *w, listing *l)
{
    for (uint32_t i = 0; i < l->settings->n_forced; i++) {
        uint32_t page = w->forced[l->seq][(LAYER * KV_HEADS + l->kv_head) * l->settings->n_forced + i];

        for (uint32_t u = 0; u < 4 && page >= l->first && page < l->end; u++) {
            CHECK(l->chosen[(page - l->first) * 4 + u] || w->aside);
            l->n_forced += !l->forced[(page - l->first) * 4 + u];
            l->forced[(page - l->first) * 4 + u] = true;
        }
    }
}

/* The virtual part of a query: mass and mean value of what was not chosen. */
static void check_virtual(const world *w, const listing *l, const float *part, double left, double top, double tolerance)
{
    double *sum = calloc(w->d, sizeof *sum);

    for (uint32_t u = 0; u < l->n_units; u++) {
        const uint8_t *entry = entry_of(w, l->seq, l->kv_head, l->first + u / 4);

        for (uint32_t j = 0; j < w->d && !l->chosen[u]; j++)
            sum[j] += l->mass[u] * mean_value(&w->shape, entry, record_of(w, l->kv_head) + 2 * w->d * w->d + w->d, j);
    }
    for (uint32_t j = 0; j < w->d; j++)
        CHECK(near((double)part[2 + j] / (double)part[1], sum[j] / left, 4 * tolerance));
    free(sum);
    CHECK(near((double)part[0] + log((double)part[1]), top + log(left), 3 * tolerance));
}

/* What head h of voting row `vote` makes of the list. */
static void check_query(const world *w, const result *r, listing *l, uint32_t vote, uint32_t h, double tolerance)
{
    const uint64_t    query = (uint64_t)(l->pick->row + vote) * w->n_heads + h;
    const uint32_t    g = group_of(w);
    const float      *acc = w->acc + query * (w->d + 2), *part = r->virtual_part + query * (w->d + 2);
    const candidates *found = &l->found;
    double            exact = (double)acc[0] + log((double)acc[1]), top = exact, all, seen, left = 0;

    for (uint32_t u = 0; u < l->n_units; u++) {
        l->mass[u] = u < found->n_units ? found->mass[(vote * g + h % g) * found->n_units + u]
                                        : log_mass(w, l->seq, l->kv_head, l->first * 4 + u, query);
        top = fmax(top, l->mass[u]);
    }
    all = seen = exp(exact - top);
    for (uint32_t u = 0; u < l->n_units; u++) {
        l->mass[u] = exp(l->mass[u] - top);
        all += l->mass[u];
        *(l->chosen[u] ? &seen : &left) += l->mass[u];
    }
    for (uint32_t u = 0; u < l->n_units; u++) {
        l->worth[u] += l->mass[u] / all;
        CHECK(!l->chosen[u] || l->forced[u] || l->mass[u] > 0 || u >= found->n_units || l->settings->slice_units > 1 || w->reach > 100);
    }
    if (found->rest)
        all += exp(found->rest[vote * g + h % g] - top);
    if (found->n_units && w->reach > 100) {
        /* Masses at their limit: which clusters are taken is not retold here. */
        CHECK(r->covered[query] >= 0.0f && r->covered[query] <= 1.0f);
        return;
    }
    CHECK(near((double)r->covered[query], seen / all, tolerance));
    if (l->pick->n_rows == 1 && (l->settings->flags & HSRI_SPARSE_VIRTUAL) && l->settings->selector != HSRI_SELECT_MINMAX &&
        left > 1e-20 * all)
        check_virtual(w, l, part, left, top, tolerance);
    else if (left <= 0 || part[1] == 0.0f || l->pick->n_rows > 1)
        CHECK(part[0] == -INFINITY && part[1] == 0.0f && part[2] == 0.0f);
}

static void check_count(const listing *l)
{
    const hsri_sparse *s = l->settings;
    uint64_t           budget = s->budget_units;

    if (s->ratio > 0)
        budget = hsri_max(budget, (uint64_t)ceil((double)s->ratio * l->n_units));
    if (s->selector == HSRI_SELECT_HISTORY)
        budget = 0;
    if (s->selector == HSRI_SELECT_CLASSIC)
        budget = hsri_min(budget, s->top_fine * s->fine_units);
    if (budget >= l->n_units)
        CHECK(l->count == l->n_units);
    else if (s->n_forced == 0)
        CHECK(l->count == budget / s->slice_units * s->slice_units);
    else
        CHECK(l->count <= budget + l->n_forced && l->count > l->n_forced - 1);
}

/* Slices are chosen whole, and none that was left is worth more than one that was chosen. */
static void check_choice(const world *w, const listing *l, double tolerance)
{
    double least = INFINITY, most = -1;

    for (uint32_t u = 0; u < l->n_units; u += l->settings->slice_units) {
        double slice = 0;

        for (uint32_t i = u; i < u + l->settings->slice_units; i++) {
            CHECK(l->chosen[i] == l->chosen[u]);
            slice += l->worth[i];
        }
        if (l->chosen[u] && !l->forced[u])
            least = fmin(least, slice);
        if (!l->chosen[u])
            most = fmax(most, slice);
    }
    CHECK(w->reach > 100 || most < 1e-20 || least > most * (1 - tolerance));
}

/* Everything about one list. */
static void check_list(const world *w, const hsri_kernels *kernels, const result *r, uint32_t pick, uint32_t kv_head, double tolerance)
{
    const hsri_pick *p = &w->picks[pick];
    const uint32_t   list = pick * KV_HEADS + kv_head, end = sealed_pages(w, w->rows[p->row].pos), seq = w->rows[p->row].seq;
    const uint32_t   n_pages = end > w->sink ? end - w->sink : 0, selector = w->settings[seq].selector;
    listing l = { .pick = p, .settings = &w->settings[seq], .seq = seq, .kv_head = kv_head, .first = w->sink, .end = end,
                  .n_units = n_pages * 4, .count = r->counts[list],
                  .chosen = calloc(n_pages * 4 + 1, 1), .forced = calloc(n_pages * 4 + 1, 1),
                  .mass = calloc(n_pages * 4 + 1, sizeof(double)), .worth = calloc(n_pages * 4 + 1, sizeof(double)) };

    if (CHECK(read_list(w, r->units + (uint64_t)list * w->stride, &l))) {
        check_forced(w, &l);
        if ((selector == HSRI_SELECT_CLUSTER || selector == HSRI_SELECT_SKETCH) && w->shape.clusters && n_pages >= HSRI_SEGMENT_PAGES)
            l.found = find_candidates(w, kernels, pick, kv_head);
        for (uint32_t vote = 0; vote < p->n_rows; vote += HSRI_PICK_STRIDE)
            for (uint32_t h = kv_head * group_of(w); h < (kv_head + 1) * group_of(w); h++)
                check_query(w, r, &l, vote, h, tolerance);
        if (!w->aside) {       /* which ones were chosen is the same without */
            check_count(&l);
            if (selector <= HSRI_SELECT_CLUSTER && selector != HSRI_SELECT_CLASSIC)
                check_choice(w, &l, tolerance);
        }
    }
    free(l.found.mass);
    free(l.found.rest);
    free(l.worth);
    free(l.mass);
    free(l.chosen);
    free(l.forced);
}

static void check_rotated(const world *w, const result *r)
{
    for (uint32_t i = 0; i < w->n_rows * w->n_heads; i++) {
        const float *b = record_of(w, i % w->n_heads / group_of(w)) + w->d * w->d;

        for (uint32_t c = 0; c < w->d; c++) {
            double want = 0;

            for (uint32_t j = 0; j < w->d; j++)
                want += (double)w->queries[i * w->d + j] * (double)b[j * w->d + c];
            if (!near((double)r->rotated[i * w->d + c], want, 1e-6 * w->d * fmax(1, (double)w->reach))) {
                CHECK(false);
                return;
            }
        }
    }
}

static bool same(const world *w, const result *a, uint32_t pick_a, const result *b, uint32_t n_picks)
{
    uint32_t row = w->picks[pick_a].row, n_rows = w->picks[pick_a + n_picks - 1].row + w->picks[pick_a + n_picks - 1].n_rows - row;
    bool     ok = true;

    for (uint32_t i = 0; i < n_picks * KV_HEADS; i++) {
        uint32_t list = pick_a * KV_HEADS + i;

        ok &= a->counts[list] == b->counts[i] && memcmp(a->units + list * w->stride, b->units + i * w->stride,
                                                        b->counts[i] * sizeof(uint32_t)) == 0;
    }
    ok &= memcmp(a->virtual_part + row * w->n_heads * (w->d + 2), b->virtual_part, n_rows * w->n_heads * (w->d + 2) * sizeof(float)) == 0;
    ok &= memcmp(a->covered + row * w->n_heads, b->covered, n_rows * w->n_heads * sizeof(float)) == 0;
    return ok && memcmp(a->rotated + row * w->n_heads * w->d, b->rotated, n_rows * w->n_heads * w->d * sizeof(float)) == 0;
}

/* ---- scenarios ---- */

#define SKETCH24 HSRI_INDEX_SKETCH, 64, 24, 0
#define VIRTUAL HSRI_SPARSE_VIRTUAL

static const scenario scenarios[] = {
    { "sketch", SKETCH24, 14, 1, 2, HSRI_SELECT_SKETCH, 1, 40, 0, VIRTUAL, 0, { 6500, 3000, 9001, 130 }, 0, 5, 0 },
    { "sketch, slices of 2, forced", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 2, 33, 4, VIRTUAL, 0, { 6500, 3000, 9001 }, 0, 3, 0 },
    { "sketch, whole pages, no sink", SKETCH24, 4, 0, 1, HSRI_SELECT_SKETCH, 4, 24, 4, VIRTUAL, 0, { 6463, 64, 127, 63 }, 0, 3, 0 },
    { "sketch, ratio", HSRI_INDEX_SKETCH, 128, 16, 48, 6, 2, 3, HSRI_SELECT_SKETCH, 1, 3, 0, VIRTUAL, 0, { 4000, 1 }, 0.1f, 3, 0 },
    { "sketch, everything", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 600, 4, VIRTUAL, 0, { 6500, 3000, 256, 255 }, 0, 3, 0 },
    { "sketch, far logits", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 40, 0, VIRTUAL, 0, { 6500, 3000 }, 0, 400, 0 },
    { "sketch, a prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 64, 4, VIRTUAL, 1, { 4096 }, 0, 3, 0 },
    { "cluster without clusters", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 3000 }, 0, 3, 0 },
    { "cluster, short", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 3000 }, 0, 3, 1000 },
    { "cluster", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 18000, 9000, 3000 }, 0, 3, 1000 },
    { "cluster, forced, slices of 2", HSRI_INDEX_SKETCH, 32, 8, 16, 14, 2, 3, HSRI_SELECT_CLUSTER, 2, 40, 4,
      VIRTUAL, 0, { 17500, 8200 }, 0, 3, 2000 },
    { "cluster, prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 1, { 128 * 80 }, 0, 3, 1500 },
    { "cluster, families", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 18000, 9000, 3000 }, 0, 3, 300 },
    { "cluster, few families, forced", HSRI_INDEX_SKETCH, 32, 8, 16, 14, 2, 3, HSRI_SELECT_CLUSTER, 2, 8, 4,
      VIRTUAL, 0, { 17500, 8300 }, 0, 3, 60 },
    { "cluster, families, prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 1, { 128 * 135 }, 0, 3, 200 },
    { "cluster, families, beyond range", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 18000 }, 0, 400, 500 },
    { "cluster, beyond range", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 40, 0, VIRTUAL, 0, { 12000 }, 0, 400, 1000 },
    { "cluster, everything", SKETCH24, 6, 1, 2, HSRI_SELECT_CLUSTER, 1, 600, 0, VIRTUAL, 0, { 9000 }, 0, 3, 1000 },
    { "sketch over clusters", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 40, 4, VIRTUAL, 0, { 18000, 9000, 3000 }, 0, 3, 1 },
    { "sketch over clusters, prompt run", SKETCH24, 6, 1, 2, HSRI_SELECT_SKETCH, 1, 40, 0, VIRTUAL, 1, { 128 * 80 }, 0, 3, 1 },
    { "mean", SKETCH24, 6, 1, 2, HSRI_SELECT_MEAN, 4, 40, 0, VIRTUAL, 0, { 6500 }, 0, 3, 0 },
    { "mean, ties", HSRI_INDEX_MINMAX, 20, 0, 0, 6, 1, 2, HSRI_SELECT_MEAN, 1, 42, 0, VIRTUAL, 0, { 3000 }, 0, 3, 0 },
    { "classic", HSRI_INDEX_GAUSSIAN, 64, 0, 0, 6, 1, 2, HSRI_SELECT_CLASSIC, 4, 40, 0, 0, 0, { 6500 }, 0, 3, 0 },
    { "minmax", HSRI_INDEX_MINMAX, 40, 0, 0, 4, 1, 2, HSRI_SELECT_MINMAX, 1, 40, 4, VIRTUAL, 0, { 6500, 200 }, 0, 3, 0 },
    { "gaussian", HSRI_INDEX_GAUSSIAN, 16, 0, 0, 2, 1, 2, HSRI_SELECT_GAUSSIAN, 4, 40, 4, VIRTUAL, 0, { 6500, 200 }, 0, 3, 0 },
    { "random", HSRI_INDEX_GAUSSIAN, 16, 0, 0, 2, 1, 2, HSRI_SELECT_RANDOM, 2, 40, 0, VIRTUAL, 0, { 6500, 700 }, 0, 3, 0 },
    { "history", HSRI_INDEX_GAUSSIAN, 16, 0, 0, 2, 1, 2, HSRI_SELECT_HISTORY, 1, 40, 4, VIRTUAL, 0, { 6500 }, 0, 3, 0 },
    { "oracle", HSRI_INDEX_SKETCH, 32, 16, 0, 4, 1, 2, HSRI_SELECT_ORACLE, 1, 40, 4, VIRTUAL, 0, { 3000, 200 }, 0, 3, 0 },
};

/* A scenario's world at one level of instructions, on devices with several threads and with none of their own, at once and later. */
typedef struct fixture {
    const scenario *s;
    world       *w;
    hsri_kernels kernels;
    rig          one, others[3];
    uint32_t     n_others;
    result       all;        /* what all rows together select */
} fixture;

static fixture fixture_open(const scenario *s, world *w, int32_t isa)
{
    fixture f = { s, w, .one = rig_open(1, isa, false), .others = { rig_open(3, isa, true) }, .n_others = 1 };

    hsri_kernels_fill(&f.kernels, isa);
    if (!CHECK_SANITIZED) {
        f.others[f.n_others++] = rig_open(4, isa, false);
        f.others[f.n_others++] = rig_open(1, isa, true);
    }
    load_world(&f.one, w);
    for (uint32_t i = 0; i < f.n_others; i++)
        load_world(&f.others[i], w);
    f.all = run_select(&f.one, w, 0, w->n_picks);
    memcpy(w->rotated, f.all.rotated, w->n_rows * w->n_heads * w->d * sizeof(float));
    return f;
}

static void fixture_close(fixture *f)
{
    result_free(&f->all);
    rig_close(&f->one);
    for (uint32_t i = 0; i < f->n_others; i++)
        rig_close(&f->others[i]);
}

/* Each pick alone gets what it got among all. */
static void check_alone(const world *w, rig *r, const result *all)
{
    for (uint32_t pick = 0; pick < w->n_picks; pick++) {
        result alone = run_select(r, w, pick, 1);

        if (!CHECK(same(w, all, pick, &alone, 1)))
            fprintf(stderr, "pick %u alone differs\n", pick);
        result_free(&alone);
    }
}

static void test_select(fixture *f)
{
    const world *w = f->w;
    double       tolerance = f->s->selector == HSRI_SELECT_SKETCH || f->s->selector == HSRI_SELECT_CLUSTER ? 0.05 : 2e-3;

    check_rotated(w, &f->all);
    for (uint32_t i = 0; i < w->n_picks * KV_HEADS; i++)
        check_list(w, &f->kernels, &f->all, i / KV_HEADS, i % KV_HEADS, f->s->reach > 100 ? 0.5 : tolerance);
    check_alone(w, &f->one, &f->all);
    for (uint32_t i = 0; i < f->n_others; i++) {
        result again = run_select(&f->others[i], w, 0, w->n_picks);

        if (!CHECK(same(w, &f->all, 0, &again, w->n_picks)))
            fprintf(stderr, "device %u differs\n", i);
        result_free(&again);
    }
}

/* All clusters looked at, selector cluster is sketch to the bit: both read the records. */
static void test_all_candidates(fixture *f)
{
    world  w = *f->w;
    result all;

    for (uint32_t i = 0; i < w.n_seqs; i++) {
        w.settings[i].selector = HSRI_SELECT_CLUSTER;
        w.settings[i].candidates = MOST_SEGMENTS * HSRI_SEGMENT_TOKENS;
    }
    all = run_select(&f->one, &w, 0, w.n_picks);
    CHECK(same(&w, &f->all, 0, &all, w.n_picks));
    result_free(&all);
}

/* What is set aside leaves the lists, in order, and counts as if it had never been selected: the oracle is that of select. */
static void test_aside(fixture *f)
{
    world         w = *f->w;
    const result *before = &f->all;
    result        after, again;
    uint32_t      n_aside = 0;

    w.aside = true;
    after = run_select(&f->one, &w, 0, w.n_picks);
    again = run_select(&f->others[0], &w, 0, w.n_picks);
    CHECK(same(&w, &after, 0, &again, w.n_picks));
    for (uint32_t i = 0; i < w.n_picks * KV_HEADS; i++) {
        const uint32_t *had = before->units + i * w.stride, *has = after.units + i * w.stride;
        uint32_t        n = 0;

        for (uint32_t u = 0; u < before->counts[i]; u++)
            if (!is_away(i, had[u])) {
                CHECK(n < after.counts[i] && has[n] == had[u]);
                n++;
            }
        CHECK(n == after.counts[i]);
        n_aside += before->counts[i] - n;
        /* Far logits come out a little different in the company of other pages: the AVX-512 kernels share scales in a chunk. */
        check_list(&w, &f->kernels, &after, i / KV_HEADS, i % KV_HEADS, f->s->reach > 100 ? 1.0 : 0.05);
    }
    CHECK(n_aside > 0);
    check_alone(&w, &f->others[0], &after);
    result_free(&again);
    result_free(&after);
}

/* The scan of a list: how many pages, and which. */
static const uint32_t *scan_at(const world *w, const result *r, uint32_t list)
{
    return r->scans + list / KV_HEADS * scan_words(w) + hsri_scan_at(KV_HEADS, w->n_heads, w->scan_pages, LAYER, list % KV_HEADS);
}

static bool scan_has(const uint32_t *scan, uint32_t page)
{
    for (uint32_t i = 0; i < scan[0]; i++)
        if (scan[1 + i] == page)
            return true;
    return false;
}

static bool list_has(const uint32_t *units, uint32_t n, uint32_t page)
{
    for (uint32_t i = 0; i < n; i++)
        if (units[i] / HSRI_PAGE_UNITS == page)
            return true;
    return false;
}

/* With few pages the scan has the best ones: those of the list, or, of the list's, the most probable. */
static void check_scan(const world *w, const result *was, const result *r, uint32_t list)
{
    const uint32_t *scan = scan_at(w, r, list), *units = was->units + list * w->stride;
    bool            in_list = true, in_scan = true;

    for (uint32_t i = 0; i < scan[0]; i++) {
        CHECK(i == 0 || scan[1 + i] > scan[i]);
        in_list &= list_has(units, was->counts[list], scan[1 + i]);
    }
    for (uint32_t i = 0; i < was->counts[list]; i++)
        in_scan &= scan_has(scan, units[i] / HSRI_PAGE_UNITS);
    CHECK(in_list || in_scan);
}

/* Nor where so few clusters have masses within range that lists are filled up with units that have none. */
static bool can_foresee(const scenario *s)
{
    return (s->candidates != 500 || s->reach < 100) && !s->run && !s->n_forced && s->selector != HSRI_SELECT_CLASSIC &&
           s->selector != HSRI_SELECT_RANDOM;
}

/* Guessing the same query among all pages is selecting. */
static void check_foresee_same(fixture *f)
{
    world  w = *f->w;
    result now;

    w.guess = w.queries;
    w.scan_pages = w.most_pages;
    now = run_select(&f->one, &w, 0, w.n_picks);
    for (uint32_t i = 0; i < w.n_picks * KV_HEADS && !f->s->candidates; i++)
        CHECK(f->all.counts[i] == now.counts[i] &&
              memcmp(f->all.units + i * w.stride, now.units + i * w.stride, now.counts[i] * 4) == 0);
    result_free(&now);
}

/* Another query's choice is made among the pages of the scan. */
static void test_foresee(fixture *f)
{
    world   w = *f->w;
    float  *guess = malloc(w.n_rows * w.n_heads * w.d * sizeof *guess);
    result  now, again;

    check_foresee_same(f);
    fill_noise(guess, w.n_rows * w.n_heads * w.d, 55, f->s->reach);
    w.guess = guess;
    w.scan_pages = 12;
    now = run_select(&f->one, &w, 0, w.n_picks);
    again = run_select(&f->others[0], &w, 0, w.n_picks);
    CHECK(same(&w, &now, 0, &again, w.n_picks));
    result_free(&again);
    for (uint32_t i = 0; i < w.n_picks * KV_HEADS; i++) {
        const uint32_t *scan = scan_at(&w, &now, i), *units = now.units + i * w.stride;

        CHECK(now.counts[i] <= 4 * scan[0] && (now.counts[i] > 0) == (scan[0] > 0) && scan[0] <= 12);
        for (uint32_t u = 0; u < now.counts[i]; u++)
            CHECK((u == 0 || units[u] > units[u - 1]) && scan_has(scan, units[u] / HSRI_PAGE_UNITS));
        check_scan(&w, &f->all, &now, i);
    }
    check_alone(&w, &f->others[0], &now);
    result_free(&now);

    /* Of a sequence that was cut to less than the scan saw, nothing is guessed. */
    w.cut = sealed_pages(&w, w.rows[0].pos) - w.sink - 1;
    now = run_select(&f->one, &w, 0, 1);
    CHECK(now.counts[0] == 0 && now.counts[1] == 0);
    result_free(&now);
    free(guess);
}

/* A query that is not a number: its head counts for nothing, the list comes from the others, nothing crashes. */
static void test_nan(fixture *f)
{
    world         w = *f->w;
    const result *before = &f->all;
    result        after;

    w.queries = malloc(w.n_rows * w.n_heads * w.d * sizeof *w.queries);
    w.acc = malloc(w.n_rows * w.n_heads * (w.d + 2) * sizeof *w.acc);
    memcpy(w.queries, f->w->queries, w.n_rows * w.n_heads * w.d * sizeof *w.queries);
    memcpy(w.acc, f->w->acc, w.n_rows * w.n_heads * (w.d + 2) * sizeof *w.acc);
    for (uint32_t i = 0; i < w.d; i++)
        w.queries[i] = NAN;
    w.acc[0] = NAN;
    after = run_select(&f->one, &w, 0, w.n_picks);
    CHECK(after.counts[0] == before->counts[0] && isnan(after.covered[0]) && after.virtual_part[1] == 0.0f);
    CHECK(after.covered[1] >= 0.0f && after.covered[1] <= 1.0f);
    CHECK(memcmp(after.units + w.stride, before->units + w.stride, before->counts[1] * sizeof(uint32_t)) == 0);
    result_free(&after);

    for (uint32_t i = 0; i < w.n_heads * w.d; i++)
        w.queries[i] = NAN;
    after = run_select(&f->one, &w, 0, w.n_picks);
    CHECK(after.counts[0] == before->counts[0] && after.units[0] == w.sink * 4);   /* all alike: the first ones */
    result_free(&after);
    free(w.queries);
    free(w.acc);
}

/* ---- speed ---- */

/* A sequence of n pages, all of whose entries are copies of a few. */
static world *bench_world(const hsri_kernels *kernels, uint32_t n_heads, uint32_t n_4bit, uint32_t n_2bit, uint32_t n_pages)
{
    scenario s = { "bench", HSRI_INDEX_SKETCH, 64, n_4bit, n_2bit, n_heads, 1, 8, HSRI_SELECT_SKETCH, 1, 64, 0, VIRTUAL, 0, { 64 * 100 }, 0,
                   3, 0 };
    world   *w = world_new(&s, kernels);
    uint32_t n_slabs = n_pages / w->shape.per_slab + 1, n = n_slabs * LAYERS * KV_HEADS, slab_blocks = (n + SLABS - 1) / SLABS;
    uint32_t strip_bytes = hsri_strip_slot_bytes(&w->shape), per_block = HSRI_BLOCK_BYTES / strip_bytes;
    uint32_t n_strips = (strips_of(w, n_pages) + 1) * LAYERS * KV_HEADS;
    uint32_t first = LAYER * KV_HEADS;      /* of the small world, the first slab and the first strip are full */
    const uint8_t *slab = w->pool + (w->slabs[0][first] & 255) * HSRI_SLAB_BYTES;
    const uint8_t *strip = w->pool + HSRI_BLOCK_BYTES + (uint64_t)(w->strips[0][first] & 255) * strip_bytes;

    w->rows[0].pos = (n_pages + 8) * 64;
    w->most_pages = n_pages;
    free(w->slabs[0]);
    free(w->strips[0]);
    free(w->pages[0]);
    w->slabs[0] = calloc(n, sizeof(uint32_t));
    w->strips[0] = calloc(n_strips, sizeof(uint32_t));
    w->pages[0] = calloc((n_pages + 9) * LAYERS * KV_HEADS, sizeof(uint32_t));
    for (uint32_t i = 0; i < n; i++)
        w->slabs[0][i] = i / SLABS << 8 | i % SLABS;
    for (uint32_t i = 0; i < n_strips; i++)
        w->strips[0][i] = (slab_blocks + i / per_block) << 8 | i % per_block;
    w->pool_bytes = (slab_blocks + n_strips / per_block + 1ull) * HSRI_BLOCK_BYTES;
    uint8_t *pool = hsri_new_aligned(w->pool_bytes, 1);
    for (uint32_t i = 0; i < n; i++)
        memcpy(pool + (uint64_t)i * HSRI_SLAB_BYTES, slab, HSRI_SLAB_BYTES);
    for (uint32_t i = 0; i < n_strips; i++)
        memcpy(pool + (slab_blocks + i / per_block) * (uint64_t)HSRI_BLOCK_BYTES + (uint64_t)(i % per_block) * strip_bytes, strip,
               strip_bytes);
    free(w->pool);
    w->pool = pool;
    return w;
}

/* Nanoseconds of one call of the scoring kernel for each (token, kv head), the best of many passes over all pages. */
static double time_score(const world *w, const hsri_kernels *kernels, uint32_t n_pages)
{
    const uint8_t **entries = malloc(n_pages * sizeof *entries), **codes = malloc(n_pages * sizeof *codes);
    float          *mass = malloc(group_of(w) * n_pages * 4 * sizeof *mass), references[64] = { 0 };
    double          best = 1e30;

    for (uint32_t i = 0; i < n_pages; i++) {
        entries[i] = entry_of(w, 0, 0, w->sink + i);
        codes[i] = codes_of(w, 0, 0, w->sink + i);
    }
    for (uint32_t pass = 0; pass < 5 + 20000 / n_pages; pass++) {
        uint64_t start = hsri_now_ns();

        for (uint32_t p = 0; p < n_pages; p += HSRI_SCORE_PAGES) {
            hsri_score_args a = { .entries = entries + p, .codes = codes + p, .n_pages = (uint32_t)hsri_min(HSRI_SCORE_PAGES, n_pages - p),
                                  .n_heads = group_of(w), .shape = &w->shape,
                                  .scale = w->scale, .queries = w->queries, .rotated = w->queries, .reference = references,
                                  .mean_k = record_of(w, 0) + 2 * w->d * w->d, .mass = mass + 4 * p, .mass_stride = n_pages * 4 };

            kernels->sparse.score_sketch(&a);
        }
        best = fmin(best, (double)(hsri_now_ns() - start) / n_pages / 64);
    }
    free(entries);
    free(codes);
    free(mass);
    return best;
}

static double time_select(const world *w, int32_t isa, int32_t n_threads)
{
    rig          r = rig_open(n_threads, isa, false);
    uint32_t     n_pages = w->most_pages, d = w->d;
    hsri_kv_view kv = (load_world(&r, w), view_of(&r, w));
    hsri_seq     seq = { .sealed = upload(&r, w->pages[0], 4), .index = upload(&r, w->slabs[0],
                                                                               (n_pages / w->shape.per_slab + 1) * LAYERS * KV_HEADS * 4),
                         .strips = upload(&r, w->strips[0], (strips_of(w, n_pages) + 1) * LAYERS * KV_HEADS * 4),
                         .sink_pages = w->sink, .window_pages = w->window, .index_shape = w->shape };
    hsri_batch   batch = { .n_rows = 1, .n_seqs = 1, .rows = upload(&r, w->rows, sizeof *w->rows), .seqs = upload(&r, &seq, sizeof seq) };
    hsri_ref     queries = upload(&r, w->queries, w->n_heads * d * 4), acc = upload(&r, w->acc, w->n_heads * (d + 2) * 4);
    hsri_ref     settings = upload(&r, w->settings, sizeof *w->settings), picks = upload(&r, w->picks, sizeof *w->picks);
    hsri_ref     scratch = room(&r, hsri_select_scratch(1, 1, w->n_heads, KV_HEADS, d, n_pages + 9, w->shape.clusters));
    hsri_lists   lists = { .stride = w->stride, .n_picks = 1, .units = room(&r, KV_HEADS * w->stride * 4), .counts = room(&r, KV_HEADS * 4),
                           .virtual_part = room(&r, w->n_heads * (d + 2) * 4), .covered = room(&r, w->n_heads * 4) };
    double       best = 1e30;

    for (uint32_t pass = 0; pass < 5 + 20000 / n_pages; pass++) {
        uint64_t start = hsri_now_ns();

        r.dev->ops.select(r.q, &batch, &kv, LAYER, w->n_heads, w->scale, queries, queries, acc, settings, picks, scratch, &lists);
        CHECK(r.dev->wait(r.q, NULL) == HSR_OK);
        best = fmin(best, (double)(hsri_now_ns() - start) / n_pages / 64 / KV_HEADS);
    }
    rig_close(&r);
    return best;
}

static int bench(int32_t n_threads, int32_t isa)
{
    static const struct { uint32_t n_4bit, n_2bit; } shapes[] = { { 24, 0 }, { 16, 16 }, { 8, 48 } };
    static const uint32_t tokens[] = { 8192, 32768, 131072 }, groups[] = { 3, 4, 7 };

    printf("ns for each (token, kv head): scoring kernel on one thread, GB/s it reads; select on %d threads\n", (int)n_threads);
    hsri_kernels kernels;

    hsri_kernels_fill(&kernels, isa);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
            printf("%-10s %2u x 4 bit + %2u x 2 bit, %u heads:", hsri_isa_name(isa), shapes[s].n_4bit, shapes[s].n_2bit, groups[g]);
            for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
                world *w = bench_world(&kernels, groups[g] * KV_HEADS, shapes[s].n_4bit, shapes[s].n_2bit, tokens[t] / 64);
                double score = time_score(w, &kernels, tokens[t] / 64);

                printf("  %3uK %.2f (%.1f GB/s) %.2f", tokens[t] / 1024, score, (w->shape.entry_bytes + w->shape.code_bytes) / 64.0 / score,
                       time_select(w, isa, n_threads));
                fflush(stdout);
                world_free(w);
            }
            printf("\n");
        }
    }
    return 0;
}

static void test_at_level(const scenario *s, world *w, int32_t isa, bool nan)
{
    fixture f = fixture_open(s, w, isa);

    test_select(&f);
    if (s->selector == HSRI_SELECT_SKETCH && !s->run)
        test_aside(&f);
    if (s->selector == HSRI_SELECT_SKETCH && s->candidates)
        test_all_candidates(&f);
    if (can_foresee(s))
        test_foresee(&f);
    if (nan)
        test_nan(&f);
    fixture_close(&f);
}

/* Do both levels select with the same kernels? Which ones assign tokens to clusters does not matter. */
static bool select_alike(int32_t a, int32_t b)
{
    hsri_sparse_kernels of_a, of_b;

    hsri_sparse_kernels_fill(&of_a, a);
    hsri_sparse_kernels_fill(&of_b, b);
    of_a.cluster.assign = of_b.cluster.assign;
    return memcmp(&of_a, &of_b, sizeof of_a) == 0;
}

/* Entries and cluster records have the same bytes at every level (test_index.c, test_cluster.c), so the fastest makes them for all. */
static void test_scenario(const scenario *s, bool nan)
{
    const int32_t best = (int32_t)hsri_min((uint64_t)hsri_cpu_isa(), HSR_ISA_AVX512);
    hsri_kernels  kernels;
    world        *w;

    hsri_kernels_fill(&kernels, best);
    w = world_new(s, &kernels);
    if (s->candidates)
        make_clusters(w, best);
    for (int32_t isa = HSR_ISA_REFERENCE; isa <= hsri_cpu_isa(); isa++) {
        int before = check_failures;

        if (isa > HSR_ISA_REFERENCE && select_alike(isa, isa - 1))
            continue;
        test_at_level(s, w, isa, nan);
        if (check_failures > before)
            fprintf(stderr, "FAILED %s: %s\n", hsri_isa_name(isa), s->name);
    }
    world_free(w);
}

int main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : NULL;

    if (only && strcmp(only, "--bench") == 0)
        return bench(argc > 2 ? atoi(argv[2]) : 1, argc > 3 ? atoi(argv[3]) : (int32_t)hsri_min((uint64_t)hsri_cpu_isa(), HSR_ISA_AVX512));
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        if (!only || strcmp(only, scenarios[i].name) == 0)
            test_scenario(&scenarios[i], i == 0);
    return CHECK_REPORT();
}
