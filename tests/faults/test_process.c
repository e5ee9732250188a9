/* SPDX-License-Identifier: Apache-2.0 */
/* The library as a guest: what belongs to the whole process is the same before, during and after its use, nothing is printed, and
 * neither closed standard streams, slow log callbacks, many engines, nor exit() in the middle of the work hurt the host. */
#define _GNU_SOURCE 1
#include <fcntl.h>
#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "base/cpu.h"
#include "host.h"

static char path[64];
static int32_t expected[8][HOST_OUTPUT];

/* ---- what belongs to the process -------------------------------------------------------------------------------- */

enum { MOST_FILES = 64, MOST_SIGNALS = 64 };

typedef struct process {
    struct { void *handler; int flags; uint64_t mask; } signals[MOST_SIGNALS];
    sigset_t  blocked;
    uint64_t  environment;
    char      files[MOST_FILES][64];   /* what each descriptor is */
    char      locale[256], folder[512], name[32];
    locale_t  thread_locale;
    unsigned  float_control;
    mode_t    mask;
    cpu_set_t affinity;
    struct rlimit limits[RLIM_NLIMITS];
    int       priority, dumpable;
} process;

extern char **environ;

static uint64_t environment_hash(void)
{
    uint64_t hash = 1469598103934665603u;
    for (char **entry = environ; *entry; entry++)
        for (const char *c = *entry; ; c++) {
            hash = (hash ^ (unsigned char)*c) * 1099511628211u;
            if (!*c)
                break;
        }
    return hash ^ (uint64_t)(uintptr_t)environ;
}

/* Rounding, masks of exceptions, treatment of denormals; not the flags that arithmetic raises. */
static unsigned float_control(void)
{
    unsigned control = (unsigned)fegetround();
#if defined(__x86_64__)
    control ^= (__builtin_ia32_stmxcsr() & ~0x3fu) << 16;
#endif
    return control;
}

static void look(process *p)
{
    memset(p, 0, sizeof *p);
    for (int i = 1; i < MOST_SIGNALS; i++) {
        struct sigaction action;
        if (sigaction(i, NULL, &action) == 0) {
            memcpy(&p->signals[i].handler, &action.sa_handler, sizeof p->signals[i].handler);
            p->signals[i].flags = action.sa_flags;
            memcpy(&p->signals[i].mask, &action.sa_mask, sizeof p->signals[i].mask);   /* the system fills no more */
        }
    }
    pthread_sigmask(SIG_SETMASK, NULL, &p->blocked);
    p->environment = environment_hash();
    for (int fd = 0; fd < MOST_FILES; fd++) {
        char link[32];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        if (readlink(link, p->files[fd], sizeof p->files[fd] - 1) < 0)
            p->files[fd][0] = '\0';
    }
    snprintf(p->locale, sizeof p->locale, "%s", setlocale(LC_ALL, NULL));
    p->thread_locale = uselocale((locale_t)0);
    CHECK(getcwd(p->folder, sizeof p->folder));
    prctl(PR_GET_NAME, p->name);
    p->float_control = float_control();
    p->mask = umask(0);
    umask(p->mask);
    sched_getaffinity(0, sizeof p->affinity, &p->affinity);
    for (int i = 0; i < RLIM_NLIMITS; i++)
        getrlimit((__rlimit_resource_t)i, &p->limits[i]);
    p->priority = getpriority(PRIO_PROCESS, 0);
    p->dumpable = prctl(PR_GET_DUMPABLE);
}

static void check_unchanged(const process *a)
{
    process now, *b = &now;
    look(b);
    CHECK(memcmp(a->signals, b->signals, sizeof a->signals) == 0);
    CHECK(memcmp(&a->blocked, &b->blocked, sizeof a->blocked) == 0);
    CHECK(a->environment == b->environment);
    CHECK(memcmp(a->files, b->files, sizeof a->files) == 0);
    CHECK(strcmp(a->locale, b->locale) == 0 && a->thread_locale == b->thread_locale);
    CHECK(strcmp(a->folder, b->folder) == 0 && strcmp(a->name, b->name) == 0);
    CHECK(a->float_control == b->float_control);
    CHECK(a->mask == b->mask);
    CHECK(memcmp(&a->affinity, &b->affinity, sizeof a->affinity) == 0);
    CHECK(memcmp(a->limits, b->limits, sizeof a->limits) == 0);
    CHECK(a->priority == b->priority && a->dumpable == b->dumpable);
}

static void ignore(int signal) { (void)signal; }

/* A host with habits of its own, so that a default restored would show, too. */
static void be_particular(void)
{
    sigset_t some;
    sigemptyset(&some);
    sigaddset(&some, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &some, NULL);
    signal(SIGUSR2, ignore);
    signal(SIGPIPE, SIG_IGN);
    umask(027);
    setenv("OMP_NUM_THREADS", "3", 1);
    setenv("HISPARSE_RT_THREADS", "7", 1);
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8000);   /* denormal results become zero */
#endif
}

static void test_side_effects(uint32_t flags)
{
    const int threads = host_threads(1);
    process before;
    hsr_model *m = NULL;
    hsr_engine *e = NULL;
    hsr_engine_opts o;
    hsr_error err = HSR_ERROR_INIT;
    int32_t tokens[HOST_OUTPUT];

    look(&before);
    host_opts(&o);
    o.flags = flags;
    CHECK(hsr_model_open("/nowhere/at all", &m, &err) == HSR_E_IO);
    check_unchanged(&before);
    CHECK(hsr_model_open(path, &m, &err) == HSR_OK);
    check_unchanged(&before);
    CHECK(hsr_engine_create(m, &o, &e, &err) == HSR_OK);
    check_unchanged(&before);
    CHECK(host_generate(e, 0, tokens, &err) == HSR_OK && host_same(tokens, expected[0]));
    check_unchanged(&before);
    CHECK(host_threads(INT32_MAX) > threads);
    CHECK(hsr_engine_destroy(&e, &err) == HSR_OK);
    hsr_model_close(&m);
    check_unchanged(&before);
    CHECK(host_threads(threads) == threads);
}

/* ---- children: each case in a process of its own ---------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Exit code of fn run in a child; -1: killed by a signal, -2: it hangs. */
static int in_child(void (*fn)(void))
{
    const double deadline = seconds() + 60;
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        check_failures = 0;
        fn();
        _exit(CHECK_REPORT());
    }
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (seconds() > deadline) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            return -2;
        }
        usleep(2000);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* ---- silence ---------------------------------------------------------------------------------------------------- */

static off_t size_of(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 ? st.st_size : -1;
}

/* Work, mistakes and failures, with nothing that asks for a log. */
static void be_noisy(void)
{
    hsr_engine_opts o;
    hsr_error err = HSR_ERROR_INIT;
    hsr_model *m = NULL;
    hsr_engine *e = NULL;
    hsr_session *s = NULL;
    int32_t tokens[HOST_OUTPUT], bad = TINY_VOCAB;

    host_opts(&o);
    o.log_level = HSR_LOG_DEBUG;
    host_life(path, &o, 0, tokens);
    hsr_model_open("/dev/null", &m, &err);
    hsr_model_open("/nowhere", &m, NULL);
    hsr_model_open(path, &m, NULL);
    o.n_threads = 10000;
    hsr_engine_create(m, &o, &e, NULL);
    o.n_threads = 1;
    hsr_engine_create(m, &o, &e, NULL);
    hsr_session_create(e, NULL, &s, NULL);
    hsr_session_append(s, &bad, 1, NULL);
    hsr_session_generate(s, NULL, NULL);
    hsr_engine_destroy(&e, NULL);
    hsr_session_destroy(&s, NULL);
    hsr_engine_destroy(&e, NULL);
    hsr_model_close(&m);
}

static void test_silence(void)
{
    char name[] = "/tmp/hisparse_out_XXXXXX";
    const int file = mkstemp(name), out = dup(1), errors = dup(2);

    fflush(NULL);
    dup2(file, 1);
    dup2(file, 2);
    be_noisy();
    fflush(NULL);
    const off_t printed = size_of(file);
    dup2(out, 1);
    dup2(errors, 2);
    CHECK(printed == 0);
    close(file);
    close(out);
    close(errors);
    unlink(name);
}

/* Descriptors 0 to 2 are free: what the library opens must not be found there by somebody's print. */
static void without_streams(void)
{
    hsr_engine_opts o;
    hsr_model *m = NULL;
    int32_t tokens[HOST_OUTPUT];
    bool ok = true;

    for (int fd = 0; fd < 3; fd++)
        close(fd);
    host_opts(&o);
    ok = hsr_model_open(path, &m, NULL) == HSR_OK;
    for (int fd = 0; fd < 3; fd++)
        ok = ok && fcntl(fd, F_GETFD) == -1;
    hsr_model_close(&m);
    ok = ok && host_life(path, &o, 1, tokens) == HSR_OK && host_same(tokens, expected[1]);
    for (int fd = 0; fd < 3; fd++)
        ok = ok && fcntl(fd, F_GETFD) == -1;
    _exit(ok ? 0 : 1);
}

/* ---- the log ---------------------------------------------------------------------------------------------------- */

typedef struct log_sink {
    atomic_int lines[HSR_LOG_DEBUG + 1];
    atomic_int inside;
    useconds_t wait;
} log_sink;

static void take_line(void *user, int32_t level, const char *message, size_t length)
{
    log_sink *sink = user;
    CHECK(sink->inside++ == 0);
    CHECK(level >= HSR_LOG_ERROR && level <= HSR_LOG_DEBUG && length > 0 && strlen(message) == length && !strchr(message, '\n'));
    if (level >= HSR_LOG_ERROR && level <= HSR_LOG_DEBUG)
        sink->lines[level]++;
    usleep(sink->wait);
    sink->inside--;
}

static void test_log(void)
{
    int32_t tokens[HOST_OUTPUT];

    for (int32_t level = HSR_LOG_ERROR; level <= HSR_LOG_DEBUG; level++) {
        static log_sink sink;
        hsr_engine_opts o;
        memset(&sink, 0, sizeof sink);
        sink.wait = level == HSR_LOG_DEBUG ? 100000 : 0;
        host_opts(&o);
        o.log = take_line;
        o.log_user = &sink;
        o.log_level = level;
        CHECK(host_life(path, &o, 2, tokens) == HSR_OK && host_same(tokens, expected[2]));
        CHECK(sink.lines[HSR_LOG_ERROR] == 0 && sink.lines[HSR_LOG_WARN] == 0);
        CHECK((sink.lines[HSR_LOG_INFO] > 0) == (level >= HSR_LOG_INFO));
        CHECK((sink.lines[HSR_LOG_DEBUG] > 0) == (level >= HSR_LOG_DEBUG));
    }
}

/* ---- threads ---------------------------------------------------------------------------------------------------- */

static void *own_engine(void *arg)
{
    const int number = (int)(intptr_t)arg;
    hsr_engine_opts o;
    int32_t tokens[HOST_OUTPUT];
    bool ok = true;

    host_opts(&o);
    for (int round = 0; round < 3; round++)
        ok = ok && host_life(path, &o, number, tokens) == HSR_OK && host_same(tokens, expected[number]);
    return (void *)(intptr_t)ok;
}

static void test_own_engines(void)
{
    pthread_t thread[8];
    void *ok = NULL;
    const int threads = host_threads(1);

    for (int i = 0; i < 8; i++)
        CHECK(pthread_create(&thread[i], NULL, own_engine, (void *)(intptr_t)i) == 0);
    for (int i = 0; i < 8; i++) {
        pthread_join(thread[i], &ok);
        CHECK(ok);
    }
    CHECK(host_threads(threads) == threads);
}

/* Is every thread of the library's, which have names, kept to the processors of this one? */
static bool workers_inside(void)
{
    cpu_set_t mine, theirs, both;
    DIR *d = opendir("/proc/self/task");
    bool inside = sched_getaffinity(0, sizeof mine, &mine) == 0;

    for (struct dirent *entry; (entry = readdir(d)) != NULL; ) {
        char file[320], name[32] = "";
        snprintf(file, sizeof file, "/proc/self/task/%s/comm", entry->d_name);
        FILE *f = fopen(file, "r");
        if (!f)
            continue;
        if (fgets(name, sizeof name, f) && strncmp(name, "hsr-", 4) == 0 &&
            sched_getaffinity(atoi(entry->d_name), sizeof theirs, &theirs) == 0) {
            CPU_AND(&both, &mine, &theirs);
            inside = inside && CPU_EQUAL(&both, &theirs);
        }
        fclose(f);
    }
    closedir(d);
    return inside;
}

/* Threads of an engine that was asked for n, by its own word and by the system's. */
static int threads_of(int32_t n)
{
    hsr_model *m = NULL;
    hsr_engine *e = NULL;
    hsr_engine_opts o;
    hsr_engine_stats st = { .struct_size = sizeof st };
    int32_t tokens[HOST_OUTPUT];

    host_opts(&o);
    o.n_threads = n;
    const int before = host_threads(1);
    CHECK(hsr_model_open(path, &m, NULL) == HSR_OK && hsr_engine_create(m, &o, &e, NULL) == HSR_OK);
    CHECK(hsr_engine_get_stats(e, &st, NULL) == HSR_OK);
    CHECK(host_threads(INT32_MAX) == before + st.n_threads - 1);
    CHECK(host_generate(e, 3, tokens, NULL) == HSR_OK && host_same(tokens, expected[3]));
    CHECK(workers_inside());
    CHECK(hsr_engine_destroy(&e, NULL) == HSR_OK);
    hsr_model_close(&m);
    return st.n_threads;
}

/* The default follows the affinity mask; more threads than processors are slow, not stuck. */
static void on_one_processor(void)
{
    cpu_set_t mask, one;

    CHECK(sched_getaffinity(0, sizeof mask, &mask) == 0);
    CHECK(threads_of(0) == hsri_cpu_count() && hsri_cpu_count() <= CPU_COUNT(&mask));
    CPU_ZERO(&one);
    for (int cpu = CPU_SETSIZE - 1; CPU_COUNT(&one) == 0; cpu--)
        if (CPU_ISSET(cpu, &mask))
            CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(threads_of(0) == 1);
    CHECK(threads_of(1) == 1);
    CHECK(threads_of(4) == 4);
    CHECK(threads_of(64) == 64);
}

static void test_refused_counts(void)
{
    static const int32_t counts[] = { -1, INT32_MIN, 1025, 10000, INT32_MAX };
    hsr_model *m = NULL;
    hsr_engine *e = NULL;
    hsr_engine_opts o;
    hsr_error err = HSR_ERROR_INIT;

    CHECK(hsr_model_open(path, &m, &err) == HSR_OK);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        host_opts(&o);
        o.n_threads = counts[i];
        CHECK(hsr_engine_create(m, &o, &e, &err) == HSR_E_INVALID && !e && strstr(err.message, "n_threads"));
    }
    hsr_model_close(&m);
}

/* ---- the end in the middle of the work -------------------------------------------------------------------------- */

static struct { hsr_model *model; hsr_engine *engine; } running;   /* reachable at exit: no leak */
static atomic_int n_done;

static void *generate_forever(void *arg)
{
    int32_t tokens[HOST_OUTPUT];
    while (host_generate(running.engine, (int)(intptr_t)arg, tokens, NULL) == HSR_OK)
        n_done++;
    return NULL;
}

static void start_forever(void)
{
    hsr_engine_opts o;
    pthread_t thread;

    host_opts(&o);
    CHECK(hsr_model_open(path, &running.model, NULL) == HSR_OK);
    CHECK(hsr_engine_create(running.model, &o, &running.engine, NULL) == HSR_OK);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&thread, NULL, generate_forever, (void *)(intptr_t)i) == 0);
    while (n_done < 4)
        usleep(1000);
}

static void exit_while_running(void)
{
    start_forever();
    exit(17);
}

static void quick_exit_while_running(void)
{
    start_forever();
    quick_exit(18);
}

static void return_with_engine(void)
{
    hsr_engine_opts o;
    host_opts(&o);
    CHECK(hsr_model_open(path, &running.model, NULL) == HSR_OK);
    CHECK(hsr_engine_create(running.model, &o, &running.engine, NULL) == HSR_OK);
    exit(19);
}

int main(void)
{
    process before;
    hsr_engine_opts o;

    if (!CHECK(tiny_model_write(path, 1)))
        return CHECK_REPORT();
    look(&before);   /* what only the first use in a process does would show here alone */
    host_opts(&o);
    for (int i = 0; i < 8; i++)
        CHECK(host_life(path, &o, i, expected[i]) == HSR_OK);
    check_unchanged(&before);

    CHECK(in_child(without_streams) == 0);
    CHECK(in_child(on_one_processor) == 0);
    CHECK(in_child(exit_while_running) == 17);
    CHECK(in_child(quick_exit_while_running) == 18);
    CHECK(in_child(return_with_engine) == 19);
    test_silence();
    test_log();
    test_own_engines();
    test_refused_counts();
    be_particular();
    test_side_effects(0);
    test_side_effects(HSR_ENGINE_ASYNC_DEBUG);
    unlink(path);
    return CHECK_REPORT();
}
