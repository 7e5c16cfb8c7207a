/* Elements and keys by the batch: the loops of encoding that every instruction set compiles for itself (batch_*.c, isa.c). */
#ifndef LHC_BATCH_H
#define LHC_BATCH_H

#include "lhc_internal.h"

#define LHC_BATCH 512u
#define LHC_SCAN_CHUNK 64u /* elements that are tested for "all zero" together */

/* Nonzero elements in ascending order. */
typedef struct {
    uint64_t count;
    uint64_t at[LHC_BATCH + LHC_SCAN_CHUNK];
    uint32_t bits[LHC_BATCH + LHC_SCAN_CHUNK];
    double value[LHC_BATCH + LHC_SCAN_CHUNK]; /* in units; 0 if the plan can't hold it */
} lhc_elements;

/* What a plan makes of values. */
typedef struct {
    double limit;         /* 2 ^ exponent */
    double per_unit, per_high_unit;
} lhc_units;

/* Keys to insert, and where: docs/wire-format.md, sections 3 and 4. */
typedef struct {
    uint64_t count;
    uint64_t key[2 * (LHC_BATCH + LHC_SCAN_CHUNK)];
    double value[2 * (LHC_BATCH + LHC_SCAN_CHUNK)];
    uint64_t cell[3][2 * (LHC_BATCH + LHC_SCAN_CHUNK)];
    double lane[2][3][2 * (LHC_BATCH + LHC_SCAN_CHUNK)]; /* of the index */
} lhc_keys;

/* One instruction set's versions. All give the same bits. */
typedef struct {
    const char *name;
    /* Appends the nonzero elements from `begin` on, until `end` or the batch is full; returns where it stopped. *zero_signs: the
     * or of all elements' bits that are zero but for their sign. */
    uint64_t (*scan)(const float *x, uint64_t begin, uint64_t end, lhc_elements *elements, uint32_t *zero_signs);
    /* Are elements begin .. end - 1 all +0 or -0? */
    int (*is_zero)(const float *x, uint64_t begin, uint64_t end, uint32_t *zero_signs);
    /* Values, and what the tally counts of them but blocks. */
    void (*weigh)(const lhc_units *units, lhc_elements *elements, lhc_tally *tally);
    /* Cells and index lanes of keys. */
    void (*place)(const lhc_layout *y, lhc_keys *keys);
    /* Cells of a reduced wire as integers: 0 if all are integers below 2^51 in absolute value, else nonzero (and no use). */
    int (*load)(const double *cells, uint64_t count, double factor, int64_t *integers);
} lhc_isa;

extern const lhc_isa lhc_isa_portable;
#if defined(__x86_64__) && defined(__GNUC__)
#define LHC_HAS_X86 1
extern const lhc_isa lhc_isa_avx2, lhc_isa_avx512;
#endif

/* The best one that this processor has, or the one that HVD_LHC_ISA names. */
const lhc_isa *lhc_isa_in_use(void);

#endif
