/* What LoRA adapters add to the results of a layer, in the rows that are theirs: scale * up (down x).

   Each row is computed by itself: what it has does not depend on the rows beside it. */

#ifndef AEGIS_LOW_RANK_H
#define AEGIS_LOW_RANK_H

#include <stdint.h>

#define RANK_MAX 512

typedef struct {
    const void *down, *up; /* [rank, columns] and [rank, results] */
    int32_t rank;          /* 0: it adds nothing to this layer */
    float scale;
} change_t;

/* FLOATS: all is float32. ROUNDED: matrices are bfloat16, and so are the values of the other arrays, which are float32.
   HALVES: all is bfloat16. */
enum numbers { FLOATS, ROUNDED, HALVES };

/* Adds to `to [rows, results]` what is made of `from [rows, columns]`; both widths are multiples of 16. Of each row
   `changes` has those of its adapter, of which the one at `layer` is applied; NULL: it has no adapter. */
void aegis_add_changes(const change_t *const *changes, int64_t layer, const void *from, void *to, int64_t rows,
                       int columns, int results, enum numbers numbers, int threads);

#endif
