// The statistics of a row of LayerNormalNorm and GroupNormalNorm, for CPUs and GPUs: the order in which elements are
// added, and what is computed from the sums (NN eq. 5–15).
//
// A floating-point sum depends on the order of its terms, so the order is the same everywhere: that of the warps of a
// GPU, which a CPU can follow with vectors.
//
// - A row is divided into tiles of 1024 elements. 32 lanes read a tile in turn, two neighboring elements each, 16
//   times. Each lane adds its elements to two sums that start from 0, one for the first neighbors and one for the
//   second, in order.
// - These 64 sums, ordered by lane, are added in halves: the upper half to the lower half, until one sum is left.
// - Tile i belongs to chain i mod 16. A chain adds its tiles in order and accumulates the rounding errors (ChainSum).
//   The chains are added in halves.
//
// Elements that the last tile lacks count as 0. CPUs add 16-bit tensors in this order too; for GPUs see Tile in
// cuda/tiles.cuh.
#pragma once

#include "nnorm/mathematics.h"

namespace nnorm {

constexpr size_t row_tile = 1024;
constexpr size_t tile_lanes = 32;
constexpr size_t lane_sums = 2;
constexpr size_t row_chains = 16;

inline namespace NNORM_INSTRUCTION_SET {

// The sum of the tiles of a chain.
template <class Real>
struct ChainSum {
  Real sum, lost;

  NNORM_INLINE void add(Real tile) {
    const Real total = sum + tile, added = total - sum;
    lost += (sum - (total - added)) + (tile - added);  // the rounding error, exactly (Knuth 1969, section 4.2.2)
    sum = total;
  }
  NNORM_INLINE Real total() const { return lost == lost ? sum + lost : sum; }  // `lost` is NaN if the sum is infinite
};

// 1/√x. The float result is rounded correctly, although a CPU rounds twice: tests/test_row_statistics.cpp verifies it.
NNORM_INLINE double inverse_root(double x) { return 1 / std::sqrt(x); }
NNORM_INLINE float inverse_root(float x) {
#if defined(__CUDA_ARCH__)
  return __frsqrt_rn(x);
#else
  return float(1 / std::sqrt(double(x)));
#endif
}

// h = (x − mean)·inverse + correction. The correction compensates for the rounding of the mean.
template <class Real>
struct Standardization {
  Real mean, inverse, correction;

  NNORM_INLINE Real of_centered(Real centered) const { return fused(centered, inverse, correction); }
  NNORM_INLINE Real operator()(Real x) const { return of_centered(x - mean); }
};

// Adds the terms of `centered`, which is x − mean, to Σ(x − mean) and Σ(x − mean)².
template <class Real>
NNORM_INLINE void add_moments(Real centered, Real& first, Real& second) {
  first += centered;
  second = fused(centered, centered, second);
}

// `moments` are Σ(x − mean) and Σ(x − mean)² with the rounded mean; inverse_length is 1/n.
template <class Real>
NNORM_INLINE Standardization<Real> standardization_of(Real mean, const Real (&moments)[2], Real inverse_length, Real epsilon) {
  const Real shift = moments[0] * inverse_length, variance = fused(-shift, shift, moments[1] * inverse_length);
  const Real inverse = inverse_root((variance < 0 ? Real(0) : variance) + epsilon);  // NaN stays NaN
  return {mean, inverse, -shift * inverse};
}

// y = weight·ψ(h) + bias, given log = log₂(1 + |h|). For `Evaluation` see channel.h, for `bounded` exp2_m1().
template <class Evaluation, bool bounded, class Real>
NNORM_INLINE Real result_of(Real h, Log2<Real> log, Branch<Real> pos, Branch<Real> neg, Real weight, Real bias) {
  const bool negative = h < Real(0);
  const Real eta = negative ? neg.eta : pos.eta, gain = negative ? neg.gain : pos.gain;
  return fused(gain * Evaluation::template exp2_m1<bounded>(log, eta), weight, bias);
}

// λ̂ of a row. `sums` are the members of LmbdaSums, in order; inverse_length is 1/n.
template <class Real>
NNORM_INLINE Real lmbda_of_row(const Real (&sums)[4], Real inverse_length, Real delta) {
  const LmbdaSums<Real> means{sums[0] * inverse_length, sums[1] * inverse_length, sums[2] * inverse_length,
                              sums[3] * inverse_length};
  return estimate_lmbda(means, delta);
}

// The two branches of ψ of a row, from the row's λ̂.
template <class Evaluation, class Real>
struct RowBranches {
  Branch<Real> pos, neg;

  static NNORM_INLINE RowBranches from(const Real (&sums)[4], Real inverse_length, Real delta) {
    const Exponents<Real> eta = resolve_exponents(lmbda_of_row(sums, inverse_length, delta), delta);
    return {branch<Evaluation>(eta.pos, Real(1), Real(1)), branch<Evaluation>(eta.neg, Real(1), Real(-1))};
  }
};

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
