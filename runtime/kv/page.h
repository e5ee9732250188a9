/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a page, as a table of allowed moves that every change goes through:
 *
 *   none --open--> open --fill--> full --seal--> hot --write--> hot, write in flight --durable--> hot and home
 *                  open <-reopen- full <-unseal- hot <----------- write fail
 *                                 full <-unseal---------------------------------------------------- hot and home
 *
 *   hot and home --evict--> home --read--> home, read in flight --loaded--> hot and home
 *                           home <-------- read fail
 *                           home --lose--> lost <--lose-- home, read in flight
 *
 * and `drop` to none from every state that has no transfer in flight: the memory of a transfer is the transfer's until it
 * ends, so whoever drops such a page waits for its end first.
 *
 * "Queued" and "durable" are different events: a write-back that was queued has not made a home. The machine is tested alone,
 * without pools or models (tests/unit/test_page.c). */
#ifndef HSRI_PAGE_H
#define HSRI_PAGE_H

#include <stdint.h>

#include "device/device.h"

typedef enum hsri_page_state {
    HSRI_PAGE_NONE,       /* no slot */
    HSRI_PAGE_OPEN,       /* tail page: rows are still written */
    HSRI_PAGE_FULL,       /* 64 tokens, plain, inside the window or the sink */
    HSRI_PAGE_HOT,        /* sealed; bytes in hot memory only */
    HSRI_PAGE_HOT_WRITE,  /* sealed; a write-back is queued, not durable */
    HSRI_PAGE_HOT_HOME,   /* sealed; hot and durable at home: eviction is a rebind */
    HSRI_PAGE_HOME,       /* sealed; at home only */
    HSRI_PAGE_HOME_READ,  /* sealed; a read into a hot slot is queued */
    HSRI_PAGE_LOST,       /* its bytes are gone (I/O error, bad checksum): the session must be rebuilt */
    HSRI_N_PAGE_STATES
} hsri_page_state;

typedef enum hsri_page_event {
    HSRI_PAGE_EV_OPEN,        /* a slot was given */
    HSRI_PAGE_EV_FILL,        /* the 64th token was committed */
    HSRI_PAGE_EV_REOPEN,      /* truncate cut into a full page */
    HSRI_PAGE_EV_UNSEAL,      /* truncate moved the window back over a page whose plain bytes are kept */
    HSRI_PAGE_EV_SEAL,        /* encoded, indexed, immutable from now on */
    HSRI_PAGE_EV_WRITE,       /* write-back queued */
    HSRI_PAGE_EV_DURABLE,     /* write-back completed */
    HSRI_PAGE_EV_WRITE_FAIL,
    HSRI_PAGE_EV_EVICT,       /* hot slot given up */
    HSRI_PAGE_EV_READ,        /* read queued */
    HSRI_PAGE_EV_LOADED,      /* read completed, checksum right */
    HSRI_PAGE_EV_READ_FAIL,   /* retry is possible: home stays */
    HSRI_PAGE_EV_LOSE,
    HSRI_PAGE_EV_DROP,        /* truncated away, or the session ended */
    HSRI_N_PAGE_EVENTS
} hsri_page_event;

/* Move *state by event. HSR_E_INTERNAL, with the names of both and *state unchanged, if the move is not allowed. */
hsr_status hsri_page_move(uint8_t *state, hsri_page_event event, hsr_error *err);

const char *hsri_page_state_name(hsri_page_state state);

/* May a kernel read the page's slot in this state? */
int hsri_page_readable(hsri_page_state state);

/* The plain-window rule: is page p read plain by queries of page q? Counts in pages. */
static inline int hsri_page_is_plain(uint32_t p, uint32_t q, uint32_t sink_pages, uint32_t window_pages)
{
    return p < sink_pages || p + window_pages > q;
}

#endif
