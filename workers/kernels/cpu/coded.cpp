#include "coded.h"

#include <algorithm>
#include <numeric>

namespace antiphon {
namespace {

// A pair of neighbouring k has two vectors of 2 * W numbers. `CodedReader` interleaves the first from the lower 8 bytes
// of each 16, the second from the upper ones: so eight neighbouring numbers lie in eight bytes.
constexpr int kEight = 8, kPairSize = 2 * kPanel;
constexpr int byte_of(int number) { return number % (2 * W) / 8 * 16 + number / (2 * W) * 8 + number % 8; }

constexpr uint8_t kNoCode = 0xff;

// The upper bytes that most of the weights have.
void choose_codes(const bf16* weights, int64_t count, uint8_t* table) {
  int64_t counts[2][256] = {};  // two, because equal bytes in a row would wait for one another
  for (int64_t i = 0; i < count; i += 2) {
    ++counts[0][weights[i].bits >> 8];
    ++counts[1][weights[i + 1].bits >> 8];
  }
  uint8_t order[256];
  std::iota(order, order + 256, uint8_t{0});
  const auto count_of = [&](uint8_t upper) { return counts[0][upper] + counts[1][upper]; };
  const auto more = [&](uint8_t a, uint8_t b) { return count_of(a) > count_of(b); };
  std::partial_sort(order, order + kNumCodes, order + 256, more);
  std::copy(order, order + kNumCodes, table);
}

bf16 number(uint8_t upper, uint8_t lower) { return bf16{static_cast<uint16_t>(upper << 8 | lower)}; }

}  // namespace

void code_panel(const bf16* weights, int64_t padded_k, CodedBlock* blocks, uint8_t* table,
                std::vector<RareWeight>& rare) {
  choose_codes(weights, padded_k * kPanel, table);
  // What is rare is taken for something small, so that little is added to what the sum of the others is rounded to.
  const auto smaller = [](uint8_t a, uint8_t b) { return (a & 0x7f) < (b & 0x7f); };
  const auto smallest = static_cast<uint8_t>(std::min_element(table, table + kNumCodes, smaller) - table);
  uint8_t code_of[256];
  std::fill(code_of, code_of + 256, kNoCode);
  for (uint8_t code = 0; code < kNumCodes; ++code) code_of[table[code]] = code;

  for (int64_t place = 0; place < padded_k * kPanel; place += kEight) {
    CodedBlock& block = blocks[place / (kCodedK * kPanel)];
    const int half = static_cast<int>(place / kPairSize % 2), byte = byte_of(static_cast<int>(place % kPairSize));
    uint8_t lower[kEight], codes[kEight], all = 0;
    for (int i = 0; i < kEight; ++i) {
      lower[i] = static_cast<uint8_t>(weights[place + i].bits);
      codes[i] = code_of[weights[place + i].bits >> 8];
      all |= codes[i];
    }
    for (int i = 0; all >= kNumCodes && i < kEight; ++i) {
      if (codes[i] != kNoCode) continue;
      codes[i] = smallest;
      rare.push_back({static_cast<int32_t>(place + i), weights[place + i], number(table[smallest], lower[i])});
    }
    auto* codes_at = reinterpret_cast<uint8_t*>(&block.codes) + byte;
    memcpy(reinterpret_cast<uint8_t*>(&block.lower[half]) + byte, lower, kEight);
    for (int i = 0; i < kEight; ++i) {
      codes_at[i] = static_cast<uint8_t>(half == 0 ? codes[i] : codes_at[i] | codes[i] << 4);
    }
  }
}

void unpack_coded_row(const Matrix& m, int64_t row, float* out) {
  const int64_t panel = row / kPanel, lane = row % kPanel;
  const CodedBlock* blocks = coded_panel(m, panel);
  const uint8_t* table = m.coding->tables.get() + panel * kNumCodes;
  for (int64_t k = 0; k < m.k; ++k) {
    const CodedBlock& block = blocks[k / kCodedK];
    const int half = static_cast<int>(k / 2 % 2), byte = byte_of(static_cast<int>(2 * lane + k % 2));
    out[k] = to_float(number(table[block.codes[byte] >> (4 * half) & 15], block.lower[half][byte]));
  }
  for (const RareWeight& rare : m.coding->of(panel)) {
    const int64_t k = rare.k();
    if (rare.lane() == lane && k < m.k) out[k] = to_float(rare.weight);
  }
}

}  // namespace antiphon
