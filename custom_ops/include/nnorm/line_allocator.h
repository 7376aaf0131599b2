// An allocator of memory that is aligned to a cache line: a load of a whole register then reads one line, not two.
#pragma once

#include <cstddef>
#include <new>

namespace nnorm {

constexpr size_t cache_line = 64;  // bytes, the size of an AVX-512 register

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
