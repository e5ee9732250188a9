/* SPDX-License-Identifier: Apache-2.0 */
/* Adding what rows attended to mass tables, and the pages with the most: against loops in double precision, for every number of
 * threads, and for rows in one call and in several. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/rng.h"
#include "check.h"
#include "device/device.h"
#include "open_device.h"

enum { N_LAYERS = 3, LAYER = 1, N_KV = 2, N_HEADS = 6, D = 16, N_SEQS = 3, N_ROWS = 9, N_LISTED = 6, N_PAGES = 150, N_RUNS = 3, ROOM = 32 };

#define TABLE ((uint64_t)N_RUNS * N_LAYERS * N_KV * HSRI_MASS_RUN)

typedef struct world {
    hsri_device *dev;
    hsri_queue  *q;
    hsri_kv_view kv;
    uint32_t     buffers[ROOM], n_buffers;
} world;

static world world_open(int32_t n_threads, bool async)
{
    world w = { .kv = { .n_layers = N_LAYERS, .n_kv_heads = N_KV, .head_dim = D } };

    open_device(n_threads, HSR_ISA_REFERENCE, async, &w.dev, &w.q);
    return w;
}

static hsri_ref upload(world *w, const void *data, uint64_t bytes)
{
    uint32_t buf = 0;

    CHECK(w->n_buffers < ROOM && w->dev->alloc(w->dev, bytes, &buf, NULL) == HSR_OK);
    w->buffers[w->n_buffers++] = buf;
    w->dev->copy_in(w->q, (hsri_ref){ .buf = buf }, data, bytes);
    CHECK(w->dev->wait(w->q, NULL) == HSR_OK);
    return (hsri_ref){ .buf = buf };
}

static void download(world *w, void *data, hsri_ref r, uint64_t bytes)
{
    w->dev->copy_out(w->q, data, r, bytes);
    CHECK(w->dev->wait(w->q, NULL) == HSR_OK);
}

static void world_close(world *w)
{
    while (w->n_buffers)
        w->dev->free(w->dev, w->buffers[--w->n_buffers]);
    w->dev->queue_destroy(w->q);
    w->dev->destroy(w->dev);
}

/* ---- sums ---- */

/* Rows of three sequences; the listed ones are those of the first and the last. Sequence 0 is known up to page 2, sequence 2 from the
 * start. */
static const hsri_row rows[N_ROWS] = {
    { 0, 63 }, { 0, 300 }, { 0, 9000 }, { 1, 5 }, { 2, 8000 }, { 2, 8001 }, { 2, 8127 }, { 2, 8128 }, { 2, 9599 },
};
static const hsri_mass_row listed[N_LISTED] = { { 1, 2 }, { 2, 5 }, { 4, 140 }, { 6, 140 }, { 7, 140 }, { 8, 140 } };

static float parts[N_LISTED][N_HEADS][N_PAGES][2], acc[N_ROWS][N_HEADS][2 + D];

static void fill(void)
{
    for (uint32_t i = 0; i < N_ROWS; i++)
        for (uint32_t h = 0; h < N_HEADS; h++) {
            acc[i][h][0] = (float)(3 * hsri_rng_unit(1, i * N_HEADS + h));
            acc[i][h][1] = (float)(1 + 9 * hsri_rng_unit(2, i * N_HEADS + h));
        }
    for (uint32_t i = 0; i < N_LISTED; i++)
        for (uint32_t h = 0; h < N_HEADS; h++)
            for (uint32_t page = 0; page < N_PAGES; page++) {
                const uint64_t at = (i * N_HEADS + h) * N_PAGES + page;
                const bool unread = hsri_rng_unit(3, at) < 0.5;

                parts[i][h][page][0] = unread ? -INFINITY : (float)(4 * hsri_rng_unit(4, at) - 2);
                parts[i][h][page][1] = unread ? 0.0f : (float)(64 * hsri_rng_unit(5, at));
            }
    parts[3][1][7][1] = NAN;   /* a page whose keys are no numbers counts for nothing */
}

static double naive_mass(uint32_t seq, uint32_t kv_head, uint32_t page, double start)
{
    double sum = start;

    for (uint32_t i = 0; i < N_LISTED; i++) {
        const uint32_t row = listed[i].row;
        double got = 0;

        if (rows[row].seq != seq || page > rows[row].pos / 64)
            continue;
        if (page >= listed[i].n_known)
            sum = 0;
        for (uint32_t h = kv_head * 3; h < kv_head * 3 + 3; h++)
            if (parts[i][h][page][1] != 0)
                got += (double)parts[i][h][page][1] * exp((double)parts[i][h][page][0] - (double)acc[row][h][0]) / (double)acc[row][h][1];
        sum += isfinite(got) ? got : 0;
    }
    return sum;
}

/* Tables of all sequences after the call, [N_SEQS][TABLE]; each listed row in a call of its own, if it is asked. */
static void add(world *w, bool one_by_one, float *tables)
{
    hsri_ref refs[N_SEQS], start = upload(w, parts, sizeof parts), list = upload(w, listed, sizeof listed);
    float   *old = malloc(TABLE * sizeof *old);

    for (uint64_t i = 0; i < TABLE; i++)
        old[i] = (float)i;
    for (uint32_t i = 0; i < N_SEQS; i++)
        refs[i] = upload(w, old, TABLE * sizeof *old);
    hsri_seq seqs[N_SEQS] = { 0 };
    hsri_batch batch = { upload(w, rows, sizeof rows), upload(w, seqs, sizeof seqs), N_ROWS, N_SEQS };
    hsri_page_parts what = { .tables = upload(w, refs, sizeof refs), .rows = list, .parts = start, .n_rows = N_LISTED, .n_pages = N_PAGES };
    hsri_ref states = upload(w, acc, sizeof acc);

    what.n_rows = one_by_one ? 1 : N_LISTED;
    for (uint32_t i = 0; i < N_LISTED; i += what.n_rows) {
        what.rows.offset = i * sizeof *listed;
        what.parts.offset = i * sizeof *parts;
        w->dev->ops.add_masses(w->q, &batch, &w->kv, LAYER, N_HEADS, states, &what);
    }
    for (uint32_t i = 0; i < N_SEQS; i++)
        download(w, tables + i * TABLE, refs[i], TABLE * sizeof *tables);
    free(old);
}

/* Where in the table: layer, kv head, page. */
static void check_sums(const float *tables)
{
    for (uint32_t seq = 0; seq < N_SEQS; seq++)
        for (uint32_t layer = 0; layer < N_LAYERS; layer++)
            for (uint32_t head = 0; head < N_KV; head++)
                for (uint32_t page = 0; page < N_RUNS * HSRI_MASS_RUN; page++) {
                    const uint64_t at = hsri_mass_at(N_LAYERS, N_KV, layer, head, page);
                    const float got = tables[seq * TABLE + at];

                    if (layer != LAYER || seq == 1)
                        CHECK(got == (float)at);
                    else if (!CHECK(fabs((double)got - naive_mass(seq, head, page, (double)at)) <= 1e-5 * (1 + (double)at)))
                        return;
                }
}

static void test_sums(void)
{
    static const struct { int32_t n_threads; bool async, one_by_one; } variants[] = {
        { 1, false, false }, { 3, false, false }, { 2, false, true }, { 2, true, false },
    };
    float *first = malloc(N_SEQS * TABLE * sizeof *first), *tables = malloc(N_SEQS * TABLE * sizeof *tables);

    fill();
    for (uint32_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        world w = world_open(variants[v].n_threads, variants[v].async);

        add(&w, variants[v].one_by_one, v == 0 ? first : tables);
        if (v == 0)
            check_sums(first);
        else
            CHECK(memcmp(first, tables, N_SEQS * TABLE * sizeof *tables) == 0);
        world_close(&w);
    }
    free(first);
    free(tables);
}

/* ---- the most attended ---- */

/* How many pages of the range go before this one. */
static uint32_t rank_of(const float *masses, uint32_t first, uint32_t end, uint32_t page)
{
    uint32_t before = 0;

    for (uint32_t other = first; other < end; other++)
        before += masses[other] > masses[page] || (masses[other] == masses[page] && other < page);
    return before;
}

static void check_top(world *w, uint32_t n_known, uint32_t first, uint32_t end, const uint32_t *wants, uint32_t stride)
{
    float    *table = malloc(TABLE * sizeof *table), masses[N_RUNS * HSRI_MASS_RUN];
    uint32_t *got = malloc((uint64_t)N_LAYERS * N_KV * stride * sizeof *got);

    for (uint64_t i = 0; i < TABLE; i++)   /* with many of the same value */
        table[i] = (float)(hsri_rng_u64(8, i) % 20);
    memset(got, 0, (uint64_t)N_LAYERS * N_KV * stride * sizeof *got);
    hsri_mass_range range = { upload(w, table, TABLE * sizeof *table), n_known, first, end };
    hsri_ref out = upload(w, got, (uint64_t)N_LAYERS * N_KV * stride * sizeof *got);
    w->dev->ops.top_pages(w->q, &w->kv, &range, upload(w, wants, N_LAYERS * sizeof *wants), stride, out);
    download(w, got, out, (uint64_t)N_LAYERS * N_KV * stride * sizeof *got);
    for (uint32_t i = 0; i < N_LAYERS * N_KV; i++) {
        uint32_t n = 0;

        for (uint32_t page = first; page < end; page++)
            masses[page] = page < n_known ? table[hsri_mass_at(N_LAYERS, N_KV, i / N_KV, i % N_KV, page)] : 0.0f;
        for (uint32_t page = first; page < end; page++)
            if (rank_of(masses, first, end, page) < wants[i / N_KV])
                CHECK(n < stride && got[i * stride + n++] == page);
        while (n < stride)
            CHECK(got[i * stride + n++] == UINT32_MAX);
    }
    free(table);
    free(got);
}

static void test_top(void)
{
    static const struct { uint32_t n_known, first, end, wants[N_LAYERS], stride; } cases[] = {
        { 190, 1, 180, { 10, 10, 10 }, 10 }, { 190, 0, 192, { 64, 1, 17 }, 64 }, { 20, 2, 100, { 30, 5, 40 }, 40 },
        { 0, 1, 100, { 7, 0, 3 }, 8 },
        { 190, 5, 5, { 3, 3, 3 }, 3 }, { 190, 5, 6, { 3, 1, 0 }, 3 }, { 190, 100, 192, { 92, 200, 91 }, 93 },
    };
    for (int32_t n_threads = 1; n_threads <= 3; n_threads++)
        for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            world w = world_open(n_threads, n_threads == 3);

            check_top(&w, cases[i].n_known, cases[i].first, cases[i].end, cases[i].wants, cases[i].stride);
            world_close(&w);
        }
}

int main(void)
{
    test_sums();
    test_top();
    return CHECK_REPORT();
}
