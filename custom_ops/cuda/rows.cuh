// What the kernels for rows share: their work, and how weight and bias of an element are found.
#pragma once

#include "launch.cuh"
#include "tiles.cuh"

namespace nnorm::cuda {

template <class T>
struct Rows {
  using Real = Arithmetic<T>;

  const T* x;
  T* y;
  const Real* weight;
  const Real* bias;
  size_t rows, period;
  unsigned row_length;
  unsigned run;         // neighboring elements that share one weight
  Divisor run_divisor;  // by `run`
  bool whole_weights;   // run is 1, and weight and bias can be read with the accesses of x
  bool one_weight_for_access;  // `run` is a multiple of an access, and rows consist of whole accesses
  Real epsilon, delta;
  Real length, inverse_length;
  Real bounded_exponent;  // see the function bounded_exponent()
};

// Loads `count` neighboring numbers with accesses of at most 16 bytes.
template <int count, class Real>
NNORM_DEVICE void load_all(const Real* from, Real (&to)[count]) {
  constexpr int width = count < widest<Real> ? count : widest<Real>;
#pragma unroll
  for (int i = 0; i < count; i += width) {
    const Access<Real, width> access = load<width>(from + i);
    for (int j = 0; j < width; ++j) to[i + j] = access.values[j];
  }
}

// How weight and bias of an access are found: side by side (w.whole_weights), by the run of each element, or of the
// access as a whole if w.one_weight_for_access.
enum class Weights { neighbors, by_element, by_access };

// Loads weight and bias of `count` elements, from element start + offset of a row.
template <Weights weights, int width, class T>
NNORM_DEVICE void load_affine(const Rows<T>& w, size_t weights_of_row, unsigned start, unsigned offset, unsigned count,
                              Arithmetic<T> (&weight)[width], Arithmetic<T> (&bias)[width]) {
  if constexpr (weights == Weights::neighbors) {
    load_all(w.weight + (weights_of_row + start) + offset, weight);
    load_all(w.bias + (weights_of_row + start) + offset, bias);
  } else if (weights == Weights::by_access && w.one_weight_for_access) {
    const size_t i = weights_of_row + w.run_divisor.divide(start + offset);
    const Arithmetic<T> its_weight = w.weight[i], its_bias = w.bias[i];
#pragma unroll
    for (int j = 0; j < width; ++j) weight[j] = its_weight, bias[j] = its_bias;
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if (unsigned(j) >= count) continue;
      const size_t i = weights_of_row + w.run_divisor.divide(start + offset + unsigned(j));
      weight[j] = w.weight[i];
      bias[j] = w.bias[i];
    }
  }
}

template <class T>
using Psi = RowBranches<Evaluation<T>, Arithmetic<T>>;

// Whether the elements of a row need no clamp; tested once for each row.
template <class T>
NNORM_DEVICE bool is_bounded(const Psi<T>& psi, Arithmetic<T> bounded_exponent) {
  return std::fabs(psi.pos.eta) <= bounded_exponent && std::fabs(psi.neg.eta) <= bounded_exponent;
}

template <int number>
using Turn = std::integral_constant<int, number>;

}  // namespace nnorm::cuda
