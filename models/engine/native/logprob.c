/* Log-probabilities: a target's score and the largest are exact, the sum over the vocabulary is as good as. */
#include "scoring.h"

#include <math.h>

/* Sums of exp((score - top) / temperature) over a thread's places, chunk by chunk, so that they do not depend on the threads. */
static void sum_chunks(const tf_scores_job *job, int state, int thread, double temperature)
{
    struct tf_scoring *s = job->engine->scoring;
    const float *scores = s->stored + (size_t)state * job->engine->model->c.vocabulary;
    double top = s->best[state][0].score;
    int begin, end;
    tf_my_places(job->engine, thread, &begin, &end);
    for (int first = begin; first < end; first += TF_SCORED) {
        double sum = 0;
        for (int place = first; place < end && place < first + TF_SCORED; place++)
            sum += exp((scores[place] - top) / temperature);
        s->sums[first / TF_SCORED] = sum;
    }
}

double tf_sum_of_all(const tf_engine *engine)
{
    double sum = 0;
    for (int chunk = 0; chunk * TF_SCORED < engine->model->c.vocabulary; chunk++)
        sum += engine->scoring->sums[chunk];
    return sum;
}

/* Kept scores of codes are off by the fine tables' error. Those of the (at most 4096) tokens with more than 2^-12 of the probability
 * become exact; the errors of the others are small, of any sign, and weigh little. */
void tf_make_likely_exact(const tf_scores_job *job, int state, int thread, double temperature)
{
    tf_engine *engine = job->engine;
    struct tf_scoring *s = engine->scoring;
    const tf_view *view = &s->views[(size_t)thread * TF_STATES + state];
    float *scores = s->stored + (size_t)state * engine->model->c.vocabulary;
    double top = s->best[state][0].score;
    int begin, end;
    sum_chunks(job, state, thread, temperature);
    tf_pool_meet(engine->pool);
    if (view->error != 0) {
        double least = top + temperature * log(tf_sum_of_all(engine) / 4096);
        tf_pool_meet(engine->pool); /* all have read the sums */
        tf_my_places(engine, thread, &begin, &end);
        for (int place = begin; place < end; place++)
            if (scores[place] >= least) {
                double before = exp((scores[place] - top) / temperature);
                scores[place] = tf_exact(view, place, scores[place]);
                s->sums[place / TF_SCORED] += exp((scores[place] - top) / temperature) - before;
            }
    }
    tf_pool_meet(engine->pool);
}

void tf_target_logprob(const tf_scores_job *job, int state, int thread)
{
    tf_engine *engine = job->engine;
    struct tf_scoring *s = engine->scoring;
    int target = job->targets[state], place = tf_place(engine->model, target);
    tf_choice best = s->best[state][0];
    tf_make_likely_exact(job, state, thread, 1);
    if (thread == 0) {
        float score = tf_exact(&s->views[state], place, s->stored[(size_t)state * engine->model->c.vocabulary + place]);
        job->logprobs[state] = (float)((double)score - (double)best.score - log(tf_sum_of_all(engine)));
        job->greedy[state] = best.id == target;
    }
    tf_pool_meet(engine->pool);
}
