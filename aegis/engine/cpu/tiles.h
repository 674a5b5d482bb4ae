/* Products of bfloat16 by the processor's tiles (AMX), of 16 rows by 32 columns at a time.

   A tile of the weight is 16 pairs of columns by 16 of the 64 rows of a block, as packed weights lie. What tiles a
   thread had set up before it has afterwards, for oneDNN uses them too. */

#ifndef AEGIS_TILES_H
#define AEGIS_TILES_H

#include "linear.h"
#include "vectors.h"

#define TILES_ROWS_MIN 4 /* With fewer, vectors are as fast. */

#if defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define AEGIS_HAS_TILES 1
#endif
#endif

#ifdef AEGIS_HAS_TILES

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILES __attribute__((target("amx-tile,amx-bf16")))

/* Compilers do not know which memory the instructions of tiles read and write. */
#define IN_MEMORY(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config_t;

static int tiles_are_there;

/* The kernel lends their registers to processes that ask. */
__attribute__((constructor)) static void ask_for_tiles(void) {
    unsigned a, b, c, d;
    const unsigned bf16_and_tiles = 1u << 22 | 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & bf16_and_tiles) != bf16_and_tiles) return;
    tiles_are_there = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
}

/* Sets up tiles 0 to 3 for results of so many rows, 4 for the input and 5 to 7 for the weight. Returns what was there. */
TILES static tile_config_t tiles_begin(int rows) {
    tile_config_t before, own = {.palette = 1};
    _tile_storeconfig(&before);
    IN_MEMORY(&before);
    for (int at = 0; at < 8; at++) {
        own.bytes[at] = 64;
        own.rows[at] = (uint8_t)(at < 5 ? rows : 16);
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

/* Adds to `sums [rows, BLOCK]` the columns of a piece; rows are those that were set up. */
TILES static void tiles_add(const uint16_t *weight, const uint16_t *x, int64_t stride, int pairs, float *sums) {
    IN_MEMORY(weight);
    IN_MEMORY(x);
    IN_MEMORY(sums);
    _tile_loadd(0, sums, 4 * BLOCK);
    _tile_loadd(1, sums + 16, 4 * BLOCK);
    _tile_loadd(2, sums + 32, 4 * BLOCK);
    _tile_loadd(3, sums + 48, 4 * BLOCK);
    for (int k = 0; k < pairs; k += 16, weight += 32 * BLOCK) {
        _tile_loadd(4, x + 2 * k, 2 * stride);
        _tile_loadd(5, weight, 4 * BLOCK);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, weight + 32, 4 * BLOCK);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, weight + 64, 4 * BLOCK);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, weight + 96, 4 * BLOCK);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, 4 * BLOCK);
    _tile_stored(1, sums + 16, 4 * BLOCK);
    _tile_stored(2, sums + 32, 4 * BLOCK);
    _tile_stored(3, sums + 48, 4 * BLOCK);
    IN_MEMORY(sums);
}

#else

typedef struct {
    int none;
} tile_config_t;

static const int tiles_are_there = 0;

static tile_config_t tiles_begin(int rows) { return (tile_config_t){rows}; }
static void tiles_end(const tile_config_t *before) { (void)before; }
static void tiles_add(const uint16_t *weight, const uint16_t *x, int64_t stride, int pairs, float *sums) {
    (void)weight, (void)x, (void)stride, (void)pairs, (void)sums;
}

#endif

#endif
