/* Encoding one rank's gradient: docs/wire-format.md, section 4. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lhc_internal.h"

#define SCAN_CHUNK 32u                  /* elements that are tested for "all zero" together */
#define ROUNDING_MAGIC 0x1.8p52         /* adding and subtracting it rounds |q| < 2^51 to an integer, ties to even */
#define ALREADY_INTEGER 0x1p51          /* a float32 over a power of two that is this large is an integer */

typedef struct {
    const lhc_layout *layout;
    const float *x;
    double *digits;     /* bitmap */
    double *cells;
    double *powers;     /* bitmap: (N + 1) ^ j */
    double *high, *low; /* the parts of one block */
    lhc_tally tally;
    uint64_t inserted;
    uint64_t probe_end; /* first element after the last probe block that was counted */
    double limit;       /* 2 ^ exponent */
    double per_unit, per_high_unit, high_unit; /* high_unit: in units of the low part */
} encoder;

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Are elements begin .. end - 1 all +0 or -0? */
static int is_zero_run(const float *x, uint64_t begin, uint64_t end) {
    uint32_t any = 0;
    for (uint64_t i = begin; i < end; i++) any |= bits_of(x[i]) << 1;
    return any == 0;
}

/* Smallest e with |x| < 2^e, for a finite nonzero float with these bits. */
static int32_t magnitude_of(uint32_t bits) {
    const uint32_t exponent = (bits >> 23) & 0xFF;
    if (exponent) return (int32_t)exponent - 126;
    return (int32_t)lhc_bit_length(bits & 0x7FFFFF) + LHC_MIN_EXPONENT - 1;
}

/* The value of a finite float32. Subnormal numbers are made of their bits: a thread may be set to take them for zeros. */
static double value_of(uint32_t bits) {
    float value;
    if (!(bits & 0x7F800000)) return (bits >> 31 ? -0x1p-149 : 0x1p-149) * (double)(bits & 0x7FFFFF);
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static double round_to_integer(double q) {
    return fabs(q) < ALREADY_INTEGER ? (q + ROUNDING_MAGIC) - ROUNDING_MAGIC : q;
}

/* Counts a nonzero element and gives its value in units, 0 if the plan can't hold it. */
static double take_element(encoder *e, uint64_t i, uint32_t bits) {
    lhc_tally *tally = &e->tally;
    tally->nonzero_elements++;
    tally->content += lhc_mix(i * LHC_GOLDEN + bits);
    if (i >= e->probe_end) {
        const uint64_t block = e->layout->plan.probe_block;
        tally->probe_blocks++;
        e->probe_end = (i / block + 1) * block;
    }
    if ((bits & 0x7F800000) == 0x7F800000) {
        tally->nonfinite++;
        return 0;
    }
    const int32_t magnitude = magnitude_of(bits);
    if (magnitude > tally->magnitude) tally->magnitude = magnitude;
    const double x = value_of(bits);
    if (fabs(x) >= e->limit) {
        tally->overflow++;
        return 0;
    }
    const double q = x * e->per_unit, v = round_to_integer(q), high = x * e->per_high_unit;
    tally->inexact += v != q;
    tally->inexact_single += round_to_integer(high) != high;
    return v;
}

/* Splits a value into its parts; with one part, high is the value. */
static void split(const encoder *e, double v, double *high, double *low) {
    *high = (double)(int64_t)(v / e->high_unit);
    *low = v - *high * e->high_unit;
}

/* Adds the index lanes of a key to one of its cells and returns where its values go. */
static double *add_index(const encoder *e, double *cell, uint64_t id, uint64_t role) {
    const lhc_layout *y = e->layout;
    const uint64_t r = 3 * id + role;
    if (y->index_lanes == 1) {
        cell[0] += (double)(1 + (r << y->count_bits) + ((r * r) << (2 * y->count_bits + y->r_bits)));
    } else if (y->index_lanes == 2) {
        cell[0] += (double)(1 + (r << y->count_bits));
        cell[1] += (double)(r * r);
    }
    return cell + y->index_lanes;
}

static void insert_key(encoder *e, uint64_t key, const double *block_values) {
    const lhc_layout *y = e->layout;
    e->tally.nonzero_keys++;
    const uint64_t block = y->plan.block;
    if (y->plan.index == LHC_INDEX_NONE) return;
    if (e->inserted == y->plan.capacity) return;
    e->inserted++;
    if (y->plan.index == LHC_INDEX_BITMAP) e->digits[key / y->digits_per_cell] += e->powers[key % y->digits_per_cell];
    const lhc_place place = lhc_place_of(y, key);
    uint64_t cell[3];
    lhc_cells_of(y, place, cell);
    for (uint64_t role = 0; role < 3; role++) {
        double *values = add_index(e, e->cells + cell[role] * y->cell_stride, place.id, role);
        for (uint64_t j = 0; j < block; j++) values[j] += block_values[j];
    }
}

/* Inserts a block that has a nonzero element, and its low part if there is one. */
static void insert_parts(encoder *e, uint64_t key) {
    const lhc_layout *y = e->layout;
    insert_key(e, key, e->high);
    if (y->plan.parts == 1) return;
    for (uint64_t j = 0; j < y->plan.block; j++) {
        if (e->low[j] == 0) continue;
        insert_key(e, y->block_count + key, e->low);
        return;
    }
}

static void encode_elements(encoder *e, uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; i++) {
        const uint32_t bits = bits_of(e->x[i]);
        if (!(bits << 1)) continue;
        const double v = take_element(e, i, bits);
        split(e, v, e->high, e->low);
        insert_parts(e, i);
    }
}

static void encode_block(encoder *e, uint64_t key, uint64_t begin, uint64_t end) {
    const uint64_t block = e->layout->plan.block;
    for (uint64_t j = 0; j < block; j++) {
        const uint32_t bits = begin + j < end ? bits_of(e->x[begin + j]) : 0;
        e->high[j] = e->low[j] = 0;
        if (bits << 1) split(e, take_element(e, begin + j, bits), &e->high[j], &e->low[j]);
    }
    insert_parts(e, key);
}

static void encode_all(encoder *e) {
    const uint64_t numel = e->layout->plan.numel, block = e->layout->plan.block;
    if (block == 1) {
        for (uint64_t i = 0; i < numel; i += SCAN_CHUNK) {
            const uint64_t end = numel - i < SCAN_CHUNK ? numel : i + SCAN_CHUNK;
            if (!is_zero_run(e->x, i, end)) encode_elements(e, i, end);
        }
        return;
    }
    for (uint64_t key = 0, i = 0; i < numel; key++, i += block) {
        const uint64_t end = numel - i < block ? numel : i + block;
        if (!is_zero_run(e->x, i, end)) encode_block(e, key, i, end);
    }
}

lhc_status lhc_encode(const lhc_layout *y, const float *x, int64_t rank, double *wire) {
    if (!y || !x || !wire || rank >= (int64_t)y->plan.world_size) return LHC_ERR_ARGUMENT;
    const uint64_t block = y->plan.block, digits = y->digits_per_cell;
    double *scratch = malloc((size_t)(2 * block + digits) * sizeof *scratch);
    if (!scratch) return LHC_ERR_MEMORY;

    encoder e = {
        .layout = y,
        .x = x,
        .digits = wire + y->header_size,
        .cells = wire + y->header_size + y->bitmap_size,
        .high = scratch,
        .low = scratch + block,
        .powers = scratch + 2 * block,
        .tally = {.magnitude = INT32_MIN},
        .limit = ldexp(1, y->plan.exponent),
        .per_unit = ldexp(1, -y->unit_exponent),
        .per_high_unit = ldexp(1, -(y->unit_exponent + (int)y->low_bits)),
        .high_unit = ldexp(1, (int)y->low_bits),
    };
    e.powers[0] = 1;
    for (uint64_t j = 1; j < digits; j++) e.powers[j] = e.powers[j - 1] * ((double)y->plan.world_size + 1);
    memset(wire + y->header_size, 0, (size_t)(y->wire_size - y->header_size) * sizeof *wire);
    encode_all(&e);
    e.tally.over_capacity = e.tally.nonzero_keys > y->plan.capacity;
    lhc_write_header(y, &e.tally, rank, wire);
    free(scratch);
    return LHC_OK;
}
