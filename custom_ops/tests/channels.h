// Problems of BatchNormalNorm and its epilogues, and their reference results.
#pragma once

#include <array>

#include "buffers.h"
#include "oracle.h"

namespace nnorm_test {

using nnorm::Arithmetic;
using nnorm::Epilogue;
using nnorm::EpilogueFacts;

template <class Real>
struct ChannelParameters {
  std::vector<Real> scale, shift, pos, neg, weight, bias;

  // In the order of the operator's inputs.
  std::array<const Real*, 6> pointers() const {
    return {scale.data(), shift.data(), pos.data(), neg.data(), weight.data(), bias.data()};
  }

  ChannelParameters(size_t channels, Random& random) {
    for (size_t c = 0; c < channels; ++c) {
      const double exact[] = {0, 1, 2};
      const double lmbda = random.below(4) ? random.uniform(-2, 4) : exact[random.below(3)];
      scale.push_back(Real(random.uniform(0.3, 2)));
      shift.push_back(Real(random.normal()));
      pos.push_back(Real(lmbda));
      neg.push_back(Real(2 - lmbda));
      weight.push_back(Real(random.normal()));
      bias.push_back(Real(random.normal()));
    }
  }
};

// The output as a function of y = weight·ψ(scale·x + shift) + bias. The formulas are repeated here so that the tests do
// not compare nnorm/epilogues.h with itself.
template <class Wide>
Wide true_epilogue(Epilogue epilogue, Wide y, Wide residual) {
  const auto relu = [](Wide value) { return value < 0 ? Wide(0) : value; };
  switch (epilogue) {
    case Epilogue::none:
      return y;
    case Epilogue::relu:
      return relu(y);
    case Epilogue::add_relu:
      return relu(y + residual);
  }
  return Wide(INFINITY);
}

// The true y, and the size of the intermediate results that are rounded; channel_of(i) is the channel of element i.
template <class Real, class ChannelOf>
void expected(ChannelOf channel_of, const EpilogueFacts& facts, const ChannelParameters<Real>& p, const std::vector<Real>& x,
              const std::vector<Real>& residual, std::vector<Wider<Real>>& y, std::vector<Wider<Real>>& size) {
  using Wide = Wider<Real>;
  y.resize(x.size());
  size.resize(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t c = channel_of(i);
    const Wide scaled = Wide(p.scale[c]) * Wide(x[i]), shift = p.shift[c], h = scaled + shift;
    const Wide eta = h < 0 ? p.neg[c] : p.pos[c], psi = Wide(p.weight[c]) * true_psi(h, eta), bias = p.bias[c];
    const Wide added = facts.takes_residual ? Wide(residual[i]) : Wide(0);
    y[i] = true_epilogue(facts.epilogue, psi + bias, added);
    size[i] = std::fabs(psi) + std::fabs(bias) + std::fabs(added) +
              std::fabs(Wide(p.weight[c])) * true_slope(h, eta) * (std::fabs(scaled) + std::fabs(shift));
  }
}

}  // namespace nnorm_test
