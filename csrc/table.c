/* The table of a reduced wire, held as integers while it is peeled. */
#include <stdlib.h>
#include <string.h>

#include "batch.h"

lhc_status lhc_table_load(lhc_table *table, const double *cells, const lhc_scale *scale) {
    const lhc_layout *y = table->layout;
    const uint64_t size = y->cell_count * y->cell_stride;
    table->cells = malloc((size_t)size * sizeof *table->cells);
    if (!table->cells) return LHC_ERR_MEMORY;
    const double factor = scale->kind == LHC_SCALE_AVERAGE ? (double)scale->world_size : 1;
    if (scale->kind != LHC_SCALE_OTHER && !lhc_isa_in_use()->load(cells, size, factor, table->cells)) return LHC_OK;
    /* one by one, where a number is large or isn't what it should be */
    for (uint64_t i = 0; i < size; i++) {
        const lhc_status status = lhc_unscale(scale, cells[i], &table->cells[i]);
        if (status) return status;
    }
    return LHC_OK;
}

lhc_status lhc_table_check_parity(const lhc_table *table) {
    const lhc_layout *y = table->layout;
    const uint64_t block = y->plan.block, segment = (uint64_t)1 << y->segment_bits;
    uint64_t *sums = calloc((size_t)(3 * block), sizeof *sums); /* modulo 2^64 */
    if (!sums) return LHC_ERR_MEMORY;
    for (uint64_t g = 0; g < y->segments + 2; g++) {
        uint64_t *sum = sums + (g % 3) * block;
        for (uint64_t i = g * segment; i < (g + 1) * segment; i++) {
            const int64_t *values = table->cells + i * y->cell_stride + y->index_lanes;
            for (uint64_t j = 0; j < block; j++) sum[j] += (uint64_t)values[j];
        }
    }
    const int equal = !memcmp(sums, sums + block, (size_t)block * sizeof *sums) &&
                      !memcmp(sums, sums + 2 * block, (size_t)block * sizeof *sums);
    free(sums);
    return equal ? LHC_OK : LHC_ERR_PARITY;
}

lhc_status lhc_table_check_empty(const lhc_table *table) {
    const uint64_t size = table->layout->cell_count * table->layout->cell_stride;
    int64_t any = 0;
    for (uint64_t i = 0; i < size; i++) any |= table->cells[i];
    return any ? LHC_ERR_UNPEELED : LHC_OK;
}

/* Wraps like the sums of the reduction would: a wire is untrusted, and signed overflow is undefined. */
static void subtract(int64_t *from, int64_t value) { *from = (int64_t)((uint64_t)*from - (uint64_t)value); }

/* Gives the values in cell number `from` to the output, and removes them from the key's three cells. */
lhc_status lhc_table_take_values(const lhc_table *table, uint64_t key, const uint64_t cell[3], uint64_t from,
                                 lhc_output *output) {
    const lhc_layout *y = table->layout;
    const uint64_t block = y->plan.block;
    int64_t *source = table->cells + from * y->cell_stride + y->index_lanes;

    const int64_t bound = (int64_t)y->plan.world_size << y->value_bits;
    for (uint64_t j = 0; j < block; j++)
        if (source[j] > bound || source[j] < -bound) return LHC_ERR_COUNT;
    const lhc_status status = lhc_output_put(output, key, source);
    if (status) return status;
    for (uint64_t role = 0; role < 3; role++) {
        if (cell[role] == from) continue;
        int64_t *values = table->cells + cell[role] * y->cell_stride + y->index_lanes;
        for (uint64_t j = 0; j < block; j++) subtract(&values[j], source[j]);
    }
    memset(source, 0, (size_t)block * sizeof *source);
    return LHC_OK;
}
