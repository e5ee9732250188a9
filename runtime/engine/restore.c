/* SPDX-License-Identifier: Apache-2.0 */
/* A session from a file. Nothing of the file is believed before it was checked; a session that cannot be completed is gone again. */
#define _GNU_SOURCE 1
#include "engine/persist.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/array.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "base/threads.h"

typedef struct reader {
    hsr_engine      *engine;
    hsr_session     *session;
    const char      *path;
    int              fd;
    uint64_t         size;
    hsri_save_header header;
    hsri_image       image;
    int32_t         *ids;
    uint32_t        *checks;
    uint8_t         *batch;
    int32_t        (*progress)(void *, uint64_t, uint64_t);
    void            *progress_user;
    hsr_error       *err;
} reader;

/* ---- the file ---- */

static hsr_status damaged(const reader *r, const char *what)
{
    return hsri_fail(r->err, HSR_E_FORMAT, "%.200s: %s", r->path, what);
}

static hsr_status read_at(const reader *r, uint64_t offset, void *out, uint64_t n)
{
    char *to = out;
    while (n > 0) {
        const ssize_t got = pread(r->fd, to, n, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return hsri_fail_sys(r->err, HSR_E_IO, errno, "%.200s: cannot be read", r->path);
        if (got == 0)
            return damaged(r, "the file was cut short");
        to += got;
        offset += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return HSR_OK;
}

/* Opening a named pipe must not wait for a writer. */
static hsr_status open_file(reader *r)
{
    struct stat st;
    do {
        r->fd = open(r->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    } while (r->fd < 0 && errno == EINTR);
    if (r->fd < 0 || fstat(r->fd, &st) < 0)
        return hsri_fail_sys(r->err, HSR_E_IO, errno, "%.200s: cannot be opened", r->path);
    if (!S_ISREG(st.st_mode))
        return damaged(r, "is not a regular file");
    r->size = (uint64_t)st.st_size;
    posix_fadvise(r->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    return HSR_OK;
}

/* ---- the header ---- */

static hsr_status read_header(reader *r)
{
    hsri_save_header *h = &r->header;
    uint8_t *block = r->batch;
    static const char magic[sizeof h->magic] = "HSRSAVE";

    if (r->size < HSRI_SAVE_ALIGNMENT)
        return damaged(r, "is no saved session, or was cut short");
    HSRI_TRY(read_at(r, 0, block, HSRI_SAVE_ALIGNMENT));
    memcpy(h, block, sizeof *h);
    if (memcmp(h->magic, magic, sizeof magic) != 0)
        return damaged(r, "is no saved session");
    if (h->version != HSRI_SAVE_VERSION)
        return hsri_fail(r->err, HSR_E_VERSION, "%.200s: version %u of saved sessions, this library reads %u", r->path, h->version,
                         HSRI_SAVE_VERSION);
    memset(block + offsetof(hsri_save_header, crc32c), 0, sizeof h->crc32c);
    if (hsri_crc32c(0, block, HSRI_SAVE_ALIGNMENT) != h->crc32c)
        return damaged(r, "the header is damaged (checksum)");
    if (r->size != h->file_bytes)
        return hsri_fail(r->err, HSR_E_FORMAT, "%.200s: the file has %llu bytes of %llu", r->path, (unsigned long long)r->size,
                         (unsigned long long)h->file_bytes);
    return HSR_OK;
}

/* Whatever wrote them: numbers that no session can have. */
static hsr_status check_numbers(const reader *r)
{
    const hsri_save_header *h = &r->header;
    const uint32_t page = HSRI_PAGE_TOKENS;
    const bool options = h->format < HSRI_N_KV_FORMATS && h->kv_type < HSRI_N_KV_TYPES && h->index.kind < HSRI_N_INDEX_KINDS &&
                         h->index.clusters <= (h->index.kind == HSRI_INDEX_SKETCH) &&
                         h->index.n_4bit <= 4096 && h->index.n_4bit % 8 == 0 && h->index.n_2bit <= 4096 && h->index.n_2bit % 16 == 0 &&
                         h->window_size >= page && h->window_size % page == 0 && h->sink_size % page == 0 && h->window_size <= INT32_MAX &&
                         h->sink_size <= INT32_MAX && h->rollback_tokens <= INT32_MAX && h->chunk_tokens <= (1u << 20);
    if (!options || h->context > INT32_MAX || h->n_tokens > h->context || h->n_computed > h->n_tokens || h->sampled_end > h->n_tokens)
        return damaged(r, "the header is damaged (impossible numbers)");
    return HSR_OK;
}

static hsr_status check_wishes(const reader *r, const hsr_restore_opts *o)
{
    static const char *const formats[] = {
        [HSR_KV_F32] = "f32", [HSR_KV_BF16] = "bf16", [HSR_KV_INT8] = "int8", [HSR_KV_COMPACT] = "compact", [HSR_KV_VTQ] = "vtq",
    };
    const hsri_save_header *h = &r->header;
    const int32_t format = HSR_KV_F32 + (int32_t)h->format;
    if (o->kv_format != HSR_KV_AUTO && o->kv_format != format)
        return hsri_fail(r->err, HSR_E_INVALID, "%.200s: kv_format is %s, the session was saved with %s", r->path, formats[o->kv_format],
                         formats[format]);
    if (o->context != 0 && (o->context < 0 || h->n_tokens > (uint64_t)o->context))
        return hsri_fail(r->err, HSR_E_CONTEXT, "%.200s: %llu tokens do not fit a context of %lld", r->path,
                         (unsigned long long)h->n_tokens, (long long)o->context);
    return HSR_OK;
}

/* Would a session that the caller would create have become this one? The failure names what differs. */
static hsr_status check_likeness(const reader *r, const hsr_session_opts *like)
{
    const hsri_save_header *h = &r->header;
    hsr_session s = { .engine = r->engine, .opts = *like };
    hsri_engine_enter(r->engine);
    const hsr_status chosen = hsri_session_choose(&s, r->err);
    hsri_engine_leave(r->engine);
    HSRI_TRY(chosen);
    const char *other = s.kv_type != h->kv_type || s.format != h->format                      ? "kv_format"
                        : (uint32_t)s.opts.window_size != h->window_size                      ? "window_size"
                        : (uint32_t)s.opts.sink_size != h->sink_size                          ? "sink_size"
                        : h->n_computed > 0 && s.profile->print != h->computed_with           ? "profile"
                        : memcmp(&s.index_shape, &h->index, sizeof h->index) != 0             ? "index"
                                                                                              : NULL;
    return other ? hsri_fail(r->err, HSR_E_INVALID, "%.200s: the session was saved with another %s", r->path, other) : HSR_OK;
}

/* Keys are stored after their rotation, whose table may depend on the context. */
static hsr_status check_rope(const reader *r, const hsr_restore_opts *o)
{
    const hsri_hparams *hp = &r->engine->model->hp;
    float *scratch = (float *)r->batch;
    const uint64_t saved = r->header.context, now = o->context ? (uint64_t)o->context : saved;
    const uint32_t table = hsri_rope_choose(hp, saved, scratch);
    if (saved == now || (table == hsri_rope_choose(hp, now, scratch) && table < 2))
        return HSR_OK;
    return hsri_fail(r->err, HSR_E_UNSUPPORTED,
                     "%.200s: context is %llu, the session was saved with %llu: this model's rotary embedding differs between them",
                     r->path, (unsigned long long)now, (unsigned long long)saved);
}

/* ---- the session ---- */

static hsr_session_opts session_opts(const reader *r, const hsr_restore_opts *o)
{
    const hsri_save_header *h = &r->header;
    return (hsr_session_opts){
        .struct_size = sizeof(hsr_session_opts), .kv_format = HSR_KV_F32 + (int32_t)h->format,
        .context = o->context ? o->context : (int64_t)h->context,
        .beyond_trained = o->beyond_trained || (o->context == 0 && h->beyond_trained), .window_size = (int32_t)h->window_size,
        .sink_size = (int32_t)h->sink_size, .rollback_tokens = (int32_t)h->rollback_tokens, .user = o->user, .profile = o->profile,
        .index_kind = h->index.clusters ? HSR_INDEX_CLUSTER : HSR_INDEX_NONE + (int32_t)h->index.kind,
        .sketch_4bit = (int32_t)h->index.n_4bit, .sketch_2bit = (int32_t)h->index.n_2bit,
    };
}

/* The new session's cache is made for the same bytes as the file. */
static hsr_status describe(reader *r)
{
    const hsr_session *s = r->session;
    hsri_save_header *h = &r->header, want = *h;
    if (s->kv_type != h->kv_type || memcmp(&s->index_shape, &h->index, sizeof h->index) != 0)
        return damaged(r, s->kv_type != h->kv_type ? "the type of its plain pages is not this model's"
                                                   : "the layout of its index is another one");
    HSRI_TRY(hsri_cache_expect_image(s->cache, h->n_computed, h->sealed, h->chunk_tokens, &r->image, r->err));
    hsri_save_lay_out(&want, &r->image);
    want.tokens.crc32c = h->tokens.crc32c;
    want.checks.crc32c = h->checks.crc32c;
    if (memcmp(want.slot_bytes, h->slot_bytes, sizeof want.slot_bytes) != 0)
        return hsri_fail(r->err, HSR_E_VERSION, "%.200s: its page slots have another size than this library's", r->path);
    return memcmp(&want, h, sizeof want) != 0 ? damaged(r, "the header is damaged (impossible layout)") : HSR_OK;
}

/* Creation and admission: everything that a full engine may refuse. */
static hsr_status begin(reader *r, const hsr_restore_opts *o)
{
    const hsr_session_opts opts = session_opts(r, o);
    hsri_engine_enter(r->engine);
    hsr_status st = hsri_session_create(r->engine, &opts, &r->session, r->err);
    if (st == HSR_OK)
        st = describe(r);
    if (st == HSR_OK)
        st = hsri_cache_begin_image(r->session->cache, &r->image, r->err);
    hsri_engine_leave(r->engine);
    return st;
}

static hsr_status read_tokens(reader *r)
{
    const hsri_save_header *h = &r->header;
    const uint32_t vocab = r->engine->model->hp.vocab_size;
    r->ids = hsri_new_array(hsri_max(h->n_tokens, 1), sizeof *r->ids);
    if (!r->ids)
        return hsri_fail(r->err, HSR_E_NOMEM, "no memory for %llu token ids", (unsigned long long)h->n_tokens);
    HSRI_TRY(read_at(r, h->tokens.offset, r->ids, h->tokens.bytes));
    if (hsri_crc32c(0, r->ids, h->tokens.bytes) != h->tokens.crc32c)
        return damaged(r, "the token ids are damaged (checksum)");
    for (uint64_t i = 0; i < h->n_tokens; i++)
        if (r->ids[i] < 0 || (uint32_t)r->ids[i] >= vocab)
            return damaged(r, "the token ids are damaged (outside the vocabulary)");
    return HSR_OK;
}

static hsr_status read_checks(reader *r)
{
    const hsri_save_section *checks = &r->header.checks;
    r->checks = hsri_new_array(hsri_max(checks->bytes, 1), 1);
    if (!r->checks)
        return hsri_fail(r->err, HSR_E_NOMEM, "no memory to restore a session");
    HSRI_TRY(read_at(r, checks->offset, r->checks, checks->bytes));
    return hsri_crc32c(0, r->checks, checks->bytes) != checks->crc32c ? damaged(r, "the table of checksums is damaged") : HSR_OK;
}

/* ---- the parts: one batch is read and checked while the one before is put into its pages ---- */

typedef struct batch {
    int             part;
    uint64_t        row, n;        /* n 0: behind the last */
    const uint32_t *checks;
    uint8_t        *bytes;
} batch;

typedef struct turn {
    reader      r;                 /* with an error of its own */
    const batch *todo;
    hsr_error   err;
    hsr_status  status;
} turn;

/* The batch that begins with this row, or with the first of a later part. */
static batch batch_at(const reader *r, int part, uint64_t row, const uint32_t *checks, uint8_t *bytes)
{
    for (; part < HSRI_N_IMAGE_PARTS && row == r->image.rows[part]; part++)
        row = 0;
    batch b = { part, row, 0, checks, bytes };
    if (part < HSRI_N_IMAGE_PARTS)
        b.n = hsri_min(hsri_save_batch_rows(&r->image, (hsri_image_part)part), r->image.rows[part] - row);
    return b;
}

static uint64_t slots_of(const reader *r, const batch *b) { return b->n * r->image.per_row; }

static hsr_status wrong_slot(const reader *r, const batch *b, uint64_t i)
{
    static const char *const names[] = { "plain page", "index slab", "strip of sketches", "cluster record", "sealed page" };
    const unsigned long long heads = r->engine->model->hp.n_kv_heads, row = b->row + i / r->image.per_row, in_row = i % r->image.per_row;
    return hsri_fail(r->err, HSR_E_FORMAT, "%.200s: the %s in row %llu of layer %llu, head %llu is damaged (checksum)", r->path,
                     names[b->part], row, in_row / heads, in_row % heads);
}

static hsr_status fetch(const reader *r, const batch *b)
{
    const uint64_t slot = r->image.slot_bytes[b->part];
    HSRI_TRY(read_at(r, r->header.parts[b->part] + b->row * r->image.per_row * slot, b->bytes, slots_of(r, b) * slot));
    for (uint64_t i = 0; i < slots_of(r, b); i++)
        if (hsri_crc32c(0, b->bytes + i * slot, slot) != b->checks[i])
            return wrong_slot(r, b, i);
    return HSR_OK;
}

static hsr_status put(const reader *r, const batch *b)
{
    const uint64_t bytes = r->image.per_row * r->image.slot_bytes[b->part];
    const hsri_image_part part = (hsri_image_part)b->part;
    hsr_status st = HSR_OK;
    hsri_engine_enter(r->engine);
    for (uint64_t i = 0; i < b->n && st >= 0; i++)
        st = hsri_cache_write_image(r->session->cache, r->engine->queue, &r->image, part, b->row + i, b->bytes + i * bytes, r->err);
    hsri_engine_leave(r->engine);
    return st;
}

static void take_turn(void *arg, uint32_t task, uint32_t worker)
{
    turn *t = (turn *)arg + task;
    (void)worker;
    if (t->todo->n > 0)
        t->status = task == 0 ? fetch(&t->r, t->todo) : put(&t->r, t->todo);
}

static hsr_status take_turns(reader *r, hsri_threads *threads, const batch *next, const batch *now)
{
    turn turns[2] = { { .r = *r, .todo = next, .err = HSR_ERROR_INIT }, { .r = *r, .todo = now, .err = HSR_ERROR_INIT } };
    for (int i = 0; i < 2; i++)
        turns[i].r.err = &turns[i].err;
    hsri_parallel(threads, 2, take_turn, turns);
    for (int i = 0; i < 2; i++)
        if (turns[i].status < 0) {
            hsri_fail(r->err, turns[i].status, "%s", turns[i].err.message);
            if (r->err)
                r->err->sys_code = turns[i].err.sys_code;
            return turns[i].status;
        }
    return HSR_OK;
}

static hsr_status tell(const reader *r, uint64_t done)
{
    if (r->progress && r->progress(r->progress_user, done, hsri_image_bytes(&r->image)))
        return hsri_fail(r->err, HSR_E_CANCELLED, "stopped by the progress callback");
    return HSR_OK;
}

static hsr_status read_parts(reader *r, hsri_threads *threads)
{
    const uint64_t half = hsri_save_batch_bytes(&r->image);
    uint8_t *idle = r->batch;
    uint64_t done = 0;
    batch now = { 0 };
    batch next = batch_at(r, 0, 0, r->checks, r->batch + half);
    while (now.n > 0 || next.n > 0) {
        HSRI_TRY(tell(r, done));
        HSRI_TRY(take_turns(r, threads, &next, &now));
        done += slots_of(r, &now) * r->image.slot_bytes[now.part];
        now = next;
        next = batch_at(r, now.part, now.row + now.n, now.checks + slots_of(r, &now), idle);
        idle = now.bytes;
    }
    return tell(r, done);
}

/* Two threads if the engine has several. */
static hsr_status read_all(reader *r)
{
    hsri_threads *threads;
    free(r->batch);
    r->batch = hsri_new_aligned(2 * hsri_save_batch_bytes(&r->image), 1);
    if (!r->batch)
        return hsri_fail(r->err, HSR_E_NOMEM, "no memory to restore a session");
    HSRI_TRY(hsri_threads_create(r->engine->opts.n_threads > 1 ? 2 : 1, &threads, r->err));
    const hsr_status st = read_parts(r, threads);
    hsri_threads_destroy(threads);
    return st;
}

static void finish(reader *r)
{
    const hsri_save_header *h = &r->header;
    hsr_session *s = r->session;
    hsri_engine_enter(r->engine);
    hsri_cache_end_image(s->cache, &r->image);
    s->ids = r->ids;
    s->ids_cap = hsri_max(h->n_tokens, 1);
    r->ids = NULL;
    s->n_tokens = h->n_tokens;
    s->n_computed = s->target = h->n_computed;
    s->kept_end = h->sampled_end;
    s->computed_with = h->computed_with;
    hsri_engine_leave(r->engine);
}

static hsr_status restore(reader *r, const hsr_restore_opts *o)
{
    HSRI_TRY(open_file(r));
    HSRI_TRY(read_header(r));
    HSRI_TRY(hsri_save_check_model(&r->header, r->engine->model, r->path, r->err));
    HSRI_TRY(check_numbers(r));
    HSRI_TRY(check_wishes(r, o));
    if (o->like)
        HSRI_TRY(check_likeness(r, o->like));
    HSRI_TRY(check_rope(r, o));
    HSRI_TRY(begin(r, o));
    HSRI_TRY(read_tokens(r));
    HSRI_TRY(read_checks(r));
    HSRI_TRY(read_all(r));
    finish(r);
    return HSR_OK;
}

hsr_status hsri_session_restore(hsr_engine *e, const char *path, const hsr_restore_opts *opts, hsr_session **out, hsr_error *err)
{
    reader r = { .engine = e, .path = path, .fd = -1, .progress = opts->progress, .progress_user = opts->progress_user, .err = err };
    r.batch = hsri_new_aligned(HSRI_SAVE_ALIGNMENT, 1);   /* of the header, until sizes are known */
    hsr_status st = r.batch ? restore(&r, opts) : hsri_fail(err, HSR_E_NOMEM, "no memory to restore a session");
    if (st < 0 && r.session) {
        hsri_engine_enter(e);
        hsri_session_destroy(r.session);
        hsri_engine_leave(e);
        r.session = NULL;
    }
    *out = r.session;
    if (r.fd >= 0)
        close(r.fd);
    free(r.ids);
    free(r.checks);
    free(r.batch);
    return st;
}
