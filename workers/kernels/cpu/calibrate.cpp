// What the machine can do at best, for measurements to be compared with: multiply-adds in registers, reading memory.
#include "gemm.h"

using namespace antiphon;

namespace {

volatile float sink;

// `start` differs from call to call, so that no call can be left out for being like another.
__attribute__((noinline)) float multiply_add(int64_t rounds, float start) {
  constexpr int kChains = 10;  // latency times throughput
  Vec sums[kChains];
#pragma GCC unroll 10
  for (int i = 0; i < kChains; ++i) sums[i] = splat(start + static_cast<float>(i));
  const Vec factor = splat(0.999f), term = splat(0.001f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) {
      sums[i] = sums[i] * factor + term;
#if defined(__AVX2__)
      asm("" : "+v"(sums[i]));  // a value of its own, not something to be worked out in advance
#endif
    }
  }
  Vec total = Vec{};
#pragma GCC unroll 10
  for (int i = 0; i < kChains; ++i) total += sums[i];
  return sum_lanes(total);
}

float read(const float* data, int64_t count) {
  Vec sums[4] = {};
  for (int64_t i = 0; i + 4 * W <= count; i += 4 * W) {
    prefetch_weights(data + i);
    prefetch_weights(data + i + 2 * W);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] += load(data + i + j * W);
  }
  return sum_lanes(sums[0] + sums[1] + sums[2] + sums[3]);
}

}  // namespace

extern "C" {

// Every thread does `rounds`; returns the floating-point operations of all.
double antiphon_multiply_add(Pool* pool, int64_t rounds) {
  constexpr int64_t kParts = 64;
  pool->run(kParts, [&](int64_t part, int) {
    sink = multiply_add(rounds / kParts * pool->size(), static_cast<float>(part));
  });
  return 2.0 * 10 * W * kParts * (rounds / kParts * pool->size());
}

void antiphon_read(Pool* pool, const float* data, int64_t count) {
  constexpr int64_t kParts = 64;
  pool->run(kParts, [&](int64_t part, int) {
    const int64_t first = count * part / kParts, last = count * (part + 1) / kParts;
    sink = read(data + first, last - first);
  });
}

}  // extern "C"
