// Causal attention of the tokens of one step over a paged cache of any block size and any strides.
//
// Two ways: sequences with one token read each key once for all query heads, and may be cut into parts of their keys;
// longer pieces of prompts go through tiles of queries by tiles of keys, as two small matrix products. A plan, made
// once per step and window, says who computes what and serves every layer.
#pragma once

#include <atomic>
#include <limits>
#include <memory>
#include <vector>

#include "kv_row.h"
#include "memory.h"
#include "pool.h"

namespace antiphon {

struct AttentionShape {
  int64_t num_heads, num_kv_heads, head_dim;

  int64_t group() const { return num_heads / num_kv_heads; }  // query heads that read one key head
};

// One step's rows; see AttentionMetadata.
struct Batch {
  const int32_t* first_queries;  // [S + 1]
  const int32_t* seq_lens;       // [S]
  const int32_t* block_tables;
  int64_t block_table_stride;
  int64_t num_seqs;
};

struct AttentionTask {
  int32_t seq;
  int32_t kv_head;      // of a tile; a decode task computes all heads
  int32_t first, last;  // keys of a decode task; queries of a tile, counted from the sequence's first one
  int32_t part, num_parts;  // of the sequence's keys; 0 parts: a tile
  int32_t slot;             // of the sequence's first part, where there are several
};

class AttentionPlan {
 public:
  // window 0: none.
  void make(const AttentionShape& shape, const Batch& batch, int32_t window, int num_threads);

  const std::vector<AttentionTask>& tasks() const { return tasks_; }
  int32_t window() const { return window_; }

 private:
  std::vector<AttentionTask> tasks_;
  int32_t window_ = 0;
};

// The memory that attention works in, for one shape and number of threads.
class AttentionScratch {
 public:
  AttentionScratch(const AttentionShape& shape, int num_threads);

  float* of_thread(int thread) const { return memory_.get() + thread * per_thread_; }
  float* part(int64_t slot) const { return parts_.get() + slot * part_size_; }
  std::atomic<int32_t>& num_finished(int64_t slot) const { return num_finished_[slot]; }

 private:
  int64_t per_thread_, part_size_;
  Memory<float> memory_, parts_;
  std::unique_ptr<std::atomic<int32_t>[]> num_finished_;
};

struct AttentionCall {
  AttentionShape shape;
  Batch batch;
  Cache cache;
  const float* q;  // [T, heads, head_dim], rows q_stride apart
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  float scale;
  float soft_cap;  // 0: none
  int32_t coarse;  // not 0: prompts may be computed in bfloat16, whose sums are float32
};

// Where a sequence's keys lie in the cache, one after the other.
class KeyPlaces {
 public:
  KeyPlaces(const AttentionCall& call, int32_t seq, int64_t first)
      : cache_(call.cache),
        block_(call.batch.block_tables + seq * call.batch.block_table_stride + first / call.cache.block_size),
        offset_(first % call.cache.block_size) {}

  int64_t next() {
    const int64_t place = *block_ * cache_.block_stride + offset_ * cache_.token_stride;
    if (++offset_ == cache_.block_size) ++block_, offset_ = 0;
    return place;
  }

 private:
  const Cache& cache_;
  const int32_t* block_;
  int64_t offset_;
};

void attend(Pool& pool, const AttentionCall& call, const AttentionPlan& plan, const AttentionScratch& scratch);

// The two ways, each one task with the memory of one thread (attention_decode.cpp, attention_tile.cpp). Of the decode
// task `next`, if there is one, the first keys are fetched.
int64_t decode_scratch_size(const AttentionShape& shape);
void attend_decode(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, float* memory,
                   const AttentionScratch& scratch);
int64_t tile_scratch_size(const AttentionShape& shape);
int64_t queries_per_tile(const AttentionShape& shape);
void attend_tile(const AttentionCall& call, const AttentionTask& task, int32_t window, float* memory);
// The latter in tile registers, where there are some that serve it (attention_tile_amx.cpp).
bool serves_amx_tiles(const AttentionShape& shape);
int64_t amx_tile_scratch_size(const AttentionShape& shape);
void attend_tile_amx(const AttentionCall& call, const AttentionTask& task, int32_t window, float* memory);

// Whole vectors: what the decode way needs of a head.
inline bool decodes_directly(const AttentionShape& shape) { return shape.head_dim % W == 0; }

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr int64_t kKeysPerChunk = 128;  // keys whose scores are held at a time

}  // namespace antiphon
