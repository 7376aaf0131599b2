// Memory that is read soon.
#pragma once

#include <cstddef>

#include "nnorm/mathematics.h"

namespace nnorm {
inline namespace NNORM_TARGET {

// A CPU prefetches by itself while it reads sequentially, but not while it computes on what is in the first-level cache.
template <class T>
NNORM_INLINE void prefetch(const T* x, size_t n) {
  for (size_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
}

}  // namespace NNORM_TARGET
}  // namespace nnorm
