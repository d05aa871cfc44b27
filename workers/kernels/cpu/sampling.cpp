#include "sampling.h"

#include <cmath>

#include "sampling_threshold.h"

namespace antiphon {
namespace {

constexpr float kSmallestTemperature = 1e-6f;

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
double total_within(const SamplingScratch& scratch, float kept) {
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

// What one row asks for.
struct Asked {
  float temperature;
  int64_t top_k;   // 0: all
  double top_p;    // 1: all
  float farthest;  // that min-p keeps

  Asked(const SampleCall& call, int64_t index, int64_t vocab_size) {
    temperature = std::fmax(call.temperature[index], kSmallestTemperature);
    top_k = call.top_k == nullptr || call.top_k[index] >= vocab_size ? 0 : call.top_k[index];
    top_p = call.top_p == nullptr ? 1 : call.top_p[index];
    farthest = call.floor == nullptr ? kInfinity : -call.floor[index];
  }

  bool is_cut() const { return top_k > 0 || top_p < 1 || farthest < kInfinity; }
};

// The distance of the farthest token to be kept, of all that weigh `total` and reach as far as `farthest`. Top-k first,
// then top-p of what is left.
float farthest_asked_for(const Asked& asked, const SamplingScratch& scratch, float farthest, double total) {
  float kept = kInfinity;
  if (asked.top_k > 0) {
    kept = farthest_kept<false>(scratch, farthest, static_cast<double>(asked.top_k));
    if (asked.top_p < 1) total = total_within(scratch, kept);
  }
  if (asked.top_p < 1) {
    const float nearer = farthest_kept<true>(scratch, kept < farthest ? kept : farthest, asked.top_p * total);
    kept = nearer < kept ? nearer : kept;
  }
  return asked.farthest < kept ? asked.farthest : kept;
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
  for (auto& memory : memory_) memory = take_zeros<float>(SamplingScratch::num_floats(vocab_size));
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

  const Asked asked(call, index, vocab_size_);
  SamplingScratch scratch(memory_[thread].get(), vocab_size_);
  Vec farthest = Vec{};
  double total = 0;
  // Where nothing is cut off, the totals are all that is needed: each block is weighed in the place of the last.
  auto place = [&](int64_t first) { return asked.is_cut() ? first : 0; };
  auto weigh = [&](int64_t first) {
    return weigh_block(x + first, vocab_size_ - first, highest, asked.temperature, scratch.distances + place(first),
                       scratch.weights + place(first), farthest);
  };
  for (int64_t first = 0; first < scratch.size; first += kBlock) {
    total += scratch.totals[first / kBlock] = weigh(first);
  }
  float kept = kInfinity;
  if (asked.is_cut()) {
    kept = farthest_asked_for(asked, scratch, max_lane(farthest), total);
    total_within(scratch, kept);
  }

  const uint64_t seed = static_cast<uint64_t>(call.seeds[index]);
  const uint64_t position = static_cast<uint64_t>(call.positions[index]);
  const int64_t first = kBlock * race(scratch.totals, scratch.size / kBlock, seed, position, kBlock);
  if (!asked.is_cut()) weigh(first);
  const float *distances = scratch.distances + place(first), *from = scratch.weights + place(first);
  float weights[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) weights[i] = distances[i] <= kept ? from[i] : 0;
  return first + race(weights, kBlock, seed, position, 0);
}

}  // namespace antiphon
