/* What the kernels share: as many floats at a time as the processor has lanes; sums and exponentials of them.

   The number of lanes decides in which order sums are added up, and so the last bits. GCC computes vectors that are wider
   than a register in memory, twenty times slower. */

#ifndef MINT_LANES
#define MINT_LANES

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2)));

/* In a register, not loaded again wherever it is used. */
#if defined(__AVX512F__)
#define HELD(x) __asm__("" : "+v"(x))
#elif defined(__AVX2__)
#define HELD(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define HELD(x) __asm__("" : "+w"(x))
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

/* The processor's own instruction makes numbers below 2^-126 zero; `rounded` does not. */
INLINE void store(char *base, int64_t at, vf x, int half) {
    if (!half) *(vf *)((float *)base + at) = x;
#ifdef __AVX512BF16__
    else _mm256_storeu_si256((__m256i *)((uint16_t *)base + at), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    else *(vh *)((uint16_t *)base + at) = __builtin_convertvector(rounded(x), vh);
#endif
}

/* Of pairs of bfloat16, those with even and with odd numbers. */
INLINE vf even(vf pairs) { return (vf)((vu)pairs << 16); }
INLINE vf odd(vf pairs) { return (vf)((vu)pairs & 0xffff0000u); }

/* total + a * b for words of 32 bits: floats, or two bfloat16 side by side. */
INLINE vf add_words(vf total, vf a, vf b, const int half) {
    if (!half) return total + a * b;
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    total += even(a) * even(b);
    return total + odd(a) * odd(b);
#endif
}

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* Of pairs of numbers in a and then b, the first ones and the second ones; and pairs made of a and b. Then lanes 8, 4, 2
   and 1 places on. */
#if LANES == 16
INLINE vf firsts(vf a, vf b) { return SHUFFLED(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); }
INLINE vf seconds(vf a, vf b) { return SHUFFLED(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31); }
INLINE vf first_pairs(vf a, vf b) { return SHUFFLED(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
INLINE vf last_pairs(vf a, vf b) { return SHUFFLED(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
INLINE vf halves(vf x) { return SHUFFLED(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE vf quarters(vf x) { return SHUFFLED(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); }
INLINE vf twos(vf x) { return SHUFFLED(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13); }
INLINE vf ones(vf x) { return SHUFFLED(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); }
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
INLINE vf firsts(vf a, vf b) { return SHUFFLED(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
INLINE vf seconds(vf a, vf b) { return SHUFFLED(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
INLINE vf first_pairs(vf a, vf b) { return SHUFFLED(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE vf last_pairs(vf a, vf b) { return SHUFFLED(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
INLINE vf quarters(vf x) { return SHUFFLED(x, x, 4, 5, 6, 7, 0, 1, 2, 3); }
INLINE vf twos(vf x) { return SHUFFLED(x, x, 2, 3, 0, 1, 6, 7, 4, 5); }
INLINE vf ones(vf x) { return SHUFFLED(x, x, 1, 0, 3, 2, 5, 4, 7, 6); }
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
INLINE vf firsts(vf a, vf b) { return SHUFFLED(a, b, 0, 2, 4, 6); }
INLINE vf seconds(vf a, vf b) { return SHUFFLED(a, b, 1, 3, 5, 7); }
INLINE vf first_pairs(vf a, vf b) { return SHUFFLED(a, b, 0, 4, 1, 5); }
INLINE vf last_pairs(vf a, vf b) { return SHUFFLED(a, b, 2, 6, 3, 7); }
INLINE vf twos(vf x) { return SHUFFLED(x, x, 2, 3, 0, 1); }
INLINE vf ones(vf x) { return SHUFFLED(x, x, 1, 0, 3, 2); }
#define NUMBERS {0, 1, 2, 3}
#endif

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
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
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

/* to[LANES * w + i] = word w of row i, for LANES words from `at` bytes on. */
#if LANES == 16
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
#else
typedef int32_t Four __attribute__((vector_size(16), aligned(4), may_alias));

#ifdef __clang__
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (Four){__VA_ARGS__})
#endif

INLINE void turn_words(const char *const *rows, int64_t at, float *to) {
#pragma GCC unroll 2
    for (int i = 0; i < LANES; i += 4)
#pragma GCC unroll 2
        for (int w = 0; w < LANES; w += 4) {
            Four a = *(const Four *)(rows[i] + at + 4 * w), b = *(const Four *)(rows[i + 1] + at + 4 * w);
            Four c = *(const Four *)(rows[i + 2] + at + 4 * w), d = *(const Four *)(rows[i + 3] + at + 4 * w);
            Four low = MIXED(a, b, 0, 4, 1, 5), high = MIXED(a, b, 2, 6, 3, 7);
            Four low2 = MIXED(c, d, 0, 4, 1, 5), high2 = MIXED(c, d, 2, 6, 3, 7);
            float *place = to + w * LANES + i;
            *(Four *)place = MIXED(low, low2, 0, 1, 4, 5);
            *(Four *)(place + LANES) = MIXED(low, low2, 2, 3, 6, 7);
            *(Four *)(place + 2 * LANES) = MIXED(high, high2, 0, 1, 4, 5);
            *(Four *)(place + 3 * LANES) = MIXED(high, high2, 2, 3, 6, 7);
        }
}
#undef MIXED
#endif

INLINE float sum(vf x) {
#if LANES >= 16
    x += halves(x);
#endif
#if LANES >= 8
    x += quarters(x);
#endif
    x += twos(x);
    x += ones(x);
    return x[0];
}

INLINE float largest_lane(vf x) {
#if LANES >= 16
    x = larger(halves(x), x);
#endif
#if LANES >= 8
    x = larger(quarters(x), x);
#endif
    x = larger(twos(x), x);
    return larger(ones(x), x)[0];
}

/* x in the first `count` lanes, and `other` in the rest. */
INLINE vf first_lanes(vf x, int64_t count, float other) {
    const vi numbers = NUMBERS;
    vi inside = numbers < (int32_t)(count < LANES ? count : LANES);
    return (vf)(((vi)x & inside) | ((vi)((vf){0} + other) & ~inside));
}

/* x but in the first `count` lanes, which are `other`. */
INLINE vf later_lanes(vf x, int64_t count, float other) {
    const vi numbers = NUMBERS;
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

/* Of up to LANES rows p: scores[p] from firsts[p] to keys[p] -> exp(scale * (scores - max)), with zeros on both sides up to
   multiples of LANES. Lane p of the result is 1 / their sum, to which exp(sinks[p] - scale * max) is added if there are
   sinks, LANES of them; they belong to the max, too. */
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
