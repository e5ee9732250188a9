/* SPDX-License-Identifier: Apache-2.0 */
/* The loop bodies of attend_avx2.h: 4 strips of 8 numbers times a number of each of 3 rows, added to 12 sums. That takes all 16 registers,
 * which compilers do not manage: they move sums about until some go through memory, and a chain of sums that does waits for a store and
 * a load at each link. So they are written out. */
#define BLOCK_ROWS 3u
#define BLOCK_STRIPS 4u

typedef struct block_sums {
    vec at[BLOCK_ROWS][BLOCK_STRIPS];
} block_sums;

/* Numbers `offset` bytes behind x[0 .. 2] + i */
#define BROADCAST(offset) \
    "vbroadcastss " offset "(%[x0],%[i],4), %%ymm12\n\t" \
    "vbroadcastss " offset "(%[x1],%[i],4), %%ymm13\n\t" \
    "vbroadcastss " offset "(%[x2],%[i],4), %%ymm14\n\t"
/* load: puts a strip into ymm15 */
#define ADD_STRIP(load, sum0, sum1, sum2) \
    load "vfmadd231ps %%ymm15, %%ymm12, " sum0 "\n\t" \
         "vfmadd231ps %%ymm15, %%ymm13, " sum1 "\n\t" \
         "vfmadd231ps %%ymm15, %%ymm14, " sum2 "\n\t"
#define ADD_STRIPS(load) \
    ADD_STRIP(load("(%[line])"), "%0", "%4", "%8") ADD_STRIP(load("32(%[line])"), "%1", "%5", "%9") \
    ADD_STRIP(load("64(%[line])"), "%2", "%6", "%10") ADD_STRIP(load("96(%[line])"), "%3", "%7", "%11")
#define LOAD_F32(at) "vmovups " at ", %%ymm15\n\t"
#define LOAD_LOW(at) "vmovdqu " at ", %%ymm15\n\tvpslld $16, %%ymm15, %%ymm15\n\t"
#define LOAD_HIGH(at) "vmovdqu " at ", %%ymm15\n\tvpand %[mask], %%ymm15, %%ymm15\n\t"
#define SUMS_OF(s) \
    "+x"(s->at[0][0]), "+x"(s->at[0][1]), "+x"(s->at[0][2]), "+x"(s->at[0][3]), "+x"(s->at[1][0]), "+x"(s->at[1][1]), \
    "+x"(s->at[1][2]), "+x"(s->at[1][3]), "+x"(s->at[2][0]), "+x"(s->at[2][1]), "+x"(s->at[2][2]), "+x"(s->at[2][3])
#define SCRATCHED "ymm12", "ymm13", "ymm14", "ymm15", "memory"

/* s[r] += x[r][i] * line[0 .. 31] */
static inline __attribute__((always_inline)) void block_add_f32(block_sums *s, const uint8_t *line, const float *const *x, size_t i)
{
    __asm__ volatile(BROADCAST("") ADD_STRIPS(LOAD_F32)
                     : SUMS_OF(s) : [line] "r"(line), [x0] "r"(x[0]), [x1] "r"(x[1]), [x2] "r"(x[2]), [i] "r"(i) : SCRATCHED);
}

/* s[r] += x[r][i] * low halves, then x[r][i + 1] * high halves, of 32 pairs of bf16 */
static inline __attribute__((always_inline)) void block_add_bf16(block_sums *s, const uint8_t *line, const float *const *x, size_t i)
{
    static const uint32_t upper[WIDTH] __attribute__((aligned(32))) = {
        0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
    };
    __asm__ volatile(BROADCAST("") ADD_STRIPS(LOAD_LOW)
                     BROADCAST("4") ADD_STRIPS(LOAD_HIGH)
                     : SUMS_OF(s) : [line] "r"(line), [x0] "r"(x[0]), [x1] "r"(x[1]), [x2] "r"(x[2]), [i] "r"(i),
                       [mask] "m"(upper) : SCRATCHED);
}
