/* What the kernels share: 16 floats at a time, whatever the processor's own width; sums and exponentials of them. */

#ifndef MINT_LANES
#define MINT_LANES

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));

/* In a register, not loaded again wherever it is used. */
#ifdef __AVX512F__
#define HELD(x) __asm__("" : "+v"(x))
#else
#define HELD(x) (void)(x)
#endif

INLINE vf load(const char *base, int64_t at, int half) {
    if (!half) return *(const vf *)((const float *)base + at);
    vh bits = *(const vh *)((const uint16_t *)base + at);
    return (vf)(__builtin_convertvector(bits, vu) << 16);
}

/* The bits of a bfloat16, rounded to nearest even; NaN stays NaN. */
INLINE vu rounded(vf x) {
    vu bits = (vu)x;
    vi nan = (x != x);
    return (vu)((vi)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & ~nan) | ((vu)nan & 0x7fc0);
}

INLINE void store(char *base, int64_t at, vf x, int half) {
    if (half) *(vh *)((uint16_t *)base + at) = __builtin_convertvector(rounded(x), vh);
    else *(vf *)((float *)base + at) = x;
}

/* Of 32 bfloat16, those with even and with odd numbers. */
INLINE vf even(vf pairs) { return (vf)((vu)pairs << 16); }
INLINE vf odd(vf pairs) { return (vf)((vu)pairs & 0xffff0000u); }

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

INLINE vf firsts(vf a, vf b) { return SHUFFLED(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); }
INLINE vf seconds(vf a, vf b) { return SHUFFLED(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31); }

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
        for (int i = 0; i < width / 2; i++)
            a[i] = firsts(a[2 * i], a[2 * i + 1]) + seconds(a[2 * i], a[2 * i + 1]);
    return a[0];
}

INLINE vf larger(vf a, vf b) {
#ifdef __AVX512F__
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    vi first = a > b;
    return (vf)(((vi)a & first) | ((vi)b & ~first));
#endif
}

/* The same with the largest lane. */
INLINE vf maxima(vf *a) {
#pragma GCC unroll 4
    for (int width = LANES; width > 1; width /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < width / 2; i++)
            a[i] = larger(firsts(a[2 * i], a[2 * i + 1]), seconds(a[2 * i], a[2 * i + 1]));
    return a[0];
}

/* to[16 * w + i] = word w of row i, for 16 words from `at` bytes on. */
INLINE void turn_words(const char *const *rows, int64_t at, float *to) {
    vf a[LANES], b[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) a[i] = *(const vf *)(rows[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        b[i] = SHUFFLED(a[i], a[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        b[i + 1] = SHUFFLED(a[i], a[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            a[i + 2 * n] = SHUFFLED(b[i + n], b[i + n + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            a[i + 2 * n + 1] = SHUFFLED(b[i + n], b[i + n + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    /* quarter k of a[4 * q + c] is word 4 * k + c of rows 4 * q to 4 * q + 3 */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        vf low = SHUFFLED(a[c], a[4 + c], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        vf high = SHUFFLED(a[c], a[4 + c], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        vf low2 = SHUFFLED(a[8 + c], a[12 + c], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        vf high2 = SHUFFLED(a[8 + c], a[12 + c], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        *(vf *)(to + c * LANES) = SHUFFLED(low, low2, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        *(vf *)(to + (4 + c) * LANES) = SHUFFLED(low, low2, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        *(vf *)(to + (8 + c) * LANES) = SHUFFLED(high, high2, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        *(vf *)(to + (12 + c) * LANES) = SHUFFLED(high, high2, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

INLINE float sum(vf x) {
    x += halves(x);
    x += quarters(x);
    x += twos(x);
    x += ones(x);
    return x[0];
}

/* x in the first `count` lanes, and `other` in the rest. */
INLINE vf first_lanes(vf x, int64_t count, float other) {
    const vi numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi inside = numbers < (int32_t)(count < LANES ? count : LANES);
    return (vf)(((vi)x & inside) | ((vi)((vf){0} + other) & ~inside));
}

/* x but in the first `count` lanes, which are `other`. */
INLINE vf later_lanes(vf x, int64_t count, float other) {
    const vi numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi outside = numbers < (int32_t)count;
    return (vf)(((vi)x & ~outside) | ((vi)((vf){0} + other) & outside));
}

/* exp of x <= 0, to about one unit in the last place; 0 below -87; NaN of NaN. */
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
    vi small = x <= -87.0f;
    return (vf)((vi)(p * (vf)power) & ~small);
}

/* 1 / (1 + exp(-x)), and in `rest` 1 minus that, both without cancellation. */
INLINE vf sigmoid(vf x, vf *rest) {
    vi negative = x < 0.0f;
    vf e = exponential((vf)((vi)x | (vi)((vu){0} + 0x80000000u))); /* exp(-|x|) */
    vf large = 1.0f / (1.0f + e), small = e * large;
    *rest = (vf)(((vi)large & negative) | ((vi)small & ~negative));
    return (vf)(((vi)small & negative) | ((vi)large & ~negative));
}

/* `key` rounded down to a multiple of LANES. */
INLINE int64_t whole_lanes(int64_t key) { return key / LANES * LANES; }

/* Of up to 16 rows p: scores[p] from firsts[p] to keys[p] -> exp(scale * (scores - max)), with zeros on both sides up to
   multiples of LANES. Lane p of the result is 1 / their sum, to which exp(sinks[p] - scale * max) is added if there are
   sinks, 16 of them; they belong to the max, too. */
INLINE vf exponentials(float *const *scores, const int64_t *firsts, const int64_t *keys, int64_t count, float scale,
                       const float *sinks) {
    vf highest[LANES] = {{0}}, total[LANES] = {{0}};
    for (int64_t p = 0; p < count; p++) {
        float *own = scores[p];
        int64_t start = whole_lanes(firsts[p]), last = whole_lanes(keys[p] - 1);
        if (firsts[p] > start)
            *(vf *)(own + start) = later_lanes(*(vf *)(own + start), firsts[p] - start, -INFINITY);
        *(vf *)(own + last) = highest[p] = first_lanes(*(vf *)(own + last), keys[p] - last, -INFINITY);
        for (int64_t j = start; j < last; j += LANES) highest[p] = larger(*(vf *)(own + j), highest[p]);
    }
    vf most = maxima(highest);
    if (sinks) most = larger(*(const vf *)sinks / scale, most);
    for (int64_t p = 0; p < count; p++)
        for (int64_t j = whole_lanes(firsts[p]); j < keys[p]; j += LANES) {
            vf e = exponential((*(vf *)(scores[p] + j) - most[p]) * scale);
            *(vf *)(scores[p] + j) = e;
            total[p] += e;
        }
    vf all = sums(total);
    if (sinks) all += exponential(*(const vf *)sinks - most * scale);
    return 1.0f / all;
}

/* The first of `keys` keys that a query sees: all of them, or the last `window` ones. */
INLINE int64_t first_seen(int64_t keys, int64_t window) { return window && keys > window ? keys - window : 0; }

/* The rows of one packed forward; row r attends to the `prefix_count` rows from `prefix` on, then from `own` to itself. */
typedef struct {
    int64_t rows, total_heads, query_heads, kv_heads, longest;
    const int64_t *row, *prefix, *prefix_count, *own;
} Packed;

/* The rows from r on, but before `last`, that have the keys of one another, up to themselves. */
INLINE int64_t end_of_span(const Packed *p, int64_t r, int64_t last) {
    int64_t end = r + 1;
    while (end < last && p->own[end] == p->own[r] && p->prefix[end] == p->prefix[r] &&
           p->prefix_count[end] == p->prefix_count[r] && p->row[end] > p->row[end - 1])
        end++;
    return end;
}

#endif
