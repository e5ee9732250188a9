/* SPDX-License-Identifier: Apache-2.0 */
/* Sealed pages between memory and a real cold file, without a model. Every token writes a number of its own into its rows of all
 * layers and heads; a "forward pass" holds the pages of every layer, group by group, as attention does, and must find each
 * number through the table on the device, wherever the page has been. Afterwards every counter must be back. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/array.h"
#include "base/rng.h"
#include "base/clock.h"
#include "check.h"
#include "fake_device.h"
#include "kv/cache.h"
#include "kv/holder.h"

#define MAX_SESSIONS 6
#define MAX_TOKENS   9000u
#define MIB          (1ull << 20)
#define LIST_UNITS   48u
#define GROUP_PAGES  (HSRI_GROUP_TOKENS / HSRI_PAGE_TOKENS)

/* ---- faults of the cold file ---- */

typedef struct faults {
    hsri_io_faults hook;
    uint64_t       n;               /* operations seen */
    uint64_t       from, count;     /* operations [from, from + count) fail; count 0: none */
    hsri_io_action action;          /* only these */
    bool           any_action;
    hsri_io_fault  fault;
    uint64_t       delay_seed;      /* nonzero: operations are late by up to 3 ms */
    uint32_t       read_ms, write_ms;       /* nonzero: reads, and writes, take so long */
    pthread_mutex_t lock;           /* operations are the mover's thread's */
} faults;

static void set_fault(faults *f, hsri_io_fault fault, bool any, hsri_io_action action, uint64_t from, uint64_t count)
{
    pthread_mutex_lock(&f->lock);
    f->fault = fault;
    f->any_action = any;
    f->action = action;
    f->from = f->n + from;
    f->count = count;
    pthread_mutex_unlock(&f->lock);
}

static void set_read_ms(faults *f, uint32_t ms)
{
    pthread_mutex_lock(&f->lock);
    f->read_ms = ms;
    pthread_mutex_unlock(&f->lock);
}

static void set_write_ms(faults *f, uint32_t ms)
{
    pthread_mutex_lock(&f->lock);
    f->write_ms = ms;
    pthread_mutex_unlock(&f->lock);
}

static void no_fault(faults *f) { set_fault(f, (hsri_io_fault){ 0 }, true, HSRI_IO_READ, 0, 0); }

static uint64_t n_operations(faults *f)
{
    pthread_mutex_lock(&f->lock);
    uint64_t n = f->n;
    pthread_mutex_unlock(&f->lock);
    return n;
}

static void before_io(void *user, hsri_io_action action, uint64_t index, hsri_io_fault *fault)
{
    faults *f = user;
    (void)index;
    pthread_mutex_lock(&f->lock);
    if (f->delay_seed && (action == HSRI_IO_READ || action == HSRI_IO_WRITE))
        fault->delay_ms = (uint32_t)(hsri_rng_u64(f->delay_seed, f->n) % 4);
    if (f->read_ms && action == HSRI_IO_READ)
        fault->delay_ms = f->read_ms;
    if (f->write_ms && action == HSRI_IO_WRITE)
        fault->delay_ms = f->write_ms;
    if (f->any_action || action == f->action) {
        uint64_t n = f->n++;
        if (n >= f->from && n - f->from < f->count)
            *fault = f->fault;
    }
    pthread_mutex_unlock(&f->lock);
}

/* ---- the world ---- */

typedef struct session {
    hsri_cache *cache;
    uint64_t    committed;
    uint32_t    value[MAX_TOKENS];
} session;

typedef struct world {
    fake_device     fake;
    fake_queue      queue;
    hsri_pool      *pool, *warm;
    hsri_kv_shape   shape;
    hsri_tiers     *tiers;
    hsri_holder    *holder;
    hsri_cache_opts opts;
    faults          faults;
    char            directory[64];
    session        *sessions;
    uint32_t        next_value, lists_buf;
    uint64_t        lineage, n_draws, n_steps, sparse;   /* steps of four that are sparse */
    hsri_sparse     settings[2 * MAX_SESSIONS];          /* of two layers */
    uint64_t        n_aside;        /* pages that were set aside */
    bool            guesses;        /* lists are expected before they are held, and so are others */
} world;

typedef struct setup {
    hsri_kv_type type, format;
    uint32_t     n_layers, n_kv_heads, per_slab;
    uint64_t     blocks, cold;
    uint32_t     depth, deadline_ms;
    hsri_io_kind io;
    uint64_t     delay_seed, sparse, warm;      /* warm: blocks that are not read in place */
    bool         clusters;                      /* instead of slabs alone */
} setup;

/* A session of the longest kind needs 64 blocks of encoded pages, and some 15 blocks of plain ones. */
static const setup squeezed = { HSRI_KV_TYPE_F32, HSRI_KV_TYPE_INT8, 2, 2, 2, 36, 128 * MIB, 2, 20000, HSRI_IO_AUTO, 0, 0, 0, false };

static void world_init(world *w, const setup *s)
{
    *w = (world){ .next_value = 1 };
    fake_init(&w->fake);
    fake_queue_init(&w->queue, &w->fake);
    strcpy(w->directory, "/tmp/hsr-tiers-XXXXXX");
    CHECK(mkdtemp(w->directory) != NULL);
    CHECK(hsri_pool_create(&w->fake.base, s->blocks * MIB, &w->pool, NULL) == HSR_OK);
    hsri_kv_shape_init(&w->shape, w->pool, s->n_layers, s->n_kv_heads, 512);
    w->faults = (faults){
        .hook = { before_io, &w->faults }, .any_action = true, .lock = PTHREAD_MUTEX_INITIALIZER, .delay_seed = s->delay_seed,
    };
    hsri_tiers_opts opts = {
        .pool = w->pool, .memory = w->fake.bufs[hsri_pool_buf(w->pool) - 1].data, .head_dim = 512, .deadline_ms = s->deadline_ms,
        .rising = true,
        .mover = { .directory = w->directory, .bytes = s->cold, .io = { .kind = s->io, .faults = &w->faults.hook } },
    };
    if (s->warm) {
        CHECK(hsri_pool_create(&w->fake.base, s->warm * MIB, &w->warm, NULL) == HSR_OK);
        opts.warm = w->warm;
        opts.warm_memory = w->fake.bufs[hsri_pool_buf(w->warm) - 1].data;
    }
    hsri_importance_preset_fill(&opts.importance, HSRI_IMPORTANCE_BALANCED);
    hsr_error err = HSR_ERROR_INIT;
    if (!CHECK(hsri_tiers_create(&opts, &w->tiers, &err) == HSR_OK))
        fprintf(stderr, "%s\n", err.message);
    const uint32_t sources = HSR_PREFETCH_DEFAULT | HSR_PREFETCH_QUERY;
    CHECK(hsri_holder_create(&w->fake.base, &w->queue.base, w->tiers, s->depth, sources, &w->holder, NULL) == HSR_OK);
    CHECK(w->fake.base.alloc(&w->fake.base, 256 + MAX_SESSIONS * 2 * LIST_UNITS * 4, &w->lists_buf, NULL) == HSR_OK);
    w->sparse = s->sparse;
    w->opts = (hsri_cache_opts){
        .type = s->type, .format = s->format, .window_pages = 2, .sink_pages = 1, .rollback_tokens = 64, .chunk_tokens = 100,
        .tiers = w->tiers,
    };
    if (s->per_slab)
        w->opts.index = (hsri_index_shape){
            .kind = HSRI_INDEX_SKETCH, .head_dim = 512, .per_slab = s->per_slab, .entry_bytes = HSRI_SLAB_BYTES / s->per_slab,
        };
    if (s->clusters) {
        w->opts.index = (hsri_index_shape){ .kind = HSRI_INDEX_SKETCH, .head_dim = 64, .n_4bit = 24, .clusters = 1 };
        hsri_index_shape_fill(&w->opts.index);
    }
    w->sessions = calloc(MAX_SESSIONS, sizeof *w->sessions);
}

static hsri_tiers_stats tiers_stats(world *w)
{
    hsri_tiers_stats stats;
    hsri_tiers_get_stats(w->tiers, &stats);
    return stats;
}

static hsri_pool_stats pool_stats(const world *w)
{
    hsri_pool_stats stats;
    hsri_pool_get_stats(w->pool, &stats);
    return stats;
}

/* Nobody is left, so nothing is. */
static void check_empty(world *w)
{
    hsri_tiers_stats t = tiers_stats(w);
    hsri_pool_stats p = pool_stats(w);
    CHECK(p.used == 0 && p.reserved == 0);
    CHECK(t.bodies == 0 && t.resident == 0 && t.absent == 0 && t.dirty == 0);
    CHECK(t.frames_used == 0 && t.frames_promised == 0 && t.frame_blocks == 0);
    CHECK(t.homes_used == 0 && t.homes_promised == 0 && t.home_extents == 0 && t.warm == 0);
    CHECK(!hsri_tiers_must_hold(w->tiers));
}

static void world_end(world *w, hsr_status expected)
{
    hsri_holder_destroy(w->holder);
    w->fake.base.free(&w->fake.base, w->lists_buf);
    for (int k = 0; k < MAX_SESSIONS; k++)
        hsri_cache_destroy(w->sessions[k].cache);
    if (expected == HSR_OK)
        check_empty(w);
    CHECK(hsri_tiers_destroy(w->tiers, 1000, NULL) == expected);
    if (w->warm) {
        hsri_pool_stats warm;
        hsri_pool_get_stats(w->warm, &warm);
        CHECK(warm.used == 0 && warm.reserved == 0);
    }
    hsri_pool_destroy(w->warm);
    CHECK(w->fake.n_bufs == 1);
    hsri_pool_destroy(w->pool);
    fake_queue_end(&w->queue);
    CHECK(rmdir(w->directory) == 0);        /* the cold file never had a name */
    free(w->sessions);
}

static uint64_t per_page(const world *w) { return (uint64_t)w->shape.n_layers * w->shape.n_kv_heads; }

static uint64_t row_value(uint32_t value, uint64_t pos, uint64_t i) { return (uint64_t)value << 32 | pos << 8 | i; }

/* ---- a step ---- */

static uint8_t *slot_at(world *w, hsri_ref table, uint64_t page, uint64_t i, hsri_kv_type format)
{
    const uint32_t *entry = fake_at(&w->fake, hsri_at(table, (page * per_page(w) + i) * 4), 4);
    uint64_t bytes = w->shape.view.slot_bytes[format];
    return entry ? fake_at(&w->fake, fake_slot(&w->shape.view, *entry, bytes), bytes) : NULL;
}

/* A page as attention reads it at a query of page q. */
static bool page_is_right(world *w, const session *s, uint64_t page, uint64_t i, uint64_t q)
{
    hsri_seq seq = { 0 };
    hsri_cache_fill_seq(s->cache, &seq);
    bool plain = hsri_page_is_plain((uint32_t)page, (uint32_t)q, seq.sink_pages, seq.window_pages);
    bool encoded = !plain && !hsri_kv_is_plain(w->opts.format);
    const uint8_t *slot = slot_at(w, plain ? seq.table : seq.sealed, page, i, plain ? w->opts.type : w->opts.format);
    for (uint64_t pos = page * 64; slot && pos < page * 64 + 64 && pos < s->committed; pos++) {
        uint64_t value = row_value(s->value[pos], pos, i) ^ (encoded ? FAKE_ENCODING : 0);
        if (memcmp(slot + HSRI_PAGE_HEADER_BYTES + pos % 64 * 8, &value, 8) != 0)
            return false;
    }
    return slot != NULL;
}

static void check_group(world *w, const session *s, uint32_t layer, uint32_t group, uint64_t q)
{
    for (uint64_t page = (uint64_t)group * GROUP_PAGES; page < (group + 1ull) * GROUP_PAGES && page < (s->committed + 63) / 64; page++)
        for (uint32_t head = 0; head < w->shape.n_kv_heads; head++)
            CHECK(page_is_right(w, s, page, (uint64_t)layer * w->shape.n_kv_heads + head, q));
}

/* What attention does with the pages of all sequences of a step. */
static hsr_status attend(world *w, session **parts, uint32_t n, const hsri_residency *r, const uint64_t *ends, hsr_error *err)
{
    uint64_t longest = 0;
    for (uint32_t k = 0; k < n; k++)
        longest = hsri_max(longest, ends[k]);
    uint32_t n_groups = (uint32_t)((longest - 1) / HSRI_GROUP_TOKENS + 1);
    for (uint32_t layer = 0; layer < w->shape.n_layers; layer++)
        for (uint32_t g0 = 0, g1; g0 < n_groups; g0 = g1) {
            g1 = (uint32_t)hsri_min(g0 + 3, n_groups);
            if (r)
                HSRI_TRY(r->hold_dense(r->self, layer, g0, &g1, err));
            CHECK(g1 > g0);
            HSRI_TRY(fake_wait(&w->queue.base, err));
            for (uint32_t k = 0; k < n; k++)
                for (uint32_t g = g0; g < g1; g++)
                    check_group(w, parts[k], layer, g, (ends[k] - 1) / 64);
            if (r)
                HSRI_TRY(r->release(r->self, err));
        }
    return HSR_OK;
}

/* Lists as a selection makes them: some units of some pages that the query reads encoded, ascending. Returns how many. */
static uint32_t choose_units(world *w, uint64_t q, uint32_t *units)
{
    uint32_t n = 0;
    for (uint64_t page = w->opts.sink_pages; page + w->opts.window_pages <= q && n + 2 <= LIST_UNITS; page++) {
        uint64_t draw = hsri_rng_u64(99, w->n_draws++);
        if (draw % 4)
            continue;
        units[n++] = (uint32_t)page * HSRI_PAGE_UNITS + (draw >> 8) % 2;
        if (draw >> 9 & 1)
            units[n++] = (uint32_t)page * HSRI_PAGE_UNITS + 3;
    }
    return n;
}

static void check_units(world *w, session **parts, const hsri_lists *lists, uint32_t layer, uint32_t g0, uint32_t g1, const uint64_t *ends)
{
    const uint32_t *counts = fake_at(&w->fake, lists->counts, 4), *units = fake_at(&w->fake, lists->units, 4);
    for (uint32_t i = 0; i < lists->n_picks * w->shape.n_kv_heads; i++)
        for (uint32_t u = g0 * HSRI_LIST_GROUP_UNITS; u < g1 * HSRI_LIST_GROUP_UNITS && u < counts[i]; u++) {
            uint32_t k = i / w->shape.n_kv_heads, head = i % w->shape.n_kv_heads;
            uint32_t page = units[i * LIST_UNITS + u] / HSRI_PAGE_UNITS;
            CHECK(page_is_right(w, parts[k], page, layer * w->shape.n_kv_heads + head, (ends[k] - 1) / 64));
        }
}

/* What the device does to marked lists; the marks are of whole pages. */
static void set_aside(world *w, const hsri_lists *lists)
{
    uint32_t *counts = fake_at(&w->fake, lists->counts, 4), *units = fake_at(&w->fake, lists->units, 4);
    for (uint32_t i = 0; i < lists->n_picks * w->shape.n_kv_heads; i++) {
        uint32_t n = 0, last = UINT32_MAX, *list = units + i * LIST_UNITS;
        for (uint32_t u = 0; u < counts[i]; u++) {
            uint32_t page = (list[u] & ~HSRI_UNIT_AWAY) / HSRI_PAGE_UNITS;
            w->n_aside += list[u] & HSRI_UNIT_AWAY && page != last;
            last = page;
            if (!(list[u] & HSRI_UNIT_AWAY))
                list[n++] = list[u];
        }
        counts[i] = n;
    }
}

/* What is said of a layer before its turn: a list that will not come, then the one that will. */
static hsr_status guess(world *w, uint32_t n, uint32_t layer, const hsri_residency *r, const hsri_lists *lists, hsr_error *err)
{
    uint32_t *counts = fake_at(&w->fake, lists->counts, 4), *units = fake_at(&w->fake, lists->units, 4);
    const size_t n_lists = (size_t)n * w->shape.n_kv_heads;
    uint32_t *kept = malloc(n_lists * LIST_UNITS * 4);
    memcpy(kept, units, n_lists * LIST_UNITS * 4);
    for (size_t i = 0; i < n_lists; i++)
        for (uint32_t u = 0; u < counts[i]; u++)
            units[i * LIST_UNITS + u] = units[i * LIST_UNITS + u] / 2 + 4;
    hsr_status status = r->expect(r->self, layer, lists, err);
    memcpy(units, kept, n_lists * LIST_UNITS * 4);
    free(kept);
    return status < 0 ? status : r->expect(r->self, layer, lists, err);
}

/* What sparse attention does: a list per sequence and head, group by group. */
static hsr_status attend_sparse(world *w, session **parts, uint32_t n, const hsri_residency *r, const uint64_t *ends, hsr_error *err)
{
    hsri_lists lists = {
        .counts = { .buf = w->lists_buf }, .units = { .buf = w->lists_buf, .offset = 256 },
        .stride = LIST_UNITS, .n_picks = n, .group_units = HSRI_LIST_GROUP_UNITS,
    };
    for (uint32_t layer = 0; layer < w->shape.n_layers; layer++) {
        uint32_t *counts = fake_at(&w->fake, lists.counts, 4), *units = fake_at(&w->fake, lists.units, 4);
        for (uint32_t i = 0; i < n * w->shape.n_kv_heads; i++)
            counts[i] = choose_units(w, (ends[i / w->shape.n_kv_heads] - 1) / 64, units + i * LIST_UNITS);
        bool any = false;
        if (r)
            r->span(r->self, 0, n, 0);
        if (r && w->guesses)
            HSRI_TRY(guess(w, n, layer, r, &lists, err));
        if (r)
            HSRI_TRY(r->put_off(r->self, layer, &lists, &any, err));
        CHECK(any <= (w->settings[0].flags != 0));
        HSRI_TRY(fake_wait(&w->queue.base, err));
        if (any)
            set_aside(w, &lists);
        for (uint32_t g0 = 0, g1; g0 < LIST_UNITS / HSRI_LIST_GROUP_UNITS; g0 = g1) {
            g1 = (uint32_t)hsri_min(g0 + 3, LIST_UNITS / HSRI_LIST_GROUP_UNITS);
            if (r)
                HSRI_TRY(r->hold_lists(r->self, layer, &lists, g0, &g1, err));
            CHECK(g1 > g0);
            HSRI_TRY(fake_wait(&w->queue.base, err));
            check_units(w, parts, &lists, layer, g0, g1, ends);
            if (r)
                HSRI_TRY(r->release(r->self, err));
        }
    }
    return HSR_OK;
}

static void compute(world *w, session *s, uint64_t end)
{
    hsri_seq seq = { 0 };
    hsri_cache_fill_seq(s->cache, &seq);
    for (uint64_t pos = s->committed; pos < end; pos++) {
        s->value[pos] = w->next_value++;
        for (uint64_t i = 0; i < per_page(w); i++) {
            uint64_t value = row_value(s->value[pos], pos, i);
            uint8_t *slot = slot_at(w, seq.table, pos / 64, i, w->opts.type);
            if (slot)
                memcpy(slot + HSRI_PAGE_HEADER_BYTES + pos % 64 * 8, &value, 8);
        }
    }
}

/* One step of several sessions, each up to its end. On failure all are back where they were; *failed: whose fault it was. */
static hsr_status step(world *w, session **parts, const uint64_t *ends, uint32_t n, uint32_t *failed, hsr_error *err)
{
    hsri_cache *caches[MAX_SESSIONS];
    hsri_row rows[MAX_SESSIONS];
    static const uint32_t pick_seqs[MAX_SESSIONS] = { 0, 1, 2, 3, 4, 5 };
    hsr_status status = HSR_OK;
    uint32_t n_prepared = 0;
    *failed = HSRI_NO_SEQ;
    for (; n_prepared < n && status == HSR_OK; n_prepared++) {
        caches[n_prepared] = parts[n_prepared]->cache;
        rows[n_prepared] = (hsri_row){ n_prepared, (uint32_t)ends[n_prepared] - 1 };
        status = hsri_cache_prepare(caches[n_prepared], &w->queue.base, ends[n_prepared], err);
        if (status < 0)
            *failed = n_prepared;
    }
    if (status == HSR_OK) {
        hsri_holder_step hs = {
            .caches = caches, .rows = rows, .n_seqs = n, .n_rows = n, .pick_seqs = pick_seqs, .settings = w->settings,
        };
        const hsri_residency *r = hsri_holder_begin(w->holder, &hs);
        status = w->n_steps++ % 4 < w->sparse ? attend_sparse(w, parts, n, r, ends, err) : attend(w, parts, n, r, ends, err);
        *failed = hsri_holder_failed(w->holder);
    }
    hsr_status waited = fake_wait(&w->queue.base, NULL);
    hsri_holder_end(w->holder);
    status = status < 0 ? status : waited;
    for (uint32_t k = 0; k < n_prepared; k++) {
        if (status < 0) {
            CHECK(hsri_cache_truncate(parts[k]->cache, parts[k]->committed, NULL) == HSR_OK);
            continue;
        }
        compute(w, parts[k], ends[k]);
        CHECK(hsri_cache_commit(parts[k]->cache, ends[k], NULL) == HSR_OK);
        parts[k]->committed = ends[k];
    }
    return status;
}

static hsr_status run_to(world *w, session *s, uint64_t n, hsr_error *err)
{
    HSRI_TRY(hsri_cache_admit(s->cache, n, err));
    while (s->committed < n) {
        uint32_t failed;
        uint64_t end = hsri_min(n, s->committed + hsri_cache_step_limit(s->cache));
        HSRI_TRY(step(w, &s, &end, 1, &failed, err));
    }
    return HSR_OK;
}

static session *create(world *w)
{
    session *s = w->sessions;
    while (s->cache)
        s++;
    w->opts.lineage = ++w->lineage;
    s->committed = 0;
    CHECK(hsri_cache_create(&w->fake.base, w->pool, &w->shape, &w->opts, &s->cache, NULL) == HSR_OK);
    return s;
}

static session *fork_of(world *w, session *s)
{
    session *f = w->sessions;
    while (f->cache)
        f++;
    hsri_cache *cache;
    hsr_error err = HSR_ERROR_INIT;
    if (!CHECK(hsri_cache_fork(s->cache, &w->queue.base, &cache, &err) == HSR_OK)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    *f = *s;
    f->cache = cache;
    return f;
}

static void destroy(session *s)
{
    hsri_cache_destroy(s->cache);
    s->cache = NULL;
}

static void start_over(session *s)
{
    CHECK(hsri_cache_truncate(s->cache, 0, NULL) == HSR_OK);
    s->committed = 0;
}

#define RUN(w, s, n) do { \
        hsr_error err_ = HSR_ERROR_INIT; \
        if (!CHECK(run_to(w, s, n, &err_) == HSR_OK)) \
            fprintf(stderr, "%s\n", err_.message); \
    } while (0)

/* ---- tests ---- */

/* What fits in memory never touches the cold file, and nothing is asked of the forward pass. */
static void test_fits(void)
{
    world w;
    setup fits = squeezed;
    fits.blocks = 120;
    world_init(&w, &fits);
    session *s = create(&w);
    RUN(&w, s, 3000);
    hsri_tiers_stats t = tiers_stats(&w);
    CHECK(t.bodies > 100 && t.resident == t.bodies && t.homes_promised == 0 && t.writes == 0 && t.mover.io.writes == 0);
    CHECK(!hsri_tiers_must_hold(w.tiers));
    destroy(s);
    check_empty(&w);
    world_end(&w, HSR_OK);
}

static void test_squeezed(const setup *how)
{
    world w;
    world_init(&w, how);
    session *s = create(&w);
    RUN(&w, s, 7000);
    hsri_tiers_stats t = tiers_stats(&w);
    CHECK(t.absent > t.bodies / 6 && t.resident + t.absent >= t.bodies && t.evictions > 0);
    CHECK(t.writes > 0 && t.reads > 0 && t.misses > 0 && t.late > 0 && t.waits > 0 && t.lost == 0);
    CHECK(how->depth == 0 || t.prefetch[HSRI_FETCH_GROUPS].hits > 0);
    CHECK(t.warm_in == t.warm_out + t.warm_dropped + t.warm && t.warm_in == (how->warm ? t.evictions : 0));
    CHECK((t.warm_out > 0) == (how->warm > 0));
    CHECK(t.homes_used <= t.homes_promised && t.frames_used <= pool_stats(&w).used * 13);
    uint64_t bodies = t.bodies;

    /* A branch shares all that is sealed; both go on, apart. */
    session *f = fork_of(&w, s);
    CHECK(tiers_stats(&w).bodies == bodies);
    RUN(&w, f, 7500);
    RUN(&w, s, 7300);
    uint64_t ends[2] = { 7301, 7501 };
    uint32_t failed;
    CHECK(hsri_cache_admit(s->cache, 7301, NULL) == HSR_OK && hsri_cache_admit(f->cache, 7501, NULL) == HSR_OK);
    CHECK(step(&w, (session *[]){ s, f }, ends, 2, &failed, NULL) == HSR_OK);

    /* Back within the rollback distance, on again; and from the beginning. */
    CHECK(hsri_cache_truncate(f->cache, 7501 - 64, NULL) == HSR_OK);
    f->committed = 7501 - 64;
    RUN(&w, f, 7700);
    CHECK(hsri_cache_truncate(f->cache, 3000, NULL) == HSR_E_STATE);
    destroy(s);
    RUN(&w, f, 7750);
    start_over(f);
    CHECK(tiers_stats(&w).bodies == 0);
    RUN(&w, f, 2000);
    destroy(f);
    check_empty(&w);
    world_end(&w, HSR_OK);
}

/* The counters once the mover has done what it was asked for, however slow the machine is. */
static hsri_tiers_stats settled_stats(world *w)
{
    for (;; usleep(1000)) {
        const hsri_tiers_stats t = tiers_stats(w);
        if (t.mover.queued + t.mover.running == 0)
            return t;
    }
}

/* Pages are written before anything has to leave, so that nobody waits for it. */
static void test_clean_ahead(void)
{
    world w;
    world_init(&w, &squeezed);
    session *s = create(&w);
    hsri_tiers_stats t = tiers_stats(&w), before = t;
    uint32_t failed;
    CHECK(hsri_cache_admit(s->cache, 7000, NULL) == HSR_OK);
    while (s->committed < 7000 && t.evictions == 0) {
        before = t;
        uint64_t end = hsri_min(7000, s->committed + 64);
        CHECK(step(&w, &s, &end, 1, &failed, NULL) == HSR_OK);
        t = settled_stats(&w);
    }
    CHECK(t.evictions > 0 && before.evictions == 0 && before.writes > 0);
    world_end(&w, HSR_OK);
}

/* Refusals name what is short, and nothing has changed. */
static void test_admission(void)
{
    world w;
    setup small = squeezed;
    small.blocks = 28;
    small.cold = 20 * MIB;
    world_init(&w, &small);
    session *a = create(&w), *b = create(&w);
    hsr_error err = HSR_ERROR_INIT;
    hsri_pool_stats before = pool_stats(&w), after;
    CHECK(hsri_cache_admit(a->cache, 7000, &err) == HSR_E_NOSPACE);
    CHECK(strstr(err.message, "cold storage") && strstr(err.message, "of 20 MiB"));
    after = pool_stats(&w);
    CHECK(memcmp(&before, &after, sizeof before) == 0 && tiers_stats(&w).homes_promised == 0);
    CHECK(hsri_cache_admit(a->cache, 4000, &err) == HSR_OK && tiers_stats(&w).homes_promised > 0);
    CHECK(hsri_cache_admit(b->cache, 8000, &err) == HSR_E_NOSPACE);
    RUN(&w, a, 4000);
    hsri_cache_unadmit(a->cache, 0);
    CHECK(hsri_cache_admit(a->cache, 7000, NULL) == HSR_E_NOSPACE);
    RUN(&w, a, 4100);
    destroy(a);
    RUN(&w, b, 3000);
    destroy(b);
    check_empty(&w);

    /* Memory too small for the ring and what must be there at a time. */
    session *c = create(&w);
    w.opts.chunk_tokens = 1000;
    w.opts.window_pages = 30;
    session *d = create(&w);
    CHECK(hsri_cache_admit(d->cache, 4000, &err) == HSR_E_NOSPACE);
    CHECK(pool_stats(&w).used == 0 && pool_stats(&w).reserved == 0);
    destroy(c);
    destroy(d);
    world_end(&w, HSR_OK);
}

/* Session after session is admitted although the pages of others fill memory: these make room. */
static void test_room_for_others(void)
{
    world w;
    setup s = squeezed;
    s.blocks = 73;
    world_init(&w, &s);
    session *a = create(&w), *b = create(&w), *c = create(&w);
    RUN(&w, a, 4500);           /* fits */
    CHECK(tiers_stats(&w).homes_promised == 0);
    RUN(&w, b, 7000);           /* does not: has homes, and takes what is free */
    CHECK(tiers_stats(&w).homes_promised > 0);
    RUN(&w, c, 2000);
    RUN(&w, a, 4600);
    RUN(&w, b, 7100);
    uint64_t ends[3] = { 4601, 7101, 2001 };
    uint32_t failed;
    session *parts[3] = { a, b, c };
    for (int k = 0; k < 3; k++)
        CHECK(hsri_cache_admit(parts[k]->cache, ends[k], NULL) == HSR_OK);
    CHECK(step(&w, parts, ends, 3, &failed, NULL) == HSR_OK);
    destroy(b);
    RUN(&w, c, 2500);
    destroy(a);
    destroy(c);
    check_empty(&w);
    world_end(&w, HSR_OK);
}

/* A disk on which all that must be written takes longer than anything on it may: whoever was promised memory waits. */
static void test_slow_disk(void)
{
    world w;
    setup s = squeezed;
    s.blocks = 46;
    s.deadline_ms = 2500;
    s.io = HSRI_IO_PREAD;
    world_init(&w, &s);
    session *a = create(&w), *b = create(&w);
    RUN(&w, a, 6600);           /* just fits */
    CHECK(tiers_stats(&w).writes == 0 && hsri_pool_available(w.pool) < 5);
    set_write_ms(&w.faults, 1000);
    uint64_t start = hsri_now_ns();
    RUN(&w, b, 3000);
    CHECK(hsri_now_ns() - start > 2500000000u && tiers_stats(&w).writes > 100);
    destroy(b);
    destroy(a);
    world_end(&w, HSR_OK);
}

/* The n-th operation on the cold file fails, and a few behind it. Whatever happens is a status; after it the session goes on or
 * is computed again, and the other session's pages are right. */
static uint64_t run_with_fault(hsri_io_fault fault, bool any, hsri_io_action action, uint64_t n, uint64_t count)
{
    world w;
    world_init(&w, &squeezed);
    set_fault(&w.faults, fault, any, action, n, count);
    session *a = create(&w), *b = create(&w);
    RUN(&w, b, 900);
    hsr_error err = HSR_ERROR_INIT;
    hsr_status status = run_to(&w, a, 4200, &err);
    if (status < 0) {
        CHECK(status == HSR_E_IO || status == HSR_E_FORMAT || status == HSR_E_NOSPACE);
        CHECK(err.message[0]);
        no_fault(&w.faults);
        start_over(a);
        usleep(status == HSR_E_IO ? 1000 : 0);
        RUN(&w, a, 4200);
    }
    no_fault(&w.faults);
    RUN(&w, b, 1000);
    uint64_t seen = n_operations(&w.faults);
    world_end(&w, HSR_OK);
    return seen;
}

static void test_faults(void)
{
    uint64_t total = run_with_fault((hsri_io_fault){ 0 }, true, HSRI_IO_READ, 0, 0);
    CHECK(total > 200);
    for (uint64_t n = 0; n < total; n += n < 8 ? 1 : total / 16)
        run_with_fault((hsri_io_fault){ .error = EIO }, true, HSRI_IO_READ, n, 4);
    for (uint64_t n = 0; n < 200; n += 67)
        run_with_fault((hsri_io_fault){ .error = EIO }, false, HSRI_IO_READ, n, 1000000);
    run_with_fault((hsri_io_fault){ .error = ENOSPC }, false, HSRI_IO_WRITE, 3, 1000000);
    run_with_fault((hsri_io_fault){ .error = ENOSPC }, false, HSRI_IO_ALLOCATE, 2, 1000000);
    run_with_fault((hsri_io_fault){ .corrupt = true, .corrupt_at = 777 }, false, HSRI_IO_READ, 5, 1);
    run_with_fault((hsri_io_fault){ .corrupt = true, .corrupt_at = 777 }, false, HSRI_IO_READ, 5, 1000000);
    run_with_fault((hsri_io_fault){ .limited = true, .limit = 0 }, false, HSRI_IO_READ, 5, 1000000);
    run_with_fault((hsri_io_fault){ .limited = true, .limit = 4096 }, false, HSRI_IO_READ, 0, 1000000);
}

/* In a process of its own, which says when it begins: a page that comes after 1.2 s of at most 3. */
static int wait_for_page(int said)
{
    world w;
    setup s = squeezed;
    hsr_error err = HSR_ERROR_INIT;
    s.deadline_ms = 3000;
    s.depth = 0;
    world_init(&w, &s);
    session *a = create(&w);
    RUN(&w, a, 5500);
    set_fault(&w.faults, (hsri_io_fault){ .delay_ms = 1200 }, false, HSRI_IO_READ, 0, 1);
    if (write(said, "", 1) != 1)
        return 2;
    hsr_status status = run_to(&w, a, 5800, &err);
    if (status < 0)
        fprintf(stderr, "%s: %s\n", hsr_status_name(status), err.message);
    return status == HSR_OK ? 0 : 1;
}

/* Nor does a page get lost because the process was stopped while it was waited for. */
static void test_stopped(void)
{
    int ends[2], status;
    char word;
    CHECK(pipe(ends) == 0);
    const pid_t pid = fork();
    if (pid == 0)
        _exit(wait_for_page(ends[1]));
    CHECK(read(ends[0], &word, 1) == 1);
    usleep(400000);
    CHECK(kill(pid, SIGSTOP) == 0);
    usleep(5000000);
    CHECK(kill(pid, SIGCONT) == 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(ends[0]);
    close(ends[1]);
}

/* A read that never ends: the session gets its status in time, and destroying ends too. */
static void test_hang(void)
{
    world w;
    setup s = squeezed;
    s.deadline_ms = 200;
    s.depth = 0;
    s.io = HSRI_IO_PREAD;
    world_init(&w, &s);
    session *a = create(&w);
    RUN(&w, a, 5500);
    set_fault(&w.faults, (hsri_io_fault){ .delay_ms = UINT32_MAX }, false, HSRI_IO_READ, 0, 1);
    uint64_t start = hsri_now_ns();
    hsr_error err = HSR_ERROR_INIT;
    hsr_status status = run_to(&w, a, 5800, &err);
    if (!CHECK(status == HSR_E_IO && err.message[0]))
        fprintf(stderr, "%s: %s\n", hsr_status_name(status), err.message);
    CHECK(hsri_now_ns() - start < 10000000000u);
    no_fault(&w.faults);
    start_over(a);
    RUN(&w, a, 1000);
    destroy(a);
    CHECK(tiers_stats(&w).bodies <= MIB / w.shape.view.slot_bytes[w.opts.format]);     /* those of the operation that hangs */
    hsri_holder_destroy(w.holder);
    w.fake.base.free(&w.fake.base, w.lists_buf);
    start = hsri_now_ns();
    CHECK(hsri_tiers_destroy(w.tiers, 500, NULL) == HSR_OK);
    CHECK(hsri_now_ns() - start < 10000000000u);
    hsri_pool_destroy(w.pool);
    fake_queue_end(&w.queue);
    rmdir(w.directory);
    free(w.sessions);
}

/* A world, and 6000 tokens in it, whose steps read lists; so many groups are read ahead. */
static session *squeezed_lists(world *w, uint32_t depth)
{
    setup how = squeezed;
    how.depth = depth;
    how.sparse = 4;
    world_init(w, &how);
    session *s = create(w);
    RUN(w, s, 6000);
    return s;
}

/* Pages that cannot be read are nobody's failure until they are attended; their session then fails, and can start over. */
static void check_unreadable(world *w, session *s)
{
    hsr_error err = HSR_ERROR_INIT;
    hsr_status status = HSR_OK;
    set_fault(&w->faults, (hsri_io_fault){ .error = EIO }, false, HSRI_IO_READ, 0, 1000000);
    for (uint32_t i = 0; i < 100 && status == HSR_OK; i++) {
        status = run_to(w, s, s->committed + 1, &err);
        usleep(1000);       /* nothing waits for pages that are estimated */
    }
    CHECK(status == HSR_E_IO && err.message[0] && hsri_holder_failed(w->holder) == 0);
    no_fault(&w->faults);
    start_over(s);
    RUN(w, s, 1000);
}

static void estimate(world *w, bool on)
{
    for (size_t i = 0; i < sizeof w->settings / sizeof *w->settings; i++)
        w->settings[i].flags = on ? HSRI_SPARSE_VIRTUAL | HSRI_SPARSE_ESTIMATE : 0;
}

/* Guesses bring pages, right ones and wrong ones. */
static void test_guesses(void)
{
    world w;
    session *s = squeezed_lists(&w, squeezed.depth);
    hsri_tiers_stats before = tiers_stats(&w), now;
    w.guesses = true;
    RUN(&w, s, 6200);
    now = tiers_stats(&w);
    const hsr_prefetch_stats *q = &now.prefetch[HSRI_FETCH_QUERY];
    CHECK(before.prefetch[HSRI_FETCH_QUERY].pages == 0 && q->hits > 20 && q->wasted > 20 && q->pages >= q->hits + q->wasted);
    const uint64_t bytes_each = w.shape.view.slot_bytes[squeezed.format];
    CHECK(q->bytes == q->pages * bytes_each && q->wasted_bytes == q->wasted * bytes_each);

    check_unreadable(&w, s);
    destroy(s);
    check_empty(&w);
    world_end(&w, HSR_OK);
}

/* One token at a time, each with the list that this draw begins. */
static void run_alike(world *w, session *s, uint32_t n, uint64_t draw)
{
    while (n-- > 0) {
        w->n_draws = draw;
        RUN(w, s, s->committed + 1);
    }
}

/* Pages that were attended often leave for another session. When that has gone they come back unasked, others do not, and none leaves
 * again. */
static void test_rising(void)
{
    world w;
    session *s = squeezed_lists(&w, squeezed.depth);
    run_alike(&w, s, 150, 0);
    run_alike(&w, s, 12, 5000);
    session *other = create(&w);
    RUN(&w, other, 2500);
    run_alike(&w, s, 4, 5000);
    hsri_tiers_stats before = tiers_stats(&w), now;
    CHECK(before.evictions > 0 && before.prefetch[HSRI_FETCH_RISING].pages == 0);
    destroy(other);
    run_alike(&w, s, 60, 5000);
    now = tiers_stats(&w);
    CHECK(now.prefetch[HSRI_FETCH_RISING].pages > 0 && now.evictions == before.evictions);
    run_alike(&w, s, 2, 0);
    CHECK(tiers_stats(&w).prefetch[HSRI_FETCH_RISING].hits > 0);
    destroy(s);
    check_empty(&w);
    world_end(&w, HSR_OK);
}

/* Reads that take longer than the steps: none of these waits for one, what was asked for is there when they have ended, and a page
 * that is lost is nothing to be estimated. */
static void test_estimate(void)
{
    world w;
    session *s = squeezed_lists(&w, 0);
    estimate(&w, true);
    set_read_ms(&w.faults, 300);
    hsri_tiers_stats before = tiers_stats(&w), now;
    uint64_t draws = w.n_draws;
    hsri_cache_stats cache;
    RUN(&w, s, 6001);
    RUN(&w, s, 6002);
    now = tiers_stats(&w);
    hsri_cache_get_stats(s->cache, &cache);
    CHECK(now.waits == before.waits && now.late == before.late && now.misses == before.misses && now.hits > before.hits);
    CHECK(w.n_aside > 0 && now.estimated == w.n_aside && cache.n_estimated == w.n_aside);
    CHECK(now.prefetch[HSRI_FETCH_WANTED].pages > before.prefetch[HSRI_FETCH_WANTED].pages);

    /* The same lists once more, when their pages have come: as many as there were frames for. */
    usleep(1000000);
    w.n_draws = draws;
    w.n_aside = 0;
    set_read_ms(&w.faults, 0);
    RUN(&w, s, 6003);
    CHECK(w.n_aside < now.estimated / 2 && tiers_stats(&w).prefetch[HSRI_FETCH_WANTED].hits > before.prefetch[HSRI_FETCH_WANTED].hits);

    check_unreadable(&w, s);
    destroy(s);
    check_empty(&w);
    world_end(&w, HSR_OK);
}

/* ---- random sessions ---- */

typedef struct draws {
    uint64_t seed, index;
} draws;

static uint64_t draw(draws *d, uint64_t below) { return hsri_rng_u64(d->seed, d->index++) % below; }

static void random_step(world *w, draws *d)
{
    session *parts[MAX_SESSIONS];
    uint64_t ends[MAX_SESSIONS];
    uint32_t n = 0, failed;
    for (int k = 0; k < MAX_SESSIONS; k++) {
        session *s = &w->sessions[k];
        if (!s->cache || draw(d, 3) == 0 || hsri_cache_reserved(s->cache) == s->committed)
            continue;
        uint64_t limit = hsri_min(hsri_cache_step_limit(s->cache), hsri_cache_reserved(s->cache) - s->committed);
        parts[n] = s;
        ends[n++] = s->committed + 1 + draw(d, limit);
    }
    hsr_error err = HSR_ERROR_INIT;
    if (n == 0 || step(w, parts, ends, n, &failed, &err) == HSR_OK)
        return;
    CHECK(err.message[0]);
    if (failed != HSRI_NO_SEQ)
        start_over(parts[failed]);
}

static void random_op(world *w, draws *d)
{
    session *s = &w->sessions[draw(d, MAX_SESSIONS)];
    uint64_t op = draw(d, 20);
    bool full = true;
    for (int k = 0; k < MAX_SESSIONS; k++)
        full = full && w->sessions[k].cache;
    if (!s->cache) {
        if (op < 6 && !full)
            create(w);
        return;
    }
    if (op < 4) {
        uint64_t n = hsri_min(s->committed + draw(d, 1500), MAX_TOKENS);
        hsr_status status = hsri_cache_admit(s->cache, n, NULL);
        CHECK(status == HSR_OK || status == HSR_E_NOSPACE);
    } else if (op == 4) {
        uint64_t n = draw(d, 2) ? 0 : s->committed - hsri_min(s->committed, draw(d, 64));
        CHECK(hsri_cache_truncate(s->cache, n, NULL) == HSR_OK);
        s->committed = n;
    } else if (op == 5 && !full) {
        hsri_cache *cache;
        session *f = w->sessions;
        while (f->cache)
            f++;
        hsr_status status = hsri_cache_fork(s->cache, &w->queue.base, &cache, NULL);
        CHECK(status == HSR_OK || status == HSR_E_NOSPACE);
        if (status == HSR_OK) {
            *f = *s;
            f->cache = cache;
        }
    } else if (op == 6) {
        destroy(s);
    } else {
        random_step(w, d);
    }
}

static void test_random(const setup *how, uint64_t seed, int n_ops, bool faulty)
{
    int failures = check_failures;
    world w;
    world_init(&w, how);
    draws d = { .seed = seed };
    w.opts.rollback_tokens = draw(&d, 3) * 64;
    w.opts.sink_pages = (uint32_t)draw(&d, 3);
    estimate(&w, draw(&d, 2));
    for (int i = 0; i < n_ops && check_failures < failures + 10; i++) {
        if (faulty && draw(&d, 40) == 0) {
            hsri_io_fault fault = { .error = EIO };
            if (draw(&d, 3) == 0)
                fault = (hsri_io_fault){ .corrupt = true, .corrupt_at = (uint32_t)draw(&d, 5000) };
            set_fault(&w.faults, fault, true, HSRI_IO_READ, 0, 1 + draw(&d, 6));
        }
        random_op(&w, &d);
    }
    world_end(&w, HSR_OK);
    if (check_failures > failures)
        fprintf(stderr, "random sessions with seed %llu failed\n", (unsigned long long)seed);
}

/* ---- at the limit ---- */

/* The least memory, and of the cold file the most, that sessions of these lengths may need: as plan counts. */
static uint64_t least_blocks(const world *w, const uint64_t *lengths, uint32_t n, uint64_t *cold)
{
    const uint64_t per_block = hsri_kv_slots_per_block(w->opts.format, w->shape.head_dim), work = hsri_kv_working_set(&w->shape, &w->opts);
    uint64_t own = 0, frames = 0, homes = 0;
    for (uint32_t k = 0; k < n; k++) {
        const hsri_kv_need need = hsri_kv_slots_for(&w->shape, &w->opts, lengths[k]);
        own += hsri_kv_blocks_for(&w->shape, &w->opts, lengths[k]) - hsri_div_up(need.sealed, per_block);
        frames += hsri_min(need.sealed, work);
        homes += need.sealed > work ? need.sealed : 0;
    }
    *cold = hsri_max(hsri_div_up(homes, per_block), 1);
    return own + hsri_div_up(frames, per_block);
}

static void advance(world *w, session *s, uint64_t length, draws *d)
{
    uint64_t reserved = hsri_cache_reserved(s->cache), n = s->committed + 1 + draw(d, 900);
    if (reserved > s->committed)
        n = hsri_min(n, reserved);
    RUN(w, s, hsri_min(n, length));
}

/* Sessions that just fit, admitted at once or piece by piece and computed in any order: nobody is refused, and nothing fails. */
static void test_limit(const setup *how, uint64_t seed)
{
    int failures = check_failures;
    draws d = { .seed = seed };
    uint64_t lengths[MAX_SESSIONS], done = 0;
    uint32_t n = 2 + (uint32_t)draw(&d, MAX_SESSIONS - 2);
    for (uint32_t k = 0; k < n; k++)
        lengths[k] = draw(&d, 4) ? 500 + draw(&d, 3000) : how->clusters ? 8900 : 300;
    world w;
    setup limit = *how;
    world_init(&w, &limit);
    limit.blocks = least_blocks(&w, lengths, n, &limit.cold);
    limit.cold *= MIB;
    world_end(&w, HSR_OK);

    world_init(&w, &limit);
    for (uint32_t k = 0; k < n; k++) {
        session *s = create(&w);
        if (draw(&d, 2))
            CHECK(hsri_cache_admit(s->cache, lengths[k], NULL) == HSR_OK);
    }
    while (done < n && check_failures == failures) {
        session *s = &w.sessions[draw(&d, n)];
        done = 0;
        if (s->committed < lengths[s - w.sessions])
            advance(&w, s, lengths[s - w.sessions], &d);
        for (uint32_t k = 0; k < n; k++)
            done += w.sessions[k].committed == lengths[k];
    }
    CHECK(pool_stats(&w).peak_used <= limit.blocks);
    world_end(&w, HSR_OK);
    if (check_failures > failures)
        fprintf(stderr, "sessions at the limit with seed %llu failed\n", (unsigned long long)seed);
}

int main(int argc, char **argv)
{
    int n_random = argc > 1 ? atoi(argv[1]) : 4;
    test_fits();
    test_squeezed(&squeezed);
    setup variant = squeezed;
    variant.io = HSRI_IO_PREAD;
    variant.depth = 0;
    test_squeezed(&variant);
    variant = squeezed;
    variant.sparse = 3;
    test_squeezed(&variant);
    variant = squeezed;
    variant.format = HSRI_KV_TYPE_F32;      /* three pages a block */
    variant.blocks = 110;
    variant.cold = 400 * MIB;
    variant.per_slab = 0;
    test_squeezed(&variant);
    variant = squeezed;
    variant.warm = 8;
    test_squeezed(&variant);
    test_clean_ahead();
    test_estimate();
    test_guesses();
    test_rising();
    test_admission();
    test_room_for_others();
    test_slow_disk();
    test_hang();
    test_stopped();
    test_faults();
    for (int seed = 0; seed < n_random; seed++) {
        setup many = squeezed;
        many.blocks = 110;
        many.sparse = (uint64_t)seed % 4;
        many.delay_seed = (uint64_t)seed * 77 + 1;
        many.warm = (uint64_t)seed % 2 * 10;
        test_random(&many, 1000 + (uint64_t)seed, 250, false);
        test_random(&many, 2000 + (uint64_t)seed, 250, true);
        setup limit = squeezed;
        limit.sparse = (uint64_t)seed % 4;
        limit.clusters = seed % 2;
        test_limit(&limit, 3000 + (uint64_t)seed);
    }
    return CHECK_REPORT();
}
