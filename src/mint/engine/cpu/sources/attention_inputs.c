/* From the rows of a layer to the heads that attend, forward and backward, on a CPU: norm, query/key/value product, norms
   and rotation of heads.

   Letters: T rows, E hidden size, H heads of a row, D head dimension. */

#include "calls.h"
#include "layers.h"
#include "memory.h"

/* What both directions read; norms, bias and lora may be missing. The rest as in `FinishHeads`. */
typedef struct {
    const float *norm, *bias, *head_norms, *cos, *sin; /* [E], [H, D], [rotated_heads, D], [T, pairs] twice */
    double eps;
    const Lora *lora;
    int64_t hidden, total_heads, rotated_heads, joint_heads, dim, pairs, half;
    int64_t rounds;     /* whether products and loras take rows in bfloat16, and */
    int64_t layout;     /* how those lie that the forward's take */
    int64_t block_rows; /* see layers.h */
} Inputs;

typedef struct {
    Kernel *rms_norm, *product, *add_lora, *finish_heads;
    const Inputs *inputs;
    const float *x;        /* [T, E] */
    const int32_t *packed; /* panels */
    int64_t rows;
    char *heads, *kept;            /* [T, H, D], float or bfloat16 if `half`; `kept` is missing where heads have no norms */
    float *inverse, *head_inverse; /* [T] and [T, rotated_heads], where there are norms */
} InputsForward;

/* heads; and for the backward 1 / rms of the rows and, where heads have norms, the product with its bias, `kept`, and 1 / rms
   of the heads. For blocks `first` to `last` of `block_rows` rows. */
int attention_inputs(const InputsForward *in, int64_t first, int64_t last) {
    const Inputs *own = in->inputs;
    const int64_t hidden = own->hidden, outputs = own->total_heads * own->dim, bytes = own->half ? 2 : 4;
    const int64_t block = own->block_rows;
    const int64_t places = (block + TILE_HEIGHT - 1) / TILE_HEIGHT * TILE_HEIGHT;
    float *room = scratch(sizeof(float) * places * (hidden + outputs));
    if (!room) return 2;
    float *normed = room, *unrounded = room + places * hidden;
    int code = 0;
    for (int64_t start = first * block; start < last * block && start < in->rows && !code; start += block) {
        const int64_t rows = in->rows - start < block ? in->rows - start : block;
        const float *x = in->x + start * hidden, *read = own->norm ? normed : x;
        float *qkv = own->half || !in->kept ? unrounded : (float *)in->kept + start * outputs;
        const int64_t layout = own->norm ? own->layout : FLOATS;
        Product product = {read, in->packed, rows, hidden, outputs, 0, qkv, layout};
        FinishHeads finish = {qkv, own->bias, own->head_norms, own->cos + start * own->pairs, own->sin + start * own->pairs,
                              own->eps, own->total_heads, own->rotated_heads, own->joint_heads, own->dim, own->pairs,
                              own->half, in->heads + start * outputs * bytes,
                              own->head_norms ? in->head_inverse + start * own->rotated_heads : 0,
                              own->half && in->kept ? in->kept + start * outputs * bytes : 0};
        if (own->norm) {
            RmsNorm norm = {x, own->norm, 0, own->eps, hidden, (char *)normed, in->inverse + start, layout};
            code = in->rms_norm(&norm, 0, rows);
        }
        if (!code) code = in->product(&product, 0, outputs / PANEL);
        if (!code) code = add_lora(in->add_lora, own->lora, start, rows, hidden, outputs, read, layout, qkv);
        if (!code) code = in->finish_heads(&finish, 0, rows);
    }
    free(room);
    return code;
}

typedef struct {
    Kernel *finish_heads_backward, *rms_norm_again, *product, *rms_norm_backward, *lora_gradient;
    const Inputs *inputs;
    const int64_t *borders; /* [groups + 1]: the rows at which each group begins, and the end */
    const char *grad;       /* [T, H, D], as `heads` */
    const float *x;
    const int32_t *packed; /* panels of the transpose */
    const char *kept; /* as `InputsForward` has it */
    const float *inverse, *head_inverse;
    float *grad_x; /* [T, E], or missing */
} InputsBackward;

/* `rows` rows from `start` on; `room` [rows, 2 E + H D] is for what lies in between. */
static int run_block(const void *arguments, int64_t group, int64_t start, int64_t rows, float *room) {
    const InputsBackward *in = arguments;
    const Inputs *own = in->inputs;
    const int64_t hidden = own->hidden, outputs = own->total_heads * own->dim, bytes = own->half ? 2 : 4;
    const float *x = in->x + start * hidden;
    float *normed = room, *grad_normed = normed + rows * hidden, *grad_qkv = grad_normed + rows * hidden;
    float *grad_x = in->grad_x ? in->grad_x + start * hidden : 0;
    const float *read = own->norm ? normed : x;
    if (!own->norm) grad_normed = grad_x;
    FinishHeadsBackward finish = {in->grad + start * outputs * bytes,
                                  in->kept ? in->kept + start * outputs * bytes : 0,
                                  own->head_norms ? in->head_inverse + start * own->rotated_heads : 0, own->head_norms,
                                  own->cos + start * own->pairs, own->sin + start * own->pairs, own->total_heads,
                                  own->rotated_heads, own->joint_heads, own->dim, own->pairs, own->half, (char *)grad_qkv,
                                  own->rounds, own->half};
    Product product = {grad_qkv, in->packed, rows, outputs, hidden, 0, grad_normed, own->rounds};
    int code = in->finish_heads_backward(&finish, 0, rows);
    if (own->norm && !code) {
        RmsNormAgain norm = {x, in->inverse + start, own->norm, hidden, (char *)normed, own->rounds};
        code = in->rms_norm_again(&norm, 0, rows);
    }
    if (grad_x && !code) code = in->product(&product, 0, hidden / PANEL);
    if (!code)
        code = add_gradient(in->lora_gradient, own->lora, group, start, rows, start == in->borders[group], grad_qkv,
                            own->rounds, read, own->norm && own->rounds, hidden, outputs, grad_x ? grad_normed : 0);
    if (code || !grad_x || !own->norm) return code;
    RmsNormBackward back = {grad_normed, x, in->inverse + start, own->norm, 0, hidden, grad_x};
    return in->rms_norm_backward(&back, 0, rows);
}

/* From grad the gradient for x, and the sums of each group for those of the lora. For groups `first` to `last`. */
int attention_inputs_backward(const InputsBackward *in, int64_t first, int64_t last) {
    const int64_t outputs = in->inputs->total_heads * in->inputs->dim;
    return run_groups(run_block, in, in->borders, first, last, in->inputs->block_rows, 2 * in->inputs->hidden + outputs);
}
