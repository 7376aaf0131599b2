// Converts tiles of float16 to float and back with the processor's conversion instructions (F16C), where it has them.
// With the integer arithmetic of number_types.h a kernel runs twice as many instructions. The results have the same
// bits, except that a widened signaling NaN is quiet, as after any arithmetic.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstddef>

#include "nnorm/number_types.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// Whether kernels convert a whole tile of T before and after the arithmetic, not each element in the loops.
template <class T>
constexpr bool converts_whole_tiles = false;

#if defined(__F16C__)
template <>
inline constexpr bool converts_whole_tiles<Float16> = true;

// Flushing denormals (MXCSR) changes neither conversion: it does not apply to denormal float16, and every denormal
// float rounds to 0 in float16.
#if defined(__AVX512F__)
constexpr size_t vector_elements = 16;

NNORM_INLINE void widen_vector(const Float16* x, float* wide) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  _mm512_storeu_ps(wide, _mm512_maskz_cvtph_ps(__mmask16(-1), halves));  // GCC 12 warns about the intrinsic without a mask
}

NNORM_INLINE void narrow_vector(const float* wide, Float16* y) {
  const __m512i bits = _mm512_loadu_si512(wide);
  const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
  // Every NaN becomes the quiet NaN of its sign: the instruction would keep a part of the payload, which differs
  // between processors.
  const __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi32(int(0x80000000u)));
  const __m512i quiet = _mm512_or_si512(sign, _mm512_set1_epi32(0x7fc00000));
  const __m512 values = _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, nan, quiet));
  const __m256i halves = _mm512_maskz_cvtps_ph(__mmask16(-1), values, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), halves);
}
#else
constexpr size_t vector_elements = 8;

NNORM_INLINE void widen_vector(const Float16* x, float* wide) {
  _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

NNORM_INLINE void narrow_vector(const float* wide, Float16* y) {
  const __m256 values = _mm256_loadu_ps(wide);
  const __m256 nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  // Every NaN becomes the quiet NaN of its sign: the instruction would keep a part of the payload, which differs
  // between processors.
  const __m256 quiet = _mm256_or_ps(_mm256_and_ps(values, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(NAN));
  const __m128i halves = _mm256_cvtps_ph(_mm256_blendv_ps(values, quiet, nan), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), halves);
}
#endif

// Elements that do not fill a vector are converted one by one: a vector load waits for all stores of its parts.
NNORM_INLINE void widen_tile(const Float16* x, size_t n, float* wide) {
  size_t i = 0;
  for (; i + vector_elements <= n; i += vector_elements) widen_vector(x + i, wide + i);
  for (; i < n; ++i) wide[i] = widened(x[i]);
}

NNORM_INLINE void narrow_tile(const float* wide, size_t n, Float16* y) {
  size_t i = 0;
  for (; i + vector_elements <= n; i += vector_elements) narrow_vector(wide + i, y + i);
  for (; i < n; ++i) narrow(wide[i], y[i]);
}
#endif

template <class T>
NNORM_INLINE void widen_tile(const T* x, size_t n, Arithmetic<T>* wide) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) wide[i] = widened(x[i]);
}

template <class T>
NNORM_INLINE void narrow_tile(const Arithmetic<T>* wide, size_t n, T* y) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) narrow(wide[i], y[i]);
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
