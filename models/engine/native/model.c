/* A model's description and parts: what there must be, taken from the file piece by piece, checked. */
#include "model.h"

#include <math.h>
#include <string.h>

enum { MOST = 1 << 24, MOST_LAYERS = 4096, MOST_BITS = 1 << 16, MOST_BYTE_POSITIONS = 255, MOST_ID_BITS = 62 };

static int is_flag(int value)
{
    return value == 0 || value == 1;
}

static int check_counts(const tf_config *c)
{
    const struct {
        const char *name;
        int value, least, most;
    } counts[] = {
        {"width", c->width, 1, MOST}, {"layers", c->layers, 1, MOST_LAYERS}, {"heads", c->heads, 1, MOST},
        {"kv_heads", c->kv_heads, 1, MOST}, {"head_dim", c->head_dim, 1, MOST}, {"ffn", c->ffn, 1, MOST},
        {"context", c->context, 1, MOST}, {"vocabulary", c->vocabulary, 1, MOST}, {"code_bits", c->code_bits, 0, MOST_BITS},
        {"byte_positions", c->byte_positions, 0, MOST_BYTE_POSITIONS}, {"id_bits", c->id_bits, 0, MOST_ID_BITS},
        {"norm", c->norm, 0, TF_NORM_LAYER}, {"activation", c->activation, 0, TF_SILU},
        {"interface", c->interface, 0, TF_INTERFACE_KRON}, {"head", c->head, 0, TF_HEAD_CODE}, {"lift", c->lift, 0, TF_INTERLEAVE},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].value < counts[i].least || counts[i].value > counts[i].most)
            return tf_fail(TF_INVALID, "%s must lie between %d and %d, got %d", counts[i].name, counts[i].least, counts[i].most,
                           counts[i].value);
    if (!is_flag(c->gated) || !is_flag(c->query_key_norms) || !is_flag(c->post_norms) || !is_flag(c->learned_positions) ||
        !is_flag(c->biases) || !is_flag(c->prior) || !is_flag(c->gf2))
        return tf_fail(TF_INVALID, "a switch of the description is neither 0 nor 1");
    if (c->heads % c->kv_heads || (int64_t)c->heads * c->head_dim > MOST)
        return tf_fail(TF_INVALID, "%d heads of width %d with %d key/value heads are impossible", c->heads, c->head_dim, c->kv_heads);
    return TF_OK;
}

static int check_vocabulary(const tf_config *c)
{
    int coded = c->interface == TF_INTERFACE_SIGN || c->head == TF_HEAD_CODE;
    if (coded && !c->code_bits)
        return tf_fail(TF_INVALID, "the arm needs sign codes, and code_bits is 0");
    if (c->interface == TF_INTERFACE_KRON && !c->byte_positions)
        return tf_fail(TF_INVALID, "the interface needs token bytes, and byte_positions is 0");
    if (c->interface == TF_INTERFACE_BINARY && (!c->id_bits || c->id_bits > c->width || (int64_t)1 << c->id_bits < c->vocabulary))
        return tf_fail(TF_INVALID, "ids below %d do not fit %d bits in a width of %d", c->vocabulary, c->id_bits, c->width);
    if (c->head == TF_HEAD_TIED && c->interface != TF_INTERFACE_TABLE)
        return tf_fail(TF_INVALID, "a tied head needs a table as interface");
    return TF_OK;
}

static int check_numbers(const tf_config *c)
{
    const float finite[] = {c->clear, c->set, c->input_scale, c->eps, c->attention_scale};
    for (size_t i = 0; i < sizeof finite / sizeof *finite; i++)
        if (!isfinite(finite[i]))
            return tf_fail(TF_INVALID, "a number of the description is not finite");
    if (c->eps <= 0)
        return tf_fail(TF_INVALID, "eps must be above 0");
    if (!c->windows || !c->thetas)
        return tf_fail(TF_INVALID, "windows and thetas of the layers are missing");
    for (int i = 0; i < c->layers; i++) {
        if (c->windows[i] < 0 || c->windows[i] > MOST)
            return tf_fail(TF_INVALID, "the window of layer %d must lie between 0 and %d, got %d", i, MOST, c->windows[i]);
        if (!isfinite(c->thetas[i]) || c->thetas[i] < 0 || (c->thetas[i] > 0 && c->head_dim % 2))
            return tf_fail(TF_INVALID, "rotary positions need a base above 0 and an even head_dim (layer %d)", i);
    }
    return TF_OK;
}

/* The index of a rotary base among the model's; -1 for none, -2 when there are too many. */
static int theta_index(tf_model *model, float theta)
{
    int half = model->c.head_dim / 2;
    if (theta == 0)
        return -1;
    for (int i = 0; i < model->c.layers; i++)
        if (model->c.thetas[i] == theta && model->layers[i].theta >= 0 && model->layers[i].slots)
            return model->layers[i].theta;
    if (model->thetas == TF_THETAS)
        return -2;
    float *frequencies = model->frequencies[model->thetas] = tf_alloc(tf_times(half, sizeof(float)));
    if (!frequencies)
        return -3;
    for (int i = 0; i < half; i++) /* every step in fp32, as models/bodies/layers.py has it */
        frequencies[i] = 1.0f / (float)pow(theta, (float)(2 * i) / (float)model->c.head_dim);
    return model->thetas++;
}

/* A ring holds what the first token of a step still sees beside what the last one writes. */
static int ring_slots(const tf_config *c, int window)
{
    int64_t wanted = window ? (int64_t)window + TF_STEP - 1 : c->context;
    if (wanted > c->context)
        wanted = c->context;
    return (int)((wanted + TF_KV_BLOCK - 1) / TF_KV_BLOCK * TF_KV_BLOCK);
}

static int set_layers(tf_model *model)
{
    const tf_config *c = &model->c;
    for (int i = 0; i < c->layers; i++) {
        tf_layer *layer = &model->layers[i];
        layer->theta = theta_index(model, c->thetas[i]);
        if (layer->theta == -2)
            return tf_fail(TF_INVALID, "more than %d different rotary bases", TF_THETAS);
        if (layer->theta == -3)
            return tf_fail(TF_NO_MEMORY, "no memory for rotary positions");
        layer->window = c->windows[i] && c->windows[i] < c->context ? c->windows[i] : c->context;
        layer->slots = ring_slots(c, c->windows[i]);
    }
    return TF_OK;
}

int tf_model_create(const tf_config *config, const char *backend, tf_model **result)
{
    *result = NULL;
    int code;
    if ((code = check_counts(config)) || (code = check_vocabulary(config)) || (code = check_numbers(config)))
        return code;
    const tf_backend *chosen = tf_choose_backend(backend);
    if (!chosen)
        return tf_fail(TF_INVALID, "this processor does not run the backend %.40s", backend ? backend : "asked for");
    tf_model *model = tf_alloc(sizeof *model);
    tf_layer *layers = tf_alloc(tf_times(config->layers, sizeof *layers));
    if (!model || !layers) {
        tf_free(model);
        tf_free(layers);
        return tf_fail(TF_NO_MEMORY, "no memory for %d layers", config->layers);
    }
    memset(model, 0, sizeof *model);
    memset(layers, 0, config->layers * sizeof *layers);
    model->c = *config;
    model->backend = chosen;
    model->layers = layers;
    code = set_layers(model);
    model->c.windows = NULL; /* the caller's memory */
    model->c.thetas = NULL;
    if (code) {
        tf_model_free(model);
        return code;
    }
    *result = model;
    return TF_OK;
}

const char *tf_model_backend(const tf_model *model)
{
    return model->backend->name;
}

void tf_model_free(tf_model *model)
{
    if (!model)
        return;
    tf_arena_free(&model->arena);
    tf_free(model->parts[TF_LIFT].memory);
    for (int i = 0; i < TF_THETAS; i++)
        tf_free(model->frequencies[i]);
    tf_free(model->kron_sum);
    tf_free(model->layers);
    tf_free(model);
}
