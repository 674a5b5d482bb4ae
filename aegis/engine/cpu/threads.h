#ifndef AEGIS_THREADS_H
#define AEGIS_THREADS_H

#include <stdint.h>

typedef void (*work_t)(void *context, int64_t from, int64_t to);

/* Runs `work` on 0 to `count`, shared out among `threads`. */
void shared_out(work_t work, void *context, int64_t count, int threads);

#endif
