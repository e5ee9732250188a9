/* SPDX-License-Identifier: Apache-2.0 */
/* The plan is made with an engine on paper: as much of a model, an engine and a session as the functions look at that choose formats and
 * count blocks for real ones. So plan and admission cannot disagree about a session; how sessions share memory and the cold file is
 * retold here, in the order in which they would be admitted. */
#include "engine/plan.h"

#include <stdlib.h>

#include "base/array.h"
#include "base/status.h"

typedef struct paper {
    hsr_model        model;
    hsri_calibration calibration;
    hsr_engine       engine;
    hsr_session      session;
    hsri_profile    *dense;
    hsri_cache_opts  cache;
    uint64_t         per_block;        /* slots of sealed pages */
    hsri_kv_need     need;
} paper;

static void fill_model(paper *p, const hsr_model_info *info)
{
    p->model.info = *info;
    p->model.hp = (hsri_hparams){
        .vocab_size = (uint32_t)info->vocab_size, .tokenizer_size = (uint32_t)info->vocab_size, .hidden = (uint32_t)info->hidden_size,
        .intermediate = (uint32_t)(info->intermediate_size ? info->intermediate_size : 4 * info->hidden_size),
        .n_layers = (uint32_t)info->n_layers, .n_heads = (uint32_t)info->n_heads, .n_kv_heads = (uint32_t)info->n_kv_heads,
        .head_dim = (uint32_t)info->head_dim, .rotary_dim = (uint32_t)(info->rotary_dim ? info->rotary_dim : info->head_dim),
        .context_length = (uint32_t)info->context_length, .weight_dtype = (hsri_dtype)info->weight_dtype,
    };
    p->model.calibration = &p->calibration;
}

static hsr_status fill_engine(paper *p, const hsr_engine_opts *opts, hsr_error *err)
{
    hsr_engine *e = &p->engine;
    const hsri_hparams *hp = &p->model.hp;
    e->model = &p->model;
    e->opts = *opts;
    /* Sizes depend on whether there are tiers, not on which. */
    e->tiers = opts->cold_dir ? (hsri_tiers *)p : NULL;
    e->shape = (hsri_kv_shape){ .n_layers = hp->n_layers, .n_kv_heads = hp->n_kv_heads, .head_dim = hp->head_dim };
    HSRI_TRY(hsri_profile_create(&(hsr_profile){ 0 }, hp->n_layers, true, &p->dense, err));
    e->profiles = &p->dense;
    e->n_profiles = 1;
    return HSR_OK;
}

static hsr_status fill_session(paper *p, const hsr_session_opts *opts, hsr_error *err)
{
    hsr_session *s = &p->session;
    s->engine = &p->engine;
    s->opts = *opts;
    s->opts.profile = 0;
    HSRI_TRY(hsri_session_check_context(&p->engine, &s->opts, err));
    HSRI_TRY(hsri_session_choose(s, err));
    s->context = (uint64_t)s->opts.context;
    p->cache = hsri_session_cache_opts(s);
    p->per_block = hsri_kv_slots_per_block(p->cache.format, p->engine.shape.head_dim);
    if (p->per_block == 0 || hsri_kv_slots_per_block(p->cache.type, p->engine.shape.head_dim) == 0)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "a KV page of head size %u is larger than a block of 1 MiB", p->engine.shape.head_dim);
    p->need = hsri_kv_slots_for(&p->engine.shape, &p->cache, s->context);
    return HSR_OK;
}

/* ---- one session ---- */

static uint64_t table_bytes(const paper *p)
{
    const hsri_kv_shape *shape = &p->engine.shape;
    const uint64_t slots = hsri_div_up(p->session.context, HSRI_PAGE_TOKENS) * shape->n_layers * shape->n_kv_heads;
    const uint64_t tables = p->need.sealed ? 2 : 1;
    /* Entries on the host and on the device, a state per page, with tiers a body. */
    const uint64_t per_slot = tables * 2 * sizeof(uint32_t) + 1 + (p->engine.tiers ? sizeof(uint32_t) + 48 : 0);
    return slots * per_slot + p->session.context * sizeof(int32_t);
}

static uint64_t scratch_bytes(const paper *p)
{
    const hsr_engine_opts *o = &p->engine.opts;
    const hsri_hparams *hp = &p->model.hp;
    return hsri_scratch_bytes(hp, (uint32_t)o->max_batch) + (2ull + (uint64_t)o->max_sessions) * (hp->rotary_dim / 2) * sizeof(float);
}

static void describe(const paper *p, hsr_plan_result *r)
{
    const uint32_t d = p->engine.shape.head_dim;
    r->context = p->session.context;
    r->weight_bytes = p->model.info.weight_bytes;
    r->scratch_bytes = scratch_bytes(p);
    r->plain_bytes = p->need.plain * hsri_kv_slot_bytes(p->cache.type, d);
    r->sealed_bytes = p->need.sealed * hsri_kv_slot_bytes(p->cache.format, d);
    r->index_bytes = hsri_kv_index_bytes(&p->cache.index, &p->need);
    r->table_bytes = table_bytes(p);
    r->history_bytes = hsri_masses_bytes(&p->model.hp, p->session.context);
    r->session_blocks = hsri_kv_blocks_for(&p->engine.shape, &p->cache, p->session.context);
}

/* ---- all of them, in blocks ---- */

typedef struct tally {
    uint64_t own;        /* of slots that are the sessions' own: without a cold tier all */
    uint64_t frames;     /* slots promised to sealed pages in memory, whose blocks are the tiers' */
    uint64_t homes;      /* and in the cold file */
} tally;

static uint64_t memory_of(const paper *p, const tally *t) { return t->own + hsri_div_up(t->frames, p->per_block); }
static uint64_t cold_of(const paper *p, const tally *t) { return hsri_div_up(t->homes, p->per_block); }

/* Admit one more session. With a cold tier, as families are: in memory if that can be promised, else with homes; and if there is no
 * room for what it works with, those before it are given homes, too, one after the other. */
static void admit_one(const paper *p, uint64_t memory, tally *t, hsr_plan_result *r)
{
    t->own += r->session_blocks;
    r->n_resident++;
    if (!p->engine.tiers)
        return;
    t->own -= hsri_div_up(p->need.sealed, p->per_block);
    t->frames += p->need.sealed;
    while (memory_of(p, t) > memory && r->n_resident > 0) {
        t->frames -= p->need.sealed;
        t->frames += hsri_kv_working_set(&p->engine.shape, &p->cache);
        t->homes += p->need.sealed;
        r->n_resident--;
    }
}

static void judge(const paper *p, const tally *t, uint32_t n_sessions, uint64_t memory, uint64_t cold, hsr_plan_result *r)
{
    r->memory_bytes = memory_of(p, t) * HSRI_BLOCK_BYTES;
    r->cold_bytes = cold_of(p, t) * HSRI_BLOCK_BYTES;
    /* With a cold tier, pages stay in memory while there is room. */
    const uint64_t most = p->engine.tiers ? hsri_max(hsri_min(n_sessions * r->session_blocks, memory), memory_of(p, t)) : memory_of(p, t);
    const uint64_t warm = p->engine.opts.readable_tiers == HSR_READ_HOT ? p->engine.opts.warm_bytes : 0;   /* beside the pool */
    r->total_bytes = most * HSRI_BLOCK_BYTES + warm + r->weight_bytes + r->scratch_bytes + n_sessions * r->table_bytes;
    if (n_sessions > (uint32_t)p->engine.opts.max_sessions) {
        r->short_of = HSR_SHORT_SESSIONS;
        r->short_needed = n_sessions;
        r->short_available = (uint64_t)p->engine.opts.max_sessions;
    } else if (memory_of(p, t) > memory) {
        r->short_of = HSR_SHORT_MEMORY;
        r->short_needed = r->memory_bytes;
        r->short_available = r->memory_budget;
    } else if (cold_of(p, t) > cold) {
        r->short_of = HSR_SHORT_COLD;
        r->short_needed = r->cold_bytes;
        r->short_available = r->cold_budget;
    }
    r->fits = r->short_of == HSR_SHORT_NOTHING;
}

static hsr_status count(const paper *p, uint32_t n_sessions, hsr_plan_result *r, hsr_error *err)
{
    uint64_t memory = 0, cold = 0;
    tally t = { 0 };
    HSRI_TRY(hsri_pool_bytes(&p->engine.opts, &memory, err));
    HSRI_TRY(hsri_cold_bytes(&p->engine.opts, &cold, err));
    memory /= HSRI_BLOCK_BYTES;
    cold /= HSRI_BLOCK_BYTES;
    r->memory_budget = memory * HSRI_BLOCK_BYTES;
    r->cold_budget = cold * HSRI_BLOCK_BYTES;
    for (uint32_t i = 0; i < n_sessions; i++)
        admit_one(p, memory, &t, r);
    judge(p, &t, n_sessions, memory, cold, r);
    return HSR_OK;
}

static hsr_status plan(paper *p, const hsr_model_info *model, const hsr_engine_opts *engine, const hsr_session_opts *session,
                       uint32_t n_sessions, hsr_plan_result *r, hsr_error *err)
{
    fill_model(p, model);
    HSRI_TRY(fill_engine(p, engine, err));
    HSRI_TRY(fill_session(p, session, err));
    describe(p, r);
    return count(p, n_sessions, r, err);
}

hsr_status hsri_plan(const hsr_model_info *model, const hsr_engine_opts *engine, const hsr_session_opts *session, uint32_t n_sessions,
                     hsr_plan_result *r, hsr_error *err)
{
    *r = (hsr_plan_result){ .struct_size = sizeof *r };
    paper *p = hsri_new_array(1, sizeof *p);
    if (!p)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a plan");
    const hsr_status st = plan(p, model, engine, session, n_sessions, r, err);
    free(p->dense);
    free(p);
    return st;
}
