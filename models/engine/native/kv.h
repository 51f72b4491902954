/* How keys and values lie in memory, for every backend: vectors in the order head, slot, each rounded up to 8 elements with zeros, so
 * that a head's slots are one stream; behind them, for TF_KV_INT8, each vector's scale. */
#ifndef TF_KV_H
#define TF_KV_H

#include <math.h>

#include "kernels.h"
#include "numbers.h"

static inline size_t tf_kv_element(int kind) { return kind == TF_KV_INT8 ? 1 : 2; }

static inline size_t tf_kv_vectors_bytes(int kind, int slots, int heads, int width) {
    return tf_ceil((size_t)slots * (size_t)heads * tf_ceil((size_t)width, 8) * tf_kv_element(kind), 64);
}

static inline size_t tf_kv_bytes(int kind, int slots, int heads, int width) {
    size_t scales = kind == TF_KV_INT8 ? (size_t)slots * (size_t)heads * sizeof(float) : 0;
    return tf_kv_vectors_bytes(kind, slots, heads, width) + scales;
}

static inline size_t tf_kv_offset(int kind, int slots, int width, int slot, int head) {
    return ((size_t)head * (size_t)slots + (size_t)slot) * tf_ceil((size_t)width, 8) * tf_kv_element(kind);
}

/* Of a slot's scale. */
static inline size_t tf_kv_scale_offset(int kind, int slots, int heads, int width, int slot, int head) {
    return tf_kv_vectors_bytes(kind, slots, heads, width) + ((size_t)head * (size_t)slots + (size_t)slot) * sizeof(float);
}

static inline const void *tf_kv_vector(int kind, const void *kv, int slots, int width, int slot, int head) {
    return (const char *)kv + tf_kv_offset(kind, slots, width, slot, head);
}

/* The scales of a head's slots, from slot 0 on. */
static inline const float *tf_kv_scales(int kind, const void *kv, int slots, int heads, int width, int head) {
    return (const float *)(const void *)((const char *)kv + tf_kv_scale_offset(kind, slots, heads, width, 0, head));
}

static inline void tf_kv_store_int8(int8_t *out, float *scale, int width, const float *vector) {
    int32_t bits = tf_largest_bits(vector, width);
    float largest = tf_float((uint32_t)bits);
    if (bits >= TF_INFINITY_BITS || largest < 1e-30f) { /* 127 / largest could be infinite: zeros are near enough */
        for (int i = 0; i < width; i++) out[i] = 0;
        *scale = bits >= TF_INFINITY_BITS ? NAN : 0.0f;
        return;
    }
    float steps = 127.0f / largest;
    for (int i = 0; i < width; i++) out[i] = (int8_t)tf_nearest(vector[i] * steps);
    *scale = largest / 127.0f;
}

static inline void tf_kv_store(int kind, void *kv, int slots, int heads, int width, int slot, int head, const float *vector) {
    void *out = (char *)kv + tf_kv_offset(kind, slots, width, slot, head);
    int padded = (int)tf_ceil((size_t)width, 8);
    if (kind == TF_KV_INT8) {
        void *scale = (char *)kv + tf_kv_scale_offset(kind, slots, heads, width, slot, head);
        tf_kv_store_int8(out, scale, width, vector);
        for (int i = width; i < padded; i++) ((int8_t *)out)[i] = 0;
        return;
    }
    for (int i = 0; i < width; i++) ((uint16_t *)out)[i] = tf_to_half(vector[i]);
    for (int i = width; i < padded; i++) ((uint16_t *)out)[i] = 0;
}

#endif
