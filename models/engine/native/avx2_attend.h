/* Attention of query heads to the slots of their common key/value head. Up to 4 of them share each widened key or value. Few query
 * heads, those of one token, take keys two slots at a time, values 16 columns at a time over blocks of slots that stay in the nearest
 * cache. For many, as of a prompt's tokens, each such block is widened once, and keys go three slots, values 24 columns at a time.
 * Whatever the tile, a query head's sums are taken in the same order. */
#ifndef TF_AVX2_ATTEND_H
#define TF_AVX2_ATTEND_H

#include <immintrin.h>

#include "avx2_rows.h"
#include "elementwise.h"
#include "kv.h"

enum {
    QUERIES = 4,
    MANY = 3 * QUERIES, /* from so many on widening once pays */
    SLOTS = 3,          /* keys at a time, where they are in the nearest cache; else 2 */
    KEYS_AHEAD = 4,     /* slots that the prefetch of keys runs ahead */
    /* With more, slots 512 bytes apart push each other out of the few sets of the nearest cache that they share. */
    SLOT_BLOCK = TF_WIDE_SLOTS
};

/* One head's vectors and scales (NULL: all 1). The kind of the elements, a tf_matrix kind, is an argument beside it. */
typedef struct {
    const char *vectors;
    size_t bytes; /* of a vector */
    const float *scales;
    int width;
} stream;

static inline stream stream_of(int kind, const void *kv, int slots, int heads, int width, int head) {
    return (stream){tf_kv_vector(kind, kv, slots, width, 0, head), tf_ceil((size_t)width, 8) * tf_kv_element(kind),
                    kind == TF_KV_INT8 ? tf_kv_scales(kind, kv, slots, heads, width, head) : NULL, width};
}

TF_INLINE void fetch(const char *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(memory + i, _MM_HINT_T0);
}

/* <q of each query head, key> for `count` slots from `slot` on. */
TF_INLINE void key_dots(int kind, int queries, int count, stream keys, int slot, const tf_query *q, float dots[SLOTS][QUERIES]) {
    const char *key = keys.vectors + (size_t)slot * keys.bytes;
    __m256 sum[SLOTS][QUERIES], k[SLOTS];
    for (int s = 0; s < SLOTS; s++)
        for (int h = 0; h < QUERIES; h++) sum[s][h] = _mm256_setzero_ps();
    int c = 0;
    for (; c + 8 <= keys.width; c += 8) {
        for (int s = 0; s < count; s++) k[s] = widened(kind, key + (size_t)s * keys.bytes, c);
        for (int h = 0; h < queries; h++) {
            __m256 values = _mm256_loadu_ps(q[h].q + c);
            for (int s = 0; s < count; s++) sum[s][h] = _mm256_fmadd_ps(k[s], values, sum[s][h]);
        }
    }
    if (c < keys.width) {
        __m256i mask = first_of_8(keys.width - c);
        for (int s = 0; s < count; s++) k[s] = widened(kind, key + (size_t)s * keys.bytes, c);
        for (int h = 0; h < queries; h++) {
            __m256 values = _mm256_maskload_ps(q[h].q + c, mask);
            for (int s = 0; s < count; s++) sum[s][h] = _mm256_fmadd_ps(k[s], values, sum[s][h]);
        }
    }
    for (int s = 0; s < count; s++) _mm_storeu_ps(dots[s], sums_of_8(sum[s][0], sum[s][1], sum[s][2], sum[s][3]));
}

/* Scores of the slots [first, last), query head h's of slot s at scores[h * stride + s]. Where keys are not widened yet, the values of
 * the same slots come near meanwhile: their stripes are too far apart for the processor to foresee. */
TF_INLINE void key_scores(int kind, int queries, stream keys, stream values, const tf_query *q, float scale, int first, int last,
                          float *scores, int stride) {
    const int most = kind == TF_FLOAT32 ? SLOTS : 2;
    float dots[SLOTS][QUERIES];
    for (int slot = first, count; slot < last; slot += count) {
        count = last - slot < most ? 1 : most;
        if (kind != TF_FLOAT32) {
            fetch(values.vectors + (size_t)slot * values.bytes, (size_t)count * values.bytes);
            if (slot + KEYS_AHEAD < last) fetch(keys.vectors + (size_t)(slot + KEYS_AHEAD) * keys.bytes, (size_t)count * keys.bytes);
        }
        if (count == most)
            key_dots(kind, queries, most, keys, slot, q, dots);
        else
            key_dots(kind, queries, 1, keys, slot, q, dots);
        for (int s = 0; s < count; s++) {
            float factor = keys.scales ? scale * keys.scales[slot + s] : scale;
            for (int h = 0; h < queries; h++) scores[h * stride + slot + s] = dots[s][h] * factor;
        }
    }
}

/* The results' columns [c, c + 8 vectors), 3 vectors at most, take in weights of slots [first, last) times their values, or begin with
 * them; the mask is for one vector of fewer than 8 columns. */
TF_INLINE void add_columns(int kind, int queries, int vectors, int begins, stream values, int first, int last, const float *weights,
                           int stride, const tf_query *q, int c, __m256i mask) {
    __m256 sum[QUERIES][3];
    for (int h = 0; h < queries; h++)
        for (int v = 0; v < vectors; v++) {
            const float *at = q[h].mean + c + 8 * v;
            if (begins)
                sum[h][v] = _mm256_setzero_ps();
            else
                sum[h][v] = vectors > 1 ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, mask);
        }
    const char *value = values.vectors + (size_t)first * values.bytes;
    for (int slot = first; slot < last; slot++, value += values.bytes) {
        __m256 element[3];
        for (int v = 0; v < vectors; v++) element[v] = widened(kind, value, c + 8 * v);
        for (int h = 0; h < queries; h++) {
            __m256 weight = _mm256_broadcast_ss(weights + h * stride + slot);
            for (int v = 0; v < vectors; v++) sum[h][v] = _mm256_fmadd_ps(weight, element[v], sum[h][v]);
        }
    }
    for (int h = 0; h < queries; h++)
        for (int v = 0; v < vectors; v++) {
            float *at = q[h].mean + c + 8 * v;
            if (vectors > 1)
                _mm256_storeu_ps(at, sum[h][v]);
            else
                _mm256_maskstore_ps(at, mask, sum[h][v]);
        }
}

TF_INLINE void add_values(int kind, int queries, int begins, stream values, int first, int last, const float *weights, int stride,
                          const tf_query *q) {
    const __m256i all = _mm256_set1_epi32(-1);
    int c = 0;
    if (kind == TF_FLOAT32) /* else the registers would not do */
        for (; c + 24 <= values.width; c += 24) add_columns(kind, queries, 3, begins, values, first, last, weights, stride, q, c, all);
    for (; c + 16 <= values.width; c += 16) add_columns(kind, queries, 2, begins, values, first, last, weights, stride, q, c, all);
    for (; c < values.width; c += 8)
        add_columns(kind, queries, 1, begins, values, first, last, weights, stride, q, c, first_of_8(values.width - c));
}

/* The two loops that take the time, for each kind and number of query heads: functions apart from all else, as they want every
 * register. */
TF_INLINE void scores_of_kind(int kind, int queries, stream keys, stream values, const tf_query *q, float scale, int first, int last,
                              float *scores, int stride) {
    if (queries == 4) key_scores(kind, 4, keys, values, q, scale, first, last, scores, stride);
    if (queries == 2) key_scores(kind, 2, keys, values, q, scale, first, last, scores, stride);
    if (queries == 1) key_scores(kind, 1, keys, values, q, scale, first, last, scores, stride);
}

static __attribute__((noinline)) void make_scores(int kind, int queries, stream keys, stream values, const tf_query *q, float scale,
                                                  int first, int last, float *scores, int stride) {
    if (kind == TF_INT8) scores_of_kind(TF_INT8, queries, keys, values, q, scale, first, last, scores, stride);
    if (kind == TF_FLOAT16) scores_of_kind(TF_FLOAT16, queries, keys, values, q, scale, first, last, scores, stride);
    if (kind == TF_FLOAT32) scores_of_kind(TF_FLOAT32, queries, keys, values, q, scale, first, last, scores, stride);
}

TF_INLINE void means_of_kind(int kind, int queries, int begins, stream values, int first, int last, const float *weights, int stride,
                             const tf_query *q) {
    if (queries == 4) add_values(kind, 4, begins, values, first, last, weights, stride, q);
    if (queries == 2) add_values(kind, 2, begins, values, first, last, weights, stride, q);
    if (queries == 1) add_values(kind, 1, begins, values, first, last, weights, stride, q);
}

static __attribute__((noinline)) void make_means(int kind, int queries, int begins, stream values, int first, int last,
                                                 const float *weights, int stride, const tf_query *q) {
    if (kind == TF_INT8) means_of_kind(TF_INT8, queries, begins, values, first, last, weights, stride, q);
    if (kind == TF_FLOAT16) means_of_kind(TF_FLOAT16, queries, begins, values, first, last, weights, stride, q);
    if (kind == TF_FLOAT32) means_of_kind(TF_FLOAT32, queries, begins, values, first, last, weights, stride, q);
}

/* Scores become weights of the values as they are stored. All query heads see the slots of the first. */
static inline void make_weights(int queries, stream values, const tf_query *q, float *weights, int stride) {
    float peak[QUERIES], total[QUERIES];
    int from = q->from, n = q->used - q->from;
    tf_softmax(weights + from, stride, queries, n, peak, total);
    for (int h = 0; h < queries; h++, weights += stride) {
        float inverse = 1.0f / total[h];
        if (values.scales)
            for (int i = from; i < q->used; i++) weights[i] *= inverse * values.scales[i];
        else
            for (int i = from; i < q->used; i++) weights[i] *= inverse;
        *q[h].peak = peak[h], *q[h].total = total[h];
    }
}

/* How many of `count` query heads see the same of the slots [first, last) as the first one, and slots before them if that one does:
 * 4, 2 or 1; the slots that it sees. */
static inline int alike(const tf_query *q, int count, int first, int last, int *begin, int *end) {
    int n = 0;
    for (; n < count && n < QUERIES; n++) {
        int from = q[n].from > first ? q[n].from : first, used = q[n].used < last ? q[n].used : last;
        if (n == 0) *begin = from, *end = used;
        if (from != *begin || used != *end || (q[n].from < first) != (q->from < first)) break;
    }
    return n == 3 ? 2 : n;
}

static inline int block_end(int first, int used) { return used - first < SLOT_BLOCK ? used : first + SLOT_BLOCK; }

/* `queries` (4, 2 or 1) query heads that see the same slots. */
static void attend_few(int kind, int queries, stream keys, stream values, const tf_query *q, float scale, float *weights, int stride) {
    make_scores(kind, queries, keys, values, q, scale, q->from, q->used, weights, stride);
    make_weights(queries, values, q, weights, stride);
    for (int first = q->from, last; first < q->used; first = last) {
        last = block_end(first, q->used);
        make_means(kind, queries, first == q->from, values, first, last, weights, stride, q);
    }
}

TF_INLINE void widen_kind(int kind, stream from, int first, int last, float *memory) {
    size_t width = tf_ceil((size_t)from.width, 8);
    for (int slot = first; slot < last; slot++, memory += width)
        for (size_t c = 0; c < width; c += 8)
            _mm256_storeu_ps(memory + c, widened(kind, from.vectors + (size_t)slot * from.bytes, (int)c));
}

/* Slots [first, last) in fp32. */
static stream widen(int kind, stream from, int first, int last, float *memory) {
    if (kind == TF_INT8)
        widen_kind(TF_INT8, from, first, last, memory);
    else
        widen_kind(TF_FLOAT16, from, first, last, memory);
    return (stream){(const char *)memory, tf_ceil((size_t)from.width, 8) * sizeof *memory, from.scales ? from.scales + first : NULL,
                    from.width};
}

/* That share of the slots [first, last) comes near which falls to query heads [i, i + n) of `count`. */
static inline void fetch_share(stream s, int first, int last, int i, int n, int count) {
    size_t bytes = (size_t)(last - first) * s.bytes, begin = bytes * (size_t)i / (size_t)count;
    size_t end = bytes * (size_t)(i + n) / (size_t)count;
    fetch(s.vectors + (size_t)first * s.bytes + begin, end - begin);
}

/* A stream from its slot `slots` on. */
static inline stream behind(stream s, int slots) {
    return (stream){s.vectors + (size_t)slots * s.bytes, s.bytes, s.scales ? s.scales + slots : NULL, s.width};
}

static void many_scores(int kind, stream keys, stream values, const tf_query *q, int count, float scale, int from, int used, float *scores,
                        int stride, float *memory) {
    for (int first = from, last, begin, end; first < used; first = last) {
        last = block_end(first, used);
        stream wide = widen(kind, keys, first, last, memory);
        for (int i = 0, n; i < count; i += n) {
            n = alike(q + i, count - i, first, last, &begin, &end);
            if (last < used)
                fetch_share(keys, last, block_end(last, used), i, n, count);
            else
                fetch_share(values, from, block_end(from, used), i, n, count);
            if (begin < end)
                make_scores(TF_FLOAT32, n, behind(wide, begin - first), wide, q + i, scale, 0, end - begin, scores + i * stride + begin,
                            stride);
        }
    }
}

static void many_means(int kind, stream values, const tf_query *q, int count, int from, int used, const float *weights, int stride,
                       float *memory) {
    for (int first = from, last, begin, end; first < used; first = last) {
        last = block_end(first, used);
        stream wide = widen(kind, values, first, last, memory);
        for (int i = 0, n; i < count; i += n) {
            n = alike(q + i, count - i, first, last, &begin, &end);
            if (last < used) fetch_share(values, last, block_end(last, used), i, n, count);
            if (begin < end)
                make_means(TF_FLOAT32, n, begin == q[i].from, behind(wide, begin - first), 0, end - begin, weights + i * stride + begin,
                           stride, q + i);
        }
    }
}

/* What follows `weights` takes the widened slots. */
static void attend_many(int kind, stream keys, stream values, const tf_query *q, int count, float scale, float *weights, int stride) {
    float *memory = weights + (size_t)count * (size_t)stride;
    int from = q->from, used = q->used, begin, end;
    for (int i = 1; i < count; i++) {
        from = q[i].from < from ? q[i].from : from;
        used = q[i].used > used ? q[i].used : used;
    }
    many_scores(kind, keys, values, q, count, scale, from, used, weights, stride, memory);
    for (int i = 0, n; i < count; i += n) {
        n = alike(q + i, count - i, from, used, &begin, &end);
        make_weights(n, values, q + i, weights + i * stride, stride);
    }
    many_means(kind, values, q, count, from, used, weights, stride, memory);
}

static void attend(int kind, const void *keys, const void *values, int slots, int heads, int width, int head, const tf_query *queries,
                   int count, float scale, float *scratch) {
    stream k = stream_of(kind, keys, slots, heads, width, head), v = stream_of(kind, values, slots, heads, width, head);
    int elements = kind == TF_KV_INT8 ? TF_INT8 : TF_FLOAT16, begin, end;
    if (count >= MANY) {
        attend_many(elements, k, v, queries, count, scale, scratch, slots);
        return;
    }
    for (int i = 0, n; i < count; i += n) {
        n = alike(queries + i, count - i, 0, slots, &begin, &end);
        attend_few(elements, n, k, v, queries + i, scale, scratch, slots);
    }
}

#endif
