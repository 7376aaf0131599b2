// Rows of LayerNormalNorm and GroupNormalNorm that several threads compute together (nnorm/shared_rows.h), with the same
// functions of a tile, and of the sums of a row, as rows that one thread computes alone.
#pragma once

#include "layer_group_normal_norm.h"

namespace nnorm {
inline namespace NNORM_TARGET {

template <class Real>
NNORM_INLINE Standardization<Real> standardization_of(const SharedRow<Real>& row) {
  return {row.mean, row.inverse, row.correction};
}

template <class Real>
NNORM_INLINE RowState<Real> state_of(const SharedRow<Real>& row) {
  return {standardization_of(row), {row.eta_pos, row.gain_pos}, {row.eta_neg, row.gain_neg}};
}

// The buffers of one tile.
template <class T>
struct alignas(64) TileBuffers {
  Arithmetic<T> integer[row_tile], fraction[row_tile];
  Arithmetic<T> wide[sizeof(T) < sizeof(Arithmetic<T>) ? row_tile : 1];

  NNORM_INLINE const Arithmetic<T>* widened(const T* x, size_t n) {
    if constexpr (sizeof(T) == sizeof(Arithmetic<T>)) {
      return x;
    } else {
      widen_tile(x, n, wide);
      return wide;
    }
  }
};

// The current phase of one tile.
template <class T>
void compute_tile(const SharedRows<T>& work, size_t row, size_t tile, TileBuffers<T>& buffers) {
  using Real = Arithmetic<T>;
  const RowProblem<T>& problem = work.problem;
  const size_t position = tile * row_tile, left = problem.row_length - position, n = left < row_tile ? left : row_tile;
  const SharedRow<Real>& state = work.rows[row - work.begin];
  TileSums& found = work.sums[(row - work.begin) * work.tiles + tile];
  const Real* x = buffers.widened(problem.x + row * problem.row_length + position, n);
  if (work.phase == RowPhase::sum) {
    found.sums[0] = sum(x, n);
  } else if (work.phase == RowPhase::moments) {
    const Moments about = moments(x, n, state.mean);
    found = {about.first, about.second, 0, 0};
  } else {
    logarithms(x, n, standardization_of(state), buffers.integer, buffers.fraction);
    if (work.phase == RowPhase::lmbda_sums) {
      const LmbdaSums<Real> sums = lmbda_sums(x, n, standardization_of(state), buffers.integer, buffers.fraction);
      found = {double(sums.signed_log), double(sums.h_d), double(sums.d), double(sums.curvature)};
    } else {
      result_of_tile(problem, row, position, x, n, state_of(state), buffers.integer, buffers.fraction);
    }
  }
}

template <class T>
void shared_rows(const SharedRows<T>& work, size_t begin, size_t end) {
  TileBuffers<T> buffers;
  constexpr size_t tiles_of_part = elements_per_part / row_tile;
  for (size_t item = begin; item < end; ++item) {
    const size_t first = item % work.parts * tiles_of_part, beyond = first + tiles_of_part;
    for (size_t tile = first; tile < beyond && tile < work.tiles; ++tile)
      compute_tile(work, work.begin + item / work.parts, tile, buffers);
  }
}

// Adds the sums of a row's tiles in their order, and hands on what they become.
template <class T>
void end_of_phase(const SharedRows<T>& work) {
  using Real = Arithmetic<T>;
  const size_t length = work.problem.row_length;
  for (size_t r = 0; r < work.end - work.begin; ++r) {
    const TileSums* const tiles = work.sums + r * work.tiles;
    SharedRow<Real>& row = work.rows[r];
    if (work.phase == RowPhase::sum) {
      double total = 0;
      for (size_t t = 0; t < work.tiles; ++t) total += tiles[t].sums[0];
      row.mean = Real(total / double(length));
    } else if (work.phase == RowPhase::moments) {
      Moments about{0, 0};
      for (size_t t = 0; t < work.tiles; ++t) add(about, Moments{tiles[t].sums[0], tiles[t].sums[1]});
      const Standardization<Real> found = standardization_of(about, row.mean, length, work.problem.epsilon);
      row.mean = found.mean, row.inverse = found.inverse, row.correction = found.correction;
    } else if (work.phase == RowPhase::lmbda_sums) {
      LmbdaSums<double> sums{0, 0, 0, 0};
      for (size_t t = 0; t < work.tiles; ++t) {
        const double(&of_tile)[4] = tiles[t].sums;
        add(sums, LmbdaSums<double>{of_tile[0], of_tile[1], of_tile[2], of_tile[3]});
      }
      RowState<Real> state = state_of(row);
      set_branches(state, sums, length, work.problem.delta);
      row.eta_pos = state.pos.eta, row.gain_pos = state.pos.gain;
      row.eta_neg = state.neg.eta, row.gain_neg = state.neg.gain;
    }
  }
}

}  // namespace NNORM_TARGET
}  // namespace nnorm
