/* SPDX-License-Identifier: Apache-2.0 */
/* Public entry points about engines. */
#include <string.h>
#include <unistd.h>

#include "api/options.h"
#include "api/structs.h"
#include "engine/engine.h"

#define MAX_THREADS  1024
#define MAX_CHUNK    4096

void hsr_engine_opts_init(hsr_engine_opts *opts, uint32_t struct_size)
{
    const hsr_engine_opts defaults = {
        .struct_size = sizeof defaults, .chunk_tokens = 512, .max_sessions = 256, .max_batch = 1024, .log_level = HSR_LOG_WARN,
        .io_deadline_ms = 30000, .enter_above = 0.7f, .leave_below = 0.5f, .prefetch_depth = 4,
        .prefetch_sources = HSR_PREFETCH_DEFAULT,
    };
    hsri_struct_fill(opts, struct_size, &defaults, sizeof defaults);
}

hsr_status hsri_check_engine_opts(const hsr_engine_opts *o, hsr_error *err)
{
    HSRI_TRY(hsri_in_range("n_threads", o->n_threads, 0, MAX_THREADS, err));
    HSRI_TRY(hsri_in_range("isa", o->isa, HSR_ISA_AUTO, HSR_ISA_AMX, err));
    HSRI_TRY(hsri_in_range("chunk_tokens", o->chunk_tokens, 1, MAX_CHUNK, err));
    HSRI_TRY(hsri_in_range("max_sessions", o->max_sessions, 1, HSRI_MAX_SESSIONS, err));
    HSRI_TRY(hsri_in_range("max_batch", o->max_batch, 1, 16 * MAX_CHUNK, err));
    HSRI_TRY(hsri_in_range("io_engine", o->io_engine, HSR_IO_AUTO, HSR_IO_PREAD, err));
    HSRI_TRY(hsri_in_range("io_deadline_ms", o->io_deadline_ms, 1, INT32_MAX, err));
    HSRI_TRY(hsri_in_range("importance", o->importance, HSR_IMPORTANCE_BALANCED, HSR_IMPORTANCE_CHAT, err));
    HSRI_TRY(hsri_in_range("prefetch_depth", o->prefetch_depth, 0, 4096, err));
    const uint32_t sources = HSR_PREFETCH_GROUPS | HSR_PREFETCH_RISING | HSR_PREFETCH_QUERY;
    if (o->prefetch_sources & ~sources)
        return hsri_fail(err, HSR_E_INVALID, "prefetch_sources is 0x%x, this library knows 0x%x", o->prefetch_sources, sources);
    HSRI_TRY(hsri_in_range("readable_tiers", o->readable_tiers, HSR_READ_ALL, HSR_READ_HOT, err));
    if (o->readable_tiers == HSR_READ_HOT && o->warm_bytes != 0 && !o->cold_dir)
        return hsri_fail(err, HSR_E_INVALID, "readable_tiers HOT with warm_bytes needs a cold_dir: pages have their place there");
    if (o->readable_tiers == HSR_READ_HOT && o->warm_bytes != 0 && o->warm_bytes < HSRI_BLOCK_BYTES)
        return hsri_fail(err, HSR_E_INVALID, "warm_bytes is %llu, less than one block of 1 MiB", (unsigned long long)o->warm_bytes);
    if (o->cold_bytes != 0 && !o->cold_dir)
        return hsri_fail(err, HSR_E_INVALID, "cold_bytes is %llu without a cold_dir", (unsigned long long)o->cold_bytes);
    if (o->cold_dir && (!o->cold_dir[0] || (o->cold_bytes != 0 && o->cold_bytes < HSRI_BLOCK_BYTES)))
        return hsri_fail(err, HSR_E_INVALID, o->cold_dir[0] ? "cold_bytes is less than one extent of 1 MiB" : "cold_dir is empty");
    HSRI_TRY(hsri_in_range("log_level", o->log_level, HSR_LOG_ERROR, HSR_LOG_DEBUG, err));
    if (o->flags & ~HSR_ENGINE_ASYNC_DEBUG)
        return hsri_fail(err, HSR_E_INVALID, "flags is 0x%x, this library knows 0x%x", o->flags, HSR_ENGINE_ASYNC_DEBUG);
    if (o->hot_bytes != 0 && o->hot_bytes < HSRI_BLOCK_BYTES)
        return hsri_fail(err, HSR_E_INVALID, "hot_bytes is %llu, less than one block of 1 MiB", (unsigned long long)o->hot_bytes);
    return HSR_OK;
}

hsr_status hsr_engine_create(hsr_model *model, const hsr_engine_opts *opts, hsr_engine **engine, hsr_error *err)
{
    hsr_engine_opts known;

    hsri_clear(err);
    if (!engine)
        return hsri_fail(err, HSR_E_INVALID, "hsr_engine_create: engine is NULL");
    *engine = NULL;
    if (!model)
        return hsri_fail(err, HSR_E_INVALID, "hsr_engine_create: model is NULL");
    hsr_engine_opts_init(&known, sizeof known);
    if (opts)
        HSRI_TRY(hsri_struct_in(&known, sizeof known, opts, "hsr_engine_opts", err));
    HSRI_TRY(hsri_check_engine_opts(&known, err));
    return hsri_engine_create(model, &known, engine, err);
}

hsr_status hsr_engine_destroy(hsr_engine **engine, hsr_error *err)
{
    hsri_clear(err);
    if (!engine || !*engine)
        return HSR_OK;
    HSRI_TRY(hsri_engine_destroy(*engine, err));
    *engine = NULL;
    return HSR_OK;
}

void hsr_profile_init(hsr_profile *profile, uint32_t struct_size)
{
    const hsr_profile defaults = {
        .struct_size = sizeof defaults, .sparse = 1, .budget = 1024, .slice_size = 16, .virtual_tokens = 1, .block_size_coarse = 1024,
        .block_size_fine = 64, .top_k_coarse = 32, .top_k_fine = 16,
    };
    hsri_struct_fill(profile, struct_size, &defaults, sizeof defaults);
}

static hsr_status check_engine(const hsr_engine *e, const char *function, hsr_error *err)
{
    hsri_clear(err);
    if (!e)
        return hsri_fail(err, HSR_E_INVALID, "%s: engine is NULL", function);
    return hsri_engine_check_fork(e, err);
}

hsr_status hsr_profile_register(hsr_engine *e, const hsr_profile *profile, int32_t *id, hsr_error *err)
{
    hsr_profile known;
    HSRI_TRY(check_engine(e, "hsr_profile_register", err));
    if (!id)
        return hsri_fail(err, HSR_E_INVALID, "hsr_profile_register: id is NULL");
    hsr_profile_init(&known, sizeof known);
    HSRI_TRY(hsri_struct_in(&known, sizeof known, profile, "hsr_profile", err));
    hsri_engine_enter(e);
    hsr_status st = hsri_engine_register(e, &known, id, err);
    hsri_engine_leave(e);
    return st;
}

hsr_status hsr_engine_cancel(hsr_engine *e, hsr_error *err)
{
    HSRI_TRY(check_engine(e, "hsr_engine_cancel", err));
    pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < e->n_sessions; i++)
        hsri_session_cancel(e->sessions[i]);
    hsri_engine_leave(e);
    return HSR_OK;
}

hsr_status hsr_engine_get_stats(hsr_engine *e, hsr_engine_stats *stats, hsr_error *err)
{
    HSRI_TRY(check_engine(e, "hsr_engine_get_stats", err));
    pthread_mutex_lock(&e->lock);
    hsr_status st = hsri_struct_out(stats, &e->stats, sizeof e->stats, "hsr_engine_stats", err);
    pthread_mutex_unlock(&e->lock);
    return st;
}

/* Event i of an array whose elements are as large as the first one says. */
static void *event_at(hsr_event *events, uint32_t i) { return (char *)events + (size_t)i * events->struct_size; }

/* Before a step, whose events must find their place. */
static hsr_status check_events(hsr_event *events, uint32_t n_events, hsr_error *err)
{
    for (uint32_t i = 0; i < n_events; i++) {
        const hsr_event *ev = event_at(events, i);
        HSRI_TRY(hsri_struct_check(ev, "hsr_event", err));
        if (ev->struct_size != events->struct_size)
            return hsri_fail(err, HSR_E_INVALID, "hsr_engine_step: event %u has struct_size %u, event 0 has %u", i, ev->struct_size,
                             events->struct_size);
    }
    return HSR_OK;
}

/* Hand out events, in session order, as far as there is room. */
static hsr_status collect(hsr_engine *e, hsr_event *events, uint32_t n_events, uint32_t *n, hsr_error *err)
{
    hsr_event ev;

    for (uint32_t i = 0; i < e->n_sessions; i++)
        while (*n < n_events && hsri_session_pop_event(e->sessions[i], &ev)) {
            HSRI_TRY(hsri_struct_out(event_at(events, *n), &ev, sizeof ev, "hsr_event", err));
            ++*n;
        }
    return HSR_OK;
}

hsr_status hsr_engine_step(hsr_engine *e, hsr_event *events, uint32_t n_events, uint32_t *n, hsr_error *err)
{
    HSRI_TRY(check_engine(e, "hsr_engine_step", err));
    if (!n || (n_events && !events))
        return hsri_fail(err, HSR_E_INVALID, "hsr_engine_step: events or n is NULL");
    *n = 0;
    HSRI_TRY(check_events(events, n_events, err));
    pthread_mutex_lock(&e->lock);
    if (e->stepping) {
        pthread_mutex_unlock(&e->lock);
        return hsri_fail(err, HSR_E_BUSY, "another thread is stepping this engine");
    }
    while (e->stepping || e->n_waiting)
        pthread_cond_wait(&e->changed, &e->lock);
    hsr_status ran = hsri_step_run(e);
    hsr_status st = collect(e, events, n_events, n, err);
    pthread_mutex_unlock(&e->lock);
    if (st < 0)
        return st;
    return ran == HSR_AGAIN && *n == 0 ? HSR_AGAIN : HSR_OK;
}
