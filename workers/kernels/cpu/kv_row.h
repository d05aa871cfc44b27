// A layer's keys and values in the paged cache: where a token's rows lie, and how the numbers of one head are kept in a
// row. In int8 the row's scale, a float32, follows its numbers: whoever copies or shares blocks need not know.
// workers/kv_format.py says the same in PyTorch.
#pragma once

#include <type_traits>

#include "simd.h"

namespace antiphon {

enum class KvFormat : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Strides in elements (bytes, in int8): any order of block, token and head.
struct Cache {
  void* k;
  void* v;
  int64_t block_stride, token_stride, head_stride;
  int32_t block_size;
  KvFormat format;

  int64_t place(int64_t slot) const {
    return slot / block_size * block_stride + slot % block_size * token_stride;
  }
};

// body(T{}) with the type of the cache's numbers.
template <typename Body>
ANTIPHON_INLINE void with_format(KvFormat format, const Body& body) {
  switch (format) {
    case KvFormat::kFloat32: return body(float{});
    case KvFormat::kBfloat16: return body(bf16{});
    case KvFormat::kInt8: return body(int8_t{});
  }
}

template <typename T>
constexpr bool kHasScale = std::is_same_v<T, int8_t>;

// What the numbers of a row must be multiplied by.
template <typename T>
ANTIPHON_INLINE float row_scale(const T* row, int64_t dim) {
  if constexpr (kHasScale<T>) {
    float scale;
    memcpy(&scale, row + dim, 4);
    return scale;
  } else {
    return 1;
  }
}

template <typename T>
ANTIPHON_INLINE void prefetch_row(const T* row, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 64 / static_cast<int64_t>(sizeof(T))) prefetch_to_second_cache(row + i);
  if constexpr (kHasScale<T>) prefetch_to_second_cache(row + dim);  // such rows do not begin with a line
}

template <typename T>
ANTIPHON_INLINE void store_row(const float* x, int64_t dim, T* row) {
  int64_t i = 0;
  for (; i + W <= dim; i += W) store(row + i, load(x + i));
  for (; i < dim; ++i) assign(row[i], x[i]);
}

ANTIPHON_INLINE void store_row(const float* x, int64_t dim, int8_t* row) {
  const int64_t whole = dim / W * W;
  Vec highest = Vec{};
  for (int64_t i = 0; i < whole; i += W) highest = vmax(vabs(load(x + i)), highest);
  float largest = max_lane(highest);
  for (int64_t i = whole; i < dim; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  const float scale = largest / 127;
  const float inverse = scale > 1e-30f ? 1 / scale : 0;  // a reciprocal of less would be infinite
  for (int64_t i = 0; i < whole; i += W) store(row + i, round_to_int(load(x + i) * inverse));
  for (int64_t i = whole; i < dim; ++i) row[i] = static_cast<int8_t>(std::lrint(x[i] * inverse));
  memcpy(row + dim, &scale, 4);
}

// Puts one token's keys and values [kv_heads, head_dim] where its slot says.
ANTIPHON_INLINE void store_kv(const Cache& cache, int64_t slot, const float* k, const float* v, int64_t num_kv_heads,
                              int64_t head_dim) {
  with_format(cache.format, [&](auto number) {
    using T = decltype(number);
    int64_t place = cache.place(slot);
    for (int64_t h = 0; h < num_kv_heads; ++h, place += cache.head_stride) {
      store_row(k + h * head_dim, head_dim, static_cast<T*>(cache.k) + place);
      store_row(v + h * head_dim, head_dim, static_cast<T*>(cache.v) + place);
    }
  });
}

}  // namespace antiphon
