/* Norms, activations, rotation, softmax and the rounding of activations: one text for all backends. The loops are plain, so that
 * the compiler makes vectors of them under each backend's flags; as products and sums are not contracted (models/engine/build.py)
 * every backend gives the same bits. */
#ifndef TF_ELEMENTWISE_H
#define TF_ELEMENTWISE_H

#include <float.h>
#include <math.h>

#include "forms.h"

#define TF_MIN_MAGNITUDE 1e-5f /* kernels/bitlinear/naive.py */

/* e^x within 2 units in the last place (polynomial: Cephes' expf). Below -87.7 it is 0, above 88.37 infinite; NaN stays. No branch
 * and no cast: NaN makes a meaningless power of two, which the NaN of the polynomial swallows. */
static inline float tf_exp(float x) {
    x = x < -88.0f ? -88.0f : x;
    x = x > 89.0f ? 89.0f : x;
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

/* Weights e^(s - max s) in place of the scores s; the largest score, the weights' sum; returns one over that. */
static inline float tf_softmax(float *s, int n, float *peak, float *total) {
    float largest = -INFINITY;
    for (int i = 0; i < n; i++) largest = s[i] > largest ? s[i] : largest;
    for (int i = 0; i < n; i++) s[i] = tf_exp(s[i] - largest);
    *peak = largest;
    *total = tf_sum(s, n, 0, 1.0f, 0.0f);
    return 1.0f / *total;
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
