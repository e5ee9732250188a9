/* SPDX-License-Identifier: Apache-2.0 */
#ifndef HSRI_LAYERS_H
#define HSRI_LAYERS_H

#include <stdbool.h>
#include <stdint.h>

#define HSRI_MAX_LAYERS 1024u
#define HSRI_LAYER_WORDS (HSRI_MAX_LAYERS / 64u)

/* A set of layers. */
typedef struct hsri_layer_set { uint64_t words[HSRI_LAYER_WORDS]; } hsri_layer_set;

static inline bool hsri_layer_in(const hsri_layer_set *set, uint32_t layer) { return set->words[layer / 64] >> layer % 64 & 1; }
static inline void hsri_layer_add(hsri_layer_set *set, uint32_t layer) { set->words[layer / 64] |= 1ull << layer % 64; }

#endif
