#include <algorithm>

#include "finish.h"
#include "gemm_amx.h"
#include "int4.h"

#if ANTIPHON_HAS_AMX

namespace antiphon {
namespace {

constexpr int kRowsAtOnce = 8;  // two digits each fill a tile

// A panel in tiles of unsigned bytes, [kInt4Group / 4][W][4] for each group: those of its first half, then the others.
struct Tiles {
  const Int4Group* groups[2];
  uint8_t* tiles[2];

  Tiles(const Matrix& m, int64_t panel, char* room)
      : groups{int4_groups(m, panel, 0), int4_groups(m, panel, 1)},
        tiles{reinterpret_cast<uint8_t*>(room), reinterpret_cast<uint8_t*>(room) + m.padded_k * W} {}

  const uint8_t* tile(int half, int64_t g) const { return tiles[half] + g * kInt4Group * W; }

  ANTIPHON_INLINE void unpack(int64_t g) const {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Int4Group* group = groups[half] + g;
      prefetch_bytes<sizeof(Int4Group)>(group);
      uint8_t* out = tiles[half] + g * kInt4Group * W;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        UVec words;
        memcpy(&words, group->words[i], sizeof words);
        const UVec lower = words & 0x0f0f0f0fu, upper = words >> 4 & 0x0f0f0f0fu;
        memcpy(out + i * 4 * W, &lower, sizeof lower);
        memcpy(out + (4 + i) * 4 * W, &upper, sizeof upper);
      }
    }
  }
};

struct Products {
  alignas(64) int32_t digits[2][2 * kRowsAtOnce][W];
};

// The products of one group, for both halves of the panel.
ANTIPHON_INLINE void multiply_group(const uint8_t* a, int64_t stride, const Tiles& tiles, int64_t g,
                                    Products& products) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, a + g * kInt4Group, stride);
  _tile_loadd(6, tiles.tile(0, g), 4 * W);
  _tile_dpbsud(0, 4, 6);
  _tile_loadd(7, tiles.tile(1, g), 4 * W);
  _tile_dpbsud(1, 4, 7);
  _tile_stored(0, products.digits[0], 4 * W);
  _tile_stored(1, products.digits[1], 4 * W);
}

ANTIPHON_INLINE void add_group(const Products& products, const Tiles& tiles, int64_t g, const float* group_sums,
                               int64_t stride, Vec (&acc)[2][kRowsAtOnce]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const Vec scales = load(tiles.groups[half][g].scales), minima = load(tiles.groups[half][g].minima);
#pragma GCC unroll 8
    for (int r = 0; r < kRowsAtOnce; ++r) {
      IVec both[2];
      memcpy(both, products.digits[half][2 * r], sizeof both);
      acc[half][r] += __builtin_convertvector(both[0] * kHighUnit + both[1], Vec) * scales;
      acc[half][r] += group_sums[r * stride + g] * minima;
    }
  }
}

// Sums [kRowsAtOnce][kPanel] of the rows from `row` on, but for their scales. While one group's products are added up,
// the tiles multiply the next. `fresh`: these rows are the first, and the panel is unpacked on the way, ahead of them.
void sum_tile(const Tiles& tiles, int64_t num_groups, bool fresh, const Rows& rows, int64_t row, float* sums) {
  constexpr int64_t kAhead = 2;
  const uint8_t* a = rows.numbers + 2 * row * rows.numbers_stride;
  const float* group_sums = rows.group_sums + row * rows.group_sums_stride;
  Products products[2];
  Vec acc[2][kRowsAtOnce];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kRowsAtOnce; ++i) acc[i / kRowsAtOnce][i % kRowsAtOnce] = Vec{};
  for (int64_t g = 0; fresh && g < kAhead && g < num_groups; ++g) tiles.unpack(g);
  before_tiles();
  for (int64_t g = 0; g <= num_groups; ++g) {
    if (fresh && g + kAhead < num_groups) tiles.unpack(g + kAhead);
    if (g < num_groups) multiply_group(a, rows.numbers_stride, tiles, g, products[g % 2]);
    if (g > 0) add_group(products[(g - 1) % 2], tiles, g - 1, group_sums, rows.group_sums_stride, acc);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRowsAtOnce; ++r) {
    store(sums + r * kPanel, acc[0][r]);
    store(sums + r * kPanel + W, acc[1][r]);
  }
}

// A panel as the bfloat16 format has it: [padded_k / 2][kPanel][2].
void unpack_weights(const Matrix& m, int64_t panel, bf16* out) {
  constexpr uint32_t kHalf = 0x8000;  // of the last bit that is kept
  for (int half = 0; half < 2; ++half) {
    const Int4Group* group = int4_groups(m, panel, half);
    for (int64_t g = 0; g < m.padded_k / kInt4Group; ++g, ++group) {
      prefetch_bytes<sizeof(Int4Group)>(group);
      const Vec scales = load(group->scales), minima = load(group->minima);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        UVec words;
        memcpy(&words, group->words[i], sizeof words);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {  // two of the lower halves of the bytes, two of the upper
          const int shift = pair % 2 * 16 + pair / 2 * 4;
          UVec bits[2];
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j) {
            const IVec number = reinterpret_cast<IVec>(words >> (shift + 8 * j) & 15u);
            bits[j] = reinterpret_cast<UVec>(__builtin_convertvector(number, Vec) * scales + minima) + kHalf;
          }
          const UVec both = (bits[0] >> 16) | (bits[1] & 0xffff0000u);
          const int64_t k = g * kInt4Group + pair / 2 * 16 + 4 * i + pair % 2 * 2;
          memcpy(out + k * kPanel + half * 2 * W, &both, sizeof both);
        }
      }
    }
  }
}

}  // namespace

void multiply_int4_panel(const Matrix& m, int64_t panel, const Rows& rows, int64_t num_rows, char* room,
                         const Output& out) {
  alignas(64) float sums[kRowsAtOnce * kPanel];
  const Tiles tiles(m, panel, room);
  for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
    sum_tile(tiles, m.padded_k / kInt4Group, row == 0, rows, row, sums);
    const int64_t count = std::min<int64_t>(kRowsAtOnce, num_rows - row);
    for (int64_t r = 0; r < count; ++r) {
      const float *own = sums + r * kPanel, scale = rows.scales[row + r];
      finish(m, panel, out, row + r, load(own) * scale, load(own + W) * scale);
    }
  }
}

void multiply_unpacked(const Matrix& m, int64_t first, int64_t last, const Rows& rows, int64_t num_rows, char* room,
                       const Output& out) {
  const int64_t panel_size = m.padded_k * kPanel;
  const int64_t at_once = std::max<int64_t>(1, rows.unpacked_stride / (2 * panel_size));
  bf16* weights = reinterpret_cast<bf16*>(room);
  for (int64_t start = first; start < last; start += at_once) {
    const int64_t end = std::min(last, start + at_once);
    for (int64_t panel = start; panel < end; ++panel) unpack_weights(m, panel, weights + (panel - start) * panel_size);
    multiply_digits(m, weights, start, end, rows, num_rows, out);
  }
}

}  // namespace antiphon

#endif
