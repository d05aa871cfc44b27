// One query token: a pass over its keys for the scores, a pass over the values, a chunk of keys at a time, with the
// softmax kept up as it goes (Milakov and Gimelshein, arXiv 1805.02867). Every key is read from memory once: the query
// heads of a group are multiplied by it together.
#include <algorithm>

#include "attention_float.h"
#include "attention_vnni.h"

namespace antiphon {
namespace {

constexpr int kHeadsAtOnce = 4;
constexpr int64_t kBytesPerChunk = 128 << 10;  // of keys and values

struct DecodeMemory {
  float* q;         // [H, D], scaled
  float* sums;      // [H, D], unnormalised
  float* largest;   // [H]
  float* weights;   // [H]
  float* scores;    // [kHeadsAtOnce, kKeysPerChunk]
  int64_t* places;  // [2, kKeysPerChunk]: of a chunk, and of that which is fetched meanwhile
  float *key_scales, *value_scales;  // [kKeysPerChunk], where rows have one
  SplitQuery* split;                 // [H], of q, where keys are multiplied as integers
  int8_t* numbers;                   // [H, 2, D], of split

  DecodeMemory(float* memory, const AttentionShape& shape) {
    const int64_t size = shape.num_heads * shape.head_dim, heads = round_up<int64_t>(shape.num_heads, 16);
    places = reinterpret_cast<int64_t*>(memory);
    key_scales = memory + 4 * kKeysPerChunk;
    value_scales = key_scales + kKeysPerChunk;
    scores = value_scales + kKeysPerChunk;
    q = scores + kHeadsAtOnce * kKeysPerChunk;
    sums = q + size;
    largest = sums + size;
    weights = largest + heads;
    split = reinterpret_cast<SplitQuery*>(weights + heads);
    numbers = reinterpret_cast<int8_t*>(split + heads);
  }

  static int64_t num_floats(const AttentionShape& shape) {
    const int64_t size = shape.num_heads * shape.head_dim, heads = round_up<int64_t>(shape.num_heads, 16);
    const int64_t of_split = (heads * static_cast<int64_t>(sizeof(SplitQuery)) + 2 * size) / 4;
    return 6 * kKeysPerChunk + kHeadsAtOnce * kKeysPerChunk + 2 * size + 2 * heads + of_split;
  }
};

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

template <int R>
ANTIPHON_INLINE void soften_heads(const DecodeMemory& memory, int64_t head, int64_t n, float soft_cap, float* factors) {
  for (int r = 0; r < R; ++r, ++head) {
    factors[r] = soften(memory.scores + r * kKeysPerChunk, n, soft_cap, memory.largest[head], memory.weights[head]);
  }
}

template <typename T, int R>
void add_chunk(const DecodeMemory& memory, int64_t head, const T* keys, const T* values, int64_t n, int64_t dim,
               float soft_cap) {
  const float* q = memory.q + head * dim;
  if (dim == 4 * W) {
    score<T, R, 4>(q, keys, memory.places, n, dim, memory.scores);
  } else if (dim == 8 * W) {
    score<T, R, 8>(q, keys, memory.places, n, dim, memory.scores);
  } else {
    score<T, R, 0>(q, keys, memory.places, n, dim, memory.scores);
  }
  if constexpr (kHasScale<T>) multiply_by_scales<R>(memory.scores, memory.key_scales, n);
  float factors[R];
  soften_heads<R>(memory, head, n, soft_cap, factors);
  if constexpr (kHasScale<T>) multiply_by_scales<R>(memory.scores, memory.value_scales, n);
  float* sums = memory.sums + head * dim;
  int64_t d = 0;
  for (; d + 4 * W <= dim; d += 4 * W) {
    add_segment<T, R, 4>(memory.scores, values + d, memory.places, n, dim, factors, sums + d);
  }
  for (; d < dim; d += W) {
    add_segment<T, R, 1>(memory.scores, values + d, memory.places, n, dim, factors, sums + d);
  }
}

#if defined(__AVX512VNNI__)
constexpr bool kHasVnni = true;

template <int R>
void add_chunk_vnni(const DecodeMemory& memory, int64_t head, const int8_t* keys, const int8_t* values, int64_t n,
                    int64_t dim, float soft_cap) {
  const int8_t* numbers = memory.numbers + 2 * head * dim;
  const SplitQuery* queries = memory.split + head;
  if (dim == 64) {
    score_vnni<R, 4>(numbers, queries, keys, memory.key_scales, memory.places, n, dim, memory.scores);
  } else if (dim == 128) {
    score_vnni<R, 8>(numbers, queries, keys, memory.key_scales, memory.places, n, dim, memory.scores);
  } else {
    score_vnni<R, 0>(numbers, queries, keys, memory.key_scales, memory.places, n, dim, memory.scores);
  }
  float factors[R];
  soften_heads<R>(memory, head, n, soft_cap, factors);
  add_vnni<R>(memory.scores, values, memory.value_scales, memory.places, n, dim, factors, memory.sums + head * dim);
}
#else
constexpr bool kHasVnni = false;

template <int R>
void add_chunk_vnni(const DecodeMemory&, int64_t, const int8_t*, const int8_t*, int64_t, int64_t, float);
#endif

template <typename T, int R>
void add_heads(const DecodeMemory& memory, int64_t head, const T* keys, const T* values, int64_t n, int64_t dim,
               float soft_cap) {
  if constexpr (kHasScale<T> && kHasVnni) {
    add_chunk_vnni<R>(memory, head, keys, values, n, dim, soft_cap);
  } else {
    add_chunk<T, R>(memory, head, keys, values, n, dim, soft_cap);
  }
}

// As many as stay near a core until all heads have read them; a task is cut evenly.
int64_t keys_per_chunk(const AttentionCall& call, const AttentionTask& task, int64_t bytes_of_number) {
  const int64_t bytes_of_key = 2 * call.shape.num_kv_heads * call.shape.head_dim * bytes_of_number;
  const int64_t most = std::clamp<int64_t>(kBytesPerChunk / bytes_of_key / W * W, 2 * W, kKeysPerChunk);
  const int64_t num_keys = std::max(1, task.last - task.first), num_chunks = (num_keys + most - 1) / most;
  return round_up<int64_t>((num_keys + num_chunks - 1) / num_chunks, W);
}

// Where up to `size` keys of a task lie, from key `start` on; the last again and again up to kKeysPerChunk.
void find_keys(const AttentionCall& call, const AttentionTask& task, int64_t start, int64_t size, int64_t* places) {
  KeyPlaces of_keys(call, task.seq, start);
  const int64_t count = std::min<int64_t>(size, task.last - start);
  for (int64_t j = 0; j < count; ++j) places[j] = of_keys.next();
  for (int64_t j = count; j < kKeysPerChunk; ++j) places[j] = places[count - 1];
}

// The same for what is fetched ahead: of the task's next chunk, or of the next task's first.
void find_next_keys(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, int64_t start,
                    int64_t size, int64_t* places) {
  if (start < task.last) {
    find_keys(call, task, start, size, places);
  } else if (next != nullptr) {
    find_keys(call, *next, next->first, size, places);
  } else {
    memcpy(places, places - kKeysPerChunk, kKeysPerChunk * sizeof *places);
  }
}

template <typename T>
void add_keys(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next,
              const DecodeMemory& memory) {
  const AttentionShape& shape = call.shape;
  const int64_t group = shape.group(), dim = shape.head_dim;
  const int64_t batches = (group + kHeadsAtOnce - 1) / kHeadsAtOnce;
  const int64_t size = keys_per_chunk(call, task, sizeof(T));
  for (int64_t start = task.first; start < task.last; start += size) {
    const int64_t n = std::min<int64_t>(size, task.last - start);
    find_keys(call, task, start, size, memory.places);
    find_next_keys(call, task, next, start + size, size, memory.places + kKeysPerChunk);
    for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const T* keys = static_cast<const T*>(call.cache.k) + kv_head * call.cache.head_stride;
      const T* values = static_cast<const T*>(call.cache.v) + kv_head * call.cache.head_stride;
      if constexpr (kHasScale<T>) {
#pragma GCC unroll 4
        for (int64_t j = 0; j < n; ++j) {
          memory.key_scales[j] = row_scale(keys + memory.places[j], dim);
          memory.value_scales[j] = row_scale(values + memory.places[j], dim);
        }
        for (int64_t j = n; j < round_up<int64_t>(n, W); ++j) memory.key_scales[j] = memory.value_scales[j] = 0;
      }
      for (int64_t i = 0; i < batches; ++i) {
        const int64_t from = group * i / batches, to = group * (i + 1) / batches, head = kv_head * group + from;
        switch (to - from) {
          case 1: add_heads<T, 1>(memory, head, keys, values, n, dim, call.soft_cap); break;
          case 2: add_heads<T, 2>(memory, head, keys, values, n, dim, call.soft_cap); break;
          case 3: add_heads<T, 3>(memory, head, keys, values, n, dim, call.soft_cap); break;
          default: add_heads<T, 4>(memory, head, keys, values, n, dim, call.soft_cap); break;
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
      for (int64_t d = head * dim; d < (head + 1) * dim; d += W) {
        store(out + d, load(out + d) + factor * load(part + d));
      }
    }
    for (int64_t d = head * dim; d < (head + 1) * dim; d += W) store(out + d, load(out + d) * (1 / total));
  }
}

}  // namespace

int64_t decode_scratch_size(const AttentionShape& shape) { return DecodeMemory::num_floats(shape); }

void attend_decode(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, float* buffer,
                   const AttentionScratch& scratch) {
  const AttentionShape& shape = call.shape;
  const DecodeMemory memory(buffer, shape);
  const int64_t row = call.batch.first_queries[task.seq], size = shape.num_heads * shape.head_dim;
  const float* q = call.q + row * call.q_stride;
  for (int64_t i = 0; i < size; i += W) {
    store(memory.q + i, load(q + i) * call.scale);
    store(memory.sums + i, Vec{});
  }
  for (int64_t head = 0; head < shape.num_heads; ++head) memory.largest[head] = kLowest, memory.weights[head] = 0;
  if (call.cache.format == KvFormat::kInt8 && kHasVnni) {
    for (int64_t head = 0; head < shape.num_heads; ++head) {
      const int64_t first = head * shape.head_dim;
      memory.split[head] = split_query(memory.q + first, shape.head_dim, memory.numbers + 2 * first);
    }
  }
  with_format(call.cache.format, [&](auto number) { add_keys<decltype(number)>(call, task, next, memory); });
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
