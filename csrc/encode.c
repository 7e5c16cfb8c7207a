/* Encoding one rank's gradient: docs/wire-format.md, section 4. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"

typedef struct {
    const lhc_layout *layout;
    const lhc_isa *isa;
    const float *x;
    double *digits;     /* bitmap */
    double *cells;
    double *powers;     /* bitmap: (N + 1) ^ j */
    double *high, *low; /* the parts of one block */
    lhc_elements *elements;
    lhc_keys *keys;
    lhc_tally tally;
    lhc_units units;
    uint64_t inserted;
    uint64_t probe_end; /* first element after the last probe block that was counted */
    double high_unit;   /* in units of the low part */
    uint32_t zero_signs;
} encoder;

/* Splits a value into its parts; with one part, high is the value. */
static void split(const encoder *e, double v, double *high, double *low) {
    *high = (double)(int64_t)(v / e->high_unit);
    *low = v - *high * e->high_unit;
}

static void count_probe_blocks(encoder *e) {
    const uint64_t block = e->layout->plan.probe_block;
    for (uint64_t k = 0; k < e->elements->count; k++) {
        if (e->elements->at[k] < e->probe_end) continue;
        e->tally.probe_blocks++;
        e->probe_end = block == 1 ? e->elements->at[k] + 1 : (e->elements->at[k] / block + 1) * block;
    }
}

/* Counts one more key; is there room for it? */
static int take_room(encoder *e) {
    e->tally.nonzero_keys++;
    if (e->layout->plan.index == LHC_INDEX_NONE || e->inserted == e->layout->plan.capacity) return 0;
    e->inserted++;
    return 1;
}

static void set_digit(const encoder *e, uint64_t key) {
    const uint64_t digits = e->layout->digits_per_cell;
    e->digits[key / digits] += e->powers[key % digits];
}

/* Adds the index lanes of key k to one of its cells and returns where its values go. */
static double *add_index(const encoder *e, uint64_t role, uint64_t k) {
    const lhc_layout *y = e->layout;
    double *cell = e->cells + e->keys->cell[role][k] * y->cell_stride;
    for (uint64_t lane = 0; lane < y->index_lanes; lane++) cell[lane] += e->keys->lane[lane][role][k];
    return cell + y->index_lanes;
}

static void prefetch_cells(const encoder *e) {
    for (uint64_t role = 0; role < 3; role++)
        for (uint64_t k = 0; k < e->keys->count; k++)
            LHC_PREFETCH_TO_WRITE(e->cells + e->keys->cell[role][k] * e->layout->cell_stride);
}

/* Inserts keys that have one value each. */
static void insert_keys(encoder *e) {
    const lhc_layout *y = e->layout;
    const uint64_t count = e->keys->count;
    if (!count) return;
    if (y->plan.index == LHC_INDEX_BITMAP)
        for (uint64_t k = 0; k < count; k++) set_digit(e, e->keys->key[k]);
    e->isa->place(y, e->keys);
    prefetch_cells(e);
    for (uint64_t k = 0; k < count; k++)
        for (uint64_t role = 0; role < 3; role++) *add_index(e, role, k) += e->keys->value[k];
    e->keys->count = 0;
}

/* Inserts the elements of a batch, each a key of its own, and those of their low parts that aren't zero. */
static void insert_elements(encoder *e) {
    const lhc_layout *y = e->layout;
    lhc_keys *keys = e->keys;
    for (uint64_t k = 0; k < e->elements->count; k++) {
        double high = e->elements->value[k], low = 0;
        if (y->plan.parts == 2) split(e, high, &high, &low);
        if (take_room(e)) {
            keys->key[keys->count] = e->elements->at[k];
            keys->value[keys->count++] = high;
        }
        if (low != 0 && take_room(e)) {
            keys->key[keys->count] = y->block_count + e->elements->at[k];
            keys->value[keys->count++] = low;
        }
    }
    insert_keys(e);
}

static void encode_elements(encoder *e) {
    const uint64_t numel = e->layout->plan.numel;
    for (uint64_t i = 0; i < numel;) {
        e->elements->count = 0;
        i = e->isa->scan(e->x, i, numel, e->elements, &e->zero_signs);
        e->isa->weigh(&e->units, e->elements, &e->tally);
        count_probe_blocks(e);
        insert_elements(e);
    }
}

/* Inserts one key with the values of a block. */
static void insert_block(encoder *e, uint64_t key, const double *values) {
    const uint64_t block = e->layout->plan.block;
    if (!take_room(e)) return;
    if (e->layout->plan.index == LHC_INDEX_BITMAP) set_digit(e, key);
    e->keys->count = 1;
    e->keys->key[0] = key;
    e->isa->place(e->layout, e->keys);
    for (uint64_t role = 0; role < 3; role++) {
        double *to = add_index(e, role, 0);
        for (uint64_t j = 0; j < block; j++) to[j] += values[j];
    }
}

static void encode_block(encoder *e, uint64_t key, uint64_t begin, uint64_t end) {
    const uint64_t block = e->layout->plan.block;
    int has_low = 0;
    memset(e->high, 0, (size_t)(2 * block) * sizeof *e->high); /* and e->low, which follows */
    for (uint64_t i = begin; i < end;) {
        lhc_elements *elements = e->elements;
        elements->count = 0;
        i = e->isa->scan(e->x, i, end, elements, &e->zero_signs);
        e->isa->weigh(&e->units, elements, &e->tally);
        count_probe_blocks(e);
        for (uint64_t k = 0; k < elements->count; k++) {
            const uint64_t j = elements->at[k] - begin;
            e->high[j] = elements->value[k];
            if (e->layout->plan.parts == 1) continue;
            split(e, elements->value[k], &e->high[j], &e->low[j]);
            has_low |= e->low[j] != 0;
        }
    }
    insert_block(e, key, e->high);
    if (has_low) insert_block(e, e->layout->block_count + key, e->low);
}

static void encode_blocks(encoder *e) {
    const uint64_t numel = e->layout->plan.numel, block = e->layout->plan.block;
    for (uint64_t key = 0, i = 0; i < numel; key++, i += block) {
        const uint64_t end = numel - i < block ? numel : i + block;
        if (!e->isa->is_zero(e->x, i, end, &e->zero_signs)) encode_block(e, key, i, end);
    }
}

lhc_status lhc_encode(const lhc_layout *y, const float *x, int64_t rank, double *wire, int *negative_zeros) {
    if (!y || !x || !wire || !negative_zeros || rank >= (int64_t)y->plan.world_size) return LHC_ERR_ARGUMENT;
    const uint64_t block = y->plan.block, digits = y->digits_per_cell;
    double *scratch = malloc((size_t)(2 * block + digits) * sizeof *scratch);
    lhc_elements *elements = malloc(sizeof *elements);
    lhc_keys *keys = malloc(sizeof *keys);
    lhc_status status = LHC_ERR_MEMORY;
    if (scratch && elements && keys) {
        encoder e = {
            .layout = y,
            .isa = lhc_isa_in_use(),
            .x = x,
            .digits = wire + y->header_size,
            .cells = wire + y->header_size + y->bitmap_size,
            .high = scratch,
            .low = scratch + block,
            .powers = scratch + 2 * block,
            .elements = elements,
            .keys = keys,
            .units = {.limit = ldexp(1, y->plan.exponent),
                      .per_unit = ldexp(1, -y->unit_exponent),
                      .per_high_unit = ldexp(1, -(y->unit_exponent + (int)y->low_bits))},
            .high_unit = ldexp(1, (int)y->low_bits),
        };
        e.powers[0] = 1;
        for (uint64_t j = 1; j < digits; j++) e.powers[j] = e.powers[j - 1] * ((double)y->plan.world_size + 1);
        memset(wire + y->header_size, 0, (size_t)(y->wire_size - y->header_size) * sizeof *wire);
        keys->count = 0;
        if (block == 1)
            encode_elements(&e);
        else
            encode_blocks(&e);
        e.tally.over_capacity = e.tally.nonzero_keys > y->plan.capacity;
        lhc_write_header(y, &e.tally, rank, wire);
        *negative_zeros = e.zero_signs != 0;
        status = LHC_OK;
    }
    free(scratch);
    free(elements);
    free(keys);
    return status;
}
