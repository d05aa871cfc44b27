// One query token over keys and values in int8, in integers: the instruction VPDPBUSD multiplies 64 unsigned by 64
// signed bytes and adds them up by fours. Widening the bytes to floats instead takes more instructions than multiplying
// them.
//
// Query and softmax weights are split into two numbers of 8 bits each, so that what they lose is far below what keys
// and values in int8 have lost already. Vectors are of 16 lanes; a head is a whole number of them. Sums of up to 512
// numbers per head fit 32 bits with room for the worst.
#pragma once

#include "attention.h"

namespace antiphon {

// q [dim] = scale * (128 * high + low). The keys will be unsigned, 128 more than they are: `zero` is what that adds to
// a product.
struct SplitQuery {
  float scale;
  int32_t zero;
};

// numbers: high [dim], then low.
ANTIPHON_INLINE SplitQuery split_query(const float* q, int64_t dim, int8_t* numbers) {
  Vec largest = Vec{};
  for (int64_t d = 0; d < dim; d += W) largest = vmax(vabs(load(q + d)), largest);
  const float scale = max_lane(largest) / (127 * 128);
  const float inverse = scale > 1e-30f ? 1 / scale : 0;
  IVec total = IVec{};
  for (int64_t d = 0; d < dim; d += W) {
    const IVec number = round_to_int(load(q + d) * inverse), high = (number + 64) >> 7;
    store(numbers + d, high);
    store(numbers + dim + d, number - high * 128);
    total += number;
  }
  int32_t sum = 0;
  for (int lane = 0; lane < W; ++lane) sum += total[lane];
  return {scale, 128 * sum};
}

#if defined(__AVX512VNNI__)

constexpr int kHeadsPerSum = 3;  // whose sums of 64 dimensions are held in registers: 8 each

// Four pieces of 16 bytes side by side.
ANTIPHON_INLINE IVec load_pieces(const int8_t* a, const int8_t* b, const int8_t* c, const int8_t* d) {
  typedef int8_t Piece __attribute__((vector_size(16), aligned(1), may_alias));
  auto memory = [](const int8_t* p) -> const Piece& { return *reinterpret_cast<const Piece*>(p); };
  IVec out;
  asm("vmovdqu32 %1, %x0\n\t"
      "vinserti32x4 $1, %2, %0, %0\n\t"
      "vinserti32x4 $2, %3, %0, %0\n\t"
      "vinserti32x4 $3, %4, %0, %0"
      : "=&v"(out)
      : "m"(memory(a)), "m"(memory(b)), "m"(memory(c)), "m"(memory(d)));
  return out;
}

// The lower, or the upper, halves of each 16 bytes of a and b, alternating by `unit`: bw 1 byte, wd 2, dq 4, qdq 8.
#define ANTIPHON_UNPACK(half, unit, a, b)                                          \
  ([](IVec x, IVec y) __attribute__((always_inline)) {                            \
    IVec out;                                                                      \
    asm("vpunpck" half unit " %2, %1, %0" : "=v"(out) : "v"(x), "v"(y));           \
    return out;                                                                    \
  }(a, b))

// Lane j of the sum gains the products of 4 bytes of lane j of `numbers` (unsigned) with those at `four` (signed).
ANTIPHON_INLINE void add_products(IVec& sum, IVec numbers, const int8_t* four) {
  typedef int32_t Four __attribute__((aligned(1), may_alias));
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(numbers), "m"(*reinterpret_cast<const Four*>(four)));
}

ANTIPHON_INLINE void add_products(IVec& sum, IVec unsigned_numbers, IVec signed_numbers) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_numbers), "v"(signed_numbers));
}

// Lane j of quads[i] holds numbers 4 i .. 4 i + 3 of key j, 128 added to each; 16 S numbers in all.
template <int S>
ANTIPHON_INLINE void load_quads(const int8_t* keys, const int64_t* places, IVec (&quads)[4 * S]) {
  IVec rows[4][S];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int8_t *a = keys + places[i], *b = keys + places[i + 4];
    const int8_t *c = keys + places[i + 8], *d = keys + places[i + 12];
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) rows[i][s] = load_pieces(a + 16 * s, b + 16 * s, c + 16 * s, d + 16 * s);
  }
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s) {
    const IVec low01 = ANTIPHON_UNPACK("l", "dq", rows[0][s], rows[1][s]);
    const IVec low23 = ANTIPHON_UNPACK("l", "dq", rows[2][s], rows[3][s]);
    const IVec high01 = ANTIPHON_UNPACK("h", "dq", rows[0][s], rows[1][s]);
    const IVec high23 = ANTIPHON_UNPACK("h", "dq", rows[2][s], rows[3][s]);
    quads[4 * s] = ANTIPHON_UNPACK("l", "qdq", low01, low23);
    quads[4 * s + 1] = ANTIPHON_UNPACK("h", "qdq", low01, low23);
    quads[4 * s + 2] = ANTIPHON_UNPACK("l", "qdq", high01, high23);
    quads[4 * s + 3] = ANTIPHON_UNPACK("h", "qdq", high01, high23);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4 * S; ++i) quads[i] ^= static_cast<int32_t>(0x80808080);
}

// 16 S numbers of R queries [R, 2, dim] by those of W keys.
template <int R, int S>
ANTIPHON_INLINE void add_score_segment(const int8_t* queries, int64_t dim, const int8_t* keys, const int64_t* places,
                                       IVec (&high)[R], IVec (&low)[R]) {
  IVec quads[4 * S];
  load_quads<S>(keys, places, quads);
  asm("" : "+r"(queries));  // else GCC keeps the address of every four numbers, in memory
#pragma GCC unroll 16
  for (int i = 0; i < 4 * S; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      add_products(high[r], quads[i], queries + 2 * r * dim + 4 * i);
      add_products(low[r], quads[i], queries + (2 * r + 1) * dim + 4 * i);
    }
  }
}

// Scores [R, kKeysPerChunk]. `places` as in `score`; `scales` go on to a multiple of W, with anything. N: vectors per
// head, 0 where the count is not known when this is compiled.
template <int R, int N>
ANTIPHON_INLINE void score_vnni(const int8_t* numbers, const SplitQuery* queries, const int8_t* keys,
                                const float* scales, const int64_t* places, int64_t n, int64_t size, float* scores) {
  const int64_t dim = N > 0 ? N * W : size;
  for (int64_t i = 0; i < n; i += W) {
#pragma GCC unroll 16
    for (int64_t j = 0; j < W; ++j) prefetch_row(keys + places[i + j + kKeysPerChunk], dim);
    IVec high[R], low[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) high[r] = low[r] = IVec{};
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_score_segment<R, 4>(numbers + d, dim, keys + d, places + i, high, low);
    for (; d < dim; d += 16) add_score_segment<R, 1>(numbers + d, dim, keys + d, places + i, high, low);
    const Vec of_keys = load(scales + i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const IVec product = (high[r] << 7) + low[r] - queries[r].zero;
      store(scores + r * kKeysPerChunk + i, __builtin_convertvector(product, Vec) * (of_keys * queries[r].scale));
    }
  }
}

// Weights [n] of one head times the scales of their values = step * (256 * high + low); numbers are high
// [kKeysPerChunk], then low. Returns the step.
ANTIPHON_INLINE float split_weights(const float* weights, const float* scales, int64_t n, uint8_t* numbers) {
  Vec largest = Vec{};
  for (int64_t i = 0; i < n; i += W) largest = vmax(load(weights + i) * load(scales + i), largest);
  const float step = max_lane(largest) / 65535;
  const float inverse = step > 1e-30f ? 1 / step : 0;
  for (int64_t i = 0; i < n; i += W) {
    const IVec number = round_to_int(load(weights + i) * load(scales + i) * inverse);
    const BVec high = low_bytes(number >> 8), low = low_bytes(number);
    memcpy(numbers + i, &high, sizeof high);
    memcpy(numbers + kKeysPerChunk + i, &low, sizeof low);
  }
  return step;
}

// Numbers of four values by turns: byte k of a lane belongs to value k. With S = 4 vectors, 64 dimensions, lane
// 4 a + b of vector c belongs to dimension 16 a + 4 c + b; with one vector, 16 dimensions, lane d to dimension d.
template <int S>
ANTIPHON_INLINE void interleave(const int8_t* values, const int64_t* places, IVec (&out)[S]) {
  if constexpr (S == 4) {
    IVec rows[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) memcpy(&rows[i], values + places[i], sizeof rows[i]);
    const IVec low01 = ANTIPHON_UNPACK("l", "bw", rows[0], rows[1]);
    const IVec low23 = ANTIPHON_UNPACK("l", "bw", rows[2], rows[3]);
    const IVec high01 = ANTIPHON_UNPACK("h", "bw", rows[0], rows[1]);
    const IVec high23 = ANTIPHON_UNPACK("h", "bw", rows[2], rows[3]);
    out[0] = ANTIPHON_UNPACK("l", "wd", low01, low23);
    out[1] = ANTIPHON_UNPACK("h", "wd", low01, low23);
    out[2] = ANTIPHON_UNPACK("l", "wd", high01, high23);
    out[3] = ANTIPHON_UNPACK("h", "wd", high01, high23);
  } else {
    const IVec rows = load_pieces(values + places[0], values + places[1], values + places[2], values + places[3]);
    const IVec columns = __builtin_shuffle(rows, IVec{0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15});
    const IVec by_turns = IVec{} + IVec{0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703, 0x0c080400, 0x0d090501,
                                        0x0e0a0602, 0x0f0b0703, 0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703,
                                        0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703};
    asm("vpshufb %2, %1, %0" : "=v"(out[0]) : "v"(columns), "v"(by_turns));
  }
}

// Vectors as `interleave` orders them become those of 16 neighbouring dimensions each: a lane of 16 bytes is a number.
template <int S>
ANTIPHON_INLINE void in_order(Vec (&x)[S]) {
  if constexpr (S == 4) {
    constexpr IVec kEven = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    constexpr IVec kOdd = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
    constexpr IVec kLower = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    constexpr IVec kUpper = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    const Vec even01 = __builtin_shuffle(x[0], x[1], kEven), odd01 = __builtin_shuffle(x[0], x[1], kOdd);
    const Vec even23 = __builtin_shuffle(x[2], x[3], kEven), odd23 = __builtin_shuffle(x[2], x[3], kOdd);
    x[0] = __builtin_shuffle(even01, even23, kLower);
    x[1] = __builtin_shuffle(odd01, odd23, kLower);
    x[2] = __builtin_shuffle(even01, even23, kUpper);
    x[3] = __builtin_shuffle(odd01, odd23, kUpper);
  }
}

// sums [R][dim], S vectors of each: sums * factor + weights * values.
template <int R, int S>
ANTIPHON_INLINE void add_segment_vnni(const uint8_t* weights, const float* steps, const int8_t* values,
                                      const int64_t* places, int64_t n, int64_t dim, const float* factors,
                                      float* sums) {
  IVec high[R][S], low[R][S];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) high[r][s] = low[r][s] = IVec{};
  }
  for (int64_t j = 0; j < n; j += 4) {
    IVec v[S];
    interleave<S>(values, places + j, v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) prefetch_row(values + places[j + i + kKeysPerChunk], S * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      int32_t four[2];
      memcpy(&four[0], weights + 2 * r * kKeysPerChunk + j, 4);
      memcpy(&four[1], weights + (2 * r + 1) * kKeysPerChunk + j, 4);
      const IVec upper = four[0] - IVec{}, lower = four[1] - IVec{};
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        add_products(high[r][s], upper, v[s]);
        add_products(low[r][s], lower, v[s]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    Vec x[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) x[s] = __builtin_convertvector((high[r][s] << 8) + low[r][s], Vec) * steps[r];
    in_order<S>(x);
    float* out = sums + r * dim;
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) store(out + s * W, load(out + s * W) * factors[r] + x[s]);
  }
}

// Weights [R][kKeysPerChunk] of R heads, 0 past n.
template <int R>
void add_vnni(const float* weights, const int8_t* values, const float* scales, const int64_t* places, int64_t n,
              int64_t dim, const float* factors, float* sums) {
  if constexpr (R > kHeadsPerSum) {
    constexpr int kFirst = R / 2;
    add_vnni<kFirst>(weights, values, scales, places, n, dim, factors, sums);
    add_vnni<R - kFirst>(weights + kFirst * kKeysPerChunk, values, scales, places, n, dim, factors + kFirst,
                         sums + kFirst * dim);
  } else {
    uint8_t numbers[2 * R * kKeysPerChunk];
    float steps[R];
    for (int r = 0; r < R; ++r) {
      steps[r] = split_weights(weights + r * kKeysPerChunk, scales, n, numbers + 2 * r * kKeysPerChunk);
    }
    int64_t d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) {
      add_segment_vnni<R, 4>(numbers, steps, values + d, places, n, dim, factors, sums + d);
    }
    for (; d < dim; d += W) {
      add_segment_vnni<R, 1>(numbers, steps, values + d, places, n, dim, factors, sums + d);
    }
  }
}

#undef ANTIPHON_UNPACK

#endif

}  // namespace antiphon
