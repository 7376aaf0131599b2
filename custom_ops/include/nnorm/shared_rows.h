// Long rows of a RowProblem that several threads compute together.
//
// Four phases compute a row, each over all of its tiles: sums, moments, sums for λ̂, powers. A phase is distributed
// over threads in parts of a few tiles, and stores the sums of each tile. Between two phases one thread adds them in
// the order of the tiles, as a thread that computes a row alone does. So the result has the same bits for any number of
// threads.
#pragma once

#include <algorithm>
#include <cstddef>

#include "nnorm/problems.h"
#include "nnorm/row_statistics.h"

namespace nnorm {

// As many as an item of the other kernels has (elements_per_item).
constexpr size_t elements_per_part = 4 * row_tile;
// The shortest row that threads compute together. Between phases they wait for each other, which takes longer if they
// do not spin. Two threads of an Intel Xeon with AVX-512 took, relative to one thread (least of 300 runs): for 32768
// floats 0.76 if they spin and 1.08 if not; for 200704 floats at most 0.58 and 0.79.
constexpr size_t shortest_shared_row = 32 * elements_per_part;

enum class RowPhase { sum, moments, lmbda_sums, powers };
constexpr RowPhase row_phases[] = {RowPhase::sum, RowPhase::moments, RowPhase::lmbda_sums, RowPhase::powers};

// The sums of a tile. The phases that have sums use one, two or four of them.
template <class Real>
struct TileSums {
  Real sums[4];
};

// What a phase of a row needs from the phases before it.
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

// How threads share the rows of a problem: one thread computes each of the first `alone` rows; all threads compute the
// others together, `at_once` rows at a time.
struct RowDivision {
  size_t alone, at_once, parts, tiles;
};

template <class T>
RowDivision divide_rows(const RowProblem<T>& problem, size_t threads) {
  const size_t length = problem.row_length;
  if (length < shortest_shared_row) return {problem.rows, 0, 0, 0};
  // The rows that remain when every thread has computed as many as the others. To compute them together pays if at
  // least half of the threads would be idle.
  const size_t left = problem.rows % threads;
  if (left == 0 || 2 * left > threads) return {problem.rows, 0, 0, 0};
  const size_t parts = (length + elements_per_part - 1) / elements_per_part;
  // One row at a time, which stays in the caches, or more if a row has fewer than four parts for each thread.
  return {problem.rows - left, std::min(left, (4 * threads + parts - 1) / parts), parts, (length + row_tile - 1) / row_tile};
}

// Computes the rows begin, …, end − 1 of a problem together. `sums` has room for all of their tiles, `rows` for all of
// the rows. over_items(work, kernel) calls the kernel for all items of the work and returns when they are done.
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
