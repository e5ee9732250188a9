/* SPDX-License-Identifier: Apache-2.0 */
/* One batch step: choose rows, run the model over them, hand out what was sampled.
 *
 * Which sessions share a step changes when a row is computed, never its result, so planning is free to be simple: rows of
 * running requests first, then prompt chunks, starting with the session whose turn it is. */
#include "engine/engine.h"

#include <fenv.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/spans.h"

/* ---- arrays --------------------------------------------------------------------------------------------------- */

static void lay_out(hsri_step *t, uint64_t rows, uint64_t parts, hsri_ref *next)
{
    t->d_rows    = hsri_carve(next, rows * sizeof *t->rows);
    t->d_ids     = hsri_carve(next, rows * sizeof *t->ids);
    t->d_index   = hsri_carve(next, parts * sizeof *t->index);
    t->d_wanted  = hsri_carve(next, rows * sizeof *t->wanted);
    t->d_flags   = hsri_carve(next, rows * sizeof *t->flags);
    t->d_seqs    = hsri_carve(next, parts * sizeof *t->seqs);
    t->d_params  = hsri_carve(next, parts * sizeof *t->params);
    t->d_sampled = hsri_carve(next, parts * sizeof *t->sampled);
}

hsr_status hsri_step_create(hsr_engine *e, hsr_error *err)
{
    hsri_step *t = &e->step;
    const uint64_t rows = (uint64_t)e->opts.max_batch, parts = hsri_min(rows, (uint64_t)e->opts.max_sessions);

    t->parts   = hsri_new_array(parts, sizeof *t->parts);
    t->seqs    = hsri_new_array(parts, sizeof *t->seqs);
    t->params  = hsri_new_array(parts, sizeof *t->params);
    t->sampled = hsri_new_array(parts, sizeof *t->sampled);
    t->rows    = hsri_new_array(rows, sizeof *t->rows);
    t->ids     = hsri_new_array(rows, sizeof *t->ids);
    t->index   = hsri_new_array(parts, sizeof *t->index);
    t->wanted  = hsri_new_array(rows, sizeof *t->wanted);
    t->flags   = hsri_new_array(rows, sizeof *t->flags);
    e->taps     = hsri_new_array(parts, sizeof *e->taps);
    e->tap_rows = hsri_new_array(rows, sizeof *e->tap_rows);
    e->tap_picks = hsri_new_array(rows, sizeof *e->tap_picks);
    e->tap_places = hsri_new_array(rows, sizeof *e->tap_places);
    if (!e->taps || !e->tap_rows || !e->tap_picks || !e->tap_places || !t->parts || !t->seqs || !t->params || !t->sampled || !t->rows ||
        !t->ids || !t->index || !t->wanted || !t->flags)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for steps of %llu rows", (unsigned long long)rows);

    hsri_ref end = { 0 };
    lay_out(t, rows, parts, &end);
    HSRI_TRY(e->dev->alloc(e->dev, end.offset, &t->buf, err));
    hsri_ref start = { .buf = t->buf };
    lay_out(t, rows, parts, &start);
    return HSR_OK;
}

void hsri_step_destroy(hsr_engine *e)
{
    hsri_step *t = &e->step;
    free(t->parts);
    free(t->seqs);
    free(t->params);
    free(t->sampled);
    free(t->rows);
    free(t->ids);
    free(t->index);
    free(t->wanted);
    free(t->flags);
    free(e->taps);
    free(e->tap_rows);
    free(e->tap_picks);
    free(e->tap_places);
}

/* ---- planning (lock held) ------------------------------------------------------------------------------------- */

static bool is_decode(const hsr_session *s) { return s->request.active && s->request.n_out > 0; }

static bool can_serve(const hsr_session *s)
{
    return hsri_session_has_work(s) && (!s->request.active || s->n_events + 2 <= HSRI_EVENT_ROOM);
}

static void add_part(hsri_step *t, hsr_session *s, uint32_t n_rows)
{
    const bool last = s->n_computed + n_rows == s->target;
    t->parts[t->n_parts] = (hsri_part){
        .session = s, .first_row = t->n_rows, .n_rows = n_rows, .sample = last && s->request.active && s->request.max_tokens > 0,
    };
    for (uint32_t i = 0; i < n_rows; i++) {
        t->rows[t->n_rows + i] = (hsri_row){ t->n_parts, (uint32_t)(s->n_computed + i) };
        t->ids[t->n_rows + i] = s->ids[s->n_computed + i];
    }
    t->n_prefill_rows += is_decode(s) ? 0 : n_rows;
    t->n_rows += n_rows;
    t->n_parts++;
}

/* Offer every session of one kind its rows; the first that found no room is served first in the next step. */
static uint32_t plan_kind(hsr_engine *e, bool decode, uint32_t *first_left_out)
{
    hsri_step *t = &e->step;
    const uint32_t max_rows = (uint32_t)e->opts.max_batch;
    uint32_t left_out = 0;

    for (uint32_t k = 0; k < e->n_sessions; k++) {
        const uint32_t i = (e->turn + k) % e->n_sessions;
        hsr_session *s = e->sessions[i];
        if (!can_serve(s) || is_decode(s) != decode)
            continue;
        uint64_t n = hsri_min(s->target - s->n_computed, (uint64_t)e->opts.chunk_tokens);
        n = hsri_spans_rows(s, hsri_min(n, hsri_cache_step_limit(s->cache)), max_rows - t->n_rows);
        if (n > 0) {
            add_part(t, s, (uint32_t)n);
            continue;
        }
        if (left_out++ == 0 && *first_left_out == UINT32_MAX)
            *first_left_out = i;
    }
    return left_out;
}

static void plan(hsr_engine *e)
{
    hsri_step *t = &e->step;
    uint32_t first_left_out = UINT32_MAX;

    t->n_parts = t->n_rows = t->n_sample = t->n_prefill_rows = 0;
    uint32_t queued = plan_kind(e, true, &first_left_out);
    queued += plan_kind(e, false, &first_left_out);
    if (first_left_out != UINT32_MAX)
        e->turn = first_left_out;
    e->stats.n_queued = (int32_t)queued;
}

/* ---- computing (no lock; the elected thread owns everything) -------------------------------------------------- */

static void fill_params(hsri_sample_params *p, const hsri_request *r)
{
    *p = (hsri_sample_params){
        .temperature = r->temperature, .top_p = r->top_p, .min_p = r->min_p, .repetition_penalty = r->repetition_penalty,
        .presence_penalty = r->presence_penalty, .frequency_penalty = r->frequency_penalty, .top_k = r->top_k, .n_logprobs = r->n_logprobs,
        .seed = r->seed, .draw = r->n_out, .bias = { .buf = r->bias_buf }, .n_bias = r->n_bias,
        .seen = { .buf = r->history.buf }, .n_seen = r->history.n_seen,
    };
}

/* Pages for every part. If one gets none, nothing is computed: its session fails, and the others are served again. */
static hsr_status prepare_parts(hsr_engine *e)
{
    hsri_step *t = &e->step;
    for (uint32_t i = 0; i < t->n_parts; i++) {
        hsri_part *p = &t->parts[i];
        hsr_session *s = p->session;
        p->status = hsri_cache_prepare(s->cache, e->queue, s->n_computed + p->n_rows, &s->error);
        if (p->status < 0)
            return p->status;
        hsri_cache_fill_seq(s->cache, &t->seqs[i]);
        t->seqs[i].rope_table = s->rope_table;
    }
    return HSR_OK;
}

static void enqueue_inputs(hsr_engine *e)
{
    hsri_step *t = &e->step;
    hsri_device *dev = e->dev;

    dev->copy_in(e->queue, t->d_rows, t->rows, t->n_rows * sizeof *t->rows);
    dev->copy_in(e->queue, t->d_ids, t->ids, t->n_rows * sizeof *t->ids);
    dev->copy_in(e->queue, t->d_seqs, t->seqs, t->n_parts * sizeof *t->seqs);
}

/* Rows to sample, then sampling, a tile of logits at a time. */
static void enqueue_sampling(hsr_engine *e, const hsri_forward *f)
{
    hsri_step *t = &e->step;
    hsri_device *dev = e->dev;
    const hsri_hparams *hp = &e->model->hp;

    for (uint32_t i = 0; i < t->n_parts; i++) {
        hsri_part *p = &t->parts[i];
        hsri_request *r = &p->session->request;
        if (!p->sample)
            continue;
        p->sample_index = t->n_sample++;
        t->index[p->sample_index] = p->first_row + p->n_rows - 1;
        fill_params(&t->params[p->sample_index], r);
        if (r->penalises)
            dev->copy_in(e->queue, (hsri_ref){ .buf = r->history.buf }, r->history.seen, r->history.n_seen * sizeof *r->history.seen);
    }
    if (t->n_sample == 0)
        return;
    dev->copy_in(e->queue, t->d_index, t->index, t->n_sample * sizeof *t->index);
    dev->copy_in(e->queue, t->d_params, t->params, t->n_sample * sizeof *t->params);
    for (uint32_t i = 0; i < t->n_sample; i += HSRI_LOGIT_ROWS) {
        const uint32_t n = (uint32_t)hsri_min(HSRI_LOGIT_ROWS, t->n_sample - i);
        hsri_forward_logits(f, hsri_at(t->d_index, i * sizeof *t->index), n);
        dev->ops.sample(e->queue, e->scratch.logits, n, hp->vocab_size, hp->tokenizer_size, hsri_at(t->d_params, i * sizeof *t->params),
                        hsri_at(t->d_sampled, i * sizeof *t->sampled));
    }
    dev->copy_out(e->queue, t->sampled, t->d_sampled, t->n_sample * sizeof *t->sampled);
}

/* Rows of a part whose logits the caller of hsr_session_logits waits for. */
static void wanted_rows(const hsri_part *p, uint32_t *first, uint32_t *n)
{
    const hsr_session *s = p->session;
    *n = 0;
    if (!s->logits || s->n_computed + p->n_rows <= s->logits_from)
        return;
    const uint64_t skip = s->logits_from > s->n_computed ? s->logits_from - s->n_computed : 0;
    *first = p->first_row + (uint32_t)skip;
    *n = p->n_rows - (uint32_t)skip;
}

/* Are all rows finite at the end of the last layer? For prompts, few of whose rows have logits: a key or value that is no number makes
 * its own row none, at least. */
static void enqueue_check(hsr_engine *e)
{
    hsri_step *t = &e->step;
    if (t->n_prefill_rows == 0)
        return;
    e->dev->ops.check_finite(e->queue, e->scratch.x, t->n_rows, e->model->hp.hidden, t->d_flags);
    e->dev->copy_out(e->queue, t->flags, t->d_flags, t->n_rows * sizeof *t->flags);
}

/* Logits of whole chunks, straight into their callers' memory. */
static void enqueue_logits(hsr_engine *e, const hsri_forward *f)
{
    hsri_step *t = &e->step;
    hsri_device *dev = e->dev;
    const uint32_t vocab = e->model->hp.vocab_size;

    for (uint32_t i = 0; i < t->n_parts; i++) {
        uint32_t first, n;
        wanted_rows(&t->parts[i], &first, &n);
        const hsr_session *s = t->parts[i].session;
        for (uint32_t done = 0; done < n; ) {
            const uint32_t row = first + done, m = (uint32_t)hsri_min(HSRI_LOGIT_ROWS, n - done);
            const uint64_t at = t->rows[row].pos - s->logits_from;
            for (uint32_t j = 0; j < m; j++)
                t->wanted[row + j] = row + j;
            dev->copy_in(e->queue, hsri_at(t->d_wanted, row * sizeof *t->wanted), &t->wanted[row], m * sizeof *t->wanted);
            hsri_forward_logits(f, hsri_at(t->d_wanted, row * sizeof *t->wanted), m);
            dev->ops.check_finite(e->queue, e->scratch.logits, m, vocab, hsri_at(t->d_flags, row * sizeof *t->flags));
            dev->copy_out(e->queue, s->logits + at * vocab, e->scratch.logits, (uint64_t)m * vocab * sizeof(float));
            done += m;
        }
        if (n)
            dev->copy_out(e->queue, &t->flags[first], hsri_at(t->d_flags, first * sizeof *t->flags), n * sizeof *t->flags);
    }
}

/* Rows of the step that sessions capture. */
static uint32_t fill_taps(hsr_engine *e)
{
    hsri_step *t = &e->step;
    uint32_t n_taps = 0, n_rows = 0;

    for (uint32_t i = 0; i < t->n_parts; i++) {
        const hsr_capture *c = &t->parts[i].session->capture;
        hsri_tap tap = { .layer_first = (uint32_t)c->layer_first, .layer_end = (uint32_t)c->layer_end, .rows = e->tap_rows + n_rows,
                         .picks = e->tap_picks + n_rows, .places = e->tap_places + n_rows, .n_places = c->n, .queries = c->queries,
                         .n_slices = c->n_slices, .slices = c->slices, .max_slices = c->max_slices };
        for (uint32_t row = t->parts[i].first_row; row < t->parts[i].first_row + t->parts[i].n_rows && c->n > 0; row++) {
            const uint64_t pos = t->rows[row].pos, k = pos < c->first ? c->n : (pos - c->first) / c->stride;
            if (k >= c->n || (pos - c->first) % c->stride)
                continue;
            e->tap_rows[n_rows] = row;
            e->tap_picks[n_rows] = e->spans.pick_of[row];
            e->tap_places[n_rows++] = k;
            tap.n++;
        }
        if (tap.n > 0)
            e->taps[n_taps++] = tap;
    }
    return n_taps;
}

/* Does a sequence of the step attend pages in the calibrated basis? */
static bool attends_rotated(const hsr_engine *e)
{
    for (uint32_t i = 0; i < e->step.n_parts; i++) {
        const hsri_kv_type format = e->step.parts[i].session->format;
        if (format == HSRI_KV_TYPE_COMPACT || format == HSRI_KV_TYPE_VTQ)
            return true;
    }
    return false;
}

/* Or select by sketches in that basis? */
static bool selects_rotated(const hsr_engine *e)
{
    for (uint32_t i = 0; i < e->step.n_parts && e->spans.any_sparse; i++)
        if (e->step.parts[i].session->index_shape.kind == HSRI_INDEX_SKETCH)
            return true;
    return false;
}

static hsr_status compute(hsr_engine *e, hsr_error *err)
{
    hsri_step *t = &e->step;
    hsr_status status = HSR_OK;
    hsri_spans_build(e);
    hsri_forward f = {
        .dev = e->dev, .queue = e->queue, .arch = e->model->arch, .hp = &e->model->hp, .w = &e->weights, .s = &e->scratch,
        .kv = &e->shape.view, .batch = { t->d_rows, t->d_seqs, t->n_rows, t->n_parts }, .ids = t->d_ids,
        .rope_tables = { .buf = e->rope_buf }, .spans = e->spans.spans, .n_spans = e->spans.n_spans,
        .rotate = attends_rotated(e) || selects_rotated(e), .rotate_votes = !attends_rotated(e),
        .picks = e->spans.d_picks, .pick_of = e->spans.d_pick_of, .room = &e->room, .status = &status, .err = err, .taps = e->taps,
        .n_taps = fill_taps(e), .mass_rows = e->spans.d_mass_rows, .mass_tables = e->spans.d_mass_tables,
        .sparse = { e->spans.d_settings, hsri_at(e->spans.d_settings, (uint64_t)e->model->hp.n_layers * t->n_parts * sizeof(hsri_sparse)) },
    };

    if (prepare_parts(e) < 0)
        return e->dev->wait(e->queue, err);
    f.residency = hsri_cold_begin(e);
    enqueue_inputs(e);
    hsri_spans_enqueue(e);
    hsri_forward_layers(&f);
    if (status < 0) {
        e->dev->wait(e->queue, NULL);
        hsri_cold_end(e, status, err);
        return status;
    }
    hsri_spans_collect(e);
    enqueue_check(e);
    enqueue_sampling(e, &f);
    enqueue_logits(e, &f);
    status = e->dev->wait(e->queue, err);
    hsri_cold_end(e, HSR_OK, NULL);
    return status;
}

/* ---- results (lock held) -------------------------------------------------------------------------------------- */

/* Undo a part's preparation. The cache returns to what was committed; if even that fails the session is lost until rebuilt. */
static void drop_part(hsri_part *p, hsr_status status)
{
    hsr_session *s = p->session;
    hsr_error ignored = HSR_ERROR_INIT;

    if (hsri_cache_truncate(s->cache, s->n_computed, &ignored) < 0 || p->lost)
        s->status = status;
    hsri_session_fail(s, status);
}

static bool rows_finite(hsri_step *t, const hsri_part *p)
{
    uint32_t first = p->first_row, n = p->n_rows;
    if (is_decode(p->session))      /* its logits are looked at by whoever samples, or waits for them */
        wanted_rows(p, &first, &n);
    for (uint32_t i = 0; i < n; i++)
        if (t->flags[first + i]) {
            hsri_fail(&p->session->error, HSR_E_NONFINITE, "the logits of position %u are not finite", t->rows[first + i].pos);
            return false;
        }
    return true;
}

static void settle_sample(hsr_session *s, const hsri_sampled *r)
{
    if (r->status == HSR_OK) {
        hsri_session_take(s, r);
        return;
    }
    if (r->status == HSR_E_NONFINITE)
        hsri_fail(&s->error, r->status, "the logits of position %llu are not finite", (unsigned long long)(s->n_computed - 1));
    else
        hsri_fail(&s->error, r->status, "logit bias bans every token of the vocabulary");
    hsri_session_fail(s, r->status);
}

/* What the keys and values of a token are depends on what the layers before attended. */
static void note_profile(hsr_session *s)
{
    const uint32_t print = s->profile->print;
    s->computed_with = s->n_computed == 0 || s->computed_with == print ? print : HSRI_SEVERAL_PROFILES;
}

static void settle_part(hsr_engine *e, hsri_part *p)
{
    hsri_step *t = &e->step;
    hsr_session *s = p->session;

    const bool finite = rows_finite(t, p);
    hsr_status st = hsri_cache_commit(s->cache, s->n_computed + p->n_rows, &s->error);
    if (st < 0) {
        drop_part(p, st);
        return;
    }
    if (!is_decode(s))
        s->prefill_tokens += p->n_rows;
    note_profile(s);
    s->n_computed += p->n_rows;
    hsri_masses_commit(s, s->n_computed);
    hsri_session_trim_appended(s);
    if (!finite)
        hsri_session_fail(s, HSR_E_NONFINITE);
    else if (p->sample)
        settle_sample(s, &t->sampled[p->sample_index]);
    else if (s->request.active && s->n_computed == s->target)
        hsri_session_finish(s, HSR_FINISH_LENGTH);   /* max_tokens 0 */
}

static void settle(hsr_engine *e, hsr_status status, const hsr_error *err, uint64_t ns)
{
    hsri_step *t = &e->step;
    bool left_out = false;

    for (uint32_t i = 0; i < t->n_parts; i++)
        left_out |= t->parts[i].status < 0;
    if (status == HSR_OK && !left_out)
        hsri_spans_settle(e);
    for (uint32_t i = 0; i < t->n_parts; i++) {
        hsri_part *p = &t->parts[i];
        if (p->status < 0)
            drop_part(p, p->status);
        else if (left_out)
            continue;                       /* nothing was computed: the others are simply served again */
        else if (status < 0) {
            hsri_fail(&p->session->error, status, "%s", err->message);
            drop_part(p, status);
        } else
            settle_part(e, p);
    }
    for (uint32_t i = 0; i < e->n_sessions; i++)
        if (e->sessions[i]->cancel)
            hsri_session_apply_cancel(e->sessions[i]);
    e->stats.n_steps++;
    e->stats.last_batch_rows = (int32_t)t->n_rows;
    if (t->n_prefill_rows)
        e->stats.prefill_ns += ns;
    else
        e->stats.decode_ns += ns;
    if (status == HSR_OK && !left_out) {
        e->stats.prefill_tokens += t->n_prefill_rows;
        e->stats.decode_tokens += t->n_sample;
    }
}

hsr_status hsri_step_run(hsr_engine *e)
{
    hsr_error failure = HSR_ERROR_INIT;

    plan(e);
    if (e->step.n_parts == 0)
        return HSR_AGAIN;
    e->stepping = true;
    pthread_mutex_unlock(&e->lock);
    const uint64_t start = hsri_now_ns();
    fenv_t host;
    fegetenv(&host);
    fesetenv(FE_DFL_ENV);   /* the host's rounding or flush-to-zero must not show in results */
    hsr_status status = compute(e, &failure);
    fesetenv(&host);
    const uint64_t ns = hsri_now_ns() - start;
    pthread_mutex_lock(&e->lock);
    settle(e, status, &failure, ns);
    e->stepping = false;
    hsri_engine_publish(e);
    pthread_cond_broadcast(&e->changed);
    return HSR_OK;
}
