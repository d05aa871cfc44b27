#include "gemm.h"

#include <algorithm>

#include "coded.h"
#include "gemm_amx.h"
#include "gemm_vector.h"
#include "int4.h"

#if ANTIPHON_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace antiphon {
namespace {

constexpr int64_t kMostRowsInTwoDigits = 16;  // up to here reading the weights takes longer than multiplying
constexpr int64_t kMinUnpackRows = 33;  // from here unpacking 4 bits to 16 takes less time
constexpr int64_t kMinRowsOfPart = 128;         // from twice as many on threads share rows, not only panels
constexpr int64_t kUnpackedAtOnce = 512 << 10;  // bytes of weights that stay near a core while rows pass by
constexpr int64_t kChunksPerThread = 12;
constexpr int64_t kExpected = 64 << 10;  // bytes of weights that are fetched before a product begins
constexpr int64_t kCachedActivations = 448 << 10;  // bytes of rows that stay near a core while panels pass by

bool is_unpacked(const Matrix& m, int64_t num_rows) {
  return m.format == Format::kInt4 && m.k > 0 && num_rows >= kMinUnpackRows && amx_available();
}

bool uses_tiles(const Matrix& m, int64_t num_rows) {
  if (m.k == 0) return false;  // of a rank without heads
  if (wants_numbers(m, num_rows)) return amx_available() && 2 * num_rows >= kMinAmxRows;
  return num_digits_wanted(m, num_rows) > 0;
}

int64_t num_chunks(const Pool& pool, const Matrix& m) {
  return std::min<int64_t>(m.num_panels, kChunksPerThread * pool.size());
}

int64_t first_panel(const Matrix& m, int64_t chunk, int64_t num_chunks) { return m.num_panels * chunk / num_chunks; }

// Of `parts` of m rows, whole tiles.
int64_t first_row(int64_t m, int64_t part, int64_t parts) {
  constexpr int64_t kUnit = 32;
  return part == parts ? m : m * part / parts / kUnit * kUnit;
}

Rows rows_from(Rows rows, int64_t first) {
  rows.values += first * rows.stride;
  if (rows.numbers != nullptr) rows.numbers += 2 * first * rows.numbers_stride;
  if (rows.scales != nullptr) rows.scales += first;
  if (rows.group_sums != nullptr) rows.group_sums += first * rows.group_sums_stride;
  rows.digits = rows.digits.from(first);
  return rows;
}

Output output_from(Output out, int64_t first) {
  if (out.data != nullptr) out.data += first * out.stride;
  out.digits = out.digits.from(first);
  return out;
}

}  // namespace

bool amx_available() {
#if ANTIPHON_HAS_AMX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

bool wants_numbers(const Matrix& m, int64_t num_rows) {
  return m.format == Format::kInt8 || (m.format == Format::kInt4 && !is_unpacked(m, num_rows));
}

float quantize_for(const Matrix& m, const float* x, uint8_t* high, uint8_t* low, float* group_sums) {
  if (m.format != Format::kInt4) return quantize_row<kActivationZero>(x, m.k, m.padded_k, high, low);
  return quantize_row<0, kInt4Group>(x, m.k, m.padded_k, high, low, group_sums);
}

int num_digits_wanted(const Matrix& m, int64_t num_rows) {
  const bool unpacked = is_unpacked(m, num_rows);
  if ((m.format != Format::kBfloat16 && !unpacked) || !amx_available()) return 0;
  const int digits = m.exact ? 3 : num_rows <= kMostRowsInTwoDigits ? 2 : 1;
  return unpacked || num_rows * digits >= kMinAmxRows ? digits : 0;
}

int64_t unpacked_size(const Matrix& m) {
  if (m.format == Format::kBfloat16) {
    return std::max(m.coding != nullptr && amx_available() ? kCodedRoom : 0, widened_size(m));
  }
  return is_unpacked(m, kMinUnpackRows) ? std::max(2 * m.padded_k * kPanel, kUnpackedAtOnce) : 0;
}

void expect(Pool& pool, const Matrix& m) {
  if (m.num_panels == 0) return;
  const int64_t chunks = num_chunks(pool, m), panel_bytes = m.bytes / m.num_panels;
  for (int thread = 0; thread < pool.size(); ++thread) {
    const int64_t first = first_panel(m, pool.first_chunk(chunks, thread), chunks);
    const int64_t last = first_panel(m, pool.first_chunk(chunks, thread + 1), chunks);
    const char* start = static_cast<const char*>(m.data) + first * panel_bytes;
    pool.expect(thread, start, start + std::min((last - first) * panel_bytes, kExpected));
  }
}

void multiply(Pool& pool, const Matrix& matrix, const Rows& rows, int64_t m, const Output& out) {
  if (m == 0 || matrix.num_panels == 0) return;
  const bool in_tiles = uses_tiles(matrix, m);
  const int64_t row_bytes = matrix.k * (wants_numbers(matrix, m) ? 1 : 4);
  const int64_t block = std::max<int64_t>(kMaxTileRows * 8, kCachedActivations / std::max<int64_t>(row_bytes, 1));
  // Many rows are parted, too: what a thread writes is mostly what it reads next, and is still near its core.
  const int64_t parts = in_tiles ? std::clamp<int64_t>(m / kMinRowsOfPart, 1, pool.size()) : 1;
  int64_t chunks = num_chunks(pool, matrix);
  if (parts > 1) chunks = std::max<int64_t>(1, chunks / (2 * parts));
  pool.run(parts * chunks, [&](int64_t i, int thread) {
    const int64_t part = i / chunks, chunk = i % chunks;
    const int64_t first = first_panel(matrix, chunk, chunks), last = first_panel(matrix, chunk + 1, chunks);
    char* room = rows.unpacked + thread * rows.unpacked_stride;
    if (in_tiles) {
      const int64_t start = first_row(m, part, parts), count = first_row(m, part + 1, parts) - start;
      multiply_in_tiles(matrix, first, last, rows_from(rows, start), count, room, output_from(out, start));
      return;
    }
    for (int64_t row = 0; row < m; row += block) {
      for (int64_t panel = first; panel < last; ++panel) {
        multiply_panel(matrix, panel, rows, row, std::min(m, row + block), room, out);
      }
    }
  });
}

}  // namespace antiphon
