/* The loops with AVX-512 (F, DQ, BW, VL), and a scan that stores the positions of nonzero elements directly. */
#include "batch.h"
#ifdef LHC_HAS_X86
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,bmi,bmi2,prefer-vector-width=512")
#include <immintrin.h>

#define LANES 16u
#define LHC_OWN_SCAN

/* The signs of elements that are zero. */
static inline uint32_t signs_of_zeros(__m512i v, __mmask16 nonzero) {
    return _mm512_mask_test_epi32_mask((__mmask16)~nonzero, v, v) ? 0x80000000u : 0;
}

static int is_zero(const float *x, uint64_t begin, uint64_t end, uint32_t *zero_signs) {
    __m512i any = _mm512_setzero_si512();
    uint64_t i = begin;
    for (; i + LANES <= end; i += LANES) any = _mm512_or_si512(any, _mm512_loadu_si512(x + i));
    if (i < end)
        any = _mm512_or_si512(any, _mm512_maskz_loadu_epi32((__mmask16)((1u << (end - i)) - 1), x + i));
    const __mmask16 nonzero = _mm512_test_epi32_mask(any, _mm512_set1_epi32(0x7FFFFFFF));
    if (nonzero) return 0;
    *zero_signs |= signs_of_zeros(any, 0);
    return 1;
}

static inline void append(__m512i v, __mmask16 inside, uint64_t i, lhc_elements *elements, uint32_t *zero_signs) {
    const __mmask16 nonzero = _mm512_mask_test_epi32_mask(inside, v, _mm512_set1_epi32(0x7FFFFFFF));
    *zero_signs |= signs_of_zeros(v, nonzero);
    if (!nonzero) return;
    uint64_t *at = elements->at + elements->count;
    _mm512_mask_compressstoreu_epi32(elements->bits + elements->count, nonzero, v);
    const __m512i first = _mm512_add_epi64(_mm512_set1_epi64((int64_t)i), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    const __mmask8 low = (__mmask8)nonzero, high = (__mmask8)(nonzero >> 8);
    _mm512_mask_compressstoreu_epi64(at, low, first);
    _mm512_mask_compressstoreu_epi64(at + __builtin_popcount(low), high, _mm512_add_epi64(first, _mm512_set1_epi64(8)));
    elements->count += (uint64_t)__builtin_popcount(nonzero);
}

static uint64_t scan(const float *x, uint64_t begin, uint64_t end, lhc_elements *elements, uint32_t *zero_signs) {
    uint64_t i = begin;
    for (; i + LHC_SCAN_CHUNK <= end && elements->count < LHC_BATCH; i += LHC_SCAN_CHUNK) {
        const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(x + i + 16);
        const __m512i c = _mm512_loadu_si512(x + i + 32), d = _mm512_loadu_si512(x + i + 48);
        const __m512i any = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
        if (!_mm512_test_epi32_mask(any, any)) continue;
        append(a, 0xFFFF, i, elements, zero_signs);
        append(b, 0xFFFF, i + 16, elements, zero_signs);
        append(c, 0xFFFF, i + 32, elements, zero_signs);
        append(d, 0xFFFF, i + 48, elements, zero_signs);
    }
    while (i < end && elements->count < LHC_BATCH) {
        const uint64_t left = end - i < LANES ? end - i : LANES;
        const __mmask16 inside = (__mmask16)((1u << left) - 1);
        append(_mm512_maskz_loadu_epi32(inside, x + i), inside, i, elements, zero_signs);
        i += left;
    }
    return i;
}

#define LHC_ISA lhc_isa_avx512
#define LHC_ISA_NAME "avx512"
#include "batch_loops.h"
#else
typedef int lhc_no_avx512; /* a translation unit must not be empty */
#endif
