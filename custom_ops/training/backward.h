// The backward pass of training. docs/how_it_works.md derives it. With g the gradient of y, means over the n elements of
// the sample set, and Γ = Σ g·weight·∂ψ/∂λ:
//
//   ∂ψ/∂h = (1 + |h|)^(η − 1)          ∂ψ/∂λ = (t·(1 + |h|)^η − |ψ|)/η, 0 in the logarithmic branch
//   ∂h = g·weight·∂ψ/∂h + (Γ/n)·Λ      Λ = n·∂λ̂/∂h, an element's own part
//   ∂x = (∂h − mean ∂h − h·mean(∂h·h))/σ
//
// ∂h is linear in Γ, so one pass finds every sum, and a second pass writes ∂x.
#pragma once

#include "forward.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// z²·S(z) = z·e^z − (e^z − 1), where the difference would cancel: S(z) = Σ z^k/(k!·(k + 2)).
//
// Valid range: |z| ≤ ½
NNORM_INLINE float slope_series(float z) {
  constexpr float c[] = {1.f / 2, 1.f / 3, 1.f / 8, 1.f / 30, 1.f / 144, 1.f / 840, 1.f / 5760, 1.f / 45360};
  float sum = c[7];
  NNORM_UNROLL for (int k = 6; k >= 0; --k) sum = fused(sum, z, c[k]);
  return sum;
}
NNORM_INLINE double slope_series(double z) {
  constexpr double c[] = {1. / 2,      1. / 3,       1. / 8,        1. / 30,        1. / 144,        1. / 840,         1. / 5760,
                          1. / 45360,  1. / 403200,  1. / 3991680,  1. / 43545600,  1. / 518918400,  1. / 6706022400., 1. / 93405312000.};
  double sum = c[13];
  NNORM_UNROLL for (int k = 12; k >= 0; --k) sum = fused(sum, z, c[k]);
  return sum;
}

// What the gradient of an element needs of its set.
template <class Real>
struct Slopes {
  Standardization<Real> standardize;
  RowBranches<Accurate, Real> psi;
  Real inverse_pos, inverse_neg;  // 1/η
  Real lmbda_pos, lmbda_neg;      // 1, or 0 in the logarithmic branch, where η does not depend on λ
  Real by_h_d, by_signed_log, by_curvature, by_d;

  Slopes(const TrainingProblem& problem, const Statistics<Real>& of)
      : standardize(of.standardization()),
        psi(of.branches(problem)),
        inverse_pos(Real(1) / psi.pos.eta),
        inverse_neg(Real(1) / psi.neg.eta),
        by_h_d(of[Statistic::by_h_d]),
        by_signed_log(of[Statistic::by_signed_log]),
        by_curvature(of[Statistic::by_curvature]),
        by_d(of[Statistic::by_d]) {
    const Real lmbda = of[Statistic::lmbda], delta = Real(problem.delta);
    lmbda_pos = delta == 0 || std::fabs(lmbda) > delta ? Real(1) : Real(0);
    lmbda_neg = delta == 0 || std::fabs(Real(2) - lmbda) > delta ? Real(1) : Real(0);
  }
};

// g·weight·∂ψ/∂h and g·weight·∂ψ/∂λ in place of the logarithm's integer and fraction, and Λ. `weight` has one number, or one
// for each element.
template <bool one_weight, class Real>
NNORM_INLINE void gradients_of_tile(const Real* x, const Real* g, const Real* weight, size_t n, const Slopes<Real>& of_set,
                                    Real* integer, Real* fraction, const Real* psi, Real* own) {
  constexpr Real ln2 = Real(0.693147180559945309417232121);
  const Slopes<Real> s = of_set;
  const Real eta_pos = s.psi.pos.eta, eta_neg = s.psi.neg.eta, first_weight = weight[0];
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const Real h = s.standardize(x[i]), u = std::fabs(h), t = (integer[i] + fraction[i]) * ln2;
    const bool negative = h < Real(0);
    const Real eta = negative ? eta_neg : eta_pos, inverse_eta = negative ? s.inverse_neg : s.inverse_pos;
    const Real sign = negative ? Real(-1) : Real(1), size = std::fabs(psi[i]), z = eta * t;
    const Real inverse = Real(1) / (Real(1) + u), power = fused(eta, size, Real(1));  // power = (1 + |h|)^η
    const Real apart = fused(t, power, -size) * inverse_eta, near = t * t * slope_series(z);
    const Real by_lmbda = (std::fabs(z) <= Real(0.5) ? near : apart) * (negative ? s.lmbda_neg : s.lmbda_pos);
    const Real d = fused(u, t, t) - u, ut = u * t, of_psi = g[i] * (one_weight ? first_weight : weight[i]);
    const Real curvature = fused(ut, t, fused(fused(u, t, t), t, Real(2) * d * (t - Real(1))));
    integer[i] = power * inverse * of_psi;
    fraction[i] = by_lmbda * of_psi;
    own[i] = fused(s.by_h_d, d + ut,
                   fused(s.by_signed_log, inverse, sign * fused(s.by_curvature, curvature, s.by_d * t)));
  }
}

// Σ g·weight·∂ψ/∂λ, and the sums of g·weight·∂ψ/∂h and of Λ, alone and times h.
template <class Real>
struct GradientSums {
  double lmbda = 0, direct = 0, direct_h = 0, own = 0, own_h = 0;

  // `by_h` holds g·weight·∂ψ/∂h, and `by_lmbda` g·weight·∂ψ/∂λ.
  NNORM_INLINE void add(const Real* x, size_t n, const Standardization<Real>& standardize, const Real* by_h,
                        const Real* by_lmbda, const Real* own_part) {
    const Standardization<Real> standardized = standardize;
    Real a = 0, b = 0, c = 0, d = 0, e = 0;
#pragma omp simd reduction(+ : a, b, c, d, e)
    for (size_t i = 0; i < n; ++i) {
      const Real h = standardized(x[i]);
      a += by_lmbda[i];
      b += by_h[i];
      c += by_h[i] * h;
      d += own_part[i];
      e += own_part[i] * h;
    }
    lmbda += double(a);
    direct += double(b);
    direct_h += double(c);
    own += double(d);
    own_h += double(e);
  }
};

// Adds the gradients of the weights: g·(y before the affine map) and g, summed over a run of one weight.
template <bool one_weight, class Real>
NNORM_INLINE void add_to_weights(const Real* g, const Real* psi, const Real* noise, Real scale, size_t n, Real* weight,
                                 Real* bias) {
  if (one_weight) {
    Real of_weight = 0, of_bias = 0;
#pragma omp simd reduction(+ : of_weight, of_bias)
    for (size_t i = 0; i < n; ++i) {
      of_weight += g[i] * fused(noise[i], scale, psi[i]);
      of_bias += g[i];
    }
    weight[0] += of_weight;
    bias[0] += of_bias;
    return;
  }
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    weight[i] = fused(g[i], fused(noise[i], scale, psi[i]), weight[i]);
    bias[i] += g[i];
  }
}

template <class Real>
void backward_of_set(const SampleSet<Real>& set, uint64_t part, TrainingBuffers<Real>& buffers) {
  const TrainingProblem& problem = set.problem;
  const Statistics<Real> statistics(problem, set.number);
  const Slopes<Real> slopes(problem, statistics);
  const Standardization<Real> standardize = statistics.standardization();

  // ψ of a tile, its gradients and Λ.
  const auto compute_tile = [&](size_t at, size_t n, const Real* x, const Real* g) NNORM_INLINED {
    Real *by_h = buffers.first + set.place(at), *by_lmbda = buffers.second, *own = buffers.third + set.place(at);
    const Real one = 1, zero = 0;
    logarithms(x, n, standardize, by_h, by_lmbda);
    powers<true>(x, buffers.psi, n, standardize, by_h, by_lmbda, slopes.psi.pos, slopes.psi.neg, &one, &zero);
    const Real* weight = set.weights(at, n, buffers.weight);
    if (set.has_one_weight(at, n))
      gradients_of_tile<true>(x, g, weight, n, slopes, by_h, by_lmbda, buffers.psi, own);
    else
      gradients_of_tile<false>(x, g, weight, n, slopes, by_h, by_lmbda, buffers.psi, own);
  };

  const size_t of_part = problem.shares_weights() ? size_t(part * problem.weights()) : 0;
  Real* const gradient_weight = static_cast<Real*>(problem.gradient_weight) + of_part;
  Real* const gradient_bias = static_cast<Real*>(problem.gradient_bias) + of_part;
  const Real scale = problem.noise != 0 ? Real(problem.noise) * statistics[Statistic::deviation] : Real(0);
  const Real* noise = problem.noise != 0 ? buffers.noise : zeros<Real>.of_tile;
  GradientSums<Real> sums;
  set.for_each_tile([&](size_t at, size_t n) {
    const Real* x = set.read(problem.x, at, n, buffers.x + set.place(at));
    const Real* g = set.read(problem.gradient, at, n, buffers.gradient);
    compute_tile(at, n, x, g);
    if (problem.noise != 0) noise_of_tile(problem.seed, set.number, at, n, buffers.noise);
    set.for_each_weight(at, n, [&](size_t i, size_t size, size_t number) {
      Real *of_weight = gradient_weight + number, *of_bias = gradient_bias + number;
      if (problem.run == 1)
        add_to_weights<false>(g + i, buffers.psi + i, noise + i, scale, size, of_weight, of_bias);
      else
        add_to_weights<true>(g + i, buffers.psi + i, noise + i, scale, size, of_weight, of_bias);
    });
    sums.add(x, n, standardize, buffers.first + set.place(at), buffers.second, buffers.third + set.place(at));
  });

  const double length = double(set.length), share = sums.lmbda / length;
  const Real mean = problem.standardizes ? Real((sums.direct + share * sums.own) / length) : Real(0);
  const Real mean_h = problem.standardizes ? Real((sums.direct_h + share * sums.own_h) / length) : Real(0);
  set.for_each_tile([&](size_t at, size_t n) {
    const Real* x = set.read_again(problem.x, at, n, buffers.x + set.place(at));
    if (!set.is_kept) compute_tile(at, n, x, set.read(problem.gradient, at, n, buffers.gradient));
    const Real *by_h = buffers.first + set.place(at), *own = buffers.third + set.place(at);
    Real* target = set.target(problem.gradient_x, at, n, buffers.y);
    const Standardization<Real> standardized = standardize;
    const Real of_own = Real(share), inverse = standardize.inverse, mean_of = mean, mean_h_of = mean_h;
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
      const Real of_h = fused(of_own, own[i], by_h[i]);
      target[i] = (of_h - fused(standardized(x[i]), mean_h_of, mean_of)) * inverse;
    }
    set.write(problem.gradient_x, at, n, buffers.y);
  });
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
