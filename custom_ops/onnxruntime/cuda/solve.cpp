// How the CUDA execution provider solves the operators' problems: one launch on the session's stream, and no waiting.
#include "../runtime.h"
#include "nnorm/cuda_kernels.h"

namespace nnorm::ort {
namespace {

template <class Problem>
void launch(const Run& run, const Problem& problem) {
  const cudaError_t error = cuda::run(problem, static_cast<cudaStream_t>(run.gpu_stream()));
  if (error != cudaSuccess) throw Error{ORT_EP_FAIL, std::string("CUDA: ") + cudaGetErrorString(error)};
}

}  // namespace

#if !defined(NNORM_EXECUTION_PROVIDER)  // tests without a GPU name the CPU's
#define NNORM_EXECUTION_PROVIDER "CUDAExecutionProvider"
#endif
const char* const execution_provider = NNORM_EXECUTION_PROVIDER;

template <class T>
void Run::solve(const ChannelProblem<T>& problem) const {
  launch(*this, problem);
}

template <class T>
void Run::solve(const RowProblem<T>& problem) const {
  launch(*this, problem);
}

#define NNORM_INSTANTIATE(T) \
  template void Run::solve(const ChannelProblem<T>&) const; \
  template void Run::solve(const RowProblem<T>&) const;
NNORM_FOR_EACH_TYPE(NNORM_INSTANTIATE)
#undef NNORM_INSTANTIATE

}  // namespace nnorm::ort
