// Solves the operators' problems on GPUs: one launch on the stream of the session, without waiting.
#include "../runtime.h"
#include "nnorm/cuda_kernels.h"
#include "nnorm/same_bits.h"

namespace nnorm::ort {

const bool has_host_memory = false;

template <class Problem>
void Run::solve(const Problem& problem, MadeOnce<typename Problem::Real>*) const {
  const cudaError_t error = cuda::run(problem, static_cast<cudaStream_t>(gpu_stream()), same_bits_wanted());
  if (error != cudaSuccess) throw Error{ORT_EP_FAIL, std::string("CUDA: ") + cudaGetErrorString(error)};
}

#define NNORM_INSTANTIATE_PROBLEM(Problem) template void Run::solve(const Problem&, MadeOnce<Problem::Real>*) const;
#define NNORM_INSTANTIATE(T) NNORM_FOR_EACH_PROBLEM(NNORM_INSTANTIATE_PROBLEM, T)
NNORM_FOR_EACH_TYPE(NNORM_INSTANTIATE)
#undef NNORM_INSTANTIATE
#undef NNORM_INSTANTIATE_PROBLEM

}  // namespace nnorm::ort
