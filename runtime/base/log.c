/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/status.h"

#define LINE_SIZE 1024

hsr_status hsri_log_init(hsri_log *log, hsr_log_fn fn, void *user, int32_t level, hsr_error *err)
{
    int rc = pthread_mutex_init(&log->lock, NULL);
    if (rc)
        return hsri_fail_sys(err, HSR_E_NOMEM, rc, "cannot make the lock of the log");
    log->fn = fn;
    log->user = user;
    log->level = level;
    return HSR_OK;
}

void hsri_log_destroy(hsri_log *log)
{
    pthread_mutex_destroy(&log->lock);
}

void hsri_log_write(hsri_log *log, int32_t level, const char *format, ...)
{
    if (!log->fn || level > log->level)
        return;
    char line[LINE_SIZE];
    va_list args;
    va_start(args, format);
    int written = vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    if (written < 0)
        return;
    bool truncated = (size_t)written >= sizeof(line);
    size_t length = hsri_clean_text(line, truncated ? sizeof(line) - 1 : (size_t)written, truncated);
    pthread_mutex_lock(&log->lock);
    log->fn(log->user, level, line, length);
    pthread_mutex_unlock(&log->lock);
}
