// The rows of a weight matrix as columns of a panel: what packing reads, in any format.
#pragma once

#include "simd.h"

namespace antiphon {

// W columns of a panel: their rows of the source, null for padding.
struct Columns {
  const float* rows[W];
};

// k .. k + W - 1 of all columns, one vector for each k; 0 from `size` on.
ANTIPHON_INLINE void gather(const Columns& columns, int64_t k, int64_t size, Vec* out) {
  Vec square[W];
  for (int lane = 0; lane < W; ++lane) {
    const float* row = columns.rows[lane];
    if (row != nullptr && k + W <= size) {
      square[lane] = load(row + k);
    } else {
      for (int i = 0; i < W; ++i) square[lane][i] = row != nullptr && k + i < size ? row[k + i] : 0;
    }
  }
  transpose(square);
  for (int i = 0; i < W; ++i) out[i] = square[i];
}

}  // namespace antiphon
