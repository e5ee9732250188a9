/* SPDX-License-Identifier: Apache-2.0 */
/* How much attention each page of a session got so far, and the pages that got the most: what forced_history and selector history read.
 * Kept for sessions whose profile asks for it, from then on.
 *
 * Votes. A row adds what it attended to the mass table if it is a sampled token's, the last of an append, or the last of a page: to hear
 * all of a prompt would double its attention. A position votes once, however often it is computed again.
 *
 * Lists. Which pages are forced is decided at the first row of an append, at its last 128-token run, which is selected token by token
 * like what is sampled, at its last row, and at each sampled row; where the window is a single page and prompts are selected token by
 * token throughout, also at every 128th position. Rows in between go by the list that is there. Steps begin at these rows, so that what is
 * forced does not depend on how steps cut a prompt. */
#ifndef HSRI_MASSES_H
#define HSRI_MASSES_H

#include <stdbool.h>

#include "device/device.h"
#include "model.h"
#include "sparse/profile.h"

typedef struct hsri_masses {
    uint32_t  tables[2];        /* buffers: what is known, and what the step under way makes of it */
    uint32_t  current;
    uint64_t  n_runs;           /* room of each */
    uint32_t  n_known;          /* pages from here on have no mass yet */
    uint64_t  voted_end;        /* positions below have voted, if they were to */
    uint32_t  list;             /* buffer: uint32[n_layers] wants, then lists of `stride` pages */
    uint64_t  list_room;        /* pages of one list */
    uint32_t  stride;
    bool      listed;           /* the list is good for rows in between */
    uint32_t *wants;            /* [n_layers], host copy */
    /* Of the step under way. */
    bool      votes, lists;
    uint32_t  next_known;
    hsri_mass_range range;      /* what the list is chosen from */
} hsri_masses;

/* Bytes of both tables of a session of n_tokens at most. */
uint64_t hsri_masses_bytes(const hsri_hparams *hp, uint64_t n_tokens);

/* Memory for the masses of up to n_tokens with this profile, if it asks for them. The queue must be idle. */
hsr_status hsri_masses_reserve(hsr_session *session, const hsri_profile *profile, uint64_t n_tokens, hsr_error *err);
hsr_status hsri_masses_fork(const hsr_session *session, hsr_session *fork, hsr_error *err);
void hsri_masses_destroy(hsr_session *session);

/* Positions from n on are gone: pages that begin there have no mass, and what is computed there votes again. */
void hsri_masses_cut(hsr_session *session, uint64_t n);

/* The list is for another profile. */
static inline void hsri_masses_unlist(hsri_masses *m) { m->listed = false; }

/* A step of the session may compute rows up to here. */
uint64_t hsri_masses_stop(const hsr_session *session);

/* A step of n_rows rows: does it make a list, and does a row vote? */
void hsri_masses_plan(hsr_session *session, uint32_t n_rows);
bool hsri_masses_votes(const hsr_session *session, uint64_t pos);
/* One that does: its place in the step, and that the next ones know its pages. */
hsri_mass_row hsri_masses_vote(hsri_masses *m, uint32_t row, uint64_t pos);

/* Enqueue what comes before the forward pass; where that finds the list, and the table that rows add to (buf 0: none does). */
void hsri_masses_enqueue(hsr_session *session);
hsri_ref hsri_masses_list(const hsr_session *session);
hsri_ref hsri_masses_table(const hsri_masses *m);

/* Masses of a layer's pages [first, first + n), [n][n_kv_heads]. The queue must be idle. */
hsr_status hsri_masses_read(const hsr_session *session, uint32_t layer, uint64_t first, uint64_t n, float *out, hsr_error *err);

/* The step is done, and positions below n are computed. */
void hsri_masses_commit(hsr_session *session, uint64_t n);

#endif
