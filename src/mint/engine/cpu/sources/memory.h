/* Scratch memory of kernels. */

#ifndef MINT_MEMORY
#define MINT_MEMORY

#include <stdint.h>
#include <stdlib.h>

/* Memory for so many bytes, which `free` gives back; 0 if there is none. It begins at a cache line. Large blocks
   of glibc's `malloc` begin 16 bytes behind one: each vector of 64 bytes then lies in two lines, and the registers of AMX
   are filled a quarter slower. */
static inline void *scratch(int64_t bytes) { return aligned_alloc(64, (bytes + 64) / 64 * 64); }

#endif
