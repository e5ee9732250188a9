/* SPDX-License-Identifier: Apache-2.0 */
#include "calibration.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/status.h"

#define VERSION 1u
#define TYPE_F32 0u

typedef struct reader {
    const hsri_container *file;
    const char *path;
    uint32_t    n_layers, n_kv_heads, head_dim;
    hsr_error  *err;
} reader;

static hsr_status check_text(const reader *r, const char *key, const char *want, uint64_t want_size, const char *otherwise)
{
    const char *value;
    uint64_t size;
    hsr_status st = hsri_container_string(r->file, key, &value, &size, r->err);
    HSRI_TRY(st);
    if (st == HSR_OK && size == want_size && memcmp(value, want, size) == 0)
        return HSR_OK;
    return hsri_fail(r->err, HSR_E_FORMAT, "%s: %s (%s)", r->path, otherwise, key);
}

static hsr_status check_number(const reader *r, const char *key, uint32_t want)
{
    uint32_t value = 0;
    hsr_status st = hsri_container_u32(r->file, key, &value, r->err);
    HSRI_TRY(st);
    if (st == HSR_OK && value == want)
        return HSR_OK;
    return hsri_fail(r->err, HSR_E_FORMAT, "%s: %s is %u, the model has %u", r->path, key, value, want);
}

static hsr_status check_identity(const reader *r, const char *fingerprint, uint64_t fingerprint_size)
{
    static const char architecture[] = "hisparse-calibration";
    uint32_t version = 0;

    HSRI_TRY(check_text(r, "general.architecture", architecture, sizeof architecture - 1, "this is no calibration file"));
    HSRI_TRY(hsri_container_u32(r->file, "hisparse.cal.version", &version, r->err));
    if (version != VERSION)
        return hsri_fail(r->err, HSR_E_VERSION, "%s: calibration format version %u, this library reads %u", r->path, version, VERSION);
    HSRI_TRY(check_number(r, "hisparse.cal.n_layers", r->n_layers));
    HSRI_TRY(check_number(r, "hisparse.cal.n_kv_heads", r->n_kv_heads));
    HSRI_TRY(check_number(r, "hisparse.cal.head_dim", r->head_dim));
    if (!fingerprint)
        return HSR_OK;
    return check_text(r, "hisparse.cal.fingerprint", fingerprint, fingerprint_size, "the calibration was made for other weights");
}

/* Copy [n_kv_heads][n] floats of a tensor into the records of a layer, `at` floats from each record's start. */
static hsr_status read_tensor(const reader *r, uint32_t layer, const char *name, uint64_t n, float *records, uint64_t at)
{
    char full[64];
    snprintf(full, sizeof full, "cal.%u.%s", layer, name);
    const hsri_tensor_info *t = hsri_container_tensor(r->file, full);
    if (!t)
        return hsri_fail(r->err, HSR_E_FORMAT, "%s: tensor '%s' is missing", r->path, full);
    if (t->type != TYPE_F32 || t->size != r->n_kv_heads * n * sizeof(float) || t->dims[0] != r->head_dim)
        return hsri_fail(r->err, HSR_E_FORMAT, "%s: tensor '%s' is not %u times %llu floats", r->path, full,
                         r->n_kv_heads, (unsigned long long)n);

    const float *from = t->data;
    for (uint64_t i = 0; i < r->n_kv_heads * n; i++)
        if (!isfinite(from[i]))
            return hsri_fail(r->err, HSR_E_FORMAT, "%s: tensor '%s' holds a value that is not finite", r->path, full);
    for (uint32_t head = 0; head < r->n_kv_heads; head++)
        memcpy(records + head * hsri_calibration_floats(r->head_dim) + at, from + head * n, n * sizeof *from);
    return HSR_OK;
}

static hsr_status read_layers(const reader *r, hsri_calibration *c)
{
    const uint64_t d = r->head_dim, per_layer = r->n_kv_heads * hsri_calibration_floats(r->head_dim);
    for (uint32_t i = 0; i < r->n_layers; i++) {
        float *records = c->floats + i * per_layer;
        HSRI_TRY(read_tensor(r, i, "basis_k", d * d, records, 0));
        HSRI_TRY(read_tensor(r, i, "basis_q", d * d, records, d * d));
        HSRI_TRY(read_tensor(r, i, "mean_k", d, records, 2 * d * d));
        HSRI_TRY(read_tensor(r, i, "mean_v", d, records, 2 * d * d + d));
    }
    return HSR_OK;
}

static hsr_status read_flags(const reader *r, hsri_calibration *c)
{
    uint32_t *flags = hsri_new_array(r->n_layers, sizeof *flags);
    uint64_t n = 0;
    if (!flags)
        return hsri_fail(r->err, HSR_E_NOMEM, "no memory for the calibration %s", r->path);
    hsr_status st = hsri_container_u32_array(r->file, "hisparse.cal.virtual", flags, r->n_layers, &n, r->err);
    if (st == HSR_AGAIN || (st == HSR_OK && n != r->n_layers))
        st = hsri_fail(r->err, HSR_E_FORMAT, "%s: hisparse.cal.virtual has %llu values, the model has %u layers", r->path,
                       (unsigned long long)n, r->n_layers);
    for (uint32_t i = 0; i < r->n_layers && st == HSR_OK; i++)
        c->virtual_helps[i] = flags[i] != 0;
    free(flags);
    return st;
}

static hsr_status read_all(const reader *r, const char *fingerprint, uint64_t fingerprint_size, hsri_calibration *c)
{
    HSRI_TRY(check_identity(r, fingerprint, fingerprint_size));
    c->n_layers = r->n_layers;
    c->n_floats = (uint64_t)r->n_layers * r->n_kv_heads * hsri_calibration_floats(r->head_dim);
    c->floats = hsri_new_aligned(c->n_floats, sizeof *c->floats);
    c->virtual_helps = hsri_new_array(r->n_layers, sizeof *c->virtual_helps);
    if (!c->floats || !c->virtual_helps)
        return hsri_fail(r->err, HSR_E_NOMEM, "no memory for the calibration %s", r->path);
    HSRI_TRY(read_layers(r, c));
    return read_flags(r, c);
}

hsr_status hsri_calibration_open(const char *path, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const char *fingerprint,
                                 uint64_t fingerprint_size, hsri_calibration **out, hsr_error *err)
{
    hsri_container *file;
    HSRI_TRY(hsri_container_open(path, &file, err));
    hsri_calibration *c = hsri_new_array(1, sizeof *c);
    const reader r = { file, path, n_layers, n_kv_heads, head_dim, err };
    hsr_status st = c ? read_all(&r, fingerprint, fingerprint_size, c)
                      : hsri_fail(err, HSR_E_NOMEM, "no memory for the calibration %s", path);
    hsri_container_close(file);
    if (st < 0) {
        hsri_calibration_close(c);
        return st;
    }
    *out = c;
    return HSR_OK;
}

void hsri_calibration_close(hsri_calibration *c)
{
    if (!c)
        return;
    free(c->floats);
    free(c->virtual_helps);
    free(c);
}
