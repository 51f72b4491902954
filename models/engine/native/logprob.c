/* Log-probability of a target. The sum over the vocabulary is taken chunk by chunk, and the chunks' sums in their order, so that it
 * does not depend on the number of threads. */
#include "scoring.h"

#include <math.h>

void tf_target_logprob(const tf_scores_job *job, int state, int thread)
{
    tf_engine *engine = job->engine;
    struct tf_scoring *s = engine->scoring;
    const tf_view *view = &s->views[(size_t)thread * TF_STATES + state];
    int vocabulary = engine->model->c.vocabulary, begin, end, target = job->targets[state];
    float *scores = s->stored + (size_t)state * vocabulary;
    tf_choice best = s->best[state][0];
    float margin = tf_margin(view, best.score);
    /* Below `least` all the vocabulary together weighs less than 1e-6 of the best token, whatever the codes' error. */
    float least = best.score - (logf((float)vocabulary) + 14.0f + 3 * margin);
    tf_my_ids(engine, thread, &begin, &end);
    tf_make_exact(view, scores, begin, end, least);
    for (int first = begin; first < end; first += TF_SCORED) {
        double sum = 0;
        for (int id = first; id < end && id < first + TF_SCORED; id++)
            sum += exp((double)scores[id] - (double)best.score);
        s->sums[first / TF_SCORED] = sum;
    }
    tf_pool_meet(engine->pool);
    if (thread == 0) {
        double sum = 0;
        for (int chunk = 0; chunk * TF_SCORED < vocabulary; chunk++)
            sum += s->sums[chunk];
        float score = scores[target] >= least ? scores[target] : tf_exact(view, target, scores[target]);
        job->logprobs[state] = (float)((double)score - (double)best.score - log(sum));
        job->greedy[state] = best.id == target;
    }
    tf_pool_meet(engine->pool);
}
