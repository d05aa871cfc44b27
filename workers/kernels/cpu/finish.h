// What is done with a result while it is in registers: bias, activation, and where it goes.
#pragma once

#include "gemm.h"
#include "quantize.h"

namespace antiphon {

ANTIPHON_INLINE void write(const Output& out, int64_t row, int64_t column, Vec v) {
  if (out.digits.num_digits > 0) {
    out.digits.put(row, column, v);
    return;
  }
  float* target = out.data + row * out.stride + column;
  if (column + W <= out.columns) {
    store(target, out.then == Then::kAdd ? load(target) + v : v);
    return;
  }
  for (int lane = 0; lane < W && column + lane < out.columns; ++lane) {
    target[lane] = out.then == Then::kAdd ? target[lane] + v[lane] : v[lane];
  }
}

// The sums of the high numbers and those of the low ones become one row of results.
ANTIPHON_INLINE void dequantise(const Matrix& m, int64_t panel, float row_scale, const IVec (&high)[2],
                                const IVec (&low)[2], Vec& c0, Vec& c1) {
  IVec corrections[2];
  Vec scales[2], results[2];
  memcpy(corrections, m.corrections.get() + panel * kPanel, sizeof corrections);
  memcpy(scales, m.scales.get() + panel * kPanel, sizeof scales);
  for (int i = 0; i < 2; ++i) {
    const Vec upper = __builtin_convertvector(high[i] - corrections[i], Vec) * kHighUnit;
    results[i] = (upper + __builtin_convertvector(low[i] - corrections[i], Vec)) * (scales[i] * row_scale);
  }
  c0 = results[0];
  c1 = results[1];
}

// The two vectors of one row and panel.
ANTIPHON_INLINE void finish(const Matrix& m, int64_t panel, const Output& out, int64_t row, Vec c0, Vec c1) {
  if (m.bias != nullptr) {
    c0 += load(m.bias.get() + panel * kPanel);
    c1 += load(m.bias.get() + panel * kPanel + W);
  }
  if (m.gated) {
    write(out, row, panel * W, (out.then == Then::kSiluTimesUp ? silu(c0) : gelu_tanh(c0)) * c1);
    return;
  }
  if (out.then == Then::kSoftCap) {
    c0 = out.soft_cap * vtanh(c0 / out.soft_cap);
    c1 = out.soft_cap * vtanh(c1 / out.soft_cap);
  }
  write(out, row, panel * kPanel, c0);
  write(out, row, panel * kPanel + W, c1);
}

}  // namespace antiphon
