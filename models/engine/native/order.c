/* Where codes lie. A head of codes with a prior has them by prior, the likeliest ids first, and cut into streams (kernels.h), so that
 * greedy and top-k choices can do without most of them (search.c). All others have them by id, in one stream. */
#include "model.h"

#include <math.h>
#include <string.h>

enum { MOST_GROUPS = 256, BINS = 1 << 16 };

/* The upper half of a float's bits, counted so that larger floats have lower numbers: a relative step of 2^-7. */
static int bin_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (int)((bits >> 31 ? bits : ~bits & 0x7fffffff) >> 16);
}

/* Gives each id its group: by the bin of its prior, within a bin as they come. `starts` [BINS] is for counting. */
static void group_ids(tf_order *order, const float *prior, int count, int32_t *starts)
{
    int before = 0;
    memset(starts, 0, BINS * sizeof *starts);
    for (int id = 0; id < count; id++)
        starts[bin_of(prior[id])]++;
    for (int bin = 0; bin < BINS; bin++) {
        int own = starts[bin];
        starts[bin] = before;
        before += own;
    }
    for (int id = 0; id < count; id++)
        order->groups[id] = (uint8_t)(starts[bin_of(prior[id])]++ / order->group);
}

/* Ids of a group in their own order, and their prior with them. `by_id`: a copy of the prior as it came. */
static void place_ids(tf_order *order, float *prior, const float *by_id, int count)
{
    int next[MOST_GROUPS];
    for (int group = 0; group < MOST_GROUPS; group++)
        next[group] = group * order->group;
    for (int id = 0; id < count; id++) {
        int place = next[order->groups[id]]++;
        order->ids[place] = id;
        prior[place] = by_id[id];
    }
}

/* Of each group the largest prior in it and behind it. */
static void find_tops(tf_order *order, const float *prior, int count)
{
    float top = -INFINITY;
    for (int place = count - 1; place >= 0; place--) {
        top = prior[place] > top ? prior[place] : top;
        order->tops[place / order->group] = top;
    }
}

static int is_flat(const float *prior, int count)
{
    for (int id = 1; id < count; id++)
        if (prior[id] != prior[0])
            return 0;
    return 1;
}

static int order_ids(tf_model *model)
{
    int count = model->c.vocabulary, chunks = (count + TF_SCORED - 1) / TF_SCORED;
    float *prior = model->parts[TF_PRIOR].memory;
    tf_order *order = &model->order;
    int32_t *starts = tf_alloc(BINS * sizeof *starts);
    float *by_id = tf_alloc(tf_times(count, sizeof *by_id));
    order->group = (chunks + MOST_GROUPS - 1) / MOST_GROUPS * TF_SCORED;
    order->groups = tf_arena_take(&model->arena, count);
    order->tops = tf_arena_take(&model->arena, MOST_GROUPS * sizeof *order->tops);
    order->ids = tf_arena_take(&model->arena, tf_times(count, sizeof *order->ids));
    int complete = starts && by_id && order->groups && order->tops && order->ids;
    if (complete) {
        memcpy(by_id, prior, count * sizeof *prior);
        group_ids(order, by_id, count, starts);
        place_ids(order, prior, by_id, count);
        find_tops(order, prior, count);
    }
    tf_free(starts);
    tf_free(by_id);
    return complete ? TF_OK : tf_fail(TF_NO_MEMORY, "no memory for the order of %d ids", count);
}

/* At an eighth, a quarter, a half and three quarters of the bits, in whole bytes. With 512 random bits and a head and prior like
 * trained ones (bench/generation/make.py) choices read 15 % of the codes; cut at a quarter and a half only 20 %, cut at seven bits
 * 13 %. */
static void cut_streams(tf_codes *codes)
{
    static const int eighths[] = {1, 2, 4, 6};
    for (size_t i = 0; i < sizeof eighths / sizeof *eighths; i++) {
        int bit = codes->bits * eighths[i] / 64 * 8;
        if (bit > codes->from[codes->streams - 1])
            codes->from[codes->streams++] = bit;
    }
}

int tf_lay_out_codes(tf_model *model)
{
    const tf_config *c = &model->c;
    const tf_part *prior = &model->parts[TF_PRIOR];
    tf_codes *codes = &model->codes;
    *codes = (tf_codes){.bits = c->code_bits, .streams = 1};
    if (c->head == TF_HEAD_CODE && c->prior) {
        if (!prior->rows || prior->loaded != prior->rows)
            return tf_fail(TF_INVALID, "the prior must come before the codes");
        if (!is_flat(prior->memory, c->vocabulary)) {
            cut_streams(codes);
            if (order_ids(model))
                return TF_NO_MEMORY;
        }
    }
    codes->from[codes->streams] = c->code_bits;
    for (int s = 0; s < codes->streams; s++) {
        size_t bytes = model->backend->codes_bytes(c->vocabulary, codes->from[s + 1] - codes->from[s]);
        codes->form[s] = tf_arena_take(&model->arena, bytes);
        if (!codes->form[s])
            return tf_fail(TF_NO_MEMORY, "no memory for %d codes of %d bits", c->vocabulary, c->code_bits);
    }
    return TF_OK;
}

int tf_place(const tf_model *model, int id)
{
    const tf_order *order = &model->order;
    if (!order->ids)
        return id;
    int low = order->groups[id] * order->group, high = low + order->group - 1;
    if (high >= model->c.vocabulary)
        high = model->c.vocabulary - 1;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (order->ids[middle] < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void tf_take_codes(const tf_model *model, int first, int count, const uint32_t *words)
{
    int row = (model->c.code_bits + 31) / 32;
    if (!model->order.ids) {
        model->backend->form_codes(&model->codes, first, count, words);
        return;
    }
    for (int i = 0; i < count; i++)
        model->backend->form_codes(&model->codes, tf_place(model, first + i), 1, words + (size_t)i * row);
}
