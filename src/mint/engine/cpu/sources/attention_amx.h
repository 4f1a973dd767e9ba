/* The products of `attention.c` in bfloat16 by the matrix registers of AMX.

   A score is summed over 32 numbers of the head dimension at a time, in a register's own order. Shares are rounded to
   bfloat16 before values are mixed, 32 keys at a time: keys 0 to 31 of a query, 32 to 63, and so on, wherever they are
   stored. What a query does not see has a share of 0. The normaliser is the sum of the shares before they are rounded.
   0 times what is not finite is no zero, so a value that is not finite may make earlier queries of its sequence NaN, too.

   Letters: D head dimension; a word is two bfloat16. */

#ifndef MINT_ATTENTION_AMX
#define MINT_ATTENTION_AMX

#include "amx.h"
#include "lanes.h"
#include "pairs.h"

#define CHUNK 32 /* keys that are mixed together */

INLINE int64_t whole_chunks(int64_t key) { return key / CHUNK * CHUNK; }
INLINE int64_t up_to_chunk(int64_t key) { return whole_chunks(key + CHUNK - 1); }

#define FEW 16 /* queries that one register holds, a number of each side by side */

/* scores[p][j] = queries[p] [words] . key j, for `count` keys as they lie, `stride` bytes apart, and up to 15 more, for FEW
   or fewer queries: a register holds 16 keys, another one the same 16 words of all queries. */
static void score_few(int64_t few, const int32_t *const *queries, int64_t words, const char *keys, int64_t stride,
                      int64_t count, float *const *scores, int64_t at) {
    int32_t columns[FEW * 128]; /* heads have up to 256 numbers */
    float found[4 * LANES * FEW] __attribute__((aligned(64)));
    const __m512i places = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(few));
    for (int64_t p = 0; p < few; p++)
        for (int64_t w = 0; w < words; w++) columns[w * few + p] = queries[p][w];
    AmxShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = LANES, shapes.row_bytes[i] = i == 4 || i == 5 ? 64 : 4 * few;
    set_shapes(&shapes);
    for (int64_t j = 0; j < count; j += 4 * LANES) {
        const int64_t blocks = count - j > 3 * LANES ? 4 : (count - j + LANES - 1) / LANES;
        const char *key = keys + j * stride;
        __asm__ volatile("" : : : "memory"); /* as in amx.h */
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t w = 0; w < words; w += LANES, key += 4 * LANES) {
            _tile_loadd(6, columns + w * few, 4 * few);
            _tile_loadd(4, key, stride);
            _tile_dpbf16ps(0, 4, 6);
            if (blocks > 1) _tile_loadd(5, key + LANES * stride, stride);
            if (blocks > 1) _tile_dpbf16ps(1, 5, 6);
            if (blocks > 2) _tile_loadd(4, key + 2 * LANES * stride, stride);
            if (blocks > 2) _tile_dpbf16ps(2, 4, 6);
            if (blocks > 3) _tile_loadd(5, key + 3 * LANES * stride, stride);
            if (blocks > 3) _tile_dpbf16ps(3, 5, 6);
        }
        _tile_stored(0, found, 4 * few);
        if (blocks > 1) _tile_stored(1, found + LANES * few, 4 * few);
        if (blocks > 2) _tile_stored(2, found + 2 * LANES * few, 4 * few);
        if (blocks > 3) _tile_stored(3, found + 3 * LANES * few, 4 * few);
        __asm__ volatile("" : : : "memory");
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t p = 0; p < few; p++)
                _mm512_storeu_ps(scores[p] + at + j + b * LANES,
                                 _mm512_i32gather_ps(places, found + b * LANES * few + p, 4));
    }
}

/* Values as they lie: `first_count` rows, `first`, and behind them `rest_count` others, `stride` bytes apart. */
typedef struct {
    const char *first, *rest;
    int64_t first_count, rest_count, stride;
} Values;

INLINE const char *value_row(const Values *in, int64_t j) {
    if (j < in->first_count) return in->first + j * in->stride;
    j -= in->first_count;
    return j < in->rest_count ? in->rest + j * in->stride : 0;
}

/* panels [D / 16, words, 16] of pairs of rows; zeros follow the last row. */
static void pair_values(const Values *in, int64_t dim, int64_t words, int32_t *panels) {
    for (int64_t w = 0; w < words; w++, panels += LANES) {
        const char *row = value_row(in, 2 * w), *next = value_row(in, 2 * w + 1);
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            __m512i a = row ? _mm512_loadu_si512(row + 2 * d) : _mm512_setzero_si512();
            __m512i b = next ? _mm512_loadu_si512(next + 2 * d) : _mm512_setzero_si512();
            int32_t *to = panels + d / LANES * words * LANES;
            _mm512_storeu_si512(to, first_sides(a, b));
            _mm512_storeu_si512(to + words * LANES, last_sides(a, b));
        }
    }
}

/* to [words], the shares of keys `start` to `stop`, multiples of CHUNK, of a query that sees keys `first` to `last` alone;
   around them there are zeros up to multiples of 16. */
static void round_shares(const float *shares, int64_t start, int64_t stop, int64_t first, int64_t last, int32_t *to) {
    for (int64_t j = start; j < stop; j += CHUNK, to += CHUNK / 2) {
        __m512 own[2];
        for (int n = 0; n < 2; n++) {
            const int64_t at = j + n * LANES;
            own[n] = at + LANES > first && at < last ? _mm512_loadu_ps(shares + at) : _mm512_setzero_ps();
        }
        _mm512_storeu_si512(to, rounded_in_turn(own[0], own[1]));
    }
}

/* out [D] in bfloat16 = mixed [D] * inverse. */
INLINE void round_mixed(const float *mixed, int64_t dim, float inverse, char *out) {
    const __m512 factor = _mm512_set1_ps(inverse);
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        __m512 first = _mm512_loadu_ps(mixed + d) * factor, second = _mm512_loadu_ps(mixed + d + LANES) * factor;
        _mm512_storeu_si512(out + 2 * d, rounded_in_turn(first, second));
    }
}

#endif
