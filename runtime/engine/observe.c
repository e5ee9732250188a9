/* SPDX-License-Identifier: Apache-2.0 */
/* Keys and values of a session read back from its pages, for calibration and measuring. */
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"
#include "engine/engine.h"

typedef struct page_reader {
    hsr_session *session;
    hsri_seq     seq;
    uint8_t     *slot;
    float       *k, *v;     /* [64][d] */
} page_reader;

static hsr_status read_page(page_reader *r, uint64_t page, uint32_t layer, uint32_t head, hsr_error *err)
{
    const hsr_session *s = r->session;
    hsr_engine *e = s->engine;
    const hsri_hparams *hp = &e->model->hp;
    const bool plain = hsri_page_is_plain((uint32_t)page, (uint32_t)(s->n_computed / HSRI_PAGE_TOKENS), r->seq.sink_pages, r->seq.window_pages);
    const hsri_kv_type format = (hsri_kv_type)(plain ? r->seq.kv_type : r->seq.format);
    const uint64_t at = (page * hp->n_layers + layer) * hp->n_kv_heads + head;
    uint32_t entry;

    e->dev->copy_out(e->queue, &entry, hsri_at(plain ? r->seq.table : r->seq.sealed, at * sizeof entry), sizeof entry);
    HSRI_TRY(e->dev->wait(e->queue, err));
    const hsri_ref slot = { e->shape.view.pool_buf, 0, (uint64_t)(entry >> 8) * HSRI_BLOCK_BYTES + (uint64_t)(entry & 255) * e->shape.view.slot_bytes[format] };
    e->dev->copy_out(e->queue, r->slot, slot, hsri_page_bytes(format, hp->head_dim));
    HSRI_TRY(e->dev->wait(e->queue, err));

    const hsri_calibration *c = e->model->calibration;
    hsri_page_decode(format, hp->head_dim, r->slot, c ? c->floats + ((uint64_t)layer * hp->n_kv_heads + head) * hsri_calibration_floats(hp->head_dim) : NULL,
                     r->k, r->v);
    return HSR_OK;
}

static hsr_status read_layer(page_reader *r, int32_t what, uint32_t layer, uint64_t first, uint64_t n, float *out, hsr_error *err)
{
    const hsri_hparams *hp = &r->session->engine->model->hp;
    const uint32_t d = hp->head_dim;

    for (uint64_t pos = first, end; pos < first + n; pos = end) {
        end = hsri_min(first + n, (pos / HSRI_PAGE_TOKENS + 1) * HSRI_PAGE_TOKENS);
        for (uint32_t head = 0; head < hp->n_kv_heads; head++) {
            HSRI_TRY(read_page(r, pos / HSRI_PAGE_TOKENS, layer, head, err));
            const float *from = what == HSR_OBSERVE_KEYS ? r->k : r->v;
            for (uint64_t t = pos; t < end; t++)
                memcpy(out + ((t - first) * hp->n_kv_heads + head) * d, from + t % HSRI_PAGE_TOKENS * d, d * sizeof *out);
        }
    }
    return HSR_OK;
}

hsr_status hsri_session_observe(hsr_session *s, int32_t what, int32_t layer, uint64_t first, uint64_t n, float *out, hsr_error *err)
{
    const uint32_t d = s->engine->model->hp.head_dim;
    page_reader r = { .session = s };
    hsri_cache_fill_seq(s->cache, &r.seq);
    r.slot = hsri_new_aligned(1, hsri_max(hsri_page_bytes((hsri_kv_type)r.seq.kv_type, d), hsri_page_bytes((hsri_kv_type)r.seq.format, d)));
    r.k = hsri_new_array(2ull * HSRI_PAGE_TOKENS * d, sizeof *r.k);
    r.v = r.k ? r.k + HSRI_PAGE_TOKENS * d : NULL;

    hsr_status st = r.slot && r.k ? read_layer(&r, what, (uint32_t)layer, first, n, out, err) : hsri_fail(err, HSR_E_NOMEM, "no memory to read pages");
    free(r.slot);
    free(r.k);
    return st;
}
