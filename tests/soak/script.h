/* SPDX-License-Identifier: Apache-2.0 */
/* What was done to a session and what came of it, so that it can be done again in another engine and compared to the bit. */
#ifndef HSR_TESTS_SCRIPT_H
#define HSR_TESTS_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hisparse_rt/hisparse_rt.h"

typedef enum act_kind { ACT_APPEND, ACT_COMPUTE, ACT_FILL, ACT_GENERATE, ACT_LOGITS, ACT_TRUNCATE, ACT_PROFILE } act_kind;

typedef struct act {
    act_kind kind;
    uint64_t first, n;      /* positions; TRUNCATE: n stay; PROFILE: n is the id */
    uint64_t seed;          /* GENERATE, FILL */
    int32_t *ids;           /* appended, or sampled */
    float   *values;        /* LOGITS: rows; GENERATE: script_values of each token */
    size_t   n_values;
} act;

enum { SCRIPT_LOGPROBS = 2, SCRIPT_VALUES = 1 + SCRIPT_LOGPROBS };

typedef struct script {
    hsr_session_opts opts;
    act     *acts;
    size_t   n_acts, cap;
    uint64_t n_tokens, n_computed;  /* what a session that did all this has */
    uint64_t target;                /* and is to compute: all but the last token if that was sampled */
    uint64_t peak;                  /* most that was computed since it was empty */
    char    *story;                 /* everything that happened, for a report */
    size_t   story_size;
} script;

void script_begin(script *s, const hsr_session_opts *opts);
void script_end(script *s);
void script_copy(script *to, const script *from);

/* Tell the story. */
__attribute__((format(printf, 2, 3))) void script_note(script *s, const char *format, ...);

/* The act is done: ids and values are copied. n_values counts floats. */
void script_add(script *s, act_kind kind, uint64_t n, uint64_t seed, const int32_t *ids, const float *values, size_t n_values);

/* Work ended early, with so many tokens and computed ones left: forget the rest. */
void script_cut(script *s, uint64_t n_tokens, uint64_t n_computed);

/* Would a cut to so many tokens split an append that was computed sparsely? Its rows attended as a part of the whole. */
bool script_splits(const script *s, uint64_t n_tokens);

/* The session was rebuilt: all it did before is nothing but these tokens. */
void script_rebuilt(script *s, const int32_t *ids, uint64_t n);

/* The request of a GENERATE with this seed. */
void script_request(hsr_request *r, uint64_t seed, uint64_t n);
void script_values(float values[SCRIPT_VALUES], const hsr_event *ev);

/* Do everything again in a session of this engine. False, with a text, if anything differs. */
bool script_same(const script *s, hsr_engine *engine, uint32_t vocab, char *text, size_t room);

#endif
