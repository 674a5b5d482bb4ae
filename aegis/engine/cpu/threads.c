/* Work that is shared out among the threads of torch's own OpenMP. */

#include "threads.h"

#include <stddef.h>

typedef void (*gomp_parallel_t)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*gomp_number_t)(void);

static gomp_parallel_t run_parallel;
static gomp_number_t thread_number, thread_count;

/* From its library, which the process has loaded. */
void aegis_use_threads(gomp_parallel_t parallel, gomp_number_t number, gomp_number_t count) {
    run_parallel = parallel;
    thread_number = number;
    thread_count = count;
}

typedef struct {
    work_t work;
    void *context;
    int64_t count;
} share_t;

static void run_share(void *context) {
    const share_t *share = context;
    int64_t own = thread_number(), all = thread_count();
    int64_t from = share->count * own / all, to = share->count * (own + 1) / all;
    if (from < to) share->work(share->context, from, to);
}

void shared_out(work_t work, void *context, int64_t count, int threads) {
    share_t share = {work, context, count};
    if (threads > 1 && count > 1 && run_parallel)
        run_parallel(run_share, &share, (unsigned)threads, 0);
    else
        work(context, 0, count);
}
