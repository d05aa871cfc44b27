// A dense decoder's step: embedding, layers, final norm; and the output head. One code path serves every model: which
// weights a layer has and a few numbers say what it is. Knows neither names of architectures nor files.
//
// The structures are shared with workers/kernels/cpu/library.py field by field.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "memory.h"

namespace antiphon {

// Sums `count` floats over the ranks of `group`, in place; anything but 0 ends the step.
using AllReduce = int32_t (*)(void* group, float* data, int64_t count);

struct Description {
  int64_t num_layers, hidden, inner;             // inner: of this rank
  int64_t num_heads, num_kv_heads, head_dim;     // of this rank
  int64_t first_token, num_tokens;               // the part of the vocabulary that this rank embeds
  int64_t num_ropes;
  int64_t kv_block_size;
  KvFormat kv_format;
  int32_t activation;  // Then::kSiluTimesUp or kGeluTimesUp
  float eps, attention_scale, attention_soft_cap, logit_soft_cap, embedding_scale;  // caps 0: none
  float rope_factors[2];                // cosines and sines are multiplied by it
  const float* rope_frequencies[2];     // [head_dim / 2]; null: the caller brings the rotation with each step
  const Matrix* embedding;              // the head's matrix may serve as both
  const Matrix* head;
  const float* final_norm;
  AllReduce all_reduce;  // null: one rank
  void* group;           // what it is called with
};

// Norm weights as they are multiplied with; null where a model has none.
struct Layer {
  const Matrix *qkv, *output, *gate_up, *down;  // with more than one rank, output and down carry no bias
  const float *attention_norm, *mlp_norm;            // before
  const float *attention_out_norm, *mlp_out_norm;    // after, before the residual is added
  const float *q_norm, *k_norm;
  const float *output_bias, *down_bias;  // [hidden], added once, after the sum over the ranks
  void *k_cache, *v_cache;
  int64_t block_stride, token_stride, head_stride;
  int32_t window;  // 0: none
  int32_t rope;
};

struct Step {
  int64_t num_tokens, num_seqs, block_table_stride;
  const int64_t *token_ids, *positions, *slots;  // [T]
  const int32_t *first_queries, *seq_lens, *block_tables;
  const float* cosines[2];  // [T, head_dim / 2] of each rope without frequencies
  const float* sines[2];
  float* hidden;  // out [T, hidden], after the final norm
};

// Zeroed rows, `stride` floats apart: a multiple of kPanel and a little more, so that rows do not share cache sets.
class Buffer {
 public:
  void reserve(int64_t rows, int64_t width);
  float* row(int64_t i) const { return data_.get() + i * stride_; }
  int64_t stride() const { return stride_; }

 private:
  Memory<float> data_;
  int64_t rows_ = 0, stride_ = 0;
};

class Decoder {
 public:
  Decoder(Pool& pool, const Description& description, const Layer* layers);

  // Memory for steps of so many tokens; a larger step takes more when it comes. Throws std::bad_alloc, as do the two
  // below.
  void reserve(int64_t num_tokens);
  int32_t forward(const Step& step);
  // rows [count, hidden], `stride` apart -> logits [count, this rank's part of the vocabulary].
  void logits(const float* rows, int64_t stride, int64_t count, float* out, int64_t out_stride);
  int64_t hidden() const { return description_.hidden; }

 private:
  int64_t most_unpacked() const;
  void embed(const Step& step);
  void make_rotations(const Step& step);
  void plan_attention(const Step& step);
  void run_layer_attention(const Layer& layer, const Step& step);
  void rotate_and_store(const Layer& layer, const Step& step);
  int32_t add_product(const Matrix& matrix, const Rows& rows, const float* out_norm, const float* bias,
                      int64_t num_tokens);
  Rows run_inner(const Layer& layer, int64_t num_tokens);
  Rows prepare(const Matrix& matrix, const Buffer& input, int64_t width, int64_t num_rows,
               const float* norm = nullptr);
  template <typename Body>
  void for_rows(int64_t num_rows, int64_t row_size, const Body& body);

  Pool& pool_;
  const Description description_;
  std::vector<Layer> layers_;
  AttentionShape shape_;
  AttentionScratch scratch_;
  std::vector<AttentionPlan> plans_;      // one per distinct window
  std::vector<int32_t> plan_of_layer_;
  int64_t capacity_ = 0;
  Buffer residual_, normed_, qkv_, attended_, inner_, delta_, cosines_[2], sines_[2];
  Buffer row_of_thread_;
  Memory<uint8_t> numbers_;  // of all of this a step touches what its matrices ask for
  Memory<float> scales_, group_sums_;
  Memory<bf16> digits_, inner_digits_;
  Memory<char> unpacked_;
  int64_t operand_stride_ = 0, group_sums_stride_ = 0, unpacked_stride_ = 0;
};

}  // namespace antiphon
