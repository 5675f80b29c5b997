/* Matrix products on Intel's matrix unit (AMX), which multiplies bf16 numbers and sums them in fp32.
 *
 * No activation and no weight is rounded to bf16: each is the sum of two bf16 numbers, high and low, that have its first
 * 16 bits or more, and three of the four products are taken. What is left out is below 2^-16 of a product, less than what
 * rounding weights to fp16 costs, and the unit is still several times faster than fp32 vectors.
 */
#define _GNU_SOURCE
#include "linear.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && LANES == 16 && defined(__linux__)

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROWS_OF_TASK 256
#define TILE 16 /* rows of a tile, and fp32 columns */

typedef uint16_t bf16;

/* Weights of a panel in the unit's order: of a group, pairs of inputs by outputs, for each half of the panel. */
struct tiles {
    bf16 high[PANEL / TILE][GROUP / 2][2 * TILE];
    bf16 low[PANEL / TILE][GROUP / 2][2 * TILE];
};

static int amx_usable(void) {
    /* The system gives the unit's large registers to processes that ask for them. */
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, UNKNOWN = 0, YES = 1, NO = 2 };
    static int answer = UNKNOWN;
    if (answer == UNKNOWN) answer = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? NO : YES;
    return answer == YES;
}

/* Compilers' own functions for tiles do not tell the optimiser which memory they read and write. */
#define TILE_LOAD(t, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, to, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_PRODUCT(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::: "memory")

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Tiles 0 and 1: sums of the first rows with both halves of the panel, 2 and 3 those of the other rows; 4 and 5: x; 6 and
 * 7: weights. */
static void configure(int first_rows, int other_rows) {
    struct tile_config config = {.palette = 1};
    int rows[8] = {first_rows, first_rows, other_rows, other_rows, first_rows, other_rows ? other_rows : first_rows, TILE, TILE};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 4 * TILE;
        config.rows[t] = rows[t] ? rows[t] : 1;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

/* ---- Splitting ------------------------------------------------------------------------------------------------- */

/* Two vectors of numbers as pairs of bf16 (first: the lower half of each lane), cut off, and what is left of them. */
INLINE __m512i cut(vec *first, vec *second) {
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    __m512i a = _mm512_and_si512((__m512i)*first, upper), b = _mm512_and_si512((__m512i)*second, upper);
    *first -= (vec)a;
    *second -= (vec)b;
    return _mm512_or_si512(_mm512_srli_epi32(a, 16), b);
}

struct product {
    const struct linear *linear;
    const float *x;
    float *y;
    int rows, add;
    bf16 *high, *low; /* x: [rows, groups * GROUP] each */
    float *totals;    /* [rows, groups]: sums of x over each group */
    int groups;
};

static void split_rows(const void *args, int task, int thread) {
    (void)thread;
    const struct product *p = args;
    int inputs = p->linear->inputs;
    for (int row = task * TILE; row < p->rows && row < (task + 1) * TILE; row++) {
        const float *x = &p->x[(int64_t)row * inputs];
        int64_t to = (int64_t)row * p->groups * GROUP;
        for (int k = 0; k < p->groups * GROUP; k += 16, to += 16) {
            __m512 whole = _mm512_maskz_loadu_ps(inputs - k >= 16 ? 0xFFFF : inputs > k ? (1 << (inputs - k)) - 1 : 0, &x[k]);
            __m512i upper = _mm512_and_si512((__m512i)whole, _mm512_set1_epi32((int)0xFFFF0000));
            __m512 rest = whole - (__m512)upper;
            _mm256_storeu_si256((__m256i *)&p->high[to], _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper, 16)));
            _mm256_storeu_si256((__m256i *)&p->low[to], _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rest, 16)));
            float *total = &p->totals[row * p->groups + k / GROUP];
            *total = _mm512_reduce_add_ps(whole) + (k % GROUP ? *total : 0);
        }
    }
}

INLINE void expand_group(enum weight_format format, const struct linear *linear, int panel, int g, struct tiles *to) {
    const void *group = group_of(linear, panel, g);
    prefetch_group(format, group);
    struct scales scales = scales_of(format, group);
    for (int chunk = 0; chunk < GROUP / CHUNK; chunk++)
#pragma GCC unroll 4
        for (int i = 0; i < CHUNK; i += 2) {
            vec even[VECS], odd[VECS];
            weights(format, group, chunk, i, scales, even);
            weights(format, group, chunk, i + 1, scales, odd);
            for (int v = 0; v < VECS; v++) {
                int pair = (chunk * CHUNK + i) / 2;
                _mm512_store_si512(to->high[v][pair], cut(&even[v], &odd[v]));
                _mm512_store_si512(to->low[v][pair], cut(&even[v], &odd[v]));
            }
        }
}

/* Numbers of four or eight bits are bf16 numbers as they are. Returns them in the unit's order, without their scale. */
INLINE void order_group(enum weight_format format, const void *group, bf16 to[PANEL / TILE][GROUP / 2][2 * TILE]) {
    prefetch_group(format, group);
    const __m512i numbers = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
    for (int chunk = 0; chunk < GROUP / CHUNK; chunk++)
        for (int v = 0; v < VECS; v++)
            for (int pair = 0; pair < CHUNK / 2; pair++) {
                __m512i ordered;
                if (format == W4) { /* a permutation looks at the lowest five bits of 16; the fifth makes no difference */
                    __m512i packed = _mm512_loadu_si512(&((const struct group_w4 *)group)->q[chunk][v * LANES]);
                    ordered = _mm512_permutexvar_epi16(_mm512_srli_epi32(packed, 4 * pair), numbers);
                } else {
                    const struct group_w8 *w8 = group;
                    int k = chunk * CHUNK + 2 * pair;
                    vec even = floats_of_bytes(&w8->q[k][v * LANES]), odd = floats_of_bytes(&w8->q[k + 1][v * LANES]);
                    ordered = _mm512_or_si512(_mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
                }
                _mm512_store_si512(to[v][chunk * CHUNK / 2 + pair], ordered);
            }
}

/* ---- Products -------------------------------------------------------------------------------------------------- */

static void begin_sums(float (*sums)[PANEL], int more) {
    if (more) {
        TILE_LOAD(0, sums[0], sizeof *sums);
        TILE_LOAD(1, sums[0] + TILE, sizeof *sums);
        TILE_LOAD(2, sums[TILE], sizeof *sums);
        TILE_LOAD(3, sums[TILE] + TILE, sizeof *sums);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
}

static void end_sums(float (*sums)[PANEL]) {
    TILE_STORE(0, sums[0], sizeof *sums);
    TILE_STORE(1, sums[0] + TILE, sizeof *sums);
    TILE_STORE(2, sums[TILE], sizeof *sums);
    TILE_STORE(3, sums[TILE] + TILE, sizeof *sums);
}

/* Adds the products of a group with rows `row` to `row` + TILE - 1, and with as many after them if `both`. */
INLINE void multiply_group(const struct product *p, int row, int both, int g, const struct tiles *w) {
    int64_t width = (int64_t)p->groups * GROUP, first = row * width + g * GROUP, other = first + TILE * width;
    TILE_LOAD(4, &p->high[first], 2 * width);
    TILE_LOAD(6, w->low[0], 64);
    TILE_PRODUCT(0, 4, 6);
    TILE_LOAD(7, w->low[1], 64);
    TILE_PRODUCT(1, 4, 7);
    if (both) {
        TILE_LOAD(5, &p->high[other], 2 * width);
        TILE_PRODUCT(2, 5, 6);
        TILE_PRODUCT(3, 5, 7);
    }
    TILE_LOAD(6, w->high[0], 64);
    TILE_PRODUCT(0, 4, 6);
    TILE_LOAD(7, w->high[1], 64);
    TILE_PRODUCT(1, 4, 7);
    TILE_LOAD(4, &p->low[first], 2 * width);
    if (both) {
        TILE_PRODUCT(2, 5, 6);
        TILE_PRODUCT(3, 5, 7);
        TILE_LOAD(5, &p->low[other], 2 * width);
    }
    TILE_PRODUCT(0, 4, 6);
    TILE_PRODUCT(1, 4, 7);
    if (both) {
        TILE_PRODUCT(2, 5, 6);
        TILE_PRODUCT(3, 5, 7);
    }
}

static void finish(const struct product *p, int row, int rows, int panel, const float (*sums)[PANEL]) {
    int outputs = p->linear->outputs, first = panel * PANEL;
    int width = outputs - first < PANEL ? outputs - first : PANEL;
    const float *bias = p->linear->bias;
    for (int r = 0; r < rows; r++) {
        float *y = &p->y[(int64_t)(row + r) * outputs + first];
        for (int i = 0; i < width; i++)
            y[i] = sums[r][i] + (bias ? bias[first + i] : 0) + (p->add ? y[i] : 0);
    }
}

typedef float panel_sums[ROWS_OF_TASK][PANEL];

/* Adds a group's products, scaled, to the sums of `rows` rows. */
INLINE void add_scaled(enum weight_format format, const struct product *p, int panel, int g, int first, int rows,
                       const float (*part)[PANEL], panel_sums sums) {
    struct scales scales = scales_of(format, group_of(p->linear, panel, g));
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) {
            vec sum = load(&sums[r][v * LANES]) + scales.d[v] * load(&part[r][v * LANES]);
            if (format == W4) sum += scales.m[v] * all(p->totals[(first + r) * p->groups + g]);
            store(&sums[r][v * LANES], sum);
        }
}

/* Quantised weights with few rows: a group's products are scaled, not its weights. The unit works on one group while the
 * one before it is scaled and the one after it put in order. */
INLINE void few_rows_of_quants(enum weight_format format, const struct product *p, int panel, int first, int rows, panel_sums sums) {
    bf16 w[2][PANEL / TILE][GROUP / 2][2 * TILE] __attribute__((aligned(64)));
    float parts[2][2 * TILE][PANEL] __attribute__((aligned(64)));
    int64_t width = (int64_t)p->groups * GROUP;
    configure(min(TILE, rows), rows - min(TILE, rows));
    memset(sums, 0, sizeof *sums * rows);
    order_group(format, group_of(p->linear, panel, 0), w[0]);
    for (int g = 0; g < p->groups; g++) {
        const bf16 *high = &p->high[first * width + g * GROUP], *low = &p->low[first * width + g * GROUP];
        begin_sums(parts[0], 0);
        TILE_LOAD(6, w[g % 2][0], 64);
        TILE_LOAD(7, w[g % 2][1], 64);
        TILE_LOAD(4, high, 2 * width);
        TILE_PRODUCT(0, 4, 6);
        TILE_PRODUCT(1, 4, 7);
        TILE_LOAD(5, low, 2 * width);
        TILE_PRODUCT(0, 5, 6);
        TILE_PRODUCT(1, 5, 7);
        if (g + 1 < p->groups) order_group(format, group_of(p->linear, panel, g + 1), w[(g + 1) % 2]);
        if (g > 0) add_scaled(format, p, panel, g - 1, first, rows, (const float(*)[PANEL])parts[(g - 1) % 2], sums);
        TILE_STORE(0, parts[g % 2][0], sizeof *sums);
        TILE_STORE(1, parts[g % 2][0] + TILE, sizeof *sums);
    }
    add_scaled(format, p, panel, p->groups - 1, first, rows, (const float(*)[PANEL])parts[(p->groups - 1) % 2], sums);
}

/* Each group is multiplied as soon as it is expanded: the unit works on it while the next one is expanded. */
INLINE void few_rows(enum weight_format format, const struct product *p, int panel, int first, int rows, panel_sums sums) {
    struct tiles w[2] __attribute__((aligned(64)));
    configure(min(TILE, rows), rows - min(TILE, rows));
    begin_sums(sums, 0);
    expand_group(format, p->linear, panel, 0, &w[0]);
    for (int g = 0; g < p->groups; g++) {
        if (g + 1 < p->groups) expand_group(format, p->linear, panel, g + 1, &w[(g + 1) % 2]);
        multiply_group(p, first, rows > TILE, g, &w[g % 2]);
    }
    end_sums(sums);
}

/* A panel is expanded once for all rows. */
INLINE void many_rows(enum weight_format format, const struct product *p, int panel, int first, int rows, panel_sums sums) {
    static _Thread_local struct tiles w[DEPTH / GROUP] __attribute__((aligned(64)));
    for (int from = 0; from < p->groups; from += DEPTH / GROUP) {
        int groups = min(DEPTH / GROUP, p->groups - from), configured = 0;
        for (int g = 0; g < groups; g++) expand_group(format, p->linear, panel, from + g, &w[g]);
        for (int r = 0; r < rows; r += 2 * TILE) {
            int count = min(2 * TILE, rows - r);
            if (count != configured) configure(min(TILE, count), count - min(TILE, count));
            configured = count;
            begin_sums(&sums[r], from > 0);
            for (int g = 0; g < groups; g++) multiply_group(p, first + r, count > TILE, from + g, &w[g]);
            end_sums(&sums[r]);
        }
    }
}

INLINE void panel_of_format(enum weight_format format, const struct product *p, int panel, int first, int rows, panel_sums sums) {
    if (rows <= TILE && (format == W4 || format == W8))
        few_rows_of_quants(format, p, panel, first, rows, sums);
    else if (rows <= 2 * TILE)
        few_rows(format, p, panel, first, rows, sums);
    else
        many_rows(format, p, panel, first, rows, sums);
}

static void one_panel(const void *args, int task, int thread) {
    (void)thread;
    static _Thread_local panel_sums sums __attribute__((aligned(64)));
    const struct product *p = args;
    int row_tasks = ceil_div(p->rows, ROWS_OF_TASK);
    int panel = task / row_tasks, first = task % row_tasks * ROWS_OF_TASK;
    int rows = min(ROWS_OF_TASK, p->rows - first);
    switch (p->linear->format) {
    case W4: panel_of_format(W4, p, panel, first, rows, sums); break;
    case W8: panel_of_format(W8, p, panel, first, rows, sums); break;
    case W16: panel_of_format(W16, p, panel, first, rows, sums); break;
    case W32: panel_of_format(W32, p, panel, first, rows, sums); break;
    }
    __asm__ volatile("tilerelease" ::: "memory");
    finish(p, first, rows, panel, (const float(*)[PANEL])sums);
}

int linear_amx(struct pool *pool, const struct linear *linear, const float *x, int rows, float *y, int add) {
    if (!amx_usable()) return 0;
    int groups = groups_of(linear);
    int64_t elements = (int64_t)rows * groups * GROUP;
    bf16 *split = pool_scratch(pool, 2 * sizeof(bf16) * elements + sizeof(float) * rows * groups);
    if (!split) return 0;
    struct product p = {linear, x, y, rows, add, split, split + elements, (float *)(split + 2 * elements), groups};
    parallel_for(pool, ceil_div(rows, TILE), split_rows, &p);
    parallel_for(pool, ceil_div(linear->outputs, PANEL) * ceil_div(rows, ROWS_OF_TASK), one_panel, &p);
    return 1;
}

#else

int linear_amx(struct pool *pool, const struct linear *linear, const float *x, int rows, float *y, int add) {
    (void)pool, (void)linear, (void)x, (void)rows, (void)y, (void)add;
    return 0;
}

#endif
