/* SPDX-License-Identifier: Apache-2.0 */
/* Random sessions over a tiny model, in engines with random budgets, formats, profiles and disks that fail, computed by several threads
 * while another one cancels. Afterwards everything that was done is done again in an engine where all pages stay in memory: every output
 * must be the same to the bit. After a failure there is a text, and the session goes on from its tokens; at the end of each round every
 * counter is back.
 *
 * soak [--minutes N] [--seed N] [--rounds N] [--from ROUND] */
#include <errno.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>

#include "../faults/cold_host.h"
#include "base/array.h"
#include "base/rng.h"
#include "script.h"

#define MIB (1ull << 20)

enum { MAX_CLIENTS = 3, MAX_USERS = 6, MAX_OUTPUT = 24, MAX_ASK = 2000, MAX_CANCELS = 10, N_PROFILES = 9, ROOM = TINY_CONTEXT };

/* ---- chance ----------------------------------------------------------------------------------------------------- */

typedef struct chance {
    uint64_t seed, n;
} chance;

static uint64_t draw(chance *c, uint64_t below) { return hsri_rng_u64(c->seed, c->n++) % below; }
static uint64_t between(chance *c, uint64_t low, uint64_t high) { return low + draw(c, high - low + 1); }
static bool one_in(chance *c, uint64_t n) { return draw(c, n) == 0; }

/* ---- a round ---------------------------------------------------------------------------------------------------- */

typedef enum disk_mode {
    DISK_WELL, DISK_SLOW, DISK_SHORT, DISK_BUSY,                                                    /* nobody may notice */
    DISK_READ_ERROR, DISK_WRITE_ERROR, DISK_END, DISK_CORRUPT, DISK_FULL, DISK_HANGS, DISK_MIXED,   /* sessions may fail */
} disk_mode;
#define N_DISK_MODES ((uint64_t)DISK_MIXED + 1)

static const char *const disk_names[] = { "well", "slow", "short", "busy", "read errors", "write errors", "end of file", "corrupt", "full",
                                          "hangs", "mixed" };

typedef struct user {
    hsr_session *session;
    script       script;
    bool         running;           /* a request, whose output so far is: */
    uint64_t     request_seed;
    int32_t      tokens[MAX_OUTPUT];
    float        values[MAX_OUTPUT * SCRIPT_VALUES];
    uint32_t     n_out;
    bool         inside;            /* computing: may be cancelled by others; both under the round's lock */
    bool         cancelled;
    uint32_t     n_cancels;
    bool         copied;            /* forked or restored */
} user;

typedef struct client {
    struct round_state *round;
    pthread_t thread;
    chance    chance;
    uint32_t  number;
    user     *users[MAX_USERS];
    uint32_t  n_users, n_saves;
    hsr_error err;
} client;

typedef struct round_state {
    uint64_t        number;
    hsr_engine     *engine;
    hsr_engine_opts opts;
    disk_mode       disk;
    uint64_t        disk_seed, disk_from, disk_count, disk_rate;    /* in the window one of disk_rate operations is disturbed */
    bool            cancels;
    atomic_bool     over;
    client          clients[MAX_CLIENTS];
    uint32_t        n_clients;
    pthread_mutex_t lock;
    script         *done;                                           /* of sessions that are gone */
    size_t          n_done, done_cap;
} round_state;

static struct {
    uint64_t     seed, first_round, rounds;
    double       minutes;
    hsr_model   *model;
    hsr_engine  *resident;
    char         folder[64], cold[96];
    /* what happened, over all rounds */
    atomic_ulong sessions, outputs, refusals, cancels, failures, rebuilds, forks, restores, damaged, disturbed;
    uint64_t     evictions, misses, errors, compared;
} soak;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool disk_fails(const round_state *r) { return r->disk >= DISK_READ_ERROR; }

static void tell_round(const round_state *r)
{
    const hsr_engine_opts *o = &r->opts;
    fprintf(stderr, "again with: --seed %llu --from %llu --rounds 1 (threads may meet otherwise)\n"
            "round %llu: %d threads, chunk %d, batch %d, hot %llu MiB, warm %llu MiB, cold %llu MiB%s, io %d, prefetch %d of %u, "
            "deadline %d ms, flags %u; %u clients%s; disk %s, 1 of %llu from %llu, %llu operations\n",
            (unsigned long long)soak.seed, (unsigned long long)r->number, (unsigned long long)r->number,
            o->n_threads, o->chunk_tokens, o->max_batch,
            (unsigned long long)(o->hot_bytes / MIB), (unsigned long long)(o->warm_bytes / MIB), (unsigned long long)(o->cold_bytes / MIB),
            o->cold_dir ? "" : " (none)", o->io_engine, o->prefetch_depth, o->prefetch_sources, o->io_deadline_ms, o->flags,
            r->n_clients, r->cancels ? ", cancelled" : "",
            disk_names[r->disk], (unsigned long long)r->disk_rate, (unsigned long long)r->disk_from, (unsigned long long)r->disk_count);
}

/* The end: all that was done to the session, in which round, and last, as logs are read from their end, what was found. Other threads are
 * still at work. */
__attribute__((noreturn, format(printf, 3, 4))) static void found(const round_state *r, const script *s, const char *format, ...)
{
    va_list args;
    if (s)
        fprintf(stderr, "\nthe session: kv %d, window %d, sink %d, rollback %d, profile %d, index %d\n%s",
                s->opts.kv_format, s->opts.window_size,
                s->opts.sink_size, s->opts.rollback_tokens, s->opts.profile, s->opts.index_kind, s->story ? s->story : "");
    tell_round(r);
    fprintf(stderr, "FOUND: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    fflush(stderr);
    _exit(1);
}

/* ---- the disk --------------------------------------------------------------------------------------------------- */

static void disturb(disk_mode mode, hsri_io_action action, uint64_t h, hsri_io_fault *f)
{
    const bool transfer = action == HSRI_IO_READ || action == HSRI_IO_WRITE;
    switch (mode) {
    case DISK_SLOW:        f->delay_ms = transfer ? 1 + h % 8 : 0; break;
    case DISK_SHORT:       f->limited = transfer; f->limit = 1 + (uint32_t)(h % 40000); break;
    case DISK_BUSY:        f->error = transfer ? h % 2 ? EAGAIN : EINTR : 0; break;
    case DISK_READ_ERROR:  f->error = action == HSRI_IO_READ ? EIO : 0; break;
    case DISK_WRITE_ERROR: f->error = action == HSRI_IO_WRITE ? EIO : 0; break;
    case DISK_END:         f->limited = action == HSRI_IO_READ; break;
    case DISK_CORRUPT:     f->corrupt = action == HSRI_IO_READ; f->corrupt_at = (uint32_t)h; break;
    case DISK_FULL:        f->error = action == HSRI_IO_WRITE || action == HSRI_IO_ALLOCATE ? ENOSPC : 0; break;
    case DISK_HANGS:       f->delay_ms = transfer ? 250 : 0; break;
    default: break;
    }
}

static void before_io(void *user_data, hsri_io_action action, uint64_t index, hsri_io_fault *fault)
{
    const round_state *r = user_data;
    const uint64_t h = hsri_rng_u64(r->disk_seed, index);
    if (action == HSRI_IO_OPEN || action == HSRI_IO_DIRECT || index - r->disk_from >= r->disk_count || h % r->disk_rate)
        return;
    disturb(r->disk == DISK_MIXED ? 1 + (h >> 32) % ((uint64_t)DISK_MIXED - 1) : r->disk, action, h >> 40, fault);
    soak.disturbed++;
}

/* ---- statuses --------------------------------------------------------------------------------------------------- */

/* A call that need not succeed: what it may answer. True if it did succeed. */
static bool went_well(client *c, const script *s, const char *what, hsr_status st, bool admits, bool computes)
{
    const round_state *r = c->round;
    if (st >= 0)
        return true;
    if (c->err.status != st || !c->err.message[0])
        found(r, s, "%s: %s without a text", what, hsr_status_name(st));
    if (admits && (st == HSR_E_NOSPACE || st == HSR_E_CONTEXT))
        soak.refusals++;
    else if (computes && st == HSR_E_CANCELLED && r->cancels)
        soak.cancels++;
    else if (disk_fails(r) && (st == HSR_E_IO || st == HSR_E_FORMAT || st == HSR_E_NOSPACE || st == HSR_E_STATE))
        soak.failures++;        /* STATE: it had failed before, in another client's step */
    else
        found(r, s, "%s: %s: %s", what, hsr_status_name(st), c->err.message);
    return false;
}

static hsr_session_stats stats_of(client *c, user *u)
{
    hsr_session_stats st = { .struct_size = sizeof st };
    if (hsr_session_get_stats(u->session, &st, &c->err) < 0)
        found(c->round, &u->script, "stats: %s", c->err.message);
    return st;
}

/* All tokens; to be freed. */
static int32_t *tokens_of(client *c, user *u, uint64_t *n)
{
    int32_t *ids = malloc(ROOM * sizeof *ids);
    *n = ROOM;
    if (!ids || hsr_session_tokens(u->session, 0, ids, n, &c->err) < 0)
        found(c->round, &u->script, "tokens: %s", c->err.message);
    return ids;
}

/* ---- users ------------------------------------------------------------------------------------------------------ */

static user *new_user(client *c)
{
    user *u = calloc(1, sizeof *u);
    if (!u)
        abort();
    pthread_mutex_lock(&c->round->lock);
    c->users[c->n_users++] = u;
    pthread_mutex_unlock(&c->round->lock);
    soak.sessions++;
    return u;
}

static void keep_script(round_state *r, script *s)
{
    pthread_mutex_lock(&r->lock);
    if (r->n_done == r->done_cap) {
        r->done_cap = 2 * r->done_cap + 16;
        if (!(r->done = realloc(r->done, r->done_cap * sizeof *r->done)))
            abort();
    }
    r->done[r->n_done++] = *s;
    pthread_mutex_unlock(&r->lock);
}

static void drop_user(client *c, user *u)
{
    uint32_t i = 0;
    while (c->users[i] != u)
        i++;
    pthread_mutex_lock(&c->round->lock);
    c->users[i] = c->users[--c->n_users];
    pthread_mutex_unlock(&c->round->lock);
    if (hsr_session_destroy(&u->session, &c->err) != HSR_OK)
        found(c->round, &u->script, "destroy: %s", c->err.message);
    keep_script(c->round, &u->script);
    free(u);
}

/* While a user computes others may cancel it. */
static void go_inside(client *c, user *u, bool inside)
{
    pthread_mutex_lock(&c->round->lock);
    u->inside = inside;
    pthread_mutex_unlock(&c->round->lock);
}

static bool was_cancelled(client *c, user *u)
{
    pthread_mutex_lock(&c->round->lock);
    const bool cancelled = u->cancelled;
    u->cancelled = false;
    pthread_mutex_unlock(&c->round->lock);
    return cancelled;
}

static bool act_compute(client *c, user *u);

/* Drop the pages and go on from the tokens; or end. */
static void rebuild(client *c, user *u)
{
    uint64_t n;
    int32_t *ids = tokens_of(c, u, &n);
    if (went_well(c, &u->script, "rebuild", hsr_session_rebuild(u->session, &c->err), true, false)) {
        script_rebuilt(&u->script, ids, n);
        soak.rebuilds++;
        if (disk_fails(c->round))
            act_compute(c, u);
    } else
        drop_user(c, u);    /* there is no room to compute them again */
    free(ids);
}

/* The last token was about to be computed once more, and was not: it is dropped, in the script as well. */
static void drop_last(client *c, user *u, uint64_t n_computed)
{
    if (went_well(c, &u->script, "truncate", hsr_session_truncate(u->session, n_computed, &c->err), false, false))
        script_add(&u->script, ACT_TRUNCATE, n_computed, 0, NULL, NULL, 0);
}

/* Work was cancelled: what is left is what was computed, and what was sampled before. The user may be gone. */
static void take_cancel(client *c, user *u)
{
    const hsr_session_stats st = stats_of(c, u);
    const uint64_t n = st.n_tokens, before = u->script.n_computed;
    script_note(&u->script, "  cancelled");
    if (st.status != HSR_OK || st.running || n > u->script.n_tokens || st.n_computed > n || n < before || st.n_computed + 1 < before)
        found(c->round, &u->script, "after a cancel: status %d, running %d, %llu tokens of %llu, %llu computed of %llu",
              st.status, st.running, (unsigned long long)n, (unsigned long long)u->script.n_tokens,
              (unsigned long long)st.n_computed, (unsigned long long)before);
    /* After a rebuild tokens are kept that were sampled before and are not computed again yet: no act of a script either. */
    const uint64_t left = st.n_computed > before && st.n_computed < n ? st.n_computed : n;
    if (script_splits(&u->script, left)) {
        rebuild(c, u);
        return;
    }
    if (left < n && !went_well(c, &u->script, "truncate", hsr_session_truncate(u->session, left, &c->err), false, false))
        found(c->round, &u->script, "truncate: %s", c->err.message);
    script_cut(&u->script, left, hsri_max(st.n_computed, before));
    if (st.n_computed < before)
        drop_last(c, u, st.n_computed);
}

/* The disk failed. All tokens are still there; the session goes on from what was computed, is rebuilt, or ends. */
static void recover(client *c, user *u)
{
    const hsr_session_stats st = stats_of(c, u);
    script_note(&u->script, "  failed: %s", c->err.message);
    if (st.running || st.n_tokens != u->script.n_tokens)
        found(c->round, &u->script, "after a failure: running %d, %llu tokens of %llu", st.running, (unsigned long long)st.n_tokens,
              (unsigned long long)u->script.n_tokens);
    if (one_in(&c->chance, 4) || (st.n_tokens > 4000 && !one_in(&c->chance, 4)))
        drop_user(c, u);
    else if (st.status == HSR_OK && !script_splits(&u->script, st.n_computed) && one_in(&c->chance, 2)) {
        if (went_well(c, &u->script, "truncate", hsr_session_truncate(u->session, st.n_computed, &c->err), false, false))
            script_cut(&u->script, st.n_computed, st.n_computed);
        else
            drop_user(c, u);
    } else
        rebuild(c, u);
}

/* A call that is no step failed: in a round whose disk fails the session may be lost. */
static void check_alive(client *c, user *u)
{
    if (disk_fails(c->round) && stats_of(c, u).status < 0)
        recover(c, u);
}

/* A request was refused. If there was no room for a copy of the last page, which a fork shares, the last token is given up already. */
static void take_refusal(client *c, user *u)
{
    const hsr_session_stats st = stats_of(c, u);
    if (st.status < 0)
        check_alive(c, u);
    else if (st.n_computed + 1 == u->script.n_computed && st.n_tokens == u->script.n_tokens)
        drop_last(c, u, st.n_computed);
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static bool start(client *c, user *u)
{
    hsr_request r;
    const uint64_t n = between(&c->chance, 0, MAX_OUTPUT);
    if (u->script.n_tokens == 0)
        return false;
    u->request_seed = draw(&c->chance, UINT32_MAX);
    u->n_out = 0;
    script_request(&r, u->request_seed, n);
    script_note(&u->script, "generate up to %llu", (unsigned long long)n);
    u->running = went_well(c, &u->script, "generate", hsr_session_generate(u->session, &r, &c->err), true, false);
    if (!u->running)
        take_refusal(c, u);
    return u->running;
}

/* The request is over. What it sampled is part of the session, however it ended. */
static void take_output(client *c, user *u, hsr_status status)
{
    u->running = false;
    if (u->n_out > 0 || status == HSR_OK)
        script_add(&u->script, ACT_GENERATE, u->n_out, u->request_seed, u->tokens, u->values, u->n_out * SCRIPT_VALUES);
    soak.outputs++;
    const bool cancelled = was_cancelled(c, u);
    if (status == HSR_OK)
        return;
    if (status == HSR_E_CANCELLED && !cancelled)
        found(c->round, &u->script, "cancelled by nobody");
    if (!went_well(c, &u->script, "request", status, false, true) && status != HSR_E_CANCELLED)
        recover(c, u);
    else
        take_cancel(c, u);
}

/* The next event. False: the request has ended, and the user perhaps with it. */
static bool advance(client *c, user *u)
{
    hsr_event ev = { .struct_size = sizeof ev };
    go_inside(c, u, true);
    const hsr_status st = hsr_session_next(u->session, &ev, &c->err);
    go_inside(c, u, false);
    if (st != HSR_OK)
        found(c->round, &u->script, "next: %s: %s", hsr_status_name(st), c->err.message);
    if (ev.kind != HSR_EVENT_TOKEN) {
        take_output(c, u, ev.kind == HSR_EVENT_FAILED ? ev.status : HSR_OK);
        return false;
    }
    if (u->n_out == MAX_OUTPUT || ev.position != (int64_t)(u->script.n_tokens + u->n_out))
        found(c->round, &u->script, "token %u at position %lld", u->n_out, (long long)ev.position);
    script_values(&u->values[u->n_out * SCRIPT_VALUES], &ev);
    u->tokens[u->n_out++] = ev.token;
    return true;
}

/* Requests of one to all users at a time, collected in turn; some are given up. */
static void act_generate(client *c)
{
    user *started[MAX_USERS];
    uint32_t n = 0;
    const uint64_t share = between(&c->chance, 1, 3), give_up = between(&c->chance, 0, 60);
    for (uint32_t i = c->n_users; i-- > 0; )
        if (one_in(&c->chance, share) && start(c, c->users[i]))
            started[n++] = c->users[i];     /* a user that goes away moves only those behind it */
    for (uint64_t step = 0; n > 0; step++) {
        const uint32_t i = (uint32_t)(step % n);
        if (step == give_up && one_in(&c->chance, 2)) {
            script_note(&started[i]->script, "dropped with its request running");
            drop_user(c, started[i]);
            started[i] = started[--n];
        } else if (!advance(c, started[i]))
            started[i] = started[--n];
    }
}

/* ---- other acts ------------------------------------------------------------------------------------------------- */

static void act_create(client *c)
{
    chance *d = &c->chance;
    hsr_session_opts o;
    hsr_session *s;
    hsr_session_opts_init(&o, sizeof o);
    o.kv_format = (int32_t)between(d, HSR_KV_AUTO, HSR_KV_VTQ);
    o.window_size = 64 * (int32_t)between(d, 1, 4);
    o.sink_size = 64 * (int32_t)draw(d, 3);
    o.rollback_tokens = (int32_t)draw(d, 3) * (int32_t)between(d, 0, 100);
    o.profile = one_in(d, 2) ? 0 : (int32_t)draw(d, N_PROFILES);
    if (!went_well(c, NULL, "create", hsr_session_create(c->round->engine, &o, &s, &c->err), true, false))
        return;
    user *u = new_user(c);
    u->session = s;
    o.kv_format = stats_of(c, u).kv_format;     /* what AUTO became: some acts depend on it */
    script_begin(&u->script, &o);
}

static uint64_t some_length(chance *d)
{
    const uint64_t kind = draw(d, 20);
    return kind < 12 ? between(d, 1, 200) : kind < 19 ? between(d, 200, 900) : between(d, 900, MAX_ASK);
}

static void act_append(client *c, user *u)
{
    int32_t ids[MAX_ASK];
    const uint64_t n = some_length(&c->chance);
    for (uint64_t i = 0; i < n; i++)
        ids[i] = (int32_t)draw(&c->chance, TINY_VOCAB - 1);
    if (!went_well(c, &u->script, "append", hsr_session_append(u->session, ids, n, &c->err), true, false)) {
        check_alive(c, u);
        return;
    }
    script_add(&u->script, ACT_APPEND, n, 0, ids, NULL, 0);
    /* If computing fails in another client's step, a later append would be computed together with this one: another act. */
    if (disk_fails(c->round))
        act_compute(c, u);
}

/* False: the user may be gone. */
static bool act_compute(client *c, user *u)
{
    go_inside(c, u, true);
    const hsr_status st = hsr_session_prefill(u->session, NULL, NULL, &c->err);
    go_inside(c, u, false);
    const bool cancelled = was_cancelled(c, u);
    if (!went_well(c, &u->script, "prefill", st, false, true) && st != HSR_E_CANCELLED) {
        recover(c, u);
        return false;
    }
    if (cancelled) {
        take_cancel(c, u);
        return false;
    }
    if (st == HSR_E_CANCELLED)
        found(c->round, &u->script, "prefill: cancelled by nobody");
    script_add(&u->script, ACT_COMPUTE, 0, 0, NULL, NULL, 0);
    const hsr_session_stats now_has = stats_of(c, u);
    if (now_has.n_computed != u->script.n_computed || now_has.n_tokens != u->script.n_tokens)
        found(c->round, &u->script, "prefill left %llu of %llu tokens",
              (unsigned long long)now_has.n_computed, (unsigned long long)now_has.n_tokens);
    return true;
}

static bool all_computed(const user *u) { return u->script.n_computed == u->script.target; }

static void act_logits(client *c, user *u)
{
    float rows[8 * TINY_VOCAB];
    int32_t ids[8];
    const uint64_t n = between(&c->chance, 1, 8);
    if (!all_computed(u))
        return;
    for (uint64_t i = 0; i < n; i++)
        ids[i] = (int32_t)draw(&c->chance, TINY_VOCAB - 1);
    go_inside(c, u, true);
    const hsr_status st = hsr_session_logits(u->session, ids, n, rows, 8 * TINY_VOCAB, &c->err);
    go_inside(c, u, false);
    was_cancelled(c, u);
    if (went_well(c, &u->script, "logits", st, true, true)) {
        script_add(&u->script, ACT_LOGITS, n, 0, ids, rows, n * TINY_VOCAB);
        soak.outputs++;
    } else if (stats_of(c, u).n_tokens == u->script.n_tokens)
        check_alive(c, u);      /* refused, or cancelled before anything was computed */
    else {
        script_add(&u->script, ACT_APPEND, n, 0, ids, NULL, 0);
        if (st == HSR_E_CANCELLED)
            take_cancel(c, u);
        else
            recover(c, u);
    }
}

static void act_fill(client *c, user *u)
{
    const uint64_t n = between(&c->chance, 1, 8000), seed = draw(&c->chance, UINT32_MAX);
    if (u->script.n_computed == 0 || u->script.n_computed != u->script.n_tokens)
        return;
    if (u->copied && u->script.opts.kv_format > HSR_KV_BF16)
        return;                 /* what is sampled from may be encoded in one session and not yet in its copy */
    script_note(&u->script, "fill %llu", (unsigned long long)n);
    if (went_well(c, &u->script, "fill", hsr_session_fill(u->session, n, seed, &c->err), true, false))
        script_add(&u->script, ACT_FILL, n, seed, NULL, NULL, 0);
    else if (stats_of(c, u).n_tokens != u->script.n_tokens)
        drop_user(c, u);        /* a part was filled, which cannot be done again */
    else
        check_alive(c, u);
}

/* Any step computes what is appended. Where it matters how much that is, all of it is computed first. */
static void act_truncate(client *c, user *u)
{
    if (!all_computed(u))
        return;
    const uint64_t have = u->script.n_tokens,
                   back = one_in(&c->chance, 3) ? draw(&c->chance, have + 1) : draw(&c->chance, have < 150 ? have + 1 : 150);
    const hsr_status st = hsr_session_truncate(u->session, have - back, &c->err);
    const bool anywhere = u->script.opts.kv_format <= HSR_KV_BF16 && !c->round->opts.cold_dir;
    script_note(&u->script, "truncate to %llu: %s", (unsigned long long)(have - back), hsr_status_name(st));
    if (st == HSR_E_STATE && !anywhere && have - back + (uint64_t)u->script.opts.rollback_tokens < u->script.peak)
        return;
    if (went_well(c, &u->script, "truncate", st, false, false))
        script_add(&u->script, ACT_TRUNCATE, have - back, 0, NULL, NULL, 0);
    else
        check_alive(c, u);
}

static void act_profile(client *c, user *u)
{
    if (!all_computed(u))
        return;
    const int32_t id = (int32_t)draw(&c->chance, N_PROFILES);
    const hsr_status st = hsr_session_set_profile(u->session, id, &c->err);
    if (st == HSR_E_UNSUPPORTED)
        return;                 /* the index is another */
    if (went_well(c, &u->script, "set_profile", st, true, false))
        script_add(&u->script, ACT_PROFILE, (uint64_t)id, 0, NULL, NULL, 0);
    else
        check_alive(c, u);
}

static void act_rebuild(client *c, user *u)
{
    if (u->script.n_tokens <= 3000)
        rebuild(c, u);
}

static void act_fork(client *c, user *u)
{
    hsr_session *s;
    if (!all_computed(u))
        return;
    if (!went_well(c, &u->script, "fork", hsr_session_fork(u->session, &s, &c->err), true, false)) {
        check_alive(c, u);
        return;
    }
    user *f = new_user(c);
    f->session = s;
    f->copied = true;
    script_note(&u->script, "forked");
    script_copy(&f->script, &u->script);
    soak.forks++;
}

/* ---- saving ----------------------------------------------------------------------------------------------------- */

static void damage(client *c, user *u, const char *path)
{
    FILE *f = fopen(path, "r+b");
    if (!f || fseek(f, 0, SEEK_END))
        abort();
    const long size = ftell(f);
    long at = (long)draw(&c->chance, (uint64_t)size);
    const bool cut = one_in(&c->chance, 3);
    at -= cut ? 0 : at % 4096;      /* behind a part's last byte nothing is looked at, up to the next multiple */
    script_note(&u->script, "%s at byte %ld of %ld", cut ? "cut" : "damaged", at, size);
    if (cut) {
        if (ftruncate(fileno(f), at))
            abort();
    } else {
        fseek(f, at, SEEK_SET);
        const int byte = fgetc(f);
        fseek(f, at, SEEK_SET);
        fputc(byte ^ (1 << draw(&c->chance, 8)), f);
    }
    fclose(f);
}

static void restore(client *c, const user *u, const char *path, int32_t profile)
{
    hsr_restore_opts o;
    hsr_session *s;
    hsr_restore_opts_init(&o, sizeof o);
    o.profile = profile;
    if (!went_well(c, &u->script, "restore", hsr_session_restore(c->round->engine, path, &o, &s, &c->err), true, false))
        return;
    user *r = new_user(c);
    r->session = s;
    r->copied = true;
    script_copy(&r->script, &u->script);
    script_note(&r->script, "restored");
    soak.restores++;
}

static void act_save(client *c, user *u)
{
    char path[160];
    hsr_session *none;
    if (!all_computed(u))
        return;
    const int32_t profile = stats_of(c, u).profile;
    snprintf(path, sizeof path, "%s/%u-%u.hsrsave", soak.folder, c->number, c->n_saves++);
    if (!went_well(c, &u->script, "save", hsr_session_save(u->session, path, NULL, NULL, &c->err), false, false)) {
        check_alive(c, u);
        return;
    }
    script_note(&u->script, "saved");
    if (one_in(&c->chance, 4)) {
        damage(c, u, path);
        const hsr_status st = hsr_session_restore(c->round->engine, path, NULL, &none, &c->err);
        if (st >= 0 || !c->err.message[0])
            found(c->round, &u->script, "a damaged file was restored");
        soak.damaged++;
    } else
        restore(c, u, path, profile);
    unlink(path);
}

/* ---- clients ---------------------------------------------------------------------------------------------------- */

static void act_on(client *c, user *u)
{
    switch (draw(&c->chance, 20)) {
    case 0: case 1: case 2: case 3: case 4:
        act_append(c, u);
        break;
    case 5: case 6: case 7:
        act_compute(c, u);
        break;
    case 8: case 9:
        act_logits(c, u);
        break;
    case 10: case 11:
        act_fill(c, u);
        break;
    case 12: case 13:
        act_truncate(c, u);
        break;
    case 14:
        act_profile(c, u);
        break;
    case 15:
        act_rebuild(c, u);
        break;
    case 16:
        if (c->n_users < MAX_USERS)
            act_fork(c, u);
        break;
    case 17: case 18:
        if (act_compute(c, u) && c->n_users < MAX_USERS)
            act_save(c, u);
        break;
    default:
        drop_user(c, u);
    }
}

static void *client_main(void *arg)
{
    client *c = arg;
    const uint64_t n_acts = between(&c->chance, 10, 50);
    for (uint64_t i = 0; i < n_acts; i++) {
        if (c->n_users == 0 || (c->n_users < MAX_USERS && one_in(&c->chance, 6)))
            act_create(c);
        else if (one_in(&c->chance, 3))
            act_generate(c);
        else
            act_on(c, c->users[draw(&c->chance, c->n_users)]);
    }
    while (c->n_users > 0)
        drop_user(c, c->users[0]);
    return NULL;
}

/* Cancels whoever computes, now and then. */
static void *canceller_main(void *arg)
{
    round_state *r = arg;
    chance d = { hsri_rng_u64(soak.seed, 8 * r->number + 7), 0 };
    while (!r->over) {
        usleep((useconds_t)draw(&d, 15000));
        pthread_mutex_lock(&r->lock);
        client *c = &r->clients[draw(&d, r->n_clients)];
        user *u = c->n_users ? c->users[draw(&d, c->n_users)] : NULL;
        if (u && u->inside && u->n_cancels < MAX_CANCELS) {     /* on a slow machine no long work would ever end */
            u->n_cancels++;
            u->cancelled = true;
            if (hsr_session_cancel(u->session, NULL) != HSR_OK)
                found(r, NULL, "cancel failed");
        }
        pthread_mutex_unlock(&r->lock);
    }
    return NULL;
}

/* ---- engines ---------------------------------------------------------------------------------------------------- */

static void register_profiles(const round_state *r, hsr_engine *e)
{
    static const int32_t selectors[N_PROFILES] = { 0, HSR_SELECT_MINMAX, HSR_SELECT_SKETCH, HSR_SELECT_CLUSTER, HSR_SELECT_MEAN,
                                                   HSR_SELECT_CLASSIC, HSR_SELECT_GAUSSIAN, HSR_SELECT_RANDOM, HSR_SELECT_SKETCH };
    hsr_error err = HSR_ERROR_INIT;
    for (int32_t i = 1, id; i < N_PROFILES; i++) {
        hsr_profile p;
        hsr_profile_init(&p, sizeof p);
        p.selector = selectors[i];
        p.budget = 64 + 32 * i;
        p.slice_size = 16 << i % 3;
        p.virtual_tokens = selectors[i] == HSR_SELECT_SKETCH || selectors[i] == HSR_SELECT_CLUSTER;
        p.candidates = 512;
        p.prefill_budget = i % 2 ? 128 : 0;
        p.prefill_dense_below = 256;
        p.dense_below = 128;
        if (p.selector == HSR_SELECT_CLASSIC) {
            p.block_size_coarse = 128;
            p.block_size_fine = 32;
            p.slice_size = 32;
            p.top_k_coarse = 4;
            p.top_k_fine = 2;
        }
        if (hsr_profile_register(e, &p, &id, &err) != HSR_OK || id != i)
            found(r, NULL, "profile %d: %s", i, err.message);
    }
}

static void choose_disk(round_state *r, chance *d)
{
    r->disk = one_in(d, 4) ? DISK_WELL : (disk_mode)draw(d, N_DISK_MODES);
    r->disk_seed = draw(d, UINT64_MAX);
    r->disk_from = draw(d, one_in(d, 2) ? 100 : 1000);
    r->disk_count = one_in(d, 3) ? UINT64_MAX : between(d, 1, 600);     /* now and then for good, or all of a time */
    r->disk_rate = r->disk_count < UINT64_MAX ? between(d, 1, 2) : between(d, 2, 20);
    if (r->disk == DISK_BUSY)      /* what fails again and again is believed in the end */
        r->disk_rate = hsri_max(r->disk_rate, 4);
    if (r->disk == DISK_HANGS)      /* each takes a quarter of a second */
        r->disk_count = between(d, 1, 6);
}

static void choose_engine(round_state *r, chance *d)
{
    hsr_engine_opts *o = &r->opts;
    hsr_engine_opts_init(o, sizeof *o);
    o->n_threads = (int32_t)between(d, 1, 3);
    o->chunk_tokens = (int32_t)between(d, 1, one_in(d, 2) ? 512 : 64);
    o->max_batch = (int32_t)between(d, 128, 1024);
    o->max_sessions = 32;
    o->hot_bytes = between(d, 4, disk_fails(r) ? 8 : one_in(d, 4) ? 32 : 12) * MIB;
    o->warm_bytes = one_in(d, 4) ? between(d, 1, 4) * MIB : 0;
    if (disk_fails(r) || !one_in(d, 8)) {
        o->cold_dir = soak.cold;
        o->cold_bytes = (one_in(d, 4) ? between(d, 2, 30) : between(d, 30, 300)) * MIB;
    }
    o->io_engine = one_in(d, 2) ? HSR_IO_PREAD : HSR_IO_AUTO;
    o->importance = (int32_t)draw(d, 3);
    o->prefetch_depth = (int32_t)draw(d, 8);
    o->prefetch_sources = one_in(d, 2) ? (uint32_t)draw(d, 8) : HSR_PREFETCH_DEFAULT | HSR_PREFETCH_QUERY;
    o->flags = one_in(d, 8) ? HSR_ENGINE_ASYNC_DEBUG : 0;
    o->io_deadline_ms = r->disk == DISK_HANGS || r->disk == DISK_MIXED ? 100 : 30000;
}

/* All that sessions held is back, at once, or as soon as transfers that nobody waited for have ended. */
static void check_counters(round_state *r)
{
    hsr_engine_stats st = { .struct_size = sizeof st };
    const double until = now() + 5;
    hsr_session *s;
    for (;;) {
        hsr_engine_get_stats(r->engine, &st, NULL);
        if (st.cold_bytes_used == 0 || now() > until)
            break;
        usleep(2000);
        if (hsr_session_create(r->engine, NULL, &s, NULL) == HSR_OK)    /* the engine takes in what has ended */
            hsr_session_destroy(&s, NULL);
    }
    if (st.n_sessions || st.hot_blocks_used || st.hot_blocks_reserved || st.hot_slots_used || st.pages_open || st.pages_full ||
        st.pages_sealed || st.cold_pages || st.cold_bytes_used)
        found(r, NULL, "left behind: %d sessions, %llu blocks, %llu reserved, %llu slots, %llu cold pages, %llu cold bytes", st.n_sessions,
              (unsigned long long)st.hot_blocks_used, (unsigned long long)st.hot_blocks_reserved, (unsigned long long)st.hot_slots_used,
              (unsigned long long)st.cold_pages, (unsigned long long)st.cold_bytes_used);
    soak.evictions += st.cold_evictions;
    soak.misses += st.cold_misses;
    soak.errors += st.cold_errors;
}

static void compare(round_state *r)
{
    char text[700];
    for (size_t i = 0; i < r->n_done; i++) {
        if (!script_same(&r->done[i], soak.resident, TINY_VOCAB, text, sizeof text))
            found(r, &r->done[i], "differs from the resident run: %s", text);
        for (size_t k = 0; k < r->done[i].n_acts; k++)
            soak.compared += r->done[i].acts[k].values ? 1 : 0;
        script_end(&r->done[i]);
    }
    free(r->done);
}

static void run_clients(round_state *r)
{
    pthread_t canceller;
    const bool cancels = r->cancels && pthread_create(&canceller, NULL, canceller_main, r) == 0;
    for (uint32_t i = 0; i < r->n_clients; i++)
        if (pthread_create(&r->clients[i].thread, NULL, client_main, &r->clients[i]))
            abort();
    for (uint32_t i = 0; i < r->n_clients; i++)
        pthread_join(r->clients[i].thread, NULL);
    r->over = true;
    if (cancels)
        pthread_join(canceller, NULL);
}

static void run_round(uint64_t number)
{
    chance d = { hsri_rng_u64(soak.seed, 8 * number), 0 };
    round_state r = { .number = number, .n_clients = (uint32_t)between(&d, 1, MAX_CLIENTS), .cancels = one_in(&d, 2) };
    const hsri_io_faults faults = { before_io, &r };
    hsr_error err = HSR_ERROR_INIT;

    pthread_mutex_init(&r.lock, NULL);
    choose_disk(&r, &d);
    choose_engine(&r, &d);
    cold_faults = r.disk == DISK_WELL ? NULL : &faults;
    const int files = host_count("/proc/self/fd"), threads = host_threads(INT32_MAX);
    if (hsr_engine_create(soak.model, &r.opts, &r.engine, &err) != HSR_OK)
        found(&r, NULL, "engine: %s", err.message);
    register_profiles(&r, r.engine);
    for (uint32_t i = 0; i < r.n_clients; i++)
        r.clients[i] = (client){ .round = &r, .chance = { hsri_rng_u64(soak.seed, 8 * number + i + 1), 0 },
                                 .number = i, .err = HSR_ERROR_INIT };
    run_clients(&r);
    check_counters(&r);
    if (hsr_engine_destroy(&r.engine, &err) != HSR_OK)
        found(&r, NULL, "ending the engine: %s", err.message);
    if (host_count("/proc/self/fd") != files || host_threads(threads) != threads || host_count(soak.cold) != 2)
        found(&r, NULL, "files or threads are left");
    compare(&r);
    pthread_mutex_destroy(&r.lock);
}

/* ---- the whole -------------------------------------------------------------------------------------------------- */

/* Without freed memory, of which the allocator keeps some for each thread there ever was at a time. */
static long resident_kib(void)
{
    char line[128];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmRSS: %ld", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib - (long)(mallinfo2().fordblks / 1024);
}

static void report(double since, uint64_t round, long kib)
{
    printf("%6.0f s  round %llu: %lu sessions, %lu outputs (%llu compared), %lu refused, %lu cancelled, %lu failed, %lu rebuilt, "
           "%lu forks, %lu restored, %lu damaged; %llu evictions, %llu misses, %lu disturbed, %llu errors; %ld MiB\n", now() - since,
           (unsigned long long)round, soak.sessions, soak.outputs, (unsigned long long)soak.compared, soak.refusals, soak.cancels,
           soak.failures, soak.rebuilds, soak.forks, soak.restores, soak.damaged, (unsigned long long)soak.evictions,
           (unsigned long long)soak.misses, soak.disturbed, (unsigned long long)soak.errors, kib / 1024);
    fflush(stdout);
}

static bool parse(int argc, char **argv)
{
    soak.seed = (uint64_t)time(NULL);
    soak.minutes = 60;
    soak.rounds = UINT64_MAX;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--minutes") == 0)
            soak.minutes = atof(argv[i + 1]);
        else if (strcmp(argv[i], "--seed") == 0)
            soak.seed = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--rounds") == 0)
            soak.rounds = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--from") == 0)
            soak.first_round = strtoull(argv[i + 1], NULL, 10);
        else
            return false;
    }
    return argc % 2 == 1;
}

static bool prepare(void)
{
    hsr_engine_opts o;
    hsr_error err = HSR_ERROR_INIT;
    snprintf(soak.folder, sizeof soak.folder, "/tmp/hisparse_soak_XXXXXX");
    if (!mkdtemp(soak.folder))
        return false;
    snprintf(soak.cold, sizeof soak.cold, "%s/cold", soak.folder);
    hsr_engine_opts_init(&o, sizeof o);
    o.n_threads = 2;
    o.hot_bytes = 512 * MIB;
    if (mkdir(soak.cold, 0700) || !(soak.model = cold_model()) || hsr_engine_create(soak.model, &o, &soak.resident, &err) != HSR_OK) {
        fprintf(stderr, "soak: %s\n", err.message);
        return false;
    }
    register_profiles(&(round_state){ 0 }, soak.resident);
    return true;
}

/* Sanitizers keep what was freed. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#  define MEMORY_TELLS 0
#else
#  define MEMORY_TELLS 1
#endif

static void run(void)
{
    enum { SETTLED = 20, GROWTH_KIB = 48 * 1024 };
    const double start = now();
    double told = start;
    long most = 0;
    uint64_t done = 0;
    for (; done < soak.rounds && now() - start < 60 * soak.minutes; done++) {
        run_round(soak.first_round + done);
        const long kib = resident_kib();
        if (done < SETTLED)
            most = kib > most ? kib : most;
        else if (MEMORY_TELLS && kib > most + GROWTH_KIB)
            found(&(round_state){ .number = soak.first_round + done }, NULL, "memory grew from %ld to %ld MiB", most / 1024, kib / 1024);
        if (now() - told >= 10) {
            told = now();
            report(start, soak.first_round + done, kib);
        }
    }
    report(start, soak.first_round + done, resident_kib());
    if (done >= SETTLED) {      /* by then all of it happens, with any seed */
        CHECK(soak.sessions > 0 && soak.outputs > 0 && soak.compared > 0);
        CHECK(soak.evictions > 0 && soak.misses > 0 && soak.disturbed > 0);
        CHECK(soak.cancels > 0 && soak.forks > 0 && soak.restores > 0);
    }
}

int main(int argc, char **argv)
{
    if (!parse(argc, argv)) {
        fprintf(stderr, "soak [--minutes N] [--seed N] [--rounds N] [--from ROUND]\n");
        return 2;
    }
    if (!prepare())
        return 1;
    printf("seed %llu\n", (unsigned long long)soak.seed);
    fflush(stdout);
    run();
    CHECK(hsr_engine_destroy(&soak.resident, NULL) == HSR_OK);
    hsr_model_close(&soak.model);
    rmdir(soak.cold);
    rmdir(soak.folder);
    return CHECK_REPORT();
}
