/* SPDX-License-Identifier: Apache-2.0 */
#include "script.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *must(void *p)
{
    if (!p)
        abort();
    return p;
}

static void *copy_of(const void *from, size_t bytes) { return from && bytes ? memcpy(must(malloc(bytes)), from, bytes) : NULL; }

/* ---- writing ---------------------------------------------------------------------------------------------------- */

void script_begin(script *s, const hsr_session_opts *opts) { *s = (script){ .opts = *opts }; }

static void forget_acts(script *s)
{
    for (size_t i = 0; i < s->n_acts; i++) {
        free(s->acts[i].ids);
        free(s->acts[i].values);
    }
    s->n_acts = 0;
}

void script_end(script *s)
{
    forget_acts(s);
    free(s->acts);
    free(s->story);
    *s = (script){ 0 };
}

void script_copy(script *to, const script *from)
{
    *to = *from;
    to->acts = copy_of(from->acts, from->cap * sizeof *from->acts);
    to->story = copy_of(from->story, from->story_size + 1);
    for (size_t i = 0; i < to->n_acts; i++) {
        act *a = &to->acts[i];
        a->ids = copy_of(a->ids, a->n * sizeof *a->ids);
        a->values = copy_of(a->values, a->n_values * sizeof *a->values);
    }
}

void script_note(script *s, const char *format, ...)
{
    char line[700];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    const size_t n = strlen(line);
    s->story = must(realloc(s->story, s->story_size + n + 2));
    memcpy(s->story + s->story_size, line, n);
    memcpy(s->story + s->story_size + n, "\n", 2);
    s->story_size += n + 1;
}

void script_add(script *s, act_kind kind, uint64_t n, uint64_t seed, const int32_t *ids, const float *values, size_t n_values)
{
    static const char *const names[] = { "append", "compute", "fill", "generate", "logits", "truncate", "profile" };
    if (s->n_acts == s->cap)
        s->acts = must(realloc(s->acts, (s->cap = 2 * s->cap + 8) * sizeof *s->acts));
    s->acts[s->n_acts++] = (act){ kind, s->n_tokens, n, seed, copy_of(ids, n * sizeof *ids),
                                  copy_of(values, n_values * sizeof *values), n_values };
    if (kind == ACT_TRUNCATE)
        s->n_tokens = n;
    else if (kind != ACT_COMPUTE && kind != ACT_PROFILE)
        s->n_tokens += n;
    if (kind == ACT_APPEND || kind == ACT_LOGITS || kind == ACT_FILL)
        s->target = s->n_tokens;
    else if (kind == ACT_GENERATE)
        s->target = s->n_tokens - (n > 0);
    else if (kind == ACT_TRUNCATE)
        s->target = n < s->target ? n : s->target;
    if (kind != ACT_APPEND && kind != ACT_PROFILE)
        s->n_computed = kind == ACT_TRUNCATE && s->n_computed < s->target ? s->n_computed : s->target;
    s->peak = s->n_computed == 0 ? 0 : s->n_computed > s->peak ? s->n_computed : s->peak;
    script_note(s, "  %s %llu: %llu tokens, %llu computed", names[kind], (unsigned long long)n, (unsigned long long)s->n_tokens,
                (unsigned long long)s->n_computed);
}

void script_cut(script *s, uint64_t n_tokens, uint64_t n_computed)
{
    const uint64_t computed_before = s->n_computed;
    for (size_t i = s->n_acts; i-- > 0 && s->n_tokens > n_tokens; ) {
        act *a = &s->acts[i];
        if (a->kind == ACT_APPEND) {
            s->n_tokens = a->first > n_tokens ? a->first : n_tokens;
            a->n = s->n_tokens - a->first;
        }
        if ((a->kind != ACT_APPEND || a->n > 0) && (a->kind != ACT_TRUNCATE || a->n <= n_tokens))
            continue;
        free(a->ids);
        memmove(a, a + 1, (s->n_acts - i - 1) * sizeof *a);
        s->n_acts--;
    }
    s->target = n_computed;
    script_note(s, "  cut to %llu tokens, %llu computed", (unsigned long long)n_tokens, (unsigned long long)n_computed);
    if (n_computed > computed_before)
        script_add(s, ACT_COMPUTE, 0, 0, NULL, NULL, 0);
}

bool script_splits(const script *s, uint64_t n_tokens)
{
    bool sparse = s->opts.profile != 0, splits = false;
    for (size_t i = 0; i < s->n_acts; i++) {
        const act *a = &s->acts[i];
        sparse |= a->kind == ACT_PROFILE && a->n != 0;
        splits |= a->kind == ACT_APPEND && a->first >= s->n_computed && a->first < n_tokens && n_tokens < a->first + a->n;
    }
    return sparse && splits;
}

void script_rebuilt(script *s, const int32_t *ids, uint64_t n)
{
    int32_t profile = s->opts.profile;
    for (size_t i = 0; i < s->n_acts; i++)
        if (s->acts[i].kind == ACT_PROFILE)
            profile = (int32_t)s->acts[i].n;
    forget_acts(s);
    s->n_tokens = s->n_computed = s->target = 0;
    script_note(s, "  rebuilt:");
    if (profile != s->opts.profile)
        script_add(s, ACT_PROFILE, (uint64_t)profile, 0, NULL, NULL, 0);
    if (n > 0)
        script_add(s, ACT_APPEND, n, 0, ids, NULL, 0);
}

void script_request(hsr_request *r, uint64_t seed, uint64_t n)
{
    hsr_request_init(r, sizeof *r);
    r->max_tokens = (int32_t)n;
    r->ignore_eos = 1;
    r->n_logprobs = SCRIPT_LOGPROBS;
    r->seed = seed;
    r->temperature = seed % 3 ? 1.0f : 0.0f;
    r->top_p = seed % 5 ? 1.0f : 0.9f;
    r->repetition_penalty = seed % 7 ? 1.0f : 1.1f;
}

void script_values(float values[SCRIPT_VALUES], const hsr_event *ev)
{
    values[0] = ev->logprob;
    for (int i = 0; i < SCRIPT_LOGPROBS; i++)
        values[1 + i] = ev->logprobs[i].logprob;
}

/* ---- doing it again --------------------------------------------------------------------------------------------- */

typedef struct replay {
    hsr_session *session;
    uint32_t     vocab;
    hsr_error    err;
    char        *text;
    size_t       room;
} replay;

static bool differs(replay *r, const char *what, uint64_t position)
{
    snprintf(r->text, r->room, "%s of position %llu", what, (unsigned long long)position);
    return false;
}

static bool refused(replay *r, const char *what)
{
    snprintf(r->text, r->room, "the resident run refuses: %s: %s", what, r->err.message);
    return false;
}

static bool same_output(replay *r, const act *a)
{
    hsr_request request;
    hsr_event ev = { .struct_size = sizeof ev };
    float values[SCRIPT_VALUES];
    uint64_t n = 0;

    script_request(&request, a->seed, a->n);
    if (hsr_session_generate(r->session, &request, &r->err) < 0)
        return refused(r, "generate");
    while (hsr_session_next(r->session, &ev, &r->err) == HSR_OK && ev.kind == HSR_EVENT_TOKEN) {
        script_values(values, &ev);
        if (n == a->n || ev.token != a->ids[n])
            return differs(r, "token", a->first + n);
        if (memcmp(values, a->values + n * SCRIPT_VALUES, sizeof values) != 0)
            return differs(r, "logprob", a->first + n);
        n++;
    }
    return ev.kind == HSR_EVENT_FINISHED && n == a->n ? true : refused(r, "next");
}

static bool same_logits(replay *r, const act *a)
{
    const uint64_t n = a->n * r->vocab;
    float *row = must(malloc(n * sizeof *row));
    bool same = hsr_session_logits(r->session, a->ids, a->n, row, n, &r->err) == HSR_OK;
    if (!same)
        refused(r, "logits");
    else if (memcmp(row, a->values, n * sizeof *row) != 0)
        same = differs(r, "logits", a->first);
    free(row);
    return same;
}

static bool same_act(replay *r, const act *a)
{
    switch (a->kind) {
    case ACT_APPEND:
        return hsr_session_append(r->session, a->ids, a->n, &r->err) == HSR_OK || refused(r, "append");
    case ACT_COMPUTE:
        return hsr_session_prefill(r->session, NULL, NULL, &r->err) == HSR_OK || refused(r, "prefill");
    case ACT_FILL:
        return hsr_session_fill(r->session, a->n, a->seed, &r->err) == HSR_OK || refused(r, "fill");
    case ACT_TRUNCATE:
        return hsr_session_truncate(r->session, a->n, &r->err) == HSR_OK || refused(r, "truncate");
    case ACT_PROFILE:
        return hsr_session_set_profile(r->session, (int32_t)a->n, &r->err) == HSR_OK || refused(r, "set_profile");
    case ACT_GENERATE:
        return same_output(r, a);
    case ACT_LOGITS:
        return same_logits(r, a);
    }
    return false;
}

bool script_same(const script *s, hsr_engine *engine, uint32_t vocab, char *text, size_t room)
{
    replay r = { .vocab = vocab, .err = HSR_ERROR_INIT, .text = text, .room = room };
    bool same = hsr_session_create(engine, &s->opts, &r.session, &r.err) == HSR_OK || refused(&r, "create");
    size_t last = s->n_acts;
    while (last > 0 && s->acts[last - 1].kind != ACT_GENERATE && s->acts[last - 1].kind != ACT_LOGITS)
        last--;                             /* what nobody looked at need not be computed */
    for (size_t i = 0; i < last && same; i++)
        same = same_act(&r, &s->acts[i]);
    hsr_session_destroy(&r.session, NULL);
    return same;
}
