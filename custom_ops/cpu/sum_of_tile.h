// Sums over a tile of a row, in the order of nnorm/row_statistics.h. A vector holds the partial sums of a few lanes.
#pragma once

#include "nnorm/row_statistics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// The partial sums take at most `most_registers` registers at a time: more would leave too few for the terms.
#if defined(__AVX512F__)
constexpr size_t register_bytes = 64, most_registers = 8;
#elif defined(__AVX2__)
constexpr size_t register_bytes = 32, most_registers = 4;
#else
constexpr size_t register_bytes = 16, most_registers = 4;
#endif

// Loads `width` numbers, a register or less.
template <class Real, size_t width>
NNORM_INLINE auto vector_at(const Real* from) {
  typedef Real Vector __attribute__((vector_size(width * sizeof(Real))));
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Adds the upper half of 2·half numbers to the lower half, and so on until one number is left. The vectors are
// explicit: compilers would write the rest of a vector to memory and read it again.
template <size_t half, class Real>
NNORM_INLINE Real sum_of_halves(const Real* numbers) {
  if constexpr (half == 1) {
    return numbers[0] + numbers[1];
  } else {
    constexpr size_t most = register_bytes / sizeof(Real), width = half < most ? half : most;
    Real sums[half];
    NNORM_UNROLL for (size_t i = 0; i < half; i += width) {
      const auto sum = vector_at<Real, width>(numbers + i) + vector_at<Real, width>(numbers + half + i);
      std::memcpy(sums + i, &sum, sizeof sum);
    }
    return sum_of_halves<half / 2>(sums);
  }
}

// Computes `count` sums over n elements. add(i, exists, l, lane) adds the terms of element i to lane[0][l], lane[1][l],
// …, or zeros if `exists` is false. Each sum has `partials` partial sums (row_statistics.h); of a short tile only the
// first `few_partials` are used.
template <class Real, size_t count>
class TileSum {
 public:
  template <class Add>
  NNORM_INLINE TileSum(size_t n, const Add& add) : used_(n <= few_partials ? few_partials : partials) {
    if (n == row_tile) {
      for (size_t first = 0; first < partials; first += width) add_vectors<width>(first, row_tile, add);
      return;
    }
    const size_t whole = n / width * width;
    size_t first = 0, i = whole;
    for (; first < used_ && first < whole; first += width) add_vectors<width>(first, whole, add);
    for (; first < used_ && first + register_width <= n; first += register_width, i = first)
      add_vectors<register_width>(first, n, add);
    // A zero whose value compilers cannot see: they would write a constant in two stores, and the vector load that
    // reads both would wait for them.
    const Real zero = bounds(Real(0)).zero;
    for (; first < used_; first += register_width)
      for (size_t s = 0; s < count; ++s) {
#pragma omp simd
        for (size_t l = 0; l < register_width; ++l) sums_[s][first + l] = zero;
      }
    // The rest: the last elements of each lane.
    for (; i + register_width <= n; i += register_width) {
      const Part part{sums_, i % partials};
#pragma omp simd
      for (size_t l = 0; l < register_width; ++l) add(i + l, true, l, part);
    }
    if (i < n) {
      const Part part{sums_, i % partials};
      const int32_t left = int32_t(n - i);  // as wide as the elements: 64 bits would need twice as many vectors
#pragma omp simd
      for (int32_t l = 0; l < int32_t(register_width); ++l) add(i + size_t(l), l < left, size_t(l), part);
    }
  }

  // Partial sums that were not used are 0, which changes no sum.
  NNORM_INLINE Real operator[](size_t s) const {
    return used_ == few_partials ? sum_of_halves<few_partials / 2>(sums_[s]) : sum_of_halves<partials / 2>(sums_[s]);
  }

 private:
  static constexpr size_t partials = tile_lanes * lane_sums, few_partials = partials / 4;
  static constexpr size_t register_width = register_bytes / sizeof(Real);
  static constexpr size_t partials_that_fit = most_registers * register_width / count;
  static constexpr size_t width = partials_that_fit < partials ? partials_that_fit : partials;

  // The partial sums of one vector, from number `first` on.
  struct Part {
    Real (*numbers)[partials];
    size_t first;
    NNORM_INLINE Real* operator[](size_t s) const { return numbers[s] + first; }
  };

  // Adds the elements of partial sums first, …, first + size − 1 that come before element `end`.
  template <size_t size, class Add>
  NNORM_INLINE void add_vectors(size_t first, size_t end, const Add& add) {
    Real lane[count][size];
#pragma omp simd
    for (size_t l = 0; l < size; ++l) {
      for (size_t s = 0; s < count; ++s) lane[s][l] = 0;
      add(first + l, true, l, lane);
    }
    for (size_t i = first + partials; i < end; i += partials) {
#pragma omp simd
      for (size_t l = 0; l < size; ++l) add(i + l, true, l, lane);
    }
    for (size_t s = 0; s < count; ++s) {
      NNORM_UNROLL for (size_t l = 0; l < size; l += register_width) {
        const auto sums = vector_at<Real, register_width>(lane[s] + l);  // else compilers copy it in two parts
        std::memcpy(sums_[s] + first + l, &sums, sizeof sums);
      }
    }
  }

  alignas(64) Real sums_[count][partials];
  size_t used_;
};

template <class Real, size_t count, class Add>
NNORM_INLINE void sum_of_tile(size_t n, Real (&sums)[count], const Add& add) {
  const TileSum<Real, count> sum(n, add);
  for (size_t s = 0; s < count; ++s) sums[s] = sum[s];
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
