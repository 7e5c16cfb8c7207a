/* For every processor; on 64-bit ARM the compiler makes NEON instructions of it, on x86-64 SSE2. */
#define LHC_ISA lhc_isa_portable
#define LHC_ISA_NAME "portable"
#include "batch_loops.h"
