// Activations as sums of bfloat16 numbers, each of which takes 8 more bits: three of them hold a float32 as it is. They
// lie as the tiles of AMX read them: of 16 rows and 32 k one tile, and those of its digits one after the other.
#pragma once

#include "simd.h"

namespace antiphon {

constexpr int kMostDigits = 3;

struct DigitRows {
  static constexpr int64_t kRows = 16, kDepth = 32, kTile = kRows * kDepth;  // of a tile

  bf16* start = nullptr;
  int64_t stride = 0;  // of k, whole tiles
  int num_digits = 0;  // of each value; 0: there are none

  // A row's first digit of k; the others are `kTile` apart.
  ANTIPHON_INLINE bf16* at(int64_t row, int64_t k) const {
    const int64_t tile = row / kRows * (stride / kDepth) + k / kDepth;
    return start + tile * num_digits * kTile + row % kRows * kDepth + k % kDepth;
  }

  // From row `first`, a multiple of kRows, on.
  DigitRows from(int64_t first) const { return {start + first * stride * num_digits, stride, num_digits}; }

  // W neighbouring k, from a multiple of W on.
  ANTIPHON_INLINE void put(int64_t row, int64_t k, Vec v) const {
    put_at(at(row, k), num_digits, v);
  }

  // x [k], and 0 from k to padded_k. x is readable, as 0, up to a multiple of W.
  ANTIPHON_INLINE void put_row(int64_t row, const float* x, int64_t k, int64_t padded_k) const {
    switch (num_digits) {
      case 1: return put_row_of<1>(row, x, k, padded_k);
      case 2: return put_row_of<2>(row, x, k, padded_k);
      case 3: return put_row_of<3>(row, x, k, padded_k);
    }
  }

 private:
  ANTIPHON_INLINE static void put_at(bf16* digit, int num_digits, Vec v) {
    store(digit, v);
    for (int i = 1; i < num_digits; ++i) {
      v -= load(digit);
      digit += kTile;
      store(digit, v);
    }
  }

  template <int Digits>
  ANTIPHON_INLINE void put_row_of(int64_t row, const float* x, int64_t k, int64_t padded_k) const {
    bf16* tile = at(row, 0);
    for (int64_t i = 0; i < padded_k; i += kDepth, tile += Digits * kTile) {
#pragma GCC unroll 8
      for (int64_t j = 0; j < kDepth; j += W) put_at(tile + j, Digits, i + j < k ? load(x + i + j) : Vec{});
    }
  }
};

}  // namespace antiphon
