/* The decoder-only transformer of models/decoder.py, a step in one call: what Python would spend on calling kernels one
 * by one is longer than most of them. */
#include "surefoot.h"

#include <stddef.h>

/* Activations of a step, one after the other in its buffer. */
struct activations {
    float *normed;   /* [tokens, hidden] */
    float *qkv;      /* [tokens, heads + 2 * kv_heads, head_dim] */
    float *attended; /* [tokens, heads, head_dim] */
    float *gate_up;  /* [tokens, 2 * intermediate] */
    float *gated;    /* [tokens, intermediate] */
    float *tables;   /* of each rope: [2, tokens, size / 2] */
};

static float *take(float *buffer, int64_t *used, int64_t floats) {
    float *taken = buffer ? buffer + *used : NULL;
    *used += (floats + 15) / 16 * 16;
    return taken;
}

/* Returns how many floats of the buffer are used. */
static int64_t place(const struct decoder *d, int64_t tokens, float *buffer, struct activations *a) {
    int64_t used = 0;
    a->normed = take(buffer, &used, tokens * d->hidden);
    a->qkv = take(buffer, &used, tokens * (d->heads + 2 * d->kv_heads) * d->head_dim);
    a->attended = take(buffer, &used, tokens * d->heads * d->head_dim);
    a->gate_up = take(buffer, &used, tokens * 2 * d->intermediate);
    a->gated = take(buffer, &used, tokens * d->intermediate);
    a->tables = take(buffer, &used, tokens * d->head_dim * d->num_ropes);
    return used;
}

int64_t decoder_buffer_floats(const struct decoder *decoder, int32_t tokens) {
    struct activations activations;
    return place(decoder, tokens, NULL, &activations);
}

static void embed(const struct decoder *d, const struct step *step) {
    for (int token = 0; token < step->tokens; token++) {
        float *x = &step->hidden[(int64_t)token * d->hidden];
        linear_row(&d->embedding, step->token_ids[token], x);
        for (int i = 0; i < d->hidden; i++) x[i] *= d->embedding_scale;
    }
}

/* x += norm(linear(from)), or without a norm if `norm` is NULL. */
static void add_linear(struct pool *pool, const struct decoder *d, const struct step *step, const struct linear *from_linear,
                       const float *from, const float *norm, float *buffer) {
    if (!norm) {
        linear(pool, from_linear, from, step->tokens, step->hidden, 1);
        return;
    }
    linear(pool, from_linear, from, step->tokens, buffer, 0);
    rms_norm(pool, buffer, step->tokens, d->hidden, norm, d->norm_eps, buffer);
    add(pool, step->hidden, buffer, (int64_t)step->tokens * d->hidden);
}

static void attend(struct pool *pool, const struct decoder *d, const struct layer *layer, const struct step *step,
                   const struct activations *a) {
    int tokens = step->tokens;
    const float *tables = &a->tables[(int64_t)layer->rope * tokens * d->head_dim];
    struct kv_write write = {
        a->qkv,     layer->qk_norm, tables,     layer->keys, layer->values, &step->places[(int64_t)layer->kv_group * tokens], tokens,
        d->heads,   d->kv_heads,    d->head_dim, d->ropes[layer->rope].size, d->norm_eps};
    rotate_and_write(pool, &write);
    struct attention how = {.q = a->qkv,
                            .out = a->attended,
                            .keys = layer->keys,
                            .values = layer->values,
                            .rows = &step->rows[layer->kv_group * step->num_rows],
                            .num_rows = step->num_rows,
                            .q_stride = (d->heads + 2 * d->kv_heads) * d->head_dim,
                            .heads = d->heads,
                            .kv_heads = d->kv_heads,
                            .head_dim = d->head_dim,
                            .page_size = d->page_size,
                            .window = d->windows[layer->kv_group],
                            .scale = d->attention_scale,
                            .softcap = d->attention_softcap};
    attention(pool, &how);
}

void decoder_forward(struct pool *pool, const struct decoder *d, const struct step *step) {
    struct activations a;
    place(d, step->tokens, step->buffer, &a);
    embed(d, step);
    for (int rope = 0; rope < d->num_ropes; rope++)
        rope_tables(pool, &d->ropes[rope], step->positions, step->tokens, &a.tables[(int64_t)rope * step->tokens * d->head_dim]);
    for (const struct layer *layer = d->layers; layer < d->layers + d->num_layers; layer++) {
        rms_norm(pool, step->hidden, step->tokens, d->hidden, layer->attention_norm, d->norm_eps, a.normed);
        linear(pool, &layer->qkv, a.normed, step->tokens, a.qkv, 0);
        attend(pool, d, layer, step, &a);
        add_linear(pool, d, step, &layer->attention_out, a.attended, layer->post_attention_norm, a.normed);
        rms_norm(pool, step->hidden, step->tokens, d->hidden, layer->mlp_norm, d->norm_eps, a.normed);
        linear(pool, &layer->gate_up, a.normed, step->tokens, a.gate_up, 0);
        activation_mul(pool, a.gate_up, step->tokens, d->intermediate, d->activation, a.gated);
        add_linear(pool, d, step, &layer->down, a.gated, layer->post_mlp_norm, a.normed);
    }
}

void decoder_logits(struct pool *pool, const struct decoder *d, float *hidden, int32_t rows, float *logits) {
    rms_norm(pool, hidden, rows, d->hidden, d->norm, d->norm_eps, hidden);
    linear(pool, &d->lm_head, hidden, rows, logits, 0);
    if (d->logits_softcap) soft_cap(pool, logits, (int64_t)rows * d->lm_head.outputs, d->logits_softcap);
}
