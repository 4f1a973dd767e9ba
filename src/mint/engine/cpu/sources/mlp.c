/* The dense MLP of a layer on a CPU, forward and backward: down(swiglu(gate_up(norm(x)))) with silu, to which x may be
   added.

   Rows pass through all of it block by block, so that what lies between two products stays in the second cache. The
   products, the norm, SwiGLU and the gradients of loras are kernels of other files, called here for one block after the
   other: a row's result is a function of that row alone as theirs are.

   Letters: T rows, E hidden size, I inner width. */

#include <stdlib.h>

#include "calls.h"

#define BLOCK_ROWS 108 /* a multiple of the rows that `lora_gradient` adds up at a time, or its sums had another order */

typedef struct {
    Kernel *norm, *product, *swiglu;
    const float *x, *weight; /* [T, E], [E] */
    double eps;
    const int32_t *gate_up, *down; /* panels */
    int64_t rows, hidden, inner, adds;
    float *out, *inverse, *wide;
} MlpForward;

/* out [T, E], plus x if `adds`; inverse [T] = 1 / rms(x) and wide [T, 2I], which the backward needs. For blocks `first` to
   `last` of BLOCK_ROWS rows. */
int mlp_forward(const MlpForward *in, int64_t first, int64_t last) {
    const int64_t hidden = in->hidden, inner = in->inner;
    float *room = malloc(sizeof(float) * BLOCK_ROWS * (hidden + inner));
    if (!room) return 2;
    float *normed = room, *between = room + BLOCK_ROWS * hidden;
    int code = 0;
    for (int64_t start = first * BLOCK_ROWS; start < last * BLOCK_ROWS && start < in->rows && !code; start += BLOCK_ROWS) {
        const int64_t rows = in->rows - start < BLOCK_ROWS ? in->rows - start : BLOCK_ROWS;
        const float *x = in->x + start * hidden;
        float *wide = in->wide + start * 2 * inner, *out = in->out + start * hidden;
        RmsNorm norm = {x, in->weight, 0, in->eps, hidden, normed, in->inverse + start};
        Product gate_up = {normed, in->gate_up, rows, hidden, 2 * inner, 0, wide};
        Swiglu swiglu = {wide, inner, 0, between};
        Product down = {between, in->down, rows, inner, hidden, in->adds ? x : 0, out};
        code = in->norm(&norm, 0, rows);
        if (!code) code = in->product(&gate_up, 0, 2 * inner / PANEL);
        if (!code) code = in->swiglu(&swiglu, 0, rows);
        if (!code) code = in->product(&down, 0, hidden / PANEL);
    }
    free(room);
    return code;
}

/* A lora of one of the two products, as `LoraGradient` has it; found [groups, size]. */
typedef struct {
    const float *a, *const *bs;
    const int64_t *widths;
    int64_t parts, rank, size;
    double scale;
    float *found;
} MlpLora;

typedef struct {
    Kernel *product, *swiglu, *norm, *norm_backward, *lora_gradient;
    const int64_t *borders; /* [groups + 1]: the rows at which each group begins, and the end */
    const float *grad, *x, *weight, *inverse, *wide;
    const int32_t *gate_up, *down; /* panels of the transposes */
    const MlpLora *gate_up_lora, *down_lora; /* or missing */
    int64_t hidden, inner, adds;
    float *grad_x; /* [T, E], or missing */
} MlpBackward;

/* Adds to the gradients of a lora what some rows of a group give; `begins`: they are its first. */
static int add_gradient(Kernel *kernel, const MlpLora *lora, int64_t group, int64_t rows, int begins, const float *grad,
                        const float *x, int64_t inputs, int64_t outputs) {
    if (!lora) return 0;
    LoraGradient own = {grad, x, lora->a, lora->bs, lora->widths, rows, lora->parts, lora->rank, inputs, outputs, 1,
                        !begins, lora->scale, 0, lora->found + group * lora->size};
    return kernel(&own, 0, 1);
}

/* `rows` rows from `start` on; `room` [rows, E + 3I] is for what lies in between. */
static int run_block(const MlpBackward *in, int64_t group, int64_t start, int64_t rows, float *room) {
    const int64_t hidden = in->hidden, inner = in->inner;
    const int begins = start == in->borders[group];
    const float *grad = in->grad + start * hidden, *x = in->x + start * hidden, *inverse = in->inverse + start;
    float *normed = room, *between = normed + rows * hidden, *wide_grad = between + rows * inner;
    Product down = {grad, in->down, rows, hidden, inner, 0, between};
    SwigluGradient swiglu = {between, in->wide + start * 2 * inner, inner, between, wide_grad};
    RmsNormAgain norm = {x, inverse, in->weight, hidden, normed};
    int code = in->product(&down, 0, inner / PANEL);
    if (!code) code = in->swiglu(&swiglu, 0, rows);
    if (!code) code = add_gradient(in->lora_gradient, in->down_lora, group, rows, begins, grad, between, inner, hidden);
    if (!code) code = in->norm(&norm, 0, rows);
    if (!code)
        code = add_gradient(in->lora_gradient, in->gate_up_lora, group, rows, begins, wide_grad, normed, hidden, 2 * inner);
    if (code || !in->grad_x) return code;
    Product gate_up = {wide_grad, in->gate_up, rows, 2 * inner, hidden, 0, normed};
    RmsNormBackward back = {normed, x, inverse, in->weight, in->adds ? grad : 0, hidden, in->grad_x + start * hidden};
    code = in->product(&gate_up, 0, hidden / PANEL);
    return code ? code : in->norm_backward(&back, 0, rows);
}

/* From grad [T, E] grad_x [T, E], and the sums of each group for the gradients of the loras. For groups `first` to
   `last`. */
int mlp_backward(const MlpBackward *in, int64_t first, int64_t last) {
    float *room = malloc(sizeof(float) * BLOCK_ROWS * (in->hidden + 3 * in->inner));
    if (!room) return 2;
    int code = 0;
    for (int64_t group = first; group < last; group++) {
        const int64_t end = in->borders[group + 1];
        for (int64_t start = in->borders[group]; start < end && !code; start += BLOCK_ROWS)
            code = run_block(in, group, start, end - start < BLOCK_ROWS ? end - start : BLOCK_ROWS, room);
    }
    free(room);
    return code;
}
