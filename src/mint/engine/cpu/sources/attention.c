/* Causal attention on a CPU: forward for training, prefill and decoding alike.

   Queries that read the same keys are computed together, over keys turned so that 16 of them lie side by side. A query's
   result is a function of its own keys and values alone: a score is the sum, in pairs, of 16 lanes of the head dimension,
   whichever way it is found; the normaliser is one sum over the keys, 16 lanes wide; the mix one over the keys, in order.
   So bits do not depend on what is computed together, on how keys are stored, or on threads. With a window, a query sees
   its last keys alone: nothing is computed for the others, but for a few beside them whose shares are 0. With a sink, the
   normaliser of a query has one more part, behind those of its keys.

   In bfloat16 with AMX, scores and mixes are summed in the order of its registers instead: see attention_amx.h.

   Sums are in float32; heads are float32 or bfloat16. Queries and keys are read as words of 32 bits: a float, or two
   bfloat16 side by side.

   Letters: T rows of heads, H heads of a row, K kv heads, G query heads per kv head, D head dimension. Query p of some
   rows is query head p % G of row p / G. */

#include "lanes.h"
#include "memory.h"

#ifdef __AMX_BF16__
#include "attention_amx.h"
#define BY_AMX(half) (half)
#else
#define BY_AMX(half) 0
#endif

#define QUERIES 8     /* computed at once */
#define MOST 32       /* that may share turned keys; by AMX, computed at once */
#define TURNED 11     /* so many words of a key are turned in the time in which the lanes of a score are added up */
#if LANES == 8
#define HELD_SUMS 8 /* vectors of sums that fit into the registers, beside what is added */
#else
#define HELD_SUMS 16
#endif
#define CACHED_SCORES (1 << 16) /* scores that stay in the level-2 cache, with the keys */

/* A score is the sum over 16 lanes, in pairs, of what every 16th word adds up to. It is found in two ways: */

/* scores[p][at + j] = queries[p] . key j, for `panels` times 16 keys turned to [panels, 16 * steps words, 16]. */
INLINE void score(const int count, const int panels, const int steps, const int half, const int32_t *const *queries,
                  const float *turned, float *const *scores, int64_t at) {
    vf level[4][4][2];
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++) {
        vf total[4][2] = {{{0}}};
#pragma GCC unroll 8
        for (int w = lane; w < steps * LANES; w += LANES) {
            vf key[2];
#pragma GCC unroll 2
            for (int n = 0; n < panels; n++) {
                key[n] = *(const vf *)(turned + (n * steps * LANES + w) * LANES);
                HELD(key[n]);
            }
#pragma GCC unroll 4
            for (int p = 0; p < count; p++) {
                const int32_t *word = queries[p] + w;
#pragma GCC unroll 2
                for (int n = 0; n < panels; n++) /* of floats so that the word is an operand in memory */
                    if (half) total[p][n] = add_words(total[p][n], key[n], (vf)((vi){0} + *word), 1);
                    else total[p][n] += *(const float *)word * key[n];
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < count; p++)
#pragma GCC unroll 2
            for (int n = 0; n < panels; n++) {
                if (lane % 2 == 1) total[p][n] = level[0][p][n] + total[p][n];
                if (lane % 4 == 3) total[p][n] = level[1][p][n] + total[p][n];
                if (lane % 8 == 7) total[p][n] = level[2][p][n] + total[p][n];
                if (lane % 16 == 15) total[p][n] = level[3][p][n] + total[p][n];
                if (lane == LANES - 1) *(vf *)(scores[p] + at + n * LANES) = total[p][n];
                level[lane % 2 == 0 ? 0 : lane % 4 == 1 ? 1 : lane % 8 == 3 ? 2 : 3][p][n] = total[p][n];
            }
    }
}

/* The same for keys as they are, `stride` elements apart. */
INLINE void dot(const int count, const int steps, const int half, const int32_t *const *queries, const char *keys,
                int64_t stride, int64_t most, float *const *scores, int64_t at) {
    for (int64_t j = 0; j < most; j += LANES) {
        vf found[2][LANES];
#pragma GCC unroll 4
        for (int i = 0; i < LANES; i++) {
            const char *key = keys + (j + i < most ? j + i : most - 1) * stride * (half ? 2 : 4);
            vf total[2] = {{0}};
#pragma GCC unroll 8
            for (int s = 0; s < steps; s++)
#pragma GCC unroll 2
                for (int p = 0; p < count; p++)
                    total[p] = add_words(total[p], *(const vf *)(queries[p] + s * LANES), ((const vf *)key)[s], half);
            for (int p = 0; p < count; p++) found[p][i] = total[p];
        }
#pragma GCC unroll 2
        for (int p = 0; p < count; p++) *(vf *)(scores[p] + at + j) = sums(found[p]);
    }
}

/* mixed[p] += sum over rows j of shares[p][at + j] * row j, in order, `wide` times 16 columns at a time. Of bfloat16,
   the even ones of 32 columns lie before the odd ones. */
INLINE void mix(const int count, const int wide, const int half, float *const *shares, int64_t at, const char *rows,
                int64_t stride, int64_t keys, float *mixed, int64_t dim) {
    const float *own[QUERIES];
#pragma GCC unroll 8
    for (int p = 0; p < count; p++) own[p] = shares[p] + at;
    for (int64_t d = 0; d < dim; d += wide * LANES) {
        vf total[QUERIES][8];
#pragma GCC unroll 8
        for (int p = 0; p < count; p++)
#pragma GCC unroll 8
            for (int n = 0; n < wide; n++) total[p][n] = *(vf *)(mixed + p * dim + d + n * LANES);
        for (int64_t j = 0; j < keys; j++) {
            vf value[8];
#pragma GCC unroll 8
            for (int n = 0; n < wide; n++) {
                if (!half) value[n] = *(const vf *)((const float *)rows + j * stride + d + n * LANES);
                else if (n % 2) value[n] = odd(value[n - 1]), value[n - 1] = even(value[n - 1]);
                else value[n] = *(const vf *)((const uint16_t *)rows + j * stride + d + n * LANES);
            }
#pragma GCC unroll 8
            for (int p = 0; p < count; p++)
#pragma GCC unroll 8
                for (int n = 0; n < wide; n++) total[p][n] += own[p][j] * value[n];
        }
#pragma GCC unroll 8
        for (int p = 0; p < count; p++)
#pragma GCC unroll 8
            for (int n = 0; n < wide; n++) *(vf *)(mixed + p * dim + d + n * LANES) = total[p][n];
    }
}

/* Each is compiled once and called by training and decoding alike: inlined twice, it could be contracted in two ways. */
typedef void Score(const int32_t *const *queries, const float *turned, float *const *scores, int64_t at);
typedef void Dot(const int32_t *const *queries, const char *keys, int64_t stride, int64_t most, float *const *scores,
                 int64_t at);
typedef void Mix(float *const *shares, int64_t at, const char *rows, int64_t stride, int64_t keys, float *mixed,
                 int64_t dim);
#define SCORE(P, N, D, HALF) \
    __attribute__((noinline)) static void score_##P##_##N##_##D##_##HALF( \
        const int32_t *const *queries, const float *turned, float *const *scores, int64_t at) { \
        score(P, N, D / LANES / (1 + HALF), HALF, queries, turned, scores, at); \
    }
#define DOT(P, D, HALF) \
    __attribute__((noinline)) static void dot_##P##_##D##_##HALF( \
        const int32_t *const *queries, const char *keys, int64_t stride, int64_t most, float *const *scores, int64_t at) { \
        dot(P, D / LANES / (1 + HALF), HALF, queries, keys, stride, most, scores, at); \
    }
#define MIX(P, N, HALF) \
    __attribute__((noinline)) static void mix_##P##_##N##_##HALF( \
        float *const *shares, int64_t at, const char *rows, int64_t stride, int64_t keys, float *mixed, int64_t dim) { \
        const int held = (P) * (N) > HELD_SUMS ? HELD_SUMS / (N) : (P); \
        for (int p = 0; p < (P); p += held) \
            mix(held, N, HALF, shares + p, at, rows, stride, keys, mixed + p * dim, dim); \
    }
#define SCORES(D, HALF) \
    SCORE(1, 1, D, HALF) SCORE(2, 1, D, HALF) SCORE(4, 1, D, HALF) DOT(1, D, HALF) DOT(2, D, HALF)
SCORES(32, 0) SCORES(64, 0) SCORES(96, 0) SCORES(128, 0) SCORES(256, 0)
SCORES(32, 1) SCORES(64, 1) SCORES(96, 1) SCORES(128, 1) SCORES(256, 1)
MIX(1, 2, 0) MIX(2, 2, 0) MIX(4, 2, 0) MIX(8, 2, 0) MIX(1, 4, 0) MIX(2, 4, 0) MIX(4, 4, 0) MIX(1, 8, 0) MIX(2, 8, 0)
MIX(1, 2, 1) MIX(2, 2, 1) MIX(4, 2, 1) MIX(8, 2, 1) MIX(1, 4, 1) MIX(2, 4, 1) MIX(4, 4, 1) MIX(1, 8, 1) MIX(2, 8, 1)

/* For one head dimension and element: by queries at once (1, 2) and panels; by queries; by queries (1, 2, 4, 8). */
typedef struct {
    Score *score[3];
    Dot *dot[2];
    Mix *mix[4];
} Kernels;
#define KERNELS(D, M, N, HALF) \
    {{score_1_1_##D##_##HALF, score_2_1_##D##_##HALF, score_4_1_##D##_##HALF}, \
     {dot_1_##D##_##HALF, dot_2_##D##_##HALF}, \
     {mix_1_##M##_##HALF, mix_2_##M##_##HALF, mix_4_##N##_##HALF, mix_8_2_##HALF}}

static const Kernels *find_kernels(int64_t dim, int64_t half) {
    static const struct {
        int64_t dim;
        Kernels kinds[2];
    } all[] = {{32, {KERNELS(32, 2, 2, 0), KERNELS(32, 2, 2, 1)}},
               {64, {KERNELS(64, 4, 4, 0), KERNELS(64, 4, 4, 1)}},
               {96, {KERNELS(96, 2, 2, 0), KERNELS(96, 2, 2, 1)}},
               {128, {KERNELS(128, 8, 4, 0), KERNELS(128, 8, 4, 1)}},
               {256, {KERNELS(256, 8, 4, 0), KERNELS(256, 8, 4, 1)}}};
    for (size_t n = 0; n < sizeof(all) / sizeof(all[0]); n++)
        if (all[n].dim == dim) return all[n].kinds + half;
    return 0;
}

/* Queries under way: of each, where it lies, its scores [width], and that it sees the keys from `first` on, below `keys`;
   its sink, if `has_sinks`; what is mixed of its values [D]. `turned` is room for keys. */
typedef struct {
    const Kernels *kernels;
    int64_t dim, half, words, width, most;
    const int32_t *query[MOST];
    float *scores[MOST], sink[MOST];
    int has_sinks;
    int64_t first[MOST], keys[MOST];
    float *mixed, *turned, *memory;
    int32_t *rows, *shares, *values; /* by AMX: the queries [.., words], their shares, and room for pairs of values */
    int64_t share_words;             /* from the shares of a query to those of the next one */
} Queries;

static int open_queries(Queries *q, int64_t dim, int64_t half, int has_sinks, int64_t longest, int64_t most,
                        int64_t keys) {
    q->kernels = find_kernels(dim, half);
    if (!q->kernels) return 1;
    q->dim = dim;
    q->half = half;
    q->has_sinks = has_sinks;
    memset(q->sink, 0, sizeof(q->sink));
    q->words = half ? dim / 2 : dim;
    q->most = most;
    q->width = (((longest + LANES - 1) / LANES + 2) | 1) * LANES; /* an odd number of lines: not all in one cache set */
    const int64_t turned = (keys + LANES - 1) / LANES * LANES * q->words;
    q->share_words = BY_AMX(half) ? ((q->width / 2 + LANES - 1) / LANES | 1) * LANES : 0;
    const int64_t of_query = q->width + dim + (BY_AMX(half) ? q->words + q->share_words : 0);
    q->memory = scratch(sizeof(float) * (most * of_query + turned + (BY_AMX(half) ? (keys + 64) / 2 * dim : 0)));
    if (!q->memory) return 2;
    for (int64_t p = 0; p < most; p++) q->scores[p] = q->memory + p * q->width;
    q->mixed = q->memory + most * q->width;
    q->turned = q->mixed + most * dim;
    q->rows = (int32_t *)(q->turned + turned);
    q->shares = q->rows + most * q->words;
    q->values = q->shares + most * q->share_words;
    return 0;
}

/* A multiple of LANES below which queries `p` to `end` see nothing. */
static int64_t lowest(const Queries *q, int64_t p, int64_t end) {
    int64_t least = q->first[p];
    for (int64_t i = p + 1; i < end; i++)
        if (q->first[i] < least) least = q->first[i];
    return whole_lanes(least);
}

/* The scores of queries `p` to `end` with `keys` turned keys; there is room for more than their own. */
static void score_queries(Queries *q, int64_t p, int64_t end, const float *turned, int64_t keys, int64_t at) {
#ifdef __AMX_BF16__
    if (q->half && keys > 0) {
        for (int64_t i = p; i < end; i++) memcpy(q->rows + i * q->words, q->query[i], sizeof(float) * q->words);
        AmxProduct own = {q->rows + p * q->words, q->words, (const int32_t *)turned, q->words * LANES, q->words,
                          q->scores[p] + at, q->width};
        multiply_amx(&own, end - p, 0, (keys + LANES - 1) / LANES);
    }
    if (q->half) return;
#endif
    for (int64_t size; p < end; p += size) {
        int kind = end - p >= 4 ? 2 : end - p >= 2;
        size = 1 << kind;
        for (int64_t j = 0; j < keys; j += LANES)
            q->kernels->score[kind](q->query + p, turned + j * q->words, q->scores + p, at + j);
    }
}

/* The scores of queries `p` to `end` with keys as they are, `stride` elements apart. */
static void dot_queries(Queries *q, int64_t p, int64_t end, const char *keys, int64_t stride, int64_t count, int64_t at) {
    for (int64_t size; p < end; p += size) {
        size = end - p > 1 ? 2 : 1;
        q->kernels->dot[size - 1](q->query + p, keys, stride, count, q->scores + p, at);
    }
}

/* The same queries' mix of the rows of `values`, `stride` elements apart, for keys from `at` on. */
static void mix_queries(Queries *q, int64_t p, int64_t end, const char *values, int64_t stride, int64_t keys, int64_t at) {
    if (keys <= 0) return;
    for (int64_t size; p < end; p += size) {
        int kind = end - p >= 8 ? 3 : end - p >= 4 ? 2 : end - p >= 2;
        size = 1 << kind;
        q->kernels->mix[kind](q->scores + p, at, values, stride, keys, q->mixed + p * q->dim, q->dim);
    }
}

/* The same, where each query sees those of its own `keys` only that lie below `at + keys`. */
static void mix_visible(Queries *q, int64_t p, int64_t end, const char *values, int64_t stride, int64_t keys, int64_t at) {
    const int64_t size = q->half ? 2 : 4;
    int64_t least = keys;
    for (int64_t i = p; i < end; i++)
        if (q->keys[i] - at < least) least = q->keys[i] - at;
    if (least < 0) least = 0;
    mix_queries(q, p, end, values, stride, least, at);
    for (int64_t next; p < end; p = next) {
        for (next = p + 1; next < end && q->keys[next] == q->keys[p];) next++;
        int64_t own = q->keys[p] - at < keys ? q->keys[p] - at : keys;
        mix_queries(q, p, next, values + least * stride * size, stride, own - least, at + least);
    }
}

/* Shares of the scores of `count` queries, from the `lowest` key on; nothing is mixed yet. */
static void share_queries(Queries *q, int64_t count, float *inverse) {
    const float scale = 1.0f / sqrtf((float)q->dim);
    const int64_t low = lowest(q, 0, count);
    for (int64_t p = 0; p < count; p += LANES) {
        int64_t own = count - p < LANES ? count - p : LANES;
        *(vf *)(inverse + p) = exponentials(q->scores + p, q->first + p, q->keys + p, own, scale,
                                             q->has_sinks ? q->sink + p : 0);
    }
    for (int64_t p = 0; p < count; p++)
        if (q->first[p] > low) memset(q->scores[p] + low, 0, sizeof(float) * (whole_lanes(q->first[p]) - low));
    memset(q->mixed, 0, sizeof(float) * count * q->dim);
#ifdef __AMX_BF16__
    int64_t most = 0;
    for (int64_t p = 0; p < count; p++) most = q->keys[p] > most ? q->keys[p] : most;
    for (int64_t p = 0; p < count && q->half; p++)
        round_shares(q->scores[p], whole_chunks(low), up_to_chunk(most), q->first[p], q->keys[p],
                     q->shares + p * q->share_words + whole_chunks(low) / 2);
#endif
}

#ifdef __AMX_BF16__
/* The mix of queries `p` to `end` of values [D / 16, words, 16], for keys `start` to `stop`, multiples of CHUNK; the values
   are those of keys from `begin` on. */
static void mix_pairs(Queries *q, int64_t p, int64_t end, const int32_t *values, int64_t words, int64_t begin, int64_t start,
                      int64_t stop) {
    if (start >= stop) return;
    AmxProduct own = {q->shares + p * q->share_words + start / 2, q->share_words, values + (start - begin) / 2 * LANES,
                      words * LANES, (stop - start) / 2, q->mixed + p * q->dim, q->dim, 1};
    multiply_amx(&own, end - p, 0, q->dim / LANES);
}
#endif

/* out [D] = mixed * inverse. */
static void finish_query(const Queries *q, int64_t p, float inverse, char *out) {
    const float *mixed = q->mixed + p * q->dim;
#ifdef __AMX_BF16__
    if (q->half) {
        round_mixed(mixed, q->dim, inverse, out);
        return;
    }
#endif
    for (int64_t d = 0; d < q->dim; d += 2 * LANES) {
        vf first = *(const vf *)(mixed + d) * inverse, second = *(const vf *)(mixed + d + LANES) * inverse;
        if (q->half) {
            *(vu *)((uint16_t *)out + d) = rounded(first) | rounded(second) << 16;
        } else {
            *(vf *)((float *)out + d) = first;
            *(vf *)((float *)out + d + LANES) = second;
        }
    }
}

/* Rows, `stride` bytes apart, that are wanted soon. */
INLINE void fetch(const char *rows, int64_t stride, int64_t count, int64_t words) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t w = 0; w < words; w += LANES) __builtin_prefetch(rows + i * stride + w * sizeof(float), 0, 2);
}

/* Keys, `stride` elements apart, 16 side by side: [count / 16, words, 16]; the last again and again where they end. */
static void turn_keys(const Queries *q, const char *keys, int64_t stride, int64_t count, float *turned) {
    const int64_t size = q->half ? 2 : 4;
    for (int64_t j = 0; j < count; j += LANES) {
        const char *row[LANES];
        for (int64_t i = 0; i < LANES; i++) row[i] = keys + (j + i < count ? j + i : count - 1) * stride * size;
        for (int64_t w = 0; w < q->words; w += LANES) turn_words(row, w * sizeof(float), turned + (j * q->words + w * LANES));
    }
}

/* The scores of queries `p` to `end` with `count` keys; which of the ways is the shorter one decides. */
static void score_keys(Queries *q, int64_t p, int64_t end, const char *keys, int64_t stride, int64_t count, int64_t at) {
#ifdef __AMX_BF16__
    if (q->half && end - p <= FEW) {
        score_few(end - p, q->query + p, q->words, keys, stride * 2, count, q->scores + p, at);
        return;
    }
#endif
    if (!BY_AMX(q->half) && TURNED * (end - p) <= q->words) {
        dot_queries(q, p, end, keys, stride, count, at);
    } else {
        turn_keys(q, keys, stride, count, q->turned);
        score_queries(q, p, end, q->turned, count, at);
    }
}

typedef struct {
    const Packed *rows;
    int64_t dim, half, window; /* 0: none */
    const float *sinks;        /* [K*G], or none */
    const char *heads;
    char *out;
} AttendPacked;

/* What `before` keys of a prefix are turned into: the keys, and, by AMX, pairs of the values of its whole chunks. */
typedef struct {
    float *keys;
    int32_t *values;
} Prefix;

/* Rows r to end of a span, with kv head k; its prefix is turned already. */
static void attend_span(const AttendPacked *in, Queries *q, int64_t r, int64_t end, int64_t k, const Prefix *prefix) {
    const Packed *p = in->rows;
    const int64_t size = q->half ? 2 : 4, groups = p->query_heads / p->kv_heads, wide = p->total_heads * q->dim;
    const int64_t before = p->prefix_count[r], own = p->own[r];
    const char *keys = in->heads + (p->query_heads + k) * q->dim * size, *values = keys + p->kv_heads * q->dim * size;
    float inverse[MOST];
    const int64_t own_count = p->row[end - 1] - own + 1;
    turn_keys(q, keys + own * wide * size, wide, own_count, q->turned);
#ifdef __AMX_BF16__
    const int64_t chunks_before = whole_chunks(before), own_words = up_to_chunk(before + own_count - chunks_before) / 2;
    const Values own_values = {values + (p->prefix[r] + chunks_before) * wide * size, values + own * wide * size,
                               before - chunks_before, own_count, wide * size};
    if (q->half) pair_values(&own_values, q->dim, own_words, q->values);
#endif
    for (int64_t start = 0; start < (end - r) * groups; start += q->most) {
        int64_t count = (end - r) * groups - start < q->most ? (end - r) * groups - start : q->most;
        for (int64_t i = 0; i < count; i++) {
            int64_t row = p->row[r + (start + i) / groups], head = k * groups + (start + i) % groups;
            q->query[i] = (const int32_t *)(in->heads + (row * wide + head * q->dim) * size);
            q->keys[i] = before + row - own + 1;
            q->first[i] = first_seen(q->keys[i], in->window);
            if (in->sinks) q->sink[i] = in->sinks[head];
        }
        const int64_t low = lowest(q, 0, count), all = q->keys[count - 1];
        const int64_t skipped = low < before ? low : before, more = low < before ? 0 : whole_lanes(low - before);
        score_queries(q, 0, count, prefix->keys + whole_lanes(skipped) * q->words, before - skipped, skipped);
        score_queries(q, 0, count, q->turned + more * q->words, all - before - more, before + more);
        share_queries(q, count, inverse);
#ifdef __AMX_BF16__
        const int64_t begin = whole_chunks(low), later = begin < chunks_before ? chunks_before : begin;
        if (q->half) {
            mix_pairs(q, 0, count, prefix->values, chunks_before / 2, 0, begin, chunks_before);
            mix_pairs(q, 0, count, q->values, own_words, chunks_before, later, up_to_chunk(all));
        }
#endif
        const int64_t hidden = low < before ? 0 : low - before;
        if (!BY_AMX(q->half)) {
            mix_queries(q, 0, count, values + (p->prefix[r] + skipped) * wide * size, wide, before - skipped, skipped);
            mix_visible(q, 0, count, values + (own + hidden) * wide * size, wide, all - before - hidden, before + hidden);
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t row = r + (start + i) / groups, head = k * groups + (start + i) % groups;
            finish_query(q, i, inverse[i], in->out + (row * p->query_heads + head) * q->dim * size);
        }
    }
}

static int64_t queries_at_once(const AttendPacked *in) {
    const int64_t cached = CACHED_SCORES / (in->rows->longest + LANES);
    return !BY_AMX(in->half) || cached < QUERIES ? QUERIES : cached < MOST ? cached : MOST;
}

/* out [rows, K*G*D] of heads [T, H, D], for rows `first` to `last`. */
int attend_packed(const AttendPacked *in, int64_t first, int64_t last) {
    const Packed *p = in->rows;
    const int64_t size = in->half ? 2 : 4, wide = p->total_heads * in->dim;
    Queries q;
    int code = open_queries(&q, in->dim, in->half, in->sinks != 0, p->longest, queries_at_once(in), p->longest + LANES);
    if (code) return code;
    const int64_t room = (p->longest + LANES) * q.words, values_room = BY_AMX(in->half) ? p->longest / 2 * in->dim : 0;
    float *prefix = scratch(sizeof(float) * (room + values_room) * p->kv_heads);
    if (!prefix) {
        free(q.memory);
        return 2;
    }
    for (int64_t r = first, turned = -1, end; r < last; r = end) {
        end = end_of_span(p, r, last);
        if (p->prefix_count[r] && (turned < 0 || p->prefix[r] != p->prefix[turned] ||
                                   p->prefix_count[r] != p->prefix_count[turned]))
            turned = r;
        for (int64_t k = 0; k < p->kv_heads; k++) {
            const char *keys = in->heads + (p->prefix[r] * wide + (p->query_heads + k) * in->dim) * size;
            const Prefix own = {prefix + k * room, (int32_t *)(prefix + p->kv_heads * room) + k * values_room};
            if (turned == r) turn_keys(&q, keys, wide, p->prefix_count[r], own.keys);
#ifdef __AMX_BF16__
            const Values values = {keys + p->kv_heads * in->dim * size, 0, p->prefix_count[r], 0, wide * size};
            if (turned == r && q.half) pair_values(&values, in->dim, whole_chunks(p->prefix_count[r]) / 2, own.values);
#endif
            attend_span(in, &q, r, end, k, &own);
        }
    }
#ifdef __AMX_BF16__
    end_amx();
#endif
    free(prefix);
    free(q.memory);
    return 0;
}

typedef struct {
    int64_t rows, total_heads, query_heads, kv_heads, side, chunk, columns, longest;
    const int64_t *table, *positions; /* [rows, columns], [rows] */
} Decode;

typedef struct {
    const Decode *rows;
    int64_t dim, half, window; /* 0: none */
    const float *sinks;        /* [K*G], or none */
    const char *heads, *keys, *values;
    char *out;
} AttendPages;

/* Rows that have the same page `page` for their keys from `at` on, and the most keys that one of them sees in it. */
typedef struct {
    int64_t row, end, page, at, keys;
} Shared;

/* How rows r to end share pages: into `found`, by columns and then rows; returns how many there are. */
static int64_t find_shared(const Decode *p, int64_t r, int64_t end, Shared *found) {
    int64_t count = 0;
    for (int64_t column = 0; column < p->columns; column++)
        for (int64_t row = r, next; row < end; row = next) {
            Shared own = {row, row, p->table[row * p->columns + column], column * p->chunk, 0};
            for (next = row; next < end && p->table[next * p->columns + column] == own.page; next++) {
                int64_t keys = p->positions[next] + 1 - own.at;
                keys = keys < p->chunk ? keys : p->chunk;
                own.keys = keys > own.keys ? keys : own.keys;
            }
            own.end = next;
            if (own.keys) found[count++] = own;
        }
    return count;
}

/* Queries `start` to `stop` of the rows from r on, with kv head k. */
static void attend_rows(const AttendPages *in, Queries *q, int64_t r, int64_t start, int64_t stop, int64_t k,
                        const Shared *shared, int64_t shared_count) {
    const Decode *p = in->rows;
    const int64_t size = q->half ? 2 : 4, groups = p->query_heads / p->kv_heads, wide = p->total_heads * q->dim;
    const int64_t stride = p->side * q->dim, page = p->kv_heads * p->chunk * q->dim, count = stop - start;
    const int64_t place = (k / p->side) * p->chunk * stride + (k % p->side) * q->dim;
    float inverse[MOST];
    for (int64_t i = 0; i < count; i++) {
        int64_t own = r + (start + i) / groups, head = k * groups + (start + i) % groups;
        q->query[i] = (const int32_t *)(in->heads + (own * wide + head * q->dim) * size);
        q->keys[i] = p->positions[own] + 1;
        q->first[i] = first_seen(q->keys[i], in->window);
        if (in->sinks) q->sink[i] = in->sinks[head];
    }
    for (int pass = 0; pass < 2; pass++) {
        for (const Shared *own = shared; own < shared + shared_count; own++) {
            int64_t one = (own->row - r) * groups - start, other = (own->end - r) * groups - start;
            one = one > 0 ? one : 0;
            other = other < count ? other : count;
            if (one >= other) continue;
            int64_t low = lowest(q, one, other), hidden = low > own->at ? low - own->at : 0, keys = own->keys - hidden;
            if (keys <= 0) continue;
            int64_t from = (own->page * page + place + hidden * stride) * size;
#ifdef __AMX_BF16__
            if (pass && q->half) {
                const int64_t begin = whole_chunks(own->at + hidden), words = up_to_chunk(own->at + own->keys - begin) / 2;
                const char *first = in->values + (own->page * page + place + (begin - own->at) * stride) * size;
                const Values found = {first, 0, own->at + own->keys - begin, 0, stride * size};
                pair_values(&found, q->dim, words, q->values);
                mix_pairs(q, one, other, q->values, words, begin, begin, begin + 2 * words);
                continue;
            }
#endif
            if (pass) {
                mix_visible(q, one, other, in->values + from, stride, keys, own->at + hidden);
                continue;
            }
            if (!BY_AMX(q->half) && own + 1 < shared + shared_count)
                fetch(in->keys + (own[1].page * page + place) * size, stride * size, own[1].keys, q->words);
            score_keys(q, one, other, in->keys + from, stride, keys, own->at + hidden);
            if (!BY_AMX(q->half)) fetch(in->values + from, stride * size, keys, q->words);
        }
        if (!pass) share_queries(q, count, inverse);
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t own = r + (start + i) / groups, head = k * groups + (start + i) % groups;
        finish_query(q, i, inverse[i], in->out + (own * p->query_heads + head) * q->dim * size);
    }
}

/* out [rows, K*G*D] of heads [rows, H, D] over keys and values [N, K / side, chunk, side * D], for rows `first` to
   `last`. Neighbours with the same pages are computed together. */
int attend_pages(const AttendPages *in, int64_t first, int64_t last) {
    const Decode *p = in->rows;
    const int64_t groups = p->query_heads / p->kv_heads;
    Queries q;
    int64_t most = CACHED_SCORES / (p->longest + LANES);
    most = most < MOST ? most : MOST;
    int64_t rows = most / groups > 1 ? most / groups : 1, queries = rows * groups < MOST ? rows * groups : MOST;
    int code = open_queries(&q, in->dim, in->half, in->sinks != 0, p->longest, queries, p->chunk);
    if (code) return code;
    Shared *shared = scratch(sizeof(Shared) * rows * p->columns);
    if (!shared) {
        free(q.memory);
        return 2;
    }
    for (int64_t r = first, end; r < last; r = end) {
        for (end = r + 1; end < last && end - r < rows; end++)
            if ((end - r) * groups >= LANES && p->table[end * p->columns] != p->table[r * p->columns]) break;
        int64_t count = find_shared(p, r, end, shared);
        for (int64_t k = 0; k < p->kv_heads; k++)
            for (int64_t start = 0, stop; start < (end - r) * groups; start = stop) {
                stop = start + MOST < (end - r) * groups ? start + MOST : (end - r) * groups;
                attend_rows(in, &q, r, start, stop, k, shared, count);
            }
    }
#ifdef __AMX_BF16__
    end_amx();
#endif
    free(shared);
    free(q.memory);
    return 0;
}
