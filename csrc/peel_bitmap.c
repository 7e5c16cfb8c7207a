/* Peeling a table beside a bitmap: the digits tell which keys are there, so cells hold nothing but values. */
#include <stdlib.h>

#include "lhc_internal.h"

typedef struct {
    uint32_t *degree;   /* union keys in a cell that are not peeled yet */
    uint32_t *ordinals; /* exclusive or of their ordinals in keys */
    uint64_t *keys;     /* the union, ascending */
    uint32_t *stack;
    uint64_t count;
} bitmap_peeler;

/* Reads the digits into peeler->keys. More keys than cells can't be peeled. */
static lhc_status read_digits(const lhc_layout *y, const double *digits, const lhc_header *header,
                              bitmap_peeler *peeler) {
    const lhc_scale scale = {header->scale_kind, header->participants, y->plan.world_size, header->factor};
    const uint64_t base = (uint64_t)y->plan.world_size + 1;
    uint64_t total = 0;
    for (uint64_t i = 0; i < y->bitmap_size; i++) {
        int64_t packed;
        const lhc_status status = lhc_unscale(&scale, digits[i], &packed);
        if (status) return status;
        if (!packed) continue;
        if (packed < 0) return LHC_ERR_COUNT;
        const uint64_t end = (i + 1) * y->digits_per_cell < y->key_count ? (i + 1) * y->digits_per_cell : y->key_count;
        uint64_t rest = (uint64_t)packed;
        for (uint64_t key = i * y->digits_per_cell; rest; key++, rest /= base) {
            const uint64_t digit = rest % base;
            if (!digit) continue;
            if (key >= end || digit > header->participants) return LHC_ERR_COUNT;
            if (peeler->count == y->cell_count) return LHC_ERR_UNPEELED;
            peeler->keys[peeler->count++] = key;
            total += digit;
        }
    }
    return total == header->nonzero_keys ? LHC_OK : LHC_ERR_COUNT;
}

static void count_degrees(const lhc_layout *y, bitmap_peeler *peeler) {
    for (uint64_t i = 0; i < peeler->count; i++) {
        uint64_t cell[3];
        lhc_cells_of(y, lhc_place_of(y, peeler->keys[i]), cell);
        for (int role = 0; role < 3; role++) {
            peeler->degree[cell[role]]++;
            peeler->ordinals[cell[role]] ^= (uint32_t)i;
        }
    }
}

static lhc_status peel(const lhc_table *table, bitmap_peeler *peeler, lhc_output *output) {
    const lhc_layout *y = table->layout;
    uint64_t left = peeler->count;
    for (uint64_t start = 0; start < y->cell_count; start++) {
        uint64_t top = 0;
        peeler->stack[top++] = (uint32_t)start;
        while (top) {
            const uint64_t at = peeler->stack[--top];
            if (peeler->degree[at] != 1) continue;
            const uint32_t ordinal = peeler->ordinals[at];
            uint64_t cell[3];
            lhc_cells_of(y, lhc_place_of(y, peeler->keys[ordinal]), cell);
            const lhc_status status = lhc_table_take_values(table, peeler->keys[ordinal], cell, at, output);
            if (status) return status;
            left--;
            for (int role = 0; role < 3; role++) {
                peeler->degree[cell[role]]--;
                peeler->ordinals[cell[role]] ^= ordinal;
                if (cell[role] != at) peeler->stack[top++] = (uint32_t)cell[role];
            }
        }
    }
    if (left) return LHC_ERR_UNPEELED;
    return lhc_table_check_empty(table);
}

lhc_status lhc_peel_bitmap(const lhc_table *table, const double *digits, const lhc_header *header, lhc_output *output,
                           uint64_t *union_keys) {
    const uint64_t cells = table->layout->cell_count;
    if (cells >= UINT32_MAX) return LHC_ERR_MEMORY; /* capacity is below 2^31, so the table is far smaller */
    bitmap_peeler peeler = {
        .degree = calloc((size_t)cells, sizeof *peeler.degree),
        .ordinals = calloc((size_t)cells, sizeof *peeler.ordinals),
        .keys = malloc((size_t)cells * sizeof *peeler.keys),
        .stack = malloc((size_t)(cells + 2) * sizeof *peeler.stack),
    };
    lhc_status status = LHC_ERR_MEMORY;
    if (peeler.degree && peeler.ordinals && peeler.keys && peeler.stack) {
        status = read_digits(table->layout, digits, header, &peeler);
        if (!status) {
            count_degrees(table->layout, &peeler);
            status = peel(table, &peeler, output);
        }
    }
    *union_keys = peeler.count;
    free(peeler.degree);
    free(peeler.ordinals);
    free(peeler.keys);
    free(peeler.stack);
    return status;
}
