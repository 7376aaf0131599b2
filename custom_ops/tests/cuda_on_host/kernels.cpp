// What cuda/kernels.cu is for a GPU, for the processor.
#include "launch.cuh"

namespace nnorm::cuda {

#define NNORM_FOR_TYPE(T)                                             \
  template cudaError_t run(const ChannelProblem<T>&, cudaStream_t);   \
  template cudaError_t run_channels_last(const ChannelProblem<T>&, size_t, cudaStream_t); \
  template cudaError_t run(const RowProblem<T>&, cudaStream_t);
NNORM_FOR_TYPE(float)
NNORM_FOR_TYPE(double)
NNORM_FOR_TYPE(Float16)
NNORM_FOR_TYPE(BFloat16)
#undef NNORM_FOR_TYPE

}  // namespace nnorm::cuda
