// The problem that PyTorch's training layers give to the CPU: pointers and sizes, laid out as C does, because Python
// fills it (nnorm_export/layers/fused/library.py).
//
// A sample set is what has one mean, variance and λ̂: a channel over the batch, or a row. Element e of set s is at
//
//   s·set_stride + (e / segment_length)·segment_stride + (e mod segment_length)·element_stride
//
// and has the weight (s mod period)·(length / run) + e / run, where length = segments·segment_length. An element_stride other
// than 1 means sets that lie side by side: set_stride and segments are 1.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nnorm/mathematics.h"

namespace nnorm {

// What the forward pass keeps of each set for the backward pass, one array of [sets] each, in this order.
enum class Statistic {
  mean,        // rounded
  inverse,     // 1/√(variance + ε)
  correction,  // h = (x − mean)·inverse + correction
  exact_mean,
  variance,   // biased
  lmbda,      // λ̂
  deviation,  // s̄ = mean|ψ(h) − mean ψ(h)|
  // ∂λ̂ by the means of h·d, s·t, |h|·(a·t − 2d) + d² and d (mathematics.py: newton_step)
  by_h_d,
  by_signed_log,
  by_curvature,
  by_d,
  count
};

// Calls work(data) in each thread of a team at once; `threads` of 0 is all of them. GOMP_parallel of OpenMP.
using Team = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

struct TrainingProblem {
  const void* x;
  const void* weight;  // null for 1
  const void* bias;    // null for 0
  void* y;
  void* statistics;  // [Statistic::count][sets]
  // The backward pass alone.
  const void* gradient;  // of y
  void* gradient_x;
  void* gradient_weight;  // [parts][weights], or [weights] if each set has its own weights
  void* gradient_bias;    // the same

  Team team;  // computes the parts; null for the calling thread alone

  uint64_t sets, segments, segment_length;
  uint64_t set_stride, segment_stride, element_stride;
  uint64_t period, run;
  uint64_t parts;  // the sets are divided into parts, which threads may compute at the same time

  uint64_t seed;  // of the noise

  double epsilon, delta, alpha;
  double least_lmbda, greatest_lmbda;  // the range of λ̂, if there is one
  double noise;                        // ξ; 0 for none
  int32_t order;                       // 1 or 2
  int32_t standardizes;                // 0: h = x
  int32_t has_range;
  int32_t computes_deviation;

  NNORM_INLINE uint64_t length() const { return segments * segment_length; }
  NNORM_INLINE uint64_t weights() const { return period * (length() / run); }
  NNORM_INLINE bool shares_weights() const { return sets > period; }
};

}  // namespace nnorm
