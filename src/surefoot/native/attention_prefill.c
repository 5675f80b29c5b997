/* Attention of rows of several tokens: blocks of queries by blocks of keys (FlashAttention, arXiv 2205.14135).
 *
 * Query rows, that is pairs of a token and a head, are the lanes of vectors: WIDTH of them make a tile, whose scores of
 * a block are [keys, WIDTH]. So the softmax needs no sums across lanes, and keys and values stay as they lie in the
 * cache.
 */
#include "attention.h"

#include <stddef.h>
#include <string.h>

#define ROWS 192 /* query rows that a task takes at most */
#define TASKS_PER_THREAD 4

#if LANES == 16 || defined(__aarch64__) /* 32 vector registers */
#define TILE_ROWS 8
#define TILE_VECS 3
#else
#define TILE_ROWS 4
#define TILE_VECS 2
#endif
#define WIDTH (TILE_VECS * LANES)

/* WIDTH query rows of a task. */
struct tile {
    float *q;             /* [head_dim, WIDTH] */
    float *out;           /* [head_dim and up to TILE_ROWS more, WIDTH] */
    float *largest, *sum; /* [WIDTH], of what was seen so far */
    int32_t *positions;   /* [WIDTH], ascending */
};

struct prefill {
    const struct attention *attention;
    const struct row *rows;
    int tokens;     /* query tokens of a task */
    float *scratch; /* of each thread: its tiles, keys, values */
    int64_t tile_floats, thread_floats;
};

/* sums[r] = sums[r] * factors + sum over k of x[r * row_step + k * step] * w[k], for TILE_ROWS rows. Each of sums,
 * factors and w[k] is WIDTH wide. */
INLINE void multiply_tile(int depth, const float *w, const float *x, int64_t row_step, int64_t step,
                          const float *factors, float *sums) {
    vec s[TILE_ROWS][TILE_VECS];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECS; v++)
            s[r][v] = factors ? load(&sums[r * WIDTH + v * LANES]) * load(&factors[v * LANES]) : all(0);
    for (int k = 0; k < depth; k++) {
        vec wk[TILE_VECS];
        for (int v = 0; v < TILE_VECS; v++) wk[v] = load(&w[k * WIDTH + v * LANES]);
        for (int r = 0; r < TILE_ROWS; r++)
            for (int v = 0; v < TILE_VECS; v++) s[r][v] += wk[v] * all(x[r * row_step + k * step]);
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECS; v++) store(&sums[r * WIDTH + v * LANES], s[r][v]);
}

/* Turns a block's scores into weights relative to the largest so far. factors: by what to scale earlier sums. */
static void take_block(float *scores, int count, struct tile *tile, float *factors) {
    vec largest[TILE_VECS], base[TILE_VECS], sum[TILE_VECS];
    for (int v = 0; v < TILE_VECS; v++) largest[v] = load(&tile->largest[v * LANES]), sum[v] = all(0);
    for (int t = 0; t < count; t++)
        for (int v = 0; v < TILE_VECS; v++) largest[v] = larger_of(load(&scores[t * WIDTH + v * LANES]), largest[v]);
    for (int v = 0; v < TILE_VECS; v++) base[v] = choose((ivec)(largest[v] == all(-INFINITY)), all(0), largest[v]);
    for (int t = 0; t < count; t++)
        for (int v = 0; v < TILE_VECS; v++) {
            vec weights = exp_of(load(&scores[t * WIDTH + v * LANES]) - base[v]);
            sum[v] += weights;
            store(&scores[t * WIDTH + v * LANES], weights);
        }
    for (int v = 0; v < TILE_VECS; v++) {
        vec factor = exp_of(load(&tile->largest[v * LANES]) - base[v]);
        store(&factors[v * LANES], factor);
        store(&tile->sum[v * LANES], load(&tile->sum[v * LANES]) * factor + sum[v]);
        store(&tile->largest[v * LANES], largest[v]);
    }
}

/* Hides keys from the query rows that do not see them. */
static void hide(int window, int from, int count, const struct tile *tile, float *scores) {
    for (int i = 0; i < WIDTH; i += LANES) {
        ivec positions;
        memcpy(&positions, &tile->positions[i], sizeof positions);
        for (int t = 0; t < count; t++) {
            ivec behind = positions - (from + t);
            ivec hidden = behind < 0;
            if (window) hidden |= behind >= window;
            float *to = &scores[t * WIDTH + i];
            store(to, choose(hidden, all(-INFINITY), load(to)));
        }
    }
}

static void attend_block(const struct attention *a, const float *keys, const float *values, int from, int count,
                         struct tile *tile) {
    float scores[BLOCK * WIDTH], factors[WIDTH];
    int size = a->head_dim;
    for (int t = 0; t < count; t += TILE_ROWS) /* past `count` are any keys, whose scores nobody reads */
        multiply_tile(size, tile->q, &keys[t * size], size, 1, NULL, &scores[t * WIDTH]);
    if (a->softcap) cap(scores, count * WIDTH, a->softcap);
    if (from + count - 1 > tile->positions[0] || from < first_seen(a, tile->positions[WIDTH - 1]))
        hide(a->window, from, count, tile, scores);
    take_block(scores, count, tile, factors);
    for (int i = 0; i < size; i += TILE_ROWS) /* likewise past `size` */
        multiply_tile(count, scores, &values[i], 1, size, factors, &tile->out[i * WIDTH]);
}

/* Where a thread has tile `index`. */
static struct tile tile_at(const struct prefill *p, int thread, int index) {
    int size = p->attention->head_dim;
    struct tile tile = {.q = p->scratch + thread * p->thread_floats + index * p->tile_floats};
    tile.out = tile.q + (int64_t)size * WIDTH;
    tile.largest = tile.out + (int64_t)(size + TILE_ROWS) * WIDTH;
    tile.sum = tile.largest + WIDTH;
    tile.positions = (int32_t *)(tile.sum + WIDTH);
    return tile;
}

/* Query rows of a task: tokens of the step from `token` on, and of each the heads of a KV head. Lanes past the last row
 * repeat it; their results are not stored. */
static void load_tile(const struct attention *a, int token, int position, int kv_head, int rows, int index,
                      struct tile *tile) {
    int group = a->heads / a->kv_heads, size = a->head_dim;
    for (int lane = 0; lane < WIDTH; lane++) {
        int r = min(rows - 1, index * WIDTH + lane);
        const float *q = &a->q[(int64_t)(token + r / group) * a->q_stride + (kv_head * group + r % group) * size];
        for (int i = 0; i < size; i++) tile->q[i * WIDTH + lane] = q[i] * a->scale;
        tile->positions[lane] = position + r / group;
        tile->largest[lane] = -INFINITY;
        tile->sum[lane] = 0;
    }
    memset(tile->out, 0, sizeof(float) * (size + TILE_ROWS) * WIDTH);
}

static void store_tile(const struct attention *a, int token, int kv_head, int rows, int index,
                       const struct tile *tile) {
    int group = a->heads / a->kv_heads, size = a->head_dim;
    for (int lane = 0; lane < min(WIDTH, rows - index * WIDTH); lane++) {
        int r = index * WIDTH + lane;
        float *out = &a->out[((int64_t)(token + r / group) * a->heads + kv_head * group + r % group) * size];
        for (int i = 0; i < size; i++) out[i] = tile->out[i * WIDTH + lane] / tile->sum[lane];
    }
}

/* `count` query tokens of a row from its token `first` on, the heads of one KV head. */
static void prefill_part(const struct prefill *p, const struct row *row, int first, int count, int kv_head,
                         int thread) {
    const struct attention *a = p->attention;
    int size = a->head_dim, rows = count * (a->heads / a->kv_heads), tiles = ceil_div(rows, WIDTH);
    int token = row->first + first, position = row->start + first, end = position + count;
    float *keys = p->scratch + (thread + 1) * p->thread_floats - (2 * BLOCK * size + TILE_ROWS);
    float *values = keys + BLOCK * size;
    for (int index = 0; index < tiles; index++) {
        struct tile tile = tile_at(p, thread, index);
        load_tile(a, token, position, kv_head, rows, index, &tile);
    }
    for (int from = first_seen(a, position), next; from < end; from = next) {
        next = min(end, (from / BLOCK + 1) * BLOCK); /* so that blocks are the same ones for all tasks */
        for (int t = 0; t < next - from; t++) {
            const float *key = key_at(a, row, from + t, kv_head);
            memcpy(&keys[t * size], key, sizeof(float) * size);
            memcpy(&values[t * size], value_of(a, key), sizeof(float) * size);
        }
        for (int index = 0; index < tiles; index++) {
            struct tile tile = tile_at(p, thread, index);
            int seen = min(next, tile.positions[WIDTH - 1] + 1) - from; /* by its last token */
            if (seen > 0 && from + seen > first_seen(a, tile.positions[0]))
                attend_block(a, keys, values, from, seen, &tile);
        }
    }
    for (int index = 0; index < tiles; index++) {
        struct tile tile = tile_at(p, thread, index);
        store_tile(a, token, kv_head, rows, index, &tile);
    }
}

static void prefill_task(const void *args, int task, int thread) {
    const struct prefill *p = args;
    int kv_heads = p->attention->kv_heads;
    const struct row *row = p->rows;
    int blocks = ceil_div(row->count, p->tokens);
    while (task >= blocks * kv_heads) {
        task -= blocks * kv_heads;
        blocks = ceil_div((++row)->count, p->tokens);
    }
    /* The last tokens see most: they come first, so that no thread ends long after the others. */
    int first = (blocks - 1 - task / kv_heads) * p->tokens;
    prefill_part(p, row, first, min(p->tokens, row->count - first), task % kv_heads, thread);
}

void prefill_attention(struct pool *pool, const struct attention *a, const struct row *rows, int num_rows) {
    int tokens = 0, tasks = 0, group = a->heads / a->kv_heads, size = a->head_dim;
    for (int r = 0; r < num_rows; r++) tokens += rows[r].count;
    int share = ceil_div(tokens * a->kv_heads, TASKS_PER_THREAD * pool_threads(pool));
    struct prefill p = {a, rows, max(1, min(max(share, WIDTH / group), ROWS / group)), NULL, 0, 0};
    for (int r = 0; r < num_rows; r++) tasks += ceil_div(rows[r].count, p.tokens) * a->kv_heads;
    p.tile_floats = (int64_t)(2 * size + TILE_ROWS + 3) * WIDTH;
    p.thread_floats = p.tile_floats * ceil_div(p.tokens * group, WIDTH) + 2 * BLOCK * size + TILE_ROWS;
    p.thread_floats = (p.thread_floats + 15) / 16 * 16;
    p.scratch = pool_scratch(pool, p.thread_floats * pool_threads(pool) * sizeof(float));
    parallel_for(pool, tasks, prefill_task, &p);
}
