// Products in the tile registers of Intel's AMX, for many rows at once. A tile multiplies 16 rows by 16 columns over 64
// bytes of k; a step here is 32 rows by one panel. Absent from other builds, and unused where the system refuses it.
#pragma once

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

// Tiles configured while it lives: sums are 16 rows of 64 bytes, as are the operands where `depth` is 64. Else a row of
// activations is so many bytes, and as many rows of weights belong to it.
class AmxScope {
 public:
  explicit AmxScope(int depth = 64) {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = i == 4 || i == 5 ? depth : 64;
      config[48 + i] = i >= 6 ? depth / 4 : 16;
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
  bool fresh = false;      // the weights come from memory, and are fetched some way ahead
  bool streaming = false;  // the rows are not kept in the first cache, which the weights do not leave
  bool more = false;       // `sums` holds products of smaller k, to be added to
};

// Where a sum's weights are: from `start` on, around a ring of mask + 1 bytes where there is one.
struct TileWeights {
  TileWeights(const void* weights) : base(static_cast<const char*>(weights)) {}  // NOLINT: where nothing is special

  const char* base;
  int64_t start = 0, mask = -1;
  bool fresh = false;  // they come from memory
};

// Sums [16 or 32][kPanel] of up to 32 rows. Rows past `count` are read (they belong to the same buffer) and come out
// as anything; a second tile that no row needs is left out. Tiles take many cycles for few instructions: `meanwhile` is
// called between them, to do something else.
#define ANTIPHON_AMX_SUM(dot, Element, per_tile)                                             \
  before_tiles();                                                                            \
  const bool both = count > 16;                                                              \
  if (pass.more) {                                                                           \
    _tile_loadd(0, sums, kPanel * 4);                                                        \
    _tile_loadd(1, sums + 16, kPanel * 4);                                                   \
    _tile_loadd(2, sums + 16 * kPanel, kPanel * 4);                                          \
    _tile_loadd(3, sums + 16 * kPanel + 16, kPanel * 4);                                     \
  } else {                                                                                   \
    _tile_zero(0);                                                                           \
    _tile_zero(1);                                                                           \
    _tile_zero(2);                                                                           \
    _tile_zero(3);                                                                           \
  }                                                                                          \
  const int64_t tile_bytes = 16 * kPanel * 4, a_bytes = stride * sizeof(Element);            \
  int64_t at = weights.start;                                                                \
  for (int64_t i = 0; i < k; i += per_tile, at += tile_bytes) {                              \
    const char* w = weights.base + (at & weights.mask);                                      \
    if (pass.streaming) {                                                                    \
      _tile_stream_loadd(4, a + i, a_bytes);                                                 \
    } else {                                                                                 \
      _tile_loadd(4, a + i, a_bytes);                                                        \
    }                                                                                        \
    if (pass.fresh) prefetch_tiles<0>(w);                                                    \
    _tile_loadd(6, w, kPanel * 4);                                                           \
    if (pass.fresh) prefetch_tiles<1>(w);                                                    \
    dot(0, 4, 6);                                                                            \
    if (pass.fresh) prefetch_tiles<2>(w);                                                    \
    _tile_loadd(7, w + 64, kPanel * 4);                                                      \
    if (pass.fresh) prefetch_tiles<3>(w);                                                    \
    dot(1, 4, 7);                                                                            \
    meanwhile();                                                                             \
    if (both) {                                                                              \
      if (pass.streaming) {                                                                  \
        _tile_stream_loadd(5, a + 16 * stride + i, a_bytes);                                 \
      } else {                                                                               \
        _tile_loadd(5, a + 16 * stride + i, a_bytes);                                        \
      }                                                                                      \
      dot(2, 5, 6);                                                                          \
      dot(3, 5, 7);                                                                          \
    }                                                                                        \
  }                                                                                          \
  _tile_stored(0, sums, kPanel * 4);                                                         \
  _tile_stored(1, sums + 16, kPanel * 4);                                                    \
  if (both) {                                                                                \
    _tile_stored(2, sums + 16 * kPanel, kPanel * 4);                                         \
    _tile_stored(3, sums + 16 * kPanel + 16, kPanel * 4);                                    \
  }

template <typename Meanwhile>
ANTIPHON_INLINE void amx_sum(const uint8_t* a, int64_t stride, const TileWeights& weights, int64_t k, int64_t count,
                             const AmxPass& pass, int32_t* sums, const Meanwhile& meanwhile) {
  ANTIPHON_AMX_SUM(_tile_dpbusd, uint8_t, 64);
}

template <typename Meanwhile>
ANTIPHON_INLINE void amx_sum(const bf16* a, int64_t stride, const TileWeights& weights, int64_t k, int64_t count,
                             const AmxPass& pass, float* sums, const Meanwhile& meanwhile) {
  ANTIPHON_AMX_SUM(_tile_dpbf16ps, bf16, 32);
}

#undef ANTIPHON_AMX_SUM

#endif

}  // namespace antiphon
