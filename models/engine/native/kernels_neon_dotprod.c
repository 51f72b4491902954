/* The same with the int8 products of ARMv8.2, for which this file is compiled (models/engine/build.py). */
#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "neon.h"

const tf_backend *tf_neon_dotprod_backend(void) {
    static const tf_backend backend = NEON_BACKEND("neon-dotprod");
    return &backend;
}
#else
const tf_backend *tf_neon_dotprod_backend(void) { return NULL; }
#endif
