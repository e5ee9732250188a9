/* SPDX-License-Identifier: Apache-2.0 */
/* How KV pages are stored, and the index and calibration that go with them: sizes and layouts that the cache, the operations and
 * every back end agree on. docs/kv-formats.md and docs/sparse-attention.md explain why.
 *
 * d is head_dim everywhere. A unit is 16 consecutive tokens of a page: slices are 1, 2 or 4 units. */
#ifndef HSRI_KV_FORMAT_H
#define HSRI_KV_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

/* Tokens of a page, which is of one layer and kv head: the unit of residency, migration and I/O. */
#define HSRI_PAGE_TOKENS 64u
#define HSRI_UNIT_TOKENS 16u
#define HSRI_PAGE_UNITS  (HSRI_PAGE_TOKENS / HSRI_UNIT_TOKENS)
#define HSRI_PAGE_HEADER_BYTES 64u

/* Formats of pages. The first two are plain: written token by token. The others are made from a full plain page at once. */
typedef enum hsri_kv_type {
    HSRI_KV_TYPE_F32,
    HSRI_KV_TYPE_BF16,
    HSRI_N_KV_TYPES,                     /* plain ones */
    HSRI_KV_TYPE_INT8 = HSRI_N_KV_TYPES, /* int8 per channel about the page mean, K and V */
    HSRI_KV_TYPE_COMPACT,                /* keys in the calibrated basis, 6, 4 and 2 bits; values 4 bits */
    HSRI_KV_TYPE_VTQ,                    /* keys as compact; values by their page's distribution, 4/6 or 5 bits */
    HSRI_N_KV_FORMATS
} hsri_kv_type;

static inline bool hsri_kv_is_plain(hsri_kv_type type) { return type < HSRI_N_KV_TYPES; }

/* Header at the start of every page slot, written when the page is sealed. 64 bytes, little-endian. */
typedef struct hsri_page_header {
    uint32_t magic;      /* HSRI_PAGE_MAGIC */
    uint32_t crc32c;     /* of the slot's bytes behind this field; filled when the page is written home, else 0 */
    uint64_t lineage;
    uint32_t page;       /* index in the sequence */
    uint16_t layer;
    uint16_t head;
    uint16_t format;     /* hsri_kv_type */
    uint16_t head_dim;
    float    error;      /* relative encoding error |x - decoded| / |x| over K and V (Frobenius); 0 for plain formats */
    /* compact and vtq: numbers that the page needs beside its body (docs/kv-formats.md) */
    float    k_scale;    /* of the codes of the page's mean key */
    float    v_scale;    /* of the codes of its mean value */
    float    k_unit;     /* what the scale bytes of keys count in */
    float    v_unit;     /* of values */
    float    narrow;     /* vtq: scale of tokens of 4 bits, relative to those of 6 */
    uint32_t reserved;
    uint64_t wide;       /* vtq: tokens of 6 bits; 0: all have 5 */
} hsri_page_header;

#define HSRI_PAGE_MAGIC 0x50525348u /* "HSRP" */

/* Bytes of a page slot's content, header included:
 *   f32      K [d][64 tokens], V [64 tokens][d]
 *   bf16     K [d/2][64 tokens][2 d], V [32 token pairs][d][2 tokens]: AMX B tiles of q.K^T and of p.V
 *   int8     scales and means f32 [4][d] (K mean, K scale, V mean, V scale), codes K [d][64], V [64][d]
 *   compact, vtq   docs/kv-formats.md; compact is 4096 bytes at d 64, 8192 at d 128
 * 0 if the format does not exist at this head size (compact and vtq want a multiple of 16). */
uint64_t hsri_page_bytes(hsri_kv_type format, uint32_t head_dim);

/* Keys and values of a whole page slot as float[64][d]. `calibration` = the record of its layer and kv head, NULL if the format
 * needs none. Slow and simple: for tests, measuring, and the oracle selector. */
void hsri_page_decode(hsri_kv_type format, uint32_t head_dim, const uint8_t *slot, const float *calibration, float *k, float *v);

static inline uint64_t hsri_plain_page_bytes(hsri_kv_type type, uint32_t head_dim)
{
    return HSRI_PAGE_HEADER_BYTES + 2ull * HSRI_PAGE_TOKENS * head_dim * (type == HSRI_KV_TYPE_F32 ? 4u : 2u);
}

/* ---- calibration ---------------------------------------------------------------------------------------------- */

/* Per (layer, kv head), floats, in one device buffer: record (layer * n_kv_heads + head) of hsri_calibration_floats(d) floats.
 * With k' = k - mean of its page:  z = A^T k'  and  q' = B^T q  give  q.k' = q'.z  when all components are kept, because
 * A B^T = I. Components are ordered by how much of q.k' they explain. */
typedef struct hsri_calibration_record {
    const float *a;         /* [d][d], row i: contributions of k'[i] to z[0..d) */
    const float *b;         /* [d][d], row i: contributions of q[i] to q'[0..d) */
    const float *mean_k;    /* [d]: mean key and value of the calibration text, after rope */
    const float *mean_v;
} hsri_calibration_record;

static inline uint64_t hsri_calibration_floats(uint32_t d) { return 2ull * d * d + 2ull * d; }

static inline hsri_calibration_record hsri_calibration_at(const float *floats, uint32_t n_kv_heads, uint32_t layer,
                                                          uint32_t head, uint32_t d)
{
    const float *r = floats + ((uint64_t)layer * n_kv_heads + head) * hsri_calibration_floats(d);
    return (hsri_calibration_record){ r, r + (uint64_t)d * d, r + 2ull * d * d, r + 2ull * d * d + d };
}

/* ---- index ---------------------------------------------------------------------------------------------------- */

/* What the index holds of each sealed page; fixed per session. */
typedef enum hsri_index_kind {
    HSRI_INDEX_NONE,
    HSRI_INDEX_SKETCH,   /* means; the first components of z at 4 and 2 bits. Needs calibration */
    HSRI_INDEX_MINMAX,   /* means; per unit the smallest and largest value of each channel of K, int8 */
    HSRI_INDEX_GAUSSIAN, /* means; variance of each channel of K about the page mean, int8 */
    HSRI_N_INDEX_KINDS
} hsri_index_kind;

/* Entries live in slabs of 16 KiB, 64 to a block, contiguous per layer and kv head: entry of page p is number p % per_slab of
 * slab p / per_slab. Every entry starts with  float k_scale, v_scale; int8 mean_k[d], mean_v[d]  (value = code * scale). */
#define HSRI_SLAB_BYTES (16u << 10)

/* The components of a sketch live apart from its entry, in strips of 32 pages, counted from the first that is not a sink page: those of
 * page p are number (p - sink) % 32 of strip (p - sink) / 32. */
#define HSRI_STRIP_PAGES 32u

typedef struct hsri_index_shape {
    uint32_t kind;            /* hsri_index_kind */
    uint32_t head_dim;
    uint32_t n_4bit, n_2bit;  /* sketch components: multiples of 8 (4 bits) and of 16 (2 bits), n_4bit + n_2bit <= d; default 24 and 0 */
    uint32_t entry_bytes;     /* multiple of 64; 0 for NONE */
    uint32_t per_slab;
    uint32_t code_bytes;      /* sketch: components of a page, a multiple of 64. Otherwise 0 */
    uint32_t clusters;        /* sketch: nonzero if there are cluster records, too */
} hsri_index_shape;

/* Fill the sizes from kind, head_dim, n_4bit and n_2bit. */
void hsri_index_shape_fill(hsri_index_shape *shape);

/* Stride of the slots that strips are kept in, inside blocks of the pool; 0: there are none. */
uint32_t hsri_strip_slot_bytes(const hsri_index_shape *shape);

/* ---- clusters ------------------------------------------------------------------------------------------------- */

/* A segment is 128 pages, counted from the first that is not a sink page. Once all of them are indexed, its tokens are put into clusters by
 * their sketches, and a record of each (layer, kv head) says where those lie, and has the sketches once more, cluster by cluster. */
#define HSRI_SEGMENT_PAGES      128u
#define HSRI_SEGMENT_TOKENS     (HSRI_SEGMENT_PAGES * HSRI_PAGE_TOKENS)
#define HSRI_SEGMENT_STRIPS     (HSRI_SEGMENT_PAGES / HSRI_STRIP_PAGES)
#define HSRI_SEGMENT_CLUSTERS   960u
#define HSRI_SEGMENT_FAMILIES   64u     /* neighbouring clusters that have a common centre */
#define HSRI_CLUSTER_COMPONENTS 24u     /* at most, and never more than the sketch has */

/* Where the parts of a cluster record are; first those that are read of every segment:
 *   mean       float[d]: mean key of the segment
 *   family_scales  float[n]: component c of a family's centre is that of the segment's mean + (code - 7.5) family_scales[c]; the components
 *              behind are the mean's
 *   family_starts  uint16[65]: starts[firsts[f]]
 *   firsts     uint16[65]: family f has clusters [firsts[f], firsts[f + 1]); families may be empty
 *   family_spreads uint8[64]: centres of the clusters of family f are off its own by family_scales[c] family_spreads[f] / 16, as root of
 *              the mean square over its tokens and all components
 *   family_codes   of the families' centres, 4 bits: hsri_centre_at
 *   scales     float[n]: of clusters' centres, as family_scales
 *   token_scales   float[n]: component c of a token of cluster i is that of the centre + (code - 7.5) token_scales[c] spreads[i]
 *   starts     uint16[961]: cluster i has positions [starts[i], starts[i + 1]); clusters may be empty
 *   spreads    uint8[960]
 *   codes      of the clusters' centres
 *   positions  uint16[8192]: tokens of the segment, cluster by cluster, ascending within one
 *   tokens     4 bits, sets of 8 components: dword i of set s has components 8s + 4j + k of the token at position i in nibble j of byte k;
 *              sets are 8192 dwords */
typedef struct hsri_cluster_layout {
    uint32_t n;                   /* components: a multiple of 8 */
    uint32_t mean, family_scales, family_starts, firsts, family_spreads, family_codes, scales, token_scales, starts, spreads, codes;
    uint32_t positions, tokens, bytes;
} hsri_cluster_layout;

/* The byte that has component c of centre i, in its high half where c % 8 > 3: sets of 8 components as of tokens, but of 16 centres, whose
 * sets lie side by side. */
static inline uint32_t hsri_centre_at(uint32_t n, uint32_t i, uint32_t c) { return (i / 16 * (n / 8) + c / 8) * 64 + i % 16 * 4 + c % 4; }

hsri_cluster_layout hsri_cluster_layout_of(const hsri_index_shape *shape);

/* Of a record that comes from outside: does it name only tokens and clusters of its segment? */
bool hsri_cluster_record_is_sound(const hsri_index_shape *shape, const uint8_t *record);

/* Stride of the slots that records are kept in, inside blocks of the pool; 0: there are none. */
uint32_t hsri_cluster_slot_bytes(const hsri_index_shape *shape);

/* Whole segments in the first n_pages pages. */
static inline uint64_t hsri_segments(uint64_t n_pages, uint64_t sink_pages)
{
    return n_pages > sink_pages ? (n_pages - sink_pages) / HSRI_SEGMENT_PAGES : 0;
}

#endif
