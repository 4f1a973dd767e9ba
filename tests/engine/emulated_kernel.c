/* Runs kernels of shared libraries on memory that comes over stdin, and sends the memory back over stdout. For a processor
   that qemu emulates: Python stays on the machine's own.

   A request is a path, a name, the number of parts, the words of the kernel's struct, and blobs of memory. A word or a
   place in a blob that points to memory has the number of its blob, and is listed. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void take(void *to, size_t size) {
    if (size && fread(to, 1, size, stdin) != size) exit(0);
}

static int64_t number(void) {
    int64_t found;
    take(&found, sizeof found);
    return found;
}

static char *text(void) {
    int64_t size = number();
    char *found = calloc(1, size + 1);
    take(found, size);
    return found;
}

int main(void) {
    for (;;) {
        char *path = text(), *name = text();
        int64_t count = number(), words = number(), blobs = number();
        int64_t *word = malloc(8 * words + 8), *size = malloc(8 * blobs + 8);
        char **memory = malloc(8 * blobs + 8), **raw = malloc(8 * blobs + 8);
        take(word, 8 * words);
        for (int64_t i = 0; i < blobs; i++) {
            size[i] = number();
            raw[i] = malloc(size[i] + 64);
            memory[i] = raw[i] + (64 - (uintptr_t)raw[i] % 64) % 64;
            take(memory[i], size[i]);
        }
        for (int64_t left = number(); left > 0; left--) { /* blob (-1: the words), place, blob that is meant */
            int64_t where = number(), place = number(), meant = number();
            char *target = memory[meant];
            memcpy(where < 0 ? (char *)(word + place) : memory[where] + place, &target, 8);
        }
        void *library = dlopen(path, RTLD_NOW);
        int (*kernel)(const void *, int64_t, int64_t) = 0;
        if (library) *(void **)&kernel = dlsym(library, name);
        if (!kernel) fprintf(stderr, "%s\n", dlerror());
        int64_t code = kernel ? kernel(word, 0, count) : -1;
        fwrite(&code, 8, 1, stdout);
        for (int64_t i = 0; i < blobs; i++) {
            fwrite(memory[i], 1, size[i], stdout);
            free(raw[i]);
        }
        fflush(stdout);
        free(path), free(name), free(word), free(size), free(memory), free(raw);
    }
}
