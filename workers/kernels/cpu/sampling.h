// The next token of each row of logits, without sorting the vocabulary: the twin of `workers.sampler`, whose two-stage
// draw and random numbers it shares. Knows neither what made the logits nor what was added to them.
#pragma once

#include <cstdint>
#include <vector>

#include "memory.h"
#include "pool.h"

namespace antiphon {

// Shared with workers/kernels/cpu/library.py field by field.
struct SampleCall {
  const float* logits;  // [R, vocabulary]
  int64_t stride;       // between rows
  int64_t num_greedy, num_drawn;
  const int64_t* greedy;  // rows of logits; null: the first num_greedy
  const int64_t* drawn;   // likewise; of each drawn row:
  const float* temperature;
  const int64_t *seeds, *positions;
  const int64_t* top_k;  // 0: all; null, here and below: nobody asks
  const float* top_p;
  const float* floor;  // the least log weight that min-p keeps, where the likeliest token's is 0
  int64_t* tokens;     // out, at the rows
};

class Sampler {
 public:
  Sampler(Pool& pool, int64_t vocab_size);

  // Each row on a thread of its own. A row with a NaN: greedy gives the first NaN; a draw gives token 0, as it does
  // where every token is minus infinity, and the first of several that are plus infinity.
  void sample(const SampleCall& call);

 private:
  int64_t draw(const SampleCall& call, int64_t index, int64_t row, int thread);

  Pool& pool_;
  const int64_t vocab_size_;
  std::vector<Memory<float>> memory_;  // of each thread
};

}  // namespace antiphon
