/* Causal attention to a session's keys and values: of a token to a key/value head, block by block of slots, in pieces that do not depend
 * on the number of threads. What they give is merged in their order, so any number of threads gives the same bits. Of few tokens each
 * thread takes some pieces, and they are merged later; of many tokens of one session it takes tiles of them, for which each block is
 * read once, and merges as it goes. */
#include "model.h"

#include <string.h>

/* The blocks that a token sees, counted from the session's first token; slots of the first and the last one; pieces of them. */
typedef struct {
    int block, blocks, from, used, pieces;
} reach;

static reach reach_of(const tf_layer *layer, int position)
{
    int first = position < layer->window ? 0 : position + 1 - layer->window;
    reach r = {first / TF_KV_BLOCK, position / TF_KV_BLOCK - first / TF_KV_BLOCK + 1, first % TF_KV_BLOCK, position % TF_KV_BLOCK + 1, 0};
    r.pieces = r.blocks < TF_PIECES ? r.blocks : TF_PIECES;
    return r;
}

/* What a token sees of a block: slots, none when `used` is 0; in which of its pieces, and whether it is the piece's first or last one. */
typedef struct {
    int from, used, piece, first, last;
} view;

static view view_of(reach r, int block)
{
    int i = block - r.block, begin, end;
    if (i < 0 || i >= r.blocks)
        return (view){0};
    view v = {i ? 0 : r.from, i == r.blocks - 1 ? r.used : TF_KV_BLOCK, i, 1, 1};
    if (r.blocks > r.pieces) {
        v.piece = (int)((((int64_t)i + 1) * r.pieces - 1) / r.blocks); /* the one whose tf_split has i */
        tf_split(r.blocks, r.pieces, v.piece, &begin, &end);
        v.first = i == begin;
        v.last = i == end - 1;
    }
    return v;
}

static int groups_queries(const tf_config *c)
{
    return c->heads / c->kv_heads;
}

/* Means of values [queries, head_dim], their peaks and totals [queries]. */
typedef struct {
    float *mean, *peak, *total;
} means;

/* Of a step's token and piece, from a query head on. */
static means means_at(const tf_step *step, int token, int piece, int head)
{
    const tf_config *c = &step->engine->model->c;
    size_t place = (size_t)token * TF_PIECES + piece;
    float *peaks = step->engine->peaks + place * 2 * c->heads + head;
    return (means){step->engine->mix + (place * c->heads + head) * c->head_dim, peaks, peaks + c->heads};
}

static void merge(const tf_model *model, means into, means other, int queries)
{
    for (int i = 0, width = model->c.head_dim; i < queries; i++)
        model->backend->merge(into.mean + (size_t)i * width, &into.peak[i], &into.total[i], other.mean + (size_t)i * width, other.peak[i],
                              other.total[i], width);
}

/* Query heads [query, query + queries) of a group; of `tokens` tokens from `token` on, each `stride` behind the one before. */
typedef struct {
    int token, stride, tokens, group, query, queries;
    int piece; /* the one wanted, or ALL */
} item;

enum { ALL = -1 };

static int head_of(const tf_step *step, item it)
{
    return it.group * groups_queries(&step->engine->model->c) + it.query;
}

/* What a token's means are of: of what the item wants, of a piece that is not the first, of a block that is not its piece's first. The
 * latter two are merged into the former. An item of all pieces has the pieces' memory for them. */
enum { RESULT, PIECE, BLOCK };

static means means_of(const tf_step *step, item it, int token, int level, float *scratch)
{
    const tf_config *c = &step->engine->model->c;
    if (it.piece == ALL || level == RESULT)
        return means_at(step, token, it.piece == ALL ? level : it.piece, head_of(step, it));
    float *mean = scratch + tf_attend_floats(c), *peak = mean + (size_t)it.queries * c->head_dim;
    return (means){mean, peak, peak + it.queries};
}

/* What a piece's blocks are merged into. */
static int gathers(item it, view v)
{
    return it.piece == ALL && v.piece ? PIECE : RESULT;
}

static void merge_block(const tf_step *step, item it, int token, view v, float *scratch)
{
    const tf_model *model = step->engine->model;
    means gathered = means_of(step, it, token, gathers(it, v), scratch);
    if (!v.first)
        merge(model, gathered, means_of(step, it, token, BLOCK, scratch), it.queries);
    if (v.last && gathers(it, v) == PIECE)
        merge(model, means_of(step, it, token, RESULT, scratch), gathered, it.queries);
}

static void attend_block(const tf_step *step, int layer_index, item it, int block, float *scratch)
{
    const tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
    const tf_layer *layer = &engine->model->layers[layer_index];
    const tf_layer_cache *cache = &step->session[it.token]->caches[layer_index];
    int count = 0, at = block % (layer->slots / TF_KV_BLOCK);
    tf_query queries[TF_QUERIES];
    view views[TF_STEP];
    for (int t = 0, token = it.token; t < it.tokens; t++, token += it.stride) {
        view v = views[t] = view_of(reach_of(layer, step->position[token]), block);
        if (!v.used)
            continue;
        const float *q = engine->qkv + token * engine->qkv_stride + (size_t)head_of(step, it) * c->head_dim;
        means m = means_of(step, it, token, v.first ? gathers(it, v) : BLOCK, scratch);
        for (int i = 0; i < it.queries; i++, q += c->head_dim, m.mean += c->head_dim)
            queries[count++] = (tf_query){q, m.mean, &m.peak[i], &m.total[i], v.from, v.used};
    }
    engine->model->backend->attend(engine->kv, cache->keys[at], cache->values[at], TF_KV_BLOCK, c->kv_heads, c->head_dim, it.group,
                                   queries, count, c->attention_scale, scratch);
    for (int t = 0; t < it.tokens; t++)
        if (views[t].used)
            merge_block(step, it, it.token + t * it.stride, views[t], scratch);
}

static void attend_item(const tf_step *step, int layer_index, item it, float *scratch)
{
    const tf_layer *layer = &step->engine->model->layers[layer_index];
    reach r = reach_of(layer, step->position[it.token]), last = reach_of(layer, step->position[it.token + (it.tokens - 1) * it.stride]);
    int begin = 0, end = last.block + last.blocks - r.block;
    if (it.piece != ALL)
        tf_split(r.blocks, r.pieces, it.piece, &begin, &end);
    for (int i = begin; i < end; i++)
        attend_block(step, layer_index, it, r.block + i, scratch);
}

/* Query heads that share a key/value head are taken together, which reads the cache once, unless threads would stand idle. */
static int query_parts(const tf_step *step, int pieces)
{
    const tf_config *c = &step->engine->model->c;
    int items = step->tokens * c->kv_heads * pieces, threads = step->engine->threads, queries = groups_queries(c);
    int least = (queries + TF_QUERIES - 1) / TF_QUERIES, parts = threads == 1 ? 1 : (2 * threads + items - 1) / items;
    if (parts < least)
        return least;
    return parts < queries ? parts : queries;
}

static void attend_pieces(const tf_step *step, int layer_index, int thread)
{
    const tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
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
                    attend_item(step, layer_index, (item){token, 1, 1, group, begin, end - begin, piece}, engine->work[thread].scratch);
                }
    }
}

/* Each thread has tokens enough, and all tokens see about as much. */
static int takes_whole_tokens(const tf_step *step)
{
    const tf_engine *engine = step->engine;
    return step->session[0] == step->session[step->tokens - 1] && step->tokens * engine->model->c.kv_heads >= 2 * engine->threads;
}

/* Tiles of as many tokens as one call of `attend` takes, but so many of them that each thread gets the same number. The tokens of a
 * tile stand apart, so that no tile has all those that see the most. */
static void attend_tiles(const tf_step *step, int layer_index, int thread)
{
    const tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
    int queries = groups_queries(c), parts = (queries + TF_QUERIES - 1) / TF_QUERIES;
    int most = TF_QUERIES / ((queries + parts - 1) / parts); /* tokens of a tile */
    int tiles = (step->tokens + most - 1) / most, groups = c->kv_heads * parts;
    while (tiles < step->tokens && tiles * groups % engine->threads)
        tiles++;
    for (int i = thread; i < tiles * groups; i += engine->threads) {
        int begin, end, token = i / groups, group = i % groups;
        tf_split(queries, parts, group % parts, &begin, &end);
        item it = {token, tiles, (step->tokens - token + tiles - 1) / tiles, group / parts, begin, end - begin, ALL};
        attend_item(step, layer_index, it, engine->work[thread].scratch);
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
    if (takes_whole_tokens(step))
        attend_tiles(step, layer_index, thread);
    else
        attend_pieces(step, layer_index, thread);
}

/* The token's attention [heads * head_dim], its pieces merged. Every thread may ask for it: what they share stays as it is. */
void tf_merge_attention(const tf_step *step, int layer_index, int token, float *out)
{
    const tf_model *model = step->engine->model;
    int pieces = takes_whole_tokens(step) ? 1 : reach_of(&model->layers[layer_index], step->position[token]).pieces;
    memcpy(out, means_at(step, token, 0, 0).mean, (size_t)model->c.heads * model->c.head_dim * sizeof(float));
    for (int head = 0; pieces > 1 && head < model->c.heads; head++, out += model->c.head_dim) {
        means first = means_at(step, token, 0, head);
        float peak = *first.peak, total = *first.total;
        for (int piece = 1; piece < pieces; piece++)
            merge(model, (means){out, &peak, &total}, means_at(step, token, piece, head), 1);
    }
}

/* What the backend's `attend` computes in, for as many as TF_QUERIES query heads. */
size_t tf_attend_floats(const tf_config *c)
{
    return TF_QUERIES * TF_KV_BLOCK + TF_WIDE_SLOTS * (((size_t)c->head_dim + 7) / 8 * 8);
}
