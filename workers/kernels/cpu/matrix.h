// A weight matrix [n, k] packed for products with few or many rows. Columns of the result are cut into panels of
// kPanel; a panel holds, for each group of 1 (fp32), 2 (bf16) or 4 (int8) neighbouring k, kPanel * group numbers: a
// product reads its weights once, front to back. Both paddings, of n to whole panels and of k to whole groups, are 0.
// Weights in 4 bits lie otherwise: int4.h; bf16 ones that are coded: coded.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"
#include "pool.h"
#include "simd.h"

namespace antiphon {

enum class Format : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

constexpr int kInt4Group = 32;  // k that share a scale and a minimum, see int4.h
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
constexpr int64_t kInt8Group = 64, kBf16Group = 32;  // k of one tile
#else
constexpr int64_t kInt8Group = 4, kBf16Group = 4;
#endif

constexpr int kNumCodes = 16;  // see coded.h

// A weight that has no code, and the one that its place in the panel was given.
struct RareWeight {
  int32_t place;  // in the panel, as the bf16 format has it
  bf16 weight, stand_in;

  int64_t k() const { return place / (2 * kPanel) * 2 + place % 2; }
  int lane() const { return place / 2 % kPanel; }
};

// What belongs to a matrix of coded weights.
struct Coding {
  Memory<uint8_t> tables;               // [num_panels][kNumCodes]
  std::vector<RareWeight> rare;         // of one panel after the other
  std::vector<int64_t> first_of_panel;  // [num_panels + 1]

  struct Range {
    const RareWeight *first, *last;
    const RareWeight* begin() const { return first; }
    const RareWeight* end() const { return last; }
  };
  Range of(int64_t panel) const {
    return {rare.data() + first_of_panel[panel], rare.data() + first_of_panel[panel + 1]};
  }
};

struct Matrix {
  Format format;
  // The rows of a gated matrix are n / 2 gates, then n / 2 ups; a panel holds W of each, so that a product can
  // combine them while they are in registers. `out_columns` is n, or n / 2 where gated.
  bool gated;
  bool exact;  // bf16: multiply by activations in fp32 however many rows there are
  int64_t n, k, padded_k, num_panels, out_columns;
  std::shared_ptr<char> memory;
  void* data;  // its start
  int64_t bytes;
  Memory<float> bias;           // [num_panels * kPanel] in packed order, or null
  Memory<float> scales;         // int8: weight = scale * number, per output
  Memory<int32_t> corrections;  // int8: what the zero point of the activations adds to each sum
  std::unique_ptr<Coding> coding;  // bf16: where the weights are coded

  int64_t padded_columns() const { return num_panels * (gated ? W : kPanel); }
  // The row of the unpacked matrix behind column `lane` of `panel`, -1 for padding.
  int64_t row_of(int64_t panel, int lane) const {
    if (!gated) return panel * kPanel + lane < n ? panel * kPanel + lane : -1;
    int64_t column = panel * W + lane % W;
    return column < n / 2 ? column + (lane < W ? 0 : n / 2) : -1;
  }
};

// Also of the Python side.
struct Packing {
  Format format;
  int32_t gated, exact;  // see Matrix
  int32_t coded;         // bf16: where few of the weights are rare, see coded.h
};

// Rows of `source` are `stride` apart. `bias` [n] may be null.
std::unique_ptr<Matrix> pack(Pool& pool, const Packing& packing, const float* source, int64_t n, int64_t k,
                             int64_t stride, const float* bias);

// Row `row` of the unpacked matrix, for embeddings that share the output head's weights.
void unpack_row(const Matrix& matrix, int64_t row, float* out);

}  // namespace antiphon
