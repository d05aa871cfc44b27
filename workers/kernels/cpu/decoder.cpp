#include "decoder.h"

#include <algorithm>

#include "layer_ops.h"
#include "quantize.h"

namespace antiphon {
namespace {

constexpr int64_t kRowsOfSlack = 64;         // tile registers are loaded whole
constexpr int64_t kFloatsWorthSharing = 12288;  // fewer, and waking a helper takes longer than the work

}  // namespace

void Buffer::reserve(int64_t rows, int64_t width) {
  if (rows <= rows_) return;
  data_.reset();
  rows_ = 0;
  stride_ = round_up<int64_t>(width, 32) + 16;
  data_ = take_zeros<float>(rows * stride_);
  rows_ = rows;
}

Decoder::Decoder(Pool& pool, const Description& description, const Layer* layers)
    : pool_(pool),
      description_(description),
      layers_(layers, layers + description.num_layers),
      shape_{description.num_heads, description.num_kv_heads, description.head_dim},
      scratch_(shape_, pool.size()) {
  std::vector<int32_t> windows;
  for (const Layer& layer : layers_) {
    auto found = std::find(windows.begin(), windows.end(), layer.window);
    plan_of_layer_.push_back(static_cast<int32_t>(found - windows.begin()));
    if (found == windows.end()) windows.push_back(layer.window);
  }
  plans_.resize(windows.size());
}

void Decoder::reserve(int64_t num_tokens) {
  if (num_tokens <= capacity_) return;
  capacity_ = 0;  // until all of it is there
  const Description& d = description_;
  const int64_t rows = num_tokens + kRowsOfSlack, heads = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim;
  residual_.reserve(rows, d.hidden);
  normed_.reserve(rows, d.hidden);
  delta_.reserve(rows, d.hidden);
  qkv_.reserve(rows, heads);
  attended_.reserve(rows, d.num_heads * d.head_dim);
  inner_.reserve(rows, d.inner);
  row_of_thread_.reserve(pool_.size(), d.hidden);
  for (int64_t i = 0; i < d.num_ropes; ++i) {
    cosines_[i].reserve(rows, d.head_dim / 2);
    sines_[i].reserve(rows, d.head_dim / 2);
  }
  const int64_t widest = std::max({d.hidden, d.num_heads * d.head_dim, d.inner});
  operand_stride_ = round_up<int64_t>(widest, 64) + 64;
  numbers_ = take<uint8_t>(2 * rows * operand_stride_);
  scales_ = take<float>(rows);
  if (amx_available()) {
    digits_ = take<bf16>(kMostDigits * rows * operand_stride_);
    inner_digits_ = take<bf16>(kMostDigits * rows * operand_stride_);
  }
  group_sums_stride_ = operand_stride_ / kInt4Group;
  group_sums_ = take<float>(rows * group_sums_stride_);
  unpacked_stride_ = most_unpacked();
  unpacked_ = take<char>(pool_.size() * unpacked_stride_);
  capacity_ = num_tokens;
}

// Of any matrix, for any number of rows.
int64_t Decoder::most_unpacked() const {
  int64_t most = unpacked_size(*description_.head);
  for (const Layer& layer : layers_) {
    for (const Matrix* matrix : {layer.qkv, layer.output, layer.gate_up, layer.down}) {
      most = std::max(most, unpacked_size(*matrix));
    }
  }
  return most;
}

template <typename Body>
void Decoder::for_rows(int64_t num_rows, int64_t row_size, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kFloatsWorthSharing / std::max<int64_t>(row_size, 1));
  pool_.run_ranges(num_rows, grain, [&](int64_t first, int64_t last, int thread) {
    for (int64_t row = first; row < last; ++row) body(row, thread);
  });
}

void Decoder::embed(const Step& step) {
  const Description& d = description_;
  for_rows(step.num_tokens, d.hidden * 4, [&](int64_t row, int) {
    float* out = residual_.row(row);
    const int64_t local = step.token_ids[row] - d.first_token;
    if (local < 0 || local >= d.num_tokens) {
      for (int64_t i = 0; i < d.hidden; ++i) out[i] = 0;
      return;
    }
    unpack_row(*d.embedding, local, out);
    if (d.embedding_scale != 1) {
      for (int64_t i = 0; i < d.hidden; ++i) out[i] *= d.embedding_scale;
    }
  });
}

void Decoder::make_rotations(const Step& step) {
  const Description& d = description_;
  const int64_t half = d.head_dim / 2;
  for (int64_t rope = 0; rope < d.num_ropes; ++rope) {
    const float* frequencies = d.rope_frequencies[rope];
    const float factor = d.rope_factors[rope];
    for_rows(step.num_tokens, half * 16, [&](int64_t row, int) {
      float *cos = cosines_[rope].row(row), *sin = sines_[rope].row(row);
      if (frequencies == nullptr) {
        memcpy(cos, step.cosines[rope] + row * half, half * 4);
        memcpy(sin, step.sines[rope] + row * half, half * 4);
        return;
      }
      const float position = static_cast<float>(step.positions[row]);
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * frequencies[i];
        cos[i] = std::cos(angle) * factor;
        sin[i] = std::sin(angle) * factor;
      }
    });
  }
}

void Decoder::plan_attention(const Step& step) {
  if (shape_.num_heads == 0) return;
  const Batch batch{step.first_queries, step.seq_lens, step.block_tables, step.block_table_stride, step.num_seqs};
  for (size_t plan = 0; plan < plans_.size(); ++plan) {
    const auto layer = std::find(plan_of_layer_.begin(), plan_of_layer_.end(), static_cast<int32_t>(plan));
    plans_[plan].make(shape_, batch, layers_[layer - plan_of_layer_.begin()].window, pool_.size());
  }
}

// The rows as the matrix's format wants them. With a `norm` they are made from the residual first.
Rows Decoder::prepare(const Matrix& matrix, const Buffer& input, int64_t width, int64_t num_rows, const float* norm) {
  Rows rows{};
  rows.values = input.row(0);
  rows.stride = input.stride();
  rows.unpacked = unpacked_.get();
  rows.unpacked_stride = unpacked_stride_;
  const bool in_numbers = wants_numbers(matrix, num_rows);
  if (in_numbers) {
    rows.numbers = numbers_.get();
    rows.numbers_stride = operand_stride_;
    rows.scales = scales_.get();
    rows.group_sums = group_sums_.get();
    rows.group_sums_stride = group_sums_stride_;
  } else {
    rows.digits = {digits_.get(), operand_stride_, num_digits_wanted(matrix, num_rows)};
  }
  const bool as_it_is = !in_numbers && rows.digits.num_digits == 0;
  if (norm == nullptr && as_it_is) return rows;
  for_rows(num_rows, width * (1 + rows.digits.num_digits), [&](int64_t row, int thread) {
    float* values = input.row(row);
    if (norm != nullptr) {
      if (!as_it_is) values = row_of_thread_.row(thread);  // nobody reads it later
      rms_norm(residual_.row(row), norm, width, description_.eps, values);
    }
    if (in_numbers) {
      uint8_t* numbers = numbers_.get() + 2 * row * operand_stride_;
      float* group_sums = group_sums_.get() + row * group_sums_stride_;
      scales_[row] = quantize_for(matrix, values, numbers, numbers + operand_stride_, group_sums);
    } else if (rows.digits.num_digits > 0) {
      rows.digits.put_row(row, values, width, matrix.padded_k);
    }
  });
  return rows;
}

// Norm and rotate the heads where they are, and put keys and values into the cache.
void Decoder::rotate_and_store(const Layer& layer, const Step& step) {
  const int64_t dim = shape_.head_dim, heads = shape_.num_heads, kv_heads = shape_.num_kv_heads;
  const Cache cache{layer.k_cache,      layer.v_cache, layer.block_stride, layer.token_stride, layer.head_stride,
                    static_cast<int32_t>(description_.kv_block_size), description_.kv_format};
  for_rows(step.num_tokens, (heads + 2 * kv_heads) * dim, [&](int64_t row, int) {
    float* head = qkv_.row(row);
    const float *cos = cosines_[layer.rope].row(row), *sin = sines_[layer.rope].row(row);
    for (int64_t h = 0; h < heads + kv_heads; ++h, head += dim) {
      const float* weight = h < heads ? layer.q_norm : layer.k_norm;
      if (weight != nullptr) rms_norm(head, weight, dim, description_.eps, head);
      rotate_head(head, cos, sin, dim / 2);
    }
    store_kv(cache, step.slots[row], head - kv_heads * dim, head, kv_heads, dim);
  });
}

void Decoder::run_layer_attention(const Layer& layer, const Step& step) {
  const int64_t index = &layer - layers_.data();
  AttentionCall call{};
  call.shape = shape_;
  call.batch = {step.first_queries, step.seq_lens, step.block_tables, step.block_table_stride, step.num_seqs};
  call.cache = {layer.k_cache,      layer.v_cache, layer.block_stride, layer.token_stride, layer.head_stride,
                static_cast<int32_t>(description_.kv_block_size), description_.kv_format};
  call.q = qkv_.row(0);
  call.q_stride = qkv_.stride();
  call.out = attended_.row(0);
  call.out_stride = attended_.stride();
  call.scale = description_.attention_scale;
  call.soft_cap = description_.attention_soft_cap;
  call.coarse = layer.qkv->format != Format::kFloat32 && !layer.qkv->exact;
  expect(pool_, *layer.output);
  attend(pool_, call, plans_[plan_of_layer_[index]], scratch_);
}

// residual += product, by way of the other ranks and of a norm where the model has them.
int32_t Decoder::add_product(const Matrix& matrix, const Rows& rows, const float* out_norm, const float* bias,
                             int64_t num_tokens) {
  const int64_t hidden = description_.hidden;
  const bool direct = description_.all_reduce == nullptr && out_norm == nullptr;
  Buffer& target = direct ? residual_ : delta_;
  const Then then = direct ? Then::kAdd : Then::kStore;
  multiply(pool_, matrix, rows, num_tokens, {target.row(0), target.stride(), matrix.padded_columns(), then});
  if (direct) return 0;
  if (description_.all_reduce != nullptr) {
    const int32_t status = description_.all_reduce(description_.group, delta_.row(0), num_tokens * delta_.stride());
    if (status != 0) return status;
  }
  for_rows(num_tokens, hidden, [&](int64_t row, int) {
    float *delta = delta_.row(row), *residual = residual_.row(row);
    if (bias != nullptr) {
      for (int64_t i = 0; i < hidden; ++i) delta[i] += bias[i];
    }
    if (out_norm != nullptr) rms_norm(delta, out_norm, hidden, description_.eps, delta);
    for (int64_t i = 0; i < hidden; ++i) residual[i] += delta[i];
  });
  return 0;
}

// What the layer's last product multiplies. Where that is digits, they are written as they come.
Rows Decoder::run_inner(const Layer& layer, int64_t num_tokens) {
  const Rows rows = prepare(*layer.gate_up, normed_, description_.hidden, num_tokens, layer.mlp_norm);
  const Then activation = static_cast<Then>(description_.activation);
  Output out{inner_.row(0), inner_.stride(), layer.gate_up->padded_columns(), activation};
  const int num_digits = num_digits_wanted(*layer.down, num_tokens);
  expect(pool_, *layer.down);
  if (num_digits == 0) {
    multiply(pool_, *layer.gate_up, rows, num_tokens, out);
    return prepare(*layer.down, inner_, description_.inner, num_tokens);
  }
  out.data = nullptr;
  out.digits = {inner_digits_.get(), operand_stride_, num_digits};
  multiply(pool_, *layer.gate_up, rows, num_tokens, out);
  for (int64_t k = out.columns; k < layer.down->padded_k; k += W) {  // up to whole tiles; NaNs there would spread
    for (int64_t row = 0; row < num_tokens; ++row) out.digits.put(row, k, Vec{});
  }
  Rows inner = rows;
  inner.digits = out.digits;
  return inner;
}

int32_t Decoder::forward(const Step& step) {
  const Description& d = description_;
  const int64_t n = step.num_tokens;
  reserve(n);
  embed(step);
  if (d.all_reduce != nullptr) {
    const int32_t status = d.all_reduce(d.group, residual_.row(0), n * residual_.stride());
    if (status != 0) return status;
  }
  make_rotations(step);
  plan_attention(step);
  for (const Layer& layer : layers_) {
    if (shape_.num_heads > 0) {
      const Rows rows = prepare(*layer.qkv, normed_, d.hidden, n, layer.attention_norm);
      multiply(pool_, *layer.qkv, rows, n, {qkv_.row(0), qkv_.stride(), layer.qkv->padded_columns(), Then::kStore});
      rotate_and_store(layer, step);
      run_layer_attention(layer, step);
    }
    const Rows attended = prepare(*layer.output, attended_, d.num_heads * d.head_dim, n);
    expect(pool_, *layer.gate_up);
    int32_t status = add_product(*layer.output, attended, layer.attention_out_norm, layer.output_bias, n);
    if (status != 0) return status;
    const Rows inner = run_inner(layer, n);
    expect(pool_, &layer == &layers_.back() ? *d.head : *(&layer + 1)->qkv);
    status = add_product(*layer.down, inner, layer.mlp_out_norm, layer.down_bias, n);
    if (status != 0) return status;
  }
  for_rows(n, d.hidden, [&](int64_t row, int) {
    rms_norm(residual_.row(row), d.final_norm, d.hidden, d.eps, step.hidden + row * d.hidden);
  });
  return 0;
}

void Decoder::logits(const float* rows, int64_t stride, int64_t count, float* out, int64_t out_stride) {
  const Description& d = description_;
  reserve(count);
  for (int64_t row = 0; row < count; ++row) memcpy(normed_.row(row), rows + row * stride, d.hidden * 4);
  const Rows prepared = prepare(*d.head, normed_, d.hidden, count);
  const Then then = d.logit_soft_cap > 0 ? Then::kSoftCap : Then::kStore;
  multiply(pool_, *d.head, prepared, count, {out, out_stride, d.head->out_columns, then, d.logit_soft_cap});
}

}  // namespace antiphon
