#include "matrix.h"

#include <cmath>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "quantize.h"

namespace antiphon {
namespace {

int64_t group_of(Format format) {
  return format == Format::kInt8 ? kInt8Group : format == Format::kBfloat16 ? kBf16Group : 1;
}

// Calls write(i, value) for each k of one row; `i` is the place of the number within the panel.
template <int Group, typename Write>
void for_each_place(const Matrix& m, int lane, const Write& write) {
  for (int64_t k = 0; k < m.k; ++k) write(k, (k / Group * kPanel + lane) * Group + k % Group);
}

void pack_int8_row(Matrix& m, int64_t panel, int lane, const float* row) {
  auto* out = static_cast<int8_t*>(m.data) + panel * m.padded_k * kPanel;
  float largest = 0;
  for (int64_t k = 0; k < m.k; ++k) largest = std::fmax(largest, std::fabs(row[k]));
  float scale = largest > 0 ? largest / 127 : 1;
  int32_t sum = 0;
  for_each_place<4>(m, lane, [&](int64_t k, int64_t place) {
    int32_t number = static_cast<int32_t>(std::lrintf(row[k] / scale));
    out[place] = static_cast<int8_t>(number);
    sum += number;
  });
  m.scales[panel * kPanel + lane] = scale;
  m.corrections[panel * kPanel + lane] = kActivationZero * sum;
}

void pack_row(Matrix& m, int64_t panel, int lane, const float* row) {
  int64_t start = panel * m.padded_k * kPanel;
  if (m.format == Format::kInt8) return pack_int8_row(m, panel, lane, row);
  if (m.format == Format::kBfloat16) {
    auto* out = static_cast<bf16*>(m.data) + start;
    for_each_place<2>(m, lane, [&](int64_t k, int64_t place) { out[place] = to_bf16(row[k]); });
  } else {
    auto* out = static_cast<float*>(m.data) + start;
    for_each_place<1>(m, lane, [&](int64_t k, int64_t place) { out[place] = row[k]; });
  }
}

}  // namespace

void* allocate(int64_t bytes) {
  constexpr int64_t kHuge = 2 << 20;
  int64_t alignment = bytes >= kHuge ? kHuge : 64;
  int64_t rounded = round_up(bytes > 0 ? bytes : 1, alignment);
  void* memory = aligned_alloc(alignment, rounded);
  if (memory == nullptr) return nullptr;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (alignment == kHuge) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
  memset(memory, 0, rounded);
  return memory;
}

Matrix* pack(Pool& pool, Format format, bool gated, bool exact, const float* source, int64_t n, int64_t k,
             int64_t stride, const float* bias) {
  auto* m = new Matrix{};
  m->format = format;
  m->gated = gated;
  m->exact = exact;
  m->n = n;
  m->k = k;
  m->padded_k = round_up(k, group_of(format));
  m->num_panels = gated ? (n / 2 + W - 1) / W : (n + kPanel - 1) / kPanel;
  m->out_columns = gated ? n / 2 : n;
  int64_t lanes = m->num_panels * kPanel;
  int64_t width = format == Format::kInt8 ? 1 : format == Format::kBfloat16 ? 2 : 4;
  m->bytes = lanes * m->padded_k * width;
  m->data = allocate(m->bytes);
  if (bias != nullptr) m->bias = static_cast<float*>(allocate(lanes * 4));
  if (format == Format::kInt8) {
    m->scales = static_cast<float*>(allocate(lanes * 4));
    m->corrections = static_cast<int32_t*>(allocate(lanes * 4));
  }
  pool.run_ranges(m->num_panels, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t panel = first; panel < last; ++panel) {
      for (int lane = 0; lane < kPanel; ++lane) {
        int64_t row = m->row_of(panel, lane);
        if (row < 0) continue;
        pack_row(*m, panel, lane, source + row * stride);
        if (bias != nullptr) m->bias[panel * kPanel + lane] = bias[row];
      }
    }
  });
  return m;
}

void release(Matrix* m) {
  if (m == nullptr) return;
  free(m->data);
  free(m->bias);
  free(m->scales);
  free(m->corrections);
  delete m;
}

void unpack_row(const Matrix& m, int64_t row, float* out) {
  int64_t panel = row / kPanel;
  int lane = static_cast<int>(row % kPanel);
  int64_t start = panel * m.padded_k * kPanel;
  if (m.format == Format::kInt8) {
    auto* data = static_cast<const int8_t*>(m.data) + start;
    float scale = m.scales[row];
    for_each_place<4>(m, lane, [&](int64_t k, int64_t place) { out[k] = scale * data[place]; });
  } else if (m.format == Format::kBfloat16) {
    auto* data = static_cast<const bf16*>(m.data) + start;
    for_each_place<2>(m, lane, [&](int64_t k, int64_t place) { out[k] = to_float(data[place]); });
  } else {
    auto* data = static_cast<const float*>(m.data) + start;
    for_each_place<1>(m, lane, [&](int64_t k, int64_t place) { out[k] = data[place]; });
  }
}

}  // namespace antiphon
