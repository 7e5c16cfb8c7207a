/* Which instruction set is in use: chosen once, by the processor or by HVD_LHC_ISA. */
#include <stdlib.h>
#include <string.h>

#include "batch.h"

static int has(const char *name) {
    if (!strcmp(name, "portable")) return 1;
#ifdef LHC_HAS_X86
    if (!strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    if (!strcmp(name, "avx512"))
        return has("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
    return 0;
}

static const lhc_isa *const sets[] = {
#ifdef LHC_HAS_X86
    &lhc_isa_avx512, &lhc_isa_avx2,
#endif
    &lhc_isa_portable};

static const lhc_isa *in_use; /* written with one of a few constants, so that it doesn't matter which thread is first */

const char *lhc_isa_name(void) { return lhc_isa_in_use()->name; }

lhc_status lhc_use_isa(const char *name) {
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if (name && *name && strcmp(name, sets[i]->name)) continue;
        if (!has(sets[i]->name)) {
            if (name && *name) return LHC_ERR_ISA;
            continue;
        }
        __atomic_store_n(&in_use, sets[i], __ATOMIC_RELEASE);
        return LHC_OK;
    }
    return LHC_ERR_ISA;
}

const lhc_isa *lhc_isa_in_use(void) {
    const lhc_isa *isa = __atomic_load_n(&in_use, __ATOMIC_ACQUIRE);
    if (isa) return isa;
    (void)lhc_use_isa(NULL);
    return __atomic_load_n(&in_use, __ATOMIC_ACQUIRE);
}
