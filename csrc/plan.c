/* From a plan to its layout: docs/wire-format.md, section 1. */
#include "lhc_internal.h"

static uint32_t digits_per_cell(uint32_t world_size, uint32_t bits) {
    const uint64_t limit = (uint64_t)1 << bits, base = (uint64_t)world_size + 1;
    uint64_t power = 1;
    uint32_t digits = 0;
    while (power <= limit / base) {
        power *= base;
        digits++;
    }
    return digits;
}

static uint64_t inverse_of_odd(uint64_t a) {
    uint64_t x = a; /* right to 3 bits; each Newton step doubles that */
    for (int i = 0; i < 5; i++) x *= 2 - a * x;
    return x;
}

static uint32_t fingerprint_of(const lhc_plan *p, uint32_t hash_bits) {
    const uint64_t fields[] = {p->numel,       p->world_size,
                               p->capacity,    p->index,
                               p->block,       p->parts,
                               (uint64_t)(p->exponent + 1024), p->precision,
                               p->seed,        p->probe_block};
    uint64_t h = lhc_mix(LHC_FORMAT_VERSION);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) h = lhc_mix(h ^ fields[i]);
    return (uint32_t)(h & lhc_short_hash_mask(hash_bits));
}

static lhc_status check_plan(const lhc_plan *p) {
    if (p->numel < 1 || p->numel > (uint64_t)1 << 48) return LHC_ERR_NUMEL;
    if (p->world_size < 1 || p->world_size > LHC_MAX_WORLD_SIZE) return LHC_ERR_WORLD_SIZE;
    if (p->capacity < 1 || p->capacity > INT32_MAX) return LHC_ERR_CAPACITY;
    if (p->index > LHC_INDEX_BITMAP) return LHC_ERR_INDEX;
    if (p->block < 1 || p->block > p->numel) return LHC_ERR_BLOCK;
    if (p->parts < 1 || p->parts > 2) return LHC_ERR_PARTS;
    if (p->exponent < LHC_MIN_EXPONENT || p->exponent > LHC_MAX_EXPONENT) return LHC_ERR_EXPONENT;
    if (p->precision > LHC_BOUNDED) return LHC_ERR_ARGUMENT;
    if (p->probe_block < 1 || p->probe_block > p->numel) return LHC_ERR_PROBE_BLOCK;
    return LHC_OK;
}

/* Segment size and cells per key, by capacity. Tables of up to 275 keys, exactly full, fail in fewer than 1 of 100,000 cases,
 * larger ones in fewer than 1 of 10,000 (benchmarks/peel_odds.py). docs/wire-format.md, section 9, says why. */
static void size_table(lhc_layout *y) {
    static const struct {
        uint64_t limit;
        uint32_t segment_bits, factor; /* factor in 64ths */
    } rows[] = {
        {8, 5, 64}, {13, 5, 315}, {17, 5, 361}, {21, 6, 195}, {35, 6, 234}, {47, 6, 261}, {59, 7, 138}, {98, 7, 167},
        {132, 7, 186}, {164, 8, 99}, {194, 7, 211}, {275, 8, 119}, {488, 8, 67}, {661, 8, 74}, {800, 9, 40},
        {1300, 9, 50}, {1700, 9, 57}, {2000, 10, 32}, {2900, 10, 44}, {3500, 10, 56}, {4300, 11, 30}, {6000, 11, 43},
        {16384, 10, 78}, {131072, 11, 74}, {1048576, 12, 72}, {INT32_MAX, 13, 72}};
    size_t i = 0;
    while (y->plan.capacity > rows[i].limit) i++;
    const uint32_t least = (y->key_bits + 2) / 3; /* so that ids stay below L * L, where shifts are injective */
    y->segment_bits = rows[i].segment_bits > least ? rows[i].segment_bits : least;
    const uint64_t numerator = y->plan.capacity * rows[i].factor, denominator = (uint64_t)64 << y->segment_bits;
    y->segments = (numerator + denominator - 1) / denominator;
    if (y->segments < 1) y->segments = 1;
    y->segments_inverse = 1 / (double)y->segments;
    y->cell_count = (y->segments + 2) << y->segment_bits;
    const uint64_t last = ((uint64_t)1 << y->key_bits) - 1;
    y->id_count = (last >> y->segment_bits) / y->segments + 1;
}

static lhc_status size_index(lhc_layout *y) {
    const uint32_t clog = lhc_bit_length(y->plan.world_size - 1);
    y->count_bits = clog + LHC_KEYS_PER_CELL_BITS;
    y->r_bits = lhc_bit_length(3 * y->id_count - 1);
    if (y->plan.index != LHC_INDEX_KEYED) return LHC_OK;
    if (3 * (y->count_bits + y->r_bits) <= y->cell_bits)
        y->index_lanes = 1;
    else if (2 * y->count_bits + y->r_bits <= y->cell_bits && y->count_bits + 2 * y->r_bits <= y->cell_bits)
        y->index_lanes = 2;
    else
        return LHC_ERR_INDEX_LANES;
    return LHC_OK;
}

static lhc_status size_wire(lhc_layout *y) {
    const uint64_t limit = SIZE_MAX / 16;
    y->wire_size = y->header_size + y->bitmap_size;
    y->cell_stride = y->index_lanes + y->plan.block;
    if (y->plan.index == LHC_INDEX_NONE) {
        y->cell_count = 0;
        return LHC_OK;
    }
    if (y->cell_count > (limit - y->wire_size) / y->cell_stride) return LHC_ERR_WIRE_RANGE;
    y->wire_size += y->cell_count * y->cell_stride;
    return LHC_OK;
}

static int32_t unit_below(int32_t exponent, uint32_t bits) {
    const int32_t unit = exponent - (int32_t)bits;
    return unit > LHC_MIN_UNIT_EXPONENT ? unit : LHC_MIN_UNIT_EXPONENT;
}

static void seed_hashes(lhc_layout *y) {
    const uint64_t s = lhc_mix(y->plan.seed ^ 0x6C68632D73656564u);
    for (uint32_t i = 0; i < 3; i++) {
        y->odd[i] = lhc_mix(s + i + 1) | 1;
        y->odd_inverse[i] = inverse_of_odd(y->odd[i]);
    }
    y->segment_seed = lhc_mix(s + 4);
}

lhc_status lhc_plan_layout(const lhc_plan *plan, lhc_layout *y) {
    if (!plan || !y) return LHC_ERR_ARGUMENT;
    lhc_status status = check_plan(plan);
    if (status) return status;

    const lhc_layout empty = {.plan = *plan};
    *y = empty;
    const uint64_t n = plan->world_size;
    const uint32_t full_bits = 51 - lhc_bit_length(3 * n / 2 + 5); /* a sum below 2^this survives any scaling of a wire */
    y->cell_bits = full_bits + 5 < 49 ? full_bits + 5 : 49;
    y->hash_bits = full_bits - lhc_bit_length(n - 1);
    if (plan->numel > ((uint64_t)1 << y->cell_bits) / n) return LHC_ERR_COUNT_RANGE;
    y->value_bits = y->cell_bits - lhc_bit_length(n - 1) - LHC_KEYS_PER_CELL_BITS;
    y->pilot_unit = (uint64_t)6 << (y->cell_bits - lhc_bit_length(n * (n + 1) * (2 * n + 1)));
    y->digits_per_cell = digits_per_cell(plan->world_size, full_bits);
    const int32_t high_unit = unit_below(plan->exponent, y->value_bits);
    y->unit_exponent = plan->parts == 1 ? high_unit : unit_below(high_unit, y->value_bits);
    y->low_bits = (uint32_t)(high_unit - y->unit_exponent);

    y->block_count = (plan->numel + plan->block - 1) / plan->block;
    y->key_count = plan->parts * y->block_count;
    y->key_bits = lhc_bit_length(y->key_count - 1);
    y->header_size = LHC_HEADER_FIELDS + (LHC_MAGNITUDE_CLASSES + y->digits_per_cell - 1) / y->digits_per_cell;
    if (plan->index == LHC_INDEX_BITMAP)
        y->bitmap_size = (y->key_count + y->digits_per_cell - 1) / y->digits_per_cell;
    y->fingerprint = fingerprint_of(plan, y->hash_bits);
    size_table(y);
    status = size_index(y);
    if (status) return status;
    seed_hashes(y);
    return size_wire(y);
}
