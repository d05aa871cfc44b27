// Weights in 4 bits: a number from 0 to 15, and for each 32 neighbouring k of an output a scale and a minimum, in 16
// bits each: weight = scale * number + minimum. Few rows are multiplied by the numbers as they are, as integers; for
// many, a panel is unpacked once into the bfloat16 format.
#pragma once

#include "columns.h"
#include "gemm.h"
#include "matrix.h"
#include "quantize.h"

namespace antiphon {

constexpr int kMaxInt4Rows = kMaxTileRows * 2 / 3;  // three accumulators for a row, of half a panel

// A group of W outputs. A panel is all groups of its first W outputs, then those of the others.
struct Int4Group {
  f16 scales[W];
  f16 minima[W];
  uint32_t words[4][W];  // [i]: the numbers of k = 4 i .. 4 i + 3 in the lower halves of bytes, of k + 16 in the upper
};

ANTIPHON_INLINE const Int4Group* int4_groups(const Matrix& m, int64_t panel, int half) {
  return static_cast<const Int4Group*>(m.data) + (2 * panel + half) * (m.padded_k / kInt4Group);
}

// `groups` [padded_k / 32] for one half of a panel.
void pack_int4(const Columns& columns, int64_t size, Int4Group* groups);

void unpack_int4_row(const Matrix& m, int64_t row, float* out);

// With AMX: one panel by all rows as integers, in tiles of kInt4Group bytes; `room` is for its numbers.
void multiply_int4_panel(const Matrix& m, int64_t panel, const Rows& rows, int64_t num_rows, char* room,
                         const Output& out);

// With AMX: panels `first` to `last` by all rows in digits. Some panels are unpacked into `room` as bfloat16 numbers,
// then the rows pass by.
void multiply_unpacked(const Matrix& m, int64_t first, int64_t last, const Rows& rows, int64_t num_rows, char* room,
                       const Output& out);

// acc[r] += the product of R rows with W outputs, but for the scales of the rows.
template <int R>
ANTIPHON_INLINE void sum_int4_half(const Int4Group* group, int64_t num_groups, const Rows& rows, int64_t row,
                                   Vec (&acc)[R]) {
  const uint8_t* a = rows.numbers + 2 * row * rows.numbers_stride;
  const float* group_sums = rows.group_sums + row * rows.group_sums_stride;
  for (int64_t g = 0; g < num_groups; ++g, ++group, a += kInt4Group) {
    prefetch_bytes<sizeof(Int4Group)>(group);
    IVec high[R], low[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) high[r] = low[r] = IVec{};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      UVec words;
      memcpy(&words, group->words[i], sizeof words);
      const UVec lower = words & 0x0f0f0f0fu, upper = words >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const uint8_t* first = a + 2 * r * rows.numbers_stride + 4 * i;
        const uint8_t* second = first + rows.numbers_stride;
        add_dot4_small(high[r], first, lower);
        add_dot4_small(low[r], second, lower);
        add_dot4_small(high[r], first + 16, upper);
        add_dot4_small(low[r], second + 16, upper);
      }
    }
    const Vec scales = load(group->scales), minima = load(group->minima);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const IVec sum = finish_dot4_small(high[r]) * kHighUnit + finish_dot4_small(low[r]);
      acc[r] += __builtin_convertvector(sum, Vec) * scales;
      acc[r] += group_sums[r * rows.group_sums_stride + g] * minima;
    }
  }
}

template <int R>
ANTIPHON_INLINE void sum_int4(const Matrix& m, int64_t panel, const Rows& rows, int64_t row, Vec (&acc)[R][2]) {
  for (int half = 0; half < 2; ++half) {
    Vec sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = Vec{};
    sum_int4_half<R>(int4_groups(m, panel, half), m.padded_k / kInt4Group, rows, row, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r][half] = sums[r] * rows.scales[row + r];
  }
}

}  // namespace antiphon
