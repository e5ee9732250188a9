/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/sparse_kernels.h"

#include <stdbool.h>

#include "hisparse_rt/hisparse_rt.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Bytes multiplied and added in one instruction: same bits, less time, so not a level of its own. */
static bool has_vnni(void)
{
    unsigned a, b, c, d;

    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & bit_AVX512VNNI);
}
#else
static bool has_vnni(void) { return false; }
#endif

static void fill(hsri_sparse_kernels *k, int32_t isa, bool vnni)
{
    hsri_sparse_kernels_fill_ref(k);
    hsri_cluster_kernels_fill_ref(&k->cluster);
#if defined(__x86_64__)
    if (isa >= HSR_ISA_AVX2) {
        hsri_sparse_kernels_fill_avx2(k);
        hsri_cluster_kernels_fill_avx2(&k->cluster);
    }
    if (isa >= HSR_ISA_AVX512) {
        hsri_sparse_kernels_fill_avx512(k);
        hsri_cluster_kernels_fill_avx512(&k->cluster);
    }
    if (isa >= HSR_ISA_AVX512 && vnni) {
        hsri_sparse_kernels_fill_avx512vnni(k);
        hsri_cluster_kernels_fill_avx512vnni(&k->cluster);
    }
    if (isa >= HSR_ISA_AMX)
        hsri_cluster_kernels_fill_amx(&k->cluster);
#else
    (void)isa;
    (void)vnni;
#endif
}

void hsri_sparse_kernels_fill(hsri_sparse_kernels *k, int32_t isa) { fill(k, isa, has_vnni()); }

void hsri_sparse_kernels_fill_plain(hsri_sparse_kernels *k, int32_t isa) { fill(k, isa, false); }
