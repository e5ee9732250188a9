/* SPDX-License-Identifier: Apache-2.0 */
/* Taking back some of what was selected, because its pages are not there: marked units are scored again from the index, and what they
 * weigh goes where that of unselected units is. Items are lists; a list is gone through in chunks of HSRI_SCORE_PAGES pages, in its own
 * order, so nothing depends on what else is computed. */
#include "device/cpu/sparse_job.h"

#include <math.h>
#include <string.h>

#include "base/array.h"

/* Estimate for one thread: to score the units of a list for one head. */
#define LIST_NS 2000u

/* Where the numbers of a chunk are, in the worker's scratch. */
#define SCRATCH (HSRI_ATTEND_MAX_QUERIES * (CHUNK_UNITS + 2u + 1u + HSRI_ATTEND_MAX_HEAD_DIM))
_Static_assert(SCRATCH <= HSRI_CPU_SCRATCH, "a chunk of a list has its scratch");

/* The pages of a chunk, and which of their units are in the list: a bit for each. */
typedef struct listed {
    uint8_t kept[HSRI_SCORE_PAGES], away[HSRI_SCORE_PAGES];
} listed;

/* What one list holds, as a head sees it: logs of masses, in the measure in which the exact mass is 1. */
typedef struct weights {
    double kept, away;
} weights;

static double add_logs(double a, double b)
{
    const double high = a > b ? a : b, low = a > b ? b : a;

    return isinf(low) ? high : high + log1p(exp(low - high));
}

/* The next chunk of the list; returns where the one after it begins. */
static uint32_t gather(const select_job *job, const uint32_t *units, uint32_t n, uint32_t from, chunk *c, listed *l)
{
    uint32_t last = UINT32_MAX, i;

    memset(l, 0, sizeof *l);
    c->n_pages = c->n_recorded = 0;
    for (i = from; i < n; i++) {
        const uint32_t unit = units[i] & ~HSRI_UNIT_AWAY, page = unit / HSRI_PAGE_UNITS;

        if (page != last && c->n_pages == HSRI_SCORE_PAGES)
            break;
        if (page != last)
            hsri_cpu_add_page(job, c, page);
        last = page;
        (units[i] & HSRI_UNIT_AWAY ? l->away : l->kept)[c->n_pages - 1] |= (uint8_t)(1u << unit % HSRI_PAGE_UNITS);
    }
    return i;
}

/* Sum of the masses of those units that have a bit; the others', with `clear`, become 0. */
static float sum_of(float *mass, uint32_t n_pages, const uint8_t *bits, bool clear)
{
    float sum = 0.0f;

    for (uint32_t u = 0; u < n_pages * HSRI_PAGE_UNITS; u++) {
        const bool in = bits[u / HSRI_PAGE_UNITS] >> u % HSRI_PAGE_UNITS & 1;

        sum += in ? mass[u] : 0.0f;
        if (clear && !in)
            mass[u] = 0.0f;
    }
    return sum;
}

/* part = { m, 1, mean value } and so much more mass exp(m) with another mean value about `about`. */
static void add_part(float *part, float m, const float *sum, const float *about, uint32_t d)
{
    const float top = m > part[0] ? m : part[0], had = part[1] * expf(part[0] - top), more = expf(m - top), all = had + more;

    for (uint32_t j = 0; j < d; j++)
        part[2 + j] = (had * part[2 + j] + more * (sum[1 + j] / sum[0] + (about ? about[j] : 0.0f))) / all;
    part[0] = top + logf(all);
    part[1] = 1.0f;
}

/* A chunk, for up to HSRI_ATTEND_MAX_QUERIES heads from `head` on. */
static void weigh_chunk(const select_job *job, const chunk *c, const listed *l, uint32_t head, uint32_t n_heads, weights *w)
{
    const uint32_t     row = c->pick->row, d = job->kv->head_dim;
    const chunk_masses m = { c->scratch, CHUNK_UNITS, c->scratch + (uint64_t)HSRI_ATTEND_MAX_QUERIES * CHUNK_UNITS,
                             c->scratch + (uint64_t)HSRI_ATTEND_MAX_QUERIES * (CHUNK_UNITS + 1), 1 };
    float             *means = c->scratch + (uint64_t)HSRI_ATTEND_MAX_QUERIES * (CHUNK_UNITS + 2);
    const float       *about = c->pick->seq->index_shape.kind == HSRI_INDEX_SKETCH ? c->calibration.mean_v : NULL;
    float              factors[HSRI_ATTEND_MAX_QUERIES];

    hsri_cpu_score_chunk(job, c, row, head, n_heads, &m);
    for (uint32_t h = 0; h < n_heads; h++) {
        const float kept = sum_of(m.mass + h * CHUNK_UNITS, c->n_pages, l->kept, false);
        const float away = sum_of(m.mass + h * CHUNK_UNITS, c->n_pages, l->away, true);

        w[h].kept = add_logs(w[h].kept, log((double)kept) + (double)m.raised[h]);
        w[h].away = add_logs(w[h].away, log((double)away) + (double)m.raised[h]);
        factors[h] = 1.0f;
    }
    memset(means, 0, (uint64_t)n_heads * (1 + d) * sizeof *means);
    job->dev->kernels.sparse.add_means(c->entries, c->n_pages, &c->pick->seq->index_shape, n_heads, m.mass, CHUNK_UNITS, factors, means);
    for (uint32_t h = 0; h < n_heads; h++) {
        const float *sum = means + (uint64_t)h * (1 + d);

        if (sum[0] > 0.0f)
            add_part(job->virtual_part + ((uint64_t)row * job->n_heads + head + h) * (2 + d),
                     reference_of(job, c->pick, row, head + h) + logf(sum[0]) + m.raised[h], sum, about, d);
    }
}

/* The heads of a list, as many as a kernel takes at a time. */
static void weigh_list(const select_job *job, chunk *c, const uint32_t *units, uint32_t n, uint32_t head, uint32_t n_heads)
{
    weights w[HSRI_ATTEND_MAX_QUERIES];
    listed  l;

    for (uint32_t h = 0; h < n_heads; h++)
        w[h] = (weights){ -(double)INFINITY, -(double)INFINITY };
    for (uint32_t i = 0; i < n; ) {
        i = gather(job, units, n, i, c, &l);
        weigh_chunk(job, c, &l, head, n_heads, w);
    }
    /* (1 + kept + away) / all was covered, (1 + kept) / all is. */
    for (uint32_t h = 0; h < n_heads; h++)
        job->covered[(uint64_t)c->pick->row * job->n_heads + head + h] /= (float)(1.0 + exp(w[h].away - add_logs(0.0, w[h].kept)));
}

static uint32_t drop_marked(uint32_t *units, uint32_t n)
{
    uint32_t left = 0;

    for (uint32_t i = 0; i < n; i++)
        if (!(units[i] & HSRI_UNIT_AWAY))
            units[left++] = units[i];
    return left;
}

static bool any_marked(const uint32_t *units, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (units[i] & HSRI_UNIT_AWAY)
            return true;
    return false;
}

/* An item is one list. */
static void aside_run(const void *arg, uint64_t first, uint64_t end, uint32_t worker)
{
    const select_job *job = arg;

    for (uint64_t item = first; item < end; item++) {
        const pick_state *p = &job->picks[item / job->kv->n_kv_heads];
        const uint32_t    kv_head = (uint32_t)(item % job->kv->n_kv_heads);
        const uint64_t    list = (uint64_t)p->pick * job->kv->n_kv_heads + kv_head;
        uint32_t         *units = job->units + list * job->stride, n = job->counts[list];
        chunk             c = { .pick = p, .kv_head = kv_head, .scratch = hsri_cpu_scratch(job->dev, worker),
                                .calibration = hsri_cpu_calibration(job->dev, job->kv, job->layer, kv_head) };

        if (!any_marked(units, n))
            continue;
        for (uint32_t h = 0; h < job->heads_per_kv; h += HSRI_ATTEND_MAX_QUERIES)
            weigh_list(job, &c, units, n, kv_head * job->heads_per_kv + h,
                       (uint32_t)hsri_min(HSRI_ATTEND_MAX_QUERIES, job->heads_per_kv - h));
        job->counts[list] = drop_marked(units, n);
    }
}

void hsri_cpu_set_aside(hsri_cpu_device *dev, const select_job *job)
{
    const uint64_t n = (uint64_t)job->n_picks * job->kv->n_kv_heads;

    hsri_cpu_run_items(dev, n, n * job->heads_per_kv * LIST_NS, aside_run, job);
}
