/* SPDX-License-Identifier: Apache-2.0 */
/* Every pair of state and event against the diagram of kv/page.h, the readable states, and the plain-window rule. */
#include <string.h>

#include "check.h"
#include "device/device.h"
#include "kv/page.h"

/* The diagram, arrow by arrow. */
static const struct arrow { hsri_page_state from; hsri_page_event event; hsri_page_state to; } diagram[] = {
    { HSRI_PAGE_NONE,      HSRI_PAGE_EV_OPEN,       HSRI_PAGE_OPEN },
    { HSRI_PAGE_OPEN,      HSRI_PAGE_EV_FILL,       HSRI_PAGE_FULL },
    { HSRI_PAGE_FULL,      HSRI_PAGE_EV_SEAL,       HSRI_PAGE_HOT },
    { HSRI_PAGE_HOT,       HSRI_PAGE_EV_WRITE,      HSRI_PAGE_HOT_WRITE },
    { HSRI_PAGE_HOT_WRITE, HSRI_PAGE_EV_DURABLE,    HSRI_PAGE_HOT_HOME },
    { HSRI_PAGE_FULL,      HSRI_PAGE_EV_REOPEN,     HSRI_PAGE_OPEN },
    { HSRI_PAGE_HOT,       HSRI_PAGE_EV_UNSEAL,     HSRI_PAGE_FULL },
    { HSRI_PAGE_HOT_WRITE, HSRI_PAGE_EV_WRITE_FAIL, HSRI_PAGE_HOT },
    { HSRI_PAGE_HOT_HOME,  HSRI_PAGE_EV_UNSEAL,     HSRI_PAGE_FULL },
    { HSRI_PAGE_HOT_HOME,  HSRI_PAGE_EV_EVICT,      HSRI_PAGE_HOME },
    { HSRI_PAGE_HOME,      HSRI_PAGE_EV_READ,       HSRI_PAGE_HOME_READ },
    { HSRI_PAGE_HOME_READ, HSRI_PAGE_EV_LOADED,     HSRI_PAGE_HOT_HOME },
    { HSRI_PAGE_HOME_READ, HSRI_PAGE_EV_READ_FAIL,  HSRI_PAGE_HOME },
    { HSRI_PAGE_HOME,      HSRI_PAGE_EV_LOSE,       HSRI_PAGE_LOST },
    { HSRI_PAGE_HOME_READ, HSRI_PAGE_EV_LOSE,       HSRI_PAGE_LOST },
    { HSRI_PAGE_OPEN,      HSRI_PAGE_EV_DROP,       HSRI_PAGE_NONE },
    { HSRI_PAGE_FULL,      HSRI_PAGE_EV_DROP,       HSRI_PAGE_NONE },
    { HSRI_PAGE_HOT,       HSRI_PAGE_EV_DROP,       HSRI_PAGE_NONE },
    { HSRI_PAGE_HOT_HOME,  HSRI_PAGE_EV_DROP,       HSRI_PAGE_NONE },
    { HSRI_PAGE_HOME,      HSRI_PAGE_EV_DROP,       HSRI_PAGE_NONE },
    { HSRI_PAGE_LOST,      HSRI_PAGE_EV_DROP,       HSRI_PAGE_NONE },
};

#define N_ARROWS (sizeof diagram / sizeof *diagram)

static int arrow_to(int from, int event)
{
    for (size_t i = 0; i < N_ARROWS; i++)
        if ((int)diagram[i].from == from && (int)diagram[i].event == event)
            return diagram[i].to;
    return -1;
}

static void test_all_moves(void)
{
    size_t allowed = 0;
    for (int from = 0; from < HSRI_N_PAGE_STATES; from++)
        for (int event = 0; event < HSRI_N_PAGE_EVENTS; event++) {
            hsr_error err = HSR_ERROR_INIT;
            uint8_t state = (uint8_t)from;
            hsr_status status = hsri_page_move(&state, (hsri_page_event)event, &err);
            int to = arrow_to(from, event);
            if (to < 0) {
                CHECK(status == HSR_E_INTERNAL && state == from);
                CHECK(strstr(err.message, hsri_page_state_name((hsri_page_state)from)) != NULL);
            } else {
                CHECK(status == HSR_OK && state == to);
                allowed++;
            }
        }
    CHECK(allowed == N_ARROWS);
}

static void test_nonsense(void)
{
    uint8_t state = HSRI_N_PAGE_STATES;
    CHECK(hsri_page_move(&state, HSRI_PAGE_EV_DROP, NULL) == HSR_E_INTERNAL && state == HSRI_N_PAGE_STATES);
    state = HSRI_PAGE_OPEN;
    CHECK(hsri_page_move(&state, HSRI_N_PAGE_EVENTS, NULL) == HSR_E_INTERNAL && state == HSRI_PAGE_OPEN);
    CHECK(hsri_page_state_name(HSRI_N_PAGE_STATES) != NULL);
}

static void test_readable(void)
{
    static const bool readable[HSRI_N_PAGE_STATES] = {
        [HSRI_PAGE_OPEN] = true, [HSRI_PAGE_FULL] = true, [HSRI_PAGE_HOT] = true, [HSRI_PAGE_HOT_WRITE] = true, [HSRI_PAGE_HOT_HOME] = true,
    };
    for (int state = 0; state < HSRI_N_PAGE_STATES; state++)
        CHECK(!hsri_page_readable((hsri_page_state)state) == !readable[state]);
}

/* One sink page, a window of two pages: queries of page 5 read pages 0, 4 and 5 plain. */
static void test_plain_window(void)
{
    static const bool plain[] = { true, false, false, false, true, true };
    for (uint32_t page = 0; page < 6; page++)
        CHECK(!hsri_page_is_plain(page, 5, 1, 2) == !plain[page]);
    CHECK(!hsri_page_is_plain(0, 5, 0, 2));
    CHECK(sizeof(hsri_page_header) == HSRI_PAGE_HEADER_BYTES);
}

int main(void)
{
    test_all_moves();
    test_nonsense();
    test_readable();
    test_plain_window();
    return CHECK_REPORT();
}
