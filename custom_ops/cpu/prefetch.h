// Memory that is read soon.
#pragma once

#include <cstddef>

#include "nnorm/mathematics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// Caches, as __builtin_prefetch numbers them. The second waits for more lines at a time: for many that are in the main memory.
enum CacheLevel { second_level = 2, first_level = 3 };

// A CPU prefetches by itself while it reads sequentially, but not while it computes on what is in the first-level cache.
template <CacheLevel cache = first_level, class T>
NNORM_INLINE void prefetch(const T* x, size_t n) {
  for (size_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(x + i, 0, cache);
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
