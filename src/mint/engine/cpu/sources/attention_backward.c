/* Attention's backward on a CPU. The scores are computed again, for several queries at once, over keys turned so that 16
   of them lie side by side.

   Sums are in float32, in the order of rows and keys; heads and their gradients are float32 or bfloat16.

   Letters: T rows of heads, H heads of a row, K kv heads, G query heads per kv head, D head dimension. */

#include "lanes.h"

#define QUERIES 8
#define COLUMNS (2 * LANES) /* head dimensions are multiples of this */

/* Rows of heads lie too far apart for the processor to fetch them ahead by itself. */
#define AHEAD 16 /* rows */
#define LINE 64

static void fetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char *)from + i);
}

/* The keys and values of one kv head that some rows share, in float32: as they are [width, D], and turned, 16 of them
   side by side [width / 16, D, 16]; and what their gradients have become. */
typedef struct {
    int64_t dim, width;
    float *keys, *turned_keys, *turned_values, *key_grads, *value_grads;
} Span;

/* Of one block of queries: the queries times 1 / sqrt(D), the gradients of what they attended, and the gradients for the
   queries [8, D]; shares and slopes [8, width]. */
typedef struct {
    float *queries, *grads, *found, *shares, *slopes;
} Block;

/* out[p][j] = rows[p] . key j, for keys turned, up to `count` (a multiple of 16). */
static void times_turned(const float *rows, int64_t dim, const float *turned, int64_t count, float *out, int64_t width) {
    for (int64_t j = 0; j < count; j += LANES) {
        const float *panel = turned + j * dim;
        vf total[QUERIES];
#pragma GCC unroll 8
        for (int p = 0; p < QUERIES; p++) total[p] = (vf){0};
        for (int64_t d = 0; d < dim; d++) {
            vf x = *(const vf *)(panel + d * LANES);
#pragma GCC unroll 8
            for (int p = 0; p < QUERIES; p++) total[p] += rows[p * dim + d] * x;
        }
#pragma GCC unroll 8
        for (int p = 0; p < QUERIES; p++) *(vf *)(out + p * width + j) = total[p];
    }
}

/* out[p] = sum over keys j of factors[p][j] * keys[j]. */
static void mix_keys(const float *factors, int64_t width, const float *keys, int64_t count, int64_t dim, float *out) {
    for (int64_t d = 0; d < dim; d += COLUMNS) {
        vf first[QUERIES], second[QUERIES];
#pragma GCC unroll 8
        for (int p = 0; p < QUERIES; p++) first[p] = second[p] = (vf){0};
        for (int64_t j = 0; j < count; j++) {
            vf a = *(const vf *)(keys + j * dim + d), b = *(const vf *)(keys + j * dim + d + LANES);
#pragma GCC unroll 8
            for (int p = 0; p < QUERIES; p++) {
                float factor = factors[p * width + j];
                first[p] += factor * a;
                second[p] += factor * b;
            }
        }
#pragma GCC unroll 8
        for (int p = 0; p < QUERIES; p++) {
            *(vf *)(out + p * dim + d) = first[p];
            *(vf *)(out + p * dim + d + LANES) = second[p];
        }
    }
}

/* sums[j] += sum over p of factors[p][j] * rows[p]. */
static void add_outer(const float *factors, int64_t width, const float *rows, int64_t count, int64_t dim, float *sums) {
    for (int64_t d = 0; d < dim; d += COLUMNS) {
        vf first[QUERIES], second[QUERIES];
#pragma GCC unroll 8
        for (int p = 0; p < QUERIES; p++) {
            first[p] = *(const vf *)(rows + p * dim + d);
            second[p] = *(const vf *)(rows + p * dim + d + LANES);
        }
        for (int64_t j = 0; j < count; j++) {
            vf a = *(vf *)(sums + j * dim + d), b = *(vf *)(sums + j * dim + d + LANES);
#pragma GCC unroll 8
            for (int p = 0; p < QUERIES; p++) {
                float factor = factors[p * width + j];
                a += factor * first[p];
                b += factor * second[p];
            }
            *(vf *)(sums + j * dim + d) = a;
            *(vf *)(sums + j * dim + d + LANES) = b;
        }
    }
}

/* Of up to LANES queries: from scores to shares, and from d / d share to d / d score; zeros from `low` to their own `firsts`,
   and from their own `keys` to `padded`. */
static void softmax_backward(float *const *shares, float *const *slopes, const int64_t *firsts, const int64_t *keys,
                             const float *sinks, int64_t count, int64_t low, int64_t padded) {
    vf total[LANES] = {{0}}, inverse = exponentials(shares, firsts, keys, count, 1.0f, sinks);
    for (int64_t p = 0; p < count; p++) {
        int64_t start = whole_lanes(firsts[p]), last = whole_lanes(keys[p] - 1);
        *(vf *)(slopes[p] + last) = first_lanes(*(vf *)(slopes[p] + last), keys[p] - last, 0);
        for (int64_t j = low; j < start; j += LANES) *(vf *)(shares[p] + j) = *(vf *)(slopes[p] + j) = (vf){0};
        for (int64_t j = start; j <= last; j += LANES) {
            *(vf *)(shares[p] + j) *= inverse[p];
            total[p] += *(vf *)(shares[p] + j) * *(vf *)(slopes[p] + j);
        }
        for (int64_t j = last + LANES; j < padded; j += LANES) *(vf *)(shares[p] + j) = *(vf *)(slopes[p] + j) = (vf){0};
    }
    vf mean = sums(total);
    for (int64_t p = 0; p < count; p++)
        for (int64_t j = whole_lanes(firsts[p]); j < keys[p]; j += LANES)
            *(vf *)(slopes[p] + j) = *(vf *)(shares[p] + j) * (*(vf *)(slopes[p] + j) - mean[p]);
}

static int64_t keys_of(const Packed *p, int64_t r) { return p->prefix_count[r] + p->row[r] - p->own[r] + 1; }

/* Which row of heads key j of row r is. */
static int64_t row_of_key(const Packed *p, int64_t r, int64_t j) {
    return j < p->prefix_count[r] ? p->prefix[r] + j : p->own[r] + j - p->prefix_count[r];
}

/* Rows [count, D] 16 side by side: [count / 16, D, 16]. */
static void turn(const float *rows, int64_t count, int64_t dim, float *turned) {
    for (int64_t j = 0; j < count; j += LANES) {
        const char *own[LANES];
        for (int64_t i = 0; i < LANES; i++) own[i] = (const char *)(rows + (j + i) * dim);
        for (int64_t d = 0; d < dim; d += LANES) turn_words(own, d * sizeof(float), turned + j * dim + d * LANES);
    }
}

static void read_span(const Packed *p, int64_t last, int64_t k, const char *heads, int half, Span *span) {
    const int64_t dim = span->dim, count = keys_of(p, last), bytes = half ? 2 : 4;
    float *values = span->value_grads; /* a place for a moment */
    span->width = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = 0; j < span->width; j++) {
        int64_t at = (row_of_key(p, last, j < count ? j : count - 1) * p->total_heads + p->query_heads + k) * dim;
        if (j + AHEAD < count) {
            const char *next = heads + (row_of_key(p, last, j + AHEAD) * p->total_heads + p->query_heads + k) * dim * bytes;
            fetch(next, dim * bytes);
            fetch(next + p->kv_heads * dim * bytes, dim * bytes);
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            *(vf *)(span->keys + j * dim + d) = load(heads, at + d, half);
            *(vf *)(values + j * dim + d) = load(heads, at + p->kv_heads * dim + d, half);
        }
    }
    turn(span->keys, span->width, dim, span->turned_keys);
    turn(values, span->width, dim, span->turned_values);
    memset(span->key_grads, 0, sizeof(float) * span->width * dim);
    memset(span->value_grads, 0, sizeof(float) * span->width * dim);
}

/* Adds to `sums` [T, 2, D], those of keys and values of one kv head. */
static void add_span(const Packed *p, int64_t last, const Span *span, float *sums) {
    int64_t dim = span->dim, count = keys_of(p, last);
    for (int64_t j = 0; j < count; j++) {
        float *to = sums + 2 * row_of_key(p, last, j) * dim;
        if (j + AHEAD < count) fetch(sums + 2 * row_of_key(p, last, j + AHEAD) * dim, 2 * dim * sizeof(float));
        for (int64_t d = 0; d < dim; d += LANES) {
            *(vf *)(to + d) += *(vf *)(span->key_grads + j * dim + d);
            *(vf *)(to + dim + d) += *(vf *)(span->value_grads + j * dim + d);
        }
    }
}

/* `sums` [T, 2, D] of kv head k as gradients of its keys and values. */
static void store_sums(const Packed *p, const float *sums, int64_t count, int64_t dim, int64_t k, int half, char *grads) {
    for (int64_t t = 0; t < count; t++, sums += 2 * dim) {
        int64_t at = (t * p->total_heads + p->query_heads + k) * dim;
        for (int64_t d = 0; d < dim; d += LANES) {
            store(grads, at + d, *(const vf *)(sums + d), half);
            store(grads, at + p->kv_heads * dim + d, *(const vf *)(sums + dim + d), half);
        }
    }
}

/* `count` rows from r on and `heads_taken` query heads from `head` on, at most 8 queries; the rest are zeros. */
static void run_block(const Packed *p, int64_t r, int64_t count, int64_t head, int64_t heads_taken, const char *heads,
                      const char *grad_out, int half, int64_t window, const float *sinks, Span *span, Block *block,
                      char *grads) {
    int64_t dim = span->dim, width = span->width, used = count * heads_taken;
    int64_t low = whole_lanes(first_seen(keys_of(p, r), window));
    int64_t padded = whole_lanes(keys_of(p, r + count - 1) + LANES - 1), seen = padded - low;
    const float scale = 1.0f / sqrtf((float)dim);
    for (int64_t i = 0; i < used; i++) {
        int64_t row = r + i / heads_taken, own = head + i % heads_taken;
        for (int64_t d = 0; d < dim; d += LANES) {
            vf query = load(heads, (p->row[row] * p->total_heads + own) * dim + d, half);
            *(vf *)(block->queries + i * dim + d) = query * scale;
            *(vf *)(block->grads + i * dim + d) = load(grad_out, (row * p->query_heads + own) * dim + d, half);
        }
    }
    for (int64_t row = r + count; row < p->rows && row < r + 2 * count; row++) { /* for the next block */
        const int64_t bytes = half ? 2 : 4;
        fetch(heads + (p->row[row] * p->total_heads + head) * dim * bytes, heads_taken * dim * bytes);
        fetch(grad_out + (row * p->query_heads + head) * dim * bytes, heads_taken * dim * bytes);
        fetch(grads + (p->row[row] * p->total_heads + head) * dim * bytes, heads_taken * dim * bytes);
    }
    memset(block->queries + used * dim, 0, sizeof(float) * (QUERIES - used) * dim);
    memset(block->grads + used * dim, 0, sizeof(float) * (QUERIES - used) * dim);
    times_turned(block->queries, dim, span->turned_keys + low * dim, seen, block->shares + low, width);
    times_turned(block->grads, dim, span->turned_values + low * dim, seen, block->slopes + low, width);
    float *shares[QUERIES], *slopes[QUERIES], own_sinks[2 * QUERIES] = {0};
    int64_t firsts[QUERIES], keys[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        shares[i] = block->shares + i * width;
        slopes[i] = block->slopes + i * width;
        if (i < used) keys[i] = keys_of(p, r + i / heads_taken), firsts[i] = first_seen(keys[i], window);
        if (i < used && sinks) own_sinks[i] = sinks[head + i % heads_taken];
        if (i >= used) memset(shares[i], 0, sizeof(float) * padded), memset(slopes[i], 0, sizeof(float) * padded);
    }
    for (int64_t i = 0; i < used; i += LANES)
        softmax_backward(shares + i, slopes + i, firsts + i, keys + i, sinks ? own_sinks + i : 0,
                         used - i < LANES ? used - i : LANES, low, padded);
    mix_keys(block->slopes + low, width, span->keys + low * dim, seen, dim, block->found);
    add_outer(block->slopes + low, width, block->queries, seen, dim, span->key_grads + low * dim);
    add_outer(block->shares + low, width, block->grads, seen, dim, span->value_grads + low * dim);
    for (int64_t i = 0; i < used; i++) {
        int64_t row = r + i / heads_taken, own = head + i % heads_taken;
        for (int64_t d = 0; d < dim; d += LANES)
            store(grads, (p->row[row] * p->total_heads + own) * dim + d, *(vf *)(block->found + i * dim + d) * scale, half);
    }
}

typedef struct {
    const Packed *rows;
    int64_t count, dim, half, window; /* T; 0: none */
    const float *sinks;               /* [K*G], or none */
    const char *heads, *grad_out;
    char *grads;
} AttendPackedBackward;

/* Grads [T, H, D] from grad_out [rows, K*G*D], for some kv heads and their queries; queries without a result stay as they
   are. */
int attend_packed_backward(const AttendPackedBackward *in, int64_t first, int64_t last) {
    const Packed *p = in->rows;
    int64_t dim = in->dim, half = in->half;
    const char *heads = in->heads, *grad_out = in->grad_out;
    char *grads = in->grads;
    if (dim % COLUMNS) return 1;
    int64_t groups = p->query_heads / p->kv_heads, width = (p->longest + LANES) / LANES * LANES;
    int64_t together = groups < QUERIES ? groups : QUERIES, rows = QUERIES / together;
    const int64_t sums_size = 2 * in->count * dim;
    float *memory = malloc(sizeof(float) * (sums_size + 5 * width * dim + 3 * QUERIES * dim + 2 * QUERIES * width));
    if (!memory) return 2;
    float *sums = memory, *next = memory + sums_size;
    Span span = {.dim = dim};
    Block block;
    float **parts[] = {&span.keys, &span.turned_keys, &span.turned_values, &span.key_grads, &span.value_grads};
    for (int i = 0; i < 5; i++, next += width * dim) *parts[i] = next;
    float **small[] = {&block.queries, &block.grads, &block.found};
    for (int i = 0; i < 3; i++, next += QUERIES * dim) *small[i] = next;
    block.shares = next;
    block.slopes = next + QUERIES * width;
    for (int64_t k = first; k < last; k++) {
        memset(sums, 0, sizeof(float) * sums_size);
        for (int64_t r = 0, end; r < p->rows; r = end) {
            end = end_of_span(p, r, p->rows);
            read_span(p, end - 1, k, heads, half, &span);
            for (int64_t own = r; own < end; own += rows)
                for (int64_t g = 0; g < groups; g += together)
                    run_block(p, own, own + rows < end ? rows : end - own, k * groups + g,
                              g + together < groups ? together : groups - g, heads, grad_out, half, in->window, in->sinks,
                              &span, &block, grads);
            add_span(p, end - 1, &span, sums);
        }
        store_sums(p, sums, in->count, dim, k, half, grads);
    }
    free(memory);
    return 0;
}
