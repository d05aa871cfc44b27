// Sums and gatherings over the ranks of one host, through memory that all of them map. Owns the mapping, the order in
// which ranks write and read it, and every way in which a wait can end. Knows neither how the ranks found each other
// nor what they compute.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace antiphon {

// What an operation ended with; the rank that was waited for is kept above it, in units of 256.
enum class Outcome : int32_t {
  kDone = 0,
  kClosed = 1,       // this rank has left the group
  kPeerDied = 2,
  kPeerLeft = 3,
  kPeerLate = 4,
  kPeerElsewhere = 5,  // it is in another operation, or brings another size
};

class SharedGroup {
 public:
  static int64_t num_bytes(int size);

  // Maps `file`, an open file of num_bytes zeroes, and keeps it: `is_mapped` says whether that went well. Each rank
  // opens the file for itself, because what tells that a rank lives is a lock which belongs to the open file.
  SharedGroup(int file, int rank, int size, int64_t timeout_ns, int64_t most_spin_ns);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  bool is_mapped() const { return memory_ != nullptr; }
  bool is_alive(int peer) const;

  // In place. Every rank adds in the order of the ranks, so all have the same bits.
  int32_t all_reduce(float* data, int64_t count);
  // `num_rows` rows of widths[r] bytes from rank r -> rows of all the widths, side by side.
  int32_t all_gather(const uint8_t* part, int64_t num_rows, const int64_t* widths, uint8_t* out);
  // Whoever waits for this rank is told. An operation of another thread ends first. Safe to call twice.
  void leave();

 private:
  struct Seat;

  Seat& seat(int rank) const;
  uint8_t* half(int rank, uint32_t round) const;
  int32_t exchange(const void* data, int64_t num_bytes, uint64_t operation);
  int32_t wait_for(int peer, uint32_t round);
  Outcome sleep_until(int peer, uint32_t round, int64_t started);
  int32_t fail(int32_t status);
  void unmap();

  const int file_, rank_, size_;
  const int64_t timeout_ns_, most_spin_ns_;
  int64_t spin_ns_ = 0;  // grows while waits are short, shrinks while they are long
  uint8_t* memory_ = nullptr;
  uint32_t round_ = 0;
  std::vector<const float*> parts_;  // of a sum, by rank
  std::atomic<bool> is_leaving_{false};
  std::mutex in_use_;  // one operation at a time, and no unmapping within one
};

}  // namespace antiphon
