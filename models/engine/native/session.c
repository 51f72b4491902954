/* Sessions: what was read, as keys and values. The token at position p lies in slot p % slots of each layer, as in
 * models/bodies/cache.py; slots come in blocks, taken when the first token needs them. */
#include "model.h"

#include <string.h>

static int blocks_of(const tf_layer *layer)
{
    return layer->slots / TF_KV_BLOCK;
}

int tf_session_create(tf_engine *engine, tf_session **result)
{
    const tf_model *model = engine->model;
    *result = NULL;
    tf_session *session = tf_alloc(sizeof *session);
    if (!session)
        return tf_fail(TF_NO_MEMORY, "no memory for a session");
    *session = (tf_session){.engine = engine};
    session->hidden = tf_alloc(tf_times(model->c.width, sizeof(float)));
    session->caches = tf_alloc(model->c.layers * sizeof *session->caches);
    int complete = session->hidden && session->caches;
    if (session->caches)
        memset(session->caches, 0, model->c.layers * sizeof *session->caches);
    for (int i = 0; complete && i < model->c.layers; i++) {
        tf_layer_cache *cache = &session->caches[i];
        size_t bytes = blocks_of(&model->layers[i]) * sizeof(void *);
        cache->keys = tf_alloc(bytes);
        cache->values = tf_alloc(bytes);
        complete = cache->keys && cache->values;
    }
    if (!complete) {
        tf_session_free(session);
        return tf_fail(TF_NO_MEMORY, "no memory for a session");
    }
    memset(session->hidden, 0, model->c.width * sizeof(float));
    *result = session;
    return TF_OK;
}

void tf_session_free(tf_session *session)
{
    if (!session)
        return;
    for (int i = 0; session->caches && i < session->engine->model->c.layers; i++) {
        tf_layer_cache *cache = &session->caches[i];
        for (int block = 0; block < cache->blocks; block++) {
            tf_free(cache->keys[block]);
            tf_free(cache->values[block]);
        }
        tf_free(cache->keys);
        tf_free(cache->values);
    }
    tf_free(session->caches);
    tf_free(session->hidden);
    tf_free(session);
}

static int add_block(const tf_engine *engine, tf_layer_cache *cache)
{
    void *keys = tf_alloc(engine->kv_bytes), *values = tf_alloc(engine->kv_bytes);
    if (!keys || !values) {
        tf_free(keys);
        tf_free(values);
        return tf_fail(TF_NO_MEMORY, "no memory for more keys and values");
    }
    memset(keys, 0, engine->kv_bytes);
    memset(values, 0, engine->kv_bytes);
    cache->keys[cache->blocks] = keys;
    cache->values[cache->blocks++] = values;
    return TF_OK;
}

/* Takes the blocks that `length` tokens need. */
int tf_session_reserve(tf_session *session, int length)
{
    const tf_model *model = session->engine->model;
    for (int i = 0; i < model->c.layers; i++) {
        int slots = length < model->layers[i].slots ? length : model->layers[i].slots;
        while (session->caches[i].blocks * TF_KV_BLOCK < slots)
            if (add_block(session->engine, &session->caches[i]))
                return TF_NO_MEMORY;
    }
    return TF_OK;
}

int tf_session_copy(const tf_session *session, tf_session **copy)
{
    const tf_engine *engine = session->engine;
    int code = tf_session_create(session->engine, copy);
    if (code || (code = tf_session_reserve(*copy, session->length))) {
        tf_session_free(*copy);
        *copy = NULL;
        return code;
    }
    (*copy)->length = session->length;
    memcpy((*copy)->hidden, session->hidden, engine->model->c.width * sizeof(float));
    for (int i = 0; i < engine->model->c.layers; i++)
        for (int block = 0; block < (*copy)->caches[i].blocks; block++) {
            memcpy((*copy)->caches[i].keys[block], session->caches[i].keys[block], engine->kv_bytes);
            memcpy((*copy)->caches[i].values[block], session->caches[i].values[block], engine->kv_bytes);
        }
    return TF_OK;
}

int tf_session_rewind(tf_session *session, int length)
{
    const tf_model *model = session->engine->model;
    if (length < 0 || length > session->length)
        return tf_fail(TF_INVALID, "a session of %d tokens cannot go back to %d", session->length, length);
    for (int i = 0; length && i < model->c.layers; i++) {
        int oldest = session->length - model->layers[i].slots; /* positions before it were overwritten */
        if (oldest > 0 && length - model->layers[i].window + 1 < oldest)
            return tf_fail(TF_INVALID, "a session of %d tokens no longer holds what %d tokens see", session->length, length);
    }
    session->length = length;
    return TF_OK;
}

int tf_session_length(const tf_session *session)
{
    return session->length;
}

size_t tf_session_bytes(const tf_session *session)
{
    size_t blocks = 0;
    for (int i = 0; i < session->engine->model->c.layers; i++)
        blocks += session->caches[i].blocks;
    return blocks * 2 * session->engine->kv_bytes;
}
