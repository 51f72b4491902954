/* The inner loops with NEON, for every 64-bit ARM processor. */
#include "kernels.h"

#if defined(__aarch64__)
#include "neon.h"

const tf_backend *tf_neon_backend(void) {
    static const tf_backend backend = NEON_BACKEND("neon");
    return &backend;
}
#else
const tf_backend *tf_neon_backend(void) { return NULL; }
#endif
