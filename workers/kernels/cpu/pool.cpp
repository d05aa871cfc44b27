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

Pool::Pool(int num_threads, int spin_microseconds) : num_spins_(spins_in(spin_microseconds)) {
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

void Pool::share(uint32_t num_chunks) {
  uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  num_chunks_ = num_chunks;
  num_done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(generation) << 32 | num_chunks, std::memory_order_release);
  generation_.store(generation);
  wake(generation_, num_asleep_);
  take_chunks(generation, 0);
  for (int spin = 0; spin < num_spins_; ++spin) {
    if (num_done_.load(std::memory_order_acquire) == num_chunks) return;
    cpu_relax();
  }
  for (uint32_t done; (done = num_done_.load()) != num_chunks;) sleep_while(num_done_, done, caller_asleep_);
}

void Pool::take_chunks(uint32_t generation, int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (ticket >> 32 == generation && static_cast<uint32_t>(ticket) > 0) {
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
    // The loop cannot end before this chunk is done, so what it says about itself stays as it is.
    uint32_t num_chunks = num_chunks_;
    call_(target_, num_chunks - static_cast<uint32_t>(ticket), thread);
    if (num_done_.fetch_add(1) + 1 == num_chunks) wake(num_done_, caller_asleep_);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Pool::help(int thread) {
  uint32_t seen = 0;
  while (!stopping_) {
    uint32_t generation = generation_.load(std::memory_order_acquire);
    for (int spin = 0; generation == seen && spin < num_spins_; ++spin) {
      cpu_relax();
      generation = generation_.load(std::memory_order_acquire);
    }
    if (generation == seen) {
      sleep_while(generation_, seen, num_asleep_);
      continue;
    }
    seen = generation;
    take_chunks(seen, thread);
  }
}

}  // namespace antiphon
