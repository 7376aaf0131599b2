// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four random words for each counter.
//
// A word of 32 bits has a lane of 64, as wide as the product of two words; what is above the word does not count. Intrinsics
// multiply, because GCC takes the instruction for such a product in no loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "nnorm/mathematics.h"

namespace nnorm {
inline namespace NNORM_INSTRUCTION_SET {

#if defined(__AVX512F__)
constexpr size_t word_lanes = 8;
#elif defined(__AVX2__)
constexpr size_t word_lanes = 4;
#else
constexpr size_t word_lanes = 2;
#endif
typedef uint64_t Words __attribute__((vector_size(8 * word_lanes)));

// The products of the words with `factor`.
NNORM_INLINE Words product(Words words, uint32_t factor) {
#if defined(__AVX512F__)
  // The form without a mask makes GCC 12 warn that its operand is not initialized.
  return Words(_mm512_maskz_mul_epu32(0xff, __m512i(words), _mm512_set1_epi64(factor)));
#elif defined(__AVX2__)
  return Words(_mm256_mul_epu32(__m256i(words), _mm256_set1_epi64x(factor)));
#elif defined(__SSE2__)
  return Words(_mm_mul_epu32(__m128i(words), _mm_set1_epi64x(factor)));
#elif defined(__ARM_NEON)
  return Words(vmull_n_u32(vmovn_u64(uint64x2_t(words)), factor));
#else
  return (words & 0xFFFFFFFFu) * uint64_t(factor);
#endif
}

NNORM_INLINE void store(Words words, uint32_t* to) {
  typedef uint32_t Narrow __attribute__((vector_size(4 * word_lanes)));
  const Narrow narrow = __builtin_convertvector(words, Narrow);
  std::memcpy(to, &narrow, sizeof narrow);
}

// The words of `count` counters (first, second, third, fourth), (first + 1, …), …, and of more up to a full step.
template <size_t room>
NNORM_INLINE void philox(uint64_t seed, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth, size_t count,
                         uint32_t (&words)[4][room]) {
  constexpr size_t vectors = 4, step = vectors * word_lanes;  // independent ones: a round waits for its multiplications
  static_assert(room % step == 0, "a step writes all its words");
  Words place{};
  for (size_t lane = 0; lane < word_lanes; ++lane) place[lane] = first + lane;
  for (size_t i = 0; i < count; i += step) {
    Words a[vectors], b[vectors], c[vectors], d[vectors];
    NNORM_UNROLL for (size_t v = 0; v < vectors; ++v) {
      a[v] = place + (i + v * word_lanes);
      b[v] = Words{} + second;
      c[v] = Words{} + third;
      d[v] = Words{} + fourth;
    }
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    NNORM_UNROLL for (int round = 0; round < 10; ++round) {
      NNORM_UNROLL for (size_t v = 0; v < vectors; ++v) {
        const Words of_a = product(a[v], 0xD2511F53u), of_c = product(c[v], 0xCD9E8D57u);
        a[v] = (of_c >> 32) ^ b[v] ^ key0;
        c[v] = (of_a >> 32) ^ d[v] ^ key1;
        b[v] = of_c;
        d[v] = of_a;
      }
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    NNORM_UNROLL for (size_t v = 0; v < vectors; ++v) {
      const size_t at = i + v * word_lanes;
      store(a[v], words[0] + at);
      store(b[v], words[1] + at);
      store(c[v], words[2] + at);
      store(d[v], words[3] + at);
    }
  }
}

}  // namespace NNORM_INSTRUCTION_SET
}  // namespace nnorm
