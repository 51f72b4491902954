/* A step's tokens through the body's layers. Six barriers a layer: after q, k, v; after keys and values are stored; after attention;
 * after o; after gate and up; after down. What lies between a barrier and a product is small (norms, rounding to int8). */
#include "model.h"

#include <string.h>

void tf_multiply_share(const tf_step *step, const tf_matrix *const *matrices, float *const *y, const size_t *strides, int count,
                       const tf_input *input, int thread)
{
    const tf_backend *backend = step->engine->model->backend;
    int total = 0, begin, end, block = backend->row_block;
    for (int i = 0; i < count; i++)
        total += (matrices[i]->rows + block - 1) / block;
    tf_split(total, step->engine->threads, thread, &begin, &end);
    for (int i = 0; i < count; i++) {
        int rows = matrices[i]->rows, blocks = (rows + block - 1) / block;
        int first = begin > 0 ? begin : 0, last = end < blocks ? end : blocks;
        if (first < last)
            backend->multiply(matrices[i], input, y[i], strides[i], first * block, last * block < rows ? last * block : rows);
        begin -= blocks;
        end -= blocks;
    }
}

static void norm(const tf_model *model, const tf_part *gain, const tf_part *bias, const float *x, float *out)
{
    const tf_config *c = &model->c;
    if (c->norm == TF_NORM_LAYER)
        model->backend->layer_norm(x, gain->memory, bias->memory, c->width, c->eps, out);
    else
        model->backend->rms_norm(x, gain->memory, c->width, c->eps, out);
}

/* x takes in what the last product left in `delta`, normed first where the body norms it. */
static void add_delta(const tf_step *step, const tf_part *post_norm, tf_work *work, int token)
{
    const tf_engine *engine = step->engine;
    int width = engine->model->c.width;
    float *x = work->x + (size_t)token * width;
    const float *delta = engine->delta + (size_t)token * width;
    if (engine->model->c.post_norms) {
        float *normed = work->input + (size_t)token * engine->longest;
        engine->model->backend->rms_norm(delta, post_norm->memory, width, engine->model->c.eps, normed);
        delta = normed;
    }
    for (int i = 0; i < width; i++)
        x[i] += delta[i];
}

/* The input of ternary matrices, from rows of floats. kernels/bitlinear norms with an eps of its own. */
static void quantise(const tf_step *step, tf_work *work, int token, const float *row, int columns)
{
    const tf_engine *engine = step->engine;
    engine->model->backend->quantise(row, columns, 1e-5f, work->q + (size_t)token * engine->q_stride, &work->step[token],
                                     &work->sum[token]);
}

static tf_input input_of(const tf_step *step, const tf_work *work, const float *x, size_t x_stride)
{
    return (tf_input){.tokens = step->tokens, .x = x, .x_stride = x_stride, .q = work->q, .q_stride = step->engine->q_stride,
                      .step = work->step, .sum = work->sum};
}

static void queries_keys_values(const tf_step *step, const tf_layer *layer, int first, int thread)
{
    tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
    tf_work *work = tf_my_work(step, thread);
    const tf_matrix *matrices[] = {&layer->parts[TF_Q].matrix, &layer->parts[TF_K].matrix, &layer->parts[TF_V].matrix};
    int begin, end, ternary = matrices[0]->kind == TF_TERNARY || matrices[1]->kind == TF_TERNARY || matrices[2]->kind == TF_TERNARY;
    tf_my_tokens(step, thread, &begin, &end);
    for (int t = begin; t < end; t++) {
        float *row = work->input + (size_t)t * engine->longest;
        if (!first)
            add_delta(step, &layer[-1].parts[TF_MLP_POST_NORM], work, t);
        norm(engine->model, &layer->parts[TF_ATTENTION_NORM], &layer->parts[TF_ATTENTION_NORM_BIAS], work->x + (size_t)t * c->width, row);
        if (ternary)
            quantise(step, work, t, row, c->width);
    }
    tf_meet_if_shared(step);
    size_t queries = (size_t)c->heads * c->head_dim, keys = (size_t)c->kv_heads * c->head_dim, stride = engine->qkv_stride;
    float *y[] = {engine->qkv, engine->qkv + queries, engine->qkv + queries + keys};
    tf_input input = input_of(step, work, work->input, engine->longest);
    tf_multiply_share(step, matrices, y, (size_t[]){stride, stride, stride}, 3, &input, thread);
}

static void attention_output(const tf_step *step, int layer_index, int thread)
{
    tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
    tf_work *work = tf_my_work(step, thread);
    const tf_matrix *o = &engine->model->layers[layer_index].parts[TF_O].matrix;
    int begin, end;
    tf_my_tokens(step, thread, &begin, &end);
    for (int t = begin; t < end; t++) {
        float *row = work->input + (size_t)t * engine->longest;
        tf_merge_attention(step, layer_index, t, row);
        if (o->kind == TF_TERNARY)
            quantise(step, work, t, row, c->heads * c->head_dim);
    }
    tf_meet_if_shared(step);
    tf_input input = input_of(step, work, work->input, engine->longest);
    tf_multiply_share(step, &o, &engine->delta, (size_t[]){c->width}, 1, &input, thread);
}

/* This thread's rows of up, activated as soon as they are there. */
static void activate(const tf_step *step, int thread)
{
    tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
    const tf_backend *backend = engine->model->backend;
    int blocks = (c->ffn + backend->row_block - 1) / backend->row_block, begin, end;
    tf_split(blocks, engine->threads, thread, &begin, &end);
    begin *= backend->row_block;
    end = end * backend->row_block < c->ffn ? end * backend->row_block : c->ffn;
    for (int t = 0; t < step->tokens && begin < end; t++) {
        float *up = engine->up + t * engine->ffn_stride + begin;
        const float *gate = c->gated ? engine->gate + t * engine->ffn_stride + begin : NULL;
        if (!c->gated)
            backend->gelu(up, end - begin);
        else if (c->activation == TF_SILU)
            backend->silu_mul(gate, up, end - begin);
        else
            backend->gelu_mul(gate, up, end - begin);
    }
}

static void gate_and_up(const tf_step *step, const tf_layer *layer, int thread)
{
    tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
    tf_work *work = tf_my_work(step, thread);
    const tf_matrix *up = &layer->parts[TF_UP].matrix, *gate = &layer->parts[TF_GATE].matrix;
    int begin, end, ternary = up->kind == TF_TERNARY || (c->gated && gate->kind == TF_TERNARY);
    tf_my_tokens(step, thread, &begin, &end);
    for (int t = begin; t < end; t++) {
        float *row = work->input + (size_t)t * engine->longest;
        add_delta(step, &layer->parts[TF_ATTENTION_POST_NORM], work, t);
        norm(engine->model, &layer->parts[TF_MLP_NORM], &layer->parts[TF_MLP_NORM_BIAS], work->x + (size_t)t * c->width, row);
        if (ternary)
            quantise(step, work, t, row, c->width);
    }
    tf_meet_if_shared(step);
    tf_input input = input_of(step, work, work->input, engine->longest);
    if (c->gated)
        tf_multiply_share(step, &gate, &engine->gate, (size_t[]){engine->ffn_stride}, 1, &input, thread);
    tf_multiply_share(step, &up, &engine->up, (size_t[]){engine->ffn_stride}, 1, &input, thread);
    activate(step, thread);
}

static void down(const tf_step *step, const tf_layer *layer, int thread)
{
    tf_engine *engine = step->engine;
    const tf_config *c = &engine->model->c;
    tf_work *work = tf_my_work(step, thread);
    const tf_matrix *matrix = &layer->parts[TF_DOWN].matrix;
    int begin, end;
    if (matrix->kind == TF_TERNARY) {
        tf_my_tokens(step, thread, &begin, &end);
        for (int t = begin; t < end; t++)
            quantise(step, work, t, engine->up + t * engine->ffn_stride, c->ffn);
        tf_meet_if_shared(step);
    }
    tf_input input = input_of(step, work, engine->up, engine->ffn_stride);
    tf_multiply_share(step, &matrix, &engine->delta, (size_t[]){c->width}, 1, &input, thread);
}

/* `hidden` [tokens, width] gets the states after the final norm; a barrier stands at the end. */
static void finish(const tf_step *step, int thread)
{
    tf_engine *engine = step->engine;
    const tf_model *model = engine->model;
    const tf_config *c = &model->c;
    tf_work *work = tf_my_work(step, thread);
    int begin, end;
    tf_split(step->tokens, engine->threads, thread, &begin, &end);
    for (int t = begin; t < end; t++) {
        add_delta(step, &model->layers[c->layers - 1].parts[TF_MLP_POST_NORM], work, t);
        norm(model, &model->parts[TF_FINAL_NORM], &model->parts[TF_FINAL_NORM_BIAS], work->x + (size_t)t * c->width,
             engine->hidden + (size_t)t * c->width);
    }
    tf_pool_meet(engine->pool);
}

void tf_forward(const tf_step *step, int thread)
{
    tf_engine *engine = step->engine;
    tf_embed(step, thread);
    for (int i = 0; i < engine->model->c.layers; i++) {
        const tf_layer *layer = &engine->model->layers[i];
        queries_keys_values(step, layer, i == 0, thread);
        tf_pool_meet(engine->pool);
        tf_attention(step, i, thread);
        tf_pool_meet(engine->pool);
        attention_output(step, i, thread);
        tf_pool_meet(engine->pool);
        gate_and_up(step, layer, thread);
        tf_pool_meet(engine->pool);
        down(step, layer, thread);
        tf_pool_meet(engine->pool);
    }
    finish(step, thread);
}
