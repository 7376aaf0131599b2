// The training kernels for one instruction set, NNORM_INSTRUCTION_SET; CMake compiles this file once for each.
#include "backward.h"
#include "kernels.h"

#define NNORM_TRAINING_OF(instruction_set) training_for_##instruction_set
#define NNORM_TRAINING(instruction_set) NNORM_TRAINING_OF(instruction_set)
#define NNORM_NAME_OF(instruction_set) #instruction_set
#define NNORM_NAME(instruction_set) NNORM_NAME_OF(instruction_set)

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

template <class Real, class Run>
void for_each_set(const TrainingProblem& problem, uint64_t part, const Run& run) {
  const uint64_t end = problem.sets * (part + 1) / problem.parts;
  for (uint64_t number = problem.sets * part / problem.parts; number < end; ++number) run(SampleSet<Real>(problem, number));
}

template <class Real>
void forward(const TrainingProblem& problem, uint64_t part, void* buffer) {
  auto& buffers = *static_cast<TrainingBuffers<Real>*>(buffer);
  for_each_set<Real>(problem, part, [&](const SampleSet<Real>& set) { forward_of_set(set, buffers); });
}

template <class Real>
void backward(const TrainingProblem& problem, uint64_t part, void* buffer) {
  auto& buffers = *static_cast<TrainingBuffers<Real>*>(buffer);
  for_each_set<Real>(problem, part, [&](const SampleSet<Real>& set) { backward_of_set(set, part, buffers); });
}

template <class Real>
void noise(const TrainingProblem& problem, uint64_t part, void* buffer) {
  auto& buffers = *static_cast<TrainingBuffers<Real>*>(buffer);
  for_each_set<Real>(problem, part, [&](const SampleSet<Real>& set) {
    set.for_each_tile([&](size_t at, size_t n) {
      noise_of_tile(problem.seed, set.number, at, n, buffers.noise);
      Real* target = set.target(problem.y, at, n, buffers.noise);
      if (target != buffers.noise) std::memcpy(target, buffers.noise, n * sizeof(Real));
      set.write(problem.y, at, n, buffers.noise);
    });
  });
}

}  // namespace NNORM_INSTRUCTION_SET

const TrainingKernels* NNORM_TRAINING(NNORM_INSTRUCTION_SET)() {
  static const TrainingKernels kernels[] = {
      {NNORM_NAME(NNORM_INSTRUCTION_SET), sizeof(TrainingBuffers<float>), &forward<float>, &backward<float>, &noise<float>},
      {NNORM_NAME(NNORM_INSTRUCTION_SET), sizeof(TrainingBuffers<double>), &forward<double>, &backward<double>, &noise<double>}};
  return kernels;
}

}  // namespace nnorm
