/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2. */
#include "device/cpu/index_lanes.h"

void hsri_sparse_kernels_fill_avx2(hsri_sparse_kernels *k)
{
    fill_lanes(k);
}
