#define _GNU_SOURCE /* madvise, sched_yield, sysconf */
/* Memory, and words for failures. */
#include "model.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE = 1 << 21 };

static _Thread_local char problem[256] = "nothing";

const char *tf_problem(void)
{
    return problem;
}

int tf_fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem, sizeof problem, format, arguments);
    va_end(arguments);
    return code;
}

size_t tf_times(size_t a, size_t b)
{
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

void *tf_alloc(size_t bytes)
{
    if (bytes > SIZE_MAX / 2)
        return NULL;
    /* Large parts on huge pages: streaming the weights then misses far fewer page translations. Only whole huge pages are asked for,
     * so that a part's end does not take 2 MB more than it needs. */
    size_t align = bytes >= HUGE ? HUGE : 64;
    void *memory = aligned_alloc(align, (bytes + 63) / 64 * 64 + (bytes == 0) * 64);
#ifdef MADV_HUGEPAGE
    if (memory && bytes >= HUGE)
        madvise(memory, bytes / HUGE * HUGE, MADV_HUGEPAGE); /* a wish: without it all is well, only slower */
#endif
    return memory;
}

void tf_free(void *memory)
{
    free(memory);
}
