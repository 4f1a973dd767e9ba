/* The inner loops of a product: a tile of up to 6 rows and 4 panels of 16 outputs, over a piece of the inputs. */

#ifndef MINT_PRODUCT_TILES
#define MINT_PRODUCT_TILES

#include "tiles.h"

#ifdef __AVX512F__
#define ROWS 6         /* of a tile, and */
#define PANELS 4       /* so many panels: 24 sums, 4 vectors of weights and a row's number fit into 32 registers */

/* Of a sum over all inputs the piece over those that x has: `words` of them, a row's `stride` after the last one's. */
typedef struct {
    const int32_t *x;
    int64_t stride, words, panel; /* words of a whole panel */
    int begins, ends;
    int64_t outputs;
    const float *residual; /* [rows, O], or missing */
    float *out;            /* [rows, O] */
} Piece;

/* total + x * weight; in bfloat16, of a pair of inputs. */
INLINE __m512 multiplied(const int half, __m512 total, __m512i x, __m512i weight) {
#ifdef __AVX512BF16__
    if (half) return _mm512_dpbf16_ps(total, (__m512bh)x, (__m512bh)weight);
#endif
    return _mm512_fmadd_ps((__m512)x, (__m512)weight, total);
}

/* out[at], and so on for the rows and panels. Every `step` bytes from `ahead` on will be wanted next. */
INLINE void tile(const int half, const int rows, const int panels, const Piece *piece, const int32_t *x,
                 const int32_t *panel, int64_t at, const char *ahead, int64_t step) {
    __m512 total[ROWS][PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const float *before = piece->out + at + r * piece->outputs + p * LANES;
            total[r][p] = piece->begins ? _mm512_setzero_ps() : _mm512_loadu_ps(before);
        }
    const int64_t words = piece->words, stride = piece->stride, whole = piece->panel;
    for (int64_t i = 0; i < words; i++) {
        __m512i weight[PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) weight[p] = _mm512_loadu_si512(panel + p * whole + i * LANES);
        _mm_prefetch(ahead + i * step, _MM_HINT_T1);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m512i own = _mm512_set1_epi32(x[r * stride + i]);
            __asm__("" : "+v"(own)); /* in a register, not loaded again for every panel */
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) total[r][p] = multiplied(half, total[r][p], own, weight[p]);
        }
    }
    const float *residual = piece->ends ? piece->residual : 0;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            int64_t place = at + r * piece->outputs + p * LANES;
            if (residual) total[r][p] = _mm512_add_ps(total[r][p], _mm512_loadu_ps(residual + place));
            _mm512_storeu_ps(piece->out + place, total[r][p]);
        }
}

typedef void Tile(const Piece *piece, const int32_t *x, const int32_t *panel, int64_t at, const char *ahead,
                  int64_t step);
#define TILE(KIND, HALF, R, P) \
    __attribute__((noinline)) static void KIND##_##R##_##P(const Piece *piece, const int32_t *x, \
                                                           const int32_t *panel, int64_t at, const char *ahead, \
                                                           int64_t step) { \
        tile(HALF, R, P, piece, x, panel, at, ahead, step); \
    }
#define WIDTHS(KIND, HALF, R) TILE(KIND, HALF, R, 1) TILE(KIND, HALF, R, 2) TILE(KIND, HALF, R, 4)
#define NAMES(KIND, R) {KIND##_##R##_1, KIND##_##R##_2, KIND##_##R##_4}
#define TILES(KIND, HALF) \
    WIDTHS(KIND, HALF, 1) WIDTHS(KIND, HALF, 2) WIDTHS(KIND, HALF, 3) \
    WIDTHS(KIND, HALF, 4) WIDTHS(KIND, HALF, 5) WIDTHS(KIND, HALF, 6) \
    static Tile *const KIND##_tiles[ROWS][3] = {NAMES(KIND, 1), NAMES(KIND, 2), NAMES(KIND, 3), \
                                                NAMES(KIND, 4), NAMES(KIND, 5), NAMES(KIND, 6)};
#endif

#ifdef __AVX512BF16__
/* A row in bfloat16; `count` is a multiple of 32. */
INLINE void round_row(const float *x, int64_t count, int32_t *to) {
    for (int64_t i = 0; i < count; i += 2 * LANES)
        _mm512_storeu_si512(
            to + i / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + LANES), _mm512_loadu_ps(x + i)));
}
#endif

#endif
