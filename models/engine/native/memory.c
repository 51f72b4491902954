/* Memory, and words for failures. */
#define _GNU_SOURCE /* madvise, sched_yield, sysconf */
#include "model.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
enum { HUGE = 64, CHUNK = 64 }; /* a chunk for each part, so that AddressSanitizer sees what is read behind its end */
#else
enum { HUGE = 1 << 21, CHUNK = 16 * HUGE };
#endif

struct tf_chunk {
    struct tf_chunk *next;
    size_t used, size;
};

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
    /* Only whole huge pages are asked for, so that the end does not take 2 MB more than it needs. */
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

/* Parts lie one behind the other on huge pages: streaming the weights then misses far fewer page translations, and where one part
 * ends the next is already on its way into the cache. */
void *tf_arena_take(tf_arena *arena, size_t bytes)
{
    if (bytes > SIZE_MAX / 4)
        return NULL;
    bytes = (bytes + 63) / 64 * 64;
    if (!arena->newest || arena->newest->size - arena->newest->used < bytes) {
        size_t size = bytes + 64 > CHUNK ? (bytes + 64 + HUGE - 1) / HUGE * HUGE : CHUNK;
        struct tf_chunk *chunk = tf_alloc(size);
        if (!chunk)
            return NULL;
        *chunk = (struct tf_chunk){arena->newest, 64, size};
        arena->newest = chunk;
    }
    void *memory = (char *)arena->newest + arena->newest->used;
    arena->newest->used += bytes;
    return memory;
}

/* The huge page in which the last part of a chunk ends was taken whole: up to 2 MB that nothing uses go back. */
void tf_arena_trim(tf_arena *arena)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (struct tf_chunk *chunk = arena->newest; chunk; chunk = chunk->next) {
        uintptr_t end = ((uintptr_t)chunk + chunk->used + page - 1) / page * page;
        if (end < (uintptr_t)chunk + chunk->size)
            madvise((void *)end, ((uintptr_t)chunk + chunk->size - end) / page * page, MADV_DONTNEED);
    }
}

void tf_arena_free(tf_arena *arena)
{
    for (struct tf_chunk *chunk = arena->newest, *next; chunk; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    arena->newest = NULL;
}
