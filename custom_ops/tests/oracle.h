// Reference results, computed with the papers' formulas in the next wider type: double for float, long double (64 or
// more bits of mantissa) for double. Their error is less than 1/500 of a unit in the last place of the narrower type.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "nnorm/number_types.h"

namespace nnorm_test {

// Without a wider long double (macOS on AArch64) the tests of the double functions are skipped.
constexpr bool have_reference_for_double = LDBL_MANT_DIG >= 64;

template <class Real>
struct WiderOf;
template <>
struct WiderOf<float> {
  using type = double;
};
template <>
struct WiderOf<double> {
  using type = long double;
};
template <class T>
using Wider = typename WiderOf<nnorm::Arithmetic<T>>::type;

// |value − reference| in units in the last place of Real at `reference`; 0 if both are the same infinity or NaN.
template <class Real>
double in_ulps(Real value, Wider<Real> reference) {
  using Limits = std::numeric_limits<Real>;
  if (std::isnan(reference) || std::isinf(Real(reference)))
    return std::isnan(reference) ? (std::isnan(value) ? 0 : INFINITY) : (Real(reference) == value ? 0 : INFINITY);
  int exponent;
  std::frexp(reference, &exponent);
  const int last_place = std::max(exponent, Limits::min_exponent) - Limits::digits;
  return double(std::ldexp(std::fabs(Wider<Real>(value) - reference), -last_place));
}

// |value − reference| relative to `reference`, or to the smallest normal number if `reference` is smaller.
template <class Real>
double relative_error(Real value, Wider<Real> reference) {
  const Wider<Real> least = std::numeric_limits<Real>::min();
  return double(std::fabs(Wider<Real>(value) - reference) / std::max(std::fabs(reference), least));
}

// ψ with its exponent for h's sign (NN eq. 3).
template <class Wide>
Wide true_psi(Wide h, Wide eta) {
  const Wide log = std::log1p(std::fabs(h));
  return std::copysign(eta == 0 ? log : std::expm1(eta * log) / eta, h);
}

// dψ/dh: the factor by which an error of h is magnified.
template <class Wide>
Wide true_slope(Wide h, Wide eta) {
  return std::exp((eta - 1) * std::log1p(std::fabs(h)));
}

// λ̂ of standardized values (NN eq. 5–15); its divisor L″ + δ; and its condition number: the ratio of the error of λ̂
// to the errors of its terms, relative to their sizes before they cancel.
template <class Wide>
struct TrueLmbda {
  Wide lmbda, damped, condition;
};

template <class Wide>
TrueLmbda<Wide> true_lmbda(const std::vector<Wide>& h, Wide delta) {
  const Wide n = Wide(h.size());
  Wide h_d = 0, s_t = 0, d_mean = 0, size_log = 0, size_h_d = 0, size_d = 0, size_d2 = 0;
  std::vector<Wide> d(h.size()), t(h.size());
  for (size_t i = 0; i < h.size(); ++i) {
    const Wide a = std::fabs(h[i]), grown = (1 + a) * std::log1p(a);
    t[i] = std::log1p(a);
    d[i] = grown - a;
    h_d += h[i] * d[i] / n;
    s_t += std::copysign(t[i], h[i]) / n;
    d_mean += d[i] / n;
    size_log += t[i] / n;
    size_h_d += a * grown / n;
    size_d += grown / n;
    size_d2 += grown * grown / n;
  }
  Wide v2 = 0;
  for (size_t i = 0; i < h.size(); ++i) {
    const Wide a = std::fabs(h[i]);
    v2 += 2 * (a * ((1 + a) * t[i] * t[i] - 2 * d[i]) + (d[i] - d_mean) * (d[i] - d_mean)) / n;
  }
  const Wide v1 = 2 * h_d, damped = v2 / 2 - v1 * v1 / 2 + delta, slope = h_d - s_t, size = std::fabs(damped);
  const Wide condition = 1 + (size_h_d + size_log) / size +
                         std::fabs(slope) * (size_d2 + size_d * size_d + 4 * std::fabs(h_d) * size_h_d) / (size * size);
  return {damped == 0 ? Wide(1) : 1 - slope / damped, damped, condition};
}

// η₊ and η₋ (NN eq. 3 with the exponent shift δ).
template <class Wide>
Wide true_exponent(Wide lmbda, int sign, Wide delta) {
  const Wide eta = sign > 0 ? lmbda : 2 - lmbda;  // 1 + sign·(λ − 1) without its rounding
  return std::fabs(eta) <= delta ? 0 : eta + std::copysign(delta, eta);
}

// Random numbers that are the same on every platform, unlike those of std::normal_distribution and of the C library's
// log() and exp().
class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  double uniform() { return (double(engine_() >> 11) + 0.5) * 0x1p-53; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  double normal() {
    for (;;) {  // Marsaglia's polar method
      const double u = uniform(-1, 1), v = uniform(-1, 1), s = u * u + v * v;
      if (s < 1) return u * std::sqrt(-2 * logarithm(s) / s);
    }
  }
  double sign() { return engine_() & 1 ? 1 : -1; }
  double log_uniform(double low, double high) { return exponential(uniform(logarithm(low), logarithm(high))); }
  size_t below(size_t n) { return size_t(engine_() % n); }
  uint64_t bits() { return engine_(); }

 private:
  static constexpr double ln2 = 0.693147180559945309417232121;

  static double logarithm(double x) {
    int exponent;
    const double mantissa = std::frexp(x, &exponent), r = (mantissa - 1) / (mantissa + 1);
    double sum = 0;
    for (int k = 31; k > 0; k -= 2) sum = sum * (r * r) + 1.0 / k;
    return exponent * ln2 + 2 * (r * sum);
  }
  static double exponential(double x) {
    const double n = std::nearbyint(x / ln2), rest = x - n * ln2;
    double sum = 1;
    for (int k = 18; k > 0; --k) sum = 1 + sum * rest / k;
    return std::ldexp(sum, int(n));
  }

  std::mt19937_64 engine_;
};

// n evenly spaced numbers of [low, high], including both ends.
template <class Real>
std::vector<Real> evenly(double low, double high, size_t n) {
  std::vector<Real> result(n);
  for (size_t i = 0; i < n; ++i) result[i] = Real(low + (high - low) * double(i) / double(n - 1));
  return result;
}

}  // namespace nnorm_test
