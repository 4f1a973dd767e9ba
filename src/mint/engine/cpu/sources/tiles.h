/* What the products share: vectors of 16 numbers of 32 bits, blocks of 16 x 16 of them turned, and sums of lanes. */

#ifndef MINT_TILES
#define MINT_TILES

#include <stdint.h>
#include <stdlib.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#include <immintrin.h>

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

/* Lane i of the result is the sum of the lanes of found[i], in their order; `sums` of lanes.h adds them in pairs. */
INLINE __m512 sum_rows(const __m512 *found) {
    float columns[LANES * LANES];
    transpose((const int32_t *)found, LANES, (int32_t *)columns, LANES);
    __m512 total = _mm512_loadu_ps(columns);
#pragma GCC unroll 16
    for (int i = 1; i < LANES; i++) total = _mm512_add_ps(total, _mm512_loadu_ps(columns + i * LANES));
    return total;
}
#endif

#endif
