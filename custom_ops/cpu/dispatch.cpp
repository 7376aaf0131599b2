// Lists the instruction sets that this machine can run.
#include "instruction_sets.h"
#include "processor.h"

namespace nnorm {
namespace {

struct Available {
  const InstructionSet* list[5] = {};

  Available() {
    const InstructionSet** next = list;
#if defined(NNORM_HAVE_AVX512)
    if (processor_has("avx512f") && processor_has("avx512bw") && processor_has("avx512cd") && processor_has("avx512dq") &&
        processor_has("avx512vl") && has_avx2())
      *next++ = kernels_for_avx512();
#endif
#if defined(NNORM_HAVE_AVX2)
    if (has_avx2()) *next++ = kernels_for_avx2();
#endif
#if defined(NNORM_HAVE_NEON)
    *next++ = kernels_for_neon();
#endif
#if defined(NNORM_HAVE_BASELINE)
    *next++ = kernels_for_baseline();
#endif
    (void)next;
  }

#if defined(NNORM_HAVE_AVX512) || defined(NNORM_HAVE_AVX2)
  static bool has_avx2() {
    return processor_has("avx2") && processor_has("fma") && processor_has("bmi") && processor_has("bmi2") &&
           processor_has("f16c") && processor_has("lzcnt") && processor_has("movbe");  // all of x86-64-v3
  }
#endif
};

}  // namespace

const InstructionSet* const* instruction_sets() {
  static const Available available;
  return available.list;
}

}  // namespace nnorm
