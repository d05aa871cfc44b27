// A fixed set of threads that share the loops of a step. The caller is one of them, so a helper that the system has
// put aside costs its share of the work and nothing more. Helpers spin for some microseconds between two loops, then
// sleep: a pool that has nothing to do takes nothing from other processes. Knows nothing of what it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace antiphon {

class Pool {
 public:
  Pool(int num_threads, int spin_microseconds);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(helpers_.size()) + 1; }

  // body(chunk, thread) for each chunk of 0 .. num_chunks - 1, in about that order; returns when all are done. One
  // caller at a time; a body must not call run.
  template <typename Body>
  void run(int64_t num_chunks, const Body& body) {
    if (num_chunks <= 1 || helpers_.empty()) {
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk, 0);
      return;
    }
    call_ = [](const void* target, int64_t chunk, int thread) {
      (*static_cast<const Body*>(target))(chunk, thread);
    };
    target_ = &body;
    share(static_cast<uint32_t>(num_chunks));
  }

  // body(first, last, thread) over ranges of 0 .. count - 1, at least `grain` long.
  template <typename Body>
  void run_ranges(int64_t count, int64_t grain, const Body& body) {
    int64_t chunks = (count + grain - 1) / grain;
    if (chunks > 4 * size()) chunks = 4 * size();
    run(chunks, [&](int64_t chunk, int thread) { body(count * chunk / chunks, count * (chunk + 1) / chunks, thread); });
  }

 private:
  void share(uint32_t num_chunks);
  void take_chunks(uint32_t generation, int thread);
  void help(int thread);

  void (*call_)(const void*, int64_t, int) = nullptr;
  const void* target_ = nullptr;
  uint32_t num_chunks_ = 0;
  // Generation in the upper half, chunks not yet taken in the lower. A helper that comes late finds another generation
  // or no chunk, and cannot touch the loop that follows.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> num_asleep_{0};  // helpers that wait for the next generation
  alignas(64) std::atomic<uint32_t> num_done_{0};
  std::atomic<uint32_t> caller_asleep_{0};
  std::atomic<bool> stopping_{false};
  int num_spins_ = 0;
  std::vector<std::thread> helpers_;
};

}  // namespace antiphon
