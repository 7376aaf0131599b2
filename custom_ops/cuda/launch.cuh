// How the kernels are launched.
#pragma once

#include <algorithm>
#include <iterator>

#include "device.cuh"
#include "nnorm/cuda_kernels.h"

namespace nnorm::cuda {

struct Device {
  int multiprocessors = 0, shared_memory = 0;  // the shared memory that a block may have, in bytes

  static cudaError_t current(Device& device) {
    int ordinal = 0;
    if (const cudaError_t error = cudaGetDevice(&ordinal)) return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, ordinal))
      return error;
    return cudaDeviceGetAttribute(&device.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  }

  // The number of blocks to launch: `wanted`, but at most `most_of_multiprocessor` for each multiprocessor. Kernels
  // loop over the work that remains.
  unsigned blocks(size_t wanted, unsigned most_of_multiprocessor) const {
    return unsigned(std::min(wanted, size_t(multiprocessors) * most_of_multiprocessor));
  }
};

#if defined(__CUDACC__)
// `shared` is the dynamic shared memory of a block, `most_shared` the most that any launch of this kernel may request.
// That limit applies to all threads of the process, so every launch sets the same one.
template <class Work>
cudaError_t launch(void (*kernel)(Work), dim3 blocks, unsigned threads, cudaStream_t stream, Work work, size_t shared = 0,
                   size_t most_shared = 0) {
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared > 0)
    if (const cudaError_t error =
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(most_shared)))
      return error;
  void* arguments[] = {&work};
  return cudaLaunchKernel(function, blocks, threads, arguments, shared, stream);
}
#endif

// Calls run(problem). The elements of the problem are SameBits if they have 16 bits and `same_bits` is true.
template <template <class> class Problem, class T, class Run>
cudaError_t with_elements(const Problem<T>& problem, [[maybe_unused]] bool same_bits, Run run) {
#if !defined(NNORM_WITHOUT_SAME_BITS)  // a build for tests, see Tests.cmake
  if constexpr (computed_by_device<T>) {
    if (same_bits) {
      Problem<SameBits<T>> of_elements;  // its members are those of `problem`, and its pointers point to another type
      static_assert(sizeof of_elements == sizeof problem && std::is_trivially_copyable_v<Problem<T>>);
      std::memcpy(&of_elements, &problem, sizeof problem);
      return run(of_elements);
    }
  }
#endif
  return run(problem);
}

constexpr size_t divided_up(size_t n, size_t by) { return (n + by - 1) / by; }

}  // namespace nnorm::cuda
