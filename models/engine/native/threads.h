/* A pool of threads that run one function together (SPMD) and meet at barriers inside it. */
#ifndef TF_THREADS_H
#define TF_THREADS_H

enum { TF_MOST_THREADS = 256 };

typedef struct tf_pool tf_pool;

/* NULL when memory or threads are wanting. 1 <= threads <= TF_MOST_THREADS; the caller of `tf_pool_run` is one of them. */
tf_pool *tf_pool_create(int threads);
void tf_pool_free(tf_pool *pool);
int tf_pool_threads(const tf_pool *pool);
/* work(argument, thread) on every thread, 0 to threads - 1; returns when all are done. One call at a time. */
void tf_pool_run(tf_pool *pool, void (*work)(void *argument, int thread), void *argument);
/* Inside such work: waits for all the others. */
void tf_pool_meet(tf_pool *pool);

#endif
