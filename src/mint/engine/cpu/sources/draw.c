/* From logits to a token: the largest, or the one whose stretch of the cumulated weights holds a draw; and logsumexp.

   A row's results are a function of that row alone. Weights are in float32; what adds them up over a row is in float64.

   Letters: R rows, V vocabulary. */

#include "lanes.h"
#include "memory.h"

#define STRETCH 64 /* logits whose weights are summed before they are cumulated */

/* LANES logits from `at` on; those past the last weigh nothing. */
INLINE vf logits_at(const float *row, int64_t at, int64_t width) {
    if (at + LANES <= width) return *(const vf *)(row + at);
    float rest[LANES];
    for (int i = 0; i < LANES; i++) rest[i] = at + i < width ? row[at + i] : -INFINITY;
    return *(vf *)rest;
}

static float largest(const float *row, int64_t width) {
    vf highest = logits_at(row, 0, width);
    for (int64_t i = LANES; i < width; i += LANES) highest = larger(logits_at(row, i, width), highest);
    return largest_lane(highest);
}

/* exp(x - most), divided before by `divisor`, the temperature; what is not a number must not be hidden. */
INLINE vf weigh(vf x, float most, float divisor) {
    vf moved = (x - most) / divisor, weight = exponential(moved);
    vi nan = moved != moved;
    return (vf)(((vi)weight & ~nan) | ((vi)moved & nan));
}

/* The weights of a stretch from `at` on, in `weights` if given; returns their sum. */
INLINE float weigh_stretch(const float *row, int64_t at, int64_t width, float most, float divisor, float *weights) {
    vf total = {0};
#pragma GCC unroll 4
    for (int64_t i = 0; i < STRETCH; i += LANES) {
        vf own = at + i < width ? weigh(logits_at(row, at + i, width), most, divisor) : (vf){0};
        if (weights) *(vf *)(weights + i) = own;
        total += own;
    }
    return sum(total);
}

/* The sum of each stretch, in `sums`, and all weights, in `weights` (whole stretches), if given; returns the sum of all.
   Not inlined: two copies could be contracted in two ways. */
__attribute__((noinline)) static double weigh_row(const float *row, int64_t width, float most, float divisor, float *sums,
                                                  float *weights) {
    double total = 0;
    for (int64_t at = 0; at < width; at += STRETCH) {
        float own = weigh_stretch(row, at, width, most, divisor, weights ? weights + at : 0);
        if (sums) sums[at / STRETCH] = own;
        total += own;
    }
    return total;
}

/* The first of `count` whose cumulated weight exceeds `wanted`, or the last; `wanted` becomes the share of its weight. */
INLINE int64_t find(const float *weights, int64_t count, double total, double *wanted) {
    double goal = *wanted * total, before = 0, after = 0;
    if (!(goal < total)) goal = nextafter(total, 0); /* after rounding, too, so that a positive weight is found */
    int64_t at = 0;
    for (; at < count; at++, before = after) {
        after = before + weights[at];
        if (after > goal) break;
    }
    if (at == count) return count - 1; /* not a number */
    double share = (goal - before) / weights[at];
    *wanted = share < 0 ? 0 : share > 1 ? 1 : share;
    return at;
}

/* As in random_stream.py. */
INLINE uint64_t mixed(uint64_t bits) {
    bits += 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

typedef struct {
    const float *logits; /* [R, V] */
    int64_t width;
    const int64_t *rows, *slots;
    const char *table; /* of sequences, `stride` bytes each; then where in them the columns are */
    int64_t stride, stream, emitted, temperature, top_k, top_p;
    double coldest;
    const int64_t *mask_of; /* the mask of each row drawn from, or -1; null: none has one */
    const uint32_t *masks;  /* [., words]: bit i % 32 of word i / 32 is set if token i may be drawn */
    int64_t words;
    int64_t *tokens;
    float *logprobs, *normalisers;
} DrawRows;

/* The logits of a row, with -inf where the mask excludes. */
static void exclude(const float *row, int64_t width, const uint32_t *mask, float *allowed) {
    for (int64_t at = 0; at < width; at += 32) {
        const uint32_t word = mask[at / 32];
        const int64_t count = width - at < 32 ? width - at : 32;
        for (int64_t j = 0; j < count; j++) allowed[at + j] = word >> j & 1 ? row[at + j] : -INFINITY;
    }
}

/* For `rows` of logits a token by the rule in `slots` of the table, and its logprob under the logits as they are: the best
   one where the temperature is below `coldest`, and -1 where top-k or top-p leave some out. Normalisers: logsumexp. A mask
   changes the token, and not the logprobs. */
int draw_rows(const DrawRows *in, int64_t first, int64_t last) {
    const int64_t width = in->width, stretches = (width + STRETCH - 1) / STRETCH;
    float *sums = scratch(sizeof(float) * (stretches + (in->mask_of ? width : 0))), weights[STRETCH];
    if (!sums) return 2;
    float *allowed = sums + stretches;
    for (int64_t i = first; i < last; i++) {
        const char *own = in->table + in->slots[i] * in->stride;
        const double temperature = *(const double *)(own + in->temperature), top_p = *(const double *)(own + in->top_p);
        const int64_t top_k = *(const int64_t *)(own + in->top_k);
        const float *row = in->logits + in->rows[i] * width, most = largest(row, width);
        const double plain = weigh_row(row, width, most, 1.0f, sums, 0);
        const int64_t mask = in->mask_of ? in->mask_of[i] : -1;
        if (mask >= 0) exclude(row, width, in->masks + mask * in->words, allowed);
        const float *drawn = mask >= 0 ? allowed : row, best = mask >= 0 ? largest(allowed, width) : most;
        int64_t token = 0;
        if (temperature < in->coldest) {
            while (token < width - 1 && drawn[token] != best) token++;
        } else if ((top_k > 0 && top_k < width) || top_p < 1) {
            token = -1;
        } else {
            const float divisor = temperature;
            double total = plain, inside = 0;
            if (divisor != 1.0f || mask >= 0) total = weigh_row(drawn, width, best, divisor, sums, 0);
            uint64_t bits = mixed(*(const uint64_t *)(own + in->stream) ^ *(const uint64_t *)(own + in->emitted));
            double wanted = (double)(bits >> 11) * 0x1p-53;
            token = find(sums, stretches, total, &wanted) * STRETCH;
            weigh_stretch(drawn, token, width, best, divisor, weights);
            for (int j = 0; j < STRETCH; j++) inside += weights[j];
            token += find(weights, STRETCH, inside, &wanted);
            if (token >= width) token = width - 1;
        }
        in->tokens[i] = token;
        in->normalisers[i] = (float)log(plain) + most;
        in->logprobs[i] = row[token < 0 ? 0 : token] - in->normalisers[i];
    }
    free(sums);
    return 0;
}

typedef struct {
    float *logits; /* [R, V] */
    int64_t width, half;
    const int64_t *needs_gradient;
    float *normalisers, *entropies;
} WeighRows;

/* logsumexp and entropy of rows of logits. Those with `needs_gradient` become the negative softmax, in bfloat16 where `half` is set,
   at the beginning of the row. */
int weigh_rows(const WeighRows *in, int64_t first, int64_t last) {
    const int64_t width = in->width, whole = width / LANES * LANES;
    float *weights = scratch(sizeof(float) * (width + STRETCH));
    if (!weights) return 2;
    for (int64_t i = first; i < last; i++) {
        float *row = in->logits + i * width, rest[LANES];
        const float most = largest(row, width);
        const double total = weigh_row(row, width, most, 1.0f, 0, weights);
        double spread = 0;
        for (int64_t at = 0; at < whole; at += STRETCH) {
            vf own = {0};
            for (int64_t j = at; j < at + STRETCH && j < whole; j += LANES) own += *(vf *)(weights + j) * *(vf *)(row + j);
            spread += sum(own);
        }
        for (int64_t j = whole; j < width; j++) spread += weights[j] * row[j];
        in->normalisers[i] = (float)log(total) + most;
        in->entropies[i] = (float)(in->normalisers[i] - spread / total);
        if (!in->needs_gradient[i]) continue;
        const float factor = -1.0 / total;
        for (int64_t j = 0; j < whole; j += LANES) store((char *)row, j, *(vf *)(weights + j) * factor, in->half);
        store((char *)rest, 0, *(vf *)(weights + whole) * factor, in->half);
        const int64_t size = in->half ? 2 : 4;
        memcpy((char *)row + whole * size, rest, (width - whole) * size);
    }
    free(weights);
    return 0;
}
