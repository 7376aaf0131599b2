// The kernels of GPUs. A call only launches: no memory is allocated, nothing is waited for, so a stream may be captured.
// Pointers are of the current device, whatever their alignment. The result is what the launch returned.
#pragma once

#include <cuda_runtime_api.h>

#include "nnorm/problems.h"

namespace nnorm::cuda {

// T is float, double, Float16 or BFloat16. An extent of 2^31 or more is cudaErrorInvalidValue.
template <class T>
cudaError_t run(const ChannelProblem<T>& problem, cudaStream_t stream);

// x of [rows, lanes], of which the first `channels` lanes are channels and get a result; the others, padding, get 0.
template <class T>
cudaError_t run_channels_last(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream);

// A row of 2^31 elements or more is cudaErrorInvalidValue.
template <class T>
cudaError_t run(const RowProblem<T>& problem, cudaStream_t stream);

}  // namespace nnorm::cuda
