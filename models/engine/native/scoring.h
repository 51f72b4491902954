/* Scores of the vocabulary for a few hidden states at once, and what is made of them. */
#ifndef TF_SCORING_H
#define TF_SCORING_H

#include "model.h"

/* A token that may win. The order: larger score first (NaN counts as infinite), then lower id. */
typedef struct {
    float score;
    int32_t id;
} tf_choice;

/* One hidden state as one thread sees it. */
typedef struct {
    const tf_engine *engine;
    const float *hidden; /* what the head's table or the codes are multiplied with */
    tf_code_tables tables, fine; /* fine: of what tables round off, where all scores are kept */
    float error;         /* of scores against the exact ones; 0 where they are exact */
    const tf_draw *draw; /* or NULL */
} tf_view;

/* The best so far of one hidden state in one thread's part of the vocabulary: a heap, the worst at its root. */
typedef struct {
    tf_choice *heap;
    int held, most;
} tf_list;

/* At most TF_STATES hidden states and what is wanted of each: a draw, a target's log-probability, or all scores. */
typedef struct {
    tf_engine *engine;
    int states;
    const tf_draw *draws;   /* [states], or NULL */
    const int32_t *targets; /* [states], or NULL */
    int32_t *drawn;         /* [states] */
    float *logprobs;        /* [states] */
    uint8_t *greedy;        /* [states] */
    float *all;             /* [states, vocabulary], exact; or NULL */
} tf_scores_job;

struct tf_scoring {
    float *hidden;      /* [TF_STATES, width]: filled by whoever makes the job */
    float *code_hidden; /* [TF_STATES, code_bits] */
    float *chunks;      /* [threads, TF_STATES, TF_SCORED] */
    void *tables;       /* [threads, TF_STATES, 2, table_bytes] */
    size_t table_bytes;
    tf_view *views;     /* [threads, TF_STATES] */
    tf_list *lists;     /* [threads, TF_STATES] */
    tf_choice *choices; /* memory of the lists, and of the merged ones behind them */
    size_t choices_held;
    float *stored;      /* [TF_STATES, vocabulary], taken when first needed */
    size_t stored_states;
    tf_choice *best[TF_STATES]; /* merged, best first */
    int best_held[TF_STATES];
    double *noisy;      /* [threads]: of the winner with noise in each thread's part, */
    int32_t *noisy_id;  /* and its id */
    double *sums;       /* [chunks of the vocabulary] */
    uint64_t *bins;     /* [65536], taken when first needed */
    uint32_t cut_bits;  /* top-p: scores above it are kept, */
    int32_t cut_id;     /* and those at it up to this id */
};

/* scoring.c */
struct tf_scoring *tf_scoring_create(const tf_engine *engine);
void tf_scoring_free(struct tf_scoring *scoring);
int tf_scores_reserve(const tf_scores_job *job);
void tf_scores_run(void *job, int thread); /* SPMD, by all threads of the engine */
int tf_state_stores(const tf_scores_job *job, int state);
/* Ids of a thread, cut at chunks of TF_SCORED. */
void tf_my_ids(const tf_engine *engine, int thread, int *begin, int *end);
float tf_exact(const tf_view *view, int id, float score);
float tf_margin(const tf_view *view, float near);
float tf_fine_margin(const tf_view *view, float near);
void tf_make_likely_exact(const tf_scores_job *job, int state, int thread, double temperature); /* SPMD; meets at its end */
double tf_sum_of_all(const tf_engine *engine); /* of the last tf_make_likely_exact */
static inline float tf_key(float score)
{
    return score != score ? __builtin_inff() : score;
}

/* sampling.c */
int32_t tf_draw_from_list(const tf_draw *draw, const tf_choice *list, int count);
void tf_draw_from_all(const tf_scores_job *job, int state, int thread); /* SPMD; meets at its end */

/* logprob.c */
void tf_target_logprob(const tf_scores_job *job, int state, int thread); /* SPMD; meets at its end */

#endif
