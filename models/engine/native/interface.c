/* From ids to the body's input: the interfaces of models/vocab/interfaces.py, times input_scale, plus learned positions. */
#include "model.h"

#include <math.h>
#include <string.h>

static void binary_row(const tf_model *model, int id, float *row)
{
    const tf_config *c = &model->c;
    const int64_t *masks = model->parts[TF_GF2].memory;
    float clear = c->clear * c->input_scale, set = c->set * c->input_scale;
    for (int i = 0; i < c->width; i++) {
        int bit = c->lift == TF_TILE ? i % c->id_bits : (int)((int64_t)i * c->id_bits / c->width);
        int value = c->gf2 ? __builtin_parityll((uint64_t)masks[bit] & (uint64_t)id) : id >> bit & 1;
        row[i] = value ? set : clear;
    }
}

/* kernels/kronecker: y = a * (rows of the bytes) + c * (sum of all rows). */
static void kron_row(const tf_model *model, int id, float *row)
{
    const tf_config *c = &model->c;
    int positions = c->byte_positions, length = ((const uint8_t *)model->parts[TF_LENGTHS].memory)[id];
    const uint8_t *bytes = (const uint8_t *)model->parts[TF_TOKEN_BYTES].memory + (size_t)id * positions;
    if (!length)
        return;
    double cells = 256.0 * positions, sigma = sqrt((1 - length / cells) / (cells - 1)) + 1e-6;
    float each = (float)(1 / (sqrt(length) * sigma)), all = (float)(-sqrt(length) / cells / sigma);
    for (int p = 0; p < length; p++)
        model->backend->add_row(&model->parts[TF_KRON].matrix, bytes[p] * positions + p, each, row);
    for (int i = 0; i < c->width; i++)
        row[i] = (row[i] + all * model->kron_sum[i]) * c->input_scale;
}

static void sign_input(const tf_model *model, int id, float *signs)
{
    int bits = model->c.code_bits;
    uint32_t words[(1 << 16) / 32];
    model->backend->code_words(&model->codes, tf_place(model, id), words);
    for (int k = 0; k < bits; k++)
        signs[k] = words[k / 32] >> k % 32 & 1 ? 1.0f : -1.0f;
}

static void sign_rows(const tf_step *step, int thread)
{
    tf_engine *engine = step->engine;
    const tf_model *model = engine->model;
    tf_work *work = tf_my_work(step, thread);
    int begin, end;
    tf_my_tokens(step, thread, &begin, &end);
    for (int t = begin; t < end; t++)
        sign_input(model, step->ids[t], work->input + (size_t)t * engine->longest);
    tf_meet_if_shared(step);
    tf_input input = {.tokens = step->tokens, .x = work->input, .x_stride = engine->longest};
    const tf_matrix *lift = &model->lift;
    tf_multiply_share(step, &lift, &engine->delta, (size_t[]){model->c.width}, 1, &input, thread);
}

static void plain_row(const tf_step *step, int token, float *row)
{
    const tf_model *model = step->engine->model;
    memset(row, 0, model->c.width * sizeof(float));
    if (model->c.interface == TF_INTERFACE_TABLE)
        model->backend->add_row(&model->parts[TF_TABLE].matrix, step->ids[token], model->c.input_scale, row);
    else if (model->c.interface == TF_INTERFACE_BINARY)
        binary_row(model, step->ids[token], row);
    else
        kron_row(model, step->ids[token], row);
}

/* Cosines and sines of each token's position: some hundred of them, shared out. The angle is fp32, as in models/bodies/layers.py. */
static void rotary_tables(const tf_step *step, int thread)
{
    tf_engine *engine = step->engine;
    int half = engine->model->c.head_dim / 2, begin, end;
    tf_split(half, engine->threads, thread, &begin, &end);
    for (int theta = 0; theta < engine->model->thetas; theta++)
        for (int t = 0; t < step->tokens; t++) {
            size_t row = ((size_t)theta * TF_STEP + t) * half;
            for (int i = begin; i < end; i++) {
                float angle = (float)step->position[t] * engine->model->frequencies[theta][i];
                engine->cosines[row + i] = cosf(angle);
                engine->sines[row + i] = sinf(angle);
            }
        }
}

void tf_embed(const tf_step *step, int thread)
{
    tf_engine *engine = step->engine;
    const tf_model *model = engine->model;
    const tf_config *c = &model->c;
    tf_work *work = tf_my_work(step, thread);
    int begin, end, sign = c->interface == TF_INTERFACE_SIGN;
    rotary_tables(step, thread);
    if (sign)
        sign_rows(step, thread);
    tf_pool_meet(engine->pool);
    tf_my_tokens(step, thread, &begin, &end);
    for (int t = begin; t < end; t++) {
        float *row = work->x + (size_t)t * c->width;
        const float *lifted = engine->delta + (size_t)t * c->width;
        for (int i = 0; sign && i < c->width; i++)
            row[i] = lifted[i] * c->input_scale;
        if (!sign)
            plain_row(step, t, row);
        if (c->learned_positions)
            model->backend->add_row(&model->parts[TF_POSITION].matrix, step->position[t], 1.0f, row);
    }
}
