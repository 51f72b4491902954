/* Greedy and top-k choices without most of the codes, and exact all the same.
 *
 * A score is prior + <z, code>/sqrt(K), so bits that were not looked at add no more than their |z_k|/sqrt(K). Places come by prior, and
 * of a code its streams one after another (order.c). A score that was found, the k-th best of any thread, is what others must reach:
 *     where the largest prior of a group + all |z_k|/sqrt(K) stays below it, this group and all behind it cannot win;
 *     where prior + the streams so far + the other bits' |z_k|/sqrt(K) stays below it for all of a block, its other streams are not read;
 *     what is left is given to the list, which scores it exactly where it may win (choices.c).
 * Every reach holds what rounding may add, so nothing is passed over that would tie. */
#include "scoring.h"

#include <math.h>
#include <string.h>

#include "codes.h"

enum { BLOCKS = TF_SCORED / TF_IDS, LONGEST_WAIT = 64 };

/* Whether the best of a state are all that is wanted. A penalty moves scores up as well as down: all are read then. */
static int wants_the_best(const tf_scores_job *job, int state)
{
    const tf_draw *draw = job->draws ? &job->draws[state] : NULL;
    if (!draw || job->all || job->targets || (draw->repetition_penalty != 1 && draw->seen_count))
        return 0;
    for (int i = 0; i < job->states; i++)
        if (tf_state_stores(job, i))
            return 0;
    return 1;
}

/* The bounds. Let P be the computed sum of the prior and the scores of streams 0 .. s, E the computed exact score, `total` the sum of
 * |z_k|, f = 1/sqrt(K), u = 2^-24. In exact arithmetic a part's score is off by its error at most, and the streams behind s add at
 * most f times their share of `total`. Rounding:
 *     of the exact sum of products, and of the shares: tf_sum_error(K, total) f, which allows for more additions than both have;
 *     of products with f: below 4 u f total;
 *     of 6 sums, those of P and the one of E with the prior: none exceeds |P| + 3 f total, as a table's entry is off by no more than
 *     twice the magnitude of its group; 6 u |P| + 18 u f total.
 * So E <= P + reach[s] + 6 u |P|, reach[s] = f (share behind s) + (errors of 0 .. s) + tf_sum_error(K, total) f + 2^-19 f total; and
 * without any stream E <= prior + all + 6 u |prior|, all = f total + the same rounding. `needed` takes the last term off. */
void tf_search_prepare(const tf_scores_job *job, int state, tf_view *view, tf_search *search)
{
    const tf_model *model = job->engine->model;
    const tf_codes *codes = &model->codes;
    search->on = model->order.ids && job->engine->scoring->skip != TF_SKIP_NEVER && view->error != 0 && wants_the_best(job, state);
    search->done = search->wait = search->waits = 0;
    if (!search->on)
        return;
    float factor = tf_code_factor(codes->bits), total = tf_magnitudes(view->hidden, 0, codes->bits), behind = 0, errors = 0;
    float rounding = (tf_sum_error(codes->bits, total) + 0x1p-19f * total) * factor;
    search->all = total * factor + rounding;
    for (int s = codes->streams - 1; s >= 0; s--) {
        search->reach[s] = behind * factor + rounding;
        behind += tf_magnitudes(view->hidden, codes->from[s], codes->from[s + 1]);
    }
    for (int s = 0; s < codes->streams; s++) {
        tf_code_tables *part = &search->parts[s];
        model->backend->part_of_tables(view->hidden, codes->bits, &view->tables, codes->from[s], codes->from[s + 1], part);
        errors += part->error;
        search->reach[s] += errors;
    }
    view->error = fmaxf(view->error, search->reach[codes->streams - 1]);
}

/* What a sum P with `reach` above it must come to: below F - reach - 7e-7 (|F| + reach), F the score found, E < F. For P + 6 u |P|
 * grows with P, and at this limit |P| <= 1.000001 (|F| + reach), so that 6 u |P|, and 2 u (|F| + reach) by which the limit itself is
 * rounded, are less than what was taken off. */
static float needed(const tf_list *list, float reach)
{
    float found = atomic_load_explicit(list->reached, memory_order_relaxed);
    return isfinite(found) ? found - reach - 7e-7f * (fabsf(found) + reach) : -INFINITY;
}

int tf_search_ends(const tf_view *view, tf_search *search, const tf_list *list, int begin)
{
    const tf_order *order = &view->engine->model->order;
    search->done |= search->on && order->tops[begin / order->group] < needed(list, search->all);
    return search->done;
}

/* The first run of neighbouring blocks in `live`, taken out of it. */
static int next_run(unsigned *live, int *last)
{
    int first = __builtin_ctz(*live);
    *last = first;
    while (*live >> *last & 1)
        *live &= ~(1u << (*last)++);
    return first;
}

/* Reading jumps from block to block: all are asked for before the first is waited for. */
static void ask_for(const tf_codes *codes, int stream, int begin, unsigned live)
{
    size_t bytes = tf_codes_bytes(TF_IDS, tf_stream_bits(codes, stream));
    const char *form = (const char *)codes->form[stream] + (size_t)(begin / TF_IDS) * bytes;
    for (int block = 0; block < BLOCKS; block++)
        for (size_t at = 0; live >> block & 1 && at < bytes; at += 64)
            __builtin_prefetch(form + block * bytes + at);
}

static unsigned all_blocks(int count)
{
    return (1u << (count + TF_IDS - 1) / TF_IDS) - 1;
}

static int end_of(int count, int block)
{
    return block * TF_IDS < count ? block * TF_IDS : count;
}

static void add_stream(const tf_model *model, const tf_search *search, int stream, unsigned live, int begin, int count, float *scores)
{
    const float *before = stream ? scores : (const float *)model->parts[TF_PRIOR].memory + begin;
    if (stream)
        ask_for(&model->codes, stream, begin, live);
    while (live) {
        int last, first = next_run(&live, &last) * TF_IDS;
        model->backend->score_codes(&model->codes, stream, stream + 1, &search->parts[stream], before + first, begin + first,
                                    begin + end_of(count, last), scores + first);
    }
}

static int any_reaches(const float *scores, int count, float least)
{
    int found = 0;
    for (int i = 0; i < count; i++)
        found |= !(scores[i] < least);
    return found;
}

/* Those of the blocks that have a score of at least `least`. */
static unsigned still_live(unsigned live, int count, const float *scores, float least)
{
    unsigned left = 0;
    for (unsigned rest = live; rest; rest &= rest - 1) {
        int block = __builtin_ctz(rest), first = block * TF_IDS, end = end_of(count, block + 1);
        /* The length is written out where it can be, for a loop without a rest. */
        if (end - first == TF_IDS ? any_reaches(scores + first, TF_IDS, least) : any_reaches(scores + first, end - first, least))
            left |= 1u << block;
    }
    return left;
}

static void take_blocks(const tf_view *view, tf_list *list, unsigned live, int begin, int count, const float *scores)
{
    while (live) {
        int last, first = next_run(&live, &last) * TF_IDS, end = end_of(count, last);
        tf_take_scores(view, list, begin + first, begin + end, scores + first, tf_largest(scores + first, end - first));
    }
}

/* Where most had to be read after all, the next chunks are read as a whole, more of them each time. */
static void plan_wait(tf_search *search, int64_t read, int64_t whole)
{
    search->waits = 2 * read <= whole ? 0 : !search->waits ? 1 : search->waits < LONGEST_WAIT ? 2 * search->waits : LONGEST_WAIT;
    search->wait = search->waits;
}

int tf_search_chunk(const tf_view *view, tf_search *search, tf_list *list, int begin, int end, float *scores, tf_tally *tally)
{
    const tf_model *model = view->engine->model;
    int count = end - begin;
    unsigned live = all_blocks(count);
    int64_t read = 0, whole = (int64_t)__builtin_popcount(live) * model->codes.bits;
    if (search->wait > 0) {
        search->wait--;
        return 0;
    }
    for (int s = 0; live && s < model->codes.streams; s++) {
        add_stream(model, search, s, live, begin, count, scores);
        tally->read[s] |= live;
        read += (int64_t)__builtin_popcount(live) * tf_stream_bits(&model->codes, s);
        live = still_live(live, count, scores, needed(list, search->reach[s]));
    }
    take_blocks(view, list, live, begin, count, scores);
    if (view->engine->scoring->skip == TF_SKIP_AUTO)
        plan_wait(search, read, whole);
    return 1;
}

void tf_tally_whole(const tf_codes *codes, tf_tally *tally, int count)
{
    for (int s = 0; s < codes->streams; s++)
        tally->read[s] = all_blocks(count);
}

void tf_tally_chunk(const tf_codes *codes, tf_tally *tally)
{
    for (int s = 0; s < codes->streams; s++) {
        tally->bytes += (int64_t)__builtin_popcount(tally->read[s]) * (int64_t)tf_codes_bytes(TF_IDS, tf_stream_bits(codes, s));
        tally->read[s] = 0;
    }
}

void tf_engine_skip(tf_engine *engine, int skip)
{
    engine->scoring->skip = skip;
}

int64_t tf_engine_code_bytes(const tf_engine *engine)
{
    int64_t bytes = 0;
    for (int i = 0; i < engine->threads; i++)
        bytes += engine->scoring->tallies[i].bytes;
    return bytes;
}
