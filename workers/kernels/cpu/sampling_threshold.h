// Where top-k and top-p cut a row of logits, found by counting and weighing instead of sorting. Knows neither how
// tokens are weighed nor how one is drawn.
#pragma once

#include <cstring>
#include <limits>

#include "simd.h"

namespace antiphon {

constexpr int64_t kBlock = 256;  // token ids of one block of the draw; BLOCK in workers/sampler.py
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What a thread works in. Tokens have a distance, which is minus their log weight: 0 for the likeliest, infinite for
// one that cannot come. Past the vocabulary's end up to a whole block they are infinitely far and weigh nothing.
struct SamplingScratch {
  int64_t size;  // whole blocks
  float *distances, *weights;            // [size]
  float *near_distances, *near_weights;  // [size + W], the tokens that a threshold may still be among
  float* totals;                         // [blocks], the weight in each; zeros up to a multiple of 4

  SamplingScratch(float* memory, int64_t vocab_size) : size(round_up(vocab_size, kBlock)) {
    distances = memory;
    weights = distances + size;
    near_distances = weights + size;
    near_weights = near_distances + size + W;
    totals = near_weights + size + W;
  }

  static int64_t num_floats(int64_t vocab_size) {
    const int64_t size = round_up(vocab_size, kBlock);
    return 4 * size + 2 * W + round_up(size / kBlock, int64_t{4});
  }
};

// Numbers that are not negative are ordered like their bits.
ANTIPHON_INLINE int64_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

ANTIPHON_INLINE float from_bits(int64_t wide) {
  const int32_t bits = static_cast<int32_t>(wide);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

constexpr int kPivots = 8;

// Within low .. high: most of them evenly spaced as numbers, which suits logits as models make them, the last two
// evenly spaced as bits, which in twenty rounds find any.
inline void place_pivots(float low, float high, float (&pivots)[kPivots]) {
  constexpr int kEven = kPivots - 2;
  for (int i = 0; i < kEven; ++i) pivots[i] = low + (high - low) * (static_cast<float>(i + 1) / (kEven + 1));
  const int64_t first = bits_of(low), gap = bits_of(high) - first;
  pivots[kEven] = from_bits(first + gap / 3);
  pivots[kEven + 1] = from_bits(first + 2 * gap / 3);
}

// How many of the tokens are nearer than each pivot, or how much they weigh. Summed in single precision within a block
// only, so that the error does not grow with the vocabulary.
template <bool ByWeight>
void mass_nearer(const float* distances, const float* weights, int64_t count, const float (&pivots)[kPivots],
                 double (&mass)[kPivots]) {
  for (double& m : mass) m = 0;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t last = first + kBlock < count ? first + kBlock : count;
    Vec sums[kPivots] = {};
    for (int64_t i = first; i < last; i += W) {
      Vec distance = load(distances + i), share = ByWeight ? load(weights + i) : splat(1.0f);
#pragma GCC unroll 8
      for (int p = 0; p < kPivots; ++p) sums[p] += distance < pivots[p] ? share : Vec{};
    }
    for (int p = 0; p < kPivots; ++p) mass[p] += sum_lanes(sums[p]);
  }
}

// Copies the tokens whose distance is in low .. high, high excluded, and fills up to whole vectors with tokens that are
// infinitely far. The arrays may be the same ones.
template <bool ByWeight>
int64_t gather(const float* distances, const float* weights, int64_t count, float low, float high, float* to_distances,
               float* to_weights) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += W) {
    Vec distance = load(distances + i);
    for (uint32_t left = lanes((distance >= low) & (distance < high)); left != 0; left &= left - 1) {
      const int64_t from = i + __builtin_ctz(left);
      to_distances[found] = distances[from];
      if (ByWeight) to_weights[found] = weights[from];
      ++found;
    }
  }
  for (int64_t i = found; i < round_up(found, int64_t{W}); ++i) {
    to_distances[i] = kInfinity;
    if (ByWeight) to_weights[i] = 0;
  }
  return found;
}

// The same as below for a few tokens, which are put in order; `before` is the mass of those nearer than all of them.
template <bool ByWeight>
float farthest_of_few(float* distances, float* weights, int64_t count, float nearest, double before, double limit) {
  float kept = nearest;
  for (int64_t i = 0; i < count && before < limit; ++i) {
    int64_t next = i;
    for (int64_t j = i + 1; j < count; ++j) next = distances[j] < distances[next] ? j : next;
    kept = distances[next];
    before += ByWeight ? weights[next] : 1.0f;
    distances[next] = distances[i];
    if (ByWeight) weights[next] = weights[i];
  }
  return kept;
}

// The largest distance d such that the tokens nearer than d number, or weigh, less than `limit`: the farthest token
// that is kept. Each round compares the tokens that are still in question with the pivots, and keeps those between two
// of them. `farthest` is the distance of the last token that can come.
template <bool ByWeight>
float farthest_kept(const SamplingScratch& scratch, float farthest, double limit) {
  constexpr int64_t kFew = 24;
  const float *distances = scratch.distances, *weights = scratch.weights;
  int64_t count = scratch.size;
  float low = 0, high = from_bits(bits_of(farthest) + 1);  // d is in low .. high, high excluded
  double before = 0;                                       // the mass of tokens nearer than low
  while (true) {
    float pivots[kPivots];
    double mass[kPivots];
    place_pivots(low, high, pivots);
    mass_nearer<ByWeight>(distances, weights, count, pivots, mass);
    const double base = before;
    for (int p = 0; p < kPivots; ++p) {
      if (base + mass[p] >= limit) {
        high = pivots[p] < high ? pivots[p] : high;
      } else if (pivots[p] > low) {
        low = pivots[p];
        before = base + mass[p];
      }
    }
    if (bits_of(low) + 1 >= bits_of(high)) return low;
    count = gather<ByWeight>(distances, weights, count, low, high, scratch.near_distances, scratch.near_weights);
    distances = scratch.near_distances;
    weights = scratch.near_weights;
    if (count <= kFew) {
      return farthest_of_few<ByWeight>(scratch.near_distances, scratch.near_weights, count, low, before, limit);
    }
    count = round_up(count, int64_t{W});
  }
}

}  // namespace antiphon
