/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the index in portable C. */
#include "device/cpu/index_encode.h"
#include "device/cpu/index_lanes.h"

void hsri_sparse_kernels_fill_ref(hsri_sparse_kernels *k)
{
    fill_lanes(k);
    k->encode = encode;
}
