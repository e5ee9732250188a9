/* SPDX-License-Identifier: Apache-2.0 */
/* A host with a cold tier on a disk that fails when it is told to. The linker's --wrap sends the engine's making of its tiers through
 * here, which adds the fault hook of io/io.h: everything else is the public interface, and the real disk. */
#ifndef HSR_TESTS_COLD_HOST_H
#define HSR_TESTS_COLD_HOST_H

#include <pthread.h>

#define TINY_SHAPE
enum { TINY_LAYERS = 3, TINY_HEAD_DIM = 64, TINY_CONTEXT = 32768 };

#include "host.h"
#include "../unit/tiny_calibration.h"
#include "kv/tiers.h"

/* Set before an engine is made; NULL: a disk without faults. */
static const hsri_io_faults *cold_faults;

hsr_status __real_hsri_tiers_create(const hsri_tiers_opts *opts, hsri_tiers **tiers, hsr_error *err);
hsr_status __wrap_hsri_tiers_create(const hsri_tiers_opts *opts, hsri_tiers **tiers, hsr_error *err);

hsr_status __wrap_hsri_tiers_create(const hsri_tiers_opts *opts, hsri_tiers **tiers, hsr_error *err)
{
    hsri_tiers_opts with = *opts;
    with.mover.io.faults = cold_faults;
    return __real_hsri_tiers_create(&with, tiers, err);
}

/* A model that is calibrated, in files that are gone when this returns. */
static hsr_model *cold_model(void)
{
    char path[64] = "", calibration[64] = "";
    hsr_model *m = NULL;
    hsr_error err = HSR_ERROR_INIT;

    if (!tiny_model_write(path, 5) || !tiny_calibration_write(calibration) || hsr_model_open(path, &m, &err) < 0)
        fprintf(stderr, "no model: %s\n", err.message);
    else if (hsr_model_load_calibration(m, calibration, &err) < 0) {
        fprintf(stderr, "no calibration: %s\n", err.message);
        hsr_model_close(&m);
    }
    unlink(path);
    unlink(calibration);
    return m;
}

#endif
