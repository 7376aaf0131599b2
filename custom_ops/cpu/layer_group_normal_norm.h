// LayerNormalNorm and GroupNormalNorm: y = weight·ψ((x − mean)/√(var + ε); λ̂) + bias, with mean, biased variance and λ̂
// of each row (NN eq. 3, 5–15).
//
// Four passes compute a row while it is in the cache: mean, variance, logarithms with the sums for λ̂, powers.
// nnorm/row_statistics.h defines the order of the sums. If a row has at most `longest_kept_row` elements, its
// logarithms are kept from the third pass to the fourth; those of a longer row are computed again, tile by tile.
//
// The result for a row of equal elements with ε = 0 is NaN, as 0/0 is. The result for a float row whose squares
// overflow (elements beyond about 1e19) is its bias.
#pragma once

#include "float16_tiles.h"
#include "nnorm/kernels.h"
#include "prefetch.h"
#include "sum_of_tile.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

constexpr size_t longest_kept_row = 4096;
constexpr size_t rows_together = 8;

template <class T>
struct alignas(64) RowBuffers {
  Arithmetic<T> integer[longest_kept_row], fraction[longest_kept_row];
  Arithmetic<T> wide[sizeof(T) < sizeof(Arithmetic<T>) ? longest_kept_row : 1];  // 16-bit x in float, for all passes
};

// Each pass has a function that computes its sums over a tile of n elements.

// Σx.
template <class Real>
NNORM_INLINE void sum(const Real* x, size_t n, Real (&sums)[1]) {
  sum_of_tile(n, sums, [x](size_t i, bool exists, size_t l, auto& lane) { lane[0][l] += exists ? x[i] : Real(0); });
}

// Σ(x − mean) and Σ(x − mean)².
template <class Real>
NNORM_INLINE void moments(const Real* x, size_t n, Real mean, Real (&sums)[2]) {
  sum_of_tile(n, sums, [x, mean](size_t i, bool exists, size_t l, auto& lane) {
    add_moments(exists ? x[i] - mean : Real(0), lane[0][l], lane[1][l]);
  });
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

// The sums for λ̂ (LmbdaSums). One loop with logarithms() would need more registers than there are.
template <class Real>
NNORM_INLINE void lmbda_sums(const Real* x, size_t n, const Standardization<Real>& standardize, const Real* integer,
                             const Real* fraction, Real (&sums)[4]) {
  const Standardization<Real> standardized = standardize;
  sum_of_tile(n, sums, [=](size_t i, bool exists, size_t l, auto& lane) {
    const Real h = exists ? standardized(x[i]) : Real(0);
    const Log2<Real> log{exists ? integer[i] : Real(0), exists ? fraction[i] : Real(0)};
    add_lmbda_terms(h, std::fabs(h), log, lane[0][l], lane[1][l], lane[2][l], lane[3][l]);
  });
}

// `weight` and `bias` hold one number for each element or, if `one_weight`, one for all n.
template <bool one_weight, class T, class Real>
NNORM_INLINE void powers(const Real* x, T* y, size_t n, const Standardization<Real>& standardize, const Real* integer,
                         const Real* fraction, Branch<Real> pos, Branch<Real> neg, const Real* weight,
                         const Real* bias) {
  const Real first_weight = weight[0], first_bias = bias[0];
  // Copies: compilers turn a choice between two members into a choice between two addresses.
  const Real eta_pos = pos.eta, eta_neg = neg.eta, gain_pos = pos.gain, gain_neg = neg.gain;
  const Standardization<Real> standardized = standardize;
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const Real result = result_of<Accurate, false>(
        standardized(x[i]), Log2<Real>{integer[i], fraction[i]}, Branch<Real>{eta_pos, gain_pos}, Branch<Real>{eta_neg, gain_neg},
        one_weight ? first_weight : weight[i], one_weight ? first_bias : bias[i]);
    narrow(result, y[i]);
  }
}

// powers() of a tile x that starts at `position` of its row: one call for each run of elements with the same weight.
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

// The number of elements of the tile that starts at `position` of a row.
NNORM_INLINE size_t elements_of_tile(size_t length, size_t position) {
  return length - position < row_tile ? length - position : row_tile;
}

// Adds the sums of a row's tiles, which must be given in order.
template <class Real, size_t count>
class RowSums {
 public:
  NNORM_INLINE void add(const Real (&tile)[count]) {
    for (size_t s = 0; s < count; ++s) {
      ChainSum<Real>& chain = chains_[tiles_ % row_chains][s];
      if (tiles_ < row_chains)
        chain = {tile[s], 0};  // as add() to a sum of 0
      else
        chain.add(tile[s]);
    }
    ++tiles_;
  }

  NNORM_INLINE void total(Real (&sums)[count]) const {
    for (size_t s = 0; s < count; ++s) sums[s] = tiles_ == 1 ? chains_[0][s].sum : total_of_chains(s);
  }

 private:
  Real total_of_chains(size_t s) const {
    const size_t used = tiles_ < row_chains ? tiles_ : row_chains;
    Real of_chain[row_chains] = {};
    for (size_t i = 0; i < used; ++i) of_chain[i] = chains_[i][s].total();
    for (size_t half = row_chains / 2; half > 0; half /= 2)
      for (size_t i = half; i < used && i < 2 * half; ++i) of_chain[i - half] += of_chain[i];
    return of_chain[0];
  }

  ChainSum<Real> chains_[row_chains][count];
  size_t tiles_ = 0;
};

// What the passes over a row have computed.
template <class Real>
struct RowState {
  Standardization<Real> standardize;  // after the first pass, only its mean is set
  RowBranches<Accurate, Real> psi;
};

// Ends a pass that has sums: sets `row` from them. The overloads for 1, 2 and 4 sums are those of the first three
// passes.
template <class T>
NNORM_INLINE void set_state(RowState<Arithmetic<T>>& row, const RowSums<Arithmetic<T>, 1>& of_row, const RowProblem<T>& work) {
  Arithmetic<T> sums[1];
  of_row.total(sums);
  row.standardize.mean = sums[0] / Arithmetic<T>(work.row_length);
}

template <class T>
NNORM_INLINE void set_state(RowState<Arithmetic<T>>& row, const RowSums<Arithmetic<T>, 2>& of_row, const RowProblem<T>& work) {
  using Real = Arithmetic<T>;
  Real sums[2];
  of_row.total(sums);
  row.standardize = standardization_of(row.standardize.mean, sums, Real(1) / Real(work.row_length), Real(work.epsilon));
}

template <class T>
NNORM_INLINE void set_state(RowState<Arithmetic<T>>& row, const RowSums<Arithmetic<T>, 4>& of_row, const RowProblem<T>& work) {
  using Real = Arithmetic<T>;
  Real sums[4];
  of_row.total(sums);
  row.psi = RowBranches<Accurate, Real>::from(sums, Real(1) / Real(work.row_length), Real(work.delta));
}

// Stands before the body of a lambda. A call would read the captured variables from memory for each tile, which took up
// to a sixth of the time.
#define NNORM_INLINED __attribute__((always_inline))

// Runs a pass that has sums: sum_tile(position, n, sums) computes those of a tile of n elements.
template <size_t count, class T, class SumTile>
NNORM_INLINE void sum_row(const RowProblem<T>& work, RowState<Arithmetic<T>>& row, const SumTile& sum_tile) {
  RowSums<Arithmetic<T>, count> sums;
  for (size_t at = 0; at < work.row_length; at += row_tile) {
    Arithmetic<T> of_tile[count];
    sum_tile(at, elements_of_tile(work.row_length, at), of_tile);
    sums.add(of_tile);
  }
  set_state(row, sums, work);
}

// Writes the result of a tile x that starts at `position` of its row.
template <class T>
NNORM_INLINE void result_of_tile(const RowProblem<T>& work, size_t row, size_t position, const Arithmetic<T>* x, size_t n,
                                 const RowState<Arithmetic<T>>& state, const Arithmetic<T>* integer,
                                 const Arithmetic<T>* fraction) {
  T* y = work.y + row * work.row_length + position;
  if constexpr (converts_whole_tiles<T>) {
    alignas(64) Arithmetic<T> wide[row_tile];
    powers_of_tile(work, row, position, x, wide, n, state.standardize, integer, fraction, state.psi.pos, state.psi.neg);
    narrow_tile(wide, n, y);
  } else {
    powers_of_tile(work, row, position, x, y, n, state.standardize, integer, fraction, state.psi.pos, state.psi.neg);
  }
}

// Computes the rows first, …, first + count − 1, pass by pass. A chain of slow operations follows the sums of each row;
// the CPU overlaps it with the sums of the next row.
template <class T>
void run_rows(const RowProblem<T>& work, size_t first, size_t count, RowBuffers<T>& buffers) {
  using Real = Arithmetic<T>;
  const size_t length = work.row_length;
  const T* x = work.x + first * length;
  // The position of a tile in the buffers. All tiles of a row that is too long to be kept use the same memory.
  const bool keep = length <= longest_kept_row;
  const auto place = [keep, length](size_t r, size_t at) { return keep ? r * length + at : 0; };
  // The elements of a tile of row r as Real. 16-bit elements are widened once if the row is kept, else in every pass.
  Real* const wide_rows = buffers.wide;
  const auto tile = [=](size_t r, size_t at, size_t n, bool is_first_pass) -> const Real* {
    if constexpr (sizeof(T) == sizeof(Real)) {
      return x + r * length + at;
    } else {
      Real* wide = wide_rows + place(r, at);
      if (is_first_pass || !keep) widen_tile(x + r * length + at, n, wide);
      return wide;
    }
  };

  RowState<Real> state[rows_together];
  for (size_t r = 0; r < count; ++r)
    sum_row<1>(work, state[r], [&](size_t at, size_t n, Real(&sums)[1]) NNORM_INLINED { sum(tile(r, at, n, true), n, sums); });
  for (size_t r = 0; r < count; ++r)
    sum_row<2>(work, state[r], [&](size_t at, size_t n, Real(&sums)[2]) NNORM_INLINED {
      moments(tile(r, at, n, false), n, state[r].standardize.mean, sums);
    });
  for (size_t r = 0; r < count; ++r)
    sum_row<4>(work, state[r], [&](size_t at, size_t n, Real(&sums)[4]) NNORM_INLINED {
      Real *integer = buffers.integer + place(r, at), *fraction = buffers.fraction + place(r, at);
      // Rows that are too long to be kept are not prefetched: the next row may evict this one from the cache, which
      // cost 15 % for rows of 100 000 floats on 2 threads.
      if (keep && first + r + count < work.rows) prefetch(x + (r + count) * length + at, n);
      const Real* elements = tile(r, at, n, false);
      logarithms(elements, n, state[r].standardize, integer, fraction);
      lmbda_sums(elements, n, state[r].standardize, integer, fraction, sums);
    });
  for (size_t r = 0; r < count; ++r) {
    for (size_t at = 0; at < length; at += row_tile) {
      const size_t n = elements_of_tile(length, at);
      Real *integer = buffers.integer + place(r, at), *fraction = buffers.fraction + place(r, at);
      const Real* elements = tile(r, at, n, false);
      if (!keep) logarithms(elements, n, state[r].standardize, integer, fraction);
      result_of_tile(work, first + r, at, elements, n, state[r], integer, fraction);
    }
  }
}

template <class T>
void layer_group_normal_norm(const RowProblem<T>& work, size_t begin, size_t end) {
  RowBuffers<T> buffers;
  const size_t rows = rows_per_item(work), beyond = end * rows, last = beyond < work.rows ? beyond : work.rows;
  const size_t rows_that_fit = work.row_length ? longest_kept_row / work.row_length : 0;
  const size_t together = rows_that_fit > rows_together ? rows_together : (rows_that_fit ? rows_that_fit : 1);
  for (size_t row = begin * rows; row < last; row += together)
    run_rows(work, row, last - row < together ? last - row : together, buffers);
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
