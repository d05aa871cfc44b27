#include "gemm.h"

#include <algorithm>
#include <utility>

#include "amx.h"
#include "quantize.h"

#if ANTIPHON_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace antiphon {
namespace {

[[maybe_unused]] constexpr int64_t kAmxBlock = 64;  // rows whose results are written while their lines are at hand
constexpr int64_t kMostRowsInTwoDigits = 32;  // up to here reading the weights takes longer than multiplying
constexpr int64_t kCachedActivations = 448 << 10;  // bytes of rows that stay near a core while panels pass by

ANTIPHON_INLINE void write(const Output& out, float* row, int64_t column, Vec v) {
  if (column + W <= out.columns) {
    store(row + column, out.then == Then::kAdd ? load(row + column) + v : v);
    return;
  }
  for (int lane = 0; lane < W && column + lane < out.columns; ++lane) {
    row[column + lane] = out.then == Then::kAdd ? row[column + lane] + v[lane] : v[lane];
  }
}

// The two vectors of one row and panel: bias, then what is wanted of them, then memory. Not inlined: once per row of a
// tile it costs little, and a copy for each number of rows costs the build seconds.
__attribute__((noinline)) void finish(const Matrix& m, int64_t panel, const Output& out, int64_t row, Vec c0, Vec c1) {
  if (m.bias != nullptr) {
    c0 += load(m.bias.get() + panel * kPanel);
    c1 += load(m.bias.get() + panel * kPanel + W);
  }
  float* target = out.data + row * out.stride;
  if (m.gated) {
    write(out, target, panel * W, (out.then == Then::kSiluTimesUp ? silu(c0) : gelu_tanh(c0)) * c1);
    return;
  }
  if (out.then == Then::kSoftCap) {
    c0 = out.soft_cap * vtanh(c0 / out.soft_cap);
    c1 = out.soft_cap * vtanh(c1 / out.soft_cap);
  }
  write(out, target, panel * kPanel, c0);
  write(out, target, panel * kPanel + W, c1);
}

template <int R>
using Sums = Vec[R][2];

template <int R>
ANTIPHON_INLINE void sum_float32(const Matrix& m, int64_t panel, const Rows& rows, int64_t row, Sums<R>& acc) {
  auto* weights = static_cast<const float*>(m.data) + panel * m.padded_k * kPanel;
  accumulate<R>(rows.values + row * rows.stride, rows.stride, weights, m.k, acc);
}

// Weights widened in registers, which is exact: a vector holds two neighbouring k of W columns.
template <int R>
ANTIPHON_INLINE void sum_bfloat16(const Matrix& m, int64_t panel, const Rows& rows, int64_t row, Sums<R>& acc) {
  auto* weights = static_cast<const bf16*>(m.data) + panel * m.padded_k * kPanel;
  const float* a = rows.values + row * rows.stride;
  for (int64_t k = 0; k < m.k; k += 2, weights += 2 * kPanel) {
    prefetch_weights(weights);
    UVec pairs[2];
    memcpy(pairs, weights, sizeof pairs);
    Vec even0 = reinterpret_cast<Vec>(pairs[0] << 16), even1 = reinterpret_cast<Vec>(pairs[1] << 16);
    Vec odd0 = reinterpret_cast<Vec>(pairs[0] & 0xffff0000u), odd1 = reinterpret_cast<Vec>(pairs[1] & 0xffff0000u);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float x = a[r * rows.stride + k], y = a[r * rows.stride + k + 1];
      acc[r][0] += x * even0;
      acc[r][1] += x * even1;
      acc[r][0] += y * odd0;
      acc[r][1] += y * odd1;
    }
  }
}

// The sums of the high numbers and those of the low ones become one row of results.
ANTIPHON_INLINE void dequantise(const Matrix& m, int64_t panel, float row_scale, const IVec (&high)[2],
                                const IVec (&low)[2], Vec& c0, Vec& c1) {
  IVec corrections[2];
  Vec scales[2], results[2];
  memcpy(corrections, m.corrections.get() + panel * kPanel, sizeof corrections);
  memcpy(scales, m.scales.get() + panel * kPanel, sizeof scales);
  for (int i = 0; i < 2; ++i) {
    const Vec upper = __builtin_convertvector(high[i] - corrections[i], Vec) * kHighUnit;
    results[i] = (upper + __builtin_convertvector(low[i] - corrections[i], Vec)) * (scales[i] * row_scale);
  }
  c0 = results[0];
  c1 = results[1];
}

template <int R>
ANTIPHON_INLINE void sum_int8(const Matrix& m, int64_t panel, const Rows& rows, int64_t row, Sums<R>& acc) {
  auto* weights = static_cast<const int8_t*>(m.data) + panel * m.padded_k * kPanel;
  const uint8_t* a = rows.numbers + 2 * row * rows.numbers_stride;
  IVec sums[2 * R][2];
#pragma GCC unroll 16
  for (int r = 0; r < 2 * R; ++r) sums[r][0] = sums[r][1] = IVec{};
  for (int64_t k = 0; k < m.k; k += 4, weights += 4 * kPanel) {
    prefetch_weights(weights);
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

template <int R>
void tile(const Matrix& m, int64_t panel, const Rows& rows, int64_t row, const Output& out) {
  Sums<R> acc;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = Vec{};
  switch (m.format) {
    case Format::kFloat32: sum_float32<R>(m, panel, rows, row, acc); break;
    case Format::kBfloat16: sum_bfloat16<R>(m, panel, rows, row, acc); break;
    case Format::kInt8:
      if constexpr (R <= kMaxTileRows / 2) sum_int8<R>(m, panel, rows, row, acc);
      break;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) finish(m, panel, out, row + r, acc[r][0], acc[r][1]);
}

using Tile = void (*)(const Matrix&, int64_t, const Rows&, int64_t, const Output&);

template <int... R>
constexpr Tile tile_of(int rows, std::integer_sequence<int, R...>) {
  constexpr Tile all[] = {tile<R + 1>...};
  return all[rows - 1];
}

void vector_panel(const Matrix& m, int64_t panel, const Rows& rows, int64_t first, int64_t last, const Output& out) {
  const int64_t most = m.format == Format::kInt8 ? kMaxTileRows / 2 : kMaxTileRows;
  const int64_t count = last - first, num_tiles = (count + most - 1) / most;
  for (int64_t i = 0; i < num_tiles; ++i) {
    int64_t from = first + count * i / num_tiles, to = first + count * (i + 1) / num_tiles;
    tile_of(static_cast<int>(to - from), std::make_integer_sequence<int, kMaxTileRows>())(m, panel, rows, from, out);
  }
}

#if ANTIPHON_HAS_AMX
// The same for `count` rows of sums [count][kPanel].
void finish_rows(const Matrix& m, int64_t panel, const Output& out, int64_t row, int64_t count, const float* sums) {
  const int64_t column = panel * kPanel;
  const bool plain = m.bias == nullptr && !m.gated && column + kPanel <= out.columns;
  if (!plain || (out.then != Then::kStore && out.then != Then::kAdd)) {
    for (int64_t r = 0; r < count; ++r) {
      finish(m, panel, out, row + r, load(sums + r * kPanel), load(sums + r * kPanel + W));
    }
    return;
  }
  for (int64_t r = 0; r < count; ++r) {
    float* target = out.data + (row + r) * out.stride + column;
    Vec c0 = load(sums + r * kPanel), c1 = load(sums + r * kPanel + W);
    if (out.then == Then::kAdd) {
      c0 += load(target);
      c1 += load(target + W);
    }
    store(target, c0);
    store(target + W, c1);
  }
}

void amx_panel_int8(const Matrix& m, int64_t panel, const Rows& rows, int64_t first, int64_t last, const Output& out) {
  alignas(64) int32_t raw[kAmxRows * kPanel];
  alignas(64) float sums[kAmxRows / 2 * kPanel];
  auto* weights = static_cast<const int8_t*>(m.data) + panel * m.padded_k * kPanel;
  for (int64_t row = first; row < last; row += kAmxRows / 2) {
    const int64_t count = std::min<int64_t>(kAmxRows / 2, last - row);
    const uint8_t* numbers = rows.numbers + 2 * row * rows.numbers_stride;
    amx_sum_int8(numbers, rows.numbers_stride, weights, m.padded_k, 2 * count, row == 0, raw);
    for (int64_t r = 0; r < count; ++r) {
      IVec both[2][2];
      memcpy(both, raw + 2 * r * kPanel, sizeof both);
      Vec c0, c1;
      dequantise(m, panel, rows.scales[row + r], both[0], both[1], c0, c1);
      store(sums + r * kPanel, c0);
      store(sums + r * kPanel + W, c1);
    }
    finish_rows(m, panel, out, row, count, sums);
  }
}

void amx_panel_bfloat16(const Matrix& m, int64_t panel, const Rows& rows, int64_t first, int64_t last,
                        const Output& out) {
  alignas(64) float sums[kAmxRows * kPanel];
  auto* weights = static_cast<const bf16*>(m.data) + panel * m.padded_k * kPanel;
  const int64_t digits = rows.num_digits, at_once = kAmxRows / digits;
  for (int64_t row = first; row < last; row += at_once) {
    const int64_t count = std::min(at_once, last - row);
    const bf16* operand = rows.digits + row * digits * rows.digits_stride;
    amx_sum_bfloat16(operand, rows.digits_stride, weights, m.padded_k, count * digits, row == 0, sums);
    for (int64_t r = 0; digits > 1 && r < count; ++r) {
      for (int64_t i = 0; i < kPanel; i += W) {
        Vec total = Vec{};
        for (int64_t digit = digits - 1; digit >= 0; --digit) total += load(sums + (r * digits + digit) * kPanel + i);
        store(sums + r * kPanel + i, total);  // r <= r * digits: what it overwrites has been read
      }
    }
    finish_rows(m, panel, out, row, count, sums);
  }
}
#endif

bool uses_amx(const Matrix& m, int64_t num_rows) {
  if (m.format == Format::kInt8) return amx_available() && 2 * num_rows >= kMinAmxRows;
  return num_digits_wanted(m, num_rows) > 0;
}

}  // namespace

bool amx_available() {
#if ANTIPHON_HAS_AMX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

bool wants_numbers(const Matrix& m) { return m.format == Format::kInt8; }

int num_digits_wanted(const Matrix& m, int64_t num_rows) {
  if (m.format != Format::kBfloat16 || !amx_available()) return 0;
  const int digits = m.exact ? 3 : num_rows <= kMostRowsInTwoDigits ? 2 : 1;
  return num_rows * digits >= kMinAmxRows ? digits : 0;
}

void multiply(Pool& pool, const Matrix& matrix, const Rows& rows, int64_t m, const Output& out) {
  if (m == 0 || matrix.num_panels == 0) return;
  [[maybe_unused]] const bool amx = uses_amx(matrix, m);
  const int64_t row_bytes = matrix.k * (matrix.format == Format::kInt8 ? 1 : 4);
  const int64_t block =
      amx ? kAmxBlock : std::max<int64_t>(kMaxTileRows * 8, kCachedActivations / std::max<int64_t>(row_bytes, 1));
  const int64_t grain = std::max<int64_t>(1, matrix.num_panels / (8 * pool.size()));
  const int64_t chunks = (matrix.num_panels + grain - 1) / grain;
  pool.run(chunks, [&](int64_t chunk, int) {
    const int64_t first = matrix.num_panels * chunk / chunks, last = matrix.num_panels * (chunk + 1) / chunks;
#if ANTIPHON_HAS_AMX
    AmxScope scope(amx);
#endif
    for (int64_t row = 0; row < m; row += block) {
      const int64_t end = std::min(m, row + block);
      for (int64_t panel = first; panel < last; ++panel) {
#if ANTIPHON_HAS_AMX
        if (amx) {
          const auto block_of = matrix.format == Format::kInt8 ? amx_panel_int8 : amx_panel_bfloat16;
          block_of(matrix, panel, rows, row, end, out);
          continue;
        }
#endif
        vector_panel(matrix, panel, rows, row, end, out);
      }
    }
  });
}

}  // namespace antiphon
