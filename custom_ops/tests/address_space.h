// Address space for tensors of more than 2^32 elements, of which a test touches a small part.
#pragma once

#include <sys/mman.h>

#include "nnorm/number_types.h"

namespace nnorm_test {

constexpr size_t size = (size_t(1) << 32) + (size_t(1) << 25) + 123456, beyond = 4096;

// `size` + `beyond` zeros. A page takes memory only once it is written.
class AddressSpace {
 public:
  AddressSpace() {
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = address == MAP_FAILED ? nullptr : static_cast<nnorm::Float16*>(address);
  }
  ~AddressSpace() {
    if (data_) munmap(data_, bytes);
  }
  nnorm::Float16* data() const { return data_; }

 private:
  static constexpr size_t bytes = (size + beyond) * sizeof(nnorm::Float16);
  nnorm::Float16* data_;
};

inline double number_at(size_t i) { return double(i % 31) / 8 - 2; }

inline void fill(nnorm::Float16* x, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) nnorm::narrow(float(number_at(i)), x[i]);
}

inline bool all_zero(const nnorm::Float16* x, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i)
    if (x[i].bits != 0) return false;
  return true;
}

}  // namespace nnorm_test
