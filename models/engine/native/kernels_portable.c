/* The inner loops in plain C11: for processors without a backend of their own, and what the other backends are compared with. */
#include "codes.h"
#include "elementwise.h"
#include "kernels.h"
#include "plain.h"

enum { FLUSH = 32 }; /* chunks whose sums fit 16 bits: 4 products of at most 2 * 127 each, and 32 * 1016 < 2^15 */

/* <codes of one row, q>, exactly. */
static int32_t ternary_dot(const uint8_t *piece, const int8_t *q, size_t chunks) {
    int32_t total = 0;
    for (size_t done = 0; done < chunks; done += FLUSH) {
        int16_t lane[TF_PIECE] = {0};
        size_t end = chunks - done < FLUSH ? chunks : done + FLUSH;
        for (size_t c = done; c < end; c++, piece += TF_ROWS * TF_PIECE, q += TF_CHUNK)
            for (int i = 0; i < TF_PIECE; i++)
                lane[i] = (int16_t)(lane[i] + (piece[i] & 3) * q[i] + (piece[i] >> 2 & 3) * q[i + 32] + (piece[i] >> 4 & 3) * q[i + 64] +
                                    (piece[i] >> 6) * q[i + 96]);
        for (int i = 0; i < TF_PIECE; i++) total += lane[i];
    }
    return total;
}

static void multiply_ternary(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    for (int row = begin; row < end; row++)
        for (int t = 0; t < x->tokens; t++) {
            int32_t sum = ternary_dot(tf_ternary_row(w, row), x->q + (size_t)t * x->q_stride, tf_chunks(w->columns)) - x->sum[t];
            y[(size_t)t * y_stride + (size_t)row] = (float)sum * x->step[t] * tf_scale(w, row) + tf_bias(w, row);
        }
}

static void multiply(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    if (w->kind == TF_TERNARY)
        multiply_ternary(w, x, y, y_stride, begin, end);
    else
        plain_multiply(w, x, y, y_stride, begin, end);
}

/* One table of 256 floats for each byte of a code: nothing is rounded but fp32 sums. */
static size_t code_tables_bytes(int bits) { return tf_code_bytes(bits) * 256 * sizeof(float); }

static void make_code_tables(const float *hidden, int bits, tf_code_tables *tables) {
    float *table = tables->tables, low[16], high[16], magnitude = 0.0f;
    for (int first = 0; first < bits; first += 8, table += 256) {
        magnitude += tf_signed_sums(hidden, bits, first, low) + tf_signed_sums(hidden, bits, first + 4, high);
        for (int byte = 0; byte < 256; byte++) table[byte] = low[byte & 15] + high[byte >> 4];
    }
    tables->unit = tf_code_factor(bits);
    tables->start = 0.0f;
    tables->error = tf_sum_error(bits, magnitude) * tables->unit;
}

/* Nothing was rounded. */
static void refine_code_tables(const float *hidden, int bits, const tf_code_tables *coarse, tf_code_tables *fine) {
    (void)hidden;
    memset(fine->tables, 0, code_tables_bytes(bits));
    fine->unit = 0.0f, fine->start = 0.0f, fine->error = coarse->error;
}

static void part_of_tables(const float *hidden, int bits, const tf_code_tables *whole, int from, int to, tf_code_tables *part) {
    part->tables = (char *)whole->tables + code_tables_bytes(from);
    part->unit = whole->unit;
    part->start = 0.0f;
    part->error = tf_sum_error(bits, tf_magnitudes(hidden, from, to)) * whole->unit;
}

static void score_block(const tf_codes *codes, int first, int last, int place, const tf_code_tables *tables, float scores[TF_IDS]) {
    float sum[TF_IDS] = {0};
    const float *table = tables->tables;
    for (int s = first; s < last; s++) {
        const uint8_t *code = tf_code(codes, s, place);
        for (size_t p = tf_code_bytes(tf_stream_bits(codes, s)); p; p--, table += 256, code += TF_IDS)
            for (int i = 0; i < TF_IDS; i++) sum[i] += table[code[i]];
    }
    for (int i = 0; i < TF_IDS; i++) scores[i] = tables->start + tables->unit * sum[i];
}

static float score_codes(const tf_codes *codes, int first, int last, const tf_code_tables *tables, const float *prior, int begin, int end,
                         float *scores) {
    float largest = -INFINITY, block[TF_IDS];
    int count = end - begin;
    for (int at = 0; at < count; at += TF_IDS) {
        score_block(codes, first, last, begin + at, tables, block);
        for (int i = 0; i < TF_IDS && at + i < count; i++) {
            float score = prior ? block[i] + prior[at + i] : block[i];
            scores[at + i] = score;
            largest = score > largest ? score : largest;
        }
    }
    return largest;
}

const tf_backend *tf_portable_backend(void) {
    static const tf_backend backend = {
        .name = "portable",
        .form_bytes = tf_form_bytes,
        .form_rows = tf_form_rows,
        .row_block = TF_ROWS,
        .quantised_bytes = tf_quantised_bytes,
        .quantise = tf_quantise,
        .multiply = multiply,
        .add_row = tf_add_row,
        .codes_bytes = tf_codes_bytes,
        .form_codes = tf_form_codes,
        .code_words = tf_code_words,
        .code_tables_bytes = code_tables_bytes,
        .make_code_tables = make_code_tables,
        .refine_code_tables = refine_code_tables,
        .part_of_tables = part_of_tables,
        .code_block = TF_IDS,
        .score_codes = score_codes,
        .exact_score = tf_exact_score,
        .kv_bytes = tf_kv_bytes,
        .kv_store = tf_kv_store,
        .attend = plain_attend,
        .merge = tf_merge,
        .rms_norm = tf_rms_norm,
        .layer_norm = tf_layer_norm,
        .gelu = tf_gelu,
        .gelu_mul = tf_gelu_mul,
        .silu_mul = tf_silu_mul,
        .rotate = tf_rotate,
    };
    return &backend;
}
