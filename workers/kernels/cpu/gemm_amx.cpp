#include "gemm_amx.h"

#include <algorithm>

#include "coded.h"
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

// Activations of each kind: of kRows rows at once; a row has so many rows of sums.
struct Digits {
  using Number = bf16;
  using Sum = float;
  static constexpr int64_t kRows = kAmxRows, kRowsOfSums = 1;
  const Rows& rows;

  int64_t numbers_per_row() const { return rows.digits.num_digits; }
  TileRows<bf16> at(int64_t row, int64_t count, int64_t k) const { return tile_rows(rows.digits, row, count, k); }

  ANTIPHON_INLINE void take(const Matrix&, int64_t, int64_t, const float* sums, Vec& c0, Vec& c1) const {
    c0 = load(sums);
    c1 = load(sums + W);
  }
};

struct Numbers {
  using Number = uint8_t;
  using Sum = int32_t;
  static constexpr int64_t kRows = kAmxRows / 2, kRowsOfSums = 2;
  const Rows& rows;

  int64_t numbers_per_row() const { return 2; }
  TileRows<uint8_t> at(int64_t row, int64_t count, int64_t k) const {
    const uint8_t* start = rows.numbers + 2 * row * rows.numbers_stride + k;
    return {start, 2 * count, rows.numbers_stride, 16 * rows.numbers_stride, 64};
  }

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
    for (int64_t i = std::min(most, count_); i > 0; --i, --count_, ++row_, sums_ += Kind::kRowsOfSums * kPanel) {
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

// Weights that lie as tiles read them.
template <typename Weight>
class Plain {
 public:
  // Those of panels `first` to `last`. `from_memory`: they have to be fetched ahead; what was just unpacked is near.
  Plain(const Matrix& m, const Weight* weights, int64_t first, int64_t last, bool from_memory)
      : m_(m), weights_(weights), first_(first), last_(last), from_memory_(from_memory) {}

  void begin(int64_t) {}

  int64_t num_slices(int64_t num_steps) const {
    return num_steps >= kManySteps ? (panel_bytes() + kSlice - 1) / kSlice : 1;
  }

  // Where a slice is, by which `num_steps` will pass.
  TileWeights slice(int64_t panel, int64_t k, int64_t, int64_t num_steps) {
    const bool many = num_steps >= kManySteps;
    const char* start = reinterpret_cast<const char*>(weights_) + (panel - first_) * panel_bytes();
    if (k == 0) next_panel_ = start + panel_bytes();
    lines_per_tile_ = many && from_memory_ && panel + 1 < last_ ? (kPanel + num_steps - 1) / num_steps : 0;
    TileWeights weights(start + k * kPanel * static_cast<int64_t>(sizeof(Weight)));
    weights.fresh = from_memory_ && !many;
    return weights;
  }

  // The panel after it is fetched by many steps: each tile some lines.
  ANTIPHON_INLINE void meanwhile() {
    for (int64_t i = 0; i < lines_per_tile_; ++i, next_panel_ += 64) prefetch_to_second_cache(next_panel_);
  }

 private:
  int64_t panel_bytes() const { return m_.padded_k * kPanel * static_cast<int64_t>(sizeof(Weight)); }

  const Matrix& m_;
  const Weight* const weights_;
  const int64_t first_, last_;
  const bool from_memory_;
  const char* next_panel_ = nullptr;
  int64_t lines_per_tile_ = 0;
};

// Coded weights, unpacked into a ring between the tiles: some tiles ahead of a single step, else slices ahead.
class Coded {
 public:
  Coded(const Matrix& m, char* room, int64_t first, int64_t last)
      : m_(m), ring_(reinterpret_cast<bf16*>(room)), first_(first), last_(last), unpacker_(m, ring_, 1, first, last) {}

  void begin(int64_t num_steps) {
    ring_size_ = num_steps >= kManySteps ? kCodedRoom / kBytes : kSmallRing;
    unpacker_ = CodedUnpacker(m_, ring_, ring_size_, first_, last_);
  }

  int64_t num_slices(int64_t num_steps) const {
    const int64_t most = num_steps >= kManySteps ? kSlice / kBytes : kSmallRing / 2;
    return num_steps > 1 ? (m_.padded_k + most - 1) / most : 1;
  }

  TileWeights slice(int64_t panel, int64_t k, int64_t size, int64_t num_steps) {
    const int64_t place = unpacker_.place_of(panel, k);
    unpacker_.unpack_to(place + (num_steps > 1 ? size : std::min(kAhead, size)));
    limit_ = num_steps > 1 ? place + ring_size_ : INT64_MAX;  // a single step reads as quickly as this unpacks
    tiles_for_one_ = tiles_left_ = num_steps;
    TileWeights weights(ring_);
    weights.start = place % ring_size_ * kBytes;
    weights.mask = ring_size_ * kBytes - 1;
    return weights;
  }

  ANTIPHON_INLINE void meanwhile() {
    if (--tiles_left_ > 0) return;
    tiles_left_ = tiles_for_one_;
    unpacker_.unpack(kTile, limit_);
    before_tiles();
  }

 private:
  static constexpr int64_t kTile = 32, kSmallRing = 256, kAhead = 96;  // of k
  static constexpr int64_t kBytes = kPanel * sizeof(bf16);             // of one k

  const Matrix& m_;
  bf16* const ring_;
  const int64_t first_, last_;
  CodedUnpacker unpacker_;
  int64_t ring_size_ = 1, tiles_for_one_ = 0, tiles_left_ = 0, limit_ = 0;
};

template <typename Kind, typename Source>
class Tiles {
 public:
  Tiles(const Kind& kind, const Matrix& m, const Output& out, Source& source)
      : kind_(kind),
        m_(m),
        out_(out),
        source_(source),
        unfinished_(kind, m, out) {}

  void multiply(int64_t first_panel, int64_t last_panel, int64_t num_rows) {
    const int64_t step_numbers = kAtOnce * kind_.numbers_per_row() * m_.padded_k;
    const int64_t step_bytes = step_numbers * static_cast<int64_t>(sizeof(typename Kind::Number));
    const int64_t block = kAtOnce * std::clamp(kCachedOperands / step_bytes, kManySteps, kMostSteps);
    for (int64_t row = 0; row < num_rows; row += block) {
      const int64_t last = std::min(num_rows, row + block);
      source_.begin((last - row + kAtOnce - 1) / kAtOnce);
      for (int64_t panel = first_panel; panel < last_panel; ++panel) multiply_block(panel, row, last);
    }
  }

 private:
  static constexpr int64_t kTile = 64 / sizeof(typename Kind::Number);  // of k
  static constexpr int64_t kAtOnce = Kind::kRows;

  void multiply_block(int64_t panel, int64_t first, int64_t last) {
    const int64_t num_steps = (last - first + kAtOnce - 1) / kAtOnce;
    const int64_t num_slices = source_.num_slices(num_steps);
    const int64_t slice = round_up<int64_t>((m_.padded_k + num_slices - 1) / num_slices, kTile);
    for (int64_t k = 0; k < m_.padded_k; k += slice) {
      const int64_t size = std::min(slice, m_.padded_k - k);
      TileWeights weights = source_.slice(panel, k, size, num_steps);
      const bool fresh = weights.fresh;
      for (int64_t step = 0; step < num_steps; ++step) {
        const int64_t row = first + step * kAtOnce;
        AmxPass pass;
        weights.fresh = fresh && row == 0;
        pass.streaming = num_steps >= kManySteps;
        pass.more = k > 0;
        auto* sums = sums_[num_slices > 1 ? step : next_sums_++ % 2];
        multiply_step(weights, panel, k, size, row, std::min(kAtOnce, last - row), pass, sums);
      }
    }
  }

  void multiply_step(const TileWeights& weights, int64_t panel, int64_t k, int64_t size, int64_t row, int64_t count,
                     const AmxPass& pass, typename Kind::Sum* sums) {
    const bool is_last = k + size == m_.padded_k;
    const int64_t rows_per_tile = (kAtOnce * kTile + size - 1) / size;
    auto meanwhile = [&] {
      unfinished_.do_rows(rows_per_tile);
      source_.meanwhile();
    };
    amx_sum(kind_.at(row, count, k), weights, size, pass, sums, kPanel, meanwhile);
    if (is_last) unfinished_.set(panel, row, count, sums);
  }

  const Kind& kind_;
  const Matrix& m_;
  const Output& out_;
  Source& source_;
  int64_t next_sums_ = 0;
  alignas(64) typename Kind::Sum sums_[kMostSteps][kAmxRows * kPanel];  // two of them where nothing is added to later
  Unfinished<Kind> unfinished_;
};

}  // namespace

void multiply_digits(const Matrix& matrix, const bf16* weights, int64_t first, int64_t last, const Rows& rows,
                     int64_t m, const Output& out) {
  const Digits digits{rows};
  Plain source(matrix, weights, first, last, matrix.format == Format::kBfloat16);
  Tiles(digits, matrix, out, source).multiply(first, last, m);
}

void multiply_in_tiles(const Matrix& matrix, int64_t first, int64_t last, const Rows& rows, int64_t m, char* room,
                       const Output& out) {
  const bool in_digits = rows.digits.num_digits > 0;
  const AmxScope scope(in_digits && m <= 8 ? 8 : 16, matrix.format == Format::kInt4 && !in_digits ? kInt4Group : 64);
  const int64_t start = first * matrix.padded_k * kPanel;
  if (matrix.coding != nullptr) {
    const Digits digits{rows};
    Coded source(matrix, room, first, last);
    Tiles(digits, matrix, out, source).multiply(first, last, m);
  } else if (matrix.format == Format::kBfloat16) {
    multiply_digits(matrix, static_cast<const bf16*>(matrix.data) + start, first, last, rows, m, out);
  } else if (matrix.format == Format::kInt8) {
    const Numbers numbers{rows};
    Plain source(matrix, static_cast<const int8_t*>(matrix.data) + start, first, last, true);
    Tiles(numbers, matrix, out, source).multiply(first, last, m);
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
