/* Which inner loops this processor runs. */
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* What kernels_avx2.c is compiled for, and that the system saves the registers. __builtin_cpu_supports says no to everything when zig
 * compiles it, and knows half floats in new compilers only. */
static int runs_avx2(void) {
    unsigned a, b, c, d, saved, high;
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, F16C = 1 << 29, NEEDED = FMA | OSXSAVE | F16C, AVX2 = 1 << 5, VECTORS = 6 };
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & NEEDED) != NEEDED) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    return (saved & VECTORS) == VECTORS && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & AVX2) != 0;
}
#else
static int runs_avx2(void) { return 0; }
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static int runs_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; } /* HWCAP_ASIMDDP */
#elif defined(__aarch64__) && defined(__APPLE__)
static int runs_dotprod(void) { return 1; } /* all of Apple's own processors for Macs */
#else
static int runs_dotprod(void) { return 0; }
#endif

const tf_backend *tf_choose_backend(const char *name) {
    const tf_backend *found[] = {
        runs_avx2() ? tf_avx2_backend() : NULL,
        runs_dotprod() ? tf_neon_dotprod_backend() : NULL,
        tf_neon_backend(),
        tf_portable_backend(),
    };
    for (size_t i = 0; i < sizeof found / sizeof *found; i++)
        if (found[i] && (!name || !strcmp(name, found[i]->name))) return found[i];
    return NULL;
}
