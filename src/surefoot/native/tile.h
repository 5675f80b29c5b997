/* The inner product of all products in fp32: sums of TILE_ROWS rows by 2 vectors stay in registers. */
#ifndef SUREFOOT_TILE_H
#define SUREFOOT_TILE_H

#include "surefoot.h"

#define TILE_VECS 2
#define TILE_WIDTH (TILE_VECS * LANES)

/* Rows of x whose sums fit the registers at once. */
#if LANES == 16
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#endif

INLINE void tile_of_rows(int rows, int depth, const float *w, int w_stride, const float *x, int x_stride, float *sums_of,
                         int sums_stride, int more) {
    vec sums[TILE_ROWS][TILE_VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < TILE_VECS; v++) sums[r][v] = more ? load(&sums_of[r * sums_stride + v * LANES]) : all(0);
    for (int k = 0; k < depth; k++) {
        vec wk[TILE_VECS];
        for (int v = 0; v < TILE_VECS; v++) wk[v] = load(&w[k * w_stride + v * LANES]);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < TILE_VECS; v++) sums[r][v] += wk[v] * all(x[r * x_stride + k]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < TILE_VECS; v++) store(&sums_of[r * sums_stride + v * LANES], sums[r][v]);
}

/* sums[r][i] = sum over k of x[r][k] w[k][i], or more of it. rows: 1 to TILE_ROWS; i: 0 to TILE_WIDTH - 1. */
static void multiply_tile(int rows, int depth, const float *w, int w_stride, const float *x, int x_stride, float *sums,
                          int sums_stride, int more) {
    switch (rows) {
#define CASE(n)                                                                          \
    case n: tile_of_rows(n, depth, w, w_stride, x, x_stride, sums, sums_stride, more); break;
#if TILE_ROWS == 12
        CASE(12) CASE(11) CASE(10) CASE(9) CASE(8) CASE(7)
#endif
        CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)
#undef CASE
    }
}

#endif
