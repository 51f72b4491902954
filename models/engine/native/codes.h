/* How sign codes lie in memory, for every backend: in each stream 32 places a block, byte p of all 32 codes together, so that one load
 * meets one byte of the hidden state's tables. TF_PLACE(i), where place i of a block lies among the 32, is the backend's choice. */
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

static inline int tf_stream_bits(const tf_codes *codes, int stream) { return codes->from[stream + 1] - codes->from[stream]; }

/* Where the first byte of a code's share of a stream lies; the next ones follow 32 bytes apart. */
static inline uint8_t *tf_code(const tf_codes *codes, int stream, int place) {
    size_t block = (size_t)(place / TF_IDS) * TF_IDS * tf_code_bytes(tf_stream_bits(codes, stream));
    return (uint8_t *)codes->form[stream] + block + TF_PLACE(place % TF_IDS);
}

static inline void tf_form_codes(const tf_codes *codes, int first, int count, const uint32_t *words) {
    size_t row_words = ((size_t)codes->bits + 31) / 32;
    for (int i = 0; i < count; i++, words += row_words)
        for (int s = 0; s < codes->streams; s++) {
            uint8_t *code = tf_code(codes, s, first + i);
            for (int p = codes->from[s] / 8; 8 * p < codes->from[s + 1]; p++, code += TF_IDS) *code = (uint8_t)(words[p / 4] >> p % 4 * 8);
        }
}

static inline void tf_code_words(const tf_codes *codes, int place, uint32_t *words) {
    memset(words, 0, ((size_t)codes->bits + 31) / 32 * sizeof *words);
    for (int s = 0; s < codes->streams; s++) {
        const uint8_t *code = tf_code(codes, s, place);
        for (int p = codes->from[s] / 8; 8 * p < codes->from[s + 1]; p++, code += TF_IDS) words[p / 4] |= (uint32_t)*code << p % 4 * 8;
    }
}

static inline float tf_code_factor(int bits) { return 1.0f / sqrtf((float)bits); }

/* Streams meet at multiples of 8 bits, so the lanes do not show them. */
static inline float tf_exact_score(const tf_codes *codes, int place, const float *hidden) {
    float lane[8] = {0};
    for (int s = 0; s < codes->streams; s++) {
        const uint8_t *code = tf_code(codes, s, place);
        for (int k = codes->from[s]; k < codes->from[s + 1]; k += 8, code += TF_IDS) {
            int n = codes->bits - k < 8 ? codes->bits - k : 8;
            for (int i = 0; i < n; i++) lane[i] += tf_float(tf_bits(hidden[k + i]) ^ (~(uint32_t)*code >> i & 1) << 31);
        }
    }
    return tf_tree(lane) * tf_code_factor(codes->bits);
}

/* Sum of the magnitudes of 4 hidden values, of which those from `bits` on count as 0. */
static inline float tf_magnitude(const float *hidden, int bits, int first) {
    float magnitude = 0.0f;
    for (int i = first; i < first + 4 && i < bits; i++) magnitude += fabsf(hidden[i]);
    return magnitude;
}

/* The same of bits [from, to): groups of 4 first, as backends add them up. */
static inline float tf_magnitudes(const float *hidden, int from, int to) {
    float total = 0.0f;
    for (int k = from; k < to; k += 4) total += tf_magnitude(hidden, to, k);
    return total;
}

/* Sums of 4 hidden values with the signs of the 16 possible bits, hidden values from `bits` on counting as 0. Returns the sum of
 * their magnitudes, which all of them are within. */
static inline float tf_signed_sums(const float *hidden, int bits, int first, float sums[16]) {
    float h[4] = {0};
    for (int i = 0; i < 4 && first + i < bits; i++) h[i] = hidden[first + i];
    for (int code = 0; code < 16; code++) {
        sums[code] = 0.0f;
        for (int i = 0; i < 4; i++) sums[code] += code >> i & 1 ? h[i] : -h[i];
    }
    return tf_magnitude(hidden, bits, first);
}

/* What rounding may take from an approximate score and the exact one together, where magnitudes add up to `magnitude`: a sum whose
 * terms each take part in n additions is off by at most n 2^-24 of it, and higher orders (Higham, Accuracy and Stability of Numerical
 * Algorithms, 4.2). n: at most bits/8 + 5 in tf_exact_score, bits/4 + 8 in a backend's tables, start and sums. */
static inline float tf_sum_error(int bits, float magnitude) { return ((float)bits * 0.5f + 16.0f) * 0x1p-24f * magnitude; }

#endif
