/* The greedy draw. */
#include "surefoot.h"

#include <math.h>

struct greedy {
    const float *logits;
    int64_t *ids;
    uint8_t *finite;
    int vocab;
};

static void draw_row(const void *args, int row, int thread) {
    (void)thread;
    const struct greedy *g = args;
    const float *logits = &g->logits[(int64_t)row * g->vocab];
    vec largest = all(-INFINITY), sum = all(0);
    ivec block = {0}, best = {0}; /* each lane's place: which vector of the row */
    int i = 0;
    for (; i + LANES <= g->vocab; i += LANES) {
        vec x = load(&logits[i]);
        ivec larger = (ivec)(x > largest);
        largest = choose(larger, x, largest);
        best = (block & larger) | (best & ~larger);
        block += 1;
        sum += x * all(0); /* NaN if any is not finite, and a sum of finite ones may not be */
    }
    float most = -INFINITY, rest = sum_of(sum);
    int64_t id = 0;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t at = (int64_t)best[lane] * LANES + lane;
        if (largest[lane] > most || (largest[lane] == most && at < id)) most = largest[lane], id = at;
    }
    for (; i < g->vocab; i++) {
        rest += logits[i] * 0;
        if (logits[i] > most) most = logits[i], id = i;
    }
    g->ids[row] = id;
    g->finite[row] = rest == 0;
}

void greedy(struct pool *pool, const float *logits, int32_t rows, int32_t vocab, int64_t *ids, uint8_t *finite) {
    struct greedy g = {logits, ids, finite, vocab};
    parallel_for(pool, rows, draw_row, &g);
}
