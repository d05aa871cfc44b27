// Products of activations with packed weights, and what is done with a result while it is in registers.
#pragma once

#include "digits.h"
#include "matrix.h"
#include "pool.h"

namespace antiphon {

// Rows of activations. `values` always; the others where the matrix's format is multiplied in that precision. A row of
// `values` is readable, as 0, from its width up to a multiple of kPanel.
struct Rows {
  const float* values;
  int64_t stride;
  const uint8_t* numbers;  // quantised, see quantize.h: two rows for one, the high numbers first
  int64_t numbers_stride;
  const float* scales;
  const float* group_sums;  // of the numbers, where the format has groups of k
  int64_t group_sums_stride;
  DigitRows digits;
  char* unpacked;  // room of each thread for weights that are unpacked first, `unpacked_stride` bytes each
  int64_t unpacked_stride;
};

enum class Then : int32_t {
  kStore = 0,
  kAdd = 1,          // to what is there
  kSiluTimesUp = 2,  // gated matrices only
  kGeluTimesUp = 3,
  kSoftCap = 4,
};

struct Output {
  float* data;
  int64_t stride;
  int64_t columns;  // writable; a multiple of kPanel (W where gated) is fastest
  Then then;
  float soft_cap = 0;
  DigitRows digits = {};  // instead of `data`: as a later product wants its rows; any columns are writable
};

// out = rows [m, k] times the matrix's transpose, plus its bias. All threads of the pool take part.
void multiply(Pool& pool, const Matrix& matrix, const Rows& rows, int64_t m, const Output& out);

// That `matrix` is multiplied by after the pool's next loop: what its threads read first, where there are few rows, is
// fetched while they wait.
void expect(Pool& pool, const Matrix& matrix);

// Whether the products of many rows go through tile registers here; asks the system for them once.
bool amx_available();

// Whether m rows are multiplied as integers.
bool wants_numbers(const Matrix& matrix, int64_t m);
// x [k] as those integers, see quantize_row, and the sums of the matrix's groups of them; returns the scale.
float quantize_for(const Matrix& matrix, const float* x, uint8_t* high, uint8_t* low, float* group_sums);
// In how many bfloat16 numbers each of m rows is multiplied; 0: as it is.
int num_digits_wanted(const Matrix& matrix, int64_t m);
// Bytes that each thread needs room for where the matrix is unpacked for many rows; else 0.
int64_t unpacked_size(const Matrix& matrix);

// Weights are read once, front to back: what comes next is fetched as far as the second cache, early enough.
constexpr int64_t kPrefetchAhead = 5120;
ANTIPHON_INLINE void prefetch_weights(const void* weights) {
  prefetch_to_second_cache(static_cast<const char*>(weights) + kPrefetchAhead);
  if (W == 16) prefetch_to_second_cache(static_cast<const char*>(weights) + kPrefetchAhead + 64);
}

// The same where Bytes are read at a time.
template <int64_t Bytes>
ANTIPHON_INLINE void prefetch_bytes(const void* weights) {
#pragma GCC unroll 16
  for (int64_t line = 0; line < Bytes; line += 64) {
    prefetch_to_second_cache(static_cast<const char*>(weights) + kPrefetchAhead + line);
  }
}

}  // namespace antiphon
