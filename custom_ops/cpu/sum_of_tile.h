// Sums over a tile of a row, in the order of nnorm/row_statistics.h: a vector has the sums of a few lanes.
#pragma once

#include "nnorm/row_statistics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// The sums are held in `most_registers` at a time; more would leave too few for the terms.
#if defined(__AVX512F__)
constexpr size_t register_bytes = 64, most_registers = 8;
#elif defined(__AVX2__)
constexpr size_t register_bytes = 32, most_registers = 4;
#else
constexpr size_t register_bytes = 16, most_registers = 4;
#endif

// The numbers at `from` in a vector of a register or less.
template <class Real, size_t width>
NNORM_INLINE auto vector_at(const Real* from) {
  typedef Real Vector __attribute__((vector_size(width * sizeof(Real))));
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// The upper half of 2·half numbers is added to the lower half, and so on until one is left. With vectors, because compilers
// would write what is left of a vector to memory and read it from there.
template <size_t half, class Real>
NNORM_INLINE Real sum_of_halves(const Real* numbers) {
  if constexpr (half == 1) {
    return numbers[0] + numbers[1];
  } else {
    constexpr size_t most = register_bytes / sizeof(Real), width = half < most ? half : most;
    Real left[half];
    NNORM_UNROLL for (size_t i = 0; i < half; i += width) {
      const auto sum = vector_at<Real, width>(numbers + i) + vector_at<Real, width>(numbers + half + i);
      std::memcpy(left + i, &sum, sizeof sum);
    }
    return sum_of_halves<half / 2>(left);
  }
}

// `count` sums over n elements. add(i, exists, l, lane) adds the terms of element i to lane[0][l], lane[1][l], …; where
// `exists` is false, it adds zeros.
template <class Real, size_t count>
class TileSum {
 public:
  template <class Add>
  NNORM_INLINE TileSum(size_t n, const Add& add) : used_(n <= few ? few : all) {
    if (n == row_tile) {
      for (size_t first = 0; first < all; first += width) add_vectors<width>(first, row_tile, add);
      return;
    }
    const size_t whole = n / width * width;
    size_t first = 0, i = whole;
    for (; first < used_ && first < whole; first += width) add_vectors<width>(first, whole, add);
    for (; first < used_ && first + in_register <= n; first += in_register, i = first) add_vectors<in_register>(first, n, add);
    // A zero that compilers do not know: they write the others in two parts, for which the vector read from there waits.
    const Real zero = bounds(Real(0)).zero;
    for (; first < used_; first += in_register)
      for (size_t s = 0; s < count; ++s) {
#pragma omp simd
        for (size_t l = 0; l < in_register; ++l) sums_[s][first + l] = zero;
      }
    // The rest, the last accesses of their lanes.
    for (; i + in_register <= n; i += in_register) {
      const Part part{sums_, i % all};
#pragma omp simd
      for (size_t l = 0; l < in_register; ++l) add(i + l, true, l, part);
    }
    if (i < n) {
      const Part part{sums_, i % all};
      const int32_t left = int32_t(n - i);  // 32 bits, as many as the elements have: vectors of 64 would be twice as many
#pragma omp simd
      for (int32_t l = 0; l < int32_t(in_register); ++l) add(i + size_t(l), l < left, size_t(l), part);
    }
  }

  // The numbers that were not used are 0, and change no sum.
  NNORM_INLINE Real operator[](size_t s) const {
    return used_ == few ? sum_of_halves<few / 2>(sums_[s]) : sum_of_halves<all / 2>(sums_[s]);
  }

 private:
  static constexpr size_t all = tile_lanes * lane_sums, that_fit = most_registers * register_bytes / sizeof(Real) / count;
  static constexpr size_t width = that_fit < all ? that_fit : all;
  static constexpr size_t few = all / 4, in_register = register_bytes / sizeof(Real);

  // The lanes of the vector from number `first` on.
  struct Part {
    Real (*numbers)[all];
    size_t first;
    NNORM_INLINE Real* operator[](size_t s) const { return numbers[s] + first; }
  };

  // The elements `first` to first + size − 1 of each access that starts before element `end`.
  template <size_t size, class Add>
  NNORM_INLINE void add_vectors(size_t first, size_t end, const Add& add) {
    Real lane[count][size];
#pragma omp simd
    for (size_t l = 0; l < size; ++l) {
      for (size_t s = 0; s < count; ++s) lane[s][l] = 0;
      add(first + l, true, l, lane);
    }
    for (size_t i = first + all; i < end; i += all) {
#pragma omp simd
      for (size_t l = 0; l < size; ++l) add(i + l, true, l, lane);
    }
    for (size_t s = 0; s < count; ++s) {
      NNORM_UNROLL for (size_t l = 0; l < size; l += in_register) {
        const auto sums = vector_at<Real, in_register>(lane[s] + l);  // compilers would copy the numbers in two parts
        std::memcpy(sums_[s] + first + l, &sums, sizeof sums);
      }
    }
  }

  alignas(64) Real sums_[count][all];
  size_t used_;
};

template <class Real, size_t count, class Add>
NNORM_INLINE void sum_of_tile(size_t n, Real (&sums)[count], const Add& add) {
  const TileSum<Real, count> sum(n, add);
  for (size_t s = 0; s < count; ++s) sums[s] = sum[s];
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
