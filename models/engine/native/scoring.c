/* One pass over the vocabulary, a chunk at a time; each thread keeps the best of its part. Scores from codes are approximate with a
 * proven error: whatever could be among the best by that error is scored again exactly, so that the choice is that of exact scores. */
#include "scoring.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int chunk_count(const tf_engine *engine)
{
    return (engine->model->c.vocabulary + TF_SCORED - 1) / TF_SCORED;
}

void tf_my_ids(const tf_engine *engine, int thread, int *begin, int *end)
{
    int vocabulary = engine->model->c.vocabulary;
    tf_split(chunk_count(engine), engine->threads, thread, begin, end);
    *begin *= TF_SCORED;
    *end = *end * TF_SCORED < vocabulary ? *end * TF_SCORED : vocabulary;
}

struct tf_scoring *tf_scoring_create(const tf_engine *engine)
{
    const tf_config *c = &engine->model->c;
    struct tf_scoring *s = tf_alloc(sizeof *s);
    if (!s)
        return NULL;
    memset(s, 0, sizeof *s);
    size_t each = (size_t)engine->threads * TF_STATES;
    int coded = c->head == TF_HEAD_CODE;
    s->table_bytes = coded ? (engine->model->backend->code_tables_bytes(c->code_bits) + 63) / 64 * 64 : 0;
    s->hidden = tf_alloc(tf_times(c->width, TF_STATES * sizeof(float)));
    s->code_hidden = tf_alloc(tf_times(coded ? c->code_bits : 0, TF_STATES * sizeof(float)));
    s->chunks = tf_alloc(tf_times(each, TF_SCORED * sizeof(float)));
    s->tables = tf_alloc(tf_times(2 * each, s->table_bytes));
    s->views = tf_alloc(tf_times(each, sizeof *s->views));
    s->lists = tf_alloc(tf_times(each, sizeof *s->lists));
    s->noisy = tf_alloc(tf_times(engine->threads, sizeof *s->noisy));
    s->noisy_id = tf_alloc(tf_times(engine->threads, sizeof *s->noisy_id));
    s->sums = tf_alloc(tf_times(chunk_count(engine), sizeof *s->sums));
    if (s->hidden && s->code_hidden && s->chunks && s->tables && s->views && s->lists && s->noisy && s->noisy_id && s->sums)
        return s;
    tf_scoring_free(s);
    return NULL;
}

void tf_scoring_free(struct tf_scoring *s)
{
    if (!s)
        return;
    void *parts[] = {s->hidden, s->code_hidden, s->chunks, s->tables, s->views, s->lists, s->choices, s->stored, s->noisy, s->noisy_id,
                     s->sums, s->bins};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        tf_free(parts[i]);
    tf_free(s);
}

static int list_length(const tf_scores_job *job, int state)
{
    int k = job->draws && job->draws[state].temperature > 0 ? job->draws[state].top_k : 0, all = job->engine->model->c.vocabulary;
    return k < 1 ? 1 : k < all ? k : all;
}

/* Whether all of a state's scores are kept: for a draw among all tokens, and for the sum over them. */
int tf_state_stores(const tf_scores_job *job, int state)
{
    if (job->targets || job->all)
        return job->targets != NULL;
    return job->draws[state].temperature > 0 && !job->draws[state].top_k;
}

/* Memory that depends on what is wanted. */
int tf_scores_reserve(const tf_scores_job *job)
{
    struct tf_scoring *s = job->engine->scoring;
    size_t wanted = 0, stored = 0, vocabulary = job->engine->model->c.vocabulary;
    int top_p = 0;
    for (int i = 0; i < job->states; i++) {
        wanted = wanted + list_length(job, i);
        stored = tf_state_stores(job, i) ? (size_t)i + 1 : stored;
        top_p |= job->draws && job->draws[i].top_p < 1;
    }
    wanted = tf_times(wanted, job->engine->threads + 1);
    if (wanted > s->choices_held) {
        tf_free(s->choices);
        s->choices = tf_alloc(tf_times(wanted, sizeof *s->choices));
        s->choices_held = s->choices ? wanted : 0;
    }
    if (stored > s->stored_states) {
        tf_free(s->stored);
        s->stored = tf_alloc(tf_times(tf_times(stored, vocabulary), sizeof(float)));
        s->stored_states = s->stored ? stored : 0;
    }
    if (top_p && !s->bins)
        s->bins = tf_alloc(65536 * sizeof *s->bins);
    if (!s->choices || (stored && !s->stored) || (top_p && !s->bins))
        return tf_fail(TF_NO_MEMORY, "no memory for the scores of %d tokens", job->states);
    return TF_OK;
}

/* Lists lie state by state: those of the threads, then the merged one. */
static void place_lists(const tf_scores_job *job, int thread)
{
    struct tf_scoring *s = job->engine->scoring;
    size_t at = 0;
    for (int i = 0; i < job->states; i++) {
        size_t k = list_length(job, i);
        s->lists[(size_t)thread * TF_STATES + i] = (tf_list){s->choices + at + thread * k, 0, (int)k};
        at += (job->engine->threads + 1) * k;
    }
}

static int seen_from(const tf_draw *draw, int id)
{
    int low = 0, high = draw->seen_count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (draw->seen[middle] < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int penalised(const tf_view *view)
{
    return view->draw && view->draw->repetition_penalty != 1 && view->draw->seen_count > 0;
}

static float own_exact(const tf_view *view, int id)
{
    const tf_model *model = view->engine->model;
    float score = model->backend->exact_score(model->parts[TF_CODES].memory, model->c.vocabulary, model->c.code_bits, id, view->hidden);
    return model->c.prior ? score + ((const float *)model->parts[TF_PRIOR].memory)[id] : score;
}

/* The exact score of an id whose score in a chunk is `score`. */
float tf_exact(const tf_view *view, int id, float score)
{
    if (view->error == 0)
        return score;
    if (penalised(view)) {
        int place = seen_from(view->draw, id);
        if (place < view->draw->seen_count && view->draw->seen[place] == id)
            return score; /* made exact when the penalty was put on it */
    }
    return own_exact(view, id);
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

static float largest(const float *scores, int count)
{
    float top = -INFINITY;
    for (int i = 0; i < count; i++)
        top = tf_key(scores[i]) > top ? tf_key(scores[i]) : top;
    return top;
}

/* Keskar et al., CTRL (arXiv 1909.05858), as transformers has it for scores below 0. */
static float penalise(const tf_view *view, int begin, int end, float *scores, float top)
{
    const tf_draw *draw = view->draw;
    int place = penalised(view) ? seen_from(draw, begin) : 0, first = place;
    for (; penalised(view) && place < draw->seen_count && draw->seen[place] < end; place++) {
        int id = draw->seen[place];
        float score = view->error == 0 ? scores[id - begin] : own_exact(view, id);
        scores[id - begin] = score > 0 ? score / draw->repetition_penalty : score * draw->repetition_penalty;
    }
    return place > first ? largest(scores, end - begin) : top;
}

/* Scores of one chunk for every state, at out + state * stride; the largest of each in top. */
static void score_chunk(const tf_scores_job *job, tf_view *views, int begin, int end, float *out, size_t stride, float *top)
{
    const tf_engine *engine = job->engine;
    const tf_model *model = engine->model;
    const tf_config *c = &model->c;
    const float *prior = c->prior ? model->parts[TF_PRIOR].memory : NULL;
    if (c->head != TF_HEAD_CODE) {
        const tf_matrix *table = &model->parts[c->head == TF_HEAD_TIED ? TF_TABLE : TF_OUTPUT].matrix;
        tf_input input = {.tokens = job->states, .x = engine->scoring->hidden, .x_stride = c->width};
        /* Row r of the product goes to out[r], and `out` stands for row `begin`. */
        model->backend->multiply(table, &input, (float *)((uintptr_t)out - (size_t)begin * sizeof(float)), stride, begin, end);
    }
    for (int i = 0; i < job->states; i++) {
        float *scores = out + i * stride;
        if (c->head == TF_HEAD_CODE && views[i].error != 0) {
            top[i] = model->backend->score_codes(model->parts[TF_CODES].memory, c->vocabulary, c->code_bits, &views[i].tables, prior, begin,
                                                 end, scores);
        } else {
            for (int id = begin; id < end; id++)
                scores[id - begin] = c->head == TF_HEAD_CODE ? own_exact(&views[i], id) : scores[id - begin] + (prior ? prior[id] : 0);
            top[i] = largest(scores, end - begin);
        }
        top[i] = penalise(&views[i], begin, end, scores, top[i]);
    }
}

static int better(tf_choice a, tf_choice b)
{
    float x = tf_key(a.score), y = tf_key(b.score);
    return x > y || (x == y && a.id < b.id);
}

static void sink(tf_choice *heap, int held, int at)
{
    for (;;) {
        int worst = at, left = 2 * at + 1;
        if (left < held && better(heap[worst], heap[left]))
            worst = left;
        if (left + 1 < held && better(heap[worst], heap[left + 1]))
            worst = left + 1;
        if (worst == at)
            return;
        tf_choice moved = heap[at];
        heap[at] = heap[worst];
        heap[worst] = moved;
        at = worst;
    }
}

static void offer(tf_list *list, tf_choice choice)
{
    if (list->held == list->most) {
        if (better(choice, list->heap[0])) {
            list->heap[0] = choice;
            sink(list->heap, list->held, 0);
        }
        return;
    }
    int at = list->held++;
    for (; at && better(list->heap[(at - 1) / 2], choice); at = (at - 1) / 2)
        list->heap[at] = list->heap[(at - 1) / 2];
    list->heap[at] = choice;
}

/* Offers whatever of a chunk may be among the best. */
static void take_chunk(const tf_view *view, tf_list *list, int begin, int end, const float *scores, float top)
{
    float least = -INFINITY, margin = tf_margin(view, top);
    if (list->held == list->most) {
        float worst = tf_key(list->heap[0].score);
        margin = fmaxf(margin, tf_margin(view, worst));
        if (top < worst - margin)
            return;
        least = worst - margin;
    }
    if (list->most == 1) /* of this chunk only its best can win */
        least = fmaxf(least, top - 2 * margin);
    for (int id = begin; id < end; id++)
        if (!(scores[id - begin] < least))
            offer(list, (tf_choice){tf_exact(view, id, scores[id - begin]), id});
}

static int compare(const void *a, const void *b)
{
    return better(*(const tf_choice *)a, *(const tf_choice *)b) ? -1 : 1;
}

/* The best of all threads, best first. */
static void merge_lists(const tf_scores_job *job, int state)
{
    struct tf_scoring *s = job->engine->scoring;
    int threads = job->engine->threads, k = list_length(job, state);
    tf_list merged = {s->lists[state].heap + (size_t)threads * k, 0, k};
    for (int t = 0; t < threads; t++) {
        const tf_list *list = &s->lists[(size_t)t * TF_STATES + state];
        for (int i = 0; i < list->held; i++)
            offer(&merged, list->heap[i]);
    }
    qsort(merged.heap, merged.held, sizeof *merged.heap, compare);
    s->best[state] = merged.heap;
    s->best_held[state] = merged.held;
}

/* The hidden states at the code width, and this thread's look-up tables of them. */
static void make_views(const tf_scores_job *job, tf_view *views, int thread)
{
    tf_engine *engine = job->engine;
    const tf_model *model = engine->model;
    struct tf_scoring *s = engine->scoring;
    int coded = model->c.head == TF_HEAD_CODE, bits = model->c.code_bits;
    if (coded) {
        tf_step step = {.engine = engine, .tokens = job->states};
        const tf_matrix *map = &model->parts[TF_CODE_MAP].matrix;
        tf_input input = {.tokens = job->states, .x = s->hidden, .x_stride = model->c.width};
        tf_multiply_share(&step, &map, &s->code_hidden, (size_t[]){bits}, 1, &input, thread);
        tf_pool_meet(engine->pool);
    }
    for (int i = 0; i < job->states; i++) {
        const float *hidden = coded ? s->code_hidden + (size_t)i * bits : s->hidden + (size_t)i * model->c.width;
        views[i] = (tf_view){.engine = engine, .hidden = hidden, .draw = job->draws ? &job->draws[i] : NULL};
        if (!coded)
            continue;
        views[i].tables.tables = (char *)s->tables + ((size_t)thread * TF_STATES + i) * 2 * s->table_bytes;
        views[i].fine.tables = (char *)views[i].tables.tables + s->table_bytes;
        model->backend->make_code_tables(hidden, bits, &views[i].tables);
        if (tf_state_stores(job, i))
            model->backend->refine_code_tables(hidden, bits, &views[i].tables, &views[i].fine);
        /* A hidden state that is not finite has no tables: all its scores are taken exactly. */
        views[i].error = isfinite(views[i].tables.error) && !job->all ? fmaxf(views[i].tables.error, 1e-30f) : 0;
    }
}

/* A chunk's scores are kept, with what the tables rounded off. */
static void keep_scores(const tf_view *view, int begin, int end, const float *scores, float *stored)
{
    const tf_model *model = view->engine->model;
    float rest[TF_SCORED];
    memcpy(stored + begin, scores, (end - begin) * sizeof(float));
    if (view->error == 0)
        return;
    model->backend->score_codes(model->parts[TF_CODES].memory, model->c.vocabulary, model->c.code_bits, &view->fine, NULL, begin, end, rest);
    int place = penalised(view) ? seen_from(view->draw, begin) : 0, seen = penalised(view) ? view->draw->seen_count : 0;
    for (int id = begin; id < end; id++) {
        if (place < seen && view->draw->seen[place] == id)
            place++; /* exact already */
        else
            stored[id] += rest[id - begin];
    }
}

static void score_all(const tf_scores_job *job, tf_view *views, int thread)
{
    const tf_engine *engine = job->engine;
    struct tf_scoring *s = engine->scoring;
    float *scratch = s->chunks + (size_t)thread * TF_STATES * TF_SCORED, top[TF_STATES];
    size_t vocabulary = engine->model->c.vocabulary;
    int first, last, store = 0;
    for (int i = 0; i < job->states; i++)
        store |= tf_state_stores(job, i);
    tf_my_ids(engine, thread, &first, &last);
    for (int begin = first; begin < last; begin += TF_SCORED) {
        int end = begin + TF_SCORED < last ? begin + TF_SCORED : last;
        score_chunk(job, views, begin, end, scratch, TF_SCORED, top);
        for (int i = 0; i < job->states; i++) {
            const float *scores = scratch + (size_t)i * TF_SCORED;
            take_chunk(&views[i], &s->lists[(size_t)thread * TF_STATES + i], begin, end, scores, top[i]);
            if (store && tf_state_stores(job, i))
                keep_scores(&views[i], begin, end, scores, s->stored + i * vocabulary);
            if (job->all)
                memcpy(job->all + i * vocabulary + begin, scores, (end - begin) * sizeof(float));
        }
    }
}

void tf_scores_run(void *argument, int thread)
{
    const tf_scores_job *job = argument;
    tf_engine *engine = job->engine;
    struct tf_scoring *s = engine->scoring;
    tf_view *views = s->views + (size_t)thread * TF_STATES;
    place_lists(job, thread);
    make_views(job, views, thread);
    score_all(job, views, thread);
    tf_pool_meet(engine->pool);
    if (job->all)
        return;
    for (int i = thread; i < job->states; i += engine->threads) {
        merge_lists(job, i);
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
