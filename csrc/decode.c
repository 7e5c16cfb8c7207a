/* Decoding a reduced wire, check by check: docs/wire-format.md, section 7. */
#include <stdlib.h>

#include "lhc_internal.h"

lhc_status lhc_read_header(const lhc_layout *y, const double *wire, uint64_t wire_size, lhc_header *header) {
    lhc_scale scale;
    if (!y || !wire || !header) return LHC_ERR_ARGUMENT;
    if (wire_size != y->wire_size) return LHC_ERR_WIRE_SIZE;
    return lhc_check_header(y, wire, &scale, header);
}

static lhc_status decode_table(const lhc_layout *y, const double *wire, const lhc_scale *scale, uint32_t format,
                               const lhc_header *header, float *out, uint64_t *union_keys) {
    const double *digits = wire + y->header_size, *cells = digits + y->bitmap_size;
    lhc_table table = {y, NULL};
    lhc_output output;
    lhc_status status = lhc_output_open(&output, y, header, format);
    if (!status) status = lhc_table_load(&table, cells, scale);
    if (!status) status = lhc_table_check_parity(&table);
    if (!status)
        status = y->plan.index == LHC_INDEX_KEYED
                     ? lhc_peel_keyed(&table, header, &output, union_keys)
                     : lhc_peel_bitmap(&table, digits, header, &output, union_keys);
    if (!status) status = lhc_output_write(&output, out);
    lhc_output_close(&output);
    free(table.cells);
    return status;
}

lhc_status lhc_decode(const lhc_layout *y, const double *wire, uint64_t wire_size, uint32_t format, float *out,
                      lhc_header *header, int *header_valid, uint64_t *union_keys) {
    lhc_scale scale;
    if (!y || !wire || !out || !header || !header_valid || !union_keys || format > LHC_BFLOAT16)
        return LHC_ERR_ARGUMENT;
    *header_valid = 0;
    *union_keys = 0;
    if (wire_size != y->wire_size) return LHC_ERR_WIRE_SIZE;
    lhc_status status = lhc_check_header(y, wire, &scale, header);
    if (status) return status;
    *header_valid = 1;
    status = lhc_header_refusal(y, header);
    if (status) return status;
    return decode_table(y, wire, &scale, format, header, out, union_keys);
}
