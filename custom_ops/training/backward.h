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

// Σ g·weight·∂ψ/∂λ, and the sums of g·weight·∂ψ/∂h and of Λ, alone and times h.
struct GradientSums {
  double lmbda = 0, direct = 0, direct_h = 0, own = 0, own_h = 0;
};

// A tile in the backward pass.
template <class Real>
struct GradientTile {
  const Real *x, *gradient, *psi, *noise;  // a null noise is 0
  Real *by_h, *fraction, *own;             // by_h holds the integer of the logarithm before g·weight·∂ψ/∂h
};

// The weights of a tile whose layer has none.
template <class Real>
struct Ones {
  Real of_tile[row_tile];
  constexpr Ones() : of_tile() {
    for (Real& one : of_tile) one = Real(1);
  }
};
template <class Real>
inline constexpr Ones<Real> ones{};

enum class Needs { all, slopes };  // slopes: the sums are known already

// g·weight·∂ψ/∂h and Λ of the elements first, …, end − 1 of a tile, which have one weight or each their own, and what they
// add to the sums and to the gradients of the weights: g·(y before the affine map) and g.
template <bool one_weight, Needs needs, class Real>
NNORM_INLINE void gradients_of_run(const GradientTile<Real>& tile, size_t first, size_t end, const Slopes<Real>& of_set,
                                   Real scale, const Real* weight, Real* gradient_weight, Real* gradient_bias,
                                   GradientSums& sums) {
  constexpr Real ln2 = Real(0.693147180559945309417232121);
  const Slopes<Real> s = of_set;
  const Real eta_pos = s.psi.pos.eta, eta_neg = s.psi.neg.eta;
  const Real *x = tile.x + first, *g = tile.gradient + first, *psi = tile.psi + first;
  const Real* noise = tile.noise != nullptr ? tile.noise + first : psi;  // times 0
  Real *by_h = tile.by_h + first, *own = tile.own + first;
  const Real* fraction = tile.fraction + first;
  if (weight == nullptr) weight = ones<Real>.of_tile;
  const Real first_weight = weight[0];
  Real lmbda = 0, direct = 0, direct_h = 0, of_own = 0, own_h = 0, of_weight = 0, of_bias = 0;
#pragma omp simd reduction(+ : lmbda, direct, direct_h, of_own, own_h, of_weight, of_bias)
  for (size_t i = 0; i < end - first; ++i) {
    const Real h = s.standardize(x[i]), u = std::fabs(h), t = (by_h[i] + fraction[i]) * ln2;
    const bool negative = h < Real(0);
    const Real eta = negative ? eta_neg : eta_pos, inverse_eta = negative ? s.inverse_neg : s.inverse_pos;
    const Real sign = negative ? Real(-1) : Real(1), size = std::fabs(psi[i]), z = eta * t;
    const Real inverse = Real(1) / (Real(1) + u), power = fused(eta, size, Real(1));  // power = (1 + |h|)^η
    const Real apart = fused(t, power, -size) * inverse_eta, near = t * t * slope_series(z);
    const Real by_lmbda = (std::fabs(z) <= Real(0.5) ? near : apart) * (negative ? s.lmbda_neg : s.lmbda_pos);
    const Real d = fused(u, t, t) - u, ut = u * t;
    const Real curvature = fused(ut, t, fused(fused(u, t, t), t, Real(2) * d * (t - Real(1))));
    const Real own_part =
        fused(s.by_h_d, d + ut, fused(s.by_signed_log, inverse, sign * fused(s.by_curvature, curvature, s.by_d * t)));
    const Real of_psi = g[i] * (one_weight ? first_weight : weight[i]), of_h = of_psi * (power * inverse);
    by_h[i] = of_h;
    own[i] = own_part;
    if (needs == Needs::slopes) continue;
    lmbda += of_psi * by_lmbda;
    direct += of_h;
    direct_h += of_h * h;
    of_own += own_part;
    own_h += own_part * h;
    const Real before_affine = fused(noise[i], scale, psi[i]);
    if (one_weight) {
      of_weight += g[i] * before_affine;
      of_bias += g[i];
    } else {
      gradient_weight[i] = fused(g[i], before_affine, gradient_weight[i]);
      gradient_bias[i] += g[i];
    }
  }
  if (needs == Needs::slopes) return;
  sums.lmbda += double(lmbda);
  sums.direct += double(direct);
  sums.direct_h += double(direct_h);
  sums.own += double(of_own);
  sums.own_h += double(own_h);
  if (!one_weight) return;
  gradient_weight[0] += of_weight;
  gradient_bias[0] += of_bias;
}

template <class Real>
void backward_of_set(const SampleSet<Real>& set, uint64_t part, TrainingBuffers<Real>& buffers) {
  const TrainingProblem& problem = set.problem;
  const Statistics<Real> statistics(problem, set.number);
  const Slopes<Real> slopes(problem, statistics);
  const size_t of_part = problem.shares_weights() ? size_t(part * problem.weights()) : 0;
  Real* const gradient_weight = static_cast<Real*>(problem.gradient_weight) + of_part;
  Real* const gradient_bias = static_cast<Real*>(problem.gradient_bias) + of_part;
  const Real scale = Real(problem.noise) * statistics[Statistic::deviation];

  GradientSums sums;
  const auto compute_tile = [&](size_t at, size_t n, auto needs) NNORM_INLINED {
    GradientTile<Real> tile{set.read(problem.x, at, n, buffers.x + set.place(at)),
                            set.read(problem.gradient, at, n, buffers.gradient),
                            buffers.psi,
                            nullptr,
                            buffers.first + set.place(at),
                            buffers.second,
                            buffers.third + set.place(at)};
    const Real one = 1, zero = 0;
    logarithms(tile.x, n, slopes.standardize, tile.by_h, tile.fraction);
    powers<true>(tile.x, buffers.psi, n, slopes.standardize, tile.by_h, tile.fraction, slopes.psi.pos, slopes.psi.neg, &one,
                 &zero);
    if (needs() == Needs::all && problem.noise != 0) {
      noise_of_tile(problem.seed, set.number, at, n, buffers.noise);
      tile.noise = buffers.noise;
    }
    set.for_each_weight(at, n, [&](size_t i, size_t size, size_t number) NNORM_INLINED {
      const Real* weight = problem.weight != nullptr ? static_cast<const Real*>(problem.weight) + number : nullptr;
      Real *of_weight = gradient_weight + number, *of_bias = gradient_bias + number;
      if (problem.run == 1)
        gradients_of_run<false, needs()>(tile, i, i + size, slopes, scale, weight, of_weight, of_bias, sums);
      else
        gradients_of_run<true, needs()>(tile, i, i + size, slopes, scale, weight, of_weight, of_bias, sums);
    });
    return tile.x;
  };
  set.for_each_tile([&](size_t at, size_t n) { compute_tile(at, n, std::integral_constant<Needs, Needs::all>()); });

  const double length = double(set.length), share = sums.lmbda / length;
  const Real mean = problem.standardizes ? Real((sums.direct + share * sums.own) / length) : Real(0);
  const Real mean_h = problem.standardizes ? Real((sums.direct_h + share * sums.own_h) / length) : Real(0);
  set.for_each_tile([&](size_t at, size_t n) {
    const Real* x = set.is_kept ? set.read_again(problem.x, at, n, buffers.x + set.place(at))
                                : compute_tile(at, n, std::integral_constant<Needs, Needs::slopes>());
    const Real *by_h = buffers.first + set.place(at), *own = buffers.third + set.place(at);
    Real* target = set.target(problem.gradient_x, at, n, buffers.y);
    const Standardization<Real> standardized = slopes.standardize;
    const Real of_own = Real(share), inverse = standardized.inverse, mean_of = mean, mean_h_of = mean_h;
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
