// What both ways of computing a tile share: where it lies among queries and keys, and its softmax.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"

namespace antiphon {

constexpr int64_t kScoreStride = kKeysPerChunk + 16;

// Where a tile lies: queries at positions `position` ..., seeing keys `first_key` .. `end_key` - 1.
struct TilePlace {
  int64_t rows, group, position, first_key, end_key;
  int64_t first_token, first_head, dim;  // of its queries
  int32_t window;

  TilePlace(const AttentionCall& call, const AttentionTask& task, int32_t window) : window(window) {
    const int32_t* first_query = call.batch.first_queries + task.seq;
    const int64_t offset = call.batch.seq_lens[task.seq] - (first_query[1] - first_query[0]);
    group = call.shape.group();
    rows = (task.last - task.first) * group;
    position = offset + task.first;
    first_key = first_key_of(0);
    end_key = offset + task.last;
    first_token = *first_query + task.first;
    first_head = task.kv_head * group;
    dim = call.shape.head_dim;
  }

  // Of a row among tokens `stride` apart, each [heads, dim].
  int64_t offset_of(int64_t row, int64_t stride) const {
    return (first_token + row / group) * stride + (first_head + row % group) * dim;
  }
  int64_t position_of(int64_t row) const { return position + row / group; }
  int64_t first_key_of(int64_t row) const {
    return window > 0 ? std::max<int64_t>(0, position_of(row) - window + 1) : 0;
  }
};

// Sums [rows], `stride` apart, over their weights, to where the tile's rows lie.
inline void write_tile(const AttentionCall& call, const TilePlace& place, const float* sums, int64_t stride,
                       const float* weights) {
  for (int64_t r = 0; r < place.rows; ++r, sums += stride) {
    const float inverse = 1 / weights[r];
    float* out = call.out + place.offset_of(r, call.out_stride);
    int64_t d = 0;
    for (; d + W <= place.dim; d += W) store(out + d, load(sums + d) * inverse);
    for (; d < place.dim; ++d) out[d] = sums[d] * inverse;
  }
}

// Scores [0, seen) of one row become weights, 0 outside [from, to); put(i, W weights) takes them one after the other.
// The row's sums are brought to the new maximum.
template <typename Put>
ANTIPHON_INLINE void soften_row(float* scores, int64_t from, int64_t to, int64_t seen, float soft_cap, float& largest,
                                float& weight, float* sums, int64_t dim, const Put& put) {
  const int64_t padded = round_up<int64_t>(seen, W);
  if (from >= to) {
    for (int64_t i = 0; i < padded; i += W) put(i, Vec{});
    return;
  }
  if (soft_cap > 0) {
    for (int64_t i = 0; i < padded; i += W) store(scores + i, soft_cap * vtanh(load(scores + i) / soft_cap));
  }
  for (int64_t i = 0; i < from; ++i) scores[i] = kLowest;
  for (int64_t i = to; i < padded; ++i) scores[i] = kLowest;
  Vec highest = splat(largest);
  for (int64_t i = 0; i < padded; i += W) highest = vmax(load(scores + i), highest);
  const float now = max_lane(highest);
  Vec total = Vec{};
  for (int64_t i = 0; i < padded; i += W) {
    const Vec e = vexp_bounded(load(scores + i) - now);
    put(i, e);
    total += e;
  }
  const bool is_larger = now != largest;
  const Vec factor = is_larger ? vexp_bounded(splat(largest - now)) : splat(1.0f);
  weight = weight * factor[0] + sum_lanes(total);
  largest = now;
  if (is_larger) {
    for (int64_t d = 0; d < dim; d += W) store(sums + d, load(sums + d) * factor);
  }
}

}  // namespace antiphon
