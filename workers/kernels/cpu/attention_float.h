// One query token over keys and values that are widened to floats, whatever they are kept in: the scores of a chunk of
// keys, and the sums of a chunk of values.
#pragma once

#include <algorithm>

#include "attention.h"

namespace antiphon {

// Scores [R, kKeysPerChunk] of R heads. `places` [2, kKeysPerChunk]: those of the keys, then of those to be fetched
// meanwhile, all of them real ones. N: vectors per head, 0 where the count is not known when this is compiled.
template <typename T, int R, int N>
ANTIPHON_INLINE void score(const float* q, const T* keys, const int64_t* places, int64_t n, int64_t size,
                           float* scores) {
  const int64_t dim = N > 0 ? N * W : size;
  for (int64_t i = 0; i < n; i += W) {
    const int64_t count = std::min<int64_t>(W, n - i);
    Vec products[R][W];
    for (int64_t j = 0; j < count; ++j) {
      const T* key = keys + places[i + j];
      prefetch_row(keys + places[i + j + kKeysPerChunk], dim);
      Vec sums[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r] = Vec{};
#pragma GCC unroll 8
      for (int64_t d = 0; d < dim; d += W) {
        const Vec k = load(key + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r] += load(q + r * dim + d) * k;
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) products[r][j] = sums[r];
    }
    for (int64_t j = count; j < W; ++j) {
      for (int r = 0; r < R; ++r) products[r][j] = Vec{};
    }
    for (int r = 0; r < R; ++r) store(scores + r * kKeysPerChunk + i, sum_each(products[r]));
  }
}

// Multiplies number j of each head by scale j.
template <int R>
ANTIPHON_INLINE void multiply_by_scales(float* scores, const float* scales, int64_t n) {
  for (int64_t i = 0; i < n; i += W) {
    for (int r = 0; r < R; ++r) {
      float* place = scores + r * kKeysPerChunk + i;
      store(place, load(place) * load(scales + i));
    }
  }
}

// sums [R][dim], S vectors of each: sums * factor + weights * values.
template <typename T, int R, int S>
ANTIPHON_INLINE void add_segment(const float* scores, const T* values, const int64_t* places, int64_t n, int64_t dim,
                                 const float* factors, float* sums) {
  Vec acc[R][S];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) acc[r][s] = load(sums + r * dim + s * W) * factors[r];
  }
  for (int64_t j = 0; j < n; ++j) {
    const T* value = values + places[j];
    prefetch_row(values + places[j + kKeysPerChunk], S * W);
    Vec v[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) v[s] = load(value + s * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float p = scores[r * kKeysPerChunk + j];
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) acc[r][s] += p * v[s];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) store(sums + r * dim + s * W, acc[r][s]);
  }
}

}  // namespace antiphon
