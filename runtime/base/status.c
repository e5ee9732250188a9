/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE 1
#include "base/status.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define TEXT_SIZE sizeof(((hsr_error *)0)->message)

/* Bytes of the UTF-8 character at text[0], 0 if there is none. *cut tells that the n bytes end inside a valid one.
 * Overlong forms, surrogates and values above U+10FFFF are not characters. */
static size_t utf8_length(const unsigned char *text, size_t n, bool *cut)
{
    unsigned first = text[0], second_low = 0x80, second_high = 0xBF;
    size_t length;
    *cut = false;
    if (first < 0x80)
        return 1;
    if (first >= 0xC2 && first <= 0xDF)
        length = 2;
    else if (first >= 0xE0 && first <= 0xEF)
        length = 3;
    else if (first >= 0xF0 && first <= 0xF4)
        length = 4;
    else
        return 0;
    if (first == 0xE0)
        second_low = 0xA0;
    else if (first == 0xED)
        second_high = 0x9F;
    else if (first == 0xF0)
        second_low = 0x90;
    else if (first == 0xF4)
        second_high = 0x8F;
    for (size_t i = 1; i < length; i++) {
        if (i == n) {
            *cut = true;
            return 0;
        }
        if (text[i] < (i == 1 ? second_low : 0x80) || text[i] > (i == 1 ? second_high : 0xBF))
            return 0;
    }
    return length;
}

size_t hsri_clean_text(char *text, size_t n, bool truncated)
{
    unsigned char *bytes = (unsigned char *)text;
    for (size_t i = 0; i < n; ) {
        bool cut;
        size_t length = utf8_length(bytes + i, n - i, &cut);
        if (cut && truncated) {
            n = i;
        } else if (length == 0 || bytes[i] < 0x20 || bytes[i] == 0x7F) {
            bytes[i++] = '?';
        } else {
            i += length;
        }
    }
    text[n] = '\0';
    return n;
}

/* strerror_r comes in two forms, by the C library and its mode; these make one of them. */
__attribute__((unused)) static const char *posix_text(int rc, const char *buffer) { return rc ? "unknown error" : buffer; }
__attribute__((unused)) static const char *gnu_text(const char *text, const char *buffer) { (void)buffer; return text; }
#define SYSTEM_TEXT(code, buffer) \
    _Generic(strerror_r(code, buffer, sizeof(buffer)), int: posix_text, char *: gnu_text)(strerror_r(code, buffer, sizeof(buffer)), buffer)

/* The caller may have been built against a header whose hsr_error is shorter: write only what it has. */
static bool has_field(const hsr_error *err, size_t end) { return err && err->struct_size >= end; }
#define HAS(err, field) has_field(err, offsetof(hsr_error, field) + sizeof((err)->field))

static void set_numbers(hsr_error *err, hsr_status status, int sys_code)
{
    if (HAS(err, status))
        err->status = status;
    if (HAS(err, sys_code))
        err->sys_code = sys_code;
}

static size_t message_room(const hsr_error *err)
{
    size_t start = offsetof(hsr_error, message);
    if (!err || err->struct_size <= start)
        return 0;
    return err->struct_size - start < TEXT_SIZE ? err->struct_size - start : TEXT_SIZE;
}

/* The text is made aside, since the arguments may point into err->message itself. */
static void set_message(hsr_error *err, int sys_code, const char *format, va_list args)
{
    char text[TEXT_SIZE], system_buffer[128];
    size_t room = message_room(err);
    if (!room)
        return;
    int written = vsnprintf(text, room, format, args);
    size_t length = written < 0 ? 0 : (size_t)written;
    if (sys_code && length < room) {
        written = snprintf(text + length, room - length, ": %s", SYSTEM_TEXT(sys_code, system_buffer));
        length += written < 0 ? 0 : (size_t)written;
    }
    bool truncated = length >= room;
    length = hsri_clean_text(text, truncated ? room - 1 : length, truncated);
    memcpy(err->message, text, length + 1);
}

hsr_status hsri_fail(hsr_error *err, hsr_status status, const char *format, ...)
{
    va_list args;
    set_numbers(err, status, 0);
    va_start(args, format);
    set_message(err, 0, format, args);
    va_end(args);
    return status;
}

hsr_status hsri_fail_sys(hsr_error *err, hsr_status status, int sys_code, const char *format, ...)
{
    va_list args;
    set_numbers(err, status, sys_code);
    va_start(args, format);
    set_message(err, sys_code, format, args);
    va_end(args);
    return status;
}

void hsri_clear(hsr_error *err)
{
    set_numbers(err, HSR_OK, 0);
    if (message_room(err))
        err->message[0] = '\0';
}

hsr_status hsri_in_range(const char *name, int32_t value, int32_t lo, int32_t hi, hsr_error *err)
{
    if (value >= lo && value <= hi)
        return HSR_OK;
    return hsri_fail(err, HSR_E_INVALID, "%s is %d, allowed are %d to %d", name, value, lo, hi);
}
