// The same tiles in the tile registers of AMX, over keys and values that bfloat16 holds exactly: their own numbers, or
// those of int8, whose scales are multiplied into scores and weights. Queries and softmax weights are sums of two
// bfloat16 numbers: 16 bits of each, so next to nothing is lost of what the vectors of attention_tile.cpp keep. Of a
// coarse call they are one bfloat16 number each, as the rows of the products around it.
#include "amx.h"
#include "attention_tile.h"
#include "gemm.h"

namespace antiphon {

#if ANTIPHON_HAS_AMX

namespace {

constexpr int kFineDigits = 2;

int64_t most_rows(const AttentionShape& shape) { return queries_per_tile(shape) * shape.group(); }

struct AmxTileMemory {
  DigitRows q;           // [rows, D]
  bf16 *keys, *values;  // panels: [chunk / kPanel][D / 2][kPanel][2]; [D / kPanel][chunk / 2][kPanel][2]
  DigitRows digits;      // [kAmxRows, chunk], of softmax weights
  float *key_scales, *value_scales;  // [chunk]
  float* scores;                     // [kAmxRows, kScoreStride]
  float *sums, *largest, *weights;   // [rows, D], [rows], [rows]

  AmxTileMemory(float* memory, const AttentionShape& shape, int num_digits) {
    const int64_t rows = most_rows(shape), dim = shape.head_dim;
    auto halves = [&](int64_t count) {
      auto* start = reinterpret_cast<bf16*>(memory);
      memory += count / 2;
      return start;
    };
    auto floats = [&](int64_t count) {
      float* start = memory;
      memory += count;
      return start;
    };
    q = {halves((rows + kAmxRows) * num_digits * dim), dim, num_digits};
    keys = halves(kKeysPerChunk * dim);
    values = halves(kKeysPerChunk * dim);
    digits = {halves(kAmxRows * num_digits * kKeysPerChunk), kKeysPerChunk, num_digits};
    key_scales = floats(kKeysPerChunk);
    value_scales = floats(kKeysPerChunk);
    scores = floats(kAmxRows * kScoreStride);
    sums = floats((rows + kAmxRows) * dim);
    largest = floats(rows);
    weights = floats(rows);
    end = memory;
  }

  const float* end;
};

// 2 W numbers as words of two.
ANTIPHON_INLINE Vec load_words(const bf16* row) { return load(reinterpret_cast<const float*>(row)); }
ANTIPHON_INLINE Vec load_words(const int8_t* row) {
  bf16 numbers[2 * W];
  store(numbers, load(row));
  store(numbers + W, load(row + W));
  return load_words(numbers);
}

// W keys to W columns of a panel, two dimensions to a word; `places` < 0 are columns of zeros.
template <typename T>
void gather_keys(const T* keys, const int64_t (&places)[W], int64_t dim, float* columns) {
  for (int64_t d = 0; d < dim; d += 2 * W) {
    Vec words[W];
    for (int j = 0; j < W; ++j) words[j] = places[j] < 0 ? Vec{} : load_words(keys + places[j] + d);
    transpose(words);
    for (int i = 0; i < W; ++i) store(columns + (d / 2 + i) * kPanel, words[i]);
  }
}

// Two values to a row of each panel of head dimensions, two keys to a word; a place < 0 is zeros.
template <typename T>
void gather_values(const T* values, int64_t first, int64_t second, int64_t dim, float* row) {
  auto bits = [&](int64_t place, int64_t d) {
    return place < 0 ? UVec{} : reinterpret_cast<UVec>(load(values + place + d));
  };
  for (int64_t d = 0; d < dim; d += kPanel, row += kKeysPerChunk / 2 * kPanel) {
    for (int64_t i = 0; i < kPanel; i += W) {
      const UVec words = (bits(first, d + i) >> 16) | (bits(second, d + i) & 0xffff0000u);
      store(row + i, reinterpret_cast<Vec>(words));
    }
  }
}

template <typename T>
void gather_chunk(const AttentionCall& call, const AttentionTask& task, int64_t start, int64_t n,
                  const AmxTileMemory& m) {
  const Cache& cache = call.cache;
  const int64_t dim = call.shape.head_dim, head = task.kv_head * cache.head_stride;
  const T *keys = static_cast<const T*>(cache.k) + head, *values = static_cast<const T*>(cache.v) + head;
  KeyPlaces of_keys(call, task.seq, start);
  for (int64_t j = 0; j < round_up<int64_t>(n, kPanel); j += W) {
    int64_t places[W];
    for (int64_t i = 0; i < W; ++i) {
      places[i] = -1;
      m.key_scales[j + i] = m.value_scales[j + i] = 0;
      if (j + i >= n) continue;
      places[i] = of_keys.next();
      m.key_scales[j + i] = row_scale(keys + places[i], dim);
      m.value_scales[j + i] = row_scale(values + places[i], dim);
    }
    auto *key_words = reinterpret_cast<float*>(m.keys), *value_words = reinterpret_cast<float*>(m.values);
    gather_keys(keys, places, dim, key_words + j / kPanel * (dim / 2) * kPanel + j % kPanel);
    for (int64_t i = 0; i < W; i += 2) {
      gather_values(values, places[i], places[i + 1], dim, value_words + (j + i) / 2 * kPanel);
    }
  }
}

void multiply_by(const float* scales, int64_t n, float* row) {
  for (int64_t i = 0; i < n; i += W) store(row + i, load(row + i) * load(scales + i));
}

// `count` rows against keys start .. start + n - 1.
template <typename T>
void add_row_block(const AttentionCall& call, const TilePlace& place, int64_t row, int64_t count, int64_t start,
                   int64_t n, const AmxTileMemory& m) {
  const int64_t last_position = place.position_of(row + count - 1), dim = call.shape.head_dim;
  if (start > last_position || start + n <= place.first_key_of(row)) return;
  const int64_t seen = std::min(n, last_position - start + 1), padded = round_up<int64_t>(seen, kPanel);
  const TileRows<bf16> queries = tile_rows(m.q, row, count, 0);
  for (int64_t j = 0; j < padded; j += kPanel) {
    amx_sum(queries, m.keys + j * dim, dim, {}, m.scores + j, kScoreStride, [] {});
  }
  for (int64_t r = 0; r < count; ++r) {
    const int64_t from = std::max<int64_t>(0, place.first_key_of(row + r) - start);
    const int64_t to = std::min(n, place.position_of(row + r) - start + 1);
    float *scores = m.scores + r * kScoreStride, *sums = m.sums + (row + r) * dim;
    if constexpr (kHasScale<T>) multiply_by(m.key_scales, seen, scores);
    soften_row(scores, from, to, seen, call.soft_cap, m.largest[row + r], m.weights[row + r], sums, dim);
    if constexpr (kHasScale<T>) multiply_by(m.value_scales, seen, scores);
    m.digits.put_row(r, scores, seen, padded);
  }
  const TileRows<bf16> weights = tile_rows(m.digits, 0, count, 0);
  AmxPass pass;
  pass.more = true;
  for (int64_t d = 0; d < dim; d += kPanel) {
    amx_sum(weights, m.values + d * kKeysPerChunk, padded, pass, m.sums + row * dim + d, dim, [] {});
  }
}

void load_queries(const AttentionCall& call, const TilePlace& place, const AmxTileMemory& m) {
  const int64_t dim = call.shape.head_dim;
  for (int64_t r = 0; r < place.rows; ++r) {
    const float* q = call.q + place.offset_of(r, call.q_stride);
    float* scaled = m.sums + r * dim;
    for (int64_t d = 0; d < dim; d += W) store(scaled + d, load(q + d) * call.scale);
    m.q.put_row(r, scaled, dim, dim);
    for (int64_t d = 0; d < dim; d += W) store(scaled + d, Vec{});
    m.largest[r] = kLowest;
    m.weights[r] = 0;
  }
}

}  // namespace

bool serves_amx_tiles(const AttentionShape& shape, KvFormat format) {
  return format != KvFormat::kFloat32 && shape.head_dim % kPanel == 0 && amx_available();
}

int64_t amx_tile_scratch_size(const AttentionShape& shape) {
  if (shape.num_kv_heads == 0 || shape.head_dim % kPanel != 0) return 0;
  return AmxTileMemory(nullptr, shape, kFineDigits).end - static_cast<const float*>(nullptr);
}

void attend_tile_amx(const AttentionCall& call, const AttentionTask& task, int32_t window, float* buffer) {
  const AmxTileMemory memory(buffer, call.shape, call.coarse ? 1 : kFineDigits);
  const TilePlace place(call, task, window);
  const AmxScope scope;
  load_queries(call, place, memory);
  auto add_chunks = [&](auto number) {
    using T = decltype(number);
    for (int64_t start = place.first_key; start < place.end_key; start += kKeysPerChunk) {
      const int64_t n = std::min(kKeysPerChunk, place.end_key - start);
      gather_chunk<T>(call, task, start, n, memory);
      for (int64_t row = 0; row < place.rows; row += kAmxRows) {
        add_row_block<T>(call, place, row, std::min(kAmxRows, place.rows - row), start, n, memory);
      }
    }
  };
  call.cache.format == KvFormat::kInt8 ? add_chunks(int8_t{}) : add_chunks(bf16{});
  write_tile(call, place, memory.sums, call.shape.head_dim, memory.weights);
}

#else

bool serves_amx_tiles(const AttentionShape&, KvFormat) { return false; }
int64_t amx_tile_scratch_size(const AttentionShape&) { return 0; }
void attend_tile_amx(const AttentionCall&, const AttentionTask&, int32_t, float*) {}

#endif

}  // namespace antiphon
