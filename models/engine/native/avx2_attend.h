/* Attention of one token's query heads to the slots of their common key/value head. Up to 4 query heads share each widened key or
 * value; keys go two slots at a time, values 16 columns at a time over blocks of slots that stay in the nearest cache. */
#ifndef TF_AVX2_ATTEND_H
#define TF_AVX2_ATTEND_H

#include <immintrin.h>

#include "avx2_rows.h"
#include "elementwise.h"
#include "kv.h"

/* SLOT_BLOCK: with more, slots 512 bytes apart push each other out of the few sets of the nearest cache that they share. */
enum { QUERIES = 4, SLOT_BLOCK = 16, KEYS_AHEAD = 4 }; /* slots that the prefetch of keys runs ahead */

/* One head's vectors and scales; `kind` is the tf_matrix kind of the elements. */
typedef struct {
    const char *vectors;
    size_t bytes; /* of a vector */
    const float *scales;
    int width;
} stream;

static inline stream stream_of(int kind, const void *kv, int slots, int heads, int width, int head) {
    return (stream){tf_kv_vector(kind, kv, slots, width, 0, head), tf_ceil((size_t)width, 8) * tf_kv_element(kind),
                    tf_kv_scales(kind, kv, slots, heads, width, head), width};
}

TF_INLINE void fetch(const char *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(memory + i, _MM_HINT_T0);
}

/* <q of each query head, key> for `count` (1 or 2) slots from `slot` on. */
TF_INLINE void key_dots(int kind, int queries, int count, stream keys, int slot, const float *q, float dots[2][QUERIES]) {
    const char *key = keys.vectors + (size_t)slot * keys.bytes;
    __m256 sum[2][QUERIES], k[2];
    for (int s = 0; s < 2; s++)
        for (int h = 0; h < QUERIES; h++) sum[s][h] = _mm256_setzero_ps();
    int c = 0;
    for (; c + 8 <= keys.width; c += 8) {
        for (int s = 0; s < count; s++) k[s] = widened(kind, key + (size_t)s * keys.bytes, c);
        for (int h = 0; h < queries; h++) {
            __m256 values = _mm256_loadu_ps(q + h * keys.width + c);
            for (int s = 0; s < count; s++) sum[s][h] = _mm256_fmadd_ps(k[s], values, sum[s][h]);
        }
    }
    if (c < keys.width) {
        __m256i mask = first_of_8(keys.width - c);
        for (int s = 0; s < count; s++) k[s] = widened(kind, key + (size_t)s * keys.bytes, c);
        for (int h = 0; h < queries; h++) {
            __m256 values = _mm256_maskload_ps(q + h * keys.width + c, mask);
            for (int s = 0; s < count; s++) sum[s][h] = _mm256_fmadd_ps(k[s], values, sum[s][h]);
        }
    }
    for (int s = 0; s < count; s++) _mm_storeu_ps(dots[s], sums_of_8(sum[s][0], sum[s][1], sum[s][2], sum[s][3]));
}

/* The values of the same slots come near meanwhile: their stripes are too far apart for the processor to foresee. */
TF_INLINE void key_scores(int kind, int queries, stream keys, stream values, const float *q, float scale, int from, int used,
                          float *scores) {
    int n = used - from;
    float dots[2][QUERIES];
    for (int i = 0; i < n; i += 2) {
        int count = n - i < 2 ? 1 : 2;
        fetch(values.vectors + (size_t)(from + i) * values.bytes, (size_t)count * values.bytes);
        if (i + KEYS_AHEAD < n) fetch(keys.vectors + (size_t)(from + i + KEYS_AHEAD) * keys.bytes, (size_t)count * keys.bytes);
        if (count == 2)
            key_dots(kind, queries, 2, keys, from + i, q, dots);
        else
            key_dots(kind, queries, 1, keys, from + i, q, dots);
        for (int s = 0; s < count; s++) {
            float factor = kind == TF_INT8 ? scale * keys.scales[from + i + s] : scale;
            for (int h = 0; h < queries; h++) scores[h * n + i + s] = dots[s][h] * factor;
        }
    }
}

/* out[h][columns c .. c + 8 vectors) += weights of slots [first, last) times their values; mask for fewer than 8 columns. */
TF_INLINE void add_values(int kind, int queries, int vectors, stream values, int from, int first, int last, int n, const float *weights,
                       float *out, int c, __m256i mask) {
    __m256 sum[QUERIES][2];
    for (int h = 0; h < queries; h++)
        for (int v = 0; v < vectors; v++) {
            float *at = out + h * values.width + c + 8 * v;
            sum[h][v] = vectors == 2 ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, mask);
        }
    const char *value = values.vectors + (size_t)first * values.bytes;
    for (int slot = first; slot < last; slot++, value += values.bytes) {
        __m256 element[2];
        for (int v = 0; v < vectors; v++) element[v] = widened(kind, value, c + 8 * v);
        for (int h = 0; h < queries; h++) {
            __m256 weight = _mm256_broadcast_ss(weights + h * n + slot - from);
            for (int v = 0; v < vectors; v++) sum[h][v] = _mm256_fmadd_ps(weight, element[v], sum[h][v]);
        }
    }
    for (int h = 0; h < queries; h++)
        for (int v = 0; v < vectors; v++) {
            float *at = out + h * values.width + c + 8 * v;
            if (vectors == 2)
                _mm256_storeu_ps(at, sum[h][v]);
            else
                _mm256_maskstore_ps(at, mask, sum[h][v]);
        }
}

TF_INLINE void mean_values(int kind, int queries, stream values, int from, int used, const float *weights, float *out) {
    memset(out, 0, (size_t)queries * (size_t)values.width * sizeof *out);
    for (int first = from; first < used; first += SLOT_BLOCK) {
        int last = used - first < SLOT_BLOCK ? used : first + SLOT_BLOCK, c = 0;
        const __m256i all = _mm256_set1_epi32(-1);
        for (; c + 16 <= values.width; c += 16)
            add_values(kind, queries, 2, values, from, first, last, used - from, weights, out, c, all);
        for (; c < values.width; c += 8)
            add_values(kind, queries, 1, values, from, first, last, used - from, weights, out, c, first_of_8(values.width - c));
    }
}

TF_INLINE void attend_tile(int kind, int queries, stream keys, stream values, const float *q, float scale, int from, int used,
                        float *weights, float *out, float *peak, float *total) {
    int n = used - from;
    key_scores(kind, queries, keys, values, q, scale, from, used, weights);
    for (int h = 0; h < queries; h++) {
        float inverse = tf_softmax(weights + h * n, n, peak + h, total + h);
        for (int i = 0; i < n; i++) weights[h * n + i] *= kind == TF_INT8 ? inverse * values.scales[from + i] : inverse;
    }
    mean_values(kind, queries, values, from, used, weights, out);
}

/* Four query heads together, the rest one by one: groups of other sizes are rare and small. */
TF_INLINE void attend_kind(int kind, stream keys, stream values, const float *q, int queries, float scale, int from, int used,
                        float *weights, float *out, float *peak, float *total) {
    int h = 0, width = keys.width;
    for (; h + 4 <= queries; h += 4)
        attend_tile(kind, 4, keys, values, q + h * width, scale, from, used, weights, out + h * width, peak + h, total + h);
    for (; h + 2 <= queries; h += 2)
        attend_tile(kind, 2, keys, values, q + h * width, scale, from, used, weights, out + h * width, peak + h, total + h);
    for (; h < queries; h++)
        attend_tile(kind, 1, keys, values, q + h * width, scale, from, used, weights, out + h * width, peak + h, total + h);
}

static void attend_int8(stream keys, stream values, const float *q, int queries, float scale, int from, int used, float *weights,
                        float *out, float *peak, float *total) {
    attend_kind(TF_INT8, keys, values, q, queries, scale, from, used, weights, out, peak, total);
}

static void attend_float16(stream keys, stream values, const float *q, int queries, float scale, int from, int used, float *weights,
                           float *out, float *peak, float *total) {
    attend_kind(TF_FLOAT16, keys, values, q, queries, scale, from, used, weights, out, peak, total);
}

static void attend(int kind, const void *keys, const void *values, int slots, int heads, int width, int head, const float *q, int queries,
                   float scale, int from, int used, float *scratch, float *out, float *peak, float *total) {
    stream k = stream_of(kind, keys, slots, heads, width, head), v = stream_of(kind, values, slots, heads, width, head);
    if (kind == TF_KV_INT8)
        attend_int8(k, v, q, queries, scale, from, used, scratch, out, peak, total);
    else
        attend_float16(k, v, q, queries, scale, from, used, scratch, out, peak, total);
}

#endif
