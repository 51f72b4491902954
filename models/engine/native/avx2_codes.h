/* Scores of sign codes, 32 places at a time: a shuffle looks 32 of them up in one group's table. Sums are exact, in 16 bits: of even
 * bytes (places 0-15 of a block) and odd ones (places 16-31). */
#ifndef TF_AVX2_CODES_H
#define TF_AVX2_CODES_H

#include <immintrin.h>

#define TF_PLACE(i) ((i) % 16 * 2 + (i) / 16)
#include "lut8.h"

enum {
    CODES_AHEAD = 4096, /* bytes that the prefetch runs ahead */
    CODES_FLUSH = 128   /* bytes of a code, 256 groups, whose entries' sum fits 16 bits: 256 * 255 < 2^16 */
};

/* Adds table entries of a stream's block to the sums of its places: 0-7, 8-15, 16-23, 24-31. */
static inline void add_entries(const uint8_t *codes, size_t bytes, size_t ahead, const __m128i *tables, __m256i sums[4]) {
    const __m256i mask = _mm256_set1_epi8(15);
    while (bytes) {
        size_t n = bytes < CODES_FLUSH ? bytes : CODES_FLUSH;
        __m256i both = _mm256_setzero_si256(), odd = both; /* both: even + 256 odd, modulo 2^16 */
        bytes -= n;
        for (; n; n--, codes += TF_IDS, tables += 2) {
            _mm_prefetch((const char *)codes + ahead, _MM_HINT_NTA);
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
static inline __m256 score_block(const tf_codes *codes, int first, int last, int place, const tf_code_tables *tables, const float *prior,
                                 __m256 largest, float *scores) {
    const __m256 unit = _mm256_set1_ps(tables->unit), start = _mm256_set1_ps(tables->start);
    const __m128i *entries = tables->tables;
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int s = first; s < last; s++) {
        size_t bytes = tf_code_bytes(tf_stream_bits(codes, s));
        add_entries(tf_code(codes, s, place), bytes, first ? 0 : CODES_AHEAD, entries, sums);
        entries += 2 * bytes;
    }
    for (int i = 0; i < 4; i++) {
        __m256 score = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[i]), unit, start);
        if (prior) score = _mm256_add_ps(score, _mm256_loadu_ps(prior + 8 * i));
        _mm256_storeu_ps(scores + 8 * i, score);
        largest = _mm256_max_ps(score, largest); /* NaN: the second operand */
    }
    return largest;
}

static float score_codes(const tf_codes *codes, int first, int last, const tf_code_tables *tables, const float *prior, int begin, int end,
                         float *scores) {
    float lane[8], block[TF_IDS], largest = -INFINITY;
    __m256 largests = _mm256_set1_ps(-INFINITY);
    int count = end - begin, i = 0;
    for (; i + TF_IDS <= count; i += TF_IDS)
        largests = score_block(codes, first, last, begin + i, tables, prior ? prior + i : NULL, largests, scores + i);
    _mm256_storeu_ps(lane, largests);
    for (int j = 0; j < 8; j++) largest = lane[j] > largest ? lane[j] : largest;
    if (i < count) score_block(codes, first, last, begin + i, tables, NULL, largests, block);
    for (int j = 0; i + j < count; j++) {
        float score = prior ? block[j] + prior[i + j] : block[j];
        scores[i + j] = score;
        largest = score > largest ? score : largest;
    }
    return largest;
}

#endif
