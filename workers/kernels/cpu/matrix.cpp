#include "matrix.h"

#include <cmath>

#include "coded.h"
#include "columns.h"
#include "int4.h"
#include "quantize.h"

namespace antiphon {
namespace {

int64_t group_of(Format format) {
  switch (format) {
    case Format::kFloat32: return 1;
    case Format::kBfloat16: return kBf16Group;
    case Format::kInt8: return kInt8Group;
    case Format::kInt4: return kInt4Group;
  }
  return 1;
}

// Bytes of `count` weights, whole groups of them.
int64_t bytes_of(Format format, int64_t count) {
  if (format == Format::kInt4) return count / (kInt4Group * W) * static_cast<int64_t>(sizeof(Int4Group));
  return count * (format == Format::kInt8 ? 1 : format == Format::kBfloat16 ? 2 : 4);
}

// Numbers that lie together in four bytes: those of one column and of neighbouring k.
int64_t per_word(Format format) { return format == Format::kInt8 ? 4 : format == Format::kBfloat16 ? 2 : 1; }

// The words [padded_k / per_word][kPanel] of one half of a panel; for int8 also the sum of each column's numbers.
template <Format F>
IVec pack_columns(const Columns& columns, int64_t size, int64_t padded_k, uint32_t* words, Vec inverse_scales = Vec{}) {
  constexpr int kGroup = F == Format::kInt8 ? 4 : F == Format::kBfloat16 ? 2 : 1;
  IVec sums = IVec{};
  for (int64_t k = 0; k < padded_k; k += W) {
    Vec rows[W];
    gather(columns, k, size, rows);
    for (int i = 0; i < W && k + i < padded_k; i += kGroup) {
      IVec word = IVec{};
      for (int j = 0; j < kGroup; ++j) {
        if constexpr (F == Format::kInt8) {
          const IVec number = round_to_int(rows[i + j] * inverse_scales);
          sums += number;
          word |= (number & 0xff) << (8 * j);
        } else if constexpr (F == Format::kBfloat16) {
          UVec bits = reinterpret_cast<UVec>(rows[i + j]);
          bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
          word |= reinterpret_cast<IVec>(bits << (16 * j));
        } else {
          word = reinterpret_cast<IVec>(rows[i]);
        }
      }
      memcpy(words + (k + i) / kGroup * kPanel, &word, sizeof word);
    }
  }
  return sums;
}

// One scale per column, so that its largest weight is 127.
Vec scales_of(const Columns& columns, int64_t size) {
  Vec scales = splat(1.0f);
  for (int lane = 0; lane < W; ++lane) {
    float largest = 0;
    for (int64_t k = 0; columns.rows[lane] != nullptr && k < size; ++k) {
      largest = std::fmax(largest, std::fabs(columns.rows[lane][k]));
    }
    if (largest > 0) scales[lane] = largest / 127;
  }
  return scales;
}

// `first`: the first lane of this half of the panel.
Columns columns_of(const Matrix& m, int64_t panel, int first, const float* source, int64_t stride) {
  Columns columns;
  for (int lane = 0; lane < W; ++lane) {
    const int64_t row = m.row_of(panel, first + lane);
    columns.rows[lane] = row < 0 ? nullptr : source + row * stride;
  }
  return columns;
}

void pack_half(Matrix& m, int64_t panel, int first, const float* source, int64_t stride) {
  const Columns columns = columns_of(m, panel, first, source, stride);
  if (m.format == Format::kInt4) {
    pack_int4(columns, m.k, const_cast<Int4Group*>(int4_groups(m, panel, first / W)));
    return;
  }
  uint32_t* words = static_cast<uint32_t*>(m.data) + panel * (m.padded_k / per_word(m.format)) * kPanel + first;
  switch (m.format) {
    case Format::kFloat32: pack_columns<Format::kFloat32>(columns, m.k, m.padded_k, words); break;
    case Format::kBfloat16: pack_columns<Format::kBfloat16>(columns, m.k, m.padded_k, words); break;
    case Format::kInt8: {
      const Vec scales = scales_of(columns, m.k);
      const IVec sums = pack_columns<Format::kInt8>(columns, m.k, m.padded_k, words, 1.0f / scales);
      const IVec corrections = sums * kActivationZero;
      memcpy(m.scales.get() + panel * kPanel + first, &scales, sizeof scales);
      memcpy(m.corrections.get() + panel * kPanel + first, &corrections, sizeof corrections);
      break;
    }
    case Format::kInt4: break;
  }
}

// A panel as the bfloat16 format has it, then coded.
struct Coder {
  const Matrix& m;
  const float* source;
  int64_t stride;
  Memory<uint32_t> words = take<uint32_t>(m.padded_k * kPanel / 2);

  void code(int64_t panel, CodedBlock* blocks, uint8_t* table, std::vector<RareWeight>& rare) {
    for (int half : {0, W}) {
      pack_columns<Format::kBfloat16>(columns_of(m, panel, half, source, stride), m.k, m.padded_k, words.get() + half);
    }
    code_panel(reinterpret_cast<const bf16*>(words.get()), m.padded_k, blocks, table, rare);
  }
};

// Whether few of the weights are rare, by some of the panels.
bool is_worth_coding(const Matrix& m, const float* source, int64_t stride) {
  constexpr int64_t kSamples = 4, kMostRare = 1024;  // of so many weights one
  if (!ANTIPHON_HAS_CODED || m.format != Format::kBfloat16 || m.num_panels == 0 || m.k == 0) return false;
  Coder coder{m, source, stride};
  const auto blocks = take<CodedBlock>(coded_blocks(m));
  uint8_t table[kNumCodes];
  std::vector<RareWeight> rare;
  for (int64_t i = 0; i < kSamples; ++i) coder.code(m.num_panels * i / kSamples, blocks.get(), table, rare);
  return static_cast<int64_t>(rare.size()) * kMostRare <= kSamples * m.padded_k * kPanel;
}

void pack_coded(Pool& pool, Matrix& m, const float* source, int64_t stride) {
  m.coding = std::make_unique<Coding>();
  m.coding->tables = take<uint8_t>(m.num_panels * kNumCodes);
  std::vector<std::vector<RareWeight>> rare(m.num_panels);
  pool.run_ranges(m.num_panels, 1, [&](int64_t first, int64_t last, int) {
    Coder coder{m, source, stride};
    for (int64_t panel = first; panel < last; ++panel) {
      auto* blocks = static_cast<CodedBlock*>(m.data) + panel * coded_blocks(m);
      coder.code(panel, blocks, m.coding->tables.get() + panel * kNumCodes, rare[panel]);
    }
  });
  for (const auto& of_panel : rare) {
    m.coding->first_of_panel.push_back(static_cast<int64_t>(m.coding->rare.size()));
    m.coding->rare.insert(m.coding->rare.end(), of_panel.begin(), of_panel.end());
  }
  m.coding->first_of_panel.push_back(static_cast<int64_t>(m.coding->rare.size()));
}

void pack_bias(Matrix& m, const float* bias) {
  m.bias = take_zeros<float>(m.num_panels * kPanel);
  for (int64_t panel = 0; panel < m.num_panels; ++panel) {
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t row = m.row_of(panel, lane);
      if (row >= 0) m.bias[panel * kPanel + lane] = bias[row];
    }
  }
}

// read(k, place) for each k of one row; `place` is that of the number within the panel.
template <int Group, typename Read>
void for_each_place(const Matrix& m, int lane, const Read& read) {
  for (int64_t k = 0; k < m.k; ++k) read(k, (k / Group * kPanel + lane) * Group + k % Group);
}

}  // namespace

std::unique_ptr<Matrix> pack(Pool& pool, const Packing& packing, const float* source, int64_t n, int64_t k,
                             int64_t stride, const float* bias) {
  auto m = std::make_unique<Matrix>();
  const Format format = packing.format;
  const bool gated = packing.gated;
  m->format = format;
  m->gated = gated;
  m->exact = packing.exact;
  m->n = n;
  m->k = k;
  m->padded_k = round_up(k, group_of(format));
  m->num_panels = gated ? (n / 2 + W - 1) / W : (n + kPanel - 1) / kPanel;
  m->out_columns = gated ? n / 2 : n;
  const int64_t lanes = m->num_panels * kPanel;
  const bool coded = packing.coded && is_worth_coding(*m, source, stride);
  m->bytes = coded ? m->num_panels * coded_blocks(*m) * static_cast<int64_t>(sizeof(CodedBlock))
                   : bytes_of(format, lanes * m->padded_k);
  m->memory = take_piece(m->bytes);  // its padding is packed too
  m->data = m->memory.get();
  if (bias != nullptr) pack_bias(*m, bias);
  if (format == Format::kInt8) {
    m->scales = take<float>(lanes);
    m->corrections = take<int32_t>(lanes);
  }
  if (coded) {
    pack_coded(pool, *m, source, stride);
    return m;
  }
  pool.run_ranges(m->num_panels, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t panel = first; panel < last; ++panel) {
      for (int half : {0, W}) pack_half(*m, panel, half, source, stride);
    }
  });
  return m;
}

void unpack_row(const Matrix& m, int64_t row, float* out) {
  int64_t panel = row / kPanel;
  int lane = static_cast<int>(row % kPanel);
  int64_t start = panel * m.padded_k * kPanel;
  if (m.format == Format::kInt4) {
    unpack_int4_row(m, row, out);
  } else if (m.format == Format::kInt8) {
    auto* data = static_cast<const int8_t*>(m.data) + start;
    float scale = m.scales[row];
    for_each_place<4>(m, lane, [&](int64_t k, int64_t place) { out[k] = scale * data[place]; });
  } else if (m.coding != nullptr) {
    unpack_coded_row(m, row, out);
  } else if (m.format == Format::kBfloat16) {
    auto* data = static_cast<const bf16*>(m.data) + start;
    for_each_place<2>(m, lane, [&](int64_t k, int64_t place) { out[k] = to_float(data[place]); });
  } else {
    auto* data = static_cast<const float*>(m.data) + start;
    for_each_place<1>(m, lane, [&](int64_t k, int64_t place) { out[k] = data[place]; });
  }
}

}  // namespace antiphon
