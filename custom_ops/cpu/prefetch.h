// Memory that is read soon.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nnorm/mathematics.h"

namespace nnorm {
inline namespace NNORM_TARGET {

// A CPU prefetches by itself while it reads sequentially, but not while it computes on what is in the first-level cache.
template <class T>
NNORM_INLINE void prefetch(const T* x, size_t n) {
  for (size_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
}

// Into the second-level cache, which waits for more lines at a time: for many that are in the main memory.
NNORM_INLINE void prefetch_far(const uint8_t* x, size_t n) {
  for (size_t i = 0; i < n; i += 64) __builtin_prefetch(x + i, 0, 2);
}

}  // namespace NNORM_TARGET
}  // namespace nnorm
