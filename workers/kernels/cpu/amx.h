// Products in the tile registers of Intel's AMX, for many rows at once. A tile multiplies 16 rows by 16 columns over 64
// bytes of k; a step here is 32 rows by one panel. Absent from other builds, and unused where the system refuses it.
#pragma once

#include "digits.h"
#include "matrix.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define ANTIPHON_HAS_AMX 1
#else
#define ANTIPHON_HAS_AMX 0
#endif

#if ANTIPHON_HAS_AMX
#include <immintrin.h>
#endif

namespace antiphon {

constexpr int64_t kMinAmxRows = 16;  // below it reading the weights takes longer than multiplying vectors by them

#if ANTIPHON_HAS_AMX

constexpr int64_t kAmxRows = 32;

// Tiles configured while it lives: sums are `num_rows` of 64 bytes, as many as of activations, fewer of which take less
// time. A row of activations is `depth` bytes, and as many rows of weights belong to it.
class AmxScope {
 public:
  explicit AmxScope(int num_rows = 16, int depth = 64) {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = i == 4 || i == 5 ? depth : 64;
      config[48 + i] = i >= 6 ? depth / 4 : num_rows;
    }
    // GCC's intrinsic says that it reads 8 bytes; this says that all of them matter.
    asm volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
  }
  ~AmxScope() { _tile_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// What tiles are loaded from is in memory from here on: GCC's intrinsics do not say that they read it.
ANTIPHON_INLINE void before_tiles() { asm volatile("" : : : "memory"); }

// A quarter of the weights of a later step. All of them at once would hold up the tiles of this one, and tiles loaded
// without it wait for memory while nothing is multiplied.
template <int Quarter>
ANTIPHON_INLINE void prefetch_tiles(const char* weights) {
  constexpr int64_t kAhead = 3072;
#pragma GCC unroll 8
  for (int line = 0; line < 8; ++line) prefetch(weights + kAhead + (8 * Quarter + line) * 64);
}

// What a sum of products does to the caches while it multiplies.
struct AmxPass {
  bool streaming = false;  // the rows are not kept in the first cache, which the weights do not leave
  bool more = false;       // `sums` holds products of smaller k, to be added to
};

// Where a sum's weights are: from `start` on, around a ring of mask + 1 bytes where there is one.
struct TileWeights {
  TileWeights(const void* weights) : base(static_cast<const char*>(weights)) {}  // NOLINT: where nothing is special

  const char* base;
  int64_t start = 0, mask = -1;
  bool fresh = false;  // they come from memory, and are fetched some way ahead
  int num_digits = 1;  // whose products are added up, but for those of the rows' last digits that would change nothing
  int64_t digit_bytes = 0;
};

// Up to 32 rows of activations, in one tile of 16 of them or two. A row of more than one digit is their sum.
template <typename Element>
struct TileRows {
  const Element* start;
  int64_t count;
  int64_t stride, tile_stride, depth_stride;  // to the next row, the second tile's rows, and the next tile of k
  int num_digits = 1;
  int64_t digit_stride = 0;
};

// Rows `row`, a multiple of 16, and those that follow; from k, a multiple of 32, on.
ANTIPHON_INLINE TileRows<bf16> tile_rows(const DigitRows& rows, int64_t row, int64_t count, int64_t k) {
  constexpr int64_t kTile = DigitRows::kTile;
  return {rows.at(row, k), count, DigitRows::kDepth, rows.num_digits * DigitRows::kRows * rows.stride,
          rows.num_digits * kTile, rows.num_digits, kTile};
}

// Sums [16 or 32][kPanel] of products, `sums_stride` from row to row. Rows past `rows.count` are read (they belong to
// the same buffer) and come out as anything. Four tiles hold the sums, of two tiles of rows by both halves of the
// panel: where there are no more than 16 rows, the second one is another digit of the same. Tiles take many cycles for
// few instructions: `meanwhile` is called between them, to do something else.
#define ANTIPHON_AMX_SUM(dot, Element, per_tile)                                                       \
  before_tiles();                                                                                      \
  const bool both = rows.count > 16;                                                                   \
  const int64_t sum_bytes = sums_stride * 4;                                                           \
  auto *const second_sums = sums + 16 * sums_stride;                                                   \
  _tile_zero(2);                                                                                       \
  _tile_zero(3);                                                                                       \
  if (pass.more) {                                                                                     \
    _tile_loadd(0, sums, sum_bytes);                                                                   \
    _tile_loadd(1, sums + 16, sum_bytes);                                                              \
    if (both) {                                                                                        \
      _tile_loadd(2, second_sums, sum_bytes);                                                          \
      _tile_loadd(3, second_sums + 16, sum_bytes);                                                     \
    }                                                                                                  \
  } else {                                                                                             \
    _tile_zero(0);                                                                                     \
    _tile_zero(1);                                                                                     \
  }                                                                                                    \
  const int64_t second = both ? rows.tile_stride : rows.digit_stride;                                  \
  const int64_t next_two = both ? rows.digit_stride : 2 * rows.digit_stride;                           \
  const int64_t row_bytes = rows.stride * sizeof(Element);                                             \
  for (int digit = weights.num_digits - 1; digit >= 0; --digit) {                                      \
    const int num_tiles = (both ? 2 : 1) * (rows.num_digits - digit);                                  \
    const Element* row_tiles = rows.start;                                                             \
    int64_t at = weights.start;                                                                        \
    for (int64_t i = 0; i < k; i += per_tile, at += 16 * kPanel * 4, row_tiles += rows.depth_stride) { \
      const char* w = weights.base + digit * weights.digit_bytes + (at & weights.mask);                \
      const Element* a = row_tiles;                                                                    \
      ANTIPHON_AMX_ROWS(4, a);                                                                         \
      if (weights.fresh) prefetch_tiles<0>(w);                                                         \
      _tile_loadd(6, w, kPanel * 4);                                                                   \
      if (weights.fresh) prefetch_tiles<1>(w);                                                         \
      dot(0, 4, 6);                                                                                    \
      if (weights.fresh) prefetch_tiles<2>(w);                                                         \
      _tile_loadd(7, w + 64, kPanel * 4);                                                              \
      if (weights.fresh) prefetch_tiles<3>(w);                                                         \
      dot(1, 4, 7);                                                                                    \
      meanwhile();                                                                                     \
      for (int tile = 1; tile < num_tiles; ++tile) {                                                   \
        ANTIPHON_AMX_ROWS(5, a + second);                                                              \
        dot(2, 5, 6);                                                                                  \
        dot(3, 5, 7);                                                                                  \
        if (++tile == num_tiles) break;                                                                \
        a += next_two;                                                                                 \
        ANTIPHON_AMX_ROWS(4, a);                                                                       \
        dot(0, 4, 6);                                                                                  \
        dot(1, 4, 7);                                                                                  \
      }                                                                                                \
    }                                                                                                  \
  }                                                                                                    \
  _tile_stored(0, sums, sum_bytes);                                                                    \
  _tile_stored(1, sums + 16, sum_bytes);                                                               \
  if (both) {                                                                                          \
    _tile_stored(2, second_sums, sum_bytes);                                                           \
    _tile_stored(3, second_sums + 16, sum_bytes);                                                      \
  }

#define ANTIPHON_AMX_ROWS(tile, rows)          \
  if (pass.streaming) {                        \
    _tile_stream_loadd(tile, rows, row_bytes); \
  } else {                                     \
    _tile_loadd(tile, rows, row_bytes);        \
  }

template <typename Meanwhile>
ANTIPHON_INLINE void amx_sum(const TileRows<uint8_t>& rows, const TileWeights& weights, int64_t k, const AmxPass& pass,
                             int32_t* sums, int64_t sums_stride, const Meanwhile& meanwhile) {
  ANTIPHON_AMX_SUM(_tile_dpbusd, uint8_t, 64);
}

template <typename Meanwhile>
ANTIPHON_INLINE void amx_sum(const TileRows<bf16>& rows, const TileWeights& weights, int64_t k, const AmxPass& pass,
                             float* sums, int64_t sums_stride, const Meanwhile& meanwhile) {
  ANTIPHON_AMX_SUM(_tile_dpbf16ps, bf16, 32);
  if (!both && rows.num_digits > 1) {
    alignas(64) float others[16 * kPanel];
    _tile_stored(2, others, kPanel * 4);
    _tile_stored(3, others + 16, kPanel * 4);
    before_tiles();  // which the compiler has not seen written
    for (int64_t row = 0; row < rows.count; ++row) {
      for (int i = 0; i < kPanel; i += W) {
        store(sums + row * sums_stride + i, load(sums + row * sums_stride + i) + load(others + row * kPanel + i));
      }
    }
  }
}

#undef ANTIPHON_AMX_ROWS
#undef ANTIPHON_AMX_SUM

#endif

}  // namespace antiphon
