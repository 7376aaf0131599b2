// The CPU kernels for one instruction set, NNORM_TARGET; CMake compiles this file once for each.
#include "batch_normal_norm.h"
#include "layer_group_normal_norm.h"
#include "quantized_batch_normal_norm.h"
#include "shared_rows.h"
#include "targets.h"

#define NNORM_NAME_OF(target) #target
#define NNORM_NAME(target) NNORM_NAME_OF(target)

namespace nnorm {
namespace {

template <class T>
constexpr KernelTable<T> table() {
  return {&prepare_channels<Arithmetic<T>>, &batch_normal_norm<T>, &layer_group_normal_norm<T>, &shared_rows<T>,
          &end_of_phase<T>};
}

}  // namespace

const Target* NNORM_TARGET_FUNCTION(NNORM_TARGET)() {
  static const Target target{NNORM_NAME(NNORM_TARGET), table<float>(), table<double>(), table<Float16>(), table<BFloat16>(),
                             quantized_kernels()};
  return &target;
}

}  // namespace nnorm
