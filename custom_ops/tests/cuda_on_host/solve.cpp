// ONNX Runtime's CPU provider with the kernels of GPUs, run by the processor: the operators' Python tests then try these.
#include "../../onnxruntime/runtime.h"
#include "nnorm/cuda_kernels.h"

namespace nnorm::ort {

const char* const execution_provider = "CPUExecutionProvider";

template <class T>
void Run::solve(const ChannelProblem<T>& problem) const {
  if (cuda::run(problem, nullptr) != cudaSuccess) throw Error{ORT_EP_FAIL, "a kernel failed"};
}

template <class T>
void Run::solve(const RowProblem<T>& problem) const {
  if (cuda::run(problem, nullptr) != cudaSuccess) throw Error{ORT_EP_FAIL, "a kernel failed"};
}

#define NNORM_FOR_TYPE(T)                                   \
  template void Run::solve(const ChannelProblem<T>&) const; \
  template void Run::solve(const RowProblem<T>&) const;
NNORM_FOR_TYPE(float)
NNORM_FOR_TYPE(double)
NNORM_FOR_TYPE(Float16)
NNORM_FOR_TYPE(BFloat16)
#undef NNORM_FOR_TYPE

}  // namespace nnorm::ort
