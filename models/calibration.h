/* SPDX-License-Identifier: Apache-2.0 */
/* A model's calibration, read from its `.hsrcal` file: docs/calibration-file.md. */
#ifndef HSRI_CALIBRATION_H
#define HSRI_CALIBRATION_H

#include <stdbool.h>

#include "container/container.h"
#include "device/kv_format.h"

typedef struct hsri_calibration {
    float   *floats;         /* hsri_calibration_record of every (layer, kv head) */
    uint64_t n_floats;
    bool    *virtual_helps;  /* [n_layers] */
    uint32_t n_layers;
} hsri_calibration;

/* The file must be for these sizes and, if fingerprint is not NULL, for the weights with that fingerprint. */
hsr_status hsri_calibration_open(const char *path, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const char *fingerprint,
                                 uint64_t fingerprint_size, hsri_calibration **calibration, hsr_error *err);
void hsri_calibration_close(hsri_calibration *calibration);   /* NULL accepted */

#endif
