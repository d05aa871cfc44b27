#include "all_reduce.h"

#include <cerrno>
#include <ctime>
#include <new>

#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "simd.h"

namespace antiphon {

// A rank writes its part of a round, posts the round, waits for the others and reads their parts. It writes one half
// of its memory in even rounds and the other in odd ones: whoever has posted a round has read all of the one before the
// last, so that a single wait per round is enough.
struct alignas(128) SharedGroup::Seat {
  std::atomic<uint32_t> round;       // the last one posted; others sleep on it
  std::atomic<uint32_t> num_asleep;
  std::atomic<uint32_t> has_left;
  std::atomic<int32_t> core;           // that the last round was posted from
  std::atomic<uint64_t> operation[2];  // of the even and the odd round
};

namespace {

constexpr int64_t kHalfBytes = 256 << 10;  // fits the second-level cache, with the sum beside it
constexpr int64_t kSliceNs = 20'000'000;   // a sleeper looks that often whether its peer still lives
constexpr int kSpinsPerLook = 16;          // at the clock
constexpr uint64_t kSum = 1ull << 62, kGather = 2ull << 62;

int64_t between(int64_t low, int64_t value, int64_t high) { return value < low ? low : value < high ? value : high; }

int32_t ended(Outcome outcome, int peer) { return static_cast<int32_t>(outcome) | peer << 8; }

// Rounds are counted around the end of their 32 bits; two ranks are never more than two apart.
bool has_reached(uint32_t posted, uint32_t round) { return static_cast<int32_t>(posted - round) >= 0; }

int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// Whether the slice or a signal ended the sleep, and not a wake. The word is in memory of several processes.
bool sleep_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& num_asleep) {
  bool is_over = true;
  num_asleep.fetch_add(1);
#if defined(__linux__)
  const timespec slice{0, kSliceNs};
  is_over = syscall(SYS_futex, &word, FUTEX_WAIT, value, &slice, nullptr, 0) != 0 && errno != EAGAIN;
#else
  (void)word, (void)value;
#endif
  num_asleep.fetch_sub(1);
  return is_over;
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

int32_t current_core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

bool spin_until(const std::atomic<uint32_t>& posted, uint32_t round, int64_t deadline) {
  do {
    for (int spin = 0; spin < kSpinsPerLook; ++spin) {
      if (has_reached(posted.load(std::memory_order_acquire), round)) return true;
      cpu_relax();
    }
  } while (nanoseconds() < deadline);
  return false;
}

void add_up(const float* const* parts, int num_parts, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    Vec total = load(parts[0] + i);
    for (int part = 1; part < num_parts; ++part) total += load(parts[part] + i);
    store(out + i, total);
  }
  for (; i < count; ++i) {
    float total = parts[0][i];
    for (int part = 1; part < num_parts; ++part) total += parts[part][i];
    out[i] = total;
  }
}

// Bytes first .. first + count - 1 of rows `width` long that lie end to end in `from`, to rows `stride` apart.
void spread(const uint8_t* from, int64_t first, int64_t count, int64_t width, int64_t stride, uint8_t* out) {
  for (int64_t done = 0; done < count;) {
    const int64_t row = (first + done) / width, column = (first + done) % width;
    const int64_t piece = width - column < count - done ? width - column : count - done;
    memcpy(out + row * stride + column, from + done, piece);
    done += piece;
  }
}

}  // namespace

int64_t SharedGroup::num_bytes(int size) { return size * (sizeof(Seat) + 2 * kHalfBytes); }

SharedGroup::Seat& SharedGroup::seat(int rank) const { return reinterpret_cast<Seat*>(memory_)[rank]; }

uint8_t* SharedGroup::half(int rank, uint32_t round) const {
  return memory_ + size_ * sizeof(Seat) + (2 * rank + round % 2) * kHalfBytes;
}

#if defined(__linux__)

SharedGroup::SharedGroup(int file, int rank, int size, int64_t timeout_ns, int64_t most_spin_ns)
    : file_(file), rank_(rank), size_(size), timeout_ns_(timeout_ns), most_spin_ns_(most_spin_ns), parts_(size) {
  struct stat found {};
  if (fstat(file, &found) != 0 || found.st_size < num_bytes(size)) return;
  // The kernel gives the lock back when this process ends, however it ends.
  struct flock own {};
  own.l_type = F_WRLCK;
  own.l_start = rank;
  own.l_len = 1;
  if (fcntl(file, F_OFD_SETLK, &own) != 0) return;
  void* mapped = mmap(nullptr, num_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (mapped != MAP_FAILED) memory_ = static_cast<uint8_t*>(mapped);
}

bool SharedGroup::is_alive(int peer) const {
  struct flock theirs {};
  theirs.l_type = F_WRLCK;
  theirs.l_start = peer;
  theirs.l_len = 1;
  return fcntl(file_, F_OFD_GETLK, &theirs) == 0 && theirs.l_type != F_UNLCK;
}

void SharedGroup::unmap() {
  if (memory_ != nullptr) munmap(memory_, num_bytes(size_));
  memory_ = nullptr;
  close(file_);
}

#else  // elsewhere there is neither the lock nor the sleep that this is made of

SharedGroup::SharedGroup(int file, int rank, int size, int64_t timeout_ns, int64_t most_spin_ns)
    : file_(file), rank_(rank), size_(size), timeout_ns_(timeout_ns), most_spin_ns_(most_spin_ns), parts_(size) {}

bool SharedGroup::is_alive(int) const { return false; }

void SharedGroup::unmap() {}

#endif

SharedGroup::~SharedGroup() { leave(); }

void SharedGroup::leave() {
  if (is_leaving_.exchange(true)) return;
  std::lock_guard<std::mutex> lock(in_use_);
  if (is_mapped()) {
    seat(rank_).has_left.store(1);
    wake(seat(rank_).round);
  }
  unmap();
}

// Ranks that compute the same come within microseconds of each other, unless one has to wait for a core. So as long as
// waits are short it is looked for the peer all the while; once they are long, or where the peer was last seen on this
// very core, it is left to the system at once.
int32_t SharedGroup::wait_for(int peer, uint32_t round) {
  const std::atomic<uint32_t>& posted = seat(peer).round;
  if (has_reached(posted.load(std::memory_order_acquire), round)) return 0;
  const int64_t started = nanoseconds();
  const bool is_here = seat(peer).core.load(std::memory_order_relaxed) == current_core();
  const bool came = spin_until(posted, round, is_here ? 0 : started + spin_ns_);
  const Outcome outcome = came ? Outcome::kDone : sleep_until(peer, round, started);
  const bool was_short = !is_here && nanoseconds() - started < 2 * most_spin_ns_;
  spin_ns_ = was_short ? between(0, spin_ns_ + most_spin_ns_ / 4, most_spin_ns_) : spin_ns_ / 2;
  // It may have posted this round just before it went.
  return outcome == Outcome::kDone || has_reached(posted.load(), round) ? 0 : ended(outcome, peer);
}

Outcome SharedGroup::sleep_until(int peer, uint32_t round, int64_t started) {
  Seat& theirs = seat(peer);
  for (;;) {
    const uint32_t seen = theirs.round.load();
    if (has_reached(seen, round)) return Outcome::kDone;
    if (theirs.has_left.load()) return Outcome::kPeerLeft;
    if (is_leaving_.load()) return Outcome::kClosed;
    if (!sleep_while(theirs.round, seen, theirs.num_asleep)) continue;
    if (!is_alive(peer)) return Outcome::kPeerDied;
    if (nanoseconds() - started > timeout_ns_) return Outcome::kPeerLate;
  }
}

// Posts `data` and waits until everyone has: then half(r, round_) holds what rank r brings.
int32_t SharedGroup::exchange(const void* data, int64_t num_bytes, uint64_t operation) {
  Seat& own = seat(rank_);
  const uint32_t round = ++round_;
  if (num_bytes > 0) memcpy(half(rank_, round), data, num_bytes);
  own.operation[round % 2].store(operation, std::memory_order_relaxed);
  own.core.store(current_core(), std::memory_order_relaxed);
  own.round.store(round);
  if (own.num_asleep.load() > 0) wake(own.round);
  for (int peer = 0; peer < size_; ++peer) {
    const int32_t status = peer == rank_ ? 0 : wait_for(peer, round);
    if (status != 0) return status;
    if (seat(peer).operation[round % 2].load(std::memory_order_relaxed) != operation) {
      return ended(Outcome::kPeerElsewhere, peer);
    }
  }
  return 0;
}

// The ranks are no longer in the same round: nothing but leaving is left. The lock on this group is held.
int32_t SharedGroup::fail(int32_t status) {
  if (!is_leaving_.exchange(true)) {
    seat(rank_).has_left.store(1);
    wake(seat(rank_).round);
    unmap();
  }
  return status;
}

int32_t SharedGroup::all_reduce(float* data, int64_t count) {
  std::lock_guard<std::mutex> lock(in_use_);
  if (is_leaving_.load()) return ended(Outcome::kClosed, rank_);
  constexpr int64_t kMost = kHalfBytes / sizeof(float);
  for (int64_t first = 0; first < count; first += kMost) {
    const int64_t size = between(0, count - first, kMost);
    const int32_t status = exchange(data + first, size * sizeof(float), kSum | count);
    if (status != 0) return fail(status);
    for (int rank = 0; rank < size_; ++rank) {
      parts_[rank] = rank == rank_ ? data + first : reinterpret_cast<const float*>(half(rank, round_));
    }
    add_up(parts_.data(), size_, size, data + first);
  }
  return 0;
}

int32_t SharedGroup::all_gather(const uint8_t* part, int64_t num_rows, const int64_t* widths, uint8_t* out) {
  std::lock_guard<std::mutex> lock(in_use_);
  if (is_leaving_.load()) return ended(Outcome::kClosed, rank_);
  int64_t row_bytes = 0, widest = 0;
  for (int rank = 0; rank < size_; ++rank) {
    row_bytes += widths[rank];
    if (widths[rank] > widest) widest = widths[rank];
  }
  for (int64_t first = 0; first < num_rows * widest; first += kHalfBytes) {
    const int64_t own = between(0, num_rows * widths[rank_] - first, kHalfBytes);
    const int32_t status = exchange(own > 0 ? part + first : nullptr, own, kGather | num_rows * row_bytes);
    if (status != 0) return fail(status);
    uint8_t* column = out;
    for (int rank = 0; rank < size_; column += widths[rank++]) {
      const int64_t theirs = between(0, num_rows * widths[rank] - first, kHalfBytes);
      spread(half(rank, round_), first, theirs, widths[rank], row_bytes, column);
    }
  }
  return 0;
}

}  // namespace antiphon
