/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2. */
#include "device/cpu/cluster_lanes.h"

void hsri_cluster_kernels_fill_avx2(hsri_cluster_kernels *k)
{
    *k = (hsri_cluster_kernels){ assign, score_clusters };
}
