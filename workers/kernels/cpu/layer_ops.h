// What happens to one row between the products: norms, rotation, the way into the KV cache, the likeliest token. Rows
// of the decoder's own buffers are zero up to a multiple of W past their width; `exactly` rows of a caller's are not.
#pragma once

#include <limits>

#include "simd.h"

namespace antiphon {

// A layer's keys and values, strides in elements: any order of block, token and head.
struct Cache {
  void* k;
  void* v;
  int64_t block_stride, token_stride, head_stride;
  int32_t block_size;
  int32_t is_bfloat16;

  int64_t place(int64_t slot) const {
    return slot / block_size * block_stride + slot % block_size * token_stride;
  }
};

// out = x / rms(x) * weight; out may be x.
ANTIPHON_INLINE void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
  int64_t whole = size / W * W;
  Vec squares = Vec{};
  for (int64_t i = 0; i < whole; i += W) squares += load(x + i) * load(x + i);
  float sum = sum_lanes(squares);
  for (int64_t i = whole; i < size; ++i) sum += x[i] * x[i];
  float scale = 1 / std::sqrt(sum / size + eps);
  for (int64_t i = 0; i < whole; i += W) store(out + i, load(x + i) * scale * load(weight + i));
  for (int64_t i = whole; i < size; ++i) out[i] = x[i] * scale * weight[i];
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

// Puts one token's keys and values [kv_heads, head_dim] where its slot says.
ANTIPHON_INLINE void store_kv(const Cache& cache, int64_t slot, const float* k, const float* v, int64_t num_kv_heads,
                              int64_t head_dim) {
  int64_t place = cache.place(slot);
  for (int64_t h = 0; h < num_kv_heads; ++h, place += cache.head_stride, k += head_dim, v += head_dim) {
    if (cache.is_bfloat16) {
      convert(k, head_dim, static_cast<bf16*>(cache.k) + place);
      convert(v, head_dim, static_cast<bf16*>(cache.v) + place);
    } else {
      convert(k, head_dim, static_cast<float*>(cache.k) + place);
      convert(v, head_dim, static_cast<float*>(cache.v) + place);
    }
  }
}

// The first of the largest of x [size].
inline int64_t argmax(const float* x, int64_t size) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  Vec largest = splat(kLowest);
  int64_t whole = size / W * W;
  for (int64_t i = 0; i < whole; i += W) largest = vmax(load(x + i), largest);
  float best = max_lane(largest);
  for (int64_t i = whole; i < size; ++i) best = x[i] > best ? x[i] : best;
  for (int64_t i = 0; i < size; ++i) {
    if (x[i] == best) return i;
  }
  return 0;
}

}  // namespace antiphon
