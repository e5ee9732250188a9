/* SPDX-License-Identifier: Apache-2.0 */
/* The mover alone, over a real cold file: what is written comes back, what came back wrong is said, order follows priority, and
 * every accepted move is reported once more than late. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "check.h"
#include "kv/mover.h"

#define SLOT 8192u
#define PAGE 8000u
#define MIB  (1u << 20)

typedef struct world {
    hsri_mover    *mover;
    char           directory[64];
    hsri_io_faults hook;
    hsri_io_fault  fault;
    int            action;      /* that fails; -1: none */
    pthread_mutex_t lock;
    uint8_t       *slots;       /* 64 of them */
} world;

static void before_io(void *user, hsri_io_action action, uint64_t index, hsri_io_fault *fault)
{
    world *w = user;
    (void)index;
    pthread_mutex_lock(&w->lock);
    if ((int)action == w->action)
        *fault = w->fault;
    pthread_mutex_unlock(&w->lock);
}

static void set_fault(world *w, int action, hsri_io_fault fault)
{
    pthread_mutex_lock(&w->lock);
    w->action = action;
    w->fault = fault;
    pthread_mutex_unlock(&w->lock);
}

static void world_init(world *w, uint32_t depth, uint32_t max_moves, uint32_t deadline_ms)
{
    *w = (world){ .hook = { before_io, w }, .action = -1, .lock = PTHREAD_MUTEX_INITIALIZER };
    strcpy(w->directory, "/tmp/hsr-mover-XXXXXX");
    CHECK(mkdtemp(w->directory) != NULL);
    w->slots = aligned_alloc(4096, 64 * SLOT);
    memset(w->slots, 0, 64 * SLOT);
    hsri_mover_opts opts = {
        .directory = w->directory, .bytes = 16 * MIB, .max_moves = max_moves,
        .io = { .kind = HSRI_IO_PREAD, .queue_depth = depth, .max_requests = depth, .deadline_ms = deadline_ms, .faults = &w->hook },
    };
    hsr_error err = HSR_ERROR_INIT;
    if (!CHECK(hsri_mover_create(&opts, &w->mover, &err) == HSR_OK))
        fprintf(stderr, "%s\n", err.message);
}

static void world_end(world *w)
{
    CHECK(hsri_mover_destroy(w->mover, 1000, NULL) == HSR_OK);
    CHECK(rmdir(w->directory) == 0);
    free(w->slots);
}

static uint8_t *slot(world *w, uint32_t i) { return w->slots + (size_t)i * SLOT; }

/* A page with content of its own in slot i. */
static void fill(world *w, uint32_t i)
{
    hsri_page_header header = { .magic = HSRI_PAGE_MAGIC, .lineage = 7, .page = i, .layer = 3, .head = 1 };
    memset(slot(w, i), (int)i + 1, SLOT);
    memcpy(slot(w, i), &header, sizeof header);
}

static hsri_move move_of(world *w, hsri_move_kind kind, uint32_t i, uint32_t memory)
{
    return (hsri_move){
        .kind = kind, .owner = i, .extent = i * SLOT / MIB, .offset = i * SLOT % MIB, .memory = slot(w, memory), .slot_bytes = SLOT,
        .page_bytes = PAGE, .lineage = 7, .page = i, .layer = 3, .head = 1,
    };
}

static hsri_moved do_move(world *w, hsri_move move)
{
    hsri_moved moved = { .status = HSR_E_INTERNAL };
    uint32_t id = hsri_mover_submit(w->mover, &move, HSRI_MOVE_DEMAND);
    CHECK(id != HSRI_NO_MOVE);
    CHECK(hsri_mover_collect(w->mover, &moved, 1, 5000) == 1 && moved.id == id && moved.move.owner == move.owner);
    return moved;
}

static void test_round_trip(void)
{
    world w;
    world_init(&w, 4, 0, 0);
    fill(&w, 5);
    memset(slot(&w, 5) + PAGE, 0xEE, SLOT - PAGE);      /* not the page's: does not get into the file */
    CHECK(do_move(&w, move_of(&w, HSRI_MOVE_WRITE, 5, 5)).status == HSR_OK);
    CHECK(do_move(&w, move_of(&w, HSRI_MOVE_READ, 5, 9)).status == HSR_OK);
    uint32_t crc;
    memcpy(&crc, slot(&w, 9) + offsetof(hsri_page_header, crc32c), 4);
    CHECK(crc != 0 && memcmp(slot(&w, 5) + 8, slot(&w, 9) + 8, PAGE - 8) == 0);
    for (uint32_t i = PAGE; i < SLOT; i++)
        CHECK(slot(&w, 9)[i] == 0);
    memcpy(&crc, slot(&w, 5) + offsetof(hsri_page_header, crc32c), 4);
    CHECK(crc == 0);                                    /* writing does not touch the slot */

    /* Another page's home, an identity that does not fit, a flipped bit: all wrong bytes. */
    hsri_move wrong = move_of(&w, HSRI_MOVE_READ, 5, 9);
    wrong.page = 6;
    CHECK(do_move(&w, wrong).status == HSR_E_FORMAT);
    wrong = move_of(&w, HSRI_MOVE_READ, 5, 9);
    wrong.lineage = 8;
    CHECK(do_move(&w, wrong).status == HSR_E_FORMAT);
    set_fault(&w, HSRI_IO_READ, (hsri_io_fault){ .corrupt = true, .corrupt_at = PAGE - 1 });
    CHECK(do_move(&w, move_of(&w, HSRI_MOVE_READ, 5, 9)).status == HSR_E_FORMAT);
    set_fault(&w, HSRI_IO_READ, (hsri_io_fault){ .corrupt = true, .corrupt_at = PAGE });
    CHECK(do_move(&w, move_of(&w, HSRI_MOVE_READ, 5, 9)).status == HSR_OK);     /* behind the page */
    set_fault(&w, HSRI_IO_READ, (hsri_io_fault){ .error = EIO });
    hsri_moved moved = do_move(&w, move_of(&w, HSRI_MOVE_READ, 5, 9));
    CHECK(moved.status == HSR_E_IO && moved.sys_code == EIO);
    hsri_mover_stats stats;
    hsri_mover_get_stats(w.mover, &stats);
    CHECK(stats.bad_pages == 3 && strcmp(stats.engine, "pread") == 0 && stats.queued == 0 && stats.running == 0);
    world_end(&w);
}

/* Extents take room when they are written first, and give it back. */
static void test_extents(void)
{
    world w;
    world_init(&w, 4, 0, 0);
    set_fault(&w, HSRI_IO_ALLOCATE, (hsri_io_fault){ .error = ENOSPC });
    fill(&w, 0);
    hsri_moved moved = do_move(&w, move_of(&w, HSRI_MOVE_WRITE, 0, 0));
    CHECK(moved.status == HSR_E_IO && moved.sys_code == ENOSPC);
    set_fault(&w, -1, (hsri_io_fault){ 0 });
    for (uint32_t extent = 0; extent < 8; extent++) {
        hsri_move move = move_of(&w, HSRI_MOVE_WRITE, 0, 0);
        move.extent = extent;
        CHECK(do_move(&w, move).status == HSR_OK);
    }
    for (uint32_t extent = 0; extent < 8; extent++)
        CHECK(do_move(&w, (hsri_move){ .kind = HSRI_MOVE_FREE, .extent = extent }).status == HSR_OK);
    hsri_move again = move_of(&w, HSRI_MOVE_WRITE, 0, 0);
    again.extent = 3;
    CHECK(do_move(&w, again).status == HSR_OK);
    again.kind = HSRI_MOVE_READ;
    CHECK(do_move(&w, again).status == HSR_OK);
    world_end(&w);
}

/* One at a time, each slow: demand overtakes what was queued before it, and what was raised does too. */
static void test_priorities(void)
{
    world w;
    world_init(&w, 1, 0, 0);
    for (uint32_t i = 0; i < 6; i++) {
        fill(&w, i);
        CHECK(do_move(&w, move_of(&w, HSRI_MOVE_WRITE, i, i)).status == HSR_OK);
    }
    set_fault(&w, HSRI_IO_READ, (hsri_io_fault){ .delay_ms = 40 });
    uint32_t ids[5];
    static const hsri_move_priority priorities[5] = {
        HSRI_MOVE_BACKGROUND, HSRI_MOVE_BACKGROUND, HSRI_MOVE_PREFETCH, HSRI_MOVE_BACKGROUND, HSRI_MOVE_DEMAND,
    };
    for (uint32_t i = 0; i < 5; i++) {
        hsri_move move = move_of(&w, HSRI_MOVE_READ, i, 10 + i);
        ids[i] = hsri_mover_submit(w.mover, &move, priorities[i]);
        if (i == 0)
            usleep(15000);      /* the first has started */
    }
    hsri_mover_raise(w.mover, ids[3], HSRI_MOVE_DEMAND);
    hsri_mover_cancel(w.mover, ids[1]);
    uint32_t order[5], n = 0;
    hsri_moved moved[5];
    while (n < 5) {
        uint32_t got = hsri_mover_collect(w.mover, moved, 5, 5000);
        if (!CHECK(got > 0))
            break;
        for (uint32_t i = 0; i < got; i++) {
            CHECK(moved[i].status == (moved[i].move.owner == 1 ? HSR_E_CANCELLED : HSR_OK));
            order[n++] = moved[i].move.owner;
        }
    }
    CHECK(n == 5 && order[0] == 1 && order[1] == 0 && order[2] == 4 && order[3] == 3 && order[4] == 2);
    CHECK(hsri_mover_collect(w.mover, moved, 5, 1000) == 0);
    world_end(&w);
}

/* Writes that were ahead of need overtake other work once somebody waits for them; reads that nobody waits for do not. */
static void test_writes_raised(void)
{
    world w;
    world_init(&w, 1, 0, 0);
    for (uint32_t i = 0; i < 5; i++)
        fill(&w, i);
    CHECK(do_move(&w, move_of(&w, HSRI_MOVE_WRITE, 1, 1)).status == HSR_OK);
    CHECK(do_move(&w, move_of(&w, HSRI_MOVE_WRITE, 2, 2)).status == HSR_OK);
    set_fault(&w, HSRI_IO_WRITE, (hsri_io_fault){ .delay_ms = 60 });
    static const struct { hsri_move_kind kind; hsri_move_priority priority; } given[5] = {
        { HSRI_MOVE_WRITE, HSRI_MOVE_BACKGROUND }, { HSRI_MOVE_READ, HSRI_MOVE_BACKGROUND }, { HSRI_MOVE_READ, HSRI_MOVE_PREFETCH },
        { HSRI_MOVE_WRITE, HSRI_MOVE_BACKGROUND }, { HSRI_MOVE_WRITE, HSRI_MOVE_BACKGROUND },
    };
    for (uint32_t i = 0; i < 5; i++) {
        hsri_move move = move_of(&w, given[i].kind, i, given[i].kind == HSRI_MOVE_READ ? 10 + i : i);
        CHECK(hsri_mover_submit(w.mover, &move, given[i].priority) != HSRI_NO_MOVE);
        if (i == 0)
            usleep(15000);      /* the first has started */
    }
    hsri_mover_raise_writes(w.mover);
    static const uint32_t order[5] = { 0, 3, 4, 2, 1 };
    for (uint32_t n = 0; n < 5; n++) {
        hsri_moved moved;
        CHECK(hsri_mover_collect(w.mover, &moved, 1, 5000) == 1 && moved.status == HSR_OK && moved.move.owner == order[n]);
    }
    world_end(&w);
}

/* More than the queue holds is refused, not lost; what is queued when the mover goes is forgotten. */
static void test_full(void)
{
    world w;
    world_init(&w, 2, 8, 0);
    fill(&w, 0);
    set_fault(&w, HSRI_IO_WRITE, (hsri_io_fault){ .delay_ms = 20 });
    hsri_move move = move_of(&w, HSRI_MOVE_WRITE, 0, 0);
    for (uint32_t i = 0; i < 8; i++)
        CHECK(hsri_mover_submit(w.mover, &move, HSRI_MOVE_BACKGROUND) != HSRI_NO_MOVE);
    CHECK(hsri_mover_submit(w.mover, &move, HSRI_MOVE_DEMAND) == HSRI_NO_MOVE);
    hsri_moved moved[8];
    CHECK(hsri_mover_collect(w.mover, moved, 8, 5000) > 0);
    CHECK(hsri_mover_submit(w.mover, &move, HSRI_MOVE_DEMAND) != HSRI_NO_MOVE);
    world_end(&w);
}

/* A hung read is reported in time, and again when it ends; the mover can go while it hangs. */
static void test_late(void)
{
    world w;
    world_init(&w, 2, 0, 50);
    fill(&w, 0);
    CHECK(do_move(&w, move_of(&w, HSRI_MOVE_WRITE, 0, 0)).status == HSR_OK);
    set_fault(&w, HSRI_IO_READ, (hsri_io_fault){ .delay_ms = 200 });
    hsri_moved moved = do_move(&w, move_of(&w, HSRI_MOVE_READ, 0, 1));
    CHECK(moved.status == HSR_E_IO && moved.sys_code == ETIMEDOUT && !moved.retired);
    CHECK(hsri_mover_collect(w.mover, &moved, 1, 5000) == 1 && moved.retired && moved.status == HSR_OK);

    /* Not collected in between: the end is what is reported. */
    hsri_move move = move_of(&w, HSRI_MOVE_READ, 0, 1);
    hsri_mover_submit(w.mover, &move, HSRI_MOVE_DEMAND);
    usleep(400000);
    CHECK(hsri_mover_collect(w.mover, &moved, 1, 5000) == 1 && moved.retired && moved.status == HSR_OK);
    CHECK(hsri_mover_collect(w.mover, &moved, 1, 100) == 0);

    set_fault(&w, HSRI_IO_READ, (hsri_io_fault){ .delay_ms = UINT32_MAX });
    hsri_mover_submit(w.mover, &move, HSRI_MOVE_DEMAND);
    CHECK(hsri_mover_collect(w.mover, &moved, 1, 5000) == 1 && !moved.retired);
    uint64_t start = hsri_now_ns();
    world_end(&w);
    CHECK(hsri_now_ns() - start < 3000000000u);
}

static world *left_behind[8];   /* whose memory a thread may still use: reachable at exit, no leak */

/* So can it while the thread itself hangs, making room in the file or giving it back. What then ends touches no memory of the owner. */
static void test_hung_room(uint32_t delay_ms)
{
    static uint32_t n_left;
    for (int action = HSRI_IO_ALLOCATE; action <= HSRI_IO_PUNCH; action++) {
        world *w = left_behind[n_left++] = malloc(sizeof *w);     /* the thread may outlive this */
        world_init(w, 2, 0, 50);
        const hsri_move move = move_of(w, HSRI_MOVE_WRITE, 0, 0);
        fill(w, 0);
        if (action == HSRI_IO_PUNCH)
            for (uint32_t i = 0; i < 10; i++)
                CHECK(do_move(w, (hsri_move){ .kind = HSRI_MOVE_WRITE, .extent = i, .memory = slot(w, 0), .slot_bytes = SLOT,
                                              .page_bytes = PAGE, .owner = i }).status == HSR_OK);
        set_fault(w, action, (hsri_io_fault){ .delay_ms = delay_ms });
        for (uint32_t i = 0; i < 10; i++)
            hsri_mover_submit(w->mover, action == HSRI_IO_ALLOCATE ? &move : &(hsri_move){ .kind = HSRI_MOVE_FREE, .extent = i },
                              HSRI_MOVE_DEMAND);
        usleep(20000);
        uint64_t start = hsri_now_ns();
        CHECK(hsri_mover_destroy(w->mover, 100, NULL) == HSR_E_IO);
        CHECK(hsri_now_ns() - start < 2000000000u);
        CHECK(rmdir(w->directory) == 0);
        free(w->slots);                   /* a sanitizer sees who reads it now */
    }
    usleep(delay_ms == UINT32_MAX ? 0 : 2 * delay_ms * 1000);
}

int main(void)
{
    test_round_trip();
    test_extents();
    test_priorities();
    test_writes_raised();
    test_full();
    test_late();
    test_hung_room(300);
    test_hung_room(UINT32_MAX);
    return CHECK_REPORT();
}
