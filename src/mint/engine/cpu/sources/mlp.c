/* The dense MLP of a layer on a CPU, forward and backward: down(swiglu(gate_up(norm(x)))) with silu, to which x may be
   added.

   Letters: T rows, E hidden size, I inner width. */

#include "calls.h"
#include "layers.h"
#include "memory.h"

typedef struct {
    Kernel *norm, *product, *add_lora, *swiglu;
    const float *x, *weight; /* [T, E], [E] */
    double eps;
    const int32_t *gate_up, *down;        /* panels */
    const Lora *gate_up_lora, *down_lora; /* or missing */
    int64_t rows, hidden, inner, adds, half;
    int64_t rounds;     /* whether products and loras take rows in bfloat16 */
    int64_t block_rows; /* see layers.h */
    float *out, *inverse;
    char *wide; /* float, or bfloat16 if `half` */
} MlpForward;

/* out [T, E], plus x if `adds`; inverse [T] = 1 / rms(x) and wide [T, 2I], which the backward needs. For blocks `first` to
   `last` of `block_rows` rows. */
int mlp_forward(const MlpForward *in, int64_t first, int64_t last) {
    const int64_t hidden = in->hidden, inner = in->inner, rounds = in->rounds, block = in->block_rows;
    float *room = scratch(sizeof(float) * block * (hidden + (in->half ? 3 : 1) * inner));
    if (!room) return 2;
    float *normed = room, *between = normed + block * hidden, *unrounded = between + block * inner;
    int code = 0;
    for (int64_t start = first * block; start < last * block && start < in->rows && !code; start += block) {
        const int64_t rows = in->rows - start < block ? in->rows - start : block;
        const float *x = in->x + start * hidden;
        float *wide = in->half ? unrounded : (float *)in->wide + start * 2 * inner, *out = in->out + start * hidden;
        RmsNorm norm = {x, in->weight, 0, in->eps, hidden, (char *)normed, in->inverse + start, rounds};
        Product gate_up = {normed, in->gate_up, rows, hidden, 2 * inner, 0, wide, rounds};
        Swiglu swiglu = {wide, inner, 0, (char *)between, in->half ? in->wide + start * 2 * inner * 2 : 0, rounds};
        Product down = {between, in->down, rows, inner, hidden, in->adds ? x : 0, out, rounds};
        code = in->norm(&norm, 0, rows);
        if (!code) code = in->product(&gate_up, 0, 2 * inner / PANEL);
        if (!code) code = add_lora(in->add_lora, in->gate_up_lora, start, rows, hidden, 2 * inner, normed, rounds, wide);
        if (!code) code = in->swiglu(&swiglu, 0, rows);
        if (!code) code = in->product(&down, 0, hidden / PANEL);
        if (!code) code = add_lora(in->add_lora, in->down_lora, start, rows, inner, hidden, between, rounds, out);
    }
    free(room);
    return code;
}

typedef struct {
    Kernel *product, *swiglu, *norm, *norm_backward, *lora_gradient;
    const int64_t *borders; /* [groups + 1]: the rows at which each group begins, and the end */
    const float *grad, *x, *weight, *inverse;
    const char *wide;                     /* as `MlpForward` has it */
    const int32_t *gate_up, *down;        /* panels of the transposes */
    const Lora *gate_up_lora, *down_lora; /* or missing */
    int64_t hidden, inner, adds, half, rounds, block_rows; /* as `MlpForward` has them */
    float *grad_x;                                         /* [T, E], or missing */
} MlpBackward;

/* `rows` rows from `start` on; `room` [rows, 2E + 3I] is for what lies in between. */
static int run_block(const void *arguments, int64_t group, int64_t start, int64_t rows, float *room) {
    const MlpBackward *in = arguments;
    const int64_t hidden = in->hidden, inner = in->inner, rounds = in->rounds;
    const int begins = start == in->borders[group];
    const float *grad = in->grad + start * hidden, *x = in->x + start * hidden, *inverse = in->inverse + start;
    float *normed = room, *grad_normed = normed + rows * hidden, *between = grad_normed + rows * hidden;
    float *wide_grad = between + rows * inner;
    const char *wide = in->wide + start * 2 * inner * (in->half ? 2 : 4);
    Product down = {grad, in->down, rows, hidden, inner, 0, between};
    SwigluGradient swiglu = {between, wide, inner, in->half, (char *)between, (char *)wide_grad, rounds};
    RmsNormAgain norm = {x, inverse, in->weight, hidden, (char *)normed, rounds};
    Product gate_up = {wide_grad, in->gate_up, rows, 2 * inner, hidden, 0, grad_normed, rounds};
    /* `between` is the gradient for what `down` reads, and after SwiGLU what it read */
    int code = in->product(&down, 0, inner / PANEL);
    if (!code) code = spread_gradient(in->lora_gradient, in->down_lora, rows, grad, inner, hidden, between);
    if (!code) code = in->swiglu(&swiglu, 0, rows);
    if (!code)
        code = add_gradient(in->lora_gradient, in->down_lora, group, start, rows, begins, grad, 0, between, rounds, inner,
                            hidden, 0);
    if (!code) code = in->norm(&norm, 0, rows);
    if (!code && in->grad_x) code = in->product(&gate_up, 0, hidden / PANEL);
    if (!code)
        code = add_gradient(in->lora_gradient, in->gate_up_lora, group, start, rows, begins, wide_grad, rounds, normed, rounds,
                            hidden, 2 * inner, in->grad_x ? grad_normed : 0);
    if (code || !in->grad_x) return code;
    RmsNormBackward back = {grad_normed, x, inverse, in->weight, in->adds ? grad : 0, hidden, in->grad_x + start * hidden};
    return in->norm_backward(&back, 0, rows);
}

/* From grad [T, E] grad_x [T, E], and the sums of each group for the gradients of the loras. For groups `first` to
   `last`. */
int mlp_backward(const MlpBackward *in, int64_t first, int64_t last) {
    return run_groups(run_block, in, in->borders, first, last, in->block_rows, 2 * in->hidden + 3 * in->inner);
}
