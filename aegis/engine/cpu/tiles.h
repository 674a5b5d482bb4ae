/* Products by the processor's tiles (AMX), of 16 rows by 64 bytes of columns at a time: 32 of bfloat16, 64 of integers.

   A tile of the weight is 16 pairs or fours of columns by 16 of the 64 rows of a block, as packed weights lie. What
   tiles a thread had set up before it has afterwards, for oneDNN uses them too. */

#ifndef AEGIS_TILES_H
#define AEGIS_TILES_H

#include "linear.h"
#include "vectors.h"

#define TILES_ROWS_MIN 3 /* With fewer, vectors are as fast. */

#if defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define AEGIS_HAS_TILES 1
#endif
#endif

/* Where the tiles of a block of the weight lie: bytes from one pair, or four, of columns to the next, and from the
   first 32 rows to the others. */
typedef struct {
    int64_t pair, half;
} tiled_t;

#define WIDE ((tiled_t){4 * BLOCK, 2 * BLOCK})

#ifdef AEGIS_HAS_TILES

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILES __attribute__((target("amx-tile,amx-bf16,amx-int8")))

/* Compilers do not know which memory the instructions of tiles read and write. */
#define IN_MEMORY(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config_t;

static int tiles_are_there;

/* The kernel lends their registers to processes that ask. */
static void ask_for_tiles(void) {
    unsigned a, b, c, d;
    const unsigned all = 1u << 22 | 1u << 24 | 1u << 25; /* bfloat16, tiles, integers */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & all) != all) return;
    tiles_are_there = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
}

/* Sets up tiles 0 to 3 for results of so many rows, 4 and 5 for the input, 6 and 7 for the weight. Returns what was
   there. */
TILES static tile_config_t tiles_begin(int rows) {
    tile_config_t before, own = {.palette = 1};
    _tile_storeconfig(&before);
    IN_MEMORY(&before);
    for (int at = 0; at < 8; at++) {
        own.bytes[at] = 64;
        own.rows[at] = (uint8_t)(at < 6 ? rows : 16);
    }
    IN_MEMORY(&own);
    _tile_loadconfig(&own);
    return before;
}

TILES static void tiles_end(const tile_config_t *before) {
    IN_MEMORY(before);
    if (before->palette)
        _tile_loadconfig(before);
    else
        _tile_release();
}

/* Sums of one or two tiles of the input by two of the weight. Of two by two each is loaded for two products. */
#define SUM(multiply)                                                                                                  \
    for (int64_t k = 0; k < bytes; k += 64, weight += 16 * pair) {                                                     \
        _tile_loadd(4, x + k, stride);                                                                                 \
        _tile_loadd(6, weight, pair);                                                                                  \
        multiply(0, 4, 6);                                                                                             \
        _tile_loadd(7, weight + 64, pair);                                                                             \
        multiply(1, 4, 7);                                                                                             \
        if (!two) continue;                                                                                            \
        _tile_loadd(5, second + k, stride);                                                                            \
        multiply(2, 5, 6);                                                                                             \
        multiply(3, 5, 7);                                                                                             \
    }

/* What 32 of a block's rows give for one or two tiles of the input, of `high` rows each. */
TILES static void tiles_add_half(const char *weight, int64_t pair, const char *x, int64_t stride, int64_t bytes,
                                 float *sums, int high, int two, int integers, int fresh) {
    const char *second = x + high * stride;
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 4 * BLOCK);
        _tile_loadd(1, sums + 16, 4 * BLOCK);
        if (two) _tile_loadd(2, sums + high * BLOCK, 4 * BLOCK);
        if (two) _tile_loadd(3, sums + high * BLOCK + 16, 4 * BLOCK);
    }
    if (integers)
        SUM(_tile_dpbssd)
    else
        SUM(_tile_dpbf16ps)
    _tile_stored(0, sums, 4 * BLOCK);
    _tile_stored(1, sums + 16, 4 * BLOCK);
    if (two) _tile_stored(2, sums + high * BLOCK, 4 * BLOCK);
    if (two) _tile_stored(3, sums + high * BLOCK + 16, 4 * BLOCK);
}

/* Adds to `sums [rows, BLOCK]`, of float or int32, what so many `bytes` of columns give; `fresh`: there are none yet.
   Rows are read, and sums written, up to a multiple of `high`, which was set up. */
TILES static void tiles_add(const void *weight, tiled_t tiled, const void *x, int64_t stride, int64_t bytes,
                            void *sums, int rows, int high, int integers, int fresh) {
    IN_MEMORY(weight);
    IN_MEMORY(x);
    IN_MEMORY(sums);
    for (int row = 0; row < rows; row += 2 * high)
        for (int half = 0; half < 2; half++)
            tiles_add_half((const char *)weight + half * tiled.half, tiled.pair, (const char *)x + row * stride, stride,
                           bytes, (float *)sums + row * BLOCK + 32 * half, high, row + high < rows, integers, fresh);
    IN_MEMORY(sums);
}

#else

typedef struct {
    int none;
} tile_config_t;

static const int tiles_are_there = 0;

static void ask_for_tiles(void) {}

static tile_config_t tiles_begin(int rows) { return (tile_config_t){rows}; }
static void tiles_end(const tile_config_t *before) { (void)before; }
static void tiles_add(const void *weight, tiled_t tiled, const void *x, int64_t stride, int64_t bytes, void *sums,
                      int rows, int high, int integers, int fresh) {
    (void)weight, (void)tiled, (void)x, (void)stride, (void)bytes, (void)sums;
    (void)rows, (void)high, (void)integers, (void)fresh;
}

#endif

#endif
