/* What peeled keys hold becomes elements: docs/wire-format.md, end of section 7. */
#include <stdlib.h>
#include <string.h>

#include "lhc_internal.h"

#define PREFETCH_AHEAD 24u /* keys whose elements are under way while another's are written */

lhc_status lhc_output_open(lhc_output *output, const lhc_layout *y, const lhc_header *header, uint32_t format) {
    const lhc_scale scale = {header->scale_kind, header->participants, y->plan.world_size, header->factor};
    const lhc_output fresh = {
        .layout = y,
        .high = lhc_rounding_of(&scale, format, y->unit_exponent + (int32_t)y->low_bits, 0),
        .both = lhc_rounding_of(&scale, format, y->unit_exponent, y->low_bits),
        .may_have_low_parts = y->plan.parts == 2 && header->inexact_single,
    };
    *output = fresh;
    output->keys = malloc((size_t)y->cell_count * sizeof *output->keys);
    output->values = malloc((size_t)(y->cell_count * y->plan.block) * sizeof *output->values);
    return output->keys && output->values ? LHC_OK : LHC_ERR_MEMORY;
}

void lhc_output_close(lhc_output *output) {
    free(output->keys);
    free(output->values);
}

/* Elements of a block; the last block may be short. */
static uint64_t size_of(const lhc_layout *y, uint64_t block_number) {
    const uint64_t block = y->plan.block, rest = y->plan.numel - block_number * block;
    return rest < block ? rest : block;
}

lhc_status lhc_output_put(lhc_output *output, uint64_t key, const int64_t *values) {
    const lhc_layout *y = output->layout;
    const uint64_t block = y->plan.block;
    const int is_low = key >= y->block_count;
    if (block > 1)
        for (uint64_t j = size_of(y, is_low ? key - y->block_count : key); j < block; j++)
            if (values[j]) return LHC_ERR_COUNT;
    if (output->count == y->cell_count) return LHC_ERR_UNPEELED; /* more keys than cells can't be told apart */
    int64_t *to = output->values + output->count * block;
    for (uint64_t j = 0; j < block; j++) to[j] = values[j];
    output->keys[output->count++] = key;
    if (!is_low) return LHC_OK;
    output->low_count++;
    return output->may_have_low_parts ? LHC_OK : LHC_ERR_COUNT; /* the header knows of no low parts */
}

/* Where a low part is in output->keys, plus 1, by open addressing in a table of a power of two; 0: free. */
static uint64_t *slot_of(const lhc_output *output, uint64_t *table, uint64_t mask, uint64_t number) {
    uint64_t at = lhc_mix(number) & mask;
    while (table[at] && output->keys[table[at] - 1] != output->layout->block_count + number) at = (at + 1) & mask;
    return table + at;
}

/* Makes a table of low parts that is to be looked up in. Every one of them must have a high part. */
static lhc_status index_low_parts(const lhc_output *output, uint64_t **table, uint64_t *mask) {
    const lhc_layout *y = output->layout;
    uint64_t size = 4, joined = 0;
    while (size < 4 * output->low_count) size *= 2;
    *mask = size - 1;
    *table = calloc((size_t)size, sizeof **table);
    if (!*table) return LHC_ERR_MEMORY;
    for (uint64_t i = 0; i < output->count; i++)
        if (output->keys[i] >= y->block_count) *slot_of(output, *table, *mask, output->keys[i] - y->block_count) = i + 1;
    for (uint64_t i = 0; i < output->count; i++)
        joined += output->keys[i] < y->block_count && *slot_of(output, *table, *mask, output->keys[i]);
    return joined == output->low_count ? LHC_OK : LHC_ERR_COUNT;
}

static void write_block(const lhc_output *output, uint64_t i, const int64_t *low, float *to) {
    const uint64_t size = size_of(output->layout, output->keys[i]);
    const int64_t *high = output->values + i * output->layout->plan.block;
    if (!low) {
        lhc_round_many(&output->high, high, size, to);
        return;
    }
    for (uint64_t j = 0; j < size; j++)
        to[j] = low[j] ? lhc_round_once(&output->both, high[j], low[j]) : lhc_round_once(&output->high, 0, high[j]);
}

lhc_status lhc_output_write(const lhc_output *output, float *y) {
    const lhc_layout *layout = output->layout;
    const uint64_t block = layout->plan.block;
    uint64_t *table = NULL, mask = 0;
    if (output->low_count) {
        const lhc_status status = index_low_parts(output, &table, &mask);
        if (status) {
            free(table);
            return status;
        }
    }
    for (uint64_t i = 0; i < output->count; i++) {
        if (i + PREFETCH_AHEAD < output->count) {
            const uint64_t next = output->keys[i + PREFETCH_AHEAD];
            if (next < layout->block_count) LHC_PREFETCH_TO_WRITE(y + next * block);
        }
        if (output->keys[i] >= layout->block_count) continue;
        const uint64_t low = table ? *slot_of(output, table, mask, output->keys[i]) : 0;
        write_block(output, i, low ? output->values + (low - 1) * block : NULL, y + output->keys[i] * block);
    }
    free(table);
    return LHC_OK;
}
