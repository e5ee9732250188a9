/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2: the portable kernels built for 8 floats, but for the sketch's. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "device/cpu/index_encode.h"
#include "device/cpu/index_lanes.h"
#include "device/cpu/x86/lanes256.h"
#include "device/cpu/x86/sketch_avx2.h"

void hsri_sparse_kernels_fill_avx2(hsri_sparse_kernels *k)
{
    fill_lanes(k);
    k->score_sketch = score_sketch_256;
    k->encode = encode;
}
