/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of clusters in portable C. */
#include "device/cpu/cluster_lanes.h"

void hsri_cluster_kernels_fill_ref(hsri_cluster_kernels *k)
{
    *k = (hsri_cluster_kernels){ assign, score_clusters, score_families, score_members, score_votes };
}
