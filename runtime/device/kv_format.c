/* SPDX-License-Identifier: Apache-2.0 */
#include "device/kv_format.h"

#include <string.h>

#include "base/array.h"

static uint64_t int8_bytes(uint32_t d) { return HSRI_PAGE_HEADER_BYTES + 4ull * d * sizeof(float) + 2ull * HSRI_PAGE_TOKENS * d; }

/* Key codes of 3d/16 components at 6 bits, 5d/16 at 4 and d/2 at 2; values at 4 bits; a log scale of one byte for each channel of
 * both; both page means as int8. */
static uint64_t compact_bytes(uint32_t d)
{
    uint64_t key_bits = 3 * d / 16 * 6ull + 5 * d / 16 * 4ull + d / 2 * 2ull;
    return HSRI_PAGE_HEADER_BYTES + HSRI_PAGE_TOKENS * key_bits / 8 + HSRI_PAGE_TOKENS * d / 2 + 2ull * d + 2ull * d;
}

/* Values at up to 5 bits instead of 4. */
static uint64_t vtq_bytes(uint32_t d) { return compact_bytes(d) + HSRI_PAGE_TOKENS * d / 8; }

uint64_t hsri_page_bytes(hsri_kv_type format, uint32_t d)
{
    switch (format) {
    case HSRI_KV_TYPE_F32:
    case HSRI_KV_TYPE_BF16:    return hsri_plain_page_bytes(format, d);
    case HSRI_KV_TYPE_INT8:    return int8_bytes(d);
    case HSRI_KV_TYPE_COMPACT: return d % 16 ? 0 : compact_bytes(d);
    case HSRI_KV_TYPE_VTQ:     return d % 16 ? 0 : vtq_bytes(d);
    default:                   return 0;
    }
}

static uint32_t entry_bytes(const hsri_index_shape *shape)
{
    uint32_t d = shape->head_dim, means = 2 * sizeof(float) + 2 * d, bytes;

    switch (shape->kind) {
    case HSRI_INDEX_SKETCH:   bytes = means + 2 * (shape->n_4bit + shape->n_2bit); break;
    case HSRI_INDEX_MINMAX:   bytes = means + 2 * HSRI_PAGE_UNITS * d + sizeof(float); break;
    case HSRI_INDEX_GAUSSIAN: bytes = means + d + sizeof(float); break;
    default:                  return 0;
    }
    return (uint32_t)hsri_round_up(bytes, 64);
}

void hsri_index_shape_fill(hsri_index_shape *shape)
{
    shape->entry_bytes = entry_bytes(shape);
    shape->per_slab = shape->entry_bytes ? HSRI_SLAB_BYTES / shape->entry_bytes : 0;
    shape->code_bytes = shape->kind == HSRI_INDEX_SKETCH ? HSRI_PAGE_TOKENS * (shape->n_4bit * 4 + shape->n_2bit * 2) / 8 : 0;
}

uint32_t hsri_strip_slot_bytes(const hsri_index_shape *shape)
{
    return (uint32_t)hsri_round_up(HSRI_STRIP_PAGES * shape->code_bytes, 4096);
}

hsri_cluster_layout hsri_cluster_layout_of(const hsri_index_shape *shape)
{
    hsri_cluster_layout at = { .n = (uint32_t)hsri_min(HSRI_CLUSTER_COMPONENTS, shape->n_4bit + shape->n_2bit) };

    at.family_scales = (uint32_t)(shape->head_dim * sizeof(float));
    at.family_starts = at.family_scales + at.n * (uint32_t)sizeof(float);
    at.firsts = at.family_starts + (HSRI_SEGMENT_FAMILIES + 1) * (uint32_t)sizeof(uint16_t);
    at.family_spreads = at.firsts + (HSRI_SEGMENT_FAMILIES + 1) * (uint32_t)sizeof(uint16_t);
    at.family_codes = (uint32_t)hsri_round_up(at.family_spreads + HSRI_SEGMENT_FAMILIES, 64);
    at.scales = at.family_codes + HSRI_SEGMENT_FAMILIES * at.n / 2;
    at.token_scales = at.scales + at.n * (uint32_t)sizeof(float);
    at.starts = at.token_scales + at.n * (uint32_t)sizeof(float);
    at.spreads = at.starts + (HSRI_SEGMENT_CLUSTERS + 1) * (uint32_t)sizeof(uint16_t);
    at.codes = (uint32_t)hsri_round_up(at.spreads + HSRI_SEGMENT_CLUSTERS, 64);
    at.positions = at.codes + HSRI_SEGMENT_CLUSTERS * at.n / 2;
    at.tokens = at.positions + HSRI_SEGMENT_TOKENS * (uint32_t)sizeof(uint16_t);
    at.bytes = at.tokens + HSRI_SEGMENT_TOKENS * at.n / 2;
    return at;
}

/* Do n numbers rise, none beyond the most? */
static bool rises(const uint8_t *numbers, uint32_t n, uint32_t most)
{
    uint16_t last = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint16_t number;

        memcpy(&number, numbers + i * sizeof number, sizeof number);
        if (number < last || number > most)
            return false;
        last = number;
    }
    return true;
}

bool hsri_cluster_record_is_sound(const hsri_index_shape *shape, const uint8_t *record)
{
    const hsri_cluster_layout at = hsri_cluster_layout_of(shape);

    if (!rises(record + at.starts, HSRI_SEGMENT_CLUSTERS + 1, HSRI_SEGMENT_TOKENS) ||
        !rises(record + at.firsts, HSRI_SEGMENT_FAMILIES + 1, HSRI_SEGMENT_CLUSTERS) ||
        !rises(record + at.family_starts, HSRI_SEGMENT_FAMILIES + 1, HSRI_SEGMENT_TOKENS))
        return false;
    for (uint32_t i = 0; i < HSRI_SEGMENT_TOKENS; i++) {
        uint16_t token;

        memcpy(&token, record + at.positions + i * sizeof token, sizeof token);
        if (token >= HSRI_SEGMENT_TOKENS)
            return false;
    }
    return true;
}

uint32_t hsri_cluster_slot_bytes(const hsri_index_shape *shape)
{
    return shape->kind == HSRI_INDEX_SKETCH && shape->clusters ? (uint32_t)hsri_round_up(hsri_cluster_layout_of(shape).bytes, 4096) : 0;
}
