// Compares the operators' results with the formulas in the next wider type, value by value, within the allowed error.
// Values may be extreme: NaN, infinite, denormal, beyond the range of the arithmetic.
#pragma once

#include <string>

#include "../channels.h"
#include "../check.h"
#include "../rows.h"

namespace nnorm_test {

// The number of values that were compared, and of those for which the arithmetic has no bound.
struct Compared {
  long values = 0, beyond = 0;
};

// Whether long double is wider than double in this process: Valgrind computes it in 64 bits.
inline bool long_double_is_wider() {
  volatile long double one = 1;
  return one + std::numeric_limits<long double>::epsilon() > one;
}

// A double has no reference where long double is not wider than double. Counts such a value and returns true; returns
// false for other values.
template <class T>
bool without_reference(Compared& compared) {
  static const bool lacking = std::is_same_v<T, double> && !long_double_is_wider();
  compared.beyond += lacking;
  return lacking;
}

template <class T>
void compare(const std::string& node, T result, Wider<T> reference, Wider<T> tolerance, Compared& compared) {
  if (without_reference<T>(compared)) return;
  const double value = double(nnorm::widened(result));
  if (std::isnan(reference)) {
    CHECK(std::isnan(value), "%s: NaN becomes %g", node.c_str(), value);
  } else {
    const double most = sizeof(T) == 2 ? (std::is_same_v<T, nnorm::Float16> ? 65504.0 : 3.3e38) : 1e308;
    if (std::fabs(double(reference)) > most * 0.99) return;  // the type may round it to infinity
    const Wider<T> error = std::fabs(Wider<T>(nnorm::widened(result)) - reference);
    CHECK(error <= tolerance + Wider<T>(last_rounding<T>(double(reference))), "%s: %.9g, true %.9g, tolerance %.3g",
          node.c_str(), value, double(reference), double(tolerance));
  }
  ++compared.values;
}

// The result of an element of BatchNormalNorm, with the limits that nnorm/mathematics.h states. Returns false if the
// formula leaves the range of the arithmetic, so that only NaN is certain.
template <class Real>
bool true_element(const ChannelParameters<Real>& p, size_t c, Real x, Real residual, Epilogue epilogue, Wider<Real>& y,
                  Wider<Real>& tolerance) {
  using Wide = Wider<Real>;
  using F = nnorm::Format<Real>;
  const Wide h = Wide(p.scale[c]) * Wide(x) + Wide(p.shift[c]), given = h < 0 ? p.neg[c] : p.pos[c];
  const Wide steps = std::fabs(Wide(p.scale[c]) * Wide(x)) + std::fabs(Wide(p.shift[c]));
  if (std::isfinite(steps) && steps >= Wide(std::numeric_limits<Real>::max()) / 4) return false;
  const Wide weight = p.weight[c], bias = p.bias[c], added = nnorm::epilogues[size_t(epilogue)].takes_residual ? residual : 0;
  const Wide limited = std::copysign(std::fabs(h) > Wide(F::greatest_magnitude) ? Wide(F::greatest_magnitude) : std::fabs(h), h);
  const Wide least = F::least_exponent, size = std::fabs(given);
  const Wide eta = std::copysign(size < least ? least : size, given);
  if (std::isnan(h) || std::isnan(given) || std::isnan(weight) || std::isnan(bias) || std::isnan(added)) {
    y = NAN;
    return true;
  }
  const Wide largest = std::numeric_limits<Real>::max(), smallest = std::numeric_limits<Real>::min();
  const Wide z = eta * std::log2(1 + std::fabs(limited));
  const Wide psi = weight * true_psi(limited, eta), gain = 2 * weight / eta;
  y = true_epilogue(epilogue, psi + bias, added);
  const Wide sizes = std::fabs(psi) + std::fabs(bias) + std::fabs(added) +
                     (std::fabs(h) > Wide(F::greatest_magnitude)
                          ? Wide(0)
                          : std::fabs(weight) * true_slope(h, eta) * steps);
  const Wide unit = std::is_same_v<Real, float> ? Wide(4e-7) : Wide(1e-15);
  tolerance = unit * std::max(Wide(1), std::fabs(eta)) * sizes + 8 * (1 + 2 / std::fabs(eta)) * smallest * (1 + std::fabs(weight));
  return std::isfinite(sizes) && sizes < largest / 4 && std::fabs(gain) < largest && std::fabs(eta) < Wide(1000) &&
         std::fabs(z) < Wide(F::exponent_bias - 3) &&
         (gain == 0 || std::fabs(gain) > smallest * 1e10);
}

// y of BatchNormalNorm and its epilogues; channel_of(i) is the channel of element i.
template <class T, class ChannelOf>
void compare_channels(const std::string& node, const ChannelParameters<Arithmetic<T>>& parameters, ChannelOf channel_of,
                      Epilogue epilogue, const std::vector<T>& x, const std::vector<T>& residual, const std::vector<T>& y,
                      Compared& compared) {
  for (size_t i = 0; i < y.size(); ++i) {
    Wider<T> reference, tolerance = 0;
    const Arithmetic<T> added = residual.empty() ? Arithmetic<T>(0) : nnorm::widened(residual[i]);
    if (true_element(parameters, channel_of(i), nnorm::widened(x[i]), added, epilogue, reference, tolerance))
      compare(node, y[i], reference, tolerance, compared);
    else
      ++compared.beyond;
  }
}

// What is known of a row before its reference results are computed.
struct RowRange {
  bool finite = true;
  double greatest = 0, deviation = 0;  // the deviation including ε, or less
};

template <class T>
RowRange range_of(const Rows<T>& rows, size_t row) {
  const size_t length = rows.geometry.row_length;
  const T* const x = rows.x.data() + row * length;
  RowRange range;
  double spread = 0;
  for (size_t i = 0; i < length; ++i) {
    const double value = double(nnorm::widened(x[i]));
    range.finite &= bool(std::isfinite(value));
    range.greatest = std::max(range.greatest, std::fabs(value));
    spread = std::max(spread, std::fabs(value - double(nnorm::widened(x[0]))));
  }
  range.deviation = std::sqrt(spread * spread / double(length) + rows.epsilon);
  return range;
}

// y of LayerNormalNorm or GroupNormalNorm.
template <class T>
void compare_rows(const std::string& node, const Rows<T>& rows, const std::vector<T>& y, Compared& compared) {
  using Real = Arithmetic<T>;
  const RowGeometry& g = rows.geometry;
  const Wider<T> unit = (sizeof(Real) == 4 ? 1e-6 : 4e-15);
  const double squares_fit = sizeof(Real) == 4 ? 1e17 : 1e150;
  for (size_t row = 0; row < g.rows; ++row) {
    const RowRange range = range_of(rows, row);
    // The arithmetic loses the digits of a mean that is large beside the deviation, and squares beyond its range.
    if (range.finite &&
        (range.greatest > squares_fit || !(range.deviation > 1e-3 * range.greatest) || !(range.deviation > 1e-15))) {
      compared.beyond += long(g.row_length);
      continue;
    }
    ReferenceRow<Wider<T>> reference;
    if (range.finite) reference = reference_row(rows, row);
    const bool lost = range.finite && !(unit * reference.lmbda.condition < 0.01);
    for (size_t i = 0; i < g.row_length; ++i) {
      const size_t at = row * g.row_length + i, w = row % g.period * (g.row_length / g.run) + i / g.run;
      if (!range.finite) {
        compare(node, y[at], Wider<T>(NAN), Wider<T>(0), compared);
        continue;
      }
      const Wider<T> bias = rows.bias[w], psi = reference.y[i] - bias;
      const Wider<T> log = std::log1p(std::fabs(psi) + Wider<T>(g.row_length));  // at least log(1 + |h|)
      const Wider<T> tolerance = unit * (2 * reference.size[i] + 4 * reference.lmbda.condition * std::fabs(psi) * log) +
                                 64 * (1 + log) * Wider<T>(std::numeric_limits<Real>::denorm_min());
      const bool in_range = reference.size[i] < std::numeric_limits<Real>::max() / 4;  // not for NaN
      if (std::isnan(reference.y[i]) || (in_range && !lost && std::fabs(reference.lmbda.lmbda) < 20))
        compare(node, y[at], reference.y[i], tolerance, compared);
      else
        ++compared.beyond;
    }
  }
}

}  // namespace nnorm_test
