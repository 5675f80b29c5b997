/* The native CPU kernels: plain C, compiled on first use for the CPU that they run on (native/library.py).
 *
 * Numbers are fp32. Vectors are the compiler's: `vec` has as many lanes as the widest register of the target, so one
 * source serves AVX-512, AVX2 and Arm NEON. Where an instruction set has something better, an #if says so.
 */
#ifndef SUREFOOT_H
#define SUREFOOT_H

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef float vec_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any address */

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *from) { return *(const vec_at *)from; }
INLINE void store(float *to, vec x) { *(vec_at *)to = x; }
INLINE vec all(float x) { return x - (vec){}; } /* x - 0 is x, which compilers know; x + 0 is not for x = -0 */

INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec larger_of(vec a, vec b) { return choose((ivec)(a > b), a, b); }
INLINE float larger(float a, float b) { return a > b ? a : b; }
INLINE int min(int a, int b) { return a < b ? a : b; }
INLINE int max(int a, int b) { return a > b ? a : b; }
INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }

INLINE float sum_of(vec x) {
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)x);
#elif LANES == 8
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

INLINE float largest_of(vec x) {
    float largest = x[0];
    for (int lane = 1; lane < LANES; lane++) largest = larger(largest, x[lane]);
    return largest;
}

/* e^x. Within 2 units in the last place for -87 < x < 88; 0 below, infinity above; NaN for NaN. The method is the usual
 * one: x = n ln 2 + r with |r| <= ln 2 / 2, and e^r as a polynomial: that of Cephes' expf (S. Moshier). */
INLINE vec exp_of(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: a number plus this is rounded to an integer, in its lowest bits */
    vec shifted = x * all(1.44269504f) + all(magic);
    vec n = shifted - all(magic);
    vec r = x - n * all(0.693359375f) + n * all(2.12194440e-4f);
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * (r * r) + r + all(1);
    vec power = (vec)(((ivec)shifted << 23) + 0x3F800000); /* 2^n: the magic number's own bits are shifted out */
    vec y = choose((ivec)(x < all(-87.0f)), all(0), p * power);
    return choose((ivec)(x > all(88.0f)), all(__builtin_inff()), y);
}

/* ---- pool.c: threads -------------------------------------------------------------------------------------------- */

struct pool;
typedef void task_function(const void *args, int task, int thread);

struct pool *pool_create(int threads);
void pool_destroy(struct pool *pool);
int pool_threads(const struct pool *pool);
/* Runs function(args, task, thread) for each task from 0 to tasks - 1, and returns when all have ended. The calling
 * thread takes part as thread 0. */
void parallel_for(struct pool *pool, int tasks, task_function *function, const void *args);
/* At least so many bytes for the caller's next loop, aligned to 64. NULL if the system has none. */
void *pool_scratch(struct pool *pool, int64_t bytes);

/* ---- linear.c: matrix products ---------------------------------------------------------------------------------- */

enum weight_format { W4, W8, W16, W32 };

struct linear {
    int32_t format; /* enum weight_format */
    int32_t inputs, outputs;
    void *panels;      /* of linear_bytes */
    const float *bias; /* [outputs], or NULL */
};

/* Of `panels`, which are to begin at a multiple of 64 and to be zero before they are packed. */
int64_t linear_bytes(const struct linear *linear);
/* Packs rows `first` to `first + count - 1` of W. `rows` holds these, each contiguous: GGUF blocks of Q4_1 for W4 and of
 * Q8_0 for W8, fp16 numbers for W16, fp32 for W32. W4 and W8 need a multiple of 32 inputs. */
void linear_pack(const struct linear *linear, const void *rows, int64_t first, int64_t count);
/* Writes row `row` of W: [inputs]. */
void linear_row(const struct linear *linear, int64_t row, float *to);
/* y = x W^T + bias, or y += that. x: [rows, inputs], y: [rows, outputs], contiguous. */
void linear(struct pool *pool, const struct linear *linear, const float *x, int32_t rows, float *y, int32_t add);

/* ---- attention.c ------------------------------------------------------------------------------------------------ */

/* One row of a step: tokens of one sequence. Their keys and values are in the cache already. */
struct row {
    int32_t first;        /* its first token, in the step */
    int32_t count;        /* 1 for a decode row */
    int32_t start;        /* position of that token */
    const int64_t *pages; /* page ids from position 0 on; of those that no token sees, none is read */
};

struct attention {
    const float *q; /* [tokens, heads, head_dim], tokens q_stride floats apart */
    float *out;     /* [tokens, heads, head_dim], contiguous */
    const float *keys, *values; /* [pages, page_size, kv_heads, head_dim] */
    const struct row *rows;
    int32_t num_rows, q_stride, heads, kv_heads, head_dim, page_size;
    int32_t window; /* tokens that a token sees, itself included; 0: all up to itself */
    float scale, softcap; /* softcap 0: none */
};

/* softmax(cap(scale * q k^T)) v over the tokens that each token sees; cap(x) = softcap * tanh(x / softcap). */
void attention(struct pool *pool, const struct attention *attention);

/* ---- elementwise.c ---------------------------------------------------------------------------------------------- */

/* y = x / sqrt(mean(x^2) + eps) * weight. x, y: [rows, size], weight: [size]. y may be x. */
void rms_norm(struct pool *pool, const float *x, int32_t rows, int32_t size, const float *weight, float eps, float *y);

enum activation { SILU, GELU_TANH };

/* y = activation(gate) * up. gate_up: [rows, 2 * size], the gate in the first half; y: [rows, size]. */
void activation_mul(struct pool *pool, const float *gate_up, int32_t rows, int32_t size, int32_t activation, float *y);
/* to += x. [count] */
void add(struct pool *pool, float *to, const float *x, int64_t count);
/* x = limit * tanh(x / limit). [count] */
void soft_cap(struct pool *pool, float *x, int64_t count, float limit);

struct rope {
    const float *inverse_frequencies; /* [size / 2] */
    int32_t size;                     /* elements of a head that are rotated; element i is paired with i + size / 2 */
    float magnitude;                  /* of cosines and sines */
};

/* [tokens, size / 2] cosines, then as many sines. */
void rope_tables(struct pool *pool, const struct rope *rope, const int64_t *positions, int32_t tokens, float *tables);

struct kv_write {
    float *qkv;           /* [tokens, heads + 2 * kv_heads, head_dim] */
    const float *qk_norm; /* [heads + kv_heads, head_dim], or NULL: scales of a norm of each head before it is rotated */
    const float *tables;  /* from rope_tables */
    float *keys, *values; /* [pages, page_size, kv_heads, head_dim] */
    const int64_t *places; /* [tokens]: page * page_size + offset */
    int32_t tokens, heads, kv_heads, head_dim, rotated;
    float norm_eps;
};

/* Rotates queries and keys in place, and writes keys and values to their places in the cache. */
void rotate_and_write(struct pool *pool, const struct kv_write *write);

/* ---- sampling.c -------------------------------------------------------------------------------------------------- */

/* The first of each row's largest logits, and whether all of the row are finite. logits: [rows, vocab]. */
void greedy(struct pool *pool, const float *logits, int32_t rows, int32_t vocab, int64_t *ids, uint8_t *finite);

/* ---- decoder.c: a whole step ------------------------------------------------------------------------------------ */

struct layer {
    const float *attention_norm, *mlp_norm;           /* [hidden] */
    const float *post_attention_norm, *post_mlp_norm; /* [hidden], or NULL */
    const float *qk_norm;                             /* as in struct kv_write */
    struct linear qkv, attention_out, gate_up, down;
    float *keys, *values; /* the layer's cache */
    int32_t kv_group, rope;
};

struct decoder {
    int32_t num_layers, hidden, intermediate, heads, kv_heads, head_dim, page_size, activation, num_ropes;
    float norm_eps, attention_scale, attention_softcap, embedding_scale, logits_softcap; /* softcap 0: none */
    const struct layer *layers;
    const struct rope *ropes;
    const int32_t *windows; /* of each KV group; 0: none */
    const float *norm;      /* [hidden] */
    struct linear embedding, lm_head;
};

struct step {
    int32_t tokens, num_rows;
    const int64_t *token_ids, *positions; /* [tokens] */
    const int64_t *places;                /* [KV groups, tokens] */
    const struct row *rows;               /* [KV groups, num_rows], decode rows first */
    float *hidden;                        /* [tokens, hidden]: the result, before the last norm */
    float *buffer;                        /* of decoder_buffer_floats */
};

int64_t decoder_buffer_floats(const struct decoder *decoder, int32_t tokens);
void decoder_forward(struct pool *pool, const struct decoder *decoder, const struct step *step);
/* logits: [rows, outputs of the head]; hidden: [rows, hidden], overwritten. */
void decoder_logits(struct pool *pool, const struct decoder *decoder, float *hidden, int32_t rows, float *logits);

#endif
