/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/importance.h"

#include "base/status.h"

/* Distance at which locality, and age at which recency, is a half. */
#define HALF_DISTANCE 4096.0f
#define HALF_AGE      64.0f
/* Weight of the newest mean in the frequency. */
#define FOLD          0.25f

void hsri_importance_preset_fill(hsri_importance_opts *opts, hsri_importance_preset preset)
{
    static const float weights[HSRI_N_IMPORTANCE_PRESETS][3] = {
        [HSRI_IMPORTANCE_BALANCED] = { 0.3f, 0.4f, 0.3f },
        [HSRI_IMPORTANCE_SUMMARIZE] = { 0.6f, 0.2f, 0.2f },
        [HSRI_IMPORTANCE_CHAT] = { 0.15f, 0.6f, 0.25f },
    };
    const float *w = weights[preset];
    *opts = (hsri_importance_opts){
        .locality = w[0], .frequency = w[1], .recency = w[2], .enter = 0.7f, .leave = 0.5f, .idle_tokens = 10, .cooldown_tokens = 32,
        .fold_accesses = 8,
    };
}

hsr_status hsri_importance_check(const hsri_importance_opts *o, hsr_error *err)
{
    float sum = o->locality + o->frequency + o->recency;
    if (!(o->locality >= 0 && o->frequency >= 0 && o->recency >= 0 && sum > 0 && sum < 1e6f))
        return hsri_fail(err, HSR_E_INVALID, "importance weights must not be negative, and one of them must be positive");
    if (!(o->leave >= 0 && o->enter <= 1 && o->leave < o->enter))
        return hsri_fail(err, HSR_E_INVALID, "importance thresholds must satisfy 0 <= leave < enter <= 1, not %g and %g", (double)o->leave,
                         (double)o->enter);
    if (o->fold_accesses == 0)
        return hsri_fail(err, HSR_E_INVALID, "importance: attention is folded in after at least one access");
    return HSR_OK;
}

void hsri_importance_seen(hsri_importance *row, uint32_t now)
{
    row->last_access = now;
    row->hits += row->hits < UINT32_MAX;
}

void hsri_importance_touch(const hsri_importance_opts *opts, hsri_importance *row, uint32_t now, float mass)
{
    row->last_access = now;
    row->mass += mass > 0 ? mass < 1 ? mass : 1 : 0;
    if (++row->n_unfolded < opts->fold_accesses && row->n_unfolded < UINT16_MAX)
        return;
    row->frequency += FOLD * (row->mass / (float)row->n_unfolded - row->frequency);
    row->mass = 0;
    row->n_unfolded = 0;
}

void hsri_importance_moved(hsri_importance *row, uint32_t now)
{
    row->last_move = now;
    row->moves += row->moves < UINT16_MAX;
}

static uint32_t age(uint32_t then, uint32_t now) { return now > then ? now - then : 0; }

float hsri_importance_worth(const hsri_importance_opts *o, const hsri_importance *row, uint64_t distance, uint32_t now)
{
    uint32_t idle = age(row->last_access, now);
    float recent = HALF_AGE / (HALF_AGE + (float)idle), near = HALF_DISTANCE / (HALF_DISTANCE + (float)distance);
    float pending = row->n_unfolded ? FOLD * (row->mass / (float)row->n_unfolded - row->frequency) : 0;
    float score = o->locality * near + o->frequency * (row->frequency + pending) + o->recency * recent;
    return score / (o->locality + o->frequency + o->recency);
}

float hsri_importance_score(const hsri_importance_opts *o, const hsri_importance *row, uint64_t distance, uint32_t now)
{
    const float worth = hsri_importance_worth(o, row, distance, now);
    return age(row->last_access, now) > o->idle_tokens ? worth * 0.5f : 0.5f + worth * 0.5f;
}

bool hsri_importance_enters(const hsri_importance_opts *opts, const hsri_importance *row, float worth, uint32_t now)
{
    return worth > opts->enter && (row->moves == 0 || age(row->last_move, now) >= opts->cooldown_tokens);
}

bool hsri_importance_leaves(const hsri_importance_opts *opts, const hsri_importance *row, float score, uint32_t now)
{
    return score < opts->leave && (row->moves == 0 || age(row->last_move, now) >= opts->cooldown_tokens);
}
