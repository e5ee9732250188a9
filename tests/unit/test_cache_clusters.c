/* SPDX-License-Identifier: Apache-2.0 */
/* Cluster records in the KV cache, over a device that only notes what a record was made of: when they are made, when the strips that they
 * are made of go, what admission counts, and what forks, truncates and files do to both. */
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "check.h"
#include "fake_device.h"
#include "kv/cache_image.h"

#define RECORD 131072u        /* bytes of the slot of one */
#define STRIP 24576u
#define LAYERS 2u
#define KV_HEADS 2u
#define LISTS (LAYERS * KV_HEADS)
#define SINK 1u
#define WINDOW 2u
#define CHUNK 1024u
/* Positions at which the query comes that ends segment n. */
#define SEGMENT_END(n) (((n) * HSRI_SEGMENT_PAGES + SINK + WINDOW - 1) * HSRI_PAGE_TOKENS + 1)

typedef struct world {
    fake_device   fake;
    fake_queue    queue;
    hsri_pool    *pool;
    hsri_kv_shape shape;
    hsri_cache_opts opts;
} world;

static void world_init(world *w, hsri_kv_type format, uint64_t blocks)
{
    *w = (world){ 0 };
    fake_init(&w->fake);
    fake_queue_init(&w->queue, &w->fake);
    CHECK(hsri_pool_create(&w->fake.base, blocks << 20, &w->pool, NULL) == HSR_OK);
    hsri_kv_shape_init(&w->shape, w->pool, LAYERS, KV_HEADS, 64);
    w->opts = (hsri_cache_opts){ .type = HSRI_KV_TYPE_BF16, .format = format, .window_pages = WINDOW, .sink_pages = SINK,
                                 .rollback_tokens = 64, .chunk_tokens = CHUNK,
                                 .index = { .kind = HSRI_INDEX_SKETCH, .head_dim = 64, .n_4bit = 24, .clusters = 1 } };
    hsri_index_shape_fill(&w->opts.index);
}

static void world_end(world *w)
{
    hsri_pool_stats stats;

    hsri_pool_get_stats(w->pool, &stats);
    CHECK(stats.used == 0 && stats.reserved == 0 && w->fake.n_bufs == 1);
    hsri_pool_destroy(w->pool);
    fake_queue_end(&w->queue);
}

/* ---- strips ---- */

static uint64_t strips_of(const hsri_cache *cache)
{
    hsri_cache_stats stats;

    hsri_cache_get_stats(cache, &stats);
    return stats.stores[HSRI_STORE_STRIPS].used / LISTS;
}

static uint64_t sealed_end(const hsri_cache *cache)
{
    hsri_cache_stats stats;

    hsri_cache_get_stats(cache, &stats);
    return SINK + stats.pages_sealed / LISTS;
}

/* After a step: the components of all encoded pages are where the next one looks for them, but for those of sealed segments, which name
 * no slot. */
static void check_strips(world *w, const hsri_cache *cache)
{
    const uint64_t end = hsri_cache_encoded_pages(cache), gone = (sealed_end(cache) - SINK) / HSRI_SEGMENT_PAGES * HSRI_SEGMENT_STRIPS;
    const uint64_t n = (end - SINK + HSRI_STRIP_PAGES - 1) / HSRI_STRIP_PAGES;
    hsri_seq       seq = { 0 };

    if (!CHECK(strips_of(cache) == n - gone))
        fprintf(stderr, "%llu strips, want %llu of %llu\n", (unsigned long long)strips_of(cache), (unsigned long long)(n - gone),
                (unsigned long long)n);
    hsri_cache_fill_seq(cache, &seq);
    for (uint64_t i = gone * LISTS; i < n * LISTS; i++) {
        const uint32_t *strip = fake_at(&w->fake, hsri_at(seq.strips, i * sizeof *strip), sizeof *strip);

        for (uint64_t p = SINK + i / LISTS * HSRI_STRIP_PAGES; p < end && p < SINK + (i / LISTS + 1) * HSRI_STRIP_PAGES && strip; p += 5) {
            const uint64_t    in_strip = (p - SINK) % HSRI_STRIP_PAGES * w->opts.index.code_bytes;
            const fake_entry *entry = fake_at(&w->fake, hsri_at(fake_slot(&w->shape.view, *strip, STRIP), in_strip), sizeof *entry);

            CHECK(entry && entry->page == p && entry->layer == i % LISTS / KV_HEADS && entry->head == i % KV_HEADS);
        }
    }
}

/* Entries of strips that are gone, as the device has them after one more step. */
static void check_gone(world *w, const hsri_cache *cache, uint64_t segments)
{
    hsri_seq seq = { 0 };

    hsri_cache_fill_seq(cache, &seq);
    for (uint64_t i = 0; i < segments * HSRI_SEGMENT_STRIPS * LISTS; i++) {
        const uint32_t *strip = fake_at(&w->fake, hsri_at(seq.strips, i * sizeof *strip), sizeof *strip);

        CHECK(strip && *strip == UINT32_MAX);
    }
}

/* ---- steps ---- */

static hsr_status step_to(world *w, hsri_cache *cache, uint64_t to)
{
    hsr_status status = hsri_cache_prepare(cache, &w->queue.base, to, NULL);

    if (status == HSR_OK)
        status = fake_wait(&w->queue.base, NULL);
    return status == HSR_OK ? hsri_cache_commit(cache, to, NULL) : status;
}

/* At no time more is held or promised than admission counts. */
static void run_to(world *w, hsri_cache *cache, uint64_t n)
{
    const uint64_t most = hsri_kv_slots_for(&w->shape, &w->opts, n > 1u << 20 ? n : 1u << 20).strips / LISTS;

    while (hsri_cache_committed(cache) < n) {
        uint64_t committed = hsri_cache_committed(cache), limit = hsri_cache_step_limit(cache);

        if (!CHECK(step_to(w, cache, n - committed > limit ? committed + limit : n) == HSR_OK))
            return;
        CHECK(strips_of(cache) <= most);
    }
}

static uint64_t records_of(const hsri_cache *cache)
{
    hsri_cache_stats stats;

    hsri_cache_get_stats(cache, &stats);
    CHECK(stats.index_bytes == stats.stores[HSRI_STORE_INDEX].used * HSRI_SLAB_BYTES + stats.stores[HSRI_STORE_STRIPS].used * STRIP +
                                   stats.stores[HSRI_STORE_CLUSTERS].used * RECORD);
    return stats.stores[HSRI_STORE_CLUSTERS].used;
}

/* Records of n segments, as a step finds them. */
static void check_records(world *w, const hsri_cache *cache, uint32_t n)
{
    hsri_seq seq = { 0 };

    CHECK(records_of(cache) == n * LISTS);
    hsri_cache_fill_seq(cache, &seq);
    for (uint32_t i = 0; i < n * LISTS; i++) {
        const uint32_t   *record = fake_at(&w->fake, hsri_at(seq.clusters, i * sizeof *record), sizeof *record);
        const fake_entry *made = record ? fake_at(&w->fake, fake_slot(&w->shape.view, *record, RECORD), 4 * sizeof *made) : NULL;

        for (uint32_t j = 0; j < 4 && CHECK(made != NULL); j++)
            CHECK(made[j].page == SINK + i / LISTS * HSRI_SEGMENT_PAGES + j % 2 * (HSRI_SEGMENT_PAGES - 1) &&
                  made[j].layer == i % LISTS / KV_HEADS && made[j].head == i % KV_HEADS);
    }
}

/* Another cache with what an image of this one has. */
static hsri_cache *copied(world *w, hsri_cache *cache)
{
    hsri_cache *copy = NULL;
    hsri_image image, expected;
    uint32_t chunk;

    CHECK(hsri_cache_create(&w->fake.base, w->pool, &w->shape, &w->opts, &copy, NULL) == HSR_OK);
    CHECK(hsri_cache_describe_image(cache, &image, &chunk, NULL) == HSR_OK);
    CHECK(hsri_cache_expect_image(copy, image.n_tokens, image.sealed, chunk, &expected, NULL) == HSR_OK);
    CHECK(memcmp(image.rows, expected.rows, sizeof image.rows) == 0 && image.per_row == expected.per_row);
    CHECK(hsri_cache_begin_image(copy, &image, NULL) == HSR_OK);
    for (hsri_image_part part = 0; part < HSRI_N_IMAGE_PARTS; part++) {
        uint8_t *row = malloc(image.per_row * image.slot_bytes[part]);
        for (uint64_t i = 0; i < image.rows[part]; i++) {
            CHECK(hsri_cache_read_image(cache, &w->queue.base, &image, part, i, row, NULL) == HSR_OK);
            CHECK(hsri_cache_write_image(copy, &w->queue.base, &image, part, i, row, NULL) == HSR_OK);
        }
        free(row);
    }
    hsri_cache_end_image(copy, &image);
    return copy;
}

/* A record that names tokens or clusters of nowhere is refused. */
static void test_unsound_record(const world *w)
{
    const hsri_cluster_layout at = hsri_cluster_layout_of(&w->opts.index);
    const uint16_t            bad = HSRI_SEGMENT_TOKENS;
    uint8_t                  *record = calloc(1, RECORD);

    CHECK(hsri_cluster_slot_bytes(&w->opts.index) <= RECORD && hsri_cluster_record_is_sound(&w->opts.index, record));
    memcpy(record + at.positions + 2 * (HSRI_SEGMENT_TOKENS - 1), &bad, sizeof bad);
    CHECK(!hsri_cluster_record_is_sound(&w->opts.index, record));
    memset(record + at.positions, 0, 2 * HSRI_SEGMENT_TOKENS);
    record[at.starts + 2 * 5] = 1;          /* and the next one starts before it */
    CHECK(!hsri_cluster_record_is_sound(&w->opts.index, record));
    record[at.starts + 2 * 5] = 0;
    CHECK(hsri_cluster_record_is_sound(&w->opts.index, record));
    record[at.firsts + 2 * HSRI_SEGMENT_FAMILIES + 1] = 0x10;
    CHECK(!hsri_cluster_record_is_sound(&w->opts.index, record));
    record[at.firsts + 2 * HSRI_SEGMENT_FAMILIES + 1] = 0;
    record[at.family_starts] = 1;
    CHECK(!hsri_cluster_record_is_sound(&w->opts.index, record));
    free(record);
}

static void test_format(hsri_kv_type format)
{
    world            w;
    hsri_cache      *cache, *fork;
    hsri_cache_stats stats;
    const uint64_t   end = SEGMENT_END(2) + 500;

    world_init(&w, format, 512);
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &w.opts, &cache, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(cache, end, NULL) == HSR_OK);
    hsri_cache_get_stats(cache, &stats);
    CHECK(stats.reserved_blocks == hsri_kv_blocks_for(&w.shape, &w.opts, end));
    run_to(&w, cache, SEGMENT_END(1) - 1);
    CHECK(w.fake.n_clusters == 0 && records_of(cache) == 0);
    run_to(&w, cache, SEGMENT_END(1));
    CHECK(w.fake.n_clusters == LISTS);
    check_records(&w, cache, 1);
    /* The segment is not sealed yet; a page of tokens later it is. */
    CHECK(strips_of(cache) == HSRI_SEGMENT_STRIPS);
    check_strips(&w, cache);
    run_to(&w, cache, SEGMENT_END(1) + 63);
    CHECK(strips_of(cache) == HSRI_SEGMENT_STRIPS);
    run_to(&w, cache, SEGMENT_END(1) + 64);
    CHECK(strips_of(cache) == 1);
    run_to(&w, cache, SEGMENT_END(1) + 65);
    check_strips(&w, cache);
    check_gone(&w, cache, 1);
    run_to(&w, cache, end);
    check_strips(&w, cache);
    CHECK(w.fake.n_clusters == 2 * LISTS);
    check_records(&w, cache, 2);
    hsri_cache_get_stats(cache, &stats);
    CHECK(stats.blocks + stats.reserved_blocks <= hsri_kv_blocks_for(&w.shape, &w.opts, end));
    CHECK(!hsri_kv_is_plain(format) || (stats.blocks == hsri_kv_blocks_for(&w.shape, &w.opts, end) && stats.reserved_blocks == 0));

    /* So does a saved session, whose records are not made again. */
    hsri_cache *copy = copied(&w, cache);
    CHECK(records_of(copy) == 2 * LISTS && hsri_cache_admit(copy, end + 1, NULL) == HSR_OK);
    run_to(&w, copy, end + 1);
    check_records(&w, copy, 2);
    check_strips(&w, copy);
    CHECK(w.fake.n_clusters == 2 * LISTS);
    hsri_cache_destroy(copy);
    test_unsound_record(&w);

    /* A fork sees the same records and goes on alone. */
    CHECK(hsri_cache_fork(cache, &w.queue.base, &fork, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(fork, SEGMENT_END(3) + 64, NULL) == HSR_OK);
    run_to(&w, fork, end + 1);
    check_records(&w, fork, 2);
    CHECK(w.fake.n_clusters == 2 * LISTS);
    check_strips(&w, fork);
    run_to(&w, fork, SEGMENT_END(3) + 64);
    check_records(&w, fork, 3);
    check_strips(&w, fork);
    check_strips(&w, cache);
    hsri_cache_destroy(cache);
    check_records(&w, fork, 3);
    check_strips(&w, fork);

    /* A step that fails leaves no record that is believed; one that is undone gives its slots back. */
    CHECK(hsri_cache_truncate(fork, SEGMENT_END(3) - 1, NULL) == HSR_OK);
    CHECK(hsri_cache_truncate(fork, 0, NULL) == HSR_OK && records_of(fork) == 0);
    w.fake.n_clusters = 0;
    CHECK(hsri_cache_admit(fork, SEGMENT_END(1), NULL) == HSR_OK);
    run_to(&w, fork, SEGMENT_END(1) - 1);
    CHECK(hsri_cache_prepare(fork, &w.queue.base, SEGMENT_END(1), NULL) == HSR_OK && records_of(fork) == LISTS);
    w.queue.n = 0;                                  /* the queue lost everything */
    CHECK(hsri_cache_truncate(fork, SEGMENT_END(1) - 1, NULL) == HSR_OK && records_of(fork) == 0);
    CHECK(hsri_cache_admit(fork, SEGMENT_END(1), NULL) == HSR_OK);
    run_to(&w, fork, SEGMENT_END(1));
    check_records(&w, fork, 1);
    CHECK(w.fake.n_clusters == LISTS);
    hsri_cache_destroy(fork);
    world_end(&w);
}

/* A plain format may be cut anywhere. What is cut into a segment whose strips are gone is indexed again, from its pages: all of it. */
static void test_cut(uint64_t from, uint64_t to)
{
    world       w;
    hsri_cache *cache, *others[2];
    const uint64_t more = to + 200 < from ? to + 200 : from;

    world_init(&w, HSRI_KV_TYPE_BF16, 512);
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &w.opts, &cache, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(cache, from, NULL) == HSR_OK);
    run_to(&w, cache, from);
    CHECK(hsri_cache_truncate(cache, to, NULL) == HSR_OK);
    /* A fork and a file of it are as good. */
    others[0] = copied(&w, cache);
    CHECK(hsri_cache_fork(cache, &w.queue.base, &others[1], NULL) == HSR_OK);
    for (int i = -1; i < 2; i++) {
        hsri_cache *one = i < 0 ? cache : others[i];

        for (uint64_t n = more; n <= from; n += from - n ? from - n : 1) {
            CHECK(hsri_cache_admit(one, n, NULL) == HSR_OK);
            run_to(&w, one, n);
            check_records(&w, one, (uint32_t)hsri_segments(hsri_cache_encoded_pages(one), SINK));
            check_strips(&w, one);
        }
    }
    for (int i = 0; i < 2; i++)
        hsri_cache_destroy(others[i]);
    hsri_cache_destroy(cache);
    world_end(&w);
}

/* An encoded format is cut within the rollback distance, where all strips are that it needs, or not at all. */
static void test_rollback(void)
{
    world       w;
    hsri_cache *cache;

    world_init(&w, HSRI_KV_TYPE_COMPACT, 512);
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &w.opts, &cache, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(cache, SEGMENT_END(1) + 200, NULL) == HSR_OK);
    run_to(&w, cache, SEGMENT_END(1) - 2);
    for (uint64_t n = SEGMENT_END(1) - 2; n < SEGMENT_END(1) + 130; n += 7) {
        run_to(&w, cache, n);
        CHECK(hsri_cache_truncate(cache, n - 64, NULL) == HSR_OK && hsri_cache_admit(cache, SEGMENT_END(1) + 200, NULL) == HSR_OK);
        run_to(&w, cache, n);
        check_strips(&w, cache);
        check_records(&w, cache, (uint32_t)hsri_segments(hsri_cache_encoded_pages(cache), SINK));
    }
    CHECK(hsri_cache_truncate(cache, 5000, NULL) == HSR_E_STATE && hsri_cache_truncate(cache, 64, NULL) == HSR_OK);
    CHECK(strips_of(cache) == 0 && hsri_cache_admit(cache, 9000, NULL) == HSR_OK);
    run_to(&w, cache, 9000);
    check_strips(&w, cache);
    hsri_cache_destroy(cache);

    /* With a window of one page, what is cut at the end of a page needs no plain copy; but its index would. */
    w.opts.window_pages = 1;
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &w.opts, &cache, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(cache, 10000, NULL) == HSR_OK);
    run_to(&w, cache, 10000);
    CHECK(hsri_cache_truncate(cache, 6400, NULL) == HSR_E_STATE && hsri_cache_truncate(cache, 9600, NULL) == HSR_OK);
    hsri_cache_destroy(cache);
    world_end(&w);
}

/* What is counted is enough, with not a block to spare; strips that are given up make room for those that follow. */
static void test_exact(hsri_kv_type format, uint64_t rollback)
{
    const uint64_t end = SEGMENT_END(3) + 300;
    world          w;
    hsri_cache    *cache;

    world_init(&w, format, 1);
    w.opts.rollback_tokens = rollback;
    const uint64_t blocks = hsri_kv_blocks_for(&w.shape, &w.opts, end);
    world_end(&w);
    world_init(&w, format, blocks);
    w.opts.rollback_tokens = rollback;
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &w.opts, &cache, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(cache, end, NULL) == HSR_OK);
    run_to(&w, cache, end);
    check_records(&w, cache, 3);
    check_strips(&w, cache);
    hsri_cache_destroy(cache);
    world_end(&w);
}

/* The n-th call to the device fails, for many n: the step is undone and done again. */
static void test_failures(void)
{
    bool failed = true;

    for (uint64_t n = 1; failed; n++) {
        const uint64_t end = SEGMENT_END(1) + 200;
        hsri_cache    *cache = NULL;
        world          w;

        world_init(&w, HSRI_KV_TYPE_BF16, 64);
        CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &w.opts, &cache, NULL) == HSR_OK);
        w.fake.fail_at = w.fake.n_calls + n;
        while (hsri_cache_committed(cache) < end) {
            const uint64_t committed = hsri_cache_committed(cache), limit = hsri_cache_step_limit(cache);
            hsr_status     status = hsri_cache_admit(cache, end, NULL);

            if (status == HSR_OK)
                status = step_to(&w, cache, committed + limit < end ? committed + limit : end);
            if (status != HSR_OK)
                CHECK(hsri_cache_truncate(cache, committed, NULL) == HSR_OK);
        }
        failed = w.fake.n_calls >= w.fake.fail_at;
        w.fake.fail_at = 0;
        check_records(&w, cache, 1);
        check_strips(&w, cache);
        hsri_cache_destroy(cache);
        world_end(&w);
    }
}

/* Three sessions of a plain format do anything, in any order. */
static void test_random(uint64_t seed)
{
    enum { CACHES = 3, TURNS = 60, MOST = 26000 };
    hsri_cache *caches[CACHES] = { NULL };
    uint64_t    i = 0;
    world       w;

    world_init(&w, HSRI_KV_TYPE_BF16, 512);
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &w.opts, &caches[0], NULL) == HSR_OK);
    for (int turn = 0; turn < TURNS; turn++) {
        hsri_cache   **one = &caches[hsri_rng_u64(seed, i++) % CACHES], **other = &caches[hsri_rng_u64(seed, i++) % CACHES];
        const uint64_t what = hsri_rng_u64(seed, i++) % 8, n = hsri_rng_u64(seed, i++);

        if (!*one)
            continue;
        if (what < 3) {
            const uint64_t to = hsri_cache_committed(*one) + 1 + n % 9000;

            CHECK(hsri_cache_admit(*one, to < MOST ? to : MOST, NULL) == HSR_OK);
            run_to(&w, *one, to < MOST ? to : MOST);
            check_records(&w, *one, (uint32_t)hsri_segments(hsri_cache_encoded_pages(*one), SINK));
            check_strips(&w, *one);
        } else if (what < 6) {
            CHECK(hsri_cache_truncate(*one, n % (hsri_cache_committed(*one) + 1), NULL) == HSR_OK);
        } else if (!*other && what == 6) {
            CHECK(hsri_cache_fork(*one, &w.queue.base, other, NULL) == HSR_OK);
        } else if (!*other) {
            *other = copied(&w, *one);
        } else if (other != one) {
            hsri_cache_destroy(*other);
            *other = NULL;
        }
    }
    for (int k = 0; k < CACHES; k++)
        hsri_cache_destroy(caches[k]);
    world_end(&w);
}

int main(void)
{
    static const uint64_t ends[] = { SEGMENT_END(1) + 64, SEGMENT_END(2) + 500, SEGMENT_END(3) };
    static const uint64_t cuts[] = { 0, 64, 100, 129, 5000, 8191, SEGMENT_END(1) - 130, SEGMENT_END(1) - 1, SEGMENT_END(1) + 63, 12000 };

    test_format(HSRI_KV_TYPE_BF16);
    test_format(HSRI_KV_TYPE_COMPACT);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        for (size_t j = 0; j < sizeof cuts / sizeof *cuts && cuts[j] < ends[i]; j++)
            test_cut(ends[i], cuts[j]);
    test_rollback();
    for (uint64_t rollback = 0; rollback <= 1000; rollback = rollback * 10 + 1)
        for (hsri_kv_type format = HSRI_KV_TYPE_BF16; format <= HSRI_KV_TYPE_INT8; format++)
            test_exact(format, rollback);
    test_failures();
    for (uint64_t seed = 1; seed <= 6; seed++)
        test_random(seed);
    return CHECK_REPORT();
}
