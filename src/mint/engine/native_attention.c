/* Causal attention on a CPU, one query at a time: forward for training, prefill and decoding alike.

   A query's result is a function of its own keys and values alone: a score is one sum over the head dimension, the
   normaliser and the mix are sums in the order of the keys, 16 lanes wide. So bits do not depend on what else is
   computed, on how keys are stored, or on threads. Sums are in float32; heads are float32 or bfloat16.

   Letters: T rows of heads, H heads of a row, K kv heads, G query heads per kv head, D head dimension. */

#include "native_lanes.h"

/* Keys and values of one kv head, some elements apart. */
typedef struct {
    const char *keys, *values;
    int64_t count;
} Segment;

/* scores[g][j] = q[g] . row j, for `count` rows; to be stored from scores[g] on, `width` floats apart for each g. */
INLINE void dot(const int D, const int G, const float *q, const char *rows, int64_t stride, int64_t count,
                float *scores, int64_t width, int half) {
    for (int64_t j = 0; j < count; j += LANES) {
        vf found[4][LANES];
        int64_t left = count - j < LANES ? count - j : LANES;
#pragma GCC unroll 4
        for (int i = 0; i < LANES; i++) {
            int64_t at = (j + (i < left ? i : left - 1)) * stride;
            vf total[4];
            for (int g = 0; g < G; g++) total[g] = (vf){0};
#pragma GCC unroll 8
            for (int d = 0; d < D; d += LANES) {
                vf x = load(rows, at + d, half);
                for (int g = 0; g < G; g++) total[g] += *(const vf *)(q + g * D + d) * x;
            }
            for (int g = 0; g < G; g++) found[g][i] = total[g];
        }
        for (int g = 0; g < G; g++) {
            vf own = sums(found[g]);
            if (left == LANES) *(vf *)(scores + g * width + j) = own;
            else memcpy(scores + g * width + j, &own, left * sizeof(float));
        }
    }
}

/* out[g] += sum over rows j of shares[g][j] * row j, in order. */
INLINE void mix(const int D, const int G, const float *shares, int64_t width, const char *rows, int64_t stride,
                int64_t count, float *out, int half) {
    vf total[4][D / LANES];
#pragma GCC unroll 2
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int d = 0; d < D / LANES; d++) total[g][d] = *(vf *)(out + g * D + d * LANES);
    for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 8
        for (int d = 0; d < D / LANES; d++) {
            vf x = load(rows, j * stride + d * LANES, half);
            for (int g = 0; g < G; g++) total[g][d] += shares[g * width + j] * x;
        }
#pragma GCC unroll 2
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int d = 0; d < D / LANES; d++) *(vf *)(out + g * D + d * LANES) = total[g][d];
}

INLINE void scaled(const int D, const int G, const char *heads, int64_t at, float *q, int half) {
    const float scale = 1.0f / sqrtf((float)D);
    for (int i = 0; i < D * G; i += LANES) *(vf *)(q + i) = load(heads, at + i, half) * scale;
}

/* G query heads side by side from `query` on, over all segments; writes to `out` from `to` on. */
INLINE void attend_one(const int D, const int G, const int half, const char *heads, int64_t query, const Segment *segments,
                   int segment_count, int64_t stride, float *scores, int64_t width, char *out, int64_t to) {
    float q[4 * 256], mixed[4 * 256];
    scaled(D, G, heads, query, q, half);
    int64_t keys = 0;
    for (int s = 0; s < segment_count; s++) {
        dot(D, G, q, segments[s].keys, stride, segments[s].count, scores + keys, width, half);
        keys += segments[s].count;
    }
    float inverse[4];
    for (int g = 0; g < G; g++) inverse[g] = exponentials(scores + g * width, keys);
    memset(mixed, 0, sizeof(float) * D * G);
    keys = 0;
    for (int s = 0; s < segment_count; s++) {
        mix(D, G, scores + keys, width, segments[s].values, stride, segments[s].count, mixed, half);
        keys += segments[s].count;
    }
    for (int g = 0; g < G; g++)
        for (int d = 0; d < D; d += LANES) store(out, to + g * D + d, *(vf *)(mixed + g * D + d) * inverse[g], half);
}

/* Compiled once for each head dimension, number of query heads taken together, and element, and called by training and
   decoding alike: inlined twice, it could be contracted in two ways. */
typedef void Attend(const char *heads, int64_t query, const Segment *segments, int segment_count, int64_t stride,
                    float *scores, int64_t width, char *out, int64_t to);
#define ATTEND(D, G, HALF) \
    __attribute__((noinline)) static void attend_##D##_##G##_##HALF( \
        const char *heads, int64_t query, const Segment *segments, int segment_count, int64_t stride, float *scores, \
        int64_t width, char *out, int64_t to) { \
        attend_one(D, G, HALF, heads, query, segments, segment_count, stride, scores, width, out, to); \
    }
#define KINDS(D) ATTEND(D, 1, 0) ATTEND(D, 2, 0) ATTEND(D, 1, 1) ATTEND(D, 2, 1)
KINDS(32) KINDS(64) KINDS(128)

static Attend *find_attend(int64_t dim, int64_t step, int64_t half) {
#define FOUND(D) if (dim == D) return step == 1 ? half ? attend_##D##_1_1 : attend_##D##_1_0 : half ? attend_##D##_2_1 : attend_##D##_2_0;
    FOUND(32) FOUND(64) FOUND(128)
    return 0;
}

typedef struct {
    int64_t rows, total_heads, query_heads, kv_heads, side, chunk, columns, longest;
    const int64_t *table, *positions; /* [rows, columns], [rows] */
} Decode;

INLINE int packed_segments(const Packed *p, int64_t r, int64_t k, int64_t D, const char *heads, int size, Segment *s) {
    int64_t wide = p->total_heads * D, key = (p->query_heads + k) * D, value = (p->query_heads + p->kv_heads + k) * D;
    int count = 0;
    int64_t starts[2] = {p->prefix[r], p->own[r]}, counts[2] = {p->prefix_count[r], p->row[r] - p->own[r] + 1};
    for (int i = 0; i < 2; i++)
        if (counts[i]) {
            const char *base = heads + starts[i] * wide * size;
            s[count++] = (Segment){base + key * size, base + value * size, counts[i]};
        }
    return count;
}

typedef struct {
    const Packed *p;
    int64_t D, half;
    const char *heads;
    char *out;
} AttendPacked;

int attend_packed(const AttendPacked *in, int64_t first, int64_t last) {
    const Packed *p = in->p;
    int64_t D = in->D, half = in->half;
    const char *heads = in->heads;
    char *out = in->out;
    const int size = half ? 2 : 4;
    int64_t wide = p->total_heads * D, width = (p->longest + LANES) / LANES * LANES, groups = p->query_heads / p->kv_heads;
    int64_t step = groups % 2 ? 1 : 2;
    Attend *attend = find_attend(D, step, half);
    if (!attend) return 1;
    float *scores = malloc(sizeof(float) * width * step);
    if (!scores) return 2;
    Segment segments[2];
    for (int64_t r = first; r < last; r++)
        for (int64_t k = 0; k < p->kv_heads; k++) {
            int count = packed_segments(p, r, k, D, heads, size, segments);
            for (int64_t g = 0; g < groups; g += step)
                attend(heads, p->row[r] * wide + (k * groups + g) * D, segments, count, wide, scores, width, out,
                       (r * p->query_heads + k * groups + g) * D);
        }
    free(scores);
    return 0;
}

typedef struct {
    const Decode *p;
    int64_t D, half;
    const char *heads, *keys, *values;
    char *out;
} AttendCells;

int attend_cells(const AttendCells *in, int64_t first, int64_t last) {
    const Decode *p = in->p;
    int64_t D = in->D, half = in->half;
    const char *heads = in->heads, *keys = in->keys, *values = in->values;
    char *out = in->out;
    const int size = half ? 2 : 4;
    int64_t wide = p->total_heads * D, width = (p->longest + LANES) / LANES * LANES, groups = p->query_heads / p->kv_heads;
    int64_t stride = p->side * D, cell = p->kv_heads * p->chunk * D, step = groups % 2 ? 1 : 2;
    Attend *attend = find_attend(D, step, half);
    if (!attend) return 1;
    float *scores = malloc(sizeof(float) * width * step);
    Segment *segments = malloc(sizeof(Segment) * p->columns);
    if (!scores || !segments) {
        free(scores);
        free(segments);
        return 2;
    }
    for (int64_t r = first; r < last; r++)
        for (int64_t k = 0; k < p->kv_heads; k++) {
            int64_t at = (k / p->side) * p->chunk * stride + (k % p->side) * D, left = p->positions[r] + 1;
            int count = 0;
            for (; left > 0; left -= p->chunk, count++) {
                int64_t start = p->table[r * p->columns + count] * cell + at;
                segments[count] = (Segment){keys + start * size, values + start * size, left < p->chunk ? left : p->chunk};
            }
            for (int64_t g = 0; g < groups; g += step)
                attend(heads, r * wide + (k * groups + g) * D, segments, count, stride, scores, width, out,
                       (r * p->query_heads + k * groups + g) * D);
        }
    free(segments);
    free(scores);
    return 0;
}
