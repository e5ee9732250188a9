/* SPDX-License-Identifier: Apache-2.0 */
/* Saved sessions: docs/save-file.md.
 *   save_file.c  the file's header: who it is for, where everything is
 *   save.c       writing
 *   restore.c    reading
 * Calls that move much data hold the engine's lock for one batch of it at a time, so that other sessions go on in between. */
#ifndef HSRI_PERSIST_H
#define HSRI_PERSIST_H

#include "engine/engine.h"
#include "kv/cache_image.h"

#define HSRI_SAVE_VERSION 4u
#define HSRI_SAVE_ALIGNMENT 4096u
/* Moved at a time, or one row if that is more. */
#define HSRI_SAVE_BATCH (4u << 20)

typedef struct hsri_save_section {
    uint64_t offset, bytes;
    uint32_t crc32c, reserved;
} hsri_save_section;

/* The first bytes of the file; zeros up to HSRI_SAVE_ALIGNMENT. Little-endian. */
typedef struct hsri_save_header {
    char     magic[8];
    uint32_t version;
    uint32_t crc32c;                /* of the whole 4096 bytes with this field zero */
    uint64_t file_bytes;
    /* the model: nothing else can go on with these pages */
    char     source[128];           /* `hisparse.source`, cut to fit */
    uint64_t n_params;
    uint32_t weights_crc32c;        /* of some of the weights */
    uint32_t calibration_crc32c;    /* 0 if no page or index entry depends on it */
    uint32_t weight_dtype, vocab_size, hidden_size, n_layers, n_heads, n_kv_heads, head_dim;
    /* the session's options that are fixed at its creation, and its context */
    uint32_t page_tokens, kv_type, format;
    hsri_index_shape index;
    uint32_t window_size, sink_size, rollback_tokens, chunk_tokens, beyond_trained;
    uint32_t computed_with;         /* fingerprint of a profile: 0 dense, HSRI_SEVERAL_PROFILES */
    uint32_t slot_bytes[HSRI_N_IMAGE_PARTS];
    uint64_t context;
    /* its state */
    uint64_t n_tokens, n_computed, sampled_end, sealed;
    /* the rest of the file */
    hsri_save_section tokens;       /* int32[n_tokens] */
    hsri_save_section checks;       /* uint32: CRC32C of every slot below, in order */
    uint64_t parts[HSRI_N_IMAGE_PARTS];
} hsri_save_header;

/* What the session is and where its parts go, but for checksums. */
void hsri_save_describe(const hsr_session *session, const hsri_image *image, uint32_t chunk_tokens, hsri_save_header *header);

/* Offsets and sizes of everything, from n_tokens and the image. */
void hsri_save_lay_out(hsri_save_header *header, const hsri_image *image);

uint32_t hsri_save_header_crc(const hsri_save_header *header);

/* Could this engine's model go on with it? The failure names the field. */
hsr_status hsri_save_check_model(const hsri_save_header *header, const hsr_model *model, const char *path, hsr_error *err);

/* Slots of all parts, and their bytes. */
uint64_t hsri_image_slots(const hsri_image *image);
uint64_t hsri_image_bytes(const hsri_image *image);

/* Rows that are moved at a time. */
uint64_t hsri_save_batch_rows(const hsri_image *image, hsri_image_part part);
uint64_t hsri_save_batch_bytes(const hsri_image *image);

/* No lock held; the session is the caller's alone. */
hsr_status hsri_session_save(hsr_session *session, const char *path, int32_t (*progress)(void *, uint64_t, uint64_t), void *user,
                             hsr_error *err);
hsr_status hsri_session_restore(hsr_engine *engine, const char *path, const hsr_restore_opts *opts, hsr_session **session, hsr_error *err);

#endif
