// Activations in 8 bits, one scale per row; and the product of four of them with four weights, in every instruction
// set. VNNI and AMX multiply unsigned by signed numbers, so there a row is stored with 128 added; elsewhere signed.
#pragma once

#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__) && !defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

namespace antiphon {

#if defined(__AVX512VNNI__)
constexpr int32_t kActivationZero = 128;
#else
constexpr int32_t kActivationZero = 0;
#endif

// x [k] -> numbers [padded_k], value = scale * (number - zero); returns the scale. x is readable, as 0, up to a
// multiple of W.
ANTIPHON_INLINE float quantize_row(const float* x, int64_t k, int64_t padded_k, uint8_t* numbers) {
  Vec largest = Vec{};
  for (int64_t i = 0; i < k; i += W) largest = vmax(largest, vabs(load(x + i)));
  float scale = max_lane(largest) / 127;
  if (!(scale > 0)) scale = 1;
  float inverse = 1 / scale;
  typedef int8_t Bytes __attribute__((vector_size(W)));
  int64_t whole = k / W * W;
  for (int64_t i = 0; i < whole; i += W) {
    IVec rounded = round_to_int(load(x + i) * inverse) + kActivationZero;
    Bytes bytes = __builtin_convertvector(rounded, Bytes);
    memcpy(numbers + i, &bytes, W);
  }
  for (int64_t i = whole; i < padded_k; ++i) {
    int32_t number = i < k ? static_cast<int32_t>(std::lrintf(x[i] * inverse)) : 0;
    numbers[i] = static_cast<uint8_t>(number + kActivationZero);
  }
  return scale;
}

// Lane j of `sum` gains the product of `activations` (4 numbers of one row) with the 4 weights of column j at `w`.
ANTIPHON_INLINE void add_dot4(IVec& sum, int32_t activations, const IVec& w) {
#if defined(__AVX512VNNI__)
  // As an instruction of its own: given the intrinsic, GCC 12 spills the accumulators around a loop of these.
  IVec repeated = activations - IVec{};
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(repeated), "v"(w));
#elif defined(__AVX2__)
  // |a| <= 127 and |w| <= 127: a pair of products fits 16 bits, and nothing saturates.
  __m256i a = _mm256_set1_epi32(activations), weights = reinterpret_cast<__m256i>(w);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(weights, a));
  sum += reinterpret_cast<IVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
  int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(activations));
  sum = reinterpret_cast<IVec>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), a, reinterpret_cast<int8x16_t>(w)));
#else
  int8_t a[4], weights[4 * W];
  memcpy(a, &activations, 4);
  memcpy(weights, &w, sizeof weights);
  for (int lane = 0; lane < W; ++lane) {
    for (int i = 0; i < 4; ++i) sum[lane] += a[i] * weights[4 * lane + i];
  }
#endif
}

}  // namespace antiphon
