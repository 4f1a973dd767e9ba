/* What a decoder does between its matrix products, on a CPU: norms, rotated heads, SwiGLU, and causal attention, one
   query at a time: forward for training, prefill and decoding alike, and attention's backward.

   A row's result is a function of that row alone. A query's is a function of its own keys and values alone: a score is one sum over the head dimension, the
   normaliser and the mix are sums in the order of the keys, 16 lanes wide. So bits do not depend on what else is
   computed, on how keys are stored, or on threads. Sums are in float32; heads are float32 or bfloat16.

   Letters: T rows of heads, H heads of a row, K kv heads, G query heads per kv head, D head dimension. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));

/* Keys and values of one kv head, some elements apart. */
typedef struct {
    const char *keys, *values;
    int64_t count;
} Segment;

INLINE vf load(const char *base, int64_t at, int half) {
    if (!half) return *(const vf *)((const float *)base + at);
    vh bits = *(const vh *)((const uint16_t *)base + at);
    return (vf)(__builtin_convertvector(bits, vu) << 16);
}

INLINE void store(char *base, int64_t at, vf x, int half) {
    if (!half) {
        *(vf *)((float *)base + at) = x;
        return;
    }
    vu bits = (vu)x; /* round to nearest even; NaN stays NaN */
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vi nan = (x != x);
    rounded = (vu)((vi)rounded & ~nan) | ((vu)nan & 0x7fc0);
    *(vh *)((uint16_t *)base + at) = __builtin_convertvector(rounded, vh);
}

INLINE vf pairs(vf a, vf b) {
    const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const vi odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

/* Lane i of the result is the sum of the lanes of a[i]. */
INLINE vf sums(vf *a) {
#pragma GCC unroll 4
    for (int width = LANES; width > 1; width /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < width / 2; i++) a[i] = pairs(a[2 * i], a[2 * i + 1]);
    return a[0];
}

INLINE float sum(vf x) {
    float s = 0;
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    s = x[0];
    return s;
}

/* exp of x <= 0, to about one unit in the last place; 0 below -87. */
INLINE vf exponential(vf x) {
    vf shifted = x * 1.44269504088896341f + 12582912.0f;
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    vi large = x > -87.0f;
    return (vf)((vi)(p * (vf)power) & large);
}

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

/* scores [keys] -> exp(scores - max), with zeros up to a multiple of LANES; returns 1 / their sum. */
INLINE float exponentials(float *scores, int64_t keys) {
    int64_t padded = (keys + LANES - 1) / LANES * LANES;
    for (int64_t j = keys; j < padded; j++) scores[j] = -INFINITY;
    vf highest = *(vf *)scores;
    for (int64_t j = LANES; j < padded; j += LANES) {
        vf x = *(vf *)(scores + j);
        vi higher = x > highest;
        highest = (vf)(((vi)x & higher) | ((vi)highest & ~higher));
    }
    float most = highest[0];
    for (int i = 1; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
    /* what is not finite must not be hidden: a NaN anywhere makes the sum one */
    vf total = {0};
    for (int64_t j = 0; j < padded; j += LANES) {
        vf x = *(vf *)(scores + j);
        vf e = exponential(x - most);
        vi nan = (x != x);
        e = (vf)(((vi)e & ~nan) | ((vi)x & nan));
        *(vf *)(scores + j) = e;
        total += e;
    }
    return 1.0f / sum(total);
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

/* The rows of one packed forward; row r attends to the `prefix_count` rows from `prefix` on, then from `own` to itself. */
typedef struct {
    int64_t rows, total_heads, query_heads, kv_heads, longest;
    const int64_t *row, *prefix, *prefix_count, *own;
} Packed;

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

int attend_packed(const Packed *p, int64_t D, int64_t half, const char *heads, char *out, int64_t first, int64_t last) {
    const int size = half ? 2 : 4;
    int64_t wide = p->total_heads * D, width = (p->longest + LANES) / LANES * LANES, groups = p->query_heads / p->kv_heads;
    int64_t step = groups % 2 ? 1 : 2;
    Attend *attend = find_attend(D, step, half);
    if (!attend) return 1;
    float *scores = malloc(sizeof(float) * width * step);
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

int attend_cells(const Decode *p, int64_t D, int64_t half, const char *heads, const char *keys, const char *values,
                 char *out, int64_t first, int64_t last) {
    const int size = half ? 2 : 4;
    int64_t wide = p->total_heads * D, width = (p->longest + LANES) / LANES * LANES, groups = p->query_heads / p->kv_heads;
    int64_t stride = p->side * D, cell = p->kv_heads * p->chunk * D, step = groups % 2 ? 1 : 2;
    Attend *attend = find_attend(D, step, half);
    if (!attend) return 1;
    float *scores = malloc(sizeof(float) * width * step);
    Segment *segments = malloc(sizeof(Segment) * p->columns);
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

/* Adds to grads [T, H, D] (float32) what grad_out [rows, K*G*D] gives, for some kv heads; rows in order. */
INLINE void packed_gradients(const int D, const int step, const int half, const Packed *p, const char *heads,
                             const char *grad_out, float *grads, int64_t first, int64_t last) {
    const int size = half ? 2 : 4;
    const float scale = 1.0f / sqrtf((float)D);
    int64_t wide = p->total_heads * D, width = (p->longest + LANES) / LANES * LANES, groups = p->query_heads / p->kv_heads;
    float *scores = malloc(sizeof(float) * width * step), *slopes = malloc(sizeof(float) * width * step);
    float q[4 * 256], own[4 * 256], found[4 * 256];
    Segment segments[2];
    for (int64_t k = first; k < last; k++)
        for (int64_t r = 0; r < p->rows; r++) {
            int count = packed_segments(p, r, k, D, heads, size, segments);
            for (int64_t g0 = 0; g0 < groups; g0 += step) {
                int64_t head = k * groups + g0, keys = 0;
                scaled(D, step, heads, p->row[r] * wide + head * D, q, half);
                for (int i = 0; i < D * step; i += LANES)
                    *(vf *)(own + i) = load(grad_out, (r * p->query_heads + head) * D + i, half);
                for (int s = 0; s < count; s++) {
                    dot(D, step, q, segments[s].keys, wide, segments[s].count, scores + keys, width, half);
                    dot(D, step, own, segments[s].values, wide, segments[s].count, slopes + keys, width, half);
                    keys += segments[s].count;
                }
                for (int g = 0; g < step; g++) {
                    float *share = scores + g * width, *slope = slopes + g * width;
                    float inverse = exponentials(share, keys);
                    vf total = {0};
                    for (int64_t j = keys; j < (keys + LANES - 1) / LANES * LANES; j++) slope[j] = 0;
                    for (int64_t j = 0; j < keys; j += LANES) {
                        *(vf *)(share + j) *= inverse;
                        total += *(vf *)(share + j) * *(vf *)(slope + j);
                    }
                    float mean = sum(total);
                    for (int64_t j = 0; j < keys; j += LANES)
                        *(vf *)(slope + j) = *(vf *)(share + j) * (*(vf *)(slope + j) - mean);
                }
                memset(found, 0, sizeof(float) * D * step);
                keys = 0;
                for (int s = 0; s < count; s++) {
                    const char *key = segments[s].keys;
                    mix(D, step, slopes + keys, width, key, wide, segments[s].count, found, half);
                    float *to = grads + (key - heads) / size, *values = to + p->kv_heads * D;
                    for (int64_t j = 0; j < segments[s].count; j++)
#pragma GCC unroll 8
                        for (int d = 0; d < D; d += LANES) {
                            vf by_key = *(vf *)(to + j * wide + d), by_value = *(vf *)(values + j * wide + d);
                            for (int g = 0; g < step; g++) {
                                by_key += slopes[g * width + keys + j] * *(vf *)(q + g * D + d);
                                by_value += scores[g * width + keys + j] * *(vf *)(own + g * D + d);
                            }
                            *(vf *)(to + j * wide + d) = by_key;
                            *(vf *)(values + j * wide + d) = by_value;
                        }
                    keys += segments[s].count;
                }
                for (int i = 0; i < D * step; i += LANES)
                    *(vf *)(grads + p->row[r] * wide + head * D + i) = *(vf *)(found + i) * scale;
            }
        }
    free(scores);
    free(slopes);
}

/* One compiled loop for each head dimension, number of query heads taken together, and element. */
#define CASE(D, CALL) \
    case D: \
        if (half) { if (groups % 2) { CALL(D, 1, 1); } else { CALL(D, 2, 1); } } \
        else { if (groups % 2) { CALL(D, 1, 0); } else { CALL(D, 2, 0); } } \
        break;
#define CASES(CALL) \
    switch (dim) { CASE(32, CALL) CASE(64, CALL) CASE(128, CALL) default: return 1; } \
    return 0;

int attend_packed_backward(const Packed *p, int64_t dim, int64_t half, const char *heads, const char *grad_out,
                           float *grads, int64_t first, int64_t last) {
    int64_t groups = p->query_heads / p->kv_heads;
#define CALL(D, G, HALF) packed_gradients(D, G, HALF, p, heads, grad_out, grads, first, last)
    CASES(CALL)
#undef CALL
}

INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vf total = {0};
    for (int64_t i = 0; i < width; i += LANES) total += *(const vf *)(x + i) * *(const vf *)(x + i);
    return 1.0f / sqrtf(sum(total) / width + eps);
}

/* out = x / rms(x) * weight for rows of `width`; inverse [T] = 1 / rms(x). */
int rms_norm(const float *x, const float *weight, double eps, int64_t width, float *out, float *inverse, int64_t first,
             int64_t last) {
    for (int64_t t = first; t < last; t++) {
        const float *own = x + t * width;
        float scale = inverse_rms(own, width, eps);
        for (int64_t i = 0; i < width; i += LANES)
            *(vf *)(out + t * width + i) = *(const vf *)(own + i) * scale * *(const vf *)(weight + i);
        inverse[t] = scale;
    }
    return 0;
}

/* From qkv [T, H, D] to heads of the same shape: bias added (also to qkv itself), the first `rotated` heads normed by
   `norms` [rotated, D] and turned by cos and sin [T, D / 2]; bias and norms may be missing. inverse [T, rotated]. */
int finish_heads(float *qkv, const float *bias, const float *norms, const float *cos, const float *sin, double eps,
                 int64_t total_heads, int64_t rotated, int64_t dim, int64_t half, char *heads, float *inverse,
                 int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < total_heads; h++) {
            int64_t at = (t * total_heads + h) * dim;
            float *own = qkv + at, scale = 1.0f;
            if (bias)
                for (int64_t i = 0; i < dim; i += LANES) *(vf *)(own + i) += *(const vf *)(bias + h * dim + i);
            if (h >= rotated) {
                for (int64_t i = 0; i < dim; i += LANES) store(heads, at + i, *(vf *)(own + i), half);
                continue;
            }
            if (norms) inverse[t * rotated + h] = scale = inverse_rms(own, dim, eps);
            for (int64_t i = 0; i < dim / 2; i += LANES) {
                vf a = *(vf *)(own + i), b = *(vf *)(own + dim / 2 + i);
                if (norms) {
                    a = a * scale * *(const vf *)(norms + h * dim + i);
                    b = b * scale * *(const vf *)(norms + h * dim + dim / 2 + i);
                }
                vf c = *(const vf *)(cos + t * dim / 2 + i), s = *(const vf *)(sin + t * dim / 2 + i);
                store(heads, at + i, a * c - b * s, half);
                store(heads, at + dim / 2 + i, b * c + a * s, half);
            }
        }
    return 0;
}

/* out [T, I] = silu(gate) * up of wide [T, 2I]. */
int swiglu(const float *wide, int64_t inner, float *out, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < inner; i += LANES) {
            vf gate = *(const vf *)(wide + t * 2 * inner + i), up = *(const vf *)(wide + t * 2 * inner + inner + i);
            vi negative = gate < 0.0f;
            vf e = exponential((vf)((vi)gate | (vi)((vu){0} + 0x80000000u))); /* exp(-|gate|) */
            vf numerator = (vf)(((vi)e & negative) | ((vi)((vf){0} + 1.0f) & ~negative));
            *(vf *)(out + t * inner + i) = gate * (numerator / (1.0f + e)) * up;
        }
    return 0;
}

/* Products of bfloat16 rows and a bfloat16 matrix with float32 results, where the processor multiplies bfloat16. A result
   is one sum over pairs of inputs in order, whatever the number of rows. */
#ifdef __AVX512BF16__
#include <immintrin.h>

#define TILE 16

/* From weight [O, I] to panels of 16 outputs, [O / 16, I / 2, 16, 2]. */
int pack_halves(const uint16_t *weight, int64_t inputs, uint16_t *packed, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t i = 0; i < inputs; i += 2)
            for (int64_t o = 0; o < LANES; o++)
                memcpy(packed + panel * LANES * inputs + i * LANES + 2 * o, weight + (panel * LANES + o) * inputs + i, 4);
    return 0;
}

INLINE void product_tile(const int rows, const uint16_t *x, const uint16_t *panel, int64_t inputs, float *out,
                         int64_t outputs) {
    __m512 total[TILE];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2) {
        __m512bh w = (__m512bh)_mm512_loadu_si512(panel + i * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * inputs + i, 4);
            total[r] = _mm512_dpbf16_ps(total[r], (__m512bh)_mm512_set1_epi32(pair), w);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(out + r * outputs, total[r]);
}

/* out [rows, O] = x [rows, I] times panels `first` to `last` of `packed`. */
int product_halves(const uint16_t *x, const uint16_t *packed, int64_t rows, int64_t inputs, int64_t outputs, float *out,
                   int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++) {
        const uint16_t *panel = packed + p * LANES * inputs;
        float *to = out + p * LANES;
        int64_t r = 0;
        for (; r + TILE <= rows; r += TILE) product_tile(TILE, x + r * inputs, panel, inputs, to + r * outputs, outputs);
        for (; r + 4 <= rows; r += 4) product_tile(4, x + r * inputs, panel, inputs, to + r * outputs, outputs);
        for (; r < rows; r++) product_tile(1, x + r * inputs, panel, inputs, to + r * outputs, outputs);
    }
    return 0;
}
#else
int pack_halves(const uint16_t *weight, int64_t inputs, uint16_t *packed, int64_t first, int64_t last) { return 1; }
int product_halves(const uint16_t *x, const uint16_t *packed, int64_t rows, int64_t inputs, int64_t outputs, float *out,
                   int64_t first, int64_t last) { return 1; }
#endif
