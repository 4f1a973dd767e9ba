/* Numbers of two rows side by side in words of two bfloat16. */

#ifndef MINT_PAIRS
#define MINT_PAIRS

#ifdef __AVX512BF16__

#include <immintrin.h>

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

/* Rounded to bfloat16: 16 numbers of `first`, then those of `second`. */
INLINE __m512i rounded_in_turn(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

/* Rounded to bfloat16: word i is number i of `first` and number i of `second`. */
INLINE __m512i side_by_side(__m512 first, __m512 second) {
    const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                            20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(places, rounded_in_turn(first, second));
}

/* Of 32 numbers in each of two rows: the first 16 of both side by side, and the last 16. */
INLINE __m512i first_sides(__m512i row, __m512i next) {
    const __m512i places = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                            36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(row, places, next);
}
INLINE __m512i last_sides(__m512i row, __m512i next) {
    const __m512i places = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53,
                                            21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_permutex2var_epi16(row, places, next);
}

#endif
#endif
