/* Runs kernels one after another, each over its parts on several threads: those of torch, where both have OpenMP. */

#include "calls.h"

/* How several threads take the parts of an operation: one thread takes all, each thread takes an equal share, or each
   takes the next part when it has done with its last one. The last is for parts that take long: a thread whose core is
   busy with something else then takes fewer of them. */
enum { ONE_THREAD, EQUAL_SHARES, ONE_BY_ONE };

/* `count` parts; `split`: one of the above. */
typedef struct {
    Kernel *kernel;
    const void *arguments;
    int64_t count, split;
} Operation;

/* Share `share` of `shares` equal ones. */
static int run_share(const Operation *own, int64_t share, int64_t shares) {
    return own->kernel(own->arguments, own->count * share / shares, own->count * (share + 1) / shares);
}

/* Each of the operations may read what those before it have written. Returns the largest of the kernels' codes. */
int run_operations(const Operation *operations, int64_t count, int64_t threads) {
    int worst = 0;
#pragma omp parallel num_threads(threads) reduction(max : worst) if (threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const Operation *own = operations + i;
        const int64_t shares = own->split == ONE_THREAD ? 1 : threads;
        if (own->split == ONE_BY_ONE && threads > 1) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t part = 0; part < own->count; part++) {
                int code = own->kernel(own->arguments, part, part + 1);
                if (code > worst) worst = code;
            }
        } else {
#pragma omp for schedule(static, 1)
            for (int64_t share = 0; share < shares; share++) {
                int code = run_share(own, share, shares);
                if (code > worst) worst = code;
            }
        }
    }
    return worst;
}

typedef struct {
    const Operation *operations;
    int64_t count;
} Sequence;

/* Sequences that have nothing to do with one another, side by side: each on one thread, which waits for nobody. */
int run_sequences(const Sequence *sequences, int64_t count) {
    int worst = 0;
#pragma omp parallel for num_threads(count) reduction(max : worst) schedule(static, 1) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        int code = run_operations(sequences[i].operations, sequences[i].count, 1);
        if (code > worst) worst = code;
    }
    return worst;
}
