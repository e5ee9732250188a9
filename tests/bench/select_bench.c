/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of the operation `select`, and of the kernel that it spends its time in: select_bench [THREADS [LEVEL]]. */
#include "base/clock.h"
#include "../unit/select_world.h"

/* A sequence of n pages, all of whose entries are copies of a few. */
static world *bench_world(const hsri_kernels *kernels, uint32_t n_heads, uint32_t n_4bit, uint32_t n_2bit, uint32_t n_pages)
{
    scenario s = { .name = "bench", .kind = HSRI_INDEX_SKETCH, .d = 64, .n_4bit = n_4bit, .n_2bit = n_2bit, .n_heads = n_heads, .sink = 1,
                   .window = 8, .selector = HSRI_SELECT_SKETCH, .slice_units = 1, .budget = 64, .flags = HSRI_SPARSE_VIRTUAL,
                   .pos = { 64 * 100 }, .reach = 3 };
    world   *w = world_new(&s, kernels);
    uint32_t n_slabs = n_pages / w->shape.per_slab + 1, n = n_slabs * LAYERS * KV_HEADS, slab_blocks = (n + SLABS - 1) / SLABS;
    uint32_t strip_bytes = hsri_strip_slot_bytes(&w->shape), per_block = HSRI_BLOCK_BYTES / strip_bytes;
    uint32_t n_strips = (strips_of(w, n_pages) + 1) * LAYERS * KV_HEADS;
    uint32_t first = LAYER * KV_HEADS;      /* of the small world, the first slab and the first strip are full */
    const uint8_t *slab = w->pool + (w->slabs[0][first] & 255) * HSRI_SLAB_BYTES;
    const uint8_t *strip = w->pool + HSRI_BLOCK_BYTES + (uint64_t)(w->strips[0][first] & 255) * strip_bytes;

    w->rows[0].pos = (n_pages + 8) * 64;
    w->most_pages = n_pages;
    free(w->slabs[0]);
    free(w->strips[0]);
    free(w->pages[0]);
    w->slabs[0] = calloc(n, sizeof(uint32_t));
    w->strips[0] = calloc(n_strips, sizeof(uint32_t));
    w->pages[0] = calloc((n_pages + 9) * LAYERS * KV_HEADS, sizeof(uint32_t));
    for (uint32_t i = 0; i < n; i++)
        w->slabs[0][i] = i / SLABS << 8 | i % SLABS;
    for (uint32_t i = 0; i < n_strips; i++)
        w->strips[0][i] = (slab_blocks + i / per_block) << 8 | i % per_block;
    w->pool_bytes = (slab_blocks + n_strips / per_block + 1ull) * HSRI_BLOCK_BYTES;
    uint8_t *pool = hsri_new_aligned(w->pool_bytes, 1);
    for (uint32_t i = 0; i < n; i++)
        memcpy(pool + (uint64_t)i * HSRI_SLAB_BYTES, slab, HSRI_SLAB_BYTES);
    for (uint32_t i = 0; i < n_strips; i++)
        memcpy(pool + (slab_blocks + i / per_block) * (uint64_t)HSRI_BLOCK_BYTES + (uint64_t)(i % per_block) * strip_bytes, strip,
               strip_bytes);
    free(w->pool);
    w->pool = pool;
    return w;
}

/* Nanoseconds of one call of the scoring kernel for each (token, kv head), the best of many passes over all pages. */
static double time_score(const world *w, const hsri_kernels *kernels, uint32_t n_pages)
{
    const uint8_t **entries = malloc(n_pages * sizeof *entries), **codes = malloc(n_pages * sizeof *codes);
    float          *mass = malloc(group_of(w) * n_pages * 4 * sizeof *mass), references[64] = { 0 };
    double          best = 1e30;

    for (uint32_t i = 0; i < n_pages; i++) {
        entries[i] = entry_of(w, 0, 0, w->sink + i);
        codes[i] = codes_of(w, 0, 0, w->sink + i);
    }
    for (uint32_t pass = 0; pass < 5 + 20000 / n_pages; pass++) {
        uint64_t start = hsri_now_ns();

        for (uint32_t p = 0; p < n_pages; p += HSRI_SCORE_PAGES) {
            hsri_score_args a = { .entries = entries + p, .codes = codes + p, .n_pages = (uint32_t)hsri_min(HSRI_SCORE_PAGES, n_pages - p),
                                  .n_heads = group_of(w), .shape = &w->shape,
                                  .scale = w->scale, .queries = w->queries, .rotated = w->queries, .reference = references,
                                  .mean_k = record_of(w, 0) + 2 * w->d * w->d, .mass = mass + 4 * p, .mass_stride = n_pages * 4 };

            kernels->sparse.score_sketch(&a);
        }
        best = fmin(best, (double)(hsri_now_ns() - start) / n_pages / 64);
    }
    free(entries);
    free(codes);
    free(mass);
    return best;
}

static double time_select(const world *w, int32_t isa, int32_t n_threads)
{
    rig          r = rig_open(n_threads, isa, false);
    uint32_t     n_pages = w->most_pages, d = w->d;
    hsri_kv_view kv = (load_world(&r, w), view_of(&r, w));
    hsri_seq     seq = { .sealed = upload(&r, w->pages[0], 4), .index = upload(&r, w->slabs[0],
                                                                               (n_pages / w->shape.per_slab + 1) * LAYERS * KV_HEADS * 4),
                         .strips = upload(&r, w->strips[0], (strips_of(w, n_pages) + 1) * LAYERS * KV_HEADS * 4),
                         .sink_pages = w->sink, .window_pages = w->window, .index_shape = w->shape };
    hsri_batch   batch = { .n_rows = 1, .n_seqs = 1, .rows = upload(&r, w->rows, sizeof *w->rows), .seqs = upload(&r, &seq, sizeof seq) };
    hsri_ref     queries = upload(&r, w->queries, w->n_heads * d * 4), acc = upload(&r, w->acc, w->n_heads * (d + 2) * 4);
    hsri_ref     settings = upload(&r, w->settings, sizeof *w->settings), picks = upload(&r, w->picks, sizeof *w->picks);
    hsri_ref     scratch = room(&r, hsri_select_scratch(1, 1, w->n_heads, KV_HEADS, d, n_pages + 9, w->shape.clusters));
    hsri_lists   lists = { .stride = w->stride, .n_picks = 1, .units = room(&r, KV_HEADS * w->stride * 4), .counts = room(&r, KV_HEADS * 4),
                           .virtual_part = room(&r, w->n_heads * (d + 2) * 4), .covered = room(&r, w->n_heads * 4) };
    double       best = 1e30;

    for (uint32_t pass = 0; pass < 5 + 20000 / n_pages; pass++) {
        uint64_t start = hsri_now_ns();

        r.dev->ops.select(r.q, &batch, &kv, LAYER, w->n_heads, w->scale, queries, queries, acc, settings, picks, scratch, &lists);
        CHECK(r.dev->wait(r.q, NULL) == HSR_OK);
        best = fmin(best, (double)(hsri_now_ns() - start) / n_pages / 64 / KV_HEADS);
    }
    rig_close(&r);
    return best;
}

int main(int argc, char **argv)
{
    static const struct { uint32_t n_4bit, n_2bit; } shapes[] = { { 24, 0 }, { 16, 16 }, { 8, 48 } };
    static const uint32_t tokens[] = { 8192, 32768, 131072 }, groups[] = { 3, 4, 7 };

    const int32_t n_threads = argc > 1 ? atoi(argv[1]) : 1;
    const int32_t isa = argc > 2 ? atoi(argv[2]) : (int32_t)hsri_min((uint64_t)hsri_cpu_isa(), HSR_ISA_AVX512);
    hsri_kernels  kernels;

    hsri_kernels_fill(&kernels, isa);
    printf("ns for each (token, kv head): scoring kernel on one thread, GB/s it reads; select on %d threads\n", (int)n_threads);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
            printf("%-10s %2u x 4 bit + %2u x 2 bit, %u heads:", hsri_isa_name(isa), shapes[s].n_4bit, shapes[s].n_2bit, groups[g]);
            for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
                world *w = bench_world(&kernels, groups[g] * KV_HEADS, shapes[s].n_4bit, shapes[s].n_2bit, tokens[t] / 64);
                double score = time_score(w, &kernels, tokens[t] / 64);

                printf("  %3uK %.2f (%.1f GB/s) %.2f", tokens[t] / 1024, score, (w->shape.entry_bytes + w->shape.code_bytes) / 64.0 / score,
                       time_select(w, isa, n_threads));
                fflush(stdout);
                world_free(w);
            }
            printf("\n");
        }
    }
    return 0;
}
