// The forward pass of training: y = (ψ(h; λ̂) + z·ξ·s̄)·weight + bias with the statistics of each sample set (NN eq. 2, 3,
// 5–15). The sums of mean, variance and λ̂ are those of LayerNormalNorm's inference, in the same order.
#pragma once

#include "../cpu/layer_group_normal_norm.h"
#include "noise.h"
#include "sample_sets.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// The distance from 1 to the next number.
template <class Real>
constexpr Real unit_of = sizeof(Real) == 4 ? Real(0x1p-23) : Real(0x1p-52);

// The statistics of one set, as the backward pass finds them.
template <class Real>
class Statistics {
 public:
  Statistics(const TrainingProblem& problem, uint64_t set)
      : of_set_(static_cast<Real*>(problem.statistics) + set), sets_(size_t(problem.sets)) {}
  Real& operator[](Statistic which) const { return of_set_[size_t(which) * sets_]; }

  Standardization<Real> standardization() const {
    return {(*this)[Statistic::mean], (*this)[Statistic::inverse], (*this)[Statistic::correction]};
  }

  void set_moments(Real mean, const Real (&sums)[2], Real inverse_length, const TrainingProblem& problem) const {
    const Real shift = sums[0] * inverse_length, variance = fused(-shift, shift, sums[1] * inverse_length);
    Standardization<Real> standardize = standardization_of(mean, sums, inverse_length, Real(problem.epsilon));
    if (!problem.standardizes) standardize = {Real(0), Real(1), Real(0)};
    (*this)[Statistic::mean] = standardize.mean;
    (*this)[Statistic::inverse] = standardize.inverse;
    (*this)[Statistic::correction] = standardize.correction;
    (*this)[Statistic::exact_mean] = mean + shift;
    (*this)[Statistic::variance] = variance < 0 ? Real(0) : variance;
  }

  // `sums` are the members of LmbdaSums, in order.
  void set_lmbda(const Real (&sums)[4], Real inverse_length, const TrainingProblem& problem) const {
    const Real signed_log = sums[0] * inverse_length, h_d = sums[1] * inverse_length, d = sums[2] * inverse_length;
    const Real curvature = fused(Real(-2) * h_d, h_d, fused(-d, d, sums[3] * inverse_length));
    const Real slope = h_d - signed_log, alpha = Real(problem.alpha), damped = curvature + Real(problem.delta);
    const bool is_newton = problem.order == 2, has_range = problem.has_range;
    // With a range, L″ of sets that have lost their digits or are not numbers counts as 0 (mathematics.py: clamped_step).
    const bool is_flat = has_range ? !(std::fabs(damped) > unit_of<Real> * unit_of<Real>) : damped == 0;
    const bool has_curvature = is_newton && !is_flat;
    const Real divisor = has_curvature ? damped : Real(1), step = alpha / divisor;
    const Real found = Real(1) - alpha * slope / divisor;
    const Real least = Real(problem.least_lmbda), greatest = Real(problem.greatest_lmbda);
    const bool is_known = !has_range || has_curvature || !is_newton;  // else λ̂ = 1
    const bool is_below = has_range && found < least, is_above = has_range && found > greatest;
    const bool moves = is_known && !is_below && !is_above;
    (*this)[Statistic::lmbda] = !is_known ? Real(1) : is_below ? least : is_above ? greatest : found;
    const Real by_curvature = moves && has_curvature ? alpha * slope / (damped * damped) : Real(0);
    const Real by_slope = moves ? step : Real(0);
    (*this)[Statistic::by_h_d] = fused(Real(-4) * h_d, by_curvature, -by_slope);
    (*this)[Statistic::by_signed_log] = by_slope;
    (*this)[Statistic::by_curvature] = by_curvature;
    (*this)[Statistic::by_d] = Real(-2) * d * by_curvature;
  }

  RowBranches<Accurate, Real> branches(const TrainingProblem& problem) const {
    const Exponents<Real> eta = resolve_exponents((*this)[Statistic::lmbda], Real(problem.delta));
    return {branch<Accurate>(eta.pos, Real(1), Real(1)), branch<Accurate>(eta.neg, Real(1), Real(-1))};
  }

 private:
  Real* const of_set_;
  const size_t sets_;
};

template <class Real>
NNORM_INLINE void add_noise(const Real* z, Real scale, size_t n, Real* y) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) y[i] = fused(z[i], scale, y[i]);
}

// y·weight + bias in place of y. A null weight is 1, and a null bias 0.
template <bool one_weight, class Real>
NNORM_INLINE void finish(Real* y, const Real* weight, const Real* bias, size_t n) {
  const Real first_weight = weight != nullptr ? weight[0] : Real(1), first_bias = bias != nullptr ? bias[0] : Real(0);
  const bool has_own_weights = !one_weight && weight != nullptr, has_own_bias = !one_weight && bias != nullptr;
#pragma omp simd
  for (size_t i = 0; i < n; ++i)
    y[i] = y[i] * (has_own_weights ? weight[i] : first_weight) + (has_own_bias ? bias[i] : first_bias);
}

// Runs a pass that has sums: sum_tile(position, n, sums) computes those of a tile.
template <size_t count, class Real, class SumTile>
NNORM_INLINE void sum_set(const SampleSet<Real>& set, Real (&sums)[count], const SumTile& sum_tile) {
  RowSums<Real, count> of_set;
  set.for_each_tile([&](size_t at, size_t n) NNORM_INLINED {
    Real of_tile[count];
    sum_tile(at, n, of_tile);
    of_set.add(of_tile);
  });
  of_set.total(sums);
}

template <class Real>
void forward_of_set(const SampleSet<Real>& set, TrainingBuffers<Real>& buffers) {
  const TrainingProblem& problem = set.problem;
  const Statistics<Real> statistics(problem, set.number);
  const Real inverse_length = Real(1) / Real(set.length);
  const auto read_x = [&](size_t at, size_t n) { return set.read_again(problem.x, at, n, buffers.x + set.place(at)); };
  const auto read_y = [&](size_t at, size_t n) { return set.read_again(problem.y, at, n, buffers.y + set.place(at)); };
  const auto write_y = [&](size_t at, size_t n) { set.write(problem.y, at, n, buffers.y + set.place(at)); };

  Real of_x[1], of_moments[2], of_lmbda[4], of_psi[1] = {};
  sum_set(set, of_x, [&](size_t at, size_t n, Real(&sums)[1]) NNORM_INLINED {
    sum(set.read(problem.x, at, n, buffers.x + set.place(at)), n, sums);
  });
  const Real mean = of_x[0] / Real(set.length);
  sum_set(set, of_moments,
          [&](size_t at, size_t n, Real(&sums)[2]) NNORM_INLINED { moments(read_x(at, n), n, mean, sums); });
  statistics.set_moments(mean, of_moments, inverse_length, problem);
  const Standardization<Real> standardize = statistics.standardization();

  sum_set(set, of_lmbda, [&](size_t at, size_t n, Real(&sums)[4]) NNORM_INLINED {
    Real *integer = buffers.first + set.place(at), *fraction = buffers.second + set.place(at);
    const Real* x = read_x(at, n);
    logarithms(x, n, standardize, integer, fraction);
    lmbda_sums(x, n, standardize, integer, fraction, sums);
  });
  statistics.set_lmbda(of_lmbda, inverse_length, problem);
  const RowBranches<Accurate, Real> psi = statistics.branches(problem);

  // ψ(h), in y until s̄ is known.
  const bool is_finished = problem.noise == 0 && problem.weight == nullptr && problem.bias == nullptr;
  const Real one = 1, zero = 0;
  sum_set(set, of_psi, [&](size_t at, size_t n, Real(&sums)[1]) NNORM_INLINED {
    Real *integer = buffers.first + set.place(at), *fraction = buffers.second + set.place(at);
    const Real* x = read_x(at, n);
    if (!set.is_kept) logarithms(x, n, standardize, integer, fraction);
    Real* y = set.target(problem.y, at, n, buffers.y + set.place(at));
    powers<true>(x, y, n, standardize, integer, fraction, psi.pos, psi.neg, &one, &zero);
    sums[0] = 0;
    if (problem.computes_deviation) sum(static_cast<const Real*>(y), n, sums);
    if (is_finished || !set.is_kept) write_y(at, n);
  });
  Real deviation[1] = {};
  if (problem.computes_deviation) {
    const Real mean_of_psi = of_psi[0] * inverse_length;
    sum_set(set, deviation, [&](size_t at, size_t n, Real(&sums)[1]) NNORM_INLINED {
      const Real* y = read_y(at, n);
      sum_of_tile(n, sums, [y, mean_of_psi](size_t i, bool exists, size_t l, auto& lane) {
        lane[0][l] += exists ? std::fabs(y[i] - mean_of_psi) : Real(0);
      });
    });
  }
  statistics[Statistic::deviation] = deviation[0] * inverse_length;
  if (is_finished) return;

  const Real scale = Real(problem.noise) * statistics[Statistic::deviation];
  set.for_each_tile([&](size_t at, size_t n) {
    Real* y = const_cast<Real*>(read_y(at, n));
    if (problem.noise != 0) {
      noise_of_tile(problem.seed, set.number, at, n, buffers.noise);
      add_noise(buffers.noise, scale, n, y);
    }
    set.for_each_weight(at, n, [&](size_t i, size_t size, size_t number) {
      const Real* weight = problem.weight != nullptr ? static_cast<const Real*>(problem.weight) + number : nullptr;
      const Real* bias = problem.bias != nullptr ? static_cast<const Real*>(problem.bias) + number : nullptr;
      if (problem.run == 1)
        finish<false>(y + i, weight, bias, size);
      else
        finish<true>(y + i, weight, bias, size);
    });
    write_y(at, n);
  });
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
