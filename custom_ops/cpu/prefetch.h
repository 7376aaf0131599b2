// Prefetching of memory that the kernels read next.
#pragma once

#include <cstddef>

#include "nnorm/mathematics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// The caches, as __builtin_prefetch numbers them. The second-level cache can wait for more lines at a time, so it is
// better for many lines that are in main memory.
enum CacheLevel { second_level = 2, first_level = 3 };

// A CPU prefetches by itself while it reads sequentially, but not while it computes with data in the first-level cache.
template <CacheLevel cache = first_level, class T>
NNORM_INLINE void prefetch(const T* x, size_t n) {
  for (size_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(x + i, 0, cache);
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
