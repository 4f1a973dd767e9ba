/* The inner loops of a product: a tile of up to 6 rows and 4 panels of 16 outputs, over a piece of the inputs. */

#ifndef MINT_PRODUCT_TILES
#define MINT_PRODUCT_TILES

#include "tiles.h"

#define ROWS 6         /* of a tile, and */
#define PANELS 4       /* so many panels: with AVX-512, 24 sums, 4 vectors of weights and a row's number are 29 registers */

/* Panels whose sums fit into the registers, beside the weights and a row's number. */
#ifdef __AVX512F__
#define HELD_PANELS(rows) PANELS
#else
#define HELD_PANELS(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#endif

/* Where the place is and what lies there is unknown to the compiler: it is read, and not kept. */
#define UNKNOWN(place) __asm__ volatile("" : "+r"(place))

/* Whether pairs of bfloat16 are multiplied and added by one instruction, which rounds in its own way. */
#ifdef __AVX512BF16__
#define MULTIPLIES_HALVES 1
#else
#define MULTIPLIES_HALVES 0
#endif

/* Of a sum over all inputs the piece over those that x has: `words` of them, a row's `stride` after the last one's. In
   bfloat16, x has pairs of bfloat16 where they are multiplied by one instruction, else a float for each of the two. */
typedef struct {
    const int32_t *x;
    int64_t stride, words, panel; /* words of a whole panel */
    int begins, ends;
    int64_t outputs;
    const float *residual; /* [rows, O], or missing */
    float *out;            /* [rows, O] */
} Piece;

/* total + x * weight; in bfloat16, of a pair of inputs, whose numbers lie at `x`. */
INLINE Vector multiplied(const int half, Vector total, Vector x, Vector weight) {
#ifdef __AVX512BF16__
    if (half) return _mm512_dpbf16_ps(total, (__m512bh)x, (__m512bh)weight);
#endif
    return fused(x, weight, total);
}

/* How many numbers of a word are multiplied one after the other, and number `n` of the words at a place. */
INLINE int numbers_in(const int half) { return half && !MULTIPLIES_HALVES ? 2 : 1; }
INLINE Vector number_of(const int half, const float *words, const int n) {
    if (numbers_in(half) == 1) return loaded(words);
    return n == 0 ? even_halves(loaded(words)) : odd_halves(loaded(words));
}

/* out[at], and so on for the rows and panels. Every `step` bytes from `ahead` on will be wanted next. */
INLINE void tile(const int half, const int rows, const int panels, const Piece *piece, const int32_t *x,
                 const int32_t *panel, int64_t at, const char *ahead, int64_t step) {
    Vector total[ROWS][PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const float *before = piece->out + at + r * piece->outputs + p * LANES;
            total[r][p] = piece->begins ? zeros() : loaded(before);
        }
    const int64_t words = piece->words, stride = piece->stride, whole = piece->panel;
    const int numbers = numbers_in(half);
    /* two places and one distance, in place of a register for each row */
    const float *low = (const float *)x, *high = low + 3 * stride, *weights = (const float *)panel;
    for (int64_t i = 0; i < words; i++, weights += LANES, low += numbers, high += numbers) {
        __builtin_prefetch(ahead + i * step, 0, 2);
        UNKNOWN(low);
        UNKNOWN(high);
#pragma GCC unroll 2
        for (int number = 0; number < numbers; number++) {
            Vector weight[PANELS];
            if (rows > 1) UNKNOWN(weights); /* words are read again for their second numbers: no register would hold them */
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) weight[p] = number_of(half, weights + p * whole, number);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                Vector own = same(r < 3 ? low[r * stride + number] : high[(r - 3) * stride + number]);
                HOLD(own);
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++) total[r][p] = multiplied(half, total[r][p], own, weight[p]);
            }
        }
    }
    const float *residual = piece->ends ? piece->residual : 0;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            int64_t place = at + r * piece->outputs + p * LANES;
            if (residual) total[r][p] = added(total[r][p], loaded(residual + place));
            put(piece->out + place, total[r][p]);
        }
}

/* The same in as many tiles as the registers hold. */
INLINE void tiles_of(const int half, const int rows, const int panels, const Piece *piece, const int32_t *x,
                     const int32_t *panel, int64_t at, const char *ahead, int64_t step) {
    const int held = HELD_PANELS(rows) < panels ? HELD_PANELS(rows) : panels;
    const int64_t own_step = step * held / panels;
#pragma GCC unroll 4
    for (int p = 0; p < panels; p += held)
        tile(half, rows, held, piece, x, panel + p * piece->panel, at + p * LANES, ahead + p / held * own_step * piece->words,
             own_step);
}

typedef void Tile(const Piece *piece, const int32_t *x, const int32_t *panel, int64_t at, const char *ahead,
                  int64_t step);
#define TILE(KIND, HALF, R, P) \
    __attribute__((noinline)) static void KIND##_##R##_##P(const Piece *piece, const int32_t *x, \
                                                           const int32_t *panel, int64_t at, const char *ahead, \
                                                           int64_t step) { \
        tiles_of(HALF, R, P, piece, x, panel, at, ahead, step); \
    }
#define WIDTHS(KIND, HALF, R) TILE(KIND, HALF, R, 1) TILE(KIND, HALF, R, 2) TILE(KIND, HALF, R, 4)
#define NAMES(KIND, R) {KIND##_##R##_1, KIND##_##R##_2, KIND##_##R##_4}
#define TILES(KIND, HALF) \
    WIDTHS(KIND, HALF, 1) WIDTHS(KIND, HALF, 2) WIDTHS(KIND, HALF, 3) \
    WIDTHS(KIND, HALF, 4) WIDTHS(KIND, HALF, 5) WIDTHS(KIND, HALF, 6) \
    static Tile *const KIND##_tiles[ROWS][3] = {NAMES(KIND, 1), NAMES(KIND, 2), NAMES(KIND, 3), \
                                                NAMES(KIND, 4), NAMES(KIND, 5), NAMES(KIND, 6)};

/* The words of a row of `inputs` numbers in bfloat16, as a `Piece` has them. */
INLINE int64_t words_of_halves(int64_t inputs) { return inputs / 2 * numbers_in(1); }

/* As many numbers as a register holds, and their bits. */
typedef float Register __attribute__((vector_size(4 * PART), aligned(4), may_alias));
typedef uint32_t RegisterBits __attribute__((vector_size(4 * PART), aligned(4), may_alias));

/* Numbers rounded to bfloat16, to nearest even, as floats; NaN stays NaN. `count` is a multiple of 16. */
INLINE void round_floats(const float *x, int64_t count, int32_t *to) {
    for (int64_t i = 0; i < count; i += PART) {
        Register own = *(const Register *)(x + i);
        RegisterBits bits = (RegisterBits)own, is_nan = (RegisterBits)(own != own);
        RegisterBits number = bits + 0x7fff + (bits >> 16 & 1), nan = bits | 0x7fc00000u;
        *(RegisterBits *)(to + i) = ((number & ~is_nan) | (nan & is_nan)) & 0xffff0000u;
    }
}

/* A row in bfloat16, as a `Piece` has it; `count` is a multiple of 32. */
INLINE void round_row(const float *x, int64_t count, int32_t *to) {
#ifdef __AVX512BF16__
    for (int64_t i = 0; i < count; i += 2 * LANES)
        _mm512_storeu_si512(
            to + i / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + LANES), _mm512_loadu_ps(x + i)));
#else
    round_floats(x, count, to);
#endif
}

#endif
