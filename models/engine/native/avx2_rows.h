/* int8, fp16 and fp32 rows times fp32 tokens: weights are widened to fp32, 8 at a time. */
#ifndef TF_AVX2_ROWS_H
#define TF_AVX2_ROWS_H

#include <immintrin.h>

#include "forms.h"

enum { ROWS_AHEAD = 1024 }; /* bytes that the prefetch runs ahead, in each of the rows */

/* 8 elements from the i-th on; a row's bytes are rounded up to whole eights. */
TF_INLINE __m256 widened(int kind, const void *row, int i) {
    if (kind == TF_INT8)
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)((const int8_t *)row + i))));
    if (kind == TF_FLOAT16) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)row + i)));
    return _mm256_loadu_ps((const float *)row + i);
}

/* All ones in the first n of 8. */
TF_INLINE __m256i first_of_8(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

TF_INLINE float sum_of_8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* The sums of four vectors, each in the order of sum_of_8. */
TF_INLINE __m128 sums_of_8(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1));
    _MM_TRANSPOSE4_PS(x, y, z, w);
    return _mm_add_ps(_mm_add_ps(x, z), _mm_add_ps(y, w));
}

/* Products of `rows` rows and `tokens` tokens (both known when compiled): each has one vector of sums, whatever the tile. */
TF_INLINE void rows_tile(int kind, int rows, int tokens, const tf_matrix *w, const float *x, size_t x_stride, int row, float *y,
                         size_t y_stride) {
    const char *base = tf_row(w, row);
    size_t bytes = tf_row_bytes(kind, w->columns);
    __m256 sum[3][4], values[3];
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++) sum[t][r] = _mm256_setzero_ps();
    int c = 0;
    for (; c + 8 <= w->columns; c += 8) {
        for (int t = 0; t < tokens; t++) values[t] = _mm256_loadu_ps(x + (size_t)t * x_stride + c);
        for (int r = 0; r < rows; r++) {
            __m256 weights = widened(kind, base + (size_t)r * bytes, c);
            for (int t = 0; t < tokens; t++) sum[t][r] = _mm256_fmadd_ps(weights, values[t], sum[t][r]);
        }
    }
    if (c < w->columns) {
        __m256i mask = first_of_8(w->columns - c);
        for (int t = 0; t < tokens; t++) values[t] = _mm256_maskload_ps(x + (size_t)t * x_stride + c, mask);
        for (int r = 0; r < rows; r++) {
            __m256 weights = widened(kind, base + (size_t)r * bytes, c);
            for (int t = 0; t < tokens; t++) sum[t][r] = _mm256_fmadd_ps(weights, values[t], sum[t][r]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++) {
            float value = sum_of_8(sum[t][r]);
            if (kind == TF_INT8) value *= tf_scale(w, row + r);
            y[(size_t)t * y_stride + (size_t)(row + r)] = value + tf_bias(w, row + r);
        }
}

TF_INLINE void rows_block(int kind, int rows, const tf_matrix *w, const tf_input *x, int row, float *y, size_t y_stride) {
    int t = 0;
    for (; t + 3 <= x->tokens; t += 3)
        rows_tile(kind, rows, 3, w, x->x + (size_t)t * x->x_stride, x->x_stride, row, y + (size_t)t * y_stride, y_stride);
    for (; t < x->tokens; t++)
        rows_tile(kind, rows, 1, w, x->x + (size_t)t * x->x_stride, x->x_stride, row, y + (size_t)t * y_stride, y_stride);
}

TF_INLINE void multiply_rows(int kind, const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    int row = begin;
    for (; row + TF_ROWS <= end; row += TF_ROWS) rows_block(kind, TF_ROWS, w, x, row, y, y_stride);
    for (; row < end; row++) rows_block(kind, 1, w, x, row, y, y_stride);
}

static void multiply_int8(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    multiply_rows(TF_INT8, w, x, y, y_stride, begin, end);
}

static void multiply_float16(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    multiply_rows(TF_FLOAT16, w, x, y, y_stride, begin, end);
}

static void multiply_float32(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    multiply_rows(TF_FLOAT32, w, x, y, y_stride, begin, end);
}

#endif
