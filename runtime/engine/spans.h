/* SPDX-License-Identifier: Apache-2.0 */
/* How the rows of a step attend: spans of rows that are dense or sparse alike, and the picks of the sparse ones. A function of
 * positions, profiles and append boundaries only; chunks and batches cut spans, never change a row's mode. */
#ifndef HSRI_SPANS_H
#define HSRI_SPANS_H

#include "engine/engine.h"

hsr_status hsri_spans_create(hsr_engine *engine, hsr_error *err);
void hsri_spans_destroy(hsr_engine *engine);

/* Rows that a step may compute of the session's next `n`: whole prompt runs that share a selection are not cut. 0 if the next run does not
 * fit `room` rows. */
uint32_t hsri_spans_rows(const hsr_session *session, uint64_t n, uint32_t room);

/* Fill spans, picks and settings from the step's parts (lock not needed; the step is planned). */
void hsri_spans_build(hsr_engine *engine);
void hsri_spans_enqueue(hsr_engine *engine);             /* send picks and settings */
void hsri_spans_collect(hsr_engine *engine);             /* enqueue the copies of what observed rows covered */
void hsri_spans_settle(hsr_engine *engine);              /* after the wait: into the sessions' statistics */

/* Memory for the selections of a session of up to n_tokens with this profile. The queue must be idle. */
hsr_status hsri_spans_reserve(hsr_engine *engine, const hsri_profile *profile, hsr_session *session, uint64_t n_tokens, hsr_error *err);
void hsri_spans_forget(hsr_session *session);            /* the session's own part of it */

#endif
