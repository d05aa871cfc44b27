// What happens to one row between the products: norms and rotation. Rows of the decoder's own buffers are zero up to a
// multiple of W past their width; `exactly` rows of a caller's are not.
#pragma once

#include "simd.h"

namespace antiphon {

// out = x / rms(x) * weight; out may be x.
ANTIPHON_INLINE void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
  int64_t whole = size / W * W;
  Vec squares[4] = {};  // the result of one sum is there after four cycles
  int64_t i = 0;
  for (; i + 4 * W <= whole; i += 4 * W) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) squares[j] += load(x + i + j * W) * load(x + i + j * W);
  }
  for (; i < whole; i += W) squares[0] += load(x + i) * load(x + i);
  float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < size; ++i) sum += x[i] * x[i];
  float scale = 1 / std::sqrt(sum / size + eps);
  for (i = 0; i < whole; i += W) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

// Turns the halves (a, b) of a head to (a cos - b sin, b cos + a sin), in place.
ANTIPHON_INLINE void rotate_head(float* head, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    Vec a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    float a = head[i], b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[i] + a * sin[i];
  }
}

template <typename T>
ANTIPHON_INLINE void convert(const float* x, int64_t size, T* out) {
  int64_t i = 0;
  for (; i + W <= size; i += W) store(out + i, load(x + i));
  for (; i < size; ++i) assign(out[i], x[i]);
}

}  // namespace antiphon
