// How the kernels for GPUs compute 16-bit tensors (nnorm/cuda_kernels.h). Other types are computed in one way only.
#pragma once

#include <string>

#include "buffers.h"

namespace nnorm_test {

enum class Halves { same_bits, by_device };

#if defined(NNORM_WITHOUT_SAME_BITS)
constexpr bool have_same_bits_of_halves = false;
#else
constexpr bool have_same_bits_of_halves = true;
#endif

template <class T>
std::string name_of(Halves halves) {
  const bool by_device = sizeof(T) == 2 && halves == Halves::by_device;
  return std::string(NameOf<T>::value) + (by_device ? ", the device's instructions" : "");
}

}  // namespace nnorm_test
