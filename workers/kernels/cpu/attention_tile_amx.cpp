// The same tiles in the tile registers of AMX. Keys and values of a bfloat16 or int8 cache are bfloat16 numbers as they
// are (the scales of int8 are multiplied into scores and weights). Queries and softmax weights are two such numbers
// each, so next to nothing is lost of what the vectors of attention_tile.cpp keep; of a coarse call one, as are the
// rows of the products around it. Over a float32 cache all of them are three, which lose nothing.
#include <type_traits>

#include "amx.h"
#include "attention_tile.h"
#include "gemm.h"

namespace antiphon {

#if ANTIPHON_HAS_AMX

namespace {

template <typename T>
constexpr int kKeyDigits = std::is_same_v<T, float> ? kMostDigits : 1;

int num_query_digits(const AttentionCall& call) {
  return call.cache.format == KvFormat::kFloat32 ? kMostDigits : call.coarse ? 1 : 2;
}

int64_t most_rows(const AttentionShape& shape) { return queries_per_tile(shape) * shape.group(); }

struct AmxTileMemory {
  DigitRows q;  // [rows, D]
  // Panels of each digit: [chunk / kPanel][D / 2][kPanel][2]; [D / kPanel][chunk / 2][kPanel][2].
  bf16 *keys, *values;
  int64_t keys_size;                 // of a digit, and of the values
  DigitRows digits;                  // [kAmxRows, chunk], of softmax weights
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
    keys_size = kKeysPerChunk * dim;
    keys = halves(kMostDigits * keys_size);
    values = halves(kMostDigits * keys_size);
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

// v, which has 8 bits for each digit, as the sum of so many bfloat16 numbers.
template <int Digits>
ANTIPHON_INLINE void split(Vec v, UVec (&digits)[Digits]) {
  for (int i = 0; i < Digits; ++i) {
    digits[i] = reinterpret_cast<UVec>(v) & 0xffff0000u;
    v -= reinterpret_cast<Vec>(digits[i]);
  }
}

// The numbers of `first` and `second` in words of two, for each digit; `digit_size` words are between those.
template <int Digits>
ANTIPHON_INLINE void store_pairs(Vec first, Vec second, int64_t digit_size, float* words) {
  UVec lower[Digits], upper[Digits];
  split(first, lower);
  split(second, upper);
  for (int i = 0; i < Digits; ++i) {
    store(words + i * digit_size, reinterpret_cast<Vec>((lower[i] >> 16) | upper[i]));
  }
}

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
void gather_keys(const T* keys, const int64_t (&places)[W], int64_t dim, int64_t, float* columns) {
  for (int64_t d = 0; d < dim; d += 2 * W) {
    Vec words[W];
    for (int j = 0; j < W; ++j) words[j] = places[j] < 0 ? Vec{} : load_words(keys + places[j] + d);
    transpose(words);
    for (int i = 0; i < W; ++i) store(columns + (d / 2 + i) * kPanel, words[i]);
  }
}

void gather_keys(const float* keys, const int64_t (&places)[W], int64_t dim, int64_t digit_size, float* columns) {
  for (int64_t d = 0; d < dim; d += W) {
    Vec rows[W];
    for (int j = 0; j < W; ++j) rows[j] = places[j] < 0 ? Vec{} : load(keys + places[j] + d);
    transpose(rows);
    for (int i = 0; i < W; i += 2) {
      store_pairs<kMostDigits>(rows[i], rows[i + 1], digit_size, columns + (d + i) / 2 * kPanel);
    }
  }
}

// Two values to a row of each panel of head dimensions, two keys to a word; a place < 0 is zeros.
template <typename T>
void gather_values(const T* values, int64_t first, int64_t second, int64_t dim, int64_t digit_size, float* row) {
  auto load_value = [&](int64_t place, int64_t d) { return place < 0 ? Vec{} : load(values + place + d); };
  for (int64_t d = 0; d < dim; d += kPanel, row += kKeysPerChunk / 2 * kPanel) {
    for (int64_t i = 0; i < kPanel; i += W) {
      store_pairs<kKeyDigits<T>>(load_value(first, d + i), load_value(second, d + i), digit_size, row + i);
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
    gather_keys(keys, places, dim, m.keys_size / 2, key_words + j / kPanel * (dim / 2) * kPanel + j % kPanel);
    for (int64_t i = 0; i < W; i += 2) {
      float* row = value_words + (j + i) / 2 * kPanel;
      gather_values(values, places[i], places[i + 1], dim, m.keys_size / 2, row);
    }
  }
}

void multiply_by(const float* scales, int64_t n, float* row) {
  for (int64_t i = 0; i < n; i += W) store(row + i, load(row + i) * load(scales + i));
}

// A panel of keys or values as the tiles read it.
template <typename T>
ANTIPHON_INLINE TileWeights panel_at(const bf16* panel, const AmxTileMemory& m) {
  TileWeights weights(panel);
  weights.num_digits = kKeyDigits<T>;
  weights.digit_bytes = m.keys_size * static_cast<int64_t>(sizeof(bf16));
  return weights;
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
    amx_sum(queries, panel_at<T>(m.keys + j * dim, m), dim, {}, m.scores + j, kScoreStride, [] {});
  }
  for (int64_t r = 0; r < count; ++r) {
    const int64_t from = std::max<int64_t>(0, place.first_key_of(row + r) - start);
    const int64_t to = std::min(n, place.position_of(row + r) - start + 1);
    float *scores = m.scores + r * kScoreStride, *sums = m.sums + (row + r) * dim;
    if constexpr (kHasScale<T>) multiply_by(m.key_scales, seen, scores);
    const auto put = [&](int64_t i, Vec weights) {
      if constexpr (kHasScale<T>) weights *= load(m.value_scales + i);
      m.digits.put(r, i, weights);
    };
    soften_row(scores, from, to, seen, call.soft_cap, m.largest[row + r], m.weights[row + r], sums, dim, put);
    for (int64_t i = round_up<int64_t>(seen, W); i < padded; i += W) put(i, Vec{});
  }
  const TileRows<bf16> weights = tile_rows(m.digits, 0, count, 0);
  AmxPass pass;
  pass.more = true;
  for (int64_t d = 0; d < dim; d += kPanel) {
    float* sums = m.sums + row * dim + d;
    amx_sum(weights, panel_at<T>(m.values + d * kKeysPerChunk, m), padded, pass, sums, dim, [] {});
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

bool serves_amx_tiles(const AttentionShape& shape) {
  return shape.head_dim % kPanel == 0 && amx_available();
}

int64_t amx_tile_scratch_size(const AttentionShape& shape) {
  if (shape.num_kv_heads == 0 || shape.head_dim % kPanel != 0) return 0;
  return AmxTileMemory(nullptr, shape, kMostDigits).end - static_cast<const float*>(nullptr);
}

void attend_tile_amx(const AttentionCall& call, const AttentionTask& task, int32_t window, float* buffer) {
  const AmxTileMemory memory(buffer, call.shape, num_query_digits(call));
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
  with_format(call.cache.format, add_chunks);
  write_tile(call, place, memory.sums, call.shape.head_dim, memory.weights);
}

#else

bool serves_amx_tiles(const AttentionShape&) { return false; }
int64_t amx_tile_scratch_size(const AttentionShape&) { return 0; }
void attend_tile_amx(const AttentionCall&, const AttentionTask&, int32_t, float*) {}

#endif

}  // namespace antiphon
