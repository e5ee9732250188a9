/* SPDX-License-Identifier: Apache-2.0 */
/* How many pages and slabs of each kind a session of n tokens has, by the rules of windows alone. Admission, `plan` and the cache
 * itself count with these. */
#include "kv/cache_internal.h"

void hsri_kv_shape_init(hsri_kv_shape *shape, const hsri_pool *pool, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim)
{
    *shape = (hsri_kv_shape){
        .n_layers = n_layers,
        .n_kv_heads = n_kv_heads,
        .head_dim = head_dim,
        .view = {
            .pool_buf = hsri_pool_buf(pool),
            .n_layers = n_layers,
            .n_kv_heads = n_kv_heads,
            .head_dim = head_dim,
        },
    };
    for (int format = 0; format < HSRI_N_KV_FORMATS; format++)
        shape->view.slot_bytes[format] = hsri_kv_slot_bytes((hsri_kv_type)format, head_dim);
}

uint32_t hsri_kv_slot_bytes(hsri_kv_type format, uint32_t head_dim)
{
    return (uint32_t)hsri_min(hsri_round_up(hsri_page_bytes(format, head_dim), HSRI_SLOT_ALIGNMENT), UINT32_MAX);
}

uint32_t hsri_kv_slots_per_block(hsri_kv_type format, uint32_t head_dim)
{
    uint32_t bytes = hsri_kv_slot_bytes(format, head_dim);
    return bytes ? HSRI_BLOCK_BYTES / bytes : 0;
}

uint64_t hsri_encoded_end(const hsri_cache_opts *opts, uint64_t q, uint64_t window)
{
    uint64_t end = q + 1 > window ? q + 1 - window : 0;
    return hsri_max(hsri_min(end, q), opts->sink_pages);
}

uint64_t hsri_encoded_end_of(const hsri_cache_opts *opts, uint64_t n_tokens)
{
    return n_tokens ? hsri_encoded_end(opts, (n_tokens - 1) / HSRI_PAGE_TOKENS, opts->window_pages) : opts->sink_pages;
}

uint64_t hsri_index_rows(const hsri_cache_opts *opts, uint64_t end)
{
    return opts->index.per_slab && end > opts->sink_pages ? hsri_div_up(end, opts->index.per_slab) : 0;
}

uint64_t hsri_strip_rows(const hsri_cache_opts *opts, uint64_t end)
{
    return opts->index.code_bytes && end > opts->sink_pages ? hsri_div_up(end - opts->sink_pages, HSRI_STRIP_PAGES) : 0;
}

uint64_t hsri_seal_window(const hsri_cache_opts *opts)
{
    uint64_t back = hsri_pages_of(opts->rollback_tokens);
    return opts->window_pages + (opts->tiers ? hsri_max(back, 1) : back);
}

uint64_t hsri_cluster_rows(const hsri_cache_opts *opts, uint64_t end)
{
    return hsri_cluster_slot_bytes(&opts->index) ? hsri_segments(end, opts->sink_pages) : 0;
}

/* From the page of the last position on, a step of chunk_tokens touches at most (chunk + 127) / 64 pages. The seal window reaches back from
 * there, except that a page seals no earlier than one step after its encoding. */
static uint64_t step_pages(const hsri_cache_opts *opts)
{
    return (opts->chunk_tokens + 2ull * HSRI_PAGE_TOKENS - 1) / HSRI_PAGE_TOKENS;
}

uint64_t hsri_ring_pages(const hsri_cache_opts *opts)
{
    if (!hsri_seals_apart(opts))
        return UINT64_MAX;
    uint64_t window = hsri_seal_window(opts) - 1 + (opts->rollback_tokens == 0);
    return opts->sink_pages + window + step_pages(opts);
}

/* Strips go when their segment is sealed: at most one page of it is not. What a step encodes is ahead of what is sealed by what the seal
 * window is longer than the window, and by the step. */
uint64_t hsri_ring_strips(const hsri_cache_opts *opts)
{
    if (!hsri_cluster_slot_bytes(&opts->index))
        return UINT64_MAX;
    uint64_t ahead = hsri_seal_window(opts) - opts->window_pages + step_pages(opts);
    return hsri_div_up(HSRI_SEGMENT_PAGES - 1 + ahead, HSRI_STRIP_PAGES);
}

/* At most UINT64_MAX. */
static uint64_t slots_of(uint64_t rows, const hsri_kv_shape *shape)
{
    uint64_t slots;
    return __builtin_mul_overflow(rows, (uint64_t)shape->n_layers * shape->n_kv_heads, &slots) ? UINT64_MAX : slots;
}

hsri_kv_need hsri_kv_slots_for(const hsri_kv_shape *shape, const hsri_cache_opts *opts, uint64_t n_tokens)
{
    uint64_t end = hsri_encoded_end_of(opts, n_tokens);
    return (hsri_kv_need){
        .plain = slots_of(hsri_min(hsri_pages_of(n_tokens), hsri_ring_pages(opts)), shape),
        .sealed = hsri_seals_apart(opts) ? slots_of(end - opts->sink_pages, shape) : 0,
        .index = slots_of(hsri_index_rows(opts, end), shape),
        .strips = slots_of(hsri_min(hsri_strip_rows(opts, end), hsri_ring_strips(opts)), shape),
        .clusters = slots_of(hsri_cluster_rows(opts, end), shape),
    };
}

uint64_t hsri_kv_index_bytes(const hsri_index_shape *index, const hsri_kv_need *need)
{
    return need->index * HSRI_SLAB_BYTES + need->strips * hsri_strip_slot_bytes(index) + need->clusters * hsri_cluster_slot_bytes(index);
}

/* UINT64_MAX if no number would do. */
static uint64_t blocks_of(uint64_t slots, uint32_t slot_bytes)
{
    const uint64_t per_block = slot_bytes ? HSRI_BLOCK_BYTES / slot_bytes : 0;
    if (slots == 0)
        return 0;
    return per_block == 0 || slots == UINT64_MAX ? UINT64_MAX : hsri_div_up(slots, per_block);
}

uint64_t hsri_kv_blocks_for(const hsri_kv_shape *shape, const hsri_cache_opts *opts, uint64_t n_tokens)
{
    const hsri_kv_need need = hsri_kv_slots_for(shape, opts, n_tokens);
    const hsri_kv_type sealed_format = hsri_kv_is_plain(opts->format) ? opts->type : opts->format;
    const uint64_t blocks[] = {
        blocks_of(need.plain, hsri_kv_slot_bytes(opts->type, shape->head_dim)),
        blocks_of(need.sealed, hsri_kv_slot_bytes(sealed_format, shape->head_dim)),
        blocks_of(need.index, HSRI_SLAB_BYTES),
        blocks_of(need.strips, hsri_strip_slot_bytes(&opts->index)),
        blocks_of(need.clusters, hsri_cluster_slot_bytes(&opts->index)),
    };
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        if (__builtin_add_overflow(sum, blocks[i], &sum))
            return UINT64_MAX;
    return sum;
}

/* Pages that are encoded and not sealed yet, and twice what one head group reads of one layer, so that reading goes on while
 * computing; or once what a group of a prompt run does, of which every unit may be of another page. */
uint64_t hsri_kv_working_set(const hsri_kv_shape *shape, const hsri_cache_opts *opts)
{
    uint64_t pages = hsri_seal_window(opts) - opts->window_pages + step_pages(opts) + 1;
    return pages * shape->n_layers * shape->n_kv_heads + 2ull * HSRI_GROUP_TOKENS / HSRI_PAGE_TOKENS * shape->n_kv_heads;
}
