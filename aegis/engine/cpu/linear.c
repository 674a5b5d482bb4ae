#include "linear.h"

#include "threads.h"
#include "tiles.h"
#include "vectors.h"

#define DIGITS_ROWS 2
#define TILE_ROWS 6
#define AHEAD 4096 /* bytes: what processors foresee ends with a page */
#define SOON 2048  /* bytes: or with a pause */
#define GROUPS_AHEAD 4

/* Rows of the next tile, of so many left: tiles are about equal, for small ones wait for their sums. */
static int next_tile(int left, int most) {
    int tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
}

typedef struct {
    const linear_t *layer;
    const input_t *input;
    void *out;
    int bf16, halves; /* halves: results are stored in bfloat16 */
} product_t;

/* A row of bfloat16 is that much longer, so that those of a tile do not lie in the same lines of a cache. */
#define HALVES_PAD 32

INLINE uint16_t *halves_at(const input_t *input, int row) {
    return input->halves + (int64_t)row * (input->columns + HALVES_PAD);
}

int64_t halves_bytes(int64_t rows, int64_t columns) { return 2 * (rows + TILE_PAD) * (columns + HALVES_PAD); }

int64_t digits_bytes(int64_t rows, int64_t columns, int digits) { return (rows * digits + TILE_PAD) * columns; }

/* The results of 16 rows of the weight from `row` on, for row `m` of the input. */
INLINE void put(const product_t *p, int m, int64_t row, __m512 sums) {
    const linear_t *layer = p->layer;
    if (layer->bias) {
        sums = _mm512_add_ps(rounded(sums, p->bf16), loaded(layer->bias, row, p->bf16));
    }
    const int64_t at = (int64_t)m * layer->rows + row;
    if (p->halves)
        store_halves((uint16_t *)p->out + at, sums);
    else
        _mm512_storeu_ps((float *)p->out + at, rounded(sums, p->bf16));
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
    const int narrow = p->layer->form == NARROW, pairs = p->layer->columns / 2;
    const uint16_t *lower = (const uint16_t *)p->layer->weight + block * BLOCK * 2 * pairs;
    const uint16_t *upper = lower + (narrow ? BLOCK * pairs : BLOCK); /* 32 rows on */
    const int step = narrow ? BLOCK : 2 * BLOCK;
    const uint32_t *x = (const uint32_t *)halves_at(p->input, first);
    __m512 sums[8][4];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) sums[m][j] = _mm512_setzero_ps();
    for (int k = 0; k < pairs; k++, lower += step, upper += step) {
        __m512i w[4];
        for (int j = 0; j < 4; j++) {
            const uint16_t *weight = (j < 2 ? lower : upper) + 32 * (j % 2);
            _mm_prefetch((const char *)weight + AHEAD, _MM_HINT_T0);
            w[j] = _mm512_loadu_si512(weight);
        }
        for (int m = 0; m < count; m++) {
            __m512i pair = _mm512_set1_epi32((int)x[(int64_t)m * (pairs + HALVES_PAD / 2) + k]);
            for (int j = 0; j < 4; j++) sums[m][j] = dot(sums[m][j], w[j], pair);
        }
    }
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) put(p, first + m, block * BLOCK + 16 * j, sums[m][j]);
}

/* Sums of digits: the more significant ones come before. */
INLINE __m512 add_digit(__m512 total, __m512i sum) {
    return _mm512_fmadd_ps(total, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sum));
}

INLINE void put_digits(const product_t *p, int m, int64_t row, __m512 total) {
    __m512 scale = _mm512_loadu_ps((const float *)p->layer->scales + row);
    put(p, m, row, _mm512_mul_ps(_mm512_mul_ps(total, scale), _mm512_set1_ps(p->input->units[m])));
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
        for (int j = 0; j < 4; j++) {
            _mm_prefetch((const char *)weight + SOON + 64 * j, _MM_HINT_T0);
            w[j] = _mm512_xor_si512(_mm512_loadu_si512(weight + 64 * j), flip);
        }
        for (int m = 0; m < count * digits; m++) {
            __m512i four = _mm512_set1_epi32(x[(int64_t)m * fours + k]);
            for (int j = 0; j < 4; j++) sums[m][j] = _mm512_dpbusd_epi32(sums[m][j], w[j], four);
        }
    }
    for (int m = 0; m < count; m++) {
        const int32_t *added = p->input->sums + (int64_t)(first + m) * digits;
        for (int j = 0; j < 4; j++) {
            __m512 total = _mm512_setzero_ps();
            for (int d = 0; d < digits; d++)
                total = add_digit(total, _mm512_sub_epi32(sums[m * digits + d][j], _mm512_set1_epi32(128 * added[d])));
            put_digits(p, first + m, block * BLOCK + 16 * j, total);
        }
    }
}

/* What bytes are looked up by. */
static struct {
    /* Of four columns, the four bytes of each row beside each other: rows 0 to 15 with 32 to 47, then 16 to 31 with 48
       to 63. */
    uint8_t fours[2][64];
    /* The bytes of the bfloat16 of a number, and the order of four columns of 16 rows in two pairs of columns. */
    uint8_t lower[128], higher[128], pairs[2][64];
    /* The numbers of four bits, and the order of two columns of 16 rows beside each other. */
    float digits[16];
    uint16_t beside[32];
} tables __attribute__((aligned(64)));

static void make_tables(void) {
    for (int row = 0; row < 32; row++)
        for (int column = 0; column < 4; column++)
            tables.fours[row / 16][row % 16 * 4 + column] = (uint8_t)(column * 32 + row);
    for (int at = 0; at < 128; at++) {
        float value = (float)at;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        tables.lower[at] = (uint8_t)(bits >> 16);
        tables.higher[at] = (uint8_t)(bits >> 24);
    }
    for (int at = 0; at < 64; at++) { /* byte `at` of the result: of row at / 4, column at / 2 % 2 */
        tables.pairs[0][at] = (uint8_t)(at / 4 * 4 + at / 2 % 2 + at % 2 * 64);
        tables.pairs[1][at] = (uint8_t)(tables.pairs[0][at] + 2);
    }
    for (int at = 0; at < 16; at++) tables.digits[at] = (float)(at - 8);
    for (int at = 0; at < 32; at++) tables.beside[at] = (uint16_t)(at / 2 + at % 2 * 16);
}

void set_up_products(void) {
    make_tables();
    ask_for_tiles();
}

/* Sums over the columns of a group for `count` rows of digits. A function of its own, for compilers would else keep
   what is around it in registers, and these sums in memory. */
INLINE void group_tile(__m512i (*to)[4], const uint8_t *weight, const int8_t *x, int group, int columns,
                       const int count) {
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i order[2] = {_mm512_loadu_si512(tables.fours[0]), _mm512_loadu_si512(tables.fours[1])};
    __m512i sums[8][4];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) sums[m][j] = _mm512_setzero_si512();
    for (int k = 0; k < group; k += 4, weight += 128) {
        _mm_prefetch((const char *)weight + SOON, _MM_HINT_T0);
        _mm_prefetch((const char *)weight + SOON + 64, _MM_HINT_T0);
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

/* Of a group of columns for a block: scales and zeros of bfloat16, in turn. */
INLINE const uint16_t *scales_of(const linear_t *layer, int group, int64_t block) {
    return (const uint16_t *)layer->scales + ((int64_t)group * layer->rows + block * BLOCK) * 2;
}

/* Those of the next groups lie a row of groups on each, where processors foresee nothing. */
INLINE void foresee_scales(const linear_t *layer, int group, int64_t block) {
    const char *scales = (const char *)scales_of(layer, group + GROUPS_AHEAD, block);
    for (int j = 0; j < 4; j++) _mm_prefetch(scales + 64 * j, _MM_HINT_T0);
}

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
        const uint16_t *scales = scales_of(layer, g, block);
        foresee_scales(layer, g, block);
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

#define PIECE_ROWS 512
#define PIECE_BLOCKS 4
#define SHARED_INPUT (1 << 19)

/* Columns that are unpacked at once: for few rows no more than the first cache holds, for many so many that sums are
   seldom read and written. */
enum { SHORT_PIECE = 128, LONG_PIECE = 512, SHORT_PIECE_ROWS = 32 };

/* Integers as the bfloat16 they are, in the order of weights of that type: `pairs` columns by two of a block. The bytes
   of a number are looked up by its absolute value; of 128, which is beyond the tables, the lower one is 0's. */
static void unpack_bytes(const uint8_t *from, uint16_t *to, int pairs) {
    const __m512i low[2] = {_mm512_loadu_si512(tables.lower), _mm512_loadu_si512(tables.lower + 64)};
    const __m512i high[2] = {_mm512_loadu_si512(tables.higher), _mm512_loadu_si512(tables.higher + 64)};
    const __m512i order[2] = {_mm512_loadu_si512(tables.pairs[0]), _mm512_loadu_si512(tables.pairs[1])};
    const __m512i sign = _mm512_set1_epi8((char)0x80), of_128 = _mm512_set1_epi8(0x43);
    for (int k = 0; k < pairs; k += 2, from += 4 * BLOCK, to += 4 * BLOCK)
        for (int j = 0; j < 4; j++) {
            _mm_prefetch((const char *)from + SOON + 64 * j, _MM_HINT_T0);
            __m512i value = _mm512_loadu_si512(from + 64 * j), size = _mm512_abs_epi8(value);
            __m512i lows = _mm512_permutex2var_epi8(low[0], size, low[1]);
            __m512i highs = _mm512_permutex2var_epi8(high[0], size, high[1]);
            highs = _mm512_mask_mov_epi8(highs, _mm512_movepi8_mask(size), of_128);
            highs = _mm512_or_si512(highs, _mm512_and_si512(value, sign));
            _mm512_storeu_si512(to + 32 * j, _mm512_permutex2var_epi8(lows, order[0], highs));
            _mm512_storeu_si512(to + 2 * BLOCK + 32 * j, _mm512_permutex2var_epi8(lows, order[1], highs));
        }
}

/* Of four bits, with the scale and the zero of each row: the result is rounded to bfloat16, as torch rounds it. */
static void unpack_fours(const uint8_t *from, uint16_t *to, int pairs, const uint16_t *scales) {
    const __m512 table = _mm512_loadu_ps(tables.digits);
    const __m512i order = _mm512_loadu_si512(tables.beside);
    __m512 scale[4], zero[4];
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_loadu_si512(scales + 32 * j);
        scale[j] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        zero[j] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
    }
    for (int k = 0; k < pairs; k++, from += BLOCK, to += 2 * BLOCK) {
        _mm_prefetch((const char *)from + SOON, _MM_HINT_T0);
        for (int j = 0; j < 2; j++) {
            __m512i first = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(from + 16 * j)));
            __m512i second = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(from + 32 + 16 * j)));
            for (int high = 0; high < 2; high++) {
                const int rows = j + 2 * high;
                __m512 a = _mm512_fmadd_ps(_mm512_permutexvar_ps(first, table), scale[rows], zero[rows]);
                __m512 b = _mm512_fmadd_ps(_mm512_permutexvar_ps(second, table), scale[rows], zero[rows]);
                __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(b, a);
                _mm512_storeu_si512(to + 32 * rows, _mm512_permutexvar_epi16(order, halves));
                first = _mm512_srli_epi32(first, 4);
                second = _mm512_srli_epi32(second, 4);
            }
        }
    }
}

/* Adds to `totals [rows, BLOCK]` what these columns give. */
INLINE void piece_tile(const uint16_t *weight, int64_t ahead, const uint16_t *x, int64_t stride, int pairs,
                       float *totals, const int count) {
    __m512 sums[6][4];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) sums[m][j] = _mm512_loadu_ps(totals + m * BLOCK + 16 * j);
    for (int k = 0; k < pairs; k++, weight += 2 * BLOCK) {
        __m512i w[4];
        for (int j = 0; j < 4; j++) {
            if (ahead) _mm_prefetch((const char *)(weight + 32 * j) + ahead, _MM_HINT_T0);
            w[j] = _mm512_loadu_si512(weight + 32 * j);
        }
        for (int m = 0; m < count; m++) {
            uint32_t pair;
            memcpy(&pair, x + m * stride + 2 * k, 4);
            for (int j = 0; j < 4; j++) sums[m][j] = dot(sums[m][j], w[j], _mm512_set1_epi32((int)pair));
        }
    }
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(totals + m * BLOCK + 16 * j, sums[m][j]);
}

static void piece_by_vectors(const uint16_t *weight, const uint16_t *x, int64_t stride, int pairs, float *totals,
                             int rows, int64_t ahead) {
    for (int some; rows; rows -= some, x += some * stride, totals += some * BLOCK, ahead = 0) {
        some = next_tile(rows, 6);
        switch (some) {
        case 1: piece_tile(weight, ahead, x, stride, pairs, totals, 1); break;
        case 2: piece_tile(weight, ahead, x, stride, pairs, totals, 2); break;
        case 3: piece_tile(weight, ahead, x, stride, pairs, totals, 3); break;
        case 4: piece_tile(weight, ahead, x, stride, pairs, totals, 4); break;
        case 5: piece_tile(weight, ahead, x, stride, pairs, totals, 5); break;
        default: piece_tile(weight, ahead, x, stride, pairs, totals, 6);
        }
    }
}

/* What `columns` of a block from `start` on are in bfloat16. */
static void unpack(const linear_t *layer, int64_t block, int start, int columns, uint16_t *to) {
    const int64_t at = (block * layer->columns + start) * BLOCK;
    if (layer->form == INT8) {
        unpack_bytes((const uint8_t *)layer->weight + at, to, columns / 2);
        return;
    }
    const uint8_t *from = (const uint8_t *)layer->weight + at / 2;
    for (int done = 0, here; done < columns; done += here) {
        const int group = (start + done) / layer->group, left = (group + 1) * layer->group - start - done;
        here = left < columns - done ? left : columns - done;
        foresee_scales(layer, group, block);
        unpack_fours(from + done * BLOCK / 2, to + done * BLOCK, here / 2, scales_of(layer, group, block));
    }
}

/* Rows of bfloat16, of which all are multiplied by a piece of the weight, made bfloat16 too, while it is in the cache.
   The blocks from `block` to `stop` share what is read of the rows. */
static void pieces(const product_t *p, int64_t block, int64_t stop, int first, int rows) {
    const linear_t *layer = p->layer;
    const int columns = layer->columns, stride = columns + HALVES_PAD;
    const int narrow = layer->form == NARROW, packed = narrow || layer->form == PACKED;
    const tiled_t tiled = narrow ? (tiled_t){2 * BLOCK, (int64_t)BLOCK * columns} : WIDE;
    const int most = rows > SHORT_PIECE_ROWS ? LONG_PIECE : SHORT_PIECE;
    uint16_t unpacked[LONG_PIECE * BLOCK] __attribute__((aligned(64)));
    float totals[PIECE_BLOCKS][PIECE_ROWS * BLOCK] __attribute__((aligned(64)));
    const int high = tiles_are_there && rows >= TILES_ROWS_MIN ? next_tile(rows, 16) : 0;
    tile_config_t before;
    if (high) before = tiles_begin(high);
    for (int64_t each = block; !high && each < stop; each++)
        memset(totals[each - block], 0, sizeof(float) * rows * BLOCK);
    for (int start = 0; start < columns; start += most) {
        const int here = columns - start < most ? columns - start : most;
        const uint16_t *x = halves_at(p->input, first) + start, *weight = unpacked;
        for (int64_t each = block; each < stop; each++) {
            if (packed)
                weight = (const uint16_t *)layer->weight + (each * columns * BLOCK) + start * tiled.pair / 4;
            else
                unpack(layer, each, start, here, unpacked);
            if (high)
                tiles_add(weight, tiled, x, 2 * stride, 2 * here, totals[each - block], rows, high, 0, !start);
            else
                piece_by_vectors(weight, x, stride, here / 2, totals[each - block], rows, packed ? AHEAD : 0);
        }
    }
    if (high) tiles_end(&before);
    for (int64_t each = block; each < stop; each++)
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < 4; j++) {
                const int64_t row = each * BLOCK + 16 * j;
                __m512 total = _mm512_loadu_ps(totals[each - block] + m * BLOCK + 16 * j);
                if (layer->form == INT8)
                    total = _mm512_mul_ps(total, _mm512_loadu_ps((const float *)layer->scales + row));
                put(p, first + m, row, total);
            }
}

/* The same of integers, as they are, by rows of digits. */
static void digit_pieces(const product_t *p, int64_t block, int64_t stop, int first, int rows) {
    const linear_t *layer = p->layer;
    const int columns = layer->columns, digits = p->input->digits;
    int32_t totals[PIECE_BLOCKS][PIECE_ROWS * BLOCK] __attribute__((aligned(64)));
    const int high = next_tile(rows * digits, 16);
    const tile_config_t before = tiles_begin(high);
    for (int start = 0; start < columns; start += 2 * LONG_PIECE) {
        const int here = columns - start < 2 * LONG_PIECE ? columns - start : 2 * LONG_PIECE;
        const int8_t *x = p->input->bytes + (int64_t)first * digits * columns + start;
        for (int64_t each = block; each < stop; each++)
            tiles_add((const int8_t *)layer->weight + (each * columns + start) * BLOCK, WIDE, x, columns, here,
                      totals[each - block], rows * digits, high, 1, !start);
    }
    tiles_end(&before);
    for (int64_t each = block; each < stop; each++)
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < 4; j++) {
                const int32_t *sums = totals[each - block] + m * digits * BLOCK + 16 * j;
                __m512 total = _mm512_setzero_ps();
                for (int d = 0; d < digits; d++) total = add_digit(total, _mm512_load_si512(sums + d * BLOCK));
                put_digits(p, first + m, each * BLOCK + 16 * j, total);
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
                if (p->bf16) {
                    __m512i w = _mm512_loadu_si512((const uint16_t *)p->layer->weight + row * columns + k);
                    sums[m] = dot(sums[m], w, _mm512_loadu_si512(halves_at(p->input, first + m) + k));
                } else {
                    __m512 w = _mm512_loadu_ps((const float *)p->layer->weight + row * columns + k);
                    const float *x = p->input->floats + (int64_t)(first + m) * columns;
                    sums[m] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x + k), sums[m]);
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
            const int64_t at = (int64_t)(first + m) * p->layer->rows + row;
            if (p->halves)
                ((uint16_t *)p->out)[at] = (uint16_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(halves_of(sum)));
            else
                ((float *)p->out)[at] = _mm512_cvtss_f32(sum);
        }
    }
}

INLINE void tile(const product_t *p, int64_t block, int first, const int count) {
    switch (p->layer->form) {
    case ROWS: rows_tile(p, block, first, count); break;
    case NARROW:
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

/* Whether integers are multiplied by digits of the input: where tiles do that, or there are few rows. */
static int by_digits(const input_t *input, const linear_t *layer, int bf16) {
    const int few = !bf16 || input->rows <= DIGITS_ROWS;
    return (layer->form == INT8 && (few || tiles_are_there)) || (layer->form == INT4 && few);
}

/* Whether the weight is read piece by piece, in bfloat16. */
static int in_pieces(const input_t *input, const linear_t *layer, int bf16) {
    if (!bf16 || layer->form == ROWS || by_digits(input, layer, bf16)) return 0;
    if (layer->form == NARROW && !tiles_are_there) return 0;
    return layer->form == INT8 || layer->form == INT4 || input->rows > TILE_ROWS;
}

static void blocks(void *context, int64_t from, int64_t to) {
    const product_t *p = context;
    const int rows = p->input->rows, form = p->layer->form;
    const int of_digits = form == INT8 && tiles_are_there && rows > DIGITS_ROWS;
    if (of_digits || in_pieces(p->input, p->layer, p->bf16)) {
        const int many = (int64_t)rows * p->layer->columns > SHARED_INPUT ? PIECE_BLOCKS : 1;
        const int most = PIECE_ROWS / (of_digits ? p->input->digits : 1);
        for (int64_t block = from, stop; block < to; block = stop) {
            stop = block + many < to ? block + many : to;
            for (int first = 0, some; first < rows; first += some) { /* about equal: a few alone would miss the tiles */
                some = next_tile(rows - first, most);
                (of_digits ? digit_pieces : pieces)(p, block, stop, first, some);
            }
        }
        return;
    }
    const int most = form == INT8 ? (p->bf16 ? 3 : 2) : form == INT4 ? 2 : 6;
    for (int64_t block = from; block < to; block++) {
        for (int first = 0, count; first < rows; first += count) {
            count = next_tile(rows - first, most);
            switch (count) {
            case 1: tile(p, block, first, 1); break;
            case 2: tile(p, block, first, 2); break;
            case 3: tile(p, block, first, 3); break;
            case 4: tile(p, block, first, 4); break;
            case 5: tile(p, block, first, 5); break;
            default: tile(p, block, first, 6);
            }
        }
    }
}

static void multiply_to(const product_t *product, int threads) {
    const linear_t *layer = product->layer;
    const int64_t count = layer->form == ROWS ? (layer->rows + 15) / 16 : layer->rows / BLOCK;
    shared_out(blocks, (void *)product, count, threads);
}

void multiply(const linear_t *layer, const input_t *input, float *out, int bf16, int threads) {
    const product_t product = {layer, input, out, bf16, 0};
    multiply_to(&product, threads);
}

/* Of the row's `floats`. */
static void make_digits(input_t *input, int row, const float *floats) {
    const int columns = input->columns, digits = input->digits;
    const float worth = digits == 2 ? 127.0f * 257.0f : 127.0f * 65793.0f;
    __m512i most = _mm512_setzero_si512(); /* as integers, of which NaN are the largest, for then nothing is a number */
    for (int k = 0; k < columns; k += 16)
        most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(floats + k))));
    float largest = _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epi32(most))));
    float unit = largest == 0 ? 1e-30f : largest / (worth - 4.0f);
    __m512 divisor = _mm512_set1_ps(unit);
    int8_t *to = input->bytes + (int64_t)row * digits * columns;
    __m512i sums[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int k = 0; k < columns; k += 16) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_loadu_ps(floats + k), divisor));
        for (int d = digits - 1; d >= 0; d--) { /* the least significant first, each from -128 to 127 */
            __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
            _mm_storeu_si128((void *)(to + (int64_t)d * columns + k), _mm512_cvtepi32_epi8(low));
            sums[d] = _mm512_add_epi32(sums[d], low);
            whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
        }
    }
    input->units[row] = unit;
    for (int d = 0; d < digits; d++) input->sums[row * digits + d] = _mm512_reduce_add_epi32(sums[d]);
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
    const int columns = input->columns, by = by_digits(input, layer, bf16);
    input->digits = bf16 ? 2 : 3;
    for (int m = 0; m < input->rows; m++) {
        const float *floats = input->floats + (int64_t)m * columns;
        if (by) make_digits(input, m, floats);
        for (int k = 0; !by && bf16 && k < columns; k += 16)
            store_halves(halves_at(input, m) + k, _mm512_loadu_ps(floats + k));
    }
    if (by && layer->form == INT4) sum_groups(input, layer->group);
}

/* Returns where it ends. */
static char *cut_input(input_t *input, const linear_t *layer, char *scratch) {
    const int64_t columns = layer->columns, rows = input->rows;
    input->halves = (uint16_t *)scratch;
    if (!by_digits(input, layer, 1)) return scratch + halves_bytes(rows, columns);
    input->floats = (float *)scratch;
    input->units = input->floats + columns;
    input->sums = (int32_t *)(input->units + rows);
    input->group_sums = (float *)(input->sums + 2 * rows);
    input->bytes = (int8_t *)(input->group_sums + rows * (columns / 32 + 1));
    return (char *)input->bytes + digits_bytes(rows, columns, 2);
}

/* The product of `from [rows, columns]` to `to [rows, layer rows]`, both in bfloat16. `scratch` has
   `aegis_product_bytes`. */
void aegis_product(const linear_t *layer, const uint16_t *from, uint16_t *to, int64_t rows, char *scratch,
                   int threads) {
    const int64_t columns = layer->columns;
    input_t input = {.rows = (int32_t)rows, .columns = layer->columns, .digits = 2};
    const product_t product = {layer, &input, to, 1, 1};
    cut_input(&input, layer, scratch);
    const int by = by_digits(&input, layer, 1);
    for (int m = 0; m < rows; m++, from += columns) {
        if (!by) {
            memcpy(halves_at(&input, m), from, sizeof(uint16_t) * columns);
            continue;
        }
        for (int k = 0; k < columns; k += 16) _mm512_storeu_ps(input.floats + k, widened(from + k));
        make_digits(&input, m, input.floats);
    }
    if (by && layer->form == INT4) sum_groups(&input, layer->group);
    multiply_to(&product, threads);
}

int64_t aegis_product_bytes(const linear_t *layer, int64_t rows) {
    input_t input = {.rows = (int32_t)rows, .columns = layer->columns};
    return cut_input(&input, layer, NULL) - (char *)NULL;
}
