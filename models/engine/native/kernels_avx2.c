/* The inner loops with AVX2, FMA and F16C; without these flags (models/engine/build.py) there is no such backend. */
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2_attend.h"
#include "avx2_codes.h"
#include "avx2_rows.h"
#include "avx2_ternary.h"
#include "elementwise.h"

static void multiply(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end) {
    if (w->kind == TF_TERNARY) multiply_ternary(w, x, y, y_stride, begin, end);
    if (w->kind == TF_INT8) multiply_int8(w, x, y, y_stride, begin, end);
    if (w->kind == TF_FLOAT16) multiply_float16(w, x, y, y_stride, begin, end);
    if (w->kind == TF_FLOAT32) multiply_float32(w, x, y, y_stride, begin, end);
}

const tf_backend *tf_avx2_backend(void) {
    static const tf_backend backend = {
        .name = "avx2",
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
        .code_tables_bytes = lut8_bytes,
        .make_code_tables = lut8_tables,
        .refine_code_tables = lut8_refine,
        .part_of_tables = lut8_part,
        .code_block = TF_IDS,
        .score_codes = score_codes,
        .exact_score = tf_exact_score,
        .kv_bytes = tf_kv_bytes,
        .kv_store = tf_kv_store,
        .attend = attend,
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
#else
const tf_backend *tf_avx2_backend(void) { return NULL; }
#endif
