#include "gemm_vector.h"

#include <algorithm>
#include <utility>

#include "accumulate.h"
#include "coded.h"
#include "finish.h"
#include "int4.h"

namespace antiphon {
namespace {

constexpr int64_t kMinWidenRows = 2 * kMaxTileRows;  // from here bfloat16 numbers are widened once for all tiles
constexpr int64_t kMostWidened = 768 << 10;          // bytes

// Puts right what the stand-ins of a panel's rare weights have added to a row's sums.
__attribute__((noinline)) void add_rare(const Matrix& m, int64_t panel, const float* row, Vec& c0, Vec& c1) {
  for (const RareWeight& rare : m.coding->of(panel)) {
    const float missing = to_float(rare.weight) - to_float(rare.stand_in);
    (rare.lane() < W ? c0 : c1)[rare.lane() % W] += row[rare.k()] * missing;
  }
}

// Not inlined: once per row of a tile it costs little, and a copy for each number of rows costs the build seconds.
__attribute__((noinline)) void finish_row(const Matrix& m, int64_t panel, const Output& out, int64_t row, Vec c0,
                                          Vec c1) {
  finish(m, panel, out, row, c0, c1);
}

template <int R>
using Sums = Vec[R][2];

// Reads the weights of a panel front to back, as `CodedReader` does.
class Bfloat16Reader {
 public:
  Bfloat16Reader(const Matrix& m, int64_t panel)
      : weights_(static_cast<const bf16*>(m.data) + panel * m.padded_k * kPanel) {}

  ANTIPHON_INLINE void read(UVec (&pairs)[4]) {
    prefetch_bytes<sizeof pairs>(weights_);
    memcpy(pairs, weights_, sizeof pairs);
    weights_ += 4 * kPanel;
  }

 private:
  const bf16* weights_;
};

// Weights widened in registers, which is exact: a vector holds two neighbouring k of W columns.
template <int R, typename Reader>
ANTIPHON_INLINE void sum_bfloat16(Reader reader, const Matrix& m, const Rows& rows, int64_t row, Sums<R>& acc) {
  const float* a = rows.values + row * rows.stride;
  for (int64_t k = 0; k < m.k; k += 4) {
    UVec pairs[4];
    reader.read(pairs);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      UVec p0 = pairs[2 * i], p1 = pairs[2 * i + 1];
      Vec even0 = reinterpret_cast<Vec>(p0 << 16), even1 = reinterpret_cast<Vec>(p1 << 16);
      Vec odd0 = reinterpret_cast<Vec>(p0 & 0xffff0000u), odd1 = reinterpret_cast<Vec>(p1 & 0xffff0000u);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float x = a[r * rows.stride + k + 2 * i], y = a[r * rows.stride + k + 2 * i + 1];
        acc[r][0] += x * even0;
        acc[r][1] += x * even1;
        acc[r][0] += y * odd0;
        acc[r][1] += y * odd1;
      }
    }
  }
}

// What is fetched while a tile of rows passes by a panel, a little at each step: one k, or four in int8. One that is
// alone reads as fast as memory gives: it fetches what is a little ahead. Of several each fetches its share of the next
// panel, so that memory is busy all the time.
struct Ahead {
  const char* line;
  int64_t per_step;  // bytes
  bool is_alone;

  Ahead(const Matrix& m, int64_t panel, int64_t tile, int64_t num_tiles) : is_alone(num_tiles == 1) {
    const int64_t bytes = m.bytes / m.num_panels, steps = m.format == Format::kInt8 ? m.padded_k / 4 : m.padded_k;
    per_step = bytes / std::max<int64_t>(1, steps) / num_tiles;
    line = static_cast<const char*>(m.data) + panel * bytes;
    line += is_alone ? kPrefetchAhead : bytes + bytes * tile / num_tiles;
  }

  ANTIPHON_INLINE void fetch() {
    prefetch_to_second_cache(line);
    if (per_step > 64) prefetch_to_second_cache(line + 64);
    line += per_step;
  }
};

// Inlined by force: of a function that does no more than fetch, the compiler leaves out the calls.
struct FetchNear {
  ANTIPHON_INLINE void operator()(const float* weights) const { prefetch_weights(weights); }
};

// `weights`: the panel's.
template <int R>
ANTIPHON_INLINE void sum_float32(const Matrix& m, const float* weights, const Rows& rows, int64_t row, Ahead ahead,
                                 Sums<R>& acc) {
  const float* a = rows.values + row * rows.stride;
  if (ahead.is_alone) {
    accumulate<R>(a, rows.stride, weights, m.k, acc, FetchNear{});
  } else {
    accumulate<R>(a, rows.stride, weights, m.k, acc, [&](const float*) { ahead.fetch(); });
  }
}

template <int R>
ANTIPHON_INLINE void sum_int8(const Matrix& m, int64_t panel, const Rows& rows, int64_t row, Ahead ahead,
                              Sums<R>& acc) {
  auto* weights = static_cast<const int8_t*>(m.data) + panel * m.padded_k * kPanel;
  const uint8_t* a = rows.numbers + 2 * row * rows.numbers_stride;
  IVec sums[2 * R][2];
#pragma GCC unroll 16
  for (int r = 0; r < 2 * R; ++r) sums[r][0] = sums[r][1] = IVec{};
  for (int64_t k = 0; k < m.k; k += 4, weights += 4 * kPanel) {
    ahead.fetch();
    IVec w0, w1;
    memcpy(&w0, weights, sizeof w0);
    memcpy(&w1, weights + sizeof w0, sizeof w1);
#pragma GCC unroll 16
    for (int r = 0; r < 2 * R; ++r) {
      int32_t four;
      memcpy(&four, a + r * rows.numbers_stride + k, 4);
      add_dot4(sums[r][0], four, w0);
      add_dot4(sums[r][1], four, w1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    dequantise(m, panel, rows.scales[row + r], sums[2 * r], sums[2 * r + 1], acc[r][0], acc[r][1]);
  }
}

// `floats`: where its weights are in float32, or null.
struct Panel {
  const Matrix& m;
  int64_t index;
  const float* floats;
};

template <int R>
ANTIPHON_INLINE void sum_as_packed(const Panel& panel, const Rows& rows, int64_t row, const Ahead& ahead,
                                   Sums<R>& acc) {
  const Matrix& m = panel.m;
  if (m.format == Format::kInt8) {
    if constexpr (R <= kMaxTileRows / 2) sum_int8<R>(m, panel.index, rows, row, ahead, acc);
  } else if (m.format == Format::kInt4) {
    if constexpr (R <= kMaxInt4Rows) sum_int4<R>(m, panel.index, rows, row, acc);
  } else if (m.coding == nullptr) {
    sum_bfloat16<R>(Bfloat16Reader(m, panel.index), m, rows, row, acc);
  } else {
#if ANTIPHON_HAS_CODED
    sum_bfloat16<R>(CodedReader(m, panel.index), m, rows, row, acc);
#endif
  }
}

template <int R>
void tile(const Panel& panel, const Rows& rows, int64_t row, const Ahead& ahead, const Output& out) {
  Sums<R> acc;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = Vec{};
  if (panel.floats != nullptr) {
    sum_float32<R>(panel.m, panel.floats, rows, row, ahead, acc);
  } else {
    sum_as_packed<R>(panel, rows, row, ahead, acc);
  }
  const bool has_rare = panel.floats == nullptr && panel.m.coding != nullptr;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    Vec c0 = acc[r][0], c1 = acc[r][1];
    if (has_rare) add_rare(panel.m, panel.index, rows.values + (row + r) * rows.stride, c0, c1);
    finish_row(panel.m, panel.index, out, row + r, c0, c1);
  }
}

using Tile = void (*)(const Panel&, const Rows&, int64_t, const Ahead&, const Output&);

template <int... R>
constexpr Tile tile_of(int rows, std::integer_sequence<int, R...>) {
  constexpr Tile all[] = {tile<R + 1>...};
  return all[rows - 1];
}

// A panel of bfloat16 numbers in float32, [k][kPanel].
template <typename Reader>
void widen(Reader reader, const Matrix& m, int64_t panel, float* out) {
  for (int64_t k = 0; k < m.padded_k; k += 4, out += 4 * kPanel) {
    UVec pairs[4];
    reader.read(pairs);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // two k of W columns
      float* at = out + i / 2 * 2 * kPanel + i % 2 * W;
      store(at, reinterpret_cast<Vec>(pairs[i] << 16));
      store(at + kPanel, reinterpret_cast<Vec>(pairs[i] & 0xffff0000u));
    }
  }
  if (m.coding == nullptr) return;
  float* const start = out - m.padded_k * kPanel;
  for (const RareWeight& rare : m.coding->of(panel)) start[rare.k() * kPanel + rare.lane()] = to_float(rare.weight);
}

const float* floats_of(const Matrix& m, int64_t panel, int64_t num_rows, float* room) {
  if (m.format == Format::kFloat32) return static_cast<const float*>(m.data) + panel * m.padded_k * kPanel;
  if (m.format != Format::kBfloat16 || num_rows < kMinWidenRows || widened_size(m) == 0) return nullptr;
#if ANTIPHON_HAS_CODED
  if (m.coding != nullptr) {
    widen(CodedReader(m, panel), m, panel, room);
    return room;
  }
#endif
  widen(Bfloat16Reader(m, panel), m, panel, room);
  return room;
}

}  // namespace

int64_t widened_size(const Matrix& m) {
  const int64_t bytes = 4 * m.padded_k * kPanel;
  return m.format == Format::kBfloat16 && bytes <= kMostWidened ? bytes : 0;
}

void multiply_panel(const Matrix& m, int64_t panel, const Rows& rows, int64_t first, int64_t last, char* room,
                    const Output& out) {
  const Panel own{m, panel, floats_of(m, panel, last - first, reinterpret_cast<float*>(room))};
  const int64_t most = m.format == Format::kInt8   ? kMaxTileRows / 2
                       : m.format == Format::kInt4 ? kMaxInt4Rows
                                                   : kMaxTileRows;
  const int64_t count = last - first, num_tiles = (count + most - 1) / most;
  for (int64_t i = 0; i < num_tiles; ++i) {
    int64_t from = first + count * i / num_tiles, to = first + count * (i + 1) / num_tiles;
    const Tile tile = tile_of(static_cast<int>(to - from), std::make_integer_sequence<int, kMaxTileRows>());
    tile(own, rows, from, Ahead(m, panel, i, num_tiles), out);
  }
}

}  // namespace antiphon
