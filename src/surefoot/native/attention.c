/* Attention over paged keys and values, in place.
 *
 * Rows of one token (decode) read each key once for all query heads that share it; long ones are split among tasks, whose
 * parts are merged by their largest scores. Rows of more tokens (prefill) are taken in blocks of queries by blocks of
 * keys, which are copied once, keys transposed, and serve all queries of the block (FlashAttention, arXiv 2205.14135).
 * Only positions that a token sees are ever read: what others have left in a page does not matter.
 */
#include "surefoot.h"
#include "tile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64           /* keys that are taken together */
#define BLOCK_ROWS 192        /* pairs of a query token and a head that are taken together, or one token's heads */
#define SPLIT 512          /* tokens of a decode row that one task takes at least */
#define TASKS_PER_THREAD 4

static int first_seen(const struct attention *a, int position) {
    return a->window ? max(0, position - a->window + 1) : 0;
}

static const float *place(const struct attention *a, const float *cache, const struct row *row, int position, int kv_head) {
    int64_t page = row->pages[position / a->page_size];
    return cache + ((page * a->page_size + position % a->page_size) * a->kv_heads + kv_head) * a->head_dim;
}

static void scale_by(float *x, float factor, int size) {
    for (int i = 0; i < size; i++) x[i] *= factor;
}

static void cap(float *scores, int count, float softcap) {
    for (int i = 0; i < count; i++) scores[i] = softcap * tanhf(scores[i] / softcap);
}

/* ---- Online softmax -------------------------------------------------------------------------------------------- */

/* What a query has seen so far: the largest score, and the sum of e^(score - largest). */
struct seen {
    float largest, sum;
};

static const struct seen NOTHING = {-INFINITY, 0};

/* Turns BLOCK scores into weights relative to the largest score so far. Returns by what earlier sums are to be scaled. */
INLINE float take_scores(float *scores, struct seen *seen) {
    vec most = load(scores);
    for (int i = LANES; i < BLOCK; i += LANES) most = larger_of(most, load(&scores[i]));
    float largest = larger(seen->largest, largest_of(most));
    float base = largest == -INFINITY ? 0 : largest; /* no key is seen yet: all weights are 0, or NaN */
    vec sum = all(0);
    for (int i = 0; i < BLOCK; i += LANES) {
        vec weights = exp_of(load(&scores[i]) - all(base));
        sum += weights;
        store(&scores[i], weights);
    }
    float factor = seen->sum > 0 ? expf(seen->largest - largest) : 1;
    seen->sum = seen->sum * factor + sum_of(sum);
    seen->largest = largest;
    return factor;
}

/* ---- Decode ---------------------------------------------------------------------------------------------------- */

#define HEADS 4 /* query heads that are taken together */

struct decode {
    const struct attention *attention;
    int splits;
    float *parts;      /* [rows, kv_heads, splits, heads of a group, head_dim] */
    struct seen *seen; /* [rows, kv_heads, splits, heads of a group] */
};

/* scores[h][t] = scale * q_h k_t, for `heads` query heads and `count` keys. */
INLINE void score_keys(int heads, const float *q, const float *const keys[BLOCK], int count, int size, float scale,
                       float scores[][BLOCK]) {
    for (int t = 0; t < count; t++) {
        vec sums[HEADS];
        float rest[HEADS];
        for (int h = 0; h < heads; h++) sums[h] = all(0), rest[h] = 0;
        int i = 0;
        for (; i + LANES <= size; i += LANES) {
            vec k = load(&keys[t][i]);
            for (int h = 0; h < heads; h++) sums[h] += k * load(&q[h * size + i]);
        }
        for (; i < size; i++)
            for (int h = 0; h < heads; h++) rest[h] += keys[t][i] * q[h * size + i];
        for (int h = 0; h < heads; h++) scores[h][t] = scale * (sum_of(sums[h]) + rest[h]);
    }
}

/* out_h = factor_h * out_h + sum over t of weights[h][t] * v_t. */
INLINE void add_values(int heads, const float weights[][BLOCK], const float *const values[BLOCK], int count, int size,
                       const float factors[], float *out) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec sums[HEADS];
        for (int h = 0; h < heads; h++) sums[h] = load(&out[h * size + i]) * all(factors[h]);
        for (int t = 0; t < count; t++) {
            vec v = load(&values[t][i]);
            for (int h = 0; h < heads; h++) sums[h] += v * all(weights[h][t]);
        }
        for (int h = 0; h < heads; h++) store(&out[h * size + i], sums[h]);
    }
    for (; i < size; i++)
        for (int h = 0; h < heads; h++) {
            float sum = out[h * size + i] * factors[h];
            for (int t = 0; t < count; t++) sum += values[t][i] * weights[h][t];
            out[h * size + i] = sum;
        }
}

INLINE void prefetch(const float *from, int size) {
    for (int i = 0; i < size; i += 16) __builtin_prefetch(&from[i]);
}

/* Where the keys of up to BLOCK positions are; asks for them. Returns how many they are. */
static int find_keys(const struct attention *a, const struct row *row, int kv_head, int from, int to,
                     const float *keys[BLOCK]) {
    int count = max(0, min(BLOCK, to - from));
    for (int t = 0; t < count; t++) {
        keys[t] = place(a, a->keys, row, from + t, kv_head);
        prefetch(keys[t], a->head_dim);
    }
    return count;
}

/* Some query heads of a KV head over positions `from` to `to` - 1. */
INLINE void decode_heads(int heads, const struct attention *a, const struct row *row, int kv_head, int head, int from,
                         int to, float *out, struct seen *seen) {
    int size = a->head_dim;
    const float *q = &a->q[(int64_t)row->first * a->q_stride + (int64_t)head * size];
    for (int h = 0; h < heads; h++) seen[h] = NOTHING;
    memset(out, 0, sizeof(float) * heads * size);
    const float *keys[BLOCK], *values[BLOCK];
    int next = find_keys(a, row, kv_head, from, to, keys);
    for (int block = from; block < to; block += BLOCK) {
        int count = next;
        for (int t = 0; t < count; t++) {
            values[t] = a->values + (keys[t] - a->keys);
            prefetch(values[t], size);
        }
        float scores[HEADS][BLOCK], factors[HEADS];
        score_keys(heads, q, keys, count, size, a->scale, scores);
        next = find_keys(a, row, kv_head, block + BLOCK, to, keys);
        for (int h = 0; h < heads; h++) {
            if (a->softcap) cap(scores[h], count, a->softcap);
            for (int t = count; t < BLOCK; t++) scores[h][t] = -INFINITY;
            factors[h] = take_scores(scores[h], &seen[h]);
        }
        add_values(heads, scores, values, count, size, factors, out);
    }
}

static void decode_part(const void *args, int task, int thread) {
    (void)thread;
    const struct decode *d = args;
    const struct attention *a = d->attention;
    int part = task % d->splits, kv_head = task / d->splits % a->kv_heads;
    const struct row *row = &a->rows[task / d->splits / a->kv_heads];
    int first = first_seen(a, row->start), length = row->start + 1 - first;
    int share = ceil_div(ceil_div(length, d->splits), BLOCK) * BLOCK;
    int from = min(row->start + 1, first + part * share), to = min(row->start + 1, from + share);
    int group = a->heads / a->kv_heads;
    int64_t entry = (int64_t)task * group;
    float *out = &d->parts[entry * a->head_dim];
    if (d->splits == 1) out = &a->out[((int64_t)row->first * a->heads + kv_head * group) * a->head_dim];
    struct seen *seen = &d->seen[entry];
    for (int h = 0; h < group; h += HEADS) {
        int head = kv_head * group + h;
        float *to_heads = &out[(int64_t)h * a->head_dim];
        switch (min(HEADS, group - h)) {
        case 4: decode_heads(4, a, row, kv_head, head, from, to, to_heads, &seen[h]); break;
        case 3: decode_heads(3, a, row, kv_head, head, from, to, to_heads, &seen[h]); break;
        case 2: decode_heads(2, a, row, kv_head, head, from, to, to_heads, &seen[h]); break;
        case 1: decode_heads(1, a, row, kv_head, head, from, to, to_heads, &seen[h]); break;
        }
    }
    if (d->splits == 1)
        for (int h = 0; h < group; h++) scale_by(&out[(int64_t)h * a->head_dim], 1 / seen[h].sum, a->head_dim);
}

/* Merges the parts of one row, if there are several. */
static void merge_row(const void *args, int task, int thread) {
    (void)thread;
    const struct decode *d = args;
    const struct attention *a = d->attention;
    int group = a->heads / a->kv_heads, size = a->head_dim;
    for (int head = 0; head < a->heads; head++) {
        int64_t first = ((int64_t)task * a->kv_heads + head / group) * d->splits * group + head % group;
        float largest = -INFINITY, sum = 0;
        for (int part = 0; part < d->splits; part++) largest = larger(d->seen[first + part * group].largest, largest);
        float *out = &a->out[((int64_t)a->rows[task].first * a->heads + head) * size];
        memset(out, 0, sizeof(float) * size);
        for (int part = 0; part < d->splits; part++) {
            struct seen seen = d->seen[first + part * group];
            float factor = seen.largest == largest ? 1 : expf(seen.largest - largest);
            const float *from = &d->parts[(first + part * group) * size];
            sum += seen.sum * factor;
            for (int i = 0; i < size; i++) out[i] += from[i] * factor;
        }
        for (int i = 0; i < size; i++) out[i] /= sum;
    }
}

static void decode(struct pool *pool, const struct attention *a) {
    int longest = 0, tasks = a->num_rows * a->kv_heads;
    for (int r = 0; r < a->num_rows; r++) longest = max(longest, a->rows[r].start + 1 - first_seen(a, a->rows[r].start));
    int wanted = ceil_div(TASKS_PER_THREAD * pool_threads(pool), tasks);
    struct decode d = {a, min(wanted, ceil_div(longest, SPLIT)), NULL, NULL};
    int64_t entries = (int64_t)a->num_rows * a->heads * d.splits;
    d.parts = pool_scratch(pool, entries * (a->head_dim * sizeof(float) + sizeof(struct seen)));
    d.seen = (struct seen *)(d.parts + entries * a->head_dim);
    parallel_for(pool, tasks * d.splits, decode_part, &d);
    if (d.splits > 1) parallel_for(pool, a->num_rows, merge_row, &d);
}

/* ---- Prefill --------------------------------------------------------------------------------------------------- */

struct prefill {
    const struct attention *attention;
    const struct row *row;
    int tokens;      /* query tokens of a task */
    float *scratch;  /* of every thread: see scratch_floats */
    int64_t scratch_floats;
};

static int padded(int size) { return ceil_div(size, TILE_WIDTH) * TILE_WIDTH; }

/* A thread's buffers, one after the other. */
struct block {
    float *q;       /* [tokens * heads of a group, head_dim] */
    float *out;     /* [the same, padded head_dim] */
    float *scores;  /* [the same, BLOCK] */
    float *keys;    /* [head_dim, BLOCK]: transposed */
    float *values;  /* [BLOCK, padded head_dim] */
    struct seen *seen;
};

static int64_t scratch_floats(int rows, int size) {
    int64_t floats = (int64_t)rows * (size + padded(size) + BLOCK + 2) + (int64_t)BLOCK * (size + padded(size));
    return (floats + 15) / 16 * 16;
}

static struct block block_at(float *scratch, int rows, int size) {
    struct block b;
    b.out = scratch;
    b.scores = b.out + (int64_t)rows * padded(size);
    b.keys = b.scores + (int64_t)rows * BLOCK;
    b.values = b.keys + (int64_t)BLOCK * size;
    b.q = b.values + (int64_t)BLOCK * padded(size);
    b.seen = (struct seen *)(b.q + (int64_t)rows * size);
    return b;
}

/* Copies keys and values of positions `from` to `from + count - 1`; places up to BLOCK are zero. */
static void copy_keys(const struct attention *a, const struct row *row, int kv_head, int from, int count, struct block *b) {
    int size = a->head_dim, width = padded(size);
    if (count < BLOCK) memset(b->keys, 0, sizeof(float) * BLOCK * size);
    for (int t = 0; t < count; t++) {
        const float *key = place(a, a->keys, row, from + t, kv_head);
        const float *value = a->values + (key - a->keys);
        for (int i = 0; i < size; i++) b->keys[i * BLOCK + t] = key[i];
        memcpy(&b->values[t * width], value, sizeof(float) * size);
        memset(&b->values[t * width + size], 0, sizeof(float) * (width - size));
    }
}

/* Hides what a query token at `position` does not see of the block's keys. */
static void hide(const struct attention *a, int position, int from, int count, float *scores) {
    for (int t = 0; t < min(BLOCK, first_seen(a, position) - from); t++) scores[t] = -INFINITY;
    for (int t = max(0, min(count, position + 1 - from)); t < BLOCK; t++) scores[t] = -INFINITY;
}

static void attend_block(const struct prefill *p, int first, int tokens, int kv_head, int from, int count, struct block *b) {
    const struct attention *a = p->attention;
    int group = a->heads / a->kv_heads, size = a->head_dim, width = padded(size), rows = tokens * group;
    copy_keys(a, p->row, kv_head, from, count, b);
    for (int r = 0; r < rows; r += TILE_ROWS)
        for (int t = 0; t < BLOCK; t += TILE_WIDTH)
            multiply_tile(min(TILE_ROWS, rows - r), size, &b->keys[t], BLOCK, &b->q[r * size], size, &b->scores[r * BLOCK + t], BLOCK, 0);
    for (int r = 0; r < rows; r++) {
        float *scores = &b->scores[r * BLOCK];
        if (a->softcap) cap(scores, BLOCK, a->softcap);
        hide(a, p->row->start + first + r / group, from, count, scores);
        float factor = take_scores(scores, &b->seen[r]);
        if (factor != 1) scale_by(&b->out[r * width], factor, width);
    }
    for (int r = 0; r < rows; r += TILE_ROWS)
        for (int i = 0; i < width; i += TILE_WIDTH)
            multiply_tile(min(TILE_ROWS, rows - r), count, &b->values[i], width, &b->scores[r * BLOCK], BLOCK, &b->out[r * width + i], width, 1);
}

static void prefill_block(const void *args, int task, int thread) {
    const struct prefill *p = args;
    const struct attention *a = p->attention;
    int group = a->heads / a->kv_heads, size = a->head_dim, width = padded(size);
    /* The last blocks see most: they come first, so that no thread ends long after the others. */
    int blocks = ceil_div(p->row->count, p->tokens), kv_head = task % a->kv_heads;
    int first = (blocks - 1 - task / a->kv_heads) * p->tokens, tokens = min(p->tokens, p->row->count - first);
    struct block b = block_at(p->scratch + thread * p->scratch_floats, p->tokens * group, size);
    for (int r = 0; r < tokens * group; r++) {
        const float *q = &a->q[(int64_t)(p->row->first + first + r / group) * a->q_stride + (kv_head * group + r % group) * size];
        for (int i = 0; i < size; i++) b.q[r * size + i] = q[i] * a->scale;
        b.seen[r] = NOTHING;
    }
    memset(b.out, 0, sizeof(float) * tokens * group * width);
    int last = p->row->start + first + tokens; /* one past the last position that is seen */
    for (int from = first_seen(a, p->row->start + first); from < last; from += BLOCK)
        attend_block(p, first, tokens, kv_head, from, min(BLOCK, last - from), &b);
    for (int r = 0; r < tokens * group; r++) {
        float *out = &a->out[((int64_t)(p->row->first + first + r / group) * a->heads + kv_head * group + r % group) * size];
        for (int i = 0; i < size; i++) out[i] = b.out[r * width + i] / b.seen[r].sum;
    }
}

static void prefill(struct pool *pool, const struct attention *a, const struct row *row) {
    int group = a->heads / a->kv_heads;
    struct prefill p = {a, row, max(1, BLOCK_ROWS / group), NULL, 0};
    p.scratch_floats = scratch_floats(p.tokens * group, a->head_dim);
    p.scratch = pool_scratch(pool, p.scratch_floats * pool_threads(pool) * sizeof(float));
    parallel_for(pool, ceil_div(row->count, p.tokens) * a->kv_heads, prefill_block, &p);
}

/* ---- Both ------------------------------------------------------------------------------------------------------ */

void attention(struct pool *pool, const struct attention *a) {
    int decode_rows = 0;
    while (decode_rows < a->num_rows && a->rows[decode_rows].count == 1) decode_rows++;
    if (decode_rows > 0) {
        struct attention some = *a;
        some.num_rows = decode_rows;
        decode(pool, &some);
    }
    for (int r = decode_rows; r < a->num_rows; r++) prefill(pool, a, &a->rows[r]);
}
