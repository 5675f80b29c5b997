/* Matrix products y = x W^T of fp32 activations with weights in the formats that checkpoints store.
 *
 * Weights are repacked once. A panel holds PANEL outputs; it is cut into groups of GROUP consecutive inputs, and within
 * a group the numbers of all outputs for one input lie side by side: a vector register holds so many outputs. With few
 * rows of x the weights are expanded in registers; with many, a panel is expanded once into a buffer that stays in the
 * core's cache and serves all rows.
 */
#include "linear.h"
#include "tile.h"

#include <stdlib.h>
#include <string.h>

#define FUSED_ROWS 4     /* up to so many rows of x weights are expanded in registers */
#define AMX_ROWS 5       /* from so many rows of x on the matrix unit is ahead */
#define ROWS_OF_TASK 96  /* rows of x that one task computes */
#define TASKS_OF_THREAD 4
#define MAX_GROUPS 4096 

struct product {
    const struct linear *linear;
    const float *x; /* [rows, inputs] */
    float *y;       /* [rows, outputs] */
    int rows, add;  /* add: to what y holds */
    int panels_of_task, rows_of_task;
    const float *totals; /* of few rows: [rows, groups], sums of x over each group */
};

/* Adds or writes `count` of the `width` sums of one row. */
INLINE void finish(const struct product *p, int row, int panel, const vec sums[VECS]) {
    int outputs = p->linear->outputs, first = panel * PANEL;
    float *y = &p->y[(int64_t)row * outputs + first];
    const float *bias = p->linear->bias;
    if (first + PANEL <= outputs) {
        for (int v = 0; v < VECS; v++) {
            vec sum = sums[v];
            if (bias) sum += load(&bias[first + v * LANES]);
            if (p->add) sum += load(&y[v * LANES]);
            store(&y[v * LANES], sum);
        }
    } else {
        for (int i = 0; first + i < outputs; i++)
            y[i] = sums[i / LANES][i % LANES] + (bias ? bias[first + i] : 0) + (p->add ? y[i] : 0);
    }
}

/* ---- Few rows -------------------------------------------------------------------------------------------------- */

/* The row's inputs of a group; in `padded`, with zeros after them, if the row ends within it. */
INLINE const float *group_of_row(const struct product *p, int row, int group, float padded[GROUP]) {
    int inputs = p->linear->inputs, left = inputs - group * GROUP;
    const float *x = &p->x[(int64_t)row * inputs + group * GROUP];
    if (left >= GROUP) return x;
    for (int k = 0; k < GROUP; k++) padded[k] = k < left ? x[k] : 0;
    return padded;
}

/* Rows first .. first + rows - 1 times a panel. A group's scale is applied to its sum. One row has twice the sums that
 * it needs, so that an addition does not wait for the one before it. */
INLINE void fused(enum weight_format format, int rows, const struct product *p, int first, int panel) {
    enum { CHAINS = 2 };
    int groups = groups_of(p->linear), chains = rows == 1 ? CHAINS : 1;
    vec sums[FUSED_ROWS][VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) sums[r][v] = all(0);
    for (int g = 0; g < groups; g++) {
        const void *group = group_of(p->linear, panel, g);
        prefetch_group(format, group);
        vec w[VECS], part[FUSED_ROWS * CHAINS][VECS];
        for (int r = 0; r < rows * chains; r++)
            for (int v = 0; v < VECS; v++) part[r][v] = all(0);
        const float *xs[FUSED_ROWS];
        float padded[FUSED_ROWS][GROUP];
        for (int r = 0; r < rows; r++) xs[r] = group_of_row(p, first + r, g, padded[r]);
        for (int chunk = 0; chunk < GROUP / CHUNK; chunk++)
#pragma GCC unroll 8
            for (int i = 0; i < CHUNK; i++) {
                quants(format, group, chunk, i, w);
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < VECS; v++)
                        part[r * chains + i % chains][v] += w[v] * all(xs[r][chunk * CHUNK + i]);
            }
        struct scales scales = scales_of(format, group);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECS; v++) {
                vec sum = chains == CHAINS ? part[r * chains][v] + part[r * chains + 1][v] : part[r][v];
                if (format == W4 || format == W8) sum *= scales.d[v];
                if (format == W4) sum += scales.m[v] * all(p->totals[(first + r) * groups + g]);
                sums[r][v] += sum;
            }
    }
    for (int r = 0; r < rows; r++) finish(p, first + r, panel, sums[r]);
}

INLINE void fused_panel(enum weight_format format, const struct product *p, int panel) {
    int first = 0;
    for (; first + FUSED_ROWS <= p->rows; first += FUSED_ROWS) fused(format, FUSED_ROWS, p, first, panel);
    switch (p->rows - first) {
    case 3: fused(format, 3, p, first, panel); break;
    case 2: fused(format, 2, p, first, panel); break;
    case 1: fused(format, 1, p, first, panel); break;
    }
}

/* ---- Many rows ------------------------------------------------------------------------------------------------- */

INLINE void expand(enum weight_format format, const struct linear *linear, int panel, int k0, int depth,
                   float (*to)[PANEL]) {
    for (int k = 0; k < depth; k += GROUP) {
        const void *group = group_of(linear, panel, (k0 + k) / GROUP);
        struct scales scales = scales_of(format, group);
        for (int chunk = 0; chunk < GROUP / CHUNK; chunk++)
#pragma GCC unroll 8
            for (int i = 0; i < CHUNK; i++) {
                vec w[VECS];
                weights(format, group, chunk, i, scales, w);
                for (int v = 0; v < VECS; v++) store(&to[k + chunk * CHUNK + i][v * LANES], w[v]);
            }
    }
}

INLINE void expanded_panel(enum weight_format format, const struct product *p, int panel, int first, int rows) {
    static _Thread_local float expanded[DEPTH][PANEL] __attribute__((aligned(64)));
    static _Thread_local float sums[ROWS_OF_TASK][PANEL] __attribute__((aligned(64)));
    int inputs = p->linear->inputs;
    for (int k0 = 0; k0 < inputs; k0 += DEPTH) {
        int depth = inputs - k0 < DEPTH ? inputs - k0 : DEPTH;
        expand(format, p->linear, panel, k0, depth, expanded);
        for (int r = 0; r < rows; r += TILE_ROWS) {
            int count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
            const float *x = &p->x[(int64_t)(first + r) * inputs + k0];
            multiply_tile(count, depth, expanded[0], PANEL, x, inputs, sums[r], PANEL, k0 > 0);
        }
    }
    for (int r = 0; r < rows; r++) {
        vec row[VECS];
        for (int v = 0; v < VECS; v++) row[v] = load(&sums[r][v * LANES]);
        finish(p, first + r, panel, row);
    }
}

static void sum_groups(const float *x, int count, float *totals) {
    for (int g = 0; g < count; g++) {
        vec sum = load(&x[g * GROUP]);
        for (int k = LANES; k < GROUP; k += LANES) sum += load(&x[g * GROUP + k]);
        totals[g] = sum_of(sum);
    }
}

/* ---- Tasks ----------------------------------------------------------------------------------------------------- */

INLINE void panels_of_format(enum weight_format format, const struct product *p, int task) {
    int panels = ceil_div(p->linear->outputs, PANEL);
    int row_tasks = ceil_div(p->rows, p->rows_of_task);
    int first_panel = task / row_tasks * p->panels_of_task;
    int first_row = task % row_tasks * p->rows_of_task;
    int rows = min(p->rows_of_task, p->rows - first_row);
    for (int panel = first_panel; panel < min(panels, first_panel + p->panels_of_task); panel++) {
        if (p->rows <= FUSED_ROWS)
            fused_panel(format, p, panel);
        else
            expanded_panel(format, p, panel, first_row, rows);
    }
}

static void some_panels(const void *args, int task, int thread) {
    (void)thread;
    const struct product *p = args;
    switch (p->linear->format) {
    case W4: panels_of_format(W4, p, task); break;
    case W8: panels_of_format(W8, p, task); break;
    case W16: panels_of_format(W16, p, task); break;
    case W32: panels_of_format(W32, p, task); break;
    }
}

void linear(struct pool *pool, const struct linear *linear, const float *x, int32_t rows, float *y, int32_t add) {
    if (rows >= AMX_ROWS && linear_amx(pool, linear, x, rows, y, add)) return;
    int panels = ceil_div(linear->outputs, PANEL), tasks = TASKS_OF_THREAD * pool_threads(pool);
    struct product p = {linear, x, y, rows, add, ceil_div(panels, tasks), ROWS_OF_TASK, NULL};
    float totals[FUSED_ROWS * MAX_GROUPS];
    if (rows <= FUSED_ROWS && linear->format == W4) {
        sum_groups(x, rows * groups_of(linear), totals);
        p.totals = totals;
    }
    parallel_for(pool, ceil_div(panels, p.panels_of_task) * ceil_div(rows, p.rows_of_task), some_panels, &p);
}

/* ---- Packing --------------------------------------------------------------------------------------------------- */

int64_t linear_bytes(const struct linear *linear) {
    return (int64_t)ceil_div(linear->outputs, PANEL) * groups_of(linear) * group_bytes(linear->format);
}

void linear_pack(const struct linear *linear, const void *rows, int64_t first, int64_t count) {
    int inputs = linear->inputs;
    for (int64_t row = first; row < first + count; row++) {
        int panel = row / PANEL, lane = row % PANEL;
        for (int g = 0; g < groups_of(linear); g++) {
            void *group = (void *)group_of(linear, panel, g);
            int64_t block = (row - first) * groups_of(linear) + g;
            int64_t element = (row - first) * inputs + g * GROUP;
            int inside = min(GROUP, inputs - g * GROUP);
            switch (linear->format) {
            case W4: { /* d, m, 16 bytes: element i in the low half of byte i, element i + 16 in its high half */
                struct group_w4 *to = group;
                const uint8_t *from = (const uint8_t *)rows + block * 20;
                memcpy(&to->d[lane], from, 2);
                memcpy(&to->m[lane], from + 2, 2);
                for (int chunk = 0; chunk < GROUP / 8; chunk++) {
                    uint32_t packed = 0;
                    for (int k = 0; k < 8; k++) {
                        int i = 8 * chunk + k;
                        uint32_t q = i < 16 ? from[4 + i] & 15 : from[4 + i - 16] >> 4;
                        packed |= q << 4 * (k / 2 + k % 2 * 4);
                    }
                    to->q[chunk][lane] = packed;
                }
                break;
            }
            case W8: { /* d, 32 bytes */
                struct group_w8 *to = group;
                const uint8_t *from = (const uint8_t *)rows + block * 34;
                memcpy(&to->d[lane], from, 2);
                for (int k = 0; k < GROUP; k++) to->q[k][lane] = (int8_t)from[2 + k];
                break;
            }
            case W16:
                for (int k = 0; k < inside; k++) ((struct group_w16 *)group)->w[k][lane] = ((const half *)rows)[element + k];
                break;
            case W32:
                for (int k = 0; k < inside; k++) ((struct group_w32 *)group)->w[k][lane] = ((const float *)rows)[element + k];
                break;
            }
        }
    }
}

/* One row's number for input k of a group, without its scale. */
INLINE float quant_at(enum weight_format format, const void *group, int k, int lane) {
    switch (format) {
    case W4: {
        uint32_t packed = ((const struct group_w4 *)group)->q[k / CHUNK][lane];
        return packed >> 4 * (k % CHUNK / 2 + k % 2 * 4) & 15;
    }
    case W8: return ((const struct group_w8 *)group)->q[k][lane];
    case W16: return float_of(((const struct group_w16 *)group)->w[k][lane]);
    case W32: return ((const struct group_w32 *)group)->w[k][lane];
    }
    return 0;
}

void linear_row(const struct linear *linear, int64_t row, float *to) {
    int lane = row % PANEL;
    for (int g = 0; g < groups_of(linear); g++) {
        const void *group = group_of(linear, row / PANEL, g);
        float d = 1, m = 0;
        if (linear->format == W4) m = float_of(((const struct group_w4 *)group)->m[lane]);
        if (linear->format == W4) d = float_of(((const struct group_w4 *)group)->d[lane]);
        if (linear->format == W8) d = float_of(((const struct group_w8 *)group)->d[lane]);
        for (int k = 0; k < min(GROUP, linear->inputs - g * GROUP); k++)
            to[g * GROUP + k] = quant_at(linear->format, group, k, lane) * d + m;
    }
}
