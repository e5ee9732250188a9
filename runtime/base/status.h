/* SPDX-License-Identifier: Apache-2.0 */
/* Statuses with a text: every failure is reported once, where it is found, into the caller's hsr_error. */
#ifndef HSRI_STATUS_H
#define HSRI_STATUS_H

#include <stdbool.h>
#include <stddef.h>

#include "hisparse_rt/hisparse_rt.h"

/* Write the text of a failure into err (NULL accepted) and return status, so that callers can say
 * `return hsri_fail(err, HSR_E_FORMAT, "...", ...)`. Cuts at a UTF-8 boundary; bytes that are not UTF-8 become '?', and so
 * do control characters: a name out of a hostile file must not forge lines or drive a terminal. Arguments may point into
 * err->message, to put words around an earlier failure. */
__attribute__((format(printf, 3, 4)))
hsr_status hsri_fail(hsr_error *err, hsr_status status, const char *format, ...);

/* The same for a refused system call: records sys_code and appends the system's own text for it. */
__attribute__((format(printf, 4, 5)))
hsr_status hsri_fail_sys(hsr_error *err, hsr_status status, int sys_code, const char *format, ...);

/* Forget an earlier failure: API entries call it first. */
void hsri_clear(hsr_error *err);

/* Make n bytes of text printable in place, as hsri_fail does, and end them with NUL at text[n] or before. `truncated`: the
 * text was cut to fit, so drop a last character that is incomplete. Returns the new length. */
size_t hsri_clean_text(char *text, size_t n, bool truncated);

#define HSRI_TRY(call) do { hsr_status try_status_ = (call); if (try_status_ < 0) return try_status_; } while (0)

/* HSR_E_INVALID, naming the option and what is allowed, unless lo <= value <= hi. */
hsr_status hsri_in_range(const char *name, int32_t value, int32_t lo, int32_t hi, hsr_error *err);

#endif
