/* Panels of weights: see linear.c. */
#ifndef SUREFOOT_LINEAR_H
#define SUREFOOT_LINEAR_H

#include "surefoot.h"

#define PANEL (2 * LANES) /* outputs of a panel */
#define GROUP 32          /* inputs of a group: those that share a scale in GGUF's blocks of 32 */
#define CHUNK 8           /* inputs of a group whose four bits share a word */
#define PREFETCH 5120     /* bytes between a group that is read and the one that is asked for */
#define DEPTH 1024        /* inputs of a panel that are expanded at once: 128 KiB with AVX-512 */

typedef uint16_t half; /* the bits of an IEEE 754 binary16 */
typedef uint32_t uvec_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

struct group_w4 { /* w = d * q + m */
    half d[PANEL], m[PANEL];
    uint32_t q[GROUP / CHUNK][PANEL]; /* inputs 8i + 0, 2, 4, 6, 1, 3, 5, 7, from the lowest four bits on */
};
struct group_w8 { /* w = d * q */
    half d[PANEL];
    int8_t q[GROUP][PANEL];
};
struct group_w16 {
    half w[GROUP][PANEL];
};
struct group_w32 {
    float w[GROUP][PANEL];
};

INLINE int groups_of(const struct linear *linear) { return (linear->inputs + GROUP - 1) / GROUP; }

INLINE int64_t group_bytes(enum weight_format format) {
    switch (format) {
    case W4: return sizeof(struct group_w4);
    case W8: return sizeof(struct group_w8);
    case W16: return sizeof(struct group_w16);
    case W32: return sizeof(struct group_w32);
    }
    return 0;
}

INLINE const void *group_of(const struct linear *linear, int panel, int group) {
    return (const char *)linear->panels + ((int64_t)panel * groups_of(linear) + group) * group_bytes(linear->format);
}

/* Asks for the group that will be read a few groups after this one: CPUs follow no stream over a page's edge. */
INLINE void prefetch_group(enum weight_format format, const void *group) {
    for (int64_t line = 0; line < group_bytes(format); line += 64)
        __builtin_prefetch((const char *)group + PREFETCH + line);
}

/* ---- Numbers to vectors ---------------------------------------------------------------------------------------- */

#if LANES == 4 && !defined(__aarch64__)
/* A half's exponent is 112 less than a float's; multiplying by 2^112 also puts its subnormal numbers right. */
INLINE float float_of_half(half bits) {
    union { uint32_t bits; float value; } number = {.bits = (uint32_t)(bits & 0x7FFF) << 13};
    number.value *= 0x1p112f;
    if ((bits & 0x7C00) == 0x7C00) number.bits = 0x7F800000 | (uint32_t)(bits & 0x3FF) << 13;
    number.bits |= (uint32_t)(bits & 0x8000) << 16;
    return number.value;
}
#endif

INLINE vec floats_of_halves(const half *from) {
#if LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    vec x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = float_of_half(from[lane]);
    return x;
#endif
}

INLINE float float_of(half bits) {
    half bits_of_all[LANES] = {bits};
    return floats_of_halves(bits_of_all)[0];
}

INLINE vec floats_of_bytes(const int8_t *from) {
#if LANES == 16
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    return __builtin_convertvector(*(const bytes *)from, vec);
#endif
}

/* Four bits of each lane: those at 4 * place. */
INLINE vec nibbles_of(uvec packed, int place) {
#if LANES == 16
    /* A permutation of 0.0 to 15.0 looks at the lowest four bits of each lane only. */
    const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_permutexvar_ps((__m512i)(packed >> (4 * place)), numbers);
#else
    return __builtin_convertvector((ivec)(packed >> (4 * place) & 15), vec);
#endif
}

/* ---- One group of a panel -------------------------------------------------------------------------------------- */

#define VECS (PANEL / LANES)

/* Weights of all outputs for input i of a chunk of the group, without their scale. */
INLINE void quants(enum weight_format format, const void *group, int chunk, int i, vec w[VECS]) {
    int k = chunk * CHUNK + i;
    for (int v = 0; v < VECS; v++) {
        int at = v * LANES;
        switch (format) {
        case W4: w[v] = nibbles_of(*(const uvec_at *)&((const struct group_w4 *)group)->q[chunk][at], i / 2 + i % 2 * 4); break;
        case W8: w[v] = floats_of_bytes(&((const struct group_w8 *)group)->q[k][at]); break;
        case W16: w[v] = floats_of_halves(&((const struct group_w16 *)group)->w[k][at]); break;
        case W32: w[v] = load(&((const struct group_w32 *)group)->w[k][at]); break;
        }
    }
}

struct scales {
    vec d[VECS], m[VECS];
};

INLINE struct scales scales_of(enum weight_format format, const void *group) {
    struct scales scales;
    for (int v = 0; v < VECS; v++) {
        scales.d[v] = all(1), scales.m[v] = all(0);
        if (format == W4) {
            scales.d[v] = floats_of_halves(&((const struct group_w4 *)group)->d[v * LANES]);
            scales.m[v] = floats_of_halves(&((const struct group_w4 *)group)->m[v * LANES]);
        }
        if (format == W8) scales.d[v] = floats_of_halves(&((const struct group_w8 *)group)->d[v * LANES]);
    }
    return scales;
}

/* Weights of all outputs for input i of a chunk of the group. */
INLINE void weights(enum weight_format format, const void *group, int chunk, int i, struct scales scales, vec w[VECS]) {
    quants(format, group, chunk, i, w);
    for (int v = 0; v < VECS; v++) {
        if (format == W4) w[v] = w[v] * scales.d[v] + scales.m[v];
        if (format == W8) w[v] = w[v] * scales.d[v];
    }
}

/* ---- linear_amx.c ---------------------------------------------------------------------------------------------- */

/* `linear` on the matrix unit. Returns 0, with nothing done, where there is none, or none for the format. */
int linear_amx(struct pool *pool, const struct linear *linear, const float *x, int rows, float *y, int add);

#endif
