// The panels of a product in vector registers, on any CPU.
#pragma once

#include "gemm.h"

namespace antiphon {

// Bytes of a panel of bfloat16 numbers in float32, as many rows are multiplied by it; 0 where it would not stay near a
// core.
int64_t widened_size(const Matrix& matrix);

// One panel of rows first .. last - 1. `room`: of this thread, for weights that are widened.
void multiply_panel(const Matrix& matrix, int64_t panel, const Rows& rows, int64_t first, int64_t last, char* room,
                    const Output& out);

}  // namespace antiphon
