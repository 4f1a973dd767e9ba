/* Rows that only move: into a batch from a table, into pages of keys and values, from one type to another.

   Letters: T rows, D head dimension. */

#include "lanes.h"

typedef struct {
    const char *table;
    const int64_t *rows;
    int64_t height, width, half;
    double scale;
    float *out;
} TakeRows;

/* out [T, width] = scale times rows of `table` [height, width], of which the elements may be half as wide. */
int take_rows(const TakeRows *in, int64_t first, int64_t last) {
    const float scale = in->scale;
    for (int64_t t = first; t < last; t++) {
        if (in->rows[t] < 0 || in->rows[t] >= in->height) return 3;
        for (int64_t i = 0; i < in->width; i += LANES)
            *(vf *)(in->out + t * in->width + i) = scale * load(in->table, in->rows[t] * in->width + i, in->half);
    }
    return 0;
}

typedef struct {
    const float *x;
    const int64_t *order;
    int64_t height, width;
    float *out;
} TakeColumns;

/* out [T, width] = the columns `order` of x [T, height]. */
int take_columns(const TakeColumns *in, int64_t first, int64_t last) {
    for (int64_t i = 0; i < in->width; i++)
        if (in->order[i] < 0 || in->order[i] >= in->height) return 3;
    for (int64_t t = first; t < last; t++) {
        const float *x = in->x + t * in->height;
        float *out = in->out + t * in->width;
        for (int64_t i = 0; i < in->width; i++) out[i] = x[in->order[i]];
    }
    return 0;
}

typedef struct {
    const char *x;
    int64_t width;
    float *out;
} Widen;

/* out [T, width] in float32 = x in bfloat16. */
int widen_rows(const Widen *in, int64_t first, int64_t last) {
    for (int64_t i = first * in->width; i < last * in->width; i += LANES) *(vf *)(in->out + i) = load(in->x, i, 1);
    return 0;
}

typedef struct {
    const char *x;
    int64_t bytes;
    char *out;
} CopyRows;

/* out = x, rows of so many bytes. */
int copy_rows(const CopyRows *in, int64_t first, int64_t last) {
    memcpy(in->out + first * in->bytes, in->x + first * in->bytes, (last - first) * in->bytes);
    return 0;
}

typedef struct {
    const int64_t *table, *positions; /* [T, columns], [T] */
    int64_t columns, chunk, query_heads, kv_heads, side, bytes;
    const char *heads; /* [T, query_heads + 2 kv_heads] of `bytes` each */
    char *keys, *values;
} WritePages;

/* Stores the key and value heads of each row at its position in its pages, `side` heads side by side. */
int write_pages(const WritePages *in, int64_t first, int64_t last) {
    const int64_t part = in->side * in->bytes, parts = in->kv_heads / in->side;
    for (int64_t t = first; t < last; t++) {
        int64_t at = in->positions[t], page = in->table[t * in->columns + at / in->chunk];
        const char *own = in->heads + (t * (in->query_heads + 2 * in->kv_heads) + in->query_heads) * in->bytes;
        for (int64_t p = 0; p < parts; p++) {
            int64_t to = ((page * parts + p) * in->chunk + at % in->chunk) * part;
            memcpy(in->keys + to, own + p * part, part);
            memcpy(in->values + to, own + (parts + p) * part, part);
        }
    }
    return 0;
}
