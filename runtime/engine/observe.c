/* SPDX-License-Identifier: Apache-2.0 */
/* Keys and values of a session read back from its pages, for calibration and measuring. */
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"
#include "engine/engine.h"
#include "kv/cache_image.h"

typedef struct page_reader {
    hsr_session *session;
    uint8_t     *slot;
    float       *k, *v;     /* [64][d] */
} page_reader;

static hsr_status read_page(page_reader *r, uint64_t page, uint32_t layer, uint32_t head, hsr_error *err)
{
    const hsr_engine *e = r->session->engine;
    const hsri_hparams *hp = &e->model->hp;
    const hsri_calibration *c = e->model->calibration;
    const float *record = c ? c->floats + ((uint64_t)layer * hp->n_kv_heads + head) * hsri_calibration_floats(hp->head_dim) : NULL;
    hsri_kv_type format;

    HSRI_TRY(hsri_cache_read_page(r->session->cache, e->queue, (uint32_t)page, layer, head, r->slot, &format, err));
    hsri_page_decode(format, hp->head_dim, r->slot, record, r->k, r->v);
    return HSR_OK;
}

/* Either of keys and values may be NULL. */
static hsr_status read_layer(page_reader *r, uint32_t layer, uint64_t first, uint64_t n, float *keys, float *values, hsr_error *err)
{
    const hsri_hparams *hp = &r->session->engine->model->hp;
    const uint32_t d = hp->head_dim;

    for (uint64_t pos = first, end; pos < first + n; pos = end) {
        end = hsri_min(first + n, (pos / HSRI_PAGE_TOKENS + 1) * HSRI_PAGE_TOKENS);
        for (uint32_t head = 0; head < hp->n_kv_heads; head++) {
            HSRI_TRY(read_page(r, pos / HSRI_PAGE_TOKENS, layer, head, err));
            for (uint64_t t = pos; t < end; t++) {
                const uint64_t to = ((t - first) * hp->n_kv_heads + head) * d, from = t % HSRI_PAGE_TOKENS * d;
                if (keys)
                    memcpy(keys + to, r->k + from, d * sizeof *keys);
                if (values)
                    memcpy(values + to, r->v + from, d * sizeof *values);
            }
        }
    }
    return HSR_OK;
}

hsr_status hsri_session_read(hsr_session *s, uint32_t layer, uint64_t first, uint64_t n, float *keys, float *values, hsr_error *err)
{
    const uint32_t d = s->engine->model->hp.head_dim;
    page_reader r = { .session = s };
    r.slot = hsri_new_aligned(1, hsri_max(hsri_kv_slot_bytes(s->kv_type, d), hsri_kv_slot_bytes(s->format, d)));
    r.k = hsri_new_array(2ull * HSRI_PAGE_TOKENS * d, sizeof *r.k);
    r.v = r.k ? r.k + HSRI_PAGE_TOKENS * d : NULL;

    hsr_status st = r.slot && r.k ? read_layer(&r, layer, first, n, keys, values, err)
                                  : hsri_fail(err, HSR_E_NOMEM, "no memory to read pages");
    free(r.slot);
    free(r.k);
    return st;
}

hsr_status hsri_session_observe(hsr_session *s, int32_t what, int32_t layer, uint64_t first, uint64_t n, float *out, hsr_error *err)
{
    const bool keys = what == HSR_OBSERVE_KEYS;
    return hsri_session_read(s, (uint32_t)layer, first, n, keys ? out : NULL, keys ? NULL : out, err);
}
