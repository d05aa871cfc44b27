// One query token: a pass over its keys for the scores, a pass over the values, a chunk of keys at a time, with the
// softmax kept up as it goes (Milakov and Gimelshein, arXiv 1805.02867). Every key is read from memory once: the query
// heads of a group are multiplied by it together.
#include <algorithm>

#include "attention.h"

namespace antiphon {
namespace {

constexpr int kHeadsAtOnce = 4;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct DecodeMemory {
  float* q;        // [H, D], scaled
  float* sums;     // [H, D], unnormalised
  float* largest;  // [H]
  float* weights;  // [H]
  float* scores;   // [kHeadsAtOnce, kKeysPerChunk]
  int64_t* places;  // [kKeysPerChunk]

  DecodeMemory(float* memory, const AttentionShape& shape) {
    const int64_t size = shape.num_heads * shape.head_dim, heads = round_up<int64_t>(shape.num_heads, 16);
    places = reinterpret_cast<int64_t*>(memory);
    scores = memory + 2 * kKeysPerChunk;
    q = scores + kHeadsAtOnce * kKeysPerChunk;
    sums = q + size;
    largest = sums + size;
    weights = largest + heads;
  }
};

template <typename T>
ANTIPHON_INLINE void prefetch_row(const T* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T))) prefetch(row + i);
}

// N: vectors per head, 0 where the count is not known when this is compiled.
template <typename T, int R, int N>
ANTIPHON_INLINE void score(const float* q, const T* keys, const T* values, const int64_t* places, int64_t n, int64_t size,
                           float* scores) {
  const int64_t dim = N > 0 ? N * W : size;
  for (int64_t i = 0; i < n; i += W) {
    const int64_t count = std::min<int64_t>(W, n - i);
    Vec products[R][W];
    for (int64_t j = 0; j < count; ++j) {
      const T* key = keys + places[i + j];
      const int64_t ahead = i + j + W;
      prefetch_row(ahead < n ? keys + places[ahead] : values + places[j], dim);
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

// Scores become weights; returns by what earlier sums must be multiplied.
ANTIPHON_INLINE float soften(float* scores, int64_t n, float soft_cap, float& largest, float& weight) {
  const int64_t padded = round_up<int64_t>(n, W);
  Vec highest = splat(largest);
  for (int64_t i = 0; i < padded; i += W) {
    Vec s = load(scores + i);
    if (soft_cap > 0) s = soft_cap * vtanh(s / soft_cap);
    if (i + W > n) {
      for (int lane = 0; lane < W; ++lane) s[lane] = i + lane < n ? s[lane] : kLowest;
    }
    highest = vmax(s, highest);
    store(scores + i, s);
  }
  const float now = max_lane(highest), factor = std::exp(largest - now);
  Vec total = Vec{};
  for (int64_t i = 0; i < padded; i += W) {
    Vec e = vexp_bounded(load(scores + i) - now);
    store(scores + i, e);
    total += e;
  }
  largest = now;
  weight = weight * factor + sum_lanes(total);
  return factor;
}

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
    if (j + W < n) prefetch_row(values + places[j + W], S * W);
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

template <typename T, int R>
void add_chunk(const DecodeMemory& memory, int64_t head, const T* keys, const T* values, int64_t n, int64_t dim,
               float soft_cap) {
  const float* q = memory.q + head * dim;
  if (dim == 4 * W) {
    score<T, R, 4>(q, keys, values, memory.places, n, dim, memory.scores);
  } else if (dim == 8 * W) {
    score<T, R, 8>(q, keys, values, memory.places, n, dim, memory.scores);
  } else {
    score<T, R, 0>(q, keys, values, memory.places, n, dim, memory.scores);
  }
  float factors[R];
  for (int r = 0; r < R; ++r) {
    factors[r] = soften(memory.scores + r * kKeysPerChunk, n, soft_cap, memory.largest[head + r], memory.weights[head + r]);
  }
  float* sums = memory.sums + head * dim;
  int64_t d = 0;
  for (; d + 4 * W <= dim; d += 4 * W) {
    add_segment<T, R, 4>(memory.scores, values + d, memory.places, n, dim, factors, sums + d);
  }
  for (; d < dim; d += W) {
    add_segment<T, R, 1>(memory.scores, values + d, memory.places, n, dim, factors, sums + d);
  }
}

template <typename T>
void add_keys(const AttentionCall& call, const AttentionTask& task, const DecodeMemory& memory) {
  const AttentionShape& shape = call.shape;
  const int32_t* blocks = call.batch.block_tables + task.seq * call.batch.block_table_stride;
  const int64_t block_size = call.cache.block_size, group = shape.group(), dim = shape.head_dim;
  const int64_t batches = (group + kHeadsAtOnce - 1) / kHeadsAtOnce;
  for (int64_t start = task.first; start < task.last; start += kKeysPerChunk) {
    const int64_t n = std::min<int64_t>(kKeysPerChunk, task.last - start);
    int64_t block = start / block_size, offset = start % block_size;
    for (int64_t j = 0; j < n; ++j) {
      memory.places[j] = blocks[block] * call.cache.block_stride + offset * call.cache.token_stride;
      if (++offset == block_size) ++block, offset = 0;
    }
    for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const T* keys = static_cast<const T*>(call.cache.k) + kv_head * call.cache.head_stride;
      const T* values = static_cast<const T*>(call.cache.v) + kv_head * call.cache.head_stride;
      for (int64_t i = 0; i < batches; ++i) {
        const int64_t from = group * i / batches, to = group * (i + 1) / batches, head = kv_head * group + from;
        switch (to - from) {
          case 1: add_chunk<T, 1>(memory, head, keys, values, n, dim, call.soft_cap); break;
          case 2: add_chunk<T, 2>(memory, head, keys, values, n, dim, call.soft_cap); break;
          case 3: add_chunk<T, 3>(memory, head, keys, values, n, dim, call.soft_cap); break;
          default: add_chunk<T, 4>(memory, head, keys, values, n, dim, call.soft_cap); break;
        }
      }
    }
  }
}

void write_out(const AttentionShape& shape, const float* sums, const float* weights, float* out) {
  for (int64_t head = 0; head < shape.num_heads; ++head) {
    const float inverse = 1 / weights[head];
    for (int64_t d = head * shape.head_dim; d < (head + 1) * shape.head_dim; d += W) {
      store(out + d, load(sums + d) * inverse);
    }
  }
}

// A part is kept as sums [H, D], then the largest score and the weight of each head.
void write_part(const AttentionShape& shape, const DecodeMemory& memory, float* part) {
  const int64_t size = shape.num_heads * shape.head_dim;
  memcpy(part, memory.sums, size * 4);
  memcpy(part + size, memory.largest, shape.num_heads * 4);
  memcpy(part + size + shape.num_heads, memory.weights, shape.num_heads * 4);
}

void merge_parts(const AttentionShape& shape, const AttentionTask& task, const AttentionScratch& scratch, float* out) {
  const int64_t dim = shape.head_dim, size = shape.num_heads * dim;
  for (int64_t head = 0; head < shape.num_heads; ++head) {
    float largest = kLowest, total = 0;
    for (int32_t i = 0; i < task.num_parts; ++i) {
      largest = std::max(largest, scratch.part(task.slot + i)[size + head]);
    }
    for (int64_t d = 0; d < dim; d += W) store(out + head * dim + d, Vec{});
    for (int32_t i = 0; i < task.num_parts; ++i) {
      const float* part = scratch.part(task.slot + i);
      const float factor = std::exp(part[size + head] - largest);
      total += factor * part[size + shape.num_heads + head];
      for (int64_t d = head * dim; d < (head + 1) * dim; d += W) store(out + d, load(out + d) + factor * load(part + d));
    }
    for (int64_t d = head * dim; d < (head + 1) * dim; d += W) store(out + d, load(out + d) * (1 / total));
  }
}

}  // namespace

int64_t decode_scratch_size(const AttentionShape& shape) {
  const int64_t size = shape.num_heads * shape.head_dim, heads = round_up<int64_t>(shape.num_heads, 16);
  return 2 * kKeysPerChunk + kHeadsAtOnce * kKeysPerChunk + 2 * size + 2 * heads;
}

void attend_decode(const AttentionCall& call, const AttentionTask& task, float* buffer, const AttentionScratch& scratch) {
  const AttentionShape& shape = call.shape;
  const DecodeMemory memory(buffer, shape);
  const int64_t row = call.batch.first_queries[task.seq], size = shape.num_heads * shape.head_dim;
  const float* q = call.q + row * call.q_stride;
  for (int64_t i = 0; i < size; i += W) {
    store(memory.q + i, load(q + i) * call.scale);
    store(memory.sums + i, Vec{});
  }
  for (int64_t head = 0; head < shape.num_heads; ++head) memory.largest[head] = kLowest, memory.weights[head] = 0;
  if (call.cache.is_bfloat16) {
    add_keys<bf16>(call, task, memory);
  } else {
    add_keys<float>(call, task, memory);
  }
  float* out = call.out + row * call.out_stride;
  if (task.num_parts == 1) return write_out(shape, memory.sums, memory.weights, out);
  write_part(shape, memory, scratch.part(task.slot + task.part));
  auto& num_finished = scratch.num_finished(task.slot);
  if (num_finished.fetch_add(1, std::memory_order_acq_rel) + 1 == task.num_parts) {
    num_finished.store(0, std::memory_order_relaxed);
    merge_parts(shape, task, scratch, out);
  }
}

}  // namespace antiphon
