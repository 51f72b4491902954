/* An engine's threads and the memory they compute in.
 *
 * A step of one token is too small to share out its norms: every thread computes them for itself, which costs less than a barrier.
 * In a longer step each thread prepares some of the tokens in memory that all see. */
#include "model.h"
#include "scoring.h"

#include <string.h>

tf_work *tf_my_work(const tf_step *step, int thread)
{
    return &step->engine->work[step->tokens == 1 ? thread : step->engine->threads];
}

void tf_my_tokens(const tf_step *step, int thread, int *begin, int *end)
{
    if (step->tokens == 1) {
        *begin = 0;
        *end = 1;
    } else {
        tf_split(step->tokens, step->engine->threads, thread, begin, end);
    }
}

void tf_meet_if_shared(const tf_step *step)
{
    if (step->tokens > 1)
        tf_pool_meet(step->engine->pool);
}

static int longest_input(const tf_config *c)
{
    int longest = c->width > c->ffn ? c->width : c->ffn;
    if (c->heads * c->head_dim > longest)
        longest = c->heads * c->head_dim;
    return c->code_bits > longest ? c->code_bits : longest;
}

static void *take(size_t count, size_t each, size_t size, int *complete)
{
    void *memory = tf_alloc(tf_times(tf_times(count, each), size));
    *complete &= memory != NULL;
    return memory;
}

static int take_work(tf_engine *engine, tf_work *work, int tokens)
{
    const tf_config *c = &engine->model->c;
    int complete = 1;
    work->x = take(tokens, c->width, sizeof(float), &complete);
    work->input = take(tokens, engine->longest, sizeof(float), &complete);
    work->q = take(tokens, engine->q_stride, 1, &complete);
    work->step = take(tokens, 1, sizeof(float), &complete);
    work->sum = take(tokens, 1, sizeof(int32_t), &complete);
    /* The backend's; then a block's means, peaks and totals. */
    work->scratch = take(1, tf_attend_floats(c) + (size_t)(c->heads / c->kv_heads) * (c->head_dim + 2), sizeof(float), &complete);
    if (work->q) /* quantised rows end in zeros that nobody writes again */
        memset(work->q, 0, tokens * engine->q_stride);
    return complete;
}

static int take_shared(tf_engine *engine)
{
    const tf_config *c = &engine->model->c;
    size_t queries = (size_t)c->heads * c->head_dim;
    int complete = 1;
    engine->qkv = take(TF_STEP, engine->qkv_stride, sizeof(float), &complete);
    engine->mix = take(TF_STEP * TF_PIECES, queries, sizeof(float), &complete);
    engine->peaks = take(TF_STEP * TF_PIECES, 2 * (size_t)c->heads, sizeof(float), &complete);
    engine->delta = take(TF_STEP, c->width, sizeof(float), &complete);
    engine->up = take(TF_STEP, engine->ffn_stride, sizeof(float), &complete);
    engine->gate = take(c->gated ? TF_STEP : 0, engine->ffn_stride, sizeof(float), &complete);
    engine->hidden = take(TF_STEP, c->width, sizeof(float), &complete);
    engine->cosines = take((size_t)engine->model->thetas * TF_STEP, c->head_dim / 2, sizeof(float), &complete);
    engine->sines = take((size_t)engine->model->thetas * TF_STEP, c->head_dim / 2, sizeof(float), &complete);
    return complete;
}

static int take_memory(tf_engine *engine)
{
    size_t bytes = (engine->threads + 1) * sizeof *engine->work;
    engine->work = tf_alloc(bytes);
    if (!engine->work)
        return 0;
    memset(engine->work, 0, bytes);
    for (int i = 0; i <= engine->threads; i++)
        if (!take_work(engine, &engine->work[i], i < engine->threads ? 1 : TF_STEP))
            return 0;
    engine->scoring = tf_scoring_create(engine);
    return engine->scoring && take_shared(engine);
}

/* A row's bytes as an odd number of cache lines: rows a power of two apart would all want the same few sets of the nearest cache. */
static size_t odd_lines(size_t bytes)
{
    return (bytes + 63) / 64 * 64 | 64;
}

int tf_engine_create(const tf_model *model, int threads, int kv, tf_engine **result)
{
    const tf_config *c = &model->c;
    *result = NULL;
    if (!model->finished)
        return tf_fail(TF_INVALID, "the model is not finished");
    if (threads < 1 || threads > TF_MOST_THREADS || (kv != TF_KV_FLOAT16 && kv != TF_KV_INT8))
        return tf_fail(TF_INVALID, "threads must lie between 1 and %d, got %d; or the cache's kind is unknown", TF_MOST_THREADS, threads);
    tf_engine *engine = tf_alloc(sizeof *engine);
    if (!engine)
        return tf_fail(TF_NO_MEMORY, "no memory for an engine");
    *engine = (tf_engine){.model = model, .threads = threads, .kv = kv, .longest = longest_input(c)};
    engine->q_stride = odd_lines(model->backend->quantised_bytes(engine->longest));
    engine->qkv_stride = odd_lines((size_t)(c->heads + 2 * c->kv_heads) * c->head_dim * sizeof(float)) / sizeof(float);
    engine->ffn_stride = odd_lines(c->ffn * sizeof(float)) / sizeof(float);
    engine->kv_bytes = model->backend->kv_bytes(kv, TF_KV_BLOCK, c->kv_heads, c->head_dim);
    engine->pool = tf_pool_create(threads);
    if (!engine->pool || !take_memory(engine)) {
        tf_engine_free(engine);
        return tf_fail(TF_NO_MEMORY, "no memory or no threads for an engine with %d threads", threads);
    }
    *result = engine;
    return TF_OK;
}

static void free_work(tf_work *work)
{
    void *parts[] = {work->x, work->input, work->q, work->step, work->sum, work->scratch};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        tf_free(parts[i]);
}

void tf_engine_free(tf_engine *engine)
{
    if (!engine)
        return;
    tf_pool_free(engine->pool);
    for (int i = 0; engine->work && i <= engine->threads; i++)
        free_work(&engine->work[i]);
    void *parts[] = {engine->work, engine->qkv, engine->mix, engine->peaks, engine->delta, engine->up, engine->gate, engine->hidden,
                     engine->cosines, engine->sines};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        tf_free(parts[i]);
    tf_scoring_free(engine->scoring);
    tf_free(engine);
}
