// The element types of tensors, and conversions to the type of their arithmetic and back. Conversions round to nearest
// even.
#pragma once

#include <cstdint>

#include "nnorm/mathematics.h"

namespace nnorm {

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// F(T) for every element type.
#define NNORM_FOR_EACH_TYPE(F) F(float) F(double) F(nnorm::Float16) F(nnorm::BFloat16)

// The type of the arithmetic, and of the parameters, for tensors of T.
template <class T>
struct ArithmeticOf {
  using type = float;
};
template <>
struct ArithmeticOf<double> {
  using type = double;
};
template <class T>
using Arithmetic = typename ArithmeticOf<T>::type;

inline namespace NNORM_INSTRUCTION_SET {

NNORM_INLINE float widened(float value) { return value; }
NNORM_INLINE double widened(double value) { return value; }

NNORM_INLINE float widened(BFloat16 value) {
#if defined(__CUDA_ARCH__)  // an access stays in pairs: nvcc unpacks it before its time where it sees a shift
  float result;
  asm("mov.b32 %0, {%1, %2};" : "=f"(result) : "h"(uint16_t(0)), "h"(value.bits));
  return result;
#else
  return from_bits(int32_t(uint32_t(value.bits) << 16));
#endif
}

NNORM_INLINE float widened(Float16 value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else  // integer arithmetic and one exact subtraction: all compilers vectorize it, and flushing denormals does not change it
  const uint32_t magnitude = uint32_t(value.bits & 0x7fffu) << 13;
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  const uint32_t normal = magnitude + (magnitude >= 0x0f800000u ? 0x70000000u : 0x38000000u);  // infinity, NaN: 0x70…
  const uint32_t denormal = uint32_t(bits_of(from_bits(int32_t(magnitude + 0x38800000u)) - 0x1p-14f));
  return from_bits(int32_t((magnitude < 0x00800000u ? denormal : normal) | sign));
#endif
}

NNORM_INLINE void narrow(float value, float& result) { result = value; }
NNORM_INLINE void narrow(double value, double& result) { result = value; }

NNORM_INLINE void narrow(float value, BFloat16& result) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
  const uint32_t bits = uint32_t(bits_of(value));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  result.bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
#endif
}

NNORM_INLINE void narrow(float value, Float16& result) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
  const uint32_t bits = uint32_t(bits_of(value));
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // The last bit of a float in [½, 1) has the value of the smallest float16, so adding ½ rounds the magnitude to
  // float16.
  const uint32_t denormal = uint32_t(bits_of(from_bits(int32_t(magnitude)) + 0.5f)) - 0x3f000000u;
  const uint32_t beyond = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  result.bits = uint16_t((magnitude >= 0x47800000u ? beyond : finite) | ((bits >> 16) & 0x8000u));
#endif
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
