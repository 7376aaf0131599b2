// Solves the operators' problems on GPUs: one launch on the stream of the session, without waiting. The first run of a node
// also makes the table of its channels.
#include "../runtime.h"
#include "nnorm/cuda_kernels.h"
#include "nnorm/same_bits.h"

namespace nnorm::ort {
namespace {

constexpr size_t first_parameter = 1;  // the input behind X

void must(cudaError_t error) {
  if (error != cudaSuccess) throw Error{ORT_EP_FAIL, std::string("CUDA: ") + cudaGetErrorString(error)};
}

template <class T>
std::shared_ptr<const void> table_of(const Run& run, const ChannelProblem<T>& problem, cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  must(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone) return nullptr;  // the graph would make it, in each of its replays
  const std::shared_ptr<void> table = run.allocate(cuda::table_size(problem), first_parameter);
  must(cuda::prepare(problem, table.get(), stream, same_bits_wanted()));
  must(cudaStreamSynchronize(stream));  // other threads run the node in other streams
  return table;
}

template <class T>
cudaError_t solve_on(const Run& run, const ChannelProblem<T>& problem, MadeOnce* prepared, cudaStream_t stream) {
  if (problem.empty()) return cudaSuccess;
  const void* table = nullptr;
  if (prepared != nullptr) table = prepared->get<void>([&] { return table_of(run, problem, stream); });
  return cuda::run(problem, stream, same_bits_wanted(), table);
}

template <class T>
cudaError_t solve_on(const Run&, const RowProblem<T>& problem, MadeOnce*, cudaStream_t stream) {
  return cuda::run(problem, stream, same_bits_wanted());
}

}  // namespace

#if defined(NNORM_CUDA_OPERATORS_OF_CPU)  // a build for tests
const OrtMemoryInfoDeviceType device_of_tensors = OrtMemoryInfoDeviceType_CPU;
#else
const OrtMemoryInfoDeviceType device_of_tensors = OrtMemoryInfoDeviceType_GPU;
#endif

template <class Problem>
void Run::solve(const Problem& problem, MadeOnce* prepared) const {
  must(solve_on(*this, problem, prepared, static_cast<cudaStream_t>(gpu_stream())));
}

#define NNORM_INSTANTIATE_PROBLEM(Problem) template void Run::solve(const Problem&, MadeOnce*) const;
#define NNORM_INSTANTIATE(T) NNORM_FOR_EACH_PROBLEM(NNORM_INSTANTIATE_PROBLEM, T)
NNORM_FOR_EACH_TYPE(NNORM_INSTANTIATE)
#undef NNORM_INSTANTIATE
#undef NNORM_INSTANTIATE_PROBLEM

}  // namespace nnorm::ort
