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
  if constexpr (sizeof access == access_bytes) {
    uint32_t words[access_bytes / sizeof(uint32_t)];
    memcpy(words, &access, sizeof words);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
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

NNORM_DEVICE double inverse_root(double x) { return 1 / std::sqrt(x); }
NNORM_DEVICE float inverse_root(float x) {
#if defined(__CUDA_ARCH__)
  return __frsqrt_rn(x);
#else
  return 1 / std::sqrt(x);
#endif
}

// Sums each of `count` values over a warp. The j-th sum is then in values[0] of the warp_size/count lanes that start at
// lane_of_sum<count>(j). In each round one half of the lanes continues with one half of the values and the other half with
// the rest, so that four sums take 6 exchanges instead of 20.
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

template <int count>
NNORM_DEVICE unsigned lane_of_sum(int j) {
  return unsigned(j) * (warp_size / count);
}

// Replaces each of `count` values by its sum over the `threads` threads that share a row: a warp, or the whole block.
// All threads get the same bits. Each sum of a row has its own `turn` and with it its own scratch memory, which is written
// again only after the barriers of the other turns.
template <int threads, int turn, int count, class Real>
NNORM_DEVICE void sum_of_team(Real (&values)[count]) {
  static_assert(threads % warp_size == 0 && turn >= 0);
  sum_over_warp(values);
  if constexpr (threads == int(warp_size) && count > 1) {
    const Real own = values[0];
#pragma unroll
    for (int j = 0; j < count; ++j) values[j] = __shfl_sync(0xffffffffu, own, lane_of_sum<count>(j));
  } else if constexpr (threads > int(warp_size)) {
    constexpr int warps = threads / int(warp_size);
    __shared__ Real scratch[count][warps];  // one for each turn
    const unsigned lane = threadIdx.x % warp_size;
    if (lane % lane_of_sum<count>(1) == 0) scratch[lane / lane_of_sum<count>(1)][threadIdx.x / warp_size] = values[0];
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      values[i] = 0;
      for (int warp = 0; warp < warps; ++warp) values[i] += scratch[i][warp];
    }
  }
}

}  // namespace nnorm::cuda
