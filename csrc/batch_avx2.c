/* The loops with AVX2. */
#include "batch.h"
#ifdef LHC_HAS_X86
#pragma GCC target("avx2,bmi,bmi2")
#define LHC_ISA lhc_isa_avx2
#define LHC_ISA_NAME "avx2"
#include "batch_loops.h"
#else
typedef int lhc_no_avx2; /* a translation unit must not be empty */
#endif
