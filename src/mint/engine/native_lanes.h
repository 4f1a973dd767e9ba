/* What the kernels share: 16 floats at a time, whatever the processor's own width; sums and exponentials of them. */

#ifndef MINT_NATIVE_LANES
#define MINT_NATIVE_LANES

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));

INLINE vf load(const char *base, int64_t at, int half) {
    if (!half) return *(const vf *)((const float *)base + at);
    vh bits = *(const vh *)((const uint16_t *)base + at);
    return (vf)(__builtin_convertvector(bits, vu) << 16);
}

INLINE void store(char *base, int64_t at, vf x, int half) {
    if (!half) {
        *(vf *)((float *)base + at) = x;
        return;
    }
    vu bits = (vu)x; /* round to nearest even; NaN stays NaN */
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vi nan = (x != x);
    rounded = (vu)((vi)rounded & ~nan) | ((vu)nan & 0x7fc0);
    *(vh *)((uint16_t *)base + at) = __builtin_convertvector(rounded, vh);
}

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

INLINE vf pairs(vf a, vf b) {
    return SHUFFLED(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLED(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Lanes 8, 4, 2 and 1 places on. */
INLINE vf halves(vf x) { return SHUFFLED(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE vf quarters(vf x) { return SHUFFLED(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); }
INLINE vf twos(vf x) { return SHUFFLED(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13); }
INLINE vf ones(vf x) { return SHUFFLED(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); }

/* Lane i of the result is the sum of the lanes of a[i]. */
INLINE vf sums(vf *a) {
#pragma GCC unroll 4
    for (int width = LANES; width > 1; width /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < width / 2; i++) a[i] = pairs(a[2 * i], a[2 * i + 1]);
    return a[0];
}

INLINE float sum(vf x) {
    x += halves(x);
    x += quarters(x);
    x += twos(x);
    x += ones(x);
    return x[0];
}

INLINE vf larger(vf a, vf b) {
    vi first = a > b;
    return (vf)(((vi)a & first) | ((vi)b & ~first));
}

/* exp of x <= 0, to about one unit in the last place; 0 below -87. */
INLINE vf exponential(vf x) {
    vf shifted = x * 1.44269504088896341f + 12582912.0f;
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    vi large = x > -87.0f;
    return (vf)((vi)(p * (vf)power) & large);
}

/* scores [keys] -> exp(scores - max), with zeros up to a multiple of LANES; returns 1 / their sum. */
INLINE float exponentials(float *scores, int64_t keys) {
    int64_t padded = (keys + LANES - 1) / LANES * LANES;
    for (int64_t j = keys; j < padded; j++) scores[j] = -INFINITY;
    vf highest = *(vf *)scores;
    for (int64_t j = LANES; j < padded; j += LANES) highest = larger(*(vf *)(scores + j), highest);
    highest = larger(halves(highest), highest);
    highest = larger(quarters(highest), highest);
    highest = larger(twos(highest), highest);
    const float most = larger(ones(highest), highest)[0];
    /* what is not finite must not be hidden: a NaN anywhere makes the sum one */
    vf total = {0};
    for (int64_t j = 0; j < padded; j += LANES) {
        vf x = *(vf *)(scores + j);
        vf e = exponential(x - most);
        vi nan = (x != x);
        e = (vf)(((vi)e & ~nan) | ((vi)x & nan));
        *(vf *)(scores + j) = e;
        total += e;
    }
    return 1.0f / sum(total);
}

/* The rows of one packed forward; row r attends to the `prefix_count` rows from `prefix` on, then from `own` to itself. */
typedef struct {
    int64_t rows, total_heads, query_heads, kv_heads, longest;
    const int64_t *row, *prefix, *prefix_count, *own;
} Packed;

#endif
