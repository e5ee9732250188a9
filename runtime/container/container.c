/* SPDX-License-Identifier: Apache-2.0 */
/* Layout of a GGUF file, all numbers little-endian:
 *   "GGUF", u32 version, u64 tensors, u64 keys
 *   per key:    string name, u32 type, value                     string: u64 length, bytes
 *   per tensor: string name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset
 *   padding to general.alignment; offsets count from here, in multiples of it */
#define _GNU_SOURCE 1
#include "container/container.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/array.h"
#include "base/fd.h"
#include "base/status.h"

#define VERSION           3
#define DEFAULT_ALIGNMENT 32u
#define MIN_ALIGNMENT     8u
#define MAX_ALIGNMENT     (1u << 20)
#define MAX_NAME          65535u  /* the format's own limit for keys */
#define MIN_KEY_BYTES     14u     /* name of one byte, type, value of one byte */
#define MIN_TENSOR_BYTES  33u     /* name of one byte, one dim */
#define CHUNK_BYTES       16384u
#define SHOWN_NAME        100     /* most bytes of a name in a message */
#define SHOWN_PATH        150

enum value_type {
    TYPE_U8, TYPE_I8, TYPE_U16, TYPE_I16, TYPE_U32, TYPE_I32, TYPE_F32, TYPE_BOOL, TYPE_STRING, TYPE_ARRAY,
    TYPE_U64, TYPE_I64, TYPE_F64, N_VALUE_TYPES
};

static const char *const value_type_names[N_VALUE_TYPES] = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"
};

/* Bytes of a value, 0 for those that tell their size themselves. */
static const uint8_t value_sizes[N_VALUE_TYPES] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

/* Tensor types by ggml number: elements and bytes of a block; 0 elements: no such type, or one that files never hold. */
static const struct { uint16_t elements, bytes; } tensor_types[] = {
    [0]  = { 1, 4 },      /* F32 */
    [1]  = { 1, 2 },      /* F16 */
    [2]  = { 32, 18 },    /* Q4_0 */
    [3]  = { 32, 20 },    /* Q4_1 */
    [6]  = { 32, 22 },    /* Q5_0 */
    [7]  = { 32, 24 },    /* Q5_1 */
    [8]  = { 32, 34 },    /* Q8_0 */
    [10] = { 256, 84 },   /* Q2_K */
    [11] = { 256, 110 },  /* Q3_K */
    [12] = { 256, 144 },  /* Q4_K */
    [13] = { 256, 176 },  /* Q5_K */
    [14] = { 256, 210 },  /* Q6_K */
    [16] = { 256, 66 },   /* IQ2_XXS */
    [17] = { 256, 74 },   /* IQ2_XS */
    [18] = { 256, 98 },   /* IQ3_XXS */
    [19] = { 256, 50 },   /* IQ1_S */
    [20] = { 32, 18 },    /* IQ4_NL */
    [21] = { 256, 110 },  /* IQ3_S */
    [22] = { 256, 82 },   /* IQ2_S */
    [23] = { 256, 136 },  /* IQ4_XS */
    [24] = { 1, 1 },      /* I8 */
    [25] = { 1, 2 },      /* I16 */
    [26] = { 1, 4 },      /* I32 */
    [27] = { 1, 8 },      /* I64 */
    [28] = { 1, 8 },      /* F64 */
    [29] = { 256, 56 },   /* IQ1_M */
    [30] = { 1, 2 },      /* BF16 */
    [34] = { 256, 54 },   /* TQ1_0 */
    [35] = { 256, 66 },   /* TQ2_0 */
    [39] = { 32, 17 },    /* MXFP4 */
    [40] = { 64, 36 },    /* NVFP4 */
};
#define N_TENSOR_TYPES (sizeof(tensor_types) / sizeof(tensor_types[0]))

/* A metadata value; `at` is its first byte in the mapping, after a string's or an array's head. */
typedef struct entry {
    const char    *name;
    const uint8_t *at;
    uint64_t       size;     /* string: bytes; array: elements; else 1 */
    uint32_t       type;     /* of the elements of an array */
    bool           is_array;
} entry;

typedef struct tensor {
    hsri_tensor_info info;
    uint64_t         offset; /* from the start of the data */
} tensor;

/* Names are kept in chunks, so that they do not move while more are added. */
typedef struct chunk {
    struct chunk *next;
    size_t        used, room;
    char          text[];
} chunk;

struct hsri_container {
    char          *path;
    const char    *shown;      /* the path's last bytes, for messages */
    const uint8_t *base;
    uint64_t       size;
    entry         *entries;    /* in file order while reading, then by name */
    size_t         n_entries, entries_room;
    tensor        *tensors;    /* in file order */
    size_t         n_tensors, tensors_room;
    const tensor **by_name;
    chunk         *names;
};

/* Reads one file front to back; `subject`, `name` and `index` say what a refusal is about. */
typedef struct reader {
    hsri_container *c;
    hsr_error      *err;
    uint64_t        at;
    const char     *subject;   /* "key" or "tensor"; NULL: the file as a whole */
    const char     *name;      /* NULL: not read yet */
    uint64_t        index;
} reader;

/* ---- refusals ---- */

__attribute__((format(printf, 2, 3)))
static hsr_status refuse(const reader *r, const char *format, ...)
{
    char reason[200];
    va_list args;
    va_start(args, format);
    if (vsnprintf(reason, sizeof(reason), format, args) < 0)
        reason[0] = '\0';
    va_end(args);
    const char *path = r->c->shown;
    if (r->name)
        return hsri_fail(r->err, HSR_E_FORMAT, "%s: %s '%.*s' %s", path, r->subject, SHOWN_NAME, r->name, reason);
    if (r->subject)
        return hsri_fail(r->err, HSR_E_FORMAT, "%s: %s number %" PRIu64 " %s", path, r->subject, r->index, reason);
    return hsri_fail(r->err, HSR_E_FORMAT, "%s: the file %s", path, reason);
}

static hsr_status refuse_memory(const reader *r)
{
    return hsri_fail(r->err, HSR_E_NOMEM, "%s: no memory for the file's directory", r->c->shown);
}

/* ---- numbers ---- */

static uint64_t load_le(const uint8_t *at, uint32_t n_bytes)
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < n_bytes; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

static double load_float(const uint8_t *at, uint32_t n_bytes)
{
    if (n_bytes == 4) {
        uint32_t bits = (uint32_t)load_le(at, 4);
        float value;
        memcpy(&value, &bits, sizeof(value));
        return value;
    }
    uint64_t bits = load_le(at, 8);
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static uint64_t bytes_left(const reader *r) { return r->c->size - r->at; }

static hsr_status skip(reader *r, uint64_t n_bytes, const uint8_t **at)
{
    *at = r->c->base + r->at;
    if (n_bytes > bytes_left(r))
        return refuse(r, "is cut short: %" PRIu64 " bytes needed at offset %" PRIu64 ", the file ends at %" PRIu64,
                      n_bytes, r->at, r->c->size);
    r->at += n_bytes;
    return HSR_OK;
}

static hsr_status read_u32(reader *r, uint32_t *value)
{
    const uint8_t *at;
    HSRI_TRY(skip(r, 4, &at));
    *value = (uint32_t)load_le(at, 4);
    return HSR_OK;
}

static hsr_status read_u64(reader *r, uint64_t *value)
{
    const uint8_t *at;
    HSRI_TRY(skip(r, 8, &at));
    *value = load_le(at, 8);
    return HSR_OK;
}

static hsr_status read_string(reader *r, const uint8_t **at, uint64_t *size)
{
    HSRI_TRY(read_u64(r, size));
    return skip(r, *size, at);
}

static void begin(reader *r, const char *subject, uint64_t index)
{
    r->subject = subject;
    r->name = NULL;
    r->index = index;
}

static void about(reader *r, const char *subject, const char *name)
{
    r->subject = subject;
    r->name = name;
}

/* ---- names ---- */

static const char *keep_name(hsri_container *c, const uint8_t *bytes, size_t size)
{
    chunk *names = c->names;
    if (!names || names->room - names->used <= size) {
        size_t room = (size_t)hsri_max(size + 1, CHUNK_BYTES);
        names = hsri_new_array(1, sizeof(*names) + room);
        if (!names)
            return NULL;
        names->room = room;
        names->next = c->names;
        c->names = names;
    }
    char *name = names->text + names->used;
    memcpy(name, bytes, size);
    name[size] = '\0';
    names->used += size + 1;
    return name;
}

/* Read the name of the key or tensor at hand. */
static hsr_status read_name(reader *r, const char **name)
{
    const uint8_t *bytes;
    uint64_t size;
    HSRI_TRY(read_string(r, &bytes, &size));
    if (size == 0 || size > MAX_NAME)
        return refuse(r, "has a name of %" PRIu64 " bytes, must be 1 to %u", size, MAX_NAME);
    *name = keep_name(r->c, bytes, (size_t)size);
    if (!*name)
        return refuse_memory(r);
    r->name = *name;
    if (strlen(*name) != size)
        return refuse(r, "has a NUL in its name");
    return HSR_OK;
}

/* ---- keys ---- */

/* Walk over an array: strings one by one, all else at once. */
static hsr_status read_array(reader *r, entry *e)
{
    const uint8_t *at;
    uint64_t bytes, size;
    HSRI_TRY(read_u32(r, &e->type));
    HSRI_TRY(read_u64(r, &e->size));
    if (e->type == TYPE_ARRAY)
        return refuse(r, "is an array of arrays");
    if (e->type >= N_VALUE_TYPES)
        return refuse(r, "is an array of unknown type %" PRIu32, e->type);
    e->is_array = true;
    e->at = r->c->base + r->at;
    uint32_t each = e->type == TYPE_STRING ? 8 : value_sizes[e->type];
    if (__builtin_mul_overflow(e->size, (uint64_t)each, &bytes) || bytes > bytes_left(r))
        return refuse(r, "claims %" PRIu64 " elements, more than the file holds", e->size);
    if (e->type != TYPE_STRING)
        return skip(r, bytes, &at);
    for (uint64_t i = 0; i < e->size; i++)
        HSRI_TRY(read_string(r, &at, &size));
    return HSR_OK;
}

static hsr_status read_value(reader *r, entry *e)
{
    HSRI_TRY(read_u32(r, &e->type));
    if (e->type >= N_VALUE_TYPES)
        return refuse(r, "has unknown type %" PRIu32, e->type);
    if (e->type == TYPE_ARRAY)
        return read_array(r, e);
    if (e->type == TYPE_STRING)
        return read_string(r, &e->at, &e->size);
    e->size = 1;
    return skip(r, value_sizes[e->type], &e->at);
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

static hsr_status read_keys(reader *r, uint64_t n)
{
    hsri_container *c = r->c;
    for (uint64_t i = 0; i < n; i++) {
        if (!hsri_grow((void **)&c->entries, &c->entries_room, i + 1, sizeof(*c->entries)))
            return refuse_memory(r);
        begin(r, "key", i);
        HSRI_TRY(read_name(r, &c->entries[i].name));
        HSRI_TRY(read_value(r, &c->entries[i]));
        c->n_entries++;
    }
    if (n)
        qsort(c->entries, n, sizeof(*c->entries), compare_entries);
    for (uint64_t i = 1; i < n; i++) {
        about(r, "key", c->entries[i].name);
        if (compare_entries(&c->entries[i - 1], &c->entries[i]) == 0)
            return refuse(r, "is there twice");
    }
    return HSR_OK;
}

/* ---- tensors ---- */

static hsr_status read_shape(reader *r, hsri_tensor_info *info)
{
    HSRI_TRY(read_u32(r, &info->n_dims));
    if (info->n_dims < 1 || info->n_dims > HSRI_GGUF_MAX_DIMS)
        return refuse(r, "has %" PRIu32 " dimensions, must have 1 to %d", info->n_dims, HSRI_GGUF_MAX_DIMS);
    for (uint32_t i = 0; i < HSRI_GGUF_MAX_DIMS; i++) {
        info->dims[i] = 1;
        if (i < info->n_dims)
            HSRI_TRY(read_u64(r, &info->dims[i]));
        if (info->dims[i] == 0)
            return refuse(r, "has dimension %" PRIu32 " of size 0", i);
    }
    return HSR_OK;
}

/* Bytes of a tensor, from type and shape. */
static hsr_status set_size(const reader *r, hsri_tensor_info *info)
{
    if (info->type >= N_TENSOR_TYPES || tensor_types[info->type].elements == 0)
        return refuse(r, "has unknown type %" PRIu32, info->type);
    uint64_t block = tensor_types[info->type].elements, elements = 1;
    for (uint32_t i = 0; i < info->n_dims; i++) {
        if (__builtin_mul_overflow(elements, info->dims[i], &elements))
            return refuse(r, "has dimensions whose product overflows");
    }
    if (info->dims[0] % block)
        return refuse(r, "has rows of %" PRIu64 " elements, not a multiple of the %" PRIu64 " in a block of its type",
                      info->dims[0], block);
    if (__builtin_mul_overflow(elements / block, (uint64_t)tensor_types[info->type].bytes, &info->size))
        return refuse(r, "has a byte size that overflows");
    return HSR_OK;
}

static hsr_status read_tensors(reader *r, uint64_t n, uint32_t alignment)
{
    hsri_container *c = r->c;
    for (uint64_t i = 0; i < n; i++) {
        if (!hsri_grow((void **)&c->tensors, &c->tensors_room, i + 1, sizeof(*c->tensors)))
            return refuse_memory(r);
        tensor *t = &c->tensors[i];
        begin(r, "tensor", i);
        HSRI_TRY(read_name(r, &t->info.name));
        HSRI_TRY(read_shape(r, &t->info));
        HSRI_TRY(read_u32(r, &t->info.type));
        HSRI_TRY(read_u64(r, &t->offset));
        HSRI_TRY(set_size(r, &t->info));
        if (t->offset % alignment)
            return refuse(r, "is at offset %" PRIu64 ", not a multiple of the alignment %" PRIu32, t->offset, alignment);
        t->info.index = i;
        c->n_tensors++;
    }
    return HSR_OK;
}

/* The data starts where the tensor list ends, rounded up. */
static hsr_status place_tensors(reader *r, uint32_t alignment)
{
    hsri_container *c = r->c;
    uint64_t start = hsri_round_up(r->at, alignment);
    uint64_t room = start <= c->size ? c->size - start : 0;
    for (size_t i = 0; i < c->n_tensors; i++) {
        tensor *t = &c->tensors[i];
        about(r, "tensor", t->info.name);
        if (t->offset > room || t->info.size > room - t->offset)
            return refuse(r, "does not fit the file: %" PRIu64 " bytes at offset %" PRIu64 " of %" PRIu64 " bytes of data",
                          t->info.size, t->offset, room);
        t->info.data = c->base + start + t->offset;
    }
    return HSR_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    uint64_t x = (*(const tensor *const *)a)->offset, y = (*(const tensor *const *)b)->offset;
    return (x > y) - (x < y);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const tensor *const *)a)->info.name, (*(const tensor *const *)b)->info.name);
}

/* The tensors in another order; NULL if memory is refused. */
static const tensor **sorted_tensors(const hsri_container *c, int (*compare)(const void *, const void *))
{
    const tensor **sorted = hsri_new_array(c->n_tensors, sizeof(*sorted));
    if (!sorted)
        return NULL;
    for (size_t i = 0; i < c->n_tensors; i++)
        sorted[i] = &c->tensors[i];
    qsort(sorted, c->n_tensors, sizeof(*sorted), compare);
    return sorted;
}

static hsr_status check_names(reader *r)
{
    hsri_container *c = r->c;
    c->by_name = sorted_tensors(c, compare_names);
    if (!c->by_name)
        return refuse_memory(r);
    for (size_t i = 1; i < c->n_tensors; i++) {
        about(r, "tensor", c->by_name[i]->info.name);
        if (compare_names(&c->by_name[i - 1], &c->by_name[i]) == 0)
            return refuse(r, "is there twice");
    }
    return HSR_OK;
}

static hsr_status check_overlap(reader *r)
{
    const tensor **sorted = sorted_tensors(r->c, compare_offsets);
    hsr_status status = sorted ? HSR_OK : refuse_memory(r);
    for (size_t i = 1; status == HSR_OK && i < r->c->n_tensors; i++) {
        const tensor *before = sorted[i - 1], *t = sorted[i];
        about(r, "tensor", t->info.name);
        if (t->offset - before->offset < before->info.size)
            status = refuse(r, "overlaps tensor '%.*s'", SHOWN_NAME, before->info.name);
    }
    free(sorted);
    return status;
}

/* ---- the file ---- */

static hsr_status read_alignment(reader *r, uint32_t *alignment)
{
    const char *key = "general.alignment";
    *alignment = DEFAULT_ALIGNMENT;
    HSRI_TRY(hsri_container_u32(r->c, key, alignment, r->err));
    about(r, "key", key);
    if (*alignment < MIN_ALIGNMENT || *alignment > MAX_ALIGNMENT || (*alignment & (*alignment - 1)))
        return refuse(r, "is %" PRIu32 ", must be a power of two from %u to %u", *alignment, MIN_ALIGNMENT, MAX_ALIGNMENT);
    return HSR_OK;
}

static hsr_status read_head(reader *r, uint64_t *n_tensors, uint64_t *n_keys)
{
    const uint8_t *magic;
    uint32_t version;
    HSRI_TRY(skip(r, 4, &magic));
    if (memcmp(magic, "FUGG", 4) == 0)
        return refuse(r, "is big-endian");
    if (memcmp(magic, "GGUF", 4) != 0)
        return refuse(r, "does not start with GGUF");
    HSRI_TRY(read_u32(r, &version));
    if (version && (version & 0xFFFF) == 0)
        return refuse(r, "is big-endian");
    if (version != VERSION)
        return hsri_fail(r->err, HSR_E_VERSION, "%s: GGUF version %" PRIu32 ", must be %d", r->c->shown, version, VERSION);
    HSRI_TRY(read_u64(r, n_tensors));
    HSRI_TRY(read_u64(r, n_keys));
    if (*n_tensors > bytes_left(r) / MIN_TENSOR_BYTES)
        return refuse(r, "claims %" PRIu64 " tensors, more than its size can hold", *n_tensors);
    if (*n_keys > bytes_left(r) / MIN_KEY_BYTES)
        return refuse(r, "claims %" PRIu64 " keys, more than its size can hold", *n_keys);
    return HSR_OK;
}

static hsr_status read_file(reader *r)
{
    uint64_t n_tensors = 0, n_keys = 0;
    uint32_t alignment;
    HSRI_TRY(read_head(r, &n_tensors, &n_keys));
    HSRI_TRY(read_keys(r, n_keys));
    HSRI_TRY(read_alignment(r, &alignment));
    HSRI_TRY(read_tensors(r, n_tensors, alignment));
    HSRI_TRY(check_names(r));
    HSRI_TRY(place_tensors(r, alignment));
    return check_overlap(r);
}

/* O_NONBLOCK: opening a named pipe must not wait for a writer; it means nothing for a regular file. */
static int open_file(const char *path)
{
    int fd;
    do {
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    } while (fd < 0 && errno == EINTR);
    return hsri_raise_fd(fd);
}

static hsr_status map_file(hsri_container *c, int fd, hsr_error *err)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return hsri_fail_sys(err, HSR_E_IO, errno, "%s: cannot examine the file", c->shown);
    if (S_ISDIR(st.st_mode))
        return hsri_fail(err, HSR_E_FORMAT, "%s: is a folder, not a model file", c->shown);
    if (!S_ISREG(st.st_mode))
        return hsri_fail(err, HSR_E_FORMAT, "%s: is not a regular file", c->shown);
    size_t size = (size_t)st.st_size;
    if (size == 0)
        return hsri_fail(err, HSR_E_FORMAT, "%s: the file is empty", c->shown);
    if (size > PTRDIFF_MAX || (off_t)size != st.st_size)
        return hsri_fail(err, HSR_E_UNSUPPORTED, "%s: the file is too large for this machine's address space", c->shown);
    void *base = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return hsri_fail_sys(err, errno == ENOMEM ? HSR_E_NOMEM : HSR_E_IO, errno, "%s: cannot map the file", c->shown);
    c->base = base;
    c->size = size;
    return HSR_OK;
}

/* The mapping keeps the file; the descriptor is not needed after it. */
static hsr_status open_and_map(hsri_container *c, hsr_error *err)
{
    int fd = open_file(c->path);
    if (fd < 0)
        return hsri_fail_sys(err, HSR_E_IO, errno, "%s: cannot open the file", c->shown);
    hsr_status status = map_file(c, fd, err);
    close(fd);
    return status;
}

static hsr_status set_path(hsri_container *c, const char *path)
{
    size_t length = strlen(path);
    c->path = hsri_new_array(length + 1, 1);
    if (!c->path)
        return HSR_E_NOMEM;
    memcpy(c->path, path, length);
    c->shown = length > SHOWN_PATH ? c->path + (length - SHOWN_PATH) : c->path;
    while ((*c->shown & 0xC0) == 0x80)   /* not from within a UTF-8 character */
        c->shown++;
    return HSR_OK;
}

hsr_status hsri_container_open(const char *path, hsri_container **container, hsr_error *err)
{
    *container = NULL;
    hsri_container *c = hsri_new_array(1, sizeof(*c));
    if (!c || set_path(c, path) < 0) {
        free(c);
        return hsri_fail(err, HSR_E_NOMEM, "no memory to open a model file");
    }
    hsr_status status = open_and_map(c, err);
    if (status == HSR_OK)
        status = read_file(&(reader){ .c = c, .err = err });
    if (status < 0) {
        hsri_container_close(c);
        return status;
    }
    *container = c;
    return HSR_OK;
}

void hsri_container_close(hsri_container *c)
{
    if (!c)
        return;
    if (c->base)
        munmap((void *)c->base, c->size);
    while (c->names) {
        chunk *next = c->names->next;
        free(c->names);
        c->names = next;
    }
    free(c->by_name);
    free(c->tensors);
    free(c->entries);
    free(c->path);
    free(c);
}

const char *hsri_container_path(const hsri_container *c) { return c->path; }
uint64_t hsri_container_size(const hsri_container *c) { return c->size; }
const void *hsri_container_base(const hsri_container *c) { return c->base; }
uint64_t hsri_container_n_tensors(const hsri_container *c) { return c->n_tensors; }

const hsri_tensor_info *hsri_container_tensor_at(const hsri_container *c, uint64_t index)
{
    return index < c->n_tensors ? &c->tensors[index].info : NULL;
}

const hsri_tensor_info *hsri_container_tensor(const hsri_container *c, const char *name)
{
    size_t low = 0, high = c->n_tensors;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, c->by_name[middle]->info.name);
        if (order == 0)
            return &c->by_name[middle]->info;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* ---- metadata ---- */

static const entry *find_entry(const hsri_container *c, const char *key)
{
    const entry wanted = { .name = key };
    return c->n_entries ? bsearch(&wanted, c->entries, c->n_entries, sizeof(*c->entries), compare_entries) : NULL;
}

static bool is_integer(uint32_t type)
{
    return value_sizes[type] && type != TYPE_F32 && type != TYPE_F64 && type != TYPE_BOOL;
}

static bool is_signed(uint32_t type)
{
    return type == TYPE_I8 || type == TYPE_I16 || type == TYPE_I32 || type == TYPE_I64;
}

/* An integer's bits, with its sign extended to 64 of them if its type has one. */
static uint64_t load_integer(uint32_t type, const uint8_t *at)
{
    uint32_t unused = 64 - 8 * value_sizes[type];
    uint64_t bits = load_le(at, value_sizes[type]);
    return is_signed(type) ? (uint64_t)((int64_t)(bits << unused) >> unused) : bits;
}

static hsr_status refuse_key(const hsri_container *c, const char *key, hsr_error *err, const char *reason)
{
    return hsri_fail(err, HSR_E_FORMAT, "%s: key '%.*s' %s", c->shown, SHOWN_NAME, key, reason);
}

static hsr_status refuse_type(const hsri_container *c, const entry *e, hsr_error *err, const char *wanted)
{
    return hsri_fail(err, HSR_E_FORMAT, "%s: key '%.*s' is of type %s%s, must be %s", c->shown, SHOWN_NAME, e->name,
                     e->is_array ? "array of " : "", value_type_names[e->type], wanted);
}

/* A negative number's bits are above every u32, as its sign is extended. */
hsr_status hsri_container_u32(const hsri_container *c, const char *key, uint32_t *value, hsr_error *err)
{
    const entry *e = find_entry(c, key);
    if (!e)
        return HSR_AGAIN;
    if (e->is_array || !is_integer(e->type))
        return refuse_type(c, e, err, "an integer");
    uint64_t bits = load_integer(e->type, e->at);
    if (bits > UINT32_MAX)
        return refuse_key(c, key, err, "does not fit 32 bits without sign");
    *value = (uint32_t)bits;
    return HSR_OK;
}

hsr_status hsri_container_f64(const hsri_container *c, const char *key, double *value, hsr_error *err)
{
    const entry *e = find_entry(c, key);
    if (!e)
        return HSR_AGAIN;
    if (!e->is_array && (e->type == TYPE_F32 || e->type == TYPE_F64)) {
        *value = load_float(e->at, value_sizes[e->type]);
        return HSR_OK;
    }
    if (e->is_array || !is_integer(e->type))
        return refuse_type(c, e, err, "a number");
    uint64_t bits = load_integer(e->type, e->at);
    *value = is_signed(e->type) ? (double)(int64_t)bits : (double)bits;
    return HSR_OK;
}

hsr_status hsri_container_string(const hsri_container *c, const char *key, const char **value, uint64_t *size, hsr_error *err)
{
    const entry *e = find_entry(c, key);
    *value = NULL;
    *size = 0;
    if (!e)
        return HSR_AGAIN;
    if (e->is_array || e->type != TYPE_STRING)
        return refuse_type(c, e, err, "a string");
    *value = (const char *)e->at;
    *size = e->size;
    return HSR_OK;
}

/* An empty array is one of integers, whatever its writer made of it. */
hsr_status hsri_container_u32_array(const hsri_container *c, const char *key, uint32_t *out, uint64_t cap, uint64_t *n,
                                    hsr_error *err)
{
    const entry *e = find_entry(c, key);
    *n = 0;
    if (!e)
        return HSR_AGAIN;
    if (!e->is_array || (e->size && !is_integer(e->type)))
        return refuse_type(c, e, err, "an array of integers");
    if (e->size > cap)
        return hsri_fail(err, HSR_E_FORMAT, "%s: key '%.*s' has %" PRIu64 " elements, at most %" PRIu64 " are allowed",
                         c->shown, SHOWN_NAME, key, e->size, cap);
    for (uint64_t i = 0; i < e->size; i++) {
        uint64_t bits = load_integer(e->type, e->at + i * value_sizes[e->type]);
        if (bits > UINT32_MAX)
            return refuse_key(c, key, err, "has an element that does not fit 32 bits without sign");
        out[i] = (uint32_t)bits;
    }
    *n = e->size;
    return HSR_OK;
}
