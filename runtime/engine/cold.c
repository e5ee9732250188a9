/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's cold tier: making it from the options, ending it, and its statistics. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "base/array.h"
#include "base/status.h"
#include "engine/engine.h"

/* Time that ending an engine gives transfers under way. */
#define END_MS 10000u
/* What block numbers of 24 bits can name. */
#define MOST_BYTES (HSRI_BLOCK_BYTES * (1ull << 24))

/* Without a size: half of what is free where the file goes. */
hsr_status hsri_cold_bytes(const hsr_engine_opts *o, uint64_t *bytes, hsr_error *err)
{
    struct statvfs fs;
    *bytes = o->cold_bytes;
    if (*bytes > MOST_BYTES)
        return hsri_fail(err, HSR_E_INVALID, "cold_bytes is %llu, at most 16 TiB are possible", (unsigned long long)*bytes);
    if (!o->cold_dir || o->cold_bytes)
        return HSR_OK;
    if (statvfs(o->cold_dir, &fs) < 0)
        return hsri_fail_sys(err, HSR_E_IO, errno, "cold_dir %s", o->cold_dir);
    *bytes = hsri_min(hsri_max((uint64_t)fs.f_bavail * fs.f_frsize / 2, HSRI_BLOCK_BYTES), MOST_BYTES);
    return HSR_OK;
}

static hsri_importance_opts importance_of(const hsr_engine_opts *o)
{
    hsri_importance_opts imp;
    hsri_importance_preset_fill(&imp, (hsri_importance_preset)o->importance);
    if (o->weight_locality != 0 || o->weight_frequency != 0 || o->weight_recency != 0) {
        imp.locality = o->weight_locality;
        imp.frequency = o->weight_frequency;
        imp.recency = o->weight_recency;
    }
    imp.enter = o->enter_above;
    imp.leave = o->leave_below;
    return imp;
}

hsr_status hsri_cold_create(hsr_engine *e, hsr_error *err)
{
    const hsr_engine_opts *o = &e->opts;
    if (!o->cold_dir)
        return HSR_OK;
    e->cold_dir = hsri_new_array(strlen(o->cold_dir) + 1, 1);
    if (!e->cold_dir)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for the name of cold_dir");
    strcpy(e->cold_dir, o->cold_dir);
    HSRI_TRY(hsri_cold_bytes(o, &e->opts.cold_bytes, err));
    if (o->readable_tiers == HSR_READ_HOT && o->warm_bytes)
        HSRI_TRY(hsri_pool_create(e->dev, o->warm_bytes, &e->warm, err));
    const hsri_tiers_opts opts = {
        .warm = e->warm, .warm_memory = e->warm ? e->dev->host_range(e->dev, hsri_pool_buf(e->warm)) : NULL,
        .pool = e->pool, .memory = e->dev->host_range(e->dev, hsri_pool_buf(e->pool)), .head_dim = e->model->hp.head_dim,
        .mover = {
            .io = { .kind = (hsri_io_kind)o->io_engine, .deadline_ms = (uint32_t)o->io_deadline_ms, .log = &e->log },
            .directory = e->cold_dir, .bytes = o->cold_bytes,
        },
        .importance = importance_of(o), .deadline_ms = (uint32_t)o->io_deadline_ms,
        .rising = o->prefetch_sources & HSR_PREFETCH_RISING,
    };
    HSRI_TRY(hsri_importance_check(&opts.importance, err));
    if (!opts.memory)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "cold_dir: the memory of back end %s cannot be reached by the host", e->dev->name);
    HSRI_TRY(hsri_tiers_create(&opts, &e->tiers, err));
    e->step_caches = hsri_new_array((size_t)o->max_batch, sizeof *e->step_caches);
    e->pick_parts = hsri_new_array((size_t)o->max_batch, sizeof *e->pick_parts);
    if (!e->step_caches || !e->pick_parts)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for steps of %d rows", o->max_batch);
    return hsri_holder_create(e->dev, e->queue, e->tiers, (uint32_t)o->prefetch_depth, o->prefetch_sources, &e->holder, err);
}

const hsri_residency *hsri_cold_begin(hsr_engine *e)
{
    const hsri_step *t = &e->step;
    if (!e->tiers)
        return NULL;
    for (uint32_t i = 0; i < t->n_parts; i++)
        e->step_caches[i] = t->parts[i].session->cache;
    for (uint32_t i = 0; i < e->spans.n_spans; i++) {
        const hsri_span *span = &e->spans.spans[i];
        for (uint32_t j = span->first_pick; j < span->first_pick + span->n_picks; j++)
            e->pick_parts[j] = t->rows[span->row + e->spans.picks[j].row].seq;
    }
    const bool sparse = e->spans.n_picks > 0;
    const hsri_holder_step step = {
        e->step_caches, t->rows, sparse ? e->pick_parts : NULL, sparse ? e->spans.settings : NULL, t->n_parts, t->n_rows,
    };
    return hsri_holder_begin(e->holder, &step);
}

void hsri_cold_end(hsr_engine *e, hsr_status status, hsr_error *err)
{
    if (!e->tiers)
        return;
    const uint32_t failed = status < 0 ? hsri_holder_failed(e->holder) : HSRI_NO_SEQ;
    hsri_holder_end(e->holder);
    if (failed == HSRI_NO_SEQ)
        return;
    /* That session alone: the others are served again. */
    hsri_part *p = &e->step.parts[failed];
    p->status = status;
    p->session->error = *err;
    p->lost = true;
}

bool hsri_cold_destroy(hsr_engine *e)
{
    hsri_holder_destroy(e->holder);
    free(e->step_caches);
    free(e->pick_parts);
    const bool ended = hsri_tiers_destroy(e->tiers, END_MS, NULL) == HSR_OK;
    hsri_pool_destroy(e->warm);
    free(e->cold_dir);
    return ended;
}

_Static_assert(HSR_N_LATENCIES == HSRI_IO_BUCKETS, "one histogram");

void hsri_cold_publish(hsr_engine *e)
{
    hsr_engine_stats *out = &e->stats;
    hsri_tiers_stats t;
    if (!e->tiers)
        return;
    hsri_tiers_take_in(e->tiers);   /* a transfer that nobody waits for any more may be all that holds a page */
    hsri_tiers_get_stats(e->tiers, &t);
    memcpy(out->io_engine, t.mover.engine, sizeof out->io_engine);
    out->cold_pages = t.absent;
    out->cold_bytes_used = t.home_extents * HSRI_BLOCK_BYTES;
    out->cold_bytes_total = t.home_extents_total * HSRI_BLOCK_BYTES;
    out->cold_hits = t.hits;
    out->cold_misses = t.misses;
    out->cold_late = t.late;
    out->cold_estimated = t.estimated;
    out->warm_pages = t.warm;
    out->warm_moved_in = t.warm_in;
    out->warm_moved_out = t.warm_out;
    out->warm_dropped = t.warm_dropped;
    out->cold_waits = t.waits;
    out->cold_wait_ns = t.wait_ns;
    out->cold_wait_ns_p99 = t.wait_ns_p99;
    out->cold_prefetched = out->cold_prefetch_hits = out->cold_prefetch_wasted = 0;
    for (int i = 0; i < HSR_N_PREFETCH; i++) {
        out->prefetch[i] = t.prefetch[i];
        out->cold_prefetched += t.prefetch[i].pages;
        out->cold_prefetch_hits += t.prefetch[i].hits;
        out->cold_prefetch_wasted += t.prefetch[i].wasted;
    }
    out->cold_read_bytes = t.read_bytes;
    out->cold_written_bytes = t.written_bytes;
    out->cold_evictions = t.evictions;
    out->cold_max_moves = t.max_moves;
    out->cold_pages_moved = t.moved;
    out->cold_errors = t.read_failures + t.write_failures + t.mover.bad_pages;
    out->mover_cpu_ns = t.mover.cpu_ns;
    out->cold_largest_free_run = t.homes_free_run;
    out->cold_slots_wasted = t.homes_wasted;
    out->warm_largest_free_run = t.warm_free_run;
    out->warm_slots_wasted = t.warm_wasted;
    memcpy(out->cold_read_latency, t.mover.io.read_latency, sizeof out->cold_read_latency);
}
