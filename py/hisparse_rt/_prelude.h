/* SPDX-License-Identifier: Apache-2.0 */
/* What the generated extension module includes: the compiler checks _cdef.txt against it. */
#include <hisparse_rt/hisparse_rt.h>
