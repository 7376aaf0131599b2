// Chooses the kernels that this machine can run.
#include "targets.h"

namespace nnorm {
namespace {

struct Available {
  const Target* list[5] = {};

  Available() {
    const Target** next = list;
#if defined(NNORM_HAVE_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_avx2())
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
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt") &&
           __builtin_cpu_supports("movbe");  // all of x86-64-v3
  }
#endif
};

}  // namespace

const Target* const* targets() {
  static const Available available;
  return available.list;
}

}  // namespace nnorm
