// The arithmetic of rows of 16-bit tensors by the device's approximate instructions (nnorm/half_mathematics.h).
#pragma once

#include "row_arithmetic.cuh"

namespace nnorm::cuda {

// Most rows take one pass for both moments, sums of λ̂ without series, and ψ by QuickPsi. Where one of these does not
// suffice, a row takes the formulas for any row in its place.
//
// A row has the same results whatever other rows its warp has: those that need no other formula keep theirs.
template <class T, int values, int team>
class RowArithmetic<T, values, team, true> {
 public:
  float x[values] = {};

  template <class SumsOfRow>
  NNORM_DEVICE void begin(const SumsOfRow& sums_of_row) {
    sums_of_row(Turn<0>(), sums_, [&](const auto& each) {
      each([&](int i, float* part) { add_moments(x[i], part[0], part[1]); });
    });
  }

  template <class SumsOfRow>
  NNORM_DEVICE void finish(const Rows<T>& w, const SumsOfRow& sums_of_row) {
    const ScaledStandardization standardize = standardization(w, sums_of_row);
    const bool quick = QuickLmbda::suffices(standardize.power);
    float sums[4];
    sums_of_row(Turn<2>(), sums, [&](const auto& each) {
      if (quick)
        each(terms_of<QuickLmbda>(standardize));
      else
        each(terms_of<AnyLmbda>(standardize));
    });
    eta_ = resolve_exponents(quick ? QuickLmbda::from(sums, w.inverse_length, w.delta)
                                   : AnyLmbda::from(sums, w.inverse_length, w.delta),
                             w.delta);
  }

  template <class Use>
  NNORM_DEVICE void for_results(const Rows<T>&, const Use& use) const {
    if (QuickPsi::suffices(eta_)) {
      const QuickPsi psi = QuickPsi::from(eta_);
      use([&](int i, float weight, float bias) { return fused(psi(x[i], log_[i]), weight, bias); });
    } else {
      const Branch<float> pos = branch<ForHalf>(eta_.pos, 1.0f, 1.0f), neg = branch<ForHalf>(eta_.neg, 1.0f, -1.0f);
      use([&](int i, float weight, float bias) { return half_result_of(x[i], log_[i], pos, neg, weight, bias); });
    }
  }

 private:
  // Of x as this function leaves them: the elements, or those less their mean.
  template <class SumsOfRow>
  NNORM_DEVICE ScaledStandardization standardization(const Rows<T>& w, const SumsOfRow& sums_of_row) {
    const OnePass pass = OnePass::from(sums_, w.inverse_length);
    const bool suffices = pass.suffices(w.epsilon);
    ScaledStandardization standardize = pass.standardization(w.epsilon);
    if (for_any_row<team>(!suffices)) {
      const float mean = suffices ? 0.0f : sums_[0] / w.length;
      float moments[2];
      sums_of_row(Turn<1>(), moments, [&](const auto& each) {
        each([&](int i, float* part) {
          x[i] -= mean;
          add_moments(x[i], part[0], part[1]);
        });
      });
      if (!suffices) standardize = scaled(standardization_of(mean, moments, w.inverse_length, w.epsilon), w.epsilon);
    }
    return standardize;
  }

  // Adds the terms of λ̂, and writes g to x.
  template <class Lmbda>
  NNORM_DEVICE auto terms_of(const ScaledStandardization& standardize) {
    return [this, &standardize](int i, float* part) {
      x[i] = standardize(x[i]);
      log_[i] = Lmbda::add_terms(x[i], part[0], part[1], part[2], part[3]);
    };
  }

  float sums_[2];      // Σx and Σx²
  float log_[values];  // log₂(1 + |h|) with the sign of h
  Exponents<float> eta_;
};

}  // namespace nnorm::cuda
