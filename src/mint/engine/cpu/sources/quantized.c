/* Products with quantized matrices: numbers of 4 or 8 bits, which become float32 or bfloat16 in registers.

   A matrix [O, I] lies in panels of 16 outputs: vectors of 64 bytes, each with the codes of 8 or 4 inputs of 16 outputs.
   `numbers` knows which bits belong to which input. Every `block` inputs of an output have one scale:
   [O / 16, I / block, 16].

   At most 128 inputs are summed at once, in order (32 of them at a time with AMX), with the numbers that the codes stand
   for without their scale. Each such sum is multiplied by its scale and added to those before it. So a row's bits are a
   function of that row alone, whether its numbers come from the codes or, for many rows, from the first cache. In float32
   all sets of instructions give the same bits.

   In bfloat16, rows are rounded to it, and so are the numbers. Without the instructions of AVX512-BF16 they are multiplied
   as float32; rows for int8 are then not rounded at all. */

#include <string.h>

#include "amx.h"
#include "calls.h"
#include "memory.h"
#include "product_tiles.h"

#ifdef __aarch64__
#include <arm_neon.h>
#endif

/* What `packed` of a `Product` and `source` of a `Turn` point to here. */
typedef struct {
    const int32_t *codes;
    const float *scales, *table; /* [16]: the numbers of codes of 4 bits */
    int64_t block;
} Quantized;

#define SUMMED 128     /* inputs in one sum at most; all of them have the same scale */
#define ROUNDED 400000 /* bytes of rounded rows that stay in the second cache */

enum { CODES4, INT8, FP8, WIDE }; /* WIDE: no codes, but the numbers themselves */

/* Vectors of numbers in a vector of codes. One holds an input of 16 outputs, or in bfloat16 two of them. */
INLINE int vectors_in(const int kind, const int half) { return kind == WIDE ? 1 : (kind == CODES4 ? 8 : 4) >> half; }
INLINE int inputs_in(const int kind, const int half) { return vectors_in(kind, half) << half; }

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define MULTIPLIES_CODES 1 /* in bfloat16, by instructions that multiply and add several at once */
#else
#define MULTIPLIES_CODES 0
#endif

#ifdef __AVX512BW__
#define FEW_ROWS 8 /* so few rows take their numbers from the codes */

/* What tells the numbers of codes. CODES4: `low` is the table. FP8: the two bytes of bfloat16 of codes 0 to 63, and of
   codes 64 to 127; without AVX512-VBMI, `low` is the bfloat16 of codes 0 to 7. */
typedef struct {
    __m512i low, low2, high, high2;
} Tables;

/* The bits of a positive code of FP8 in bfloat16: 4 bits of exponent with bias 7, and 3 of the fraction. */
static uint16_t half_of_fp8(int code) {
    union {
        float value;
        uint32_t bits;
    } number = {.value = (float)code / 512};
    if (code == 127) return 0x7fc0; /* not a number */
    return code < 8 ? number.bits >> 16 : (code << 4) + (120 << 7);
}

INLINE Tables make_tables(const int kind, const int half, const float *table) {
    Tables found = {0};
    if (kind == CODES4 && !half) found.low = _mm512_loadu_si512(table);
    if (kind == CODES4 && half) {
        uint16_t rounded[2 * LANES]; /* twice: an index has five bits, of which the highest is another code's */
        for (int i = 0; i < 2 * LANES; i++) {
            uint32_t bits;
            memcpy(&bits, table + i % LANES, sizeof bits);
            rounded[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        }
        found.low = _mm512_loadu_si512(rounded);
    }
    if (kind == FP8) {
#ifdef __AVX512VBMI__
        uint8_t low[128], high[128];
        for (int code = 0; code < 128; code++) {
            low[code] = half_of_fp8(code) & 0xff;
            high[code] = half_of_fp8(code) >> 8;
        }
        found = (Tables){_mm512_loadu_si512(low), _mm512_loadu_si512(low + 64), _mm512_loadu_si512(high),
                         _mm512_loadu_si512(high + 64)};
#else
        uint16_t small[32];
        for (int code = 0; code < 32; code++) small[code] = half_of_fp8(code % 8);
        found.low = _mm512_loadu_si512(small);
#endif
    }
    return found;
}

/* Pairs of FP8 in bfloat16: of the first or the second 8 codes of each 16. */
INLINE __m512i halves_of_fp8(__m512i codes, int second, const Tables *tables) {
#ifdef __AVX512VBMI__
    __m512i low = _mm512_permutex2var_epi8(tables->low, codes, tables->low2);
    __m512i high = _mm512_permutex2var_epi8(tables->high, codes, tables->high2);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8); /* high | codes & sign */
    return second ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high);
#else
    __m512i zero = _mm512_setzero_si512();
    __m512i code = second ? _mm512_unpackhi_epi8(codes, zero) : _mm512_unpacklo_epi8(codes, zero);
    __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
    __m512i rest = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x7f)), 4);
    __m512i small = _mm512_permutexvar_epi16(_mm512_and_si512(code, _mm512_set1_epi16(7)), tables->low);
    __mmask32 is_small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
    __mmask32 is_nan = _mm512_cmpeq_epi16_mask(rest, _mm512_set1_epi16(127 << 4));
    rest = _mm512_mask_mov_epi16(_mm512_add_epi16(rest, _mm512_set1_epi16(120 << 7)), is_small, small);
    rest = _mm512_mask_mov_epi16(rest, is_nan, _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(rest, sign);
#endif
}

/* Vector `k` of the numbers of `codes`. In bfloat16, each of its 32 bits hold inputs 2k and 2k + 1 of an output.

   CODES4: of an output's 32 bits the lower 16 hold the even inputs in order, and the upper 16 the odd ones.
   INT8: four inputs in order, each with 128 added. FP8: each 128 bits hold four outputs: inputs 0 and 1 of each of them,
   then inputs 2 and 3. */
INLINE __m512i numbers_of(const int kind, const int half, __m512i codes, int k, const Tables *tables) {
    if (kind == CODES4) {
        if (half) return _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * k), tables->low);
        codes = _mm512_srli_epi32(codes, 4 * (k / 2) + 16 * (k % 2));
        return (__m512i)_mm512_permutexvar_ps(codes, (__m512)tables->low);
    }
    if (kind == INT8) {
        __m512i plain = _mm512_xor_si512(codes, _mm512_set1_epi8((char)0x80));
        return (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(plain, 24 - 8 * k), 24));
    }
    if (half) return halves_of_fp8(codes, k, tables);
    __m512i pairs = halves_of_fp8(codes, k / 2, tables);
    return k % 2 ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(pairs, 16);
}

INLINE Vector numbers(const int kind, const int half, Vector codes, int k, const Tables *tables) {
    return kind == WIDE ? codes : (Vector)numbers_of(kind, half, (__m512i)codes, k, tables);
}

INLINE Vector same_word(int32_t word) { return (Vector)_mm512_set1_epi32(word); }
#else
#define FEW_ROWS 1 /* a code costs several instructions, so all other rows share its number */

/* The 16 numbers of codes of 4 bits. */
typedef struct {
#ifdef __aarch64__
    uint8x16x4_t bytes;
#else
    Part low, high;
    const float *all;
#endif
} Tables;

INLINE Tables make_tables(const int kind, const int half, const float *table) {
    Tables found;
    memset(&found, 0, sizeof found);
    if (kind != CODES4) return found;
#ifdef __aarch64__
    for (int n = 0; n < 4; n++) found.bytes.val[n] = vreinterpretq_u8_f32(vld1q_f32(table + 4 * n));
#else
    found.low = *(const LoosePart *)table;
    found.high = *(const LoosePart *)(table + LANES / 2);
    found.all = table;
#endif
    return found;
}

/* The numbers of the codes in the lowest four bits. */
INLINE Part numbers_of_4(PartBits codes, const Tables *tables) {
#if defined(__AVX2__)
    __m256 low = _mm256_permutevar8x32_ps((__m256)tables->low, (__m256i)codes);
    __m256 high = _mm256_permutevar8x32_ps((__m256)tables->high, (__m256i)codes);
    return (Part)_mm256_blendv_ps(low, high, (__m256)(codes << 28)); /* by the fourth bit */
#elif defined(__aarch64__)
    PartBits places = (codes & 15) * 0x04040404 + 0x03020100;
    return (Part)vreinterpretq_f32_u8(vqtbl4q_u8(tables->bytes, (uint8x16_t)places));
#else
    Part found;
    for (int lane = 0; lane < PART; lane++) found[lane] = tables->all[codes[lane] & 15];
    return found;
#endif
}

/* The numbers of codes of FP8 that are byte `k`: 4 bits of exponent with bias 7, and 3 of the fraction. Where a float has these
   bits, its exponent is too small by 120, also if it is 0; the largest code is not a number. */
INLINE Part numbers_of_fp8(PartBits codes, int k) {
    PartBits size = (k == 3 ? codes >> 4 : codes << (20 - 8 * k)) & 127 << 20;
    PartBits sign = (codes << (24 - 8 * k)) & (int32_t)0x80000000;
    return (Part)((PartBits)((Part)size * 0x1p120f) | sign | (size == 127 << 20));
}

/* Vector `k` of the numbers of `codes`, as floats. CODES4: of an output's 32 bits the lower 16 hold the even inputs in order,
   and the upper 16 the odd ones. INT8: four inputs in order, each with 128 added. FP8: four inputs in order. */
INLINE Vector numbers(const int kind, const int half, Vector codes, int k, const Tables *tables) {
    if (kind == WIDE) return codes;
    Vector found;
#pragma GCC unroll 4
    for (int n = 0; n < PARTS; n++) {
        PartBits own = (PartBits)codes.part[n];
        if (kind == CODES4) found.part[n] = numbers_of_4(own >> (4 * (k / 2) + 16 * (k % 2)), tables);
        if (kind == INT8)
            found.part[n] = __builtin_convertvector(((own ^ (int32_t)0x80808080) << (24 - 8 * k)) >> 24, Part);
        if (kind == FP8) found.part[n] = numbers_of_fp8(own, k);
    }
    return found;
}

INLINE Vector same_word(int32_t word) {
    float number;
    memcpy(&number, &word, sizeof number);
    return same(number);
}
#endif

/* What a tile multiplies: rows and panels, from input `from` to input `to`. */
typedef struct {
    const int32_t *x; /* words of one input, or of two */
    int64_t stride;   /* of rows */
    const int32_t *codes;
    const float *scales, *table;
    int64_t block, inputs; /* of the matrix */
    int64_t from, to, panel; /* words from one panel to the next one */
    int64_t outputs;
    const float *residual;
    float *out;
} Share;

/* Inputs of the sum that begins at input `at`. */
INLINE int64_t summed(int64_t at, int64_t block) {
    int64_t rest = block - at % block;
    return rest < SUMMED ? rest : SUMMED;
}

/* Not in registers, which the inner loop needs. */
#define IN_MEMORY(numbers) __asm__("" : "+m"(numbers))

INLINE void tile_of(const int kind, const int half, const int rows, const int panels, const Share *share) {
    const Tables tables = make_tables(kind, half, share->table);
    const int vectors = vectors_in(kind, half), each = inputs_in(kind, half);
    const int64_t stride = share->stride, panel = share->panel, blocks = share->inputs / share->block;
    const int32_t *codes = share->codes, *x = share->x;
    Vector total[ROWS][PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            total[r][p] = share->from ? loaded(share->out + r * share->outputs + p * LANES) : zeros();
    for (int64_t i = share->from, size; i < share->to; i += size) {
        IN_MEMORY(total);
        Vector own[ROWS][PANELS];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) own[r][p] = zeros();
        size = summed(i, share->block);
        for (int64_t end = i + size, at = i; at < end; at += each) {
            Vector words[PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                words[p] = loaded((const float *)codes + p * panel);
                if (kind != WIDE) __builtin_prefetch(codes + (p + panels) * panel, 0, 2);
            }
            codes += LANES;
#pragma GCC unroll 8
            for (int k = 0; k < vectors; k++) {
                Vector weight[PANELS];
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++) weight[p] = numbers(kind, half, words[p], k, &tables);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    Vector row = same_word(x[r * stride + k]);
                    HOLD(row);
#pragma GCC unroll 4
                    for (int p = 0; p < panels; p++) own[r][p] = multiplied(half, own[r][p], row, weight[p]);
                }
            }
            x += vectors;
        }
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            Vector scale = loaded(share->scales + (p * blocks + i / share->block) * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) total[r][p] = fused(own[r][p], scale, total[r][p]);
        }
    }
    const float *residual = share->to == share->inputs ? share->residual : 0;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            int64_t place = r * share->outputs + p * LANES;
            if (residual) total[r][p] = added(total[r][p], loaded(residual + place));
            put(share->out + place, total[r][p]);
        }
}

/* The same in as many tiles as the registers hold. */
INLINE void shares_of(const int kind, const int half, const int rows, const int panels, const Share *share) {
    const int most = FEW_ROWS == 1 && kind != WIDE ? 2 : HELD_PANELS(rows), held = most < panels ? most : panels;
#pragma GCC unroll 4
    for (int p = 0; p < panels; p += held) {
        Share own = *share;
        own.codes += p * share->panel;
        own.scales += p * (share->inputs / share->block) * LANES;
        own.out += p * LANES;
        if (own.residual) own.residual += p * LANES;
        tile_of(kind, half, rows, held, &own);
    }
}

typedef void ShareTile(const Share *share);
#define SHARE(KIND, HALF, R, P) \
    __attribute__((noinline)) static void KIND##_##HALF##_##R##_##P(const Share *share) { shares_of(KIND, HALF, R, P, share); }
#define WIDTHS_OF(KIND, HALF, R) SHARE(KIND, HALF, R, 1) SHARE(KIND, HALF, R, 4)
#define BOTH(KIND, HALF, R) {KIND##_##HALF##_##R##_1, KIND##_##HALF##_##R##_4}
#define NONE {0, 0}

/* By rows - 1, and whether there are four panels or one. */
#if FEW_ROWS == 1
#define CODE_TILES(KIND, HALF) \
    WIDTHS_OF(KIND, HALF, 1) \
    static ShareTile *const KIND##_##HALF[ROWS][2] = {BOTH(KIND, HALF, 1), NONE, NONE, NONE, NONE, NONE};
#else
#define CODE_TILES(KIND, HALF) \
    WIDTHS_OF(KIND, HALF, 1) WIDTHS_OF(KIND, HALF, 2) WIDTHS_OF(KIND, HALF, 4) \
    static ShareTile *const KIND##_##HALF[ROWS][2] = {BOTH(KIND, HALF, 1), BOTH(KIND, HALF, 2), NONE, \
                                                     BOTH(KIND, HALF, 4), NONE, NONE};
#endif
#define WIDE_TILES(HALF) \
    WIDTHS_OF(WIDE, HALF, 1) WIDTHS_OF(WIDE, HALF, 2) WIDTHS_OF(WIDE, HALF, 3) \
    WIDTHS_OF(WIDE, HALF, 4) WIDTHS_OF(WIDE, HALF, 5) WIDTHS_OF(WIDE, HALF, 6) \
    static ShareTile *const WIDE_##HALF[ROWS][2] = {BOTH(WIDE, HALF, 1), BOTH(WIDE, HALF, 2), BOTH(WIDE, HALF, 3), \
                                                   BOTH(WIDE, HALF, 4), BOTH(WIDE, HALF, 5), BOTH(WIDE, HALF, 6)};

/* All rows of a share, in tiles of as many rows as there are. */
static void run_tiles(ShareTile *const tiles[ROWS][2], Share share, int64_t rows, int wide) {
    while (rows) {
        int64_t count = rows < ROWS ? rows : ROWS;
        while (!tiles[count - 1][wide]) count--;
        tiles[count - 1][wide](&share);
        share.x += count * share.stride;
        share.out += count * share.outputs;
        if (share.residual) share.residual += count * share.outputs;
        rows -= count;
    }
}

/* The numbers of `count` inputs of a panel, without their scale. */
INLINE void widen(const int kind, const int half, const int32_t *codes, const Tables *tables, int64_t count, int32_t *to) {
    const Tables own = *tables; /* `to` might be the same place, for all that the compiler knows */
    for (int64_t i = 0; i < count; i += inputs_in(kind, half), codes += LANES) {
        Vector words = loaded((const float *)codes);
#pragma GCC unroll 8
        for (int k = 0; k < vectors_in(kind, half); k++, to += LANES)
            put((float *)to, numbers(kind, half, words, k, &own));
    }
}

/* `count` rows from row `start` on, whose words are at `x`, times panels `first` to `last`. */
INLINE void multiply_rows(const int kind, const int half, ShareTile *const tiles[ROWS][2],
                          ShareTile *const wide_tiles[ROWS][2], const Product *in, const int32_t *x, int64_t start,
                          int64_t count, int64_t first, int64_t last) {
    if (first == last) return;
    const Quantized *matrix = (const Quantized *)in->packed;
    const int64_t inputs = in->inputs, words = inputs / inputs_in(kind, half) * LANES;
    const int64_t scales = inputs / matrix->block * LANES;
    const Tables tables = make_tables(kind, half, matrix->table);
    int32_t found[PANELS * SUMMED * LANES] __attribute__((aligned(64)));
    for (int64_t p = first, panels; p < last; p += panels) {
        panels = last - p < PANELS ? 1 : PANELS;
        const int64_t place = start * in->outputs + p * LANES;
        const int32_t *codes = matrix->codes + p * words;
        Share share = {x, inputs >> half, codes, matrix->scales + p * scales, matrix->table, matrix->block, inputs, 0,
                     inputs, words, in->outputs, in->residual ? in->residual + place : 0, in->out + place};
        if (count <= FEW_ROWS) {
            run_tiles(tiles, share, count, panels == PANELS);
            continue;
        }
        share.codes = found;
        for (int64_t i = 0; i < inputs; i = share.to) {
            const int64_t size = summed(i, matrix->block);
            share.panel = (size >> half) * LANES;
            share.from = i;
            share.to = i + size;
            share.x = x + (i >> half);
            for (int64_t own = 0; own < panels; own++)
                widen(kind, half, codes + own * words + i / inputs_in(kind, half) * LANES, &tables, size,
                      found + own * share.panel);
            run_tiles(wide_tiles, share, count, panels == PANELS);
        }
    }
}

#ifdef __AMX_BF16__
#define FLUSHES 0x8040 /* of the control register: what is subnormal is zero, in operands and results, as it is to AMX */

/* Up to PANELS panels from `p` on for one row, whose numbers with even and with odd places are `evens` and `odds`. */
INLINE void multiply_row_panels(const int kind, const int panels, const Product *in, const Tables *tables,
                                const float *evens, const float *odds, int64_t row, int64_t p) {
    const Quantized *matrix = (const Quantized *)in->packed;
    const int64_t inputs = in->inputs, each = inputs_in(kind, 1), panel = inputs / each * LANES;
    const int64_t blocks = inputs / matrix->block;
    const int32_t *codes = matrix->codes + p * panel;
    const float *scales = matrix->scales + p * blocks * LANES;
    Vector total[PANELS];
#pragma GCC unroll 4
    for (int own = 0; own < panels; own++) total[own] = zeros();
    for (int64_t i = 0, size; i < inputs; i += size) {
        size = summed(i, matrix->block);
        Vector sum[PANELS];
#pragma GCC unroll 4
        for (int own = 0; own < panels; own++) sum[own] = zeros();
        for (int64_t at = i, end = i + size, stop; at < end; at = stop) {
            stop = end - at < 2 * LANES ? end : at + 2 * LANES; /* as many as a register sums at once */
            Vector even[PANELS], odd[PANELS];
#pragma GCC unroll 4
            for (int own = 0; own < panels; own++) even[own] = odd[own] = zeros();
            for (; at < stop; at += each, codes += LANES) {
                Vector words[PANELS];
#pragma GCC unroll 4
                for (int own = 0; own < panels; own++) {
                    words[own] = loaded((const float *)codes + own * panel);
                    __builtin_prefetch(codes + (own + panels) * panel, 0, 2);
                }
#pragma GCC unroll 4
                for (int k = 0; k < vectors_in(kind, 1); k++) {
                    const Vector x = same(evens[at / 2 + k]), next = same(odds[at / 2 + k]);
#pragma GCC unroll 4
                    for (int own = 0; own < panels; own++) {
                        const Vector weight = numbers(kind, 1, words[own], k, tables);
                        even[own] = fused(x, even_halves(weight), even[own]);
                        odd[own] = fused(next, odd_halves(weight), odd[own]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int own = 0; own < panels; own++) sum[own] = added(sum[own], added(even[own], odd[own]));
        }
#pragma GCC unroll 4
        for (int own = 0; own < panels; own++)
            total[own] = fused(sum[own], loaded(scales + (own * blocks + i / matrix->block) * LANES), total[own]);
    }
#pragma GCC unroll 4
    for (int own = 0; own < panels; own++) {
        const int64_t at = row * in->outputs + (p + own) * LANES;
        put(in->out + at, in->residual ? added(total[own], loaded(in->residual + at)) : total[own]);
    }
}

/* One row, whose words are at `x`, times panels `first` to `last`, by vectors: AMX would take longer. The sums are those of
   its registers, which of 32 inputs sum those with even and with odd places, and then add both (Intel's manual, TDPBF16PS).
   `room` has 2 floats for each word. */
INLINE void multiply_row(const int kind, const Product *in, const int32_t *x, int64_t row, int64_t first, int64_t last,
                         float *room) {
    const int64_t words = in->inputs / 2;
    float *evens = room, *odds = room + words;
    for (int64_t i = 0; i < words; i += LANES) {
        const Vector own = loaded((const float *)x + i);
        put(evens + i, even_halves(own));
        put(odds + i, odd_halves(own));
    }
    const Tables tables = make_tables(kind, 1, ((const Quantized *)in->packed)->table);
    int64_t p = first;
    for (; p + PANELS <= last; p += PANELS) multiply_row_panels(kind, PANELS, in, &tables, evens, odds, row, p);
    for (; p < last; p++) multiply_row_panels(kind, 1, in, &tables, evens, odds, row, p);
}

/* The same in bfloat16 by AMX, whatever the number of rows: sums of its own order. `sums` has room for `count` rows of
   PANELS panels. */
INLINE void multiply_rows_by_amx(const int kind, const Product *in, const int32_t *x, int64_t start, int64_t count,
                                 int64_t first, int64_t last, float *sums) {
    const Quantized *matrix = (const Quantized *)in->packed;
    const int64_t inputs = in->inputs, each = inputs_in(kind, 1), words = inputs / each * LANES;
    const int64_t blocks = inputs / matrix->block, wide = PANELS * LANES;
    const Tables tables = make_tables(kind, 1, matrix->table);
    const int is_told = count <= AMX_ROWS && matrix->block % (2 * LANES) == 0; /* once, how many rows and words there are */
    if (is_told) begin_amx(count, LANES);
    int32_t found[PANELS * SUMMED / 2 * LANES] __attribute__((aligned(64)));
    for (int64_t p = first, panels; p < last; p += panels) {
        panels = last - p < PANELS ? last - p : PANELS;
        for (int64_t i = 0, size; i < inputs; i += size) {
            size = summed(i, matrix->block);
            const int64_t panel = size / 2 * LANES;
            for (int64_t own = 0; own < panels; own++)
                widen(kind, 1, matrix->codes + (p + own) * words + i / each * LANES, &tables, size, found + own * panel);
            const AmxProduct product = {x + i / 2, inputs / 2, found, panel, size / 2, sums, wide};
            if (!is_told) multiply_amx(&product, count, 0, panels);
            else if (count > 16) multiply_panels(1, &product, 0, 0, panels, 0, 0);
            else multiply_panels(0, &product, 0, 0, panels, 0, 0);
            for (int64_t own = 0; own < panels; own++) {
                const Vector scale = loaded(matrix->scales + ((p + own) * blocks + i / matrix->block) * LANES);
                for (int64_t r = 0, at = start * in->outputs + (p + own) * LANES; r < count; r++, at += in->outputs) {
                    Vector total = i ? loaded(in->out + at) : zeros();
                    total = fused(loaded(sums + r * wide + own * LANES), scale, total);
                    if (i + size == inputs && in->residual) total = added(total, loaded(in->residual + at));
                    put(in->out + at, total);
                }
            }
        }
    }
}
#endif

/* 16 inputs from input `at` on of panel `o`, with their scale: [16 inputs, 16 outputs]. */
INLINE void widen_square(const int kind, const Turn *in, const Tables *tables, int64_t o, int64_t at, float *to) {
    const Quantized *matrix = (const Quantized *)in->source;
    const int64_t words = (o * in->inputs + at) / inputs_in(kind, 0), blocks = in->inputs / matrix->block;
    widen(kind, 0, matrix->codes + words * LANES, tables, LANES, (int32_t *)to);
    for (int64_t i = 0; i < LANES; i++, to += LANES) {
        const float *scale = matrix->scales + (o * blocks + (at + i) / matrix->block) * LANES;
        put(to, scaled(loaded(to), loaded(scale)));
    }
}

/* 32 bfloat16 of 16 numbers `low` and of 16 numbers `high`, in place of `low`. */
INLINE void join_halves(float *low, const float *high) {
#ifdef __AVX512BF16__
    _mm512_storeu_si512(low, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low)));
#else
    int32_t wide[2 * LANES];
    uint16_t made[2 * LANES];
    float both[2 * LANES];
    memcpy(both, low, sizeof both / 2);
    memcpy(both + LANES, high, sizeof both / 2);
    round_row(both, 2 * LANES, wide);
    for (int i = 0; i < 2 * LANES; i++) made[i] = (uint32_t)wide[i] >> 16;
    memcpy(low, made, sizeof made);
#endif
}

/* Panels `first` to `last` of the transpose of a matrix [O, I], as products.c reads them; in bfloat16, O is a multiple of
   32. */
INLINE void turn_panels(const int kind, const int half, const Turn *in, int64_t first, int64_t last) {
    const Tables tables = make_tables(kind, 0, ((const Quantized *)in->source)->table);
    float squares[2][LANES * LANES] __attribute__((aligned(64)));
    for (int64_t p = first; p < last; p++)
        for (int64_t o = 0; o < in->outputs / LANES; o += 1 + half) {
            for (int own = 0; own <= half; own++) widen_square(kind, in, &tables, o + own, p * LANES, squares[own]);
            if (half)
                for (float *low = squares[0], *high = squares[1]; low < squares[1]; low += LANES, high += LANES)
                    join_halves(low, high);
            transpose((int32_t *)squares[0], LANES, in->target + (p * in->outputs + o * LANES) / (1 + half) * LANES, LANES);
        }
}

/* out [rows, O] = x [rows, I] times panels `first` to `last` of the matrix (+ residual). */
#define FLOATS(NAME, KIND) \
    CODE_TILES(KIND, 0) \
    int NAME##_floats(const Product *in, int64_t first, int64_t last) { \
        multiply_rows(KIND, 0, KIND##_0, WIDE_0, in, (const int32_t *)in->x, 0, in->rows, first, last); \
        return 0; \
    } \
    int turn_##NAME##_floats(const Turn *in, int64_t first, int64_t last) { \
        turn_panels(KIND, 0, in, first, last); \
        return 0; \
    }
WIDE_TILES(0)
FLOATS(codes4, CODES4)
FLOATS(int8, INT8)
FLOATS(fp8, FP8)

#define TURN_HALVES(NAME, KIND) \
    int turn_##NAME##_halves(const Turn *in, int64_t first, int64_t last) { \
        turn_panels(KIND, 1, in, first, last); \
        return 0; \
    }
TURN_HALVES(codes4, CODES4)
TURN_HALVES(int8, INT8)
TURN_HALVES(fp8, FP8)

#if MULTIPLIES_CODES
/* The same of rows that are rounded to bfloat16, and of numbers in bfloat16. */
#define HALVES(NAME, KIND) \
    CODE_TILES(KIND, 1) \
    int NAME##_halves(const Product *in, int64_t first, int64_t last) { \
        return multiply_halves(KIND, KIND##_1, in, first, last); \
    }
WIDE_TILES(1)

INLINE int multiply_halves(const int kind, ShareTile *const tiles[ROWS][2], const Product *in, int64_t first,
                           int64_t last) {
    const int64_t words = in->inputs / 2, most = ROUNDED / (4 * words) / ROWS * ROWS + ROWS;
    const int64_t block = in->rows < most ? in->rows : most;
    int32_t *rounded = scratch(4 * (block * (words + PANELS * LANES) + 2 * words));
    if (!rounded) return 2;
#ifdef __AMX_BF16__
    const unsigned int control = _mm_getcsr();
    _mm_setcsr(control | FLUSHES);
#endif
    for (int64_t start = 0, count; start < in->rows; start += count) {
        count = in->rows - start < block ? in->rows - start : block;
        for (int64_t r = 0; r < count; r++)
            round_row(in->x + (start + r) * in->inputs, in->inputs, rounded + r * words);
#ifdef __AMX_BF16__
        float *sums = (float *)(rounded + block * words);
        if (count == 1) multiply_row(kind, in, rounded, start, first, last, sums);
        else multiply_rows_by_amx(kind, in, rounded, start, count, first, last, sums);
#else
        multiply_rows(kind, 1, tiles, WIDE_1, in, rounded, start, count, first, last);
#endif
    }
#ifdef __AMX_BF16__
    end_amx();
    _mm_setcsr(control);
#endif
    free(rounded);
    return 0;
}

HALVES(codes4, CODES4)
HALVES(fp8, FP8)

/* int8 in bfloat16: integers, with rows in 16 bits. Each row is rounded to multiples of 1 / 32639 of the largest number
   among the 128 inputs of a sum, which is finer than bfloat16 for all numbers within a factor of 128 of that. A multiple is
   256 * high + low, both of 8 bits with sign, so that a sum is exact. */
#define LARGEST 32639.0f /* 256 * 127 + 127 */
#define TINY 1e-30f      /* what is smaller becomes 0: its inverse would be infinite */
#define INT8_ROWS 3

/* Rows: for 4 inputs a word of high and one of low bytes; then for each sum its unit, a float, and -128 times the sum of the
   multiples, for the 128 that codes have added. */
INLINE int64_t sums_of(int64_t inputs) { return (inputs + SUMMED - 1) / SUMMED; }
INLINE int64_t int8_words(int64_t inputs) { return inputs / 2 + 2 * sums_of(inputs); }

static void round_row_to_int16(const float *x, int64_t inputs, int32_t *to) {
    float *units = (float *)to + inputs / 2;
    int32_t *offsets = to + inputs / 2 + sums_of(inputs);
    for (int64_t i = 0, size; i < inputs; i += size) {
        size = summed(i, inputs);
        __m512i most = _mm512_setzero_si512(), total = most; /* as integers, so that NaN is the largest */
        for (int64_t k = i; k < i + size; k += LANES)
            most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_loadu_si512(x + k), _mm512_set1_epi32(0x7fffffff)));
        int32_t bits = _mm512_reduce_max_epi32(most);
        float largest, inverse;
        memcpy(&largest, &bits, sizeof largest);
        inverse = largest > TINY ? LARGEST / largest : 0;
        for (int64_t k = i; k < i + size; k += LANES, to += LANES / 2) {
            __m512i own = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), _mm512_set1_ps(inverse)));
            __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(own, 24), 24);
            __m128i lows = _mm512_cvtepi32_epi8(low);
            __m128i highs = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_sub_epi32(own, low), 8));
            total = _mm512_add_epi32(total, own);
            _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi32(highs, lows));
            _mm_storeu_si128((__m128i *)to + 1, _mm_unpackhi_epi32(highs, lows));
        }
        *units++ = largest / LARGEST;
        *offsets++ = -128u * (uint32_t)_mm512_reduce_add_epi32(total); /* of what is not finite, any number */
    }
}

INLINE void int8_tile(const int rows, const int panels, const Share *share) {
    const int64_t stride = share->stride, panel = share->panel, inputs = share->inputs;
    const int32_t *codes = share->codes, *x = share->x, *sums = x + inputs / 2;
    __m512 total[INT8_ROWS][PANELS];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) total[r][p] = _mm512_setzero_ps();
    for (int64_t i = 0, size; i < inputs; i += size, sums++) {
        IN_MEMORY(total);
        __m512i own[2 * INT8_ROWS][PANELS]; /* of a row's high bytes, and of its low ones */
#pragma GCC unroll 6
        for (int r = 0; r < 2 * rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                own[r][p] = r % 2 ? _mm512_set1_epi32(sums[r / 2 * stride + sums_of(inputs)]) : _mm512_setzero_si512();
        size = summed(i, inputs);
        for (int64_t at = 0; at < size; at += 4, codes += LANES, x += 2) {
            __m512i words[PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                words[p] = _mm512_loadu_si512(codes + p * panel);
                _mm_prefetch(codes + (p + panels) * panel, _MM_HINT_T1);
            }
#pragma GCC unroll 6
            for (int r = 0; r < 2 * rows; r++) {
                __m512i row = _mm512_set1_epi32(x[r / 2 * stride + r % 2]);
                __asm__("" : "+v"(row));
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++) __asm__("vpdpbusd %2, %1, %0" : "+v"(own[r][p]) : "v"(words[p]), "v"(row));
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
            __m512 unit = _mm512_set1_ps(((const float *)sums)[r * stride]);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                __m512i exact = _mm512_add_epi32(_mm512_slli_epi32(own[2 * r][p], 8), own[2 * r + 1][p]);
                total[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), unit, total[r][p]);
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            int64_t place = r * share->outputs + p * LANES;
            __m512 before = share->residual ? _mm512_loadu_ps(share->residual + place) : _mm512_setzero_ps();
            __m512 scale = _mm512_loadu_ps(share->scales + p * LANES);
            _mm512_storeu_ps(share->out + place, _mm512_fmadd_ps(total[r][p], scale, before));
        }
}

/* The same for one row, whose speed is that of the memory: the codes are read from their first to their last, which the
   processor fetches ahead by itself. Sums of integers are exact in any order, so the bits are those of the tile. */
INLINE void int8_row(const int panels, const Share *share) {
    const int64_t inputs = share->inputs;
    const int32_t *codes = share->codes;
    for (int p = 0; p < panels; p++) {
        const int32_t *x = share->x, *sums = x + inputs / 2;
        __m512 total = _mm512_setzero_ps();
        for (int64_t i = 0, size; i < inputs; i += size, sums++) {
            __m512i high[4], low[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) high[k] = low[k] = _mm512_setzero_si512();
            low[0] = _mm512_set1_epi32(sums[sums_of(inputs)]);
            size = summed(i, inputs);
            for (int64_t at = 0; at < size; at += 16, codes += 4 * LANES, x += 8) {
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    __m512i words = _mm512_loadu_si512(codes + k * LANES);
                    __m512i highs = _mm512_set1_epi32(x[2 * k]), lows = _mm512_set1_epi32(x[2 * k + 1]);
                    __asm__("vpdpbusd %2, %1, %0" : "+v"(high[k]) : "v"(words), "v"(highs));
                    __asm__("vpdpbusd %2, %1, %0" : "+v"(low[k]) : "v"(words), "v"(lows));
                }
            }
#pragma GCC unroll 3
            for (int k = 1; k < 4; k++) {
                high[0] = _mm512_add_epi32(high[0], high[k]);
                low[0] = _mm512_add_epi32(low[0], low[k]);
            }
            __m512i exact = _mm512_add_epi32(_mm512_slli_epi32(high[0], 8), low[0]);
            total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(((const float *)sums)[0]), total);
        }
        __m512 before = share->residual ? _mm512_loadu_ps(share->residual + p * LANES) : _mm512_setzero_ps();
        _mm512_storeu_ps(share->out + p * LANES, _mm512_fmadd_ps(total, _mm512_loadu_ps(share->scales + p * LANES), before));
    }
}

#define INT8_ROW(P) \
    __attribute__((noinline)) static void INT8_1_1_##P(const Share *share) { int8_row(P, share); }
#define INT8_TILE(R, P) \
    __attribute__((noinline)) static void INT8_1_##R##_##P(const Share *share) { int8_tile(R, P, share); }
INT8_ROW(1) INT8_ROW(4) INT8_TILE(2, 1) INT8_TILE(2, 4) INT8_TILE(3, 1) INT8_TILE(3, 4)
static ShareTile *const INT8_1[ROWS][2] = {BOTH(INT8, 1, 1), BOTH(INT8, 1, 2), BOTH(INT8, 1, 3), NONE, NONE, NONE};

int int8_halves(const Product *in, int64_t first, int64_t last) {
    const Quantized *matrix = (const Quantized *)in->packed;
    const int64_t inputs = in->inputs, words = int8_words(inputs), panel = inputs / 4 * LANES;
    const int64_t most = ROUNDED / (4 * words) + INT8_ROWS, block = in->rows < most ? in->rows : most;
    int32_t *rounded = scratch(4 * words * block);
    if (!rounded) return 2;
    for (int64_t start = 0, count; start < in->rows; start += count) {
        count = in->rows - start < block ? in->rows - start : block;
        for (int64_t r = 0; r < count; r++)
            round_row_to_int16(in->x + (start + r) * inputs, inputs, rounded + r * words);
        for (int64_t p = first, panels; p < last; p += panels) {
            panels = last - p < PANELS ? 1 : PANELS;
            const int64_t place = start * in->outputs + p * LANES;
            Share share = {rounded, words, matrix->codes + p * panel, matrix->scales + p * LANES, 0, inputs, inputs, 0,
                         inputs, panel, in->outputs, in->residual ? in->residual + place : 0, in->out + place};
            run_tiles(INT8_1, share, count, panels == PANELS);
        }
    }
    free(rounded);
    return 0;
}
#else
/* The same, multiplied as float32. Rows in blocks, which are rounded first. */
INLINE int multiply_halves(const int kind, ShareTile *const tiles[ROWS][2], const Product *in, int64_t first,
                           int64_t last) {
    if (first == last) return 0; /* there may be no matrix, either */
    const int64_t words = in->inputs, most = ROUNDED / (4 * words) / ROWS * ROWS + ROWS;
    const int64_t block = in->rows < most ? in->rows : most;
    int32_t *rounded = scratch(4 * words * block);
    if (!rounded) return 2;
    float table[LANES];
    Quantized matrix = *(const Quantized *)in->packed;
    if (kind == CODES4) {
        round_floats(matrix.table, LANES, (int32_t *)table);
        matrix.table = table;
    }
    Product own = *in;
    own.packed = (const int32_t *)&matrix;
    for (int64_t start = 0, count; start < in->rows; start += count) {
        count = in->rows - start < block ? in->rows - start : block;
        round_floats(in->x + start * words, count * words, rounded);
        multiply_rows(kind, 0, tiles, WIDE_0, &own, rounded, start, count, first, last);
    }
    free(rounded);
    return 0;
}

int codes4_halves(const Product *in, int64_t first, int64_t last) { return multiply_halves(CODES4, CODES4_0, in, first, last); }
int fp8_halves(const Product *in, int64_t first, int64_t last) { return multiply_halves(FP8, FP8_0, in, first, last); }
int int8_halves(const Product *in, int64_t first, int64_t last) { return int8_floats(in, first, last); }
#endif
