/* What the kernels of whole parts of a layer share: rows in blocks, and loras.

   Rows pass through all of a part block by block, so that what lies between two of its steps stays in the second cache.
   The steps are kernels of other files, called for one block after the other: a row's result is a function of that row
   alone as theirs are. In a backward the rows of a block, `block_rows`, are a multiple of BLOCK in loras.c, and in
   lora_amx.h or lora_vectors.h, or the sums of loras' gradients had another order. */

#ifndef MINT_LAYERS
#define MINT_LAYERS

#include "calls.h"
#include "lanes.h"
#include "memory.h"

/* The lora of a product, as `LoraGradient` has it; found [groups, size], for the backward alone. */
typedef struct {
    const float *a, *const *bs;
    const int64_t *widths;
    int64_t parts, rank, size;
    int64_t beside; /* 1: the product is that of the base, and the lora's part is added; 0: it is merged into the matrix */
    double scale;
    float *down; /* [T, parts * rank], if it is beside: what its first matrix gives, kept for the backward */
    float *found;
} Lora;

/* What a lora beside its product adds to out [rows, outputs], rows from `start` on; `layout` of x. */
INLINE int add_lora(Kernel *kernel, const Lora *lora, int64_t start, int64_t rows, int64_t inputs, int64_t outputs,
                    const float *x, int64_t layout, float *out) {
    if (!lora || !lora->beside) return 0;
    AddLora own = {x, lora->a, lora->bs, lora->widths, lora->parts, lora->rank, inputs, outputs, lora->scale, out,
                   lora->down + start * lora->parts * lora->rank, layout};
    return kernel(&own, 0, rows);
}

#define PIECE_PARTS 2 /* of a lora whose outputs are taken in pieces */

/* Whether there is no such lora, or it has two parts of `width` outputs. */
INLINE int comes_in_pieces(const Lora *lora, int64_t width) {
    return !lora || !lora->beside || (lora->parts == PIECE_PARTS && lora->widths[0] == width && lora->widths[1] == width);
}

/* The same for outputs `first` to `first + size` of each part alone, side by side in out [rows, parts * size]. The first
   piece, which begins at 0, finds what the others need, too. */
INLINE int add_lora_piece(Kernel *kernel, const Lora *lora, int64_t start, int64_t rows, int64_t first, int64_t size,
                          int64_t inputs, const float *x, int64_t layout, float *out) {
    if (!lora || !lora->beside) return 0;
    const float *bs[PIECE_PARTS];
    int64_t widths[PIECE_PARTS];
    for (int64_t part = 0; part < lora->parts; part++)
        bs[part] = lora->bs[part] + first * lora->rank, widths[part] = size;
    AddLora own = {x, lora->a, bs, widths, lora->parts, lora->rank, inputs, lora->parts * size, lora->scale, out,
                   lora->down + start * lora->parts * lora->rank, layout, 0, first > 0};
    return kernel(&own, 0, rows);
}

/* Adds what rows of a group from `start` on give to the gradients of a lora. If the lora is beside its product, and grad_x
   is there, it also adds to grad_x. `begins`: these are the group's first rows. x is bfloat16 if `half`, and grad if
   `grad_half`. */
INLINE int add_gradient(Kernel *kernel, const Lora *lora, int64_t group, int64_t start, int64_t rows, int begins,
                        const float *grad, int64_t grad_half, const float *x, int64_t half, int64_t inputs, int64_t outputs,
                        float *grad_x) {
    if (!lora) return 0;
    LoraGradient own = {grad, x, lora->a, lora->bs, lora->widths, rows, lora->parts, lora->rank, inputs, outputs, 1,
                        !begins, lora->scale, lora->beside ? grad_x : 0, lora->found + group * lora->size,
                        lora->beside ? lora->down + start * lora->parts * lora->rank : 0, half, grad_half};
    return kernel(&own, 0, 1);
}

/* The latter alone, without the rows x. */
INLINE int spread_gradient(Kernel *kernel, const Lora *lora, int64_t rows, const float *grad, int64_t inputs,
                           int64_t outputs, float *grad_x) {
    if (!lora || !lora->beside) return 0;
    LoraGradient own = {grad, 0, lora->a, lora->bs, lora->widths, rows, lora->parts, lora->rank, inputs, outputs, 1, 1,
                        lora->scale, grad_x, 0, 0, 0};
    return kernel(&own, 0, 1);
}

/* Runs `rows` rows of a group from `start` on. */
typedef int RunBlock(const void *arguments, int64_t group, int64_t start, int64_t rows, float *room);

/* The rows of groups `first` to `last`, which begin at `borders`, block by block; each row has `floats` numbers of room. */
INLINE int run_groups(RunBlock *run, const void *arguments, const int64_t *borders, int64_t first, int64_t last,
                      int64_t block_rows, int64_t floats) {
    float *room = scratch(sizeof(float) * block_rows * floats);
    if (!room) return 2;
    int code = 0;
    for (int64_t group = first; group < last; group++)
        for (int64_t start = borders[group], end = borders[group + 1]; start < end && !code; start += block_rows)
            code = run(arguments, group, start, end - start < block_rows ? end - start : block_rows, room);
    free(room);
    return code;
}

#endif
