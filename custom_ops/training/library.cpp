// The functions of libnnorm_training, which Python calls through ctypes (nnorm_export/layers/fused/library.py).
#include <atomic>
#include <cstring>
#include <new>

#include "kernels.h"
#include "nnorm/exported.h"
#include "nnorm/kernels.h"

namespace nnorm {
namespace {

struct Built {
  const char* name;
  const TrainingKernels* (*kernels)();
};

constexpr Built built[] = {
#if defined(NNORM_HAVE_AVX512)
    {"avx512", training_for_avx512},
#endif
#if defined(NNORM_HAVE_AVX2)
    {"avx2", training_for_avx2},
#endif
#if defined(NNORM_HAVE_NEON)
    {"neon", training_for_neon},
#endif
#if defined(NNORM_HAVE_BASELINE)
    {"baseline", training_for_baseline},
#endif
};

// The kernels of number `index` of the instruction sets that this machine has, fastest first; null past the last.
const TrainingKernels* training_kernels(size_t index) {
  const InstructionSet* const* sets = instruction_sets();
  for (size_t i = 0; sets[i] != nullptr; ++i)
    for (const Built& each : built)
      if (i == index && std::strcmp(sets[i]->name, each.name) == 0) return each.kernels();
  return nullptr;
}

// The parts of a problem that no thread has taken yet: next, …, end − 1.
struct Parts {
  const TrainingKernels& kernels;
  void (*const compute)(const TrainingProblem& problem, uint64_t part, void* memory);
  const TrainingProblem& problem;
  const uint64_t end;
  std::atomic<uint64_t> next;
};

// Computes parts until none is left, or none at all without memory.
void take_parts(void* data) {
  Parts& parts = *static_cast<Parts*>(data);
  if (parts.next >= parts.end) return;
  constexpr std::align_val_t alignment{64};
  void* const memory = ::operator new(parts.kernels.memory_size(parts.problem), alignment, std::nothrow);
  if (memory == nullptr) return;
  for (uint64_t part = parts.next++; part < parts.end; part = parts.next++) parts.compute(parts.problem, part, memory);
  ::operator delete(memory, alignment);
}

}  // namespace
}  // namespace nnorm

extern "C" {

NNORM_EXPORTED size_t nnorm_training_problem_size() { return sizeof(nnorm::TrainingProblem); }

NNORM_EXPORTED const char* nnorm_training_instruction_set(size_t index) {
  const nnorm::TrainingKernels* kernels = nnorm::training_kernels(index);
  return kernels != nullptr ? kernels->name : nullptr;
}

// Computes the parts first, …, end − 1 of a problem: the forward pass (0), the backward pass (1) or the noise alone (2).
// Returns 0, or 1 if there is not enough memory.
NNORM_EXPORTED int nnorm_training_run(size_t instruction_set, int is_double, int what,
                                      const nnorm::TrainingProblem* problem, uint64_t first, uint64_t end) {
  const nnorm::TrainingKernels& kernels = nnorm::training_kernels(instruction_set)[is_double];
  nnorm::Parts parts{kernels, what == 0 ? kernels.forward : what == 1 ? kernels.backward : kernels.noise, *problem, end, first};
  if (problem->team != nullptr)
    problem->team(nnorm::take_parts, &parts, 0, 0);
  else
    nnorm::take_parts(&parts);
  return parts.next < end;
}

}  // extern "C"
