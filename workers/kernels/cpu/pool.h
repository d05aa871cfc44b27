// A fixed set of threads that share the loops of a step. The caller is one of them, so a helper that the system has
// put aside costs its share of the work and nothing more. Helpers spin for some microseconds between two loops, then
// sleep: a pool that has nothing to do takes nothing from other processes. Knows nothing of what it runs, but may be
// told what each thread reads next, and fetches that while it waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
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

  // body(chunk, thread) for each chunk of 0 .. num_chunks - 1; returns when all are done. A thread begins with those
  // from its `first_chunk` on, one after the other, so that what it reads lies in a row; then it takes the last ones of
  // others. One caller at a time; a body must not call run. What it throws while threads share the loop ends the
  // process.
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

  int64_t first_chunk(int64_t num_chunks, int thread) const { return num_chunks * thread / size(); }

  // For the loop after the next: once that has nothing left for `thread`, what lies from `first` to `last` is fetched
  // into its second cache.
  void expect(int thread, const char* first, const char* last) {
    parts_[thread].expected.store(first, std::memory_order_relaxed);
    parts_[thread].expected_end.store(last, std::memory_order_relaxed);
  }

  // body(first, last, thread) over ranges of 0 .. count - 1, at least `grain` long.
  template <typename Body>
  void run_ranges(int64_t count, int64_t grain, const Body& body) {
    int64_t chunks = (count + grain - 1) / grain;
    if (chunks > 4 * size()) chunks = 4 * size();
    run(chunks, [&](int64_t chunk, int thread) { body(count * chunk / chunks, count * (chunk + 1) / chunks, thread); });
  }

 private:
  // What a thread begins with.
  struct alignas(64) Part {
    std::atomic<uint64_t> chunks{0};  // not yet taken: the first in the lower half, the end in the upper
    std::atomic<const char*> expected{nullptr}, expected_end{nullptr};

    bool take(bool first, uint32_t& chunk);
  };

  void share(uint32_t num_chunks);
  void take_chunks(int thread) noexcept;
  void help(int thread);
  template <typename Done>
  bool spin(int thread, const Done& done) const;

  // A helper that comes late may find the chunks of the loop that followed: it is as welcome there. These three belong
  // to a loop as long as one of its chunks is not done; there are no others to be taken while they are written.
  void (*call_)(const void*, int64_t, int) = nullptr;
  const void* target_ = nullptr;
  uint32_t num_chunks_ = 0;
  std::unique_ptr<Part[]> parts_;  // of each thread
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> num_asleep_{0};  // helpers that wait for the next generation
  alignas(64) std::atomic<uint32_t> num_done_{0};
  std::atomic<uint32_t> caller_asleep_{0};
  std::atomic<bool> stopping_{false};
  int num_spins_ = 0;
  std::vector<std::thread> helpers_;
};

}  // namespace antiphon
