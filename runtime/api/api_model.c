/* SPDX-License-Identifier: Apache-2.0 */
/* Public entry points about the library itself and about models. */
#include <string.h>

#include "api/structs.h"
#include "base/status.h"
#include "model.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

const char *hsr_version(void)
{
    return TEXT(HSR_VERSION_MAJOR) "." TEXT(HSR_VERSION_MINOR) "." TEXT(HSR_VERSION_PATCH);
}

uint32_t hsr_abi_version(void) { return HSR_ABI_VERSION; }

const char *hsr_status_name(hsr_status status)
{
    static const char *const errors[] = {
        "HSR_OK", "HSR_E_INVALID", "HSR_E_NOMEM", "HSR_E_BUSY", "HSR_E_IO", "HSR_E_FORMAT",
        "HSR_E_FORKED", "HSR_E_UNSUPPORTED", "HSR_E_NOSPACE",
        "HSR_E_CONTEXT", "HSR_E_TOKEN", "HSR_E_NONFINITE", "HSR_E_CANCELLED", "HSR_E_STATE", "HSR_E_VERSION", "HSR_E_INTERNAL",
    };
    if (status == HSR_AGAIN)
        return "HSR_AGAIN";
    if (status > 0 || status < HSR_E_INTERNAL)
        return "HSR_E_UNKNOWN";
    return errors[-status];
}

hsr_status hsr_model_open(const char *path, hsr_model **model, hsr_error *err)
{
    hsri_clear(err);
    if (!model)
        return hsri_fail(err, HSR_E_INVALID, "hsr_model_open: model is NULL");
    *model = NULL;
    if (!path || !path[0])
        return hsri_fail(err, HSR_E_INVALID, "hsr_model_open: path is %s", path ? "empty" : "NULL");
    return hsri_model_open(path, model, err);
}

void hsr_model_close(hsr_model **model)
{
    if (!model || !*model)
        return;
    hsri_model_release(*model);
    *model = NULL;
}

hsr_status hsr_model_load_calibration(hsr_model *model, const char *path, hsr_error *err)
{
    hsri_clear(err);
    if (!model)
        return hsri_fail(err, HSR_E_INVALID, "hsr_model_load_calibration: model is NULL");
    if (!path || !path[0])
        return hsri_fail(err, HSR_E_INVALID, "hsr_model_load_calibration: path is %s", path ? "empty" : "NULL");
    return hsri_model_calibrate(model, path, err);
}

hsr_status hsr_model_get_info(const hsr_model *model, hsr_model_info *info, hsr_error *err)
{
    hsri_clear(err);
    if (!model)
        return hsri_fail(err, HSR_E_INVALID, "hsr_model_get_info: model is NULL");
    return hsri_struct_out(info, &model->info, sizeof model->info, "hsr_model_info", err);
}

hsr_status hsr_model_metadata(const hsr_model *model, const char *key, const char **value, uint64_t *size)
{
    if (!model || !key || !value || !size)
        return HSR_E_INVALID;
    *value = NULL;
    *size = 0;
    hsr_status st = hsri_container_string(model->container, key, value, size, NULL);
    return st == HSR_E_FORMAT ? HSR_AGAIN : st;   /* a key of another type is no string */
}
