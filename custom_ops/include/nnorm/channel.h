// BatchNormalNorm for one element: y = epilogue(weight·ψ(scale·x + shift) + bias) with frozen exponents (NN eq. 3).
//
// Two functions compute it, logarithm() and power(): a loop over one of them keeps its constants in registers.
#pragma once

#include "nnorm/problems.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

template <class Real>
struct Channel {
  Real scale, shift, eta_pos, eta_neg, gain_pos, gain_neg, bias;
};

// `Evaluation` computes |h|, log₂(1 + |h|), 2^(η·log) − 1 and quotients. It is Accurate or ForChannels.
template <class Evaluation, class Real>
NNORM_INLINE Channel<Real> channel_from(Real scale, Real shift, Real exponent_pos, Real exponent_neg, Real weight,
                                        Real bias) {
  const Branch<Real> pos = branch<Evaluation>(exponent_pos, weight, Real(1));
  const Branch<Real> neg = branch<Evaluation>(exponent_neg, weight, Real(-1));
  return {scale, shift, pos.eta, neg.eta, pos.gain, neg.gain, bias};
}

template <class Evaluation, class Real>
NNORM_INLINE void logarithm(Real x, const Channel<Real>& channel, Real& h_out, Real& integer, Real& fraction) {
  const Real h = fused(channel.scale, x, channel.shift);
  const Log2<Real> log = Evaluation::log2_1p(Evaluation::magnitude(h));
  h_out = h;
  integer = log.integer;
  fraction = log.fraction;
}

// weight·ψ(h) + bias.
template <class Evaluation, class Real>
NNORM_INLINE Real weighted_psi(Real h, Real integer, Real fraction, const Channel<Real>& channel) {
  const bool negative = h < Real(0);
  const Real eta = negative ? channel.eta_neg : channel.eta_pos, gain = negative ? channel.gain_neg : channel.gain_pos;
  const Real grown = Evaluation::exp2_m1(Log2<Real>{integer, fraction}, eta);
  return fused(gain, grown, channel.bias);
}

template <class Evaluation, Epilogue epilogue, class Real>
NNORM_INLINE Real power(Real h, Real integer, Real fraction, Real residual, const Channel<Real>& channel) {
  return Formula<epilogue>::apply(weighted_psi<Evaluation>(h, integer, fraction, channel), residual);
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
