// bfloat16 weights in 12 bits, without loss. The upper byte of a bfloat16 number is its sign and most of its exponent,
// and hardly more than 16 of the 256 there are occur in a panel: 4 bits look it up in the panel's table. The weights
// with none of those 16, some of a hundred thousand in a trained model, are listed beside.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "matrix.h"

#if defined(__AVX2__)
#define ANTIPHON_HAS_CODED 1
#else
#define ANTIPHON_HAS_CODED 0  // no instruction looks up many bytes at once
#endif

namespace antiphon {

typedef uint8_t Bytes __attribute__((vector_size(4 * W)));

// Weights of kCodedK neighbouring k of a panel. `lower[i]` are the lower bytes of k = 2 i and 2 i + 1, in the order in
// which `CodedReader` puts the upper ones beside them; `codes` are those of i = 0, and of i = 1 in the upper halves.
struct CodedBlock {
  Bytes codes, lower[2];
};
constexpr int64_t kCodedK = 4;
constexpr int64_t kCodedRoom = 2048 * kPanel * sizeof(bf16);  // bytes that a ring takes at most, see CodedUnpacker

ANTIPHON_INLINE int64_t coded_blocks(const Matrix& m) { return m.padded_k / kCodedK; }  // of a panel
ANTIPHON_INLINE const CodedBlock* coded_panel(const Matrix& m, int64_t panel) {
  return static_cast<const CodedBlock*>(m.data) + panel * coded_blocks(m);
}

// A panel of the bfloat16 format, [padded_k / 2][kPanel][2], as blocks and a table; what its codes can't tell is added
// to `rare`.
void code_panel(const bf16* weights, int64_t padded_k, CodedBlock* blocks, uint8_t* table,
                std::vector<RareWeight>& rare);

void unpack_coded_row(const Matrix& m, int64_t row, float* out);

#if ANTIPHON_HAS_CODED

// Reads the weights of a panel front to back, as the bfloat16 format has them but for the rare ones.
class CodedReader {
 public:
  ANTIPHON_INLINE CodedReader(const Matrix& m, int64_t panel) : block_(coded_panel(m, panel)) {
    const uint8_t* table = m.coding->tables.get() + panel * kNumCodes;
    for (int i = 0; i < 4 * W; i += kNumCodes) memcpy(reinterpret_cast<char*>(&table_) + i, table, kNumCodes);
  }

  // kCodedK of k: the first W columns of the first two k, the others, and the same of the next two.
  ANTIPHON_INLINE void read(UVec (&pairs)[4]) {
    prefetch_bytes<sizeof(CodedBlock)>(block_);
    const Bytes codes = block_->codes;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Bytes lower = block_->lower[i];
      Bytes upper = reinterpret_cast<Bytes>(reinterpret_cast<UVec>(codes) >> (4 * i)) & 15;
      asm("vpshufb %1, %2, %0" : "=v"(upper) : "v"(upper), "v"(table_));
      asm("vpunpcklbw %2, %1, %0" : "=v"(pairs[2 * i]) : "v"(lower), "v"(upper));
      asm("vpunpckhbw %2, %1, %0" : "=v"(pairs[2 * i + 1]) : "v"(lower), "v"(upper));
    }
    ++block_;
  }

 private:
  const CodedBlock* block_;
  Bytes table_;
};

// Unpacks panels, one after the other, to the bfloat16 format: a little at a time, while tiles are multiplied. They go
// around in a ring, which should be so small that it stays in the first cache.
class CodedUnpacker {
 public:
  // Panels first .. last - 1; `ring` [ring_size][kPanel], a power of two.
  CodedUnpacker(const Matrix& m, bf16* ring, int64_t ring_size, int64_t first, int64_t last)
      : m_(&m), reader_(m, first), ring_(ring), last_of_ring_(ring_size - 1), first_(first), panel_(first), end_(last) {
    start_panel();
  }

  // A place of the panels' sequence of k. In the ring it is at `place % ring_size`.
  int64_t place_of(int64_t panel, int64_t k) const { return (panel - first_) * m_->padded_k + k; }

  // So many k more, but none from `limit` on.
  ANTIPHON_INLINE void unpack(int64_t count, int64_t limit) {
    for (count = std::min(count, limit - place_); count > 0 && panel_ < end_;) {
      const int64_t now = std::min({count, m_->padded_k - k_, last_of_ring_ + 1 - (place_ & last_of_ring_)});
      unpack_straight(now);
      count -= now;
      if (k_ < m_->padded_k) continue;
      ++panel_;
      start_panel();
    }
  }

  void unpack_to(int64_t place) { unpack(place - place_, place); }

 private:
  ANTIPHON_INLINE void unpack_straight(int64_t count) {
    CodedReader reader = reader_;
    bf16* const out = ring_ + (place_ & last_of_ring_) * kPanel;
    for (int64_t i = 0; i < count * kPanel; i += kCodedK * kPanel) {
      UVec pairs[4];
      reader.read(pairs);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) memcpy(out + i + j * 2 * W, &pairs[j], sizeof pairs[j]);
    }
    reader_ = reader;
    bf16* const start_of_panel = out - k_ * kPanel;
    k_ += count;
    place_ += count;
    for (; rare_ != rare_end_ && rare_->place < k_ * kPanel; ++rare_) start_of_panel[rare_->place] = rare_->weight;
  }

  void start_panel() {
    k_ = 0;
    if (panel_ == end_) return;
    reader_ = CodedReader(*m_, panel_);
    rare_ = m_->coding->of(panel_).begin();
    rare_end_ = m_->coding->of(panel_).end();
  }

  const Matrix* m_;
  CodedReader reader_;
  bf16* ring_;
  int64_t last_of_ring_, first_, panel_, end_, k_ = 0, place_ = 0;
  const RareWeight *rare_ = nullptr, *rare_end_ = nullptr;
};

#endif

}  // namespace antiphon
