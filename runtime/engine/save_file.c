/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/persist.h"

#include <stddef.h>
#include <string.h>

#include "base/array.h"
#include "base/crc32c.h"
#include "base/status.h"

_Static_assert(sizeof(hsri_save_header) <= HSRI_SAVE_ALIGNMENT, "the header is one block");
_Static_assert(offsetof(hsri_save_header, parts) + 8 * HSRI_N_IMAGE_PARTS == sizeof(hsri_save_header), "no padding at the end");

/* ---- whose it is ---- */

/* Enough of the weights to tell two models of the same shape apart, little enough to cost nothing. */
static uint32_t weights_crc(const hsr_model *model)
{
    static const char *const names[] = { "output_norm.weight", "rope.inv_freq", "token_embd.weight" };
    uint32_t crc = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const hsri_tensor_info *t = hsri_container_tensor(model->container, names[i]);
        if (t)
            crc = hsri_crc32c(crc, t->data, hsri_min(t->size, 64u << 10));
    }
    return crc;
}

static bool uses_calibration(const hsri_save_header *h)
{
    return h->format == HSRI_KV_TYPE_COMPACT || h->format == HSRI_KV_TYPE_VTQ || h->index.kind == HSRI_INDEX_SKETCH;
}

static uint32_t calibration_crc(const hsr_model *model)
{
    const hsri_calibration *c = model->calibration;
    return c ? hsri_crc32c(0, c->floats, c->n_floats * sizeof *c->floats) : 0;
}

static void describe_model(const hsr_model *model, hsri_save_header *h)
{
    const hsri_hparams *hp = &model->hp;
    const char *source;
    uint64_t size = 0;
    if (hsri_container_string(model->container, "hisparse.source", &source, &size, NULL) == HSR_OK)
        memcpy(h->source, source, hsri_min(size, sizeof h->source));
    h->n_params = model->info.n_params;
    h->weights_crc32c = weights_crc(model);
    h->weight_dtype = hp->weight_dtype;
    h->vocab_size = hp->vocab_size;
    h->hidden_size = hp->hidden;
    h->n_layers = hp->n_layers;
    h->n_heads = hp->n_heads;
    h->n_kv_heads = hp->n_kv_heads;
    h->head_dim = hp->head_dim;
    h->calibration_crc32c = uses_calibration(h) ? calibration_crc(model) : 0;
}

/* Fields that must be equal, and what they are called. */
#define FIELD(field, name) { offsetof(hsri_save_header, field), sizeof(((hsri_save_header *)0)->field), name }
static const struct { size_t offset, size; const char *name; } identity[] = {
    FIELD(page_tokens, "page size"), FIELD(n_layers, "layers"), FIELD(n_heads, "heads"), FIELD(n_kv_heads, "kv heads"),
    FIELD(head_dim, "head_dim"), FIELD(hidden_size, "hidden_size"), FIELD(vocab_size, "vocab_size"),
    FIELD(weight_dtype, "weight dtype"), FIELD(n_params, "number of parameters"),
    FIELD(source, "source (hisparse.source)"), FIELD(weights_crc32c, "weights"), FIELD(calibration_crc32c, "calibration"),
};

hsr_status hsri_save_check_model(const hsri_save_header *h, const hsr_model *model, const char *path, hsr_error *err)
{
    hsri_save_header mine = { .page_tokens = HSRI_PAGE_TOKENS, .format = h->format, .index = h->index };
    if (uses_calibration(h) && !model->calibration)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "%.200s: the session needs the model's calibration, and none was loaded", path);
    describe_model(model, &mine);
    for (size_t i = 0; i < sizeof identity / sizeof *identity; i++)
        if (memcmp((const char *)h + identity[i].offset, (const char *)&mine + identity[i].offset, identity[i].size) != 0)
            return hsri_fail(err, HSR_E_FORMAT, "%.200s: saved with another model: its %s differs", path, identity[i].name);
    return HSR_OK;
}

/* ---- what is in it ---- */

uint64_t hsri_image_slots(const hsri_image *image)
{
    uint64_t n = 0;
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++)
        n += image->rows[part] * image->per_row;
    return n;
}

uint64_t hsri_image_bytes(const hsri_image *image)
{
    uint64_t n = 0;
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++)
        n += image->rows[part] * image->per_row * image->slot_bytes[part];
    return n;
}

uint64_t hsri_save_batch_rows(const hsri_image *image, hsri_image_part part)
{
    if (image->rows[part] == 0)
        return 0;
    return hsri_min(hsri_max(HSRI_SAVE_BATCH / (image->per_row * image->slot_bytes[part]), 1), image->rows[part]);
}

uint64_t hsri_save_batch_bytes(const hsri_image *image)
{
    uint64_t most = HSRI_SAVE_ALIGNMENT;
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++)
        most = hsri_max(most, hsri_save_batch_rows(image, (hsri_image_part)part) * image->per_row * image->slot_bytes[part]);
    return most;
}

void hsri_save_lay_out(hsri_save_header *h, const hsri_image *image)
{
    uint64_t at = HSRI_SAVE_ALIGNMENT;
    h->tokens = (hsri_save_section){ .offset = at, .bytes = h->n_tokens * sizeof(int32_t) };
    at += hsri_round_up(h->tokens.bytes, HSRI_SAVE_ALIGNMENT);
    h->checks = (hsri_save_section){ .offset = at, .bytes = hsri_image_slots(image) * sizeof(uint32_t) };
    at += hsri_round_up(h->checks.bytes, HSRI_SAVE_ALIGNMENT);
    for (int part = 0; part < HSRI_N_IMAGE_PARTS; part++) {
        h->parts[part] = at;
        h->slot_bytes[part] = image->slot_bytes[part];
        at += image->rows[part] * image->per_row * image->slot_bytes[part];
    }
    h->file_bytes = at;
}

void hsri_save_describe(const hsr_session *s, const hsri_image *image, uint32_t chunk_tokens, hsri_save_header *h)
{
    *h = (hsri_save_header){
        .version = HSRI_SAVE_VERSION, .page_tokens = HSRI_PAGE_TOKENS, .kv_type = s->kv_type, .format = s->format, .index = s->index_shape,
        .window_size = (uint32_t)s->opts.window_size, .sink_size = (uint32_t)s->opts.sink_size,
        .rollback_tokens = (uint32_t)s->opts.rollback_tokens, .chunk_tokens = chunk_tokens,
        .beyond_trained = s->opts.beyond_trained != 0, .computed_with = s->computed_with, .context = s->context,
        .n_tokens = s->n_tokens, .n_computed = s->n_computed, .sampled_end = s->kept_end, .sealed = image->sealed,
    };
    memcpy(h->magic, "HSRSAVE", sizeof h->magic);
    describe_model(s->engine->model, h);
    hsri_save_lay_out(h, image);
}

uint32_t hsri_save_header_crc(const hsri_save_header *header)
{
    static const uint8_t zeros[HSRI_SAVE_ALIGNMENT - sizeof(hsri_save_header)];
    hsri_save_header h = *header;
    h.crc32c = 0;
    return hsri_crc32c(hsri_crc32c(0, &h, sizeof h), zeros, sizeof zeros);
}
