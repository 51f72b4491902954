/* The CPU engine: a decoder with its vocabulary, given as a description and parts; sessions that remember what they read; and what
 * becomes of the scores. Everything is checked here, because a model's file may come from anywhere.
 *
 * Functions return 0, or one of the negative codes below; `tf_problem` then says more of the last failure of the calling thread. A
 * model is read only once finished, and may serve several engines. An engine and its sessions serve one call at a time. */
#ifndef TF_ENGINE_H
#define TF_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

enum { TF_OK = 0, TF_INVALID = -1, TF_NO_MEMORY = -2, TF_FULL = -3 };
enum { TF_NORM_RMS, TF_NORM_LAYER };
enum { TF_GELU, TF_SILU }; /* GELU in its tanh form */
enum { TF_INTERFACE_TABLE, TF_INTERFACE_BINARY, TF_INTERFACE_SIGN, TF_INTERFACE_KRON };
enum { TF_HEAD_TABLE, TF_HEAD_TIED, TF_HEAD_CODE };
enum { TF_TILE, TF_INTERLEAVE };

typedef struct {
    int32_t width, layers, heads, kv_heads, head_dim, ffn, context, vocabulary;
    int32_t norm, activation;
    int32_t gated, query_key_norms, post_norms, learned_positions, biases; /* 0 or 1 */
    int32_t interface, head, prior;                                        /* prior: 0 or 1 */
    int32_t code_bits;       /* of the sign codes; 0 without any */
    int32_t byte_positions;  /* kron */
    int32_t id_bits, gf2, lift; /* binary: bits of an id, whether a matrix recodes them, TF_TILE or TF_INTERLEAVE */
    float clear, set;        /* binary: values of a clear and a set bit */
    float input_scale;       /* multiplies the interface's rows */
    float eps;               /* of the norms */
    float attention_scale;
    const int32_t *windows;  /* [layers] positions that a token sees, itself included; 0: all */
    const float *thetas;     /* [layers] base of the rotary angles; 0: none */
} tf_config;

/* Parts of a model. Matrices are [outputs, inputs] unless said otherwise, of a kind of kernels.h; vectors one row of TF_FLOAT32. */
enum {
    TF_BYTES = 16, /* further kinds: uint8, */
    TF_WORDS,      /* uint32 */
    TF_MASKS       /* int64 */
};
enum {
    /* Of a layer. */
    TF_Q, TF_K, TF_V, TF_O, TF_GATE, TF_UP, TF_DOWN,
    TF_ATTENTION_NORM, TF_ATTENTION_NORM_BIAS, TF_ATTENTION_POST_NORM, TF_MLP_NORM, TF_MLP_NORM_BIAS, TF_MLP_POST_NORM, TF_Q_NORM, TF_K_NORM,
    TF_LAYER_PLACES,
    /* Of the model (layer 0). */
    TF_TABLE = TF_LAYER_PLACES, /* [V, width] */
    TF_OUTPUT,                  /* [V, width] */
    TF_POSITION,                /* [context, width] */
    TF_LIFT,                    /* [code_bits, width], float32 or float16 */
    TF_CODE_MAP,                /* [code_bits, width] */
    TF_KRON,                    /* [256 * byte_positions, width] */
    TF_FINAL_NORM, TF_FINAL_NORM_BIAS,
    TF_CODES,       /* words [V, ceil(code_bits/32)]; after the prior, if a head of codes has one */
    TF_PRIOR,       /* [V, 1], float32 or float16 */
    TF_TOKEN_BYTES, /* bytes [V, byte_positions] */
    TF_LENGTHS,     /* bytes [V, 1] */
    TF_GF2,         /* masks [id_bits, 1] */
    TF_PLACES,
    TF_SCALE_OF = 64, /* added to a matrix's place: its scale, 1 or `rows` values */
    TF_BIAS_OF = 128  /* added to a matrix's place: its bias, `rows` values */
};

typedef struct tf_model tf_model;
typedef struct tf_engine tf_engine;
typedef struct tf_session tf_session;

/* What went wrong in this thread's last call that failed, as one phrase. */
TF_EXPORT const char *tf_problem(void);

/* `backend`: a name of kernels.h, or NULL for the fastest. */
TF_EXPORT int tf_model_create(const tf_config *config, const char *backend, tf_model **model);
TF_EXPORT const char *tf_model_backend(const tf_model *model);
/* Takes memory for a part. A matrix comes before its scale and bias. */
TF_EXPORT int tf_model_declare(tf_model *model, int layer, int place, int kind, int rows, int columns);
/* The part's next `count` rows, `bytes` in all, as they are in the file. */
TF_EXPORT int tf_model_load(tf_model *model, int layer, int place, int count, const void *data, size_t bytes);
/* Refuses a model that lacks something. */
TF_EXPORT int tf_model_finish(tf_model *model);
TF_EXPORT void tf_model_free(tf_model *model);

/* `kv`: TF_KV_FLOAT16 or TF_KV_INT8. */
TF_EXPORT int tf_engine_create(const tf_model *model, int threads, int kv, tf_engine **engine);
TF_EXPORT void tf_engine_free(tf_engine *engine);

TF_EXPORT int tf_session_create(tf_engine *engine, tf_session **session);
TF_EXPORT int tf_session_copy(const tf_session *session, tf_session **copy);
/* Forgets all tokens from `length` on. TF_INVALID when a layer with a window has no longer what that needs. */
TF_EXPORT int tf_session_rewind(tf_session *session, int length);
TF_EXPORT int tf_session_length(const tf_session *session);
TF_EXPORT size_t tf_session_bytes(const tf_session *session);
TF_EXPORT void tf_session_free(tf_session *session);

/* How a token is drawn; kernels/code_loss/sampling.py has the rule, and gives the same tokens for the same scores. */
typedef struct {
    int64_t seed, position;   /* of the noise */
    double temperature;       /* 0: the best token */
    double top_p, min_p;      /* 1 and 0: no limit */
    int32_t top_k;            /* 0: all */
    float repetition_penalty; /* 1: none; divides the scores above 0 of the ids seen, multiplies their others */
    const int32_t *seen;      /* ascending, each once; NULL without a penalty */
    int32_t seen_count;
} tf_draw;

/* Every session reads its counts[i] >= 1 tokens (one session after another in `tokens`). `hidden` (or NULL) gets the hidden states
 * [all tokens, width] after the final norm; `draws` (or NULL) asks for the next token of each session, given in `drawn`. The sessions
 * must differ. Nothing is read when TF_FULL (a context is full) or TF_INVALID comes back; TF_NO_MEMORY leaves the sessions to be freed
 * or rewound. */
TF_EXPORT int tf_read(tf_engine *engine, int sessions, tf_session *const *session, const int32_t *counts, const int32_t *tokens, float *hidden,
            const tf_draw *draws, int32_t *drawn);
/* Draws from what each session read last, once more. */
TF_EXPORT int tf_draw_again(tf_engine *engine, int sessions, tf_session *const *session, const tf_draw *draws, int32_t *drawn);
/* The session reads `count` tokens; for each with targets[i] >= 0 the log-probability in nats of that token as the next one, and
 * whether it has the largest score (lowest id among equals). 0 and 1 for the others. Of sign codes the target's
 * score and the largest are exact, and in the sum over the vocabulary those of all tokens with more than 2^-12 of the probability;
 * the others are off by some 2^-8 of the rounding to 8 bits, with any sign, which moves the result by about 1e-6. */
TF_EXPORT int tf_score(tf_engine *engine, tf_session *session, int count, const int32_t *tokens, const int32_t *targets, float *logprobs,
             uint8_t *greedy);
/* Whether greedy and top-k choices pass over codes that cannot win; what is chosen is the same. TF_SKIP_AUTO, what an engine begins
 * with, reads a few hundred codes as a whole where passing over did not pay just before. The other two are for tests. */
enum { TF_SKIP_AUTO, TF_SKIP_NEVER, TF_SKIP_ALWAYS };
TF_EXPORT void tf_engine_skip(tf_engine *engine, int skip);
/* Bytes of codes that the last scores (of at most 8 tokens) took from memory; 0 without a head of codes. */
TF_EXPORT int64_t tf_engine_code_bytes(const tf_engine *engine);
/* Scores [V] of what the session read last, exact; for tests. */
TF_EXPORT int tf_scores(tf_engine *engine, tf_session *session, float *scores);

#endif
