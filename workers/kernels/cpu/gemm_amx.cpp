#include "gemm_amx.h"

#include <algorithm>

#include "finish.h"
#include "int4.h"

namespace antiphon {

#if ANTIPHON_HAS_AMX

namespace {

// A step multiplies as many rows as tiles hold by a slice of a panel. A slice stays in the first cache while the steps
// of a block pass by, whose rows stay in the second one from panel to panel.
constexpr int64_t kMostSteps = 16;
constexpr int64_t kManySteps = 4;               // from here on a slice is worth keeping
constexpr int64_t kSlice = 36 << 10;            // bytes
constexpr int64_t kCachedOperands = 768 << 10;  // bytes of a block's rows

// Activations of each kind: `per_row` rows of operands make one of results.
struct Digits {
  using Number = bf16;
  using Weight = bf16;
  using Sum = float;
  const Rows& rows;

  int64_t per_row() const { return rows.num_digits; }
  int64_t stride() const { return rows.digits_stride; }
  const bf16* operands(int64_t row) const { return rows.digits + row * rows.num_digits * rows.digits_stride; }

  ANTIPHON_INLINE void take(const Matrix&, int64_t, int64_t, const float* sums, Vec& c0, Vec& c1) const {
    c0 = c1 = Vec{};
    for (int digit = rows.num_digits - 1; digit >= 0; --digit) {  // the smallest first
      c0 += load(sums + digit * kPanel);
      c1 += load(sums + digit * kPanel + W);
    }
  }
};

struct Numbers {
  using Number = uint8_t;
  using Weight = int8_t;
  using Sum = int32_t;
  const Rows& rows;

  int64_t per_row() const { return 2; }
  int64_t stride() const { return rows.numbers_stride; }
  const uint8_t* operands(int64_t row) const { return rows.numbers + 2 * row * rows.numbers_stride; }

  ANTIPHON_INLINE void take(const Matrix& m, int64_t panel, int64_t row, const int32_t* sums, Vec& c0, Vec& c1) const {
    IVec both[2][2];
    memcpy(both, sums, sizeof both);
    dequantise(m, panel, rows.scales[row], both[0], both[1], c0, c1);
  }
};

// Results of a step that are still to be finished, which is done while the tiles of the next one multiply.
template <typename Kind>
class Unfinished {
 public:
  Unfinished(const Kind& kind, const Matrix& m, const Output& out) : kind_(kind), m_(m), out_(out) {}
  ~Unfinished() { do_rows(count_); }

  void set(int64_t panel, int64_t row, int64_t count, const typename Kind::Sum* sums) {
    do_rows(count_);
    panel_ = panel;
    row_ = row;
    count_ = count;
    sums_ = sums;
  }

  ANTIPHON_INLINE void do_rows(int64_t most) {
    for (int64_t i = std::min(most, count_); i > 0; --i, --count_, ++row_, sums_ += kind_.per_row() * kPanel) {
      Vec c0, c1;
      kind_.take(m_, panel_, row_, sums_, c0, c1);
      finish(m_, panel_, out_, row_, c0, c1);
    }
  }

 private:
  const Kind& kind_;
  const Matrix& m_;
  const Output& out_;
  int64_t panel_ = 0, row_ = 0, count_ = 0;
  const typename Kind::Sum* sums_ = nullptr;
};

template <typename Kind>
class Tiles {
 public:
  using Weight = typename Kind::Weight;

  // `from_memory`: the weights have to be fetched ahead; those that were unpacked just now are near.
  Tiles(const Kind& kind, const Matrix& m, const Output& out, bool from_memory)
      : kind_(kind),
        m_(m),
        out_(out),
        from_memory_(from_memory),
        at_once_(kAmxRows / kind.per_row()),
        unfinished_(kind, m, out) {}

  // `weights` are those of the first panel.
  void multiply(const Weight* weights, int64_t first_panel, int64_t last_panel, int64_t num_rows) {
    const int64_t panel_size = m_.padded_k * kPanel;
    const int64_t step_bytes = kAmxRows * m_.padded_k * static_cast<int64_t>(sizeof(typename Kind::Number));
    const int64_t block = at_once_ * std::clamp(kCachedOperands / step_bytes, kManySteps, kMostSteps);
    for (int64_t row = 0; row < num_rows; row += block) {
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const Weight* own = weights + (panel - first_panel) * panel_size;
        multiply_block(own, panel, row, std::min(num_rows, row + block), from_memory_ && panel + 1 < last_panel);
      }
    }
  }

 private:
  static constexpr int64_t kTile = 64 / sizeof(Weight);  // of k
  static constexpr int64_t kTileLines = kPanel;          // of a panel

  // The panel after it is fetched meanwhile, if it `fetches_next`: each tile a few of its lines.
  void multiply_block(const Weight* weights, int64_t panel, int64_t first, int64_t last, bool fetches_next) {
    const int64_t num_steps = (last - first + at_once_ - 1) / at_once_;
    const bool many = num_steps >= kManySteps;
    const int64_t bytes = m_.padded_k * kPanel * static_cast<int64_t>(sizeof(Weight));
    next_panel_ = reinterpret_cast<const char*>(weights) + bytes;
    next_lines_per_tile_ = many && fetches_next ? (kTileLines + num_steps - 1) / num_steps : 0;
    const int64_t num_slices = many ? (bytes + kSlice - 1) / kSlice : 1;
    const int64_t slice = round_up<int64_t>((m_.padded_k + num_slices - 1) / num_slices, kTile);
    for (int64_t k = 0; k < m_.padded_k; k += slice) {
      const int64_t size = std::min(slice, m_.padded_k - k);
      for (int64_t step = 0; step < num_steps; ++step) {
        const int64_t row = first + step * at_once_;
        AmxPass pass;
        pass.fresh = from_memory_ && row == 0 && !many;
        pass.streaming = many;
        pass.more = k > 0;
        auto* sums = sums_[num_slices > 1 ? step : next_sums_++ % 2];
        multiply_step(weights + k * kPanel, panel, k, size, row, std::min(at_once_, last - row), pass, sums);
      }
    }
  }

  void multiply_step(const Weight* weights, int64_t panel, int64_t k, int64_t size, int64_t row, int64_t count,
                     const AmxPass& pass, typename Kind::Sum* sums) {
    const bool is_last = k + size == m_.padded_k;
    const bool fetches = pass.streaming && is_last && out_.digits == nullptr;
    const float* target = out_.data + (fetches ? row * out_.stride + panel * (m_.gated ? W : kPanel) : 0);
    const int64_t rows_per_tile = (kAmxRows * kTile + size - 1) / size;
    auto meanwhile = [&] {
      unfinished_.do_rows(rows_per_tile);
      for (int64_t i = 0; i < next_lines_per_tile_; ++i, next_panel_ += 64) prefetch_to_second_cache(next_panel_);
      if (!fetches) return;
      for (int64_t i = 0; i < rows_per_tile; ++i, target += out_.stride) {
        prefetch_to_write(target);
        if (!m_.gated) prefetch_to_write(target + W);
      }
    };
    amx_sum(kind_.operands(row) + k, kind_.stride(), weights, size, count * kind_.per_row(), pass, sums, meanwhile);
    if (is_last) unfinished_.set(panel, row, count, sums);
  }

  const Kind& kind_;
  const Matrix& m_;
  const Output& out_;
  const bool from_memory_;
  const int64_t at_once_;
  int64_t next_sums_ = 0;
  const char* next_panel_ = nullptr;
  int64_t next_lines_per_tile_ = 0;
  alignas(64) typename Kind::Sum sums_[kMostSteps][kAmxRows * kPanel];  // two of them where nothing is added to later
  Unfinished<Kind> unfinished_;
};

}  // namespace

void multiply_digits(const Matrix& matrix, const bf16* weights, int64_t first, int64_t last, const Rows& rows,
                     int64_t m, const Output& out) {
  const Digits digits{rows};
  Tiles<Digits>(digits, matrix, out, matrix.format == Format::kBfloat16).multiply(weights, first, last, m);
}

void multiply_in_tiles(const Matrix& matrix, int64_t first, int64_t last, const Rows& rows, int64_t m, char* room,
                       const Output& out) {
  const bool in_digits = rows.num_digits > 0;
  const AmxScope scope(matrix.format == Format::kInt4 && !in_digits ? kInt4Group : 64);
  const int64_t start = first * matrix.padded_k * kPanel;
  if (matrix.format == Format::kBfloat16) {
    multiply_digits(matrix, static_cast<const bf16*>(matrix.data) + start, first, last, rows, m, out);
  } else if (matrix.format == Format::kInt8) {
    const Numbers numbers{rows};
    auto* weights = static_cast<const int8_t*>(matrix.data) + start;
    Tiles<Numbers>(numbers, matrix, out, true).multiply(weights, first, last, m);
  } else if (in_digits) {
    multiply_unpacked(matrix, first, last, rows, m, room, out);
  } else {
    for (int64_t panel = first; panel < last; ++panel) multiply_int4_panel(matrix, panel, rows, m, room, out);
  }
}

#else

void multiply_in_tiles(const Matrix&, int64_t, int64_t, const Rows&, int64_t, char*, const Output&) {}

#endif

}  // namespace antiphon
