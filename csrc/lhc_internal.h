/* Shared by the files of the kernel; nothing here is exported. */
#ifndef LHC_INTERNAL_H
#define LHC_INTERNAL_H

#include "lhc.h"

#define LHC_FORMAT_VERSION 3u
#define LHC_MAX_WORLD_SIZE 4096u
#define LHC_HEADER_FIELDS 15u
#define LHC_MAGNITUDE_CLASSES 277u
#define LHC_MIN_EXPONENT (-148)
#define LHC_MAX_EXPONENT 128
#define LHC_MIN_UNIT_EXPONENT (-149)
#define LHC_KEYS_PER_CELL_BITS 4u
#define LHC_GOLDEN 0x9E3779B97F4A7C15u

#if defined(__GNUC__)
#define LHC_PREFETCH_TO_WRITE(address) __builtin_prefetch((address), 1)
#else
#define LHC_PREFETCH_TO_WRITE(address) ((void)(address))
#endif

/* Positions in the header. */
enum {
    LHC_PILOT_CONSTANT,
    LHC_PILOT_SQUARE,
    LHC_PILOT_NEGATIVE,
    LHC_PILOT_FIRST,
    LHC_FINGERPRINT,
    LHC_NONZERO_ELEMENTS,
    LHC_NONZERO_KEYS,
    LHC_NONFINITE,
    LHC_OVERFLOW,
    LHC_INEXACT,
    LHC_INEXACT_SINGLE,
    LHC_OVER_CAPACITY,
    LHC_NONZERO_PROBE_BLOCKS,
    LHC_CONTENT,
    LHC_CHECKSUM
};

/* The factor that the reduction applied, and how to undo it. */
typedef struct {
    uint32_t kind;         /* lhc_scale_kind */
    uint32_t participants;
    uint32_t world_size;
    double factor;
} lhc_scale;

static inline uint32_t lhc_bit_length(uint64_t n) {
    uint32_t bits = 0;
    while (n) {
        bits++;
        n >>= 1;
    }
    return bits;
}

static inline uint64_t lhc_mix(uint64_t h) {
    h ^= h >> 33;
    h *= 0xFF51AFD7ED558CCDu;
    h ^= h >> 33;
    h *= 0xC4CEB9FE1A85EC53u;
    return h ^ (h >> 33);
}

/* Fingerprint and checksum have up to 32 of the bits that a hash may have. */
static inline uint32_t lhc_short_hash_mask(uint32_t hash_bits) {
    return hash_bits < 32 ? ((uint32_t)1 << hash_bits) - 1 : UINT32_MAX;
}

/* Where a key lies: docs/wire-format.md, section 3. */
typedef struct {
    uint64_t segment;
    uint64_t offset; /* in the first of the three segments */
    uint64_t id;
} lhc_place;

static inline uint64_t lhc_permute(const lhc_layout *y, uint64_t key) {
    const uint64_t mask = ((uint64_t)1 << y->key_bits) - 1;
    const uint32_t half = (y->key_bits + 1) / 2;
    for (int i = 0; i < 3; i++) {
        key = (key * y->odd[i]) & mask;
        key ^= key >> half;
    }
    return key;
}

static inline uint64_t lhc_unpermute(const lhc_layout *y, uint64_t key) {
    const uint64_t mask = ((uint64_t)1 << y->key_bits) - 1;
    const uint32_t half = (y->key_bits + 1) / 2;
    for (int i = 2; i >= 0; i--) {
        key ^= key >> half;
        key = (key * y->odd_inverse[i]) & mask;
    }
    return key;
}

static inline lhc_place lhc_place_of(const lhc_layout *y, uint64_t key) {
    const uint64_t t = lhc_permute(y, key), rest = t >> y->segment_bits;
    /* rest < 2^49, so that the product is less than 1 off */
    uint64_t id = (uint64_t)(int64_t)((double)(int64_t)rest * y->segments_inverse);
    int64_t segment = (int64_t)(rest - id * y->segments);
    const int64_t below = -(int64_t)(segment < 0), above = -(int64_t)(segment >= (int64_t)y->segments); /* 0 or all bits */
    id += (uint64_t)(below - above);
    segment += (int64_t)y->segments & below;
    segment -= (int64_t)y->segments & above;
    const lhc_place place = {(uint64_t)segment, t & (((uint64_t)1 << y->segment_bits) - 1), id};
    return place;
}

static inline uint64_t lhc_key_at(const lhc_layout *y, lhc_place place) {
    return lhc_unpermute(y, ((place.id * y->segments + place.segment) << y->segment_bits) | place.offset);
}

/* How far the second and third cell are shifted against the first. */
static inline void lhc_shifts(const lhc_layout *y, uint64_t segment, uint64_t id, uint64_t shift[3]) {
    const uint64_t mask = ((uint64_t)1 << y->segment_bits) - 1;
    const uint64_t h = lhc_mix(y->segment_seed ^ (segment * LHC_GOLDEN));
    const uint64_t low = id & mask, high = id >> y->segment_bits;
    shift[0] = 0;
    const uint64_t j = (low * (h | 1) + (h >> 32)) & mask;
    shift[1] = ((j ^ (j >> ((y->segment_bits + 1) / 2))) * ((h >> 16) | 1)) & mask;
    const uint64_t w = lhc_mix(h + low);
    shift[2] = (w + high * ((w >> 16) | 1)) & mask;
}

static inline void lhc_cells_of(const lhc_layout *y, lhc_place place, uint64_t cell[3]) {
    const uint64_t mask = ((uint64_t)1 << y->segment_bits) - 1;
    uint64_t shift[3];
    lhc_shifts(y, place.segment, place.id, shift);
    for (uint64_t role = 0; role < 3; role++)
        cell[role] = ((place.segment + role) << y->segment_bits) + ((place.offset + shift[role]) & mask);
}

/* header.c */
typedef struct {
    uint64_t nonzero_elements, nonzero_keys, nonfinite, overflow, inexact, inexact_single, probe_blocks;
    uint64_t content; /* of the elements; the rank comes in when the header is written */
    int over_capacity;
    uint32_t largest; /* bits of the largest finite |x|; 0 if all are zero */
} lhc_tally;

void lhc_write_header(const lhc_layout *y, const lhc_tally *tally, int64_t rank, double *wire);
lhc_status lhc_check_header(const lhc_layout *y, const double *wire, lhc_scale *scale, lhc_header *header);
lhc_status lhc_unscale(const lhc_scale *scale, double z, int64_t *integer);
lhc_status lhc_header_refusal(const lhc_layout *y, const lhc_header *header);

/* round.c */
typedef struct {
    lhc_scale scale;
    uint32_t format;
    uint32_t low_bits;
    int32_t unit_exponent;
    double unit; /* 2 ^ unit_exponent */
} lhc_rounding;

/* Of values in units of 2 ^ (unit_exponent + low_bits), with a low part in units of 2 ^ unit_exponent. */
lhc_rounding lhc_rounding_of(const lhc_scale *scale, uint32_t format, int32_t unit_exponent, uint32_t low_bits);
float lhc_round_once(const lhc_rounding *rounding, int64_t high, int64_t low);
/* The same for values without a low part. */
void lhc_round_many(const lhc_rounding *rounding, const int64_t *values, uint64_t count, float *to);

/* output.c: what was peeled, kept until all of it is verified. High and low part of a block come in any order, and are rounded
 * together. */
typedef struct {
    const lhc_layout *layout;
    lhc_rounding high, both; /* for elements without and with a low part */
    int may_have_low_parts;
    uint64_t *keys;  /* in the order in which they came */
    int64_t *values; /* block numbers for each of keys */
    uint64_t count, low_count;
} lhc_output;

/* header: of the wire; it tells whether there are low parts. */
lhc_status lhc_output_open(lhc_output *output, const lhc_layout *y, const lhc_header *header, uint32_t format);
lhc_status lhc_output_put(lhc_output *output, uint64_t key, const int64_t *values);
/* Writes the blocks of all keys; on an error, nothing. */
lhc_status lhc_output_write(const lhc_output *output, float *y);
void lhc_output_close(lhc_output *output);

/* table.c: the cells of a reduced wire as integers */
typedef struct {
    const lhc_layout *layout;
    int64_t *cells; /* cell_count * cell_stride */
} lhc_table;

lhc_status lhc_table_load(lhc_table *table, const double *cells, const lhc_scale *scale);
lhc_status lhc_table_check_parity(const lhc_table *table);
lhc_status lhc_table_check_empty(const lhc_table *table);
lhc_status lhc_table_take_values(const lhc_table *table, uint64_t key, const uint64_t cell[3], uint64_t from,
                                 lhc_output *output);

/* peel_keyed.c, peel_bitmap.c */
lhc_status lhc_peel_keyed(const lhc_table *table, const lhc_header *header, lhc_output *output, uint64_t *union_keys);
lhc_status lhc_peel_bitmap(const lhc_table *table, const double *digits, const lhc_header *header, lhc_output *output,
                           uint64_t *union_keys);

#endif
