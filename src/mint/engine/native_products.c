/* Products of rows with the frozen matrices of a base model and with loras, on a CPU. Knows nothing of layers.

   A result is one sum over the inputs in order, whatever the number of rows, the tile that they are computed in, or the
   thread: bits of a row are a function of that row alone. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#include <immintrin.h>

/* to[j * to_stride + i] = from[i * from_stride + j] for 16 x 16 pairs. */
INLINE void transpose(const int32_t *from, int64_t from_stride, int32_t *to, int64_t to_stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            a[i + 2 * half] = _mm512_unpacklo_epi64(b[i + half], b[i + 2 + half]);
            a[i + 2 * half + 1] = _mm512_unpackhi_epi64(b[i + half], b[i + 2 + half]);
        }
    /* a[4 * q + c] holds, in its quarter k, column 4 * k + c of rows 4 * q to 4 * q + 3 */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(even, even2, 0x88));
        _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(even, even2, 0xdd));
        _mm512_storeu_si512(to + (4 + c) * to_stride, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        _mm512_storeu_si512(to + (12 + c) * to_stride, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
}

#define CHUNK 64     /* rows of a lora that are computed together */
#define SEGMENT 512  /* and outputs, so that each row's lie side by side */

/* What 16 vectors sum up to, one result for each. */
INLINE __m512 sums(const __m512 *found) {
    float columns[LANES * LANES];
    transpose((const int32_t *)found, LANES, (int32_t *)columns, LANES);
    __m512 total = _mm512_loadu_ps(columns);
#pragma GCC unroll 16
    for (int i = 1; i < LANES; i++) total = _mm512_add_ps(total, _mm512_loadu_ps(columns + i * LANES));
    return total;
}

/* down [rows, ranks] = x [rows, I] times `wide` rows of a [ranks, I] from `j` on; those past the last are the last again. */
INLINE void squeeze(const int rows, const int wide, const float *x, const float *a, int64_t j, int64_t ranks,
                    int64_t inputs, float *down) {
    __m512 found[LANES];
    const float *own[LANES];
    float result[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < wide; k++) own[k] = a + (j + k < ranks ? j + k : ranks - 1) * inputs;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) found[i] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += LANES) {
        __m512 part[4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            part[r] = _mm512_loadu_ps(x + r * inputs + i);
            __asm__("" : "+v"(part[r])); /* in a register, not loaded again for every product */
        }
#pragma GCC unroll 16
        for (int k = 0; k < wide; k++) {
            __m512 weight = _mm512_loadu_ps(own[k] + i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) found[r * wide + k] = _mm512_fmadd_ps(part[r], weight, found[r * wide + k]);
        }
    }
    _mm512_storeu_ps(result, sums(found));
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide && j + k < ranks; k++) down[r * ranks + j + k] = result[r * wide + k];
}

/* out [rows, 16 * wide outputs] += down [rows, rank] times columns [wide, rank, 16]. */
INLINE void widen(const int rows, const int wide, const float *down, int64_t ranks, const float *columns, int64_t rank,
                  float *out, int64_t outputs) {
    __m512 total[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) total[r][k] = _mm512_setzero_ps();
    for (int64_t j = 0; j < rank; j++) {
        __m512 weight[2];
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) weight[k] = _mm512_loadu_ps(columns + (k * rank + j) * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512 own = _mm512_set1_ps(down[r * ranks + j]);
#pragma GCC unroll 2
            for (int k = 0; k < wide; k++) total[r][k] = _mm512_fmadd_ps(own, weight[k], total[r][k]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int k = 0; k < wide; k++) {
            float *to = out + r * outputs + k * LANES;
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), total[r][k]));
        }
}

/* The same for `count` outputs. */
INLINE void widen_rows(const int rows, const float *down, int64_t ranks, const float *columns, int64_t rank, float *out,
                       int64_t outputs, int64_t count) {
    int64_t o = 0;
    for (; o + 2 * LANES <= count; o += 2 * LANES)
        widen(rows, 2, down, ranks, columns + o * rank, rank, out + o, outputs);
    if (o < count) widen(rows, 1, down, ranks, columns + o * rank, rank, out + o, outputs);
}

/* From b [16, rank] to columns [rank, 16]. */
INLINE void turn(const float *b, int64_t rank, float *columns) {
    int64_t j = 0;
    for (; j + LANES <= rank; j += LANES)
        transpose((const int32_t *)b + j, rank, (int32_t *)columns + j * LANES, LANES);
    for (; j < rank; j++)
        for (int i = 0; i < LANES; i++) columns[j * LANES + i] = b[i * rank + j];
}

typedef struct {
    const float *x, *a, *const *bs;
    const int64_t *widths;
    int64_t parts, rank, inputs, outputs;
    double scale;
    float *out;
} AddLora;

/* out [T, O] += scale * x [T, I] times a [parts * rank, I] times the parts' b [their outputs, rank] side by side, for rows
   `first` to `last`. */
int add_lora(const AddLora *in, int64_t first, int64_t last) {
    const float *x = in->x, *a = in->a;
    const float *const *bs = in->bs;
    const int64_t *widths = in->widths;
    int64_t parts = in->parts, rank = in->rank, inputs = in->inputs, outputs = in->outputs;
    double scale = in->scale;
    float *out = in->out;
    int64_t ranks = parts * rank;
    float *down = malloc(sizeof(float) * ranks * CHUNK), *columns = malloc(sizeof(float) * rank * SEGMENT);
    if (!down || !columns) {
        free(down);
        free(columns);
        return 2;
    }
    for (int64_t start = first; start < last; start += CHUNK) {
        int64_t count = last - start < CHUNK ? last - start : CHUNK, r = 0, at = start * outputs;
        for (; r + 4 <= count; r += 4)
            for (int64_t j = 0; j < ranks; j += 4)
                squeeze(4, 4, x + (start + r) * inputs, a, j, ranks, inputs, down + r * ranks);
        for (; r < count; r++)
            for (int64_t j = 0; j < ranks; j += LANES)
                squeeze(1, LANES, x + (start + r) * inputs, a, j, ranks, inputs, down + r * ranks);
        for (int64_t i = 0; i < count * ranks; i++) down[i] *= (float)scale;
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
    free(down);
    free(columns);
    return 0;
}
#else
int add_lora(const void *arguments, int64_t first, int64_t last) { return 1; }
#endif

/* bfloat16 matrices with float32 results, where the processor multiplies bfloat16. A matrix [O, I] lies in panels of 16
   outputs, [O / 16, I / 2, 16, 2], rows in groups, [I / 2, group, 2]; what is multiplied at once is a pair of inputs. */
#ifdef __AVX512BF16__
#define GROUP 8        /* rows of a tile; smaller groups of 4, 2, 1 are left over */
#define WIDE 4         /* panels of a tile of few rows, 2 of many: more would not fit into the registers */
#define LINE 64
#define CACHED 400000  /* bytes of rows that stay in the second cache while the panels pass by */

typedef struct {
    const int32_t *weight;
    int64_t inputs;
    int32_t *packed;
} PackHalves;

/* Panels `first` to `last` of weight [O, I]. */
int pack_halves(const PackHalves *in, int64_t first, int64_t last) {
    const int32_t *weight = in->weight;
    int64_t inputs = in->inputs;
    int32_t *packed = in->packed;
    int64_t pairs = inputs / 2;
    for (int64_t at = first * LANES * pairs; at < last * LANES * pairs; at += LANES * pairs)
        for (int64_t i = 0; i < pairs; i += LANES) transpose(weight + at + i, pairs, packed + at + i * LANES, LANES);
    return 0;
}

typedef struct {
    const int32_t *packed;
    int64_t inputs;
    int32_t *weight;
} UnpackHalves;

/* The way back. */
int unpack_halves(const UnpackHalves *in, int64_t first, int64_t last) {
    const int32_t *packed = in->packed;
    int64_t inputs = in->inputs;
    int32_t *weight = in->weight;
    int64_t pairs = inputs / 2;
    for (int64_t at = first * LANES * pairs; at < last * LANES * pairs; at += LANES * pairs)
        for (int64_t i = 0; i < pairs; i += LANES) transpose(packed + at + i * LANES, LANES, weight + at + i, pairs);
    return 0;
}

INLINE int largest_group(int64_t rows) { return rows >= GROUP ? GROUP : rows >= 4 ? 4 : rows >= 2 ? 2 : 1; }

static void pack_rows(const int rows, const float *x, int64_t inputs, int32_t *to) {
    for (int64_t i = 0; i < inputs; i += 2 * LANES)
        for (int r = 0; r < rows; r++) {
            const float *from = x + r * inputs + i;
            int32_t pairs[LANES];
            _mm512_storeu_si512(
                pairs, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + LANES), _mm512_loadu_ps(from)));
            for (int k = 0; k < LANES; k++) to[(i / 2 + k) * rows + r] = pairs[k];
        }
}

typedef struct {
    int64_t inputs, outputs;
    const float *residual; /* [rows, O], or missing */
    float *out;            /* [rows, O] */
} Target;

/* Every `step` bytes from `ahead` on will be wanted next. */
INLINE void tile(const int rows, const int panels, const int32_t *x, const int32_t *panel, const Target *target,
                 int64_t at, const char *ahead, int64_t step) {
    const int64_t pairs = target->inputs / 2;
    __m512 total[GROUP][WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) total[r][p] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++) {
        __m512bh w[WIDE];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) w[p] = (__m512bh)_mm512_loadu_si512(panel + (p * pairs + i) * LANES);
        _mm_prefetch(ahead + i * step, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512bh own = (__m512bh)_mm512_set1_epi32(x[i * rows + r]);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) total[r][p] = _mm512_dpbf16_ps(total[r][p], own, w[p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            int64_t place = at + r * target->outputs + p * LANES;
            if (target->residual) total[r][p] = _mm512_add_ps(total[r][p], _mm512_loadu_ps(target->residual + place));
            _mm512_storeu_ps(target->out + place, total[r][p]);
        }
}

typedef void Tile(const int32_t *x, const int32_t *panel, const Target *target, int64_t at, const char *ahead, int64_t step);
#define TILE(R, P) \
    __attribute__((noinline)) static void tile_##R##_##P(const int32_t *x, const int32_t *panel, const Target *target, \
                                                         int64_t at, const char *ahead, int64_t step) { \
        tile(R, P, x, panel, target, at, ahead, step); \
    }
#define TILES(P) TILE(1, P) TILE(2, P) TILE(4, P)
TILES(1) TILES(2) TILES(4) TILE(8, 1) TILE(8, 2)

static Tile *find_tile(int rows, int panels) {
#define FOUND(R) if (rows == R) return panels == 1 ? tile_##R##_1 : panels == 2 ? tile_##R##_2 : tile_##R##_4;
    FOUND(1) FOUND(2) FOUND(4)
    return panels == 1 ? tile_8_1 : tile_8_2;
}

typedef struct {
    const float *x;
    const int32_t *packed;
    int64_t rows, inputs, outputs;
    const float *residual;
    float *out;
} ProductHalves;

/* out [rows, O] = x [rows, I] times panels `first` to `last` of `packed` (+ residual). */
int product_halves(const ProductHalves *in, int64_t first, int64_t last) {
    const float *x = in->x;
    const int32_t *packed = in->packed;
    int64_t rows = in->rows, inputs = in->inputs, outputs = in->outputs;
    const float *residual = in->residual;
    float *out = in->out;
    const int64_t pairs = inputs / 2;
    const Target target = {inputs, outputs, residual, out};
    int64_t block = CACHED / (2 * inputs) / GROUP * GROUP;
    if (block < GROUP) block = GROUP;
    int32_t *grouped = malloc(4 * pairs * (rows < block ? rows : block));
    if (!grouped) return 2;
    for (int64_t start = 0; start < rows; start += block) {
        int64_t count = rows - start < block ? rows - start : block;
        for (int64_t r = 0, group; r < count; r += group) {
            group = largest_group(count - r);
            pack_rows(group, x + (start + r) * inputs, inputs, grouped + r * pairs);
        }
        int most = count < GROUP ? WIDE : 2;
        int64_t step = LINE * most * GROUP / (count < 2 * GROUP ? 2 * GROUP : count);
        for (int64_t p = first, wide; p < last; p += wide) {
            wide = last - p < most ? 1 : most;
            const int32_t *panel = packed + p * LANES * pairs;
            const char *next = (const char *)(panel + wide * LANES * pairs);
            for (int64_t r = 0, group; r < count; r += group, next += step * pairs) {
                group = largest_group(count - r);
                find_tile(group, wide)(grouped + r * pairs, panel, &target, (start + r) * outputs + p * LANES, next, step);
            }
        }
    }
    free(grouped);
    return 0;
}
#else
int pack_halves(const void *arguments, int64_t first, int64_t last) { return 1; }
int unpack_halves(const void *arguments, int64_t first, int64_t last) { return 1; }
int product_halves(const void *arguments, int64_t first, int64_t last) { return 1; }
#endif
