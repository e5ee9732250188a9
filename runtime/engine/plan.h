/* SPDX-License-Identifier: Apache-2.0 */
/* What sessions would need, and whether an engine would admit them, without either: docs/plan.md. */
#ifndef HSRI_PLAN_H
#define HSRI_PLAN_H

#include "engine/engine.h"

/* Every argument was checked field by field. */
hsr_status hsri_plan(const hsr_model_info *model, const hsr_engine_opts *engine, const hsr_session_opts *session, uint32_t n_sessions,
                     hsr_plan_result *plan, hsr_error *err);

#endif
