/* SPDX-License-Identifier: Apache-2.0 */
/* How fast cold files are read: io_bench DIRECTORY [MIB [SECONDS]]. Random reads past the page cache, as pages are read on
 * demand: 4 KiB with 64 under way and 64 KiB with 32, by each engine, and neighbouring 4 KiB pages, which are joined. */
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/clock.h"
#include "base/rng.h"
#include "../unit/check.h"
#include "io/extents.h"

typedef struct bench_case {
    const char *name;
    uint32_t    bytes, depth, run;   /* run: neighbours that are asked for together */
} bench_case;

static const bench_case cases[] = {
    { "4 KiB QD 64", 4096, 64, 1 }, { "64 KiB QD 32", 65536, 32, 1 }, { "16 x 4 KiB QD 32", 4096, 512, 16 },
};

enum { MOST_DEPTH = 512, MOST_BYTES = MOST_DEPTH * 4096 };

static uint8_t *memory;

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static bool fill(hsri_io *io, hsri_io_file *file, hsri_extents *x, uint64_t bytes)
{
    hsri_io_done done;
    uint32_t extent, accepted;
    hsr_error err = HSR_ERROR_INIT;
    for (uint64_t i = 0; i < (1u << 20); i += 8)
        memcpy(memory + i, &(uint64_t){ hsri_rng_u64(1, i) }, 8);
    for (uint64_t at = 0; at < bytes; at += HSRI_EXTENT_BYTES) {
        if (hsri_extents_take(x, &extent, &err) < 0) {
            fprintf(stderr, "%s\n", err.message);
            return false;
        }
        hsri_io_request r = {
            .file = file, .offset = (uint64_t)extent * HSRI_EXTENT_BYTES, .memory = memory, .bytes = HSRI_EXTENT_BYTES, .write = true,
        };
        if (hsri_io_submit(io, &r, 1, &accepted, &err) < 0 || hsri_io_wait(io, &done, 1, HSRI_IO_FOREVER) != 1 || done.status < 0)
            return false;
    }
    return true;
}

/* The next `run` neighbours, into the memory of the request slots given. */
static void ask(const bench_case *c, hsri_io_file *file, uint64_t bytes, uint64_t draw, const uint64_t *slots, hsri_io_request *r)
{
    uint64_t unit = (uint64_t)c->bytes * c->run, at = hsri_rng_u64(3, draw) % (bytes / unit) * unit;
    for (uint32_t i = 0; i < c->run; i++)
        r[i] = (hsri_io_request){
            .file = file, .offset = at + i * c->bytes, .memory = memory + slots[i] * c->bytes, .bytes = c->bytes, .tag = slots[i],
        };
}

static void measure(hsri_io *io, hsri_io_file *file, uint64_t bytes, const bench_case *c, double seconds)
{
    uint64_t slots[MOST_DEPTH], n_free = c->depth, draw = hsri_now_ns(), ended = 0;
    hsri_io_request r[MOST_DEPTH];
    hsri_io_done done[MOST_DEPTH];
    hsri_io_stats before, after;
    for (uint32_t i = 0; i < c->depth; i++)
        slots[i] = i;
    hsri_io_get_stats(io, &before);
    uint64_t start = hsri_now_ns();
    double cpu = cpu_seconds(), took = 0;
    while (took < seconds || n_free < c->depth) {
        uint32_t n = 0, accepted = 0;
        for (; took < seconds && n_free >= c->run; n += c->run, n_free -= c->run)
            ask(c, file, bytes, draw++, slots + n_free - c->run, r + n);
        CHECK(hsri_io_submit(io, r, n, &accepted, NULL) == HSR_OK && accepted == n);
        uint32_t got = hsri_io_wait(io, done, MOST_DEPTH, HSRI_IO_FOREVER);
        for (uint32_t i = 0; i < got; i++) {
            CHECK(done[i].status == HSR_OK);
            slots[n_free++] = done[i].tag;
        }
        ended += got;
        took = (double)(hsri_now_ns() - start) * 1e-9;
    }
    hsri_io_get_stats(io, &after);
    printf("  %-17s %8.1f MB/s %9.0f reads/s %9.0f operations/s %4.0f %% CPU\n", c->name, (double)ended * c->bytes / took * 1e-6,
        (double)ended / took, (double)(after.operations - before.operations) / took, (cpu_seconds() - cpu) / took * 100);
    fflush(stdout);
}

static int run_engine(const char *directory, hsri_io_kind kind, uint64_t bytes, double seconds)
{
    hsr_error err = HSR_ERROR_INIT;
    hsri_io *io = NULL;
    hsri_io_file *file = NULL;
    hsri_extents *x = NULL;
    const hsri_io_opts opts = { .kind = kind, .queue_depth = 64, .max_requests = MOST_DEPTH, .n_threads = 16 };
    if (hsri_io_create(&opts, &io, &err) < 0 || hsri_io_create_file(io, directory, &file, &err) < 0 ||
        hsri_extents_create(file, bytes, &x, &err) < 0 || !hsri_extents_reserve(x, bytes / HSRI_EXTENT_BYTES) ||
        !fill(io, file, x, bytes)) {
        fprintf(stderr, "%s\n", err.message);
        hsri_io_destroy(io, 1000, NULL);
        return 1;
    }
    printf("%s, %s, %llu MiB in %s\n", hsri_io_engine_name(io), hsri_io_is_direct(file) ? "direct" : "buffered",
        (unsigned long long)(bytes >> 20), directory);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        measure(io, file, bytes, &cases[i], seconds);
    hsri_extents_destroy(x);
    return hsri_io_destroy(io, 1000, NULL) < 0;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: io_bench DIRECTORY [MIB [SECONDS]]\n");
        return 2;
    }
    uint64_t bytes = (argc > 2 ? strtoull(argv[2], NULL, 10) : 1024) << 20;
    double seconds = argc > 3 ? strtod(argv[3], NULL) : 3;
    memory = aligned_alloc(4096, MOST_BYTES);
    if (!memory)
        return 1;
    int rc = run_engine(argv[1], HSRI_IO_URING, bytes, seconds);
    rc |= run_engine(argv[1], HSRI_IO_PREAD, bytes, seconds);
    free(memory);
    return rc || check_failures > 0;
}
