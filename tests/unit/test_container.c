/* SPDX-License-Identifier: Apache-2.0 */
/* container/: files are built in memory, well or badly, written to a temporary file and opened. */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/array.h"
#include "base/clock.h"
#include "container/container.h"
#include "check.h"

enum { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 };
enum { TENSOR_F32 = 0, TENSOR_Q4_1 = 3, TENSOR_Q8_0 = 8, TENSOR_I8 = 24, TENSOR_BF16 = 30 };

static char folder[] = "/tmp/hsr-test-XXXXXX";
static char path[300];

/* ---- a small writer ---- */

typedef struct file {
    uint8_t bytes[1 << 18];
    size_t  n;
} file;

static file f;   /* the file being built */

static void put(const void *bytes, size_t n)
{
    if (CHECK(f.n + n <= sizeof(f.bytes))) {
        memcpy(f.bytes + f.n, bytes, n);
        f.n += n;
    }
}

static void put_le(uint64_t value, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++)
        put(&(uint8_t){ (uint8_t)(value >> (8 * i)) }, 1);
}

static void put_bytes(const char *text, size_t n) { put_le(n, 8); put(text, n); }
static void put_string(const char *text) { put_bytes(text, strlen(text)); }

static void begin(uint64_t n_tensors, uint64_t n_keys)
{
    f.n = 0;
    put("GGUF", 4);
    put_le(3, 4);
    put_le(n_tensors, 8);
    put_le(n_keys, 8);
}

static void put_key(const char *name, uint32_t type) { put_string(name); put_le(type, 4); }
static void put_u32(const char *name, uint32_t value) { put_key(name, U32); put_le(value, 4); }
static void put_text(const char *name, const char *value) { put_key(name, STRING); put_string(value); }
static void put_array(const char *name, uint32_t type, uint64_t n) { put_key(name, ARRAY); put_le(type, 4); put_le(n, 8); }

static void put_f64(const char *name, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, 8);
    put_key(name, F64);
    put_le(bits, 8);
}

static void put_shape(const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset)
{
    put_string(name);
    put_le(n_dims, 4);
    for (uint32_t i = 0; i < n_dims; i++)
        put_le(dims[i], 8);
    put_le(type, 4);
    put_le(offset, 8);
}

static void put_tensor(const char *name, uint64_t x, uint64_t y, uint32_t type, uint64_t offset)
{
    put_shape(name, 2, (uint64_t[]){ x, y }, type, offset);
}

static void pad(size_t alignment) { while (f.n % alignment) put("", 1); }

static void put_data(size_t n)
{
    for (size_t i = 0; i < n; i++)
        put(&(uint8_t){ (uint8_t)(i * 7 + 1) }, 1);
}

/* One f32 tensor [4] with its data, in a file with no keys. */
static void put_simple_tensor(uint32_t alignment)
{
    put_shape("t", 1, (uint64_t[]){ 4 }, TENSOR_F32, 0);
    pad(alignment);
    put_data(16);
}

/* ---- opening ---- */

static void save(size_t n)
{
    unlink(path);   /* some file systems write a file out when it is cut and filled again: far slower */
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, f.bytes, n) == (ssize_t)n);
    close(fd);
}

static hsri_container *open_built(void)
{
    hsri_container *c;
    hsr_error err = HSR_ERROR_INIT;
    save(f.n);
    if (!CHECK(hsri_container_open(path, &c, &err) == HSR_OK))
        fprintf(stderr, "refused: %s\n", err.message);
    return c;
}

static bool refused(const char *at, hsr_status status, const char *const *words)
{
    hsr_error err = HSR_ERROR_INIT;
    hsri_container *c = (hsri_container *)&err;
    hsr_status got = hsri_container_open(at, &c, &err);
    bool ok = got == status && err.status == status && c == NULL && strstr(err.message, strrchr(at, '/'));
    for (; ok && *words; words++)
        ok = strstr(err.message, *words) != NULL;
    if (!ok)
        fprintf(stderr, "status %d, message \"%s\"\n", got, err.message);
    if (got == HSR_OK)
        hsri_container_close(c);
    return ok;
}

/* The file as built is refused, with these words in the message. */
#define REFUSED(...) (save(f.n), refused(path, HSR_E_FORMAT, (const char *const[]){ __VA_ARGS__, NULL }))

/* ---- a good file ---- */

#define NAME_LONG "\xE2\x82\xAC.with spaces"

static void build_good(void)
{
    begin(4, 14);
    put_u32("general.alignment", 64);
    put_text("general.architecture", "hisparse");
    put_text("empty", "");
    put_key("u8", U8);
    put_le(200, 1);
    put_key("i8", I8);
    put_le(0x80, 1);
    put_key("i64", I64);
    put_le(70000, 8);
    put_key("u64", U64);
    put_le(1ull << 32, 8);
    put_key("f32", F32);
    put_le(0x3FC00000, 4);
    put_f64("f64", 0.1);
    put_key("bool", BOOL);
    put_le(1, 1);
    put_array("ids", I32, 3);
    put_le(5, 4);
    put_le(6, 4);
    put_le(0x7FFFFFFF, 4);
    put_array("none", F32, 0);
    put_array("words", STRING, 2);
    put_string("a");
    put_string("");
    put_array("signed", I16, 2);
    put_le(1, 2);
    put_le(0xFFFF, 2);
    put_tensor("b.weight", 32, 2, TENSOR_Q8_0, 128);
    put_shape("a.norm", 1, (uint64_t[]){ 8 }, TENSOR_F32, 0);
    put_tensor(NAME_LONG, 64, 1, TENSOR_Q4_1, 64);
    put_shape("d4", 4, (uint64_t[]){ 2, 3, 1, 2 }, TENSOR_BF16, 256);
    pad(64);
    put_data(256 + 24);
}

static void test_good_tensors(const hsri_container *c)
{
    const uint8_t *data = (const uint8_t *)hsri_container_base(c) + (f.n - 280);
    CHECK(hsri_container_size(c) == f.n);
    CHECK(memcmp(hsri_container_base(c), f.bytes, f.n) == 0);
    CHECK(strcmp(hsri_container_path(c), path) == 0);
    CHECK(hsri_container_n_tensors(c) == 4);
    const hsri_tensor_info *t = hsri_container_tensor_at(c, 0);
    CHECK(t && strcmp(t->name, "b.weight") == 0 && t->type == TENSOR_Q8_0 && t->n_dims == 2 && t->size == 68);
    CHECK(t && t->dims[0] == 32 && t->dims[1] == 2 && t->dims[2] == 1 && t->dims[3] == 1 && t->data == data + 128);
    CHECK(hsri_container_tensor(c, "b.weight") == t);
    t = hsri_container_tensor(c, "a.norm");
    CHECK(t && t == hsri_container_tensor_at(c, 1) && t->n_dims == 1 && t->size == 32 && t->data == data);
    t = hsri_container_tensor(c, NAME_LONG);
    CHECK(t && t->size == 40 && t->data == data + 64);
    t = hsri_container_tensor(c, "d4");
    CHECK(t && t->size == 24 && t->n_dims == 4 && t->dims[3] == 2);
    CHECK(hsri_container_tensor(c, "") == NULL);
    CHECK(hsri_container_tensor(c, "a") == NULL);
    CHECK(hsri_container_tensor(c, "zzz") == NULL);
    CHECK(hsri_container_tensor_at(c, 4) == NULL);
}

static void test_good_numbers(const hsri_container *c)
{
    static const struct { const char *key; hsr_status status; uint32_t value; } u32s[] = {
        { "general.alignment", HSR_OK, 64 }, { "u8", HSR_OK, 200 }, { "i64", HSR_OK, 70000 }, { "i8", HSR_E_FORMAT, 0 },
        { "u64", HSR_E_FORMAT, 0 }, { "f32", HSR_E_FORMAT, 0 }, { "f64", HSR_E_FORMAT, 0 }, { "bool", HSR_E_FORMAT, 0 },
        { "empty", HSR_E_FORMAT, 0 }, { "ids", HSR_E_FORMAT, 0 }, { "absent", HSR_AGAIN, 0 }, { "", HSR_AGAIN, 0 },
    };
    static const struct { const char *key; hsr_status status; double value; } f64s[] = {
        { "f32", HSR_OK, 1.5 }, { "f64", HSR_OK, 0.1 }, { "i8", HSR_OK, -128 }, { "u64", HSR_OK, 4294967296.0 },
        { "u8", HSR_OK, 200 }, { "bool", HSR_E_FORMAT, 0 }, { "empty", HSR_E_FORMAT, 0 }, { "none", HSR_E_FORMAT, 0 },
        { "absent", HSR_AGAIN, 0 },
    };
    for (size_t i = 0; i < sizeof(u32s) / sizeof(u32s[0]); i++) {
        hsr_error err = HSR_ERROR_INIT;
        uint32_t value = 0;
        CHECK(hsri_container_u32(c, u32s[i].key, &value, &err) == u32s[i].status && value == u32s[i].value);
        CHECK(u32s[i].status >= 0 ? !err.message[0] : strstr(err.message, u32s[i].key) && strstr(err.message, path));
    }
    for (size_t i = 0; i < sizeof(f64s) / sizeof(f64s[0]); i++) {
        hsr_error err = HSR_ERROR_INIT;
        double value = 0;
        CHECK(hsri_container_f64(c, f64s[i].key, &value, &err) == f64s[i].status && value == f64s[i].value);
        CHECK(f64s[i].status >= 0 || strstr(err.message, f64s[i].key));
    }
}

static void test_good_strings(const hsri_container *c)
{
    hsr_error err = HSR_ERROR_INIT;
    const char *text;
    uint64_t size;
    CHECK(hsri_container_string(c, "general.architecture", &text, &size, &err) == HSR_OK);
    CHECK(size == 8 && memcmp(text, "hisparse", 8) == 0);
    CHECK(hsri_container_string(c, "empty", &text, &size, &err) == HSR_OK && size == 0 && text);
    CHECK(hsri_container_string(c, "absent", &text, &size, &err) == HSR_AGAIN && size == 0 && !text);
    CHECK(hsri_container_string(c, "words", &text, &size, &err) == HSR_E_FORMAT && strstr(err.message, "array of string"));
    CHECK(hsri_container_string(c, "u8", &text, &size, &err) == HSR_E_FORMAT && strstr(err.message, "'u8' is of type u8"));
}

static void test_good_arrays(const hsri_container *c)
{
    hsr_error err = HSR_ERROR_INIT;
    uint32_t ids[4] = { 0 };
    uint64_t n;
    CHECK(hsri_container_u32_array(c, "ids", ids, 3, &n, &err) == HSR_OK);
    CHECK(n == 3 && ids[0] == 5 && ids[1] == 6 && ids[2] == 0x7FFFFFFF && ids[3] == 0);
    CHECK(hsri_container_u32_array(c, "none", ids, 0, &n, &err) == HSR_OK && n == 0);
    CHECK(hsri_container_u32_array(c, "absent", ids, 4, &n, &err) == HSR_AGAIN && n == 0);
    CHECK(hsri_container_u32_array(c, "ids", ids, 2, &n, &err) == HSR_E_FORMAT && strstr(err.message, "'ids' has 3 elements"));
    CHECK(hsri_container_u32_array(c, "signed", ids, 4, &n, &err) == HSR_E_FORMAT && strstr(err.message, "'signed'"));
    CHECK(hsri_container_u32_array(c, "words", ids, 4, &n, &err) == HSR_E_FORMAT);
    CHECK(hsri_container_u32_array(c, "u8", ids, 4, &n, &err) == HSR_E_FORMAT);
}

static void test_good(void)
{
    build_good();
    hsri_container *c = open_built();
    if (!c)
        return;
    unlink(path);   /* the mapping lives without the name */
    test_good_tensors(c);
    test_good_numbers(c);
    test_good_strings(c);
    test_good_arrays(c);
    hsri_container_close(c);
    hsri_container_close(NULL);
}

static void test_default_alignment(void)
{
    begin(1, 0);
    put_simple_tensor(32);
    hsri_container *c = open_built();
    CHECK(c && hsri_container_tensor(c, "t")->data == (const uint8_t *)hsri_container_base(c) + f.n - 16);
    hsri_container_close(c);
}

static void test_empty_directory(void)
{
    begin(0, 0);
    hsri_container *c = open_built();
    CHECK(c && hsri_container_n_tensors(c) == 0 && !hsri_container_tensor(c, "t") && !hsri_container_tensor_at(c, 0));
    hsri_container_close(c);
}

/* Sizes at which readers with fixed buffers have failed. */
static void test_directory_sizes(void)
{
    static const size_t sizes[] = { 4095, 4096, 4097, 65535, 65536, 65537, 100000 };
    static char text[100001];
    memset(text, 'x', sizeof(text) - 1);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        begin(1, 1);
        put_key("text", STRING);
        put_bytes(text, sizes[i] - f.n - 8 - 33);
        put_shape("t", 1, (uint64_t[]){ 4 }, TENSOR_F32, 0);
        CHECK(f.n == sizes[i]);
        pad(32);
        put_data(16);
        hsri_container *c = open_built();
        const char *value;
        uint64_t size;
        CHECK(c && hsri_container_string(c, "text", &value, &size, NULL) == HSR_OK && size == sizes[i] - 24 - 57);
        hsri_container_close(c);
    }
}

/* Enough names to need several chunks and many steps of the search. */
static void test_many_names(void)
{
    enum { N = 1500 };
    char name[40];
    begin(N, N);
    for (uint32_t i = 0; i < N; i++) {
        snprintf(name, sizeof(name), "key.%u", (i * 7919u) % N);
        put_u32(name, i);
    }
    for (uint32_t i = 0; i < N; i++) {
        snprintf(name, sizeof(name), "blk.%u", (i * 7919u) % N);
        put_shape(name, 1, (uint64_t[]){ 1 }, TENSOR_I8, 32 * i);
    }
    pad(32);
    put_data(32 * (N - 1) + 1);
    hsri_container *c = open_built();
    for (uint32_t i = 0; c && i < N; i++) {
        uint32_t value = 0;
        snprintf(name, sizeof(name), "key.%u", (i * 7919u) % N);
        CHECK(hsri_container_u32(c, name, &value, NULL) == HSR_OK && value == i);
        snprintf(name, sizeof(name), "blk.%u", (i * 7919u) % N);
        CHECK(hsri_container_tensor(c, name) == hsri_container_tensor_at(c, i));
    }
    hsri_container_close(c);
}

/* Names of all lengths round the size of the chunks that keep them. */
static void test_long_names(void)
{
    static char name[16400];
    memset(name, 'n', sizeof(name));
    for (size_t n = 16370; n < 16390; n++) {
        begin(0, 2);
        put_key("a", U8);
        put_le(7, 1);
        put_bytes(name, n);
        put_le(U8, 4);
        put_le(9, 1);
        hsri_container *c = open_built();
        uint32_t a = 0, b = 0;
        name[n] = '\0';
        CHECK(c && hsri_container_u32(c, "a", &a, NULL) == HSR_OK && hsri_container_u32(c, name, &b, NULL) == HSR_OK && a == 7 && b == 9);
        name[n] = 'n';
        hsri_container_close(c);
    }
}

/* ---- cut files ---- */

static void test_every_cut(void)
{
    build_good();
    for (size_t n = 0; n < f.n; n++) {
        save(n);
        if (!CHECK(refused(path, HSR_E_FORMAT, (const char *const[]){ NULL })))
            return;
    }
    save(f.n - 1);
    CHECK(refused(path, HSR_E_FORMAT, (const char *const[]){ "tensor 'd4'", "does not fit", NULL }));
}

/* Where nothing follows, only the key's own check can notice that its last byte is missing. */
static void test_cut_last_value(void)
{
    static const struct { uint32_t type; int n_bytes; } values[] = { { U8, 1 }, { U16, 2 }, { F32, 4 }, { I64, 8 }, { BOOL, 1 } };
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        begin(0, 1);
        put_key("last", values[i].type);
        put_le(1, values[i].n_bytes);
        hsri_container_close(open_built());
        f.n--;
        CHECK(REFUSED("key"));
    }
    begin(0, 1);
    put_array("last", U16, 3);
    put_data(5);
    CHECK(REFUSED("key 'last'"));
    begin(0, 1);
    put_array("last", STRING, 2);
    put_string("one");
    put_string("two");
    f.n--;
    CHECK(REFUSED("key 'last'", "cut short"));
    begin(0, 1);
    put_text("last", "text");
    f.n--;
    CHECK(REFUSED("key 'last'", "cut short"));
}

/* Exactly one page, so that reading on would leave the mapping. */
static void test_cut_at_page_end(void)
{
    static char text[4096];
    begin(1, 2);
    put_key("text", STRING);
    put_bytes(text, 4096 - f.n - 8 - 12);
    put_le(4, 8);
    put("keys", 4);
    CHECK(f.n == 4096);
    CHECK(REFUSED("key 'keys'", "cut short"));
}

/* Any flipped byte gives a file that opens or one that is refused, never a crash. */
static void test_every_byte_changed(void)
{
    build_good();
    size_t directory = f.n - 280;
    for (size_t i = 0; i < directory; i++) {
        static const uint8_t changes[] = { 0x01, 0x80, 0xFF };
        for (size_t k = 0; k < sizeof(changes); k++) {
            hsri_container *c;
            f.bytes[i] ^= changes[k];
            save(f.n);
            hsr_status status = hsri_container_open(path, &c, NULL);
            CHECK(status == HSR_OK || status == HSR_E_FORMAT || status == HSR_E_VERSION);
            hsri_container_close(c);
            f.bytes[i] ^= changes[k];
        }
    }
}

/* ---- refusals ---- */

static void test_head(void)
{
    f.n = 0;
    CHECK(REFUSED("empty"));
    begin(0, 0);
    f.bytes[3] = 'G';
    CHECK(REFUSED("does not start with GGUF"));
    begin(0, 0);
    memcpy(f.bytes, "FUGG", 4);
    CHECK(REFUSED("big-endian"));
    begin(0, 0);
    memcpy(f.bytes + 4, "\0\0\0\3", 4);
    CHECK(REFUSED("big-endian"));
    for (uint8_t version = 0; version < 6; version++) {
        begin(0, 0);
        f.bytes[4] = version;
        save(f.n);
        if (version != 3)
            CHECK(refused(path, HSR_E_VERSION, (const char *const[]){ "version", NULL }));
    }
    begin(1ull << 60, 0);
    put_data(200);
    CHECK(REFUSED("1152921504606846976 tensors"));
    begin(0, 1ull << 60);
    put_data(200);
    CHECK(REFUSED("1152921504606846976 keys"));
    begin(UINT64_MAX, UINT64_MAX);
    CHECK(REFUSED("tensors"));
}

static void test_alignment(void)
{
    static const uint32_t bad[] = { 0, 1, 3, 4, 12, 31, 33, 1u << 21, 1u << 30, UINT32_MAX };
    static const uint32_t good[] = { 8, 16, 32, 4096, 65536 };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        begin(1, 1);
        put_u32("general.alignment", bad[i]);
        put_simple_tensor(32);
        CHECK(REFUSED("'general.alignment'", "power of two"));
    }
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        begin(1, 1);
        put_u32("general.alignment", good[i]);
        put_simple_tensor(good[i]);
        hsri_container *c = open_built();
        CHECK(c && ((uintptr_t)hsri_container_tensor(c, "t")->data - (uintptr_t)hsri_container_base(c)) % good[i] == 0);
        hsri_container_close(c);
    }
    begin(1, 1);
    put_text("general.alignment", "32");
    put_simple_tensor(32);
    CHECK(REFUSED("'general.alignment'", "string"));
    begin(1, 1);
    put_u32("general.alignment", 64);
    put_shape("t", 1, (uint64_t[]){ 4 }, TENSOR_F32, 32);
    pad(64);
    put_data(64);
    CHECK(REFUSED("tensor 't'", "offset 32"));
}

static void test_keys(void)
{
    begin(0, 2);
    put_u32("same", 1);
    put_text("same", "x");
    CHECK(REFUSED("key 'same'", "twice"));
    begin(0, 1);
    put_key("odd", 13);
    put_data(50);
    CHECK(REFUSED("key 'odd'", "unknown type 13"));
    begin(0, 1);
    put_array("nested", ARRAY, 1);
    put_le(U8, 4);
    put_le(1, 8);
    put_data(50);
    CHECK(REFUSED("key 'nested'", "array of arrays"));
    begin(0, 1);
    put_array("odd", 99, 1);
    put_data(50);
    CHECK(REFUSED("key 'odd'", "unknown type 99"));
    begin(0, 1);
    put_array("scores", F32, 1ull << 60);
    put_data(50);
    CHECK(REFUSED("key 'scores'", "1152921504606846976"));
    begin(0, 1);
    put_array("scores", F64, (1ull << 61) + 1);   /* times 8 wraps to 8 */
    put_data(50);
    CHECK(REFUSED("key 'scores'"));
    begin(0, 1);
    put_array("words", STRING, 1ull << 60);
    put_data(50);
    CHECK(REFUSED("key 'words'"));
    begin(0, 1);
    put_array("words", STRING, 3);
    put_string("one");
    put_le(1ull << 60, 8);
    put_data(50);
    CHECK(REFUSED("key 'words'", "cut short"));
    begin(0, 1);
    put_key("text", STRING);
    put_le(1ull << 60, 8);
    put_data(50);
    CHECK(REFUSED("key 'text'", "cut short"));
    begin(0, 1);
    put_key("text", STRING);
    put_le(UINT64_MAX, 8);   /* wraps if added to the position */
    put_data(50);
    CHECK(REFUSED("key 'text'", "cut short"));
}

/* An array that says it is of bytes is read as bytes: asking for numbers of another width is no way past its end. */
static void test_narrow_array(void)
{
    uint32_t out[4];
    uint64_t n;
    begin(0, 1);
    put_array("scores", U8, 4);
    put_le(0x04030201, 4);
    hsri_container *c = open_built();
    CHECK(c && hsri_container_u32_array(c, "scores", out, 4, &n, NULL) == HSR_OK && n == 4 && out[0] == 1 && out[3] == 4);
    hsri_container_close(c);
}

static void test_names(void)
{
    static char name[70000];
    memset(name, 'n', sizeof(name));
    begin(0, 1);
    put_bytes("a\0b", 3);
    put_le(U8, 4);
    put_data(50);
    CHECK(REFUSED("key 'a'", "NUL"));
    begin(0, 1);
    put_bytes("", 0);
    put_le(U8, 4);
    put_data(50);
    CHECK(REFUSED("key number 0", "name of 0 bytes"));
    begin(0, 1);
    put_bytes(name, 65536);
    put_le(U8, 4);
    put_data(50);
    CHECK(REFUSED("key number 0", "name of 65536 bytes"));
    begin(0, 1);
    put_bytes(name, 65535);
    put_le(U8, 4);
    put_data(1);
    hsri_container_close(open_built());
    begin(0, 1);
    put_le(1ull << 60, 8);
    put_data(50);
    CHECK(REFUSED("key number 0", "cut short"));
    begin(1, 0);
    put_bytes("t\0", 2);
    put_data(50);
    CHECK(REFUSED("tensor 't'", "NUL"));
    begin(1, 0);
    put_tensor("evil\n\x1B[2Jname\xFF", 1, 1, 999, 0);
    put_data(50);
    CHECK(REFUSED("tensor 'evil??[2Jname?'"));
}

static void test_shapes(void)
{
    static const uint32_t counts[] = { 0, 5, 9, UINT32_MAX };
    static const struct { uint64_t x, y; uint32_t type; const char *word; } shapes[] = {
        { 1ull << 63, 2, TENSOR_F32, "overflow" },
        { 1ull << 32, 1ull << 32, TENSOR_F32, "overflow" },
        { UINT64_MAX, UINT64_MAX, TENSOR_F32, "overflow" },
        { 1ull << 62, 1, TENSOR_F32, "overflow" },                /* bytes, not elements */
        { UINT64_MAX - 31, 1, TENSOR_Q8_0, "overflow" },
        { 1ull << 61, 1, TENSOR_F32, "does not fit" },
        { 0, 2, TENSOR_F32, "size 0" },
        { 2, 0, TENSOR_F32, "size 0" },
        { 16, 2, TENSOR_Q8_0, "multiple of the 32" },
        { 33, 1, TENSOR_Q4_1, "multiple of the 32" },
        { 32, 1, 4, "unknown type 4" },
        { 32, 1, 41, "unknown type 41" },
        { 32, 1, UINT32_MAX, "unknown type 4294967295" },
    };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        begin(1, 0);
        put_string("t");
        put_le(counts[i], 4);
        for (int k = 0; k < 16; k++)
            put_le(1, 8);
        CHECK(REFUSED("tensor 't'", "dimensions"));
    }
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        begin(1, 0);
        put_tensor("t", shapes[i].x, shapes[i].y, shapes[i].type, 0);
        pad(32);
        put_data(200);
        CHECK(REFUSED("tensor 't'", shapes[i].word));
    }
}

static void test_places(void)
{
    static const uint64_t offsets[] = { 32, 1ull << 40, UINT64_MAX - 31 };
    for (size_t i = 0; i < sizeof(offsets) / sizeof(offsets[0]); i++) {
        begin(1, 0);
        put_tensor("t", 4, 1, TENSOR_F32, offsets[i]);
        pad(32);
        put_data(32 + 15);
        CHECK(REFUSED("tensor 't'", "does not fit"));
    }
    begin(1, 0);
    put_tensor("t", UINT64_MAX, 1, TENSOR_I8, 32);   /* offset and size add up to 31 */
    pad(32);
    put_data(64);
    CHECK(REFUSED("tensor 't'", "does not fit"));
    begin(1, 0);
    put_tensor("t", 4, 1, TENSOR_F32, 7);
    pad(32);
    put_data(64);
    CHECK(REFUSED("tensor 't'", "offset 7"));
    begin(2, 0);
    put_tensor("one", 16, 1, TENSOR_F32, 0);
    put_tensor("two", 4, 1, TENSOR_F32, 32);
    pad(32);
    put_data(64);
    CHECK(REFUSED("tensor 'two' overlaps tensor 'one'"));
    begin(2, 0);
    put_tensor("one", 4, 1, TENSOR_F32, 32);
    put_tensor("two", 4, 1, TENSOR_F32, 32);
    pad(32);
    put_data(64);
    CHECK(REFUSED("overlaps"));
    begin(3, 0);
    put_tensor("same", 4, 1, TENSOR_F32, 0);
    put_tensor("other", 4, 1, TENSOR_F32, 32);
    put_tensor("same", 4, 1, TENSOR_F32, 64);
    pad(32);
    put_data(96);
    CHECK(REFUSED("tensor 'same'", "twice"));
    begin(1, 0);
    put_tensor("t", 4, 1, TENSOR_F32, 0);   /* the file ends before the data begins */
    CHECK(REFUSED("tensor 't'", "does not fit"));
}

/* ---- what is not a file, and strange names of files ---- */

static void test_not_a_file(void)
{
    char pipe_path[300];
    CHECK(refused(folder, HSR_E_FORMAT, (const char *const[]){ "folder", NULL }));
    CHECK(refused("/dev/null", HSR_E_FORMAT, (const char *const[]){ "regular", NULL }));
    snprintf(pipe_path, sizeof(pipe_path), "%s/pipe", folder);
    CHECK(mkfifo(pipe_path, 0600) == 0);
    CHECK(refused(pipe_path, HSR_E_FORMAT, (const char *const[]){ "regular", NULL }));   /* and does not wait for a writer */
    hsr_error err = HSR_ERROR_INIT;
    hsri_container *c;
    snprintf(pipe_path, sizeof(pipe_path), "%s/absent", folder);
    CHECK(hsri_container_open(pipe_path, &c, &err) == HSR_E_IO && err.sys_code == ENOENT && strstr(err.message, "absent"));
    CHECK(hsri_container_open("", &c, &err) == HSR_E_IO && err.sys_code == ENOENT);
}

static void test_paths(void)
{
    static const char *const names[] = { "with space [1]", "-dash", "\xE6\xA8\xA1\xE5\x9E\x8B", "e\xCC\x81", "raw\xFF-byte" };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char before[sizeof(path)];
        memcpy(before, path, sizeof(path));
        snprintf(path, sizeof(path), "%s/%s.hsr", folder, names[i]);
        build_good();
        hsri_container_close(open_built());
        save(10);
        hsr_error err = HSR_ERROR_INIT;
        hsri_container *c;
        CHECK(hsri_container_open(path, &c, &err) == HSR_E_FORMAT);
        CHECK(strstr(err.message, i == 4 ? "raw?-byte.hsr" : names[i]));
        memcpy(path, before, sizeof(path));
    }
}

/* ---- manners ---- */

/* A 200-byte file costs little time and memory, whatever it claims. */
static void test_cost(void)
{
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    uint64_t start = hsri_now_ns();
    begin(1ull << 60, 1ull << 60);
    put_data(176);
    CHECK(REFUSED("tensors"));
    begin(2, 6);
    put_array("words", STRING, 8);
    put_data(150);
    CHECK(REFUSED("key 'words'"));
    getrusage(RUSAGE_SELF, &after);
    CHECK(hsri_now_ns() - start < 1000000000u);
    CHECK(after.ru_maxrss - before.ru_maxrss < 64 * 1024);
}

static int open_files(void)
{
    int n = 0;
    DIR *all = opendir("/proc/self/fd");
    while (all && readdir(all))
        n++;
    if (all)
        closedir(all);
    return n;
}

/* With descriptors 0 to 2 closed by the host, an open model must not sit on one of them. */
static void test_low_descriptors(void)
{
    build_good();
    save(f.n);
    pid_t child = fork();
    if (child == 0) {
        hsri_container *c;
        for (int fd = 0; fd < 3; fd++)
            close(fd);
        bool ok = hsri_container_open(path, &c, NULL) == HSR_OK;
        for (int fd = 0; fd < 3; fd++)
            ok = ok && fcntl(fd, F_GETFD) < 0;
        _exit(ok ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

static void test_descriptors_return(void)
{
    int before = open_files();
    build_good();
    hsri_container *c = open_built();
    CHECK(open_files() == before);
    save(100);
    hsri_container *bad;
    CHECK(hsri_container_open(path, &bad, NULL) == HSR_E_FORMAT);
    CHECK(open_files() == before);
    build_good();
    hsri_container_close(c);
}

int main(void)
{
    if (!CHECK(mkdtemp(folder) != NULL))
        return CHECK_REPORT();
    snprintf(path, sizeof(path), "%s/model.hsr", folder);
    test_good();
    test_default_alignment();
    test_empty_directory();
    test_directory_sizes();
    test_many_names();
    test_long_names();
    test_every_cut();
    test_cut_last_value();
    test_cut_at_page_end();
    test_every_byte_changed();
    test_head();
    test_alignment();
    test_keys();
    test_narrow_array();
    test_names();
    test_shapes();
    test_places();
    test_not_a_file();
    test_paths();
    test_cost();
    test_low_descriptors();
    test_descriptors_return();
    char command[128];
    snprintf(command, sizeof(command), "rm -rf '%s'", folder);
    CHECK(system(command) == 0);
    return CHECK_REPORT();
}
