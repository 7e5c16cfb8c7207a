/* What peeled keys hold becomes elements: docs/wire-format.md, end of section 7. */
#include <stdlib.h>
#include <string.h>

#include "lhc_internal.h"

lhc_status lhc_output_open(lhc_output *output, const lhc_layout *y, const lhc_header *header, uint32_t format, float *out) {
    const lhc_scale scale = {header->scale_kind, header->participants, y->plan.world_size, header->factor};
    const lhc_output fresh = {
        .layout = y,
        .high = lhc_rounding_of(&scale, format, y->unit_exponent + (int32_t)y->low_bits, 0),
        .both = lhc_rounding_of(&scale, format, y->unit_exponent, y->low_bits),
        .y = out,
    };
    *output = fresh;
    if (y->plan.parts == 1 || !header->inexact_single) return LHC_OK;
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
    const uint64_t number = is_low ? key - y->block_count : key, size = size_of(y, number);
    for (uint64_t j = size; j < block; j++)
        if (values[j]) return LHC_ERR_COUNT;
    if (output->keys) {
        if (output->count == y->cell_count) return LHC_ERR_UNPEELED; /* more keys than cells can't be told apart */
        memcpy(output->values + output->count * block, values, (size_t)block * sizeof *values);
        output->keys[output->count++] = key;
    }
    if (is_low) {
        output->low_count++;
        return output->keys ? LHC_OK : LHC_ERR_COUNT; /* the header knows of no low parts */
    }
    float *out = output->y + number * block;
    for (uint64_t j = 0; j < size; j++) out[j] = lhc_round_once(&output->high, 0, values[j]);
    return LHC_OK;
}

/* Where a low part is in output->keys, plus 1, by open addressing in a table of a power of two; 0: free. */
static uint64_t *slot_of(const lhc_output *output, uint64_t *table, uint64_t mask, uint64_t number) {
    uint64_t at = lhc_mix(number) & mask;
    while (table[at] && output->keys[table[at] - 1] != output->layout->block_count + number) at = (at + 1) & mask;
    return table + at;
}

static void round_both(const lhc_output *output, uint64_t number, const int64_t *high, const int64_t *low) {
    const uint64_t size = size_of(output->layout, number);
    float *out = output->y + number * output->layout->plan.block;
    for (uint64_t j = 0; j < size; j++)
        if (low[j]) out[j] = lhc_round_once(&output->both, high[j], low[j]);
}

lhc_status lhc_output_join_parts(lhc_output *output) {
    const lhc_layout *y = output->layout;
    const uint64_t block = y->plan.block;
    if (!output->low_count) return LHC_OK;
    uint64_t size = 4;
    while (size < 4 * output->low_count) size *= 2;
    uint64_t *table = calloc((size_t)size, sizeof *table), joined = 0;
    if (!table) return LHC_ERR_MEMORY;
    for (uint64_t i = 0; i < output->count; i++)
        if (output->keys[i] >= y->block_count) *slot_of(output, table, size - 1, output->keys[i] - y->block_count) = i + 1;
    for (uint64_t i = 0; i < output->count; i++) {
        if (output->keys[i] >= y->block_count) continue;
        const uint64_t low = *slot_of(output, table, size - 1, output->keys[i]);
        if (!low) continue;
        joined++;
        round_both(output, output->keys[i], output->values + i * block, output->values + (low - 1) * block);
    }
    free(table);
    return joined == output->low_count ? LHC_OK : LHC_ERR_COUNT; /* who has a low part has a high one */
}
