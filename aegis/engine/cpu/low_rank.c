#include "low_rank.h"

#include "linear.h"
#include "threads.h"
#include "vectors.h"

#define TOGETHER 8 /* sums at a time: each is added to once in as many cycles */

typedef struct {
    const change_t *const *changes;
    int64_t layer;
    const char *from;
    char *to;
    int columns, results;
    enum numbers numbers;
} rows_t;

/* `count` numbers of `down x`, from `first` on. */
INLINE void narrow_some(const change_t *change, int first, const void *x, int columns, float *inner,
                        const enum numbers numbers, const int count) {
    const int64_t at = (int64_t)first * columns;
    __m512 sums[TOGETHER];
    for (int r = 0; r < count; r++) sums[r] = _mm512_setzero_ps();
    for (int k = 0; k < columns; k += 16) {
        __m512 value = loaded(x, k, numbers == HALVES);
        for (int r = 0; r < count; r++) {
            const __m512 down = loaded(change->down, at + (int64_t)r * columns + k, numbers != FLOATS);
            sums[r] = _mm512_fmadd_ps(down, value, sums[r]);
        }
    }
    for (int r = 0; r < count; r++) {
        __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(sums[r]));
        inner[first + r] = _mm512_cvtss_f32(rounded(sum, numbers != FLOATS));
    }
}

/* Adds `16 * vectors` numbers of `scale * up inner`, from `first` on. */
INLINE void widen_some(const change_t *change, const float *inner, int64_t first, int results, void *to,
                       const enum numbers numbers, const int vectors) {
    const __m512 scale = _mm512_set1_ps(change->scale);
    __m512 sums[4];
    for (int v = 0; v < vectors; v++) sums[v] = _mm512_setzero_ps();
    for (int r = 0; r < change->rank; r++)
        for (int v = 0; v < vectors; v++) {
            __m512 weight = loaded(change->up, (int64_t)r * results + first + 16 * v, numbers != FLOATS);
            sums[v] = _mm512_fmadd_ps(weight, _mm512_set1_ps(inner[r]), sums[v]);
        }
    for (int v = 0; v < vectors; v++) {
        const int64_t at = first + 16 * v;
        __m512 sum = _mm512_fmadd_ps(sums[v], scale, loaded(to, at, numbers == HALVES));
        if (numbers == HALVES)
            store_halves((uint16_t *)to + at, sum);
        else
            _mm512_storeu_ps((float *)to + at, rounded(sum, numbers != FLOATS));
    }
}

INLINE void change_row(const rows_t *all, int64_t row, const enum numbers numbers) {
    const change_t *change = all->changes[row] + all->layer;
    const int itemsize = numbers == HALVES ? 2 : 4, columns = all->columns, results = all->results;
    const void *x = all->from + row * columns * itemsize;
    void *to = all->to + row * results * itemsize;
    float inner[RANK_MAX];
    int r = 0;
    for (; r + TOGETHER <= change->rank; r += TOGETHER) narrow_some(change, r, x, columns, inner, numbers, TOGETHER);
    for (; r + 4 <= change->rank; r += 4) narrow_some(change, r, x, columns, inner, numbers, 4);
    for (; r < change->rank; r++) narrow_some(change, r, x, columns, inner, numbers, 1);
    int64_t at = 0;
    for (; at + 64 <= results; at += 64) widen_some(change, inner, at, results, to, numbers, 4);
    for (; at < results; at += 16) widen_some(change, inner, at, results, to, numbers, 1);
}

static int is_changed(const rows_t *all, int64_t row) {
    return all->changes[row] && all->changes[row][all->layer].rank;
}

static void change_rows(void *context, int64_t from, int64_t to) {
    const rows_t *all = context;
    for (int64_t row = from; row < to; row++) {
        if (!is_changed(all, row)) continue;
        switch (all->numbers) {
        case FLOATS: change_row(all, row, FLOATS); break;
        case ROUNDED: change_row(all, row, ROUNDED); break;
        case HALVES: change_row(all, row, HALVES);
        }
    }
}

void aegis_add_changes(const change_t *const *changes, int64_t layer, const void *from, void *to, int64_t rows,
                       int columns, int results, enum numbers numbers, int threads) {
    rows_t all = {changes, layer, from, to, columns, results, numbers};
    int64_t first = 0;
    while (first < rows && !is_changed(&all, first)) first++;
    if (first < rows) shared_out(change_rows, &all, rows, threads);
}
