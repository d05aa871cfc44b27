// Many query tokens: a tile of rows (query tokens times the query heads of one key head) against chunks of keys. Keys
// are brought into the panels of a weight matrix, so that both products are those of the linear layers; the softmax
// is kept up from chunk to chunk. Serves every shape, also those the decode way does not take.
#include <algorithm>
#include <utility>

#include "accumulate.h"
#include "attention_tile.h"

namespace antiphon {
namespace {

constexpr int64_t kTileFloats = 12288;  // of queries: rows times head_dim

int64_t rows_per_tile(const AttentionShape& shape) {
  return queries_per_tile(shape) * std::max<int64_t>(1, shape.num_kv_heads ? shape.group() : 1);
}

struct TileMemory {
  int64_t dim_panels, dim;  // head_dim in whole panels
  float *q, *keys, *values, *scores, *sums, *largest, *weights;

  // q [rows][D]; keys [chunk / kPanel][D][kPanel]; values [dim_panels][chunk][kPanel]; sums [rows][dim].
  TileMemory(float* memory, const AttentionShape& shape) {
    const int64_t rows = rows_per_tile(shape);
    dim_panels = (shape.head_dim + kPanel - 1) / kPanel;
    dim = dim_panels * kPanel;
    q = memory;
    keys = q + rows * dim;
    values = keys + (kKeysPerChunk + kPanel) * dim;
    scores = values + (kKeysPerChunk + kPanel) * dim;
    sums = scores + rows * kScoreStride;
    largest = sums + rows * dim;
    weights = largest + rows;
  }
};

// W keys to W columns of a panel [D][kPanel]; `places` < 0 are columns of zeros.
template <typename T>
void gather_keys(const T* keys, const int64_t (&places)[W], int64_t dim, float* columns) {
  int64_t d = 0;
  for (; d + W <= dim; d += W) {
    Vec rows[W];
    for (int j = 0; j < W; ++j) {
      rows[j] = places[j] < 0 ? Vec{} : load(keys + places[j] + d) * row_scale(keys + places[j], dim);
    }
    transpose(rows);
    for (int i = 0; i < W; ++i) store(columns + (d + i) * kPanel, rows[i]);
  }
  for (; d < dim; ++d) {
    for (int j = 0; j < W; ++j) {
      const T* key = keys + places[j];
      columns[d * kPanel + j] = places[j] < 0 ? 0 : to_float(key[d]) * row_scale(key, dim);
    }
  }
}

// One value to a row of each panel of head dimensions.
template <typename T>
ANTIPHON_INLINE void gather_value(const T* value, int64_t dim, int64_t num_panels, float* row) {
  const float scale = row_scale(value, dim);
  for (int64_t p = 0; p < num_panels; ++p, row += kKeysPerChunk * kPanel, value += kPanel, dim -= kPanel) {
    if (dim >= kPanel) {
      store(row, load(value) * scale);
      store(row + W, load(value + W) * scale);
    } else {
      for (int64_t d = 0; d < kPanel; ++d) row[d] = d < dim ? to_float(value[d]) * scale : 0;
    }
  }
}

template <typename T>
void gather_chunk(const AttentionCall& call, const AttentionTask& task, int64_t start, int64_t n, const TileMemory& m) {
  const Cache& cache = call.cache;
  const int64_t dim = call.shape.head_dim, head = task.kv_head * cache.head_stride;
  const T *keys = static_cast<const T*>(cache.k) + head, *values = static_cast<const T*>(cache.v) + head;
  KeyPlaces of_keys(call, task.seq, start);
  for (int64_t j = 0; j < round_up<int64_t>(n, kPanel); j += W) {
    int64_t places[W];
    for (int64_t i = 0; i < W; ++i) {
      places[i] = -1;
      if (j + i >= n) continue;
      places[i] = of_keys.next();
      gather_value(values + places[i], dim, m.dim_panels, m.values + (j + i) * kPanel);
    }
    gather_keys(keys, places, dim, m.keys + j / kPanel * dim * kPanel + j % kPanel);
  }
}

template <int R>
void score_rows(const float* q, int64_t dim, int64_t q_stride, const float* keys, int64_t num_panels, float* scores) {
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    Vec acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = Vec{};
    accumulate<R>(q, q_stride, keys + panel * dim * kPanel, dim, acc, [](const float*) {});
    for (int r = 0; r < R; ++r) {
      store(scores + r * kScoreStride + panel * kPanel, acc[r][0]);
      store(scores + r * kScoreStride + panel * kPanel + W, acc[r][1]);
    }
  }
}

template <int R>
void add_rows(const float* weights, int64_t num_keys, const float* values, int64_t num_panels, float* sums,
              int64_t sum_stride) {
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    float* out = sums + panel * kPanel;
    Vec acc[R][2];
    for (int r = 0; r < R; ++r) {
      acc[r][0] = load(out + r * sum_stride);
      acc[r][1] = load(out + r * sum_stride + W);
    }
    accumulate<R>(weights, kScoreStride, values + panel * kKeysPerChunk * kPanel, num_keys, acc, [](const float*) {});
    for (int r = 0; r < R; ++r) {
      store(out + r * sum_stride, acc[r][0]);
      store(out + r * sum_stride + W, acc[r][1]);
    }
  }
}

template <int R>
void add_row_tile(const AttentionCall& call, const TilePlace& place, int64_t row, int64_t start, int64_t n,
                  const TileMemory& m) {
  const int64_t last_position = place.position_of(row + R - 1), dim = call.shape.head_dim;
  if (start > last_position || start + n <= place.first_key_of(row)) return;
  const int64_t seen = std::min(n, last_position - start + 1);
  float* scores = m.scores + row * kScoreStride;
  score_rows<R>(m.q + row * m.dim, dim, m.dim, m.keys, (seen + kPanel - 1) / kPanel, scores);
  for (int64_t r = row; r < row + R; ++r) {
    const int64_t from = std::max<int64_t>(0, place.first_key_of(r) - start);
    const int64_t to = std::min(n, place.position_of(r) - start + 1);
    float *own_scores = m.scores + r * kScoreStride, *sums = m.sums + r * m.dim;
    const auto put = [&](int64_t i, Vec weights) { store(own_scores + i, weights); };
    soften_row(own_scores, from, to, seen, call.soft_cap, m.largest[r], m.weights[r], sums, m.dim, put);
  }
  add_rows<R>(scores, seen, m.values, m.dim_panels, m.sums + row * m.dim, m.dim);
}

using RowTile = void (*)(const AttentionCall&, const TilePlace&, int64_t, int64_t, int64_t, const TileMemory&);

template <int... R>
constexpr RowTile row_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  constexpr RowTile all[] = {add_row_tile<R + 1>...};
  return all[rows - 1];
}

void load_queries(const AttentionCall& call, const TilePlace& place, const TileMemory& m) {
  const int64_t dim = call.shape.head_dim;
  for (int64_t r = 0; r < place.rows; ++r) {
    const float* q = call.q + place.offset_of(r, call.q_stride);
    for (int64_t d = 0; d < dim; ++d) m.q[r * m.dim + d] = q[d] * call.scale;
    for (int64_t d = 0; d < m.dim; ++d) m.sums[r * m.dim + d] = 0;
    m.largest[r] = kLowest;
    m.weights[r] = 0;
  }
}

}  // namespace

int64_t queries_per_tile(const AttentionShape& shape) {
  if (shape.num_kv_heads == 0) return 1;
  return std::max<int64_t>(1, std::min<int64_t>(192, kTileFloats / shape.head_dim) / shape.group());
}

int64_t tile_scratch_size(const AttentionShape& shape) {
  const int64_t rows = rows_per_tile(shape), dim = round_up<int64_t>(shape.head_dim, kPanel);
  return 2 * rows * dim + 2 * (kKeysPerChunk + kPanel) * dim + rows * (kScoreStride + 2);
}

void attend_tile(const AttentionCall& call, const AttentionTask& task, int32_t window, float* buffer) {
  const TileMemory memory(buffer, call.shape);
  const TilePlace place(call, task, window);
  load_queries(call, place, memory);
  for (int64_t start = place.first_key; start < place.end_key; start += kKeysPerChunk) {
    const int64_t n = std::min(kKeysPerChunk, place.end_key - start);
    with_format(call.cache.format, [&](auto number) {
      gather_chunk<decltype(number)>(call, task, start, n, memory);
    });
    for (int64_t row = 0; row < place.rows; row += kMaxTileRows) {
      const int64_t rows = std::min<int64_t>(kMaxTileRows, place.rows - row);
      row_tile_of(rows, std::make_integer_sequence<int, kMaxTileRows>())(call, place, row, start, n, memory);
    }
  }
  write_tile(call, place, memory.sums, memory.dim, memory.weights);
}

}  // namespace antiphon
