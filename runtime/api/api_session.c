/* SPDX-License-Identifier: Apache-2.0 */
/* Public entry points about sessions: check the arguments, keep second threads out, call inward. */
#include <string.h>

#include "api/options.h"
#include "api/structs.h"
#include "base/array.h"
#include "engine/engine.h"
#include "engine/persist.h"

/* ---- options -------------------------------------------------------------------------------------------------- */

void hsr_session_opts_init(hsr_session_opts *opts, uint32_t struct_size)
{
    const hsr_session_opts defaults = { .struct_size = sizeof defaults, .window_size = 512, .sink_size = 64, .rollback_tokens = 256 };
    hsri_struct_fill(opts, struct_size, &defaults, sizeof defaults);
}

void hsr_request_init(hsr_request *request, uint32_t struct_size)
{
    const hsr_request defaults = {
        .struct_size = sizeof defaults, .max_tokens = 128, .top_p = 1.0f, .repetition_penalty = 1.0f, .penalty_window = -1, .profile = -1,
    };
    hsri_struct_fill(request, struct_size, &defaults, sizeof defaults);
}

static hsr_status check_pages(const char *name, int32_t tokens, int32_t lowest, hsr_error *err)
{
    if (tokens >= lowest && tokens % (int32_t)HSRI_PAGE_TOKENS == 0)
        return HSR_OK;
    return hsri_fail(err, HSR_E_INVALID, "%s is %d, allowed are multiples of %u from %d on", name, tokens, HSRI_PAGE_TOKENS, lowest);
}

hsr_status hsri_check_session_opts(const hsr_session_opts *o, hsr_error *err)
{
    if (o->kv_format < HSR_KV_AUTO || o->kv_format > HSR_KV_VTQ)
        return hsri_fail(err, HSR_E_INVALID, "kv_format is %d, this library knows %d to %d", o->kv_format, HSR_KV_AUTO, HSR_KV_VTQ);
    if (o->index_kind < HSR_INDEX_AUTO || o->index_kind > HSR_INDEX_CLUSTER)
        return hsri_fail(err, HSR_E_INVALID, "index_kind is %d, this library knows %d to %d", o->index_kind,
                         HSR_INDEX_AUTO, HSR_INDEX_CLUSTER);
    if (o->sketch_4bit < 0 || o->sketch_4bit % 8)
        return hsri_fail(err, HSR_E_INVALID, "sketch_4bit is %d, allowed are multiples of 8", o->sketch_4bit);
    if (o->sketch_2bit < 0 || o->sketch_2bit % 16)
        return hsri_fail(err, HSR_E_INVALID, "sketch_2bit is %d, allowed are multiples of 16", o->sketch_2bit);
    if (o->rollback_tokens < 0)
        return hsri_fail(err, HSR_E_INVALID, "rollback_tokens is %d, it cannot be negative", o->rollback_tokens);
    HSRI_TRY(check_pages("window_size", o->window_size, (int32_t)HSRI_PAGE_TOKENS, err));
    return check_pages("sink_size", o->sink_size, 0, err);
}

/* ---- one thread per session ----------------------------------------------------------------------------------- */

static hsr_status check(const hsr_session *s, const char *function, hsr_error *err)
{
    hsri_clear(err);
    if (!s)
        return hsri_fail(err, HSR_E_INVALID, "%s: session is NULL", function);
    return hsri_engine_check_fork(s->engine, err);
}

static hsr_status enter(hsr_session *s, const char *function, hsr_error *err)
{
    HSRI_TRY(check(s, function, err));
    if (atomic_exchange_explicit(&s->entered, true, memory_order_acquire))
        return hsri_fail(err, HSR_E_BUSY, "%s: another thread is inside this session", function);
    return HSR_OK;
}

static hsr_status leave(hsr_session *s, hsr_status status)
{
    atomic_store_explicit(&s->entered, false, memory_order_release);
    return status;
}

/* ---- life ----------------------------------------------------------------------------------------------------- */

hsr_status hsr_session_create(hsr_engine *e, const hsr_session_opts *opts, hsr_session **session, hsr_error *err)
{
    hsr_session_opts known;

    hsri_clear(err);
    if (!session)
        return hsri_fail(err, HSR_E_INVALID, "hsr_session_create: session is NULL");
    *session = NULL;
    if (!e)
        return hsri_fail(err, HSR_E_INVALID, "hsr_session_create: engine is NULL");
    HSRI_TRY(hsri_engine_check_fork(e, err));
    hsr_session_opts_init(&known, sizeof known);
    if (opts)
        HSRI_TRY(hsri_struct_in(&known, sizeof known, opts, "hsr_session_opts", err));
    HSRI_TRY(hsri_check_session_opts(&known, err));
    hsri_engine_enter(e);
    hsr_status st = hsri_session_create(e, &known, session, err);
    hsri_engine_leave(e);
    return st;
}

hsr_status hsr_session_destroy(hsr_session **session, hsr_error *err)
{
    hsri_clear(err);
    if (!session || !*session)
        return HSR_OK;
    hsr_session *s = *session;
    hsr_status st = enter(s, "hsr_session_destroy", err);
    if (st == HSR_E_BUSY)
        return st;
    if (st == HSR_OK) {
        hsr_engine *e = s->engine;
        hsri_engine_enter(e);
        hsri_session_destroy(s);
        hsri_engine_leave(e);
    }
    hsri_clear(err);   /* in a forked child there is nothing to free */
    *session = NULL;
    return HSR_OK;
}

hsr_status hsr_session_fork(hsr_session *s, hsr_session **fork, hsr_error *err)
{
    if (fork)
        *fork = NULL;
    HSRI_TRY(enter(s, "hsr_session_fork", err));
    if (!fork)
        return leave(s, hsri_fail(err, HSR_E_INVALID, "hsr_session_fork: fork is NULL"));
    hsri_engine_enter(s->engine);
    hsr_status st = hsri_session_fork(s, fork, err);
    hsri_engine_leave(s->engine);
    return leave(s, st);
}

/* ---- tokens --------------------------------------------------------------------------------------------------- */

hsr_status hsr_session_append(hsr_session *s, const int32_t *ids, uint64_t n, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_append", err));
    if (!ids || n == 0)
        return leave(s, hsri_fail(err, HSR_E_INVALID, "hsr_session_append: no tokens"));
    hsri_engine_enter(s->engine);
    hsr_status st = hsri_session_append(s, ids, n, err);
    hsri_engine_leave(s->engine);
    return leave(s, st);
}

hsr_status hsr_session_truncate(hsr_session *s, uint64_t n, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_truncate", err));
    hsri_engine_enter(s->engine);
    hsr_status st = hsri_session_truncate(s, n, err);
    hsri_engine_leave(s->engine);
    return leave(s, st);
}

hsr_status hsr_session_set_profile(hsr_session *s, int32_t profile, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_set_profile", err));
    hsri_engine_enter(s->engine);
    hsr_status st = hsri_session_set_profile(s, profile, err);
    hsri_engine_leave(s->engine);
    return leave(s, st);
}

/* ---- observing ------------------------------------------------------------------------------------------------ */

static hsr_status check_observe(const hsr_session *s, int32_t what, int32_t layer, uint64_t first, uint64_t n,
                                const float *out, uint64_t size, hsr_error *err)
{
    const hsr_model_info *info = &s->engine->model->info;
    const bool masses = what == HSR_OBSERVE_MASSES;
    const uint64_t width = (uint64_t)info->n_kv_heads * (masses ? 1 : (uint64_t)info->head_dim);
    const uint64_t most = masses ? hsri_div_up(s->n_computed, HSRI_PAGE_TOKENS) : s->n_computed;
    if (what < HSR_OBSERVE_KEYS || what > HSR_OBSERVE_MASSES)
        return hsri_fail(err, HSR_E_INVALID, "hsr_session_observe: what is %d, this library knows 1 to 3", what);
    if (layer < 0 || layer >= info->n_layers)
        return hsri_fail(err, HSR_E_INVALID, "hsr_session_observe: layer is %d, the model has %d", layer, info->n_layers);
    if (hsri_session_has_work(s) || s->request.active)
        return hsri_fail(err, HSR_E_STATE, "hsr_session_observe: work is under way");
    if (n > most || first > most - n)
        return hsri_fail(err, HSR_E_INVALID, "hsr_session_observe: %s %llu to %llu, the session has computed %llu",
                         masses ? "pages" : "positions",
                         (unsigned long long)first, (unsigned long long)(first + n), (unsigned long long)most);
    if (n && (!out || size / width < n))
        return hsri_fail(err, HSR_E_INVALID, "hsr_session_observe: out holds %llu floats, %llu are needed",
                         (unsigned long long)(out ? size : 0), (unsigned long long)(n * width));
    return HSR_OK;
}

hsr_status hsr_session_observe(hsr_session *s, int32_t what, int32_t layer, uint64_t first, uint64_t n,
                               float *out, uint64_t size, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_observe", err));
    hsri_engine_enter(s->engine);
    hsr_status st = check_observe(s, what, layer, first, n, out, size, err);
    if (st == HSR_OK)
        st = what == HSR_OBSERVE_MASSES ? hsri_masses_read(s, (uint32_t)layer, first, n, out, err)
                                        : hsri_session_observe(s, what, layer, first, n, out, err);
    hsri_engine_leave(s->engine);
    return leave(s, st);
}

hsr_status hsr_session_fill(hsr_session *s, uint64_t n, uint64_t seed, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_fill", err));
    hsri_engine_enter(s->engine);
    hsr_status st = hsri_session_admit_fill(s, n, err);
    if (st == HSR_OK)
        st = hsri_session_fill(s, n, seed, err);
    if (st < 0)
        hsri_cache_unadmit(s->cache, s->n_tokens);
    hsri_engine_leave(s->engine);
    return leave(s, st);
}

static hsr_status check_capture(const hsr_session *s, const hsr_capture *c, hsr_error *err)
{
    const int32_t n_layers = s->engine->model->info.n_layers;
    if (c->n == 0)
        return HSR_OK;
    if (c->layer_first < 0 || c->layer_end > n_layers || c->layer_first >= c->layer_end)
        return hsri_fail(err, HSR_E_INVALID, "hsr_capture: layers %d to %d, the model has %d", c->layer_first, c->layer_end, n_layers);
    if (c->stride == 0 || (!c->queries && !c->n_slices))
        return hsri_fail(err, HSR_E_INVALID, "hsr_capture: %s", c->stride == 0 ? "stride is 0" : "neither queries nor n_slices is given");
    if (c->slices && (!c->n_slices || c->max_slices == 0))
        return hsri_fail(err, HSR_E_INVALID, "hsr_capture: slices without %s", c->n_slices ? "max_slices" : "n_slices");
    return HSR_OK;
}

hsr_status hsr_session_capture(hsr_session *s, const hsr_capture *capture, hsr_error *err)
{
    hsr_capture known = { .struct_size = sizeof known };
    HSRI_TRY(enter(s, "hsr_session_capture", err));
    hsr_status st = hsri_struct_in(&known, sizeof known, capture, "hsr_capture", err);
    if (st == HSR_OK)
        st = check_capture(s, &known, err);
    if (st < 0)
        return leave(s, st);
    hsri_engine_enter(s->engine);
    s->capture = known;
    hsri_engine_leave(s->engine);
    return leave(s, HSR_OK);
}

hsr_status hsr_session_rebuild(hsr_session *s, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_rebuild", err));
    hsri_engine_enter(s->engine);
    hsr_status st = hsri_session_rebuild(s, err);
    hsri_engine_leave(s->engine);
    return leave(s, st);
}

hsr_status hsr_session_tokens(hsr_session *s, uint64_t first, int32_t *out, uint64_t *n, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_tokens", err));
    if (!n || (*n && !out))
        return leave(s, hsri_fail(err, HSR_E_INVALID, "hsr_session_tokens: n or out is NULL"));
    pthread_mutex_lock(&s->engine->lock);
    const uint64_t have = first < s->n_tokens ? s->n_tokens - first : 0, copied = have < *n ? have : *n;
    if (copied)
        memcpy(out, s->ids + first, copied * sizeof *out);
    pthread_mutex_unlock(&s->engine->lock);
    *n = have;
    return leave(s, HSR_OK);
}

/* ---- work ----------------------------------------------------------------------------------------------------- */

hsr_status hsr_session_generate(hsr_session *s, const hsr_request *request, hsr_error *err)
{
    hsr_request known;

    HSRI_TRY(enter(s, "hsr_session_generate", err));
    hsr_request_init(&known, sizeof known);
    hsr_status st = request ? hsri_struct_in(&known, sizeof known, request, "hsr_request", err) : HSR_OK;
    if (st < 0)
        return leave(s, st);
    hsri_engine_enter(s->engine);
    st = hsri_session_generate(s, &known, err);
    hsri_engine_leave(s->engine);
    return leave(s, st);
}

/* Lock held. */
static hsr_status next_event(hsr_session *s, hsr_event *event, hsr_error *err)
{
    hsr_event ev;
    for (;;) {
        if (hsri_session_pop_event(s, &ev))
            break;
        if (!s->request.active)
            return HSR_AGAIN;
        hsri_engine_advance(s->engine);
    }
    if (ev.kind == HSR_EVENT_FAILED && err)
        hsri_fail(err, ev.status, "%s", s->error.message);
    return hsri_struct_out(event, &ev, sizeof ev, "hsr_event", err);
}

hsr_status hsr_session_next(hsr_session *s, hsr_event *event, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_next", err));
    hsr_status st = hsri_struct_check(event, "hsr_event", err);   /* before an event is taken that could not be delivered */
    if (st < 0)
        return leave(s, st);
    pthread_mutex_lock(&s->engine->lock);
    st = next_event(s, event, err);
    pthread_mutex_unlock(&s->engine->lock);
    return leave(s, st);
}

static hsr_status run(hsr_session *s, int32_t (*progress)(void *, uint64_t, uint64_t), void *user, hsr_error *err)
{
    pthread_mutex_lock(&s->engine->lock);
    hsr_status st = hsri_session_run(s, progress, user, err);
    pthread_mutex_unlock(&s->engine->lock);
    return st;
}

hsr_status hsr_session_prefill(hsr_session *s, int32_t (*progress)(void *user, uint64_t done, uint64_t total), void *user, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_prefill", err));
    return leave(s, run(s, progress, user, err));
}

/* Append and say where the logits go, with no step in between. */
static hsr_status append_for_logits(hsr_session *s, const int32_t *ids, uint64_t n, float *logits, hsr_error *err)
{
    const uint64_t from = s->n_tokens;
    HSRI_TRY(hsri_session_append(s, ids, n, err));
    s->logits = logits;
    s->logits_from = from;
    return HSR_OK;
}

hsr_status hsr_session_logits(hsr_session *s, const int32_t *ids, uint64_t n, float *logits, uint64_t size, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_logits", err));
    const uint64_t vocab = s->engine->model->hp.vocab_size;
    if (!ids || n == 0 || !logits)
        return leave(s, hsri_fail(err, HSR_E_INVALID, "hsr_session_logits: no tokens or no room"));
    if (n > size / vocab)
        return leave(s, hsri_fail(err, HSR_E_INVALID, "hsr_session_logits: %llu rows of %llu do not fit %llu floats", (unsigned long long)n,
                                  (unsigned long long)vocab, (unsigned long long)size));
    hsri_engine_enter(s->engine);
    hsr_status st = append_for_logits(s, ids, n, logits, err);
    hsri_engine_leave(s->engine);
    if (st >= 0)
        st = run(s, NULL, NULL, err);
    pthread_mutex_lock(&s->engine->lock);
    s->logits = NULL;
    pthread_mutex_unlock(&s->engine->lock);
    return leave(s, st);
}

hsr_status hsr_session_cancel(hsr_session *s, hsr_error *err)
{
    HSRI_TRY(check(s, "hsr_session_cancel", err));
    pthread_mutex_lock(&s->engine->lock);
    hsri_session_cancel(s);
    hsri_engine_leave(s->engine);
    return HSR_OK;
}

hsr_status hsr_session_get_stats(hsr_session *s, hsr_session_stats *stats, hsr_error *err)
{
    HSRI_TRY(check(s, "hsr_session_get_stats", err));
    pthread_mutex_lock(&s->engine->lock);
    hsr_status st = hsri_struct_out(stats, &s->published, sizeof s->published, "hsr_session_stats", err);
    pthread_mutex_unlock(&s->engine->lock);
    return st;
}

/* ---- saved sessions ------------------------------------------------------------------------------------------- */

hsr_status hsr_session_save(hsr_session *s, const char *path, int32_t (*progress)(void *user, uint64_t done, uint64_t total),
                            void *user, hsr_error *err)
{
    HSRI_TRY(enter(s, "hsr_session_save", err));
    if (!path || !path[0])
        return leave(s, hsri_fail(err, HSR_E_INVALID, "hsr_session_save: path is %s", path ? "empty" : "NULL"));
    return leave(s, hsri_session_save(s, path, progress, user, err));
}

void hsr_restore_opts_init(hsr_restore_opts *opts, uint32_t struct_size)
{
    const hsr_restore_opts defaults = { .struct_size = sizeof defaults };
    hsri_struct_fill(opts, struct_size, &defaults, sizeof defaults);
}

hsr_status hsr_session_restore(hsr_engine *e, const char *path, const hsr_restore_opts *opts, hsr_session **session, hsr_error *err)
{
    hsr_restore_opts known;
    hsr_session_opts like;

    hsri_clear(err);
    if (!session)
        return hsri_fail(err, HSR_E_INVALID, "hsr_session_restore: session is NULL");
    *session = NULL;
    if (!e || !path || !path[0])
        return hsri_fail(err, HSR_E_INVALID, "hsr_session_restore: %s", !e ? "engine is NULL" : path ? "path is empty" : "path is NULL");
    HSRI_TRY(hsri_engine_check_fork(e, err));
    hsr_restore_opts_init(&known, sizeof known);
    if (opts)
        HSRI_TRY(hsri_struct_in(&known, sizeof known, opts, "hsr_restore_opts", err));
    if (known.kv_format < HSR_KV_AUTO || known.kv_format > HSR_KV_VTQ)
        return hsri_fail(err, HSR_E_INVALID, "kv_format is %d, this library knows %d to %d", known.kv_format, HSR_KV_AUTO, HSR_KV_VTQ);
    if (known.like) {
        hsr_session_opts_init(&like, sizeof like);
        HSRI_TRY(hsri_struct_in(&like, sizeof like, known.like, "hsr_session_opts", err));
        HSRI_TRY(hsri_check_session_opts(&like, err));
        known.like = &like;
    }
    return hsri_session_restore(e, path, &known, session, err);
}
