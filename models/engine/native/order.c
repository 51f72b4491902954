/* Where codes lie. A head of codes with a prior has them by prior, the likeliest ids first, and cut into streams (kernels.h), so that
 * greedy and top-k choices can do without most of them (search.c). All others have them by id, in one stream. */
#include "model.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_GROUPS = 256 };

typedef struct {
    float value;
    int32_t id;
} ranked;

static int by_value(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    return x->value != y->value ? (x->value < y->value ? 1 : -1) : x->id < y->id ? -1 : 1;
}

static void take_group(tf_order *order, const ranked *items, int count)
{
    for (int rank = 0; rank < count; rank++) {
        int group = rank / order->group;
        order->groups[items[rank].id] = (uint8_t)group;
        if (rank % order->group == 0)
            order->tops[group] = items[rank].value;
    }
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
    ranked *items = tf_alloc(tf_times(count, sizeof *items));
    order->group = (chunks + MOST_GROUPS - 1) / MOST_GROUPS * TF_SCORED;
    order->groups = tf_arena_take(&model->arena, count);
    order->tops = tf_arena_take(&model->arena, MOST_GROUPS * sizeof *order->tops);
    order->ids = tf_arena_take(&model->arena, tf_times(count, sizeof *order->ids));
    if (!items || !order->groups || !order->tops || !order->ids) {
        tf_free(items);
        return tf_fail(TF_NO_MEMORY, "no memory for the order of %d ids", count);
    }
    for (int id = 0; id < count; id++)
        items[id] = (ranked){prior[id], id};
    qsort(items, count, sizeof *items, by_value);
    take_group(order, items, count);
    float *by_id = memcpy(items, prior, count * sizeof *prior);
    place_ids(order, prior, by_id, count);
    tf_free(items);
    return TF_OK;
}

/* An eighth, a quarter, a half and three quarters of the bits, in whole bytes: measured, see docs/tfree.md. */
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
    for (int i = 0; i < count; i++)
        model->backend->form_codes(&model->codes, tf_place(model, first + i), 1, words + (size_t)i * row);
}
