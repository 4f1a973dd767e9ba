/* The products of `lora_halves.c` in vector registers, which multiply pairs of bfloat16. */

#ifndef MINT_LORA_VECTORS
#define MINT_LORA_VECTORS

#include "lora_words.h"

#define CHUNK 120            /* rows that a lora's part is computed for together */
#define LEAST_PANEL_ROWS 24  /* from so many rows on, the rows of a are turned into panels first */
#define BLOCK 108            /* rows of a gradient that are done with before the next ones */

/* Sums that registers hold beside what is multiplied. */
#define TILE_ROWS 6          /* of `squeeze_panel` and `spread` */
#define TILE_LANES 4         /* of `squeeze_panel` */
#define WIDENED_ROWS 8       /* of `widen` */
#define NARROWED_ROWS 12     /* of `narrow`; even, as BLOCK is, because two rows make a pair */
#define SPREAD 4             /* vectors of a row in `spread` */

#define GRAD_ROWS NARROWED_ROWS
#define X_PANELS 1

/* What the products themselves need beside; nothing here. */
INLINE int64_t room_of(int64_t ranks, int64_t wide) { return 0; }
INLINE int64_t ranks_room(int64_t words) { return 0; }
INLINE void end_products(void) {}

/* total + x * y for the pairs of words, and the same with one word for all lanes. */
INLINE Vector add_words(Vector total, Words x, Words y) { return _mm512_dpbf16_ps(total, (__m512bh)x, (__m512bh)y); }
INLINE Vector add_same(Vector total, int32_t word, Words y) { return add_words(total, _mm512_set1_epi32(word), y); }

/* Of `rows` rows of x [rows, words] and of the `wide` rows of a that begin at `places`, the sums by lanes of their products,
   to found [rows, stride]. */
INLINE void multiply_rows(const int rows, const int wide, const int32_t *x, int64_t words, const float *a, const int half,
                          const int64_t *places, int64_t inputs, const int stride, Vector *found) {
    Vector total[4][LANES];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int k = 0; k < wide; k++) total[r][k] = zeros();
    for (int64_t i = 0; i < inputs; i += 2 * LANES) {
        Words part[4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) part[r] = words_at(x + r * words + i / 2);
#pragma GCC unroll 16
        for (int k = 0; k < wide; k++) {
            Words weight = pairs_at(a, half, places[k] + i, inputs - i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) total[r][k] = add_words(total[r][k], part[r], weight);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int k = 0; k < wide; k++) found[r * stride + k] = total[r][k];
}

/* down [rows, ranks] = x times `wide` rows of a [ranks, I] from `j` on; those past the last are the last again. */
INLINE void squeeze(const int rows, const int wide, const int32_t *x, int64_t words, const float *a, const int half,
                    int64_t j, int64_t ranks, int64_t inputs, float *down) {
    Vector found[LANES];
    int64_t places[LANES];
    float result[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < wide; k++) places[k] = (j + k < ranks ? j + k : ranks - 1) * inputs;
    multiply_rows(rows, wide, x, words, a, half, places, inputs, wide, found);
    put(result, sum_rows(found));
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide && j + k < ranks; k++) down[r * ranks + j + k] = result[r * wide + k];
}

/* Scale times the same sums for 16 ranks from a panel [words, 16] of a: of every 16th pair first, as in a lane, then of the
   lanes in order; down of the first `own` ranks. */
INLINE void squeeze_panel(const int rows, const int32_t *x, int64_t words, const int32_t *panel, float scale, float *down,
                          int64_t ranks, int64_t own) {
    const int lanes = rows == 1 ? LANES : TILE_LANES;
    Vector all[TILE_ROWS];
    for (int first = 0; first < LANES; first += lanes) {
        Vector total[TILE_ROWS][LANES];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int k = 0; k < lanes; k++) total[r][k] = zeros();
        for (int64_t i = first; i < words; i += LANES)
#pragma GCC unroll 16
            for (int k = 0; k < lanes; k++) {
                Words weight = words_at(panel + (i + k) * LANES);
                HOLD(weight);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) total[r][k] = add_same(total[r][k], x[r * words + i + k], weight);
            }
#pragma GCC unroll 16
        for (int k = 0; k < lanes; k++)
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) all[r] = first + k ? added(all[r], total[r][k]) : total[r][k];
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) put_first(down + r * ranks, scaled(all[r], same(scale)), own);
}

/* `squeeze` for all ranks. As many bytes as are read of a are fetched of what is wanted next. */
INLINE void squeeze_few(int64_t rows, const int32_t *x, const float *a, const int half, int64_t ranks, int64_t inputs,
                        float *down, const char **next) {
    const int64_t words = words_of(inputs);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        for (int64_t j = 0; j < ranks; j += 4)
            squeeze(4, 4, x + r * words, words, a, half, j, ranks, inputs, down + r * ranks);
    for (; r < rows; r++)
        for (int64_t j = 0; j < ranks; j += LANES) {
            if (r == 0) fetch(next, (half ? 2 : 4) * LANES * inputs);
            squeeze(1, LANES, x + r * words, words, a, half, j, ranks, inputs, down + r * ranks);
        }
}

/* down [rows, ranks] = scale * x [rows, words] times a [ranks, I], by its panels if they are there. */
static void squeeze_rows(int64_t rows, const int32_t *x, int64_t tiled, const float *a, int64_t half, const int32_t *panels,
                         int64_t ranks, int64_t inputs, float scale, float *down, int32_t *room, const char **next) {
    const int64_t words = words_of(inputs);
    int64_t r = 0;
    if (panels) {
        for (int64_t size; r < rows; r += size) {
            size = rows - r < TILE_ROWS ? 1 : TILE_ROWS;
            for (int64_t j = 0; j < ranks; j += LANES) {
                const int32_t *panel = panels + j * words;
                float *to = down + r * ranks + j;
                if (size == TILE_ROWS) squeeze_panel(TILE_ROWS, x + r * words, words, panel, scale, to, ranks, ranks - j);
                else squeeze_panel(1, x + r * words, words, panel, scale, to, ranks, ranks - j);
            }
        }
        return;
    }
    if (half) squeeze_few(rows, x, a, 1, ranks, inputs, down, next);
    else squeeze_few(rows, x, a, 0, ranks, inputs, down, next);
    for (int64_t i = 0, all = rows * ranks; i < all; i += LANES)
        put_first(down + i, scaled(loaded_first(down + i, all - i), same(scale)), all - i);
}

/* out [rows, 16 * wide outputs] += down [rows, pairs] times columns [wide, pairs, 16]. */
INLINE void widen(const int rows, const int wide, const int32_t *down, int64_t stride, const int32_t *columns,
                  int64_t pairs, float *out, int64_t outputs) {
    Vector total[WIDENED_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) total[r][k] = zeros();
    for (int64_t j = 0; j < pairs; j++) {
        Words weight[2];
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) weight[k] = words_at(columns + (k * pairs + j) * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int k = 0; k < wide; k++) total[r][k] = add_same(total[r][k], down[r * stride + j], weight[k]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) {
            float *to = out + r * outputs + k * LANES;
            put(to, added(loaded(to), total[r][k]));
        }
}

/* The same for `count` outputs. */
INLINE void widen_outputs(const int rows, const int32_t *down, int64_t stride, const int32_t *columns, int64_t pairs,
                       float *out, int64_t outputs, int64_t count) {
    int64_t o = 0;
    for (; o + 2 * LANES <= count; o += 2 * LANES)
        widen(rows, 2, down, stride, columns + o * pairs, pairs, out + o, outputs);
    if (o < count) widen(rows, 1, down, stride, columns + o * pairs, pairs, out + o, outputs);
}

/* out [rows, size] += factors [rows, pairs] times rows `first` to `first + size` of b [O, rank]. */
static void widen_rows(int64_t rows, const int32_t *factors, int64_t stride, const float *b, int64_t half, int64_t rank,
                       int64_t first, int64_t size, int32_t *columns, float *out, int64_t outputs, const char **next) {
    const int64_t pairs = pairs_of(rank);
    turn_outputs(b, half, rank, first, size, columns, next);
    int64_t r = 0;
    for (; r + WIDENED_ROWS <= rows; r += WIDENED_ROWS)
        widen_outputs(WIDENED_ROWS, factors + r * stride, stride, columns, pairs, out + r * outputs, outputs, size);
    for (; r < rows; r++) widen_outputs(1, factors + r * stride, stride, columns, pairs, out + r * outputs, outputs, size);
}

/* found [rows, 16] += x [rows, words] times a panel [words, 16]. */
INLINE void narrow(const int rows, const int32_t *x, int64_t stride, int64_t words, const int32_t *panel, float *found,
                   int64_t ranks) {
    Vector total[NARROWED_ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) total[r] = loaded(found + r * ranks);
    for (int64_t i = 0; i < words; i++) {
        Words weight = words_at(panel + i * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) total[r] = add_same(total[r], x[r * stride + i], weight);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) put(found + r * ranks, total[r]);
}

/* For `size` outputs of a part, from place `o` of its own and `at` of all: grad_down += grad times b, and grad_rows of
   `count` rows from `start` on. */
static void narrow_rows(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count, int64_t part, int64_t o,
                        int64_t size, int64_t at) {
    const int64_t stride = GRADS / 2, rank = in->rank;
    turn_b(in, turned, part, o, size);
    for (int64_t r = 0, rows; r < count; r += rows) {
        rows = count - r < NARROWED_ROWS ? count - r : NARROWED_ROWS;
        for (int64_t k = 0; k < rows; k++)
            take_row(in->grad, in->grad_half, (start + r + k) * in->outputs + at, size, turned->grads + k * stride);
        for (int64_t j = 0; j < rank; j += LANES) {
            const int32_t *panel = turned->outputs + j * (GRADS / 2);
            float *found = turned->grad_down + r * turned->ranks + part * turned->wide + j;
            if (rows == NARROWED_ROWS)
                narrow(NARROWED_ROWS, turned->grads, stride, size / 2, panel, found, turned->ranks);
            else
                for (int64_t k = 0; k < rows; k++)
                    narrow(1, turned->grads + k * stride, stride, size / 2, panel, found + k * turned->ranks, turned->ranks);
        }
        if (in->x) pair_grads(turned->grads, stride, rows, size, r / 2, BLOCK / 2, turned->grad_rows);
    }
}

/* out [`places` of 16, the first `own` of 16 lanes] += left [pairs of rows, 16]^T times right [pairs of rows, 16]. */
static void add_pairs(const int32_t *left, int64_t left_stride, const int32_t *right, int64_t right_stride, int64_t pairs,
                      float *out, int64_t out_stride, int64_t places, int64_t own) {
    Vector total[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) total[j] = zeros();
    for (int64_t t = 0; t < pairs; t++) {
        Words words = words_at(right + t * right_stride);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) total[j] = add_same(total[j], left[t * left_stride + j], words);
    }
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++)
        if (j < places) {
            float *to = out + j * out_stride;
            put_first(to, added(loaded_first(to, own), total[j]), own);
        }
}

/* grad_b of `size` outputs from `at` on += grad_rows times down_rows. */
static void add_to_b(const LoraGradient *in, const Turned *turned, int64_t part, int64_t size, int64_t at, int64_t pairs,
                     float *grad_b) {
    const int64_t rank = in->rank;
    for (int64_t k = 0; k < size; k += LANES)
        for (int64_t j = 0; j < rank; j += LANES)
            add_pairs(turned->grad_rows + k * (BLOCK / 2), LANES, turned->down_rows + part * turned->wide + j, turned->ranks,
                      pairs, grad_b + (at + k) * rank + j, rank, LANES, rank - j);
}

/* grad_a += grad_down_rows times `count` rows of x from `start` on. */
static void add_to_a(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count, float *grad_a) {
    const int64_t rank = in->rank, inputs = in->inputs, wide = turned->wide, pairs = (count + 1) / 2;
    for (int64_t i = 0; i < inputs; i += LANES) {
        pair_rows(in->x, in->half, inputs, start * inputs + i, count, turned->x_rows, LANES);
        for (int64_t part = 0; part < in->parts; part++)
            for (int64_t j = 0; j < rank; j += LANES)
                add_pairs(turned->grad_down_rows + part * wide + j, turned->ranks, turned->x_rows, LANES, pairs,
                          grad_a + (part * rank + j) * inputs + i, inputs, rank - j, LANES);
    }
}

/* grad_x [rows, 16 * wide inputs] += factors times a. */
INLINE void spread(const int rows, const int wide, const int32_t *factors, const int32_t *a, int64_t stride, int64_t inputs,
                   float *grad_x) {
    Vector total[TILE_ROWS][SPREAD];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int k = 0; k < wide; k++) total[r][k] = loaded(grad_x + r * inputs + k * LANES);
    for (int64_t j = 0; j < stride; j++) {
        Words weight[SPREAD];
#pragma GCC unroll 4
        for (int k = 0; k < wide; k++) weight[k] = words_at(a + (k * stride + j) * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int k = 0; k < wide; k++) total[r][k] = add_same(total[r][k], factors[r * stride + j], weight[k]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int k = 0; k < wide; k++) put(grad_x + r * inputs + k * LANES, total[r][k]);
}

static void spread_rows(int64_t count, const LoraGradient *in, const Turned *turned, float *grad_x) {
    const int64_t inputs = in->inputs, stride = turned->stride;
    for (int64_t r = 0, rows; r < count; r += rows) {
        rows = count - r < TILE_ROWS ? 1 : TILE_ROWS;
        const int32_t *own = turned->factors + r * stride;
        float *to = grad_x + r * inputs;
        int64_t i = 0;
        for (; i + SPREAD * LANES <= inputs; i += SPREAD * LANES)
            if (rows == TILE_ROWS) spread(TILE_ROWS, SPREAD, own, turned->a + i * stride, stride, inputs, to + i);
            else spread(1, SPREAD, own, turned->a + i * stride, stride, inputs, to + i);
        for (; i < inputs; i += LANES)
            if (rows == TILE_ROWS) spread(TILE_ROWS, 1, own, turned->a + i * stride, stride, inputs, to + i);
            else spread(1, 1, own, turned->a + i * stride, stride, inputs, to + i);
    }
}

#endif
