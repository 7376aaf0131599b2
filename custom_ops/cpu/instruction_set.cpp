// The CPU kernels for one instruction set, NNORM_INSTRUCTION_SET; CMake compiles this file once for each.
#include "batch_normal_norm.h"
#include "instruction_sets.h"
#include "layer_group_normal_norm.h"
#include "quantized_batch_normal_norm.h"
#include "shared_rows.h"

#define NNORM_NAME_OF(instruction_set) #instruction_set
#define NNORM_NAME(instruction_set) NNORM_NAME_OF(instruction_set)

namespace nnorm {
namespace {

template <class T>
constexpr KernelTable<T> table() {
  return {&prepare_channels<Arithmetic<T>>, &batch_normal_norm<T>, &layer_group_normal_norm<T>, &shared_rows<T>,
          &end_of_phase<T>};
}

}  // namespace

const InstructionSet* NNORM_KERNELS(NNORM_INSTRUCTION_SET)() {
  static const InstructionSet instruction_set{NNORM_NAME(NNORM_INSTRUCTION_SET), table<float>(),    table<double>(),
                                              table<Float16>(),                  table<BFloat16>(), quantized_kernels()};
  return &instruction_set;
}

}  // namespace nnorm
