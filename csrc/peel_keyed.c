/* Peeling a keyed table: the cells themselves tell which key is alone in them. */
#include <stdlib.h>

#include "lhc_internal.h"

typedef struct {
    uint64_t key, count, id;
    uint64_t cell[3];
    uint64_t role;
} pure_key;

/* Is this cell pure, and if so whose is it? docs/wire-format.md, section 7, step 5. */
static int read_pure(const lhc_layout *y, const int64_t *cell, uint64_t at, uint64_t ranks, pure_key *found) {
    if (cell[0] <= 0) return 0;
    const uint64_t lane = (uint64_t)cell[0], count_mask = ((uint64_t)1 << y->count_bits) - 1;
    const uint64_t sum_mask = ((uint64_t)1 << (y->count_bits + y->r_bits)) - 1;
    const uint64_t count = lane & count_mask;
    uint64_t sum = lane >> y->count_bits, squares;
    if (y->index_lanes == 1) {
        squares = sum >> (y->count_bits + y->r_bits);
        sum &= sum_mask;
    } else {
        if (cell[1] < 0) return 0;
        squares = (uint64_t)cell[1];
    }
    if (count < 1 || count > ranks) return 0;
    const uint64_t r = sum / count;
    if (r >= 3 * y->id_count || r * count != sum || r * r * count != squares) return 0;

    const uint64_t segment = at >> y->segment_bits, mask = ((uint64_t)1 << y->segment_bits) - 1;
    found->role = r % 3;
    found->id = r / 3;
    found->count = count;
    if (segment < found->role || segment - found->role >= y->segments) return 0;
    lhc_place place = {segment - found->role, 0, found->id};
    uint64_t shift[3];
    lhc_shifts(y, place.segment, place.id, shift);
    place.offset = ((at & mask) - shift[found->role]) & mask;
    for (uint64_t role = 0; role < 3; role++)
        found->cell[role] = ((place.segment + role) << y->segment_bits) + ((place.offset + shift[role]) & mask);
    if (((place.id * y->segments + place.segment) << y->segment_bits) >> y->key_bits) return 0; /* beyond pi's domain */
    found->key = lhc_key_at(y, place);
    return found->key < y->key_count;
}

static void remove_index(const lhc_table *table, const pure_key *found) {
    const lhc_layout *y = table->layout;
    for (uint64_t role = 0; role < 3; role++) {
        uint64_t *cell = (uint64_t *)(table->cells + found->cell[role] * y->cell_stride);
        const uint64_t r = 3 * found->id + role;
        uint64_t lane = 1 + (r << y->count_bits);
        if (y->index_lanes == 1)
            lane += (r * r) << (2 * y->count_bits + y->r_bits);
        else
            cell[1] -= found->count * r * r;
        cell[0] -= found->count * lane;
    }
}

lhc_status lhc_peel_keyed(const lhc_table *table, const lhc_header *header, lhc_output *output, uint64_t *union_keys) {
    const lhc_layout *y = table->layout;
    const uint64_t cells = y->cell_count;
    /* A peeled cell puts two others on the stack; more keys than cells can't be told apart. */
    uint64_t *stack = malloc((size_t)(cells + 2) * sizeof *stack);
    if (!stack) return LHC_ERR_MEMORY;
    lhc_status status = LHC_OK;
    uint64_t found_keys = 0, found_count = 0;

    for (uint64_t start = 0; start < cells && !status; start++) {
        uint64_t top = 0;
        stack[top++] = start;
        while (top) {
            pure_key found;
            const uint64_t at = stack[--top];
            if (!read_pure(y, table->cells + at * y->cell_stride, at, header->participants, &found)) continue;
            if (found_keys == cells) {
                status = LHC_ERR_UNPEELED;
                break;
            }
            found_keys++;
            found_count += found.count;
            status = lhc_table_take_values(table, found.key, found.cell, at, output);
            if (status) break;
            remove_index(table, &found);
            for (uint64_t role = 0; role < 3; role++)
                if (role != found.role) stack[top++] = found.cell[role];
        }
    }
    free(stack);
    *union_keys = found_keys;
    if (status) return status;
    status = lhc_table_check_empty(table);
    if (status) return status;
    return found_count == header->nonzero_keys ? LHC_OK : LHC_ERR_COUNT;
}
