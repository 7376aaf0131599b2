// The CUDA kernels. A call only launches: it allocates no memory and does not wait, so that a stream may be captured.
// Pointers are of the current device and may have any alignment. The result is that of the launch.
//
// float32 and float64 have the bits of the CPU kernels. Tensors of 16 bits have them if `same_bits` is true; if not, the
// device's instructions for logarithms and powers compute them (half_mathematics.h).
#pragma once

#include <cuda_runtime_api.h>

#include "nnorm/problems.h"

namespace nnorm::cuda {

// T is float, double, Float16 or BFloat16. An extent of 2^31 or more is cudaErrorInvalidValue.
template <class T>
cudaError_t run(const ChannelProblem<T>& problem, cudaStream_t stream, bool same_bits = false);

// x is [rows, lanes]. The first `channels` lanes are channels; the other lanes are padding, and their output is 0.
template <class T>
cudaError_t run_channels_last(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream, bool same_bits = false);

// A row of 2^31 elements or more is cudaErrorInvalidValue.
template <class T>
cudaError_t run(const RowProblem<T>& problem, cudaStream_t stream, bool same_bits = false);

}  // namespace nnorm::cuda
