// The CUDA kernels and memory that they can access: on a GPU if nvcc compiles this, else on the CPU (cuda_on_host.h).
#pragma once

#include "buffers.h"

#include <cuda_runtime_api.h>

#include "nnorm/cuda_kernels.h"

namespace nnorm_test {

#if defined(__CUDACC__)
constexpr bool on_gpu = true;

inline void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);  // later results would be wrong
}

inline bool have_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

inline cudaStream_t stream() {
  static const cudaStream_t created = [] {
    cudaStream_t result;
    must(cudaStreamCreateWithFlags(&result, cudaStreamNonBlocking));
    return result;
  }();
  return created;
}

// A copy of an Input's or Output's memory, guards included.
template <class T>
class OnDevice {
 public:
  template <class Buffer>
  explicit OnDevice(Buffer& buffer)
      : bytes_(buffer.storage().size() * sizeof(T)), first_(size_t(buffer.data() - buffer.storage().data())) {
    must(cudaMalloc(&memory_, bytes_ ? bytes_ : 1));
    // In the stream of the kernels: a copy from pageable memory may return before its data are there, and kernels of a
    // non-blocking stream do not wait for the default stream.
    must(cudaMemcpyAsync(memory_, buffer.storage().data(), bytes_, cudaMemcpyHostToDevice, stream()));
    must(cudaStreamSynchronize(stream()));
  }
  ~OnDevice() { cudaFree(memory_); }
  OnDevice(const OnDevice&) = delete;

  T* data() const { return static_cast<T*>(memory_) + first_; }

  // Waits for the kernels and copies back.
  template <class Buffer>
  void fetch(Buffer& buffer) const {
    must(cudaMemcpyAsync(buffer.storage().data(), memory_, bytes_, cudaMemcpyDeviceToHost, stream()));
    must(cudaStreamSynchronize(stream()));
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_, first_;
};
#else
constexpr bool on_gpu = false;

inline bool have_device() { return true; }
inline cudaStream_t stream() { return nullptr; }

template <class T>
class OnDevice {
 public:
  template <class Buffer>
  explicit OnDevice(Buffer& buffer) : data_(const_cast<T*>(buffer.data())) {}
  T* data() const { return data_; }
  template <class Buffer>
  void fetch(Buffer&) const {}

 private:
  T* data_;
};
#endif

}  // namespace nnorm_test
