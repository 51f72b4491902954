/* How matrices lie in memory, for every backend.
 *
 * TF_TERNARY: 4 rows a block, 128 columns a chunk; in the order block, chunk, row lie 32 bytes, whose byte i holds value + 1 of
 * columns i, i + 32, i + 64, i + 96 of the chunk in bits 0-1, 2-3, 4-5, 6-7. So one mask gives 32 neighbouring columns, and a
 * block is one stream of memory. Codes beyond a row's columns are 0; rows beyond the last are in no result and may hold anything.
 * Others: row by row, columns rounded up to 8 with zeros. */
#ifndef TF_FORMS_H
#define TF_FORMS_H

#include "kernels.h"
#include "numbers.h"

enum { TF_ROWS = 4, TF_CHUNK = 128, TF_PIECE = 32 };

static inline size_t tf_chunks(int columns) { return ((size_t)columns + TF_CHUNK - 1) / TF_CHUNK; }

static inline size_t tf_element_bytes(int kind) { return kind == TF_INT8 ? 1 : kind == TF_FLOAT16 ? 2 : 4; }

static inline size_t tf_row_bytes(int kind, int columns) { return tf_ceil((size_t)columns, 8) * tf_element_bytes(kind); }

static inline const void *tf_row(const tf_matrix *w, int row) {
    return (const char *)w->form + (size_t)row * tf_row_bytes(w->kind, w->columns);
}

/* Of a ternary row's first piece; its next ones follow 128 bytes apart. */
static inline size_t tf_ternary_offset(int columns, int row) {
    return (size_t)(row / TF_ROWS) * tf_chunks(columns) * TF_ROWS * TF_PIECE + (size_t)(row % TF_ROWS * TF_PIECE);
}

static inline const uint8_t *tf_ternary_row(const tf_matrix *w, int row) {
    return (const uint8_t *)w->form + tf_ternary_offset(w->columns, row);
}

static inline float tf_scale(const tf_matrix *w, int row) { return w->scale[w->row_scales ? row : 0]; }

static inline float tf_bias(const tf_matrix *w, int row) { return w->bias ? w->bias[row] : 0.0f; }

static inline size_t tf_form_bytes(int kind, int rows, int columns) {
    if (kind == TF_TERNARY) return tf_ceil((size_t)rows, TF_ROWS) * tf_chunks(columns) * TF_PIECE;
    return (size_t)rows * tf_row_bytes(kind, columns);
}

/* 32 bytes of the file (byte j: columns 4j .. 4j + 3) in the order of a piece. */
static inline void tf_form_piece(const uint8_t *file, uint8_t *piece) {
    for (int i = 0; i < TF_PIECE; i++) {
        int shift = i % 4 * 2, at = i / 4;
        piece[i] = (uint8_t)((file[at] >> shift & 3) | (file[at + 8] >> shift & 3) << 2 | (file[at + 16] >> shift & 3) << 4 |
                             (file[at + 24] >> shift & 3) << 6);
    }
}

static inline void tf_form_ternary(const tf_matrix *w, int row, const uint8_t *file) {
    size_t width = ((size_t)w->columns + 3) / 4;
    uint8_t *piece = (uint8_t *)w->form + tf_ternary_offset(w->columns, row);
    for (size_t at = 0; at < width; at += TF_PIECE, piece += TF_ROWS * TF_PIECE) {
        uint8_t copy[TF_PIECE] = {0};
        memcpy(copy, file + at, width - at < TF_PIECE ? width - at : TF_PIECE);
        tf_form_piece(copy, piece);
    }
}

static inline void tf_form_rows(const tf_matrix *w, int first, int count, const void *file_rows) {
    const char *file = file_rows;
    size_t bytes = w->kind == TF_TERNARY ? ((size_t)w->columns + 3) / 4 : (size_t)w->columns * tf_element_bytes(w->kind);
    size_t padded = tf_row_bytes(w->kind, w->columns);
    for (int i = 0; i < count; i++, file += bytes) {
        if (w->kind == TF_TERNARY) {
            tf_form_ternary(w, first + i, (const uint8_t *)file);
            continue;
        }
        char *row = (char *)w->form + (size_t)(first + i) * padded;
        memcpy(row, file, bytes);
        memset(row + bytes, 0, padded - bytes);
    }
}

static inline void tf_add_row(const tf_matrix *w, int row, float factor, float *out) {
    const void *values = tf_row(w, row);
    int n = w->columns;
    if (w->kind == TF_INT8) {
        const int8_t *v = values;
        factor *= tf_scale(w, row);
        for (int i = 0; i < n; i++) out[i] += factor * v[i];
    } else if (w->kind == TF_FLOAT16) {
        const uint16_t *v = values;
        for (int i = 0; i < n; i++) out[i] += factor * tf_from_half(v[i]);
    } else {
        const float *v = values;
        for (int i = 0; i < n; i++) out[i] += factor * v[i];
    }
}

static inline size_t tf_quantised_bytes(int columns) { return tf_chunks(columns) * TF_CHUNK; }

#endif
