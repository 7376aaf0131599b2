// Rows of 16-bit numbers for which the quick formulas of half_mathematics.h suffice, and others.
#pragma once

#include "check.h"
#include "nnorm/half_mathematics.h"
#include "rows.h"

namespace nnorm_test {

// The shape of a row of 16-bit numbers. For each but the last, a formula of half_mathematics.h does not suffice.
enum class Shape { far_mean, outlier, skewed, small, far_two_values, ordinary, count };

inline double draw(Shape shape, bool first, Random& random) {
  switch (shape) {
    case Shape::far_mean: return 30 + random.normal();
    case Shape::outlier: return first ? 50 : random.normal();
    case Shape::skewed: return -std::log(random.uniform());
    case Shape::small: return 1e-3 * random.normal();  // ε exceeds the variance
    case Shape::far_two_values: return 1000 + 8 * random.sign();
    default: return random.normal();
  }
}

// How many elements are in rows for which a formula of half_mathematics.h suffices, and in others.
struct Decisions {
  long one_pass[2] = {}, quick_lmbda[2] = {}, quick_psi[2] = {};

  template <class T>
  void add(const Rows<T>& rows, size_t row, double lmbda) {
    const size_t n = rows.geometry.row_length;
    double sums[2] = {};
    for (size_t i = 0; i < n; ++i) {
      const double value = double(nnorm::widened(rows.x[row * n + i]));
      sums[0] += value / double(n), sums[1] += value * value / double(n);
    }
    const double variance = sums[1] - sums[0] * sums[0];
    const nnorm::OnePass pass{float(sums[0]), float(variance)};
    one_pass[pass.suffices(float(rows.epsilon))] += long(n);
    quick_lmbda[nnorm::QuickLmbda::suffices(float(variance / (variance + rows.epsilon)))] += long(n);
    quick_psi[nnorm::QuickPsi::suffices(nnorm::resolve_exponents(float(lmbda), float(rows.delta)))] += long(n);
  }
  void check(const char* type) const {
    for (const auto& [name, counts] :
         {std::pair{"one pass", one_pass}, {"quick lambda", quick_lmbda}, {"quick psi", quick_psi}}) {
      std::printf("%s, %s: %ld elements without, %ld with\n", type, name, counts[0], counts[1]);
      CHECK(counts[0] >= 10000 && counts[1] >= 10000, "%s, %s: %ld elements without, %ld with", type, name, counts[0],
            counts[1]);
    }
  }
};
}  // namespace nnorm_test
