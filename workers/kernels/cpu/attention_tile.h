// What both ways of computing a tile share: where it lies among queries and keys, and its softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"

namespace antiphon {

constexpr int64_t kScoreStride = kKeysPerChunk + 16;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Where a tile lies: queries at positions `position` ..., seeing keys `first_key` .. `end_key` - 1.
struct TilePlace {
  int64_t rows, group, position, first_key, end_key;
  int32_t window;

  TilePlace(const AttentionCall& call, const AttentionTask& task, int32_t window) : window(window) {
    const int32_t* first_query = call.batch.first_queries + task.seq;
    const int64_t offset = call.batch.seq_lens[task.seq] - (first_query[1] - first_query[0]);
    group = call.shape.group();
    rows = (task.last - task.first) * group;
    position = offset + task.first;
    first_key = first_key_of(0);
    end_key = offset + task.last;
  }

  int64_t position_of(int64_t row) const { return position + row / group; }
  int64_t first_key_of(int64_t row) const {
    return window > 0 ? std::max<int64_t>(0, position_of(row) - window + 1) : 0;
  }
};

// Sums [rows], `stride` apart, over their weights, to where the tile's rows lie.
inline void write_tile(const AttentionCall& call, const AttentionTask& task, const TilePlace& place, const float* sums,
                       int64_t stride, const float* weights) {
  const int64_t dim = call.shape.head_dim, first = call.batch.first_queries[task.seq] + task.first;
  float* first_head = call.out + task.kv_head * place.group * dim;
  for (int64_t r = 0; r < place.rows; ++r, sums += stride) {
    const float inverse = 1 / weights[r];
    float* out = first_head + (first + r / place.group) * call.out_stride + r % place.group * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] = sums[d] * inverse;
  }
}

// Scores [0, seen) of one row become weights, 0 outside [from, to); the row's sums are brought to the new maximum.
inline void soften_row(float* scores, int64_t from, int64_t to, int64_t seen, float soft_cap, float& largest,
                       float& weight, float* sums, int64_t dim) {
  const int64_t padded = round_up<int64_t>(seen, W);
  if (from >= to) {
    for (int64_t i = 0; i < padded; i += W) store(scores + i, Vec{});
    return;
  }
  if (soft_cap > 0) {
    for (int64_t i = 0; i < padded; i += W) store(scores + i, soft_cap * vtanh(load(scores + i) / soft_cap));
  }
  for (int64_t i = 0; i < from; ++i) scores[i] = kLowest;
  for (int64_t i = to; i < padded; ++i) scores[i] = kLowest;
  Vec highest = splat(largest);
  for (int64_t i = 0; i < padded; i += W) highest = vmax(load(scores + i), highest);
  const float now = max_lane(highest), factor = std::exp(largest - now);
  Vec total = Vec{};
  for (int64_t i = 0; i < padded; i += W) {
    Vec e = vexp_bounded(load(scores + i) - now);
    store(scores + i, e);
    total += e;
  }
  weight = weight * factor + sum_lanes(total);
  largest = now;
  if (factor != 1) {
    for (int64_t d = 0; d < dim; d += W) store(sums + d, load(sums + d) * factor);
  }
}

}  // namespace antiphon
