/* Products of bfloat16 by the matrix registers of AMX: up to 32 rows and 2 panels of 16 outputs at once.

   A register ("tile" in Intel's manual) holds 16 rows of 64 bytes. One instruction adds to 16 x 16 sums the products of
   16 rows with 16 outputs over 32 inputs. Of a panel as products.c has them, the words of 32 inputs are such a register as
   they lie. A row's sums are a function of that row alone, whatever the other rows of the register are.

   `instruction_sets.py` asks Linux for the right to use these registers, once for the process. */

#ifndef MINT_AMX
#define MINT_AMX

#ifdef __AMX_BF16__

#include <immintrin.h>

#include "calls.h"

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

#define AMX_ROWS 32 /* of the sums that the registers hold: registers 0 and 1 for the first 16, 2 and 3 for the others */

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) AmxShapes;

INLINE void set_shapes(const AmxShapes *shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(*shapes)); }

/* Sums of `rows` rows; sums run over `words` words, at most 16, at a time. Registers 4 and 5 are rows, 6 and 7 panels. */
INLINE void begin_amx(int64_t rows, int64_t words) {
    const int64_t first = rows < 16 ? rows : 16, second = rows - first;
    AmxShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = first;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = second ? second : first; /* no register may be empty */
    shapes.row_bytes[4] = shapes.row_bytes[5] = 4 * words;
    shapes.rows[6] = shapes.rows[7] = words;
    set_shapes(&shapes);
}

/* The processor may save less when it switches to another thread. */
INLINE void end_amx(void) { _tile_release(); }

/* out [rows, O] = or += x [rows, I] times panels, over `words` words of the inputs. Lengths are in words, or floats. */
typedef struct {
    const int32_t *x;
    int64_t x_stride;
    const int32_t *packed;
    int64_t panel; /* from a panel to the next one */
    int64_t words;
    float *out;
    int64_t out_stride;
    int adds;
    const int32_t *next; /* the panels that will be wanted next, or missing: they are fetched meanwhile */
    int tiled;           /* whether x lies as the registers take it: [rows / 16, words / 16, 16 rows, 16 words] */
} AmxProduct;

/* Where 16 rows have their words from i on: side by side, or in a register's order. */
INLINE int64_t word_place(const AmxProduct *in, int64_t i) { return in->tiled ? i * 16 : i; }

/* For the rows from `r` on that `begin_amx` was told of, and one or two panels from `p` on. Of each panel that is wanted
   next, `lines` lines are fetched for every 16 words, from `ahead` words on. */
INLINE void multiply_registers(const int two_blocks, const int two_panels, const AmxProduct *in, int64_t r, int64_t p,
                               int64_t ahead, int64_t lines) {
    const int32_t *wanted = lines ? in->next + p * in->panel + ahead * PANEL : 0;
    const int64_t x_bytes = in->tiled ? 4 * PANEL : 4 * in->x_stride, out_bytes = 4 * in->out_stride;
    const int32_t *x = in->x + r * in->x_stride, *later_x = x + 16 * in->x_stride;
    const int32_t *panel = in->packed + p * in->panel, *next = panel + in->panel;
    float *out = in->out + r * in->out_stride + p * PANEL, *later = out + 16 * in->out_stride;
    __asm__ volatile("" : : : "memory"); /* the compiler does not know that the instructions below read memory */
    if (in->adds) {
        _tile_loadd(0, out, out_bytes);
        if (two_panels) _tile_loadd(1, out + PANEL, out_bytes);
        if (two_blocks) _tile_loadd(2, later, out_bytes);
        if (two_blocks && two_panels) _tile_loadd(3, later + PANEL, out_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < in->words; i += PANEL) {
        for (int64_t n = 0; n < lines; n++, wanted += PANEL) {
            __builtin_prefetch(wanted, 0, 2);
            if (two_panels) __builtin_prefetch(wanted + in->panel, 0, 2);
        }
        _tile_loadd(6, panel + i * PANEL, 64);
        _tile_loadd(4, x + word_place(in, i), x_bytes);
        if (two_panels) _tile_loadd(7, next + i * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_blocks) _tile_loadd(5, later_x + word_place(in, i), x_bytes);
        if (two_panels) _tile_dpbf16ps(1, 4, 7);
        if (two_blocks) _tile_dpbf16ps(2, 5, 6);
        if (two_blocks && two_panels) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_bytes);
    if (two_panels) _tile_stored(1, out + PANEL, out_bytes);
    if (two_blocks) _tile_stored(2, later, out_bytes);
    if (two_blocks && two_panels) _tile_stored(3, later + PANEL, out_bytes);
}

/* The same for panels `first` to `last`. */
INLINE void multiply_panels(const int two_blocks, const AmxProduct *in, int64_t r, int64_t first, int64_t last,
                            int64_t ahead, int64_t lines) {
    int64_t p = first;
    for (; p + 2 <= last; p += 2) multiply_registers(two_blocks, 1, in, r, p, ahead, lines);
    if (p < last) multiply_registers(two_blocks, 0, in, r, p, ahead, lines);
}

/* All rows, over `in->words` words, a multiple of `words`, 16 or fewer. */
INLINE void multiply_words(const AmxProduct *in, int64_t words, int64_t rows, int64_t first, int64_t last) {
    /* blocks of rows fetch one part after the other */
    const int64_t blocks = (rows + AMX_ROWS - 1) / AMX_ROWS;
    /* a block alone waits for memory anyway */
    const int64_t lines = in->next && blocks > 1 ? (PANEL + blocks - 1) / blocks : 0;
    for (int64_t r = 0, size, ahead = 0; r < rows; r += size, ahead += in->words / PANEL * lines) {
        size = rows - r < AMX_ROWS ? rows - r : AMX_ROWS;
        if (r == 0 || size < AMX_ROWS) begin_amx(size, words);
        const int64_t own = ahead < in->words ? lines : 0;
        if (size > 16) multiply_panels(1, in, r, first, last, ahead, own);
        else multiply_panels(0, in, r, first, last, ahead, own);
    }
}

/* All rows, and panels `first` to `last`. The caller ends with `end_amx`. */
static __attribute__((unused)) void multiply_amx(const AmxProduct *in, int64_t rows, int64_t first, int64_t last) {
    const int64_t whole = in->words / PANEL * PANEL;
    AmxProduct own = *in;
    own.words = whole;
    if (whole) multiply_words(&own, PANEL, rows, first, last);
    if (whole == in->words) return;
    own = (AmxProduct){in->x + word_place(in, whole), in->x_stride, in->packed + whole * PANEL, in->panel,
                       in->words - whole, in->out, in->out_stride, in->adds || whole, 0, in->tiled};
    multiply_words(&own, in->words - whole, rows, first, last);
}

#endif
#endif
