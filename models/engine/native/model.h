/* What the engine's files share. */
#ifndef TF_MODEL_H
#define TF_MODEL_H

#include "engine.h"
#include "threads.h"

enum {
    TF_STEP = 32,      /* tokens that go through the layers together */
    TF_KV_BLOCK = 64,  /* slots of a cache's block: what a cache grows by, and one call of `attend` */
    TF_QUERIES = 64,   /* query heads, of one token or several, in one call of `attend` */
    TF_PIECES = 8,     /* parts at most that a token's attention to one key/value head is split into, for threads */
    TF_SCORED = 512,   /* ids scored at once: enough of them for all threads of a small vocabulary */
    TF_STATES = 8,     /* hidden states scored together */
    TF_THETAS = 4      /* different bases of rotary angles */
};

/* Memory that is freed all at once. */
typedef struct {
    struct tf_chunk *newest;
} tf_arena;

typedef struct {
    int kind, rows, columns, loaded; /* rows 0: not declared */
    size_t row_bytes;                /* in the file */
    void *memory;
    tf_matrix matrix; /* of a matrix; its form is `memory` */
} tf_part;

typedef struct {
    tf_part parts[TF_LAYER_PLACES], scales[TF_LAYER_PLACES], biases[TF_LAYER_PLACES];
    int window, slots; /* slots of a session's ring, a multiple of TF_KV_BLOCK */
    int theta;         /* which of the model's, or -1 */
} tf_layer;

/* The order of places, of codes and of the prior: groups of places by prior, largest first, and by id within a group. That way a byte
 * an id is enough to find its place. */
typedef struct {
    int32_t *ids;    /* [vocabulary]: the id at each place; NULL: places are ids */
    uint8_t *groups; /* [vocabulary]: the group of each id */
    float *tops;     /* [groups]: the largest prior of each, and of those behind it */
    int group;       /* places of a group, a multiple of TF_SCORED */
} tf_order;

struct tf_model {
    tf_config c;
    const tf_backend *backend;
    tf_layer *layers;
    tf_part parts[TF_PLACES], scales[TF_PLACES], biases[TF_PLACES]; /* places from TF_LAYER_PLACES on */
    tf_arena arena; /* of the parts */
    tf_codes codes; /* of ids at tf_place; streams 0: none */
    tf_order order;
    int thetas;
    float *frequencies[TF_THETAS]; /* [head_dim/2] */
    float *kron_sum;               /* [width]: sum of all rows of TF_KRON */
    tf_matrix lift;                /* TF_LIFT transposed, [width, code_bits] */
    int finished;
};

typedef struct {
    int blocks;              /* held */
    void **keys, **values;   /* [slots / TF_KV_BLOCK], NULL from `blocks` on */
} tf_layer_cache;

struct tf_session {
    tf_engine *engine;
    int length;
    tf_layer_cache *caches;
    float *hidden; /* [width]: of the last token, after the final norm */
};

/* What a thread computes with: its own, or one for all when every thread prepares some of a step's tokens. */
typedef struct {
    float *x, *input;   /* [tokens, width], [tokens, longest input] */
    int8_t *q;          /* [tokens, quantised_bytes(longest input)] */
    float *step;        /* [tokens] */
    int32_t *sum;
    float *scratch;     /* of attention, of a thread */
} tf_work;

struct tf_engine {
    const tf_model *model;
    tf_pool *pool;
    int threads, kv;
    size_t kv_bytes; /* of a block */
    int longest;     /* of the matrices' inputs */
    size_t q_stride, qkv_stride, ffn_stride; /* of tokens in q, qkv, gate and up */
    tf_work *work;   /* [threads + 1], the last one shared, for TF_STEP tokens */
    float *qkv, *mix, *delta, *gate, *up, *hidden; /* [TF_STEP, ...] */
    float *peaks;    /* [TF_STEP, heads, TF_PIECES, 2] beside `mix` [TF_STEP, TF_PIECES, heads, head_dim] */
    float *cosines, *sines; /* [thetas, TF_STEP, head_dim/2] */
    struct tf_scoring *scoring;
};

/* Tokens that go through the layers together. */
typedef struct {
    tf_engine *engine;
    int tokens;
    const int32_t *ids;
    tf_session *session[TF_STEP];
    int position[TF_STEP];
} tf_step;

/* memory.c */
void *tf_alloc(size_t bytes); /* 64-byte aligned, huge pages asked for; NULL when there is none (or bytes is SIZE_MAX) */
void tf_free(void *memory);
void *tf_arena_take(tf_arena *arena, size_t bytes);
void tf_arena_trim(tf_arena *arena);
void tf_arena_free(tf_arena *arena);
size_t tf_times(size_t a, size_t b); /* SIZE_MAX when the product does not fit */
int tf_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* order.c */
int tf_lay_out_codes(tf_model *model); /* takes memory for codes, and puts the prior in its order: it must be there */
void tf_take_codes(const tf_model *model, int first, int count, const uint32_t *words); /* the file's, of ids from `first` on */
int tf_place(const tf_model *model, int id);
static inline int tf_id(const tf_model *model, int place)
{
    return model->order.ids ? model->order.ids[place] : place;
}

/* session.c */
int tf_session_reserve(tf_session *session, int length);

/* work.c */
int tf_engine_take_memory(tf_engine *engine);
static inline void tf_split(int total, int parts, int part, int *begin, int *end)
{
    *begin = (int)((int64_t)total * part / parts);
    *end = (int)((int64_t)total * (part + 1) / parts);
}
tf_work *tf_my_work(const tf_step *step, int thread);
void tf_my_tokens(const tf_step *step, int thread, int *begin, int *end);
void tf_meet_if_shared(const tf_step *step);

/* interface.c */
void tf_embed(const tf_step *step, int thread);

/* attention.c */
void tf_attention(const tf_step *step, int layer, int thread);
void tf_merge_attention(const tf_step *step, int layer, int token, float *out);
size_t tf_attend_floats(const tf_config *c); /* of tf_work's scratch: the first ones */

/* forward.c */
void tf_forward(const tf_step *step, int thread);
/* y rows [begin, end) of several matrices that stand one after another, cut for this thread. */
void tf_multiply_share(const tf_step *step, const tf_matrix *const *matrices, float *const *y, const size_t *strides, int count,
                       const tf_input *input, int thread);

#endif
