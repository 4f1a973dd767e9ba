/* Runs kernels one after another, each over its parts on several threads: those of torch, where both have OpenMP. */

#include "calls.h"

/* `count` parts, for several threads at once where `wide` is set. */
typedef struct {
    Kernel *kernel;
    const void *arguments;
    int64_t count, wide;
} Operation;

/* Each of the operations may read what those before it have written. Returns the largest of the kernels' codes. */
int run_operations(const Operation *operations, int64_t count, int64_t threads) {
    int worst = 0;
#pragma omp parallel num_threads(threads) reduction(max : worst) if (threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const Operation *own = operations + i;
        int64_t parts = own->wide ? threads : 1;
#pragma omp for schedule(static, 1)
        for (int64_t part = 0; part < parts; part++) {
            int code = own->kernel(own->arguments, own->count * part / parts, own->count * (part + 1) / parts);
            if (code > worst) worst = code;
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
