// Replaces new and delete of a program, so that allocations of the code under test can fail (failing.h). They are in a
// file of their own, because compilers warn if they see only one of new and delete.
#include <cstdlib>
#include <new>

#include "failing.h"

void* operator new(std::size_t size) {
  if (nnorm_test::allocation_fails()) throw std::bad_alloc();
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return nnorm_test::allocation_fails() ? nullptr : std::malloc(size ? size : 1);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  const std::size_t boundary = std::size_t(alignment), whole = (size + boundary - 1) / boundary * boundary;
  if (nnorm_test::allocation_fails()) throw std::bad_alloc();
  if (void* memory = std::aligned_alloc(boundary, whole ? whole : boundary)) return memory;
  throw std::bad_alloc();
}
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new[](std::size_t size, const std::nothrow_t& tag) noexcept { return operator new(size, tag); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
