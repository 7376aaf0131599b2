// The noise of training: standard normal numbers that depend on a seed, the set and the element alone, so that the backward
// pass draws them again, and threads, processors and layouts of memory draw the same.
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) gives four words for each counter,
// and Box and Muller's transform ("A note on the generation of random normal deviates", 1958) two numbers for two words:
//
//   z₁ = √(−2·log u)·cos(2πv), z₂ = √(−2·log u)·sin(2πv),   u in (0, 1], v in [−½, ½)
//
// The numbers are of float, of at most 5.9 in magnitude; float64 layers have the same.
#pragma once

#include "nnorm/row_statistics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

// log₂ x.
//
// Valid range: normal numbers
NNORM_INLINE float log2_of(float x) {
  using F = Format<float>;
  const int32_t exponent = (bits_of(x) - F::sqrt_half) & ~((int32_t(1) << F::mantissa_bits) - 1);
  const float mantissa = from_bits(bits_of(x) - exponent);
  return float(exponent >> F::mantissa_bits) + log2_1p_of_mantissa(mantissa - 1.0f);
}

// sin(2πv).
//
// Valid range: |v| ≤ ½
// Max absolute error: 3e-7
NNORM_INLINE float sine_of_turns(float v) {
  // Beyond a quarter turn, the sine of the rest to half a turn.
  const float folded = std::fabs(v) > 0.25f ? std::copysign(0.5f, v) - v : v, x = folded * 6.28318531f, x2 = x * x;
  float sum = -2.50521084e-8f;  // −1/11!
  sum = fused(sum, x2, 2.75573192e-6f);
  sum = fused(sum, x2, -1.98412698e-4f);
  sum = fused(sum, x2, 8.33333333e-3f);
  sum = fused(sum, x2, -1.66666667e-1f);
  return fused(sum * x2, x, x);
}

// Writes the noise of a tile of `n` elements that starts at element `position` of set `set`. `z` has room for a whole tile.
template <class Real>
NNORM_INLINE void noise_of_tile(uint64_t seed, uint64_t set, size_t position, size_t n, Real* z) {
  constexpr size_t counters = row_tile / 4;
  // Element i of a tile has number i / counters of the four that counter i mod counters gives.
  const size_t used = n < counters ? n : counters;
  const uint32_t first = uint32_t(position / 4), third = uint32_t(set), fourth = uint32_t(set >> 32);
  const uint32_t second = uint32_t(uint64_t(position) >> 34);
#pragma omp simd
  for (size_t i = 0; i < used; ++i) {
    uint32_t a = first + uint32_t(i), b = second, c = third, d = fourth;
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    NNORM_UNROLL for (int round = 0; round < 10; ++round) {
      const uint64_t of_a = uint64_t(a) * 0xD2511F53u, of_c = uint64_t(c) * 0xCD9E8D57u;
      const uint32_t next_a = uint32_t(of_c >> 32) ^ b ^ key0, next_c = uint32_t(of_a >> 32) ^ d ^ key1;
      b = uint32_t(of_c);
      d = uint32_t(of_a);
      a = next_a;
      c = next_c;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    // 24 bits of each word, which float has: u from 2^-25 to 1 − 2^-25, v from −½ on.
    const float u1 = fused(float(int32_t(a >> 8)), 0x1p-24f, 0x1p-25f), u2 = fused(float(int32_t(c >> 8)), 0x1p-24f, 0x1p-25f);
    const float v1 = fused(float(int32_t(b >> 8)), 0x1p-24f, -0.5f), v2 = fused(float(int32_t(d >> 8)), 0x1p-24f, -0.5f);
    const float r1 = std::sqrt(log2_of(u1) * -1.38629436f), r2 = std::sqrt(log2_of(u2) * -1.38629436f);  // −2·ln 2
    // cos(2πv) is the sine a quarter turn later.
    const float w1 = v1 < 0.25f ? v1 + 0.25f : v1 - 0.75f, w2 = v2 < 0.25f ? v2 + 0.25f : v2 - 0.75f;
    z[i] = Real(r1 * sine_of_turns(w1));
    z[i + counters] = Real(r1 * sine_of_turns(v1));
    z[i + 2 * counters] = Real(r2 * sine_of_turns(w2));
    z[i + 3 * counters] = Real(r2 * sine_of_turns(v2));
  }
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
