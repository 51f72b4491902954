/* Threads spin for some microseconds, because a token takes dozens of barriers, then yield, because the core may be wanted: by a
 * thread of this pool when there are more threads than cores, or by another engine. Between runs they sleep. */
#define _GNU_SOURCE /* madvise, sched_yield, sysconf */
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { SPINS = 4000, IDLE_YIELDS = 20 };

typedef struct {
    tf_pool *pool;
    int thread;
} worker;

struct tf_pool {
    int threads, spins, started;
    void (*work)(void *, int);
    void *argument;
    _Alignas(64) atomic_uint arrived;
    _Alignas(64) atomic_uint meetings; /* barriers passed */
    _Alignas(64) atomic_uint runs;     /* calls of tf_pool_run begun */
    atomic_int closing, asleep;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t handles[TF_MOST_THREADS];
    worker workers[TF_MOST_THREADS];
};

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether `counter` left `old` within the pool's patience. */
static int spin(const tf_pool *pool, atomic_uint *counter, unsigned old)
{
    for (int i = 0; i < pool->spins; i++) {
        if (atomic_load_explicit(counter, memory_order_acquire) != old)
            return 1;
        pause_briefly();
    }
    return 0;
}

void tf_pool_meet(tf_pool *pool)
{
    if (pool->threads == 1)
        return;
    unsigned meeting = atomic_load_explicit(&pool->meetings, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) + 1 == (unsigned)pool->threads) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->meetings, meeting + 1, memory_order_release);
        return;
    }
    while (!spin(pool, &pool->meetings, meeting))
        sched_yield();
}

/* Returns when run number `old` + 1 has begun or the pool closes. */
static void await_run(tf_pool *pool, unsigned old)
{
    for (int i = 0; i < IDLE_YIELDS; i++) {
        if (spin(pool, &pool->runs, old) || atomic_load(&pool->closing))
            return;
        sched_yield();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->asleep, 1);
    while (atomic_load(&pool->runs) == old && !atomic_load(&pool->closing))
        pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->asleep, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *serve(void *argument)
{
    worker *self = argument;
    tf_pool *pool = self->pool;
    for (unsigned run = 0;; run++) {
        await_run(pool, run);
        if (atomic_load(&pool->closing))
            return NULL;
        pool->work(pool->argument, self->thread);
        tf_pool_meet(pool);
    }
}

static void wake_all(tf_pool *pool)
{
    if (atomic_load(&pool->asleep) == 0)
        return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

void tf_pool_run(tf_pool *pool, void (*work)(void *, int), void *argument)
{
    pool->work = work;
    pool->argument = argument;
    /* Sequentially consistent, as `asleep` is: a thread that goes to sleep sees the run, or is seen asleep. */
    atomic_fetch_add(&pool->runs, 1);
    if (pool->threads > 1)
        wake_all(pool);
    work(argument, 0);
    tf_pool_meet(pool);
}

tf_pool *tf_pool_create(int threads)
{
    if (threads < 1 || threads > TF_MOST_THREADS)
        return NULL;
    tf_pool *pool = aligned_alloc(64, (sizeof(tf_pool) + 63) / 64 * 64);
    if (!pool)
        return NULL;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    *pool = (tf_pool){.threads = threads, .spins = threads > cores ? 1 : SPINS, .started = 1};
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (; pool->started < threads; pool->started++) {
        worker *self = &pool->workers[pool->started];
        *self = (worker){pool, pool->started};
        if (pthread_create(&pool->handles[pool->started], NULL, serve, self)) {
            tf_pool_free(pool);
            return NULL;
        }
    }
    return pool;
}

void tf_pool_free(tf_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->closing, 1);
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 1; i < pool->started; i++)
        pthread_join(pool->handles[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

int tf_pool_threads(const tf_pool *pool)
{
    return pool->threads;
}
