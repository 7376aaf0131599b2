// The CUDA kernels. A call only launches a kernel: it allocates no memory and does not wait, so that streams can be
// captured. Pointers belong to the current device; those to tensors and parameters may have any alignment. A call returns
// the error of the launch.
//
// float32 and float64 results have the bits of the CPU kernels. 16-bit results have them if `same_bits` is true;
// otherwise the device's approximate instructions compute logarithms and powers (half_mathematics.h).
#pragma once

#include <cuda_runtime_api.h>

#include "nnorm/problems.h"

namespace nnorm::cuda {

// T is float, double, Float16 or BFloat16. `table` is nullptr, or what prepare() has made of these parameters; the results
// have the same bits. Returns cudaErrorInvalidValue for an extent of 2^31 or more.
template <class T>
cudaError_t run(const ChannelProblem<T>& problem, cudaStream_t stream, bool same_bits = false,
                const void* table = nullptr);

// x is [rows, lanes]. The first `channels` lanes are channels; the other lanes are padding, and their output is 0.
template <class T>
cudaError_t run_channels_last(const ChannelProblem<T>& problem, size_t lanes, cudaStream_t stream, bool same_bits = false,
                              const void* table = nullptr);

// The bytes of a table of the problem's channels.
template <class T>
size_t table_size(const ChannelProblem<T>& problem);

// Makes the table of the problem's channels, at an address that is a multiple of 16. Calls of run() in this stream, or in
// others after this one was synchronized, may use it if they have the same T, channels and `same_bits`. They do not read
// the parameters, and this call does not use the tensors.
template <class T>
cudaError_t prepare(const ChannelProblem<T>& problem, void* table, cudaStream_t stream, bool same_bits = false);

// Returns cudaErrorInvalidValue for rows of 2^31 elements or more.
template <class T>
cudaError_t run(const RowProblem<T>& problem, cudaStream_t stream, bool same_bits = false);

}  // namespace nnorm::cuda
