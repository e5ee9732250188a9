/* SPDX-License-Identifier: Apache-2.0 */
/* Images of caches over the fake device: what is read from one cache and written to another gives equal caches, now and after
 * the same further steps; what has no meaning is zero; impossible images are refused; and a restore that fails anywhere gives
 * everything back. The public calls are checked at the end, over a tiny model. */
#include <unistd.h>

#include "base/array.h"
#include "check.h"
#include "fake_device.h"
#include "kv/cache_image.h"
#include "tiny_model.h"

#define MIB (1ull << 20)
#define BLOCKS 16u

/* ---- memory that fails on demand: these replace base/array.c, which the linker then leaves in the archive ---- */

static uint64_t n_allocations, failing_allocation;

static bool refuse_allocation(void) { return ++n_allocations == failing_allocation; }

void *hsri_new_array(size_t n, size_t size) { return refuse_allocation() ? NULL : calloc(n ? n : 1, size); }

void *hsri_new_aligned(size_t n, size_t size)
{
    const size_t bytes = (n * size + 63) / 64 * 64 + 64;
    void *p = refuse_allocation() ? NULL : aligned_alloc(64, bytes);
    return p ? memset(p, 0, bytes) : NULL;
}

bool hsri_grow(void **array, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity)
        return true;
    const size_t next = need > 2 * *capacity ? need : 2 * *capacity;
    void *grown = refuse_allocation() ? NULL : calloc(next, size);
    if (!grown)
        return false;
    if (*array)
        memcpy(grown, *array, *capacity * size);
    free(*array);
    *array = grown;
    *capacity = next;
    return true;
}

/* ---- a world: a device, a pool, one cache ---- */

typedef struct world {
    fake_device     fake;
    fake_queue      queue;
    hsri_pool      *pool;
    hsri_kv_shape   shape;
    hsri_cache_opts opts;
    hsri_cache     *cache;
} world;

typedef struct format_case {
    hsri_kv_type type, format;
    uint32_t     head_dim, per_slab, code_bytes;
} format_case;

static const format_case formats[] = {
    { HSRI_KV_TYPE_F32, HSRI_KV_TYPE_F32, 64, 0, 0 }, { HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_BF16, 64, 4, 64 },
    { HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_INT8, 64, 0, 0 },
    { HSRI_KV_TYPE_BF16, HSRI_KV_TYPE_INT8, 128, 3, 0 }, { HSRI_KV_TYPE_F32, HSRI_KV_TYPE_COMPACT, 64, 5, 192 },
};
#define N_FORMATS (sizeof formats / sizeof *formats)

static void world_init(world *w, const format_case *f, uint64_t blocks)
{
    *w = (world){ 0 };
    fake_init(&w->fake);
    fake_queue_init(&w->queue, &w->fake);
    CHECK(hsri_pool_create(&w->fake.base, blocks * MIB, &w->pool, NULL) == HSR_OK);
    hsri_kv_shape_init(&w->shape, w->pool, 2, 3, f->head_dim);
    w->opts = (hsri_cache_opts){
        .type = f->type, .format = f->format, .window_pages = 2, .sink_pages = 1, .chunk_tokens = 200, .rollback_tokens = 70,
    };
    if (f->per_slab)
        w->opts.index = (hsri_index_shape){
            .kind = f->code_bytes ? HSRI_INDEX_SKETCH : HSRI_INDEX_MINMAX, .head_dim = f->head_dim, .per_slab = f->per_slab,
            .code_bytes = f->code_bytes,
            .entry_bytes = HSRI_SLAB_BYTES / f->per_slab / 64 * 64,
        };
}

static hsr_status new_cache(world *w)
{
    return hsri_cache_create(&w->fake.base, w->pool, &w->shape, &w->opts, &w->cache, NULL);
}

static void world_end(world *w)
{
    hsri_pool_stats stats;
    hsri_cache_destroy(w->cache);
    hsri_pool_get_stats(w->pool, &stats);
    CHECK(stats.used == 0 && stats.reserved == 0 && w->fake.n_bufs == 1);
    hsri_pool_destroy(w->pool);
    fake_queue_end(&w->queue);
}

/* ---- computing: a page's bytes follow from its number alone ---- */

static void compute_page(world *w, uint64_t page)
{
    const uint32_t *entries = fake_at(&w->fake, hsri_at(hsri_cache_table(w->cache), page * 6 * 4), 6 * 4);
    for (uint64_t i = 0; entries && i < 6; i++) {
        const uint32_t bytes = w->shape.view.slot_bytes[w->opts.type];
        uint8_t *slot = fake_at(&w->fake, fake_slot(&w->shape.view, entries[i], bytes), bytes);
        for (uint32_t at = HSRI_PAGE_HEADER_BYTES; slot && at < bytes; at++)
            slot[at] = (uint8_t)((at * 2654435761u >> 11) + page * 17 + i * 5 + 1);
    }
}

static void step_to(world *w, uint64_t n)
{
    while (hsri_cache_committed(w->cache) < n) {
        const uint64_t from = hsri_cache_committed(w->cache), to = hsri_min(n, from + hsri_min(hsri_cache_step_limit(w->cache), 150));
        CHECK(hsri_cache_admit(w->cache, n, NULL) == HSR_OK);
        if (!CHECK(hsri_cache_prepare(w->cache, &w->queue.base, to, NULL) == HSR_OK) || !CHECK(fake_wait(&w->queue.base, NULL) == HSR_OK))
            return;
        for (uint64_t page = from / 64; page <= (to - 1) / 64; page++)
            compute_page(w, page);
        CHECK(hsri_cache_commit(w->cache, to, NULL) == HSR_OK);
    }
}

/* ---- images ---- */

typedef struct picture {
    hsri_image image;
    uint32_t   chunk;
    uint8_t   *bytes;
    uint64_t   size;
} picture;

static uint64_t row_bytes(const hsri_image *image, int part) { return image->per_row * image->slot_bytes[part]; }

static bool same_image(const hsri_image *a, const hsri_image *b)
{
    return a->n_tokens == b->n_tokens && a->sealed == b->sealed && a->per_row == b->per_row &&
           memcmp(a->rows, b->rows, sizeof a->rows) == 0 && memcmp(a->slot_bytes, b->slot_bytes, sizeof a->slot_bytes) == 0;
}

static picture take(world *w)
{
    picture p = { 0 };
    CHECK(hsri_cache_describe_image(w->cache, &p.image, &p.chunk, NULL) == HSR_OK);
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++)
        p.size += p.image.rows[part] * row_bytes(&p.image, part);
    p.bytes = calloc(p.size + 1, 1);
    uint8_t *at = p.bytes;
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++)
        for (uint64_t row = 0; row < p.image.rows[part]; row++, at += row_bytes(&p.image, part))
            CHECK(hsri_cache_read_image(w->cache, &w->queue.base, &p.image, (hsri_image_part)part, row, at, NULL) == HSR_OK);
    return p;
}

/* Into the world's fresh cache; the picture's bytes are used up. */
static hsr_status put(world *w, const picture *p)
{
    hsri_image image;
    uint8_t *at = p->bytes;
    HSRI_TRY(hsri_cache_expect_image(w->cache, p->image.n_tokens, p->image.sealed, p->chunk, &image, NULL));
    CHECK(same_image(&image, &p->image));
    HSRI_TRY(hsri_cache_begin_image(w->cache, &image, NULL));
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++)
        for (uint64_t row = 0; row < image.rows[part]; row++, at += row_bytes(&image, part))
            HSRI_TRY(hsri_cache_write_image(w->cache, &w->queue.base, &image, (hsri_image_part)part, row, at, NULL));
    hsri_cache_end_image(w->cache, &image);
    return HSR_OK;
}

static bool equal(const picture *a, const picture *b)
{
    return same_image(&a->image, &b->image) && a->size == b->size && memcmp(a->bytes, b->bytes, a->size) == 0;
}

/* The fake device leaves most of an encoded page and of an index entry as it was. */
static void forget_unwritten(const world *w, picture *p)
{
    uint8_t *at = p->bytes + p->image.rows[HSRI_IMAGE_PLAIN] * row_bytes(&p->image, HSRI_IMAGE_PLAIN);
    const uint32_t entry = w->opts.index.entry_bytes, slot = p->image.slot_bytes[HSRI_IMAGE_SEALED];
    for (uint64_t i = 0; i < p->image.rows[HSRI_IMAGE_INDEX] * p->image.per_row; i++, at += HSRI_SLAB_BYTES)
        for (uint32_t e = 0; e < w->opts.index.per_slab; e++)
            memset(at + e * entry + sizeof(fake_entry), 0, entry - sizeof(fake_entry));
    at += p->image.rows[HSRI_IMAGE_STRIPS] * row_bytes(&p->image, HSRI_IMAGE_STRIPS);
    for (uint64_t i = 0; i < p->image.rows[HSRI_IMAGE_SEALED] * p->image.per_row && !hsri_kv_is_plain(w->opts.format); i++, at += slot)
        memset(at + HSRI_PAGE_HEADER_BYTES + 512, 0, slot - HSRI_PAGE_HEADER_BYTES - 512);
}

static picture copy_of(const picture *p)
{
    picture c = *p;
    c.bytes = memcpy(malloc(p->size + 1), p->bytes, p->size);
    return c;
}

/* Tail positions, headers and padding of a plain page are zero. */
static bool tail_is_zero(const format_case *f, const picture *p)
{
    const uint32_t n = (uint32_t)(p->image.n_tokens % 64), d = f->head_dim, size = f->type == HSRI_KV_TYPE_F32 ? 4 : 2;
    if (p->image.rows[HSRI_IMAGE_PLAIN] == 0 || n == 0)
        return true;
    float *k = malloc(64 * d * 4), *v = malloc(64 * d * 4);
    const uint8_t *slot = p->bytes + (p->image.rows[HSRI_IMAGE_PLAIN] - 1) * row_bytes(&p->image, HSRI_IMAGE_PLAIN);
    bool zero = true;
    hsri_page_decode(f->type, d, slot, NULL, k, v);
    for (uint32_t i = n * d; i < 64 * d; i++)
        zero = zero && k[i] == 0 && v[i] == 0;
    for (uint32_t i = 0; i < n * d; i++)
        zero = zero && (k[i] != 0 || v[i] != 0 || size == 2);
    for (uint32_t i = 0; i < HSRI_PAGE_HEADER_BYTES; i++)
        zero = zero && slot[i] == 0;
    for (uint32_t i = HSRI_PAGE_HEADER_BYTES + 2 * 64 * d * size; i < p->image.slot_bytes[HSRI_IMAGE_PLAIN]; i++)
        zero = zero && slot[i] == 0;
    free(k);
    free(v);
    return zero;
}

static void test_round_trip(const format_case *f, uint64_t n, uint64_t back)
{
    world a, b;
    world_init(&a, f, BLOCKS);
    world_init(&b, f, BLOCKS);
    b.opts.chunk_tokens = 130;     /* shorter steps, and so a shorter ring of its own */
    b.opts.lineage = 7;
    CHECK(new_cache(&a) == HSR_OK && new_cache(&b) == HSR_OK);
    step_to(&a, n);
    if (back)
        CHECK(hsri_cache_truncate(a.cache, n - back, NULL) == HSR_OK);
    picture first = take(&a), given = copy_of(&first);
    CHECK(tail_is_zero(f, &first));
    CHECK(put(&b, &given) == HSR_OK);
    picture second = take(&b);
    CHECK(equal(&first, &second));
    hsri_cache_stats sa, sb;
    hsri_cache_get_stats(a.cache, &sa);
    hsri_cache_get_stats(b.cache, &sb);
    CHECK(sa.pages_open == sb.pages_open && sa.pages_full == sb.pages_full && sa.pages_sealed == sb.pages_sealed);
    CHECK(sb.reserved_blocks == 0 && hsri_cache_reserved(b.cache) == n - back);

    step_to(&a, n + 333);
    step_to(&b, n + 333);
    picture third = take(&a), fourth = take(&b);
    forget_unwritten(&a, &third);
    forget_unwritten(&b, &fourth);
    CHECK(equal(&third, &fourth));
    CHECK(hsri_cache_truncate(b.cache, n + 300, NULL) == HSR_OK);
    picture all[] = { first, given, second, third, fourth };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i].bytes);
    world_end(&a);
    world_end(&b);
}

static void test_impossible(void)
{
    world w;
    hsri_image image;
    world_init(&w, &formats[3], BLOCKS);
    const struct { uint64_t n_tokens, sealed; bool possible; } cases[] = {
        { 0, 1, true }, { 0, 0, false }, { 0, 2, false }, { 64, 1, true }, { 128, 2, false }, { 1000, 14, true }, { 1000, 15, false },
        { 1000, 10, true }, { 1000, 1, false }, { 1000, UINT64_MAX, false }, { UINT64_MAX, 5, false }, { 1ull << 33, 14, false },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const hsr_status st = hsri_image_describe(&w.shape, &w.opts, cases[i].n_tokens, cases[i].sealed, &image, NULL);
        if (!CHECK(st == (cases[i].possible ? HSR_OK : HSR_E_FORMAT)))
            fprintf(stderr, "  case %zu\n", i);
    }
    world_end(&w);
}

static void test_no_space(const format_case *f)
{
    world a, b;
    world_init(&a, f, BLOCKS);
    CHECK(new_cache(&a) == HSR_OK);
    step_to(&a, 1500);
    picture p = take(&a), given = copy_of(&p);
    const uint64_t blocks = hsri_kv_blocks_for(&a.shape, &a.opts, 1500);
    world_init(&b, f, blocks);
    hsri_cache *other = NULL;
    CHECK(new_cache(&b) == HSR_OK);
    CHECK(hsri_cache_create(&b.fake.base, b.pool, &b.shape, &b.opts, &other, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(other, 1, NULL) == HSR_OK);      /* a block is somebody else's */
    CHECK(put(&b, &given) == HSR_E_NOSPACE);
    CHECK(hsri_cache_reserved(b.cache) == 0);
    hsri_cache_destroy(other);
    CHECK(put(&b, &given) == HSR_OK);
    free(p.bytes);
    free(given.bytes);
    world_end(&a);
    world_end(&b);
}

/* The n-th call to the device, or the n-th allocation, fails; for every n. */
static void test_failures(const format_case *f, bool of_device)
{
    world a;
    world_init(&a, f, BLOCKS);
    CHECK(new_cache(&a) == HSR_OK);
    step_to(&a, 700);
    picture p = take(&a);
    bool failed = true;
    for (uint64_t n = 1; failed; n++) {
        world b;
        picture given = copy_of(&p);
        world_init(&b, f, BLOCKS);
        b.fake.fail_at = of_device ? b.fake.n_calls + n : 0;
        failing_allocation = of_device ? 0 : n_allocations + n;
        const hsr_status created = new_cache(&b), status = created == HSR_OK ? put(&b, &given) : created;
        failed = of_device ? b.fake.n_calls >= b.fake.fail_at : n_allocations >= failing_allocation;
        failing_allocation = b.fake.fail_at = 0;
        CHECK(status == (failed ? HSR_E_NOMEM : HSR_OK));
        free(given.bytes);
        world_end(&b);
    }
    free(p.bytes);
    world_end(&a);
}

/* ---- the public calls ---- */

static hsr_error err = HSR_ERROR_INIT;

#define REFUSED(call, wanted) do { \
        memset(err.message, 0, sizeof err.message); \
        const hsr_status got_ = (call); \
        if (!CHECK(got_ == (wanted) && err.status == got_ && err.message[0])) \
            fprintf(stderr, "  %s: %s\n", hsr_status_name(got_), err.message); \
    } while (0)

static int32_t stop_at_once(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    CHECK(done <= total);
    return 1;
}

typedef struct watch {
    uint64_t calls, done, total, stop_at;   /* the call that ends it; 0: none does */
} watch;

static int32_t watch_progress(void *user, uint64_t done, uint64_t total)
{
    watch *w = user;
    CHECK(done >= w->done && done <= total && (w->calls == 0 || total == w->total));
    w->done = done;
    w->total = total;
    return ++w->calls == w->stop_at;
}

/* Ended at each of its calls in turn: no session is left, nor what it held. */
static void test_restore_is_watched(hsr_engine *e, const char *file)
{
    hsr_session *r = (hsr_session *)1;
    hsr_engine_stats before = { .struct_size = sizeof before }, after = { .struct_size = sizeof after };
    hsr_restore_opts o;
    watch all = { 0 };
    hsr_restore_opts_init(&o, sizeof o);
    o.progress = watch_progress;
    o.progress_user = &all;
    CHECK(hsr_engine_get_stats(e, &before, &err) == HSR_OK);
    CHECK(hsr_session_restore(e, file, &o, &r, &err) == HSR_OK && hsr_session_destroy(&r, &err) == HSR_OK);
    CHECK(all.calls >= 2 && all.total > 0 && all.done == all.total);
    for (uint64_t stop = 1; stop <= all.calls; stop++) {
        watch w = { .stop_at = stop };
        o.progress_user = &w;
        r = (hsr_session *)1;
        REFUSED(hsr_session_restore(e, file, &o, &r, &err), HSR_E_CANCELLED);
        CHECK(r == NULL && w.calls == stop);
        CHECK(hsr_engine_get_stats(e, &after, &err) == HSR_OK);
        CHECK(after.n_sessions == before.n_sessions && after.hot_blocks_used == before.hot_blocks_used);
    }
}

static void test_save_and_restore(hsr_engine *e, const char *file)
{
    int32_t ids[300];
    float want[TINY_VOCAB], got[TINY_VOCAB];
    hsr_session *s = NULL, *r = NULL;
    hsr_restore_opts o;
    hsr_session_stats st = { .struct_size = sizeof st };
    for (int i = 0; i < 300; i++)
        ids[i] = (i * 7 + 3) % (TINY_VOCAB - 1);
    CHECK(hsr_session_create(e, NULL, &s, &err) == HSR_OK);
    CHECK(hsr_session_append(s, ids, 300, &err) == HSR_OK);
    REFUSED(hsr_session_save(s, file, NULL, NULL, &err), HSR_E_STATE);    /* not computed yet */
    CHECK(access(file, F_OK) != 0);
    CHECK(hsr_session_prefill(s, NULL, NULL, &err) == HSR_OK);
    REFUSED(hsr_session_save(s, file, stop_at_once, NULL, &err), HSR_E_CANCELLED);
    CHECK(access(file, F_OK) != 0);
    CHECK(hsr_session_save(s, file, NULL, NULL, &err) == HSR_OK);
    hsr_restore_opts_init(&o, sizeof o);
    o.user = &o;
    CHECK(hsr_session_restore(e, file, &o, &r, &err) == HSR_OK && r);
    CHECK(hsr_session_get_stats(r, &st, &err) == HSR_OK && st.n_tokens == 300 && st.n_computed == 300 && st.prefill_tokens == 0);
    CHECK(hsr_session_logits(s, ids, 1, want, TINY_VOCAB, &err) == HSR_OK);
    CHECK(hsr_session_logits(r, ids, 1, got, TINY_VOCAB, &err) == HSR_OK && memcmp(want, got, sizeof want) == 0);
    CHECK(hsr_session_destroy(&r, &err) == HSR_OK && hsr_session_destroy(&s, &err) == HSR_OK);
}

static void test_arguments(hsr_engine *e, const char *file)
{
    hsr_session *s = NULL, *r = (hsr_session *)1;
    hsr_restore_opts o;
    struct { hsr_restore_opts o; char more[8]; } larger = { .more = { 0 } };
    CHECK(hsr_session_create(e, NULL, &s, &err) == HSR_OK);
    REFUSED(hsr_session_save(NULL, file, NULL, NULL, &err), HSR_E_INVALID);
    REFUSED(hsr_session_save(s, NULL, NULL, NULL, &err), HSR_E_INVALID);
    REFUSED(hsr_session_save(s, "", NULL, NULL, &err), HSR_E_INVALID);
    REFUSED(hsr_session_restore(NULL, file, NULL, &r, &err), HSR_E_INVALID);
    CHECK(r == NULL);
    REFUSED(hsr_session_restore(e, NULL, NULL, &r, &err), HSR_E_INVALID);
    REFUSED(hsr_session_restore(e, "", NULL, &r, &err), HSR_E_INVALID);
    REFUSED(hsr_session_restore(e, file, NULL, NULL, &err), HSR_E_INVALID);
    hsr_restore_opts_init(&o, sizeof o);
    for (uint32_t bad = 0; bad < 8; bad++) {
        o.struct_size = bad;
        REFUSED(hsr_session_restore(e, file, &o, &r, &err), HSR_E_INVALID);
    }
    hsr_restore_opts_init(&larger.o, sizeof larger.o);
    larger.o.struct_size = sizeof larger;
    CHECK(hsr_session_restore(e, file, &larger.o, &r, &err) == HSR_OK && hsr_session_destroy(&r, NULL) == HSR_OK);
    larger.more[0] = 1;
    REFUSED(hsr_session_restore(e, file, &larger.o, &r, &err), HSR_E_INVALID);
    const hsr_restore_opts bad[] = { { .kv_format = 99 }, { .kv_format = -1 }, { .profile = 3 }, { .profile = -2 } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        o = bad[i];
        o.struct_size = sizeof o;
        REFUSED(hsr_session_restore(e, file, &o, &r, &err), HSR_E_INVALID);
    }
    o = (hsr_restore_opts){ .struct_size = sizeof o, .context = -5 };
    REFUSED(hsr_session_restore(e, file, &o, &r, &err), HSR_E_CONTEXT);
    CHECK(hsr_session_restore(e, file, NULL, &r, NULL) == HSR_OK && hsr_session_destroy(&r, NULL) == HSR_OK);
    CHECK(hsr_session_destroy(&s, &err) == HSR_OK);
    hsr_restore_opts_init(NULL, sizeof o);
}

/* The n-th allocation of a call is refused, for every n: the call says so, and nothing is left of it. */
static void test_refused_memory(hsr_model *m, hsr_engine *e, const char *file)
{
    hsr_session *s = NULL, *r = NULL;
    hsr_model_info info = { .struct_size = sizeof info };
    hsr_plan_result plan = { .struct_size = sizeof plan };
    hsr_engine_stats st = { .struct_size = sizeof st };
    CHECK(hsr_model_get_info(m, &info, &err) == HSR_OK);
    CHECK(hsr_session_restore(e, file, NULL, &s, &err) == HSR_OK);
    CHECK(hsr_engine_get_stats(e, &st, &err) == HSR_OK);
    const uint64_t blocks = st.hot_blocks_used;
    for (int call = 0; call < 3; call++) {
        bool failed = true;
        int refused = 0;
        for (uint64_t n = 1; failed; n++) {
            failing_allocation = n_allocations + n;
            const hsr_status status = call == 0   ? hsr_session_restore(e, file, NULL, &r, &err)
                                      : call == 1 ? hsr_session_save(s, file, NULL, NULL, &err)
                                                  : hsr_plan(&info, NULL, NULL, 1, &plan, &err);
            failed = n_allocations >= failing_allocation;
            failing_allocation = 0;
            refused += status == HSR_E_NOMEM;
            /* The processor count can do without memory. */
            CHECK(((status == HSR_E_NOMEM && failed) || status == HSR_OK) && (call > 0 || (status == HSR_OK) == (r != NULL)));
            CHECK(hsr_session_destroy(&r, NULL) == HSR_OK && hsr_engine_get_stats(e, &st, &err) == HSR_OK);
            CHECK(st.n_sessions == 1 && st.hot_blocks_used == blocks && st.hot_blocks_reserved == 0);
        }
        CHECK(refused >= 2);
    }
    CHECK(hsr_session_destroy(&s, NULL) == HSR_OK);
}

static void test_plan_arguments(hsr_model *m)
{
    hsr_model_info info = { .struct_size = sizeof info };
    hsr_plan_result plan = { .struct_size = sizeof plan };
    CHECK(hsr_model_get_info(m, &info, &err) == HSR_OK);
    CHECK(hsr_plan(&info, NULL, NULL, 1, &plan, &err) == HSR_OK && plan.fits && plan.context == (uint64_t)info.context_length);
    CHECK(hsr_plan(&info, NULL, NULL, 1, &plan, NULL) == HSR_OK);
    REFUSED(hsr_plan(NULL, NULL, NULL, 1, &plan, &err), HSR_E_INVALID);
    REFUSED(hsr_plan(&info, NULL, NULL, 0, &plan, &err), HSR_E_INVALID);
    REFUSED(hsr_plan(&info, NULL, NULL, 1, NULL, &err), HSR_E_INVALID);
    int32_t *const fields[] = { &info.weight_dtype, &info.vocab_size, &info.hidden_size, &info.n_layers, &info.n_heads, &info.n_kv_heads,
                                &info.head_dim, &info.context_length, &info.intermediate_size, &info.rotary_dim };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        for (int sign = 0; sign < 2; sign++) {
            const int32_t good = *fields[i];
            *fields[i] = sign ? INT32_MIN : INT32_MAX;
            if (fields[i] != &info.context_length || sign)
                REFUSED(hsr_plan(&info, NULL, NULL, 1, &plan, &err), HSR_E_INVALID);
            *fields[i] = good;
        }
    plan.struct_size = 4;
    REFUSED(hsr_plan(&info, NULL, NULL, 1, &plan, &err), HSR_E_INVALID);
}

static void test_public(uint32_t flags)
{
    char path[64], file[80];
    hsr_model *m = NULL;
    hsr_engine *e = NULL;
    hsr_engine_opts o;
    if (!CHECK(tiny_model_write(path, 1)))
        return;
    snprintf(file, sizeof file, "%s.save", path);
    hsr_engine_opts_init(&o, sizeof o);
    o.n_threads = 2;
    o.hot_bytes = 16u << 20;
    o.flags = flags;
    CHECK(hsr_model_open(path, &m, &err) == HSR_OK && hsr_engine_create(m, &o, &e, &err) == HSR_OK);
    test_save_and_restore(e, file);
    test_restore_is_watched(e, file);
    test_arguments(e, file);
    test_plan_arguments(m);
    test_refused_memory(m, e, file);
    CHECK(hsr_engine_destroy(&e, &err) == HSR_OK);
    hsr_model_close(&m);
    unlink(file);
    unlink(path);
}

int main(void)
{
    static const uint64_t lengths[] = { 1, 63, 64, 65, 127, 128, 300, 449, 640, 1501 };
    for (size_t f = 0; f < N_FORMATS; f++) {
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
            test_round_trip(&formats[f], lengths[i], 0);
        for (uint64_t back = 1; back <= 70; back += 23)
            test_round_trip(&formats[f], 1280 + back % 64, back);
        test_round_trip(&formats[f], 1344, 64);
        test_no_space(&formats[f]);
        test_failures(&formats[f], true);
        test_failures(&formats[f], false);
    }
    test_impossible();
    test_public(0);
    test_public(HSR_ENGINE_ASYNC_DEBUG);
    return CHECK_REPORT();
}
