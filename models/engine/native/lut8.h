/* Tables of 16 bytes for each 4 bits of a code, as byte shuffles take them (pshufb, vqtbl1q).
 *
 * Entry of group g (hidden values h) for bits b: round((<h, signs(b)> + S_g)/u), S_g = sum |h| of the group, u = max S_g/127.5. It is
 * within 0 .. 255, and off by at most u/2; so with G groups
 *     |u sum(entries) - sum S_g - <hidden, code>| <= G u/2,
 * and the fp32 rounding of quotient and sums on top: 2^-13 u a group is more than the quotient's (255 u times 3 * 2^-24). */
#ifndef TF_LUT8_H
#define TF_LUT8_H

#include "codes.h"

/* Two groups a byte of the code, also where a code has spare bits: those meet zeros. */
static inline size_t lut8_bytes(int bits) { return tf_code_bytes(bits) * 2 * 16; }

static inline void lut8_constant(tf_code_tables *tables, int bits, float start, float error) {
    memset(tables->tables, 0, lut8_bytes(bits));
    tables->unit = 0.0f, tables->start = start, tables->error = error;
}

static inline void lut8_tables(const float *hidden, int bits, tf_code_tables *tables) {
    uint8_t *entry = tables->tables;
    int groups = (int)tf_code_bytes(bits) * 2;
    float sums[16], largest = 0.0f, total = 0.0f, factor = tf_code_factor(bits);
    for (int g = 0; g < groups; g++) {
        float magnitude = tf_signed_sums(hidden, bits, 4 * g, sums);
        total += magnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (!(total < 1e38f)) { /* NaN, infinite, or sums of it could be */
        lut8_constant(tables, bits, NAN, NAN);
        return;
    }
    if (largest < 1e-30f) { /* 127.5/largest could be infinite; every score is within the total of 0 */
        lut8_constant(tables, bits, 0.0f, total * factor);
        return;
    }
    float inverse = 127.5f / largest, unit = largest / 127.5f;
    for (int g = 0; g < groups; g++, entry += 16) {
        float magnitude = tf_signed_sums(hidden, bits, 4 * g, sums);
        for (int b = 0; b < 16; b++) entry[b] = (uint8_t)tf_nearest((sums[b] + magnitude) * inverse);
    }
    tables->unit = unit * factor;
    tables->start = -total * factor;
    tables->error = ((float)groups * (0.5f + 0x1p-13f) * unit + tf_sum_error(bits, total)) * factor;
}

/* Fewer groups, each of the same unit; that unit was multiplied by the factor, which rounds 255 u once more: 2^-13 u holds that too.
 * Constant tables say 0 for everything, which is off by the magnitudes themselves. */
static inline void lut8_part(const float *hidden, int bits, const tf_code_tables *whole, int from, int to, tf_code_tables *part) {
    float total = tf_magnitudes(hidden, from, to), factor = tf_code_factor(bits), groups = (float)(tf_code_bytes(to - from) * 2);
    int constant = !(whole->unit > 0.0f);
    part->tables = (uint8_t *)whole->tables + lut8_bytes(from);
    part->unit = whole->unit;
    part->start = constant ? 0.0f : -total * factor;
    part->error = (constant ? total * factor : groups * (0.5f + 0x1p-13f) * whole->unit) + tf_sum_error(bits, total) * factor;
}

/* The same for what those entries round off, which is within u/2: shifted by that, in 255 steps. The fp32 rounding of sums and
 * products, 255 u times 4 * 2^-24, is less than 2^-5 of such a step. */
static inline void lut8_refine(const float *hidden, int bits, const tf_code_tables *coarse, tf_code_tables *fine) {
    const uint8_t *rounded = coarse->tables;
    uint8_t *entry = fine->tables;
    int groups = (int)tf_code_bytes(bits) * 2;
    float sums[16], largest = 0.0f, total = 0.0f, factor = tf_code_factor(bits);
    if (!(coarse->unit > 0.0f)) {
        lut8_constant(fine, bits, 0.0f, coarse->error);
        return;
    }
    for (int g = 0; g < groups; g++) {
        float magnitude = tf_signed_sums(hidden, bits, 4 * g, sums);
        total += magnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    float unit = largest / 127.5f, half = 0.5001f * unit, inverse = 127.5f / half;
    for (int g = 0; g < groups; g++, entry += 16, rounded += 16) {
        float magnitude = tf_signed_sums(hidden, bits, 4 * g, sums);
        for (int b = 0; b < 16; b++) {
            float step = ((sums[b] + magnitude) - (float)rounded[b] * unit + half) * inverse;
            entry[b] = (uint8_t)tf_nearest(step < 0.0f ? 0.0f : step > 255.0f ? 255.0f : step);
        }
    }
    fine->unit = half / 127.5f * factor;
    fine->start = -(float)groups * half * factor;
    fine->error = ((float)groups * (0.5f + 0x1p-5f) * (half / 127.5f) + 2.0f * tf_sum_error(bits, total)) * factor;
}

#endif
