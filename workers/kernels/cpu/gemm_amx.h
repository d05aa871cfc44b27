// The panels of a product in AMX's tile registers.
#pragma once

#include "amx.h"
#include "gemm.h"

namespace antiphon {

// Panels first .. last - 1 of all m rows, whose numbers or digits must be there. Once `amx_available()`, and only then.
// `room`: of this thread, for weights that are unpacked.
void multiply_in_tiles(const Matrix& matrix, int64_t first, int64_t last, const Rows& rows, int64_t m, char* room,
                       const Output& out);

// The same within an AmxScope, by rows in digits and by weights that lie elsewhere than in the matrix: of these panels,
// one after the other.
void multiply_digits(const Matrix& matrix, const bf16* weights, int64_t first, int64_t last, const Rows& rows,
                     int64_t m, const Output& out);

}  // namespace antiphon
