/* Products with a weight, as weight images hold it, for processors with AVX-512.

   Packed weights lie in blocks of 64 rows, or, `NARROW` ones of bfloat16, of 32, as oneDNN has them for tiles. A block
   goes through the columns in order: one column of float32, two of bfloat16, four of 8 bits at a time, its rows beside
   each other. Of 4 bits a column is 32 bytes, of which byte i holds row i in its low half and row i + 32 in its high
   one. The orders are oneDNN's and torch's; Python checks them.

   With integers of 8 bits the input becomes whole numbers of 16 bits (24 for float32) in digits of a byte each, so that
   sums are exact, and so it does for one or two rows with integers of 4; how far that is from the input is said in
   aegis/engine/quantised/digits.py. For more rows weights become bfloat16, where they are not (`pieces`). */

#ifndef AEGIS_LINEAR_H
#define AEGIS_LINEAR_H

#include <stdint.h>

enum form { ROWS, PACKED, INT8, INT4, NARROW };

#define BLOCK 64
#define TILE_PAD 15 /* rows of the input that are read, and whose results are not */

typedef struct {
    const void *weight, *bias, *scales; /* NULL: none */
    int32_t rows, columns, form, group; /* columns of INT4 that share a scale */
} linear_t;

/* The input of products: [rows, columns] in the forms that they read. */
typedef struct {
    int32_t rows, columns, digits;
    float *floats;     /* as they are */
    uint16_t *halves;  /* bfloat16, `halves_bytes` */
    int8_t *bytes;     /* [rows, digits, columns], most significant digits first; `digits_bytes` */
    float *units;      /* [rows]: what 1 stands for */
    int32_t *sums;     /* [rows, digits]: of the digits */
    float *group_sums; /* [rows, columns / group]: of the whole numbers */
} input_t;

/* Once, before any product. */
void set_up_products(void);

int64_t halves_bytes(int64_t rows, int64_t columns);
int64_t digits_bytes(int64_t rows, int64_t columns, int digits);

/* What of `input` this layer reads, made of `floats`. */
void prepare(input_t *input, const linear_t *layer, int bf16);

/* [input rows, layer rows] in float32; `bf16`: rounded to it, as are weights and biases. */
void multiply(const linear_t *layer, const input_t *input, float *out, int bf16, int threads);

#endif
