/* SPDX-License-Identifier: Apache-2.0 */
/* A small host of the library, for tests that look at the process around it: one model, and requests that must give known tokens. */
#ifndef HSR_TESTS_HOST_H
#define HSR_TESTS_HOST_H

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include "hisparse_rt/hisparse_rt.h"
#include "../unit/check.h"
#include "../unit/tiny_model.h"

enum { HOST_PROMPT = 40, HOST_OUTPUT = 12 };

static inline void host_prompt(int32_t *ids, int number)
{
    for (int i = 0; i < HOST_PROMPT; i++)
        ids[i] = (int32_t)((uint32_t)(i + 7 * number) * 2654435761u >> 9) % (TINY_VOCAB - 1);
}

/* Quiet, two threads, a small pool. */
static inline void host_opts(hsr_engine_opts *o)
{
    hsr_engine_opts_init(o, sizeof *o);
    o->n_threads = 2;
    o->hot_bytes = 8u << 20;
    o->chunk_tokens = 16;
    o->max_batch = 64;
    o->max_sessions = 16;
}

/* HOST_OUTPUT sampled tokens of request `number` in a session of its own. The status of the first call that failed. */
static inline hsr_status host_generate(hsr_engine *engine, int number, int32_t *tokens, hsr_error *err)
{
    hsr_session *s = NULL;
    hsr_request r;
    hsr_event ev = { .struct_size = sizeof ev };
    int32_t ids[HOST_PROMPT], n = 0;

    host_prompt(ids, number);
    hsr_request_init(&r, sizeof r);
    r.max_tokens = HOST_OUTPUT;
    r.ignore_eos = 1;
    r.temperature = 1;
    r.seed = (uint64_t)number;
    hsr_status st = hsr_session_create(engine, NULL, &s, err);
    if (st >= 0)
        st = hsr_session_append(s, ids, HOST_PROMPT, err);
    if (st >= 0)
        st = hsr_session_generate(s, &r, err);
    while (st == HSR_OK && (st = hsr_session_next(s, &ev, err)) == HSR_OK) {
        if (ev.kind == HSR_EVENT_FAILED)
            st = ev.status;
        else if (ev.kind == HSR_EVENT_TOKEN && n < HOST_OUTPUT)
            tokens[n++] = ev.token;
    }
    const hsr_status ended = hsr_session_destroy(&s, NULL);
    return st < 0 ? st : ended < 0 ? ended : n == HOST_OUTPUT ? HSR_OK : HSR_E_INTERNAL;
}

/* Open, create, generate, destroy, close. */
static inline hsr_status host_life(const char *path, const hsr_engine_opts *opts, int number, int32_t *tokens)
{
    hsr_model *m = NULL;
    hsr_engine *e = NULL;
    hsr_error err = HSR_ERROR_INIT;

    hsr_status st = hsr_model_open(path, &m, &err);
    if (st >= 0)
        st = hsr_engine_create(m, opts, &e, &err);
    if (st >= 0)
        st = host_generate(e, number, tokens, &err);
    const hsr_status ended = hsr_engine_destroy(&e, NULL);
    hsr_model_close(&m);
    return st < 0 ? st : ended;
}

static inline bool host_same(const int32_t *a, const int32_t *b) { return memcmp(a, b, HOST_OUTPUT * sizeof *a) == 0; }

static inline int host_count(const char *folder)
{
    DIR *d = opendir(folder);
    int n = 0;
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

/* Threads of this process. One that was joined may be listed a moment longer, so a count above the expected one is taken again. */
static inline int host_threads(int expected)
{
    int n = 0;
    for (int i = 0; i < 1000 && (n = host_count("/proc/self/task") - 2) > expected; i++)
        usleep(1000);
    return n;
}

#endif
