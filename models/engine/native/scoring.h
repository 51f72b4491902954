/* Scores of the vocabulary for a few hidden states at once, and what is made of them. */
#ifndef TF_SCORING_H
#define TF_SCORING_H

#include <stdatomic.h>

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
    const int32_t *seen; /* [seen_count]: places that a penalty falls on, ascending */
    int seen_count;
} tf_view;

/* The best so far of one hidden state in one thread's part of the vocabulary: a heap, the worst at its root. */
typedef struct {
    tf_choice *heap;
    int held, most;
    _Atomic float *reached; /* of all threads: what the best of the state come to at least */
} tf_list;

/* How one thread looks for the best of one hidden state (search.c). Reaches: how far a score may lie above a part of it. */
typedef struct {
    int on, done;                     /* whether places may be passed over; whether all that follow are */
    int wait, waits;                  /* chunks that are read as a whole: still, and since the last try */
    tf_code_tables parts[TF_STREAMS]; /* of each stream's bits */
    float reach[TF_STREAMS];          /* above the prior and the streams up to this one */
    float all;                        /* above the prior */
} tf_search;

/* What one thread read of the codes. */
typedef struct {
    _Alignas(64) int64_t bytes;
    unsigned read[TF_STREAMS]; /* blocks of the chunk at hand, as bits */
} tf_tally;

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
    tf_search *searches; /* [threads, TF_STATES] */
    tf_tally *tallies;  /* [threads]: of the last job */
    _Atomic float reached[TF_STATES];
    int skip;           /* TF_SKIP_AUTO, ... */
    int32_t *seen;      /* of the states, one behind the other: places that a penalty falls on */
    size_t seen_held;
    tf_choice *choices; /* memory of the lists, and of the merged ones behind them */
    size_t choices_held;
    float *stored;      /* [TF_STATES, vocabulary], by place; taken when first needed */
    size_t stored_held;
    tf_choice *best[TF_STATES]; /* merged, best first */
    int best_held[TF_STATES];
    double *noisy;      /* [threads]: of the winner with noise in each thread's part, */
    int32_t *noisy_id;  /* and its id */
    double *sums;       /* [chunks of the vocabulary] */
    uint64_t *bins;     /* [65536], taken when first needed */
    uint32_t cut_bits;  /* top-p: scores above it are kept, */
    int32_t cut_id;     /* and those at it up to this id */
};

/* scoring_memory.c */
struct tf_scoring *tf_scoring_create(const tf_engine *engine);
void tf_scoring_free(struct tf_scoring *scoring);
int tf_scores_reserve(const tf_scores_job *job); /* makes ready for one run */
int tf_state_stores(const tf_scores_job *job, int state);
int tf_seen_count(const tf_scores_job *job, int state); /* ids that a penalty falls on */

/* scoring.c */
void tf_scores_run(void *job, int thread); /* SPMD, by all threads of the engine */
/* Places of a thread, cut at chunks of TF_SCORED. */
void tf_my_places(const tf_engine *engine, int thread, int *begin, int *end);
float tf_exact(const tf_view *view, int place, float score); /* the exact score, where the approximate or penalised one is `score` */
float tf_margin(const tf_view *view, float near);
float tf_fine_margin(const tf_view *view, float near);
void tf_make_likely_exact(const tf_scores_job *job, int state, int thread, double temperature); /* SPMD; meets at its end */
double tf_sum_of_all(const tf_engine *engine); /* of the last tf_make_likely_exact */
static inline float tf_key(float score)
{
    return score != score ? __builtin_inff() : score;
}

/* choices.c */
int tf_list_length(const tf_scores_job *job, int state);
void tf_place_lists(const tf_scores_job *job, int thread);
float tf_largest(const float *scores, int count);
/* Offers whatever of places [begin, end) may be among the best; `top`: the largest of their scores. */
void tf_take_scores(const tf_view *view, tf_list *list, int begin, int end, const float *scores, float top);
void tf_merge_lists(const tf_scores_job *job, int state); /* of all threads, best first */

/* search.c */
void tf_search_prepare(const tf_scores_job *job, int state, tf_view *view, tf_search *search);
/* Whether no place from `begin` on can win. */
int tf_search_ends(const tf_view *view, tf_search *search, const tf_list *list, int begin);
/* Gives to the list what may win of a chunk; 0: it did nothing, and the chunk is to be read as a whole. */
int tf_search_chunk(const tf_view *view, tf_search *search, tf_list *list, int begin, int end, float *scores, tf_tally *tally);
void tf_tally_whole(const tf_codes *codes, tf_tally *tally, int count); /* all of a chunk was read */
void tf_tally_chunk(const tf_codes *codes, tf_tally *tally); /* counts what any state read of a chunk */

/* sampling.c */
int32_t tf_draw_from_list(const tf_draw *draw, const tf_choice *list, int count);
void tf_draw_from_all(const tf_scores_job *job, int state, int thread); /* SPMD; meets at its end */

/* logprob.c */
void tf_target_logprob(const tf_scores_job *job, int state, int thread); /* SPMD; meets at its end */

#endif
