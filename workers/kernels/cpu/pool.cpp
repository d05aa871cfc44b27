#include "pool.h"

#include <csignal>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "simd.h"

namespace antiphon {
namespace {

// Sleeps while `word` is `value`; may wake without reason. `num_asleep` tells `wake` whether a system call is needed.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& num_asleep) {
  num_asleep.fetch_add(1);
  if (word.load() == value) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    timespec pause{0, 20000};
    nanosleep(&pause, nullptr);
#endif
  }
  num_asleep.fetch_sub(1);
}

void wake([[maybe_unused]] std::atomic<uint32_t>& word, std::atomic<uint32_t>& num_asleep) {
  if (num_asleep.load() == 0) return;
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#endif
}

int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int spins_in(int microseconds) {
  constexpr int kSample = 2000;
  const int64_t start = nanoseconds();
  for (int i = 0; i < kSample; ++i) cpu_relax();
  const int64_t took = nanoseconds() - start;
  const int64_t spins = microseconds * 1000LL * kSample / (took > 1000 ? took : 1000);
  return spins < 100000000 ? static_cast<int>(spins) : 100000000;
}

}  // namespace

Pool::Pool(int num_threads, int spin_microseconds)
    : parts_(new Part[num_threads > 1 ? num_threads : 1]), num_spins_(spins_in(spin_microseconds)) {
  // Signals are the business of the process that loaded this library: helpers are started with all of them blocked.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < num_threads; ++i) helpers_.emplace_back([this, i] { help(i); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() {
  stopping_ = true;
  generation_.fetch_add(1);
  wake(generation_, num_asleep_);
  for (auto& helper : helpers_) helper.join();
}

bool Pool::Part::take(bool first, uint32_t& chunk) {
  uint64_t left = chunks.load(std::memory_order_relaxed);
  while (true) {
    const auto front = static_cast<uint32_t>(left), end = static_cast<uint32_t>(left >> 32);
    if (front == end) return false;
    chunk = first ? front : end - 1;
    const uint64_t rest = first ? left + 1 : left - (uint64_t{1} << 32);
    if (chunks.compare_exchange_weak(left, rest, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  }
}

// Whether `done()` came true; what is expected next is fetched meanwhile.
template <typename Done>
bool Pool::spin(int thread, const Done& done) const {
  const char* line = parts_[thread].expected.load(std::memory_order_relaxed);
  const char* const end = parts_[thread].expected_end.load(std::memory_order_relaxed);
  for (; line < end; line += 64) {
    if (done()) return true;
    prefetch_to_second_cache(line);
  }
  for (int spin = 0; spin < num_spins_; ++spin) {
    if (done()) return true;
    cpu_relax();
  }
  return false;
}

void Pool::share(uint32_t num_chunks) {
  num_chunks_ = num_chunks;
  num_done_.store(0, std::memory_order_relaxed);
  for (int thread = 0; thread < size(); ++thread) {
    const auto first = static_cast<uint64_t>(first_chunk(num_chunks, thread));
    const auto end = static_cast<uint64_t>(first_chunk(num_chunks, thread + 1));
    parts_[thread].chunks.store(end << 32 | first, std::memory_order_release);
  }
  generation_.fetch_add(1);
  wake(generation_, num_asleep_);
  take_chunks(0);
  if (spin(0, [&] { return num_done_.load(std::memory_order_acquire) == num_chunks; })) return;
  for (uint32_t done; (done = num_done_.load()) != num_chunks;) sleep_while(num_done_, done, caller_asleep_);
}

void Pool::take_chunks(int thread) noexcept {
  uint32_t num_taken = 0;
  for (int i = 0; i < size(); ++i) {
    Part& part = parts_[(thread + i) % size()];
    for (uint32_t chunk; part.take(i == 0, chunk); ++num_taken) call_(target_, chunk, thread);
  }
  if (num_taken == 0) return;
  const uint32_t num_chunks = num_chunks_;  // the loop cannot end before what was taken is counted
  if (num_done_.fetch_add(num_taken) + num_taken == num_chunks) wake(num_done_, caller_asleep_);
}

void Pool::help(int thread) {
  uint32_t seen = 0;
  while (!stopping_) {
    uint32_t generation = seen;
    const bool called = spin(thread, [&] {
      generation = generation_.load(std::memory_order_acquire);
      return generation != seen;
    });
    if (!called) {
      sleep_while(generation_, seen, num_asleep_);
      continue;
    }
    seen = generation;
    take_chunks(thread);
  }
}

}  // namespace antiphon
