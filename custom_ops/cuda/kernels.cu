// The CUDA kernels for one type of tensor, NNORM_TYPE; CMake compiles this file once for each type.
#include "batch_normal_norm.cuh"
#include "layer_group_normal_norm.cuh"

namespace nnorm::cuda {

template cudaError_t run(const ChannelProblem<NNORM_TYPE>&, cudaStream_t, bool, const void*);
template cudaError_t run_channels_last(const ChannelProblem<NNORM_TYPE>&, size_t, cudaStream_t, bool, const void*);
template size_t table_size(const ChannelProblem<NNORM_TYPE>&);
template cudaError_t prepare(const ChannelProblem<NNORM_TYPE>&, void*, cudaStream_t, bool);
template cudaError_t run(const RowProblem<NNORM_TYPE>&, cudaStream_t, bool);

}  // namespace nnorm::cuda
