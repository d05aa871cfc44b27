// Vectors of W floats, as wide as the instruction set that the library is compiled for. Owns the few operations the
// kernels are written in; GCC's vector extensions give the rest (+, *, comparisons, fused multiply-add by contraction).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define ANTIPHON_INLINE inline __attribute__((always_inline))

namespace antiphon {

#if defined(__AVX512F__)
constexpr int W = 16;
constexpr int kMaxTileRows = 12;  // 2 * 12 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int kMaxTileRows = 6;  // 2 * 6 of 16
#elif defined(__ARM_NEON)
constexpr int W = 4;
constexpr int kMaxTileRows = 12;
#else
constexpr int W = 4;
constexpr int kMaxTileRows = 6;
#endif
constexpr int kPanel = 2 * W;  // output columns of one weight panel

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));
typedef uint32_t UVec __attribute__((vector_size(W * 4)));
typedef uint16_t HVec __attribute__((vector_size(W * 2)));
typedef int8_t BVec __attribute__((vector_size(W)));

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

template <typename T>
constexpr T round_up(T value, T unit) {
  return (value + unit - 1) / unit * unit;
}

ANTIPHON_INLINE float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

ANTIPHON_INLINE float to_float(float x) { return x; }
ANTIPHON_INLINE float to_float(int8_t x) { return x; }

// Round to nearest, ties to even; NaNs are not kept.
ANTIPHON_INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

ANTIPHON_INLINE void assign(float& to, float x) { to = x; }
ANTIPHON_INLINE void assign(bf16& to, float x) { to = to_bf16(x); }

ANTIPHON_INLINE Vec splat(float x) {
  Vec v;
  for (int i = 0; i < W; ++i) v[i] = x;
  return v;
}

ANTIPHON_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

ANTIPHON_INLINE Vec load(const bf16* p) {
  HVec half;
  memcpy(&half, p, sizeof half);
  return reinterpret_cast<Vec>(__builtin_convertvector(half, UVec) << 16);
}

// GCC 12 widens bytes number by number unless it is told how.
ANTIPHON_INLINE Vec load(const int8_t* p) {
#if defined(__AVX2__)
  typedef int8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));
  IVec wide;
  asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(*reinterpret_cast<const Bytes*>(p)));
  return __builtin_convertvector(wide, Vec);
#else
  typedef int16_t Half __attribute__((vector_size(W * 2)));
  BVec bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Half), IVec), Vec);
#endif
}

ANTIPHON_INLINE void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// The lowest byte of each lane. GCC 12 may go number by number here, too.
ANTIPHON_INLINE BVec low_bytes(IVec v) {
#if defined(__AVX512F__)
  BVec bytes;
  asm("vpmovdb %1, %0" : "=v"(bytes) : "v"(v));
  return bytes;
#else
  return __builtin_convertvector(v, BVec);
#endif
}

ANTIPHON_INLINE void store(int8_t* p, IVec v) {
  BVec bytes = low_bytes(v);
  memcpy(p, &bytes, sizeof bytes);
}

ANTIPHON_INLINE void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  HVec half;
  asm("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(v));
#else
  UVec bits = reinterpret_cast<UVec>(v);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  HVec half = __builtin_convertvector(bits, HVec);
#endif
  memcpy(p, &half, sizeof half);
}

// Of finite numbers. Their exponents are moved by a product, which is right for subnormal ones, too.
ANTIPHON_INLINE Vec load(const f16* p) {
#if defined(__AVX2__)
  typedef uint16_t Halves __attribute__((vector_size(W * 2), aligned(2), may_alias));
  Vec out;
  asm("vcvtph2ps %1, %0" : "=v"(out) : "m"(*reinterpret_cast<const Halves*>(p)));
  return out;
#else
  HVec half;
  memcpy(&half, p, sizeof half);
  const UVec bits = __builtin_convertvector(half, UVec);
  const Vec size = reinterpret_cast<Vec>((bits & 0x7fff) << 13) * 0x1p112f;
  return reinterpret_cast<Vec>(reinterpret_cast<UVec>(size) | (bits & 0x8000) << 16);
#endif
}

// Round to nearest, ties to even, and at most the largest finite number. No part of a step.
ANTIPHON_INLINE void store(f16* p, Vec v) {
  const UVec sign = reinterpret_cast<UVec>(v) >> 16 & 0x8000;
  const Vec size = reinterpret_cast<Vec>(reinterpret_cast<UVec>(v) & 0x7fffffffu);
  UVec bits = reinterpret_cast<UVec>((size < 65504.0f ? size : splat(65504.0f)) * 0x1p-112f);
  bits = (bits + 0xfff + (bits >> 13 & 1)) >> 13;
  HVec half = __builtin_convertvector(bits | sign, HVec);
  memcpy(p, &half, sizeof half);
}

ANTIPHON_INLINE Vec rounded_to_f16(Vec v) {
  f16 halves[W];
  store(halves, v);
  return load(halves);
}

// By instruction, because GCC makes two of the comparison, and the header of the intrinsics takes the compiler longer
// than the rest of this library. Where one is NaN the result is b.
ANTIPHON_INLINE Vec vmax(Vec a, Vec b) {
#if defined(__AVX2__)
  Vec out;
  asm("vmaxps %2, %1, %0" : "=v"(out) : "v"(a), "v"(b));
  return out;
#else
  return a > b ? a : b;
#endif
}

ANTIPHON_INLINE Vec vmin(Vec a, Vec b) {
#if defined(__AVX2__)
  Vec out;
  asm("vminps %2, %1, %0" : "=v"(out) : "v"(a), "v"(b));
  return out;
#else
  return a < b ? a : b;
#endif
}

ANTIPHON_INLINE Vec vabs(Vec a) { return reinterpret_cast<Vec>(reinterpret_cast<UVec>(a) & 0x7fffffffu); }

// v with its lanes moved by `distance`, around the end.
template <int Distance>
ANTIPHON_INLINE Vec turned(Vec v) {
  IVec from;
  for (int lane = 0; lane < W; ++lane) from[lane] = (lane + Distance) % W;
  return __builtin_shuffle(v, from);
}

ANTIPHON_INLINE float sum_lanes(Vec v) {
  if constexpr (W > 8) v += turned<8>(v);
  if constexpr (W > 4) v += turned<4>(v);
  v += turned<2>(v);
  v += turned<1>(v);
  return v[0];
}

ANTIPHON_INLINE float max_lane(Vec v) {
  if constexpr (W > 8) v = vmax(v, turned<8>(v));
  if constexpr (W > 4) v = vmax(v, turned<4>(v));
  v = vmax(v, turned<2>(v));
  v = vmax(v, turned<1>(v));
  return v[0];
}

// The largest of |x|, of which a multiple of W numbers is readable, as 0 from `size` on. Four at a time: the result of
// one operation is there after as many cycles.
ANTIPHON_INLINE float max_abs(const float* x, int64_t size) {
  Vec largest[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= size; i += 4 * W) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) largest[j] = vmax(vabs(load(x + i + j * W)), largest[j]);
  }
  for (; i < size; i += W) largest[0] = vmax(vabs(load(x + i)), largest[0]);
  return max_lane(vmax(vmax(largest[0], largest[1]), vmax(largest[2], largest[3])));
}

// Bit i is set where lane i of a comparison holds.
ANTIPHON_INLINE uint32_t lanes(IVec truth) {
#if defined(__AVX512F__)
  uint16_t bits;
  asm("vptestmd %1, %1, %0" : "=k"(bits) : "v"(truth));
  return bits;
#elif defined(__AVX2__)
  uint32_t bits;
  asm("vmovmskps %1, %0" : "=r"(bits) : "x"(truth));
  return bits;
#elif defined(__SSE2__)
  uint32_t bits;
  asm("movmskps %1, %0" : "=r"(bits) : "x"(truth));
  return bits;
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < W; ++lane) bits |= static_cast<uint32_t>(truth[lane] & 1) << lane;
  return bits;
#endif
}

constexpr float kRoundingMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits

// Nearest integer of |x| < 2^22, ties to even; of any other x some integer. Unsigned, where a difference may go around.
ANTIPHON_INLINE IVec round_to_int(Vec x) {
  return reinterpret_cast<IVec>(reinterpret_cast<UVec>(x + kRoundingMagic) - 0x4b400000u);
}

// e^x for x <= 88, within 2 ulp: 2^n e^r with |r| <= ln(2) / 2, e^r by its Taylor series. 0 below -87.
ANTIPHON_INLINE Vec vexp_bounded(Vec x) {
  Vec shifted = x * 1.44269504f + kRoundingMagic;
  Vec n = shifted - kRoundingMagic;
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  UVec exponent = (reinterpret_cast<UVec>(shifted) - (0x4b400000u - 127)) << 23;  // far below -87: anything
  return x < -87.0f ? Vec{} : p * reinterpret_cast<Vec>(exponent);
}

// For any x; saturates above 88.
ANTIPHON_INLINE Vec vexp(Vec x) { return vexp_bounded(vmin(x, splat(88.0f))); }

// 1 / x for x >= 1, within 1 ulp or so: quicker than a division. 0 where that is too small for a float32.
ANTIPHON_INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  Vec y;
  asm("vrcp14ps %1, %0" : "=v"(y) : "v"(x));
  return y * (2.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// Within 2e-7 of tanh, absolutely.
ANTIPHON_INLINE Vec vtanh(Vec x) { return 1.0f - 2.0f * reciprocal(vexp(2.0f * x) + 1.0f); }

ANTIPHON_INLINE Vec silu(Vec x) { return x * reciprocal(1.0f + vexp(-x)); }

// The tanh approximation of GELU: x / 2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
ANTIPHON_INLINE Vec gelu_tanh(Vec x) {
  Vec u = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x * reciprocal(1.0f + vexp(-2.0f * u));
}

// Lane j of the result is the sum of rows[j]: halves the number of vectors by adding neighbours, log2(W) times.
ANTIPHON_INLINE Vec sum_each(const Vec (&rows)[W]) {
  IVec even, odd;
  for (int i = 0; i < W; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  Vec level[W];
  for (int i = 0; i < W; ++i) level[i] = rows[i];
#pragma GCC unroll 5
  for (int count = W; count > 1; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; ++i) {
      level[i] = __builtin_shuffle(level[2 * i], level[2 * i + 1], even) +
                 __builtin_shuffle(level[2 * i], level[2 * i + 1], odd);
    }
  }
  return level[0];
}

// Rows become columns: in blocks of half the size at a time, the two off the diagonal change places.
ANTIPHON_INLINE void transpose(Vec (&rows)[W]) {
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2) {
    IVec low, high;
    for (int lane = 0; lane < W; ++lane) {
      low[lane] = lane & half ? W + lane - half : lane;
      high[lane] = lane & half ? W + lane : lane + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      if (i & half) continue;
      Vec a = rows[i], b = rows[i + half];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + half] = __builtin_shuffle(a, b, high);
    }
  }
}

ANTIPHON_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
ANTIPHON_INLINE void prefetch_to_second_cache(const void* p) { __builtin_prefetch(p, 0, 2); }

ANTIPHON_INLINE void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace antiphon
