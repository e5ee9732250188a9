/* SPDX-License-Identifier: Apache-2.0 */
/* Every operation of the CPU back end against a naive computation in double precision, and the same bytes from every number of
 * threads and from the lagging debug back end: each rig below runs all of it and keeps a log of its outputs, the logs are compared. */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/array.h"
#include "base/cpu.h"
#include "base/rng.h"
#include "base/status.h"
#include "check.h"
#include "device/cpu/backend.h"
#include "device/device.h"
#include "kv/page.h"
#include "open_device.h"

#define MIB (1u << 20)
#define NONE ((hsri_ref){ 0 })

typedef struct rig {
    hsri_device *dev;
    hsri_queue  *q;
    bool         naive;         /* compare with the naive computation (once per level is enough) */
    uint8_t     *log;
    size_t       log_bytes, log_capacity;
    uint32_t     buffers[512];  /* freed by rig_reset */
    uint32_t     n_buffers;
} rig;

static rig rig_open(int32_t n_threads, int32_t isa, bool async)
{
    rig r = { 0 };

    open_device(n_threads, isa, async, &r.dev, &r.q);
    return r;
}

static void rig_reset(rig *r)
{
    for (uint32_t i = 0; i < r->n_buffers; i++)
        r->dev->free(r->dev, r->buffers[i]);
    r->n_buffers = 0;
}

static void rig_close(rig *r)
{
    rig_reset(r);
    r->dev->queue_destroy(r->q);
    r->dev->destroy(r->dev);
    free(r->log);
}

static void rig_wait(rig *r) { CHECK(r->dev->wait(r->q, NULL) == HSR_OK); }

static hsri_ref room(rig *r, uint64_t bytes)
{
    hsri_ref ref = { 0 };

    CHECK(r->dev->alloc(r->dev, bytes, &ref.buf, NULL) == HSR_OK);
    r->buffers[r->n_buffers++] = ref.buf;
    return ref;
}

static hsri_ref upload(rig *r, const void *data, uint64_t bytes)
{
    hsri_ref ref = room(r, bytes);

    r->dev->copy_in(r->q, ref, data, bytes);
    rig_wait(r);
    return ref;
}

/* Copy out and add to the log; free() the result. */
static void *download(rig *r, hsri_ref ref, uint64_t bytes)
{
    void *data = malloc(bytes ? bytes : 1);

    r->dev->copy_out(r->q, data, ref, bytes);
    rig_wait(r);
    CHECK(hsri_grow((void **)&r->log, &r->log_capacity, r->log_bytes + bytes, 1));
    memcpy(r->log + r->log_bytes, data, bytes);
    r->log_bytes += bytes;
    return data;
}

/* Uniform in [-1, 1), a function of its place alone. */
static float noise(uint64_t seed, uint64_t i) { return (float)(2 * hsri_rng_unit(seed, i) - 1); }

static float *noise_array(uint64_t seed, uint64_t n)
{
    float *x = malloc(n * sizeof *x);

    for (uint64_t i = 0; i < n; i++)
        x[i] = noise(seed, i);
    return x;
}

static hsri_ref upload_noise(rig *r, uint64_t seed, uint64_t n, float **host)
{
    *host = noise_array(seed, n);
    return upload(r, *host, n * sizeof **host);
}

static bool near(double got, double want, double tolerance)
{
    if (fabs(got - want) <= tolerance)
        return true;
    fprintf(stderr, "got %.9g, want %.9g within %.3g\n", got, want, tolerance);
    return false;
}

/* ---- packed matrices: an independent packer of docs/model-file.md ---- */

typedef struct matrix {
    hsri_matrix m;
    double     *values;   /* [n][k] as decoded */
} matrix;

static void pack_scales(uint8_t *tail, uint32_t groups, uint32_t runs, hsri_dtype dtype, uint64_t seed)
{
    /* float16 powers of two from 2^-9 to 2^-6, signs alternating for the minimums */
    uint64_t n = (uint64_t)groups * runs * 16 * (dtype == HSRI_DTYPE_Q4 ? 2 : 1);

    for (uint64_t i = 0; i < n; i++) {
        uint16_t half = (uint16_t)((15 - 9 + hsri_rng_u64(seed, i) % 4) << 10);

        if (dtype == HSRI_DTYPE_Q4 && i / 16 % 2 == 1)
            half |= 0x8000;
        memcpy(tail + i * 2, &half, 2);
    }
}

static double half_at(const uint8_t *p)
{
    uint16_t h;

    memcpy(&h, p, 2);
    return (h & 0x8000 ? -1 : 1) * ldexp(1 + (h & 0x3FF) / 1024.0, (h >> 10 & 31) - 15);
}

/* Fill element (n, k) of the packed bytes with something made of `seed`; returns its decoded value. */
static double put_element(uint8_t *data, const uint8_t *tail, hsri_dtype dtype, uint32_t runs, uint32_t n, uint32_t k, uint64_t seed)
{
    uint64_t run = (uint64_t)(n / 16) * runs + k / 32;
    uint32_t c = n % 16, i = k % 32;
    uint64_t raw = hsri_rng_u64(seed, (uint64_t)n << 32 | k);
    float    f = noise(seed, (uint64_t)n << 32 | k);
    uint32_t bits;
    int      code;

    switch (dtype) {
    case HSRI_DTYPE_F32:
        memcpy(data + run * 2048 + (i * 16 + c) * 4, &f, 4);
        return f;
    case HSRI_DTYPE_BF16:
        memcpy(&bits, &f, 4);
        bits &= 0xFFFF0000;
        memcpy(&f, &bits, 4);
        bits >>= 16;
        memcpy(data + run * 1024 + (i / 2 * 32 + c * 2 + i % 2) * 2, &bits, 2);
        return f;
    case HSRI_DTYPE_Q8:
        code = (int)(raw % 255) - 127;
        data[run * 512 + i / 4 * 64 + c * 4 + i % 4] = (uint8_t)code;
        return code * half_at(tail + (run * 16 + c) * 2);
    default:
        code = (int)(raw % 16);
        data[run * 256 + i / 8 * 64 + c * 4 + i % 4] |= (uint8_t)(i % 8 < 4 ? code : code << 4);
        return code * half_at(tail + (run * 32 + c) * 2) + half_at(tail + (run * 32 + 16 + c) * 2);
    }
}

static matrix make_matrix(rig *r, hsri_dtype dtype, uint32_t n, uint32_t k, uint64_t seed)
{
    static const uint32_t run_bytes[] = { 2048, 1024, 512, 256 };
    uint32_t panels = (n + 15) / 16, runs = (k + 31) / 32;
    uint64_t codes = (uint64_t)panels * runs * run_bytes[dtype], bytes = hsri_packed_bytes(dtype, n, k);
    uint8_t *data = calloc(bytes, 1);
    matrix   w = { { .dtype = dtype, .n = n, .k = k }, malloc((uint64_t)n * k * sizeof(double)) };

    CHECK(bytes == codes + (uint64_t)panels * runs * (dtype == HSRI_DTYPE_Q8 ? 32 : dtype == HSRI_DTYPE_Q4 ? 64 : 0));
    if (bytes > codes)
        pack_scales(data + codes, panels, runs, dtype, seed + 1);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < k; j++)
            w.values[(uint64_t)i * k + j] = put_element(data, data + codes, dtype, runs, i, j, seed);
    w.m.data = upload(r, data, bytes);
    free(data);
    return w;
}

/* ---- linear and its neighbours ---- */

/* Whether a level rounds inputs to bf16 before it multiplies them with such a matrix. */
static bool rounds_inputs(const rig *r, const matrix *w)
{
    return r->dev->isa == HSR_ISA_AMX && w->m.dtype != HSRI_DTYPE_F32;
}

static bool linear_is(const matrix *w, const float *bias, const float *x, const float *y, uint32_t n_rows, bool rounded)
{
    bool ok = true;

    for (uint32_t row = 0; row < n_rows; row++) {
        for (uint32_t n = 0; n < w->m.n && ok; n++) {
            double sum = bias ? bias[n] : 0, size = 1;

            for (uint32_t k = 0; k < w->m.k; k++) {
                float  input = x[(uint64_t)row * w->m.k + k];
                double term = w->values[(uint64_t)n * w->m.k + k] * (rounded ? hsri_bf16_to_f32(hsri_f32_to_bf16(input)) : input);

                sum += term;
                size += fabs(term);
            }
            ok = near(y[(uint64_t)row * w->m.n + n], sum, size * 2e-6);
        }
    }
    return ok;
}

static void test_linear_shape(rig *r, hsri_dtype dtype, uint32_t n, uint32_t k, uint32_t n_rows, bool with_bias)
{
    matrix   w = make_matrix(r, dtype, n, k, 100 + dtype);
    float   *x, *bias, *y, *one;
    hsri_ref in = upload_noise(r, 7, (uint64_t)n_rows * k, &x), b = upload_noise(r, 8, n, &bias);
    hsri_ref out = room(r, (uint64_t)n_rows * n * 4), single = room(r, n * 4);

    r->dev->ops.linear(r->q, &w.m, with_bias ? b : NONE, in, n_rows, out);
    y = download(r, out, (uint64_t)n_rows * n * 4);
    if (r->naive)
        CHECK(linear_is(&w, with_bias ? bias : NULL, x, y, n_rows, rounds_inputs(r, &w)));
    /* a row alone has the bits it has among others */
    r->dev->ops.linear(r->q, &w.m, with_bias ? b : NONE, hsri_at(in, (uint64_t)(n_rows - 1) * k * 4), 1, single);
    one = download(r, single, n * 4);
    CHECK(memcmp(one, y + (uint64_t)(n_rows - 1) * n, n * 4) == 0);
    free(w.values);
    free(x);
    free(bias);
    free(y);
    free(one);
    rig_reset(r);
}

static void test_linear(rig *r)
{
    for (int t = 0; t < HSRI_N_DTYPES; t++) {
        test_linear_shape(r, (hsri_dtype)t, 70, 100, 1, false);
        test_linear_shape(r, (hsri_dtype)t, 70, 100, 33, true);
        test_linear_shape(r, (hsri_dtype)t, 600, 320, 1, true);    /* panels in parallel */
        test_linear_shape(r, (hsri_dtype)t, 40, 4096, 70, true);   /* several blocks of rows */
    }
}

static void test_embed(rig *r)
{
    static const int32_t ids[] = { 69, 0, 17, 17, 31 };

    for (int t = 0; t < HSRI_N_DTYPES; t++) {
        matrix   w = make_matrix(r, (hsri_dtype)t, 70, 100, 200 + t);
        hsri_ref out = room(r, sizeof ids / 4 * 400);
        float   *got;

        r->dev->ops.embed(r->q, &w.m, upload(r, ids, sizeof ids), 5, out);
        got = download(r, out, 5 * 400);
        for (uint32_t i = 0; i < 500; i++)
            if (!CHECK(near(got[i], w.values[(uint64_t)ids[i / 100] * 100 + i % 100], 1e-6)))
                break;
        free(got);
        free(w.values);
        rig_reset(r);
    }
}

static void test_gather(rig *r)
{
    static const uint32_t index[] = { 3, 0, 3, 6 };
    float   *x, *y;
    hsri_ref in = upload_noise(r, 9, 7 * 50, &x), out = room(r, 4 * 200);

    r->dev->ops.gather_rows(r->q, in, 50, upload(r, index, sizeof index), 4, out);
    y = download(r, out, 4 * 200);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(memcmp(y + i * 50, x + index[i] * 50, 200) == 0);
    free(x);
    free(y);
    rig_reset(r);
}

/* ---- norm and elementwise operations ---- */

static double norm_scale(const float *x, uint32_t n, float eps)
{
    double sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return 1 / sqrt(sum / n + eps);
}

static void test_rms_norm(rig *r)
{
    enum { ROWS = 37, WIDTH = 577 };
    float   *x, *gain, *y;
    hsri_ref in = upload_noise(r, 10, ROWS * WIDTH, &x), g = upload_noise(r, 11, WIDTH, &gain), out = room(r, ROWS * WIDTH * 4);

    r->dev->ops.rms_norm(r->q, in, g, 1e-5f, ROWS, WIDTH, out);
    y = download(r, out, ROWS * WIDTH * 4);
    for (uint32_t i = 0; i < ROWS * WIDTH; i++)
        if (!CHECK(near(y[i], x[i] * norm_scale(x + i / WIDTH * WIDTH, WIDTH, 1e-5f) * gain[i % WIDTH], 1e-5)))
            break;
    free(x);
    free(gain);
    free(y);
    rig_reset(r);
}

static void test_add(rig *r)
{
    enum { ROWS = 9, N = 4099 };
    float   *x, *y, *sum;
    hsri_ref a = upload_noise(r, 12, ROWS * N, &x), b = upload_noise(r, 13, ROWS * N, &y);

    r->dev->ops.add(r->q, a, b, ROWS, N);
    sum = download(r, a, ROWS * N * 4);
    for (uint32_t i = 0; i < ROWS * N; i++)
        if (!CHECK(sum[i] == x[i] + y[i]))
            break;
    free(x);
    free(y);
    free(sum);
    rig_reset(r);
}

static void test_silu_mul(rig *r, uint32_t n_rows, uint32_t n)
{
    uint32_t stride = (n + 15) / 16 * 32;
    float   *x, *y;
    hsri_ref in = upload_noise(r, 14, n_rows * stride, &x), out = room(r, (uint64_t)n_rows * n * 4);

    r->dev->ops.silu_mul(r->q, in, n_rows, n, out);
    y = download(r, out, (uint64_t)n_rows * n * 4);
    for (uint32_t i = 0; i < n_rows * n; i++) {
        const float *panel = x + (uint64_t)(i / n) * stride + i % n / 16 * 32;
        double       gate = panel[i % n % 16], up = panel[16 + i % n % 16];

        if (!CHECK(near(y[i], gate / (1 + exp(-gate)) * up, 1e-6)))
            break;
    }
    free(x);
    free(y);
    rig_reset(r);
}

static void test_check_finite(rig *r)
{
    enum { ROWS = 5, N = 3001 };
    float    *x = noise_array(15, ROWS * N);
    hsri_ref  flags = room(r, ROWS * 4);
    uint32_t *got;

    x[1 * N + 3000] = NAN;
    x[2 * N] = INFINITY;
    x[4 * N + 1500] = -INFINITY;
    r->dev->ops.check_finite(r->q, upload(r, x, ROWS * N * 4), ROWS, N, flags);
    got = download(r, flags, ROWS * 4);
    CHECK(got[0] == 0 && got[1] == 1 && got[2] == 1 && got[3] == 0 && got[4] == 1);
    free(got);
    free(x);
    rig_reset(r);
}

/* ---- attention: a small cache of four sequences ---- */

enum { N_SEQS = 4, N_LAYERS = 2, LAYER = 1, N_KV = 2, N_HEADS = 6, MAX_PAGES = 34, N_GROUPS = 3 };

static const uint32_t seq_tokens[N_SEQS] = { 2064, 70, 1, 1024 };

typedef struct cache {
    hsri_kv_view kv;
    hsri_kv_type type;
    uint32_t     d, rotary;
    uint32_t    *tables[N_SEQS];
    hsri_ref     seqs, inv_freq, q_norm, k_norm;
    float       *freq, *q_gain, *k_gain;
    uint32_t     n_blocks;
} cache;

static void cache_tables(rig *r, cache *c, hsri_seq *seqs)
{
    uint32_t per_block = MIB / c->kv.slot_bytes[c->type], per_seq = MAX_PAGES * N_LAYERS * N_KV, total = N_SEQS * per_seq;

    c->n_blocks = (total + per_block - 1) / per_block;
    for (uint32_t s = 0; s < N_SEQS; s++) {
        c->tables[s] = malloc(per_seq * 4);
        for (uint32_t i = 0; i < per_seq; i++) {
            uint32_t slot = (uint32_t)((uint64_t)(s * per_seq + i) * 7919 % total);   /* scattered; 7919 is prime */

            c->tables[s][i] = slot / per_block << 8 | slot % per_block;
        }
        hsri_ref table = upload(r, c->tables[s], per_seq * 4);

        seqs[s] = (hsri_seq){ .table = table, .sealed = table, .rope_table = s % 2, .kv_type = c->type, .format = c->type };
    }
}

static cache cache_open(rig *r, hsri_kv_type type, uint32_t d, uint32_t rotary)
{
    cache    c = { .kv = { .n_layers = N_LAYERS, .n_kv_heads = N_KV, .head_dim = d }, .type = type, .d = d, .rotary = rotary };
    hsri_seq seqs[N_SEQS];

    c.kv.slot_bytes[HSRI_KV_TYPE_F32] = (uint32_t)hsri_round_up(hsri_plain_page_bytes(HSRI_KV_TYPE_F32, d), 4096);
    c.kv.slot_bytes[HSRI_KV_TYPE_BF16] = (uint32_t)hsri_round_up(hsri_plain_page_bytes(HSRI_KV_TYPE_BF16, d), 4096);
    cache_tables(r, &c, seqs);
    c.seqs = upload(r, seqs, sizeof seqs);
    CHECK(r->dev->reserve(r->dev, (uint64_t)c.n_blocks * MIB, &c.kv.pool_buf, NULL) == HSR_OK);
    CHECK(r->dev->commit(r->dev, c.kv.pool_buf, 0, (uint64_t)c.n_blocks * MIB, NULL) == HSR_OK);
    r->buffers[r->n_buffers++] = c.kv.pool_buf;
    c.freq = malloc(rotary * 4);
    for (uint32_t j = 0; j < rotary; j++)   /* two tables of rotary / 2 */
        c.freq[j] = (float)pow(j < rotary / 2 ? 1e4 : 5e5, -2.0 * (j % (rotary / 2)) / rotary);
    c.inv_freq = upload(r, c.freq, rotary * 4);
    c.q_norm = upload_noise(r, 20, d, &c.q_gain);
    c.k_norm = upload_noise(r, 21, d, &c.k_gain);
    return c;
}

static void cache_close(rig *r, cache *c)
{
    for (uint32_t s = 0; s < N_SEQS; s++)
        free(c->tables[s]);
    free(c->freq);
    free(c->q_gain);
    free(c->k_gain);
    rig_reset(r);
}

/* Head `head` (queries, then keys, then values) of the qkv row of a token, before norm and rope. Larger than noise so that the
 * softmax is far from flat. */
static void qkv_head(const cache *c, hsri_row row, uint32_t head, float *out)
{
    for (uint32_t j = 0; j < c->d; j++)
        out[j] = 2 * noise(1000 + row.seq, ((uint64_t)row.pos << 16) + head * c->d + j);
}

static double bf16_of(double v)
{
    return hsri_bf16_to_f32(hsri_f32_to_bf16((float)v));
}

/* What norm and rope make of a head, in double. */
static void naive_head(const cache *c, hsri_row row, uint32_t head, double *out)
{
    const float *gain = head < N_HEADS ? c->q_gain : head < N_HEADS + N_KV ? c->k_gain : NULL;
    uint32_t     half = c->rotary / 2;
    float        raw[128];

    qkv_head(c, row, head, raw);
    for (uint32_t j = 0; j < c->d; j++)
        out[j] = gain ? raw[j] * gain[j] * norm_scale(raw, c->d, 1e-6f) : raw[j];
    for (uint32_t j = 0; gain && j < half; j++) {
        double angle = (double)row.pos * c->freq[row.seq % 2 * half + j], a = out[j], b = out[j + half];

        out[j] = 1.5 * (a * cos(angle) - b * sin(angle));
        out[j + half] = 1.5 * (b * cos(angle) + a * sin(angle));
    }
    for (uint32_t j = 0; c->type == HSRI_KV_TYPE_BF16 && head >= N_HEADS && j < c->d; j++)
        out[j] = bf16_of(out[j]);
}

typedef struct step {
    hsri_row  *rows;
    hsri_batch batch;
    hsri_rope  rope;
    hsri_ref   qkv, queries;
} step;

/* Rows through rope_table and rope_append; their queries stay in step.queries. */
static step cache_step(rig *r, const cache *c, const hsri_row *rows, uint32_t n)
{
    uint32_t width = (N_HEADS + 2 * N_KV) * c->d;
    float   *qkv = malloc((uint64_t)n * width * 4);
    step     s = { .batch = { upload(r, rows, n * sizeof *rows), c->seqs, n, N_SEQS },
                   .rope = { room(r, (uint64_t)n * c->rotary * 4), c->rotary } };

    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < N_HEADS + 2 * N_KV; h++)
            qkv_head(c, rows[i], h, qkv + (uint64_t)i * width + h * c->d);
    s.qkv = upload(r, qkv, (uint64_t)n * width * 4);
    s.queries = room(r, (uint64_t)n * N_HEADS * c->d * 4);
    r->dev->ops.rope_table(r->q, &s.batch, c->inv_freq, c->rotary, 1.5f, s.rope.cos_sin);
    r->dev->ops.rope_append(r->q, &s.batch, &c->kv, LAYER, N_HEADS, s.qkv, c->q_norm, c->k_norm, 1e-6f, &s.rope, s.queries);
    rig_wait(r);
    free(qkv);
    return s;
}

/* The step that is looked at: one row, many, one, and ten, of four sequences. */
static uint32_t last_rows(hsri_row *rows)
{
    uint32_t n = 0;

    rows[n++] = (hsri_row){ 2, 0 };
    for (uint32_t p = 2040; p < 2064; p++)   /* two groups, then three */
        rows[n++] = (hsri_row){ 0, p };
    rows[n++] = (hsri_row){ 3, 1023 };
    for (uint32_t p = 60; p < 70; p++)
        rows[n++] = (hsri_row){ 1, p };
    return n;
}

/* All earlier tokens, in chunks of a length that is no multiple of anything, two sequences to a step where they overlap. */
static void cache_fill(rig *r, const cache *c)
{
    uint32_t before = r->n_buffers;

    for (uint32_t p = 0; p < 2040; p += 333) {
        hsri_row rows[800];
        uint32_t n = 0;

        for (uint32_t i = p; i < p + 333 && i < 2040; i++)
            rows[n++] = (hsri_row){ 0, i };
        for (uint32_t i = p; i < p + 333 && i < 1023; i++)
            rows[n++] = (hsri_row){ 3, i };
        for (uint32_t i = p; i < p + 333 && i < 60; i++)
            rows[n++] = (hsri_row){ 1, i };
        cache_step(r, c, rows, n);
        while (r->n_buffers > before)
            r->dev->free(r->dev, r->buffers[--r->n_buffers]);
    }
}

/* One query head of one row over all tokens it sees. */
static void naive_attend(const cache *c, hsri_row row, uint32_t head, double scale, const double *keys, const double *values, double *out)
{
    double  query[128], *p = malloc((row.pos + 1) * sizeof *p), max = -INFINITY, sum = 0;

    naive_head(c, row, head, query);
    for (uint32_t t = 0; t <= row.pos; t++) {
        p[t] = 0;
        for (uint32_t j = 0; j < c->d; j++)
            p[t] += scale * query[j] * keys[t * c->d + j];
        max = fmax(max, p[t]);
    }
    memset(out, 0, c->d * sizeof *out);
    for (uint32_t t = 0; t <= row.pos; t++) {
        p[t] = exp(p[t] - max);
        sum += p[t];
        for (uint32_t j = 0; j < c->d; j++)
            out[j] += p[t] * values[t * c->d + j];
    }
    for (uint32_t j = 0; j < c->d; j++)
        out[j] /= sum;
    free(p);
}

static void check_attention(const cache *c, const hsri_row *rows, uint32_t n, float scale, const float *got)
{
    double *keys = malloc(2064 * c->d * sizeof *keys), *values = malloc(2064 * c->d * sizeof *values), want[128];
    double  tolerance = c->type == HSRI_KV_TYPE_F32 ? 1e-4 : 2e-2;   /* a key near the middle of two bfloat16 may fall on either side */
    bool    ok = true;

    for (uint32_t s = 0; s < N_SEQS; s++) {
        for (uint32_t g = 0; g < N_KV; g++) {
            for (uint32_t t = 0; t < seq_tokens[s]; t++) {
                naive_head(c, (hsri_row){ s, t }, N_HEADS + g, keys + t * c->d);
                naive_head(c, (hsri_row){ s, t }, N_HEADS + N_KV + g, values + t * c->d);
            }
            for (uint32_t i = 0; i < n * N_HEADS && ok; i++) {
                if (rows[i / N_HEADS].seq != s || i % N_HEADS / (N_HEADS / N_KV) != g)
                    continue;
                naive_attend(c, rows[i / N_HEADS], i % N_HEADS, scale, keys, values, want);
                for (uint32_t j = 0; j < c->d && ok; j++)
                    ok = near(got[i * c->d + j], want[j], tolerance);
            }
        }
    }
    CHECK(ok);
    free(keys);
    free(values);
}

static uint64_t part_bytes(const cache *c, uint32_t n_rows, uint32_t n_groups)
{
    return (uint64_t)n_rows * N_HEADS * n_groups * (2 + c->d) * 4;
}

/* Each row on its own, and each group on its own, has the partials it has among all. */
static void check_partials(rig *r, const cache *c, const step *s, float scale, const float *all)
{
    uint32_t n = s->batch.n_rows, one = 2 + c->d;
    hsri_ref part = room(r, part_bytes(c, n, N_GROUPS));
    float   *got;

    for (uint32_t i = 0; i < n; i += 7) {
        hsri_batch batch = { hsri_at(s->batch.rows, i * sizeof(hsri_row)), s->batch.seqs, 1, N_SEQS };

        r->dev->ops.attend(r->q, &batch, &c->kv, LAYER, N_HEADS, scale, hsri_at(s->queries, (uint64_t)i * N_HEADS * c->d * 4),
                           (hsri_ref){ 0 }, 0, N_GROUPS, part, NULL);
        got = download(r, part, part_bytes(c, 1, N_GROUPS));
        CHECK(memcmp(got, all + (uint64_t)i * N_HEADS * N_GROUPS * one, part_bytes(c, 1, N_GROUPS)) == 0);
        free(got);
    }
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        bool same = true;

        r->dev->ops.attend(r->q, &s->batch, &c->kv, LAYER, N_HEADS, scale, s->queries, (hsri_ref){ 0 }, g, g + 1, part, NULL);
        got = download(r, part, part_bytes(c, n, 1));
        for (uint32_t i = 0; i < n * N_HEADS; i++)
            same &= memcmp(got + (uint64_t)i * one, all + ((uint64_t)i * N_GROUPS + g) * one, one * 4) == 0;
        CHECK(same);
        free(got);
    }
}

static void check_empty_group(const cache *c, const float *part)
{
    bool empty = part[0] == -INFINITY && part[1] == 0;

    for (uint32_t j = 0; j < c->d; j++)
        empty &= part[2 + j] == 0;
    CHECK(empty);
}

static void check_same(rig *r, hsri_ref a, hsri_ref b, uint64_t bytes)
{
    void *x = download(r, a, bytes), *y = download(r, b, bytes);

    CHECK(memcmp(x, y, bytes) == 0);
    free(x);
    free(y);
}

/* Nobody wants the state: the outputs are the same. */
static void check_merge_forgets(rig *r, const cache *c, uint32_t n, hsri_ref part, uint32_t n_groups)
{
    uint64_t bytes = (uint64_t)n * N_HEADS * c->d * 4;
    hsri_ref acc = room(r, part_bytes(c, n, 1)), kept = room(r, bytes), forgotten = room(r, bytes);

    r->dev->ops.merge(r->q, n, N_HEADS, c->d, part, n_groups, &(hsri_fold){ 1, acc, kept });
    r->dev->ops.merge(r->q, n, N_HEADS, c->d, part, n_groups, &(hsri_fold){ 1, NONE, forgotten });
    check_same(r, kept, forgotten, bytes);
}

/* Groups folded in two calls, the partials of each call computed for it, give the bits of one call; also folded at once. */
static void check_merge_order(rig *r, const cache *c, const step *s, float scale, const float *once)
{
    uint32_t n = s->batch.n_rows;
    hsri_ref part = room(r, part_bytes(c, n, 2)), acc = room(r, part_bytes(c, n, 1)), out = room(r, (uint64_t)n * N_HEADS * c->d * 4);
    float   *got;

    r->dev->ops.attend(r->q, &s->batch, &c->kv, LAYER, N_HEADS, scale, s->queries, (hsri_ref){ 0 }, 0, 2, part, NULL);
    r->dev->ops.merge(r->q, n, N_HEADS, c->d, part, 2, &(hsri_fold){ 1, acc, NONE });
    r->dev->ops.attend(r->q, &s->batch, &c->kv, LAYER, N_HEADS, scale, s->queries, (hsri_ref){ 0 }, 2, 3, part, NULL);
    r->dev->ops.merge(r->q, n, N_HEADS, c->d, part, 1, &(hsri_fold){ 0, acc, out });
    got = download(r, out, (uint64_t)n * N_HEADS * c->d * 4);
    CHECK(memcmp(got, once, (uint64_t)n * N_HEADS * c->d * 4) == 0);
    free(got);
    r->dev->ops.attend(r->q, &s->batch, &c->kv, LAYER, N_HEADS, scale, s->queries, (hsri_ref){ 0 }, 0, 2, part,
                       &(hsri_fold){ 1, acc, NONE });
    r->dev->ops.attend(r->q, &s->batch, &c->kv, LAYER, N_HEADS, scale, s->queries, (hsri_ref){ 0 }, 2, 3, part,
                       &(hsri_fold){ 0, acc, out });
    got = download(r, out, (uint64_t)n * N_HEADS * c->d * 4);
    CHECK(memcmp(got, once, (uint64_t)n * N_HEADS * c->d * 4) == 0);
    free(got);
}

static void check_seal(rig *r, const cache *c)
{
    uint32_t         entry = c->tables[0][(3 * N_LAYERS + LAYER) * N_KV + 1], bytes = (uint32_t)hsri_plain_page_bytes(c->type, c->d);
    hsri_seal        seal = { .lineage = 0x1122334455667788, .entry = entry, .page = 3, .layer = LAYER, .head = 1,
                              .format = (uint16_t)c->type };
    hsri_page_header want = { .magic = HSRI_PAGE_MAGIC, .lineage = seal.lineage, .page = 3, .layer = LAYER, .head = 1,
                              .format = (uint16_t)c->type, .head_dim = (uint16_t)c->d };
    hsri_ref         slot = { c->kv.pool_buf, 0, (uint64_t)(entry >> 8) * MIB + (uint64_t)(entry & 255) * c->kv.slot_bytes[c->type] };
    uint8_t         *before = download(r, hsri_at(slot, sizeof want), bytes - sizeof want), *after;

    r->dev->ops.seal(r->q, &c->kv, upload(r, &seal, sizeof seal), 1);
    after = download(r, slot, bytes);
    CHECK(memcmp(after, &want, sizeof want) == 0);
    CHECK(memcmp(after + sizeof want, before, bytes - sizeof want) == 0);
    free(before);
    free(after);
}

static void test_attention(rig *r, hsri_kv_type type, uint32_t d, uint32_t rotary)
{
    cache    c = cache_open(r, type, d, rotary);
    float    scale = (float)(1 / sqrt(d)) * 1.5f;
    hsri_row rows[128];
    uint32_t n = last_rows(rows);
    step     s;
    hsri_ref part = room(r, part_bytes(&c, n, N_GROUPS)), acc = room(r, part_bytes(&c, n, 1)), out = room(r, (uint64_t)n * N_HEADS * d * 4);
    float   *partials, *got;

    cache_fill(r, &c);
    s = cache_step(r, &c, rows, n);
    free(download(r, s.queries, (uint64_t)n * N_HEADS * d * 4));
    r->dev->ops.attend(r->q, &s.batch, &c.kv, LAYER, N_HEADS, scale, s.queries, (hsri_ref){ 0 }, 0, N_GROUPS, part, NULL);
    r->dev->ops.merge(r->q, n, N_HEADS, d, part, N_GROUPS, &(hsri_fold){ 1, acc, out });
    check_merge_forgets(r, &c, n, part, 1);
    check_merge_forgets(r, &c, n, part, N_GROUPS);
    partials = download(r, part, part_bytes(&c, n, N_GROUPS));
    got = download(r, out, (uint64_t)n * N_HEADS * d * 4);
    if (r->naive)
        check_attention(&c, rows, n, scale, got);
    check_partials(r, &c, &s, scale, partials);
    check_empty_group(&c, partials + 2 + d);   /* row 0 sees one token, so group 1 is empty */
    check_merge_order(r, &c, &s, scale, got);
    check_seal(r, &c);
    free(partials);
    free(got);
    cache_close(r, &c);
}

/* More query heads to a kv head than a kernel call takes, and a model without query and key norms. */
static void test_many_heads(rig *r)
{
    enum { HEADS = 70, D = 16 };
    cache    c = cache_open(r, HSRI_KV_TYPE_F32, D, D);
    hsri_row rows[2] = { { 1, 0 }, { 1, 1 } };
    float   *qkv, *queries, *got;
    hsri_ref in = upload_noise(r, 30, 2 * (HEADS + 2) * D, &qkv), q_out = room(r, 2 * HEADS * D * 4);
    hsri_ref part = room(r, 2 * HEADS * (2 + D) * 4), acc = room(r, 2 * HEADS * (2 + D) * 4), out = room(r, 2 * HEADS * D * 4);
    hsri_batch batch = { upload(r, rows, sizeof rows), c.seqs, 2, N_SEQS };
    hsri_rope  rope = { room(r, 2 * D * 4), D };

    c.kv.n_kv_heads = 1;
    r->dev->ops.rope_table(r->q, &batch, c.inv_freq, D, 1, rope.cos_sin);
    r->dev->ops.rope_append(r->q, &batch, &c.kv, LAYER, HEADS, in, NONE, NONE, 0, &rope, q_out);
    r->dev->ops.attend(r->q, &batch, &c.kv, LAYER, HEADS, 1, q_out, (hsri_ref){ 0 }, 0, 1, part, NULL);
    r->dev->ops.merge(r->q, 2, HEADS, D, part, 1, &(hsri_fold){ 1, acc, out });
    queries = download(r, q_out, 2 * HEADS * D * 4);
    CHECK(memcmp(queries, qkv, HEADS * D * 4) == 0);   /* position 0 rotates nothing */
    got = download(r, out, 2 * HEADS * D * 4);
    for (uint32_t i = 0; i < HEADS * D; i++)           /* and sees its own value only */
        if (!CHECK(got[i] == qkv[(HEADS + 1) * D + i % D]))
            break;
    free(qkv);
    free(queries);
    free(got);
    cache_close(r, &c);
}

/* ---- compound operations ---- */

/* x += down silu, where silu may be rounded otherwise than in `want`: by one of the 8 bits that are left of it. */
static void check_rounded(rig *r, const matrix *down, uint32_t rows, hsri_ref silu, hsri_ref x, hsri_ref want)
{
    uint32_t d = down->m.n, hidden = down->m.k;
    float   *s = download(r, silu, (uint64_t)rows * hidden * 4), *got = download(r, x, (uint64_t)rows * d * 4);
    float   *wanted = download(r, want, (uint64_t)rows * d * 4);

    for (uint32_t i = 0; i < rows * d; i++) {
        double magnitude = 0.0;

        for (uint32_t k = 0; k < hidden; k++)
            magnitude += fabs(down->values[(uint64_t)(i % d) * hidden + k] * s[(uint64_t)(i / d) * hidden + k]);
        if (!CHECK(fabs((double)got[i] - wanted[i]) <= magnitude * 0x1p-7 + fabs(wanted[i]) * 0x1p-22))
            break;
    }
    free(s);
    free(got);
    free(wanted);
}

/* norm_linear, gate_up_silu, linear_add and mlp_add against the simple operations, bit for bit, but for what mlp_add may round. n: gate and
 * up of `hidden`, padded. */
static void check_compound(rig *r, hsri_dtype dtype, uint32_t rows, uint32_t d, uint32_t hidden)
{
    const hsri_ops *ops = &r->dev->ops;
    const uint32_t  n = 2 * ((hidden + 15) / 16 * 16), n_sums = rows * n;
    matrix   w = make_matrix(r, dtype, n, d, 300), down = make_matrix(r, dtype, d, hidden, 301);
    float   *x, *gain, *bias, *sums;
    hsri_ref in2, in = upload_noise(r, 40, rows * d, &x), g = upload_noise(r, 41, d, &gain), b = upload_noise(r, 42, n, &bias);
    hsri_ref sum = upload_noise(r, 43, n_sums, &sums), sum2 = upload(r, sums, (uint64_t)n_sums * 4);
    hsri_ref scratch = room(r, hsri_compound_scratch(rows, d, n) * 4), normed = room(r, (uint64_t)rows * d * 4);
    hsri_ref wide = room(r, (uint64_t)n_sums * 4), out = room(r, (uint64_t)n_sums * 4), silu = room(r, (uint64_t)n_sums * 4);

    ops->rms_norm(r->q, in, g, 1e-5f, rows, d, normed);
    ops->linear(r->q, &w.m, b, normed, rows, wide);
    ops->norm_linear(r->q, in, g, 1e-5f, &w.m, b, rows, scratch, out);
    check_same(r, wide, out, (uint64_t)n_sums * 4);
    ops->silu_mul(r->q, wide, rows, hidden, silu);
    ops->gate_up_silu(r->q, in, g, 1e-5f, &w.m, b, rows, hidden, scratch, out);
    check_same(r, silu, out, (uint64_t)rows * hidden * 4);
    ops->linear(r->q, &w.m, b, in, rows, wide);
    ops->add(r->q, sum, wide, rows, n);
    ops->linear_add(r->q, &w.m, b, in, rows, scratch, sum2);
    check_same(r, sum, sum2, (uint64_t)n_sums * 4);
    ops->linear(r->q, &down.m, NONE, silu, rows, normed);
    in2 = upload(r, x, (uint64_t)rows * d * 4);
    ops->add(r->q, in2, normed, rows, d);
    ops->mlp_add(r->q, in, g, 1e-5f, &w.m, b, &down.m, NONE, rows, scratch, out);
    if (rounds_inputs(r, &down))
        check_rounded(r, &down, rows, silu, in, in2);
    else
        check_same(r, in, in2, (uint64_t)rows * d * 4);
    free(w.values);
    free(down.values);
    free(x);
    free(gain);
    free(bias);
    free(sums);
    rig_reset(r);
}

static void test_compound(rig *r)
{
    check_compound(r, HSRI_DTYPE_Q8, 5, 48, 37);
    check_compound(r, HSRI_DTYPE_F32, 1, 40, 37);
    check_compound(r, HSRI_DTYPE_Q4, 1, 96, 200);
    check_compound(r, HSRI_DTYPE_BF16, 33, 64, 120);
    /* more rows than a block has, and more columns than a worker keeps sums of; inputs that kernels take in parts */
    check_compound(r, HSRI_DTYPE_Q8, 531, 32, 150);
    check_compound(r, HSRI_DTYPE_Q4, 40, 1000, 45);
}

/* qkv_rope_append: the queries and the page it wrote, against the simple operations. */
static void test_compound_qkv(rig *r)
{
    enum { ROWS = 9, D = 32, HIDDEN = 40, N = (N_HEADS + 2 * N_KV) * D };
    const hsri_ops *ops = &r->dev->ops;
    cache      c = cache_open(r, HSRI_KV_TYPE_BF16, D, D);
    matrix     w = make_matrix(r, HSRI_DTYPE_F32, N, HIDDEN, 310);
    hsri_row   rows[ROWS];
    float     *x, *gain;
    hsri_ref   in = upload_noise(r, 44, ROWS * HIDDEN, &x), g = upload_noise(r, 45, HIDDEN, &gain);
    hsri_ref   scratch = room(r, hsri_compound_scratch(ROWS, HIDDEN, N) * 4);
    hsri_ref   qkv = room(r, ROWS * N * 4), q1 = room(r, ROWS * N_HEADS * D * 4), q2 = room(r, ROWS * N_HEADS * D * 4), page[2];
    hsri_rope  rope = { room(r, ROWS * D * 4), D };
    hsri_batch batch[2];

    for (uint32_t s = 0; s < 2; s++) {   /* sequences 0 and 2 have the same rope table */
        uint32_t entry = c.tables[2 * s][LAYER * N_KV + 1];

        for (uint32_t i = 0; i < ROWS; i++)
            rows[i] = (hsri_row){ 2 * s, i };
        batch[s] = (hsri_batch){ upload(r, rows, sizeof rows), c.seqs, ROWS, N_SEQS };
        page[s] = (hsri_ref){ c.kv.pool_buf, 0, (uint64_t)(entry >> 8) * MIB + (uint64_t)(entry & 255) * c.kv.slot_bytes[c.type] };
    }
    ops->rope_table(r->q, batch, c.inv_freq, D, 1, rope.cos_sin);
    ops->norm_linear(r->q, in, g, 1e-6f, &w.m, NONE, ROWS, scratch, qkv);
    ops->rope_append(r->q, &batch[0], &c.kv, LAYER, N_HEADS, qkv, c.q_norm, c.k_norm, 1e-6f, &rope, q1);
    ops->qkv_rope_append(r->q, &batch[1], &c.kv, LAYER, N_HEADS, in, g, 1e-6f, &w.m, NONE, c.q_norm, c.k_norm, &rope, scratch, q2);
    check_same(r, q1, q2, ROWS * N_HEADS * D * 4);
    check_same(r, hsri_at(page[0], HSRI_PAGE_HEADER_BYTES), hsri_at(page[1], HSRI_PAGE_HEADER_BYTES),
               hsri_plain_page_bytes(c.type, D) - HSRI_PAGE_HEADER_BYTES);
    free(w.values);
    free(x);
    free(gain);
    cache_close(r, &c);
}

/* ---- sampling: what the operation adds to the sampler, which test_sample.c looks into ---- */

enum { S_ROWS = 5, S_VOCAB = 20000, S_TOKENS = 19990 };

static void check_sampled(const float *logits, const hsri_sampled *got)
{
    const float *row0 = logits, *row1 = logits + S_VOCAB;
    double       sum = 0;

    CHECK(got[0].status == HSR_OK && got[0].token == 12345);   /* greedy, in a later part; the padding is higher and not drawn */
    for (uint32_t i = 0; i < S_TOKENS; i++)
        sum += exp((double)row0[i] - row0[12345]);
    CHECK(near(got[0].logprob, -log(sum), 1e-6));
    CHECK(got[1].status == HSR_OK && got[1].token >= 0 && got[1].token < S_TOKENS && row1[got[1].token] > 0);
    CHECK(got[2].status == HSR_E_NONFINITE && got[2].token == -1);
    CHECK(got[3].status == HSR_OK && got[3].token == 77);      /* by its bias */
    CHECK(got[4].status == HSR_OK && got[4].token != 12345);   /* penalised */
    CHECK(got[4].n_logprobs == 1 && got[4].logprobs[0].token == 12345);
}

static void test_sample(rig *r)
{
    const hsri_sample_params greedy = { .top_p = 1, .repetition_penalty = 1 };
    hsri_sample_params params[S_ROWS] = { greedy, greedy, greedy, greedy, greedy };
    hsr_token_bias     bias = { 77, 50 };
    hsri_seen          seen = { 12345, 1, 1 };
    float             *logits = noise_array(50, S_ROWS * S_VOCAB);
    hsri_ref           out = room(r, S_ROWS * sizeof(hsri_sampled));
    hsri_sampled      *got;

    for (uint32_t i = 0; i < S_ROWS; i++) {
        logits[i * S_VOCAB + S_TOKENS] = 100;
        logits[i * S_VOCAB + 12345] = 2;
    }
    logits[2 * S_VOCAB + 19989] = NAN;
    params[1].temperature = 1;
    params[1].top_k = 5000;
    params[1].seed = 11;
    params[3].n_bias = 1;
    params[3].bias = upload(r, &bias, sizeof bias);
    params[4].n_seen = 1;
    params[4].seen = upload(r, &seen, sizeof seen);
    params[4].presence_penalty = 3;
    params[4].n_logprobs = 1;
    r->dev->ops.sample(r->q, upload(r, logits, S_ROWS * S_VOCAB * 4), S_ROWS, S_VOCAB, S_TOKENS, upload(r, params, sizeof params), out);
    got = download(r, out, S_ROWS * sizeof *got);
    check_sampled(logits, got);
    free(got);
    free(logits);
    rig_reset(r);
}

/* ---- memory ---- */

static void test_buffers(rig *r)
{
    uint32_t ids[300];
    uint64_t zero[8] = { 0 }, got[8];

    for (uint32_t i = 0; i < 300; i++) {   /* more than the table's first chunk holds */
        uint64_t mark = i + 1;

        CHECK(r->dev->alloc(r->dev, 64, &ids[i], NULL) == HSR_OK && ids[i] != 0);
        r->dev->copy_out(r->q, got, (hsri_ref){ .buf = ids[i] }, 64);
        rig_wait(r);
        CHECK(memcmp(got, zero, 64) == 0);
        r->dev->copy_in(r->q, (hsri_ref){ .buf = ids[i], .offset = 8 }, &mark, 8);
        rig_wait(r);
    }
    for (uint32_t i = 0; i < 300; i += 3)
        r->dev->free(r->dev, ids[i]);
    for (uint32_t i = 0; i < 300; i += 3)   /* freed ids are given again, zeroed */
        CHECK(r->dev->alloc(r->dev, 64, &ids[i], NULL) == HSR_OK);
    for (uint32_t i = 0; i < 300; i++) {
        r->dev->copy_out(r->q, got, (hsri_ref){ .buf = ids[i] }, 64);
        rig_wait(r);
        CHECK(got[1] == (i % 3 ? i + 1 : 0));
        r->dev->free(r->dev, ids[i]);
    }
}

static uint64_t resident_bytes(void)
{
    unsigned long long size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");

    CHECK(f && fscanf(f, "%llu %llu", &size, &resident) == 2);
    if (f)
        fclose(f);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* What is decommitted goes back to the system. */
static void test_decommit(rig *r)
{
    enum { BLOCKS = 64 };
    hsri_ref pool = { 0 };
    uint8_t *block = calloc(1, MIB);
    uint64_t full;

    CHECK(r->dev->reserve(r->dev, BLOCKS * MIB, &pool.buf, NULL) == HSR_OK);
    CHECK(r->dev->commit(r->dev, pool.buf, 0, BLOCKS * MIB, NULL) == HSR_OK);
    for (uint64_t i = 0; i < BLOCKS; i++)
        r->dev->copy_in(r->q, hsri_at(pool, i * MIB), block, MIB);
    rig_wait(r);
    full = resident_bytes();
    r->dev->decommit(r->dev, pool.buf, 0, BLOCKS * MIB);
    CHECK(resident_bytes() + BLOCKS / 2 * MIB < full);
    r->dev->free(r->dev, pool.buf);
    free(block);
}

static void test_ranges(rig *r)
{
    static const char text[] = "mapped weights stay where they are";
    char     got[sizeof text] = { 0 };
    hsri_ref view = { 0 }, pool = { 0 };
    hsr_error err = HSR_ERROR_INIT;

    CHECK(r->dev->view(r->dev, text, sizeof text, &view.buf, NULL) == HSR_OK);
    CHECK(r->dev->reserve(r->dev, 64ull << 30, &pool.buf, NULL) == HSR_OK);   /* address space, not memory */
    pool.offset = 40ull << 30;
    CHECK(r->dev->commit(r->dev, pool.buf, pool.offset, 2 * MIB, NULL) == HSR_OK);
    r->dev->copy(r->q, hsri_at(pool, MIB - 5), view, sizeof text);
    r->dev->copy_out(r->q, got, hsri_at(pool, MIB - 5), sizeof text);
    rig_wait(r);
    CHECK(strcmp(got, text) == 0);
    r->dev->decommit(r->dev, pool.buf, pool.offset, MIB);
    CHECK(r->dev->commit(r->dev, pool.buf, pool.offset, MIB, NULL) == HSR_OK);
    r->dev->copy_out(r->q, got, hsri_at(pool, MIB), 5);
    rig_wait(r);
    CHECK(memcmp(got, text + 5, 5) == 0);   /* the neighbour is untouched */
    r->dev->free(r->dev, view.buf);
    r->dev->free(r->dev, pool.buf);
    CHECK(r->dev->reserve(r->dev, UINT64_MAX - 5, &pool.buf, &err) == HSR_E_NOMEM && pool.buf == 0 && err.message[0]);
    CHECK(r->dev->alloc(r->dev, UINT64_MAX - 5, &pool.buf, &err) == HSR_E_NOMEM && pool.buf == 0 && err.message[0]);
}

typedef struct reader {
    hsri_device *dev;
    hsri_queue  *q;
    hsri_ref     ref;
    atomic_bool  stop;
    bool         wrong;
} reader;

static void *reader_main(void *arg)
{
    reader  *x = arg;
    uint32_t got;

    while (!atomic_load(&x->stop)) {
        x->dev->copy_out(x->q, &got, x->ref, 4);
        x->dev->wait(x->q, NULL);
        x->wrong |= got != 4711;
    }
    return NULL;
}

/* Buffers come and go while another thread uses one. */
static void test_concurrent_ids(rig *r)
{
    uint32_t  value = 4711, ids[200];
    reader    x = { .dev = r->dev, .ref = upload(r, &value, 4) };
    pthread_t thread;

    CHECK(r->dev->queue_create(r->dev, &x.q, NULL) == HSR_OK);
    CHECK(pthread_create(&thread, NULL, reader_main, &x) == 0);
    for (int round = 0; round < 5; round++) {
        for (uint32_t i = 0; i < 200; i++)
            CHECK(r->dev->alloc(r->dev, 16, &ids[i], NULL) == HSR_OK);
        for (uint32_t i = 0; i < 200; i++)
            r->dev->free(r->dev, ids[i]);
    }
    atomic_store(&x.stop, true);
    pthread_join(thread, NULL);
    CHECK(!x.wrong);
    r->dev->queue_destroy(x.q);
    rig_reset(r);
}

/* ---- queues ---- */

static void test_sticky_failure(void)
{
    rig       r = rig_open(1, HSR_ISA_REFERENCE, false);
    hsr_error err = HSR_ERROR_INIT;

    hsri_fail(&((hsri_cpu_queue *)r.q)->error, HSR_E_NOMEM, "no memory for the test");
    CHECK(r.dev->wait(r.q, &err) == HSR_E_NOMEM && err.status == HSR_E_NOMEM && strcmp(err.message, "no memory for the test") == 0);
    CHECK(r.dev->wait(r.q, &err) == HSR_OK);
    rig_close(&r);
}

/* The lagging device: poison before the wait, sources read late, arguments copied, a full queue, a queue nobody waited for. */
static void test_async(void)
{
    rig         r = rig_open(2, HSR_ISA_REFERENCE, true);
    uint32_t    source = 1, got = 0;
    hsri_ref    x = room(&r, 4 * MIB), one;
    float       y[4] = { 0 }, one_host = 1;
    matrix      w = make_matrix(&r, HSRI_DTYPE_F32, 1, 1, 60);
    hsri_matrix m = w.m;

    r.dev->copy_in(r.q, x, &source, 4);
    source = 2;
    r.dev->copy_out(r.q, &got, x, 4);
    CHECK(got == 0xA5A5A5A5);
    rig_wait(&r);
    CHECK(got == 2);

    one = upload(&r, &one_host, 4);
    r.dev->ops.linear(r.q, &m, NONE, one, 1, x);
    memset(&m, 0xFF, sizeof m);
    r.dev->copy_out(r.q, y, x, 4);
    rig_wait(&r);
    CHECK(y[0] == (float)w.values[0]);

    for (int i = 0; i < 1000; i++)
        r.dev->ops.add(r.q, hsri_at(x, 16), one, 1, 1);
    r.dev->copy_out(r.q, y, hsri_at(x, 16), 4);
    rig_wait(&r);
    CHECK(y[0] == 1000);
    r.dev->copy_in(r.q, x, NULL, 4);   /* never run */
    free(w.values);
    rig_close(&r);
}

static void run_all(rig *r)
{
    test_linear(r);
    test_embed(r);
    test_gather(r);
    test_rms_norm(r);
    test_add(r);
    test_silu_mul(r, 3, 5003);
    test_silu_mul(r, 40, 100);
    test_check_finite(r);
    test_attention(r, HSRI_KV_TYPE_F32, 32, 32);
    test_attention(r, HSRI_KV_TYPE_BF16, 64, 48);
    test_many_heads(r);
    test_compound(r);
    test_compound_qkv(r);
    test_sample(r);
    test_buffers(r);
    test_ranges(r);
    test_decommit(r);
    test_concurrent_ids(r);
}

/* Every variant at one level leaves the same log. */
static void run_level(int32_t isa)
{
    static const struct { int32_t n_threads; bool async; } variants[] = { { 1, false }, { 2, false }, { 3, false }, { 2, true } };
    rig first = { 0 };

    for (uint32_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        rig r = rig_open(variants[i].n_threads, isa, variants[i].async);

        r.naive = i == 0;
        run_all(&r);
        if (i == 0) {
            first = r;
            continue;
        }
        CHECK(r.log_bytes == first.log_bytes && memcmp(r.log, first.log, r.log_bytes) == 0);
        rig_close(&r);
    }
    rig_close(&first);
}

/* Where the system refuses the AMX registers, which it does to a thread whose signal stack is too small for them: asking for them
 * is an error, asking for the best level is not. In a child, since what a process was given once it keeps. */
static void test_amx_refused(void)
{
    int   status = -1;
    pid_t child;

    if (hsri_cpu_isa() < HSR_ISA_AMX)
        return;
    child = fork();
    if (child == 0) {
        static char  stack[4096];
        hsri_device *dev = NULL;
        hsr_error    err = { .struct_size = sizeof err };

        CHECK(sigaltstack(&(stack_t){ .ss_sp = stack, .ss_size = sizeof stack }, NULL) == 0);
        CHECK(hsri_cpu_device_create(1, HSR_ISA_AMX, NULL, &dev, &err) == HSR_E_UNSUPPORTED && dev == NULL);
        CHECK(strstr(err.message, "AMX"));
        CHECK(hsri_cpu_device_create(1, HSR_ISA_AUTO, NULL, &dev, NULL) == HSR_OK && dev->isa == HSR_ISA_AVX512);
        dev->destroy(dev);
        _exit(CHECK_REPORT());
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void)
{
    test_amx_refused();
    for (int32_t isa = HSR_ISA_REFERENCE; isa <= hsri_cpu_isa(); isa++)
        if (isa < HSR_ISA_AMX || hsri_cpu_allow_amx())
            run_level(isa);
    test_sticky_failure();
    test_async();
    return CHECK_REPORT();
}
