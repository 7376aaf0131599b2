// Long rows of a RowProblem that several threads compute together.
//
// A row is computed in four phases, each over all tiles of the row: sums, moments, sums for λ̂, powers. A phase is
// distributed over threads in parts of a few tiles. It leaves the sums of each tile in `sums`; between two phases one thread
// adds these in the order of the tiles, as a thread that computes the row alone does. So the result is the same, to the bit,
// on any number of threads.
#pragma once

#include <algorithm>
#include <cstddef>

#include "nnorm/problems.h"
#include "nnorm/row_statistics.h"

namespace nnorm {

// The elements of a part: as many as an item of other kernels has.
constexpr size_t elements_per_part = 4 * row_tile;
// The shortest row that is shared. Between its phases threads wait for each other, which takes longer where they do not spin:
// on 2 threads of an Intel Xeon with AVX-512 a row of 32768 floats took 0.76 times as long as alone if they spin, and 1.08 if
// not; one of 200704 floats at most 0.58 and 0.79 (the least of 300 runs).
constexpr size_t shortest_shared_row = 32 * elements_per_part;

enum class RowPhase { sum, moments, lmbda_sums, powers };
constexpr RowPhase row_phases[] = {RowPhase::sum, RowPhase::moments, RowPhase::lmbda_sums, RowPhase::powers};

// The sums of a tile: one, two or four of them in the phases that have sums.
template <class Real>
struct TileSums {
  Real sums[4];
};

// What the phases of a row need from those before them.
template <class Real>
struct SharedRow {
  Real mean, inverse, correction;
  Real eta_pos, gain_pos, eta_neg, gain_neg;
};

template <class T>
struct SharedRows {
  RowProblem<T> problem;
  size_t begin, end;  // the rows of the problem
  RowPhase phase;
  size_t parts;                    // of a row
  size_t tiles;                    // of a row
  TileSums<Arithmetic<T>>* sums;   // [end − begin][tiles]
  SharedRow<Arithmetic<T>>* rows;  // [end − begin]
};

template <class T>
size_t count_items(const SharedRows<T>& work) {
  return (work.end - work.begin) * work.parts;
}

// How the rows of a problem are computed on so many threads: the first `alone` of them by one thread each, the rest together,
// `at_once` at a time.
struct RowDivision {
  size_t alone, at_once, parts, tiles;
};

template <class T>
RowDivision divide_rows(const RowProblem<T>& problem, size_t threads) {
  const size_t length = problem.row_length;
  if (length < shortest_shared_row) return {problem.rows, 0, 0, 0};
  // What is left when each thread has had as many rows as every other. Sharing them pays if half of the threads or more
  // would have nothing to do.
  const size_t left = problem.rows % threads;
  if (left == 0 || 2 * left > threads) return {problem.rows, 0, 0, 0};
  const size_t parts = (length + elements_per_part - 1) / elements_per_part;
  // One row at a time stays in the caches; more if one has less than four parts for each thread.
  return {problem.rows - left, std::min(left, (4 * threads + parts - 1) / parts), parts, (length + row_tile - 1) / row_tile};
}

// Computes the rows begin, …, end − 1 of a problem together. `sums` has room for the tiles of all of them, `rows` for as many
// rows. over_items(work, kernel) calls the kernel for all items of the work and returns when they are done.
template <class T, class Kernels, class OverItems>
void compute_together(const RowProblem<T>& problem, size_t begin, size_t end, const RowDivision& division,
                      TileSums<Arithmetic<T>>* sums, SharedRow<Arithmetic<T>>* rows, const Kernels& kernels,
                      OverItems over_items) {
  SharedRows<T> work{problem, begin, end, RowPhase::sum, division.parts, division.tiles, sums, rows};
  for (const RowPhase phase : row_phases) {
    work.phase = phase;
    over_items(work, kernels.shared_rows);
    kernels.end_of_phase(work);
  }
}

}  // namespace nnorm
