/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/kernels.h"

void hsri_kernels_fill(hsri_kernels *k, int32_t isa)
{
    hsri_kernels_fill_ref(k);
#if defined(__x86_64__)
    if (isa >= HSR_ISA_AVX2) {
        hsri_kernels_fill_avx2(k);
    }
    if (isa >= HSR_ISA_AVX512) {
        hsri_kernels_fill_avx512(k);
    }
    if (isa >= HSR_ISA_AMX) {
        hsri_kernels_fill_amx(k);
    }
#else
    (void)isa;
#endif
    hsri_page_kernels_fill(&k->page, isa);
    hsri_sparse_kernels_fill(&k->sparse, isa);
}

void hsri_page_kernels_fill(hsri_page_kernels *k, int32_t isa)
{
    hsri_page_kernels_fill_ref(k);
#if defined(__x86_64__)
    if (isa >= HSR_ISA_AVX2) {
        hsri_page_kernels_fill_avx2(k);
    }
    if (isa >= HSR_ISA_AVX512) {
        hsri_page_kernels_fill_avx512(k);
    }
    if (isa >= HSR_ISA_AMX) {
        hsri_page_kernels_fill_amx(k);
    }
#else
    (void)isa;
#endif
}
