/* The parts of a model: which there must be and of what shape, and their rows as they come from the file. */
#include "model.h"
#include "numbers.h"

#include <math.h>
#include <string.h>

enum { MATRIX = 1, FLOATS = 2, TRANSPOSED = 4 }; /* what becomes of rows: a backend's form, fp32, or a matrix turned over */

typedef struct {
    int needed;
    int64_t rows, columns; /* rows 0: the model has no such part */
    int use;               /* MATRIX, FLOATS, TRANSPOSED, or a kind that is copied */
} shape;

static shape matrix(int needed, int64_t rows, int64_t columns)
{
    return needed ? (shape){1, rows, columns, MATRIX} : (shape){0};
}

static shape vector(int needed, int64_t columns)
{
    return needed ? (shape){1, 1, columns, FLOATS} : (shape){0};
}

static shape copied(int needed, int64_t rows, int64_t columns, int kind)
{
    return needed ? (shape){1, rows, columns, kind} : (shape){0};
}

static shape layer_shape(const tf_config *c, int place)
{
    int64_t queries = (int64_t)c->heads * c->head_dim, keys = (int64_t)c->kv_heads * c->head_dim;
    int layer_norm = c->norm == TF_NORM_LAYER;
    switch (place) {
    case TF_Q: return matrix(1, queries, c->width);
    case TF_K: case TF_V: return matrix(1, keys, c->width);
    case TF_O: return matrix(1, c->width, queries);
    case TF_GATE: return matrix(c->gated, c->ffn, c->width);
    case TF_UP: return matrix(1, c->ffn, c->width);
    case TF_DOWN: return matrix(1, c->width, c->ffn);
    case TF_ATTENTION_NORM: case TF_MLP_NORM: return vector(1, c->width);
    case TF_ATTENTION_NORM_BIAS: case TF_MLP_NORM_BIAS: return vector(layer_norm, c->width);
    case TF_ATTENTION_POST_NORM: case TF_MLP_POST_NORM: return vector(c->post_norms, c->width);
    case TF_Q_NORM: case TF_K_NORM: return vector(c->query_key_norms, c->head_dim);
    default: return (shape){0};
    }
}

static shape model_shape(const tf_config *c, int place)
{
    int coded = c->interface == TF_INTERFACE_SIGN || c->head == TF_HEAD_CODE, kron = c->interface == TF_INTERFACE_KRON;
    switch (place) {
    case TF_TABLE: return matrix(c->interface == TF_INTERFACE_TABLE, c->vocabulary, c->width);
    case TF_OUTPUT: return matrix(c->head == TF_HEAD_TABLE, c->vocabulary, c->width);
    case TF_POSITION: return matrix(c->learned_positions, c->context, c->width);
    case TF_LIFT: return copied(c->interface == TF_INTERFACE_SIGN, c->code_bits, c->width, TRANSPOSED);
    case TF_CODE_MAP: return matrix(c->head == TF_HEAD_CODE, c->code_bits, c->width);
    case TF_KRON: return matrix(kron, 256 * (int64_t)c->byte_positions, c->width);
    case TF_FINAL_NORM: return vector(1, c->width);
    case TF_FINAL_NORM_BIAS: return vector(c->norm == TF_NORM_LAYER, c->width);
    case TF_CODES: return copied(coded, c->vocabulary, (c->code_bits + 31) / 32, TF_WORDS);
    case TF_PRIOR: return copied(c->prior, c->vocabulary, 1, FLOATS);
    case TF_TOKEN_BYTES: return copied(kron, c->vocabulary, c->byte_positions, TF_BYTES);
    case TF_LENGTHS: return copied(kron, c->vocabulary, 1, TF_BYTES);
    case TF_GF2: return copied(c->interface == TF_INTERFACE_BINARY && c->gf2, c->id_bits, 1, TF_MASKS);
    default: return (shape){0};
    }
}

static tf_part *part_at(tf_model *model, int layer, int place)
{
    int base = place % TF_SCALE_OF, table = place / TF_SCALE_OF;
    if (place < 0 || base >= TF_PLACES || table > 2 || layer < 0 || layer >= model->c.layers)
        return NULL;
    if (base >= TF_LAYER_PLACES && layer > 0)
        return NULL;
    tf_part *of_model[] = {model->parts, model->scales, model->biases};
    tf_part *of_layer[] = {model->layers[layer].parts, model->layers[layer].scales, model->layers[layer].biases};
    return base < TF_LAYER_PLACES ? &of_layer[table][base] : &of_model[table][base];
}

/* Scale and bias belong to a matrix that is there; tables have no bias. */
static shape shape_at(tf_model *model, int layer, int place, int columns)
{
    int base = place % TF_SCALE_OF;
    shape own = base < TF_LAYER_PLACES ? layer_shape(&model->c, base) : model_shape(&model->c, base);
    if (place < TF_SCALE_OF)
        return own;
    const tf_part *of = part_at(model, layer, base);
    if (own.use != MATRIX || !of->rows)
        return (shape){0};
    int scaled = of->kind == TF_TERNARY || of->kind == TF_INT8;
    if (place < TF_BIAS_OF)
        return vector(scaled, columns == 1 ? 1 : of->rows);
    return vector(model->c.biases && base < TF_LAYER_PLACES, of->rows);
}

static int is_float(int kind)
{
    return kind == TF_FLOAT16 || kind == TF_FLOAT32;
}

static int allowed(shape expected, int place, int kind)
{
    if (place == TF_CODE_MAP || place == TF_LIFT)
        return is_float(kind);
    if (expected.use == MATRIX)
        return is_float(kind) || kind == TF_INT8 || (kind == TF_TERNARY && place < TF_LAYER_PLACES);
    if (expected.use == FLOATS)
        return kind == TF_FLOAT32 || (kind == TF_FLOAT16 && place == TF_PRIOR);
    return kind == expected.use;
}

static size_t file_row_bytes(int kind, size_t columns)
{
    switch (kind) {
    case TF_TERNARY: return (columns + 3) / 4;
    case TF_FLOAT16: return columns * 2;
    case TF_FLOAT32: case TF_WORDS: return columns * 4;
    case TF_MASKS: return columns * 8;
    default: return columns;
    }
}

static size_t memory_bytes(const tf_model *model, shape expected, int kind)
{
    size_t rows = expected.rows, columns = expected.columns;
    if (expected.use == MATRIX)
        return model->backend->form_bytes(kind, (int)rows, (int)columns);
    if (expected.use == FLOATS)
        return tf_times(tf_times(rows, columns), sizeof(float));
    return tf_times(rows, file_row_bytes(kind, columns));
}

int tf_model_declare(tf_model *model, int layer, int place, int kind, int rows, int columns)
{
    tf_part *part = part_at(model, layer, place);
    if (!part || part->rows || model->finished)
        return tf_fail(TF_INVALID, "part %d of layer %d is unknown, or given twice", place, layer);
    shape expected = shape_at(model, layer, place, columns);
    if (!expected.needed || expected.rows != rows || expected.columns != columns)
        return tf_fail(TF_INVALID, "part %d of layer %d must be [%lld, %lld], got [%d, %d]", place, layer, (long long)expected.rows,
                       (long long)expected.columns, rows, columns);
    if (!allowed(expected, place, kind))
        return tf_fail(TF_INVALID, "part %d of layer %d cannot be of kind %d", place, layer, kind);
    if (place == TF_CODES) {
        int code = tf_lay_out_codes(model);
        if (code)
            return code;
    } else {
        size_t bytes = memory_bytes(model, expected, kind);
        part->memory = expected.use == TRANSPOSED ? tf_alloc(bytes) : tf_arena_take(&model->arena, bytes);
        if (!part->memory)
            return tf_fail(TF_NO_MEMORY, "no memory for part %d of layer %d, [%d, %d]", place, layer, rows, columns);
    }
    part->kind = kind;
    part->rows = rows;
    part->columns = columns;
    part->row_bytes = file_row_bytes(kind, columns);
    part->matrix = (tf_matrix){.kind = kind, .rows = rows, .columns = columns, .form = part->memory};
    return TF_OK;
}

static void widen(int kind, const void *data, size_t count, float *out)
{
    if (kind == TF_FLOAT32) {
        memcpy(out, data, count * sizeof(float));
        return;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, (const char *)data + 2 * i, 2);
        out[i] = tf_from_half(bits);
    }
}

/* Four 2-bit codes a byte; 3 stands for no value. */
static int has_code_three(const uint8_t *data, size_t bytes)
{
    uint8_t found = 0;
    for (size_t i = 0; i < bytes; i++)
        found |= data[i] & data[i] >> 1;
    return (found & 0x55) != 0;
}

static int check_values(const tf_config *c, int place, const float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        /* A prior of minus infinity is a token that never comes. */
        if (!isfinite(values[i]) && !(place == TF_PRIOR && values[i] == -INFINITY))
            return tf_fail(TF_INVALID, "part %d (width %d) has a value that is not finite", place, c->width);
    return TF_OK;
}

/* Scales of int8 rows: 127 of them, the largest value a row can have, must be finite too. */
static int check_scales(int place, const float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!isfinite(127 * values[i]))
            return tf_fail(TF_INVALID, "part %d has a scale that makes 127 infinite", place);
    return TF_OK;
}

static int take_floats(tf_model *model, tf_part *part, int layer, int place, const void *data, int count)
{
    size_t numbers = (size_t)count * part->columns;
    float *out = (float *)part->memory + (size_t)part->loaded * part->columns;
    widen(part->kind, data, numbers, out);
    int code = check_values(&model->c, place, out, numbers);
    if (!code && place >= TF_SCALE_OF && place < TF_BIAS_OF && part_at(model, layer, place - TF_SCALE_OF)->kind == TF_INT8)
        code = check_scales(place, out, numbers);
    return code;
}

/* Whether numbers of a float matrix, as the file has them, have the exponent of infinities and NaN. */
static int has_infinite(int kind, const uint8_t *data, size_t bytes)
{
    size_t size = kind == TF_FLOAT16 ? 2 : 4;
    uint32_t most = kind == TF_FLOAT16 ? 0x7c00 : 0x7f800000, found = 0;
    for (size_t i = 0; i < bytes; i += size) {
        uint32_t number = 0;
        memcpy(&number, data + i, size);
        found |= (number & most) == most;
    }
    return found != 0;
}

/* Ids have fewer bits than a mask has room for. */
static int check_masks(const tf_model *model, const uint8_t *data, int count)
{
    for (int i = 0; i < count; i++) {
        uint64_t mask;
        memcpy(&mask, data + (size_t)i * 8, 8);
        if (model->c.id_bits < 64 && mask >> model->c.id_bits)
            return tf_fail(TF_INVALID, "a row over GF(2) has bits beyond the %d of an id", model->c.id_bits);
    }
    return TF_OK;
}

static int take_lengths(const tf_model *model, const uint8_t *data, int count)
{
    for (int i = 0; i < count; i++)
        if (data[i] > model->c.byte_positions)
            return tf_fail(TF_INVALID, "a token of %d bytes exceeds the %d positions", data[i], model->c.byte_positions);
    return TF_OK;
}

/* Backends count on zeros beyond the last bit of a code. */
static int check_spare_bits(const tf_model *model, const uint8_t *data, int count)
{
    int bits = model->c.code_bits, words = (bits + 31) / 32;
    for (int i = 0; bits % 32 && i < count; i++) {
        uint32_t last;
        memcpy(&last, data + ((size_t)i * words + words - 1) * 4, 4);
        if (last >> bits % 32)
            return tf_fail(TF_INVALID, "a sign code has bits beyond the last of its %d", bits);
    }
    return TF_OK;
}

static int take_rows(tf_model *model, tf_part *part, int layer, int place, const void *data, int count, size_t bytes)
{
    int use = (place % TF_SCALE_OF < TF_LAYER_PLACES ? layer_shape(&model->c, place % TF_SCALE_OF) : model_shape(&model->c, place)).use;
    if (place >= TF_SCALE_OF || use == FLOATS)
        return take_floats(model, part, layer, place, data, count);
    if ((use == MATRIX || use == TRANSPOSED) && is_float(part->kind) && has_infinite(part->kind, data, bytes))
        return tf_fail(TF_INVALID, "part %d has a value that is not finite", place);
    if (use == MATRIX) {
        if (part->kind == TF_TERNARY && has_code_three(data, bytes))
            return tf_fail(TF_INVALID, "part %d holds the 2-bit code 3, which no ternary weight has", place);
        if (part->kind == TF_INT8 && memchr(data, 0x80, bytes))
            return tf_fail(TF_INVALID, "part %d holds -128, which no rounded weight is", place);
        model->backend->form_rows(&part->matrix, part->loaded, count, data);
        return TF_OK;
    }
    if (place == TF_CODES) {
        if (check_spare_bits(model, data, count))
            return TF_INVALID;
        tf_take_codes(model, part->loaded, count, data);
        return TF_OK;
    }
    memcpy((char *)part->memory + (size_t)part->loaded * part->row_bytes, data, bytes);
    return place == TF_LENGTHS ? take_lengths(model, data, count) : place == TF_GF2 ? check_masks(model, data, count) : TF_OK;
}

int tf_model_load(tf_model *model, int layer, int place, int count, const void *data, size_t bytes)
{
    tf_part *part = part_at(model, layer, place);
    if (!part || !part->rows || model->finished)
        return tf_fail(TF_INVALID, "part %d of layer %d was not declared", place, layer);
    if (count < 1 || count > part->rows - part->loaded || tf_times(count, part->row_bytes) != bytes)
        return tf_fail(TF_INVALID, "part %d of layer %d takes %d more rows of %zu bytes, got %d rows in %zu bytes", place, layer,
                       part->rows - part->loaded, part->row_bytes, count, bytes);
    int code = take_rows(model, part, layer, place, data, count, bytes);
    part->loaded += count;
    return code;
}

static int finish_part(tf_model *model, int layer, int place)
{
    tf_part *part = part_at(model, layer, place), *scale = part_at(model, layer, place + TF_SCALE_OF);
    tf_part *bias = part_at(model, layer, place + TF_BIAS_OF);
    shape expected = shape_at(model, layer, place, 0);
    if (!expected.needed)
        return TF_OK;
    if (!part->rows || part->loaded != part->rows)
        return tf_fail(TF_INVALID, "part %d of layer %d is missing or has too few rows", place, layer);
    if (expected.use != MATRIX)
        return TF_OK;
    if (shape_at(model, layer, place + TF_SCALE_OF, 1).needed) {
        if (scale->loaded != 1)
            return tf_fail(TF_INVALID, "part %d of layer %d has no scale", place, layer);
        part->matrix.scale = scale->memory;
        part->matrix.row_scales = scale->columns == part->rows && part->rows > 1;
    }
    if (shape_at(model, layer, place + TF_BIAS_OF, 1).needed) {
        if (bias->loaded != 1)
            return tf_fail(TF_INVALID, "part %d of layer %d has no bias", place, layer);
        part->matrix.bias = bias->memory;
    }
    return TF_OK;
}

/* A sign code times the lift is then a product like any other: its +1 and -1 are the input. */
static int transpose_lift(tf_model *model)
{
    int bits = model->c.code_bits, width = model->c.width;
    tf_part *part = &model->parts[TF_LIFT];
    model->lift = (tf_matrix){.kind = part->kind, .rows = width, .columns = bits};
    model->lift.form = tf_arena_take(&model->arena, model->backend->form_bytes(part->kind, width, bits));
    size_t size = file_row_bytes(part->kind, 1);
    char *row = tf_alloc(tf_times(bits, size));
    if (!model->lift.form || !row) {
        tf_free(row);
        return tf_fail(TF_NO_MEMORY, "no memory for the lift of the sign codes");
    }
    for (int i = 0; i < width; i++) {
        for (int k = 0; k < bits; k++)
            memcpy(row + k * size, (const char *)part->memory + ((size_t)k * width + i) * size, size);
        model->backend->form_rows(&model->lift, i, 1, row);
    }
    tf_free(row);
    tf_free(part->memory);
    part->memory = NULL;
    return TF_OK;
}

static int sum_kron(tf_model *model)
{
    int width = model->c.width;
    const tf_matrix *kron = &model->parts[TF_KRON].matrix;
    float *sum = model->kron_sum = tf_alloc(tf_times(width, sizeof(float)));
    float *few = tf_alloc(tf_times(width, sizeof(float)));
    double *wide = tf_alloc(tf_times(width, sizeof(double)));
    int code = sum && few && wide ? TF_OK : tf_fail(TF_NO_MEMORY, "no memory for the sum of the projection's rows");
    if (!code)
        memset(wide, 0, width * sizeof *wide);
    for (int row = 0; !code && row < kron->rows; row++) {
        memset(few, 0, width * sizeof *few);
        model->backend->add_row(kron, row, 1.0f, few);
        for (int i = 0; i < width; i++)
            wide[i] += few[i];
    }
    for (int i = 0; !code && i < width; i++)
        sum[i] = (float)wide[i];
    tf_free(few);
    tf_free(wide);
    return code;
}

int tf_model_finish(tf_model *model)
{
    int code = TF_OK;
    for (int layer = 0; layer < model->c.layers; layer++)
        for (int place = 0; place < TF_LAYER_PLACES; place++)
            if ((code = finish_part(model, layer, place)))
                return code;
    for (int place = TF_LAYER_PLACES; place < TF_PLACES; place++)
        if ((code = finish_part(model, 0, place)))
            return code;
    if (model->finished)
        return TF_OK;
    if (model->c.interface == TF_INTERFACE_SIGN)
        code = transpose_lift(model);
    if (!code && model->c.interface == TF_INTERFACE_KRON)
        code = sum_kron(model);
    tf_arena_trim(&model->arena);
    model->finished = code == TF_OK;
    return code;
}
