// Copies sets that lie side by side to arrays, and back, through registers.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "../cpu/prefetch.h"
#include "nnorm/mathematics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

#if defined(__clang__)
#define NNORM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define NNORM_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a < b){__VA_ARGS__})  // GCC 11 has no other
#endif

// a[0], b[0], a[1], … of the lower halves or of the upper halves.
template <bool upper, class Vector>
NNORM_INLINE Vector interleaved(Vector a, Vector b) {
  if constexpr (sizeof(a[0]) == 8)
    return upper ? NNORM_SHUFFLE(a, b, 1, 3) : NNORM_SHUFFLE(a, b, 0, 2);
  else
    return upper ? NNORM_SHUFFLE(a, b, 2, 6, 3, 7) : NNORM_SHUFFLE(a, b, 0, 4, 1, 5);
}

// A square of vectors of 16 bytes, which every processor has: to[j][i] = from[i][j].
template <class Real>
NNORM_INLINE void transpose_square(const Real* from, size_t from_stride, Real* to, size_t to_stride) {
  constexpr size_t width = 16 / sizeof(Real);
  typedef Real Vector __attribute__((vector_size(16)));
  Vector rows[width];
  NNORM_UNROLL for (size_t i = 0; i < width; ++i) std::memcpy(&rows[i], from + i * from_stride, 16);
  // Each stage interleaves the first half of the vectors with the second.
  for (size_t stage = 1; stage < width; stage *= 2) {
    Vector next[width];
    NNORM_UNROLL for (size_t i = 0; i < width / 2; ++i) {
      next[2 * i] = interleaved<false>(rows[i], rows[i + width / 2]);
      next[2 * i + 1] = interleaved<true>(rows[i], rows[i + width / 2]);
    }
    NNORM_UNROLL for (size_t i = 0; i < width; ++i) rows[i] = next[i];
  }
  NNORM_UNROLL for (size_t i = 0; i < width; ++i) std::memcpy(to + i * to_stride, &rows[i], 16);
}

enum class Direction { to_arrays, from_arrays };

// Copies `count` neighboring sets of `length` elements, `between` elements of the tensor apart, to arrays that are `stride`
// apart, or back.
template <Direction direction, class Tensor, class Array>
void copy_strip(Tensor* tensor, size_t between, Array* arrays, size_t stride, size_t length, size_t count) {
  using Real = std::remove_const_t<Tensor>;
  constexpr size_t width = 16 / sizeof(Real);
  // Processors fetch neighboring lines ahead, but these lie apart, often in other pages. They are fetched to the second cache,
  // because lines that are a power of 2 apart share a few sets of the first.
  constexpr size_t ahead = 64;  // elements
  const auto copy_element = [&](size_t at, size_t set) NNORM_INLINED {
    if constexpr (direction == Direction::to_arrays)
      arrays[set * stride + at] = tensor[at * between + set];
    else
      tensor[at * between + set] = arrays[set * stride + at];
  };
  size_t at = 0;
  for (; at + width <= length; at += width) {
    if (at + ahead + width <= length)
      NNORM_UNROLL for (size_t i = 0; i < width; ++i)
          __builtin_prefetch(tensor + (at + ahead + i) * between, direction == Direction::from_arrays, second_level);
    size_t set = 0;
    for (; set + width <= count; set += width) {
      Tensor* const of_tensor = tensor + at * between + set;
      Array* const of_arrays = arrays + set * stride + at;
      if constexpr (direction == Direction::to_arrays)
        transpose_square(of_tensor, between, of_arrays, stride);
      else
        transpose_square(of_arrays, stride, of_tensor, between);
    }
    for (; set < count; ++set)
      for (size_t i = 0; i < width; ++i) copy_element(at + i, set);
  }
  for (; at < length; ++at)
    for (size_t set = 0; set < count; ++set) copy_element(at, set);
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
