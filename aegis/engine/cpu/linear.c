#include "linear.h"

#include "vectors.h"

typedef struct {
    const linear_t *layer;
    const input_t *input;
    float *out;
    int bf16;
} product_t;

/* The results of 16 rows of the weight from `row` on, for row `m` of the input. */
INLINE void put(const product_t *p, int m, int64_t row, __m512 sums) {
    const linear_t *layer = p->layer;
    if (layer->bias) {
        sums = _mm512_add_ps(rounded(sums, p->bf16), loaded(layer->bias, row, p->bf16));
    }
    _mm512_storeu_ps(p->out + (int64_t)m * layer->rows + row, rounded(sums, p->bf16));
}

INLINE __m512 dot(__m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

INLINE void floats_tile(const product_t *p, int64_t block, int first, const int count) {
    const int columns = p->layer->columns;
    const float *weight = (const float *)p->layer->weight + block * BLOCK * columns;
    const float *x = p->input->floats + (int64_t)first * columns;
    __m512 sums[8][4];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) sums[m][j] = _mm512_setzero_ps();
    for (int k = 0; k < columns; k++, weight += BLOCK) {
        __m512 w[4];
        for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_ps(weight + 16 * j);
        for (int m = 0; m < count; m++) {
            __m512 value = _mm512_set1_ps(x[(int64_t)m * columns + k]);
            for (int j = 0; j < 4; j++) sums[m][j] = _mm512_fmadd_ps(w[j], value, sums[m][j]);
        }
    }
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) put(p, first + m, block * BLOCK + 16 * j, sums[m][j]);
}

INLINE void halves_tile(const product_t *p, int64_t block, int first, const int count) {
    const int pairs = p->layer->columns / 2;
    const uint16_t *weight = (const uint16_t *)p->layer->weight + block * BLOCK * 2 * pairs;
    const uint32_t *x = (const uint32_t *)p->input->halves + (int64_t)first * pairs;
    __m512 sums[8][4];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) sums[m][j] = _mm512_setzero_ps();
    for (int k = 0; k < pairs; k++, weight += 2 * BLOCK) {
        __m512i w[4];
        for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_si512(weight + 32 * j);
        for (int m = 0; m < count; m++) {
            __m512i pair = _mm512_set1_epi32((int)x[(int64_t)m * pairs + k]);
            for (int j = 0; j < 4; j++) sums[m][j] = dot(sums[m][j], w[j], pair);
        }
    }
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) put(p, first + m, block * BLOCK + 16 * j, sums[m][j]);
}

INLINE void bytes_tile(const product_t *p, int64_t block, int first, const int count, const int digits) {
    const int fours = p->layer->columns / 4;
    const uint8_t *weight = (const uint8_t *)p->layer->weight + block * BLOCK * 4 * fours;
    const int32_t *x = (const int32_t *)p->input->bytes + (int64_t)first * digits * fours;
    const __m512i flip = _mm512_set1_epi8((char)0x80); /* adds 128, so that weights have no sign */
    __m512i sums[9][4];
    for (int m = 0; m < count * digits; m++)
        for (int j = 0; j < 4; j++) sums[m][j] = _mm512_setzero_si512();
    for (int k = 0; k < fours; k++, weight += 4 * BLOCK) {
        __m512i w[4];
        for (int j = 0; j < 4; j++) w[j] = _mm512_xor_si512(_mm512_loadu_si512(weight + 64 * j), flip);
        for (int m = 0; m < count * digits; m++) {
            __m512i four = _mm512_set1_epi32(x[(int64_t)m * fours + k]);
            for (int j = 0; j < 4; j++) sums[m][j] = _mm512_dpbusd_epi32(sums[m][j], w[j], four);
        }
    }
    for (int m = 0; m < count; m++) {
        const int32_t *added = p->input->sums + (int64_t)(first + m) * digits;
        __m512 unit = _mm512_set1_ps(p->input->units[first + m]);
        for (int j = 0; j < 4; j++) {
            int64_t row = block * BLOCK + 16 * j;
            __m512 total = _mm512_setzero_ps();
            for (int d = 0; d < digits; d++) {
                __m512i sum = _mm512_sub_epi32(sums[m * digits + d][j], _mm512_set1_epi32(128 * added[d]));
                total = _mm512_fmadd_ps(total, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sum));
            }
            __m512 scale = _mm512_loadu_ps((const float *)p->layer->scales + row);
            put(p, first + m, row, _mm512_mul_ps(_mm512_mul_ps(total, scale), unit));
        }
    }
}

/* Of four columns, the four bytes of each row beside each other: rows 0 to 15 with 32 to 47, then 16 to 31 with 48 to
   63. */
INLINE void order_fours(__m512i order[2]) {
    uint8_t index[2][64];
    for (int row = 0; row < 32; row++)
        for (int column = 0; column < 4; column++)
            index[row / 16][row % 16 * 4 + column] = (uint8_t)(column * 32 + row);
    order[0] = _mm512_loadu_si512(index[0]);
    order[1] = _mm512_loadu_si512(index[1]);
}

/* Sums over the columns of a group for `count` rows of digits. A function of its own, for compilers would else keep what
   is around it in registers, and these sums in memory. */
INLINE void group_tile(__m512i (*to)[4], const uint8_t *weight, const int8_t *x, int group, int columns,
                       const int count) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i sums[8][4], order[2];
    order_fours(order);
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) sums[m][j] = _mm512_setzero_si512();
    for (int k = 0; k < group; k += 4, weight += 128) {
        __m512i here = _mm512_loadu_si512(weight), there = _mm512_loadu_si512(weight + 64), w[4];
        for (int j = 0; j < 2; j++) {
            __m512i both = _mm512_permutex2var_epi8(here, order[j], there);
            w[j] = _mm512_and_si512(both, low);
            w[j + 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
        for (int m = 0; m < count; m++) {
            int32_t four;
            memcpy(&four, x + (int64_t)m * columns + k, 4);
            for (int j = 0; j < 4; j++)
                sums[m][j] = _mm512_dpbusd_epi32(sums[m][j], w[j], _mm512_set1_epi32(four));
        }
    }
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) to[m][j] = sums[m][j];
}

#define GROUP_TILE(count)                                                                                             \
    static __attribute__((noinline)) void group_tile_##count(__m512i (*to)[4], const uint8_t *weight, const int8_t *x, \
                                                             int group, int columns) {                               \
        group_tile(to, weight, x, group, columns, count);                                                            \
    }
GROUP_TILE(2)
GROUP_TILE(4)

/* Scales and zeros of bfloat16, in turn. */
INLINE void fours_tile(const product_t *p, int64_t block, int first, const int count) {
    const linear_t *layer = p->layer;
    const int columns = layer->columns, group = layer->group, groups = columns / group;
    const uint8_t *weight = (const uint8_t *)layer->weight + block * (BLOCK / 2) * columns;
    const int8_t *x = p->input->bytes + (int64_t)first * 2 * columns;
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    __m512 totals[2][4];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) totals[m][j] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, weight += (BLOCK / 2) * group, x += group) {
        __m512i sums[4][4];
        (count == 1 ? group_tile_2 : group_tile_4)(sums, weight, x, group, columns);
        const uint16_t *scales = (const uint16_t *)layer->scales + ((int64_t)g * layer->rows + block * BLOCK) * 2;
        for (int j = 0; j < 4; j++) {
            __m512i both = _mm512_loadu_si512(scales + 32 * j);
            __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
            zero = _mm512_fnmadd_ps(scale, _mm512_set1_ps(8.0f), zero);
            for (int m = 0; m < count; m++) {
                __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[2 * m][j], 8), sums[2 * m + 1][j]);
                __m512 added = _mm512_set1_ps(p->input->group_sums[(int64_t)(first + m) * groups + g]);
                totals[m][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, totals[m][j]);
                totals[m][j] = _mm512_fmadd_ps(added, zero, totals[m][j]);
            }
        }
    }
    for (int m = 0; m < count; m++) {
        __m512 unit = _mm512_set1_ps(p->input->units[first + m]);
        for (int j = 0; j < 4; j++) put(p, first + m, block * BLOCK + 16 * j, _mm512_mul_ps(totals[m][j], unit));
    }
}

/* Weights in rows: each result is a sum along one. */
INLINE void rows_tile(const product_t *p, int64_t block, int first, const int count) {
    const int columns = p->layer->columns;
    int64_t stop = (block + 1) * 16 < p->layer->rows ? (block + 1) * 16 : p->layer->rows;
    for (int64_t row = block * 16; row < stop; row++) {
        __m512 sums[8];
        for (int m = 0; m < count; m++) sums[m] = _mm512_setzero_ps();
        for (int k = 0; k < columns; k += p->bf16 ? 32 : 16) {
            for (int m = 0; m < count; m++) {
                int64_t at = (int64_t)(first + m) * columns + k;
                if (p->bf16) {
                    __m512i w = _mm512_loadu_si512((const uint16_t *)p->layer->weight + row * columns + k);
                    sums[m] = dot(sums[m], w, _mm512_loadu_si512(p->input->halves + at));
                } else {
                    __m512 w = _mm512_loadu_ps((const float *)p->layer->weight + row * columns + k);
                    sums[m] = _mm512_fmadd_ps(w, _mm512_loadu_ps(p->input->floats + at), sums[m]);
                }
            }
        }
        for (int m = 0; m < count; m++) {
            __m512 sum = rounded(_mm512_set1_ps(_mm512_reduce_add_ps(sums[m])), p->bf16);
            if (p->layer->bias) {
                const void *bias = p->layer->bias;
                uint32_t bits = p->bf16 ? (uint32_t)((const uint16_t *)bias)[row] << 16 : ((const uint32_t *)bias)[row];
                sum = rounded(_mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_set1_epi32((int)bits))), p->bf16);
            }
            p->out[(int64_t)(first + m) * p->layer->rows + row] = _mm512_cvtss_f32(sum);
        }
    }
}

INLINE void tile(const product_t *p, int64_t block, int first, const int count) {
    switch (p->layer->form) {
    case ROWS: rows_tile(p, block, first, count); break;
    case PACKED:
        if (p->bf16)
            halves_tile(p, block, first, count);
        else
            floats_tile(p, block, first, count);
        break;
    case INT8:
        if (count > 3) break; /* never: there would be too many sums for the registers */
        if (p->bf16)
            bytes_tile(p, block, first, count, 2);
        else
            bytes_tile(p, block, first, count, 3);
        break;
    case INT4:
        if (count > 2) break;
        fours_tile(p, block, first, count);
    }
}

static void blocks(void *context, int64_t from, int64_t to) {
    const product_t *p = context;
    const int rows = p->input->rows, form = p->layer->form;
    const int most = form == INT8 ? (p->bf16 ? 3 : 2) : form == INT4 ? 2 : 6;
    for (int64_t block = from; block < to; block++) {
        for (int first = 0, count; first < rows; first += count) {
            count = rows - first < most ? rows - first : most;
            switch (count) {
            case 1: tile(p, block, first, 1); break;
            case 2: tile(p, block, first, 2); break;
            case 3: tile(p, block, first, 3); break;
            case 4: tile(p, block, first, 4); break;
            case 5: tile(p, block, first, 5); break;
            default: tile(p, block, first, 6); count = 6;
            }
        }
    }
}

void multiply(const linear_t *layer, const input_t *input, float *out, int bf16, int threads) {
    product_t product = {layer, input, out, bf16};
    shared_out(blocks, &product, layer->form == ROWS ? (layer->rows + 15) / 16 : layer->rows / BLOCK, threads);
}

static void make_digits(input_t *input, int bf16) {
    const int columns = input->columns, digits = bf16 ? 2 : 3;
    const float worth = bf16 ? 127.0f * 257.0f : 127.0f * 65793.0f;
    input->digits = digits;
    for (int m = 0; m < input->rows; m++) {
        const float *x = input->floats + (int64_t)m * columns;
        __m512 most = _mm512_setzero_ps();
        for (int k = 0; k < columns; k += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + k)));
        float largest = _mm512_reduce_max_ps(most);
        float unit = largest > 0 ? largest / (worth - 4.0f) : 1e-30f;
        __m512 divisor = _mm512_set1_ps(unit);
        int8_t *to = input->bytes + (int64_t)m * digits * columns;
        __m512i sums[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int k = 0; k < columns; k += 16) {
            __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_loadu_ps(x + k), divisor));
            for (int d = digits - 1; d >= 0; d--) { /* the least significant first, each from -128 to 127 */
                __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
                _mm_storeu_si128((void *)(to + (int64_t)d * columns + k), _mm512_cvtepi32_epi8(low));
                sums[d] = _mm512_add_epi32(sums[d], low);
                whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
            }
        }
        input->units[m] = unit;
        for (int d = 0; d < digits; d++) input->sums[m * digits + d] = _mm512_reduce_add_epi32(sums[d]);
    }
}

static void sum_groups(input_t *input, int group) {
    const int columns = input->columns, groups = columns / group;
    for (int m = 0; m < input->rows; m++)
        for (int g = 0; g < groups; g++) {
            const int8_t *high = input->bytes + (int64_t)m * 2 * columns + g * group, *low = high + columns;
            int32_t sum = 0;
            for (int k = 0; k < group; k++) sum += 256 * high[k] + low[k];
            input->group_sums[m * groups + g] = (float)sum;
        }
}

void prepare(input_t *input, const linear_t *layer, int bf16) {
    if (layer->form == INT8 || layer->form == INT4) make_digits(input, bf16);
    if (layer->form == INT4) sum_groups(input, layer->group);
    if (bf16 && (layer->form == ROWS || layer->form == PACKED)) {
        int64_t count = (int64_t)input->rows * input->columns;
        for (int64_t at = 0; at < count; at += 16) store_halves(input->halves + at, _mm512_loadu_ps(input->floats + at));
    }
}

/* Of which the last piece, returned, is for the result. */
static float *cut_input(input_t *input, const linear_t *layer, int64_t rows, char *scratch) {
    const int64_t wide = rows * layer->columns;
    input->floats = (float *)scratch;
    input->halves = (uint16_t *)(input->floats + wide);
    input->bytes = (int8_t *)(input->halves + wide);
    input->units = (float *)(input->bytes + 3 * wide + 64 - 3 * wide % 64);
    input->sums = (int32_t *)(input->units + rows);
    input->group_sums = (float *)(input->sums + 3 * rows);
    return input->group_sums + rows * (layer->columns / 32 + 1);
}

/* The product of `from [rows, columns]` to `to [rows, layer rows]`, both in bfloat16 or float32. `scratch` has
   `aegis_product_bytes`. */
void aegis_product(const linear_t *layer, const void *from, void *to, int64_t rows, int bf16, void *scratch,
                   int threads) {
    input_t input = {.rows = (int32_t)rows, .columns = layer->columns};
    float *out = cut_input(&input, layer, rows, scratch);
    for (int64_t at = 0; at < rows * layer->columns; at += 16)
        _mm512_storeu_ps(input.floats + at, loaded(from, at, bf16));
    prepare(&input, layer, bf16);
    multiply(layer, &input, bf16 ? out : to, bf16, threads);
    for (int64_t at = 0; bf16 && at < rows * layer->rows; at += 16)
        store_halves((uint16_t *)to + at, _mm512_loadu_ps(out + at));
}

int64_t aegis_product_bytes(const linear_t *layer, int64_t rows) {
    input_t input;
    return (char *)(cut_input(&input, layer, rows, NULL) + rows * layer->rows) - (char *)NULL;
}
