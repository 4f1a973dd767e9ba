/* The dense MLP of a layer on a CPU, forward and backward: down(swiglu(gate_up(norm(x)))) with silu, to which x may be
   added.

   Letters: T rows, E hidden size, I inner width. */

#include "calls.h"
#include "layers.h"
#include "memory.h"

/* Of the inner width, so much passes from one product to the other while it stays in the second cache. Only AMX is so fast
   that this is worth more calls. */
#define PIECE 128

typedef struct {
    Kernel *norm, *product, *add_lora, *swiglu;
    const float *x, *weight; /* [T, E], [E] */
    double eps;
    const int32_t *gate_up, *down;        /* panels, and */
    int64_t panel_words;                  /* the words of one of gate_up */
    const Lora *gate_up_lora, *down_lora; /* or missing */
    int64_t rows, hidden, inner, adds, half;
    int64_t layout;     /* of rows that products and loras take */
    int64_t block_rows; /* see layers.h */
    float *out, *inverse;
    char *wide; /* float, or bfloat16 if `half` */
} MlpForward;

/* Places `first` to `first + size` of `between`, the rows that the second product reads, from `normed`, those of the first
   one. wide [rows, 2 * apart]: the results of the first one, for gates, and `apart` further on for what they gate. */
static int run_piece(const MlpForward *in, int64_t start, int64_t rows, int64_t first, int64_t size, const float *normed,
                     float *wide, int64_t apart, char *between) {
    const int64_t hidden = in->hidden, inner = in->inner, layout = in->layout;
    const int32_t *gates = in->gate_up + first / PANEL * in->panel_words, *ups = gates + inner / PANEL * in->panel_words;
    const int32_t *next = first + size < inner ? gates + size / PANEL * in->panel_words : 0;
    Product gate = {normed, gates, rows, hidden, 2 * apart, 0, wide, layout, ups};
    Product up = {normed, ups, rows, hidden, 2 * apart, 0, wide + apart, layout, next};
    Swiglu swiglu = {wide, size, 0, between, in->half ? in->wide + (start * 2 * inner + first) * 2 : 0, layout, inner};
    swiglu.out += 2 * tile_place(0, first, inner); /* rows in several pieces lie in tiles */
    int code = in->product(&gate, 0, size / PANEL);
    if (!code) code = in->product(&up, 0, size / PANEL);
    if (!code && size == inner)
        code = add_lora(in->add_lora, in->gate_up_lora, start, rows, hidden, 2 * inner, normed, layout, wide);
    else if (!code)
        code = add_lora_piece(in->add_lora, in->gate_up_lora, start, rows, first, size, hidden, normed, layout, wide);
    return code ? code : in->swiglu(&swiglu, 0, rows);
}

/* out [T, E], plus x if `adds`; inverse [T] = 1 / rms(x) and wide [T, 2I], which the backward needs. For blocks `first` to
   `last` of `block_rows` rows. */
int mlp_forward(const MlpForward *in, int64_t first, int64_t last) {
    const int64_t hidden = in->hidden, inner = in->inner, block = in->block_rows;
    const int64_t places = (block + TILE_HEIGHT - 1) / TILE_HEIGHT * TILE_HEIGHT;
    const int is_cut = in->half && in->layout == TILES && inner % PIECE == 0 && comes_in_pieces(in->gate_up_lora, inner);
    const int64_t piece = is_cut ? PIECE : inner;
    float *room = scratch(sizeof(float) * places * (hidden + inner + (in->half ? 2 * piece : 0)));
    if (!room) return 2;
    float *normed = room, *between = normed + places * hidden, *unrounded = between + places * inner;
    int code = 0;
    for (int64_t start = first * block; start < last * block && start < in->rows && !code; start += block) {
        const int64_t rows = in->rows - start < block ? in->rows - start : block;
        const float *x = in->x + start * hidden;
        float *wide = in->half ? unrounded : (float *)in->wide + start * 2 * inner, *out = in->out + start * hidden;
        RmsNorm norm = {x, in->weight, 0, in->eps, hidden, (char *)normed, in->inverse + start, in->layout};
        Product down = {between, in->down, rows, inner, hidden, in->adds ? x : 0, out, in->layout};
        code = in->norm(&norm, 0, rows);
        for (int64_t i = 0; i < inner && !code; i += piece)
            code = run_piece(in, start, rows, i, piece, normed, wide, piece, (char *)between);
        if (!code) code = in->product(&down, 0, hidden / PANEL);
        if (!code) code = add_lora(in->add_lora, in->down_lora, start, rows, inner, hidden, between, in->layout, out);
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
    int64_t hidden, inner, adds, half;                    /* as `MlpForward` has them */
    int64_t rounds;     /* whether products and loras take rows in bfloat16 */
    int64_t block_rows; /* see layers.h */
    float *grad_x;      /* [T, E], or missing */
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
