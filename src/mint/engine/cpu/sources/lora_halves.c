/* `loras.c` for a base in bfloat16, where the processor multiplies pairs of bfloat16 in half the time that floats take.

   All factors are rounded to bfloat16, as autocast does: rows, gradients, what lies between a lora's two matrices, and
   copies of the matrices. Sums and results are float32. The two numbers of a pair belong to two inputs, two ranks, two
   outputs, or, in the gradients of the matrices, to two rows.

   A result is one sum in order (of 32 numbers at once with AMX, in a register's own order), whatever the number of rows,
   the tile that they are computed in, or the thread: bits of a row are a function of that row alone.

   Letters: I inputs, O outputs; a word is two bfloat16. */

#include "calls.h"
#include "memory.h"

#ifdef __AVX512BF16__
#ifdef __AMX_BF16__
#include "lora_amx.h"
#else
#include "lora_vectors.h"
#endif

/* Reserves so many words of a room; returns where they begin, which is a cache line. `all` counts the words that are
   reserved. */
static int64_t place(int64_t *all, int64_t words) {
    const int64_t at = *all;
    *all += (words + LANES - 1) / LANES * LANES;
    return at;
}

/* `add_lora` with factors in bfloat16. */
int add_lora_halves(const AddLora *in, int64_t first, int64_t last) {
    const int64_t parts = in->parts, rank = in->rank, inputs = in->inputs, outputs = in->outputs;
    const int64_t ranks = parts * rank, words = words_of(inputs), pairs = pairs_of(rank), stride = parts * pairs;
    const int64_t rows = last - first < CHUNK ? last - first : CHUNK;
    const int has_panels = last - first >= LEAST_PANEL_ROWS;
    const int reads_x = in->layout && inputs == 2 * words; /* as it lies */
    int64_t all = 0;
    const int64_t panels_at = place(&all, has_panels ? panels_of(ranks) * words * LANES : ranks_room(words));
    const int64_t x_at = place(&all, reads_x ? 0 : rows * words), squeezed_at = place(&all, in->down ? 0 : rows * ranks);
    const int64_t factors_at = place(&all, rows * stride + LANES);
    const int64_t columns_at = place(&all, SEGMENT * pairs + 15 * LANES);
    int32_t *room = scratch(4 * all);
    if (!room) return 2;
    int32_t *panels = has_panels ? room + panels_at : 0, *factors = room + factors_at;
    int32_t *columns = room + columns_at;
    float *squeezed = (float *)(room + squeezed_at);
    const char *next = in->next;
    if (panels && !in->given) turn_ranks(in->a, in->rounded, ranks, inputs, panels, &next);
    for (int64_t start = first; start < last; start += CHUNK) {
        const int64_t count = last - start < CHUNK ? last - start : CHUNK;
        float *down = in->down ? in->down + start * ranks : squeezed, *out = in->out + start * outputs;
        for (int64_t r = 0; r < count && !reads_x && !in->given; r++)
            take_row(in->x, in->layout, (start + r) * inputs, inputs, room + x_at + r * words);
        const int32_t *x = reads_x ? (const int32_t *)in->x + start * words : room + x_at;
        if (!in->given)
            squeeze_rows(count, x, in->layout == TILES, in->a, in->rounded, panels, ranks, inputs, in->scale, down,
                         room + panels_at, &next);
        for (int64_t r = 0; r < count; r++) pair_ranks(down + r * ranks, parts, rank, rank, 1, factors + r * stride);
        for (int64_t part = 0; part < parts; out += in->widths[part++])
            for (int64_t o = 0, size; o < in->widths[part]; o += size) {
                size = in->widths[part] - o < SEGMENT ? in->widths[part] - o : SEGMENT;
                widen_rows(count, factors + part * pairs, stride, in->bs[part], in->rounded, rank, o, size, columns, out + o,
                           outputs, &next);
            }
        next = 0; /* the first rows have fetched all */
    }
    end_products();
    free(room);
    return 0;
}

static void turn_pairs_of_ranks(const LoraGradient *in, const Turned *turned) {
    const int64_t inputs = in->inputs;
    for (int64_t part = 0; part < in->parts; part++)
        for (int64_t j = 0; j < in->rank; j += 2) {
            const float *a = in->a + (part * in->rank + j) * inputs;
            int32_t *to = turned->a + (part * turned->pairs + j / 2) * LANES;
            for (int64_t i = 0; i < inputs; i += LANES) {
                Vector next = j + 1 < in->rank ? loaded(a + inputs + i) : zeros();
                _mm512_storeu_si512(to + i * turned->stride, side_by_side(loaded(a + i), next));
            }
        }
}

/* down_rows of `count` rows from `start` on. */
static void find_down(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count) {
    const char *next = 0;
    const int64_t rank = in->rank, ranks = in->parts * rank, words = words_of(in->inputs);
    const float *down = in->down ? in->down + start * ranks : turned->down;
    if (!in->down) {
        for (int64_t r = 0; r < count; r++)
            take_row(in->x, in->half, (start + r) * in->inputs, in->inputs, turned->x + r * words);
        squeeze_rows(count, turned->x, 0, in->a, 0, turned->panels, ranks, in->inputs, in->scale, turned->down,
                     turned->ranks_room, &next);
    }
    for (int64_t r = 0; r < count; r += 2)
        for (int64_t part = 0; part < in->parts; part++)
            for (int64_t j = 0; j < rank; j += LANES) {
                const float *own = down + r * ranks + part * rank + j;
                Vector next = r + 1 < count ? loaded_first(own + ranks, rank - j) : zeros();
                _mm512_storeu_si512(turned->down_rows + r / 2 * turned->ranks + part * turned->wide + j,
                                    side_by_side(loaded_first(own, rank - j), next));
            }
}

/* Rows `start` to `start + count`, added to `found`. */
static void add_gradient(const LoraGradient *in, const Turned *turned, int64_t start, int64_t count, float *found) {
    const int64_t rank = in->rank, wide = turned->wide, ranks = turned->ranks;
    const int64_t inputs = in->inputs, pairs = (count + 1) / 2;
    float *grad_b = found + in->parts * rank * inputs;
    if (in->x) find_down(in, turned, start, count);
    memset(turned->grad_down, 0, sizeof(float) * count * ranks);
    for (int64_t part = 0, at = 0; part < in->parts; part++)
        for (int64_t o = 0, size; o < in->widths[part]; o += size, at += size) {
            size = in->widths[part] - o < GRADS ? in->widths[part] - o : GRADS;
            narrow_rows(in, turned, start, count, part, o, size, at);
            if (in->x) add_to_b(in, turned, part, size, at, pairs, grad_b);
        }
    if (in->grad_x) {
        for (int64_t r = 0; r < count; r++)
            pair_ranks(turned->grad_down + r * ranks, in->parts, rank, wide, in->scale, turned->factors + r * turned->stride);
        spread_rows(count, in, turned, in->grad_x + start * inputs);
    }
    if (!in->x) return;
    for (int64_t i = 0; i < count * ranks; i += LANES)
        put(turned->grad_down + i, scaled(loaded(turned->grad_down + i), same(in->scale)));
    for (int64_t j = 0; j < ranks; j += LANES)
        pair_rows(turned->grad_down, 0, ranks, j, count, turned->grad_down_rows + j, ranks);
    add_to_a(in, turned, start, count, found);
}

/* `lora_gradient` with factors in bfloat16. */
int lora_gradient_halves(const LoraGradient *in, int64_t first, int64_t last) {
    const int64_t inputs = in->inputs, rank = in->rank, parts = in->parts, words = words_of(inputs);
    const int64_t wide = panels_of(rank) * LANES, ranks = parts * wide, pairs = pairs_of(rank), stride = parts * pairs;
    const int64_t size = rank * (parts * inputs + in->outputs);
    const int is_again = in->x && !in->down; /* down is computed again */
    const int has_panels = is_again && in->rows >= LEAST_PANEL_ROWS;
    const int64_t rows = in->rows < BLOCK ? in->rows + in->rows % 2 : BLOCK; /* an even number */
    int64_t all = 0;
    const int64_t a = place(&all, in->grad_x ? stride * inputs : 0);
    const int64_t panels_size = has_panels ? panels_of(parts * rank) * words * LANES : is_again ? ranks_room(words) : 0;
    const int64_t panels = place(&all, panels_size);
    const int64_t outputs = place(&all, GRADS / 2 * wide), x = place(&all, is_again ? rows * words : 0);
    const int64_t grads = place(&all, GRAD_ROWS * GRADS / 2), grad_rows = place(&all, BLOCK / 2 * GRADS);
    const int64_t x_rows = place(&all, X_PANELS * BLOCK / 2 * LANES), down_rows = place(&all, BLOCK / 2 * ranks);
    const int64_t grad_down_rows = place(&all, BLOCK / 2 * ranks), own_room = place(&all, room_of(ranks, wide));
    const int64_t factors = place(&all, rows * stride + LANES);
    const int64_t down = place(&all, is_again ? rows * parts * rank : 0), grad_down = place(&all, rows * ranks);
    int32_t *room = scratch(4 * all);
    if (!room) return 2;
    const Turned turned = {.wide = wide,
                           .ranks = ranks,
                           .pairs = pairs,
                           .stride = stride,
                           .a = room + a,
                           .panels = has_panels ? room + panels : 0,
                           .ranks_room = room + panels,
                           .outputs = room + outputs,
                           .x = room + x,
                           .grads = room + grads,
                           .grad_rows = room + grad_rows,
                           .x_rows = room + x_rows,
                           .down_rows = room + down_rows,
                           .grad_down_rows = room + grad_down_rows,
                           .room = room + own_room,
                           .factors = room + factors,
                           .down = (float *)(room + down),
                           .grad_down = (float *)(room + grad_down)};
    if (in->grad_x) turn_pairs_of_ranks(in, &turned);
    const char *next = 0;
    if (has_panels) turn_ranks(in->a, 0, parts * rank, inputs, turned.panels, &next);
    for (int64_t group = first; group < last; group++) {
        float *found = in->found + group * size;
        if (in->x && !in->adds) memset(found, 0, sizeof(float) * size);
        int64_t end = in->rows * (group + 1) / in->groups;
        for (int64_t start = in->rows * group / in->groups; start < end; start += BLOCK)
            add_gradient(in, &turned, start, end - start < BLOCK ? end - start : BLOCK, found);
    }
    end_products();
    free(room);
    return 0;
}

#else
int add_lora_halves(const AddLora *in, int64_t first, int64_t last) { return 1; }
int lora_gradient_halves(const LoraGradient *in, int64_t first, int64_t last) { return 1; }
#endif
