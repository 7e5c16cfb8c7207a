/* What a status means, for people. */
#include "lhc_internal.h"

const char *lhc_status_text(lhc_status status) {
    switch (status) {
    case LHC_OK: return "success";
    case LHC_ERR_NUMEL: return "numel must lie in 1 .. 2^48";
    case LHC_ERR_WORLD_SIZE: return "world_size must lie in 1 .. 4096";
    case LHC_ERR_CAPACITY: return "capacity must lie in 1 .. 2^31 - 1";
    case LHC_ERR_INDEX: return "index must be none, keyed or bitmap";
    case LHC_ERR_BLOCK: return "block must lie in 1 .. numel";
    case LHC_ERR_PARTS: return "parts must be 1 or 2";
    case LHC_ERR_EXPONENT: return "exponent must lie in -148 .. 128";
    case LHC_ERR_PROBE_BLOCK: return "probe_block must lie in 1 .. numel";
    case LHC_ERR_COUNT_RANGE: return "numel times world_size is too large to be counted in one cell";
    case LHC_ERR_INDEX_LANES: return "the keyed index does not fit two lanes";
    case LHC_ERR_WIRE_RANGE: return "the wire would be larger than the address space";
    case LHC_ERR_WIRE_SIZE: return "the wire has another size than the plan says";
    case LHC_ERR_OTHER_PLAN: return "the wire was encoded under another plan, or ranks used different plans";
    case LHC_ERR_NOT_FINITE: return "the wire holds NaN or infinity";
    case LHC_ERR_NOT_LINEAR: return "the wire is no sum of the ranks' wires";
    case LHC_ERR_NOT_INTEGER: return "the wire holds a number that is no integer after unscaling";
    case LHC_ERR_CHECKSUM: return "the header's checksum is wrong";
    case LHC_ERR_NONFINITE: return "a rank's gradient holds NaN or infinity";
    case LHC_ERR_OVERFLOW: return "a rank's gradient holds elements beyond the plan's exponent";
    case LHC_ERR_OVER_CAPACITY: return "a rank has more nonzero keys than the plan's capacity";
    case LHC_ERR_INEXACT: return "a rank's gradient holds elements that the value lanes can't hold exactly";
    case LHC_ERR_HEADER_ONLY: return "the plan carries a header and no gradient";
    case LHC_ERR_PARITY: return "the cells of the three segment classes have different sums";
    case LHC_ERR_UNPEELED: return "the table can't be peeled: more distinct keys than it can hold, or damaged cells";
    case LHC_ERR_COUNT: return "the counts of keys do not match the header";
    case LHC_ERR_ARGUMENT: return "an argument is out of range";
    case LHC_ERR_ISA: return "this processor, or this build, doesn't have that instruction set";
    case LHC_ERR_MEMORY: return "not enough memory";
    }
    return "unknown status";
}
