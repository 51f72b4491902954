/* How sign codes lie in memory, for every backend: 32 ids a block, byte p of all 32 codes together, so that one load meets one byte
 * of the hidden state's tables. TF_PLACE(i), where id i of a block lies among the 32, is the backend's choice. */
#ifndef TF_CODES_H
#define TF_CODES_H

#include <math.h>

#include "kernels.h"
#include "numbers.h"

#ifndef TF_PLACE
#define TF_PLACE(i) (i)
#endif

enum { TF_IDS = 32 };

static inline size_t tf_code_bytes(int bits) { return ((size_t)bits + 7) / 8; }

static inline size_t tf_codes_bytes(int count, int bits) { return tf_ceil((size_t)count, TF_IDS) * tf_code_bytes(bits); }

/* Where the first byte of a code lies; the next ones follow 32 bytes apart. */
static inline size_t tf_code_offset(int bits, int id) {
    return (size_t)(id / TF_IDS) * TF_IDS * tf_code_bytes(bits) + (size_t)TF_PLACE(id % TF_IDS);
}

static inline const uint8_t *tf_code(const void *form, int bits, int id) { return (const uint8_t *)form + tf_code_offset(bits, id); }

static inline void tf_form_codes(void *form, int capacity, int bits, int first, int count, const uint32_t *words) {
    (void)capacity;
    size_t bytes = tf_code_bytes(bits), row_words = ((size_t)bits + 31) / 32;
    for (int i = 0; i < count; i++) {
        uint8_t *code = (uint8_t *)form + tf_code_offset(bits, first + i);
        const uint32_t *row = words + (size_t)i * row_words;
        for (size_t p = 0; p < bytes; p++) code[p * TF_IDS] = (uint8_t)(row[p / 4] >> p % 4 * 8);
    }
}

static inline void tf_code_words(const void *form, int capacity, int bits, int id, uint32_t *words) {
    (void)capacity;
    const uint8_t *code = tf_code(form, bits, id);
    memset(words, 0, ((size_t)bits + 31) / 32 * sizeof *words);
    for (size_t p = 0; p < tf_code_bytes(bits); p++) words[p / 4] |= (uint32_t)code[p * TF_IDS] << p % 4 * 8;
}

static inline float tf_code_factor(int bits) { return 1.0f / sqrtf((float)bits); }

static inline float tf_exact_score(const void *form, int capacity, int bits, int id, const float *hidden) {
    (void)capacity;
    const uint8_t *code = tf_code(form, bits, id);
    float lane[8] = {0};
    for (int k = 0; k < bits; k += 8, code += TF_IDS) {
        int n = bits - k < 8 ? bits - k : 8;
        for (int i = 0; i < n; i++) lane[i] += tf_float(tf_bits(hidden[k + i]) ^ (~(uint32_t)*code >> i & 1) << 31);
    }
    return tf_tree(lane) * tf_code_factor(bits);
}

/* Sums of 4 hidden values with the signs of the 16 possible bits, hidden values from `bits` on counting as 0. Returns the sum of
 * their magnitudes, which all of them are within. */
static inline float tf_signed_sums(const float *hidden, int bits, int first, float sums[16]) {
    float h[4] = {0}, magnitude = 0.0f;
    for (int i = 0; i < 4 && first + i < bits; i++) h[i] = hidden[first + i], magnitude += fabsf(h[i]);
    for (int code = 0; code < 16; code++) {
        sums[code] = 0.0f;
        for (int i = 0; i < 4; i++) sums[code] += code >> i & 1 ? h[i] : -h[i];
    }
    return magnitude;
}

/* What rounding may take from an approximate score and the exact one together, where magnitudes add up to `magnitude`: a sum whose
 * terms each take part in n additions is off by at most n 2^-24 of it, and higher orders (Higham, Accuracy and Stability of Numerical
 * Algorithms, 4.2). n: at most bits/8 + 5 in tf_exact_score, bits/4 + 8 in a backend's tables, start and sums. */
static inline float tf_sum_error(int bits, float magnitude) { return ((float)bits * 0.5f + 16.0f) * 0x1p-24f * magnitude; }

#endif
