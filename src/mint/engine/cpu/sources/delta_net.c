/* Gated delta nets, row by row, with their gradient: the convolution over the last rows, the states of the heads, and the
   gated norm of what they read. `model/delta_net.py` has the formulas.

   Each row of a head goes through the same operations in the same order, wherever its sequence is cut into spans. Columns
   of a head's state do not see one another, so they run in blocks that stay in the first cache.

   Letters: T rows, C channels of the convolution, K its rows, N value heads, D their dimension, F the key dimension,
   U = N * D, W = C + U + 2 * N, L rows of a span. */

#include "calls.h"
#include "lanes.h"
#include "memory.h"

#define COLUMNS 32 /* of a block, and */
#define NARROW 16  /* where D is no multiple of that */
#define STEPS 16   /* whose states a gradient keeps at once */
#define NOTHING (-1)

typedef struct {
    int64_t spans, groups, key_heads, value_heads, key_dim, value_dim, taps;
    const int64_t *starts, *stops, *loaded, *kept; /* [spans] */
    const int64_t *edges;                          /* [groups + 1]: the first span of each */
    const float *kernel, *rates, *bias;            /* [K, C], [N], [N] */
} DeltaNet;

typedef struct {
    const DeltaNet *net;
    const float *wide;     /* [T, W] */
    float *windows, *heads; /* [slots, K - 1, C], [slots, N, F, D] */
    float *out;            /* [T, U] */
} DeltaForward;

typedef struct {
    const DeltaNet *net;
    const float *wide, *grad;           /* [T, W], [T, U] */
    float *windows, *heads;             /* scratch for the states of spans that others start from */
    float *window_grads, *head_grads;   /* of the same shapes, zeros */
    float *out;                         /* [T, W] */
} DeltaBackward;

INLINE int64_t channels_of(const DeltaNet *n) { return 2 * n->key_heads * n->key_dim + n->value_heads * n->value_dim; }
INLINE int64_t width_of(const DeltaNet *n) { return channels_of(n) + n->value_heads * (n->value_dim + 2); }

INLINE vf sigmoids(vf x) {
    vf rest;
    return sigmoid(x, &rest);
}

INLINE float sigmoid_of(float x) { return sigmoids((vf){0} + x)[0]; }

/* log(1 + exp(x)), without overflow. */
INLINE float softplus_of(float x) { return (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))); }

/* The input of channel-row `t` of a span, which may lie before its first row. */
INLINE const float *input_row(const DeltaNet *n, const float *wide, const float *window, int64_t start, int64_t t) {
    if (t >= 0) return wide + (start + t) * width_of(n);
    return window ? window + (n->taps - 1 + t) * channels_of(n) : 0;
}

/* The convolution of `count` channels from `first` on at row t. */
INLINE void convolve(const DeltaNet *n, const float *wide, const float *window, int64_t start, int64_t t, int64_t first,
                     int64_t count, float *out) {
    const int64_t channels = channels_of(n);
    for (int64_t i = 0; i < count; i += LANES) {
        vf total = {0};
        for (int64_t tap = 0; tap < n->taps; tap++) {
            const float *row = input_row(n, wide, window, start, t + tap - n->taps + 1);
            if (row) total += *(const vf *)(row + first + i) * *(const vf *)(n->kernel + tap * channels + first + i);
        }
        *(vf *)(out + i) = total;
    }
}

INLINE void silu_rows(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) *(vf *)(x + i) *= sigmoids(*(vf *)(x + i));
}

INLINE float dot(const float *a, const float *b, int64_t count) {
    vf total = {0};
    for (int64_t i = 0; i < count; i += LANES) total += *(const vf *)(a + i) * *(const vf *)(b + i);
    return sum(total);
}

/* What x [count] is multiplied with for length 1. */
INLINE float inverse_length(const float *x, int64_t count) { return 1.0f / sqrtf(dot(x, x, count) + 1e-6f); }

/* What a span's rows need of one key head and one of its value heads. */
typedef struct {
    float *queries, *keys;          /* [L, F], of length 1, queries also divided by sqrt(F) */
    float *overlaps;                /* [L]: query . key */
    float *values;                  /* [L, D] */
    float *decays, *betas;          /* [L] */
} Rows;

static void read_keys(const DeltaNet *n, const float *wide, const float *window, int64_t span, int64_t key_head, Rows *to) {
    const int64_t start = n->starts[span], length = n->stops[span] - start, dim = n->key_dim;
    const int64_t query_at = key_head * dim, key_at = (n->key_heads + key_head) * dim;
    const float scale = 1.0f / sqrtf((float)dim);
    for (int64_t t = 0; t < length; t++) {
        float *query = to->queries + t * dim, *key = to->keys + t * dim;
        convolve(n, wide, window, start, t, query_at, dim, query);
        convolve(n, wide, window, start, t, key_at, dim, key);
        silu_rows(query, dim);
        silu_rows(key, dim);
        float query_scale = inverse_length(query, dim) * scale, key_scale = inverse_length(key, dim);
        for (int64_t i = 0; i < dim; i += LANES) {
            *(vf *)(query + i) *= query_scale;
            *(vf *)(key + i) *= key_scale;
        }
        to->overlaps[t] = dot(query, key, dim);
    }
}

static void read_values(const DeltaNet *n, const float *wide, const float *window, int64_t span, int64_t head, Rows *to) {
    const int64_t start = n->starts[span], length = n->stops[span] - start, dim = n->value_dim, width = width_of(n);
    const int64_t value_at = 2 * n->key_heads * n->key_dim + head * dim;
    const int64_t beta_at = width - 2 * n->value_heads + head, decay_at = width - n->value_heads + head;
    for (int64_t t = 0; t < length; t++) {
        const float *row = wide + (start + t) * width;
        convolve(n, wide, window, start, t, value_at, dim, to->values + t * dim);
        silu_rows(to->values + t * dim, dim);
        to->betas[t] = sigmoid_of(row[beta_at]);
        to->decays[t] = expf(-n->rates[head] * softplus_of(row[decay_at] + n->bias[head]));
    }
}

/* The window after a span: the last K - 1 inputs of `count` channels from `first` on. */
static void keep_window(const DeltaNet *n, const float *wide, const float *window, int64_t span, int64_t first,
                        int64_t count, float *to) {
    const int64_t start = n->starts[span], length = n->stops[span] - start, channels = channels_of(n);
    /* In order: row k may come from a later row of the same window. */
    for (int64_t k = 0; k < n->taps - 1; k++) {
        const float *row = input_row(n, wide, window, start, length + k - n->taps + 1);
        if (row) memmove(to + k * channels + first, row + first, count * sizeof(float));
        else memset(to + k * channels + first, 0, count * sizeof(float));
    }
}

/* One row of a block of columns of a state [F, COLUMNS]: the state decays, the known value at the key is replaced by a
   part `beta` of `value`, and the query reads. `decayed` [F, COLUMNS] is the state between, if asked for. */
#define SCAN_ROW(NAME, VECTORS)                                                                                     \
    static __attribute__((noinline)) void NAME(float *state, const float *query, const float *key, float overlap,   \
                                               const float *value, float decay, float beta, int64_t dim,            \
                                               float *written, float *read, float *decayed) {                       \
        vf known[VECTORS], found[VECTORS];                                                                          \
        for (int v = 0; v < VECTORS; v++) known[v] = found[v] = (vf){0};                                            \
        for (int64_t i = 0; i < dim; i++) {                                                                         \
            for (int v = 0; v < VECTORS; v++) {                                                                     \
                vf own = *(vf *)(state + (i * VECTORS + v) * LANES) * decay;                                        \
                *(vf *)(state + (i * VECTORS + v) * LANES) = own;                                                   \
                known[v] += own * key[i];                                                                           \
                found[v] += own * query[i];                                                                         \
            }                                                                                                       \
        }                                                                                                           \
        if (decayed) memcpy(decayed, state, dim * VECTORS * LANES * sizeof(float));                                 \
        for (int v = 0; v < VECTORS; v++) {                                                                         \
            known[v] = (*(const vf *)(value + v * LANES) - known[v]) * beta;                                        \
            *(vf *)(written + v * LANES) = known[v];                                                                \
            *(vf *)(read + v * LANES) = found[v] + known[v] * overlap;                                              \
        }                                                                                                           \
        for (int64_t i = 0; i < dim; i++)                                                                           \
            for (int v = 0; v < VECTORS; v++) *(vf *)(state + (i * VECTORS + v) * LANES) += known[v] * key[i];      \
    }

SCAN_ROW(scan_row_16, NARROW / LANES)
SCAN_ROW(scan_row_32, COLUMNS / LANES)

INLINE void scan_row(int64_t columns, float *state, const float *query, const float *key, float overlap,
                     const float *value, float decay, float beta, int64_t dim, float *written, float *read,
                     float *decayed) {
    if (columns == NARROW)
        scan_row_16(state, query, key, overlap, value, decay, beta, dim, written, read, decayed);
    else
        scan_row_32(state, query, key, overlap, value, decay, beta, dim, written, read, decayed);
}

INLINE void load_block(const float *from, int64_t dim, int64_t value_dim, int64_t column, int64_t columns, float *to) {
    for (int64_t i = 0; i < dim; i++) {
        if (from) memcpy(to + i * columns, from + i * value_dim + column, columns * sizeof(float));
        else memset(to + i * columns, 0, columns * sizeof(float));
    }
}

INLINE void store_block(const float *from, int64_t dim, int64_t value_dim, int64_t column, int64_t columns, float *to) {
    for (int64_t i = 0; i < dim; i++) memcpy(to + i * value_dim + column, from + i * columns, columns * sizeof(float));
}

static int64_t longest_of(const DeltaNet *n, int64_t group) {
    int64_t longest = 0;
    for (int64_t span = n->edges[group]; span < n->edges[group + 1]; span++) {
        int64_t length = n->stops[span] - n->starts[span];
        if (length > longest) longest = length;
    }
    return longest;
}

static int64_t row_floats(const DeltaNet *n, int64_t longest) {
    return longest * (2 * n->key_dim + n->value_dim + 3) + 4 * LANES;
}

static void lay_out(const DeltaNet *n, int64_t longest, float *memory, Rows *rows) {
    rows->queries = memory;
    rows->keys = rows->queries + longest * n->key_dim;
    rows->values = rows->keys + longest * n->key_dim;
    rows->overlaps = rows->values + longest * n->value_dim;
    rows->decays = rows->overlaps + longest;
    rows->betas = rows->decays + longest;
}

INLINE float *slot_of(float *states, int64_t slot, int64_t size) { return slot < 0 ? 0 : states + slot * size; }

/* One key head, and its value heads, over the rows of a span; what they read goes to `out` [T, U], if there is one, and
   the last state to its slot. */
static void run_span(const DeltaNet *n, const float *wide, float *windows, float *heads, float *out, int64_t span,
                     int64_t key_head, Rows *rows, float *block) {
    const int64_t dim = n->key_dim, value_dim = n->value_dim, each = n->value_heads / n->key_heads;
    const int64_t channels = channels_of(n), columns = value_dim % COLUMNS ? NARROW : COLUMNS;
    const int64_t start = n->starts[span], length = n->stops[span] - start;
    const float *window = slot_of(windows, n->loaded[span], (n->taps - 1) * channels);
    float written[COLUMNS], read[COLUMNS];
    read_keys(n, wide, window, span, key_head, rows);
    for (int64_t head = key_head * each; head < (key_head + 1) * each; head++) {
        const int64_t size = n->value_heads * dim * value_dim, at = head * dim * value_dim;
        const float *first = slot_of(heads, n->loaded[span], size);
        float *last = slot_of(heads, n->kept[span], size);
        read_values(n, wide, window, span, head, rows);
        for (int64_t column = 0; column < value_dim; column += columns) {
            load_block(first ? first + at : 0, dim, value_dim, column, columns, block);
            for (int64_t t = 0; t < length; t++) {
                float *to = out ? out + ((start + t) * n->value_heads + head) * value_dim + column : read;
                scan_row(columns, block, rows->queries + t * dim, rows->keys + t * dim, rows->overlaps[t],
                         rows->values + t * value_dim + column, rows->decays[t], rows->betas[t], dim, written, to, 0);
            }
            if (last) store_block(block, dim, value_dim, column, columns, last + at);
        }
    }
    if (n->kept[span] >= 0) {
        float *after = slot_of(windows, n->kept[span], (n->taps - 1) * channels);
        keep_window(n, wide, window, span, key_head * dim, dim, after);
        keep_window(n, wide, window, span, (n->key_heads + key_head) * dim, dim, after);
        keep_window(n, wide, window, span, 2 * n->key_heads * dim + key_head * each * value_dim, each * value_dim, after);
    }
}

/* A part is a group of spans and a key head. */
int delta_forward(const DeltaForward *in, int64_t first, int64_t last) {
    const DeltaNet *n = in->net;
    for (int64_t part = first; part < last; part++) {
        const int64_t group = part / n->key_heads, key_head = part % n->key_heads, longest = longest_of(n, group);
        float *memory = scratch(sizeof(float) * (row_floats(n, longest) + n->key_dim * COLUMNS));
        if (!memory) return 2;
        Rows rows;
        lay_out(n, longest, memory + n->key_dim * COLUMNS, &rows);
        for (int64_t span = n->edges[group]; span < n->edges[group + 1]; span++)
            run_span(n, in->wide, in->windows, in->heads, in->out, span, key_head, &rows, memory);
        free(memory);
    }
    return 0;
}

/* The gradient of `scan_row`, one row back. `state_grad` [F, columns] is that of the state after the row, and then of the
   state before it; `decayed` is the state between. Adds to the gradients of query and key [F]; those of value, overlap,
   beta and the decay's logarithm are returned, the last three summed over the columns. */
#define BACK_ROW(NAME, VECTORS)                                                                                     \
    static __attribute__((noinline)) void NAME(float *state_grad, const float *decayed, const float *query,         \
                                               const float *key, float overlap, const float *read_grad,             \
                                               const float *written, const float *error, float decay, float beta,   \
                                               int64_t dim, float *query_grad, float *key_grad, float *value_grad,  \
                                               float *sums_of_row) {                                                \
        vf step[VECTORS], found[VECTORS], down[VECTORS], total = {0}, shares = {0}, overlaps = {0};                 \
        for (int v = 0; v < VECTORS; v++) {                                                                         \
            step[v] = *(const vf *)(read_grad + v * LANES);                                                         \
            found[v] = step[v] * overlap;                                                                           \
        }                                                                                                           \
        for (int64_t i = 0; i < dim; i++)                                                                           \
            for (int v = 0; v < VECTORS; v++) found[v] += *(const vf *)(state_grad + (i * VECTORS + v) * LANES) * key[i]; \
        for (int v = 0; v < VECTORS; v++) {                                                                         \
            overlaps += step[v] * *(const vf *)(written + v * LANES);                                               \
            shares += found[v] * *(const vf *)(error + v * LANES);                                                  \
            found[v] *= beta;                                                                                       \
            *(vf *)(value_grad + v * LANES) = found[v];                                                             \
            down[v] = *(const vf *)(written + v * LANES);                                                           \
        }                                                                                                           \
        for (int64_t i = 0; i < dim; i += LANES) {                                                                  \
            vf keys[LANES], queries[LANES];                                                                         \
            for (int64_t j = 0; j < LANES; j++) {                                                                   \
                keys[j] = queries[j] = (vf){0};                                                                     \
                for (int v = 0; v < VECTORS; v++) {                                                                 \
                    const int64_t at = ((i + j) * VECTORS + v) * LANES;                                             \
                    vf slope = *(const vf *)(state_grad + at), own = *(const vf *)(decayed + at);                   \
                    keys[j] += slope * down[v] - own * found[v];                                                    \
                    queries[j] += own * step[v];                                                                    \
                    slope += step[v] * query[i + j] - found[v] * key[i + j];                                        \
                    total += slope * own;                                                                           \
                    *(vf *)(state_grad + at) = slope * decay;                                                       \
                }                                                                                                   \
            }                                                                                                       \
            *(vf *)(key_grad + i) += sums(keys);                                                                    \
            *(vf *)(query_grad + i) += sums(queries);                                                               \
        }                                                                                                           \
        sums_of_row[0] = sum(overlaps);                                                                             \
        sums_of_row[1] = sum(shares);                                                                               \
        sums_of_row[2] = sum(total);                                                                                \
    }

BACK_ROW(back_row_16, NARROW / LANES)
BACK_ROW(back_row_32, COLUMNS / LANES)

/* Scratch of a gradient. */
typedef struct {
    Rows rows;
    float *query_grads, *key_grads, *value_grads;        /* [L, F], [L, F], [L, D] */
    float *overlap_grads, *beta_grads, *decay_grads;     /* [L] */
    float *block, *block_grad;                           /* [F, columns] */
    float *decayed;                                      /* [STEPS, F, columns] */
    float *written, *errors;                             /* [STEPS, columns] */
    float *marks;                                        /* [L / STEPS, F, columns] */
    float *mixed;                                        /* [max(F, D)] */
} Scratch;

static void block_gradient(const DeltaBackward *in, int64_t span, int64_t head, int64_t column, int64_t columns, Scratch *s) {
    const DeltaNet *n = in->net;
    const int64_t dim = n->key_dim, value_dim = n->value_dim, size = dim * columns;
    const int64_t start = n->starts[span], length = n->stops[span] - start;
    const int64_t slots = n->value_heads * dim * value_dim, at = head * dim * value_dim;
    const float *first = slot_of(in->heads, n->loaded[span], slots);
    const float *after = slot_of(in->head_grads, n->kept[span], slots);
    float read[COLUMNS], found[3];
    const Rows *r = &s->rows;
    load_block(first ? first + at : 0, dim, value_dim, column, columns, s->block);
    for (int64_t t = 0; t < length; t++) {
        if (t % STEPS == 0) memcpy(s->marks + t / STEPS * size, s->block, size * sizeof(float));
        scan_row(columns, s->block, r->queries + t * dim, r->keys + t * dim, r->overlaps[t],
                 r->values + t * value_dim + column, r->decays[t], r->betas[t], dim, s->written, read, 0);
    }
    load_block(after ? after + at : 0, dim, value_dim, column, columns, s->block_grad);
    for (int64_t from = (length - 1) / STEPS * STEPS; from >= 0; from -= STEPS) {
        const int64_t to = from + STEPS < length ? from + STEPS : length;
        memcpy(s->block, s->marks + from / STEPS * size, size * sizeof(float));
        for (int64_t t = from; t < to; t++) {
            float *written = s->written + (t - from) * columns, *error = s->errors + (t - from) * columns;
            scan_row(columns, s->block, r->queries + t * dim, r->keys + t * dim, r->overlaps[t],
                     r->values + t * value_dim + column, r->decays[t], 1.0f, dim, error, read,
                     s->decayed + (t - from) * size);
            /* with a beta of 1, what is written is the error; the state needs the part of it that is really written */
            for (int64_t c = 0; c < columns; c++) written[c] = error[c] * r->betas[t];
            memcpy(s->block, s->decayed + (t - from) * size, size * sizeof(float));
            for (int64_t i = 0; i < dim; i++)
                for (int64_t c = 0; c < columns; c += LANES)
                    *(vf *)(s->block + i * columns + c) += *(const vf *)(written + c) * r->keys[t * dim + i];
        }
        for (int64_t t = to - 1; t >= from; t--) {
            const float *grad = in->grad + ((start + t) * n->value_heads + head) * value_dim + column;
            (columns == NARROW ? back_row_16 : back_row_32)(
                s->block_grad, s->decayed + (t - from) * size, r->queries + t * dim, r->keys + t * dim, r->overlaps[t],
                grad, s->written + (t - from) * columns, s->errors + (t - from) * columns, r->decays[t], r->betas[t],
                dim, s->query_grads + t * dim, s->key_grads + t * dim, s->value_grads + t * value_dim + column, found);
            s->overlap_grads[t] += found[0];
            s->beta_grads[t] += found[1];
            s->decay_grads[t] += found[2];
        }
    }
    float *before = slot_of(in->head_grads, n->loaded[span], slots);
    for (int64_t i = 0; before && i < dim; i++)
        for (int64_t c = 0; c < columns; c += LANES)
            *(vf *)(before + at + i * value_dim + column + c) += *(const vf *)(s->block_grad + i * columns + c);
}

INLINE void add_scaled(float *to, const float *x, const float *factors, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) *(vf *)(to + i) += *(const vf *)(x + i) * *(const vf *)(factors + i);
}

/* Where the gradient of input row `t` of a span goes; 0: nowhere. */
INLINE float *grad_row(const DeltaBackward *in, int64_t span, int64_t t) {
    const DeltaNet *n = in->net;
    if (t >= 0) return in->out + (n->starts[span] + t) * width_of(n);
    float *window = slot_of(in->window_grads, n->loaded[span], (n->taps - 1) * channels_of(n));
    return window ? window + (n->taps - 1 + t) * channels_of(n) : 0;
}

/* From the gradients of activated rows [L, count] of channels from `first` on to those of their inputs. Rows that were
   divided by their length have a `scale` above 0. */
static void channel_gradient(const DeltaBackward *in, int64_t span, int64_t first, int64_t count, float scale,
                             float *grads, float *mixed) {
    const DeltaNet *n = in->net;
    const int64_t start = n->starts[span], length = n->stops[span] - start, channels = channels_of(n);
    const float *window = slot_of(in->windows, n->loaded[span], (n->taps - 1) * channels);
    for (int64_t t = 0; t < length; t++) {
        float *own = grads + t * count, inverse = 0, along = 0;
        convolve(n, in->wide, window, start, t, first, count, mixed);
        if (scale > 0.0f) {
            vf square = {0}, both = {0};
            for (int64_t i = 0; i < count; i += LANES) {
                vf active = *(vf *)(mixed + i) * sigmoids(*(vf *)(mixed + i));
                square += active * active;
                both += active * *(vf *)(own + i);
            }
            inverse = 1.0f / sqrtf(sum(square) + 1e-6f);
            along = sum(both) * inverse * inverse;
        }
        for (int64_t i = 0; i < count; i += LANES) {
            vf x = *(vf *)(mixed + i), share = sigmoids(x), rest = 1.0f - share, slope = *(vf *)(own + i);
            if (scale > 0.0f) slope = (slope - x * share * along) * (inverse * scale);
            *(vf *)(own + i) = slope * share * (1.0f + x * rest);
        }
    }
    for (int64_t t = 0; t < length; t++)
        for (int64_t tap = 0; tap < n->taps; tap++) {
            float *to = grad_row(in, span, t + tap - n->taps + 1);
            if (to) add_scaled(to + first, grads + t * count, n->kernel + tap * channels + first, count);
        }
    const float *after = slot_of(in->window_grads, n->kept[span], (n->taps - 1) * channels);
    for (int64_t k = 0; after && k < n->taps - 1; k++) {
        float *to = grad_row(in, span, length + k - n->taps + 1);
        for (int64_t i = 0; to && i < count; i += LANES)
            *(vf *)(to + first + i) += *(const vf *)(after + k * channels + first + i);
    }
}

static void span_gradient(const DeltaBackward *in, int64_t span, int64_t key_head, Scratch *s) {
    const DeltaNet *n = in->net;
    const int64_t dim = n->key_dim, value_dim = n->value_dim, each = n->value_heads / n->key_heads, width = width_of(n);
    const int64_t columns = value_dim % COLUMNS ? NARROW : COLUMNS;
    const int64_t start = n->starts[span], length = n->stops[span] - start;
    const float *window = slot_of(in->windows, n->loaded[span], (n->taps - 1) * channels_of(n));
    const Rows *r = &s->rows;
    read_keys(n, in->wide, window, span, key_head, &s->rows);
    memset(s->query_grads, 0, length * dim * sizeof(float));
    memset(s->key_grads, 0, length * dim * sizeof(float));
    memset(s->overlap_grads, 0, length * sizeof(float));
    for (int64_t head = key_head * each; head < (key_head + 1) * each; head++) {
        read_values(n, in->wide, window, span, head, &s->rows);
        memset(s->beta_grads, 0, length * sizeof(float));
        memset(s->decay_grads, 0, length * sizeof(float));
        for (int64_t column = 0; column < value_dim; column += columns)
            block_gradient(in, span, head, column, columns, s);
        for (int64_t t = 0; t < length; t++) {
            float *to = in->out + (start + t) * width + width - 2 * n->value_heads;
            float raw = in->wide[(start + t) * width + width - n->value_heads + head] + n->bias[head];
            to[head] = s->beta_grads[t] * r->betas[t] * (1.0f - r->betas[t]);
            to[n->value_heads + head] = -s->decay_grads[t] * n->rates[head] * sigmoid_of(raw);
        }
        channel_gradient(in, span, 2 * n->key_heads * dim + head * value_dim, value_dim, 0.0f, s->value_grads, s->mixed);
    }
    for (int64_t t = 0; t < length; t++)
        for (int64_t i = 0; i < dim; i += LANES) {
            const int64_t at = t * dim + i;
            *(vf *)(s->query_grads + at) += *(const vf *)(r->keys + at) * s->overlap_grads[t];
            *(vf *)(s->key_grads + at) += *(const vf *)(r->queries + at) * s->overlap_grads[t];
        }
    channel_gradient(in, span, key_head * dim, dim, 1.0f / sqrtf((float)dim), s->query_grads, s->mixed);
    channel_gradient(in, span, (n->key_heads + key_head) * dim, dim, 1.0f, s->key_grads, s->mixed);
}

/* A part is a group of spans and a key head. */
int delta_backward(const DeltaBackward *in, int64_t first, int64_t last) {
    const DeltaNet *n = in->net;
    const int64_t dim = n->key_dim, value_dim = n->value_dim, size = dim * COLUMNS;
    const int64_t wider = dim > value_dim ? dim : value_dim;
    for (int64_t part = first; part < last; part++) {
        const int64_t group = part / n->key_heads, key_head = part % n->key_heads, longest = longest_of(n, group);
        const int64_t own = 2 * size + STEPS * size + 2 * STEPS * COLUMNS + (longest / STEPS + 1) * size + wider +
                            longest * (2 * dim + value_dim + 3) + row_floats(n, longest);
        float *memory = scratch(sizeof(float) * own);
        if (!memory) return 2;
        Scratch s;
        float *at = memory;
        s.block = at, at += size;
        s.block_grad = at, at += size;
        s.decayed = at, at += STEPS * size;
        s.written = at, at += STEPS * COLUMNS;
        s.errors = at, at += STEPS * COLUMNS;
        s.marks = at, at += (longest / STEPS + 1) * size;
        s.mixed = at, at += wider;
        s.query_grads = at, at += longest * dim;
        s.key_grads = at, at += longest * dim;
        s.value_grads = at, at += longest * value_dim;
        s.overlap_grads = at, at += longest;
        s.beta_grads = at, at += longest;
        s.decay_grads = at, at += longest;
        lay_out(n, longest, at, &s.rows);
        for (int64_t span = n->edges[group]; span < n->edges[group + 1]; span++)
            if (n->kept[span] >= 0)
                run_span(n, in->wide, in->windows, in->heads, 0, span, key_head, &s.rows, s.block);
        for (int64_t span = n->edges[group + 1] - 1; span >= n->edges[group]; span--) span_gradient(in, span, key_head, &s);
        free(memory);
    }
    return 0;
}

typedef struct {
    const float *read, *wide, *weight; /* [T, U], [T, W], [D] */
    double eps;
    int64_t heads, dim, width, gate_at; /* the gates begin at `gate_at` of each row [W] */
    float *out;                         /* [T, U] */
} GatedNorm;

INLINE float inverse_rms(const float *x, int64_t width, float eps) { return 1.0f / sqrtf(dot(x, x, width) / width + eps); }

/* out = read / rms(read) * weight * silu(gate), each head alone. */
int gated_norm(const GatedNorm *in, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < in->heads; h++) {
            const float *own = in->read + (t * in->heads + h) * in->dim;
            const float *gate = in->wide + t * in->width + in->gate_at + h * in->dim;
            float *out = in->out + (t * in->heads + h) * in->dim, scale = inverse_rms(own, in->dim, in->eps);
            for (int64_t i = 0; i < in->dim; i += LANES) {
                vf x = *(const vf *)(gate + i);
                *(vf *)(out + i) = *(const vf *)(own + i) * scale * *(const vf *)(in->weight + i) * (x * sigmoids(x));
            }
        }
    return 0;
}

typedef struct {
    const float *grad, *read, *wide, *weight; /* [T, U], [T, U], [T, W], [D] */
    double eps;
    int64_t heads, dim, width, gate_at;
    float *read_grad, *wide_grad; /* [T, U], [T, W]: of the latter only the gates are written */
} GatedNormBackward;

int gated_norm_backward(const GatedNormBackward *in, int64_t first, int64_t last) {
    const int64_t dim = in->dim;
    for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < in->heads; h++) {
            const int64_t at = (t * in->heads + h) * dim, gates = t * in->width + in->gate_at + h * dim;
            const float *own = in->read + at, *gate = in->wide + gates, *grad = in->grad + at;
            float *to = in->read_grad + at, scale = inverse_rms(own, dim, in->eps);
            vf total = {0};
            for (int64_t i = 0; i < dim; i += LANES) {
                vf x = *(const vf *)(gate + i), share = sigmoids(x), normed = *(const vf *)(own + i) * scale;
                vf slope = *(const vf *)(grad + i) * *(const vf *)(in->weight + i);
                *(vf *)(in->wide_grad + gates + i) = slope * normed * share * (1.0f + x * (1.0f - share));
                slope *= x * share;
                total += slope * *(const vf *)(own + i);
                *(vf *)(to + i) = slope;
            }
            float pull = sum(total) / dim * scale * scale * scale;
            for (int64_t i = 0; i < dim; i += LANES)
                *(vf *)(to + i) = *(vf *)(to + i) * scale - *(const vf *)(own + i) * pull;
        }
    return 0;
}
