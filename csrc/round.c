/* The one rounding: an exact integer, times a power of two and the scale, to a floating-point format. */
#include <math.h>
#include <string.h>

#include "lhc_internal.h"

#define LIMBS 8           /* 256 bits: 53 + 45 of a value of two parts, 53 of a factor, and the room to shift */
#define EXACT_QUOTIENT 0x1p50 /* below this, value / N in binary64 can't reach a tie of a shorter format by rounding */

typedef struct {
    int precision, least, largest; /* significand bits; exponents of the smallest normal and the largest binade */
} format_traits;

static const format_traits formats[] = {
    [LHC_FLOAT32] = {24, -126, 127}, [LHC_FLOAT16] = {11, -14, 15}, [LHC_BFLOAT16] = {8, -126, 127}};

/* Rounds to float32, ties to even. Subnormal results are made of bits: a thread may be set to flush them to zero. */
static float to_float32(double value) {
    if (fabs(value) >= 0x1p-126) return (float)value;
    uint32_t bits = (uint32_t)((fabs(value) * 0x1p149 + 0x1p52) - 0x1p52);
    if (bits && value < 0) bits |= 0x80000000u; /* zeros have no sign */
    float rounded;
    memcpy(&rounded, &bits, sizeof rounded);
    return rounded;
}

/* A nonnegative integer, least significant limb first. */
typedef struct {
    uint32_t limb[LIMBS];
} wide;

static void wide_add_shifted(wide *w, uint64_t value, uint32_t shift) {
    uint64_t carry = 0;
    const uint32_t at = shift / 32, by = shift % 32;
    const uint64_t low = value << by, high = by ? value >> (64 - by) : 0;
    const uint32_t part[3] = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high};
    for (uint32_t i = at; i < LIMBS; i++) {
        carry += (uint64_t)w->limb[i] + (i - at < 3 ? part[i - at] : 0);
        w->limb[i] = (uint32_t)carry;
        carry >>= 32;
    }
}

static wide wide_times(const wide *a, uint64_t factor) {
    wide product = {{0}};
    for (uint32_t i = 0; i < LIMBS - 2; i++) {
        wide_add_shifted(&product, (uint64_t)a->limb[i] * (uint32_t)factor, 32 * i);
        wide_add_shifted(&product, (uint64_t)a->limb[i] * (factor >> 32), 32 * (i + 1));
    }
    return product;
}

/* Divides in place and returns the remainder. */
static uint32_t wide_divide(wide *a, uint32_t divisor) {
    uint64_t rest = 0;
    for (int i = LIMBS - 1; i >= 0; i--) {
        rest = (rest << 32) | a->limb[i];
        a->limb[i] = (uint32_t)(rest / divisor);
        rest %= divisor;
    }
    return (uint32_t)rest;
}

static int wide_bit_length(const wide *a) {
    for (int i = LIMBS - 1; i >= 0; i--)
        if (a->limb[i]) return 32 * i + (int)lhc_bit_length(a->limb[i]);
    return 0;
}

static uint32_t wide_bit(const wide *a, int bit) {
    return bit < 0 || bit >= 32 * LIMBS ? 0 : (a->limb[bit / 32] >> (bit % 32)) & 1;
}

/* Rounds a * 2^exponent (plus a little more if sticky) to the format; ties to even, beyond the range infinite. */
static double wide_round(const wide *a, int exponent, int sticky, const format_traits *format) {
    const int length = wide_bit_length(a), binade = length - 1 + exponent;
    const int lowest = (binade > format->least ? binade : format->least) - format->precision + 1; /* exponent of the last bit kept */
    const int cut = lowest - exponent; /* bits of a that are cut off; negative: none */
    uint64_t kept = 0;
    for (int bit = length - 1; bit >= cut && bit >= 0; bit--) kept = (kept << 1) | wide_bit(a, bit);
    if (cut <= 0) return ldexp((double)kept, exponent); /* sticky only comes with long numbers */
    for (int bit = 0; bit < cut - 1 && !sticky; bit++) sticky = (int)wide_bit(a, bit);
    if (wide_bit(a, cut - 1) && (sticky || (kept & 1))) kept++;
    const double rounded = ldexp((double)kept, lowest);
    return rounded >= ldexp(1, format->largest + 1) ? INFINITY : rounded;
}

/* a + b, or of its two neighbours in binary64 the one with an odd last bit: that one rounds to a shorter format as a + b. */
static double add_to_odd(double a, double b) {
    const double sum = a + b, b_part = sum - a, error = (a - (sum - b_part)) + (b - b_part);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if (error == 0 || bits & 1) return sum;
    bits += (error > 0) == (sum > 0) ? 1u : UINT64_MAX;
    double odd;
    memcpy(&odd, &bits, sizeof odd);
    return odd;
}

/* value is exact, or a quotient that is as good as exact (see EXACT_QUOTIENT). */
static double round_double(double value, const format_traits *format) {
    int exponent;
    (void)frexp(value, &exponent);
    const int lowest = (exponent - 1 > format->least ? exponent - 1 : format->least) - format->precision + 1;
    const double rounded = ldexp((ldexp(value, -lowest) + 0x1.8p52) - 0x1.8p52, lowest);
    if (fabs(rounded) >= ldexp(1, format->largest + 1)) return value < 0 ? -INFINITY : INFINITY;
    return rounded;
}

static float round_wide_value(const lhc_rounding *r, int64_t high, int64_t low) {
    /* |high * 2^b + low|: make both parts nonnegative by borrowing */
    wide magnitude = {{0}};
    const int64_t unit = (int64_t)1 << r->low_bits;
    int64_t carry = low / unit, rest = low % unit;
    high += carry;
    const int negative = high < 0 || (high == 0 && rest < 0);
    if (negative) {
        high = -high;
        rest = -rest;
    }
    if (rest < 0) {
        high -= 1;
        rest += unit;
    }
    wide_add_shifted(&magnitude, (uint64_t)high, r->low_bits);
    wide_add_shifted(&magnitude, (uint64_t)rest, 0);

    int exponent = r->unit_exponent, sticky = 0;
    if (r->scale.kind == LHC_SCALE_AVERAGE) {
        wide shifted = {{0}}; /* 64 more bits, so that the quotient is longer than any format and the remainder only sticky */
        for (int i = 2; i < LIMBS; i++) shifted.limb[i] = magnitude.limb[i - 2];
        exponent -= 64;
        sticky = wide_divide(&shifted, r->scale.world_size) != 0;
        magnitude = shifted;
    } else if (r->scale.kind == LHC_SCALE_OTHER) {
        int scale_exponent;
        const double fraction = frexp(r->scale.factor, &scale_exponent);
        magnitude = wide_times(&magnitude, (uint64_t)ldexp(fraction, 53));
        exponent += scale_exponent - 53;
    }
    if (!wide_bit_length(&magnitude)) return 0;
    const double rounded = wide_round(&magnitude, exponent, sticky, &formats[r->format]);
    return to_float32(negative ? -rounded : rounded);
}

lhc_rounding lhc_rounding_of(const lhc_scale *scale, uint32_t format, int32_t unit_exponent, uint32_t low_bits) {
    const lhc_rounding rounding = {*scale, format, low_bits, unit_exponent, ldexp(1, unit_exponent)};
    return rounding;
}

float lhc_round_once(const lhc_rounding *r, int64_t high, int64_t low) {
    const uint32_t n = r->scale.kind == LHC_SCALE_AVERAGE ? r->scale.world_size : 1;
    const double high_part = (double)high * (double)((int64_t)1 << r->low_bits);
    double value = high_part + (double)low; /* exact when below 2^50 */
    if (r->scale.kind == LHC_SCALE_OTHER) return round_wide_value(r, high, low);
    if (!(fabs(value) < EXACT_QUOTIENT)) {
        if (n & (n - 1)) return round_wide_value(r, high, low);
        value = add_to_odd(high_part, (double)low);
    }
    if (value == 0) return 0;
    value = value / (double)n * r->unit;
    return to_float32(r->format == LHC_FLOAT32 ? value : round_double(value, &formats[r->format]));
}

void lhc_round_many(const lhc_rounding *r, const int64_t *values, uint64_t count, float *to) {
    if (r->scale.kind != LHC_SCALE_SUM || r->format != LHC_FLOAT32) {
        for (uint64_t j = 0; j < count; j++) to[j] = lhc_round_once(r, 0, values[j]);
        return;
    }
    for (uint64_t j = 0; j < count; j++) {
        const double value = (double)values[j]; /* exact, or as good as exact, below 2^50 */
        const int is_plain = fabs(value) < EXACT_QUOTIENT && fabs(value * r->unit) >= 0x1p-126;
        to[j] = is_plain ? (float)(value * r->unit) : lhc_round_once(r, 0, values[j]);
    }
}
