// The training kernels for one instruction set, NNORM_INSTRUCTION_SET; CMake compiles this file once for each.
#include "backward.h"
#include "kernels.h"
#include "strips.h"

#define NNORM_TRAINING_OF(instruction_set) training_for_##instruction_set
#define NNORM_TRAINING(instruction_set) NNORM_TRAINING_OF(instruction_set)
#define NNORM_NAME_OF(instruction_set) #instruction_set
#define NNORM_NAME(instruction_set) NNORM_NAME_OF(instruction_set)

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

template <class Real>
struct Memory {
  TrainingBuffers<Real> buffers;
  Real* arrays() { return reinterpret_cast<Real*>(this + 1); }  // of strips
};

template <class Real>
size_t memory_size(const TrainingProblem& problem) {
  const size_t tensors = problem.element_stride == 1 ? 0 : problem.gradient == nullptr ? 1 : 2;
  return sizeof(Memory<Real>) + tensors * strip_size<Real>(problem) * sizeof(Real);
}

// Calls run(set, buffers) for each set of a part.
template <class Real, class Run>
void for_each_set(const TrainingProblem& problem, uint64_t part, void* memory,
                  std::initializer_list<const void* TrainingProblem::*> read, void* TrainingProblem::*written, const Run& run) {
  auto& of_call = *static_cast<Memory<Real>*>(memory);
  const uint64_t first = first_set<Real>(problem, part), end = first_set<Real>(problem, part + 1);
  const auto run_set = [&](const SampleSet<Real>& set) { run(set, of_call.buffers); };
  if (problem.element_stride != 1) {
    for_each_set_of_strips<Real>(problem, first, end, of_call.arrays(), read, written, run_set);
    return;
  }
  for (uint64_t number = first; number < end; ++number) run_set(SampleSet<Real>(problem, number, number));
}

template <class Real>
void forward(const TrainingProblem& problem, uint64_t part, void* memory) {
  for_each_set<Real>(problem, part, memory, {&TrainingProblem::x}, &TrainingProblem::y,
                     [](const SampleSet<Real>& set, TrainingBuffers<Real>& buffers) { forward_of_set(set, buffers); });
}

template <class Real>
void backward(const TrainingProblem& problem, uint64_t part, void* memory) {
  for_each_set<Real>(problem, part, memory, {&TrainingProblem::x, &TrainingProblem::gradient}, &TrainingProblem::gradient_x,
                     [=](const SampleSet<Real>& set, TrainingBuffers<Real>& buffers) { backward_of_set(set, part, buffers); });
}

template <class Real>
void noise(const TrainingProblem& problem, uint64_t part, void* memory) {
  const auto write_noise = [](const SampleSet<Real>& set, TrainingBuffers<Real>& buffers) {
    void* const y = set.problem.y;
    set.for_each_tile([&](size_t at, size_t n) {
      noise_of_tile(set.problem.seed, set.number, at, n, buffers.noise);
      Real* target = set.target(y, at, n, buffers.noise);
      if (target != buffers.noise) std::memcpy(target, buffers.noise, n * sizeof(Real));
      set.write(y, at, n, buffers.noise);
    });
  };
  for_each_set<Real>(problem, part, memory, {}, &TrainingProblem::y, write_noise);
}

}  // namespace NNORM_INSTRUCTION_SET

const TrainingKernels* NNORM_TRAINING(NNORM_INSTRUCTION_SET)() {
  static const TrainingKernels kernels[] = {
      {NNORM_NAME(NNORM_INSTRUCTION_SET), &memory_size<float>, &forward<float>, &backward<float>, &noise<float>},
      {NNORM_NAME(NNORM_INSTRUCTION_SET), &memory_size<double>, &forward<double>, &backward<double>, &noise<double>}};
  return kernels;
}

}  // namespace nnorm
