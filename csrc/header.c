/* The header of a wire, and the scale of a reduction: docs/wire-format.md, sections 5 and 6. */
#include <math.h>

#include "lhc_internal.h"

#define EPSILON 0x1p-38
#define LARGEST_INTEGER 0x1p53

static uint32_t checksum_term(uint64_t position, int64_t value) {
    return (uint32_t)((2 * position + 1) * (uint64_t)value);
}

/* Smallest e with |x| < 2^e, for a finite nonzero float with these bits and no sign. */
static int32_t magnitude_of(uint32_t bits) {
    const uint32_t exponent = bits >> 23;
    if (exponent) return (int32_t)exponent - 126;
    return (int32_t)lhc_bit_length(bits) + LHC_MIN_EXPONENT - 1;
}

void lhc_write_header(const lhc_layout *y, const lhc_tally *tally, int64_t rank, double *wire) {
    const int64_t unit = (int64_t)y->pilot_unit, n = y->plan.world_size;
    int64_t field[LHC_HEADER_FIELDS] = {0};
    field[LHC_PILOT_CONSTANT] = unit;
    field[LHC_PILOT_SQUARE] = rank < 0 ? unit / 6 * (n + 1) * (2 * n + 1) : (rank + 1) * (rank + 1) * unit;
    field[LHC_PILOT_NEGATIVE] = rank < 0 ? -(unit / 2 * (n + 1)) : -(rank + 1) * unit;
    field[LHC_PILOT_FIRST] = rank < 0 ? unit : rank == 0 ? n * unit : 0;
    field[LHC_FINGERPRINT] = y->fingerprint;
    field[LHC_NONZERO_ELEMENTS] = (int64_t)tally->nonzero_elements;
    field[LHC_NONZERO_KEYS] = (int64_t)tally->nonzero_keys;
    field[LHC_NONFINITE] = (int64_t)tally->nonfinite;
    field[LHC_OVERFLOW] = (int64_t)tally->overflow;
    field[LHC_INEXACT] = (int64_t)tally->inexact;
    field[LHC_INEXACT_SINGLE] = (int64_t)tally->inexact_single;
    field[LHC_OVER_CAPACITY] = tally->over_capacity;
    field[LHC_NONZERO_PROBE_BLOCKS] = (int64_t)tally->probe_blocks;
    const uint64_t content = lhc_mix(tally->content + (rank < 0 ? 0 : (uint64_t)rank + 1) * LHC_GOLDEN);
    field[LHC_CONTENT] = (int64_t)(content >> (64 - y->hash_bits));

    uint32_t checksum = 0;
    for (uint64_t i = LHC_FINGERPRINT; i < LHC_CHECKSUM; i++) checksum += checksum_term(i, field[i]);
    for (uint64_t i = LHC_HEADER_FIELDS; i < y->header_size; i++) wire[i] = 0;
    if (tally->largest) {
        const uint64_t digit = (uint64_t)(magnitude_of(tally->largest) - LHC_MIN_EXPONENT);
        const uint64_t position = LHC_HEADER_FIELDS + digit / y->digits_per_cell;
        int64_t power = 1;
        for (uint64_t i = 0; i < digit % y->digits_per_cell; i++) power *= n + 1;
        wire[position] = (double)power;
        checksum += checksum_term(position, power);
    }
    field[LHC_CHECKSUM] = checksum & lhc_short_hash_mask(y->hash_bits);
    for (uint64_t i = 0; i < LHC_HEADER_FIELDS; i++) wire[i] = (double)field[i];
}

static int is_near(double a, double b) { return isfinite(b) && fabs(a - b) <= EPSILON * fabs(b); }

/* Do participants, sum of (rank + 1) and sum of its squares describe distinct ranks below n? */
static int are_ranks(int64_t m, int64_t sum, int64_t squares, int64_t n) {
    const int64_t spread = m * squares - sum * sum; /* below 2^48 */
    if (m < 1 || m >= n) return 0;
    if (sum < m * (m + 1) / 2 || sum > m * n - m * (m - 1) / 2) return 0;
    if (squares > m * n * n || ((sum ^ squares) & 1)) return 0;
    return m == 1 ? spread == 0 : spread >= m * m * (m * m - 1) / 12;
}

static int fit_partial(const double pilot[4], double factor, int64_t n, uint32_t *participants) {
    const double p0 = pilot[0], p1 = pilot[1], p2 = pilot[2], first = pilot[3] * factor;
    const double m = nearbyint(p0 * factor), sum = nearbyint(-p2 * factor), squares = nearbyint(p1 * factor);
    if (!(m >= 1 && m < (double)n && sum >= 1 && sum <= 0x1p24 && squares >= 1 && squares <= 0x1p36)) return 0;
    if (!is_near(p0 * factor, m) || !is_near(-p2 * factor, sum) || !is_near(p1 * factor, squares)) return 0;
    if (!is_near(first, (double)n) && !(fabs(first) <= EPSILON * (double)n)) return 0;
    if (!are_ranks((int64_t)m, (int64_t)sum, (int64_t)squares, n)) return 0;
    *participants = (uint32_t)m;
    return 1;
}

static lhc_status find_scale(const lhc_layout *y, const double *wire, lhc_scale *scale) {
    const int64_t n = y->plan.world_size;
    const double size = (double)n;
    double pilot[4];
    for (int i = 0; i < 4; i++) pilot[i] = wire[LHC_PILOT_CONSTANT + i] / (double)y->pilot_unit;
    const double p0 = pilot[0];
    scale->world_size = y->plan.world_size;
    if (!(p0 > 0)) return LHC_ERR_NOT_LINEAR;

    /* Some of the ranks can have the mean rank and the mean square of all; none but all have rank 0 once in n. */
    if (is_near(pilot[1], p0 * (size + 1) * (2 * size + 1) / 6) && is_near(-pilot[2], p0 * (size + 1) / 2) &&
        is_near(pilot[3], p0)) {
        const double factor = p0 / size;
        scale->participants = y->plan.world_size;
        scale->kind = is_near(factor, 1) ? LHC_SCALE_SUM : is_near(factor * size, 1) ? LHC_SCALE_AVERAGE : LHC_SCALE_OTHER;
        scale->factor = scale->kind == LHC_SCALE_SUM ? 1 : scale->kind == LHC_SCALE_AVERAGE ? 1 / size : factor;
        return isfinite(scale->factor) && scale->factor > 0 ? LHC_OK : LHC_ERR_NOT_LINEAR;
    }
    if (fit_partial(pilot, 1, n, &scale->participants)) {
        scale->kind = LHC_SCALE_SUM;
        scale->factor = 1;
        return LHC_OK;
    }
    if (fit_partial(pilot, size, n, &scale->participants)) {
        scale->kind = LHC_SCALE_AVERAGE;
        scale->factor = 1 / size;
        return LHC_OK;
    }
    return LHC_ERR_NOT_LINEAR;
}

lhc_status lhc_unscale(const lhc_scale *scale, double z, int64_t *integer) {
    if (scale->kind == LHC_SCALE_AVERAGE)
        z *= (double)scale->world_size;
    else if (scale->kind == LHC_SCALE_OTHER)
        z /= scale->factor;
    if (!(fabs(z) < LARGEST_INTEGER)) return isfinite(z) ? LHC_ERR_NOT_INTEGER : LHC_ERR_NOT_FINITE;
    /* From 2^52 on there are only integers, and adding a half would round. Ties are refused below. */
    const int64_t nearest = (int64_t)(fabs(z) < 0x1p52 ? (z < 0 ? z - 0.5 : z + 0.5) : z);
    if (fabs(z - (double)nearest) > 0.25) return LHC_ERR_NOT_INTEGER;
    *integer = nearest;
    return LHC_OK;
}

static int32_t largest_magnitude(const lhc_layout *y, const int64_t *digits) {
    const uint64_t base = (uint64_t)y->plan.world_size + 1;
    for (uint64_t position = y->header_size; position-- > LHC_HEADER_FIELDS;) {
        uint64_t rest = (uint64_t)digits[position], digit = 0, highest = 0;
        if (!rest) continue;
        for (; rest; rest /= base, digit++)
            if (rest % base) highest = digit;
        const int32_t class = (int32_t)((position - LHC_HEADER_FIELDS) * y->digits_per_cell + highest);
        return class + LHC_MIN_EXPONENT;
    }
    return INT32_MIN;
}

/* Counts that no honest sum of ranks can reach. */
static int counts_are_possible(const lhc_layout *y, const int64_t *field, int64_t ranks) {
    const int64_t elements = (int64_t)y->plan.numel * ranks, keys = (int64_t)y->key_count * ranks;
    for (uint64_t i = LHC_NONZERO_ELEMENTS; i < y->header_size; i++)
        if (field[i] < 0) return 0;
    return field[LHC_NONZERO_ELEMENTS] <= elements && field[LHC_NONZERO_KEYS] <= keys &&
           field[LHC_OVER_CAPACITY] <= ranks && field[LHC_NONZERO_PROBE_BLOCKS] <= field[LHC_NONZERO_ELEMENTS];
}

/* Every magnitude digit counts ranks, and there are no digits beyond the last class. */
static int digits_are_possible(const lhc_layout *y, const int64_t *field, int64_t ranks) {
    const uint64_t base = (uint64_t)y->plan.world_size + 1;
    for (uint64_t position = LHC_HEADER_FIELDS; position < y->header_size; position++) {
        uint64_t rest = (uint64_t)field[position], class = (position - LHC_HEADER_FIELDS) * y->digits_per_cell;
        for (uint64_t digit = 0; digit < y->digits_per_cell; digit++, class++, rest /= base)
            if (rest % base > (class < LHC_MAGNITUDE_CLASSES ? (uint64_t)ranks : 0)) return 0;
        if (rest) return 0;
    }
    return 1;
}

lhc_status lhc_check_header(const lhc_layout *y, const double *wire, lhc_scale *scale, lhc_header *header) {
    int64_t field[LHC_HEADER_FIELDS + LHC_MAGNITUDE_CLASSES];
    uint32_t checksum = 0;
    for (uint64_t i = 0; i < y->header_size; i++)
        if (!isfinite(wire[i])) return LHC_ERR_NOT_FINITE;
    lhc_status status = find_scale(y, wire, scale);
    if (status) return status;
    for (uint64_t i = LHC_FINGERPRINT; i < y->header_size; i++) {
        status = lhc_unscale(scale, wire[i], &field[i]);
        if (status) return status;
        if (i != LHC_CHECKSUM) checksum += checksum_term(i, field[i]);
    }
    const int64_t ranks = scale->participants;
    if (field[LHC_FINGERPRINT] != ranks * (int64_t)y->fingerprint) return LHC_ERR_OTHER_PLAN;
    if ((checksum ^ (uint32_t)(uint64_t)field[LHC_CHECKSUM]) & lhc_short_hash_mask(y->hash_bits)) return LHC_ERR_CHECKSUM;
    if (!counts_are_possible(y, field, ranks) || !digits_are_possible(y, field, ranks)) return LHC_ERR_COUNT;

    header->participants = scale->participants;
    header->scale_kind = scale->kind;
    header->factor = scale->factor;
    header->nonzero_elements = (uint64_t)field[LHC_NONZERO_ELEMENTS];
    header->nonzero_keys = (uint64_t)field[LHC_NONZERO_KEYS];
    header->nonfinite = (uint64_t)field[LHC_NONFINITE];
    header->overflow = (uint64_t)field[LHC_OVERFLOW];
    header->inexact = (uint64_t)field[LHC_INEXACT];
    header->inexact_single = (uint64_t)field[LHC_INEXACT_SINGLE];
    header->over_capacity = (uint64_t)field[LHC_OVER_CAPACITY];
    header->nonzero_probe_blocks = (uint64_t)field[LHC_NONZERO_PROBE_BLOCKS];
    header->content = (uint64_t)field[LHC_CONTENT];
    header->magnitude_exponent = largest_magnitude(y, field);
    return LHC_OK;
}

lhc_status lhc_header_refusal(const lhc_layout *y, const lhc_header *header) {
    if (header->nonfinite) return LHC_ERR_NONFINITE;
    if (header->overflow) return LHC_ERR_OVERFLOW;
    if (header->over_capacity) return LHC_ERR_OVER_CAPACITY;
    if (header->inexact && y->plan.precision == LHC_LOSSLESS) return LHC_ERR_INEXACT;
    if (y->plan.index == LHC_INDEX_NONE) return LHC_ERR_HEADER_ONLY;
    return LHC_OK;
}
