/* The loops of batch.h, to be included once for each instruction set after its LHC_ISA and target are set. They are written
 * for the compiler to turn into vector instructions. */
#include <math.h>
#include <string.h>

#include "batch.h"

#define ROUNDING_MAGIC 0x1.8p52 /* adding and subtracting it rounds |q| < 2^51 to an integer, ties to even */
#define ALREADY_INTEGER 0x1p51  /* a float32 over a power of two that is this large is an integer */
#define INFINITE_BITS 0x7F800000u

#ifndef LHC_OWN_SCAN
static int is_zero(const float *x, uint64_t begin, uint64_t end, uint32_t *zero_signs) {
    uint32_t any = 0;
    for (uint64_t i = begin; i < end; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        any |= bits;
    }
    if (any << 1) return 0;
    *zero_signs |= any;
    return 1;
}

static uint64_t scan(const float *x, uint64_t begin, uint64_t end, lhc_elements *elements, uint32_t *zero_signs) {
    uint64_t i = begin;
    while (i < end && elements->count < LHC_BATCH) {
        const uint64_t stop = end - i < LHC_SCAN_CHUNK ? end : i + LHC_SCAN_CHUNK;
        if (is_zero(x, i, stop, zero_signs)) {
            i = stop;
            continue;
        }
        for (; i < stop; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            if (!(bits << 1)) {
                *zero_signs |= bits;
                continue;
            }
            elements->at[elements->count] = i;
            elements->bits[elements->count++] = bits;
        }
    }
    return i;
}
#endif

/* A subnormal number is made of its bits: a thread may be set to take them for zeros. */
static void weigh_subnormals(lhc_elements *elements) {
    for (uint64_t k = 0; k < elements->count; k++) {
        const uint32_t bits = elements->bits[k];
        if (!(bits & INFINITE_BITS)) elements->value[k] = (bits >> 31 ? -0x1p-149 : 0x1p-149) * (double)(bits & 0x7FFFFF);
    }
}

static void weigh(const lhc_units *units, lhc_elements *elements, lhc_tally *tally) {
    const uint64_t count = elements->count;
    const double limit = units->limit, per_unit = units->per_unit, per_high_unit = units->per_high_unit;
    uint64_t content = 0;
    uint32_t largest = 0, smallest = UINT32_MAX;
    for (uint64_t k = 0; k < count; k++) {
        const uint32_t bits = elements->bits[k], size = bits & 0x7FFFFFFF;
        float value;
        content += lhc_mix(elements->at[k] * LHC_GOLDEN + bits);
        largest = size > largest && size < INFINITE_BITS ? size : largest;
        smallest = size < smallest ? size : smallest;
        memcpy(&value, &bits, sizeof value);
        elements->value[k] = (double)value;
    }
    if (!(smallest & INFINITE_BITS)) weigh_subnormals(elements);

    uint64_t nonfinite = 0, overflow = 0, inexact = 0, inexact_single = 0;
    for (uint64_t k = 0; k < count; k++) {
        const double x = elements->value[k];
        const uint64_t is_finite = (elements->bits[k] & INFINITE_BITS) != INFINITE_BITS, fits = fabs(x) < limit;
        const double q = x * per_unit, high = x * per_high_unit;
        const double v = fabs(q) < ALREADY_INTEGER ? (q + ROUNDING_MAGIC) - ROUNDING_MAGIC : q;
        const double rounded_high = fabs(high) < ALREADY_INTEGER ? (high + ROUNDING_MAGIC) - ROUNDING_MAGIC : high;
        const uint64_t holds = is_finite & fits, is_inexact = v != q, has_low = rounded_high != high;
        nonfinite += 1 - is_finite;
        overflow += is_finite - holds;
        inexact += holds & is_inexact;
        inexact_single += holds & has_low;
        elements->value[k] = holds ? v : 0;
    }
    tally->nonzero_elements += count;
    tally->content += content;
    tally->nonfinite += nonfinite;
    tally->overflow += overflow;
    tally->inexact += inexact;
    tally->inexact_single += inexact_single;
    if (largest > tally->largest) tally->largest = largest;
}

static void place(const lhc_layout *y, lhc_keys *keys) {
    const uint64_t count = keys->count, mask = ((uint64_t)1 << y->segment_bits) - 1;
    const uint32_t segment_bits = y->segment_bits, half = (segment_bits + 1) / 2;
    const uint32_t count_bits = y->count_bits, square_at = 2 * y->count_bits + y->r_bits;
    const int lanes = (int)y->index_lanes;
    for (uint64_t k = 0; k < count; k++) {
        const lhc_place at = lhc_place_of(y, keys->key[k]);
        const uint64_t h = lhc_mix(y->segment_seed ^ (at.segment * LHC_GOLDEN));
        const uint64_t low = at.id & mask, high = at.id >> segment_bits;
        const uint64_t w = lhc_mix(h + low);
        const uint64_t j = (low * (h | 1) + (h >> 32)) & mask;
        const uint64_t shift1 = (j ^ (j >> half)) * ((h >> 16) | 1), shift2 = w + high * ((w >> 16) | 1);
        const uint64_t first = at.segment << segment_bits;
        keys->cell[0][k] = first + at.offset;
        keys->cell[1][k] = first + mask + 1 + ((at.offset + shift1) & mask);
        keys->cell[2][k] = first + 2 * (mask + 1) + ((at.offset + shift2) & mask);
        keys->key[k] = at.id; /* is needed no more */
    }
    if (lanes == 1) {
        for (uint64_t role = 0; role < 3; role++)
            for (uint64_t k = 0; k < count; k++) {
                const uint64_t r = 3 * keys->key[k] + role;
                keys->lane[0][role][k] = (double)(int64_t)(1 + (r << count_bits) + ((r * r) << square_at));
            }
    } else if (lanes == 2) {
        for (uint64_t role = 0; role < 3; role++)
            for (uint64_t k = 0; k < count; k++) {
                const uint64_t r = 3 * keys->key[k] + role;
                keys->lane[0][role][k] = (double)(int64_t)(1 + (r << count_bits));
                keys->lane[1][role][k] = (double)(int64_t)(r * r);
            }
    }
}

static int load(const double *cells, uint64_t count, double factor, int64_t *integers) {
    const double magic = ROUNDING_MAGIC;
    int64_t magic_bits;
    memcpy(&magic_bits, &magic, sizeof magic_bits);
    uint64_t bad = 0;
    for (uint64_t i = 0; i < count; i++) {
        const double z = cells[i] * factor, shifted = z + magic, nearest = shifted - magic;
        int64_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        integers[i] = (int64_t)((uint64_t)bits - (uint64_t)magic_bits); /* of no meaning where bad */
        bad |= !(fabs(z) < 0x1p50);
        bad |= !(fabs(z - nearest) <= 0.25);
    }
    return bad != 0;
}

const lhc_isa LHC_ISA = {LHC_ISA_NAME, scan, is_zero, weigh, place, load};
