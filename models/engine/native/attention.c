/* Causal attention to a session's keys and values, cut into items that do not depend on the number of threads: a token, a key/value
 * head, a piece of the visible slots. What the pieces give is merged in their order, so any number of threads gives the same bits. */
#include "model.h"

#include <math.h>
#include <string.h>

/* Where a token's visible slots lie: `blocks` stretches, one to each block of the ring that they touch in turn. */
typedef struct {
    int first_block, from, used, blocks, ring, pieces;
} reach;

static reach reach_of(const tf_layer *layer, int position)
{
    int visible = position + 1 < layer->window ? position + 1 : layer->window;
    int first = (position + 1 - visible) % layer->slots, from = first % TF_KV_BLOCK;
    reach r = {first / TF_KV_BLOCK, from, position % layer->slots % TF_KV_BLOCK + 1, 0, layer->slots / TF_KV_BLOCK, 0};
    r.blocks = (from + visible + TF_KV_BLOCK - 1) / TF_KV_BLOCK;
    r.pieces = r.blocks < TF_PIECES ? r.blocks : TF_PIECES;
    return r;
}

static int groups_queries(const tf_config *c)
{
    return c->heads / c->kv_heads;
}

static float *mix_at(const tf_step *step, int token, int piece)
{
    const tf_config *c = &step->engine->model->c;
    return step->engine->mix + ((size_t)token * TF_PIECES + piece) * c->heads * c->head_dim;
}

/* [heads] peaks, then [heads] totals. */
static float *peaks_at(const tf_step *step, int token, int piece)
{
    return step->engine->peaks + ((size_t)token * TF_PIECES + piece) * 2 * step->engine->model->c.heads;
}

/* The mean `out` of weight `total` at `peak` takes in another one. */
static void merge(float *out, float *peak, float *total, const float *other, float other_peak, float other_total, int width)
{
    float high = *peak > other_peak ? *peak : other_peak;
    float own = *total * expf(*peak - high), more = other_total * expf(other_peak - high);
    float keep = own / (own + more), add = more / (own + more);
    for (int i = 0; i < width; i++)
        out[i] = out[i] * keep + other[i] * add;
    *peak = high;
    *total = own + more;
}

typedef struct {
    int token, group, piece, query, queries; /* query heads [query, query + queries) of the group */
} item;

static void attend_piece(const tf_step *step, int layer_index, item it, float *scratch)
{
    tf_engine *engine = step->engine;
    const tf_model *model = engine->model;
    const tf_config *c = &model->c;
    reach r = reach_of(&model->layers[layer_index], step->position[it.token]);
    const tf_layer_cache *cache = &step->session[it.token]->caches[layer_index];
    int head = it.group * groups_queries(c) + it.query, width = c->head_dim, begin, end;
    const float *q = engine->qkv + it.token * engine->qkv_stride + (size_t)head * width;
    float *out = mix_at(step, it.token, it.piece) + (size_t)head * width;
    float *peak = peaks_at(step, it.token, it.piece) + head, *total = peak + c->heads;
    float *mean = scratch + (size_t)it.queries * TF_KV_BLOCK, *peaks = mean + (size_t)it.queries * width, *totals = peaks + it.queries;
    tf_split(r.blocks, r.pieces, it.piece, &begin, &end);
    for (int i = begin; i < end; i++) {
        int block = (r.first_block + i) % r.ring, from = i ? 0 : r.from, used = i == r.blocks - 1 ? r.used : TF_KV_BLOCK;
        int first = i == begin;
        model->backend->attend(engine->kv, cache->keys[block], cache->values[block], TF_KV_BLOCK, c->kv_heads, width, it.group, q,
                               it.queries, c->attention_scale, from, used, scratch, first ? out : mean, first ? peak : peaks,
                               first ? total : totals);
        for (int k = 0; !first && k < it.queries; k++)
            merge(out + (size_t)k * width, &peak[k], &total[k], mean + (size_t)k * width, peaks[k], totals[k], width);
    }
}

/* Query heads that share a key/value head are taken together, which reads the cache once, unless threads would stand idle. */
static int query_parts(const tf_step *step, int pieces)
{
    const tf_config *c = &step->engine->model->c;
    int items = step->tokens * c->kv_heads * pieces, threads = step->engine->threads, queries = groups_queries(c);
    if (threads == 1 || items >= 2 * threads)
        return 1;
    int parts = (2 * threads + items - 1) / items;
    return parts < queries ? parts : queries;
}

static void attend_all(const tf_step *step, int layer_index, int thread)
{
    const tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
    float *scratch = engine->work[thread].scratch;
    int turn = 0;
    for (int token = 0; token < step->tokens; token++) {
        int pieces = reach_of(&engine->model->layers[layer_index], step->position[token]).pieces, parts = query_parts(step, pieces);
        for (int group = 0; group < c->kv_heads; group++)
            for (int piece = 0; piece < pieces; piece++)
                for (int part = 0; part < parts; part++, turn = turn + 1 == engine->threads ? 0 : turn + 1) {
                    int begin, end;
                    if (turn != thread)
                        continue;
                    tf_split(groups_queries(c), parts, part, &begin, &end);
                    attend_piece(step, layer_index, (item){token, group, piece, begin, end - begin}, scratch);
                }
    }
}

/* Norms and rotates one head of a token in place; keys and values go to the cache. `head` counts queries, keys, values. */
static void ready_head(const tf_step *step, int layer_index, int token, int head)
{
    tf_engine *engine = step->engine;
    const tf_model *model = engine->model;
    const tf_config *c = &model->c;
    const tf_layer *layer = &model->layers[layer_index];
    int width = c->head_dim, key = head - c->heads, value = key - c->kv_heads, slot = step->position[token] % layer->slots;
    const tf_layer_cache *cache = &step->session[token]->caches[layer_index];
    float *vector = engine->qkv + token * engine->qkv_stride + (size_t)head * width;
    if (value < 0) {
        if (c->query_key_norms)
            model->backend->rms_norm(vector, layer->parts[key < 0 ? TF_Q_NORM : TF_K_NORM].memory, width, c->eps, vector);
        if (layer->theta >= 0) {
            size_t row = ((size_t)layer->theta * TF_STEP + token) * (width / 2);
            model->backend->rotate(vector, engine->cosines + row, engine->sines + row, width);
        }
    }
    if (key >= 0)
        model->backend->kv_store(engine->kv, (value < 0 ? cache->keys : cache->values)[slot / TF_KV_BLOCK], TF_KV_BLOCK, c->kv_heads, width,
                                 slot % TF_KV_BLOCK, value < 0 ? key : value, vector);
}

void tf_attention(const tf_step *step, int layer_index, int thread)
{
    tf_engine *engine = step->engine;
    int heads = engine->model->c.heads + 2 * engine->model->c.kv_heads, begin, end;
    tf_split(step->tokens * heads, engine->threads, thread, &begin, &end);
    for (int i = begin; i < end; i++)
        ready_head(step, layer_index, i / heads, i % heads);
    tf_pool_meet(engine->pool);
    attend_all(step, layer_index, thread);
}

/* The token's attention [heads * head_dim], its pieces merged. */
void tf_merge_attention(const tf_step *step, int layer_index, int token, float *out)
{
    const tf_config *c = &step->engine->model->c;
    int width = c->head_dim, pieces = reach_of(&step->engine->model->layers[layer_index], step->position[token]).pieces;
    memcpy(out, mix_at(step, token, 0), (size_t)c->heads * width * sizeof(float));
    for (int head = 0; pieces > 1 && head < c->heads; head++) {
        float peak = peaks_at(step, token, 0)[head], total = peaks_at(step, token, 0)[c->heads + head];
        for (int piece = 1; piece < pieces; piece++) {
            const float *peaks = peaks_at(step, token, piece) + head;
            merge(out + (size_t)head * width, &peak, &total, mix_at(step, token, piece) + (size_t)head * width, peaks[0], peaks[c->heads],
                  width);
        }
    }
}
