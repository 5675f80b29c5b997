/* What stands between the matrix products of a layer. Work is dealt out in pieces that are worth another thread. */
#include "surefoot.h"

#include <math.h>
#include <stddef.h>

#define PIECE 8192 /* floats of a task */

struct rows_of {
    const float *x, *weight;
    float *y;
    int64_t count; /* rows, or elements */
    int size, rows_of_task, activation;
    float value;
};

static int rows_for(int size) { return max(1, PIECE / size); }

/* ---- Norm ------------------------------------------------------------------------------------------------------ */

INLINE void norm_row(const float *x, int size, const float *weight, float eps, float *y) {
    vec squares = all(0);
    float rest = 0;
    int i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(&x[i]) * load(&x[i]);
    for (; i < size; i++) rest += x[i] * x[i];
    float scale = 1 / sqrtf((sum_of(squares) + rest) / size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(&y[i], load(&x[i]) * all(scale) * load(&weight[i]));
    for (; i < size; i++) y[i] = x[i] * scale * weight[i];
}

static void norm_rows(const void *args, int task, int thread) {
    (void)thread;
    const struct rows_of *n = args;
    int64_t first = (int64_t)task * n->rows_of_task;
    for (int64_t row = first; row < n->count && row < first + n->rows_of_task; row++)
        norm_row(&n->x[row * n->size], n->size, n->weight, n->value, &n->y[row * n->size]);
}

void rms_norm(struct pool *pool, const float *x, int32_t rows, int32_t size, const float *weight, float eps, float *y) {
    struct rows_of n = {x, weight, y, rows, size, rows_for(size), 0, eps};
    parallel_for(pool, ceil_div(rows, n.rows_of_task), norm_rows, &n);
}

/* ---- Activation ------------------------------------------------------------------------------------------------ */

INLINE vec tanh_of(vec x) { return all(1) - all(2) / (exp_of(x + x) + all(1)); }

INLINE vec activate(enum activation activation, vec x) {
    if (activation == SILU) return x / (all(1) + exp_of(-x));
    const vec root = all(0.7978845608f); /* sqrt(2 / pi) */
    return all(0.5f) * x * (all(1) + tanh_of(root * (x + all(0.044715f) * x * x * x)));
}

INLINE void activate_row(enum activation activation, const float *gate, const float *up, int size, float *y) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(&y[i], activate(activation, load(&gate[i])) * load(&up[i]));
    for (; i < size; i++) y[i] = activate(activation, all(gate[i]))[0] * up[i];
}

static void activate_rows(const void *args, int task, int thread) {
    (void)thread;
    const struct rows_of *a = args;
    int64_t first = (int64_t)task * a->rows_of_task;
    for (int64_t row = first; row < a->count && row < first + a->rows_of_task; row++) {
        const float *gate = &a->x[row * 2 * a->size];
        if (a->activation == SILU)
            activate_row(SILU, gate, gate + a->size, a->size, &a->y[row * a->size]);
        else
            activate_row(GELU_TANH, gate, gate + a->size, a->size, &a->y[row * a->size]);
    }
}

void activation_mul(struct pool *pool, const float *gate_up, int32_t rows, int32_t size, int32_t activation, float *y) {
    struct rows_of a = {gate_up, NULL, y, rows, size, rows_for(4 * size), activation, 0};
    parallel_for(pool, ceil_div(rows, a.rows_of_task), activate_rows, &a);
}

/* ---- Sums and caps --------------------------------------------------------------------------------------------- */

static void add_piece(const void *args, int task, int thread) {
    (void)thread;
    const struct rows_of *a = args;
    for (int64_t i = (int64_t)task * PIECE; i < a->count && i < (task + 1) * (int64_t)PIECE; i++) a->y[i] += a->x[i];
}

void add(struct pool *pool, float *to, const float *x, int64_t count) {
    struct rows_of a = {.x = x, .y = to, .count = count};
    parallel_for(pool, (count + PIECE - 1) / PIECE, add_piece, &a);
}

static void cap_piece(const void *args, int task, int thread) {
    (void)thread;
    const struct rows_of *a = args;
    float *y = a->y;
    int64_t i = (int64_t)task * PIECE, end = i + PIECE < a->count ? i + PIECE : a->count;
    for (; i + LANES <= end; i += LANES) store(&y[i], all(a->value) * tanh_of(load(&y[i]) / all(a->value)));
    for (; i < end; i++) y[i] = a->value * tanhf(y[i] / a->value);
}

void soft_cap(struct pool *pool, float *x, int64_t count, float limit) {
    struct rows_of a = {.y = x, .count = count, .value = limit};
    parallel_for(pool, (count + PIECE - 1) / PIECE, cap_piece, &a);
}

/* ---- Rotary position embedding ---------------------------------------------------------------------------------- */

struct tables {
    const struct rope *rope;
    const int64_t *positions;
    float *cosines, *sines;
    int tokens;
};

#define TOKENS_OF_TASK 16

static void table_rows(const void *args, int task, int thread) {
    (void)thread;
    const struct tables *t = args;
    int half = t->rope->size / 2;
    for (int token = task * TOKENS_OF_TASK; token < min(t->tokens, (task + 1) * TOKENS_OF_TASK); token++)
        for (int i = 0; i < half; i++) {
            float angle = (float)t->positions[token] * t->rope->inverse_frequencies[i];
            t->cosines[token * half + i] = cosf(angle) * t->rope->magnitude;
            t->sines[token * half + i] = sinf(angle) * t->rope->magnitude;
        }
}

void rope_tables(struct pool *pool, const struct rope *rope, const int64_t *positions, int32_t tokens, float *tables) {
    struct tables t = {rope, positions, tables, tables + (int64_t)tokens * (rope->size / 2), tokens};
    parallel_for(pool, ceil_div(tokens, TOKENS_OF_TASK), table_rows, &t);
}

INLINE void rotate(float *head, const float *cosines, const float *sines, int half) {
    float *other = head + half;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec a = load(&head[i]), b = load(&other[i]), c = load(&cosines[i]), s = load(&sines[i]);
        store(&head[i], a * c - b * s);
        store(&other[i], b * c + a * s);
    }
    for (; i < half; i++) {
        float a = head[i], b = other[i];
        head[i] = a * cosines[i] - b * sines[i];
        other[i] = b * cosines[i] + a * sines[i];
    }
}

static void rotate_tokens(const void *args, int task, int thread) {
    (void)thread;
    const struct kv_write *w = args;
    int size = w->head_dim, half = w->rotated / 2, qk_heads = w->heads + w->kv_heads;
    const float *cosines = w->tables, *sines = w->tables + (int64_t)w->tokens * half;
    for (int token = task * TOKENS_OF_TASK; token < min(w->tokens, (task + 1) * TOKENS_OF_TASK); token++) {
        float *heads = &w->qkv[(int64_t)token * (qk_heads + w->kv_heads) * size];
        for (int head = 0; head < qk_heads; head++) {
            float *x = &heads[head * size];
            if (w->qk_norm) norm_row(x, size, &w->qk_norm[head * size], w->norm_eps, x);
            rotate(x, &cosines[token * half], &sines[token * half], half);
        }
        int width = w->kv_heads * size;
        float *key = &w->keys[w->places[token] * width], *value = &w->values[w->places[token] * width];
        for (int i = 0; i < width; i++) {
            key[i] = heads[w->heads * size + i];
            value[i] = heads[qk_heads * size + i];
        }
    }
}

void rotate_and_write(struct pool *pool, const struct kv_write *write) {
    parallel_for(pool, ceil_div(write->tokens, TOKENS_OF_TASK), rotate_tokens, write);
}
