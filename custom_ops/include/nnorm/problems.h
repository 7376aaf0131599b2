// The problems that operators give to a device: pointers and sizes, independent of any framework. The output may
// overwrite the input or the residual, element for element. Devices return at once if a problem is empty.
#pragma once

#include <cstddef>

#include "nnorm/epilogues.h"
#include "nnorm/number_types.h"

namespace nnorm {

// BatchNormalNorm: y = epilogue(weight·ψ(scale·x + shift) + bias), frozen exponents, x of [samples, channels, extent].
template <class T>
struct ChannelProblem {
  using Real = Arithmetic<T>;
  static constexpr size_t parameter_count = 6;

  const T* x;
  const T* residual;  // of x's shape, if the epilogue takes one
  T* y;
  // scale, shift, exponent_pos, exponent_neg, weight, bias: [channels] each
  const Real* parameters[parameter_count];
  size_t samples, channels, extent;
  Epilogue epilogue;

  size_t size() const { return samples * channels * extent; }
  bool empty() const { return samples == 0 || channels == 0 || extent == 0; }
};

// LayerNormalNorm, GroupNormalNorm: y = weight·ψ((x − mean)/√(var + ε); λ̂) + bias; mean, var and λ̂ over each row.
template <class T>
struct RowProblem {
  using Real = Arithmetic<T>;

  const T* x;
  T* y;
  const Real* weight;  // [period][row_length/run]
  const Real* bias;
  size_t rows, row_length;
  size_t period;  // rows after which weight and bias repeat
  size_t run;     // neighboring elements that share one weight
  double epsilon, delta;

  bool empty() const { return rows == 0 || row_length == 0; }
};

// F(problem) for every problem type with tensors of T.
#define NNORM_FOR_EACH_PROBLEM(F, T) F(nnorm::ChannelProblem<T>) F(nnorm::RowProblem<T>)

}  // namespace nnorm
