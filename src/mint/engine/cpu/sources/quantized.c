/* Products with quantized matrices: numbers of 4 or 8 bits, widened to float32 or bfloat16 piece by piece, in the first
   cache.

   A matrix [O, I] lies in panels of 16 outputs of words of 32 bits, as in products.c. A word holds 8 or 4 inputs in
   order, the first one in its lowest bits. Every `block` inputs of an output have one scale: [O / 16, I / block, 16].
   The products have the bits of `product_floats` or `product_halves` with the widened matrix. */

#include <string.h>

#include "calls.h"
#include "product_tiles.h"

enum { NF4, INT8, FP8 };

typedef struct {
    const float *x;
    const int32_t *codes;
    const float *scales, *table; /* the 16 values of NF4 */
    int64_t kind, block, rows, inputs, outputs;
    const float *residual;
    float *out;
} QuantizedProduct;

typedef struct {
    const int32_t *codes;
    const float *scales, *table;
    int64_t kind, block, inputs, halves; /* whether to widen to bfloat16 */
    int32_t *target;
} Widen;

#ifdef __AVX512F__
#define PIECE 128 /* inputs: 4 panels of them take 32 KB */

/* The values of byte `shift / 8` of words: 4 bits of exponent with bias 7, and 3 of the fraction. */
INLINE __m512 from_fp8(__m512i words, int shift) {
    __m512i byte = _mm512_srli_epi32(words, shift);
    __m512i sign = _mm512_slli_epi32(_mm512_and_si512(byte, _mm512_set1_epi32(0x80)), 24);
    __m512i fraction = _mm512_and_si512(byte, _mm512_set1_epi32(7));
    __m512i rest = _mm512_slli_epi32(_mm512_and_si512(byte, _mm512_set1_epi32(0x7f)), 20);
    __m512 normal = (__m512)_mm512_add_epi32(rest, _mm512_set1_epi32(120 << 23));
    __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(fraction), _mm512_set1_ps(1.0f / 512));
    __mmask16 is_small = _mm512_testn_epi32_mask(byte, _mm512_set1_epi32(0x78));
    return (__m512)_mm512_or_si512((__m512i)_mm512_mask_blend_ps(is_small, normal, small), sign);
}

/* `count` inputs of a panel, from the first in `codes` on, which begins a block or lies in one with its scales. */
INLINE void widen(const int kind, const int32_t *codes, const float *scales, __m512 table, int64_t block,
                  int64_t first, int64_t count, float *to) {
    const int each = kind == NF4 ? 8 : 4, bits = 32 / each;
    for (int64_t i = 0; i < count; i += each) {
        __m512i words = _mm512_loadu_si512(codes + (first + i) / each * LANES);
        __m512 scale = _mm512_loadu_ps(scales + (first + i) / block * LANES);
#pragma GCC unroll 8
        for (int k = 0; k < each; k++) {
            __m512 value;
            if (kind == NF4)
                value = _mm512_permutexvar_ps(_mm512_srli_epi32(words, bits * k), table);
            else if (kind == INT8)
                value = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - bits * k), 24));
            else
                value = from_fp8(words, bits * k);
            _mm512_storeu_ps(to + (i + k) * LANES, _mm512_mul_ps(value, scale));
        }
    }
}

static void widen_any(int64_t kind, const int32_t *codes, const float *scales, const float *table, int64_t block,
                      int64_t first, int64_t count, float *to) {
    __m512 values = _mm512_loadu_ps(table);
    if (kind == NF4)
        widen(NF4, codes, scales, values, block, first, count, to);
    else if (kind == INT8)
        widen(INT8, codes, scales, values, block, first, count, to);
    else
        widen(FP8, codes, scales, values, block, first, count, to);
}

#ifdef __AVX512BF16__
/* Pairs of inputs of a panel in bfloat16, [inputs / 2, 16, 2], in the first half of its place. */
static void round_panel(float *wide, int64_t inputs) {
    const __m512i sides = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t i = 0; i < inputs; i += 2) {
        __m512 first = _mm512_loadu_ps(wide + i * LANES), second = _mm512_loadu_ps(wide + (i + 1) * LANES);
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        _mm512_storeu_si512(wide + i / 2 * LANES, _mm512_permutexvar_epi16(sides, both));
    }
}
#else
#define round_panel(wide, inputs)
#endif

/* Panels `first` to `last`, as products.c reads them. */
int widen_panels(const Widen *in, int64_t first, int64_t last) {
    const int64_t words = in->inputs / (in->kind == NF4 ? 8 : 4), blocks = in->inputs / in->block;
    const int64_t each = in->halves ? 2 : 1;
    float wide[PIECE * LANES] __attribute__((aligned(64)));
    for (int64_t p = first; p < last; p++)
        for (int64_t i = 0, size; i < in->inputs; i += size) {
            size = in->inputs - i < PIECE ? in->inputs - i : PIECE;
            widen_any(in->kind, in->codes + p * words * LANES, in->scales + p * blocks * LANES, in->table, in->block, i,
                      size, wide);
            if (in->halves) round_panel(wide, size);
            memcpy(in->target + (p * in->inputs + i) / each * LANES, wide, 4 * size / each * LANES);
        }
    return 0;
}

/* Rows `start` to `start + count` of the product, whose numbers are at `x` in words of `each` numbers. `round` turns a
   widened piece into such words in place. */
INLINE void multiply_rows(const QuantizedProduct *in, Tile *const tiles[ROWS][3], const int each, const int32_t *x,
                          int64_t start, int64_t count, int64_t first, int64_t last,
                          void (*round)(float *wide, int64_t inputs)) {
    const int64_t inputs = in->inputs, codes = in->kind == NF4 ? 8 : 4;
    const int64_t words = inputs / codes, blocks = inputs / in->block;
    float wide[PANELS * PIECE * LANES] __attribute__((aligned(64)));
    for (int64_t p = first, panels; p < last; p += panels) {
        panels = last - p < 2 ? 1 : last - p < PANELS ? 2 : PANELS;
        for (int64_t i = 0, size; i < inputs; i += size) {
            size = inputs - i < PIECE ? inputs - i : PIECE;
            for (int64_t own = 0; own < panels; own++) {
                float *to = wide + own * size * LANES;
                widen_any(in->kind, in->codes + (p + own) * words * LANES, in->scales + (p + own) * blocks * LANES,
                          in->table, in->block, i, size, to);
                if (round) round(to, size);
            }
            Piece piece = {x + i / each, inputs / each, size / each, size * LANES, i == 0, i + size == inputs,
                           in->outputs, in->residual, in->out};
            const char *next = (const char *)(in->codes + p * words * LANES + (i + size) / codes * LANES);
            for (int64_t r = 0, rows; r < count; r += rows) {
                rows = count - r < ROWS ? count - r : ROWS;
                tiles[rows - 1][panels / 2](&piece, piece.x + r * piece.stride, (const int32_t *)wide,
                                            (start + r) * in->outputs + p * LANES, next, 4 * LANES * each / codes);
            }
        }
    }
}

TILES(floats, 0)

/* out [rows, O] = x [rows, I] times panels `first` to `last` of the matrix, widened to float32 (+ residual). */
int quantized_floats(const QuantizedProduct *in, int64_t first, int64_t last) {
    multiply_rows(in, floats_tiles, 1, (const int32_t *)in->x, 0, in->rows, first, last, 0);
    return 0;
}
#else
int widen_panels(const void *arguments, int64_t first, int64_t last) { return 1; }
int quantized_floats(const void *arguments, int64_t first, int64_t last) { return 1; }
#endif

#ifdef __AVX512BF16__
#define ROUNDED 400000 /* bytes of rounded rows that stay in the second cache */

TILES(halves, 1)

/* `quantized_floats` of a matrix that is widened to bfloat16, and of rows that are rounded to it. */
int quantized_halves(const QuantizedProduct *in, int64_t first, int64_t last) {
    const int64_t words = in->inputs / 2, most = ROUNDED / (4 * words) / ROWS * ROWS;
    const int64_t block = most < ROWS ? ROWS : most;
    int32_t *rounded = malloc(4 * words * (in->rows < block ? in->rows : block));
    if (!rounded) return 2;
    for (int64_t start = 0, count; start < in->rows; start += count) {
        count = in->rows - start < block ? in->rows - start : block;
        for (int64_t r = 0; r < count; r++) round_row(in->x + (start + r) * in->inputs, in->inputs, rounded + r * words);
        multiply_rows(in, halves_tiles, 2, rounded, start, count, first, last, round_panel);
    }
    free(rounded);
    return 0;
}
#else
int quantized_halves(const void *arguments, int64_t first, int64_t last) { return 1; }
#endif
