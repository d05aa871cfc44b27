#include "sampling.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "matrix.h"
#include "simd.h"

namespace antiphon {
namespace {

constexpr int64_t kBlock = 256;  // token ids of one block of the draw; BLOCK in workers/sampler.py
constexpr float kSmallestTemperature = 1e-6f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// x[i .. i + W) of x [size], filled up where that is shorter.
ANTIPHON_INLINE Vec load_within(const float* x, int64_t i, int64_t size, float fill) {
  if (i + W <= size) return load(x + i);
  Vec v = splat(fill);
  for (int lane = 0; i + lane < size; ++lane) v[lane] = x[i + lane];
  return v;
}

struct Largest {
  float value;  // of those that are numbers
  bool has_nan;
};

Largest largest_of(const float* x, int64_t size) {
  Vec best[2] = {splat(-kInfinity), splat(-kInfinity)}, nan = Vec{};
  for (int64_t i = 0; i < size; i += 2 * W) {
    Vec a = load_within(x, i, size, -kInfinity), b = load_within(x, i + W, size, -kInfinity);
    best[0] = vmax(a, best[0]);
    best[1] = vmax(b, best[1]);
    nan = a == a ? nan : a;
    nan = b == b ? nan : b;
  }
  return {max_lane(vmax(best[0], best[1])), lanes(nan != nan) != 0};
}

// 0 where there is none.
template <typename Is>
int64_t first_that(const float* x, int64_t size, const Is& is) {
  for (int64_t i = 0; i < size; i += W) {
    const uint32_t found = lanes(is(load_within(x, i, size, 0.0f)));
    if (found != 0 && i + __builtin_ctz(found) < size) return i + __builtin_ctz(found);
  }
  return 0;
}

int64_t first_largest(const float* x, int64_t size) {
  const Largest largest = largest_of(x, size);
  if (largest.has_nan) return first_that(x, size, [](Vec v) { return v != v; });
  return first_that(x, size, [&](Vec v) { return v == largest.value; });
}

// What a thread works in. Tokens have a distance, which is minus their log weight: 0 for the likeliest, infinite for
// one that cannot come. Past the vocabulary's end up to a whole block they are infinitely far and weigh nothing.
struct Scratch {
  int64_t size;  // whole blocks
  float *distances, *weights;            // [size]
  float *near_distances, *near_weights;  // [size + W], the tokens that a threshold may still be among
  float* totals;                         // [blocks], the weight in each; zeros up to a multiple of 4

  Scratch(float* memory, int64_t vocab_size) : size(round_up(vocab_size, kBlock)) {
    distances = memory;
    weights = distances + size;
    near_distances = weights + size;
    near_weights = near_distances + size + W;
    totals = near_weights + size + W;
  }

  static int64_t bytes(int64_t vocab_size) {
    const int64_t size = round_up(vocab_size, kBlock);
    return 4 * (4 * size + 2 * W + round_up(size / kBlock, int64_t{4}));
  }
};

// The distances and weights of up to kBlock logits; returns the sum of the weights and widens `farthest`.
ANTIPHON_INLINE float weigh_block(const float* x, int64_t size, float highest, float temperature, float* distances,
                                  float* weights, Vec& farthest) {
  Vec sum = Vec{};
  for (int64_t i = 0; i < kBlock; i += W) {
    Vec distance = highest - load_within(x, i, size, -kInfinity);
    if (temperature != 1) distance /= temperature;  // a division costs as much as all else here
    Vec weight = vexp_bounded(-distance);
    store(distances + i, distance);
    store(weights + i, weight);
    sum += weight;
    farthest = vmax(distance < kInfinity ? distance : Vec{}, farthest);
  }
  return sum_lanes(sum);
}

// Takes the tokens farther than `kept` out of the blocks' totals; returns what is left.
double total_within(const Scratch& scratch, float kept) {
  double total = 0;
  for (int64_t first = 0; first < scratch.size; first += kBlock) {
    Vec sum = Vec{};
    for (int64_t i = first; i < first + kBlock; i += W) {
      sum += load(scratch.distances + i) <= kept ? load(scratch.weights + i) : Vec{};
    }
    total += scratch.totals[first / kBlock] = sum_lanes(sum);
  }
  return total;
}

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
void place_pivots(float low, float high, float (&pivots)[kPivots]) {
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
float farthest_kept(const Scratch& scratch, float farthest, double limit) {
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

// Four 32-bit words of the stream of (seed, position), as in workers/rng.py: Philox 4x32-10.
ANTIPHON_INLINE void philox(uint64_t seed, uint64_t position, uint32_t index, uint32_t (&c)[4]) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  c[0] = index;
  c[1] = static_cast<uint32_t>(position);
  c[2] = static_cast<uint32_t>(position >> 32);
  c[3] = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t low = c[0] * uint64_t{0xD2511F53}, high = c[2] * uint64_t{0xCD9E8D57};
    c[0] = static_cast<uint32_t>(high >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(high);
    c[2] = static_cast<uint32_t>(low >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(low);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
}

// Which of `count` weights is drawn, by the stream's numbers from `first_number` on (a multiple of 4, as is what the
// weights are filled up to). The largest of log(weight) - log(-log(u)) is the smallest of -log(u) / weight; and because
// -log(u) is more than 1 - u, most need no logarithm.
int64_t race(const float* weights, int64_t count, uint64_t seed, uint64_t position, int64_t first_number) {
  int64_t winner = 0;
  double best = kInfinity;
  for (int64_t i = 0; i < count; i += 4) {
    if (weights[i] + weights[i + 1] + weights[i + 2] + weights[i + 3] == 0) continue;
    uint32_t words[4];
    philox(seed, position, static_cast<uint32_t>((first_number + i) / 4), words);
    for (int j = 0; j < 4; ++j) {
      const double u = (words[j] + 0.5) / 4294967296.0, weight = weights[i + j];
      if (weight == 0 || 1 - u >= best * weight) continue;
      const double time = -std::log(u) / weight;
      if (time < best) {
        best = time;
        winner = i + j;
      }
    }
  }
  return winner;
}

}  // namespace

Sampler::Sampler(Pool& pool, int64_t vocab_size) : pool_(pool), vocab_size_(vocab_size), memory_(pool.size()) {
  for (auto& memory : memory_) {
    memory.reset(static_cast<float*>(allocate(Scratch::bytes(vocab_size))));
    if (memory == nullptr) throw std::bad_alloc();
  }
}

void Sampler::sample(const SampleCall& call) {
  pool_.run(call.num_drawn + call.num_greedy, [&](int64_t chunk, int thread) {
    if (chunk < call.num_drawn) {
      const int64_t row = call.drawn == nullptr ? chunk : call.drawn[chunk];
      call.tokens[row] = draw(call, chunk, row, thread);
    } else {
      const int64_t index = chunk - call.num_drawn, row = call.greedy == nullptr ? index : call.greedy[index];
      call.tokens[row] = first_largest(call.logits + row * call.stride, vocab_size_);
    }
  });
}

int64_t Sampler::draw(const SampleCall& call, int64_t index, int64_t row, int thread) {
  const float* x = call.logits + row * call.stride;
  const Largest largest = largest_of(x, vocab_size_);
  const float highest = largest.value;
  if (largest.has_nan || highest == -kInfinity) return 0;
  if (highest == kInfinity) return first_that(x, vocab_size_, [](Vec v) { return v == kInfinity; });

  const float asked = call.temperature[index];
  const float temperature = asked > kSmallestTemperature ? asked : kSmallestTemperature;
  const int64_t top_k = call.top_k == nullptr ? 0 : call.top_k[index];
  const double top_p = call.top_p == nullptr ? 1 : call.top_p[index];
  const float floor = call.floor == nullptr ? -kInfinity : call.floor[index];
  const bool has_k = top_k > 0 && top_k < vocab_size_, has_p = top_p < 1;
  const bool is_cut = has_k || has_p || floor > -kInfinity;

  // Where nothing is cut off, the totals are all that is needed: each block is weighed in the place of the last.
  Scratch scratch(memory_[thread].get(), vocab_size_);
  Vec farthest_lanes = Vec{};
  double total = 0;
  auto weigh = [&](int64_t first) {
    const int64_t at = is_cut ? first : 0;
    return weigh_block(x + first, vocab_size_ - first, highest, temperature, scratch.distances + at,
                       scratch.weights + at, farthest_lanes);
  };
  for (int64_t first = 0; first < scratch.size; first += kBlock) {
    total += scratch.totals[first / kBlock] = weigh(first);
  }

  float kept = kInfinity;
  const float farthest = max_lane(farthest_lanes);
  if (has_k) {
    kept = farthest_kept<false>(scratch, farthest, static_cast<double>(top_k));
    if (has_p) total = total_within(scratch, kept);
  }
  if (has_p) {
    const float nearer = farthest_kept<true>(scratch, kept < farthest ? kept : farthest, top_p * total);
    kept = nearer < kept ? nearer : kept;
  }
  if (-floor < kept) kept = -floor;
  if (is_cut) total_within(scratch, kept);

  const uint64_t seed = static_cast<uint64_t>(call.seeds[index]);
  const uint64_t position = static_cast<uint64_t>(call.positions[index]);
  const int64_t first = kBlock * race(scratch.totals, scratch.size / kBlock, seed, position, kBlock);
  if (!is_cut) weigh(first);
  const int64_t at = is_cut ? first : 0;
  float weights[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) {
    weights[i] = scratch.distances[at + i] <= kept ? scratch.weights[at + i] : 0;
  }
  return first + race(weights, kBlock, seed, position, 0);
}

}  // namespace antiphon
