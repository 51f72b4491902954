/* The calls that read tokens: arguments checked, sessions made ready, then the threads set to work. */
#include "scoring.h"

#include <string.h>

static int check_tokens(const tf_model *model, const int32_t *tokens, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= model->c.vocabulary)
            return tf_fail(TF_INVALID, "token %d is outside the vocabulary of %d", tokens[i], model->c.vocabulary);
    return TF_OK;
}

static int check_room(const tf_engine *engine, const tf_session *session, int count)
{
    if (!session || session->engine != engine || count < 1)
        return tf_fail(TF_INVALID, "a session of this engine must read at least one token, got %d", count);
    if (count > engine->model->c.context - session->length)
        return tf_fail(TF_FULL, "%d tokens after %d exceed the context of %d", count, session->length, engine->model->c.context);
    return TF_OK;
}

static int is_between(double value, double least, double most)
{
    return value >= least && value <= most; /* false for NaN */
}

static int check_draw(const tf_model *model, const tf_draw *draw)
{
    int limits = is_between(draw->top_p, 0, 1) && draw->top_p > 0 && is_between(draw->min_p, 0, 1) && draw->top_k >= 0;
    if (!limits || !is_between(draw->temperature, 0, 1e300) || !is_between(draw->repetition_penalty, 1e-30, 1e30))
        return tf_fail(TF_INVALID, "temperature, top_k, top_p, min_p or repetition_penalty is outside its range");
    if (draw->seen_count < 0 || (draw->seen_count && !draw->seen))
        return tf_fail(TF_INVALID, "the ids seen are missing");
    for (int i = 1; i < draw->seen_count; i++)
        if (draw->seen[i] <= draw->seen[i - 1])
            return tf_fail(TF_INVALID, "the ids seen must ascend");
    return check_tokens(model, draw->seen, draw->seen_count);
}

static int check_sessions(const tf_engine *engine, int sessions, tf_session *const *session, const int32_t *counts, const tf_draw *draws)
{
    int code;
    for (int i = 0; i < sessions; i++) {
        if ((code = check_room(engine, session[i], counts[i])) || (draws && (code = check_draw(engine->model, &draws[i]))))
            return code;
        for (int j = 0; j < i; j++)
            if (session[i] == session[j])
                return tf_fail(TF_INVALID, "a session was given twice");
    }
    return TF_OK;
}

static void forward(void *step, int thread)
{
    tf_forward(step, thread);
}

/* What comes of a step's hidden states, in a call with several sessions. */
typedef struct {
    tf_session *const *session;
    const int32_t *counts;
    int current, done; /* the session whose tokens come next, and how many of them were read */
} cursor;

static void fill_step(tf_step *step, cursor *at, int sessions)
{
    step->tokens = 0;
    while (step->tokens < TF_STEP && at->current < sessions) {
        tf_session *session = at->session[at->current];
        step->session[step->tokens] = session;
        step->position[step->tokens++] = session->length++;
        if (++at->done == at->counts[at->current]) {
            at->current++;
            at->done = 0;
        }
    }
}

static void keep_hidden(const tf_step *step)
{
    int width = step->engine->model->c.width;
    for (int t = 0; t < step->tokens; t++)
        if (t + 1 == step->tokens || step->session[t + 1] != step->session[t])
            memcpy(step->session[t]->hidden, step->engine->hidden + (size_t)t * width, width * sizeof(float));
}

static int draw_states(tf_engine *engine, int sessions, tf_session *const *session, const tf_draw *draws, int32_t *drawn)
{
    int width = engine->model->c.width;
    for (int first = 0; first < sessions; first += TF_STATES) {
        int states = sessions - first < TF_STATES ? sessions - first : TF_STATES;
        tf_scores_job job = {.engine = engine, .states = states, .draws = draws + first, .drawn = drawn + first};
        if (tf_scores_reserve(&job))
            return TF_NO_MEMORY;
        for (int i = 0; i < states; i++)
            memcpy(engine->scoring->hidden + (size_t)i * width, session[first + i]->hidden, width * sizeof(float));
        tf_pool_run(engine->pool, tf_scores_run, &job);
    }
    return TF_OK;
}

static int64_t total_of(int sessions, const int32_t *counts)
{
    int64_t total = 0;
    for (int i = 0; i < sessions; i++)
        total += counts[i];
    return total;
}

int tf_read(tf_engine *engine, int sessions, tf_session *const *session, const int32_t *counts, const int32_t *tokens, float *hidden,
            const tf_draw *draws, int32_t *drawn)
{
    const tf_config *c = &engine->model->c;
    int code = check_sessions(engine, sessions, session, counts, draws);
    int64_t total = total_of(sessions, counts);
    if (code || (code = check_tokens(engine->model, tokens, total)))
        return code;
    for (int i = 0; i < sessions; i++)
        if (tf_session_reserve(session[i], session[i]->length + counts[i]))
            return TF_NO_MEMORY;
    cursor at = {session, counts, 0, 0};
    tf_step step = {.engine = engine};
    for (int64_t done = 0; done < total; done += step.tokens) {
        fill_step(&step, &at, sessions);
        step.ids = tokens + done;
        tf_pool_run(engine->pool, forward, &step);
        keep_hidden(&step);
        if (hidden)
            memcpy(hidden + done * c->width, engine->hidden, (size_t)step.tokens * c->width * sizeof(float));
    }
    return draws ? draw_states(engine, sessions, session, draws, drawn) : TF_OK;
}

int tf_draw_again(tf_engine *engine, int sessions, tf_session *const *session, const tf_draw *draws, int32_t *drawn)
{
    for (int i = 0; i < sessions; i++) {
        if (!session[i] || session[i]->engine != engine || session[i]->length < 1)
            return tf_fail(TF_INVALID, "session %d has read nothing", i);
        int code = check_draw(engine->model, &draws[i]);
        if (code)
            return code;
    }
    return draw_states(engine, sessions, session, draws, drawn);
}

int tf_scores(tf_engine *engine, tf_session *session, float *scores)
{
    if (!session || session->engine != engine || session->length < 1)
        return tf_fail(TF_INVALID, "the session has read nothing");
    tf_scores_job job = {.engine = engine, .states = 1, .all = scores};
    if (tf_scores_reserve(&job))
        return TF_NO_MEMORY;
    memcpy(engine->scoring->hidden, session->hidden, engine->model->c.width * sizeof(float));
    tf_pool_run(engine->pool, tf_scores_run, &job);
    return TF_OK;
}

/* Log-probabilities after the tokens of a step, as far as they were asked for. */
static int score_step(tf_engine *engine, int tokens, const int32_t *targets, float *logprobs, uint8_t *greedy)
{
    int width = engine->model->c.width, places[TF_STATES];
    int32_t wanted[TF_STATES];
    float found[TF_STATES];
    uint8_t best[TF_STATES];
    for (int t = 0; t < tokens;) {
        tf_scores_job job = {.engine = engine, .targets = wanted, .logprobs = found, .greedy = best};
        for (; t < tokens && job.states < TF_STATES; t++) {
            logprobs[t] = 0;
            greedy[t] = 1;
            if (targets[t] < 0)
                continue;
            memcpy(engine->scoring->hidden + (size_t)job.states * width, engine->hidden + (size_t)t * width, width * sizeof(float));
            places[job.states] = t;
            wanted[job.states++] = targets[t];
        }
        if (job.states && tf_scores_reserve(&job))
            return TF_NO_MEMORY;
        if (job.states)
            tf_pool_run(engine->pool, tf_scores_run, &job);
        for (int i = 0; i < job.states; i++) {
            logprobs[places[i]] = found[i];
            greedy[places[i]] = best[i];
        }
    }
    return TF_OK;
}

int tf_score(tf_engine *engine, tf_session *session, int count, const int32_t *tokens, const int32_t *targets, float *logprobs,
             uint8_t *greedy)
{
    int code;
    if ((code = check_room(engine, session, count)) || (code = check_tokens(engine->model, tokens, count)))
        return code;
    for (int i = 0; i < count; i++)
        if (targets[i] >= engine->model->c.vocabulary)
            return tf_fail(TF_INVALID, "target %d is outside the vocabulary of %d", targets[i], engine->model->c.vocabulary);
    if (tf_session_reserve(session, session->length + count))
        return TF_NO_MEMORY;
    cursor at = {&session, &count, 0, 0};
    tf_step step = {.engine = engine};
    for (int done = 0; done < count; done += step.tokens) {
        fill_step(&step, &at, 1);
        step.ids = tokens + done;
        tf_pool_run(engine->pool, forward, &step);
        keep_hidden(&step);
        if ((code = score_step(engine, step.tokens, targets + done, logprobs + done, greedy + done)))
            return code;
    }
    return TF_OK;
}
