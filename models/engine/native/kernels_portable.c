/* The inner loops in plain C11: for processors without a backend of their own, and what the other backends are compared with. */
#include "codes.h"
#include "elementwise.h"
#include "forms.h"
#include "kernels.h"
#include "kv.h"

enum { FLUSH = 32 }; /* chunks whose sums fit 16 bits: 4 products of at most 2 * 127 each, and 32 * 1016 < 2^15 */

/* <codes of one row, q>, exactly. */
static int32_t ternary_dot(const uint8_t *piece, const int8_t *q, size_t chunks) {
    int32_t total = 0;
    for (size_t done = 0; done < chunks; done += FLUSH) {
        int16_t lane[TF_PIECE] = {0};
        size_t end = chunks - done < FLUSH ? chunks : done + FLUSH;
        for (size_t c = done; c < end; c++, piece += TF_ROWS * TF_PIECE, q += TF_CHUNK)
            for (int i = 0; i < TF_PIECE; i++)
                lane[i] = (int16_t)(lane[i] + (piece[i] & 3) * q[i] + (piece[i] >> 2 & 3) * q[i + 32] + (piece[i] >> 4 & 3) * q[i + 64] +
                                    (piece[i] >> 6) * q[i + 96]);
        for (int i = 0; i < TF_PIECE; i++) total += lane[i];
    }
    return total;
}

static void multiply_ternary(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    for (int row = begin; row < end; row++)
        for (int t = 0; t < x->tokens; t++) {
            int32_t sum = ternary_dot(tf_ternary_row(w, row), x->q + (size_t)t * x->q_stride, tf_chunks(w->columns)) - x->sum[t];
            y[(size_t)t * y_stride + (size_t)row] = (float)sum * x->step[t] * tf_scale(w, row) + tf_bias(w, row);
        }
}

/* Up to 8 values of a row at column c. */
static inline void widen(int kind, const void *row, int c, int n, float v[8]) {
    for (int i = 0; i < n; i++)
        v[i] = kind == TF_INT8 ? (float)((const int8_t *)row)[c + i]
               : kind == TF_FLOAT16 ? tf_from_half(((const uint16_t *)row)[c + i])
                                    : ((const float *)row)[c + i];
}

static inline float dot(int kind, const void *row, const float *x, int columns) {
    float lane[8] = {0}, v[8];
    int c = 0;
    for (; c + 8 <= columns; c += 8) {
        widen(kind, row, c, 8, v);
        for (int i = 0; i < 8; i++) lane[i] += v[i] * x[c + i];
    }
    widen(kind, row, c, columns - c, v);
    for (int i = 0; c + i < columns; i++) lane[i] += v[i] * x[c + i];
    return tf_tree(lane);
}

static inline void multiply_rows(int kind, const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    for (int row = begin; row < end; row++)
        for (int t = 0; t < x->tokens; t++) {
            float sum = dot(kind, tf_row(w, row), x->x + (size_t)t * x->x_stride, w->columns);
            y[(size_t)t * y_stride + (size_t)row] = (kind == TF_INT8 ? sum * tf_scale(w, row) : sum) + tf_bias(w, row);
        }
}

/* The kind is written out so that each gets a loop of its own. */
static void multiply(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    if (w->kind == TF_TERNARY) multiply_ternary(w, x, y, y_stride, begin, end);
    if (w->kind == TF_INT8) multiply_rows(TF_INT8, w, x, y, y_stride, begin, end);
    if (w->kind == TF_FLOAT16) multiply_rows(TF_FLOAT16, w, x, y, y_stride, begin, end);
    if (w->kind == TF_FLOAT32) multiply_rows(TF_FLOAT32, w, x, y, y_stride, begin, end);
}

/* One table of 256 floats for each byte of a code: nothing is rounded but fp32 sums. */
static size_t code_tables_bytes(int bits) { return tf_code_bytes(bits) * 256 * sizeof(float); }

static void make_code_tables(const float *hidden, int bits, tf_code_tables *tables) {
    float *table = tables->tables, low[16], high[16], magnitude = 0.0f;
    for (int first = 0; first < bits; first += 8, table += 256) {
        magnitude += tf_signed_sums(hidden, bits, first, low) + tf_signed_sums(hidden, bits, first + 4, high);
        for (int byte = 0; byte < 256; byte++) table[byte] = low[byte & 15] + high[byte >> 4];
    }
    tables->unit = tf_code_factor(bits);
    tables->start = 0.0f;
    tables->error = tf_sum_error(bits, magnitude) * tables->unit;
}

static void score_block(const uint8_t *codes, size_t bytes, const tf_code_tables *tables, float scores[TF_IDS]) {
    float sum[TF_IDS] = {0};
    const float *table = tables->tables;
    for (size_t p = 0; p < bytes; p++, table += 256, codes += TF_IDS)
        for (int i = 0; i < TF_IDS; i++) sum[i] += table[codes[i]];
    for (int i = 0; i < TF_IDS; i++) scores[i] = tables->start + tables->unit * sum[i];
}

static float score_codes(const void *form, int capacity, int bits, const tf_code_tables *tables, const float *prior, int begin, int end,
                         float *scores) {
    (void)capacity;
    float largest = -INFINITY, block[TF_IDS];
    for (int id = begin; id < end; id += TF_IDS) {
        score_block(tf_code(form, bits, id), tf_code_bytes(bits), tables, block);
        for (int i = 0; i < TF_IDS && id + i < end; i++) {
            float score = prior ? block[i] + prior[id + i] : block[i];
            scores[id - begin + i] = score;
            largest = score > largest ? score : largest;
        }
    }
    return largest;
}

static inline float kv_element(int kind, const void *vector, int i) {
    return kind == TF_KV_INT8 ? (float)((const int8_t *)vector)[i] : tf_from_half(((const uint16_t *)vector)[i]);
}

static inline void attend_one(int kind, const void *keys, const void *values, int slots, int heads, int width, int head, const float *q,
                              float scale, int from, int used, float *weights, float *out, float *peak, float *total) {
    const float *key_scales = tf_kv_scales(kind, keys, slots, heads, width, head);
    const float *value_scales = tf_kv_scales(kind, values, slots, heads, width, head);
    for (int slot = from; slot < used; slot++) {
        const void *key = tf_kv_vector(kind, keys, slots, width, slot, head);
        float lane[8] = {0};
        for (int i = 0; i < width; i++) lane[i % 8] += q[i] * kv_element(kind, key, i);
        weights[slot - from] = tf_tree(lane) * (kind == TF_KV_INT8 ? scale * key_scales[slot] : scale);
    }
    float inverse = tf_softmax(weights, used - from, peak, total);
    memset(out, 0, (size_t)width * sizeof *out);
    for (int slot = from; slot < used; slot++) {
        const void *value = tf_kv_vector(kind, values, slots, width, slot, head);
        float weight = weights[slot - from] * (kind == TF_KV_INT8 ? inverse * value_scales[slot] : inverse);
        for (int i = 0; i < width; i++) out[i] += weight * kv_element(kind, value, i);
    }
}

static void attend(int kind, const void *keys, const void *values, int slots, int heads, int width, int head, const float *q, int queries,
                   float scale, int from, int used, float *scratch, float *out, float *peak, float *total) {
    for (int h = 0; h < queries; h++, q += width, out += width) {
        if (kind == TF_KV_INT8)
            attend_one(TF_KV_INT8, keys, values, slots, heads, width, head, q, scale, from, used, scratch, out, peak + h, total + h);
        else
            attend_one(TF_KV_FLOAT16, keys, values, slots, heads, width, head, q, scale, from, used, scratch, out, peak + h, total + h);
    }
}

const tf_backend *tf_portable_backend(void) {
    static const tf_backend backend = {
        .name = "portable",
        .form_bytes = tf_form_bytes,
        .form_rows = tf_form_rows,
        .row_block = TF_ROWS,
        .quantised_bytes = tf_quantised_bytes,
        .quantise = tf_quantise,
        .multiply = multiply,
        .add_row = tf_add_row,
        .codes_bytes = tf_codes_bytes,
        .form_codes = tf_form_codes,
        .code_words = tf_code_words,
        .code_tables_bytes = code_tables_bytes,
        .make_code_tables = make_code_tables,
        .code_block = TF_IDS,
        .score_codes = score_codes,
        .exact_score = tf_exact_score,
        .kv_bytes = tf_kv_bytes,
        .kv_store = tf_kv_store,
        .attend = attend,
        .rms_norm = tf_rms_norm,
        .layer_norm = tf_layer_norm,
        .gelu = tf_gelu,
        .gelu_mul = tf_gelu_mul,
        .silu_mul = tf_silu_mul,
        .rotate = tf_rotate,
    };
    return &backend;
}
