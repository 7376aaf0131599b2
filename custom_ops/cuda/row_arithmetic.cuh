// What a kernel computes from the elements of a row that are in registers. Where the elements are, and how sums over a
// row are made, is left to the kernel.
#pragma once

#include "rows.cuh"

namespace nnorm::cuda {

// `values` elements in each of the `team` threads of a row. A kernel writes them to x and calls, in this order,
//
// - begin(): all elements have been read from memory when it returns;
// - finish(): the exponents of the row are known when it returns;
// - for_results(use): calls use(result) once, where result(i, weight, bias) is the result for element i.
//
// `sums_of_row(turn, sums, accumulate)` sums for all threads of the row: accumulate(each) calls each(add) once, and
// add(i, sums) adds the terms of element i. All threads of a warp must call sums_of_row alike, so what decides about it
// depends only on sums, and on those of all rows of the warp (for_any_row()).
template <class T, int values, int team, bool by_device = computed_by_device<T>>
class RowArithmetic;

// With the formulas of nnorm/row_statistics.h in their order: the bits of the CPU kernels.
template <class T, int values, int team>
class RowArithmetic<T, values, team, false> {
  using Real = Arithmetic<T>;

 public:
  Real x[values] = {};

  template <class SumsOfRow>
  NNORM_DEVICE void begin(const SumsOfRow& sums_of_row) {
    sums_of_row(Turn<0>(), sum_, [&](const auto& each) { each([&](int i, Real* part) { part[0] += x[i]; }); });
  }

  template <class SumsOfRow>
  NNORM_DEVICE void finish(const Rows<T>& w, const SumsOfRow& sums_of_row) {
    const Real mean = sum_[0] / w.length;
    Real moments[2];
    sums_of_row(Turn<1>(), moments, [&](const auto& each) {
      each([&](int i, Real* part) {
        x[i] -= mean;
        add_moments(x[i], part[0], part[1]);
      });
    });

    const Standardization<Real> standardize = standardization_of(mean, moments, w.inverse_length, w.epsilon);
    Real sums[4];
    sums_of_row(Turn<2>(), sums, [&](const auto& each) {
      each([&](int i, Real* part) {
        Real& h = x[i];
        h = standardize.of_centered(h);
        log_[i] = Accurate::log2_1p(magnitude(h));
        add_lmbda_terms(h, std::fabs(h), log_[i], part[0], part[1], part[2], part[3]);
      });
    });
    psi_ = Psi<T>::from(sums, w.inverse_length, w.delta);
  }

  template <class Use>
  NNORM_DEVICE void for_results(const Rows<T>& w, const Use& use) const {
    const auto result = [&](auto bounded) {
      return [&](int i, Real weight, Real bias) {
        return result_of<Accurate, bounded.value>(x[i], log_[i], psi_.pos, psi_.neg, weight, bias);
      };
    };
    if (is_bounded<T>(psi_, w.bounded_exponent))
      use(result(std::true_type()));
    else
      use(result(std::false_type()));
  }

 private:
  Real sum_[1];
  Log2<Real> log_[values];
  Psi<T> psi_;
};

}  // namespace nnorm::cuda
