/* SPDX-License-Identifier: Apache-2.0 */
/* Public entry point of planning. */
#include "api/options.h"
#include "api/structs.h"
#include "engine/plan.h"

static hsr_status in_range(const char *name, int32_t value, int32_t lo, int32_t hi, hsr_error *err)
{
    if (value >= lo && value <= hi)
        return HSR_OK;
    return hsri_fail(err, HSR_E_INVALID, "hsr_plan: model's %s is %d, allowed are %d to %d", name, value, lo, hi);
}

/* As strict as the reader of model files, where plans count with it. */
static hsr_status check_model(const hsr_model_info *m, hsr_error *err)
{
    HSRI_TRY(in_range("weight_dtype", m->weight_dtype, HSR_DTYPE_F32, HSR_DTYPE_Q4, err));
    HSRI_TRY(in_range("vocab_size", m->vocab_size, 1, 1 << 26, err));
    HSRI_TRY(in_range("hidden_size", m->hidden_size, 1, 1 << 20, err));
    HSRI_TRY(in_range("intermediate_size", m->intermediate_size, 0, 1 << 20, err));
    HSRI_TRY(in_range("n_layers", m->n_layers, 1, (int32_t)HSRI_MAX_LAYERS, err));
    HSRI_TRY(in_range("n_heads", m->n_heads, 1, (int32_t)HSRI_MAX_LAYERS, err));
    HSRI_TRY(in_range("n_kv_heads", m->n_kv_heads, 1, m->n_heads, err));
    HSRI_TRY(in_range("head_dim", m->head_dim, 2, 512, err));
    HSRI_TRY(in_range("rotary_dim", m->rotary_dim, 0, m->head_dim, err));
    HSRI_TRY(in_range("context_length", m->context_length, 1, INT32_MAX, err));
    if (m->n_heads % m->n_kv_heads || m->head_dim % 2)
        return hsri_fail(err, HSR_E_INVALID, "hsr_plan: %d heads, %d kv heads of %d: heads must divide evenly, and their size be even",
                         m->n_heads, m->n_kv_heads, m->head_dim);
    return HSR_OK;
}

hsr_status hsr_plan(const hsr_model_info *model, const hsr_engine_opts *engine, const hsr_session_opts *session, uint32_t n_sessions,
                    hsr_plan_result *plan, hsr_error *err)
{
    hsr_model_info info = { .struct_size = sizeof info };
    hsr_engine_opts e;
    hsr_session_opts s;
    hsr_plan_result result;

    hsri_clear(err);
    HSRI_TRY(hsri_struct_check(plan, "hsr_plan_result", err));
    HSRI_TRY(hsri_struct_in(&info, sizeof info, model, "hsr_model_info", err));
    hsr_engine_opts_init(&e, sizeof e);
    if (engine)
        HSRI_TRY(hsri_struct_in(&e, sizeof e, engine, "hsr_engine_opts", err));
    hsr_session_opts_init(&s, sizeof s);
    if (session)
        HSRI_TRY(hsri_struct_in(&s, sizeof s, session, "hsr_session_opts", err));
    HSRI_TRY(check_model(&info, err));
    HSRI_TRY(hsri_check_engine_opts(&e, err));
    HSRI_TRY(hsri_check_session_opts(&s, err));
    if (n_sessions < 1 || n_sessions > HSRI_MAX_SESSIONS)
        return hsri_fail(err, HSR_E_INVALID, "n_sessions is %u, allowed are 1 to %d", n_sessions, HSRI_MAX_SESSIONS);
    HSRI_TRY(hsri_plan(&info, &e, &s, n_sessions, &result, err));
    return hsri_struct_out(plan, &result, sizeof result, "hsr_plan_result", err);
}
