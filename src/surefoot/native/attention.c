/* Attention over paged keys and values, in place.
 *
 * Rows of one token (decode, here) read each key once for all query heads that share it; long ones are cut into pieces,
 * which are merged by their largest scores. Rows of more tokens (prefill) are in attention_prefill.c.
 *
 * Only positions that a token of the row sees are ever read: what others have left in a page does not matter. How sums
 * are cut depends on a row's positions alone: its result is the same to the bit whatever else is in the step.
 */
#include "attention.h"

#include <string.h>

#define PIECE 256 /* tokens of a row that a task reads at most */
#define HEADS 4   /* query heads that are taken together */

/* What a query has seen so far: the largest score, and the sum of e^(score - largest). */
struct seen {
    float largest, sum;
};

static const struct seen NOTHING = {-INFINITY, 0};

/* What a task reads of one KV head. */
struct piece {
    int32_t row, from, to; /* positions `from` to `to` - 1 */
    int32_t parts;         /* pieces of the row: this and the next ones, 0 if it is not the first; 1: all of the row */
};

struct decode {
    const struct attention *attention;
    const struct piece *pieces;
    float *parts;      /* [pieces, heads, head_dim] */
    struct seen *seen; /* [pieces, heads] */
};

INLINE void prefetch(const float *from, int size) {
    for (int i = 0; i < size; i += 16) __builtin_prefetch(&from[i]);
}

/* Where the keys of up to BLOCK positions are. Returns how many they are. */
static int find_keys(const struct attention *a, const struct row *row, int kv_head, int from, int to,
                     const float *keys[BLOCK]) {
    int count = max(0, min(BLOCK, to - from));
    for (int t = 0; t < count; t++) keys[t] = key_at(a, row, from + t, kv_head);
    return count;
}

/* Turns BLOCK scores into weights relative to the largest so far. Returns by what earlier sums are to be scaled. */
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

/* scores[h][t] = scale * q_h k_t, for `heads` query heads and `count` keys. Asks for values meanwhile. */
INLINE void score_keys(int heads, const float *q, const float *const keys[BLOCK], const float *const values[BLOCK],
                       int count, int size, float scale, float scores[][BLOCK]) {
    for (int t = 0; t < count; t++) {
        prefetch(values[t], size);
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

/* out_h = factor_h * out_h + sum over t of weights[h][t] * v_t. Asks for the next keys meanwhile. */
INLINE void add_values(int heads, const float weights[][BLOCK], const float *const values[BLOCK],
                       const float *const next[BLOCK], int count, int size, const float factors[], float *out) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec sums[HEADS];
        for (int h = 0; h < heads; h++) sums[h] = load(&out[h * size + i]) * all(factors[h]);
        for (int t = 0; t < count; t++) {
            __builtin_prefetch(&next[t][i]);
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

/* Some query heads of a KV head over positions `from` to `to` - 1. */
INLINE void decode_heads(int heads, const struct attention *a, const struct row *row, int kv_head, int head, int from,
                         int to, float *out, struct seen *seen) {
    int size = a->head_dim;
    const float *q = &a->q[(int64_t)row->first * a->q_stride + (int64_t)head * size];
    for (int h = 0; h < heads; h++) seen[h] = NOTHING;
    memset(out, 0, sizeof(float) * heads * size);
    const float *keys[BLOCK], *values[BLOCK];
    int next = find_keys(a, row, kv_head, from, to, keys);
    for (int t = 0; t < next; t++) prefetch(keys[t], size);
    for (int block = from; block < to; block += BLOCK) {
        int count = next;
        for (int t = 0; t < count; t++) values[t] = value_of(a, keys[t]);
        float scores[HEADS][BLOCK], factors[HEADS];
        score_keys(heads, q, keys, values, count, size, a->scale, scores);
        next = find_keys(a, row, kv_head, block + BLOCK, to, keys); /* the others stay those of this block */
        for (int h = 0; h < heads; h++) {
            if (a->softcap) cap(scores[h], count, a->softcap);
            for (int t = count; t < BLOCK; t++) scores[h][t] = -INFINITY;
            factors[h] = take_scores(scores[h], &seen[h]);
        }
        add_values(heads, scores, values, keys, count, size, factors, out);
    }
}

static float *out_of(const struct attention *a, int row, int head) {
    return &a->out[((int64_t)a->rows[row].first * a->heads + head) * a->head_dim];
}

static void decode_piece(const void *args, int task, int thread) {
    (void)thread;
    const struct decode *d = args;
    const struct attention *a = d->attention;
    int group = a->heads / a->kv_heads, kv_head = task % a->kv_heads, first = kv_head * group;
    int64_t entry = (int64_t)(task / a->kv_heads) * a->heads;
    const struct piece *piece = &d->pieces[task / a->kv_heads];
    const struct row *row = &a->rows[piece->row];
    for (int head = first; head < first + group; head += HEADS) {
        float *out = piece->parts == 1 ? out_of(a, piece->row, head) : &d->parts[(entry + head) * a->head_dim];
        struct seen *seen = &d->seen[entry + head];
        int heads = min(HEADS, first + group - head);
        switch (heads) {
        case 4: decode_heads(4, a, row, kv_head, head, piece->from, piece->to, out, seen); break;
        case 3: decode_heads(3, a, row, kv_head, head, piece->from, piece->to, out, seen); break;
        case 2: decode_heads(2, a, row, kv_head, head, piece->from, piece->to, out, seen); break;
        case 1: decode_heads(1, a, row, kv_head, head, piece->from, piece->to, out, seen); break;
        }
        if (piece->parts == 1)
            for (int h = 0; h < heads; h++)
                for (int i = 0; i < a->head_dim; i++) out[h * a->head_dim + i] /= seen[h].sum;
    }
}

/* Merges the parts of a row that is split. */
static void merge_row(const void *args, int task, int thread) {
    (void)thread;
    const struct decode *d = args;
    const struct attention *a = d->attention;
    int parts = d->pieces[task].parts, size = a->head_dim;
    if (parts < 2) return;
    for (int head = 0; head < a->heads; head++) {
        const struct seen *seen = &d->seen[(int64_t)task * a->heads + head];
        const float *from = &d->parts[((int64_t)task * a->heads + head) * size];
        float *out = out_of(a, d->pieces[task].row, head);
        float largest = -INFINITY, sum = 0;
        for (int part = 0; part < parts; part++) largest = larger(seen[part * a->heads].largest, largest);
        memset(out, 0, sizeof(float) * size);
        for (int part = 0; part < parts; part++) {
            float factor = expf(seen[part * a->heads].largest - largest);
            sum += seen[part * a->heads].sum * factor;
            for (int i = 0; i < size; i++) out[i] += from[(int64_t)part * a->heads * size + i] * factor;
        }
        for (int i = 0; i < size; i++) out[i] /= sum;
    }
}

/* The first `rows` rows, which are of one token each. */
static void decode(struct pool *pool, const struct attention *a, int rows) {
    int64_t most = 0;
    for (int r = 0; r < rows; r++) most += ceil_div(a->rows[r].start + 1 - first_seen(a, a->rows[r].start), PIECE);
    struct piece *pieces =
        pool_scratch(pool, most * (sizeof *pieces + a->heads * (sizeof(struct seen) + a->head_dim * sizeof(float))));
    struct seen *seen = (struct seen *)(pieces + most);
    struct decode d = {a, pieces, (float *)(seen + most * a->heads), seen};
    int count = 0;
    for (int r = 0; r < rows; r++) {
        int from = first_seen(a, a->rows[r].start), end = a->rows[r].start + 1, length = end - from;
        int share = ceil_div(ceil_div(length, ceil_div(length, PIECE)), BLOCK) * BLOCK;
        for (int parts = ceil_div(length, share); from < end; from += share, parts = 0)
            pieces[count++] = (struct piece){r, from, min(end, from + share), parts};
    }
    parallel_for(pool, count * a->kv_heads, decode_piece, &d);
    if (count > rows) parallel_for(pool, count, merge_row, &d);
}

void attention(struct pool *pool, const struct attention *a) {
    int decode_rows = 0;
    while (decode_rows < a->num_rows && a->rows[decode_rows].count == 1) decode_rows++;
    if (decode_rows > 0) decode(pool, a, decode_rows);
    if (decode_rows < a->num_rows) prefill_attention(pool, a, &a->rows[decode_rows], a->num_rows - decode_rows);
}
