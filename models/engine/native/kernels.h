/* Inner loops of the CPU engine. One `tf_backend` per instruction set; the rest of the engine (interface.c,
 * forward.c, scoring.c) knows no other way to touch weights. To add one: kernels_NAME.c beside the others, its backend declared at the end
 * of this file, chosen in dispatch.c, its compiler flags in ../build.py.
 *
 * The engine owns all memory and gives it in the sizes that the `*_bytes` functions name, 64-byte aligned; what lies in it is the
 * backend's own affair (its "form" of a matrix or of codes). Sizes were checked before: no function here allocates or fails.
 * Every function may be called from several threads for disjoint ranges. */
#ifndef TF_KERNELS_H
#define TF_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define TF_EXPORT __attribute__((visibility("default"))) /* the library's other symbols are hidden */

enum { TF_TERNARY, TF_INT8, TF_FLOAT16, TF_FLOAT32 }; /* kinds of matrices, as the packed file holds them */

typedef struct {
    int kind, rows, columns;
    void *form;         /* form_bytes(kind, rows, columns) */
    const float *scale; /* of TF_TERNARY and TF_INT8: one value, or one a row */
    int row_scales;     /* whether `scale` has one value a row */
    const float *bias;  /* rows, or NULL */
} tf_matrix;

/* Rows that a matrix multiplies. TF_TERNARY reads q, step, sum (made by `quantise`), the other kinds read x. */
typedef struct {
    int tokens;
    const float *x;     /* token t at x + t * x_stride; the matrix's columns */
    size_t x_stride;    /* in floats */
    const int8_t *q;    /* token t at q + t * q_stride; zeros from `columns` up to quantised_bytes(columns) */
    size_t q_stride;    /* at least quantised_bytes(columns) */
    const float *step;  /* [tokens]: the value of one unit of q */
    const int32_t *sum; /* [tokens]: sum of q */
} tf_input;

enum { TF_STREAMS = 5 };

/* Sign codes as they lie in memory. Bits [from[s], from[s + 1]) of all codes are stream s, so that the first bits of many codes can be
 * read without the rest. A code is at a place; which id has it is the engine's affair. */
typedef struct {
    int bits, streams;
    int from[TF_STREAMS + 1]; /* 0 first and `bits` last, those between multiples of 8 */
    void *form[TF_STREAMS];   /* codes_bytes(places, bits of the stream) */
} tf_codes;

/* Look-up tables for one hidden state [bits] at the code width, whose score with a code is <hidden, code>/sqrt(bits). */
typedef struct {
    void *tables;      /* code_tables_bytes(bits) */
    float unit, start; /* approximate score = start + unit * (sum of table entries) */
    float error;       /* |approximate - exact| <= error, in scores, for every code; not finite when hidden is not */
} tf_code_tables;

/* Keys or values of one layer and one sequence: `slots` x `heads` vectors of `width`. */
enum { TF_KV_FLOAT16, TF_KV_INT8 };

/* A query head that attends to the slots [from, used), at least one. */
typedef struct {
    const float *q;             /* [width] */
    float *mean, *peak, *total; /* [width], [1], [1]: what it gets */
    int from, used;
} tf_query;

enum { TF_WIDE_SLOTS = 16 }; /* vectors that `attend` may keep in fp32 */

typedef struct tf_backend {
    const char *name; /* "avx2", "neon-dotprod", "neon", "portable" */

    /* Matrices. The file's rows come in pieces, in order, in the layout of docs/tfree.md: TF_TERNARY ceil(columns/4) bytes a row, value
     * + 1 in 2 bits, column 4j in the lowest bits of byte j; TF_INT8 `columns` bytes; TF_FLOAT16/32 little endian. */
    size_t (*form_bytes)(int kind, int rows, int columns);
    void (*form_rows)(const tf_matrix *w, int first, int count, const void *file_rows);
    int row_block; /* ranges of rows begin at multiples of it */

    size_t (*quantised_bytes)(int columns);
    /* kernels/bitlinear without gains: x/sqrt(mean(x^2) + eps), then int8 by its largest magnitude, rounding half to even.
     * All backends give the same bits. A NaN or infinity in x: q is 0 and step NaN, so that every product is NaN. */
    void (*quantise)(const float *x, int columns, float eps, int8_t *q, float *step, int32_t *sum);
    /* y[t * y_stride + r] = scale * <row r, x_t> + bias[r] for rows [begin, end); integer sums of TF_TERNARY are exact, and a
     * row's other sums are taken in the same order for any number of tokens: a token gives the same bits alone and among others. */
    void (*multiply)(const tf_matrix *w, const tf_input *x, float *y, size_t y_stride, int begin, int end);
    /* out[columns] += factor * row (dequantised; TF_INT8, TF_FLOAT16, TF_FLOAT32). */
    void (*add_row)(const tf_matrix *w, int row, float factor, float *out);

    /* Sign codes: file rows of ceil(bits/32) uint32 words, bit k of the code in bit k % 32 of word k / 32, set = +1;
     * the last word's spare bits are 0. */
    size_t (*codes_bytes)(int count, int bits);
    void (*form_codes)(const tf_codes *codes, int first, int count, const uint32_t *words); /* at places from `first` on */
    void (*code_words)(const tf_codes *codes, int place, uint32_t *words);                 /* back again, for the interface */
    size_t (*code_tables_bytes)(int bits);
    void (*make_code_tables)(const float *hidden, int bits, tf_code_tables *tables);
    /* Tables of what `coarse` (of the same hidden state) rounds off: the sum of both scores is within fine->error of the exact one. */
    void (*refine_code_tables)(const float *hidden, int bits, const tf_code_tables *coarse, tf_code_tables *fine);
    /* That part of `whole` (made of the same hidden state, which is finite) that bits [from, to) need; its scores and error are of
     * these bits' share of <hidden, code>/sqrt(bits). from and to as in tf_codes. */
    void (*part_of_tables)(const float *hidden, int bits, const tf_code_tables *whole, int from, int to, tf_code_tables *part);
    int code_block; /* ranges of places begin at multiples of it; codes_bytes(code_block, bits) bytes of a stream belong together */
    /* scores[i] = approximate score of streams [first, last) + prior[i] (prior may be NULL, or `scores`) at places begin + i < end;
     * returns the largest (NaN is passed over; -infinity when there is nothing else). `tables` begin at the first stream. From stream
     * 0 on memory is read ahead, beyond `end` too. */
    float (*score_codes)(const tf_codes *codes, int first, int last, const tf_code_tables *tables, const float *prior, int begin, int end,
                         float *scores);
    /* The score without prior, from the float hidden state itself, summed in fp32 in an order that depends on bits only. */
    float (*exact_score)(const tf_codes *codes, int place, const float *hidden);

    /* Attention of query heads to slots of their common key/value head: `mean` gets the mean of their values by softmax of
     * scale * <q, k>, `peak` the largest scale * <q, k> and `total` the sum of exp(scale * <q, k> - peak), so that means over several
     * ranges can be merged. A query's result does not depend on the other queries of the call, bit for bit. The engine keeps a cache in
     * blocks of `slots` slots and calls once for each, with the query heads of one token or of several. TF_KV_INT8 rounds a vector to
     * 127 steps of its largest magnitude (below 1e-30: zeros; not finite: all NaN). */
    size_t (*kv_bytes)(int kind, int slots, int heads, int width);
    void (*kv_store)(int kind, void *kv, int slots, int heads, int width, int slot, int head, const float *vector);
    void (*attend)(int kind, const void *keys, const void *values, int slots, int heads, int width, int head, const tf_query *queries,
                   int count, float scale, float *scratch /* count * slots + TF_WIDE_SLOTS * (width rounded up to 8) */);
    /* The mean `out` of weight `total` at `peak` takes in another one. */
    void (*merge)(float *out, float *peak, float *total, const float *other, float other_peak, float other_total, int width);

    /* Elementwise, in place or not. Gains and bias may be NULL: 1 and 0. cos, sin: width/2 values. */
    void (*rms_norm)(const float *x, const float *gain, int n, float eps, float *out);
    void (*layer_norm)(const float *x, const float *gain, const float *bias, int n, float eps, float *out);
    void (*gelu)(float *x, int n);                         /* tanh form */
    void (*gelu_mul)(const float *gate, float *up, int n); /* up *= gelu(gate) */
    void (*silu_mul)(const float *gate, float *up, int n);
    void (*rotate)(float *x, const float *cos, const float *sin, int width); /* pairs (i, i + width/2) */
} tf_backend;

const tf_backend *tf_portable_backend(void);
const tf_backend *tf_avx2_backend(void); /* NULL when not compiled in */
const tf_backend *tf_neon_backend(void); /* NULL when not compiled in */
const tf_backend *tf_neon_dotprod_backend(void); /* with the int8 products of ARMv8.2; NULL when not compiled in */
/* The fastest one that this processor runs; `name` (may be NULL) asks for one, NULL is returned when it cannot run. */
TF_EXPORT const tf_backend *tf_choose_backend(const char *name);

#endif
