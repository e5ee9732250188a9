/* SPDX-License-Identifier: Apache-2.0 */
/* The block pool against a simple model: lowest index first, counters, holders, reservations, commits. */
#include "base/rng.h"
#include "check.h"
#include "fake_device.h"
#include "kv/pool.h"

#define MIB (1ull << 20)
#define SPARES 8u

static hsri_pool *make_pool(fake_device *fake, uint64_t blocks)
{
    fake_init(fake);
    hsri_pool *pool = NULL;
    CHECK(hsri_pool_create(&fake->base, blocks * MIB + 12345, &pool, NULL) == HSR_OK);
    return pool;
}

static void end_pool(fake_device *fake, hsri_pool *pool)
{
    hsri_pool_destroy(pool);
    CHECK(fake->n_bufs == 0);
}

static void test_sizes(void)
{
    fake_device fake;
    fake_init(&fake);
    hsri_pool *pool = NULL;
    hsr_error err = HSR_ERROR_INIT;
    CHECK(hsri_pool_create(&fake.base, MIB - 1, &pool, &err) == HSR_E_INVALID && !pool && err.message[0]);
    CHECK(hsri_pool_create(&fake.base, ((1ull << 24) + 1) * MIB, &pool, NULL) == HSR_E_INVALID && !pool);
    fake.fail_at = 1;
    CHECK(hsri_pool_create(&fake.base, 4 * MIB, &pool, NULL) == HSR_E_NOMEM && !pool && fake.n_bufs == 0);
    CHECK(hsri_pool_create(&fake.base, 4 * MIB, &pool, NULL) == HSR_OK);
    hsri_pool_stats stats;
    hsri_pool_get_stats(pool, &stats);
    CHECK(stats.total == 4 && stats.free == 4 && stats.largest_free_run == 4 && stats.committed == 0);
    end_pool(&fake, pool);
    hsri_pool_destroy(NULL);
}

static void test_reservations(void)
{
    fake_device fake;
    hsri_pool *pool = make_pool(&fake, 10);
    uint32_t block;
    CHECK(hsri_pool_take(pool, &block, NULL) == HSR_E_INTERNAL && block == HSRI_NO_BLOCK);
    CHECK(hsri_pool_reserve(pool, 0));
    CHECK(!hsri_pool_reserve(pool, 11));
    CHECK(!hsri_pool_reserve(pool, UINT64_MAX));
    CHECK(hsri_pool_reserve(pool, 7));
    CHECK(!hsri_pool_reserve(pool, 4));
    CHECK(hsri_pool_take(pool, &block, NULL) == HSR_OK && block == 0);
    CHECK(!hsri_pool_reserve(pool, 4));
    CHECK(hsri_pool_reserve(pool, 3));
    hsri_pool_unreserve(pool, 9);
    hsri_pool_release(pool, block);
    CHECK(hsri_pool_reserve(pool, 10));
    hsri_pool_unreserve(pool, 10);
    end_pool(&fake, pool);
}

/* The system refuses to commit: the promise is still there, and the next try works. */
static void test_refused_commit(void)
{
    fake_device fake;
    hsri_pool *pool = make_pool(&fake, 3);
    hsri_pool_stats before, after;
    uint32_t block;
    CHECK(hsri_pool_reserve(pool, 2));
    hsri_pool_get_stats(pool, &before);
    fake.fail_at = fake.n_calls + 1;
    CHECK(hsri_pool_take(pool, &block, NULL) == HSR_E_NOMEM && block == HSRI_NO_BLOCK);
    hsri_pool_get_stats(pool, &after);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK(hsri_pool_take(pool, &block, NULL) == HSR_OK && block == 0 && hsri_pool_holders(pool, 0) == 1);
    hsri_pool_unreserve(pool, 1);
    hsri_pool_release(pool, block);
    end_pool(&fake, pool);
}

/* Taking and giving back around the same level costs no commits; a flood of free blocks goes back to the system. */
static void test_spares(void)
{
    fake_device fake;
    hsri_pool *pool = make_pool(&fake, 64);
    uint32_t block;
    CHECK(hsri_pool_reserve(pool, 64));
    for (uint32_t i = 0; i < 64; i++)
        CHECK(hsri_pool_take(pool, &block, NULL) == HSR_OK && block == i);
    CHECK(fake.n_committed == 64);
    for (uint32_t i = 64; i-- > 0;)
        hsri_pool_release(pool, i);
    CHECK(fake.n_committed == SPARES);
    CHECK(hsri_pool_reserve(pool, SPARES));
    uint64_t commits = fake.n_commits;
    for (uint32_t i = 0; i < SPARES; i++)
        CHECK(hsri_pool_take(pool, &block, NULL) == HSR_OK && block == i);
    for (int round = 0; round < 20; round++) {
        hsri_pool_release(pool, 3);
        CHECK(hsri_pool_reserve(pool, 1) && hsri_pool_take(pool, &block, NULL) == HSR_OK && block == 3);
    }
    CHECK(fake.n_commits == commits);
    for (uint32_t i = 0; i < SPARES; i++)
        hsri_pool_release(pool, i);
    end_pool(&fake, pool);
}

/* ---- random operations against a model ---- */

typedef struct model {
    uint32_t total, reserved, used, peak;
    uint32_t holders[300];
} model;

static void check_model(const hsri_pool *pool, const model *m, const fake_device *fake)
{
    hsri_pool_stats stats;
    hsri_pool_get_stats(pool, &stats);
    uint32_t run = 0, longest = 0;
    for (uint32_t b = 0; b < m->total; b++) {
        run = m->holders[b] ? 0 : run + 1;
        longest = run > longest ? run : longest;
        CHECK(hsri_pool_holders(pool, b) == m->holders[b]);
    }
    CHECK(stats.total == m->total && stats.used == m->used && stats.free == m->total - m->used);
    CHECK(stats.reserved == m->reserved && stats.peak_used == m->peak && stats.largest_free_run == longest);
    CHECK(stats.committed == fake->n_committed && stats.committed >= stats.used && stats.committed <= stats.used + SPARES);
}

static uint32_t lowest_free(const model *m)
{
    uint32_t b = 0;
    while (b < m->total && m->holders[b])
        b++;
    return b;
}

static void random_op(hsri_pool *pool, model *m, uint64_t draw)
{
    uint32_t arg = (uint32_t)(draw >> 8), block = arg % m->total;
    switch (draw % 8) {
    case 0:
    case 1: {
        uint32_t n = arg % 20;
        bool fits = n <= m->total - m->used - m->reserved;
        CHECK(hsri_pool_reserve(pool, n) == fits);
        m->reserved += fits ? n : 0;
        break;
    }
    case 2:
        hsri_pool_unreserve(pool, m->reserved ? arg % m->reserved : 0);
        m->reserved -= m->reserved ? arg % m->reserved : 0;
        break;
    case 3:
    case 4:
    case 5:
        if (m->reserved) {
            uint32_t expected = lowest_free(m);
            CHECK(hsri_pool_take(pool, &block, NULL) == HSR_OK && block == expected);
            m->holders[expected] = 1;
            m->reserved--;
            m->used++;
            m->peak = m->used > m->peak ? m->used : m->peak;
        }
        break;
    case 6:
        if (m->holders[block]) {
            hsri_pool_retain(pool, block);
            m->holders[block]++;
        }
        break;
    default:
        for (uint32_t i = 0; i < 3; i++, block = (block + 7) % m->total)
            if (m->holders[block]) {
                hsri_pool_release(pool, block);
                m->used -= --m->holders[block] == 0;
            }
    }
}

static void test_random(uint32_t total, uint64_t seed)
{
    fake_device fake;
    hsri_pool *pool = make_pool(&fake, total);
    model m = { .total = total };
    for (uint64_t i = 0; i < 1500; i++) {
        random_op(pool, &m, hsri_rng_u64(seed, i));
        check_model(pool, &m, &fake);
    }
    for (uint32_t b = 0; b < total; b++)
        for (; m.holders[b]; m.holders[b]--)
            hsri_pool_release(pool, b);
    hsri_pool_unreserve(pool, m.reserved);
    end_pool(&fake, pool);
}

int main(void)
{
    test_sizes();
    test_reservations();
    test_refused_commit();
    test_spares();
    static const uint32_t totals[] = { 1, 5, 63, 64, 65, 200 };
    for (size_t i = 0; i < sizeof totals / sizeof *totals; i++)
        test_random(totals[i], 100 + i);
    return CHECK_REPORT();
}
