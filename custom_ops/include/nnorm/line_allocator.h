// Memory that is aligned to a line of the cache: a load of a whole register reads one line, not two.
#pragma once

#include <cstddef>
#include <new>

namespace nnorm {

constexpr size_t cache_line = 64;  // in bytes; a register of AVX-512 has as many

template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(cache_line))); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(cache_line)); }
  friend bool operator==(LineAllocator, LineAllocator) { return true; }
  friend bool operator!=(LineAllocator, LineAllocator) { return false; }
};

}  // namespace nnorm
