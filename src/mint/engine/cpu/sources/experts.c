/* A mixture of experts on a CPU: which rows go where, and each expert's products with its own rows.

   Pairs of a row and one of its experts lie sorted by expert, those of one expert in the order of their rows. The
   products, and what loras add to them, are kernels of other files, called here for one expert after the other: a row's
   result is a function of that row alone as theirs are.

   Letters: T rows, N experts, K experts of a row, P = T * K pairs, I inputs and O outputs of an expert's matrix. */

#include "calls.h"
#include "lanes.h"
#include "memory.h"

#define TURNED_BYTES (512 << 10) /* of a transposed matrix that exist at once: they stay in the second cache */

typedef struct {
    const float *scores;
    int64_t experts, per_token, normed;
    float *weights;
    int64_t *chosen;
} Route;

/* chosen [T, K]: the experts with the largest scores [T, N], the best first, and of equal ones the first; weights [T, K]
   of their softmax, which add up to 1 if they are to be normed. For rows `first` to `last`. */
int route_rows(const Route *in, int64_t first, int64_t last) {
    int64_t experts = in->experts, per_token = in->per_token;
    float *own = scratch(sizeof(float) * (experts + LANES));
    if (!own) return 2;
    for (int64_t t = first; t < last; t++) {
        float *weights = in->weights + t * per_token, total = 0;
        int64_t *chosen = in->chosen + t * per_token;
        memcpy(own, in->scores + t * experts, sizeof(float) * experts);
        float inverse = exponentials(&own, &(int64_t){0}, &experts, 1, 1.0f, 0)[0];
        for (int64_t k = 0; k < per_token; k++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++) /* -1: taken; where all are NaN, the first that is not */
                if (own[e] != -1 && (best < 0 || own[e] > own[best])) best = e;
            chosen[k] = best;
            weights[k] = own[best] * inverse;
            own[best] = -1;
            total += weights[k];
        }
        if (in->normed)
            for (int64_t k = 0; k < per_token; k++) weights[k] /= total;
    }
    free(own);
    return 0;
}

typedef struct {
    const int64_t *chosen;
    int64_t pairs, experts;
    int64_t *order, *places, *borders;
} Sort;

/* From the expert of each pair by row [T, K]: the pairs by expert, `order` [P], the place of each pair among them
   [T, K], and where those of each expert begin, `borders` [N + 1]. All at once, as its only part. */
int sort_pairs(const Sort *in, int64_t first, int64_t last) {
    int64_t *borders = in->borders;
    if (first == last) return 0;
    memset(borders, 0, sizeof(int64_t) * (in->experts + 1));
    for (int64_t i = 0; i < in->pairs; i++) borders[in->chosen[i] + 1]++;
    for (int64_t e = 0; e < in->experts; e++) borders[e + 1] += borders[e];
    for (int64_t i = 0; i < in->pairs; i++) {
        int64_t place = borders[in->chosen[i]]++; /* so that in the end each has become the next one */
        in->order[place] = i;
        in->places[i] = place;
    }
    memmove(borders + 1, borders, sizeof(int64_t) * in->experts);
    borders[0] = 0;
    return 0;
}

typedef struct {
    const float *x;
    const int64_t *order;
    int64_t per_token, width;
    float *out;
} Gather;

/* out [P, width]: for each pair its row of x [T, width]. For pairs `first` to `last`. */
int gather_rows(const Gather *in, int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++)
        memcpy(in->out + p * in->width, in->x + in->order[p] / in->per_token * in->width, sizeof(float) * in->width);
    return 0;
}

typedef struct {
    const float *pairs, *weights, *residual;
    const int64_t *places;
    int64_t per_token, width;
    float *out;
} Combine;

/* out [T, width]: for each row its pairs times their weights, in the order of its choice, plus `residual`; weights and
   residual may be missing. For rows `first` to `last`. */
int combine_pairs(const Combine *in, int64_t first, int64_t last) {
    int64_t width = in->width, count = in->per_token;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < width; i += LANES) {
            vf total = {0};
            if (in->residual) total = *(const vf *)(in->residual + t * width + i);
            for (int64_t k = t * count; k < (t + 1) * count; k++) {
                vf own = *(const vf *)(in->pairs + in->places[k] * width + i);
                total += in->weights ? own * in->weights[k] : own;
            }
            *(vf *)(in->out + t * width + i) = total;
        }
    return 0;
}

typedef struct {
    const int64_t *order;
    const float *weights, *inner;
    int64_t width;
    float *grad, *grad_weights;
} Weigh;

/* inner [P, width] goes through a linear map and is then multiplied by a weight; `grad` is what the map gives back without
   the weight, which is multiplied with it here. grad_weights [T, K] are the weights' gradients. For pairs `first` to `last`. */
int weigh_pairs(const Weigh *in, int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++) {
        vf total = {0};
        float weight = in->weights[in->order[p]];
        for (int64_t i = p * in->width; i < (p + 1) * in->width; i += LANES) {
            vf grad = *(vf *)(in->grad + i);
            total += *(const vf *)(in->inner + i) * grad;
            *(vf *)(in->grad + i) = grad * weight;
        }
        in->grad_weights[in->order[p]] = sum(total);
    }
    return 0;
}

/* As the products in products.c take it. */
typedef struct {
    Kernel *product;
    const void *const *panels; /* [N] */
    const int64_t *borders;
    int64_t experts;
    const float *x;
    int64_t inputs, outputs;
    float *out;
} MultiplyExperts;

/* out [P, O]: rows x [P, I] times the matrices of their experts, panels `first` to `last` of each. */
int multiply_experts(const MultiplyExperts *in, int64_t first, int64_t last) {
    int code = 0;
    for (int64_t e = 0; e < in->experts && !code; e++) {
        int64_t start = in->borders[e], rows = in->borders[e + 1] - start;
        Product own = {in->x + start * in->inputs, in->panels[e], rows, in->inputs, in->outputs, 0,
                       in->out + start * in->outputs};
        if (rows) code = in->product(&own, first, last);
    }
    return code;
}

typedef struct {
    const float *biases; /* [N, O] */
    const int64_t *borders;
    int64_t experts, outputs;
    float *out;
} AddBiases;

/* Adds to out [P, O] the biases of the experts. For pairs `first` to `last`. */
int add_biases(const AddBiases *in, int64_t first, int64_t last) {
    int64_t width = in->outputs;
    for (int64_t e = 0, p = first; e < in->experts; e++)
        for (; p < last && p < in->borders[e + 1]; p++)
            for (int64_t i = 0; i < width; i++) in->out[p * width + i] += in->biases[e * width + i];
    return 0;
}

typedef struct {
    Kernel *product, *turn;
    const void *const *panels; /* [N] */
    const int64_t *borders;
    int64_t experts, bytes; /* of a weight */
    const float *x;
    int64_t inputs, outputs;
    float *out;
} MultiplyTransposes;

/* out [P, I]: rows x [P, O] times the transposes of their experts' matrices [O, I], panels `first` to `last` of each. */
int multiply_transposes(const MultiplyTransposes *in, int64_t first, int64_t last) {
    int code = 0;
    int64_t panel = PANEL * in->bytes * in->outputs, most = TURNED_BYTES / panel + 1;
    if (most > last - first) most = last - first;
    char *turned = scratch(panel * most + 1);
    if (!turned) return 2;
    for (int64_t e = 0; e < in->experts && !code; e++) {
        int64_t start = in->borders[e], rows = in->borders[e + 1] - start;
        for (int64_t p = first, count; rows && p < last && !code; p += count) {
            count = last - p < most ? last - p : most;
            Turn turn = {in->panels[e], in->inputs, in->outputs, (int32_t *)(turned - p * panel)};
            Product own = {in->x + start * in->outputs, (int32_t *)turned, rows, in->outputs, in->inputs, 0,
                           in->out + start * in->inputs + p * PANEL};
            code = in->turn(&turn, p, p + count);
            if (!code) code = in->product(&own, 0, count);
        }
    }
    free(turned);
    return code;
}

#define AHEAD 2 /* blocks of what will be turned next */

typedef uint64_t vl __attribute__((vector_size(64), aligned(4)));

#ifdef __clang__
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (vl){__VA_ARGS__})
#endif

/* The 8 x 8 numbers of 64 bits in `a`, turned. */
INLINE void turn_longs(vl *a) {
    vl b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = MIXED(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[i + 1] = MIXED(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        if (!(i & 2)) {
            a[i] = MIXED(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + 2] = MIXED(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = MIXED(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        b[i + 4] = MIXED(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = b[i];
}

/* From the panels of a bfloat16 matrix [O, I], [O / 16, I / 2, 16, 2], panels `first` to `last` of its transpose. */
int turn_halves(const Turn *in, int64_t first, int64_t last) {
    const uint32_t *from = (const uint32_t *)in->source;
    uint32_t *to = (uint32_t *)in->target;
    for (int64_t p = first; p < last; p++)
        for (int64_t o = 0; o < in->outputs; o += PANEL) {
            vl block[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) { /* two outputs and two inputs lie together: these are turned, then all such */
                const uint32_t *source = from + o * (in->inputs / 2) + (p * 8 + i) * PANEL;
                vl own = *(const vl *)source;
                __builtin_prefetch(source + AHEAD * PANEL * (in->inputs / 2));
                block[i] = (own & 0xffff00000000ffffUL) | ((own >> 16) & 0xffff0000UL) | ((own << 16) & 0xffff00000000UL);
            }
            turn_longs(block);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) *(vl *)(to + (p * in->outputs + o) * 8 + i * PANEL) = block[i];
        }
    return 0;
}

/* A lora's matrices for the first expert, and how many floats further on those of the next one lie; for the rows before
   `stop` that no lora before it has. Without matrices it adds nothing. */
typedef struct {
    int64_t stop;
    const float *a, *bs[2];
    int64_t stride, rank;
    double scale;
} Lora;

typedef struct {
    Kernel *add;
    const Lora *loras;
    const int64_t *borders, *order, *widths;
    int64_t experts, per_token, parts;
    const float *x;
    int64_t inputs, outputs;
    float *out;
} AddLoras;

/* Adds to out [P, O] what the loras of the rows give for x [P, I]. For pairs `first` to `last`. */
int add_expert_loras(const AddLoras *in, int64_t first, int64_t last) {
    int code = 0;
    for (int64_t e = 0, p = first, end; e < in->experts; e++) {
        const Lora *lora = in->loras;
        for (; p < last && p < in->borders[e + 1] && !code; p = end) {
            while (in->order[p] / in->per_token >= lora->stop) lora++;
            for (end = p + 1; end < last && end < in->borders[e + 1] && in->order[end] / in->per_token < lora->stop;) end++;
            if (!lora->a) continue;
            const float *bs[2] = {lora->bs[0] + e * lora->stride, lora->bs[1] + e * lora->stride};
            AddLora own = {in->x, lora->a + e * lora->stride, bs, in->widths, in->parts, lora->rank, in->inputs,
                           in->outputs, lora->scale, in->out, 0};
            code = in->add(&own, p, end);
        }
    }
    return code;
}

/* As `lora_gradient` takes it. */
typedef struct {
    Kernel *gradient;
    const Lora *lora;
    const int64_t *borders, *widths;
    int64_t experts, parts;
    const float *grad, *x;
    int64_t inputs, outputs;
    float *grad_x, *totals;
} AddLoraGradients;

/* Adds to `totals`, those of the first expert, laid out as the lora itself, what grad [P, O] for the products of x [P, I]
   gives the lora's matrices, and to grad_x [P, I], if there is one, what it gives x. For experts `first` to `last`. */
int add_lora_gradients(const AddLoraGradients *in, int64_t first, int64_t last) {
    int code = 0;
    const Lora *lora = in->lora;
    int64_t size = lora->rank * (in->parts * in->inputs + in->outputs);
    float *found = scratch(sizeof(float) * size);
    if (!found) return 2;
    for (int64_t e = first; e < last && !code; e++) {
        int64_t start = in->borders[e], rows = in->borders[e + 1] - start;
        const float *bs[2] = {lora->bs[0] + e * lora->stride, lora->bs[1] + e * lora->stride};
        LoraGradient own = {in->grad + start * in->outputs, in->x + start * in->inputs, lora->a + e * lora->stride, bs,
                            in->widths, rows, in->parts, lora->rank, in->inputs, in->outputs, 1, 0, lora->scale,
                            in->grad_x ? in->grad_x + start * in->inputs : 0, found, 0};
        if (!rows) continue;
        code = in->gradient(&own, 0, 1);
        float *to = in->totals + e * lora->stride;
        for (int64_t i = 0; i < size && !code; i++) to[i] += found[i];
    }
    free(found);
    return code;
}
