#include "attention.h"

#include <algorithm>

namespace antiphon {
namespace {

constexpr int64_t kMinKeysPerPart = 64;
constexpr int64_t kPartsPerThread = 4;

int64_t first_key(int64_t position, int32_t window) {
  return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

}  // namespace

void AttentionPlan::make(const AttentionShape& shape, const Batch& batch, int32_t window, int num_threads) {
  tasks_.clear();
  window_ = window;
  const int64_t per_tile = queries_per_tile(shape);
  const bool direct = decodes_directly(shape);
  auto num_queries = [&](int64_t s) { return batch.first_queries[s + 1] - batch.first_queries[s]; };
  int64_t total_keys = 0;
  for (int64_t s = 0; s < batch.num_seqs; ++s) {
    int32_t queries = num_queries(s);
    if (queries == 1 && direct) {
      total_keys += batch.seq_lens[s] - first_key(batch.seq_lens[s] - 1, window);
      continue;
    }
    // The last tiles see most keys: they go first, so that the threads end together.
    for (int64_t last = queries; last > 0; last -= per_tile) {
      auto first = static_cast<int32_t>(std::max<int64_t>(0, last - per_tile));
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
        tasks_.push_back({static_cast<int32_t>(s), head, first, static_cast<int32_t>(last), 0, 0, 0});
      }
    }
  }
  if (!direct) return;
  // A cut sequence is longer than this, so there are at most kPartsPerThread * num_threads of them and twice the parts.
  const int64_t keys_per_part = std::max(kMinKeysPerPart, total_keys / (kPartsPerThread * num_threads) + 1);
  int32_t slot = 0;
  for (int64_t s = 0; s < batch.num_seqs; ++s) {
    if (num_queries(s) != 1) continue;
    int64_t last = batch.seq_lens[s], first = first_key(last - 1, window);
    auto num_parts = static_cast<int32_t>((last - first + keys_per_part - 1) / keys_per_part);
    for (int32_t part = 0; part < num_parts; ++part) {
      auto from = static_cast<int32_t>(first + (last - first) * part / num_parts);
      auto to = static_cast<int32_t>(first + (last - first) * (part + 1) / num_parts);
      tasks_.push_back({static_cast<int32_t>(s), 0, from, to, part, num_parts, slot});
    }
    if (num_parts > 1) slot += num_parts;
  }
}

AttentionScratch::AttentionScratch(const AttentionShape& shape, int num_threads) {
  const int64_t num_slots = 2 * kPartsPerThread * num_threads + 2;
  const bool direct = decodes_directly(shape);
  const int64_t of_decode = direct ? decode_scratch_size(shape) : 0;
  const int64_t most = std::max({tile_scratch_size(shape), amx_tile_scratch_size(shape), of_decode});
  per_thread_ = round_up<int64_t>(most, 1024);
  part_size_ = round_up<int64_t>(shape.num_heads * (shape.head_dim + 2), 16);
  memory_ = take_zeros<float>(num_threads * per_thread_);
  parts_ = take_zeros<float>(num_slots * part_size_);
  num_finished_ = std::make_unique<std::atomic<int32_t>[]>(num_slots);
}

void attend(Pool& pool, const AttentionCall& call, const AttentionPlan& plan, const AttentionScratch& scratch) {
  if (call.shape.num_heads == 0) return;
  const auto& tasks = plan.tasks();
  const auto tile = serves_amx_tiles(call.shape) ? attend_tile_amx : attend_tile;
  const auto count = static_cast<int64_t>(tasks.size());
  pool.run(count, [&](int64_t i, int thread) {
    float* memory = scratch.of_thread(thread);
    if (tasks[i].num_parts == 0) {
      tile(call, tasks[i], plan.window(), memory);
    } else {
      const bool goes_on = i + 1 < pool.first_chunk(count, thread + 1) && tasks[i + 1].num_parts > 0;
      attend_decode(call, tasks[i], goes_on ? &tasks[i + 1] : nullptr, memory, scratch);
    }
  });
}

}  // namespace antiphon
