// The panels of a product in AMX's tile registers.
#pragma once

#include "amx.h"
#include "gemm.h"

namespace antiphon {

// Panels first .. last - 1 of all m rows, whose numbers or digits must be there. Once `amx_available()`, and only then.
void multiply_in_tiles(const Matrix& matrix, int64_t first, int64_t last, const Rows& rows, int64_t m,
                       const Output& out);

}  // namespace antiphon
