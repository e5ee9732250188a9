/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over plain and encoded pages by every operation that reads them, against a computation in double precision over the decoded
 * pages; and the same bits for rows alone and together, for groups in one wave and in several, for every number of threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cpu.h"
#include "base/rng.h"
#include "check.h"
#include "device/cpu/backend.h"
#include "device/cpu/pages.h"
#include "device/device.h"
#include "open_device.h"

#define MIB (1u << 20)

enum { N_LAYERS = 2, LAYER = 1, N_KV = 2, N_HEADS = 6, MAX_BUFFERS = 64, N_SOME = 18 };

/* ---- a device and one sequence on it ---- */

typedef struct shape {
    hsri_kv_type plain, format;
    uint32_t     d, sink, window, n_tokens;
} shape;

typedef struct world {
    shape        s;
    hsri_device *dev;
    hsri_queue  *q;
    hsri_kernels reference;
    uint32_t     buffers[MAX_BUFFERS], n_buffers;
    hsri_kv_view kv;
    hsri_ref     seqs;
    uint32_t    *plain, *sealed;   /* entries */
    float       *calibration;
    uint32_t     n_pages;
    float       *decoded[2];       /* plain and sealed pages: [page][kv head]{ k[64][d], v[64][d] } */
} world;

static float noise(uint64_t seed, uint64_t i) { return (float)(2 * hsri_rng_unit(seed, i) - 1); }

static hsri_ref room(world *w, uint64_t bytes)
{
    uint32_t buf = 0;

    CHECK(w->n_buffers < MAX_BUFFERS && w->dev->alloc(w->dev, hsri_max(bytes, 4), &buf, NULL) == HSR_OK);
    w->buffers[w->n_buffers++] = buf;
    return (hsri_ref){ .buf = buf };
}

static hsri_ref upload(world *w, const void *data, uint64_t bytes)
{
    hsri_ref r = room(w, bytes);

    w->dev->copy_in(w->q, r, data, bytes);
    CHECK(w->dev->wait(w->q, NULL) == HSR_OK);
    return r;
}

static void *download(world *w, hsri_ref r, uint64_t bytes)
{
    void *data = malloc(bytes);

    w->dev->copy_out(w->q, data, r, bytes);
    CHECK(w->dev->wait(w->q, NULL) == HSR_OK);
    return data;
}

/* A = H diag(s) and B = H diag(1 / s), H a reflection: A B^T = I. */
static float *make_calibration(uint32_t d)
{
    uint64_t per = hsri_calibration_floats(d);
    float   *all = calloc(per * N_LAYERS * N_KV, sizeof *all), *u = malloc(d * sizeof *u);

    for (uint32_t r = 0; r < N_LAYERS * N_KV; r++) {
        float *a = all + r * per, *b = a + d * d, *mean = b + d * d, length = 0;

        for (uint32_t i = 0; i < d; i++) {
            u[i] = noise(900 + r, i);
            length += u[i] * u[i];
        }
        for (uint32_t i = 0; i < d; i++) {
            for (uint32_t j = 0; j < d; j++) {
                float h = (i == j) - 2 * u[i] * u[j] / length, scale = 2.0f / (1.0f + 0.1f * (float)j);

                a[i * d + j] = h * scale;
                b[i * d + j] = h / scale;
            }
            mean[i] = noise(950 + r, i);
            mean[d + i] = 0.5f * noise(960 + r, i);
        }
    }
    free(u);
    return all;
}

static void token_kv(const shape *s, uint32_t token, uint32_t head, float *k, float *v)
{
    uint64_t at = ((uint64_t)token * N_KV + head) * s->d;

    for (uint32_t j = 0; j < s->d; j++) {
        float fade = 1.0f / (1.0f + 0.05f * (float)j);

        k[j] = 2.0f * noise(31, at + j) * fade + noise(32, (uint64_t)token / 64 * s->d + j) + 2.0f * noise(33, head * s->d + j);
        v[j] = noise(34, at + j) + noise(35, (uint64_t)token / 64 * s->d + j);
    }
}

static uint8_t *slot_offset(const world *w, uint32_t entry, uint32_t format) { return hsri_slot_at(NULL, entry, w->kv.slot_bytes[format]); }

static void make_tables(world *w)
{
    uint32_t n = w->n_pages * N_LAYERS * N_KV, blocks = 0;
    uint32_t formats[2] = { w->s.plain, w->s.format };
    uint32_t **tables[2] = { &w->plain, &w->sealed };
    bool     encoded = w->s.format != w->s.plain;

    for (uint32_t i = 0; i < (encoded ? 2u : 1u); i++) {
        uint32_t per_block = MIB / w->kv.slot_bytes[formats[i]];

        *tables[i] = malloc(n * sizeof(uint32_t));
        for (uint32_t e = 0; e < n; e++) {
            uint32_t slot = (uint32_t)((uint64_t)e * 7919 % n);

            (*tables[i])[e] = (blocks + slot / per_block) << 8 | slot % per_block;
        }
        blocks += (n + per_block - 1) / per_block;
    }
    if (!encoded) {
        w->sealed = malloc(n * sizeof(uint32_t));
        memcpy(w->sealed, w->plain, n * sizeof(uint32_t));
    }
    CHECK(w->dev->reserve(w->dev, (uint64_t)blocks * MIB, &w->kv.pool_buf, NULL) == HSR_OK);
    CHECK(w->dev->commit(w->dev, w->kv.pool_buf, 0, (uint64_t)blocks * MIB, NULL) == HSR_OK);
    w->buffers[w->n_buffers++] = w->kv.pool_buf;
}

static void write_pages(world *w)
{
    uint32_t d = w->s.d, bytes = (uint32_t)hsri_plain_page_bytes(w->s.plain, d);
    uint8_t *slot = malloc(bytes);
    float   *k = malloc(d * sizeof *k), *v = malloc(d * sizeof *v);

    for (uint32_t page = 0; page < w->n_pages; page++) {
        for (uint32_t head = 0; head < N_KV; head++) {
            memset(slot, 0xff, bytes);   /* NaN where no token is */
            for (uint32_t t = 0; t < 64 && page * 64 + t < w->s.n_tokens; t++) {
                token_kv(&w->s, page * 64 + t, head, k, v);
                w->reference.page_put[w->s.plain](slot, d, t, k, v);
            }
            hsri_ref to = { .buf = w->kv.pool_buf,
                            .offset = (uint64_t)(uintptr_t)slot_offset(w, w->plain[(page * N_LAYERS + LAYER) * N_KV + head], w->s.plain) };
            w->dev->copy_in(w->q, to, slot, bytes);
            CHECK(w->dev->wait(w->q, NULL) == HSR_OK);
        }
    }
    free(slot);
    free(k);
    free(v);
}

static void seal_pages(world *w)
{
    uint32_t   n = w->s.n_tokens / 64 * N_KV;
    hsri_seal *seals = calloc(n, sizeof *seals);

    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = (i / N_KV * N_LAYERS + LAYER) * N_KV + i % N_KV;

        seals[i] = (hsri_seal){ .lineage = 77, .entry = w->plain[at], .sealed = w->sealed[at], .page = i / N_KV, .layer = LAYER,
                                .head = (uint16_t)(i % N_KV), .kv_type = (uint16_t)w->s.plain, .format = (uint16_t)w->s.format };
    }
    w->dev->ops.seal(w->q, &w->kv, upload(w, seals, n * sizeof *seals), n);
    CHECK(w->dev->wait(w->q, NULL) == HSR_OK);
    free(seals);
}

/* Sealed pages have a header and are close to what they were made from; all pages are decoded for the naive computation. */
static void decode_pages(world *w)
{
    uint32_t   d = w->s.d;
    uint64_t   n = 2ull * 64 * d;
    hsri_spent lost = { 0 }, told = w->dev->spent(w->dev);

    for (uint32_t which = 0; which < 2; which++) {
        uint32_t        format = which ? w->s.format : w->s.plain;
        const uint32_t *entries = which ? w->sealed : w->plain;
        uint64_t        bytes = hsri_page_bytes((hsri_kv_type)format, d);

        w->decoded[which] = malloc(w->n_pages * N_KV * n * sizeof(float));
        for (uint32_t i = 0; i < w->n_pages * N_KV; i++) {
            float   *k = w->decoded[which] + i * n;
            uint32_t entry = entries[(i / N_KV * N_LAYERS + LAYER) * N_KV + i % N_KV];
            hsri_ref at = { .buf = w->kv.pool_buf, .offset = (uint64_t)(uintptr_t)slot_offset(w, entry, format) };
            uint8_t *slot = download(w, at, bytes);
            hsri_calibration_record record = hsri_calibration_at(w->calibration, N_KV, LAYER, i % N_KV, d);

            if (hsri_kv_is_plain(format) || (i / N_KV + 1) * 64 <= w->s.n_tokens)
                hsri_cpu_page_decode(&w->reference, (hsri_kv_type)format, slot, d, &record, k, k + 64 * d);
            if (which && (i / N_KV + 1) * 64 <= w->s.n_tokens) {
                const hsri_page_header *h = (const hsri_page_header *)(const void *)slot;

                CHECK(h->magic == HSRI_PAGE_MAGIC && h->lineage == 77 && h->page == i / N_KV && h->layer == LAYER && h->head == i % N_KV);
                CHECK(h->format == w->s.format && h->head_dim == d);
                CHECK(hsri_kv_is_plain(format) ? h->error == 0 : h->error > 0 && h->error < 0.3f);
                lost.n_encoded += !hsri_kv_is_plain(format);
                lost.error_sum += (double)h->error;
                lost.error_max = fmax(lost.error_max, (double)h->error);
            }
            free(slot);
        }
    }
    CHECK(told.n_encoded == lost.n_encoded && told.error_sum == lost.error_sum && told.error_max == lost.error_max);
}

static world world_open(shape s, int32_t n_threads, int32_t isa, bool async)
{
    world w = { .s = s, .n_pages = (s.n_tokens + 63) / 64 };

    open_device(n_threads, isa, async, &w.dev, &w.q);
    hsri_kernels_fill(&w.reference, HSR_ISA_REFERENCE);
    w.calibration = make_calibration(s.d);
    w.kv = (hsri_kv_view){ .n_layers = N_LAYERS, .n_kv_heads = N_KV, .head_dim = s.d,
                           .calibration = upload(&w, w.calibration, hsri_calibration_floats(s.d) * N_LAYERS * N_KV * sizeof(float)) };
    for (uint32_t f = 0; f < HSRI_N_KV_FORMATS; f++)
        w.kv.slot_bytes[f] = (uint32_t)hsri_round_up(hsri_page_bytes((hsri_kv_type)f, s.d), 4096);
    make_tables(&w);
    write_pages(&w);
    seal_pages(&w);
    decode_pages(&w);
    uint32_t n = w.n_pages * N_LAYERS * N_KV * 4;
    hsri_seq seq = { .table = upload(&w, w.plain, n), .sealed = upload(&w, w.sealed, n), .kv_type = s.plain, .format = s.format,
                     .sink_pages = s.sink, .window_pages = s.window };
    w.seqs = upload(&w, &seq, sizeof seq);
    return w;
}

static void world_close(world *w)
{
    for (uint32_t i = 0; i < w->n_buffers; i++)
        w->dev->free(w->dev, w->buffers[i]);
    w->dev->queue_destroy(w->q);
    w->dev->destroy(w->dev);
    free(w->plain);
    free(w->sealed);
    free(w->calibration);
    free(w->decoded[0]);
    free(w->decoded[1]);
}

/* ---- the naive computation ---- */

typedef struct naive {
    double m, l, o[256], size;   /* of what was seen so far, relative to m; size: the largest value */
} naive;

static float query_at(uint32_t pos, uint32_t head, uint32_t d, uint32_t j)
{
    return 1.5f * noise(40 + head, (uint64_t)pos * d + j) / (1.0f + 0.03f * (float)j);
}

/* A whole query; the last one asked for is kept, as its tokens are seen one by one. */
static const float *query_of(uint32_t pos, uint32_t head, uint32_t d)
{
    static float    query[256];
    static uint32_t of[3];

    if (of[0] != pos || of[1] != head || of[2] != d)
        for (uint32_t j = 0; j < d; j++)
            query[j] = query_at(pos, head, d, j);
    of[0] = pos;
    of[1] = head;
    of[2] = d;
    return query;
}

static double largest(const float *v, uint32_t n)
{
    float most = 0;

    for (uint32_t j = 0; j < n; j++)
        most = fabsf(v[j]) > most ? fabsf(v[j]) : most;
    return most;
}

static void naive_see(const world *w, naive *n, uint32_t pos, uint32_t head, uint32_t token, bool sealed)
{
    uint32_t     d = w->s.d, kv_head = head / (N_HEADS / N_KV);
    const float *page = w->decoded[sealed] + ((uint64_t)token / 64 * N_KV + kv_head) * 2 * 64 * d;
    const float *k = page + token % 64 * d, *v = page + 64 * d + token % 64 * d, *q = query_of(pos, head, d);
    double       s = 0, m, old, weight;

    for (uint32_t j = 0; j < d; j++)
        s += (double)q[j] * k[j];
    s *= 0.25;
    m = fmax(n->m, s);
    old = exp(n->m - m);
    weight = exp(s - m);
    n->m = m;
    n->l = n->l * old + weight;
    for (uint32_t j = 0; j < d; j++)
        n->o[j] = n->o[j] * old + weight * v[j];
    n->size = fmax(n->size, largest(v, d));
}

static bool reads_sealed(const shape *s, uint32_t page, uint32_t pos)
{
    return !hsri_kv_is_plain(s->format) && page >= s->sink && page + s->window <= pos / 64;
}

/* ---- runs ---- */

typedef enum op { DENSE, FIXED, FIXED_RUNS, LIST, LIST_RUNS } op;

static bool is_list(op op) { return op == LIST || op == LIST_RUNS; }
static uint32_t group_units(op op) { return op == LIST_RUNS ? HSRI_RUN_GROUP_UNITS : HSRI_LIST_GROUP_UNITS; }

typedef struct call {
    op              op;
    const uint32_t *pos;
    uint32_t        n_rows, g0, g1;
    const uint32_t *pick_of, *units, *counts;   /* of lists */
    uint32_t        n_picks, stride;
} call;

static void rotate(const world *w, uint32_t head, const float *q, float *rotated)
{
    uint32_t d = w->s.d;
    hsri_calibration_record record = hsri_calibration_at(w->calibration, N_KV, LAYER, head / (N_HEADS / N_KV), d);

    for (uint32_t j = 0; j < d; j++) {
        double sum = 0;

        for (uint32_t i = 0; i < d; i++)
            sum += (double)q[i] * record.b[i * d + j];
        rotated[j] = (float)sum;
    }
}

/* A call's arguments on the device. */
typedef struct inputs {
    hsri_batch batch;
    hsri_ref   queries, rotated, pick_of;
    hsri_lists lists;
    uint32_t   n_kept;         /* buffers from here on are the call's */
} inputs;

static inputs prepare(world *w, const call *c)
{
    inputs    in = { .n_kept = w->n_buffers };
    uint32_t  d = w->s.d;
    uint64_t  n = (uint64_t)c->n_rows * N_HEADS;
    hsri_row *rows = calloc(c->n_rows, sizeof *rows);
    float    *queries = malloc(n * d * sizeof *queries), *rotated = malloc(n * d * sizeof *rotated);

    for (uint32_t i = 0; i < c->n_rows; i++) {
        rows[i].pos = c->pos[i];
        for (uint32_t h = 0; h < N_HEADS; h++) {
            for (uint32_t j = 0; j < d; j++)
                queries[(i * N_HEADS + h) * d + j] = query_at(c->pos[i], h, d, j);
            rotate(w, h, queries + (i * N_HEADS + h) * d, rotated + (i * N_HEADS + h) * d);
        }
    }
    in.batch = (hsri_batch){ upload(w, rows, c->n_rows * sizeof *rows), w->seqs, c->n_rows, 1 };
    in.queries = upload(w, queries, n * d * sizeof *queries);
    in.rotated = upload(w, rotated, n * d * sizeof *rotated);
    if (is_list(c->op)) {
        in.lists = (hsri_lists){ .units = upload(w, c->units, (uint64_t)c->n_picks * N_KV * c->stride * 4),
                                 .counts = upload(w, c->counts, (uint64_t)c->n_picks * N_KV * 4),
                                 .stride = c->stride, .n_picks = c->n_picks, .group_units = group_units(c->op) };
        in.pick_of = upload(w, c->pick_of, c->n_rows * 4);
    }
    free(rows);
    free(queries);
    free(rotated);
    return in;
}

static void drop(world *w, const inputs *in)
{
    for (; w->n_buffers > in->n_kept; w->n_buffers--)
        w->dev->free(w->dev, w->buffers[w->n_buffers - 1]);
}

static void attend(world *w, const call *c, const inputs *in, hsri_ref part, const hsri_fold *fold)
{
    hsri_ref q = in->queries, r = in->rotated;

    if (c->op == DENSE)
        w->dev->ops.attend(w->q, &in->batch, &w->kv, LAYER, N_HEADS, 0.25f, q, r, c->g0, c->g1, part, fold);
    else if (is_list(c->op))
        w->dev->ops.attend_list(w->q, &in->batch, &w->kv, LAYER, N_HEADS, 0.25f, q, r, in->pick_of, &in->lists, c->g0, c->g1, part, fold);
    else
        w->dev->ops.attend_fixed(w->q, &in->batch, &w->kv, LAYER, N_HEADS, 0.25f, q, r, c->g1, c->op == FIXED_RUNS, part, fold);
}

static float *run(world *w, const call *c)
{
    inputs   in = prepare(w, c);
    uint64_t bytes = (uint64_t)c->n_rows * N_HEADS * (c->g1 - c->g0) * (2 + w->s.d) * sizeof(float);
    hsri_ref part = room(w, bytes);
    float   *result;

    attend(w, c, &in, part, NULL);
    result = download(w, part, bytes);
    drop(w, &in);
    return result;
}

/* The naive computation is slow: of rows side by side it looks at every third, which meets every place in a tile of 2, 4 or 8. */
static bool is_looked_at(uint32_t row, uint32_t n_rows) { return row < N_SOME || row % 3 == 0 || row + 1 == n_rows; }

/* Which tokens group g of a row has. */
static void naive_group(const world *w, const call *c, uint32_t row, uint32_t head, uint32_t g, naive *n)
{
    uint32_t pos = c->pos[row], page = pos / 64, sink_groups = (w->s.sink + 15) / 16, first = 0, end = 0;

    *n = (naive){ .m = -INFINITY };
    if (is_list(c->op)) {
        uint32_t list = c->pick_of[row] * N_KV + head / (N_HEADS / N_KV);

        for (uint32_t i = g * group_units(c->op); i < (g + 1) * group_units(c->op) && i < c->counts[list]; i++)
            for (uint32_t t = 0; t < 16; t++)
                naive_see(w, n, pos, head, c->units[list * c->stride + i] * 16 + t, !hsri_kv_is_plain(w->s.format));
        return;
    }
    if (c->op == DENSE) {
        first = g * 16;
        end = first + 16;
    } else if (g < sink_groups) {
        first = g * 16;
        end = first + 16 < w->s.sink ? first + 16 : w->s.sink;
    } else if (g == sink_groups) {
        if (c->op == FIXED_RUNS && page % 2 == 1 && page >= w->s.window + w->s.sink) {
            first = page - w->s.window;
            end = first + 1;
        }
    } else {
        uint32_t start = page + 1 > w->s.window ? page + 1 - w->s.window : 0;

        first = (start > w->s.sink ? start : w->s.sink) + (g - sink_groups - 1) * 16;
        end = first + 16;
    }
    for (uint32_t t = first * 64; t < end * 64 && t <= pos; t++)
        naive_see(w, n, pos, head, t, reads_sealed(&w->s, t / 64, pos));
}

static void check_result(const world *w, const call *c, const float *part, double tolerance)
{
    uint32_t d = w->s.d, n_groups = c->g1 - c->g0;

    for (uint32_t i = 0; i < c->n_rows * N_HEADS * n_groups; i++) {
        const float *got = part + (uint64_t)i * (2 + d);
        naive        n;

        if (!is_looked_at(i / n_groups / N_HEADS, c->n_rows))
            continue;
        naive_group(w, c, i / n_groups / N_HEADS, i / n_groups % N_HEADS, c->g0 + i % n_groups, &n);
        if (n.l == 0) {
            if (!CHECK(got[0] == -INFINITY && got[1] == 0 && got[2] == 0 && got[1 + d] == 0))
                return;
            continue;
        }
        bool ok = fabs(got[0] + log(got[1]) - n.m - log(n.l)) <= tolerance;
        for (uint32_t j = 0; j < d && ok; j++)
            ok = fabs(got[2 + j] / got[1] - n.o[j] / n.l) <= tolerance * (1 + n.size);
        if (!CHECK(ok)) {
            fprintf(stderr, "  format %u, d %u, op %d, row at %u, head %u, group %u: m %g l %g o %g, expected %g %g %g\n", w->s.format, d,
                    c->op, c->pos[i / n_groups / N_HEADS], i / n_groups % N_HEADS, c->g0 + i % n_groups, (double)got[0], (double)got[1],
                    (double)(got[2] / got[1]), n.m, n.l, n.o[0] / n.l);
            return;
        }
    }
}

/* ---- parts of pages ---- */

enum { EVERY = 13 };           /* rows listed: every so many */

static uint32_t n_listed(const call *c) { return (c->n_rows + EVERY - 1) / EVERY; }

/* { m, l } of every page that a listed row may read, [listed][heads][pages]; in as many waves as there are groups, if it is asked. Lists
 * come on top of fixed groups. */
static float *run_parts(world *w, const call *c, bool waves)
{
    inputs   in = prepare(w, c);
    uint32_t n = n_listed(c), step = waves ? 1 : c->g1 - c->g0;
    uint64_t bytes = 2ull * n * N_HEADS * w->n_pages * sizeof(float);
    hsri_mass_row *rows = calloc(n, sizeof *rows);
    float   *result, *poison = malloc(bytes);

    for (uint32_t i = 0; i < n; i++)
        rows[i].row = i * EVERY;
    memset(poison, 0xA5, bytes);
    hsri_page_parts what = { .of = c->op == DENSE ? HSRI_PARTS_DENSE : HSRI_PARTS_FIXED, .runs = c->op == FIXED_RUNS,
                             .rows = upload(w, rows, n * sizeof *rows), .parts = upload(w, poison, bytes),
                             .n_rows = n, .n_pages = w->n_pages };
    if (c->op != DENSE)
        w->dev->ops.page_parts(w->q, &in.batch, &w->kv, LAYER, N_HEADS, 0.25f, in.queries, in.rotated, &what);
    what.of = c->op == DENSE ? HSRI_PARTS_DENSE : HSRI_PARTS_LISTS;
    what.pick_of = in.pick_of;
    what.lists = in.lists;
    for (what.g0 = c->g0; what.g0 < c->g1 && (c->op == DENSE || is_list(c->op)); what.g0 = what.g1) {
        what.g1 = what.g0 + step;
        w->dev->ops.page_parts(w->q, &in.batch, &w->kv, LAYER, N_HEADS, 0.25f, in.queries, in.rotated, &what);
    }
    result = download(w, what.parts, bytes);
    drop(w, &in);
    free(rows);
    free(poison);
    return result;
}

static bool is_fixed(const world *w, const call *c, uint32_t page, uint32_t pos)
{
    uint32_t q = pos / 64;
    bool     bridge = c->op == FIXED_RUNS && q % 2 == 1 && q >= w->s.sink + w->s.window && page == q - w->s.window;

    return page < w->s.sink || page + w->s.window > q || bridge;
}

static void naive_page(const world *w, const call *c, uint32_t row, uint32_t head, uint32_t page, naive *n)
{
    uint32_t pos = c->pos[row];

    *n = (naive){ .m = -INFINITY };
    for (uint32_t t = page * 64; t < page * 64 + 64 && t <= pos && (c->op == DENSE || is_fixed(w, c, page, pos)); t++)
        naive_see(w, n, pos, head, t, reads_sealed(&w->s, page, pos));
    if (!is_list(c->op))
        return;
    uint32_t list = c->pick_of[row] * N_KV + head / (N_HEADS / N_KV);
    for (uint32_t i = c->g0 * group_units(c->op); i < c->counts[list] && i < c->g1 * group_units(c->op); i++)
        for (uint32_t t = 0; t < 16 && c->units[list * c->stride + i] / 4 == page; t++)
            naive_see(w, n, pos, head, c->units[list * c->stride + i] * 16 + t, !hsri_kv_is_plain(w->s.format));
}

static void check_parts(const world *w, const call *c, const float *parts, double tolerance)
{
    for (uint32_t i = 0; i < n_listed(c); i++)
        for (uint32_t h = 0; h < N_HEADS; h += 3)
            for (uint32_t page = 0; page <= c->pos[i * EVERY] / 64; page++) {
                const float *got = parts + 2 * (((uint64_t)i * N_HEADS + h) * w->n_pages + page);
                naive        n;

                naive_page(w, c, i * EVERY, h, page, &n);
                bool ok = n.l == 0 ? got[0] == -INFINITY && got[1] == 0 : fabs(got[0] + log(got[1]) - n.m - log(n.l)) <= tolerance;
                if (CHECK(ok))
                    continue;
                fprintf(stderr, "  format %u, op %d, row at %u, head %u, page %u: m %g l %g, expected %g %g\n", w->s.format, c->op,
                        c->pos[i * EVERY], h, page, (double)got[0], (double)got[1], n.m, n.l);
                return;
            }
}

static void check_equal(const float *a, const float *b, uint64_t n) { CHECK(memcmp(a, b, n * sizeof *a) == 0); }

/* Each row alone, and the groups in waves. */
static void check_bits(world *w, const call *c, const float *part)
{
    uint32_t d = w->s.d, n_groups = c->g1 - c->g0;
    uint64_t per_row = (uint64_t)N_HEADS * n_groups * (2 + d);

    for (uint32_t row = 0; row < c->n_rows; row += c->n_rows > 40 ? 13 : 1) {
        call   one = *c;
        float *alone;

        one.pos += row;
        one.pick_of = c->pick_of ? c->pick_of + row : NULL;
        one.n_rows = 1;
        alone = run(w, &one);
        check_equal(alone, part + row * per_row, per_row);
        free(alone);
    }
    for (uint32_t g = c->g0; g < c->g1 && (c->op == DENSE || is_list(c->op)); g++) {
        call   wave = *c;
        float *alone;

        wave.g0 = g;
        wave.g1 = g + 1;
        alone = run(w, &wave);
        for (uint32_t i = 0; i < c->n_rows * N_HEADS; i++)
            check_equal(alone + (uint64_t)i * (2 + d), part + ((uint64_t)i * n_groups + g - c->g0) * (2 + d), 2 + d);
        free(alone);
    }
}

static void check_same(world *w, hsri_ref a, hsri_ref b, uint64_t n)
{
    float *x = download(w, a, n * sizeof *x), *y = download(w, b, n * sizeof *y);

    check_equal(x, y, n);
    free(x);
    free(y);
}

/* Folding at once gives the bits of merging partials: into a state that begins, into one that goes on, and into one that nobody wants. */
static void check_fold(world *w, const call *c)
{
    inputs   in = prepare(w, c);
    uint32_t d = w->s.d, n_groups = c->g1 - c->g0;
    uint64_t n = (uint64_t)c->n_rows * N_HEADS;
    hsri_ref none = { 0 }, part = room(w, n * n_groups * (2 + d) * 4), acc[2], out[2];

    for (uint32_t i = 0; i < 2; i++) {
        acc[i] = room(w, n * (2 + d) * 4);
        out[i] = room(w, n * d * 4);
    }
    attend(w, c, &in, part, NULL);
    w->dev->ops.merge(w->q, c->n_rows, N_HEADS, d, part, n_groups, &(hsri_fold){ 1, acc[0], out[0] });
    attend(w, c, &in, part, &(hsri_fold){ 1, none, out[1] });
    check_same(w, out[0], out[1], n * d);
    attend(w, c, &in, part, &(hsri_fold){ 1, acc[1], none });
    check_same(w, acc[0], acc[1], n * (2 + d));
    attend(w, c, &in, part, NULL);
    w->dev->ops.merge(w->q, c->n_rows, N_HEADS, d, part, n_groups, &(hsri_fold){ 0, acc[0], out[0] });
    attend(w, c, &in, part, &(hsri_fold){ 0, acc[1], out[1] });
    check_same(w, acc[0], acc[1], n * (2 + d));
    check_same(w, out[0], out[1], n * d);
    drop(w, &in);
}

/* ---- the calls ---- */

enum { MOST_RUN = 150, N_POS = N_SOME + MOST_RUN, N_LISTS = 5, STRIDE = 72, N_CALLS = 5 };

/* How many rows side by side: over two page boundaries, or over one where they take ten times as long. */
static uint32_t run_length(int32_t isa) { return CHECK_SANITIZED || isa == HSR_ISA_REFERENCE ? 70 : MOST_RUN; }

/* The last tokens of every kind of page, a few neighbours, then a run of rows. */
static uint32_t positions(const shape *s, uint32_t n_run, uint32_t *pos)
{
    static const uint32_t some[N_SOME] = { 0, 1, 63, 64, 65, 127, 128, 192, 255, 320, 500, 639, 640, 1000, 1023, 1024, 1100, 1300 };
    uint32_t n = 0;

    for (uint32_t i = 0; i < sizeof some / sizeof *some; i++)
        if (some[i] + n_run < s->n_tokens)
            pos[n++] = some[i];
    for (uint32_t i = 0; i < n_run; i++)
        pos[n++] = s->n_tokens - n_run + i;
    return n;
}

static uint32_t make_lists(const shape *s, uint32_t *units, uint32_t *counts)
{
    static const uint32_t wanted[] = { 1, 8, 9, 37, 16, 3, 0, 40, 25, 70 };
    uint32_t n_units = s->n_tokens / 64 * 4;

    for (uint32_t list = 0; list < N_LISTS * N_KV; list++) {
        uint32_t unit = list % 3;

        counts[list] = 0;
        for (uint32_t i = 0; i < wanted[list % 10] && unit < n_units; i++) {
            bool next = wanted[list % 10] > 40 || hsri_rng_unit(50, list * 100 + i) < 0.5;

            units[list * STRIDE + counts[list]++] = unit;
            unit += next ? 1 : 1 + (uint32_t)(4 * hsri_rng_unit(51, list * 100 + i));
        }
    }
    return N_LISTS;
}

/* What has no size has no relative error: one page of NaN does not hide what the others lost. */
static void test_error_of_nan(void)
{
    world      w = world_open((shape){ HSRI_KV_TYPE_F32, HSRI_KV_TYPE_INT8, 32, 1, 1, 256 }, 1, HSR_ISA_REFERENCE, false);
    uint64_t   bytes = hsri_plain_page_bytes(HSRI_KV_TYPE_F32, w.s.d);
    hsri_spent before = w.dev->spent(w.dev), after;
    uint8_t   *nan = malloc(bytes);
    hsri_ref   first = { .buf = w.kv.pool_buf,
                         .offset = (uint64_t)(uintptr_t)slot_offset(&w, w.plain[LAYER * N_KV], HSRI_KV_TYPE_F32) };

    memset(nan, 0xff, bytes);
    w.dev->copy_in(w.q, first, nan, bytes);
    seal_pages(&w);
    after = w.dev->spent(w.dev);
    CHECK(before.n_encoded == 4 * N_KV && after.n_encoded == 2 * before.n_encoded - 1);
    CHECK(after.error_sum > before.error_sum && after.error_sum < 2 * before.error_sum);
    free(nan);
    world_close(&w);
}

static void test_shape(shape s, int32_t isa)
{
    static const struct { int32_t n_threads; bool async; } variants[] = { { 1, false }, { 3, true }, { 2, false } };
    uint32_t pos[N_POS], pick_of[N_POS], run_of[N_POS], n = positions(&s, run_length(isa), pos);
    uint32_t units[N_LISTS * N_KV * STRIDE] = { 0 }, counts[N_LISTS * N_KV];
    float   *first[N_CALLS] = { NULL }, *heard[N_CALLS] = { NULL };

    for (uint32_t i = 0; i < n; i++) {
        run_of[i] = i * N_LISTS / n;
        pick_of[i] = i < 6 ? i % N_LISTS : run_of[i];
    }
    make_lists(&s, units, counts);
    call calls[] = {
        { .op = DENSE, .pos = pos, .n_rows = n, .g0 = 0, .g1 = (s.n_tokens + 1023) / 1024 },
        { .op = FIXED, .pos = pos, .n_rows = n, .g1 = 2 + (s.sink + 15) / 16 + (s.window + 15) / 16 },
        { .op = FIXED_RUNS, .pos = pos, .n_rows = n, .g1 = 2 + (s.sink + 15) / 16 + (s.window + 15) / 16 },
        { .op = LIST, .pos = pos, .n_rows = n, .g0 = 0, .g1 = 5, .pick_of = pick_of, .units = units, .counts = counts, .n_picks = N_LISTS,
          .stride = STRIDE },
        { .op = LIST_RUNS, .pos = pos, .n_rows = n, .g0 = 0, .g1 = 3, .pick_of = run_of, .units = units, .counts = counts,
          .n_picks = N_LISTS, .stride = STRIDE },
    };
    for (uint32_t v = 0; v < (run_length(isa) < MOST_RUN ? 2 : sizeof variants / sizeof *variants); v++) {
        world  w = world_open(s, variants[v].n_threads, isa, variants[v].async);
        bool   rounds = s.plain == HSRI_KV_TYPE_BF16 || s.format == HSRI_KV_TYPE_INT8 || s.format == HSRI_KV_TYPE_COMPACT;
        double tolerance = rounds && w.dev->isa == HSR_ISA_AMX ? 0.03 : 2e-4;

        for (uint32_t i = 0; i < N_CALLS; i++) {
            float   *part = run(&w, &calls[i]), *parts = run_parts(&w, &calls[i], v == 1);
            uint64_t n_parts = 2ull * n_listed(&calls[i]) * N_HEADS * w.n_pages;

            check_fold(&w, &calls[i]);
            if (v == 0) {
                first[i] = part;
                heard[i] = parts;
                check_parts(&w, &calls[i], parts, tolerance);
                check_result(&w, &calls[i], part, tolerance);
                check_bits(&w, &calls[i], part);
                continue;
            }
            check_equal(part, first[i], (uint64_t)n * N_HEADS * (calls[i].g1 - calls[i].g0) * (2 + s.d));
            check_equal(parts, heard[i], n_parts);
            free(part);
            free(parts);
        }
        world_close(&w);
    }
    for (uint32_t i = 0; i < N_CALLS; i++) {
        free(first[i]);
        free(heard[i]);
    }
}

int main(int argc, char **argv)
{
    int32_t first = HSR_ISA_REFERENCE, last = hsri_cpu_isa();

    if (last == HSR_ISA_AMX && !hsri_cpu_allow_amx())
        last = HSR_ISA_AVX512;
    if (argc > 1)   /* one level alone, by number */
        first = last = atoi(argv[1]);
    for (int32_t isa = first; isa <= last; isa++) {
        test_shape((shape){ HSRI_KV_TYPE_F32, HSRI_KV_TYPE_F32, 32, 1, 2, 1400 }, isa);
        test_shape((shape){ HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_BF16, 64, 2, 19, 1500 }, isa);
        test_shape((shape){ HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_INT8, 40, 1, 1, 1500 }, isa);
        test_shape((shape){ HSRI_KV_TYPE_F32, HSRI_KV_TYPE_COMPACT, 64, 1, 2, 1500 }, isa);
        test_shape((shape){ HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_COMPACT, 48, 0, 17, 1400 }, isa);
        test_shape((shape){ HSRI_KV_TYPE_F32, HSRI_KV_TYPE_VTQ, 32, 2, 1, 1400 }, isa);
    }
    /* Pages so large that a group of a prompt run is put together in pieces: the same at all levels. */
    test_shape((shape){ HSRI_KV_TYPE_F32, HSRI_KV_TYPE_F32, 192, 1, 2, 1400 }, last);
    test_error_of_nan();
    return CHECK_REPORT();
}
