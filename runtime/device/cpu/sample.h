/* SPDX-License-Identifier: Apache-2.0 */
/* The sampler over one row of logits. The semantics, in order:
 *
 *   raw logits       NaN, +infinity or no finite logit at all: HSR_E_NONFINITE. A -infinity beside finite logits bans its token.
 *   log-probability  log softmax of the raw logits, before everything below
 *   penalties        y > 0 ? y / repetition : y * repetition if the token is in the window; then
 *                    y - frequency * n_output - (n_output ? presence : 0)
 *   bias             added, one after the other; -infinity bans the token. Finite results are held inside the float range.
 *   all banned       HSR_E_INVALID
 *   arg-max          if temperature is 0, or so small that the highest y divided by it overflows, or top_k is 1: the token of
 *                    highest y. Everywhere, tokens of equal y rank by id, the lower first.
 *   top_k            the k first tokens; 0 or at least the number of tokens: off
 *   softmax          of y / temperature over what is left
 *   min_p            tokens at least min_p times as likely as the first one; 0: off
 *   top_p            the fewest first tokens whose share of what is left reaches p; 1: off
 *   draw             u = hsri_rng_unit(seed, draw); the first token, in ascending id, at which the running sum of weights passes
 *                    u times their total
 *
 * Shares are compared with min_p and top_p to single precision, so that ten equal tokens and p = 0.1f leave one. The first
 * token is never filtered away. The filters keep a prefix of the ranking, which is found by counting (see `rank_cut`), never by
 * sorting the vocabulary. Ids outside [0, n_tokens) in bias and seen are ignored: the vocabulary's padding cannot be drawn. */
#ifndef HSRI_CPU_SAMPLE_H
#define HSRI_CPU_SAMPLE_H

#include <stdbool.h>

#include "device/cpu/kernels.h"

/* Tokens of one part: the unit in which threads share a row. */
#define HSRI_SAMPLE_CHUNK 8192u

/* What one pass over a part of the raw logits finds. */
typedef struct hsri_sample_part {
    double   sum;        /* of exp(x - max) */
    float    max;        /* of the finite logits; -infinity: there is none */
    int32_t  argmax;     /* lowest id that has it */
    bool     nonfinite;  /* NaN or +infinity seen */
} hsri_sample_part;

static inline uint32_t hsri_sample_n_parts(uint32_t n_tokens) { return (n_tokens + HSRI_SAMPLE_CHUNK - 1) / HSRI_SAMPLE_CHUNK; }

void hsri_sample_scan(const hsri_kernels *kernels, const float *logits, uint32_t n_tokens, uint32_t part, hsri_sample_part *out);

/* Scratch of one thread. */
typedef struct hsri_sample_work {
    float    *logits;    /* [n_tokens] after penalties and bias */
    uint32_t *ids;       /* [n_tokens] candidates, ascending */
    float    *weights;   /* [n_tokens] of the candidates, in their order */
    uint32_t *tied;      /* [n_tokens] scratch of rank_cut */
    double   *bins;
    uint32_t  n_tokens;  /* for which there is room */
} hsri_sample_work;

/* Make room for n_tokens; false if memory is refused: the work is then empty. */
bool hsri_sample_work_grow(hsri_sample_work *work, uint32_t n_tokens);
void hsri_sample_work_free(hsri_sample_work *work);

/* Sample one row. parts: hsri_sample_scan of every part of the row. bias and seen: what p's references point to. */
void hsri_sample_row(const float *logits, uint32_t n_tokens, const hsri_sample_part *parts, const hsri_sample_params *p,
                     const hsr_token_bias *bias, const hsri_seen *seen, hsri_sample_work *work, hsri_sampled *out);

#endif
