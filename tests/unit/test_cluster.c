/* SPDX-License-Identifier: Apache-2.0 */
/* The operation `cluster`: what a record says against the index entries, in double precision; and the same bytes at every level, from every
 * number of threads. The scoring kernels against the record. `--bench` prints speeds instead. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "check.h"
#include "device/cpu/backend.h"
#include "index_oracle.h"
#include "open_device.h"

#define LAYERS 1u
#define KV_HEADS 2u
#define LISTS (LAYERS * KV_HEADS)
#define SINK 3u
#define SEGMENTS 2u
#define STRIPS (SEGMENTS * HSRI_SEGMENT_STRIPS)
#define PAGES (SINK + SEGMENTS * HSRI_SEGMENT_PAGES)

typedef struct world {
    hsri_index_shape shape;
    uint32_t  d, n_slabs;
    uint8_t  *pool;                   /* slabs, strips, records */
    uint64_t  pool_bytes;
    uint32_t *slabs, strips[STRIPS * LISTS], records[SEGMENTS * LISTS];
    float    *calibration;
} world;

static uint8_t *slot_of(const world *w, uint32_t entry, uint32_t bytes)
{
    return w->pool + (uint64_t)(entry >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(entry & 255) * bytes;
}

static uint8_t *entry_of(const world *w, uint32_t list, uint32_t page)
{
    return slot_of(w, w->slabs[page / w->shape.per_slab * LISTS + list], HSRI_SLAB_BYTES) + page % w->shape.per_slab * w->shape.entry_bytes;
}

static uint8_t *codes_of(const world *w, uint32_t list, uint32_t page)
{
    uint32_t at = page - SINK;

    return slot_of(w, w->strips[at / HSRI_STRIP_PAGES * LISTS + list], hsri_strip_slot_bytes(&w->shape)) +
           at % HSRI_STRIP_PAGES * w->shape.code_bytes;
}

/* Pages whose keys are near one of a few places, so that there is something to find. */
static void fill_page(const world *w, const hsri_kernels *kernels, uint32_t list, uint32_t page, float *k, float *scratch)
{
    uint32_t                d = w->d;
    hsri_calibration_record record = hsri_calibration_at(w->calibration, 1, list, 0, d);

    fill_noise(k, 64ull * d, 100000ull + page * LISTS + list, 0.3f);
    for (uint32_t t = 0; t < 64; t++) {
        uint64_t place = (uint64_t)(300 * hsri_rng_unit(5 + list, page * 64 + t));

        for (uint32_t j = 0; j < d; j++)
            k[t * d + j] += 2 * noise(9000 + place, j);
    }
    if (page == SINK + 7)
        k[5] = NAN;
    kernels->sparse.encode(&w->shape, &record, k, k, entry_of(w, list, page), codes_of(w, list, page), scratch);
}

static world *world_new(uint32_t d, uint32_t n_4bit, uint32_t n_2bit)
{
    world       *w = calloc(1, sizeof *w);
    hsri_kernels kernels;
    float       *k = malloc(64 * d * sizeof *k), *scratch = malloc(hsri_index_scratch(d) * sizeof *scratch);
    uint32_t     slab_blocks, blocks, per_block;

    hsri_kernels_fill(&kernels, HSR_ISA_REFERENCE);
    w->shape = (hsri_index_shape){ .kind = HSRI_INDEX_SKETCH, .head_dim = d, .n_4bit = n_4bit, .n_2bit = n_2bit, .clusters = 1 };
    hsri_index_shape_fill(&w->shape);
    w->d = d;
    w->n_slabs = (PAGES / w->shape.per_slab + 1) * LISTS;
    slab_blocks = (w->n_slabs + 63) / 64;
    per_block = HSRI_BLOCK_BYTES / hsri_strip_slot_bytes(&w->shape);
    blocks = slab_blocks + (STRIPS * LISTS + per_block - 1) / per_block;
    for (uint32_t i = 0; i < STRIPS * LISTS; i++)
        w->strips[i] = (slab_blocks + i / per_block) << 8 | (per_block - 1 - i % per_block);
    per_block = HSRI_BLOCK_BYTES / hsri_cluster_slot_bytes(&w->shape);
    w->pool_bytes = (blocks + 1ull) * HSRI_BLOCK_BYTES;
    w->pool = hsri_new_aligned(w->pool_bytes, 1);
    w->slabs = calloc(w->n_slabs, sizeof *w->slabs);
    for (uint32_t i = 0; i < w->n_slabs; i++)
        w->slabs[i] = i / 64 << 8 | (63 - i % 64);
    CHECK(per_block >= SEGMENTS * LISTS);
    for (uint32_t i = 0; i < SEGMENTS * LISTS; i++)
        w->records[i] = blocks << 8 | (per_block - 1 - i);
    w->calibration = malloc(LISTS * hsri_calibration_floats(d) * sizeof(float));
    for (uint32_t i = 0; i < LISTS; i++)
        fill_calibration(w->calibration + i * hsri_calibration_floats(d), d, 31 * i);
    for (uint32_t i = 0; i < LISTS; i++)
        for (uint32_t page = SINK; page < PAGES; page++)
            fill_page(w, &kernels, i, page, k, scratch);
    free(k);
    free(scratch);
    return w;
}

static void world_free(world *w)
{
    free(w->pool);
    free(w->slabs);
    free(w->calibration);
    free(w);
}

/* ---- running ---- */

static hsri_ref upload(hsri_device *dev, hsri_queue *q, const void *data, uint64_t bytes)
{
    hsri_ref ref = { 0 };

    CHECK(dev->alloc(dev, bytes, &ref.buf, NULL) == HSR_OK);
    dev->copy_in(q, ref, data, bytes);
    CHECK(dev->wait(q, NULL) == HSR_OK);
    return ref;
}

/* The pool afterwards, to be freed. */
static uint8_t *run_cluster(const world *w, int32_t n_threads, int32_t isa, bool async, double *ns)
{
    hsri_device *dev;
    hsri_queue  *q;
    hsri_cluster list[SEGMENTS * LISTS];
    uint8_t     *pool = hsri_new_aligned(w->pool_bytes, 1);

    open_device(n_threads, isa, async, &dev, &q);
    hsri_ref     d_pool = upload(dev, q, w->pool, w->pool_bytes), index = upload(dev, q, w->slabs, w->n_slabs * sizeof *w->slabs);
    hsri_ref     strips = upload(dev, q, w->strips, sizeof w->strips);
    hsri_ref     calibration = upload(dev, q, w->calibration, LISTS * hsri_calibration_floats(w->d) * sizeof(float)), d_list;
    hsri_kv_view kv = { .pool_buf = d_pool.buf, .n_layers = LAYERS, .n_kv_heads = KV_HEADS, .head_dim = w->d, .calibration = calibration };

    for (uint32_t i = 0; i < SEGMENTS * LISTS; i++)
        list[i] = (hsri_cluster){ .index = index,
                                  .strips = hsri_at(strips, i / LISTS * HSRI_SEGMENT_STRIPS * LISTS * sizeof *w->strips),
                                  .record = w->records[i], .first_page = SINK + i / LISTS * HSRI_SEGMENT_PAGES,
                                  .layer = (uint16_t)(i % LISTS / KV_HEADS), .head = (uint16_t)(i % KV_HEADS), .index_shape = w->shape };
    d_list = upload(dev, q, list, sizeof list);
    uint64_t start = hsri_now_ns();
    dev->ops.cluster(q, &kv, d_list, SEGMENTS * LISTS);
    CHECK(dev->wait(q, NULL) == HSR_OK);
    *ns = (double)(hsri_now_ns() - start) / (SEGMENTS * LISTS);
    dev->copy_out(q, pool, d_pool, w->pool_bytes);
    CHECK(dev->wait(q, NULL) == HSR_OK);
    dev->free(dev, d_pool.buf);
    dev->free(dev, index.buf);
    dev->free(dev, strips.buf);
    dev->free(dev, calibration.buf);
    dev->free(dev, d_list.buf);
    dev->queue_destroy(q);
    dev->destroy(dev);
    return pool;
}

/* ---- what a record says, by docs/sparse-attention.md ---- */

typedef struct record {
    const uint8_t *at;
    uint32_t       n;
    const float   *mean, *scales, *token_scales, *family_scales;
    const uint16_t *starts, *firsts, *family_starts, *positions;
    const uint8_t *codes, *family_codes, *spreads, *family_spreads, *tokens;
} record;

static record read_record(const world *w, const uint8_t *pool, uint32_t i)
{
    uint32_t n = w->shape.n_4bit + w->shape.n_2bit, d = w->d;
    record   r = { .at = pool + (uint64_t)(w->records[i] >> 8) * HSRI_BLOCK_BYTES +
                         (uint64_t)(w->records[i] & 255) * hsri_cluster_slot_bytes(&w->shape) };

    r.n = n < 24 ? n : 24;
    r.mean = (const float *)r.at;
    r.family_scales = r.mean + d;
    r.family_starts = (const uint16_t *)(r.family_scales + r.n);
    r.firsts = r.family_starts + 65;
    r.family_spreads = (const uint8_t *)(r.firsts + 65);
    r.family_codes = r.at + (4 * d + 4 * r.n + 2 * (65 + 65) + 64 + 63) / 64 * 64;
    r.scales = (const float *)(r.family_codes + 32 * r.n);
    r.token_scales = r.scales + r.n;
    r.starts = (const uint16_t *)(r.token_scales + r.n);
    r.spreads = (const uint8_t *)(r.starts + 961);
    r.codes = r.at + (r.spreads + 960 - r.at + 63) / 64 * 64;
    r.positions = (const uint16_t *)(r.codes + 480 * r.n);
    r.tokens = (const uint8_t *)(r.positions + 8192);
    return r;
}

static double code_of(const record *r, const uint8_t *codes, uint32_t i, uint32_t c)
{
    uint8_t byte = codes[(i / 16 * (r->n / 8) + c / 8) * 64 + i % 16 * 4 + c % 4];

    return (c % 8 < 4 ? byte & 15 : byte >> 4) - 7.5;
}

static double centre_of(const record *r, uint32_t i, uint32_t c, double *step)
{
    *step = (double)r->scales[c];
    return code_of(r, r->codes, i, c) * *step;
}

static double family_of(const record *r, uint32_t f, uint32_t c, double *step)
{
    *step = (double)r->family_scales[c];
    return code_of(r, r->family_codes, f, c) * *step;
}

/* Component c of what the token at a position in the record is off its cluster's centre. */
static double off_of(const record *r, uint32_t cluster, uint32_t at, uint32_t c, double *step)
{
    uint8_t byte = r->tokens[(c / 8 * 8192 + at) * 4 + c % 4];

    *step = (double)r->token_scales[c] * r->spreads[cluster];
    return ((c % 8 < 4 ? byte & 15 : byte >> 4) - 7.5) * *step;
}

static bool is_lost(const world *w, uint32_t list, uint32_t page) { return isnan(float_at(entry_of(w, list, page))); }

/* Component c of a token, about the mean of its segment; 0 for pages that are lost. */
static double point(const world *w, const record *r, uint32_t i, uint32_t token, uint32_t c)
{
    uint32_t       list = i % LISTS, page = SINK + i / LISTS * HSRI_SEGMENT_PAGES + token / 64, d = w->d;
    const float   *calibration = w->calibration + list * hsri_calibration_floats(d);
    const uint8_t *entry = entry_of(w, list, page);
    double         step, z;
    int            code;

    if (is_lost(w, list, page))
        return 0;
    z = sketch_value(&w->shape, entry, codes_of(w, list, page), c, token % 64, &step, &code);
    for (uint32_t j = 0; j < d; j++)
        z += (double)calibration[j * d + c] * (mean_key(&w->shape, entry, calibration + 2 * d * d, j) - (double)r->mean[j]);
    return z;
}

static void check_mean(const world *w, const record *r, uint32_t i)
{
    const float *about = w->calibration + i % LISTS * hsri_calibration_floats(w->d) + 2 * w->d * w->d;

    for (uint32_t j = 0; j < w->d; j++) {
        double   want = 0;
        uint32_t n = 0;

        for (uint32_t p = 0; p < HSRI_SEGMENT_PAGES; p++) {
            uint32_t page = SINK + i / LISTS * HSRI_SEGMENT_PAGES + p;

            if (!is_lost(w, i % LISTS, page)) {
                want += mean_key(&w->shape, entry_of(w, i % LISTS, page), about, j);
                n++;
            }
        }
        CHECK(fabs((double)r->mean[j] - want / n) < 1e-5);
    }
}

/* Every token is in one cluster, and clusters are tight. */
static void check_clusters(const world *w, const record *r, uint32_t i)
{
    uint8_t *seen = calloc(HSRI_SEGMENT_TOKENS, 1);
    double  *far = calloc(HSRI_SEGMENT_TOKENS, sizeof *far), within = 0, about = 0, worst = 0, cut = 0, lost = 0;

    CHECK(r->starts[0] == 0 && r->starts[HSRI_SEGMENT_CLUSTERS] == HSRI_SEGMENT_TOKENS);
    for (uint32_t k = 0; k < HSRI_SEGMENT_CLUSTERS; k++) {
        if (!CHECK(r->starts[k] <= r->starts[k + 1]))
            goto done;
        for (uint32_t at = r->starts[k]; at < r->starts[k + 1]; at++) {
            CHECK(r->positions[at] < HSRI_SEGMENT_TOKENS && (at == r->starts[k] || r->positions[at] > r->positions[at - 1]));
            CHECK(!seen[r->positions[at] % HSRI_SEGMENT_TOKENS]++);
        }
        for (uint32_t c = 0; c < r->n && r->starts[k] < r->starts[k + 1]; c++) {
            double mean = 0, step, off_step, centre = centre_of(r, k, c, &step);
            uint32_t n = r->starts[k + 1] - r->starts[k];

            for (uint32_t at = r->starts[k]; at < r->starts[k + 1]; at++)
                mean += point(w, r, i, r->positions[at], c) / n;
            for (uint32_t at = r->starts[k]; at < r->starts[k + 1]; at++) {
                double z = point(w, r, i, r->positions[at], c);

                within += (z - mean) * (z - mean);
                about += z * z;
                z -= centre + off_of(r, k, at, c, &off_step);
                cut = fmax(cut, fabs(z) - 0.51 * off_step);
                lost += z * z;
            }
            worst = fmax(worst, fabs(centre - mean) - 0.51 * step);
        }
    }
    CHECK(within < 0.45 * about);
    CHECK(worst < 0.01 * sqrt(about / HSRI_SEGMENT_TOKENS));   /* points are whole numbers of steps of a 127th of the farthest */
    CHECK(cut < 0.01 * sqrt(about / HSRI_SEGMENT_TOKENS));
    CHECK(lost < 0.05 * within);
done:
    free(seen);
    free(far);
}

/* Families are clusters that follow each other; they are what their clusters are, and tight. */
static void check_families(const world *w, const record *r, uint32_t i)
{
    double *means = calloc((HSRI_SEGMENT_CLUSTERS + 1) * r->n, sizeof *means), within = 0, about = 0, worst = 0, unit = 0;

    for (uint32_t k = 0; k < HSRI_SEGMENT_CLUSTERS; k++)
        for (uint32_t c = 0; c < r->n; c++)
            for (uint32_t at = r->starts[k]; at < r->starts[k + 1]; at++)
                means[k * r->n + c] += point(w, r, i, r->positions[at], c) / (r->starts[k + 1] - r->starts[k]);
    for (uint32_t c = 0; c < r->n; c++)
        unit += (double)r->family_scales[c] * (double)r->family_scales[c];
    CHECK(r->firsts[0] == 0 && r->firsts[HSRI_SEGMENT_FAMILIES] == HSRI_SEGMENT_CLUSTERS);
    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++) {
        uint32_t first = r->firsts[f], end = r->firsts[f + 1], n = r->starts[end] - r->starts[first];
        double   squares = 0, step;

        CHECK(first <= end && r->family_starts[f] == r->starts[first] && r->family_starts[f + 1] == r->starts[end]);
        for (uint32_t c = 0; c < r->n && n; c++) {
            double mean = 0;

            for (uint32_t k = first; k < end; k++)
                mean += means[k * r->n + c] * (r->starts[k + 1] - r->starts[k]) / n;
            for (uint32_t k = first; k < end; k++) {
                uint32_t tokens = r->starts[k + 1] - r->starts[k];

                squares += (means[k * r->n + c] - mean) * (means[k * r->n + c] - mean) * tokens;
                about += means[k * r->n + c] * means[k * r->n + c] * tokens;
            }
            worst = fmax(worst, fabs(family_of(r, f, c, &step) - mean) - 0.51 * step);
        }
        within += squares;
        if (n)
            CHECK(fabs(sqrt(squares / n / unit) - r->family_spreads[f] / 16.0) < 0.04);
    }
    CHECK(within < 0.7 * about);
    CHECK(worst < 0.01 * sqrt(about / HSRI_SEGMENT_TOKENS));
    free(means);
}

/* ---- scores ---- */

enum { HEADS = 7, TAKEN = 100 };

/* What heads ask a record, and room for what they learn of its clusters, or of its families. */
typedef struct questions {
    float *queries, *rotated;      /* [HEADS][d] */
    float  references[HEADS], sums[HEADS], mass[HEADS][HSRI_SEGMENT_CLUSTERS];
} questions;

static questions *ask(uint32_t d)
{
    questions *q = calloc(1, sizeof *q);

    q->queries = malloc(HEADS * d * sizeof *q->queries);
    q->rotated = malloc(HEADS * d * sizeof *q->rotated);
    fill_noise(q->queries, HEADS * d, 1, 2);
    fill_noise(q->rotated, HEADS * d, 2, 2);
    fill_noise(q->references, HEADS, 3, 2);
    return q;
}

static void questions_free(questions *q)
{
    free(q->queries);
    free(q->rotated);
    free(q);
}

/* The arguments for n heads from head h on. */
static hsri_cluster_score_args heads_of(const world *w, const record *r, questions *q, uint32_t h, uint32_t n)
{
    return (hsri_cluster_score_args){ .record = r->at, .shape = &w->shape, .n_heads = n, .scale = 0.125f,
                                      .queries = q->queries + h * w->d, .rotated = q->rotated + h * w->d, .reference = q->references + h,
                                      .mass = q->mass[h], .mass_stride = HSRI_SEGMENT_CLUSTERS, .sums = q->sums + h };
}

/* A kernel that scores n places of a record, each with so many tokens, and the log of what it should say of one token of a place. */
typedef struct scoring {
    const char *name;
    void      (*kernel)(const hsri_cluster_score_args *a);
    double    (*log_mass)(const world *w, const record *r, const questions *q, uint32_t h, uint32_t i);
    const uint16_t *starts;
    uint32_t    n;
    double      tolerance;
} scoring;

static double mean_logit(const world *w, const record *r, const float *query)
{
    double logit = 0;

    for (uint32_t j = 0; j < w->d; j++)
        logit += (double)query[j] * (double)r->mean[j];
    return logit;
}

static double cluster_log_mass(const world *w, const record *r, const questions *q, uint32_t h, uint32_t i)
{
    double logit = mean_logit(w, r, q->queries + h * w->d), step;

    for (uint32_t c = 0; c < r->n; c++)
        logit += (double)q->rotated[h * w->d + c] * centre_of(r, i, c, &step);
    return 0.125 * logit - (double)q->references[h];
}

static double family_log_mass(const world *w, const record *r, const questions *q, uint32_t h, uint32_t i)
{
    double logit = mean_logit(w, r, q->queries + h * w->d), off = 0, spread, most, step;

    for (uint32_t c = 0; c < r->n; c++) {
        logit += (double)q->rotated[h * w->d + c] * family_of(r, i, c, &step);
        off += pow((double)q->rotated[h * w->d + c] * (double)r->family_scales[c], 2);
    }
    spread = 0.125 * sqrt(off) / 16 * r->family_spreads[i];
    most = fmin(spread, 1);
    return 0.125 * logit - (double)q->references[h] + most * (spread - most / 2);
}

/* Masses of a head are what they should be, add up to its sum, and are the same without the other heads. */
static void check_head(const world *w, const record *r, questions *q, const scoring *s, uint32_t h, double *worst)
{
    float  mass[HSRI_SEGMENT_CLUSTERS], sum = q->sums[h];
    double all = 0;
    hsri_cluster_score_args a;

    memcpy(mass, q->mass[h], sizeof mass);
    for (uint32_t i = 0; i < s->n; i++) {
        const int n = s->starts[i + 1] - s->starts[i];

        if (n)
            *worst = fmax(*worst, fabs(log((double)mass[i] / n) - s->log_mass(w, r, q, h, i)));
        else
            CHECK(mass[i] == 0.0f);
        all += (double)mass[i];
    }
    CHECK(fabs((double)sum - all) <= 1e-5 * all);
    a = heads_of(w, r, q, h, 1);
    s->kernel(&a);
    CHECK(memcmp(q->mass[h], mass, s->n * sizeof *mass) == 0 && q->sums[h] == sum);
}

/* Not a number: nothing; beyond all range: the most. */
static void check_extremes(const world *w, const record *r, questions *q, const scoring *s)
{
    hsri_cluster_score_args a = heads_of(w, r, q, 0, HEADS);

    q->references[0] = NAN;
    q->references[1] = -1e9f;
    q->queries[2 * w->d] = NAN;
    q->rotated[3 * w->d] = NAN;
    s->kernel(&a);
    for (uint32_t i = 0; i < s->n; i++)
        CHECK(q->mass[0][i] == 0.0f && q->mass[2][i] == 0.0f && q->mass[3][i] == 0.0f &&
              q->mass[1][i] == (s->starts[i] < s->starts[i + 1] ? HSRI_MASS_MAX : 0.0f));
}

static void check_scores(const world *w, const record *r, const scoring *s)
{
    questions *q = ask(w->d);
    double     worst = 0;
    hsri_cluster_score_args a = heads_of(w, r, q, 0, HEADS);

    s->kernel(&a);
    for (uint32_t h = 0; h < HEADS; h++)
        check_head(w, r, q, s, h, &worst);
    if (!CHECK(worst < s->tolerance))
        fprintf(stderr, "log mass of %s off by %g\n", s->name, worst);
    check_extremes(w, r, q, s);
    questions_free(q);
}

/* Clusters of some families have the masses that they have among all. */
static void check_left_out(const world *w, const record *r, const hsri_kernels *kernels)
{
    static const uint64_t left_out[] = { 1, 1ull << 63, 0x0f0f0000aaaa1234ull, ~1ull, ~(1ull << 63), UINT64_MAX };
    questions *whole = ask(w->d), *some = ask(w->d);
    hsri_cluster_score_args a = heads_of(w, r, whole, 0, 3);

    kernels->sparse.cluster.score(&a);
    a = heads_of(w, r, some, 0, 3);
    for (uint32_t i = 0; i < sizeof left_out / sizeof *left_out; i++) {
        uint32_t n = 0;

        a.left_out = left_out[i];
        memset(some->mass, 0xff, sizeof some->mass);
        kernels->sparse.cluster.score(&a);
        for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++)
            for (uint32_t k = r->firsts[f]; k < r->firsts[f + 1] && !(left_out[i] >> f & 1); k++, n++)
                for (uint32_t h = 0; h < a.n_heads; h++)
                    CHECK(memcmp(&some->mass[h][n], &whole->mass[h][k], sizeof(float)) == 0);
        for (uint32_t h = 0; h < a.n_heads; h++) {
            double sum = 0;

            for (uint32_t k = 0; k < n; k++)
                sum += (double)some->mass[h][k];
            CHECK(fabs((double)some->sums[h] - sum) <= 1e-5 * sum);
            CHECK(n == HSRI_SEGMENT_CLUSTERS || isnan(some->mass[h][n]));     /* nothing was written behind */
        }
    }
    questions_free(whole);
    questions_free(some);
}

static const uint32_t all_pages[HSRI_MARK_WORDS] = { UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX };

/* Rows of marked pages are those of all pages without the others. Marked are the pages of the clusters' tokens, and a few more. */
static void check_marks(const record *r, hsri_member_score_args a, const float *whole, const hsri_kernels *kernels)
{
    static float mass[3][HSRI_SEGMENT_UNITS];
    uint32_t     marks[HSRI_MARK_WORDS] = { 0x10, 0, 0, 0x80000000u };

    for (uint32_t i = 0; i < a.n_clusters; i++) {
        uint32_t k = a.clusters[i] % HSRI_SEGMENT_CLUSTERS;

        for (uint32_t at = r->starts[k]; at < r->starts[k + 1]; at++)
            marks[r->positions[at] / 64 / 32] |= 1u << r->positions[at] / 64 % 32;
    }
    a.marks = marks;
    a.n_heads = 3;
    a.mass = mass[0];
    kernels->sparse.cluster.score_members(&a);
    for (uint32_t h = 0; h < a.n_heads; h++)
        for (uint32_t page = 0, n = 0; page < HSRI_SEGMENT_PAGES; page++)
            if (marks[page / 32] >> page % 32 & 1) {
                CHECK(memcmp(&mass[h][n], whole + h * a.mass_stride + page * HSRI_PAGE_UNITS, HSRI_PAGE_UNITS * sizeof(float)) == 0);
                n += HSRI_PAGE_UNITS;
            }
}

/* Clusters whose masses are given, and what their tokens should make of units. */
typedef struct membership {
    float    mass[HEADS][HSRI_SEGMENT_UNITS], clusters[HEADS][HSRI_SEGMENT_CLUSTERS], *rotated;
    uint32_t taken[TAKEN], places[TAKEN];
} membership;

static membership *make_members(uint32_t d)
{
    membership *m = calloc(1, sizeof *m);

    m->rotated = malloc(HEADS * d * sizeof *m->rotated);
    fill_noise(m->rotated, HEADS * d, 4, 2);
    for (uint32_t i = 0; i < HEADS * HSRI_SEGMENT_CLUSTERS; i++)
        m->clusters[i / HSRI_SEGMENT_CLUSTERS][i % HSRI_SEGMENT_CLUSTERS] = (float)ldexp(1 + hsri_rng_unit(8, i),
                                                                                         (int)(hsri_rng_u64(9, i) % 40) - 20);
    for (uint32_t i = 0; i < TAKEN; i++) {
        m->taken[i] = 3 * HSRI_SEGMENT_CLUSTERS + i * 9 + (uint32_t)(hsri_rng_u64(7, i) % 9);
        m->places[i] = TAKEN - 1 - i;
    }
    return m;
}

static hsri_member_score_args members_of(const world *w, const record *r, membership *m, uint32_t h, uint32_t n)
{
    return (hsri_member_score_args){ r->at, &w->shape, m->taken, m->places, TAKEN, n, 0.125f, m->rotated + h * w->d, m->clusters[h],
                                     HSRI_SEGMENT_CLUSTERS, all_pages, m->mass[h], HSRI_SEGMENT_UNITS };
}

/* Masses of the units for a head, and the same without the other heads. */
static void check_member_head(const world *w, const record *r, const hsri_kernels *kernels, membership *m, uint32_t h, double *worst)
{
    double want[HSRI_SEGMENT_UNITS] = { 0 };
    float  mass[HSRI_SEGMENT_UNITS];
    hsri_member_score_args a;

    for (uint32_t i = 0; i < TAKEN; i++) {
        uint32_t k = m->taken[i] % HSRI_SEGMENT_CLUSTERS;

        for (uint32_t at = r->starts[k]; at < r->starts[k + 1]; at++) {
            double logit = 0, step;

            for (uint32_t c = 0; c < r->n; c++)
                logit += (double)m->rotated[h * w->d + c] * off_of(r, k, at, c, &step);
            want[r->positions[at] / 16] += (double)m->clusters[h][m->places[i]] / (r->starts[k + 1] - r->starts[k]) * exp(0.125 * logit);
        }
    }
    memcpy(mass, m->mass[h], sizeof mass);
    for (uint32_t u = 0; u < HSRI_SEGMENT_UNITS; u++) {
        CHECK((want[u] > 0) == (mass[u] > 0.0f));
        *worst = fmax(*worst, want[u] > 0 ? fabs(log((double)mass[u] / want[u])) : 0);
    }
    a = members_of(w, r, m, h, 1);
    kernels->sparse.cluster.score_members(&a);
    CHECK(memcmp(m->mass[h], mass, sizeof mass) == 0);
}

/* No mass: nothing, whatever the query; beyond all range: the most; no clusters: nothing. */
static void check_member_extremes(const world *w, const record *r, const hsri_kernels *kernels, membership *m)
{
    hsri_member_score_args a = members_of(w, r, m, 0, 3);

    memset(m->clusters[0], 0, sizeof m->clusters[0]);
    memset(m->clusters[1], 0, sizeof m->clusters[1]);
    m->rotated[0] = 1e30f;
    m->rotated[w->d] = NAN;
    for (uint32_t k = 0; k < HSRI_SEGMENT_CLUSTERS; k++)
        m->clusters[2][k] = HSRI_MASS_MAX;
    m->rotated[2 * w->d] = 1e6f;
    kernels->sparse.cluster.score_members(&a);
    for (uint32_t u = 0; u < HSRI_SEGMENT_UNITS; u++)
        CHECK(m->mass[0][u] == 0.0f && m->mass[1][u] == 0.0f && m->mass[2][u] <= HSRI_MASS_MAX);
    a.n_clusters = 0;
    kernels->sparse.cluster.score_members(&a);
    for (uint32_t u = 0; u < HSRI_SEGMENT_UNITS; u++)
        CHECK(m->mass[2][u] == 0.0f);
}

/* Rows of heads taken as those of votes with two heads each: the same bits. */
static void check_votes(const world *w, const record *r, const hsri_kernels *kernels, membership *m)
{
    static float mass[HEADS][HSRI_SEGMENT_UNITS];
    hsri_member_score_args a = members_of(w, r, m, 0, 2);

    a.mass = mass[0];
    kernels->sparse.cluster.score_votes(&a, &(hsri_member_votes){ HEADS / 2, 2ull * w->d, 2 * HSRI_SEGMENT_CLUSTERS,
                                                                  2 * HSRI_SEGMENT_UNITS });
    CHECK(memcmp(mass, m->mass, HEADS / 2 * 2 * sizeof mass[0]) == 0);
    a = members_of(w, r, m, 0, 1);
    a.mass = mass[0];
    kernels->sparse.cluster.score_votes(&a, &(hsri_member_votes){ HEADS, w->d, HSRI_SEGMENT_CLUSTERS, HSRI_SEGMENT_UNITS });
    CHECK(memcmp(mass, m->mass, sizeof mass) == 0);
}

static void check_members(const world *w, const record *r, const hsri_kernels *kernels, double tolerance)
{
    membership *m = make_members(w->d);
    hsri_member_score_args a = members_of(w, r, m, 0, HEADS);
    double      worst = 0;

    a.n_clusters = 7;
    kernels->sparse.cluster.score_members(&a);
    check_marks(r, a, m->mass[0], kernels);
    a.n_clusters = TAKEN;
    kernels->sparse.cluster.score_members(&a);
    check_marks(r, a, m->mass[0], kernels);
    check_votes(w, r, kernels, m);
    for (uint32_t h = 0; h < HEADS; h++)
        check_member_head(w, r, kernels, m, h, &worst);
    if (!CHECK(worst < tolerance))
        fprintf(stderr, "log mass of members off by %g\n", worst);
    check_member_extremes(w, r, kernels, m);
    free(m->rotated);
    free(m);
}

static void check_level(const world *w, const record *r, const hsri_kernels *kernels, double tolerance, const char *name)
{
    int before = check_failures;

    check_scores(w, r, &(scoring){ "clusters", kernels->sparse.cluster.score, cluster_log_mass, r->starts, HSRI_SEGMENT_CLUSTERS,
                                   tolerance });
    check_scores(w, r, &(scoring){ "families", kernels->sparse.cluster.score_families, family_log_mass, r->family_starts,
                                   HSRI_SEGMENT_FAMILIES, tolerance });
    check_left_out(w, r, kernels);
    check_members(w, r, kernels, tolerance);
    if (check_failures > before)
        fprintf(stderr, "FAILED %s\n", name);
}

/* Each centre is the nearest of some points, whatever the sums of bytes are made of. */
static void check_assign(const hsri_cluster_kernels *a, const hsri_cluster_kernels *b)
{
    enum { POINTS = 1024, QUADS = HSRI_CLUSTER_COMPONENTS / 4, CENTRES = HSRI_SEGMENT_CLUSTERS };
    static _Alignas(64) uint8_t centres[QUADS * CENTRES * 4], points[POINTS * QUADS * 4];
    static int32_t  bias[CENTRES];
    static uint16_t nearest[2][POINTS];

    for (uint32_t i = 0; i < sizeof centres; i++)
        centres[i] = (uint8_t)hsri_rng_u64(21, i);
    for (uint32_t i = 0; i < sizeof points; i++)
        points[i] = (uint8_t)((int)(hsri_rng_u64(22, i) % 255) - 127);
    for (uint32_t n_quads = 2; n_quads <= QUADS; n_quads += 2) {
        hsri_assign_args args = { (const int8_t *)points, POINTS, n_quads, centres, bias, CENTRES, nearest[0] };

        a->assign(&args);
        args.nearest = nearest[1];
        b->assign(&args);
        CHECK(memcmp(nearest[0], nearest[1], sizeof nearest[0]) == 0);
    }
}

/* Processors without VNNI have the same bits. */
static void check_plain(const world *w, const record *r, const hsri_kernels *kernels, const hsri_kernels *plain)
{
    const hsri_cluster_kernels *const of[2] = { &kernels->sparse.cluster, &plain->sparse.cluster };
    questions  *q[2] = { ask(w->d), ask(w->d) };
    membership *m[2] = { make_members(w->d), make_members(w->d) };

    for (int families = 0; families < 2; families++) {
        for (int i = 0; i < 2; i++) {
            hsri_cluster_score_args a = heads_of(w, r, q[i], 0, HEADS);

            (families ? of[i]->score_families : of[i]->score)(&a);
        }
        CHECK(memcmp(q[0]->mass, q[1]->mass, sizeof q[0]->mass) == 0 && memcmp(q[0]->sums, q[1]->sums, sizeof q[0]->sums) == 0);
    }
    for (int i = 0; i < 2; i++) {
        hsri_member_score_args a = members_of(w, r, m[i], 0, HEADS);

        of[i]->score_members(&a);
    }
    CHECK(memcmp(m[0]->mass, m[1]->mass, sizeof m[0]->mass) == 0);
    check_assign(of[0], of[1]);
    for (int i = 0; i < 2; i++) {
        questions_free(q[i]);
        free(m[i]->rotated);
        free(m[i]);
    }
}

static void check_levels(const world *w, const record *r)
{
    hsri_kernels kernels, plain;

    for (int32_t isa = HSR_ISA_REFERENCE; isa <= hsri_cpu_isa() && isa <= HSR_ISA_AVX512; isa++) {
        hsri_kernels_fill(&kernels, isa);
        check_level(w, r, &kernels, isa >= HSR_ISA_AVX2 ? 0.08 : 1e-4, hsri_isa_name(isa));
    }
    if (hsri_cpu_isa() < HSR_ISA_AVX512)
        return;
    plain = kernels;
    hsri_sparse_kernels_fill_plain(&plain.sparse, HSR_ISA_AVX512);
    check_level(w, r, &plain, 0.08, "avx512 without VNNI");
    check_plain(w, r, &kernels, &plain);
}

static void test_shape(uint32_t d, uint32_t n_4bit, uint32_t n_2bit)
{
    world   *w = world_new(d, n_4bit, n_2bit);
    double   ns;
    uint8_t *first = run_cluster(w, 1, HSR_ISA_REFERENCE, false, &ns);

    for (uint32_t i = 0; i < SEGMENTS * LISTS; i += 3) {
        record r = read_record(w, first, i);

        check_mean(w, &r, i);
        check_clusters(w, &r, i);
        check_families(w, &r, i);
        check_levels(w, &r);
    }
    for (int32_t isa = HSR_ISA_REFERENCE; isa <= hsri_cpu_isa(); isa++) {
        uint8_t *again = run_cluster(w, isa == HSR_ISA_REFERENCE ? 3 : 2, isa, isa == HSR_ISA_REFERENCE, &ns);

        CHECK(memcmp(first, again, w->pool_bytes) == 0);
        free(again);
    }
    free(first);
    world_free(w);
}

static int bench(void)
{
    world *w = world_new(64, 24, 0);

    for (int32_t isa = HSR_ISA_REFERENCE; isa <= hsri_cpu_isa(); isa++) {
        double best = 1e30, ns;

        for (int i = 0; i < 5; i++) {
            free(run_cluster(w, 1, isa, false, &ns));
            best = fmin(best, ns);
        }
        printf("%-8s %.2f ms for each record\n", hsri_isa_name(isa), best / 1e6);
    }
    world_free(w);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--bench") == 0)
        return bench();
    test_shape(64, 24, 0);
    test_shape(128, 8, 16);
    test_shape(20, 16, 0);
    test_shape(32, 8, 0);
    return CHECK_REPORT();
}
