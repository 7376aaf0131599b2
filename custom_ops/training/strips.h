// Sets that lie side by side, as the channels of [N, C] and of maps whose channels are last. The kernels read arrays. So a strip
// of neighboring sets, as wide as a cache line, is copied to arrays and back: each cache line is read once, and no copy of a
// whole tensor is made. The arrays of all threads are at most as large as the tensors.
#pragma once

#include "sample_sets.h"

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

// The elements of the arrays for one tensor.
template <class Real>
size_t strip_size(const TrainingProblem& problem) {
  return size_t(std::min(problem.sets, uint64_t(sets_of_strip<Real>))) * strip_stride<Real>(problem);
}

// Calls copy(offset in the tensor, index in the arrays) for each element of the sets first, …, first + count − 1, in blocks
// that the first level of the cache holds.
template <class Real, class Copy>
NNORM_INLINE void for_each_element(const TrainingProblem& problem, size_t first, size_t count, const Copy& copy) {
  constexpr size_t block = sets_of_strip<Real>;
  const size_t length = size_t(problem.length()), stride = strip_stride<Real>(problem);
  const size_t between = size_t(problem.element_stride);
  const auto copy_block = [&](size_t at, size_t elements, size_t sets) NNORM_INLINED {
    for (size_t set = 0; set < sets; ++set)
      for (size_t i = at; i < at + elements; ++i) copy(first + set + i * between, set * stride + i);
  };
  size_t at = 0;
  for (; at + block <= length && count == block; at += block) copy_block(at, block, block);
  for (; at < length; at += block) copy_block(at, std::min(block, length - at), count);
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
  of_strip.set_stride = strip_stride<Real>(problem);
  for (uint64_t number = first; number < end; number += sets_of_strip<Real>) {
    const size_t count = size_t(std::min(end - number, uint64_t(sets_of_strip<Real>)));
    Real* next = arrays;
    for (const auto tensor : read) {
      const Real* from = static_cast<const Real*>(problem.*tensor);
      for_each_element<Real>(problem, size_t(number), count, [=](size_t at, size_t i) NNORM_INLINED { next[i] = from[at]; });
      of_strip.*tensor = next;
      next += strip_size<Real>(problem);
    }
    of_strip.*written = arrays;
    for (size_t i = 0; i < count; ++i) run(SampleSet<Real>(of_strip, number + i, i));
    Real* const to = static_cast<Real*>(problem.*written);
    for_each_element<Real>(problem, size_t(number), count, [=](size_t at, size_t i) NNORM_INLINED { to[at] = arrays[i]; });
  }
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
