/* The best of many scores. Approximate ones have a proven error: whatever could be among the best by that error is scored again
 * exactly, so that the choice is that of exact scores. */
#include "scoring.h"

#include <math.h>
#include <stdlib.h>

int tf_list_length(const tf_scores_job *job, int state)
{
    int k = job->draws && job->draws[state].temperature > 0 ? job->draws[state].top_k : 0, all = job->engine->model->c.vocabulary;
    return k < 1 ? 1 : k < all ? k : all;
}

/* Lists lie state by state: those of the threads, then the merged one. */
void tf_place_lists(const tf_scores_job *job, int thread)
{
    struct tf_scoring *s = job->engine->scoring;
    size_t at = 0;
    for (int i = 0; i < job->states; i++) {
        size_t k = tf_list_length(job, i);
        s->lists[(size_t)thread * TF_STATES + i] = (tf_list){s->choices + at + thread * k, 0, (int)k, &s->reached[i]};
        at += (job->engine->threads + 1) * k;
    }
}

float tf_largest(const float *scores, int count)
{
    float top = -INFINITY;
    for (int i = 0; i < count; i++)
        top = tf_key(scores[i]) > top ? tf_key(scores[i]) : top;
    return top;
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

/* What an approximate score must come to for its exact one to get into the list; `top`: the largest of those that are asked about. */
static float least_of(const tf_view *view, const tf_list *list, float top)
{
    float worst = list->held == list->most ? tf_key(list->heap[0].score) : -INFINITY;
    return worst - fmaxf(tf_margin(view, top), tf_margin(view, worst));
}

static void raise_to(_Atomic float *reached, float score)
{
    float old = atomic_load_explicit(reached, memory_order_relaxed);
    while (score > old && !atomic_compare_exchange_weak_explicit(reached, &old, score, memory_order_relaxed, memory_order_relaxed))
        ;
}

void tf_take_scores(const tf_view *view, tf_list *list, int begin, int end, const float *scores, float top)
{
    float least = least_of(view, list, top);
    if (top < least)
        return;
    if (list->most == 1 && isfinite(top)) /* of these only the best can win; an infinite approximate sum may be finite in truth */
        least = fmaxf(least, top - 2 * tf_margin(view, top));
    for (int place = begin; place < end; place++) {
        if (scores[place - begin] < least)
            continue;
        offer(list, (tf_choice){tf_exact(view, place, scores[place - begin]), tf_id(view->engine->model, place)});
        least = fmaxf(least, least_of(view, list, top));
    }
    if (list->held == list->most)
        raise_to(list->reached, list->heap[0].score);
}

static int compare(const void *a, const void *b)
{
    return better(*(const tf_choice *)a, *(const tf_choice *)b) ? -1 : 1;
}

/* The best of all threads, best first. */
void tf_merge_lists(const tf_scores_job *job, int state)
{
    struct tf_scoring *s = job->engine->scoring;
    int threads = job->engine->threads, k = tf_list_length(job, state);
    tf_list merged = {.heap = s->lists[state].heap + (size_t)threads * k, .most = k};
    for (int t = 0; t < threads; t++) {
        const tf_list *list = &s->lists[(size_t)t * TF_STATES + state];
        for (int i = 0; i < list->held; i++)
            offer(&merged, list->heap[i]);
    }
    qsort(merged.heap, merged.held, sizeof *merged.heap, compare);
    s->best[state] = merged.heap;
    s->best_held[state] = merged.held;
}
