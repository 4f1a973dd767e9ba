/* What the products share: vectors of 16 numbers of 32 bits, blocks of 16 x 16 of them turned, and sums of lanes.

   A vector of 16 lies in as many registers as the processor needs. A sum has the same order in all of them, and each step
   of a sum is one rounding, so that sets of instructions give the same bits in float32. */

#ifndef MINT_TILES
#define MINT_TILES

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#include <immintrin.h>
#define PART 16 /* numbers in a register */

typedef __m512 Vector;

INLINE Vector zeros(void) { return _mm512_setzero_ps(); }
INLINE Vector same(float x) { return _mm512_set1_ps(x); }
INLINE Vector loaded(const float *from) { return _mm512_loadu_ps(from); }
INLINE void put(float *to, Vector x) { _mm512_storeu_ps(to, x); }
INLINE Vector added(Vector a, Vector b) { return _mm512_add_ps(a, b); }
INLINE Vector scaled(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
INLINE Vector fused(Vector a, Vector b, Vector total) { return _mm512_fmadd_ps(a, b, total); }

/* The first `count` numbers, and zeros; and the way back. */
INLINE Vector loaded_first(const float *from, int64_t count) {
    return _mm512_maskz_loadu_ps(count < LANES ? (1 << count) - 1 : 0xffff, from);
}
INLINE void put_first(float *to, Vector x, int64_t count) {
    _mm512_mask_storeu_ps(to, count < LANES ? (1 << count) - 1 : 0xffff, x);
}

/* Of 32 bfloat16, those with even and with odd numbers. */
INLINE Vector even_halves(Vector pairs) { return (__m512)_mm512_slli_epi32((__m512i)pairs, 16); }
INLINE Vector odd_halves(Vector pairs) {
    return (__m512)_mm512_and_si512((__m512i)pairs, _mm512_set1_epi32((int)0xffff0000));
}

/* In a register, not loaded again wherever it is used. */
#define HOLD(x) __asm__("" : "+v"(x))

/* to[j * to_stride + i] = from[i * from_stride + j] for 16 x 16 pairs. */
INLINE void transpose(const int32_t *from, int64_t from_stride, int32_t *to, int64_t to_stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            a[i + 2 * half] = _mm512_unpacklo_epi64(b[i + half], b[i + 2 + half]);
            a[i + 2 * half + 1] = _mm512_unpackhi_epi64(b[i + half], b[i + 2 + half]);
        }
    /* a[4 * q + c] holds, in its quarter k, column 4 * k + c of rows 4 * q to 4 * q + 3 */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(even, even2, 0x88));
        _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(even, even2, 0xdd));
        _mm512_storeu_si512(to + (4 + c) * to_stride, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        _mm512_storeu_si512(to + (12 + c) * to_stride, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
}
#else
#ifdef __AVX2__
#include <immintrin.h>
#define PART 8 /* numbers in a register */
/* A register with one number in all places. `zeros + x` would be an addition: no compiler leaves it out. */
#define ALIKE(x) _mm256_set1_ps(x)
#define HOLD_PART(x) __asm__("" : "+x"(x))
#else
#define PART 4
#define ALIKE(x) ((Part){x, x, x, x})
#if defined(__aarch64__)
#define HOLD_PART(x) __asm__("" : "+w"(x))
#else
#define HOLD_PART(x) (void)(x)
#endif
#endif
#define PARTS (LANES / PART)

typedef float Part __attribute__((vector_size(4 * PART)));
typedef int32_t PartBits __attribute__((vector_size(4 * PART)));
typedef float LoosePart __attribute__((vector_size(4 * PART), aligned(4), may_alias));
typedef int32_t LooseBits __attribute__((vector_size(4 * PART), aligned(4), may_alias));
typedef int32_t Four __attribute__((vector_size(16)));
typedef int32_t LooseFour __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    Part part[PARTS];
} Vector;

#define BY_PARTS(EXPRESSION) \
    Vector made; \
    _Pragma("GCC unroll 4") for (int n = 0; n < PARTS; n++) made.part[n] = EXPRESSION; \
    return made;

INLINE Vector zeros(void) { BY_PARTS((Part){0}) }
INLINE Vector same(float x) { BY_PARTS(ALIKE(x)) }
INLINE Vector loaded(const float *from) { BY_PARTS(*(const LoosePart *)(from + n * PART)) }
INLINE void put(float *to, Vector x) {
#pragma GCC unroll 4
    for (int n = 0; n < PARTS; n++) *(LoosePart *)(to + n * PART) = x.part[n];
}
INLINE Vector added(Vector a, Vector b) { BY_PARTS(a.part[n] + b.part[n]) }
INLINE Vector scaled(Vector a, Vector b) { BY_PARTS(a.part[n] * b.part[n]) }

/* Compiled with -ffp-contract=fast: one rounding where the processor can multiply and add at once. */
INLINE Vector fused(Vector a, Vector b, Vector total) { BY_PARTS(a.part[n] * b.part[n] + total.part[n]) }

/* The first `count` numbers, and zeros; and the way back. */
INLINE Vector loaded_first(const float *from, int64_t count) {
    if (count >= LANES) return loaded(from);
    float found[LANES] = {0};
    memcpy(found, from, sizeof(float) * (count < 0 ? 0 : count));
    return loaded(found);
}
INLINE void put_first(float *to, Vector x, int64_t count) {
    if (count >= LANES) {
        put(to, x);
        return;
    }
    float found[LANES];
    put(found, x);
    memcpy(to, found, sizeof(float) * (count < 0 ? 0 : count));
}

/* Of 32 bfloat16, those with even and with odd numbers. */
INLINE Vector even_halves(Vector pairs) { BY_PARTS((Part)((PartBits)pairs.part[n] << 16)) }
INLINE Vector odd_halves(Vector pairs) {
    /* the mask stays in memory: a product needs all registers for its sums */
    static const int32_t mask[PART] = {[0 ... PART - 1] = (int32_t)0xffff0000};
    const int32_t *place = mask;
    __asm__("" : "+r"(place));
    BY_PARTS((Part)((PartBits)pairs.part[n] & *(const LooseBits *)place))
}

/* In registers, not loaded again wherever it is used. */
#define HOLD(x) \
    do { \
        _Pragma("GCC unroll 4") for (int n = 0; n < PARTS; n++) HOLD_PART((x).part[n]); \
    } while (0)

#ifdef __clang__
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (Four){__VA_ARGS__})
#endif

/* to[j * to_stride + i] = from[i * from_stride + j] for 16 x 16 pairs. */
INLINE void transpose(const int32_t *from, int64_t from_stride, int32_t *to, int64_t to_stride) {
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < LANES; j += 4) {
            const int32_t *own = from + i * from_stride + j;
            Four a = *(const LooseFour *)own, b = *(const LooseFour *)(own + from_stride);
            Four c = *(const LooseFour *)(own + 2 * from_stride), d = *(const LooseFour *)(own + 3 * from_stride);
            Four low = MIXED(a, b, 0, 4, 1, 5), high = MIXED(a, b, 2, 6, 3, 7);
            Four low2 = MIXED(c, d, 0, 4, 1, 5), high2 = MIXED(c, d, 2, 6, 3, 7);
            int32_t *place = to + j * to_stride + i;
            *(LooseFour *)place = MIXED(low, low2, 0, 1, 4, 5);
            *(LooseFour *)(place + to_stride) = MIXED(low, low2, 2, 3, 6, 7);
            *(LooseFour *)(place + 2 * to_stride) = MIXED(high, high2, 0, 1, 4, 5);
            *(LooseFour *)(place + 3 * to_stride) = MIXED(high, high2, 2, 3, 6, 7);
        }
}
#endif

/* Lane i of the result is the sum of the lanes of found[i], in their order; `sums` of lanes.h adds them in pairs. */
INLINE Vector sum_rows(const Vector *found) {
    float columns[LANES * LANES];
    transpose((const int32_t *)found, LANES, (int32_t *)columns, LANES);
    Vector total = loaded(columns);
#pragma GCC unroll 16
    for (int i = 1; i < LANES; i++) total = added(total, loaded(columns + i * LANES));
    return total;
}

#endif
