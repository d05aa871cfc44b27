#include "int4.h"

namespace antiphon {
namespace {

// What a group of W columns is quantised with, and the sum of the squared errors.
struct Fit {
  Vec scale, minimum, error;
};

// What a group holds, less its least number: all sums are of numbers that are not negative.
struct Group {
  Vec values[kInt4Group];
  int count;
  Vec least, range, sum, squares;
};

ANTIPHON_INLINE Vec level_of(Vec value, Vec inverse_scale) {
  return vmin(vmax((value * inverse_scale + kRoundingMagic) - kRoundingMagic, Vec{}), splat(15));
}

ANTIPHON_INLINE Vec inverse(Vec x) { return x > 0 ? 1 / x : Vec{}; }

// Takes over the columns for which (scale, minimum), rounded to 16 bits, is clearly better with these levels.
struct Levels {
  Vec sum = Vec{}, squares = Vec{}, products = Vec{};

  void offer(const Group& group, Vec scale, Vec minimum, Fit& best) const {
    scale = rounded_to_f16(scale);
    minimum = rounded_to_f16(minimum);
    const Vec above = minimum - group.least;
    const Vec count = splat(static_cast<float>(group.count));
    const Vec error = group.squares + scale * (scale * squares - 2 * products + 2 * above * sum) +
                      above * (above * count - 2 * group.sum);
    const IVec better = error < best.error - 1e-6f * group.squares;
    best.scale = better ? scale : best.scale;
    best.minimum = better ? minimum : best.minimum;
    best.error = better ? error : best.error;
  }
};

// The range in `steps` steps: its ends, and the least squares for the levels that this gives.
void try_steps(const Group& group, float steps, Fit& best) {
  const Vec inverse_scale = steps * inverse(group.range);
  Levels levels;
  for (int i = 0; i < group.count; ++i) {
    const Vec level = level_of(group.values[i], inverse_scale);
    levels.sum += level;
    levels.squares += level * level;
    levels.products += level * group.values[i];
  }
  if (steps == 15) levels.offer(group, group.range / 15.0f, group.least, best);
  const Vec count = splat(static_cast<float>(group.count));
  const Vec scale = (count * levels.products - levels.sum * group.sum) *
                    inverse(count * levels.squares - levels.sum * levels.sum);
  levels.offer(group, scale, group.least + (group.sum - scale * levels.sum) / count, best);
}

Fit fit(const Group& group) {
  constexpr float kAlmostNothing = 4e-6f;  // of the squares: the weights were of this form before
  // The ends of the range first: they give back what was of this form and used its first and last level. What used
  // fewer levels is found with fewer steps. Of any other weights some may be cut off for the good of the rest.
  constexpr float kSteps[] = {15, 14, 14.5, 15.5, 16, 16.5, 17, 13, 12, 11, 10, 9};
  Fit best{Vec{}, rounded_to_f16(group.least), group.squares + splat(1e-30f)};
  for (float steps : kSteps) {
    try_steps(group, steps, best);
    if (lanes(best.error > kAlmostNothing * group.squares) == 0) break;
  }
  return best;
}

Group read_group(const Columns& columns, int64_t k, int64_t size) {
  Group group;
  group.count = static_cast<int>(size - k < kInt4Group ? size - k : kInt4Group);
  for (int i = 0; i < kInt4Group; i += W) gather(columns, k + i, size, group.values + i);
  group.least = group.values[0];
  Vec most = group.values[0];
  for (int i = 1; i < group.count; ++i) {
    group.least = vmin(group.least, group.values[i]);
    most = vmax(most, group.values[i]);
  }
  group.range = most - group.least;
  group.sum = group.squares = Vec{};
  for (int i = 0; i < group.count; ++i) {
    group.values[i] -= group.least;
    group.sum += group.values[i];
    group.squares += group.values[i] * group.values[i];
  }
  return group;
}

}  // namespace

void pack_int4(const Columns& columns, int64_t size, Int4Group* groups) {
  for (int64_t k = 0; k < size; k += kInt4Group, ++groups) {
    const Group group = read_group(columns, k, size);
    const Fit found = fit(group);
    store(groups->scales, found.scale);
    store(groups->minima, found.minimum);
    const Vec inverse_scale = inverse(found.scale);
    UVec words[4] = {};
    for (int i = 0; i < group.count; ++i) {
      const Vec level = level_of(group.values[i] + (group.least - found.minimum), inverse_scale);
      words[i % 16 / 4] |= reinterpret_cast<UVec>(round_to_int(level)) << (8 * (i % 4) + i / 16 * 4);
    }
    memcpy(groups->words, words, sizeof words);
  }
}

void unpack_int4_row(const Matrix& m, int64_t row, float* out) {
  const int lane = static_cast<int>(row % kPanel);
  const Int4Group* groups = int4_groups(m, row / kPanel, lane / W);
  for (int64_t k = 0; k < m.k; ++k) {
    const Int4Group& group = groups[k / kInt4Group];
    const int i = static_cast<int>(k % kInt4Group);
    const uint32_t number = group.words[i % 16 / 4][lane % W] >> (8 * (i % 4) + i / 16 * 4) & 15;
    out[k] = load(group.scales)[lane % W] * static_cast<float>(number) + load(group.minima)[lane % W];
  }
}

}  // namespace antiphon
