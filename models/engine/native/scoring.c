/* One pass over the vocabulary, a chunk of places at a time; each thread keeps the best of its part. Where only the best are wanted,
 * places that cannot win are passed over (search.c). */
#include "scoring.h"

#include <math.h>

enum { LONGEST_RUN = 16 };

static int chunk_count(const tf_engine *engine)
{
    return (engine->model->c.vocabulary + TF_SCORED - 1) / TF_SCORED;
}

void tf_my_places(const tf_engine *engine, int thread, int *begin, int *end)
{
    int vocabulary = engine->model->c.vocabulary;
    tf_split(chunk_count(engine), engine->threads, thread, begin, end);
    *begin *= TF_SCORED;
    *end = *end * TF_SCORED < vocabulary ? *end * TF_SCORED : vocabulary;
}

static int first_from(const int32_t *values, int count, int least)
{
    int low = 0, high = count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (values[middle] < least)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static float exact_at(const tf_view *view, int place)
{
    const tf_model *model = view->engine->model;
    float score = model->backend->exact_score(&model->codes, place, view->hidden);
    return model->c.prior ? score + ((const float *)model->parts[TF_PRIOR].memory)[place] : score;
}

float tf_exact(const tf_view *view, int place, float score)
{
    if (view->error == 0)
        return score;
    int at = first_from(view->seen, view->seen_count, place);
    if (at < view->seen_count && view->seen[at] == place)
        return score; /* made exact when the penalty was put on it */
    return exact_at(view, place);
}

/* How far a score near `near` may be from the exact one: the codes' error, and the rounding of the sum with the prior. */
float tf_margin(const tf_view *view, float near)
{
    return view->error == 0 || !isfinite(near) ? view->error : view->error * 1.0001f + 5e-7f * fabsf(near);
}

/* The same of a score that is kept. */
float tf_fine_margin(const tf_view *view, float near)
{
    return view->error == 0 || !isfinite(near) ? view->error : view->fine.error * 1.0001f + 1e-6f * fabsf(near);
}

/* Keskar et al., CTRL (arXiv 1909.05858), as transformers has it for scores below 0. */
static float penalise(const tf_view *view, int begin, int end, float *scores, float top)
{
    int at = first_from(view->seen, view->seen_count, begin), first = at;
    for (; at < view->seen_count && view->seen[at] < end; at++) {
        float *score = &scores[view->seen[at] - begin], penalty = view->draw->repetition_penalty;
        if (view->error != 0)
            *score = exact_at(view, view->seen[at]);
        *score = *score > 0 ? *score / penalty : *score * penalty;
    }
    return at > first ? tf_largest(scores, end - begin) : top;
}

/* Products of a chunk's rows with every state, at out + state * TF_SCORED. */
static void multiply_table(const tf_scores_job *job, int begin, int end, float *out)
{
    const tf_model *model = job->engine->model;
    const tf_matrix *table = &model->parts[model->c.head == TF_HEAD_TIED ? TF_TABLE : TF_OUTPUT].matrix;
    tf_input input = {.tokens = job->states, .x = job->engine->scoring->hidden, .x_stride = model->c.width};
    /* Row r of the product goes to out[r], and `out` stands for row `begin`. */
    model->backend->multiply(table, &input, (float *)((uintptr_t)out - (size_t)begin * sizeof(float)), TF_SCORED, begin, end);
}

/* One state's scores of a chunk, of which those with a table come in as products; returns the largest. */
static float score_chunk(const tf_view *view, int begin, int end, float *scores)
{
    const tf_model *model = view->engine->model;
    const float *prior = model->c.prior ? (const float *)model->parts[TF_PRIOR].memory + begin : NULL;
    int coded = model->c.head == TF_HEAD_CODE;
    float top;
    if (coded && view->error != 0) {
        top = model->backend->score_codes(&model->codes, 0, model->codes.streams, &view->tables, prior, begin, end, scores);
    } else {
        for (int i = 0; i < end - begin; i++)
            scores[i] = coded ? exact_at(view, begin + i) : scores[i] + (prior ? prior[i] : 0);
        top = tf_largest(scores, end - begin);
    }
    return penalise(view, begin, end, scores, top);
}

/* What a thread needs of a state: look-up tables, the places that a penalty falls on, how it is searched. */
static void make_view(const tf_scores_job *job, int state, int thread, const int32_t *seen)
{
    const tf_model *model = job->engine->model;
    struct tf_scoring *s = job->engine->scoring;
    size_t at = (size_t)thread * TF_STATES + state;
    int coded = model->c.head == TF_HEAD_CODE, bits = model->c.code_bits;
    const float *hidden = coded ? s->code_hidden + (size_t)state * bits : s->hidden + (size_t)state * model->c.width;
    tf_view *view = &s->views[at];
    *view = (tf_view){.engine = job->engine, .hidden = hidden, .draw = job->draws ? &job->draws[state] : NULL};
    view->seen = seen;
    view->seen_count = tf_seen_count(job, state);
    if (coded) {
        view->tables.tables = (char *)s->tables + at * 2 * s->table_bytes;
        view->fine.tables = (char *)view->tables.tables + s->table_bytes;
        model->backend->make_code_tables(hidden, bits, &view->tables);
        if (tf_state_stores(job, state))
            model->backend->refine_code_tables(hidden, bits, &view->tables, &view->fine);
        /* A hidden state that is not finite has no tables: all its scores are taken exactly. */
        view->error = isfinite(view->tables.error) && !job->all ? fmaxf(view->tables.error, 1e-30f) : 0;
    }
    tf_search_prepare(job, state, view, &s->searches[at]);
}

/* The hidden states at the code width, and this thread's views of them. */
static void make_views(const tf_scores_job *job, int thread)
{
    tf_engine *engine = job->engine;
    const tf_model *model = engine->model;
    struct tf_scoring *s = engine->scoring;
    if (model->c.head == TF_HEAD_CODE) {
        tf_step step = {.engine = engine, .tokens = job->states};
        const tf_matrix *map = &model->parts[TF_CODE_MAP].matrix;
        tf_input input = {.tokens = job->states, .x = s->hidden, .x_stride = model->c.width};
        tf_multiply_share(&step, &map, &s->code_hidden, (size_t[]){model->c.code_bits}, 1, &input, thread);
        tf_pool_meet(engine->pool);
    }
    const int32_t *seen = s->seen;
    for (int i = 0; i < job->states; i++) {
        make_view(job, i, thread, seen);
        seen += tf_seen_count(job, i);
    }
}

/* A chunk's scores are kept, with what the tables rounded off. */
static void keep_scores(const tf_view *view, int begin, int end, const float *scores, float *stored)
{
    const tf_model *model = view->engine->model;
    float rest[TF_SCORED] = {0};
    if (view->error != 0)
        model->backend->score_codes(&model->codes, 0, model->codes.streams, &view->fine, NULL, begin, end, rest);
    for (int at = first_from(view->seen, view->seen_count, begin); at < view->seen_count && view->seen[at] < end; at++)
        rest[view->seen[at] - begin] = 0; /* exact already */
    for (int place = begin; place < end; place++)
        stored[place] = scores[place - begin] + rest[place - begin];
}

static void score_state(const tf_scores_job *job, int state, int thread, int begin, int end)
{
    struct tf_scoring *s = job->engine->scoring;
    const tf_model *model = job->engine->model;
    size_t at = (size_t)thread * TF_STATES + state, vocabulary = model->c.vocabulary;
    const tf_view *view = &s->views[at];
    float *scores = s->chunks + at * TF_SCORED, top;
    if (s->searches[at].on && tf_search_chunk(view, &s->searches[at], &s->lists[at], begin, end, scores, &s->tallies[thread]))
        return;
    top = score_chunk(view, begin, end, scores);
    if (model->c.head == TF_HEAD_CODE)
        tf_tally_whole(&model->codes, &s->tallies[thread], end - begin);
    tf_take_scores(view, &s->lists[at], begin, end, scores, top);
    if (tf_state_stores(job, state))
        keep_scores(view, begin, end, scores, s->stored + state * vocabulary);
    for (int place = begin; job->all && place < end; place++)
        job->all[state * vocabulary + tf_id(model, place)] = scores[place - begin];
}

/* Returns whether a place behind these may win. */
static int score_places(const tf_scores_job *job, int thread, int begin, int end)
{
    struct tf_scoring *s = job->engine->scoring;
    size_t first = (size_t)thread * TF_STATES;
    int goes_on = 0;
    if (job->engine->model->c.head != TF_HEAD_CODE)
        multiply_table(job, begin, end, s->chunks + first * TF_SCORED);
    for (int i = 0; i < job->states; i++)
        if (!tf_search_ends(&s->views[first + i], &s->searches[first + i], &s->lists[first + i], begin)) {
            score_state(job, i, thread, begin, end);
            goes_on = 1;
        }
    tf_tally_chunk(&job->engine->model->codes, &s->tallies[thread]);
    return goes_on;
}

/* Chunks in a row that a thread takes: its whole part, or, where the likeliest come first, turn by turn. */
static int run_length(const tf_engine *engine)
{
    int chunks = chunk_count(engine), threads = engine->threads, run = chunks / (8 * threads);
    if (!engine->model->order.ids)
        return (chunks + threads - 1) / threads;
    return run < 1 ? 1 : run < LONGEST_RUN ? run : LONGEST_RUN;
}

/* Every thread begins with the likeliest places, whoever's they are: what it would read without a score to reach is far more. */
static void find_reach(const tf_scores_job *job, int thread)
{
    struct tf_scoring *s = job->engine->scoring;
    int vocabulary = job->engine->model->c.vocabulary, end = vocabulary < TF_SCORED ? vocabulary : TF_SCORED;
    for (size_t at = (size_t)thread * TF_STATES; at < (size_t)thread * TF_STATES + job->states; at++)
        if (s->searches[at].on) {
            tf_search_chunk(&s->views[at], &s->searches[at], &s->lists[at], 0, end, s->chunks + at * TF_SCORED, &s->tallies[thread]);
            s->lists[at].held = 0;
        }
    tf_tally_chunk(&job->engine->model->codes, &s->tallies[thread]);
}

static void score_all(const tf_scores_job *job, int thread)
{
    const tf_engine *engine = job->engine;
    int chunks = chunk_count(engine), run = run_length(engine), vocabulary = engine->model->c.vocabulary, goes_on = 1;
    if (thread)
        find_reach(job, thread);
    for (int64_t first = (int64_t)thread * run; first < chunks && goes_on; first += (int64_t)engine->threads * run)
        for (int chunk = (int)first; chunk < first + run && chunk < chunks && goes_on; chunk++) {
            int begin = chunk * TF_SCORED, end = begin + TF_SCORED < vocabulary ? begin + TF_SCORED : vocabulary;
            goes_on = score_places(job, thread, begin, end);
        }
}

void tf_scores_run(void *argument, int thread)
{
    const tf_scores_job *job = argument;
    tf_engine *engine = job->engine;
    struct tf_scoring *s = engine->scoring;
    tf_place_lists(job, thread);
    make_views(job, thread);
    score_all(job, thread);
    tf_pool_meet(engine->pool);
    if (job->all)
        return;
    for (int i = thread; i < job->states; i += engine->threads) {
        tf_merge_lists(job, i);
        if (!tf_state_stores(job, i))
            job->drawn[i] = job->draws[i].temperature > 0 ? tf_draw_from_list(&job->draws[i], s->best[i], s->best_held[i]) : s->best[i][0].id;
    }
    tf_pool_meet(engine->pool);
    for (int i = 0; i < job->states; i++) {
        if (job->targets)
            tf_target_logprob(job, i, thread);
        else if (tf_state_stores(job, i))
            tf_draw_from_all(job, i, thread);
    }
}
