// LayerNormalNorm and GroupNormalNorm: y = weight·ψ((x − mean)/√(var + ε); λ̂) + bias, with mean, biased variance and λ̂
// of each row (NN eq. 3, 5–15).
//
// A row is computed in four passes while it is in the cache: mean, variance, logarithms with the sums for λ̂, powers. Sums
// run in lanes over a tile, in the same order on every processor, and in double over the tiles of a row. The logarithms of a row of up to `kept` elements
// are kept from the third pass to the fourth; those of a longer row are computed again, tile by tile.
//
// A row of equal elements with ε = 0 is NaN, as 0/0 is. A float row whose squares overflow (beyond about 1e19) becomes its
// bias.
#pragma once

#include "float16_tiles.h"
#include "nnorm/kernels.h"
#include "prefetch.h"

namespace nnorm {
inline namespace NNORM_TARGET {

constexpr size_t kept = 4096;
constexpr size_t rows_together = 8;

template <class T>
struct alignas(64) RowBuffers {
  Arithmetic<T> integer[kept], fraction[kept];
  Arithmetic<T> wide[sizeof(T) < sizeof(Arithmetic<T>) ? kept : 1];  // x of 16 bits in float, which is read in every pass
};

// h = (x − mean)·inverse + correction: the correction makes up for the rounding of the mean.
template <class Real>
struct Standardization {
  Real mean, inverse, correction;

  NNORM_INLINE Real operator()(Real x) const { return fused(x - mean, inverse, correction); }
};

// The lanes of a sum: as many as the widest vectors have.
template <class Real>
constexpr size_t lanes = 64 / sizeof(Real);

// The sums are held in `most_registers` at a time; more would leave too few for the terms.
#if defined(__AVX512F__)
constexpr size_t register_bytes = 64;
#elif defined(__AVX2__)
constexpr size_t register_bytes = 32;
#else
constexpr size_t register_bytes = 16;
#endif
constexpr size_t most_registers = 8;

// `width` lanes from `first` on.
template <size_t width, class Real, size_t count, size_t all, class Add>
NNORM_INLINE void fill_lanes(size_t first, size_t n, Real (&lane)[count][all], const Add& add) {
  alignas(64) Real part[count][width] = {};
  size_t i = first;
  for (; i + all <= n + first; i += all) {
#pragma omp simd
    for (size_t l = 0; l < width; ++l) add(i + l, true, l, part);
  }
  if (i < n) {
    const int32_t left = int32_t(n - i);  // 32 bits, as many as the elements have: vectors of 64 would be twice as many
#pragma omp simd
    for (int32_t l = 0; l < int32_t(width); ++l) add(i + size_t(l), l < left, size_t(l), part);
  }
  for (size_t s = 0; s < count; ++s)
    for (size_t l = 0; l < width; ++l) lane[s][first + l] = part[s][l];
}

// The numbers at `from` in a vector of a register or less.
template <class Real, size_t width>
NNORM_INLINE auto vector_at(const Real* from) {
  typedef Real Vector __attribute__((vector_size(width * sizeof(Real))));
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Total, size_t half>
constexpr size_t vector_width = half < register_bytes / sizeof(Total) ? half : register_bytes / sizeof(Total);

// The upper half of 2·half lanes is added to the lower half, and so on until one lane is left. With vectors, because
// compilers would write what is left of a vector to memory and read it from there.
template <size_t half, class Total>
NNORM_INLINE Total sum_of_halves(const Total* lane) {
  if constexpr (half == 1) {
    return lane[0] + lane[1];
  } else {
    constexpr size_t width = vector_width<Total, half>;
    Total left[half];
    NNORM_UNROLL for (size_t l = 0; l < half; l += width) {
      const auto sum = vector_at<Total, width>(lane + l) + vector_at<Total, width>(lane + half + l);
      std::memcpy(left + l, &sum, sizeof sum);
    }
    return sum_of_halves<half / 2>(left);
  }
}

// Sums over n elements: element i belongs to lane i mod `lanes`, and halves of the lanes are added, as Total, until one is
// left.
// add(i, exists, l, lane) adds the terms of element i to lane[0][l], lane[1][l], …; where `exists` is false, it adds zeros.
template <class Real, class Total, size_t count, class Add>
NNORM_INLINE void sum_in_lanes(size_t n, Total (&sums)[count], Add add) {
  constexpr size_t all = lanes<Real>, that_fit = most_registers * register_bytes / sizeof(Real) / count;
  constexpr size_t width = that_fit < all ? that_fit : all;
  alignas(64) Real lane[count][all];
  NNORM_UNROLL for (size_t first = 0; first < all; first += width) fill_lanes<width>(first, n, lane, add);
  for (size_t s = 0; s < count; ++s) {
    constexpr size_t at_once = vector_width<Total, all>;
    Total total[all];
    NNORM_UNROLL for (size_t l = 0; l < all; l += at_once) {
      const auto wide = __builtin_convertvector(vector_at<Real, at_once>(lane[s] + l), decltype(vector_at<Total, at_once>(total)));
      std::memcpy(total + l, &wide, sizeof wide);
    }
    sums[s] = sum_of_halves<all / 2>(total);
  }
}

template <class Real>
NNORM_INLINE double sum(const Real* x, size_t n) {
  Real total[1];
  sum_in_lanes<Real>(n, total, [x](size_t i, bool exists, size_t l, auto& lane) { lane[0][l] += exists ? x[i] : Real(0); });
  return double(total[0]);
}

// Σ(x − near) and Σ(x − near)². The lanes are added in double: an error of the mean is one of every element.
struct Moments {
  double first, second;
};

template <class Real>
NNORM_INLINE Moments moments(const Real* x, size_t n, Real near) {
  double sums[2];
  sum_in_lanes<Real>(n, sums, [x, near](size_t i, bool exists, size_t l, auto& lane) {
    const Real centred = exists ? x[i] - near : Real(0);
    lane[0][l] += centred;
    lane[1][l] = fused(centred, centred, lane[1][l]);
  });
  return {sums[0], sums[1]};
}

NNORM_INLINE void add(Moments& total, const Moments& part) {
  total.first += part.first;
  total.second += part.second;
}

template <class Real>
NNORM_INLINE void add(LmbdaSums<double>& total, const LmbdaSums<Real>& part) {
  total.signed_log += double(part.signed_log);
  total.h_d += double(part.h_d);
  total.d += double(part.d);
  total.curvature += double(part.curvature);
}

template <class Real>
NNORM_INLINE void logarithms(const Real* x, size_t n, const Standardization<Real>& standardize, Real* integer,
                             Real* fraction) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const Log2<Real> log = log2_1p(magnitude(standardize(x[i])));
    integer[i] = log.integer;
    fraction[i] = log.fraction;
  }
}

// Separate from logarithms(): a loop with both would run out of registers.
template <class Real>
NNORM_INLINE LmbdaSums<Real> lmbda_sums(const Real* x, size_t n, const Standardization<Real>& standardize,
                                        const Real* integer, const Real* fraction) {
  const Standardization<Real> standardized = standardize;
  Real sums[4];
  sum_in_lanes<Real>(n, sums, [=](size_t i, bool exists, size_t l, auto& lane) {
    const Real h = exists ? standardized(x[i]) : Real(0);
    const Log2<Real> log{exists ? integer[i] : Real(0), exists ? fraction[i] : Real(0)};
    add_lmbda_terms(h, std::fabs(h), log, lane[0][l], lane[1][l], lane[2][l], lane[3][l]);
  });
  return {sums[0], sums[1], sums[2], sums[3]};
}

// `weight` and `bias` hold one number for each element, or one for all n.
template <bool one_weight, class T, class Real>
NNORM_INLINE void powers(const Real* x, T* y, size_t n, const Standardization<Real>& standardize, const Real* integer,
                         const Real* fraction, Branch<Real> pos, Branch<Real> neg, const Real* weight,
                         const Real* bias) {
  const Real first_weight = weight[0], first_bias = bias[0];
  // Copies, because compilers turn a choice between two members into a choice between two addresses.
  const Real eta_pos = pos.eta, eta_neg = neg.eta, gain_pos = pos.gain, gain_neg = neg.gain;
  const Standardization<Real> standardized = standardize;
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const bool negative = standardized(x[i]) < Real(0);
    const Real eta = negative ? eta_neg : eta_pos, gain = negative ? gain_neg : gain_pos;
    const Real psi = gain * exp2_m1(Log2<Real>{integer[i], fraction[i]}, eta);
    narrow(fused(psi, one_weight ? first_weight : weight[i], one_weight ? first_bias : bias[i]), y[i]);
  }
}

// powers() of a tile x that starts at `position` of its row, one run of elements with the same weight at a time.
template <class T, class Out>
NNORM_INLINE void powers_of_tile(const RowProblem<T>& work, size_t row, size_t position, const Arithmetic<T>* x, Out* y,
                                 size_t n, const Standardization<Arithmetic<T>>& standardize,
                                 const Arithmetic<T>* integer, const Arithmetic<T>* fraction,
                                 Branch<Arithmetic<T>> pos, Branch<Arithmetic<T>> neg) {
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

// The state of a row between the passes.
template <class Real>
struct RowState {
  Standardization<Real> standardize;
  Branch<Real> pos, neg;
};

// The end of each pass: what the sums of a row's tiles, added in their order, become. The mean was summed in T, so `near` is
// only near it; the sum of x − near has the difference.
template <class Real>
NNORM_INLINE Standardization<Real> standardization_of(const Moments& about, Real near, size_t length, double epsilon) {
  const double shift = about.first / double(length), variance = about.second / double(length) - shift * shift;
  const double inverse = 1 / std::sqrt((variance < 0 ? 0 : variance) + epsilon);  // this comparison keeps NaN
  const Real rounded_mean = Real(double(near) + shift);
  return {rounded_mean, Real(inverse), Real((double(rounded_mean) - double(near) - shift) * inverse)};
}

template <class Real>
NNORM_INLINE void set_branches(RowState<Real>& state, const LmbdaSums<double>& sums, size_t length, double delta) {
  const Exponents<double> eta = resolve_exponents(estimate_lmbda(sums, double(length), delta), delta);
  state.pos = branch(Real(eta.pos), Real(1), Real(1));
  state.neg = branch(Real(eta.neg), Real(1), Real(-1));
}

// The result of a tile x that starts at `position` of its row.
template <class T>
NNORM_INLINE void result_of_tile(const RowProblem<T>& work, size_t row, size_t position, const Arithmetic<T>* x, size_t n,
                                 const RowState<Arithmetic<T>>& state, const Arithmetic<T>* integer,
                                 const Arithmetic<T>* fraction) {
  T* y = work.y + row * work.row_length + position;
  if constexpr (converted_by_tiles<T>) {
    alignas(64) Arithmetic<T> wide[row_tile];
    powers_of_tile(work, row, position, x, wide, n, state.standardize, integer, fraction, state.pos, state.neg);
    narrow_tile(wide, n, y);
  } else {
    powers_of_tile(work, row, position, x, y, n, state.standardize, integer, fraction, state.pos, state.neg);
  }
}

// tile(at, n) are the elements at, …, at + n − 1 of a row.
template <class Tile>
NNORM_INLINE double mean_of(Tile tile, size_t length) {
  double total = 0;
  for_each_tile(length, [&](size_t at, size_t n) { total += sum(tile(at, n), n); });
  return total / double(length);
}

template <class Real, class Tile>
NNORM_INLINE Standardization<Real> standardization_of(Tile tile, size_t length, double mean, double epsilon) {
  const Real near = Real(mean);
  Moments about{0, 0};
  for_each_tile(length, [&](size_t at, size_t n) { add(about, moments(tile(at, n), n, near)); });
  return standardization_of(about, near, length, epsilon);
}

// The rows first, …, first + count − 1, pass by pass. A chain of slow operations follows the sums of a row; the CPU
// overlaps it with the sums of the next row if these come next.
template <class T>
void run_rows(const RowProblem<T>& work, size_t first, size_t count, RowBuffers<T>& buffers) {
  using Real = Arithmetic<T>;
  const size_t length = work.row_length;
  const T* x = work.x + first * length;
  // The position of a tile in the buffers. Every tile of a row that is too long to be kept uses the same memory.
  const bool keep = length <= kept;
  const auto place = [keep, length](size_t r, size_t at) { return keep ? r * length + at : 0; };
  // The elements of row r as Real. Those of 16 bits are widened once if they are kept, and in every pass if not.
  Real* const wide_rows = buffers.wide;
  const auto row = [=](size_t r, bool is_first_pass) {
    return [=](size_t at, size_t n) -> const Real* {
      if constexpr (sizeof(T) == sizeof(Real)) {
        return x + r * length + at;
      } else {
        Real* wide = wide_rows + place(r, at);
        if (is_first_pass || !keep) widen_tile(x + r * length + at, n, wide);
        return wide;
      }
    };
  };

  double mean[rows_together];
  RowState<Real> state[rows_together];
  for (size_t r = 0; r < count; ++r) mean[r] = mean_of(row(r, true), length);
  for (size_t r = 0; r < count; ++r)
    state[r].standardize = standardization_of<Real>(row(r, false), length, mean[r], work.epsilon);

  for (size_t r = 0; r < count; ++r) {
    LmbdaSums<double> sums{0, 0, 0, 0};
    for_each_tile(length, [&](size_t at, size_t n) {
      Real *integer = buffers.integer + place(r, at), *fraction = buffers.fraction + place(r, at);
      // Not for rows too long to be kept: the next row may evict this one from the cache, which cost rows of 100 000 floats
      // 15 % on 2 threads.
      if (keep && first + r + count < work.rows) prefetch(x + (r + count) * length + at, n);
      const Real* tile = row(r, false)(at, n);
      logarithms(tile, n, state[r].standardize, integer, fraction);
      add(sums, lmbda_sums(tile, n, state[r].standardize, integer, fraction));
    });
    set_branches(state[r], sums, length, work.delta);
  }
  for (size_t r = 0; r < count; ++r) {
    for_each_tile(length, [&](size_t at, size_t n) {
      Real *integer = buffers.integer + place(r, at), *fraction = buffers.fraction + place(r, at);
      const Real* tile = row(r, false)(at, n);
      if (!keep) logarithms(tile, n, state[r].standardize, integer, fraction);
      result_of_tile(work, first + r, at, tile, n, state[r], integer, fraction);
    });
  }
}

template <class T>
void layer_group_normal_norm(const RowProblem<T>& work, size_t begin, size_t end) {
  RowBuffers<T> buffers;
  const size_t rows = rows_per_item(work), beyond = end * rows, last = beyond < work.rows ? beyond : work.rows;
  const size_t that_fit = work.row_length ? kept / work.row_length : 0;
  const size_t together = that_fit > rows_together ? rows_together : (that_fit ? that_fit : 1);
  for (size_t row = begin * rows; row < last; row += together)
    run_rows(work, row, last - row < together ? last - row : together, buffers);
}

}  // namespace NNORM_TARGET
}  // namespace nnorm
