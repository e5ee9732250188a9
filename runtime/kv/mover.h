/* SPDX-License-Identifier: Apache-2.0 */
/* The mover carries page slots between memory and the cold file on a thread of its own. It knows no sessions and decides
 * nothing: it is handed moves and reports how they ended. What is read is checked against its checksum and identity before it is
 * reported as there; what is written is copied to staging memory first, so that the slot itself never changes.
 *
 * One thread, the owner, calls everything here. The mover's thread is the only one that touches the io and its files. */
#ifndef HSRI_MOVER_H
#define HSRI_MOVER_H

#include <stdbool.h>
#include <stdint.h>

#include "device/kv_format.h"
#include "io/io.h"

#define HSRI_NO_MOVE UINT32_MAX

/* Who is served first. */
typedef enum hsri_move_priority {
    HSRI_MOVE_DEMAND,       /* somebody waits for it: a read, or a write whose slot is wanted */
    HSRI_MOVE_PREFETCH,
    HSRI_MOVE_BACKGROUND,   /* cleaning ahead, giving extents back */
    HSRI_N_MOVE_PRIORITIES
} hsri_move_priority;

typedef enum hsri_move_kind { HSRI_MOVE_READ, HSRI_MOVE_WRITE, HSRI_MOVE_FREE } hsri_move_kind;

typedef struct hsri_move {
    hsri_move_kind kind;
    uint32_t  owner;        /* the caller's; comes back */
    uint32_t  extent;       /* of the file, as the owner numbers them: it gets room on disk when first written */
    uint32_t  offset;       /* in the extent */
    uint8_t  *memory;       /* of slot_bytes, aligned to 4096; the move's until it has retired (a write's: until it has ended) */
    uint32_t  slot_bytes;
    uint32_t  page_bytes;   /* of these, what the checksum covers */
    uint64_t  lineage;      /* identity, as in the page's header */
    uint32_t  page;
    uint16_t  layer, head;
} hsri_move;

/* FREE gives an extent back; no other move of it may be under way. */
typedef struct hsri_moved {
    hsri_move  move;
    uint32_t   id;          /* what submit answered */
    hsr_status status;      /* HSR_OK: durable, or there and checked; HSR_E_FORMAT: wrong bytes; HSR_E_IO; HSR_E_CANCELLED */
    int32_t    sys_code;
    bool       retired;     /* false: a deadline has passed; the move is reported again when it ends */
} hsri_moved;

typedef struct hsri_mover_opts {
    hsri_io_opts io;        /* staging_bytes, deadline_ms and max_requests included; 0: the mover's own choice */
    const char  *directory; /* of the cold file, which has no name and is gone with the process */
    uint64_t     bytes;     /* most that the file may take */
    uint32_t     max_moves; /* accepted and not yet collected; 0: 4096 */
} hsri_mover_opts;

typedef struct hsri_mover_stats {
    hsri_io_stats io;
    char          engine[16];       /* "io_uring" or "pread" */
    uint64_t      cpu_ns;           /* of the mover's thread */
    uint64_t      wall_ns;          /* since it was started */
    uint64_t      bad_pages;        /* read back wrong */
    uint32_t      queued, running, peak_queued;
    uint64_t      extents_on_disk;
} hsri_mover_stats;

typedef struct hsri_mover hsri_mover;

hsr_status hsri_mover_create(const hsri_mover_opts *opts, hsri_mover **mover, hsr_error *err);

/* Ends the thread, giving what is under way wait_ms. HSR_E_IO: the system may still write to memory of moves that did not end. A
 * thread that hangs where the file grows or shrinks is left behind, with the mover's own memory.
 * Moves that were not collected are forgotten. NULL accepted. */
hsr_status hsri_mover_destroy(hsri_mover *mover, uint64_t wait_ms, hsr_error *err);

/* Accept a move; HSRI_NO_MOVE if the queue is full. */
uint32_t hsri_mover_submit(hsri_mover *mover, const hsri_move *move, hsri_move_priority priority);

/* Serve it earlier, if it has not started. */
void hsri_mover_raise(hsri_mover *mover, uint32_t id, hsri_move_priority priority);

/* Writes that were ahead of need are waited for now. */
void hsri_mover_raise_writes(hsri_mover *mover);

/* End it as HSR_E_CANCELLED, if it has not started. It is reported either way. */
void hsri_mover_cancel(hsri_mover *mover, uint32_t id);

/* Up to `max` ends. With none to report it waits for one, at most timeout_ms and only while any move exists. */
uint32_t hsri_mover_collect(hsri_mover *mover, hsri_moved *moved, uint32_t max, uint64_t timeout_ms);

void hsri_mover_get_stats(hsri_mover *mover, hsri_mover_stats *stats);

#endif
