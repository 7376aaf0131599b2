// What an operator asks of a device: pointers and sizes, free of any framework. Output may be input (or the residual),
// element for element.
#pragma once

#include <cstddef>

#include "nnorm/number_types.h"

namespace nnorm {

// What may follow a normalization in the same pass: y, max(y, 0) or max(y + residual, 0).
enum class Epilogue { none, relu, add_relu };

// y = epilogue(weight·ψ(scale·x + shift) + bias), frozen exponents (BatchNormalNorm), x of [samples, channels, extent].
template <class T>
struct ChannelProblem {
  static constexpr size_t parameter_count = 6;

  const T* x;
  const T* residual;  // of x's shape, for Epilogue::add_relu
  T* y;
  // scale, shift, exponent_pos, exponent_neg, weight, bias: [channels] each
  const Arithmetic<T>* parameters[parameter_count];
  size_t samples, channels, extent;
  Epilogue epilogue;

  size_t size() const { return samples * channels * extent; }
};

// y = weight·ψ((x − mean)/√(var + ε); λ̂) + bias, mean, var and λ̂ over each row (LayerNormalNorm, GroupNormalNorm).
template <class T>
struct RowProblem {
  const T* x;
  T* y;
  const Arithmetic<T>* weight;  // [period][row_length/run]
  const Arithmetic<T>* bias;
  size_t rows, row_length;
  size_t period;  // rows after which weight and bias repeat
  size_t run;     // neighbouring elements that share one weight
  double epsilon, delta;
};

}  // namespace nnorm
