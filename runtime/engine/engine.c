/* SPDX-License-Identifier: Apache-2.0 */
/* An engine's life, its lock, and whose turn it is. */
#include "engine/engine.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/array.h"
#include "base/cpu.h"
#include "base/memory.h"
#include "base/status.h"
#include "engine/spans.h"

/* ---- creation ------------------------------------------------------------------------------------------------- */

static hsr_status create_device(hsr_engine *e, hsr_error *err)
{
    if (e->opts.n_threads == 0)
        e->opts.n_threads = hsri_cpu_count();

    HSRI_TRY(hsri_cpu_device_create(e->opts.n_threads, e->opts.isa, &e->log, &e->dev, err));
    if (e->opts.flags & HSR_ENGINE_ASYNC_DEBUG) {
        hsri_device *outer;
        HSRI_TRY(hsri_async_device_create(e->dev, &outer, err));
        e->dev = outer;
    }
    return e->dev->queue_create(e->dev, &e->queue, err);
}

static hsr_status create_weights(hsr_engine *e, hsr_error *err)
{
    const hsri_container *c = e->model->container;
    uint32_t buf;
    HSRI_TRY(e->dev->view(e->dev, hsri_container_base(c), hsri_container_size(c), &buf, err));
    return hsri_weights_bind(e->model, buf, &e->weights, err);
}

hsr_status hsri_pool_bytes(const hsr_engine_opts *o, uint64_t *bytes, hsr_error *err)
{
    const uint64_t total = hsri_memory_total();
    if (total && (o->hot_bytes > total || o->warm_bytes > total - o->hot_bytes))
        return hsri_fail(err, HSR_E_INVALID, "hot_bytes is %llu and warm_bytes %llu, but the machine has %llu bytes of memory",
                         (unsigned long long)o->hot_bytes, (unsigned long long)o->warm_bytes, (unsigned long long)total);
    *bytes = o->hot_bytes;
    if (*bytes == 0)
        *bytes = hsri_min(hsri_max(hsri_memory_available() / 2, 64ull << 20), 1ull << 42);
    if (o->readable_tiers != HSR_READ_HOT)
        *bytes += o->warm_bytes;
    return HSR_OK;
}

static hsr_status create_pool(hsr_engine *e, hsr_error *err)
{
    const hsri_hparams *hp = &e->model->hp;
    uint64_t bytes = 0;
    HSRI_TRY(hsri_pool_bytes(&e->opts, &bytes, err));
    HSRI_TRY(hsri_pool_create(e->dev, bytes, &e->pool, err));
    hsri_kv_shape_init(&e->shape, e->pool, hp->n_layers, hp->n_kv_heads, hp->head_dim);
    return HSR_OK;
}

static hsr_status create_calibration(hsr_engine *e, hsr_error *err)
{
    const hsri_calibration *c = e->model->calibration;
    if (!c)
        return HSR_OK;
    HSRI_TRY(e->dev->alloc(e->dev, c->n_floats * sizeof *c->floats, &e->calibration_buf, err));
    e->shape.view.calibration = (hsri_ref){ .buf = e->calibration_buf };
    e->dev->copy_in(e->queue, e->shape.view.calibration, c->floats, c->n_floats * sizeof *c->floats);
    return e->dev->wait(e->queue, err);
}

/* ---- profiles ------------------------------------------------------------------------------------------------- */

#define MAX_PROFILES 4096u

/* Once for each engine: what AUTO has to do without. */
static void tell_uncalibrated(hsr_engine *e, const hsr_profile *in)
{
    if (!in->sparse || in->selector != HSR_SELECT_AUTO || e->model->calibration || e->told_uncalibrated)
        return;
    e->told_uncalibrated = true;
    hsri_log_write(&e->log, HSR_LOG_WARN, "no calibration of the model was loaded: selector auto is minmax without virtual tokens, %s",
                   e->model->hp.weight_dtype == HSRI_DTYPE_F32 ? "and sketches and compact pages are not to be had"
                                                               : "and the key-value format auto of sparse sessions is int8");
}

hsr_status hsri_engine_register(hsr_engine *e, const hsr_profile *in, int32_t *id, hsr_error *err)
{
    hsri_profile *p;
    if (e->n_profiles == MAX_PROFILES)
        return hsri_fail(err, HSR_E_NOSPACE, "an engine holds at most %u profiles", MAX_PROFILES);
    if (in->sparse && in->prefill_budget > 0 && e->opts.max_batch < (int32_t)HSRI_PICK_ROWS)
        return hsri_fail(err, HSR_E_INVALID,
                         "prefill_budget is %d: sparse prompts need an engine with max_batch of at least %u, this one has %d",
                         in->prefill_budget, HSRI_PICK_ROWS, e->opts.max_batch);
    if (in->sparse && in->selector == HSR_SELECT_ORACLE && e->tiers)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "selector oracle reads every page for every query: not with a cold tier");
    HSRI_TRY(hsri_profile_create(in, e->model->hp.n_layers, e->model->calibration != NULL, &p, err));
    if (!hsri_grow((void **)&e->profiles, &e->profiles_cap, e->n_profiles + 1, sizeof *e->profiles)) {
        free(p);
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a profile");
    }
    *id = (int32_t)e->n_profiles;
    e->profiles[e->n_profiles++] = p;
    tell_uncalibrated(e, in);
    return HSR_OK;
}

hsr_status hsri_engine_profile(const hsr_engine *e, int32_t id, const hsri_profile **profile, hsr_error *err)
{
    if (id < 0 || (size_t)id >= e->n_profiles)
        return hsri_fail(err, HSR_E_INVALID, "profile %d is not registered; ids 0 to %d are", id, (int32_t)e->n_profiles - 1);
    *profile = e->profiles[id];
    return HSR_OK;
}

/* The file's rope tables at places 0 and 1; sessions write their own behind them. */
static hsr_status create_rope(hsr_engine *e, hsr_error *err)
{
    const uint64_t bytes = e->model->hp.rotary_dim / 2 * sizeof(float);
    HSRI_TRY(e->dev->alloc(e->dev, (2 + (uint64_t)e->opts.max_sessions) * bytes, &e->rope_buf, err));
    hsri_ref at = { .buf = e->rope_buf };
    e->dev->copy(e->queue, at, e->weights.inv_freq, bytes);
    if (e->weights.inv_freq_long.buf)
        e->dev->copy(e->queue, hsri_at(at, bytes), e->weights.inv_freq_long, bytes);
    return e->dev->wait(e->queue, err);
}

static hsr_status create_tables(hsr_engine *e, hsr_error *err)
{
    const uint32_t n = (uint32_t)e->opts.max_sessions;
    e->sessions = hsri_new_array(n, sizeof *e->sessions);
    e->free_slots = hsri_new_array(n, sizeof *e->free_slots);
    e->rope_own = hsri_new_array(e->model->hp.rotary_dim, sizeof(float));
    if (!e->sessions || !e->free_slots || !e->rope_own)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a table of %u sessions", n);
    for (uint32_t i = 0; i < n; i++)
        e->free_slots[e->n_free_slots++] = n - 1 - i;
    return HSR_OK;
}

static hsr_status create_parts(hsr_engine *e, hsr_error *err)
{
    HSRI_TRY(create_device(e, err));
    HSRI_TRY(create_weights(e, err));
    HSRI_TRY(create_pool(e, err));
    HSRI_TRY(hsri_cold_create(e, err));
    HSRI_TRY(create_calibration(e, err));
    int32_t dense;
    HSRI_TRY(hsri_engine_register(e, &(hsr_profile){ 0 }, &dense, err));
    HSRI_TRY(create_tables(e, err));
    HSRI_TRY(create_rope(e, err));
    HSRI_TRY(hsri_scratch_create(e->dev, &e->model->hp, (uint32_t)e->opts.max_batch, &e->scratch, err));
    HSRI_TRY(e->dev->reserve_sampling(e->dev, HSRI_LOGIT_ROWS, e->model->hp.tokenizer_size, err));
    HSRI_TRY(hsri_spans_create(e, err));
    return hsri_step_create(e, err);
}

static void destroy_parts(hsr_engine *e)
{
    hsri_step_destroy(e);
    hsri_spans_destroy(e);
    for (size_t i = 0; i < e->n_profiles; i++)
        free(e->profiles[i]);
    free(e->profiles);
    hsri_weights_free(&e->weights);
    const bool ended = hsri_cold_destroy(e);
    hsri_pool_destroy(e->pool);
    if (e->queue)
        e->dev->queue_destroy(e->queue);
    if (e->dev && ended)   /* else the system may still write to the pool: its memory is given up */
        e->dev->destroy(e->dev);
    free(e->sessions);
    free(e->free_slots);
    free(e->rope_own);
    hsri_model_release(e->model);
    hsri_log_destroy(&e->log);
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

hsr_status hsri_engine_create(hsr_model *model, const hsr_engine_opts *opts, hsr_engine **out, hsr_error *err)
{
    hsr_engine *e = hsri_new_array(1, sizeof *e);
    if (!e)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for an engine");
    hsr_status st = hsri_log_init(&e->log, opts->log, opts->log_user, opts->log_level, err);
    if (st < 0) {
        free(e);
        return st;
    }
    pthread_mutex_init(&e->lock, NULL);   /* default attributes cannot fail on this system */
    pthread_cond_init(&e->changed, NULL);
    e->model = model;
    e->opts = *opts;
    e->pid = getpid();
    hsri_model_retain(model);
    st = create_parts(e, err);
    if (st < 0) {
        destroy_parts(e);
        return st;
    }
    hsri_engine_publish(e);
    hsri_log_write(&e->log, HSR_LOG_INFO, "engine: %s, %s, %d threads, %llu MiB hot pool", model->info.arch, hsri_isa_name(e->dev->isa),
                   e->opts.n_threads, (unsigned long long)e->stats.hot_blocks_total);
    *out = e;
    return HSR_OK;
}

hsr_status hsri_engine_destroy(hsr_engine *e, hsr_error *err)
{
    if (getpid() != e->pid)
        return HSR_OK;   /* a forked child: threads, locks and mappings belong to the parent; the child's copy ends with it */
    pthread_mutex_lock(&e->lock);
    const uint32_t n_sessions = e->n_sessions;
    pthread_mutex_unlock(&e->lock);
    if (n_sessions > 0)
        return hsri_fail(err, HSR_E_BUSY, "the engine still has %u sessions", n_sessions);
    destroy_parts(e);
    return HSR_OK;
}

hsr_status hsri_engine_check_fork(const hsr_engine *e, hsr_error *err)
{
    if (getpid() == e->pid)
        return HSR_OK;
    return hsri_fail(err, HSR_E_FORKED, "the engine was made in process %ld, before fork(); make a new one in this process", (long)e->pid);
}

/* ---- the lock and the turn ------------------------------------------------------------------------------------ */

void hsri_engine_enter(hsr_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->n_waiting++;
    while (e->stepping)
        pthread_cond_wait(&e->changed, &e->lock);
    e->n_waiting--;
}

void hsri_engine_leave(hsr_engine *e)
{
    if (!e->stepping)   /* a cancel may come in beside a step, whose caches are not ours to read */
        hsri_engine_publish(e);
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

void hsri_engine_advance(hsr_engine *e)
{
    if (!e->stepping && e->n_waiting == 0)
        hsri_step_run(e);
    else
        pthread_cond_wait(&e->changed, &e->lock);
}

/* ---- statistics ----------------------------------------------------------------------------------------------- */

static void publish_session(hsr_session *s, const hsri_cache_stats *c)
{
    s->published = (hsr_session_stats){
        .struct_size = sizeof s->published, .status = s->status, .n_tokens = s->n_tokens, .n_computed = s->n_computed,
        .context = s->context, .prefill_tokens = s->prefill_tokens, .decode_tokens = s->decode_tokens,
        .kv_bytes = c->bytes, .kv_blocks = c->blocks, .pages_open = c->pages_open, .pages_full = c->pages_full,
        .pages_sealed = c->pages_sealed,
        .kv_format = HSR_KV_F32 + (int32_t)s->format, .running = s->request.active,
        .index_kind = s->index_shape.clusters ? HSR_INDEX_CLUSTER : HSR_INDEX_NONE + (int32_t)s->index_shape.kind,
        .profile = s->profile_id, .index_bytes = c->index_bytes,
        .sparse_rows = s->sparse_rows, .covered = s->sparse_rows ? s->covered : NAN,
        .covered_mean = s->sparse_rows ? s->covered_sum / (double)s->sparse_rows : NAN, .attended_tokens = s->attended,
        .estimated_pages = c->n_estimated,
    };
}

void hsri_engine_publish(hsr_engine *e)
{
    hsr_engine_stats *out = &e->stats;
    hsri_pool_stats p;

    hsri_pool_get_stats(e->pool, &p);
    out->struct_size = sizeof *out;
    out->n_threads = e->opts.n_threads;
    out->isa = e->dev->isa;
    out->n_sessions = (int32_t)e->n_sessions;
    out->hot_blocks_total = p.total;
    out->hot_blocks_used = p.used;
    out->hot_blocks_reserved = p.reserved;
    out->hot_blocks_peak = p.peak_used;
    out->hot_largest_free_run = p.largest_free_run;
    out->hot_bytes_committed = p.committed * HSRI_BLOCK_BYTES;
    out->slot_bytes = e->shape.view.slot_bytes[e->model->hp.weight_dtype == HSRI_DTYPE_F32 ? HSRI_KV_TYPE_F32 : HSRI_KV_TYPE_BF16];
    out->hot_slots_used = out->hot_slots_wasted = out->pages_open = out->pages_full = out->pages_sealed = 0;
    hsri_cold_publish(e);
    const hsri_spent spent = e->dev->spent(e->dev);
    out->attend_ns = spent.attend;
    out->select_ns = spent.select;
    out->seal_ns = spent.seal;
    out->cluster_ns = spent.cluster;
    out->encoded_pages = spent.n_encoded;
    out->encode_error_mean = spent.n_encoded > 0 ? spent.error_sum / (double)spent.n_encoded : 0.0;
    out->encode_error_max = spent.error_max;
    for (uint32_t i = 0; i < e->n_sessions; i++) {
        hsri_cache_stats c;
        hsri_cache_get_stats(e->sessions[i]->cache, &c);
        publish_session(e->sessions[i], &c);
        out->hot_slots_used += c.slots_used;
        out->hot_slots_wasted += c.slots_wasted;
        out->pages_open += c.pages_open;
        out->pages_full += c.pages_full;
        out->pages_sealed += c.pages_sealed;
    }
}
