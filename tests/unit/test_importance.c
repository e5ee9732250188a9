/* SPDX-License-Identifier: Apache-2.0 */
/* Scores rank as their weights say, and voluntary moves do not go back and forth. */
#include "check.h"
#include "kv/importance.h"

static void test_weights(void)
{
    hsri_importance_opts o;
    for (int preset = 0; preset < HSRI_N_IMPORTANCE_PRESETS; preset++) {
        hsri_importance_preset_fill(&o, (hsri_importance_preset)preset);
        CHECK(hsri_importance_check(&o, NULL) == HSR_OK && o.enter == 0.7f && o.leave == 0.5f && o.idle_tokens == 10);
        CHECK(o.locality + o.frequency + o.recency > 0.999f && o.locality + o.frequency + o.recency < 1.001f);
    }
    hsri_importance_opts chat, summarize;
    hsri_importance_preset_fill(&chat, HSRI_IMPORTANCE_CHAT);
    hsri_importance_preset_fill(&summarize, HSRI_IMPORTANCE_SUMMARIZE);
    CHECK(chat.frequency > chat.locality && summarize.locality > summarize.frequency);

    /* Far and often attended, near and never: the presets disagree. */
    hsri_importance far = { 0 }, near = { 0 };
    for (uint32_t i = 0; i < 200; i++)
        hsri_importance_touch(&chat, &far, 100, 1);
    near.last_access = 100;
    CHECK(hsri_importance_score(&chat, &far, 100000, 100) > hsri_importance_score(&chat, &near, 0, 100));
    CHECK(hsri_importance_score(&summarize, &far, 100000, 100) < hsri_importance_score(&summarize, &near, 0, 100));
}

static void test_refused(void)
{
    hsri_importance_opts o;
    hsr_error err = HSR_ERROR_INIT;
    hsri_importance_preset_fill(&o, HSRI_IMPORTANCE_BALANCED);
    o.locality = -1;
    CHECK(hsri_importance_check(&o, &err) == HSR_E_INVALID && err.message[0]);
    o.locality = o.frequency = o.recency = 0;
    CHECK(hsri_importance_check(&o, NULL) == HSR_E_INVALID);
    o.recency = 0.0f / 0.0f;
    CHECK(hsri_importance_check(&o, NULL) == HSR_E_INVALID);
    hsri_importance_preset_fill(&o, HSRI_IMPORTANCE_BALANCED);
    o.enter = o.leave;
    CHECK(hsri_importance_check(&o, NULL) == HSR_E_INVALID);
    hsri_importance_preset_fill(&o, HSRI_IMPORTANCE_BALANCED);
    o.fold_accesses = 0;
    CHECK(hsri_importance_check(&o, NULL) == HSR_E_INVALID);
}

/* Every score is in 0 .. 1 and moves the right way; pages that were not read for some tokens come last. */
static void test_order(void)
{
    hsri_importance_opts o;
    hsri_importance_preset_fill(&o, HSRI_IMPORTANCE_BALANCED);
    hsri_importance row = { .last_access = 1000 };
    float last = 2;
    for (uint64_t distance = 0; distance < 1u << 20; distance = distance * 2 + 1) {
        float score = hsri_importance_score(&o, &row, distance, 1000);
        CHECK(score >= 0 && score <= 1 && score < last);
        last = score;
    }
    last = 2;
    for (uint32_t now = 1000; now < 5000; now += 7) {
        float score = hsri_importance_score(&o, &row, 500, now);
        CHECK(score >= 0 && score <= 1 && score <= last);
        last = score;
    }
    hsri_importance idle = { .last_access = 1000 }, busy = { .last_access = 1005 };
    for (int i = 0; i < 500; i++)
        hsri_importance_touch(&o, &idle, 1000, 1);
    CHECK(hsri_importance_score(&o, &idle, 0, 1011) < hsri_importance_score(&o, &busy, 1000000, 1011));
    CHECK(hsri_importance_score(&o, &idle, 0, 1010) > hsri_importance_score(&o, &busy, 1000000, 1010));

    /* Mass is folded in after some accesses, and decays when it stays away. */
    hsri_importance page = { 0 };
    for (uint32_t i = 0; i < o.fold_accesses; i++)
        hsri_importance_touch(&o, &page, i, 0.8f);
    CHECK(page.frequency > 0.15f && page.frequency < 0.25f && page.mass == 0);
    float before = page.frequency;
    for (uint32_t i = 0; i < 10 * o.fold_accesses; i++)
        hsri_importance_touch(&o, &page, i, 0);
    CHECK(page.frequency < before / 4);
    hsri_importance_touch(&o, &page, 1, -1);
    hsri_importance_touch(&o, &page, 1, 0.0f / 0.0f);
    CHECK(page.frequency >= 0 && page.mass == 0);
}

/* A score that wanders around one threshold causes no moves; one that swings over both is slowed by the cool-down. */
static void test_no_ping_pong(void)
{
    hsri_importance_opts o;
    hsri_importance_preset_fill(&o, HSRI_IMPORTANCE_BALANCED);
    hsri_importance row = { 0 };
    bool in = true;
    for (uint32_t now = 0; now < 3200; now++) {
        float score = now % 2 ? 0.69f : 0.51f;
        bool moves = in ? hsri_importance_leaves(&o, &row, score, now) : hsri_importance_enters(&o, &row, score, now);
        CHECK(!moves);
    }
    for (uint32_t now = 0; now < 3200; now++) {
        float score = now % 2 ? 0.9f : 0.1f;
        if (in ? hsri_importance_leaves(&o, &row, score, now) : hsri_importance_enters(&o, &row, score, now)) {
            in = !in;
            hsri_importance_moved(&row, now);
        }
    }
    CHECK(row.moves > 10 && row.moves <= 3200 / o.cooldown_tokens + 1);
}

/* A page that was attended often, and had to leave, may come back when its cool-down is over, though it is idle by then; one that was
 * attended once, or long ago, may not. */
static void test_comes_back(void)
{
    hsri_importance_opts o;
    hsri_importance_preset_fill(&o, HSRI_IMPORTANCE_BALANCED);
    hsri_importance often = { 0 }, once = { 0 };
    for (uint32_t now = 900; now < 1000; now++)
        hsri_importance_touch(&o, &often, now, 1);
    hsri_importance_touch(&o, &once, 999, 1);
    hsri_importance_moved(&often, 1000);
    hsri_importance_moved(&once, 1000);
    CHECK(!hsri_importance_enters(&o, &often, hsri_importance_worth(&o, &often, 500, 1010), 1010));
    CHECK(hsri_importance_enters(&o, &often, hsri_importance_worth(&o, &often, 500, 1040), 1040));
    CHECK(!hsri_importance_enters(&o, &once, hsri_importance_worth(&o, &once, 500, 1040), 1040));
    CHECK(!hsri_importance_enters(&o, &often, hsri_importance_worth(&o, &often, 5000, 6000), 6000));
}

int main(void)
{
    test_weights();
    test_refused();
    test_order();
    test_no_ping_pong();
    test_comes_back();
    return CHECK_REPORT();
}
