// The C functions that Python calls. No exception crosses this border: what can fail returns null.
#include <new>

#include "all_reduce.h"
#include "decoder.h"
#include "layer_ops.h"
#include "quantize.h"
#include "sampling.h"

using namespace antiphon;

namespace {

template <typename Make>
auto guarded(const Make& make) -> decltype(make()) {
  try {
    return make();
  } catch (...) {
    return nullptr;
  }
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

Matrix* antiphon_matrix_pack(Pool* pool, int32_t format, int32_t gated, int32_t exact, const float* source, int64_t n,
                             int64_t k, int64_t stride, const float* bias) {
  return guarded([&] { return pack(*pool, static_cast<Format>(format), gated, exact, source, n, k, stride, bias); });
}

void antiphon_matrix_release(Matrix* matrix) { release(matrix); }

int64_t antiphon_matrix_bytes(const Matrix* matrix) { return matrix->bytes; }

void antiphon_matrix_row(const Matrix* matrix, int64_t row, float* out) { unpack_row(*matrix, row, out); }

Decoder* antiphon_decoder_create(Pool* pool, const Description* description, const Layer* layers) {
  return guarded([&] { return new Decoder(*pool, *description, layers); });
}

void antiphon_decoder_destroy(Decoder* decoder) { delete decoder; }

void antiphon_decoder_reserve(Decoder* decoder, int64_t num_tokens) { decoder->reserve(num_tokens); }

int32_t antiphon_decoder_forward(Decoder* decoder, const Step* step) { return decoder->forward(*step); }

void antiphon_decoder_logits(Decoder* decoder, const float* rows, int64_t stride, int64_t count, float* out,
                             int64_t out_stride) {
  decoder->logits(rows, stride, count, out, out_stride);
}

Sampler* antiphon_sampler_create(Pool* pool, int64_t vocab_size) {
  return guarded([&] { return new Sampler(*pool, vocab_size); });
}

void antiphon_sampler_destroy(Sampler* sampler) { delete sampler; }

void antiphon_sampler_sample(Sampler* sampler, const SampleCall* call) { sampler->sample(*call); }

// One product, for tests and measurements: x [m, k] and out [m, columns] dense.
void antiphon_linear(Pool* pool, const Matrix* matrix, const float* x, int64_t m, int32_t then, float soft_cap,
                     float* out) {
  Buffer padded;
  padded.reserve(m + 64, matrix->k);
  for (int64_t row = 0; row < m; ++row) memcpy(padded.row(row), x + row * matrix->k, matrix->k * 4);
  Rows rows{};
  rows.values = padded.row(0);
  rows.stride = padded.stride();
  const int64_t stride = matrix->padded_k + 64;
  std::vector<uint8_t> numbers(2 * (m + 64) * stride);
  std::vector<float> scales(m + 64);
  rows.num_digits = num_digits_wanted(*matrix, m);
  std::vector<bf16> digits(rows.num_digits * (m + 64) * stride);
  for (int64_t row = 0; row < m; ++row) {
    uint8_t* high = numbers.data() + 2 * row * stride;
    scales[row] = quantize_row(padded.row(row), matrix->k, matrix->padded_k, high, high + stride);
    bf16* first = digits.data() + rows.num_digits * row * stride;
    split_row(padded.row(row), matrix->k, matrix->padded_k, rows.num_digits, first, stride);
  }
  rows.numbers = numbers.data();
  rows.scales = scales.data();
  rows.digits = digits.data();
  rows.numbers_stride = rows.digits_stride = stride;
  multiply(*pool, *matrix, rows, m, {out, matrix->out_columns, matrix->out_columns, static_cast<Then>(then), soft_cap});
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

// Attention of one layer with memory of its own, for the attention backend.
void antiphon_attend(Pool* pool, const AttentionCall* call, int32_t window) {
  AttentionScratch scratch(call->shape, pool->size());
  AttentionPlan plan;
  plan.make(call->shape, call->batch, window, pool->size());
  attend(*pool, *call, plan, scratch);
}

}  // extern "C"
