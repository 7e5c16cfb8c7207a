/* hvd_lhc: exact homomorphic sketches of sparse float32 arrays. Public interface.
 *
 * docs/wire-format.md defines every number here. All functions are reentrant, print nothing and keep no state but the
 * choice of an instruction set.
 * A wire handed to lhc_read_header or lhc_decode is untrusted input. */
#ifndef LHC_H
#define LHC_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* cffi: begin */

typedef enum {
    LHC_OK = 0,
    /* plans */
    LHC_ERR_NUMEL = -1,
    LHC_ERR_WORLD_SIZE = -2,
    LHC_ERR_CAPACITY = -3,
    LHC_ERR_INDEX = -4,
    LHC_ERR_BLOCK = -5,
    LHC_ERR_PARTS = -6,
    LHC_ERR_EXPONENT = -7,
    LHC_ERR_PROBE_BLOCK = -8,
    LHC_ERR_COUNT_RANGE = -9,   /* numel * world_size does not fit a cell */
    LHC_ERR_INDEX_LANES = -10,  /* the keyed index does not fit two lanes */
    LHC_ERR_WIRE_RANGE = -11,   /* the wire would not be addressable */
    /* wires */
    LHC_ERR_WIRE_SIZE = -20,
    LHC_ERR_OTHER_PLAN = -21,
    LHC_ERR_NOT_FINITE = -22,
    LHC_ERR_NOT_LINEAR = -23,
    LHC_ERR_NOT_INTEGER = -24,
    LHC_ERR_CHECKSUM = -25,
    /* what the ranks themselves declared */
    LHC_ERR_NONFINITE = -30,
    LHC_ERR_OVERFLOW = -31,
    LHC_ERR_OVER_CAPACITY = -32,
    LHC_ERR_INEXACT = -33,
    LHC_ERR_HEADER_ONLY = -34,
    /* verification */
    LHC_ERR_PARITY = -40,
    LHC_ERR_UNPEELED = -41,
    LHC_ERR_COUNT = -42,
    /* the call */
    LHC_ERR_ARGUMENT = -50,
    LHC_ERR_MEMORY = -51,
    LHC_ERR_ISA = -52
} lhc_status;

typedef enum { LHC_INDEX_NONE = 0, LHC_INDEX_KEYED = 1, LHC_INDEX_BITMAP = 2 } lhc_index;
typedef enum { LHC_LOSSLESS = 0, LHC_BOUNDED = 1 } lhc_precision;
typedef enum { LHC_FLOAT32 = 0, LHC_FLOAT16 = 1, LHC_BFLOAT16 = 2 } lhc_format;
typedef enum { LHC_SCALE_SUM = 0, LHC_SCALE_AVERAGE = 1, LHC_SCALE_OTHER = 2 } lhc_scale_kind;

typedef struct {
    uint64_t numel;
    uint64_t capacity;
    uint64_t block;
    uint64_t probe_block;
    uint64_t seed;
    uint32_t world_size;
    uint32_t index;       /* lhc_index */
    uint32_t parts;       /* 1, or 2: high and low part of an element under two keys */
    uint32_t precision;   /* lhc_precision */
    int32_t exponent;
} lhc_plan;

/* A validated plan with everything that follows from it. */
typedef struct {
    lhc_plan plan;
    uint64_t wire_size;     /* numbers in the wire */
    uint64_t header_size;
    uint64_t bitmap_size;   /* 0 unless bitmap */
    uint64_t block_count;
    uint64_t key_count;     /* parts * block_count */
    uint64_t cell_count;    /* 0 for a header alone */
    uint64_t cell_stride;   /* numbers per cell */
    uint64_t segments;      /* in which keys start; the table has two more */
    uint64_t id_count;
    uint64_t pilot_unit;
    uint32_t fingerprint;
    uint32_t segment_bits;
    uint32_t key_bits;
    uint32_t cell_bits;
    uint32_t hash_bits;
    uint32_t value_bits;
    uint32_t index_lanes;
    uint32_t count_bits;
    uint32_t r_bits;
    uint32_t digits_per_cell;
    uint32_t low_bits;      /* by which the low part's unit is smaller than the high part's; 0 with one part */
    int32_t unit_exponent;  /* of the low part */
    uint64_t odd[3];
    uint64_t odd_inverse[3];
    uint64_t segment_seed;
    double segments_inverse; /* 1 / segments, rounded */
} lhc_layout;

/* The header of a reduced wire: sums over the ranks that took part. */
typedef struct {
    uint64_t nonzero_elements;
    uint64_t nonzero_keys;
    uint64_t nonfinite;
    uint64_t overflow;
    uint64_t inexact;
    uint64_t inexact_single;
    uint64_t over_capacity;
    uint64_t nonzero_probe_blocks;
    uint64_t content;
    double factor;              /* 1, 1 / world_size (rounded) or another factor of the reduction */
    uint32_t participants;
    uint32_t scale_kind;        /* lhc_scale_kind */
    int32_t magnitude_exponent; /* every finite element is below 2 to this power; INT32_MIN if all are zero */
} lhc_header;

/* Validates a plan and derives its layout. */
lhc_status lhc_plan_layout(const lhc_plan *plan, lhc_layout *layout);

/* Encodes x (numel floats) into wire (wire_size doubles, overwritten). rank < 0: a rank that is not named. *negative_zeros: are
 * there elements that are -0 (sent like +0)? */
lhc_status lhc_encode(const lhc_layout *layout, const float *x, int64_t rank, double *wire, int *negative_zeros);

/* Reads and checks the header of a reduced wire. */
lhc_status lhc_read_header(const lhc_layout *layout, const double *wire, uint64_t wire_size, lhc_header *header);

/* Decodes a reduced wire into y (numel floats), rounded once to the format. Only the blocks of the union's keys are written, and
 * only after everything has been verified: y has to be zero before, or hold what this rank has encoded, which is zero elsewhere.
 * Anything but LHC_OK: y is as it was. header is filled as soon as it could be checked, and *header_valid set; *union_keys is the
 * number of distinct keys found. */
lhc_status lhc_decode(const lhc_layout *layout, const double *wire, uint64_t wire_size, uint32_t format, float *y,
                      lhc_header *header, int *header_valid, uint64_t *union_keys);

/* Uses the named instruction set from now on: "portable", "avx2", "avx512"; NULL or "": the best one. LHC_ERR_ISA: this processor,
 * or this build, doesn't have it. All give the same bits. */
lhc_status lhc_use_isa(const char *name);

/* The instruction set in use. */
const char *lhc_isa_name(void);

/* One English sentence for a status, without a full stop. Never NULL. */
const char *lhc_status_text(lhc_status status);

/* cffi: end */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
