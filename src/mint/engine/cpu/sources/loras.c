/* What loras add to the products of rows, and their gradients, on a CPU. Knows nothing of layers.

   A result is one sum in order, whatever the number of rows, the tile that they are computed in, or the thread: bits of
   a row are a function of that row alone. */

#include "calls.h"
#include "memory.h"
#include "tiles.h"

#define CHUNK 64     /* rows of a lora that are computed together */
#define SEGMENT 512  /* and outputs, so that each row's lie side by side */

/* How many sums are computed at once: as many as the registers hold beside what is multiplied. */
#ifdef __AVX512F__
#define SQUEEZED(rows, wide) (wide) /* sums of a row in `squeeze` */
#define WIDENED_ROWS 8
#define PAIRED 16
#define SPREAD 4
#define TILE_ROWS 3
#define TILE_LANES 8
#else
#define SQUEEZED(rows, wide) ((rows) == 1 ? 4 : 2)
#define WIDENED_ROWS 4
#define PAIRED 4
#define SPREAD 1
#define TILE_ROWS 2
#define TILE_LANES 2
#endif
#define SQUEEZED_ROWS(rows) ((rows) == 1 ? 1 : SQUEEZED(4, 4) == 4 ? 4 : 2)

/* From so many rows on, and up to so many inputs, the rows of a are turned into panels first. No sums are turned then,
   which costs as much as 64 inputs of 16 ranks; but a panel that is larger than the first cache is read for a few rows
   alone. */
#define LEAST_PANEL_ROWS 24
#define MOST_PANEL_INPUTS 512

/* Of `rows` rows of x [rows, I] and `wide` rows of a, the sums by lanes of their products, to found [rows, stride]. */
INLINE void multiply_rows(const int rows, const int wide, const float *x, const float *const *a, int64_t inputs,
                          const int stride, Vector *found) {
    Vector total[4][LANES];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int k = 0; k < wide; k++) total[r][k] = zeros();
    for (int64_t i = 0; i < inputs; i += LANES) {
        Vector part[4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            part[r] = loaded(x + r * inputs + i);
            HOLD(part[r]);
        }
#pragma GCC unroll 16
        for (int k = 0; k < wide; k++) {
            Vector weight = loaded(a[k] + i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) total[r][k] = fused(part[r], weight, total[r][k]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int k = 0; k < wide; k++) found[r * stride + k] = total[r][k];
}

/* down [rows, ranks] = x [rows, I] times `wide` rows of a [ranks, I] from `j` on; those past the last are the last
   again. */
INLINE void squeeze(const int rows, const int wide, const float *x, const float *a, int64_t j, int64_t ranks,
                    int64_t inputs, float *down) {
    Vector found[LANES];
    const float *own[LANES];
    float result[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < wide; k++) own[k] = a + (j + k < ranks ? j + k : ranks - 1) * inputs;
    for (int r = 0; r < rows; r += SQUEEZED_ROWS(rows))
        for (int k = 0; k < wide; k += SQUEEZED(rows, wide))
            multiply_rows(SQUEEZED_ROWS(rows), SQUEEZED(rows, wide), x + r * inputs, own + k, inputs, wide,
                          found + r * wide + k);
    put(result, sum_rows(found));
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide && j + k < ranks; k++) down[r * ranks + j + k] = result[r * wide + k];
}

/* The same sums for 16 ranks from a panel [I, 16] of a: of every 16th input first, as in a lane, then of the lanes in
   order; down of the first `own` ranks. */
INLINE void squeeze_panel(const int rows, const float *x, int64_t inputs, const float *panel, float scale, float *down,
                          int64_t ranks, int64_t own) {
    Vector all[TILE_ROWS];
    for (int first = 0; first < LANES; first += TILE_LANES) {
        Vector total[TILE_ROWS][TILE_LANES];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int k = 0; k < TILE_LANES; k++) total[r][k] = zeros();
        for (int64_t i = first; i < inputs; i += LANES)
#pragma GCC unroll 8
            for (int k = 0; k < TILE_LANES; k++) {
                Vector weight = loaded(panel + (i + k) * LANES);
                HOLD(weight);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) total[r][k] = fused(same(x[r * inputs + i + k]), weight, total[r][k]);
            }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int k = 0; k < TILE_LANES; k++) all[r] = first + k ? added(all[r], total[r][k]) : total[r][k];
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) put_first(down + r * ranks, scaled(all[r], same(scale)), own);
}

/* panels [ranks / 16, I, 16] of a [ranks, I]; places past its last row are zero. */
static void turn_ranks(const float *a, int64_t ranks, int64_t inputs, float *panels) {
    for (int64_t j = 0; j < ranks; j += LANES, panels += inputs * LANES) {
        const int64_t whole = ranks - j < LANES ? 0 : inputs; /* inputs are a multiple of LANES */
        for (int64_t i = 0; i < whole; i += LANES)
            transpose((const int32_t *)(a + j * inputs + i), inputs, (int32_t *)(panels + i * LANES), LANES);
        for (int64_t i = whole; i < inputs; i++)
            for (int64_t k = 0; k < LANES; k++) panels[i * LANES + k] = j + k < ranks ? a[(j + k) * inputs + i] : 0;
    }
}

/* down [rows, ranks] = scale * x [rows, I] times a [ranks, I], by its panels if they are there. */
static void squeeze_rows(int64_t rows, const float *x, const float *a, const float *panels, int64_t ranks, int64_t inputs,
                         float scale, float *down) {
    int64_t r = 0;
    if (panels)
        for (int64_t j = 0; j < ranks; j += LANES) {
            const float *panel = panels + j * inputs;
            for (r = 0; r + TILE_ROWS <= rows; r += TILE_ROWS)
                squeeze_panel(TILE_ROWS, x + r * inputs, inputs, panel, scale, down + r * ranks + j, ranks, ranks - j);
            for (; r < rows; r++)
                squeeze_panel(1, x + r * inputs, inputs, panel, scale, down + r * ranks + j, ranks, ranks - j);
        }
    else {
        for (; r + 4 <= rows; r += 4)
            for (int64_t j = 0; j < ranks; j += 4) squeeze(4, 4, x + r * inputs, a, j, ranks, inputs, down + r * ranks);
        for (; r < rows; r++)
            for (int64_t j = 0; j < ranks; j += LANES)
                squeeze(1, LANES, x + r * inputs, a, j, ranks, inputs, down + r * ranks);
        for (int64_t i = 0, all = rows * ranks; i < all; i += LANES)
            put_first(down + i, scaled(loaded_first(down + i, all - i), same(scale)), all - i);
    }
}

/* out [rows, 16 * wide outputs] += down [rows, rank] times columns [wide, rank, 16]. */
INLINE void widen(const int rows, const int wide, const float *down, int64_t ranks, const float *columns, int64_t rank,
                  float *out, int64_t outputs) {
    Vector total[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) total[r][k] = zeros();
    for (int64_t j = 0; j < rank; j++) {
        Vector weight[2];
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) weight[k] = loaded(columns + (k * rank + j) * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            Vector own = same(down[r * ranks + j]);
#pragma GCC unroll 2
            for (int k = 0; k < wide; k++) total[r][k] = fused(own, weight[k], total[r][k]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) {
            float *to = out + r * outputs + k * LANES;
            put(to, added(loaded(to), total[r][k]));
        }
}

/* The same for `count` outputs. */
INLINE void widen_rows(const int rows, const float *down, int64_t ranks, const float *columns, int64_t rank, float *out,
                       int64_t outputs, int64_t count) {
    int64_t o = 0;
    const int held = rows < WIDENED_ROWS ? rows : WIDENED_ROWS;
    if (WIDENED_ROWS == 8 || rows == 1)
        for (; o + 2 * LANES <= count; o += 2 * LANES)
            widen(rows, 2, down, ranks, columns + o * rank, rank, out + o, outputs);
    for (; o < count; o += LANES)
        for (int r = 0; r < rows; r += held)
            widen(held, 1, down + r * ranks, ranks, columns + o * rank, rank, out + r * outputs + o, outputs);
}

/* From b [16, rank] to columns [rank, 16]. */
INLINE void turn(const float *b, int64_t rank, float *columns) {
    int64_t j = 0;
    for (; j + LANES <= rank; j += LANES)
        transpose((const int32_t *)b + j, rank, (int32_t *)columns + j * LANES, LANES);
    for (; j < rank; j++)
        for (int i = 0; i < LANES; i++) columns[j * LANES + i] = b[i * rank + j];
}

typedef uint16_t PartHalves __attribute__((vector_size(2 * PART), aligned(2), may_alias));
typedef uint32_t PartWords __attribute__((vector_size(4 * PART), aligned(4), may_alias));

/* Rows of x [T, I] from `start` on as floats: x itself, or a copy in `room` of what is bfloat16. */
static const float *floats_of(const float *x, int64_t half, int64_t start, int64_t count, int64_t inputs, float *room) {
    if (!half) return x + start * inputs;
    const uint16_t *halves = (const uint16_t *)x + start * inputs;
    for (int64_t i = 0; i < count * inputs; i += PART) /* inputs are a multiple of LANES */
        *(PartWords *)(room + i) = __builtin_convertvector(*(const PartHalves *)(halves + i), PartWords) << 16;
    return room;
}

/* out [T, O] += scale * x [T, I] times a [parts * rank, I] times the parts' b [their outputs, rank] side by side, for
   rows `first` to `last`. */
int add_lora(const AddLora *in, int64_t first, int64_t last) {
    const float *a = in->a;
    const float *const *bs = in->bs;
    const int64_t *widths = in->widths;
    int64_t parts = in->parts, rank = in->rank, inputs = in->inputs, outputs = in->outputs;
    double scale = in->scale;
    float *out = in->out;
    int64_t ranks = parts * rank;
    const int by_panels = last - first >= LEAST_PANEL_ROWS && inputs <= MOST_PANEL_INPUTS;
    const int64_t places = by_panels ? (ranks + LANES - 1) / LANES * LANES : 0;
    const int64_t widened = in->layout ? CHUNK * inputs : 0;
    float *room = scratch(sizeof(float) * (places * inputs + ranks * CHUNK + rank * SEGMENT + widened));
    if (!room) return 2;
    float *panels = places ? room : 0, *squeezed = room + places * inputs, *columns = squeezed + ranks * CHUNK;
    float *floats = columns + rank * SEGMENT;
    if (panels && !in->given) turn_ranks(a, ranks, inputs, panels);
    for (int64_t start = first; start < last; start += CHUNK) {
        int64_t count = last - start < CHUNK ? last - start : CHUNK, r = 0, at = start * outputs;
        float *down = in->down ? in->down + start * ranks : squeezed;
        if (!in->given)
            squeeze_rows(count, floats_of(in->x, in->layout, start, count, inputs, floats), a, panels, ranks, inputs, scale,
                         down);
        for (int64_t part = 0; part < parts; at += widths[part++])
            for (int64_t o = 0, size; o < widths[part]; o += size) {
                size = widths[part] - o < SEGMENT ? widths[part] - o : SEGMENT;
                for (int64_t k = 0; k < size; k += LANES) turn(bs[part] + (o + k) * rank, rank, columns + k * rank);
                const float *own = down + part * rank;
                float *to = out + at + o;
                for (r = 0; r + 8 <= count; r += 8)
                    widen_rows(8, own + r * ranks, ranks, columns, rank, to + r * outputs, outputs, size);
                for (; r < count; r++)
                    widen_rows(1, own + r * ranks, ranks, columns, rank, to + r * outputs, outputs, size);
            }
    }
    free(room);
    return 0;
}

/* A lora whose bs follow its a in memory, and its rows. */
typedef struct {
    const float *a;
    int64_t start, stop, rank;
    double scale;
    int64_t rounded;
} LoraOfRows;

typedef struct {
    Kernel *add_lora;
    const LoraOfRows *loras; /* in the order of their rows */
    const float *const *bs;  /* of each lora as many as there are parts */
    const int64_t *widths;
    int64_t count, parts;
    const float *x; /* [T, I] */
    int64_t inputs, outputs, layout;
    float *out; /* [T, O] */
} AddLoras;

/* `add_lora` of each lora for its own rows, of which rows `first` to `last` are computed. */
int add_loras(const AddLoras *in, int64_t first, int64_t last) {
    int code = 0;
    for (int64_t i = 0; i < in->count && !code; i++) {
        const LoraOfRows *lora = in->loras + i;
        const int64_t start = lora->start > first ? lora->start : first, stop = lora->stop < last ? lora->stop : last;
        if (start >= stop) continue;
        AddLora own = {in->x, lora->a, in->bs + i * in->parts, in->widths, in->parts, lora->rank, in->inputs, in->outputs,
                       lora->scale, in->out, 0, in->layout, lora->rounded};
        if (i + 1 < in->count) own.next = (const char *)lora[1].a;
        code = in->add_lora(&own, start, stop);
    }
    return code;
}

#define ROWS 6    /* of a tile that reads its inputs as they lie: 8 at a distance of 4 KB would fill a set of the cache */
#define BLOCK 36  /* rows of a gradient that are done with before the next ones: they stay in the second cache */

/* Gradients of a lora. Sums over rows are those of blocks in order, blocks being those of a group, whatever the thread.

   out [rows, 16] = scale * x [rows, count] times a panel [count, 16], whose rows are `apart`. */
INLINE void narrow(const int rows, const float *x, int64_t stride, int64_t count, const float *panel, int64_t apart,
                   float scale, float *out, int64_t ranks) {
    Vector total[ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) total[r] = zeros();
    for (int64_t i = 0; i < count; i++) {
        Vector weight = loaded(panel + i * apart);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) total[r] = fused(same(x[r * stride + i]), weight, total[r]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) put(out + r * ranks, scaled(total[r], same(scale)));
}

static void narrow_rows(int64_t rows, const float *x, int64_t stride, int64_t count, const float *panel, int64_t apart,
                        float scale, float *out, int64_t ranks) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        narrow(ROWS, x + r * stride, stride, count, panel, apart, scale, out + r * ranks, ranks);
    for (; r + 2 <= rows; r += 2) narrow(2, x + r * stride, stride, count, panel, apart, scale, out + r * ranks, ranks);
    if (r < rows) narrow(1, x + r * stride, stride, count, panel, apart, scale, out + r * ranks, ranks);
}

/* out [`places` of 16, the first `own` of 16 lanes] += left [rows, 16]^T times right [rows, 16]. */
static void add_pairs(const float *left, int64_t left_stride, const float *right, int64_t right_stride, int64_t rows,
                      float *out, int64_t out_stride, int64_t places, int64_t own) {
    for (int first = 0; first < LANES; first += PAIRED) {
        Vector total[PAIRED];
#pragma GCC unroll 16
        for (int j = 0; j < PAIRED; j++) total[j] = zeros();
        for (int64_t t = 0; t < rows; t++) {
            Vector vector = loaded(right + t * right_stride);
#pragma GCC unroll 16
            for (int j = 0; j < PAIRED; j++)
                total[j] = fused(same(left[t * left_stride + first + j]), vector, total[j]);
        }
#pragma GCC unroll 16
        for (int j = 0; j < PAIRED; j++)
            if (first + j < places) {
                float *to = out + (first + j) * out_stride;
                put_first(to, added(loaded_first(to, own), total[j]), own);
            }
    }
}

/* What a block of rows needs: a and the bs in panels [ranks / 16, inputs or outputs, 16], and scale times the rows
   times each. The bs of a rank of whole panels are read as they are. */
typedef struct {
    int64_t wide, ranks;     /* the rank as a multiple of 16, and that of all parts */
    float *a, *b;            /* or missing; a of all ranks side by side */
    float *squeezed;         /* [rows, parts * rank] */
    float *down, *grad_down; /* [rows, ranks] */
    float *floats;           /* [rows, inputs] for x in bfloat16 */
} Turned;

static void turn_parts(const LoraGradient *in, const Turned *turned) {
    const int64_t rank = in->rank;
    if (turned->a) turn_ranks(in->a, in->parts * rank, in->inputs, turned->a);
    for (int64_t part = 0, o = 0; part < in->parts && turned->b; o += in->widths[part++]) {
        float *to = turned->b + turned->wide * o;
        for (int64_t j = 0; j < rank; j += LANES)
            for (int64_t i = 0; i < in->widths[part]; i++, to += LANES)
                put(to, loaded_first(in->bs[part] + i * rank + j, rank - j));
    }
}

/* down [count, ranks] of rows from `start` on, which are `x`. */
static void find_down(const LoraGradient *in, const Turned *turned, const float *x, int64_t start, int64_t count) {
    const int64_t own = in->parts * in->rank;
    const float *found = in->down ? in->down + start * own : turned->squeezed;
    if (!in->down) squeeze_rows(count, x, in->a, turned->a, own, in->inputs, in->scale, turned->squeezed);
    for (int64_t r = 0; r < count; r++)
        for (int64_t part = 0; part < in->parts; part++)
            for (int64_t j = 0; j < in->rank; j += LANES)
                put(turned->down + r * turned->ranks + part * turned->wide + j,
                    loaded_first(found + r * own + part * in->rank + j, in->rank - j));
}

/* grad_x [count, I] += grad_down times a. */
INLINE void spread(const int rows, const int wide, const LoraGradient *in, const Turned *turned, const float *grad_down,
                   int64_t i, float *grad_x) {
    Vector total[ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int k = 0; k < wide; k++) total[r][k] = loaded(grad_x + r * in->inputs + i + k * LANES);
    for (int64_t part = 0; part < in->parts; part++)
        for (int64_t j = 0; j < in->rank; j++) {
            const float *a = in->a + (part * in->rank + j) * in->inputs + i;
            Vector weight[4];
#pragma GCC unroll 4
            for (int k = 0; k < wide; k++) weight[k] = loaded(a + k * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                Vector own = same(grad_down[r * turned->ranks + part * turned->wide + j]);
#pragma GCC unroll 4
                for (int k = 0; k < wide; k++) total[r][k] = fused(own, weight[k], total[r][k]);
            }
        }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int k = 0; k < wide; k++) put(grad_x + r * in->inputs + i + k * LANES, total[r][k]);
}

static void spread_rows(int64_t count, const LoraGradient *in, const Turned *turned, float *grad_x) {
    for (int64_t r = 0, rows; r < count; r += rows) {
        rows = count - r < ROWS ? 1 : ROWS;
        const float *own = turned->grad_down + r * turned->ranks;
        float *to = grad_x + r * in->inputs;
        int64_t i = 0;
        for (; i + 4 * LANES <= in->inputs && (SPREAD == 4 || rows == 1); i += 4 * LANES)
            if (rows == ROWS) spread(ROWS, SPREAD, in, turned, own, i, to);
            else spread(1, 4, in, turned, own, i, to);
        for (; i < in->inputs; i += LANES)
            if (rows == ROWS) spread(ROWS, 1, in, turned, own, i, to);
            else spread(1, 1, in, turned, own, i, to);
    }
}

/* grad_down [count, ranks] = scale * grad of rows from `start` on times the bs. */
static void find_grad_down(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count) {
    const float *grad = in->grad + start * in->outputs;
    for (int64_t part = 0, o = 0; part < in->parts; o += in->widths[part++])
        for (int64_t j = 0; j < turned->wide; j += LANES) {
            const float *panel = turned->b ? turned->b + turned->wide * o + j * in->widths[part] : in->bs[part] + j;
            narrow_rows(count, grad + o, in->outputs, in->widths[part], panel, turned->b ? LANES : in->rank, in->scale,
                        turned->grad_down + part * turned->wide + j, turned->ranks);
        }
}

/* Rows `start` to `start + count`, added to `found`. */
static void add_gradient(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count, float *found) {
    const int64_t rank = in->rank, wide = turned->wide, ranks = turned->ranks;
    const int64_t inputs = in->inputs, outputs = in->outputs;
    const float *grad = in->grad + start * outputs;
    float *down = turned->down, *grad_down = turned->grad_down, *grad_b = found + in->parts * rank * inputs;
    find_grad_down(in, turned, start, count);
    if (in->grad_x) spread_rows(count, in, turned, in->grad_x + start * inputs);
    if (!in->x) return;
    const float *x = floats_of(in->x, in->half, start, count, inputs, turned->floats);
    find_down(in, turned, x, start, count);
    for (int64_t i = 0; i < inputs; i += LANES)
        for (int64_t part = 0; part < in->parts; part++)
            for (int64_t j = 0; j < rank; j += LANES)
                add_pairs(grad_down + part * wide + j, ranks, x + i, inputs, count,
                          found + (part * rank + j) * inputs + i, inputs, rank - j, LANES);
    for (int64_t part = 0, o = 0, own = 0; part < in->parts; part++, own = 0)
        for (; own < in->widths[part]; own += LANES, o += LANES)
            for (int64_t j = 0; j < rank; j += LANES)
                add_pairs(grad + o, outputs, down + part * wide + j, ranks, count, grad_b + o * rank + j, rank, LANES,
                          rank - j);
}

/* The gradients of a lora from grad [T, O] for the product of x [T, I], of the rows of groups `first` to `last`. Without x,
   that for x alone. */
int lora_gradient(const LoraGradient *in, int64_t first, int64_t last) {
    const int64_t wide = (in->rank + LANES - 1) / LANES * LANES, ranks = in->parts * wide;
    const int64_t size = in->rank * (in->parts * in->inputs + in->outputs);
    const int64_t is_short = !in->x || in->down || in->rows < LEAST_PANEL_ROWS || in->inputs > MOST_PANEL_INPUTS;
    const int64_t panels = is_short ? 0 : ranks * in->inputs, bs = in->rank % LANES ? wide * in->outputs : 0;
    const int64_t floats = in->half ? BLOCK * in->inputs : 0;
    float *room = scratch(sizeof(float) * (panels + bs + 3 * BLOCK * ranks + floats));
    if (!room) return 2;
    float *b = room + panels, *squeezed = b + bs, *down = squeezed + BLOCK * ranks;
    const Turned turned = {wide, ranks, panels ? room : 0, bs ? b : 0, squeezed, down, down + BLOCK * ranks,
                           down + 2 * BLOCK * ranks};
    turn_parts(in, &turned);
    for (int64_t group = first; group < last; group++) {
        float *found = in->found + group * size;
        if (in->x && !in->adds) memset(found, 0, sizeof(float) * size);
        int64_t end = in->rows * (group + 1) / in->groups;
        for (int64_t start = in->rows * group / in->groups; start < end; start += BLOCK)
            add_gradient(in, &turned, start, end - start < BLOCK ? end - start : BLOCK, found);
    }
    free(room);
    return 0;
}

typedef struct {
    const float *found;
    const int64_t *borders; /* [parts + 1]: the groups at which each part begins, and the end */
    int64_t parts, size;
    float *out;
} SumGroups;

/* out [size] = the sum of found [groups, size]: the groups of each part are added in order, then the parts. For columns
   `first` to `last`, 16 at a time. */
int sum_groups(const SumGroups *in, int64_t first, int64_t last) {
    for (int64_t i = first * LANES; i < last * LANES; i += LANES) {
        const int64_t own = in->size - i;
        for (int64_t part = 0; part < in->parts; part++) {
            Vector total = loaded_first(in->found + in->borders[part] * in->size + i, own);
            for (int64_t group = in->borders[part] + 1; group < in->borders[part + 1]; group++)
                total = added(total, loaded_first(in->found + group * in->size + i, own));
            if (part) total = added(loaded_first(in->out + i, own), total);
            put_first(in->out + i, total, own);
        }
    }
    return 0;
}
