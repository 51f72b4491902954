/* Numbers as bits, and sums whose order is the same on every processor. Included under each backend's own flags. */
#ifndef TF_NUMBERS_H
#define TF_NUMBERS_H

#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

/* For loops whose shape is an argument: inlined, so that the argument is a constant and each shape has a loop of its own. */
#define TF_INLINE static inline __attribute__((always_inline))

#define TF_INFINITY_BITS 0x7f800000 /* of the magnitude: from here on a float is infinite or NaN */
#define TF_ROUNDER 12582912.0f      /* 1.5 * 2^23: adding it leaves the nearest whole number, half to even, in the lowest bits */
#define TF_ROUNDER_BITS 0x4b400000u

static inline uint32_t tf_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float tf_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The nearest whole number of |x| < 2^22, without a float-to-int cast: those are undefined for NaN. */
static inline int32_t tf_nearest(float x) { return (int32_t)(tf_bits(x + TF_ROUNDER) - TF_ROUNDER_BITS); }

static inline size_t tf_ceil(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/* Bits of the largest magnitude of x: integers, because their maximum needs no care for NaN, which is above all. */
static inline int32_t tf_largest_bits(const float *x, int n) {
    int32_t largest = 0;
    for (int i = 0; i < n; i++) {
        int32_t bits = (int32_t)(tf_bits(x[i]) & 0x7fffffff);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Sums run in 8 lanes (element i in lane i % 8), which are then added as a tree. */
typedef float tf_lanes __attribute__((vector_size(32)));
typedef int32_t tf_masks __attribute__((vector_size(32)));

static inline float tf_tree(const float *lane) {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* sum of factor^2 (x - shift)^2 when squared, else of x */
static inline float tf_sum(const float *x, int n, int squared, float factor, float shift) {
    tf_lanes sum = {0}, v;
    float lane[8];
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        memcpy(&v, x + i, sizeof v);
        if (squared) {
            v = (v - shift) * factor;
            v *= v;
        }
        sum += v;
    }
    memcpy(lane, &sum, sizeof lane);
    for (; i < n; i++) {
        float rest = squared ? (x[i] - shift) * factor : x[i];
        lane[i % 8] += squared ? rest * rest : rest;
    }
    return tf_tree(lane);
}

static inline float tf_from_half(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#elif defined(__aarch64__)
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return (float)value;
#else
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t bits = tf_bits(tf_float(magnitude) * 0x1p112f); /* moves the exponent, of subnormal halves too */
    if (magnitude >= 0x0f800000) bits = magnitude | TF_INFINITY_BITS;
    return tf_float(bits | (uint32_t)(half & 0x8000) << 16);
#endif
}

/* Half to even; from 65520 on infinite. */
static inline uint16_t tf_to_half(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    __fp16 value = (__fp16)x;
    uint16_t half;
    memcpy(&half, &value, sizeof half);
    return half;
#else
    uint32_t bits = tf_bits(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > TF_INFINITY_BITS) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) return (uint16_t)(sign | (tf_bits(tf_float(bits) + 0.5f) - 0x3f000000)); /* 0.5: its last bit is 2^-24 */
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
#endif
}

#endif
