// Problems of LayerNormalNorm and GroupNormalNorm, and their reference results.
#pragma once

#include <type_traits>

#include "buffers.h"
#include "oracle.h"

namespace nnorm_test {

using nnorm::Arithmetic;
using nnorm::RowProblem;

inline const double reference_delta = std::sqrt(1e-5);

struct RowGeometry {
  size_t rows, row_length, period, run;
};

template <class T>
struct Rows {
  RowGeometry geometry;
  std::vector<T> x;
  std::vector<Arithmetic<T>> weight, bias;
  double epsilon = 1e-5, delta = reference_delta;

  Rows(RowGeometry sizes, const std::vector<double>& numbers, Random& random)
      : geometry(sizes), x(to_type<T>(numbers)) {
    for (size_t i = 0; i < sizes.period * (sizes.row_length / sizes.run); ++i) {
      weight.push_back(Arithmetic<T>(random.normal()));
      bias.push_back(Arithmetic<T>(random.normal()));
    }
  }

  RowProblem<T> work(const T* from, T* to) const {
    return {from,         to,      weight.data(), bias.data(), geometry.rows, geometry.row_length, geometry.period,
            geometry.run, epsilon, delta};
  }
};

template <class Wide>
struct ReferenceRow {
  TrueLmbda<Wide> lmbda;
  std::vector<Wide> y, size;  // the result, and the size of the intermediate results that are rounded
};

template <class T>
ReferenceRow<Wider<T>> reference_row(const Rows<T>& problem, size_t row) {
  using Wide = Wider<T>;
  const RowGeometry& g = problem.geometry;
  const T* x = problem.x.data() + row * g.row_length;
  std::vector<Wide> h(g.row_length);
  Wide mean = 0, variance = 0;
  for (size_t i = 0; i < h.size(); ++i) mean += h[i] = nnorm::widened(x[i]);
  mean /= Wide(h.size());
  Wide rest = 0;  // the digits that the sum of a long row with a large mean has lost
  for (const Wide value : h) rest += value - mean;
  mean += rest / Wide(h.size());
  for (const Wide value : h) variance += (value - mean) * (value - mean) / Wide(h.size());
  const Wide deviation = std::sqrt(variance + Wide(problem.epsilon));
  for (Wide& value : h) value = (value - mean) / deviation;
  ReferenceRow<Wide> reference{true_lmbda(h, Wide(problem.delta)), {}, {}};
  for (size_t i = 0; i < h.size(); ++i) {
    const size_t w = row % g.period * (g.row_length / g.run) + i / g.run;
    const Wide weight = problem.weight[w], bias = problem.bias[w];
    const Wide eta = true_exponent(reference.lmbda.lmbda, h[i] < 0 ? -1 : 1, Wide(problem.delta)),
               psi = true_psi(h[i], eta);
    reference.y.push_back(weight * psi + bias);
    // x loses digits when the mean is subtracted, which gives errors of h. dψ/dη ≤ |ψ|·log1p|h| magnifies errors of λ̂.
    reference.size.push_back(std::fabs(weight) * (std::fabs(psi) * (1 + std::log1p(std::fabs(h[i]))) +
                                              true_slope(h[i], eta) * (std::fabs(h[i]) + std::fabs(mean) / deviation)) +
                         std::fabs(bias));
  }
  return reference;
}

// The greatest error of rounding the result to T.
template <class T>
double last_rounding(double value) {
  const bool half = std::is_same_v<T, nnorm::Float16>, brain = std::is_same_v<T, nnorm::BFloat16>;
  return half ? std::fabs(value) * 0x1p-11 + 0x1p-25 : brain ? std::fabs(value) * 0x1p-8 + 0x1p-134 : 0;
}

inline std::vector<double> normal_numbers(size_t n, Random& random) {
  std::vector<double> result(n);
  for (double& value : result) value = 0.7 + 2 * random.normal();
  return result;
}

}  // namespace nnorm_test
