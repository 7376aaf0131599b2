// Sets that lie side by side, as the channels of [N, C] and of maps whose channels are last. The kernels read arrays. So a strip
// of neighboring sets, as wide as a cache line, is copied to arrays and back: each cache line is read once, and no copy of a
// whole tensor is made. The arrays of all threads are at most as large as the tensors.
#pragma once

#include "sample_sets.h"
#include "transpose.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

template <class Real>
constexpr size_t sets_of_strip = cache_line / sizeof(Real);

// From the array of a set to that of the next: an odd number of cache lines, so that the arrays share no set of the cache.
template <class Real>
size_t strip_stride(const TrainingProblem& problem) {
  constexpr size_t line = sets_of_strip<Real>;
  return ((size_t(problem.length()) / line + 1) | 1) * line;
}

// The elements of the arrays for one tensor.
template <class Real>
size_t strip_size(const TrainingProblem& problem) {
  return size_t(std::min(problem.sets, uint64_t(sets_of_strip<Real>))) * strip_stride<Real>(problem);
}

// Calls run(set) for each set of a part that lies in strips. `read` are the tensors that run reads, and `written` is what it
// writes, in place of the first of them.
template <class Real, class Run>
void for_each_set_of_strips(const TrainingProblem& problem, uint64_t first, uint64_t end, Real* arrays,
                            std::initializer_list<const void* TrainingProblem::*> read, void* TrainingProblem::*written,
                            const Run& run) {
  TrainingProblem of_strip = problem;
  of_strip.segments = 1;
  of_strip.segment_length = problem.length();
  const size_t stride = strip_stride<Real>(problem), length = size_t(problem.length()), between = size_t(problem.element_stride);
  of_strip.set_stride = stride;
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
