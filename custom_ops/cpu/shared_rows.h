// Rows of LayerNormalNorm and GroupNormalNorm that several threads compute together (nnorm/shared_rows.h). The
// functions that compute a tile and add the sums of a row are those of layer_group_normal_norm.h.
#pragma once

#include "layer_group_normal_norm.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

template <class Real>
NNORM_INLINE RowState<Real> state_of(const SharedRow<Real>& row) {
  return {{row.mean, row.inverse, row.correction}, {{row.eta_pos, row.gain_pos}, {row.eta_neg, row.gain_neg}}};
}

// The first `count` numbers of an array, as an array.
template <size_t count, class Real>
NNORM_INLINE Real (&first_of(Real (&all)[4]))[count] {
  return *reinterpret_cast<Real(*)[count]>(&all);
}

// Buffers for one tile.
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

// Computes the current phase of one tile.
template <class T>
void compute_tile(const SharedRows<T>& work, size_t row, size_t tile, TileBuffers<T>& buffers) {
  using Real = Arithmetic<T>;
  const RowProblem<T>& problem = work.problem;
  const size_t position = tile * row_tile, n = elements_of_tile(problem.row_length, position);
  const RowState<Real> state = state_of(work.rows[row - work.begin]);
  Real(&sums)[4] = work.sums[(row - work.begin) * work.tiles + tile].sums;
  const Real* x = buffers.widened(problem.x + row * problem.row_length + position, n);
  if (work.phase == RowPhase::sum) {
    sum(x, n, first_of<1>(sums));
  } else if (work.phase == RowPhase::moments) {
    moments(x, n, state.standardize.mean, first_of<2>(sums));
  } else {
    logarithms(x, n, state.standardize, buffers.integer, buffers.fraction);
    if (work.phase == RowPhase::lmbda_sums)
      lmbda_sums(x, n, state.standardize, buffers.integer, buffers.fraction, sums);
    else
      result_of_tile(problem, row, position, x, n, state, buffers.integer, buffers.fraction);
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

template <size_t count, class T>
void end_of_row(const SharedRows<T>& work, size_t row) {
  using Real = Arithmetic<T>;
  RowSums<Real, count> sums;
  for (size_t tile = 0; tile < work.tiles; ++tile) sums.add(first_of<count>(work.sums[row * work.tiles + tile].sums));
  SharedRow<Real>& shared = work.rows[row];
  RowState<Real> state = state_of(shared);
  set_state(state, sums, work.problem);
  shared = {state.standardize.mean, state.standardize.inverse, state.standardize.correction,
            state.psi.pos.eta,      state.psi.pos.gain,        state.psi.neg.eta,
            state.psi.neg.gain};
}

// Adds the sums of each row's tiles in order, and stores what the next phase needs of them.
template <class T>
void end_of_phase(const SharedRows<T>& work) {
  for (size_t row = 0; row < work.end - work.begin; ++row) {
    if (work.phase == RowPhase::sum) end_of_row<1>(work, row);
    if (work.phase == RowPhase::moments) end_of_row<2>(work, row);
    if (work.phase == RowPhase::lmbda_sums) end_of_row<4>(work, row);
  }
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
