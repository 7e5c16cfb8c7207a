/* The kernel through its public header, under sanitizers: golden wires, wrong arguments, and a fuzzer of damaged wires.
 *
 * test_kernel [ROUNDS]: rounds of the fuzzer, which is the same in every run. Prints what failed, then "N passed, M failed". */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lhc.h"

static int negative_zeros;

#define DEFAULT_ROUNDS 20000
#define MOST_RANKS 8

typedef struct {
    uint64_t at;
    uint32_t bits;
} element;

typedef struct {
    uint64_t at;
    double value;
} number;

typedef struct {
    int64_t rank;
    const element *gradient;
    size_t gradient_count;
    const number *wire;
    size_t wire_count;
} rank_case;

typedef struct {
    const char *name;
    lhc_plan plan;
    uint64_t wire_size;
    const rank_case *ranks;
    size_t rank_count;
    const number *reduced;
    size_t reduced_count;
    uint32_t format;
    lhc_status status;
    const element *result;
    size_t result_count;
} golden_case;

#include "vectors.inc"

static unsigned long passed, failed;

static void check(int holds, const char *what, const char *where) {
    if (holds) {
        passed++;
        return;
    }
    failed++;
    if (failed <= 20) printf("FAILED %s: %s\n", where, what);
}

/* Exactly as large as asked for, so that the sanitizer sees every access beyond; a program that can't get it ends. */
static void *allocate(size_t size) {
    void *memory = calloc(size ? size : 1, 1);
    if (!memory) {
        printf("no memory\n");
        exit(2);
    }
    return memory;
}

static double *numbers_of(const number *numbers, size_t count, uint64_t size) {
    double *wire = allocate((size_t)size * sizeof *wire);
    for (size_t i = 0; i < count; i++) wire[numbers[i].at] = numbers[i].value;
    return wire;
}

static float *floats_of(const element *elements, size_t count, uint64_t size) {
    float *x = allocate((size_t)size * sizeof *x);
    for (size_t i = 0; i < count; i++) memcpy(&x[elements[i].at], &elements[i].bits, sizeof *x);
    return x;
}

static void check_golden_ranks(const golden_case *c, const lhc_layout *layout) {
    for (size_t i = 0; i < c->rank_count; i++) {
        const rank_case *r = &c->ranks[i];
        float *x = floats_of(r->gradient, r->gradient_count, c->plan.numel);
        double *expected = numbers_of(r->wire, r->wire_count, c->wire_size);
        double *wire = allocate((size_t)c->wire_size * sizeof *wire);
        check(lhc_encode(layout, x, r->rank, wire, &negative_zeros) == LHC_OK, "encode succeeds", c->name);
        check(!memcmp(wire, expected, (size_t)c->wire_size * sizeof *wire), "encode makes the golden wire", c->name);
        free(x);
        free(expected);
        free(wire);
    }
}

static void check_golden(const golden_case *c) {
    lhc_layout layout;
    check(lhc_plan_layout(&c->plan, &layout) == LHC_OK && layout.wire_size == c->wire_size, "the plan has its size", c->name);
    if (layout.wire_size != c->wire_size) return;
    check_golden_ranks(c, &layout);

    lhc_header header, again;
    int header_valid = 0;
    uint64_t union_keys = 0;
    double *reduced = numbers_of(c->reduced, c->reduced_count, c->wire_size);
    float *expected = floats_of(c->result, c->result_count, c->plan.numel), *y = floats_of(NULL, 0, c->plan.numel);
    const lhc_status status =
        lhc_decode(&layout, reduced, c->wire_size, c->format, y, &header, &header_valid, &union_keys);
    check(status == c->status, "decode has the golden status", c->name);
    if (!status) check(!memcmp(y, expected, (size_t)c->plan.numel * sizeof *y), "decode makes the golden result", c->name);
    check(!header_valid == !!lhc_read_header(&layout, reduced, c->wire_size, &again), "the header is valid or not", c->name);
    check(strlen(lhc_status_text(status)) > 0, "the status has a text", c->name);
    free(reduced);
    free(expected);
    free(y);
}

static void check_plan(lhc_plan plan, lhc_status expected, const char *what) {
    lhc_layout layout;
    check(lhc_plan_layout(&plan, &layout) == expected, what, "plans");
}

static void check_plans(void) {
    const lhc_plan good = {.numel = 1000, .capacity = 10, .block = 1, .probe_block = 1, .world_size = 4,
                           .index = LHC_INDEX_KEYED, .parts = 1, .exponent = 4};
    lhc_plan p = good;
    check_plan(good, LHC_OK, "a good plan");
#define WITH(field, value, status) p = good, p.field = (value), check_plan(p, status, #field " = " #value)
    WITH(numel, 0, LHC_ERR_NUMEL);
    WITH(numel, UINT64_MAX, LHC_ERR_NUMEL);
    WITH(numel, (uint64_t)1 << 48, LHC_ERR_COUNT_RANGE);
    WITH(world_size, 0, LHC_ERR_WORLD_SIZE);
    WITH(world_size, 4097, LHC_ERR_WORLD_SIZE);
    WITH(capacity, 0, LHC_ERR_CAPACITY);
    WITH(capacity, UINT64_MAX, LHC_ERR_CAPACITY);
    WITH(index, 3, LHC_ERR_INDEX);
    WITH(block, 0, LHC_ERR_BLOCK);
    WITH(block, 1001, LHC_ERR_BLOCK);
    WITH(probe_block, 0, LHC_ERR_PROBE_BLOCK);
    WITH(parts, 3, LHC_ERR_PARTS);
    WITH(exponent, 129, LHC_ERR_EXPONENT);
    WITH(exponent, -149, LHC_ERR_EXPONENT);
    WITH(precision, 2, LHC_ERR_ARGUMENT);
#undef WITH
    p = good, p.world_size = 4096, p.numel = ((uint64_t)1 << 31) + 1, p.capacity = 1;
    check_plan(p, LHC_ERR_COUNT_RANGE, "counts of more than 2^31 elements on 4096 ranks");
    p = good, p.world_size = 1024, p.numel = (uint64_t)1 << 32, p.capacity = 1;
    check_plan(p, LHC_ERR_INDEX_LANES, "an index of 2^32 elements in a small table");
    p = good, p.numel = (uint64_t)1 << 46, p.block = p.numel, p.capacity = INT32_MAX, p.index = LHC_INDEX_BITMAP;
    check_plan(p, LHC_ERR_WIRE_RANGE, "a wire that memory can't address");
}

static void check_arguments(void) {
    const lhc_plan plan = {.numel = 8, .capacity = 4, .block = 1, .probe_block = 1, .world_size = 2,
                           .index = LHC_INDEX_KEYED, .parts = 1, .exponent = 4};
    lhc_layout layout;
    lhc_header header;
    int valid;
    uint64_t keys;
    float y[8] = {0};
    check(lhc_plan_layout(NULL, &layout) == LHC_ERR_ARGUMENT, "no plan", "arguments");
    check(lhc_plan_layout(&plan, NULL) == LHC_ERR_ARGUMENT, "no layout", "arguments");
    check(lhc_plan_layout(&plan, &layout) == LHC_OK, "a plan", "arguments");
    double *wire = allocate((size_t)layout.wire_size * sizeof *wire);
    check(lhc_encode(&layout, NULL, 0, wire, &negative_zeros) == LHC_ERR_ARGUMENT, "no gradient", "arguments");
    check(lhc_encode(&layout, y, 2, wire, &negative_zeros) == LHC_ERR_ARGUMENT, "rank 2 of 2", "arguments");
    check(lhc_read_header(&layout, wire, 3, &header) == LHC_ERR_WIRE_SIZE, "a short wire", "arguments");
    check(lhc_decode(&layout, wire, layout.wire_size + 1, LHC_FLOAT32, y, &header, &valid, &keys) == LHC_ERR_WIRE_SIZE,
          "a long wire", "arguments");
    check(lhc_decode(&layout, wire, layout.wire_size, 3, y, &header, &valid, &keys) == LHC_ERR_ARGUMENT, "no such format",
          "arguments");
    check(lhc_decode(&layout, wire, layout.wire_size, LHC_FLOAT32, y, &header, &valid, &keys) == LHC_ERR_NOT_LINEAR,
          "a wire of zeros", "arguments");
    for (int status = -60; status < 3; status++)
        check(strlen(lhc_status_text((lhc_status)status)) > 0, "every status has a text", "arguments");
    free(wire);
}

/* ---- the fuzzer ---- */

static uint64_t random_state = 1;

static uint64_t random_word(void) { /* splitmix64 */
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t random_below(uint64_t n) { return random_word() % n; }

static lhc_plan random_plan(void) {
    static const uint32_t world_sizes[] = {1, 2, 3, 4, 7, 8, 64, 4096};
    lhc_plan p = {
        .numel = 1 + random_below(200),
        .capacity = 1 + random_below(60),
        .seed = random_word(),
        .world_size = world_sizes[random_below(8)],
        .index = 1 + (uint32_t)random_below(2),
        .parts = 1 + (uint32_t)random_below(2),
        .precision = (uint32_t)random_below(2),
        .exponent = (int32_t)random_below(12) - 3,
    };
    if (p.parts == 2 && random_below(2)) p.exponent = 21 + (int32_t)random_below(28); /* so high that elements have low parts */
    p.block = 1 + random_below(p.numel < 9 ? p.numel : 9);
    p.probe_block = 1 + random_below(p.numel);
    return p;
}

/* Adds a gradient of small numbers to the exact sums, in units of 2^-6, and writes it into x. */
static void random_gradient(const lhc_plan *p, float *x, int64_t *sums) {
    const uint64_t count = random_below(p->numel < 40 ? p->numel : 40);
    memset(x, 0, (size_t)p->numel * sizeof *x);
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t at = random_below(p->numel);
        if (x[at] != 0) continue;
        const int64_t units = (int64_t)random_below(17) - 8;
        x[at] = (float)units / 64;
        sums[at] += units;
    }
}

static double damaged_number(double z) {
    uint64_t bits;
    switch (random_below(8)) {
    case 0:
        memcpy(&bits, &z, sizeof bits);
        bits ^= (uint64_t)1 << random_below(64);
        memcpy(&z, &bits, sizeof z);
        return z;
    case 1: return z + 1;
    case 2: return -z;
    case 3: return (double)NAN;
    case 4: return (double)INFINITY;
    case 5: return ldexp(1, (int)random_below(1100)) * (random_below(2) ? 1 : -1);
    case 6: return 0;
    default: return z + 0.3;
    }
}

static void damage(double *wire, uint64_t size, uint64_t header_size) {
    const uint64_t kind = random_below(4), changes = 1 + random_below(4);
    const double factor = ldexp((double)(1 + random_below(9)), (int)random_below(5) - 4);
    for (uint64_t i = 0; i < changes; i++) {
        const uint64_t at = random_below(size), other = random_below(size);
        const double z = wire[at];
        if (kind == 0) wire[at] = damaged_number(z);
        if (kind == 1) wire[at] = wire[other], wire[other] = z;
    }
    if (kind == 2) /* another cell's numbers behind a good header */
        for (uint64_t i = header_size; i < size; i++) wire[i] = wire[header_size + (i * 7 + changes) % (size - header_size)];
    if (kind == 3)
        for (uint64_t i = 0; i < size; i++) wire[i] *= factor;
}

/* Are these the exact sums times the factor, to within a rounding? The factor is what the header told. */
static int are_right(const lhc_plan *p, const float *y, const int64_t *sums, double factor) {
    for (uint64_t i = 0; i < p->numel; i++)
        if (y[i] != (float)((double)sums[i] / 64 * factor)) return 0;
    return 1;
}

/* A plan, gradients and their wires, all at random; decoded as they are, and after damage. */
static void fuzz_once(void) {
    const lhc_plan plan = random_plan();
    lhc_layout layout;
    if (lhc_plan_layout(&plan, &layout)) return;
    const uint64_t ranks = plan.world_size < MOST_RANKS ? plan.world_size : 1 + random_below(MOST_RANKS);
    float *x = allocate((size_t)plan.numel * sizeof *x), *y = allocate((size_t)plan.numel * sizeof *y);
    int64_t *sums = allocate((size_t)plan.numel * sizeof *sums);
    double *wire = allocate((size_t)layout.wire_size * sizeof *wire), *total = allocate((size_t)layout.wire_size * sizeof *total);
    lhc_header header;
    int valid;
    uint64_t keys;
    for (uint64_t r = 0; r < ranks; r++) {
        random_gradient(&plan, x, sums);
        check(lhc_encode(&layout, x, (int64_t)r, wire, &negative_zeros) == LHC_OK, "encode succeeds", "fuzzer");
        for (uint64_t i = 0; i < layout.wire_size; i++) total[i] += wire[i];
    }
    lhc_status status = lhc_decode(&layout, total, layout.wire_size, LHC_FLOAT32, y, &header, &valid, &keys);
    check(valid, "an undamaged header is valid", "fuzzer");
    if (status)
        check(status == LHC_ERR_OVER_CAPACITY || status == LHC_ERR_UNPEELED || status == LHC_ERR_OVERFLOW, "a known refusal",
              "fuzzer");
    else
        check(are_right(&plan, y, sums, 1), "undamaged wires decode to the sum", "fuzzer");
    if (!status && !negative_zeros) { /* in place of the last rank's gradient */
        check(!lhc_decode(&layout, total, layout.wire_size, LHC_FLOAT32, x, &header, &valid, &keys), "decodes again", "fuzzer");
        check(!memcmp(x, y, (size_t)plan.numel * sizeof *y), "in place as elsewhere", "fuzzer");
    }

    damage(total, layout.wire_size, layout.header_size);
    memset(y, 0, (size_t)plan.numel * sizeof *y);
    status = lhc_decode(&layout, total, layout.wire_size, LHC_FLOAT32, y, &header, &valid, &keys);
    check(status || are_right(&plan, y, sums, header.factor), "damaged wires are refused, or decode to the sum", "fuzzer");
    for (uint64_t i = 0, any = 0; status && i <= plan.numel; i++) {
        if (i == plan.numel) check(!any, "a refused wire leaves the output as it was", "fuzzer");
        else any |= y[i] != 0;
    }
    free(x);
    free(y);
    free(sums);
    free(wire);
    free(total);
}

/* Every test, with one instruction set after the other. */
int main(int argc, char **argv) {
    static const char *const sets[] = {"portable", "avx2", "avx512"};
    const long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : DEFAULT_ROUNDS;
    check(lhc_use_isa("abacus") == LHC_ERR_ISA, "an unknown instruction set is refused", "isa");
    for (size_t s = 0; s < sizeof sets / sizeof *sets; s++) {
        if (lhc_use_isa(sets[s])) {
            check(s > 0, "the portable one is there", "isa");
            continue;
        }
        check(!strcmp(lhc_isa_name(), sets[s]), "it is in use", sets[s]);
        for (size_t i = 0; i < sizeof golden_cases / sizeof *golden_cases; i++) check_golden(&golden_cases[i]);
        check_plans();
        check_arguments();
        for (long i = 0; i < rounds; i++) fuzz_once();
    }
    printf("%lu passed, %lu failed\n", passed, failed);
    return failed != 0;
}
