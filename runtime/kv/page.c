/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/page.h"

#include <stddef.h>

#include "base/status.h"

/* Next state plus one; 0, which every pair not listed has, forbids the move. */
#define TO(state) ((uint8_t)(HSRI_PAGE_##state + 1))

static const uint8_t moves[HSRI_N_PAGE_STATES][HSRI_N_PAGE_EVENTS] = {
    [HSRI_PAGE_NONE] = {
        [HSRI_PAGE_EV_OPEN] = TO(OPEN),
    },
    [HSRI_PAGE_OPEN] = {
        [HSRI_PAGE_EV_FILL] = TO(FULL),
        [HSRI_PAGE_EV_DROP] = TO(NONE),
    },
    [HSRI_PAGE_FULL] = {
        [HSRI_PAGE_EV_REOPEN] = TO(OPEN),
        [HSRI_PAGE_EV_SEAL] = TO(HOT),
        [HSRI_PAGE_EV_DROP] = TO(NONE),
    },
    [HSRI_PAGE_HOT] = {
        [HSRI_PAGE_EV_UNSEAL] = TO(FULL),
        [HSRI_PAGE_EV_WRITE] = TO(HOT_WRITE),
        [HSRI_PAGE_EV_DROP] = TO(NONE),
    },
    [HSRI_PAGE_HOT_WRITE] = {
        [HSRI_PAGE_EV_DURABLE] = TO(HOT_HOME),
        [HSRI_PAGE_EV_WRITE_FAIL] = TO(HOT),
    },
    [HSRI_PAGE_HOT_HOME] = {
        [HSRI_PAGE_EV_UNSEAL] = TO(FULL),
        [HSRI_PAGE_EV_EVICT] = TO(HOME),
        [HSRI_PAGE_EV_DROP] = TO(NONE),
    },
    [HSRI_PAGE_HOME] = {
        [HSRI_PAGE_EV_READ] = TO(HOME_READ),
        [HSRI_PAGE_EV_LOSE] = TO(LOST),
        [HSRI_PAGE_EV_DROP] = TO(NONE),
    },
    [HSRI_PAGE_HOME_READ] = {
        [HSRI_PAGE_EV_LOADED] = TO(HOT_HOME),
        [HSRI_PAGE_EV_READ_FAIL] = TO(HOME),
        [HSRI_PAGE_EV_LOSE] = TO(LOST),
    },
    [HSRI_PAGE_LOST] = {
        [HSRI_PAGE_EV_DROP] = TO(NONE),
    },
};

static const char *const state_names[HSRI_N_PAGE_STATES] = {
    [HSRI_PAGE_NONE] = "none",
    [HSRI_PAGE_OPEN] = "open",
    [HSRI_PAGE_FULL] = "full",
    [HSRI_PAGE_HOT] = "hot",
    [HSRI_PAGE_HOT_WRITE] = "hot, write in flight",
    [HSRI_PAGE_HOT_HOME] = "hot and home",
    [HSRI_PAGE_HOME] = "home",
    [HSRI_PAGE_HOME_READ] = "home, read in flight",
    [HSRI_PAGE_LOST] = "lost",
};

static const char *const event_names[HSRI_N_PAGE_EVENTS] = {
    [HSRI_PAGE_EV_OPEN] = "open",
    [HSRI_PAGE_EV_FILL] = "fill",
    [HSRI_PAGE_EV_REOPEN] = "reopen",
    [HSRI_PAGE_EV_UNSEAL] = "unseal",
    [HSRI_PAGE_EV_SEAL] = "seal",
    [HSRI_PAGE_EV_WRITE] = "write",
    [HSRI_PAGE_EV_DURABLE] = "durable",
    [HSRI_PAGE_EV_WRITE_FAIL] = "write fail",
    [HSRI_PAGE_EV_EVICT] = "evict",
    [HSRI_PAGE_EV_READ] = "read",
    [HSRI_PAGE_EV_LOADED] = "loaded",
    [HSRI_PAGE_EV_READ_FAIL] = "read fail",
    [HSRI_PAGE_EV_LOSE] = "lose",
    [HSRI_PAGE_EV_DROP] = "drop",
};

static const char *event_name(hsri_page_event event)
{
    return (unsigned)event < HSRI_N_PAGE_EVENTS ? event_names[event] : "unknown event";
}

const char *hsri_page_state_name(hsri_page_state state)
{
    return (unsigned)state < HSRI_N_PAGE_STATES ? state_names[state] : "unknown state";
}

hsr_status hsri_page_move(uint8_t *state, hsri_page_event event, hsr_error *err)
{
    uint8_t to = 0;
    if (*state < HSRI_N_PAGE_STATES && (unsigned)event < HSRI_N_PAGE_EVENTS)
        to = moves[*state][event];
    if (to == 0)
        return hsri_fail(err, HSR_E_INTERNAL, "a page that is '%s' cannot '%s'",
                         hsri_page_state_name((hsri_page_state)*state), event_name(event));
    *state = (uint8_t)(to - 1);
    return HSR_OK;
}

int hsri_page_readable(hsri_page_state state)
{
    switch (state) {
    case HSRI_PAGE_OPEN:
    case HSRI_PAGE_FULL:
    case HSRI_PAGE_HOT:
    case HSRI_PAGE_HOT_WRITE:
    case HSRI_PAGE_HOT_HOME:
        return 1;
    default:
        return 0;
    }
}
