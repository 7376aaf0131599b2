// Sets that lie side by side, as the channels of [N, C] and of maps whose channels are last. A strip of neighboring sets, as
// wide as a cache line, is copied to arrays and back, because the kernels read arrays. Each thread has the arrays of one strip
// of a part: all of them together are as large as the tensors only if there are as many threads as strips.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "sample_sets.h"
#include "transpose.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

template <class Real>
constexpr size_t sets_of_strip = 64 / sizeof(Real);

// From the array of a set to that of the next: an odd number of cache lines, so that the arrays share no set of the cache.
template <class Real>
size_t strip_stride(const TrainingProblem& problem) {
  constexpr size_t line = sets_of_strip<Real>;
  return ((size_t(problem.length()) / line + 1) | 1) * line;
}

// Of how many sets a part is made: of whole strips, because parts that share a cache line read it again; but of single sets if
// there are more parts than strips, because threads without a part would wait.
template <class Real>
uint64_t sets_of_unit(const TrainingProblem& problem) {
  const uint64_t strips = (problem.sets + sets_of_strip<Real> - 1) / sets_of_strip<Real>;
  return problem.parts <= strips ? sets_of_strip<Real> : 1;
}

// The first set of a part, and the end of the part before.
template <class Real>
uint64_t first_set(const TrainingProblem& problem, uint64_t part) {
  const uint64_t unit = problem.element_stride == 1 ? 1 : sets_of_unit<Real>(problem);
  return std::min(problem.sets, (problem.sets + unit - 1) / unit * part / problem.parts * unit);
}

// The elements of the arrays for one tensor.
template <class Real>
size_t strip_size(const TrainingProblem& problem) {
  const uint64_t of_part = sets_of_unit<Real>(problem) > 1 ? problem.sets : (problem.sets + problem.parts - 1) / problem.parts;
  return size_t(std::min(of_part, uint64_t(sets_of_strip<Real>))) * strip_stride<Real>(problem);
}

// Calls run(set) for the sets first, …, end − 1. `read` are the tensors that run reads, and `written` is the one that it
// writes. `written` has the arrays of the first of `read`: a pass writes an element after it has read it for the last time.
template <class Real, class Run>
void for_each_set_of_strips(const TrainingProblem& problem, uint64_t first, uint64_t end, Real* arrays,
                            std::initializer_list<const void* TrainingProblem::*> read, void* TrainingProblem::*written,
                            const Run& run) {
  TrainingProblem of_strip = problem;
  of_strip.segments = 1;
  of_strip.segment_length = problem.length();
  of_strip.set_stride = strip_stride<Real>(problem);
  const size_t length = size_t(problem.length()), between = size_t(problem.element_stride);
  const size_t stride = strip_stride<Real>(problem);
  for (uint64_t number = first; number < end; number += sets_of_strip<Real>) {
    const size_t count = size_t(std::min(end - number, uint64_t(sets_of_strip<Real>)));
    Real* next = arrays;
    for (const auto tensor : read) {
      const Real* const from = static_cast<const Real*>(problem.*tensor) + number;
      copy_strip<Direction::to_arrays>(from, between, next, stride, length, count);
      of_strip.*tensor = next;
      next += strip_size<Real>(problem);
    }
    of_strip.*written = arrays;
    for (size_t i = 0; i < count; ++i) run(SampleSet<Real>(of_strip, number + i, i));
    Real* const to = static_cast<Real*>(problem.*written) + number;
    copy_strip<Direction::from_arrays>(to, between, arrays, stride, length, count);
  }
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
