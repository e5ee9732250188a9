/* SPDX-License-Identifier: Apache-2.0 */
/* One sequence: its tokens, its request, its events. Nothing here computes; steps do (step.c). */
#include "engine/engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"
#include "engine/spans.h"

/* ---- creation ------------------------------------------------------------------------------------------------- */

static hsri_kv_type kv_type_of(const hsr_engine *e, int32_t kv_format)
{
    if (kv_format == HSR_KV_AUTO)
        return e->model->hp.weight_dtype == HSRI_DTYPE_F32 ? HSRI_KV_TYPE_F32 : HSRI_KV_TYPE_BF16;
    return kv_format == HSR_KV_F32 ? HSRI_KV_TYPE_F32 : HSRI_KV_TYPE_BF16;
}

/* AUTO is plain, but for sparse sessions without a calibration: bounds, which choose there, want larger budgets, and int8 halves what
 * they cost. Models of dtype f32 are for parity and stay as they are. */
static int32_t resolved_format(const hsr_session *s)
{
    const hsr_model *m = s->engine->model;
    const bool small = s->profile->sparse && !m->calibration && m->hp.weight_dtype != HSRI_DTYPE_F32;
    return s->opts.kv_format == HSR_KV_AUTO && small ? HSR_KV_INT8 : s->opts.kv_format;
}

/* Encoded formats start from bf16 pages, or from f32 ones where the model's own type is f32. */
static hsr_status choose_format(hsr_session *s, hsr_error *err)
{
    const hsr_engine *e = s->engine;
    const int32_t kv_format = s->opts.kv_format = resolved_format(s);   /* forks keep it, whatever their profile becomes */
    const bool calibrated = e->model->calibration != NULL;

    s->kv_type = kv_type_of(e, kv_format <= HSR_KV_BF16 ? kv_format : HSR_KV_AUTO);
    s->format = kv_format <= HSR_KV_BF16 ? s->kv_type : (hsri_kv_type)(HSRI_KV_TYPE_INT8 + kv_format - HSR_KV_INT8);
    if ((s->format == HSRI_KV_TYPE_COMPACT || s->format == HSRI_KV_TYPE_VTQ) && !calibrated)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "kv_format %s needs the model's calibration, and none was loaded",
                         s->format == HSRI_KV_TYPE_COMPACT ? "compact" : "vtq");
    if (hsri_page_bytes(s->format, e->model->hp.head_dim) == 0)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "kv_format %d does not exist for heads of size %u: they must be multiples of 16",
                         kv_format, e->model->hp.head_dim);
    return HSR_OK;
}

static hsr_status choose_index(hsr_session *s, hsr_error *err)
{
    hsr_session_opts *o = &s->opts;
    const uint32_t d = s->engine->model->hp.head_dim;

    s->index_shape = (hsri_index_shape){ .head_dim = d, .n_4bit = (uint32_t)o->sketch_4bit, .n_2bit = (uint32_t)o->sketch_2bit };
    if (o->index_kind == HSR_INDEX_AUTO)
        s->index_shape.kind = hsri_profile_index(s->profile);
    else
        s->index_shape.kind = o->index_kind == HSR_INDEX_CLUSTER ? HSRI_INDEX_SKETCH : (hsri_index_kind)(o->index_kind - HSR_INDEX_NONE);
    s->index_shape.clusters = o->index_kind == HSR_INDEX_AUTO ? hsri_profile_clusters(s->profile) : o->index_kind == HSR_INDEX_CLUSTER;
    if (o->sketch_4bit == 0 && o->sketch_2bit == 0)
        s->index_shape.n_4bit = (uint32_t)hsri_min(24, d / 8 * 8);
    if (s->index_shape.kind == HSRI_INDEX_SKETCH && !s->engine->model->calibration)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "index_kind sketch needs the model's calibration, and none was loaded");
    if (s->index_shape.kind == HSRI_INDEX_SKETCH &&
        (s->index_shape.n_4bit + s->index_shape.n_2bit > d || s->index_shape.n_4bit + s->index_shape.n_2bit == 0))
        return hsri_fail(err, HSR_E_INVALID, "sketch_4bit %u and sketch_2bit %u: a sketch has 1 to %u components, the head size",
                         s->index_shape.n_4bit, s->index_shape.n_2bit, d);
    if (!hsri_profile_can_read(s->profile, (hsri_index_kind)s->index_shape.kind))
        return hsri_fail(err, HSR_E_UNSUPPORTED, "the index of the session does not hold what the selector of profile %d reads",
                         s->profile_id);
    hsri_index_shape_fill(&s->index_shape);
    return HSR_OK;
}

hsr_status hsri_session_choose(hsr_session *s, hsr_error *err)
{
    s->profile_id = s->opts.profile;
    HSRI_TRY(hsri_engine_profile(s->engine, s->profile_id, &s->profile, err));
    HSRI_TRY(choose_format(s, err));
    return choose_index(s, err);
}

hsr_status hsri_session_check_context(const hsr_engine *e, hsr_session_opts *o, hsr_error *err)
{
    const int64_t trained = e->model->hp.context_length;
    if (o->context == 0)
        o->context = trained;
    if (o->context < 0 || o->context > INT32_MAX)
        return hsri_fail(err, HSR_E_INVALID, "context is %lld, allowed are 1 to %d tokens", (long long)o->context, INT32_MAX);
    if (o->context > trained && !o->beyond_trained)
        return hsri_fail(err, HSR_E_CONTEXT,
                         "a context of %lld tokens is above the %lld the model was trained for; beyond_trained allows it",
                         (long long)o->context, (long long)trained);
    return HSR_OK;
}

/* Choose the rotary table, and write it if it is the session's own. */
static hsr_status set_rope(hsr_session *s, hsr_error *err)
{
    hsr_engine *e = s->engine;
    const uint64_t bytes = e->model->hp.rotary_dim / 2 * sizeof(float);

    s->rope_table = hsri_rope_choose(&e->model->hp, s->context, e->rope_own);
    if (s->rope_table < 2)
        return HSR_OK;
    s->rope_table = 2 + s->slot;
    e->dev->copy_in(e->queue, (hsri_ref){ .buf = e->rope_buf, .offset = s->rope_table * bytes }, e->rope_own, bytes);
    return e->dev->wait(e->queue, err);
}

/* A session without cache, not yet listed. */
static hsr_status new_session(hsr_engine *e, const hsr_session_opts *opts, hsr_session **out, hsr_error *err)
{
    if (e->n_free_slots == 0)
        return hsri_fail(err, HSR_E_NOSPACE, "the engine's %d sessions are all in use (max_sessions)", e->opts.max_sessions);
    hsr_session *s = hsri_new_array(1, sizeof *s);
    if (!s)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a session");
    s->engine = e;
    s->opts = *opts;
    s->context = (uint64_t)opts->context;
    s->error.struct_size = sizeof s->error;
    atomic_init(&s->entered, false);
    s->slot = e->free_slots[e->n_free_slots - 1];
    hsr_status st = hsri_session_choose(s, err);
    if (st == HSR_OK)
        st = set_rope(s, err);
    if (st < 0) {
        free(s);
        return st;
    }
    *out = s;
    return HSR_OK;
}

/* The session becomes visible: nothing can fail from here on. */
static void list_session(hsr_session *s)
{
    hsr_engine *e = s->engine;
    e->n_free_slots--;
    e->sessions[e->n_sessions++] = s;
}

hsri_cache_opts hsri_session_cache_opts(const hsr_session *s)
{
    const hsr_engine *e = s->engine;
    return (hsri_cache_opts){
        .type = s->kv_type, .format = s->format, .index = s->index_shape, .window_pages = (uint32_t)s->opts.window_size / HSRI_PAGE_TOKENS,
        .sink_pages = (uint32_t)s->opts.sink_size / HSRI_PAGE_TOKENS, .tiers = e->tiers,
        .chunk_tokens = (uint32_t)hsri_max((uint64_t)e->opts.chunk_tokens, HSRI_PICK_ROWS),
        /* A request may compute the last token once more. */
        .rollback_tokens = hsri_max((uint64_t)s->opts.rollback_tokens, 1),
    };
}

hsr_status hsri_session_create(hsr_engine *e, const hsr_session_opts *opts, hsr_session **out, hsr_error *err)
{
    hsr_session_opts o = *opts;
    hsr_session *s;

    HSRI_TRY(hsri_session_check_context(e, &o, err));
    HSRI_TRY(new_session(e, &o, &s, err));
    hsri_cache_opts c = hsri_session_cache_opts(s);
    c.lineage = ++e->n_lineages;
    hsr_status st = hsri_cache_create(e->dev, e->pool, &e->shape, &c, &s->cache, err);
    if (st < 0) {
        free(s);
        return st;
    }
    list_session(s);
    *out = s;
    return HSR_OK;
}

static void end_request(hsr_session *s)
{
    hsri_request *r = &s->request;
    hsri_device *dev = s->engine->dev;

    if (r->bias_buf)
        dev->free(dev, r->bias_buf);
    if (r->penalises)
        hsri_history_destroy(&r->history, dev);
    *r = (hsri_request){ 0 };
}

void hsri_session_destroy(hsr_session *s)
{
    hsr_engine *e = s->engine;
    uint32_t i = 0;

    while (e->sessions[i] != s)
        i++;
    memmove(&e->sessions[i], &e->sessions[i + 1], (e->n_sessions - i - 1) * sizeof *e->sessions);
    e->n_sessions--;
    if (e->turn > i)
        e->turn--;
    e->free_slots[e->n_free_slots++] = s->slot;
    end_request(s);
    hsri_masses_destroy(s);
    hsri_spans_forget(s);
    hsri_cache_destroy(s->cache);
    free(s->appended);
    free(s->ids);
    free(s);
}

/* ---- tokens --------------------------------------------------------------------------------------------------- */

static hsr_status check_usable(const hsr_session *s, const char *what, hsr_error *err)
{
    if (s->status < 0)
        return hsri_fail(err, HSR_E_STATE, "%s: the session failed earlier (%s); truncate or rebuild it first", what, s->error.message);
    if (s->request.active)
        return hsri_fail(err, HSR_E_STATE, "%s: a request is running", what);
    return HSR_OK;
}

static hsr_status check_ids(const hsr_session *s, const int32_t *ids, uint64_t n, hsr_error *err)
{
    const uint32_t vocab = s->engine->model->hp.vocab_size;
    for (uint64_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab)
            return hsri_fail(err, HSR_E_TOKEN, "token %llu of the prompt is %d, the vocabulary has ids 0 to %u",
                             (unsigned long long)i, ids[i], vocab - 1);
    return HSR_OK;
}

void hsri_session_trim_appended(hsr_session *s)
{
    size_t done = 0, kept = 0;
    while (done < s->n_appended && s->appended[done] <= s->n_computed)
        s->appended_first = s->appended[done++];
    for (size_t i = done; i < s->n_appended && s->n_computed < s->target; i++)
        if (kept == 0 || s->appended[kept - 1] < s->target)
            s->appended[kept++] = hsri_min(s->appended[i], s->target);
    s->n_appended = kept;
}

/* Positions [n_computed or the last append's end, end) are one append. */
static hsr_status note_append(hsr_session *s, uint64_t end, hsr_error *err)
{
    hsri_session_trim_appended(s);
    if (!hsri_grow((void **)&s->appended, &s->appended_cap, s->n_appended + 1, sizeof *s->appended))
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a list of %zu appends", s->n_appended + 1);
    if (s->n_appended == 0)
        s->appended_first = s->n_computed;
    s->appended[s->n_appended++] = end;
    s->untold = false;      /* what had failed is to be computed again */
    return HSR_OK;
}

/* Memory for selections among the first n tokens. */
static hsr_status reserve(hsr_session *s, const hsri_profile *p, uint64_t n, hsr_error *err)
{
    HSRI_TRY(hsri_spans_reserve(s->engine, p, s, n, err));
    return hsri_masses_reserve(s, p, n, err);
}

/* Room for n ids in all, and KV for the first n_kv of them. */
static hsr_status make_room(hsr_session *s, uint64_t n, uint64_t n_kv, hsr_error *err)
{
    if (!hsri_grow((void **)&s->ids, &s->ids_cap, n, sizeof *s->ids))
        return hsri_fail(err, HSR_E_NOMEM, "no memory for %llu token ids", (unsigned long long)n);
    HSRI_TRY(reserve(s, s->profile, n_kv, err));
    return hsri_cache_admit(s->cache, n_kv, err);
}

hsr_status hsri_session_append(hsr_session *s, const int32_t *ids, uint64_t n, hsr_error *err)
{
    HSRI_TRY(check_usable(s, "append", err));
    if (n > s->context || s->n_tokens + n > s->context)
        return hsri_fail(err, HSR_E_CONTEXT, "%llu tokens after %llu do not fit a context of %llu", (unsigned long long)n,
                         (unsigned long long)s->n_tokens, (unsigned long long)s->context);
    HSRI_TRY(check_ids(s, ids, n, err));
    HSRI_TRY(make_room(s, s->n_tokens + n, s->n_tokens + n, err));
    hsr_status st = note_append(s, s->n_tokens + n, err);
    if (st < 0) {
        hsri_cache_unadmit(s->cache, s->n_tokens);
        return st;
    }
    memcpy(s->ids + s->n_tokens, ids, n * sizeof *ids);
    s->n_tokens += n;
    s->target = s->n_tokens;
    return HSR_OK;
}

hsr_status hsri_session_admit_fill(hsr_session *s, uint64_t n, hsr_error *err)
{
    HSRI_TRY(check_usable(s, "fill", err));
    if (s->n_computed == 0 || hsri_session_has_work(s) || s->n_computed != s->n_tokens)
        return hsri_fail(err, HSR_E_STATE, "fill: the session must have computed tokens to sample from, and no others");
    if (n > s->context || s->n_tokens + n > s->context)
        return hsri_fail(err, HSR_E_CONTEXT, "%llu tokens after %llu do not fit a context of %llu", (unsigned long long)n,
                         (unsigned long long)s->n_tokens, (unsigned long long)s->context);
    return make_room(s, s->n_tokens + n, s->n_tokens + n, err);
}

/* A step that was not computed, for another session's sake, leaves pages prepared for the next. Without work there is none. */
static void drop_prepared(hsr_session *s)
{
    hsri_cache_truncate(s->cache, s->n_computed, NULL);
}

/* Forget the KV of positions from n on, not the ids. */
static hsr_status cut_cache(hsr_session *s, uint64_t n, hsr_error *err)
{
    HSRI_TRY(hsri_cache_truncate(s->cache, n, err));
    s->n_computed = n;
    s->target = n;
    hsri_session_trim_appended(s);
    return HSR_OK;
}

/* Cut to n tokens, which the next request must be able to go on from: it computes the last of them once more. */
static hsr_status cut_to_go_on(hsr_session *s, uint64_t n, hsr_error *err)
{
    if (n > 0 && hsri_cache_truncates_too_far(s->cache, n - 1))
        return hsri_fail(err, HSR_E_STATE, "truncate from %llu to %llu tokens: at most %d (rollback_tokens) can be taken back",
                         (unsigned long long)s->n_computed, (unsigned long long)n, s->opts.rollback_tokens);
    return cut_cache(s, n, err);
}

hsr_status hsri_session_truncate(hsr_session *s, uint64_t n, hsr_error *err)
{
    if (s->request.active)
        return hsri_fail(err, HSR_E_STATE, "truncate: a request is running");
    if (n > s->n_tokens)
        return hsri_fail(err, HSR_E_INVALID, "truncate to %llu tokens, but the session has %llu",
                         (unsigned long long)n, (unsigned long long)s->n_tokens);
    if (n < s->n_computed)
        HSRI_TRY(cut_to_go_on(s, n, err));
    else if (n == s->n_computed)
        drop_prepared(s);
    else
        hsri_cache_unadmit(s->cache, n);
    s->n_tokens = n;
    s->target = hsri_min(s->target, n);
    hsri_session_trim_appended(s);
    s->kept_end = hsri_min(s->kept_end, n);
    hsri_masses_cut(s, n);
    s->status = HSR_OK;
    s->untold = false;
    return HSR_OK;
}

hsr_status hsri_session_rebuild(hsr_session *s, hsr_error *err)
{
    if (s->request.active)
        return hsri_fail(err, HSR_E_STATE, "rebuild: a request is running");
    HSRI_TRY(reserve(s, s->profile, s->n_tokens, err));
    HSRI_TRY(cut_cache(s, 0, err));
    hsri_masses_cut(s, 0);
    HSRI_TRY(hsri_cache_admit(s->cache, s->n_tokens, err));
    if (s->n_tokens > 0)
        HSRI_TRY(note_append(s, s->n_tokens, err));
    s->target = s->n_tokens;
    s->status = HSR_OK;
    return HSR_OK;
}

hsr_status hsri_session_set_profile(hsr_session *s, int32_t id, hsr_error *err)
{
    const hsri_profile *p;
    if (s->request.active)
        return hsri_fail(err, HSR_E_STATE, "set_profile: a request is running");
    HSRI_TRY(hsri_engine_profile(s->engine, id, &p, err));
    if (!hsri_profile_can_read(p, (hsri_index_kind)s->index_shape.kind))
        return hsri_fail(err, HSR_E_UNSUPPORTED, "the index of the session does not hold what the selector of profile %d reads", id);
    HSRI_TRY(reserve(s, p, s->n_tokens, err));
    if (p != s->profile)
        hsri_masses_unlist(&s->masses);
    s->profile = p;
    s->profile_id = id;
    return HSR_OK;
}

hsr_status hsri_session_fork(hsr_session *s, hsr_session **out, hsr_error *err)
{
    hsr_engine *e = s->engine;
    hsr_session *f;

    HSRI_TRY(check_usable(s, "fork", err));
    if (hsri_session_has_work(s))
        return hsri_fail(err, HSR_E_STATE, "fork: %llu appended tokens are not computed yet",
                         (unsigned long long)(s->target - s->n_computed));
    HSRI_TRY(new_session(e, &s->opts, &f, err));
    hsr_status st = HSR_OK;
    if (!hsri_grow((void **)&f->ids, &f->ids_cap, s->n_tokens ? s->n_tokens : 1, sizeof *f->ids))
        st = hsri_fail(err, HSR_E_NOMEM, "no memory for %llu token ids", (unsigned long long)s->n_tokens);
    else
        st = hsri_masses_fork(s, f, err);
    if (st == HSR_OK)
        st = hsri_cache_fork(s->cache, e->queue, &f->cache, err);
    if (st < 0) {
        hsri_masses_destroy(f);
        free(f->ids);
        free(f);
        return st;
    }
    if (s->n_tokens)
        memcpy(f->ids, s->ids, s->n_tokens * sizeof *f->ids);
    f->n_tokens = s->n_tokens;
    f->n_computed = f->target = s->n_computed;
    f->kept_end = s->kept_end;
    f->profile = s->profile;
    f->profile_id = s->profile_id;
    f->computed_with = s->computed_with;
    list_session(f);
    *out = f;
    return HSR_OK;
}

/* ---- requests ------------------------------------------------------------------------------------------------- */

static hsr_status in_range(const char *name, double value, double lo, double hi, bool open_lo, hsr_error *err)
{
    if (isfinite(value) && value <= hi && (open_lo ? value > lo : value >= lo))
        return HSR_OK;
    return hsri_fail(err, HSR_E_INVALID, "%s is %g, allowed are values in %c%g, %g]", name, value, open_lo ? '(' : '[', lo, hi);
}

static hsr_status check_lists(const hsr_session *s, const hsr_request *r, hsr_error *err)
{
    const uint32_t vocab = s->engine->model->hp.vocab_size;
    if (r->profile < -1)
        return hsri_fail(err, HSR_E_INVALID, "profile is %d, allowed are -1 and registered ids", r->profile);
    if (r->n_stop > HSRI_MAX_STOP)
        return hsri_fail(err, HSR_E_INVALID, "n_stop is %u, at most %u stop tokens are possible", r->n_stop, HSRI_MAX_STOP);
    if ((r->n_stop && !r->stop) || (r->n_bias && !r->bias))
        return hsri_fail(err, HSR_E_INVALID, "n_stop or n_bias is given without its array");
    if (r->n_bias > vocab)
        return hsri_fail(err, HSR_E_INVALID, "n_bias is %u, the vocabulary has %u ids", r->n_bias, vocab);
    for (uint32_t i = 0; i < r->n_stop; i++)
        if (r->stop[i] < 0 || (uint32_t)r->stop[i] >= vocab)
            return hsri_fail(err, HSR_E_TOKEN, "stop token %d is outside the vocabulary of %u", r->stop[i], vocab);
    for (uint32_t i = 0; i < r->n_bias; i++) {
        if (r->bias[i].token < 0 || (uint32_t)r->bias[i].token >= vocab)
            return hsri_fail(err, HSR_E_TOKEN, "bias for token %d, which is outside the vocabulary of %u", r->bias[i].token, vocab);
        if (isnan(r->bias[i].bias) || r->bias[i].bias == INFINITY)
            return hsri_fail(err, HSR_E_INVALID, "bias of token %d is %g", r->bias[i].token, (double)r->bias[i].bias);
    }
    return HSR_OK;
}

static hsr_status check_request(const hsr_session *s, const hsr_request *r, hsr_error *err)
{
    const double big = 3.4e38;
    if (r->max_tokens < 0)
        return hsri_fail(err, HSR_E_INVALID, "max_tokens is %d, it cannot be negative", r->max_tokens);
    if (r->top_k < 0)
        return hsri_fail(err, HSR_E_INVALID, "top_k is %d, it cannot be negative (0: off)", r->top_k);
    if (r->n_logprobs < 0 || r->n_logprobs > 20)
        return hsri_fail(err, HSR_E_INVALID, "n_logprobs is %d, allowed are 0 to 20", r->n_logprobs);
    if (r->penalty_window < -1)
        return hsri_fail(err, HSR_E_INVALID, "penalty_window is %d, allowed are -1 (all) and above", r->penalty_window);
    HSRI_TRY(in_range("temperature", (double)r->temperature, 0, big, false, err));
    HSRI_TRY(in_range("top_p", (double)r->top_p, 0, 1, true, err));
    HSRI_TRY(in_range("min_p", (double)r->min_p, 0, 1, false, err));
    HSRI_TRY(in_range("repetition_penalty", (double)r->repetition_penalty, 0, big, true, err));
    HSRI_TRY(in_range("presence_penalty", (double)r->presence_penalty, -big, big, false, err));
    HSRI_TRY(in_range("frequency_penalty", (double)r->frequency_penalty, -big, big, false, err));
    return check_lists(s, r, err);
}

static hsr_status copy_bias(hsr_session *s, const hsr_request *in, hsri_request *r, hsr_error *err)
{
    hsr_engine *e = s->engine;
    const uint64_t bytes = in->n_bias * sizeof *in->bias;
    if (in->n_bias == 0)
        return HSR_OK;
    HSRI_TRY(e->dev->alloc(e->dev, bytes, &r->bias_buf, err));
    r->n_bias = in->n_bias;
    e->dev->copy_in(e->queue, (hsri_ref){ .buf = r->bias_buf }, in->bias, bytes);
    return e->dev->wait(e->queue, err);
}

static hsr_status fill_request(hsr_session *s, const hsr_request *in, hsr_error *err)
{
    hsri_request *r = &s->request;

    *r = (hsri_request){
        .max_tokens = (uint32_t)in->max_tokens, .temperature = in->temperature, .top_p = in->top_p, .min_p = in->min_p,
        .repetition_penalty = in->repetition_penalty, .presence_penalty = in->presence_penalty, .frequency_penalty = in->frequency_penalty,
        .top_k = in->top_k, .n_logprobs = in->n_logprobs, .seed = in->seed, .ignore_eos = in->ignore_eos != 0, .n_stop = in->n_stop,
    };
    if (in->n_stop)
        memcpy(r->stop, in->stop, in->n_stop * sizeof *in->stop);
    HSRI_TRY(copy_bias(s, in, r, err));
    if (in->repetition_penalty == 1.0f && in->presence_penalty == 0.0f && in->frequency_penalty == 0.0f)
        return HSR_OK;
    HSRI_TRY(hsri_history_create(&r->history, s->engine->dev, s->engine->model->hp.vocab_size, s->n_tokens + r->max_tokens,
                                 in->penalty_window, s->ids, s->n_tokens, err));
    r->penalises = true;
    return HSR_OK;
}

hsr_status hsri_session_generate(hsr_session *s, const hsr_request *in, hsr_error *err)
{
    HSRI_TRY(check_usable(s, "generate", err));
    HSRI_TRY(check_request(s, in, err));
    if (s->n_tokens == 0)
        return hsri_fail(err, HSR_E_STATE, "generate: the session is empty, append at least one token");
    if (in->profile >= 0)
        HSRI_TRY(hsri_session_set_profile(s, in->profile, err));
    if (in->max_tokens > 0 && s->n_tokens == s->context)
        return hsri_fail(err, HSR_E_CONTEXT, "generate: all %llu positions of the context are taken", (unsigned long long)s->context);

    /* The last sampled token is never computed: it needs no KV. */
    const uint64_t n = hsri_min(s->n_tokens + (uint64_t)in->max_tokens, s->context);
    HSRI_TRY(make_room(s, n, hsri_max(s->n_tokens, n - (in->max_tokens > 0)), err));
    hsr_status st = fill_request(s, in, err);
    /* Sampling needs the last token's logits: compute it once more if it was already computed. */
    if (st >= 0 && in->max_tokens > 0 && s->n_computed == s->n_tokens) {
        st = cut_cache(s, s->n_tokens - 1, err);
        s->kept_end = s->n_tokens;
        if (st >= 0)
            st = hsri_cache_admit(s->cache, hsri_max(s->n_tokens, n - 1), err);
    }
    if (st < 0) {
        end_request(s);
        hsri_cache_unadmit(s->cache, s->n_tokens);
        return st;
    }
    s->n_events = 0;   /* what an earlier request left uncollected */
    s->untold = false;
    s->request.active = true;
    s->target = s->n_tokens;
    if (!hsri_session_has_work(s))
        hsri_session_finish(s, HSR_FINISH_LENGTH);
    return HSR_OK;
}

/* ---- events --------------------------------------------------------------------------------------------------- */

static hsr_event *push_event(hsr_session *s, int32_t kind)
{
    hsr_event *ev = &s->events[(s->event_first + s->n_events++) % HSRI_EVENT_ROOM];
    *ev = (hsr_event){ .struct_size = sizeof *ev, .kind = kind, .session = s, .user = s->opts.user, .token = -1, .position = -1 };
    return ev;
}

bool hsri_session_pop_event(hsr_session *s, hsr_event *event)
{
    if (s->n_events == 0)
        return false;
    *event = s->events[s->event_first];
    s->event_first = (s->event_first + 1) % HSRI_EVENT_ROOM;
    s->n_events--;
    return true;
}

void hsri_session_finish(hsr_session *s, int32_t reason)
{
    push_event(s, HSR_EVENT_FINISHED)->reason = reason;
    end_request(s);
    s->target = s->n_computed;
    hsri_cache_unadmit(s->cache, s->n_tokens);
}

/* Work ends; ids that were neither computed nor delivered are dropped only on cancel. */
static void stop_work(hsr_session *s, hsr_status status)
{
    s->n_failures++;
    s->target = s->n_computed;
    hsri_session_trim_appended(s);
    s->logits = NULL;
    if (s->request.active)
        push_event(s, HSR_EVENT_FAILED)->status = status;
    end_request(s);
    drop_prepared(s);
}

void hsri_session_fail(hsr_session *s, hsr_status status)
{
    if (status == HSR_E_NONFINITE)
        s->status = status;
    s->error.status = status;
    s->untold = !s->request.active;     /* a request tells by its event */
    stop_work(s, status);
}

void hsri_session_apply_cancel(hsr_session *s)
{
    s->cancel = false;
    if (!s->request.active && !hsri_session_has_work(s))
        return;
    s->n_tokens = hsri_min(s->n_tokens, hsri_max(s->n_computed, s->kept_end));
    s->untold = !s->request.active;     /* perhaps nobody waits yet */
    hsri_fail(&s->error, HSR_E_CANCELLED, "cancelled");
    stop_work(s, HSR_E_CANCELLED);
}

/* What begins after the call is not cancelled, even if a step of others is still under way. */
void hsri_session_cancel(hsr_session *s)
{
    if (!s->request.active && !hsri_session_has_work(s))
        return;
    s->cancel = true;
    if (!s->engine->stepping)
        hsri_session_apply_cancel(s);
}

static bool is_stop(const hsr_session *s, int32_t token)
{
    const hsr_model_info *info = &s->engine->model->info;
    const hsri_request *r = &s->request;
    for (uint32_t i = 0; i < r->n_stop; i++)
        if (r->stop[i] == token)
            return true;
    for (int32_t i = 0; i < info->n_eos_tokens && !r->ignore_eos; i++)
        if (info->eos_tokens[i] == token)
            return true;
    return false;
}

void hsri_session_take(hsr_session *s, const hsri_sampled *sampled)
{
    hsri_request *r = &s->request;

    s->ids[s->n_tokens++] = sampled->token;
    s->kept_end = s->n_tokens;
    s->decode_tokens++;
    r->n_out++;
    if (r->penalises)
        hsri_history_push(&r->history, s->ids, s->n_tokens);

    hsr_event *ev = push_event(s, HSR_EVENT_TOKEN);
    ev->token = sampled->token;
    ev->logprob = sampled->logprob;
    ev->position = (int64_t)s->n_tokens - 1;
    ev->n_logprobs = sampled->n_logprobs;
    memcpy(ev->logprobs, sampled->logprobs, sizeof ev->logprobs);

    if (is_stop(s, sampled->token))
        hsri_session_finish(s, HSR_FINISH_STOP);
    else if (r->n_out == r->max_tokens || s->n_tokens == s->context)
        hsri_session_finish(s, HSR_FINISH_LENGTH);
    else
        s->target = s->n_tokens;
}

/* ---- waiting for work ----------------------------------------------------------------------------------------- */

/* Work that a caller may wait for: all of it, or with a request running, what comes before its first event. */
static bool has_prompt_work(const hsr_session *s)
{
    return hsri_session_has_work(s) && !(s->request.active && s->request.n_out > 0);
}

hsr_status hsri_session_run(hsr_session *s, int32_t (*progress)(void *, uint64_t, uint64_t), void *user, hsr_error *err)
{
    hsr_engine *e = s->engine;
    const uint64_t first = s->n_computed, total = s->target - first, failures = s->n_failures;
    uint64_t told = UINT64_MAX;

    for (;;) {
        if (progress && told != s->n_computed) {
            told = s->n_computed;
            const uint64_t done = hsri_min(told - first, total);
            pthread_mutex_unlock(&e->lock);
            const int32_t stop = progress(user, done, total);
            pthread_mutex_lock(&e->lock);
            if (stop)
                return hsri_fail(err, HSR_E_CANCELLED, "stopped by the progress callback");
        }
        if (!has_prompt_work(s))
            break;
        hsri_engine_advance(e);
    }
    if (s->n_failures != failures || s->untold) {
        s->untold = false;
        hsri_fail(err, s->error.status, "%s", s->error.message);
        return s->error.status;
    }
    return HSR_OK;
}
