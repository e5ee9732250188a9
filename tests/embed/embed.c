/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest complete host in C: read token ids, print the 16 that follow.
 *
 *   cc embed.c $(python -m hisparse_rt --cflags --libs) -o embed && ./embed MODEL.hsr 1 2 3
 */
#include <stdio.h>
#include <stdlib.h>

#include <hisparse_rt/hisparse_rt.h>

static int failed(const hsr_error *err)
{
    fprintf(stderr, "%s: %s\n", hsr_status_name(err->status), err->message);
    return 1;
}

static int generate(hsr_engine *engine, const int32_t *ids, uint64_t n, hsr_error *err)
{
    hsr_session *session = NULL;
    hsr_request request;
    hsr_event event = { .struct_size = sizeof event };
    int result = 0;

    hsr_request_init(&request, sizeof request);
    request.max_tokens = 16;
    request.ignore_eos = 1;
    if (hsr_session_create(engine, NULL, &session, err) < 0 || hsr_session_append(session, ids, n, err) < 0
        || hsr_session_generate(session, &request, err) < 0)
        result = failed(err);
    while (result == 0 && event.kind != HSR_EVENT_FINISHED) {
        if (hsr_session_next(session, &event, err) < 0)
            result = failed(err);
        else if (event.kind == HSR_EVENT_TOKEN)
            printf("%d ", (int)event.token);
        else if (event.kind == HSR_EVENT_FAILED)
            result = fprintf(stderr, "%s\n", hsr_status_name(event.status)) > 0;
    }
    printf("\n");
    hsr_session_destroy(&session, NULL);
    return result;
}

int main(int argc, char **argv)
{
    hsr_error err = HSR_ERROR_INIT;
    hsr_model *model = NULL;
    hsr_engine *engine = NULL;
    hsr_engine_opts opts;
    int32_t ids[64];
    uint64_t n = 0;
    int result;

    if (argc < 3)
        return fprintf(stderr, "usage: embed MODEL.hsr ID...\n") > 0;
    if (hsr_abi_version() != HSR_ABI_VERSION)
        return fprintf(stderr, "header and library are of different versions\n") > 0;
    while (n < 64 && (int)n + 2 < argc) {
        ids[n] = (int32_t)strtol(argv[n + 2], NULL, 10);
        n++;
    }
    hsr_engine_opts_init(&opts, sizeof opts);
    opts.n_threads = 2;
    if (hsr_model_open(argv[1], &model, &err) < 0 || hsr_engine_create(model, &opts, &engine, &err) < 0)
        result = failed(&err);
    else
        result = generate(engine, ids, n, &err);
    hsr_engine_destroy(&engine, NULL);
    hsr_model_close(&model);
    return result;
}
