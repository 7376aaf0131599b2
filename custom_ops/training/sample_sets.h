// How the kernels read and write a sample set: tile by tile, each tile as an array.
#pragma once

#include <algorithm>
#include <cstring>

#include "nnorm/row_statistics.h"
#include "problem.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

constexpr size_t kept_elements = 16384;  // of a set of at most this length, results are kept from one pass to the next

template <class Real>
struct alignas(64) TrainingBuffers {
  Real gradient[row_tile], noise[row_tile], psi[row_tile], weight[row_tile];
  Real x[kept_elements], y[kept_elements], first[kept_elements], second[kept_elements], third[kept_elements];
};

// A tile of equal numbers: the weights of a layer that has none, and the noise of one that adds none.
template <class Real>
struct EqualNumbers {
  Real of_tile[row_tile];
  constexpr explicit EqualNumbers(Real value) : of_tile() {
    for (Real& each : of_tile) each = value;
  }
};
template <class Real>
inline constexpr EqualNumbers<Real> zeros{0};
template <class Real>
inline constexpr EqualNumbers<Real> ones{1};

// Set number `number` of a problem, at place number `row` of the tensors.
template <class Real>
class SampleSet {
 public:
  SampleSet(const TrainingProblem& problem, uint64_t number, uint64_t row)
      : problem(problem), number(number), row(row), length(size_t(problem.length())), is_kept(length <= kept_elements) {}

  // Calls visit(position, n) for each tile.
  template <class Visit>
  NNORM_INLINE void for_each_tile(const Visit& visit) const {
    for (size_t at = 0; at < length; at += row_tile) visit(at, length - at < row_tile ? length - at : row_tile);
  }

  // The place of a tile in a buffer of kept_elements.
  size_t place(size_t position) const { return is_kept ? position : 0; }

  // A tile of a tensor; it is copied to `buffer` if it lies in several segments. A null tensor gives null.
  const Real* read(const void* tensor, size_t position, size_t n, Real* buffer) const {
    const Real* from = static_cast<const Real*>(tensor);
    if (from == nullptr || is_array(position, n)) return from == nullptr ? nullptr : from + offset(position);
    for_each_run(position, n, [&](size_t at, size_t i, size_t size) { std::memcpy(buffer + i, from + at, size * sizeof(Real)); });
    return buffer;
  }

  // read() in a later pass: the copy of a tile of a kept set is still in `buffer`.
  const Real* read_again(const void* tensor, size_t position, size_t n, Real* buffer) const {
    return is_kept && !is_array(position, n) ? buffer : read(tensor, position, n, buffer);
  }

  // Where the numbers of a tile must be before write() is called.
  Real* target(void* tensor, size_t position, size_t n, Real* buffer) const {
    return is_array(position, n) ? static_cast<Real*>(tensor) + offset(position) : buffer;
  }
  void write(void* tensor, size_t position, size_t n, const Real* buffer) const {
    if (is_array(position, n)) return;
    Real* to = static_cast<Real*>(tensor);
    for_each_run(position, n, [&](size_t at, size_t i, size_t size) { std::memcpy(to + at, buffer + i, size * sizeof(Real)); });
  }

  // Calls visit(i, size, number of the weight) for each run of a tile that has one weight; if every element has its own
  // weight, once for the whole tile.
  template <class Visit>
  NNORM_INLINE void for_each_weight(size_t position, size_t n, const Visit& visit) const {
    const size_t run = size_t(problem.run);
    if (run == 1) {
      visit(size_t(0), n, weight_of(position));
      return;
    }
    for (size_t i = 0; i < n;) {
      const size_t left = run - (position + i) % run, size = left < n - i ? left : n - i;
      visit(i, size, weight_of(position + i));
      i += size;
    }
  }

  bool has_one_weight(size_t position, size_t n) const { return position % size_t(problem.run) + n <= size_t(problem.run); }

  // The weight of a tile that has one, else those of its elements, for which `buffer` has room.
  const Real* weights(size_t position, size_t n, Real* buffer) const {
    const Real* const all = static_cast<const Real*>(problem.weight);
    if (all == nullptr) return ones<Real>.of_tile;
    if (problem.run == 1 || has_one_weight(position, n)) return all + weight_of(position);
    for_each_weight(position, n, [=](size_t i, size_t size, size_t number) { std::fill_n(buffer + i, size, all[number]); });
    return buffer;
  }

 private:
  // The number of the weight of an element.
  size_t weight_of(size_t position) const {
    return size_t(number % problem.period) * (length / size_t(problem.run)) + position / size_t(problem.run);
  }
  bool is_array(size_t position, size_t n) const {
    return position % size_t(problem.segment_length) + n <= size_t(problem.segment_length);
  }
  size_t offset(size_t position) const {
    const size_t segment = size_t(problem.segment_length);
    return size_t(row * problem.set_stride) + position / segment * size_t(problem.segment_stride) + position % segment;
  }

  // Calls visit(offset in the tensor, index in the tile, size) for each run of a tile that lies in one segment.
  template <class Visit>
  void for_each_run(size_t position, size_t n, const Visit& visit) const {
    const size_t segment = size_t(problem.segment_length);
    for (size_t i = 0; i < n;) {
      const size_t left = segment - (position + i) % segment, size = left < n - i ? left : n - i;
      visit(offset(position + i), i, size);
      i += size;
    }
  }

 public:
  const TrainingProblem& problem;
  const uint64_t number, row;
  const size_t length;
  const bool is_kept;
};

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
