// The CUDA kernels for one type of tensor, NNORM_TYPE; CMake compiles this file once for each type.
#include "batch_normal_norm.cuh"
#include "layer_group_normal_norm.cuh"

namespace nnorm::cuda {

#define NNORM_INSTANTIATE(Problem) template cudaError_t run(const Problem&, cudaStream_t, bool);
NNORM_FOR_EACH_PROBLEM(NNORM_INSTANTIATE, NNORM_TYPE)
#undef NNORM_INSTANTIATE
template cudaError_t run_channels_last(const ChannelProblem<NNORM_TYPE>&, size_t, cudaStream_t, bool);

}  // namespace nnorm::cuda
