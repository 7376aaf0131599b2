// What the kernels share: accesses of 16 bytes, sums over the threads that share a row, division by a constant.
//
// The code is CUDA C++. For tests without a GPU it is also compiled as C++, with tests/cuda_on_host/ in place of CUDA.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define NNORM_DEVICE __device__ __forceinline__
#define NNORM_DYNAMIC_SHARED(bytes) extern __shared__ __align__(16) unsigned char bytes[]
#define NNORM_CHECK_ACCESS(pointer, bytes)
#else
#include "cuda_on_host.h"
#endif

#include <type_traits>

#include "nnorm/half_mathematics.h"
#include "nnorm/problems.h"
#include "nnorm/row_statistics.h"

namespace nnorm::cuda {

constexpr unsigned warp_size = 32;
constexpr size_t access_bytes = 16;  // the greatest single access of a thread

// The arithmetic of ψ for tensors of T.
template <class T>
using Evaluation = std::conditional_t<sizeof(T) == 2, ForHalf, Accurate>;

// Neighbouring elements that one instruction reads or writes.
template <class T, int width>
struct alignas(sizeof(T) * width) Access {
  T values[width];
};

template <class T>
constexpr int widest = int(access_bytes / sizeof(T));

template <int width, class T>
NNORM_DEVICE Access<T, width> load(const T* from) {
  NNORM_CHECK_ACCESS(from, sizeof(Access<T, width>));
  return *reinterpret_cast<const Access<T, width>*>(from);
}

// Writes to any memory. In some kernels nvcc 13 writes each element with its own instruction; see store_global().
template <int width, class T>
NNORM_DEVICE void store(T* to, const Access<T, width>& access) {
  NNORM_CHECK_ACCESS(to, sizeof access);
  *reinterpret_cast<Access<T, width>*>(to) = access;
}

// Writes to device memory in one instruction.
template <int width, class T>
NNORM_DEVICE void store_global(T* to, const Access<T, width>& access) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof access == 16) {
    uint32_t words[4];
    memcpy(words, &access, sizeof words);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else if constexpr (sizeof access == 8) {
    uint32_t words[2];
    memcpy(words, &access, sizeof words);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else
#endif
  {
    store(to, access);
  }
}

// Rounds all elements of an access, those of 16 bits in pairs if the device can.
template <class T, int width>
NNORM_DEVICE Access<T, width> narrowed(const Arithmetic<T> (&values)[width]) {
  Access<T, width> result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr bool in_pairs = sizeof(T) == 2 && width % 2 == 0;
#else
  constexpr bool in_pairs = false;
#endif
  if constexpr (in_pairs) {
#pragma unroll
    for (int j = 0; j < width; j += 2) {
      uint32_t pair;
      if constexpr (std::is_same_v<T, Float16>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[j + 1]), "f"(values[j]));
      else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[j + 1]), "f"(values[j]));
      memcpy(&result.values[j], &pair, sizeof pair);
    }
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j) narrow(values[j], result.values[j]);
  }
  return result;
}

// The number of elements between an address and the last boundary of 16 bytes.
template <class T>
size_t misalignment(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % access_bytes / sizeof(T);
}

// n/divisor for n < 2^31 by a multiplication (Granlund and Montgomery 1994, figure 4.1).
class Divisor {
 public:
  explicit Divisor(unsigned divisor) {
    while ((uint64_t(1) << shift_) < divisor) ++shift_;
    multiplier_ = unsigned(((((uint64_t(1) << shift_) - divisor) << 32) / divisor) + 1);
  }
  NNORM_DEVICE unsigned divide(unsigned n) const { return (__umulhi(n, multiplier_) + n) >> shift_; }

 private:
  unsigned multiplier_ = 0, shift_ = 0;
};

// The neighbouring lanes that have the same sum after sum_over_warp().
template <int count>
constexpr unsigned lanes_of_sum = warp_size / unsigned(count);

// Sums each of `count` values over a warp, the lanes in halves. Lanes j·lanes_of_sum and following then have the j-th sum in
// values[0]. In each round one half of the lanes continues with one half of the values and the other half with the rest, so
// that four sums take 6 exchanges instead of 20.
template <int count, class Real>
NNORM_DEVICE void sum_over_warp(Real (&values)[count]) {
  static_assert((count & (count - 1)) == 0 && count <= int(warp_size), "a power of two");
  unsigned distance = warp_size / 2;
#pragma unroll
  for (int left = count / 2; left > 0; left /= 2, distance /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const Real given = upper ? values[i] : values[i + left], own = upper ? values[i + left] : values[i];
      values[i] = own + __shfl_xor_sync(0xffffffffu, given, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) values[0] += __shfl_xor_sync(0xffffffffu, values[0], distance);
}

// The sums of a block's chains, in halves, in all its threads. Each call of a kernel has its own `turn` and with it its own
// memory, which is written again only after the barriers of the other turns.
//
// `own` is chain `chain`'s part of sum `sum`, of a thread that `has_one`.
template <int turn, int chains, int count, class Real>
NNORM_DEVICE void sums_of_chains(Real own, unsigned sum, unsigned chain, bool has_one, Real (&sums)[count]) {
  static_assert(turn >= 0 && (chains & (chains - 1)) == 0 && chains <= int(warp_size));
  __shared__ Real parts[count][chains];
  if (has_one) parts[sum][chain] = own;
  __syncthreads();
  constexpr int at_once = int(warp_size) / chains;
  const unsigned lane = threadIdx.x % warp_size;
#pragma unroll
  for (int first = 0; first < count; first += at_once) {
    const unsigned mine = unsigned(first) + lane / unsigned(chains);
    Real total = parts[mine < unsigned(count) ? mine : 0][lane % unsigned(chains)];
#pragma unroll
    for (unsigned distance = unsigned(chains) / 2; distance > 0; distance /= 2)
      total += __shfl_xor_sync(0xffffffffu, total, distance);
#pragma unroll
    for (int i = first; i < first + at_once && i < count; ++i)
      sums[i] = __shfl_sync(0xffffffffu, total, unsigned(i - first) * unsigned(chains));
  }
}

// The sums over a tile in all lanes of a warp that have them: lanes s·apart and following have sum s. `values` are the sums of
// a lane, which has `places` of each, place by place.
template <int places, int all, class Real>
NNORM_DEVICE Real sum_of_tile(Real (&values)[all]) {
  static_assert(places == 1 || places == 2);
  sum_over_warp(values);
  return places == 2 ? values[0] + __shfl_xor_sync(0xffffffffu, values[0], warp_size / 2) : values[0];
}

// The sums over a row of which each warp of `threads` threads has one tile: tile w belongs to warp w.
template <int threads, int turn, int places, int count, class Real>
NNORM_DEVICE void sums_of_team(Real (&values)[places * count], Real (&sums)[count]) {
  constexpr int warps = threads / int(warp_size);
  constexpr unsigned apart = lanes_of_sum<places * count>;
  const Real own = sum_of_tile<places>(values);
  if constexpr (warps > 1) {
    const unsigned lane = threadIdx.x % warp_size;
    sums_of_chains<turn, warps>(own, lane / apart, threadIdx.x / warp_size, lane % apart == 0 && lane < count * apart, sums);
  } else if constexpr (places * count > 1) {
#pragma unroll
    for (int s = 0; s < count; ++s) sums[s] = __shfl_sync(0xffffffffu, own, unsigned(s) * apart);
  } else {
    sums[0] = own;
  }
}

}  // namespace nnorm::cuda
