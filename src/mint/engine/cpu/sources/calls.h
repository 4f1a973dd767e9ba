/* What a kernel is, and the structs of those that kernels of other files call. */

#ifndef MINT_CALLS
#define MINT_CALLS

#include <stdint.h>

/* Parts `first` to `last` of what there is to do; 0, or why it could not be done. */
typedef int Kernel(const void *arguments, int64_t first, int64_t last);

#define PANEL 16 /* outputs of a matrix that lie side by side */

/* How the numbers of rows [T, width] lie: as floats, as bfloat16, or as bfloat16 in tiles, which only kernels for AMX read:
   [T / 16, width / 32, 16 rows, 32 numbers], so that each tile fills a register as it lies. */
enum { FLOATS, HALVES, TILES };

#define TILE_HEIGHT 16
#define TILE_WIDTH 32 /* of a row, or half as many words */

/* Where number i of row t lies in tiles. */
static inline int64_t tile_place(int64_t t, int64_t i, int64_t width) {
    const int64_t tile = t / TILE_HEIGHT * (width / TILE_WIDTH) + i / TILE_WIDTH;
    return (tile * TILE_HEIGHT + t % TILE_HEIGHT) * TILE_WIDTH + i % TILE_WIDTH;
}

typedef struct {
    const float *x;
    const int32_t *packed;
    int64_t rows, inputs, outputs;
    const float *residual;
    float *out;
    int64_t layout;      /* of x; only products of bfloat16 take others than FLOATS */
    const int32_t *next; /* panels that will be wanted after these, or missing */
} Product;

typedef struct {
    const int32_t *source;
    int64_t inputs, outputs;
    int32_t *target;
} Turn;

typedef struct {
    const float *x, *a, *const *bs;
    const int64_t *widths;
    int64_t parts, rank, inputs, outputs;
    double scale;
    float *out;
    float *down;     /* [T, parts * rank], or missing: scale * x times a, which `LoraGradient` may have back */
    int64_t layout;  /* of x */
    int64_t rounded; /* whether a and the bs are, which only `add_lora_halves` takes */
    int64_t given;   /* whether `down` is there already; x and a may then be missing */
    const char *next; /* matrices that will be wanted after these, which `add_lora_halves` fetches, or missing */
} AddLora;

typedef struct {
    const float *grad, *x, *a, *const *bs;
    const int64_t *widths;
    int64_t rows, parts, rank, inputs, outputs, groups;
    int64_t adds; /* whether `found` is added to */
    double scale;
    float *grad_x;     /* [T, I], or missing */
    float *found;      /* [groups, parts * rank * I + O * rank]: those of a, then those of the bs */
    const float *down; /* as `AddLora` gave it; missing: it is computed again */
    int64_t half;      /* whether x is bfloat16 */
    int64_t grad_half; /* and grad, which only `lora_gradient_halves` takes */
} LoraGradient;

typedef struct {
    const float *x, *weight, *residual;
    double eps;
    int64_t width;
    char *out;
    float *inverse;
    int64_t layout; /* of `out` */
} RmsNorm;

typedef struct {
    const float *x, *inverse, *weight;
    int64_t width;
    char *out; /* float, or bfloat16 if `half` */
    int64_t half;
} RmsNormAgain;

typedef struct {
    const float *grad, *x, *inverse, *weight, *residual;
    int64_t width;
    float *out;
} RmsNormBackward;

typedef struct {
    const float *wide;
    int64_t inner, gelu;
    char *out;
    char *kept;     /* [T, 2 * whole], or missing: `wide` in bfloat16 */
    int64_t layout; /* of `out` */
    int64_t whole;  /* numbers from a row of `out` to the next one, and from a gate in `kept` to what it gates */
} Swiglu;

typedef struct {
    const float *grad;
    const char *wide; /* float, or bfloat16 if `half` */
    int64_t inner, half;
    char *out, *wide_out; /* float, or bfloat16 if `rounds` */
    int64_t rounds;
} SwigluGradient;

typedef struct {
    float *qkv;
    const float *bias, *norms, *cos, *sin;
    double eps;
    int64_t total_heads, rotated_heads, joint_heads, dim, pairs, half;
    char *heads;
    float *inverse;
    char *kept; /* [T, H, D], or missing: qkv with its bias in bfloat16 */
} FinishHeads;

typedef struct {
    const char *grad; /* float, or bfloat16 if `half` */
    const char *qkv;  /* float, or bfloat16 if `kept_half`; nobody reads it without norms */
    const float *inverse, *norms, *cos, *sin;
    int64_t total_heads, rotated_heads, joint_heads, dim, pairs, half;
    char *out; /* float, or bfloat16 if `rounds` */
    int64_t rounds, kept_half;
} FinishHeadsBackward;

#endif
