/* SPDX-License-Identifier: Apache-2.0 */
/* The whole public life of a model, an engine and its sessions, again and again, with the first, second, ... request to the system
 * refused: memory, mappings, threads, files. After each refusal there is a status with a text or a right result, everything can be
 * destroyed, nothing leaks, other sessions are as they were, and the next run in the same process is right.
 *
 * The linker's --wrap sends the library's calls through the functions below (tests/meson.build names them). */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hisparse_rt/hisparse_rt.h"
#include "../unit/check.h"
#include "host.h"
#include "../unit/tiny_model.h"

/* ---- the system that refuses ------------------------------------------------------------------------------------ */

static struct {
    bool        armed;          /* count, and refuse */
    bool        for_good;       /* refuse everything from the first refusal on: the machine is full */
    long        first;          /* which request to refuse */
    atomic_long asked, refused;
    atomic_long heap_asked;     /* armed or not */
    atomic_long blocks;         /* heap blocks that live, the test's own included */
    atomic_long mapped;         /* bytes of address space */
} sys;

static bool refuse(void)
{
    if (!sys.armed)
        return false;
    const long asked = ++sys.asked;
    const bool no = sys.for_good ? asked >= sys.first : asked == sys.first;
    sys.refused += no;
    if (no)
        errno = ENOMEM;
    return no;
}

static bool refuse_heap(void)
{
    sys.heap_asked++;
    return refuse();
}

static void *counted(void *p)
{
    sys.blocks += p != NULL;
    return p;
}


void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t align, size_t n);
int __real_posix_memalign(void **p, size_t align, size_t n);
void __real_free(void *p);
int __real_munmap(void *p, size_t n);
int __real_mprotect(void *p, size_t n, int protection);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t align, size_t n);
int __wrap_posix_memalign(void **p, size_t align, size_t n);
void __wrap_free(void *p);
int __wrap_munmap(void *p, size_t n);
int __wrap_mprotect(void *p, size_t n, int protection);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);

void *__wrap_malloc(size_t n) { return refuse_heap() ? NULL : counted(__real_malloc(n)); }
void *__wrap_calloc(size_t n, size_t size) { return refuse_heap() ? NULL : counted(__real_calloc(n, size)); }
void *__wrap_aligned_alloc(size_t align, size_t n) { return refuse_heap() ? NULL : counted(__real_aligned_alloc(align, n)); }

void *__wrap_realloc(void *p, size_t n)
{
    void *grown = refuse_heap() ? NULL : __real_realloc(p, n);
    sys.blocks += grown && !p;
    return grown;
}

int __wrap_posix_memalign(void **p, size_t align, size_t n)
{
    const int rc = refuse_heap() ? ENOMEM : __real_posix_memalign(p, align, n);
    sys.blocks += rc == 0;
    return rc;
}

void __wrap_free(void *p)
{
    sys.blocks -= p != NULL;
    __real_free(p);
}

int __wrap_munmap(void *p, size_t n)
{
    const int rc = __real_munmap(p, n);
    sys.mapped -= rc == 0 ? (long)n : 0;
    return rc;
}

int __wrap_mprotect(void *p, size_t n, int protection) { return refuse() ? -1 : __real_mprotect(p, n, protection); }

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    return refuse() ? EAGAIN : __real_pthread_create(thread, attr, fn, arg);
}

#define WRAP_FILES(width) \
    void *__real_mmap##width(void *p, size_t n, int protection, int flags, int fd, off_t offset); \
    void *__wrap_mmap##width(void *p, size_t n, int protection, int flags, int fd, off_t offset); \
    void *__wrap_mmap##width(void *p, size_t n, int protection, int flags, int fd, off_t offset) \
    { \
        void *map = refuse() ? MAP_FAILED : __real_mmap##width(p, n, protection, flags, fd, offset); \
        sys.mapped += map != MAP_FAILED ? (long)n : 0; \
        return map; \
    } \
    int __real_open##width(const char *path, int flags, ...); \
    int __wrap_open##width(const char *path, int flags, ...); \
    int __wrap_open##width(const char *path, int flags, ...) { return refuse() ? -1 : __real_open##width(path, flags); }
WRAP_FILES()
WRAP_FILES(64)

/* ---- the life --------------------------------------------------------------------------------------------------- */

enum { PROMPT = 150, OUTPUT = 12, ROOM = 2 * OUTPUT };

typedef struct life {
    hsr_model   *model;
    hsr_engine  *engine;
    hsr_session *plain, *rich, *fork;
    hsr_status   status;            /* of the call that failed, or of the FAILED event */
    hsr_error    err;
    int32_t      plain_tokens[ROOM], rich_tokens[ROOM];
    int          n_plain, n_rich;
    bool         plain_failed;      /* the failure was the plain session's */
    float        logits[3 * TINY_VOCAB];
} life;

static life expected;   /* of a run without refusals */
static int32_t prompt[PROMPT];

#define TRY(call) do { if ((l->status = (call)) < 0) return; } while (0)

/* Read the events of a request. A failed one is a failure of the life, as a failed call is. */
static hsr_status drain(hsr_session *s, int32_t *tokens, int *n, hsr_error *err)
{
    hsr_event ev = { .struct_size = sizeof ev };
    hsr_status st;
    while ((st = hsr_session_next(s, &ev, err)) == HSR_OK) {
        if (ev.kind == HSR_EVENT_FAILED)
            return ev.status;
        if (ev.kind == HSR_EVENT_TOKEN && *n < ROOM)
            tokens[(*n)++] = ev.token;
    }
    return st;
}

static hsr_status start_plain(hsr_session *s, hsr_error *err)
{
    hsr_request r;
    hsr_request_init(&r, sizeof r);
    r.max_tokens = OUTPUT;
    r.ignore_eos = 1;
    const hsr_status st = hsr_session_append(s, prompt, PROMPT / 2, err);
    return st < 0 ? st : hsr_session_generate(s, &r, err);
}

static hsr_status start_rich(hsr_session *s, hsr_error *err)
{
    static const hsr_token_bias bias[] = { { 7, 2.5f }, { 9, -1e9f } };
    static const int32_t stop[] = { TINY_EOS };
    hsr_request r;
    hsr_request_init(&r, sizeof r);
    r.max_tokens = OUTPUT;
    r.ignore_eos = 1;
    r.temperature = 0.9f;
    r.top_k = 30;
    r.top_p = 0.95f;
    r.min_p = 0.01f;
    r.repetition_penalty = 1.1f;
    r.frequency_penalty = 0.1f;
    r.bias = bias;
    r.n_bias = 2;
    r.stop = stop;
    r.n_stop = 1;
    r.n_logprobs = 5;
    r.seed = 3;
    const hsr_status st = hsr_session_append(s, prompt, PROMPT, err);
    return st < 0 ? st : hsr_session_generate(s, &r, err);
}

static void make(life *l, const char *path, uint32_t flags)
{
    hsr_engine_opts eo;
    hsr_session_opts so;
    hsr_profile history;

    hsr_engine_opts_init(&eo, sizeof eo);
    hsr_session_opts_init(&so, sizeof so);
    eo.n_threads = 2;
    eo.hot_bytes = 8u << 20;
    eo.flags = flags;
    eo.chunk_tokens = 64;
    eo.max_batch = 64;
    eo.max_sessions = 4;
    so.window_size = 64;
    so.sink_size = 0;
    so.rollback_tokens = 0;
    TRY(hsr_model_open(path, &l->model, &l->err));
    TRY(hsr_engine_create(l->model, &eo, &l->engine, &l->err));
    TRY(hsr_session_create(l->engine, &so, &l->plain, &l->err));
    hsr_profile_init(&history, sizeof history);
    history.selector = HSR_SELECT_HISTORY;
    history.budget = 16;
    TRY(hsr_profile_register(l->engine, &history, &so.profile, &l->err));
    TRY(hsr_session_create(l->engine, &so, &l->rich, &l->err));
}

static void use(life *l)
{
    l->plain_failed = true;
    TRY(start_plain(l->plain, &l->err));
    l->plain_failed = false;
    TRY(start_rich(l->rich, &l->err));
    TRY(drain(l->rich, l->rich_tokens, &l->n_rich, &l->err));   /* plain runs beside it, until its events fill up */
    TRY(hsr_session_logits(l->rich, prompt, 3, l->logits, 3 * TINY_VOCAB, &l->err));
    TRY(hsr_session_fork(l->rich, &l->fork, &l->err));
    TRY(hsr_session_truncate(l->fork, 70, &l->err));
    TRY(hsr_session_append(l->fork, prompt, 60, &l->err));
    TRY(hsr_session_prefill(l->fork, NULL, NULL, &l->err));
    TRY(hsr_session_rebuild(l->fork, &l->err));
    TRY(hsr_session_prefill(l->fork, NULL, NULL, &l->err));
    l->plain_failed = true;
    TRY(drain(l->plain, l->plain_tokens, &l->n_plain, &l->err));
    l->plain_failed = false;
}

static void destroy(life *l)
{
    hsr_engine_stats st = { .struct_size = sizeof st };
    CHECK(hsr_session_destroy(&l->fork, NULL) == HSR_OK);
    CHECK(hsr_session_destroy(&l->rich, NULL) == HSR_OK);
    if (l->engine && hsr_engine_get_stats(l->engine, &st, NULL) == HSR_OK && !l->plain)
        CHECK(st.hot_blocks_used == 0 && st.hot_blocks_reserved == 0);
    hsr_model_close(&l->model);
    CHECK(hsr_session_destroy(&l->plain, NULL) == HSR_OK);
    if (l->engine) {
        CHECK(hsr_engine_get_stats(l->engine, &st, NULL) == HSR_OK);
        CHECK(st.hot_blocks_used == 0 && st.hot_blocks_reserved == 0 && st.hot_slots_used == 0 && st.n_sessions == 0);
    }
    CHECK(hsr_engine_destroy(&l->engine, NULL) == HSR_OK);
    CHECK(!l->fork && !l->rich && !l->plain && !l->engine && !l->model);
}

static bool same_tokens(const int32_t *a, int n, const int32_t *want) { return n == OUTPUT && memcmp(a, want, OUTPUT * sizeof *a) == 0; }

static void check_result(const life *l)
{
    CHECK(same_tokens(l->plain_tokens, l->n_plain, expected.plain_tokens));
    CHECK(same_tokens(l->rich_tokens, l->n_rich, expected.rich_tokens));
    CHECK(memcmp(l->logits, expected.logits, sizeof l->logits) == 0);
}

/* Memory is back: the session that failed keeps its tokens, can be computed again, and gives what it would have given. */
static void check_revival(hsr_session *s, hsr_status (*start)(hsr_session *, hsr_error *), const int32_t *want)
{
    hsr_error err = HSR_ERROR_INIT;
    hsr_session_stats st = { .struct_size = sizeof st };
    int32_t tokens[ROOM];
    int n = 0;

    CHECK(hsr_session_get_stats(s, &st, &err) == HSR_OK && !st.running);
    const uint64_t held = st.n_tokens;
    CHECK(hsr_session_rebuild(s, &err) == HSR_OK);
    CHECK(hsr_session_prefill(s, NULL, NULL, &err) == HSR_OK);
    CHECK(hsr_session_get_stats(s, &st, &err) == HSR_OK && st.n_tokens == held && st.n_computed == held && st.status == HSR_OK);
    CHECK(hsr_session_truncate(s, 0, &err) == HSR_OK);
    CHECK(start(s, &err) == HSR_OK);
    CHECK(drain(s, tokens, &n, &err) == HSR_AGAIN && same_tokens(tokens, n, want));
}

static void check_survivors(life *l)
{
    hsr_error err = HSR_ERROR_INIT;
    if (l->plain_failed)
        check_revival(l->plain, start_plain, expected.plain_tokens);
    else {
        CHECK(drain(l->plain, l->plain_tokens, &l->n_plain, &err) == HSR_AGAIN);
        CHECK(same_tokens(l->plain_tokens, l->n_plain, expected.plain_tokens));
    }
    if (!l->plain_failed)
        check_revival(l->rich, start_rich, expected.rich_tokens);
    if (l->fork) {
        CHECK(hsr_session_rebuild(l->fork, &err) == HSR_OK);
        CHECK(hsr_session_prefill(l->fork, NULL, NULL, &err) == HSR_OK);
    }
}

/* One life in which the request `first` is refused (0: none). True if a request was. */
static bool live(const char *path, uint32_t flags, long first, bool for_good)
{
    static life fresh;
    life *l = &fresh;
    const int files = host_count("/proc/self/fd"), threads = host_threads(INT_MAX);
    const long blocks = sys.blocks, mapped = sys.mapped;

    *l = (life){ .err = HSR_ERROR_INIT };
    sys.first = first;
    sys.for_good = for_good;
    sys.asked = sys.refused = 0;
    sys.armed = first > 0;
    make(l, path, flags);
    if (l->status >= 0)
        use(l);
    sys.armed = sys.armed && for_good;

    const bool refused = sys.refused > 0;
    if (l->status < 0) {
        CHECK(refused && l->err.status == l->status && l->err.message[0]);
        CHECK(l->status == HSR_E_NOMEM || (l->status == HSR_E_IO && !l->model));
        if (!for_good && l->rich)
            check_survivors(l);
        if (check_failures)
            fprintf(stderr, "after: %s\n", l->err.message);
    } else if (first == 0)
        expected = *l;
    else
        check_result(l);
    const long heap_asked = sys.heap_asked;
    destroy(l);
    CHECK(sys.heap_asked == heap_asked);
    sys.armed = false;

    CHECK(sys.blocks == blocks && sys.mapped == mapped);
    CHECK(host_count("/proc/self/fd") == files && host_threads(threads) == threads);
    return refused;
}

static void sweep(const char *path, uint32_t flags, bool for_good)
{
    long n = 1;
    while (live(path, flags, n, for_good)) {
        if (!for_good)
            live(path, flags, LONG_MAX, false);   /* and a right result without refusal, in the same process */
        n++;
        if (check_failures) {
            fprintf(stderr, "while request %ld was refused%s\n", n - 1, for_good ? ", and all after it" : "");
            return;
        }
    }
    CHECK(n > 50);   /* the wrapped names are those that the library calls */
}

static void *nothing(void *arg) { return arg; }

int main(void)
{
    char path[64];
    pthread_t first;

    /* A sanitizer may start a thread of its own beside the first one. */
    if (pthread_create(&first, NULL, nothing, NULL) == 0)
        pthread_join(first, NULL);
    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = (int32_t)(i * 2654435761u >> 9) % (TINY_VOCAB - 1);
    if (!CHECK(tiny_model_write(path, 1)))
        return CHECK_REPORT();
    host_count("/proc/self/fd");
    live(path, 0, 0, false);
    CHECK(expected.n_plain == OUTPUT && expected.n_rich == OUTPUT);
    sweep(path, 0, false);
    sweep(path, 0, true);
    sweep(path, HSR_ENGINE_ASYNC_DEBUG, false);
    unlink(path);
    return CHECK_REPORT();
}
