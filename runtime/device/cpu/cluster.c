/* SPDX-License-Identifier: Apache-2.0 */
/* Making cluster records (docs/sparse-attention.md): k-means over the tokens of a segment, as their sketches say where they are, and once
 * more over the clusters. Components are whole numbers of one step per segment, so that every sum is exact: the same record on every
 * level, with any number of threads. */
#include "device/cpu/pages.h"

#include <math.h>
#include <string.h>

#include "base/array.h"

/* Assignments; after each but the last, centres move. More make clusters less than 1 % tighter. */
#define ROUNDS 3u
#define FAMILY_ROUNDS 4u
#define SEGMENT_NS 4000000u            /* of one thread, for estimates */
#define MAX_COMPONENTS HSRI_CLUSTER_COMPONENTS
#define SET 8u                         /* components of a dword of codes; there are whole sets, and loops of a fixed length are vectors */

/* What a worker needs for a segment. */
typedef struct segment {
    const uint8_t *entries[HSRI_SEGMENT_PAGES], *codes[HSRI_SEGMENT_PAGES];
    const hsri_index_shape *shape;
    hsri_cluster_layout at;
    uint32_t n;                                                  /* components: at.n */
    float    step;
    float    mean[HSRI_ATTEND_MAX_HEAD_DIM];                     /* of the segment's keys */
    float    offsets[HSRI_SEGMENT_PAGES][MAX_COMPONENTS];        /* of a page's mean from that of the segment, in the calibrated basis */
    float    scales[HSRI_SEGMENT_PAGES][MAX_COMPONENTS];         /* 0 where the page is not a number */
    int32_t  bias[HSRI_SEGMENT_CLUSTERS], counts[HSRI_SEGMENT_CLUSTERS];     /* tokens of clusters, and sums of their points */
    int32_t  sums[HSRI_SEGMENT_CLUSTERS][MAX_COMPONENTS];
    int32_t  family_counts[HSRI_SEGMENT_FAMILIES], family_sums[HSRI_SEGMENT_FAMILIES][MAX_COMPONENTS];
    uint16_t nearest[HSRI_SEGMENT_TOKENS], family[HSRI_SEGMENT_CLUSTERS];
    _Alignas(64) uint8_t centres[HSRI_SEGMENT_CLUSTERS * MAX_COMPONENTS];
    _Alignas(64) int8_t  points[HSRI_SEGMENT_TOKENS * MAX_COMPONENTS], cluster_points[HSRI_SEGMENT_CLUSTERS * MAX_COMPONENTS];
} segment;

_Static_assert(sizeof(segment) + 64 <= HSRI_CPU_SCRATCH * sizeof(float), "a worker's scratch holds a segment");

/* ---- points ---- */

static float float_at(const uint8_t *p)
{
    float f;

    memcpy(&f, p, sizeof f);
    return f;
}

/* Pages that hold a NaN have no mass, wherever they are: they lie at the mean. */
static bool is_lost(const uint8_t *entry) { return !isfinite(float_at(entry)); }

static void find_mean(segment *s, const float *mean_k)
{
    hsri_index_layout at = hsri_index_layout_of(s->shape);
    uint32_t          d = s->shape->head_dim, n = 0;

    memset(s->mean, 0, d * sizeof *s->mean);
    for (uint32_t p = 0; p < HSRI_SEGMENT_PAGES; p++) {
        const int8_t *codes = (const int8_t *)s->entries[p] + at.mean_k;
        float         scale = float_at(s->entries[p]);

        if (is_lost(s->entries[p]))
            continue;
        for (uint32_t j = 0; j < d; j++)
            s->mean[j] += scale * (float)codes[j];
        n++;
    }
    for (uint32_t j = 0; j < d; j++)
        s->mean[j] = s->mean[j] / (float)hsri_max(n, 1) + mean_k[j];
}

/* Offset and scales of a page. */
static void place_page(segment *s, uint32_t p, const hsri_calibration_record *calibration)
{
    hsri_index_layout at = hsri_index_layout_of(s->shape);
    const uint8_t    *entry = s->entries[p];
    const int8_t     *codes = (const int8_t *)entry + at.mean_k;
    uint32_t          d = s->shape->head_dim;

    memset(s->offsets[p], 0, sizeof s->offsets[p]);
    memset(s->scales[p], 0, sizeof s->scales[p]);
    if (is_lost(entry))
        return;
    for (uint32_t i = 0; i < d; i++) {
        float off = float_at(entry) * (float)codes[i] + calibration->mean_k[i] - s->mean[i];

        for (uint32_t c = 0; c < s->n; c++)
            s->offsets[p][c] += calibration->a[(uint64_t)i * d + c] * off;
    }
    for (uint32_t c = 0; c < s->n; c++) {
        uint16_t half;

        memcpy(&half, entry + at.scales + c * sizeof half, sizeof half);
        s->scales[p][c] = hsri_f16_to_f32(half);
    }
}

static float middle_of(const segment *s, uint32_t c) { return c < s->shape->n_4bit ? 7.5f : 1.5f; }

/* One step for all components, as wide as the farthest token may need. */
static void choose_step(segment *s)
{
    float most = 0.0f;

    for (uint32_t p = 0; p < HSRI_SEGMENT_PAGES; p++)
        for (uint32_t c = 0; c < s->n; c++) {
            float far = fabsf(s->offsets[p][c]) + middle_of(s, c) * s->scales[p][c];

            most = far > most ? far : most;
        }
    s->step = most < 1e30f ? most / 127.0f : 0.0f;
}

/* What each code of a component stands for in this page, in steps. */
static void fill_levels(const segment *s, uint32_t p, uint32_t c, int8_t *levels)
{
    float inverse = s->step > 1e-30f ? 1.0f / s->step : 0.0f, middle = middle_of(s, c);

    for (uint32_t code = 0; code <= 2 * middle; code++) {
        float x = rintf((s->offsets[p][c] + ((float)code - middle) * s->scales[p][c]) * inverse);

        levels[code] = (int8_t)(x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x);
    }
}

/* Component c of the tokens of page p. Codes are laid out as docs/sparse-attention.md says. */
static void put_component(segment *s, uint32_t p, uint32_t c)
{
    bool              wide = c < s->shape->n_4bit;
    uint32_t          i = wide ? c : c - s->shape->n_4bit, bits = wide ? 4 : 2, in_set = i % (32 / bits), shift = in_set / 4 * bits;
    const uint8_t    *sets = s->codes[p] + (wide ? 0 : HSRI_PAGE_TOKENS * s->shape->n_4bit / 2);
    const uint8_t    *codes = sets + i / (32 / bits) * 256 + in_set % 4;
    int8_t            levels[16] = { 0 }, *points = s->points + (uint64_t)p * HSRI_PAGE_TOKENS * s->n + c;

    fill_levels(s, p, c, levels);
    for (uint32_t line = 0; line < 4; line++)
        for (uint32_t lane = 0; lane < 16; lane++)
            points[hsri_sketch_token(line, lane) * s->n] = levels[codes[line * 64 + lane * 4] >> shift & ((1u << bits) - 1)];
}

static void make_points(segment *s, const hsri_calibration_record *calibration)
{
    find_mean(s, calibration->mean_k);
    for (uint32_t p = 0; p < HSRI_SEGMENT_PAGES; p++)
        place_page(s, p, calibration);
    choose_step(s);
    for (uint32_t p = 0; p < HSRI_SEGMENT_PAGES; p++)
        for (uint32_t c = 0; c < s->n; c++)
            put_component(s, p, c);
}

/* ---- clusters ---- */

/* Centre i of n. */
static void put_centre(segment *s, uint32_t n, uint32_t i, const int32_t *centre)
{
    int32_t squares = 0;

    for (uint32_t c = 0; c < s->n; c++) {
        s->centres[(c / 4 * n + i) * 4 + c % 4] = (uint8_t)(centre[c] + 128);
        squares += centre[c] * centre[c];
    }
    /* |x - c|^2 = |x|^2 - 2 (x.c - |c|^2 / 2) */
    s->bias[i] = -(squares / 2);
}

/* n centres start at points that are evenly far from each other in their order. */
static void first_centres(segment *s, uint32_t n, const int8_t *points, uint32_t n_points)
{
    for (uint32_t i = 0; i < n; i++) {
        const int8_t *point = points + (uint64_t)(i * n_points / n) * s->n;
        int32_t       centre[MAX_COMPONENTS];

        for (uint32_t c = 0; c < s->n; c++)
            centre[c] = point[c];
        put_centre(s, n, i, centre);
    }
}

static void add_up(segment *s)
{
    memset(s->counts, 0, sizeof s->counts);
    memset(s->sums, 0, sizeof s->sums);
    for (uint32_t t = 0; t < HSRI_SEGMENT_TOKENS; t++) {
        const int8_t *point = s->points + (uint64_t)t * s->n;
        int32_t      *sums = s->sums[s->nearest[t]];

        s->counts[s->nearest[t]]++;
        for (uint32_t set = 0; set < s->n; set += SET)
            for (uint32_t c = set; c < set + SET; c++)
                sums[c] += point[c];
    }
}

/* Quotient to the nearest, halves away from zero. */
static int32_t divide(int32_t a, int32_t b) { return (2 * a + (a < 0 ? -b : b)) / (2 * b); }

/* To the means of n sets of tokens. A centre without tokens stays where it is. */
static void move_centres(segment *s, uint32_t n, const int32_t *counts, int32_t (*sums)[MAX_COMPONENTS])
{
    for (uint32_t i = 0; i < n; i++) {
        int32_t centre[MAX_COMPONENTS];

        for (uint32_t c = 0; c < s->n && counts[i]; c++)
            centre[c] = divide(sums[i][c], counts[i]);
        if (counts[i])
            put_centre(s, n, i, centre);
    }
}

static void find_clusters(segment *s, const hsri_cluster_kernels *kernels)
{
    hsri_assign_args a = { s->points, HSRI_SEGMENT_TOKENS, s->n / 4, s->centres, s->bias, HSRI_SEGMENT_CLUSTERS, s->nearest };

    first_centres(s, HSRI_SEGMENT_CLUSTERS, s->points, HSRI_SEGMENT_TOKENS);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        kernels->assign(&a);
        add_up(s);
        if (round < ROUNDS)
            move_centres(s, HSRI_SEGMENT_CLUSTERS, s->counts, s->sums);
    }
}

/* ---- families ---- */

static void add_up_families(segment *s)
{
    memset(s->family_counts, 0, sizeof s->family_counts);
    memset(s->family_sums, 0, sizeof s->family_sums);
    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++) {
        s->family_counts[s->family[i]] += s->counts[i];
        for (uint32_t c = 0; c < s->n; c++)
            s->family_sums[s->family[i]][c] += s->sums[i][c];
    }
}

/* Clusters are numbered family by family. */
static void sort_clusters(segment *s)
{
    uint16_t number[HSRI_SEGMENT_CLUSTERS], next[HSRI_SEGMENT_FAMILIES + 1] = { 0 }, family[HSRI_SEGMENT_CLUSTERS];

    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++)
        next[s->family[i] + 1]++;
    for (uint32_t f = 1; f < HSRI_SEGMENT_FAMILIES; f++)
        next[f] = (uint16_t)(next[f] + next[f - 1]);
    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++) {
        number[i] = next[s->family[i]]++;
        family[number[i]] = s->family[i];
    }
    memcpy(s->family, family, sizeof family);
    for (uint32_t t = 0; t < HSRI_SEGMENT_TOKENS; t++)
        s->nearest[t] = number[s->nearest[t]];
    add_up(s);
}

/* As clusters of tokens; each cluster weighs as many tokens as it has. */
static void find_families(segment *s, const hsri_cluster_kernels *kernels)
{
    hsri_assign_args a = { s->cluster_points, HSRI_SEGMENT_CLUSTERS, s->n / 4, s->centres, s->bias, HSRI_SEGMENT_FAMILIES, s->family };

    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++)
        for (uint32_t c = 0; c < s->n; c++)
            s->cluster_points[i * s->n + c] = (int8_t)(s->counts[i] ? divide(s->sums[i][c], s->counts[i]) : 0);
    first_centres(s, HSRI_SEGMENT_FAMILIES, s->cluster_points, HSRI_SEGMENT_CLUSTERS);
    for (uint32_t round = 1; round <= FAMILY_ROUNDS; round++) {
        kernels->assign(&a);
        add_up_families(s);
        if (round < FAMILY_ROUNDS)
            move_centres(s, HSRI_SEGMENT_FAMILIES, s->family_counts, s->family_sums);
    }
    sort_clusters(s);
}

/* ---- the record ---- */

static void write_positions(const segment *s, uint8_t *record)
{
    uint16_t *starts = (uint16_t *)(record + s->at.starts), *positions = (uint16_t *)(record + s->at.positions);
    uint16_t  next[HSRI_SEGMENT_CLUSTERS];

    starts[0] = 0;
    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++) {
        next[i] = starts[i];
        starts[i + 1] = (uint16_t)(starts[i] + s->counts[i]);
    }
    for (uint32_t t = 0; t < HSRI_SEGMENT_TOKENS; t++)
        positions[next[s->nearest[t]]++] = (uint16_t)t;
}

static void write_firsts(const segment *s, uint8_t *record)
{
    uint16_t *firsts = (uint16_t *)(record + s->at.firsts), *family_starts = (uint16_t *)(record + s->at.family_starts);

    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++)
        firsts[s->family[i] + 1]++;
    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++) {
        firsts[f + 1] = (uint16_t)(firsts[f] + firsts[f + 1]);
        family_starts[f + 1] = (uint16_t)(family_starts[f] + s->family_counts[f]);
    }
}

static float mean_of(const int32_t *sums, int32_t count, uint32_t c) { return count ? (float)sums[c] / (float)count : 0.0f; }

/* A component of n centres. Levels as those of the sketch: odd multiples of half a scale, which is wide enough for all. */
static void write_component(const segment *s, uint32_t c, uint32_t n, const int32_t *counts, const int32_t (*sums)[MAX_COMPONENTS],
                            float *scales, uint8_t *codes)
{
    float most = 0.0f;

    for (uint32_t i = 0; i < n; i++) {
        float x = fabsf(mean_of(sums[i], counts[i], c));

        most = x > most ? x : most;
    }
    scales[c] = most / 7.5f * s->step;
    for (uint32_t i = 0; i < n; i++) {
        float   x = counts[i] && most > 0.0f ? mean_of(sums[i], counts[i], c) * (7.5f / most) + 8.0f : 8.0f;
        uint8_t code = (uint8_t)(x < 0.0f ? 0.0f : x > 15.0f ? 15.0f : x);

        codes[hsri_centre_at(s->n, i, c)] |= (uint8_t)(code << c % 8 / 4 * 4);
    }
}

static void write_centres(const segment *s, uint8_t *record)
{
    for (uint32_t c = 0; c < s->n; c++) {
        write_component(s, c, HSRI_SEGMENT_CLUSTERS, s->counts, s->sums, (float *)(record + s->at.scales),
                        record + s->at.codes);
        write_component(s, c, HSRI_SEGMENT_FAMILIES, s->family_counts, s->family_sums,
                        (float *)(record + s->at.family_scales), record + s->at.family_codes);
    }
}

/* How far the clusters of each family are off its centre, in sixteenths of the families' scales. */
static void write_family_spreads(const segment *s, uint8_t *record)
{
    const float *scales = (const float *)(record + s->at.family_scales);
    float        squares[HSRI_SEGMENT_FAMILIES] = { 0 }, all = 0.0f;

    for (uint32_t c = 0; c < s->n && s->step > 1e-30f; c++)
        all += scales[c] / s->step * (scales[c] / s->step);
    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++)
        for (uint32_t c = 0; c < s->n; c++) {
            uint32_t f = s->family[i];
            float    off = mean_of(s->sums[i], s->counts[i], c) - mean_of(s->family_sums[f], s->family_counts[f], c);

            squares[f] += off * off * (float)s->counts[i];
        }
    for (uint32_t f = 0; f < HSRI_SEGMENT_FAMILIES; f++) {
        float spread = s->family_counts[f] && all > 0.0f ? 16.0f * sqrtf(squares[f] / (float)s->family_counts[f] / all) : 0.0f;

        record[s->at.family_spreads + f] = (uint8_t)(spread < 255.0f ? spread + 0.5f : 255.0f);
    }
}

/* Where the centre of cluster i is, as the record says, in steps. */
static void read_centre(const segment *s, const uint8_t *record, uint32_t i, float *centre)
{
    const float *scales = (const float *)(record + s->at.scales);

    for (uint32_t c = 0; c < s->n; c++) {
        uint32_t code = record[s->at.codes + hsri_centre_at(s->n, i, c)] >> c % 8 / 4 * 4 & 15;

        centre[c] = s->step > 1e-30f ? ((float)code - 7.5f) * scales[c] / s->step : 0.0f;
    }
}

/* What a token is off a centre, in components set .. set + SET - 1. */
static inline void off_centre(const segment *s, uint32_t token, uint32_t set, const float *centre, float off[SET])
{
    const int8_t *point = s->points + (uint64_t)token * s->n + set;

    for (uint32_t c = 0; c < SET; c++)
        off[c] = (float)point[c] - centre[set + c];
}

/* Root of the mean square of what tokens are off their centres, of each component. */
static void measure_off(const segment *s, const uint8_t *record, float *root)
{
    float squares[MAX_COMPONENTS] = { 0 };

    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++) {
        const uint16_t *positions = (const uint16_t *)(record + s->at.positions) + ((const uint16_t *)(record + s->at.starts))[i];
        float           centre[MAX_COMPONENTS];

        read_centre(s, record, i, centre);
        for (int32_t j = 0; j < s->counts[i]; j++)
            for (uint32_t set = 0; set < s->n; set += SET) {
                float off[SET];

                off_centre(s, positions[j], set, centre, off);
                for (uint32_t c = 0; c < SET; c++)
                    squares[set + c] += off[c] * off[c];
            }
    }
    for (uint32_t c = 0; c < s->n; c++)
        root[c] = sqrtf(squares[c] / HSRI_SEGMENT_TOKENS);
}

/* Times the root, what the farthest token of cluster i is off its centre. */
static float reach_of(const segment *s, const uint8_t *record, uint32_t i, const float *inverse)
{
    const uint16_t *positions = (const uint16_t *)(record + s->at.positions) + ((const uint16_t *)(record + s->at.starts))[i];
    float           centre[MAX_COMPONENTS], far[SET] = { 0 }, most = 0.0f;

    read_centre(s, record, i, centre);
    for (int32_t j = 0; j < s->counts[i]; j++)
        for (uint32_t set = 0; set < s->n; set += SET) {
            float off[SET];

            off_centre(s, positions[j], set, centre, off);
            for (uint32_t c = 0; c < SET; c++) {
                float x = fabsf(off[c]) * inverse[set + c];

                far[c] = x > far[c] ? x : far[c];
            }
        }
    for (uint32_t c = 0; c < SET; c++)
        most = far[c] > most ? far[c] : most;
    return most;
}

static void write_members(const segment *s, uint32_t i, const float *inverse, float unit, uint8_t *record)
{
    uint32_t        start = ((const uint16_t *)(record + s->at.starts))[i], spread = record[s->at.spreads + i];
    const uint16_t *positions = (const uint16_t *)(record + s->at.positions) + start;
    uint8_t        *codes = record + s->at.tokens + 4ull * start;
    float           centre[MAX_COMPONENTS];

    read_centre(s, record, i, centre);
    for (int32_t j = 0; j < s->counts[i]; j++)
        for (uint32_t set = 0; set < s->n; set += SET) {
            float    off[SET];
            int32_t  code[SET];
            uint32_t dword = 0;

            off_centre(s, positions[j], set, centre, off);
            for (uint32_t c = 0; c < SET; c++) {
                float x = spread ? off[c] * inverse[set + c] / (unit * (float)spread) + 8.0f : 8.0f;

                x = x > 0.0f ? x : 0.0f;
                code[c] = (int32_t)(x < 15.0f ? x : 15.0f);
            }
            for (uint32_t c = 0; c < SET / 2; c++)
                dword |= (uint32_t)(code[c] | code[c + SET / 2] << 4) << 8 * c;
            memcpy(codes + (set / SET * (uint64_t)HSRI_SEGMENT_TOKENS + (uint32_t)j) * 4, &dword, sizeof dword);
        }
}

/* A scale is the root times the spread of the cluster, which is as wide as its farthest token needs. So tight clusters are told finely, and
 * no token is cut off. */
static void write_tokens(const segment *s, uint8_t *record)
{
    float root[MAX_COMPONENTS], inverse[MAX_COMPONENTS], reach[HSRI_SEGMENT_CLUSTERS], most = 0.0f, unit;

    measure_off(s, record, root);
    for (uint32_t c = 0; c < s->n; c++)
        inverse[c] = root[c] > 1e-6f ? 1.0f / root[c] : 0.0f;
    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++) {
        reach[i] = reach_of(s, record, i, inverse) / 7.5f;
        most = reach[i] > most ? reach[i] : most;
    }
    unit = most / 255.0f;
    for (uint32_t c = 0; c < s->n; c++) {
        float scale = inverse[c] > 0.0f ? root[c] * unit * s->step : 0.0f;

        memcpy(record + s->at.token_scales + c * sizeof scale, &scale, sizeof scale);
    }
    for (uint32_t i = 0; i < HSRI_SEGMENT_CLUSTERS; i++) {
        float spread = most > 0.0f ? ceilf(reach[i] / unit) : 0.0f;

        record[s->at.spreads + i] = (uint8_t)(spread < 255.0f ? spread : 255.0f);
        write_members(s, i, inverse, unit, record);
    }
}

static void write_record(const segment *s, uint8_t *record)
{
    memset(record, 0, s->at.positions);
    memcpy(record + s->at.mean, s->mean, s->shape->head_dim * sizeof *s->mean);
    write_positions(s, record);
    write_firsts(s, record);
    write_centres(s, record);
    write_family_spreads(s, record);
    write_tokens(s, record);
}

/* ---- the operation ---- */

typedef struct cluster_job {
    const hsri_cpu_device *dev;
    const hsri_kv_view *kv;
    const hsri_cluster *list;
    uint8_t            *pool;
} cluster_job;

static void find_entries(const cluster_job *job, const hsri_cluster *one, segment *s)
{
    const uint64_t  list = (uint64_t)one->layer * job->kv->n_kv_heads + one->head;
    const uint64_t  stride = (uint64_t)job->kv->n_layers * job->kv->n_kv_heads;
    const uint32_t *slabs = (const uint32_t *)hsri_cpu_at(job->dev, one->index, 0) + list;
    const uint32_t *strips = (const uint32_t *)hsri_cpu_at(job->dev, one->strips, 0) + list;

    for (uint32_t p = 0; p < HSRI_SEGMENT_PAGES; p++) {
        uint32_t page = one->first_page + p, slab = slabs[page / s->shape->per_slab * stride];
        uint32_t strip = strips[p / HSRI_STRIP_PAGES * stride];

        s->entries[p] = hsri_slot_at(job->pool, slab, HSRI_SLAB_BYTES) + (uint64_t)(page % s->shape->per_slab) * s->shape->entry_bytes;
        s->codes[p] = hsri_slot_at(job->pool, strip, hsri_strip_slot_bytes(s->shape)) +
                      (uint64_t)(p % HSRI_STRIP_PAGES) * s->shape->code_bytes;
    }
}

static void cluster_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const cluster_job *job = arg;
    segment           *s = (segment *)(((uintptr_t)hsri_cpu_scratch(job->dev, worker) + 63) & ~(uintptr_t)63);

    for (uint64_t i = first; i < end; i++) {
        const hsri_cluster     *one = &job->list[i];
        hsri_calibration_record calibration = hsri_cpu_calibration(job->dev, job->kv, one->layer, one->head);

        s->shape = &one->index_shape;
        s->at = hsri_cluster_layout_of(s->shape);
        s->n = s->at.n;
        find_entries(job, one, s);
        make_points(s, &calibration);
        find_clusters(s, &job->dev->kernels.sparse.cluster);
        find_families(s, &job->dev->kernels.sparse.cluster);
        write_record(s, hsri_slot_at(job->pool, one->record, hsri_cluster_slot_bytes(s->shape)));
    }
}

static void cpu_cluster(hsri_queue *q, const hsri_kv_view *kv, hsri_ref list, uint32_t n)
{
    HSRI_CPU_TIMED(q, cluster);
    hsri_cpu_device *dev = (hsri_cpu_device *)q->dev;
    cluster_job      job = { dev, kv, hsri_cpu_at(dev, list, n * sizeof *job.list),
                             hsri_cpu_at(dev, (hsri_ref){ .buf = kv->pool_buf }, 0) };

    assert(kv->calibration.buf != 0);
    hsri_cpu_run_items(dev, n, (uint64_t)n * SEGMENT_NS, cluster_run, &job);
}

void hsri_cpu_cluster_fill(hsri_ops *ops)
{
    ops->cluster = cpu_cluster;
}
