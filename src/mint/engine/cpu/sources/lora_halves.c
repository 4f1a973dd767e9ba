/* `loras.c` for a base in bfloat16, where the processor multiplies pairs of bfloat16 in half the time that floats take.

   All factors are rounded to bfloat16, as autocast does: rows, gradients, what lies between a lora's two matrices, and
   copies of the matrices. Sums and results are float32. The two numbers of a pair belong to two inputs, two ranks, two
   outputs, or, in the gradients of the matrices, to two rows.

   A result is one sum in order, whatever the number of rows, the tile that they are computed in, or the thread: bits of
   a row are a function of that row alone.

   Letters: I inputs, O outputs; a word is two bfloat16. */

#include "calls.h"
#include "tiles.h"

#ifdef __AVX512BF16__

#define CHUNK 120            /* rows that a lora's part is computed for together, and */
#define SEGMENT 512          /* so many outputs */
#define LEAST_PANEL_ROWS 24  /* from so many rows on, the rows of a are turned into panels first */
#define BLOCK 108            /* rows of a gradient that are done with before the next ones, and */
#define GRADS 256            /* so many outputs. `BLOCK_ROWS` in layers.h is a multiple of BLOCK */

/* Sums that registers hold beside what is multiplied. */
#define TILE_ROWS 6          /* of `squeeze_panel` and `spread` */
#define TILE_LANES 4         /* of `squeeze_panel` */
#define WIDENED_ROWS 8       /* of `widen` */
#define NARROWED_ROWS 12     /* of `narrow`; even, as BLOCK is, because two rows make a pair */
#define SPREAD 4             /* vectors of a row in `spread` */

typedef __m512i Words;

INLINE Words words_at(const int32_t *from) { return _mm512_loadu_si512(from); }

/* total + x * y for the pairs of words, and the same with one word for all lanes. */
INLINE Vector add_words(Vector total, Words x, Words y) { return _mm512_dpbf16_ps(total, (__m512bh)x, (__m512bh)y); }
INLINE Vector add_same(Vector total, int32_t word, Words y) { return add_words(total, _mm512_set1_epi32(word), y); }

/* The first `count` of 16 numbers and then zeros; `count` may be negative. */
INLINE Vector numbers_at(const float *from, int64_t count) {
    return count >= LANES ? loaded(from) : count <= 0 ? zeros() : loaded_first(from, count);
}

/* Words of pairs of neighbours: 16 numbers of `first`, then those of `second`. */
INLINE Words rounded(Vector first, Vector second) { return (Words)_mm512_cvtne2ps_pbh(second, first); }

/* Word i is number i of `first` and number i of `second`. */
INLINE Words side_by_side(Vector first, Vector second) {
    const Words places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                          20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(places, rounded(first, second));
}

/* 16 numbers of x from place `at` on. */
INLINE Vector row_at(const float *x, int64_t half, int64_t at) {
    if (!half) return loaded(x + at);
    __m256i found = _mm256_loadu_si256((const __m256i *)((const uint16_t *)x + at));
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(found), 16);
}

/* The words of the pairs of neighbours of 32 numbers of x from `at` on; if only 16 are `left`, of these and zeros. */
INLINE Words pairs_at(const float *x, int64_t half, int64_t at, int64_t left) {
    if (half) return _mm512_maskz_loadu_epi16(left > LANES ? ~0u : 0xffff, (const uint16_t *)x + at);
    return rounded(loaded(x + at), left > LANES ? loaded(x + at + LANES) : zeros());
}

/* The same of `count` numbers, a multiple of 16; the last vector of 16 words is filled up with zeros. */
INLINE void take_row(const float *x, int64_t half, int64_t at, int64_t count, int32_t *to) {
    for (int64_t i = 0; i < count; i += 2 * LANES) _mm512_storeu_si512(to + i / 2, pairs_at(x, half, at + i, count - i));
}

/* Panels of 16 ranks. */
INLINE int64_t panels_of(int64_t ranks) { return (ranks + LANES - 1) / LANES; }

/* The words of a row of inputs, in whole vectors. */
INLINE int64_t words_of(int64_t inputs) { return (inputs + 2 * LANES - 1) / (2 * LANES) * LANES; }

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

/* panels [ranks / 16, words, 16] of a [ranks, I]; places past its last row or input are zero. */
static void turn_ranks(const float *a, int64_t half, int64_t ranks, int64_t inputs, int32_t *panels) {
    const int64_t words = words_of(inputs);
    for (int64_t j = 0; j < ranks; j += LANES, panels += words * LANES)
        for (int64_t i = 0; i < inputs; i += 2 * LANES) {
            int32_t own[LANES * LANES];
            for (int64_t k = 0; k < LANES; k++) {
                Words found = _mm512_setzero_si512();
                if (j + k < ranks) found = pairs_at(a, half, (j + k) * inputs + i, inputs - i);
                _mm512_storeu_si512(own + k * LANES, found);
            }
            transpose(own, LANES, panels + i / 2 * LANES, LANES);
        }
}

/* `squeeze` for all ranks. */
INLINE void squeeze_few(int64_t rows, const int32_t *x, const float *a, const int half, int64_t ranks, int64_t inputs,
                        float *down) {
    const int64_t words = words_of(inputs);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        for (int64_t j = 0; j < ranks; j += 4)
            squeeze(4, 4, x + r * words, words, a, half, j, ranks, inputs, down + r * ranks);
    for (; r < rows; r++)
        for (int64_t j = 0; j < ranks; j += LANES)
            squeeze(1, LANES, x + r * words, words, a, half, j, ranks, inputs, down + r * ranks);
}

/* down [rows, ranks] = scale * x [rows, words] times a [ranks, I], by its panels if they are there. */
static void squeeze_rows(int64_t rows, const int32_t *x, const float *a, int64_t half, const int32_t *panels,
                         int64_t ranks, int64_t inputs, float scale, float *down) {
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
    if (half) squeeze_few(rows, x, a, 1, ranks, inputs, down);
    else squeeze_few(rows, x, a, 0, ranks, inputs, down);
    for (int64_t i = 0, all = rows * ranks; i < all; i += LANES)
        put_first(down + i, scaled(loaded_first(down + i, all - i), same(scale)), all - i);
}

/* Pairs of ranks of one part; with an odd rank the last has a zero. */
INLINE int64_t pairs_of(int64_t rank) { return (rank + 1) / 2; }

/* to [parts * pairs]: the words of scale * a row of `parts` parts of `rank` ranks; each part begins `apart` numbers further
   on. Writes up to 15 words too many, so rows must be written in their order. */
static void pair_ranks(const float *from, int64_t parts, int64_t rank, int64_t apart, float scale, int32_t *to) {
    for (int64_t part = 0; part < parts; part++, from += apart, to += pairs_of(rank))
        for (int64_t j = 0; j < rank; j += 2 * LANES) {
            Vector first = numbers_at(from + j, rank - j), second = numbers_at(from + j + LANES, rank - j - LANES);
            _mm512_storeu_si512(to + j / 2, rounded(scaled(first, same(scale)), scaled(second, same(scale))));
        }
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
INLINE void widen_rows(const int rows, const int32_t *down, int64_t stride, const int32_t *columns, int64_t pairs,
                       float *out, int64_t outputs, int64_t count) {
    int64_t o = 0;
    for (; o + 2 * LANES <= count; o += 2 * LANES)
        widen(rows, 2, down, stride, columns + o * pairs, pairs, out + o, outputs);
    if (o < count) widen(rows, 1, down, stride, columns + o * pairs, pairs, out + o, outputs);
}

/* to [16, 16]: the words of two blocks of 16 rows, turned. Of the row r at `from + r * apart` and of the one `further` on,
   the first `own` and `others` numbers are read; the rest are zeros. */
INLINE void turn_blocks(const float *from, int64_t apart, int64_t further, int64_t own, int64_t others, int32_t *to) {
    Vector rows[LANES]; /* read in order: the processor fetches ahead for one reader, not for two */
    Words words[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) rows[r] = numbers_at(from + r * apart, own);
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) words[r] = rounded(rows[r], numbers_at(from + r * apart + further, others));
    transpose((const int32_t *)words, LANES, to, LANES);
}

/* The first `count` of 16 bfloat16 and then zeros; `count` may be negative. */
INLINE __m256i halves_at(const uint16_t *from, int64_t count) {
    const __mmask16 first = count >= LANES ? 0xffff : count <= 0 ? 0 : (1 << count) - 1;
    return _mm256_maskz_loadu_epi16(first, from);
}

/* The same for numbers in bfloat16. */
INLINE void turn_half_blocks(const uint16_t *from, int64_t apart, int64_t further, int64_t own, int64_t others,
                             int32_t *to) {
    __m256i rows[LANES];
    Words words[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) rows[r] = halves_at(from + r * apart, own);
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++)
        words[r] = _mm512_inserti64x4(_mm512_castsi256_si512(rows[r]), halves_at(from + r * apart + further, others), 1);
    transpose((const int32_t *)words, LANES, to, LANES);
}

/* From `count` rows of b [O, rank] from `first` on to columns [count / 16, pairs, 16]. Writes up to 15 vectors too many,
   over which it writes the next outputs. */
static void turn_outputs(const float *b, int64_t half, int64_t rank, int64_t first, int64_t count, int32_t *columns) {
    const int64_t pairs = pairs_of(rank);
    const uint16_t *halves = (const uint16_t *)b + first * rank;
    if (!half) b += first * rank;
    int64_t o = 0;
    for (; rank == LANES && o + 2 * LANES <= count; o += 2 * LANES) { /* the ranks of 32 outputs fill the words */
        int32_t *to = columns + o * LANES / 2;
        if (half) turn_half_blocks(halves + o * LANES, LANES, LANES * LANES, LANES, LANES, to);
        else turn_blocks(b + o * LANES, LANES, LANES * LANES, LANES, LANES, to);
    }
    for (; o < count; o += LANES)
        for (int64_t j = 0; j < rank; j += 2 * LANES) {
            const int64_t from = o * rank + j;
            int32_t *to = columns + (o * pairs + j / 2 * LANES);
            if (half) turn_half_blocks(halves + from, rank, LANES, rank - j, rank - j - LANES, to);
            else turn_blocks(b + from, rank, LANES, rank - j, rank - j - LANES, to);
        }
}

/* Reserves so many words of a room; returns where they begin. `all` counts the words that are reserved. */
static int64_t place(int64_t *all, int64_t words) {
    const int64_t at = *all;
    *all += words;
    return at;
}

/* `add_lora` with factors in bfloat16. */
int add_lora_halves(const AddLora *in, int64_t first, int64_t last) {
    const int64_t parts = in->parts, rank = in->rank, inputs = in->inputs, outputs = in->outputs;
    const int64_t ranks = parts * rank, words = words_of(inputs), pairs = pairs_of(rank), stride = parts * pairs;
    const int64_t rows = last - first < CHUNK ? last - first : CHUNK;
    const int has_panels = last - first >= LEAST_PANEL_ROWS;
    int64_t all = 0;
    const int64_t panels_at = place(&all, has_panels ? panels_of(ranks) * words * LANES : 0);
    const int64_t x_at = place(&all, rows * words), squeezed_at = place(&all, in->down ? 0 : rows * ranks);
    const int64_t factors_at = place(&all, rows * stride + LANES);
    const int64_t columns_at = place(&all, SEGMENT * pairs + 15 * LANES);
    int32_t *room = malloc(4 * all);
    if (!room) return 2;
    int32_t *panels = has_panels ? room + panels_at : 0, *x = room + x_at, *factors = room + factors_at;
    int32_t *columns = room + columns_at;
    float *squeezed = (float *)(room + squeezed_at);
    if (panels) turn_ranks(in->a, in->rounded, ranks, inputs, panels);
    for (int64_t start = first; start < last; start += CHUNK) {
        const int64_t count = last - start < CHUNK ? last - start : CHUNK;
        float *down = in->down ? in->down + start * ranks : squeezed, *out = in->out + start * outputs;
        for (int64_t r = 0; r < count; r++) take_row(in->x, in->half, (start + r) * inputs, inputs, x + r * words);
        squeeze_rows(count, x, in->a, in->rounded, panels, ranks, inputs, in->scale, down);
        for (int64_t r = 0; r < count; r++) pair_ranks(down + r * ranks, parts, rank, rank, 1, factors + r * stride);
        for (int64_t part = 0; part < parts; out += in->widths[part++])
            for (int64_t o = 0, size; o < in->widths[part]; o += size) {
                size = in->widths[part] - o < SEGMENT ? in->widths[part] - o : SEGMENT;
                turn_outputs(in->bs[part], in->rounded, rank, o, size, columns);
                const int32_t *own = factors + part * pairs;
                int64_t r = 0;
                for (; r + WIDENED_ROWS <= count; r += WIDENED_ROWS)
                    widen_rows(WIDENED_ROWS, own + r * stride, stride, columns, pairs, out + r * outputs + o, outputs, size);
                for (; r < count; r++)
                    widen_rows(1, own + r * stride, stride, columns, pairs, out + r * outputs + o, outputs, size);
            }
    }
    free(room);
    return 0;
}

/* What a block of rows of a gradient needs. The ranks of a part have `wide` places, a multiple of 16. Places behind
   the last rank may hold NaN in grad_down; nobody reads them. */
typedef struct {
    int64_t wide, ranks;   /* of a part, and of all parts */
    int64_t pairs, stride; /* likewise */
    int32_t *a;            /* [stride, I]: of two ranks */
    int32_t *panels;       /* of a; missing where there are few rows, or where `down` is given */
    int32_t *outputs;      /* [wide / 16, GRADS / 2, 16]: of two outputs of b */
    int32_t *x;            /* [BLOCK, words] */
    int32_t *grads;        /* [NARROWED_ROWS, GRADS / 2]: of two outputs */
    int32_t *grad_rows;    /* [GRADS / 16, BLOCK / 2, 16]: of two rows */
    int32_t *x_rows;       /* [BLOCK / 2, 16]: of two rows */
    int32_t *down_rows, *grad_down_rows; /* [BLOCK / 2, ranks]: of two rows */
    int32_t *factors;      /* [BLOCK, stride]: of two ranks of grad_down */
    float *down;           /* [BLOCK, parts * rank] */
    float *grad_down;      /* [BLOCK, ranks] */
} Turned;

static void turn_pairs_of_ranks(const LoraGradient *in, const Turned *turned) {
    const int64_t inputs = in->inputs;
    for (int64_t part = 0; part < in->parts; part++)
        for (int64_t j = 0; j < in->rank; j += 2) {
            const float *a = in->a + (part * in->rank + j) * inputs;
            int32_t *to = turned->a + (part * turned->pairs + j / 2) * inputs;
            for (int64_t i = 0; i < inputs; i += LANES)
                _mm512_storeu_si512(to + i, side_by_side(loaded(a + i), j + 1 < in->rank ? loaded(a + inputs + i) : zeros()));
        }
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

/* Of 32 numbers in each of two rows: the first 16 of both side by side, and the last 16. */
INLINE Words first_sides(Words row, Words next) {
    const Words places = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                          36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(row, places, next);
}
INLINE Words last_sides(Words row, Words next) {
    const Words places = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53,
                                          21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_permutex2var_epi16(row, places, next);
}

/* For `size` outputs of a part, from place `o` of its own and `at` of all: grad_down += grad times b, and grad_rows of
   `count` rows from `start` on. */
static void narrow_rows(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count, int64_t part, int64_t o,
                        int64_t size, int64_t at) {
    const int64_t stride = GRADS / 2, rank = in->rank;
    for (int64_t j = 0; j < rank; j += LANES) {
        const float *b = in->bs[part] + o * rank + j;
        int32_t *to = turned->outputs + j * (GRADS / 2);
        for (int64_t i = 0; i < size; i += 2, b += 2 * rank, to += LANES)
            _mm512_storeu_si512(to, side_by_side(loaded_first(b, rank - j), loaded_first(b + rank, rank - j)));
    }
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
        for (int64_t k = 0; k < rows && in->x; k += 2)
            for (int64_t i = 0; i < size; i += 2 * LANES) {
                const int32_t *own = turned->grads + k * stride + i / 2;
                Words row = words_at(own), next = k + 1 < rows ? words_at(own + stride) : _mm512_setzero_si512();
                int32_t *to = turned->grad_rows + (i / LANES * (BLOCK / 2) + (r + k) / 2) * LANES;
                _mm512_storeu_si512(to, first_sides(row, next));
                _mm512_storeu_si512(to + BLOCK / 2 * LANES, last_sides(row, next));
            }
    }
}

/* to [count / 2, 16]: of pairs of rows of x the 16 numbers from `at` on; an odd last row is beside zeros.
   Vectors of `to` lie `apart` words from each other. */
INLINE void pair_rows(const float *x, int64_t half, int64_t stride, int64_t at, int64_t count, int32_t *to, int64_t apart) {
    for (int64_t r = 0; r < count; r += 2, at += 2 * stride, to += apart)
        _mm512_storeu_si512(to, side_by_side(row_at(x, half, at), r + 1 < count ? row_at(x, half, at + stride) : zeros()));
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
        for (int k = 0; k < wide; k++) weight[k] = words_at(a + j * inputs + k * LANES);
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
            if (rows == TILE_ROWS) spread(TILE_ROWS, SPREAD, own, turned->a + i, stride, inputs, to + i);
            else spread(1, SPREAD, own, turned->a + i, stride, inputs, to + i);
        for (; i < inputs; i += LANES)
            if (rows == TILE_ROWS) spread(TILE_ROWS, 1, own, turned->a + i, stride, inputs, to + i);
            else spread(1, 1, own, turned->a + i, stride, inputs, to + i);
    }
}

/* down_rows of `count` rows from `start` on. */
static void find_down(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count) {
    const int64_t rank = in->rank, ranks = in->parts * rank, words = words_of(in->inputs);
    const float *down = in->down ? in->down + start * ranks : turned->down;
    if (!in->down) {
        for (int64_t r = 0; r < count; r++)
            take_row(in->x, in->half, (start + r) * in->inputs, in->inputs, turned->x + r * words);
        squeeze_rows(count, turned->x, in->a, 0, turned->panels, ranks, in->inputs, in->scale, turned->down);
    }
    for (int64_t r = 0; r < count; r += 2)
        for (int64_t part = 0; part < in->parts; part++)
            for (int64_t j = 0; j < rank; j += LANES) {
                const float *own = down + r * ranks + part * rank + j;
                Vector next = r + 1 < count ? loaded_first(own + ranks, rank - j) : zeros();
                _mm512_storeu_si512(turned->down_rows + r / 2 * turned->ranks + part * turned->wide + j,
                                    side_by_side(loaded_first(own, rank - j), next));
            }
}

/* Rows `start` to `start + count`, added to `found`. */
static void add_gradient(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count, float *found) {
    const int64_t rank = in->rank, wide = turned->wide, ranks = turned->ranks;
    const int64_t inputs = in->inputs, pairs = (count + 1) / 2;
    float *grad_b = found + in->parts * rank * inputs;
    if (in->x) find_down(in, turned, start, count);
    memset(turned->grad_down, 0, sizeof(float) * count * ranks);
    for (int64_t part = 0, at = 0; part < in->parts; part++)
        for (int64_t o = 0, size; o < in->widths[part]; o += size, at += size) {
            size = in->widths[part] - o < GRADS ? in->widths[part] - o : GRADS;
            narrow_rows(in, turned, start, count, part, o, size, at);
            for (int64_t k = 0; k < size && in->x; k += LANES)
                for (int64_t j = 0; j < rank; j += LANES)
                    add_pairs(turned->grad_rows + k * (BLOCK / 2), LANES, turned->down_rows + part * wide + j, ranks, pairs,
                              grad_b + (at + k) * rank + j, rank, LANES, rank - j);
        }
    if (in->grad_x) {
        for (int64_t r = 0; r < count; r++)
            pair_ranks(turned->grad_down + r * ranks, in->parts, rank, wide, in->scale, turned->factors + r * turned->stride);
        spread_rows(count, in, turned, in->grad_x + start * inputs);
    }
    if (!in->x) return;
    for (int64_t i = 0; i < count * ranks; i += LANES)
        put(turned->grad_down + i, scaled(loaded(turned->grad_down + i), same(in->scale)));
    for (int64_t j = 0; j < ranks; j += LANES)
        pair_rows(turned->grad_down, 0, ranks, j, count, turned->grad_down_rows + j, ranks);
    for (int64_t i = 0; i < inputs; i += LANES) {
        pair_rows(in->x, in->half, inputs, start * inputs + i, count, turned->x_rows, LANES);
        for (int64_t part = 0; part < in->parts; part++)
            for (int64_t j = 0; j < rank; j += LANES)
                add_pairs(turned->grad_down_rows + part * wide + j, ranks, turned->x_rows, LANES, pairs,
                          found + (part * rank + j) * inputs + i, inputs, rank - j, LANES);
    }
}

/* `lora_gradient` with factors in bfloat16. */
int lora_gradient_halves(const LoraGradient *in, int64_t first, int64_t last) {
    const int64_t inputs = in->inputs, rank = in->rank, parts = in->parts, words = words_of(inputs);
    const int64_t wide = panels_of(rank) * LANES, ranks = parts * wide, pairs = pairs_of(rank), stride = parts * pairs;
    const int64_t size = rank * (parts * inputs + in->outputs);
    const int is_again = in->x && !in->down; /* down is computed again */
    const int has_panels = is_again && in->rows >= LEAST_PANEL_ROWS;
    const int64_t rows = in->rows < BLOCK ? in->rows + in->rows % 2 : BLOCK; /* an even number */
    int64_t all = 0;
    const int64_t a = place(&all, in->grad_x ? stride * inputs : 0);
    const int64_t panels = place(&all, has_panels ? panels_of(parts * rank) * words * LANES : 0);
    const int64_t outputs = place(&all, GRADS / 2 * wide), x = place(&all, is_again ? rows * words : 0);
    const int64_t grads = place(&all, NARROWED_ROWS * GRADS / 2), grad_rows = place(&all, BLOCK / 2 * GRADS);
    const int64_t x_rows = place(&all, BLOCK / 2 * LANES), down_rows = place(&all, rows / 2 * ranks);
    const int64_t grad_down_rows = place(&all, rows / 2 * ranks), factors = place(&all, rows * stride + LANES);
    const int64_t down = place(&all, is_again ? rows * parts * rank : 0), grad_down = place(&all, rows * ranks);
    int32_t *room = malloc(4 * all);
    if (!room) return 2;
    const Turned turned = {.wide = wide,
                           .ranks = ranks,
                           .pairs = pairs,
                           .stride = stride,
                           .a = room + a,
                           .panels = has_panels ? room + panels : 0,
                           .outputs = room + outputs,
                           .x = room + x,
                           .grads = room + grads,
                           .grad_rows = room + grad_rows,
                           .x_rows = room + x_rows,
                           .down_rows = room + down_rows,
                           .grad_down_rows = room + grad_down_rows,
                           .factors = room + factors,
                           .down = (float *)(room + down),
                           .grad_down = (float *)(room + grad_down)};
    if (in->grad_x) turn_pairs_of_ranks(in, &turned);
    if (has_panels) turn_ranks(in->a, 0, parts * rank, inputs, turned.panels);
    for (int64_t group = first; group < last; group++) {
        float *found = in->found + group * size;
        if (in->x && !in->adds) memset(found, 0, sizeof(float) * size);
        int64_t end = in->rows * (group + 1) / in->groups;
        for (int64_t start = in->rows * group / in->groups; start < end; start += BLOCK)
            add_gradient(in, &turned, start, end - start < BLOCK ? end - start : BLOCK, found);
    }
    free(room);
    return 0;
}

#else
int add_lora_halves(const AddLora *in, int64_t first, int64_t last) { return 1; }
int lora_gradient_halves(const LoraGradient *in, int64_t first, int64_t last) { return 1; }
#endif
