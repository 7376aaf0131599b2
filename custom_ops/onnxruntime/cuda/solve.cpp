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

const char* const execution_provider = "CUDAExecutionProvider";

template <class T>
void Run::solve(const ChannelProblem<T>& problem) const {
  launch(*this, problem);
}

template <class T>
void Run::solve(const RowProblem<T>& problem) const {
  launch(*this, problem);
}

#define NNORM_FOR_TYPE(T)                                    \
  template void Run::solve(const ChannelProblem<T>&) const; \
  template void Run::solve(const RowProblem<T>&) const;
NNORM_FOR_TYPE(float)
NNORM_FOR_TYPE(double)
NNORM_FOR_TYPE(Float16)
NNORM_FOR_TYPE(BFloat16)
#undef NNORM_FOR_TYPE

}  // namespace nnorm::ort
