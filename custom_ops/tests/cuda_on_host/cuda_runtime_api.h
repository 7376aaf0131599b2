// The part of CUDA's header that callers of the kernels use, for tests without a GPU: see cuda_on_host.h.
#pragma once

#include <cstddef>

struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess           ? "no error"
         : error == cudaErrorInvalidValue ? "invalid argument"
                                          : "unspecified launch failure";
}

namespace cuda_on_host {
// A small GPU, so that the kernels' loops over work that does not fit run too; tests may change it.
inline int multiprocessors = 1, shared_memory = 100 << 10;
inline unsigned clusters = 2;  // that run at once; 0: the GPU has none
inline bool have_clusters_run = false;
inline unsigned last_grid = 0;  // the blocks of the last launch
// A stream that is being captured: the only one that is not nullptr.
inline bool is_captured(cudaStream_t stream) { return stream != nullptr; }
}  // namespace cuda_on_host

inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = cuda_on_host::is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return cuda_on_host::is_captured(stream) ? cudaErrorInvalidValue : cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? cuda_on_host::multiprocessors : cuda_on_host::shared_memory;
  return cudaSuccess;
}
