/* SPDX-License-Identifier: Apache-2.0 */
/* Time from the start of the process to its first token: 32 prompt ids, two threads. Prints milliseconds since main began for each
 * stage, and since the process was started, loading of the library included, for the whole.
 *
 *   cc -O2 first_token.c $(python -m hisparse_rt --cflags --libs) -o first_token && ./first_token MODEL.hsr
 */
#define _GNU_SOURCE 1
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <hisparse_rt/hisparse_rt.h>

static double now_ms(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* When the system started this process, on the clock that counts from boot; to 10 ms. The 20 fields before it hold no spaces once
 * the name in brackets is passed. */
static double process_start_ms(void)
{
    char line[1024], *at = line;
    FILE *f = fopen("/proc/self/stat", "r");
    size_t n = f ? fread(line, 1, sizeof line - 1, f) : 0;
    if (f)
        fclose(f);
    line[n] = '\0';
    for (char *c = line; *c; c++)
        if (*c == ')')
            at = c + 1;
    for (int field = 0; field < 20 && *at; at++)
        field += *at == ' ';
    return 1e3 * strtod(at, NULL) / (double)sysconf(_SC_CLK_TCK);
}

static int failed(const char *what, const hsr_error *err)
{
    fprintf(stderr, "%s: %s: %s\n", what, hsr_status_name(err->status), err->message);
    return 1;
}

int main(int argc, char **argv)
{
    const double start = now_ms(CLOCK_MONOTONIC);
    hsr_error err = HSR_ERROR_INIT;
    hsr_model *model = NULL;
    hsr_engine *engine = NULL;
    hsr_session *session = NULL;
    hsr_engine_opts opts;
    hsr_event event = { .struct_size = sizeof event };
    int32_t ids[32];

    if (argc != 2)
        return fprintf(stderr, "usage: first_token MODEL.hsr\n") > 0;
    for (int i = 0; i < 32; i++)
        ids[i] = 5 + 9 * i;
    hsr_engine_opts_init(&opts, sizeof opts);
    opts.n_threads = 2;

    if (hsr_model_open(argv[1], &model, &err) < 0)
        return failed("open", &err);
    const double opened = now_ms(CLOCK_MONOTONIC);
    if (hsr_engine_create(model, &opts, &engine, &err) < 0 || hsr_session_create(engine, NULL, &session, &err) < 0)
        return failed("create", &err);
    const double created = now_ms(CLOCK_MONOTONIC);
    if (hsr_session_append(session, ids, 32, &err) < 0 || hsr_session_generate(session, NULL, &err) < 0
        || hsr_session_next(session, &event, &err) < 0 || event.kind != HSR_EVENT_TOKEN)
        return failed("generate", &err);
    const double end = now_ms(CLOCK_MONOTONIC);

    printf("open %.1f ms, create %.1f ms, first token %.1f ms, in all %.1f ms; %.0f ms since the process was started\n", opened - start,
           created - opened, end - created, end - start, now_ms(CLOCK_BOOTTIME) - process_start_ms());
    hsr_session_destroy(&session, NULL);
    hsr_engine_destroy(&engine, NULL);
    hsr_model_close(&model);
    return 0;
}
