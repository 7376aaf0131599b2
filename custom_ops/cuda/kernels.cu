// The kernels for one type of tensor, NNORM_TYPE; CMake compiles this file once for each, side by side.
#include "launch.cuh"

namespace nnorm::cuda {

template cudaError_t run(const ChannelProblem<NNORM_TYPE>&, cudaStream_t);
template cudaError_t run_channels_last(const ChannelProblem<NNORM_TYPE>&, size_t, cudaStream_t);
template cudaError_t run(const RowProblem<NNORM_TYPE>&, cudaStream_t);

}  // namespace nnorm::cuda
