/* Attention's backward on a CPU. The scores are computed again, for several queries at once, over keys turned so that 16
   of them lie side by side.

   Sums are in float32, in the order of rows and keys; heads and their gradients are float32 or bfloat16. Where the
   processor multiplies pairs of bfloat16 in half the time, it does so: shares, and the slopes of scores, are rounded to
   bfloat16 before they are multiplied with heads, as FlashAttention does. A gradient does not depend on which rows have
   one. So the two numbers of a pair belong to one head, to two keys, or to two query heads of one row, but not to two rows.
   With one query head per kv head, a pair would be one query and zeros, and floats are as fast. With AMX the numbers of a
   pair may belong to two rows, for each row has a place of its own, and a row that is missing leaves zeros there.

   Letters: T rows of heads, H heads of a row, K kv heads, G query heads per kv head, D head dimension. */

#include "amx.h"
#include "lanes.h"
#include "memory.h"
#include "pairs.h"

#define QUERIES 8
#ifdef __AMX_BF16__
#define HAS_AMX 1
#define PAIRED_QUERIES AMX_ROWS
#define SEEN (2 * LANES)  /* what is seen of the keys begins and ends at multiples of this: the words of a register */
#else
#define HAS_AMX 0
#define PAIRED_QUERIES QUERIES
#define SEEN LANES
#endif
#define COLUMNS (2 * LANES) /* head dimensions are multiples of this */

/* Rows of heads lie too far apart for the processor to fetch them ahead by itself. */
#define AHEAD 16 /* rows */
#define LINE 64

#ifdef __AVX512BF16__
#define PAIRS 1 /* products of bfloat16 take half the time of those of floats */
#else
#define PAIRS 0
#endif

static void fetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char *)from + i);
}

/* The keys and values of one kv head that some rows share: keys as the rows of a mix [width, D] (with AMX in panels,
   [D / 16, width / 2, 16]), keys and values turned,
   16 of them side by side [width / 16, D, 16], and what their gradients have become. All are words: floats, or, if
   `paired`, two bfloat16 side by side: of a mix, those of two keys; of what is turned, those of two numbers of a head. So
   there are half as many. */
typedef struct {
    int64_t dim, width;
    int paired;
    float *keys, *turned_keys, *turned_values, *key_grads, *value_grads;
} Span;

/* Of one block of Q queries: the queries and the gradients of what they attended [Q, words]; the same as rows of an outer
   product [Q, D] (paired: those of two queries side by side, [Q / 2, D]); the gradients for the queries [Q, D]; shares and
   slopes [Q, width]; and, if paired, these as factors: of two queries [Q / 2, width], of two keys [Q, width / 2]. With AMX
   those of two queries also key by key, of shares [width, Q / 2] and then of slopes. And a row of zeros [D], for places
   without a query. */
typedef struct {
    float *queries, *grads, *outer_queries, *outer_grads, *found, *zeros, *shares, *slopes;
    float *outer_shares, *outer_slopes, *key_slopes, *outer_factors;
} Block;

typedef int32_t Word __attribute__((may_alias)); /* two numbers of 16 bits were written */

/* total + x * the same word for all lanes. */
INLINE vf add_same(vf total, const float *word, vf x, const int paired) {
    return paired ? add_words(total, (vf)((vi){0} + *(const Word *)word), x, 1) : total + *word * x;
}

/* out[p][j] = rows[p] . key j, for keys turned, up to `count` (a multiple of 16). */
INLINE void times_turned(const float *rows, int64_t words, const float *turned, int64_t count, float *out, int64_t width,
                         const int queries, const int paired) {
#if HAS_AMX
    if (paired) {
        const AmxProduct own = {(const int32_t *)rows, words, (const int32_t *)turned, words * LANES, words, out, width};
        multiply_panels(1, &own, 0, 0, count / LANES, 0, 0);
        return;
    }
#endif
    for (int64_t j = 0; j < count; j += LANES) {
        const float *panel = turned + j * words;
        vf total[PAIRED_QUERIES];
#pragma GCC unroll 16
        for (int p = 0; p < queries; p++) total[p] = (vf){0};
        for (int64_t w = 0; w < words; w++) {
            vf x = *(const vf *)(panel + w * LANES);
#pragma GCC unroll 16
            for (int p = 0; p < queries; p++) total[p] = add_same(total[p], rows + p * words + w, x, paired);
        }
#pragma GCC unroll 16
        for (int p = 0; p < queries; p++) *(vf *)(out + p * width + j) = total[p];
    }
}

/* out[p] = sum over `count` words j from `low` on of factors[p][j] * keys[j]; there are `width` words of keys. */
INLINE void mix_keys(const float *factors, int64_t width, const float *keys, int64_t low, int64_t count, int64_t dim,
                     float *out, const int queries, const int paired) {
    factors += low;
#if HAS_AMX
    if (paired) {
        const int32_t *panels = (const int32_t *)keys + low * LANES;
        const AmxProduct own = {(const int32_t *)factors, width, panels, width * LANES, count, out, dim};
        multiply_panels(1, &own, 0, 0, dim / LANES, 0, 0);
        return;
    }
#endif
    keys += low * dim;
    for (int64_t d = 0; d < dim; d += COLUMNS) {
        vf first[PAIRED_QUERIES], second[PAIRED_QUERIES];
#pragma GCC unroll 16
        for (int p = 0; p < queries; p++) first[p] = second[p] = (vf){0};
        for (int64_t j = 0; j < count; j++) {
            vf a = *(const vf *)(keys + j * dim + d), b = *(const vf *)(keys + j * dim + d + LANES);
#pragma GCC unroll 16
            for (int p = 0; p < queries; p++) {
                first[p] = add_same(first[p], factors + p * width + j, a, paired);
                second[p] = add_same(second[p], factors + p * width + j, b, paired);
            }
        }
#pragma GCC unroll 16
        for (int p = 0; p < queries; p++) {
            *(vf *)(out + p * dim + d) = first[p];
            *(vf *)(out + p * dim + d + LANES) = second[p];
        }
    }
}

/* sums[j] += sum over p of factors[p][j] * rows[p]; p counts queries, or pairs of them. */
INLINE void add_outer(const float *factors, int64_t width, const float *rows, int64_t count, int64_t dim, float *sums,
                      const int queries, const int paired) {
    const int most = paired ? queries / 2 : queries;
    for (int64_t d = 0; d < dim; d += COLUMNS) {
        vf first[QUERIES], second[QUERIES];
#pragma GCC unroll 8
        for (int p = 0; p < most; p++) {
            first[p] = *(const vf *)(rows + p * dim + d);
            second[p] = *(const vf *)(rows + p * dim + d + LANES);
        }
        for (int64_t j = 0; j < count; j++) {
            vf a = *(vf *)(sums + j * dim + d), b = *(vf *)(sums + j * dim + d + LANES);
#pragma GCC unroll 8
            for (int p = 0; p < most; p++) {
                a = add_same(a, factors + p * width + j, first[p], paired);
                b = add_same(b, factors + p * width + j, second[p], paired);
            }
            *(vf *)(sums + j * dim + d) = a;
            *(vf *)(sums + j * dim + d + LANES) = b;
        }
    }
}

#if HAS_AMX
#define PAIRED_WORDS (PAIRED_QUERIES / 2)

/* sums[j] += sum over words w of factors[j][w] * rows[w], for factors [count, Q / 2]. */
static void add_outer_pairs(const float *factors, const float *rows, int64_t count, int64_t dim, float *sums) {
    __asm__ volatile("" : : : "memory"); /* as in amx.h */
    for (int64_t d = 0; d < dim; d += COLUMNS) {
        _tile_loadd(2, rows + d, 4 * dim);
        _tile_loadd(3, rows + d + LANES, 4 * dim);
        for (int64_t j = 0; j < count; j += LANES) {
            float *first = sums + j * dim + d, *second = first + LANES;
            _tile_loadd(5, factors + j * PAIRED_WORDS, 4 * PAIRED_WORDS);
            _tile_loadd(0, first, 4 * dim);
            _tile_loadd(1, second, 4 * dim);
            _tile_dpbf16ps(0, 5, 2);
            _tile_dpbf16ps(1, 5, 3);
            _tile_stored(0, first, 4 * dim);
            _tile_stored(1, second, 4 * dim);
        }
    }
}
#endif

/* Of up to LANES queries: from scores, which are still to be multiplied with `scale`, to shares, and from d / d share to
   d / d score; zeros from `low` to their own `firsts`, and from their own `keys` to `padded`. */
static void softmax_backward(float *const *shares, float *const *slopes, const int64_t *firsts, const int64_t *keys,
                             float scale, const float *sinks, int64_t count, int64_t low, int64_t padded) {
    vf total[LANES] = {{0}}, inverse = exponentials(shares, firsts, keys, count, scale, sinks);
    for (int64_t p = 0; p < count; p++) {
        int64_t start = whole_lanes(firsts[p]), last = whole_lanes(keys[p] - 1);
        *(vf *)(slopes[p] + last) = first_lanes(*(vf *)(slopes[p] + last), keys[p] - last, 0);
        for (int64_t j = low; j < start; j += LANES) *(vf *)(shares[p] + j) = *(vf *)(slopes[p] + j) = (vf){0};
        for (int64_t j = start; j <= last; j += LANES) {
            *(vf *)(shares[p] + j) *= inverse[p];
            total[p] += *(vf *)(shares[p] + j) * *(vf *)(slopes[p] + j);
        }
        for (int64_t j = last + LANES; j < padded; j += LANES) *(vf *)(shares[p] + j) = *(vf *)(slopes[p] + j) = (vf){0};
    }
    vf mean = sums(total);
    for (int64_t p = 0; p < count; p++)
        for (int64_t j = whole_lanes(firsts[p]); j < keys[p]; j += LANES)
            *(vf *)(slopes[p] + j) = *(vf *)(shares[p] + j) * (*(vf *)(slopes[p] + j) - mean[p]) * scale;
}

/* Two rounded rows as pairs of bfloat16. */
INLINE vf pairs(vu first, vu second) { return (vf)(first | second << 16); }

/* The factors of a block from keys `low` to `padded`. */
#if HAS_AMX
static void pair_factors(const Block *block, int64_t width, int64_t low, int64_t padded) {
    for (int p = 0; p < PAIRED_QUERIES; p += 2) {
        const float *share = block->shares + p * width, *slope = block->slopes + p * width;
        float *of_first = block->key_slopes + p * (width / 2), *of_second = of_first + width / 2;
        float *outer_share = block->outer_shares + p / 2 * width, *outer_slope = block->outer_slopes + p / 2 * width;
        for (int64_t j = low; j < padded; j += 2 * LANES) {
            __m512 own[4], other[4]; /* of both queries: slopes and shares of 32 keys */
            for (int n = 0; n < 2; n++) {
                own[n] = _mm512_loadu_ps(slope + j + n * LANES);
                other[n] = _mm512_loadu_ps(slope + width + j + n * LANES);
                own[2 + n] = _mm512_loadu_ps(share + j + n * LANES);
                other[2 + n] = _mm512_loadu_ps(share + width + j + n * LANES);
            }
            _mm512_storeu_si512(of_first + j / 2, rounded_in_turn(own[0], own[1]));
            _mm512_storeu_si512(of_second + j / 2, rounded_in_turn(other[0], other[1]));
            for (int n = 0; n < 2; n++) {
                _mm512_storeu_si512(outer_slope + j + n * LANES, side_by_side(own[n], other[n]));
                _mm512_storeu_si512(outer_share + j + n * LANES, side_by_side(own[2 + n], other[2 + n]));
            }
        }
    }
    const char *shares[PAIRED_WORDS], *slopes[PAIRED_WORDS];
    for (int i = 0; i < PAIRED_WORDS; i++) {
        shares[i] = (const char *)(block->outer_shares + i * width);
        slopes[i] = (const char *)(block->outer_slopes + i * width);
    }
    for (int64_t j = low; j < padded; j += LANES) {
        turn_words(shares, j * sizeof(float), block->outer_factors + j * PAIRED_WORDS);
        turn_words(slopes, j * sizeof(float), block->outer_factors + (width + j) * PAIRED_WORDS);
    }
}
#else
static void pair_factors(const Block *block, int64_t width, int64_t low, int64_t padded) {
    for (int p = 0; p < PAIRED_QUERIES; p += 2) {
        const float *share = block->shares + p * width, *slope = block->slopes + p * width;
        for (int64_t j = low; j < padded; j += LANES) {
            vu first = rounded(*(const vf *)(slope + j)), second = rounded(*(const vf *)(slope + width + j));
            *(vf *)(block->outer_slopes + p / 2 * width + j) = pairs(first, second);
            *(vh *)((uint16_t *)(block->key_slopes + p * (width / 2)) + j) = __builtin_convertvector(first, vh);
            *(vh *)((uint16_t *)(block->key_slopes + (p + 1) * (width / 2)) + j) = __builtin_convertvector(second, vh);
            first = rounded(*(const vf *)(share + j)), second = rounded(*(const vf *)(share + width + j));
            *(vf *)(block->outer_shares + p / 2 * width + j) = pairs(first, second);
        }
    }
}
#endif

static int64_t keys_of(const Packed *p, int64_t r) { return p->prefix_count[r] + p->row[r] - p->own[r] + 1; }

/* Which row of heads key j of row r is. */
static int64_t row_of_key(const Packed *p, int64_t r, int64_t j) {
    return j < p->prefix_count[r] ? p->prefix[r] + j : p->own[r] + j - p->prefix_count[r];
}

/* 16 rows of `words`, side by side: [words, 16]. */
INLINE void turn(const char *const *rows, int64_t words, float *turned) {
    for (int64_t w = 0; w < words; w += LANES) turn_words(rows, w * sizeof(float), turned + w * LANES);
}

/* 16 bfloat16 of each of two rows, in pairs. */
INLINE vf pairs_of(const char *first, const char *second, int64_t at) {
    vh one = *(const vh *)((const uint16_t *)first + at), other = *(const vh *)((const uint16_t *)second + at);
    return pairs(__builtin_convertvector(one, vu), __builtin_convertvector(other, vu));
}

/* Where key j of row r is in `heads`, for kv head k. */
static const char *key_at(const Packed *p, int64_t r, int64_t j, int64_t k, const char *heads, int64_t bytes) {
    return heads + (row_of_key(p, r, j) * p->total_heads + p->query_heads + k) * bytes;
}

/* Of keys j and j + 1, the pairs of numbers from d on. */
INLINE vf *mix_place(const Span *span, int64_t j, int64_t d) {
#if HAS_AMX
    return (vf *)(span->keys + (d / LANES * (span->width / 2) + j / 2) * LANES);
#else
    return (vf *)(span->keys + j / 2 * span->dim + d);
#endif
}

static void read_span(const Packed *p, int64_t last, int64_t k, const char *heads, int half, Span *span) {
    const int64_t dim = span->dim, words = span->paired ? dim / 2 : dim, count = keys_of(p, last);
    const int64_t bytes = dim * (half ? 2 : 4), behind = p->kv_heads * bytes; /* of a head; from its key to its value */
    float *values = span->value_grads; /* a place for a moment */
    span->width = (count + SEEN - 1) / SEEN * SEEN;
    for (int64_t start = 0; start < span->width; start += LANES) {
        const char *key[LANES], *value[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            int64_t j = start + i < count ? start + i : count - 1;
            key[i] = key_at(p, last, j, k, heads, bytes);
            value[i] = key[i] + behind;
            if (j + AHEAD >= count) continue;
            const char *next = key_at(p, last, j + AHEAD, k, heads, bytes);
            fetch(next, bytes);
            fetch(next + behind, bytes);
        }
        if (span->paired) {
            for (int64_t i = 0; i < LANES; i += 2)
                for (int64_t d = 0; d < dim; d += LANES)
                    *mix_place(span, start + i, d) = pairs_of(key[i], key[i + 1], d);
        } else {
            for (int64_t i = 0; i < LANES; i++) {
                float *wide_key = span->keys + (start + i) * dim, *wide_value = values + i * dim;
                for (int64_t d = 0; d < dim; d += LANES) *(vf *)(wide_key + d) = load(key[i], d, half);
                key[i] = (const char *)wide_key;
                if (!half) continue;
                for (int64_t d = 0; d < dim; d += LANES) *(vf *)(wide_value + d) = load(value[i], d, half);
                value[i] = (const char *)wide_value;
            }
        }
        turn(key, words, span->turned_keys + start * words);
        turn(value, words, span->turned_values + start * words);
    }
    memset(span->key_grads, 0, sizeof(float) * span->width * dim);
    memset(span->value_grads, 0, sizeof(float) * span->width * dim);
}

/* Adds to `sums` [T, 2, D], those of keys and values of one kv head. */
static void add_span(const Packed *p, int64_t last, const Span *span, float *sums) {
    int64_t dim = span->dim, count = keys_of(p, last);
    for (int64_t j = 0; j < count; j++) {
        float *to = sums + 2 * row_of_key(p, last, j) * dim;
        if (j + AHEAD < count) fetch(sums + 2 * row_of_key(p, last, j + AHEAD) * dim, 2 * dim * sizeof(float));
        for (int64_t d = 0; d < dim; d += LANES) {
            *(vf *)(to + d) += *(vf *)(span->key_grads + j * dim + d);
            *(vf *)(to + dim + d) += *(vf *)(span->value_grads + j * dim + d);
        }
    }
}

/* The gradients of the key and the value of row t for kv head k. */
INLINE void store_row(const Packed *p, int64_t t, int64_t k, const float *key, const float *value, int64_t dim, int half,
                      char *grads) {
    const int64_t at = (t * p->total_heads + p->query_heads + k) * dim;
    for (int64_t d = 0; d < dim; d += LANES) {
        store(grads, at + d, *(const vf *)(key + d), half);
        store(grads, at + p->kv_heads * dim + d, *(const vf *)(value + d), half);
    }
}

/* `sums` [T, 2, D] of kv head k as gradients of its keys and values. */
static void store_sums(const Packed *p, const float *sums, int64_t count, int64_t dim, int64_t k, int half, char *grads) {
    for (int64_t t = 0; t < count; t++, sums += 2 * dim) store_row(p, t, k, sums, sums + dim, dim, half, grads);
}

/* The same for the keys of one span, which no other span has. */
static void store_span(const Packed *p, int64_t last, const Span *span, int64_t k, int half, char *grads) {
    const float *keys = span->key_grads, *values = span->value_grads;
    for (int64_t j = 0, count = keys_of(p, last); j < count; j++, keys += span->dim, values += span->dim)
        store_row(p, row_of_key(p, last, j), k, keys, values, span->dim, half, grads);
}

/* The rows of heads of a block for products with what is turned, and for outer ones. */
INLINE void read_rows(const char *const *rows, int64_t dim, int half, float *own, float *outer, const int queries,
                      const int paired) {
    for (int64_t i = 0; i < queries; i++)
        for (int64_t d = 0; d < dim; d += LANES)
            if (paired) *(vh *)((uint16_t *)own + i * dim + d) = *(const vh *)((const uint16_t *)rows[i] + d);
            else *(vf *)(own + i * dim + d) = load(rows[i], d, half);
    if (!paired) return; /* both are the same */
    for (int64_t i = 0; i < queries; i += 2)
        for (int64_t d = 0; d < dim; d += LANES)
            *(vf *)(outer + i / 2 * dim + d) = pairs_of(rows[i], rows[i + 1], d);
}

typedef struct {
    const Packed *rows;
    int64_t count, dim, half, window; /* T; 0: none */
    const float *sinks;               /* [K*G], or none */
    const char *heads, *grad_out;
    char *grads;
} AttendPackedBackward;

/* How many rows from r on, of `most`, share a block that has places for `rows` rows of a span. With AMX a row's place
   depends on that row alone. */
INLINE int64_t rows_of_block(const Packed *p, int64_t r, int64_t most, int64_t rows, const int paired) {
    if (!HAS_AMX || !paired) return most < rows ? most : rows;
    const int64_t end = (p->row[r] - p->own[r]) / rows * rows + rows;
    int64_t count = 1;
    while (count < most && p->row[r + count] - p->own[r] < end) count++;
    return count;
}

/* Queries of `count` rows from r on, of heads `head` to `head + heads_taken`: `slots` for each row, no more in all
   than a block has. Where there is no query, rows are zeros. */
INLINE void run_block(const AttendPackedBackward *in, int64_t r, int64_t count, int64_t head, int64_t heads_taken,
                      int64_t slots, Span *span, Block *block, const int paired) {
    const int queries = paired ? PAIRED_QUERIES : QUERIES, seen_by = paired ? SEEN : LANES;
    const Packed *p = in->rows;
    const char *heads = in->heads, *grad_out = in->grad_out;
    const float *sinks = in->sinks;
    char *grads = in->grads;
    const int64_t half = in->half, bytes = half ? 2 : 4, window = in->window;
    const int64_t dim = span->dim, words = paired ? dim / 2 : dim, width = span->width;
    const int64_t low = first_seen(keys_of(p, r), window) / seen_by * seen_by;
    const int64_t padded = (keys_of(p, r + count - 1) + seen_by - 1) / seen_by * seen_by, seen = padded - low;
    const float scale = 1.0f / sqrtf((float)dim);
    const char *query[PAIRED_QUERIES], *grad[PAIRED_QUERIES];
    char *place[PAIRED_QUERIES]; /* of a query's gradient; 0: there is no query */
    float *shares[PAIRED_QUERIES], *slopes[PAIRED_QUERIES], own_sinks[PAIRED_QUERIES + LANES] = {0};
    int64_t firsts[PAIRED_QUERIES], keys[PAIRED_QUERIES], used = 0;
    for (int64_t i = 0; i < queries; i++) query[i] = grad[i] = (const char *)block->zeros, place[i] = 0;
    for (int64_t row = r; row < r + count; row++)
        for (int64_t slot = 0; slot < heads_taken; slot++, used++) {
            const int64_t own_place = HAS_AMX && paired ? (p->row[row] - p->own[row]) % (queries / slots) : row - r;
            const int64_t i = own_place * slots + slot, own = head + slot;
            const int64_t at = (p->row[row] * p->total_heads + own) * dim * bytes;
            query[i] = heads + at;
            grad[i] = grad_out + (row * p->query_heads + own) * dim * bytes;
            place[i] = grads + at;
            shares[used] = block->shares + i * width;
            slopes[used] = block->slopes + i * width;
            keys[used] = keys_of(p, row);
            firsts[used] = first_seen(keys[used], window);
            if (sinks) own_sinks[used] = sinks[own];
        }
    for (int64_t row = r + count; row < p->rows && row < r + 2 * count; row++) { /* for the next block */
        fetch(heads + (p->row[row] * p->total_heads + head) * dim * bytes, heads_taken * dim * bytes);
        fetch(grad_out + (row * p->query_heads + head) * dim * bytes, heads_taken * dim * bytes);
        fetch(grads + (p->row[row] * p->total_heads + head) * dim * bytes, heads_taken * dim * bytes);
    }
    read_rows(query, dim, half, block->queries, block->outer_queries, queries, paired);
    read_rows(grad, dim, half, block->grads, block->outer_grads, queries, paired);
    times_turned(block->queries, words, span->turned_keys + low * words, seen, block->shares + low, width, queries, paired);
    times_turned(block->grads, words, span->turned_values + low * words, seen, block->slopes + low, width, queries, paired);
    for (int64_t i = 0; i < queries; i++) /* 0 times what is not finite is no zero */
        if (!place[i])
            for (int64_t j = low; j < padded; j += LANES)
                *(vf *)(block->shares + i * width + j) = *(vf *)(block->slopes + i * width + j) = (vf){0};
    for (int64_t i = 0; i < used; i += LANES)
        softmax_backward(shares + i, slopes + i, firsts + i, keys + i, scale, sinks ? own_sinks + i : 0,
                         used - i < LANES ? used - i : LANES, low, padded);
    const float *outer_shares = block->shares, *outer_slopes = block->slopes, *key_slopes = block->slopes;
    if (paired) {
        pair_factors(block, width, low, padded);
        outer_shares = block->outer_shares, outer_slopes = block->outer_slopes, key_slopes = block->key_slopes;
    }
    const int64_t each = 1 + paired; /* keys of a word */
    mix_keys(key_slopes, width / each, span->keys, low / each, seen / each, dim, block->found, queries, paired);
    float *key_grads = span->key_grads + low * dim, *value_grads = span->value_grads + low * dim;
#if HAS_AMX
    if (paired) {
        const float *of_shares = block->outer_factors + low * PAIRED_WORDS, *of_slopes = of_shares + width * PAIRED_WORDS;
        add_outer_pairs(of_slopes, block->outer_queries, seen, dim, key_grads);
        add_outer_pairs(of_shares, block->outer_grads, seen, dim, value_grads);
    }
#endif
    if (!HAS_AMX || !paired) {
        add_outer(outer_slopes + low, width, block->outer_queries, seen, dim, key_grads, queries, paired);
        add_outer(outer_shares + low, width, block->outer_grads, seen, dim, value_grads, queries, paired);
    }
    for (int64_t i = 0; i < queries; i++) {
        if (!place[i]) continue;
        for (int64_t d = 0; d < dim; d += LANES) store(place[i], d, *(vf *)(block->found + i * dim + d), half);
    }
}

/* Each is compiled with loops of its own. */
static void run_floats(const AttendPackedBackward *in, int64_t r, int64_t count, int64_t head, int64_t heads_taken,
                       int64_t slots, Span *span, Block *block) {
    run_block(in, r, count, head, heads_taken, slots, span, block, 0);
}

static void run_pairs(const AttendPackedBackward *in, int64_t r, int64_t count, int64_t head, int64_t heads_taken,
                      int64_t slots, Span *span, Block *block) {
    run_block(in, r, count, head, heads_taken, slots, span, block, 1);
}

/* Grads [T, H, D] from grad_out [rows, K*G*D], for some kv heads and their queries; queries without a result stay as they
   are. */
int attend_packed_backward(const AttendPackedBackward *in, int64_t first, int64_t last) {
    const Packed *p = in->rows;
    const int64_t dim = in->dim, half = in->half;
    if (dim % COLUMNS) return 1;
    const int64_t groups = p->query_heads / p->kv_heads, width = (p->longest + SEEN) / SEEN * SEEN;
    const int paired = PAIRS && half && (HAS_AMX || groups > 1);
    const int64_t queries = paired ? PAIRED_QUERIES : QUERIES, together = groups < queries ? groups : queries;
    const int64_t slots = paired && !HAS_AMX ? (together + 1) / 2 * 2 : together, rows = queries / slots;
    int is_shared = 0; /* whether keys may belong to several spans, which add up what they give */
    for (int64_t r = 0; r < p->rows && !is_shared; r++) is_shared = p->prefix_count[r] > 0;
    const int64_t sums_size = is_shared ? 2 * in->count * dim : 0;
    const int64_t factors_size = (2 * queries + 3 * queries / 2 + HAS_AMX * PAIRED_QUERIES) * width;
    const int64_t memory_size = sums_size + 5 * width * dim + 6 * queries * dim + factors_size;
    float *memory = scratch(sizeof(float) * memory_size);
    if (!memory) return 2;
    float *sums = memory, *next = memory + sums_size;
    Span span = {.dim = dim, .paired = paired};
    Block block;
    float **parts[] = {&span.keys, &span.turned_keys, &span.turned_values, &span.key_grads, &span.value_grads};
    for (int i = 0; i < 5; i++, next += width * dim) *parts[i] = next;
    float **small[] = {&block.queries, &block.grads, &block.outer_queries, &block.outer_grads, &block.found, &block.zeros};
    for (int i = 0; i < 6; i++, next += queries * dim) *small[i] = next;
    float **factors[] = {&block.shares, &block.slopes};
    for (int i = 0; i < 2; i++, next += queries * width) *factors[i] = next;
    float **halved[] = {&block.outer_shares, &block.outer_slopes, &block.key_slopes};
    for (int i = 0; i < 3; i++, next += queries / 2 * width) *halved[i] = next;
    block.outer_factors = next;
    memset(block.zeros, 0, sizeof(float) * dim);
    if (!paired) block.outer_queries = block.queries, block.outer_grads = block.grads;
#if HAS_AMX
    if (paired) begin_amx(AMX_ROWS, PAIRED_WORDS); /* for all products */
#endif
    for (int64_t k = first; k < last; k++) {
        memset(sums, 0, sizeof(float) * sums_size);
        for (int64_t r = 0, end; r < p->rows; r = end) {
            end = end_of_span(p, r, p->rows);
            read_span(p, end - 1, k, in->heads, half, &span);
            for (int64_t own = r, count; own < end; own += count) {
                count = rows_of_block(p, own, end - own, rows, paired);
                for (int64_t g = 0; g < groups; g += together) {
                    const int64_t taken = g + together < groups ? together : groups - g;
                    (paired ? run_pairs : run_floats)(in, own, count, k * groups + g, taken, slots, &span, &block);
                }
            }
            if (is_shared) add_span(p, end - 1, &span, sums);
            else store_span(p, end - 1, &span, k, half, in->grads);
        }
        if (is_shared) store_sums(p, sums, in->count, dim, k, half, in->grads);
    }
#if HAS_AMX
    if (paired) end_amx();
#endif
    free(memory);
    return 0;
}
