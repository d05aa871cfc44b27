// Activations in 15 bits and a scale per row, as two numbers of 8 bits each; and the product of four of them with four
// weights, in every instruction set. One number would be too few: activations have outliers, and the others of their
// row would be left with some bits. Reading the weights takes longer than multiplying by them twice, with few rows.
// VNNI and AMX multiply unsigned by signed numbers: beside weights of 8 bits both are stored with 128 added there,
// elsewhere and beside weights of 4 bits, which have no sign, they are signed.
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

constexpr int32_t kHighUnit = 128;  // a value is scale * (kHighUnit * high + low)

// x [k] -> high and low [padded_k], to which Zero is added; returns the scale. With a Group, `group_sums` are the sums
// of the numbers of each. x is readable, as 0, up to a multiple of W.
template <int32_t Zero, int64_t Group = 0>
ANTIPHON_INLINE float quantize_row(const float* x, int64_t k, int64_t padded_k, uint8_t* high, uint8_t* low,
                                   [[maybe_unused]] float* group_sums = nullptr) {
  float scale = max_abs(x, k) / (127 * kHighUnit);
  if (!(scale > 0)) scale = 1;
  const float inverse = 1 / scale;
  [[maybe_unused]] IVec sum = IVec{};
  auto put = [&](int64_t i, const IVec& number, int64_t size) __attribute__((always_inline)) {
    const IVec upper = (number + kHighUnit / 2) >> 7;
    const BVec bytes[2] = {low_bytes(upper + Zero), low_bytes(number - upper * kHighUnit + Zero)};
    memcpy(high + i, &bytes[0], size);
    memcpy(low + i, &bytes[1], size);
    if constexpr (Group > 0) {
      sum += number;
      if ((i + W) % Group == 0) {
        *group_sums++ = sum_lanes(__builtin_convertvector(sum, Vec));  // exact: below 2^24
        sum = IVec{};
      }
    }
  };
  int64_t i = 0;
  for (; i + W <= padded_k && i < k; i += W) put(i, round_to_int(load(x + i) * inverse), W);
  for (; i < padded_k; i += W) {
    put(i, i < k ? round_to_int(load(x + i) * inverse) : IVec{}, padded_k - i < W ? padded_k - i : W);
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

// The same for four signed numbers of a row at `activations`, and weights from 0 to 15. What `sum` holds is known to
// `finish_dot4_small` alone, before which up to 8 products may come.
ANTIPHON_INLINE void add_dot4_small(IVec& sum, const uint8_t* activations, const UVec& w) {
  typedef int32_t Four __attribute__((aligned(1), may_alias));
  const Four& four = *reinterpret_cast<const Four*>(activations);
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(four));
#elif defined(__AVX2__)
  // Sums of 16 bits: 8 * 2 * 15 * 128 fits.
  const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(w), _mm256_set1_epi32(four));
  sum = reinterpret_cast<IVec>(_mm256_add_epi16(reinterpret_cast<__m256i>(sum), pairs));
#else
  add_dot4(sum, four, reinterpret_cast<const IVec&>(w));
#endif
}

ANTIPHON_INLINE IVec finish_dot4_small(const IVec& sum) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  return reinterpret_cast<IVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(1)));
#else
  return sum;
#endif
}

}  // namespace antiphon
