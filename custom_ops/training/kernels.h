// The training kernels of one set of instructions. A call computes one part of a problem. noise() writes the noise of the
// problem to y.
#pragma once

#include "problem.h"

namespace nnorm {

struct TrainingKernels {
  const char* name;  // avx512, avx2, neon, baseline
  size_t (*memory_size)(const TrainingProblem& problem);  // in bytes: what a call needs
  void (*forward)(const TrainingProblem& problem, uint64_t part, void* memory);
  void (*backward)(const TrainingProblem& problem, uint64_t part, void* memory);
  void (*noise)(const TrainingProblem& problem, uint64_t part, void* memory);
};

// The kernels for float and for double, in this order.
const TrainingKernels* training_for_avx512();
const TrainingKernels* training_for_avx2();
const TrainingKernels* training_for_neon();
const TrainingKernels* training_for_baseline();

}  // namespace nnorm
