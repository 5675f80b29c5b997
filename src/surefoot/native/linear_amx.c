/* Matrix products on Intel's matrix unit (AMX), which multiplies bf16 numbers and sums them in fp32.
 *
 * Nothing is rounded to bf16. An activation is the sum of three bf16 numbers, of 8 bits each; a weight of four or eight bits
 * is one, before it is scaled, and one of fp16 the sum of two. So the products are those of fp32 numbers, and the unit is
 * still several times faster than fp32 vectors.
 */
#define _GNU_SOURCE
#include "linear.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && LANES == 16 && defined(__linux__)

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROWS_OF_TASK 128
#define PANELS_OF_TASK 6
#define GROUPS_AT_ONCE 4
#define TILE 16 /* rows of a tile, and fp32 columns */

typedef uint16_t bf16;

#define TERMS 3 /* of an activation */

/* A group of a panel in the unit's order: for each half of the panel, pairs of inputs by outputs. */
typedef bf16 ordered[PANEL / TILE][GROUP / 2][2 * TILE];

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

/* Tiles 0 and 1: sums of the first rows with both halves of the panel, 2 and 3: those of the other rows; 4 and 5: x of the
 * first and of the other rows; 6 and 7: weights. */
static void configure(int first_rows, int other_rows) {
    struct tile_config config = {.palette = 1};
    int rows[8] = {first_rows, first_rows, other_rows, other_rows, first_rows, other_rows, TILE, TILE};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 4 * TILE;
        config.rows[t] = rows[t] ? rows[t] : 1;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

struct range {
    int first, count;
};

/* ---- Order and terms -------------------------------------------------------------------------------------------- */

struct product {
    const struct linear *linear;
    const float *x;
    float *y;
    int rows, add, groups, panels_of_task;
    bf16 *terms[TERMS]; /* x: [rows / TILE, groups, TILE, GROUP] each: tiles, one after the other */
    float *totals;      /* [rows, groups]: sums of x over each group */
};

/* The bits of a bf16 number in the upper half of each lane; what they leave of the number stays in `x`. */
INLINE __m512i cut(vec *x) {
    __m512i upper = _mm512_and_si512((__m512i)*x, _mm512_set1_epi32((int)0xFFFF0000));
    *x -= (vec)upper;
    return upper;
}

/* Pairs of bf16 numbers from the upper halves of lanes: the first one in the lower half. */
INLINE __m512i pairs(__m512i first, __m512i second) { return _mm512_or_si512(_mm512_srli_epi32(first, 16), second); }

INLINE bf16 *tile_of(const struct product *p, int term, int row, int g) {
    return &p->terms[term][(((int64_t)(row / TILE) * p->groups + g) * TILE + row % TILE) * GROUP];
}

static void split_rows(const void *args, int task, int thread) {
    (void)thread;
    const struct product *p = args;
    int inputs = p->linear->inputs;
    for (int row = task * TILE; row < min(p->rows, (task + 1) * TILE); row++) {
        const float *x = &p->x[(int64_t)row * inputs];
        bf16 *const to[TERMS] = {tile_of(p, 0, row, 0), tile_of(p, 1, row, 0), tile_of(p, 2, row, 0)};
        float *totals = &p->totals[(int64_t)row * p->groups];
        for (int k = 0; k < p->groups * GROUP; k += LANES) {
            int left = max(0, min(LANES, inputs - k));
            vec rest = (vec)_mm512_maskz_loadu_ps((1u << left) - 1, &x[k]);
            totals[k / GROUP] = sum_of(rest) + (k % GROUP ? totals[k / GROUP] : 0);
            for (int term = 0; term < TERMS; term++)
                _mm256_storeu_si256((__m256i *)&to[term][k / GROUP * TILE * GROUP + k % GROUP],
                                    _mm512_cvtepi32_epi16(_mm512_srli_epi32(cut(&rest), 16)));
        }
    }
}

/* Numbers of four or eight bits, without their scale. */
INLINE void order_quants(enum weight_format format, const void *group, ordered to) {
    prefetch_group(format, group);
    const __m512i numbers = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
    for (int chunk = 0; chunk < GROUP / CHUNK; chunk++)
        for (int v = 0; v < VECS; v++)
            for (int pair = 0; pair < CHUNK / 2; pair++) {
                __m512i two;
                if (format == W4) { /* a permutation looks at the lowest five bits of 16; the fifth makes no difference */
                    __m512i packed = _mm512_loadu_si512(&((const struct group_w4 *)group)->q[chunk][v * LANES]);
                    two = _mm512_permutexvar_epi16(_mm512_srli_epi32(packed, 4 * pair), numbers);
                } else {
                    const struct group_w8 *w8 = group;
                    int k = chunk * CHUNK + 2 * pair;
                    two = pairs((__m512i)floats_of_bytes(&w8->q[k][v * LANES]), (__m512i)floats_of_bytes(&w8->q[k + 1][v * LANES]));
                }
                _mm512_store_si512(to[v][chunk * CHUNK / 2 + pair], two);
            }
}

struct high_and_low {
    ordered high, low;
};

static void order_halves(const struct group_w16 *group, struct high_and_low *to) {
    prefetch_group(W16, group);
    for (int k = 0; k < GROUP; k += 2)
        for (int v = 0; v < VECS; v++) {
            vec even = floats_of_halves(&group->w[k][v * LANES]), odd = floats_of_halves(&group->w[k + 1][v * LANES]);
            _mm512_store_si512(to->high[v][k / 2], pairs(cut(&even), cut(&odd)));
            _mm512_store_si512(to->low[v][k / 2], pairs((__m512i)even, (__m512i)odd));
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

static void end_sums(float (*sums)[PANEL], int both) {
    TILE_STORE(0, sums[0], sizeof *sums);
    TILE_STORE(1, sums[0] + TILE, sizeof *sums);
    if (both) {
        TILE_STORE(2, sums[TILE], sizeof *sums);
        TILE_STORE(3, sums[TILE] + TILE, sizeof *sums);
    }
}

/* TILE rows of x and as many after them: tiles of each term from a group on. */
struct x_tiles {
    const bf16 *of_term[TERMS];
    int64_t to_other; /* elements from the first rows' tile to that of the others */
};

static struct x_tiles x_tiles_at(const struct product *p, int row, int g) {
    struct x_tiles x = {.to_other = (int64_t)p->groups * TILE * GROUP};
    for (int term = 0; term < TERMS; term++) x.of_term[term] = tile_of(p, term, row, g);
    return x;
}

/* Adds the products of the first `terms` terms of x with group g after those of `x`, for both blocks of rows if `both`. */
INLINE void multiply(int terms, const struct x_tiles *x, int both, int g, ordered w) {
    TILE_LOAD(6, w[0], 64);
    TILE_LOAD(7, w[1], 64);
#pragma GCC unroll 3
    for (int term = 0; term < terms; term++) {
        const bf16 *first = x->of_term[term] + g * TILE * GROUP;
        TILE_LOAD(4, first, 64);
        TILE_PRODUCT(0, 4, 6);
        TILE_PRODUCT(1, 4, 7);
        if (both) {
            TILE_LOAD(5, first + x->to_other, 64);
            TILE_PRODUCT(2, 5, 6);
            TILE_PRODUCT(3, 5, 7);
        }
    }
}

/* Adds a group's products, scaled, to the sums of `rows` rows. totals: of the group, rows `stride` apart. */
INLINE void add_scaled(enum weight_format format, const void *group, const float *totals, int stride, int rows,
                       const float (*part)[PANEL], float (*sums)[PANEL]) {
    struct scales scales = scales_of(format, group);
    for (int r = 0; r < rows; r++, totals += stride)
        for (int v = 0; v < VECS; v++) {
            vec sum = load(&sums[r][v * LANES]) + scales.d[v] * load(&part[r][v * LANES]);
            if (format == W4) sum += scales.m[v] * all(*totals);
            store(&sums[r][v * LANES], sum);
        }
}

/* Quantised weights: a group's products are scaled, not its weights. While the unit works on one group, the one before it
 * is scaled and, if `order`, the one after it is put in order. w: all groups in order, or two places for `order`. */
INLINE void rows_of_quants(enum weight_format format, const struct product *p, int panel, int row, int rows, int from,
                           int groups, int order, ordered *w, float (*sums)[PANEL]) {
    float parts[2][2 * TILE][PANEL] __attribute__((aligned(64)));
    struct x_tiles x = x_tiles_at(p, row, from);
    const float *totals = &p->totals[(int64_t)row * p->groups + from];
    int stride = p->groups;
    const char *group = group_of(p->linear, panel, from);
    for (int g = 0; g < groups; g++, group += group_bytes(format)) {
        begin_sums(parts[0], 0);
        multiply(TERMS, &x, rows > TILE, g, w[order ? g % 2 : g]);
        if (order && g + 1 < groups) order_quants(format, group + group_bytes(format), w[(g + 1) % 2]);
        if (g > 0)
            add_scaled(format, group - group_bytes(format), &totals[g - 1], stride, rows, (const float(*)[PANEL])parts[(g - 1) % 2], sums);
        end_sums(parts[g % 2], rows > TILE);
    }
    add_scaled(format, group - group_bytes(format), &totals[groups - 1], stride, rows, (const float(*)[PANEL])parts[(groups - 1) % 2], sums);
}

static void rows_of_halves(const struct product *p, int row, int rows, int from, int groups, struct high_and_low *w,
                           float (*sums)[PANEL]) {
    struct x_tiles x = x_tiles_at(p, row, from);
    begin_sums(sums, from > 0);
    for (int g = 0; g < groups; g++) {
        multiply(TERMS, &x, rows > TILE, g, w[g].high);
        multiply(TERMS - 1, &x, rows > TILE, g, w[g].low); /* a third term is below fp32's last bit */
    }
    end_sums(sums, rows > TILE);
}

/* Some rows by some panels. Both are larger than the core's first cache, so the inputs are taken in blocks: those of 2 *
 * TILE rows stay in it while the panels pass by. */
INLINE void block(enum weight_format format, const struct product *p, struct range panels, struct range rows,
                  float (*sums)[ROWS_OF_TASK][PANEL]) {
    static _Thread_local ordered quants[PANELS_OF_TASK][DEPTH / GROUP] __attribute__((aligned(64)));
    static _Thread_local struct high_and_low halves[PANELS_OF_TASK][DEPTH / GROUP] __attribute__((aligned(64)));
    int few = rows.count <= 2 * TILE, configured = 0;
    for (int from = 0; from < p->groups; from += DEPTH / GROUP) {
        int groups = min(DEPTH / GROUP, p->groups - from);
        int at_once = few ? groups : GROUPS_AT_ONCE;
        for (int i = 0; i < panels.count; i++)
            for (int g = 0; g < groups; g++)
                if (format == W16)
                    order_halves(group_of(p->linear, panels.first + i, from + g), &halves[i][g]);
                else if (!few || g == 0)
                    order_quants(format, group_of(p->linear, panels.first + i, from + g), quants[i][g]);
        for (int g = 0; g < groups; g += at_once)
            for (int r = 0; r < rows.count; r += 2 * TILE) {
                int count = min(2 * TILE, rows.count - r), depth = min(at_once, groups - g);
                if (count != configured) configure(min(TILE, count), count - min(TILE, count));
                configured = count;
                for (int i = 0; i < panels.count; i++)
                    if (format == W16)
                        rows_of_halves(p, rows.first + r, count, from + g, depth, &halves[i][g], &sums[i][r]);
                    else
                        rows_of_quants(format, p, panels.first + i, rows.first + r, count, from + g, depth, few, &quants[i][g], &sums[i][r]);
            }
    }
}

static void finish(const struct product *p, int row, int rows, int panel, float (*sums)[PANEL]) {
    int outputs = p->linear->outputs, first = panel * PANEL;
    int width = min(PANEL, outputs - first);
    const float *bias = p->linear->bias;
    for (int r = 0; r < rows; r++) {
        float *y = &p->y[(int64_t)(row + r) * outputs + first];
        for (int i = 0; i < width; i++) y[i] = sums[r][i] + (bias ? bias[first + i] : 0) + (p->add ? y[i] : 0);
    }
}

static void some_panels(const void *args, int task, int thread) {
    (void)thread;
    static _Thread_local float sums[PANELS_OF_TASK][ROWS_OF_TASK][PANEL] __attribute__((aligned(64)));
    const struct product *p = args;
    int row_tasks = ceil_div(p->rows, ROWS_OF_TASK), all_panels = ceil_div(p->linear->outputs, PANEL);
    struct range panels = {task / row_tasks * p->panels_of_task, p->panels_of_task};
    struct range rows = {task % row_tasks * ROWS_OF_TASK, ROWS_OF_TASK};
    panels.count = min(panels.count, all_panels - panels.first);
    rows.count = min(rows.count, p->rows - rows.first);
    memset(sums, 0, sizeof *sums * panels.count);
    switch (p->linear->format) {
    case W4: block(W4, p, panels, rows, sums); break;
    case W8: block(W8, p, panels, rows, sums); break;
    case W16: block(W16, p, panels, rows, sums); break;
    }
    __asm__ volatile("tilerelease" ::: "memory");
    for (int i = 0; i < panels.count; i++) finish(p, rows.first, rows.count, panels.first + i, sums[i]);
}

int linear_amx(struct pool *pool, const struct linear *linear, const float *x, int rows, float *y, int add) {
    if (linear->format == W32 || !amx_usable()) return 0;
    int groups = groups_of(linear);
    int64_t elements = (int64_t)ceil_div(rows, TILE) * TILE * groups * GROUP;
    bf16 *terms = pool_scratch(pool, TERMS * sizeof(bf16) * elements + sizeof(float) * rows * groups);
    if (!terms) return 0;
    int panels_of_task = rows > 2 * TILE ? PANELS_OF_TASK : 1;
    struct product p = {linear, x, y, rows, add, groups, panels_of_task, {terms, terms + elements, terms + 2 * elements}, NULL};
    p.totals = (float *)(terms + TERMS * elements);
    parallel_for(pool, ceil_div(rows, TILE), split_rows, &p);
    parallel_for(pool, ceil_div(ceil_div(linear->outputs, PANEL), panels_of_task) * ceil_div(rows, ROWS_OF_TASK), some_panels, &p);
    return 1;
}

#else

int linear_amx(struct pool *pool, const struct linear *linear, const float *x, int rows, float *y, int add) {
    (void)pool, (void)linear, (void)x, (void)rows, (void)y, (void)add;
    return 0;
}

#endif
