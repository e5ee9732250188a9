/* SPDX-License-Identifier: Apache-2.0 */
/* The container reader against any bytes: they are opened as a file, and everything the reader then gives out must lie
 * inside that file.
 *
 * Built with -fsanitize=fuzzer this is a libFuzzer target. With HSRI_FUZZ_STANDALONE it is a program that replays files and
 * folders: names that start with "good" must open, names that start with "bad" must be refused, each within a second and
 * without large allocations. */
#define _GNU_SOURCE 1
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "container/container.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Not assert: the check is the point, with NDEBUG as well. */
static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "fuzz_container: %s\n", what);
        abort();
    }
}

static volatile unsigned sink;

/* Bytes given out are inside the mapping; the first and last are read. */
static void check_range(const hsri_container *c, const void *at, uint64_t size)
{
    uint64_t offset = (uint64_t)((uintptr_t)at - (uintptr_t)hsri_container_base(c));
    must(offset <= hsri_container_size(c) && size <= hsri_container_size(c) - offset, "bytes outside the file");
    if (size)
        sink += ((const uint8_t *)at)[0] + ((const uint8_t *)at)[size - 1];
}

static void check_tensors(const hsri_container *c)
{
    for (uint64_t i = 0; i < hsri_container_n_tensors(c); i++) {
        const hsri_tensor_info *t = hsri_container_tensor_at(c, i);
        must(t && hsri_container_tensor(c, t->name) == t, "a tensor is not found by its name");
        must(t->n_dims >= 1 && t->n_dims <= HSRI_GGUF_MAX_DIMS && t->size > 0, "a strange shape");
        check_range(c, t->data, t->size);
    }
    must(!hsri_container_tensor_at(c, hsri_container_n_tensors(c)), "a tensor beyond the last");
}

static void check_key(const hsri_container *c, const char *key)
{
    hsr_error err = HSR_ERROR_INIT;
    uint32_t u32, array[16];
    double f64;
    const char *text;
    uint64_t size;
    hsri_container_u32(c, key, &u32, &err);
    hsri_container_f64(c, key, &f64, &err);
    hsri_container_u32_array(c, key, array, 16, &size, &err);
    must(size <= 16, "more elements than fit");
    if (hsri_container_string(c, key, &text, &size, &err) == HSR_OK)
        check_range(c, text, size);
}

/* Keys cannot be listed, so those are asked for that the corpus holds. */
static void check_keys(const hsri_container *c)
{
    static const char *const keys[] = {
        "general.alignment", "general.architecture", "tokenizer.huggingface.json", "hisparse.eos_token_ids",
        "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "u64", "i64", "f64", "k", "words", "",
    };
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        check_key(c, keys[i]);
}

static hsr_status open_bytes(const uint8_t *data, size_t size, hsr_error *err)
{
    char path[64];
    hsri_container *c;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    must(fd >= 0 && write(fd, data, size) == (ssize_t)size, "cannot make a file");
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    hsr_status status = hsri_container_open(path, &c, err);
    close(fd);
    if (status == HSR_OK) {
        check_tensors(c);
        check_keys(c);
    } else {
        must(status < 0 && c == NULL && err->message[0], "a refusal without a text");
    }
    hsri_container_close(c);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    hsr_error err = HSR_ERROR_INIT;
    open_bytes(data, size, &err);
    return 0;
}

#ifdef HSRI_FUZZ_STANDALONE

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/clock.h"

#define MOST_NS  1000000000u
#define MOST_KIB (64 * 1024)

static int n_replayed, n_wrong;

static void wrong(const char *path, const char *what)
{
    fprintf(stderr, "%s: %s\n", path, what);
    n_wrong++;
}

static long peak_kib(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

static void judge(const char *path, const uint8_t *data, size_t size)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    hsr_error err = HSR_ERROR_INIT;
    long kib = peak_kib();
    uint64_t start = hsri_now_ns();
    hsr_status status = open_bytes(data, size, &err);
    if (hsri_now_ns() - start > MOST_NS)
        wrong(path, "took more than a second");
    if (peak_kib() - kib > MOST_KIB)
        wrong(path, "took more than 64 MiB");
    if (strncmp(name, "good", 4) == 0 && status != HSR_OK)
        wrong(path, err.message);
    if (strncmp(name, "bad", 3) == 0 && status == HSR_OK)
        wrong(path, "was accepted");
    n_replayed++;
}

static void replay_file(const char *path, size_t size)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = malloc(size + 1);
    if (file && data && fread(data, 1, size, file) == size)
        judge(path, data, size);
    else
        wrong(path, "cannot be read");
    free(data);
    if (file)
        fclose(file);
}

static void replay(const char *path)
{
    struct stat st;
    struct dirent *entry;
    char inner[4096];
    DIR *folder = opendir(path);
    if (!folder) {
        if (stat(path, &st) == 0)
            replay_file(path, (size_t)st.st_size);
        else
            wrong(path, "does not exist");
        return;
    }
    while ((entry = readdir(folder))) {
        int n = snprintf(inner, sizeof(inner), "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.' && n > 0 && (size_t)n < sizeof(inner))
            replay(inner);
    }
    closedir(folder);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        replay(argv[i]);
    if (n_replayed == 0)
        wrong(argc > 1 ? argv[1] : "usage", "give files or folders to replay");
    return n_wrong ? 1 : 0;
}

#endif
