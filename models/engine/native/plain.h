/* Products with rows of floats, and attention, in plain loops: what backends without loops of their own for them take. */
#ifndef TF_PLAIN_H
#define TF_PLAIN_H

#include "elementwise.h"
#include "forms.h"
#include "kv.h"

/* Up to 8 values of a row at column c. */
TF_INLINE void plain_widen(int kind, const void *row, int c, int n, float v[8]) {
    for (int i = 0; i < n; i++)
        v[i] = kind == TF_INT8 ? (float)((const int8_t *)row)[c + i]
               : kind == TF_FLOAT16 ? tf_from_half(((const uint16_t *)row)[c + i])
                                    : ((const float *)row)[c + i];
}

TF_INLINE float plain_dot(int kind, const void *row, const float *x, int columns) {
    float lane[8] = {0}, v[8];
    int c = 0;
    for (; c + 8 <= columns; c += 8) {
        plain_widen(kind, row, c, 8, v);
        for (int i = 0; i < 8; i++) lane[i] += v[i] * x[c + i];
    }
    plain_widen(kind, row, c, columns - c, v);
    for (int i = 0; c + i < columns; i++) lane[i] += v[i] * x[c + i];
    return tf_tree(lane);
}

TF_INLINE void plain_rows(int kind, const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    for (int row = begin; row < end; row++)
        for (int t = 0; t < x->tokens; t++) {
            float sum = plain_dot(kind, tf_row(w, row), x->x + (size_t)t * x->x_stride, w->columns);
            y[(size_t)t * y_stride + (size_t)row] = (kind == TF_INT8 ? sum * tf_scale(w, row) : sum) + tf_bias(w, row);
        }
}

/* The kind is written out so that each gets a loop of its own. */
static inline void plain_multiply(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    if (w->kind == TF_INT8) plain_rows(TF_INT8, w, x, y, y_stride, begin, end);
    if (w->kind == TF_FLOAT16) plain_rows(TF_FLOAT16, w, x, y, y_stride, begin, end);
    if (w->kind == TF_FLOAT32) plain_rows(TF_FLOAT32, w, x, y, y_stride, begin, end);
}

TF_INLINE float plain_element(int kind, const void *vector, int i) {
    return kind == TF_KV_INT8 ? (float)((const int8_t *)vector)[i] : tf_from_half(((const uint16_t *)vector)[i]);
}

TF_INLINE void plain_attend_one(int kind, const void *keys, const void *values, int slots, int heads, int width, int head,
                                const tf_query *query, float scale, float *weights) {
    const float *key_scales = tf_kv_scales(kind, keys, slots, heads, width, head), *q = query->q;
    const float *value_scales = tf_kv_scales(kind, values, slots, heads, width, head);
    float *out = query->mean;
    int from = query->from, used = query->used;
    for (int slot = from; slot < used; slot++) {
        const void *key = tf_kv_vector(kind, keys, slots, width, slot, head);
        float lane[8] = {0};
        for (int i = 0; i < width; i++) lane[i % 8] += q[i] * plain_element(kind, key, i);
        weights[slot - from] = tf_tree(lane) * (kind == TF_KV_INT8 ? scale * key_scales[slot] : scale);
    }
    tf_softmax(weights, slots, 1, used - from, query->peak, query->total);
    float inverse = 1.0f / *query->total;
    memset(out, 0, (size_t)width * sizeof *out);
    for (int slot = from; slot < used; slot++) {
        const void *value = tf_kv_vector(kind, values, slots, width, slot, head);
        float weight = weights[slot - from] * (kind == TF_KV_INT8 ? inverse * value_scales[slot] : inverse);
        for (int i = 0; i < width; i++) out[i] += weight * plain_element(kind, value, i);
    }
}

/* The kind is written out here too. */
static inline void plain_attend(int kind, const void *keys, const void *values, int slots, int heads, int width, int head,
                                const tf_query *queries, int count, float scale, float *scratch) {
    for (int i = 0; i < count; i++) {
        if (kind == TF_KV_INT8)
            plain_attend_one(TF_KV_INT8, keys, values, slots, heads, width, head, queries + i, scale, scratch);
        else
            plain_attend_one(TF_KV_FLOAT16, keys, values, slots, heads, width, head, queries + i, scale, scratch);
    }
}

#endif
