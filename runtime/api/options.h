/* SPDX-License-Identifier: Apache-2.0 */
/* Option structs checked field by field: what one field alone can get wrong. */
#ifndef HSRI_OPTIONS_H
#define HSRI_OPTIONS_H

#include "hisparse_rt/hisparse_rt.h"

#define HSRI_MAX_SESSIONS 65536 /* of an engine */

hsr_status hsri_check_engine_opts(const hsr_engine_opts *opts, hsr_error *err);
hsr_status hsri_check_session_opts(const hsr_session_opts *opts, hsr_error *err);

#endif
