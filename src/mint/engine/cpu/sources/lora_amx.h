/* The products of `lora_halves.c` by the matrix registers of AMX. */

#ifndef MINT_LORA_AMX
#define MINT_LORA_AMX

#include "amx.h"
#include "lora_words.h"

#define CHUNK 288          /* rows that a lora's part is computed for together */
#define LEAST_PANEL_ROWS 8 /* from so many rows on, the rows of a are turned into panels first */
#define BLOCK 96           /* rows of a gradient that are done with before the next ones */
#define GRAD_ROWS BLOCK
#define X_PANELS 8
#define AHEAD 32 /* lines that are fetched ahead where a matrix is read once */

/* Columns of the pairs of rows [ranks, BLOCK / 2] twice, of down and of grad_down; and sums [wide, GRADS]. */
INLINE int64_t room_of(int64_t ranks, int64_t wide) { return ranks * BLOCK + wide * GRADS; }

INLINE void end_products(void) { end_amx(); }

/* Words that `squeeze_rows` needs where a is not in panels. */
INLINE int64_t ranks_room(int64_t words) { return PANEL * words; }

/* `ranks` ranks, 16 or fewer, for one row x [words], of which word i, a multiple of 16, lies at `i * apart`: a register
   holds the rows of a, another one x as a column. As many bytes as are read of a are fetched of what is wanted next. */
INLINE void squeeze_row(const int32_t *x, int64_t apart, const int32_t *a, int64_t ranks, int64_t words, float *found,
                        const char **next) {
    __asm__ volatile("" : : : "memory"); /* as in amx.h */
    _tile_zero(0);
    for (int64_t i = 0; i < words; i += LANES) {
        for (int64_t k = 0; k < ranks; k++) __builtin_prefetch(a + k * words + i + AHEAD / 4 * LANES, 0, 3);
        fetch(next, 4 * LANES * ranks);
        _tile_loadd(4, a + i, 4 * words);
        _tile_loadd(6, x + i * apart, 4);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, found, 4);
}

/* down [rows, ranks] = scale * x [rows, words] times a [ranks, I], in the order in which panels are summed. x may lie in
   tiles. */
static void squeeze_few(int64_t rows, const int32_t *x, int64_t tiled, const float *a, int64_t half, int64_t ranks,
                        int64_t inputs, float scale, float *down, int32_t *room, const char **next) {
    const int64_t words = words_of(inputs);
    const char *nothing = 0;
    const int as_it_lies = half && inputs == 2 * words;
    for (int64_t j = 0, own; j < ranks; j += own) {
        own = ranks - j < LANES ? ranks - j : LANES;
        const int32_t *matrix = as_it_lies ? (const int32_t *)a + j * words : room;
        for (int64_t k = 0; k < own && !as_it_lies; k++) take_row(a, half, (j + k) * inputs, inputs, room + k * words);
        const AmxShapes shapes = {.palette = 1,
                                  .row_bytes = {[0] = 4, [4] = 64, [6] = 4},
                                  .rows = {[0] = own, [4] = own, [6] = LANES}};
        set_shapes(&shapes);
        for (int64_t r = 0; r < rows; r++) {
            float found[LANES];
            const int32_t *row = x + (tiled ? tile_place(r, 0, 2 * words) / 2 : r * words);
            squeeze_row(row, tiled ? TILE_HEIGHT : 1, matrix, own, words, found, r ? &nothing : next);
            put_first(down + r * ranks + j, scaled(loaded(found), same(scale)), own);
        }
    }
}

/* The same by the panels of a, if they are there. */
static void squeeze_rows(int64_t rows, const int32_t *x, int64_t tiled, const float *a, int64_t half, const int32_t *panels,
                         int64_t ranks, int64_t inputs, float scale, float *down, int32_t *room, const char **next) {
    const int64_t words = words_of(inputs);
    if (!panels) {
        squeeze_few(rows, x, tiled, a, half, ranks, inputs, scale, down, room, next);
        return;
    }
    float found[AMX_ROWS * 2 * LANES] __attribute__((aligned(64)));
    for (int64_t r = 0, size; r < rows; r += size) {
        size = rows - r < AMX_ROWS ? rows - r : AMX_ROWS;
        if (r == 0 || size < AMX_ROWS) begin_amx(size, LANES);
        for (int64_t j = 0; j < ranks; j += 2 * LANES) {
            AmxProduct own = {x + r * words, words, panels + j * words, words * LANES, words, found, 2 * LANES, 0, 0, tiled};
            const int64_t wide = ranks - j > LANES ? 2 : 1;
            if (size > 16) multiply_panels(1, &own, 0, 0, wide, 0, 0);
            else multiply_panels(0, &own, 0, 0, wide, 0, 0);
            for (int64_t k = 0; k < size; k++)
                for (int64_t n = j; n < ranks && n < j + 2 * LANES; n += LANES)
                    put_first(down + (r + k) * ranks + n, scaled(loaded(found + k * 2 * LANES + n - j), same(scale)),
                              ranks - n);
        }
    }
}

/* out [rows, size] += factors [rows, words] times b [size, words], in the order in which panels are summed: a register holds
   the rows of 16 outputs, another one the factors of a row as a column. */
static void widen_few(int64_t rows, const int32_t *factors, int64_t stride, const int32_t *b, int64_t words, float *out,
                      int64_t outputs, int64_t size, const char **next) {
    const int64_t whole = words / LANES * LANES, rest = words - whole, last = rest ? rest : LANES;
    const AmxShapes shapes = {.palette = 1,
                              .row_bytes = {[0] = 4, [4] = 4 * LANES, [5] = 4 * last, [6] = 4, [7] = 4},
                              .rows = {[0] = LANES, [4] = LANES, [5] = LANES, [6] = LANES, [7] = last}};
    set_shapes(&shapes);
    __asm__ volatile("" : : : "memory"); /* as in amx.h */
    for (int64_t r = 0; r < rows; r++, factors += stride, out += outputs) {
        if (rest) _tile_loadd(7, factors + whole, 4);
        for (int64_t o = 0; o < size; o += LANES) {
            const int32_t *own = b + o * words;
            for (int64_t i = 0; r == 0 && i < words; i++) __builtin_prefetch(own + (AHEAD + i) * LANES, 0, 3);
            if (r == 0) fetch(next, 4 * LANES * words);
            _tile_loadd(0, out + o, 4);
            for (int64_t i = 0; i < whole; i += LANES) {
                _tile_loadd(4, own + i, 4 * words);
                _tile_loadd(6, factors + i, 4);
                _tile_dpbf16ps(0, 4, 6);
            }
            if (rest) {
                _tile_loadd(5, own + whole, 4 * words);
                _tile_dpbf16ps(0, 5, 7);
            }
            _tile_stored(0, out + o, 4);
        }
    }
}

/* out [rows, size] += factors [rows, pairs] times rows `first` to `first + size` of b [O, rank]. */
static void widen_rows(int64_t rows, const int32_t *factors, int64_t stride, const float *b, int64_t half, int64_t rank,
                       int64_t first, int64_t size, int32_t *columns, float *out, int64_t outputs, const char **next) {
    const int64_t pairs = pairs_of(rank);
    if (half && rank % 2 == 0 && rows < LEAST_PANEL_ROWS) {
        widen_few(rows, factors, stride, (const int32_t *)b + first * pairs, pairs, out, outputs, size,
                  next);
        return;
    }
    turn_outputs(b, half, rank, first, size, columns, next);
    AmxProduct own = {factors, stride, columns, pairs * LANES, pairs, out, outputs, 1};
    multiply_amx(&own, rows, 0, size / LANES);
}

/* For `size` outputs of a part, from place `o` of its own and `at` of all: grad_down += grad times b, and grad_rows of
   `count` rows from `start` on. */
static void narrow_rows(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count, int64_t part, int64_t o,
                        int64_t size, int64_t at) {
    const int32_t *grads = (const int32_t *)in->grad + (start * in->outputs + at) / 2; /* as they lie */
    int64_t stride = in->outputs / 2;
    if (!in->grad_half) {
        grads = turned->grads, stride = GRADS / 2;
        for (int64_t r = 0; r < count; r++)
            take_row(in->grad, 0, (start + r) * in->outputs + at, size, turned->grads + r * stride);
    }
    turn_b(in, turned, part, o, size);
    AmxProduct own = {grads, stride, turned->outputs, GRADS / 2 * LANES, size / 2, turned->grad_down + part * turned->wide,
                      turned->ranks, 1};
    multiply_amx(&own, count, 0, turned->wide / LANES);
    if (in->x) pair_grads(grads, stride, count, size, 0, BLOCK / 2, turned->grad_rows);
}

/* to [ranks, BLOCK / 2], from rows [pairs, ranks]. */
static void turn_columns(const int32_t *rows, int64_t pairs, int64_t ranks, int32_t *to) {
    for (int64_t t = 0; t < pairs; t += LANES)
        for (int64_t j = 0; j < ranks; j += LANES)
            transpose(rows + t * ranks + j, ranks, to + j * (BLOCK / 2) + t, BLOCK / 2);
}

/* grad_b of `size` outputs from `at` on += grad_rows times down_rows. The registers hold the sums turned. */
static void add_to_b(const LoraGradient *in, const Turned *turned, int64_t part, int64_t size, int64_t at, int64_t pairs,
                     float *grad_b) {
    const int64_t rank = in->rank, wide = turned->wide, ranks = turned->ranks;
    int32_t *columns = turned->room;
    float *sums = (float *)(turned->room + ranks * BLOCK);
    if (at == 0) turn_columns(turned->down_rows, pairs, ranks, columns); /* once for a block of rows */
    AmxProduct own = {columns + part * wide * (BLOCK / 2), BLOCK / 2, turned->grad_rows, BLOCK / 2 * LANES, pairs, sums,
                      GRADS, 0};
    multiply_amx(&own, wide, 0, size / LANES);
    for (int64_t k = 0; k < size; k += LANES)
        for (int64_t j = 0; j < rank; j += LANES) {
            float found[LANES * LANES] __attribute__((aligned(64)));
            transpose((const int32_t *)sums + j * GRADS + k, GRADS, (int32_t *)found, LANES);
            for (int64_t o = 0; o < LANES; o++) {
                float *to = grad_b + (at + k + o) * rank + j;
                put_first(to, added(loaded_first(to, rank - j), loaded(found + o * LANES)), rank - j);
            }
        }
}

/* to [X_PANELS, BLOCK / 2, 16]: the pairs of `count` rows of x from `start` on, `size` numbers from `i` on. */
static void pair_inputs(const LoraGradient *in, int64_t start, int64_t count, int64_t i, int64_t size, int32_t *to) {
    const int64_t inputs = in->inputs;
    if (in->half)
        pair_grads((const int32_t *)in->x + (start * inputs + i) / 2, inputs / 2, count, size, 0, BLOCK / 2, to);
    else
        for (int64_t k = 0; k < size; k += LANES)
            pair_rows(in->x, 0, inputs, start * inputs + i + k, count, to + k * (BLOCK / 2), LANES);
}

/* grad_a += grad_down_rows times `count` rows of x from `start` on. */
static void add_to_a(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count, float *grad_a) {
    const int64_t rank = in->rank, inputs = in->inputs, wide = turned->wide, pairs = (count + 1) / 2;
    const int64_t parts = wide == rank ? in->parts : 1; /* whose ranks lie side by side */
    int32_t *columns = turned->room + turned->ranks * (BLOCK / 2);
    turn_columns(turned->grad_down_rows, pairs, turned->ranks, columns);
    for (int64_t i = 0, size; i < inputs; i += size) {
        size = inputs - i < X_PANELS * LANES ? inputs - i : X_PANELS * LANES;
        pair_inputs(in, start, count, i, size, turned->x_rows);
        for (int64_t part = 0; part < in->parts; part += parts) {
            AmxProduct own = {columns + part * wide * (BLOCK / 2), BLOCK / 2, turned->x_rows, BLOCK / 2 * LANES, pairs,
                              grad_a + part * rank * inputs + i, inputs, 1};
            multiply_amx(&own, parts * rank, 0, size / LANES);
        }
    }
}

/* grad_x [count, I] += factors times a. */
static void spread_rows(int64_t count, const LoraGradient *in, const Turned *turned, float *grad_x) {
    AmxProduct own = {turned->factors, turned->stride, turned->a, turned->stride * LANES, turned->stride, grad_x, in->inputs,
                      1};
    multiply_amx(&own, count, 0, in->inputs / LANES);
}

#endif
