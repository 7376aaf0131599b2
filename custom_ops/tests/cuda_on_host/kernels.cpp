// What cuda/kernels.cu is for a GPU, for the processor.
#include "launch.cuh"

namespace nnorm::cuda {

#define NNORM_INSTANTIATE(T) \
  template cudaError_t run(const ChannelProblem<T>&, cudaStream_t);   \
  template cudaError_t run_channels_last(const ChannelProblem<T>&, size_t, cudaStream_t); \
  template cudaError_t run(const RowProblem<T>&, cudaStream_t);
NNORM_FOR_EACH_TYPE(NNORM_INSTANTIATE)
#undef NNORM_INSTANTIATE

}  // namespace nnorm::cuda
