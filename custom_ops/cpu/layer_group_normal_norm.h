// LayerNormalNorm and GroupNormalNorm: y = weight·ψ((x − mean)/√(var + ε); λ̂) + bias, with mean, biased variance and λ̂
// of each row (NN eq. 3, 5–15).
//
// A row is computed in four passes while it is in the cache: mean, variance, logarithms with the sums for λ̂, powers. Sums
// run in vector lanes over a tile and in double over the tiles of a row. The logarithms of a row of up to `kept` elements
// are kept from the third pass to the fourth; those of a longer row are computed again, tile by tile.
//
// A row of equal elements with ε = 0 is NaN, as 0/0 is. A float row whose squares overflow (beyond about 1e19) becomes its
// bias.
#pragma once

#include "nnorm/kernels.h"

namespace nnorm {
inline namespace NNORM_TARGET {

constexpr size_t row_tile = 512;
constexpr size_t kept = 4096;
constexpr size_t rows_together = 8;

template <class Real>
struct alignas(64) RowLogarithms {
  Real integer[kept], fraction[kept];
};

// h = (x − mean)·inverse + correction: the correction makes up for the rounding of the mean.
template <class Real>
struct Standardization {
  Real mean, inverse, correction;

  NNORM_INLINE Real operator()(Real x) const { return (x - mean) * inverse + correction; }
};

template <class T>
NNORM_INLINE double sum(const T* x, size_t n) {
  Arithmetic<T> total = 0;
#pragma omp simd reduction(+ : total)
  for (size_t i = 0; i < n; ++i) total += widened(x[i]);
  return double(total);
}

// Σ(x − near) and Σ(x − near)².
struct Moments {
  double first, second;
};

template <class T>
NNORM_INLINE Moments moments(const T* x, size_t n, Arithmetic<T> near) {
  Arithmetic<T> first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
  for (size_t i = 0; i < n; ++i) {
    const Arithmetic<T> centred = widened(x[i]) - near;
    first += centred;
    second += centred * centred;
  }
  return {double(first), double(second)};
}

template <class Real>
NNORM_INLINE void add(LmbdaSums<double>& total, const LmbdaSums<Real>& part) {
  total.signed_log += double(part.signed_log);
  total.h_d += double(part.h_d);
  total.d += double(part.d);
  total.curvature += double(part.curvature);
}

template <class T>
NNORM_INLINE void logarithms(const T* x, size_t n, const Standardization<Arithmetic<T>>& standardize,
                             Arithmetic<T>* integer, Arithmetic<T>* fraction) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const Log2<Arithmetic<T>> log = log2_1p(magnitude(standardize(widened(x[i]))));
    integer[i] = log.integer;
    fraction[i] = log.fraction;
  }
}

// Separate from logarithms(): a loop with both would run out of registers.
template <class T>
NNORM_INLINE LmbdaSums<Arithmetic<T>> lmbda_sums(const T* x, size_t n, const Standardization<Arithmetic<T>>& standardize,
                                                 const Arithmetic<T>* integer, const Arithmetic<T>* fraction) {
  using Real = Arithmetic<T>;
  Real signed_log = 0, h_d = 0, d = 0, curvature = 0;
#pragma omp simd reduction(+ : signed_log, h_d, d, curvature)
  for (size_t i = 0; i < n; ++i) {
    const Real h = standardize(widened(x[i]));
    add_lmbda_terms(h, std::fabs(h), Log2<Real>{integer[i], fraction[i]}, signed_log, h_d, d, curvature);
  }
  return {signed_log, h_d, d, curvature};
}

// `weight` and `bias` hold one number for each element, or one for all n.
template <bool one_weight, class T>
NNORM_INLINE void powers(const T* x, T* y, size_t n, const Standardization<Arithmetic<T>>& standardize,
                         const Arithmetic<T>* integer, const Arithmetic<T>* fraction, Branch<Arithmetic<T>> pos,
                         Branch<Arithmetic<T>> neg, const Arithmetic<T>* weight, const Arithmetic<T>* bias) {
  using Real = Arithmetic<T>;
  const Real first_weight = weight[0], first_bias = bias[0];
  // Copies, because compilers turn a choice between two members into a choice between two addresses.
  const Real eta_pos = pos.eta, eta_neg = neg.eta, gain_pos = pos.gain, gain_neg = neg.gain;
  const Standardization<Real> standardized = standardize;
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const bool negative = standardized(widened(x[i])) < Real(0);
    const Real eta = negative ? eta_neg : eta_pos, gain = negative ? gain_neg : gain_pos;
    const Real psi = gain * exp2_m1(Log2<Real>{integer[i], fraction[i]}, eta);
    narrow(psi * (one_weight ? first_weight : weight[i]) + (one_weight ? first_bias : bias[i]), y[i]);
  }
}

// powers() of a tile that starts at `position` of its row, one run of elements with the same weight at a time.
template <class T>
NNORM_INLINE void powers_of_tile(const RowProblem<T>& work, size_t row, size_t position, size_t n,
                                 const Standardization<Arithmetic<T>>& standardize, const Arithmetic<T>* integer,
                                 const Arithmetic<T>* fraction, Branch<Arithmetic<T>> pos, Branch<Arithmetic<T>> neg) {
  const T* x = work.x + row * work.row_length + position;
  T* y = work.y + row * work.row_length + position;
  const size_t weights = row % work.period * (work.row_length / work.run);
  if (work.run == 1) {
    const size_t first = weights + position;
    powers<false>(x, y, n, standardize, integer, fraction, pos, neg, work.weight + first, work.bias + first);
    return;
  }
  for (size_t i = 0; i < n;) {
    const size_t run = (position + i) / work.run, left_in_run = (run + 1) * work.run - (position + i);
    const size_t count = left_in_run < n - i ? left_in_run : n - i;
    powers<true>(x + i, y + i, count, standardize, integer + i, fraction + i, pos, neg, work.weight + weights + run,
                 work.bias + weights + run);
    i += count;
  }
}

// Calls f(position, count) for every tile of a row.
template <class F>
NNORM_INLINE void for_each_tile(size_t length, F f) {
  for (size_t position = 0; position < length; position += row_tile)
    f(position, length - position < row_tile ? length - position : row_tile);
}

// Prefetches memory that is read soon. A CPU prefetches by itself while it reads sequentially, but not during the passes
// that compute on a row in the cache. Not for rows too long to be kept: the next row may evict this one from the cache, which
// cost rows of 100 000 floats 15 % on 2 threads.
template <class T>
NNORM_INLINE void prefetch(const T* x, size_t n) {
  for (size_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
}

// The state of a row between the passes.
template <class Real>
struct RowState {
  Standardization<Real> standardize;
  Branch<Real> pos, neg;
};

template <class T>
NNORM_INLINE double mean_of(const T* x, size_t length) {
  double total = 0;
  for_each_tile(length, [&](size_t at, size_t count) { total += sum(x + at, count); });
  return total / double(length);
}

template <class T>
NNORM_INLINE Standardization<Arithmetic<T>> standardization_of(const T* x, size_t length, double mean, double epsilon) {
  using Real = Arithmetic<T>;
  // The mean was summed in T, so `near` is only near it; the sum of x − near has the difference.
  const Real near = Real(mean);
  Moments about{0, 0};
  for_each_tile(length, [&](size_t at, size_t count) {
    const Moments part = moments(x + at, count, near);
    about.first += part.first;
    about.second += part.second;
  });
  const double shift = about.first / double(length), variance = about.second / double(length) - shift * shift;
  const double inverse = 1 / std::sqrt((variance < 0 ? 0 : variance) + epsilon);  // this comparison keeps NaN
  const Real rounded_mean = Real(double(near) + shift);
  return {rounded_mean, Real(inverse), Real((double(rounded_mean) - double(near) - shift) * inverse)};
}

// The rows first, …, first + count − 1, pass by pass. A chain of slow operations follows the sums of a row; the CPU
// overlaps it with the sums of the next row if these come next.
template <class T>
void run_rows(const RowProblem<T>& work, size_t first, size_t count, RowLogarithms<Arithmetic<T>>& logs) {
  using Real = Arithmetic<T>;
  const size_t length = work.row_length;
  const T* x = work.x + first * length;
  double mean[rows_together];
  RowState<Real> state[rows_together];
  for (size_t r = 0; r < count; ++r) mean[r] = mean_of(x + r * length, length);
  for (size_t r = 0; r < count; ++r)
    state[r].standardize = standardization_of(x + r * length, length, mean[r], work.epsilon);

  // The position of a tile's logarithms. Every tile of a row that is too long to be kept uses the same memory.
  const bool keep = length <= kept;
  const auto place = [keep, length](size_t r, size_t at) { return keep ? r * length + at : 0; };
  for (size_t r = 0; r < count; ++r) {
    LmbdaSums<double> sums{0, 0, 0, 0};
    for_each_tile(length, [&](size_t at, size_t n) {
      Real *integer = logs.integer + place(r, at), *fraction = logs.fraction + place(r, at);
      if (keep && first + r + count < work.rows) prefetch(x + (r + count) * length + at, n);
      logarithms(x + r * length + at, n, state[r].standardize, integer, fraction);
      add(sums, lmbda_sums(x + r * length + at, n, state[r].standardize, integer, fraction));
    });
    const Exponents<double> eta = resolve_exponents(estimate_lmbda(sums, double(length), work.delta), work.delta);
    state[r].pos = branch(Real(eta.pos), Real(1), Real(1));
    state[r].neg = branch(Real(eta.neg), Real(1), Real(-1));
  }
  for (size_t r = 0; r < count; ++r) {
    for_each_tile(length, [&](size_t at, size_t n) {
      Real *integer = logs.integer + place(r, at), *fraction = logs.fraction + place(r, at);
      if (!keep) logarithms(x + r * length + at, n, state[r].standardize, integer, fraction);
      powers_of_tile(work, first + r, at, n, state[r].standardize, integer, fraction, state[r].pos, state[r].neg);
    });
  }
}

template <class T>
void layer_group_normal_norm(const RowProblem<T>& work, size_t begin, size_t end) {
  RowLogarithms<Arithmetic<T>> logs;
  const size_t rows = rows_per_item(work), beyond = end * rows, last = beyond < work.rows ? beyond : work.rows;
  const size_t that_fit = work.row_length ? kept / work.row_length : 0;
  const size_t together = that_fit > rows_together ? rows_together : (that_fit ? that_fit : 1);
  for (size_t row = begin * rows; row < last; row += together)
    run_rows(work, row, last - row < together ? last - row : together, logs);
}

}  // namespace NNORM_TARGET
}  // namespace nnorm
