/* Ternary rows and sign codes with NEON. What is left is plain C, of which compilers make NEON loops themselves. */
#ifndef TF_NEON_H
#define TF_NEON_H

#include <arm_neon.h>

#include "lut8.h"
#include "plain.h"

/* sum + products of 16 codes and 16 values of q, in any of the four lanes. */
TF_INLINE int32x4_t neon_products(int32x4_t sum, uint8x16_t codes, int8x16_t q) {
    int8x16_t c = vreinterpretq_s8_u8(codes);
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, c, q);
#else
    int16x8_t pairs = vmlal_s8(vmull_s8(vget_low_s8(c), vget_low_s8(q)), vget_high_s8(c), vget_high_s8(q)); /* at most 2 * 2 * 127 */
    return vpadalq_s16(sum, pairs);
#endif
}

/* One row's 128 columns. */
TF_INLINE int32x4_t neon_piece(int32x4_t sum, const uint8_t *piece, const int8_t *q) {
    const uint8x16_t mask = vdupq_n_u8(3);
    for (int half = 0; half < 2; half++, piece += 16, q += 16) {
        uint8x16_t v = vld1q_u8(piece);
        sum = neon_products(sum, vandq_u8(v, mask), vld1q_s8(q));
        sum = neon_products(sum, vandq_u8(vshrq_n_u8(v, 2), mask), vld1q_s8(q + 32));
        sum = neon_products(sum, vandq_u8(vshrq_n_u8(v, 4), mask), vld1q_s8(q + 64));
        sum = neon_products(sum, vshrq_n_u8(v, 6), vld1q_s8(q + 96));
    }
    return sum;
}

/* <codes, q> of a block's four rows. */
TF_INLINE void neon_block(const uint8_t *piece, const int8_t *q, size_t chunks, int32_t dots[TF_ROWS]) {
    int32x4_t a = vdupq_n_s32(0), b = a, c = a, d = a;
    for (; chunks; chunks--, piece += TF_ROWS * TF_PIECE, q += TF_CHUNK) {
        __builtin_prefetch(piece + 2048);
        a = neon_piece(a, piece, q), b = neon_piece(b, piece + TF_PIECE, q);
        c = neon_piece(c, piece + 2 * TF_PIECE, q), d = neon_piece(d, piece + 3 * TF_PIECE, q);
    }
    dots[0] = vaddvq_s32(a), dots[1] = vaddvq_s32(b), dots[2] = vaddvq_s32(c), dots[3] = vaddvq_s32(d);
}

static inline void neon_ternary(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    int32_t dots[TF_ROWS];
    for (int row = begin; row < end; row += TF_ROWS)
        for (int t = 0; t < x->tokens; t++) {
            neon_block(tf_ternary_row(w, row), x->q + (size_t)t * x->q_stride, tf_chunks(w->columns), dots);
            for (int i = 0; i < TF_ROWS && row + i < end; i++)
                y[(size_t)t * y_stride + (size_t)(row + i)] =
                    (float)(dots[i] - x->sum[t]) * x->step[t] * tf_scale(w, row + i) + tf_bias(w, row + i);
        }
}

static inline void neon_multiply(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    if (w->kind == TF_TERNARY)
        neon_ternary(w, x, y, y_stride, begin, end);
    else
        plain_multiply(w, x, y, y_stride, begin, end);
}

enum { NEON_FLUSH = 128 }; /* bytes of a code, 256 groups, whose entries' sum fits 16 bits: 256 * 255 < 2^16 */

/* Table entries of 16 codes' bytes, added to their sums. */
TF_INLINE void neon_entries(const uint8_t *codes, uint8x16_t low, uint8x16_t high, uint16x8_t *first, uint16x8_t *second) {
    uint8x16_t v = vld1q_u8(codes);
    uint8x16_t a = vqtbl1q_u8(low, vandq_u8(v, vdupq_n_u8(15))), b = vqtbl1q_u8(high, vshrq_n_u8(v, 4));
    *first = vaddq_u16(*first, vaddl_u8(vget_low_u8(a), vget_low_u8(b)));
    *second = vaddq_u16(*second, vaddl_high_u8(a, b));
}

/* Adds table entries of a stream's block to the sums of its 32 places, four a vector. */
TF_INLINE void neon_add_entries(const uint8_t *codes, size_t bytes, size_t ahead, const uint8_t *tables, uint32x4_t sums[8]) {
    while (bytes) {
        size_t n = bytes < NEON_FLUSH ? bytes : NEON_FLUSH;
        uint16x8_t part[4] = {vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0)};
        bytes -= n;
        for (; n; n--, codes += TF_IDS, tables += 32) {
            __builtin_prefetch(codes + ahead);
            uint8x16_t low = vld1q_u8(tables), high = vld1q_u8(tables + 16);
            neon_entries(codes, low, high, part, part + 1);
            neon_entries(codes + 16, low, high, part + 2, part + 3);
        }
        for (int i = 0; i < 4; i++) {
            sums[2 * i] = vaddw_u16(sums[2 * i], vget_low_u16(part[i]));
            sums[2 * i + 1] = vaddw_high_u16(sums[2 * i + 1], part[i]);
        }
    }
}

TF_INLINE void neon_score_block(const tf_codes *codes, int first, int last, int place, const tf_code_tables *tables, float *scores) {
    const uint8_t *entries = tables->tables;
    uint32x4_t sums[8];
    for (int i = 0; i < 8; i++) sums[i] = vdupq_n_u32(0);
    for (int s = first; s < last; s++) {
        size_t bytes = tf_code_bytes(tf_stream_bits(codes, s));
        neon_add_entries(tf_code(codes, s, place), bytes, first ? 0 : 2048, entries, sums);
        entries += 32 * bytes;
    }
    for (int i = 0; i < 8; i++)
        vst1q_f32(scores + 4 * i, vfmaq_n_f32(vdupq_n_f32(tables->start), vcvtq_f32_u32(sums[i]), tables->unit));
}

static inline float neon_score_codes(const tf_codes *codes, int first, int last, const tf_code_tables *tables, const float *prior,
                                     int begin, int end, float *scores) {
    float largest = -INFINITY, block[TF_IDS];
    int count = end - begin;
    for (int at = 0; at < count; at += TF_IDS) {
        neon_score_block(codes, first, last, begin + at, tables, block);
        for (int i = 0; i < TF_IDS && at + i < count; i++) {
            float score = prior ? block[i] + prior[at + i] : block[i];
            scores[at + i] = score;
            largest = score > largest ? score : largest;
        }
    }
    return largest;
}

#define NEON_BACKEND(NAME)                                                                                                             \
    {                                                                                                                                  \
        .name = NAME, .form_bytes = tf_form_bytes, .form_rows = tf_form_rows, .row_block = TF_ROWS,                                    \
        .quantised_bytes = tf_quantised_bytes, .quantise = tf_quantise, .multiply = neon_multiply, .add_row = tf_add_row,              \
        .codes_bytes = tf_codes_bytes, .form_codes = tf_form_codes, .code_words = tf_code_words, .code_tables_bytes = lut8_bytes,      \
        .make_code_tables = lut8_tables, .refine_code_tables = lut8_refine, .part_of_tables = lut8_part, .code_block = TF_IDS,         \
        .score_codes = neon_score_codes, .exact_score = tf_exact_score,                                                                \
        .kv_bytes = tf_kv_bytes, .kv_store = tf_kv_store, .attend = plain_attend, .merge = tf_merge, .rms_norm = tf_rms_norm,          \
        .layer_norm = tf_layer_norm, .gelu = tf_gelu, .gelu_mul = tf_gelu_mul, .silu_mul = tf_silu_mul, .rotate = tf_rotate            \
    }

#endif
