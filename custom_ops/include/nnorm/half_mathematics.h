// ψ of 16-bit tensors, for devices with approximate instructions for log₂ and 2^z.
//
// ψ takes half as many float32 operations as in mathematics.h. Rounding the result to 16 bits hides the greater error.
//
// Max relative error of ψ: 2^-15
// Max error of λ̂: 3e-6
//
// Both bounds hold if the instructions have the errors that NVIDIA documents: 2^-22 for log₂ (absolute for results
// below 1, relative above), 2^-22 relative for 2^z, 2^-22 relative for a quotient (2 units in the last place). Short
// series replace the instructions where results are so small that these errors would be too large. 2^z saturates at
// 2^127, half of the limit in mathematics.h. tests/test_half_mathematics.cpp enforces both bounds with instructions of
// the greatest documented error.
#pragma once

#include "nnorm/mathematics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

#if defined(__CUDA_ARCH__)
NNORM_INLINE float quick_log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
NNORM_INLINE float quick_exp2(float z) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(z));
  return result;
}
NNORM_INLINE float quick_quotient(float a, float b) { return __fdividef(a, b); }
#else
// Tests set these to the greatest documented errors of the instructions.
inline float quick_log2_error = 0, quick_exp2_error = 0;
inline float quick_log2(float x) {
  const double exact = std::log2(double(x)), size = std::fabs(exact);
  return float(exact + double(quick_log2_error) * (size > 1 ? size : 1));
}
inline float quick_exp2(float z) { return float(std::exp2(double(z)) * (1 + double(quick_exp2_error))); }
inline float quick_quotient(float a, float b) { return a / b * (1 + quick_exp2_error); }
#endif

struct ForHalf {
  static constexpr int output_divisor = 1;

  static NNORM_INLINE Log2<float> log2_1p(float a) {
    const float series = a * fused(a, fused(a, 0.48089835f, -0.72134751f), 1.44269502f);
    const float logarithm = quick_log2(1.0f + a);
    return {-0.0f, a < 0x1p-6f ? series : logarithm};  // adding −0 changes nothing, not even −0
  }

  template <bool bounded = false>
  static NNORM_INLINE float exp2_m1(Log2<float> log, float eta) {
    const float z = log.fraction * eta;
    const float series = z * fused(z, fused(z, 0.0555041087f, 0.240226507f), 0.693147180f);
    const float power = quick_exp2(bounded ? z : at_most(z, 127.0f)) - 1.0f;
    return std::fabs(z) < 0x1p-5f ? series : power;
  }

  static NNORM_INLINE float quotient(float a, float b) { return quick_quotient(a, b); }
};

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
