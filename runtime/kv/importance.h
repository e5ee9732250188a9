/* SPDX-License-Identifier: Apache-2.0 */
/* How much a page is worth keeping near:
 *
 *     worth = a * locality + b * attention frequency + c * recency        each in 0 .. 1, a + b + c = 1
 *
 * locality is nearness to the end of the sequence, recency nearness of the last access, and frequency the page's share of
 * attention, as a decaying mean: 1 for an access that a selection chose, since its real softmax mass is not known where pages are held.
 * The score ranks pages that must leave: one that was not read for some tokens is in the lower half of 0 .. 1 whatever it is worth, the
 * others are in the upper half.
 *
 * Moves that nobody asked for have two thresholds and a cool-down after each move. Out is by the score, so that idle pages can go. In is by
 * the worth alone: a page that left has not been read since, and when its cool-down is over it is idle. Pages come in only while
 * more frames are free than those for which pages go out, so none goes back and forth. */
#ifndef HSRI_IMPORTANCE_H
#define HSRI_IMPORTANCE_H

#include <stdbool.h>
#include <stdint.h>

#include "hisparse_rt/hisparse_rt.h"

typedef enum hsri_importance_preset {
    HSRI_IMPORTANCE_BALANCED,
    HSRI_IMPORTANCE_SUMMARIZE,   /* locality */
    HSRI_IMPORTANCE_CHAT,        /* frequency */
    HSRI_N_IMPORTANCE_PRESETS
} hsri_importance_preset;

typedef struct hsri_importance_opts {
    float    locality, frequency, recency;  /* weights; only their ratios matter */
    float    enter, leave;                  /* thresholds of voluntary moves: enter above, leave below */
    uint32_t idle_tokens;                   /* a page not attended for so many tokens is the first to leave */
    uint32_t cooldown_tokens;               /* between voluntary moves of a page */
    uint32_t fold_accesses;                 /* accesses after which their mass is folded into the frequency */
} hsri_importance_opts;

void hsri_importance_preset_fill(hsri_importance_opts *opts, hsri_importance_preset preset);

/* HSR_E_INVALID names what is wrong. */
hsr_status hsri_importance_check(const hsri_importance_opts *opts, hsr_error *err);

/* What is kept of a page. Times count the tokens of its sequence. */
typedef struct hsri_importance {
    float    frequency;     /* folded, 0 .. 1 */
    float    mass;          /* of the accesses since */
    uint32_t last_access;
    uint32_t last_move;
    uint32_t hits;
    uint16_t moves;         /* saturates */
    uint16_t n_unfolded;
} hsri_importance;

/* The page was read at time `now`. */
void hsri_importance_seen(hsri_importance *row, uint32_t now);

/* The page was attended at time `now`, with this share of the attention (0 .. 1). */
void hsri_importance_touch(const hsri_importance_opts *opts, hsri_importance *row, uint32_t now, float mass);

/* The page changed its tier. */
void hsri_importance_moved(hsri_importance *row, uint32_t now);

/* Of a page whose last token is `distance` tokens before the end, at time `now`. */
float hsri_importance_worth(const hsri_importance_opts *opts, const hsri_importance *row, uint64_t distance, uint32_t now);
float hsri_importance_score(const hsri_importance_opts *opts, const hsri_importance *row, uint64_t distance, uint32_t now);

/* Would a move that nobody asked for be welcome? */
bool hsri_importance_enters(const hsri_importance_opts *opts, const hsri_importance *row, float worth, uint32_t now);
bool hsri_importance_leaves(const hsri_importance_opts *opts, const hsri_importance *row, float score, uint32_t now);

#endif
