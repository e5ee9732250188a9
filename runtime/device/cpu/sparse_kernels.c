/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/sparse_kernels.h"

#include "hisparse_rt/hisparse_rt.h"

void hsri_sparse_kernels_fill(hsri_sparse_kernels *k, int32_t isa)
{
    hsri_sparse_kernels_fill_ref(k);
    (void)isa;
}
