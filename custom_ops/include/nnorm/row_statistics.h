// The statistics of a row of LayerNormalNorm and GroupNormalNorm, for CPUs and GPUs: the order in which its elements are
// added, and what becomes of the sums (NN eq. 5–15).
//
// Sums of floating-point numbers depend on their order, so it is one everywhere: that of the warps of a GPU, which a CPU can
// follow with vectors.
//
// - A row is cut into tiles of 1024 elements. A tile is read by 32 lanes in turn, two neighbors each, 16 times. Each lane
//   adds what it reads to two sums, one for the first neighbors and one for the second, in order, beginning with 0.
// - These 64 sums, lane by lane, are added in halves: the upper half to the lower half, until one is left.
// - Tile i belongs to chain i mod 16. A chain adds its tiles in order and keeps what the roundings lost (ChainSum). The chains
//   are added in halves.
//
// Elements that a tile lacks count as 0. Tensors of 16 bits are added in this order on CPUs; for GPUs see Tile in
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
    lost += (sum - (total - added)) + (tile - added);  // exact (Knuth 1969, section 4.2.2)
    sum = total;
  }
  NNORM_INLINE Real total() const { return lost == lost ? sum + lost : sum; }  // of an infinite sum, what is lost is NaN
};

// 1/√x, for float rounded correctly: tests/test_row_statistics.cpp shows that the rounding of the double loses nothing.
NNORM_INLINE double inverse_root(double x) { return 1 / std::sqrt(x); }
NNORM_INLINE float inverse_root(float x) {
#if defined(__CUDA_ARCH__)
  return __frsqrt_rn(x);
#else
  return float(1 / std::sqrt(double(x)));
#endif
}

// h = (x − mean)·inverse + correction: the correction makes up for the rounding of the mean.
template <class Real>
struct Standardization {
  Real mean, inverse, correction;

  NNORM_INLINE Real of_centered(Real centered) const { return fused(centered, inverse, correction); }
  NNORM_INLINE Real operator()(Real x) const { return of_centered(x - mean); }
};

// Adds the terms of x − mean to Σ(x − mean) and Σ(x − mean)².
template <class Real>
NNORM_INLINE void add_moments(Real centered, Real& first, Real& second) {
  first += centered;
  second = fused(centered, centered, second);
}

// From Σ(x − mean) and Σ(x − mean)², where `mean` is rounded; inverse_length is 1/n.
template <class Real>
NNORM_INLINE Standardization<Real> standardization_of(Real mean, const Real (&moments)[2], Real inverse_length, Real epsilon) {
  const Real shift = moments[0] * inverse_length, variance = fused(-shift, shift, moments[1] * inverse_length);
  const Real inverse = inverse_root((variance < 0 ? Real(0) : variance) + epsilon);  // this comparison keeps NaN
  return {mean, inverse, -shift * inverse};
}

// y = weight·ψ(h) + bias, from log = log₂(1 + |h|). `Evaluation` as in channel.h; `bounded` as in exp2_m1().
template <class Evaluation, bool bounded, class Real>
NNORM_INLINE Real result_of(Real h, Log2<Real> log, Branch<Real> pos, Branch<Real> neg, Real weight, Real bias) {
  const bool negative = h < Real(0);
  const Real eta = negative ? neg.eta : pos.eta, gain = negative ? neg.gain : pos.gain;
  return fused(gain * Evaluation::template exp2_m1<bounded>(log, eta), weight, bias);
}

// ψ of a row with its λ̂.
template <class Evaluation, class Real>
struct RowBranches {
  Branch<Real> pos, neg;

  // `sums` are those of LmbdaSums, in its order.
  static NNORM_INLINE RowBranches from(const Real (&sums)[4], Real inverse_length, Real delta) {
    const LmbdaSums<Real> means{sums[0] * inverse_length, sums[1] * inverse_length, sums[2] * inverse_length,
                                sums[3] * inverse_length};
    const Exponents<Real> eta = resolve_exponents(estimate_lmbda(means, delta), delta);
    return {branch<Evaluation>(eta.pos, Real(1), Real(1)), branch<Evaluation>(eta.neg, Real(1), Real(-1))};
  }
};

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
