// The C functions that Python calls. No exception crosses this border: what can fail returns null, or a status.
#include <type_traits>
#include <vector>

#include "all_reduce.h"
#include "decoder.h"
#include "layer_ops.h"
#include "quantize.h"
#include "sampling.h"

using namespace antiphon;

namespace {

constexpr int32_t kOutOfMemory = -1;  // the only thing that is thrown; 0 is success

template <typename Make>
auto guarded(const Make& make) -> decltype(make()) {
  try {
    return make();
  } catch (...) {
    return nullptr;
  }
}

template <typename Body>
int32_t status_of(const Body& body) {
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      return 0;
    } else {
      return body();
    }
  } catch (...) {
    return kOutOfMemory;
  }
}

void linear(Pool& pool, const Matrix& matrix, const float* x, int64_t m, Then then, float soft_cap, float* out) {
  constexpr int64_t kSlack = 64;  // tile registers are loaded whole
  const int64_t k = matrix.k, padded_k = matrix.padded_k, stride = padded_k + kSlack;
  const int64_t sums_stride = stride / kInt4Group, unpacked_stride = unpacked_size(matrix);
  Buffer padded;
  padded.reserve(m + kSlack, k);
  std::vector<uint8_t> numbers(2 * (m + kSlack) * stride);
  std::vector<float> scales(m), group_sums((m + kSlack) * sums_stride);
  const int num_digits = num_digits_wanted(matrix, m);
  std::vector<bf16> digits(num_digits * (m + kSlack) * stride);
  const DigitRows digit_rows{digits.data(), stride, num_digits};
  const Memory<char> unpacked = take<char>(pool.size() * unpacked_stride);
  for (int64_t row = 0; row < m; ++row) {
    memcpy(padded.row(row), x + row * k, k * 4);
    uint8_t* high = numbers.data() + 2 * row * stride;
    scales[row] = quantize_for(matrix, padded.row(row), high, high + stride, group_sums.data() + row * sums_stride);
    digit_rows.put_row(row, padded.row(row), k, padded_k);
  }
  const Rows rows{padded.row(0),     padded.stride(), numbers.data(), stride,         scales.data(),
                  group_sums.data(), sums_stride,     digit_rows,     unpacked.get(), unpacked_stride};
  multiply(pool, matrix, rows, m, {out, matrix.out_columns, matrix.out_columns, then, soft_cap});
}

}  // namespace

extern "C" {

const char* antiphon_instructions() {
#if defined(__AVX512VNNI__)
  return amx_available() ? "AVX-512 VNNI with AMX" : "AVX-512 VNNI";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "portable";
#endif
}

Pool* antiphon_pool_create(int32_t num_threads, int32_t spin_microseconds) {
  return guarded([&] { return new Pool(num_threads, spin_microseconds); });
}

void antiphon_pool_destroy(Pool* pool) { delete pool; }

int64_t antiphon_group_bytes(int32_t size) { return SharedGroup::num_bytes(size); }

// Takes over `file`, also where it returns null.
SharedGroup* antiphon_group_create(int32_t file, int32_t rank, int32_t size, int64_t timeout_ns, int64_t spin_ns) {
  SharedGroup* group = guarded([&] { return new SharedGroup(file, rank, size, timeout_ns, spin_ns); });
  if (group != nullptr && group->is_mapped()) return group;
  delete group;
  return nullptr;
}

void antiphon_group_destroy(SharedGroup* group) { delete group; }

void antiphon_group_leave(SharedGroup* group) { group->leave(); }

int32_t antiphon_group_is_alive(const SharedGroup* group, int32_t peer) { return group->is_alive(peer); }

// An `AllReduce` of decoder.h.
int32_t antiphon_group_all_reduce(void* group, float* data, int64_t count) {
  return static_cast<SharedGroup*>(group)->all_reduce(data, count);
}

int32_t antiphon_group_all_gather(SharedGroup* group, const uint8_t* part, int64_t num_rows, const int64_t* widths,
                                  uint8_t* out) {
  return group->all_gather(part, num_rows, widths, out);
}

Matrix* antiphon_matrix_pack(Pool* pool, const Packing* packing, const float* source, int64_t n, int64_t k,
                             int64_t stride, const float* bias) {
  return guarded([&] { return pack(*pool, *packing, source, n, k, stride, bias).release(); });
}

void antiphon_matrix_release(Matrix* matrix) { delete matrix; }

int64_t antiphon_matrix_bytes(const Matrix* matrix) { return matrix->bytes; }

void antiphon_matrix_row(const Matrix* matrix, int64_t row, float* out) { unpack_row(*matrix, row, out); }

Decoder* antiphon_decoder_create(Pool* pool, const Description* description, const Layer* layers) {
  return guarded([&] { return new Decoder(*pool, *description, layers); });
}

void antiphon_decoder_destroy(Decoder* decoder) { delete decoder; }

int32_t antiphon_decoder_reserve(Decoder* decoder, int64_t num_tokens) {
  return status_of([&] { decoder->reserve(num_tokens); });
}

// The status of a sum over the ranks, where one fails.
int32_t antiphon_decoder_forward(Decoder* decoder, const Step* step) {
  return status_of([&] { return decoder->forward(*step); });
}

int32_t antiphon_decoder_logits(Decoder* decoder, const float* rows, int64_t stride, int64_t count, float* out,
                                int64_t out_stride) {
  return status_of([&] { decoder->logits(rows, stride, count, out, out_stride); });
}

Sampler* antiphon_sampler_create(Pool* pool, int64_t vocab_size) {
  return guarded([&] { return new Sampler(*pool, vocab_size); });
}

void antiphon_sampler_destroy(Sampler* sampler) { delete sampler; }

void antiphon_sampler_sample(Sampler* sampler, const SampleCall* call) { sampler->sample(*call); }

// A step of which every row samples, on a rank that has the whole vocabulary: its hidden states, logits
// [T, vocabulary], and tokens, which are given as 32-bit numbers beside.
int32_t antiphon_decode(Decoder* decoder, const Step* step, float* logits, Sampler* sampler, const SampleCall* call,
                        int32_t* tokens) {
  return status_of([&] {
    const int32_t status = decoder->forward(*step);
    if (status != 0) return status;
    decoder->logits(step->hidden, decoder->hidden(), step->num_tokens, logits, call->stride);
    sampler->sample(*call);
    for (int64_t row = 0; row < step->num_tokens; ++row) tokens[row] = static_cast<int32_t>(call->tokens[row]);
    return 0;
  });
}

// The rest is for tests and measurements: one kernel at a time.

// x [m, k] and out [m, columns] dense.
int32_t antiphon_linear(Pool* pool, const Matrix* matrix, const float* x, int64_t m, int32_t then, float soft_cap,
                        float* out) {
  return status_of([&] { linear(*pool, *matrix, x, m, static_cast<Then>(then), soft_cap, out); });
}

void antiphon_rms_norm(const float* x, const float* weight, int64_t count, int64_t size, float eps, float* out) {
  for (int64_t row = 0; row < count; ++row) rms_norm(x + row * size, weight, size, eps, out + row * size);
}

// x [T, heads, dim], in place; cos and sin [T, dim / 2].
void antiphon_rotate(float* x, const float* cos, const float* sin, int64_t num_tokens, int64_t num_heads, int64_t dim) {
  for (int64_t row = 0; row < num_tokens * num_heads; ++row) {
    const int64_t angles = row / num_heads * (dim / 2);
    rotate_head(x + row * dim, cos + angles, sin + angles, dim / 2);
  }
}

void antiphon_store_kv(Pool* pool, const Cache* cache, const int64_t* slots, const float* k, const float* v,
                       int64_t k_stride, int64_t v_stride, int64_t num_tokens, int64_t num_kv_heads, int64_t head_dim) {
  pool->run_ranges(num_tokens, 64, [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) {
      store_kv(*cache, slots[row], k + row * k_stride, v + row * v_stride, num_kv_heads, head_dim);
    }
  });
}

int32_t antiphon_attend(Pool* pool, const AttentionCall* call, int32_t window) {
  return status_of([&] {
    AttentionScratch scratch(call->shape, pool->size());
    AttentionPlan plan;
    plan.make(call->shape, call->batch, window, pool->size());
    attend(*pool, *call, plan, scratch);
  });
}

}  // extern "C"
