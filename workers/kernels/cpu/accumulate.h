// The innermost loop of the products in float32: a tile of R rows by one panel of weights, its sums in registers.
#pragma once

#include "gemm.h"

namespace antiphon {

// Where R <= 12 rows are read. A pointer to each of them would be more than there are registers for: one serves three.
template <int R>
class RowPointers {
 public:
  ANTIPHON_INLINE RowPointers(const float* rows, int64_t stride)
      : first_(rows), second_(rows + 3 * stride), third_(second_ + 3 * stride), fourth_(third_ + 3 * stride),
        stride_(stride) {
    static_assert(R <= 12);
    advance(0);
  }
  ANTIPHON_INLINE const float* at(int row) const {
    return (row < 3 ? first_ : row < 6 ? second_ : row < 9 ? third_ : fourth_) + row % 3 * stride_;
  }
  ANTIPHON_INLINE void advance(int64_t count) {
    move(first_, count);
    if (R > 3) move(second_, count);
    if (R > 6) move(third_, count);
    if (R > 9) move(fourth_, count);
  }

 private:
  ANTIPHON_INLINE static void move(const float*& pointer, int64_t count) {
    pointer += count;
    asm("" : "+r"(pointer));  // the compiler would make one of each row after all
  }

  const float *first_, *second_, *third_, *fourth_;
  int64_t stride_;
};

template <int R>
ANTIPHON_INLINE void add_products(const RowPointers<R>& rows, int k, Vec w0, Vec w1, Vec (&acc)[R][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const float x = rows.at(r)[k];
    acc[r][0] += x * w0;
    acc[r][1] += x * w1;
  }
}

// acc[r] += sum over k of a[r * lda + k] * weights[k], the weights [k][kPanel]. Shared with attention.
// fetch(weights) is called for each k.
template <int R, typename Fetch>
ANTIPHON_INLINE void accumulate(const float* a, int64_t lda, const float* weights, int64_t k, Vec (&acc)[R][2],
                                const Fetch& fetch) {
  RowPointers<R> rows(a, lda);
  constexpr int kAtOnce = R > 3 ? 2 : 1;  // fewer rows wait for memory, which this loop then asks in smaller steps
  for (; k >= kAtOnce; k -= kAtOnce, weights += kAtOnce * kPanel, rows.advance(kAtOnce)) {
#pragma GCC unroll 2
    for (int i = 0; i < kAtOnce; ++i) {
      fetch(weights + i * kPanel);
      add_products<R>(rows, i, load(weights + i * kPanel), load(weights + i * kPanel + W), acc);
    }
  }
  if (k > 0) add_products<R>(rows, 0, load(weights), load(weights + W), acc);
}

}  // namespace antiphon
