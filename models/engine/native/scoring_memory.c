/* Memory for scores: what every job takes, and what depends on what is wanted. */
#include "scoring.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t chunk_count(const tf_engine *engine)
{
    return ((size_t)engine->model->c.vocabulary + TF_SCORED - 1) / TF_SCORED;
}

struct tf_scoring *tf_scoring_create(const tf_engine *engine)
{
    const tf_config *c = &engine->model->c;
    struct tf_scoring *s = tf_alloc(sizeof *s);
    if (!s)
        return NULL;
    memset(s, 0, sizeof *s);
    size_t threads = engine->threads, each = threads * TF_STATES;
    int coded = c->head == TF_HEAD_CODE;
    s->table_bytes = coded ? (engine->model->backend->code_tables_bytes(c->code_bits) + 63) / 64 * 64 : 0;
    s->hidden = tf_alloc(tf_times(c->width, TF_STATES * sizeof(float)));
    s->code_hidden = tf_alloc(tf_times(coded ? c->code_bits : 0, TF_STATES * sizeof(float)));
    s->chunks = tf_alloc(tf_times(each, TF_SCORED * sizeof(float)));
    s->tables = tf_alloc(tf_times(2 * each, s->table_bytes));
    s->views = tf_alloc(tf_times(each, sizeof *s->views));
    s->lists = tf_alloc(tf_times(each, sizeof *s->lists));
    s->searches = tf_alloc(tf_times(each, sizeof *s->searches));
    s->tallies = tf_alloc(tf_times(threads, sizeof *s->tallies));
    s->noisy = tf_alloc(tf_times(threads, sizeof *s->noisy));
    s->noisy_id = tf_alloc(tf_times(threads, sizeof *s->noisy_id));
    s->sums = tf_alloc(tf_times(chunk_count(engine), sizeof *s->sums));
    if (s->tallies)
        memset(s->tallies, 0, threads * sizeof *s->tallies);
    if (s->hidden && s->code_hidden && s->chunks && s->tables && s->views && s->lists && s->searches && s->tallies && s->noisy &&
        s->noisy_id && s->sums)
        return s;
    tf_scoring_free(s);
    return NULL;
}

void tf_scoring_free(struct tf_scoring *s)
{
    if (!s)
        return;
    void *parts[] = {s->hidden, s->code_hidden, s->chunks, s->tables, s->views, s->lists, s->searches, s->tallies, s->choices, s->stored,
                     s->seen, s->noisy, s->noisy_id, s->sums, s->bins};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        tf_free(parts[i]);
    tf_free(s);
}

/* Whether all of a state's scores are kept: for a draw among all tokens, and for the sum over them. */
int tf_state_stores(const tf_scores_job *job, int state)
{
    if (job->targets || job->all)
        return job->targets != NULL;
    return job->draws[state].temperature > 0 && !job->draws[state].top_k;
}

int tf_seen_count(const tf_scores_job *job, int state)
{
    return job->draws && job->draws[state].repetition_penalty != 1 ? job->draws[state].seen_count : 0;
}

/* `memory` becomes one of at least `wanted` elements; the old one's contents are not kept. */
static int grow(void **memory, size_t *held, size_t wanted, size_t element)
{
    if (wanted > *held) {
        tf_free(*memory);
        *memory = tf_alloc(tf_times(wanted, element));
        *held = *memory ? wanted : 0;
    }
    return wanted <= *held;
}

static int ascending(const void *a, const void *b)
{
    return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

static void place_seen(const tf_scores_job *job)
{
    int32_t *places = job->engine->scoring->seen;
    for (int i = 0; i < job->states; i++) {
        int count = tf_seen_count(job, i);
        for (int j = 0; j < count; j++)
            places[j] = tf_place(job->engine->model, job->draws[i].seen[j]);
        if (count)
            qsort(places, count, sizeof *places, ascending);
        places += count;
    }
}

int tf_scores_reserve(const tf_scores_job *job)
{
    struct tf_scoring *s = job->engine->scoring;
    size_t choices = 0, stored = 0, seen = 0, vocabulary = job->engine->model->c.vocabulary;
    int top_p = 0;
    for (int i = 0; i < job->states; i++) {
        choices += tf_list_length(job, i);
        stored = tf_state_stores(job, i) ? (size_t)i + 1 : stored;
        seen += tf_seen_count(job, i);
        top_p |= job->draws && job->draws[i].top_p < 1;
    }
    int complete = grow((void **)&s->choices, &s->choices_held, tf_times(choices, job->engine->threads + 1), sizeof *s->choices);
    complete &= grow((void **)&s->stored, &s->stored_held, tf_times(stored, vocabulary), sizeof *s->stored);
    complete &= grow((void **)&s->seen, &s->seen_held, seen, sizeof *s->seen);
    if (top_p && !s->bins)
        s->bins = tf_alloc(65536 * sizeof *s->bins);
    if (!complete || (top_p && !s->bins))
        return tf_fail(TF_NO_MEMORY, "no memory for the scores of %d tokens", job->states);
    place_seen(job);
    for (int i = 0; i < job->states; i++)
        atomic_store_explicit(&s->reached[i], -INFINITY, memory_order_relaxed);
    memset(s->tallies, 0, job->engine->threads * sizeof *s->tallies);
    return TF_OK;
}
