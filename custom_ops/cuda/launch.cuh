// How the kernels are launched.
#pragma once

#include <algorithm>
#include <atomic>
#include <iterator>

#include "cluster.cuh"
#include "nnorm/cuda_kernels.h"

namespace nnorm::cuda {

constexpr size_t divided_up(size_t n, size_t by) { return (n + by - 1) / by; }

constexpr unsigned most_threads_of_block = 1024;

struct Device {
  int ordinal = 0, multiprocessors = 0, shared_memory = 0;  // the shared memory that a block may have, in bytes

  static cudaError_t current(Device& device) {
    if (const cudaError_t error = cudaGetDevice(&device.ordinal)) return error;
    const auto read = [&](int& value, cudaDeviceAttr attribute) {
      return cudaDeviceGetAttribute(&value, attribute, device.ordinal);
    };
    if (const cudaError_t error = read(device.multiprocessors, cudaDevAttrMultiProcessorCount)) return error;
    return read(device.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  }

  // The most that a kernel may request beside its own variables, which are smaller than 1 KiB.
  size_t dynamic_shared_memory() const { return size_t(shared_memory) - 1024; }

  // The number of blocks to launch: `wanted`, but at most `most_of_multiprocessor` for each multiprocessor. Kernels
  // loop over the work that remains.
  unsigned blocks(size_t wanted, unsigned most_of_multiprocessor) const {
    return unsigned(std::min(wanted, size_t(multiprocessors) * most_of_multiprocessor));
  }

  // The same, but all blocks get the same number of the wanted ones, except for some that get one less.
  unsigned even_blocks(size_t wanted, unsigned most_of_multiprocessor) const {
    const size_t rounds = divided_up(wanted, size_t(multiprocessors) * most_of_multiprocessor);
    return rounds == 0 ? 0 : unsigned(divided_up(wanted, rounds));
  }
};

#if defined(__CUDACC__)
template <class Work>
const void* address_of(void (*kernel)(Work)) {
  return reinterpret_cast<const void*>(kernel);
}

inline cudaError_t allow_shared_memory(const void* kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}

#if NNORM_HAVE_CLUSTERS
// A launch of clusters of `size` blocks each. It refers to its own attribute, so it cannot be copied.
struct ClusterLaunch {
  cudaLaunchAttribute size_of_cluster{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(unsigned size, dim3 blocks, unsigned threads, size_t shared, cudaStream_t stream) {
    size_of_cluster.id = cudaLaunchAttributeClusterDimension;
    size_of_cluster.val.clusterDim = {size, 1, 1};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &size_of_cluster;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
};
#endif

// `shared` is the dynamic shared memory of a block, `most_shared` the most that any launch of this kernel may request.
// That limit applies to all threads of the process, so every launch sets the same one. `cluster` is the number of blocks
// of a cluster.
template <class Work>
cudaError_t launch(void (*kernel)(Work), dim3 blocks, unsigned threads, cudaStream_t stream, Work work, size_t shared = 0,
                   size_t most_shared = 0, unsigned cluster = 1) {
  if (shared > 0)
    if (const cudaError_t error = allow_shared_memory(address_of(kernel), most_shared)) return error;
  void* arguments[] = {&work};
#if NNORM_HAVE_CLUSTERS
  if (cluster > 1) {
    const ClusterLaunch in_clusters(cluster, blocks, threads, shared, stream);
    return cudaLaunchKernelExC(&in_clusters.config, address_of(kernel), arguments);
  }
#endif
  return cluster > 1 ? cudaErrorInvalidValue : cudaLaunchKernel(address_of(kernel), blocks, threads, arguments, shared, stream);
}

// What clusters_at_once() has found for a kernel: for each number of blocks and warps the device (from 1) in the upper half,
// and the clusters. CUDA would compute it anew at each launch.
struct KnownClusters {
  std::atomic<uint64_t> of_shape[most_blocks_of_cluster + 1][most_threads_of_block / warp_size + 1];
};

// The number of clusters of `size` blocks that the device runs at once: 0 if it has no clusters or cannot tell, or if the
// code of this kernel was compiled for devices without. `shared` depends on `threads` alone.
template <class Work>
unsigned clusters_at_once(void (*kernel)(Work), int device, unsigned size, unsigned threads, size_t shared,
                          size_t most_shared, KnownClusters& known) {
#if NNORM_HAVE_CLUSTERS
  std::atomic<uint64_t>& of_shape = known.of_shape[size][threads / warp_size];
  const uint64_t question = uint64_t(unsigned(device)) + 1, answer = of_shape.load(std::memory_order_relaxed);
  if (answer >> 32 == question) return unsigned(answer);
  cudaFuncAttributes attributes;
  int found = 0;
  if (cudaFuncGetAttributes(&attributes, address_of(kernel)) == cudaSuccess && attributes.ptxVersion >= 90 &&
      allow_shared_memory(address_of(kernel), most_shared) == cudaSuccess) {
    const ClusterLaunch one(size, dim3(size), threads, shared, nullptr);
    if (cudaOccupancyMaxActiveClusters(&found, address_of(kernel), &one.config) != cudaSuccess) found = 0;
  }
  if (found == 0) cudaGetLastError();  // another kernel takes the rows, so no caller shall see the error
  of_shape.store(question << 32 | unsigned(found), std::memory_order_relaxed);
  return unsigned(found);
#else
  return 0;
#endif
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

}  // namespace nnorm::cuda
