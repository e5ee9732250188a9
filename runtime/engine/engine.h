/* SPDX-License-Identifier: Apache-2.0 */
/* The engine: sessions, batching, the step loop. Internal to runtime/engine and runtime/api.
 *
 * Who may touch what. One lock, hsr_engine.lock, covers everything here. While `stepping` is set, the elected thread owns the
 * sessions, caches, pool and queue without holding the lock; everybody else may then only read the published statistics,
 * set cancel flags and wait. Calls that change sessions (hsri_engine_enter) wait for the step to end and go before the next one. */
#ifndef HSRI_ENGINE_H
#define HSRI_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "base/log.h"
#include "device/device.h"
#include "engine/masses.h"
#include "kv/cache.h"
#include "kv/holder.h"
#include "model.h"
#include "sparse/profile.h"

/* Events a session may hold before it pauses; a step adds at most two. */
#define HSRI_EVENT_ROOM 4u
#define HSRI_MAX_STOP   32u

/* Distinct tokens that penalties look at, kept up to date token by token (penalty.c). */
typedef struct hsri_history {
    hsri_seen *seen;        /* distinct tokens, in order of first appearance */
    uint32_t  *index;       /* by token id: position in seen plus one, 0 none */
    uint32_t   n_seen, cap;
    uint32_t   window;      /* tokens that repetition_penalty looks back; UINT32_MAX: all */
    uint32_t   buf;         /* device copy of seen */
} hsri_history;

typedef struct hsri_request {
    bool     active;
    uint32_t max_tokens, n_out;
    float    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    int32_t  top_k, n_logprobs;
    uint64_t seed;
    bool     ignore_eos;
    uint32_t n_stop, n_bias;
    int32_t  stop[HSRI_MAX_STOP];
    uint32_t bias_buf;      /* device copy of the biases; 0: none */
    bool     penalises;
    hsri_history history;
} hsri_request;

struct hsr_session {
    hsr_engine  *engine;
    uint32_t     slot;            /* names the session's own rope table */
    uint32_t     rope_table;
    hsri_cache  *cache;
    hsri_kv_type kv_type;         /* of plain pages */
    hsri_kv_type format;          /* of sealed pages */
    hsri_index_shape index_shape;
    const hsri_profile *profile;  /* the engine's */
    int32_t      profile_id;
    uint32_t     computed_with;   /* fingerprint of the profile that all computed tokens have, or HSRI_SEVERAL_PROFILES */
    uint64_t     context;
    hsr_session_opts opts;
    atomic_bool  entered;         /* a thread is inside a call on this session */

    int32_t *ids;
    size_t   ids_cap;
    uint64_t n_tokens;            /* ids held */
    uint64_t n_computed;          /* ids whose KV is in the cache */
    uint64_t target;              /* ids to compute: the session has work while n_computed < target */
    uint64_t kept_end;            /* one past the last id that a cancel keeps, computed or not: sampled, or computed once before */

    /* Appends not computed to their end yet: where the first starts, and where each ends. What a prompt's rows attend to depends on
     * them, not on how steps cut them. */
    uint64_t  appended_first;
    uint64_t *appended;
    size_t    n_appended, appended_cap;

    hsri_request request;
    hsr_event    events[HSRI_EVENT_ROOM];
    uint32_t     event_first, n_events;

    float   *logits;              /* hsr_session_logits: where row logits_from goes */
    uint64_t logits_from;

    hsr_status status;            /* sticky failure: the cache holds values that must not be used */
    hsr_error  error;             /* text of the last failure */
    uint64_t   n_failures;        /* failures and cancellations: blocked calls compare it */
    bool       untold;            /* work failed or was cancelled while nobody waited: the next call that would wait for it tells */
    bool       cancel;

    hsr_capture capture;          /* n 0: none */
    uint32_t    scan_buf;         /* what the last sampled token found in each layer (hsri_sparse.scan); 0: is not noted */
    uint32_t    scan_pages;
    hsri_masses masses;

    uint64_t prefill_tokens, decode_tokens;
    uint64_t sparse_rows;
    double   covered, covered_sum, attended;
    hsr_session_stats published;
};

/* One session's part of a step. */
typedef struct hsri_part {
    hsr_session *session;
    uint32_t first_row, n_rows;
    bool     sample;
    uint32_t sample_index;
    hsr_status status;            /* not HSR_OK: left out or failed, see error */
    bool       lost;              /* a page of the session is gone: it must be rebuilt */
} hsri_part;

/* Arrays of the step under way: host copies, stable until the queue was waited on, and their places on the device. */
typedef struct hsri_step {
    hsri_part          *parts;
    hsri_row           *rows;
    int32_t            *ids;
    hsri_seq           *seqs;
    uint32_t           *index;      /* rows to sample */
    uint32_t           *wanted;     /* rows whose logits a caller waits for */
    hsri_sample_params *params;
    hsri_sampled       *sampled;
    uint32_t           *flags;
    uint32_t n_parts, n_rows, n_sample, n_prefill_rows;
    uint32_t buf;                   /* device arena of the places below */
    hsri_ref d_rows, d_ids, d_seqs, d_index, d_wanted, d_params, d_sampled, d_flags;
} hsri_step;

/* How the rows of the step under way attend (spans.c), and the settings and results of sparse ones. */
typedef struct hsri_spans {
    hsri_span   *spans;
    hsri_pick   *picks;
    uint32_t    *pick_of;
    hsri_sparse *settings;          /* [2][layers][parts] */
    hsri_mass_row *mass_rows;       /* rows that add to mass tables, relative to their span */
    hsri_ref    *mass_tables;       /* [parts] */
    float       *covered;           /* [layers][rows][heads] */
    uint32_t    *attended;          /* [layers][rows][kv heads]: units */
    uint32_t     n_spans, n_picks, n_mass_rows;
    bool         any_sparse, observed;
    uint32_t     buf;               /* device arena; 0 until a sparse session exists */
    hsri_ref     d_picks, d_pick_of, d_settings, d_mass_rows, d_mass_tables;
} hsri_spans;

struct hsr_engine {
    hsr_model       *model;
    hsr_engine_opts  opts;
    pid_t            pid;
    hsri_log         log;
    hsri_device     *dev;
    hsri_queue      *queue;
    hsri_weights     weights;
    hsri_scratch     scratch;
    hsri_pool       *pool;
    hsri_kv_shape    shape;
    uint32_t         rope_buf;      /* float[2 + max_sessions][rotary_dim / 2]: static or short, long, per session */
    float           *rope_own;      /* host staging of one table */
    hsri_step        step;
    hsri_spans       spans;
    hsri_sparse_room room;
    uint32_t         calibration_buf;
    char            *cold_dir;
    hsri_tiers      *tiers;         /* NULL: every page stays in memory */
    hsri_pool       *warm;          /* warm memory that operations do not read; NULL: none, it is part of the pool */
    hsri_holder     *holder;
    hsri_cache     **step_caches;   /* of the step's parts, and the part of each pick: what the holder asks */
    uint32_t        *pick_parts;
    hsri_profile   **profiles;      /* by id; 0 is dense */
    size_t           n_profiles, profiles_cap;
    bool             told_uncalibrated;
    hsri_tap        *taps;          /* of the step: one per part that captures queries */
    uint32_t        *tap_rows;      /* [max_batch], and so are the next two: see hsri_tap */
    uint32_t        *tap_picks;
    uint64_t        *tap_places;

    pthread_mutex_t  lock;
    pthread_cond_t   changed;       /* stepping ended, or events were queued */
    bool             stepping;
    uint32_t         n_waiting;     /* calls that want to change sessions */
    hsr_session    **sessions;      /* live, in order of creation */
    uint32_t         n_sessions;
    uint32_t         turn;          /* session that is served first in the next step */
    uint32_t        *free_slots;
    uint32_t         n_free_slots;
    uint64_t         n_lineages;
    hsr_engine_stats stats;         /* published under the lock */
};

/* ---- engine.c ---- */

hsr_status hsri_engine_create(hsr_model *model, const hsr_engine_opts *opts, hsr_engine **engine, hsr_error *err);
hsr_status hsri_engine_destroy(hsr_engine *engine, hsr_error *err);
hsr_status hsri_pool_bytes(const hsr_engine_opts *opts, uint64_t *bytes, hsr_error *err);   /* of the KV pool of hot and warm memory */
hsr_status hsri_engine_check_fork(const hsr_engine *engine, hsr_error *err);

/* Profiles, for good. The lock is held through hsri_engine_enter. */
hsr_status hsri_engine_register(hsr_engine *engine, const hsr_profile *profile, int32_t *id, hsr_error *err);
hsr_status hsri_engine_profile(const hsr_engine *engine, int32_t id, const hsri_profile **profile, hsr_error *err);

/* Take the lock with no step running, ahead of the next step; hsri_engine_leave publishes statistics and wakes waiters. */
void hsri_engine_enter(hsr_engine *engine);
void hsri_engine_leave(hsr_engine *engine);
void hsri_engine_publish(hsr_engine *engine);

/* With the lock held: run one step, or wait for the one that is running or for somebody's turn to end. */
void hsri_engine_advance(hsr_engine *engine);

/* ---- cold.c: the cold tier ---- */

hsr_status hsri_cold_create(hsr_engine *engine, hsr_error *err);
hsr_status hsri_cold_bytes(const hsr_engine_opts *opts, uint64_t *bytes, hsr_error *err);   /* of the cold file; 0: there is none */
bool hsri_cold_destroy(hsr_engine *engine);      /* false: a transfer did not end, the pool's memory must stay */
void hsri_cold_publish(hsr_engine *engine);

/* Around the step's forward pass: what it asks for pages, NULL if all are in memory; and whose failure it was. The queue is idle at
 * the end. */
const hsri_residency *hsri_cold_begin(hsr_engine *engine);
void hsri_cold_end(hsr_engine *engine, hsr_status status, hsr_error *err);

/* ---- step.c ---- */

hsr_status hsri_step_create(hsr_engine *engine, hsr_error *err);
void hsri_step_destroy(hsr_engine *engine);

/* Lock held, no step running. HSR_AGAIN: no session could be served. The lock is released while computing. Failures are the
 * sessions': each gets its own. */
hsr_status hsri_step_run(hsr_engine *engine);

/* ---- session.c: lock held through hsri_engine_enter unless it says otherwise ---- */

/* What is fixed at creation, from opts that were checked one by one; the context first. Also of sessions that are only planned. */
hsr_status hsri_session_check_context(const hsr_engine *engine, hsr_session_opts *opts, hsr_error *err);
hsr_status hsri_session_choose(hsr_session *session, hsr_error *err);
hsri_cache_opts hsri_session_cache_opts(const hsr_session *session);    /* but for the lineage */

hsr_status hsri_session_create(hsr_engine *engine, const hsr_session_opts *opts, hsr_session **session, hsr_error *err);
void hsri_session_destroy(hsr_session *session);
hsr_status hsri_session_append(hsr_session *session, const int32_t *ids, uint64_t n, hsr_error *err);
hsr_status hsri_session_generate(hsr_session *session, const hsr_request *request, hsr_error *err);
hsr_status hsri_session_set_profile(hsr_session *session, int32_t id, hsr_error *err);
/* Keys and values of positions as pages hold them, [n][n_kv_heads][d] each; either may be NULL. */
hsr_status hsri_session_read(hsr_session *session, uint32_t layer, uint64_t first, uint64_t n, float *keys, float *values, hsr_error *err);
hsr_status hsri_session_observe(hsr_session *session, int32_t what, int32_t layer, uint64_t first, uint64_t n, float *out, hsr_error *err);
/* After an admitted append of n tokens whose ids are to be sampled: fill.c. */
hsr_status hsri_session_fill(hsr_session *session, uint64_t n, uint64_t seed, hsr_error *err);
hsr_status hsri_session_admit_fill(hsr_session *session, uint64_t n, hsr_error *err);
/* Appends that are computed, or that are not to be, are no longer waited for. */
void hsri_session_trim_appended(hsr_session *session);
hsr_status hsri_session_fork(hsr_session *session, hsr_session **fork, hsr_error *err);
hsr_status hsri_session_truncate(hsr_session *session, uint64_t n, hsr_error *err);
hsr_status hsri_session_rebuild(hsr_session *session, hsr_error *err);

/* Cancel now, or at the end of the step that is running. Plain lock held. */
void hsri_session_cancel(hsr_session *session);
/* Drop queued work; a running request gets a FAILED event. No step running. */
void hsri_session_apply_cancel(hsr_session *session);

/* End the session's work with a failure whose text is in session->error. */
void hsri_session_fail(hsr_session *session, hsr_status status);

/* End a running request: FINISHED with reason. */
void hsri_session_finish(hsr_session *session, int32_t reason);

/* Take a sampled token: append it, queue its event, and finish if it was the last. */
void hsri_session_take(hsr_session *session, const hsri_sampled *sampled);

bool hsri_session_pop_event(hsr_session *session, hsr_event *event);
static inline bool hsri_session_has_work(const hsr_session *s) { return s->n_computed < s->target; }

/* Plain lock held. Step or wait until nothing of the session is left to compute. */
hsr_status hsri_session_run(hsr_session *session, int32_t (*progress)(void *, uint64_t, uint64_t), void *user, hsr_error *err);

/* ---- penalty.c ---- */

hsr_status hsri_history_create(hsri_history *h, hsri_device *dev, uint32_t vocab, uint64_t max_tokens, int32_t window, const int32_t *ids,
                               uint64_t n, hsr_error *err);
void hsri_history_destroy(hsri_history *h, hsri_device *dev);
/* ids[n - 1] is a new output token. */
void hsri_history_push(hsri_history *h, const int32_t *ids, uint64_t n);

#endif
