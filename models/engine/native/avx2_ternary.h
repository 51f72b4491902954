/* Ternary rows times int8 tokens: _mm256_maddubs_epi16 multiplies 32 codes (0 .. 2) by 32 values of q and adds neighbours, exactly.
 * One token: the codes stay in place, in the bits that a mask leaves, and memory is the limit. More tokens: they are spread to a byte
 * each once for many tokens, and the multipliers are the limit (64 products a cycle). */
#ifndef TF_AVX2_TERNARY_H
#define TF_AVX2_TERNARY_H

#include <immintrin.h>

#include "forms.h"

enum {
    TERNARY_AHEAD = 3072, /* bytes that the prefetch runs ahead */
    TERNARY_FLUSH = 8,    /* chunks: a 16-bit sum of codes times 4 takes 2 * 4 * 2 * 2 * 127 in each, 32512 after 8 */
    SPREAD_CHUNKS = 16,   /* chunks: a 16-bit sum of single codes takes 4 * 2 * 2 * 127 in each, 32512 after 16 */
    TOKEN_BLOCK = 32      /* tokens whose q stays in the nearest caches while all rows pass */
};

/* The sums of four vectors of int32. */
TF_INLINE __m128i sums_of_4(__m256i a, __m256i b, __m256i c, __m256i d) {
    __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    return _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

/* One row's 128 columns: `plain` takes codes, `fourfold` four times codes. q comes from memory as the second operand. */
TF_INLINE void add_piece(const uint8_t *piece, const __m256i *q, __m256i *plain, __m256i *fourfold) {
    const __m256i low = _mm256_set1_epi8(3), high = _mm256_set1_epi8(12);
    __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)piece), upper = _mm256_srli_epi16(codes, 4);
    *plain = _mm256_add_epi16(*plain, _mm256_maddubs_epi16(_mm256_and_si256(codes, low), _mm256_loadu_si256(q)));
    *fourfold = _mm256_add_epi16(*fourfold, _mm256_maddubs_epi16(_mm256_and_si256(codes, high), _mm256_loadu_si256(q + 1)));
    *plain = _mm256_add_epi16(*plain, _mm256_maddubs_epi16(_mm256_and_si256(upper, low), _mm256_loadu_si256(q + 2)));
    *fourfold = _mm256_add_epi16(*fourfold, _mm256_maddubs_epi16(_mm256_and_si256(upper, high), _mm256_loadu_si256(q + 3)));
}

/* 4 plain + fourfold, in 32 bits. */
TF_INLINE __m256i fold(__m256i plain, __m256i fourfold) {
    return _mm256_add_epi32(_mm256_madd_epi16(plain, _mm256_set1_epi16(4)), _mm256_madd_epi16(fourfold, _mm256_set1_epi16(1)));
}

/* <codes, q> of a block's four rows. */
TF_INLINE __m128i block_dot(const uint8_t *piece, const int8_t *q, size_t chunks) {
    __m256i s0 = _mm256_setzero_si256(), s1 = s0, s2 = s0, s3 = s0;
    while (chunks) {
        size_t n = chunks < TERNARY_FLUSH ? chunks : TERNARY_FLUSH;
        __m256i a0 = _mm256_setzero_si256(), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
        chunks -= n;
        for (; n; n--, piece += TF_ROWS * TF_PIECE, q += TF_CHUNK) {
            const __m256i *columns = (const __m256i *)(const void *)q;
            _mm_prefetch((const char *)piece + TERNARY_AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char *)piece + TERNARY_AHEAD + 64, _MM_HINT_T0);
            add_piece(piece, columns, &a0, &b0);
            add_piece(piece + TF_PIECE, columns, &a1, &b1);
            add_piece(piece + 2 * TF_PIECE, columns, &a2, &b2);
            add_piece(piece + 3 * TF_PIECE, columns, &a3, &b3);
        }
        s0 = _mm256_add_epi32(s0, fold(a0, b0)), s1 = _mm256_add_epi32(s1, fold(a1, b1));
        s2 = _mm256_add_epi32(s2, fold(a2, b2)), s3 = _mm256_add_epi32(s3, fold(a3, b3));
    }
    return _mm_srai_epi32(sums_of_4(s0, s1, s2, s3), 2); /* four times the sums, so nothing is lost */
}

/* Scales and bias of a block's rows; zeros beyond the last row. */
typedef struct {
    __m128 scale, bias;
    int rows;
} finish;

TF_INLINE finish finish_of(const tf_matrix *w, int row, int end) {
    float scale[TF_ROWS] = {0}, bias[TF_ROWS] = {0};
    int rows = end - row < TF_ROWS ? end - row : TF_ROWS;
    for (int i = 0; i < rows; i++) scale[i] = tf_scale(w, row + i), bias[i] = tf_bias(w, row + i);
    return (finish){_mm_loadu_ps(scale), _mm_loadu_ps(bias), rows};
}

/* y of a block's rows for one token. */
TF_INLINE void put_block(finish f, __m128i dot, int32_t sum, float step, float *y) {
    __m128 value = _mm_cvtepi32_ps(_mm_sub_epi32(dot, _mm_set1_epi32(sum)));
    value = _mm_add_ps(_mm_mul_ps(_mm_mul_ps(value, _mm_set1_ps(step)), f.scale), f.bias);
    if (f.rows == TF_ROWS) {
        _mm_storeu_ps(y, value);
        return;
    }
    float values[TF_ROWS];
    _mm_storeu_ps(values, value);
    for (int i = 0; i < f.rows; i++) y[i] = values[i];
}

static void ternary_one(const tf_matrix *w, const tf_input *x, float *y, int begin, int end) {
    size_t chunks = tf_chunks(w->columns);
    for (int row = begin; row < end; row += TF_ROWS)
        put_block(finish_of(w, row, end), block_dot(tf_ternary_row(w, row), x->q, chunks), x->sum[0], x->step[0], y + row);
}

/* A byte a code; per 32 columns one vector of each of the four rows. */
static inline void spread(const uint8_t *piece, size_t chunks, __m256i *codes) {
    const __m256i mask = _mm256_set1_epi8(3);
    for (size_t i = 0; i < chunks; i++, codes += 4 * TF_ROWS)
        for (int row = 0; row < TF_ROWS; row++, piece += TF_PIECE) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)piece);
            codes[row] = _mm256_and_si256(v, mask);
            codes[row + TF_ROWS] = _mm256_and_si256(_mm256_srli_epi16(v, 2), mask);
            codes[row + 2 * TF_ROWS] = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
            codes[row + 3 * TF_ROWS] = _mm256_and_si256(_mm256_srli_epi16(v, 6), mask);
        }
}

TF_INLINE __m256i add_products(__m256i sum, __m256i codes, __m256i values) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, values));
}

/* <codes, q> of four rows and two tokens (q and next); what follows the first columns is added. */
TF_INLINE void spread_dot(const __m256i *codes, const int8_t *q, const int8_t *next, size_t vectors, int first, __m128i *sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i a0 = _mm256_setzero_si256(), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    const __m256i *end = codes + vectors * TF_ROWS;
#pragma GCC unroll 4
    for (; codes != end; codes += TF_ROWS, q += TF_PIECE, next += TF_PIECE) {
        __m256i one = _mm256_loadu_si256((const __m256i *)(const void *)q), two = _mm256_loadu_si256((const __m256i *)(const void *)next);
        a0 = add_products(a0, codes[0], one), b0 = add_products(b0, codes[0], two);
        a1 = add_products(a1, codes[1], one), b1 = add_products(b1, codes[1], two);
        a2 = add_products(a2, codes[2], one), b2 = add_products(b2, codes[2], two);
        a3 = add_products(a3, codes[3], one), b3 = add_products(b3, codes[3], two);
    }
    __m128i one = sums_of_4(_mm256_madd_epi16(a0, ones), _mm256_madd_epi16(a1, ones), _mm256_madd_epi16(a2, ones), _mm256_madd_epi16(a3, ones));
    __m128i two = sums_of_4(_mm256_madd_epi16(b0, ones), _mm256_madd_epi16(b1, ones), _mm256_madd_epi16(b2, ones), _mm256_madd_epi16(b3, ones));
    sums[0] = first ? one : _mm_add_epi32(sums[0], one);
    sums[1] = first ? two : _mm_add_epi32(sums[1], two);
}

/* Four rows, at most TOKEN_BLOCK tokens from `first` on. */
static inline void ternary_block(const tf_matrix *w, const tf_input *x, int first, int tokens, int row, int end, float *y,
                                 size_t y_stride) {
    __m256i codes[SPREAD_CHUNKS * 4 * TF_ROWS];
    __m128i sums[TOKEN_BLOCK + 1]; /* of an odd number, the last token counts twice */
    const uint8_t *piece = tf_ternary_row(w, row);
    const int8_t *q = x->q + (size_t)first * x->q_stride;
    const size_t all = tf_chunks(w->columns);
    for (size_t chunks = all, n; chunks; chunks -= n, piece += n * TF_ROWS * TF_PIECE, q += n * TF_CHUNK) {
        n = chunks < SPREAD_CHUNKS ? chunks : SPREAD_CHUNKS;
        spread(piece, n, codes);
        for (int t = 0; t < tokens; t += 2) {
            const int8_t *one = q + (size_t)t * x->q_stride, *two = t + 1 < tokens ? one + x->q_stride : one;
            spread_dot(codes, one, two, n * 4, chunks == all, sums + t);
        }
    }
    finish f = finish_of(w, row, end);
    for (int t = 0; t < tokens; t++)
        put_block(f, sums[t], x->sum[first + t], x->step[first + t], y + (size_t)(first + t) * y_stride + row);
}

static void multiply_ternary(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    if (x->tokens == 1) {
        ternary_one(w, x, y, begin, end);
        return;
    }
    for (int first = 0; first < x->tokens; first += TOKEN_BLOCK) {
        int tokens = x->tokens - first < TOKEN_BLOCK ? x->tokens - first : TOKEN_BLOCK;
        for (int row = begin; row < end; row += TF_ROWS) ternary_block(w, x, first, tokens, row, end, y, y_stride);
    }
}

#endif
