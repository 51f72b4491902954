/* Norms, activations, rotation, softmax and the rounding of activations: one text for all backends. The loops are plain, so that
 * the compiler makes vectors of them under each backend's flags; as products and sums are not contracted (models/engine/build.py)
 * every backend gives the same bits. */
#ifndef TF_ELEMENTWISE_H
#define TF_ELEMENTWISE_H

#include <float.h>
#include <math.h>

#include "forms.h"

#define TF_MIN_MAGNITUDE 1e-5f /* kernels/bitlinear/naive.py */

/* x, or `limit` where x is below (above) it; NaN stays. Masks, because compilers make of `x < limit ? limit : x` a second path through
 * all that follows, division included, and merge the two at the end. */
static inline float tf_limited(float x, float limit, int outside) {
    uint32_t mask = 0u - (uint32_t)outside;
    return tf_float((tf_bits(limit) & mask) | (tf_bits(x) & ~mask));
}

/* e^x within 2 units in the last place (polynomial: Cephes' expf). Below -87.7 it is 0, above 88.37 infinite; NaN stays. No branch
 * and no cast: NaN makes a meaningless power of two, which the NaN of the polynomial swallows. */
static inline float tf_exp(float x) {
    x = tf_limited(x, -88.0f, x < -88.0f);
    x = tf_limited(x, 89.0f, x > 89.0f);
    float shifted = x * 1.44269504088896341f + TF_ROUNDER, n = shifted - TF_ROUNDER;
    uint32_t power = (tf_bits(shifted) - TF_ROUNDER_BITS + 127) << 23;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * tf_float(power);
}

/* x (1 + tanh u)/2 with u = sqrt(2/pi) (x + 0.044715 x^3) is x/(1 + e^-2u): no difference of nearly equal numbers. */
static inline float tf_gelu_of(float x) {
    return x / (1.0f + tf_exp(-1.5957691216057308f * (x + 0.044715f * (x * x * x))));
}

static inline void tf_gelu(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = tf_gelu_of(x[i]);
}

static inline void tf_gelu_mul(const float *gate, float *up, int n) {
    for (int i = 0; i < n; i++) up[i] *= tf_gelu_of(gate[i]);
}

static inline void tf_silu_mul(const float *gate, float *up, int n) {
    for (int i = 0; i < n; i++) up[i] *= gate[i] / (1.0f + tf_exp(-gate[i]));
}

static inline void tf_rotate(float *x, const float *cos, const float *sin, int width) {
    int half = width / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

static inline void tf_rms_norm(const float *x, const float *gain, int n, float eps, float *out) {
    float factor = 1.0f / sqrtf(tf_sum(x, n, 1, 1.0f, 0.0f) / (float)n + eps);
    if (gain)
        for (int i = 0; i < n; i++) out[i] = x[i] * factor * gain[i];
    else
        for (int i = 0; i < n; i++) out[i] = x[i] * factor;
}

static inline void tf_layer_norm(const float *x, const float *gain, const float *bias, int n, float eps, float *out) {
    float mean = tf_sum(x, n, 0, 1.0f, 0.0f) / (float)n;
    float factor = 1.0f / sqrtf(tf_sum(x, n, 1, 1.0f, mean) / (float)n + eps);
    for (int i = 0; i < n; i++) out[i] = (x[i] - mean) * factor;
    if (gain)
        for (int i = 0; i < n; i++) out[i] *= gain[i];
    if (bias)
        for (int i = 0; i < n; i++) out[i] += bias[i];
}

/* The largest of s; NaN is passed over, -infinity when there is nothing else. */
static inline float tf_peak(const float *s, int n) {
    tf_lanes top = (tf_lanes){0} - INFINITY, v;
    float lane[8], largest = -INFINITY;
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        memcpy(&v, s + i, sizeof v);
        tf_masks above = v > top;
        top = (tf_lanes)(((tf_masks)v & above) | ((tf_masks)top & ~above));
    }
    memcpy(lane, &top, sizeof lane);
    for (int k = 0; k < 8; k++) largest = lane[k] > largest ? lane[k] : largest;
    for (; i < n; i++) largest = s[i] > largest ? s[i] : largest;
    return largest;
}

/* Of each of `rows` rows of n scores: weights e^(s - max s) in their place, the largest score, the weights' sum. One step for all rows
 * before the next: each is a chain of operations that wait for one another, and several chains run at once. */
static inline void tf_softmax(float *s, int stride, int rows, int n, float *peak, float *total) {
    for (int r = 0; r < rows; r++) peak[r] = tf_peak(s + r * stride, n);
    for (int r = 0; r < rows; r++) {
        float *row = s + r * stride, top = peak[r];
        for (int i = 0; i < n; i++) row[i] = tf_exp(row[i] - top);
    }
    for (int r = 0; r < rows; r++) total[r] = tf_sum(s + r * stride, n, 0, 1.0f, 0.0f);
}

/* kernels.h: merge. */
static inline void tf_merge(float *out, float *peak, float *total, const float *other, float other_peak, float other_total, int width) {
    float high = *peak > other_peak ? *peak : other_peak;
    float own = *total * tf_exp(*peak - high), more = other_total * tf_exp(other_peak - high);
    float keep = own / (own + more), add = more / (own + more);
    for (int i = 0; i < width; i++) out[i] = out[i] * keep + other[i] * add;
    *peak = high;
    *total = own + more;
}

/* kernels.h: quantise. The steps are those of kernels/bitlinear/eager.py: over a power of two first, so that no square overflows. */
static inline void tf_quantise(const float *x, int columns, float eps, int8_t *q, float *step, int32_t *sum) {
    int32_t bits = tf_largest_bits(x, columns), total = 0;
    memset(q + columns, 0, tf_quantised_bytes(columns) - (size_t)columns);
    if (bits >= TF_INFINITY_BITS) {
        memset(q, 0, (size_t)columns);
        *step = NAN, *sum = 0;
        return;
    }
    float largest = tf_float((uint32_t)bits), units = tf_float((uint32_t)bits & TF_INFINITY_BITS);
    if (units < 1.0f) units = 1.0f;
    float inverse = 1.0f / units;
    float mean = tf_sum(x, columns, 1, inverse, 0.0f) / (float)columns + eps / units / units;
    float factor = 1.0f / sqrtf(mean < FLT_MIN ? FLT_MIN : mean);
    largest = largest * inverse * factor;
    if (largest < TF_MIN_MAGNITUDE) largest = TF_MIN_MAGNITUDE;
    float steps = 127.0f / largest;
    for (int i = 0; i < columns; i++) {
        int32_t value = tf_nearest(x[i] * inverse * factor * steps);
        q[i] = (int8_t)value;
        total += value;
    }
    *step = largest / 127.0f, *sum = total;
}

#endif
