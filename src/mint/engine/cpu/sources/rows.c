/* What a decoder does between its products and attention, on a CPU: biases, norms, rotated heads and SwiGLU, and the
   way back.

   A row's result is a function of that row alone. Sums are in float32.

   Letters: T rows, H heads of a row, D head dimension, I the MLP's inner width. */

#include "calls.h"
#include "lanes.h"
#include "memory.h"

INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vf total = {0};
    for (int64_t i = 0; i < width; i += LANES) total += *(const vf *)(x + i) * *(const vf *)(x + i);
    return 1.0f / sqrtf(sum(total) / width + eps);
}

typedef struct {
    const float *x, *bias;
    int64_t width;
    float *out;
} AddBias;

/* out [T, width] = x [T, width] + bias [width]. */
int add_bias(const AddBias *in, int64_t first, int64_t last) {
    const float *bias = in->bias;
    for (int64_t t = first; t < last; t++) {
        const float *x = in->x + t * in->width;
        float *out = in->out + t * in->width;
        for (int64_t i = 0; i < in->width; i++) out[i] = x[i] + bias[i];
    }
    return 0;
}

/* Numbers i to i + 16 of row t of rows [T, width], laid out as `layout` says. */
INLINE void store_row(char *rows, int64_t t, int64_t i, int64_t width, vf x, int64_t layout) {
    if (layout == TILES) store(rows, tile_place(t, i, width), x, 1);
    else store(rows, t * width + i, x, layout);
}

/* out = x / rms(x) * weight for rows of `width`, plus `residual`, if there is one; inverse [T] = 1 / rms(x). */
int rms_norm(const RmsNorm *in, int64_t first, int64_t last) {
    const float *x = in->x, *weight = in->weight, *residual = in->residual;
    double eps = in->eps;
    const int64_t width = in->width, layout = in->layout;
    float *inverse = in->inverse;
    for (int64_t t = first; t < last; t++) {
        const float *own = x + t * width;
        float scale = inverse_rms(own, width, eps);
        for (int64_t i = 0; i < width; i += LANES) {
            vf normed = *(const vf *)(own + i) * scale * *(const vf *)(weight + i);
            if (residual) normed += *(const vf *)(residual + t * width + i);
            store_row(in->out, t, i, width, normed, layout);
        }
        inverse[t] = scale;
    }
    return 0;
}

/* From qkv [T, H, D] to heads of the same shape: bias added (also to qkv itself), the first `rotated_heads` normed by
   `norms` [rotated_heads, D] and the first 2 * pairs elements of each turned by cos and sin [T, pairs]; bias and norms
   may be missing. The first `joint_heads` are normed together, and the other ones; 0: each alone. inverse
   [T, rotated_heads]. `kept` gets qkv with its bias, rounded. */
int finish_heads(const FinishHeads *in, int64_t first, int64_t last) {
    float *qkv = in->qkv;
    const float *bias = in->bias, *norms = in->norms, *cos = in->cos, *sin = in->sin;
    double eps = in->eps;
    int64_t total_heads = in->total_heads, rotated_heads = in->rotated_heads, dim = in->dim, half = in->half;
    const int64_t pairs = in->pairs, joint = in->joint_heads;
    char *heads = in->heads;
    float *inverse = in->inverse;
    for (int64_t t = first; t < last; t++) {
        float scale = 1.0f;
        if (bias)
            for (int64_t i = 0; i < total_heads * dim; i += LANES)
                *(vf *)(qkv + t * total_heads * dim + i) += *(const vf *)(bias + i);
        for (int64_t i = 0, at = t * total_heads * dim; in->kept && i < total_heads * dim; i += LANES)
            store(in->kept, at + i, *(vf *)(qkv + at + i), 1);
        for (int64_t h = 0; h < total_heads; h++) {
            int64_t at = (t * total_heads + h) * dim;
            float *own = qkv + at;
            if (h >= rotated_heads) {
                for (int64_t i = 0; i < dim; i += LANES) store(heads, at + i, *(vf *)(own + i), half);
                continue;
            }
            if (norms && !joint) scale = inverse_rms(own, dim, eps);
            if (norms && joint && h == 0) scale = inverse_rms(own, joint * dim, eps);
            if (norms && joint && h == joint) scale = inverse_rms(own, (rotated_heads - joint) * dim, eps);
            if (norms) inverse[t * rotated_heads + h] = scale;
            for (int64_t i = 0; i < pairs; i += LANES) {
                vf a = *(vf *)(own + i), b = *(vf *)(own + pairs + i);
                if (norms) {
                    a = a * scale * *(const vf *)(norms + h * dim + i);
                    b = b * scale * *(const vf *)(norms + h * dim + pairs + i);
                }
                vf c = *(const vf *)(cos + t * pairs + i), s = *(const vf *)(sin + t * pairs + i);
                store(heads, at + i, a * c - b * s, half);
                store(heads, at + pairs + i, b * c + a * s, half);
            }
            for (int64_t i = 2 * pairs; i < dim; i += LANES) {
                vf a = *(vf *)(own + i);
                store(heads, at + i, norms ? a * scale * *(const vf *)(norms + h * dim + i) : a, half);
            }
        }
    }
    return 0;
}

/* Of what the sigmoid is taken: gelu's approximation by tanh is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)), and
   silu is x * sigmoid(x). `slope` is the derivative. Beyond 16, the sigmoid is 0 or 1. */
INLINE vf gate_logit(vf x, const int gelu, vf *slope) {
    *slope = (vf){0} + 1.0f;
    if (!gelu) return x;
    x = larger((vf){0} - 16.0f, -larger((vf){0} - 16.0f, -x));
    vf cubic = x * x * (float)(2 * 0.7978845608028654 * 0.044715);
    *slope = (float)(2 * 0.7978845608028654) + 3.0f * cubic;
    return x * ((float)(2 * 0.7978845608028654) + cubic);
}

/* out [T, I] = silu(gate) * up, or gelu(gate) * up, of wide [T, 2I]; that may be kept in bfloat16. */
int swiglu(const Swiglu *in, int64_t first, int64_t last) {
    const float *wide = in->wide;
    const int64_t inner = in->inner, layout = in->layout, whole = in->whole;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < inner; i += LANES) {
            vf gate = *(const vf *)(wide + t * 2 * inner + i), up = *(const vf *)(wide + t * 2 * inner + inner + i);
            vf rest, slope;
            store_row(in->out, t, i, whole, gate * sigmoid(gate_logit(gate, in->gelu, &slope), &rest) * up, layout);
            if (in->kept) {
                store(in->kept, t * 2 * whole + i, gate, 1);
                store(in->kept, t * 2 * whole + whole + i, up, 1);
            }
        }
    return 0;
}

typedef struct {
    const float *grad, *wide;
    int64_t inner, gelu;
    float *out;
} SwigluBackward;

/* out [T, 2I]: the gradient for wide [T, 2I] of `swiglu`, from grad [T, I]. */
int swiglu_backward(const SwigluBackward *in, int64_t first, int64_t last) {
    const float *grad = in->grad, *wide = in->wide;
    int64_t inner = in->inner;
    float *out = in->out;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < inner; i += LANES) {
            const float *own = wide + t * 2 * inner + i;
            vf gate = *(const vf *)own, up = *(const vf *)(own + inner), slope = *(const vf *)(grad + t * inner + i);
            vf rest, steep, share = sigmoid(gate_logit(gate, in->gelu, &steep), &rest);
            if (in->gelu) rest *= steep;
            *(vf *)(out + t * 2 * inner + i) = slope * up * share * (1.0f + gate * rest);
            *(vf *)(out + t * 2 * inner + inner + i) = slope * gate * share;
        }
    return 0;
}

/* Both at once with silu, from grad [T, I]: in out [T, I] `swiglu` of wide [T, 2I], in wide_out [T, 2I] the gradient for
   wide. `out` may be `grad`; with `rounds` only in one call for all rows, for a row of `out` lies over the gradients of
   rows before it. */
int swiglu_gradient(const SwigluGradient *in, int64_t first, int64_t last) {
    const int64_t inner = in->inner, rounds = in->rounds;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < inner; i += LANES) {
            const int64_t at = t * 2 * inner + i;
            vf gate = load(in->wide, at, in->half), up = load(in->wide, at + inner, in->half);
            vf slope = *(const vf *)(in->grad + t * inner + i);
            vf rest, share = sigmoid(gate, &rest);
            store(in->wide_out, at, slope * up * share * (1.0f + gate * rest), rounds);
            store(in->wide_out, at + inner, slope * gate * share, rounds);
            store(in->out, t * inner + i, gate * share * up, rounds);
        }
    return 0;
}

typedef struct {
    const float *x, *gates;
    int64_t width;
    float *out;
} Gate;

/* out [T, width] = x * sigmoid(gates). */
int gate(const Gate *in, int64_t first, int64_t last) {
    for (int64_t i = first * in->width; i < last * in->width; i += LANES) {
        vf rest;
        *(vf *)(in->out + i) = *(const vf *)(in->x + i) * sigmoid(*(const vf *)(in->gates + i), &rest);
    }
    return 0;
}

typedef struct {
    const float *x, *inputs, *gate;
    int64_t width, hidden;
    float *out, *shares;
} GateRows;

/* out [T, width] = x * share, with one share = sigmoid(inputs . gate) for each row of inputs [T, hidden]; shares [T]. */
int gate_rows(const GateRows *in, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
        const float *own = in->inputs + t * in->hidden;
        vf total = {0}, rest;
        for (int64_t i = 0; i < in->hidden; i += LANES) total += *(const vf *)(own + i) * *(const vf *)(in->gate + i);
        vf share = sigmoid((vf){0} + sum(total), &rest);
        for (int64_t i = 0; i < in->width; i += LANES)
            *(vf *)(in->out + t * in->width + i) = *(const vf *)(in->x + t * in->width + i) * share;
        in->shares[t] = share[0];
    }
    return 0;
}

typedef struct {
    const float *grad, *x, *gates;
    int64_t width;
    float *out, *gates_out;
} GateBackward;

/* out and gates_out [T, width]: the gradients for x and gates of `gate`, from grad [T, width]. */
int gate_backward(const GateBackward *in, int64_t first, int64_t last) {
    for (int64_t i = first * in->width; i < last * in->width; i += LANES) {
        vf rest, share = sigmoid(*(const vf *)(in->gates + i), &rest), slope = *(const vf *)(in->grad + i) * share;
        *(vf *)(in->out + i) = slope;
        *(vf *)(in->gates_out + i) = slope * *(const vf *)(in->x + i) * rest;
    }
    return 0;
}

#define ALPHA 1.702f
#define LIMIT 7.0f

/* From LANES pairs of gate and up: the gate up to LIMIT, and 1 + up within +-LIMIT. */
INLINE void clamp_pairs(const float *wide, vf *gate, vf *up) {
    const vf limit = (vf){0} + LIMIT;
    vf a = *(const vf *)wide, b = *(const vf *)(wide + LANES);
    *gate = -larger(-limit, -firsts(a, b));
    *up = 1.0f - larger(-limit, -larger(-limit, seconds(a, b)));
}

/* out [T, I] = gate * sigmoid(ALPHA * gate) * up of wide [T, I, 2] as `clamp_pairs` gives them. */
int clamped_swiglu(const Swiglu *in, int64_t first, int64_t last) {
    for (int64_t i = first * in->inner; i < last * in->inner; i += LANES) {
        vf gate, up, rest;
        clamp_pairs(in->wide + 2 * i, &gate, &up);
        store(in->out, i, gate * sigmoid(gate * ALPHA, &rest) * up, in->layout);
    }
    return 0;
}

/* out [T, I, 2]: the gradient for wide of `clamped_swiglu`, from grad [T, I]. */
int clamped_swiglu_backward(const SwigluBackward *in, int64_t first, int64_t last) {
    for (int64_t i = first * in->inner; i < last * in->inner; i += LANES) {
        const float *own = in->wide + 2 * i;
        vf a = *(const vf *)own, b = *(const vf *)(own + LANES), slope = *(const vf *)(in->grad + i), gate, up, rest;
        clamp_pairs(own, &gate, &up);
        vf share = sigmoid(gate * ALPHA, &rest);
        vi clamped = firsts(a, b) > LIMIT, outside = (seconds(a, b) > LIMIT) | (seconds(a, b) < -LIMIT);
        vf for_gate = (vf)((vi)(slope * up * share * (1.0f + ALPHA * gate * rest)) & ~clamped);
        vf for_up = (vf)((vi)(slope * gate * share) & ~outside);
        *(vf *)(in->out + 2 * i) = first_pairs(for_gate, for_up);
        *(vf *)(in->out + 2 * i + LANES) = last_pairs(for_gate, for_up);
    }
    return 0;
}

/* What x [width], from place `at` of a tensor on, gets from grad for x * inverse * weight, inverse being 1 / rms(x); plus
   `residual`, if there is one. x is bfloat16 if `half`. `out` may be `grad`. */
INLINE void norm_backward(const float *grad, const char *x, int64_t at, const int half, float inverse, const float *weight,
                          const float *residual, int64_t width, float *out) {
    vf total = {0};
    for (int64_t i = 0; i < width; i += LANES)
        total += *(const vf *)(grad + i) * *(const vf *)(weight + i) * load(x, at + i, half);
    float pull = sum(total) / width * inverse * inverse * inverse;
    for (int64_t i = 0; i < width; i += LANES) {
        vf found = *(const vf *)(grad + i) * *(const vf *)(weight + i) * inverse - load(x, at + i, half) * pull;
        if (residual) found += *(const vf *)(residual + i);
        *(vf *)(out + i) = found;
    }
}

/* out [T, width]: the gradient for x of `rms_norm`, from grad [T, width]; plus `residual` [T, width], if there is one. */
int rms_norm_backward(const RmsNormBackward *in, int64_t first, int64_t last) {
    const float *grad = in->grad, *x = in->x, *inverse = in->inverse, *weight = in->weight, *residual = in->residual;
    int64_t width = in->width;
    float *out = in->out;
    for (int64_t t = first; t < last; t++) {
        int64_t at = t * width;
        norm_backward(grad + at, (const char *)x, at, 0, inverse[t], weight, residual ? residual + at : 0, width, out + at);
    }
    return 0;
}

/* out [T, width] = x * inverse * weight: a norm whose inverse [T] is known. */
int rms_norm_again(const RmsNormAgain *in, int64_t first, int64_t last) {
    const float *x = in->x, *inverse = in->inverse, *weight = in->weight;
    const int64_t width = in->width, half = in->half;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < width; i += LANES)
            store(in->out, t * width + i, *(const vf *)(x + t * width + i) * inverse[t] * *(const vf *)(weight + i), half);
    return 0;
}

/* `finish_heads_backward` for one type of qkv, which the compiler knows. */
INLINE int heads_gradient(const FinishHeadsBackward *in, int64_t first, int64_t last, const int kept_half) {
    const char *grad = in->grad, *qkv = in->qkv;
    const float *inverse = in->inverse, *norms = in->norms, *cos = in->cos, *sin = in->sin;
    int64_t total_heads = in->total_heads, rotated_heads = in->rotated_heads, dim = in->dim, half = in->half;
    const int64_t pairs = in->pairs, joint = in->joint_heads, width = total_heads * dim;
    float *room = in->rounds ? scratch(sizeof(float) * width) : 0;
    if (in->rounds && !room) return 2;
    for (int64_t t = first; t < last; t++) {
        float *row = room ? room : (float *)in->out + t * width;
        for (int64_t h = 0; h < total_heads; h++) {
            int64_t at = t * width + h * dim;
            float *to = row + h * dim;
            if (h >= rotated_heads) {
                for (int64_t i = 0; i < dim; i += LANES) *(vf *)(to + i) = load(grad, at + i, half);
                continue;
            }
            for (int64_t i = 0; i < pairs; i += LANES) { /* its transpose turns back */
                vf a = load(grad, at + i, half), b = load(grad, at + pairs + i, half);
                vf c = *(const vf *)(cos + t * pairs + i), s = *(const vf *)(sin + t * pairs + i);
                *(vf *)(to + i) = a * c + b * s;
                *(vf *)(to + pairs + i) = b * c - a * s;
            }
            for (int64_t i = 2 * pairs; i < dim; i += LANES) *(vf *)(to + i) = load(grad, at + i, half);
            if (norms && !joint)
                norm_backward(to, qkv, at, kept_half, inverse[t * rotated_heads + h], norms + h * dim, 0, dim, to);
        }
        const int64_t edges[] = {0, joint, rotated_heads};
        for (int run = 0; norms && joint && run < 2; run++) {
            int64_t h = edges[run], together = (edges[run + 1] - h) * dim;
            float *to = row + h * dim;
            norm_backward(to, qkv, t * width + h * dim, kept_half, inverse[t * rotated_heads + h], norms + h * dim, 0,
                          together, to);
        }
        for (int64_t i = 0; room && i < width; i += LANES) store(in->out, t * width + i, *(vf *)(room + i), 1);
    }
    free(room);
    return 0;
}

/* out [T, H, D]: the gradient for qkv of `finish_heads`, from grad [T, H, D] in the type of the heads. */
int finish_heads_backward(const FinishHeadsBackward *in, int64_t first, int64_t last) {
    return in->kept_half ? heads_gradient(in, first, last, 1) : heads_gradient(in, first, last, 0);
}
