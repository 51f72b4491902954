/* Draws by the rule, and with the noise, of kernels/code_loss/sampling.py: the same scores, seed and position give the same token.
 *
 * The noise of a token is a hash of (seed, position, id). Its logarithms would cost more than the rest of a token, so a bound from
 * the hash's leading bits passes over all tokens that cannot win, which is nearly all of them. */
#include "scoring.h"

#include <math.h>
#include <string.h>

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u, FIRST = 0xBF58476D1CE4E5B9u, SECOND = 0x94D049BB133111EBu;
static const double UNIT = 1099511627776.0; /* 2^40 units of probability */
static const double LEAST_GAP = -28.5;      /* e^-28.5 is less than half a unit: no probability */

static uint64_t mix(uint64_t bits)
{
    bits = (bits ^ bits >> 30) * FIRST;
    bits = (bits ^ bits >> 27) * SECOND;
    return bits ^ bits >> 31;
}

static uint64_t stream_of(const tf_draw *draw)
{
    return mix(((uint64_t)draw->position + 1) * GOLDEN + mix((uint64_t)draw->seed + GOLDEN));
}

static uint64_t noise_bits(uint64_t stream, int id)
{
    return mix(stream + ((uint64_t)id + 1) * GOLDEN) >> 12;
}

static double gumbel(uint64_t bits)
{
    return -log(-log(((double)bits + 0.5) / 4503599627370496.0));
}

/* (score - top) / temperature; what is not a number counts as never. */
static double gap(float score, float top, double temperature)
{
    double found = ((double)score - (double)top) / temperature;
    return found != found ? -INFINITY : found == INFINITY ? 0 : found;
}

static uint64_t mass(double gap)
{
    return (uint64_t)nearbyint(exp(gap) * UNIT);
}

static uint64_t wanted(uint64_t total, double top_p)
{
    double most = ceil((double)total * top_p);
    return most < 1 ? 1 : (uint64_t)most;
}

int32_t tf_draw_from_list(const tf_draw *draw, const tf_choice *list, int count)
{
    uint64_t total = 0, before = 0, stream = stream_of(draw);
    float top = list[0].score;
    if (!isfinite(top))
        return list[0].id;
    for (int i = 0; i < count; i++)
        total += mass(gap(list[i].score, top, draw->temperature));
    uint64_t reach = wanted(total, draw->top_p);
    double best = -INFINITY;
    int32_t drawn = list[0].id;
    for (int i = 0; i < count; i++) {
        double g = gap(list[i].score, top, draw->temperature), noisy = g + gumbel(noise_bits(stream, list[i].id));
        int kept = (before < reach || draw->top_p == 1) && exp(g) >= draw->min_p;
        before += mass(g);
        if (kept && noisy > best) {
            best = noisy;
            drawn = list[i].id;
        }
    }
    return drawn;
}

/* The score's bits in the order of the scores. */
static uint32_t ordered(float score)
{
    uint32_t bits;
    score = tf_key(score) + 0.0f; /* -0 is 0 */
    memcpy(&bits, &score, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The highest bin at which `above` plus the sum from the top reaches `reach`; `above` becomes the mass above it. */
static uint32_t descend(const uint64_t *bins, uint64_t *above, uint64_t reach)
{
    for (uint32_t bin = 65535;; bin--) {
        if (*above + bins[bin] >= reach || bin == 0)
            return bin;
        *above += bins[bin];
    }
}

/* How many scores have these bits and an id up to `most`. */
static int count_at(const tf_model *model, const float *scores, uint32_t bits, int most)
{
    int count = 0;
    for (int place = 0; place < model->c.vocabulary; place++)
        count += ordered(scores[place]) == bits && tf_id(model, place) <= most;
    return count;
}

/* The lowest id up to which `wanted` scores have these bits, or the last id. Equal scores are rare: one pass tells mostly. */
static int32_t cut_among_equals(const tf_model *model, const float *scores, uint32_t bits, uint64_t wanted)
{
    int low = 0, high = model->c.vocabulary - 1;
    if ((uint64_t)count_at(model, scores, bits, high) <= wanted)
        return high;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if ((uint64_t)count_at(model, scores, bits, middle) < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static float score_of(uint32_t bits)
{
    float score;
    bits = bits >> 31 ? bits & 0x7fffffff : ~bits;
    memcpy(&score, &bits, 4);
    return score;
}

/* Where top-p cuts: two passes over the scores, for the upper and the lower 16 bits of the threshold, and one for the last id kept
 * at it. */
static void find_cut(struct tf_scoring *s, const tf_model *model, const float *scores, float top, const tf_draw *draw)
{
    uint64_t total = 0, above = 0, reach = 0;
    uint32_t high = 0, low = 0;
    for (int pass = 0; pass < 2; pass++) {
        memset(s->bins, 0, 65536 * sizeof *s->bins);
        for (int place = 0; place < model->c.vocabulary; place++) {
            uint32_t bits = ordered(scores[place]);
            double g = gap(scores[place], top, draw->temperature);
            if (g < LEAST_GAP || (pass && bits >> 16 != high))
                continue;
            uint64_t m = mass(g);
            s->bins[pass ? bits & 65535 : bits >> 16] += m;
            total += pass ? 0 : m;
        }
        reach = wanted(total, draw->top_p);
        *(pass ? &low : &high) = descend(s->bins, &above, reach);
    }
    s->cut_bits = high << 16 | low;
    s->cut_id = -1;
    if (above < reach) {
        uint64_t each = mass(gap(score_of(s->cut_bits), top, draw->temperature));
        s->cut_id = cut_among_equals(model, scores, s->cut_bits, each ? (reach - above + each - 1) / each : UINT64_MAX);
    }
}

static int kept(const struct tf_scoring *s, const tf_draw *draw, float score, int id, double g)
{
    if (draw->min_p > 0 && exp(g) < draw->min_p)
        return 0;
    if (draw->top_p == 1)
        return 1;
    uint32_t bits = ordered(score);
    return bits > s->cut_bits || (bits == s->cut_bits && id <= s->cut_id);
}

/* noise <= bound[leading zeros of 1 - uniform]: -log(-log u) <= -log(1 - u), and 1 - u >= 2^(11 - zeros). */
static double bound_of(uint64_t bits)
{
    uint64_t rest = ~bits << 12 >> 12; /* (1 - u) * 2^52, less a half */
    return ((rest ? __builtin_clzll(rest) : 64) - 11) * 0.6931471805599454;
}

/* The winner among a thread's places; the lowest id of several, which need not come first. */
static void noisy_best(const tf_scores_job *job, int state, int thread, const float *scores, float top)
{
    struct tf_scoring *s = job->engine->scoring;
    const tf_draw *draw = &job->draws[state];
    const tf_view *view = &s->views[(size_t)thread * TF_STATES + state];
    uint64_t stream = stream_of(draw);
    double best = -INFINITY, inverse = 1 / draw->temperature, margin = (double)tf_fine_margin(view, top) - top;
    int32_t drawn = -1;
    int begin, end;
    tf_my_places(job->engine, thread, &begin, &end);
    for (int place = begin; place < end; place++) {
        int id = tf_id(job->engine->model, place);
        uint64_t bits = noise_bits(stream, id);
        if ((scores[place] + margin) * inverse + bound_of(bits) < best - 1e-6)
            continue;
        float score = tf_exact(view, place, scores[place]);
        double g = gap(score, top, draw->temperature), noisy = g + gumbel(bits);
        if ((noisy > best || (noisy == best && id < drawn)) && kept(s, draw, scores[place], id, g)) {
            best = noisy;
            drawn = id;
        }
    }
    s->noisy[thread] = best;
    s->noisy_id[thread] = drawn;
}

void tf_draw_from_all(const tf_scores_job *job, int state, int thread)
{
    tf_engine *engine = job->engine;
    struct tf_scoring *s = engine->scoring;
    const tf_draw *draw = &job->draws[state];
    int vocabulary = engine->model->c.vocabulary;
    const float *scores = s->stored + (size_t)state * vocabulary, top = s->best[state][0].score;
    if (isfinite(top) && draw->top_p < 1) {
        tf_make_likely_exact(job, state, thread, draw->temperature);
        if (thread == 0)
            find_cut(s, engine->model, scores, top, draw);
        tf_pool_meet(engine->pool);
    }
    if (isfinite(top))
        noisy_best(job, state, thread, scores, top);
    tf_pool_meet(engine->pool);
    if (thread == 0) {
        double best = -INFINITY;
        job->drawn[state] = s->best[state][0].id;
        for (int t = 0; isfinite(top) && t < engine->threads; t++)
            if (s->noisy_id[t] >= 0 && (s->noisy[t] > best || (s->noisy[t] == best && s->noisy_id[t] < job->drawn[state]))) {
                best = s->noisy[t];
                job->drawn[state] = s->noisy_id[t];
            }
    }
    tf_pool_meet(engine->pool);
}
