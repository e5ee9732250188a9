/* SPDX-License-Identifier: Apache-2.0 */
/* Cluster records in the KV cache, over a device that only notes what a record was made of: when they are made, what admission counts, and
 * what forks and truncates do to them. */
#include <stdlib.h>
#include <string.h>

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

static void world_init(world *w, hsri_kv_type format)
{
    *w = (world){ 0 };
    fake_init(&w->fake);
    fake_queue_init(&w->queue, &w->fake);
    CHECK(hsri_pool_create(&w->fake.base, 512ull << 20, &w->pool, NULL) == HSR_OK);
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

static void run_to(world *w, hsri_cache *cache, uint64_t n)
{
    while (hsri_cache_committed(cache) < n) {
        uint64_t committed = hsri_cache_committed(cache), limit = hsri_cache_step_limit(cache);
        uint64_t to = n - committed > limit ? committed + limit : n;

        if (!CHECK(hsri_cache_prepare(cache, &w->queue.base, to, NULL) == HSR_OK) || !CHECK(fake_wait(&w->queue.base, NULL) == HSR_OK) ||
            !CHECK(hsri_cache_commit(cache, to, NULL) == HSR_OK))
            return;
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
    CHECK(memcmp(&image, &expected, sizeof image) == 0 && hsri_cache_begin_image(copy, &image, NULL) == HSR_OK);
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

/* A record that names tokens of nowhere is refused. */
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
    free(record);
}

static void test_format(hsri_kv_type format)
{
    world            w;
    hsri_cache      *cache, *fork;
    hsri_cache_stats stats;
    const uint64_t   end = SEGMENT_END(2) + 500;

    world_init(&w, format);
    CHECK(hsri_cache_create(&w.fake.base, w.pool, &w.shape, &w.opts, &cache, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(cache, end, NULL) == HSR_OK);
    hsri_cache_get_stats(cache, &stats);
    CHECK(stats.reserved_blocks == hsri_kv_blocks_for(&w.shape, &w.opts, end));
    run_to(&w, cache, SEGMENT_END(1) - 1);
    CHECK(w.fake.n_clusters == 0 && records_of(cache) == 0);
    run_to(&w, cache, SEGMENT_END(1));
    CHECK(w.fake.n_clusters == LISTS);
    check_records(&w, cache, 1);
    run_to(&w, cache, end);
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
    CHECK(w.fake.n_clusters == 2 * LISTS);
    hsri_cache_destroy(copy);
    test_unsound_record(&w);

    /* A fork sees the same records and goes on alone. */
    CHECK(hsri_cache_fork(cache, &w.queue.base, &fork, NULL) == HSR_OK);
    CHECK(hsri_cache_admit(fork, SEGMENT_END(3), NULL) == HSR_OK);
    run_to(&w, fork, end + 1);
    check_records(&w, fork, 2);
    CHECK(w.fake.n_clusters == 2 * LISTS);
    run_to(&w, fork, SEGMENT_END(3));
    check_records(&w, fork, 3);
    hsri_cache_destroy(cache);
    check_records(&w, fork, 3);

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

int main(void)
{
    test_format(HSRI_KV_TYPE_BF16);
    test_format(HSRI_KV_TYPE_COMPACT);
    return CHECK_REPORT();
}
