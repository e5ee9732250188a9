/* SPDX-License-Identifier: Apache-2.0 */
/* A host that loads the library, works with it on four threads and unloads it, a hundred times; the threads outlive each load.
 * Memory, threads and open files must be flat, and the library really gone.
 *
 *   cc -pthread reload.c -I.../include -ldl -o reload && ./reload libhisparse_rt.so MODEL.hsr 1 2 3
 */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <hisparse_rt/hisparse_rt.h>

enum { CYCLES = 100, WARM_UP = 30, THREADS = 4, OUTPUT = 8 };

#define FUNCTIONS(DO) \
    DO(hsr_model_open) DO(hsr_model_close) DO(hsr_engine_opts_init) DO(hsr_engine_create) DO(hsr_engine_destroy) DO(hsr_session_create) \
    DO(hsr_session_append) DO(hsr_request_init) DO(hsr_session_generate) DO(hsr_session_next) DO(hsr_session_destroy)

static struct {
#define MEMBER(name) __typeof__(name) *name;
    FUNCTIONS(MEMBER)
} lib;

static hsr_engine *engine;
static int32_t prompt[64];
static uint64_t n_prompt;
static pthread_barrier_t step;

static void die(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static int count_entries(const char *folder)
{
    DIR *d = opendir(folder);
    int n = 0;
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n - 2;
}

static double resident_kb(void)
{
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%*d %ld", &pages) != 1)
        die("/proc/self/statm", "cannot read it");
    fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / 1024;
}

static void load(const char *path, void **handle)
{
    *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*handle)
        die(path, dlerror());
#define LOOK_UP(name) \
    { \
        void *symbol = dlsym(*handle, #name); \
        if (!symbol) \
            die(#name, dlerror()); \
        memcpy(&lib.name, &symbol, sizeof symbol); \
    }
    FUNCTIONS(LOOK_UP)
}

static int generate(void)
{
    hsr_session *s = NULL;
    hsr_request r;
    hsr_event ev = { .struct_size = sizeof ev };
    int n = 0;

    lib.hsr_request_init(&r, sizeof r);
    r.max_tokens = OUTPUT;
    r.ignore_eos = 1;
    if (lib.hsr_session_create(engine, NULL, &s, NULL) < 0 || lib.hsr_session_append(s, prompt, n_prompt, NULL) < 0
        || lib.hsr_session_generate(s, &r, NULL) < 0)
        return -1;
    while (lib.hsr_session_next(s, &ev, NULL) == HSR_OK)
        n += ev.kind == HSR_EVENT_TOKEN;
    lib.hsr_session_destroy(&s, NULL);
    return n;
}

static void *host_thread(void *arg)
{
    (void)arg;
    const int n = generate();
    pthread_barrier_wait(&step);   /* all have generated */
    pthread_barrier_wait(&step);   /* the library is unloaded */
    return (void *)(intptr_t)n;
}

static void cycle(const char *path, const char *model_path)
{
    pthread_t threads[THREADS];
    hsr_model *model = NULL;
    hsr_engine_opts opts;
    hsr_error err = HSR_ERROR_INIT;
    void *handle, *n;

    load(path, &handle);
    lib.hsr_engine_opts_init(&opts, sizeof opts);
    opts.n_threads = 2;
    if (lib.hsr_model_open(model_path, &model, &err) < 0 || lib.hsr_engine_create(model, &opts, &engine, &err) < 0)
        die(model_path, err.message);
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, host_thread, NULL) != 0)
            die("pthread_create", "refused");
    pthread_barrier_wait(&step);
    if (lib.hsr_engine_destroy(&engine, &err) < 0)
        die("hsr_engine_destroy", err.message);
    lib.hsr_model_close(&model);
    if (dlclose(handle) != 0)
        die("dlclose", dlerror());
    if (dlopen(path, RTLD_NOW | RTLD_NOLOAD))
        die(path, "it is still loaded");
    pthread_barrier_wait(&step);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &n);
        if ((intptr_t)n != OUTPUT)
            die("generate", "it did not give all tokens");
    }
}

int main(int argc, char **argv)
{
    double warm = 0;

    if (argc < 4)
        die("usage", "reload LIBRARY MODEL.hsr ID...");
    while (n_prompt < 64 && (int)n_prompt + 3 < argc) {
        prompt[n_prompt] = (int32_t)strtol(argv[n_prompt + 3], NULL, 10);
        n_prompt++;
    }
    pthread_barrier_init(&step, NULL, THREADS + 1);
    const int files = count_entries("/proc/self/fd");
    for (int i = 0; i < CYCLES; i++) {
        if (i == WARM_UP)
            warm = resident_kb();
        cycle(argv[1], argv[2]);
    }
    const double growth = (resident_kb() - warm) / (CYCLES - WARM_UP);
    usleep(50000);   /* joined threads may be listed a moment longer */
    printf("threads %d files %d growth %.1f\n", count_entries("/proc/self/task"), count_entries("/proc/self/fd") - files, growth);
    pthread_barrier_destroy(&step);
    return 0;
}
