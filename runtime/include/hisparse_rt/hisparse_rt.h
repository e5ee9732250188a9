/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file hisparse_rt.h
 * The public C interface of libhisparse_rt: load a model file, run sessions over it, read tokens or logits.
 *
 * Objects, from the outside in:
 *   hsr_model    weights and metadata of one `.hsr` file, immutable, shared by engines
 *   hsr_engine   a scheduler with its own threads and memory pools; batches all of its sessions
 *   hsr_session  one sequence of tokens with its KV cache
 *
 * The usual order of calls:
 *   hsr_model_open -> hsr_engine_create -> hsr_session_create
 *   -> hsr_session_append (prompt) -> hsr_session_generate (a request) -> hsr_session_next until FINISHED
 *   -> hsr_session_destroy -> hsr_engine_destroy -> hsr_model_close
 *
 * Conventions, valid for every function:
 * - The result is an hsr_status: HSR_OK, a positive notice, or a negative error. Numbers are fixed and never reused.
 * - `err` may be NULL. Otherwise it is the caller's memory, with struct_size set (HSR_ERROR_INIT does), and receives
 *   the text of a failure. Nothing is allocated to report an error.
 * - A call that fails with HSR_E_INVALID has changed nothing.
 * - Option and result structs begin with struct_size. Their `_init` function fills in the defaults. Fields are only ever
 *   appended: a caller built against an older header gets defaults for the fields it does not know; a caller with a
 *   newer, larger struct is accepted if the unknown tail is all zero, and refused with HSR_E_INVALID otherwise.
 * - Token ids are int32_t. Lengths of sequences, positions in them and byte sizes are 64-bit; settings that count tokens are int32_t.
 * - The library never prints, aborts, installs handlers, reads the environment, or keeps process-wide state.
 * - `@threads any` means: from any thread, concurrently. `@threads session` means: one thread at a time per session; a
 *   second concurrent call on the same session returns HSR_E_BUSY.
 * - After fork() every call on an inherited engine or session returns HSR_E_FORKED, except the destroy functions, which then
 *   only clear the handle: threads and locks stayed with the parent, and the child's copy of the memory ends with the child.
 */
#ifndef HISPARSE_RT_H
#define HISPARSE_RT_H

#include <stddef.h>
#include <stdint.h>

#include "version.h"

#if defined(__GNUC__)
#  define HSR_API __attribute__((visibility("default")))
#else
#  define HSR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- statuses and errors ------------------------------------------------------------------------------------- */

typedef int32_t hsr_status;

#define HSR_OK              0
#define HSR_AGAIN           1   /* nothing to do or nothing to report now; not an error */
#define HSR_E_INVALID     (-1)  /* an argument is wrong; no state was changed */
#define HSR_E_NOMEM       (-2)  /* the system refused memory */
#define HSR_E_BUSY        (-3)  /* another thread is inside this session, or stepping this engine */
#define HSR_E_IO          (-4)  /* a system call on a file failed; sys_code is errno */
#define HSR_E_FORMAT      (-5)  /* a file is damaged, cut short, or not what it claims to be */
#define HSR_E_FORKED      (-6)  /* the object was made before fork() and used in the child */
#define HSR_E_UNSUPPORTED (-7)  /* valid, but not in this version, build or machine */
#define HSR_E_NOSPACE     (-8)  /* a budget or a limit given at creation (memory, cold file, sessions) cannot hold the request */
#define HSR_E_CONTEXT     (-9)  /* the session's context ceiling would be passed */
#define HSR_E_TOKEN       (-10) /* a token id is outside the model's vocabulary */
#define HSR_E_NONFINITE   (-11) /* NaN or infinity in the logits of this session */
#define HSR_E_CANCELLED   (-12) /* hsr_session_cancel or hsr_engine_cancel ended the work */
#define HSR_E_STATE       (-13) /* the call does not fit the object's present state */
#define HSR_E_VERSION     (-14) /* a file of another format version */
#define HSR_E_INTERNAL    (-15) /* a defect of the library; please report it */

typedef struct hsr_error {
    uint32_t struct_size;
    int32_t  status;       /* the status returned */
    int32_t  sys_code;     /* errno where the system refused, else 0 */
    char     message[500]; /* NUL-terminated UTF-8, names the culprit; empty on success */
} hsr_error;

#define HSR_ERROR_INIT { (uint32_t)sizeof(hsr_error), 0, 0, { 0 } }

/** Version of the library as "major.minor.patch"; static storage.
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API const char *hsr_version(void);

/** HSR_ABI_VERSION of the library that is loaded, to compare with the header's.
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API uint32_t hsr_abi_version(void);

/** Name of a status, such as "HSR_E_CONTEXT"; "HSR_E_UNKNOWN" for a number this version does not know. Static storage.
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API const char *hsr_status_name(hsr_status status);

/* ---- models --------------------------------------------------------------------------------------------------- */

typedef struct hsr_model   hsr_model;
typedef struct hsr_engine  hsr_engine;
typedef struct hsr_session hsr_session;

#define HSR_DTYPE_F32  0
#define HSR_DTYPE_BF16 1
#define HSR_DTYPE_Q8   2
#define HSR_DTYPE_Q4   3

typedef struct hsr_model_info {
    uint32_t struct_size;
    int32_t  weight_dtype;      /* HSR_DTYPE_* of the projections */
    char     arch[32];          /* "llama", "qwen2", ... */
    int32_t  vocab_size;        /* rows of the output head = length of a logits row */
    int32_t  tokenizer_size;    /* ids from here to vocab_size are padding and are never sampled */
    int32_t  hidden_size;
    int32_t  n_layers;
    int32_t  n_heads;
    int32_t  n_kv_heads;
    int32_t  head_dim;
    int32_t  context_length;    /* trained length, tokens */
    int32_t  bos_token;         /* -1: none */
    int32_t  n_eos_tokens;      /* how many of eos_tokens are filled */
    int32_t  eos_tokens[16];
    uint64_t weight_bytes;      /* packed tensors, bytes in the file */
    uint64_t n_params;          /* logical parameters, padding not counted */
    int32_t  intermediate_size; /* of the feed-forward part */
    int32_t  rotary_dim;        /* of each head */
} hsr_model_info;

/** Open a `.hsr` file. The weights are memory-mapped and shared between processes; nothing is copied. Opening checks the
 *  whole structure: format version, architecture, and that every tensor is present, expected, and of the right shape.
 *  Replacing the file (rename) while it is open is harmless; cutting it short in place is not: like any mapped file.
 *  @param path   file name, bytes as the system takes them
 *  @param model  receives the model, or NULL on failure
 *  @return HSR_OK; HSR_E_IO, HSR_E_FORMAT, HSR_E_VERSION, HSR_E_UNSUPPORTED (architecture), HSR_E_NOMEM, HSR_E_INVALID
 *  @since 0.1  @threads any  @blocks on file metadata  @alloc yes */
HSR_API hsr_status hsr_model_open(const char *path, hsr_model **model, hsr_error *err);

/** Close a model and set *model to NULL; NULL is accepted. Engines hold their own reference, so the mapping ends with the
 *  last of them: closing first is allowed.
 *  @since 0.1  @threads any, once  @blocks no  @alloc no */
HSR_API void hsr_model_close(hsr_model **model);

/** Fill *info; struct_size must be set by the caller.
 *  @return HSR_OK or HSR_E_INVALID   @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API hsr_status hsr_model_get_info(const hsr_model *model, hsr_model_info *info, hsr_error *err);

/** Look up a string in the file's metadata, for example "tokenizer.huggingface.json" or "tokenizer.chat_template".
 *  @param value  receives a pointer into the mapped file, valid until hsr_model_close; NOT NUL-terminated
 *  @param size   receives its length in bytes
 *  @return HSR_OK; HSR_AGAIN if there is no such string (value NULL, size 0); HSR_E_INVALID
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API hsr_status hsr_model_metadata(const hsr_model *model, const char *key, const char **value, uint64_t *size);

/** Read the model's calibration, a `.hsrcal` file made by `hisparse-rt calibrate`: the bases in which keys are sketched and
 *  stored. Engines created afterwards use it; a model has at most one.
 *  @return HSR_OK; HSR_E_IO, HSR_E_FORMAT (also: made for other weights, or a basis with values that are not finite), HSR_E_VERSION,
 *          HSR_E_NOMEM, HSR_E_STATE (the model has one already), HSR_E_INVALID
 *  @since 0.1  @threads one per model, before engines are made of it  @blocks on the file  @alloc yes */
HSR_API hsr_status hsr_model_load_calibration(hsr_model *model, const char *path, hsr_error *err);

/* ---- engines -------------------------------------------------------------------------------------------------- */

#define HSR_LOG_ERROR 0
#define HSR_LOG_WARN  1
#define HSR_LOG_INFO  2
#define HSR_LOG_DEBUG 3

/** Receives one line of log, without newline. May be called from any thread that is inside the library or owned by it,
 *  never concurrently for one engine. It must return; calling back into the engine is not allowed. */
typedef void (*hsr_log_fn)(void *user, int32_t level, const char *message, size_t length);

/* Instruction-set levels of the CPU back end, ordered. Results may differ in the last bits between levels, never
 * within one. */
#define HSR_ISA_AUTO      0 /* the best this machine has */
#define HSR_ISA_REFERENCE 1 /* portable C */
#define HSR_ISA_AVX2      2 /* AVX2 + FMA + F16C */
#define HSR_ISA_AVX512    3 /* AVX-512 F/BW/DQ/VL */
#define HSR_ISA_AMX       4 /* AMX tiles and AVX-512 BF16: activations that meet bf16, q8 or q4 weights, and attention over a
                               bf16 cache, are rounded to bf16. The first engine at this level asks the system for the tile
                               registers, for the whole process and for good: signal stacks (sigaltstack) must then be about
                               8 KiB larger. If the system refuses, AUTO takes AVX512. To never ask, set HSR_ISA_AVX512 */

typedef struct hsr_engine_opts {
    uint32_t    struct_size;
    int32_t     n_threads;     /* 0: as many as the affinity mask and cpu quota allow; 1: the calling thread only; <= 1024 */
    int32_t     isa;           /* HSR_ISA_*: highest level to use; refused if the machine lacks it */
    int32_t     chunk_tokens;  /* most prompt tokens of one session in one step; 1..4096, default 512 */
    int32_t     max_sessions;  /* 1..65536, default 256 */
    int32_t     max_batch;     /* most rows of one step, prompt chunks and decode rows together; 1..65536, default 1024 */
    uint64_t    hot_bytes;     /* budget of the hot KV pool; 0: half of the memory available at creation. Rounded down to MiB */
    hsr_log_fn  log;           /* NULL: silent, the default */
    void       *log_user;
    int32_t     log_level;     /* HSR_LOG_*: the most detailed level delivered */
    uint32_t    flags;         /* HSR_ENGINE_* */
    uint64_t    warm_bytes;    /* more memory for sealed pages. The CPU reads it in place: hot and warm are one pool of their sum */
    const char *cold_dir;      /* directory for sealed pages that memory does not hold, best on NVMe; copied. NULL: no cold tier */
    uint64_t    cold_bytes;    /* most that the cold file may take, up to 16 TiB; 0 with a cold_dir: half of what is free there */
    int32_t     io_engine;     /* HSR_IO_*: how cold pages are read and written */
    int32_t     io_deadline_ms; /* a page that is waited for longer fails its session; default 30000.
                                 * Time in which the process is stopped does not count */
    int32_t     importance;    /* HSR_IMPORTANCE_*: which pages leave memory first */
    float       weight_locality, weight_frequency, weight_recency; /* if any is not 0, these in place of what `importance` stands for */
    float       enter_above, leave_below; /* of moves that nobody asked for: the worth (0 to 1) above which a page that had to leave
                                * comes back, and the score below which one goes: half its worth, and 0.5 more if it was read lately.
                                * Defaults 0.7 and 0.5 */
    int32_t     prefetch_depth; /* groups of pages that may be on their way ahead of need; default 4, 0: none */
    int32_t     readable_tiers; /* HSR_READ_*: memory that attention reads in place */
    uint32_t    prefetch_sources; /* HSR_PREFETCH_*: why pages are read ahead; default HSR_PREFETCH_DEFAULT. Results stay the same */
} hsr_engine_opts;

/* Why a page is read before attention asks for it. Counted by source: hsr_engine_stats.prefetch, in this order. */
#define HSR_PREFETCH_GROUPS 1u /* the next groups of the layer, and the first of the next layer */
#define HSR_PREFETCH_RISING 2u /* it had to leave, is worth more than enter_above, and there is room */
#define HSR_PREFETCH_QUERY  4u /* the next layer's query, guessed before this one is done, would select it; of sparse sessions, one token at
                                  a time. Off by default: half of these pages are never used, and no time was measured to be saved */
#define HSR_PREFETCH_DEFAULT (HSR_PREFETCH_GROUPS | HSR_PREFETCH_RISING)
#define HSR_N_PREFETCH 4       /* the fourth is not to be chosen: pages that HSR_LATE_ESTIMATE did not wait for */

#define HSR_READ_ALL 0 /* hot and warm, which are one pool */
#define HSR_READ_HOT 1 /* hot alone, as on a GPU: pages that leave it go to warm memory, in place of those worth less there, and must come
                          back to be read. Same results, slower. Warm memory then holds only pages that have their place in the cold file,
                          too, and needs a cold_dir. For tests */

#define HSR_IO_AUTO  0 /* io_uring where the build, the kernel and the sandbox have it, else threads */
#define HSR_IO_URING 1 /* io_uring, or an error */
#define HSR_IO_PREAD 2 /* threads */

#define HSR_IMPORTANCE_BALANCED  0
#define HSR_IMPORTANCE_SUMMARIZE 1 /* near pages first */
#define HSR_IMPORTANCE_CHAT      2 /* pages that were attended most first */

/* Run device operations on a thread of their own and poison host memory that is read before a wait: finds
 * ordering mistakes. Same results, slower. For tests. */
#define HSR_ENGINE_ASYNC_DEBUG 1u

/** Fill *opts with the defaults, struct_size included; pass sizeof *opts, so that a newer library writes no field this caller lacks.
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API void hsr_engine_opts_init(hsr_engine_opts *opts, uint32_t struct_size);

/** Create an engine over a model: its thread pool, its device buffers and its KV pool, which reserves address space for
 *  the whole budget and commits memory only as sessions grow.
 *  @param opts    NULL: defaults
 *  @param engine  receives the engine, or NULL on failure
 *  @return HSR_OK; HSR_E_INVALID, HSR_E_NOMEM, HSR_E_UNSUPPORTED (isa)
 *  @since 0.1  @threads any  @blocks starts threads  @alloc yes */
HSR_API hsr_status hsr_engine_create(hsr_model *model, const hsr_engine_opts *opts, hsr_engine **engine, hsr_error *err);

/** Stop and free an engine and set *engine to NULL; NULL is accepted.
 *  @return HSR_OK; HSR_E_BUSY while sessions live or a call is inside (*engine is kept)
 *  @since 0.1  @threads any, once  @blocks joins its threads  @alloc no */
HSR_API hsr_status hsr_engine_destroy(hsr_engine **engine, hsr_error *err);

/** Cancel all sessions, as hsr_session_cancel does for one.
 *  @return HSR_OK, HSR_E_INVALID
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API hsr_status hsr_engine_cancel(hsr_engine *engine, hsr_error *err);

/* What became of pages that were read ahead for one reason. */
typedef struct hsr_prefetch_stats {
    uint64_t pages;              /* asked for */
    uint64_t hits;               /* of these, attended */
    uint64_t wasted;             /* and left memory again, or were dropped, without that */
    uint64_t bytes, wasted_bytes;
} hsr_prefetch_stats;

#define HSR_N_LATENCIES 32     /* classes of hsr_engine_stats.cold_read_latency */

typedef struct hsr_engine_stats {
    uint32_t struct_size;
    int32_t  n_threads;          /* threads that compute, the caller included */
    int32_t  isa;                /* HSR_ISA_* in use */
    int32_t  n_sessions;         /* alive */
    int32_t  n_queued;           /* sessions with work that the last step had no room for */
    int32_t  last_batch_rows;    /* rows of the last step */
    uint64_t n_steps;
    uint64_t prefill_tokens;     /* prompt tokens computed since creation */
    uint64_t decode_tokens;      /* tokens sampled since creation */
    uint64_t prefill_ns;         /* time of steps that held prompt rows */
    uint64_t decode_ns;          /* time of steps that held none */
    /* hot pool, in blocks of 1 MiB unless it says bytes */
    uint64_t hot_blocks_total;
    uint64_t hot_blocks_used;
    uint64_t hot_blocks_reserved; /* promised to admitted work, not yet allocated */
    uint64_t hot_blocks_peak;
    uint64_t hot_largest_free_run;
    uint64_t hot_bytes_committed; /* memory the system has given */
    uint64_t hot_slots_used;      /* page slots that hold a page */
    uint64_t hot_slots_wasted;    /* page slots free inside allocated blocks */
    uint64_t slot_bytes;          /* bytes of one page slot */
    uint64_t pages_open;
    uint64_t pages_full;
    uint64_t pages_sealed;
    /* cold tier; all 0 without one. Pages are sealed pages of one layer and kv head */
    char     io_engine[16];       /* "io_uring" or "pread" */
    uint64_t cold_pages;          /* at home in the cold file only */
    uint64_t cold_bytes_used;     /* extents of the cold file that hold homes */
    uint64_t cold_bytes_total;
    uint64_t cold_hits;           /* pages that attention found in memory */
    uint64_t cold_misses;         /* pages that it had to read */
    uint64_t cold_late;           /* pages that had not arrived when computing came to them */
    uint64_t cold_waits;          /* times that computing waited for pages */
    uint64_t cold_wait_ns;        /* and for how long in all */
    uint64_t cold_wait_ns_p99;
    uint64_t cold_prefetched, cold_prefetch_hits, cold_prefetch_wasted; /* pages */
    uint64_t cold_read_bytes, cold_written_bytes;
    uint64_t cold_evictions;
    uint64_t cold_max_moves;      /* of one page */
    uint64_t cold_errors;         /* reads and writes that failed, pages that came back wrong */
    uint64_t mover_cpu_ns;        /* of the thread that moves pages */
    uint64_t cold_estimated;      /* pages that were not waited for (HSR_LATE_ESTIMATE), each time */
    /* with HSR_READ_HOT, else 0 */
    uint64_t warm_pages;          /* in warm memory; cold_pages counts them, too */
    uint64_t warm_moved_in;       /* pages that moved from hot to warm memory; of cold_evictions */
    uint64_t warm_moved_out;      /* and back, because somebody wanted them: what attention found there is among cold_hits */
    uint64_t warm_dropped;        /* that left warm memory for others */
    hsr_prefetch_stats prefetch[HSR_N_PREFETCH]; /* the cold_prefetch counters by source: GROUPS, RISING, QUERY, what was not waited for */
    /* of the time of steps, and of hsr_session_fill's: what was spent on */
    uint64_t attend_ns;           /* attention over pages that were chosen, or all */
    uint64_t select_ns;           /* choosing them: scores, selection, lists; and turning queries into the calibrated basis, which
                                    attention over compact and vtq pages needs, too */
    uint64_t seal_ns;             /* encoding full pages and their index entries */
    uint64_t cluster_ns;          /* cluster records of the index */
    uint64_t cold_largest_free_run; /* MiB of the cold file */
    uint64_t cold_slots_wasted;   /* page slots free inside extents in use */
    uint64_t warm_largest_free_run; /* blocks of 1 MiB; these two with HSR_READ_HOT */
    uint64_t warm_slots_wasted;
    uint64_t cold_read_latency[HSR_N_LATENCIES]; /* reads by time, queueing included: the first of less than a microsecond, number i of
                                    2^(i-1) to 2^i microseconds, the last also of more */
    uint64_t cold_pages_moved;    /* pages that have left memory at least once: cold_evictions in all */
    /* what encoding has lost so far, of pages of one layer and kv head: |x - decoded| / |x| over their keys and values. Pages with keys or
       values that are not finite are left out */
    uint64_t encoded_pages;
    double   encode_error_mean, encode_error_max;
} hsr_engine_stats;

/** Fill *stats; struct_size must be set by the caller.
 *  @return HSR_OK, HSR_E_INVALID
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API hsr_status hsr_engine_get_stats(hsr_engine *engine, hsr_engine_stats *stats, hsr_error *err);

/* ---- profiles ------------------------------------------------------------------------------------------------- */

/* Which rule picks the pages that a query reads. What each needs in the session's index: see HSR_INDEX_*. */
#define HSR_SELECT_AUTO     0  /* cluster if the model is calibrated, else minmax without virtual tokens, which the log tells once */
#define HSR_SELECT_SKETCH   1  /* 4-bit sketches of the keys in a calibrated basis */
#define HSR_SELECT_MEAN     2  /* mean key of each page */
#define HSR_SELECT_CLASSIC  3  /* mean key of coarse blocks, then of fine blocks inside the best */
#define HSR_SELECT_MINMAX   4  /* upper bound from each channel's smallest and largest value (Quest) */
#define HSR_SELECT_GAUSSIAN 5  /* mean and variance of the keys */
#define HSR_SELECT_CLUSTER  6  /* centroids first, then the sketches of the best candidates */
#define HSR_SELECT_HISTORY  7  /* the pages that were attended most so far, as many as the budget holds; prompts are dense */
#define HSR_SELECT_RANDOM   8  /* for comparison */
#define HSR_SELECT_ORACLE   9  /* exact scores, read from the pages themselves: for measuring, as slow as dense */

/* What a token that is computed by itself, sampled or appended, does about a selected page that is not in memory. */
#define HSR_LATE_WAIT     0 /* waits: results are those of a run with everything in memory */
#define HSR_LATE_ESTIMATE 1 /* goes on without it: its tokens become virtual ones, the page is read for later rows, and the statistics count
                               it. What is in memory then decides results. Only where virtual tokens are in use; everything else waits:
                               longer prompts, dense attention and dense layers, other selectors, layers in which virtual tokens
                               are left out */

typedef struct hsr_profile {
    uint32_t struct_size;
    int32_t  sparse;               /* 0: dense attention, everything below is ignored */
    int32_t  selector;             /* HSR_SELECT_* */
    int32_t  budget;               /* tokens attended per query and kv head besides sink and window; whole slices, at least one */
    float    sparse_ratio;         /* > 0: the budget is at least this share of the tokens outside sink and window; in [0, 1] */
    int32_t  slice_size;           /* 16, 32 or 64 tokens chosen together */
    int32_t  virtual_tokens;       /* nonzero: what is not attended counts with its estimated mass and mean value. Needs selector sketch or
                                      cluster; left out in layers where calibration found that it harms */
    int32_t  forced_history;       /* pages of 64 tokens of the highest attention mass so far that rows outside whole prompt runs attend
                                      beside the budget, per layer and kv head; 0..64. The session then keeps the mass of its pages,
                                      from the time it has such a profile on; a restored or rebuilt one starts over */
    int32_t  candidates;           /* cluster: tokens whose sketches are scored; 0: 4 for each token of the budget, at least 4096 */
    int32_t  dense_below;          /* queries at positions below this attend densely */
    int32_t  prefill_dense_below;  /* prompt runs of 128 tokens below this position attend densely */
    int32_t  prefill_budget;       /* budget of a prompt run; 0: prompts are always dense */
    int32_t  block_size_coarse;    /* classic: tokens, multiple of 64 */
    int32_t  block_size_fine;      /* classic: tokens, 16, 32 or 64 */
    int32_t  top_k_coarse;         /* classic: coarse blocks kept */
    int32_t  top_k_fine;           /* classic: fine blocks kept, on average per coarse block: top_k_coarse * top_k_fine in all,
                                      within the budget */
    uint32_t n_dense_layers;       /* layers that always attend densely */
    uint32_t n_layer_budgets;      /* length of layer_budgets: 0 or the number of layers */
    const int32_t *dense_layers;   /* copied */
    const int32_t *layer_budgets;  /* copied; 0: `budget` */
    uint64_t seed;                 /* random */
    int32_t  late;                 /* HSR_LATE_* */
} hsr_profile;

/** Fill *profile with the defaults: sparse, selector auto, 1024 tokens in slices of 16, virtual tokens; pass sizeof *profile.
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API void hsr_profile_init(hsr_profile *profile, uint32_t struct_size);

/** Register a profile with an engine; sessions and requests then name it by its id. Profiles live as long as the engine; id 0 exists
 *  from the start and is dense. At most 4096.
 *  @return HSR_OK; HSR_E_INVALID names the field; HSR_E_UNSUPPORTED (selector sketch or cluster without a calibration);
 *          HSR_E_NOSPACE; HSR_E_NOMEM
 *  @since 0.1  @threads any  @blocks for at most one step  @alloc yes */
HSR_API hsr_status hsr_profile_register(hsr_engine *engine, const hsr_profile *profile, int32_t *id, hsr_error *err);

/* ---- sessions ------------------------------------------------------------------------------------------------- */

#define HSR_KV_AUTO 0 /* f32 for models of dtype f32, else bf16, or int8 if the session's profile is sparse and the model not calibrated */
#define HSR_KV_F32  1
#define HSR_KV_BF16 2
#define HSR_KV_INT8 3    /* sealed pages at 8 bits per value, half of bf16 */
#define HSR_KV_COMPACT 4 /* sealed pages at about 4 bits per value, in a calibrated basis; head sizes that are multiples of 16 */
#define HSR_KV_VTQ  5    /* as compact, with values at 5 bits chosen by their distribution */

/* What the session keeps about every sealed page, for selectors to scan. */
#define HSR_INDEX_AUTO     0 /* what the session's profile needs; nothing for a dense one */
#define HSR_INDEX_NONE     1
#define HSR_INDEX_SKETCH   2 /* selectors sketch, mean, classic, and cluster, which then looks at all sketches; needs a calibration */
#define HSR_INDEX_MINMAX   3 /* selectors minmax, mean, classic */
#define HSR_INDEX_GAUSSIAN 4 /* selectors gaussian, mean, classic */
#define HSR_INDEX_CLUSTER  5 /* as sketch, and clusters of the tokens of each 8192: what selector cluster is for */

typedef struct hsr_session_opts {
    uint32_t struct_size;
    int32_t  kv_format;     /* HSR_KV_* */
    int64_t  context;       /* ceiling in tokens; 0: the model's trained length. Costs nothing until used */
    int32_t  beyond_trained; /* nonzero: allow a context above the trained length */
    int32_t  window_size;   /* tokens, multiple of 64, default 512: most recent pages, never sealed */
    int32_t  sink_size;     /* tokens, multiple of 64, default 64: first pages, never sealed */
    int32_t  rollback_tokens; /* how far hsr_session_truncate may go back; default 256 */
    void    *user;          /* returned in events */
    int32_t  profile;       /* of prompts, and of requests that name none; id from hsr_profile_register, 0: dense */
    int32_t  index_kind;    /* HSR_INDEX_* */
    int32_t  sketch_4bit;   /* components of a sketch at 4 bits, a multiple of 8; both 0: 24 and 0 */
    int32_t  sketch_2bit;   /* components at 2 bits, a multiple of 16 */
} hsr_session_opts;

/** Fill *opts with the defaults, struct_size included; pass sizeof *opts, so that a newer library writes no field this caller lacks.
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API void hsr_session_opts_init(hsr_session_opts *opts, uint32_t struct_size);

/** Create an empty session. For models whose rotary table depends on the length (rope types dynamic and longrope) the
 *  table is chosen once, here, from opts->context, and kept for the session's life.
 *  @return HSR_OK; HSR_E_INVALID, HSR_E_CONTEXT (above the trained length), HSR_E_NOMEM, HSR_E_NOSPACE (max_sessions)
 *  @since 0.1  @threads any  @blocks for at most one step  @alloc yes */
HSR_API hsr_status hsr_session_create(hsr_engine *engine, const hsr_session_opts *opts, hsr_session **session, hsr_error *err);

/** Free a session, return its blocks to the pool, and set *session to NULL; NULL is accepted. Work under way ends first.
 *  @return HSR_OK; HSR_E_BUSY if another thread is inside the session (*session is kept)
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc no */
HSR_API hsr_status hsr_session_destroy(hsr_session **session, hsr_error *err);

/** Append prompt tokens. They are checked and admitted at once, computed by later steps (hsr_session_next,
 *  hsr_engine_step, hsr_session_logits). Admission reserves every KV block the tokens need, or refuses and names the
 *  short number. The prompt may be given in several calls.
 *  @param ids  n token ids, 0 <= id < vocab_size; copied
 *  @return HSR_OK; HSR_E_TOKEN (message names position and id), HSR_E_CONTEXT, HSR_E_NOSPACE, HSR_E_STATE (a request is
 *          running or the session failed), HSR_E_INVALID (n = 0), HSR_E_NOMEM, HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc yes */
HSR_API hsr_status hsr_session_append(hsr_session *session, const int32_t *ids, uint64_t n, hsr_error *err);

typedef struct hsr_token_bias {
    int32_t token;
    float   bias;   /* added to the logit; -infinity bans the token */
} hsr_token_bias;

typedef struct hsr_request {
    uint32_t struct_size;
    int32_t  max_tokens;          /* >= 0; 0: compute the prompt, then finish */
    float    temperature;         /* 0: arg-max, lowest id on ties; otherwise divides the logits; finite, >= 0 */
    int32_t  top_k;               /* 0: off */
    float    top_p;               /* 1: off; in (0, 1] */
    float    min_p;               /* 0: off; in [0, 1] */
    float    repetition_penalty;  /* 1: off; > 0. Positive logits divided, negative multiplied, once per distinct token */
    float    presence_penalty;    /* 0: off; subtracted once per distinct token of the output */
    float    frequency_penalty;   /* 0: off; subtracted once per occurrence in the output */
    int32_t  penalty_window;      /* repetition_penalty looks at the last this many tokens; -1: all, prompt included */
    uint64_t seed;                /* same seed, same draws, whatever runs beside */
    const hsr_token_bias *bias;   /* copied */
    uint32_t n_bias;
    uint32_t n_stop;              /* extra token ids that end the request, at most 32 */
    const int32_t *stop;          /* copied */
    int32_t  ignore_eos;          /* nonzero: the model's own eos ids do not stop */
    int32_t  n_logprobs;          /* 0..20: how many of the most likely tokens to report with each token */
    int32_t  profile;             /* profile of the session from now on; -1: as it is */
} hsr_request;

/** Fill *request with the defaults: greedy, 128 tokens, everything else off; pass sizeof *request.
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API void hsr_request_init(hsr_request *request, uint32_t struct_size);

/** Start a request: after the appended tokens are computed, sample up to max_tokens. Reserves the KV blocks of all
 *  max_tokens, or refuses. Tokens arrive as events; the request ends with one FINISHED or FAILED event.
 *  Events of an earlier request that were not collected are dropped.
 *  A session whose context is full ends with HSR_FINISH_LENGTH at the last position that fits.
 *  @return HSR_OK; HSR_E_INVALID (names the field), HSR_E_STATE (nothing appended yet, or a request is running),
 *          HSR_E_TOKEN, HSR_E_CONTEXT (no room for one token), HSR_E_NOSPACE, HSR_E_NOMEM, HSR_E_BUSY. A refusal keeps all tokens; the last
 *          of them may have to be computed again, which the next request does
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc yes */
HSR_API hsr_status hsr_session_generate(hsr_session *session, const hsr_request *request, hsr_error *err);

#define HSR_EVENT_TOKEN    1 /* one sampled token */
#define HSR_EVENT_FINISHED 2 /* the request is over; reason says why */
#define HSR_EVENT_FAILED   3 /* the request ended with status, err has the text; the session's tokens are kept */

#define HSR_FINISH_STOP    1 /* an eos or stop id was sampled; it is the last token event */
#define HSR_FINISH_LENGTH  2 /* max_tokens or the context ceiling */

typedef struct hsr_logprob {
    int32_t token;
    float   logprob;  /* natural logarithm, of the distribution before penalties, bias, temperature and filters */
} hsr_logprob;

typedef struct hsr_event {
    uint32_t     struct_size;
    int32_t      kind;       /* HSR_EVENT_* */
    hsr_session *session;
    void        *user;       /* hsr_session_opts.user */
    int32_t      token;      /* TOKEN */
    int32_t      reason;     /* FINISHED: HSR_FINISH_* */
    hsr_status   status;     /* FAILED */
    float        logprob;    /* TOKEN: of the token itself, as in hsr_logprob */
    int64_t      position;   /* TOKEN: its position in the sequence */
    int32_t      n_logprobs; /* TOKEN: filled entries of logprobs */
    hsr_logprob  logprobs[20];
} hsr_event;

/** Next event of this session, running batch steps until there is one. Concurrent calls on several sessions elect one
 *  caller to run each step; the others wait. All sessions with work advance in every step.
 *  @return HSR_OK with *event filled; HSR_AGAIN if the session has no request and nothing to report;
 *          HSR_E_BUSY, HSR_E_FORKED, HSR_E_INVALID; HSR_E_NOMEM and HSR_E_INTERNAL if the step itself failed
 *  @since 0.1  @threads session  @blocks while computing  @alloc no */
HSR_API hsr_status hsr_session_next(hsr_session *session, hsr_event *event, hsr_error *err);

/** Run one batch step over all sessions that have work and return their events, in session order.
 *  A session whose events are not collected pauses; none is lost.
 *  @param events  n_events structs; struct_size of each must be set
 *  @param n       receives the number filled
 *  @return HSR_OK; HSR_AGAIN if no session had work or events; HSR_E_BUSY if another thread is stepping
 *  @since 0.1  @threads any, one at a time  @blocks while computing  @alloc no */
HSR_API hsr_status hsr_engine_step(hsr_engine *engine, hsr_event *events, uint32_t n_events, uint32_t *n, hsr_error *err);

/** Append n tokens, compute them (in chunks, batched with other sessions' work), and write the logits of every one.
 *  @param logits  receives n * vocab_size floats, row i predicting the token after ids[i]
 *  @param size    floats that fit in logits
 *  @return as hsr_session_append and hsr_session_next; HSR_E_NONFINITE; HSR_E_STATE while a request is running
 *  @since 0.1  @threads session  @blocks while computing  @alloc yes */
HSR_API hsr_status hsr_session_logits(hsr_session *session, const int32_t *ids, uint64_t n, float *logits, uint64_t size, hsr_error *err);

/** Compute all appended tokens now: a prefill that can be followed with progress. With a request running it returns as soon as
 *  the request has its first event, which hsr_session_next then delivers without waiting. `progress` may be NULL; otherwise
 *  it is called between steps, on the calling thread and without locks, with tokens done and tokens to do, and ends the call
 *  with HSR_E_CANCELLED by returning nonzero; what is computed stays, and so does the request.
 *  @return HSR_OK, HSR_E_CANCELLED (by the callback or by hsr_session_cancel), HSR_E_BUSY, or why the session failed
 *  @since 0.1  @threads session  @blocks while computing  @alloc no */
HSR_API hsr_status hsr_session_prefill(hsr_session *session, int32_t (*progress)(void *user, uint64_t done, uint64_t total),
                                       void *user, hsr_error *err);

/** End the work that a session has now, at the end of a step under way: the running request gets a FAILED event with
 *  HSR_E_CANCELLED; tokens that were appended but not computed are dropped, and the call that waits for them, or the next one
 *  that would, returns HSR_E_CANCELLED. Without work nothing happens. The session stays usable.
 *  @return HSR_OK, HSR_E_INVALID
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API hsr_status hsr_session_cancel(hsr_session *session, hsr_error *err);

/** Copy the session: same tokens, same KV, no request. Sealed pages are shared until one side ends.
 *  @param fork  receives the new session, with the same options and user pointer
 *  @return HSR_OK; HSR_E_STATE (work under way), HSR_E_NOSPACE, HSR_E_NOMEM, HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc yes */
HSR_API hsr_status hsr_session_fork(hsr_session *session, hsr_session **fork, hsr_error *err);

/** Forget all tokens from position n on. With a plain KV format (f32, bf16) in an engine without cold tier any n is allowed; otherwise
 *  any that is at most rollback_tokens below the most that was computed since the session was empty, and 0.
 *  @return HSR_OK; HSR_E_INVALID (n above the session's length), HSR_E_STATE (work under way, or too far back), HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc no */
HSR_API hsr_status hsr_session_truncate(hsr_session *session, uint64_t n, hsr_error *err);

/** Use another profile from here on: for tokens appended and sampled later, and for those appended and not computed yet.
 *  @return HSR_OK; HSR_E_INVALID (no such id), HSR_E_STATE (a request is running), HSR_E_UNSUPPORTED (the session's index lacks what
 *          the selector reads), HSR_E_NOMEM, HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc yes */
HSR_API hsr_status hsr_session_set_profile(hsr_session *session, int32_t profile, hsr_error *err);

/** Drop the KV cache and queue all of the session's tokens to be computed again: the way back after a failure.
 *  @return HSR_OK; HSR_E_STATE (a request is running), HSR_E_NOSPACE, HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc yes */
HSR_API hsr_status hsr_session_rebuild(hsr_session *session, hsr_error *err);

typedef struct hsr_session_stats {
    uint32_t   struct_size;
    hsr_status status;          /* HSR_OK, or why the session failed (hsr_session_rebuild clears it) */
    uint64_t   n_tokens;        /* tokens held, computed and queued */
    uint64_t   n_computed;      /* tokens whose KV is in the cache */
    uint64_t   context;         /* ceiling */
    uint64_t   prefill_tokens;  /* prompt tokens computed since creation */
    uint64_t   decode_tokens;   /* tokens sampled since creation */
    uint64_t   kv_bytes;        /* bytes of page slots held */
    uint64_t   kv_blocks;       /* blocks held */
    uint64_t   pages_open;
    uint64_t   pages_full;
    uint64_t   pages_sealed;
    int32_t    kv_format;       /* HSR_KV_* in use */
    int32_t    running;         /* nonzero while a request runs */
    int32_t    index_kind;      /* HSR_INDEX_* in use */
    int32_t    profile;         /* in use */
    uint64_t   index_bytes;     /* held by the index */
    uint64_t   sparse_rows;     /* rows computed with a selection of their own (decode rows) */
    double     covered;         /* estimated share of the attention mass that the last such row attended, mean over layers and heads;
                                   NaN: none yet */
    double     covered_mean;    /* the same over all such rows */
    double     attended_tokens; /* tokens that the last such row attended, mean over layers and kv heads */
    uint64_t   estimated_pages; /* pages of one layer and kv head that such rows did not wait for (HSR_LATE_ESTIMATE), each time */
} hsr_session_stats;

/** Fill *stats; struct_size must be set by the caller.
 *  @return HSR_OK, HSR_E_INVALID
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API hsr_status hsr_session_get_stats(hsr_session *session, hsr_session_stats *stats, hsr_error *err);

/* ---- unstable: for calibration and measuring; may change between minor versions -------------------------------- */

#define HSR_OBSERVE_KEYS   1 /* after rope, as attention reads them */
#define HSR_OBSERVE_VALUES 2
#define HSR_OBSERVE_MASSES 3 /* attention that pages of 64 tokens got so far, where a profile keeps it (forced_history); else 0 */

/** Read the keys or values of one layer back from the pages, of positions [first, first + n); or masses, of pages [first, first + n).
 *  @param out  receives float[n][n_kv_heads][head_dim]; of masses float[n][n_kv_heads]
 *  @param size floats that fit in out
 *  @return HSR_OK; HSR_E_INVALID, HSR_E_STATE (work under way), HSR_E_NOMEM, HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc yes */
HSR_API hsr_status hsr_session_observe(hsr_session *session, int32_t what, int32_t layer, uint64_t first, uint64_t n,
                                       float *out, uint64_t size, hsr_error *err);

/** Append n positions whose keys and values are sampled (seeded) from those the session has computed, turned to their new places: for
 *  measuring long contexts without hours of prefill. They go through the same pages, formats, index and tiers; what the model says
 *  afterwards means nothing.
 *  @return HSR_OK; HSR_E_STATE (nothing computed yet, or work under way), HSR_E_CONTEXT, HSR_E_NOSPACE, HSR_E_NOMEM, HSR_E_BUSY;
 *          on a failure part-way the positions appended so far stay
 *  @since 0.1  @threads session  @blocks while it appends; other sessions wait  @alloc yes */
HSR_API hsr_status hsr_session_fill(hsr_session *session, uint64_t n, uint64_t seed, hsr_error *err);

/* What hsr_session_capture is to record, and where: at every position first + k * stride, k < n, in layers [layer_first, layer_end). What
 * is NULL is not recorded. */
typedef struct hsr_capture {
    uint32_t struct_size;
    int32_t  layer_first, layer_end;
    uint32_t stride;
    uint64_t first, n;
    float   *queries;      /* float[layers][n][n_heads][head_dim] */
    int32_t *n_slices;     /* int32[layers][n][n_kv_heads]: how many were selected */
    int32_t *slices;       /* int32[layers][n][n_kv_heads][max_slices]: the first max_slices of them, ascending; slice i begins at token
                              16 i. What is behind the last one means nothing */
    uint32_t max_slices;
} hsr_capture;

/** Record what attention does while the session computes, from now on: the query heads (after rope), and which slices of 16 tokens the
 *  position's selection has, for each kv head. Selections are not recorded where attention is dense. n = 0 ends it. The memory must stay
 *  until then.
 *  @return HSR_OK, HSR_E_INVALID, HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc no */
HSR_API hsr_status hsr_session_capture(hsr_session *session, const hsr_capture *capture, hsr_error *err);

/** Copy the session's token ids (prompt and output) from position first on.
 *  @param n  in: ids that fit in out; out: ids from `first` on, which may be more than fitted, or 0 if first is beyond the end
 *  @return HSR_OK, HSR_E_INVALID, HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks for at most one step  @alloc no */
HSR_API hsr_status hsr_session_tokens(hsr_session *session, uint64_t first, int32_t *out, uint64_t *n, hsr_error *err);

/* ---- saved sessions ------------------------------------------------------------------------------------------- */

/** Write a session to a file, from which hsr_session_restore goes on without computing anything again. The file holds the user's
 *  text, as token ids and as keys and values: whoever can read it can read the conversation. It is made with mode 0600, under
 *  another name in the same folder, and takes its place when it is whole and on disk; whatever goes wrong, a file that was there
 *  before is untouched. Other sessions go on in the meantime. docs/save-file.md describes it.
 *  @param progress  NULL, or called in between, on this thread and without locks, with bytes done and bytes to do; nonzero ends the
 *                   call with HSR_E_CANCELLED
 *  @return HSR_OK; HSR_E_STATE (a request is running, appended tokens are not computed yet, or the session failed), HSR_E_IO (also a
 *          full disk), HSR_E_INVALID (the path is a folder or a device), HSR_E_CANCELLED, HSR_E_NOMEM, HSR_E_BUSY
 *  @since 0.1  @threads session  @blocks on the file, and between steps  @alloc yes */
HSR_API hsr_status hsr_session_save(hsr_session *session, const char *path, int32_t (*progress)(void *user, uint64_t done, uint64_t total),
                                    void *user, hsr_error *err);

/* What may be chosen anew; everything else is as the session was created. */
typedef struct hsr_restore_opts {
    uint32_t struct_size;
    int32_t  kv_format;      /* HSR_KV_*: refuse a session of another format; AUTO: take what it has */
    int64_t  context;        /* ceiling in tokens; 0: as saved. Models whose rotary table depends on it refuse some changes */
    int32_t  beyond_trained; /* as in hsr_session_opts, for a context given here */
    int32_t  profile;        /* of this engine: profiles are not saved; 0: dense */
    void    *user;           /* returned in events */
    int32_t (*progress)(void *user, uint64_t done, uint64_t total); /* NULL, or called in between, on this thread and without locks,
                                with bytes done and bytes to do; nonzero ends the call with HSR_E_CANCELLED, and no session is left */
    void    *progress_user;  /* its first argument */
    const hsr_session_opts *like; /* NULL, or: refuse (HSR_E_INVALID) what a session created with these options and given the same tokens
                                would not be: another format, window, sink, index, or tokens computed with another profile. Its context,
                                rollback_tokens and user do not matter */
} hsr_restore_opts;

/** Fill *opts with the defaults; pass sizeof *opts.
 *  @since 0.1  @threads any  @blocks no  @alloc no */
HSR_API void hsr_restore_opts_init(hsr_restore_opts *opts, uint32_t struct_size);

/** Create a session from a file of hsr_session_save. Its next token is the one that the saved session would have had, on the same
 *  machine to the bit, unless that depends on a history of attention (forced_history, selector HISTORY), which begins anew. Everything
 *  is checked; the message of a refusal names what differs or what is damaged. The file is not needed afterwards.
 *  @param opts  NULL: defaults
 *  @return HSR_OK; HSR_E_IO, HSR_E_FORMAT (damaged, cut short, or saved with another model or calibration), HSR_E_VERSION,
 *          HSR_E_CONTEXT, HSR_E_NOSPACE (the memory budgets or max_sessions), HSR_E_UNSUPPORTED, HSR_E_INVALID, HSR_E_NOMEM,
 *          HSR_E_CANCELLED (by the callback)
 *  @since 0.1  @threads any  @blocks on the file, and between steps  @alloc yes */
HSR_API hsr_status hsr_session_restore(hsr_engine *engine, const char *path, const hsr_restore_opts *opts,
                                       hsr_session **session, hsr_error *err);

/* ---- planning ------------------------------------------------------------------------------------------------- */

/* What is short, if a plan does not fit. */
#define HSR_SHORT_NOTHING  0
#define HSR_SHORT_MEMORY   1 /* hot_bytes and warm_bytes; short_needed and short_available are bytes */
#define HSR_SHORT_COLD     2 /* cold_bytes; likewise */
#define HSR_SHORT_SESSIONS 3 /* max_sessions; they are sessions */

typedef struct hsr_plan_result {
    uint32_t struct_size;
    int32_t  fits;              /* nonzero: an engine with these options admits all sessions, each up to its context */
    int32_t  short_of;          /* HSR_SHORT_* */
    uint32_t n_resident;        /* sessions whose pages all stay in memory; those of the others may leave for the cold file */
    uint64_t short_needed, short_available;
    uint64_t context;           /* tokens of a session */
    /* for all sessions together, once */
    uint64_t weight_bytes;      /* mapped from the file, shared with other processes */
    uint64_t scratch_bytes;     /* for computing */
    /* for one session, full */
    uint64_t plain_bytes;       /* slots of pages as they are written: all pages, or with an encoded format or
                                   a cold tier the most recent */
    uint64_t sealed_bytes;      /* slots of all others */
    uint64_t index_bytes;       /* what selectors scan */
    uint64_t table_bytes;       /* page tables and token ids; beside the budgets */
    uint64_t session_blocks;    /* blocks of 1 MiB of memory if all of it stays there */
    /* for all sessions, full, as they are admitted; if they do not fit, what they would need */
    uint64_t memory_bytes, memory_budget;
    uint64_t cold_bytes, cold_budget;
    uint64_t total_bytes;       /* the process at most: weights, scratch, tables, and KV memory, with a cold tier
                                   as far as the budget goes */
    uint64_t history_bytes;     /* of one session, if its profile keeps a history of attention (forced_history, selector HISTORY); in no
                                   sum, since profiles are not known here; beside the budgets */
} hsr_plan_result;

/** What n_sessions sessions (1..65536) with these options, each filled to its context, need, and whether an engine with these options
 *  admits them: counted by the functions that admit. Needs no model file: `model` may be filled from a configuration. A format or an index
 *  that needs a calibration is planned as if there were one. `profile` is of no engine yet, so AUTO is planned as for dense sessions:
 *  index_kind as NONE, kv_format as plain.
 *  @param model    vocab_size, hidden_size, n_layers, n_heads, n_kv_heads, head_dim, context_length and weight_dtype are needed.
 *                  intermediate_size 0 is taken as 4 * hidden_size, rotary_dim 0 as head_dim, weight_bytes and n_params as they are
 *  @param engine   NULL: defaults. hot_bytes 0 looks at the memory available now, as creating the engine would
 *  @param session  NULL: defaults
 *  @param plan     filled, also if the plan does not fit
 *  @return HSR_OK, fitting or not; HSR_E_INVALID, HSR_E_CONTEXT, HSR_E_UNSUPPORTED, HSR_E_IO (cold_dir without cold_bytes), HSR_E_NOMEM
 *  @since 0.1  @threads any  @blocks no  @alloc yes */
HSR_API hsr_status hsr_plan(const hsr_model_info *model, const hsr_engine_opts *engine, const hsr_session_opts *session,
                            uint32_t n_sessions, hsr_plan_result *plan, hsr_error *err);

#ifdef __cplusplus
}
#endif
#endif
