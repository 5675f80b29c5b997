/* What decode and prefill share. */
#ifndef SUREFOOT_ATTENTION_H
#define SUREFOOT_ATTENTION_H

#include "surefoot.h"

#include <math.h>

#define BLOCK 32 /* keys that are taken together */

/* attention_prefill.c: rows of any number of tokens. */
void prefill_attention(struct pool *pool, const struct attention *attention, const struct row *rows, int num_rows);

INLINE int first_seen(const struct attention *a, int position) {
    return a->window ? max(0, position - a->window + 1) : 0;
}

INLINE const float *key_at(const struct attention *a, const struct row *row, int position, int kv_head) {
    int64_t page = row->pages[position / a->page_size];
    return a->keys + ((page * a->page_size + position % a->page_size) * a->kv_heads + kv_head) * a->head_dim;
}

INLINE const float *value_of(const struct attention *a, const float *key) { return a->values + (key - a->keys); }

/* Within some units in the last place: of the exponential, and near 0, where that would cancel, Cephes' polynomial. */
INLINE vec tanh_of(vec x) {
    vec square = x * x;
    vec p = all(-5.70498872745e-3f);
    p = p * square + all(2.06390887954e-2f);
    p = p * square + all(-5.37397155531e-2f);
    p = p * square + all(1.33314422036e-1f);
    p = p * square + all(-3.33332819422e-1f);
    return choose((ivec)(square < all(0.390625f)), p * square * x + x, all(1) - all(2) / (exp_of(x + x) + all(1)));
}

INLINE void cap(float *scores, int count, float softcap) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(&scores[i], all(softcap) * tanh_of(load(&scores[i]) / all(softcap)));
    for (; i < count; i++) scores[i] = softcap * tanhf(scores[i] / softcap);
}

#endif
