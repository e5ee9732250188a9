/* SPDX-License-Identifier: Apache-2.0 */
/* The debugging back end: each queue records its operations, arguments copied, and a thread of its own runs them on the inner
 * device. The thread lags on purpose: it starts when somebody waits or the queue is full, so that whatever the host reads before
 * a wait is still the poison that was put there.
 *
 * Threads: a queue belongs to one host thread at a time, as on every back end. Its lock covers the commands and the flags;
 * a command itself runs without it, while the host may only wait. The device's lock lets one queue at a time into the inner
 * device, whose compute threads take one caller. */
#define _GNU_SOURCE 1
#include "device/device.h"

#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/array.h"
#include "base/status.h"

#define N_COMMANDS 256u
#define POISON 0xA5

/* ---- commands: one struct of arguments per operation ---- */

typedef struct embed_args { hsri_matrix table; hsri_ref ids, out; uint32_t n; } embed_args;
typedef struct gather_args { hsri_ref in, index, out; uint32_t width, n; } gather_args;
typedef struct rope_table_args { hsri_batch batch; hsri_ref inv_freq, out; uint32_t rotary_dim; float factor; } rope_table_args;
typedef struct rms_norm_args { hsri_ref in, gain, out; float eps; uint32_t n_rows, width; } rms_norm_args;
typedef struct linear_args { hsri_matrix w; hsri_ref bias, in, out; uint32_t n_rows; } linear_args;
typedef struct rows_args { hsri_ref a, b; uint32_t n_rows, n; } rows_args;
typedef struct rope_append_args {
    hsri_batch batch; hsri_kv_view kv; hsri_rope rope; hsri_ref qkv, q_norm, k_norm, q_out; uint32_t layer, n_heads; float eps;
} rope_append_args;
typedef struct seal_args { hsri_kv_view kv; hsri_ref list; uint32_t n; } seal_args;
typedef struct attend_args {
    hsri_batch batch; hsri_kv_view kv; hsri_ref queries, rotated, part; uint32_t layer, n_heads, g0, g1; float scale; hsri_fold fold;
} attend_args;
typedef struct attend_list_args {
    hsri_batch batch; hsri_kv_view kv; hsri_lists lists; hsri_ref queries, rotated, pick_of, part; uint32_t layer, n_heads, g0, g1;
    float scale; hsri_fold fold;
} attend_list_args;
typedef struct rotate_args { hsri_kv_view kv; hsri_ref queries, rotated; uint32_t layer, n_heads, n_rows; } rotate_args;
typedef struct select_args {
    hsri_batch batch; hsri_kv_view kv; hsri_lists lists; hsri_ref queries, rotated, acc, sparse, picks, scratch;
    uint32_t layer, n_heads; float scale;
} select_args;
typedef struct page_parts_args {
    hsri_batch batch; hsri_kv_view kv; hsri_page_parts what; hsri_ref queries, rotated, acc; uint32_t layer, n_heads; float scale;
} page_parts_args;
typedef struct top_pages_args { hsri_kv_view kv; hsri_mass_range range; hsri_ref wants, out; uint32_t stride; } top_pages_args;
typedef struct merge_args { hsri_ref part; uint32_t n_rows, n_heads, head_dim, n_groups; hsri_fold fold; } merge_args;
typedef struct sample_args { hsri_ref logits, params, out; uint32_t n_rows, n_vocab, n_tokens; } sample_args;
typedef struct norm_linear_args { hsri_matrix w; hsri_ref in, gain, bias, scratch, out; float eps; uint32_t n_rows, n; } norm_linear_args;
typedef struct qkv_args {
    hsri_batch batch; hsri_kv_view kv; hsri_matrix w; hsri_rope rope; hsri_ref in, gain, bias, q_norm, k_norm, scratch, q_out;
    uint32_t layer, n_heads; float eps;
} qkv_args;
typedef struct linear_add_args { hsri_matrix w; hsri_ref bias, in, scratch, x; uint32_t n_rows; } linear_add_args;
typedef struct mlp_args {
    hsri_matrix gate_up, down; hsri_ref x, gain, gate_up_bias, down_bias, scratch, ffn; float eps; uint32_t n_rows;
} mlp_args;
typedef struct copy_args { hsri_ref dst, src; void *out; const void *in; uint64_t bytes; } copy_args;

typedef union args {
    embed_args embed; gather_args gather; rope_table_args rope_table; rms_norm_args rms_norm; linear_args linear; rows_args rows;
    rope_append_args rope_append; seal_args seal; attend_args attend; attend_list_args attend_list;
    rotate_args rotate; select_args select; page_parts_args page_parts; top_pages_args top_pages; merge_args merge; sample_args sample;
    norm_linear_args norm_linear; qkv_args qkv; linear_add_args linear_add; mlp_args mlp; copy_args copy;
} args;

typedef struct command {
    void (*run)(hsri_queue *inner, const args *a);
    args   a;
} command;

/* ---- device and queue ---- */

typedef struct async_device {
    hsri_device     base;
    hsri_device    *inner;
    pthread_mutex_t lock;      /* one queue at a time in the inner device */
} async_device;

typedef struct async_queue {
    hsri_queue      base;
    hsri_queue     *inner;
    pid_t           pid;       /* of the creator: a forked child has no thread to stop */
    pthread_t       thread;
    pthread_mutex_t lock;
    pthread_cond_t  changed;
    command         commands[N_COMMANDS];
    uint32_t        n;         /* commands recorded and not yet done */
    bool            go;        /* the thread shall run all of them */
    bool            stop;
} async_queue;

static async_device *async_of(hsri_device *dev) { return (async_device *)dev; }
static async_queue *queue_of(hsri_queue *q) { return (async_queue *)q; }

static void run_commands(async_queue *queue)
{
    pthread_mutex_t *lock = &async_of(queue->base.dev)->lock;

    pthread_mutex_lock(lock);
    for (uint32_t i = 0; i < queue->n; i++)
        queue->commands[i].run(queue->inner, &queue->commands[i].a);
    pthread_mutex_unlock(lock);
}

static void *queue_main(void *arg)
{
    async_queue *queue = arg;

    pthread_setname_np(pthread_self(), "hsr-async");
    fesetenv(FE_DFL_ENV);
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (!queue->go && !queue->stop)
            pthread_cond_wait(&queue->changed, &queue->lock);
        if (queue->stop)
            break;
        pthread_mutex_unlock(&queue->lock);   /* the host adds nothing while `go` is set */
        run_commands(queue);
        pthread_mutex_lock(&queue->lock);
        queue->n = 0;
        queue->go = false;
        pthread_cond_broadcast(&queue->changed);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* Have the thread run all commands, and wait for it; the caller holds the lock. */
static void drain(async_queue *queue)
{
    queue->go = true;
    pthread_cond_broadcast(&queue->changed);
    while (queue->go)
        pthread_cond_wait(&queue->changed, &queue->lock);
}

static void push(hsri_queue *q, void (*run)(hsri_queue *, const args *), const args *a)
{
    async_queue *queue = queue_of(q);

    pthread_mutex_lock(&queue->lock);
    if (queue->n == N_COMMANDS)
        drain(queue);
    queue->commands[queue->n++] = (command){ run, *a };
    pthread_mutex_unlock(&queue->lock);
}

#define PUSH(q, run, member, ...) push(q, run, &(args){ .member = { __VA_ARGS__ } })

/* ---- simple operations ---- */

static void run_embed(hsri_queue *q, const args *u)
{
    const embed_args *a = &u->embed;
    q->dev->ops.embed(q, &a->table, a->ids, a->n, a->out);
}

static void async_embed(hsri_queue *q, const hsri_matrix *table, hsri_ref ids, uint32_t n_ids, hsri_ref out)
{
    PUSH(q, run_embed, embed, *table, ids, out, n_ids);
}

static void run_gather_rows(hsri_queue *q, const args *u)
{
    const gather_args *a = &u->gather;
    q->dev->ops.gather_rows(q, a->in, a->width, a->index, a->n, a->out);
}

static void async_gather_rows(hsri_queue *q, hsri_ref in, uint32_t width, hsri_ref index, uint32_t n, hsri_ref out)
{
    PUSH(q, run_gather_rows, gather, in, index, out, width, n);
}

static void run_rope_table(hsri_queue *q, const args *u)
{
    const rope_table_args *a = &u->rope_table;
    q->dev->ops.rope_table(q, &a->batch, a->inv_freq, a->rotary_dim, a->factor, a->out);
}

static void async_rope_table(hsri_queue *q, const hsri_batch *batch, hsri_ref inv_freq, uint32_t rotary_dim, float attention_factor,
                             hsri_ref out)
{
    PUSH(q, run_rope_table, rope_table, *batch, inv_freq, out, rotary_dim, attention_factor);
}

static void run_rms_norm(hsri_queue *q, const args *u)
{
    const rms_norm_args *a = &u->rms_norm;
    q->dev->ops.rms_norm(q, a->in, a->gain, a->eps, a->n_rows, a->width, a->out);
}

static void async_rms_norm(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, uint32_t n_rows, uint32_t width, hsri_ref out)
{
    PUSH(q, run_rms_norm, rms_norm, in, gain, out, eps, n_rows, width);
}

static void run_linear(hsri_queue *q, const args *u)
{
    const linear_args *a = &u->linear;
    q->dev->ops.linear(q, &a->w, a->bias, a->in, a->n_rows, a->out);
}

static void async_linear(hsri_queue *q, const hsri_matrix *w, hsri_ref bias, hsri_ref in, uint32_t n_rows, hsri_ref out)
{
    PUSH(q, run_linear, linear, *w, bias, in, out, n_rows);
}

static void run_add(hsri_queue *q, const args *u) { q->dev->ops.add(q, u->rows.a, u->rows.b, u->rows.n_rows, u->rows.n); }

static void async_add(hsri_queue *q, hsri_ref x, hsri_ref y, uint32_t n_rows, uint32_t n) { PUSH(q, run_add, rows, x, y, n_rows, n); }

static void run_silu_mul(hsri_queue *q, const args *u) { q->dev->ops.silu_mul(q, u->rows.a, u->rows.n_rows, u->rows.n, u->rows.b); }

static void async_silu_mul(hsri_queue *q, hsri_ref in, uint32_t n_rows, uint32_t n, hsri_ref out)
{
    PUSH(q, run_silu_mul, rows, in, out, n_rows, n);
}

static void run_rope_append(hsri_queue *q, const args *u)
{
    const rope_append_args *a = &u->rope_append;
    q->dev->ops.rope_append(q, &a->batch, &a->kv, a->layer, a->n_heads, a->qkv, a->q_norm, a->k_norm, a->eps, &a->rope, a->q_out);
}

static void async_rope_append(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads,
                              hsri_ref qkv, hsri_ref q_norm, hsri_ref k_norm, float eps, const hsri_rope *rope, hsri_ref q_out)
{
    PUSH(q, run_rope_append, rope_append, *batch, *kv, *rope, qkv, q_norm, k_norm, q_out, layer, n_heads, eps);
}

static void run_seal(hsri_queue *q, const args *u) { q->dev->ops.seal(q, &u->seal.kv, u->seal.list, u->seal.n); }

static void async_seal(hsri_queue *q, const hsri_kv_view *kv, hsri_ref list, uint32_t n) { PUSH(q, run_seal, seal, *kv, list, n); }

static void run_cluster(hsri_queue *q, const args *u) { q->dev->ops.cluster(q, &u->seal.kv, u->seal.list, u->seal.n); }

static void async_cluster(hsri_queue *q, const hsri_kv_view *kv, hsri_ref list, uint32_t n) { PUSH(q, run_cluster, seal, *kv, list, n); }

/* An absent fold is one without a place. */
static hsri_fold fold_of(const hsri_fold *fold) { return fold ? *fold : (hsri_fold){ 0 }; }
static const hsri_fold *fold_in(const hsri_fold *fold) { return fold->acc.buf || fold->out.buf ? fold : NULL; }

static void run_attend(hsri_queue *q, const args *u)
{
    const attend_args *a = &u->attend;
    q->dev->ops.attend(q, &a->batch, &a->kv, a->layer, a->n_heads, a->scale, a->queries, a->rotated, a->g0, a->g1, a->part,
                       fold_in(&a->fold));
}

static void async_attend(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                         hsri_ref queries, hsri_ref rotated, uint32_t g0, uint32_t g1, hsri_ref part, const hsri_fold *fold)
{
    PUSH(q, run_attend, attend, *batch, *kv, queries, rotated, part, layer, n_heads, g0, g1, scale, fold_of(fold));
}

/* g0: the rows are prompt runs; g1: groups */
static void run_attend_fixed(hsri_queue *q, const args *u)
{
    const attend_args *a = &u->attend;
    q->dev->ops.attend_fixed(q, &a->batch, &a->kv, a->layer, a->n_heads, a->scale, a->queries, a->rotated, a->g1, (int)a->g0, a->part,
                             fold_in(&a->fold));
}

static void async_attend_fixed(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads,
                               float scale, hsri_ref queries, hsri_ref rotated, uint32_t n_fixed, int runs, hsri_ref part,
                               const hsri_fold *fold)
{
    PUSH(q, run_attend_fixed, attend, *batch, *kv, queries, rotated, part, layer, n_heads, runs != 0, n_fixed, scale, fold_of(fold));
}

static void run_attend_list(hsri_queue *q, const args *u)
{
    const attend_list_args *a = &u->attend_list;
    q->dev->ops.attend_list(q, &a->batch, &a->kv, a->layer, a->n_heads, a->scale, a->queries, a->rotated, a->pick_of, &a->lists, a->g0,
                            a->g1, a->part, fold_in(&a->fold));
}

static void async_attend_list(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                              hsri_ref queries, hsri_ref rotated, hsri_ref pick_of, const hsri_lists *lists, uint32_t g0, uint32_t g1,
                              hsri_ref part, const hsri_fold *fold)
{
    PUSH(q, run_attend_list, attend_list, *batch, *kv, *lists, queries, rotated, pick_of, part, layer, n_heads, g0, g1, scale,
         fold_of(fold));
}

static void run_rotate(hsri_queue *q, const args *u)
{
    const rotate_args *a = &u->rotate;
    q->dev->ops.rotate(q, &a->kv, a->layer, a->n_heads, a->n_rows, a->queries, a->rotated);
}

static void async_rotate(hsri_queue *q, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, uint32_t n_rows, hsri_ref queries,
                         hsri_ref rotated)
{
    PUSH(q, run_rotate, rotate, *kv, queries, rotated, layer, n_heads, n_rows);
}

static void run_select(hsri_queue *q, const args *u)
{
    const select_args *a = &u->select;
    q->dev->ops.select(q, &a->batch, &a->kv, a->layer, a->n_heads, a->scale, a->queries, a->rotated, a->acc, a->sparse, a->picks,
                       a->scratch, &a->lists);
}

static void async_select(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                         hsri_ref queries, hsri_ref rotated, hsri_ref acc, hsri_ref sparse, hsri_ref picks, hsri_ref scratch,
                         const hsri_lists *lists)
{
    PUSH(q, run_select, select, *batch, *kv, *lists, queries, rotated, acc, sparse, picks, scratch, layer, n_heads, scale);
}

static void run_foresee(hsri_queue *q, const args *u)
{
    const select_args *a = &u->select;
    q->dev->ops.foresee(q, &a->batch, &a->kv, a->layer, a->n_heads, a->scale, a->queries, a->rotated, a->sparse, a->picks,
                        a->scratch, &a->lists);
}

static void async_foresee(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                          hsri_ref queries, hsri_ref rotated, hsri_ref sparse, hsri_ref picks, hsri_ref scratch, const hsri_lists *lists)
{
    PUSH(q, run_foresee, select, *batch, *kv, *lists, queries, rotated, { 0 }, sparse, picks, scratch, layer, n_heads, scale);
}

static void run_page_parts(hsri_queue *q, const args *u)
{
    const page_parts_args *a = &u->page_parts;
    q->dev->ops.page_parts(q, &a->batch, &a->kv, a->layer, a->n_heads, a->scale, a->queries, a->rotated, &a->what);
}

static void async_page_parts(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                             hsri_ref queries, hsri_ref rotated, const hsri_page_parts *what)
{
    PUSH(q, run_page_parts, page_parts, *batch, *kv, *what, queries, rotated, { 0 }, layer, n_heads, scale);
}

static void run_add_masses(hsri_queue *q, const args *u)
{
    const page_parts_args *a = &u->page_parts;
    q->dev->ops.add_masses(q, &a->batch, &a->kv, a->layer, a->n_heads, a->acc, &a->what);
}

static void async_add_masses(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, hsri_ref acc,
                             const hsri_page_parts *what)
{
    PUSH(q, run_add_masses, page_parts, *batch, *kv, *what, { 0 }, { 0 }, acc, layer, n_heads, 0);
}

static void run_top_pages(hsri_queue *q, const args *u)
{
    const top_pages_args *a = &u->top_pages;
    q->dev->ops.top_pages(q, &a->kv, &a->range, a->wants, a->stride, a->out);
}

static void async_top_pages(hsri_queue *q, const hsri_kv_view *kv, const hsri_mass_range *range, hsri_ref wants, uint32_t stride,
                            hsri_ref out)
{
    PUSH(q, run_top_pages, top_pages, *kv, *range, wants, out, stride);
}

static void run_set_aside(hsri_queue *q, const args *u)
{
    const select_args *a = &u->select;
    q->dev->ops.set_aside(q, &a->batch, &a->kv, a->layer, a->n_heads, a->scale, a->queries, a->rotated, a->acc, a->sparse,
                          a->picks, &a->lists);
}

static void async_set_aside(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads, float scale,
                            hsri_ref queries, hsri_ref rotated, hsri_ref acc, hsri_ref sparse, hsri_ref picks, const hsri_lists *lists)
{
    PUSH(q, run_set_aside, select, *batch, *kv, *lists, queries, rotated, acc, sparse, picks, { 0 }, layer, n_heads, scale);
}

static void run_merge(hsri_queue *q, const args *u)
{
    const merge_args *a = &u->merge;
    q->dev->ops.merge(q, a->n_rows, a->n_heads, a->head_dim, a->part, a->n_groups, &a->fold);
}

static void async_merge(hsri_queue *q, uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, hsri_ref part, uint32_t n_groups,
                        const hsri_fold *fold)
{
    PUSH(q, run_merge, merge, part, n_rows, n_heads, head_dim, n_groups, *fold);
}

static void run_sample(hsri_queue *q, const args *u)
{
    const sample_args *a = &u->sample;
    q->dev->ops.sample(q, a->logits, a->n_rows, a->n_vocab, a->n_tokens, a->params, a->out);
}

static void async_sample(hsri_queue *q, hsri_ref logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_tokens, hsri_ref params,
                         hsri_ref out)
{
    PUSH(q, run_sample, sample, logits, params, out, n_rows, n_vocab, n_tokens);
}

static void run_check_finite(hsri_queue *q, const args *u) { q->dev->ops.check_finite(q, u->rows.a, u->rows.n_rows, u->rows.n, u->rows.b); }

static void async_check_finite(hsri_queue *q, hsri_ref in, uint32_t n_rows, uint32_t n, hsri_ref flags)
{
    PUSH(q, run_check_finite, rows, in, flags, n_rows, n);
}

/* ---- compound operations: recorded whole, so that the inner device's own versions run ---- */

static void run_norm_linear(hsri_queue *q, const args *u)
{
    const norm_linear_args *a = &u->norm_linear;
    q->dev->ops.norm_linear(q, a->in, a->gain, a->eps, &a->w, a->bias, a->n_rows, a->scratch, a->out);
}

static void async_norm_linear(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, uint32_t n_rows,
                              hsri_ref scratch, hsri_ref out)
{
    PUSH(q, run_norm_linear, norm_linear, *w, in, gain, bias, scratch, out, eps, n_rows, 0);
}

static void run_qkv_rope_append(hsri_queue *q, const args *u)
{
    const qkv_args *a = &u->qkv;
    q->dev->ops.qkv_rope_append(q, &a->batch, &a->kv, a->layer, a->n_heads, a->in, a->gain, a->eps, &a->w, a->bias, a->q_norm, a->k_norm,
                                &a->rope, a->scratch, a->q_out);
}

static void async_qkv_rope_append(hsri_queue *q, const hsri_batch *batch, const hsri_kv_view *kv, uint32_t layer, uint32_t n_heads,
                                  hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, hsri_ref q_norm,
                                  hsri_ref k_norm, const hsri_rope *rope, hsri_ref scratch, hsri_ref q_out)
{
    PUSH(q, run_qkv_rope_append, qkv, *batch, *kv, *w, *rope, in, gain, bias, q_norm, k_norm, scratch, q_out, layer, n_heads, eps);
}

static void run_gate_up_silu(hsri_queue *q, const args *u)
{
    const norm_linear_args *a = &u->norm_linear;
    q->dev->ops.gate_up_silu(q, a->in, a->gain, a->eps, &a->w, a->bias, a->n_rows, a->n, a->scratch, a->out);
}

static void async_gate_up_silu(hsri_queue *q, hsri_ref in, hsri_ref gain, float eps, const hsri_matrix *w, hsri_ref bias, uint32_t n_rows,
                               uint32_t n, hsri_ref scratch, hsri_ref out)
{
    PUSH(q, run_gate_up_silu, norm_linear, *w, in, gain, bias, scratch, out, eps, n_rows, n);
}

static void run_linear_add(hsri_queue *q, const args *u)
{
    const linear_add_args *a = &u->linear_add;
    q->dev->ops.linear_add(q, &a->w, a->bias, a->in, a->n_rows, a->scratch, a->x);
}

static void async_linear_add(hsri_queue *q, const hsri_matrix *w, hsri_ref bias, hsri_ref in, uint32_t n_rows, hsri_ref scratch, hsri_ref x)
{
    PUSH(q, run_linear_add, linear_add, *w, bias, in, scratch, x, n_rows);
}

static void run_mlp_add(hsri_queue *q, const args *u)
{
    const mlp_args *a = &u->mlp;
    q->dev->ops.mlp_add(q, a->x, a->gain, a->eps, &a->gate_up, a->gate_up_bias, &a->down, a->down_bias, a->n_rows, a->scratch, a->ffn);
}

static void async_mlp_add(hsri_queue *q, hsri_ref x, hsri_ref gain, float eps, const hsri_matrix *gate_up, hsri_ref gate_up_bias,
                          const hsri_matrix *down, hsri_ref down_bias, uint32_t n_rows, hsri_ref scratch, hsri_ref ffn)
{
    PUSH(q, run_mlp_add, mlp, *gate_up, *down, x, gain, gate_up_bias, down_bias, scratch, ffn, eps, n_rows);
}

/* ---- copies ---- */

static void run_copy_in(hsri_queue *q, const args *u) { q->dev->copy_in(q, u->copy.dst, u->copy.in, u->copy.bytes); }

static void async_copy_in(hsri_queue *q, hsri_ref dst, const void *src, uint64_t bytes)
{
    PUSH(q, run_copy_in, copy, .dst = dst, .in = src, .bytes = bytes);
}

static void run_copy_out(hsri_queue *q, const args *u) { q->dev->copy_out(q, u->copy.out, u->copy.src, u->copy.bytes); }

static void async_copy_out(hsri_queue *q, void *dst, hsri_ref src, uint64_t bytes)
{
    if (bytes)
        memset(dst, POISON, bytes);
    PUSH(q, run_copy_out, copy, .src = src, .out = dst, .bytes = bytes);
}

static void run_copy(hsri_queue *q, const args *u) { q->dev->copy(q, u->copy.dst, u->copy.src, u->copy.bytes); }

static void async_copy(hsri_queue *q, hsri_ref dst, hsri_ref src, uint64_t bytes)
{
    PUSH(q, run_copy, copy, .dst = dst, .src = src, .bytes = bytes);
}

static hsr_status async_wait(hsri_queue *q, hsr_error *err)
{
    async_queue *queue = queue_of(q);

    pthread_mutex_lock(&queue->lock);
    drain(queue);
    pthread_mutex_unlock(&queue->lock);
    return queue->inner->dev->wait(queue->inner, err);
}

/* ---- memory: the inner device's ---- */

static hsr_status async_alloc(hsri_device *dev, uint64_t bytes, uint32_t *buf, hsr_error *err)
{
    return async_of(dev)->inner->alloc(async_of(dev)->inner, bytes, buf, err);
}

static hsr_status async_view(hsri_device *dev, const void *host, uint64_t bytes, uint32_t *buf, hsr_error *err)
{
    return async_of(dev)->inner->view(async_of(dev)->inner, host, bytes, buf, err);
}

static uint8_t *async_host_range(hsri_device *dev, uint32_t buf)
{
    return async_of(dev)->inner->host_range(async_of(dev)->inner, buf);
}

static hsr_status async_reserve(hsri_device *dev, uint64_t bytes, uint32_t *buf, hsr_error *err)
{
    return async_of(dev)->inner->reserve(async_of(dev)->inner, bytes, buf, err);
}

static hsr_status async_commit(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes, hsr_error *err)
{
    return async_of(dev)->inner->commit(async_of(dev)->inner, buf, offset, bytes, err);
}

static void async_decommit(hsri_device *dev, uint32_t buf, uint64_t offset, uint64_t bytes)
{
    async_of(dev)->inner->decommit(async_of(dev)->inner, buf, offset, bytes);
}

static void async_free(hsri_device *dev, uint32_t buf) { async_of(dev)->inner->free(async_of(dev)->inner, buf); }

static hsr_status async_reserve_sampling(hsri_device *dev, uint32_t n_rows, uint32_t n_tokens, hsr_error *err)
{
    return async_of(dev)->inner->reserve_sampling(async_of(dev)->inner, n_rows, n_tokens, err);
}

static hsri_spent async_spent(hsri_device *dev) { return async_of(dev)->inner->spent(async_of(dev)->inner); }

/* ---- life ---- */

/* The thread inherits the signal mask: the host's handlers shall run on its own threads. */
static int start_thread(async_queue *queue)
{
    sigset_t all, before;
    int      rc;

    sigfillset(&all);
    rc = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc)
        return rc;
    rc = pthread_create(&queue->thread, NULL, queue_main, queue);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

static int open_queue(async_queue *queue)
{
    int rc = pthread_mutex_init(&queue->lock, NULL);

    if (rc)
        return rc;
    rc = pthread_cond_init(&queue->changed, NULL);
    if (rc == 0) {
        rc = start_thread(queue);
        if (rc == 0)
            return 0;
        pthread_cond_destroy(&queue->changed);
    }
    pthread_mutex_destroy(&queue->lock);
    return rc;
}

static hsr_status async_queue_create(hsri_device *dev, hsri_queue **q, hsr_error *err)
{
    hsri_device *inner = async_of(dev)->inner;
    async_queue *queue = hsri_new_array(1, sizeof *queue);
    hsr_status   status;
    int          rc;

    *q = NULL;
    if (!queue)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for a device queue");
    queue->base.dev = dev;
    queue->pid = getpid();
    status = inner->queue_create(inner, &queue->inner, err);
    if (status < 0) {
        free(queue);
        return status;
    }
    rc = open_queue(queue);
    if (rc) {
        inner->queue_destroy(queue->inner);
        free(queue);
        return hsri_fail_sys(err, HSR_E_NOMEM, rc, "cannot start the thread of a device queue");
    }
    *q = &queue->base;
    return HSR_OK;
}

/* Commands that nobody waited for are dropped: the host memory they name may be gone. */
static void async_queue_destroy(hsri_queue *q)
{
    async_queue *queue = queue_of(q);

    if (!q)
        return;
    if (getpid() == queue->pid) {
        pthread_mutex_lock(&queue->lock);
        queue->stop = true;
        pthread_cond_broadcast(&queue->changed);
        pthread_mutex_unlock(&queue->lock);
        pthread_join(queue->thread, NULL);
        pthread_cond_destroy(&queue->changed);
        pthread_mutex_destroy(&queue->lock);
    }
    queue->inner->dev->queue_destroy(queue->inner);
    free(queue);
}

static void async_destroy(hsri_device *dev)
{
    async_device *async = async_of(dev);

    async->inner->destroy(async->inner);
    pthread_mutex_destroy(&async->lock);
    free(async);
}

static void fill_ops(hsri_ops *ops)
{
    *ops = (hsri_ops){
        .embed = async_embed, .gather_rows = async_gather_rows, .rope_table = async_rope_table, .rms_norm = async_rms_norm,
        .linear = async_linear, .add = async_add, .silu_mul = async_silu_mul, .rope_append = async_rope_append,
        .seal = async_seal, .cluster = async_cluster,
        .attend = async_attend, .attend_fixed = async_attend_fixed, .attend_list = async_attend_list,
        .page_parts = async_page_parts, .add_masses = async_add_masses, .top_pages = async_top_pages,
        .rotate = async_rotate, .select = async_select, .foresee = async_foresee, .set_aside = async_set_aside, .merge = async_merge,
        .sample = async_sample, .check_finite = async_check_finite,
        .norm_linear = async_norm_linear, .qkv_rope_append = async_qkv_rope_append, .gate_up_silu = async_gate_up_silu,
        .linear_add = async_linear_add, .mlp_add = async_mlp_add,
    };
}

hsr_status hsri_async_device_create(hsri_device *inner, hsri_device **dev, hsr_error *err)
{
    async_device *async = hsri_new_array(1, sizeof *async);

    *dev = NULL;
    if (!async)
        return hsri_fail(err, HSR_E_NOMEM, "no memory for the cpu-async device");
    if (pthread_mutex_init(&async->lock, NULL) != 0) {
        free(async);
        return hsri_fail(err, HSR_E_NOMEM, "the system refused a mutex for the cpu-async device");
    }
    async->inner = inner;
    async->base = (hsri_device){
        .name = "cpu-async", .isa = inner->isa, .alloc = async_alloc, .view = async_view,
        .reserve = async_reserve, .host_range = async_host_range, .commit = async_commit,
        .decommit = async_decommit, .free = async_free, .reserve_sampling = async_reserve_sampling,
        .queue_create = async_queue_create, .queue_destroy = async_queue_destroy, .copy_in = async_copy_in, .copy_out = async_copy_out,
        .copy = async_copy, .wait = async_wait, .spent = async_spent, .destroy = async_destroy,
    };
    fill_ops(&async->base.ops);
    *dev = &async->base;
    return HSR_OK;
}
