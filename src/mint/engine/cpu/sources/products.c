/* Products of rows with the frozen matrices of a base model, float32 or bfloat16, on a CPU. Knows nothing of layers.

   A matrix [O, I] lies in panels of 16 outputs: [O / 16, I, 16] in float32, and in bfloat16 [O / 16, I / 2, 16, 2], for
   pairs of inputs are multiplied at once. So both are panels of words of 32 bits, [O / 16, words, 16].

   A result is one sum over the inputs in order (of 32 inputs at once with AMX, in a register's own order), whatever the
   number of rows, the tile that they are computed in, or the thread: bits of a row are a function of that row alone. */

#include "amx.h"
#include "calls.h"
#include "memory.h"
#include "product_tiles.h"

#define TURNED 8       /* panels that are turned side by side: each write or each read alone would jump */
#define LINE 64
#define DEPTH 1024     /* words, and */
#define CACHED 400000  /* bytes of rows that stay in the second cache while the panels pass by, which take as much */

typedef struct {
    const int32_t *source;
    int64_t words; /* of a row of the matrix */
    int32_t *target;
} Pack;

/* Panels `first` to `last` of a matrix [O, words]. */
int pack_words(const Pack *in, int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++)
        for (int64_t i = 0, at = p * LANES * in->words; i < in->words; i += LANES)
            transpose(in->source + at + i, in->words, in->target + at + i * LANES, LANES);
    return 0;
}

/* The way back. */
int unpack_words(const Pack *in, int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++)
        for (int64_t i = 0, at = p * LANES * in->words; i < in->words; i += LANES)
            transpose(in->source + at + i * LANES, LANES, in->target + at + i, in->words);
    return 0;
}

/* From the panels of a float32 matrix [O, I] panels `first` to `last` of its transpose. */
int turn_floats(const Turn *in, int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p += TURNED)
        for (int64_t o = 0; o < in->outputs; o += LANES)
            for (int64_t own = p; own < last && own < p + TURNED; own++)
                transpose(in->source + o * in->inputs + own * LANES * LANES, LANES,
                          in->target + (own * in->outputs + o) * LANES, LANES);
    return 0;
}

/* `count` rows of a piece times panels `first` to `last`, from place `at` on. */
static void multiply(Tile *const tiles[ROWS][3], const Piece *piece, const int32_t *packed, int64_t count, int64_t at,
                     int64_t first, int64_t last) {
    /* together the tiles of some panels fetch the next ones; few tiles not all of them, but without gaps */
    const int64_t tiles_of_rows = (count + ROWS - 1) / ROWS, bytes = LINE * piece->words;
    const int64_t step = LINE * PANELS / (tiles_of_rows < PANELS ? PANELS : tiles_of_rows);
    for (int64_t p = first, wide; p < last; p += wide) {
        wide = last - p < 2 ? 1 : last - p < PANELS ? 2 : PANELS;
        const int32_t *panel = packed + p * piece->panel, *next = panel + wide * piece->panel;
        for (int64_t r = 0, rows, ahead = 0; r < count; r += rows, ahead += step * piece->words) {
            rows = count - r < ROWS ? count - r : ROWS;
            const char *wanted = (const char *)(next + ahead / bytes * piece->panel) + ahead % bytes;
            tiles[rows - 1][wide / 2](piece, piece->x + r * piece->stride, panel, at + r * piece->outputs + p * LANES,
                                      wanted, step);
        }
    }
}

/* How the rows and inputs of a product are taken so that rows and panels stay in the second cache meanwhile. */
typedef struct {
    int64_t rows, words;
} Block;

static Block find_block(int64_t rows, int64_t words) {
    if (rows <= 4 * ROWS) return (Block){rows, words}; /* panels are read so seldom that reading on is faster */
    int64_t pieces = (words + DEPTH - 1) / DEPTH, lines = (words + LANES - 1) / LANES;
    words = (lines + pieces - 1) / pieces * LANES;
    int64_t most = CACHED / (4 * words) / ROWS * ROWS;
    return (Block){rows < most ? rows : most, words};
}

TILES(floats, 0)

/* out [rows, O] = x [rows, I] times panels `first` to `last` of `packed` (+ residual). */
int product_floats(const Product *in, int64_t first, int64_t last) {
    const int64_t inputs = in->inputs;
    const Block block = find_block(in->rows, inputs);
    for (int64_t start = 0; start < in->rows; start += block.rows)
        for (int64_t i = 0; i < inputs; i += block.words) {
            int64_t count = in->rows - start < block.rows ? in->rows - start : block.rows;
            int64_t words = inputs - i < block.words ? inputs - i : block.words;
            Piece piece = {(const int32_t *)in->x + start * inputs + i, inputs, words, inputs * LANES, i == 0,
                           i + words == inputs, in->outputs, in->residual, in->out};
            multiply(floats_tiles, &piece, in->packed + i * LANES, count, start * in->outputs, first, last);
        }
    return 0;
}

/* From pairs of inputs [8, 16 outputs] pairs of outputs [8, 16 inputs]. */
#ifdef __AVX512BW__
INLINE void turn_pairs(const int32_t *from, int32_t *to) {
    /* of two outputs and two inputs, which are 8 bytes: pairs of outputs instead of pairs of inputs */
    const __m512i swapped = _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0));
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) a[k] = _mm512_shuffle_epi8(_mm512_loadu_si512(from + k * LANES), swapped);
#pragma GCC unroll 4
    for (int k = 0; k < 8; k += 2) {
        b[k] = _mm512_unpacklo_epi64(a[k], a[k + 1]);
        b[k + 1] = _mm512_unpackhi_epi64(a[k], a[k + 1]);
    }
    /* quarter q of b[k + odd] holds, of rows k and k + 1, column 2 * q + odd */
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
        __m512i low = _mm512_shuffle_i64x2(b[odd], b[2 + odd], 0x88);
        __m512i high = _mm512_shuffle_i64x2(b[4 + odd], b[6 + odd], 0x88);
        __m512i low2 = _mm512_shuffle_i64x2(b[odd], b[2 + odd], 0xdd);
        __m512i high2 = _mm512_shuffle_i64x2(b[4 + odd], b[6 + odd], 0xdd);
        _mm512_storeu_si512(to + odd * LANES, _mm512_shuffle_i64x2(low, high, 0x88));
        _mm512_storeu_si512(to + (4 + odd) * LANES, _mm512_shuffle_i64x2(low, high, 0xdd));
        _mm512_storeu_si512(to + (2 + odd) * LANES, _mm512_shuffle_i64x2(low2, high2, 0x88));
        _mm512_storeu_si512(to + (6 + odd) * LANES, _mm512_shuffle_i64x2(low2, high2, 0xdd));
    }
}
#else
INLINE void turn_pairs(const int32_t *from, int32_t *to) {
    uint64_t pairs[8][8];
    memcpy(pairs, from, sizeof pairs);
    for (int pair = 0; pair < 8; pair++)
        for (int k = 0; k < 8; k++) {
            /* of two outputs and two inputs, pairs of outputs instead of pairs of inputs */
            uint64_t found = pairs[k][pair], inner = (found >> 16 & 0xffff0000u) | (found & 0xffff0000u) << 16;
            found = (found & 0xffff00000000ffffu) | inner;
            memcpy(to + (pair * 8 + k) * 2, &found, sizeof found);
        }
}
#endif

/* `turn_floats` for bfloat16; O is a multiple of 32. */
int turn_halves(const Turn *in, int64_t first, int64_t last) {
    const int64_t words = in->inputs / 2;
    for (int64_t p = first; p < last; p += TURNED)
        for (int64_t o = 0; o < in->outputs; o += LANES)
            for (int64_t own = p; own < last && own < p + TURNED; own++)
                turn_pairs(in->source + o * words + own * LANES / 2 * LANES,
                           in->target + (own * in->outputs + o) / 2 * LANES);
    return 0;
}

#ifdef __AMX_BF16__
#define AMX_WORDS 512     /* of a row: so many are multiplied at a time, and */
#define AMX_PANELS 8      /* so many panels: these, those that come next and */
#define AMX_MOST_ROWS 384 /* so many rows stay in the second cache */

/* Row r of tiles from `words` words of bfloat16, and the same from floats, which are rounded. */
static void copy_to_tiles(const int32_t *x, int64_t words, int64_t r, int32_t *tiles) {
    int32_t *to = tiles + tile_place(r, 0, 2 * words) / 2;
    for (int64_t i = 0; i < words; i += PANEL) _mm512_storeu_si512(to + i * 16, _mm512_loadu_si512(x + i));
}
static void round_to_tiles(const float *x, int64_t words, int64_t r, int32_t *tiles) {
    int32_t *to = tiles + tile_place(r, 0, 2 * words) / 2;
    for (int64_t i = 0; i < words; i += PANEL, x += 2 * PANEL) round_row(x, 2 * PANEL, to + i * 16);
}

/* `product_floats` of a bfloat16 matrix and rows that are bfloat16, or are rounded to it. */
int product_halves(const Product *in, int64_t first, int64_t last) {
    const int64_t outputs = in->outputs, all = in->inputs / 2;
    const int64_t most = in->rows < AMX_MOST_ROWS ? in->rows : AMX_MOST_ROWS;
    const int64_t piece = in->rows > AMX_ROWS && all > AMX_WORDS ? AMX_WORDS : all; /* few rows: the panels as they lie */
    int32_t *tiles = in->layout == TILES ? 0 : scratch(4 * (most + TILE_HEIGHT - 1) * piece);
    if (!tiles && in->layout != TILES) return 2;
    for (int64_t start = 0, rows; start < in->rows; start += rows) {
        rows = in->rows - start < most ? in->rows - start : most;
        for (int64_t i = 0; i < all; i += piece) {
            const int64_t words = all - i < piece ? all - i : piece;
            for (int64_t r = 0, at = start * all + i; r < rows && tiles; r++, at += all)
                if (in->layout == HALVES) copy_to_tiles((const int32_t *)in->x + at, words, r, tiles);
                else round_to_tiles(in->x + 2 * at, words, r, tiles);
            const int32_t *x = tiles ? tiles : (const int32_t *)in->x + start * all + i * TILE_HEIGHT;
            const int32_t *packed = in->packed + i * LANES;
            for (int64_t p = first, end; p < last; p = end) {
                end = last - p < AMX_PANELS ? last : p + AMX_PANELS;
                AmxProduct own = {x, tiles ? words : all, packed, all * LANES, words, in->out + start * outputs, outputs,
                                  i > 0, 0, 1};
                if (end < last) own.next = packed + AMX_PANELS * all * LANES;
                else if (i + words < all) own.next = packed + words * LANES - (p - first) * all * LANES;
                else if (in->next) own.next = in->next - p * all * LANES;
                multiply_amx(&own, rows, p, end);
                if (i + words < all || !in->residual) continue;
                for (int64_t r = start; r < start + rows; r++)
                    for (int64_t at = r * outputs + p * LANES; at < r * outputs + end * LANES; at += LANES)
                        put(in->out + at, added(loaded(in->out + at), loaded(in->residual + at)));
            }
        }
    }
    if (in->rows && first < last) end_amx();
    free(tiles);
    return 0;
}
#else
TILES(halves, 1)

/* A row of bfloat16 as a `Piece` has it where numbers are multiplied one by one. */
static void widen_row(const uint16_t *x, int64_t count, int32_t *to) {
    for (int64_t i = 0; i < count; i++) to[i] = (int32_t)((uint32_t)x[i] << 16);
}

/* `product_floats` of a bfloat16 matrix and rows that are bfloat16, or are rounded to it. */
int product_halves(const Product *in, int64_t first, int64_t last) {
    const int64_t inputs = in->inputs, all = inputs / 2;
    const Block block = find_block(in->rows, all);
    const int reads_x = in->layout && MULTIPLIES_HALVES; /* as it lies */
    int32_t *rounded = reads_x ? 0 : scratch(4 * block.rows * words_of_halves(2 * block.words));
    if (!reads_x && !rounded) return 2;
    for (int64_t start = 0; start < in->rows; start += block.rows)
        for (int64_t i = 0; i < all; i += block.words) {
            int64_t count = in->rows - start < block.rows ? in->rows - start : block.rows;
            int64_t words = all - i < block.words ? all - i : block.words;
            int64_t stride = reads_x ? all : words_of_halves(2 * words);
            const int32_t *rows = reads_x ? (const int32_t *)in->x + start * all + i : rounded;
            for (int64_t r = 0, at = start * inputs + 2 * i; r < count && !reads_x; r++, at += inputs)
                if (in->layout) widen_row((const uint16_t *)in->x + at, 2 * words, rounded + r * stride);
                else round_row(in->x + at, 2 * words, rounded + r * stride);
            Piece piece = {rows, stride, words, all * LANES, i == 0, i + words == all, in->outputs, in->residual, in->out};
            multiply(halves_tiles, &piece, in->packed + i * LANES, count, start * in->outputs, first, last);
        }
    free(rounded);
    return 0;
}
#endif

typedef struct {
    const char *grad; /* [T, O], in floats or bfloat16, as `layout` says, and */
    int64_t layout, stride; /* so many numbers from a row to the next one */
    const int32_t *packed;  /* panels of a bfloat16 matrix [O, I] */
    int64_t rows, inputs, outputs;
    float *out; /* [T, I] */
} MatrixGradient;

#ifdef __AMX_BF16__
/* to [count, words, 16]: panels `p` to `p + count` of the transpose, for outputs `first` to `first + 2 * words`. */
static void turn_piece(const MatrixGradient *in, int64_t first, int64_t words, int64_t p, int64_t count, int32_t *to) {
    const int64_t own_words = in->inputs / 2, step = LANES / 2 * LANES;
    for (int64_t o = 0; o < 2 * words; o += LANES) {
        const int32_t *from = in->packed + (first + o) * own_words + p * step;
        for (int64_t k = 0; k < count; k++) {
            for (int64_t line = 0; line < step; line += LANES) /* of the panels that will be turned next */
                __builtin_prefetch(from + (count + k) * step + line, 0, 2);
            turn_pairs(from + k * step, to + (k * words + o / 2) * LANES);
        }
    }
}

/* out = grad times the matrix, for inputs 16 * first to 16 * last; O is a multiple of 32. The transpose of the matrix is
   made piece by piece: it takes 1 MB for each thread. */
int gradient_halves(const MatrixGradient *in, int64_t first, int64_t last) {
    const int64_t inputs = in->inputs, outputs = in->outputs;
    const int64_t most = in->rows < AMX_MOST_ROWS ? in->rows : AMX_MOST_ROWS;
    const int64_t tiles_words = (most + TILE_HEIGHT - 1) / TILE_HEIGHT * TILE_HEIGHT * AMX_WORDS;
    int32_t *tiles = scratch(4 * (tiles_words + AMX_PANELS * AMX_WORDS * LANES)), *turned = tiles + tiles_words;
    if (!tiles) return 2;
    for (int64_t start = 0, rows; start < in->rows; start += rows) {
        rows = in->rows - start < most ? in->rows - start : most;
        for (int64_t o = 0, words; o < outputs; o += 2 * words) {
            words = (outputs - o) / 2 < AMX_WORDS ? (outputs - o) / 2 : AMX_WORDS;
            for (int64_t r = 0, at = start * in->stride + o; r < rows; r++, at += in->stride)
                if (in->layout == HALVES) copy_to_tiles((const int32_t *)(in->grad + 2 * at), words, r, tiles);
                else round_to_tiles((const float *)in->grad + at, words, r, tiles);
            for (int64_t p = first, count; p < last; p += count) {
                count = last - p < AMX_PANELS ? last - p : AMX_PANELS;
                turn_piece(in, o, words, p, count, turned);
                AmxProduct own = {tiles, words, turned, words * LANES, words, in->out + start * inputs + p * LANES, inputs,
                                  o > 0, 0, 1};
                multiply_amx(&own, rows, 0, count);
            }
        }
    }
    if (in->rows && first < last) end_amx();
    free(tiles);
    return 0;
}
#else
int gradient_halves(const MatrixGradient *in, int64_t first, int64_t last) { return 1; }
#endif

/* As `Product`, with the kernel of the product; rows are taken in blocks of `block_rows`, and do not lie in tiles. */
typedef struct {
    Kernel *product;
    const float *x;
    const int32_t *packed;
    int64_t rows, inputs, outputs;
    const float *residual;
    float *out;
    int64_t layout, block_rows;
} ProductByRows;

/* All panels, for blocks `first` to `last` of the rows. Threads that share the rows all read the matrix; those that share
   the panels all read the rows, and round them if the matrix is bfloat16. */
int product_by_rows(const ProductByRows *in, int64_t first, int64_t last) {
    int code = 0;
    for (int64_t block = first; block < last && !code; block++) {
        const int64_t start = block * in->block_rows, rest = in->rows - start, inputs = in->inputs, outputs = in->outputs;
        const float *x = in->layout ? (const float *)((const uint16_t *)in->x + start * inputs) : in->x + start * inputs;
        Product own = {x, in->packed, rest < in->block_rows ? rest : in->block_rows, inputs, outputs,
                       in->residual ? in->residual + start * outputs : 0, in->out + start * outputs, in->layout};
        code = in->product(&own, 0, outputs / PANEL);
    }
    return code;
}
