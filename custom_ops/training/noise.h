// The noise of training: standard normal numbers that depend on a seed, the set and the element alone, so that the backward
// pass draws them again, and threads, processors and layouts of memory draw the same.
//
// Box and Muller's transform ("A note on the generation of random normal deviates", 1958) makes two numbers of two words:
//
//   z₁ = √(−2·log u)·cos(2πv), z₂ = √(−2·log u)·sin(2πv),   u in (0, 1] with 24 bits, v in [0, 1) with 32 bits
//
// The numbers are of float, of at most 5.9 in magnitude; float64 layers have the same.
#pragma once

#include "nnorm/row_statistics.h"
#include "philox.h"

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

struct Point {
  float x, y;
};

// cos(2πv) and sin(2πv) for v = word/2^32.
//
// Max absolute error: 1e-7
NNORM_INLINE Point on_circle(uint32_t word) {
  // A multiple of a quarter turn, whose number is in the upper bits of `quarter`, and the rest, up to an eighth of a turn.
  const uint32_t quarter = word + 0x20000000u;
  const float rest = float(int32_t(word << 2)) * 3.6572953e-10f, r2 = rest * rest;  // 2π/2^34
  float sine = fused(2.75573192e-6f, r2, -1.98412698e-4f);  // the series of the sine and the cosine
  sine = fused(fused(sine, r2, 8.33333333e-3f), r2, -1.66666667e-1f);
  sine = fused(sine * r2, rest, rest);
  float cosine = fused(2.48015873e-5f, r2, -1.38888889e-3f);
  cosine = fused(fused(fused(cosine, r2, 4.16666667e-2f), r2, -0.5f), r2, 1.0f);
  const bool is_odd = (quarter & 0x40000000u) != 0;
  const uint32_t negative_x = (quarter + 0x40000000u) & 0x80000000u, negative_y = quarter & 0x80000000u;
  return {from_bits(int32_t(uint32_t(bits_of(is_odd ? sine : cosine)) ^ negative_x)),
          from_bits(int32_t(uint32_t(bits_of(is_odd ? cosine : sine)) ^ negative_y))};
}

// Two numbers of each of the `n` pairs of words.
template <class Real>
NNORM_INLINE void normal_pairs(const uint32_t* of_u, const uint32_t* of_v, size_t n, Real* first, Real* second) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const float u = fused(float(int32_t(of_u[i] >> 8)), 0x1p-24f, 0x1p-25f);
    const float radius = std::sqrt(log2_of(u) * -1.38629436f);  // −2·ln 2
    const Point point = on_circle(of_v[i]);
    first[i] = Real(radius * point.x);
    second[i] = Real(radius * point.y);
  }
}

// Writes the noise of a tile of `n` elements that starts at element `position` of set `set`. `z` has room for a whole tile.
template <class Real>
NNORM_INLINE void noise_of_tile(uint64_t seed, uint64_t set, size_t position, size_t n, Real* z) {
  // Element i of a tile has number i / counters of the four that counter i mod counters gives.
  constexpr size_t counters = row_tile / 4;
  const size_t used = n < counters ? n : counters;
  alignas(64) uint32_t words[4][counters];
  philox(seed, uint32_t(position / 4), uint32_t(uint64_t(position) >> 34), uint32_t(set), uint32_t(set >> 32), used, words);
  normal_pairs(words[0], words[1], used, z, z + counters);
  if (n > 2 * counters) normal_pairs(words[2], words[3], used, z + 2 * counters, z + 3 * counters);
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
