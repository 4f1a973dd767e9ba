/* How `lora_halves.c` lays out what it multiplies: pairs of bfloat16 in words, in rows and in panels.

   Letters: I inputs, O outputs; a word is two bfloat16. */

#ifndef MINT_LORA_WORDS
#define MINT_LORA_WORDS

#include "calls.h"
#include "pairs.h"
#include "tiles.h"

#define SEGMENT 512 /* outputs that a lora's part is computed for together */
#define GRADS 256   /* outputs of a gradient that are done with before the next ones */

typedef __m512i Words;

INLINE Words words_at(const int32_t *from) { return _mm512_loadu_si512(from); }

/* The first `count` of 16 numbers and then zeros; `count` may be negative. */
INLINE Vector numbers_at(const float *from, int64_t count) {
    return count >= LANES ? loaded(from) : count <= 0 ? zeros() : loaded_first(from, count);
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
    return rounded_in_turn(loaded(x + at), left > LANES ? loaded(x + at + LANES) : zeros());
}

/* The same of `count` numbers, a multiple of 16; the last vector of 16 words is filled up with zeros. */
INLINE void take_row(const float *x, int64_t half, int64_t at, int64_t count, int32_t *to) {
    for (int64_t i = 0; i < count; i += 2 * LANES) _mm512_storeu_si512(to + i / 2, pairs_at(x, half, at + i, count - i));
}

/* Panels of 16 ranks. */
INLINE int64_t panels_of(int64_t ranks) { return (ranks + LANES - 1) / LANES; }

/* The words of a row of inputs, in whole vectors. */
INLINE int64_t words_of(int64_t inputs) { return (inputs + 2 * LANES - 1) / (2 * LANES) * LANES; }

/* Fetches so many bytes of what `next` is the place of, if it is there, into the second cache. */
INLINE void fetch(const char **next, int64_t bytes) {
    if (!*next) return;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(*next + i, 0, 2);
    *next += bytes;
}

/* panels [ranks / 16, words, 16] of a [ranks, I]; places past its last row or input are zero. As many bytes as are read
   are fetched of what is wanted next. */
static void turn_ranks(const float *a, int64_t half, int64_t ranks, int64_t inputs, int32_t *panels, const char **next) {
    const int64_t words = words_of(inputs);
    for (int64_t j = 0; j < ranks; j += LANES, panels += words * LANES)
        for (int64_t i = 0; i < inputs; i += 2 * LANES) {
            int32_t own[LANES * LANES];
            fetch(next, (half ? 2 : 4) * 2 * LANES * LANES);
            for (int64_t k = 0; k < LANES; k++) {
                Words found = _mm512_setzero_si512();
                if (j + k < ranks) found = pairs_at(a, half, (j + k) * inputs + i, inputs - i);
                _mm512_storeu_si512(own + k * LANES, found);
            }
            transpose(own, LANES, panels + i / 2 * LANES, LANES);
        }
}

/* Pairs of ranks of one part; with an odd rank the last has a zero. */
INLINE int64_t pairs_of(int64_t rank) { return (rank + 1) / 2; }

/* to [parts * pairs]: the words of scale * a row of `parts` parts of `rank` ranks; each part begins `apart` numbers further
   on. Writes up to 15 words too many, so rows must be written in their order. */
static void pair_ranks(const float *from, int64_t parts, int64_t rank, int64_t apart, float scale, int32_t *to) {
    for (int64_t part = 0; part < parts; part++, from += apart, to += pairs_of(rank))
        for (int64_t j = 0; j < rank; j += 2 * LANES) {
            Vector first = numbers_at(from + j, rank - j), second = numbers_at(from + j + LANES, rank - j - LANES);
            _mm512_storeu_si512(to + j / 2, rounded_in_turn(scaled(first, same(scale)), scaled(second, same(scale))));
        }
}

/* to [16, 16]: the words of two blocks of 16 rows, turned. Of the row r at `from + r * apart` and of the one `further` on,
   the first `own` and `others` numbers are read; the rest are zeros. */
INLINE void turn_blocks(const float *from, int64_t apart, int64_t further, int64_t own, int64_t others, int32_t *to) {
    Vector rows[LANES]; /* read in order: the processor fetches ahead for one reader, not for two */
    Words words[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) rows[r] = numbers_at(from + r * apart, own);
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) words[r] = rounded_in_turn(rows[r], numbers_at(from + r * apart + further, others));
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
   over which it writes the next outputs. `next` as for `turn_ranks`. */
static void turn_outputs(const float *b, int64_t half, int64_t rank, int64_t first, int64_t count, int32_t *columns,
                         const char **next) {
    const int64_t pairs = pairs_of(rank);
    const uint16_t *halves = (const uint16_t *)b + first * rank;
    if (!half) b += first * rank;
    int64_t o = 0;
    for (; rank == LANES && o + 2 * LANES <= count; o += 2 * LANES) { /* the ranks of 32 outputs fill the words */
        int32_t *to = columns + o * LANES / 2;
        fetch(next, (half ? 2 : 4) * 2 * LANES * LANES);
        if (half) turn_half_blocks(halves + o * LANES, LANES, LANES * LANES, LANES, LANES, to);
        else turn_blocks(b + o * LANES, LANES, LANES * LANES, LANES, LANES, to);
    }
    for (; o < count; o += LANES) {
        fetch(next, (half ? 2 : 4) * LANES * rank);
        for (int64_t j = 0; j < rank; j += 2 * LANES) {
            const int64_t from = o * rank + j;
            int32_t *to = columns + (o * pairs + j / 2 * LANES);
            if (half) turn_half_blocks(halves + from, rank, LANES, rank - j, rank - j - LANES, to);
            else turn_blocks(b + from, rank, LANES, rank - j, rank - j - LANES, to);
        }
    }
}

/* What a block of rows of a gradient needs. The ranks of a part have `wide` places, a multiple of 16. Places behind
   the last rank may hold NaN in grad_down; nobody reads them. */
typedef struct {
    int64_t wide, ranks;   /* of a part, and of all parts */
    int64_t pairs, stride; /* likewise */
    int32_t *a;            /* [I / 16, stride, 16]: of two ranks */
    int32_t *panels;       /* of a; missing where there are few rows, or where `down` is given */
    int32_t *ranks_room;   /* `ranks_room` words where there are no panels */
    int32_t *outputs;      /* [wide / 16, GRADS / 2, 16]: of two outputs of b */
    int32_t *x;            /* [BLOCK, words] */
    int32_t *grads;        /* [GRAD_ROWS, GRADS / 2]: of two outputs; not used with AMX if grad is bfloat16 already */
    int32_t *grad_rows;    /* [GRADS / 16, BLOCK / 2, 16]: of two rows */
    int32_t *x_rows;       /* [X_PANELS, BLOCK / 2, 16]: of two rows */
    int32_t *down_rows, *grad_down_rows; /* [BLOCK / 2, ranks]: of two rows */
    int32_t *room;         /* `room_of` words for the products themselves */
    int32_t *factors;      /* [BLOCK, stride]: of two ranks of grad_down */
    float *down;           /* [BLOCK, parts * rank] */
    float *grad_down;      /* [BLOCK, ranks] */
} Turned;

/* The panels of `size` rows of a part's b from `o` on: pairs of outputs. */
static void turn_b(const LoraGradient *in, const Turned *turned, int64_t part, int64_t o, int64_t size) {
    const int64_t rank = in->rank;
    for (int64_t j = 0; j < rank; j += LANES) {
        const float *b = in->bs[part] + o * rank + j;
        int32_t *to = turned->outputs + j * (GRADS / 2);
        for (int64_t i = 0; i < size; i += 2, b += 2 * rank, to += LANES)
            _mm512_storeu_si512(to, side_by_side(loaded_first(b, rank - j), loaded_first(b + rank, rank - j)));
    }
}

/* to [size / 16, `half_block`, 16], from pair `pair` on: of `count` rows [count, size / 2] of pairs of outputs, the pairs of
   rows; an odd last row is beside zeros. */
static void pair_grads(const int32_t *rows, int64_t stride, int64_t count, int64_t size, int64_t pair, int64_t half_block,
                       int32_t *to) {
    to += pair * LANES;
    for (int64_t k = 0; k < count; k += 2, to += LANES)
        for (int64_t i = 0; i < size; i += 2 * LANES) {
            const int32_t *own = rows + k * stride + i / 2;
            const __mmask16 first = size - i > LANES ? 0xffff : 0xff;
            Words row = _mm512_maskz_loadu_epi32(first, own);
            Words next = k + 1 < count ? _mm512_maskz_loadu_epi32(first, own + stride) : _mm512_setzero_si512();
            _mm512_storeu_si512(to + i / LANES * half_block * LANES, first_sides(row, next));
            if (size - i > LANES) _mm512_storeu_si512(to + (i / LANES + 1) * half_block * LANES, last_sides(row, next));
        }
}

/* to [count / 2, 16]: of pairs of rows of x the 16 numbers from `at` on; an odd last row is beside zeros.
   Vectors of `to` lie `apart` words from each other. */
INLINE void pair_rows(const float *x, int64_t half, int64_t stride, int64_t at, int64_t count, int32_t *to, int64_t apart) {
    for (int64_t r = 0; r < count; r += 2, at += 2 * stride, to += apart)
        _mm512_storeu_si512(to, side_by_side(row_at(x, half, at), r + 1 < count ? row_at(x, half, at + stride) : zeros()));
}

#endif
