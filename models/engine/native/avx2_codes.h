/* Scores of sign codes, 32 ids at a time: a shuffle looks 32 of them up in one group's table. Sums are exact, in 16 bits: of even
 * bytes (ids 0-15 of a block) and odd ones (ids 16-31). */
#ifndef TF_AVX2_CODES_H
#define TF_AVX2_CODES_H

#include <immintrin.h>

#define TF_PLACE(i) ((i) % 16 * 2 + (i) / 16)
#include "lut8.h"

enum {
    CODES_AHEAD = 4096, /* bytes that the prefetch runs ahead */
    CODES_FLUSH = 128   /* bytes of a code, 256 groups, whose entries' sum fits 16 bits: 256 * 255 < 2^16 */
};

/* Sums of table entries of a block's ids: 0-7, 8-15, 16-23, 24-31. */
static inline void block_sums(const uint8_t *codes, size_t bytes, const __m128i *tables, __m256i sums[4]) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; i++) sums[i] = _mm256_setzero_si256();
    while (bytes) {
        size_t n = bytes < CODES_FLUSH ? bytes : CODES_FLUSH;
        __m256i both = _mm256_setzero_si256(), odd = both; /* both: even + 256 odd, modulo 2^16 */
        bytes -= n;
        for (; n; n--, codes += TF_IDS, tables += 2) {
            _mm_prefetch((const char *)codes + CODES_AHEAD, _MM_HINT_NTA);
            __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)codes);
            __m256i low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(tables[0]), _mm256_and_si256(v, mask));
            __m256i high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(tables[1]), _mm256_and_si256(_mm256_srli_epi16(v, 4), mask));
            both = _mm256_add_epi16(both, _mm256_add_epi16(low, high));
            odd = _mm256_add_epi16(odd, _mm256_add_epi16(_mm256_srli_epi16(low, 8), _mm256_srli_epi16(high, 8)));
        }
        __m256i even = _mm256_sub_epi16(both, _mm256_slli_epi16(odd, 8));
        sums[0] = _mm256_add_epi32(sums[0], _mm256_cvtepu16_epi32(_mm256_castsi256_si128(even)));
        sums[1] = _mm256_add_epi32(sums[1], _mm256_cvtepu16_epi32(_mm256_extracti128_si256(even, 1)));
        sums[2] = _mm256_add_epi32(sums[2], _mm256_cvtepu16_epi32(_mm256_castsi256_si128(odd)));
        sums[3] = _mm256_add_epi32(sums[3], _mm256_cvtepu16_epi32(_mm256_extracti128_si256(odd, 1)));
    }
}

/* Scores of a whole block; `largest` is carried on. */
static inline __m256 score_block(const uint8_t *codes, size_t bytes, const tf_code_tables *tables, const float *prior, __m256 largest,
                                 float *scores) {
    const __m256 unit = _mm256_set1_ps(tables->unit), start = _mm256_set1_ps(tables->start);
    __m256i sums[4];
    block_sums(codes, bytes, tables->tables, sums);
    for (int i = 0; i < 4; i++) {
        __m256 score = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[i]), unit, start);
        if (prior) score = _mm256_add_ps(score, _mm256_loadu_ps(prior + 8 * i));
        _mm256_storeu_ps(scores + 8 * i, score);
        largest = _mm256_max_ps(score, largest); /* NaN: the second operand */
    }
    return largest;
}

static float score_codes(const void *form, int capacity, int bits, const tf_code_tables *tables, const float *prior, int begin, int end,
                         float *scores) {
    (void)capacity;
    const uint8_t *codes = tf_code(form, bits, begin);
    size_t bytes = tf_code_bytes(bits);
    float lane[8], block[TF_IDS], largest = -INFINITY;
    __m256 largests = _mm256_set1_ps(-INFINITY);
    int id = begin;
    for (; id + TF_IDS <= end; id += TF_IDS, codes += TF_IDS * bytes)
        largests = score_block(codes, bytes, tables, prior ? prior + id : NULL, largests, scores + (id - begin));
    _mm256_storeu_ps(lane, largests);
    for (int i = 0; i < 8; i++) largest = lane[i] > largest ? lane[i] : largest;
    if (id < end) score_block(codes, bytes, tables, NULL, largests, block);
    for (int i = 0; id + i < end; i++) {
        float score = prior ? block[i] + prior[id + i] : block[i];
        scores[id + i - begin] = score;
        largest = score > largest ? score : largest;
    }
    return largest;
}

#endif
